//! What sealing costs a training iteration: a backward pass of bf16 products by cuBLAS, and the all-reduces of its gradients
//! beside it, as DistributedDataParallel does them. docs/timeline.md says what is measured.
//!
//! `cargo bench --bench timeline -- [--workload NAME] [--cap MIB] [--tokens N] [--devices 0,1] [--ranks N]
//! [--sm 8,16,32,all] [--record BYTES] [--makers N] [--nccl] [--rounds N] [--seconds S] [--ptx FILE] [--json FILE]`.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints its results")]

mod cublas;
mod energy;
mod gate;
#[path = "../support/outcome.rs"]
mod outcome;
mod rank;
mod report;

use std::time::{Duration, Instant};

use ringseal::channel::{Crypto, GroupSecret, KeyLength};
use ringseal::cuda::{
    Collectives, Device, Event, GpuGroup, GpuOptions, KeystreamAhead, Nccl, RankBuffers, Stream,
};
use ringseal::study::overlap::{Backward, Iteration};
use ringseal::study::workloads::Workload;
use ringseal::{Dtype, Error, ReduceOp, Result};

use energy::Energy;
use gate::{Closed, Gate};
use rank::Rank;
use report::{Measured, Report, Row};

/// Iterations before any is measured, in which libraries and groups prepare what may make the host wait.
const WARM_UP: usize = 3;
/// Products queued on a stream before the gate opens, at the latest: a stream holds about a thousand launches, and the host
/// waits when it is full.
const HELD_BACK: usize = 300;
/// Bytes of a bucket that have keystream made ahead, at most: it takes four times as much memory for each bucket.
const AHEAD_BYTES: usize = 64 << 20;

struct Arguments {
    workload: Workload,
    cap_mib: usize,
    tokens: usize,
    devices: Vec<usize>,
    ranks: usize,
    budgets: Vec<Option<u32>>,
    record_bytes: Option<usize>,
    makers: Option<u32>,
    nccl: bool,
    rounds: usize,
    seconds: f64,
    image: Vec<u8>,
    json: Option<String>,
}

fn arguments() -> Arguments {
    let mut parsed = Arguments {
        workload: ringseal::study::workloads::bert_large(),
        cap_mib: ringseal::study::buckets::DEFAULT_CAP_MIB,
        tokens: 4096,
        devices: vec![0],
        ranks: 2,
        budgets: vec![Some(8), Some(16), Some(32), Some(64), None],
        record_bytes: None,
        makers: None,
        nccl: false,
        rounds: 20,
        seconds: 1.5,
        image: ringseal::ptx::SM_90A.into(),
        json: None,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().unwrap_or_else(|| panic!("{word} needs a value"));
        match word.as_str() {
            "--workload" => {
                let name = value();
                parsed.workload = Workload::by_name(&name).unwrap_or_else(|| panic!("no workload {name:?}"));
            }
            "--cap" => parsed.cap_mib = value().parse().expect("a number"),
            "--tokens" => parsed.tokens = value().parse().expect("a number"),
            "--devices" => {
                parsed.devices = value().split(',').map(|device| device.parse().expect("a number")).collect();
            }
            "--ranks" => parsed.ranks = value().parse().expect("a number"),
            "--sm" => {
                let budget = |text: &str| (text != "all").then(|| text.parse().expect("a number"));
                parsed.budgets = value().split(',').map(budget).collect();
            }
            "--record" => parsed.record_bytes = Some(value().parse().expect("a number")),
            "--makers" => parsed.makers = Some(value().parse().expect("a number")),
            "--nccl" => parsed.nccl = true,
            "--rounds" => parsed.rounds = value().parse().expect("a number"),
            "--seconds" => parsed.seconds = value().parse().expect("a number"),
            "--ptx" => parsed.image = std::fs::read(value()).expect("a PTX file"),
            "--json" => parsed.json = Some(value()),
            // Given by `cargo bench` itself.
            "--bench" => {}
            _ => panic!("unknown argument {word}"),
        }
    }
    parsed.ranks = parsed.ranks.max(parsed.devices.len());
    parsed
}

