//! The ranks of a run: in this process, each on a thread of its own, or on GPUs; or one of them, the others elsewhere.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ringseal::backend::Backend;
use ringseal::channel::GroupSecret;
use ringseal::collective::{Algorithm, Buffers, Communicator, Crypto, Nodes, Options, Request};
use ringseal::cuda::{Calibrated, Device, GpuOptions, KeystreamAhead, LaunchForm, SeedOptions, StepTimes};
use ringseal::{Dtype, ReduceOp};

use super::gpu::{self, GpuRanks, GroupOptions};
use super::keystream::Missing;
use super::membership::{Carrier, Joined, Membership};
use crate::cli::BackendName;
use crate::cli::failure::{Failure, Outcome};
use crate::cli::values::ByteSize;

/// More threads than this are no help to anybody.
const MAX_RANKS: usize = 256;
/// Ranks of one process don't die alone, but many of them, or the emulated backend, take their time.
const TIMEOUT: Duration = Duration::from_secs(600);
/// Up to this many bytes of a rank, `auto` goes direct: two hops instead of 2(n-1).
const DIRECT_BYTES: usize = 64 << 10;
/// Which algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// By the size.
    Auto,
    /// Always this one.
    Always(Algorithm),
}

impl Choice {
    /// Parses `auto` or an algorithm's name.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let known = Algorithm::ALL.iter().find(|algorithm| algorithm.name() == text);
        match (text, known) {
            ("auto", _) => Ok(Self::Auto),
            (_, Some(&algorithm)) => Ok(Self::Always(algorithm)),
            _ => Err(format!("choose one of auto, {}", Algorithm::ALL.map(Algorithm::name).join(", "))),
        }
    }

    fn algorithm(self, bytes: usize) -> Algorithm {
        match self {
            Self::Always(algorithm) => algorithm,
            Self::Auto if bytes <= DIRECT_BYTES => Algorithm::Direct,
            Self::Auto => Algorithm::RelayRing,
        }
    }
}

/// How a rank's operations become launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Structure {
    /// All in one.
    Fused,
    /// One each, as published.
    Seed {
        /// Of the MAC; the library's choice when `None`.
        chains: Option<u32>,
    },
}

/// How many ranks, and how they work together.
#[derive(Clone)]
pub(super) struct Setup {
    ranks: usize,
    home: Home,
    choice: Choice,
    crypto: Crypto,
    structure: Structure,
    record_bytes: Option<usize>,
    launch: LaunchForm,
    /// Multiprocessors that a rank on a GPU may take.
    sm_budget: Option<u32>,
    /// Whether the keystream of all-reduces is made before they begin.
    keystream: bool,
    /// When this process is one rank of them.
    membership: Option<Arc<Membership>>,
}

/// Where the ranks and their vectors are.
#[derive(Clone)]
enum Home {
    /// In this process, with their cipher.
    Process(Arc<dyn Backend>),
    /// On GPUs, one for each rank; some may be the same.
    Gpus(Vec<Device>),
}

