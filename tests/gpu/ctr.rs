//! AES-CTR on device memory, bit for bit against RustCrypto on the CPU.

use std::error::Error;
use std::thread;

use ringseal::aead::{Aead, AesKey};
use ringseal::backend::cuda::Cuda;
use ringseal::backend::{self, CounterWidth};
use ringseal::cuda::{Device, DeviceBuffer, DeviceKey, Kernels, Stream};

use crate::support::{
    GpuTest, Outcome, ensure, is_small, kernels, longest, random, random_bytes, runs, stride,
};

pub(crate) const TESTS: &[GpuTest] = &[
    ("ctr::short", short),
    ("ctr::counters_that_wrap", wraps),
    ("ctr::in_place_and_misaligned", in_place),
    ("ctr::one_gibibyte", one_gibibyte),
    ("ctr::past_four_gibibytes", past_four_gibibytes),
    ("ctr::backend_on_host_slices", host_slices),
];

const WIDTHS: [CounterWidth; 2] = [CounterWidth::Gcm32, CounterWidth::Full128];
/// What memory around a message holds, before and after.
const GUARD: u8 = 0xa5;

/// One key on the GPU and on the CPU.
struct Pair {
    gpu: DeviceKey,
    cpu: Aead,
}

impl Pair {
    fn random(kernels: &Kernels, key_bytes: usize) -> Result<Self, Box<dyn Error>> {
        let key = AesKey::from_bytes(&random::<32>()?[..key_bytes])?;
        let cpu = Aead::new(backend::by_name("cpu")?.as_ref(), &key)?;
        Ok(Self { gpu: DeviceKey::new(kernels, &key), cpu })
    }
}

/// One message of a test: where it is read and written in the two buffers.
struct Message {
    counter: [u8; 16],
    width: CounterWidth,
    source: usize,
    destination: usize,
    bytes: usize,
}

/// Runs the messages on the GPU, in one go, and compares all of the output buffer, guards included.
fn compare(pair: &Pair, device: &Device, input: &[u8], output_bytes: usize, messages: &[Message]) -> Outcome {
    let stream = Stream::new(device)?;
    let source = DeviceBuffer::from_host(input, &stream)?;
    let mut destination = DeviceBuffer::new(device, output_bytes)?;
    destination.fill(GUARD, &stream)?;
    for message in messages {
        // SAFETY: both ranges are inside their buffers (the slices below would panic otherwise).
        unsafe {
            pair.gpu.ctr_xor(
                message.counter,
                message.width,
                source.pointer() + message.source as u64,
                destination.pointer() + message.destination as u64,
                message.bytes as u64,
                &stream,
            )?;
        }
    }
    let output = destination.to_host(&stream)?;
    let mut expected = vec![GUARD; output_bytes];
    for message in messages {
        let slice = &mut expected[message.destination..][..message.bytes];
        slice.copy_from_slice(&input[message.source..][..message.bytes]);
        pair.cpu.ctr_xor(message.counter, message.width, slice)?;
    }
    if output != expected {
        let at = (0..output_bytes).find(|&at| output[at] != expected[at]).unwrap_or(0);
        let message = messages.iter().rfind(|message| message.destination <= at);
        return Err(match message {
            Some(message) => format!(
                "byte {} of a message of {} (counter {:02x?}, {:?}, source + {}, destination + {}) is {:#04x}, not {:#04x}",
                at - message.destination,
                message.bytes,
                message.counter,
                message.width,
                message.source % 16,
                message.destination % 16,
                output[at],
                expected[at]
            ),
            None => format!("a guard byte at {at} was overwritten"),
        }
        .into());
    }
    Ok(())
}

/// Every length to just past 4 KiB, random keys, counters and offsets.
fn short(device: &Device) -> Outcome {
    let kernels = kernels(device)?;
    for key_bytes in [16, 24, 32] {
        for width in WIDTHS {
            let pair = Pair::random(&kernels, key_bytes)?;
            let mut messages = Vec::new();
            let (mut source, mut destination) = (0, 0);
            for bytes in (0..=4097).step_by(stride()) {
                let [a, b] = random::<2>()?.map(|byte| usize::from(byte % 16));
                // Half of them aligned alike, as real buffers are.
                let (a, b) = if bytes % 2 == 0 { (0, 0) } else { (a, b) };
                source = usize::next_multiple_of(source, 16) + a;
                destination = usize::next_multiple_of(destination + 16, 16) + b;
                messages.push(Message { counter: random()?, width, source, destination, bytes });
                source += bytes;
                destination += bytes;
            }
            compare(&pair, device, &random_bytes(source)?, destination + 64, &messages)?;
        }
    }
    Ok(())
}

