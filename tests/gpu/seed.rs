//! The all-reduce in the published structure: the tags of its MAC, the bits of its results, and failures.

use std::error::Error;
use std::mem;
use std::ops::Range;
use std::slice::from_ref;

use aes_gcm::aead::{AeadInOut, KeyInit, array::Array};
use aes_gcm::aes::cipher::BlockCipherEncrypt;
use aes_gcm::{Aes256Gcm, aes::Aes256};
use ringseal::channel::{GroupSecret, KeyLength};
use ringseal::collective::Algorithm;
use ringseal::cuda::{
    Collectives, Device, DeviceBuffer, Module, RankBuffers, SeedGroup, SeedKernels, SeedOptions, Stream,
};
use ringseal::{Dtype, Error as Failure, ReduceOp};
use ringseal_kernels::reduce::{combine, finish, reduction};
use ringseal_kernels::step::chunk;
use ringseal_kernels::table_ghash::{MOST_CHAINS, MacKeyParams, MacParams, mac_key_bytes};

use crate::ring::{Meddler, gpus, places};
use crate::support::{
    GpuTest, HostTest, Outcome, all_are, ensure, image, is_small, longest, random, random_bytes,
};
use crate::turns::alone;

pub(crate) const TESTS: &[GpuTest] = &[
    ("seed::tags_are_those_of_the_standard", tags),
    ("seed::plain_of_every_type_and_operation", |gpu| {
        same_bits_as_model(from_ref(gpu), &options(false, Algorithm::Ring))
    }),
    ("seed::sealed_of_every_type_and_operation", |gpu| {
        same_bits_as_model(from_ref(gpu), &options(true, Algorithm::Ring))
    }),
    ("seed::sealed_tree_of_every_type_and_operation", |gpu| {
        same_bits_as_model(from_ref(gpu), &options(true, Algorithm::Tree))
    }),
    ("seed::changed_bytes_fail_at_every_message", |gpu| tamper(from_ref(gpu))),
    ("seed::only_ciphertext_crosses", only_ciphertext_crosses),
    ("seed::new_epochs_on_the_way", epochs),
    ("seed::a_graph_that_would_repeat_nonces_is_refused", graphs),
];

/// For these there must be two GPUs.
pub(crate) const ACROSS_GPUS_TESTS: &[HostTest] = &[
    ("seed::across_gpus::sealed_of_every_type_and_operation", || {
        same_bits_as_model(&gpus()?, &options(true, Algorithm::Ring))
    }),
    ("seed::across_gpus::changed_bytes_fail_at_every_message", || tamper(&gpus()?)),
];

/// Elements of the longest vectors, of any type.
const LONG: usize = (1 << 20) + 3;
const GUARD: u8 = 0xa5;
const GUARD_BYTES: usize = 64;

fn options(crypto: bool, algorithm: Algorithm) -> SeedOptions {
    SeedOptions { crypto, algorithm, chains: 1000, ..SeedOptions::default() }
}

fn words(bytes: &[u8]) -> [u32; 4] {
    std::array::from_fn(|i| u32::from_le_bytes([0, 1, 2, 3].map(|byte| bytes[4 * i + byte])))
}

