//! AES-CTR and AES-GCM read straight off the standards, one bit and one block at a time: slow, obvious, and built
//! on nothing but a single AES block encryption. The oracle of the property tests.

use aes::cipher::{BlockCipherEncrypt, KeyInit};

/// One AES block under a key of 16, 24 or 32 bytes (FIPS 197, 5.1).
pub(crate) fn aes_block(key: &[u8], block: [u8; 16]) -> [u8; 16] {
    let mut block = block.into();
    match key.len() {
        16 => aes::Aes128::new_from_slice(key).unwrap().encrypt_block(&mut block),
        24 => aes::Aes192::new_from_slice(key).unwrap().encrypt_block(&mut block),
        _ => aes::Aes256::new_from_slice(key).unwrap().encrypt_block(&mut block),
    }
    block.into()
}

/// CTR with an increment of the last `bits` bits (NIST SP 800-38D, 6.2 and 6.5; with 128 bits SP 800-38A, 6.5).
pub(crate) fn ctr(key: &[u8], counter_block: [u8; 16], bits: u32, data: &[u8]) -> Vec<u8> {
    let mask = u128::MAX >> (128 - bits);
    let mut counter = u128::from_be_bytes(counter_block);
    let mut out = Vec::new();
    for chunk in data.chunks(16) {
        let keystream = aes_block(key, counter.to_be_bytes());
        out.extend(chunk.iter().zip(keystream).map(|(byte, mask)| byte ^ mask));
        counter = (counter & !mask) | (counter.wrapping_add(1) & mask);
    }
    out
}

/// Multiplication of blocks (NIST SP 800-38D, 6.3, algorithm 1). The leftmost bit is the most significant of the
/// big-endian number.
fn multiply(x: u128, y: u128) -> u128 {
    const R: u128 = 0xe1 << 120;
    let (mut z, mut v) = (0, y);
    for i in 0..128 {
        if x >> (127 - i) & 1 == 1 {
            z ^= v;
        }
        v = if v & 1 == 0 { v >> 1 } else { v >> 1 ^ R };
    }
    z
}

/// GHASH of parts, each padded with zeros to whole blocks (NIST SP 800-38D, 6.4, algorithm 2).
fn ghash(subkey: u128, parts: &[&[u8]]) -> u128 {
    let mut y = 0;
    for chunk in parts.iter().flat_map(|part| part.chunks(16)) {
        let mut block = [0; 16];
        block[..chunk.len()].copy_from_slice(chunk);
        y = multiply(y ^ u128::from_be_bytes(block), subkey);
    }
    y
}

/// AES-GCM authenticated encryption: ciphertext and tag (NIST SP 800-38D, 7.1, algorithm 4).
pub(crate) fn gcm_seal(key: &[u8], iv: &[u8], aad: &[u8], plaintext: &[u8]) -> (Vec<u8>, [u8; 16]) {
    let bits = |bytes: &[u8]| 8 * bytes.len() as u128;
    let subkey = u128::from_be_bytes(aes_block(key, [0; 16]));
    let j0 = match <[u8; 12]>::try_from(iv) {
        Ok(iv) => iv.iter().fold(0, |j0, byte| j0 << 8 | u128::from(*byte)) << 32 | 1,
        Err(_) => ghash(subkey, &[iv, &bits(iv).to_be_bytes()]),
    };
    let first = j0 & !0xffff_ffff | u128::from((j0 as u32).wrapping_add(1));
    let ciphertext = ctr(key, first.to_be_bytes(), 32, plaintext);
    let lengths = bits(aad) << 64 | bits(&ciphertext);
    let s = ghash(subkey, &[aad, &ciphertext, &lengths.to_be_bytes()]);
    let tag = ctr(key, j0.to_be_bytes(), 32, &s.to_be_bytes());
    (ciphertext, tag.try_into().unwrap())
}
