//! Runs the study's all-reduces on one GPU that all ranks share.
//!
//! Times are of rank 0's stream, from before the first all-reduce until after the last one, queued back to back as a
//! training iteration's are. One thread queues for all ranks. With keystream ready ([`KEYSTREAM_READY`]) an iteration is
//! done in parts of a few all-reduces, before each of which their keystream is made; times are the parts'.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::buckets::{DEFAULT_CAP_MIB, bucket_bytes};
use super::calibration::{Calibration, KernelCost, SeedKernels};
use super::fit::{Observation, Protection, fit};
use super::model::Method;
use super::workloads::Workload;
use crate::channel::{Crypto, GroupSecret, KeyLength};
use crate::collective::Algorithm;
use crate::cuda::{
    Collectives, Device, DeviceBuffer, GpuGroup, GpuOptions, KeystreamAhead, RankBuffers, SeedGroup,
    SeedOptions, Stream, driver,
};
use crate::{Dtype, Error, ReduceOp, Result};

/// Lengths in bytes of the single all-reduces that are timed.
pub const SIZES: [usize; 7] = [1 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20];
/// The relay ring, with AES-128, whose keystream was made before, in time that isn't counted: what a GPU that idles, or
/// computes something that leaves room, can have ready. As [`Iteration::method`]; it isn't modelled.
pub const KEYSTREAM_READY: &str = "relay-ready";
/// Bytes of keystream that a rank keeps for it at most, if an all-reduce needs no more.
const KEYSTREAM_BYTES: usize = 4 << 30;
/// AES-128-CTR on the whole GPU, 64 MiB at a time, in GB/s; docs/benchmarks.md. Only a sum of cipher and MAC can be
/// fitted to all-reduces, so one of the two is taken from there.
const CIPHER_GB_S: f64 = 881.0;

/// What was measured on one machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// The GPU's name.
    pub machine: String,
    /// What its driver supports.
    pub driver: String,
    /// The version of this crate.
    pub ringseal: String,
    /// Single all-reduces.
    pub observations: Vec<Observation>,
    /// One iteration's all-reduces at DDP's default cap.
    pub iterations: Vec<Iteration>,
    /// What could not be measured, and why.
    pub missing: Vec<String>,
}

/// One iteration's all-reduces.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Iteration {
    /// [`Workload::name`].
    pub workload: String,
    /// [`Method::name`], or [`KEYSTREAM_READY`].
    pub method: String,
    /// Number of ranks.
    pub ranks: usize,
    /// Number of all-reduces.
    pub all_reduces: usize,
    /// Bytes of a rank's gradients.
    pub bytes: usize,
    /// Median of their total time in microseconds.
    pub us: f64,
}

/// What is measured.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Numbers of ranks.
    pub ranks: Vec<usize>,
    /// The models.
    pub workloads: Vec<Workload>,
    /// How often each is timed, at least once; the median counts.
    pub repeats: usize,
}

impl Plan {
    /// How often [`measure`] reports progress.
    pub fn parts(&self) -> usize {
        self.ranks.len() * (METHODS.len() + 1)
    }
}

/// The published structure with and without cryptography, and the persistent kernels; the longer keys are for the
/// model only.
const METHODS: [Method; 9] = [
    Method::PLAIN,
    Method::sealed(Algorithm::Ring),
    Method::sealed(Algorithm::RelayRing),
    Method::sealed(Algorithm::Direct),
    Method::Fused(Algorithm::Direct, Crypto::None),
    Method::Fused(Algorithm::Ring, Crypto::Gcm(KeyLength::Aes256)),
    Method::SEED,
    Method::SeedPlain(Algorithm::Ring),
    Method::Seed(Algorithm::Tree),
];

/// Whether iterations are run, not only single all-reduces.
const fn runs_iterations(method: Method) -> bool {
    !matches!(method, Method::SeedPlain(_) | Method::Fused(_, Crypto::Gcm(KeyLength::Aes256)))
}

struct Group {
    ranks: Box<dyn Collectives>,
    /// Of how many all-reduces at a time keystream is made ahead, if of any.
    ready: Option<usize>,
}

