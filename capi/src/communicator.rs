//! Sealed collectives on host memory.

use std::ffi::{c_char, c_void};
use std::mem::offset_of;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Mutex, TryLockError};
use std::time::Duration;

use ringseal::channel::{GroupSecret, MAX_RANKS};
use ringseal::collective::{
    Algorithm, Bootstrap, Buffers, Communicator as Rank, Crypto, KeyLength, Options, Partition, Rendezvous,
    Request,
};
use ringseal::cuda::KeystreamAhead;
use ringseal::{Dtype as HostDtype, Error, ReduceOp};

use crate::argument;
use crate::status::{Failure, Status, guard, release};

/// Bytes of a group secret.
pub const SECRET_BYTES: usize = 32;
/// Bytes that each rank gives in a gather.
pub const GATHER_BYTES: usize = 1024;

/// Element types, little-endian in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Dtype {
    /// IEEE 754 binary32.
    F32 = 0,
    /// IEEE 754 binary64.
    F64 = 1,
    /// IEEE 754 binary16; accumulated in binary32 within a step.
    F16 = 2,
    /// bfloat16; accumulated in binary32 within a step.
    Bf16 = 3,
    /// Signed 8-bit, wrapping.
    I8 = 4,
    /// Unsigned 8-bit, wrapping.
    U8 = 5,
    /// Signed 32-bit, wrapping.
    I32 = 6,
    /// Unsigned 32-bit, wrapping.
    U32 = 7,
    /// Signed 64-bit, wrapping.
    I64 = 8,
    /// Unsigned 64-bit, wrapping.
    U64 = 9,
}

/// Reductions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Op {
    /// Sum; integers wrap.
    Sum = 0,
    /// Sum divided once by the number of ranks at the end.
    Avg = 1,
    /// Minimum; NaN on any rank gives NaN.
    Min = 2,
    /// Maximum; NaN on any rank gives NaN.
    Max = 3,
    /// Product; integers wrap.
    Prod = 4,
}

/// What protects records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Protection {
    /// AES-256-GCM.
    Aes256Gcm = 0,
    /// AES-128-GCM.
    Aes128Gcm = 1,
    /// Nothing: plaintext leaves the rank. For comparison only.
    None = 2,
}

/// How collectives are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Schedule {
    /// The library's choice: the relay ring on host memory; on GPUs the exchange of two ranks, else the relay ring.
    Default = 0,
    /// A ring whose finished chunks travel on as their owners sealed them.
    RelayRing = 1,
    /// A ring that opens and seals at each hop.
    Ring = 2,
    /// Two hops, for small vectors.
    Direct = 3,
    /// A tree.
    Tree = 4,
    /// Each rank sends its whole vector to all others: one hop, for two ranks.
    Exchange = 5,
}

/// What carries records between the processes of a GPU communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Transport {
    /// The GPUs themselves, which reach each other's memory: those of one machine.
    Peer = 0,
    /// NCCL's send and receive, for ranks with a GPU each on any machines that NCCL reaches. libnccl.so.2 is loaded when it
    /// is first used. Run on two H200s of one machine, not yet on several machines.
    Nccl = 1,
}

