//! A rank's work in a collective, as data: what a block of threads does with each record, step by step.
//!
//! The host lowers a schedule to a table of [`Step`]s in device memory. Message k is what a rank sends in step k of
//! the schedule and its successor receives; so a table has one step more than there are messages.

use crate::device::{Quad, global, warp};

/// The record comes from the predecessor's message; otherwise from the input vector.
pub const RECEIVE: u32 = 1;
/// Adds (or otherwise reduces) this rank's input to the received record.
pub const REDUCE: u32 = 2;
/// The result is complete: an average is divided now.
pub const FINISH: u32 = 4;
/// Writes the plaintext result to the output vector.
pub const STORE: u32 = 8;
/// Sends the result to the successor.
pub const SEND: u32 = 16;
/// Sends the received ciphertext and tag as they came, once the tag has verified, instead of sealing anew.
pub const FORWARD: u32 = 32;
/// Reduces the received record into the partial result that an earlier step of the mesh kernels has kept.
pub const ACCUMULATE: u32 = 64;
/// Keeps the result in the rank's scratch memory, for a later step of the mesh kernels: as a partial result, f16 and bf16
/// in f32.
pub const KEEP: u32 = 128;
/// Keeps the result in the rank's scratch memory, rounded to its type.
pub const KEEP_ROUNDED: u32 = 256;
/// What is sent is the result that [`KEEP_ROUNDED`] kept.
pub const SEND_KEPT: u32 = 512;
/// What is sent is what an earlier step has stored to the output vector.
pub const SEND_STORED: u32 = 1024;

/// One step of one rank. A step works on one chunk of the vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Step {
    /// Where the chunk starts in the vector, in bytes.
    pub offset: u64,
    /// The chunk's length in bytes.
    pub bytes: u64,
    /// A union of [`RECEIVE`], [`REDUCE`], [`FINISH`], [`STORE`], [`SEND`] and [`FORWARD`]; for the mesh kernels also of
    /// the others.
    pub actions: u32,
    /// The message that is received, counted from 0.
    pub receives: u32,
    /// The message that is sent, counted from 0.
    pub sends: u32,
    /// The rank that sealed the received records.
    pub sealed_by: u32,
    /// The step in which it sealed them: a relayed record keeps its nonce and associated data.
    pub sealed_in: u32,
    /// For the mesh kernels, whose steps receive from any rank and send to several: the rank that sends the received
    /// records. Those of the ring leave this and the next two 0.
    pub from: u32,
    /// The first entry of the table of [`Outbox`](crate::mesh::Outbox)es to which the step sends.
    pub to: u32,
    /// How many entries, one after the other, it sends to.
    pub fan_out: u32,
}

impl Step {
    /// Reads entry `index` of a table.
    ///
    /// # Safety
    /// `table` is the device address, aligned to 16 bytes, of more than `index` steps.
    #[inline(always)]
    pub unsafe fn load(table: u64, index: u32) -> Self {
        let entry = table + index as u64 * size_of::<Self>() as u64;
        // SAFETY: by the caller's promise; a step is three quads.
        let (a, b, c) =
            unsafe { (global::load_16(entry), global::load_16(entry + 16), global::load_16(entry + 32)) };
        let (a, b, c) = (uniform(a), uniform(b), uniform(c));
        Self {
            offset: a[0] as u64 | (a[1] as u64) << 32,
            bytes: a[2] as u64 | (a[3] as u64) << 32,
            actions: b[0],
            receives: b[1],
            sends: b[2],
            sealed_by: b[3],
            sealed_in: c[0],
            from: c[1],
            to: c[2],
            fan_out: c[3],
        }
    }
}

/// The quad from one lane, so that the compiler sees that what depends on it is uniform.
#[inline(always)]
fn uniform(quad: Quad) -> Quad {
    let [a, b, c, d] = quad;
    [warp::shuffle(a, 0), warp::shuffle(b, 0), warp::shuffle(c, 0), warp::shuffle(d, 0)]
}

/// Offset and length of chunk `index` of a vector of `bytes` bytes: shares of whole quads that differ by at most one, the
/// longer ones first. Quads hold whole elements of every type, and start aligned where the vector does.
pub const fn chunk(index: u32, ranks: u32, bytes: u64) -> (u64, u64) {
    let (index, ranks, quads) = (index as u64, ranks as u64, bytes.div_ceil(16));
    let (share, longer) = (quads / ranks, quads % ranks);
    let first = index * share + if index < longer { index } else { longer };
    let count = share + (index < longer) as u64;
    // Only the vector's last quad may be cut short.
    let (start, end) = (16 * first, 16 * (first + count));
    if start >= bytes { (bytes, 0) } else { (start, if end < bytes { end - start } else { bytes - start }) }
}

/// Step `index` of two of an all-reduce in which both of two ranks send their whole vector of `bytes` bytes and reduce what
/// they receive: one hop. Every reduction of two elements gives the same bits in either order.
pub const fn exchange(rank: u32, index: u32, bytes: u64) -> Step {
    let actions = if index == 0 { SEND } else { RECEIVE | REDUCE | FINISH | STORE };
    Step { offset: 0, bytes, actions, receives: 0, sends: 0, sealed_by: 1 - rank, sealed_in: 0, ..NOTHING }
}

