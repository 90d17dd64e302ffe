//! A backward pass as matrix products and all-reduces in the order in which DDP issues them, and what is read off a run of it
//! on GPUs: `benches/timeline` runs it.

use super::buckets::buckets;
use super::workloads::Workload;

/// Sides of matrices are multiples of this, as tensor cores want them.
const SIDE: usize = 64;
/// Tensors with fewer elements are biases, norms and small convolutions, whose products take no time worth a launch.
const LEAST_ELEMENTS: usize = 1 << 15;

/// The weights of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrix {
    /// Where its gradient begins in its bucket, in elements.
    pub offset: usize,
    /// Rows: features that go out.
    pub rows: usize,
    /// Columns: features that come in.
    pub columns: usize,
}

/// The layers whose gradients are reduced together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// Elements of all gradients.
    pub elements: usize,
    /// Layers in the order in which their gradients are computed.
    pub matrices: Vec<Matrix>,
}

/// The backward pass of one iteration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backward {
    /// In the order in which gradients are computed and buckets reduced.
    pub buckets: Vec<Bucket>,
}

impl Backward {
    /// That of a workload with gradients of f32, in buckets by DDP's rule with this cap.
    ///
    /// A workload knows the elements of its tensors, but not their shapes: each tensor of at least 2^15 elements stands for a
    /// matrix that is as square as multiples of 64 allow and no larger than it. An embedding's does as well, which is right where
    /// it is the output layer's too.
    pub fn new(workload: &Workload, cap_mib: usize) -> Self {
        let bucket = |tensors: Vec<usize>| {
            let mut elements = 0;
            let mut matrices = Vec::new();
            for tensor in tensors {
                matrices.extend(Matrix::of(elements, tensor));
                elements += tensor;
            }
            Bucket { elements, matrices }
        };
        Self { buckets: buckets(workload, cap_mib, 4).into_iter().map(bucket).collect() }
    }

    /// All layers.
    pub fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        self.buckets.iter().flat_map(|bucket| &bucket.matrices)
    }

    /// Multiplications and additions of one iteration, counted apart, when each rank has so many tokens (rows of activations):
    /// each layer has a product for the gradient of its input and one for that of its weights.
    pub fn operations(&self, tokens: usize) -> f64 {
        self.matrices().map(|matrix| 4.0 * (matrix.rows * matrix.columns) as f64 * tokens as f64).sum()
    }

    /// The longest side of any matrix.
    pub fn longest_side(&self) -> usize {
        self.matrices().map(|matrix| matrix.rows.max(matrix.columns)).max().unwrap_or(0)
    }
}

impl Matrix {
    fn of(offset: usize, elements: usize) -> Option<Self> {
        if elements < LEAST_ELEMENTS {
            return None;
        }
        let rows = elements.isqrt() / SIDE * SIDE;
        Some(Self { offset, rows, columns: elements / rows / SIDE * SIDE })
    }
}

/// How long an iteration took, or the median one of many.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Iteration {
    /// Microseconds until all gradients were reduced.
    pub total_us: f64,
    /// Microseconds until the last product was done.
    pub compute_us: f64,
}

impl Iteration {
    /// That of several ranks: the iteration ends with the last.
    pub fn of_ranks(ranks: impl IntoIterator<Item = Self>) -> Option<Self> {
        ranks.into_iter().reduce(|a, b| Self {
            total_us: a.total_us.max(b.total_us),
            compute_us: a.compute_us.max(b.compute_us),
        })
    }

    /// The median of each time. None of none.
    pub fn median(all: &[Self]) -> Option<Self> {
        let median = |of: fn(&Self) -> f64| {
            let mut times: Vec<f64> = all.iter().map(of).collect();
            times.sort_by(f64::total_cmp);
            times.get(times.len() / 2).copied()
        };
        Some(Self { total_us: median(|one| one.total_us)?, compute_us: median(|one| one.compute_us)? })
    }