/// How a group works. A field that is zero or NULL has its default, except `struct_bytes`: set it to
/// sizeof(ringseal_options). All but backend, timeout and host must be alike on all ranks.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct GroupOptions {
    /// sizeof(ringseal_options).
    pub struct_bytes: usize,
    /// A number of enum ringseal_protection.
    pub protection: u32,
    /// A number of enum ringseal_schedule.
    pub schedule: u32,
    /// Where the cipher runs: "cpu" (default), "cuda", "emulated" or "auto".
    pub backend: *const c_char,
    /// Bytes of a record, a multiple of 16. Default: 65536.
    pub record_bytes: usize,
    /// How long to wait for a rank, in milliseconds. Default: 30000.
    pub timeout_ms: u64,
    /// Bytes that a key may encrypt before the next one is used. Default: 389 GB.
    pub key_bytes: u64,
    /// An IP address of this machine by which the other ranks reach it. Default: 127.0.0.1; with a rendezvous, the
    /// address that it was reached from.
    pub host: *const c_char,
    /// Of a GPU communicator: all-reduces whose keystream is kept at once, made ahead of time by
    /// ringseal_gpu_make_keystream(). Default: none is kept.
    pub keystream_collectives: usize,
    /// Bytes of the longest of these all-reduces; what a longer one has beyond finds no keystream.
    pub keystream_bytes: usize,
    /// Multiprocessors that make keystream at a time. Default: all.
    pub keystream_makers: usize,
    /// Of a GPU communicator: a number of enum ringseal_transport. Other communicators take none but the default.
    pub transport: u32,
    /// With RINGSEAL_TRANSPORT_NCCL: ranks of a node, which must divide the number of ranks; rank r is in node r /
    /// node_ranks. All-reduces sum inside nodes first, as RINGSEAL_TRANSPORT_PEER does, and then between them by NCCL.
    /// Default: there are no nodes.
    pub node_ranks: usize,
    /// Of a GPU communicator: multiprocessors that a rank's collectives may take, so that what computes beside them has the
    /// others. Default: all. The rank with the fewest decides for all.
    pub sm_budget: usize,
}

/// Of `GroupOptions` before it had keystream: a program that was compiled then gives no more.
const OPTIONS_WITHOUT_KEYSTREAM: usize = offset_of!(GroupOptions, keystream_collectives);
/// And before it had transports.
const OPTIONS_WITHOUT_TRANSPORT: usize = offset_of!(GroupOptions, transport);
/// And before it had a limit of multiprocessors.
const OPTIONS_WITHOUT_SM_BUDGET: usize = offset_of!(GroupOptions, sm_budget);

/// Gathers `bytes` bytes of every rank at every rank: gives `message`, and fills `gathered`, `bytes` times the number of
/// ranks, in the order of the ranks. MPI_Allgather does just this. `bytes` is RINGSEAL_GATHER_BYTES on all ranks and in
/// all calls. `user` is what was given with the function. Returns 0 when done; when a rank does not come within
/// `timeout_ms`, anything else. What is gathered needs no protection.
pub type Gather = Option<
    unsafe extern "C" fn(
        user: *mut c_void,
        message: *const u8,
        bytes: usize,
        gathered: *mut u8,
        timeout_ms: u64,
    ) -> i32,
>;

/// One rank of a group. A handle may move between threads, but only one may use it at a time: a second one gets
/// RINGSEAL_STATUS_BUSY. Different ranks' handles are independent.
pub struct Communicator(Mutex<Rank>);

/// The caller's function as a bootstrap: messages of any length, up to a limit, in blocks of one length.
pub(crate) struct Callback {
    pub(crate) gather: unsafe extern "C" fn(*mut c_void, *const u8, usize, *mut u8, u64) -> i32,
    pub(crate) user: *mut c_void,
    pub(crate) ranks: usize,
    pub(crate) host: IpAddr,
}

// SAFETY: the caller promises that the function may be called with `user` from whatever thread uses the communicator.
unsafe impl Send for Callback {}

impl Bootstrap for Callback {
    fn gather(&mut self, message: &[u8], timeout: Duration) -> ringseal::Result<Vec<Vec<u8>>> {
        let mut block = [0; GATHER_BYTES];
        let Some(place) = block.get_mut(2..2 + message.len()) else {
            return Err(Error::Handshake(format!("a message of {} bytes is too long", message.len())));
        };
        place.copy_from_slice(message);
        block[..2].copy_from_slice(&(message.len() as u16).to_le_bytes());
        let mut gathered = vec![0; GATHER_BYTES * self.ranks];
        let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        // SAFETY: the caller promised such a function; both buffers have the length that it is told.
        let outcome = unsafe {
            (self.gather)(self.user, block.as_ptr(), GATHER_BYTES, gathered.as_mut_ptr(), timeout_ms)
        };
        if outcome != 0 {
            return Err(Error::Handshake(format!("the gather function returned {outcome}")));
        }
        let message = |(rank, block): (usize, &[u8])| {
            let bytes = usize::from(u16::from_le_bytes([block[0], block[1]]));
            let message = block.get(2..2 + bytes).map(<[u8]>::to_vec);
            message.ok_or_else(|| Error::Handshake(format!("what was gathered of rank {rank} is no message")))
        };
        gathered.chunks_exact(GATHER_BYTES).enumerate().map(message).collect()
    }

