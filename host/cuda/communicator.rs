//! A rank on a GPU whose peers are in other processes of the same machine.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use super::ahead::Ahead;
use super::ipc::{HANDLE_BYTES, Imported, export};
use super::rank::{GpuRank, LONGEST_RECORD, Mailbox, Remote, check, check_one_each, shared_blocks};
use super::{Collectives, Device, GpuOptions, HostBuffer, LaunchForm, Module, RankBuffers, Stream};
use crate::channel::GroupSecret;
use crate::collective::{Bootstrap, Request, Watch, agree, announce};
use crate::{Dtype, Error, Result, ptx};

/// How often the watch looks whether it is still wanted.
const WATCH_PERIOD: Duration = Duration::from_millis(50);

/// One rank of a group of processes on one machine, each with a GPU or a share of one.
///
/// Ranks store their records into each other's mailboxes: device memory that CUDA maps into the other processes, by peer
/// access where it is on another GPU. Only ciphertext, tags and signals cross.
///
/// # Several processes on one GPU
///
/// They work, for tests and small jobs. Without NVIDIA's Multi-Process Service the GPU gives each process slices of its
/// time, a few milliseconds each, and a kernel that waits for another process's record waits for that process's slice: a
/// collective takes milliseconds for each step, however short the vector. Waits are bounded in wall time, so slices never
/// make one endless. With the service running, the kernels run at once, and each rank takes its share of the
/// multiprocessors.
///
/// # Failure
///
/// As for [`GpuGroup`](super::GpuGroup): a record that doesn't verify or doesn't come before the deadline fails the
/// collective on every rank, wipes the results and poisons. When the bootstrap can [watch](Bootstrap::watch) the others,
/// as a [`Rendezvous`](crate::collective::Rendezvous) can, a rank whose process ends stops the others' kernels at once;
/// otherwise, and when a rank merely stalls, they stop at the deadline. Memory and mappings are freed on drop, which waits
/// for the rank's own kernels, hence at most until the deadline.
#[derive(Debug)]
pub struct GpuCommunicator {
    number: usize,
    ranks: usize,
    secret: GroupSecret,
    options: GpuOptions,
    // In the order in which they must go: the watch writes to mapped memory.
    watch: Option<Monitor>,
    rank: GpuRank,
    imported: Vec<Imported>,
    bootstrap: BoxedBootstrap,
}

struct BoxedBootstrap(Box<dyn Bootstrap>);

impl std::fmt::Debug for BoxedBootstrap {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Bootstrap(..)")
    }
}

impl GpuCommunicator {
    /// Joins a group as rank `rank` of `ranks`, on `device`. All ranks pass the same options, except for the SM budget and
    /// the timeout. Returns when all ranks have joined; either all do or none.
    ///
    /// # Errors
    /// [`Error::Handshake`] when a rank does not come within the timeout, can't join, holds another secret or assumes
    /// something else, or when the bootstrap is mixed up or replayed; [`Error::Unsupported`] when another rank is in this
    /// process: those make a [`GpuGroup`](super::GpuGroup); [`Error::InvalidArgument`], [`Error::NoDevice`],
    /// [`Error::Cuda`], [`Error::Randomness`].
    pub fn new(
        secret: &GroupSecret,
        rank: usize,
        ranks: usize,
        bootstrap: Box<dyn Bootstrap>,
        device: &Device,
        options: GpuOptions,
    ) -> Result<Self> {
        let capability = device.compute_capability()?;
        let target = ptx::for_compute_capability(capability.major, capability.minor).ok_or_else(|| {
            Error::NoDevice(format!("compute capability {capability}, but 8.0 or newer is needed"))
        })?;
        Self::with_image(secret, rank, ranks, bootstrap, device, ptx::text(target).as_bytes(), options)
    }

    /// As [`Self::new`], with the kernels of `image` (PTX or a cubin).
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_image(
        secret: &GroupSecret,
        rank: usize,
        ranks: usize,
        bootstrap: Box<dyn Bootstrap>,
        device: &Device,
        image: &[u8],
        options: GpuOptions,
    ) -> Result<Self> {
        check(&options, ranks)?;
        refuse_steps(&options)?;
        // May take long, and so comes before anybody waits for this rank.
        let module = Module::load(device, image);
        Self::with_module(secret, [rank, ranks], bootstrap, device, module, options)
    }