    /// Communication that computing does not hide, in microseconds, when computing alone takes `alone`. What the products
    /// lose to the communication beside them counts.
    pub fn exposed_us(&self, alone: &Self) -> f64 {
        self.total_us - alone.total_us
    }

    /// How much longer the products take than alone: 0.1 is a tenth.
    pub fn slowdown(&self, alone: &Self) -> f64 {
        self.compute_us / alone.compute_us - 1.0
    }

    /// Microseconds that security adds to an iteration which takes `plain` without it.
    pub fn security_us(&self, plain: &Self) -> f64 {
        self.total_us - plain.total_us
    }
}

#[cfg(test)]
mod tests {
    use super::super::buckets::{DEFAULT_CAP_MIB, bucket_bytes};
    use super::super::workloads::{self, Workload};
    use super::*;

    #[test]
    fn layers_come_in_reverse_and_lie_in_their_buckets() {
        // Registered in this order; the last is computed first. 256 Ki elements fill the first bucket of 1 MiB.
        let workload = Workload { name: "", tensors: vec![1 << 20, 100, 1 << 17, 1000, 1 << 18] };
        let backward = Backward::new(&workload, 25);
        let matrix = |offset, rows, columns| Matrix { offset, rows, columns };
        let first = Bucket { elements: 1 << 18, matrices: vec![matrix(0, 512, 512)] };
        let second = Bucket {
            elements: 1000 + (1 << 17) + 100 + (1 << 20),
            matrices: vec![matrix(1000, 320, 384), matrix(1000 + (1 << 17) + 100, 1024, 1024)],
        };
        assert_eq!(backward.buckets, [first, second]);
        assert_eq!(backward.longest_side(), 1024);
        assert_eq!(backward.operations(10), 40.0 * (512.0 * 512.0 + 320.0 * 384.0 + 1024.0 * 1024.0));
    }

    #[test]
    fn matrices_stay_in_their_tensors_and_hold_almost_all_of_them() {
        for workload in Workload::all() {
            let backward = Backward::new(&workload, DEFAULT_CAP_MIB);
            let elements: Vec<_> = backward.buckets.iter().map(|bucket| 4 * bucket.elements).collect();
            assert_eq!(elements, bucket_bytes(&workload, DEFAULT_CAP_MIB, 4));
            for bucket in &backward.buckets {
                let mut end = 0;
                for matrix in &bucket.matrices {
                    assert!(matrix.offset >= end && matrix.rows.is_multiple_of(64));
                    assert!(matrix.columns.is_multiple_of(64) && matrix.columns > 0);
                    end = matrix.offset + matrix.rows * matrix.columns;
                }
                assert!(end <= bucket.elements);
            }
        }
        let backward = Backward::new(&workloads::bert_large(), DEFAULT_CAP_MIB);
        let share = backward.operations(1) / (4.0 * workloads::bert_large().parameters() as f64);
        assert!((0.97..=1.0).contains(&share), "{share}");
    }

    #[test]
    fn figures_of_a_run() {
        let of = |total_us, compute_us| Iteration { total_us, compute_us };
        let ranks = [of(10.0, 9.0), of(9.5, 9.5)];
        assert_eq!(Iteration::of_ranks(ranks), Some(of(10.0, 9.5)));
        assert_eq!(Iteration::of_ranks([]), None);
        let median = Iteration::median(&[of(1.0, 0.5), of(30.0, 0.1), of(2.0, 0.4)]);
        assert_eq!(median, Some(of(2.0, 0.4)));
        assert_eq!(Iteration::median(&[]), None);
        let (alone, plain, sealed) = (of(100.0, 100.0), of(120.0, 110.0), of(130.0, 125.0));
        assert_eq!((sealed.exposed_us(&alone), plain.exposed_us(&alone)), (30.0, 20.0));
        assert_eq!(sealed.security_us(&plain), 10.0);
        assert_eq!((sealed.slowdown(&alone), alone.slowdown(&alone)), (0.25, 0.0));
    }
}
