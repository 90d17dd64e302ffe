//! The GPU kernels' own source, run on the CPU by the emulator of `ringseal-kernels`: slow, and meant for checking them
//! where there is no GPU. A race or a missing barrier in a kernel is a panic that names both places.

use std::sync::OnceLock;

use ringseal_kernels::aes::{RoundKeys, expand_key};
use ringseal_kernels::ctr::{self, CtrParams};
use ringseal_kernels::device::emulated::{Launch, launch};
use ringseal_kernels::gcm::{self, RECORDS_SHARED, RecordsParams};
use ringseal_kernels::ghash::{GHASH_KEY_GRID, GhashKey, GhashKeyParams, ghash_key};
use zeroize::{Zeroize, Zeroizing};

use super::gcm::HashSubkey;
use super::staging::Staging;
use super::{Backend, CounterWidth, PreparedKey, Record, le_words};
use crate::aead::{AesKey, Iv, Tag};
use crate::{Error, Result};

/// Threads of a block, as the kernels declare them.
const THREADS: u32 = 512;
/// Data for which another block is launched: two tiles of 256 counters for each of a block's eight groups.
const BYTES_A_BLOCK: usize = 2 * 8 * 256 * 16;
/// Blocks at most: enough to see a wrong division of the work, few enough to finish.
const MAX_BLOCKS: usize = 4;

/// The emulated backend.
#[derive(Clone, Copy, Debug, Default)]
pub struct Emulated;

impl Backend for Emulated {
    fn name(&self) -> &'static str {
        "emulated"
    }

    fn prepare(&self, key: &AesKey) -> Result<Box<dyn PreparedKey>> {
        let kernels = match key {
            AesKey::Aes128(_) => Kernels {
                ctr: ctr::aes128_ctr_xor,
                seal: gcm::gcm_seal_records_128,
                open: gcm::gcm_open_records_128,
            },
            AesKey::Aes192(_) => Kernels {
                ctr: ctr::aes192_ctr_xor,
                seal: gcm::gcm_seal_records_192,
                open: gcm::gcm_open_records_192,
            },
            AesKey::Aes256(_) => Kernels {
                ctr: ctr::aes256_ctr_xor,
                seal: gcm::gcm_seal_records_256,
                open: gcm::gcm_open_records_256,
            },
        };
        Ok(Box::new(EmulatedKey {
            kernels,
            round_keys: Zeroizing::new(expand_key(key.as_bytes())),
            subkey: HashSubkey::new(key),
            ghash_key: OnceLock::new(),
        }))
    }
}

/// The kernels for one key length.
struct Kernels {
    ctr: unsafe fn(CtrParams),
    seal: unsafe fn(RecordsParams),
    open: unsafe fn(RecordsParams),
}

struct EmulatedKey {
    kernels: Kernels,
    round_keys: Zeroizing<RoundKeys>,
    subkey: HashSubkey,
    /// Made when GCM is first used, as it takes a launch of its own.
    ghash_key: OnceLock<SecretGhashKey>,
}

/// Zeroized on drop.
struct SecretGhashKey(Box<GhashKey>);

impl SecretGhashKey {
    fn new(subkey: &HashSubkey) -> Self {
        // SAFETY: its fields are arrays of words, which may be zero.
        let mut key = Self(unsafe { Box::<GhashKey>::new_zeroed().assume_init() });
        let params = GhashKeyParams { h: le_words(*subkey.block()), key: &raw mut *key.0 as u64 };
        launch(&[Launch::new(GHASH_KEY_GRID, ghash_key::THREADS, ghash_key::SHARED, || {
            // SAFETY: the address is that of a `GhashKey`, which nothing else uses meanwhile.
            unsafe { ghash_key(params) }
        })]);
        key
    }

    fn address(&self) -> u64 {
        &raw const *self.0 as u64
    }
}

impl Drop for SecretGhashKey {
    fn drop(&mut self) {
        let words = (&raw mut *self.0).cast::<u32>();
        // SAFETY: the whole of the key, which consists of words.
        unsafe { std::slice::from_raw_parts_mut(words, size_of::<GhashKey>() / size_of::<u32>()) }.zeroize();
    }
}

impl EmulatedKey {
    /// Runs a kernel on a batch.
    fn run(&self, kernel: unsafe fn(RecordsParams), staging: &mut Staging) {
        let ghash_key = self.ghash_key.get_or_init(|| SecretGhashKey::new(&self.subkey)).address();
        let base = staging.bytes().as_mut_ptr() as u64;
        staging.place_at(base);
        let count = staging.count();
        let params = RecordsParams { keys: *self.round_keys, ghash_key, records: base, count };
        let blocks = count.min(MAX_BLOCKS as u32);
        launch(&[Launch::new(blocks, THREADS, RECORDS_SHARED, || {
            // SAFETY: the descriptors name parts of `staging`, borrowed for the whole launch; the key is filled.
            unsafe { kernel(params) }
        })]);
    }
}

impl PreparedKey for EmulatedKey {
    fn ctr_xor(&self, counter_block: [u8; 16], width: CounterWidth, data: &mut [u8]) -> Result<()> {
        if data.is_empty() {
            return Ok(());
        }
        let address = data.as_mut_ptr() as u64;
        let params = CtrParams {
            keys: *self.round_keys,
            counter: le_words(counter_block),
            input: address,
            output: address,
            bytes: data.len() as u64,
            carry: u64::from(width == CounterWidth::Full128),
        };
        let blocks = data.len().div_ceil(BYTES_A_BLOCK).min(MAX_BLOCKS);
        launch(&[Launch::new(blocks as u32, THREADS, ctr::SHARED_BYTES, || {
            // SAFETY: the addresses are those of `data`, borrowed for the whole launch; the kernel takes any length
            // and alignment, and exactly in place.
            unsafe { (self.kernels.ctr)(params) }
        })]);
        Ok(())
    }

    fn seal_in_place(&self, iv: Iv<'_>, aad: &[u8], data: &mut [u8]) -> Result<Tag> {
        Ok(self.seal_records(&mut [Record { iv, aad, data }])?[0])
    }

    fn open_in_place(&self, iv: Iv<'_>, aad: &[u8], data: &mut [u8], tag: &Tag) -> Result<()> {
        let verdicts = self.open_records(&mut [Record { iv, aad, data }], &[*tag])?;
        if verdicts[0] { Ok(()) } else { Err(Error::Authentication) }
    }

    fn seal_records(&self, records: &mut [Record<'_>]) -> Result<Vec<Tag>> {
        if records.is_empty() {
            return Ok(Vec::new());
        }
        let mut staging = Staging::new(Emulated.name(), &self.subkey, records, &[])?;
        self.run(self.kernels.seal, &mut staging);
        Ok(staging.sealed(records))
    }

    fn open_records(&self, records: &mut [Record<'_>], tags: &[Tag]) -> Result<Vec<bool>> {
        if records.is_empty() {
            return Ok(Vec::new());
        }
        let mut staging = Staging::new(Emulated.name(), &self.subkey, records, tags)?;
        self.run(self.kernels.open, &mut staging);
        Ok(staging.opened(records))
    }
}
