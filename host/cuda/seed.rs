//! All-reduce in the structure of arXiv 2501.11771, for comparison: every operation of every hop is a launch of its own.
//!
//! A hop is: encrypt, MAC, copy to the peer, check the MAC, decrypt, add. The MAC is multi-chained GHASH by tables
//! ([`table_ghash`](ringseal_kernels::table_ghash)), a chunk is one message, and every hop opens and seals anew: 4(n-1)
//! operations of each rank in a ring. Events order the ranks' streams; nothing waits on the host.
//!
//! Keys, nonces and additional data are those of [`GpuGroup`](super::GpuGroup)'s records, and a tag that doesn't verify
//! ends the same: an error that names it, zeros in every output that it may have reached, and a poisoned group.
//! But in this structure the mailbox is read twice, once to check the MAC and once to decrypt. Whoever can write to it in
//! between can change what is decrypted. That is a property of the published design and no protection to rely on; use
//! [`GpuGroup`](super::GpuGroup), which loads every byte once.

use std::sync::Arc;

use ringseal_kernels::elementwise::{ReduceParams, WipeParams, reduce_common};
use ringseal_kernels::reduce::{is_common, reduction};
use ringseal_kernels::step;
use ringseal_kernels::table_ghash::{
    MAC_SHARED, MOST_CHAINS, MacKeyParams, MacParams, MacScratch, mac_chains, mac_grid, mac_key, mac_key_grid,
};
use zeroize::Zeroize;

use super::cipher::Kernels;
use super::collectives::only_all_reduces;
use super::rank::{check_one_each, vector_bytes};
use super::seed_keys::{SeedKeys, SenderKey};
use super::seed_plan::{Plan, Reception, Source, Work};
use super::{Collectives, Device, DeviceBuffer, Event, Kernel, Launch, Module, RankBuffers, Stream};
use crate::backend::{CounterWidth, le_words};
use crate::channel::{
    ASSOCIATED_DATA_BYTES, AssociatedData, Crypto, GroupSecret, KeyLength, MAX_SEQUENCE, Terms, VERSION,
    nonce, volume,
};
use crate::collective::schedule::Schedule;
use crate::collective::{Algorithm, Collective, Request};
use crate::{Dtype, Error, ReduceOp, Result};

/// Chains that are used unless others are asked for: two thread blocks on each of 132 multiprocessors, the best of those
/// measured for long messages (docs/benchmarks.md).
const DEFAULT_CHAINS: u32 = 33_792;
/// Bytes of a tag.
const TAG_BYTES: usize = 16;
/// Longest message that GCM's counter allows (SP 800-38D, 5.2.1.1).
const LONGEST_MESSAGE: usize = (1 << 36) - 32;

/// How a group is set up.
#[derive(Clone, Debug)]
pub struct SeedOptions {
    /// Whether messages are sealed. Otherwise the same structure carries plaintext, for comparison.
    pub crypto: bool,
    /// Length of the AES keys.
    pub key: KeyLength,
    /// Chains of the MAC, from 1 (serial) to 65,536. A message shorter than that many blocks uses fewer.
    pub chains: u32,
    /// [`Algorithm::Ring`] or [`Algorithm::Tree`].
    pub algorithm: Algorithm,
    /// Length in bytes of the longest vector that will be reduced. A rank takes about five times as much memory in a
    /// ring, and six times in a tree.
    pub max_bytes: usize,
    /// Bytes that a key may encrypt before the next epoch begins. One collective must fit.
    pub key_bytes: u64,
}

impl Default for SeedOptions {
    fn default() -> Self {
        Self {
            crypto: true,
            key: KeyLength::Aes256,
            chains: DEFAULT_CHAINS,
            algorithm: Algorithm::Ring,
            max_bytes: 64 << 20,
            key_bytes: volume::DEFAULT_BYTES,
        }
    }
}

/// The kernels of the structure on one device, each to be launched on its own. Cheap to clone.
#[derive(Clone, Debug)]
pub struct SeedKernels(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    cipher: Kernels,
    mac_key: Kernel,
    mac: Kernel,
    reduce_common: Kernel,
    reduce_any: Kernel,
    wipe: Kernel,
    multiprocessors: u32,
}

