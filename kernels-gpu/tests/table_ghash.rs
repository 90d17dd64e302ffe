//! The multi-chained MAC by tables, emulated, against the GCM specification and RustCrypto.

mod common;

use aes::cipher::BlockCipherEncrypt;
use aes_gcm::aead::{AeadInOut, KeyInit, array::Array};
use aes_gcm::{Aes128Gcm, Aes256Gcm};
use common::{bytes, raw};
use ringseal_kernels::device::emulated::{Launch, launch};
use ringseal_kernels::table_ghash::{
    MAC_SHARED, MOST_CHAINS, MacKeyParams, MacParams, MacScratch, mac_chains, mac_grid, mac_key,
    mac_key_bytes, mac_key_grid,
};

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.chars().filter_map(|c| c.to_digit(16)).map(|d| d as u8).collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

/// Bytes aligned as the kernels want them; what follows the last byte is not zero.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
struct Aligned([u8; 16]);

fn aligned(bytes: &[u8]) -> Vec<Aligned> {
    let block = |chunk: &[u8]| {
        let mut block = [0xa5; 16];
        block[..chunk.len()].copy_from_slice(chunk);
        Aligned(block)
    };
    bytes.chunks(16).map(block).chain([Aligned([0xa5; 16])]).collect()
}

fn encrypt(key: &[u8], block: [u8; 16]) -> [u8; 16] {
    let mut block = Array::from(block);
    match key.len() {
        16 => aes::Aes128::new_from_slice(key).unwrap().encrypt_block(&mut block),
        _ => aes::Aes256::new_from_slice(key).unwrap().encrypt_block(&mut block),
    }
    block.into()
}

/// A key that the kernel prepared for a number of chains.
struct Key {
    key: Vec<u8>,
    chains: u32,
    prepared: Vec<Aligned>,
}

impl Key {
    fn new(key: &[u8], chains: u32) -> Self {
        let mut prepared = vec![Aligned([0xa5; 16]); mac_key_bytes(chains) as usize / 16 + 1];
        let params =
            MacKeyParams { h: raw(&encrypt(key, [0; 16])), key: prepared.as_mut_ptr() as u64, chains };
        launch(&[Launch::new(mac_key_grid(chains), mac_key::THREADS, mac_key::SHARED, || {
            // SAFETY: the buffer has the key's length.
            unsafe { mac_key(params) }
        })]);
        assert_eq!(prepared.last().unwrap().0, [0xa5; 16], "written past the key");
        Self { key: key.into(), chains, prepared }
    }

    /// Runs the kernel; `tag` is stored or compared. Returns the failure word.
    fn run(&self, message: &Message, tag: &mut Aligned, check: bool, failure: u64) -> u64 {
        let Message { nonce, aad, ciphertext } = message;
        let mut j0 = [0; 16];
        j0[..12].copy_from_slice(nonce);
        j0[15] = 1;
        let mut padded = [0; 48];
        padded[..aad.len()].copy_from_slice(aad);
        let text = aligned(ciphertext);
        let mut scratch = MacScratch::default();
        let mut failure = failure;
        let params = MacParams {
            aad: [raw(&padded), raw(&padded[16..]), raw(&padded[32..])],
            mask: raw(&encrypt(&self.key, j0)),
            key: self.prepared.as_ptr() as u64,
            text: text.as_ptr() as u64,
            bytes: ciphertext.len() as u64,
            tag: std::ptr::from_mut(tag) as u64,
            scratch: &raw mut scratch as u64,
            failure: &raw mut failure as u64,
            place: PLACE,
            chains: self.chains,
            aad_bytes: aad.len() as u32,
            check: check.into(),
        };
        let grid = mac_grid(self.chains, params.aad_bytes, params.bytes);
        launch(&[Launch::new(grid, mac_chains::THREADS, MAC_SHARED, || {
            // SAFETY: all addresses are of live values, aligned.
            unsafe { mac_chains(params) }
        })]);
        assert_eq!((scratch.sum, scratch.arrived), ([0; 4], 0), "the scratch is not left clean");
        failure
    }

    /// The tag that the kernel makes must be this one, and the kernel must accept it, and no other.
    fn check(&self, message: &Message, expected: &[u8]) {
        let mut tag = Aligned([0xa5; 16]);
        assert_eq!(self.run(message, &mut tag, false, 0), 0);
        assert_eq!(tag.0, expected, "{} chains, {} bytes", self.chains, message.ciphertext.len());
        assert_eq!(self.run(message, &mut tag, true, 0), 0);
        for (byte, bit) in [(0, 0), (7, 3), (15, 7)] {
            let mut wrong = tag;
            wrong.0[byte] ^= 1 << bit;
            assert_eq!(self.run(message, &mut wrong, true, 0), PLACE);
        }
    }
}

const PLACE: u64 = 0x0123_4567_89ab_cdef;

struct Message {
    nonce: Vec<u8>,
    aad: Vec<u8>,
    ciphertext: Vec<u8>,
}

