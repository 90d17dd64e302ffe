//! The sealed ring: each step opens, reduces and seals a record in one pass over its bytes. Here is what its kernels share, and
//! those that take keystream from pads made ahead; records with AES on the path are [`fused`](crate::fused)'s, short ones
//! [`short`](crate::short)'s.
//!
//! A block keeps two keys at hand: its rank's own, which seals, and one that opens. That is the predecessor's, or, in the
//! kernels that open what other ranks sealed, that of the latest record's sender, copied from a table of all ranks' keys
//! when the sender changes.
//!
//! A record's blocks are numbered so that the last ends a tile of GHASH (see [`ghash`]); what that leaves in front
//! counts as zero blocks, with the additional data right before the text. Received bytes are loaded once: what is
//! decrypted is what is authenticated.
//!
//! The `relay_padded_*` kernels take each record's keystream from pads made ahead (see [`padded`](crate::padded)); where one isn't
//! there, the block makes it by AES in memory of its own, uses it and overwrites it.

use crate::aes::{Keys, Prefix, RoundKeys, SHARED_KEYS_BYTES, SharedKeys, Tables, xor};
use crate::device::{self, Quad, bits, global, shared, thread, warp};
use crate::gf128::Element;
use crate::ghash::{
    self, Chains, GhashKey, LANES_BYTES, LAST_BYTES, MATRICES_BYTES, Matrices, TILE, block_of, fetch_lane,
    load_lanes, store_lane, warp_sum,
};
use crate::padded::{ChunkPads, claim_of_chunk, make_pad};
use crate::params::{SHARED_BASE, SHARED_END_SM_90, TABLES_END};
use crate::record::{AAD_BLOCKS, AAD_BYTES, Call, Header};
use crate::ring::{
    Block, Record, RingParams, THREADS, Wire, collective, finished, load_quad, reduced, store_quad,
};
use crate::step::{FINISH, FORWARD, RECEIVE, REDUCE, SEND, STORE, Step};

const _: () = assert!(THREADS == ghash::THREADS);

/// The longest record in bytes: [`fused`](crate::fused) keeps what its counters' upper bytes add in shared memory.
pub const LONGEST_RECORD: u32 = 992 << 10;

/// A key as the kernels take it.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct SealedKey {
    /// The expanded key: [`expand_key`](crate::aes::expand_key).
    pub round_keys: RoundKeys,
    /// Address of the [`GhashKey`].
    pub ghash_key: u64,
}

/// Parameters of a rank's part in one sealed collective.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct SealedRingParams {
    /// As for the plain ring.
    pub ring: RingParams,
    /// This rank's key.
    pub own: SealedKey,
    /// The predecessor's.
    pub predecessor: SealedKey,
    /// What the records' additional data say of the collective.
    pub call: Call,
    /// Address of all ranks' [`SenderKey`]s, in the order of their numbers.
    pub senders: u64,
}

/// The pads of one step of a rank.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct StepPads {
    /// Of the records that it opens.
    pub opens: ChunkPads,
    /// Of those that it seals.
    pub seals: ChunkPads,
}

/// Parameters of a rank's part in one sealed collective with pads.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct PaddedRingParams {
    /// As without pads.
    pub ring: SealedRingParams,
    /// Address of a [`StepPads`] for each step of the table.
    pub pads: u64,
    /// Memory for pads that are not there: two records for each block. Zeros, before and after.
    pub scratch: u64,
}

/// A key in device memory, for those who open with several; secret.
#[repr(C, align(1024))]
pub struct SenderKey {
    /// For the tags.
    pub ghash: GhashKey,
    /// The expanded key.
    pub round_keys: RoundKeys,
}

impl SenderKey {
    /// The address of the key of rank `sender` in the table at `senders`.
    #[inline(always)]
    pub(crate) const fn address(senders: u64, sender: u32) -> u64 {
        senders + sender as u64 * size_of::<Self>() as u64
    }
}

/// Parameters of [`store_round_keys()`].
#[derive(Clone, Copy)]
#[repr(C)]
pub struct RoundKeysParams {
    /// The expanded key.
    pub round_keys: RoundKeys,
    /// Address of the [`SenderKey`].
    pub key: u64,
}

kernel! {
    threads = 32, shared = 0,
    /// Fills [`SenderKey::round_keys`]. The rest of the key is [`ghash_key`](crate::ghash::ghash_key())'s work.
    fn store_round_keys(params: RoundKeysParams) {
        let address = params.key + ROUND_KEYS_OFFSET;
        if thread::index() == 0 {
            // Written out: a loop would index the parameters at run time, in local memory.
            macro_rules! store {
                ($($round:literal)*) => {
                    // SAFETY: in the key's round keys.
                    unsafe {
                        $(global::store_16(address + 16 * $round, (&params.round_keys).round_key($round));)*
                    }
                };
            }
            store!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14);
        }
    }
}

