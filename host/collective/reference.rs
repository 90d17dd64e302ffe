//! What a collective gives, found by one thread: with no ranks at work, no records and no cryptography. For tests and
//! checks of other ways to carry a schedule out, for which a group of threads would be too slow.

use std::borrow::Cow;
use std::ops::Range;

use super::reduce::{combine, divide, is_narrow, narrow, widen};
use super::schedule::{Algorithm, Operand, Schedule, Step};
use super::{Partition, Request};
use crate::{Dtype, Error, ReduceOp, Result};

/// Bytes of a chunk that go through all ranks before the next ones do, to stay in the second-level cache. A multiple of
/// every element's size.
const PIECE_BYTES: usize = 32 << 10;

/// The vector that a collective of ranks with these inputs leaves, bit for bit as a
/// [`Communicator`](super::Communicator) of that algorithm has it on every rank; of a reduce-scatter each rank has its
/// [chunk](Partition).
///
/// Each rank's input is the whole vector. As in a collective, only its chunk is read for an all-gather, and only the
/// root's for a broadcast.
///
/// # Errors
/// [`Error::InvalidArgument`] when there is no input, when inputs differ in length or end within an element, or when the
/// root is no rank.
pub fn results(request: Request, algorithm: Algorithm, dtype: Dtype, inputs: &[&[u8]]) -> Result<Vec<u8>> {
    let ranks = inputs.len();
    let Some(bytes) = inputs.first().map(|input| input.len()) else {
        return Err(Error::InvalidArgument("a collective has at least one rank's input".into()));
    };
    if bytes % dtype.size() != 0 || inputs.iter().any(|input| input.len() != bytes) {
        return Err(Error::InvalidArgument(format!(
            "inputs of all ranks must have the same number of whole elements, each of {} bytes",
            dtype.size()
        )));
    }
    if let Request::Broadcast { root } = request
        && root >= ranks
    {
        return Err(Error::InvalidArgument(format!("root {root}: there are {ranks} ranks")));
    }
    let schedule = Schedule::new(request.collective(), algorithm, ranks);
    let count = bytes / dtype.size();
    let (partition, op) = match request {
        Request::AllReduce(op) => (Partition::aligned(count, schedule.chunks, dtype), op),
        Request::ReduceScatter(op) => (Partition::new(count, schedule.chunks), op),
        // Nothing is reduced.
        _ => (Partition::new(count, schedule.chunks), ReduceOp::Sum),
    };
    let replay = Replay { programs: &schedule.programs, inputs, dtype, op };
    let mut vector = vec![0; bytes];
    let mut stored = vec![false; schedule.chunks];
    for (rank, program) in schedule.programs.iter().enumerate() {
        for (number, step) in program.iter().enumerate() {
            // All ranks that store a chunk store the same bits.
            if !step.store || std::mem::replace(&mut stored[step.chunk], true) {
                continue;
            }
            let chunk = partition.range(step.chunk);
            let end = chunk.end * dtype.size();
            for start in (chunk.start * dtype.size()..end).step_by(PIECE_BYTES) {
                let piece = start..end.min(start + PIECE_BYTES);
                vector[piece.clone()].copy_from_slice(&replay.result(rank, number, piece));
            }
        }
    }
    debug_assert!(stored.iter().all(|stored| *stored), "{request:?} by {algorithm:?} stores every chunk");
    Ok(vector)
}

/// Follows a result back to the inputs.
struct Replay<'a> {
    programs: &'a [Vec<Step>],
    inputs: &'a [&'a [u8]],
    dtype: Dtype,
    op: ReduceOp,
}

impl<'a> Replay<'a> {
    /// What a rank's step makes of these bytes of its chunk.
    fn result(&self, rank: usize, number: usize, piece: Range<usize>) -> Cow<'a, [u8]> {
        let step = &self.programs[rank][number];
        let operand = |operand: &Operand| match operand {
            Operand::Local => Cow::Borrowed(&self.inputs[rank][piece.clone()]),
            // Whoever forwards it changes nothing.
            Operand::Received(origin) => self.result(origin.sealed_by, origin.sealed_in, piece.clone()),
        };
        let mut result = match step.operands.as_slice() {
            [only] => operand(only),
            [first, second] => {
                let mut result = operand(first).into_owned();
                combine(self.dtype, self.op, &mut result, &operand(second));
                Cow::Owned(result)
            }
            [first, others @ ..] if is_narrow(self.dtype) => {
                let widened = |narrow: &Operand| {
                    let mut floats = Vec::with_capacity(2 * piece.len());
                    widen(self.dtype, &operand(narrow), &mut floats);
                    floats
                };
                let mut sum = widened(first);
                others.iter().for_each(|other| combine(Dtype::F32, self.op, &mut sum, &widened(other)));
                let mut rounded = vec![0; piece.len()];
                narrow(self.dtype, &sum, &mut rounded);
                Cow::Owned(rounded)
            }
            [first, others @ ..] => {
                let mut result = operand(first).into_owned();
                others.iter().for_each(|other| combine(self.dtype, self.op, &mut result, &operand(other)));
                Cow::Owned(result)
            }
            [] => unreachable!("a step has an operand"),
        };
        if step.finish && self.op == ReduceOp::Avg {
            divide(self.dtype, result.to_mut(), self.programs.len());
        }
        result
    }
}