impl Group {
    fn new(devices: &[Device], image: &[u8], method: Method, max_bytes: usize) -> Result<Self> {
        let secret = GroupSecret::random()?;
        let seed = |algorithm, crypto| {
            let options = SeedOptions {
                crypto,
                key: KeyLength::Aes128,
                algorithm,
                max_bytes,
                ..SeedOptions::default()
            };
            Ok(Self { ranks: Box::new(SeedGroup::new(devices, image, &secret, options)?), ready: None })
        };
        match method {
            Method::Seed(algorithm) => seed(algorithm, true),
            Method::SeedPlain(algorithm) => seed(algorithm, false),
            Method::Fused(algorithm, crypto) => {
                let timeout = Duration::from_secs(10);
                let options = GpuOptions { crypto, algorithm, max_bytes, timeout, ..GpuOptions::default() };
                Ok(Self { ranks: Box::new(GpuGroup::new(devices, image, &secret, options)?), ready: None })
            }
        }
    }

    /// For [`KEYSTREAM_READY`].
    fn ready(devices: &[Device], image: &[u8], max_bytes: usize) -> Result<Self> {
        // A rank of n seals n chunks of an n-th, and opens 2 (n-1).
        let collectives = (KEYSTREAM_BYTES / (3 * max_bytes)).clamp(1, 16);
        let options = GpuOptions {
            crypto: Crypto::Gcm(KeyLength::Aes128),
            algorithm: Algorithm::RelayRing,
            max_bytes,
            timeout: Duration::from_secs(10),
            keystream: Some(KeystreamAhead { collectives, bytes: max_bytes, makers: None }),
            ..GpuOptions::default()
        };
        let group = GpuGroup::new(devices, image, &GroupSecret::random()?, options)?;
        Ok(Self { ranks: Box::new(group), ready: Some(collectives) })
    }

    /// How many all-reduces are timed together.
    fn together(&self) -> usize {
        self.ready.unwrap_or(usize::MAX)
    }

    /// What comes before all-reduces of these lengths, and isn't timed.
    fn prepare(&mut self, sizes: &[usize]) -> Result<()> {
        if self.ready.is_none() {
            return Ok(());
        }
        self.ranks.wait_for_keystream()?;
        let made = self.ranks.make_keystream(sizes)?;
        if made != sizes.len() {
            return Err(Error::InvalidArgument(format!(
                "keystream of {made} all-reduces, where that of {} was to be ready",
                sizes.len()
            )));
        }
        self.ranks.wait_for_keystream()
    }

    /// # Safety
    /// As [`Collectives::run`].
    unsafe fn all_reduce(
        &mut self,
        buffers: &[RankBuffers],
        bytes: usize,
        streams: &[&Stream],
    ) -> Result<()> {
        let (count, dtype, op) = (bytes / Dtype::F32.size(), Dtype::F32, ReduceOp::Sum);
        // SAFETY: the caller's promise.
        unsafe { self.ranks.all_reduce(buffers, count, dtype, op, streams) }
    }

    fn outcome(&mut self) -> Result<()> {
        self.ranks.outcome()?;
        match self.ranks.keystream_misses()? {
            0 => Ok(()),
            misses => Err(Error::InvalidArgument(format!(
                "{misses} records' keystream was not ready, so that the time is of something else"
            ))),
        }
    }
}