/// Where a [`SenderKey`] has its round keys.
pub(crate) const ROUND_KEYS_OFFSET: u64 = core::mem::offset_of!(SenderKey, round_keys) as u64;

// Shared memory after the tables of AES.
const OWN_MATRICES: u32 = TABLES_END;
const OPENER_MATRICES: u32 = OWN_MATRICES + MATRICES_BYTES;
const OWN_LANES: u32 = OPENER_MATRICES + MATRICES_BYTES;
const OPENER_LANES: u32 = OWN_LANES + LANES_BYTES;
/// The chains' last words of the two tags of a record, the parts of their sums, and both masks; twice, for records in
/// turn.
pub(crate) const TAGS: u32 = OPENER_LANES + LANES_BYTES;
const PARTS: u32 = 2 * LAST_BYTES;
const PARTS_BYTES: u32 = 4 * 16;
pub(crate) const MASKS: u32 = PARTS + 2 * PARTS_BYTES;
pub(crate) const TAGS_BYTES: u32 = MASKS + 2 * 16;
pub(crate) const VERDICT: u32 = TAGS + 2 * TAGS_BYTES;
/// Whose key opens, in the kernels that choose it at run time.
const SENDER: u32 = VERDICT + 4;
/// Of each warp, the additional data of the record that it opens and of the one that it seals.
pub(crate) const ASSOCIATED: u32 = VERDICT + 16;
/// The sender's round keys.
const SENDER_ROUND_KEYS: u32 = ASSOCIATED + THREADS / 32 * 2 * AAD_BYTES;
/// Dynamic shared memory of the sealed kernels.
pub const SEALED_SHARED: u32 = SENDER_ROUND_KEYS + SHARED_KEYS_BYTES - SHARED_BASE;

/// Where the record's pads lie, of the kernels with pads, and which of them are claimed.
const PADS: u32 = SENDER_ROUND_KEYS + SHARED_KEYS_BYTES;
const CLAIMED: u32 = PADS + 16;
/// Dynamic shared memory of the kernels with pads.
pub const PADDED_RING_SHARED: u32 = PADS + 32 - SHARED_BASE;
const _: () = assert!(SHARED_BASE + PADDED_RING_SHARED <= SHARED_END_SM_90);

/// Records sealed by AES-GCM (NIST SP 800-38D); the opening key follows the records' sender. For sums and averages of f32, f16
/// and bf16.
#[derive(Clone, Copy)]
pub(crate) struct Sealed<'a, const ROUNDS: usize> {
    pub(crate) params: &'a SealedRingParams,
    pub(crate) tables: Tables,
    /// Round keys to open with.
    pub(crate) opener: SharedKeys,
    pub(crate) own_matrices: Matrices,
    pub(crate) opener_matrices: Matrices,
    /// Records so far, modulo 2.
    pub(crate) turn: u32,
}

/// Such records with keystream from pads.
#[derive(Clone, Copy)]
struct Padded<'a, const ROUNDS: usize> {
    sealed: Sealed<'a, ROUNDS>,
    /// [`PaddedRingParams::pads`].
    pads: u64,
    /// [`PaddedRingParams::scratch`].
    scratch: u64,
}

/// The headers of the record that a step opens and of the one that it seals.
#[inline(always)]
pub(crate) fn headers(call: Call, block: &Block, step: &Step, record: &Record) -> [Header; 2] {
    let sealed = Header {
        call,
        // Signals count from 1, as memory begins with zeros.
        sequence: block.sequence - 1,
        sender: block.params.rank,
        step: step.sends,
        record: record.index,
        last: record.last,
    };
    [Header { sender: step.sealed_by, step: step.sealed_in, ..sealed }, sealed]
}

/// Where a record lies, in units or quads from addresses that are parameters: four addresses would be eight registers.
pub(crate) struct Places<'a> {
    ring: &'a RingParams,
    vector_units: u32,
    inbox_quads: u32,
    outbox_quads: u32,
}

impl<'a> Places<'a> {
    #[inline(always)]
    pub(crate) fn of(ring: &'a RingParams, record: &Record) -> Self {
        Places {
            ring,
            vector_units: ((record.input - ring.input) >> ring.unit.trailing_zeros()) as u32,
            inbox_quads: ((record.inbox - ring.inbox) / 16) as u32,
            outbox_quads: ((record.outbox - ring.outbox) / 16) as u32,
        }
    }

    /// As [`Record::input`].
    #[inline(always)]
    pub(crate) fn input(&self) -> u64 {
        self.ring.input + self.ring.unit as u64 * bits::opaque(self.vector_units) as u64
    }

    /// As [`Record::output`].
    #[inline(always)]
    pub(crate) fn output(&self) -> u64 {
        self.ring.output + self.ring.unit as u64 * bits::opaque(self.vector_units) as u64
    }

    /// As [`Record::inbox`].
    #[inline(always)]
    pub(crate) fn inbox(&self) -> u64 {
        self.ring.inbox + 16 * bits::opaque(self.inbox_quads) as u64
    }

