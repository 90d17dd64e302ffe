//! The CTR kernels, emulated, against FIPS 197, SP 800-38A and RustCrypto.

use aes::cipher::{BlockCipherEncrypt, KeyInit, KeyIvInit, StreamCipher};
use ringseal_kernels::aes::{RoundKeys, Tables, expand_key};
use ringseal_kernels::ctr::{self, CtrParams};
use ringseal_kernels::device::emulated::{Launch, launch};

/// SplitMix64 (Steele, Lea, Flood 2014): bytes that look random and are the same in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.next().to_le_bytes()[..chunk.len()]);
        }
    }

    fn bytes(&mut self, n: usize) -> Vec<u8> {
        let mut bytes = vec![0; n];
        self.fill(&mut bytes);
        bytes
    }
}

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.chars().filter_map(|c| c.to_digit(16)).map(|d| d as u8).collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

#[derive(Clone, Copy, PartialEq)]
enum Carry {
    Bits32,
    Bits128,
}

/// Where the kernel reads: nowhere (keystream), where it writes, or elsewhere.
#[derive(Clone, Copy)]
enum Source {
    None,
    InPlace,
    At(u64),
}

/// Runs the kernel for the key's length on so many blocks of threads.
fn run(key: &[u8], counter: [u8; 16], carry: Carry, source: Source, output: &mut [u8], grid: u32) {
    let keys = expand_key(key);
    let words = core::array::from_fn(|i| u32::from_le_bytes(counter[4 * i..][..4].try_into().unwrap()));
    let address = output.as_mut_ptr() as u64;
    let params = CtrParams {
        keys,
        counter: words,
        input: match source {
            Source::None => 1,
            Source::InPlace => address,
            Source::At(address) => address,
        },
        output: address,
        bytes: output.len() as u64,
        carry: u64::from(carry == Carry::Bits128),
    };
    let kernel = match (key.len(), matches!(source, Source::None)) {
        (16, false) => ctr::aes128_ctr_xor,
        (24, false) => ctr::aes192_ctr_xor,
        (32, false) => ctr::aes256_ctr_xor,
        (16, true) => ctr::aes128_ctr_keystream,
        (24, true) => ctr::aes192_ctr_keystream,
        _ => ctr::aes256_ctr_keystream,
    };
    launch(&[Launch::new(grid, ctr::aes128_ctr_xor::THREADS, ctr::aes128_ctr_xor::SHARED, || {
        // SAFETY: input and output are `output`'s bytes, or valid by this test.
        unsafe { kernel(params) }
    })]);
}

/// RustCrypto's result, in place.
fn reference(key: &[u8], counter: [u8; 16], carry: Carry, data: &mut [u8]) {
    macro_rules! apply {
        ($cipher:ty) => {
            match carry {
                Carry::Bits32 => {
                    ::ctr::Ctr32BE::<$cipher>::new_from_slices(key, &counter).unwrap().apply_keystream(data)
                }
                Carry::Bits128 => {
                    ::ctr::Ctr128BE::<$cipher>::new_from_slices(key, &counter).unwrap().apply_keystream(data)
                }
            }
        };
    }
    match key.len() {
        16 => apply!(::aes::Aes128),
        24 => apply!(::aes::Aes192),
        _ => apply!(::aes::Aes256),
    }
}

/// `length` bytes in a buffer of their own, `offset` from a multiple of 16, with guards that must not change.
struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    length: usize,
}

const GUARD: usize = 32;

impl Buffer {
    fn new(data: &[u8], offset: usize) -> Self {
        let mut bytes = vec![0xa5; data.len() + 2 * GUARD + 32];
        let start = GUARD + (16 - (bytes.as_ptr() as usize + GUARD) % 16) % 16 + offset;
        bytes[start..start + data.len()].copy_from_slice(data);
        Buffer { bytes, start, length: data.len() }
    }

    fn data(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..][..self.length]
    }

    #[track_caller]
    fn check(&mut self, expected: &[u8]) {
        assert!(self.data() == expected, "wrong bytes");
        let (before, after) = (&self.bytes[..self.start], &self.bytes[self.start + self.length..]);
        assert!(before.iter().chain(after).all(|&b| b == 0xa5), "written outside the output");
    }
}

