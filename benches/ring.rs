//! All-reduce on GPUs, in nccl-tests' columns: `cargo bench --bench ring -- [--devices 0,1] [--ranks 2] [--min 1024]
//! [--max 1073741824] [--ptx FILE] [--sm N] [--record BYTES] [--ring | --relay | --exchange | --direct | --tree] [--aes128 | --aes256] [--bf16 | --i32] [--nccl]
//! [--in-place] [--keystream [--may-miss]] [--json FILE]`.
//!
//! Times are of collectives queued back to back, by events on rank 0's stream: median, least and greatest of 20. With
//! `--keystream` all keystream is ready before they begin, and its making is not in the times; `#missed` counts the records
//! that had none all the same. Then the times are of something else, and the bench fails, unless `--may-miss` is given.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints its results")]

#[path = "support/outcome.rs"]
mod outcome;

use std::time::Duration;

use ringseal::channel::{Crypto, GroupSecret, KeyLength};
use ringseal::collective::Algorithm;
use ringseal::cuda::{
    Collectives, Device, DeviceBuffer, GpuGroup, GpuOptions, KeystreamAhead, Nccl, RankBuffers, Stream,
};
use ringseal::{Dtype, Error, ReduceOp, Result};

struct Arguments {
    devices: Vec<usize>,
    ranks: usize,
    min: usize,
    max: usize,
    image: Vec<u8>,
    sm_budget: Option<u32>,
    record_bytes: Option<usize>,
    algorithm: Algorithm,
    crypto: Crypto,
    dtype: Dtype,
    keystream: bool,
    may_miss: bool,
    in_place: bool,
    nccl: bool,
    json: Option<String>,
}

fn arguments() -> Arguments {
    let mut parsed = Arguments {
        devices: vec![0],
        ranks: 0,
        min: 1 << 10,
        max: 1 << 30,
        image: ringseal::ptx::SM_90A.into(),
        sm_budget: None,
        record_bytes: None,
        algorithm: Algorithm::Ring,
        crypto: Crypto::None,
        dtype: Dtype::F32,
        keystream: false,
        may_miss: false,
        in_place: false,
        nccl: false,
        json: None,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().unwrap_or_else(|| panic!("{word} needs a value"));
        match word.as_str() {
            "--devices" => {
                parsed.devices = value().split(',').map(|device| device.parse().expect("a number")).collect();
            }
            "--ranks" => parsed.ranks = value().parse().expect("a number"),
            "--min" => parsed.min = value().parse().expect("a number"),
            "--max" => parsed.max = value().parse().expect("a number"),
            "--ptx" => parsed.image = std::fs::read(value()).expect("a PTX file"),
            "--sm" => parsed.sm_budget = Some(value().parse().expect("a number")),
            "--record" => parsed.record_bytes = Some(value().parse().expect("a number")),
            "--ring" => parsed.algorithm = Algorithm::Ring,
            "--relay" => parsed.algorithm = Algorithm::RelayRing,
            "--direct" => parsed.algorithm = Algorithm::Direct,
            "--tree" => parsed.algorithm = Algorithm::Tree,
            "--exchange" => parsed.algorithm = Algorithm::Exchange,
            "--aes128" => parsed.crypto = Crypto::Gcm(KeyLength::Aes128),
            "--aes256" => parsed.crypto = Crypto::Gcm(KeyLength::Aes256),
            "--bf16" => parsed.dtype = Dtype::Bf16,
            "--i32" => parsed.dtype = Dtype::I32,
            "--keystream" => parsed.keystream = true,
            "--may-miss" => parsed.may_miss = true,
            "--in-place" => parsed.in_place = true,
            "--nccl" => parsed.nccl = true,
            "--json" => parsed.json = Some(value()),
            // Given by `cargo bench` itself.
            "--bench" => {}
            _ => panic!("unknown argument {word}"),
        }
    }
    parsed.ranks = parsed.ranks.max(parsed.devices.len());
    parsed
}

fn main() {
    let arguments = arguments();
    outcome::report(run(&arguments));
}