    /// As [`Record::outbox`].
    #[inline(always)]
    pub(crate) fn outbox(&self) -> u64 {
        self.ring.outbox + 16 * bits::opaque(self.outbox_quads) as u64
    }
}

/// The key stream of one thread's blocks of a record.
#[derive(Clone, Copy)]
pub(crate) struct Stream<const ROUNDS: usize> {
    prefix: Prefix,
    /// What is the same in all of the thread's blocks, after round 2: they lie [`APART`] blocks apart, a multiple of 256.
    low: Quad,
}

impl<const ROUNDS: usize> Stream<ROUNDS> {
    /// For the thread's blocks `at` and `at + APART` of a tile, counted from the text's first.
    #[inline(always)]
    pub(crate) fn new(tables: Tables, keys: impl Keys, header: &Header, at: i32) -> Self {
        let prefix = Prefix::new(tables, keys, header.nonce());
        let low = xor(prefix.bytes23(tables, keys, 0), prefix.low(tables, counter(at)));
        Stream { prefix, low }
    }

    /// In a tile in which the thread's first block is `at`.
    #[inline(always)]
    pub(crate) fn key_stream(&self, tables: Tables, keys: impl Keys, at: i32) -> [Quad; 2] {
        let state = |at: i32| xor(self.low, self.prefix.byte1(tables, counter(at)));
        tables.finish::<ROUNDS, 2>(keys, [state(at), state(at + APART)])
    }

    /// Of the second alone.
    #[inline(always)]
    pub(crate) fn second(&self, tables: Tables, keys: impl Keys, at: i32) -> Quad {
        let state = xor(self.low, self.prefix.byte1(tables, counter(at + APART)));
        let [block] = tables.finish::<ROUNDS, 1>(keys, [state]);
        block
    }
}

/// Blocks between those that a thread has of a tile.
pub(crate) const APART: i32 = ghash::APART as i32;
const _: () = assert!(APART % 256 == 0);

/// The counter of a text's block `at`: the first has 2 (SP 800-38D, 7.1).
#[inline(always)]
const fn counter(at: i32) -> u32 {
    (at as u32).wrapping_add(2)
}

/// The block of both lengths in bits (SP 800-38D, 7.1, step 5).
#[inline(always)]
pub(crate) const fn lengths(bytes: u32) -> Quad {
    [0, (8 * AAD_BYTES).swap_bytes(), 0, (8 * bytes).swap_bytes()]
}

/// Stores this warp's own copy of a record's additional data at `place`, so that no barrier and no registers are needed.
///
/// # Safety
/// The place is this warp's.
#[inline(always)]
pub(crate) unsafe fn store_associated_data(header: &Header, place: u32) {
    // SAFETY: the caller's.
    unsafe {
        if thread::lane() == 0 {
            shared::store_16::<0>(place, header.associated_data(0));
            shared::store_16::<16>(place, header.associated_data(1));
            shared::store_16::<32>(place, header.associated_data(2));
        }
    }
    warp::sync();
}

/// The additional data's block that lies `at` (negative) blocks before the text; zero if there is none.
///
/// # Safety
/// They are stored at `place` by [`store_associated_data`].
#[inline(always)]
pub(crate) unsafe fn associated_data(place: u32, at: i32) -> Quad {
    let index = (at + AAD_BLOCKS as i32) as u32;
    // SAFETY: the caller's.
    if index < AAD_BLOCKS { unsafe { shared::load_16::<0>(place + 16 * index) } } else { [0; 4] }
}

/// `blocks` with the additional data in the place of what lies before the text.
///
/// # Safety
/// As [`associated_data`].
#[inline(always)]
pub(crate) unsafe fn with_associated_data(place: u32, at: i32, blocks: [Quad; 2]) -> [Quad; 2] {
    if at >= 0 {
        return blocks;
    }
    // SAFETY: the caller's.
    let choose = |at: i32, block: Quad| if at < 0 { unsafe { associated_data(place, at) } } else { block };
    [choose(at, blocks[0]), choose(at + APART, blocks[1])]
}

/// The part of a block that belongs to a text of `bytes` bytes, whose block `at` it is; zero elsewhere.
#[inline(always)]
pub(crate) fn inside(block: Quad, at: i32, bytes: u32) -> Quad {
    let start = (at as u32).wrapping_mul(16);
    if at < 0 || start >= bytes {
        return [0; 4];
    }
    let word = |w: usize| {
        let here = (bytes - start).saturating_sub(4 * w as u32);
        if here >= 4 { block[w] } else { block[w] & ((1 << (8 * here)) - 1) }
    };
    if bytes - start >= 16 { block } else { [word(0), word(1), word(2), word(3)] }
}

