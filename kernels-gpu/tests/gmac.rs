//! The kernels for GMAC, emulated, against RustCrypto's AES-GCM of no text.

mod common;
#[path = "common/keys.rs"]
mod keys;

use aes::cipher::BlockCipherEncrypt;
use aes_gcm::aead::{AeadInOut, KeyInit, array::Array};
use aes_gcm::{Aes128Gcm, aead::consts::U12};
use common::{bytes, raw};
use keys::{ghash_key_of, hash_key, powers_of};
use proptest::prelude::*;
use ringseal_kernels::device::emulated::{Launch, launch};
use ringseal_kernels::gcm::{FORGED, VERIFIED};
use ringseal_kernels::ghash::GhashKey;
use ringseal_kernels::gmac::{GmacParams, gmac_make, gmac_verify};
use ringseal_kernels::message::{Plan, Powers, Workspace, plan};

/// A key as the kernels take it.
struct Key {
    bytes: Vec<u8>,
    ghash: Box<GhashKey>,
    powers: Box<Powers>,
    workspace: Box<Workspace>,
}

impl Key {
    fn new(seed: u64) -> Self {
        let bytes = bytes(seed, 16);
        let h = hash_key(&bytes);
        // SAFETY: all its fields are plain words.
        let workspace = unsafe { Box::<Workspace>::new_zeroed().assume_init() };
        Key { bytes, ghash: ghash_key_of(h), powers: powers_of(h), workspace }
    }

    /// Runs a kernel on a copy of `data` with bytes around it; the verdict.
    fn run(&mut self, make: bool, plan: Plan, nonce: &[u8], data: &[u8], tag: &mut [u8; 16]) -> u32 {
        let mut block = Array::from([0; 16]);
        block[..12].copy_from_slice(nonce);
        block[15] = 1;
        aes::Aes128::new_from_slice(&self.bytes).unwrap().encrypt_block(&mut block);
        let mut memory = vec![u128::MAX; data.len() / 16 + 3];
        let place = &raw mut memory[1];
        // SAFETY: the memory has room for them.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), place.cast(), data.len()) };
        let mut words: [u32; 4] = raw(&*tag);
        let mut verdict = 0u32;
        let params = GmacParams {
            ghash_key: &raw const *self.ghash as u64,
            powers: &raw const *self.powers as u64,
            workspace: &raw mut *self.workspace as u64,
            share: plan.share,
            data: place as u64,
            length: data.len() as u64,
            tag: &raw mut words as u64,
            verdict: &raw mut verdict as u64,
            mask: raw(&block),
        };
        // SAFETY: all addresses are of live buffers of the right length.
        let kernel = || unsafe { if make { gmac_make(params) } else { gmac_verify(params) } };
        launch(&[Launch::new(plan.blocks, gmac_make::THREADS, gmac_make::SHARED, kernel)]);
        assert_eq!(self.workspace.done, 0, "the workspace is not left as it was");
        // SAFETY: a reference; the kernel wrote behind the compiler's back.
        words = unsafe { (&raw const words).read_volatile() };
        *tag = std::array::from_fn(|i| words[i / 4].to_le_bytes()[i % 4]);
        // SAFETY: as above.
        unsafe { (&raw const verdict).read_volatile() }
    }

    /// Makes a tag and compares it; verifies it, then with a bit of the data and of the tag changed.
    fn check(&mut self, length: usize, plan: Plan) {
        let shape = format!("{length} bytes, {plan:?}");
        let (mut data, nonce) = (bytes(length as u64, length), bytes(length as u64 + 1, 12));
        let cipher = Aes128Gcm::new_from_slice(&self.bytes).unwrap();
        let mut nothing = [0; 0];
        let array: Array<u8, U12> = Array::try_from(&*nonce).unwrap();
        let expected: [u8; 16] =
            cipher.encrypt_inout_detached(&array, &data, nothing.as_mut_slice().into()).unwrap().into();
        let mut tag = [0; 16];
        assert_eq!(self.run(true, plan, &nonce, &data, &mut tag), 0, "{shape}");
        assert_eq!(tag, expected, "tag: {shape}");
        assert_eq!(self.run(false, plan, &nonce, &data, &mut tag), VERIFIED, "{shape}");
        let bit = 1 << (length % 8);
        tag[length % 16] ^= bit;
        assert_eq!(self.run(false, plan, &nonce, &data, &mut tag), FORGED, "tag changed: {shape}");
        tag[length % 16] ^= bit;
        if length > 0 {
            data[7919 % length] ^= bit;
            assert_eq!(self.run(false, plan, &nonce, &data, &mut tag), FORGED, "data changed: {shape}");
        }
        assert_eq!(tag, expected, "tag written: {shape}");
    }
}

#[test]
fn one_thread_block() {
    let mut key = Key::new(7);
    for length in [0, 1, 15, 16, 17, 2048, 32_767, 32_768, 32_769, 32_784] {
        key.check(length, plan(0, length as u64, 1));
    }
}

/// More groups than are copied ahead.
#[test]
fn many_groups() {
    let mut key = Key::new(8);
    for length in [5 * 32_768, 6 * 32_768 + 13] {
        key.check(length, plan(0, length as u64, 1));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn shares_of_any_size(length in 0usize..120_000, multiprocessors in 1u32..9, units in 0u64..20) {
        let least = plan(0, length as u64, multiprocessors);
        // Any share will do, not only those that make the most of the GPU.
        let share = least.share + 128 * units;
        let blocks = (length as u64).div_ceil(16).div_ceil(share).max(1) as u32;
        Key::new(length as u64).check(length, Plan { blocks, share });
    }
}
