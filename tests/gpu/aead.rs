//! Messages in device memory, sealed and opened in the order of streams.

use ringseal::Error;
use ringseal::aead::{Aead, AesKey, Iv};
use ringseal::backend::cpu::Cpu;
use ringseal::cuda::{Device, DeviceAead, DeviceBuffer, DeviceText, FORGED, Stream, VERIFIED};

use crate::support::{GpuTest, Outcome, ensure, kernels, random, random_bytes};

pub(crate) const TESTS: &[GpuTest] = &[
    ("aead::streams_of_one_key_take_turns_and_agree_with_the_cpu", turns),
    ("aead::a_wrong_tag_leaves_zeros_and_says_so", forged),
    ("aead::what_cannot_be_right_is_refused", refused),
];

fn pair(device: &Device) -> Result<(DeviceAead, Aead), Box<dyn std::error::Error>> {
    let key = AesKey::from_bytes(&random::<32>()?)?;
    Ok((DeviceAead::new(&kernels(device)?, &key)?, Aead::new(&Cpu, &key)?))
}

/// A message, its additional data, its tag and a verdict, in device memory.
struct Piece {
    memory: DeviceBuffer,
    bytes: usize,
}

/// Bytes of additional data, and what comes before the text.
const AAD: usize = 40;
const TAG_AT: usize = 48;
const VERDICT_AT: usize = 64;
const TEXT_AT: usize = 80;

impl Piece {
    fn new(aad: &[u8; AAD], text: &[u8], stream: &Stream) -> Result<Self, Error> {
        let mut memory = DeviceBuffer::new(stream.device(), TEXT_AT + text.len())?;
        memory.fill(0, stream)?;
        memory.write(0, aad, stream)?;
        memory.write(TEXT_AT, text, stream)?;
        Ok(Self { memory, bytes: text.len() })
    }

    fn at(&self, offset: usize) -> u64 {
        self.memory.pointer() + offset as u64
    }

    /// In place.
    fn text(&self) -> DeviceText {
        let (text, bytes) = (self.at(TEXT_AT), self.bytes as u64);
        DeviceText { input: text, output: text, bytes, aad: self.at(0), aad_bytes: AAD as u64 }
    }

    /// Text, tag and verdict.
    fn read(&self, stream: &Stream) -> Result<(Vec<u8>, Vec<u8>, u32), Error> {
        let all = self.memory.to_host(stream)?;
        let verdict = u32::from_le_bytes(std::array::from_fn(|byte| all[VERDICT_AT + byte]));
        Ok((all[TEXT_AT..].to_vec(), all[TAG_AT..TAG_AT + 16].to_vec(), verdict))
    }
}

fn turns(device: &Device) -> Outcome {
    let (gpu, cpu) = pair(device)?;
    let streams = [Stream::new(device)?, Stream::new(device)?, Stream::new(device)?];
    let aad = random::<AAD>()?;
    let mut pieces = Vec::new();
    for number in 0..12_u8 {
        let text = random_bytes(usize::from(number) * 100_003)?;
        pieces.push((Piece::new(&aad, &text, &streams[0])?, text, [number; 12]));
    }
    for (at, (piece, _, nonce)) in pieces.iter().enumerate() {
        // SAFETY: the piece lives until its stream has passed the work, which `read` waits for.
        unsafe { gpu.seal(Iv::new(nonce)?, piece.text(), piece.at(TAG_AT), &streams[at % 3])? };
    }
    for (at, (piece, text, nonce)) in pieces.iter().enumerate() {
        let (sealed, tag, _) = piece.read(&streams[at % 3])?;
        let mut expected = text.clone();
        let right = cpu.seal_in_place(Iv::new(nonce)?, &aad, &mut expected)?;
        ensure!(sealed == expected && tag == right, "message {at} is sealed otherwise");
        // SAFETY: as above.
        unsafe {
            let (tag, verdict) = (piece.at(TAG_AT), piece.at(VERDICT_AT));
            gpu.open(Iv::new(nonce)?, piece.text(), tag, verdict, &streams[at % 3])?;
        }
    }
    for (at, (piece, text, _)) in pieces.iter().enumerate() {
        let (opened, _, verdict) = piece.read(&streams[at % 3])?;
        ensure!(verdict == VERIFIED && opened == *text, "message {at}: verdict {verdict}");
    }
    Ok(())
}

fn forged(device: &Device) -> Outcome {
    let (gpu, _) = pair(device)?;
    let (stream, nonce) = (Stream::new(device)?, [3; 12]);
    for bytes in [0, 1, 4096, 1_000_001] {
        let mut piece = Piece::new(&random::<AAD>()?, &random_bytes(bytes)?, &stream)?;
        let verdict = piece.at(VERDICT_AT);
        // SAFETY: the piece lives until its stream has passed the work, which `read` waits for.
        unsafe { gpu.seal(Iv::new(&nonce)?, piece.text(), piece.at(TAG_AT), &stream)? };
        let (_, mut tag, _) = piece.read(&stream)?;
        tag[7] ^= 4;
        piece.memory.write(TAG_AT, &tag, &stream)?;
        // SAFETY: as above.
        unsafe { gpu.open(Iv::new(&nonce)?, piece.text(), piece.at(TAG_AT), verdict, &stream)? };
        let (opened, _, verdict) = piece.read(&stream)?;
        ensure!(verdict == FORGED, "{bytes} bytes with a wrong tag: verdict {verdict}");
        ensure!(opened.iter().all(|&byte| byte == 0), "{bytes} bytes with a wrong tag left something");
    }
    Ok(())
}

fn refused(device: &Device) -> Outcome {
    let (gpu, _) = pair(device)?;
    let (stream, nonce) = (Stream::new(device)?, Iv::new(&[3; 12])?);
    let piece = Piece::new(&random::<AAD>()?, &random_bytes(256)?, &stream)?;
    let (text, tag) = (piece.text(), piece.at(TAG_AT));
    let overlapping = DeviceText { output: text.input + 16, ..text };
    // SAFETY: all addresses are in the piece, or refused; nothing is queued.
    let outcomes = unsafe {
        [
            gpu.seal(nonce, text, tag + 2, &stream),
            gpu.seal(nonce, text, 0, &stream),
            gpu.seal(nonce, overlapping, tag, &stream),
            gpu.open(nonce, text, tag, 0, &stream),
            gpu.open(nonce, text, tag, tag + 1, &stream),
            stream.capture(|stream| gpu.seal(nonce, text, tag, stream)).map(|_| ()),
        ]
    };
    let right = |outcome: &Result<(), Error>| matches!(outcome, Err(Error::InvalidArgument(_)));
    ensure!(outcomes.iter().all(right), "{outcomes:?}");
    Ok(())
}
