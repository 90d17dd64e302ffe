//! AES-GCM (NIST SP 800-38D) of one message by the whole GPU, in one pass: counter mode and GHASH from the same registers.
//!
//! Additional data and text, each filled up to whole 16-byte blocks, are one row of blocks. It is cut, from its end, into
//! shares of equally many blocks ([`plan`]); a thread block of 512 takes one. Its tiles of GHASH (see [`ghash`])
//! end with the share; what that leaves in front counts as zero blocks, which GHASH doesn't notice.
//!
//! GHASH is linear: a share's sum, times H to the number of blocks behind the share, is what it adds to the message's. That
//! power is a product of at most eleven that are prepared with the key ([`Powers`]), and one warp multiplies by each in
//! parallel. The thread block that is done last adds the sums of all.
//!
//! Opening stores plaintext before the tag is known to be right, as any one pass does. On a wrong one the last thread block,
//! whose acquisition of the others' counts orders all their stores before its own, zeroes the output before it writes the
//! verdict; so after the launch, plaintext of a forged message is nowhere.
//!
//! Shared-memory wavefronts for 32 blocks: 16 (rounds - 2) of look-ups, 8.8 load and store, 8 + 4 matrices, 2.85 to 5.7
//! for the counters' upper bytes.

use crate::aes::{Prefix, RoundKeys, Tables, xor};
use crate::device::{self, Quad, bits, global, shared, thread, warp};
use crate::gcm::{FORGED, VERIFIED, keep};
use crate::gf128::Element;
use crate::ghash::{
    self, APART, Chains, LANES_BYTES, LAST_BYTES, THREADS, TILE, TileChains, block_of, load_lanes, warp_sum,
};
use crate::params::{SHARED_BASE, SHARED_END_SM_90, TABLES_END};

/// Hexadecimal digits of the exponents of H that [`Powers`] serves: enough for [`BYTES_MAX`].
pub const DIGITS: u32 = 11;

/// Powers of a hash key, as a warp multiplies by them; secret. Made by [`ghash_powers()`].
#[repr(C, align(16))]
pub struct Powers {
    /// By digit d and its value v, from 1: H^(v 16^d) x^(4 l) for lane l.
    pub entries: [[[Element; 32]; 15]; DIGITS as usize],
}

/// Parameters of [`ghash_powers()`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PowersParams {
    /// H: the cipher of the zero block, raw words.
    pub h: [u32; 4],
    /// Address of the [`Powers`] to fill.
    pub powers: u64,
}

kernel! {
    threads = 480, shared = 0,
    /// Fills a [`Powers`]: one block a digit ([`DIGITS`]).
    fn ghash_powers(params: PowersParams) {
        let (digit, index) = (thread::block_index(), thread::index());
        let mut base = Element::from_raw(params.h);
        let mut i = 0;
        while i < 4 * digit {
            base = base.square();
            i += 1;
        }
        let value = base.power(u64::from(index / 32 + 1)).times_x_to(4 * (index % 32));
        // SAFETY: in the digit's entries.
        unsafe { global::store_16(params.powers + u64::from(16 * (480 * digit + index)), value.words()) };
    }
}

/// Thread blocks of one launch, at most.
pub const BLOCKS_MAX: u32 = 160;

/// Device memory that one launch at a time works with. Zero at first; each launch leaves it fit for the next.
#[repr(C, align(16))]
#[derive(Clone, Copy)]
pub struct Workspace {
    /// Thread blocks that are done.
    pub done: u32,
    /// Unused.
    pub reserved: [u32; 3],
    /// What each thread block adds to the tag: big-endian words of an [`Element`].
    pub sums: [[u32; 4]; BLOCKS_MAX as usize],
}

/// Where [`Workspace::sums`] begins.
const SUMS_OFFSET: u64 = core::mem::offset_of!(Workspace, sums) as u64;

