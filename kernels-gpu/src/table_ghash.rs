//! GHASH (NIST SP 800-38D section 6.4) by tables, as many chains side by side: the multi-chained MAC of arXiv 2501.11771,
//! with the tag of the standard. For comparison, and for GPUs without the tensor cores that [`gf128`](crate::gf128)'s
//! matrices are for.
//!
//! With C chains, chain c takes blocks c, C + c, 2C + c, .. of additional data, text and lengths, with zero blocks put in
//! front to make whole rounds: Y := Y H^C + X. At the end chain c is worth H^(C - c), and the chains are summed. One chain
//! is the serial form.
//!
//! **Table.** A block is 32 nibbles. For each place and value of a nibble the table has its product with H^C: 512
//! elements, 8 KiB, found without shifts or reductions. It stands in shared memory eight times, so that a lane only reads
//! the banks of its number modulo 8: look-ups have no bank conflicts, and their time doesn't depend on key or data.
//!
//! **Cost model.** 32 look-ups of 16 bytes a block, 4 wavefronts each: W = 128 for 32 blocks, and 4.4 to load them. On 132
//! SMs at 1.98 GHz that limits it to 132 x 1.98 x 512 / 132.4 = 1011 GB/s. Larger tables would be read with conflicts: 8
//! bits at a time take half the look-ups, of some 11 wavefronts each. Beside its blocks a thread costs a share of the
//! table (64 KiB a thread block) and one product by integer
//! multiplications.

use crate::device::{self, Quad, global, shared, thread, warp};
use crate::gf128::Element;
use crate::params::SHARED_BASE;

/// Threads of a block, a chain each.
const THREADS: u32 = 128;
/// Most chains of a message.
pub const MOST_CHAINS: u32 = 1 << 16;

/// Elements of the table: 32 nibbles of 16 values.
const ENTRIES: u32 = 512;
/// Copies of the table in shared memory.
const COPIES: u32 = 8;
const TABLE_BYTES: u32 = ENTRIES * COPIES * 16;
/// A sum for each warp.
const SUMS_AT: u32 = SHARED_BASE + TABLE_BYTES;
/// Dynamic shared memory of [`mac_chains()`].
pub const MAC_SHARED: u32 = TABLE_BYTES + 16 * (THREADS / 32);

/// Bytes of a prepared key for so many chains: the table, then H^1 to H^C, 16 bytes each. Secret.
pub const fn mac_key_bytes(chains: u32) -> u64 {
    16 * (ENTRIES as u64 + chains as u64)
}

/// Blocks of a launch of [`mac_key()`].
pub const fn mac_key_grid(chains: u32) -> u32 {
    (ENTRIES + chains).div_ceil(THREADS)
}

/// Parameters of [`mac_key()`].
#[derive(Clone, Copy)]
#[repr(C)]
pub struct MacKeyParams {
    /// H: the cipher of the zero block, raw words.
    pub h: [u32; 4],
    /// Address of the prepared key to fill: [`mac_key_bytes`], a multiple of 16.
    pub key: u64,
    /// Chains, from 1 to [`MOST_CHAINS`].
    pub chains: u32,
}

kernel! {
    threads = 128, shared = 0,
    /// Prepares a key for a number of chains, on a grid of [`mac_key_grid`] blocks.
    fn mac_key(params: MacKeyParams) {
        let h = Element::from_raw(params.h);
        let index = thread::block_index() * THREADS + thread::index();
        if index >= ENTRIES + params.chains {
            return;
        }
        let element = if index < ENTRIES {
            let (place, value) = (index / 16, index % 16);
            let word = value << (4 * (place % 8));
            let at = |w: u32| if place / 8 == w { word } else { 0 };
            h.power(params.chains as u64).times(Element::from_raw([at(0), at(1), at(2), at(3)])).to_raw()
        } else {
            h.power((index - ENTRIES + 1) as u64).words()
        };
        // SAFETY: inside the key.
        unsafe { global::store_16(params.key + 16 * index as u64, element) };
    }
}

/// What the blocks of one launch of [`mac_chains()`] add up, in device memory. All zeros before it and after it.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(16))]
pub struct MacScratch {
    /// The sum of the chains so far.
    pub sum: Quad,
    /// Thread blocks that have added theirs.
    pub arrived: u32,
    /// Keeps the size a multiple of 16.
    pub reserved: [u32; 3],
}

