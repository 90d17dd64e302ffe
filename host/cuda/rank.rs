//! One rank on a GPU: its mailbox, its keys, its kernels. Where the other ranks are, in this process or in others, is no
//! business of its own: it has addresses of theirs that its device can reach.

use std::collections::HashMap;
use std::mem::offset_of;
use std::ops::Range;

use ringseal_kernels::exchange::{self, EXCHANGE_SHARED, ExchangeParams};
use ringseal_kernels::fused::FUSED_SHARED;
use ringseal_kernels::mesh::{Mesh, MeshParams, Outbox, failed_parts, scratch_bytes, started_at};
use ringseal_kernels::record::Call;
use ringseal_kernels::reduce::{is_common, reduction};
use ringseal_kernels::ring::{Notice, PLAIN_SHARED, RankState, RingParams, SIGNAL_BYTES, THREADS, failure};
use ringseal_kernels::sealed::{LONGEST_RECORD as LONGEST_SEALED, SEALED_SHARED, SealedRingParams};
use ringseal_kernels::sealed_mesh::{SEALED_MESH_SHARED, SealedMeshParams};
use ringseal_kernels::short::LONGEST_SHORT_RECORD;
use ringseal_kernels::step::Step;
use zeroize::Zeroize;

use super::ahead::{Ahead, KeystreamAhead, TakenPads};
use super::collectives::no_keystream;
use super::mesh_plan::Destination;
use super::rank_keystream::{Longest, RankKeystream, sides};
use super::ring_keys::RankKeys;
use super::ring_plan::{Part, Plan};
use super::stream::Event;
use super::{Device, DeviceBuffer, GpuOptions, Kernel, Launch, LaunchForm, Module, RankBuffers, Stream};
use crate::channel::{AssociatedData, Crypto, GroupSecret, KeyLength, NO_OP, Root, Terms, VERSION};
use crate::collective::{Algorithm, Bootstrap, Collective, Request, agree};
use crate::keystream::{Planned, StepSides};
use crate::transport::LONGEST_WAIT;
use crate::{Dtype, Error, ReduceOp, Result};

/// The longest record that is chosen when none is asked for. Long, because every record costs a wait, a tag and a
/// fence; a block works on one while its successor works on the one before.
pub(crate) const LONGEST_RECORD: usize = LONGEST_SEALED as usize;
/// The longest of a sealed exchange.
pub(crate) const LONGEST_EXCHANGED: usize = exchange::LONGEST_RECORD as usize;
/// A block's share of a chunk that is worth two records, so that the block works on one while the other is under way.
const WORTH_TWO: usize = 128 << 10;
/// The shortest record that is chosen: a few rounds of all threads.
const SHORTEST_RECORD: usize = 4 << 10;

/// Ranks that speak to each other at most, where not only neighbours on a ring do: the table of a rank's steps, and the
/// time it takes to make one, grow with their number.
const MOST_MESHED: usize = 256;

/// A rank's state before its first collective.
const FIRST: RankState =
    RankState { sequence: 1, failure: 0, aborted: 0, exited: 0, turn: 0, epoch: 0, calls: 0 };

/// Epochs of a session are below 2 to this; above stands the session's number.
const EPOCH_BITS: u32 = 40;

/// Where a rank's messages arrive: addresses that the rank which holds them can reach.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mailbox {
    /// Its [`Notice`], which others mark when they fail.
    pub(super) notice: u64,
    /// Its inbox.
    pub(super) inbox: u64,
    /// Its signals.
    pub(super) signals: u64,
}

/// How another rank fares, as far as it can be told from here.
pub(super) enum Remote {
    /// It has not failed.
    Fine,
    /// It saw this.
    Failed(Error),
    /// Its state can't be read.
    Unreachable,
}

/// A collective that a rank is ready for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ready {
    request: Request,
    count: usize,
    dtype: Dtype,
    plan: Plan,
    /// Which of its launches.
    part: Part,
    /// Bytes of the longest chunk, and of a record.
    chunk: usize,
    record_bytes: usize,
    /// Records of the longest chunk.
    records: usize,
}

impl Ready {
    /// One launch of it.
    pub(super) fn only(self, part: Part) -> Self {
        Self { part, ..self }
    }

    /// What the ranks do.
    pub(super) fn plan(&self) -> Plan {
        self.plan
    }

    /// Block cipher calls of a rank at most: each record takes a tag's mask beside its blocks.
    fn calls(&self) -> u64 {
        self.plan.seals() as u64 * (self.chunk.div_ceil(16) + self.records) as u64
    }
}

/// A kernel that is loaded when it is first asked for, and compiled then where it is the embedded one.
#[derive(Debug)]
struct Lazy {
    kernel: Option<Kernel>,
    name: &'static str,
    shared: u32,
}

impl Lazy {
    fn new(name: &'static str, shared: u32) -> Self {
        Self { kernel: None, name, shared }
    }

    /// May wait for the device, but not the second time.
    fn get(&mut self, module: &Module) -> Result<&Kernel> {
        match &mut self.kernel {
            Some(kernel) => Ok(kernel),
            none => Ok(none.insert(module.kernel(self.name, self.shared)?)),
        }
    }
}

/// A kernel for the reductions of most gradients, and one for all others, which takes long to compile and which few need.
#[derive(Debug)]
struct Pair {
    common: Kernel,
    any: Lazy,
}

impl Pair {
    fn new(module: &Module, common: &str, any: &'static str, shared: u32) -> Result<Self> {
        Ok(Self { common: module.kernel(common, shared)?, any: Lazy::new(any, shared) })
    }

    /// May wait for the device, but not where the same was asked for before.
    fn get(&mut self, module: &Module, common: bool) -> Result<&Kernel> {
        if common { Ok(&self.common) } else { self.any.get(module) }
    }
}

/// What the all-reduce of a sealed exchange needs beside what the other collectives do.
#[derive(Debug)]
struct SealedExchange {
    kernels: Pair,
    /// How far the rank's sealing blocks have come, a word each.
    sealed: DeviceBuffer,
}

impl SealedExchange {
    fn new(module: &Module, length: KeyLength, blocks: u32, stream: &Stream) -> Result<Self> {
        let (common, any) = match length {
            KeyLength::Aes128 => ("exchange_sealed_128", "exchange_sealed_any_128"),
            KeyLength::Aes256 => ("exchange_sealed_256", "exchange_sealed_any_256"),
        };
        let mut sealed = DeviceBuffer::new(module.device(), 8 * blocks as usize)?;
        sealed.fill(0, stream)?;
        Ok(Self { kernels: Pair::new(module, common, any, EXCHANGE_SHARED)?, sealed })
    }
}

/// The table of a rank's steps in one collective.
#[derive(Debug)]
struct StepTable {
    /// [`Step`]s, then the mesh's [`Outbox`]es.
    buffer: DeviceBuffer,
    steps: usize,
    /// What they seal and open, where keystream is kept.
    sides: Vec<StepSides>,
}

impl StepTable {
    fn outboxes(&self) -> u64 {
        self.buffer.pointer() + (self.steps * size_of::<Step>()) as u64
    }
}

