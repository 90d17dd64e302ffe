//! AES-GCM for GPUs without `wgmma`: the kernels of [`gcm`] and
//! [`message`], with chains that each warp multiplies by itself
//! (`mma.sync`, compute capability 8.0 and newer). 163 KiB of shared memory a block are enough.
//!
//! A warp's product reads a whole matrix, 4 KiB, for its 32 blocks, where a warpgroup reads it for 128. So a thread's two
//! blocks of a tile have chains of their own and share what is loaded: three matrices (the group's two tiles, and the
//! state) for four blocks a thread. That is 24 shared-memory wavefronts for 32 blocks in place of 10. Counts are packed as
//! they come, 16 columns at a time, so that few registers hold any.

use crate::device::{Quad, bits, global, shared, tensor, thread, warp};
use crate::gcm::{self, RecordsParams, records_shared};
use crate::gf128::MATRIX_BYTES;
use crate::ghash::{
    EARLIER, GROUP, GROUP_BEFORE, GROUP_STATE, LAST, LAST_OF_FIRST, Matrices, SECOND, THREADS, TileChains,
    select,
};
use crate::message::{self, MessageParams, message_shared};
use crate::params::{SHARED_BASE, SHARED_END_SM_80};

/// Dynamic shared memory of the kernels on records.
pub const RECORDS_SHARED: u32 = records_shared::<WarpChains<true>>();
const _: () = assert!(SHARED_BASE + RECORDS_SHARED <= SHARED_END_SM_80);
/// Dynamic shared memory of the kernels on one message.
pub const MESSAGE_SHARED: u32 = message_shared::<WarpChains<false>>();
const _: () = assert!(SHARED_BASE + MESSAGE_SHARED <= SHARED_END_SM_80);

macro_rules! records_kernels {
    ($($bits:literal $rounds:literal $seal:ident $open:ident;)*) => {
        $(kernel! {
            threads = THREADS, shared = RECORDS_SHARED,
            #[doc = concat!("Seals records, AES-", $bits, ".")]
            fn $seal(params: RecordsParams) {
                // SAFETY: the kernel's contract.
                unsafe { gcm::records::<$rounds, true, WarpChains<true>>(&params) }
            }
        }
        kernel! {
            threads = THREADS, shared = RECORDS_SHARED,
            #[doc = concat!("Opens records, AES-", $bits, ".")]
            fn $open(params: RecordsParams) {
                // SAFETY: the kernel's contract.
                unsafe { gcm::records::<$rounds, false, WarpChains<true>>(&params) }
            }
        })*
    };
}

macro_rules! message_kernels {
    ($($bits:literal $rounds:literal $seal:ident $open:ident;)*) => {
        $(kernel! {
            threads = THREADS, shared = MESSAGE_SHARED,
            #[doc = concat!("Seals one message, AES-", $bits, ", on [`Plan::blocks`](crate::message::Plan::blocks) thread blocks.")]
            fn $seal(params: MessageParams) {
                // SAFETY: the kernel's contract.
                unsafe { message::message::<$rounds, true, WarpChains<false>>(&params) }
            }
        }
        kernel! {
            threads = THREADS, shared = MESSAGE_SHARED,
            #[doc = concat!("Opens one message, AES-", $bits, ", on [`Plan::blocks`](crate::message::Plan::blocks) thread blocks.")]
            fn $open(params: MessageParams) {
                // SAFETY: the kernel's contract.
                unsafe { message::message::<$rounds, false, WarpChains<false>>(&params) }
            }
        })*
    };
}

message_kernels! {
    "128" 10 gcm_seal_message_128 gcm_open_message_128;
    "192" 12 gcm_seal_message_192 gcm_open_message_192;
    "256" 14 gcm_seal_message_256 gcm_open_message_256;
}

records_kernels! {
    "128" 10 gcm_seal_records_128 gcm_open_records_128;
    "192" 12 gcm_seal_records_192 gcm_open_records_192;
    "256" 14 gcm_seal_records_256 gcm_open_records_256;
}

// Which matrix lies where in shared memory.
const LATER: u32 = 0;
const EARLY: u32 = MATRIX_BYTES;
const STATE: u32 = 2 * MATRIX_BYTES;
const BEFORE_FIRST: u32 = 3 * MATRIX_BYTES;

/// One thread's share of two sets of 128 chains, for its first and its second block of each tile. Two tiles are multiplied
/// together; see [`GroupedChains`](crate::ghash::GroupedChains). `BEFORE` tells whether there may be blocks before the first
/// tile.
pub struct WarpChains<const BEFORE: bool> {
    /// The latest tile's blocks.
    earlier: [Quad; 2],
    /// What the next group begins with, of each set; at first, a block of the tile before.
    states: [Quad; 2],
}