/// What the gradients are reduced by.
struct Variant {
    name: &'static str,
    crypto: Crypto,
    /// Whether each iteration makes the keystream of the next.
    ahead: bool,
}

const fn variant(name: &'static str, crypto: Crypto, ahead: bool) -> Variant {
    Variant { name, crypto, ahead }
}

const VARIANTS: &[Variant] = &[
    variant("plain", Crypto::None, false),
    variant("AES-128", Crypto::Gcm(KeyLength::Aes128), false),
    variant("128, ahead", Crypto::Gcm(KeyLength::Aes128), true),
    variant("AES-256", Crypto::Gcm(KeyLength::Aes256), false),
    variant("256, ahead", Crypto::Gcm(KeyLength::Aes256), true),
];

fn main() {
    outcome::report(run(&arguments()));
}

fn run(arguments: &Arguments) -> Result<()> {
    let devices: Vec<Device> = (0..arguments.ranks)
        .map(|rank| Device::open(arguments.devices[rank % arguments.devices.len()]))
        .collect::<Result<_>>()?;
    let bench = Bench::new(arguments, &devices)?;
    let energy = Energy::new(&devices);
    if let Err(why) = &energy {
        eprintln!("no energy: {why}");
    }
    let measure = |reducer: &mut Reducer| bench.measure(reducer, arguments, energy.as_ref().ok());
    let mut report = Report::new(measure(&mut Reducer::Nobody)?);
    if arguments.nccl {
        let measured = measure(&mut Reducer::Nccl(Nccl::new(&devices)?))?;
        report.add(Row { name: "NCCL, plain", blocks: None, measured });
    }
    // Keystream is made ahead for exchanges only.
    let variants = VARIANTS.iter().filter(|variant| !variant.ahead || arguments.ranks == 2);
    for &budget in &arguments.budgets {
        for variant in variants.clone() {
            let group = bench.group(variant, budget, arguments)?;
            let blocks = Some(group.blocks());
            let measured = measure(&mut Reducer::Group { group: Box::new(group), ahead: variant.ahead })?;
            report.add(Row { name: variant.name, blocks, measured });
        }
    }
    // What has changed by itself since the beginning: clocks and temperature.
    let measured = measure(&mut Reducer::Nobody)?;
    report.add(Row { name: "none, again", blocks: None, measured });
    let run = report.json(&serde_json::json!({
        "device": devices[0].name()?,
        "devices": arguments.devices,
        "ranks": arguments.ranks,
        "algorithm": GpuOptions::fastest_algorithm(arguments.ranks).name(),
        "workload": arguments.workload.name,
        "cap_mib": arguments.cap_mib,
        "tokens": arguments.tokens,
        "makers": arguments.makers,
        "operations": bench.backward.operations(arguments.tokens),
        "bucket_bytes": bench.backward.buckets.iter().map(|bucket| 4 * bucket.elements).collect::<Vec<_>>(),
    }));
    if let Some(path) = &arguments.json {
        std::fs::write(path, format!("{run:#}\n")).expect("results can be written");
    }
    Ok(())
}

enum Reducer {
    /// The products alone.
    Nobody,
    Nccl(Nccl),
    Group {
        group: Box<GpuGroup>,
        ahead: bool,
    },
}

impl Reducer {
    /// # Safety
    /// As [`GpuGroup::run`].
    unsafe fn queue(&mut self, buffers: &[RankBuffers], count: usize, streams: &[&Stream]) -> Result<()> {
        let (dtype, op) = (Dtype::F32, ReduceOp::Avg);
        // SAFETY: the caller's.
        unsafe {
            match self {
                Self::Nobody => Ok(()),
                Self::Nccl(nccl) => nccl.all_reduce(buffers, count, dtype, op, streams),
                Self::Group { group, .. } => group.all_reduce(buffers, count, dtype, op, streams),
            }
        }
    }

