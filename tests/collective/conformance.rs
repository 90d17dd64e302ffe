//! Every backend and algorithm gives the model's bits, on every rank, for every element type, operation and count.

use std::sync::Arc;

use ringseal::aead::{Aead, AesKey, Iv};
use ringseal::backend::{Backend, by_name};
use ringseal::collective::{
    Algorithm, Buffers, Communicator, Crypto, KeyLength, Options, Partition, Request,
};
use ringseal::{Dtype, Error, ReduceOp};

use crate::group::{group, inputs, on_all, options};
use crate::model::reduced;

const RANKS: [usize; 7] = [1, 2, 3, 4, 5, 7, 8];

/// One collective and what it must give.
struct Case {
    request: Request,
    dtype: Dtype,
    inputs: Vec<Vec<u8>>,
    /// The whole vector.
    wanted: Vec<u8>,
    in_place: bool,
}

impl Case {
    fn new(
        request: Request,
        algorithm: Algorithm,
        dtype: Dtype,
        count: usize,
        ranks: usize,
        seed: u64,
    ) -> Self {
        let inputs = inputs(dtype, count, ranks, seed);
        let wanted = match request {
            Request::AllReduce(op) => reduced(algorithm, false, dtype, op, &inputs),
            Request::ReduceScatter(op) => reduced(algorithm, true, dtype, op, &inputs),
            Request::AllGather => {
                (0..ranks).flat_map(|rank| inputs[rank][bytes(dtype, count, ranks, rank)].to_vec()).collect()
            }
            Request::Broadcast { root } => inputs[root].clone(),
        };
        Self { request, dtype, inputs, wanted, in_place: seed.is_multiple_of(2) }
    }

    /// Runs on one rank and checks everything that the rank then holds.
    fn run(&self, rank: &mut Communicator) {
        let input = &self.inputs[rank.rank()];
        let own = bytes(self.dtype, input.len() / self.dtype.size(), rank.ranks(), rank.rank());
        let what = || format!("{:?} {:?} rank {} of {}", self.request, self.dtype, rank.rank(), rank.ranks());
        if self.in_place {
            let what = what();
            let mut vector = input.clone();
            if self.request == Request::AllGather {
                vector.iter_mut().enumerate().for_each(|(at, byte)| {
                    if !own.contains(&at) {
                        *byte = 0xa5
                    }
                });
            }
            rank.run(self.request, self.dtype, Buffers::InPlace(&mut vector)).unwrap();
            let mut wanted = self.wanted.clone();
            if matches!(self.request, Request::ReduceScatter(_)) {
                wanted = input.clone();
                wanted[own.clone()].copy_from_slice(&self.wanted[own]);
            }
            assert_eq!(vector, wanted, "{what} in place");
            return;
        }
        let what = what();
        let (given, got) = match self.request {
            Request::AllReduce(_) => (0..input.len(), 0..input.len()),
            Request::ReduceScatter(_) => (0..input.len(), own),
            Request::AllGather => (own, 0..input.len()),
            Request::Broadcast { root } if root == rank.rank() => (0..input.len(), 0..input.len()),
            Request::Broadcast { .. } => (0..0, 0..input.len()),
        };
        // Nothing around the output may be touched, and any alignment is right.
        let mut frame = vec![0xa5; got.len() + 3];
        let end = got.len() + 1;
        let buffers = Buffers::Apart { input: &input[given], output: &mut frame[1..end] };
        rank.run(self.request, self.dtype, buffers).unwrap();
        assert_eq!(frame[1..end], self.wanted[got], "{what}");
        assert_eq!((frame[0], &frame[end..]), (0xa5, &[0xa5, 0xa5][..]), "{what}: beyond the output");
    }
}

fn bytes(dtype: Dtype, count: usize, ranks: usize, rank: usize) -> std::ops::Range<usize> {
    let elements = Partition::new(count, ranks).range(rank);
    elements.start * dtype.size()..elements.end * dtype.size()
}

/// All cases in a row, by one group.
fn run(options: &Options, algorithm: Algorithm, ranks: usize, cases: &[Case]) {
    let mut group = group(ranks, &Options { algorithm, ..options.clone() });
    on_all(&mut group, |rank| cases.iter().for_each(|case| case.run(rank)));
}

fn all_reduces(algorithm: Algorithm, ranks: usize, counts: &[usize]) -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in Dtype::ALL {
        for op in ReduceOp::ALL {
            for &count in counts {
                let seed = cases.len() as u64;
                cases.push(Case::new(Request::AllReduce(op), algorithm, dtype, count, ranks, seed));
            }
        }
    }
    cases
}

