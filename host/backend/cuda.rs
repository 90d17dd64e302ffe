//! The GPU kernels, for data in host memory: copied to the device, worked on there, copied back.
//!
//! Data that is on the device already is [`DeviceKey`]'s to work on; the copies cost far more than the
//! cipher.

use super::staging::Staging;
use super::{Backend, CounterWidth, PreparedKey, Record};
use crate::aead::{AesKey, Iv, Tag};
use crate::cuda::{Device, DeviceBuffer, DeviceKey, GcmKey, Kernels, Stream, no_gcm};
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
        self.kernels.has_gcm()
    }

    fn prepare(&self, key: &AesKey) -> Result<Box<dyn PreparedKey>> {
        let stream = Stream::new(self.kernels.device())?;
        let gcm = match self.has_gcm() {
            true => Some(GcmKey::new(&self.kernels, key, &stream)?),
            false => None,
        };
        Ok(Box::new(Prepared { key: DeviceKey::new(&self.kernels, key), gcm, stream }))
    }
}

struct Prepared {
    key: DeviceKey,
    /// None where there are no kernels for it.
    gcm: Option<GcmKey>,
    stream: Stream,
}

impl Prepared {
    fn gcm(&self) -> Result<&GcmKey> {
        self.gcm.as_ref().ok_or_else(no_gcm)
    }

    /// Brings a batch to the device, has `work` queue a launch on the descriptors at that address, and brings it back.
    fn run(&self, staging: &mut Staging, work: impl FnOnce(u64, u32) -> Result<()>) -> Result<()> {
        // It holds plaintext at one end of the call or the other, so it is wiped.
        let mut buffer = DeviceBuffer::secret(self.stream.device(), staging.bytes().len())?;
        staging.place_at(buffer.pointer());
        buffer.write(0, staging.bytes(), &self.stream)?;
        work(buffer.pointer(), staging.count())?;
        buffer.read(0, staging.bytes(), &self.stream)
    }
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

    fn seal_in_place(&self, iv: Iv<'_>, aad: &[u8], data: &mut [u8]) -> Result<Tag> {
        Ok(self.seal_records(&mut [Record { iv, aad, data }])?[0])
    }

    fn open_in_place(&self, iv: Iv<'_>, aad: &[u8], data: &mut [u8], tag: &Tag) -> Result<()> {
        let verdicts = self.open_records(&mut [Record { iv, aad, data }], &[*tag])?;
        if verdicts[0] { Ok(()) } else { Err(Error::Authentication) }
    }

    fn seal_records(&self, records: &mut [Record<'_>]) -> Result<Vec<Tag>> {
        let gcm = self.gcm()?;
        if records.is_empty() {
            return Ok(Vec::new());
        }
        let mut staging = Staging::new("cuda", gcm.subkey(), records, &[])?;
        // SAFETY: the descriptors name parts of the buffer at `at`, which lives until the synchronizing read.
        self.run(&mut staging, |at, count| unsafe { gcm.seal_records(at, count, &self.stream) })?;
        Ok(staging.sealed(records))
    }

    fn open_records(&self, records: &mut [Record<'_>], tags: &[Tag]) -> Result<Vec<bool>> {
        let gcm = self.gcm()?;
        if records.is_empty() {
            return Ok(Vec::new());
        }
        let mut staging = Staging::new("cuda", gcm.subkey(), records, tags)?;
        // SAFETY: as for sealing.
        self.run(&mut staging, |at, count| unsafe { gcm.open_records(at, count, &self.stream) })?;
        Ok(staging.opened(records))
    }
}