const ARRIVED: u64 = core::mem::offset_of!(MacScratch, arrived) as u64;

/// Parameters of [`mac_chains()`].
#[derive(Clone, Copy)]
#[repr(C)]
pub struct MacParams {
    /// Additional data: [`aad_bytes`](Self::aad_bytes) bytes, at most 48, then zeros.
    pub aad: [Quad; 3],
    /// The cipher of the pre-counter block J0 (SP 800-38D, 7.1, step 6), raw words; secret.
    pub mask: Quad,
    /// Address of the key that [`mac_key()`] prepared for [`chains`](Self::chains).
    pub key: u64,
    /// Address of the ciphertext, a multiple of 16.
    pub text: u64,
    /// Its bytes; at most 2^36 - 32.
    pub bytes: u64,
    /// Address of the tag, a multiple of 16: stored, or compared with.
    pub tag: u64,
    /// Address of a [`MacScratch`], of no other launch that may run at the same time.
    pub scratch: u64,
    /// Address of a word of 8 bytes: the first failure, or 0. While it isn't 0, zeros are stored for tags, so that nothing
    /// that came from a refused message is passed on with a tag that verifies.
    pub failure: u64,
    /// What a tag that doesn't verify leaves there.
    pub place: u64,
    /// Chains; a shorter message uses only as many as it has blocks.
    pub chains: u32,
    /// Bytes of additional data.
    pub aad_bytes: u32,
    /// 1 to compare the tag, 0 to store it.
    pub check: u32,
}

/// Blocks of the hashed string: additional data, text, lengths.
const fn blocks_of(aad_bytes: u32, bytes: u64) -> u64 {
    aad_bytes.div_ceil(16) as u64 + bytes.div_ceil(16) + 1
}

/// Blocks of a launch of [`mac_chains()`].
pub const fn mac_grid(chains: u32, aad_bytes: u32, bytes: u64) -> u32 {
    let blocks = blocks_of(aad_bytes, bytes);
    let used = if blocks < chains as u64 { blocks as u32 } else { chains };
    used.div_ceil(THREADS)
}

/// The table in shared memory, as a thread sees it.
#[derive(Clone, Copy)]
struct Table {
    /// Byte offset of the thread's copy.
    copy: u32,
}

impl Table {
    /// Copies the table from a prepared key. All threads of the block, and then a barrier.
    ///
    /// # Safety
    /// `key` is prepared.
    #[inline(always)]
    unsafe fn fill(key: u64) -> Self {
        const BATCH: u32 = 16;
        let index = thread::index();
        let mut slot = index;
        while slot < ENTRIES * COPIES {
            let mut entries = [[0; 4]; BATCH as usize];
            for i in 0..BATCH {
                let source = key + 16 * ((slot + i * THREADS) / COPIES) as u64;
                // SAFETY: inside the key's table.
                entries[i as usize] = unsafe { global::load_16(source) };
            }
            for i in 0..BATCH {
                // SAFETY: inside the block's table, a slot of one thread.
                unsafe { shared::store_16::<SHARED_BASE>(16 * (slot + i * THREADS), entries[i as usize]) };
            }
            slot += BATCH * THREADS;
        }
        Self { copy: 16 * (index % COPIES) }
    }

    /// `y H^C`, raw words.
    #[inline(always)]
    fn times(self, y: Quad) -> Quad {
        /// The product of a word, whose first nibble is at `$place`.
        macro_rules! word {
            ($place:literal, $word:expr) => {{
                let word = $word;
                let low = sum(
                    sum(
                        self.entry::<{ entries_of($place) }>(word << 7),
                        self.entry::<{ entries_of($place + 1) }>(word << 3),
                    ),
                    sum(
                        self.entry::<{ entries_of($place + 2) }>(word >> 1),
                        self.entry::<{ entries_of($place + 3) }>(word >> 5),
                    ),
                );
                let high = sum(
                    sum(
                        self.entry::<{ entries_of($place + 4) }>(word >> 9),
                        self.entry::<{ entries_of($place + 5) }>(word >> 13),
                    ),
                    sum(
                        self.entry::<{ entries_of($place + 6) }>(word >> 17),
                        self.entry::<{ entries_of($place + 7) }>(word >> 21),
                    ),
                );
                sum(low, high)
            }};
        }
        sum(sum(word!(0, y[0]), word!(8, y[1])), sum(word!(16, y[2]), word!(24, y[3])))
    }

