//! All-reduce on device memory over nodes: inside each by its GPUs, between them by records that the host or the GPUs seal.

use std::fmt;

use super::collectives::only_all_reduces;
use super::divide::Divider;
use super::rank::{check_one_each, vector_bytes};
use super::{
    Collectives, Device, DeviceBuffer, GpuCommunicator, GpuOptions, HostBuffer, Module, NcclCommunicator,
    RankBuffers, Stream,
};
use crate::channel::GroupSecret;
use crate::collective::{
    Bootstrap, Buffers, Communicator, NodePart, Options, Partition, Rail, Request, divide, node_parts,
};
use crate::{Dtype, Error, ReduceOp, Result};

/// One rank of a group whose ranks are in nodes, with a GPU or a share of one each, for all-reduces on device memory.
///
/// The path of the bytes: the GPUs of a node add up their vectors by a reduce-scatter, sealed by their own kernels, over the
/// links of [`GpuCommunicator`]. Each rank's chunk of that sum is added to the same chunk of the other nodes, and the node's
/// GPUs gather all chunks. In between, over the rail's links, there are two ways. [`Self::over_nccl_by_gpus`] leaves the chunk where
/// it is: the GPUs' kernels seal and open it ([`NcclCommunicator`]). [`Self::join`] and [`Self::over_nccl`] copy it to host memory and
/// back, where the backend of the rail's options seals and opens it ([`Communicator::over_nccl`], for one). Nothing leaves a rank
/// that is not sealed.
///
/// # Failure
///
/// What fails inside a node fails on all its ranks, and these tell their rails at once; what fails on a rail shows inside its
/// nodes at the deadline of their GPUs at the latest. The output is zeros, and all ranks must [`rekey`](Self::rekey).
pub struct GpuNodes {
    inside: GpuCommunicator,
    between: Between,
    poisoned: bool,
}

/// What links a rank to those of its number in other nodes.
enum Between {
    Host {
        rank: Communicator,
        /// The rank's chunk on its way.
        chunk: HostBuffer,
    },
    Gpu {
        rank: Box<NcclCommunicator>,
        divider: Divider,
        /// What is reduced where only the outcome matters: nobody waits for an all-reduce of nothing.
        scratch: DeviceBuffer,
    },
}

impl GpuNodes {
    /// Joins as rank `rank` of `ranks`, with nodes of `node_ranks` ranks each: rank r is in node r / `node_ranks`. `inside`
    /// links the ranks of a node on `device`, given its secret, this rank's number there and `node_ranks`; its timeout must be
    /// enough for what others do between the nodes meanwhile. `between` links a rail. Returns when all ranks have joined.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the nodes don't divide the ranks; [`Error::Cuda`]; whatever the two report.
    pub fn join(
        secret: &GroupSecret,
        place: [usize; 2],
        node_ranks: usize,
        bootstrap: Box<dyn Bootstrap>,
        device: &Device,
        inside: impl FnOnce(&GroupSecret, [usize; 2], Box<dyn Bootstrap>) -> Result<GpuCommunicator>,
        between: impl FnOnce(Rail) -> Result<Communicator>,
    ) -> Result<Self> {
        Self::meet(secret, place, node_ranks, bootstrap, inside, |rail, chunk| {
            let rank = between(rail)?;
            Ok(Between::Host { rank, chunk: HostBuffer::new(device, chunk)? })
        })
    }

    /// As [`Self::join`]; `between` is also given the bytes of the longest chunk.
    fn meet(
        secret: &GroupSecret,
        place: [usize; 2],
        node_ranks: usize,
        bootstrap: Box<dyn Bootstrap>,
        inside: impl FnOnce(&GroupSecret, [usize; 2], Box<dyn Bootstrap>) -> Result<GpuCommunicator>,
        between: impl FnOnce(Rail, usize) -> Result<Between>,
    ) -> Result<Self> {
        let (NodePart { secret, number, ranks, bootstrap }, rail) =
            node_parts(secret, place, node_ranks, bootstrap)?;
        let inside = inside(&secret, [number, ranks], bootstrap)?;
        // A chunk is longer than its share by less than an element.
        let between = between(rail, inside.options().max_bytes.div_ceil(node_ranks) + 16)?;
        Ok(Self { inside, between, poisoned: false })
    }

