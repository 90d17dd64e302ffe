//! AES-GCM of the host's side: in one pass where the processor has 512-bit AES ([`one_pass`](super::one_pass)); otherwise
//! graviola, or RustCrypto, in memory of our own.

#[cfg(target_arch = "x86_64")]
use graviola::aead::AesGcm;
#[cfg(target_arch = "x86_64")]
use zeroize::Zeroize;

#[cfg(target_arch = "x86_64")]
use super::one_pass::{OnePass, Route};
#[cfg(target_arch = "x86_64")]
use crate::aead::tags_equal;
use crate::aead::{Aead, AesKey, Iv, Tag, check_aad_len, check_plaintext_len};
use crate::backend::cpu::Cpu;
use crate::channel::NONCE_BYTES;
use crate::{Error, Result};

/// A key, expanded for sealing and opening on the host by many threads. Zeroized on drop.
pub struct HostCipher(Cipher);

enum Cipher {
    #[cfg(target_arch = "x86_64")]
    OnePass(Box<OnePass>),
    #[cfg(target_arch = "x86_64")]
    Graviola(Box<AesGcm>),
    RustCrypto(Aead),
}

impl HostCipher {
    /// Expands a key for the fastest that the processor can do.
    ///
    /// # Errors
    /// None so far on any processor; the backend's otherwise.
    pub fn new(key: &AesKey) -> Result<Self> {
        #[cfg(target_arch = "x86_64")]
        if let Some(cipher) = OnePass::new(key) {
            return Ok(Self(Cipher::OnePass(cipher)));
        }
        Self::by_library(key)
    }

    /// As [`new`](Self::new), by graviola or RustCrypto.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn by_library(key: &AesKey) -> Result<Self> {
        #[cfg(target_arch = "x86_64")]
        if key.bits() != 192 && has_graviola() {
            return Ok(Self(Cipher::Graviola(Box::new(AesGcm::new(key.as_bytes())))));
        }
        Self::portable(key)
    }

    /// As [`new`](Self::new), by RustCrypto on any processor.
    pub(super) fn portable(key: &AesKey) -> Result<Self> {
        Ok(Self(Cipher::RustCrypto(Aead::new(&Cpu, key)?)))
    }

    /// Seals `text` into staging memory at `staged` and returns the tag. Whoever reads or writes that memory meanwhile sees
    /// ciphertext only, and has no part in the tag. `scratch` is anything, and left as anything.
    ///
    /// # Errors
    /// [`Error::Length`] past the standard's limit.
    ///
    /// # Safety
    /// `text.len()` bytes can be written at `staged`; they are not `text`'s.
    pub(super) unsafe fn seal_into(
        &self,
        staged: *mut u8,
        nonce: &[u8; NONCE_BYTES],
        aad: &[u8],
        text: &[u8],
        scratch: &mut Vec<u8>,
    ) -> Result<Tag> {
        #[cfg(target_arch = "x86_64")]
        if let Cipher::OnePass(cipher) = &self.0 {
            check_lengths(text, aad)?;
            let route = Route { from: text.as_ptr(), to: staged, bytes: text.len() };
            // SAFETY: the caller's.
            return Ok(unsafe { cipher.seal(nonce, aad, route) });
        }
        scratch.resize(text.len(), 0);
        fetch(scratch, text);
        let tag = self.seal(nonce, aad, scratch)?;
        // SAFETY: the caller's.
        unsafe { staged.copy_from_nonoverlapping(scratch.as_ptr(), scratch.len()) };
        Ok(tag)
    }

    /// Opens what lies at `staged` into `text`, which is zeroed where that is not what `tag` was made of. Each byte is read once,
    /// so what is verified is what is opened, whoever writes it meanwhile.
    ///
    /// # Errors
    /// [`Error::Authentication`]; [`Error::Length`] past the standard's limit.
    ///
    /// # Safety
    /// `text.len()` bytes can be read at `staged`; they are not `text`'s.
    pub(super) unsafe fn open_from(
        &self,
        staged: *const u8,
        nonce: &[u8; NONCE_BYTES],
        aad: &[u8],
        tag: &Tag,
        text: &mut [u8],
    ) -> Result<()> {
        #[cfg(target_arch = "x86_64")]
        if let Cipher::OnePass(cipher) = &self.0 {
            check_lengths(text, aad)?;
            let route = Route { from: staged, to: text.as_mut_ptr(), bytes: text.len() };
            // SAFETY: the caller's.
            let wanted = unsafe { cipher.open(nonce, aad, route) };
            return verified(&wanted, tag, text);
        }
        // SAFETY: the caller's.
        unsafe { staged.copy_to_nonoverlapping(text.as_mut_ptr(), text.len()) };
        self.open(nonce, aad, text, tag)
    }

    /// Seals `data` in place and returns the tag.
    ///
    /// # Errors
    /// [`Error::Length`] past the standard's limit.
    pub fn seal(&self, nonce: &[u8; NONCE_BYTES], aad: &[u8], data: &mut [u8]) -> Result<Tag> {
        check_lengths(data, aad)?;
        match &self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the data are the caller's alone.
            Cipher::OnePass(cipher) => Ok(unsafe { cipher.seal(nonce, aad, Route::in_place(data)) }),
            #[cfg(target_arch = "x86_64")]
            Cipher::Graviola(cipher) => {
                let mut tag = [0; 16];
                cipher.encrypt(nonce, aad, data, &mut tag);
                Ok(tag)
            }
            Cipher::RustCrypto(aead) => aead.seal_in_place(Iv::from_nonce(nonce), aad, data),
        }
    }

    /// Verifies `data` and decrypts it in place; zeroes it otherwise.
    ///
    /// # Errors
    /// [`Error::Authentication`]; [`Error::Length`] past the standard's limit.
    pub fn open(&self, nonce: &[u8; NONCE_BYTES], aad: &[u8], data: &mut [u8], tag: &Tag) -> Result<()> {
        check_lengths(data, aad)?;
        match &self.0 {
            #[cfg(target_arch = "x86_64")]
            Cipher::OnePass(cipher) => {
                // SAFETY: the data are the caller's alone.
                let wanted = unsafe { cipher.open(nonce, aad, Route::in_place(data)) };
                verified(&wanted, tag, data)
            }
            #[cfg(target_arch = "x86_64")]
            Cipher::Graviola(cipher) => {
                cipher.decrypt(nonce, aad, data, tag).map_err(|_| Error::Authentication)
            }
            Cipher::RustCrypto(aead) => aead.open_in_place(Iv::from_nonce(nonce), aad, data, tag),
        }
    }
}