    /// The entry of the nibble at bits 7 to 10 of `shifted`, among those at `ENTRIES`.
    #[inline(always)]
    fn entry<const ENTRIES: u32>(self, shifted: u32) -> Quad {
        // SAFETY: inside the table, which was filled before the barrier by `fill`'s contract.
        unsafe { shared::load_16::<ENTRIES>(shifted & 0x780 | self.copy) }
    }
}

/// Where all copies of the entries of one nibble's place are.
const fn entries_of(place: u32) -> u32 {
    SHARED_BASE + 16 * COPIES * 16 * place
}
#[inline(always)]
fn sum(a: Quad, b: Quad) -> Quad {
    [a[0] ^ b[0], a[1] ^ b[1], a[2] ^ b[2], a[3] ^ b[3]]
}

/// The product of two elements by integer multiplications (Pornin, BearSSL, "Constant-Time Mul": operands of every fourth
/// bit leave room for the carries), a third of the instructions of the product bit by bit.
#[inline(always)]
fn product(a: Element, b: Element) -> Element {
    let ([a3, a2, a1, a0], [b3, b2, b1, b0]) = (a.words(), b.words());
    // Karatsuba's way: three products of halves in place of four.
    let (low0, low1) = product_64(a0, a1, b0, b1);
    let (high0, high1) = product_64(a2, a3, b2, b3);
    let (both0, both1) = product_64(a0 ^ a2, a1 ^ a3, b0 ^ b2, b1 ^ b3);
    let (middle0, middle1) = (both0 ^ low0 ^ high0, both1 ^ low1 ^ high1);
    let (z0, z1, z2, z3) = (low0, low1 ^ middle0, high0 ^ middle1, high1);
    // The first bit is x^0, so the product of 255 bits stands one place too low.
    let (z3, z2, z1, z0) = (z3 << 1 | z2 >> 63, z2 << 1 | z1 >> 63, z1 << 1 | z0 >> 63, z0 << 1);
    // x^128 = x^7 + x^2 + x + 1, for the lower half from its lowest word up.
    let z1 = z1 ^ z0 << 63 ^ z0 << 62 ^ z0 << 57;
    let z2 = z2 ^ z0 ^ z0 >> 1 ^ z0 >> 2 ^ z0 >> 7 ^ z1 << 63 ^ z1 << 62 ^ z1 << 57;
    let z3 = z3 ^ z1 ^ z1 >> 1 ^ z1 >> 2 ^ z1 >> 7;
    Element::from_words([(z3 >> 32) as u32, z3 as u32, (z2 >> 32) as u32, z2 as u32])
}

/// The product of two polynomials of 64 bits, in halves: lower, upper.
#[inline(always)]
const fn product_64(a0: u32, a1: u32, b0: u32, b1: u32) -> (u64, u64) {
    let (low, high) = (product_32(a0, b0), product_32(a1, b1));
    let middle = product_32(a0 ^ a1, b0 ^ b1) ^ low ^ high;
    (low ^ middle << 32, high ^ middle >> 32)
}

/// The product of two polynomials of 32 bits. At most 8 ones meet in a bit, which 4 bits hold.
#[inline(always)]
const fn product_32(x: u32, y: u32) -> u64 {
    const MASK: u32 = 0x1111_1111;
    const WIDE: u64 = 0x1111_1111_1111_1111;
    let (x0, x1) = ((x & MASK) as u64, (x & MASK << 1) as u64);
    let (x2, x3) = ((x & MASK << 2) as u64, (x & MASK << 3) as u64);
    let (y0, y1) = ((y & MASK) as u64, (y & MASK << 1) as u64);
    let (y2, y3) = ((y & MASK << 2) as u64, (y & MASK << 3) as u64);
    let z0 = (x0 * y0) ^ (x1 * y3) ^ (x2 * y2) ^ (x3 * y1);
    let z1 = (x0 * y1) ^ (x1 * y0) ^ (x2 * y3) ^ (x3 * y2);
    let z2 = (x0 * y2) ^ (x1 * y1) ^ (x2 * y0) ^ (x3 * y3);
    let z3 = (x0 * y3) ^ (x1 * y2) ^ (x2 * y1) ^ (x3 * y0);
    (z0 & WIDE) | (z1 & (WIDE << 1)) | (z2 & (WIDE << 2)) | (z3 & (WIDE << 3))
}