    fn interface(&self) -> IpAddr {
        self.host
    }
}

/// The caller's options; those that are not given are zeros.
///
/// # Safety
/// Null, or `struct_bytes` bytes that begin as `GroupOptions` does.
pub(crate) unsafe fn read(given: *const GroupOptions) -> Result<GroupOptions, Failure> {
    let mut all = GroupOptions {
        struct_bytes: 0,
        protection: 0,
        schedule: 0,
        backend: std::ptr::null(),
        record_bytes: 0,
        timeout_ms: 0,
        key_bytes: 0,
        host: std::ptr::null(),
        keystream_collectives: 0,
        keystream_bytes: 0,
        keystream_makers: 0,
        transport: 0,
        node_ranks: 0,
        sm_budget: 0,
    };
    if !given.is_null() {
        // SAFETY: the caller's contract; the first field is there in any case.
        let bytes = *unsafe { argument::reference("options", given.cast::<usize>())? };
        // Longer ones come with later versions, which will take these lengths too.
        let lengths = [
            OPTIONS_WITHOUT_KEYSTREAM,
            OPTIONS_WITHOUT_TRANSPORT,
            OPTIONS_WITHOUT_SM_BUDGET,
            size_of::<GroupOptions>(),
        ];
        if !lengths.contains(&bytes) {
            return Err(Failure::argument(format!(
                "options->struct_bytes is {bytes}: set it to sizeof(ringseal_options), here {}",
                size_of::<GroupOptions>()
            )));
        }
        // SAFETY: the caller says that it is this structure, or its beginning; its fields allow any bits.
        unsafe { given.cast::<u8>().copy_to_nonoverlapping((&raw mut all).cast(), bytes) };
    }
    Ok(all)
}

/// What carries records between processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Carrier {
    Peer,
    Nccl,
    /// By nodes of so many ranks.
    NcclBetweenNodes(usize),
}

/// How many multiprocessors a field says, if any.
fn multiprocessors(field: &str, number: usize) -> Result<Option<u32>, Failure> {
    match number {
        0 => Ok(None),
        some => u32::try_from(some).map(Some).map_err(|_| {
            Failure::argument(format!("options->{field} is {some}: no GPU has so many multiprocessors"))
        }),
    }
}

impl GroupOptions {
    /// The keystream that is to be made ahead of time, if any.
    pub(crate) fn keystream(&self) -> Result<Option<KeystreamAhead>, Failure> {
        let (collectives, bytes) = (self.keystream_collectives, self.keystream_bytes);
        let makers = multiprocessors("keystream_makers", self.keystream_makers)?;
        match (collectives, bytes, makers) {
            (0, 0, None) => Ok(None),
            (0, ..) | (_, 0, _) => Err(Failure::argument(format!(
                "options->keystream_collectives is {collectives} and keystream_bytes {bytes}: set both, or no field of \
                 keystream"
            ))),
            _ => Ok(Some(KeystreamAhead { collectives, bytes, makers })),
        }
    }

    /// The multiprocessors that a rank may take, if they are limited.
    pub(crate) fn sm_budget(&self) -> Result<Option<u32>, Failure> {
        multiprocessors("sm_budget", self.sm_budget)
    }

    pub(crate) fn carrier(&self) -> Result<Carrier, Failure> {
        match (self.transport, self.node_ranks) {
            (0, 0) => Ok(Carrier::Peer),
            (0, _) => Err(Failure::argument("options->node_ranks without RINGSEAL_TRANSPORT_NCCL")),
            (1, 0) => Ok(Carrier::Nccl),
            (1, node_ranks) => Ok(Carrier::NcclBetweenNodes(node_ranks)),
            (other, _) => {
                Err(Failure::argument(format!("{other} is no transport (enum ringseal_transport)")))
            }
        }
    }