    /// As [`Self::join`], with rails over NCCL, whose records the backend of `rail_options` seals.
    ///
    /// # Errors
    /// As [`Self::join`] and [`Communicator::over_nccl`].
    pub fn over_nccl(
        secret: &GroupSecret,
        place: [usize; 2],
        node_ranks: usize,
        bootstrap: Box<dyn Bootstrap>,
        device: &Device,
        options: GpuOptions,
        rail_options: &Options,
    ) -> Result<Self> {
        let inside = |secret: &GroupSecret, [rank, ranks]: [usize; 2], bootstrap| {
            GpuCommunicator::new(secret, rank, ranks, bootstrap, device, options)
        };
        Self::join(secret, place, node_ranks, bootstrap, device, inside, |rail| {
            let Rail { secret, node, nodes, bootstrap } = rail;
            Communicator::over_nccl(&secret, node, nodes, bootstrap, device, rail_options)
        })
    }

    /// As [`Self::join`], with rails over NCCL, whose records the GPUs seal and open where they are: each rank has a GPU of its
    /// own. `rail_options` are those of the rails, but for the longest vector, which is what a rail has of `options`'.
    ///
    /// Run on two H200s of one machine, as nodes of one rank each; not with more ranks in a node, nor on several machines.
    ///
    /// # Errors
    /// As [`GpuCommunicator::new`] and [`NcclCommunicator::new`].
    pub fn over_nccl_by_gpus(
        secret: &GroupSecret,
        place: [usize; 2],
        node_ranks: usize,
        bootstrap: Box<dyn Bootstrap>,
        device: &Device,
        options: GpuOptions,
        rail_options: GpuOptions,
    ) -> Result<Self> {
        let inside = |secret: &GroupSecret, [rank, ranks]: [usize; 2], bootstrap| {
            GpuCommunicator::new(secret, rank, ranks, bootstrap, device, options)
        };
        Self::meet(secret, place, node_ranks, bootstrap, inside, |rail, chunk| {
            let Rail { secret, node, nodes, bootstrap } = rail;
            let options = GpuOptions { max_bytes: chunk, ..rail_options };
            let rank = NcclCommunicator::new(&secret, node, nodes, bootstrap, device, options)?;
            let divider = Divider::new(&Module::embedded(device)?)?;
            Ok(Between::Gpu { rank: Box::new(rank), divider, scratch: DeviceBuffer::new(device, 16)? })
        })
    }

    /// This rank, counted from 0 through all nodes.
    pub fn rank(&self) -> usize {
        self.between.rank() * self.inside.ranks() + self.inside.rank()
    }

    /// Number of ranks of all nodes.
    pub fn ranks(&self) -> usize {
        self.between.ranks() * self.inside.ranks()
    }

    /// # Safety
    /// As [`Collectives::run`].
    unsafe fn in_three(
        &mut self,
        buffers: RankBuffers,
        count: usize,
        dtype: Dtype,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        let (rank, ranks, size) = (self.inside.rank(), self.inside.ranks(), dtype.size());
        let partial = if op == ReduceOp::Avg { ReduceOp::Sum } else { op };
        let own = Partition::new(count, ranks).range(rank);
        let chunk = Chunk { at: buffers.output + (own.start * size) as u64, count: own.len(), dtype };
        let scattered = RankBuffers { input: buffers.input, output: chunk.at };
        // SAFETY: the caller's promise; the chunk lies in the output, where the input has it if that is the same.
        unsafe { self.inside.reduce_scatter(&[scattered], count, dtype, partial, &[stream])? };
        let scattered = self.inside.finish(&[stream]);
        let divisor = (op == ReduceOp::Avg).then(|| self.between.ranks() * ranks);
        // SAFETY: the chunk lies in the output.
        unsafe { self.between.reduce(scattered, chunk, partial, divisor, stream)? };

        let gathered = RankBuffers { input: chunk.at, output: buffers.output };
        // SAFETY: as above; the output, in place.
        unsafe { self.inside.all_gather(&[gathered], count, dtype, &[stream])? };
        let gathered = self.inside.finish(&[stream]);
        self.between.finish(gathered, stream)
    }
}