impl Setup {
    pub(super) fn new(
        ranks: usize,
        choice: Choice,
        crypto: Crypto,
        structure: Structure,
        record: Option<ByteSize>,
        backend: BackendName,
        membership: Option<Membership>,
    ) -> Outcome<Self> {
        if structure != Structure::Fused && !matches!(backend, BackendName::Cuda) {
            return Err(Failure::Input("--crypto seed: its kernels need --backend cuda".into()));
        }
        if structure != Structure::Fused && record.is_some() {
            return Err(Failure::Input("--record: with --crypto seed a whole chunk is one message".into()));
        }
        if structure != Structure::Fused && membership.is_some() {
            return Err(Failure::Input("--crypto seed: its ranks are all of one process".into()));
        }
        if let Some(member) = &membership
            && member.node_ranks.is_some()
            && choice != Choice::Auto
        {
            return Err(Failure::Input(
                "--algo: with --node-ranks each part has the library's choice".into(),
            ));
        }
        if ranks == 0 {
            return Err(Failure::Input("--ranks 0: there must be at least one rank".into()));
        }
        if ranks > MAX_RANKS && membership.is_none() {
            return Err(Failure::Input(format!("--ranks {ranks}: at most {MAX_RANKS} run in one process")));
        }
        let through_host = membership.as_ref().is_some_and(|member| member.through_host(backend));
        let found = match backend {
            _ if through_host => None,
            BackendName::Cuda => Some(gpu::devices(ranks)?),
            BackendName::Auto => gpu::fit(ranks, crypto),
            _ => None,
        };
        let home = match (found, backend) {
            (Some(devices), _) => {
                let own = membership.as_ref().map_or(0..ranks, |member| member.rank..member.rank + 1);
                Home::Gpus(devices[own].to_vec())
            }
            (None, BackendName::Auto) => Home::Process(BackendName::Cpu.open()?),
            (None, named) => Home::Process(named.open()?),
        };
        if let Home::Process(backend) = &home
            && crypto != Crypto::None
            && !backend.has_gcm()
        {
            let what =
                format!("--backend {}: it has no AES-GCM here; use cpu, or --crypto none", backend.name());
            return Err(Failure::Input(what));
        }
        let record_bytes = record.map(|ByteSize(bytes)| bytes);
        let membership = membership.map(Arc::new);
        let launch = LaunchForm::Auto;
        Ok(Self {
            ranks,
            home,
            choice,
            crypto,
            structure,
            record_bytes,
            launch,
            sm_budget: None,
            keystream: false,
            membership,
        })
    }

    /// The same in another form of launches, if one is named.
    pub(super) fn launched(self, form: Option<LaunchForm>) -> Outcome<Self> {
        let Some(launch) = form else { return Ok(self) };
        self.needs_fused_gpus(
            "--launch: --crypto seed has launches of its own",
            "--launch: nothing is launched on a CPU; use --backend cuda",
        )?;
        Ok(Self { launch, ..self })
    }

    /// The same on no more than so many multiprocessors a rank, if it is said.
    pub(super) fn limited(self, sm_budget: Option<u32>) -> Outcome<Self> {
        if sm_budget.is_none() {
            return Ok(self);
        }
        self.needs_fused_gpus(
            "--sm: the kernels of --crypto seed take what they need",
            "--sm: a CPU has no multiprocessors; use --backend cuda",
        )?;
        Ok(Self { sm_budget, ..self })
    }

    /// Refuses the published structure and CPUs, each with its words.
    fn needs_fused_gpus(&self, seed: &str, cpu: &str) -> Outcome {
        match (&self.home, self.structure) {
            (Home::Gpus(_), Structure::Fused) => Ok(()),
            (Home::Gpus(_), Structure::Seed { .. }) => Err(Failure::Input(seed.into())),
            (Home::Process(_), _) => Err(Failure::Input(cpu.into())),
        }
    }

    /// The same with keystream made before each all-reduce, if it is asked for.
    pub(super) fn prepared(self, keystream: bool) -> Outcome<Self> {
        match &self.home {
            Home::Process(_) if keystream => {
                Err(Failure::Input("--keystream: only GPUs make it ahead of time; use --backend cuda".into()))
            }
            Home::Gpus(_) if keystream && self.over_nccl() => Err(Failure::Input(
                "--keystream: none is kept of what NCCL carries; use --transport tcp".into(),
            )),
            _ => Ok(Self { keystream, ..self }),
        }
    }

    pub(super) fn ranks(&self) -> usize {
        self.ranks
    }

    fn over_nccl(&self) -> bool {
        self.membership.as_ref().is_some_and(|member| member.carrier == Carrier::Nccl)
    }

    /// The ranks of this process.
    pub(super) fn own_ranks(&self) -> Range<usize> {
        self.membership.as_ref().map_or(0..self.ranks, |member| member.rank..member.rank + 1)
    }

    /// The ring without encryption, to compare with; `None` when there is nothing to compare.
    pub(super) fn plain_ring(&self) -> Option<Self> {
        let choice = Choice::Always(Algorithm::Ring);
        let plain = Self { choice, crypto: Crypto::None, keystream: false, ..self.clone() };
        (self.crypto != Crypto::None).then_some(plain)
    }

    /// Whether the ranks calibrate their choice of algorithm when they are set up, where there is one.
    pub(super) fn calibrates(&self) -> bool {
        matches!(self.home, Home::Gpus(_))
            && self.choice == Choice::Auto
            && self.structure == Structure::Fused
            // It is one algorithm's.
            && !self.keystream
            && !self.over_nccl()
    }

