//! AES-GCM (NIST SP 800-38D) from one memory to another in one pass, by 512-bit AES and carry-less products.
//!
//! Staging memory is taken for the attacker's, who may change it at any time. So nothing is written there that isn't sealed,
//! what was written is never read, and nothing is read twice: ciphertext is hashed in the registers in which it was made, or to
//! which it was fetched. No library promises that of what it is given, which is why with one a record is sealed and opened in
//! memory of our own, and copied: a second pass, during which no AES is computed. This way memory and AES are busy at once.
//!
//! In constant time: no branch and no address depends on key or text.

use std::arch::asm;
use std::arch::x86_64::*;

use ringseal_kernels::aes;
use zeroize::{Zeroize, Zeroizing};

use crate::aead::{AesKey, Tag};
use crate::channel::NONCE_BYTES;

/// Bytes of a vector.
const VECTOR: usize = 64;
/// Vectors whose AES is computed side by side.
const VECTORS: usize = 8;
/// Bytes that are sealed, or opened, together.
const GROUP: usize = VECTORS * VECTOR;
const BLOCK: usize = 16;
const GROUP_BLOCKS: usize = GROUP / BLOCK;
/// Round keys of AES-256.
const ROUND_KEYS: usize = 15;

/// How far ahead of what is loaded lines are fetched: a processor's own fetching ahead stops at a page's end, and what has to be
/// waited for then costs more than AES does. `ringseal copy-bench` shows what it is worth: a third to twice as much.
const AHEAD: usize = 2048;

type Group = [__m512i; VECTORS];

/// A key, expanded. Zeroized on drop.
#[repr(C, align(64))]
pub(super) struct OnePass {
    /// Each round's key, in each block of a vector.
    round_keys: [[u8; VECTOR]; ROUND_KEYS],
    /// H^32 to H^1, where H is the hash subkey (section 6.3), in the form that [`product`] takes; then zeros.
    powers: [[u8; BLOCK]; 2 * GROUP_BLOCKS],
    rounds: usize,
}

/// The two places of a record, of which one is staging memory.
#[derive(Clone, Copy)]
pub(super) struct Route {
    pub(super) from: *const u8,
    pub(super) to: *mut u8,
    pub(super) bytes: usize,
}

impl Route {
    /// From and to the same memory.
    pub(super) fn in_place(data: &mut [u8]) -> Self {
        let to = data.as_mut_ptr();
        Self { from: to, to, bytes: data.len() }
    }
}

/// What seals: its output is hashed; otherwise its input.
const SEAL: bool = true;
const OPEN: bool = false;