/// A message in device memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Message {
    /// Address of the text that comes in. Fast where it and `output` are multiples of 16.
    pub input: u64,
    /// Address of the text that goes out; may be `input`.
    pub output: u64,
    /// Bytes of text, at most 2^36 - 32.
    pub length: u64,
    /// Address of the additional data.
    pub aad: u64,
    /// Bytes of additional data; with the text, at most [`BYTES_MAX`].
    pub aad_length: u64,
    /// Address of the tag, a multiple of 4: written by sealing, read by opening.
    pub tag: u64,
    /// Address of opening's verdict, a multiple of 4: [`VERIFIED`] or [`FORGED`]. The host stores 0 first, so that a
    /// kernel that never ran is no success.
    pub verdict: u64,
    /// The pre-counter block J0, raw words (SP 800-38D section 7.1 step 2).
    pub j0: [u32; 4],
}

/// Bytes of text and additional data together, at most.
pub const BYTES_MAX: u64 = 1 << (4 * DIGITS + 3);

/// Parameters of the kernels on one message.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MessageParams {
    /// The expanded key: [`expand_key`](crate::aes::expand_key).
    pub keys: RoundKeys,
    /// Address of the [`GhashKey`](crate::ghash::GhashKey).
    pub ghash_key: u64,
    /// Address of the [`Powers`].
    pub powers: u64,
    /// Address of the [`Workspace`].
    pub workspace: u64,
    /// Blocks of a share: [`Plan::share`].
    pub share: u64,
    /// What is sealed or opened.
    pub message: Message,
}

/// How a message is spread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Thread blocks to launch.
    pub blocks: u32,
    /// 16-byte blocks that each takes, but the first, which takes what is left.
    pub share: u64,
}

/// Shares are multiples of so many blocks: a warpgroup's. Half and a fourth of it measured no faster, twice it slower.
const SHARE_UNIT: u64 = 128;

/// Spreads `length` bytes of text and `aad_length` of additional data over so many multiprocessors.
pub const fn plan(length: u64, aad_length: u64, multiprocessors: u32) -> Plan {
    let blocks = length.div_ceil(16) + aad_length.div_ceil(16);
    let most = if multiprocessors < BLOCKS_MAX { multiprocessors } else { BLOCKS_MAX };
    let share = blocks.div_ceil(most as u64 * SHARE_UNIT) * SHARE_UNIT;
    // An empty message takes a thread block too, for its tag.
    if share == 0 {
        return Plan { blocks: 1, share: SHARE_UNIT };
    }
    Plan { blocks: blocks.div_ceil(share) as u32, share }
}

// Shared memory after the tables of AES. The matrices come last, as what they take depends on the chains.
pub(crate) const LANES_AT: u32 = TABLES_END;
const LAST_AT: u32 = LANES_AT + LANES_BYTES;
const WEIGHTS_AT: u32 = LAST_AT + LAST_BYTES;
const PARTS_AT: u32 = WEIGHTS_AT + DIGITS * WEIGHT_BYTES;
pub(crate) const MASK_AT: u32 = PARTS_AT + 64;
const FORGED_AT: u32 = MASK_AT + 16;
const SEGMENTS_AT: u32 = FORGED_AT + 16;
pub(crate) const MATRICES_AT: u32 = (SEGMENTS_AT + 2 * SEGMENT_BYTES).next_multiple_of(128);
/// Dynamic shared memory of the kernels on one message.
pub const MESSAGE_SHARED: u32 = message_shared::<Chains>();
const _: () = assert!(SHARED_BASE + MESSAGE_SHARED <= SHARED_END_SM_90);

/// Dynamic shared memory of kernels on one message with these chains.
pub(crate) const fn message_shared<C: TileChains>() -> u32 {
    MATRICES_AT + C::MATRICES_BYTES - SHARED_BASE
}