    /// What any ranks take.
    ///
    /// # Safety
    /// Texts are null, or end with a zero byte.
    pub(crate) unsafe fn common(&self) -> Result<(Options, IpAddr), Failure> {
        let crypto = match self.protection {
            0 => Crypto::Gcm(KeyLength::Aes256),
            1 => Crypto::Gcm(KeyLength::Aes128),
            2 => Crypto::None,
            other => {
                return Err(Failure::argument(format!(
                    "{other} is no protection (enum ringseal_protection)"
                )));
            }
        };
        let algorithm = match self.schedule {
            0 | 1 => Algorithm::RelayRing,
            2 => Algorithm::Ring,
            3 => Algorithm::Direct,
            4 => Algorithm::Tree,
            5 => Algorithm::Exchange,
            other => {
                return Err(Failure::argument(format!("{other} is no schedule (enum ringseal_schedule)")));
            }
        };
        let mut options = Options { crypto, algorithm, ..Options::default() };
        // SAFETY: the caller's contract.
        let (backend, host) = unsafe {
            (argument::text("options->backend", self.backend)?, argument::text("options->host", self.host)?)
        };
        if let Some(backend) = backend {
            options.backend = ringseal::backend::by_name(backend)?;
        }
        if self.record_bytes != 0 {
            options.record_bytes = self.record_bytes;
        }
        if self.timeout_ms != 0 {
            options.timeout = Duration::from_millis(self.timeout_ms);
        }
        if self.key_bytes != 0 {
            options.key_bytes = self.key_bytes;
        }
        let host = match host {
            None => IpAddr::V4(Ipv4Addr::LOCALHOST),
            Some(host) => host.parse().map_err(|_| {
                Failure::argument(format!("options->host is {host:?}, which is no IP address"))
            })?,
        };
        if host.is_unspecified() {
            return Err(Failure::argument(format!(
                "options->host is {host}, where other ranks can't connect: give the address by which they reach this machine"
            )));
        }
        Ok((options, host))
    }
}

/// Options of ranks on host memory.
///
/// # Safety
/// As [`read`].
unsafe fn host_options(given: *const GroupOptions) -> Result<(Options, IpAddr), Failure> {
    // SAFETY: the caller's contract.
    let given = unsafe { read(given)? };
    match given.carrier()? {
        Carrier::Peer if given.sm_budget()?.is_some() => {
            Err(Failure::argument("options->sm_budget is for ringseal_gpu_communicator_create()"))
        }
        // SAFETY: the caller's contract.
        Carrier::Peer => unsafe { given.common() },
        _ => Err(Failure::argument("options->transport is for ringseal_gpu_communicator_create()")),
    }
}

/// # Safety
/// Null, or valid for reads of `SECRET_BYTES` bytes.
pub(crate) unsafe fn secret(secret: *const u8) -> Result<GroupSecret, Failure> {
    // SAFETY: the caller's contract.
    let bytes = unsafe { argument::bytes("secret", secret, SECRET_BYTES)? };
    let bytes = bytes.try_into().map_err(|_| Failure::argument("the secret's length"))?;
    Ok(GroupSecret::from_bytes(bytes))
}

/// Before memory is taken for them.
pub(crate) fn check_ranks(ranks: usize) -> Result<(), Failure> {
    match ranks {
        1..=MAX_RANKS => Ok(()),
        _ => Err(Failure::argument(format!("{ranks} ranks: at least 1 and at most {MAX_RANKS}"))),
    }
}

fn handle(rank: Rank) -> *mut Communicator {
    Box::into_raw(Box::new(Communicator(Mutex::new(rank))))
}

/// Makes a group of `ranks` ranks in this process, and writes a handle for each to `out`, which has room for them. Use
/// each from a thread of its own. `secret` has RINGSEAL_SECRET_BYTES random bytes, or is NULL for a secret of the
/// group's own. `options` may be NULL.
///
/// # Safety
/// Pointers are NULL or valid for what they are described to hold.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_communicator_create_group(
    secret_bytes: *const u8,
    ranks: usize,
    group_options: *const GroupOptions,
    out: *mut *mut Communicator,
) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (out, secret, options) = unsafe {
            let secret = if secret_bytes.is_null() { GroupSecret::random()? } else { secret(secret_bytes)? };
            (argument::place("out", out)?, secret, host_options(group_options)?.0)
        };
        check_ranks(ranks)?;
        for (at, rank) in Rank::in_process(ranks, &secret, &options)?.into_iter().enumerate() {
            // SAFETY: the caller has room for `ranks` handles.
            unsafe { out.add(at).write(handle(rank)) };
        }
        Ok(())
    })
}

