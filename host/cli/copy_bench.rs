//! `ringseal copy-bench`: sealed copies between host and GPU memory beside plain ones.

use std::io::{self, Write};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use ringseal::aead::AesKey;
use ringseal::channel::{GroupSecret, KeyLength};
use ringseal::copy::{CopyOptions, HostCipher, Rehearsal};
use ringseal::cuda::{Device, DeviceBuffer, HostBuffer, Kernels, SealedCopy, Stream};
use ringseal::{Error, Result};

use super::BackendName;
use super::failure::{Failure, Outcome};
use super::memory;
use super::values::ByteSize;

#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Bytes to copy.
    #[arg(short, long, value_name = "BYTES", default_value = "1G")]
    bytes: ByteSize,
    /// Host threads that seal and open [default: processors less one].
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// AES key length: 128 or 256; both unless said.
    #[arg(long, value_name = "BITS", value_parser = ["128", "256"])]
    aes: Option<String>,
    /// Bytes sealed as one message.
    #[arg(long, value_name = "BYTES", default_value = "64K")]
    record: ByteSize,
    /// Records moved at once.
    #[arg(long, value_name = "N", default_value_t = 64)]
    piece: usize,
    /// Pieces under way at once.
    #[arg(long, value_name = "N", default_value_t = 8)]
    slots: usize,
    /// Copies timed; the median is shown.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    iterations: u32,
    /// cuda, or cpu for what the host does alone.
    #[arg(long, value_name = "NAME", value_enum, default_value_t)]
    backend: BackendName,
}

/// Medians of one direction; those with a GPU where there is one.
struct Direction {
    name: &'static str,
    host: Option<f64>,
    gpu: Option<WithGpu>,
}

struct WithGpu {
    plain: f64,
    one_shot: f64,
    sealed: f64,
}

pub(crate) fn run(arguments: &Arguments) -> Outcome {
    let kernels = match arguments.backend {
        BackendName::Auto | BackendName::Cuda => Some(Kernels::embedded(&Device::open(0)?)?),
        BackendName::Cpu => None,
        BackendName::Emulated => {
            let message = "copy-bench measures copies to and from a GPU, --backend cuda, or the host's part, --backend cpu";
            return Err(Failure::Input(message.into()));
        }
    };
    if arguments.bytes.0 == 0 {
        return Err(Failure::Input("copy-bench: --bytes must be at least 1".into()));
    }
    let defaults = CopyOptions::default();
    let options = CopyOptions {
        record_bytes: arguments.record.0,
        piece_records: arguments.piece,
        slots: arguments.slots,
        threads: arguments.threads.unwrap_or(defaults.threads),
        ..defaults
    };
    options.check()?;
    // Both vectors, staging memory, and each thread's record.
    let records = options.slots as u128 * options.piece_records as u128 + options.threads as u128;
    let needed = 2 * arguments.bytes.0 as u128 + records * options.record_bytes as u128;
    memory::require(needed, "copy-bench")?;
    let far = match &kernels {
        Some(kernels) => kernels.device().name()?,
        None => "no GPU".into(),
    };
    let mut stdout = io::stdout().lock();
    let mut say = |line: String| writeln!(stdout, "{line}").map_err(Failure::stdout);
    say(format!(
        "# ringseal {}: copies of {} bytes, host and {far}, {} host threads, records of {} bytes, {} a piece, {} pieces under way",
        env!("CARGO_PKG_VERSION"),
        arguments.bytes,
        options.threads,
        arguments.record,
        options.piece_records,
        options.slots,
    ))?;
    say(format!(
        "# GB/s (1e9), medians of {} after 2 to warm up; one-shot: all is sealed, then moved, then opened\n\
         # AES: what these threads seal in their caches; host: what they seal into staging memory with no GPU behind it\n\
         # share: sealed / the slower of plain and AES",
        arguments.iterations
    ))?;
    say(format!(
        "{:>7} {:>14} {:>8} {:>8} {:>8} {:>9} {:>8} {:>7}",
        "AES-GCM", "direction", "plain", "AES", "host", "one-shot", "sealed", "share"
    ))?;
    for (bits, key) in [("128", KeyLength::Aes128), ("256", KeyLength::Aes256)] {
        if arguments.aes.as_deref().is_some_and(|asked| asked != bits) {
            continue;
        }
        let options = CopyOptions { key, ..options };
        let aes = cipher_rate(&options)?;
        let rows = match &kernels {
            Some(kernels) => directions(kernels, options, arguments)?.into(),
            None => vec![Direction {
                name: "host to device",
                host: Some(host_rate(options, arguments)?),
                gpu: None,
            }],
        };
        for Direction { name, host, gpu } in rows {
            let shown = |rate: Option<f64>| rate.map_or("-".into(), |rate| format!("{rate:.1}"));
            let share = gpu.as_ref().map(|gpu| 100.0 * gpu.sealed / gpu.plain.min(aes));
            say(format!(
                "{bits:>7} {name:>14} {:>8} {aes:>8.1} {:>8} {:>9} {:>8} {:>7}",
                shown(gpu.as_ref().map(|gpu| gpu.plain)),
                shown(host),
                shown(gpu.as_ref().map(|gpu| gpu.one_shot)),
                shown(gpu.as_ref().map(|gpu| gpu.sealed)),
                share.map_or("-".into(), |share| format!("{share:.0}%")),
            ))?;
        }
    }
    Ok(())
}

