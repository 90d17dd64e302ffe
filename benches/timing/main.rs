//! Evidence that the kernels' time doesn't depend on keys, texts or additional data, nor on where a forgery is.
//!
//! `timing [--launches N] [--json FILE] [--ptx FILE] [--only TEXT]`: each kernel is launched on classes of inputs in random
//! order and timed by events; Welch's t-test compares the classes (see `statistics`). Before each launch its inputs are
//! copied to where all classes are read.
//!
//! `timing --counters`: one launch a class, between the profiler's start and stop, for `scripts/timing-counters`, which runs
//! this under `ncu`.
#![allow(clippy::print_stdout, reason = "the table is what this program is for")]

mod classes;
mod statistics;
mod subject;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use cudarc::driver::sys;
use ringseal::cuda::{Device, Kernels, Module, Stream};
use ringseal::{Error, Result, ptx};
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::classes::{CLASSES, POOL, Secrets};
use crate::statistics::{CROPS, Comparison, compare};
use crate::subject::{Forgery, Input, Subject, Work};

#[derive(Parser)]
struct Arguments {
    /// Launches of each class
    #[arg(long, default_value_t = 4000)]
    launches: usize,
    /// Write the results to this file
    #[arg(long)]
    json: Option<PathBuf>,
    /// Kernels to load in place of the embedded ones
    #[arg(long)]
    ptx: Option<PathBuf>,
    /// Only the kernels whose name contains this
    #[arg(long, default_value = "")]
    only: String,
    /// One launch of each class, for ncu
    #[arg(long)]
    counters: bool,
    /// Passed by cargo bench
    #[arg(long, hide = true)]
    bench: bool,
}

/// A whole run.
#[derive(Serialize)]
struct Report {
    device: String,
    driver: String,
    ptx_sha256: String,
    bytes: usize,
    records: usize,
    crops: [f64; CROPS.len()],
    comparisons: Vec<Comparison>,
}

