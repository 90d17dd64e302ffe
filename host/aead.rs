//! AES-GCM and GMAC on any backend.

use zeroize::ZeroizeOnDrop;

/// A 128-bit authentication tag.
pub type Tag = [u8; 16];

/// An AES key of 16, 24 or 32 bytes. Zeroized on drop, never printed.
#[derive(Clone, ZeroizeOnDrop)]
pub enum AesKey {
    /// AES-128.
    Aes128([u8; 16]),
    /// AES-192.
    Aes192([u8; 24]),
    /// AES-256.
    Aes256([u8; 32]),
}

impl std::fmt::Debug for AesKey {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Aes128(_) => "AesKey::Aes128(..)",
            Self::Aes192(_) => "AesKey::Aes192(..)",
            Self::Aes256(_) => "AesKey::Aes256(..)",
        })
    }
}

/// An initialization vector of at least one byte (NIST SP 800-38D, 5.2.1.1); 12 bytes is the common form.
#[derive(Clone, Copy, Debug)]
pub struct Iv<'a>(pub(crate) &'a [u8]);
