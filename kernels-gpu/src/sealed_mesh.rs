//! The sealed mesh: a step opens a record and reduces it, or seals one for any number of ranks.
//!
//! As in the [sealed ring](crate::sealed), except that a step has one key and makes one tag. The rank's own key stays at hand;
//! the one that opens is copied from a table of all ranks' keys when the sender changes.

use crate::aes::{SHARED_KEYS_BYTES, SharedKeys, Tables, xor};
use crate::device::{self, Quad, bits, global, shared, thread, warp};
use crate::ghash::{Chains, LANES_BYTES, LAST_BYTES, MATRICES_BYTES, Matrices, TILE, block_of, load_lanes};
use crate::mesh::{Mesh, Outbox, Record, Wire, collective, kept_at, reduced_quad};
use crate::params::{SHARED_BASE, TABLES_END};
use crate::record::{AAD_BLOCKS, AAD_BYTES, Call, Header};
use crate::ring::{Block, RingParams, THREADS, finished};
use crate::sealed::{
    APART, ROUND_KEYS_OFFSET, SenderKey, Stream, associated_data, inside, lengths, load_local, load_received,
    store_associated_data, store_local, store_part, store_sent, tag, with_associated_data,
};
use crate::step::{
    ACCUMULATE, FINISH, FORWARD, KEEP, KEEP_ROUNDED, RECEIVE, REDUCE, SEND_KEPT, SEND_STORED, STORE, Step,
};

/// Parameters of a rank's part in one sealed collective. They hold no key.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SealedMeshParams {
    /// As for the ring.
    pub ring: RingParams,
    /// As for the plain mesh.
    pub mesh: Mesh,
    /// What the records' additional data say of the collective.
    pub call: Call,
    /// Address of all ranks' [`SenderKey`]s, in the order of their numbers.
    pub senders: u64,
}

/// Shared memory after the tables of AES: what is loaded of a key, once for the rank's own and once for the sender's.
const MATRICES: u32 = TABLES_END;
const LANES: u32 = MATRICES + 2 * MATRICES_BYTES;
const ROUND_KEYS: u32 = LANES + 2 * LANES_BYTES;
/// The chains' last words of a record's tag, the parts of their sum, and the mask; twice, for records in turn.
const TAGS: u32 = ROUND_KEYS + 2 * SHARED_KEYS_BYTES;
const PARTS: u32 = LAST_BYTES;
const MASK: u32 = PARTS + 4 * 16;
const TAGS_BYTES: u32 = MASK + 16;
const VERDICT: u32 = TAGS + 2 * TAGS_BYTES;
/// Whose key opens.
const SENDER: u32 = VERDICT + 4;
/// Of each warp, the record's additional data.
const ASSOCIATED: u32 = VERDICT + 16;
/// Dynamic shared memory of the sealed kernels.
pub const SEALED_MESH_SHARED: u32 = ASSOCIATED + THREADS / 32 * AAD_BYTES - SHARED_BASE;

/// Copies the key of rank `rank` to shared memory, as the own one (0) or the one that opens (1).
///
/// # Safety
/// All threads of the block, which have passed a barrier since they last used the key before, and pass one before they use
/// this one; the table has the rank.
#[inline(always)]
unsafe fn load_key(senders: u64, rank: u32, place: u32) {
    let key = SenderKey::address(senders, rank);
    // SAFETY: the caller's; the places are those of the key before.
    unsafe {
        let matrices = Matrices::fetch(key);
        load_lanes(key, LANES + place * LANES_BYTES);
        let index = thread::index();
        if index < SHARED_KEYS_BYTES / 16 {
            let round_key = global::load_16(key + ROUND_KEYS_OFFSET + 16 * index as u64);
            shared::store_16::<0>(ROUND_KEYS + place * SHARED_KEYS_BYTES + 16 * index, round_key);
        }
        Matrices::store(matrices, MATRICES + place * MATRICES_BYTES);
    }
}

/// Makes the key of `sender` the one that opens. A barrier.
///
/// # Safety
/// As [`load_key`]; [`sender`] is right after the next barrier.
#[inline(always)]
unsafe fn switch_to(senders: u64, sender: u32) {
    // SAFETY: the caller's.
    unsafe {
        load_key(senders, sender, 1);
        device::sync_threads();
        // After the barrier: before it, others may still compare with the sender before.
        if thread::index() == 0 {
            shared::store_u32::<0>(SENDER, sender);
        }
    }
}

/// Whose key opens, since [`switch_to`].
#[inline(always)]
fn sender() -> u32 {
    // SAFETY: stored before the latest barrier. From one lane, so that the compiler sees that it is uniform.
    unsafe { warp::shuffle(shared::load_u32::<0>(SENDER), 0) }
}

/// Records sealed by AES-GCM (NIST SP 800-38D).
#[derive(Clone, Copy)]
struct Sealed<const ROUNDS: usize, const COMMON: bool> {
    call: Call,
    senders: u64,
    tables: Tables,
    /// Records so far, modulo 2.
    turn: u32,
}

