//! Collectives in which every rank may speak to every other, as one persistent kernel a rank: direct, tree, and the exchange
//! of more than two ranks.
//!
//! Blocks own records, and go through them in diagonals, as in the [`ring`]. What differs:
//!
//! * A step either receives or sends what the rank has; to send a sum takes a step of its own. So a block has one record and
//!   one key in hand at a time, however many ranks there are.
//! * A sum of several received records takes a step for each. In between the partial result lies in the rank's scratch
//!   memory, f16 and bf16 in f32, so that they are rounded where the schedule's step ends.
//! * A step may send to several ranks: the record is sealed once, and its bytes and tag stored to each.
//!
//! # No rank waits for ever
//!
//! A block does record j of step k at time j + k, and of one time the lower steps first. The tables are such that a message is
//! sent in a lower step than it is received in (steps that do nothing fill in): then whatever a block waits for comes earlier
//! in this order than what the block does itself, and of all that is waited for, the earliest can't be waiting.
//!
//! # No rank runs ahead
//!
//! Collectives take the two halves of the mailboxes in turn, so what a rank sends in collective s + 2 lies where its peers read
//! in collective s. It may be sent to any rank. So no rank completes collective s + 1 before every other one has started it,
//! and hence completed s. A whole all-reduce's result depends on every rank's vector, so that nobody can; in the other
//! collectives each rank tells all others that it has started ([`started_at`]), and waits until it has been told by all.

use crate::device::{self, Quad, global, thread, warp};
use crate::params::SHARED_BASE;
use crate::reduce::{Reduction, combine_wide, is_narrow, rounded, widened};
use crate::ring::{
    self, Block, Notice, RELEASER, RingParams, SIGNAL_BYTES, THREADS, aborted, allowed, differ, enter,
    exhausted, fail, failure, finished, leave, load_quad, reduced, store_quad,
};
use crate::step::{
    ACCUMULATE, FINISH, KEEP, KEEP_ROUNDED, RECEIVE, REDUCE, SEND, SEND_KEPT, SEND_STORED, STORE, Step,
};

/// Where one message to another rank goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(16))]
pub struct Outbox {
    /// The message's place in the first half of that rank's inbox.
    pub inbox: u64,
    /// The signal of its first record in the first half.
    pub signals: u64,
}

impl Outbox {
    /// Reads entry `index` of a table.
    ///
    /// # Safety
    /// `table` is the device address of more than `index` entries.
    #[inline(always)]
    pub unsafe fn load(table: u64, index: u32) -> Self {
        // SAFETY: the caller's.
        let [a, b, c, d] = unsafe { global::load_16(table + 16 * index as u64) };
        Self { inbox: a as u64 | (b as u64) << 32, signals: c as u64 | (d as u64) << 32 }
    }
}

/// What a rank's kernel needs beside [`RingParams`]. Of those it takes no `outbox` and no `signals_out`, and
/// `awaits_successor` is 0.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Mesh {
    /// Table of the [`Outbox`]es that the steps name.
    pub outboxes: u64,
    /// The rank's scratch memory: [`scratch_bytes`] of the longest chunk.
    pub scratch: u64,
    /// 1 when the rank may only complete the collective once all others have started it.
    pub awaits_others: u32,
    /// Zero.
    pub reserved: u32,
}

/// Parameters of a rank's part in one plain collective.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct MeshParams {
    /// As for the ring.
    pub ring: RingParams,
    /// What is the mesh's.
    pub mesh: Mesh,
}

/// Bytes of scratch memory for chunks of at most `chunk` bytes: f16 and bf16 take twice their own length.
pub const fn scratch_bytes(chunk: u64) -> u64 {
    32 * chunk.div_ceil(16)
}

/// Where, from a rank's notice, rank `by` says which collective it has started last: after the [`Notice`] comes a word for each
/// rank.
pub const fn started_at(by: u32) -> u64 {
    size_of::<Notice>() as u64 + 8 * by as u64
}

/// The message field of a failure word: which rank was waited for, and which of this rank's messages.
pub const fn failed_message(from: u32, message: u32) -> u32 {
    from << 12 | message
}

/// The rank and the message of a [`failed_message`].
pub const fn failed_parts(field: u32) -> (u32, u32) {
    (field >> 12, field & 0xfff)
}

/// Where one record lies.
#[derive(Clone, Copy)]
pub struct Record {
    /// Its number in the chunk.
    pub index: u32,
    /// Its length in bytes, at least 1.
    pub bytes: u32,
    /// Whether it is its chunk's last.
    pub last: bool,
    /// The input vector's part.
    pub input: u64,
    /// The output vector's part.
    pub output: u64,
    /// Its slot in this rank's inbox.
    pub inbox: u64,
    /// Its slot in another rank's inbox, from [`Outbox::inbox`] on.
    pub slot: u64,
}