/// An entry of [`Powers`]: [`DIGITS`] warps have one each in shared memory.
const WEIGHT_BYTES: u32 = 16 * 32;
const _: () = assert!(32 * DIGITS <= THREADS);
/// How many tiles ahead additional data is brought nearer, and in bytes.
const TILES_AHEAD: u64 = 8;
const AHEAD: u64 = TILES_AHEAD * 16 * TILE as u64;
/// The upper counter bytes' contribution for each 256 counters that a segment touches: one a thread of the first 256.
const SEGMENT_BYTES: u32 = 16 * 256;
/// Tiles between two barriers: they touch 4 x 63 + 1 times 256 counters.
const SEGMENT_TILES: u32 = 63;

macro_rules! message_kernels {
    ($($bits:literal $rounds:literal $seal:ident $open:ident;)*) => {
        $(#[cfg(any(ringseal_sm_90a, not(target_arch = "nvptx64")))]
        kernel! {
            threads = 512, shared = MESSAGE_SHARED,
            #[doc = concat!("Seals one message, AES-", $bits, ", on [`Plan::blocks`] thread blocks.")]
            fn $seal(params: MessageParams) {
                // SAFETY: the kernel's contract.
                unsafe { message::<$rounds, true, Chains>(&params) }
            }
        }
        #[cfg(any(ringseal_sm_90a, not(target_arch = "nvptx64")))]
        kernel! {
            threads = 512, shared = MESSAGE_SHARED,
            #[doc = concat!("Opens one message, AES-", $bits, ", on [`Plan::blocks`] thread blocks.")]
            fn $open(params: MessageParams) {
                // SAFETY: the kernel's contract.
                unsafe { message::<$rounds, false, Chains>(&params) }
            }
        })*
    };
}

message_kernels! {
    "128" 10 gcm_seal_message_128 gcm_open_message_128;
    "192" 12 gcm_seal_message_192 gcm_open_message_192;
    "256" 14 gcm_seal_message_256 gcm_open_message_256;
}

/// Which blocks a thread block takes. Blocks are numbered from the text's first; additional data has negative numbers.
#[derive(Clone, Copy)]
struct Share {
    /// The number of the first tile's first block, which may lie before the share.
    first: i64,
    /// The share's first block, or the message's.
    begin: i64,
    /// Tiles.
    tiles: u32,
}

/// Blocks of the message behind this thread block's, which is one of `share` blocks.
#[inline(always)]
pub(crate) fn behind(share: u64) -> u64 {
    share * (thread::grid_size() - 1 - thread::block_index()) as u64
}

impl Share {
    #[inline(always)]
    fn new(params: &MessageParams) -> Self {
        let text = params.message.length.div_ceil(16) as i64;
        let aad = params.message.aad_length.div_ceil(16) as i64;
        let tiles = params.share.div_ceil(TILE as u64) as u32;
        let end = text - behind(params.share) as i64;
        Share { first: end - tiles as i64 * TILE as i64, begin: (end - params.share as i64).max(-aad), tiles }
    }

    /// The counter of the first tile's first block; that of the text's first is J0's plus 1 (SP 800-38D section 7.1 step
    /// 3). It wraps at 2^32 as the standard's does.
    #[inline(always)]
    fn counter(&self, params: &MessageParams) -> u32 {
        params.message.j0[3].swap_bytes().wrapping_add(1).wrapping_add(self.first as u32)
    }
}