/// One rank of a group.
#[derive(Debug)]
pub(super) struct GpuRank {
    rank: usize,
    ranks: usize,
    options: GpuOptions,
    kernels: Pair,
    /// For sealed collectives of short records round a ring.
    short: Option<Lazy>,
    module: Module,
    blocks: u32,
    /// For a sealed exchange.
    exchange: Option<SealedExchange>,
    /// Made ahead of time.
    keystream: Option<RankKeystream>,
    /// Its [`RankState`], which no other rank reaches.
    state: DeviceBuffer,
    notice: DeviceBuffer,
    notices: DeviceBuffer,
    inbox: DeviceBuffer,
    signals: DeviceBuffer,
    inbox_half: u64,
    signals_half: u64,
    /// Of all ranks, by rank; empty until [`Self::connect`].
    mailboxes: Vec<Mailbox>,
    /// Step tables.
    steps: HashMap<Plan, StepTable>,
    /// Where the mesh's kernels keep partial results, in plain.
    scratch: Option<DeviceBuffer>,
    /// `None` without cryptography, and before the first session.
    keys: Option<RankKeys>,
    /// Whether the collective that is being launched begins an epoch of keys.
    entered: bool,
    /// After the latest collective.
    latest: Event,
    /// Which session with keys this is: see [`device_epoch`](Self::device_epoch).
    session: u64,
    /// For set-up and failures; collectives run on the caller's stream.
    stream: Stream,
    /// Also before the first session.
    poisoned: bool,
}

/// Refuses options that no group of `ranks` ranks can work with.
pub(super) fn check(options: &GpuOptions, ranks: usize) -> Result<()> {
    if ranks == 0 || ranks > 1 << 12 {
        return Err(Error::InvalidArgument(format!("{ranks} ranks: at least 1 and at most 4096")));
    }
    if options.record_bytes.is_some_and(|bytes| bytes == 0 || bytes % 16 != 0 || bytes > 1 << 30) {
        return Err(Error::InvalidArgument(
            "the record length is not a multiple of 16 from 16 to 1 GiB".into(),
        ));
    }
    if options.crypto != Crypto::None && options.record_bytes.is_some_and(|b| b > LONGEST_SEALED as usize) {
        return Err(Error::InvalidArgument(format!("sealed records have at most {LONGEST_SEALED} bytes")));
    }
    if options.crypto != Crypto::None
        && options.algorithm == Algorithm::Exchange
        && ranks == 2
        && options.launch != LaunchForm::PerStep
        && options.record_bytes.is_some_and(|bytes| bytes > LONGEST_EXCHANGED)
    {
        return Err(Error::InvalidArgument(format!(
            "the records of two ranks' sealed exchange have at most {LONGEST_EXCHANGED} bytes"
        )));
    }
    if options.launch == LaunchForm::PerStep && !launches_per_step(options.algorithm, ranks) {
        let what = format!(
            "the {} algorithm in a launch for each step: use ring or relay, or the persistent form",
            options.algorithm.name()
        );
        return Err(Error::Unsupported { backend: "cuda", what });
    }
    if let Some(keystream) = &options.keystream {
        keystream.check()?;
        let kernels = match options.algorithm {
            Algorithm::Ring | Algorithm::RelayRing => ranks > 1,
            Algorithm::Exchange => ranks == 2,
            Algorithm::Direct | Algorithm::Tree => false,
        };
        if options.crypto == Crypto::None || !kernels || options.launch == LaunchForm::PerStep {
            let what =
                "keystream ahead of time but in sealed rings, and exchanges of two ranks, of one launch"
                    .into();
            return Err(Error::Unsupported { backend: "cuda", what });
        }
    }
    if ranks > MOST_MESHED && Plan::meshes(options.algorithm, ranks) {
        let what = format!("the {} algorithm of more than {MOST_MESHED} ranks", options.algorithm.name());
        return Err(Error::Unsupported { backend: "cuda", what });
    }
    Ok(())
}

/// Whether the algorithm's steps can each be a launch: where every rank receives from its predecessor only.
pub(super) const fn launches_per_step(algorithm: Algorithm, ranks: usize) -> bool {
    !Plan::meshes(algorithm, ranks)
}

/// Refuses anything but a buffer and a stream for each of `ranks` ranks.
pub(super) fn check_one_each(buffers: &[RankBuffers], streams: &[&Stream], ranks: usize) -> Result<()> {
    if buffers.len() != ranks || streams.len() != ranks {
        return Err(Error::InvalidArgument(format!(
            "{} buffers and {} streams for {ranks} ranks",
            buffers.len(),
            streams.len()
        )));
    }
    Ok(())
}

/// Bytes of a vector of `count` elements, if the group was set up for so many.
pub(super) fn vector_bytes(count: usize, dtype: Dtype, max_bytes: usize) -> Result<usize> {
    count.checked_mul(dtype.size()).filter(|&bytes| bytes <= max_bytes).ok_or_else(|| {
        Error::InvalidArgument(format!(
            "{count} elements of {} bytes: the group was set up for {max_bytes} bytes",
            dtype.size()
        ))
    })
}

/// Whether records come that others than the predecessor have sealed. With two ranks the predecessor is the only other.
fn opens_any_sender(options: &GpuOptions, ranks: usize) -> bool {
    options.algorithm == Algorithm::RelayRing && ranks > 2 || Plan::meshes(options.algorithm, ranks)
}

/// How many blocks each of the ranks that share a device may run: all of a rank's blocks, and those of the other ranks on
/// its device, must be resident at once, or they would wait for each other in vain.
pub(super) fn shared_blocks(multiprocessors: u32, sharing: usize) -> Result<u32> {
    match multiprocessors / (sharing as u32).max(1) {
        0 => Err(Error::InvalidArgument(format!(
            "{sharing} ranks on one GPU, which has {multiprocessors} multiprocessors: each rank needs one"
        ))),
        blocks => Ok(blocks),
    }
}