/// Times everything in the plan on `device`, with the kernels of `image` (PTX or a cubin). What the kernels cannot do is
/// listed as missing. `progress` is told before each part what comes.
///
/// # Errors
/// [`Error::InvalidArgument`] for a plan without ranks or repeats; [`Error::Cuda`], for example when memory runs out; a
/// failure of a collective.
pub fn measure(
    device: &Device,
    image: &[u8],
    plan: &Plan,
    mut progress: impl FnMut(&str),
) -> Result<Measured> {
    if plan.ranks.contains(&0) || plan.repeats == 0 {
        return Err(Error::InvalidArgument("at least one rank and one repeat are needed".into()));
    }
    let mut measured = Measured {
        machine: device.name()?,
        driver: format!("CUDA {}", driver()?),
        ringseal: env!("CARGO_PKG_VERSION").into(),
        observations: Vec::new(),
        iterations: Vec::new(),
        missing: Vec::new(),
    };
    let buckets: Vec<_> =
        plan.workloads.iter().map(|workload| bucket_bytes(workload, DEFAULT_CAP_MIB, 4)).collect();
    let longest = buckets.iter().flatten().copied().chain(SIZES).max().unwrap_or_default();
    let gradients = buckets.iter().map(|sizes| sizes.iter().sum()).chain([longest]).max().unwrap_or_default();
    for &ranks in &plan.ranks {
        let devices: Vec<_> = (0..ranks).map(|_| Device::open(device.ordinal())).collect::<Result<_>>()?;
        let mut bench = Bench::new(&devices, gradients)?;
        for method in METHODS {
            let name = describe(method);
            progress(&format!("{ranks} ranks, {name}"));
            let mut group = match Group::new(&devices, image, method, longest) {
                Err(Error::Unsupported { what, .. }) => {
                    measured.missing.push(format!("{ranks} ranks, {name}: not supported: {what}"));
                    continue;
                }
                group => group?,
            };
            for bytes in SIZES {
                let back_to_back = if bytes <= 4 << 20 { 10 } else { 2 };
                let us = bench.median_us(&mut group, &vec![bytes; back_to_back], plan.repeats)?;
                let kernels = match method {
                    Method::Fused(_, crypto) => Protection::fused(crypto),
                    Method::Seed(_) => Protection::Seed,
                    Method::SeedPlain(_) => Protection::SeedPlain,
                };
                measured.observations.push(Observation {
                    kernels,
                    algorithm: method.algorithm().name().into(),
                    one_gpu: true,
                    ranks,
                    bytes,
                    us: (us / back_to_back as f64 * 100.0).round() / 100.0,
                });
            }
            if !runs_iterations(method) {
                continue;
            }
            bench.iterations(&mut group, method.name(), plan, &buckets, &mut measured)?;
        }
        if ranks > 1 {
            progress(&format!("{ranks} ranks, {KEYSTREAM_READY}"));
            let mut group = Group::ready(&devices, image, longest)?;
            bench.iterations(&mut group, KEYSTREAM_READY, plan, &buckets, &mut measured)?;
        }
    }
    Ok(measured)
}

fn describe(method: Method) -> String {
    match method {
        Method::Fused(_, Crypto::Gcm(KeyLength::Aes256)) => format!("{}, AES-256", method.name()),
        _ => method.name().into(),
    }
}

/// All-reduces of two H200s over NVLink, from benches/results/nvlink-2026-11-29.json.
pub fn nvlink_h200() -> Vec<Observation> {
    serde_json::from_str(include_str!("../../benches/results/study-nvlink-2026-11-29.json"))
        .expect("the file is checked by a test")
}

/// A calibration for this machine: `start`, fitted anew to what was measured. Links between GPUs stay as they were, unless
/// this is an H200: then what was measured over its NVLink counts too.
///
/// # Errors
/// As [`fit`].
pub fn calibrate(start: &Calibration, measured: &Measured, multiprocessors: u32) -> Result<Calibration> {
    let guess = KernelCost { fixed_us: 3.0, gb_s: 1000.0 };
    let seed = SeedKernels {
        issue_us: 5.0,
        encrypt: KernelCost { gb_s: CIPHER_GB_S, ..guess },
        mac: KernelCost { gb_s: 300.0, ..guess },
        copy: guess,
        reduce: guess,
    };
    let mut start = Calibration { multiprocessors, machine: measured.machine.clone(), ..start.clone() };
    start.seed.get_or_insert(seed);
    let h200 = measured.machine == "NVIDIA H200";
    let mut observations = measured.observations.clone();
    if h200 {
        observations.extend(nvlink_h200());
    }
    let mut calibration = fit(&start, &observations)?;
    let links = if h200 {
        "benches/results/study-nvlink-2026-11-29.json, two H200s over NVLink"
    } else {
        "nothing for NVLink, whose figures are an H200's"
    };
    calibration.source = format!(
        "Fitted to all-reduces of ranks that share one {} ({}), and to {links}. Assumed: the network, with 400 Gb/s a GPU \
         and 5 us a hop. AES-CTR's rate was measured apart (docs/benchmarks.md). What the fit calls a hop or a launch also \
         has what its equations leave out.",
        measured.machine, measured.driver
    );
    Ok(calibration)
}

/// Ranks' gradients and streams.
struct Bench {
    streams: Vec<Stream>,
    gradients: Vec<DeviceBuffer>,
}

