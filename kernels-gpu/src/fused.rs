//! The sealed ring's records with AES on the path: opened, reduced and sealed in one pass, each prepared while the one before is
//! under way.
//!
//! What a record needs before its first byte (the counters' upper bytes, additional data) is stored to shared memory by all
//! warps, in front of the barrier that ends the record before. Behind it one warpgroup makes the tags of the record that ended,
//! compares and releases, while the others are at the next already; there a few warps make the masks of its tags and ask
//! whether the one after it has arrived. So a record costs one barrier. Only where another rank's key is to open it are there
//! more: the key is copied first.
//!
//! GHASH multiplies two tiles together ([`GroupedChains`]), of both chains. A record is at most [`LONGEST_RECORD`] bytes: what
//! lies between two barriers.
//!
//! Shared-memory wavefronts for 32 blocks of each operation: 16 (rounds - 2) of look-ups, 2.9 for the counter's upper bytes, 8.8
//! load and store, 10 for the matrices.

use crate::aes::{Keys, Prefix, SHARED_KEYS_BYTES, SharedKeys, Tables, xor};
use crate::device::{self, Quad, bits, global, shared, thread, warp};
use crate::exchange::{first_counter, tiles};
use crate::ghash::{
    self, APART, GROUP, GROUP_MATRICES_BYTES, GroupedChains, LANES, Matrices, TILE, TileChains,
};
use crate::params::{SHARED_BASE, SHARED_END_SM_90, TABLES_END};
use crate::record::{AAD_BYTES, Header};
use crate::reduce::averages;
use crate::ring::{
    Block, Record, THREADS, Work, aborted, arrived, collective, differ, fail, failure, finished, load_quad,
    reduced, signals, store_quad,
};
use crate::sealed::{
    LONGEST_RECORD, Places, SealedRingParams, SenderKey, associated_data, fetch_round_key, headers, inside,
    lengths, load_received, offset, store_mask, store_round_key, store_sent, store_sum, tag,
    with_associated_data,
};
use crate::step::{FINISH, FORWARD, RECEIVE, REDUCE, SEND, STORE, Step};

// Shared memory after the tables of AES.
const OWN_MATRICES: u32 = TABLES_END;
const OPENER_MATRICES: u32 = OWN_MATRICES + GROUP_MATRICES_BYTES;
/// The chains' last words, of what is opened and of what is sealed, for records in turn: the sums of all warpgroups', zero until
/// a record ends.
const LASTS: u32 = OPENER_MATRICES + GROUP_MATRICES_BYTES;
const LAST_BYTES: u32 = 4 * LANES;
/// The parts of both sums.
const PARTS: u32 = LASTS + 2 * 2 * LAST_BYTES;
const PARTS_BYTES: u32 = 4 * 16;
/// Both tags' masks, for records in turn: one is read while the next is made.
const MASKS: u32 = PARTS + 2 * PARTS_BYTES;
const TURNS: u32 = 4;
const VERDICT: u32 = MASKS + TURNS * 2 * 16;
/// Whose key opens, in the kernels that choose it at run time.
const SENDER: u32 = VERDICT + 4;
/// Whether a record has arrived, for records in turn.
const READY: u32 = VERDICT + 8;
/// What [`Block`] has, seldom read: so not in registers.
const BLOCK: u32 = VERDICT + 16;
/// Positions of records in turn, kept as long as masks are.
const POSITIONS: u32 = BLOCK + 32;
/// The address of the signal that says whether the next record has arrived; 0 when it needs none.
const WATCHED: u32 = BLOCK + 24;
/// The opener's round keys, in the kernels that choose it at run time.
const OPENER_ROUND_KEYS: u32 = POSITIONS + TURNS * 8;
const BUFFERS: u32 = OPENER_ROUND_KEYS + SHARED_KEYS_BYTES;
// A record's buffer, of what is opened or of what is sealed: what the counters' low bytes begin with, additional data, the
// counters' upper bytes' contribution for each 256 counters.
const ASSOCIATED: u32 = 16;
const UPPER: u32 = ASSOCIATED + AAD_BYTES;
const UPPER_ENTRIES: u32 = TILE / 256 * (LONGEST_RECORD / 16 / TILE) + 2;
/// Warps that store a side's entries, one each lane.
const UPPER_WARPS: u32 = UPPER_ENTRIES.div_ceil(32);
const BUFFER_BYTES: u32 = UPPER + 16 * UPPER_ENTRIES;
/// Dynamic shared memory of the kernels.
pub const FUSED_SHARED: u32 = BUFFERS + 2 * 2 * BUFFER_BYTES - SHARED_BASE;
const _: () = assert!(SHARED_BASE + FUSED_SHARED <= SHARED_END_SM_90);
const _: () =
    assert!(2 * 2 * LANES == THREADS && UPPER_ENTRIES < 32 * UPPER_WARPS && 2 * UPPER_WARPS <= THREADS / 32);