    /// The same with a fixed algorithm on GPUs, where calibrating would take longer than what is to be done.
    pub(super) fn uncalibrated(&self) -> Self {
        match &self.home {
            Home::Gpus(_) => Self { choice: Choice::Always(self.gpu_algorithm()), ..self.clone() },
            Home::Process(_) => self.clone(),
        }
    }

    /// What a breakdown measures: the same with a launch for each step, and that without encryption.
    pub(super) fn step_by_step(&self) -> Outcome<[Self; 2]> {
        if !matches!(self.home, Home::Gpus(_))
            || self.structure != Structure::Fused
            || self.membership.is_some()
        {
            return Err(Failure::Input(
                "--breakdown: it takes --backend cuda, all ranks in one process, and --crypto gcm or none"
                    .into(),
            ));
        }
        let choice = Choice::Always(self.gpu_algorithm());
        let steps = Self { launch: LaunchForm::PerStep, choice, ..self.clone() };
        let plain = Self { crypto: Crypto::None, ..steps.clone() };
        Ok([steps, plain])
    }

    /// In words, for the head of a table.
    pub(super) fn description(&self) -> Outcome<String> {
        let Self { ranks, home, choice, crypto, structure, record_bytes, membership, .. } = self;
        let carried = membership.as_ref().map_or(String::new(), |member| {
            let nodes = member.node_ranks.map(|ranks| format!(", in nodes of {ranks}")).unwrap_or_default();
            let carrier = if member.carrier == Carrier::Nccl { ", over NCCL" } else { "" };
            nodes + carrier
        });
        let home = match home {
            Home::Process(backend) if membership.is_some() => {
                format!("in a process each{carried}, backend {}", backend.name())
            }
            Home::Process(backend) => format!("in one process, backend {}", backend.name()),
            Home::Gpus(devices) if membership.is_some() => {
                format!("in a process each{carried}, rank 0 on {}, backend cuda", devices[0].name()?)
            }
            Home::Gpus(devices) => {
                let distinct = devices.iter().map(|device| device.ordinal() + 1).max().unwrap_or(0);
                format!("on {distinct} x {}, backend cuda", devices[0].name()?)
            }
        };
        let algorithm = match choice {
            Choice::Auto if self.calibrates() => "auto".into(),
            Choice::Auto => match (&self.home, membership.as_ref().and_then(|member| member.node_ranks)) {
                (Home::Gpus(_), None) => self.gpu_algorithm().name().into(),
                (Home::Gpus(_), Some(node_ranks)) => format!(
                    "{} inside and {} between",
                    self.algorithm_of(node_ranks).name(),
                    self.algorithm_of(ranks / node_ranks).name()
                ),
                (Home::Process(_), None) => {
                    format!("direct up to {} and relay above", ByteSize(DIRECT_BYTES))
                }
                // Nodes take one algorithm for vectors of all lengths.
                (Home::Process(_), Some(_)) => Options::default().algorithm.name().into(),
            },
            Choice::Always(algorithm) => algorithm.name().into(),
        };
        let crypto = match crypto {
            Crypto::None => "not encrypted".into(),
            Crypto::Gcm(length) => format!("AES-{}-GCM", 8 * length.bytes()),
        };
        let crypto = match structure {
            Structure::Fused => crypto,
            Structure::Seed { chains } => {
                let chains = chains.unwrap_or(SeedOptions::default().chains);
                format!("{crypto} in the structure of arXiv 2501.11771, {chains} chains")
            }
        };
        let records = record_bytes.map_or(String::new(), |bytes| format!(", records of {}", ByteSize(bytes)));
        let keystream = if self.keystream { ", keystream ready" } else { "" };
        Ok(format!("all-reduce, {ranks} ranks {home}, {algorithm}, {crypto}{records}{keystream}"))
    }

    fn options(&self, backend: Arc<dyn Backend>) -> Options {
        let defaults = Options::default();
        let record_bytes = self.record_bytes.unwrap_or(defaults.record_bytes);
        let timeout = self.membership.as_ref().map_or(TIMEOUT, |member| member.timeout);
        let algorithm = match self.choice {
            Choice::Always(algorithm) => algorithm,
            Choice::Auto => defaults.algorithm,
        };
        Options { algorithm, crypto: self.crypto, backend, record_bytes, timeout, ..defaults }
    }

