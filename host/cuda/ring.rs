//! All-reduce on GPUs: one persistent kernel a rank for a whole collective.
//!
//! A [`GpuGroup`] has one rank on each of the devices it is given; a device may be given more than once. Ranks store
//! records straight into their successors' inboxes, over NVLink where they are on different GPUs.

use std::collections::HashMap;
use std::time::Duration;

use ringseal_kernels::record::Call;
use ringseal_kernels::reduce::{is_common, reduction};
use ringseal_kernels::ring::{PLAIN_SHARED, RankState, RingParams, SIGNAL_BYTES, THREADS, failure};
use ringseal_kernels::sealed::{LONGEST_RECORD as LONGEST_SEALED, SEALED_SHARED, SealedRingParams};
use ringseal_kernels::step::{self, Step, ring_all_reduce};
use zeroize::Zeroize;

use super::ring_keys::GroupKeys;
use super::{Device, DeviceBuffer, Kernel, Launch, Module, Stream};
use crate::channel::{AssociatedData, Crypto, GroupSecret, KeyLength, Terms, VERSION, volume};
use crate::collective::{Algorithm, Collective};
use crate::{Dtype, Error, ReduceOp, Result};

/// The longest record that is chosen when none is asked for. Long, because every record costs a wait, a tag and a
/// fence; a block works on one while its successor works on the one before.
const LONGEST_RECORD: usize = 256 << 10;
/// A block's share of a chunk that is worth two records, so that the block works on one while the other is under way.
const WORTH_TWO: usize = 32 << 10;
/// The shortest record that is chosen: a few rounds of all threads.
const SHORTEST_RECORD: usize = 4 << 10;

/// A rank's state before its first collective.
const FIRST: RankState =
    RankState { sequence: 1, failure: 0, aborted: 0, exited: 0, turn: 0, epoch: 0, calls: 0 };

/// How a group is set up.
#[derive(Clone, Debug)]
pub struct GpuOptions {
    /// What protects records.
    pub crypto: Crypto,
    /// How collectives are done: [`Algorithm::Ring`] or [`Algorithm::RelayRing`].
    pub algorithm: Algorithm,
    /// Length in bytes of the longest vector that will be reduced. The inboxes take four times as much on each rank.
    pub max_bytes: usize,
    /// Bytes of a record, a multiple of 16; chosen by the vector's length when `None`.
    pub record_bytes: Option<usize>,
    /// How many multiprocessors a rank may take; all of its device's, shared evenly by the ranks on it, when `None`.
    pub sm_budget: Option<u32>,
    /// How long one collective may take before it fails.
    pub timeout: Duration,
    /// Bytes that a key may encrypt before the next epoch begins. One collective must fit.
    pub key_bytes: u64,
}

impl Default for GpuOptions {
    fn default() -> Self {
        Self {
            crypto: Crypto::Gcm(KeyLength::Aes256),
            algorithm: Algorithm::Ring,
            max_bytes: 64 << 20,
            record_bytes: None,
            sm_budget: None,
            timeout: Duration::from_secs(30),
            key_bytes: volume::DEFAULT_BYTES,
        }
    }
}

/// Where a rank's vector and result lie in its device's memory.
#[derive(Clone, Copy, Debug)]
pub struct RankBuffers {
    /// Device address of the vector.
    pub input: u64,
    /// Device address of the result: the same as `input`, or apart from it.
    pub output: u64,
}

/// Ranks on GPUs that reduce vectors together.
#[derive(Debug)]
pub struct GpuGroup {
    options: GpuOptions,
    ranks: Vec<Rank>,
    /// Blocks of each rank.
    blocks: u32,
    inbox_half: u64,
    signals_half: u64,
    /// `None` without cryptography.
    keys: Option<GroupKeys>,
    poisoned: bool,
}

