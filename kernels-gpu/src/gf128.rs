//! GF(2^128) in GCM's bit order, and multiplication by a constant as a 128 x 128 bit matrix.
//!
//! NIST SP 800-38D section 6.3: a block's first bit (the top bit of its first byte) is the coefficient of x^0, and
//! x^128 = x^7 + x^2 + x + 1. Kernels see a block as four little-endian 32-bit words as loaded ("raw words"); bit b of
//! raw word w stands for the exponent 8 (4 w + b / 8) + 7 - (b mod 8).
//!
//! Nothing here branches on or indexes by an element, so timing tells nothing about keys or data.

use core::ops::{BitXor, BitXorAssign};

/// 11100001 followed by 120 zeros (SP 800-38D section 6.3): x^128 reduced, in the order of [`Element`]'s bits.
const REDUCTION: u32 = 0xe100_0000;

/// An element of GF(2^128): big-endian words, the coefficient of x^i at bit 31 - i mod 32 of word i / 32.
#[repr(C, align(16))]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Element([u32; 4]);

impl BitXor for Element {
    type Output = Self;
    #[inline(always)]
    fn bitxor(self, other: Self) -> Self {
        let (a, b) = (self.0, other.0);
        Self([a[0] ^ b[0], a[1] ^ b[1], a[2] ^ b[2], a[3] ^ b[3]])
    }
}

impl BitXorAssign for Element {
    #[inline(always)]
    fn bitxor_assign(&mut self, other: Self) {
        *self = *self ^ other;
    }
}

impl Element {
    /// The sum of nothing.
    pub const ZERO: Self = Self([0; 4]);
    /// x^0.
    pub const ONE: Self = Self([0x8000_0000, 0, 0, 0]);

    /// The element a block stands for, from the block's raw words.
    #[inline(always)]
    pub const fn from_raw(words: [u32; 4]) -> Self {
        Self([words[0].swap_bytes(), words[1].swap_bytes(), words[2].swap_bytes(), words[3].swap_bytes()])
    }

    /// The raw words of the block that stands for this element.
    #[inline(always)]
    pub const fn to_raw(self) -> [u32; 4] {
        Self::from_raw(self.0).0
    }

    /// The big-endian words.
    #[inline(always)]
    pub const fn words(self) -> [u32; 4] {
        self.0
    }

    /// The element of these big-endian words.
    #[inline(always)]
    pub const fn from_words(words: [u32; 4]) -> Self {
        Self(words)
    }

    /// This element times x.
    #[inline(always)]
    pub const fn times_x(self) -> Self {
        let [a, b, c, d] = self.0;
        Self([
            (a >> 1) ^ ((d & 1) * REDUCTION),
            (b >> 1) | (a << 31),
            (c >> 1) | (b << 31),
            (d >> 1) | (c << 31),
        ])
    }

    /// This element times x^n. Takes time proportional to `n`.
    #[inline]
    pub const fn times_x_to(self, n: u32) -> Self {
        let mut value = self;
        let mut i = 0;
        while i < n {
            value = value.times_x();
            i += 1;
        }
        value
    }

    /// The element where bit `bit` of `bits` is set, zero elsewhere, without a branch.
    #[inline(always)]
    pub const fn where_bit(self, bits: u32, bit: u32) -> Self {
        let mask = (((bits >> bit) as i32) << 31 >> 31) as u32;
        let [a, b, c, d] = self.0;
        Self([a & mask, b & mask, c & mask, d & mask])
    }

    /// `self` times the polynomial of degree under 32 that raw word 0 of a block stands for, and then, in
    /// `self`, times x^32: so that a block is multiplied word by word.
    #[inline(always)]
    pub const fn take_word(&mut self, raw_word: u32) -> Self {
        let mut sum = [0; 4];
        let mut bits = raw_word.swap_bytes();
        let mut i = 0;
        while i < 32 {
            let mask = ((bits as i32) >> 31) as u32;
            sum[0] ^= self.0[0] & mask;
            sum[1] ^= self.0[1] & mask;
            sum[2] ^= self.0[2] & mask;
            sum[3] ^= self.0[3] & mask;
            *self = self.times_x();
            bits <<= 1;
            i += 1;
        }
        Self(sum)
    }

    /// The product, bit by bit.
    #[inline]
    pub const fn times(self, other: Self) -> Self {
        let raw = other.to_raw();
        let mut multiple = self;
        let [a, b, c, d] = [
            multiple.take_word(raw[0]),
            multiple.take_word(raw[1]),
            multiple.take_word(raw[2]),
            multiple.take_word(raw[3]),
        ];
        Self([
            a.0[0] ^ b.0[0] ^ c.0[0] ^ d.0[0],
            a.0[1] ^ b.0[1] ^ c.0[1] ^ d.0[1],
            a.0[2] ^ b.0[2] ^ c.0[2] ^ d.0[2],
            a.0[3] ^ b.0[3] ^ c.0[3] ^ d.0[3],
        ])
    }