/// The kernels' body.
///
/// # Safety
/// The addresses in the parameters are valid.
#[inline(always)]
pub(crate) unsafe fn message<const ROUNDS: usize, const SEAL: bool, C: TileChains>(params: &MessageParams) {
    let (index, warp_index) = (thread::index(), thread::warp());
    let share = Share::new(params);
    // Loads first: the tables' filling hides their latency.
    // SAFETY: the regions of shared memory are disjoint; the keys are filled.
    let (tables, matrices) = unsafe {
        prefetch(&params.message, &share);
        let quads = C::fetch(params.ghash_key);
        let weight = load_weight(params.powers, behind(params.share));
        load_lanes(params.ghash_key, LANES_AT);
        let tables = Tables::fill::<THREADS>();
        store_weight(weight);
        (tables, C::store(quads, MATRICES_AT))
    };
    device::sync_threads();
    let first_counter = share.counter(params);
    // SAFETY: the buffers are nobody else's yet.
    unsafe {
        prepare(params, tables, first_counter, share.tiles, SEGMENTS_AT);
    }
    let prefix =
        Prefix::new(tables, &params.keys, [params.message.j0[0], params.message.j0[1], params.message.j0[2]]);
    // What the counters' last byte adds to the state after round 2: it is the same in all of a thread's blocks.
    let low = prefix.low(tables, first_counter.wrapping_add(block_of(index, 0)));
    let upper = SEGMENTS_AT + ((first_counter & 255) + block_of(index, 0)) / 256 * 16;
    device::sync_threads();
    // The first share is the shortest, and where all are short its first warp has nothing to encrypt.
    if thread::block_index() == 0 && warp_index == 0 {
        let [mask] = tables.encrypt::<ROUNDS, 1>(&params.keys, [params.message.j0]);
        if index == 0 {
            // SAFETY: nobody else's until the last barrier.
            unsafe { shared::store_16::<MASK_AT>(0, mask) };
        }
    }

    // Shuffled, so that the compiler sees that it is uniform.
    let warpgroup_end = (block_of(128 * warp::shuffle(warp_index / 4, 0), 1) + 128) as i64;
    let mut chains = C::new([0; 4], share.tiles);
    let mut tile = 0;
    let mut buffer = 0;
    while tile < share.tiles {
        let end_tile = (tile + SEGMENT_TILES).min(share.tiles);
        let begin_tile = tile;
        if end_tile < share.tiles {
            let counter = first_counter.wrapping_add(end_tile * TILE);
            let other = SEGMENTS_AT + SEGMENT_BYTES - buffer;
            // SAFETY: the other buffer was last read before the latest barrier.
            unsafe { prepare(params, tables, counter, share.tiles - end_tile, other) };
        }
        while tile < end_tile {
            let tile_first = share.first + (tile as u64 * TILE as u64) as i64;
            let at = tile_first + block_of(index, 0) as i64;
            // Whether all of the tile is whole blocks of the share's text, or of its additional data.
            // Opaque, here and below, so that no register holds what the parameters tell across the loop.
            let text = bits::opaque_64(params.message.input | params.message.output);
            let inside = text.is_multiple_of(16)
                && tile_first >= share.begin.max(0)
                && (tile_first as u64 + TILE as u64) * 16 <= params.message.length;
            let aad = bits::opaque_64(params.message.aad);
            let inside_aad =
                aad.is_multiple_of(16) && tile_first >= share.begin && tile_first + (TILE as i64) < 0;
            // SAFETY: places in the message, or none.
            let input = unsafe {
                if inside || inside_aad {
                    // Where the text begins; or would begin, if the additional data lay right before it.
                    let origin = if inside {
                        params.message.input
                    } else {
                        aad + 16 * bits::opaque_64(params.message.aad_length).div_ceil(16)
                    };
                    let address = origin.wrapping_add((at as u64).wrapping_mul(16));
                    if inside_aad && tile_first + ((1 + TILES_AHEAD as i64) * TILE as i64) <= 0 {
                        // Nothing hides the latency of its loads.
                        global::prefetch(address.wrapping_add(AHEAD));
                        global::prefetch(address.wrapping_add(AHEAD + 16 * APART as u64));
                    }
                    [
                        global::load_volatile_16(address),
                        global::load_volatile_16(address.wrapping_add(16 * APART as u64)),
                    ]
                } else {
                    [load(&params.message, &share, at), load(&params.message, &share, at + APART as i64)]
                }
            };
            let mut hashed = input;
            // A warp whose blocks are all before the text has nothing to encrypt.
            let warp_end = tile_first + (block_of(32 * warp_index, 1) + 32) as i64;
            if warp_end > share.begin.max(0) {
                let upper_at = upper + buffer + 64 * (tile - begin_tile);
                // SAFETY: prepared for this segment, before a barrier.
                let states = unsafe {
                    let first = shared::load_16::<0>(upper_at);
                    let second = shared::load_16::<{ APART / 256 * 16 }>(upper_at);
                    [xor(low, first), xor(low, second)]
                };
                // A short share has no first blocks, and is done sooner without.
                let key_stream = if params.share <= APART as u64 {
                    let [second] = tables.finish::<ROUNDS, 1>(&params.keys, [states[1]]);
                    [[0; 4], second]
                } else {
                    tables.finish::<ROUNDS, 2>(&params.keys, states)
                };
                let output = [xor(input[0], key_stream[0]), xor(input[1], key_stream[1])];
                // SAFETY: as above.
                unsafe {
                    if inside {
                        let address = params.message.output + 16 * at as u64;
                        global::store_16(address, output[0]);
                        global::store_16(address + 16 * APART as u64, output[1]);
                        if SEAL {
                            hashed = output;
                        }
                    } else {
                        let stored = [
                            store(&params.message, &share, at, output[0], input[0]),
                            store(&params.message, &share, at + APART as i64, output[1], input[1]),
                        ];
                        if SEAL {
                            hashed = stored;
                        }
                    }
                }
            }
            // A warpgroup whose blocks are all before the share leaves its chains at zero.
            if tile_first + warpgroup_end > share.begin {
                // SAFETY: all threads of the warpgroup run this alike.
                unsafe { chains.take(hashed, tile, share.tiles, matrices) };
            }
            tile += 1;
        }
        if tile < share.tiles {
            device::sync_threads();
        }
        buffer = SEGMENT_BYTES - buffer;
    }

    let is_last = thread::block_index() == thread::grid_size() - 1;
    let lengths = if is_last { lengths(params.message.aad_length, params.message.length) } else { [0; 4] };
    let mut word = 0;
    // Of a message without a block, the block of lengths is all there is.
    let last_tile = share.first + (share.tiles as i64 - 1) * TILE as i64;
    if last_tile + warpgroup_end > share.begin || warpgroup_end == TILE as i64 {
        // SAFETY: all threads of the warpgroup run this alike.
        word = unsafe { chains.last(lengths, params.ghash_key, matrices) };
    }
    let end = End {
        workspace: params.workspace,
        tag: params.message.tag,
        verdict: params.message.verdict,
        // Anew, rather than kept across the loop.
        behind: behind(bits::opaque_64(params.share)),
    };
    // SAFETY: nobody has used the place of the words; the rest is stored.
    let forged = unsafe { combine::<SEAL>(word, &end) } as u32;
    if !SEAL {
        if index == 0 {
            // SAFETY: this thread's place.
            unsafe { shared::store_u32::<FORGED_AT>(0, forged) };
        }
        device::sync_threads();
        // SAFETY: stored before the barrier.
        if unsafe { warp::shuffle(shared::load_u32::<FORGED_AT>(0), 0) } != 0 {
            // SAFETY: the message's output, to which nobody else stores any more.
            unsafe { wipe(params.message.output, params.message.length) };
            device::fence::system();
            device::sync_threads();
            if index == 0 {
                // SAFETY: the message's verdict.
                unsafe { global::store_u32(params.message.verdict, FORGED) };
            }
        }
    }
}

