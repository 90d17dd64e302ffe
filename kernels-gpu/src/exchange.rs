//! The sealed exchange of two ranks: each seals its whole vector for the other and reduces what it receives, in one hop.
//!
//! The first blocks of a rank only seal and the others only open, so that records leave as evenly as the link takes them; or
//! else every block does both in turn. Each loop keeps to what its half needs, so that GHASH multiplies two tiles together ([`GroupedChains`]).
//! Sealing waits for nobody. A record is at most [`LONGEST_RECORD`] bytes: what lies between two barriers.
//!
//! All warps prepare the next eight records together (the counters' upper bytes, additional data, the tags' masks).
//! Between the barriers of a record, one warpgroup ends the one before and one warp asks whether the next has arrived,
//! while the others go on.
//!
//! In place, the result may overwrite only what has been sealed: the sealing blocks count their records for the others.
//!
//! The `exchange_padded_*` kernels look for each record's keystream among pads made ahead (see [`padded`](crate::padded)). A
//! record without one is sealed or opened by AES there and then: same bytes. With one, a tile costs its loads, two products
//! and no look-ups.

use crate::aes::{Prefix, Tables, xor};
use crate::device::{self, Quad, bits, global, shared, thread, warp};
use crate::ghash::{
    APART, GROUP_MATRICES_BYTES, GroupedChains, LANES_BYTES, LAST_BYTES, Matrices, TILE, load_lanes,
};
use crate::padded::{ChunkPads, claim_of_chunk};
use crate::params::{SHARED_BASE, SHARED_END_SM_90, TABLES_END};
use crate::record::{AAD_BYTES, Header};
use crate::ring::{
    Block, SIGNAL_BYTES, THREADS, aborted, allowed, differ, enter, exhausted, fail, failure, finished, leave,
    reduced,
};
use crate::sealed::{
    SealedKey, SealedRingParams, associated_data, inside, lengths, load_local, load_pad, load_received,
    offset, store_associated_data, store_local, store_part, store_sent, tag, with_associated_data,
};

/// The longest record in bytes.
pub const LONGEST_RECORD: u32 = 16 * TILE * MOST_TILES;
const MOST_TILES: u32 = 16;

/// Parameters of a rank's part in one exchange.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ExchangeParams {
    /// As for the sealed ring of two ranks; the table of steps is not read.
    pub ring: SealedRingParams,
    /// Address of a word for each sealing block, zero before the first collective: the collective's number, modulo 2^32, above
    /// how many records the block has sealed in it. Reached by this rank only. Not used unless in place.
    pub sealed: u64,
    /// Blocks that only seal, the first; the others only open. 0: every block seals its records, then opens others.
    pub sealers: u32,
    /// Zero.
    pub reserved: u32,
}

/// Parameters of a rank's part in one exchange with pads.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct PaddedExchangeParams {
    /// As without pads.
    pub exchange: ExchangeParams,
    /// Of the records that this rank seals.
    pub seals: ChunkPads,
    /// Of the records that it opens.
    pub opens: ChunkPads,
}

