//! A rank of an NCCL communicator whose calls return at once, so that no rank waits forever for one that doesn't come.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUstream;

use super::nccl::{AllReduce, Comm, Functions, Group};
use super::{Device, Stream};
use crate::{Error, Result};

/// `NCCL_UNIQUE_ID_BYTES`.
pub(super) const ID_BYTES: usize = 128;
/// `ncclInProgress`.
const IN_PROGRESS: c_int = 7;
/// `ncclUint8`.
const BYTES: c_int = 1;
/// `ncclUint32`.
const WORDS: c_int = 3;
/// `ncclMax`.
const GREATEST: c_int = 2;
/// What `NCCL_CONFIG_INITIALIZER` leaves to NCCL, as a number.
const UNDEFINED: c_int = c_int::MIN;
/// Between looks at whether NCCL is done.
pub(super) const POLL: Duration = Duration::from_micros(20);

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

/// What a rank tells the others before they join.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ticket {
    gpu: [u8; 16],
    /// NCCL's id, of rank 0; of the others nothing.
    id: Vec<u8>,
}

impl Ticket {
    /// Of rank `rank`.
    ///
    /// # Errors
    /// As [`Link::id`], on every rank: each needs the library, and says so before any waits for another.
    pub(super) fn new(device: &Device, rank: usize) -> Result<Self> {
        let id = if rank == 0 { Link::id()? } else { Functions::load().map(|_| Vec::new())? };
        Ok(Self { gpu: device.uuid()?, id })
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        [&self.gpu[..], &self.id].concat()
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self> {
        match bytes.split_first_chunk() {
            Some((&gpu, id)) => Ok(Self { gpu, id: id.to_vec() }),
            None => Err(Error::Handshake("a rank's announcement is of another version".into())),
        }
    }

    /// NCCL's id, of all ranks' tickets.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when two ranks are on one GPU, of which NCCL says no more than that its use is invalid.
    pub(super) fn common_id(tickets: &[Self]) -> Result<Vec<u8>> {
        for (rank, ticket) in tickets.iter().enumerate() {
            if let Some(other) = tickets[..rank].iter().position(|other| other.gpu == ticket.gpu) {
                return Err(Error::InvalidArgument(format!(
                    "ranks {other} and {rank} are on one GPU: NCCL needs one for each rank; ranks that share GPUs of one \
                     machine do without NCCL"
                )));
            }
        }
        Ok(tickets.first().map(|first| first.id.clone()).unwrap_or_default())
    }
}

/// Bytes of device memory that go to another rank or come from one.
#[derive(Clone, Copy, Debug)]
pub(super) enum Move {
    Send { from: u64, bytes: usize, to: usize },
    Receive { to: u64, bytes: usize, from: usize },
}

/// One rank's end.
pub(super) struct Link {
    functions: Functions,
    communicator: Comm,
    device: Device,
}

// SAFETY: a communicator may be used from any thread, by one at a time.
unsafe impl std::marker::Send for Link {}

impl Link {
    /// What rank 0 gives to all ranks, for [`Link::join`]: NCCL's unique id.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when NCCL cannot be loaded; [`Error::Cuda`] with NCCL's own text.
    pub(super) fn id() -> Result<Vec<u8>> {
        let functions = Functions::load()?;
        let mut id = UniqueId([0; ID_BYTES]);
        // SAFETY: the type is the one in nccl.h; the pointer is valid for the write.
        unsafe { functions.check(functions.symbol::<GetUniqueId>(b"ncclGetUniqueId\0")?(&mut id))? };
        Ok(id.0.to_vec())
    }

    /// Joins as rank `rank` of `ranks`, each on a GPU of its own, which NCCL demands.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when NCCL cannot be loaded, [`Error::InvalidArgument`] when `id` is none or the rank no rank,
    /// [`Error::Handshake`] when the others don't come before `end`, [`Error::Cuda`] with NCCL's own text.
    pub(super) fn join(id: &[u8], [rank, ranks]: [usize; 2], device: &Device, end: Instant) -> Result<Self> {
        let id = id
            .try_into()
            .map_err(|_| Error::InvalidArgument(format!("{} bytes are no NCCL id", id.len())))?;
        if rank >= ranks || c_int::try_from(ranks).is_err() {
            return Err(Error::InvalidArgument(format!("rank {rank} of {ranks}")));
        }
        let functions = Functions::load()?;
        let mut link = Self { functions, communicator: std::ptr::null_mut(), device: device.clone() };
        let mut config = Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 21800,
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
            let join = link.functions.symbol::<CommInitRankConfig>(b"ncclCommInitRankConfig\0")?;
            join(&mut link.communicator, ranks as c_int, UniqueId(id), rank as c_int, &mut config)
        };
        link.settle(code, || match Instant::now() < end {
            true => Ok(()),
            false => Err(Error::Handshake("not all ranks joined the NCCL communicator in time".into())),
        })?;
        Ok(link)
    }