    /// As [`Self::with_image`], with kernels that are loaded already; if they are not, all ranks fail.
    pub(super) fn with_module(
        secret: &GroupSecret,
        [number, ranks]: [usize; 2],
        mut bootstrap: Box<dyn Bootstrap>,
        device: &Device,
        module: Result<Module>,
        options: GpuOptions,
    ) -> Result<Self> {
        check(&options, ranks)?;
        refuse_steps(&options)?;
        let timeout = options.timeout;
        let meeting = bootstrap.as_mut();
        let root = agree(secret, GpuRank::terms(&options, ranks), number, meeting, timeout, || Ok(()))?;
        let own = module.and_then(|module| Ok((Seat::new(device, &options)?.encode(), module)));
        let (seats, module) = announce(&root, 1, [number, ranks], own, meeting, timeout)?;
        let blocks = blocks(&seats, number, &options);
        let own = blocks.and_then(|blocks| {
            let mut rank = GpuRank::new(&module, number, ranks, blocks, &options)?;
            // Later, the others would wait for this rank's compiler.
            rank.load(false, true)?;
            Ok((handles(&rank, ranks)?, rank))
        });
        let (handles, rank) = announce(&root, 2, [number, ranks], own, meeting, timeout)?;
        let own = connect(rank, number, &handles, device).and_then(|(mut rank, imported)| {
            rank.begin(&root)?;
            Ok((Vec::new(), (rank, imported)))
        });
        let (_, (rank, imported)) = announce(&root, 3, [number, ranks], own, meeting, timeout)?;
        let watch = match bootstrap.watch() {
            Some(watch) => Some(Monitor::start(watch, device, rank.notice_addresses())?),
            None => None,
        };
        let (secret, bootstrap) = (secret.clone(), BoxedBootstrap(bootstrap));
        Ok(Self { number, ranks, secret, options, watch, rank, imported, bootstrap })
    }

    /// This rank, counted from 0.
    pub fn rank(&self) -> usize {
        self.number
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// How it was set up.
    pub fn options(&self) -> &GpuOptions {
        &self.options
    }

    /// Blocks that each rank runs, one on a multiprocessor.
    pub fn blocks(&self) -> u32 {
        self.rank.blocks()
    }
}

impl Collectives for GpuCommunicator {
    unsafe fn run(
        &mut self,
        request: Request,
        buffers: &[RankBuffers],
        count: usize,
        dtype: Dtype,
        streams: &[&Stream],
    ) -> Result<()> {
        check_one_each(buffers, streams, 1)?;
        let ready = self.rank.prepare(request, count, dtype)?;
        // SAFETY: by the caller's promise.
        unsafe { self.rank.launch(ready, buffers[0], streams[0]) }
    }

    fn outcome(&mut self) -> Result<()> {
        match self.rank.outcome() {
            Err(Error::Aborted { rank, by }) => Err(match self.rank.failure_of(by) {
                Remote::Failed(error) => error,
                // It didn't fail, so somebody gave up on it.
                Remote::Fine => Error::Lost { rank, peer: by, step: None },
                Remote::Unreachable => Error::Aborted { rank, by },
            }),
            outcome => outcome,
        }
    }

    fn rekey(&mut self) -> Result<()> {
        self.rank.rekey(&self.secret, self.bootstrap.0.as_mut())
    }

    fn is_poisoned(&self) -> bool {
        self.rank.is_poisoned()
    }

    fn close(mut self: Box<Self>) -> Result<()> {
        self.rank.device().synchronize()?;
        self.bootstrap.0.gather(b"", self.options.timeout)?;
        // The end of a rank that was faster is no loss any more.
        self.watch = None;
        self.imported.clear();
        self.bootstrap.0.gather(b"", self.options.timeout)?;
        Ok(())
    }

    fn make_keystream(&mut self, bytes: &[usize]) -> Result<usize> {
        self.rank.make_keystream(bytes)
    }

    fn wait_for_keystream(&mut self) -> Result<()> {
        self.rank.wait_for_keystream()
    }

    fn keystream_misses(&self) -> Result<u32> {
        self.rank.keystream().map_or(Ok(0), Ahead::misses)
    }
}

impl Drop for GpuCommunicator {
    fn drop(&mut self) {
        // Mapped memory may only go when no kernel uses it. After a fault every call fails, and the process is lost.
        let _ = self.rank.device().synchronize();
    }
}

/// Launches of single steps are ordered by events, which processes could only share by waiting for each other's threads.
fn refuse_steps(options: &GpuOptions) -> Result<()> {
    if options.launch != LaunchForm::PerStep {
        return Ok(());
    }
    let what = "a launch for each step with ranks in several processes: put the ranks into one process, as a GpuGroup \
                does, or use the persistent form, which processes that take turns on a GPU can use too";
    Err(Error::Unsupported { backend: "cuda", what: what.into() })
}

/// What a rank tells the others before any memory is set up.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seat {
    process: [u8; 16],
    device: [u8; 16],
    multiprocessors: u32,
    budget: u32,
    max_bytes: u64,
    algorithm: u64,
    /// The longest record that its version chooses: with it the others' are as long.
    longest_record: u32,
    /// 1 where keystream is made ahead: records are shorter then.
    keystream: u32,
}