impl OnePass {
    /// Whether the processor has the instructions.
    fn is_supported() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("vaes")
            && is_x86_feature_detected!("vpclmulqdq")
    }

    /// Expands a key; `None` where [`is_supported`](Self::is_supported) is false.
    pub(super) fn new(key: &AesKey) -> Option<Box<Self>> {
        if !Self::is_supported() {
            return None;
        }
        let words = Zeroizing::new(aes::expand_key(key.as_bytes()));
        let mut expanded = Box::new(Self {
            round_keys: [[0; VECTOR]; ROUND_KEYS],
            powers: [[0; BLOCK]; 2 * GROUP_BLOCKS],
            rounds: aes::rounds(key.as_bytes().len()),
        });
        for (vector, words) in expanded.round_keys.iter_mut().zip(words.as_chunks::<4>().0) {
            for block in vector.as_chunks_mut::<BLOCK>().0 {
                for (bytes, word) in block.as_chunks_mut::<4>().0.iter_mut().zip(words) {
                    *bytes = word.to_le_bytes();
                }
            }
        }
        // SAFETY: the processor has the instructions.
        unsafe { expanded.expand_hash_key() };
        Some(expanded)
    }

    /// Seals `route`, and returns the tag.
    ///
    /// # Safety
    /// `route.bytes` bytes can be read at `from`, where nobody writes them meanwhile, and written at `to`; the two are apart, or the same.
    pub(super) unsafe fn seal(&self, nonce: &[u8; NONCE_BYTES], aad: &[u8], route: Route) -> Tag {
        // SAFETY: the caller's; there is a key only where the processor has the instructions.
        unsafe { self.pass::<SEAL>(nonce, aad, route) }
    }

    /// Opens `route`, whoever writes its input meanwhile, and returns the tag that it would have to have: what is at `to` must not
    /// be used before the tags have been compared.
    ///
    /// # Safety
    /// `route.bytes` bytes can be read at `from`, and written at `to`; the two are apart, or the same.
    pub(super) unsafe fn open(&self, nonce: &[u8; NONCE_BYTES], aad: &[u8], route: Route) -> Tag {
        // SAFETY: as above.
        unsafe { self.pass::<OPEN>(nonce, aad, route) }
    }

    /// # Safety
    /// As [`seal`](Self::seal) or [`open`](Self::open).
    unsafe fn pass<const SEALS: bool>(&self, nonce: &[u8; NONCE_BYTES], aad: &[u8], route: Route) -> Tag {
        // SAFETY: the caller's; there is a key only where the processor has the instructions.
        unsafe {
            match self.rounds {
                10 => self.gcm::<SEALS, 10>(nonce, aad, route),
                12 => self.gcm::<SEALS, 12>(nonce, aad, route),
                _ => self.gcm::<SEALS, 14>(nonce, aad, route),
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,vaes,vpclmulqdq")]
    fn expand_hash_key(&mut self) {
        let mut subkey = Zeroizing::new([0; BLOCK]);
        self.encrypt(&mut subkey);
        let subkey = Zeroizing::new(u128::from_be_bytes(*subkey));
        // Times x, so that products come out right in reflected order.
        let carry = (*subkey >> 127).wrapping_neg();
        let mut power = Zeroizing::new(
            (*subkey << 1 ^ (0xc200_0000_0000_0000_0000_0000_0000_0001 & carry)).to_le_bytes(),
        );
        let one = GROUP_BLOCKS - 1;
        for index in (0..GROUP_BLOCKS).rev() {
            self.powers[index] = *power;
            // Of what follows H itself only zeros are multiplied.
            let nothing = [_mm512_setzero_si512(); VECTORS];
            *power = to_bytes(product(self.powers[one..].as_ptr(), &nothing, from_bytes(&power)));
        }
    }

    /// The cipher on one block (FIPS 197, 5.1), in place.
    #[target_feature(enable = "avx512f,avx512bw,vaes,vpclmulqdq")]
    fn encrypt(&self, block: &mut [u8; BLOCK]) {
        let key = |round: usize| {
            from_bytes(self.round_keys[round].first_chunk().expect("a vector has four blocks"))
        };
        let mut state = _mm_xor_si128(from_bytes(block), key(0));
        for round in 1..self.rounds {
            state = _mm_aesenc_si128(state, key(round));
        }
        *block = to_bytes(_mm_aesenclast_si128(state, key(self.rounds)));
    }

    /// GHASH (section 6.4) of `bytes`, padded with zeros, after what `hash` is of.
    #[target_feature(enable = "avx512f,avx512bw,vaes,vpclmulqdq")]
    fn hash(&self, mut hash: __m128i, bytes: &[u8]) -> __m128i {
        for part in bytes.chunks(GROUP) {
            let mut padded = Zeroizing::new([0; GROUP]);
            padded[..part.len()].copy_from_slice(part);
            // SAFETY: a group of bytes.
            hash = product(self.powers_of(part.len()), &unsafe { load_group(padded.as_ptr()) }, hash);
        }
        hash
    }

    /// Where [`product`] finds the powers for so many bytes, at most a group, and at least one.
    fn powers_of(&self, bytes: usize) -> *const [u8; BLOCK] {
        self.powers[GROUP_BLOCKS - bytes.div_ceil(BLOCK)..].as_ptr()
    }

    /// GCM-AE or GCM-AD (sections 7.1 and 7.2) but for the comparison of tags.
    ///
    /// # Safety
    /// As [`seal`](Self::seal) or [`open`](Self::open).
    #[target_feature(enable = "avx512f,avx512bw,vaes,vpclmulqdq")]
    unsafe fn gcm<const SEALS: bool, const ROUNDS: usize>(
        &self,
        nonce: &[u8; NONCE_BYTES],
        aad: &[u8],
        route: Route,
    ) -> Tag {
        // The first counter block, and then what masks the tag.
        let mut mask = Zeroizing::new([0; BLOCK]);
        mask[..NONCE_BYTES].copy_from_slice(nonce);
        mask[BLOCK - 1] = 1;
        let mut counters = Counters::after(&mask);
        self.encrypt(&mut mask);
        let mut hash = self.hash(_mm_setzero_si128(), aad);

        // SAFETY: each vector has its bytes; the caller vouches for both ends of the route.
        unsafe {
            let keys: [__m512i; ROUNDS] =
                std::array::from_fn(|round| _mm512_load_si512(self.round_keys[round].as_ptr().cast()));
            let last = _mm512_load_si512(self.round_keys[ROUNDS].as_ptr().cast());
            let groups = route.bytes / GROUP;
            let mut hashed = [_mm512_setzero_si512(); VECTORS];
            for group in 0..groups {
                let states = counters.next(&keys);
                // The group's before, whose products are computed beside these states.
                if group != 0 {
                    hash = product(self.powers_of(GROUP), &hashed, hash);
                }
                for (index, state) in states.into_iter().enumerate() {
                    let at = group * GROUP + index * VECTOR;
                    // Wherever that is: fetching ahead never faults.
                    _mm_prefetch::<_MM_HINT_T0>(route.from.wrapping_add(at + AHEAD).cast());
                    let input = load(route.from.add(at));
                    let output = _mm512_aesenclast_epi128(state, _mm512_xor_si512(input, last));
                    store(route.to.add(at), output);
                    hashed[index] = if SEALS { output } else { input };
                }
            }
            if groups != 0 {
                hash = product(self.powers_of(GROUP), &hashed, hash);
            }

            let (begin, left) = (groups * GROUP, route.bytes % GROUP);
            if left != 0 {
                // In memory of our own, where it can be padded.
                let mut text = Zeroizing::new([0; GROUP]);
                for (index, byte) in text[..left].iter_mut().enumerate() {
                    // Once, as `load` does.
                    *byte = route.from.add(begin + index).read_volatile();
                }
                if !SEALS {
                    hash = self.hash(hash, &text[..left]);
                }
                for (state, vector) in counters.next(&keys).into_iter().zip(text.as_chunks_mut::<VECTOR>().0)
                {
                    let place: *mut __m512i = vector.as_mut_ptr().cast();
                    let input = _mm512_loadu_si512(place);
                    _mm512_storeu_si512(
                        place,
                        _mm512_aesenclast_epi128(state, _mm512_xor_si512(input, last)),
                    );
                }
                if SEALS {
                    hash = self.hash(hash, &text[..left]);
                }
                route.to.add(begin).copy_from_nonoverlapping(text.as_ptr(), left);
            }
        }
        let mut lengths = [0; BLOCK];
        lengths[..8].copy_from_slice(&(8 * aad.len() as u64).to_be_bytes());
        lengths[8..].copy_from_slice(&(8 * route.bytes as u64).to_be_bytes());
        hash = self.hash(hash, &lengths);
        let mut tag = to_bytes(reflected(hash));
        for (byte, mask) in tag.iter_mut().zip(*mask) {
            *byte ^= mask;
        }
        tag
    }
}

/// Counter blocks (section 6.5), reflected, so that the counter is a vector's number.
struct Counters(__m512i);

impl Counters {
    /// Those after `first`.
    #[target_feature(enable = "avx512f,avx512bw,vaes,vpclmulqdq")]
    fn after(first: &[u8; BLOCK]) -> Self {
        let all = _mm512_broadcast_i32x4(reflected(from_bytes(first)));
        Self(_mm512_add_epi32(all, _mm512_set_epi32(0, 0, 0, 4, 0, 0, 0, 3, 0, 0, 0, 2, 0, 0, 0, 1)))
    }

    /// The cipher's states of the next group of counters, before the last round.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,vaes,vpclmulqdq")]
    fn next<const ROUNDS: usize>(&mut self, keys: &[__m512i; ROUNDS]) -> Group {
        let four = _mm512_set_epi32(0, 0, 0, 4, 0, 0, 0, 4, 0, 0, 0, 4, 0, 0, 0, 4);
        let mut states = [self.0; VECTORS];
        for state in &mut states {
            *state = _mm512_xor_si512(_mm512_shuffle_epi8(self.0, reflection()), keys[0]);
            self.0 = _mm512_add_epi32(self.0, four);
        }
        for key in &keys[1..] {
            for state in &mut states {
                *state = _mm512_aesenc_epi128(*state, *key);
            }
        }
        states
    }
}

/// GHASH of a group's blocks after `hash`, each times the power at its place in `powers`. Where these are zeros, blocks don't count.
///
/// Blocks are reflected, and a power times x, so that a product is their carry-less product over x^128 modulo the reflected
/// polynomial, as in Montgomery's multiplication: halves of 64 bits are folded upwards twice.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,vaes,vpclmulqdq")]
fn product(powers: *const [u8; BLOCK], blocks: &Group, hash: __m128i) -> __m128i {
    const XOR: i32 = 0x96;
    let polynomial = _mm512_set1_epi64(0xc200_0000_0000_0000_u64 as i64);
    let (mut low, mut middle, mut high) =
        (_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512());
    for (index, block) in blocks.iter().enumerate() {
        let mut block = _mm512_shuffle_epi8(*block, reflection());
        if index == 0 {
            block = _mm512_xor_si512(block, _mm512_zextsi128_si512(hash));
        }
        // SAFETY: a group of powers.
        let power = unsafe { _mm512_loadu_si512(powers.cast::<__m512i>().add(index)) };
        low = _mm512_xor_si512(low, _mm512_clmulepi64_epi128::<0x00>(block, power));
        high = _mm512_xor_si512(high, _mm512_clmulepi64_epi128::<0x11>(block, power));
        middle = _mm512_ternarylogic_epi64::<XOR>(
            middle,
            _mm512_clmulepi64_epi128::<0x01>(block, power),
            _mm512_clmulepi64_epi128::<0x10>(block, power),
        );
    }
    const SWAP: i32 = 0x4e;
    let folded = _mm512_clmulepi64_epi128::<0x00>(low, polynomial);
    middle = _mm512_ternarylogic_epi64::<XOR>(middle, _mm512_shuffle_epi32::<SWAP>(low), folded);
    let folded = _mm512_clmulepi64_epi128::<0x00>(middle, polynomial);
    high = _mm512_ternarylogic_epi64::<XOR>(high, _mm512_shuffle_epi32::<SWAP>(middle), folded);
    let halves = _mm256_xor_si256(_mm512_castsi512_si256(high), _mm512_extracti64x4_epi64::<1>(high));
    _mm_xor_si128(_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves))
}

/// Reverses the bytes of each block.
#[inline]
#[target_feature(enable = "avx512f")]
fn reflection() -> __m512i {
    _mm512_broadcast_i32x4(_mm_set_epi64x(0x0001_0203_0405_0607, 0x0809_0a0b_0c0d_0e0f))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn reflected(block: __m128i) -> __m128i {
    _mm_shuffle_epi8(block, _mm512_castsi512_si128(reflection()))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn from_bytes(bytes: &[u8; BLOCK]) -> __m128i {
    // SAFETY: 16 bytes.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn to_bytes(block: __m128i) -> [u8; BLOCK] {
    let mut bytes = [0; BLOCK];
    // SAFETY: 16 bytes.
    unsafe { _mm_storeu_si128(bytes.as_mut_ptr().cast(), block) };
    bytes
}

/// # Safety
/// A group of bytes can be read.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_group(from: *const u8) -> Group {
    // SAFETY: the caller's.
    std::array::from_fn(|index| unsafe { _mm512_loadu_si512(from.add(index * VECTOR).cast()) })
}

/// Loads a vector, exactly once: the compiler must not do so again rather than keep it.
///
/// # Safety
/// The bytes can be read. Others may write them.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load(from: *const u8) -> __m512i {
    let vector;
    // SAFETY: the caller's.
    unsafe {
        asm!("vmovdqu64 {}, [{}]", out(zmm_reg) vector, in(reg) from, options(nostack, readonly, preserves_flags))
    };
    vector
}

/// Stores a vector, exactly once, and not for the compiler to load again.
///
/// # Safety
/// The bytes can be written. Others may read and write them.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store(to: *mut u8, vector: __m512i) {
    // SAFETY: the caller's.
    unsafe { asm!("vmovdqu64 [{}], {}", in(reg) to, in(zmm_reg) vector, options(nostack, preserves_flags)) };
}

impl Drop for OnePass {
    fn drop(&mut self) {
        self.round_keys.zeroize();
        self.powers.zeroize();
    }
}