    /// Has the keystream of the next iteration made, if that is to be, while the one that was queued runs.
    fn make_ahead(&mut self, backward: &Backward) -> Result<()> {
        if let Self::Group { group, ahead: true } = self {
            let bytes: Vec<usize> = backward.buckets.iter().map(|bucket| 4 * bucket.elements).collect();
            group.make_keystream(&bytes)?;
        }
        Ok(())
    }

    /// Records so far whose keystream was not there in time, where there is to be any.
    fn misses(&self) -> Result<Option<u32>> {
        match self {
            Self::Group { group, ahead: true } => group.keystream_misses().map(Some),
            _ => Ok(None),
        }
    }

    /// How what the streams have passed went.
    fn outcome(&mut self) -> Result<()> {
        match self {
            Self::Group { group, .. } => group.outcome(),
            Self::Nobody | Self::Nccl(_) => Ok(()),
        }
    }
}

/// Three points of a rank's compute stream.
struct Marks {
    start: Event,
    computed: Event,
    reduced: Event,
}

impl Marks {
    fn wait(&self) -> Result<Iteration> {
        self.reduced.synchronize()?;
        let us = |end: &Event| Ok::<_, Error>(end.since(&self.start)?.as_secs_f64() * 1e6);
        Ok(Iteration { total_us: us(&self.reduced)?, compute_us: us(&self.computed)? })
    }
}

/// Waits for an iteration of all ranks.
fn wait(marks: &[Marks]) -> Result<Iteration> {
    let ranks: Vec<Iteration> = marks.iter().map(Marks::wait).collect::<Result<_>>()?;
    Ok(Iteration::of_ranks(ranks).expect("there are ranks"))
}

struct Bench {
    backward: Backward,
    ranks: Vec<Rank>,
    gate: Gate,
}

impl Bench {
    fn new(arguments: &Arguments, devices: &[Device]) -> Result<Self> {
        let backward = Backward::new(&arguments.workload, arguments.cap_mib);
        let rank = |(number, device)| Rank::new(device, number, &backward, arguments.tokens);
        let ranks = devices.iter().enumerate().map(rank).collect::<Result<_>>()?;
        println!(
            "# {} ranks on GPUs {:?} ({}), {}: {} buckets of at most {} bytes, {:.3} TFLOP on {} tokens",
            arguments.ranks,
            arguments.devices,
            devices[0].name()?,
            arguments.workload.name,
            backward.buckets.len(),
            4 * longest(&backward),
            backward.operations(arguments.tokens) / 1e12,
            arguments.tokens,
        );
        Ok(Self { backward, ranks, gate: Gate::new(&devices[0])? })
    }

    fn group(&self, variant: &Variant, budget: Option<u32>, arguments: &Arguments) -> Result<GpuGroup> {
        let devices: Vec<Device> = self.ranks.iter().map(|rank| rank.device.clone()).collect();
        let options = GpuOptions {
            crypto: variant.crypto,
            algorithm: GpuOptions::fastest_algorithm(devices.len()),
            max_bytes: 4 * longest(&self.backward),
            record_bytes: arguments.record_bytes,
            sm_budget: budget,
            timeout: Duration::from_secs(5),
            keystream: variant.ahead.then(|| KeystreamAhead {
                // Those of the iteration that runs, and of the next.
                collectives: 2 * self.backward.buckets.len(),
                bytes: AHEAD_BYTES.min(4 * longest(&self.backward)),
                makers: arguments.makers,
            }),
            ..GpuOptions::default()
        };
        GpuGroup::new(&devices, &arguments.image, &GroupSecret::random()?, options)
    }

    /// The median iteration, and the joules of one where they can be read.
    fn measure(
        &self,
        reducer: &mut Reducer,
        arguments: &Arguments,
        energy: Option<&Energy>,
    ) -> Result<Measured> {
        for _ in 0..WARM_UP {
            let marks = self.queue(reducer, None)?;
            reducer.make_ahead(&self.backward)?;
            wait(&marks)?;
        }
        let missed = reducer.misses()?;
        let mut iterations = Vec::with_capacity(arguments.rounds);
        for _ in 0..arguments.rounds {
            let gate = self.gate.close();
            let marks = self.queue(reducer, Some(&gate))?;
            gate.open();
            reducer.make_ahead(&self.backward)?;
            iterations.push(wait(&marks)?);
        }
        reducer.outcome()?;
        self.check(reducer)?;
        // Of all rounds, before more iterations run.
        let misses = missed.zip(reducer.misses()?).map(|(before, after)| after.wrapping_sub(before));
        let joules = energy.map(|energy| self.joules(reducer, energy, arguments.seconds)).transpose()?;
        let iteration = Iteration::median(&iterations)
            .ok_or_else(|| Error::InvalidArgument("--rounds must be at least 1".into()))?;
        Ok(Measured { iteration, joules, misses })
    }

