//! The steps on records whose keystream was made ahead, each alone on one GPU, and the making: `cargo bench --bench pads --
//! [--ptx FILE] [--sm N] [--record BYTES] [--json FILE]`.
//!
//! Times are of single launches, by events; a step's pads are made before it, outside of its time.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints its results")]

#[path = "support/outcome.rs"]
mod outcome;
#[path = "support/steps.rs"]
mod support;

use ringseal::cuda::{Device, DeviceBuffer, Kernel, Launch, Module, Stream};
use ringseal::{Dtype, Error, ReduceOp, Result};
use ringseal_kernels::gcm::VERIFIED;
use ringseal_kernels::ghash::THREADS;
use ringseal_kernels::padded::{
    HEAD_BYTES, PAD_FILL_SHARED, PADDED_SHARED, PadFillParams, PaddedParams, PaddedSide, pad_name,
};
use ringseal_kernels::record::Call;
use ringseal_kernels::reduce::reduction;
use ringseal_kernels::sealed::SealedKey;

use support::Arguments;

/// Bytes of the chunk.
const CHUNK: usize = 256 << 20;
const ROUNDS: usize = 11;
const SEQUENCE: u64 = 1;
const STEP: u32 = 2;
const SERIAL: u32 = 3;

fn main() {
    outcome::report(run());
}

fn run() -> Result<()> {
    let arguments = Arguments::parse();
    let record = arguments.record;
    let device = Device::open(0)?;
    let stream = Stream::new(&device)?;
    let module = Module::load(&device, &arguments.image)?;
    let blocks = arguments.sm.unwrap_or(device.multiprocessors()?);
    println!("# {}, {blocks} blocks, records of {record} bytes, a chunk of {CHUNK}", device.name()?);
    println!("{:>8} {:>6} {:>6} {:>20} {:>10} {:>8}", "crypto", "pads", "dtype", "step", "us", "GB/s");
    let mut rows = Vec::new();
    let mut row = |crypto: &str, pads: &str, dtype: &str, step: &str, us: f64| {
        let rate = CHUNK as f64 / us * 1e-3;
        println!("{crypto:>8} {pads:>6} {dtype:>6} {step:>20} {us:>10.1} {rate:>8.1}");
        rows.push(serde_json::json!({
            "crypto": crypto, "pads": pads, "dtype": dtype, "step": step, "us": us, "gb_per_s": rate,
        }));
    };
    for (crypto, key_bytes) in [("AES-128", 16), ("AES-256", 32)] {
        let bench = Bench::new(&device, &module, &stream, blocks, record, key_bytes)?;
        // What is opened below.
        bench.fill(blocks)?;
        let seal = module.kernel("padded_seal", PADDED_SHARED)?;
        bench.time(|| bench.launch(&seal, Dtype::F32, true))?;
        for blocks in [blocks, blocks / 4, blocks / 16] {
            let us = bench.median(|| Ok(()), || bench.fill(blocks))?;
            row(crypto, "made", "-", &format!("{blocks} blocks"), us / 2.0);
        }
        for (name, kernel, reduces) in [
            ("seal", "padded_seal", false),
            ("open", "padded_open", false),
            ("reduce", "padded_reduce", true),
            ("reduce, seal", "padded_reduce_seal", true),
        ] {
            let kernel = module.kernel(kernel, PADDED_SHARED)?;
            for dtype in [Dtype::F32, Dtype::Bf16] {
                // Types differ only where they are added.
                if dtype != Dtype::F32 && !reduces {
                    continue;
                }
                for ready in [true, false] {
                    let us = bench.median(
                        || if ready { bench.fill(blocks) } else { Ok(()) },
                        || bench.launch(&kernel, dtype, ready),
                    )?;
                    row(crypto, if ready { "ready" } else { "none" }, &format!("{dtype:?}"), name, us);
                    bench.check(name, ready)?;
                }
            }
        }
    }
    arguments.write(&serde_json::json!({
        "device": device.name()?, "blocks": blocks, "record_bytes": record, "chunk_bytes": CHUNK, "rows": rows,
    }));
    Ok(())
}

/// One sender's pads.
struct Pads {
    pads: DeviceBuffer,
    heads: DeviceBuffer,
}

struct Bench<'a> {
    stream: &'a Stream,
    fill: Kernel,
    blocks: u32,
    record: u32,
    rounds: u32,
    key: SealedKey,
    /// Alive as long as `key`.
    _ghash: DeviceBuffer,
    sides: [Pads; 2],
    vector: DeviceBuffer,
    received: DeviceBuffer,
    tags_in: DeviceBuffer,
    output: DeviceBuffer,
    tags_out: DeviceBuffer,
    verdicts: DeviceBuffer,
    scratch: DeviceBuffer,
    misses: DeviceBuffer,
}