impl SeedKernels {
    /// Takes the kernels from a module with the same kernels as the embedded one.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when one is missing; [`Error::Cuda`].
    pub fn new(module: &Module) -> Result<Self> {
        Ok(Self(Arc::new(Inner {
            cipher: Kernels::new(module)?,
            mac_key: module.kernel("mac_key", mac_key::SHARED)?,
            mac: module.kernel("mac_chains", MAC_SHARED)?,
            reduce_common: module.kernel("reduce_common", 0)?,
            reduce_any: module.kernel("reduce_any", 0)?,
            wipe: module.kernel("wipe_if_failed", 0)?,
            multiprocessors: module.device().multiprocessors()?,
        })))
    }

    /// The kernels of counter mode.
    pub fn cipher(&self) -> &Kernels {
        &self.0.cipher
    }

    /// Queues the preparation of a key of the MAC.
    ///
    /// # Errors
    /// [`Error::Cuda`] when the launch is refused.
    ///
    /// # Safety
    /// The key's address is as [`MacKeyParams`] says, valid until the stream has passed the work.
    pub unsafe fn prepare_mac(&self, params: &MacKeyParams, stream: &Stream) -> Result<()> {
        let launch = Launch { blocks: mac_key_grid(params.chains), threads: mac_key::THREADS };
        // SAFETY: the parameters are the kernel's; the caller promises the address.
        unsafe { self.0.mac_key.launch(launch, stream, params) }
    }

    /// Queues the making or checking of a message's tag.
    ///
    /// # Errors
    /// [`Error::Cuda`] when the launch is refused.
    ///
    /// # Safety
    /// The addresses are as [`MacParams`] says, valid until the stream has passed the work.
    pub unsafe fn mac(&self, params: &MacParams, stream: &Stream) -> Result<()> {
        let blocks = mac_grid(params.chains, params.aad_bytes, params.bytes);
        // SAFETY: the parameters are the kernel's; the caller promises the addresses.
        unsafe { self.0.mac.launch(Launch { blocks, threads: mac_chains::THREADS }, stream, params) }
    }

    /// Queues a reduction of two vectors. No bytes, no launch.
    ///
    /// # Errors
    /// [`Error::Cuda`] when the launch is refused.
    ///
    /// # Safety
    /// The addresses are as [`ReduceParams`] says, valid until the stream has passed the work.
    pub unsafe fn reduce(&self, params: &ReduceParams, stream: &Stream) -> Result<()> {
        let kernel = if is_common(params.reduction) { &self.0.reduce_common } else { &self.0.reduce_any };
        // SAFETY: the parameters are the kernel's; the caller promises the addresses.
        unsafe { kernel.launch(self.elementwise(params.bytes), stream, params) }
    }

    /// # Safety
    /// As [`reduce`](Self::reduce).
    unsafe fn wipe(&self, params: &WipeParams, stream: &Stream) -> Result<()> {
        // SAFETY: the parameters are the kernel's; the caller promises the addresses.
        unsafe { self.0.wipe.launch(self.elementwise(params.bytes), stream, params) }
    }

    fn elementwise(&self, bytes: u64) -> Launch {
        let threads = reduce_common::THREADS;
        let blocks = bytes.div_ceil(16 * u64::from(threads)).min(self.0.multiprocessors.into());
        Launch { blocks: blocks as u32, threads }
    }
}

/// Ranks on GPUs that reduce vectors together, by launches of single operations.
#[derive(Debug)]
pub struct SeedGroup {
    options: SeedOptions,
    plan: Plan,
    kernels: Vec<SeedKernels>,
    ranks: Vec<Rank>,
    /// Bytes of a message's slot in an inbox.
    slot_bytes: usize,
    /// `None` without cryptography.
    keys: Option<SeedKeys>,
    /// The number of the next collective.
    sequence: u64,
    poisoned: bool,
}

impl Drop for SeedGroup {
    /// After a failure a rank's copies to another's memory may still be queued, which must not be freed before.
    fn drop(&mut self) {
        for rank in &self.ranks {
            let _ = rank.stream.device().synchronize();
        }
    }
}

#[derive(Debug)]
struct Rank {
    /// The messages to this rank, a slot each: ciphertext, and from the next multiple of 16 on the tag.
    inbox: DeviceBuffer,
    /// The message that it seals.
    sealed: DeviceBuffer,
    /// The message that it has decrypted.
    opened: DeviceBuffer,
    /// What it has reduced and not finished.
    sum: DeviceBuffer,
    /// A [`MacScratch`].
    scratch: DeviceBuffer,
    /// 8 bytes: 0, or 1 plus the first reception that failed.
    failure: DeviceBuffer,
    /// Marked when a message to this rank has come, by its slot: events of the senders' devices.
    arrived: Vec<Event>,
    /// Marked when the rank has left a collective.
    left: Event,
    /// For set-up and failures; collectives run on the caller's stream.
    stream: Stream,
}

