//! Collectives round a ring as one persistent kernel a rank: every step of a collective in one launch. Or, where the ranks'
//! blocks can't all be resident at once, in a launch for each step ([`RingParams::more`]): a kernel that starts after the one
//! that sends what it receives never waits.
//!
//! A block of threads owns the records `block, block + grid, ..` of every chunk in every step, on every rank alike. So
//! a record depends only on the same block's earlier work and on the predecessor's block of the same number: blocks of
//! one rank never wait for each other. A block works in diagonals (record j in step k at time j + k), so that what it
//! awaits was sent a whole diagonal before. Where there are few records, several blocks share one's steps, so that a block
//! prepares a step while another is at the one before; of a rank's steps with a record, the later wait for what other ranks
//! made of the earlier, so that these blocks need not wait for each other either.
//!
//! Records are stored straight into the successor's inbox, each into a slot of its own, followed by a signal: its tag
//! and a number that no other collective uses, so that nothing is ever reset. The inbox has two halves, used in turn
//! by successive collectives. That suffices: no rank completes a collective before its successor has started it, hence
//! has read everything of the one before. In an all-reduce no rank can; in the others a rank may have nothing to receive,
//! and waits for its successor's [`Notice::started`].
//!
//! Cost, plain, for a vector of S bytes and n ranks: 2 S (n-1)/n over the link each way; in local memory (5n-3)/n S
//! read or written. Waits are bounded by a deadline, and end when any rank has failed.

use core::mem::offset_of;

use crate::device::{self, Quad, bits, global, shared, thread, warp};
use crate::params::SHARED_BASE;
use crate::reduce::{Reduction, combine, combine_common, finish, finish_common};
use crate::step::{FINISH, RECEIVE, REDUCE, SEND, STORE, Step};

/// Threads of a block.
pub const THREADS: u32 = 512;
/// Bytes of a signal: a tag, the collective's number, and padding.
pub const SIGNAL_BYTES: u64 = 32;

/// What a rank's kernels keep in its device memory from one collective to the next. No other rank reaches it: nonces are
/// made of its numbers, and it says whether the rank failed.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(16))]
pub struct RankState {
    /// The number of the next collective, from 1. Counted on the device, so that a captured graph can be replayed.
    pub sequence: u64,
    /// The first failure of this rank: see [`failure`]. 0 when there is none.
    pub failure: u64,
    /// 1 plus the number of a rank that failed, once this rank has seen it, or failed itself. It stops all later releases.
    pub aborted: u32,
    /// Blocks that have left the present collective.
    pub exited: u32,
    /// The half of the inbox for the next collective, in its lowest bit. Unlike `sequence`, collectives of no bytes,
    /// which wait for nobody, leave it as it is.
    pub turn: u64,
    /// The epoch of the latest collective's keys.
    pub epoch: u64,
    /// Block cipher calls reserved under that epoch's keys.
    pub calls: u64,
}

/// What the other ranks reach beside the mailbox. Changing it can stop collectives, and nothing else.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(16))]
pub struct Notice {
    /// The rank's [`RankState::failure`], for others to read.
    pub failure: u64,
    /// Set to 1 plus the number of a rank that failed, by that rank.
    pub aborted: u32,
    /// Zero.
    pub reserved: u32,
    /// The latest collective that the rank's successor has started, of those with [`RingParams::awaits_successor`].
    pub started: u64,
    /// Zero.
    pub padding: u64,
}

const NOTICE_FAILURE: u64 = offset_of!(Notice, failure) as u64;
const NOTICE_ABORTED: u64 = offset_of!(Notice, aborted) as u64;
const NOTICE_STARTED: u64 = offset_of!(Notice, started) as u64;

const SEQUENCE: u64 = offset_of!(RankState, sequence) as u64;
const FAILURE: u64 = offset_of!(RankState, failure) as u64;
const ABORTED: u64 = offset_of!(RankState, aborted) as u64;
const EXITED: u64 = offset_of!(RankState, exited) as u64;
const TURN: u64 = offset_of!(RankState, turn) as u64;
const EPOCH: u64 = offset_of!(RankState, epoch) as u64;
const CALLS: u64 = offset_of!(RankState, calls) as u64;