/// Every number of chains against RustCrypto's AES-GCM.
fn tags(gpu: &Device) -> Outcome {
    let _alone = alone();
    let stream = Stream::new(gpu)?;
    let kernels = SeedKernels::new(&Module::load(gpu, image(gpu)?)?)?;
    let key: [u8; 32] = random()?;
    let cipher = Aes256::new(&key.into());
    let encrypt = |block: [u8; 16]| {
        let mut block = Array::from(block);
        cipher.encrypt_block(&mut block);
        words(&block)
    };
    let scratch = DeviceBuffer::from_host(&[0; 48], &stream)?;
    let mut failure = DeviceBuffer::from_host(&[0; 8], &stream)?;
    let mut tag = DeviceBuffer::new(gpu, 16)?;
    for chains in [1, 2, 127, 128, 1000, 16_896, 40_000, MOST_CHAINS] {
        let mac_key = DeviceBuffer::secret(gpu, mac_key_bytes(chains) as usize)?;
        let params = MacKeyParams { h: encrypt([0; 16]), key: mac_key.pointer(), chains };
        // SAFETY: the buffer has the key's length.
        unsafe { kernels.prepare_mac(&params, &stream)? };
        let round = 16 * chains as usize;
        let mut lengths = vec![0, 1, 15, 16, 17, 4096, round - 16, round, round + 1, 3 * round + 5];
        if chains > 100 && !is_small() {
            lengths.push((32 << 20) + 11);
        }
        for (number, length) in lengths.into_iter().enumerate() {
            let (nonce, aad) = (random::<12>()?, random_bytes([0, 20, 48][number % 3])?);
            let mut text = random_bytes(length)?;
            let sealed = Aes256Gcm::new(&key.into()).encrypt_inout_detached(
                &nonce.into(),
                &aad,
                (&mut text[..]).into(),
            );
            let expected = sealed.map_err(|error| error.to_string())?;
            let mut padded = [0; 48];
            padded[..aad.len()].copy_from_slice(&aad);
            let mut j0 = [0; 16];
            j0[..12].copy_from_slice(&nonce);
            j0[15] = 1;
            // One byte more, so that an empty text has an address too.
            text.push(GUARD);
            let text = DeviceBuffer::from_host(&text, &stream)?;
            tag.fill(GUARD, &stream)?;
            let mut params = MacParams {
                aad: [words(&padded), words(&padded[16..]), words(&padded[32..])],
                mask: encrypt(j0),
                key: mac_key.pointer(),
                text: text.pointer(),
                bytes: length as u64,
                tag: tag.pointer(),
                scratch: scratch.pointer(),
                failure: failure.pointer(),
                place: 7,
                chains,
                aad_bytes: aad.len() as u32,
                check: 0,
            };
            // SAFETY: all buffers live until the reads below have waited for the stream.
            unsafe { kernels.mac(&params, &stream)? };
            let made = tag.to_host(&stream)?;
            ensure!(made[..] == expected[..], "{chains} chains, {length} bytes: {made:02x?}");
            params.check = 1;
            // SAFETY: as above.
            unsafe { kernels.mac(&params, &stream)? };
            ensure!(failure.to_host(&stream)? == [0; 8], "{chains} chains, {length} bytes: refused");
            let at = number % 16;
            tag.write(at, &[made[at] ^ 0x10], &stream)?;
            // SAFETY: as above.
            unsafe { kernels.mac(&params, &stream)? };
            ensure!(failure.to_host(&stream)? == 7u64.to_le_bytes(), "a wrong tag was accepted");
            failure.fill(0, &stream)?;
        }
    }
    ensure!(scratch.to_host(&stream)? == [0; 48], "the scratch was left dirty");
    Ok(())
}

/// One all-reduce of a test, of the elements from `offset` bytes on.
#[derive(Clone, Copy, Debug)]
struct Case {
    dtype: Dtype,
    op: ReduceOp,
    count: usize,
    offset: usize,
    in_place: bool,
}

impl Case {
    fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }
}

/// A group with all that a collective needs.
struct Ranks {
    group: SeedGroup,
    algorithm: Algorithm,
    streams: Vec<Stream>,
    vectors: Vec<Vec<u8>>,
    inputs: Vec<DeviceBuffer>,
    outputs: Vec<DeviceBuffer>,
    /// Memory for what is read from an output: fresh pages for each would take longer than reading it.
    read: Vec<u8>,
}

impl Ranks {
    fn new(devices: &[Device], options: SeedOptions) -> Result<Self, Box<dyn Error>> {
        let vectors = random_vectors(devices.len(), options.max_bytes)?;
        Self::with_vectors(devices, options, vectors)
    }

    /// Of [`random_vectors`], one for each device.
    fn with_vectors(
        devices: &[Device],
        options: SeedOptions,
        vectors: Vec<Vec<u8>>,
    ) -> Result<Self, Box<dyn Error>> {
        let bytes = options.max_bytes + GUARD_BYTES;
        let streams = devices.iter().map(Stream::new).collect::<Result<Vec<_>, _>>()?;
        let mut inputs = Vec::new();
        for (vector, stream) in vectors.iter().zip(&streams) {
            inputs.push(DeviceBuffer::from_host(vector, stream)?);
        }
        let outputs = devices.iter().map(|device| DeviceBuffer::new(device, bytes + GUARD_BYTES));
        let outputs = outputs.collect::<Result<Vec<_>, _>>()?;
        let algorithm = options.algorithm;
        let group = SeedGroup::new(devices, image(&devices[0])?, &GroupSecret::random()?, options)?;
        Ok(Self { group, algorithm, streams, vectors, inputs, outputs, read: Vec::new() })
    }

