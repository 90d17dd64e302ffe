//! Keystream made ahead of time, and the steps that use it, against the CPU's AES-GCM.

use bytemuck::cast_slice;
use ringseal::aead::{Aead, AesKey, Iv};
use ringseal::cuda::{
    Chunk, ChunkMemory, ChunkSide, ChunkWork, Device, DeviceBuffer, Keystream, KeystreamOptions, Stream,
};
use ringseal::{Dtype, Error, ReduceOp, backend, channel};
use ringseal_kernels::gcm::{FORGED, VERIFIED};
use ringseal_kernels::record::{AAD_BLOCKS, Call, Header};

use crate::support::{GpuTest, Outcome, ensure, kernels, random, random_bytes};

pub(crate) const TESTS: &[GpuTest] = &[
    ("keystream::steps_are_aes_gcm_with_and_without", steps),
    ("keystream::a_new_key_ends_what_was_made", epochs),
    ("keystream::nothing_survives_an_abort", abort),
    ("keystream::nonces_are_used_once", once),
    ("keystream::forged_records_leave_zeros", forged),
    ("keystream::making_beside_steps", concurrent),
    ("keystream::two_ranks_all_reduce", exchange),
];

const RECORD: u32 = 64 << 10;
const CALL: Call = Call { codes: [0x0403_0201, 5, 6, 7], count: 1 << 20, ranks: 2, reserved: 0 };

fn options() -> KeystreamOptions {
    KeystreamOptions { slots: 4, slot_bytes: 4 << 20, record_bytes: RECORD, makers: Some(8) }
}

/// Two senders with keys, and memory for one step.
struct Bench {
    keystream: Keystream,
    keys: [AesKey; 2],
    stream: Stream,
    bytes: usize,
    input: DeviceBuffer,
    local: DeviceBuffer,
    output: DeviceBuffer,
    sent: DeviceBuffer,
    tags_in: DeviceBuffer,
    tags_out: DeviceBuffer,
    verdicts: DeviceBuffer,
}

/// The sides of the step: what sender 0 sealed in its step 3, what sender 1 seals in its step 4.
const OPENS: ChunkSide = ChunkSide { sender: 0, step: 3 };
const SEALS: ChunkSide = ChunkSide { sender: 1, step: 4 };

impl Bench {
    fn new(device: &Device, key_bytes: usize, bytes: usize) -> Result<Self, Box<dyn std::error::Error>> {
        let stream = Stream::new(device)?;
        let mut keystream = Keystream::new(&kernels(device)?, options())?;
        let key = || -> Result<AesKey, Box<dyn std::error::Error>> {
            Ok(AesKey::from_bytes(&random_bytes(key_bytes)?)?)
        };
        let keys = [key()?, key()?];
        for (sender, key) in (0..).zip(&keys) {
            keystream.install(sender, key)?;
        }
        let records = bytes.div_ceil(RECORD as usize);
        let memory = |bytes: usize| {
            let mut buffer = DeviceBuffer::new(device, bytes.next_multiple_of(16))?;
            buffer.fill(0xee, &stream)?;
            Ok::<_, Error>(buffer)
        };
        Ok(Self {
            input: memory(bytes)?,
            local: memory(bytes)?,
            output: memory(bytes)?,
            sent: memory(bytes)?,
            tags_in: memory(16 * records)?,
            tags_out: memory(16 * records)?,
            verdicts: memory(4 * records)?,
            keystream,
            keys,
            stream,
            bytes,
        })
    }

    fn chunk(&self, sequence: u64) -> Chunk {
        let (dtype, op) = (Dtype::F32, ReduceOp::Sum);
        Chunk { call: CALL, sequence, bytes: self.bytes as u64, opens: OPENS, seals: SEALS, dtype, op }
    }

    fn memory(&self) -> ChunkMemory {
        ChunkMemory {
            input: self.input.pointer(),
            local: self.local.pointer(),
            output: self.output.pointer(),
            sent: self.sent.pointer(),
            tags_in: self.tags_in.pointer(),
            tags_out: self.tags_out.pointer(),
            verdicts: self.verdicts.pointer(),
        }
    }

    /// Another AES-GCM's records of a chunk, and their tags.
    fn seal(
        &self,
        sequence: u64,
        side: ChunkSide,
        text: &[u8],
    ) -> Result<(Vec<u8>, Vec<u8>), Box<dyn std::error::Error>> {
        let cpu = Aead::new(backend::by_name("cpu")?.as_ref(), &self.keys[side.sender as usize])?;
        let (mut sealed, mut tags) = (text.to_vec(), Vec::new());
        let records = text.len().div_ceil(RECORD as usize);
        for (index, record) in sealed.chunks_mut(RECORD as usize).enumerate() {
            let header = Header {
                call: CALL,
                sequence,
                sender: side.sender,
                step: side.step,
                record: index as u32,
                last: index + 1 == records,
            };
            let nonce = channel::nonce(sequence, side.step as usize, index)?;
            let words = (0..AAD_BLOCKS).flat_map(|i| header.associated_data(i));
            let aad: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
            tags.extend(cpu.seal_in_place(Iv::from_nonce(&nonce), &aad, record)?);
        }
        Ok((sealed, tags))
    }

