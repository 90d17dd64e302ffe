//! GHASH (NIST SP 800-38D section 6.4) as chains that the tensor cores carry side by side, with the tag of the standard.
//!
//! A block of 512 threads takes a **tile** of 1,024 blocks at a time: thread i the blocks i and 512 + i. Four lanes' blocks are one row of a product (see [`data_multiplier`]), so a tile feeds 128 chains, 8 in each warp. A
//! chain's state is the sum of its blocks, each times the power of H that brings it to the end of the latest tile;
//! [`Chains`] holds one word of two half chains in each thread, packed from the low bits of the counts. A tile costs 64
//! counts to pack a thread and, in shared-memory wavefronts a block of the message, 3 / 8 for its three matrices.
//!
//! At the end one more product brings each warpgroup's chains to the end of the tile and adds both halves of a chain
//! ([`Chains::last`]). The warpgroups' words are then added through shared memory, and what is left, 32 chains, is
//! brought to the end of the message by their own powers ([`GhashKey::lanes`]), bit by bit ([`part`]).

use crate::device::tensor::Part;
use crate::device::{self, Quad, global, shared, tensor, thread, warp};
use crate::gf128::{
    Element, MATRIX_BYTES, MATRIX_WORDS, data_multiplier, matrix_word, matrix_word_place, state_multiplier,
};

/// Threads of a block that carries chains.
pub const THREADS: u32 = 512;
/// 16-byte blocks that a tile takes: two a thread.
pub const TILE: u32 = 2 * THREADS;

/// Matrices of a [`GhashKey`].
pub const MATRICES: u32 = GROUP_MATRICES + WARPGROUPS;
const GROUP_MATRICES: u32 = 4 + WARPGROUPS + 2 * (GROUP as u32 - 1) + 2;
const WARPGROUPS: u32 = THREADS / 128;

// Which matrix is which.
const STATE: u32 = 0;
const BEFORE: u32 = MATRIX_BYTES;
const FIRST: u32 = 2 * MATRIX_BYTES;
pub(crate) const SECOND: u32 = 3 * MATRIX_BYTES;
pub(crate) const LAST: u32 = 4 * MATRIX_BYTES;
pub(crate) const EARLIER: u32 = LAST + WARPGROUPS * MATRIX_BYTES;
pub(crate) const GROUP_STATE: u32 = EARLIER + 2 * (GROUP as u32 - 1) * MATRIX_BYTES;
pub(crate) const GROUP_BEFORE: u32 = GROUP_STATE + MATRIX_BYTES;
pub(crate) const LAST_OF_FIRST: u32 = GROUP_MATRICES * MATRIX_BYTES;

/// Tiles that [`GroupedChains`] multiply together.
pub const GROUP: usize = 2;

/// Chains that [`part`] adds, in words: one warpgroup's.
pub const LANES: u32 = 128;

/// What the kernels need of a hash key H, in device memory; secret. Made by [`ghash_key()`].
#[repr(C, align(1024))]
pub struct GhashKey {
    /// In this order: for the state (H^1024), for the second block of the tile before the first (H^1024), for the first block
    /// of each thread (H^512), and for the second (1); then for the last state of warpgroup q (H^(128 (3 - q))).
    /// For groups of two tiles: for the first and second block of each thread in the tile before the last
    /// (H^1536 and H^1024); for the state, and for the second block of the tile before (H^2048). For [`portable`], where
    /// first blocks have chains of their own, these chains' last state in warpgroup q (H^(512 + 128 (3 - q))).
    ///
    /// [`portable`]: crate::portable
    pub matrices: [[u32; MATRIX_WORDS as usize]; MATRICES as usize],
    /// What the word of a warpgroup's thread j is worth at the end of a message's last block, after the last product:
    /// H^(125 - 4 (j / 4)) x^(32 (j mod 4)).
    pub lanes: [Element; LANES as usize],
}

/// Bytes that a block copies to shared memory for [`Chains`]: the first of [`GhashKey::matrices`].
pub const MATRICES_BYTES: u32 = EARLIER;
/// Bytes that a block copies to shared memory for [`GroupedChains`]: those from `FIRST` on.
pub const GROUP_MATRICES_BYTES: u32 = GROUP_MATRICES * MATRIX_BYTES - FIRST;
/// Where [`GhashKey::lanes`] begins.
pub const LANES_OFFSET: u64 = (MATRICES * MATRIX_BYTES) as u64;
const _: () = assert!(core::mem::offset_of!(GhashKey, lanes) as u64 == LANES_OFFSET);

