//! AES-GCM and GMAC on device memory.

use std::ffi::c_void;

use ringseal::aead::{AesKey, Iv};
use ringseal::cuda::{Device, DeviceAead, DeviceText, Kernels, Stream};

use crate::argument;
use crate::status::{Failure, Status, guard, release};

/// What ringseal_gpu_open() and ringseal_gpu_gmac_verify() write to device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Verdict {
    /// Not known: the stream is not there yet, or the work failed to run. Never take it for a success.
    Pending = 0,
    /// The tag is right.
    Verified = 1,
    /// The tag is wrong: the data were changed, or key, IV or additional data are others. The plaintext is zeros.
    Forged = 2,
}
const _: () = assert!(Verdict::Verified as u32 == ringseal::cuda::VERIFIED);
const _: () = assert!(Verdict::Forged as u32 == ringseal::cuda::FORGED);

/// An AES key, expanded on a GPU. Any number of threads may use one at once, on any streams; on the GPU, what is queued
/// with one key runs one after another.
pub struct GpuAead {
    device: Device,
    key: DeviceAead,
}

/// Expands a key of 16, 24 or 32 bytes (AES-128, AES-192, AES-256) on the GPU that CUDA numbers `device`, in its primary
/// context (the one that the CUDA runtime uses), and writes its handle to `out`. Waits for the GPU, and loads the kernels:
/// keep the handle. The caller still owns, and should erase, the key's bytes. RINGSEAL_STATUS_NO_DEVICE without a usable
/// GPU of compute capability 8.0 or newer.
///
/// # Safety
/// Pointers are NULL or valid for what they are described to hold.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_aead_create(
    key: *const u8,
    key_bytes: usize,
    device: usize,
    out: *mut *mut GpuAead,
) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (out, key) = unsafe {
            let out = argument::place("out", out)?;
            out.write(std::ptr::null_mut());
            (out, argument::bytes("key", key, key_bytes)?)
        };
        let key = AesKey::from_bytes(key)?;
        let device = Device::open(device)?;
        let key = DeviceAead::new(&Kernels::embedded(&device)?, &key)?;
        // SAFETY: checked above.
        unsafe { out.write(Box::into_raw(Box::new(GpuAead { device, key }))) };
        Ok(())
    })
}

/// Erases and frees a key, after all work on its device. NULL is allowed.
///
/// # Safety
/// NULL, or from ringseal_gpu_aead_create() and not destroyed yet, and in no use.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_aead_destroy(aead: *mut GpuAead) {
    // SAFETY: the caller's contract.
    unsafe { release(aead) };
}

/// Text and additional data, which are there if they have bytes.
fn text(
    aad: *const c_void,
    aad_bytes: usize,
    input: *const c_void,
    output: *mut c_void,
    bytes: usize,
) -> Result<DeviceText, Failure> {
    if bytes > 0 && (input.is_null() || output.is_null()) {
        return Err(Failure::argument("plaintext or ciphertext is null, but has bytes"));
    }
    if aad_bytes > 0 && aad.is_null() {
        return Err(Failure::argument("aad is null, but has bytes"));
    }
    Ok(DeviceText {
        input: input.addr() as u64,
        output: output.addr() as u64,
        bytes: bytes as u64,
        aad: aad.addr() as u64,
        aad_bytes: aad_bytes as u64,
    })
}

/// Queues, on the CUDA stream `stream` (a cudaStream_t or CUstream; NULL is the default stream), the encryption of `bytes`
/// bytes of device memory from `plaintext` to `ciphertext`, and doesn't wait (NIST SP 800-38D, 7.1). The tag's
/// RINGSEAL_TAG_BYTES bytes go to `tag`. `aad`, `plaintext`, `ciphertext` and `tag` are addresses in memory of the key's
/// device, `iv` is host memory, of which nothing is needed after the call.
///
/// The two texts may be the same address, but not overlap otherwise. Any alignment will do, and multiples of 16 are fast;
/// `tag` must be a multiple of 4. Ciphertext and tag are there when the stream has passed the work. After a status other
/// than RINGSEAL_STATUS_OK, don't use them, and don't use the IV again: after RINGSEAL_STATUS_INVALID_ARGUMENT and
/// RINGSEAL_STATUS_LENGTH nothing was queued; after others the work may have run.
///
/// Never use an IV twice with one key. So a stream that is being captured is refused: each launch of the graph would use
/// the IV again.
///
/// # Safety
/// Pointers are NULL or valid for what they are described to hold; what is in device memory until the stream has passed the
/// work.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_seal(
    aead: *const GpuAead,
    iv: *const u8,
    iv_bytes: usize,
    aad: *const c_void,
    aad_bytes: usize,
    plaintext: *const c_void,
    ciphertext: *mut c_void,
    bytes: usize,
    tag: *mut c_void,
    stream: *mut c_void,
) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        unsafe {
            let aead = argument::reference("aead", aead)?;
            let iv = Iv::new(argument::bytes("iv", iv, iv_bytes)?)?;
            let text = text(aad, aad_bytes, plaintext, ciphertext, bytes)?;
            let stream = Stream::borrowed(&aead.device, stream.cast());
            Ok(aead.key.seal(iv, text, tag.addr() as u64, &stream)?)
        }
    })
}