// Shared memory after the tables of AES.
const MATRICES_AT: u32 = TABLES_END;
const LANES_AT: u32 = MATRICES_AT + GROUP_MATRICES_BYTES;
/// The chains' last words and the parts of their sum, for records in turn.
const LAST_AT: u32 = LANES_AT + LANES_BYTES;
const PARTS_AT: u32 = LAST_AT + 2 * LAST_BYTES;
/// Masks, of two batches in turn: the next one's first is made while the last one of the batch before is used.
const MASKS_AT: u32 = PARTS_AT + 2 * 64;
const VERDICT: u32 = MASKS_AT + 2 * BATCH * 16;
/// Whether a record has arrived, for records in turn.
const READY: u32 = VERDICT + 4;
/// When to give up: seldom read, so not in registers.
const DEADLINE: u32 = VERDICT + 16;
const BUFFERS_AT: u32 = DEADLINE + 16;
// A record's buffer: what the counters' low bytes begin with, additional data, the counters' upper bytes' contribution for each 256 counters.
const ASSOCIATED: u32 = 16;
const UPPER: u32 = ASSOCIATED + AAD_BYTES;
const BUFFER_BYTES: u32 = UPPER + 16 * UPPER_ENTRIES;
const UPPER_ENTRIES: u32 = 4 * MOST_TILES + 2;
/// Dynamic shared memory of the kernels.
pub const EXCHANGE_SHARED: u32 = CLAIMED_AT - SHARED_BASE;
/// Of each record of a batch, whether its pad is claimed.
const CLAIMED_AT: u32 = BUFFERS_AT + BATCH * BUFFER_BYTES;
/// Dynamic shared memory of the kernels with pads.
pub const PADDED_EXCHANGE_SHARED: u32 = CLAIMED_AT + 4 * BATCH - SHARED_BASE;
const _: () = assert!(SHARED_BASE + PADDED_EXCHANGE_SHARED <= SHARED_END_SM_90);

/// Records that a block prepares together: each by two warps.
const BATCH: u32 = THREADS / 64;

/// The thread that waits.
const POLLER: u32 = THREADS - 32;

/// What one block has to do.
struct Work<'a, const ROUNDS: usize, const SEAL: bool, const PADDED: bool> {
    params: &'a ExchangeParams,
    block: &'a Block,
    tables: Tables,
    /// With `PADDED`, where to look for pads.
    pads: &'a ChunkPads,
}