impl<const BEFORE: bool> TileChains for WarpChains<BEFORE> {
    const MATRICES_BYTES: u32 = 4 * MATRIX_BYTES;

    const RECOMPUTES: bool = true;

    type Share = [Quad; 2];

    #[inline(always)]
    unsafe fn fetch(key: u64) -> Self::Share {
        // SAFETY: the caller's.
        unsafe {
            [
                fetch(key + SECOND as u64, key + (EARLIER + MATRIX_BYTES) as u64),
                fetch(key + GROUP_STATE as u64, key + GROUP_BEFORE as u64),
            ]
        }
    }

    #[inline(always)]
    unsafe fn store(share: Self::Share, address: u32) -> Matrices {
        // SAFETY: the caller's.
        unsafe {
            shared::store_16::<LATER>(address + 16 * thread::index(), share[0]);
            shared::store_16::<STATE>(address + 16 * thread::index(), share[1]);
        }
        Matrices::at(address)
    }

    #[inline(always)]
    fn new(before: Quad, tiles: u32) -> Self {
        let (state, earlier) =
            if tiles.is_multiple_of(GROUP as u32) { (before, [0; 4]) } else { ([0; 4], before) };
        WarpChains { earlier: [[0; 4], earlier], states: [[0; 4], state] }
    }

    #[inline(always)]
    unsafe fn take(&mut self, blocks: [Quad; 2], tile: u32, tiles: u32, matrices: Matrices) {
        if (tiles - 1 - tile).is_multiple_of(GROUP as u32) {
            // Opaque, so that no register holds it across the loop.
            // SAFETY: the caller's.
            unsafe {
                let matrices = matrices.0 + 16 * bits::opaque(thread::lane());
                let state = if BEFORE && tile < GROUP as u32 { BEFORE_FIRST } else { STATE };
                self.take_group(blocks, matrices, matrices + state);
            }
        }
        self.earlier = blocks;
    }

    #[inline(always)]
    unsafe fn last(&self, lengths: Quad, key: u64, _matrices: Matrices) -> u32 {
        let mut second = self.states[1];
        let last = thread::index().wrapping_sub(THREADS - 4);
        second[0] ^= if last < 4 { select(lengths, last % 4) } else { 0 };
        // The halves of a chain in one row, the second times x^32 more.
        let (first, second) = ([self.states[0][0], 0, self.states[0][1], 0], [second[0], 0, second[1], 0]);
        // Shuffled, so that the compiler sees that it is uniform.
        let warpgroup = warp::shuffle(thread::warp() / 4, 0);
        let lane = (warpgroup * MATRIX_BYTES + 4 * thread::lane()) as u64;
        let mut word = 0;
        // SAFETY: the caller's.
        unsafe {
            let product = |i: u32| {
                let firsts = load_global(key + LAST_OF_FIRST as u64 + lane, i);
                let seconds = load_global(key + LAST as u64 + lane, i);
                tensor::multiply_warp(tensor::multiply_warp([0; 4], &first, firsts), &second, seconds)
            };
            let mut i = 0;
            while i < 5 {
                let (a, b, c) = (product(3 * i), product(3 * i + 1), product(3 * i + 2));
                word |= tensor::pack_three(0, [a[0], a[1], b[0]], 0) << (2 * i);
                word |= tensor::pack_three(0, [b[1], c[0], c[1]], 3) << (2 * i);
                i += 1;
            }
            let d = product(15);
            word | tensor::pack_last([d[0], d[1]])
        }
    }
}

/// This thread's quad of two matrices of a key, at `first` and `second`, in the order in which [`WarpChains::pair`] loads
/// them from shared memory: a lane's fragments of 16 columns together.
///
/// # Safety
/// As [`TileChains::fetch`].
#[inline(always)]
unsafe fn fetch(first: u64, second: u64) -> Quad {
    const _: () = assert!(2 * MATRIX_BYTES == 16 * THREADS);
    let index = thread::index();
    let quad = index % (THREADS / 2);
    let from = if index < THREADS / 2 { first } else { second } + (quad / 32 * 512 + quad % 32 * 4) as u64;
    // SAFETY: the caller's.
    unsafe {
        [
            global::load_u32(from),
            global::load_u32(from + 128),
            global::load_u32(from + 256),
            global::load_u32(from + 384),
        ]
    }
}

/// This lane's fragments of the columns 8 i to 8 i + 7 of a matrix in a key.
///
/// # Safety
/// `from` is the address of word `lane` of the matrix.
#[inline(always)]
unsafe fn load_global(from: u64, i: u32) -> [u32; 2] {
    let from = from + (256 * i) as u64;
    // SAFETY: the caller's.
    unsafe { [global::load_u32(from), global::load_u32(from + 128)] }
}