/// Which block of a tile is `thread`'s first (`slot` 0) or second (1).
#[inline(always)]
pub const fn block_of(thread: u32, slot: u32) -> u32 {
    THREADS * slot + thread
}

/// From a thread's first block of a tile to its second. A multiple of 256, so that their counters' last bytes agree.
pub const APART: u32 = block_of(0, 1) - block_of(0, 0);

/// Parameters of [`ghash_key()`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct GhashKeyParams {
    /// H: the cipher of the zero block, raw words.
    pub h: [u32; 4],
    /// Address of the [`GhashKey`] to fill.
    pub key: u64,
}

kernel! {
    threads = 256, shared = 0,
    /// Fills a [`GhashKey`]: one block a matrix, then one for the lanes.
    fn ghash_key(params: GhashKeyParams) {
        let h = Element::from_raw(params.h);
        let (block, index) = (thread::block_index(), thread::index());
        if block < MATRICES {
            let (_, word) = matrix_word_place(index);
            let multiplier = multiplier(h, block * MATRIX_BYTES, word);
            let mut i = index;
            while i < MATRIX_WORDS {
                let (n, _) = matrix_word_place(i);
                let address = params.key + (block * MATRIX_BYTES + 4 * i) as u64;
                // SAFETY: in the key's matrices.
                unsafe { global::store_u32(address, matrix_word(multiplier, n)) };
                // A multiple of 64: the same rows again.
                i += 256;
            }
        } else if index < LANES {
            let value = h.power((LANES - 3 - index / 4 * 4) as u64).times_x_to(32 * (index % 4));
            // SAFETY: in the key's lanes.
            unsafe { global::store_16(params.key + LANES_OFFSET + 16 * index as u64, value.words()) };
        }
    }
}

/// Of the matrix at `matrix` in a [`GhashKey`]: see [`data_multiplier`] and [`state_multiplier`].
#[inline(always)]
fn multiplier(h: Element, matrix: u32, word: u32) -> Element {
    // By ranges, not one by one: that became a table, in local memory.
    let exponent = if matrix < FIRST {
        TILE
    } else if matrix <= SECOND {
        if matrix == FIRST { APART } else { 0 }
    } else if matrix < EARLIER {
        to_end(matrix - LAST)
    } else if matrix < GROUP_STATE {
        let after = (matrix - EARLIER) / MATRIX_BYTES;
        TILE * (after / 2) + TILE + if after.is_multiple_of(2) { APART } else { 0 }
    } else if matrix < LAST_OF_FIRST {
        GROUP as u32 * TILE
    } else {
        APART + to_end(matrix - LAST_OF_FIRST)
    };
    let scale = h.power(exponent as u64);
    let is_data = (BEFORE..LAST).contains(&matrix)
        || (EARLIER..GROUP_STATE).contains(&matrix)
        || matrix == GROUP_BEFORE;
    if is_data { data_multiplier(h, scale, word) } else { state_multiplier(scale, word) }
}

/// Blocks from the end of warpgroup q to the end of the last, for q matrices, in bytes.
#[inline(always)]
fn to_end(matrices: u32) -> u32 {
    128 * (WARPGROUPS - 1 - matrices / MATRIX_BYTES)
}

/// Blocks of a launch of [`ghash_key()`].
pub const GHASH_KEY_GRID: u32 = MATRICES + 1;

/// The matrices of one key in shared memory.
#[derive(Clone, Copy)]
pub struct Matrices(pub(crate) u32);

impl Matrices {
    /// What loading returned to other threads of the block.
    #[inline(always)]
    pub const fn at(address: u32) -> Self {
        Matrices(address)
    }

    /// Copies a key's matrices to shared memory at `address`. All threads of the block; visible after the next
    /// [`device::sync_threads`].
    ///
    /// # Safety
    /// `key` is the address of a filled [`GhashKey`]; [`MATRICES_BYTES`] of shared memory at `address`, a multiple of
    /// 128, are nobody else's.
    #[inline(always)]
    pub unsafe fn load(key: u64, address: u32) -> Self {
        // SAFETY: the caller's.
        unsafe { Self::store(Self::fetch(key), address) }
    }