/// One collective on its way to the streams.
struct Run<'a> {
    buffers: &'a [RankBuffers],
    streams: &'a [&'a Stream],
    bytes: usize,
    count: usize,
    dtype: Dtype,
    op: ReduceOp,
    sequence: u64,
}

impl SeedGroup {
    /// Sets up one rank on each of `devices`, with the kernels of `image` (PTX or a cubin).
    ///
    /// # Errors
    /// [`Error::Unsupported`] when two devices cannot reach each other's memory, and for other algorithms;
    /// [`Error::InvalidArgument`] for options out of their domain; [`Error::Cuda`], for example when memory runs out.
    pub fn new(devices: &[Device], image: &[u8], secret: &GroupSecret, options: SeedOptions) -> Result<Self> {
        let count = devices.len();
        if count == 0 || count > 1 << 12 {
            return Err(Error::InvalidArgument(format!("{count} ranks: at least 1 and at most 4096")));
        }
        if options.chains == 0 || options.chains > MOST_CHAINS {
            return Err(Error::InvalidArgument(format!(
                "{} chains: at least 1 and at most {MOST_CHAINS}",
                options.chains
            )));
        }
        if !matches!(options.algorithm, Algorithm::Ring | Algorithm::Tree) {
            let what = format!("the {} algorithm in the published structure", options.algorithm.name());
            return Err(Error::Unsupported { backend: "cuda", what });
        }
        let plan = Plan::new(&Schedule::new(Collective::AllReduce, options.algorithm, count));
        let longest = step::chunk(0, plan.chunks as u32, options.max_bytes as u64).1 as usize;
        if longest > LONGEST_MESSAGE {
            return Err(Error::InvalidArgument(format!(
                "chunks of {longest} bytes: a message has at most {LONGEST_MESSAGE}; reduce less at a time"
            )));
        }
        let slot_bytes = (longest.next_multiple_of(16) + TAG_BYTES).next_multiple_of(256);
        let (mut ranks, mut modules) = (Vec::with_capacity(count), Vec::with_capacity(count));
        let mut kernels = Vec::<SeedKernels>::with_capacity(count);
        for (number, device) in devices.iter().enumerate() {
            for peer in devices {
                device.enable_peer_access(peer)?;
            }
            let same = devices[..number].iter().position(|other| other.ordinal() == device.ordinal());
            let (module, its_kernels) = match same {
                Some(first) => (Module::clone(&modules[first]), kernels[first].clone()),
                None => {
                    let module = Module::load(device, image)?;
                    let kernels = SeedKernels::new(&module)?;
                    (module, kernels)
                }
            };
            modules.push(module);
            kernels.push(its_kernels);
            let mut senders = vec![0; plan.slots[number]];
            for reception in plan.receptions.iter().filter(|reception| reception.rank == number) {
                senders[reception.slot] = reception.from;
            }
            let senders: Vec<_> = senders.into_iter().map(|from| &devices[from]).collect();
            ranks.push(Rank::new(device, &senders, slot_bytes, options.crypto)?);
        }
        let keys = match options.crypto {
            false => None,
            true => {
                let terms = Terms {
                    ranks: count,
                    crypto: Crypto::Gcm(options.key),
                    record_bytes: 0,
                    key_bytes: options.key_bytes,
                };
                let senders = (0..count).map(|rank| {
                    let mut senders = plan.heard(rank);
                    senders.push(rank);
                    senders
                });
                let senders: Vec<_> = senders.collect();
                let streams: Vec<_> = ranks.iter().map(|rank| &rank.stream).collect();
                let (length, chains) = (options.key, options.chains);
                Some(SeedKeys::new(secret, terms, length, chains, &kernels, &senders, &streams)?)
            }
        };
        for rank in &ranks {
            rank.stream.synchronize()?;
        }
        Ok(Self { options, plan, kernels, ranks, slot_bytes, keys, sequence: 1, poisoned: false })
    }

