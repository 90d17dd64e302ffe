//! All-reduce on device memory over nodes: inside each by its GPUs, between them by records that the host seals.

use std::fmt;

use super::{Device, GpuCommunicator, GpuOptions, HostBuffer, RankBuffers, Stream};
use crate::channel::GroupSecret;
use crate::collective::{
    Bootstrap, Buffers, Communicator, NodePart, Options, Partition, Rail, Request, divide, node_parts,
};
use crate::{Dtype, Error, ReduceOp, Result};

/// One rank of a group whose ranks are in nodes, with a GPU or a share of one each, for all-reduces on device memory.
///
/// The path of the bytes: the GPUs of a node add up their vectors by a reduce-scatter, sealed by their own kernels, over the
/// links of [`GpuCommunicator`]. Each rank copies its chunk of that sum to host memory, where it is added to the same chunk of
/// the other nodes, sealed and opened by the backend of the rail's options, over the rail's links:
/// [`Communicator::over_nccl`], for one. Then it is copied back, and the node's GPUs gather all chunks. Nothing leaves a
/// rank that is not sealed.
///
/// # Failure
///
/// What fails inside a node fails on all its ranks, and these tell their rails at once; what fails on a rail shows inside its
/// nodes at the deadline of their GPUs at the latest. The output is zeros, and all ranks must [`rekey`](Self::rekey).
pub struct GpuNodes {
    inside: GpuCommunicator,
    between: Communicator,
    /// The rank's chunk on its way.
    chunk: HostBuffer,
    poisoned: bool,
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
        let (NodePart { secret, number, ranks, bootstrap }, rail) =
            node_parts(secret, place, node_ranks, bootstrap)?;
        let inside = inside(&secret, [number, ranks], bootstrap)?;
        let between = between(rail)?;
        // A chunk is longer than its share by less than an element.
        let chunk = HostBuffer::new(device, inside.options().max_bytes.div_ceil(node_ranks) + 16)?;
        Ok(Self { inside, between, chunk, poisoned: false })
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

    /// This rank, counted from 0 through all nodes.
    pub fn rank(&self) -> usize {
        self.between.rank() * self.inside.ranks() + self.inside.rank()
    }

    /// Number of ranks of all nodes.
    pub fn ranks(&self) -> usize {
        self.between.ranks() * self.inside.ranks()
    }

    /// Whether a collective has failed and [`Self::rekey`] is needed.
    pub fn is_poisoned(&self) -> bool {
        self.poisoned || self.inside.is_poisoned() || self.between.is_poisoned()
    }

    /// Waits for the device, and starts new sessions with new keys, together with all other ranks. Ends the poisoning after a
    /// failure.
    ///
    /// # Errors
    /// As [`GpuCommunicator::rekey`] and [`Communicator::rekey`].
    pub fn rekey(&mut self) -> Result<()> {
        self.poisoned = true;
        // Both, so that all ranks meet equally often.
        let inside = self.inside.rekey();
        inside.and(self.between.rekey())?;
        self.poisoned = false;
        Ok(())
    }

    /// Leaves in good order, together with all other ranks.
    ///
    /// # Errors
    /// As [`GpuCommunicator::close`].
    pub fn close(self) -> Result<()> {
        self.inside.close()
    }

    /// Reduces `count` elements of all ranks into every rank's output, with the same bits on each, after the stream's earlier
    /// work, and waits until that is done on all ranks of the rail.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the vector is longer than the group was set up for, and [`Error::Poisoned`] after a
    /// failure, both before anything happens; otherwise as [`GpuCommunicator::outcome`] and [`Communicator::run`], after which the
    /// output is zeros.
    ///
    /// # Safety
    /// As [`GpuCommunicator::all_reduce`].
    pub unsafe fn all_reduce(
        &mut self,
        buffers: RankBuffers,
        count: usize,
        dtype: Dtype,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        if self.is_poisoned() {
            return Err(Error::Poisoned);
        }
        let (bytes, most) = (count.saturating_mul(dtype.size()), self.inside.options().max_bytes);
        if bytes > most {
            return Err(Error::InvalidArgument(format!(
                "a vector of {bytes} bytes; the group is for up to {most}"
            )));
        }
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

    /// # Safety
    /// As [`Self::all_reduce`].
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
        let (at, bytes) = (buffers.output + (own.start * size) as u64, own.len() * size);
        let scattered = RankBuffers { input: buffers.input, output: at };
        // SAFETY: the caller's promise; the chunk lies in the output, where the input has it if that is the same.
        unsafe { self.inside.reduce_scatter(scattered, count, dtype, partial, stream)? };
        stream.synchronize()?;
        self.inside.outcome()?;
        // SAFETY: the chunk lies in the output; the buffer is left alone until the wait.
        unsafe { stream.copy(self.chunk.pointer(), at, bytes)? };
        stream.synchronize()?;
        // SAFETY: the stream has passed the copy, and nothing else knows of the buffer.
        let chunk = &mut unsafe { self.chunk.as_mut_slice() }[..bytes];
        self.between.run(Request::AllReduce(partial), dtype, Buffers::InPlace(chunk))?;
        if op == ReduceOp::Avg {
            divide(dtype, chunk, self.between.ranks() * ranks);
        }

        let gathered = RankBuffers { input: at, output: buffers.output };
        // SAFETY: as above; the output, in place.
        unsafe {
            stream.copy(at, self.chunk.pointer(), bytes)?;
            self.inside.all_gather(gathered, count, dtype, stream)?;
        }
        stream.synchronize()?;
        self.inside.outcome()?;
        // Nobody is done before all nodes are: an all-reduce of nothing, whose end is authenticated.
        self.between.run(Request::AllReduce(partial), dtype, Buffers::InPlace(&mut []))
    }
}

impl fmt::Debug for GpuNodes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("GpuNodes")
            .field("inside", &self.inside)
            .field("between", &self.between)
            .field("poisoned", &self.poisoned)
            .finish_non_exhaustive()
    }
}
