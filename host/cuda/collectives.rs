//! What can be asked of ranks on GPUs, whoever carries their records.

use super::{RankBuffers, Stream};
use crate::collective::Request;
use crate::{Dtype, Error, ReduceOp, Result};

/// Collectives on device memory, by the ranks of a group that this process has: all of them ([`GpuGroup`](super::GpuGroup),
/// [`AutoGroup`](super::AutoGroup), [`SeedGroup`](super::SeedGroup)) or one ([`GpuCommunicator`](super::GpuCommunicator),
/// [`AutoCommunicator`](super::AutoCommunicator), [`NcclCommunicator`](super::NcclCommunicator),
/// [`GpuNodes`](super::GpuNodes)). Buffers and streams are given one for each of these ranks, in their order.
pub trait Collectives: Send {
    /// Queues a collective on the ranks' streams, and doesn't wait, unless the type says so. All ranks of the group do the same
    /// ones in the same order, and a rank's run one after another, on whatever streams they are. `count` is of the whole vector, of
    /// which [`RankBuffers`] says what part each rank gives and gets; its chunks are
    /// [`Partition`](crate::collective::Partition)'s, and its bits those of the CPU's ranks. Can be captured in a graph, if the same collective was done before outside of one on as many elements of as many bytes, and unless
    /// the type says that it can't. A graph has its epoch's keys: when the ranks have gone on to another epoch, or have been
    /// [rekeyed](Self::rekey), it fails on all of them with [`Error::KeyExhausted`], and nothing is sealed. What orders a graph's
    /// launches is the caller's: each must come after the rank's collective before it, and before the one after it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the vector is longer than the group was set up for, the root is no rank, or the
    /// buffers and streams are not one for each rank, or when a stream is being captured and the collective would be the first of an
    /// epoch; [`Error::Poisoned`] after a failure; [`Error::KeyExhausted`] when
    /// one key may not encrypt that much; [`Error::Cuda`]; what the type says.
    ///
    /// # Safety
    /// Each rank's buffers hold what it gives and gets, on its device, aligned to an element, and are left alone until its
    /// stream, which is the device's, has passed the collective. The streams run beside each other: none waits for another's
    /// collective.
    unsafe fn run(
        &mut self,
        request: Request,
        buffers: &[RankBuffers],
        count: usize,
        dtype: Dtype,
        streams: &[&Stream],
    ) -> Result<()>;

    /// Asks how the collectives that the ranks' streams have passed went. Wait for the streams first, or call
    /// [`Self::finish`].
    ///
    /// # Errors
    /// The first failure: [`Error::Record`], [`Error::Deadline`] or [`Error::KeyExhausted`], in the words of the rank that saw
    /// it where it can be asked, else [`Error::Aborted`]; [`Error::Lost`] when a rank's process ended. The ranks carry no data
    /// after it.
    fn outcome(&mut self) -> Result<()>;

    /// Waits until `streams`, those of the collectives so far, have passed all that is on them, and asks how the
    /// collectives went.
    ///
    /// # Errors
    /// As [`Self::outcome`]; [`Error::Cuda`].
    fn finish(&mut self, streams: &[&Stream]) -> Result<()> {
        streams.iter().try_for_each(|stream| stream.synchronize())?;
        self.outcome()
    }

    /// Waits for the ranks' devices, and starts a new session with new keys, together with all other ranks. Ends the
    /// poisoning after a failure, unless a rank was lost.
    ///
    /// # Errors
    /// [`Error::Handshake`], [`Error::Cuda`], [`Error::Randomness`]. The ranks are poisoned then.
    fn rekey(&mut self) -> Result<()>;

    /// Whether a collective has failed and [`Self::rekey`] is needed.
    fn is_poisoned(&self) -> bool;

    /// Leaves in good order, together with the ranks of other processes. Ranks that are only dropped leave at once, and the
    /// others' collectives fail.
    ///
    /// # Errors
    /// [`Error::Handshake`] when another rank doesn't close within the timeout; [`Error::Cuda`].
    fn close(self: Box<Self>) -> Result<()>;

