//! The host's part of copies alone.

use std::fmt;

use super::{CopyOptions, Direction, Far, HostCipher, Keys, Shape, send};
use crate::Result;
use crate::channel::GroupSecret;

/// Seals as a copy to the device does, with nobody behind staging memory: shows what a host's threads can deliver, also where
/// there is no GPU.
pub struct Rehearsal {
    options: CopyOptions,
    cipher: HostCipher,
    keys: Keys,
    epoch: u64,
    staging: Vec<u8>,
}

/// Takes each piece at once.
struct Nobody<'a> {
    shape: Shape,
    staging: &'a mut [u8],
    queued: usize,
}

impl Rehearsal {
    /// Allocates staging memory, and makes a key that nobody else has.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for impossible options,
    /// [`Error::Randomness`](crate::Error::Randomness).
    pub fn new(options: CopyOptions) -> Result<Self> {
        options.check()?;
        let keys = Keys::new(&GroupSecret::random()?, &options)?;
        let cipher = HostCipher::new(&keys.key(Direction::ToDevice)?)?;
        let staging = vec![0xff; options.staging_bytes()];
        Ok(Self { options, cipher, epoch: keys.epoch(), keys, staging })
    }

    /// Seals `source` piece after piece into the staging memory.
    ///
    /// # Errors
    /// As a sealed copy.
    pub fn to_device(&mut self, source: &[u8]) -> Result<()> {
        if source.is_empty() {
            return Ok(());
        }
        let shape = self.options.shape(source.len());
        let call = self.keys.begin(Direction::ToDevice, shape)?;
        if self.epoch != self.keys.epoch() {
            self.cipher = HostCipher::new(&self.keys.key(Direction::ToDevice)?)?;
            self.epoch = self.keys.epoch();
        }
        let mut far = Nobody { shape, staging: &mut self.staging, queued: 0 };
        send(&mut far, &self.cipher, &call, shape, source, self.options.threads, None)
    }
}

impl Far for Nobody<'_> {
    fn slot(&mut self, slot: usize) -> *mut u8 {
        self.staging[slot * self.shape.slot_bytes()..].as_mut_ptr()
    }

    fn queue(&mut self, _: usize) -> Result<()> {
        self.queued += 1;
        Ok(())
    }

    fn passed(&mut self) -> Result<usize> {
        Ok(self.queued)
    }
}

impl fmt::Debug for Rehearsal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Rehearsal({:?})", self.options)
    }
}