impl Seat {
    const BYTES: usize = 64;

    fn new(device: &Device, options: &GpuOptions) -> Result<Self> {
        Ok(Self {
            process: this_process()?,
            device: device.bus_id()?,
            multiprocessors: device.multiprocessors()?,
            budget: options.sm_budget.unwrap_or(u32::MAX),
            max_bytes: options.max_bytes as u64,
            algorithm: options.algorithm as u64,
            longest_record: LONGEST_RECORD as u32,
            keystream: options.keystream.is_some() as u32,
        })
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(Self::BYTES);
        bytes.extend_from_slice(&self.process);
        bytes.extend_from_slice(&self.device);
        bytes.extend_from_slice(&self.multiprocessors.to_le_bytes());
        bytes.extend_from_slice(&self.budget.to_le_bytes());
        bytes.extend_from_slice(&self.max_bytes.to_le_bytes());
        bytes.extend_from_slice(&self.algorithm.to_le_bytes());
        bytes.extend_from_slice(&self.longest_record.to_le_bytes());
        bytes.extend_from_slice(&self.keystream.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = bytes.try_into().ok()?;
        let four = |at: usize| u32::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]));
        let eight = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]));
        Some(Self {
            process: std::array::from_fn(|byte| bytes[byte]),
            device: std::array::from_fn(|byte| bytes[16 + byte]),
            multiprocessors: four(32),
            budget: four(36),
            max_bytes: eight(40),
            algorithm: eight(48),
            longest_record: four(56),
            keystream: four(60),
        })
    }
}

/// A number that no other process has.
fn this_process() -> Result<[u8; 16]> {
    static PROCESS: OnceLock<[u8; 16]> = OnceLock::new();
    if let Some(process) = PROCESS.get() {
        return Ok(*process);
    }
    let mut fresh = [0; 16];
    getrandom::fill(&mut fresh).map_err(|error| Error::Randomness(error.to_string()))?;
    Ok(*PROCESS.get_or_init(|| fresh))
}

/// How many blocks every rank runs: as many as the rank with the fewest may.
fn blocks(seats: &[Vec<u8>], own: usize, options: &GpuOptions) -> Result<u32> {
    let malformed = || Error::Handshake("a rank's announcement is of another version".into());
    let seats: Vec<Seat> =
        seats.iter().map(|seat| Seat::decode(seat).ok_or_else(malformed)).collect::<Result<_>>()?;
    let mut blocks = u32::MAX;
    for (rank, seat) in seats.iter().enumerate() {
        if rank != own && seat.process == seats[own].process {
            let what =
                format!("ranks {own} and {rank} in one process, as a GpuGroup has; here each has its own");
            return Err(Error::Unsupported { backend: "cuda", what });
        }
        for (differs, what) in [
            (seat.max_bytes != options.max_bytes as u64, "vectors of another greatest length"),
            (seat.algorithm != options.algorithm as u64, "another algorithm"),
            (
                seat.longest_record != LONGEST_RECORD as u32,
                "records of another greatest length: it is of another version",
            ),
            (
                seat.keystream != options.keystream.is_some() as u32,
                "keystream ahead where this rank is not, or the other way round",
            ),
        ] {
            if differs {
                return Err(Error::Handshake(format!("rank {rank} was set up for {what}")));
            }
        }
        let sharing = seats.iter().filter(|other| other.device == seat.device).count();
        blocks = blocks.min(seat.budget).min(shared_blocks(seat.multiprocessors, sharing)?);
    }
    match blocks {
        0 => Err(Error::InvalidArgument("no multiprocessor for a rank: an SM budget of 0".into())),
        blocks => Ok(blocks),
    }
}

/// Handles to a rank's mailbox, for other processes. One rank alone has no peers.
fn handles(rank: &GpuRank, ranks: usize) -> Result<Vec<u8>> {
    if ranks == 1 {
        return Ok(Vec::new());
    }
    let handles = rank.shared().map(export);
    Ok(handles.into_iter().collect::<Result<Vec<_>>>()?.concat())
}

