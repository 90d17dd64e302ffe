//! AES-GCM (NIST SP 800-38D) of many records in one pass: counter mode and GHASH from the same registers.
//!
//! A thread block of 512 takes one record after another. A record's blocks are numbered so that the last ends a tile
//! (see [`ghash`]); what that leaves in front counts as zero blocks, which GHASH doesn't notice, except that
//! the additional data lies right before the text. The tag's mask, counter blocks and record descriptors are prepared a
//! step ahead by one warp, so that the one barrier a segment of 256 KiB costs (or a record, if shorter) is all there is.
//!
//! Shared-memory wavefronts for 32 blocks: 16 (rounds - 2) of look-ups, 8.8 load and store, 8 + 4 matrices, 2.85 to 5.7
//! for the counters' upper bytes.

use crate::aes::{Prefix, RoundKeys, Tables, xor};
use crate::device::{self, Quad, global, shared, thread, warp};

use crate::ghash::{
    self, APART, Chains, LANES_BYTES, LAST_BYTES, MATRICES_BYTES, Matrices, THREADS, TILE, block_of,
    load_lanes, warp_sum,
};
use crate::params::{SHARED_BASE, TABLES_END};

/// One message: its own nonce, additional data, text and tag.
#[repr(C, align(16))]
#[derive(Clone, Copy)]
pub struct Record {
    /// Address of the text that comes in, a multiple of 16.
    pub input: u64,
    /// Address of the text that goes out, a multiple of 16; may be `input`.
    pub output: u64,
    /// Address of the additional data, a multiple of 16, readable to the next multiple of 16.
    pub aad: u64,
    /// Address of the tag, a multiple of 4: written by sealing, read by opening.
    pub tag: u64,
    /// Address of opening's verdict, [`VERIFIED`] or [`FORGED`], a multiple of 4; 0 for none.
    pub verdict: u64,
    /// Bytes of text.
    pub length: u32,
    /// Bytes of additional data, at most [`AAD_MAX`].
    pub aad_length: u32,
    /// The pre-counter block J0, raw words (SP 800-38D section 7.1 step 2); [`nonce_j0`] makes it from a 96-bit nonce.
    pub j0: [u32; 4],
}

/// J0 of a 96-bit nonce, raw words: the nonce, then 1 as a big-endian number.
pub const fn nonce_j0(nonce: [u32; 3]) -> [u32; 4] {
    [nonce[0], nonce[1], nonce[2], 1u32.to_be()]
}

/// Most additional data of a [`Record`]: what surely fits in the half tile before the text.
pub const AAD_MAX: u32 = 2048;

/// What opening stores at [`Record::verdict`]. The host stores 0 first, so that a kernel that never ran is no success.
pub const VERIFIED: u32 = 1;
/// The tag was wrong; the output is zeroed.
pub const FORGED: u32 = 2;

/// Parameters of the kernels on records.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RecordsParams {
    /// The expanded key: [`expand_key`](crate::aes::expand_key).
    pub keys: RoundKeys,
    /// Address of the [`GhashKey`](crate::ghash::GhashKey).
    pub ghash_key: u64,
    /// Address of the [`Record`]s.
    pub records: u64,
    /// How many.
    pub count: u32,
}

// Shared memory after the tables of AES.
const MATRICES_AT: u32 = TABLES_END;
const MASKS_AT: u32 = MATRICES_AT + MATRICES_BYTES;
const SEGMENTS_AT: u32 = MASKS_AT + 16 * THREADS;
const LANES_AT: u32 = SEGMENTS_AT + 2 * SEGMENT_BYTES;
const LAST_AT: u32 = LANES_AT + LANES_BYTES;
const SHARED_END: u32 = LAST_AT + 2 * LAST_BYTES;
/// Dynamic shared memory of the kernels on records.
pub const RECORDS_SHARED: u32 = SHARED_END - SHARED_BASE;

/// Tiles between two barriers, at most.
const SEGMENT_TILES: u32 = 16;
/// A segment's header, and the upper counter bytes' contribution for each 256 counters that it touches.
const SEGMENT_BYTES: u32 = HEADER_BYTES + 16 * (4 * SEGMENT_TILES + 2);
const HEADER_BYTES: u32 = 64;

