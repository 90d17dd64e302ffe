//! Sealed copies between host and device memory.

use ringseal::Error;
use ringseal::channel::{GroupSecret, KeyLength};
use ringseal::copy::CopyOptions;
use ringseal::cuda::{Device, DeviceBuffer, SealedCopy, Stream};

use crate::support::{GpuTest, Outcome, ensure, kernels, longest, random_bytes};

pub(crate) const TESTS: &[GpuTest] = &[
    ("copy::every_shape_there_and_back", shapes),
    ("copy::new_keys_when_the_old_are_used_up", epochs),
    ("copy::a_changed_byte_leaves_zeros", tampering),
    ("copy::only_ciphertext_is_staged", ciphertext),
    ("copy::a_captured_stream_is_refused", captured),
];

fn options() -> CopyOptions {
    CopyOptions { record_bytes: 4096, piece_records: 5, slots: 3, threads: 3, ..CopyOptions::default() }
}

fn shapes(device: &Device) -> Outcome {
    let stream = Stream::new(device)?;
    for key in [KeyLength::Aes128, KeyLength::Aes256] {
        // More records a piece than one upload describes.
        let many = CopyOptions { record_bytes: 64, piece_records: 700, slots: 2, ..options() };
        let all = [options(), CopyOptions::default(), many];
        for options in all.map(|options| CopyOptions { key, ..options }) {
            let mut copy = SealedCopy::new(&kernels(device)?, &GroupSecret::random()?, options)?;
            for bytes in [0, 1, 17, 4095, 4096, 4097, 20_480, 20_481, 100_000, 5_000_001, 40_000_000] {
                if bytes > longest() {
                    continue;
                }
                let sent = random_bytes(bytes)?;
                let mut memory = DeviceBuffer::new(device, bytes.max(16))?;
                memory.fill(0xee, &stream)?;
                // SAFETY: the memory is long enough, and only the stream's earlier work uses it.
                unsafe { copy.to_device(memory.pointer(), &sent, &stream)? };
                ensure!(memory.to_host(&stream)?[..bytes] == sent[..], "{bytes} bytes to the device");
                let mut back = vec![0xdd; bytes];
                // SAFETY: as above.
                unsafe { copy.to_host(&mut back, memory.pointer(), &stream)? };
                ensure!(back == sent, "{bytes} bytes to the host");
            }
        }
    }
    Ok(())
}

fn epochs(device: &Device) -> Outcome {
    let stream = Stream::new(device)?;
    let options = CopyOptions { key_bytes: 120_000, ..options() };
    let mut copy = SealedCopy::new(&kernels(device)?, &GroupSecret::random()?, options)?;
    let memory = DeviceBuffer::new(device, 80_000)?;
    for _ in 0..4 {
        let sent = random_bytes(80_000)?;
        let mut back = vec![0; sent.len()];
        // SAFETY: the memory is long enough, and nothing else uses it.
        unsafe {
            copy.to_device(memory.pointer(), &sent, &stream)?;
            copy.to_host(&mut back, memory.pointer(), &stream)?;
        }
        ensure!(back == sent, "other data came back");
    }
    Ok(())
}

fn tampering(device: &Device) -> Outcome {
    let stream = Stream::new(device)?;
    let bytes = 100_000;
    let sent = random_bytes(bytes)?;
    let slot_text = 5 * 4096;
    // In the text, in the last record's text, in a tag.
    for at in [0, 4096 * 4 + 99, slot_text, slot_text + 16 * 4 + 15] {
        let secret = GroupSecret::random()?;
        let new = || -> Result<SealedCopy, Box<dyn std::error::Error>> {
            let mut copy = SealedCopy::new(&kernels(device)?, &secret, options())?;
            let mut piece = 0;
            copy.tap(move |slot| {
                slot[at] ^= u8::from(piece == 2);
                piece += 1;
            });
            Ok(copy)
        };
        let mut memory = DeviceBuffer::new(device, bytes)?;
        let mut copy = new()?;
        memory.fill(0xee, &stream)?;
        // SAFETY: the memory is long enough, and only the stream's earlier work uses it.
        let failed = unsafe { copy.to_device(memory.pointer(), &sent, &stream) };
        ensure!(matches!(failed, Err(Error::Authentication)), "byte {at} to the device: {failed:?}");
        ensure!(memory.to_host(&stream)? == vec![0; bytes], "byte {at}: the device's memory is not zeros");
        let mut back = vec![0xdd; bytes];
        // SAFETY: as above.
        let refused = unsafe { copy.to_host(&mut back, memory.pointer(), &stream) };
        ensure!(matches!(refused, Err(Error::Poisoned)), "a failed session copies on: {refused:?}");

        let mut copy = new()?;
        // SAFETY: as above.
        let failed = unsafe { copy.to_host(&mut back, memory.pointer(), &stream) };
        ensure!(matches!(failed, Err(Error::Authentication)), "byte {at} to the host: {failed:?}");
        ensure!(back == vec![0; bytes], "byte {at}: the host's memory is not zeros");
        copy.re_key(&secret)?;
        copy.tap(|_| {});
        // SAFETY: as above.
        unsafe {
            copy.to_device(memory.pointer(), &sent, &stream)?;
            copy.to_host(&mut back, memory.pointer(), &stream)?;
        }
        ensure!(back == sent, "after a new key other data came back");
    }
    Ok(())
}

fn ciphertext(device: &Device) -> Outcome {
    let stream = Stream::new(device)?;
    let mut copy = SealedCopy::new(&kernels(device)?, &GroupSecret::random()?, options())?;
    copy.tap(|slot| assert!(slot.chunks(16).all(|block| block != [0x55; 16]), "plaintext in staging memory"));
    let memory = DeviceBuffer::new(device, 100_000)?;
    let mut bytes = vec![0x55; 100_000];
    // SAFETY: the memory is long enough, and nothing else uses it.
    unsafe {
        copy.to_device(memory.pointer(), &bytes, &stream)?;
        copy.to_host(&mut bytes, memory.pointer(), &stream)?;
    }
    ensure!(bytes.iter().all(|byte| *byte == 0x55), "other data came back");
    Ok(())
}

/// And takes no number or key with it: the next copy works.
fn captured(device: &Device) -> Outcome {
    let stream = Stream::new(device)?;
    let mut copy = SealedCopy::new(&kernels(device)?, &GroupSecret::random()?, options())?;
    let memory = DeviceBuffer::new(device, 4096)?;
    let mut bytes = vec![0x55; 4096];
    let mut refused = None;
    stream.capture(|stream| {
        // SAFETY: the memory is long enough, and nothing else uses it.
        refused = Some(unsafe { copy.to_device(memory.pointer(), &bytes, stream) });
        Ok(())
    })?;
    ensure!(matches!(refused, Some(Err(Error::InvalidArgument(_)))), "captured: {refused:?}");
    ensure!(!copy.is_poisoned(), "a refused copy counts as failed");
    // SAFETY: as above.
    unsafe {
        copy.to_device(memory.pointer(), &bytes, &stream)?;
        copy.to_host(&mut bytes, memory.pointer(), &stream)?;
    }
    ensure!(bytes == vec![0x55; 4096], "other data came back");
    Ok(())
}
