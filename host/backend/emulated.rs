//! The GPU kernels' own source, run on the CPU by the emulator of `ringseal-kernels`.

use super::{Backend, PreparedKey};
use crate::aead::AesKey;
use crate::{Error, Result};

/// The emulated backend.
#[derive(Clone, Copy, Debug, Default)]
pub struct Emulated;

impl Backend for Emulated {
    fn name(&self) -> &'static str {
        "emulated"
    }

    fn prepare(&self, _key: &AesKey) -> Result<Box<dyn PreparedKey>> {
        Err(Error::Unsupported { backend: self.name(), what: "AES-CTR and AES-GCM".into() })
    }
}