impl<'a> Bench<'a> {
    fn new(
        device: &Device,
        module: &Module,
        stream: &'a Stream,
        blocks: u32,
        record: u32,
        key_bytes: usize,
    ) -> Result<Self> {
        let zeroed = |bytes: usize| {
            let mut buffer = DeviceBuffer::new(device, bytes)?;
            buffer.fill(0, stream)?;
            Ok::<_, Error>(buffer)
        };
        let records = CHUNK.div_ceil(record as usize);
        let pads =
            || Ok::<_, Error>(Pads { pads: zeroed(CHUNK)?, heads: zeroed(records * HEAD_BYTES as usize)? });
        let (key, ghash) = support::key(module, stream, key_bytes)?;
        let (fill, rounds) = if key_bytes == 16 { ("pads_fill_128", 10) } else { ("pads_fill_256", 14) };
        Ok(Self {
            stream,
            fill: module.kernel(fill, PAD_FILL_SHARED)?,
            blocks,
            record,
            rounds,
            key,
            _ghash: ghash,
            sides: [pads()?, pads()?],
            vector: zeroed(CHUNK)?,
            received: zeroed(CHUNK)?,
            tags_in: zeroed(16 * records)?,
            output: zeroed(CHUNK)?,
            tags_out: zeroed(16 * records)?,
            verdicts: zeroed(4 * records)?,
            scratch: zeroed(2 * blocks as usize * record as usize)?,
            misses: zeroed(4)?,
        })
    }

    /// Makes both sides' pads by so many blocks.
    fn fill(&self, blocks: u32) -> Result<()> {
        for side in &self.sides {
            let params = PadFillParams {
                round_keys: self.key.round_keys,
                pads: side.pads.pointer(),
                heads: side.heads.pointer(),
                bytes: CHUNK as u64,
                name: pad_name(SEQUENCE, STEP),
                record_bytes: self.record,
                count: CHUNK.div_ceil(self.record as usize) as u32,
                serial: SERIAL,
                slot_records: 0,
                entry: 0,
                misses: 0,
            };
            // SAFETY: the kernel's parameters; the buffers are the bench's.
            unsafe { self.fill.launch(Launch { blocks, threads: THREADS }, self.stream, &params)? };
        }
        Ok(())
    }

    /// One step. Sealing writes what the others open.
    fn launch(&self, kernel: &Kernel, dtype: Dtype, ready: bool) -> Result<()> {
        let seals = kernel.name() == "padded_seal";
        let side = |pads: &Pads| PaddedSide {
            key: self.key,
            pads: pads.pads.pointer(),
            heads: pads.heads.pointer(),
            count: if ready { CHUNK.div_ceil(self.record as usize) as u32 } else { 0 },
            serial: SERIAL,
            sender: 0,
            step: STEP,
        };
        let params = PaddedParams {
            call: Call { codes: [0; 4], count: CHUNK as u64, ranks: 1, reserved: 0 },
            opens: side(&self.sides[0]),
            seals: side(&self.sides[1]),
            sequence: SEQUENCE,
            input: if seals { &self.vector } else { &self.received }.pointer(),
            local: self.vector.pointer(),
            output: self.output.pointer(),
            sent: if seals { &self.received } else { &self.output }.pointer(),
            tags_in: self.tags_in.pointer(),
            tags_out: if seals { &self.tags_in } else { &self.tags_out }.pointer(),
            verdicts: self.verdicts.pointer(),
            scratch: self.scratch.pointer(),
            misses: self.misses.pointer(),
            bytes: CHUNK as u64,
            record_bytes: self.record,
            rounds: self.rounds,
            reduction: reduction(dtype as u32, ReduceOp::Sum as u32),
            ranks: 1,
        };
        let launch = Launch { blocks: self.blocks, threads: THREADS };
        // SAFETY: the kernels' parameters; all buffers are the bench's.
        unsafe { kernel.launch(launch, self.stream, &params) }
    }

    /// Microseconds on the GPU.
    fn time(&self, work: impl FnOnce() -> Result<()>) -> Result<f64> {
        let start = self.stream.record()?;
        work()?;
        let end = self.stream.record()?;
        end.synchronize()?;
        Ok(end.since(&start)?.as_secs_f64() * 1e6)
    }

    fn median(&self, before: impl Fn() -> Result<()>, work: impl Fn() -> Result<()>) -> Result<f64> {
        let mut times = (0..ROUNDS)
            .map(|_| {
                before()?;
                self.time(&work)
            })
            .collect::<Result<Vec<f64>>>()?;
        times.sort_by(f64::total_cmp);
        Ok(times[ROUNDS / 2])
    }

    /// The latest rounds opened what verifies, and used pads only where they were ready.
    fn check(&self, step: &str, ready: bool) -> Result<()> {
        let mut misses = [0; 4];
        self.misses.read(0, &mut misses, self.stream)?;
        // SAFETY: the bench's own buffer.
        unsafe { self.stream.fill(self.misses.pointer(), 0, 4)? };
        let verdicts = self.verdicts.to_host(self.stream)?;
        let verified = step == "seal" || verdicts.chunks(4).all(|word| word == VERIFIED.to_le_bytes());
        if !verified || ready != (u32::from_le_bytes(misses) == 0) {
            return Err(Error::Cuda(format!(
                "{step}, pads ready: {ready}: verified {verified}, {misses:?} missing"
            )));
        }
        Ok(())
    }
}