/// Text of a launch, and the records it is in: long enough that most of the time goes with the data, short enough for
/// thousands of launches.
const BYTES: usize = 256 << 10;
const RECORDS: usize = 16;
/// Times at which the random inputs are drawn anew.
const ROUNDS: usize = 4;
/// Launches that are queued before their times are read.
const QUEUED: usize = 256;
/// Past this in either direction a difference counts as found (the limit that test vector leakage assessment uses).
const FOUND: f64 = 4.5;

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Error::NoDevice(reason)) => {
            println!("skipped: no CUDA device: {reason}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    let device = Device::open(0)?;
    let image = match &arguments.ptx {
        Some(path) => {
            std::fs::read(path).map_err(|source| Error::Io { path: path.display().to_string(), source })?
        }
        None => {
            let capability = device.compute_capability()?;
            let target = ptx::for_compute_capability(capability.major, capability.minor);
            let target = target.ok_or_else(|| Error::NoDevice(format!("no kernels for {capability}")))?;
            ptx::text(target).into()
        }
    };
    let kernels = Kernels::new(&Module::load(&device, &image)?)?;
    let stream = Stream::new(&device)?;
    if arguments.counters {
        make_current()?;
    }
    let mut comparisons = Vec::new();
    for work in Work::ALL {
        for bits in [128, 192, 256] {
            if !work.kernel(bits).contains(&arguments.only) || work != Work::Ctr && !kernels.has_gcm() {
                continue;
            }
            if arguments.counters {
                count(&kernels, work, bits, &stream)?;
                continue;
            }
            for comparison in measure(&kernels, work, bits, arguments.launches, &stream)? {
                print(&comparison);
                comparisons.push(comparison);
            }
        }
    }
    if let Some(path) = &arguments.json {
        let report = Report {
            device: device.name()?,
            driver: ringseal::cuda::driver()?.to_string(),
            ptx_sha256: Sha256::digest(&image).iter().map(|byte| format!("{byte:02x}")).collect(),
            bytes: BYTES,
            records: RECORDS,
            crops: CROPS,
            comparisons,
        };
        let text = serde_json::to_string_pretty(&report).unwrap_or_default() + "\n";
        std::fs::write(path, text)
            .map_err(|source| Error::Io { path: path.display().to_string(), source })?;
    }
    Ok(())
}

fn print(comparison: &Comparison) {
    let Comparison { kernel, class, against, launches, mean_ns, median_ns, t, worst_t } = comparison;
    println!(
        "{kernel:<20} {class:<22} against {against:<20} {:>5} + {:>5} launches  mean {:>8.1} {:>8.1} ns  median {:>8.0} {:>8.0}  t {}  {}",
        launches[0],
        launches[1],
        mean_ns[0],
        mean_ns[1],
        median_ns[0],
        median_ns[1],
        t.map(|t| format!("{t:>6.2}")).join(" "),
        if worst_t.abs() > FOUND { "DIFFERENCE" } else { "" },
    );
}

/// A class of launches: whose inputs, and what is changed in them.
struct Launches {
    name: String,
    class: usize,
    forgery: Option<Forgery>,
}

fn launches(work: Work) -> Vec<Launches> {
    let classes =
        CLASSES.iter().enumerate().filter(|(_, class)| work != Work::Ctr || class.name != "random AAD");
    let mut launches: Vec<_> = classes
        .map(|(index, class)| Launches { name: class.name.into(), class: index, forgery: None })
        .collect();
    if work.opens() {
        let last = CLASSES.len() - 1;
        for (name, forgery) in [
            ("tag byte 0 forged", Forgery::Tag(0)),
            ("tag byte 7 forged", Forgery::Tag(7)),
            ("tag byte 15 forged", Forgery::Tag(15)),
            ("first text byte forged", Forgery::FirstText),
            ("last text byte forged", Forgery::LastText),
        ] {
            launches.push(Launches { name: name.into(), class: last, forgery: Some(forgery) });
        }
    }
    launches
}

/// What each is compared with: inputs with the zeros, forgeries with the first of them.
fn against(launches: &[Launches], index: usize) -> Option<usize> {
    match launches[index].forgery {
        None => (index > 0).then_some(0),
        Some(_) => launches[..index].iter().position(|launches| launches.forgery.is_some()),
    }
}

fn measure(
    kernels: &Kernels,
    work: Work,
    bits: usize,
    wanted: usize,
    stream: &Stream,
) -> Result<Vec<Comparison>> {
    let subject = Subject::new(work, (RECORDS, BYTES), stream)?;
    let classes = launches(work);
    let mut times = vec![Vec::with_capacity(wanted); classes.len()];
    for _ in 0..ROUNDS {
        let mut pools: Vec<Vec<(Secrets, Input)>> = classes.iter().map(|_| Vec::new()).collect();
        // In turn, so that no class has its memory in one place.
        for _ in 0..POOL {
            for (pool, launches) in pools.iter_mut().zip(&classes) {
                let secrets = CLASSES[launches.class].draw(kernels, bits, BYTES, stream)?;
                let input = subject.input(&secrets, launches.forgery, stream)?;
                subject.fill(&secrets, &input, stream)?;
                subject.launch(&secrets, stream)?;
                subject.check(launches.forgery.is_some(), stream)?;
                pool.push((secrets, input));
            }
        }
        let mut left = wanted * classes.len() / ROUNDS;
        while left > 0 {
            let count = left.min(QUEUED);
            left -= count;
            let mut order = vec![0; 8 * count];
            getrandom::fill(&mut order).map_err(|error| Error::Cuda(error.to_string()))?;
            let mut events = Vec::with_capacity(count);
            for random in order.as_chunks::<8>().0 {
                let random = u64::from_le_bytes(*random);
                let (class, member) =
                    (random as u32 as usize % classes.len(), (random >> 32) as usize % POOL);
                let (secrets, input) = &pools[class][member];
                subject.fill(secrets, input, stream)?;
                let start = stream.record()?;
                subject.launch(secrets, stream)?;
                events.push((class, start, stream.record()?));
            }
            stream.synchronize()?;
            for (class, start, end) in events {
                times[class].push(end.since(&start)?.as_secs_f64() * 1e9);
            }
        }
    }
    let mut comparisons = Vec::new();
    let kernel = work.kernel(bits);
    let pair =
        |a: usize, b: usize| compare(&kernel, [&classes[a].name, &classes[b].name], [&times[a], &times[b]]);
    for class in 0..classes.len() {
        comparisons.extend(against(&classes, class).map(|other| pair(class, other)));
    }
    // A forgery's output is wiped, which takes time and may: the verdict isn't secret. That this is found shows that the
    // method finds something.
    let all_random = CLASSES.len() - 1;
    comparisons.extend(work.opens().then(|| pair(all_random + 1, all_random)));
    Ok(comparisons)
}

/// Long texts, to tell what a byte costs from what a launch does, in records of 64 KiB.
const LONG: [usize; 2] = [33 << 20, 66 << 20];
const LONG_RECORD: usize = 64 << 10;

/// The profiler's start and stop want a context to be current, which the library's calls leave as it was: here none.
fn make_current() -> Result<()> {
    let (mut device, mut context) = (0, std::ptr::null_mut());
    // SAFETY: the driver is initialised; the pointers are valid for the writes. The context is never released, so that it
    // lives as long as it is current.
    let made = unsafe {
        sys::cuDeviceGet(&mut device, 0)
            .result()
            .and_then(|()| sys::cuDevicePrimaryCtxRetain(&mut context, device).result())
            .and_then(|()| sys::cuCtxSetCurrent(context).result())
    };
    made.map_err(|error| Error::Cuda(error.to_string()))
}

/// Says what each launch between the profiler's start and stop is: kernel, class, bytes.
fn count(kernels: &Kernels, work: Work, bits: usize, stream: &Stream) -> Result<()> {
    let short = launches(work);
    let short = short.iter().map(|launches| (launches, (RECORDS, BYTES)));
    let long = launches(work).swap_remove(CLASSES.len() - 1 - usize::from(work == Work::Ctr));
    let long = LONG.iter().map(|&bytes| (&long, (bytes / LONG_RECORD, bytes)));
    for (launches, (records, bytes)) in short.chain(long) {
        let subject = Subject::new(work, (records, bytes), stream)?;
        let secrets = CLASSES[launches.class].draw(kernels, bits, bytes, stream)?;
        let input = subject.input(&secrets, launches.forgery, stream)?;
        subject.fill(&secrets, &input, stream)?;
        stream.synchronize()?;
        println!("counted\t{}\t{}\t{bytes}", work.kernel(bits), launches.name);
        // SAFETY: the driver is initialised, and both calls take nothing.
        unsafe { sys::cuProfilerStart() }.result().map_err(|error| Error::Cuda(error.to_string()))?;
        subject.launch(&secrets, stream)?;
        stream.synchronize()?;
        // SAFETY: as above.
        unsafe { sys::cuProfilerStop() }.result().map_err(|error| Error::Cuda(error.to_string()))?;
        subject.check(launches.forgery.is_some(), stream)?;
    }
    Ok(())
}
