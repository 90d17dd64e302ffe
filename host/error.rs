//! The one error type of the crate.

/// What went wrong, and what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tag did not verify. Opaque on purpose: says nothing about which byte or why.
    #[error("authentication failed")]
    Authentication,
    /// A record of a collective did not verify, or did not arrive as the protocol requires. The communicator is
    /// poisoned until it is re-keyed, and the receive buffer is zeroed.
    #[error(
        "rank {rank}: authentication failed at step {step}, record {record}: the data were changed, replayed, reordered or cut on the way, or the ranks disagree on the call; re-key the communicator before the next collective"
    )]
    Record {
        /// Rank that reports the failure.
        rank: usize,
        /// Schedule step, counted from 0.
        step: usize,
        /// Record inside the chunk, counted from 0.
        record: usize,
    },
    /// A peer did not deliver in time.
    #[error(
        "rank {rank}: nothing from rank {peer} at step {step} within {waited_ms} ms: it died, stalled or never called this collective; re-key the communicator before the next one"
    )]
    Deadline {
        /// Rank that reports the failure.
        rank: usize,
        /// Rank that was awaited.
        peer: usize,
        /// Schedule step, counted from 0.
        step: usize,
        /// How long it waited, in milliseconds.
        waited_ms: u64,
    },
    /// A peer's process ended, or the connection to it.
    #[error(
        "rank {rank}: rank {peer} was lost{}: its process ended or the connection broke; begin again with a new communicator",
        step.map_or(String::new(), |step| format!(" at step {step}"))
    )]
    Lost {
        /// Rank that reports the failure.
        rank: usize,
        /// Rank that is gone.
        peer: usize,
        /// Schedule step, counted from 0, where it is known.
        step: Option<usize>,
    },
    /// Another rank reported a failure first.
    #[error(
        "rank {rank}: the collective was aborted by rank {by}; re-key the communicator before the next one"
    )]
    Aborted {
        /// Rank that reports the failure.
        rank: usize,
        /// Rank that failed first.
        by: usize,
    },
    /// The ranks of a group did not come to a session: one is missing, holds another secret, assumes something else,
    /// or messages were changed on the way.
    #[error("no session: {0}")]
    Handshake(String),
    /// The operating system gave no random bytes.
    #[error("no randomness from the operating system: {0}")]
    Randomness(String),
    /// An earlier collective failed on this communicator.
    #[error("this communicator failed before and carries no data until it is re-keyed")]
    Poisoned,
    /// An argument is out of its domain.
    #[error("{0}")]
    InvalidArgument(String),
    /// A message, key or IV exceeds or misses a limit of the standard.
    #[error("{what}: {got} bytes, but {limit}")]
    Length {
        /// What was measured, such as "plaintext".
        what: &'static str,
        /// Its length in bytes.
        got: u128,
        /// The limit, in words, with its source.
        limit: &'static str,
    },
    /// A key has reached the volume it may protect.
    #[error("the key's volume limit of {limit} bytes is reached; re-key")]
    KeyExhausted {
        /// The limit in bytes.
        limit: u64,
    },
    /// This backend cannot do that (yet). Never a silent fallback.
    #[error("the {backend} backend does not support {what}")]
    Unsupported {
        /// Backend name.
        backend: &'static str,
        /// What was asked for.
        what: String,
    },
    /// There is no usable GPU or driver; the text says which and what is needed.
    #[error("no usable CUDA device: {0}")]
    NoDevice(String),
    /// A CUDA call failed.
    #[error("CUDA: {0}")]
    Cuda(String),
    /// Reading or writing failed.
    #[error("{path}: {source}")]
    Io {
        /// The file, or "standard input" and the like.
        path: String,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// An input file is malformed or does not match its peers.
    #[error("{path}: {what}")]
    File {
        /// The file.
        path: String,
        /// What is wrong with it, naming the tensor where there is one.
        what: String,
    },
}

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
