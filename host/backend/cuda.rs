//! The GPU kernels, for data in host memory: copied to the device, worked on there, copied back.
//!
//! Data that is on the device already is [`DeviceKey`]'s to work on; the copies cost far more than the
//! cipher.

use super::{Backend, CounterWidth, PreparedKey};
use crate::aead::{AesKey, Iv, Tag};
use crate::cuda::{Device, DeviceBuffer, DeviceKey, Kernels, Stream};
use crate::{Error, Result};

/// The CUDA backend on one device.
#[derive(Clone, Debug)]
pub struct Cuda {
    kernels: Kernels,
}

impl Cuda {
    /// Opens the GPU with this number and loads the embedded kernels.
    ///
    /// # Errors
    /// [`Error::NoDevice`] with the reason when there is no such GPU, no driver, or when either is too old.
    pub fn open(ordinal: usize) -> Result<Self> {
        Ok(Self::new(&Kernels::embedded(&Device::open(ordinal)?)?))
    }

    /// Uses kernels that are loaded already.
    pub fn new(kernels: &Kernels) -> Self {
        Self { kernels: kernels.clone() }
    }
}

impl Backend for Cuda {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn has_gcm(&self) -> bool {
        false
    }

    fn prepare(&self, key: &AesKey) -> Result<Box<dyn PreparedKey>> {
        Ok(Box::new(Prepared {
            key: DeviceKey::new(&self.kernels, key),
            stream: Stream::new(self.kernels.device())?,
        }))
    }
}

struct Prepared {
    key: DeviceKey,
    stream: Stream,
}

impl PreparedKey for Prepared {
    fn ctr_xor(&self, counter_block: [u8; 16], width: CounterWidth, data: &mut [u8]) -> Result<()> {
        if data.is_empty() {
            return Ok(());
        }
        // It holds plaintext at one end of the call or the other, so it is wiped.
        let mut buffer = DeviceBuffer::secret(self.stream.device(), data.len())?;
        buffer.write(0, data, &self.stream)?;
        let (at, bytes) = (buffer.pointer(), data.len() as u64);
        // SAFETY: the whole of the buffer, which lives until the synchronizing read below.
        unsafe { self.key.ctr_xor(counter_block, width, at, at, bytes, &self.stream)? };
        buffer.read(0, data, &self.stream)
    }

    fn seal_in_place(&self, _iv: Iv<'_>, _aad: &[u8], _data: &mut [u8]) -> Result<Tag> {
        Err(Error::Unsupported { backend: "cuda", what: "AES-GCM".into() })
    }

    fn open_in_place(&self, _iv: Iv<'_>, _aad: &[u8], _data: &mut [u8], _tag: &Tag) -> Result<()> {
        Err(Error::Unsupported { backend: "cuda", what: "AES-GCM".into() })
    }
}
