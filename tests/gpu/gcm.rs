//! AES-GCM of the CUDA backend: the published vectors, and batches bit for bit against RustCrypto on the CPU.

use std::error::Error;
use std::num::NonZeroUsize;
use std::slice::from_ref;
use std::thread;

use aes::{Aes128, Aes256};
use ctr::Ctr32BE;
use ctr::cipher::{KeyIvInit, StreamCipher};
use ghash::GHash;
use ghash::universal_hash::UniversalHash;
use ringseal::aead::{Aead, AesKey, Iv, Tag};
use ringseal::backend::cuda::Cuda;
use ringseal::backend::{self, Backend, Record};
use ringseal::cuda::{Device, DeviceBuffer, GcmKey, MessageWorkspace, Stream};
use ringseal::vectors;
use ringseal_kernels::{gcm, message};

use crate::support::{
    GpuTest, Outcome, all_are, ensure, kernels, longest, random, random_bytes, randomize, runs, stride,
};

pub(crate) const TESTS: &[GpuTest] = &[
    ("gcm::published_vectors", published_vectors),
    ("gcm::batches_of_every_shape", every_shape),
    ("gcm::every_length_to_4097", every_length),
    ("gcm::more_records_than_masks", many_records),
    ("gcm::one_message_of_every_shape", one_message),
    ("gcm::one_message_past_4_gib", past_4_gib),
    ("gcm::one_message_at_any_alignment", any_alignment),
    ("gcm::gmac_of_any_length_and_alignment", gmac),
    ("gcm::gmac_past_4_gib", gmac_past_4_gib),
    ("gcm::a_forged_message_leaves_zeros", forged_message),
    ("gcm::forgeries_leave_zeros", forgeries),
];

/// Whether the kernels under test have GCM at all.
pub(crate) fn available(device: &Device) -> bool {
    kernels(device).is_ok_and(|kernels| kernels.has_gcm())
}

/// One key on the GPU and on the CPU.
struct Pair {
    gpu: Aead,
    cpu: Aead,
}

impl Pair {
    fn random(device: &Device, key_bytes: usize) -> Result<Self, Box<dyn Error>> {
        let key = AesKey::from_bytes(&random::<32>()?[..key_bytes])?;
        let on = |backend: &dyn Backend| Aead::new(backend, &key);
        Ok(Self { gpu: on(&Cuda::new(&kernels(device)?))?, cpu: on(backend::by_name("cpu")?.as_ref())? })
    }
}

#[derive(Default)]
struct Message {
    iv: Vec<u8>,
    aad: Vec<u8>,
    data: Vec<u8>,
}

impl Message {
    fn random(iv: usize, aad: usize, bytes: usize) -> Result<Self, Box<dyn Error>> {
        let mut message = Self::default();
        message.replace(iv, aad, bytes)?;
        Ok(message)
    }

    /// Makes another random message of it, in the same memory where that is enough.
    fn replace(&mut self, iv: usize, aad: usize, bytes: usize) -> Outcome {
        for (part, length) in [(&mut self.iv, iv), (&mut self.aad, aad), (&mut self.data, bytes)] {
            part.resize(length, 0);
            randomize(part)?;
        }
        Ok(())
    }
}

impl Clone for Message {
    fn clone(&self) -> Self {
        Self { iv: self.iv.clone(), aad: self.aad.clone(), data: self.data.clone() }
    }

    /// Into the same memory where that is enough.
    fn clone_from(&mut self, source: &Self) {
        self.iv.clone_from(&source.iv);
        self.aad.clone_from(&source.aad);
        self.data.clone_from(&source.data);
    }
}

fn records(messages: &mut [Message]) -> ringseal::Result<Vec<Record<'_>>> {
    messages.iter_mut().map(|Message { iv, aad, data }| Ok(Record { iv: Iv::new(iv)?, aad, data })).collect()
}

fn seal(aead: &Aead, messages: &mut [Message]) -> ringseal::Result<Vec<Tag>> {
    aead.seal_records(&mut records(messages)?)
}

/// Seals on both, compares, and opens on the GPU what was sealed there.
fn compare(pair: &Pair, messages: &[Message]) -> Outcome {
    compare_in(&mut Default::default(), pair, messages)
}