/// A row's word, and the counts that aren't in it yet. Each pair of products is packed before the next is begun, so that few
/// counts are held at once. `PAIR` is the pair's number, and `ROW` where the row's counts begin in its fragments.
struct Row {
    word: u32,
    left: [u32; 2],
}

impl Row {
    const EMPTY: Self = Row { word: 0, left: [0; 2] };

    /// With no counts left over.
    #[inline(always)]
    fn take_first<const PAIR: u32, const ROW: usize>(&mut self, [e, f]: [tensor::Fragment; 2]) {
        self.word = tensor::pack_three(self.word, [e[ROW], e[ROW + 1], f[ROW]], 4 * PAIR);
        self.left[0] = f[ROW + 1];
    }

    /// With one left over.
    #[inline(always)]
    fn take_second<const PAIR: u32, const ROW: usize>(&mut self, [e, f]: [tensor::Fragment; 2]) {
        self.word = tensor::pack_three(self.word, [self.left[0], e[ROW], e[ROW + 1]], 4 * PAIR - 1);
        self.left = [f[ROW], f[ROW + 1]];
    }

    /// With two left over.
    #[inline(always)]
    fn take_third<const PAIR: u32, const ROW: usize>(&mut self, [e, f]: [tensor::Fragment; 2]) {
        self.word = tensor::pack_three(self.word, [self.left[0], self.left[1], e[ROW]], 4 * PAIR - 2);
        self.word = tensor::pack_three(self.word, [e[ROW + 1], f[ROW], f[ROW + 1]], 4 * PAIR + 1);
    }

    /// With one left over, when no more follow.
    #[inline(always)]
    fn take_last<const PAIR: u32, const ROW: usize>(&mut self, [e, f]: [tensor::Fragment; 2]) {
        self.word = tensor::pack_three(self.word, [self.left[0], e[ROW], e[ROW + 1]], 4 * PAIR - 1);
        self.word |= tensor::pack_last([f[ROW], f[ROW + 1]]);
    }
}

/// 16 columns of both sets' products: for columns 0 to 7, then 8 to 15, the counts of a row g, then of row g + 8.
struct Pair {
    first: [tensor::Fragment; 2],
    second: [tensor::Fragment; 2],
}

impl<const BEFORE: bool> WarpChains<BEFORE> {
    /// # Safety
    /// As [`TileChains::take`]; `matrices` is the address of this lane's first quad, and `state` that of its first of the
    /// matrix for the states.
    #[inline(always)]
    unsafe fn take_group(&mut self, blocks: [Quad; 2], matrices: u32, state: u32) {
        // The rows g and g + 8 of each set.
        let (mut a, mut b, mut c, mut d) = (Row::EMPTY, Row::EMPTY, Row::EMPTY, Row::EMPTY);
        macro_rules! take {
            ($($method:ident $pair:literal;)*) => {
                $(
                    // SAFETY: the caller's.
                    let pair = unsafe { self.pair::<$pair>(&blocks, matrices, state) };
                    a.$method::<$pair, 0>(pair.first);
                    b.$method::<$pair, 2>(pair.first);
                    c.$method::<$pair, 0>(pair.second);
                    d.$method::<$pair, 2>(pair.second);
                )*
            };
        }
        take! {
            take_first 0;
            take_second 1;
            take_third 2;
            take_first 3;
            take_second 4;
            take_third 5;
            take_first 6;
            take_last 7;
        }
        let (a, b, c, d) = (a.word, b.word, c.word, d.word);
        self.states = [[a, b, 0, 0], [c, d, 0, 0]];
    }

    /// Number `P` of eight.
    ///
    /// # Safety
    /// As [`take_group`](Self::take_group).
    #[inline(always)]
    unsafe fn pair<const P: u32>(&self, blocks: &[Quad; 2], matrices: u32, state: u32) -> Pair {
        // SAFETY: the caller's.
        unsafe {
            let states = shared::load_16::<0>(state + 512 * P);
            let early = shared::load_16::<EARLY>(matrices + 512 * P);
            let later = shared::load_16::<LATER>(matrices + 512 * P);
            let product = |set: usize, half: usize| {
                let counts = tensor::multiply_warp(
                    [0; 4],
                    &self.states[set],
                    [states[2 * half], states[2 * half + 1]],
                );
                let counts =
                    tensor::multiply_warp(counts, &self.earlier[set], [early[2 * half], early[2 * half + 1]]);
                tensor::multiply_warp(counts, &blocks[set], [later[2 * half], later[2 * half + 1]])
            };
            Pair { first: [product(0, 0), product(0, 1)], second: [product(1, 0), product(1, 1)] }
        }
    }
}