/// The causes in a failure word: `cause << 56 | message << 32 | record`.
pub mod failure {
    /// A record's tag did not verify.
    pub const AUTHENTICATION: u64 = 1;
    /// A record did not come before the deadline.
    pub const DEADLINE: u64 = 2;
    /// The keys may not encrypt that much more, or a later epoch has begun: a captured graph was replayed too often.
    pub const EXHAUSTED: u64 = 3;
    /// The successor did not start the collective before the deadline.
    pub const ABSENT: u64 = 4;

    /// Packs a failure word.
    pub const fn pack(cause: u64, message: u32, record: u32) -> u64 {
        cause << 56 | (message as u64) << 32 | record as u64
    }
}

/// Parameters of a rank's part in one collective. Lengths are in bytes, addresses are of device memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RingParams {
    /// The rank's [`RankState`].
    pub state: u64,
    /// The rank's [`Notice`].
    pub notice: u64,
    /// Addresses of all ranks' [`Notice`]s, as an array of `ranks` words.
    pub notices: u64,
    /// The table of [`Step`]s.
    pub steps: u64,
    /// Where the vector begins that the rank gives; of a rank that gives a part of it, where it would begin.
    pub input: u64,
    /// Where the vector begins that is the result: the same as `input`, or apart from it. Likewise of a rank that gets a
    /// part.
    pub output: u64,
    /// What this rank gets, of `bytes` bytes; zeroed on failure.
    pub result: u64,
    /// Length of this rank's result.
    pub bytes: u64,
    /// This rank's inbox: two halves of `inbox_half` bytes.
    pub inbox: u64,
    /// The successor's inbox, laid out alike.
    pub outbox: u64,
    /// Bytes of a half of an inbox.
    pub inbox_half: u64,
    /// Bytes of an inbox from one message to the next.
    pub message_stride: u64,
    /// This rank's signals: two halves, [`SIGNAL_BYTES`] a record.
    pub signals_in: u64,
    /// The successor's signals.
    pub signals_out: u64,
    /// Signals of a half.
    pub signals_half: u64,
    /// How long the collective may take, in nanoseconds.
    pub timeout_ns: u64,
    /// The epoch of the keys.
    pub epoch: u64,
    /// Block cipher calls of the collective, and how many the keys may make in all.
    pub calls: u64,
    /// See [`calls`](Self::calls).
    pub calls_limit: u64,
    /// Steps in the table; of a collective in several launches, those of this one.
    pub step_count: u32,
    /// Records of the longest chunk.
    pub records: u32,
    /// Length of a record, a multiple of 16.
    pub record_bytes: u32,
    /// Element type and operation.
    pub reduction: Reduction,
    /// Number of this rank.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// A power of two up to 16 that divides the offsets of all steps.
    pub unit: u32,
    /// 1 when the rank may only complete the collective once its successor has started it.
    pub awaits_successor: u32,
    /// 1 when more launches of the same collective follow: this one then leaves the rank's counts as they are, so that all
    /// of them have its number, its half of the inbox and its share of the keys' calls.
    pub more: u32,
    /// Zero.
    pub reserved: u32,
}

impl RingParams {
    /// The rank before this one.
    #[inline(always)]
    pub(crate) const fn predecessor(&self) -> u32 {
        if self.rank == 0 { self.ranks - 1 } else { self.rank - 1 }
    }
}

/// How records are protected on their way, and what else a block does with them.
pub trait Wire {
    /// Whether signals carry tags that must verify.
    const SEALED: bool;
    /// Address of a word of shared memory that the ring uses between barriers.
    const VERDICT: u32;
    /// Whether several blocks may share a record's steps.
    const SHARES: bool = false;

    /// Does with one record what `step.actions` says, except for signals. All stores of the block are done when it
    /// returns, which takes at least one barrier. In the thread [`RELEASER`], returns the tag of the received bytes and
    /// the tag to send.
    ///
    /// Calls `arrived`, which waits for the record and is a barrier when there is one to receive, before it reads the
    /// inbox or the input; returns `None` when that returns false.
    ///
    /// # Safety
    /// All of the block's threads call it with the same arguments, whose addresses are valid.
    unsafe fn transfer(
        &mut self,
        block: &Block,
        step: &Step,
        record: &Record,
        arrived: impl FnOnce() -> bool,
    ) -> Option<(Quad, Quad)>;
}