kernel! {
    threads = 512, shared = RECORDS_SHARED,
    /// Seals records, AES-128.
    fn gcm_seal_records_128(params: RecordsParams) {
        // SAFETY: the kernel's contract.
        unsafe { records::<10, true>(&params) }
    }
}
kernel! {
    threads = 512, shared = RECORDS_SHARED,
    /// Opens records, AES-128.
    fn gcm_open_records_128(params: RecordsParams) {
        // SAFETY: the kernel's contract.
        unsafe { records::<10, false>(&params) }
    }
}
kernel! {
    threads = 512, shared = RECORDS_SHARED,
    /// Seals records, AES-192.
    fn gcm_seal_records_192(params: RecordsParams) {
        // SAFETY: the kernel's contract.
        unsafe { records::<12, true>(&params) }
    }
}
kernel! {
    threads = 512, shared = RECORDS_SHARED,
    /// Opens records, AES-192.
    fn gcm_open_records_192(params: RecordsParams) {
        // SAFETY: the kernel's contract.
        unsafe { records::<12, false>(&params) }
    }
}
kernel! {
    threads = 512, shared = RECORDS_SHARED,
    /// Seals records, AES-256.
    fn gcm_seal_records_256(params: RecordsParams) {
        // SAFETY: the kernel's contract.
        unsafe { records::<14, true>(&params) }
    }
}
kernel! {
    threads = 512, shared = RECORDS_SHARED,
    /// Opens records, AES-256.
    fn gcm_open_records_256(params: RecordsParams) {
        // SAFETY: the kernel's contract.
        unsafe { records::<14, false>(&params) }
    }
}

/// Tiles of a record, and the zero blocks in front of its text in the first.
#[inline(always)]
fn tiles(length: u32) -> (u32, u32) {
    let blocks = length.div_ceil(16);
    // An empty text takes a tile too, for the additional data.
    let tiles = blocks.div_ceil(TILE).max(1);
    (tiles, tiles * TILE - blocks)
}

#[inline(always)]
fn address(quad: Quad, word: usize) -> u64 {
    quad[word] as u64 | (quad[word + 1] as u64) << 32
}