    fn start(&mut self, case: &Case) -> Result<(), Box<dyn Error>> {
        let streams: Vec<_> = self.streams.iter().collect();
        let mut buffers = Vec::new();
        for (rank, output) in self.outputs.iter_mut().enumerate() {
            output.fill(GUARD, streams[rank])?;
            let mut input = self.inputs[rank].pointer() + case.offset as u64;
            let result = output.pointer() + case.offset as u64;
            if case.in_place {
                // SAFETY: both ranges are inside their buffers, and neither is touched before the copy is done.
                unsafe { streams[rank].copy(result, input, case.bytes())? };
                input = result;
            }
            buffers.push(RankBuffers { input, output: result });
        }
        // SAFETY: the buffers live until all streams are waited for, below or when they are freed; `count` elements lie
        // inside.
        unsafe { self.group.all_reduce(&buffers, case.count, case.dtype, case.op, &streams)? };
        Ok(())
    }

    fn wait(&self) -> Outcome {
        self.streams.iter().try_for_each(Stream::synchronize)?;
        Ok(())
    }

    /// Reads a rank's output; where in `bytes` its result lies, once it is sure that nothing around it was written.
    fn read(&self, case: &Case, rank: usize, bytes: &mut Vec<u8>) -> Result<Range<usize>, Box<dyn Error>> {
        let end = case.offset + case.bytes();
        bytes.resize(end + GUARD_BYTES, 0);
        self.outputs[rank].read(0, bytes, &self.streams[rank])?;
        let untouched = all_are(&bytes[..case.offset], GUARD) && all_are(&bytes[end..], GUARD);
        ensure!(untouched, "{case:?}: rank {rank} wrote beyond its result");
        Ok(case.offset..end)
    }

    /// As [`expected`] of these ranks' vectors.
    fn expected(&self, case: &Case) -> Vec<u8> {
        expected(&self.vectors, case, self.algorithm)
    }

    fn succeeds(&mut self, case: &Case, expected: &[u8]) -> Outcome {
        self.start(case)?;
        self.wait()?;
        self.group.outcome().map_err(|error| format!("{case:?}: {error}"))?;
        let ranks = self.vectors.len();
        let mut bytes = mem::take(&mut self.read);
        for rank in 0..ranks {
            let place = self.read(case, rank, &mut bytes)?;
            let result = &bytes[place];
            // Slices are compared many bytes at a time; which byte it is matters only then.
            if result != expected {
                let at = (0..result.len()).find(|&at| result[at] != expected[at]).unwrap_or(0);
                let (found, right) = (result[at], expected[at]);
                return Err(format!(
                    "{case:?}, {ranks} ranks: byte {at} on rank {rank} is {found:#04x}, not {right:#04x}"
                )
                .into());
            }
        }
        self.read = bytes;
        Ok(())
    }
}

/// Random vectors of up to `max_bytes` bytes for so many ranks, and a guard's bytes more each.
fn random_vectors(ranks: usize, max_bytes: usize) -> Result<Vec<Vec<u8>>, Box<dyn Error>> {
    (0..ranks).map(|_| random_bytes(max_bytes + GUARD_BYTES)).collect()
}

/// What every rank must get: one operand after the other, each sum rounded.
fn expected(vectors: &[Vec<u8>], case: &Case, algorithm: Algorithm) -> Vec<u8> {
    let ranks = vectors.len();
    let input = |rank: usize| &vectors[rank][case.offset..][..case.bytes()];
    if ranks == 1 {
        return input(0).to_vec();
    }
    let reduction = reduction(case.dtype as u32, case.op as u32);
    let mut sum = match algorithm {
        Algorithm::Tree => tree(&input, 0, ranks, reduction),
        _ => {
            let mut sum = vec![0; case.bytes()];
            for index in 0..ranks {
                let (at, bytes) = chunk(index as u32, ranks as u32, case.bytes() as u64);
                let range = at as usize..(at + bytes) as usize;
                let sum = &mut sum[range.clone()];
                sum.copy_from_slice(&input(index)[range.clone()]);
                for rank in index + 1..index + ranks {
                    quads(sum, &input(rank % ranks)[range.clone()], |a, b| combine(reduction, a, b));
                }
            }
            sum
        }
    };
    each_quad(&mut sum, |sum| finish(reduction, ranks as u32, sum));
    sum
}

/// `(x[v] + t(2v+1)) + t(2v+2)`.
fn tree<'a>(input: &dyn Fn(usize) -> &'a [u8], node: usize, ranks: usize, reduction: u32) -> Vec<u8> {
    let mut sum = input(node).to_vec();
    for child in [2 * node + 1, 2 * node + 2] {
        if child < ranks {
            quads(&mut sum, &tree(input, child, ranks, reduction), |a, b| combine(reduction, a, b));
        }
    }
    sum
}

/// An operation on vectors, quad by quad; the result replaces the first.
fn quads(a: &mut [u8], b: &[u8], operation: impl Fn([u32; 4], [u32; 4]) -> [u32; 4]) {
    let mut others = b.chunks(16);
    each_quad(a, |a| operation(a, quad(others.next().unwrap_or_default())));
}