impl Collectives for GpuNodes {
    /// All-reduces only. Begins after the stream's earlier work, and waits until it is done on all ranks of the rail. Can't be
    /// captured in a graph.
    ///
    /// # Errors
    /// Before anything happens [`Error::InvalidArgument`] when the vector is longer than the group was set up for,
    /// [`Error::Poisoned`] after a failure, and [`Error::Unsupported`] for other collectives; otherwise as
    /// [`Collectives::outcome`] and [`Communicator::run`], after which the output is zeros.
    unsafe fn run(
        &mut self,
        request: Request,
        buffers: &[RankBuffers],
        count: usize,
        dtype: Dtype,
        streams: &[&Stream],
    ) -> Result<()> {
        let op = only_all_reduces(request, "nodes")?;
        check_one_each(buffers, streams, 1)?;
        let (buffers, stream) = (buffers[0], streams[0]);
        if self.is_poisoned() {
            return Err(Error::Poisoned);
        }
        stream
            .refuse_capture("the stream is being captured: the host takes part in a collective of nodes")?;
        let bytes = vector_bytes(count, dtype, self.inside.options().max_bytes)?;
        // SAFETY: the caller's promise.
        let outcome = unsafe { self.in_three(buffers, count, dtype, op, stream) };
        outcome.inspect_err(|_| {
            self.poisoned = true;
            self.between.give_up();
            // After a fault nothing works, and memory goes with the context.
            // SAFETY: the caller's promise.
            let wiped = unsafe { stream.fill(buffers.output, 0, bytes) };
            let _ = wiped.and_then(|()| stream.synchronize());
        })
    }

    /// What there was to say, [`Collectives::run`] has said.
    ///
    /// # Errors
    /// [`Error::Poisoned`] after a failure.
    fn outcome(&mut self) -> Result<()> {
        if self.is_poisoned() { Err(Error::Poisoned) } else { Ok(()) }
    }

    fn is_poisoned(&self) -> bool {
        self.poisoned || self.inside.is_poisoned() || self.between.is_poisoned()
    }

    fn rekey(&mut self) -> Result<()> {
        self.poisoned = true;
        // Both, so that all ranks meet equally often.
        let inside = self.inside.rekey();
        inside.and(self.between.rekey())?;
        self.poisoned = false;
        Ok(())
    }

    fn close(self: Box<Self>) -> Result<()> {
        let between = match self.between {
            Between::Host { .. } => Ok(()),
            Between::Gpu { rank, .. } => rank.close(),
        };
        // Both, so that all ranks meet equally often.
        Box::new(self.inside).close().and(between)
    }
}

/// A rank's part of a vector in its device's memory.
#[derive(Clone, Copy)]
struct Chunk {
    at: u64,
    count: usize,
    dtype: Dtype,
}

impl Chunk {
    fn of(buffer: &DeviceBuffer) -> Self {
        Self { at: buffer.pointer(), count: buffer.len(), dtype: Dtype::U8 }
    }
}

impl Between {
    fn rank(&self) -> usize {
        match self {
            Self::Host { rank, .. } => rank.rank(),
            Self::Gpu { rank, .. } => rank.rank(),
        }
    }

    fn ranks(&self) -> usize {
        match self {
            Self::Host { rank, .. } => rank.ranks(),
            Self::Gpu { rank, .. } => rank.ranks(),
        }
    }

    fn is_poisoned(&self) -> bool {
        match self {
            Self::Host { rank, .. } => rank.is_poisoned(),
            Self::Gpu { rank, .. } => rank.is_poisoned(),
        }
    }

    fn rekey(&mut self) -> Result<()> {
        match self {
            Self::Host { rank, .. } => rank.rekey(),
            Self::Gpu { rank, .. } => rank.rekey(),
        }
    }