impl<const ROUNDS: usize, const SEAL: bool, const PADDED: bool> Work<'_, ROUNDS, SEAL, PADDED> {
    #[inline(always)]
    fn key(&self) -> &SealedKey {
        if SEAL { &self.params.ring.own } else { &self.params.ring.predecessor }
    }

    /// How many blocks seal.
    #[inline(always)]
    fn sealers(&self) -> u32 {
        if self.params.sealers == 0 { thread::grid_size() } else { self.params.sealers }
    }

    /// The number of the block's record `local`.
    #[inline(always)]
    fn index(&self, local: u32) -> u32 {
        let sealers = self.params.sealers;
        match SEAL {
            true => thread::block_index() + local * self.sealers(),
            false => thread::block_index() - sealers + local * (thread::grid_size() - sealers),
        }
    }

    #[inline(always)]
    fn start(&self, index: u32) -> u64 {
        index as u64 * self.params.ring.ring.record_bytes as u64
    }

    #[inline(always)]
    fn bytes(&self, index: u32) -> u32 {
        let ring = &self.params.ring.ring;
        (ring.bytes - self.start(index)).min(ring.record_bytes as u64) as u32
    }

    #[inline(always)]
    fn header(&self, index: u32) -> Header {
        let ring = &self.params.ring.ring;
        Header {
            call: self.params.ring.call,
            // Signals count from 1, as memory begins with zeros.
            sequence: self.block.sequence - 1,
            sender: if SEAL { ring.rank } else { 1 - ring.rank },
            step: 0,
            record: index,
            last: index + 1 == ring.records,
        }
    }

    /// Where the signal of a record is: the peer's, or this rank's.
    #[inline(always)]
    fn signal(&self, index: u32) -> u64 {
        let ring = &self.params.ring.ring;
        let signals = if SEAL { ring.signals_out } else { ring.signals_in };
        signals + (self.block.half * ring.signals_half + index as u64) * SIGNAL_BYTES
    }

    #[inline(always)]
    fn buffer(local: u32) -> u32 {
        BUFFERS_AT + local % BATCH * BUFFER_BYTES
    }

    /// One thread: whether a record to open has arrived and its place in the output may be overwritten.
    #[inline(always)]
    unsafe fn ready(&self, index: u32) -> bool {
        let ring = &self.params.ring.ring;
        // SAFETY: the signals are the rank's, and a word is there for each sealing block.
        unsafe {
            if global::load_acquire_sys(self.signal(index) + 16) != self.block.sequence {
                return false;
            }
            if ring.input != ring.output {
                return true;
            }
            let sealers = self.sealers();
            // Never of zero blocks; without a branch to say so.
            let (by, before) =
                (index.checked_rem(sealers).unwrap_or(0), index.checked_div(sealers).unwrap_or(0));
            let word = global::load_acquire_sys(self.params.sealed + 8 * by as u64);
            word >> 32 == self.block.sequence as u32 as u64 && word as u32 > before
        }
    }

    /// Waits for a record to open. A barrier for the block. False when a rank has failed or the deadline has passed.
    #[inline(always)]
    unsafe fn wait(&self, index: u32) -> bool {
        // SAFETY: the verdict's last readers have passed the barrier at a record's end.
        unsafe {
            if thread::index() == POLLER {
                let [low, high, ..] = shared::load_16::<0>(DEADLINE);
                let deadline = low as u64 | (high as u64) << 32;
                let mut verdict = true;
                while !self.ready(index) {
                    if aborted(self.block) {
                        verdict = false;
                        break;
                    }
                    if device::nanotime() > deadline {
                        fail(self.block, failure::pack(failure::DEADLINE, 0, index));
                        verdict = false;
                        break;
                    }
                    device::spin_pause();
                }
                shared::store_u32::<0>(VERDICT, verdict as u32);
            }
            device::sync_threads();
            // From one lane, so that the compiler sees that what follows is uniform.
            warp::shuffle(shared::load_u32::<0>(VERDICT), 0) != 0
        }
    }

    /// Prepares the block's records from `local`, as many as a batch has. Ends with a barrier.
    ///
    /// # Safety
    /// All threads of the block, after a barrier; the tables are filled.
    #[inline(always)]
    unsafe fn prepare(&self, local: u32) {
        let mine = local + thread::warp() / 2;
        // By warps, so that those without a record go on.
        if self.index(mine) < self.params.ring.ring.records {
            // SAFETY: the buffers were last read before the latest barrier; those of a batch's masks, a batch earlier.
            unsafe {
                match thread::warp().is_multiple_of(2) {
                    true => self.prepare_buffer(mine),
                    false => self.prepare_mask(mine),
                }
            }
        }
        device::sync_threads();
    }

    /// One warp: fills the buffer of the block's record `local`.
    ///
    /// # Safety
    /// The buffer is nobody else's until the next barrier; the tables are filled.
    #[inline(always)]
    unsafe fn prepare_buffer(&self, local: u32) {
        let index = self.index(local);
        let (header, buffer, lane) = (self.header(index), Self::buffer(local), thread::lane());
        let (tiles, pad) = tiles(self.bytes(index));
        let keys = &self.key().round_keys;
        let prefix = Prefix::new(self.tables, keys, header.nonce());
        let first = first_counter(pad) & !255;
        // SAFETY: the caller's.
        unsafe {
            if lane == 0 {
                shared::store_u32::<0>(buffer, prefix.low_base());
            }
            store_associated_data(&header, buffer + ASSOCIATED);
            let mut entry = lane;
            while entry - lane <= 4 * tiles {
                let upper = prefix.upper(self.tables, keys, first.wrapping_add(256 * entry));
                if entry < UPPER_ENTRIES {
                    shared::store_16::<UPPER>(buffer + 16 * entry, upper);
                }
                entry += 32;
            }
        }
    }

    /// One warp: stores the mask of the tag of the block's record `local`, E(K, J0).
    ///
    /// # Safety
    /// As [`Self::prepare_buffer`].
    #[inline(always)]
    unsafe fn prepare_mask(&self, local: u32) {
        // SAFETY: the caller's.
        if PADDED && unsafe { self.claim(local) } {
            return;
        }
        let [a, b, c] = self.header(self.index(local)).nonce();
        let keys = &self.key().round_keys;
        let [mask] = self.tables.encrypt::<ROUNDS, 1>(keys, [[a, b, c, 1u32.swap_bytes()]]);
        if thread::lane() == 0 {
            // SAFETY: the caller's.
            unsafe { shared::store_16::<0>(mask_at(local), mask) };
        }
    }

    /// One warp: claims the pad of the block's record `local`, if it is there, and stores the mask of the tag. Whether it
    /// was there.
    ///
    /// # Safety
    /// As [`Self::prepare_buffer`], for the mask and the place that says whether the pad is claimed.
    #[inline(always)]
    unsafe fn claim(&self, local: u32) -> bool {
        let mut claimed = 0;
        if thread::lane() == 0 {
            let index = self.index(local);
            let (sequence, stride) = (self.block.sequence - 1, self.params.ring.ring.record_bytes);
            // SAFETY: the caller's.
            unsafe {
                let bytes = self.bytes(index);
                claimed = claim_of_chunk(self.pads, sequence, 0, index, bytes, stride, mask_at(local)) as u32;
                shared::store_u32::<0>(claimed_at(local), claimed);
            }
        }
        warp::shuffle(claimed, 0) != 0
    }

    /// Whether the pad of the block's record `local` is claimed.
    ///
    /// # Safety
    /// The record is prepared.
    #[inline(always)]
    unsafe fn claimed(&self, local: u32) -> bool {
        // From one lane, so that the compiler sees that it is uniform.
        // SAFETY: the caller's.
        PADDED && unsafe { warp::shuffle(shared::load_u32::<0>(claimed_at(local)), 0) != 0 }
    }

    /// The tiles of one record, by AES: this thread's word for the tag.
    ///
    /// # Safety
    /// As [`Self::run`]; the record is prepared, and has arrived where it is to open.
    #[inline(always)]
    unsafe fn tiles<const COMMON: bool>(&self, local: u32, matrices: Matrices) -> u32 {
        let ring = &self.params.ring.ring;
        let keys = &self.key().round_keys;
        let aligned = (ring.input | ring.output).is_multiple_of(16);
        let (index, buffer) = (self.index(local), Self::buffer(local));
        let (start, bytes) = (self.start(index), self.bytes(index));
        let (tiles, pad) = tiles(bytes);
        // Of this thread's first block: its low byte is that of all its blocks.
        let counter = (first_counter(pad) & 255) + thread::index();
        let mut upper = buffer + UPPER + 16 * (counter >> 8);
        let before = thread::index() as i32 - (THREADS + pad) as i32;
        // SAFETY: prepared.
        let (low, mut chains) = unsafe {
            (
                Prefix::low_of(shared::load_u32::<0>(buffer), self.tables, keys, counter),
                GroupedChains::new(associated_data(buffer + ASSOCIATED, before), tiles),
            )
        };
        // Where the record lies, in quads from addresses that are parameters: three addresses would be six registers.
        let vector_quads = (start / 16) as u32;
        let slot_quads = ((self.block.half * ring.inbox_half + start) / 16) as u32;
        let input = || ring.input + 16 * bits::opaque(vector_quads) as u64;
        let output = || ring.output + 16 * bits::opaque(vector_quads) as u64;
        let inbox = || ring.inbox + 16 * bits::opaque(slot_quads) as u64;
        let outbox = || ring.outbox + 16 * bits::opaque(slot_quads) as u64;
        let mut tile = 0;
        while tile < tiles {
            // The tile's first block, counted from the text's first.
            let first = (tile * TILE) as i32 - pad as i32;
            let at = first + thread::index() as i32;
            let places = [at, at + APART as i32];
            let whole = aligned && first >= 0 && (first as u32 + TILE) * 16 <= bytes;
            // SAFETY: places in the record, or none.
            let (received, own) = unsafe {
                let received = match SEAL {
                    true => [[0; 4]; 2],
                    false => load_received(inbox(), places, bytes, whole),
                };
                (received, load_vector(input(), places, bytes, whole))
            };
            let mut key_stream = [[0; 4]; 2];
            // Whether this warp has any of the text.
            if whole || warp::ballot(places[1] >= 0) != 0 {
                // SAFETY: prepared.
                let states = unsafe {
                    [xor(low, shared::load_16::<0>(upper)), xor(low, shared::load_16::<32>(upper))]
                };
                key_stream = self.tables.finish::<ROUNDS, 2>(keys, states);
            }
            let mut text = received;
            // SAFETY: places in the record, or none; all threads of the block run this loop alike.
            unsafe {
                if SEAL {
                    text = [xor(own[0], key_stream[0]), xor(own[1], key_stream[1])];
                    if !whole {
                        text = [inside(text[0], places[0], bytes), inside(text[1], places[1], bytes)];
                    }
                    store_sent(outbox(), places, bytes, whole, text);
                } else {
                    let opened = [xor(received[0], key_stream[0]), xor(received[1], key_stream[1])];
                    // Written out: closures were once not inlined, their quads then in local memory.
                    let sums = [
                        reduced::<COMMON>(self.block, opened[0], own[0]),
                        reduced::<COMMON>(self.block, opened[1], own[1]),
                    ];
                    let results =
                        [finished::<COMMON>(self.block, sums[0]), finished::<COMMON>(self.block, sums[1])];
                    store_local(output(), places, bytes, whole, results);
                }
                if first < 0 {
                    text = with_associated_data(buffer + ASSOCIATED, at, text);
                }
                chains.take(text, tiles - 1 - tile, matrices);
            }
            upper += 64;
            tile += 1;
        }
        // SAFETY: as above.
        unsafe { chains.last(lengths(bytes), matrices) }
    }

    /// As [`Self::tiles`], of a record whose pad is claimed: XOR in place of AES, and the next tile's text fetched ahead.
    ///
    /// # Safety
    /// As [`Self::tiles`].
    #[inline(always)]
    unsafe fn padded_tiles<const COMMON: bool>(&self, local: u32, matrices: Matrices) -> u32 {
        let ring = &self.params.ring.ring;
        let aligned = (ring.input | ring.output).is_multiple_of(16);
        let (index, associated) = (self.index(local), Self::buffer(local) + ASSOCIATED);
        let (start, bytes) = (self.start(index), self.bytes(index));
        let (tiles, pad) = tiles(bytes);
        // As in `run`.
        let vector_quads = (start / 16) as u32;
        let slot_quads = ((self.block.half * ring.inbox_half + start) / 16) as u32;
        let input = || ring.input + 16 * bits::opaque(vector_quads) as u64;
        let output = || ring.output + 16 * bits::opaque(vector_quads) as u64;
        let inbox = || ring.inbox + 16 * bits::opaque(slot_quads) as u64;
        let outbox = || ring.outbox + 16 * bits::opaque(slot_quads) as u64;
        let pads = || self.pads.pads + 16 * bits::opaque(vector_quads) as u64;
        let whole_of = |first: i32| aligned && first >= 0 && (first as u32 + TILE) * 16 <= bytes;
        // What a tile begins with: the ciphertext to open, or else the text to seal.
        let fetch = |first: i32| {
            let (at, whole) = (first + bits::opaque(thread::index()) as i32, whole_of(first));
            let places = [at, at + APART as i32];
            // SAFETY: places in the record, or none.
            unsafe {
                match SEAL {
                    true => load_vector(input(), places, bytes, whole),
                    false => load_received(inbox(), places, bytes, whole),
                }
            }
        };
        let pad_of = |first: i32| {
            let (at, whole) = (first + bits::opaque(thread::index()) as i32, whole_of(first));
            // SAFETY: places in the record's pad, or none.
            unsafe { load_pad(pads(), [at, at + APART as i32], bytes, whole) }
        };
        let before = bits::opaque(thread::index()) as i32 - (THREADS + pad) as i32;
        // SAFETY: prepared.
        let mut chains = unsafe { GroupedChains::new(associated_data(associated, before), tiles) };
        // The tile's first block, counted from the text's first.
        let mut first = -(pad as i32);
        let mut next = fetch(first);
        // To seal, the pad is needed at once: so it is fetched ahead too. To open, the products come first.
        let mut next_pad = if SEAL { pad_of(first) } else { [[0; 4]; 2] };
        while first < bytes.div_ceil(16) as i32 {
            let left = (bytes.div_ceil(16) as i32 - first) as u32 / TILE - 1;
            let (at, whole) = (first + bits::opaque(thread::index()) as i32, whole_of(first));
            let places = [at, at + APART as i32];
            let values = next;
            // SAFETY: places in the record, or none; all threads of the block run this loop alike.
            unsafe {
                let key_stream = if SEAL { next_pad } else { pad_of(first) };
                if SEAL {
                    next = fetch(first + TILE as i32);
                    next_pad = pad_of(first + TILE as i32);
                    let mut text = [xor(values[0], key_stream[0]), xor(values[1], key_stream[1])];
                    if !whole {
                        text = [inside(text[0], places[0], bytes), inside(text[1], places[1], bytes)];
                    }
                    store_sent(outbox(), places, bytes, whole, text);
                    if first < 0 {
                        text = with_associated_data(associated, at, text);
                    }
                    chains.take(text, left, matrices);
                } else {
                    let own = load_vector(input(), places, bytes, whole);
                    let mut text = values;
                    if first < 0 {
                        text = with_associated_data(associated, at, text);
                    }
                    chains.take(text, left, matrices);
                    // Not before: the counts leave no registers for it.
                    next = fetch(first + TILE as i32);
                    let opened = [xor(values[0], key_stream[0]), xor(values[1], key_stream[1])];
                    let sums = [
                        reduced::<COMMON>(self.block, opened[0], own[0]),
                        reduced::<COMMON>(self.block, opened[1], own[1]),
                    ];
                    let results =
                        [finished::<COMMON>(self.block, sums[0]), finished::<COMMON>(self.block, sums[1])];
                    store_local(output(), places, bytes, whole, results);
                }
            }
            first += TILE as i32;
        }
        // SAFETY: as above.
        unsafe { chains.last(lengths(bytes), matrices) }
    }

    /// One warpgroup: makes the tag of the block's record `local`; releases the record, or compares.
    ///
    /// # Safety
    /// The chains' words and the mask are stored and all texts of the record are done, before a barrier.
    #[inline(always)]
    unsafe fn end(&self, local: u32) {
        let index = self.index(local);
        let signal = self.signal(index);
        let (last, parts, part) = (last_at(local), parts_at(local), thread::warp() % 4);
        // SAFETY: the caller's; the parts were last read before the barrier.
        unsafe {
            let mut expected = [0; 4];
            // Under way while the parts are made.
            if !SEAL && part == 0 {
                expected = global::load_volatile_16(signal);
            }
            store_part(last, LANES_AT, part, parts);
            device::sync_warpgroup();
            if part != 0 {
                return;
            }
            let tag = tag(parts, mask_at(local));
            if thread::lane() != 0 {
                return;
            }
            if SEAL {
                if !aborted(self.block) {
                    global::store_16(signal, tag);
                    global::store_release_sys(signal + 16, self.block.sequence);
                }
                let ring = &self.params.ring.ring;
                if ring.input == ring.output {
                    let word = self.block.sequence << 32 | (local + 1) as u64;
                    global::store_release_sys(self.params.sealed + 8 * thread::block_index() as u64, word);
                }
            } else if differ(tag, expected) {
                fail(self.block, failure::pack(failure::AUTHENTICATION, 0, index));
            }
        }
    }

    /// Seals or opens this block's records.
    ///
    /// # Safety
    /// All threads of the block; the parameters describe live memory, the tables are filled.
    #[inline(always)]
    unsafe fn run<const COMMON: bool>(&self, matrices: Matrices) {
        let ring = &self.params.ring.ring;
        if self.index(0) >= ring.records {
            return;
        }
        if thread::index() == POLLER {
            let deadline = self.block.deadline;
            // SAFETY: this thread's places until the next barrier.
            unsafe {
                shared::store_16::<0>(DEADLINE, [deadline as u32, (deadline >> 32) as u32, 0, 0]);
                shared::store_u32::<0>(READY, 0);
            }
        }
        let mut local = 0;
        while self.index(local) < ring.records {
            let index = self.index(local);
            // SAFETY: everything here is the same in all threads; what is stored was last read before the latest barrier.
            unsafe {
                if local.is_multiple_of(BATCH) {
                    self.prepare(local);
                }
                if !SEAL {
                    let ready = warp::shuffle(shared::load_u32::<READY>(4 * (local % 2)), 0);
                    if ready == 0 && !self.wait(index) {
                        return;
                    }
                    let next = self.index(local + 1);
                    if thread::index() == 32 * (4 * (local + 2) % 16) && next < ring.records {
                        let ready = self.ready(next);
                        shared::store_u32::<READY>(4 * ((local + 1) % 2), ready as u32);
                    }
                }
            }
            // SAFETY: the record is prepared and has arrived; the words were last read before the latest barrier; all threads
            // of the block come here alike.
            unsafe {
                let word = match self.claimed(local) {
                    true => self.padded_tiles::<COMMON>(local, matrices),
                    false => self.tiles::<COMMON>(local, matrices),
                };
                shared::store_u32::<0>(last_at(local) + 4 * thread::index(), word);
                device::sync_threads();
                // From one lane, so that the compiler sees that it is uniform.
                if warp::shuffle(thread::warp() / 4, 0) == local % 4 {
                    self.end(local);
                }
            }
            local += 1;
        }
    }
}