/// Stores part `part` of the sum for the tag, by one warp.
///
/// # Safety
/// The words are stored, before a barrier; the place at `parts` is this warp's until the next.
#[inline(always)]
pub(crate) unsafe fn store_part(last: u32, lanes: u32, part: u32, parts: u32) {
    // SAFETY: the caller's.
    unsafe { store_sum(ghash::part(last, lanes, part), parts + 16 * part) };
}

/// Stores the sum of all lanes' shares, by one warp.
///
/// # Safety
/// The place is this warp's until the next barrier.
#[inline(always)]
pub(crate) unsafe fn store_sum(share: Element, place: u32) {
    let sum = warp_sum(share);
    if thread::lane().is_multiple_of(8) {
        // SAFETY: the caller's.
        unsafe { shared::store_u32::<0>(place + thread::lane() / 2, sum) };
    }
}

/// Stores the mask of a record's tag, E(K, J0) (SP 800-38D, 7.1), by one warp.
///
/// # Safety
/// The place is this warp's until the next barrier; the tables are filled.
#[inline(always)]
pub(crate) unsafe fn store_mask<const ROUNDS: usize>(
    tables: Tables,
    keys: impl Keys,
    header: &Header,
    place: u32,
) {
    let [a, b, c] = header.nonce();
    let [block] = tables.encrypt::<ROUNDS, 1>(keys, [[a, b, c, 1u32.swap_bytes()]]);
    if thread::lane() == 0 {
        // SAFETY: the caller's.
        unsafe { shared::store_16::<0>(place, block) };
    }
}

/// The tag from the parts and the mask, in every lane of a warp.
///
/// # Safety
/// The parts and the mask are stored, before a barrier.
#[inline(always)]
pub(crate) unsafe fn tag(parts: u32, mask: u32) -> Quad {
    // SAFETY: the caller's.
    let [a, b, c, d] = unsafe {
        let low = xor(shared::load_16::<0>(parts), shared::load_16::<16>(parts));
        xor(low, xor(shared::load_16::<32>(parts), shared::load_16::<48>(parts)))
    };
    // SAFETY: the caller's.
    let mask = unsafe { shared::load_16::<0>(mask) };
    xor([a.swap_bytes(), b.swap_bytes(), c.swap_bytes(), d.swap_bytes()], mask)
}

impl<const ROUNDS: usize> Sealed<'_, ROUNDS> {
    /// Makes the key of `sender` the one that opens. A barrier.
    ///
    /// # Safety
    /// All threads of the block, which have passed a barrier since they last opened, and pass another before they ask
    /// [`Self::sender`]; the table has the sender.
    #[inline(always)]
    pub(crate) unsafe fn switch_to(&self, sender: u32) {
        let key = SenderKey::address(self.params.senders, sender);
        // SAFETY: the caller's; the places are those of the key before.
        unsafe {
            let matrices = Matrices::fetch(key);
            load_lanes(key, OPENER_LANES);
            store_round_key::<SENDER_ROUND_KEYS>(fetch_round_key(key));
            Matrices::store(matrices, OPENER_MATRICES);
            device::sync_threads();
            // After the barrier: before it, others may still compare with the sender before.
            if thread::index() == 0 {
                shared::store_u32::<0>(SENDER, sender);
            }
        }
    }

    /// Whose key opens, since [`Self::switch_to`].
    #[inline(always)]
    pub(crate) fn sender() -> u32 {
        // SAFETY: stored before the latest barrier. From one lane, so that the compiler sees that it is uniform.
        unsafe { warp::shuffle(shared::load_u32::<0>(SENDER), 0) }
    }

    /// Stores this thread's word of `chains` for the tag.
    ///
    /// # Safety
    /// All threads of the block; `last` is this block's until the next barrier.
    #[inline(always)]
    unsafe fn store_last(chains: &mut Chains, matrices: Matrices, bytes: u32, last: u32) {
        chains.add_last(lengths(bytes));
        // SAFETY: the caller's.
        unsafe { shared::store_u32::<0>(last + 4 * thread::index(), chains.last(matrices)) };
    }

    /// Stores what the tags of a record need of each thread's chains, of what is opened and of what is sealed. Ends with a
    /// barrier.
    ///
    /// # Safety
    /// All threads of the block; the places at `tags` are this block's, and were last read before the latest barrier.
    #[inline(always)]
    pub(crate) unsafe fn store_lasts(
        &self,
        [opens, seals]: [bool; 2],
        chains_in: &mut Chains,
        chains_out: &mut Chains,
        bytes: u32,
        tags: u32,
    ) {
        // SAFETY: the caller's; each is written before a barrier.
        unsafe {
            if opens {
                Self::store_last(chains_in, self.opener_matrices, bytes, tags);
            }
            if seals {
                Self::store_last(chains_out, self.own_matrices, bytes, tags + LAST_BYTES);
            }
            device::sync_threads();
        }
    }

    /// The tags of a record, in every lane of warp 0: of what was opened, and of what was sealed, or else the same. A barrier.
    ///
    /// # Safety
    /// After [`Self::store_lasts`], by all threads of the block; the masks are stored.
    #[inline(always)]
    pub(crate) unsafe fn tags(opens: bool, seals: bool, tags: u32) -> (Quad, Quad) {
        // SAFETY: the caller's; each place is written before a barrier.
        unsafe {
            let (warp, part) = (thread::warp(), thread::warp() % 4);
            if opens && warp < 4 {
                store_part(tags, OPENER_LANES, part, tags + PARTS);
            }
            if seals && (4..8).contains(&warp) {
                store_part(tags + LAST_BYTES, OWN_LANES, part, tags + PARTS + PARTS_BYTES);
            }
            device::sync_threads();
            let (mut tag_in, mut tag_out) = ([0; 4], [0; 4]);
            if warp == 0 {
                if opens {
                    tag_in = tag(tags + PARTS, tags + MASKS);
                    tag_out = tag_in;
                }
                if seals {
                    tag_out = tag(tags + PARTS + PARTS_BYTES, tags + MASKS + 16);
                }
            }
            (tag_in, tag_out)
        }
    }
}