impl<const ROUNDS: usize, const COMMON: bool> Wire for Sealed<ROUNDS, COMMON> {
    const SEALED: bool = true;
    const VERDICT: u32 = VERDICT;

    #[inline(always)]
    unsafe fn transfer(
        &mut self,
        block: &Block,
        mesh: &Mesh,
        step: &Step,
        record: &Record,
        arrived: impl FnOnce() -> bool,
    ) -> Option<Quad> {
        let tables = self.tables;
        let (actions, bytes) = (step.actions, record.bytes);
        let opens = actions & RECEIVE != 0;
        let header = Header {
            call: self.call,
            // Signals count from 1, as memory begins with zeros.
            sequence: block.sequence - 1,
            sender: step.sealed_by,
            step: step.sealed_in,
            record: record.index,
            last: record.last,
        };
        let place = opens as u32;
        let keys = SharedKeys(ROUND_KEYS + place * SHARED_KEYS_BYTES);
        let matrices = Matrices::at(MATRICES + place * MATRICES_BYTES);
        let lanes = LANES + place * LANES_BYTES;

        let blocks = bytes.div_ceil(16);
        let tiles = blocks.div_ceil(TILE);
        let pad = tiles * TILE - blocks;
        let first = block_of(thread::index(), 0) as i32 - pad as i32;
        let before = block_of(thread::index(), 1) as i32 - TILE as i32 - pad as i32;

        if opens && step.sealed_by != sender() {
            // SAFETY: the latest record ended with barriers, as this one will; all threads are here.
            unsafe { switch_to(self.senders, step.sealed_by) };
        }
        let tags = TAGS + self.turn * TAGS_BYTES;
        self.turn ^= 1;
        if thread::warp() == 1 {
            let [a, b, c] = header.nonce();
            // The tag's mask, E(K, J0).
            let [mask] = tables.encrypt::<ROUNDS, 1>(keys, [[a, b, c, 1u32.swap_bytes()]]);
            if thread::lane() == 0 {
                // SAFETY: last read before the latest barrier; this warp's.
                unsafe { shared::store_16::<0>(tags + MASK, mask) };
            }
        }
        let stream = Stream::<ROUNDS>::new(tables, keys, &header, first);
        let aad = ASSOCIATED + thread::warp() * AAD_BYTES;
        // SAFETY: this warp's place, whose last use lies before the latest barrier.
        unsafe { store_associated_data(&header, aad) };

        // All that does not need the record is done by now.
        if !arrived() {
            return None;
        }
        // An empty chain, and the additional data that would lie in the tile before the first in a product of its own.
        let mut chains = Chains::new([0; 4]);
        if pad < AAD_BLOCKS {
            // SAFETY: all threads of the block come here alike.
            unsafe { chains.take([[0; 4], associated_data(aad, before)], matrices) };
        }
        let aligned = (record.input | record.output).is_multiple_of(16);
        // Whether a tile is all text, in whole quads.
        let whole = |tile: u32| {
            aligned
                && tile * TILE >= pad
                && (tile + 1 < tiles || tile + 1 == tiles && bytes.is_multiple_of(16))
        };
        // Where the record lies, in units or quads from addresses that are parameters: five addresses would be ten registers.
        let ring = &block.params;
        let vector_units = ((record.input - ring.input) >> ring.unit.trailing_zeros()) as u32;
        let inbox_quads = ((record.inbox - ring.inbox) / 16) as u32;
        let slot_quads = (record.slot / 16) as u32;
        let first_quad = record.index * (ring.record_bytes / 16);
        let input = || ring.input + ring.unit as u64 * bits::opaque(vector_units) as u64;
        let output = || ring.output + ring.unit as u64 * bits::opaque(vector_units) as u64;
        let inbox = || ring.inbox + 16 * bits::opaque(inbox_quads) as u64;
        // Whether a quad holds some of the text.
        let is_text = |at: i32| at >= 0 && 16 * (at as u32) < bytes;
        let kept = |at: i32| kept_at(mesh, ring.reduction, bits::opaque(first_quad) + at as u32);
        // What a tile begins with: of the received record, else of what is sent.
        let load = |at: i32, whole: bool| {
            let places = [at, at + APART];
            // SAFETY: places in the record, or none.
            unsafe {
                if opens {
                    return load_received(inbox(), places, bytes, whole);
                }
                if actions & SEND_KEPT != 0 {
                    let load = |at: i32| if is_text(at) { global::load_16(kept(at)) } else { [0; 4] };
                    return [load(places[0]), load(places[1])];
                }
                let source = if actions & SEND_STORED != 0 { output() } else { input() };
                load_local(source, places, bytes, whole)
            }
        };
        let mut tile = 0;
        while tile < tiles {
            let at = first + (tile * TILE) as i32;
            let places = [at, at + APART];
            let whole_tile = whole(tile);
            // The key stream hides the wait.
            let given = load(at, whole_tile);
            let mut key_stream = [[0; 4]; 2];
            // Whether this warp has any of the text.
            if warp::ballot(places[1] >= 0) != 0 {
                key_stream = stream.key_stream(tables, keys, at);
            }
            let made = [xor(given[0], key_stream[0]), xor(given[1], key_stream[1])];
            // Before the tag's part, which needs registers for the counts.
            let mut values = if opens { made } else { given };
            // SAFETY: places in the record, or none.
            unsafe {
                if actions & (REDUCE | ACCUMULATE | KEEP) != 0 {
                    let mut local = [[0; 4]; 2];
                    if actions & REDUCE != 0 {
                        local = load_local(input(), places, bytes, whole_tile);
                    }
                    if is_text(places[0]) {
                        values[0] =
                            reduced_quad::<COMMON>(block, actions, kept(places[0]), values[0], local[0]);
                    }
                    if is_text(places[1]) {
                        values[1] =
                            reduced_quad::<COMMON>(block, actions, kept(places[1]), values[1], local[1]);
                    }
                }
                if actions & FINISH != 0 {
                    values = [finished::<COMMON>(block, values[0]), finished::<COMMON>(block, values[1])];
                }
                if actions & KEEP_ROUNDED != 0 {
                    if is_text(places[0]) {
                        global::store_16(kept(places[0]), values[0]);
                    }
                    if is_text(places[1]) {
                        global::store_16(kept(places[1]), values[1]);
                    }
                }
                if actions & STORE != 0 {
                    store_local(output(), places, bytes, whole_tile, values);
                }
            }
            let mut text = given;
            if !opens {
                text = made;
                if !whole_tile {
                    text = [inside(text[0], places[0], bytes), inside(text[1], places[1], bytes)];
                }
            }
            if actions & (FORWARD | RECEIVE) != RECEIVE {
                let mut to = step.to;
                while to < step.to + step.fan_out {
                    // SAFETY: places in the record, or none.
                    unsafe {
                        let slot =
                            Outbox::load(mesh.outboxes, to).inbox + 16 * bits::opaque(slot_quads) as u64;
                        store_sent(slot, places, bytes, whole_tile, text);
                    }
                    to += 1;
                }
            }
            // SAFETY: all threads of the block run this loop alike; the additional data are stored.
            unsafe {
                let text = if whole_tile { text } else { with_associated_data(aad, at, text) };
                chains.take(text, matrices);
            }
            tile += 1;
        }

        // SAFETY: these places were last read before the latest barrier, and each is written before one.
        unsafe {
            chains.add_last(lengths(bytes));
            shared::store_u32::<0>(tags + 4 * thread::index(), chains.last(matrices));
            device::sync_threads();
            if thread::warp() < 4 {
                store_part(tags, lanes, thread::warp(), tags + PARTS);
            }
            device::sync_threads();
            let mut sum = [0; 4];
            if thread::warp() == 0 {
                sum = tag(tags + PARTS, tags + MASK);
            }
            Some(sum)
        }
    }
}