/// Where the words for the tag of the block's record `local` lie.
#[inline(always)]
fn last_at(local: u32) -> u32 {
    LAST_AT + local % 2 * LAST_BYTES
}

/// Where the parts of the tag of the block's record `local` lie.
#[inline(always)]
fn parts_at(local: u32) -> u32 {
    PARTS_AT + local % 2 * 64
}

/// Where it says whether the pad of the block's record `local` is claimed.
#[inline(always)]
fn claimed_at(local: u32) -> u32 {
    CLAIMED_AT + local % BATCH * 4
}

/// Where the mask of the block's record `local` lies.
#[inline(always)]
fn mask_at(local: u32) -> u32 {
    MASKS_AT + local % (2 * BATCH) * 16
}

/// Tiles of a record, and the zero blocks in front of its text in the first.
#[inline(always)]
pub(crate) fn tiles(bytes: u32) -> (u32, u32) {
    let blocks = bytes.div_ceil(16);
    let tiles = blocks.div_ceil(TILE);
    (tiles, tiles * TILE - blocks)
}

/// The counter of a record's first tile's first block: that of the text's first is 2 (SP 800-38D, 7.1).
#[inline(always)]
pub(crate) fn first_counter(pad: u32) -> u32 {
    2u32.wrapping_sub(pad)
}