impl<const ROUNDS: usize> Padded<'_, ROUNDS> {
    /// This block's memory for a pad that is missing, the opening side's or the sealing side's.
    #[inline(always)]
    fn scratch(&self, side: u64) -> u64 {
        self.scratch + (2 * thread::block_index() as u64 + side) * self.sealed.params.ring.record_bytes as u64
    }

    /// Claims the record's pads, or makes them. Ends with a barrier.
    ///
    /// # Safety
    /// All threads of the block, which have passed a barrier since they last used a record's pads and masks; the tables are
    /// filled, and the opener's keys are the sender's.
    #[inline(always)]
    unsafe fn claim_pads(
        &self,
        step: &Step,
        record: &Record,
        [header_in, header_out]: [&Header; 2],
        masks: u32,
    ) {
        let opens = step.actions & RECEIVE != 0;
        let seals = step.actions & (SEND | FORWARD) == SEND;
        let ring = &self.sealed.params.ring;
        let start = record.index as u64 * ring.record_bytes as u64;
        // Each side by a warp of its own, so that neither waits for the other.
        let (warp, lane) = (thread::warp(), thread::lane());
        if lane == 0 && (opens && warp == 1 || seals && warp == 2) {
            let side = (warp - 1) as u64;
            let header = if warp == 1 { header_in } else { header_out };
            // SAFETY: the caller's; the table has an entry for the step, whose number is that of what it sends.
            unsafe {
                let entry = self.pads
                    + step.sends as u64 * size_of::<StepPads>() as u64
                    + side * size_of::<ChunkPads>() as u64;
                let pads = ChunkPads::load(entry);
                let (index, stride) = (record.index, ring.record_bytes);
                let mask = masks + 16 * side as u32;
                let claimed =
                    claim_of_chunk(&pads, header.sequence, header.step, index, record.bytes, stride, mask);
                let pad = if claimed { pads.pads + start } else { self.scratch(side) };
                shared::store_u32::<PADS>(8 * side as u32, pad as u32);
                shared::store_u32::<PADS>(8 * side as u32 + 4, (pad >> 32) as u32);
                shared::store_u32::<CLAIMED>(4 * side as u32, claimed as u32);
            }
        }
        device::sync_threads();
        // SAFETY: the caller's; the scratch memory is this block's.
        unsafe {
            if opens && Self::missing(0) {
                self.make_missing(self.sealed.opener, header_in, 0, record.bytes, masks);
            }
            if seals && Self::missing(1) {
                self.make_missing(
                    &self.sealed.params.own.round_keys,
                    header_out,
                    1,
                    record.bytes,
                    masks + 16,
                );
            }
        }
    }

    /// Whether the record's pad of a side was not claimed.
    ///
    /// # Safety
    /// [`Self::claim_pads`] stored it, before a barrier.
    #[inline(always)]
    unsafe fn missing(side: u32) -> bool {
        // From one lane, so that the compiler sees that it is uniform.
        // SAFETY: the caller's.
        unsafe { warp::shuffle(shared::load_u32::<CLAIMED>(4 * side), 0) == 0 }
    }

    /// Makes a pad that is missing, and its record's mask. A barrier.
    ///
    /// # Safety
    /// As [`Self::claim_pads`].
    #[inline(always)]
    unsafe fn make_missing(&self, keys: impl Keys, header: &Header, side: u64, bytes: u32, mask: u32) {
        // SAFETY: the caller's.
        unsafe {
            make_pad::<ROUNDS>(self.sealed.tables, keys, header, self.scratch(side), bytes);
            if thread::warp() == 0 {
                store_mask::<ROUNDS>(self.sealed.tables, keys, header, mask);
            }
        }
        device::sync_threads();
    }

    /// Where the record's keystream of a side begins. Loaded each time: kept, the addresses would take four registers.
    ///
    /// # Safety
    /// As [`Self::missing`].
    #[inline(always)]
    unsafe fn pad(side: u32) -> u64 {
        // SAFETY: the caller's.
        unsafe {
            let low = shared::load_u32::<PADS>(8 * side);
            let high = shared::load_u32::<{ PADS + 4 }>(8 * side);
            low as u64 | (high as u64) << 32
        }
    }

    /// Overwrites what this block made of the record's pads.
    ///
    /// # Safety
    /// All threads of the block, which have passed a barrier since they last read it.
    #[inline(always)]
    unsafe fn wipe_missing(&self, opens: bool, seals: bool, bytes: u32) {
        // SAFETY: the caller's; the block's scratch memory.
        unsafe {
            let (first, last) = (!(opens && Self::missing(0)) as u64, (seals && Self::missing(1)) as u64);
            let mut side = first;
            while side <= last {
                let mut at = 16 * thread::index();
                while at < bytes {
                    global::store_16(self.scratch(side) + at as u64, [0; 4]);
                    at += 16 * THREADS;
                }
                side += 1;
            }
        }
    }
}