/// Plain records: the transport and schedule without the cryptography, to compare with. `COMMON` kernels know only the
/// reductions of [`combine_common`], and are faster.
#[derive(Clone, Copy)]
pub struct Plain<const COMMON: bool>;

/// What all records of a block have in common.
#[derive(Clone, Copy)]
pub struct Block {
    /// The kernel's parameters.
    pub params: RingParams,
    /// The collective's number.
    pub sequence: u64,
    /// Which half of the inboxes is used.
    pub half: u64,
    /// When to give up, on the clock of [`device::nanotime`].
    pub deadline: u64,
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
    /// Its slot in the successor's.
    pub outbox: u64,
}

/// The thread that compares tags and signals the successor. In another warp than `POLLER`, so that a block already
/// awaits the next record while the stores of the last one drain.
pub const RELEASER: u32 = 0;
/// The thread that awaits the predecessor's signals.
const POLLER: u32 = THREADS - 32;

/// What a block does in a collective, once it is known that the keys may make its calls.
pub trait Work {
    /// Address of a word of shared memory that the ring uses between barriers.
    const VERDICT: u32;

    /// Does it, until it is done or the collective has failed.
    ///
    /// # Safety
    /// All of the block's threads; the block's parameters describe live memory.
    unsafe fn run(&mut self, block: &Block);
}

/// Record by record.
impl<W: Wire> Work for W {
    const VERDICT: u32 = <W as Wire>::VERDICT;

    #[inline(always)]
    unsafe fn run(&mut self, block: &Block) {
        // SAFETY: the caller's.
        unsafe { diagonals(block, self) }
    }
}

/// A rank's part in one collective. `work` is made by all of the block's threads, while what the rank knows of the collective is
/// being loaded.
///
/// # Safety
/// As [`Work::run`].
#[inline(always)]
pub unsafe fn collective<W: Work>(params: RingParams, work: impl FnOnce() -> W) {
    // SAFETY: by the caller's promise.
    unsafe {
        let block = enter(params);
        let mut work = work();
        if params.awaits_successor != 0 && thread::block_index() == 0 && thread::index() == RELEASER {
            let notice = global::load_u64(params.notices + 8 * params.predecessor() as u64);
            global::store_release_sys(notice + NOTICE_STARTED, block.sequence);
        }
        if allowed(&block) {
            work.run(&block);
        } else {
            exhausted(&block);
        }
        leave(&block, W::VERDICT);
    }
}

/// What a block needs to know of the collective.
///
/// # Safety
/// `params` describes live memory.
#[inline(always)]
pub(crate) unsafe fn enter(params: RingParams) -> Block {
    // SAFETY: the state is the rank's, and no block writes these fields before all have left.
    let (sequence, turn) =
        unsafe { (global::load_u64(params.state + SEQUENCE), global::load_u64(params.state + TURN)) };
    Block { params, sequence, half: turn & 1, deadline: device::nanotime() + params.timeout_ns }
}

/// Whether the keys may make the collective's calls: otherwise the rank has [`exhausted`] them.
///
/// # Safety
/// As [`enter`].
#[inline(always)]
pub(crate) unsafe fn allowed(block: &Block) -> bool {
    let params = &block.params;
    // From one lane, so that the compiler sees that what follows is uniform.
    // SAFETY: the caller's.
    unsafe { warp::shuffle((reserved(params) <= params.calls_limit) as u32, 0) != 0 }
}

/// Fails the collective before it begins.
///
/// # Safety
/// As [`enter`].
#[inline(always)]
pub(crate) unsafe fn exhausted(block: &Block) {
    if thread::index() == RELEASER {
        // SAFETY: the caller's.
        unsafe { fail(block, failure::pack(failure::EXHAUSTED, 0, 0)) };
    }
}

/// Block cipher calls of the epoch with those of this collective; more than any limit when the epoch is over.
#[inline(always)]
unsafe fn reserved(params: &RingParams) -> u64 {
    // SAFETY: the state is the rank's, and no block writes these fields before all have left.
    let (epoch, calls) =
        unsafe { (global::load_u64(params.state + EPOCH), global::load_u64(params.state + CALLS)) };
    if epoch > params.epoch {
        return u64::MAX;
    }
    (if epoch == params.epoch { calls } else { 0 }).saturating_add(params.calls)
}