#[derive(Debug)]
struct Rank {
    /// For the reductions of most gradients.
    common: Kernel,
    /// For all others.
    any: Kernel,
    state: DeviceBuffer,
    states: DeviceBuffer,
    inbox: DeviceBuffer,
    signals: DeviceBuffer,
    /// Step tables by the length of the vector.
    steps: HashMap<usize, DeviceBuffer>,
    /// For set-up and failures; collectives run on the caller's stream.
    stream: Stream,
}

impl GpuGroup {
    /// Sets up one rank on each of `devices`, with the kernels of `image` (PTX or a cubin).
    ///
    /// # Errors
    /// [`Error::Unsupported`] when two devices cannot reach each other's memory; [`Error::InvalidArgument`] for options
    /// out of their domain; [`Error::Cuda`], for example when memory runs out.
    pub fn new(devices: &[Device], image: &[u8], secret: &GroupSecret, options: GpuOptions) -> Result<Self> {
        let count = devices.len();
        if count == 0 || count > 1 << 12 {
            return Err(Error::InvalidArgument(format!("{count} ranks: at least 1 and at most 4096")));
        }
        if options.record_bytes.is_some_and(|bytes| bytes == 0 || bytes % 16 != 0 || bytes > 1 << 30) {
            return Err(Error::InvalidArgument(
                "the record length is not a multiple of 16 from 16 to 1 GiB".into(),
            ));
        }
        if options.crypto != Crypto::None && options.record_bytes.is_some_and(|b| b > LONGEST_SEALED as usize)
        {
            return Err(Error::InvalidArgument(format!(
                "sealed records have at most {LONGEST_SEALED} bytes"
            )));
        }
        let (common, any, shared) = match options.crypto {
            Crypto::None => ("ring_plain", "ring_plain_any", PLAIN_SHARED),
            Crypto::Gcm(KeyLength::Aes128) => ("ring_sealed_128", "ring_sealed_any_128", SEALED_SHARED),
            Crypto::Gcm(KeyLength::Aes256) => ("ring_sealed_256", "ring_sealed_any_256", SEALED_SHARED),
        };
        let relays = match options.algorithm {
            Algorithm::Ring => false,
            Algorithm::RelayRing => true,
            Algorithm::Direct | Algorithm::Tree => {
                let what = format!("the {} algorithm", options.algorithm.name());
                return Err(Error::Unsupported { backend: "cuda", what });
            }
        };
        if relays && count > 2 && options.crypto != Crypto::None {
            let what = "sealed records of a third rank, which the relay ring needs".into();
            return Err(Error::Unsupported { backend: "cuda", what });
        }
        let blocks = blocks_of_a_rank(devices, options.sm_budget)?;
        let longest = longest_chunk(options.max_bytes, count);
        let messages = messages(count) as u64;
        let inbox_half = messages * longest.next_multiple_of(256) as u64;
        let records = records_of(longest, record_bytes(&options, longest, blocks)).max(blocks as usize);
        let signals_half = messages * records as u64;
        let (mut ranks, mut modules) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for device in devices {
            for peer in devices {
                device.enable_peer_access(peer)?;
            }
            let stream = Stream::new(device)?;
            let zeroed = |bytes: u64| {
                let mut buffer = DeviceBuffer::new(device, bytes as usize)?;
                buffer.fill(0, &stream)?;
                Ok::<_, Error>(buffer)
            };
            let state = DeviceBuffer::from_host(bytes_of(&[FIRST]), &stream)?;
            let same = devices.iter().position(|other| other.ordinal() == device.ordinal());
            let module = match same.and_then(|first| modules.get(first)) {
                Some(module) => Module::clone(module),
                None => Module::load(device, image)?,
            };
            ranks.push(Rank {
                common: module.kernel(common, shared)?,
                any: module.kernel(any, shared)?,
                states: DeviceBuffer::new(device, 8 * count)?,
                inbox: zeroed(2 * inbox_half)?,
                signals: zeroed(2 * signals_half * SIGNAL_BYTES)?,
                state,
                steps: HashMap::new(),
                stream,
            });
            modules.push(module);
        }
        let states: Vec<u64> = ranks.iter().map(|rank| rank.state.pointer()).collect();
        for rank in &mut ranks {
            rank.states.write(0, bytes_of(&states), &rank.stream)?;
            rank.stream.synchronize()?;
        }
        let keys = match options.crypto {
            Crypto::None => None,
            Crypto::Gcm(length) => {
                let terms = Terms {
                    ranks: count,
                    crypto: options.crypto,
                    record_bytes: options.record_bytes.unwrap_or(0),
                    key_bytes: options.key_bytes,
                };
                let streams: Vec<_> = ranks.iter().map(|rank| &rank.stream).collect();
                let keys = GroupKeys::new(secret, terms, length, &modules, &streams)?;
                for stream in streams {
                    stream.synchronize()?;
                }
                Some(keys)
            }
        };
        Ok(Self { options, ranks, blocks, inbox_half, signals_half, keys, poisoned: false })
    }

