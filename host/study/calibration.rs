//! What the cost model needs to know of a machine.
//!
//! A [`Calibration`] is a JSON file. [`Calibration::h200`] is checked in; it was fitted to runs on H200s. On a GPU host
//! one can be measured and fitted afresh, by timing all-reduces of a few sizes: see [`fit`](super::fit).

use serde::{Deserialize, Serialize};

use crate::channel::{Crypto, KeyLength};
use crate::collective::Algorithm;
use crate::{Error, Result};

/// The format that this version reads and writes.
pub const FORMAT: u32 = 1;

/// A machine's figures. Bandwidths and rates are in GB/s (10^9 bytes of plaintext), times in microseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// [`FORMAT`].
    pub format: u32,
    /// The GPU's name.
    pub machine: String,
    /// Where the figures come from: which were measured, when and how, and which are assumed.
    pub source: String,
    /// Multiprocessors of a GPU.
    pub multiprocessors: u32,
    /// Bytes that a GPU's memory reads or writes, with all multiprocessors at work.
    pub memory_gb_s: f64,
    /// What a persistent kernel's launch takes of the thread that makes it.
    pub issue_us: f64,
    /// Between ranks that share a GPU.
    pub same_gpu: Link,
    /// Between GPUs of a node, a direction. All-to-all: a GPU has it once for all of its peers.
    pub nvlink: Link,
    /// Between nodes, a direction and network interface.
    pub network: Link,
    /// The ring's persistent kernel without cryptography.
    pub plain: RingKernel,
    /// The sealed one with AES-128.
    pub aes_128: RingKernel,
    /// The sealed one with AES-256.
    pub aes_256: RingKernel,
    /// The direct algorithm's kernels, where they have been measured; otherwise they are taken for the ring's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub direct: Option<DirectKernels>,
    /// The separate kernels of the published system, where they have been measured.
    pub seed: Option<SeedKernels>,
}

/// The persistent kernels of the direct algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DirectKernels {
    /// Without cryptography.
    pub plain: RingKernel,
    /// Sealed with AES-128.
    pub aes_128: RingKernel,
    /// Sealed with AES-256.
    pub aes_256: RingKernel,
}

/// What lies between two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Payload that it carries.
    pub gb_s: f64,
    /// From a record's last store by one rank until the other goes on with it.
    pub hop_us: f64,
}

/// A persistent kernel that does a whole all-reduce of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RingKernel {
    /// From one launch to the first record: the launch itself, the tables of AES, the keys' matrices.
    pub start_us: f64,
    /// A record without its bytes: waiting, flags, fences.
    pub record_us: f64,
    /// A record's tag, for each time that it is sealed or opened; 0 without cryptography.
    pub tag_us: f64,
    /// What one multiprocessor seals or opens; `None` without cryptography.
    pub crypt_gb_s: Option<f64>,
    /// What one multiprocessor loads and stores, together.
    pub move_gb_s: f64,
}

/// The published system's kernels. Each runs on the whole GPU, one after another.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SeedKernels {
    /// What a launch takes of the thread that makes it, with the events between the ranks' streams.
    pub issue_us: f64,
    /// AES-CTR, to seal or to open.
    pub encrypt: KernelCost,
    /// The multi-chained MAC, to make a tag or to check one.
    pub mac: KernelCost,
    /// To the peer or into the result.
    pub copy: KernelCost,
    /// Adding a received chunk.
    pub reduce: KernelCost,
}

/// The time of a kernel: `fixed_us + bytes / gb_s`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelCost {
    /// Launching it, and whatever doesn't grow with the bytes.
    pub fixed_us: f64,
    /// Bytes of payload.
    pub gb_s: f64,
}

impl KernelCost {
    /// Microseconds for so many bytes.
    pub fn us(self, bytes: f64) -> f64 {
        self.fixed_us + bytes / self.gb_s / 1e3
    }
}

impl Calibration {
    /// The one that is checked in, of H200s; its `source` says how it came about.
    pub fn h200() -> Self {
        serde_json::from_str(include_str!("calibration/h200.json")).expect("the file is checked by a test")
    }

    /// Reads a calibration.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the text is not a calibration of this format, or a figure is out of its domain.
    pub fn from_json(text: &str) -> Result<Self> {
        let invalid = |what: String| Error::InvalidArgument(format!("calibration: {what}"));
        let calibration: Self = serde_json::from_str(text).map_err(|error| invalid(error.to_string()))?;
        if calibration.format != FORMAT {
            return Err(invalid(format!("format {}, but this version reads {FORMAT}", calibration.format)));
        }
        calibration.check().map_err(|what| invalid(what.into()))?;
        Ok(calibration)
    }

    /// As JSON, with a line end.
    pub fn to_json(&self) -> String {
        // Strings and numbers only: nothing that could fail.
        format!("{}\n", serde_json::to_string_pretty(self).unwrap_or_default())
    }

    /// The ring's kernel for this kind of protection.
    pub const fn ring(&self, crypto: Crypto) -> &RingKernel {
        match crypto {
            Crypto::None => &self.plain,
            Crypto::Gcm(KeyLength::Aes128) => &self.aes_128,
            Crypto::Gcm(KeyLength::Aes256) => &self.aes_256,
        }
    }