    /// Tells the other ranks that the all-reduce has failed, where they don't know it yet.
    fn give_up(&mut self) {
        match self {
            Self::Host { rank, .. } => rank.give_up(),
            // Does what tells them even when it has failed, see `run`.
            Self::Gpu { .. } => {}
        }
    }

    /// Reduces the chunk over the rail, in place, and divides it by `divisor`. `inside` is what the node has come to: an error
    /// fails the rail. What is still on the stream at the end makes the chunk complete.
    ///
    /// # Safety
    /// The chunk is on the rank's device, and nothing else uses it until the stream has passed.
    unsafe fn reduce(
        &mut self,
        inside: Result<()>,
        chunk: Chunk,
        op: ReduceOp,
        divisor: Option<usize>,
        stream: &Stream,
    ) -> Result<()> {
        let Chunk { at, count, dtype } = chunk;
        let bytes = count * dtype.size();
        match self {
            Self::Host { rank, chunk } => {
                inside?;
                // SAFETY: the caller's promise; the buffer is left alone until the wait.
                unsafe { stream.copy(chunk.pointer(), at, bytes)? };
                stream.synchronize()?;
                // SAFETY: the stream has passed the copy, and nothing else knows of the buffer.
                let text = &mut unsafe { chunk.as_mut_slice() }[..bytes];
                rank.run(Request::AllReduce(op), dtype, Buffers::InPlace(text))?;
                if let Some(ranks) = divisor {
                    divide(dtype, text, ranks);
                }
                // SAFETY: the caller's promise; the buffer is used again by the next all-reduce, which waits for the stream.
                unsafe { stream.copy(at, chunk.pointer(), bytes) }
            }
            Self::Gpu { rank, scratch, .. } if count == 0 => {
                // SAFETY: the buffer is the rail's own.
                unsafe { run(rank, inside, Chunk::of(scratch), op, stream) }
            }
            Self::Gpu { rank, divider, .. } => {
                // SAFETY: the caller's promise.
                unsafe { run(rank, inside, chunk, op, stream)? };
                match divisor {
                    // SAFETY: the caller's promise.
                    Some(ranks) => unsafe { divider.divide(dtype, at, bytes, ranks, stream) },
                    None => Ok(()),
                }
            }
        }
    }

    /// Nobody is done before all nodes are: an all-reduce whose outcome is all that matters.
    fn finish(&mut self, inside: Result<()>, stream: &Stream) -> Result<()> {
        match self {
            Self::Host { rank, .. } => {
                inside?;
                // Of nothing; its end is authenticated.
                rank.run(Request::AllReduce(ReduceOp::Sum), Dtype::U8, Buffers::InPlace(&mut []))
            }
            Self::Gpu { rank, scratch, .. } => {
                // SAFETY: the buffer is the rail's own.
                unsafe { run(rank, inside, Chunk::of(scratch), ReduceOp::Sum, stream) }
            }
        }
    }
}

/// An all-reduce over a rail that is done, so that all ranks come to the same end, also when the node has failed: it fails
/// then.
///
/// # Safety
/// As [`Between::reduce`].
unsafe fn run(
    rank: &mut NcclCommunicator,
    inside: Result<()>,
    chunk: Chunk,
    op: ReduceOp,
    stream: &Stream,
) -> Result<()> {
    if inside.is_err() {
        rank.fail()?;
    }
    let buffers = RankBuffers { input: chunk.at, output: chunk.at };
    // SAFETY: the caller's promise.
    let queued = unsafe { rank.all_reduce(&[buffers], chunk.count, chunk.dtype, op, &[stream]) };
    let outcome = queued.and_then(|()| rank.outcome());
    inside.and(outcome)
}

impl fmt::Debug for GpuNodes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("GpuNodes")
            .field("inside", &self.inside)
            .field("rank", &self.rank())
            .field("ranks", &self.ranks())
            .field("poisoned", &self.poisoned)
            .finish_non_exhaustive()
    }
}