/// The median rate of `copy`, which copies as many bytes as asked, in GB/s.
fn rate(arguments: &Arguments, mut copy: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut times = Vec::new();
    for iteration in 0..arguments.iterations + 2 {
        let start = Instant::now();
        copy()?;
        if iteration >= 2 {
            times.push(start.elapsed());
        }
    }
    times.sort();
    Ok(arguments.bytes.0 as f64 / times[times.len() / 2].as_secs_f64() / 1e9)
}

/// What the threads seal from ordinary memory into staging memory.
fn host_rate(options: CopyOptions, arguments: &Arguments) -> Result<f64> {
    let source = words(arguments.bytes.0);
    let mut rehearsal = Rehearsal::new(options)?;
    rate(arguments, || rehearsal.to_device(&source))
}

fn words(bytes: usize) -> Vec<u8> {
    let mut buffer = vec![0; bytes];
    for (index, word) in buffer.chunks_mut(8).enumerate() {
        let value = (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
        word.copy_from_slice(&value[..word.len()]);
    }
    buffer
}

/// Measures both directions, and checks that what came back is what went out.
fn directions(kernels: &Kernels, options: CopyOptions, arguments: &Arguments) -> Result<[Direction; 2]> {
    let (device, bytes) = (kernels.device(), arguments.bytes.0);
    let stream = Stream::new(device)?;
    let memory = DeviceBuffer::new(device, bytes)?;
    let mut pinned = HostBuffer::new(device, bytes)?;
    let (host, on_device) = (pinned.pointer(), memory.pointer());
    let plain = |to: u64, from: u64| {
        rate(arguments, || {
            // SAFETY: both hold `bytes` bytes, and live until the wait.
            unsafe { stream.copy(to, from, bytes)? };
            stream.synchronize()
        })
    };
    let (plain_in, plain_out) = (plain(on_device, host)?, plain(host, on_device)?);

    let wanted = words(bytes);
    // SAFETY: all copies are done.
    let buffer = &mut unsafe { pinned.as_mut_slice() }[..bytes];
    let mut both = |options: CopyOptions| -> Result<(f64, f64)> {
        let mut copy = SealedCopy::new(kernels, &GroupSecret::random()?, options)?;
        // SAFETY: the device memory is as long as is copied, and nothing else uses it.
        let to_device = rate(arguments, || unsafe { copy.to_device(on_device, &wanted, &stream) })?;
        buffer.fill(0);
        // SAFETY: as above.
        let to_host = rate(arguments, || unsafe { copy.to_host(buffer, on_device, &stream) })?;
        if buffer != wanted {
            return Err(Error::Cuda("a sealed copy arrived changed, and its tags verified".into()));
        }
        Ok((to_device, to_host))
    };
    let (sealed_in, sealed_out) = both(options)?;
    let whole = CopyOptions { piece_records: bytes.div_ceil(options.record_bytes), slots: 1, ..options };
    let (one_shot_in, one_shot_out) = both(whole)?;
    let to_device = WithGpu { plain: plain_in, one_shot: one_shot_in, sealed: sealed_in };
    let to_host = WithGpu { plain: plain_out, one_shot: one_shot_out, sealed: sealed_out };
    let mut rehearsal = Rehearsal::new(options)?;
    let host = rate(arguments, || rehearsal.to_device(&wanted))?;
    Ok([
        Direction { name: "host to device", host: Some(host), gpu: Some(to_device) },
        Direction { name: "device to host", host: None, gpu: Some(to_host) },
    ])
}

/// What the threads seal together, in GB/s, each a record in its cache over and over.
fn cipher_rate(options: &CopyOptions) -> Result<f64> {
    const TIME: Duration = Duration::from_millis(300);
    let cipher = &HostCipher::new(&AesKey::from_bytes(&[7; 32][..options.key.bytes()])?)?;
    let start = Instant::now();
    let sealed: Result<Vec<usize>> = thread::scope(|scope| {
        let seal = |thread: usize| {
            let mut record = vec![thread as u8; options.record_bytes];
            let (mut nonce, mut sealed) = ([thread as u8; 12], 0usize);
            while start.elapsed() < TIME {
                nonce[..8].copy_from_slice(&sealed.to_le_bytes());
                cipher.seal(&nonce, &[0; 48], &mut record)?;
                sealed += record.len();
            }
            Ok(sealed)
        };
        let threads: Vec<_> = (0..options.threads).map(|thread| scope.spawn(move || seal(thread))).collect();
        threads.into_iter().map(|thread| thread.join().expect("sealing does not panic")).collect()
    });
    Ok(sealed?.iter().sum::<usize>() as f64 / start.elapsed().as_secs_f64() / 1e9)
}