#[inline(always)]
unsafe fn diagonals<W: Wire>(block: &Block, wire: &mut W) {
    let params = &block.params;
    if params.records == 0 {
        return;
    }
    let share = Share::of::<W>(params);
    if share.first >= params.records || share.number >= share.sharers {
        return;
    }
    let own_records = (params.records - share.first).div_ceil(thread::grid_size());
    let own_steps = params.step_count.saturating_sub(share.number).div_ceil(share.sharers);
    let mut time = 0;
    while time + 1 < own_records + own_steps {
        let mut index = time.saturating_sub(own_records - 1);
        while index <= time && index < own_steps {
            // Computed anew: it would take registers of all that a record needs.
            let share = Share::of::<W>(params);
            // SAFETY: the table has `step_count` steps.
            let step = unsafe { Step::load(params.steps, share.number + index * share.sharers) };
            let record = share.first + (time - index) * thread::grid_size();
            // SAFETY: by the caller's promise; everything here is the same in all threads.
            if !unsafe { advance(block, wire, &step, record) } {
                return;
            }
            index += 1;
        }
        time += 1;
    }
}

/// A block's part of a rank's work: records `first`, `first` + grid, .., of which it takes the steps `number`,
/// `number + sharers`, ...
struct Share {
    first: u32,
    number: u32,
    sharers: u32,
}

impl Share {
    /// This block's. There are records; without any of `first`, or with a `number` of `sharers` or more, it has none.
    #[inline(always)]
    fn of<W: Wire>(params: &RingParams) -> Self {
        if !W::SHARES {
            return Share { first: thread::block_index(), number: 0, sharers: 1 };
        }
        let (block, records) = (bits::opaque(thread::block_index()), params.records);
        Share {
            first: block % records,
            number: block / records,
            sharers: (thread::grid_size() / records).min(params.step_count).max(1),
        }
    }
}

impl Record {
    /// Record `index` of a step's chunk, which begins `start` bytes from the chunk's beginning: inside it.
    #[inline(always)]
    pub(crate) fn at(block: &Block, step: &Step, index: u32, start: u64) -> Self {
        let params = &block.params;
        let slot =
            |message: u32| block.half * params.inbox_half + message as u64 * params.message_stride + start;
        Record {
            index,
            bytes: (step.bytes - start).min(params.record_bytes as u64) as u32,
            last: step.bytes - start <= params.record_bytes as u64,
            input: params.input + step.offset + start,
            output: params.output + step.offset + start,
            inbox: params.inbox + slot(step.receives),
            outbox: params.outbox + slot(step.sends),
        }
    }
}

/// Where the signals of record `index` are: of the one that a step receives, and of the one that it sends.
#[inline(always)]
pub(crate) fn signals(block: &Block, step: &Step, index: u32) -> (u64, u64) {
    let params = &block.params;
    let signal = |message: u32| {
        let record = message as u64 * params.records as u64 + index as u64;
        (block.half * params.signals_half + record) * SIGNAL_BYTES
    };
    (params.signals_in + signal(step.receives), params.signals_out + signal(step.sends))
}

/// One record in one step. False when the collective has failed.
#[inline(always)]
unsafe fn advance<W: Wire>(block: &Block, wire: &mut W, step: &Step, index: u32) -> bool {
    let params = &block.params;
    let start = index as u64 * params.record_bytes as u64;
    if start >= step.bytes {
        return true;
    }
    let record = Record::at(block, step, index, start);
    let (received, sent) = signals(block, step, index);
    // SAFETY: the slots and signals lie inside the inboxes; the signal of a slot orders the accesses to it.
    unsafe {
        let arrived = || {
            step.actions & RECEIVE == 0
                || arrived(block, <W as Wire>::VERDICT, step.receives, index, received)
        };
        let Some((tag_in, tag_out)) = wire.transfer(block, step, &record, arrived) else {
            return false;
        };
        if thread::index() == RELEASER {
            if W::SEALED && step.actions & RECEIVE != 0 && differ(tag_in, global::load_16(received)) {
                fail(block, failure::pack(failure::AUTHENTICATION, step.receives, index));
            } else if step.actions & SEND != 0 && !aborted(block) {
                if W::SEALED {
                    global::store_16(sent, tag_out);
                }
                global::store_release_sys(sent + 16, block.sequence);
            }
        }
    }
    // The warp together again: ptxas has been seen to count the loop that calls this in a uniform register, once for each part
    // of a warp that comes by alone.
    warp::sync();
    true
}