impl<const ROUNDS: usize> Wire for Padded<'_, ROUNDS> {
    const SEALED: bool = true;
    const VERDICT: u32 = VERDICT;

    #[inline(always)]
    unsafe fn transfer(
        &mut self,
        block: &Block,
        step: &Step,
        record: &Record,
        arrived: impl FnOnce() -> bool,
    ) -> Option<(Quad, Quad)> {
        let params = self.sealed.params;
        let (actions, bytes) = (step.actions, record.bytes);
        let opens = actions & RECEIVE != 0;
        let seals = actions & (SEND | FORWARD) == SEND;
        let [header_in, header] = headers(params.call, block, step, record);

        let blocks = bytes.div_ceil(16);
        let tiles = blocks.div_ceil(TILE);
        let pad = tiles * TILE - blocks;
        // Opaque: what is made of it once for all records would take registers of the loop's.
        let index = bits::opaque(thread::index());
        let first = block_of(index, 0) as i32 - pad as i32;
        let before = block_of(index, 1) as i32 - TILE as i32 - pad as i32;

        if opens && step.sealed_by != Sealed::<ROUNDS>::sender() {
            // SAFETY: the latest record ended with barriers, as this one will; all threads are here.
            unsafe { self.sealed.switch_to(step.sealed_by) };
        }
        let tags = TAGS + self.sealed.turn * TAGS_BYTES;
        self.sealed.turn ^= 1;
        // SAFETY: these places were last read before the latest barrier; each is one warp's.
        unsafe { self.claim_pads(step, record, [&header_in, &header], tags + MASKS) };

        let aad_in = ASSOCIATED + thread::warp() * 2 * AAD_BYTES;
        let aad_out = aad_in + AAD_BYTES;
        // SAFETY: this warp's places, whose last use lies before the latest barrier.
        unsafe {
            store_associated_data(&header_in, aad_in);
            store_associated_data(&header, aad_out);
        }

        // All that does not need the record is done by now.
        if !arrived() {
            // SAFETY: a barrier came before; nothing is read any more.
            unsafe { self.wipe_missing(opens, seals, bytes) };
            return None;
        }
        // Empty chains, and the additional data that would lie in the tile before the first in a product of its own: so the
        // loop's chains have two words of state.
        let mut chains_in = Chains::new([0; 4]);
        let mut chains_out = Chains::new([0; 4]);
        if pad < AAD_BLOCKS {
            // SAFETY: all threads of the block come here alike.
            unsafe {
                if opens {
                    chains_in.take([[0; 4], associated_data(aad_in, before)], self.sealed.opener_matrices);
                }
                if seals {
                    chains_out.take([[0; 4], associated_data(aad_out, before)], self.sealed.own_matrices);
                }
            }
        }
        let aligned = (record.input | record.output).is_multiple_of(16);
        // Whether a tile is all text, in whole quads.
        let whole = |tile: u32| {
            aligned
                && tile * TILE >= pad
                && (tile + 1 < tiles || tile + 1 == tiles && bytes.is_multiple_of(16))
        };
        let place = Places::of(&params.ring, record);
        // What a tile begins with: of the received record, else of the vector.
        // SAFETY: places in the record, or none.
        let load = |at: i32, whole: bool| unsafe {
            match opens {
                true => load_received(place.inbox(), [at, at + APART], bytes, whole),
                false => load_local(place.input(), [at, at + APART], bytes, whole),
            }
        };
        let mut tile = 0;
        let mut next = load(first, whole(0));
        while tile < tiles {
            let at = first + (tile * TILE) as i32;
            let places = [at, at + APART];
            let whole_tile = whole(tile);
            let mut values = next;
            // Under way before the products, as the rest is.
            let mut key_stream_out = [[0; 4]; 2];
            if opens {
                let received = values;
                // SAFETY: the record's pad is made; places in it, or none.
                let key_stream = unsafe { load_pad(Self::pad(0), places, bytes, whole_tile) };
                let mut local = [[0; 4]; 2];
                if actions & REDUCE != 0 {
                    // SAFETY: places in the record, or none.
                    local = unsafe { load_local(place.input(), places, bytes, whole_tile) };
                }
                // Before the key stream, which leaves no registers for the counts.
                // SAFETY: all threads of the block run this loop alike; the additional data are stored.
                unsafe {
                    let text = if whole_tile { received } else { with_associated_data(aad_in, at, received) };
                    chains_in.take(text, self.sealed.opener_matrices);
                }
                if actions & FORWARD != 0 {
                    // SAFETY: places in the record, or none.
                    unsafe { store_sent(place.outbox(), places, bytes, whole_tile, received) };
                }
                values = [xor(received[0], key_stream[0]), xor(received[1], key_stream[1])];
                if actions & REDUCE != 0 {
                    // Written out: as a closure it was once not inlined, its quads then in local memory.
                    values = [
                        reduced::<true>(block, values[0], local[0]),
                        reduced::<true>(block, values[1], local[1]),
                    ];
                }
            }
            if seals {
                // SAFETY: as above.
                key_stream_out = unsafe { load_pad(Self::pad(1), places, bytes, whole_tile) };
            }
            next = load(at + TILE as i32, whole(tile + 1));
            if actions & FINISH != 0 {
                values = [finished::<true>(block, values[0]), finished::<true>(block, values[1])];
            }
            if actions & STORE != 0 {
                // SAFETY: as above.
                unsafe { store_local(place.output(), places, bytes, whole_tile, values) };
            }
            if seals {
                let mut sent = [xor(values[0], key_stream_out[0]), xor(values[1], key_stream_out[1])];
                if !whole_tile {
                    sent = [inside(sent[0], places[0], bytes), inside(sent[1], places[1], bytes)];
                }
                // SAFETY: as above.
                unsafe {
                    store_sent(place.outbox(), places, bytes, whole_tile, sent);
                    let text = if whole_tile { sent } else { with_associated_data(aad_out, at, sent) };
                    chains_out.take(text, self.sealed.own_matrices);
                }
            }
            tile += 1;
        }

        // SAFETY: all threads of the block, which come here alike.
        unsafe {
            self.sealed.store_lasts([opens, seals], &mut chains_in, &mut chains_out, bytes, tags);
            self.wipe_missing(opens, seals, bytes);
            Some(Sealed::<ROUNDS>::tags(opens, seals, tags))
        }
    }
}