/// As [`compare`], with copies in memory of the caller's.
fn compare_in([gpu, cpu]: &mut [Vec<Message>; 2], pair: &Pair, messages: &[Message]) -> Outcome {
    messages.clone_into(gpu);
    messages.clone_into(cpu);
    let tags = seal(&pair.gpu, gpu)?;
    let expected = seal(&pair.cpu, cpu)?;
    for (index, message) in messages.iter().enumerate() {
        let shape = || {
            let Message { iv, aad, data } = message;
            format!("message {index}: IV of {}, {} bytes of AAD, {} of text", iv.len(), aad.len(), data.len())
        };
        ensure!(gpu[index].data == cpu[index].data, "ciphertext of {}", shape());
        ensure!(tags[index] == expected[index], "tag of {}", shape());
    }
    let verdicts = pair.gpu.open_records(&mut records(gpu)?, &tags)?;
    ensure!(verdicts.iter().all(|verified| *verified), "a good record was refused");
    ensure!(gpu.iter().zip(messages).all(|(opened, sent)| opened.data == sent.data), "another plaintext");
    Ok(())
}

/// Every vector waits for the GPU several times: a thread a suite, to wait less.
fn published_vectors(device: &Device) -> Outcome {
    let kernels = kernels(device)?;
    let suites = vectors::suites()?;
    let reports = thread::scope(|scope| {
        let run = |suite: &vectors::Suite| suite.run(&Cuda::new(&kernels), NonZeroUsize::MIN);
        let threads: Vec<_> = suites.iter().map(|suite| scope.spawn(move || run(suite))).collect();
        let reports = threads.into_iter().map(|thread| thread.join().map_err(|_| "a thread panicked"));
        reports.collect::<Result<Vec<_>, _>>()
    })?;
    let report = vectors::Report { backend: "cuda", suites: reports };
    ensure!((report.failed(), report.skipped()) == (0, 0), "{report}");
    println!("{report}");
    Ok(())
}

fn every_shape(device: &Device) -> Outcome {
    for key_bytes in [16, 24, 32] {
        let pair = Pair::random(device, key_bytes)?;
        let mut messages = Vec::new();
        for bytes in [0, 1, 15, 16, 17, 4096, 16_383, 16_384, 16_385, 65_536, 262_144, 262_145, 300_007] {
            if bytes > longest() {
                continue;
            }
            for aad in [0, 1, 16, 48, 63, 2048] {
                for iv in [12, 1, 16, 129] {
                    messages.push(Message::random(iv, aad, bytes)?);
                }
            }
        }
        let messages: Vec<_> = messages.into_iter().step_by(stride()).collect();
        compare(&pair, &messages)?;
    }
    Ok(())
}

fn every_length(device: &Device) -> Outcome {
    for key_bytes in [16, 24, 32] {
        let pair = Pair::random(device, key_bytes)?;
        let messages: Result<Vec<_>, _> =
            (0..=4097).step_by(stride()).map(|bytes| Message::random(12, 48, bytes)).collect();
        compare(&pair, &messages?)?;
    }
    Ok(())
}

/// A block prepares the tag masks of 512 records at a time: enough records that every block does it again.
fn many_records(device: &Device) -> Outcome {
    let count = 513 * device.multiprocessors()? as usize + 7;
    let messages: Result<Vec<_>, _> = (0..count).map(|_| Message::random(12, 13, 40)).collect();
    compare(&Pair::random(device, 16)?, &messages?)
}

/// Alone, a message is spread over the whole GPU.
fn one_message(device: &Device) -> Outcome {
    let (mut message, mut copies) = (Message::default(), Default::default());
    for key_bytes in [16, 24, 32] {
        let pair = Pair::random(device, key_bytes)?;
        let short = (0..=130).step_by(stride()).map(|bytes| (bytes, 20));
        let long = [2047, 2048, 2049, 16_385, 65_536, 270_336, 270_337, 1_048_576, 4_194_304, (64 << 20) + 5];
        let additional = [0, 48, 2049, 100_000, (8 << 20) + 3];
        let long = long.iter().flat_map(|&bytes| additional.map(|aad| (bytes, aad)));
        for (bytes, aad) in short.chain(long).chain([(0, 5 << 20)]) {
            if bytes.max(aad) > longest() {
                continue;
            }
            message.replace(if bytes % 2 == 0 { 12 } else { 17 }, aad, bytes)?;
            compare_in(&mut copies, &pair, from_ref(&message))?;
        }
    }
    Ok(())
}

/// Bytes after which long random data repeats itself, and that are compared at a time: fresh pages for gigabytes take
/// longer than all else.
const PATTERN: usize = 64 << 20;

/// AES-GCM with a nonce of 12 bytes, piece by piece: each but the last of what is authenticated, and of what is sealed, has a
/// multiple of 16 bytes.
struct Streamed {
    keystream: Box<dyn StreamCipher>,
    hash: GHash,
    mask: [u8; 16],
    aad_bytes: u64,
    bytes: u64,
}