    /// Queues an all-reduce of `count` elements on the ranks' streams, and doesn't wait. Can be captured in a graph, if
    /// the same length was reduced before outside of one.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the vector is longer than the group was set up for, or the buffers and streams
    /// are not one for each rank; [`Error::Poisoned`] after a failure; [`Error::Cuda`].
    ///
    /// # Safety
    /// Each rank's buffers hold `count` elements on its device, aligned to an element, and are left alone until its
    /// stream has passed the collective. The streams run beside each other: none waits for another's collective.
    pub unsafe fn all_reduce(
        &mut self,
        buffers: &[RankBuffers],
        count: usize,
        dtype: Dtype,
        op: ReduceOp,
        streams: &[&Stream],
    ) -> Result<()> {
        let ranks = self.ranks.len();
        if self.poisoned {
            return Err(Error::Poisoned);
        }
        if buffers.len() != ranks || streams.len() != ranks {
            return Err(Error::InvalidArgument(format!(
                "{} buffers and {} streams for {ranks} ranks",
                buffers.len(),
                streams.len()
            )));
        }
        let bytes = count
            .checked_mul(dtype.size())
            .filter(|&bytes| bytes <= self.options.max_bytes)
            .ok_or_else(|| {
                Error::InvalidArgument(format!(
                    "{count} elements of {} bytes: the group was set up for {} bytes",
                    dtype.size(),
                    self.options.max_bytes
                ))
            })?;
        let chunk = longest_chunk(bytes, ranks);
        let record_bytes = record_bytes(&self.options, chunk, self.blocks);
        let records = records_of(chunk, record_bytes);
        for number in 0..ranks {
            let relay = self.options.algorithm == Algorithm::RelayRing;
            self.ranks[number].prepare_steps(number, ranks, bytes, relay)?;
        }
        let reduction = reduction(dtype as u32, op as u32);
        // A rank seals a chunk in each of its messages, and each record takes a tag's mask beside its blocks.
        let calls = messages(ranks) as u64 * (chunk.div_ceil(16) + records) as u64;
        let entered = match &mut self.keys {
            None => false,
            Some(keys) => keys.reserve(calls)?,
        };
        for (number, rank) in self.ranks.iter().enumerate() {
            let successor = &self.ranks[(number + 1) % ranks];
            let steps = &rank.steps[&bytes];
            let params = RingParams {
                state: rank.state.pointer(),
                states: rank.states.pointer(),
                steps: steps.pointer(),
                input: buffers[number].input,
                output: buffers[number].output,
                bytes: bytes as u64,
                inbox: rank.inbox.pointer(),
                outbox: successor.inbox.pointer(),
                inbox_half: self.inbox_half,
                message_stride: chunk.next_multiple_of(256) as u64,
                signals_in: rank.signals.pointer(),
                signals_out: successor.signals.pointer(),
                signals_half: self.signals_half,
                timeout_ns: self.options.timeout.as_nanos() as u64,
                epoch: self.keys.as_ref().map_or(0, GroupKeys::epoch),
                calls,
                calls_limit: self.keys.as_ref().map_or(u64::MAX, GroupKeys::calls_limit),
                step_count: (steps.len() / size_of::<Step>()) as u32,
                records: records as u32,
                record_bytes: record_bytes as u32,
                reduction,
                rank: number as u32,
                ranks: ranks as u32,
            };
            let blocks = self.blocks.min(records.max(1) as u32);
            let kernel = if is_common(reduction) { &rank.common } else { &rank.any };
            let launch = Launch { blocks, threads: THREADS };
            let result = match &self.keys {
                // SAFETY: the plain kernels take `RingParams`; the group's buffers live as long as it, the caller
                // answers for the others.
                None => unsafe { kernel.launch(launch, streams[number], &params) },
                Some(keys) => {
                    let [own, predecessor] = keys.of_rank(number);
                    let call = call(keys.session(), self.options.algorithm, dtype, op, count, ranks);
                    let mut params = SealedRingParams { ring: params, own, predecessor, call };
                    // SAFETY: as above, and the sealed kernels take `SealedRingParams`.
                    let result = unsafe { kernel.launch(launch, streams[number], &params) };
                    params.own.round_keys.zeroize();
                    params.predecessor.round_keys.zeroize();
                    result
                }
            };
            if result.is_err() {
                // Other ranks may have started.
                self.poisoned = true;
                return result;
            }
        }
        if let Some(keys) = &mut self.keys
            && entered
        {
            keys.prepare_next(streams)?;
        }
        Ok(())
    }

