//! The kernels on device memory: loaded once a device, prepared once a key, launched on the caller's stream.

use std::fmt;
use std::sync::Arc;

use ringseal_kernels::aes::{RoundKeys, expand_key};
use ringseal_kernels::ctr::{self, CtrParams};
use zeroize::{Zeroize, Zeroizing};

use super::device::Device;
use super::gcm::{GcmKernels, no_gcm};
use super::module::{Kernel, Launch, Module};
use super::stream::Stream;
use crate::aead::{self, AesKey};
use crate::backend::{CounterWidth, le_words};
use crate::{Error, Result};

/// The cipher kernels on one device. Cheap to clone.
#[derive(Clone)]
pub struct Kernels(Arc<Inner>);

struct Inner {
    module: Module,
    multiprocessors: u32,
    aes128: Ctr,
    aes192: Ctr,
    aes256: Ctr,
    /// None where the module has none.
    gcm: Option<GcmKernels>,
}

/// The CTR kernels for one key length.
struct Ctr {
    xor: Kernel,
    keystream: Kernel,
}

impl Kernels {
    /// Takes the kernels that are embedded in this library.
    ///
    /// # Errors
    /// As [`Module::embedded`].
    pub fn embedded(device: &Device) -> Result<Self> {
        Self::new(&Module::embedded(device)?)
    }

    /// Takes the kernels from a module with the same kernels as the embedded one, such as another build of it.
    ///
    /// # Errors
    /// [`Error::Cuda`] when one is missing, or needs more shared memory than the device has.
    pub fn new(module: &Module) -> Result<Self> {
        let ctr = |xor, keystream| -> Result<Ctr> {
            Ok(Ctr {
                xor: module.kernel(xor, ctr::SHARED_BYTES)?,
                keystream: module.kernel(keystream, ctr::SHARED_BYTES)?,
            })
        };
        let gcm = match GcmKernels::new(module) {
            Ok(gcm) => Some(gcm),
            Err(Error::Unsupported { .. }) => None,
            Err(error) => return Err(error),
        };
        Ok(Self(Arc::new(Inner {
            gcm,
            module: module.clone(),
            multiprocessors: module.device().multiprocessors()?,
            aes128: ctr("aes128_ctr_xor", "aes128_ctr_keystream")?,
            aes192: ctr("aes192_ctr_xor", "aes192_ctr_keystream")?,
            aes256: ctr("aes256_ctr_xor", "aes256_ctr_keystream")?,
        })))
    }

    /// The device they are loaded on.
    pub fn device(&self) -> &Device {
        self.0.module.device()
    }

    /// Whether the module has the AES-GCM kernels, as the embedded ones have.
    pub fn has_gcm(&self) -> bool {
        self.0.gcm.is_some()
    }

    pub(super) fn gcm(&self) -> Result<&GcmKernels> {
        self.0.gcm.as_ref().ok_or_else(no_gcm)
    }

    /// The module that they are from.
    pub(super) fn module(&self) -> &Module {
        &self.0.module
    }

    pub(super) fn multiprocessors(&self) -> u32 {
        self.0.multiprocessors
    }
}

impl fmt::Debug for Kernels {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Kernels({:?})", self.device())
    }
}

/// An AES key expanded for one device's kernels. Zeroized on drop, never printed.
pub struct DeviceKey {
    kernels: Kernels,
    round_keys: Zeroizing<RoundKeys>,
    bits: usize,
}

impl DeviceKey {
    /// Expands `key`.
    pub fn new(kernels: &Kernels, key: &AesKey) -> Self {
        let round_keys = Zeroizing::new(expand_key(key.as_bytes()));
        Self { kernels: kernels.clone(), round_keys, bits: key.bits() }
    }

    /// Queues `output = input ^ keystream` on `stream`, for `bytes` bytes of device memory at any alignment (16 is fast);
    /// the keystream starts at `counter_block`. In place when the addresses are equal. No bytes, no launch.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the ranges overlap in part,
    /// [`Error::Length`] when a counter would repeat: both before anything is launched.
    ///
    /// # Safety
    /// Both ranges are valid on the stream's device, which is that of the kernels, until the stream has passed the work.
    pub unsafe fn ctr_xor(
        &self,
        counter_block: [u8; 16],
        width: CounterWidth,
        input: u64,
        output: u64,
        bytes: u64,
        stream: &Stream,
    ) -> Result<()> {
        aead::check_overlap(input, output, bytes)?;
        // SAFETY: the caller's promise.
        unsafe { self.launch(&self.ctr().xor, counter_block, width, [input, output], bytes, stream) }
    }

    /// Queues the keystream itself to `output`, as [`DeviceKey::ctr_xor`] would XOR it.
    ///
    /// # Errors
    /// [`Error::Length`] when a counter would repeat, before anything is launched.
    ///
    /// # Safety
    /// The range is valid on the stream's device, which is that of the kernels, until the stream has passed the work.
    pub unsafe fn keystream(
        &self,
        counter_block: [u8; 16],
        width: CounterWidth,
        output: u64,
        bytes: u64,
        stream: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller's promise; the keystream kernels read no input.
        unsafe { self.launch(&self.ctr().keystream, counter_block, width, [0, output], bytes, stream) }
    }

    fn ctr(&self) -> &Ctr {
        let kernels = &*self.kernels.0;
        match self.bits {
            128 => &kernels.aes128,
            192 => &kernels.aes192,
            _ => &kernels.aes256,
        }
    }

    unsafe fn launch(
        &self,
        kernel: &Kernel,
        counter_block: [u8; 16],
        width: CounterWidth,
        [input, output]: [u64; 2],
        bytes: u64,
        stream: &Stream,
    ) -> Result<()> {
        aead::check_keystream_len(width, bytes.into())?;
        if bytes == 0 {
            return Ok(());
        }
        // Down to a tile of 256 counters a block of threads: a short message is done sooner by many.
        let tiles = bytes.div_ceil(256 * 16);
        let blocks = tiles.min(self.kernels.0.multiprocessors.into()) as u32;
        let launch = Launch { blocks, threads: ctr::aes128_ctr_xor::THREADS };
        let mut parameters = CtrParams {
            keys: *self.round_keys,
            counter: le_words(counter_block),
            input,
            output,
            bytes,
            carry: match width {
                CounterWidth::Gcm32 => 0,
                CounterWidth::Full128 => 1,
            },
        };
        // SAFETY: the parameters are those of the CTR kernels; the caller promises the addresses.
        let result = unsafe { kernel.launch(launch, stream, &parameters) };
        parameters.keys.zeroize();
        result
    }
}

impl fmt::Debug for DeviceKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "DeviceKey(AES-{} on {:?})", self.bits, self.kernels.device())
    }
}
