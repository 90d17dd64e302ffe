//! Sealed copies between host and device memory.

use std::ffi::c_void;
use std::sync::{Mutex, TryLockError};

use ringseal::channel::KeyLength;
use ringseal::copy::CopyOptions;
use ringseal::cuda::{Device, Kernels, SealedCopy, Stream};

use crate::argument;
use crate::communicator::secret;
use crate::status::{Failure, Status, guard, release};

/// Both ends, in host memory and in one GPU's, of sealed copies in both directions. One thread at a time may use a handle: a
/// second one gets RINGSEAL_STATUS_BUSY.
pub struct GpuCopy {
    device: Device,
    copy: Mutex<SealedCopy>,
}

/// How sealed copies are made. A field that is zero has its default, except `struct_bytes`: set it to
/// sizeof(ringseal_copy_options).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct GpuCopyOptions {
    /// sizeof(ringseal_copy_options).
    pub struct_bytes: usize,
    /// A number of enum ringseal_protection, but not RINGSEAL_PROTECTION_NONE.
    pub protection: u32,
    /// Bytes sealed as one message: a multiple of 16, at most 1 GiB. Default: 65536.
    pub record_bytes: usize,
    /// Records that are moved at once. Default: 64.
    pub piece_records: usize,
    /// Pieces under way at once; staging memory for them is pinned on the host, and as much is taken on the device.
    /// Default: 8.
    pub slots: usize,
    /// Threads that seal and open on the host; each copy starts its own. Default: one for each processor but one.
    pub threads: usize,
    /// Bytes that a key may encrypt before the next one is used. Default: 389 GB.
    pub key_bytes: u64,
}

/// # Safety
/// Null, or `struct_bytes` bytes that begin as `GpuCopyOptions` does.
unsafe fn options(given: *const GpuCopyOptions) -> Result<CopyOptions, Failure> {
    let mut options = CopyOptions::default();
    if given.is_null() {
        return Ok(options);
    }
    // SAFETY: the caller's contract; the first field is there in any case.
    let bytes = *unsafe { argument::reference("options", given.cast::<usize>())? };
    // Longer ones come with later versions, which will take this length too.
    if bytes != size_of::<GpuCopyOptions>() {
        return Err(Failure::argument(format!(
            "options->struct_bytes is {bytes}: set it to sizeof(ringseal_copy_options), here {}",
            size_of::<GpuCopyOptions>()
        )));
    }
    // SAFETY: the caller says that it is this structure; its fields allow any bits.
    let given = unsafe { argument::reference("options", given)? };
    options.key = match given.protection {
        0 => KeyLength::Aes256,
        1 => KeyLength::Aes128,
        2 => return Err(Failure::argument("a sealed copy needs a protection other than none")),
        other => {
            return Err(Failure::argument(format!("{other} is no protection (enum ringseal_protection)")));
        }
    };
    for (field, given) in [
        (&mut options.record_bytes, given.record_bytes),
        (&mut options.piece_records, given.piece_records),
        (&mut options.slots, given.slots),
        (&mut options.threads, given.threads),
    ] {
        if given != 0 {
            *field = given;
        }
    }
    if given.key_bytes != 0 {
        options.key_bytes = given.key_bytes;
    }
    options.check()?;
    Ok(options)
}

/// Prepares sealed copies between this process's memory and that of the GPU that CUDA numbers `device`, in its primary
/// context (the one that the CUDA runtime uses), and writes the handle to `out`. The keys come from the secret's
/// RINGSEAL_SECRET_BYTES bytes and fresh randomness; the caller still owns, and should erase, the secret. Pins staging memory,
/// starts streams of its own, waits for the GPU, and loads the kernels: keep the handle. RINGSEAL_STATUS_NO_DEVICE without a
/// usable GPU of compute capability 8.0 or newer.
///
/// # Safety
/// Pointers are NULL or valid for what they are described to hold.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_copy_create(
    secret_bytes: *const u8,
    device: usize,
    copy_options: *const GpuCopyOptions,
    out: *mut *mut GpuCopy,
) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (out, secret, options) = unsafe {
            let out = argument::place("out", out)?;
            out.write(std::ptr::null_mut());
            (out, secret(secret_bytes)?, options(copy_options)?)
        };
        let device = Device::open(device)?;
        let copy = Mutex::new(SealedCopy::new(&Kernels::embedded(&device)?, &secret, options)?);
        // SAFETY: checked above.
        unsafe { out.write(Box::into_raw(Box::new(GpuCopy { device, copy }))) };
        Ok(())
    })
}