    /// # Safety
    /// As [`Collectives::run`].
    unsafe fn queue(&mut self, run: &Run<'_>) -> Result<()> {
        // Once for all calls on the first device.
        let _current = self.ranks[0].stream.device().bind()?;
        // Buffers and inboxes are free once the collective before has left them, on whatever streams it ran.
        for (number, stream) in run.streams.iter().enumerate() {
            stream.wait(&self.ranks[number].left)?;
            let sends = self.plan.works.iter().filter(|work| work.rank == number);
            let mut peers: Vec<_> = sends.flat_map(|work| work.sends.iter().map(|&(peer, _)| peer)).collect();
            peers.sort_unstable();
            peers.dedup();
            for peer in peers {
                stream.wait(&self.ranks[peer].left)?;
            }
        }
        let longest = step::chunk(0, self.plan.chunks as u32, run.bytes as u64).1 as usize;
        let calls = self.plan.seals() as u64 * volume::calls_of_message(longest);
        if let Some(keys) = &mut self.keys {
            keys.reserve(calls, &self.kernels, run.streams)?;
        }
        for work in &self.plan.works {
            // SAFETY: the caller's promise.
            unsafe { self.work(run, work)? };
        }
        for (number, (rank, stream)) in self.ranks.iter().zip(run.streams).enumerate() {
            if self.keys.is_some() && run.bytes != 0 && self.ranks.len() > 1 {
                let params = WipeParams {
                    failure: rank.failure.pointer(),
                    output: run.buffers[number].output,
                    bytes: run.bytes as u64,
                };
                // SAFETY: the output is the caller's, the failure word the rank's.
                unsafe { self.kernels[number].wipe(&params, stream)? };
            }
            stream.mark(&rank.left)?;
        }
        Ok(())
    }

    /// Queues one step of one rank.
    ///
    /// # Safety
    /// As [`Collectives::run`].
    unsafe fn work(&self, run: &Run<'_>, work: &Work) -> Result<()> {
        let (offset, bytes) = step::chunk(work.chunk as u32, self.plan.chunks as u32, run.bytes as u64);
        if bytes == 0 {
            return Ok(());
        }
        let (rank, stream) = (&self.ranks[work.rank], run.streams[work.rank]);
        let [input, output] =
            [run.buffers[work.rank].input, run.buffers[work.rank].output].map(|base| base + offset);
        let last = work.sources.len() - 1;
        let mut value = 0;
        for (number, source) in work.sources.iter().enumerate() {
            let result = if number == last && work.store { output } else { rank.sum.pointer() };
            let operand = match source {
                Source::Local => input,
                Source::Received(reception) => {
                    let opened = if last == 0 { result } else { rank.opened.pointer() };
                    // SAFETY: both are this rank's.
                    unsafe { self.receive(run, *reception, opened, bytes)? }
                }
            };
            if number > 0 {
                let params = ReduceParams {
                    partial: value,
                    local: operand,
                    output: result,
                    bytes,
                    reduction: reduction(run.dtype as u32, run.op as u32),
                    ranks: self.ranks.len() as u32,
                    complete: (number == last && work.finish).into(),
                };
                // SAFETY: the operands and the result are this rank's, and the caller's buffers.
                unsafe { self.kernels[work.rank].reduce(&params, stream)? };
                value = result;
            } else if number == last && work.store && operand != output {
                // SAFETY: as above.
                unsafe { stream.copy(output, operand, bytes as usize)? };
                value = output;
            } else {
                value = operand;
            }
        }
        // SAFETY: the value is this rank's, or the caller's input.
        unsafe { self.send(run, work, value, bytes) }
    }

    /// Queues the waiting for a message, its verification, and its decryption to `opened`. Returns where it lies then: of
    /// plain messages, in the inbox.
    ///
    /// # Safety
    /// `opened` has `bytes` bytes on the receiver's device.
    unsafe fn receive(&self, run: &Run<'_>, number: usize, opened: u64, bytes: u64) -> Result<u64> {
        let reception @ Reception { rank, slot, from, step } = self.plan.receptions[number];
        let stream = run.streams[rank];
        stream.wait(&self.ranks[rank].arrived[slot])?;
        let message = self.ranks[rank].inbox.pointer() + (slot * self.slot_bytes) as u64;
        let Some(keys) = &self.keys else { return Ok(message) };
        let key = sender_key(keys, rank, from)?;
        // SAFETY: the slot is the rank's; the caller promises `opened`.
        unsafe {
            let place = number as u64 + 1;
            self.mac(run, reception.rank, key, Sealing { sender: from, step }, message, bytes, Some(place))?;
            let counter = counter_block(run.sequence, step, 2)?;
            key.text.ctr_xor(counter, CounterWidth::Gcm32, message, opened, bytes, stream)?;
        }
        Ok(opened)
    }