/// Counters about to carry out of each byte, under both widths.
fn wraps(device: &Device) -> Outcome {
    let kernels = kernels(device)?;
    let bytes = 300 * 16 + 5;
    for key_bytes in [16, 32] {
        let pair = Pair::random(&kernels, key_bytes)?;
        for width in WIDTHS {
            let mut messages = Vec::new();
            for carry in 1..=16 {
                for before in [1, 2, 100, 255, 256, 257] {
                    let high = u128::from_be_bytes(random()?) & !(u128::MAX >> (128 - 8 * carry));
                    let counter =
                        high | (u128::MAX >> (128 - 8 * carry)).wrapping_sub(before).wrapping_add(1);
                    let at = messages.len() * 8192;
                    let counter = counter.to_be_bytes();
                    messages.push(Message { counter, width, source: at, destination: at, bytes });
                }
            }
            let total = messages.len() * 8192;
            compare(&pair, device, &random_bytes(total)?, total, &messages)?;
        }
    }
    Ok(())
}

/// Every pair of offsets with 0 to 33 bytes, then in place.
fn in_place(device: &Device) -> Outcome {
    let kernels = kernels(device)?;
    let pair = Pair::random(&kernels, 16)?;
    let mut messages = Vec::new();
    for a in 0..16 {
        for b in 0..16 {
            for bytes in (0..=33).step_by(if is_small() { 11 } else { 1 }).chain([1000, 70_001]) {
                if bytes > 33 && (a % 4, b % 4) != (0, 0) && a != b {
                    continue;
                }
                let previous = messages.last().map_or(0, |message: &Message| message.source + message.bytes);
                let start = (previous + 32).next_multiple_of(16);
                let counter = random()?;
                let width = CounterWidth::Full128;
                messages.push(Message { counter, width, source: start + a, destination: start + b, bytes });
            }
        }
    }
    let total = messages.last().map_or(0, |message| message.source + message.bytes) + 64;
    compare(&pair, device, &random_bytes(total)?, total, &messages)?;

    let stream = Stream::new(device)?;
    for (offset, bytes) in [(0, 1 << 20), (0, 5), (1, 40_000), (4, 16), (8, 33)] {
        let data = random_bytes(offset + bytes)?;
        let buffer = DeviceBuffer::from_host(&data, &stream)?;
        let counter = random()?;
        let at = buffer.pointer() + offset as u64;
        // SAFETY: the range is inside the buffer; exactly in place is allowed.
        unsafe { pair.gpu.ctr_xor(counter, CounterWidth::Gcm32, at, at, bytes as u64, &stream)? };
        let mut expected = data;
        pair.cpu.ctr_xor(counter, CounterWidth::Gcm32, &mut expected[offset..])?;
        ensure!(buffer.to_host(&stream)? == expected, "in place at +{offset}, {bytes} bytes");
    }
    Ok(())
}

/// The counter block `blocks` further on.
fn advance(counter: [u8; 16], width: CounterWidth, blocks: u64) -> [u8; 16] {
    let counter = u128::from_be_bytes(counter);
    let sum = counter.wrapping_add(u128::from(blocks));
    let counting = match width {
        CounterWidth::Gcm32 => u128::from(u32::MAX),
        CounterWidth::Full128 => u128::MAX,
    };
    (counter & !counting | sum & counting).to_be_bytes()
}

/// Bytes of a long message that a thread checks at once, and after which the message repeats itself.
const PATTERN: usize = 4 << 20;

/// Random bytes in device memory: [`PATTERN`] of them, also returned, over and over.
fn random_on_device(
    device: &Device,
    stream: &Stream,
    bytes: usize,
) -> Result<(DeviceBuffer, Vec<u8>), Box<dyn Error>> {
    let mut buffer = DeviceBuffer::new(device, bytes)?;
    let pattern = random_bytes(PATTERN)?;
    buffer.write(0, &pattern, stream)?;
    let mut filled = pattern.len();
    while filled < bytes {
        let more = filled.min(bytes - filled);
        // SAFETY: both ranges are inside the buffer and don't overlap; the copies are in stream order.
        unsafe { stream.copy(buffer.pointer() + filled as u64, buffer.pointer(), more)? };
        filled += more;
    }
    Ok((buffer, pattern))
}