    /// The square. Squaring is linear: coefficient i moves to 2 i, then what is past x^127 is reduced.
    #[inline]
    pub const fn square(self) -> Self {
        let [a, b, c, d] = self.0;
        let (a, b, c, d) = (spread(a), spread(b), spread(c), spread(d));
        let (low, high) = ((a as u128) << 64 | b as u128, (c as u128) << 64 | d as u128);
        // x^128 = 1 + x + x^2 + x^7, and once more for what that brings past x^127 again.
        let past = high << 127 ^ high << 126 ^ high << 121;
        let sum = low ^ times_tail(high) ^ times_tail(past);
        Self([(sum >> 96) as u32, (sum >> 64) as u32, (sum >> 32) as u32, sum as u32])
    }

    /// `self` to the power `exponent`. Time depends on the exponent, never on the element.
    #[inline]
    pub const fn power(self, exponent: u64) -> Self {
        let mut result = Self::ONE;
        let mut bit = 64 - exponent.leading_zeros();
        while bit > 0 {
            bit -= 1;
            result = result.square();
            if (exponent >> bit) & 1 == 1 {
                result = result.times(self);
            }
        }
        result
    }

    /// Coefficient, 0 or 1, at bit `bit` (0 to 127) of the raw words taken as one 128-bit little-endian number.
    #[inline(always)]
    const fn raw_bit(self, bit: u32) -> u32 {
        let [a, b, c, d] = self.0;
        // Selected by masks: an index that is known only at run time would put the words into local memory.
        let low = if bit & 32 == 0 { a } else { b };
        let high = if bit & 32 == 0 { c } else { d };
        let word = if bit & 64 == 0 { low } else { high };
        (word >> ((bit & 31) ^ 24)) & 1
    }
}

/// A zero after each bit.
const fn spread(word: u32) -> u64 {
    let mut bits = word as u64;
    bits = (bits | bits << 16) & 0x0000_ffff_0000_ffff;
    bits = (bits | bits << 8) & 0x00ff_00ff_00ff_00ff;
    bits = (bits | bits << 4) & 0x0f0f_0f0f_0f0f_0f0f;
    bits = (bits | bits << 2) & 0x3333_3333_3333_3333;
    bits = (bits | bits << 1) & 0x5555_5555_5555_5555;
    bits << 1
}

/// Times 1 + x + x^2 + x^7, in the order of [`Element`]'s bits, without what is past x^127.
const fn times_tail(bits: u128) -> u128 {
    bits ^ bits >> 1 ^ bits >> 2 ^ bits >> 7
}

/// Bytes of one matrix as the tensor cores read it: 256 rows (k) by 128 columns (n), one bit each.
pub const MATRIX_BYTES: u32 = 4096;
/// 32-bit words of one matrix.
pub const MATRIX_WORDS: u32 = MATRIX_BYTES / 4;

/// Where the low bit of a thread's count number `i` (0 to 31) of one row stands in the packed word: three counts, 11 bits
/// apart, are masked together.
#[inline(always)]
pub const fn count_bit(i: u32) -> u32 {
    if i < 30 { 11 * (i % 3) + i / 3 } else { 10 + 11 * (i - 30) }
}

/// The raw bit of the product that column `n` of a matrix stands for: chosen so that the accumulators of one thread,
/// low bits packed in order, are one whole raw word.
#[inline(always)]
pub const fn column_bit(n: u32) -> u32 {
    32 * ((n % 8) / 2) + count_bit(2 * (n / 8) + n % 2)
}

/// Column and rows of word `index` of a matrix in shared memory: `(n, word)`, rows 32 `word` to 32 `word` + 31.
///
/// K-major without swizzle (PTX ISA, "Shared Memory Matrix Layout"): core matrices of 8 columns by 128 rows, 128
/// contiguous bytes each, 128 bytes apart along k (LBO) and 256 bytes apart along n (SBO).
#[inline(always)]
pub const fn matrix_word_place(index: u32) -> (u32, u32) {
    let n = 8 * (index / 64) + (index % 32) / 4;
    let word = 4 * ((index / 32) % 2) + index % 4;
    (n, word)
}

/// 32 rows of column `n`: row b is the coefficient at raw bit [`column_bit`]`(n)` of `multiplier` times the
/// polynomial that bit b of raw word 0 stands for.
#[inline]
pub const fn matrix_word(multiplier: Element, n: u32) -> u32 {
    let bit = column_bit(n);
    let mut multiple = multiplier;
    let mut rows = 0;
    let mut i = 0;
    while i < 32 {
        rows |= multiple.raw_bit(bit) << (i ^ 7);
        multiple = multiple.times_x();
        i += 1;
    }
    rows
}

