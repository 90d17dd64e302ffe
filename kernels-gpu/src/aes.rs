//! AES (FIPS 197) on the GPU: conflict-free T-tables in shared memory, with counter caching for CTR and GCM.
//!
//! **Cost model.** One SM retires one shared-memory wavefront a clock; a table look-up by a warp is one. A block costs 16
//! look-ups a round: W = 160 / 192 / 224 wavefronts for 32 blocks (AES-128 / 192 / 256), with counter caching 128 / 160 / 192.
//! On 132 SMs at 1.98 GHz that limits CTR (+ 8.8 for load and store) to 132 x 1.98 x 512 / W = 978 / 793 / 666 GB/s.
//!
//! **Tables.** The four T-tables (Daemen and Rijmen, "The Design of Rijndael", 4.2) stand in 128 KiB of shared memory 32 times,
//! so that lane L only ever reads bank L: look-ups have no bank conflicts, and their time does not depend on key or data.
//! Entry x of T0 is at `x * 256 + lane * 4` from [`SHARED_BASE`], T1's 128 bytes, T2's 64 KiB
//! and T3's both further on. One byte permutation makes an address.
//!
//! **Words.** Blocks and round keys are little-endian words: byte r of word c is row r, column c of the state.
//!
//! How a kernel uses it:
//!
//! ```ignore
//! let tables = Tables::fill::<512>();                      // all threads
//! sync_threads();
//! let prefix = Prefix::new(tables, keys, nonce);           // once for 2^32 counters: 12 look-ups
//! let low = prefix.low(tables, thread::index() % 256);     // once a thread: 5 look-ups
//! let upper = prefix.upper(tables, keys, counter);         // once for 256 aligned counters: 15 look-ups, or by parts
//! let keystream = tables.finish::<10, 1>(keys, [xor(low, upper)])[0];  // counter + thread::index() % 256
//! ```

use crate::device::{Quad, bits, global, shared, thread};
use crate::params::SHARED_BASE;

/// Round keys w\[0\], w\[1\], .. of FIPS 197, 5.2, as little-endian words; zeros after the last (44, 52 or 60 are used).
pub type RoundKeys = [u32; 60];

/// Where a kernel reads round keys from.
pub trait Keys: Copy {
    /// The key of round `round`.
    fn round_key(self, round: usize) -> Quad;
}

/// Kernel parameters: the constant bank, whose words are operands at no cost.
impl Keys for &RoundKeys {
    #[inline(always)]
    fn round_key(self, round: usize) -> Quad {
        [self[4 * round], self[4 * round + 1], self[4 * round + 2], self[4 * round + 3]]
    }
}

/// Round keys in shared memory, at this address: for keys that are chosen at run time. One wavefront a round key.
#[derive(Clone, Copy)]
pub struct SharedKeys(pub u32);

/// Bytes of [`SharedKeys`].
pub const SHARED_KEYS_BYTES: u32 = size_of::<RoundKeys>() as u32;

impl Keys for SharedKeys {
    #[inline(always)]
    fn round_key(self, round: usize) -> Quad {
        // SAFETY: whoever made this stored the keys there, before a barrier.
        unsafe { shared::load_in_place_16(self.0 + 16 * round as u32) }
    }
}

/// Rounds for a key of 16, 24 or 32 bytes: 10, 12 or 14.
pub const fn rounds(key_bytes: usize) -> usize {
    key_bytes / 4 + 6
}

