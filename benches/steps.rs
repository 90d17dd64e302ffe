//! The steps of the all-reduce, each measured alone on one GPU: `cargo bench --bench steps -- [--ptx FILE] [--sm N]
//! [--record BYTES] [--json FILE]`.
//!
//! One rank is its own neighbour, so that the GPU's memory stands for the link. A table of steps seals a chunk once and
//! then repeats the step in question on it, as `ring_sealed_*` does on a chunk that goes round.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints its results")]

#[path = "support/outcome.rs"]
mod outcome;
#[path = "support/steps.rs"]
mod support;

use ringseal::cuda::{Device, DeviceBuffer, Kernel, Launch, Module, Stream};
use ringseal::{Dtype, Error, ReduceOp, Result};
use ringseal_kernels::fused::FUSED_SHARED;
use ringseal_kernels::record::Call;
use ringseal_kernels::reduce::reduction;
use ringseal_kernels::ring::{Notice, PLAIN_SHARED, RankState, RingParams, SIGNAL_BYTES, THREADS};
use ringseal_kernels::sealed::{SealedKey, SealedRingParams};
use ringseal_kernels::step::{FINISH, FORWARD, NOTHING, RECEIVE, REDUCE, SEND, STORE, Step};

use support::Arguments;

/// Bytes of the chunk, at least: as many records for every block, so that none waits for another at the end.
const SHORTEST_CHUNK: usize = 256 << 20;
/// How often a step is repeated in one launch; the time of one is the slope from [`FEW`] to [`MANY`] repetitions.
const MANY: u32 = 6;
const FEW: u32 = 2;
const ROUNDS: usize = 11;

/// A table of steps; each of them sends, as its own receiver.
struct Pattern {
    name: &'static str,
    /// What follows the first step, which seals, again and again.
    actions: u32,
}

const PATTERNS: [Pattern; 7] = [
    Pattern { name: "seal, send", actions: SEND },
    Pattern { name: "open, store, forward", actions: RECEIVE | STORE | SEND | FORWARD },
    Pattern { name: "open, reduce, seal", actions: RECEIVE | REDUCE | SEND },
    Pattern { name: "open, reduce, store, seal", actions: RECEIVE | REDUCE | FINISH | STORE | SEND },
    Pattern { name: "open, store, seal", actions: RECEIVE | STORE | SEND },
    Pattern { name: "open, store", actions: RECEIVE | STORE },
    Pattern { name: "open, reduce, store", actions: RECEIVE | REDUCE | FINISH | STORE },
];

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
    let bench = Bench::new(&device, &stream, blocks, record)?;
    let chunk = bench.chunk;
    println!("# {}, {blocks} blocks, records of {record} bytes, chunks of {chunk}", device.name()?);
    println!("{:>8} {:>6} {:>28} {:>10} {:>8}", "crypto", "dtype", "step", "us", "GB/s");
    let mut rows = Vec::new();
    for (crypto, kernel, key) in [
        ("none", "ring_plain", None),
        ("AES-128", "ring_sealed_128", Some(16)),
        ("AES-256", "ring_sealed_256", Some(32)),
    ] {
        let shared = if key.is_some() { FUSED_SHARED } else { PLAIN_SHARED };
        let kernel = module.kernel(kernel, shared)?;
        let key = key.map(|bytes| support::key(&module, &stream, bytes)).transpose()?;
        for dtype in [Dtype::F32, Dtype::Bf16] {
            for pattern in &PATTERNS {
                // Types differ only where they are added.
                if dtype != Dtype::F32 && pattern.actions & REDUCE == 0 {
                    continue;
                }
                let us = bench.step(&kernel, key.as_ref(), dtype, pattern.actions)?;
                let rate = chunk as f64 / us * 1e-3;
                println!(
                    "{crypto:>8} {:>6} {:>28} {us:>10.1} {rate:>8.1}",
                    format!("{dtype:?}"),
                    pattern.name
                );
                rows.push(serde_json::json!({
                    "crypto": crypto, "dtype": format!("{dtype:?}"), "step": pattern.name, "us": us, "gb_per_s": rate,
                }));
            }
        }
    }
    arguments.write(&serde_json::json!({
        "device": device.name()?, "blocks": blocks, "record_bytes": record, "chunk_bytes": chunk, "rows": rows,
    }));
    Ok(())
}

struct Bench<'a> {
    stream: &'a Stream,
    blocks: u32,
    record: u32,
    chunk: usize,
    input: DeviceBuffer,
    output: DeviceBuffer,
    inbox: DeviceBuffer,
    signals: DeviceBuffer,
}

impl<'a> Bench<'a> {
    fn new(device: &Device, stream: &'a Stream, blocks: u32, record: u32) -> Result<Self> {
        let zeroed = |bytes: usize| {
            let mut buffer = DeviceBuffer::new(device, bytes)?;
            buffer.fill(0, stream)?;
            Ok::<_, Error>(buffer)
        };
        let messages = MANY as usize + 1;
        let chunk = SHORTEST_CHUNK.next_multiple_of(record as usize * blocks as usize);
        Ok(Self {
            chunk,
            input: zeroed(chunk)?,
            output: zeroed(chunk)?,
            inbox: zeroed(messages * chunk)?,
            signals: zeroed(2 * messages * chunk.div_ceil(record as usize) * SIGNAL_BYTES as usize)?,
            stream,
            blocks,
            record,
        })
    }