    /// The first half of [`load`](Self::load): this thread's share, loaded.
    ///
    /// # Safety
    /// `key` is the address of a filled [`GhashKey`].
    #[inline(always)]
    #[allow(clippy::needless_range_loop, reason = "an iterator over the array costs registers")]
    pub unsafe fn fetch(key: u64) -> [Quad; SHARES] {
        let mut share = [[0; 4]; SHARES];
        for i in 0..SHARES {
            // SAFETY: the caller's.
            share[i] = unsafe { global::load_16(key + 16 * (thread::index() + i as u32 * THREADS) as u64) };
        }
        share
    }

    /// The second half of [`load`](Self::load).
    ///
    /// # Safety
    /// As [`load`](Self::load).
    #[inline(always)]
    #[allow(clippy::needless_range_loop, reason = "an iterator over the array costs registers")]
    pub unsafe fn store(share: [Quad; SHARES], address: u32) -> Self {
        for i in 0..SHARES {
            let place = address + 16 * (thread::index() + i as u32 * THREADS);
            // SAFETY: the caller's.
            unsafe { shared::store_16::<0>(place, share[i]) };
        }
        device::fence::proxy_async_shared();
        Matrices(address)
    }

    /// As [`load`](Self::load), for [`GroupedChains`], by the first [`THREADS`] of a block: [`GROUP_MATRICES_BYTES`].
    ///
    /// # Safety
    /// As [`load`](Self::load).
    #[inline(always)]
    pub unsafe fn load_group(key: u64, address: u32) -> Self {
        // SAFETY: the caller's.
        unsafe { GroupedChains::store(GroupedChains::fetch(key), address) }
    }
}

/// Quads of the matrices that each thread copies.
const SHARES: usize = (MATRICES_BYTES / (16 * THREADS)) as usize;
const _: () = assert!(MATRICES_BYTES.is_multiple_of(16 * THREADS));
const _: () = assert!((EARLIER / MATRIX_BYTES).is_multiple_of(2));
/// A thread's share of the matrices of [`GroupedChains`].
pub type GroupShare = [Quad; GROUP_SHARES];
const GROUP_SHARES: usize = (GROUP_MATRICES_BYTES / (16 * THREADS)) as usize;
const _: () = assert!(GROUP_MATRICES_BYTES.is_multiple_of(16 * THREADS));

/// One thread's share of 128 chains.
pub struct Chains {
    /// What the next tile begins with, and the matrix that brings it there: word t of a row g's sum and of row g + 8's
    /// (which is short of a factor x^32); at first, a block of the tile before.
    state: Quad,
    state_matrix: u32,
}

impl Chains {
    /// Chains of one block a thread: the second of the tile before the first.
    #[inline(always)]
    pub const fn new(before: Quad) -> Self {
        Chains { state: before, state_matrix: BEFORE }
    }

    /// Takes a tile: this thread's two blocks of it.
    ///
    /// # Safety
    /// All threads of a warpgroup together, under control flow that is uniform for the compiler to see.
    #[inline(always)]
    pub unsafe fn take(&mut self, blocks: [Quad; 2], matrices: Matrices) {
        let mut counts = tensor::Counts::zero();
        tensor::fence();
        // SAFETY: the caller's; the matrices are written.
        unsafe {
            counts.multiply::<false>(&self.state, matrices.0 + self.state_matrix);
            counts.multiply::<true>(&blocks[0], matrices.0 + FIRST);
            counts.multiply::<true>(&blocks[1], matrices.0 + SECOND);
        }
        tensor::commit();
        counts.wait(&[self.state, blocks[0], blocks[1]]);
        let [low, high] = counts.pack([0; 2]);
        self.state = [low, high, 0, 0];
        self.state_matrix = STATE;
    }

    /// Adds `block` to the last chain, after whose blocks one more factor H comes: where the block of lengths belongs.
    #[inline(always)]
    pub fn add_last(&mut self, block: Quad) {
        let last = thread::index().wrapping_sub(THREADS - 4);
        let word = select(block, last % 4);
        self.state[0] ^= if last < 4 { word } else { 0 };
    }