/// Where what is kept of quad `index` of a chunk lies in the scratch memory: of f16 and bf16 each quad takes the place of two,
/// for f32.
#[inline(always)]
pub fn kept_at(mesh: &Mesh, reduction: Reduction, index: u32) -> u64 {
    mesh.scratch + ((index as u64) << if is_narrow(reduction) { 5 } else { 4 })
}

/// How records are protected on their way.
pub trait Wire {
    /// Whether signals carry tags that must verify.
    const SEALED: bool;
    /// Address of a word of shared memory that the mesh uses between barriers.
    const VERDICT: u32;

    /// Does with one record what `step.actions` says, except for signals. All stores of the block are done when it
    /// returns, which takes at least one barrier. In the thread [`RELEASER`], returns the tag of the received bytes or of those
    /// to send.
    ///
    /// Calls `arrived`, which waits for the record and is a barrier when there is one to receive, before it reads the
    /// inbox or the input; returns `None` when that returns false.
    ///
    /// # Safety
    /// All of the block's threads call it with the same arguments, whose addresses are valid.
    unsafe fn transfer(
        &mut self,
        block: &Block,
        mesh: &Mesh,
        step: &Step,
        record: &Record,
        arrived: impl FnOnce() -> bool,
    ) -> Option<Quad>;
}

/// A rank's part in one collective.
///
/// # Safety
/// As [`Wire::transfer`]; the parameters describe live memory.
#[inline(always)]
pub unsafe fn collective<W: Wire>(params: RingParams, mesh: &Mesh, mut wire: W) {
    // SAFETY: by the caller's promise.
    unsafe {
        let block = enter(params);
        let speaks = mesh.awaits_others != 0 && thread::block_index() == 0 && thread::index() == RELEASER;
        if speaks {
            tell_others(&block);
        }
        if allowed(&block) {
            diagonals(&block, mesh, &mut wire);
        } else {
            exhausted(&block);
        }
        // The block has not left before, so the rank has not completed the collective.
        if speaks {
            await_others(&block);
        }
        leave(&block, W::VERDICT);
    }
}

/// Tells all other ranks that this one has started.
///
/// # Safety
/// The block's parameters describe live memory.
unsafe fn tell_others(block: &Block) {
    let params = &block.params;
    for peer in 0..params.ranks {
        // SAFETY: all notices are reachable from every rank, with a word for each.
        unsafe {
            let notice = global::load_u64(params.notices + 8 * peer as u64);
            global::store_release_sys(notice + started_at(params.rank), block.sequence);
        }
    }
}

/// Waits until all other ranks have started the collective, or a rank has failed.
///
/// # Safety
/// As [`tell_others`].
unsafe fn await_others(block: &Block) {
    let params = &block.params;
    for peer in 0..params.ranks {
        // SAFETY: the notice is the rank's.
        unsafe {
            let started = params.notice + started_at(peer);
            while global::load_volatile_u64(started) < block.sequence && !aborted(block) {
                if device::nanotime() > block.deadline {
                    fail(block, failure::pack(failure::ABSENT, failed_message(peer, 0), 0));
                }
                device::spin_pause();
            }
        }
    }
}

#[inline(always)]
unsafe fn diagonals<W: Wire>(block: &Block, mesh: &Mesh, wire: &mut W) {
    let params = &block.params;
    let (first, grid) = (thread::block_index(), thread::grid_size());
    if first >= params.records {
        return;
    }
    let own_records = (params.records - first).div_ceil(grid);
    let mut time = 0;
    while time + 1 < own_records + params.step_count {
        let mut index = time.saturating_sub(own_records - 1);
        while index <= time && index < params.step_count {
            // SAFETY: the table has `step_count` steps.
            let step = unsafe { Step::load(params.steps, index) };
            // SAFETY: by the caller's promise; everything here is the same in all threads.
            if !unsafe { advance(block, mesh, wire, &step, first + (time - index) * grid) } {
                return;
            }
            index += 1;
        }
        time += 1;
    }
}