impl Streamed {
    fn new(key: &[u8], nonce: &[u8]) -> Result<Self, Box<dyn Error>> {
        let keystream = |from: &[u8]| -> Result<Box<dyn StreamCipher>, Box<dyn Error>> {
            Ok(match key.len() {
                16 => Box::new(Ctr32BE::<Aes128>::new_from_slices(key, from)?),
                _ => Box::new(Ctr32BE::<Aes256>::new_from_slices(key, from)?),
            })
        };
        // NIST SP 800-38D, 7.1: H is block 0, encrypted; J0, the nonce and 1, masks the tag, and the text's blocks follow it.
        let (mut h, mut mask) = ([0; 16], [0; 16]);
        keystream(&[0; 16])?.apply_keystream(&mut h);
        let mut keystream = keystream(&[nonce, &[0, 0, 0, 1]].concat())?;
        keystream.apply_keystream(&mut mask);
        Ok(Self { keystream, hash: GHash::new(&h.into()), mask, aad_bytes: 0, bytes: 0 })
    }

    fn authenticate(&mut self, piece: &[u8]) {
        self.hash.update_padded(piece);
        self.aad_bytes += piece.len() as u64;
    }

    fn seal(&mut self, piece: &mut [u8]) {
        self.keystream.apply_keystream(piece);
        self.hash.update_padded(piece);
        self.bytes += piece.len() as u64;
    }

    fn tag(mut self) -> Tag {
        let bits = [self.aad_bytes, self.bytes].map(|bytes| (8 * bytes).to_be_bytes());
        self.hash.update_padded(bits.as_flattened());
        let hash: Tag = self.hash.finalize().into();
        std::array::from_fn(|at| hash[at] ^ self.mask[at])
    }
}

/// One message in device memory, at any alignment.
struct DeviceMessage {
    /// What the buffer holds from [`PATTERN_AT`] to the end of the input, over and over.
    pattern: Vec<u8>,
    buffer: DeviceBuffer,
    message: message::Message,
    workspace: MessageWorkspace,
    stream: Stream,
}

const PATTERN_AT: u64 = 64;

impl DeviceMessage {
    /// `shift` moves the input by one byte more than the output, if it isn't 0. The input is random.
    fn new(device: &Device, bytes: u64, shift: u64) -> Result<Self, Box<dyn Error>> {
        const AAD: u64 = 48;
        let stream = Stream::new(device)?;
        let room = bytes.next_multiple_of(16) + 32;
        let mut buffer = DeviceBuffer::new(device, (256 + 2 * room) as usize)?;
        buffer.fill(0, &stream)?;
        let pattern = random_bytes((256 + room).min(PATTERN as u64) as usize)?;
        let mut at = PATTERN_AT as usize;
        for run in runs(&pattern, 0, (256 + room - PATTERN_AT) as usize) {
            buffer.write(at, run, &stream)?;
            at += run.len();
        }
        let base = buffer.pointer();
        let message = message::Message {
            input: base + 256 + if shift == 0 { 0 } else { shift + 1 },
            output: base + 256 + room + shift,
            length: bytes,
            aad: base + 64 + shift,
            aad_length: AAD,
            tag: base,
            verdict: base + 16,
            j0: gcm::nonce_j0(random::<3>()?.map(u32::from)),
        };
        Ok(Self { workspace: MessageWorkspace::new(&stream)?, pattern, buffer, message, stream })
    }

    /// Whether the output is what `change` makes of the input, run by run.
    fn output_is(&self, mut change: impl FnMut(&mut [u8])) -> Result<bool, Box<dyn Error>> {
        let start = self.message.input - self.buffer.pointer() - PATTERN_AT;
        let mut at = (self.message.output - self.buffer.pointer()) as usize;
        let (mut right, mut found) = (Vec::new(), Vec::new());
        for run in runs(&self.pattern, start as usize, self.message.length as usize) {
            right.clear();
            right.extend_from_slice(run);
            change(&mut right);
            found.resize(run.len(), 0);
            self.buffer.read(at, &mut found, &self.stream)?;
            if found != right {
                return Ok(false);
            }
            at += run.len();
        }
        Ok(true)
    }

    fn bytes(&self, address: u64, bytes: u64) -> Result<Vec<u8>, Box<dyn Error>> {
        let mut host = vec![0; bytes as usize];
        self.buffer.read((address - self.buffer.pointer()) as usize, &mut host, &self.stream)?;
        Ok(host)
    }