/// Where what a message's thread blocks have summed goes.
pub(crate) struct End {
    /// Address of the [`Workspace`].
    pub(crate) workspace: u64,
    /// Address of the tag.
    pub(crate) tag: u64,
    /// Address of opening's verdict.
    pub(crate) verdict: u64,
    /// Blocks of the message behind this thread block's share.
    pub(crate) behind: u64,
}

/// All threads: adds up the share's sum from each thread's word of the chains ([`Chains::last`]), and finishes the message;
/// what [`finish`] returns, in the first warp. Ends the share: all that its threads stored before is stored.
///
/// # Safety
/// As [`finish`], but for the parts, and with lanes at [`LANES_AT`]; the places of words and parts are nobody else's.
#[inline(always)]
pub(crate) unsafe fn combine<const SEAL: bool>(word: u32, end: &End) -> bool {
    let warp_index = thread::warp();
    // SAFETY: the caller's.
    unsafe { shared::store_u32::<LAST_AT>(4 * thread::index(), word) };
    device::sync_threads();
    let mut forged = false;
    if warp_index < 4 {
        // SAFETY: the barrier came after all words.
        unsafe {
            let part = warp_sum(ghash::part(LAST_AT, LANES_AT, warp_index));
            if thread::lane().is_multiple_of(8) {
                shared::store_u32::<PARTS_AT>(16 * warp_index + thread::lane() / 2, part);
            }
            device::sync_warpgroup();
            if warp_index == 0 {
                forged = finish::<SEAL>(end);
            }
        }
    }
    forged
}