/// The opened or the sealed side of a record, where places in shared memory are numbered.
const IN: u32 = 0;
const OUT: u32 = 1;

/// Records sealed by AES-GCM (NIST SP 800-38D). With `ANY_SENDER` the opening key follows the records' sender.
struct Fused<'a, K, const ROUNDS: usize, const COMMON: bool, const ANY_SENDER: bool> {
    params: &'a SealedRingParams,
    tables: Tables,
    /// Round keys to open with.
    opener: K,
    own_matrices: Matrices,
    opener_matrices: Matrices,
}

/// Which record of which step a block is at.
#[derive(Clone, Copy)]
struct Position {
    time: u32,
    index: u32,
}

impl Position {
    /// The record's number in its chunk.
    #[inline(always)]
    fn record(self) -> u32 {
        thread::block_index() + (self.time - self.index) * thread::grid_size()
    }

    /// The record and its step, at this position or the next that has one; false when there is none any more.
    ///
    /// # Safety
    /// As [`Work::run`].
    #[inline(always)]
    unsafe fn find(&mut self, block: &Block) -> bool {
        let params = &block.params;
        let (first, stride) = (thread::block_index(), thread::grid_size());
        if first >= params.records {
            return false;
        }
        let own_records = (params.records - first).div_ceil(stride);
        loop {
            if self.index > self.time || self.index >= params.step_count {
                self.time += 1;
                self.index = self.time.saturating_sub(own_records - 1);
            }
            if self.time + 1 >= own_records + params.step_count {
                return false;
            }
            // SAFETY: the table has `step_count` steps.
            let step = unsafe { Step::load(params.steps, self.index) };
            if (self.record() as u64 * params.record_bytes as u64) < step.bytes {
                return true;
            }
            self.index += 1;
        }
    }

    /// The step, and the record that it has here.
    ///
    /// # Safety
    /// As [`Work::run`]; [`find`](Self::find) stopped here.
    #[inline(always)]
    unsafe fn load(self, block: &Block) -> (Step, Record) {
        // SAFETY: the table has the step.
        let step = unsafe { Step::load(block.params.steps, self.index) };
        let index = self.record();
        let start = index as u64 * block.params.record_bytes as u64;
        // By way of an Option: without it the compiler makes other code, which spills less and is 2 to 4 % slower.
        let record = (start < step.bytes).then(|| Record::at(block, &step, index, start));
        // SAFETY: the caller's.
        (step, unsafe { record.unwrap_unchecked() })
    }
}

/// Where the buffer of record `local`'s side lies.
#[inline(always)]
fn buffer(local: u32, side: u32) -> u32 {
    BUFFERS + (local % 2 * 2 + side) * BUFFER_BYTES
}

/// Where the last words of record `local`'s side lie.
#[inline(always)]
fn lasts(local: u32, side: u32) -> u32 {
    LASTS + (local % 2 * 2 + side) * LAST_BYTES
}

/// Where the mask of record `local`'s side lies.
#[inline(always)]
fn mask(local: u32, side: u32) -> u32 {
    MASKS + (local % TURNS * 2 + side) * 16
}

/// The position of record `local`.
///
/// # Safety
/// It was stored before the latest barrier, and isn't older than [`TURNS`] records.
#[inline(always)]
unsafe fn position_of(local: u32) -> Position {
    let place = local % TURNS * 8;
    // From one lane, so that the compiler sees that they are uniform.
    // SAFETY: the caller's.
    unsafe {
        Position {
            time: warp::shuffle(shared::load_u32::<POSITIONS>(place), 0),
            index: warp::shuffle(shared::load_u32::<{ POSITIONS + 4 }>(place), 0),
        }
    }
}

/// A warp's number among those that prepare the end of record `local`: of a warpgroup, 0 to 3, that isn't the one that ends the
/// record before; in other warps 4 or more.
#[inline(always)]
fn assistant(local: u32) -> u32 {
    thread::warp().wrapping_sub(4 * ((local + 2) % 4))
}

/// The address of the hash key that opens what `sender` sealed; without `ANY_SENDER` that is the predecessor.
#[inline(always)]
fn opener_key<const ANY_SENDER: bool>(params: &SealedRingParams, sender: u32) -> u64 {
    if ANY_SENDER { SenderKey::address(params.senders, sender) } else { params.predecessor.ghash_key }
}