    /// Opens in place what was sealed; the verdict.
    fn open(&mut self, key: &GcmKey) -> Result<u32, Box<dyn Error>> {
        self.buffer.write(16, &[0; 4], &self.stream)?;
        let message = message::Message { input: self.message.output, ..self.message };
        // SAFETY: the message names parts of the buffer; one stream, which the reads synchronize.
        unsafe { key.open_message(&message, &self.workspace, &self.stream)? };
        let verdict = self.bytes(message.verdict, 4)?;
        Ok(u32::from_le_bytes(verdict.try_into().map_err(|_| "four bytes")?))
    }

    /// Seals, compares with the CPU, opens and compares again.
    fn check(&mut self, device: &Device) -> Outcome {
        let bytes = random::<16>()?;
        let aes = AesKey::from_bytes(&bytes)?;
        let key = GcmKey::new(&kernels(device)?, &aes, &self.stream)?;
        let message = self.message;
        let around = |test: &Self| -> Result<_, Box<dyn Error>> {
            Ok((test.bytes(message.output - 1, 1)?, test.bytes(message.output + message.length, 16)?))
        };
        let before = around(self)?;
        // SAFETY: as in `open`.
        unsafe { key.seal_message(&message, &self.workspace, &self.stream)? };
        let nonce: Vec<u8> = message.j0[..3].iter().flat_map(|word| word.to_le_bytes()).collect();
        let mut cpu = Streamed::new(&bytes, &nonce)?;
        cpu.authenticate(&self.bytes(message.aad, message.aad_length)?);
        ensure!(self.output_is(|run| cpu.seal(run))?, "ciphertext of {message:?}");
        ensure!(self.bytes(message.tag, 16)? == cpu.tag(), "tag of {message:?}");
        let verdict = self.open(&key)?;
        let right = verdict == gcm::VERIFIED && self.output_is(|_| {})?;
        ensure!(right, "opening {message:?}: verdict {verdict}");
        ensure!(around(self)? == before, "bytes beside the output of {message:?}");
        Ok(())
    }
}

/// The number of bytes needs more than 32 bits.
fn past_4_gib(device: &Device) -> Outcome {
    DeviceMessage::new(device, (4 << 30) + 5 * 16_384 + 7, 0)?.check(device)
}

fn any_alignment(device: &Device) -> Outcome {
    for shift in [1, 3, 4, 8, 12] {
        for bytes in [1, 15, 16, 17, 5000, 1_000_003] {
            DeviceMessage::new(device, bytes, shift)?.check(device)?;
        }
    }
    Ok(())
}

/// Makes the tag of random data of so many bytes, `shift` from a multiple of 16, and compares it; verifies it, then with a
/// bit of the data and of the tag changed.
fn check_gmac(device: &Device, length: u64, shift: u64) -> Outcome {
    let bytes = random::<32>()?;
    let aes = AesKey::from_bytes(&bytes)?;
    let stream = Stream::new(device)?;
    let key = GcmKey::new(&kernels(device)?, &aes, &stream)?;
    let workspace = MessageWorkspace::new(&stream)?;
    let mut buffer = DeviceBuffer::new(device, (64 + length) as usize)?;
    buffer.fill(0, &stream)?;
    let pattern = random_bytes(length.min(PATTERN as u64) as usize)?;
    let mut at = (32 + shift) as usize;
    for run in runs(&pattern, 0, length as usize) {
        buffer.write(at, run, &stream)?;
        at += run.len();
    }
    let base = buffer.pointer();
    let message = message::Message {
        input: 0,
        output: 0,
        length: 0,
        aad: base + 32 + shift,
        aad_length: length,
        tag: base,
        verdict: base + 16,
        j0: gcm::nonce_j0(random::<3>()?.map(u32::from)),
    };
    // SAFETY: the message names parts of the buffer; one stream, which the reads synchronize.
    unsafe { key.seal_message(&message, &workspace, &stream)? };
    let mut tag = [0; 16];
    buffer.read(0, &mut tag, &stream)?;
    let nonce: Vec<u8> = message.j0[..3].iter().flat_map(|word| word.to_le_bytes()).collect();
    let mut cpu = Streamed::new(&bytes, &nonce)?;
    runs(&pattern, 0, length as usize).for_each(|run| cpu.authenticate(run));
    ensure!(tag == cpu.tag(), "tag of {length} bytes at {shift}");
    let middle = length / 2;
    let changes = [None, Some(5), Some(32 + shift), Some(32 + shift + middle), Some(32 + shift + length - 1)];
    for change in changes {
        let mut byte = [0];
        if let Some(at) = change {
            buffer.read(at as usize, &mut byte, &stream)?;
            buffer.write(at as usize, &[byte[0] ^ 0x40], &stream)?;
        }
        buffer.write(16, &[0; 4], &stream)?;
        let mut verdict = [0; 4];
        // SAFETY: as above.
        unsafe { key.open_message(&message, &workspace, &stream)? };
        buffer.read(16, &mut verdict, &stream)?;
        let right = if change.is_none() { gcm::VERIFIED } else { gcm::FORGED };
        ensure!(
            u32::from_le_bytes(verdict) == right,
            "{length} bytes at {shift}, change {change:?}: {verdict:?}"
        );
        if let Some(at) = change {
            buffer.write(at as usize, &byte, &stream)?;
        }
    }
    Ok(())
}

