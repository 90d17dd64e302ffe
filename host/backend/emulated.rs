//! The GPU kernels' own source, run on the CPU by the emulator of `ringseal-kernels`: slow, and meant for checking them
//! where there is no GPU. A race or a missing barrier in a kernel is a panic that names both places.

use std::sync::OnceLock;

use ringseal_kernels::aes::{RoundKeys, expand_key};
use ringseal_kernels::ctr::{self, CtrParams};
use ringseal_kernels::device::emulated::{Launch, launch};
use ringseal_kernels::gcm::{self, RECORDS_SHARED, RecordsParams};
use ringseal_kernels::ghash::{GHASH_KEY_GRID, GhashKey, GhashKeyParams, ghash_key};
use ringseal_kernels::gmac::{gmac_make, gmac_verify};
use ringseal_kernels::message::{
    self, DIGITS, MESSAGE_SHARED, Message, MessageParams, Powers, PowersParams, Workspace, ghash_powers, plan,
};
use zeroize::{Zeroize, Zeroizing};

use super::gcm::{BlockCipher, HashSubkey, gmac_params, is_gmac};
use super::staging::{Launcher, Staged, Staging, Work};
use super::{Backend, CounterWidth, PreparedKey, le_words};
use crate::Result;
use crate::aead::AesKey;

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
                records: [gcm::gcm_seal_records_128, gcm::gcm_open_records_128],
                message: [message::gcm_seal_message_128, message::gcm_open_message_128],
            },
            AesKey::Aes192(_) => Kernels {
                ctr: ctr::aes192_ctr_xor,
                records: [gcm::gcm_seal_records_192, gcm::gcm_open_records_192],
                message: [message::gcm_seal_message_192, message::gcm_open_message_192],
            },
            AesKey::Aes256(_) => Kernels {
                ctr: ctr::aes256_ctr_xor,
                records: [gcm::gcm_seal_records_256, gcm::gcm_open_records_256],
                message: [message::gcm_seal_message_256, message::gcm_open_message_256],
            },
        };
        Ok(Box::new(Staged(EmulatedKey {
            kernels,
            round_keys: Zeroizing::new(expand_key(key.as_bytes())),
            cipher: BlockCipher::new(key),
            subkey: HashSubkey::new(key),
            hash_keys: OnceLock::new(),
        })))
    }
}

/// The kernels for one key length.
struct Kernels {
    ctr: unsafe fn(CtrParams),
    /// Sealing and opening.
    records: [unsafe fn(RecordsParams); 2],
    message: [unsafe fn(MessageParams); 2],
}

struct EmulatedKey {
    kernels: Kernels,
    round_keys: Zeroizing<RoundKeys>,
    cipher: BlockCipher,
    subkey: HashSubkey,
    /// Made when GCM is first used, as that takes launches of its own.
    hash_keys: OnceLock<HashKeys>,
}

struct HashKeys {
    ghash: Secret<GhashKey>,
    powers: Secret<Powers>,
}

impl HashKeys {
    fn new(subkey: &HashSubkey) -> Self {
        // SAFETY: both consist of words, which may be zero.
        let (mut ghash, mut powers) = unsafe { (Secret::<GhashKey>::zeroed(), Secret::<Powers>::zeroed()) };
        let h = le_words(*subkey.block());
        let params = GhashKeyParams { h, key: &raw mut *ghash.0 as u64 };
        launch(&[Launch::new(GHASH_KEY_GRID, ghash_key::THREADS, ghash_key::SHARED, || {
            // SAFETY: the address is that of a `GhashKey`, which nothing else uses meanwhile.
            unsafe { ghash_key(params) }
        })]);
        let params = PowersParams { h, powers: &raw mut *powers.0 as u64 };
        launch(&[Launch::new(DIGITS, ghash_powers::THREADS, ghash_powers::SHARED, || {
            // SAFETY: the address is that of a `Powers`, which nothing else uses meanwhile.
            unsafe { ghash_powers(params) }
        })]);
        Self { ghash, powers }
    }
}

/// Words that are zeroized on drop.
struct Secret<T>(Box<T>);

impl<T> Secret<T> {
    /// # Safety
    /// T consists of words, which may be zero.
    unsafe fn zeroed() -> Self {
        // SAFETY: the caller's.
        Self(unsafe { Box::new_zeroed().assume_init() })
    }

    fn address(&self) -> u64 {
        &raw const *self.0 as u64
    }
}

impl<T> Drop for Secret<T> {
    fn drop(&mut self) {
        let words = (&raw mut *self.0).cast::<u32>();
        // SAFETY: the whole of the value, which consists of words.
        unsafe { std::slice::from_raw_parts_mut(words, size_of::<T>() / size_of::<u32>()) }.zeroize();
    }
}

impl EmulatedKey {
    fn on_records(&self, kernel: unsafe fn(RecordsParams), staging: &mut Staging) {
        let base = staging.bytes().as_mut_ptr() as u64;
        staging.place_at(base);
        let count = staging.count();
        let ghash_key = self.hash_keys().ghash.address();
        let params = RecordsParams { keys: *self.round_keys, ghash_key, records: base, count };
        let blocks = count.min(MAX_BLOCKS as u32);
        launch(&[Launch::new(blocks, THREADS, RECORDS_SHARED, || {
            // SAFETY: the descriptors name parts of `staging`, borrowed for the whole launch; the key is filled.
            unsafe { kernel(params) }
        })]);
    }

    /// `message` lies in `_staging`.
    fn on_message(&self, work: Work, message: Message, _staging: &mut Staging) {
        // SAFETY: it consists of words, which may be zero.
        let mut workspace = unsafe { Box::<Workspace>::new_zeroed().assume_init() };
        let plan = plan(message.length, message.aad_length, MAX_BLOCKS as u32);
        let keys = self.hash_keys();
        if is_gmac(&message) {
            let workspace = &raw mut *workspace as u64;
            let addresses = [keys.ghash.address(), keys.powers.address(), workspace];
            let params = gmac_params(&message, plan, &self.cipher, addresses);
            let kernel = [gmac_make, gmac_verify][work as usize];
            launch(&[Launch::new(plan.blocks, gmac_make::THREADS, gmac_make::SHARED, || {
                // SAFETY: the data is part of `_staging`, borrowed for the whole launch; the keys are filled.
                unsafe { kernel(params) }
            })]);
            return;
        }
        let params = MessageParams {
            keys: *self.round_keys,
            ghash_key: keys.ghash.address(),
            powers: keys.powers.address(),
            workspace: &raw mut *workspace as u64,
            share: plan.share,
            message,
        };
        let kernel = self.kernels.message[work as usize];
        launch(&[Launch::new(plan.blocks, THREADS, MESSAGE_SHARED, || {
            // SAFETY: the message is part of `_staging`, borrowed for the whole launch; the keys are filled.
            unsafe { kernel(params) }
        })]);
    }

    fn hash_keys(&self) -> &HashKeys {
        self.hash_keys.get_or_init(|| HashKeys::new(&self.subkey))
    }
}

impl Launcher for EmulatedKey {
    fn ctr_xor(&self, counter_block: [u8; 16], width: CounterWidth, data: &mut [u8]) -> Result<()> {
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

    fn subkey(&self) -> Result<&HashSubkey> {
        Ok(&self.subkey)
    }

    fn launch(&self, work: Work, staging: &mut Staging) -> Result<()> {
        let base = staging.bytes().as_mut_ptr() as u64;
        match staging.single(base) {
            Some(message) => self.on_message(work, message, staging),
            None => self.on_records(self.kernels.records[work as usize], staging),
        }
        Ok(())
    }
}