/// Compares windows of a long message: `(offset, bytes)`, offsets multiples of 16; each on a CPU thread of its own.
fn compare_windows(
    pair: &Pair,
    (counter, width): ([u8; 16], CounterWidth),
    (pattern, output): (&[u8], &DeviceBuffer),
    stream: &Stream,
    windows: &[(usize, usize)],
) -> Outcome {
    let check = |&(offset, bytes): &(usize, usize)| -> Result<(), String> {
        let attempt = || -> ringseal::Result<bool> {
            let mut found = vec![0; bytes.min(PATTERN)];
            let mut expected = Vec::with_capacity(found.len());
            let mut at = offset;
            for piece in runs(pattern, offset, bytes) {
                expected.clear();
                expected.extend_from_slice(piece);
                pair.cpu.ctr_xor(advance(counter, width, at as u64 / 16), width, &mut expected)?;
                let found = &mut found[..piece.len()];
                output.read(at, found, stream)?;
                if *found != expected[..] {
                    return Ok(false);
                }
                at += piece.len();
            }
            Ok(true)
        };
        match attempt() {
            Ok(true) => Ok(()),
            Ok(false) => Err(format!("wrong bytes in {offset}..{}", offset + bytes)),
            Err(error) => Err(error.to_string()),
        }
    };
    thread::scope(|scope| {
        let threads: Vec<_> = windows.iter().map(|window| scope.spawn(|| check(window))).collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| "a thread panicked".to_owned())?)
    })?;
    Ok(())
}

fn one_gibibyte(device: &Device) -> Outcome {
    let kernels = kernels(device)?;
    let stream = Stream::new(device)?;
    let bytes = 1 << 30;
    let (input, pattern) = random_on_device(device, &stream, bytes)?;
    let mut output = DeviceBuffer::new(device, bytes)?;
    for (key_bytes, width) in
        [(16, CounterWidth::Full128), (24, CounterWidth::Gcm32), (32, CounterWidth::Gcm32)]
    {
        let pair = Pair::random(&kernels, key_bytes)?;
        // A 32-bit counter that wraps in the middle.
        let mut counter = random::<16>()?;
        counter[12..].copy_from_slice(&[0xfe, 0xff, 0x12, 0x34]);
        output.fill(GUARD, &stream)?;
        // SAFETY: both buffers are that long and don't overlap.
        unsafe {
            pair.gpu.ctr_xor(counter, width, input.pointer(), output.pointer(), bytes as u64, &stream)?;
        }
        let windows: Vec<_> = (0..16).map(|part| (part * (bytes / 16), bytes / 16)).collect();
        compare_windows(&pair, (counter, width), (&pattern, &output), &stream, &windows)?;
    }
    Ok(())
}

fn past_four_gibibytes(device: &Device) -> Outcome {
    let kernels = kernels(device)?;
    let stream = Stream::new(device)?;
    let bytes = (4 << 30) + 37;
    let (input, pattern) = random_on_device(device, &stream, bytes)?;
    let mut output = DeviceBuffer::new(device, bytes + 16)?;
    output.fill(GUARD, &stream)?;
    let pair = Pair::random(&kernels, 16)?;
    let counter = random()?;
    // SAFETY: both buffers are at least that long and don't overlap.
    unsafe {
        let (source, destination) = (input.pointer(), output.pointer());
        pair.gpu.ctr_xor(counter, CounterWidth::Gcm32, source, destination, bytes as u64, &stream)?;
    }
    let (window, end) = (1 << 20, bytes / 16 * 16);
    let windows = [
        (0, window),
        ((1 << 31) - window / 2, window),
        ((1 << 32) - window / 2, window / 2 + 37),
        (end - window, window + bytes % 16),
    ];
    compare_windows(&pair, (counter, CounterWidth::Gcm32), (&pattern, &output), &stream, &windows)?;
    let mut tail = [0; 16];
    output.read(bytes, &mut tail, &stream)?;
    ensure!(tail == [GUARD; 16], "written past the end: {tail:02x?}");
    Ok(())
}

fn host_slices(device: &Device) -> Outcome {
    let backend = Cuda::new(&kernels(device)?);
    for key_bytes in [16, 24, 32] {
        let key = AesKey::from_bytes(&random::<32>()?[..key_bytes])?;
        let gpu = Aead::new(&backend, &key)?;
        let cpu = Aead::new(backend::by_name("cpu")?.as_ref(), &key)?;
        for bytes in [0, 1, 15, 16, 17, 4096, (3 << 20) + 7] {
            if bytes > longest() {
                continue;
            }
            for width in WIDTHS {
                let counter = random()?;
                let mut data = random_bytes(bytes)?;
                let mut expected = data.clone();
                gpu.ctr_xor(counter, width, &mut data)?;
                cpu.ctr_xor(counter, width, &mut expected)?;
                ensure!(data == expected, "{bytes} bytes, AES-{}, {width:?}", 8 * key_bytes);
            }
        }
    }
    Ok(())
}