    /// Microseconds of one such step on the whole chunk.
    fn step(
        &self,
        kernel: &Kernel,
        key: Option<&(SealedKey, DeviceBuffer)>,
        dtype: Dtype,
        actions: u32,
    ) -> Result<f64> {
        // What nothing is sent by can be repeated only by way of the message that came first.
        let few = self.table(kernel, key, dtype, actions, FEW)?;
        let many = self.table(kernel, key, dtype, actions, MANY)?;
        Ok((many - few) / (MANY - FEW) as f64)
    }

    /// Median time of a launch in microseconds.
    fn table(
        &self,
        kernel: &Kernel,
        key: Option<&(SealedKey, DeviceBuffer)>,
        dtype: Dtype,
        actions: u32,
        repeats: u32,
    ) -> Result<f64> {
        let sends = actions & SEND != 0;
        let relays = actions & FORWARD != 0;
        let step = |index: u32| Step {
            offset: 0,
            bytes: self.chunk as u64,
            actions: if index == 0 { SEND } else { actions },
            receives: if sends { index.wrapping_sub(1) } else { 0 },
            sends: index,
            sealed_by: 0,
            sealed_in: if sends && !relays { index.wrapping_sub(1) } else { 0 },
            ..NOTHING
        };
        let table: Vec<Step> = (0..=repeats).map(step).collect();
        // SAFETY: words without padding.
        let bytes =
            unsafe { std::slice::from_raw_parts(table.as_ptr().cast::<u8>(), size_of_val(table.as_slice())) };
        let steps = DeviceBuffer::from_host(bytes, self.stream)?;
        let state = RankState { sequence: 1, ..RankState::default() };
        // SAFETY: as above.
        let bytes =
            unsafe { std::slice::from_raw_parts((&raw const state).cast::<u8>(), size_of_val(&state)) };
        let state = DeviceBuffer::from_host(bytes, self.stream)?;
        let mut notice = DeviceBuffer::new(self.stream.device(), size_of::<Notice>())?;
        notice.fill(0, self.stream)?;
        let notices = DeviceBuffer::from_host(&notice.pointer().to_le_bytes(), self.stream)?;
        let mut signals = DeviceBuffer::new(self.stream.device(), self.signals.len())?;
        signals.fill(0, self.stream)?;
        let records = self.chunk.div_ceil(self.record as usize) as u32;
        let ring = RingParams {
            state: state.pointer(),
            notice: notice.pointer(),
            notices: notices.pointer(),
            steps: steps.pointer(),
            input: self.input.pointer(),
            output: self.output.pointer(),
            result: self.output.pointer(),
            bytes: self.chunk as u64,
            inbox: self.inbox.pointer(),
            outbox: self.inbox.pointer(),
            // One half serves: a rank that is its own neighbour has read everything when it has left.
            inbox_half: 0,
            message_stride: self.chunk as u64,
            signals_in: signals.pointer(),
            signals_out: signals.pointer(),
            signals_half: 0,
            timeout_ns: 2_000_000_000,
            epoch: 0,
            calls: 0,
            calls_limit: u64::MAX,
            step_count: repeats + 1,
            records,
            record_bytes: self.record,
            reduction: reduction(dtype as u32, ReduceOp::Sum as u32),
            rank: 0,
            ranks: 1,
            unit: 16,
            awaits_successor: 0,
            more: 0,
            reserved: 0,
        };
        let launch = Launch { blocks: self.blocks, threads: THREADS };
        let mut times = Vec::new();
        for _ in 0..ROUNDS {
            let start = self.stream.record()?;
            // SAFETY: the kernels' parameters; all buffers live until the wait.
            unsafe {
                match key {
                    None => kernel.launch(launch, self.stream, &ring)?,
                    Some((key, _)) => {
                        let call = Call { codes: [0; 4], count: self.chunk as u64, ranks: 1, reserved: 0 };
                        let (own, predecessor) = (*key, *key);
                        // Only the relay kernels look senders up.
                        let params = SealedRingParams { ring, own, predecessor, call, senders: 0 };
                        kernel.launch(launch, self.stream, &params)?;
                    }
                }
            }
            let end = self.stream.record()?;
            end.synchronize()?;
            times.push(end.since(&start)?.as_secs_f64() * 1e6);
        }
        let mut failed = [0; size_of::<RankState>()];
        state.read(0, &mut failed, self.stream)?;
        if u64::from_le_bytes(failed[8..16].try_into().expect("8 bytes")) != 0 {
            return Err(Error::Cuda("a step failed".into()));
        }
        times.sort_by(f64::total_cmp);
        Ok(times[ROUNDS / 2])
    }
}