/// The kernels' body.
///
/// # Safety
/// The addresses in the parameters are valid.
#[inline(always)]
unsafe fn sealed<const ROUNDS: usize, const COMMON: bool>(params: &SealedMeshParams) {
    let tables = Tables::fill::<THREADS>();
    let (ring, senders) = (&params.ring, params.senders);
    // SAFETY: the regions of shared memory are disjoint; the keys are filled; the caller's. The barrier in the middle is also
    // the one after which the tables are used, and the last one that after which the sender is asked for.
    unsafe {
        load_key(senders, ring.rank, 0);
        switch_to(senders, ring.predecessor());
        device::sync_threads();
        collective(
            *ring,
            &params.mesh,
            Sealed::<ROUNDS, COMMON> { call: params.call, senders, tables, turn: 0 },
        );
    }
}

kernel! {
    threads = 512,
    shared = SEALED_MESH_SHARED,
    /// A sealed collective by messages between any two ranks with AES-128, for sums and averages of f32, f16 and bf16.
    fn mesh_sealed_128(params: SealedMeshParams) {
        // SAFETY: by the launcher's promise.
        unsafe { sealed::<10, true>(&params) }
    }
}

kernel! {
    threads = 512,
    shared = SEALED_MESH_SHARED,
    /// A sealed collective by messages between any two ranks with AES-256, for sums and averages of f32, f16 and bf16.
    fn mesh_sealed_256(params: SealedMeshParams) {
        // SAFETY: by the launcher's promise.
        unsafe { sealed::<14, true>(&params) }
    }
}

kernel! {
    threads = 512,
    shared = SEALED_MESH_SHARED,
    /// A sealed collective by messages between any two ranks with AES-128, for every element type and operation.
    fn mesh_sealed_any_128(params: SealedMeshParams) {
        // SAFETY: by the launcher's promise.
        unsafe { sealed::<10, false>(&params) }
    }
}

kernel! {
    threads = 512,
    shared = SEALED_MESH_SHARED,
    /// A sealed collective by messages between any two ranks with AES-256, for every element type and operation.
    fn mesh_sealed_any_256(params: SealedMeshParams) {
        // SAFETY: by the launcher's promise.
        unsafe { sealed::<14, false>(&params) }
    }
}