/// Compares all bits of two tags, without a branch on any (SP 800-38D, 7.2, step 8).
#[inline(always)]
pub(crate) fn differ(a: Quad, b: Quad) -> bool {
    (a[0] ^ b[0]) | (a[1] ^ b[1]) | (a[2] ^ b[2]) | (a[3] ^ b[3]) != 0
}

/// Waits for a signal; false when a rank has failed or the deadline has passed, of which the failure word says `message` and
/// `record`. A barrier for the block, which uses the word of shared memory at `place` between barriers.
///
/// # Safety
/// As [`collective`]; the place's last readers have passed a barrier.
#[inline(always)]
pub(crate) unsafe fn arrived(block: &Block, place: u32, message: u32, record: u32, signal: u64) -> bool {
    // SAFETY: the caller's.
    unsafe {
        if thread::index() == POLLER {
            let mut verdict = true;
            while global::load_volatile_u64(signal + 16) != block.sequence {
                if aborted(block) {
                    verdict = false;
                    break;
                }
                if device::nanotime() > block.deadline {
                    fail(block, failure::pack(failure::DEADLINE, message, record));
                    verdict = false;
                    break;
                }
                device::spin_pause();
            }
            // Orders the block's loads of the record after the signal.
            global::load_acquire_sys(signal + 16);
            shared::store_u32::<0>(place, verdict as u32);
        }
        device::sync_threads();
        // From one lane, so that the compiler sees that what follows is uniform.
        warp::shuffle(shared::load_u32::<0>(place), 0) != 0
    }
}

/// Whether a rank has failed.
///
/// # Safety
/// The block's parameters describe live memory.
#[inline(always)]
pub(crate) unsafe fn aborted(block: &Block) -> bool {
    let params = &block.params;
    // SAFETY: the state and the notice are the rank's; other ranks write the notice. Whatever it said once is kept where they
    // can't take it back.
    unsafe {
        if global::load_volatile_u32(params.state + ABORTED) != 0 {
            return true;
        }
        let by = global::load_volatile_u32(params.notice + NOTICE_ABORTED);
        if by != 0 {
            global::store_u32(params.state + ABORTED, by);
        }
        by != 0
    }
}

/// Records this rank's first failure, and stops all ranks.
///
/// # Safety
/// As [`aborted`].
pub(crate) unsafe fn fail(block: &Block, failure: u64) {
    let params = &block.params;
    // SAFETY: all notices are reachable from every rank and live as long as the collective.
    unsafe {
        if global::compare_exchange_u64(params.state + FAILURE, 0, failure) == 0 {
            global::store_u64(params.notice + NOTICE_FAILURE, failure);
        }
        // Any value but 0 means the same, so that it doesn't matter which of two comes last.
        global::store_u32(params.state + ABORTED, 1 + params.rank);
        let mut rank = 0;
        while rank < params.ranks {
            let notice = global::load_u64(params.notices + 8 * rank as u64);
            global::compare_exchange_u32_sys(notice + NOTICE_ABORTED, 0, 1 + params.rank);
            // A loop that can't be unrolled: it is in every kernel, several times, and seldom runs.
            rank = bits::opaque(rank) + 1;
        }
    }
}

/// Waits until the successor has started the collective, or a rank has failed.
unsafe fn await_successor(block: &Block) {
    let params = &block.params;
    // SAFETY: the notice is the rank's.
    unsafe {
        while global::load_volatile_u64(params.notice + NOTICE_STARTED) < block.sequence && !aborted(block) {
            if device::nanotime() > block.deadline {
                fail(block, failure::pack(failure::ABSENT, 0, 0));
            }
            device::spin_pause();
        }
    }
}