/// Whether a step opens what it receives.
#[inline(always)]
fn opens(step: &Step) -> bool {
    step.actions & RECEIVE != 0
}

/// Whether it seals what it sends.
#[inline(always)]
fn seals(step: &Step) -> bool {
    step.actions & (SEND | FORWARD) == SEND
}

impl<K: Keys, const ROUNDS: usize, const COMMON: bool, const ANY_SENDER: bool>
    Fused<'_, K, ROUNDS, COMMON, ANY_SENDER>
{
    /// What all records of the block have in common.
    #[inline(always)]
    fn block(&self) -> Block {
        // SAFETY: stored before the latest barrier.
        unsafe {
            let [a, b, c, d] = shared::load_16::<BLOCK>(0);
            let half = shared::load_u32::<{ BLOCK + 16 }>(0);
            Block {
                params: self.params.ring,
                sequence: a as u64 | (b as u64) << 32,
                half: half as u64,
                deadline: c as u64 | (d as u64) << 32,
            }
        }
    }

    /// Whose key opens.
    #[inline(always)]
    fn sender() -> u32 {
        // SAFETY: stored before the latest barrier. From one lane, so that the compiler sees that it is uniform.
        unsafe { warp::shuffle(shared::load_u32::<0>(SENDER), 0) }
    }

    /// Makes the key of `sender` the one that opens. Begins and ends with a barrier.
    ///
    /// # Safety
    /// All threads of the block, which no longer open by the key before once they are here; the table has the sender.
    #[inline(always)]
    unsafe fn switch_to(&self, sender: u32) {
        let key = SenderKey::address(self.params.senders, sender);
        // SAFETY: the caller's; the places are those of the key before.
        unsafe {
            let matrices = GroupedChains::fetch(key);
            let round_key = fetch_round_key(key);
            device::sync_threads();
            GroupedChains::store(matrices, OPENER_MATRICES);
            store_round_key::<OPENER_ROUND_KEYS>(round_key);
            if thread::index() == 0 {
                shared::store_u32::<0>(SENDER, sender);
            }
            device::sync_threads();
        }
    }

    /// Stores what record `local` of the block needs before its first byte; visible after the next barrier.
    ///
    /// # Safety
    /// All threads of the block; the tables are filled, and the opener's keys are the sender's; there is a record at `position`.
    #[inline(always)]
    unsafe fn prepare(&self, block: &Block, position: Position, local: u32) {
        // SAFETY: the caller's.
        let (step, record) = unsafe { position.load(block) };
        let (step, record) = (&step, &record);
        let [header_in, header_out] = headers(self.params.call, block, step, record);
        // Two warps for each work, one a side; without work they go on.
        let (work, side) = (thread::warp() / 2, thread::warp() % 2);
        let needed = if side == IN { opens(step) } else { seals(step) };
        // SAFETY: the caller's; these places were last read before the latest barrier, the masks before the one before that.
        unsafe {
            if work < UPPER_WARPS && needed {
                let own = &self.params.own.round_keys;
                if side == IN {
                    self.prepare_side(self.opener, &header_in, record.bytes, work, local, IN);
                } else {
                    self.prepare_side(own, &header_out, record.bytes, work, local, OUT);
                }
            }
            if thread::index() == THREADS - 64 {
                shared::store_u32::<POSITIONS>(local % TURNS * 8, position.time);
                shared::store_u32::<{ POSITIONS + 4 }>(local % TURNS * 8, position.index);
            }
        }
    }

    /// What record `local` needs by its end only, while other warps are at its tiles: the masks of its tags, and where the signal
    /// of the next record is.
    ///
    /// # Safety
    /// All threads of the block; the record is prepared. The masks' places were last read before the latest barrier.
    #[inline(always)]
    unsafe fn prepare_end(&self, block: &Block, step: &Step, record: &Record, local: u32) {
        let [header_in, header_out] = headers(self.params.call, block, step, record);
        // SAFETY: the caller's.
        unsafe {
            match assistant(local) {
                0 if opens(step) => {
                    store_mask::<ROUNDS>(self.tables, self.opener, &header_in, mask(local, IN))
                }
                1 if seals(step) => store_mask::<ROUNDS>(
                    self.tables,
                    &self.params.own.round_keys,
                    &header_out,
                    mask(local, OUT),
                ),
                2 => {
                    let mut next = position_of(local);
                    next.index += 1;
                    let mut watched = 0;
                    if next.find(block) {
                        let step = Step::load(block.params.steps, next.index);
                        if opens(&step) {
                            watched = signals(block, &step, next.record()).0 + 16;
                        }
                    }
                    if thread::lane() == 0 {
                        shared::store_u32::<READY>(4 * ((local + 1) % 2), 0);
                        shared::store_u32::<WATCHED>(0, watched as u32);
                        shared::store_u32::<{ WATCHED + 4 }>(0, (watched >> 32) as u32);
                    }
                }
                _ => {}
            }
        }
    }

    /// Asks whether the record after record `local` has arrived; whoever needs it will know after the next barrier.
    ///
    /// # Safety
    /// After [`Self::prepare_end`], by all threads.
    #[inline(always)]
    unsafe fn ask(&self, local: u32) {
        // What the compiler knew would be in registers meanwhile.
        let (local, index) = (bits::opaque(local), bits::opaque(thread::index()));
        // The first lane of the third assistant.
        if index != 128 * ((local + 2) % 4) + 64 {
            return;
        }
        // SAFETY: what this thread stored; the signal is the rank's.
        unsafe {
            let (low, high) = (shared::load_u32::<WATCHED>(0), shared::load_u32::<{ WATCHED + 4 }>(0));
            let watched = low as u64 | (high as u64) << 32;
            if watched != 0 && global::load_acquire_sys(watched) == self.block().sequence {
                shared::store_u32::<READY>(4 * ((local + 1) % 2), 1);
            }
        }
    }

    /// One warp's part of [`Self::prepare`]: some of the counters' upper bytes, or the additional data.
    ///
    /// # Safety
    /// As [`Self::prepare`].
    #[inline(always)]
    unsafe fn prepare_side(
        &self,
        keys: impl Keys,
        header: &Header,
        bytes: u32,
        work: u32,
        local: u32,
        side: u32,
    ) {
        let (buffer, lane, nonce) = (buffer(local, side), thread::lane(), header.nonce());
        // SAFETY: the caller's.
        unsafe {
            // The last lane has no entry.
            if work == UPPER_WARPS - 1 && lane == 31 {
                shared::store_16::<ASSOCIATED>(buffer, header.associated_data(0));
                shared::store_16::<{ ASSOCIATED + 16 }>(buffer, header.associated_data(1));
                shared::store_16::<{ ASSOCIATED + 32 }>(buffer, header.associated_data(2));
            }
            let (tiles, pad) = tiles(bytes);
            let entry = 32 * work + lane;
            if warp::shuffle(entry, 0) > TILE / 256 * tiles {
                return;
            }
            let prefix = Prefix::new(self.tables, keys, nonce);
            let first = first_counter(pad) & !255;
            let upper = prefix.upper(self.tables, keys, first.wrapping_add(256 * entry));
            if entry < UPPER_ENTRIES {
                shared::store_16::<UPPER>(buffer + 16 * entry, upper);
            }
            if entry == 0 {
                shared::store_u32::<0>(buffer, prefix.low_base());
            }
        }
    }

    /// One warpgroup: makes the tags of record `local` of the block, compares, and releases.
    ///
    /// # Safety
    /// The chains' words are stored and all stores of the record are done, before a barrier.
    #[inline(always)]
    unsafe fn end(&self, block: &Block, local: u32) {
        // SAFETY: the caller's; the parts were last read before the latest barrier.
        unsafe {
            let position = position_of(local);
            let step = Step::load(block.params.steps, position.index);
            let (opens, seals) = (opens(&step), seals(&step));
            let (received, sent) = signals(block, &step, position.record());
            let part = thread::warp() % 4;
            let opener_key = opener_key::<ANY_SENDER>(self.params, step.sealed_by);
            let weights = [opener_key, self.params.own.ghash_key].map(|key| ghash::weight(key, part));
            let mut expected = [0; 4];
            // Under way while the parts are made.
            if opens && part == 0 {
                expected = global::load_volatile_16(received);
            }
            // Both at once, being chains of dependent steps; where one isn't needed, the other twice.
            let side = |side: u32, needed: bool| lasts(local, if needed { side } else { OUT - side });
            if opens || seals {
                let words = [side(IN, opens), side(OUT, seals)];
                let sums = ghash::two_parts(words, weights, part);
                store_sum(sums[0], PARTS + 16 * part);
                store_sum(sums[1], PARTS + PARTS_BYTES + 16 * part);
            }
            device::sync_warpgroup();
            if part != 0 {
                return;
            }
            let mut tag_out = [0; 4];
            let mut verified = true;
            if opens {
                tag_out = tag(PARTS, mask(local, IN));
                verified = !differ(tag_out, expected);
            }
            if seals {
                tag_out = tag(PARTS + PARTS_BYTES, mask(local, OUT));
            }
            if thread::lane() != 0 {
                return;
            }
            if !verified {
                fail(block, failure::pack(failure::AUTHENTICATION, step.receives, position.record()));
            } else if step.actions & SEND != 0 && !aborted(block) {
                global::store_16(sent, tag_out);
                global::store_release_sys(sent + 16, block.sequence);
            }
        }
    }

    /// The tiles of record `local` of the block, once it has arrived: stores each thread's words for the tags. False when a rank
    /// has failed or the deadline has passed.
    ///
    /// # Safety
    /// All threads of the block; the record is prepared.
    #[inline(always)]
    unsafe fn tiles(&self, block: &Block, step: &Step, record: &Record, local: u32) -> bool {
        let (params, tables) = (self.params, self.tables);
        let (own, opener) = (&params.own.round_keys, self.opener);
        let (actions, bytes) = (step.actions, record.bytes);
        let (opens, seals) = (opens(step), seals(step));
        let (tiles, pad) = tiles(bytes);
        // Computed anew: seldom needed, they would take registers.
        let aad_in = || buffer(bits::opaque(local), IN) + ASSOCIATED;
        let aad_out = || buffer(bits::opaque(local), OUT) + ASSOCIATED;
        let aligned = (record.input | record.output).is_multiple_of(16);
        // Whether a tile is all text, in whole quads; the text ends with the last tile.
        let whole_of = |first: i32| aligned && first >= 0 && (first as u32 + TILE) * 16 <= bytes;
        let place = Places::of(&params.ring, record);
        // What a tile begins with: of the received record, else of the vector.
        // SAFETY: places in the record, or none.
        let load = |first: i32| unsafe {
            let at = first + bits::opaque(thread::index()) as i32;
            let (places, whole) = ([at, at + APART as i32], whole_of(first));
            match opens {
                true => load_received(place.inbox(), places, bytes, whole),
                false => load_vector(place.input(), places, bytes, whole),
            }
        };
        // The tile's first block, counted from the text's first.
        let mut first = -(pad as i32);
        // Of this thread's first block: its low byte is that of all its blocks.
        let counter = (first_counter(pad) & 255) + thread::index();
        let mut upper = buffer(local, IN) + UPPER + 16 * (counter >> 8);
        let before = thread::index() as i32 - (THREADS + pad) as i32;
        let (mut low_in, mut low_out) = ([0; 4], [0; 4]);
        // SAFETY: prepared.
        let (mut chains_in, mut chains_out) = unsafe {
            if opens {
                low_in = Prefix::low_of(shared::load_u32::<0>(buffer(local, IN)), tables, opener, counter);
            }
            if seals {
                low_out = Prefix::low_of(shared::load_u32::<0>(buffer(local, OUT)), tables, own, counter);
            }
            let associated = |needed: bool, aad: u32| match needed {
                true => associated_data(aad, before),
                false => [0; 4],
            };
            (
                GroupedChains::new(associated(opens, aad_in()), tiles),
                GroupedChains::new(associated(seals, aad_out()), tiles),
            )
        };
        // All that does not need the record is done by now.
        // SAFETY: the caller's.
        if opens && !unsafe { self.arrived(block, step, record, local) } {
            return false;
        }
        // SAFETY: the caller's.
        unsafe { self.prepare_end(block, step, record, local) };
        let mut next = [[0; 4]; 2];
        while first < bytes.div_ceil(16) as i32 {
            // Tiles that follow, and whether the chains multiply now.
            let left = (bytes.div_ceil(16) as i32 - first) as u32 / TILE - 1;
            let grouped = left.is_multiple_of(GROUP as u32);
            if left == (tiles > 1) as u32 {
                // SAFETY: prepared.
                unsafe { self.ask(local) };
            }
            // What is multiplied at once was fetched before. Otherwise the key stream hides the wait.
            let mut values = if grouped && first != -(pad as i32) { next } else { load(first) };
            // SAFETY: places in the record, or none; all threads of the block run this loop alike; prepared.
            unsafe {
                if opens && grouped {
                    // Before the text, where the additional data are, nothing is stored of what becomes of them.
                    if first < 0 {
                        let at = first + bits::opaque(thread::index()) as i32;
                        values = with_associated_data(aad_in(), at, values);
                    }
                    // Before the key stream, which leaves no registers for the counts.
                    chains_in.take_group_in_parts(values, self.opener_matrices);
                }
            }
            // Not to be computed before the product, which has no registers for what follows from it.
            first = bits::opaque(first as u32) as i32;
            let at = first + bits::opaque(thread::index()) as i32;
            let places = [at, at + APART as i32];
            let whole = whole_of(first);
            // Whether this warp has any of the text.
            let busy = whole || warp::ballot(places[1] >= 0) != 0;
            // SAFETY: as above.
            unsafe {
                if opens {
                    let mut own_part = [[0; 4]; 2];
                    if actions & REDUCE != 0 {
                        own_part = load_vector(place.input(), places, bytes, whole);
                    }
                    if actions & FORWARD != 0 {
                        store_sent(place.outbox(), places, bytes, whole, values);
                    }
                    let mut key_stream = [[0; 4]; 2];
                    if busy {
                        let states = [
                            xor(low_in, shared::load_16::<0>(upper)),
                            xor(low_in, shared::load_16::<32>(upper)),
                        ];
                        key_stream = tables.finish::<ROUNDS, 2>(opener, states);
                    }
                    if !grouped {
                        if first < 0 {
                            values = with_associated_data(aad_in(), at, values);
                        }
                        chains_in.keep(values);
                    }
                    values = [xor(values[0], key_stream[0]), xor(values[1], key_stream[1])];
                    if actions & REDUCE != 0 {
                        // Written out: as a closure it was once not inlined, its quads then in local memory.
                        values = [
                            reduced::<COMMON>(block, values[0], own_part[0]),
                            reduced::<COMMON>(block, values[1], own_part[1]),
                        ];
                    }
                }
                // While no counts are in the registers.
                if !grouped {
                    next = load(first + TILE as i32);
                }
                if actions & FINISH != 0 {
                    values = finished_two::<COMMON>(block, values);
                }
                if actions & STORE != 0 {
                    store_vector(place.output(), places, bytes, whole, values);
                }
                if seals {
                    let mut sent = values;
                    if busy {
                        let states = [
                            xor(low_out, shared::load_16::<BUFFER_BYTES>(upper)),
                            xor(low_out, shared::load_16::<{ BUFFER_BYTES + 32 }>(upper)),
                        ];
                        let key_stream = tables.finish::<ROUNDS, 2>(own, states);
                        sent = [xor(values[0], key_stream[0]), xor(values[1], key_stream[1])];
                    }
                    if !whole {
                        sent = [inside(sent[0], places[0], bytes), inside(sent[1], places[1], bytes)];
                    }
                    store_sent(place.outbox(), places, bytes, whole, sent);
                    if first < 0 {
                        sent = with_associated_data(aad_out(), at, sent);
                    }
                    if grouped {
                        chains_out.take_group_in_parts(sent, self.own_matrices);
                    } else {
                        chains_out.keep(sent);
                    }
                }
            }
            upper += 64;
            first += TILE as i32;
        }
        // SAFETY: as above; the words were last read before the latest barrier but one.
        unsafe {
            if opens {
                let word = chains_in.last(lengths(bytes), self.opener_matrices);
                shared::xor_u32(lasts(local, IN) + 4 * (thread::index() % LANES), word);
            }
            if seals {
                let word = chains_out.last(lengths(bytes), self.own_matrices);
                shared::xor_u32(lasts(local, OUT) + 4 * (thread::index() % LANES), word);
            }
        }
        true
    }

    /// Waits for record `local`, if it hasn't arrived. False when a rank has failed or the deadline has passed.
    ///
    /// # Safety
    /// All threads of the block; the record is prepared, and there is one to open.
    #[inline(always)]
    unsafe fn arrived(&self, block: &Block, step: &Step, record: &Record, local: u32) -> bool {
        // From one lane, so that the compiler sees that it is uniform.
        // SAFETY: the caller's.
        unsafe {
            if warp::shuffle(shared::load_u32::<READY>(4 * (local % 2)), 0) != 0 {
                return true;
            }
            let (received, _) = signals(block, step, record.index);
            arrived(block, VERDICT, step.receives, record.index, received)
        }
    }
}

