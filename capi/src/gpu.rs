//! All-reduce on device memory, sealed by the GPU itself.

use std::ffi::c_void;
use std::sync::{Mutex, TryLockError};

use ringseal::cuda::{Device, GpuCommunicator as Rank, GpuOptions, RankBuffers, Stream};

use crate::argument;
use crate::communicator::{Callback, Gather, GroupOptions, check_ranks, options, secret};
use crate::status::{Failure, Status, guard, release};

/// One rank of a group of processes on one machine, each with a GPU or a share of one. One thread at a time may use a
/// handle: a second one gets RINGSEAL_STATUS_BUSY.
pub struct GpuCommunicator {
    device: Device,
    rank: Mutex<Rank>,
}

/// Joins a group of `ranks` processes of this machine as rank `rank`, on the GPU that CUDA numbers `device`, in its primary
/// context, and writes the handle to `out`. `max_bytes` is the length of the longest vector that will be reduced, the same
/// on all ranks; mailboxes take four times as much device memory. Otherwise as ringseal_communicator_create(); of the
/// schedules there are the rings and, of two ranks, the exchange; the options' backend and host have no meaning.
///
/// # Safety
/// Pointers are NULL or valid for what they are described to hold. `gather` may be called with `user` as long as the
/// handle is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_communicator_create(
    secret_bytes: *const u8,
    rank: usize,
    ranks: usize,
    device: usize,
    max_bytes: usize,
    group_options: *const GroupOptions,
    gather: Gather,
    user: *mut c_void,
    out: *mut *mut GpuCommunicator,
) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (out, secret, (options, host), chosen) = unsafe {
            let out = argument::place("out", out)?;
            out.write(std::ptr::null_mut());
            // The GPU's default is not the CPU's.
            let chosen = !group_options.is_null() && (*group_options).schedule != 0;
            (out, secret(secret_bytes)?, options(group_options)?, chosen)
        };
        let gather = gather.ok_or_else(|| Failure::argument("gather is null"))?;
        check_ranks(ranks)?;
        if rank >= ranks {
            return Err(Failure::argument(format!("rank {rank}: there are {ranks} ranks")));
        }
        let device = Device::open(device)?;
        let options = GpuOptions {
            crypto: options.crypto,
            algorithm: if chosen { options.algorithm } else { GpuOptions::fastest_algorithm(ranks) },
            max_bytes,
            timeout: options.timeout,
            key_bytes: options.key_bytes,
            ..GpuOptions::default()
        };
        let bootstrap = Box::new(Callback { gather, user, ranks, host });
        let rank = Rank::new(&secret, rank, ranks, bootstrap, &device, options)?;
        let handle = Box::new(GpuCommunicator { device, rank: Mutex::new(rank) });
        // SAFETY: checked above.
        unsafe { out.write(Box::into_raw(handle)) };
        Ok(())
    })
}

/// Leaves the group at once and frees the handle, after this rank's own work on the GPU. NULL is allowed. The other ranks'
/// collectives fail: after ones that went well, call ringseal_gpu_communicator_close().
///
/// # Safety
/// NULL, or a handle that is not destroyed yet and in no use.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_communicator_destroy(communicator: *mut GpuCommunicator) {
    // SAFETY: the caller's contract.
    unsafe { release(communicator) };
}

/// Leaves in good order, together with all other ranks, and frees the handle, also when it fails.
///
/// # Safety
/// NULL, or a handle that is not destroyed yet and in no use.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_communicator_close(communicator: *mut GpuCommunicator) -> Status {
    guard(|| {
        if communicator.is_null() {
            return Err(Failure::argument("communicator is null"));
        }
        // SAFETY: made by `Box::into_raw`; the caller gives it up.
        let communicator = unsafe { Box::from_raw(communicator) };
        let rank = communicator.rank.into_inner();
        Ok(rank
            .map_err(|_| Failure::new(Status::Internal, "a call on this communicator panicked"))?
            .close()?)
    })
}

/// # Safety
/// Null or a valid handle.
unsafe fn with(
    communicator: *const GpuCommunicator,
    body: impl FnOnce(&mut Rank, &Device) -> Result<(), Failure>,
) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        let communicator = unsafe { argument::reference("communicator", communicator)? };
        match communicator.rank.try_lock() {
            Ok(mut rank) => body(&mut rank, &communicator.device),
            Err(TryLockError::WouldBlock) => {
                Err(Failure::new(Status::Busy, "another thread is using this communicator"))
            }
            Err(TryLockError::Poisoned(_)) => {
                Err(Failure::new(Status::Internal, "a call on this communicator panicked; destroy it"))
            }
        }
    })
}

/// Queues an all-reduce of `count` elements in device memory on the CUDA stream `stream` (a cudaStream_t or CUstream; NULL
/// is the default stream), and doesn't wait. `input` and `output` may be the same address or apart. When the stream has
/// passed it, ringseal_gpu_outcome() says whether it went well; until that has said so, don't use `output`.
///
/// # Safety
/// Both hold `count` elements on the rank's device, aligned to an element, and are left alone until the stream has passed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_all_reduce(
    communicator: *const GpuCommunicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: u32,
    op: u32,
    stream: *mut c_void,
) -> Status {
    // SAFETY: the caller's contract.
    unsafe {
        with(communicator, |rank, device| {
            let (dtype, op) = (argument::dtype(dtype)?, argument::op(op)?);
            let bytes = argument::length(count, dtype)?;
            let buffers = RankBuffers { input: input.addr() as u64, output: output.addr() as u64 };
            if bytes > 0 && (buffers.input == 0 || buffers.output == 0) {
                return Err(Failure::argument("input or output is null, but has elements"));
            }
            if !buffers.input.is_multiple_of(dtype.size() as u64)
                || !buffers.output.is_multiple_of(dtype.size() as u64)
            {
                return Err(Failure::argument("input or output is not aligned to an element"));
            }
            ringseal::aead::check_overlap(buffers.input, buffers.output, bytes as u64)?;
            let stream = Stream::borrowed(device, stream.cast());
            Ok(rank.all_reduce(buffers, count, dtype, op, &stream)?)
        })
    }
}

/// Says how the collectives went that the rank's stream has passed: synchronize the stream first. After a failure the
/// outputs are wiped, and the communicator carries no data until it is rekeyed.
///
/// # Safety
/// NULL or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_outcome(communicator: *const GpuCommunicator) -> Status {
    // SAFETY: the caller's contract.
    unsafe { with(communicator, |rank, _| Ok(rank.outcome()?)) }
}

/// As ringseal_communicator_rekey(), after all work on the device.
///
/// # Safety
/// NULL or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_communicator_rekey(communicator: *const GpuCommunicator) -> Status {
    // SAFETY: the caller's contract.
    unsafe { with(communicator, |rank, _| Ok(rank.rekey()?)) }
}

/// Writes whether the communicator must be rekeyed because a collective has failed.
///
/// # Safety
/// Pointers are NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_communicator_poisoned(
    communicator: *const GpuCommunicator,
    poisoned: *mut bool,
) -> Status {
    // SAFETY: the caller's contract.
    unsafe {
        with(communicator, |rank, _| {
            argument::place("poisoned", poisoned)?.write(rank.is_poisoned());
            Ok(())
        })
    }
}