/// The last block to leave the collective's last launch counts the collective and, when it failed, wipes its output: parts
/// of it were stored before their tags had been compared. `place` is a word of shared memory.
///
/// # Safety
/// All threads of all blocks, once.
#[inline(always)]
pub(crate) unsafe fn leave(block: &Block, place: u32) {
    let params = &block.params;
    // SAFETY: the state is the rank's; the counter makes the last block the only one that writes.
    unsafe {
        device::sync_threads();
        if thread::index() == RELEASER {
            device::fence::system();
            let others = global::add_u32(params.state + EXITED, 1);
            let mut last = others + 1 == thread::grid_size();
            if last {
                global::store_u32(params.state + EXITED, 0);
            }
            last &= params.more == 0;
            if last && params.awaits_successor != 0 {
                await_successor(block);
            }
            // Asked by one thread: another rank may fail at any moment, and a part of the output must not be wiped.
            let wipe = last && aborted(block);
            shared::store_u32::<0>(place, last as u32 + wipe as u32);
        }
        device::sync_threads();
        let verdict = shared::load_u32::<0>(place);
        if verdict == 0 {
            return;
        }
        if verdict == 2 {
            let mut at = thread::index() as u64;
            while at < params.bytes {
                global::store_u8(params.result + at, 0);
                at += THREADS as u64;
            }
        }
        if thread::index() == RELEASER {
            let reserved = reserved(params);
            if reserved <= params.calls_limit {
                global::store_u64(params.state + EPOCH, params.epoch);
                global::store_u64(params.state + CALLS, reserved);
            }
            global::store_u64(params.state + SEQUENCE, block.sequence + 1);
            global::store_u64(params.state + TURN, block.half + (params.step_count != 0) as u64);
        }
    }
}

impl<const COMMON: bool> Wire for Plain<COMMON> {
    const SEALED: bool = false;
    const VERDICT: u32 = SHARED_BASE;
    const SHARES: bool = true;

    #[inline(always)]
    unsafe fn transfer(
        &mut self,
        block: &Block,
        step: &Step,
        record: &Record,
        arrived: impl FnOnce() -> bool,
    ) -> Option<(Quad, Quad)> {
        if !arrived() {
            return None;
        }
        let quads = record.bytes.div_ceil(16);
        let mut quad = thread::index();
        // SAFETY: by the caller's promise; a quad is read before the same thread overwrites it in place.
        unsafe {
            if COMMON && (record.input | record.output).is_multiple_of(16) {
                // Whole quads only: the others are left to the loop below.
                while quad + 3 * THREADS < record.bytes / 16 {
                    move_four(block, step, record, quad as u64 * 16);
                    quad += 4 * THREADS;
                }
            }
            while quad < quads {
                move_quad::<COMMON>(block, step, record, quad);
                quad += THREADS;
            }
            device::sync_threads();
        }
        Some(([0; 4], [0; 4]))
    }
}

/// Moves one quad, or what the record's end leaves of it.
#[inline(always)]
unsafe fn move_quad<const COMMON: bool>(block: &Block, step: &Step, record: &Record, quad: u32) {
    let source = if step.actions & RECEIVE != 0 { record.inbox } else { record.input };
    // SAFETY: by the caller's promise.
    unsafe {
        let mut value = load_quad(source, quad, record.bytes);
        if step.actions & REDUCE != 0 {
            value = reduced::<COMMON>(block, value, load_quad(record.input, quad, record.bytes));
        }
        if step.actions & FINISH != 0 {
            value = finished::<COMMON>(block, value);
        }
        if step.actions & STORE != 0 {
            store_quad(record.output, quad, record.bytes, value);
        }
        if step.actions & SEND != 0 {
            store_quad(record.outbox, quad, record.bytes, value);
        }
    }
}