impl<K: Keys, const ROUNDS: usize, const COMMON: bool, const ANY_SENDER: bool> Work
    for Fused<'_, K, ROUNDS, COMMON, ANY_SENDER>
{
    const VERDICT: u32 = VERDICT;

    #[inline(always)]
    unsafe fn run(&mut self, block: &Block) {
        if thread::index() == 0 {
            let (sequence, deadline) = (block.sequence, block.deadline);
            // SAFETY: this thread's places until the next barrier.
            unsafe {
                let words =
                    [sequence as u32, (sequence >> 32) as u32, deadline as u32, (deadline >> 32) as u32];
                shared::store_16::<BLOCK>(0, words);
                shared::store_u32::<{ BLOCK + 16 }>(0, block.half as u32);
                shared::store_u32::<READY>(0, 0);
            }
        }
        // SAFETY: this thread's place until the next barrier.
        unsafe { shared::store_u32::<LASTS>(4 * thread::index(), 0) };
        device::sync_threads();
        // Records so far.
        let mut local = 0;
        // SAFETY: everything here is the same in all threads; places in shared memory were last read before a barrier.
        while unsafe { self.record(local) } {
            local += 1;
            // The warp together again: see `ring`.
            warp::sync();
        }
    }
}

impl<K: Keys, const ROUNDS: usize, const COMMON: bool, const ANY_SENDER: bool>
    Fused<'_, K, ROUNDS, COMMON, ANY_SENDER>
{
    /// Record `local` of the block, but for its end, and the end of the one before. False when there is none, or the collective
    /// has failed.
    ///
    /// # Safety
    /// All threads of the block, for all records in turn.
    #[inline(always)]
    unsafe fn record(&self, local: u32) -> bool {
        let block = &self.block();
        // SAFETY: the caller's; as each function says.
        unsafe {
            let mut position = Position { time: 0, index: 0 };
            if local != 0 {
                position = position_of(local - 1);
                position.index += 1;
            }
            let found = position.find(block);
            let mut switches = false;
            if ANY_SENDER && found {
                let step = Step::load(block.params.steps, position.index);
                switches = opens(&step) && step.sealed_by != Self::sender();
            }
            let mut ended = false;
            loop {
                if found && !switches {
                    self.prepare(block, position, local);
                }
                device::sync_threads();
                // From one lane, so that the compiler sees that it is uniform.
                if !ended && local != 0 && warp::shuffle(thread::warp() / 4, 0) == local % 4 {
                    self.end(block, local - 1);
                }
                ended = true;
                if !switches {
                    break;
                }
                self.switch_to(Step::load(block.params.steps, position.index).sealed_by);
                switches = false;
            }
            if !found {
                return false;
            }
            let (step, record) = position.load(block);
            self.tiles(block, &step, &record, local)
        }
    }
}