    /// This thread's word for [`part`]: brings the chains of its warpgroup to the end of the last tile, both halves of
    /// each together. After the last [`Self::take`].
    ///
    /// # Safety
    /// As [`Self::take`].
    #[inline(always)]
    pub unsafe fn last(&self, matrices: Matrices) -> u32 {
        let mut counts = tensor::Counts::zero();
        // Shuffled, so that the compiler sees that it is uniform.
        let warpgroup = warp::shuffle(thread::warp() / 4, 0);
        let state = [self.state[0], 0, self.state[1], 0];
        tensor::fence();
        // SAFETY: the caller's; the matrices are written.
        unsafe {
            counts.multiply::<false>(&state, matrices.0 + LAST + warpgroup * MATRIX_BYTES);
        }
        tensor::commit();
        counts.wait(&[state]);
        counts.pack([0; 2])[0]
    }
}

/// How a kernel hashes its tiles: [`Chains`], [`GroupedChains`], or [`WarpChains`](crate::portable::WarpChains).
pub trait TileChains {
    /// Bytes of shared memory that the matrices take, a multiple of 128.
    const MATRICES_BYTES: u32;

    /// Whether they leave so few registers that a kernel's loop had better compute again what others would keep.
    const RECOMPUTES: bool = false;

    /// A thread's share of the matrices.
    type Share;

    /// Loads this thread's share of a key's matrices; all threads of the block, [`THREADS`].
    ///
    /// # Safety
    /// `key` is the address of a filled [`GhashKey`].
    unsafe fn fetch(key: u64) -> Self::Share;

    /// Stores what all threads fetched to shared memory at `address`; visible after the next barrier.
    ///
    /// # Safety
    /// [`MATRICES_BYTES`](Self::MATRICES_BYTES) of shared memory at `address`, a multiple of 128, are nobody else's.
    unsafe fn store(share: Self::Share, address: u32) -> Matrices;

    /// Chains for a message of `tiles` tiles, of one block a thread: the second of the tile before the first.
    fn new(before: Quad, tiles: u32) -> Self;

    /// Takes tile number `tile` of `tiles`: this thread's two blocks of it.
    ///
    /// # Safety
    /// All threads of a warpgroup together, under control flow that is uniform for the compiler to see; the numbers are the
    /// same in all. The matrices are stored.
    unsafe fn take(&mut self, blocks: [Quad; 2], tile: u32, tiles: u32, matrices: Matrices);

    /// This thread's word for [`part`], after the last tile. `lengths` belongs at the end of the message.
    ///
    /// # Safety
    /// As [`take`](Self::take); `key` is that of [`fetch`](Self::fetch).
    unsafe fn last(&self, lengths: Quad, key: u64, matrices: Matrices) -> u32;
}

impl TileChains for Chains {
    const MATRICES_BYTES: u32 = MATRICES_BYTES;

    type Share = [Quad; SHARES];

    #[inline(always)]
    unsafe fn fetch(key: u64) -> Self::Share {
        // SAFETY: the caller's.
        unsafe { Matrices::fetch(key) }
    }

    #[inline(always)]
    unsafe fn store(share: Self::Share, address: u32) -> Matrices {
        // SAFETY: the caller's.
        unsafe { Matrices::store(share, address) }
    }

    #[inline(always)]
    fn new(before: Quad, _tiles: u32) -> Self {
        Self::new(before)
    }

    #[inline(always)]
    unsafe fn take(&mut self, blocks: [Quad; 2], _tile: u32, _tiles: u32, matrices: Matrices) {
        // SAFETY: the caller's.
        unsafe { Chains::take(self, blocks, matrices) }
    }

    #[inline(always)]
    unsafe fn last(&self, lengths: Quad, _key: u64, matrices: Matrices) -> u32 {
        let mut chains = Chains { state: self.state, state_matrix: self.state_matrix };
        chains.add_last(lengths);
        // SAFETY: the caller's.
        unsafe { Chains::last(&chains, matrices) }
    }
}

impl TileChains for GroupedChains {
    const MATRICES_BYTES: u32 = GROUP_MATRICES_BYTES;

    type Share = GroupShare;

    #[inline(always)]
    #[allow(clippy::needless_range_loop, reason = "an iterator over the array costs registers")]
    unsafe fn fetch(key: u64) -> Self::Share {
        let mut share = [[0; 4]; GROUP_SHARES];
        for i in 0..GROUP_SHARES {
            // SAFETY: the caller's.
            let place = FIRST + 16 * (thread::index() + i as u32 * THREADS);
            // SAFETY: the caller's.
            share[i] = unsafe { global::load_16(key + place as u64) };
        }
        share
    }

