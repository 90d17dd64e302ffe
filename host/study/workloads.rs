//! The gradient tensors of the models in the bucket study, computed from their published architectures.
//!
//! Each list is in parameter registration order (what `model.parameters()` yields); `DistributedDataParallel`
//! buckets it in reverse. Parameter counts are checked against the published ones by the tests.

/// A named list of gradient tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    /// The model's name as in the literature, such as `ResNet-50`.
    pub name: &'static str,
    /// Elements of each gradient tensor, in parameter registration order.
    pub tensors: Vec<usize>,
}

impl Workload {
    /// All parameters, counted in elements.
    pub fn parameters(&self) -> usize {
        self.tensors.iter().sum()
    }

    /// The six workloads of the study, smallest first.
    pub fn all() -> Vec<Self> {
        vec![resnet50(), resnet101(), bert_base(), bert_large(), gpt2_large(), gpt2_xl()]
    }

    /// The workload of that name, ignoring case.
    pub fn by_name(name: &str) -> Option<Self> {
        Self::all().into_iter().find(|workload| workload.name.eq_ignore_ascii_case(name))
    }
}

/// ResNet-50 (He et al. 2016, table 1), 1000 classes: 25,557,032 parameters.
pub fn resnet50() -> Workload {
    Workload { name: "ResNet-50", tensors: resnet_bottleneck([3, 4, 6, 3]) }
}

/// ResNet-101 (He et al. 2016, table 1), 1000 classes: 44,549,160 parameters.
pub fn resnet101() -> Workload {
    Workload { name: "ResNet-101", tensors: resnet_bottleneck([3, 4, 23, 3]) }
}

/// BERT-Base, uncased vocabulary, with the pooler (Devlin et al. 2019): 109,482,240 parameters.
pub fn bert_base() -> Workload {
    Workload { name: "BERT-Base", tensors: bert(768, 12) }
}

/// BERT-Large, uncased vocabulary, with the pooler (Devlin et al. 2019): 335,141,888 parameters.
pub fn bert_large() -> Workload {
    Workload { name: "BERT-Large", tensors: bert(1024, 24) }
}

/// GPT-2 Large (Radford et al. 2019), tied output embedding: 774,030,080 parameters.
pub fn gpt2_large() -> Workload {
    Workload { name: "GPT-2-Large", tensors: gpt2(1280, 36) }
}

/// GPT-2 XL (Radford et al. 2019), tied output embedding: 1,557,611,200 parameters.
pub fn gpt2_xl() -> Workload {
    Workload { name: "GPT-2-XL", tensors: gpt2(1600, 48) }
}

fn resnet_bottleneck(blocks: [usize; 4]) -> Vec<usize> {
    const EXPANSION: usize = 4;
    const CLASSES: usize = 1000;
    let mut tensors = Vec::new();
    let convolution = |tensors: &mut Vec<usize>, from: usize, to: usize, kernel: usize| {
        // A convolution without bias, then a batch normalisation's weight and bias.
        tensors.extend([from * to * kernel * kernel, to, to]);
    };
    convolution(&mut tensors, 3, 64, 7);
    let mut channels = 64;
    for (stage, &count) in blocks.iter().enumerate() {
        let width = 64 << stage;
        for block in 0..count {
            convolution(&mut tensors, channels, width, 1);
            convolution(&mut tensors, width, width, 3);
            convolution(&mut tensors, width, width * EXPANSION, 1);
            if block == 0 {
                // The projection shortcut.
                convolution(&mut tensors, channels, width * EXPANSION, 1);
            }
            channels = width * EXPANSION;
        }
    }
    tensors.extend([channels * CLASSES, CLASSES]);
    tensors
}

fn bert(hidden: usize, layers: usize) -> Vec<usize> {
    const VOCABULARY: usize = 30_522;
    const POSITIONS: usize = 512;
    const SEGMENTS: usize = 2;
    let dense = |from: usize, to: usize| [from * to, to];
    let norm = [hidden, hidden];
    let mut tensors = vec![VOCABULARY * hidden, POSITIONS * hidden, SEGMENTS * hidden];
    tensors.extend(norm);
    for _ in 0..layers {
        for _ in ["query", "key", "value", "output"] {
            tensors.extend(dense(hidden, hidden));
        }
        tensors.extend(norm);
        tensors.extend(dense(hidden, 4 * hidden));
        tensors.extend(dense(4 * hidden, hidden));
        tensors.extend(norm);
    }
    tensors.extend(dense(hidden, hidden));
    tensors
}

fn gpt2(width: usize, layers: usize) -> Vec<usize> {
    const VOCABULARY: usize = 50_257;
    const POSITIONS: usize = 1024;
    let dense = |from: usize, to: usize| [from * to, to];
    let norm = [width, width];
    let mut tensors = vec![VOCABULARY * width, POSITIONS * width];
    for _ in 0..layers {
        tensors.extend(norm);
        tensors.extend(dense(width, 3 * width));
        tensors.extend(dense(width, width));
        tensors.extend(norm);
        tensors.extend(dense(width, 4 * width));
        tensors.extend(dense(4 * width, width));
    }
    tensors.extend(norm);
    tensors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameter_counts_are_the_published_ones() {
        let expected = [25_557_032, 44_549_160, 109_482_240, 335_141_888, 774_030_080, 1_557_611_200];
        for (workload, parameters) in Workload::all().iter().zip(expected) {
            assert_eq!(workload.parameters(), parameters, "{}", workload.name);
        }
        assert_eq!(Workload::by_name("resnet-50"), Some(resnet50()));
        assert_eq!(Workload::by_name("resnet-51"), None);
    }
}
