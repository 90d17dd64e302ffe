//! A training iteration: gradients become ready while the backward pass runs, and are reduced meanwhile.
//!
//! `DistributedDataParallel` reduces a bucket as soon as its gradients are there and the bucket before is done, on a stream
//! of its own. With `r` the time at which bucket `b` is ready and `c` what its all-reduce takes,
//!
//! ```text
//! end(b) = max(r(b), end(b - 1)) + c(b)
//! iteration = max(end of the backward pass, end of the last bucket)
//! ```
//!
//! The optimiser's step and the loading of data are left out; they are the same for all methods and could only make
//! slowdowns look smaller.

use super::buckets::bucket_bytes;
use super::model::Model;
use super::workloads::Workload;
use crate::Result;

/// When an iteration's gradients become ready.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// Bytes of each all-reduce, in the order in which they are issued, and the time in microseconds from the iteration's
    /// start at which all of its gradients are there.
    pub buckets: Vec<(usize, f64)>,
    /// The end of the backward pass.
    pub compute_us: f64,
}

impl Timeline {
    /// Buckets of f32 gradients with this cap, where the forward pass takes a third of `compute_us` and the backward pass,
    /// with twice the operations, the rest. Each gradient takes its share of the backward pass by its number of
    /// elements: right for layers of matrices, while early convolutions take more than their share.
    pub fn proportional(workload: &Workload, cap_mib: usize, compute_us: f64) -> Self {
        let sizes = bucket_bytes(workload, cap_mib, 4);
        let all = sizes.iter().sum::<usize>() as f64;
        let mut ready = 0.0;
        let buckets = sizes
            .into_iter()
            .map(|bytes| {
                ready += bytes as f64;
                (bytes, compute_us * (1.0 + 2.0 * ready / all) / 3.0)
            })
            .collect();
        Self { buckets, compute_us }
    }

    /// An iteration that only communicates.
    pub fn communication(workload: &Workload, cap_mib: usize) -> Self {
        Self::proportional(workload, cap_mib, 0.0)
    }

    /// Microseconds of the iteration when a bucket of so many bytes takes `us(bytes)`.
    ///
    /// # Errors
    /// Those of `us`.
    pub fn iteration_us(&self, mut us: impl FnMut(usize) -> Result<f64>) -> Result<f64> {
        let mut end = 0.0_f64;
        for &(bytes, ready) in &self.buckets {
            end = end.max(ready) + us(bytes)?;
        }
        Ok(end.max(self.compute_us))
    }

    /// The same, predicted by a model. Lengths that occur again are computed once.
    ///
    /// # Errors
    /// As [`Model::all_reduce_us`].
    pub fn predicted_us(&self, model: &Model<'_>) -> Result<f64> {
        let mut known = std::collections::HashMap::new();
        self.iteration_us(|bytes| match known.get(&bytes) {
            Some(us) => Ok(*us),
            None => {
                let us = model.all_reduce_us(bytes)?;
                known.insert(bytes, us);
                Ok(us)
            }
        })
    }
}

/// Microseconds that an iteration's computation takes, assumed: `6 P` operations for each token of a transformer of `P`
/// parameters (Kaplan et al. 2020), 8 sequences a GPU of the longest length; three times the published forward operations
/// for each image of a ResNet (He et al. 2016, table 1, with a multiplication and an addition counted apart), 64 images a
/// GPU. `tflops` is what the GPU sustains, in 10^12 operations a second.
pub fn assumed_compute_us(workload: &Workload, tflops: f64) -> f64 {
    let operations = match workload.name {
        "ResNet-50" => 3.0 * 2.0 * 3.8e9 * 64.0,
        "ResNet-101" => 3.0 * 2.0 * 7.6e9 * 64.0,
        name => {
            let length = if name.starts_with("BERT") { 512.0 } else { 1024.0 };
            6.0 * workload.parameters() as f64 * length * 8.0
        }
    };
    operations / tflops / 1e6
}

#[cfg(test)]
mod tests {
    use super::super::workloads;
    use super::*;

    fn iteration(timeline: &Timeline, us: f64) -> f64 {
        timeline.iteration_us(|_| Ok(us)).unwrap()
    }

    #[test]
    fn communication_hides_behind_computation_until_it_is_longer() {
        let timeline = Timeline { buckets: vec![(1, 10.0), (1, 20.0), (1, 30.0)], compute_us: 30.0 };
        // Each is done before the next one is ready; the last one sticks out.
        assert_eq!(iteration(&timeline, 4.0), 34.0);
        assert_eq!(iteration(&timeline, 10.0), 40.0);
        // From then on they queue up behind the first.
        assert_eq!(iteration(&timeline, 20.0), 70.0);
        assert_eq!(iteration(&timeline, 0.0), 30.0);
    }

    #[test]
    fn gradients_are_ready_after_the_forward_pass_and_by_the_end() {
        let timeline = Timeline::proportional(&workloads::bert_base(), 25, 300.0);
        let ready: Vec<_> = timeline.buckets.iter().map(|bucket| bucket.1).collect();
        assert!(ready[0] > 100.0 && ready.is_sorted());
        assert!((ready.last().unwrap() - 300.0).abs() < 1e-9);
        let only = Timeline::communication(&workloads::bert_base(), 25);
        assert_eq!(iteration(&only, 2.0), 2.0 * only.buckets.len() as f64);
    }

    /// 6 x 109,482,240 x 4096 operations at 200 x 10^12 a second.
    #[test]
    fn assumed_computation_grows_with_the_parameters() {
        let us = assumed_compute_us(&workloads::bert_base(), 200.0);
        assert!((us - 13_453.2).abs() < 1.0, "{us}");
        let [small, large] = [workloads::resnet50(), workloads::resnet101()]
            .map(|workload| assumed_compute_us(&workload, 200.0));
        assert!((large / small - 2.0).abs() < 1e-9);
    }
}
