//! The deterministic nonce (NIST SP 800-38D, 8.2.1) of a record under its sender's key.
//!
//! | bits | field | limit |
//! |---|---|---|
//! | 0..48 | collective's sequence number in the session | 2^48: nine years of one each microsecond |
//! | 48..64 | step, by the sender's count | 2^16 |
//! | 64..96 | record inside the chunk | 2^32 |
//!
//! Big-endian, most significant bit first. A rank seals a chunk at most once in a step, and a failed collective's
//! number is not used again, so no nonce comes twice under one key.

use crate::{Error, Result};

/// Bytes of a nonce.
pub const NONCE_BYTES: usize = 12;
/// Sequence numbers are less than this.
pub const MAX_SEQUENCE: u64 = 1 << 48;
/// Steps are less than this.
pub const MAX_STEPS: u32 = 1 << 16;
/// Records of a chunk are less than this.
pub const MAX_RECORDS: u64 = 1 << 32;

/// The nonce of a record.
///
/// # Errors
/// [`Error::InvalidArgument`] when a field is beyond its limit: a truncated field would repeat a nonce.
pub fn nonce(sequence: u64, step: usize, record: usize) -> Result<[u8; NONCE_BYTES]> {
    if sequence >= MAX_SEQUENCE {
        return Err(beyond("sequence number", sequence, MAX_SEQUENCE));
    }
    if step >= MAX_STEPS as usize {
        return Err(beyond("step", step as u64, MAX_STEPS.into()));
    }
    let Ok(record) = u32::try_from(record) else {
        return Err(beyond("record", record as u64, MAX_RECORDS));
    };
    let mut nonce = [0; NONCE_BYTES];
    nonce[..8].copy_from_slice(&(sequence << 16 | step as u64).to_be_bytes());
    nonce[8..].copy_from_slice(&record.to_be_bytes());
    Ok(nonce)
}

fn beyond(what: &str, value: u64, limit: u64) -> Error {
    Error::InvalidArgument(format!("{what} {value}: a nonce has room for less than {limit}; re-key"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_lie_where_documented() {
        assert_eq!(
            nonce(0x0102_0304_0506, 0x0708, 0x090a_0b0c).unwrap(),
            [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
        );
        assert_eq!(nonce(MAX_SEQUENCE - 1, 0xffff, 0xffff_ffff).unwrap(), [0xff; 12]);
    }

    #[test]
    fn nothing_is_truncated() {
        nonce(MAX_SEQUENCE, 0, 0).unwrap_err();
        nonce(0, MAX_STEPS as usize, 0).unwrap_err();
        nonce(0, 0, MAX_RECORDS as usize).unwrap_err();
    }
}