/// Maps the other ranks' mailboxes, and makes them known to the rank.
fn connect(
    mut rank: GpuRank,
    number: usize,
    handles: &[Vec<u8>],
    device: &Device,
) -> Result<(GpuRank, Vec<Imported>)> {
    let mut imported = Vec::new();
    let mut mailboxes = Vec::new();
    for (peer, handles) in handles.iter().enumerate() {
        if peer == number {
            mailboxes.push(rank.own_mailbox());
            continue;
        }
        let (handles, []) = handles.as_chunks::<HANDLE_BYTES>() else {
            return Err(Error::Handshake(format!("rank {peer}'s memory handles are malformed")));
        };
        let &[notice, inbox, signals] = handles else {
            return Err(Error::Handshake(format!("rank {peer} announced {} memory handles", handles.len())));
        };
        let mut open = |handle| -> Result<u64> {
            let memory = Imported::open(device, handle)
                .map_err(|error| Error::Cuda(format!("the mailbox of rank {peer}: {error}")))?;
            let pointer = memory.pointer();
            imported.push(memory);
            Ok(pointer)
        };
        mailboxes.push(Mailbox { notice: open(notice)?, inbox: open(inbox)?, signals: open(signals)? });
    }
    rank.connect(&mailboxes)?;
    Ok((rank, imported))
}

/// A thread that stops the ranks' kernels when one of their processes ends.
#[derive(Debug)]
struct Monitor {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Monitor {
    /// `notices` are the addresses of all ranks' notices.
    fn start(mut watch: Box<dyn Watch>, device: &Device, notices: Vec<u64>) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stream = Stream::new(device)?;
        let word = HostBuffer::new(device, 4)?;
        let stopped = stop.clone();
        let work = move || {
            while !stopped.load(Ordering::Acquire) {
                if let Some(peer) = watch.lost(WATCH_PERIOD) {
                    word.words()[0].store(1 + peer as u32, Ordering::Release);
                    for notice in &notices {
                        // SAFETY: the notices are mapped until this thread has ended, and so is `word`; the copy is waited
                        // for. Kernels read the destination as a volatile word, and any value but 0 means the same.
                        let stopped = unsafe { stream.copy(GpuRank::aborted_at(*notice), word.pointer(), 4) };
                        // There is nobody to tell: kernels that can't be stopped end at their deadline.
                        let _ = stopped.and_then(|()| stream.synchronize());
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("ringseal watch".into()).spawn(work);
        let thread = thread.map_err(|source| Error::Io { path: "starting a thread".into(), source })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::Algorithm;

    fn seat(process: u8, device: u8, multiprocessors: u32, budget: u32) -> Seat {
        Seat {
            process: [process; 16],
            device: [device; 16],
            multiprocessors,
            budget,
            max_bytes: 1 << 20,
            algorithm: Algorithm::Ring as u64,
            longest_record: LONGEST_RECORD as u32,
            keystream: 0,
        }
    }

    #[test]
    fn ranks_share_a_device_evenly_and_all_run_as_many_blocks() {
        let options = GpuOptions { max_bytes: 1 << 20, algorithm: Algorithm::Ring, ..GpuOptions::default() };
        let blocks = |seats: &[Seat]| {
            let seats: Vec<_> = seats.iter().map(Seat::encode).collect();
            blocks(&seats, 0, &options)
        };
        let all = u32::MAX;
        assert_eq!(blocks(&[seat(0, 0, 132, all), seat(1, 1, 132, all)]).unwrap(), 132);
        assert_eq!(blocks(&[seat(0, 0, 132, all), seat(1, 0, 132, all)]).unwrap(), 66);
        assert_eq!(blocks(&[seat(0, 0, 132, all), seat(1, 0, 132, all), seat(2, 1, 40, all)]).unwrap(), 40);
        assert_eq!(blocks(&[seat(0, 0, 132, all), seat(1, 1, 132, 16)]).unwrap(), 16);
        assert!(blocks(&[seat(0, 0, 132, 0)]).is_err());
        assert!(blocks(&[seat(0, 0, 1, all), seat(1, 0, 1, all)]).is_err());
        let same = blocks(&[seat(0, 0, 132, all), seat(0, 1, 132, all)]);
        assert!(matches!(same, Err(Error::Unsupported { .. })), "{same:?}");
        let one = || seat(1, 1, 132, all);
        for odd in [
            Seat { max_bytes: 1, ..one() },
            Seat { algorithm: 9, ..one() },
            Seat { longest_record: 256 << 10, ..one() },
            Seat { keystream: 1, ..one() },
        ] {
            let error = blocks(&[seat(0, 0, 132, all), odd]).unwrap_err();
            assert!(matches!(&error, Error::Handshake(text) if text.contains("rank 1")), "{error}");
        }
        assert!(Seat::decode(&[0; 63]).is_none());
    }
}