    /// Does a step on fresh random elements in collective `sequence`, and compares all that it leaves.
    fn check(&mut self, work: ChunkWork, sequence: u64) -> Outcome {
        let elements = |seed: u8| -> Result<Vec<u8>, Box<dyn std::error::Error>> {
            let random = random_bytes(self.bytes.div_ceil(4))?;
            let words: Vec<_> = random.iter().map(|&byte| f32::from(byte ^ seed) * 0.37).collect();
            Ok(cast_slice(&words)[..self.bytes].to_vec())
        };
        let (text, local) = (elements(1)?, elements(2)?);
        let (received, tags_in) = self.seal(sequence, OPENS, &text)?;
        let opens = work != ChunkWork::Seal;
        self.input.write(0, if opens { &received } else { &text }, &self.stream)?;
        self.tags_in.write(0, &tags_in, &self.stream)?;
        self.local.write(0, &local, &self.stream)?;
        let (chunk, memory) = (self.chunk(sequence), self.memory());
        // SAFETY: the bench's memory, which nothing else uses.
        unsafe { self.keystream.step(work, &chunk, &memory, &self.stream)? };
        let word = |bytes: [u8; 4]| f32::from_le_bytes(bytes);
        let plain: Vec<u8> = match work {
            ChunkWork::Reduce | ChunkWork::ReduceSeal => {
                let pairs = text.as_chunks().0.iter().zip(local.as_chunks().0);
                let sums: Vec<_> = pairs.map(|(a, b)| word(*a) + word(*b)).collect();
                cast_slice(&sums).to_vec()
            }
            _ => text.clone(),
        };
        if matches!(work, ChunkWork::Seal | ChunkWork::ReduceSeal) {
            let (sealed, tags) = self.seal(sequence, SEALS, &plain)?;
            ensure!(self.sent.to_host(&self.stream)?[..self.bytes] == sealed, "{work:?} {sequence}: sent");
            ensure!(self.tags_out.to_host(&self.stream)?[..tags.len()] == tags, "{work:?} {sequence}: tags");
        } else {
            ensure!(self.output.to_host(&self.stream)?[..self.bytes] == plain, "{work:?} {sequence}: output");
        }
        if opens {
            let verdicts = self.verdicts.to_host(&self.stream)?;
            let records = self.bytes.div_ceil(RECORD as usize);
            let verified = verdicts[..4 * records].chunks(4).all(|word| word == VERIFIED.to_le_bytes());
            ensure!(verified, "{work:?} {sequence}: a record was refused");
        }
        Ok(())
    }

    fn misses(&self) -> Result<u32, Error> {
        self.keystream.misses(&self.stream)
    }
}

const WORKS: [ChunkWork; 4] = [ChunkWork::Seal, ChunkWork::Open, ChunkWork::Reduce, ChunkWork::ReduceSeal];

/// With keystream of all records, of some (a chunk longer than a slot), of none.
fn steps(device: &Device) -> Outcome {
    for key_bytes in [16, 32] {
        for bytes in [4, 65_540, 4 << 20, (4 << 20) + 10 * 65_536 + 12, 20 << 20] {
            let mut bench = Bench::new(device, key_bytes, bytes)?;
            let records = bytes.div_ceil(RECORD as usize) as u32;
            let beyond = records.saturating_sub((4 << 20) / RECORD);
            for (work, sequence) in WORKS.into_iter().zip(1..) {
                let (opens, seals) =
                    (work != ChunkWork::Seal, work == ChunkWork::Seal || work == ChunkWork::ReduceSeal);
                let sides = u32::from(opens) + u32::from(seals);
                for (prepared, sequence) in [(true, 2 * sequence), (false, 2 * sequence + 1)] {
                    if prepared {
                        for side in [opens.then_some(OPENS), seals.then_some(SEALS)].into_iter().flatten() {
                            ensure!(bench.keystream.prepare(sequence, side, bytes as u64)?, "no room");
                        }
                        bench.keystream.synchronize()?;
                    }
                    let before = bench.misses()?;
                    bench.check(work, sequence)?;
                    let misses = bench.misses()? - before;
                    let expected = sides * if prepared { beyond } else { records };
                    ensure!(
                        misses == expected,
                        "{work:?}, {bytes} bytes, {prepared}: {misses} missing, not {expected}"
                    );
                }
            }
            ensure!(bench.keystream.is_blank()?, "keystream is left");
        }
    }
    Ok(())
}