/// Erases the keys and frees the staging memory and the handle. Streams that were given with copies are not touched. NULL is
/// allowed.
///
/// # Safety
/// NULL, or from ringseal_gpu_copy_create() and not destroyed yet, and in no use.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_copy_destroy(copy: *mut GpuCopy) {
    // SAFETY: the caller's contract.
    unsafe { release(copy) };
}

/// # Safety
/// Null or a valid handle.
unsafe fn with(
    copy: *const GpuCopy,
    body: impl FnOnce(&mut SealedCopy, &Device) -> Result<(), Failure>,
) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        let handle = unsafe { argument::reference("copy", copy)? };
        match handle.copy.try_lock() {
            Ok(mut copy) => body(&mut copy, &handle.device),
            Err(TryLockError::WouldBlock) => {
                Err(Failure::new(Status::Busy, "another thread is using this copy handle"))
            }
            Err(TryLockError::Poisoned(_)) => {
                Err(Failure::new(Status::Internal, "a call on this copy handle panicked; destroy it"))
            }
        }
    })
}

fn check_device(name: &str, address: *const c_void, bytes: usize) -> Result<u64, Failure> {
    if address.is_null() && bytes > 0 {
        return Err(Failure::argument(format!("{name} is null, but should have {bytes} bytes")));
    }
    Ok(address.addr() as u64)
}

/// Copies `bytes` bytes of host memory at `source` to device memory at `destination`, a multiple of 16: sealed record by
/// record on host threads, moved as ciphertext through pinned staging memory, opened on the GPU. The copy begins when the
/// work that is on the CUDA stream `stream` (a cudaStream_t or CUstream; NULL is the default stream) is done, and the call
/// waits for its end: after RINGSEAL_STATUS_OK all records have verified and any stream may use `destination`.
///
/// After another status, once the copy has begun, `destination` is zeros (if the GPU still works), and further copies are
/// RINGSEAL_STATUS_POISONED until ringseal_gpu_copy_rekey(). RINGSEAL_STATUS_INVALID_ARGUMENT and
/// RINGSEAL_STATUS_KEY_EXHAUSTED come before anything is copied and leave all as it is. A stream that is being captured is
/// refused.
///
/// # Safety
/// Pointers are NULL or valid for what they are described to hold. Until the call returns, nothing else writes `source`, and
/// nothing but the stream's earlier work uses `destination`, which is memory of the handle's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_copy_to_device(
    copy: *const GpuCopy,
    destination: *mut c_void,
    source: *const c_void,
    bytes: usize,
    stream: *mut c_void,
) -> Status {
    // SAFETY: the caller's contract.
    unsafe {
        with(copy, |copy, device| {
            let destination = check_device("destination", destination, bytes)?;
            let source = argument::bytes("source", source.cast(), bytes)?;
            Ok(copy.to_device(destination, source, &Stream::borrowed(device, stream.cast()))?)
        })
    }
}

/// Copies `bytes` bytes of device memory at `source`, a multiple of 16, to host memory at `destination`: sealed on the GPU,
/// moved as ciphertext, opened on host threads. Otherwise as ringseal_gpu_copy_to_device(), and `destination` is zeros after
/// a copy that failed.
///
/// # Safety
/// Pointers are NULL or valid for what they are described to hold. Until the call returns, nothing else uses `destination`,
/// and nothing but the stream's earlier work writes `source`, which is memory of the handle's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_copy_to_host(
    copy: *const GpuCopy,
    destination: *mut c_void,
    source: *const c_void,
    bytes: usize,
    stream: *mut c_void,
) -> Status {
    // SAFETY: the caller's contract.
    unsafe {
        with(copy, |copy, device| {
            let source = check_device("source", source, bytes)?;
            let destination = argument::bytes_mut("destination", destination.cast(), bytes)?;
            Ok(copy.to_host(destination, source, &Stream::borrowed(device, stream.cast()))?)
        })
    }
}

/// Begins anew under other keys, from a secret of RINGSEAL_SECRET_BYTES bytes, which may be the same, and fresh randomness;
/// after a failed copy too.
///
/// # Safety
/// Pointers are NULL or valid for what they are described to hold.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_copy_rekey(copy: *const GpuCopy, secret_bytes: *const u8) -> Status {
    // SAFETY: the caller's contract.
    unsafe { with(copy, |copy, _| Ok(copy.re_key(&secret(secret_bytes)?)?)) }
}

/// Writes whether the handle must be rekeyed because a copy has failed.
///
/// # Safety
/// Pointers are NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_copy_poisoned(copy: *const GpuCopy, poisoned: *mut bool) -> Status {
    // SAFETY: the caller's contract.
    unsafe {
        with(copy, |copy, _| {
            argument::place("poisoned", poisoned)?.write(copy.is_poisoned());
            Ok(())
        })
    }
}