/// Has the first tile's blocks of text brought nearer.
///
/// # Safety
/// The addresses are valid.
#[inline(always)]
unsafe fn prefetch(message: &Message, share: &Share) {
    let first = share.first + block_of(thread::index(), 0) as i64;
    let second = first + APART as i64;
    // SAFETY: in the text.
    unsafe {
        if first >= share.begin.max(0) && 16 * (first as u64) < message.length {
            global::prefetch(message.input + 16 * first as u64);
        }
        if second >= share.begin.max(0) && 16 * (second as u64) < message.length {
            global::prefetch(message.input + 16 * second as u64);
        }
    }
}

/// A warp a digit: this lane's part of what [`times`] multiplies by to bring a share's sum over the `behind` blocks after it,
/// zero where there's nothing to multiply by.
///
/// # Safety
/// `powers` is the address of a filled [`Powers`].
#[inline(always)]
pub(crate) unsafe fn load_weight(powers: u64, behind: u64) -> Quad {
    let (digit, lane) = (thread::warp(), thread::lane());
    let value = if digit < DIGITS { digit_of(behind, digit) } else { 0 };
    if value == 0 {
        return [0; 4];
    }
    let entry = 15 * digit + value - 1;
    // SAFETY: the caller's.
    unsafe { global::load_16(powers + (WEIGHT_BYTES * entry + 16 * lane) as u64) }
}

/// Stores what [`load_weight`] returned, for [`combine`], after a barrier.
///
/// # Safety
/// The place at [`WEIGHTS_AT`] is nobody else's.
#[inline(always)]
pub(crate) unsafe fn store_weight(weight: Quad) {
    if thread::warp() < DIGITS {
        // SAFETY: the caller's.
        unsafe { shared::store_16::<WEIGHTS_AT>(16 * thread::index(), weight) };
    }
}

/// Hexadecimal digit number `digit`, from the lowest.
#[inline(always)]
fn digit_of(exponent: u64, digit: u32) -> u32 {
    (exponent >> (4 * digit)) as u32 & 15
}

/// Fills a segment's buffer: for `tiles` tiles, or as many as a segment has, from that with the counter `counter`.
///
/// # Safety
/// All threads; the buffer is nobody's until the next barrier.
#[inline(always)]
unsafe fn prepare(params: &MessageParams, tables: Tables, counter: u32, tiles: u32, buffer: u32) {
    // By warps, so that those without an entry go on.
    if 32 * thread::warp() <= 4 * tiles.min(SEGMENT_TILES) {
        let prefix = Prefix::new(
            tables,
            &params.keys,
            [params.message.j0[0], params.message.j0[1], params.message.j0[2]],
        );
        let counter = (counter & !255).wrapping_add(256 * thread::index());
        let upper = prefix.upper(tables, &params.keys, counter);
        // SAFETY: this thread's place.
        unsafe { shared::store_16::<0>(buffer + 16 * thread::index(), upper) };
    }
}