    fn seed_options(&self, chains: Option<u32>, max_bytes: usize) -> SeedOptions {
        let defaults = SeedOptions::default();
        let key = match self.crypto {
            Crypto::None => defaults.key,
            Crypto::Gcm(length) => length,
        };
        SeedOptions {
            crypto: self.crypto != Crypto::None,
            key,
            chains: chains.unwrap_or(defaults.chains),
            algorithm: self.gpu_algorithm(),
            max_bytes,
            ..defaults
        }
    }

    fn gpu_algorithm(&self) -> Algorithm {
        self.algorithm_of(self.ranks)
    }

    /// Of so many ranks on GPUs.
    fn algorithm_of(&self, ranks: usize) -> Algorithm {
        match (self.choice, self.structure) {
            (Choice::Always(algorithm), _) => algorithm,
            (Choice::Auto, Structure::Fused) => GpuOptions::fastest_algorithm(ranks),
            // As published.
            (Choice::Auto, Structure::Seed { .. }) => Algorithm::Ring,
        }
    }

    fn gpu_options(&self, max_bytes: usize) -> GpuOptions {
        let (defaults, record_bytes) = (GpuOptions::default(), self.record_bytes);
        let algorithm = self.gpu_algorithm();
        let timeout = self.membership.as_ref().map_or(defaults.timeout, |member| member.timeout);
        let keystream = self.keystream.then_some(KeystreamAhead {
            collectives: 1,
            bytes: max_bytes.max(1),
            makers: None,
        });
        GpuOptions {
            crypto: self.crypto,
            algorithm,
            max_bytes,
            record_bytes,
            sm_budget: self.sm_budget,
            launch: self.launch,
            timeout,
            keystream,
            ..defaults
        }
    }
}

/// The ranks, ready to work.
pub(super) enum Group {
    /// In this process.
    Process(Vec<Communicator>, Choice),
    /// One of them, the others in other processes, in nodes.
    Nodes(Box<Nodes>),
    /// On GPUs.
    Gpus(Box<GpuRanks>),
}

impl Group {
    /// Makes this process's ranks, for vectors of up to `max_bytes`. If they are all, they share a fresh secret.
    pub(super) fn new(setup: &Setup, max_bytes: usize) -> Outcome<Self> {
        Ok(match &setup.home {
            Home::Process(backend) => {
                let options = setup.options(backend.clone());
                match &setup.membership {
                    None => {
                        let secret = GroupSecret::random()?;
                        let ranks = Communicator::in_process(setup.ranks, &secret, &options)?;
                        Self::Process(ranks, setup.choice)
                    }
                    Some(member) => match member.join(setup.ranks, &options)? {
                        Joined::One(rank) => Self::Process(vec![*rank], setup.choice),
                        Joined::Nodes(nodes) => Self::Nodes(nodes),
                    },
                }
            }
            Home::Gpus(devices) => Self::Gpus(Box::new(match (&setup.membership, setup.structure) {
                (None, Structure::Fused) if setup.calibrates() => {
                    GpuRanks::new(devices, GroupOptions::Auto(setup.gpu_options(max_bytes)))?
                }
                (None, Structure::Fused) => {
                    GpuRanks::new(devices, GroupOptions::Fused(setup.gpu_options(max_bytes)))?
                }
                (None, Structure::Seed { chains }) => {
                    GpuRanks::new(devices, GroupOptions::Seed(setup.seed_options(chains, max_bytes)))?
                }
                (Some(member), _) => {
                    let options = setup.gpu_options(max_bytes);
                    let of = |ranks| GpuOptions { algorithm: setup.algorithm_of(ranks), ..options.clone() };
                    match (member.carrier, member.node_ranks) {
                        (Carrier::Nccl, Some(node_ranks)) => {
                            let parts = [of(node_ranks), of(setup.ranks / node_ranks)];
                            GpuRanks::in_nodes(&devices[0], member, setup.ranks, node_ranks, parts)?
                        }
                        (Carrier::Nccl, None) => {
                            GpuRanks::over_nccl(&devices[0], member, setup.ranks, options)?
                        }
                        (Carrier::Tcp, _) => {
                            let auto = setup.calibrates();
                            GpuRanks::member(&devices[0], member, setup.ranks, options, auto)?
                        }
                    }
                }
            })),
        })
    }

