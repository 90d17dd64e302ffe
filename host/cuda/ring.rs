//! Collectives on GPUs: one persistent kernel a rank for a whole collective.
//!
//! A [`GpuGroup`] has one rank on each of the devices it is given; a device may be given more than once. Ranks store
//! records straight into their successors' inboxes, over NVLink where they are on different GPUs.

use std::thread;
use std::time::Duration;

use super::rank::{GpuRank, check, check_one_each, shared_blocks};
use super::{Device, DeviceBuffer, Module, Stream};
use crate::channel::{Crypto, GroupSecret, KeyLength, volume};
use crate::collective::{Algorithm, InProcess, Request};
use crate::{Dtype, Error, ReduceOp, Result};

/// How a group is set up.
#[derive(Clone, Debug)]
pub struct GpuOptions {
    /// What protects records.
    pub crypto: Crypto,
    /// How collectives are done: [`Algorithm::Ring`], [`Algorithm::RelayRing`] or, of two ranks,
    /// [`Algorithm::Exchange`].
    pub algorithm: Algorithm,
    /// Length in bytes of the longest vector of any collective. The inboxes take four times as much on each rank.
    pub max_bytes: usize,
    /// Bytes of a record, a multiple of 16; chosen by the vector's length when `None`.
    pub record_bytes: Option<usize>,
    /// How many multiprocessors a rank may take; all of its device's, shared evenly by the ranks on it, when `None`.
    pub sm_budget: Option<u32>,
    /// How long one collective may take before it fails.
    pub timeout: Duration,
    /// Bytes that a key may encrypt before the next epoch begins. One collective must fit.
    pub key_bytes: u64,
}

impl Default for GpuOptions {
    fn default() -> Self {
        Self {
            crypto: Crypto::Gcm(KeyLength::Aes256),
            algorithm: Algorithm::Ring,
            max_bytes: 64 << 20,
            record_bytes: None,
            sm_budget: None,
            timeout: Duration::from_secs(30),
            key_bytes: volume::DEFAULT_BYTES,
        }
    }
}

impl GpuOptions {
    /// The algorithm that takes this many sealed ranks the least time, as measured on H200s from 1 MiB on: two ranks exchange
    /// their whole vectors, more form a relay ring.
    pub const fn fastest_algorithm(ranks: usize) -> Algorithm {
        if ranks == 2 { Algorithm::Exchange } else { Algorithm::RelayRing }
    }
}

/// Where what a rank gives and what it gets lie in its device's memory, aligned to an element.
///
/// | collective | input | output |
/// |---|---|---|
/// | all-reduce | the whole vector | the whole vector |
/// | reduce-scatter | the whole vector | this rank's [chunk](crate::collective::Partition) |
/// | all-gather | this rank's chunk | the whole vector |
/// | broadcast | the whole vector; not looked at but on the root | the whole vector |
#[derive(Clone, Copy, Debug)]
pub struct RankBuffers {
    /// Device address of what the rank gives.
    pub input: u64,
    /// Device address of what it gets: the place in the vector that `input` has there, or apart from it.
    pub output: u64,
}

/// Ranks on GPUs that do collectives together, all of one process.
#[derive(Debug)]
pub struct GpuGroup {
    secret: GroupSecret,
    ranks: Vec<GpuRank>,
    bootstraps: Vec<InProcess>,
}

impl GpuGroup {
    /// Sets up one rank on each of `devices`, with the kernels of `image` (PTX or a cubin).
    ///
    /// # Errors
    /// [`Error::Unsupported`] when two devices cannot reach each other's memory; [`Error::InvalidArgument`] for options
    /// out of their domain; [`Error::Cuda`], for example when memory runs out.
    pub fn new(devices: &[Device], image: &[u8], secret: &GroupSecret, options: GpuOptions) -> Result<Self> {
        let count = devices.len();
        check(&options, count)?;
        let blocks = blocks_of_a_rank(devices, options.sm_budget)?;
        let (mut ranks, mut modules) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for (number, device) in devices.iter().enumerate() {
            for peer in devices {
                device.enable_peer_access(peer)?;
            }
            let same = devices.iter().position(|other| other.ordinal() == device.ordinal());
            let module = match same.and_then(|first| modules.get(first)) {
                Some(module) => Module::clone(module),
                None => Module::load(device, image)?,
            };
            ranks.push(GpuRank::new(&module, number, count, blocks, &options)?);
            modules.push(module);
        }
        let mailboxes: Vec<_> = ranks.iter().map(GpuRank::own_mailbox).collect();
        for rank in &mut ranks {
            rank.connect(&mailboxes)?;
        }
        let mut group = Self { secret: secret.clone(), ranks, bootstraps: InProcess::group(count) };
        group.rekey()?;
        Ok(group)
    }

