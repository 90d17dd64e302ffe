//! Links between ranks on GPUs of any machines, by NCCL's send and receive.
//!
//! The path of a record: sealed by the session's backend in host memory, copied to the sender's GPU, carried by NCCL to the
//! receiver's, copied to host memory, verified and opened there. NCCL, the GPUs' memory that it uses and whatever lies
//! between them see ciphertext, tags and lengths.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUstream;

use super::nccl::{Comm, Functions, Group};
use super::stream::Event;
use super::{Device, DeviceBuffer, HostBuffer, Stream};
use crate::channel::GroupSecret;
use crate::collective::{Bootstrap, Communicator, Options};
use crate::transport::lockstep::{Exchange, Lockstep};
use crate::{Error, Result};

/// `NCCL_UNIQUE_ID_BYTES`.
const ID_BYTES: usize = 128;
/// `ncclInProgress`.
const IN_PROGRESS: c_int = 7;
/// `ncclUint8`.
const BYTES: c_int = 1;
/// What `NCCL_CONFIG_INITIALIZER` leaves to NCCL, as a number.
const UNDEFINED: c_int = c_int::MIN;
/// Bytes that an exchange moves from one rank to another at most, if no record is longer: enough to hide what a round costs.
const CAPACITY: usize = 4 << 20;
/// A frame's bytes around a record, rounded up.
const FRAME_BYTES: usize = 64;
/// Between looks at whether NCCL is done.
const POLL: Duration = Duration::from_micros(20);

/// `ncclUniqueId`.
#[derive(Clone, Copy)]
#[repr(C)]
struct UniqueId([u8; ID_BYTES]);

/// `ncclConfig_t` as it was in NCCL 2.18; later versions take it by its size.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

type GetUniqueId = unsafe extern "C" fn(*mut UniqueId) -> c_int;
type CommInitRankConfig = unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int, *mut Config) -> c_int;
type CommGetAsyncError = unsafe extern "C" fn(Comm, *mut c_int) -> c_int;
type CommAbort = unsafe extern "C" fn(Comm) -> c_int;
type Send = unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Comm, CUstream) -> c_int;
type Receive = unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Comm, CUstream) -> c_int;

/// A rank of an NCCL communicator that moves bytes between host memories.
pub struct NcclExchange {
    functions: Functions,
    communicator: Comm,
    rank: usize,
    ranks: usize,
    capacity: usize,
    stream: Stream,
    done: Event,
    // By rank, `capacity` bytes each.
    outgoing: Staging,
    incoming: Staging,
}

/// Pinned memory of the host, and as much of the device.
struct Staging {
    host: HostBuffer,
    device: DeviceBuffer,
}

impl Staging {
    fn new(device: &Device, bytes: usize) -> Result<Self> {
        Ok(Self { host: HostBuffer::new(device, bytes)?, device: DeviceBuffer::new(device, bytes)? })
    }
}

// SAFETY: a communicator may be used from any thread, by one at a time.
unsafe impl std::marker::Send for NcclExchange {}

impl NcclExchange {
    /// What rank 0 gives to all ranks, for [`NcclExchange::join`]: NCCL's unique id.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when NCCL cannot be loaded; [`Error::Cuda`] with NCCL's own text.
    pub fn id() -> Result<Vec<u8>> {
        let functions = Functions::load()?;
        let mut id = UniqueId([0; ID_BYTES]);
        // SAFETY: the type is the one in nccl.h; the pointer is valid for the write.
        unsafe { functions.check(functions.symbol::<GetUniqueId>(b"ncclGetUniqueId\0")?(&mut id))? };
        Ok(id.0.to_vec())
    }

