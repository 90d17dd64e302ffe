//! GHASH's keys, as the kernels for AES-GCM take them.

use aes::cipher::BlockCipherEncrypt;
use aes_gcm::aead::{KeyInit, array::Array};
use ringseal_kernels::device::emulated::{Launch, launch};
use ringseal_kernels::ghash::{GHASH_KEY_GRID, GhashKey, GhashKeyParams, ghash_key};
use ringseal_kernels::message::{DIGITS, Powers, PowersParams, ghash_powers};

use crate::common::raw;

/// H, the cipher of the zero block, in raw words.
pub(crate) fn hash_key(key: &[u8]) -> [u32; 4] {
    let mut h = Array::from([0; 16]);
    match key.len() {
        16 => aes::Aes128::new_from_slice(key).unwrap().encrypt_block(&mut h),
        24 => aes::Aes192::new_from_slice(key).unwrap().encrypt_block(&mut h),
        _ => aes::Aes256::new_from_slice(key).unwrap().encrypt_block(&mut h),
    }
    raw(&h)
}

/// What the kernels need of H, by the kernel that makes it.
pub(crate) fn ghash_key_of(h: [u32; 4]) -> Box<GhashKey> {
    // SAFETY: all its fields are plain words.
    let mut filled: Box<GhashKey> = unsafe { Box::new_zeroed().assume_init() };
    let params = GhashKeyParams { h, key: &raw mut *filled as u64 };
    // SAFETY: `filled` is a GhashKey.
    launch(&[Launch::new(GHASH_KEY_GRID, ghash_key::THREADS, ghash_key::SHARED, || unsafe {
        ghash_key(params)
    })]);
    filled
}

/// Powers of H, by the kernel that makes them.
#[allow(dead_code, reason = "the tests of records have no use for them")]
pub(crate) fn powers_of(h: [u32; 4]) -> Box<Powers> {
    // SAFETY: all its fields are plain words.
    let mut powers: Box<Powers> = unsafe { Box::new_zeroed().assume_init() };
    let params = PowersParams { h, powers: &raw mut *powers as u64 };
    // SAFETY: `powers` is a Powers.
    launch(&[Launch::new(DIGITS, ghash_powers::THREADS, ghash_powers::SHARED, || unsafe {
        ghash_powers(params)
    })]);
    powers
}
