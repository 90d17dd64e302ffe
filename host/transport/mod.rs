//! Moves sealed records between ranks. The untrusted world: it never sees a key or a plaintext.
//!
//! What goes in is [`Sealed`], which only [`channel`](crate::channel) can make, by sealing or by verifying a record
//! that is passed on. What comes out is [`Received`], which can't be sent on as it is: a rank that forwards a record
//! has verified it.
//!
//! ```compile_fail,E0451
//! // Bytes that nobody sealed can't be sent.
//! let plaintext = ringseal::transport::Sealed { bytes: b"gradients".to_vec(), tag: [0; 16] };
//! ```

use std::time::{Duration, Instant};

use crate::Result;
use crate::aead::Tag;

mod frame;
mod inbox;
pub mod lockstep;
pub mod memory;
pub mod socket;

/// The longest wait: a year. Longer ones are cut, because an instant can't be moved by just any duration.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// The instant `timeout` from now.
pub fn deadline(timeout: Duration) -> Instant {
    Instant::now() + timeout.min(LONGEST_WAIT)
}

/// A record ready to leave this rank.
#[derive(Clone, Debug)]
pub struct Sealed {
    bytes: Vec<u8>,
    tag: Tag,
}

impl Sealed {
    /// For `channel` alone: `bytes` are ciphertext that it has just made or verified, or, in the baseline without
    /// cryptography that the caller asked for by name, plaintext.
    pub(crate) fn new(bytes: Vec<u8>, tag: Tag) -> Self {
        Self { bytes, tag }
    }

    /// The ciphertext.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The tag over ciphertext and additional data.
    pub fn tag(&self) -> &Tag {
        &self.tag
    }

    /// Ciphertext and tag.
    pub fn into_parts(self) -> (Vec<u8>, Tag) {
        (self.bytes, self.tag)
    }
}

/// A record as it arrived: anyone on the way may have made or changed it.
#[derive(Clone, Debug)]
pub struct Received {
    /// What claims to be ciphertext. Owned, so that nobody else can change it between verification and use.
    pub bytes: Vec<u8>,
    /// What claims to be its tag.
    pub tag: Tag,
}

/// What a rank tells the others when it gives up, so that they needn't wait for their deadlines.
///
/// Not authenticated: who can forge it can as well stop all traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abort {
    /// The rank that gave up.
    pub by: usize,
    /// Why.
    pub cause: Cause,
}

/// Why a rank gave up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// A record did not verify.
    Record {
        /// Step of the rank that gave up.
        step: usize,
        /// Record inside the chunk.
        record: usize,
    },
    /// A peer did not deliver.
    Deadline {
        /// The rank that was awaited.
        peer: usize,
        /// Step of the rank that gave up.
        step: usize,
        /// How long it waited, in milliseconds.
        waited_ms: u64,
    },
    /// A peer's connection ended.
    Lost {
        /// The rank that was awaited.
        peer: usize,
        /// Step of the rank that gave up.
        step: usize,
    },
    /// Something else, such as a failing backend.
    Other,
}

/// The end of a wait.
#[derive(Debug)]
pub enum Delivery {
    /// A record.
    Record(Received),
    /// Some rank gave up.
    Aborted(Abort),
    /// The rank is gone: nothing more will come from it.
    Lost,
    /// The deadline passed.
    TimedOut,
}

/// One rank's access to the links between all ranks.
///
/// A link from one rank to another keeps the order of what is sent. It need not be reliable, and is not trusted.
/// `session` says to which session of the group a record belongs: records of earlier sessions may still be under way
/// when a new one begins, and are dropped.
pub trait Transport: Send {
    /// This rank.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn ranks(&self) -> usize;

    /// Sends to another rank, without waiting until it is received.
    ///
    /// # Errors
    /// Whatever the link reports.
    fn send(&mut self, to: usize, session: u64, record: Sealed) -> Result<()>;

    /// Waits until `deadline` for the next record of `session` from another rank. What has arrived comes before an abort:
    /// it may belong to a collective that was complete when the sender went on to one that failed.
    ///
    /// # Errors
    /// Whatever the link reports.
    fn receive(&mut self, from: usize, session: u64, deadline: Instant) -> Result<Delivery>;

    /// Told when a collective begins on this rank, and when it has ended, well or not: for links that rest in between. All
    /// records of a collective are sent and received while it runs. Default: does nothing.
    fn run(&mut self, running: bool) {
        let _ = running;
    }

    /// Tells all ranks that this one gives up on the session, as well as it can.
    fn abort(&mut self, session: u64, abort: Abort);
}