/// The block of both lengths, given in bytes, in bits (SP 800-38D section 7.1 step 5).
#[inline(always)]
pub(crate) fn lengths(aad: u64, text: u64) -> Quad {
    let (aad, text) = (8 * aad, 8 * text);
    [
        ((aad >> 32) as u32).swap_bytes(),
        (aad as u32).swap_bytes(),
        ((text >> 32) as u32).swap_bytes(),
        (text as u32).swap_bytes(),
    ]
}

/// Loads block `at` of the share, filled up with zeros; zero outside of it.
///
/// # Safety
/// The addresses are valid.
#[inline(always)]
unsafe fn load(message: &Message, share: &Share, at: i64) -> Quad {
    if at < share.begin {
        return [0; 4];
    }
    let (address, length, index) = if at < 0 {
        (message.aad, message.aad_length, at + message.aad_length.div_ceil(16) as i64)
    } else {
        (message.input, message.length, at)
    };
    let start = 16 * index as u64;
    if start >= length {
        return [0; 4];
    }
    let address = address + start;
    if length - start >= 16 && address.is_multiple_of(16) {
        // SAFETY: 16 bytes of the message.
        return unsafe { global::load_volatile_16(address) };
    }
    // Backwards, so that each byte moves to its place by shifts.
    let mut block = [0; 4];
    let mut i = (length - start).min(16);
    while i > 0 {
        i -= 1;
        // SAFETY: a byte of the message.
        let byte = unsafe { global::load_u8(address + i) } as u32;
        let [a, b, c, d] = block;
        block = [a << 8 | byte, b << 8 | a >> 24, c << 8 | b >> 24, d << 8 | c >> 24];
    }
    block
}

/// Stores block `at` of the share if it is text, as far as the text goes, and returns what was stored, filled up with zeros;
/// `otherwise` if it isn't.
///
/// # Safety
/// The addresses are valid.
#[inline(always)]
unsafe fn store(message: &Message, share: &Share, at: i64, block: Quad, otherwise: Quad) -> Quad {
    if at < share.begin.max(0) || 16 * at as u64 >= message.length {
        return otherwise;
    }
    let start = 16 * at as u64;
    let address = message.output + start;
    let bytes = (message.length - start).min(16);
    if bytes == 16 && address.is_multiple_of(16) {
        // SAFETY: 16 bytes of the text.
        unsafe { global::store_16(address, block) };
        return block;
    }
    let [mut a, mut b, mut c, mut d] = block;
    let mut i = 0;
    while i < bytes {
        // SAFETY: a byte of the text.
        unsafe { global::store_u8(address + i, a as u8) };
        (a, b, c, d) = (a >> 8 | b << 24, b >> 8 | c << 24, c >> 8 | d << 24, d >> 8);
        i += 1;
    }
    keep(block, bytes as u32)
}

/// One warp: `word`, word lane / 8 of an element in every lane, times the entry of [`Powers`] at `entry`.
///
/// # Safety
/// The entry is in shared memory, stored before a barrier.
#[inline(always)]
unsafe fn times(word: u32, entry: u32) -> u32 {
    let lane = thread::lane();
    // SAFETY: the caller's.
    let multiple = Element::from_words(unsafe { shared::load_16::<0>(entry + 16 * lane) });
    // This lane's four coefficients, the highest lowest.
    let bits = word >> (28 - 4 * (lane % 8));
    let mut sum = multiple.where_bit(bits, 0);
    sum = sum.times_x() ^ multiple.where_bit(bits, 1);
    sum = sum.times_x() ^ multiple.where_bit(bits, 2);
    sum = sum.times_x() ^ multiple.where_bit(bits, 3);
    warp_sum(sum)
}