/// One record in one step. False when the collective has failed.
#[inline(always)]
unsafe fn advance<W: Wire>(block: &Block, mesh: &Mesh, wire: &mut W, step: &Step, index: u32) -> bool {
    let params = &block.params;
    let start = index as u64 * params.record_bytes as u64;
    if start >= step.bytes {
        return true;
    }
    let slot = block.half * params.inbox_half + start;
    let signal = block.half * params.signals_half + index as u64;
    let record = Record {
        index,
        bytes: (step.bytes - start).min(params.record_bytes as u64) as u32,
        last: step.bytes - start <= params.record_bytes as u64,
        input: params.input + step.offset + start,
        output: params.output + step.offset + start,
        inbox: params.inbox + step.receives as u64 * params.message_stride + slot,
        slot,
    };
    let received = params.signals_in + (step.receives as u64 * params.records as u64 + signal) * SIGNAL_BYTES;
    // SAFETY: the slots and signals lie inside the inboxes; the signal of a slot orders the accesses to it.
    unsafe {
        let message = failed_message(step.from, step.receives);
        let arrived =
            || step.actions & RECEIVE == 0 || ring::arrived(block, W::VERDICT, message, index, received);
        let Some(tag) = wire.transfer(block, mesh, step, &record, arrived) else {
            return false;
        };
        if thread::index() == RELEASER {
            if W::SEALED && step.actions & RECEIVE != 0 && differ(tag, global::load_16(received)) {
                let message = failed_message(step.from, step.receives);
                fail(block, failure::pack(failure::AUTHENTICATION, message, index));
            } else if step.actions & SEND != 0 && !aborted(block) {
                release::<W>(block, mesh, step, signal, tag);
            }
        }
    }
    // As in the ring: without it `mesh_plain_any` counted twice, and never ended.
    warp::sync();
    true
}

/// Signals a record to all to whom it was stored: the tags first, so that one release waits for all of them.
///
/// # Safety
/// As [`tell_others`]; the record's bytes were stored before the latest barrier.
#[inline(always)]
unsafe fn release<W: Wire>(block: &Block, mesh: &Mesh, step: &Step, signal: u64, tag: Quad) {
    let mut at = step.to;
    // SAFETY: the caller's.
    unsafe {
        if W::SEALED {
            while at < step.to + step.fan_out {
                global::store_16(Outbox::load(mesh.outboxes, at).signals + signal * SIGNAL_BYTES, tag);
                at += 1;
            }
            at = step.to;
        }
        while at < step.to + step.fan_out {
            let sent = Outbox::load(mesh.outboxes, at).signals + signal * SIGNAL_BYTES;
            global::store_release_sys(sent + 16, block.sequence);
            at += 1;
        }
    }
}

/// A received quad once it is reduced as the step says, with the partial result at `kept` and with this rank's `local`. A
/// result that is kept as a partial one is stored; what is returned then has no meaning.
///
/// # Safety
/// `kept` is the quad's place in the scratch memory.
#[inline(always)]
pub unsafe fn reduced_quad<const COMMON: bool>(
    block: &Block,
    actions: u32,
    kept: u64,
    quad: Quad,
    local: Quad,
) -> Quad {
    let reduction = block.params.reduction;
    let mut value = quad;
    // SAFETY: the caller's.
    unsafe {
        if actions & (ACCUMULATE | KEEP) != 0 && is_narrow(reduction) {
            let [a, b] = reduced_half::<COMMON, false>(reduction, actions, kept, quad, local);
            let [c, d] = reduced_half::<COMMON, true>(reduction, actions, kept, quad, local);
            return [a, b, c, d];
        }
        if actions & ACCUMULATE != 0 {
            value = reduced::<COMMON>(block, global::load_16(kept), value);
        }
        if actions & REDUCE != 0 {
            value = reduced::<COMMON>(block, value, local);
        }
        if actions & KEEP != 0 {
            global::store_16(kept, value);
        }
    }
    value
}

/// Half of a quad of f16 or bf16 as [`reduced_quad`] has it, its partial result in f32; returns it rounded.
///
/// # Safety
/// As [`reduced_quad`].
#[inline(always)]
unsafe fn reduced_half<const COMMON: bool, const HIGH: bool>(
    reduction: Reduction,
    actions: u32,
    kept: u64,
    quad: Quad,
    local: Quad,
) -> [u32; 2] {
    let kept = kept + if HIGH { 16 } else { 0 };
    let mut value = widened::<HIGH>(reduction, quad);
    // SAFETY: the caller's.
    unsafe {
        if actions & ACCUMULATE != 0 {
            value = combine_wide::<COMMON>(reduction, global::load_16(kept), value);
        }
        if actions & REDUCE != 0 {
            value = combine_wide::<COMMON>(reduction, value, widened::<HIGH>(reduction, local));
        }
        if actions & KEEP != 0 {
            global::store_16(kept, value);
        }
    }
    rounded(reduction, value)
}

/// Plain records: the transport and schedule without the cryptography, to compare with. `COMMON` as for
/// [`ring::Plain`].
#[derive(Clone, Copy)]
pub struct Plain<const COMMON: bool>;

impl<const COMMON: bool> Wire for Plain<COMMON> {
    const SEALED: bool = false;
    const VERDICT: u32 = SHARED_BASE;

