//! One thread finds the bits that ranks on threads of their own come to.

use ringseal::collective::{
    Algorithm, Buffers, Communicator, Crypto, Options, Partition, Request, reference,
};
use ringseal::{Dtype, Error, ReduceOp};

use crate::group::{data, group, on_all, options};

/// No elements, fewer than ranks, chunks that don't end at 16 bytes, and longer ones of several records.
const COUNTS: [usize; 6] = [0, 1, 7, 16, 33, 129];
/// Longer than what goes through the ranks at once.
const LONG: usize = (40 << 10) + 5;

fn requests(ranks: usize) -> Vec<Request> {
    let mut requests: Vec<_> = ReduceOp::ALL.map(Request::AllReduce).into();
    requests.extend(ReduceOp::ALL.map(Request::ReduceScatter));
    requests.extend([Request::AllGather, Request::Broadcast { root: 0 }]);
    requests.push(Request::Broadcast { root: ranks - 1 });
    requests
}

/// Runs one collective on one rank; compares what it gets.
fn check(rank: &mut Communicator, request: Request, dtype: Dtype, inputs: &[Vec<u8>], right: &[u8]) {
    let (own, ranks) = (rank.rank(), rank.ranks());
    let elements = Partition::new(right.len() / dtype.size(), ranks).range(own);
    let chunk = elements.start * dtype.size()..elements.end * dtype.size();
    let (given, got) = match request {
        Request::AllReduce(_) => (0..right.len(), 0..right.len()),
        Request::ReduceScatter(_) => (0..right.len(), chunk),
        Request::AllGather => (chunk, 0..right.len()),
        Request::Broadcast { root } if root != own => (0..0, 0..right.len()),
        Request::Broadcast { .. } => (0..right.len(), 0..right.len()),
    };
    let mut output = vec![0xa5; got.len()];
    let buffers = Buffers::Apart { input: &inputs[own][given], output: &mut output };
    rank.run(request, dtype, buffers).unwrap();
    assert_eq!(output, right[got], "{request:?} of {dtype:?} on rank {own} of {ranks}");
}

fn agrees(algorithm: Algorithm) {
    for ranks in 1..=8 {
        let mut cases = Vec::new();
        for request in requests(ranks) {
            for dtype in Dtype::ALL {
                let narrow = [Dtype::Bf16, Dtype::U8].contains(&dtype);
                let long = narrow && request == Request::AllReduce(ReduceOp::Avg) && ranks <= 3;
                for count in COUNTS.into_iter().chain(long.then_some(LONG)) {
                    let seed = |rank: usize| (cases.len() << 8 | rank) as u64;
                    let inputs: Vec<_> = (0..ranks).map(|rank| data(dtype, count, seed(rank))).collect();
                    let slices: Vec<_> = inputs.iter().map(Vec::as_slice).collect();
                    let right = reference::results(request, algorithm, dtype, &slices).unwrap();
                    cases.push((request, dtype, inputs, right));
                }
            }
        }
        let options = Options { algorithm, crypto: Crypto::None, record_bytes: 256, ..options() };
        on_all(&mut group(ranks, &options), |rank| {
            cases
                .iter()
                .for_each(|(request, dtype, inputs, right)| check(rank, *request, *dtype, inputs, right));
        });
    }
}

#[test]
fn of_rings() {
    agrees(Algorithm::Ring);
}

#[test]
fn of_relay_rings() {
    agrees(Algorithm::RelayRing);
}

#[test]
fn of_direct() {
    agrees(Algorithm::Direct);
}

#[test]
fn of_trees() {
    agrees(Algorithm::Tree);
}

#[test]
fn of_exchanges() {
    agrees(Algorithm::Exchange);
}

#[test]
fn inputs_that_no_group_would_take_are_refused() {
    let refused = |request, dtype, inputs: &[&[u8]]| {
        let result = reference::results(request, Algorithm::Ring, dtype, inputs);
        assert!(matches!(result, Err(Error::InvalidArgument(_))), "{request:?} of {inputs:?}: {result:?}");
    };
    refused(Request::AllGather, Dtype::U8, &[]);
    refused(Request::AllGather, Dtype::U8, &[&[1, 2], &[1]]);
    refused(Request::AllReduce(ReduceOp::Sum), Dtype::F32, &[&[1, 2], &[3, 4]]);
    refused(Request::Broadcast { root: 2 }, Dtype::U8, &[&[1], &[2]]);
}
