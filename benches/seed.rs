//! The published structure: its kernels one by one, and its all-reduce with all ranks on one GPU, beside ringseal's ring.
//! `cargo bench --bench seed -- [--ptx FILE] [--ranks 2,4,8] [--max BYTES] [--chains N] [--json FILE]`.
//!
//! Kernels: launches queued back to back, time by events, of all together. All-reduces: float32 sums; the median of 7
//! *queued ahead* (the streams are held until every launch of the collective is queued, so the host's time isn't in it) and
//! *as called* (from an event before the call).

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints its results")]

use std::sync::atomic::Ordering;
#[path = "support/outcome.rs"]
mod outcome;

use std::time::Duration;

use cudarc::driver::sys;
use ringseal::aead::AesKey;
use ringseal::backend::CounterWidth;
use ringseal::channel::{Crypto, GroupSecret, KeyLength};
use ringseal::collective::Algorithm;
use ringseal::cuda::{
    Collectives, Device, DeviceBuffer, DeviceKey, GpuGroup, GpuOptions, HostBuffer, Module, RankBuffers,
    SeedGroup, SeedKernels, SeedOptions, Stream,
};
use ringseal::{Dtype, ReduceOp, Result};
use ringseal_kernels::elementwise::ReduceParams;
use ringseal_kernels::reduce::reduction;
use ringseal_kernels::table_ghash::{MacKeyParams, MacParams, MacScratch, mac_key_bytes};
use serde_json::{Value, json};

struct Arguments {
    image: Vec<u8>,
    ranks: Vec<usize>,
    max: usize,
    chains: u32,
    json: Option<String>,
}

fn arguments() -> Arguments {
    let mut parsed = Arguments {
        image: ringseal::ptx::SM_90A.into(),
        ranks: vec![2, 4, 8],
        max: 256 << 20,
        chains: SeedOptions::default().chains,
        json: None,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().unwrap_or_else(|| panic!("{word} needs a value"));
        match word.as_str() {
            "--ptx" => parsed.image = std::fs::read(value()).expect("a PTX file"),
            "--ranks" => {
                parsed.ranks = value().split(',').map(|ranks| ranks.parse().expect("a number")).collect();
            }
            "--max" => parsed.max = value().parse().expect("a number"),
            "--chains" => parsed.chains = value().parse().expect("a number"),
            "--json" => parsed.json = Some(value()),
            // Given by `cargo bench` itself.
            "--bench" => {}
            _ => panic!("unknown argument {word}"),
        }
    }
    parsed
}

fn main() {
    // More streams than the driver's 8 hardware queues would wait for each other: the ranks of ringseal's ring must all run
    // at once.
    // SAFETY: no other thread has been started.
    unsafe { std::env::set_var("CUDA_DEVICE_MAX_CONNECTIONS", "32") };
    let arguments = arguments();
    outcome::report(run(&arguments));
}

fn run(arguments: &Arguments) -> Result<()> {
    let device = Device::open(0)?;
    let kernels = kernels(&device, arguments)?;
    let mut collectives = Vec::new();
    for &ranks in &arguments.ranks {
        collectives.extend(all_reduces(&device, ranks, arguments)?);
    }
    if let Some(path) = &arguments.json {
        let run = json!({
            "device": device.name()?,
            "chains": arguments.chains,
            "kernels": kernels,
            "all_reduces": collectives,
        });
        std::fs::write(path, format!("{run:#}\n")).expect("results can be written");
    }
    Ok(())
}

/// Microseconds of one of `repeats` launches.
fn launches(stream: &Stream, repeats: u32, mut launch: impl FnMut() -> Result<()>) -> Result<f64> {
    launch()?;
    let start = stream.record()?;
    for _ in 0..repeats {
        launch()?;
    }
    let end = stream.record()?;
    end.synchronize()?;
    Ok(end.since(&start)?.as_secs_f64() * 1e6 / f64::from(repeats))
}

