//! Sealed copies between host and GPU memory: only ciphertext and tags lie in the pinned staging memory that the GPU's
//! copy engine reads and writes, and travel over the bus.
//!
//! [`cuda::SealedCopy`](crate::cuda::SealedCopy) does them. A copy is cut into records, each sealed as one message of AES-GCM,
//! and records into pieces. Host threads seal or open records of one piece while the copy engine moves another and the
//! GPU's kernels work on a third.
//!
//! # Keys, nonces, additional data
//!
//! Those of the collectives' [`channel`], under keys of their own: HKDF-SHA256 of the group secret, fresh
//! random salt and a label that no collective uses, one key for each direction and epoch; the same volume limit. The nonce is
//! [`channel::nonce`] of the copy's number, step 0 and the record's number. The additional data are
//! [`AssociatedData`] with the collective's code [`COPY_CODE`], the direction as algorithm and sender (0 to the device,
//! 1 to the host), two ranks, and the copy's length in bytes as count.
//!
//! # Failure
//!
//! A record that does not verify fails the whole copy: the destination is zeroed, the error is
//! [`Error::Authentication`], and no further copy is made under these keys.
//!
//! # What is trusted
//!
//! Staging memory and the bus are not: the host writes only ciphertext to staging and never reads it again, and reads each byte
//! that it opens once, so that what is verified is what is decrypted. What tells the kernels where records lie, with the tags
//! that they compare, and their verdicts go by the driver's own copies from and to ordinary memory, as kernel parameters do; on
//! a confidential GPU the driver encrypts these.

mod cipher;
mod keys;
mod notes;
#[cfg(target_arch = "x86_64")]
mod one_pass;
mod pipeline;
mod rehearsal;
#[cfg(test)]
mod tests;

use std::num::NonZeroUsize;

use crate::aead::TAG_BYTES;
#[cfg(doc)]
use crate::channel::{self, AssociatedData};
use crate::channel::{KeyLength, volume};
use crate::{Error, Result};

pub use cipher::HostCipher;
pub(crate) use keys::{Call, Keys};
pub(crate) use notes::Notes;
pub(crate) use pipeline::{Far, Shape, Tap, receive, send};
pub use rehearsal::Rehearsal;

/// Stands in the additional data where a collective has its code.
pub const COPY_CODE: u8 = 0x40;

/// Which way a copy goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Direction {
    /// From host to device memory.
    ToDevice = 0,
    /// From device to host memory.
    ToHost = 1,
}

/// How copies are made.
#[derive(Clone, Copy, Debug)]
pub struct CopyOptions {
    /// AES key length.
    pub key: KeyLength,
    /// Bytes sealed as one message: a multiple of 16, at most 1 GiB.
    pub record_bytes: usize,
    /// Records that are moved at once.
    pub piece_records: usize,
    /// Pieces under way at once; their staging memory is pinned on the host, and as much is taken on the device.
    pub slots: usize,
    /// Host threads that seal and open.
    pub threads: usize,
    /// Bytes that a key may encrypt.
    pub key_bytes: u64,
}

impl Default for CopyOptions {
    /// AES-256, records of 64 KiB, eight pieces of 4 MiB, a thread for each processor but the one that feeds the GPU.
    fn default() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        Self {
            key: KeyLength::Aes256,
            record_bytes: 64 << 10,
            piece_records: 64,
            slots: 8,
            threads: (processors - 1).max(1),
            key_bytes: volume::DEFAULT_BYTES,
        }
    }
}

impl CopyOptions {
    /// Whether copies can be made so; [`SealedCopy::new`](crate::cuda::SealedCopy::new) asks this first.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when something is zero or out of its domain.
    pub fn check(&self) -> Result<()> {
        let bad = |what: &str| Err(Error::InvalidArgument(format!("sealed copies: {what}")));
        if self.record_bytes == 0 || !self.record_bytes.is_multiple_of(16) || self.record_bytes > 1 << 30 {
            return bad("record_bytes must be a multiple of 16 from 16 to 1 GiB");
        }
        if self.piece_records == 0 || self.slots == 0 || self.threads == 0 {
            return bad("piece_records, slots and threads must be at least 1");
        }
        // What a shape computes from them without looking.
        let slot = (self.record_bytes + TAG_BYTES).checked_mul(self.piece_records);
        if slot.and_then(|slot| slot.checked_mul(self.slots)).is_none_or(|bytes| bytes > isize::MAX as usize)
        {
            return bad("more staging memory than there can be: take fewer records a piece, or fewer slots");
        }
        Ok(())
    }

    /// Staging memory of one side, of options that were [checked](Self::check).
    pub(crate) const fn staging_bytes(&self) -> usize {
        self.shape(1).slot_bytes() * self.slots
    }

    pub(crate) const fn shape(&self, bytes: usize) -> Shape {
        Shape { bytes, record_bytes: self.record_bytes, piece_records: self.piece_records, slots: self.slots }
    }
}