    /// Queues the sealing of a step's result and its copies to the peers.
    ///
    /// # Safety
    /// `value` has `bytes` bytes on the rank's device.
    unsafe fn send(&self, run: &Run<'_>, work: &Work, value: u64, bytes: u64) -> Result<()> {
        if work.sends.is_empty() {
            return Ok(());
        }
        let stream = run.streams[work.rank];
        let (source, length) = match &self.keys {
            None => (value, bytes),
            Some(keys) => {
                let sealed = self.ranks[work.rank].sealed.pointer();
                let key = sender_key(keys, work.rank, work.rank)?;
                // SAFETY: the message is the rank's; the caller promises `value`.
                unsafe {
                    let counter = counter_block(run.sequence, work.step, 2)?;
                    key.text.ctr_xor(counter, CounterWidth::Gcm32, value, sealed, bytes, stream)?;
                    let sealing = Sealing { sender: work.rank, step: work.step };
                    self.mac(run, work.rank, key, sealing, sealed, bytes, None)?;
                }
                (sealed, bytes.next_multiple_of(16) + TAG_BYTES as u64)
            }
        };
        for &(peer, slot) in &work.sends {
            let inbox = self.ranks[peer].inbox.pointer() + (slot * self.slot_bytes) as u64;
            // SAFETY: the slot is this message's, and was left by the collective before.
            unsafe { stream.copy(inbox, source, length as usize)? };
            stream.mark(&self.ranks[peer].arrived[slot])?;
        }
        Ok(())
    }

    /// Queues the making of a message's tag behind its ciphertext; with a `place`, its comparison.
    ///
    /// # Safety
    /// The message has `bytes` bytes on the rank's device, and room for a tag.
    #[allow(clippy::too_many_arguments, reason = "what a tag depends on, each of it once")]
    unsafe fn mac(
        &self,
        run: &Run<'_>,
        rank: usize,
        key: &SenderKey,
        sealing: Sealing,
        message: u64,
        bytes: u64,
        place: Option<u64>,
    ) -> Result<()> {
        let aad = self.associated_data(run, sealing);
        let block = |at: usize| {
            let mut block = [0; 16];
            block.copy_from_slice(&aad.as_bytes()[at..at + 16]);
            le_words(block)
        };
        let mut params = MacParams {
            aad: [block(0), block(16), block(32)],
            mask: le_words(key.encrypt(counter_block(run.sequence, sealing.step, 1)?)),
            key: key.mac.pointer(),
            text: message,
            bytes,
            tag: message + bytes.next_multiple_of(16),
            scratch: self.ranks[rank].scratch.pointer(),
            failure: self.ranks[rank].failure.pointer(),
            place: place.unwrap_or(0),
            chains: self.options.chains,
            aad_bytes: ASSOCIATED_DATA_BYTES as u32,
            check: place.is_some().into(),
        };
        // SAFETY: the key was prepared for these chains on this rank's device; the scratch is the rank's, whose launches
        // follow one on the other; the caller promises the message.
        let result = unsafe { self.kernels[rank].mac(&params, run.streams[rank]) };
        params.mask.zeroize();
        result
    }

    fn associated_data(&self, run: &Run<'_>, sealing: Sealing) -> AssociatedData {
        let (collective, root) = Collective::AllReduce.code();
        AssociatedData {
            version: VERSION,
            collective,
            algorithm: self.options.algorithm as u8,
            dtype: run.dtype as u8,
            op: run.op as u8,
            reserved: 0,
            root: root as u16,
            session: self.keys.as_ref().map_or(0, SeedKeys::session),
            sequence: run.sequence,
            count: run.count as u64,
            sender: sealing.sender as u16,
            ranks: self.ranks.len() as u16,
            step: sealing.step as u32,
            record: 0,
            last: 1,
        }
    }

    /// Where the messages to a rank arrive, all that ever crosses, and the bytes from one message to the next. A message's
    /// tag is at the next multiple of 16 after its text.
    pub fn mailbox(&self, rank: usize) -> (&DeviceBuffer, usize) {
        (&self.ranks[rank].inbox, self.slot_bytes)
    }
}