/// The kernels one by one.
fn kernels(device: &Device, arguments: &Arguments) -> Result<Vec<Value>> {
    let max = arguments.max;
    let stream = Stream::new(device)?;
    let kernels = SeedKernels::new(&Module::load(device, &arguments.image)?)?;
    let [input, second, output] = [(); 3].map(|()| DeviceBuffer::new(device, max));
    let (mut input, mut second, output) = (input?, second?, output?);
    input.fill(0x3c, &stream)?;
    second.fill(0x3d, &stream)?;
    let tag = DeviceBuffer::from_host(&[0; 16], &stream)?;
    let scratch = DeviceBuffer::from_host(&[0; size_of::<MacScratch>()], &stream)?;
    let mut failure = DeviceBuffer::from_host(&[0; 8], &stream)?;
    let mut rows = Vec::new();
    let mut report = |what: String, bytes: usize, us: f64| {
        let rate = bytes as f64 / us / 1e3;
        println!("{what:<36} {bytes:>11} {us:>12.2} us {rate:>9.2} GB/s");
        rows.push(json!({ "kernel": what, "bytes": bytes, "us": us, "gb_s": rate }));
    };
    let sizes: Vec<usize> = std::iter::successors(Some(64 << 10), |size| Some(size * 4))
        .take_while(|&size| size <= max)
        .collect();
    let repeats = |bytes: usize| ((512 << 20) / bytes).clamp(5, 100) as u32;
    for &bytes in &sizes {
        for key in [&[7u8; 16][..], &[7; 32]] {
            let cipher = DeviceKey::new(kernels.cipher(), &AesKey::from_bytes(key)?);
            let mut block = [0; 16];
            block[15] = 2;
            // SAFETY: both buffers hold `max` bytes, and live until the events are waited for.
            let us = launches(&stream, repeats(bytes), || unsafe {
                let (from, to) = (input.pointer(), output.pointer());
                cipher.ctr_xor(block, CounterWidth::Gcm32, from, to, bytes as u64, &stream)
            })?;
            report(format!("encrypt AES-{}", 8 * key.len()), bytes, us);
        }
        let params = ReduceParams {
            partial: input.pointer(),
            local: second.pointer(),
            output: output.pointer(),
            bytes: bytes as u64,
            reduction: reduction(Dtype::F32 as u32, ReduceOp::Sum as u32),
            ranks: 2,
            complete: 0,
        };
        // SAFETY: as above.
        let us = launches(&stream, repeats(bytes), || unsafe { kernels.reduce(&params, &stream) })?;
        report("add f32".into(), bytes, us);
        // SAFETY: as above.
        let us = launches(&stream, repeats(bytes), || unsafe {
            stream.copy(output.pointer(), input.pointer(), bytes)
        })?;
        report("copy".into(), bytes, us);
    }
    for chains in [1, 32, 512, 4224, 8448, 16_896, 25_344, 33_792, 50_688, 65_536] {
        let key = DeviceBuffer::new(device, mac_key_bytes(chains) as usize)?;
        let params = MacKeyParams { h: [1, 2, 3, 4], key: key.pointer(), chains };
        // SAFETY: the buffer has the key's length.
        let us = launches(&stream, 5, || unsafe { kernels.prepare_mac(&params, &stream) })?;
        report(format!("prepare a key, {chains} chains"), mac_key_bytes(chains) as usize, us);
        for &bytes in &sizes {
            // A serial MAC of more would take minutes.
            if bytes as u64 > 16 << 20 && chains <= 32 || bytes > 1 << 20 && chains == 1 {
                continue;
            }
            let mut params = MacParams {
                aad: [[0; 4]; 3],
                mask: [0; 4],
                key: key.pointer(),
                text: input.pointer(),
                bytes: bytes as u64,
                tag: tag.pointer(),
                scratch: scratch.pointer(),
                failure: failure.pointer(),
                place: 1,
                chains,
                aad_bytes: 48,
                check: 0,
            };
            let repeats = if chains <= 512 { 3 } else { repeats(bytes) };
            for (check, what) in [(0, "MAC"), (1, "MAC check")] {
                params.check = check;
                // SAFETY: as above.
                let us = launches(&stream, repeats, || unsafe { kernels.mac(&params, &stream) })?;
                report(format!("{what}, {chains} chains"), bytes, us);
            }
            let mut word = [0; 8];
            failure.read(0, &mut word, &stream)?;
            assert_eq!(word, [0; 8], "the tag that was made is refused");
            failure.fill(0, &stream)?;
        }
    }
    Ok(rows)
}

/// Holds streams until it is opened.
struct Gate(HostBuffer);

impl Gate {
    fn hold(&self, streams: &[&Stream]) {
        self.0.words()[0].store(0, Ordering::SeqCst);
        for stream in streams {
            let flags = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
            // SAFETY: the word is pinned, and outlives the wait, which `open` ends.
            let result = unsafe { sys::cuStreamWaitValue32_v2(stream.handle(), self.0.pointer(), 1, flags) };
            assert_eq!(result, sys::CUresult::CUDA_SUCCESS, "streams can wait for values");
        }
    }

    fn open(&self) {
        self.0.words()[0].store(1, Ordering::SeqCst);
    }
}

/// All-reduces of one kind.
type Group = Box<dyn Collectives>;

