//! AES in counter mode: keystream, and XOR with data, in place or apart.
//!
//! **Cost model.** Wavefronts for 32 blocks: W = 128 / 160 / 192 look-ups (AES-128 / 192 / 256, two rounds cached), 8.8 for a
//! 16-byte load and store, and 1.25 for the term that changes every 256 counters, together 138 / 170 / 202. On 132 SMs at
//! 1.98 GHz that limits it to 132 x 1.98 x 512 / W = 969 / 787 / 662 GB/s. The keystream alone has no load: 4.4 less.
//!
//! A block of 512 threads works on eight tiles of 256 aligned counters at a time. A tile belongs to 64 threads, four blocks of
//! data each, 64 counters apart: a warp's accesses are contiguous, and the four blocks share the terms of all counter bytes
//! but the lowest. The terms of the lowest byte stay in registers.
//!
//! What the tiles don't cover (the ends of a message, or all of one that is not aligned to 16 bytes) goes block by block.

use crate::aes::{Prefix, RoundKeys, Tables, xor};
use crate::device::{Quad, bits, global, sync_threads, thread};
use crate::params::{SHARED_BASE, TABLES_END};

/// Threads of a block.
const THREADS: u32 = 512;
/// Dynamic shared memory of a block: the tables.
pub const SHARED_BYTES: u32 = TABLES_END - SHARED_BASE;
/// Counters of a tile, by their lowest byte.
const TILE: u64 = 256;
/// Blocks a thread has in a tile.
const N: usize = 4;
/// Threads that work on a tile.
const GROUP: u32 = TILE as u32 / N as u32;
/// Tiles that a block of threads works on at a time.
const GROUPS: u32 = THREADS / GROUP;

/// Parameters of the CTR kernels.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct CtrParams {
    /// The expanded key: [`expand_key`](crate::aes::expand_key).
    pub keys: RoundKeys,
    /// The first counter block, as four little-endian words.
    pub counter: [u32; 4],
    /// Address of the data; not used by the keystream kernels. Either `output` or apart from it.
    pub input: u64,
    /// Address of the result.
    pub output: u64,
    /// Bytes of data, at most 2^59.
    pub bytes: u64,
    /// 0: the last 32 bits count and wrap (NIST SP 800-38D, 6.2). 1: all 128 do (SP 800-38A, appendix B.1).
    pub carry: u64,
}

/// What is left of `nonce` `carries` blocks of 2^32 counters later: `nonce + carries` as one big-endian number.
#[inline(always)]
fn advance(nonce: [u32; 3], carries: u64) -> [u32; 3] {
    let low = u64::from(nonce[1].swap_bytes()) << 32 | u64::from(nonce[2].swap_bytes());
    let (low, overflow) = low.overflowing_add(carries);
    let high = nonce[0].swap_bytes().wrapping_add(u32::from(overflow));
    [high.swap_bytes(), ((low >> 32) as u32).swap_bytes(), (low as u32).swap_bytes()]
}