/// Queues the verification and decryption of `bytes` bytes of device memory from `ciphertext` to `plaintext`, and doesn't
/// wait (NIST SP 800-38D, 7.2). `tag` has RINGSEAL_TAG_BYTES bytes. Otherwise as ringseal_gpu_seal().
///
/// The status says whether the work was queued; whether the tag is right is known when the stream has passed the work, and
/// then stands in the uint32_t at `verdict`, in device memory (or pinned host memory that the device can write), aligned to
/// 4. In the order of the stream:
///
/// 1. The verdict becomes RINGSEAL_VERDICT_PENDING.
/// 2. The kernel writes plaintext while it computes the tag: until the stream has passed the work, `plaintext` may hold
///    bytes that are not verified. Nothing may read them.
/// 3. If the tag is right, the verdict becomes RINGSEAL_VERDICT_VERIFIED. If it is wrong, all of `plaintext` is zeroed and
///    then the verdict becomes RINGSEAL_VERDICT_FORGED. Where the call was in place, the ciphertext is gone in both cases;
///    otherwise it is as it was.
///
/// Work queued behind this on the stream runs whatever the verdict: it must look at the verdict itself, or take zeros.
///
/// # Safety
/// As ringseal_gpu_seal().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_open(
    aead: *const GpuAead,
    iv: *const u8,
    iv_bytes: usize,
    aad: *const c_void,
    aad_bytes: usize,
    ciphertext: *const c_void,
    plaintext: *mut c_void,
    bytes: usize,
    tag: *const c_void,
    verdict: *mut u32,
    stream: *mut c_void,
) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        unsafe {
            let aead = argument::reference("aead", aead)?;
            let iv = Iv::new(argument::bytes("iv", iv, iv_bytes)?)?;
            let text = text(aad, aad_bytes, ciphertext, plaintext, bytes)?;
            let stream = Stream::borrowed(&aead.device, stream.cast());
            Ok(aead.key.open(iv, text, tag.addr() as u64, verdict.addr() as u64, &stream)?)
        }
    })
}

/// Queues the GMAC of `aad_bytes` bytes of device memory at `aad`; its RINGSEAL_TAG_BYTES bytes go to `tag` (NIST SP
/// 800-38D, 3). Otherwise as ringseal_gpu_seal().
///
/// # Safety
/// As ringseal_gpu_seal().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_gmac(
    aead: *const GpuAead,
    iv: *const u8,
    iv_bytes: usize,
    aad: *const c_void,
    aad_bytes: usize,
    tag: *mut c_void,
    stream: *mut c_void,
) -> Status {
    let none = std::ptr::null_mut();
    // SAFETY: the caller's contract; no text.
    unsafe { ringseal_gpu_seal(aead, iv, iv_bytes, aad, aad_bytes, none, none, 0, tag, stream) }
}

/// Queues the verification of a GMAC. The verdict comes as that of ringseal_gpu_open(); `aad` stays as it is.
///
/// # Safety
/// As ringseal_gpu_seal().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_gmac_verify(
    aead: *const GpuAead,
    iv: *const u8,
    iv_bytes: usize,
    aad: *const c_void,
    aad_bytes: usize,
    tag: *const c_void,
    verdict: *mut u32,
    stream: *mut c_void,
) -> Status {
    let none = std::ptr::null_mut();
    // SAFETY: the caller's contract; no text.
    unsafe { ringseal_gpu_open(aead, iv, iv_bytes, aad, aad_bytes, none, none, 0, tag, verdict, stream) }
}