    /// Reduces vectors of `count` elements over all ranks into every rank's output: [`Self::run`].
    ///
    /// # Errors
    /// As [`Self::run`].
    ///
    /// # Safety
    /// As [`Self::run`].
    unsafe fn all_reduce(
        &mut self,
        buffers: &[RankBuffers],
        count: usize,
        dtype: Dtype,
        op: ReduceOp,
        streams: &[&Stream],
    ) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { self.run(Request::AllReduce(op), buffers, count, dtype, streams) }
    }

    /// Reduces vectors of `count` elements over all ranks; each gets its chunk of the result: [`Self::run`].
    ///
    /// # Errors
    /// As [`Self::run`].
    ///
    /// # Safety
    /// As [`Self::run`].
    unsafe fn reduce_scatter(
        &mut self,
        buffers: &[RankBuffers],
        count: usize,
        dtype: Dtype,
        op: ReduceOp,
        streams: &[&Stream],
    ) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { self.run(Request::ReduceScatter(op), buffers, count, dtype, streams) }
    }

    /// Gathers a vector of `count` elements, of which each rank gives its chunk, into every rank's output: [`Self::run`].
    ///
    /// # Errors
    /// As [`Self::run`].
    ///
    /// # Safety
    /// As [`Self::run`].
    unsafe fn all_gather(
        &mut self,
        buffers: &[RankBuffers],
        count: usize,
        dtype: Dtype,
        streams: &[&Stream],
    ) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { self.run(Request::AllGather, buffers, count, dtype, streams) }
    }

    /// Gives the vector of `count` elements of rank `root` to every rank's output: [`Self::run`].
    ///
    /// # Errors
    /// As [`Self::run`].
    ///
    /// # Safety
    /// As [`Self::run`].
    unsafe fn broadcast(
        &mut self,
        buffers: &[RankBuffers],
        count: usize,
        dtype: Dtype,
        root: usize,
        streams: &[&Stream],
    ) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { self.run(Request::Broadcast { root }, buffers, count, dtype, streams) }
    }

    /// Has keystream made, on a stream of low priority on each device, for the next collectives: all-reduces of f32, f16 or
    /// bf16 sums or averages, of `bytes` bytes each, in this order. Doesn't wait. Returns for how many there is, or will be,
    /// keystream: no more than fit [`GpuOptions::keystream`](super::GpuOptions::keystream), and none after a collective was
    /// captured in a graph, until [`Self::rekey`]. A rank may do so whatever the others do.
    ///
    /// What earlier collectives have used is wiped before, if they are over; it takes room until then. A ring uses what is
    /// made when all of the collective's is ready as it is launched, an exchange what is ready when it gets to a record; else
    /// keystream is made as without. What was made for another collective or length is wiped unused. What was asked for before
    /// stays as it was, also for collectives that are named again with another length. Results are the same.
    ///
    /// # Errors
    /// [`Error::Poisoned`] after a failure; [`Error::InvalidArgument`] when none is kept, without
    /// [`GpuOptions::keystream`](super::GpuOptions::keystream) and by types that can't; [`Error::Cuda`].
    fn make_keystream(&mut self, _bytes: &[usize]) -> Result<usize> {
        Err(no_keystream())
    }

    /// Waits until all keystream that was asked for is made, collectives with keystream are over, and all that was used is
    /// wiped.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    fn wait_for_keystream(&mut self) -> Result<()> {
        Ok(())
    }

    /// Records so far whose keystream was not there, of all ranks that this process has, modulo 2^32: of collectives with
    /// some keystream. Wait for the streams first.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    fn keystream_misses(&self) -> Result<u32> {
        Ok(0)
    }
}

/// The operation of an all-reduce, which is all that `whose` can do.
pub(super) fn only_all_reduces(request: Request, whose: &str) -> Result<ReduceOp> {
    match request {
        Request::AllReduce(op) => Ok(op),
        _ => {
            let what = format!("another collective than an all-reduce in {whose}");
            Err(Error::Unsupported { backend: "cuda", what })
        }
    }
}

pub(super) fn no_keystream() -> Error {
    Error::InvalidArgument("no keystream is kept: set GpuOptions::keystream".into())
}