/// Loads two quads of a received record, each once; `whole` says that both lie inside.
///
/// # Safety
/// The slot is readable to the next multiple of 16.
#[inline(always)]
pub(crate) unsafe fn load_received(slot: u64, places: [i32; 2], bytes: u32, whole: bool) -> [Quad; 2] {
    // SAFETY: the caller's.
    let quad = |at: i32| unsafe { global::load_volatile_16(slot + offset(at)) };
    if whole {
        return [quad(places[0]), quad(places[1])];
    }
    let load = |at: i32| {
        if at < 0 || 16 * at as u32 >= bytes {
            return [0; 4];
        }
        inside(quad(at), at, bytes)
    };
    [load(places[0]), load(places[1])]
}

/// Loads two quads of a record's pad, each once, so that it leaves the cache to records that one rank writes and another reads;
/// `whole` says that both lie inside.
///
/// # Safety
/// The pad is readable to the next multiple of 16.
#[inline(always)]
pub(crate) unsafe fn load_pad(pad: u64, places: [i32; 2], bytes: u32, whole: bool) -> [Quad; 2] {
    if whole {
        // SAFETY: the caller's.
        return unsafe {
            [global::load_once_16(pad + offset(places[0])), global::load_once_16(pad + offset(places[1]))]
        };
    }
    // SAFETY: the caller's.
    unsafe { load_received(pad, places, bytes, false) }
}

/// Stores two quads of a record to send; `quads` are zero beyond its end.
///
/// # Safety
/// The slot is writable to the next multiple of 16.
#[inline(always)]
pub(crate) unsafe fn store_sent(slot: u64, places: [i32; 2], bytes: u32, whole: bool, quads: [Quad; 2]) {
    let store = |at: i32, quad: Quad| {
        if whole || at >= 0 && 16 * (at as u32) < bytes {
            // SAFETY: the caller's.
            unsafe { global::store_16(slot + offset(at), quad) };
        }
    };
    store(places[0], quads[0]);
    store(places[1], quads[1]);
}

/// Loads two quads of a vector; `whole` says that both lie inside, and aligned.
///
/// # Safety
/// `bytes` bytes from `base` can be read.
#[inline(always)]
pub(crate) unsafe fn load_local(base: u64, places: [i32; 2], bytes: u32, whole: bool) -> [Quad; 2] {
    // SAFETY: the caller's.
    unsafe {
        if whole {
            return [global::load_16(base + offset(places[0])), global::load_16(base + offset(places[1]))];
        }
        let load = |at: i32| if at < 0 { [0; 4] } else { load_quad(base, at as u32, bytes) };
        [load(places[0]), load(places[1])]
    }
}

