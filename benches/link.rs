//! What two GPUs' link carries, by whom: stores of a kernel to the peer's memory, as the collectives make them, or the copy
//! engine: `cargo bench --bench link -- [--devices 0,1] [--min 65536] [--max 1073741824] [--ptx FILE] [--json FILE]`.
//!
//! The kernel is the plain broadcast of two ranks, one way, and their plain exchange, both ways at once; each reads and stores
//! its records in local memory too. Microseconds are medians of 20, of copies queued back to back.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints its results")]

#[path = "support/outcome.rs"]
mod outcome;

use std::time::Duration;

use ringseal::channel::{Crypto, GroupSecret};
use ringseal::collective::{Algorithm, Request};
use ringseal::cuda::{Collectives, Device, DeviceBuffer, GpuGroup, GpuOptions, RankBuffers, Stream};
use ringseal::{Dtype, Error, ReduceOp, Result};

struct Arguments {
    devices: Vec<usize>,
    min: usize,
    max: usize,
    image: Vec<u8>,
    json: Option<String>,
}

fn arguments() -> Arguments {
    let mut parsed = Arguments {
        devices: vec![0, 1],
        min: 64 << 10,
        max: 1 << 30,
        image: ringseal::ptx::SM_90A.into(),
        json: None,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().unwrap_or_else(|| panic!("{word} needs a value"));
        match word.as_str() {
            "--devices" => {
                parsed.devices = value().split(',').map(|device| device.parse().expect("a number")).collect();
            }
            "--min" => parsed.min = value().parse().expect("a number"),
            "--max" => parsed.max = value().parse().expect("a number"),
            "--ptx" => parsed.image = std::fs::read(value()).expect("a PTX file"),
            "--json" => parsed.json = Some(value()),
            // Given by `cargo bench` itself.
            "--bench" => {}
            _ => panic!("unknown argument {word}"),
        }
    }
    parsed
}

fn main() {
    outcome::report(run(&arguments()));
}

/// Who moves the bytes.
#[derive(Clone, Copy)]
enum Mover {
    Engine,
    Kernel,
}

fn run(arguments: &Arguments) -> Result<()> {
    let &[first, second] = &arguments.devices[..] else {
        return Err(Error::InvalidArgument("two devices have one link: --devices 0,1".into()));
    };
    if Device::count()? <= first.max(second) {
        return Err(Error::NoDevice(format!("GPUs {first} and {second} are not both there")));
    }
    let devices = [Device::open(first)?, Device::open(second)?];
    let streams = [Stream::new(&devices[0])?, Stream::new(&devices[1])?];
    let options = GpuOptions {
        crypto: Crypto::None,
        algorithm: Algorithm::Exchange,
        max_bytes: arguments.max,
        timeout: Duration::from_secs(5),
        ..GpuOptions::default()
    };
    // Lets the devices reach each other, too.
    let mut group = GpuGroup::new(&devices, &arguments.image, &GroupSecret::random()?, options)?;
    let memory = |device: &Device, stream: &Stream| -> Result<DeviceBuffer> {
        let mut buffer = DeviceBuffer::new(device, arguments.max)?;
        buffer.fill(0, stream)?;
        Ok(buffer)
    };
    let sources = [memory(&devices[0], &streams[0])?, memory(&devices[1], &streams[1])?];
    let targets = [memory(&devices[0], &streams[0])?, memory(&devices[1], &streams[1])?];
    streams.iter().try_for_each(Stream::synchronize)?;
    println!("# GPUs {first} and {second} ({}), microseconds and GB/s a direction", devices[0].name()?);
    println!(
        "{:>11} | {:>10} {:>7} {:>10} {:>7} | {:>10} {:>7} {:>10} {:>7}",
        "bytes", "engine 1", "GB/s", "engine 2", "GB/s", "kernel 1", "GB/s", "kernel 2", "GB/s"
    );
    let mut rows = Vec::new();
    let mut bytes = arguments.min;
    while bytes <= arguments.max {
        let mut times = [0.0; 4];
        for (time, (mover, ways)) in times.iter_mut().zip([
            (Mover::Engine, 1),
            (Mover::Engine, 2),
            (Mover::Kernel, 1),
            (Mover::Kernel, 2),
        ]) {
            *time = median_us(&streams, bytes, || match mover {
                Mover::Engine => {
                    for from in 0..ways {
                        // SAFETY: both places hold `max` bytes, and live until the streams are waited for; nothing else uses
                        // them.
                        unsafe {
                            let (target, source) = (targets[1 - from].pointer(), sources[from].pointer());
                            streams[from].copy(target, source, bytes)?;
                        }
                    }
                    Ok(())
                }
                Mover::Kernel => {
                    let request = if ways == 1 {
                        Request::Broadcast { root: 0 }
                    } else {
                        Request::AllReduce(ReduceOp::Sum)
                    };
                    let buffers: Vec<_> = (0..2)
                        .map(|rank| RankBuffers {
                            input: sources[rank].pointer(),
                            output: targets[rank].pointer(),
                        })
                        .collect();
                    let [a, b] = &streams;
                    // SAFETY: as above.
                    unsafe { group.run(request, &buffers, bytes / 4, Dtype::F32, &[a, b]) }
                }
            })?;
        }
        group.outcome()?;
        print!("{bytes:>11} |");
        for (index, us) in times.iter().enumerate() {
            let separator = if index == 1 { " |" } else { "" };
            print!(" {us:>10.1} {:>7.1}{separator}", bytes as f64 / us * 1e-3);
        }
        println!();
        let [engine_one_way, engine_both_ways, kernel_one_way, kernel_both_ways] = times;
        rows.push(serde_json::json!({
            "bytes": bytes,
            "engine_us": [engine_one_way, engine_both_ways],
            "kernel_us": [kernel_one_way, kernel_both_ways],
        }));
        bytes *= 4;
    }
    if let Some(path) = &arguments.json {
        let run = serde_json::json!({ "device": devices[0].name()?, "gpus": [first, second], "rows": rows });
        std::fs::write(path, format!("{run:#}\n")).expect("results can be written");
    }
    Ok(())
}

/// The median of the longer of both streams' times, for one of what `move_bytes` queues.
fn median_us(streams: &[Stream; 2], bytes: usize, mut move_bytes: impl FnMut() -> Result<()>) -> Result<f64> {
    let repeats = if bytes <= 4 << 20 { 20 } else { 4 };
    let mut times = Vec::new();
    // The first rounds warm up.
    for round in 0..22 {
        let starts = [streams[0].record()?, streams[1].record()?];
        for _ in 0..repeats {
            move_bytes()?;
        }
        let ends = [streams[0].record()?, streams[1].record()?];
        let mut longest = 0.0_f64;
        for ((stream, start), end) in streams.iter().zip(&starts).zip(&ends) {
            stream.synchronize()?;
            longest = longest.max(end.since(start)?.as_secs_f64() * 1e6 / f64::from(repeats));
        }
        if round >= 2 {
            times.push(longest);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}
