//! Nonce and additional data of a collective's records, as the host's `channel` documents them. Never sent: each rank
//! derives them from what it expects.

use crate::device::Quad;

/// 16-byte blocks of a record's additional data.
pub const AAD_BLOCKS: u32 = 3;

/// Bytes of a record's additional data.
pub const AAD_BYTES: u32 = 16 * AAD_BLOCKS;

/// What is the same for all records of all ranks in one collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(16))]
pub struct Call {
    /// The first block of the additional data: version, codes of the collective and its operation, session.
    pub codes: Quad,
    /// Elements of the whole vector.
    pub count: u64,
    /// Number of ranks, below 2^16.
    pub ranks: u32,
    /// Zero.
    pub reserved: u32,
}

/// Which record of which collective. A key seals each combination once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The collective.
    pub call: Call,
    /// Its number in the session, below 2^48.
    pub sequence: u64,
    /// The rank that seals, below 2^16.
    pub sender: u32,
    /// The step in which it seals, by its own count, below 2^16.
    pub step: u32,
    /// The record's number in its chunk.
    pub record: u32,
    /// Whether it is the chunk's last.
    pub last: bool,
}

impl Header {
    /// The 96-bit nonce (SP 800-38D, 8.2.1), as little-endian words: 48 bits of sequence, 16 of step, 32 of record,
    /// most significant first.
    #[inline(always)]
    pub const fn nonce(&self) -> [u32; 3] {
        let upper = (self.sequence >> 16) as u32;
        let lower = (self.sequence as u32) << 16 | self.step;
        [upper.swap_bytes(), lower.swap_bytes(), self.record.swap_bytes()]
    }

    /// Block `index` of the additional data.
    #[inline(always)]
    pub const fn associated_data(&self, index: u32) -> Quad {
        let (sequence, count) = (self.sequence, self.call.count);
        match index {
            0 => self.call.codes,
            1 => [sequence as u32, (sequence >> 32) as u32, count as u32, (count >> 32) as u32],
            _ => [self.sender | self.call.ranks << 16, self.step, self.record, self.last as u32],
        }
    }
}