impl GpuRank {
    /// Allocates what rank `rank` of `ranks` needs on the module's device. All ranks have the same options, which
    /// [`check`] allows, and the same number of blocks. Can be used after [`Self::connect`] and a session's begin.
    pub(super) fn new(
        module: &Module,
        rank: usize,
        ranks: usize,
        blocks: u32,
        options: &GpuOptions,
    ) -> Result<Self> {
        let device = module.device();
        let meshes = Plan::meshes(options.algorithm, ranks);
        let (common, any, shared) = match (options.crypto, opens_any_sender(options, ranks)) {
            (Crypto::None, _) if meshes => ("mesh_plain", "mesh_plain_any", PLAIN_SHARED),
            (Crypto::Gcm(KeyLength::Aes128), _) if meshes => {
                ("mesh_sealed_128", "mesh_sealed_any_128", SEALED_MESH_SHARED)
            }
            (Crypto::Gcm(KeyLength::Aes256), _) if meshes => {
                ("mesh_sealed_256", "mesh_sealed_any_256", SEALED_MESH_SHARED)
            }
            (Crypto::None, _) => ("ring_plain", "ring_plain_any", PLAIN_SHARED),
            (Crypto::Gcm(KeyLength::Aes128), false) => {
                ("ring_sealed_128", "ring_sealed_any_128", FUSED_SHARED)
            }
            (Crypto::Gcm(KeyLength::Aes256), false) => {
                ("ring_sealed_256", "ring_sealed_any_256", FUSED_SHARED)
            }
            (Crypto::Gcm(KeyLength::Aes128), true) => {
                ("relay_sealed_128", "relay_sealed_any_128", FUSED_SHARED)
            }
            (Crypto::Gcm(KeyLength::Aes256), true) => {
                ("relay_sealed_256", "relay_sealed_any_256", FUSED_SHARED)
            }
        };
        let short = match options.crypto {
            Crypto::Gcm(KeyLength::Aes128) if !meshes => Some(Lazy::new("relay_short_128", SEALED_SHARED)),
            Crypto::Gcm(KeyLength::Aes256) if !meshes => Some(Lazy::new("relay_short_256", SEALED_SHARED)),
            _ => None,
        };
        let stream = Stream::new(device)?;
        let exchange = match options.crypto {
            // Its own kernel seals and opens at once. Step by step the ring's does the same, with the same records.
            Crypto::Gcm(length)
                if options.algorithm == Algorithm::Exchange
                    && ranks == 2
                    && options.launch != LaunchForm::PerStep =>
            {
                Some(SealedExchange::new(module, length, blocks, &stream)?)
            }
            _ => None,
        };
        let keystream = match (options.crypto, &options.keystream) {
            (Crypto::Gcm(length), Some(keystream)) => {
                let exchange = exchange.is_some();
                let longest = longest_with_keystream(options, ranks, blocks, exchange, keystream);
                Some(RankKeystream::new(module, length, &longest, keystream)?)
            }
            _ => None,
        };
        let (mut inbox_half, mut signals_half, mut longest_chunk) = (0, 0, 0);
        for plan in Plan::longest_of_each(options.algorithm, ranks, options.max_bytes) {
            let (messages, longest) = (plan.messages() as u64, plan.longest_chunk());
            let records = match &exchange {
                Some(_) if plan.collective == Collective::AllReduce => {
                    most_exchanged_records(options, longest, blocks)
                }
                _ => most_records(options, longest, blocks),
            };
            longest_chunk = longest_chunk.max(longest);
            inbox_half = inbox_half.max(messages * message_stride(longest) as u64);
            signals_half = signals_half.max(messages * records as u64);
        }
        // The sealed kernels count an inbox's quads in 32 bits.
        if options.crypto != Crypto::None && 2 * inbox_half > 1 << 36 {
            return Err(Error::InvalidArgument(format!(
                "vectors of {} bytes among {ranks} ranks need inboxes of {} bytes; sealed ones have at most 2^36: lower max_bytes",
                options.max_bytes,
                2 * inbox_half
            )));
        }
        let shared_zeros = |bytes: u64| {
            let mut buffer = DeviceBuffer::shareable(device, bytes as usize)?;
            buffer.fill(0, &stream)?;
            Ok::<_, Error>(buffer)
        };
        let state = DeviceBuffer::from_host(bytes_of(&[FIRST]), &stream)?;
        Ok(Self {
            rank,
            ranks,
            options: options.clone(),
            kernels: Pair::new(module, common, any, shared)?,
            short,
            module: module.clone(),
            blocks,
            exchange,
            keystream,
            notice: shared_zeros(started_at(ranks as u32))?,
            notices: DeviceBuffer::new(device, 8 * ranks)?,
            inbox: shared_zeros(2 * inbox_half)?,
            signals: shared_zeros(2 * signals_half * SIGNAL_BYTES)?,
            state,
            inbox_half,
            signals_half,
            mailboxes: Vec::new(),
            steps: HashMap::new(),
            scratch: match meshes {
                true => Some(DeviceBuffer::secret(device, scratch_bytes(longest_chunk as u64) as usize)?),
                false => None,
            },
            keys: None,
            entered: false,
            latest: Event::untimed(device)?,
            session: 0,
            stream,
            poisoned: true,
        })
    }

    /// This rank's mailbox, at addresses of its own device and process.
    pub(super) fn own_mailbox(&self) -> Mailbox {
        Mailbox {
            notice: self.notice.pointer(),
            inbox: self.inbox.pointer(),
            signals: self.signals.pointer(),
        }
    }

    /// Takes all ranks' mailboxes, by rank, at addresses that this rank's device can reach. They must stay so as long as
    /// this rank lives.
    pub(super) fn connect(&mut self, mailboxes: &[Mailbox]) -> Result<()> {
        let notices: Vec<u64> = mailboxes.iter().map(|mailbox| mailbox.notice).collect();
        self.notices.write(0, bytes_of(&notices), &self.stream)?;
        self.mailboxes = mailboxes.to_vec();
        Ok(())
    }

    /// What the ranks agree on.
    pub(super) fn terms(options: &GpuOptions, ranks: usize) -> Terms {
        Terms {
            ranks,
            crypto: options.crypto,
            record_bytes: options.record_bytes.unwrap_or(0),
            key_bytes: options.key_bytes,
        }
    }

    /// Begins a session whose ranks have all forgotten the one before.
    pub(super) fn begin(&mut self, root: &Root) -> Result<()> {
        match (self.options.crypto, &mut self.keys) {
            (Crypto::None, _) => {}
            (Crypto::Gcm(_), Some(keys)) => keys.renew(root.clone(), &self.stream)?,
            (Crypto::Gcm(length), keys @ None) => {
                let terms = Self::terms(&self.options, self.ranks);
                let any_sender = opens_any_sender(&self.options, self.ranks);
                let (root, module, stream) = (root.clone(), &self.module, &self.stream);
                *keys = Some(RankKeys::new(root, terms, self.rank, any_sender, length, module, stream)?);
            }
        }
        self.stream.synchronize()?;
        if let (Some(keys), Some(keystream)) = (&self.keys, &mut self.keystream) {
            keystream.ahead.begin(keys.round_keys()?)?;
        }
        self.poisoned = false;
        Ok(())
    }

    /// Waits for the device, and starts a new session with new keys together with all other ranks. Ends the poisoning.
    ///
    /// # Errors
    /// [`Error::Handshake`], [`Error::Cuda`], [`Error::Randomness`]. The rank is poisoned then.
    pub(super) fn rekey(&mut self, secret: &GroupSecret, bootstrap: &mut dyn Bootstrap) -> Result<()> {
        self.poisoned = true;
        let (terms, rank, timeout) =
            (Self::terms(&self.options, self.ranks), self.rank, self.options.timeout);
        let idle = self.stream.device().synchronize();
        // A rank clears its mailbox when no rank's kernel writes there any more, and before any rank's next one may.
        let clear = || idle.and_then(|()| self.reset());
        let root = agree(secret, terms, rank, bootstrap, timeout, clear)?;
        self.begin(&root)
    }

    /// The epoch as the device's state has it, and each launch: of a later session always a later one. A graph carries the keys of
    /// the session in which it was captured, and the kernels refuse what is of an earlier epoch than their rank's state. Without
    /// the session's number a graph from before a rekeying would seal again under nonces that its keys have had.
    fn device_epoch(&self, epoch: u64) -> Result<u64> {
        let whole = self.session.checked_mul(1 << EPOCH_BITS).filter(|_| epoch >> EPOCH_BITS == 0);
        whole.map(|session| session | epoch).ok_or(Error::KeyExhausted { limit: self.options.key_bytes })
    }