    /// Waits until NCCL has done what a call began, or `go_on` fails. After a call that queues, all of it is queued then.
    pub(super) fn settle(&self, code: c_int, go_on: impl Fn() -> Result<()>) -> Result<()> {
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

    /// `ncclCommGetAsyncError`: what the latest call has come to, for [`Self::settle`].
    fn state(&self) -> Result<c_int> {
        let mut state = 0;
        // SAFETY: the type is the one in nccl.h; the communicator is alive, the pointer valid for the write.
        unsafe {
            let ask = self.functions.symbol::<CommGetAsyncError>(b"ncclCommGetAsyncError\0")?;
            self.functions.check(ask(self.communicator, &mut state))?;
        }
        Ok(state)
    }

    /// # Errors
    /// What has gone wrong since the latest call, such as a peer whose process ended, where the network tells.
    pub(super) fn check(&self) -> Result<()> {
        match self.state()? {
            IN_PROGRESS => Ok(()),
            code => self.functions.check(code),
        }
    }

    /// Queues `moves` on `stream` as one group: all of them run at once. Of two ranks, each one's sends meet the other's
    /// receives in the order in which they are given. Returns a code for [`Self::settle`].
    ///
    /// # Safety
    /// The ranges are valid for the moves until the stream has passed them, and nothing else writes either, or reads what is
    /// received, until then.
    pub(super) unsafe fn group(
        &self,
        moves: impl IntoIterator<Item = Move>,
        stream: &Stream,
    ) -> Result<c_int> {
        let _current = self.device.bind()?;
        // SAFETY: the types are those in nccl.h; the ranges are the caller's promise.
        unsafe {
            let send = self.functions.symbol::<Send>(b"ncclSend\0")?;
            let receive = self.functions.symbol::<Receive>(b"ncclRecv\0")?;
            let end = self.functions.symbol::<Group>(b"ncclGroupEnd\0")?;
            self.functions.check(self.functions.symbol::<Group>(b"ncclGroupStart\0")?())?;
            let (communicator, handle) = (self.communicator, stream.handle());
            let mut failed = 0;
            for each in moves {
                let code = match each {
                    Move::Send { from, bytes, to } => {
                        send(from as *const c_void, bytes, BYTES, to as c_int, communicator, handle)
                    }
                    Move::Receive { to, bytes, from } => {
                        receive(to as *mut c_void, bytes, BYTES, from as c_int, communicator, handle)
                    }
                };
                if code != 0 && code != IN_PROGRESS {
                    failed = code;
                }
            }
            // A group that was begun must end.
            let ended = end();
            Ok(if failed == 0 { ended } else { failed })
        }
    }

    /// Queues, on all ranks, that the greatest of all ranks' 32-bit words at `from` comes to `to`. Returns a code for
    /// [`Self::settle`].
    ///
    /// # Safety
    /// As [`Self::group`].
    pub(super) unsafe fn greatest(&self, from: u64, to: u64, stream: &Stream) -> Result<c_int> {
        let _current = self.device.bind()?;
        // SAFETY: the type is the one in nccl.h; the words are the caller's promise.
        unsafe {
            let reduce = self.functions.symbol::<AllReduce>(b"ncclAllReduce\0")?;
            let (from, to) = (from as *const c_void, to as *mut c_void);
            Ok(reduce(from, to, 1, WORDS, GREATEST, self.communicator, stream.handle()))
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let Ok(_current) = self.device.bind() else { return };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_on_gpus_of_their_own_get_the_first_ones_id() {
        let ticket = |gpu, id: &[u8]| Ticket { gpu: [gpu; 16], id: id.to_vec() };
        let [first, second] = [ticket(0, &[7; ID_BYTES]), ticket(1, &[])];
        assert_eq!(Ticket::decode(&first.encode()).unwrap(), first);
        assert_eq!(Ticket::decode(&second.encode()).unwrap(), second);
        assert!(matches!(Ticket::decode(&[0; 15]), Err(Error::Handshake(_))));
        assert_eq!(Ticket::common_id(&[first.clone(), second.clone()]).unwrap(), [7; ID_BYTES]);
        let shared = Ticket::common_id(&[first.clone(), second, first]).unwrap_err();
        assert!(
            matches!(&shared, Error::InvalidArgument(text) if text.contains("ranks 0 and 2")),
            "{shared}"
        );
    }
}
