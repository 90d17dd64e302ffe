//! AES-GCM of the host's side: graviola, which uses VAES and AVX-512 where the processor has them; RustCrypto elsewhere.

#[cfg(target_arch = "x86_64")]
use graviola::aead::AesGcm;

use crate::aead::{Aead, AesKey, Iv, Tag};
use crate::backend::cpu::Cpu;
use crate::channel::NONCE_BYTES;
use crate::{Error, Result};

/// A key, expanded for sealing and opening on the host by many threads. Zeroized on drop.
pub struct HostCipher(Cipher);

enum Cipher {
    #[cfg(target_arch = "x86_64")]
    Graviola(Box<AesGcm>),
    RustCrypto(Aead),
}

impl HostCipher {
    /// Expands a key.
    ///
    /// # Errors
    /// None so far on any processor; the backend's otherwise.
    pub fn new(key: &AesKey) -> Result<Self> {
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

    /// Seals `data` in place and returns the tag.
    ///
    /// # Errors
    /// [`Error::Length`] past the standard's limit.
    pub fn seal(&self, nonce: &[u8; NONCE_BYTES], aad: &[u8], data: &mut [u8]) -> Result<Tag> {
        match &self.0 {
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
    /// [`Error::Authentication`].
    pub fn open(&self, nonce: &[u8; NONCE_BYTES], aad: &[u8], data: &mut [u8], tag: &Tag) -> Result<()> {
        match &self.0 {
            #[cfg(target_arch = "x86_64")]
            Cipher::Graviola(cipher) => {
                cipher.decrypt(nonce, aad, data, tag).map_err(|_| Error::Authentication)
            }
            Cipher::RustCrypto(aead) => aead.open_in_place(Iv::from_nonce(nonce), aad, data, tag),
        }
    }
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
            Cipher::Graviola(_) => "HostCipher(graviola)",
            Cipher::RustCrypto(_) => "HostCipher(RustCrypto)",
        })
    }
}