/// Joins a group of `ranks` ranks, each in a process of its own, as rank `rank`, and writes its handle to `out`. Returns
/// when all have joined. `secret` has RINGSEAL_SECRET_BYTES bytes, the same on all ranks, from attestation or another
/// trusted channel. The ranks find each other by `gather`, which is called here and in ringseal_communicator_rekey(), on
/// the calling thread, always with `user`; then they are linked by TCP.
///
/// # Safety
/// Pointers are NULL or valid for what they are described to hold. `gather` may be called with `user` as long as the
/// handle is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_communicator_create(
    secret_bytes: *const u8,
    rank: usize,
    ranks: usize,
    group_options: *const GroupOptions,
    gather: Gather,
    user: *mut c_void,
    out: *mut *mut Communicator,
) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (out, secret, (options, host)) = unsafe {
            let out = argument::place("out", out)?;
            out.write(std::ptr::null_mut());
            (out, secret(secret_bytes)?, host_options(group_options)?)
        };
        let gather = gather.ok_or_else(|| Failure::argument("gather is null"))?;
        check_ranks(ranks)?;
        let bootstrap = Box::new(Callback { gather, user, ranks, host });
        let joined = Rank::new(&secret, rank, ranks, bootstrap, &options)?;
        // SAFETY: checked above.
        unsafe { out.write(handle(joined)) };
        Ok(())
    })
}

/// As ringseal_communicator_create(), for ranks that have no store in common: they find each other at `address`, which is
/// "unix:PATH" or "HOST:PORT". Rank 0 listens there, the others connect, and may come before it.
///
/// # Safety
/// Pointers are NULL or valid for what they are described to hold.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_communicator_create_rendezvous(
    secret_bytes: *const u8,
    rank: usize,
    ranks: usize,
    group_options: *const GroupOptions,
    address: *const c_char,
    out: *mut *mut Communicator,
) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (out, secret, options, address) = unsafe {
            let out = argument::place("out", out)?;
            out.write(std::ptr::null_mut());
            (out, secret(secret_bytes)?, host_options(group_options)?.0, argument::text("address", address)?)
        };
        let address = address.ok_or_else(|| Failure::argument("address is null"))?;
        check_ranks(ranks)?;
        let bootstrap = Box::new(Rendezvous::connect(address, rank, ranks, options.timeout)?);
        let joined = Rank::new(&secret, rank, ranks, bootstrap, &options)?;
        // SAFETY: checked above.
        unsafe { out.write(handle(joined)) };
        Ok(())
    })
}

/// Frees a rank and closes its links. NULL is allowed. The other ranks' collectives fail.
///
/// # Safety
/// NULL, or a handle that is not destroyed yet and in no use.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_communicator_destroy(communicator: *mut Communicator) {
    // SAFETY: the caller's contract.
    unsafe { release(communicator) };
}

/// Runs `body` on the rank, unless another thread is using it.
///
/// # Safety
/// Null or a valid handle.
unsafe fn with(
    communicator: *const Communicator,
    body: impl FnOnce(&mut Rank) -> Result<(), Failure>,
) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        let communicator = unsafe { argument::reference("communicator", communicator)? };
        match communicator.0.try_lock() {
            Ok(mut rank) => body(&mut rank),
            Err(TryLockError::WouldBlock) => {
                Err(Failure::new(Status::Busy, "another thread is using this communicator"))
            }
            Err(TryLockError::Poisoned(_)) => {
                Err(Failure::new(Status::Internal, "a call on this communicator panicked; destroy it"))
            }
        }
    })
}