/// Replaces each quad, of which the last may be cut short.
fn each_quad(bytes: &mut [u8], mut operation: impl FnMut([u32; 4]) -> [u32; 4]) {
    for bytes in bytes.chunks_mut(16) {
        let result = operation(quad(bytes)).map(u32::to_le_bytes);
        bytes.copy_from_slice(&result.as_flattened()[..bytes.len()]);
    }
}

/// Up to 16 bytes, and zeros after them.
fn quad(bytes: &[u8]) -> [u32; 4] {
    let mut block = [0; 16];
    block[..bytes.len()].copy_from_slice(bytes);
    words(&block)
}

/// Random bits, so infinities, subnormal numbers and NaNs of all payloads are among the floats.
fn same_bits_as_model(gpus: &[Device], options: &SeedOptions) -> Outcome {
    let long = LONG.min(longest() / 8);
    let mut cases = Vec::new();
    for dtype in Dtype::ALL {
        for op in ReduceOp::ALL {
            for count in [0, 1, 15, 33, 1023] {
                let number = cases.len();
                let offset = if number.is_multiple_of(3) { dtype.size() } else { 0 };
                cases.push(Case { dtype, op, count, offset, in_place: number % 2 == 1 });
            }
        }
    }
    for (dtype, op) in [(Dtype::F32, ReduceOp::Sum), (Dtype::Bf16, ReduceOp::Avg), (Dtype::I8, ReduceOp::Max)]
    {
        cases.push(Case { dtype, op, count: long, offset: 0, in_place: false });
    }
    let mut prepared = Vec::new();
    // The model's part comes first, while others have the GPU.
    for ranks in [1, 2, 3, 4, 8] {
        if is_small() && ranks > 3 {
            continue;
        }
        let vectors = random_vectors(ranks, 4 * long)?;
        let right: Vec<_> = cases.iter().map(|case| expected(&vectors, case, options.algorithm)).collect();
        prepared.push((vectors, right));
    }
    let _alone = alone();
    for (number, (vectors, right)) in prepared.into_iter().enumerate() {
        let key = [KeyLength::Aes128, KeyLength::Aes256][number % 2];
        let options = SeedOptions { max_bytes: 4 * long, key, ..options.clone() };
        let mut ranks = Ranks::with_vectors(&places(gpus, vectors.len()), options, vectors)?;
        for (case, right) in cases.iter().zip(&right) {
            ranks.succeeds(case, right)?;
        }
    }
    Ok(())
}

/// Overwrites four bytes of a message or of its tag between the copy and the check, by a storm of stores that begins before
/// the collective.
fn tamper(gpus: &[Device]) -> Outcome {
    let _alone = alone();
    const CHUNK: usize = 4 << 20;
    for (count, algorithm) in [(2, Algorithm::Ring), (3, Algorithm::Ring), (4, Algorithm::Tree)] {
        let devices = places(gpus, count);
        let chunks = if algorithm == Algorithm::Ring { count } else { 1 };
        let bytes = CHUNK * chunks;
        let options = SeedOptions { max_bytes: bytes, ..self::options(true, algorithm) };
        let mut ranks = Ranks::new(&devices, options)?;
        let case =
            Case { dtype: Dtype::F32, op: ReduceOp::Sum, count: bytes / 4, offset: 0, in_place: false };
        let expected = ranks.expected(&case);
        // Loads the kernels, which may have to wait for those that run.
        ranks.succeeds(&case, &expected)?;
        let mut bytes = Vec::new();
        for (victim, device) in devices.iter().enumerate() {
            let mut meddler = Meddler::new(device)?;
            let storm = Stream::new(device)?;
            let (_, slot_bytes) = ranks.group.mailbox(victim);
            let slots = ranks.group.mailbox(victim).0.len() / slot_bytes;
            for slot in 0..slots {
                for at in [0, CHUNK / 2 + 12, CHUNK - 4, CHUNK, CHUNK + 12] {
                    let address = ranks.group.mailbox(victim).0.pointer() + (slot * slot_bytes + at) as u64;
                    meddler.start(8, address, &storm)?;
                    ranks.start(&case)?;
                    ranks.wait()?;
                    meddler.stop()?;
                    storm.synchronize()?;
                    match ranks.group.outcome() {
                        Err(Failure::Record { rank, record: 0, .. }) if rank == victim => {}
                        other => {
                            return Err(format!(
                                "{count} ranks, {algorithm:?}: message {slot} to rank {victim}, byte {at}: {other:?}"
                            )
                            .into());
                        }
                    }
                    for rank in 0..count {
                        let place = ranks.read(&case, rank, &mut bytes)?;
                        let result = &bytes[place];
                        let wiped = all_are(result, 0);
                        // Ranks that nothing reached that came from the refused message keep what is right.
                        let complete = rank != victim && *result == expected[..];
                        ensure!(wiped || complete, "message {slot} to rank {victim}: rank {rank} kept data");
                    }
                    ensure!(ranks.group.is_poisoned(), "not poisoned");
                    match ranks.start(&case) {
                        Err(error) if matches!(error.downcast_ref(), Some(Failure::Poisoned)) => {}
                        other => return Err(format!("a poisoned group gave {other:?}").into()),
                    }
                    ranks.group.rekey()?;
                }
                ranks.succeeds(&case, &expected)?;
                ranks.succeeds(&case, &expected)?;
            }
        }
    }
    Ok(())
}