/// The kernels' common source: with `XOR`, output = input ^ keystream, else output = keystream.
///
/// # Safety
/// All threads of a block call it; the addresses are valid.
#[inline(always)]
unsafe fn ctr<const ROUNDS: usize, const XOR: bool>(params: &CtrParams) {
    let tables = Tables::fill::<THREADS>();
    sync_threads();
    let nonce = [params.counter[0], params.counter[1], params.counter[2]];
    // Virtual counters: those of the first block's nonce, counted on beyond 2^32.
    let first = u64::from(params.counter[3].swap_bytes());
    let whole = first + params.bytes / 16;
    let aligned = (params.output | if XOR { params.input } else { 0 }).is_multiple_of(16);
    // Whole tiles, as numbers of their first counter / 256.
    let tiles_begin = first.div_ceil(TILE);
    let tiles_end = if aligned { (whole / TILE).max(tiles_begin) } else { tiles_begin };

    let (block, grid) = (u64::from(thread::block_index()), u64::from(thread::grid_size()));
    let tiles = tiles_end - tiles_begin;
    let share = tiles / grid;
    let rest = tiles % grid;
    let begin = tiles_begin + share * block + rest.min(block);
    let end = begin + share + u64::from(block < rest);
    let member = thread::index() % GROUP;
    let mut tile = begin + u64::from(thread::index() / GROUP);
    while tile < end {
        let carries = tile >> 24;
        let prefix = Prefix::new(tables, &params.keys, advance(nonce, carries * params.carry));
        let low: [Quad; N] = [
            prefix.low(tables, member),
            prefix.low(tables, member + GROUP),
            prefix.low(tables, member + 2 * GROUP),
            prefix.low(tables, member + 3 * GROUP),
        ];
        let carry_end = end.min((carries + 1) << 24);
        while tile < carry_end {
            let bytes23 = prefix.bytes23(tables, &params.keys, (tile << 8) as u32);
            let span_end = carry_end.min(((tile >> 8) + 1) << 8);
            while tile < span_end {
                let offset = 16 * (tile * TILE - first + u64::from(member));
                // SAFETY: the tile is whole, so its blocks are inside the data; both addresses are aligned.
                unsafe {
                    let input = params.input + offset;
                    let data = if XOR { load_tile(input) } else { [[0; 4]; N] };
                    let upper = xor(prefix.byte1(tables, (tile << 8) as u32), bytes23);
                    let states =
                        [xor(low[0], upper), xor(low[1], upper), xor(low[2], upper), xor(low[3], upper)];
                    let keystream = tables.finish::<ROUNDS, N>(&params.keys, states);
                    let output = params.output + offset;
                    for i in 0..N {
                        let address = output + i as u64 * u64::from(16 * GROUP);
                        global::store_16(address, xor(keystream[i], data[i]));
                    }
                }
                tile += u64::from(GROUPS);
            }
        }
    }

    // The blocks before and after the tiles. The last thread blocks take them: they have the fewest tiles.
    let blocks = params.bytes.div_ceil(16);
    let head = if tiles == 0 { blocks } else { tiles_begin * TILE - first };
    let skipped = tiles * TILE;
    let mut index = (grid - 1 - block) * u64::from(THREADS) + u64::from(thread::index());
    while index < blocks - skipped {
        let position = if index < head { index } else { index + skipped };
        let counter = first + position;
        let [a, b, c] = advance(nonce, (counter >> 32) * params.carry);
        let [keystream] =
            tables.encrypt::<ROUNDS, 1>(&params.keys, [[a, b, c, (counter as u32).swap_bytes()]]);
        // SAFETY: the block is inside the data.
        unsafe { put::<XOR>(params, position, keystream, aligned) };
        index += grid * u64::from(THREADS);
    }
}

/// A thread's blocks of a tile.
///
/// # Safety
/// They are inside the data.
#[inline(always)]
unsafe fn load_tile(address: u64) -> [Quad; N] {
    let mut data = [[0; 4]; N];
    for (i, quad) in data.iter_mut().enumerate() {
        // SAFETY: the caller's.
        *quad = unsafe { global::load_16(address + i as u64 * u64::from(16 * GROUP)) };
    }
    data
}

/// Writes the block at `position`, or the part of it that is inside the data.
///
/// # Safety
/// It begins inside the data.
#[inline(always)]
unsafe fn put<const XOR: bool>(params: &CtrParams, position: u64, keystream: Quad, aligned: bool) {
    let (input, output) = (params.input + 16 * position, params.output + 16 * position);
    let bytes = params.bytes - 16 * position;
    // SAFETY: the caller's.
    unsafe {
        if aligned && bytes >= 16 {
            let data = if XOR { global::load_16(input) } else { [0; 4] };
            global::store_16(output, xor(keystream, data));
        } else {
            // The next byte is always the lowest: an index at run time would put the quad into local memory.
            let [mut a, mut b, mut c, mut d] = keystream;
            for i in 0..bytes.min(16) {
                let data = if XOR { global::load_u8(input + i) } else { 0 };
                global::store_u8(output + i, a as u8 ^ data);
                a = bits::funnel_shift_right(a, b, 8);
                b = bits::funnel_shift_right(b, c, 8);
                c = bits::funnel_shift_right(c, d, 8);
                d >>= 8;
            }
        }
    }
}

macro_rules! ctr_kernels {
    ($($bits:literal $rounds:literal $xor:ident $keystream:ident;)*) => {
        $(kernel! {
            threads = 512, shared = SHARED_BYTES,
            #[doc = concat!("AES-", $bits, "-CTR: `output = input ^ keystream`, any length and alignment, any grid.")]
            fn $xor(params: CtrParams) {
                // SAFETY: by the launcher's promise.
                unsafe { ctr::<$rounds, true>(&params) }
            }
        }
        kernel! {
            threads = 512, shared = SHARED_BYTES,
            #[doc = concat!("The keystream of AES-", $bits, "-CTR, any length and alignment, any grid.")]
            fn $keystream(params: CtrParams) {
                // SAFETY: by the launcher's promise.
                unsafe { ctr::<$rounds, false>(&params) }
            }
        })*
    };
}

ctr_kernels! {
    "128" 10 aes128_ctr_xor aes128_ctr_keystream;
    "192" 12 aes192_ctr_xor aes192_ctr_keystream;
    "256" 14 aes256_ctr_xor aes256_ctr_keystream;
}
