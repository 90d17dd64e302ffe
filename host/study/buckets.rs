//! How `DistributedDataParallel` groups gradients into all-reduces.

use super::workloads::Workload;
use crate::collective::schedule::{Algorithm, Collective, Schedule};

/// Bytes of DDP's first bucket; small, so that communication starts early in the backward pass.
pub const FIRST_BUCKET_BYTES: usize = 1 << 20;
/// DDP's default `bucket_cap_mb`, in MiB.
pub const DEFAULT_CAP_MIB: usize = 25;

/// Elements of the tensors of each all-reduce of one iteration, in the order in which the backward pass issues them.
///
/// PyTorch's rule (`compute_bucket_assignment_by_size`): tensors in reverse registration order join the open
/// bucket, which closes once it holds at least its cap: 1 MiB for the first, `cap_mib` MiB for the others. A tensor
/// is never split, so a bucket may exceed its cap by almost a whole tensor. `element_bytes` is 4 for f32 gradients.
/// A cap below 1 MiB also bounds the first bucket.
pub fn buckets(workload: &Workload, cap_mib: usize, element_bytes: usize) -> Vec<Vec<usize>> {
    let cap = cap_mib << 20;
    let mut buckets = Vec::new();
    let mut open = Vec::new();
    for &elements in workload.tensors.iter().rev() {
        open.push(elements);
        let limit = if buckets.is_empty() { FIRST_BUCKET_BYTES.min(cap) } else { cap };
        if open.iter().sum::<usize>() * element_bytes >= limit {
            buckets.push(std::mem::take(&mut open));
        }
    }
    if !open.is_empty() {
        buckets.push(open);
    }
    buckets
}

/// Bytes of each of the [`buckets`].
pub fn bucket_bytes(workload: &Workload, cap_mib: usize, element_bytes: usize) -> Vec<usize> {
    let bytes = |bucket: &Vec<usize>| bucket.iter().sum::<usize>() * element_bytes;
    buckets(workload, cap_mib, element_bytes).iter().map(bytes).collect()
}

/// Cryptographic operations (seals and opens) of one rank for `all_reduces` all-reduces over `ranks` ranks with the
/// published secured ring, which encrypts and authenticates at every hop: `4 k (n - 1)` (arXiv 2501.11771), counted from
/// the ring's schedule. None without ranks.
///
/// That is for one rank; the whole group does `ranks` times as many. The paper's text uses one figure for both.
pub fn secured_ring_operations(all_reduces: usize, ranks: usize) -> usize {
    if ranks == 0 {
        return 0;
    }
    all_reduces * Schedule::new(Collective::AllReduce, Algorithm::Ring, ranks).operations(0).total()
}

#[cfg(test)]
mod tests {
    use super::super::workloads;
    use super::*;

    #[test]
    fn buckets_hold_every_byte_once_and_close_at_the_cap() {
        for workload in Workload::all() {
            for cap_mib in [1, 5, 25, 100, 400] {
                let buckets = bucket_bytes(&workload, cap_mib, 4);
                assert_eq!(buckets.iter().sum::<usize>(), workload.parameters() * 4);
                let (_, full) = buckets.split_last().unwrap();
                assert!(full.iter().skip(1).all(|&bytes| bytes >= cap_mib << 20), "{}", workload.name);
            }
        }
    }

    #[test]
    fn the_papers_operation_counts() {
        // ResNet-50: 5 buckets at the default cap, 60 operations a rank at n = 4.
        let resnet = bucket_bytes(&workloads::resnet50(), DEFAULT_CAP_MIB, 4);
        assert_eq!(resnet.len(), 5);
        assert_eq!(secured_ring_operations(resnet.len(), 4), 60);
        // The paper's 1704 for GPT-2 XL at n = 4 stands for 142 all-reduces. PyTorch's rule over the tensors of the
        // published architecture gives three more.
        assert_eq!(secured_ring_operations(142, 4), 1704);
        assert_eq!(bucket_bytes(&workloads::gpt2_xl(), DEFAULT_CAP_MIB, 4).len(), 145);
        assert_eq!(secured_ring_operations(7, 1), 0);
    }
}