/// All that the ranks' memory received is looked through for a plaintext that would be seen.
fn only_ciphertext_crosses(gpu: &Device) -> Outcome {
    let _alone = alone();
    let bytes = 1 << 20;
    let ones = 1.0f32.to_le_bytes().repeat(bytes / 4);
    for (crypto, readable) in [(false, true), (true, false)] {
        let options = SeedOptions { max_bytes: bytes, ..options(crypto, Algorithm::Ring) };
        let mut ranks = Ranks::new(&places(from_ref(gpu), 3), options)?;
        for (input, stream) in ranks.inputs.iter_mut().zip(&ranks.streams) {
            input.write(0, &ones, stream)?;
        }
        ranks.vectors.iter_mut().for_each(|vector| vector[..bytes].copy_from_slice(&ones));
        let case = Case { dtype: Dtype::F32, op: ReduceOp::Sum, count: bytes / 4, offset: 0, in_place: true };
        let expected = ranks.expected(&case);
        ranks.succeeds(&case, &expected)?;
        for rank in 0..3 {
            let received = ranks.group.mailbox(rank).0.to_host(&ranks.streams[rank])?;
            let found = [1.0f32, 2.0, 3.0].map(|sum| {
                let sums = sum.to_le_bytes().repeat(4);
                received.chunks_exact(16).any(|block| block == sums)
            });
            ensure!(found == [readable; 3], "crypto {crypto}: rank {rank} received sums in plain: {found:?}");
        }
    }
    Ok(())
}

/// Keys that last for two collectives or one, without a wait between them.
fn epochs(gpu: &Device) -> Outcome {
    let _alone = alone();
    let bytes = 1 << 18;
    let case = Case { dtype: Dtype::Bf16, op: ReduceOp::Avg, count: bytes / 2, offset: 0, in_place: false };
    for key_bytes in [3 * bytes as u64, 5 * bytes as u64] {
        let options = SeedOptions { max_bytes: bytes, key_bytes, ..options(true, Algorithm::Ring) };
        let mut ranks = Ranks::new(&places(from_ref(gpu), 2), options)?;
        for _ in 0..9 {
            ranks.start(&case)?;
        }
        let expected = ranks.expected(&case);
        ranks.succeeds(&case, &expected)?;
    }
    let options = SeedOptions { max_bytes: bytes, key_bytes: 1 << 10, ..options(true, Algorithm::Ring) };
    match Ranks::new(&places(from_ref(gpu), 2), options)?.start(&case) {
        Err(error) if matches!(error.downcast_ref(), Some(Failure::KeyExhausted { .. })) => Ok(()),
        other => Err(format!("more than a key may encrypt gave {other:?}").into()),
    }
}

fn graphs(gpu: &Device) -> Outcome {
    let _alone = alone();
    let options = SeedOptions { max_bytes: 1 << 16, ..options(true, Algorithm::Ring) };
    let mut ranks = Ranks::new(&places(from_ref(gpu), 1), options)?;
    let buffers = [RankBuffers { input: ranks.inputs[0].pointer(), output: ranks.outputs[0].pointer() }];
    let (group, streams) = (&mut ranks.group, &ranks.streams);
    let captured = streams[0].capture(|stream| {
        // SAFETY: refused before anything is queued.
        unsafe { group.all_reduce(&buffers, 100, Dtype::F32, ReduceOp::Sum, &[stream]) }
    });
    ensure!(matches!(captured, Err(Failure::InvalidArgument(_))), "{captured:?}");
    let case = Case { dtype: Dtype::F32, op: ReduceOp::Sum, count: 100, offset: 0, in_place: false };
    let expected = ranks.expected(&case);
    ranks.succeeds(&case, &expected)
}