impl Bench {
    fn new(devices: &[Device], bytes: usize) -> Result<Self> {
        let mut bench = Self { streams: Vec::new(), gradients: Vec::new() };
        for device in devices {
            let stream = Stream::new(device)?;
            let mut gradients = DeviceBuffer::new(device, bytes.next_multiple_of(256))?;
            // Zeros stay zeros: sums that overflow or are not numbers could take other paths.
            gradients.fill(0, &stream)?;
            stream.synchronize()?;
            bench.streams.push(stream);
            bench.gradients.push(gradients);
        }
        Ok(bench)
    }

    /// Each model's iteration, of all-reduces of the lengths in `buckets`.
    fn iterations(
        &mut self,
        group: &mut Group,
        method: &str,
        plan: &Plan,
        buckets: &[Vec<usize>],
        measured: &mut Measured,
    ) -> Result<()> {
        for (workload, sizes) in plan.workloads.iter().zip(buckets) {
            let us = self.median_us(group, sizes, plan.repeats.min(3))?;
            measured.iterations.push(Iteration {
                workload: workload.name.into(),
                method: method.into(),
                ranks: self.streams.len(),
                all_reduces: sizes.len(),
                bytes: sizes.iter().sum(),
                us: (us * 10.0).round() / 10.0,
            });
        }
        Ok(())
    }

    /// All-reduces vectors of these lengths in place, one after the other in memory while there is room.
    fn median_us(&mut self, group: &mut Group, sizes: &[usize], repeats: usize) -> Result<f64> {
        let streams: Vec<_> = self.streams.iter().collect();
        let room = self.gradients[0].len();
        let mut times = Vec::with_capacity(repeats);
        // The first one warms up and prepares lengths that are new.
        for round in 0..=repeats {
            let (mut offset, mut time) = (0, 0.0);
            for sizes in sizes.chunks(group.together()) {
                group.prepare(sizes)?;
                let start = streams[0].record()?;
                let mut queued = Ok(());
                for &bytes in sizes {
                    if offset + bytes > room {
                        offset = 0;
                    }
                    let at = |gradients: &DeviceBuffer| {
                        let address = gradients.pointer() + offset as u64;
                        RankBuffers { input: address, output: address }
                    };
                    let buffers: Vec<_> = self.gradients.iter().map(at).collect();
                    // SAFETY: the vectors lie inside the gradients, from a multiple of 256 bytes on; the streams are waited
                    // for below, and nothing else uses them.
                    queued = unsafe { group.all_reduce(&buffers, bytes, &streams) };
                    if queued.is_err() {
                        break;
                    }
                    offset += bytes.next_multiple_of(256);
                }
                let end = streams[0].record()?;
                for stream in &streams {
                    stream.synchronize()?;
                }
                queued?;
                group.outcome()?;
                time += end.since(&start)?.as_secs_f64() * 1e6;
            }
            if round > 0 {
                times.push(time);
            }
        }
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::fit::median_error;

    /// Times that another machine's model makes stand for that machine.
    #[test]
    fn a_calibration_follows_the_machine() {
        let mut other = Calibration::h200();
        other.aes_128.crypt_gb_s = Some(2.0);
        other.seed = Some(SeedKernels {
            issue_us: 2.0,
            encrypt: KernelCost { fixed_us: 7.0, gb_s: CIPHER_GB_S },
            mac: KernelCost { fixed_us: 7.0, gb_s: 111.0 },
            copy: KernelCost { fixed_us: 7.0, gb_s: 777.0 },
            reduce: KernelCost { fixed_us: 7.0, gb_s: 777.0 },
        });
        let mut measured = Measured {
            machine: "another".into(),
            driver: "CUDA 1".into(),
            ringseal: String::new(),
            observations: Vec::new(),
            iterations: Vec::new(),
            missing: Vec::new(),
        };
        for kernels in [Protection::Plain, Protection::Aes128, Protection::SeedPlain, Protection::Seed] {
            for bytes in SIZES {
                let algorithm = "ring".into();
                let mut one = Observation { kernels, algorithm, one_gpu: true, ranks: 4, bytes, us: 1.0 };
                one.us = 1.0 + one.error(&other).unwrap();
                measured.observations.push(one);
            }
        }
        let found = calibrate(&Calibration::h200(), &measured, 132).unwrap();
        assert!(median_error(&measured.observations, &found).unwrap() < 0.02);
        let mac = found.seed.unwrap().mac.gb_s;
        assert!((mac / 111.0 - 1.0).abs() < 0.05, "{mac}");
        assert_eq!((found.machine.as_str(), found.nvlink), ("another", other.nvlink));
    }
}
