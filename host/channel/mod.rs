//! Sealed records between the ranks of a group: keys, nonces, additional data, verification, rekeying.
//!
//! # From secret to session
//!
//! The ranks share a [`GroupSecret`]. A [`Handshake`] mixes fresh randomness of every rank into a salt and derives the
//! session from secret and salt (HKDF-SHA256, RFC 5869); every rank proves that it arrived at the same. A restarted
//! job, or a group that rekeys, has a new salt and hence new keys, so it can't repeat a nonce.
//!
//! # Keys
//!
//! A [`Session`] has one AES key for each sending rank and epoch. It counts what each key has encrypted and goes on to
//! the next epoch before the bound on an attacker's advantage is passed: [`volume`] has the formula. All ranks come to
//! the same epochs, because they do the same collectives.
//!
//! # Records
//!
//! A record is sealed as one message of NIST SP 800-38D with a 128-bit tag. Its [nonce] and its
//! [`AssociatedData`] are never sent: the receiver derives them from where in the protocol it is, so that a record
//! that comes from elsewhere, or under other assumptions, does not verify.

mod associated;
mod handshake;
mod nonce;
mod secret;
mod session;
pub mod volume;

pub use associated::{ASSOCIATED_DATA_BYTES, AssociatedData, NO_OP, VERSION};
pub(crate) use handshake::{ANNOUNCEMENT_TAG_BYTES, Root};
pub use handshake::{Handshake, Terms, Unconfirmed};
pub use nonce::{MAX_RECORDS, MAX_SEQUENCE, MAX_STEPS, NONCE_BYTES, nonce};
pub use secret::GroupSecret;
pub use session::{Call, Place, Session};
pub(crate) use volume::{Reserved, Volume};

/// Most ranks of a group: a ring takes 2n-1 steps and a closing one, and steps have [`MAX_STEPS`].
pub const MAX_RANKS: usize = (MAX_STEPS as usize) / 2;

/// What protects records on their way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crypto {
    /// Nothing: plaintext leaves the rank. For comparison only, and only when asked for; nothing falls back to it.
    /// Honest disagreements between ranks are still noticed, changes on the way are not.
    None,
    /// AES-GCM.
    Gcm(KeyLength),
}

impl Crypto {
    /// The code that the ranks compare.
    const fn code(self) -> u8 {
        match self {
            Self::None => 0,
            Self::Gcm(KeyLength::Aes128) => 1,
            Self::Gcm(KeyLength::Aes256) => 2,
        }
    }
}

/// Length of a session's AES keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyLength {
    /// 128 bits.
    Aes128,
    /// 256 bits.
    Aes256,
}

impl KeyLength {
    /// Key length in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Aes128 => 16,
            Self::Aes256 => 32,
        }
    }
}
