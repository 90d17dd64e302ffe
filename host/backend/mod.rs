//! Where the cryptography runs: on the CPU, on a GPU, or as the GPU kernels' own source emulated on the CPU.
//!
//! A [`Backend`] turns an [`AesKey`] into a [`PreparedKey`], which works on host memory.
//! The collective's GPU path works on device memory and doesn't pass through here.

use std::sync::Arc;

use crate::aead::{AesKey, Iv, Tag};
use crate::{Error, Result};

pub mod cpu;
pub mod cuda;
pub mod emulated;
pub mod gcm;
mod staging;

/// What [`by_name`] accepts, in the order in which a help text lists it.
pub const NAMES: [&str; 4] = ["auto", "cpu", "cuda", "emulated"];

/// The backend of that name. `auto` is `cuda` where there is a device whose kernels do AES-GCM, otherwise `cpu`.
///
/// # Errors
/// [`Error::InvalidArgument`] for an unknown name; [`Error::NoDevice`] when `cuda` is asked for and there is none:
/// only `auto` falls back.
pub fn by_name(name: &str) -> Result<Arc<dyn Backend>> {
    match name {
        "auto" => match cuda_backend() {
            Ok(cuda) if cuda.has_gcm() => Ok(cuda),
            Ok(_) | Err(Error::NoDevice(_)) => Ok(Arc::new(cpu::Cpu)),
            Err(error) => Err(error),
        },
        "cpu" => Ok(Arc::new(cpu::Cpu)),
        "cuda" => cuda_backend(),
        "emulated" => Ok(Arc::new(emulated::Emulated)),
        _ => Err(Error::InvalidArgument(format!("no backend {name:?}; there are {}", NAMES.join(", ")))),
    }
}

fn cuda_backend() -> Result<Arc<dyn Backend>> {
    Ok(Arc::new(cuda::Cuda::open(0)?))
}

/// A block as the kernels take it: little-endian words.
pub(crate) fn le_words(block: [u8; 16]) -> [u32; 4] {
    bytemuck::cast::<_, [u32; 4]>(block).map(u32::from_le)
}

/// How many low-order bits of the counter block count; the rest stay as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CounterWidth {
    /// GCM: the last 32 bits, wrapping (NIST SP 800-38D, 6.2 and 6.5).
    Gcm32,
    /// Plain CTR: the whole block, as one big-endian number (NIST SP 800-38A, 6.5 and appendix B.1).
    Full128,
}

/// One record for a batched seal or open: all lengths in bytes.
#[derive(Debug)]
pub struct Record<'a> {
    /// The IV (a 96-bit deterministic nonce in the collective).
    pub iv: Iv<'a>,
    /// Additional authenticated data.
    pub aad: &'a [u8],
    /// Plaintext in, ciphertext out when sealing; the other way when opening.
    pub data: &'a mut [u8],
}

/// A place where AES-GCM can run.
pub trait Backend: Send + Sync {
    /// Name as on the command line: `cpu`, `emulated`, `cuda`.
    fn name(&self) -> &'static str;
    /// Whether it does AES-GCM here; where not, keys do CTR only and the rest is [`Error::Unsupported`].
    fn has_gcm(&self) -> bool {
        true
    }
    /// Expands a key once, for any number of messages.
    fn prepare(&self, key: &AesKey) -> Result<Box<dyn PreparedKey>>;
}

/// An expanded key on one backend. Zeroized on drop.
///
/// Implementations may assume that limits were checked by [`crate::aead`] before the call.
pub trait PreparedKey: Send + Sync {
    /// XORs the keystream that starts at `counter_block` into `data`, in place.
    fn ctr_xor(&self, counter_block: [u8; 16], width: CounterWidth, data: &mut [u8]) -> Result<()>;
    /// AES-GCM encryption in place; returns the 128-bit tag (NIST SP 800-38D, 7.1).
    fn seal_in_place(&self, iv: Iv<'_>, aad: &[u8], data: &mut [u8]) -> Result<Tag>;
    /// AES-GCM decryption in place (NIST SP 800-38D, 7.2). On [`Error::Authentication`] `data` is all zeros.
    fn open_in_place(&self, iv: Iv<'_>, aad: &[u8], data: &mut [u8], tag: &Tag) -> Result<()>;

    /// Seals many messages; one launch where the backend can.
    fn seal_records(&self, records: &mut [Record<'_>]) -> Result<Vec<Tag>> {
        records.iter_mut().map(|record| self.seal_in_place(record.iv, record.aad, record.data)).collect()
    }
    /// Opens many messages; a verdict for each. The data of a failed one are zeros.
    fn open_records(&self, records: &mut [Record<'_>], tags: &[Tag]) -> Result<Vec<bool>> {
        records
            .iter_mut()
            .zip(tags)
            .map(|(record, tag)| match self.open_in_place(record.iv, record.aad, record.data, tag) {
                Ok(()) => Ok(true),
                Err(Error::Authentication) => Ok(false),
                Err(error) => Err(error),
            })
            .collect()
    }
}