/// As [`load_local`], its whole quads loaded where this stands: the key stream, which comes next, hides the wait.
///
/// # Safety
/// As [`load_local`].
#[inline(always)]
unsafe fn load_vector(base: u64, places: [i32; 2], bytes: u32, whole: bool) -> [Quad; 2] {
    // SAFETY: the caller's.
    unsafe {
        if whole {
            let address = base + offset(places[0]);
            return [
                global::load_volatile_16(address),
                global::load_volatile_16(address + 16 * APART as u64),
            ];
        }
        load_local(base, places, bytes, false)
    }
}

/// The kernels' body.
///
/// # Safety
/// The addresses in the parameters are valid.
#[inline(always)]
unsafe fn exchange<const ROUNDS: usize, const COMMON: bool, const PADDED: bool>(
    params: &ExchangeParams,
    seal_pads: &ChunkPads,
    open_pads: &ChunkPads,
) {
    let both = params.sealers == 0;
    let seals = both || thread::block_index() < params.sealers;
    let (own, peer) = (params.ring.own.ghash_key, params.ring.predecessor.ghash_key);
    // SAFETY: the regions of shared memory are disjoint; the keys are filled.
    let load = |key: u64| unsafe {
        load_lanes(key, LANES_AT);
        Matrices::load_group(key, MATRICES_AT)
    };
    let mut matrices = load(if seals { own } else { peer });
    let tables = Tables::fill::<THREADS>();
    // SAFETY: by the caller's promise.
    unsafe {
        let block = enter(params.ring.ring);
        device::sync_threads();
        if !allowed(&block) {
            exhausted(&block);
        } else {
            if seals {
                let work = Work::<ROUNDS, true, PADDED> { params, block: &block, tables, pads: seal_pads };
                work.run::<COMMON>(matrices);
            }
            if both {
                device::sync_threads();
                matrices = load(peer);
                device::sync_threads();
            }
            if both || !seals {
                let work = Work::<ROUNDS, false, PADDED> { params, block: &block, tables, pads: open_pads };
                work.run::<COMMON>(matrices);
            }
        }
        leave(&block, VERDICT);
    }
}