/// Loads two quads of a vector past the L1 cache; `whole` as for [`load_local`](crate::sealed::load_local).
///
/// # Safety
/// As [`load_local`](crate::sealed::load_local).
#[inline(always)]
unsafe fn load_vector(base: u64, places: [i32; 2], bytes: u32, whole: bool) -> [Quad; 2] {
    // SAFETY: the caller's.
    unsafe {
        if whole {
            return [
                global::load_past_l1_16(base + offset(places[0])),
                global::load_past_l1_16(base + offset(places[1])),
            ];
        }
        one_by_one(places, [[0; 4]; 2], |at, nothing| match at < 0 {
            true => nothing,
            false => load_quad(base, at as u32, bytes),
        })
    }
}

/// As [`store_local`](crate::sealed::store_local).
///
/// # Safety
/// As [`store_local`](crate::sealed::store_local).
#[inline(always)]
unsafe fn store_vector(base: u64, places: [i32; 2], bytes: u32, whole: bool, quads: [Quad; 2]) {
    // SAFETY: the caller's.
    unsafe {
        if whole {
            global::store_16(base + offset(places[0]), quads[0]);
            global::store_16(base + offset(places[1]), quads[1]);
            return;
        }
        one_by_one(places, quads, |at, quad| {
            if at >= 0 {
                store_quad(base, at as u32, bytes, quad);
            }
            quad
        });
    }
}