    /// Reduces vectors of `count` elements over all ranks into every rank's output: [`Self::run`].
    ///
    /// # Errors
    /// As [`Self::run`].
    ///
    /// # Safety
    /// As [`Self::run`].
    pub unsafe fn all_reduce(
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
    pub unsafe fn reduce_scatter(
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
    pub unsafe fn all_gather(
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
    pub unsafe fn broadcast(
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

    /// Queues a collective on the ranks' streams, and doesn't wait. `count` is of the whole vector, of which
    /// [`RankBuffers`] says what part each rank gives and gets; its chunks are [`Partition`](crate::collective::Partition)'s,
    /// and its bits those of the CPU's ranks. Can be captured in a graph, if the same collective was done before outside
    /// of one on as many elements of as many bytes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the vector is longer than the group was set up for, the root is no rank, or the
    /// buffers and streams are not one for each rank; [`Error::Poisoned`] after a failure; [`Error::KeyExhausted`] when
    /// one key may not encrypt that much; [`Error::Cuda`].
    ///
    /// # Safety
    /// Each rank's buffers hold what it gives and gets, on its device, aligned to an element, and are left alone until its
    /// stream has passed the collective. The streams run beside each other: none waits for another's collective.
    pub unsafe fn run(
        &mut self,
        request: Request,
        buffers: &[RankBuffers],
        count: usize,
        dtype: Dtype,
        streams: &[&Stream],
    ) -> Result<()> {
        let ranks = self.ranks.len();
        if self.is_poisoned() {
            return Err(Error::Poisoned);
        }
        check_one_each(buffers, streams, ranks)?;
        // All that may wait for a device comes first: once a kernel runs, it waits for those of the other ranks.
        let ready: Vec<_> =
            self.ranks.iter_mut().map(|rank| rank.prepare(request, count, dtype)).collect::<Result<_>>()?;
        for (number, ready) in ready.into_iter().enumerate() {
            // SAFETY: by the caller's promise.
            let queued = unsafe { self.ranks[number].launch(ready, buffers[number], streams[number]) };
            if let Err(error) = queued {
                if number > 0 {
                    // Other ranks have started.
                    self.ranks.iter_mut().for_each(GpuRank::poison);
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Asks how the collectives that the ranks' streams have passed went. Wait for the streams first.
    ///
    /// # Errors
    /// The first failure of any rank: [`Error::Record`] or [`Error::Deadline`]. The group carries no data after it.
    pub fn outcome(&mut self) -> Result<()> {
        let outcomes: Vec<_> = self.ranks.iter_mut().map(GpuRank::outcome).collect();
        // What was seen first-hand says more than that another rank gave up.
        let (told, seen): (Vec<_>, Vec<_>) = outcomes
            .into_iter()
            .filter_map(Result::err)
            .partition(|error| matches!(error, Error::Aborted { .. }));
        match seen.into_iter().chain(told).next() {
            None => Ok(()),
            Some(error) => Err(error),
        }
    }

    /// Waits for the ranks' devices, and starts a new session with new keys. Ends the poisoning after a failure.
    ///
    /// # Errors
    /// [`Error::Cuda`], [`Error::Randomness`]. The group is poisoned then.
    pub fn rekey(&mut self) -> Result<()> {
        let secret = &self.secret;
        thread::scope(|scope| {
            let threads: Vec<_> = self
                .ranks
                .iter_mut()
                .zip(&mut self.bootstraps)
                .map(|(rank, bootstrap)| scope.spawn(|| rank.rekey(secret, bootstrap)))
                .collect();
            let results: Vec<Result<()>> = threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect();
            results.into_iter().collect()
        })
    }

    /// Whether a collective has failed and [`Self::rekey`] is needed.
    pub fn is_poisoned(&self) -> bool {
        self.ranks.iter().any(GpuRank::is_poisoned)
    }

    /// Where the messages to a rank arrive, all that ever crosses: its inbox and its signals.
    pub fn mailbox(&self, rank: usize) -> [&DeviceBuffer; 2] {
        self.ranks[rank].mailbox()
    }

    /// Blocks that each rank runs, one on a multiprocessor.
    pub fn blocks(&self) -> u32 {
        self.ranks[0].blocks()
    }
}

/// How many blocks each rank runs when all are in this process.
fn blocks_of_a_rank(devices: &[Device], budget: Option<u32>) -> Result<u32> {
    let mut blocks = budget.unwrap_or(u32::MAX);
    for device in devices {
        let sharing = devices.iter().filter(|other| other.ordinal() == device.ordinal()).count();
        blocks = blocks.min(shared_blocks(device.multiprocessors()?, sharing)?);
    }
    if blocks == 0 {
        return Err(Error::InvalidArgument("no multiprocessor for a rank: an SM budget of 0".into()));
    }
    Ok(blocks)
}