fn run(arguments: &Arguments) -> Result<()> {
    let ranks = arguments.ranks;
    let devices: Vec<Device> = (0..ranks)
        .map(|rank| Device::open(arguments.devices[rank % arguments.devices.len()]))
        .collect::<Result<_>>()?;
    let streams: Vec<Stream> = devices.iter().map(Stream::new).collect::<Result<_>>()?;
    let streams: Vec<&Stream> = streams.iter().collect();
    let mut group = GpuGroup::new(
        &devices,
        &arguments.image,
        &GroupSecret::random()?,
        GpuOptions {
            crypto: arguments.crypto,
            algorithm: arguments.algorithm,
            max_bytes: arguments.max,
            record_bytes: arguments.record_bytes,
            sm_budget: arguments.sm_budget,
            timeout: Duration::from_secs(5),
            keystream: arguments.keystream.then(|| KeystreamAhead {
                collectives: repeats(arguments.min),
                bytes: arguments.max,
                makers: None,
            }),
            ..GpuOptions::default()
        },
    )?;
    let nccl = arguments.nccl.then(|| Nccl::new(&devices)).transpose()?;
    println!(
        "# {ranks} ranks on GPUs {:?} ({}), {} blocks a rank, {:?} sum, {}, {:?}{}",
        arguments.devices,
        devices[0].name()?,
        group.blocks(),
        arguments.dtype,
        arguments.algorithm.name(),
        arguments.crypto,
        nccl.as_ref()
            .map_or(Ok(String::new()), |nccl| Ok::<_, Error>(format!(", NCCL {}", nccl.version()?)))?
    );
    println!(
        "{:>11} {:>10} {:>10} {:>10} {:>8} {:>7} {:>7} | {:>10} {:>10} {:>10} {:>8}",
        "bytes", "us median", "min", "max", "busbw", "#wrong", "#missed", "NCCL us", "min", "max", "busbw"
    );
    let inputs: Vec<DeviceBuffer> =
        devices.iter().map(|device| DeviceBuffer::new(device, arguments.max)).collect::<Result<_>>()?;
    let outputs: Vec<DeviceBuffer> =
        devices.iter().map(|device| DeviceBuffer::new(device, arguments.max)).collect::<Result<_>>()?;
    let buffers: Vec<RankBuffers> = inputs
        .iter()
        .zip(&outputs)
        .map(|(input, output)| RankBuffers {
            input: if arguments.in_place { output.pointer() } else { input.pointer() },
            output: output.pointer(),
        })
        .collect();
    let mut inputs = inputs;
    let size = arguments.dtype.size();
    for (rank, input) in inputs.iter_mut().enumerate() {
        let elements: Vec<Vec<u8>> =
            (0..KEYS).map(|key| element(arguments.dtype, value(rank, key))).collect();
        let mut host = vec![0; arguments.max];
        for (i, bytes) in host.chunks_exact_mut(size).enumerate() {
            bytes.copy_from_slice(&elements[key(i)]);
        }
        input.write(0, &host, streams[rank])?;
        streams[rank].synchronize()?;
    }
    let mut rows = Vec::new();
    let (mut all_unprepared, mut all_misses) = (0, 0);
    let mut bytes = arguments.min;
    while bytes <= arguments.max {
        let count = bytes / size;
        let (misses_before, mut unprepared) = (group.keystream_misses()?, 0);
        let collective = |step| match step {
            Step::Prepare if arguments.keystream => {
                let wanted = repeats(bytes);
                unprepared += wanted - group.make_keystream(&vec![bytes; wanted])?;
                group.wait_for_keystream()
            }
            Step::Prepare => Ok(()),
            // SAFETY: the buffers hold `max` bytes on their ranks' devices, and live until the streams are waited for.
            Step::Run => unsafe {
                group.all_reduce(&buffers, count, arguments.dtype, ReduceOp::Sum, &streams)
            },
        };
        let ours = measure(&streams, bytes, collective)?;
        if arguments.in_place {
            // What is timed sums sums.
            if arguments.keystream {
                unprepared += 1 - group.make_keystream(&[bytes])?;
                group.wait_for_keystream()?;
            }
            for ((input, output), stream) in inputs.iter().zip(&outputs).zip(&streams) {
                // SAFETY: both hold `max` bytes, and live until the streams are waited for.
                unsafe { stream.copy(output.pointer(), input.pointer(), bytes)? };
            }
            // SAFETY: as above.
            unsafe { group.all_reduce(&buffers, count, arguments.dtype, ReduceOp::Sum, &streams)? };
            for stream in &streams {
                stream.synchronize()?;
            }
        }
        group.outcome()?;
        let sums: Vec<Vec<u8>> = (0..KEYS)
            .map(|key| element(arguments.dtype, (0..ranks).map(|rank| value(rank, key)).sum()))
            .collect();
        let mut wrong = 0;
        for (output, stream) in outputs.iter().zip(&streams) {
            let mut host = vec![0; bytes];
            output.read(0, &mut host, stream)?;
            wrong +=
                host.chunks_exact(size).enumerate().filter(|(i, got)| *got != &sums[key(*i)][..]).count();
        }
        let misses = group.keystream_misses()?.wrapping_sub(misses_before);
        all_misses += u64::from(misses);
        all_unprepared += unprepared;
        print!("{bytes:>11} {} {wrong:>7} {misses:>7} |", columns(&ours, bytes, ranks));
        let mut row = serde_json::json!({ "bytes": bytes, "wrong": wrong, "us": summary(&ours) });
        if arguments.keystream {
            row["keystream_misses"] = misses.into();
            row["without_keystream"] = unprepared.into();
        }
        if let Some(nccl) = &nccl {
            let theirs = measure(&streams, bytes, |step| match step {
                Step::Prepare => Ok(()),
                // SAFETY: as above.
                Step::Run => unsafe {
                    nccl.all_reduce(&buffers, count, arguments.dtype, ReduceOp::Sum, &streams)
                },
            })?;
            print!(" {}", columns(&theirs, bytes, ranks));
            row["nccl_us"] = summary(&theirs);
        }
        println!();
        rows.push(row);
        bytes *= 4;
    }
    if let Some(path) = &arguments.json {
        let run = serde_json::json!({
            "device": devices[0].name()?,
            "gpus": arguments.devices,
            "ranks": ranks,
            "blocks": group.blocks(),
            "sm_budget": arguments.sm_budget,
            "algorithm": arguments.algorithm.name(),
            "crypto": format!("{:?}", arguments.crypto),
            "in_place": arguments.in_place,
            "keystream_ahead": arguments.keystream,
            "keystream_misses": if arguments.keystream { Some(all_misses) } else { None },
            "dtype": format!("{:?}", arguments.dtype),
            "nccl": nccl.as_ref().map(Nccl::version).transpose()?,
            "rows": rows,
        });
        std::fs::write(path, format!("{run:#}\n")).expect("results can be written");
    }
    if all_misses > 0 || all_unprepared > 0 {
        let what = format!("{all_misses} records, and {all_unprepared} whole collectives, had no keystream");
        match arguments.may_miss {
            true => println!("# {what}"),
            false => return Err(Error::InvalidArgument(format!("{what}: the times are of something else"))),
        }
    }
    Ok(())
}