    /// Forgets the session's collectives: they are numbered afresh, so no signal of theirs may be left.
    fn reset(&mut self) -> Result<()> {
        // Plain launches carry no keys, and stay as good as they were.
        self.session += u64::from(self.keys.is_some());
        self.signals.fill(0, &self.stream)?;
        self.notice.fill(0, &self.stream)?;
        if let Some(SealedExchange { sealed, .. }) = &mut self.exchange {
            sealed.fill(0, &self.stream)?;
        }
        let state = RankState { epoch: self.device_epoch(0)?, ..FIRST };
        self.state.write(0, bytes_of(&[state]), &self.stream)
    }

    /// Everything about a collective on vectors of `count` elements that may have to wait for the device.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the vector is longer than the group was set up for or than the kernels can count,
    /// or the root is no rank; [`Error::Poisoned`]; [`Error::Cuda`].
    pub(super) fn prepare(&mut self, request: Request, count: usize, dtype: Dtype) -> Result<Ready> {
        if self.poisoned {
            return Err(Error::Poisoned);
        }
        if let Request::Broadcast { root } = request
            && root >= self.ranks
        {
            return Err(Error::InvalidArgument(format!("root {root}: there are {} ranks", self.ranks)));
        }
        let bytes = vector_bytes(count, dtype, self.options.max_bytes)?;
        let plan = Plan::new(request.collective(), self.options.algorithm, self.ranks, bytes, dtype);
        if bytes / plan.unit() > u32::MAX as usize {
            return Err(Error::InvalidArgument(format!(
                "{bytes} bytes in chunks that don't begin at multiples of 16: at most 2^32 elements; pad the vector"
            )));
        }
        let chunk = plan.longest_chunk();
        let common = request.op().is_none_or(|op| is_common(reduction(dtype as u32, op as u32)));
        let mut record_bytes = plan_record_bytes(&plan, self.exchange.is_some(), &self.options, self.blocks);
        if common && self.shares_steps() {
            record_bytes = match &self.exchange {
                Some(_) if request.collective() == Collective::AllReduce => {
                    shortly_exchanged_record_bytes(bytes, self.blocks).unwrap_or(record_bytes)
                }
                Some(_) => record_bytes,
                None => shared_record_bytes(record_bytes),
            };
        }
        let records = records_of(chunk, record_bytes);
        self.prepare_steps(plan, chunk, records)?;
        self.load(common, common && is_short(record_bytes))?;
        Ok(Ready { request, count, dtype, plan, part: Part::Whole, chunk, record_bytes, records })
    }

    /// Whether the common reductions of short records, of the length that this rank chooses, are done by blocks that share a
    /// record's steps.
    fn shares_steps(&self) -> bool {
        let options = &self.options;
        self.short.is_some()
            && self.keystream.is_none()
            && options.record_bytes.is_none()
            && options.launch != LaunchForm::PerStep
    }

