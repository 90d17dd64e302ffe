//! How much one key may encrypt.
//!
//! With 96-bit nonces, an attacker who sees s blocks of ciphertext in q messages tells GCM from an ideal cipher with an
//! advantage of at most
//!
//! ```text
//! (s + q + 1)^2 / 2^129
//! ```
//!
//! (Iwata, Ohashi, Minematsu, CRYPTO 2012, theorem 1 with n = 128). The sum in brackets counts all calls of the block
//! cipher under the key: one for each block, one for each message's tag, one for the hash subkey. So an advantage of
//! 2^-60 is reached after 2^((129 - 60) / 2) = 2^34.5 calls, which is 389 GB.
//!
//! A forgery succeeds with at most (l + 1) / 2^128 for each attempt, l being the blocks of message and additional data:
//! under 2^-114 for a record of 128 KiB. A session ends with the first failed attempt, so it does not add up.

/// The default bound: an attacker's advantage of 2^-60 for each key.
pub const ADVANTAGE_LOG2: u32 = 60;

/// Most block cipher calls under one key that keep an attacker's advantage below 2^-`advantage_log2`.
///
/// # Panics
/// When it is not from 2 to 128: beyond that, the bound says nothing or the cipher can't be used at all.
pub const fn calls_within(advantage_log2: u32) -> u64 {
    assert!(2 <= advantage_log2 && advantage_log2 <= 128, "not a bound that a key can keep");
    (1u128 << (129 - advantage_log2)).isqrt() as u64
}

/// Default limit of a key, in bytes of full blocks: 389 GB.
pub const DEFAULT_BYTES: u64 = 16 * calls_within(ADVANTAGE_LOG2);

/// Block cipher calls for sealing one message of `bytes` bytes.
pub const fn calls_of_message(bytes: usize) -> u64 {
    bytes.div_ceil(16) as u64 + 1
}

/// Calls made under the keys of the current epoch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Volume {
    limit: u64,
    used: u64,
}

/// What a key needs for its hash subkey.
const CALLS_OF_KEY: u64 = 1;

/// How a reservation ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reserved {
    /// Under the current keys.
    Here,
    /// Under the next epoch's.
    NextEpoch,
    /// Under none: it is more than a fresh key may encrypt.
    Never,
}

impl Volume {
    /// A fresh epoch whose keys may encrypt `bytes` bytes of full blocks.
    pub(crate) const fn new(bytes: u64) -> Self {
        Self { limit: bytes / 16, used: CALLS_OF_KEY }
    }

    pub(crate) const fn limit_bytes(&self) -> u64 {
        self.limit * 16
    }

    /// How a reservation of `calls` block cipher calls would end.
    pub(crate) const fn ask(&self, calls: u64) -> Reserved {
        if calls <= self.limit.saturating_sub(self.used) {
            Reserved::Here
        } else if calls > self.limit.saturating_sub(CALLS_OF_KEY) {
            Reserved::Never
        } else {
            Reserved::NextEpoch
        }
    }

    /// Sets `calls` block cipher calls aside.
    pub(crate) fn reserve(&mut self, calls: u64) -> Reserved {
        let reserved = self.ask(calls);
        match reserved {
            Reserved::Here => self.used += calls,
            Reserved::NextEpoch => self.used = CALLS_OF_KEY + calls,
            Reserved::Never => {}
        }
        reserved
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_389_gb() {
        assert_eq!(DEFAULT_BYTES / 1_000_000_000, 388);
        let calls = u128::from(calls_within(60));
        assert!(calls * calls <= 1 << 69 && (calls + 1) * (calls + 1) > 1 << 69);
        assert_eq!(calls_within(128), 1);
        assert_eq!(calls_within(2), 13_043_817_825_332_782_212);
    }

    #[test]
    fn messages_cost_their_blocks_and_a_tag() {
        assert_eq!([0, 1, 16, 17, 65536].map(calls_of_message), [1, 2, 2, 3, 4097]);
    }

    #[test]
    fn a_key_never_passes_its_limit() {
        let mut volume = Volume::new(160);
        assert_eq!(volume.reserve(9), Reserved::Here);
        assert_eq!(volume.reserve(1), Reserved::NextEpoch);
        assert_eq!(volume.reserve(8), Reserved::Here);
        assert_eq!(volume.reserve(0), Reserved::Here);
        assert_eq!(volume.reserve(9), Reserved::NextEpoch);
        assert_eq!(volume.reserve(10), Reserved::Never);
        assert_eq!(volume.reserve(u64::MAX), Reserved::Never);
        assert_eq!(Volume::new(0).reserve(1), Reserved::Never);
    }
}