    #[inline(always)]
    #[allow(clippy::needless_range_loop, reason = "an iterator over the array costs registers")]
    unsafe fn store(share: Self::Share, address: u32) -> Matrices {
        for i in 0..GROUP_SHARES {
            let place = address + 16 * (thread::index() + i as u32 * THREADS);
            // SAFETY: the caller's.
            unsafe { shared::store_16::<0>(place, share[i]) };
        }
        device::fence::proxy_async_shared();
        Self::at(address)
    }

    #[inline(always)]
    fn new(before: Quad, tiles: u32) -> Self {
        Self::new(before, tiles)
    }

    #[inline(always)]
    unsafe fn take(&mut self, blocks: [Quad; 2], tile: u32, tiles: u32, matrices: Matrices) {
        // SAFETY: the caller's.
        unsafe { GroupedChains::take(self, blocks, tiles - 1 - tile, matrices) }
    }

    #[inline(always)]
    unsafe fn last(&self, lengths: Quad, _key: u64, matrices: Matrices) -> u32 {
        // SAFETY: the caller's.
        unsafe { GroupedChains::last(self, lengths, matrices) }
    }
}

/// [`Chains`] that keep a tile's blocks in registers and multiply two tiles together: half the feedback, packing and
/// waiting. Keeping the blocks takes 8 registers while AES runs, where counts that grow from tile to tile would take 64.
///
/// A message's last group ends with its last tile. In its first, what is missing is zero.
pub struct GroupedChains {
    /// The latest tile's blocks.
    earlier: [Quad; 2],
    /// As in [`Chains`].
    state: Quad,
    state_matrix: u32,
}

impl GroupedChains {
    /// What storing a key's matrices at `address` returned to other threads of the block.
    #[inline(always)]
    pub const fn at(address: u32) -> Matrices {
        // Those before are not there.
        Matrices(address - FIRST)
    }

    /// Chains for a message of `tiles` tiles, of one block a thread: the second of the tile before the first.
    #[inline(always)]
    pub const fn new(before: Quad, tiles: u32) -> Self {
        let (state, earlier) =
            if tiles.is_multiple_of(GROUP as u32) { (before, [0; 4]) } else { ([0; 4], before) };
        GroupedChains { earlier: [[0; 4], earlier], state, state_matrix: GROUP_BEFORE }
    }

    /// Takes the tile after which `left` follow: this thread's two blocks of it.
    ///
    /// # Safety
    /// As [`Chains::take`]; `left` is the same in all threads.
    #[inline(always)]
    pub unsafe fn take(&mut self, blocks: [Quad; 2], left: u32, matrices: Matrices) {
        let [a, b] = self.earlier;
        if left.is_multiple_of(GROUP as u32) {
            // SAFETY: the caller's.
            unsafe { self.take_group([a, b, blocks[0], blocks[1]], matrices) };
        }
        self.earlier = blocks;
    }

    /// Takes a whole group: this thread's blocks of its tiles. In place of [`take`](Self::take), not beside it.
    ///
    /// # Safety
    /// As [`Chains::take`].
    #[inline(always)]
    pub unsafe fn take_group(&mut self, [a, b, c, d]: [Quad; 2 * GROUP], matrices: Matrices) {
        // Not by way of `part`, of which the compiler makes other code.
        let mut counts = tensor::Counts::zero();
        tensor::fence();
        // SAFETY: the caller's; the matrices are written.
        unsafe {
            counts.multiply::<false>(&self.state, matrices.0 + self.state_matrix);
            counts.multiply::<true>(&a, matrices.0 + EARLIER);
            counts.multiply::<true>(&b, matrices.0 + EARLIER + MATRIX_BYTES);
            counts.multiply::<true>(&c, matrices.0 + FIRST);
            counts.multiply::<true>(&d, matrices.0 + SECOND);
        }
        tensor::commit();
        counts.wait(&[self.state, a, b, c, d]);
        let [low, high] = counts.pack([0; 2]);
        self.state = [low, high, 0, 0];
        self.state_matrix = GROUP_STATE;
    }

    /// Keeps a tile's blocks for the group that ends with the next.
    #[inline(always)]
    pub const fn keep(&mut self, blocks: [Quad; 2]) {
        self.earlier = blocks;
    }

