//! Runs the study's all-reduces, on one GPU that all ranks share or with a rank on each of several.
//!
//! Times are of rank 0's stream, from before the first all-reduce until after the last one, queued back to back as a
//! training iteration's are. One thread queues for all ranks. With keystream ready ([`Method::Ready`]) an iteration is
//! done in parts of a few all-reduces, before each of which their keystream is made; times are the parts'.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::buckets::{DEFAULT_CAP_MIB, bucket_bytes};
use super::calibration::{Calibration, DirectKernels, KernelCost, RingKernel, SeedKernels};
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
/// Bytes of keystream that a rank keeps for it at most, if an all-reduce needs no more.
const KEYSTREAM_BYTES: usize = 4 << 30;
/// The GPU that measurements are checked in of.
const H200: &str = "NVIDIA H200";
/// AES-128-CTR on the whole GPU, 64 MiB at a time, in GB/s; docs/benchmarks.md. Only a sum of cipher and MAC can be
/// fitted to all-reduces, so one of the two is taken from there.
const CIPHER_GB_S: f64 = 881.0;

/// What was measured on machines of one kind: on one GPU, and perhaps across several.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// The GPU's name, of all of them.
    pub machine: String,
    /// What its driver supports.
    pub driver: String,
    /// The version of this crate.
    pub ringseal: String,
    /// Of what was measured across several GPUs; what is above is of one GPU, unless there is nothing of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub across: Option<Origin>,
    /// Single all-reduces.
    pub observations: Vec<Observation>,
    /// One iteration's all-reduces at DDP's default cap.
    pub iterations: Vec<Iteration>,
    /// What could not be measured, and why.
    pub missing: Vec<String>,
}

/// Where measurements come from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Origin {
    /// What the driver supports.
    pub driver: String,
    /// The version of this crate.
    pub ringseal: String,
}

impl Measured {
    /// With what `newer` holds in place of the same: a placement, all ranks on one GPU or a GPU for each, is replaced as a
    /// whole, so that its times are of one run.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the GPUs are of another kind.
    pub fn merged(mut self, newer: Self) -> Result<Self> {
        self.check_machine(&newer.machine)?;
        let holds = |one_gpu| {
            newer.observations.iter().any(|one| one.one_gpu == one_gpu)
                || newer.iterations.iter().any(|one| one.one_gpu == one_gpu)
        };
        let replaced = [false, true].map(holds);
        let stays = |one_gpu: bool| !replaced[usize::from(one_gpu)];
        self.observations.retain(|one| stays(one.one_gpu));
        self.iterations.retain(|one| stays(one.one_gpu));
        self.missing.retain(|what| stays(!is_across(what)));
        self.observations.extend(newer.observations);
        self.iterations.extend(newer.iterations);
        self.missing.extend(newer.missing);
        if replaced[1] {
            (self.driver, self.ringseal) = (newer.driver, newer.ringseal);
        }
        if replaced[0] {
            self.across = newer.across;
        }
        Ok(self)
    }

    /// Whether what was measured on a machine can be added.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when its GPUs are of another kind.
    pub fn check_machine(&self, machine: &str) -> Result<()> {
        if self.machine == machine {
            return Ok(());
        }
        let what = format!(
            "measurements of {machine} can't be added to those of {}: use another file",
            self.machine
        );
        Err(Error::InvalidArgument(what))
    }

    /// What could not be measured on one GPU, or across several.
    pub fn missing_of(&self, one_gpu: bool) -> impl Iterator<Item = &str> {
        self.missing.iter().map(String::as_str).filter(move |what| is_across(what) != one_gpu)
    }
}

/// Whether something that is missing is so across GPUs; as `Plan::placement` begins.
fn is_across(missing: &str) -> bool {
    missing.split_once(' ').is_some_and(|(_, rest)| rest.starts_with("GPUs"))
}

/// One iteration's all-reduces.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Iteration {
    /// [`Workload::name`].
    pub workload: String,
    /// [`Method::name`].
    pub method: String,
    /// As [`Observation::one_gpu`].
    #[serde(default = "on_one_gpu")]
    pub one_gpu: bool,
    /// Number of ranks.
    pub ranks: usize,
    /// Number of all-reduces.
    pub all_reduces: usize,
    /// Bytes of a rank's gradients.
    pub bytes: usize,
    /// Median of their total time in microseconds.
    pub us: f64,
}

