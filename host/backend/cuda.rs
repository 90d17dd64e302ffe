//! The GPU kernels, for data in host memory: copied to the device, worked on there, copied back.
//!
//! Data that is on the device already is [`DeviceKey`]'s to work on; the copies cost far more than the
//! cipher.

use std::sync::{Mutex, PoisonError};

use super::gcm::HashSubkey;
use super::staging::{Launcher, Staged, Staging, Work};
use super::{Backend, CounterWidth, PreparedKey};
use crate::Result;
use crate::aead::AesKey;
use crate::cuda::{Device, DeviceBuffer, DeviceKey, GcmKey, Kernels, MessageWorkspace, Stream, no_gcm};

/// The CUDA backend on one device.
#[derive(Clone, Debug)]
pub struct Cuda {
    kernels: Kernels,
}

impl Cuda {
    /// Opens the GPU with this number and loads the embedded kernels.
    ///
    /// # Errors
    /// [`Error::NoDevice`](crate::Error::NoDevice) with the reason when there is no such GPU, no driver, or when either is too old.
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
        self.kernels.has_gcm()
    }

    fn prepare(&self, key: &AesKey) -> Result<Box<dyn PreparedKey>> {
        let stream = Stream::new(self.kernels.device())?;
        let gcm = match self.has_gcm() {
            true => Some(Gcm {
                key: GcmKey::new(&self.kernels, key, &stream)?,
                workspace: Mutex::new(MessageWorkspace::new(&stream)?),
            }),
            false => None,
        };
        Ok(Box::new(Staged(Prepared { key: DeviceKey::new(&self.kernels, key), gcm, stream })))
    }
}

struct Prepared {
    key: DeviceKey,
    /// None where there are no kernels for it.
    gcm: Option<Gcm>,
    stream: Stream,
}

struct Gcm {
    key: GcmKey,
    /// Locked from launch to synchronization.
    workspace: Mutex<MessageWorkspace>,
}

impl Prepared {
    fn gcm(&self) -> Result<&Gcm> {
        self.gcm.as_ref().ok_or_else(no_gcm)
    }
}

impl Launcher for Prepared {
    fn ctr_xor(&self, counter_block: [u8; 16], width: CounterWidth, data: &mut [u8]) -> Result<()> {
        // It holds plaintext at one end of the call or the other, so it is wiped.
        let mut buffer = DeviceBuffer::secret(self.stream.device(), data.len())?;
        buffer.write(0, data, &self.stream)?;
        let (at, bytes) = (buffer.pointer(), data.len() as u64);
        // SAFETY: the whole of the buffer, which lives until the synchronizing read below.
        unsafe { self.key.ctr_xor(counter_block, width, at, at, bytes, &self.stream)? };
        buffer.read(0, data, &self.stream)
    }

    fn subkey(&self) -> Result<&HashSubkey> {
        Ok(self.gcm()?.key.subkey())
    }

    fn launch(&self, work: Work, staging: &mut Staging) -> Result<()> {
        let (Gcm { key, workspace }, stream) = (self.gcm()?, &self.stream);
        // It holds plaintext at one end of the call or the other, so it is wiped.
        let mut buffer = DeviceBuffer::secret(stream.device(), staging.bytes().len())?;
        let at = buffer.pointer();
        let single = staging.single(at);
        if single.is_none() {
            staging.place_at(at);
        }
        buffer.write(0, staging.bytes(), stream)?;
        let workspace = workspace.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: descriptors and message name parts of the buffer, which lives until the synchronizing read; the
        // workspace is locked until then.
        unsafe {
            match (work, single) {
                (Work::Seal, Some(message)) => key.seal_message(&message, &workspace, stream)?,
                (Work::Open, Some(message)) => key.open_message(&message, &workspace, stream)?,
                (Work::Seal, None) => key.seal_records(at, staging.count(), stream)?,
                (Work::Open, None) => key.open_records(at, staging.count(), stream)?,
            }
        }
        buffer.read(0, staging.bytes(), stream)
    }
}
