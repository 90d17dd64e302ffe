//! The GPU kernels' own source, run on the CPU by the emulator of `ringseal-kernels`: slow, and meant for checking them
//! where there is no GPU. A race or a missing barrier in a kernel is a panic that names both places.

use ringseal_kernels::aes::{RoundKeys, expand_key};
use ringseal_kernels::ctr::{self, CtrParams};
use ringseal_kernels::device::emulated::{Launch, launch};
use zeroize::Zeroizing;

use super::{Backend, CounterWidth, PreparedKey};
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
        let ctr = match key {
            AesKey::Aes128(_) => ctr::aes128_ctr_xor,
            AesKey::Aes192(_) => ctr::aes192_ctr_xor,
            AesKey::Aes256(_) => ctr::aes256_ctr_xor,
        };
        Ok(Box::new(EmulatedKey { round_keys: Zeroizing::new(expand_key(key.as_bytes())), ctr }))
    }
}

struct EmulatedKey {
    round_keys: Zeroizing<RoundKeys>,
    ctr: unsafe fn(CtrParams),
}

impl PreparedKey for EmulatedKey {
    fn ctr_xor(&self, counter_block: [u8; 16], width: CounterWidth, data: &mut [u8]) -> Result<()> {
        if data.is_empty() {
            return Ok(());
        }
        let address = data.as_mut_ptr() as u64;
        let params = CtrParams {
            keys: *self.round_keys,
            counter: words(counter_block),
            input: address,
            output: address,
            bytes: data.len() as u64,
            carry: u64::from(width == CounterWidth::Full128),
        };
        let blocks = data.len().div_ceil(BYTES_A_BLOCK).min(MAX_BLOCKS);
        launch(&[Launch::new(blocks as u32, THREADS, ctr::SHARED_BYTES, || {
            // SAFETY: the addresses are those of `data`, borrowed for the whole launch; the kernel takes any length
            // and alignment, and exactly in place.
            unsafe { (self.ctr)(params) }
        })]);
        Ok(())
    }

    fn seal_in_place(&self, _iv: Iv<'_>, _aad: &[u8], _data: &mut [u8]) -> Result<Tag> {
        Err(Error::Unsupported { backend: Emulated.name(), what: "AES-GCM".into() })
    }

    fn open_in_place(&self, _iv: Iv<'_>, _aad: &[u8], _data: &mut [u8], _tag: &Tag) -> Result<()> {
        Err(Error::Unsupported { backend: Emulated.name(), what: "AES-GCM".into() })
    }
}

/// A block as the kernels take it: little-endian words.
fn words(block: [u8; 16]) -> [u32; 4] {
    bytemuck::cast::<_, [u32; 4]>(block).map(u32::from_le)
}