    /// Asks how the collectives that the ranks' streams have passed went. Wait for the streams first.
    ///
    /// # Errors
    /// The first failure of any rank: [`Error::Record`] or [`Error::Deadline`]. The group carries no data after it.
    pub fn outcome(&mut self) -> Result<()> {
        for number in 0..self.ranks.len() {
            let rank = &self.ranks[number];
            let mut state = [RankState::default()];
            rank.state.read(0, bytes_of_mut(&mut state), &rank.stream)?;
            let word = state[0].failure;
            if word == 0 {
                continue;
            }
            self.poisoned = true;
            let (step, record) = ((word >> 32 & 0x00ff_ffff) as usize, word as u32 as usize);
            return Err(match word >> 56 {
                failure::AUTHENTICATION => Error::Record { rank: number, step, record },
                failure::EXHAUSTED => Error::KeyExhausted { limit: self.options.key_bytes },
                _ => Error::Deadline {
                    rank: number,
                    peer: (number + self.ranks.len() - 1) % self.ranks.len(),
                    step,
                    waited_ms: self.options.timeout.as_millis() as u64,
                },
            });
        }
        Ok(())
    }

    /// Waits for the ranks' devices, and starts a new session with new keys. Ends the poisoning after a failure.
    ///
    /// # Errors
    /// [`Error::Cuda`], [`Error::Randomness`]. The group is poisoned then.
    pub fn rekey(&mut self) -> Result<()> {
        self.poisoned = true;
        for rank in &self.ranks {
            rank.stream.device().synchronize()?;
        }
        for rank in &mut self.ranks {
            rank.reset()?;
        }
        if let Some(keys) = &mut self.keys {
            let streams: Vec<_> = self.ranks.iter().map(|rank| &rank.stream).collect();
            keys.renew(&streams)?;
        }
        for rank in &self.ranks {
            rank.stream.synchronize()?;
        }
        self.poisoned = false;
        Ok(())
    }

    /// Whether a collective has failed and [`Self::rekey`] is needed.
    pub fn is_poisoned(&self) -> bool {
        self.poisoned
    }

    /// Where the messages to a rank arrive, all that ever crosses: its inbox and its signals.
    pub fn mailbox(&self, rank: usize) -> [&DeviceBuffer; 2] {
        [&self.ranks[rank].inbox, &self.ranks[rank].signals]
    }

    /// Blocks that each rank runs, one on a multiprocessor.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }
}

