//! `ringseal copy-bench`: sealed copies between host and GPU memory beside plain ones.

use std::io::{self, Write};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use ringseal::aead::AesKey;
use ringseal::channel::{GroupSecret, KeyLength};
use ringseal::copy::{CopyOptions, HostCipher};
use ringseal::cuda::{Device, DeviceBuffer, HostBuffer, Kernels, SealedCopy, Stream};
use ringseal::{Error, Result};

use super::BackendName;
use super::failure::{Failure, Outcome};
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
    /// Copies timed; the median is shown.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    iterations: u32,
    /// There is nothing to measure but on cuda.
    #[arg(long, value_name = "NAME", value_enum, default_value_t)]
    backend: BackendName,
}

/// Medians of one direction.
struct Direction {
    name: &'static str,
    plain: f64,
    one_shot: f64,
    sealed: f64,
}

pub(crate) fn run(arguments: &Arguments) -> Outcome {
    if !matches!(arguments.backend, BackendName::Auto | BackendName::Cuda) {
        return Err(Failure::Input("copy-bench measures copies to and from a GPU: --backend cuda".into()));
    }
    if arguments.bytes.0 == 0 {
        return Err(Failure::Input("copy-bench: --bytes must be at least 1".into()));
    }
    let device = Device::open(0)?;
    let kernels = Kernels::embedded(&device)?;
    let defaults = CopyOptions::default();
    let options = CopyOptions {
        record_bytes: arguments.record.0,
        piece_records: arguments.piece,
        threads: arguments.threads.unwrap_or(defaults.threads),
        ..defaults
    };
    let mut stdout = io::stdout().lock();
    let mut say = |line: String| writeln!(stdout, "{line}").map_err(Failure::stdout);
    say(format!(
        "# ringseal {}: copies of {} bytes, host and {}, {} host threads, records of {} bytes, {} a piece, {} pieces under way",
        env!("CARGO_PKG_VERSION"),
        arguments.bytes,
        device.name()?,
        options.threads,
        arguments.record,
        options.piece_records,
        options.slots,
    ))?;
    say(format!(
        "# GB/s (1e9), medians of {} after 2 to warm up; one-shot: all is sealed, then moved, then opened\n\
         # AES: what these threads seal in their caches; share: sealed / the slower of plain and AES",
        arguments.iterations
    ))?;
    say(format!(
        "{:>7} {:>14} {:>8} {:>8} {:>9} {:>8} {:>7}",
        "AES-GCM", "direction", "plain", "AES", "one-shot", "sealed", "share"
    ))?;
    for (bits, key) in [("128", KeyLength::Aes128), ("256", KeyLength::Aes256)] {
        if arguments.aes.as_deref().is_some_and(|asked| asked != bits) {
            continue;
        }
        let options = CopyOptions { key, ..options };
        let aes = cipher_rate(&options)?;
        for row in directions(&kernels, options, arguments)? {
            let share = 100.0 * row.sealed / row.plain.min(aes);
            say(format!(
                "{bits:>7} {:>14} {:>8.1} {aes:>8.1} {:>9.1} {:>8.1} {share:>6.0}%",
                row.name, row.plain, row.one_shot, row.sealed
            ))?;
        }
    }
    Ok(())
}

/// Measures both directions, and checks that what came back is what went out.
fn directions(kernels: &Kernels, options: CopyOptions, arguments: &Arguments) -> Result<[Direction; 2]> {
    let (device, bytes) = (kernels.device(), arguments.bytes.0);
    let stream = Stream::new(device)?;
    let memory = DeviceBuffer::new(device, bytes)?;
    let mut pinned = HostBuffer::new(device, bytes)?;
    let rate = |copy: &mut dyn FnMut() -> Result<()>| -> Result<f64> {
        let mut times = Vec::new();
        for iteration in 0..arguments.iterations + 2 {
            let start = Instant::now();
            copy()?;
            if iteration >= 2 {
                times.push(start.elapsed());
            }
        }
        times.sort();
        Ok(bytes as f64 / times[times.len() / 2].as_secs_f64() / 1e9)
    };
    let (host, on_device) = (pinned.pointer(), memory.pointer());
    let plain = |to: u64, from: u64| {
        rate(&mut || {
            // SAFETY: both hold `bytes` bytes, and live until the wait.
            unsafe { stream.copy(to, from, bytes)? };
            stream.synchronize()
        })
    };
    let (plain_in, plain_out) = (plain(on_device, host)?, plain(host, on_device)?);

    // SAFETY: all copies are done.
    let buffer = &mut unsafe { pinned.as_mut_slice() }[..bytes];
    for (index, word) in buffer.chunks_mut(8).enumerate() {
        let value = (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
        word.copy_from_slice(&value[..word.len()]);
    }
    let wanted = buffer.to_vec();
    let mut both = |options: CopyOptions| -> Result<(f64, f64)> {
        let mut copy = SealedCopy::new(kernels, &GroupSecret::random()?, options)?;
        // SAFETY: the device memory is as long as is copied, and nothing else uses it.
        let to_device = rate(&mut || unsafe { copy.to_device(on_device, &wanted, &stream) })?;
        buffer.fill(0);
        // SAFETY: as above.
        let to_host = rate(&mut || unsafe { copy.to_host(buffer, on_device, &stream) })?;
        if buffer != wanted {
            return Err(Error::Cuda("a sealed copy arrived changed, and its tags verified".into()));
        }
        Ok((to_device, to_host))
    };
    let (sealed_in, sealed_out) = both(options)?;
    let whole = CopyOptions { piece_records: bytes.div_ceil(options.record_bytes), slots: 1, ..options };
    let (one_shot_in, one_shot_out) = both(whole)?;
    Ok([
        Direction { name: "host to device", plain: plain_in, one_shot: one_shot_in, sealed: sealed_in },
        Direction { name: "device to host", plain: plain_out, one_shot: one_shot_out, sealed: sealed_out },
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