/// Moves four whole quads of a thread, all loads before the first store.
#[inline(always)]
unsafe fn move_four(block: &Block, step: &Step, record: &Record, offset: u64) {
    const STRIDE: u64 = THREADS as u64 * 16;
    // SAFETY: by the caller's promise.
    let load = |base: u64| unsafe {
        let at = base + offset;
        [
            global::load_16(at),
            global::load_16(at + STRIDE),
            global::load_16(at + 2 * STRIDE),
            global::load_16(at + 3 * STRIDE),
        ]
    };
    // SAFETY: by the caller's promise.
    let store = |base: u64, values: [Quad; 4]| unsafe {
        let at = base + offset;
        global::store_16(at, values[0]);
        global::store_16(at + STRIDE, values[1]);
        global::store_16(at + 2 * STRIDE, values[2]);
        global::store_16(at + 3 * STRIDE, values[3]);
    };
    let mut values = load(if step.actions & RECEIVE != 0 { record.inbox } else { record.input });
    if step.actions & REDUCE != 0 {
        let [a, b, c, d] = load(record.input);
        let sum = |partial, local| reduced::<true>(block, partial, local);
        values = [sum(values[0], a), sum(values[1], b), sum(values[2], c), sum(values[3], d)];
    }
    if step.actions & FINISH != 0 {
        let [a, b, c, d] = values;
        let finish = |sum| finished::<true>(block, sum);
        values = [finish(a), finish(b), finish(c), finish(d)];
    }
    if step.actions & STORE != 0 {
        store(record.output, values);
    }
    if step.actions & SEND != 0 {
        store(record.outbox, values);
    }
}

/// This rank's elements reduced into a partial result.
#[inline(always)]
pub fn reduced<const COMMON: bool>(block: &Block, partial: Quad, local: Quad) -> Quad {
    let reduction = block.params.reduction;
    if COMMON { combine_common(reduction, partial, local) } else { combine(reduction, partial, local) }
}

/// A result once all ranks' elements are in it.
#[inline(always)]
pub fn finished<const COMMON: bool>(block: &Block, sum: Quad) -> Quad {
    let (reduction, ranks) = (block.params.reduction, block.params.ranks);
    if COMMON { finish_common(reduction, ranks, sum) } else { finish(reduction, ranks, sum) }
}

/// Quad `index` of `bytes` bytes from `base`; what lies beyond the end reads as 0.
///
/// # Safety
/// `bytes` bytes from `base` can be read.
#[inline(always)]
pub unsafe fn load_quad(base: u64, index: u32, bytes: u32) -> Quad {
    let offset = index * 16;
    if offset >= bytes {
        return [0; 4];
    }
    let address = base + offset as u64;
    // SAFETY: by the caller's promise that `bytes` bytes can be read.
    unsafe {
        if base.is_multiple_of(16) && bytes - offset >= 16 {
            return global::load_16(address);
        }
        let count = (bytes - offset).min(16);
        let word = |w: u32| {
            let byte = |b: u32| {
                let at = 4 * w + b;
                if at < count { (global::load_u8(address + at as u64) as u32) << (8 * b) } else { 0 }
            };
            byte(0) | byte(1) | byte(2) | byte(3)
        };
        [word(0), word(1), word(2), word(3)]
    }
}

/// Stores quad `index` of `bytes` bytes from `base`, up to the end.
///
/// # Safety
/// `bytes` bytes from `base` can be written.
#[inline(always)]
pub unsafe fn store_quad(base: u64, index: u32, bytes: u32, value: Quad) {
    let offset = index * 16;
    if offset >= bytes {
        return;
    }
    let address = base + offset as u64;
    // SAFETY: by the caller's promise that `bytes` bytes can be written.
    unsafe {
        if base.is_multiple_of(16) && bytes - offset >= 16 {
            return global::store_16(address, value);
        }
        // Shifted out byte by byte: a word chosen at run time would be one of an array, in local memory.
        let [a, b, c, d] = value;
        let (mut low, mut high) = (a as u64 | (b as u64) << 32, c as u64 | (d as u64) << 32);
        for at in 0..(bytes - offset).min(16) {
            global::store_u8(address + at as u64, low as u8);
            (low, high) = (low >> 8 | high << 56, high >> 8);
        }
    }
}

/// Dynamic shared memory of the plain kernels.
pub const PLAIN_SHARED: u32 = 16;

kernel! {
    threads = 512,
    shared = PLAIN_SHARED,
    /// A plain collective, for sums and averages of f32, f16 and bf16.
    fn ring_plain(params: RingParams) {
        // SAFETY: by the launcher's promise.
        unsafe { collective(params, || Plain::<true>) }
    }
}

kernel! {
    threads = 512,
    shared = PLAIN_SHARED,
    /// A plain collective, for every element type and operation.
    fn ring_plain_any(params: RingParams) {
        // SAFETY: by the launcher's promise.
        unsafe { collective(params, || Plain::<false>) }
    }
}