fn epochs(device: &Device) -> Outcome {
    let mut bench = Bench::new(device, 16, 1 << 20)?;
    for side in [OPENS, SEALS] {
        ensure!(bench.keystream.prepare(7, side, 1 << 20)?, "no room");
    }
    bench.keys[1] = AesKey::from_bytes(&random::<16>()?)?;
    bench.keystream.install(1, &bench.keys[1])?;
    bench.check(ChunkWork::ReduceSeal, 7)?;
    ensure!(bench.misses()? == 16, "{} of the new key's 16 records missing", bench.misses()?);
    ensure!(bench.keystream.is_blank()?, "keystream is left");
    Ok(())
}

fn abort(device: &Device) -> Outcome {
    let mut bench = Bench::new(device, 32, 1 << 20)?;
    ensure!(bench.keystream.prepare(7, SEALS, 1 << 20)?, "no room");
    bench.keystream.abort()?;
    ensure!(bench.keystream.is_blank()?, "keystream is left");
    let refused = bench.check(ChunkWork::Seal, 7);
    ensure!(refused.is_err(), "a step without a key");
    for (sender, key) in (0..).zip(&bench.keys) {
        bench.keystream.install(sender, key)?;
    }
    bench.check(ChunkWork::Seal, 8)?;
    ensure!(bench.misses()? == 16, "keystream from before");
    Ok(())
}

fn once(device: &Device) -> Outcome {
    let mut bench = Bench::new(device, 16, 1 << 20)?;
    bench.check(ChunkWork::Seal, 7)?;
    for sequence in [7, 6] {
        let (chunk, memory) = (bench.chunk(sequence), bench.memory());
        // SAFETY: the bench's memory, which nothing else uses.
        let again = unsafe { bench.keystream.step(ChunkWork::Seal, &chunk, &memory, &bench.stream) };
        ensure!(matches!(again, Err(Error::InvalidArgument(_))), "{again:?}");
    }
    let (chunk, memory) = (bench.chunk(8), bench.memory());
    let mut captured = None;
    let graph = bench.stream.capture(|stream| {
        // SAFETY: as above.
        captured = Some(unsafe { bench.keystream.step(ChunkWork::Seal, &chunk, &memory, stream) });
        Ok(())
    });
    drop(graph);
    ensure!(matches!(captured, Some(Err(Error::Unsupported { .. }))), "{captured:?}");
    bench.check(ChunkWork::Seal, 8)
}

fn forged(device: &Device) -> Outcome {
    let bytes = 3 * RECORD as usize + 100;
    let mut bench = Bench::new(device, 16, bytes)?;
    let text = vec![0; bytes];
    let (mut received, tags) = bench.seal(9, OPENS, &text)?;
    received[RECORD as usize + 5] ^= 0x20;
    bench.input.write(0, &received, &bench.stream)?;
    bench.tags_in.write(0, &tags, &bench.stream)?;
    bench.local.write(0, &text, &bench.stream)?;
    ensure!(bench.keystream.prepare(9, SEALS, bytes as u64)?, "no room");
    let (chunk, memory) = (bench.chunk(9), bench.memory());
    // SAFETY: the bench's memory, which nothing else uses.
    unsafe { bench.keystream.step(ChunkWork::ReduceSeal, &chunk, &memory, &bench.stream)? };
    let (sent, tags) = (bench.sent.to_host(&bench.stream)?, bench.tags_out.to_host(&bench.stream)?);
    let verdicts = bench.verdicts.to_host(&bench.stream)?;
    let (sealed, good) = bench.seal(9, SEALS, &text)?;
    for record in 0..4 {
        let range = record * RECORD as usize..bytes.min((record + 1) * RECORD as usize);
        let bad = record == 1;
        let verdict = if bad { FORGED } else { VERIFIED };
        ensure!(verdicts[4 * record..][..4] == verdict.to_le_bytes(), "verdict of record {record}");
        let tag = &tags[16 * record..][..16];
        let right = match bad {
            true => sent[range].iter().chain(tag).all(|&byte| byte == 0),
            false => sent[range.clone()] == sealed[range] && *tag == good[16 * record..][..16],
        };
        ensure!(right, "record {record}");
    }
    Ok(())
}

/// The next chunks' keystream is made while steps run, so that some of it comes too late.
fn concurrent(device: &Device) -> Outcome {
    let mut bench = Bench::new(device, 16, 4 << 20)?;
    for sequence in 1..40 {
        for ahead in [0, 1] {
            bench.keystream.prepare(sequence + ahead, SEALS, 4 << 20)?;
            bench.keystream.prepare(sequence + ahead, OPENS, 4 << 20)?;
        }
        bench.check(WORKS[sequence as usize % 4], sequence)?;
    }
    bench.keystream.abort()?;
    ensure!(bench.keystream.is_blank()?, "keystream is left");
    Ok(())
}