/// What `act` makes of two quads, in a loop that stays one: for what is long and seldom done, in the midst of what fills the
/// instruction cache.
#[inline(always)]
fn one_by_one(
    mut places: [i32; 2],
    mut quads: [Quad; 2],
    mut act: impl FnMut(i32, Quad) -> Quad,
) -> [Quad; 2] {
    let mut left = bits::opaque(2);
    while left > 0 {
        quads = [quads[1], act(places[0], quads[0])];
        places = [places[1], places[0]];
        left -= 1;
    }
    quads
}

/// Two quads of results once all ranks' elements are in them. As [`one_by_one`]: divisions are long.
#[inline(always)]
fn finished_two<const COMMON: bool>(block: &Block, quads: [Quad; 2]) -> [Quad; 2] {
    if !averages(block.params.reduction) {
        return quads;
    }
    if !COMMON {
        return one_by_one([0; 2], quads, |_, quad| finished::<false>(block, quad));
    }
    let mut quads = quads;
    let mut left = bits::opaque(8);
    while left > 0 {
        let [[first, b, c, d], [e, f, g, h]] = quads;
        let [word, ..] = finished::<true>(block, [first, 0, 0, 0]);
        quads = [[b, c, d, e], [f, g, h, word]];
        left -= 1;
    }
    quads
}