/// The kernels' body.
///
/// # Safety
/// The addresses in the parameters are valid.
#[inline(always)]
unsafe fn records<const ROUNDS: usize, const SEAL: bool>(params: &RecordsParams) {
    let (block, grid, warp_index) = (thread::block_index(), thread::grid_size(), thread::warp());
    if block >= params.count {
        return;
    }
    // SAFETY: the regions of shared memory are disjoint; the key is filled.
    let matrices = unsafe {
        load_lanes(params.ghash_key, LANES_AT);
        Matrices::load(params.ghash_key, MATRICES_AT)
    };
    let tables = Tables::fill::<THREADS>();
    device::sync_threads();

    let mut record = block;
    let mut first_tile = 0;
    let mut segment = 0u32;
    let mut local = 0u32;
    // SAFETY: the first segment's buffer is nobody else's yet.
    unsafe {
        prepare_masks::<ROUNDS>(params, tables, record, grid);
        if warp_index == 1 {
            prepare_segment(params, tables, record, first_tile, SEGMENTS_AT);
        }
    }
    device::sync_threads();
    let mut chains = Chains::new([0; 4]);
    while record < params.count {
        let buffer = SEGMENTS_AT + (segment % 2) * SEGMENT_BYTES;
        // SAFETY: prepared, before a barrier.
        let (j0, texts, more) = unsafe {
            (shared::load_16::<0>(buffer), shared::load_16::<16>(buffer), shared::load_16::<48>(buffer))
        };
        // Shuffled, so that the compiler sees that control flow is uniform.
        let (length, aad_length) = (warp::shuffle(more[2], 0), warp::shuffle(more[3], 0));
        let (tiles, pad) = tiles(length);
        let last_segment = first_tile + SEGMENT_TILES >= tiles;
        let (next_record, next_tile) =
            if last_segment { (record + grid, 0) } else { (record, first_tile + SEGMENT_TILES) };
        if warp_index == (segment + 1) % 16 && next_record < params.count {
            // SAFETY: the other buffer was last read before the latest barrier.
            unsafe {
                prepare_segment(
                    params,
                    tables,
                    next_record,
                    next_tile,
                    SEGMENTS_AT + (segment + 1) % 2 * SEGMENT_BYTES,
                )
            };
        }
        if first_tile == 0 {
            // SAFETY: prepared.
            let aad = unsafe { Aad::new(buffer, aad_length) };
            // SAFETY: the record's additional data.
            chains = Chains::new(unsafe {
                aad.block(block_of(thread::index(), 1) as i32 - TILE as i32 - pad as i32)
            });
        }
        let end_tile = if last_segment { tiles } else { first_tile + SEGMENT_TILES };
        // SAFETY: prepared.
        let counters = unsafe { Counters::<ROUNDS>::new(params, tables, buffer, j0, first_tile, pad) };
        let mut tile = first_tile;
        while tile < end_tile {
            // This thread's blocks, counted from the text's first.
            let at = tile as i32 * TILE as i32 - pad as i32 + block_of(thread::index(), 0) as i32;
            let places = [at, at + APART as i32];
            // SAFETY: places in the record's text, or none.
            let input = unsafe {
                let text = address(texts, 0);
                [load_text(text, places[0], length), load_text(text, places[1], length)]
            };
            // SAFETY: the counters are of this segment.
            let key_stream = unsafe { counters.key_stream(&params.keys, tile - first_tile) };
            let sum = |i: usize| xor(input[i], key_stream[i]);
            // SAFETY: as above.
            let output = unsafe {
                [
                    store_text(address(texts, 2), places[0], length, sum(0)),
                    store_text(address(texts, 2), places[1], length, sum(1)),
                ]
            };
            let mut text = if SEAL { output } else { input };
            if at < 0 {
                // SAFETY: the record's additional data.
                unsafe {
                    let aad = Aad::new(buffer, aad_length);
                    let choose = |at, block| if at < 0 { aad.block(at) } else { block };
                    text = [choose(places[0], text[0]), choose(places[1], text[1])];
                }
            }
            // SAFETY: all threads of the block run this loop alike.
            unsafe { chains.take(text, matrices) };
            tile += 1;
        }
        let last = LAST_AT + (segment % 2) * LAST_BYTES;
        if last_segment {
            chains.add_last(lengths(aad_length, length));
            // SAFETY: all threads of the block; the place was last read before the latest barrier.
            unsafe { shared::store_u32::<0>(last + 4 * thread::index(), chains.last(matrices)) };
        }
        let finishes = last_segment && warp_index == segment % 16;
        let (mut tag, mut verdict) = (0, 0);
        if finishes {
            // Before the barrier: after it the buffer is the next but one segment's.
            // SAFETY: prepared.
            unsafe {
                tag = address(shared::load_16::<32>(buffer), 2);
                verdict = address(shared::load_16::<48>(buffer), 0);
            }
        }
        device::sync_threads();
        if finishes {
            // SAFETY: the barrier came after all words and all texts of the record.
            unsafe { finish::<SEAL>(last, local, tag, verdict, address(texts, 2), length) };
        }
        if last_segment {
            local += 1;
            if local.is_multiple_of(THREADS) {
                // The masks of the records up to here are used up after this barrier.
                device::sync_threads();
                // SAFETY: as at the start.
                unsafe { prepare_masks::<ROUNDS>(params, tables, next_record, grid) };
                device::sync_threads();
            }
        }
        (record, first_tile) = (next_record, next_tile);
        segment += 1;
    }
}

/// The block of both lengths in bits (SP 800-38D section 7.1 step 5).
#[inline(always)]
fn lengths(aad: u32, text: u32) -> Quad {
    [(aad >> 29).swap_bytes(), (aad << 3).swap_bytes(), (text >> 29).swap_bytes(), (text << 3).swap_bytes()]
}

/// Additional data in memory.
struct Aad {
    address: u64,
    length: u32,
}

impl Aad {
    /// # Safety
    /// `buffer` is prepared.
    #[inline(always)]
    unsafe fn new(buffer: u32, length: u32) -> Self {
        // SAFETY: the caller's.
        Aad { address: address(unsafe { shared::load_16::<32>(buffer) }, 0), length }
    }

    /// The block that lies `at` (negative) blocks before the text; zero if there is none.
    ///
    /// # Safety
    /// The addresses are valid.
    #[inline(always)]
    unsafe fn block(&self, at: i32) -> Quad {
        let blocks = self.length.div_ceil(16) as i32;
        let index = at + blocks;
        if index < 0 || at >= 0 {
            return [0; 4];
        }
        // SAFETY: the caller's.
        let block = unsafe { global::load_16(self.address + 16 * index as u64) };
        keep(block, self.length - 16 * index as u32)
    }
}