#[test]
fn key_schedule_fips_197_appendix_a() {
    let word = |keys: &RoundKeys, i: usize| keys[i].swap_bytes();
    let keys = expand_key(&hex("2b7e151628aed2a6abf7158809cf4f3c"));
    assert_eq!((word(&keys, 4), word(&keys, 43), keys[44]), (0xa0fafe17, 0xb6630ca6, 0));
    let keys = expand_key(&hex("8e73b0f7da0e6452c810f32b809079e562f8ead2522c6b7b"));
    assert_eq!((word(&keys, 6), word(&keys, 51), keys[52]), (0xfe0c91f7, 0x01002202, 0));
    let keys = expand_key(&hex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4"));
    assert_eq!((word(&keys, 8), word(&keys, 59)), (0x9ba35411, 0x706c631e));
}

/// FIPS 197, appendix C: one block, as the keystream of a counter block.
#[test]
fn cipher_fips_197_appendix_c() {
    let key = hex("000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f");
    let plaintext: [u8; 16] = hex("00112233445566778899aabbccddeeff").try_into().unwrap();
    for (length, ciphertext) in [
        (16, "69c4e0d86a7b0430d8cdb78070b4c55a"),
        (24, "dda97ca4864cdfe06eaf70a0ec0d7191"),
        (32, "8ea2b7ca516745bfeafc49904b496089"),
    ] {
        let mut out = [0; 16];
        run(&key[..length], plaintext, Carry::Bits128, Source::None, &mut out, 1);
        assert_eq!(out.to_vec(), hex(ciphertext));
    }
}

/// SP 800-38A, F.5: the same data and counter for each key length.
#[test]
fn ctr_sp_800_38a_appendix_f5() {
    let counter: [u8; 16] = hex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff").try_into().unwrap();
    let plaintext = hex("6bc1bee22e409f96e93d7e117393172a ae2d8a571e03ac9c9eb76fac45af8e51
         30c81c46a35ce411e5fbc1191a0a52ef f69f2445df4f9b17ad2b417be66c3710");
    for (key, ciphertext) in [
        (
            "2b7e151628aed2a6abf7158809cf4f3c",
            "874d6191b620e3261bef6864990db6ce 9806f66b7970fdff8617187bb9fffdff
             5ae4df3edbd5d35e5b4f09020db03eab 1e031dda2fbe03d1792170a0f3009cee",
        ),
        (
            "8e73b0f7da0e6452c810f32b809079e562f8ead2522c6b7b",
            "1abc932417521ca24f2b0459fe7e6e0b 090339ec0aa6faefd5ccc2c6f4ce8e94
             1e36b26bd1ebc670d1bd1d665620abf7 4f78a7f6d29809585a97daec58c6b050",
        ),
        (
            "603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4",
            "601ec313775789a5b7a7f504bbf3d228 f443e3ca4d62b59aca84e990cacaf5c5
             2b0930daa23de94ce87017ba2d84988d dfc9c58db67aada613c2dd08457941a6",
        ),
    ] {
        let mut data = plaintext.clone();
        run(&hex(key), counter, Carry::Bits128, Source::InPlace, &mut data, 1);
        assert_eq!(data, hex(ciphertext));
    }
}

/// Where a case's kernel reads.
#[derive(Clone, Copy)]
enum Form {
    Keystream,
    InPlace,
    Apart,
}

const FORMS: [Form; 3] = [Form::Keystream, Form::InPlace, Form::Apart];

/// One case, with the input (when apart) and the output at their own offsets from a multiple of 16.
#[derive(Clone, Copy)]
struct Case<'a> {
    key: &'a [u8],
    counter: [u8; 16],
    carry: Carry,
    data: &'a [u8],
    offsets: (usize, usize),
    grid: u32,
}

impl Case<'_> {
    fn check(&self, form: Form) {
        let Case { key, counter, carry, data, offsets, grid } = *self;
        let mut input = Buffer::new(data, offsets.0);
        let mut output = Buffer::new(data, offsets.1);
        let mut expected = if let Form::Keystream = form { vec![0; data.len()] } else { data.to_vec() };
        reference(key, counter, carry, &mut expected);
        let source = match form {
            Form::Keystream => Source::None,
            Form::InPlace => Source::InPlace,
            Form::Apart => Source::At(input.data().as_ptr() as u64),
        };
        run(key, counter, carry, source, output.data(), grid);
        output.check(&expected);
        input.check(data);
    }
}

