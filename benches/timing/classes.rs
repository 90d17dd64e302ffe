//! Classes of secrets, and what a launch reads of each.

use ringseal::Result;
use ringseal::aead::AesKey;
use ringseal::cuda::{DeviceBuffer, DeviceKey, GcmKey, Kernels, Stream};

/// Bytes of additional data, as many as a collective's records have.
pub(crate) const AAD: usize = 48;
/// Sets of inputs for each class. A class of fixed inputs has as many, so that where they lie in memory doesn't tell the
/// classes apart.
pub(crate) const POOL: usize = 8;

/// One set of secrets, prepared for every kernel.
pub(crate) struct Secrets {
    pub(crate) ctr: DeviceKey,
    pub(crate) gcm: GcmKey,
    pub(crate) text: DeviceBuffer,
    pub(crate) aad: DeviceBuffer,
}

/// What of a class is random; the rest is zeros.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Class {
    pub(crate) name: &'static str,
    key: bool,
    text: bool,
    aad: bool,
}

const ZEROS: Class = Class { name: "zeros", key: false, text: false, aad: false };

/// The first is what the others are compared with. The second is the same again: what the method finds between those two is
/// its error.
pub(crate) const CLASSES: [Class; 6] = [
    ZEROS,
    Class { name: "zeros again", ..ZEROS },
    Class { name: "random key", key: true, ..ZEROS },
    Class { name: "random text", text: true, ..ZEROS },
    Class { name: "random AAD", aad: true, ..ZEROS },
    Class { name: "all random", key: true, text: true, aad: true },
];

impl Class {
    /// Inputs of `bytes` bytes of text, with a key of `bits`.
    pub(crate) fn draw(
        &self,
        kernels: &Kernels,
        bits: usize,
        bytes: usize,
        stream: &Stream,
    ) -> Result<Secrets> {
        let key = AesKey::from_bytes(&drawn(self.key, bits / 8)?)?;
        Ok(Secrets {
            ctr: DeviceKey::new(kernels, &key),
            gcm: GcmKey::new(kernels, &key, stream)?,
            text: DeviceBuffer::from_host(&drawn(self.text, bytes)?, stream)?,
            aad: DeviceBuffer::from_host(&drawn(self.aad, AAD)?, stream)?,
        })
    }
}

fn drawn(random: bool, bytes: usize) -> Result<Vec<u8>> {
    let mut drawn = vec![0; bytes];
    if random {
        getrandom::fill(&mut drawn).map_err(|error| ringseal::Error::Cuda(error.to_string()))?;
    }
    Ok(drawn)
}