/// A message, and RustCrypto's tag.
fn sealed(key: &[u8], seed: u64, aad_bytes: usize, length: usize) -> (Message, Vec<u8>) {
    let (nonce, aad) = (bytes(seed, 12), bytes(seed + 1, aad_bytes));
    let mut ciphertext = bytes(seed + 2, length);
    let nonce_array = Array::try_from(&nonce[..]).unwrap();
    let buffer = (&mut ciphertext[..]).into();
    let tag = match key.len() {
        16 => Aes128Gcm::new_from_slice(key).unwrap().encrypt_inout_detached(&nonce_array, &aad, buffer),
        _ => Aes256Gcm::new_from_slice(key).unwrap().encrypt_inout_detached(&nonce_array, &aad, buffer),
    };
    (Message { nonce, aad, ciphertext }, tag.unwrap().to_vec())
}

/// Test cases 2 to 4, 14 and 16 of the GCM specification (McGrew and Viega, 2005, appendix B), which NIST's
/// submission of GCM has too, and the GMAC of additional data alone (CAVP, gcmEncryptExtIV128, PTlen = 0, AADlen = 128).
#[test]
fn published_tags() {
    let long = "42831ec2217774244b7221b784d0d49ce3aa212f2c02a4e035c17e2329aca12e21d514b25466931c7d8f6a5aac84aa051ba30b396a0aac973d58e091473f5985";
    let long_256 = "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662";
    let (key, key_256) = (
        "feffe9928665731c6d6a8f9467308308",
        "feffe9928665731c6d6a8f9467308308feffe9928665731c6d6a8f9467308308",
    );
    let (nonce, aad) = ("cafebabefacedbaddecaf888", "feedfacedeadbeeffeedfacedeadbeefabaddad2");
    let cases = [
        (&"00".repeat(16)[..], &"00".repeat(12)[..], "", "", "58e2fccefa7e3061367f1d57a4e7455a"),
        (
            &"00".repeat(16),
            &"00".repeat(12),
            "",
            "0388dace60b6a392f328c2b971b2fe78",
            "ab6e47d42cec13bdf53a67b21257bddf",
        ),
        (key, nonce, "", long, "4d5c2af327cd64a62cf35abd2ba6fab4"),
        (key, nonce, aad, &long[..120], "5bc94fbc3221a5db94fae95ae7121a47"),
        (key_256, nonce, aad, long_256, "76fc6ece0f4e1768cddf8853bb2d551b"),
        (
            "77be63708971c4e240d1cb79e8d77feb",
            "e0e00f19fed7ba0136a797f3",
            "7a43ec1d9c0a5a78a0b16533a6213cab",
            "",
            "209fcc8d3675ed938e9c7166709dd946",
        ),
    ];
    for chains in [1, 2, 5, 300] {
        for (key, nonce, aad, ciphertext, tag) in cases {
            let message = Message { nonce: hex(nonce), aad: hex(aad), ciphertext: hex(ciphertext) };
            Key::new(&hex(key), chains).check(&message, &hex(tag));
        }
    }
}

/// Around the rounds' and thread blocks' ends.
#[test]
fn every_number_of_chains_gives_the_same_tag() {
    for (key_bytes, chains) in
        [(16, 1), (32, 2), (16, 3), (32, 16), (16, 127), (32, 128), (16, 129), (32, 256), (16, 1000)]
    {
        let key = Key::new(&bytes(chains.into(), key_bytes), chains);
        let round = 16 * chains as usize;
        let lengths = [0, 1, 15, 16, 17, round - 16, round, round + 1, 3 * round + 5, 5 * round - 64, 6000];
        for (number, length) in lengths.into_iter().enumerate() {
            let (message, tag) =
                sealed(&key.key, 10 * number as u64 + 1, [48, 0, 20, 16][number % 4], length);
            key.check(&message, &tag);
        }
    }
}

/// Many more chains than a message has blocks, and some more blocks than chains.
#[test]
fn the_most_chains() {
    let key = Key::new(&bytes(1, 32), MOST_CHAINS);
    for length in [100, 1 << 18, (16 << 16) + 1000] {
        let (message, tag) = sealed(&key.key, 5, 48, length);
        let mut made = Aligned([0; 16]);
        assert_eq!(key.run(&message, &mut made, false, 0), 0);
        assert_eq!(made.0[..], tag);
    }
}

/// After a failure no tag is made, and the first failure is what stays.
#[test]
fn nothing_is_sealed_after_a_failure() {
    let key = Key::new(&bytes(1, 16), 4);
    let (message, _) = sealed(&key.key, 5, 48, 100);
    let mut tag = Aligned([0xa5; 16]);
    assert_eq!(key.run(&message, &mut tag, false, 7), 7);
    assert_eq!(tag.0, [0; 16]);
    assert_eq!(key.run(&message, &mut tag, true, 7), 7);
}