/// The key schedule (FIPS 197, 5.2), in constant time: no table is indexed by the key.
///
/// # Panics
/// If the key doesn't have 16, 24 or 32 bytes.
pub fn expand_key(key: &[u8]) -> RoundKeys {
    assert!(matches!(key.len(), 16 | 24 | 32), "an AES key of {} bytes", key.len());
    let length = key.len() / 4;
    let mut keys = [0; 60];
    for (word, bytes) in keys.iter_mut().zip(key.chunks_exact(4)) {
        *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
    let mut round_constant = 1;
    for i in length..4 * (rounds(key.len()) + 1) {
        let mut word = keys[i - 1];
        if i % length == 0 {
            word = substitute(word.rotate_right(8)) ^ round_constant;
            round_constant = double(round_constant);
        } else if length == 8 && i % length == 4 {
            word = substitute(word);
        }
        keys[i] = keys[i - length] ^ word;
    }
    keys
}

const LOW_BITS: u32 = 0x0101_0101;

/// Doubles each of four bytes in GF(2^8) modulo x^8 + x^4 + x^3 + x + 1 (FIPS 197, 4.2).
const fn double(bytes: u32) -> u32 {
    ((bytes & !(LOW_BITS << 7)) << 1) ^ ((bytes >> 7 & LOW_BITS) * 0x1b)
}

/// Products of four pairs of bytes in GF(2^8).
const fn multiply(a: u32, b: u32) -> u32 {
    let (mut product, mut power, mut bit) = (0, a, 0);
    while bit < 8 {
        product ^= power & ((b >> bit & LOW_BITS) * 0xff);
        power = double(power);
        bit += 1;
    }
    product
}

/// The S-box on four bytes, computed: inverse x^254, then the affine map (FIPS 197, 5.1.1).
const fn substitute(x: u32) -> u32 {
    let x2 = multiply(x, x);
    let x3 = multiply(x2, x);
    let x6 = multiply(x3, x3);
    let x12 = multiply(x6, x6);
    let x14 = multiply(x12, x2);
    let x15 = multiply(x12, x3);
    let x30 = multiply(x15, x15);
    let x60 = multiply(x30, x30);
    let x120 = multiply(x60, x60);
    let x240 = multiply(x120, x120);
    let inverse = multiply(x240, x14);
    let (mut affine, mut turn) = (inverse ^ (0x63 * LOW_BITS), 1);
    while turn <= 4 {
        let high = LOW_BITS * (0xff << turn & 0xff);
        affine ^= inverse << turn & high | inverse >> (8 - turn) & !high;
        turn += 1;
    }
    affine
}

#[repr(align(16))]
struct Table([u32; 256]);

/// T0\[x\]: the column that row 0 contributes to, (2 S\[x\], S\[x\], S\[x\], 3 S\[x\]).
static T0: Table = {
    let mut table = [0; 256];
    let mut x = 0;
    while x < 256 {
        let s = substitute(x as u32) & 0xff;
        let s2 = double(s);
        table[x] = s2 | s << 8 | s << 16 | (s2 ^ s) << 24;
        x += 1;
    }
    Table(table)
};

/// Distance from T0 to T1 and from T2 to T3.
const ODD_TABLE: u32 = 128;
/// Distance from T0 to T2.
const UPPER_TABLES: u32 = 0x1_0000;

/// XOR of two quads.
#[inline(always)]
pub fn xor(a: Quad, b: Quad) -> Quad {
    [a[0] ^ b[0], a[1] ^ b[1], a[2] ^ b[2], a[3] ^ b[3]]
}

/// A thread's view of the block's T-tables.
#[derive(Clone, Copy)]
pub struct Tables {
    /// Byte offset of the thread's bank.
    bank: u32,
}

impl Tables {
    /// Fills the tables; all `THREADS` threads of the block call it, and then a barrier, before any uses them.
    ///
    /// Loads T0 only (1 KiB), all of it before the first store; the others are rotations of it. A warp stores 512
    /// consecutive bytes at a time: no bank conflicts.
    #[inline(always)]
    pub fn fill<const THREADS: u32>() -> Self {
        const { assert!(4096 % THREADS == 0 && THREADS >= 256) };
        let index = thread::index();
        let source = &raw const T0.0 as u64 + u64::from(index / 16 * 4);
        let mut entries = [0; 16];
        for i in 0..4096 / THREADS {
            // SAFETY: entry (index + i * THREADS) / 16 < 256 of T0.
            entries[i as usize] = unsafe { global::load_u32(source + u64::from(i * THREADS / 16 * 4)) };
        }
        let odd = index / 8 % 2 * 8;
        for i in 0..4096 / THREADS {
            let entry = entries[i as usize].rotate_left(odd);
            let opposite = entry.rotate_left(16);
            let address = index * 16 + i * THREADS * 16;
            // SAFETY: 16 bytes of the tables, each of one thread.
            unsafe {
                shared::store_16::<SHARED_BASE>(address, [entry; 4]);
                shared::store_16::<{ SHARED_BASE + UPPER_TABLES }>(address, [opposite; 4]);
            }
        }
        Self::filled()
    }

    /// What [`fill`](Self::fill) returned to other threads of the block.
    #[inline(always)]
    pub fn filled() -> Self {
        Tables { bank: thread::index() % 32 * 4 }
    }

    /// Entry `byte ROW of word` of table T`ROW`.
    #[inline(always)]
    fn look_up<const ROW: u32>(self, word: u32) -> u32 {
        match ROW {
            0 => self.entry::<0x5504, SHARED_BASE>(word),
            1 => self.entry::<0x5514, { SHARED_BASE + ODD_TABLE }>(word),
            2 => self.entry::<0x5524, { SHARED_BASE + UPPER_TABLES }>(word),
            _ => self.entry::<0x5534, { SHARED_BASE + UPPER_TABLES + ODD_TABLE }>(word),
        }
    }

    /// The entry whose number is the byte of `word` that nibble 1 of `SELECTOR` names, in the table at `TABLE`.
    #[inline(always)]
    fn entry<const SELECTOR: u32, const TABLE: u32>(self, word: u32) -> u32 {
        let address = if SELECTOR == 0x5514 {
            // The bytes' places are found on one pipe, the look-ups' XORs too; a quarter of them is taken off it.
            bits::scaled_byte::<1>(word, self.bank)
        } else {
            bits::permute_bytes::<SELECTOR>(word, self.bank)
        };
        // SAFETY: below 64 KiB from a table's beginning; filled before the barrier by `fill`'s contract.
        unsafe { shared::load_u32::<TABLE>(address) }
    }

    /// One round but the last (FIPS 197, 5.1: SubBytes, ShiftRows, MixColumns, AddRoundKey).
    #[inline(always)]
    fn round(self, s: Quad, key: Quad) -> Quad {
        let column = |a: u32, b: u32, c: u32, d: u32, key: u32| {
            self.look_up::<0>(a) ^ self.look_up::<1>(b) ^ self.look_up::<2>(c) ^ self.look_up::<3>(d) ^ key
        };
        [
            column(s[0], s[1], s[2], s[3], key[0]),
            column(s[1], s[2], s[3], s[0], key[1]),
            column(s[2], s[3], s[0], s[1], key[2]),
            column(s[3], s[0], s[1], s[2], key[3]),
        ]
    }

    /// The last round, without MixColumns. The S-box's bytes stand in the same tables: bytes 0 and 3 of T2, byte 1 of T0,
    /// byte 2 of T1.
    #[inline(always)]
    fn last_round(self, s: Quad, key: Quad) -> Quad {
        const T1: u32 = SHARED_BASE + ODD_TABLE;
        const T2: u32 = SHARED_BASE + UPPER_TABLES;
        let column = |a: u32, b: u32, c: u32, d: u32, key: u32| {
            let low = bits::permute_bytes::<0x7650>(
                self.entry::<0x5504, T2>(a),
                self.entry::<0x5514, SHARED_BASE>(b),
            );
            let high =
                bits::permute_bytes::<0x7210>(self.entry::<0x5524, T1>(c), self.entry::<0x5534, T2>(d));
            bits::permute_bytes::<0x7610>(low, high) ^ key
        };
        [
            column(s[0], s[1], s[2], s[3], key[0]),
            column(s[1], s[2], s[3], s[0], key[1]),
            column(s[2], s[3], s[0], s[1], key[2]),
            column(s[3], s[0], s[1], s[2], key[3]),
        ]
    }

    /// Rounds `FIRST` to `ROUNDS` of `N` independent blocks, at most four, side by side.
    #[inline(always)]
    fn rounds<const FIRST: usize, const ROUNDS: usize, const N: usize>(
        self,
        keys: impl Keys,
        mut states: [Quad; N],
    ) -> [Quad; N] {
        const { assert!(N <= 4) };
        // Rounds and blocks are written out: loops would index keys and states at run time, from local memory.
        macro_rules! each_block {
            ($function:ident, $key:expr, $($i:literal)*) => {
                $(if $i < N {
                    states[$i] = self.$function(states[$i], $key);
                })*
            };
        }
        macro_rules! rounds {
            ($($round:literal)*) => {
                $(if FIRST <= $round && $round < ROUNDS {
                    let key = keys.round_key($round);
                    each_block!(round, key, 0 1 2 3);
                })*
            };
        }
        rounds!(1 2 3 4 5 6 7 8 9 10 11 12 13);
        let key = keys.round_key(ROUNDS);
        each_block!(last_round, key, 0 1 2 3);
        states
    }

    /// Encrypts `N` blocks.
    #[inline(always)]
    pub fn encrypt<const ROUNDS: usize, const N: usize>(
        self,
        keys: impl Keys,
        mut blocks: [Quad; N],
    ) -> [Quad; N] {
        let key = keys.round_key(0);
        for block in &mut blocks {
            *block = xor(*block, key);
        }
        self.rounds::<1, ROUNDS, N>(keys, blocks)
    }

    /// Encrypts `N` blocks from their states after round 2, which [`Prefix`] gives: 16 look-ups for each of `ROUNDS` - 2.
    #[inline(always)]
    pub fn finish<const ROUNDS: usize, const N: usize>(
        self,
        keys: impl Keys,
        states: [Quad; N],
    ) -> [Quad; N] {
        self.rounds::<3, ROUNDS, N>(keys, states)
    }

    /// What word `WORD` of a round's input adds to its output.
    #[inline(always)]
    fn spread<const WORD: usize>(self, word: u32) -> Quad {
        let rows = [
            self.look_up::<0>(word),
            self.look_up::<1>(word),
            self.look_up::<2>(word),
            self.look_up::<3>(word),
        ];
        // Column j takes row r from word j + r (ShiftRows).
        [rows[WORD], rows[(WORD + 3) % 4], rows[(WORD + 2) % 4], rows[(WORD + 1) % 4]]
    }
}

/// Counter caching: rounds 1 and 2 of counter blocks that agree in their first 12 bytes.
///
/// ShiftRows sends the four bytes of the counter word to different words of round 1's output, and round 2 is a sum over those
/// words. So the state after round 2 is `low ^ byte1 ^ byte2 ^ byte3 ^ k`, where each term depends on one byte of the
/// counter (numbered from the least significant), and k is the round key. What changes seldom is computed seldom.
#[derive(Clone, Copy, Default)]
pub struct Prefix {
    /// Round 1's output but for what the counter adds.
    words: Quad,
    /// The round key of round 0 for the counter word.
    whitening: u32,
}

impl Prefix {
    /// For the counter blocks that begin with `nonce`. 12 look-ups.
    #[inline(always)]
    pub fn new(tables: Tables, keys: impl Keys, nonce: [u32; 3]) -> Self {
        let (whitening, first) = (keys.round_key(0), keys.round_key(1));
        let [a, b, c] = [nonce[0] ^ whitening[0], nonce[1] ^ whitening[1], nonce[2] ^ whitening[2]];
        let words = [
            tables.look_up::<0>(a) ^ tables.look_up::<1>(b) ^ tables.look_up::<2>(c) ^ first[0],
            tables.look_up::<0>(b) ^ tables.look_up::<1>(c) ^ tables.look_up::<3>(a) ^ first[1],
            tables.look_up::<0>(c) ^ tables.look_up::<2>(a) ^ tables.look_up::<3>(b) ^ first[2],
            tables.look_up::<1>(a) ^ tables.look_up::<2>(b) ^ tables.look_up::<3>(c) ^ first[3],
        ];
        Prefix { words, whitening: whitening[3] }
    }

    /// The counter word as the state after the first AddRoundKey has it.
    #[inline(always)]
    fn whiten(&self, counter: u32) -> u32 {
        counter.swap_bytes() ^ self.whitening
    }

    /// The term of the counter's byte 0 (`counter % 256`). 5 look-ups.
    #[inline(always)]
    pub fn low(&self, tables: Tables, counter: u32) -> Quad {
        tables.spread::<0>(self.words[0] ^ tables.look_up::<3>(self.whiten(counter)))
    }

    /// What [`low_of`](Prefix::low_of) needs.
    #[inline(always)]
    pub fn low_base(&self) -> u32 {
        self.words[0]
    }

    /// [`low`](Prefix::low) of the prefix whose [`low_base`](Prefix::low_base) is given.
    #[inline(always)]
    pub fn low_of(low_base: u32, tables: Tables, keys: impl Keys, counter: u32) -> Quad {
        Prefix { words: [low_base, 0, 0, 0], whitening: keys.round_key(0)[3] }.low(tables, counter)
    }

    /// The term of the counter's byte 1. 5 look-ups.
    #[inline(always)]
    pub fn byte1(&self, tables: Tables, counter: u32) -> Quad {
        tables.spread::<1>(self.words[1] ^ tables.look_up::<2>(self.whiten(counter)))
    }

    /// The terms of the counter's bytes 2 and 3, and the round key. 10 look-ups.
    #[inline(always)]
    pub fn bytes23(&self, tables: Tables, keys: impl Keys, counter: u32) -> Quad {
        let word = self.whiten(counter);
        let byte2 = tables.spread::<2>(self.words[2] ^ tables.look_up::<1>(word));
        let byte3 = tables.spread::<3>(self.words[3] ^ tables.look_up::<0>(word));
        xor(xor(byte2, byte3), keys.round_key(2))
    }

    /// All terms but [`low`](Prefix::low): `byte1 ^ bytes23`. 15 look-ups.
    #[inline(always)]
    pub fn upper(&self, tables: Tables, keys: impl Keys, counter: u32) -> Quad {
        xor(self.byte1(tables, counter), self.bytes23(tables, keys, counter))
    }
}