/// The kernels' body.
///
/// # Safety
/// The addresses in the parameters are valid.
#[inline(always)]
unsafe fn fused<const ROUNDS: usize, const COMMON: bool, const ANY_SENDER: bool, K: Keys>(
    params: &SealedRingParams,
    opener: K,
) {
    let work = || {
        let predecessor = params.ring.predecessor();
        let own_key = params.own.ghash_key;
        let key = opener_key::<ANY_SENDER>(params, predecessor);
        // All loads are under way before the first store.
        // SAFETY: the keys are filled, and the table has the predecessor.
        let (own, opening, round_key) = unsafe {
            (
                GroupedChains::fetch(own_key),
                GroupedChains::fetch(key),
                if ANY_SENDER { fetch_round_key(key) } else { [0; 4] },
            )
        };
        let tables = Tables::fill::<THREADS>();
        // SAFETY: the regions of shared memory are disjoint, and nobody reads them before the barrier.
        let (own_matrices, opener_matrices) = unsafe {
            if ANY_SENDER {
                store_round_key::<OPENER_ROUND_KEYS>(round_key);
                if thread::index() == 0 {
                    shared::store_u32::<0>(SENDER, predecessor);
                }
            }
            (GroupedChains::store(own, OWN_MATRICES), GroupedChains::store(opening, OPENER_MATRICES))
        };
        device::sync_threads();
        Fused::<K, ROUNDS, COMMON, ANY_SENDER> { params, tables, opener, own_matrices, opener_matrices }
    };
    // SAFETY: the caller's.
    unsafe { collective(params.ring, work) }
}