    /// What a benchmark's head says beside the [description](Setup::description), a line each.
    pub(super) fn notes(&self) -> Vec<String> {
        match self {
            Self::Gpus(ranks) => ranks.notes(),
            Self::Process(..) | Self::Nodes(_) => Vec::new(),
        }
    }

    /// What the choice of an algorithm goes by, if one was calibrated in this process.
    pub(super) fn calibrated(&self) -> Option<&Calibrated> {
        match self {
            Self::Gpus(ranks) => ranks.calibrated(),
            Self::Process(..) | Self::Nodes(_) => None,
        }
    }

    /// What had no keystream so far, where it is made before all-reduces.
    pub(super) fn missing_keystream(&self) -> Outcome<Option<Missing>> {
        match self {
            Self::Gpus(ranks) => Ok(ranks.missing_keystream()?),
            Self::Process(..) | Self::Nodes(_) => Ok(None),
        }
    }

    /// Ends in good order, together with the ranks of other processes.
    pub(super) fn close(self) -> Outcome {
        match self {
            Self::Process(..) | Self::Nodes(_) => Ok(()),
            Self::Gpus(ranks) => Ok(ranks.close()?),
        }
    }

    /// Reduces each rank's input into each rank's output. Returns how long it took.
    pub(super) fn all_reduce(
        &mut self,
        inputs: &[Vec<u8>],
        outputs: &mut [Vec<u8>],
        dtype: Dtype,
        op: ReduceOp,
    ) -> Outcome<Duration> {
        let bytes = inputs[0].len();
        match self {
            Self::Gpus(ranks) => Ok(ranks.all_reduce(inputs, outputs, dtype, op)?),
            Self::Nodes(rank) => {
                let start = Instant::now();
                let buffers = Buffers::Apart { input: &inputs[0], output: &mut outputs[0] };
                rank.all_reduce(op, dtype, buffers)?;
                Ok(start.elapsed())
            }
            Self::Process(ranks, choice) => {
                let apart =
                    inputs.iter().zip(outputs).map(|(input, output)| Buffers::Apart { input, output });
                run(ranks, choice.algorithm(bytes), apart, dtype, op)
            }
        }
    }

    /// An all-reduce of this many elements, of whatever the ranks' memory holds, step by step; by rank. Of ranks on GPUs, all
    /// in this process.
    pub(super) fn time_steps(&mut self, count: usize, dtype: Dtype, op: ReduceOp) -> Outcome<Vec<StepTimes>> {
        match self {
            Self::Gpus(ranks) => Ok(ranks.time_steps(count, dtype, op)?),
            Self::Process(..) | Self::Nodes(_) => {
                Err(Failure::Input("--breakdown: use --backend cuda".into()))
            }
        }
    }

    /// Reduces the ranks' vectors where they lie. Returns how long it took.
    pub(super) fn all_reduce_in_place(
        &mut self,
        vectors: &mut [Vec<u8>],
        dtype: Dtype,
        op: ReduceOp,
    ) -> Outcome<Duration> {
        let bytes = vectors[0].len();
        match self {
            Self::Gpus(ranks) => Ok(ranks.all_reduce_in_place(vectors, dtype, op)?),
            Self::Nodes(rank) => {
                let start = Instant::now();
                rank.all_reduce(op, dtype, Buffers::InPlace(&mut vectors[0]))?;
                Ok(start.elapsed())
            }
            Self::Process(ranks, choice) => {
                let in_place = vectors.iter_mut().map(|vector| Buffers::InPlace(vector));
                run(ranks, choice.algorithm(bytes), in_place, dtype, op)
            }
        }
    }
}

fn run<'a>(
    ranks: &mut [Communicator],
    algorithm: Algorithm,
    vectors: impl Iterator<Item = Buffers<'a>>,
    dtype: Dtype,
    op: ReduceOp,
) -> Outcome<Duration> {
    ranks.iter_mut().for_each(|rank| rank.set_algorithm(algorithm));
    on_every_rank(ranks.iter_mut().zip(vectors), |(rank, vector)| {
        rank.run(Request::AllReduce(op), dtype, vector)
    })
}