kernel! {
    threads = 512,
    shared = EXCHANGE_SHARED,
    /// The sealed exchange with AES-128, for sums and averages of f32, f16 and bf16.
    fn exchange_sealed_128(params: ExchangeParams) {
        // SAFETY: by the launcher's promise.
        unsafe { exchange::<10, true, false>(&params, &ChunkPads::NONE, &ChunkPads::NONE) }
    }
}

kernel! {
    threads = 512,
    shared = EXCHANGE_SHARED,
    /// The sealed exchange with AES-256, for sums and averages of f32, f16 and bf16.
    fn exchange_sealed_256(params: ExchangeParams) {
        // SAFETY: by the launcher's promise.
        unsafe { exchange::<14, true, false>(&params, &ChunkPads::NONE, &ChunkPads::NONE) }
    }
}

kernel! {
    threads = 512,
    shared = EXCHANGE_SHARED,
    /// The sealed exchange with AES-128, for every element type and operation.
    fn exchange_sealed_any_128(params: ExchangeParams) {
        // SAFETY: by the launcher's promise.
        unsafe { exchange::<10, false, false>(&params, &ChunkPads::NONE, &ChunkPads::NONE) }
    }
}

kernel! {
    threads = 512,
    shared = EXCHANGE_SHARED,
    /// The sealed exchange with AES-256, for every element type and operation.
    fn exchange_sealed_any_256(params: ExchangeParams) {
        // SAFETY: by the launcher's promise.
        unsafe { exchange::<14, false, false>(&params, &ChunkPads::NONE, &ChunkPads::NONE) }
    }
}

kernel! {
    threads = 512,
    shared = PADDED_EXCHANGE_SHARED,
    /// `exchange_sealed_128`, with keystream that was made ahead where it was.
    fn exchange_padded_128(params: PaddedExchangeParams) {
        // SAFETY: by the launcher's promise.
        unsafe { exchange::<10, true, true>(&params.exchange, &params.seals, &params.opens) }
    }
}

kernel! {
    threads = 512,
    shared = PADDED_EXCHANGE_SHARED,
    /// `exchange_sealed_256`, with keystream that was made ahead where it was.
    fn exchange_padded_256(params: PaddedExchangeParams) {
        // SAFETY: by the launcher's promise.
        unsafe { exchange::<14, true, true>(&params.exchange, &params.seals, &params.opens) }
    }
}