/// The opener of the kernels that choose it at run time.
const ANY_OPENER: SharedKeys = SharedKeys(OPENER_ROUND_KEYS);

kernel! {
    threads = 512,
    shared = FUSED_SHARED,
    /// A sealed collective with AES-128, for sums and averages of f32, f16 and bf16.
    fn ring_sealed_128(params: SealedRingParams) {
        // SAFETY: by the launcher's promise.
        unsafe { fused::<10, true, false, _>(&params, &params.predecessor.round_keys) }
    }
}

kernel! {
    threads = 512,
    shared = FUSED_SHARED,
    /// A sealed collective with AES-256, for sums and averages of f32, f16 and bf16.
    fn ring_sealed_256(params: SealedRingParams) {
        // SAFETY: by the launcher's promise.
        unsafe { fused::<14, true, false, _>(&params, &params.predecessor.round_keys) }
    }
}

kernel! {
    threads = 512,
    shared = FUSED_SHARED,
    /// A sealed collective with AES-128, for every element type and operation.
    fn ring_sealed_any_128(params: SealedRingParams) {
        // SAFETY: by the launcher's promise.
        unsafe { fused::<10, false, false, _>(&params, &params.predecessor.round_keys) }
    }
}

kernel! {
    threads = 512,
    shared = FUSED_SHARED,
    /// A sealed collective with AES-256, for every element type and operation.
    fn ring_sealed_any_256(params: SealedRingParams) {
        // SAFETY: by the launcher's promise.
        unsafe { fused::<14, false, false, _>(&params, &params.predecessor.round_keys) }
    }
}

kernel! {
    threads = 512,
    shared = FUSED_SHARED,
    /// As `ring_sealed_128`, for schedules in which records come from other ranks than the predecessor.
    fn relay_sealed_128(params: SealedRingParams) {
        // SAFETY: by the launcher's promise.
        unsafe { fused::<10, true, true, _>(&params, ANY_OPENER) }
    }
}

kernel! {
    threads = 512,
    shared = FUSED_SHARED,
    /// As `ring_sealed_any_128`, for schedules in which records come from other ranks than the predecessor.
    fn relay_sealed_any_128(params: SealedRingParams) {
        // SAFETY: by the launcher's promise.
        unsafe { fused::<10, false, true, _>(&params, ANY_OPENER) }
    }
}

kernel! {
    threads = 512,
    shared = FUSED_SHARED,
    /// As `ring_sealed_256`, for schedules in which records come from other ranks than the predecessor.
    fn relay_sealed_256(params: SealedRingParams) {
        // SAFETY: by the launcher's promise.
        unsafe { fused::<14, true, true, _>(&params, ANY_OPENER) }
    }
}

kernel! {
    threads = 512,
    shared = FUSED_SHARED,
    /// As `ring_sealed_any_256`, for schedules in which records come from other ranks than the predecessor.
    fn relay_sealed_any_256(params: SealedRingParams) {
        // SAFETY: by the launcher's promise.
        unsafe { fused::<14, false, true, _>(&params, ANY_OPENER) }
    }
}