    /// Takes the tile that ends a group, with the one that was [kept](Self::keep). The product's columns in two parts, one after
    /// the other: 24 registers fewer for the counts, for two waits.
    ///
    /// # Safety
    /// As [`Chains::take`].
    #[inline(always)]
    pub unsafe fn take_group_in_parts(&mut self, [c, d]: [Quad; 2], matrices: Matrices) {
        let [a, b] = self.earlier;
        let operands = [self.state, a, b, c, d];
        // SAFETY: the caller's.
        let [low, high] = unsafe {
            let words = self.part::<tensor::FirstCounts>(&operands, matrices, [0; 2]);
            self.part::<tensor::SecondCounts>(&operands, matrices, words)
        };
        self.state = [low, high, 0, 0];
        self.state_matrix = GROUP_STATE;
    }

    /// Some columns of a group's product, added to the others' packed `words`.
    ///
    /// # Safety
    /// As [`take`](Self::take).
    #[inline(always)]
    unsafe fn part<P: Part>(
        &self,
        operands: &[Quad; 2 * GROUP + 1],
        matrices: Matrices,
        words: [u32; 2],
    ) -> [u32; 2] {
        let mut counts = P::zero();
        tensor::fence();
        // SAFETY: the caller's; the matrices are written.
        unsafe {
            counts.multiply::<false>(&operands[0], matrices.0 + self.state_matrix);
            counts.multiply::<true>(&operands[1], matrices.0 + EARLIER);
            counts.multiply::<true>(&operands[2], matrices.0 + EARLIER + MATRIX_BYTES);
            counts.multiply::<true>(&operands[3], matrices.0 + FIRST);
            counts.multiply::<true>(&operands[4], matrices.0 + SECOND);
        }
        tensor::commit();
        counts.wait(operands);
        counts.pack(words)
    }

    /// [`Chains::add_last`] and [`Chains::last`].
    ///
    /// # Safety
    /// As [`Chains::take`].
    #[inline(always)]
    pub unsafe fn last(&self, lengths: Quad, matrices: Matrices) -> u32 {
        let mut chains = Chains { state: self.state, state_matrix: STATE };
        chains.add_last(lengths);
        // SAFETY: the caller's.
        unsafe { chains.last(matrices) }
    }
}

/// Copies [`GhashKey::lanes`] to shared memory at `address`. All threads of the block; visible after the next
/// [`device::sync_threads`].
///
/// # Safety
/// `key` is the address of a filled [`GhashKey`]; [`LANES_BYTES`] of shared memory at `address`, a multiple of 16, are
/// nobody else's.
#[inline(always)]
pub unsafe fn load_lanes(key: u64, address: u32) {
    let index = thread::index();
    if index < LANES {
        // SAFETY: the caller's.
        unsafe {
            shared::store_16::<0>(
                address + 16 * index,
                global::load_16(key + LANES_OFFSET + 16 * index as u64),
            )
        };
    }
}

/// The first half of [`load_lanes`]: what this thread copies, loaded.
///
/// # Safety
/// As [`load_lanes`].
#[inline(always)]
pub unsafe fn fetch_lane(key: u64) -> Quad {
    // By every thread, without a branch: those with nothing to copy load some of it again.
    // SAFETY: the caller's.
    unsafe { global::load_16(key + LANES_OFFSET + 16 * (thread::index() % LANES) as u64) }
}

/// The second half of [`load_lanes`].
///
/// # Safety
/// As [`load_lanes`].
#[inline(always)]
pub unsafe fn store_lane(lane: Quad, address: u32) {
    let index = thread::index();
    if index < LANES {
        // SAFETY: the caller's.
        unsafe { shared::store_16::<0>(address + 16 * index, lane) };
    }
}

/// Bytes of [`GhashKey::lanes`].
pub const LANES_BYTES: u32 = 16 * LANES;

/// Bytes for the words of all threads that [`part`] adds: [`Chains::last`] of thread i at 4 i.
pub const LAST_BYTES: u32 = 4 * THREADS;