/// Counts 0, fewer than ranks, not divisible; and enough for several records (cases.md 17 and 18).
fn exhaustive(algorithm: Algorithm) {
    let counts: Vec<_> = (0..=33).chain([1023]).collect();
    for ranks in RANKS {
        let key = if ranks % 2 == 0 { KeyLength::Aes128 } else { KeyLength::Aes256 };
        let options = Options { crypto: Crypto::Gcm(key), record_bytes: 256, ..options() };
        run(&options, algorithm, ranks, &all_reduces(algorithm, ranks, &counts));
    }
}

#[test]
fn ring_all_reduce() {
    exhaustive(Algorithm::Ring);
}

#[test]
fn relay_ring_all_reduce() {
    exhaustive(Algorithm::RelayRing);
}

#[test]
fn direct_all_reduce() {
    exhaustive(Algorithm::Direct);
}

#[test]
fn tree_all_reduce() {
    exhaustive(Algorithm::Tree);
}

#[test]
fn reduce_scatter_all_gather_and_broadcast() {
    for algorithm in Algorithm::ALL {
        for ranks in RANKS {
            let mut requests: Vec<_> = ReduceOp::ALL.map(Request::ReduceScatter).into();
            requests.push(Request::AllGather);
            requests.extend((0..ranks).map(|root| Request::Broadcast { root }));
            let mut cases = Vec::new();
            for dtype in Dtype::ALL {
                for &request in &requests {
                    for count in [0, 1, 3, 8, 33, 130] {
                        // Two seeds in a row: in place and apart.
                        let seed = cases.len() as u64 / 2 + u64::from(count % 2 == 0);
                        cases.push(Case::new(request, algorithm, dtype, count, ranks, seed));
                    }
                }
            }
            run(&options(), algorithm, ranks, &cases);
        }
    }
}

#[test]
fn the_plain_baseline_gives_the_same_bits() {
    let options = Options { crypto: Crypto::None, ..options() };
    for algorithm in Algorithm::ALL {
        for ranks in [1, 4] {
            run(&options, algorithm, ranks, &all_reduces(algorithm, ranks, &[0, 3, 33, 130]));
        }
    }
}

/// Full records of the default length, and one that is not full.
#[test]
fn long_vectors() {
    let options = Options { timeout: crate::group::PATIENT, ..Options::default() };
    for algorithm in Algorithm::ALL {
        let case = |request, dtype, count, seed| Case::new(request, algorithm, dtype, count, 4, seed);
        let cases = [
            case(Request::AllReduce(ReduceOp::Sum), Dtype::F32, 250_007, 0),
            case(Request::AllReduce(ReduceOp::Avg), Dtype::Bf16, 500_009, 1),
            case(Request::AllReduce(ReduceOp::Sum), Dtype::F16, 300_001, 2),
        ];
        run(&options, algorithm, 4, &cases);
    }
}

/// The kernels' own source, every GPU thread of it, so only a few small vectors. As long as a backend has no AES-GCM, its
/// ranks must refuse.
#[test]
fn emulated_kernels() {
    let backend = by_name("emulated").unwrap();
    let aead = Aead::new(backend.as_ref(), &AesKey::from_bytes(&[0; 32]).unwrap());
    match aead.and_then(|aead| aead.seal_in_place(Iv::from_nonce(&[0; 12]), b"", &mut [0])) {
        Ok(_) => conforms(backend),
        Err(Error::Unsupported { .. }) => refuses(backend),
        Err(error) => panic!("{error}"),
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_kernels() {
    conforms(by_name("cuda").unwrap());
}

fn conforms(backend: Arc<dyn Backend>) {
    for algorithm in Algorithm::ALL {
        let request = Request::AllReduce(ReduceOp::Sum);
        for ranks in [2, 3] {
            let cases =
                [0, 5, 33].map(|count| Case::new(request, algorithm, Dtype::F32, count, ranks, count as u64));
            run(&Options { backend: backend.clone(), ..options() }, algorithm, ranks, &cases);
        }
    }
}

fn refuses(backend: Arc<dyn Backend>) {
    let mut group = group(3, &Options { backend, ..options() });
    let results = on_all(&mut group, |rank| {
        let mut vector = [1_u8; 40];
        (rank.all_reduce_in_place(&mut vector, ReduceOp::Sum), vector)
    });
    for (result, vector) in results {
        assert!(matches!(result, Err(Error::Unsupported { .. } | Error::Aborted { .. })), "{result:?}");
        assert_eq!(vector, [0; 40]);
    }
}