    /// Loads the kernels for the common reductions, or for all; and those for short records.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub(super) fn load(&mut self, common: bool, short: bool) -> Result<()> {
        self.kernels.get(&self.module, common)?;
        if let (Some(kernel), true) = (&mut self.short, short) {
            kernel.get(&self.module)?;
        }
        match &mut self.exchange {
            Some(exchange) => exchange.kernels.get(&self.module, common).map(drop),
            None => Ok(()),
        }
    }

    /// Lowers the schedule, once. Its chunks have at most `chunk` bytes and `records` records.
    fn prepare_steps(&mut self, plan: Plan, chunk: usize, records: usize) -> Result<()> {
        if self.steps.contains_key(&plan) {
            return Ok(());
        }
        let (steps, outboxes) = match &self.scratch {
            None => (plan.steps(self.rank), Vec::new()),
            Some(_) => {
                let program = plan.program(self.rank);
                let outbox = |to: &Destination| Outbox {
                    inbox: self.mailboxes[to.rank].inbox + (to.message * message_stride(chunk)) as u64,
                    signals: self.mailboxes[to.rank].signals + (to.message * records) as u64 * SIGNAL_BYTES,
                };
                let outboxes: Vec<_> = program.destinations.iter().map(outbox).collect();
                (program.steps, outboxes)
            }
        };
        let table = [bytes_of(&steps), bytes_of(&outboxes)].concat();
        let buffer = DeviceBuffer::from_host(&table, &self.stream)?;
        self.stream.synchronize()?;
        let sides = if self.keystream.is_some() { sides(self.rank, &steps) } else { Vec::new() };
        self.steps.insert(plan, StepTable { buffer, steps: steps.len(), sides });
        Ok(())
    }

    /// Queues this rank's part in a collective that was [prepared](Self::prepare), or the [`Part`] of it that `ready` names:
    /// all of them, one after another, before the next collective.
    ///
    /// # Errors
    /// [`Error::KeyExhausted`], before anything happens and on all ranks alike; [`Error::Cuda`], which poisons.
    ///
    /// # Safety
    /// The buffers hold what this rank gives and gets, on its device, aligned to an element, and are left alone until
    /// `stream` has passed the collective.
    pub(super) unsafe fn launch(
        &mut self,
        ready: Ready,
        buffers: RankBuffers,
        stream: &Stream,
    ) -> Result<()> {
        let Ready { request, count, dtype, plan, part, record_bytes, records, .. } = ready;
        // Without an operation elements are only moved, which the kernels of the common ones do faster.
        let (dtype_code, op) = match request.op() {
            Some(op) => (dtype, op),
            None => (Dtype::F32, ReduceOp::Sum),
        };
        let reduction = reduction(dtype_code as u32, op as u32);
        let calls = ready.calls();
        // Once, and not again for each call of the driver's below.
        let _current = self.stream.device().bind()?;
        // Collectives come one after another whatever their streams: two at once would have the same number, and so the same
        // nonces. An event outside of a capture can't be waited for inside.
        let captured = stream.is_capturing()?;
        if part.is_first(&plan) && !captured {
            stream.wait(&self.latest)?;
        }
        let (given, wanted) = (plan.given(self.rank), plan.wanted(self.rank));
        // Not looked at, but counted from.
        let unused = matches!(request, Request::Broadcast { root } if root != self.rank);
        let input = if unused { buffers.output } else { buffers.input };
        // Once for all launches.
        if let (Some(keys), true) = (&mut self.keys, part.is_first(&plan)) {
            if keys.enters(calls) && captured {
                return Err(Error::InvalidArgument(
                    "the stream is being captured, and this collective begins a new epoch of keys, after which the next one's \
                     are made on the stream, at once: let a collective of this length run before the capture"
                        .into(),
                ));
            }
            self.entered = keys.reserve(calls)?;
        }
        let keystream = match self.take_keystream(is_common(reduction), &ready, captured) {
            Ok(keystream) => keystream,
            Err(error) => {
                self.poisoned = true;
                return Err(error);
            }
        };
        let successor = self.mailboxes[(self.rank + 1) % self.ranks];
        let steps = &self.steps[&plan];
        let table = steps.steps as u32;
        let (first_step, step_count, records) = match part {
            Part::Whole => (0, table, records),
            Part::Step { index, .. } => (index, 1, records),
            // Only its count matters: whether the collective was an empty one.
            Part::Close => (0, table.min(1), 0),
        };
        let params = RingParams {
            state: self.state.pointer(),
            notice: self.notice.pointer(),
            notices: self.notices.pointer(),
            steps: steps.buffer.pointer() + (first_step * size_of::<Step>()) as u64,
            input: input.wrapping_sub(given.start as u64),
            output: buffers.output.wrapping_sub(wanted.start as u64),
            result: buffers.output,
            bytes: wanted.len() as u64,
            inbox: self.inbox.pointer(),
            outbox: successor.inbox,
            inbox_half: self.inbox_half,
            message_stride: message_stride(ready.chunk) as u64,
            signals_in: self.signals.pointer(),
            signals_out: successor.signals,
            signals_half: self.signals_half,
            timeout_ns: self.options.timeout.min(LONGEST_WAIT).as_nanos() as u64,
            epoch: self.device_epoch(self.keys.as_ref().map_or(0, RankKeys::epoch))?,
            calls,
            calls_limit: self.keys.as_ref().map_or(u64::MAX, RankKeys::calls_limit),
            step_count,
            records: records as u32,
            record_bytes: record_bytes as u32,
            reduction,
            rank: self.rank as u32,
            ranks: self.ranks as u32,
            unit: plan.unit() as u32,
            awaits_successor: (plan.may_run_ahead() && self.scratch.is_none()) as u32,
            more: !part.is_last() as u32,
            reserved: 0,
        };
        let mesh = self.scratch.as_ref().map(|scratch| Mesh {
            outboxes: steps.outboxes(),
            scratch: scratch.pointer(),
            awaits_others: plan.may_run_ahead() as u32,
            reserved: 0,
        });
        let overwrites = params.input == params.output && plan.collective == Collective::AllReduce;
        let in_place = (self.keys.is_some() && overwrites).then_some(self.ranks as u32);
        // A mesh's blocks don't share.
        let shared_steps = if mesh.is_some() { 1 } else { step_count };
        let blocks = blocks_that_share(self.blocks, records as u32, shared_steps, in_place);
        let launch = Launch { blocks, threads: THREADS };
        let common = is_common(reduction);
        let session_call =
            |keys: &RankKeys| call(keys.session(), self.options.algorithm, request, dtype, count, self.ranks);
        let kernel = self.kernels.get(&self.module, common)?;
        let result = match (&self.keys, mesh) {
            // SAFETY: the ring's plain kernels take `RingParams`, the mesh's `MeshParams`; the rank's buffers live as long as
            // it, and the mailboxes were promised to; the caller answers for the others.
            (None, None) => unsafe { kernel.launch(launch, stream, &params) },
            // SAFETY: as above.
            (None, Some(mesh)) => unsafe {
                kernel.launch(launch, stream, &MeshParams { ring: params, mesh })
            },
            (Some(keys), Some(mesh)) => {
                let (call, senders) = (session_call(keys), keys.senders());
                let params = SealedMeshParams { ring: params, mesh, call, senders };
                // SAFETY: as above, and the mesh's sealed kernels take `SealedMeshParams`.
                unsafe { kernel.launch(launch, stream, &params) }
            }
            (Some(keys), None) => {
                let present = keys.present();
                let mut params = SealedRingParams {
                    ring: params,
                    own: present.own,
                    predecessor: present.predecessor,
                    call: session_call(keys),
                    senders: present.senders,
                };
                drop(present);
                // SAFETY: as above.
                let result =
                    unsafe { self.launch_sealed(&params, common, &plan, keystream.as_ref(), launch, stream) };
                params.own.round_keys.zeroize();
                params.predecessor.round_keys.zeroize();
                result
            }
        };
        let result = result.and(self.retire_keystream(keystream, stream));
        let result = match &mut self.keys {
            Some(keys) if self.entered && part.is_last() => {
                self.entered = false;
                result.and_then(|()| keys.prepare_next(stream))
            }
            _ => result,
        };
        let result = match part.is_last() && !captured {
            true => result.and(stream.mark(&self.latest)),
            false => result,
        };
        self.poisoned |= result.is_err();
        result
    }

    /// Queues a sealed collective's kernel: the one that takes keystream, where there is any.
    ///
    /// # Safety
    /// As [`Self::launch`]; the parameters are the rank's.
    unsafe fn launch_sealed(
        &mut self,
        ring: &SealedRingParams,
        common: bool,
        plan: &Plan,
        taken: Option<&TakenPads>,
        launch: Launch,
        stream: &Stream,
    ) -> Result<()> {
        let Some(exchange) = self.exchange.as_mut().filter(|_| plan.collective == Collective::AllReduce)
        else {
            return match (taken, &self.keystream) {
                // SAFETY: the caller's.
                (Some(taken), Some(keystream)) => unsafe {
                    keystream.launch_ring(taken, ring, launch, stream)
                },
                _ => {
                    let short = common && is_short(ring.ring.record_bytes as usize);
                    let kernel = match &mut self.short {
                        Some(kernel) if short => kernel.get(&self.module)?,
                        _ => self.kernels.get(&self.module, common)?,
                    };
                    // SAFETY: the caller's; the sealed kernels take `SealedRingParams`.
                    unsafe { kernel.launch(launch, stream, ring) }
                }
            };
        };
        let in_place = ring.ring.input == ring.ring.output;
        let short = short_exchange(ring.ring.records, ring.ring.record_bytes, in_place, self.blocks);
        if let (None, Some(blocks), Some(kernel)) = (taken, short.filter(|_| common), &mut self.short) {
            let kernel = kernel.get(&self.module)?;
            // SAFETY: the caller's; the kernel takes `SealedRingParams`, and the plan's steps are an exchange.
            return unsafe { kernel.launch(Launch { blocks, ..launch }, stream, ring) };
        }
        let most = ring.ring.records.max(1);
        let sealers = sealing_blocks(plan.bytes, self.blocks);
        let (openers, sealers) = ((self.blocks - sealers).min(most), sealers.min(most));
        let launch = Launch { blocks: sealers + openers, ..launch };
        let mut params =
            ExchangeParams { ring: *ring, sealed: exchange.sealed.pointer(), sealers, reserved: 0 };
        let result = match (taken, &self.keystream) {
            // SAFETY: the caller's.
            (Some(taken), Some(keystream)) => unsafe {
                keystream.launch_exchange(taken, &params, launch, stream)
            },
            _ => {
                let kernel = exchange.kernels.get(&self.module, common)?;
                // SAFETY: the caller's; the exchange's kernels take `ExchangeParams`.
                unsafe { kernel.launch(launch, stream, &params) }
            }
        };
        params.ring.own.round_keys.zeroize();
        params.ring.predecessor.round_keys.zeroize();
        result
    }

    /// Keystream that is ready for a collective, which is counted with its last part; none for one that is `captured`.
    fn take_keystream(&mut self, common: bool, ready: &Ready, captured: bool) -> Result<Option<TakenPads>> {
        let (Some(keys), Some(keystream)) = (&self.keys, &mut self.keystream) else { return Ok(None) };
        let &Ready { ref plan, part, record_bytes, .. } = ready;
        if self.entered && part.is_first(plan) {
            keystream.ahead.enter_epoch(keys.round_keys()?)?;
        }
        let fits = common
            && plan.collective == Collective::AllReduce
            && part == Part::Whole
            && keystream.has_room_for(record_bytes);
        let taken = match fits && !captured {
            true => keystream.ahead.take(plan.bytes, record_bytes, &self.steps[plan].sides)?,
            false => None,
        };
        if part.is_last() {
            keystream.ahead.count(captured)?;
        }
        Ok(taken)
    }

    /// Has what was taken wiped once `stream` has passed the collective.
    fn retire_keystream(&mut self, taken: Option<TakenPads>, stream: &Stream) -> Result<()> {
        match (taken, &mut self.keystream) {
            (Some(taken), Some(keystream)) => keystream.ahead.retire(taken, stream),
            _ => Ok(()),
        }
    }

    /// Has keystream made for the next collectives, all-reduces of `bytes` bytes each. Doesn't wait. Of how many there
    /// will be keystream.
    ///
    /// # Errors
    /// [`Error::Poisoned`], [`Error::InvalidArgument`] without [`GpuOptions::keystream`], [`Error::Cuda`].
    pub(super) fn make_keystream(&mut self, bytes: &[usize]) -> Result<usize> {
        if self.poisoned {
            return Err(Error::Poisoned);
        }
        let Some(keystream) = &mut self.keystream else {
            return Err(no_keystream());
        };
        let (rank, ranks, options, blocks) = (self.rank, self.ranks, &self.options, self.blocks);
        let exchanges = self.exchange.is_some();
        keystream.ahead.make(bytes.iter().map(|&bytes| {
            let plan = Plan::new(Collective::AllReduce, options.algorithm, ranks, bytes, Dtype::F32);
            let record_bytes = plan_record_bytes(&plan, exchanges, options, blocks) as u32;
            Planned { bytes, record_bytes, steps: sides(rank, &plan.steps(rank)) }
        }))
    }

    /// The rank's keystream, where some is kept.
    pub(super) fn keystream(&self) -> Option<&Ahead> {
        self.keystream.as_ref().map(|keystream| &keystream.ahead)
    }

    /// Waits until all keystream is made that was asked for, and all is wiped that was used.
    pub(super) fn wait_for_keystream(&mut self) -> Result<()> {
        self.keystream.as_mut().map_or(Ok(()), |keystream| keystream.ahead.synchronize())
    }

    /// Whether no keystream is left in memory.
    pub(super) fn keystream_is_blank(&self) -> Result<bool> {
        self.keystream.as_ref().map_or(Ok(true), |keystream| keystream.is_blank(&self.stream))
    }

    /// Asks how the collectives that the rank's stream has passed went. Wait for the stream first.
    ///
    /// # Errors
    /// The first failure that this rank saw: [`Error::Record`], [`Error::Deadline`] or [`Error::KeyExhausted`]; or
    /// [`Error::Aborted`] when another rank failed first. The rank carries no data after it.
    pub(super) fn outcome(&mut self) -> Result<()> {
        let mut state = [RankState::default()];
        self.state.read(0, bytes_of_mut(&mut state), &self.stream)?;
        let mut notice = [Notice::default()];
        self.notice.read(0, bytes_of_mut(&mut notice), &self.stream)?;
        let [RankState { failure: word, aborted, .. }] = state;
        // Another rank may have failed after this one's kernel had ended.
        let aborted = if aborted != 0 { aborted } else { notice[0].aborted };
        self.poisoned |= word != 0 || aborted != 0;
        let wiped = match &mut self.keystream {
            Some(keystream) if self.poisoned => keystream.ahead.end(),
            _ => Ok(()),
        };
        match (self.failure(self.rank, word), aborted) {
            (Some(failure), _) => Err(failure),
            (None, 0) => wiped,
            (None, by) => Err(Error::Aborted { rank: self.rank, by: by as usize - 1 }),
        }
    }

    /// What another rank's failure word says.
    pub(super) fn failure_of(&self, rank: usize) -> Remote {
        let Some(mailbox) = self.mailboxes.get(rank) else { return Remote::Unreachable };
        let mut notice = [Notice::default()];
        let bytes = bytes_of_mut(&mut notice);
        // SAFETY: the other rank's notice is mapped as long as this rank lives; `bytes` is borrowed until the copy is
        // done.
        let copied = unsafe { self.stream.copy(bytes.as_mut_ptr() as u64, mailbox.notice, bytes.len()) };
        if copied.and_then(|()| self.stream.synchronize()).is_err() {
            return Remote::Unreachable;
        }
        self.failure(rank, notice[0].failure).map_or(Remote::Fine, Remote::Failed)
    }

    /// What a rank's failure word means; `None` for 0.
    fn failure(&self, rank: usize, word: u64) -> Option<Error> {
        let (field, record) = ((word >> 32) as u32 & 0x00ff_ffff, word as u32 as usize);
        // Whom the rank waited for, and for which message.
        let (from, step) = match (&self.scratch, word >> 56) {
            (Some(_), _) => failed_parts(field),
            (None, failure::ABSENT) => (((rank + 1) % self.ranks) as u32, field),
            (None, _) => (((rank + self.ranks - 1) % self.ranks) as u32, field),
        };
        let (from, step) = (from as usize, step as usize);
        Some(match word >> 56 {
            0 => return None,
            failure::AUTHENTICATION => Error::Record { rank, step, record },
            failure::EXHAUSTED => Error::KeyExhausted { limit: self.options.key_bytes },
            _ => {
                Error::Deadline { rank, peer: from, step, waited_ms: self.options.timeout.as_millis() as u64 }
            }
        })
    }

    /// Refuses everything until the next [`Self::rekey`].
    pub(super) fn poison(&mut self) {
        self.poisoned = true;
    }

    /// Whether [`Self::rekey`] is needed.
    pub(super) fn is_poisoned(&self) -> bool {
        self.poisoned
    }

    /// Its inbox and its signals.
    pub(super) fn mailbox(&self) -> [&DeviceBuffer; 2] {
        [&self.inbox, &self.signals]
    }

    /// Where a message of `bytes` bytes lies in the inbox and in the signals of the rank that it is sent to, by offset in bytes, in a
    /// collective that uses half `half` of both.
    pub(super) fn places(&self, ready: &Ready, half: u64, message: u32, bytes: u64) -> [Range<u64>; 2] {
        let (message, records) = (u64::from(message), bytes.div_ceil(ready.record_bytes as u64));
        let text = half * self.inbox_half + message * message_stride(ready.chunk) as u64;
        let signal = half * self.signals_half + message * ready.records as u64;
        [text..text + bytes, signal * SIGNAL_BYTES..(signal + records) * SIGNAL_BYTES]
    }

    /// The words that say 1 plus the number of a rank that failed: the rank's own, and the one that others set.
    pub(super) fn aborted_words(&self) -> [u64; 2] {
        [
            self.state.pointer() + offset_of!(RankState, aborted) as u64,
            Self::aborted_at(self.notice.pointer()),
        ]
    }

    /// Whether one key may encrypt as much as a collective takes; [`Self::launch`] doesn't fail by that then.
    ///
    /// # Errors
    /// [`Error::KeyExhausted`], on all ranks alike.
    pub(super) fn affords(&self, ready: &Ready) -> Result<()> {
        match &self.keys {
            Some(keys) if ready.calls() > keys.calls_limit() => {
                Err(Error::KeyExhausted { limit: self.options.key_bytes })
            }
            _ => Ok(()),
        }
    }

    /// All that other ranks reach of it.
    pub(super) fn shared(&self) -> [&DeviceBuffer; 3] {
        [&self.notice, &self.inbox, &self.signals]
    }

    /// Where the ranks' notices are, by rank.
    pub(super) fn notice_addresses(&self) -> Vec<u64> {
        self.mailboxes.iter().map(|mailbox| mailbox.notice).collect()
    }

    /// The word of a notice that stops its rank's kernels.
    pub(super) const fn aborted_at(notice: u64) -> u64 {
        notice + offset_of!(Notice, aborted) as u64
    }

    /// The device that it is on.
    pub(super) fn device(&self) -> &Device {
        self.stream.device()
    }

    /// Blocks that it runs.
    pub(super) fn blocks(&self) -> u32 {
        self.blocks
    }
}