fn gmac(device: &Device) -> Outcome {
    // Unaligned data is the kernels' on one message.
    for length in [1, 15, 16, 17, 2048, 2049, 65_536, 1 << 20, (8 << 20) + 3, 100 << 20, (256 << 20) + 1] {
        for shift in [0, 16, 4, 1] {
            check_gmac(device, length, shift)?;
        }
    }
    Ok(())
}

/// The number of bytes needs more than 32 bits.
fn gmac_past_4_gib(device: &Device) -> Outcome {
    check_gmac(device, (4 << 30) + 5 * 32_768 + 7, 0)
}

/// Of one message, of one and of many thread blocks, one bit is changed; then it is put right, which must open.
fn forged_message(device: &Device) -> Outcome {
    let stream = Stream::new(device)?;
    let key = GcmKey::new(&kernels(device)?, &AesKey::from_bytes(&random::<32>()?)?, &stream)?;
    for bytes in [100, 70_000, 5 << 20] {
        let mut test = DeviceMessage::new(device, bytes, 0)?;
        let message = test.message;
        // SAFETY: as in `open`.
        unsafe { key.seal_message(&message, &test.workspace, &test.stream)? };
        let sealed = test.bytes(message.output, bytes)?;
        for (at, what) in
            [(message.output + bytes / 3, "text"), (message.tag + 5, "tag"), (message.aad + 40, "AAD")]
        {
            let right = test.bytes(at, 1)?;
            let offset = (at - test.buffer.pointer()) as usize;
            test.buffer.write(offset, &[right[0] ^ 0x10], &test.stream)?;
            let verdict = test.open(&key)?;
            ensure!(verdict == gcm::FORGED, "{what} changed in {bytes} bytes: verdict {verdict}");
            ensure!(
                all_are(&test.bytes(message.output, bytes)?, 0),
                "{what} changed in {bytes} bytes: not zeros"
            );
            test.buffer.write((message.output - test.buffer.pointer()) as usize, &sealed, &test.stream)?;
            test.buffer.write(offset, &right, &test.stream)?;
        }
        let verdict = test.open(&key)?;
        let right = verdict == gcm::VERIFIED && test.output_is(|_| {})?;
        ensure!(right, "{bytes} bytes put right: verdict {verdict}");
    }
    Ok(())
}

/// Of a batch, every other record has one bit changed: in the text, the tag, the additional data or the IV.
fn forgeries(device: &Device) -> Outcome {
    let pair = Pair::random(device, 32)?;
    let messages: Result<Vec<_>, _> =
        (0..1000).step_by(stride()).map(|index| Message::random(12, 20, 100 * index + 1)).collect();
    let messages = messages?;
    let mut sealed = messages.clone();
    let mut tags = seal(&pair.gpu, &mut sealed)?;
    for index in (0..sealed.len()).step_by(2) {
        let [place, bit] = random::<2>()?.map(usize::from);
        let Message { iv, aad, data } = &mut sealed[index];
        let target: &mut [u8] = match index / 2 % 4 {
            0 => data,
            1 => &mut tags[index],
            2 => aad,
            _ => iv,
        };
        let at = place % target.len();
        target[at] ^= 1 << (bit % 8);
    }
    let verdicts = pair.gpu.open_records(&mut records(&mut sealed)?, &tags)?;
    for (index, verified) in verdicts.into_iter().enumerate() {
        ensure!(
            verified == (index % 2 == 1),
            "record {index} was {}",
            if verified { "accepted" } else { "refused" }
        );
        let expected =
            if verified { messages[index].data.clone() } else { vec![0; messages[index].data.len()] };
        ensure!(sealed[index].data == expected, "text of record {index}");
    }
    Ok(())
}