/// The first warp: adds this thread block's share to the tag; if it is the last to do so, writes the tag, or compares it
/// and writes the verdict, unless the message is forged, which it returns.
///
/// # Safety
/// The parts, the weights and, in the first thread block, the mask are in shared memory, stored before a barrier.
#[inline(always)]
unsafe fn finish<const SEAL: bool>(end: &End) -> bool {
    let (lane, grid) = (thread::lane(), thread::grid_size());
    // Every lane has word lane / 8 of the sum.
    let at = lane / 8 * 4;
    // SAFETY: the caller's.
    let mut word = unsafe {
        shared::load_u32::<PARTS_AT>(at)
            ^ shared::load_u32::<{ PARTS_AT + 16 }>(at)
            ^ shared::load_u32::<{ PARTS_AT + 32 }>(at)
            ^ shared::load_u32::<{ PARTS_AT + 48 }>(at)
    };
    let mut digit = 0;
    while digit < DIGITS {
        if digit_of(end.behind, digit) != 0 {
            // SAFETY: the caller's.
            word = unsafe { times(word, WEIGHTS_AT + WEIGHT_BYTES * digit) };
        }
        digit += 1;
    }
    if thread::block_index() == 0 {
        // SAFETY: the caller's.
        word ^= unsafe { shared::load_u32::<MASK_AT>(at) }.swap_bytes();
    }
    if grid > 1 {
        let sums = end.workspace + SUMS_OFFSET;
        // SAFETY: the workspace; the counter's release and acquire order the sums.
        unsafe {
            if lane.is_multiple_of(8) {
                global::store_u32(sums + (16 * thread::block_index() + at) as u64, word);
            }
            warp::sync();
            let before = if lane == 0 { global::add_u32(end.workspace, 1) } else { 0 };
            if warp::shuffle(before, 0) != grid - 1 {
                return false;
            }
            warp::sync();
            if lane == 0 {
                global::store_u32(end.workspace, 0);
            }
            let sum = |i: u32| {
                let block = lane + 32 * i;
                if block < grid { global::load_volatile_16(sums + (16 * block) as u64) } else { [0; 4] }
            };
            let (a, b, c, d, e) = (sum(0), sum(1), sum(2), sum(3), sum(4));
            word = warp_sum(Element::from_words(xor(xor(xor(a, b), xor(c, d)), e)));
        }
    }
    let tag = word.swap_bytes();
    if SEAL {
        if lane.is_multiple_of(8) {
            // SAFETY: the message's tag.
            unsafe { global::store_u32(end.tag + at as u64, tag) };
        }
        return false;
    }
    // SAFETY: the message's tag.
    let difference = tag ^ unsafe { global::load_volatile_u32(end.tag + at as u64) };
    let forged = warp::ballot(difference != 0) != 0;
    if !forged && lane == 0 {
        // SAFETY: the message's verdict.
        unsafe { global::store_u32(end.verdict, VERIFIED) };
    }
    forged
}
const _: () = assert!(BLOCKS_MAX == 5 * 32);

/// Zeroes memory; all threads of the block.
///
/// # Safety
/// The memory is nobody else's.
#[inline(always)]
unsafe fn wipe(address: u64, bytes: u64) {
    let quads = if address.is_multiple_of(16) { bytes / 16 } else { 0 };
    let mut i = thread::index() as u64;
    while i < quads {
        // SAFETY: the caller's.
        unsafe { global::store_16(address + 16 * i, [0; 4]) };
        i += THREADS as u64;
    }
    let mut i = 16 * quads + thread::index() as u64;
    while i < bytes {
        // SAFETY: the caller's.
        unsafe { global::store_u8(address + i, 0) };
        i += THREADS as u64;
    }
}