/// A fourth of GHASH, from the words at `words` and the lanes at `lanes`: what this returns for `part` 0, 1, 2 and 3, by a
/// warp each, adds up to it over all lanes.
///
/// # Safety
/// Words and lanes are in shared memory, stored before a barrier.
#[inline(always)]
pub unsafe fn part(words: u32, lanes: u32, part: u32) -> Element {
    // SAFETY: the caller's.
    let (word, weight) = unsafe { chain(words, lanes, part) };
    let mut sum = Element::ZERO;
    let mut bit = 0;
    while bit < 32 {
        sum = sum.times_x();
        sum ^= weight.where_bit(word, bit);
        bit += 1;
    }
    sum
}

/// As [`part`], of two sums at once, with their [weights](weight), of words in which those of all warpgroups are added up
/// already. Leaves zeros in the words' place.
///
/// # Safety
/// The words are in shared memory, stored before a barrier, and this warp's alone until the next.
#[inline(always)]
pub unsafe fn two_parts(
    [words_a, words_b]: [u32; 2],
    [weight_a, weight_b]: [Element; 2],
    part: u32,
) -> [Element; 2] {
    let at = 128 * part + 4 * thread::lane();
    // SAFETY: the caller's; this thread's words.
    let [word_a, word_b] = unsafe {
        let words = [shared::load_u32::<0>(words_a + at), shared::load_u32::<0>(words_b + at)];
        shared::store_u32::<0>(words_a + at, 0);
        shared::store_u32::<0>(words_b + at, 0);
        words.map(u32::swap_bytes)
    };
    let (mut a, mut b) = (Element::ZERO, Element::ZERO);
    let mut bit = 0;
    while bit < 32 {
        (a, b) = (a.times_x(), b.times_x());
        a ^= weight_a.where_bit(word_a, bit);
        b ^= weight_b.where_bit(word_b, bit);
        bit += 1;
    }
    [a, b]
}

/// This lane's word of the chains of warp `warp` of all warpgroups, the coefficient of x^31 lowest, and its weight.
///
/// # Safety
/// As [`part`].
#[inline(always)]
unsafe fn chain(words: u32, lanes: u32, warp: u32) -> (u32, Element) {
    let words = words + 128 * warp + 4 * thread::lane();
    // SAFETY: the caller's.
    unsafe {
        let word = shared::load_u32::<0>(words)
            ^ shared::load_u32::<{ 4 * LANES }>(words)
            ^ shared::load_u32::<{ 8 * LANES }>(words)
            ^ shared::load_u32::<{ 12 * LANES }>(words);
        let weight = shared::load_16::<0>(lanes + 512 * warp + 16 * thread::lane());
        (word.swap_bytes(), Element::from_words(weight))
    }
}

/// The weight of this lane's word of the chains of warp `warp` of a warpgroup, from the key itself.
///
/// # Safety
/// `key` is the address of a filled [`GhashKey`].
#[inline(always)]
pub unsafe fn weight(key: u64, warp: u32) -> Element {
    let place = key + LANES_OFFSET + (512 * warp + 16 * thread::lane()) as u64;
    // SAFETY: the caller's.
    Element::from_words(unsafe { global::load_16(place) })
}

/// Word `i` (0 to 3) of a quad held in registers.
#[inline(always)]
pub fn select(quad: Quad, i: u32) -> u32 {
    let low = if i & 1 == 0 { quad[0] } else { quad[1] };
    let high = if i & 1 == 0 { quad[2] } else { quad[3] };
    if i & 2 == 0 { low } else { high }
}

/// The sum over a warp: word `lane / 8` of it, in every lane.
#[inline(always)]
pub fn warp_sum(share: Element) -> u32 {
    let [a, b, c, d] = share.words();
    let lane = thread::lane();
    // Halves of the words go to halves of the warp: 6 shuffles in place of 20.
    let (upper, second) = (lane & 16 != 0, lane & 8 != 0);
    let (keep0, send0) = if upper { (c, a) } else { (a, c) };
    let (keep1, send1) = if upper { (d, b) } else { (b, d) };
    let sum0 = keep0 ^ warp::shuffle_xor(send0, 16);
    let sum1 = keep1 ^ warp::shuffle_xor(send1, 16);
    let (keep, send) = if second { (sum1, sum0) } else { (sum0, sum1) };
    let mut sum = keep ^ warp::shuffle_xor(send, 8);
    sum ^= warp::shuffle_xor(sum, 4);
    sum ^= warp::shuffle_xor(sum, 2);
    sum ^ warp::shuffle_xor(sum, 1)
}