/// Medians in microseconds, queued ahead and as called.
fn measure(
    group: &mut Group,
    gate: &Gate,
    buffers: &[RankBuffers],
    count: usize,
    streams: &[&Stream],
) -> Result<[f64; 2]> {
    let mut medians = [0.0; 2];
    for (ahead, median) in [true, false].into_iter().zip(&mut medians) {
        let mut times = Vec::new();
        for iteration in 0..9 {
            for stream in streams {
                stream.synchronize()?;
            }
            if ahead {
                gate.hold(streams);
            }
            let start = streams[0].record()?;
            // SAFETY: the caller's buffers hold `count` elements and are left alone until the streams are waited for.
            let queued = unsafe { group.all_reduce(buffers, count, Dtype::F32, ReduceOp::Sum, streams) };
            let ends = streams.iter().map(|stream| stream.record()).collect::<Result<Vec<_>>>();
            gate.open();
            queued?;
            let mut longest = Duration::ZERO;
            for (end, stream) in ends?.iter().zip(streams) {
                stream.synchronize()?;
                longest = longest.max(end.since(&start)?);
            }
            // The first two warm up.
            if iteration >= 2 {
                times.push(longest.as_secs_f64() * 1e6);
            }
        }
        times.sort_by(f64::total_cmp);
        *median = times[times.len() / 2];
    }
    group.outcome()?;
    Ok(medians)
}

/// Bytes at both ends of a result that are checked.
const CHECKED: usize = 64 << 10;

fn all_reduces(device: &Device, ranks: usize, arguments: &Arguments) -> Result<Vec<Value>> {
    let Arguments { image, max, chains, .. } = arguments;
    let max = *max;
    let devices = vec![device.clone(); ranks];
    let streams = devices.iter().map(Stream::new).collect::<Result<Vec<_>>>()?;
    let streams: Vec<&Stream> = streams.iter().collect();
    let gate = Gate(HostBuffer::new(device, 4)?);
    let mut inputs = Vec::new();
    for (rank, stream) in streams.iter().enumerate() {
        let vector = (rank as f32 + 1.0).to_le_bytes().repeat(max / 4);
        inputs.push(DeviceBuffer::from_host(&vector, stream)?);
    }
    let outputs = devices.iter().map(|device| DeviceBuffer::new(device, max));
    let mut outputs = outputs.collect::<Result<Vec<_>>>()?;
    let buffers: Vec<_> = inputs
        .iter()
        .zip(&outputs)
        .map(|(input, output)| RankBuffers { input: input.pointer(), output: output.pointer() })
        .collect();
    let seed = |crypto, key, algorithm| -> Result<Group> {
        let defaults = SeedOptions::default();
        let options = SeedOptions { crypto, key, algorithm, chains: *chains, max_bytes: max, ..defaults };
        Ok(Box::new(SeedGroup::new(&devices, image, &GroupSecret::random()?, options)?))
    };
    let ring = |crypto| -> Result<Group> {
        let options = GpuOptions { crypto, max_bytes: max, ..GpuOptions::default() };
        Ok(Box::new(GpuGroup::new(&devices, image, &GroupSecret::random()?, options)?))
    };
    let (ring_algorithm, tree, key) = (Algorithm::Ring, Algorithm::Tree, KeyLength::Aes128);
    let mut rows = Vec::new();
    type Make<'a> = Box<dyn Fn() -> Result<Group> + 'a>;
    let kinds: [(&str, Make<'_>); 8] = [
        ("seed ring, plain", Box::new(|| seed(false, key, ring_algorithm))),
        ("seed ring, AES-128", Box::new(|| seed(true, key, ring_algorithm))),
        ("seed ring, AES-256", Box::new(|| seed(true, KeyLength::Aes256, ring_algorithm))),
        ("seed tree, plain", Box::new(|| seed(false, key, tree))),
        ("seed tree, AES-128", Box::new(|| seed(true, key, tree))),
        ("ringseal ring, plain", Box::new(|| ring(Crypto::None))),
        ("ringseal ring, AES-128", Box::new(|| ring(Crypto::Gcm(KeyLength::Aes128)))),
        ("ringseal ring, AES-256", Box::new(|| ring(Crypto::Gcm(KeyLength::Aes256)))),
    ];
    println!(
        "{ranks} ranks on one GPU: {:<26} {:>11} {:>14} {:>14}",
        "", "bytes", "us, ahead", "us, as called"
    );
    for (what, make) in kinds {
        let mut group = make()?;
        let mut bytes = 64 << 10;
        while bytes <= max {
            for (output, stream) in outputs.iter_mut().zip(&streams) {
                output.fill(0xa5, stream)?;
            }
            let [ahead, called] = measure(&mut group, &gate, &buffers, bytes / 4, &streams)?;
            let sum = ((ranks * (ranks + 1) / 2) as f32).to_le_bytes();
            let mut wrong = 0;
            for (output, stream) in outputs.iter().zip(&streams) {
                let length = CHECKED.min(bytes);
                for at in [0, bytes - length] {
                    let mut host = vec![0; length];
                    output.read(at, &mut host, stream)?;
                    wrong += host.chunks_exact(4).filter(|&element| element != sum).count();
                }
            }
            println!("{what:<45} {bytes:>11} {ahead:>14.1} {called:>14.1}  #wrong {wrong}");
            rows.push(json!({
                "ranks": ranks, "kind": what, "bytes": bytes, "us_ahead": ahead, "us_as_called": called,
                "wrong": wrong,
            }));
            bytes *= 4;
        }
    }
    Ok(rows)
}