    #[inline(always)]
    unsafe fn transfer(
        &mut self,
        block: &Block,
        mesh: &Mesh,
        step: &Step,
        record: &Record,
        arrived: impl FnOnce() -> bool,
    ) -> Option<Quad> {
        if !arrived() {
            return None;
        }
        let mut quad = thread::index();
        // SAFETY: by the caller's promise; a quad is read before the same thread overwrites it in place.
        unsafe {
            if COMMON && (record.input | record.output).is_multiple_of(16) {
                // Whole quads only: the others are left to the loop below.
                while quad + 3 * THREADS < record.bytes / 16 {
                    move_four(block, mesh, step, record, quad);
                    quad += 4 * THREADS;
                }
            }
            while quad < record.bytes.div_ceil(16) {
                let value = load_quad(source(step, record), quad, record.bytes);
                let local = match step.actions & REDUCE {
                    0 => [0; 4],
                    _ => load_quad(record.input, quad, record.bytes),
                };
                move_quad::<COMMON>(block, mesh, step, record, quad, value, local);
                quad += THREADS;
            }
        }
        device::sync_threads();
        Some([0; 4])
    }
}

/// Where what a step takes lies, unless it was [kept](SEND_KEPT).
#[inline(always)]
fn source(step: &Step, record: &Record) -> u64 {
    if step.actions & RECEIVE != 0 {
        record.inbox
    } else if step.actions & SEND_STORED != 0 {
        record.output
    } else {
        record.input
    }
}

/// Moves four whole quads of a thread, all loads from the mailbox and the vector before the first store.
///
/// # Safety
/// As [`Wire::transfer`]; the record and its vectors are aligned.
#[inline(always)]
unsafe fn move_four(block: &Block, mesh: &Mesh, step: &Step, record: &Record, quad: u32) {
    const STRIDE: u64 = THREADS as u64 * 16;
    // SAFETY: by the caller's promise.
    let load = |base: u64| unsafe {
        let at = base + quad as u64 * 16;
        [
            global::load_16(at),
            global::load_16(at + STRIDE),
            global::load_16(at + 2 * STRIDE),
            global::load_16(at + 3 * STRIDE),
        ]
    };
    let values = load(source(step, record));
    let locals = if step.actions & REDUCE != 0 { load(record.input) } else { [[0; 4]; 4] };
    // Written out: closures were once not inlined, their quads then in local memory.
    // SAFETY: by the caller's promise.
    unsafe {
        move_quad::<true>(block, mesh, step, record, quad, values[0], locals[0]);
        move_quad::<true>(block, mesh, step, record, quad + THREADS, values[1], locals[1]);
        move_quad::<true>(block, mesh, step, record, quad + 2 * THREADS, values[2], locals[2]);
        move_quad::<true>(block, mesh, step, record, quad + 3 * THREADS, values[3], locals[3]);
    }
}

/// Does with one quad, or with what the record's end leaves of it, what the step says. `value` is that of its [`source`],
/// `local` the input's.
///
/// # Safety
/// As [`Wire::transfer`].
#[inline(always)]
unsafe fn move_quad<const COMMON: bool>(
    block: &Block,
    mesh: &Mesh,
    step: &Step,
    record: &Record,
    quad: u32,
    mut value: Quad,
    local: Quad,
) {
    let (actions, bytes) = (step.actions, record.bytes);
    let params = &block.params;
    let kept = kept_at(mesh, params.reduction, record.index * (params.record_bytes / 16) + quad);
    // SAFETY: by the caller's promise.
    unsafe {
        if actions & SEND_KEPT != 0 {
            value = global::load_16(kept);
        }
        if actions & (REDUCE | ACCUMULATE | KEEP) != 0 {
            value = reduced_quad::<COMMON>(block, actions, kept, value, local);
        }
        if actions & FINISH != 0 {
            value = finished::<COMMON>(block, value);
        }
        if actions & KEEP_ROUNDED != 0 {
            global::store_16(kept, value);
        }
        if actions & STORE != 0 {
            store_quad(record.output, quad, bytes, value);
        }
        let mut at = step.to;
        while at < step.to + step.fan_out {
            store_quad(Outbox::load(mesh.outboxes, at).inbox + record.slot, quad, bytes, value);
            at += 1;
        }
    }
}

kernel! {
    threads = 512,
    shared = ring::PLAIN_SHARED,
    /// A plain collective by messages between any two ranks, for sums and averages of f32, f16 and bf16.
    fn mesh_plain(params: MeshParams) {
        // SAFETY: by the launcher's promise.
        unsafe { collective(params.ring, &params.mesh, Plain::<true>) }
    }
}

kernel! {
    threads = 512,
    shared = ring::PLAIN_SHARED,
    /// A plain collective by messages between any two ranks, for every element type and operation.
    fn mesh_plain_any(params: MeshParams) {
        // SAFETY: by the launcher's promise.
        unsafe { collective(params.ring, &params.mesh, Plain::<false>) }
    }
}