/// Elements take one of this many values.
const KEYS: usize = 13;

fn key(index: usize) -> usize {
    (index * 7 + index / 4096) % KEYS
}

/// Small whole numbers, whose sums are exact in every type.
fn value(rank: usize, key: usize) -> f32 {
    ((key + rank * 5) % KEYS) as f32
}

fn element(dtype: Dtype, value: f32) -> Vec<u8> {
    match dtype {
        Dtype::Bf16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
        Dtype::I32 => (value as i32).to_le_bytes().to_vec(),
        _ => value.to_le_bytes().to_vec(),
    }
}

/// Collectives queued back to back.
const fn repeats(bytes: usize) -> usize {
    if bytes <= 4 << 20 {
        20
    } else if bytes <= 64 << 20 {
        5
    } else {
        2
    }
}

/// What a measurement asks for.
#[derive(Clone, Copy)]
enum Step {
    /// What comes before the collectives of a round, and is not timed.
    Prepare,
    /// One collective.
    Run,
}

/// Microseconds of one collective, sorted.
fn measure(
    streams: &[&Stream],
    bytes: usize,
    mut collective: impl FnMut(Step) -> Result<()>,
) -> Result<Vec<f64>> {
    let repeats = repeats(bytes);
    let mut times = Vec::new();
    for round in 0..22 {
        collective(Step::Prepare)?;
        let start = streams[0].record()?;
        for _ in 0..repeats {
            collective(Step::Run)?;
        }
        let end = streams[0].record()?;
        for stream in streams {
            stream.synchronize()?;
        }
        // The first rounds warm up.
        if round >= 2 {
            times.push(end.since(&start)?.as_secs_f64() * 1e6 / repeats as f64);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times)
}

/// Median, least and greatest.
fn summary(times: &[f64]) -> serde_json::Value {
    serde_json::json!([times[times.len() / 2], times[0], times[times.len() - 1]])
}

fn columns(times: &[f64], bytes: usize, ranks: usize) -> String {
    let median = times[times.len() / 2];
    let busbw = bytes as f64 / median * 1e-3 * 2.0 * (ranks - 1) as f64 / ranks as f64;
    format!("{median:>10.1} {:>10.1} {:>10.1} {busbw:>8.1}", times[0], times[times.len() - 1])
}
