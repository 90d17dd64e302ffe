//! GPU throughput in little device time: every kernel over message sizes, beside a device copy and the computed limit.
//!
//! `gpu [--full] [--json FILE] [--ptx FILE] [--only TEXT]`. Timed by events, median of 10; work under 200 us is timed in a
//! graph of 32. Calls rotate through 1 GiB, and the L2 cache is emptied before each timing, so that nothing is read from it.
//!
//! The limit counts shared-memory wavefronts, of which a multiprocessor retires one a clock: with W of them for 32
//! blocks (512 bytes), `multiprocessors x clock x 512 / W`. The clock is counted while the kernel runs.
#![allow(clippy::print_stdout, reason = "the table is what this program is for")]

mod cases;
mod clock;
mod report;
mod timing;

use std::path::PathBuf;
use std::process::ExitCode;
use std::rc::Rc;

use clap::Parser;
use ringseal::cuda::{Device, Stream, driver};
use ringseal::{Error, Result, ptx};
use sha2::{Digest, Sha256};

use crate::cases::{Case, Memory};
use crate::clock::Clock;
use crate::report::{HEADING, Report, Row};

#[derive(Parser)]
struct Arguments {
    /// All sizes, from 16 bytes to 4 GiB; otherwise a few
    #[arg(long)]
    full: bool,
    /// Write the results to this file
    #[arg(long)]
    json: Option<PathBuf>,
    /// Kernels to load in place of the embedded ones
    #[arg(long)]
    ptx: Option<PathBuf>,
    /// Only the cases whose name contains this
    #[arg(long, default_value = "")]
    only: String,
    /// Passed by cargo bench
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
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
    let multiprocessors = device.multiprocessors()?;
    let image = match &arguments.ptx {
        Some(path) => {
            std::fs::read(path).map_err(|source| Error::Io { path: path.display().to_string(), source })?
        }
        None => embedded_image(&device)?.to_vec(),
    };
    let stream = Stream::new(&device)?;
    let memory = Rc::new(Memory::new(&stream, if arguments.full { 4 << 30 } else { 1 << 30 })?);
    let copy = copy_rate(&stream, &memory)?;
    println!(
        "{}, driver for CUDA {}, {multiprocessors} multiprocessors; device copy {copy:.0} GB/s",
        device.name()?,
        driver()?
    );
    println!("{HEADING}");
    let bed = Bed { clock: Clock::new(&device)?, stream, memory, multiprocessors, copy };

    let mut rows = Vec::new();
    for case in cases::all(&device, &image)? {
        if !case.name.contains(&arguments.only) {
            continue;
        }
        for &(messages, bytes) in case.sizes(arguments.full) {
            let row = measure(&case, (messages, bytes), &bed)?;
            println!("{}", row.line());
            rows.push(row);
        }
    }
    let report = Report {
        device: device.name()?,
        driver: driver()?.to_string(),
        multiprocessors,
        ptx_sha256: Sha256::digest(&image).iter().map(|byte| format!("{byte:02x}")).collect(),
        copy_gb_per_s: copy,
        rows,
    };
    if let Some(path) = &arguments.json {
        let text = serde_json::to_string_pretty(&report).unwrap_or_default() + "\n";
        std::fs::write(path, text)
            .map_err(|source| Error::Io { path: path.display().to_string(), source })?;
    }
    Ok(())
}

fn embedded_image(device: &Device) -> Result<&'static [u8]> {
    let capability = device.compute_capability()?;
    match ptx::for_compute_capability(capability.major, capability.minor) {
        Some(target) => Ok(ptx::text(target).as_bytes()),
        None => Err(Error::NoDevice(format!("compute capability {capability} is too low"))),
    }
}

/// Rate of a device-to-device copy of 1 GiB, in 10^9 bytes copied a second.
fn copy_rate(stream: &Stream, memory: &Memory) -> Result<f64> {
    let bytes = 1 << 30;
    let time = timing::time(stream, &|stream| memory.evict(stream), &|stream, _| {
        // SAFETY: both buffers are that long, don't overlap, and are not touched meanwhile.
        unsafe { stream.copy(memory.output.pointer(), memory.input.pointer(), bytes) }
    })?;
    Ok(bytes as f64 / time.median.as_secs_f64() / 1e9)
}

/// Device time of work that the clock can be counted beside.
const COUNTED: f64 = 1.5e-3;
/// Bytes from which a kernel fills the device, so that the limit means something.
const FILLS: u64 = 64 << 20;

/// What every measurement needs.
struct Bed {
    stream: Stream,
    memory: Rc<Memory>,
    clock: Clock,
    multiprocessors: u32,
    copy: f64,
}

fn measure(case: &Case, (messages, bytes): (u64, u64), bed: &Bed) -> Result<Row> {
    let Bed { stream, memory, clock, multiprocessors, copy } = bed;
    let prepared = case.prepare(memory, stream, (messages, bytes))?;
    let work = |stream: &Stream, call: usize| prepared.run(stream, call);
    let time = timing::time(stream, &|stream| memory.evict(stream), &work)?;
    let seconds = time.median.as_secs_f64();
    let rate = (messages * bytes) as f64 / seconds / 1e9;
    let rates = if messages * bytes >= FILLS {
        let calls = (COUNTED / seconds).ceil() as usize;
        Some(clock.rates(|| (0..calls).try_for_each(|call| work(stream, call)))?)
    } else {
        None
    };
    prepared.check(stream)?;
    let limit = case
        .wavefronts
        .zip(rates)
        .map(|(wavefronts, rates)| f64::from(*multiprocessors) * rates.median * 512.0 / wavefronts);
    Ok(Row {
        kernel: case.name.clone(),
        key_bits: case.key_bits,
        messages,
        bytes,
        median_us: seconds * 1e6,
        fastest_us: time.fastest.as_secs_f64() * 1e6,
        gb_per_s: rate,
        wavefronts: case.wavefronts,
        clock_ghz: rates.map(|rates| [rates.low, rates.median, rates.high]),
        limit_gb_per_s: limit,
        of_limit: limit.map(|limit| rate / limit),
        of_copy: rate / *copy,
    })
}