/// Bytes of an inbox from one message to the next, for chunks of at most `chunk` bytes.
const fn message_stride(chunk: usize) -> usize {
    chunk.next_multiple_of(256)
}

/// The longest all-reduce of which keystream is kept.
fn longest_with_keystream(
    options: &GpuOptions,
    ranks: usize,
    blocks: u32,
    exchange: bool,
    keystream: &KeystreamAhead,
) -> Longest {
    let plan = Plan::new(Collective::AllReduce, options.algorithm, ranks, keystream.bytes, Dtype::F32);
    let longest = options.record_bytes.unwrap_or_else(|| longest_up_to(plan.longest_chunk(), blocks));
    Longest {
        steps: plan.steps(0),
        records: [longest, options.record_bytes.unwrap_or(SHORTEST_RECORD)],
        chunk: plan.longest_chunk(),
        blocks,
        exchange,
    }
}

/// The first block of the records' additional data, and what else it says of the collective.
fn call(
    session: u64,
    algorithm: Algorithm,
    request: Request,
    dtype: Dtype,
    count: usize,
    ranks: usize,
) -> Call {
    let (collective, root) = request.collective().code();
    let data = AssociatedData {
        version: VERSION,
        collective,
        algorithm: algorithm as u8,
        dtype: dtype as u8,
        op: request.op().map_or(NO_OP, |op| op as u8),
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

/// Vectors in whose exchange every block does both halves. Shorter ones take the time of one tile in each half, however few
/// blocks share it; longer ones are sealed and opened at the same time. As measured on two H200s.
const BOTH_HALVES: std::ops::RangeInclusive<usize> = (2 << 20)..=(8 << 20);

/// How many of a rank's blocks only seal in the exchange of a vector of `bytes` bytes, 0 for none. Opening takes longer by
/// the reduction.
fn sealing_blocks(bytes: usize, blocks: u32) -> u32 {
    if BOTH_HALVES.contains(&bytes) { 0 } else { blocks * 16 / 33 }
}

/// Records of the exchange of a long vector, some for each block that seals.
const EXCHANGED_RECORD: std::ops::RangeInclusive<usize> = (64 << 10)..=(256 << 10);

/// Bytes of a record of an exchange when none is asked for: long vectors' are opened while others are sealed.
fn exchanged_record_bytes(bytes: usize, blocks: u32) -> usize {
    match sealing_blocks(bytes, blocks) {
        0 => shared_out(bytes, blocks, LONGEST_EXCHANGED),
        sealers if bytes < *BOTH_HALVES.start() => shared_out(bytes, sealers, LONGEST_EXCHANGED),
        sealers => (bytes / (8 * sealers as usize))
            .next_power_of_two()
            .clamp(*EXCHANGED_RECORD.start(), *EXCHANGED_RECORD.end()),
    }
}

/// Bytes of a record of an exchange by [`short_exchange`], which has one for each block; `None` of a vector that is too long.
fn shortly_exchanged_record_bytes(bytes: usize, blocks: u32) -> Option<usize> {
    Some(chosen_record_bytes(bytes, blocks)).filter(|&record_bytes| is_short(record_bytes))
}

/// The blocks that exchange a vector by the kernel for short records, which makes keystream before a record arrives; `None`
/// where there are more records than blocks, or longer ones.
///
/// In place, a block opens the record that it sealed, so that nothing is overwritten before it is sealed. Otherwise other
/// blocks open, where there are enough.
fn short_exchange(records: u32, record_bytes: u32, in_place: bool, blocks: u32) -> Option<u32> {
    let short = is_short(record_bytes as usize) && (1..=blocks).contains(&records);
    short.then(|| if in_place { records } else { blocks.min(2 * records) })
}

/// Blocks of a launch of a ring's rank: several may share a record, each of which takes some of the steps, `sharers` apart.
///
/// Where results overwrite what is still to be sent, in place, a chunk is read in one step and overwritten in the same or as many
/// steps later as there are ranks: given then, so that one block does both, one after the other. Between two blocks only honest
/// neighbours' records would come in an order that keeps the two apart, and by the time a forged one is refused, a block might have
/// sealed what it left there.
fn blocks_that_share(blocks: u32, records: u32, step_count: u32, in_place: Option<u32>) -> u32 {
    let (records, step_count) = (records.max(1), step_count.max(1));
    let sharers = match in_place {
        Some(ranks) => {
            let most = (blocks / records).clamp(1, step_count);
            (1..=most).rev().find(|&sharers| ranks.is_multiple_of(sharers)).unwrap_or(1)
        }
        None => step_count,
    };
    blocks.min(records.saturating_mul(sharers))
}

/// Whether records of so many bytes are those of the kernels for short ones.
fn is_short(record_bytes: usize) -> bool {
    record_bytes <= LONGEST_SHORT_RECORD as usize
}

/// Where blocks may share a record's steps, a record of so many bytes is better twice as long, by two blocks, up to a tile:
/// less time goes to what each record costs.
fn shared_record_bytes(record_bytes: usize) -> usize {
    match 2 * record_bytes {
        twice if record_bytes > SHORTEST_RECORD && is_short(twice) => twice,
        _ => record_bytes,
    }
}

/// Bytes of a record of a collective, of a rank with or without an exchange's kernels.
fn plan_record_bytes(plan: &Plan, exchanges: bool, options: &GpuOptions, blocks: u32) -> usize {
    let chunk = plan.longest_chunk();
    match options.record_bytes {
        None if exchanges && plan.collective == Collective::AllReduce => {
            exchanged_record_bytes(chunk, blocks)
        }
        _ => record_bytes(options, chunk, blocks),
    }
}

/// Bytes of a record for chunks of this length: every block gets its share, in as few records as their limit and
/// [`WORTH_TWO`] allow.
fn record_bytes(options: &GpuOptions, chunk: usize, blocks: u32) -> usize {
    options.record_bytes.unwrap_or_else(|| chosen_record_bytes(chunk, blocks))
}

/// The record length when none is asked for.
fn chosen_record_bytes(chunk: usize, blocks: u32) -> usize {
    shared_out(chunk, blocks, LONGEST_RECORD)
}

/// Bytes of records of at most `longest`, for chunks of this length; the cost model needs it too.
pub(crate) fn shared_out(chunk: usize, blocks: u32, longest: usize) -> usize {
    let share = chunk.div_ceil(blocks as usize);
    share.div_ceil(rounds(share, longest)).next_multiple_of(256).max(SHORTEST_RECORD)
}

/// What [`chosen_record_bytes`] comes to at most for chunks of up to this length.
fn longest_up_to(chunk: usize, blocks: u32) -> usize {
    chunk.div_ceil(blocks as usize).next_multiple_of(256).clamp(SHORTEST_RECORD, LONGEST_RECORD)
}

/// Records of at most `longest` bytes of a block of which each chunk gives it `share` bytes.
fn rounds(share: usize, longest: usize) -> usize {
    share.div_ceil(longest).max(if share < WORTH_TWO { 1 } else { 2 })
}

/// What [`records_of`] comes to at most for chunks of up to this length: a shorter one may have more than this one, whose
/// records are rounded up further.
fn most_records(options: &GpuOptions, chunk: usize, blocks: u32) -> usize {
    match options.record_bytes {
        Some(bytes) => records_of(chunk, bytes),
        None => blocks as usize * rounds(chunk.div_ceil(blocks as usize), LONGEST_RECORD),
    }
}

/// What [`records_of`] comes to at most for exchanges of up to this length.
fn most_exchanged_records(options: &GpuOptions, longest: usize, blocks: u32) -> usize {
    match options.record_bytes {
        Some(bytes) => records_of(longest, bytes),
        // Records of a long vector are no shorter than the first's; those of others are a few for each block.
        None => longest.div_ceil(*EXCHANGED_RECORD.start()).max(
            blocks as usize
                * rounds(
                    BOTH_HALVES.end().div_ceil(sealing_blocks(0, blocks).max(1) as usize),
                    LONGEST_EXCHANGED,
                ),
        ),
    }
}

fn records_of(chunk: usize, record_bytes: usize) -> usize {
    chunk.div_ceil(record_bytes)
}

/// Plain words of a struct or slice that the device reads.
fn bytes_of<T: Copy>(values: &[T]) -> &[u8] {
    // SAFETY: called with `u64`, `Step`, `Outbox`, `Notice` and `RankState`, which have no padding.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

fn bytes_of_mut<T: Copy>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: called with `Notice` and `RankState`, which has no padding and no invalid bit patterns.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

#[cfg(test)]
mod tests {
    use ringseal_kernels::step::{RECEIVE, REDUCE, STORE};

    use super::*;

    #[test]
    fn no_shorter_exchange_has_more_records_than_there_is_room_for() {
        for longest in [1, 5 << 20, 40 << 20, 700 << 20] {
            for blocks in [1, 2, 3, 16, 132] {
                let room = most_exchanged_records(&GpuOptions::default(), longest, blocks);
                for bytes in (1..=longest).step_by(10_007).chain([longest]) {
                    let record = exchanged_record_bytes(bytes, blocks);
                    assert!(record <= LONGEST_EXCHANGED && record.is_multiple_of(16));
                    let short = shortly_exchanged_record_bytes(bytes, blocks);
                    for record in [Some(record), short].into_iter().flatten() {
                        let records = records_of(bytes, record);
                        assert!(records <= room, "{bytes} bytes, {blocks} blocks: {records} records");
                    }
                    if let Some(record) = short {
                        assert!(records_of(bytes, record) <= blocks as usize);
                    }
                }
            }
        }
    }

    /// In place a record is opened by the block that sealed it, which the kernel does where it has a block for each.
    #[test]
    fn a_short_exchange_in_place_has_a_block_for_each_record() {
        for (records, in_place, apart) in
            [(1, 1, 2), (16, 16, 32), (66, 66, 132), (100, 100, 132), (132, 132, 132)]
        {
            assert_eq!(short_exchange(records, 4096, true, 132), Some(in_place));
            assert_eq!(short_exchange(records, 4096, false, 132), Some(apart));
        }
        for (records, record_bytes) in [(133, 4096), (16, LONGEST_SHORT_RECORD + 16), (0, 4096)] {
            assert_eq!(short_exchange(records, record_bytes, true, 132), None);
        }
    }

    /// In place a block that shares a record's steps overwrites only what it has read itself, as the kernel shares them.
    #[test]
    fn in_place_a_chunk_is_read_and_overwritten_by_one_block() {
        const READ: fn(&Step) -> bool = |step| step.actions & REDUCE != 0 || step.actions & RECEIVE == 0;
        for ranks in 2..=12_usize {
            for algorithm in [Algorithm::Ring, Algorithm::RelayRing] {
                let plan = Plan::new(Collective::AllReduce, algorithm, ranks, 64 * ranks, Dtype::F32);
                for (blocks, records) in [(66, 1), (66, 16), (33, 16), (16, 8), (16, 17), (132, 1), (7, 1)] {
                    let count = plan.steps(0).len() as u32;
                    let grid = blocks_that_share(blocks, records, count, Some(ranks as u32));
                    // As `Share` has it.
                    let sharers = (grid / records).min(count).max(1);
                    assert!(grid <= blocks && (sharers == 1 || grid == sharers * records));
                    for steps in (0..ranks).map(|rank| plan.steps(rank)) {
                        for (read, from) in steps.iter().enumerate().filter(|(_, step)| READ(step)) {
                            let stores =
                                steps.iter().enumerate().filter(|(_, step)| step.actions & STORE != 0);
                            let overwrites: Vec<_> =
                                stores.filter(|(_, to)| to.offset == from.offset).collect();
                            assert_eq!(overwrites.len(), 1);
                            let (stored, _) = overwrites[0];
                            assert!(stored >= read && stored as u32 % sharers == read as u32 % sharers);
                        }
                    }
                }
            }
        }
        assert_eq!(blocks_that_share(33, 16, 7, Some(4)), 32);
        assert_eq!(blocks_that_share(33, 4, 7, Some(4)), 16);
        assert_eq!(blocks_that_share(33, 4, 7, None), 28);
        assert_eq!(blocks_that_share(33, 4, 9, Some(5)), 20);
        assert_eq!(blocks_that_share(33, 10, 9, Some(5)), 10);
    }

    #[test]
    fn no_shorter_chunk_has_longer_records_than_there_is_scratch_memory_for() {
        for longest in [1, 4096, 100_000, 4 << 20, 300 << 20] {
            for blocks in [1, 2, 7, 66, 132] {
                let room = longest_up_to(longest, blocks);
                for chunk in (1..=longest).step_by(longest / 997 + 1).chain([longest]) {
                    assert!(
                        chosen_record_bytes(chunk, blocks) <= room,
                        "{chunk} of {longest}, {blocks} blocks"
                    );
                }
            }
        }
    }

    #[test]
    fn no_shorter_chunk_has_more_records_than_there_is_room_for() {
        let longest = 5 << 20;
        for record_bytes in [None, Some(4096), Some(16)] {
            let options = GpuOptions { record_bytes, ..GpuOptions::default() };
            for blocks in [1, 3, 16, 132] {
                let room = most_records(&options, longest, blocks);
                for chunk in (1..longest).step_by(1009) {
                    let records = records_of(chunk, super::record_bytes(&options, chunk, blocks));
                    assert!(records <= room, "{chunk} bytes, {blocks} blocks: {records} records");
                }
            }
        }
    }
}