/// Stores two quads of a vector; `whole` as for [`load_local`].
///
/// # Safety
/// `bytes` bytes from `base` can be written.
#[inline(always)]
pub(crate) unsafe fn store_local(base: u64, places: [i32; 2], bytes: u32, whole: bool, quads: [Quad; 2]) {
    // SAFETY: the caller's.
    unsafe {
        if whole {
            global::store_16(base + offset(places[0]), quads[0]);
            global::store_16(base + offset(places[1]), quads[1]);
            return;
        }
        if places[0] >= 0 {
            store_quad(base, places[0] as u32, bytes, quads[0]);
        }
        if places[1] >= 0 {
            store_quad(base, places[1] as u32, bytes, quads[1]);
        }
    }
}

/// Where quad `at` of a record starts, in bytes.
#[inline(always)]
pub(crate) const fn offset(at: i32) -> u64 {
    16 * at as u32 as u64
}

/// Which of a [`SenderKey`]'s round keys this thread copies: one that another copies too, where there are more threads.
///
/// # Safety
/// `key` is the address of a filled [`SenderKey`].
#[inline(always)]
pub(crate) unsafe fn fetch_round_key(key: u64) -> Quad {
    let index = thread::index() % (SHARED_KEYS_BYTES / 16);
    // SAFETY: the caller's.
    unsafe { global::load_16(key + ROUND_KEYS_OFFSET + 16 * index as u64) }
}

/// Stores what [`fetch_round_key`] returned; visible after the next barrier.
///
/// # Safety
/// All threads of the block; nobody reads the place before that barrier.
#[inline(always)]
pub(crate) unsafe fn store_round_key<const PLACE: u32>(round_key: Quad) {
    let index = thread::index();
    if index < SHARED_KEYS_BYTES / 16 {
        // SAFETY: the caller's.
        unsafe { shared::store_16::<PLACE>(16 * index, round_key) };
    }
}

/// What the kernels that open records of any rank begin with: all threads of a block.
///
/// # Safety
/// The addresses in the parameters are valid.
#[inline(always)]
pub(crate) unsafe fn any_sender<const ROUNDS: usize>(params: &SealedRingParams) -> Sealed<'_, ROUNDS> {
    let predecessor = params.ring.predecessor();
    let key = SenderKey::address(params.senders, predecessor);
    // All loads are under way before the first store.
    // SAFETY: the keys are filled, and the table has the predecessor.
    let (own, opener, lanes, round_key) = unsafe {
        (
            Matrices::fetch(params.own.ghash_key),
            Matrices::fetch(key),
            [fetch_lane(params.own.ghash_key), fetch_lane(key)],
            fetch_round_key(key),
        )
    };
    let tables = Tables::fill::<THREADS>();
    // SAFETY: the regions of shared memory are disjoint, and nobody reads them before the barrier.
    let (own_matrices, opener_matrices) = unsafe {
        store_lane(lanes[0], OWN_LANES);
        store_lane(lanes[1], OPENER_LANES);
        store_round_key::<SENDER_ROUND_KEYS>(round_key);
        if thread::index() == 0 {
            shared::store_u32::<0>(SENDER, predecessor);
        }
        (Matrices::store(own, OWN_MATRICES), Matrices::store(opener, OPENER_MATRICES))
    };
    let wire = Sealed {
        params,
        tables,
        opener: SharedKeys(SENDER_ROUND_KEYS),
        own_matrices,
        opener_matrices,
        turn: 0,
    };
    // A block may have no record in the steps before the first that opens.
    device::sync_threads();
    wire
}

kernel! {
    threads = 512,
    shared = PADDED_RING_SHARED,
    /// As `relay_sealed_128`, with keystream that was made ahead where it was.
    fn relay_padded_128(params: PaddedRingParams) {
        // SAFETY: by the launcher's promise.
        unsafe {
            // Made before the collective is entered: what is known of that would take registers of the loop's.
            let sealed = any_sender::<10>(&params.ring);
            let wire = Padded { sealed, pads: params.pads, scratch: params.scratch };
            collective(params.ring.ring, || wire)
        }
    }
}

kernel! {
    threads = 512,
    shared = PADDED_RING_SHARED,
    /// As `relay_sealed_256`, with keystream that was made ahead where it was.
    fn relay_padded_256(params: PaddedRingParams) {
        // SAFETY: by the launcher's promise.
        unsafe {
            // Made before the collective is entered: what is known of that would take registers of the loop's.
            let sealed = any_sender::<14>(&params.ring);
            let wire = Padded { sealed, pads: params.pads, scratch: params.scratch };
            collective(params.ring.ring, || wire)
        }
    }
}