/// What the counter of a message allows (NIST SP 800-38D, 5.2.1.1).
fn check_lengths(text: &[u8], aad: &[u8]) -> Result<()> {
    check_plaintext_len(text.len() as u128)?;
    check_aad_len(aad.len() as u128)
}

/// Compares tags in constant time; zeroes `text` if they differ.
#[cfg(target_arch = "x86_64")]
fn verified(wanted: &Tag, tag: &Tag, text: &mut [u8]) -> Result<()> {
    if tags_equal(wanted, tag) {
        Ok(())
    } else {
        text.zeroize();
        Err(Error::Authentication)
    }
}

/// Copies from memory that is in no cache, as four runs side by side: more lines are on their way at once than where a
/// processor fetches ahead in one run, a page at a time. `ringseal copy-bench --backend cpu` shows what it is worth.
pub(super) fn fetch(destination: &mut [u8], source: &[u8]) {
    const RUNS: usize = 4;
    const LINE: usize = 64;
    let run = source.len() / RUNS / LINE * LINE;
    for at in (0..run).step_by(LINE) {
        for begin in [0, run, 2 * run, 3 * run] {
            let line = begin + at..begin + at + LINE;
            destination[line.clone()].copy_from_slice(&source[line]);
        }
    }
    destination[RUNS * run..].copy_from_slice(&source[RUNS * run..]);
}

/// Whether the processor has what graviola needs on x86-64; it panics otherwise.
#[cfg(target_arch = "x86_64")]
fn has_graviola() -> bool {
    is_x86_feature_detected!("aes")
        && is_x86_feature_detected!("pclmulqdq")
        && is_x86_feature_detected!("ssse3")
        && is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("bmi1")
        && is_x86_feature_detected!("bmi2")
        && is_x86_feature_detected!("adx")
}

impl std::fmt::Debug for HostCipher {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self.0 {
            #[cfg(target_arch = "x86_64")]
            Cipher::OnePass(_) => "HostCipher(one pass)",
            #[cfg(target_arch = "x86_64")]
            Cipher::Graviola(_) => "HostCipher(graviola)",
            Cipher::RustCrypto(_) => "HostCipher(RustCrypto)",
        })
    }
}