impl Collectives for SeedGroup {
    /// All-reduces only. Can't be captured in a graph, whose replay would repeat nonces.
    ///
    /// # Errors
    /// Before anything happens also [`Error::Unsupported`] for other collectives, and [`Error::InvalidArgument`] when a
    /// stream is being captured.
    unsafe fn run(
        &mut self,
        request: Request,
        buffers: &[RankBuffers],
        count: usize,
        dtype: Dtype,
        streams: &[&Stream],
    ) -> Result<()> {
        let (op, ranks) = (only_all_reduces(request, "the published structure")?, self.ranks.len());
        if self.poisoned {
            return Err(Error::Poisoned);
        }
        check_one_each(buffers, streams, ranks)?;
        let bytes = vector_bytes(count, dtype, self.options.max_bytes)?;
        for stream in streams {
            stream
                .refuse_capture("a stream is being captured: a replay would repeat nonces; use GpuGroup")?;
        }
        if self.sequence >= MAX_SEQUENCE {
            return Err(Error::InvalidArgument("no collective number is left; re-key".into()));
        }
        let sequence = self.sequence;
        // Used up whatever becomes of the collective.
        self.sequence += 1;
        let run = Run { buffers, streams, bytes, count, dtype, op, sequence };
        // SAFETY: the caller's promise.
        let result = unsafe { self.queue(&run) };
        if result.is_err() {
            // Some ranks may have started.
            self.poisoned = true;
        }
        result
    }

    fn outcome(&mut self) -> Result<()> {
        let mut first = u64::MAX;
        for rank in &self.ranks {
            let mut word = [0; 8];
            rank.failure.read(0, &mut word, &rank.stream)?;
            if let Some(place) = u64::from_le_bytes(word).checked_sub(1) {
                first = first.min(place);
            }
        }
        // A refused message makes those refused that follow from it.
        match usize::try_from(first).ok().and_then(|first| self.plan.receptions.get(first)) {
            None => Ok(()),
            Some(&Reception { rank, step, .. }) => {
                self.poisoned = true;
                Err(Error::Record { rank, step, record: 0 })
            }
        }
    }

    fn rekey(&mut self) -> Result<()> {
        self.poisoned = true;
        for rank in &self.ranks {
            rank.stream.device().synchronize()?;
        }
        for rank in &mut self.ranks {
            rank.failure.fill(0, &rank.stream)?;
            rank.scratch.fill(0, &rank.stream)?;
        }
        if let Some(keys) = &mut self.keys {
            let streams: Vec<_> = self.ranks.iter().map(|rank| &rank.stream).collect();
            keys.renew(&self.kernels, &streams)?;
        }
        for rank in &self.ranks {
            rank.stream.synchronize()?;
        }
        self.sequence = 1;
        self.poisoned = false;
        Ok(())
    }

    fn is_poisoned(&self) -> bool {
        self.poisoned
    }

    fn close(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}

/// Who seals a message, and in which of its steps.
#[derive(Clone, Copy)]
struct Sealing {
    sender: usize,
    step: usize,
}

impl Rank {
    fn new(device: &Device, senders: &[&Device], slot_bytes: usize, crypto: bool) -> Result<Self> {
        let stream = Stream::new(device)?;
        let zeroed = |bytes: usize| {
            let mut buffer = DeviceBuffer::new(device, bytes)?;
            buffer.fill(0, &stream)?;
            Ok::<_, Error>(buffer)
        };
        // What is opened and reduced is wiped before it is freed.
        let private = |needed: bool| DeviceBuffer::secret(device, if needed { slot_bytes } else { 0 });
        let left = Event::untimed(device)?;
        stream.mark(&left)?;
        Ok(Self {
            inbox: zeroed(senders.len() * slot_bytes)?,
            sealed: private(crypto)?,
            opened: private(crypto)?,
            sum: private(true)?,
            scratch: zeroed(size_of::<MacScratch>())?,
            failure: zeroed(8)?,
            arrived: senders.iter().map(|sender| Event::untimed(sender)).collect::<Result<_>>()?,
            left,
            stream,
        })
    }
}

fn sender_key(keys: &SeedKeys, rank: usize, sender: usize) -> Result<&SenderKey> {
    keys.of(rank, sender).ok_or_else(|| {
        Error::InvalidArgument(format!("rank {rank} hears from rank {sender}, whose key was not prepared"))
    })
}

/// The counter block of a message's nonce with this counter (SP 800-38D, 7.1: 1 masks the tag, the text begins with 2).
fn counter_block(sequence: u64, step: usize, counter: u32) -> Result<[u8; 16]> {
    let mut block = [0; 16];
    block[..12].copy_from_slice(&nonce(sequence, step, 0)?);
    block[12..].copy_from_slice(&counter.to_be_bytes());
    Ok(block)
}