/// What files say that don't say it.
const fn on_one_gpu() -> bool {
    true
}

/// What is measured.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The GPU that all ranks share; or several, of which each rank has one.
    pub gpus: Vec<usize>,
    /// Numbers of ranks; on several GPUs those that there are enough GPUs for, each on the first so many.
    pub ranks: Vec<usize>,
    /// The models.
    pub workloads: Vec<Workload>,
    /// How often each is timed, at least once; the median counts.
    pub repeats: usize,
}

impl Plan {
    /// How often [`measure`] reports progress.
    pub fn parts(&self) -> usize {
        self.groups().map(|ranks| methods(self.one_gpu(), ranks).len()).sum()
    }

    const fn one_gpu(&self) -> bool {
        self.gpus.len() == 1
    }

    /// Numbers of ranks that there are GPUs for.
    fn groups(&self) -> impl Iterator<Item = usize> {
        self.ranks.iter().copied().filter(|ranks| self.one_gpu() || (2..=self.gpus.len()).contains(ranks))
    }

    /// In words.
    fn placement(&self, ranks: usize) -> String {
        format!("{ranks} {}", if self.one_gpu() { "ranks" } else { "GPUs" })
    }

    /// What [`measure`] checks first.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`].
    pub fn check(&self) -> Result<()> {
        let invalid = |what: String| Err(Error::InvalidArgument(what));
        if self.ranks.contains(&0) || self.repeats == 0 {
            return invalid("at least one rank and one repeat are needed".into());
        }
        let twice = self.gpus.iter().enumerate().find(|(at, gpu)| self.gpus[..*at].contains(gpu));
        match (twice, self.gpus.len()) {
            (Some((_, gpu)), _) => {
                invalid(format!("GPU {gpu} is named twice: a rank on each of them is measured"))
            }
            (None, 0) => invalid("no GPU to measure on".into()),
            (None, gpus) if self.groups().next().is_none() => {
                invalid(format!("{gpus} GPUs, but of {:?} ranks none are from 2 to {gpus}", self.ranks))
            }
            _ => Ok(()),
        }
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

/// Two ranks with a GPU each also exchange whole vectors, as they do unless told otherwise.
fn methods(one_gpu: bool, ranks: usize) -> Vec<Method> {
    let mut methods = METHODS.to_vec();
    let fastest = if one_gpu { Algorithm::RelayRing } else { GpuOptions::fastest_algorithm(ranks) };
    if fastest == Algorithm::Exchange {
        methods.extend([Method::Fused(fastest, Crypto::None), Method::sealed(fastest)]);
    }
    if ranks > 1 {
        methods.push(Method::Ready(fastest));
    }
    methods
}

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
        let fused = |algorithm, crypto, keystream| {
            let timeout = Duration::from_secs(10);
            let options =
                GpuOptions { crypto, algorithm, max_bytes, timeout, keystream, ..GpuOptions::default() };
            let ready = keystream.map(|ahead| ahead.collectives);
            Ok(Self { ranks: Box::new(GpuGroup::new(devices, image, &secret, options)?), ready })
        };
        match method {
            Method::Seed(algorithm) => seed(algorithm, true),
            Method::SeedPlain(algorithm) => seed(algorithm, false),
            Method::Fused(algorithm, crypto) => fused(algorithm, crypto, None),
            Method::Ready(algorithm) => {
                // A rank of n seals n chunks of an n-th in a relay ring, and opens 2 (n-1); no algorithm that is measured
                // takes more.
                let collectives = (KEYSTREAM_BYTES / (3 * max_bytes)).clamp(1, 16);
                let ahead = KeystreamAhead { collectives, bytes: max_bytes, makers: None };
                fused(algorithm, Crypto::Gcm(KeyLength::Aes128), Some(ahead))
            }
        }
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

/// Times everything in the plan, with the kernels of `image` (PTX or a cubin). What the kernels cannot do is listed as
/// missing. `progress` is told before each part what comes.
///
/// # Errors
/// [`Error::InvalidArgument`] for a plan without ranks, GPUs or repeats, or with GPUs of several kinds; [`Error::Cuda`], for
/// example when memory runs out; a failure of a collective.
pub fn measure(image: &[u8], plan: &Plan, mut progress: impl FnMut(&str)) -> Result<Measured> {
    plan.check()?;
    let one_gpu = plan.one_gpu();
    let names: Vec<_> = plan.gpus.iter().map(|gpu| Device::open(*gpu)?.name()).collect::<Result<_>>()?;
    if let Some(other) = names.iter().find(|name| **name != names[0]) {
        let what = format!("GPUs of several kinds, {} and {other}: choose GPUs of one kind", names[0]);
        return Err(Error::InvalidArgument(what));
    }
    let origin = Origin { driver: format!("CUDA {}", driver()?), ringseal: env!("CARGO_PKG_VERSION").into() };
    let mut measured = Measured {
        machine: names[0].clone(),
        driver: origin.driver.clone(),
        ringseal: origin.ringseal.clone(),
        across: (!one_gpu).then_some(origin),
        observations: Vec::new(),
        iterations: Vec::new(),
        missing: Vec::new(),
    };
    let buckets: Vec<_> =
        plan.workloads.iter().map(|workload| bucket_bytes(workload, DEFAULT_CAP_MIB, 4)).collect();
    let longest = buckets.iter().flatten().copied().chain(SIZES).max().unwrap_or_default();
    let gradients = buckets.iter().map(|sizes| sizes.iter().sum()).chain([longest]).max().unwrap_or_default();
    for ranks in plan.groups() {
        let devices: Vec<_> = (0..ranks)
            .map(|rank| Device::open(plan.gpus[if one_gpu { 0 } else { rank }]))
            .collect::<Result<_>>()?;
        let mut bench = Bench::new(&devices, gradients)?;
        for method in methods(one_gpu, ranks) {
            let what = format!("{}, {}", plan.placement(ranks), describe(method));
            progress(&what);
            let mut group = match Group::new(&devices, image, method, longest) {
                Err(Error::Unsupported { what: why, .. }) => {
                    measured.missing.push(format!("{what}: not supported: {why}"));
                    continue;
                }
                group => group?,
            };
            match bench.method(&mut group, method, plan, &buckets, &mut measured) {
                // Keystream that was not ready after all is no reason to lose the others' times.
                Err(Error::InvalidArgument(why)) if matches!(method, Method::Ready(_)) => {
                    measured.missing.push(format!("{what}: {why}"));
                }
                done => done?,
            }
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

/// All-reduces of two H200s over NVLink, from benches/results/nvlink-2026-11-30.json.
pub fn nvlink_h200() -> Vec<Observation> {
    serde_json::from_str(include_str!("../../benches/results/study-nvlink-2026-11-30.json"))
        .expect("the file is checked by a test")
}

/// The file of [`measured_h200`].
macro_rules! h200_file {
    () => {
        "benches/results/study-2026-11-30.json"
    };
}

/// Which of the files in the repository [`measured_h200`] is.
pub const H200_FILE: &str = h200_file!();

/// What was measured on H200s, which the checked-in calibration and docs/study.md are of.
pub fn measured_h200() -> Measured {
    serde_json::from_str(include_str!(concat!("../../", h200_file!())))
        .expect("the file is checked by a test")
}

/// What of the measurements, and of those that are checked in, the model's figures are fitted to: rings and direct, sealed as
/// they go or plain, wherever they are, and the published structure on one GPU. The exchange has kernels of its own,
/// keystream that is ready is loaded instead of made, and across GPUs the published structure copies by other means: what
/// the model says of these is a prediction by the others' figures. Without rings across GPUs an H200 has those of
/// [`nvlink_h200`].
pub fn fitted_to(measured: &Measured) -> Vec<Observation> {
    let modelled = |one: &Observation| {
        let algorithms = [Algorithm::Ring, Algorithm::RelayRing, Algorithm::Direct];
        algorithms.iter().any(|algorithm| algorithm.name() == one.algorithm)
    };
    let bears = |one: &&Observation| match one.kernels {
        Protection::Plain | Protection::Aes128 | Protection::Aes256 => modelled(one),
        Protection::Seed | Protection::SeedPlain => one.one_gpu,
        Protection::Aes128Ready => false,
    };
    let mut observations: Vec<_> = measured.observations.iter().filter(bears).cloned().collect();
    let linked = |one: &Observation| !one.one_gpu && one.algorithm == Algorithm::Ring.name();
    if measured.machine == H200 && !observations.iter().any(linked) {
        observations.extend(nvlink_h200());
    }
    observations
}

/// A calibration for this machine: `start`, fitted anew to [what was measured](fitted_to). Links between GPUs stay as they were
/// where nothing was measured across them.
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
    let observations = fitted_to(measured);
    if observations.iter().any(|one| one.algorithm == Algorithm::Direct.name()) {
        start.direct.get_or_insert(own_direct(&start));
    }
    let mut calibration = fit(&start, &observations)?;
    if let Some(direct) = &mut calibration.direct {
        // Not measured: the cipher is the ring's.
        let DirectKernels { plain: RingKernel { record_us, move_gb_s, .. }, .. } = *direct;
        direct.aes_256 = RingKernel { record_us, move_gb_s, ..calibration.aes_256 };
    }
    let across = measured.observations.iter().filter(|one| !one.one_gpu).map(|one| one.ranks).max();
    let links = match (&measured.across, across) {
        (Some(origin), Some(ranks)) => {
            format!("those of rings and direct across up to {ranks} of them ({})", origin.driver)
        }
        _ if measured.machine == H200 => {
            "benches/results/study-nvlink-2026-11-30.json, two H200s over NVLink".into()
        }
        _ => "nothing for NVLink, whose figures are an H200's".to_owned(),
    };
    calibration.source = format!(
        "Fitted to all-reduces of ranks that share one {} ({}), and to {links}. Assumed: the network, with 400 Gb/s a GPU \
         and 5 us a hop. AES-CTR's rate was measured apart (docs/benchmarks.md). What the fit calls a hop or a launch also \
         has what its equations leave out.",
        measured.machine, measured.driver
    );
    Ok(calibration)
}

/// From where the search for figures of the direct algorithm starts: the ring's, but that a block's own rate binds, as that
/// of all blocks together would hide it.
fn own_direct(start: &Calibration) -> DirectKernels {
    let move_gb_s = start.memory_gb_s / f64::from(start.multiprocessors);
    let [plain, aes_128, aes_256] =
        [start.plain, start.aes_128, start.aes_256].map(|kernel| RingKernel { move_gb_s, ..kernel });
    DirectKernels { plain, aes_128, aes_256 }
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

    /// All that is timed of a method: each model's iteration, of all-reduces of the lengths in `buckets`, and single
    /// all-reduces.
    fn method(
        &mut self,
        group: &mut Group,
        method: Method,
        plan: &Plan,
        buckets: &[Vec<usize>],
        measured: &mut Measured,
    ) -> Result<()> {
        if runs_iterations(method) {
            for (workload, sizes) in plan.workloads.iter().zip(buckets) {
                let us = self.median_us(group, sizes, plan.repeats.min(3))?;
                measured.iterations.push(Iteration {
                    workload: workload.name.into(),
                    method: method.name().into(),
                    one_gpu: plan.one_gpu(),
                    ranks: self.streams.len(),
                    all_reduces: sizes.len(),
                    bytes: sizes.iter().sum(),
                    us: (us * 10.0).round() / 10.0,
                });
            }
        }
        for bytes in SIZES {
            let back_to_back = if bytes <= 4 << 20 { 10 } else { 2 };
            let us = self.median_us(group, &vec![bytes; back_to_back], plan.repeats)?;
            measured.observations.push(Observation {
                kernels: Protection::of(method),
                algorithm: method.algorithm().name().into(),
                one_gpu: plan.one_gpu(),
                ranks: self.streams.len(),
                bytes,
                us: (us / back_to_back as f64 * 100.0).round() / 100.0,
                longest_record: None,
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

    fn empty(machine: &str) -> Measured {
        Measured {
            machine: machine.into(),
            driver: "CUDA 1".into(),
            ringseal: "1".into(),
            across: None,
            observations: Vec::new(),
            iterations: Vec::new(),
            missing: Vec::new(),
        }
    }

    fn observation(kernels: Protection, algorithm: Algorithm, one_gpu: bool, us: f64) -> Observation {
        Observation {
            kernels,
            algorithm: algorithm.name().into(),
            one_gpu,
            ranks: 2,
            bytes: 1 << 20,
            us,
            longest_record: None,
        }
    }

    /// A part whose times are all `us`.
    fn part(one_gpu: bool, us: f64) -> Measured {
        let placed = if one_gpu { "ranks" } else { "GPUs" };
        let driver = format!("CUDA {us}");
        let origin = Origin { driver: driver.clone(), ringseal: "2".into() };
        Measured {
            driver,
            across: (!one_gpu).then_some(origin),
            observations: vec![observation(Protection::Plain, Algorithm::Ring, one_gpu, us)],
            iterations: vec![Iteration {
                workload: "BERT".into(),
                method: "plain".into(),
                one_gpu,
                ranks: 2,
                all_reduces: 1,
                bytes: 1,
                us,
            }],
            missing: vec![format!("2 {placed}, tree: not supported: {us}")],
            ..empty(H200)
        }
    }

    #[test]
    fn a_part_is_replaced_and_the_other_stays() {
        let both = part(true, 1.0).merged(part(false, 2.0)).unwrap();
        assert_eq!(
            (both.driver.as_str(), both.across.as_ref().unwrap().driver.as_str()),
            ("CUDA 1", "CUDA 2")
        );
        let check = |measured: &Measured, times: [f64; 2]| {
            for (one_gpu, us) in [true, false].into_iter().zip(times) {
                let of = |one: bool, time: f64| (one == one_gpu).then_some(time);
                let observed = measured.observations.iter().filter_map(|one| of(one.one_gpu, one.us));
                assert_eq!(observed.collect::<Vec<_>>(), [us]);
                let iterations = measured.iterations.iter().filter_map(|one| of(one.one_gpu, one.us));
                assert_eq!(iterations.collect::<Vec<_>>(), [us]);
                let missing: Vec<_> = measured.missing_of(one_gpu).collect();
                assert!(matches!(missing[..], [what] if what.ends_with(&format!(": {us}"))), "{missing:?}");
            }
        };
        check(&both, [1.0, 2.0]);
        let across_anew = both.clone().merged(part(false, 3.0)).unwrap();
        check(&across_anew, [1.0, 3.0]);
        assert_eq!(
            (across_anew.driver.as_str(), across_anew.across.unwrap().driver.as_str()),
            ("CUDA 1", "CUDA 3")
        );
        let one_anew = both.merged(part(true, 4.0)).unwrap();
        check(&one_anew, [4.0, 2.0]);
        assert_eq!(
            (one_anew.driver.as_str(), one_anew.across.as_ref().unwrap().driver.as_str()),
            ("CUDA 4", "CUDA 2")
        );
        let other = one_anew.merged(empty("another"));
        assert!(matches!(other, Err(Error::InvalidArgument(what)) if what.contains("another file")));
    }

    #[test]
    fn files_from_before_there_were_several_gpus_are_read_and_new_ones_come_back_as_they_were() {
        let old = measured_h200();
        assert!(old.across.is_some() || old.iterations.iter().all(|one| one.one_gpu));
        let text = r#"{"machine": "NVIDIA H200", "driver": "CUDA 13.0", "ringseal": "0.1.0", "observations": [],
            "iterations": [{"workload": "BERT", "method": "plain", "ranks": 2, "all_reduces": 1, "bytes": 1, "us": 1.5}],
            "missing": []}"#;
        let older: Measured = serde_json::from_str(text).unwrap();
        assert!(older.across.is_none() && older.iterations[0].one_gpu);
        assert!(serde_json::from_str::<Measured>(&text.replace("driver", "drivers")).is_err());
        let both = part(true, 1.0).merged(part(false, 2.0)).unwrap();
        let again: Measured = serde_json::from_str(&serde_json::to_string(&both).unwrap()).unwrap();
        assert_eq!(again, both);
    }

    #[test]
    fn plans_that_measure_nothing_are_refused() {
        let plan = |gpus: &[usize], ranks: &[usize]| Plan {
            gpus: gpus.to_vec(),
            ranks: ranks.to_vec(),
            workloads: Vec::new(),
            repeats: 1,
        };
        for (gpus, ranks) in
            [(&[0][..], &[0][..]), (&[], &[2]), (&[0, 0], &[2]), (&[0, 1], &[4, 8]), (&[0, 1], &[1])]
        {
            assert!(
                matches!(plan(gpus, ranks).check(), Err(Error::InvalidArgument(_))),
                "{gpus:?} {ranks:?}"
            );
        }
        assert!(Plan { repeats: 0, ..plan(&[0], &[2]) }.check().is_err());
        for (gpus, ranks, groups) in [
            (&[3][..], &[1, 2, 8][..], &[1, 2, 8][..]),
            (&[0, 1], &[2, 4, 8], &[2]),
            (&[0, 1, 2, 3], &[2, 4, 8], &[2, 4]),
        ] {
            let plan = plan(gpus, ranks);
            plan.check().unwrap();
            assert_eq!(plan.groups().collect::<Vec<_>>(), groups);
            assert!(plan.parts() >= METHODS.len() * groups.len());
        }
    }

    #[test]
    fn two_gpus_exchange_and_more_or_one_do_not() {
        let ready =
            |one_gpu, ranks| methods(one_gpu, ranks).into_iter().find(|one| matches!(one, Method::Ready(_)));
        assert_eq!(ready(false, 2), Some(Method::Ready(Algorithm::Exchange)));
        assert_eq!(ready(false, 4), Some(Method::Ready(Algorithm::RelayRing)));
        assert_eq!(ready(true, 2), Some(Method::Ready(Algorithm::RelayRing)));
        assert_eq!(ready(true, 1), None);
        for (one_gpu, ranks, exchanges) in [(false, 2, 3), (false, 4, 0), (true, 2, 0)] {
            let methods = methods(one_gpu, ranks);
            let names: std::collections::BTreeSet<_> = methods.iter().map(|one| describe(*one)).collect();
            assert_eq!(names.len(), methods.len(), "names are keys");
            assert_eq!(
                methods.iter().filter(|one| one.algorithm() == Algorithm::Exchange).count(),
                exchanges
            );
        }
    }

    #[test]
    fn the_model_is_fitted_to_persistent_kernels_anywhere_and_to_the_published_structure_on_one_gpu() {
        let all = |one_gpu| {
            [
                (Protection::Plain, Algorithm::Ring, true),
                (Protection::Aes256, Algorithm::RelayRing, true),
                (Protection::Aes128, Algorithm::Exchange, false),
                (Protection::Aes128, Algorithm::Direct, true),
                (Protection::Aes128Ready, Algorithm::RelayRing, false),
                (Protection::Seed, Algorithm::Tree, one_gpu),
                (Protection::SeedPlain, Algorithm::Ring, one_gpu),
            ]
            .map(|(kernels, algorithm, bears)| (observation(kernels, algorithm, one_gpu, 1.0), bears))
        };
        let mut measured = empty(H200);
        let mut expected = Vec::new();
        for one_gpu in [true, false] {
            measured.observations.extend(all(one_gpu).map(|(one, _)| one));
            expected.extend(all(one_gpu).into_iter().filter_map(|(one, bears)| bears.then_some(one)));
            let checked_in = if one_gpu { nvlink_h200() } else { Vec::new() };
            assert_eq!(fitted_to(&measured), [expected.clone(), checked_in].concat());
        }
        measured.machine = "another".into();
        measured.observations.retain(|one| one.one_gpu);
        assert!(fitted_to(&measured).iter().all(|one| one.one_gpu));
    }

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
        let mut measured = empty("another");
        for kernels in [Protection::Plain, Protection::Aes128, Protection::SeedPlain, Protection::Seed] {
            for bytes in SIZES {
                let algorithm = "ring".into();
                let mut one = Observation {
                    kernels,
                    algorithm,
                    one_gpu: true,
                    ranks: 4,
                    bytes,
                    us: 1.0,
                    longest_record: None,
                };
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
