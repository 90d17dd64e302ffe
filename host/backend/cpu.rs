//! AES-GCM on the CPU, from RustCrypto's `aes`, `ctr` and `ghash`, which choose hardware instructions at run time.

use aes::cipher::array::Array;
use aes::cipher::consts::U16;
use aes::cipher::{BlockCipherEncrypt, InnerIvInit, KeyInit, StreamCipherCore};
use ctr::flavors::{Ctr32BE, Ctr128BE};
use ctr::{CtrCore, CtrFlavor};
use ghash::universal_hash::UniversalHash;
use zeroize::{Zeroize, ZeroizeOnDrop};

use super::gcm::{HashSubkey, bit_len};
use super::{Backend, CounterWidth, PreparedKey};
use crate::aead::{AesKey, Iv, Tag, tags_equal};
use crate::{Error, Result};

/// Sealing encrypts and hashes a piece while it is in the first-level cache (commonly 32 KiB or more).
const PIECE_BYTES: usize = 16 * 1024;

/// The CPU backend: always there, and the reference for the others.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu;

impl Backend for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn prepare(&self, key: &AesKey) -> Result<Box<dyn PreparedKey>> {
        Ok(match key {
            AesKey::Aes128(bytes) => Box::new(CpuKey::new(aes::Aes128::new(bytes.into()))),
            AesKey::Aes192(bytes) => Box::new(CpuKey::new(aes::Aes192::new(bytes.into()))),
            AesKey::Aes256(bytes) => Box::new(CpuKey::new(aes::Aes256::new(bytes.into()))),
        })
    }
}

/// Both fields zeroize themselves on drop; the bound keeps `aes` from being built without that.
struct CpuKey<C: ZeroizeOnDrop> {
    cipher: C,
    subkey: HashSubkey,
}

impl<C: BlockCipherEncrypt<BlockSize = U16> + ZeroizeOnDrop> CpuKey<C> {
    fn new(cipher: C) -> Self {
        let subkey = HashSubkey::with_cipher(&cipher);
        Self { cipher, subkey }
    }

    fn keystream<F: CtrFlavor<U16>>(&self, counter_block: [u8; 16]) -> CtrCore<&C, F> {
        CtrCore::inner_iv_init(&self.cipher, &counter_block.into())
    }

    /// The keystream from J0 with its first block, the tag's mask, taken off (NIST SP 800-38D, 7.1 steps 3 and 6).
    fn start(&self, iv: Iv<'_>) -> (CtrCore<&C, Ctr32BE>, [u8; 16]) {
        let mut keystream = self.keystream(self.subkey.initial_counter(iv));
        let mut mask = Array::default();
        keystream.write_keystream_block(&mut mask);
        (keystream, mask.into())
    }
}

impl<C: BlockCipherEncrypt<BlockSize = U16> + ZeroizeOnDrop + Send + Sync> PreparedKey for CpuKey<C> {
    fn ctr_xor(&self, counter_block: [u8; 16], width: CounterWidth, data: &mut [u8]) -> Result<()> {
        match width {
            CounterWidth::Gcm32 => xor_keystream(&mut self.keystream::<Ctr32BE>(counter_block), data),
            CounterWidth::Full128 => xor_keystream(&mut self.keystream::<Ctr128BE>(counter_block), data),
        }
        Ok(())
    }

    fn seal_in_place(&self, iv: Iv<'_>, aad: &[u8], data: &mut [u8]) -> Result<Tag> {
        let (mut keystream, mask) = self.start(iv);
        let mut hash = self.subkey.hash();
        hash.update_padded(aad);
        for piece in data.chunks_mut(PIECE_BYTES) {
            xor_keystream(&mut keystream, piece);
            hash.update_padded(piece);
        }
        Ok(finish(hash, aad, data, mask))
    }

    fn open_in_place(&self, iv: Iv<'_>, aad: &[u8], data: &mut [u8], tag: &Tag) -> Result<()> {
        let (mut keystream, mask) = self.start(iv);
        let mut hash = self.subkey.hash();
        hash.update_padded(aad);
        hash.update_padded(data);
        // Nothing is decrypted before the whole message has verified, at the price of a second pass.
        if !tags_equal(&finish(hash, aad, data, mask), tag) {
            data.zeroize();
            return Err(Error::Authentication);
        }
        xor_keystream(&mut keystream, data);
        Ok(())
    }
}

/// XORs the next keystream blocks into `data`; a last partial block uses a whole keystream block up.
fn xor_keystream<S: StreamCipherCore<BlockSize = U16>>(keystream: &mut S, data: &mut [u8]) {
    let (blocks, tail) = Array::slice_as_chunks_mut(data);
    keystream.apply_keystream_blocks(blocks);
    if !tail.is_empty() {
        let mut last = Array::default();
        keystream.write_keystream_block(&mut last);
        tail.iter_mut().zip(last).for_each(|(byte, mask)| *byte ^= mask);
    }
}

/// Hashes the lengths and masks the result (NIST SP 800-38D, 7.1 steps 5 and 6).
fn finish(mut hash: ghash::GHash, aad: &[u8], ciphertext: &[u8], mask: [u8; 16]) -> Tag {
    let mut lengths = [0; 16];
    lengths[..8].copy_from_slice(&bit_len(aad).to_be_bytes());
    lengths[8..].copy_from_slice(&bit_len(ciphertext).to_be_bytes());
    hash.update(&[lengths.into()]);
    let mut tag: Tag = hash.finalize().into();
    tag.iter_mut().zip(mask).for_each(|(byte, mask)| *byte ^= mask);
    tag
}