/// A rank of two on one GPU, with its own keystream, stream and memory.
struct Rank {
    keystream: Keystream,
    stream: Stream,
    vector: DeviceBuffer,
    inbox: DeviceBuffer,
    tags: DeviceBuffer,
    verdicts: DeviceBuffer,
}

/// Two ranks exchange their vectors, collective after collective; keystream is made for the next one while this one runs, and
/// keys change in between.
fn exchange(device: &Device) -> Outcome {
    const BYTES: usize = (3 << 20) + 40;
    let records = BYTES.div_ceil(RECORD as usize);
    let rank = |_| -> Result<Rank, Error> {
        Ok(Rank {
            keystream: Keystream::new(
                &kernels(device).map_err(|error| Error::Cuda(error.to_string()))?,
                options(),
            )?,
            stream: Stream::new(device)?,
            vector: DeviceBuffer::new(device, BYTES.next_multiple_of(16))?,
            inbox: DeviceBuffer::new(device, BYTES.next_multiple_of(16))?,
            tags: DeviceBuffer::new(device, 16 * records)?,
            verdicts: DeviceBuffer::new(device, 4 * records)?,
        })
    };
    let mut ranks = [rank(0)?, rank(1)?];
    let side = |sender: usize| ChunkSide { sender: sender as u32, step: 0 };
    for sequence in 0..8 {
        if sequence % 4 == 0 {
            for sender in 0..2 {
                let key = AesKey::from_bytes(&random::<32>()?)?;
                for rank in &mut ranks {
                    rank.keystream.install(sender, &key)?;
                }
            }
        }
        let vectors = [random_bytes(BYTES / 4)?, random_bytes(BYTES / 4)?]
            .map(|random| random.iter().map(|&byte| f32::from(byte) * 0.37).collect::<Vec<f32>>());
        for (rank, vector) in ranks.iter_mut().zip(&vectors) {
            rank.vector.write(0, cast_slice(vector), &rank.stream)?;
        }
        let chunk = |own: usize| Chunk {
            call: CALL,
            sequence,
            bytes: BYTES as u64,
            opens: side(1 - own),
            seals: side(own),
            dtype: Dtype::F32,
            op: ReduceOp::Sum,
        };
        let sealed: Vec<_> = (0..2)
            .map(|own| {
                let (inbox, tags) = (ranks[1 - own].inbox.pointer(), ranks[1 - own].tags.pointer());
                let rank = &mut ranks[own];
                let input = rank.vector.pointer();
                let memory = ChunkMemory { input, sent: inbox, tags_out: tags, ..ChunkMemory::default() };
                // SAFETY: the ranks' memory; what is sent is read after the event below.
                unsafe { rank.keystream.step(ChunkWork::Seal, &chunk(own), &memory, &rank.stream)? };
                rank.stream.record()
            })
            .collect::<Result<_, Error>>()?;
        for (own, rank) in ranks.iter_mut().enumerate() {
            rank.stream.wait(&sealed[1 - own])?;
            let memory = ChunkMemory {
                input: rank.inbox.pointer(),
                local: rank.vector.pointer(),
                output: rank.vector.pointer(),
                tags_in: rank.tags.pointer(),
                verdicts: rank.verdicts.pointer(),
                ..ChunkMemory::default()
            };
            // SAFETY: the rank's memory, which the other rank has written by now.
            unsafe { rank.keystream.step(ChunkWork::Reduce, &chunk(own), &memory, &rank.stream)? };
            for sender in 0..2 {
                ensure!(rank.keystream.prepare(sequence + 1, side(sender), BYTES as u64)?, "no room");
            }
        }
        let sum: Vec<f32> = vectors[0].iter().zip(&vectors[1]).map(|(a, b)| a + b).collect();
        for (own, rank) in ranks.iter().enumerate() {
            ensure!(
                rank.vector.to_host(&rank.stream)?[..BYTES] == *cast_slice::<_, u8>(&sum),
                "rank {own}, {sequence}: the sum"
            );
            let verdicts = rank.verdicts.to_host(&rank.stream)?;
            let verified = verdicts.chunks(4).all(|word| word == VERIFIED.to_le_bytes());
            ensure!(verified, "rank {own}, {sequence}: a record was refused");
            rank.keystream.synchronize()?;
            // Only the first collective under a key finds nothing.
            let expected = 2 * records as u32 * (1 + sequence as u32 / 4);
            let misses = rank.keystream.misses(&rank.stream)?;
            ensure!(misses == expected, "rank {own}, {sequence}: {misses} missing, not {expected}");
        }
    }
    Ok(())
}