/// Step `index` of `ranks` of the ring reduce-scatter, the all-reduce's first half: every rank adds its part to the chunk
/// that it received and sends it on. The sum of chunk c begins on rank c + 1 and ends on rank c. A single rank copies its
/// vector.
pub fn ring_reduce_scatter(rank: u32, ranks: u32, index: u32, chunk: impl Fn(u32) -> (u64, u64)) -> Step {
    let (offset, bytes) = chunk((rank + 2 * ranks - 1 - index) % ranks);
    let actions = if ranks == 1 {
        STORE
    } else if index == 0 {
        SEND
    } else if index < ranks - 1 {
        RECEIVE | REDUCE | SEND
    } else {
        RECEIVE | REDUCE | FINISH | STORE
    };
    from_predecessor(rank, ranks, index, Step { offset, bytes, actions, ..NOTHING })
}

/// Step `index` of `ranks` of the ring all-gather, the all-reduce's second half: every rank's chunk goes round, with `relay`
/// as its owner sealed it. A single rank copies its vector.
pub fn ring_all_gather(
    rank: u32,
    ranks: u32,
    index: u32,
    relay: bool,
    chunk: impl Fn(u32) -> (u64, u64),
) -> Step {
    let (offset, bytes) = chunk((rank + ranks - index) % ranks);
    let actions = if ranks == 1 {
        STORE
    } else if index == 0 {
        STORE | SEND
    } else if index < ranks - 1 {
        RECEIVE | STORE | SEND | if relay { FORWARD } else { 0 }
    } else {
        RECEIVE | STORE
    };
    let step = from_predecessor(rank, ranks, index, Step { offset, bytes, actions, ..NOTHING });
    match relay && index > 0 {
        true => Step { sealed_by: (rank + ranks - index) % ranks, sealed_in: 0, ..step },
        false => step,
    }
}

/// The only step of a ring broadcast of `bytes` bytes from rank `root`: the vector goes round as one chunk, with `relay` as
/// the root sealed it.
pub const fn ring_broadcast(rank: u32, ranks: u32, root: u32, relay: bool, bytes: u64) -> Step {
    let distance = (rank + ranks - root) % ranks;
    let (receive, last) = (distance > 0, distance == ranks - 1);
    let sends = match (last, relay && receive) {
        (true, _) => 0,
        (false, true) => SEND | FORWARD,
        (false, false) => SEND,
    };
    Step {
        bytes,
        actions: STORE | sends | if receive { RECEIVE } else { 0 },
        sealed_by: if relay { root } else { (rank + ranks - 1) % ranks },
        ..NOTHING
    }
}

/// A step that does nothing.
pub const NOTHING: Step = Step {
    offset: 0,
    bytes: 0,
    actions: 0,
    receives: 0,
    sends: 0,
    sealed_by: 0,
    sealed_in: 0,
    from: 0,
    to: 0,
    fan_out: 0,
};

/// Step `index` of a rank that receives in each step what its predecessor sealed in the one before.
const fn from_predecessor(rank: u32, ranks: u32, index: u32, step: Step) -> Step {
    let receives = index.wrapping_sub(1);
    Step { receives, sends: index, sealed_by: (rank + ranks - 1) % ranks, sealed_in: receives, ..step }
}

/// Step `index` of `2 * ranks - 1` of the ring all-reduce (Patarasu and Yuan, 2009): in the first `ranks - 1` messages
/// every rank adds its part to the chunk that it received and sends it on; in the others the finished chunks go round.
/// With `relay` the finished chunks travel as their owners sealed them; otherwise each hop opens and seals them anew.
///
/// `chunk(c)` gives the offset and length of chunk c in bytes. A single rank copies its vector.
pub fn ring_all_reduce(
    rank: u32,
    ranks: u32,
    index: u32,
    relay: bool,
    chunk: impl Fn(u32) -> (u64, u64),
) -> Step {
    let (last_reduce, last) = (ranks - 1, 2 * ranks - 2);
    // Sent first: the rank's own chunk; received in step k: the one that the predecessor sent in step k - 1.
    let (offset, bytes) = chunk((rank + 2 * ranks - index) % ranks);
    let actions = if ranks == 1 {
        STORE
    } else if index == 0 {
        SEND
    } else if index < last_reduce {
        RECEIVE | REDUCE | SEND
    } else if index == last_reduce {
        RECEIVE | REDUCE | FINISH | STORE | SEND
    } else if index < last {
        RECEIVE | STORE | SEND | if relay { FORWARD } else { 0 }
    } else {
        RECEIVE | STORE
    };
    let receives = index.wrapping_sub(1);
    let relayed = relay && index > last_reduce;
    Step {
        offset,
        bytes,
        actions,
        receives,
        sends: index,
        sealed_by: if relayed {
            (rank + 2 * ranks - 1 - (index - last_reduce - 1)) % ranks
        } else {
            (rank + ranks - 1) % ranks
        },
        sealed_in: if relayed { last_reduce } else { receives },
        ..NOTHING
    }
}