/// Writes which rank this is, of how many, and whether it must be rekeyed because a collective has failed. Each of the
/// three may be NULL.
///
/// # Safety
/// Pointers are NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_communicator_info(
    communicator: *const Communicator,
    rank: *mut usize,
    ranks: *mut usize,
    poisoned: *mut bool,
) -> Status {
    // SAFETY: the caller's contract.
    unsafe {
        with(communicator, |communicator| {
            if !rank.is_null() {
                argument::place("rank", rank)?.write(communicator.rank());
            }
            if !ranks.is_null() {
                argument::place("ranks", ranks)?.write(communicator.ranks());
            }
            if !poisoned.is_null() {
                poisoned.write(communicator.is_poisoned());
            }
            Ok(())
        })
    }
}

/// Waits at most this long for a rank from now on, in milliseconds, at least 1.
///
/// # Safety
/// NULL or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_communicator_set_timeout(
    communicator: *const Communicator,
    timeout_ms: u64,
) -> Status {
    // SAFETY: the caller's contract.
    unsafe {
        with(communicator, |communicator| {
            if timeout_ms == 0 {
                return Err(Failure::argument("a timeout of zero"));
            }
            communicator.set_timeout(Duration::from_millis(timeout_ms));
            Ok(())
        })
    }
}

/// Starts a new session with new keys, together with all other ranks. Ends the poisoning after a failure, unless a rank
/// or its link is gone: then make a new group.
///
/// # Safety
/// NULL or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_communicator_rekey(communicator: *const Communicator) -> Status {
    // SAFETY: the caller's contract.
    unsafe { with(communicator, |communicator| Ok(communicator.rekey()?)) }
}

/// Writes which elements, from `begin` to before `end`, of a vector of `count` are rank `rank`'s chunk in a
/// reduce-scatter and an all-gather. Any count is allowed; the first chunks are one element longer where the ranks don't
/// divide it.
///
/// # Safety
/// Pointers are NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_chunk(
    count: usize,
    ranks: usize,
    rank: usize,
    begin: *mut usize,
    end: *mut usize,
) -> Status {
    guard(|| {
        if rank >= ranks {
            return Err(Failure::argument(format!("rank {rank}: there are {ranks} ranks")));
        }
        let chunk = Partition::new(count, ranks).range(rank);
        // SAFETY: the caller's contract.
        unsafe {
            argument::place("begin", begin)?.write(chunk.start);
            argument::place("end", end)?.write(chunk.end);
        }
        Ok(())
    })
}

/// A vector of `bytes` bytes, of which `input` holds `given` and `output` gets `wanted`, bytes from `at`. In place when
/// both lie in the same vector at the places where they belong.
struct Memory {
    input: *const u8,
    output: *mut u8,
    given: std::ops::Range<usize>,
    wanted: std::ops::Range<usize>,
}

impl Memory {
    /// # Safety
    /// `input` is null or valid for reads of the given part, `output` for writes of the wanted one, for `'a`.
    unsafe fn buffers<'a>(self) -> Result<Buffers<'a>, Failure> {
        let Self { input, output, given, wanted } = self;
        let (gives, gets) = (given.len(), wanted.len());
        if (input.is_null() && gives > 0) || (output.is_null() && gets > 0) {
            return Err(Failure::argument("input or output is null, but has elements"));
        }
        let (from, to) = (input.addr(), output.addr());
        let apart =
            gives == 0 || gets == 0 || from >= to.saturating_add(gets) || to >= from.saturating_add(gives);
        if apart {
            // SAFETY: the caller's contract; disjoint, as just checked.
            return unsafe {
                Ok(Buffers::Apart {
                    input: argument::bytes("input", input, gives)?,
                    output: argument::bytes_mut("output", output, gets)?,
                })
            };
        }
        // Where the whole vector would begin by either.
        if from.wrapping_sub(given.start) != to.wrapping_sub(wanted.start) {
            return Err(Failure::argument(
                "input and output overlap; let them be apart, or each at its place in one vector",
            ));
        }
        let bytes = given.end.max(wanted.end);
        let whole = if given.start == 0 { input.cast_mut() } else { output };
        // The longer of the two is the whole vector, and valid for writes too: its other part is the caller's own.
        // SAFETY: the caller's contract.
        Ok(Buffers::InPlace(unsafe { argument::bytes_mut("vector", whole, bytes)? }))
    }
}