impl Rank {
    /// Forgets the session's collectives: they are numbered afresh, so no signal of theirs may be left.
    fn reset(&mut self) -> Result<()> {
        self.signals.fill(0, &self.stream)?;
        self.state.write(0, bytes_of(&[FIRST]), &self.stream)
    }

    /// Lowers the schedule for vectors of this length, once.
    fn prepare_steps(&mut self, number: usize, ranks: usize, bytes: usize, relay: bool) -> Result<()> {
        if self.steps.contains_key(&bytes) {
            return Ok(());
        }
        let chunk = |index: u32| step::chunk(index, ranks as u32, bytes as u64);
        let table: Vec<Step> = (0..steps_of(ranks) as u32)
            .map(|index| ring_all_reduce(number as u32, ranks as u32, index, relay, chunk))
            .filter(|_| bytes != 0)
            .collect();
        let buffer = DeviceBuffer::from_host(bytes_of(&table), &self.stream)?;
        self.stream.synchronize()?;
        self.steps.insert(bytes, buffer);
        Ok(())
    }
}

/// How many blocks each rank runs: all of a rank's blocks, and those of the other ranks on its device, must be resident
/// at once, or they would wait for each other in vain.
fn blocks_of_a_rank(devices: &[Device], budget: Option<u32>) -> Result<u32> {
    let mut blocks = budget.unwrap_or(u32::MAX);
    for device in devices {
        let sharing = devices.iter().filter(|other| other.ordinal() == device.ordinal()).count() as u32;
        blocks = blocks.min(device.multiprocessors()? / sharing);
    }
    if blocks == 0 {
        return Err(Error::InvalidArgument(
            "no multiprocessor for a rank: too many ranks on one GPU, or an SM budget of 0".into(),
        ));
    }
    Ok(blocks)
}

/// The first block of the records' additional data, and what else it says of the collective.
fn call(session: u64, algorithm: Algorithm, dtype: Dtype, op: ReduceOp, count: usize, ranks: usize) -> Call {
    let (collective, root) = Collective::AllReduce.code();
    let data = AssociatedData {
        version: VERSION,
        collective,
        algorithm: algorithm as u8,
        dtype: dtype as u8,
        op: op as u8,
        reserved: 0,
        root: root as u16,
        session,
        sequence: 0,
        count: 0,
        sender: 0,
        ranks: 0,
        step: 0,
        record: 0,
        last: 0,
    };
    let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| data.as_bytes()[4 * at + i]));
    Call { codes: [0, 1, 2, 3].map(word), count: count as u64, ranks: ranks as u32, reserved: 0 }
}

/// Messages of each rank in one all-reduce.
fn messages(ranks: usize) -> usize {
    2 * (ranks - 1)
}

fn steps_of(ranks: usize) -> usize {
    messages(ranks) + 1
}

/// Length of the longest chunk in bytes.
fn longest_chunk(bytes: usize, ranks: usize) -> usize {
    step::chunk(0, ranks as u32, bytes as u64).1 as usize
}

/// Bytes of a record for chunks of this length: every block gets its share, in as few records as their limit and
/// [`WORTH_TWO`] allow.
fn record_bytes(options: &GpuOptions, chunk: usize, blocks: u32) -> usize {
    options.record_bytes.unwrap_or_else(|| {
        let share = chunk.div_ceil(blocks as usize);
        let rounds = share.div_ceil(LONGEST_RECORD).max(if share < WORTH_TWO { 1 } else { 2 });
        share.div_ceil(rounds).next_multiple_of(256).max(SHORTEST_RECORD)
    })
}

fn records_of(chunk: usize, record_bytes: usize) -> usize {
    chunk.div_ceil(record_bytes)
}

/// Plain words of a struct or slice that the device reads.
fn bytes_of<T: Copy>(values: &[T]) -> &[u8] {
    // SAFETY: called with `u64`, `Step` and `RankState`, which have no padding.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

fn bytes_of_mut<T: Copy>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: called with `RankState`, which has no padding and no invalid bit patterns.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}
