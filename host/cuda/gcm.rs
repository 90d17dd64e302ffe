//! AES-GCM on device memory: batches of records, sealed or opened by one launch.

use std::fmt;

use ringseal_kernels::aes::{RoundKeys, expand_key};
use ringseal_kernels::gcm::{RECORDS_SHARED, RecordsParams, gcm_seal_records_128};
use ringseal_kernels::ghash::{GHASH_KEY_GRID, GhashKey, GhashKeyParams, ghash_key};
use zeroize::{Zeroize, Zeroizing};

use super::cipher::Kernels;
use super::memory::DeviceBuffer;
use super::module::{Kernel, Launch, Module};
use super::stream::Stream;
use crate::aead::AesKey;
use crate::backend::gcm::HashSubkey;
use crate::backend::le_words;
use crate::{Error, Result};

/// What is said where the module has no GCM kernels.
pub(crate) fn no_gcm() -> Error {
    Error::Unsupported {
        backend: "cuda",
        what: "AES-GCM on this architecture: its kernels need compute capability 9.0".into(),
    }
}

/// The kernels of one module.
pub(super) struct GcmKernels {
    ghash_key: Kernel,
    aes128: Records,
    aes192: Records,
    aes256: Records,
}

/// The kernels on records for one key length.
struct Records {
    seal: Kernel,
    open: Kernel,
}

impl GcmKernels {
    /// # Errors
    /// [`Error::Unsupported`] when the module has none.
    pub(super) fn new(module: &Module) -> Result<Self> {
        let records = |seal, open| -> Result<Records> {
            Ok(Records {
                seal: module.kernel(seal, RECORDS_SHARED)?,
                open: module.kernel(open, RECORDS_SHARED)?,
            })
        };
        Ok(Self {
            ghash_key: module.kernel("ghash_key", ghash_key::SHARED)?,
            aes128: records("gcm_seal_records_128", "gcm_open_records_128")?,
            aes192: records("gcm_seal_records_192", "gcm_open_records_192")?,
            aes256: records("gcm_seal_records_256", "gcm_open_records_256")?,
        })
    }
}

/// An AES key expanded for one device's GCM kernels: round keys here, powers of the hash subkey on the device. Zeroized
/// on drop on both sides, never printed.
pub struct GcmKey {
    kernels: Kernels,
    round_keys: Zeroizing<RoundKeys>,
    subkey: HashSubkey,
    ghash: DeviceBuffer,
    bits: usize,
}

impl GcmKey {
    /// Expands `key` by a launch on `stream` and waits for it, so that any stream may use the result.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when there are no GCM kernels for the device, otherwise
    /// [`Error::Cuda`].
    pub fn new(kernels: &Kernels, key: &AesKey, stream: &Stream) -> Result<Self> {
        let kernel = &kernels.gcm()?.ghash_key;
        let subkey = HashSubkey::new(key);
        let ghash = DeviceBuffer::secret(kernels.device(), size_of::<GhashKey>())?;
        let mut params = GhashKeyParams { h: le_words(*subkey.block()), key: ghash.pointer() };
        let launch = Launch { blocks: GHASH_KEY_GRID, threads: ghash_key::THREADS };
        // SAFETY: the parameters are those of the kernel; the buffer is a `GhashKey`'s and lives until the wait below.
        let launched = unsafe { kernel.launch(launch, stream, &params) };
        params.h.zeroize();
        launched?;
        stream.synchronize()?;
        let round_keys = Zeroizing::new(expand_key(key.as_bytes()));
        Ok(Self { kernels: kernels.clone(), round_keys, subkey, ghash, bits: key.bits() })
    }

    /// The hash subkey, for the counter blocks of records.
    pub fn subkey(&self) -> &HashSubkey {
        &self.subkey
    }

    /// Queues the sealing of `count` records, whose descriptors
    /// ([`Record`](ringseal_kernels::gcm::Record)) lie in device memory at `records`. No records, no launch.
    ///
    /// # Errors
    /// [`Error::Cuda`] when the launch is refused.
    ///
    /// # Safety
    /// The descriptors, and all that they name, are aligned as they say and valid on the stream's device, which is that
    /// of the kernels, until the stream has passed the work; so is this key.
    pub unsafe fn seal_records(&self, records: u64, count: u32, stream: &Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch(&self.records()?.seal, records, count, stream) }
    }

    /// Queues the opening of `count` records, as [`GcmKey::seal_records`] their sealing. Their verdicts tell which
    /// verified; the text of the others is zeros.
    ///
    /// # Errors
    /// [`Error::Cuda`] when the launch is refused.
    ///
    /// # Safety
    /// As [`GcmKey::seal_records`].
    pub unsafe fn open_records(&self, records: u64, count: u32, stream: &Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch(&self.records()?.open, records, count, stream) }
    }

    fn records(&self) -> Result<&Records> {
        let kernels = self.kernels.gcm()?;
        Ok(match self.bits {
            128 => &kernels.aes128,
            192 => &kernels.aes192,
            _ => &kernels.aes256,
        })
    }

    unsafe fn launch(&self, kernel: &Kernel, records: u64, count: u32, stream: &Stream) -> Result<()> {
        let blocks = count.min(self.kernels.multiprocessors());
        let launch = Launch { blocks, threads: gcm_seal_records_128::THREADS };
        let mut params =
            RecordsParams { keys: *self.round_keys, ghash_key: self.ghash.pointer(), records, count };
        // SAFETY: the parameters are those of the kernels on records; the caller promises the addresses.
        let launched = unsafe { kernel.launch(launch, stream, &params) };
        params.keys.zeroize();
        launched
    }
}

impl fmt::Debug for GcmKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "GcmKey(AES-{} on {:?})", self.bits, self.kernels.device())
    }
}