    /// Joins as rank `rank` of `ranks`, each on a GPU of its own, which NCCL demands. `capacity` is the most bytes that one
    /// exchange moves from one rank to another, the same on all ranks; each rank takes twice as much pinned memory and
    /// twice as much of the device's for every rank.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when NCCL cannot be loaded, [`Error::InvalidArgument`] when `id` is none or the rank no rank,
    /// [`Error::Handshake`] when the others don't come before `end`, [`Error::Cuda`] with NCCL's own text.
    pub fn join(
        id: &[u8],
        [rank, ranks]: [usize; 2],
        device: &Device,
        capacity: usize,
        end: Instant,
    ) -> Result<Self> {
        let id = id
            .try_into()
            .map_err(|_| Error::InvalidArgument(format!("{} bytes are no NCCL id", id.len())))?;
        if rank >= ranks || c_int::try_from(ranks).is_err() || capacity == 0 {
            return Err(Error::InvalidArgument(format!("rank {rank} of {ranks}, {capacity} bytes at once")));
        }
        let bytes = capacity.checked_mul(ranks);
        let bytes = bytes.ok_or_else(|| Error::InvalidArgument(format!("a capacity of {capacity} bytes")))?;
        let mut exchange = Self {
            functions: Functions::load()?,
            communicator: std::ptr::null_mut(),
            rank,
            ranks,
            capacity,
            stream: Stream::new(device)?,
            done: Event::untimed(device)?,
            outgoing: Staging::new(device, bytes)?,
            incoming: Staging::new(device, bytes)?,
        };
        let mut config = Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 21800,
            // Calls return at once, so that no rank waits forever for one that doesn't come.
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        };
        let _current = device.bind()?;
        // SAFETY: the type is the one in nccl.h; the pointers are valid, and the context is the device's.
        let code = unsafe {
            let join = exchange.functions.symbol::<CommInitRankConfig>(b"ncclCommInitRankConfig\0")?;
            join(&mut exchange.communicator, ranks as c_int, UniqueId(id), rank as c_int, &mut config)
        };
        exchange.settle(code, || match Instant::now() < end {
            true => Ok(()),
            false => Err(Error::Handshake("not all ranks joined the NCCL communicator in time".into())),
        })?;
        Ok(exchange)
    }

    /// Waits until NCCL has done what a call began, or `go_on` fails.
    fn settle(&self, code: c_int, go_on: impl Fn() -> Result<()>) -> Result<()> {
        if code != IN_PROGRESS {
            return self.functions.check(code);
        }
        loop {
            match self.state()? {
                IN_PROGRESS => go_on()?,
                code => return self.functions.check(code),
            }
            std::thread::sleep(POLL);
        }
    }

    /// `ncclCommGetAsyncError`.
    fn state(&self) -> Result<c_int> {
        let mut state = 0;
        // SAFETY: the type is the one in nccl.h; the communicator is alive, the pointer valid for the write.
        unsafe {
            let ask = self.functions.symbol::<CommGetAsyncError>(b"ncclCommGetAsyncError\0")?;
            self.functions.check(ask(self.communicator, &mut state))?;
        }
        Ok(state)
    }

    /// Queues all of an exchange's sends and receives as one group.
    fn group(&self, outgoing: &[Vec<u8>], incoming: &[Vec<u8>]) -> Result<c_int> {
        // SAFETY: the types are those in nccl.h; each place is `capacity` bytes of a live buffer, which the caller has checked
        // suffice, and the stream is of the communicator's device.
        unsafe {
            let send = self.functions.symbol::<Send>(b"ncclSend\0")?;
            let receive = self.functions.symbol::<Receive>(b"ncclRecv\0")?;
            let end = self.functions.symbol::<Group>(b"ncclGroupEnd\0")?;
            self.functions.check(self.functions.symbol::<Group>(b"ncclGroupStart\0")?())?;
            let mut failed = 0;
            for (peer, (sent, received)) in outgoing.iter().zip(incoming).enumerate() {
                let at = (peer * self.capacity) as u64;
                let (from, to) = (self.outgoing.device.pointer() + at, self.incoming.device.pointer() + at);
                let (peer, handle) = (peer as c_int, self.stream.handle());
                let mut codes = [0; 2];
                if !sent.is_empty() {
                    codes[0] =
                        send(from as *const c_void, sent.len(), BYTES, peer, self.communicator, handle);
                }
                if !received.is_empty() {
                    codes[1] =
                        receive(to as *mut c_void, received.len(), BYTES, peer, self.communicator, handle);
                }
                failed = codes.into_iter().find(|&code| code != 0 && code != IN_PROGRESS).unwrap_or(failed);
            }
            // A group that was begun must end.
            let ended = end();
            Ok(if failed == 0 { ended } else { failed })
        }
    }
}

impl Exchange for NcclExchange {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn capacity(&self) -> usize {
        self.capacity
    }