    /// The kernel for this algorithm and kind of protection.
    pub const fn kernel(&self, algorithm: Algorithm, crypto: Crypto) -> &RingKernel {
        match (algorithm, &self.direct, crypto) {
            (Algorithm::Direct, Some(direct), Crypto::None) => &direct.plain,
            (Algorithm::Direct, Some(direct), Crypto::Gcm(KeyLength::Aes128)) => &direct.aes_128,
            (Algorithm::Direct, Some(direct), Crypto::Gcm(KeyLength::Aes256)) => &direct.aes_256,
            _ => self.ring(crypto),
        }
    }

    pub(super) const fn kernel_mut(&mut self, algorithm: Algorithm, crypto: Crypto) -> &mut RingKernel {
        match (algorithm, &mut self.direct, crypto) {
            (Algorithm::Direct, Some(direct), Crypto::None) => &mut direct.plain,
            (Algorithm::Direct, Some(direct), Crypto::Gcm(KeyLength::Aes128)) => &mut direct.aes_128,
            (Algorithm::Direct, Some(direct), Crypto::Gcm(KeyLength::Aes256)) => &mut direct.aes_256,
            (_, _, Crypto::None) => &mut self.plain,
            (_, _, Crypto::Gcm(KeyLength::Aes128)) => &mut self.aes_128,
            (_, _, Crypto::Gcm(KeyLength::Aes256)) => &mut self.aes_256,
        }
    }

    fn check(&self) -> std::result::Result<(), &'static str> {
        let direct = self.direct.iter().map(|direct| [&direct.plain, &direct.aes_128, &direct.aes_256]);
        let kernels: Vec<_> =
            std::iter::once([&self.plain, &self.aes_128, &self.aes_256]).chain(direct).collect();
        let links = [self.same_gpu, self.nvlink, self.network];
        let seed: Vec<_> =
            self.seed.iter().flat_map(|seed| [seed.encrypt, seed.mac, seed.copy, seed.reduce]).collect();
        let mut rates = vec![self.memory_gb_s];
        rates.extend(links.map(|link| link.gb_s));
        rates.extend(seed.iter().map(|kernel| kernel.gb_s));
        let mut times: Vec<_> = links.iter().map(|link| link.hop_us).collect();
        times.push(self.issue_us);
        times.extend(seed.iter().map(|kernel| kernel.fixed_us));
        times.extend(self.seed.iter().map(|seed| seed.issue_us));
        for kernel in kernels.iter().flatten() {
            rates.push(kernel.move_gb_s);
            rates.extend(kernel.crypt_gb_s);
            times.extend([kernel.start_us, kernel.record_us, kernel.tag_us]);
        }
        if self.multiprocessors == 0 {
            return Err("a GPU has at least one multiprocessor");
        }
        let belongs = |[plain, sealed @ ..]: &[&RingKernel; 3]| {
            plain.crypt_gb_s.is_none() && sealed.iter().all(|kernel| kernel.crypt_gb_s.is_some())
        };
        if !kernels.iter().all(belongs) {
            return Err("crypt_gb_s belongs to the sealed kernels, and only to them");
        }
        if !rates.iter().all(|rate| rate.is_finite() && *rate > 0.0) {
            return Err("a rate is not positive");
        }
        if !times.iter().all(|time| time.is_finite() && *time >= 0.0) {
            return Err("a time is negative");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checked_in_one_is_read_and_written_unchanged() {
        let text = include_str!("calibration/h200.json");
        let calibration = Calibration::from_json(text).unwrap();
        assert_eq!(calibration, Calibration::h200());
        assert_eq!(calibration.to_json(), text);
    }

    #[test]
    fn directs_own_kernels_are_kept_and_checked() {
        let ring = Calibration { direct: None, ..Calibration::h200() };
        let sealed = Crypto::Gcm(KeyLength::Aes128);
        assert_eq!(ring.kernel(Algorithm::Direct, sealed), ring.kernel(Algorithm::Ring, sealed));
        let own = |move_gb_s| {
            let own = |kernel| RingKernel { move_gb_s, ..kernel };
            let [plain, aes_128, aes_256] = [ring.plain, ring.aes_128, ring.aes_256].map(own);
            Calibration { direct: Some(DirectKernels { plain, aes_128, aes_256 }), ..ring.clone() }
        };
        let read = Calibration::from_json(&own(20.0).to_json()).unwrap();
        assert_eq!(read, own(20.0));
        assert_eq!(read.kernel(Algorithm::Direct, sealed).move_gb_s, 20.0);
        assert_eq!(read.kernel(Algorithm::RelayRing, sealed), ring.ring(sealed));
        assert!(Calibration::from_json(&own(-1.0).to_json()).is_err());
        let mut unsealed = own(20.0);
        unsealed.kernel_mut(Algorithm::Direct, sealed).crypt_gb_s = None;
        assert!(Calibration::from_json(&unsealed.to_json()).is_err());
    }

    #[test]
    fn figures_that_mean_nothing_are_refused() {
        let text = Calibration { direct: None, ..Calibration::h200() }.to_json();
        for (from, to) in [
            ("\"format\": 1", "\"format\": 2"),
            ("\"multiprocessors\": 132", "\"multiprocessors\": 0"),
            ("\"hop_us\": ", "\"hop_us\": -"),
            ("\"crypt_gb_s\": null", "\"crypt_gb_s\": 3.0"),
            ("\"memory_gb_s\"", "\"memory\""),
        ] {
            assert!(text.contains(from), "{from}");
            let refusal = Calibration::from_json(&text.replacen(from, to, 1));
            assert!(matches!(refusal, Err(Error::InvalidArgument(_))), "{from}");
        }
    }
}