/// The multiplier of rows 32 `word` to 32 `word` + 31 of a matrix for **data**: lane t of a quad holds the t-th of
/// four consecutive blocks, whose raw words 0 (or 1, in rows of A offset by 8) meet word t, and words 2 (or 3) word
/// 4 + t. Together: the sum over t of block t times H^(4 - t) times `scale`, words 1 and 3 wanting x^32 more.
#[inline]
pub const fn data_multiplier(h: Element, scale: Element, word: u32) -> Element {
    let power = h.power((4 - word % 4) as u64).times(scale);
    if word < 4 { power } else { power.times_x_to(64) }
}

/// The multiplier of rows 32 `word` to 32 `word` + 31 of a matrix for **states**: a row of A holds one element's four
/// words in its first 128 bits, and a second element's in its last, which is weighted by x^32 more.
#[inline]
pub const fn state_multiplier(scale: Element, word: u32) -> Element {
    if word < 4 { scale.times_x_to(32 * word) } else { scale.times_x_to(32 * (word - 4) + 32) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn element(seed: u64) -> Element {
        let mut x = seed;
        Element(core::array::from_fn(|_| {
            x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (x >> 32) as u32
        }))
    }

    fn raw(element: Element) -> u128 {
        let words = element.to_raw();
        (0..4).fold(0, |all, w| all | u128::from(words[w]) << (32 * w))
    }

    /// SP 800-38D's GHASH of one block, from the GCM specification's test case 2: H, C and the first product.
    #[test]
    fn multiplies_as_the_gcm_specification() {
        let read = |hex: &str| {
            let n = u128::from_str_radix(hex, 16).unwrap().to_be_bytes();
            Element::from_raw(core::array::from_fn(|w| {
                u32::from_le_bytes(n[4 * w..][..4].try_into().unwrap())
            }))
        };
        let h = read("66e94bd4ef8a2c3b884cfa59ca342b2e");
        let c = read("0388dace60b6a392f328c2b971b2fe78");
        assert_eq!(c.times(h), read("5e2ec746917062882c85b0685353deb7"));
        let length = read("00000000000000000000000000000080");
        assert_eq!((c.times(h) ^ length).times(h), read("f38cbb1ad69223dcc3457ae5b6b0f885"));
    }

    #[test]
    fn powers_are_repeated_products() {
        let h = element(3);
        let mut product = Element::ONE;
        for exponent in 0..70 {
            assert_eq!(h.power(exponent), product, "{exponent}");
            product = product.times(h);
        }
        assert_eq!(h.times_x_to(128), h.times(Element::ONE.times_x_to(127)).times_x());
    }

    #[test]
    fn squares_are_products() {
        let mut value = element(4);
        for _ in 0..200 {
            assert_eq!(value.square(), value.times(value));
            value = value.square();
        }
        assert_eq!(Element::ONE.times_x_to(127).square(), Element::ONE.times_x_to(254));
    }

    /// Multiplies the raw bits of A's row (256 bits: eight words) by a matrix as the tensor cores do.
    fn through_matrix(multiplier: impl Fn(u32) -> Element, row: [u32; 8]) -> u128 {
        let mut product = 0;
        for index in 0..MATRIX_WORDS {
            let (n, word) = matrix_word_place(index);
            let column = matrix_word(multiplier(word), n);
            let parity = (column & row[word as usize]).count_ones() & 1;
            product ^= u128::from(parity) << column_bit(n);
        }
        product
    }

    #[test]
    fn a_state_matrix_multiplies_both_halves() {
        let (scale, first, second) = (element(5), element(6), element(7));
        let (a, b) = (first.to_raw(), second.to_raw());
        let row = [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]];
        let expected = first.times(scale) ^ second.times(scale).times_x_to(32);
        assert_eq!(through_matrix(|word| state_multiplier(scale, word), row), raw(expected));
    }

    #[test]
    fn a_data_matrix_sums_four_blocks_words_0_and_2_in_one_row_and_1_and_3_in_another() {
        let (h, scale) = (element(8), element(9));
        let blocks: [Element; 4] = core::array::from_fn(|t| element(20 + t as u64));
        let words = blocks.map(Element::to_raw);
        let even = core::array::from_fn(|i| words[i % 4][if i < 4 { 0 } else { 2 }]);
        let odd = core::array::from_fn(|i| words[i % 4][if i < 4 { 1 } else { 3 }]);
        let product = |row| {
            let p = through_matrix(|word| data_multiplier(h, scale, word), row);
            Element::from_raw(core::array::from_fn(|w| (p >> (32 * w)) as u32))
        };
        let expected =
            (0..4).fold(Element::ZERO, |sum, t| sum ^ blocks[t].times(h.power(4 - t as u64)).times(scale));
        assert_eq!(product(even) ^ product(odd).times_x_to(32), expected);
    }

    #[test]
    fn columns_stand_for_every_bit_once() {
        let mut seen = 0u128;
        (0..128).for_each(|n| seen |= 1 << column_bit(n));
        assert_eq!(seen, u128::MAX);
        let mut places: Vec<_> = (0..MATRIX_WORDS).map(matrix_word_place).collect();
        places.sort_unstable();
        places.dedup();
        assert_eq!(places.len(), MATRIX_WORDS as usize);
    }
}