    fn exchange(&mut self, outgoing: &[Vec<u8>], incoming: &mut [Vec<u8>], stop: &AtomicBool) -> Result<()> {
        let capacity = self.capacity;
        let fits = |places: &[Vec<u8>]| {
            places.len() == self.ranks && places.iter().all(|bytes| bytes.len() <= capacity)
        };
        if !fits(outgoing) || !fits(incoming) {
            return Err(Error::InvalidArgument("an exchange of more than the capacity".into()));
        }
        if outgoing.iter().chain(incoming.iter()).all(Vec::is_empty) {
            return Ok(());
        }
        let go_on = || match stop.load(Ordering::Relaxed) {
            false => Ok(()),
            true => Err(Error::Cuda("NCCL: stopped".into())),
        };
        let _current = self.stream.device().bind()?;
        // SAFETY: the exchange before was waited for, so that no device work uses the memory.
        let pinned = unsafe { self.outgoing.host.as_mut_slice() };
        for (place, bytes) in pinned.chunks_exact_mut(capacity).zip(outgoing) {
            place[..bytes.len()].copy_from_slice(bytes);
        }
        for (peer, bytes) in outgoing.iter().enumerate() {
            let at = peer * capacity;
            let (from, to) = (self.outgoing.host.pointer(), self.outgoing.device.pointer());
            // SAFETY: both ranges are inside of live buffers, and are left alone until the wait below.
            unsafe { self.stream.copy(to + at as u64, from + at as u64, bytes.len())? };
        }
        let code = self.group(outgoing, incoming)?;
        self.settle(code, go_on)?;
        for (peer, bytes) in incoming.iter().enumerate() {
            let at = (peer * capacity) as u64;
            let (from, to) = (self.incoming.device.pointer(), self.incoming.host.pointer());
            // SAFETY: as above.
            unsafe { self.stream.copy(to + at, from + at, bytes.len())? };
        }
        self.stream.mark(&self.done)?;
        while !self.done.is_reached()? {
            // A peer whose process ended is an error of the communicator, where the network tells.
            self.settle(self.state()?, go_on)?;
            go_on()?;
            std::thread::sleep(POLL);
        }
        // SAFETY: the stream has passed the copies.
        let pinned = unsafe { self.incoming.host.as_slice() };
        for (place, bytes) in pinned.chunks_exact(capacity).zip(incoming) {
            let length = bytes.len();
            bytes.copy_from_slice(&place[..length]);
        }
        Ok(())
    }
}

impl Drop for NcclExchange {
    fn drop(&mut self) {
        let Ok(_current) = self.stream.device().bind() else { return };
        // Not `ncclCommDestroy`, which waits for the other ranks. It ends kernels that wait for them, so that the buffers can
        // be freed.
        // SAFETY: the type is the one in nccl.h; the communicator was made by `join`, and ends once.
        unsafe {
            if !self.communicator.is_null()
                && let Ok(abort) = self.functions.symbol::<CommAbort>(b"ncclCommAbort\0")
            {
                abort(self.communicator);
            }
        }
    }
}

impl fmt::Debug for NcclExchange {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "NcclExchange(rank {} of {} on {:?})", self.rank, self.ranks, self.stream.device())
    }
}

impl Communicator {
    /// As [`Communicator::new`], over NCCL instead of TCP: each rank has a GPU of its own, `device`, on any machine that NCCL
    /// reaches. Vectors lie in host memory and are sealed and opened by the options' backend; records travel through the
    /// GPUs' memory by NCCL's send and receive, which move ciphertext and tags. The ranks find each other by `bootstrap`,
    /// over which NCCL's id travels, authenticated.
    ///
    /// A rank whose process ends shows when NCCL notices, otherwise as a missed deadline.
    ///
    /// # Errors
    /// As [`Communicator::join`]; [`Error::Unsupported`] when NCCL cannot be loaded; [`Error::Cuda`] with NCCL's own text, as
    /// when two ranks are on one GPU.
    pub fn over_nccl(
        secret: &GroupSecret,
        rank: usize,
        ranks: usize,
        bootstrap: Box<dyn Bootstrap>,
        device: &Device,
        options: &Options,
    ) -> Result<Self> {
        let capacity = CAPACITY.max(options.record_bytes.saturating_add(FRAME_BYTES));
        // Every rank needs the library, and says so before any waits for another.
        let id = || match rank {
            0 => Ok((NcclExchange::id()?, ())),
            _ => Functions::load().map(|_| (Vec::new(), ())),
        };
        Self::linked(secret, [rank, ranks], bootstrap, options, id, |(), ids, end| {
            let exchange = NcclExchange::join(&ids[0], [rank, ranks], device, capacity, end)?;
            Ok(Box::new(Lockstep::new(exchange)?))
        })
    }
}