/// Opens once, for all threads that wait at it.
#[derive(Default)]
struct Gate {
    verdict: Mutex<Option<bool>>,
    changed: Condvar,
}

impl Gate {
    /// Lets the waiting threads through (`go`) or sends them home.
    fn open(&self, go: bool) {
        *self.verdict.lock().unwrap_or_else(PoisonError::into_inner) = Some(go);
        self.changed.notify_all();
    }

    fn wait(&self) -> bool {
        let verdict = self.verdict.lock().unwrap_or_else(PoisonError::into_inner);
        let verdict = self.changed.wait_while(verdict, |verdict| verdict.is_none());
        verdict.unwrap_or_else(PoisonError::into_inner).unwrap_or(false)
    }
}

/// Does `work` for every rank at once, each on a thread of its own. Returns the time from the first rank's start to
/// the last one's end; thread creation isn't in it.
fn on_every_rank<T: Send>(
    ranks: impl IntoIterator<Item = T>,
    work: impl Fn(T) -> ringseal::Result<()> + Sync,
) -> Outcome<Duration> {
    let gate = Gate::default();
    let runs = thread::scope(|scope| {
        let mut threads = Vec::new();
        for (number, rank) in ranks.into_iter().enumerate() {
            let (gate, work) = (&gate, &work);
            let run = move || {
                gate.wait().then(|| {
                    let start = Instant::now();
                    work(rank).map(|()| (start, Instant::now()))
                })
            };
            match thread::Builder::new().name(format!("rank {number}")).spawn_scoped(scope, run) {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    gate.open(false);
                    return Err(Failure::Input(format!(
                        "starting a thread for rank {number}: {error}; use fewer ranks"
                    )));
                }
            }
        }
        gate.open(true);
        Ok(threads.into_iter().map(|thread| thread.join()).collect::<Vec<_>>())
    })?;
    let mut times = Vec::with_capacity(runs.len());
    let mut first_error = None;
    for run in runs {
        match run {
            Ok(Some(Ok(span))) => times.push(span),
            Ok(Some(Err(error))) => first_error = Some(most_telling(first_error, error)),
            Ok(None) => {}
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
    if let Some(error) = first_error {
        return Err(error.into());
    }
    let start = times.iter().map(|(start, _)| start).min();
    let end = times.iter().map(|(_, end)| end).max();
    Ok(start.zip(end).map_or(Duration::ZERO, |(start, end)| *end - *start))
}

/// When several ranks fail, the one that saw the cause, not one that it dragged along.
fn most_telling(first: Option<ringseal::Error>, next: ringseal::Error) -> ringseal::Error {
    match first {
        Some(ringseal::Error::Aborted { .. } | ringseal::Error::Deadline { .. }) | None => next,
        Some(first) => first,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn algorithms_go_by_their_names() {
        assert_eq!(Choice::parse("auto"), Ok(Choice::Auto));
        for algorithm in Algorithm::ALL {
            assert_eq!(Choice::parse(algorithm.name()), Ok(Choice::Always(algorithm)));
        }
        let refusal = Choice::parse("magic").unwrap_err();
        assert!(refusal.contains("auto, ring, relay, direct, tree"), "{refusal}");
    }

    #[test]
    fn auto_goes_direct_when_the_message_is_small() {
        assert_eq!(Choice::Auto.algorithm(DIRECT_BYTES), Algorithm::Direct);
        assert_eq!(Choice::Auto.algorithm(DIRECT_BYTES + 1), Algorithm::RelayRing);
        assert_eq!(Choice::Always(Algorithm::Tree).algorithm(1), Algorithm::Tree);
    }

    #[test]
    fn every_rank_runs_and_the_cause_is_reported() {
        let mut done = [false; 5];
        on_every_rank(done.iter_mut(), |done| {
            *done = true;
            Ok(())
        })
        .unwrap();
        assert_eq!(done, [true; 5]);
        let failure = on_every_rank(0..4, |rank| match rank {
            1 => Err(ringseal::Error::Record { rank, step: 2, record: 3 }),
            3 => Ok(()),
            _ => Err(ringseal::Error::Aborted { rank, by: 1 }),
        });
        let text = failure.unwrap_err().to_string();
        assert!(text.contains("rank 1") && text.contains("step 2"), "{text}");
    }
}
