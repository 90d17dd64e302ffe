//! AES-GCM (NIST SP 800-38D) of many records in one pass: counter mode and GHASH from the same registers.
//!
//! A thread block takes one record after another. A record's blocks are numbered so that the last ends a tile
//! (see [`ghash`]); what that leaves in front counts as zero blocks, which GHASH doesn't notice, except that
//! the additional data lies right before the text.
//!
//! Segments of at most 16 tiles lie between barriers. Warps take turns in preparing the next segment (descriptor, additional
//! data, counters' upper bytes) and in ending the record before; the two tiles that the chains take together let the
//! others run ahead meanwhile.
//!
//! Shared-memory wavefronts for 32 blocks: 16 (rounds - 2) of look-ups, 8.8 load and store, 8 + 2 matrices, 2.85 to 5.7
//! for the counters' upper bytes.

use crate::aes::{Prefix, RoundKeys, Tables, xor};
use crate::device::{self, Quad, bits, global, shared, thread, warp};

use crate::ghash::{
    self, APART, GroupedChains, LANES_BYTES, LAST_BYTES, THREADS, TILE, TileChains, load_lanes, warp_sum,
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

// Shared memory after the tables of AES: in this order matrices, masks, segments, lanes, words, parts. What lies before the
// masks depends on the chains, and so does all that follows.
const MATRICES_AT: u32 = TABLES_END;
const SEGMENTS: u32 = 16 * MASKS;
const LANES: u32 = SEGMENTS + 2 * SEGMENT_BYTES;
const LAST: u32 = LANES + LANES_BYTES;
const PARTS: u32 = LAST + 2 * LAST_BYTES;
const REST_BYTES: u32 = PARTS + 2 * 64;
/// Dynamic shared memory of the kernels on records.
pub const RECORDS_SHARED: u32 = records_shared::<GroupedChains>();

/// Dynamic shared memory of kernels on records with these chains.
pub(crate) const fn records_shared<C: TileChains>() -> u32 {
    masks_at::<C>() + REST_BYTES - SHARED_BASE
}

/// Where the masks begin.
#[inline(always)]
const fn masks_at<C: TileChains>() -> u32 {
    MATRICES_AT + C::MATRICES_BYTES
}

/// Records for which a thread block prepares masks at once.
const MASKS: u32 = 256;
const _: () = assert!(MASKS <= THREADS && MASKS.is_multiple_of(32));

/// Tiles between two barriers, at most.
const SEGMENT_TILES: u32 = 16;
// A segment's buffer: header, additional data up to the text, the upper counter bytes' contribution for each 256 counters
// that the segment touches.
const AAD_END: u32 = HEADER_BYTES + AAD_MAX;
const UPPER: u32 = AAD_END;
const SEGMENT_BYTES: u32 = UPPER + 16 * (4 * SEGMENT_TILES + 2);
const HEADER_BYTES: u32 = 32;

#[cfg(any(ringseal_sm_90a, not(target_arch = "nvptx64")))]
kernel! {
    threads = THREADS, shared = RECORDS_SHARED,
    /// Seals records, AES-128.
    fn gcm_seal_records_128(params: RecordsParams) {
        // SAFETY: the kernel's contract.
        unsafe { records::<10, true, GroupedChains>(&params) }
    }
}
#[cfg(any(ringseal_sm_90a, not(target_arch = "nvptx64")))]
kernel! {
    threads = THREADS, shared = RECORDS_SHARED,
    /// Opens records, AES-128.
    fn gcm_open_records_128(params: RecordsParams) {
        // SAFETY: the kernel's contract.
        unsafe { records::<10, false, GroupedChains>(&params) }
    }
}
#[cfg(any(ringseal_sm_90a, not(target_arch = "nvptx64")))]
kernel! {
    threads = THREADS, shared = RECORDS_SHARED,
    /// Seals records, AES-192.
    fn gcm_seal_records_192(params: RecordsParams) {
        // SAFETY: the kernel's contract.
        unsafe { records::<12, true, GroupedChains>(&params) }
    }
}
#[cfg(any(ringseal_sm_90a, not(target_arch = "nvptx64")))]
kernel! {
    threads = THREADS, shared = RECORDS_SHARED,
    /// Opens records, AES-192.
    fn gcm_open_records_192(params: RecordsParams) {
        // SAFETY: the kernel's contract.
        unsafe { records::<12, false, GroupedChains>(&params) }
    }
}
#[cfg(any(ringseal_sm_90a, not(target_arch = "nvptx64")))]
kernel! {
    threads = THREADS, shared = RECORDS_SHARED,
    /// Seals records, AES-256.
    fn gcm_seal_records_256(params: RecordsParams) {
        // SAFETY: the kernel's contract.
        unsafe { records::<14, true, GroupedChains>(&params) }
    }
}
#[cfg(any(ringseal_sm_90a, not(target_arch = "nvptx64")))]
kernel! {
    threads = THREADS, shared = RECORDS_SHARED,
    /// Opens records, AES-256.
    fn gcm_open_records_256(params: RecordsParams) {
        // SAFETY: the kernel's contract.
        unsafe { records::<14, false, GroupedChains>(&params) }
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
pub(crate) unsafe fn records<const ROUNDS: usize, const SEAL: bool, C: TileChains>(params: &RecordsParams) {
    if thread::block_index() >= params.count {
        return;
    }
    // SAFETY: the regions of shared memory are disjoint; the key is filled.
    let matrices = unsafe {
        load_lanes(params.ghash_key, masks_at::<C>() + LANES);
        C::store(C::fetch(params.ghash_key), MATRICES_AT)
    };
    let tables = Tables::fill::<THREADS>();
    device::sync_threads();
    let mut cursor = Cursor::new();
    // SAFETY: the first segment's buffer is nobody else's yet; the tables are filled.
    unsafe {
        prepare_masks::<ROUNDS, C>(params, tables, cursor.record);
        if thread::warp() == 1 {
            prepare_segment(params, tables, cursor.record, cursor.first_tile, cursor.buffer::<C>());
        }
    }
    device::sync_threads();
    let mut chains = C::new([0; 4], 0);
    while cursor.record < params.count {
        let buffer = cursor.buffer::<C>();
        // SAFETY: prepared, before a barrier.
        let (texts, more) = unsafe { (shared::load_16::<0>(buffer), shared::load_16::<16>(buffer)) };
        // Shuffled, so that the compiler sees that control flow is uniform.
        let length = warp::shuffle(more[0], 0);
        let (tiles, pad) = tiles(length);
        let end_tile = cursor.end_tile(tiles);
        let next = cursor.next(end_tile, tiles);
        if thread::warp() == (cursor.segment + 1) % 16 && next.record < params.count {
            // SAFETY: the other buffer was last read before the latest barrier.
            unsafe { prepare_segment(params, tables, next.record, next.first_tile, next.buffer::<C>()) };
        }
        // Of this thread's first block in the segment: its low byte is all blocks' in this segment.
        let counter = (more[2] & 255) + thread::index();
        let low = Prefix::low_of(more[3], tables, &params.keys, counter);
        let mut upper = buffer + UPPER + 16 * (counter >> 8);
        if cursor.first_tile == 0 {
            let before = thread::index() as i32 - (THREADS + pad) as i32;
            // SAFETY: prepared.
            chains = C::new(unsafe { aad_block(buffer, before) }, tiles);
        }
        let mut tile = cursor.first_tile;
        while tile < end_tile {
            // The tile's first block, counted from the text's first.
            let start = (tile * TILE) as i32 - pad as i32;
            let at = start + thread::index() as i32;
            // Opaque, so that no register holds the number of blocks beside that of bytes.
            let bytes = if C::RECOMPUTES { bits::opaque(length) } else { length };
            let whole = start >= 0 && start as u32 + TILE <= bytes / 16;
            // SAFETY: places in the record's text, or none.
            let input = unsafe { load_texts(address(texts, 0), at, length, whole) };
            // SAFETY: prepared.
            let states =
                unsafe { [xor(low, shared::load_16::<0>(upper)), xor(low, shared::load_16::<32>(upper))] };
            let key_stream = tables.finish::<ROUNDS, 2>(&params.keys, states);
            let sum = [xor(input[0], key_stream[0]), xor(input[1], key_stream[1])];
            // SAFETY: places in the record's text, or none.
            let output = unsafe { store_texts(address(texts, 2), at, length, whole, sum) };
            let mut text = if SEAL { output } else { input };
            if start < 0 {
                // SAFETY: prepared.
                unsafe {
                    let choose = |at: i32, block| if at < 0 { aad_block(buffer, at) } else { block };
                    text = [choose(at, text[0]), choose(at + APART as i32, text[1])];
                }
            }
            // SAFETY: all threads of the block run this loop alike.
            unsafe { chains.take(text, tile, tiles, matrices) };
            upper += 64;
            tile += 1;
        }
        let ends = tile == tiles;
        if ends {
            // SAFETY: as above; the words were last read before the latest barrier.
            unsafe {
                // Loaded again rather than kept.
                let [length, aad_length, ..] = shared::load_16::<16>(buffer);
                let word = chains.last(lengths(aad_length, length), params.ghash_key, matrices);
                shared::store_u32::<0>(last_at::<C>(cursor.local) + 4 * thread::index(), word);
            }
        }
        device::sync_threads();
        // SAFETY: the barrier came after all words and texts of the record, and after all parts of the one before.
        unsafe {
            if cursor.first_tile == 0 && cursor.local > 0 && thread::warp() == (cursor.segment + 9) % 16 {
                finish::<SEAL, C>(params, cursor.record - thread::grid_size(), cursor.local - 1);
            }
            if ends && thread::warp().is_multiple_of(5) {
                store_part::<C>(cursor.local, thread::warp() / 5);
            }
        }
        cursor = cursor.next(tile, tiles);
        if ends && cursor.local.is_multiple_of(MASKS) {
            // The masks of the records up to here are used up after this barrier.
            device::sync_threads();
            // SAFETY: as at the start.
            unsafe { prepare_masks::<ROUNDS, C>(params, tables, cursor.record) };
            device::sync_threads();
        }
    }
    device::sync_threads();
    if thread::warp() == 0 {
        // SAFETY: as above.
        unsafe { finish::<SEAL, C>(params, cursor.record - thread::grid_size(), cursor.local - 1) };
    }
}

/// A place in the row of segments that a thread block takes.
#[derive(Clone, Copy)]
struct Cursor {
    record: u32,
    first_tile: u32,
    /// The segment's number, from 0.
    segment: u32,
    /// The record's number in this block, from 0.
    local: u32,
}

impl Cursor {
    #[inline(always)]
    fn new() -> Self {
        Cursor { record: thread::block_index(), first_tile: 0, segment: 0, local: 0 }
    }

    /// Where this segment of a record of `tiles` tiles ends.
    #[inline(always)]
    fn end_tile(self, tiles: u32) -> u32 {
        tiles.min(self.first_tile + SEGMENT_TILES)
    }

    /// The segment after this, which ends with `end_tile` of `tiles` tiles.
    #[inline(always)]
    fn next(self, end_tile: u32, tiles: u32) -> Self {
        let segment = self.segment + 1;
        if end_tile == tiles {
            let record = self.record + thread::grid_size();
            Cursor { record, first_tile: 0, segment, local: self.local + 1 }
        } else {
            Cursor { first_tile: end_tile, segment, ..self }
        }
    }

    #[inline(always)]
    fn buffer<C: TileChains>(self) -> u32 {
        masks_at::<C>() + SEGMENTS + self.segment % 2 * SEGMENT_BYTES
    }
}

/// Where the words for the tag of the block's record number `local` lie.
#[inline(always)]
fn last_at<C: TileChains>(local: u32) -> u32 {
    masks_at::<C>() + LAST + local % 2 * LAST_BYTES
}

/// The block of both lengths in bits (SP 800-38D section 7.1 step 5).
#[inline(always)]
fn lengths(aad: u32, text: u32) -> Quad {
    [(aad >> 29).swap_bytes(), (aad << 3).swap_bytes(), (text >> 29).swap_bytes(), (text << 3).swap_bytes()]
}

/// The block of additional data that lies `at` (negative) blocks before the text; zero if there is none.
///
/// # Safety
/// `buffer` is prepared, of a segment that begins a record.
#[inline(always)]
unsafe fn aad_block(buffer: u32, at: i32) -> Quad {
    // SAFETY: the caller's.
    let [_, aad_length, ..] = unsafe { shared::load_16::<16>(buffer) };
    if at >= 0 || at + (aad_length.div_ceil(16) as i32) < 0 {
        return [0; 4];
    }
    // SAFETY: the caller's.
    unsafe { shared::load_16::<AAD_END>(buffer.wrapping_add_signed(16 * at)) }
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

/// A thread's two blocks of a tile, the first of which is block `at` of the text: see [`load_text`]. `whole`, the same in
/// all threads, tells that all blocks of the tile are whole blocks of the text.
///
/// # Safety
/// As [`load_text`].
#[inline(always)]
unsafe fn load_texts(text: u64, at: i32, length: u32, whole: bool) -> [Quad; 2] {
    // SAFETY: the caller's.
    unsafe {
        if whole {
            let address = text + 16 * at as u64;
            [global::load_volatile_16(address), global::load_volatile_16(address + 16 * APART as u64)]
        } else {
            [load_text(text, at, length), load_text(text, at + APART as i32, length)]
        }
    }
}

/// Stores a thread's two blocks of a tile, and returns what was stored: see [`store_text`] and [`load_texts`].
///
/// # Safety
/// As [`load_text`].
#[inline(always)]
unsafe fn store_texts(text: u64, at: i32, length: u32, whole: bool, blocks: [Quad; 2]) -> [Quad; 2] {
    // SAFETY: the caller's.
    unsafe {
        if whole {
            let address = text + 16 * at as u64;
            global::store_16(address, blocks[0]);
            global::store_16(address + 16 * APART as u64, blocks[1]);
            blocks
        } else {
            [store_text(text, at, length, blocks[0]), store_text(text, at + APART as i32, length, blocks[1])]
        }
    }
}

/// One of four warps: stores part `part` of the tag of the block's record number `local`, the mask in the first.
///
/// # Safety
/// The chains' words and the mask are stored, before a barrier; the parts were last read before that.
#[inline(always)]
unsafe fn store_part<C: TileChains>(local: u32, part: u32) {
    let word = thread::lane() / 8;
    // SAFETY: the caller's.
    unsafe {
        let sum = warp_sum(ghash::part(last_at::<C>(local), masks_at::<C>() + LANES, part)).swap_bytes();
        let mask = shared::load_u32::<0>(masks_at::<C>() + 16 * (local % MASKS) + 4 * word);
        if thread::lane().is_multiple_of(8) {
            shared::store_u32::<0>(
                parts_at::<C>(local) + 16 * part + 4 * word,
                sum ^ if part == 0 { mask } else { 0 },
            );
        }
    }
}

/// Where the parts of the tag of the block's record number `local` lie.
#[inline(always)]
fn parts_at<C: TileChains>(local: u32) -> u32 {
    masks_at::<C>() + PARTS + local % 2 * 64
}

/// One warp: adds the parts of a record's tag, the block's number `local`; writes the tag, or compares and writes the
/// verdict.
///
/// # Safety
/// The parts are stored, before a barrier; so are all texts of the record.
#[inline(always)]
unsafe fn finish<const SEAL: bool, C: TileChains>(params: &RecordsParams, record: u32, local: u32) {
    let lane = thread::lane();
    let place = params.records + 64 * record as u64;
    // SAFETY: the record's descriptor.
    let (texts, addresses, more) =
        unsafe { (global::load_16(place), global::load_16(place + 16), global::load_16(place + 32)) };
    let (output, verdict, length) = (address(texts, 2), address(more, 0), more[2]);
    let word = lane % 4;
    // SAFETY: the caller's.
    let tag = unsafe {
        let parts = parts_at::<C>(local) + 4 * word;
        shared::load_u32::<0>(parts)
            ^ shared::load_u32::<16>(parts)
            ^ shared::load_u32::<32>(parts)
            ^ shared::load_u32::<48>(parts)
    };
    let at = address(addresses, 2) + 4 * word as u64;
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

/// The masks E(K, J0) of this block's next [`MASKS`] records from `record`, a lane each.
///
/// # Safety
/// The masks are nobody's until the next barrier.
#[inline(always)]
unsafe fn prepare_masks<const ROUNDS: usize, C: TileChains>(
    params: &RecordsParams,
    tables: Tables,
    record: u32,
) {
    let grid = thread::grid_size();
    let mine = record + thread::index() * grid;
    // By warps, so that those without records go on.
    if 32 * thread::warp() < MASKS && record + thread::warp() * 32 * grid < params.count {
        let valid = mine < params.count;
        let place = params.records + 64 * (if valid { mine } else { record }) as u64;
        // SAFETY: the record's J0.
        let j0 = unsafe { global::load_16(place + 48) };
        let [mask] = tables.encrypt::<ROUNDS, 1>(&params.keys, [j0]);
        // SAFETY: this thread's place.
        unsafe { shared::store_16::<0>(masks_at::<C>() + 16 * thread::index(), mask) };
    }
}

/// One warp: fills the buffer of a segment.
///
/// # Safety
/// The buffer is nobody else's until the next barrier; the tables are filled.
#[inline(always)]
unsafe fn prepare_segment(params: &RecordsParams, tables: Tables, record: u32, first_tile: u32, buffer: u32) {
    let lane = thread::lane();
    let place = params.records + 64 * record as u64;
    // SAFETY: a record's descriptor and its additional data.
    unsafe {
        let texts = global::load_16(place);
        let addresses = global::load_16(place + 16);
        let more = global::load_16(place + 32);
        let j0 = global::load_16(place + 48);
        let (length, aad_length) = (more[2], more[3]);
        let (tiles, pad) = tiles(length);
        let first_counter = counter_at(j0, first_tile, pad);
        let prefix = Prefix::new(tables, &params.keys, [j0[0], j0[1], j0[2]]);
        if lane == 0 {
            shared::store_16::<0>(buffer, texts);
            shared::store_16::<16>(buffer, [length, aad_length, first_counter, prefix.low_base()]);
        }
        if first_tile == 0 {
            let mut i = 16 * lane;
            while i < aad_length {
                let block = global::load_16(address(addresses, 0) + i as u64);
                let end = buffer + AAD_END - aad_length.next_multiple_of(16);
                shared::store_16::<0>(end + i, keep(block, aad_length - i));
                i += 512;
            }
        }
        let in_segment = (tiles - first_tile).min(SEGMENT_TILES);
        let mut entry = lane;
        while entry - lane <= 4 * in_segment {
            let counter = (first_counter & !255).wrapping_add(256 * entry);
            let upper = prefix.upper(tables, &params.keys, counter);
            if entry < 4 * SEGMENT_TILES + 2 {
                shared::store_16::<UPPER>(buffer + 16 * entry, upper);
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