/// The first `bytes` bytes of a block, the rest zero.
#[inline(always)]
pub(crate) fn keep(block: Quad, bytes: u32) -> Quad {
    let word = |w: usize| {
        let here = bytes.saturating_sub(4 * w as u32);
        if here >= 4 { block[w] } else { block[w] & ((1 << (8 * here)) - 1) }
    };
    [word(0), word(1), word(2), word(3)]
}

/// Loads block `at` of a text of `length` bytes; what lies outside is zero.
///
/// # Safety
/// The text is valid, its address a multiple of 16.
#[inline(always)]
unsafe fn load_text(text: u64, at: i32, length: u32) -> Quad {
    let start = (at as u32).wrapping_mul(16);
    let address = text + start as u64;
    if at < 0 || start >= length {
        [0; 4]
    } else if length - start >= 16 {
        // SAFETY: 16 bytes of the text.
        unsafe { global::load_volatile_16(address) }
    } else {
        // Backwards, so that each byte moves to its place by shifts.
        let mut block = [0; 4];
        let mut i = length - start;
        while i > 0 {
            i -= 1;
            // SAFETY: a byte of the text.
            let byte = unsafe { global::load_u8(address + i as u64) } as u32;
            let [a, b, c, d] = block;
            block = [a << 8 | byte, b << 8 | a >> 24, c << 8 | b >> 24, d << 8 | c >> 24];
        }
        block
    }
}

/// Stores block `at` of a text of `length` bytes, and returns what was stored, zero outside.
///
/// # Safety
/// As [`load_text`].
#[inline(always)]
unsafe fn store_text(text: u64, at: i32, length: u32, block: Quad) -> Quad {
    let start = (at as u32).wrapping_mul(16);
    let address = text + start as u64;
    if at < 0 || start >= length {
        [0; 4]
    } else if length - start >= 16 {
        // SAFETY: 16 bytes of the text.
        unsafe { global::store_16(address, block) };
        block
    } else {
        let [mut a, mut b, mut c, mut d] = block;
        let mut i = 0;
        while i < length - start {
            // SAFETY: a byte of the text.
            unsafe { global::store_u8(address + i as u64, a as u8) };
            (a, b, c, d) = (a >> 8 | b << 24, b >> 8 | c << 24, c >> 8 | d << 24, d >> 8);
            i += 1;
        }
        keep(block, length - start)
    }
}

/// One warp: adds the chains and the mask; writes the tag, or compares and writes the verdict.
///
/// # Safety
/// The chains' words and the mask are stored, before a barrier.
#[inline(always)]
unsafe fn finish<const SEAL: bool>(last: u32, local: u32, at: u64, verdict: u64, output: u64, length: u32) {
    let lane = thread::lane();
    let word = lane % 4;
    let at = at + 4 * word as u64;
    // SAFETY: the caller's.
    let tag = unsafe {
        let sum = warp::shuffle(warp_sum(ghash::total(last, LANES_AT)), 8 * word);
        sum.swap_bytes() ^ shared::load_u32::<0>(MASKS_AT + 16 * (local % THREADS) + 4 * word)
    };
    if SEAL {
        if lane < 4 {
            // SAFETY: the record's tag.
            unsafe { global::store_u32(at, tag) };
        }
        return;
    }
    // SAFETY: the record's tag.
    let difference = tag ^ unsafe { global::load_volatile_u32(at) };
    let forged = warp::ballot(difference != 0) != 0;
    if forged {
        // Plaintext of a forged record never stays: all threads' stores came before the barrier, these come before
        // the verdict.
        let mut i = 4 * lane;
        while i + 4 <= length {
            // SAFETY: the record's output.
            unsafe { global::store_u32(output + i as u64, 0) };
            i += 128;
        }
        let i = length / 4 * 4 + lane;
        if i < length {
            // SAFETY: as above.
            unsafe { global::store_u8(output + i as u64, 0) };
        }
        device::fence::system();
        warp::sync();
    }
    if verdict != 0 && lane == 0 {
        // SAFETY: the record's verdict.
        unsafe { global::store_u32(verdict, if forged { FORGED } else { VERIFIED }) };
    }
}