fn chunk(count: usize, rank: &Rank, dtype: HostDtype) -> std::ops::Range<usize> {
    let chunk = Partition::new(count, rank.ranks()).range(rank.rank());
    chunk.start * dtype.size()..chunk.end * dtype.size()
}

/// Reduces `input` over all ranks into every rank's `output`, `count` elements each, which may be the same address or
/// apart. All ranks get the same bits. On failure `output` is zeros, and the communicator must be rekeyed. `dtype` is a
/// number of enum ringseal_dtype, `op` of enum ringseal_op. All ranks call the same collectives in the same order.
///
/// # Safety
/// Pointers are NULL or valid for what they are described to hold, and used by nobody else meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_all_reduce(
    communicator: *const Communicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: u32,
    op: u32,
) -> Status {
    // SAFETY: the caller's contract.
    unsafe {
        with(communicator, |rank| {
            let (dtype, op) = (argument::dtype(dtype)?, argument::op(op)?);
            let whole = 0..argument::length(count, dtype)?;
            let memory =
                Memory { input: input.cast(), output: output.cast(), given: whole.clone(), wanted: whole };
            Ok(rank.run(Request::AllReduce(op), dtype, memory.buffers()?)?)
        })
    }
}

/// Reduces `input`, `count` elements, over all ranks; `output` gets this rank's chunk of the result: ringseal_chunk()
/// says which elements that are. Both may be apart, or `output` the chunk's own place in `input`. On failure the chunk
/// is zeros, and the communicator must be rekeyed.
///
/// # Safety
/// As ringseal_all_reduce().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_reduce_scatter(
    communicator: *const Communicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: u32,
    op: u32,
) -> Status {
    // SAFETY: the caller's contract.
    unsafe {
        with(communicator, |rank| {
            let (dtype, op) = (argument::dtype(dtype)?, argument::op(op)?);
            let given = 0..argument::length(count, dtype)?;
            let wanted = chunk(count, rank, dtype);
            let memory = Memory { input: input.cast(), output: output.cast(), given, wanted };
            Ok(rank.run(Request::ReduceScatter(op), dtype, memory.buffers()?)?)
        })
    }
}

/// Gathers all ranks' chunks, of which `input` is this rank's, to every rank's `output`, `count` elements:
/// ringseal_chunk() says which elements each rank gives. Both may be apart, or `input` the chunk's own place in
/// `output`. On failure `output` is zeros, and the communicator must be rekeyed.
///
/// # Safety
/// As ringseal_all_reduce().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_all_gather(
    communicator: *const Communicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: u32,
) -> Status {
    // SAFETY: the caller's contract.
    unsafe {
        with(communicator, |rank| {
            let dtype = argument::dtype(dtype)?;
            let wanted = 0..argument::length(count, dtype)?;
            let given = chunk(count, rank, dtype);
            let memory = Memory { input: input.cast(), output: output.cast(), given, wanted };
            Ok(rank.run(Request::AllGather, dtype, memory.buffers()?)?)
        })
    }
}

/// Gives rank `root`'s `input` to every rank's `output`, `count` elements. On the root both may be the same address or
/// apart; the other ranks' `input` is not looked at. On failure `output` is zeros, and the communicator must be rekeyed.
///
/// # Safety
/// As ringseal_all_reduce().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_broadcast(
    communicator: *const Communicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: u32,
    root: usize,
) -> Status {
    // SAFETY: the caller's contract.
    unsafe {
        with(communicator, |rank| {
            let dtype = argument::dtype(dtype)?;
            let wanted = 0..argument::length(count, dtype)?;
            let given = if rank.rank() == root { wanted.clone() } else { 0..0 };
            let memory = Memory { input: input.cast(), output: output.cast(), given, wanted };
            Ok(rank.run(Request::Broadcast { root }, dtype, memory.buffers()?)?)
        })
    }
}

// The header's numbers are the library's.
const _: () = {
    assert!(Dtype::U64 as u32 == HostDtype::U64 as u32 && Dtype::Bf16 as u32 == HostDtype::Bf16 as u32);
    assert!(Op::Prod as u32 == ReduceOp::Prod as u32 && Op::Avg as u32 == ReduceOp::Avg as u32);
};