/// The hashed string, as blocks.
struct Blocks {
    aad: [Quad; 3],
    aad_blocks: u64,
    aad_bytes: u32,
    text: u64,
    bytes: u64,
    /// Blocks before the lengths.
    last: u64,
}

impl Blocks {
    /// Block `index`; zero before the first one (a negative index, wrapped) and after the last.
    ///
    /// # Safety
    /// The text can be read.
    #[inline(always)]
    unsafe fn load(&self, index: u64) -> Quad {
        let offset = index.wrapping_sub(self.aad_blocks).wrapping_mul(16);
        let in_text = index.wrapping_sub(self.aad_blocks) < self.last - self.aad_blocks;
        if in_text && self.bytes - offset >= 16 {
            // SAFETY: inside the text.
            return unsafe { global::load_16(self.text + offset) };
        }
        if in_text {
            // SAFETY: inside the text; the last block, cut short.
            return unsafe { tail(self.text + offset, (self.bytes - offset) as u32) };
        }
        if index == self.last {
            let bits = |bytes: u64| {
                let bits = bytes << 3;
                [((bits >> 32) as u32).swap_bytes(), (bits as u32).swap_bytes()]
            };
            let [[a, b], [c, d]] = [bits(self.aad_bytes as u64), bits(self.bytes)];
            return [a, b, c, d];
        }
        let choose = |word: usize| {
            let of = |i: u64| {
                if index == i && i < self.aad_blocks { self.aad[i as usize][word] } else { 0 }
            };
            of(0) | of(1) | of(2)
        };
        [choose(0), choose(1), choose(2), choose(3)]
    }
}

/// The block that begins at `address` and has only `bytes` bytes, zeros behind.
///
/// # Safety
/// They can be read.
#[inline(always)]
unsafe fn tail(address: u64, bytes: u32) -> Quad {
    // Backwards, so that each byte moves to its place by shifts.
    let mut block = [0; 4];
    let mut i = bytes;
    while i > 0 {
        i -= 1;
        // SAFETY: the caller's.
        let byte = unsafe { global::load_u8(address + i as u64) } as u32;
        let [a, b, c, d] = block;
        block = [a << 8 | byte, b << 8 | a >> 24, c << 8 | b >> 24, d << 8 | c >> 24];
    }
    block
}

kernel! {
    threads = 128, shared = MAC_SHARED,
    /// The tag of one message, stored or compared, on a grid of [`mac_grid`] blocks.
    fn mac_chains(params: MacParams) {
        // SAFETY: by the launcher's promise.
        unsafe { mac(&params) }
    }
}