/// Every length to 4097, with random keys, counters, offsets and grids.
#[test]
fn lengths_and_alignments_against_rustcrypto() {
    let mut random = Random(1);
    for length in 0..=4097 {
        let key_bytes = [16, 24, 32][random.below(3)];
        let key = random.bytes(key_bytes);
        let counter = random.bytes(16).try_into().unwrap();
        let carry = [Carry::Bits32, Carry::Bits128][random.below(2)];
        let offsets = [(0, 0), (random.below(16), random.below(16))][random.below(2)];
        let grid = 1 + random.below(2) as u32;
        let case = Case { key: &key, counter, carry, data: &random.bytes(length), offsets, grid };
        // The short ones in each form.
        let forms = if length <= 64 { &FORMS[..] } else { &FORMS[length % 3..][..1] };
        forms.iter().for_each(|&form| case.check(form));
    }
}

/// Long enough for many tiles: every kernel, several grids, counters that begin anywhere in a tile.
#[test]
fn tiles_against_rustcrypto() {
    let mut random = Random(2);
    for key_bytes in [16, 24, 32] {
        for (low, grid) in [(0, 1), (1, 2), (2, 5), (255, 3), (256, 1), (0xffff, 2)] {
            let key = random.bytes(key_bytes);
            let mut counter: [u8; 16] = random.bytes(16).try_into().unwrap();
            counter[14..].copy_from_slice(&(low as u16).to_be_bytes());
            let length = 16 * 256 * 9 + random.below(5000);
            let data = random.bytes(length);
            let case = Case { key: &key, counter, carry: Carry::Bits32, data: &data, offsets: (0, 0), grid };
            FORMS.iter().for_each(|&form| case.check(form));
        }
    }
}

/// GCM's counter wraps in its 32 bits; plain CTR's carries on, through any number of bytes.
#[test]
fn counter_wraps_or_carries_inside_and_between_tiles() {
    let mut random = Random(3);
    let key = random.bytes(32);
    for prefix in [
        "000000000000000000000000",
        "0000000000000000ffffffff",
        "0123456789abcdefffffffff",
        "ffffffffffffffffffffffff",
    ] {
        for low in ["fffffffe", "ffffff00", "fffff8ff", "fffffc00", "00feff80"] {
            let counter: [u8; 16] = hex(&(prefix.to_owned() + low)).try_into().unwrap();
            let data = random.bytes(16 * 256 * 10 + 5);
            for carry in [Carry::Bits32, Carry::Bits128] {
                let mut expected = data.clone();
                reference(&key, counter, carry, &mut expected);
                let mut buffer = Buffer::new(&data, 0);
                run(&key, counter, carry, Source::InPlace, buffer.data(), 2);
                buffer.check(&expected);
            }
        }
    }
}

/// The key schedule against RustCrypto's cipher, through one block.
#[test]
fn random_keys_against_rustcrypto() {
    let mut random = Random(4);
    for _ in 0..8 {
        let key = random.bytes(16);
        let block: [u8; 16] = random.bytes(16).try_into().unwrap();
        let mut expected = block.into();
        ::aes::Aes128::new_from_slice(&key).unwrap().encrypt_block(&mut expected);
        let mut out = [0; 16];
        run(&key, block, Carry::Bits32, Source::None, &mut out, 1);
        assert_eq!(out, <[u8; 16]>::from(expected));
    }
}

/// Without the barrier after the fill, a thread would look up what others have yet to store.
#[test]
#[should_panic = "poison"]
fn tables_without_the_barrier_are_caught() {
    let keys = expand_key(&[0; 16]);
    launch(&[Launch::new(1, 512, ctr::SHARED_BYTES, || {
        let tables = Tables::fill::<512>();
        tables.encrypt::<10, 1>(&keys, [[0; 4]]);
    })]);
}