    /// Joules of an iteration, where the next one is always queued: the counters move some tens of times a second.
    fn joules(&self, reducer: &mut Reducer, energy: &Energy, seconds: f64) -> Result<f64> {
        let read = || energy.joules().map_err(|error| Error::Cuda(format!("NVML: {error}")));
        let (begin, from) = (Instant::now(), read()?);
        let mut iterations = 1;
        let mut queued = self.queue(reducer, None)?;
        while begin.elapsed().as_secs_f64() < seconds {
            reducer.make_ahead(&self.backward)?;
            let next = self.queue(reducer, None)?;
            wait(&queued)?;
            queued = next;
            iterations += 1;
        }
        wait(&queued)?;
        reducer.outcome()?;
        Ok((read()? - from) / f64::from(iterations))
    }

    /// Queues an iteration on all ranks: the products of a bucket's layers, and behind them, on the other stream, the bucket's
    /// all-reduce. The next iteration's products come after all of it, as those of the optimiser's step do.
    fn queue(&self, reducer: &mut Reducer, gate: Option<&Closed<'_>>) -> Result<Vec<Marks>> {
        let each =
            |of: &dyn Fn(&Rank) -> Result<Event>| self.ranks.iter().map(of).collect::<Result<Vec<_>>>();
        if let Some(gate) = gate {
            self.ranks.iter().try_for_each(|rank| rank.wait_at(gate))?;
        }
        let starts = each(&|rank| rank.compute.record())?;
        let streams: Vec<&Stream> = self.ranks.iter().map(|rank| &rank.communication).collect();
        let mut products = 0;
        for (number, bucket) in self.backward.buckets.iter().enumerate() {
            for rank in &self.ranks {
                rank.backward(number, &bucket.matrices)?;
                rank.communication.wait(&rank.compute.record()?)?;
            }
            let buffers: Vec<_> = self.ranks.iter().map(|rank| rank.buffers(number)).collect();
            // SAFETY: the gradients live in the ranks; the products before have written them, and the compute stream's
            // further work on them waits below.
            unsafe { reducer.queue(&buffers, bucket.elements, &streams)? };
            products += 2 * bucket.matrices.len();
            if let Some(gate) = gate
                && products >= HELD_BACK
            {
                gate.open();
            }
        }
        let computed = each(&|rank| rank.compute.record())?;
        let reduced = each(&|rank| {
            rank.compute.wait(&rank.communication.record()?)?;
            rank.compute.record()
        })?;
        let marks = starts.into_iter().zip(computed).zip(reduced);
        Ok(marks.map(|((start, computed), reduced)| Marks { start, computed, reduced }).collect())
    }

    /// All ranks have the same averages, and not zeros alone.
    fn check(&self, reducer: &Reducer) -> Result<()> {
        if matches!(reducer, Reducer::Nobody) {
            return Ok(());
        }
        let first = self.ranks[0].gradients(0)?;
        let alike = self.ranks[1..].iter().map(|rank| Ok(rank.gradients(0)? == first));
        let alike = alike.collect::<Result<Vec<bool>>>()?.into_iter().all(|alike| alike);
        if !alike || first.iter().all(|byte| *byte == 0) {
            return Err(Error::Cuda("the ranks' averages differ, or are all zero".into()));
        }
        Ok(())
    }
}

/// Elements of the longest bucket.
fn longest(backward: &Backward) -> usize {
    backward.buckets.iter().map(|bucket| bucket.elements).max().unwrap_or(0)
}