/// The masks E(K, J0) of this block's next 512 records from `record`, a lane each.
///
/// # Safety
/// The masks are nobody's until the next barrier.
#[inline(always)]
unsafe fn prepare_masks<const ROUNDS: usize>(params: &RecordsParams, tables: Tables, record: u32, grid: u32) {
    let mine = record + thread::index() * grid;
    // By warps, so that those without records go on.
    if record + thread::warp() * 32 * grid < params.count {
        let valid = mine < params.count;
        let place = params.records + 64 * (if valid { mine } else { record }) as u64;
        // SAFETY: the record's J0.
        let j0 = unsafe { global::load_16(place + 48) };
        let [mask] = tables.encrypt::<ROUNDS, 1>(&params.keys, [j0]);
        // SAFETY: this thread's place.
        unsafe { shared::store_16::<0>(MASKS_AT + 16 * thread::index(), mask) };
    }
}

/// One warp: fills the buffer of a segment.
///
/// # Safety
/// The buffer is nobody else's until the next barrier.
#[inline(always)]
unsafe fn prepare_segment(params: &RecordsParams, tables: Tables, record: u32, first_tile: u32, buffer: u32) {
    let lane = thread::lane();
    let place = params.records + 64 * record as u64;
    // SAFETY: a record's descriptor; the tables are filled.
    unsafe {
        let texts = global::load_16(place);
        let addresses = global::load_16(place + 16);
        let more = global::load_16(place + 32);
        let j0 = global::load_16(place + 48);
        let length = more[2];
        if lane == 0 {
            shared::store_16::<0>(buffer, j0);
            shared::store_16::<16>(buffer, texts);
            shared::store_16::<32>(buffer, addresses);
            shared::store_16::<48>(buffer, more);
        }
        let (tiles, pad) = tiles(length);
        let first_counter = counter_at(j0, first_tile, pad);
        let in_segment = (tiles - first_tile).min(SEGMENT_TILES);
        let prefix = Prefix::new(tables, &params.keys, [j0[0], j0[1], j0[2]]);
        let mut entry = lane;
        while entry - lane <= 4 * in_segment {
            let counter = (first_counter & !255).wrapping_add(256 * entry);
            let upper = prefix.upper(tables, &params.keys, counter);
            if entry < 4 * SEGMENT_TILES + 2 {
                shared::store_16::<HEADER_BYTES>(buffer + 16 * entry, upper);
            }
            entry += 32;
        }
    }
}

/// The counter of a tile's first block; that of the text's first is J0's plus 1 (SP 800-38D section 7.1 step 3). It
/// wraps at 2^32 as the standard's does.
#[inline(always)]
fn counter_at(j0: Quad, tile: u32, pad: u32) -> u32 {
    (tile * TILE).wrapping_sub(pad).wrapping_add(j0[3].swap_bytes()).wrapping_add(1)
}

/// One thread's counters in a segment.
struct Counters<const ROUNDS: usize> {
    tables: Tables,
    /// What the counters' last byte adds to the state after round 2: it is the same in both blocks.
    low: Quad,
    /// Of each block: where the first tile's upper bytes' part lies.
    upper: [u32; 2],
}

impl<const ROUNDS: usize> Counters<ROUNDS> {
    /// # Safety
    /// The segment's buffer is prepared.
    #[inline(always)]
    unsafe fn new(
        params: &RecordsParams,
        tables: Tables,
        buffer: u32,
        j0: Quad,
        first_tile: u32,
        pad: u32,
    ) -> Self {
        let first_counter = counter_at(j0, first_tile, pad);
        let first = (first_counter & 255) + block_of(thread::index(), 0);
        let second = first + APART;
        let prefix = Prefix::new(tables, &params.keys, [j0[0], j0[1], j0[2]]);
        Counters {
            tables,
            low: prefix.low(tables, first),
            upper: [first, second].map(|counter| buffer + HEADER_BYTES + 16 * (counter >> 8)),
        }
    }

    /// The key stream for this thread's two blocks of the segment's tile `tile`.
    ///
    /// # Safety
    /// As [`new`](Self::new).
    #[inline(always)]
    unsafe fn key_stream(&self, keys: &RoundKeys, tile: u32) -> [Quad; 2] {
        // SAFETY: prepared.
        let (first, second) = unsafe {
            (shared::load_16::<0>(self.upper[0] + 64 * tile), shared::load_16::<0>(self.upper[1] + 64 * tile))
        };
        self.tables.finish::<ROUNDS, 2>(keys, [xor(self.low, first), xor(self.low, second)])
    }
}
