//! AES-GCM and GMAC on host memory.

use std::ffi::c_char;

use ringseal::aead::{AesKey, Iv, TAG_BYTES as TAG, tag_from_bytes};

use crate::argument;
use crate::status::{Failure, Status, guard, release};

/// Bytes of a tag.
pub const TAG_BYTES: usize = 16;
const _: () = assert!(TAG_BYTES == TAG);

/// An AES key, expanded. Any number of threads may use one at once.
pub struct Aead(ringseal::aead::Aead);

/// Expands a key of 16, 24 or 32 bytes (AES-128, AES-192, AES-256) and writes its handle to `out`. `backend` is "cpu",
/// "cuda" (data still lie in host memory), "emulated" or "auto"; NULL is "cpu". The caller still owns, and should
/// erase, the key's bytes.
///
/// # Safety
/// Pointers are NULL or valid for what they are described to hold.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_aead_create(
    key: *const u8,
    key_bytes: usize,
    backend: *const c_char,
    out: *mut *mut Aead,
) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (out, key, backend) = unsafe {
            let out = argument::place("out", out)?;
            out.write(std::ptr::null_mut());
            (out, argument::bytes("key", key, key_bytes)?, argument::text("backend", backend)?)
        };
        let backend = ringseal::backend::by_name(backend.unwrap_or("cpu"))?;
        let aead = ringseal::aead::Aead::new(backend.as_ref(), &AesKey::from_bytes(key)?)?;
        // SAFETY: checked above.
        unsafe { out.write(Box::into_raw(Box::new(Aead(aead)))) };
        Ok(())
    })
}

/// Erases and frees a key. NULL is allowed.
///
/// # Safety
/// NULL, or from ringseal_aead_create() and not destroyed yet, and in no use.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_aead_destroy(aead: *mut Aead) {
    // SAFETY: the caller's contract.
    unsafe { release(aead) };
}

/// Encrypts `bytes` bytes from `plaintext` to `ciphertext`, and writes the tag's RINGSEAL_TAG_BYTES bytes to `tag`
/// (NIST SP 800-38D, 7.1). The two may be the same address, but not overlap otherwise. Never use an IV twice with one
/// key. On failure nothing is written, or zeros.
///
/// # Safety
/// Pointers are NULL or valid for what they are described to hold.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_seal(
    aead: *const Aead,
    iv: *const u8,
    iv_bytes: usize,
    aad: *const u8,
    aad_bytes: usize,
    plaintext: *const u8,
    ciphertext: *mut u8,
    bytes: usize,
    tag: *mut u8,
) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        unsafe {
            let aead = argument::reference("aead", aead)?;
            let (iv, aad) = (argument::bytes("iv", iv, iv_bytes)?, argument::bytes("aad", aad, aad_bytes)?);
            argument::bytes("plaintext", plaintext, bytes)?;
            argument::place("tag", tag)?;
            // Not as a slice: it may be the same memory as the plaintext.
            if ciphertext.is_null() && bytes > 0 {
                return Err(Failure::argument("ciphertext is null"));
            }
            let sealed = aead.0.seal_raw(Iv::new(iv)?, aad, plaintext, ciphertext, bytes)?;
            tag.copy_from_nonoverlapping(sealed.as_ptr(), sealed.len());
        }
        Ok(())
    })
}

/// Verifies `bytes` bytes of `ciphertext` with a tag of `tag_bytes` bytes, which must be RINGSEAL_TAG_BYTES, and decrypts
/// them to `plaintext` (NIST SP 800-38D, 7.2). The two may be the same address, but not overlap otherwise. If the tag
/// does not verify, `plaintext` is zeros.
///
/// # Safety
/// Pointers are NULL or valid for what they are described to hold.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_open(
    aead: *const Aead,
    iv: *const u8,
    iv_bytes: usize,
    aad: *const u8,
    aad_bytes: usize,
    ciphertext: *const u8,
    plaintext: *mut u8,
    bytes: usize,
    tag: *const u8,
    tag_bytes: usize,
) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        unsafe {
            let aead = argument::reference("aead", aead)?;
            let (iv, aad) = (argument::bytes("iv", iv, iv_bytes)?, argument::bytes("aad", aad, aad_bytes)?);
            argument::bytes("ciphertext", ciphertext, bytes)?;
            let tag = tag_from_bytes(argument::bytes("tag", tag, tag_bytes)?)?;
            if plaintext.is_null() && bytes > 0 {
                return Err(Failure::argument("plaintext is null"));
            }
            aead.0.open_raw(Iv::new(iv)?, aad, ciphertext, plaintext, bytes, &tag)?;
        }
        Ok(())
    })
}

/// Writes the GMAC of `aad` to `tag`, RINGSEAL_TAG_BYTES bytes (NIST SP 800-38D, 3). Never use an IV twice with one key.
///
/// # Safety
/// Pointers are NULL or valid for what they are described to hold.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gmac(
    aead: *const Aead,
    iv: *const u8,
    iv_bytes: usize,
    aad: *const u8,
    aad_bytes: usize,
    tag: *mut u8,
) -> Status {
    let none = std::ptr::null_mut();
    // SAFETY: the caller's contract; no text.
    unsafe { ringseal_seal(aead, iv, iv_bytes, aad, aad_bytes, none, none, 0, tag) }
}

/// Verifies a GMAC.
///
/// # Safety
/// Pointers are NULL or valid for what they are described to hold.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gmac_verify(
    aead: *const Aead,
    iv: *const u8,
    iv_bytes: usize,
    aad: *const u8,
    aad_bytes: usize,
    tag: *const u8,
    tag_bytes: usize,
) -> Status {
    let none = std::ptr::null_mut();
    // SAFETY: the caller's contract; no text.
    unsafe { ringseal_open(aead, iv, iv_bytes, aad, aad_bytes, none, none, 0, tag, tag_bytes) }
}