/// The kernel's body.
///
/// # Safety
/// The addresses in the parameters are valid.
#[inline(always)]
unsafe fn mac(params: &MacParams) {
    let chains = params.chains as u64;
    let count = blocks_of(params.aad_bytes, params.bytes);
    let blocks = Blocks {
        aad: params.aad,
        aad_blocks: params.aad_bytes.div_ceil(16) as u64,
        aad_bytes: params.aad_bytes,
        text: params.text,
        bytes: params.bytes,
        last: count - 1,
    };
    // Counted from the last chain, whose last block is the message's last: this one is worth H^exponent. Threads behind
    // the first chain have only its last block, and their products are left out.
    let own = (thread::block_index() * THREADS + thread::index()) as u64 + 1;
    let exponent = own.min(chains);
    let rounds = if own > chains { 1 } else { count.div_ceil(chains) };
    // Wraps where the first round begins with zero blocks.
    let mut at = count.wrapping_sub(exponent).wrapping_sub((rounds - 1) * chains);
    // Three blocks are on their way while one is multiplied, and the first ones while the table is filled; what lies behind
    // the last block is not loaded.
    // SAFETY: by the caller's promise; the weight is among the key's powers.
    let (mut y, mut next, mut second, mut third, weight, table) = unsafe {
        (
            blocks.load(at),
            blocks.load(at.wrapping_add(chains)),
            blocks.load(at.wrapping_add(2 * chains)),
            blocks.load(at.wrapping_add(3 * chains)),
            global::load_16(params.key + 16 * (ENTRIES as u64 + exponent - 1)),
            Table::fill(params.key),
        )
    };
    device::sync_threads();
    let mut round = 1;
    while round < rounds {
        // SAFETY: by the caller's promise.
        let fourth = unsafe { blocks.load(at.wrapping_add(4 * chains)) };
        y = sum(table.times(y), next);
        (next, second, third) = (second, third, fourth);
        at = at.wrapping_add(chains);
        round += 1;
    }
    let mut share = product(Element::from_words(weight), Element::from_raw(y));
    if own > chains {
        share = Element::ZERO;
    }
    // SAFETY: all threads of the block come here.
    unsafe { combine(params, share) }
}

/// Adds up the chains; the last block to arrive completes the tag.
///
/// # Safety
/// All threads of all blocks call it; the addresses are valid.
#[inline(always)]
unsafe fn combine(params: &MacParams, share: Element) {
    let [mut a, mut b, mut c, mut d] = share.to_raw();
    let mut distance = 16;
    while distance > 0 {
        a ^= warp::shuffle_xor(a, distance);
        b ^= warp::shuffle_xor(b, distance);
        c ^= warp::shuffle_xor(c, distance);
        d ^= warp::shuffle_xor(d, distance);
        distance /= 2;
    }
    let index = thread::index();
    // SAFETY: a place for each warp, behind the table.
    unsafe {
        if thread::lane() == 0 {
            shared::store_16::<SUMS_AT>(16 * thread::warp(), [a, b, c, d]);
        }
    }
    device::sync_threads();
    if index < 4 {
        let place = SUMS_AT + 4 * index;
        // SAFETY: stored before the barrier; the scratch is this launch's.
        unsafe {
            let word = shared::load_u32::<0>(place)
                ^ shared::load_u32::<16>(place)
                ^ shared::load_u32::<32>(place)
                ^ shared::load_u32::<48>(place);
            global::xor_u32(params.scratch + 4 * index as u64, word);
        }
    }
    device::sync_threads();
    if index == 0 {
        // SAFETY: by the caller's promise. Each block's words were added before it arrives.
        unsafe {
            if global::add_u32(params.scratch + ARRIVED, 1) == thread::grid_size() - 1 {
                complete(params);
            }
        }
    }
}

/// One thread: masks the sum, and stores or compares the tag.
///
/// # Safety
/// All blocks have added their chains; the addresses are valid.
#[inline(always)]
unsafe fn complete(params: &MacParams) {
    // SAFETY: by the caller's promise.
    unsafe {
        let hash = global::load_volatile_16(params.scratch);
        global::store_16(params.scratch, [0; 4]);
        global::store_u32(params.scratch + ARRIVED, 0);
        let tag = sum(hash, params.mask);
        if params.check == 0 {
            let refused = global::load_volatile_u64(params.failure) != 0;
            global::store_16(params.tag, if refused { [0; 4] } else { tag });
            return;
        }
        let [a, b, c, d] = sum(tag, global::load_volatile_16(params.tag));
        // All words at once: what differs doesn't show in the time.
        if a | b | c | d != 0 {
            global::compare_exchange_u64(params.failure, 0, params.place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_product_by_multiplications_is_the_product_bit_by_bit() {
        let mut x = 1u64;
        let mut element = || {
            Element::from_words(core::array::from_fn(|_| {
                x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (x >> 32) as u32
            }))
        };
        let ones = Element::from_words([u32::MAX; 4]);
        for _ in 0..1000 {
            let (a, b) = (element(), element());
            assert_eq!(product(a, b), a.times(b));
            assert_eq!(product(a, ones), a.times(ones));
            assert_eq!(product(a, Element::ONE), a);
        }
        assert_eq!(product(ones, ones), ones.times(ones));
    }
}
