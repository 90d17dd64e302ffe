//! Keystream of collectives' records, made before there is a text: on a stream of low priority and few multiprocessors, in
//! bounded memory.

use std::collections::BTreeMap;
use std::fmt;

use ringseal_kernels::padded::{PADDED_SHARED, PaddedParams, PaddedSide, padded_seal};
use ringseal_kernels::record::Call;
use ringseal_kernels::reduce::{is_common, reduction};
use ringseal_kernels::sealed::SealedKey;
use zeroize::Zeroize;

use super::cipher::Kernels;
use super::gcm::GcmKey;
use super::memory::DeviceBuffer;
use super::module::{Kernel, Launch};
use super::pads::{PadChunk, PadMemory};
use super::stream::{Event, Stream};
use crate::aead::AesKey;
use crate::channel::{MAX_SEQUENCE, MAX_STEPS};
use crate::keystream::{Name, Queue, Store, Taken};
use crate::{Dtype, Error, ReduceOp, Result};

/// The longest record, as long as any that was tried with these kernels; a ring's may be longer.
const LONGEST_RECORD: u32 = 256 << 10;

/// How much keystream is kept, and what may make it.
#[derive(Clone, Copy, Debug)]
pub struct KeystreamOptions {
    /// Chunks whose keystream is kept at once, of all senders together.
    pub slots: usize,
    /// Bytes of keystream of one chunk, a multiple of `record_bytes`; what a chunk has beyond finds none.
    pub slot_bytes: usize,
    /// Length of a record in bytes: a multiple of 16, at most 256 KiB.
    pub record_bytes: u32,
    /// Multiprocessors that make keystream at a time. None: all.
    pub makers: Option<u32>,
}

impl Default for KeystreamOptions {
    /// Four chunks of 32 MiB in records of 256 KiB, made by all multiprocessors.
    fn default() -> Self {
        Self { slots: 4, slot_bytes: 32 << 20, record_bytes: 256 << 10, makers: None }
    }
}

/// What a step does with each record of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkWork {
    /// Seals `input` to `sent`.
    Seal,
    /// Opens `input` to `output`.
    Open,
    /// Opens `input`, reduces `local` into it, finishes an average, and stores that to `output`.
    Reduce,
    /// Opens `input`, reduces `local` into it, and seals that to `sent`.
    ReduceSeal,
}

/// The sender of the records on one side of a step, and the step in which it seals them.
#[derive(Clone, Copy, Debug)]
pub struct ChunkSide {
    /// The rank that seals.
    pub sender: u32,
    /// Its step in the collective.
    pub step: u32,
}

/// One chunk of one collective, as nonces and additional data name it: see [`channel`](crate::channel).
#[derive(Clone, Copy, Debug)]
pub struct Chunk {
    /// What is the same in all records' additional data.
    pub call: Call,
    /// The collective's number in the session.
    pub sequence: u64,
    /// Bytes of the chunk, at most 16 GiB.
    pub bytes: u64,
    /// Whose records are opened; not used by [`ChunkWork::Seal`].
    pub opens: ChunkSide,
    /// Whose records are sealed; used where something is.
    pub seals: ChunkSide,
    /// Element type of what is reduced: f32, f16 or bf16.
    pub dtype: Dtype,
    /// Sum or average.
    pub op: ReduceOp,
}

/// Device memory of a step, by address; all multiples of 16, and 0 where a work doesn't use it.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChunkMemory {
    /// Ciphertext that is opened, readable to the next multiple of 16; the plaintext of [`ChunkWork::Seal`].
    pub input: u64,
    /// What is reduced into the opened text.
    pub local: u64,
    /// Where plaintext goes; may be `local`. Zeros where a record is forged.
    pub output: u64,
    /// Where ciphertext goes, writable to the next multiple of 16. Zeros where what went into a record was forged.
    pub sent: u64,
    /// Tags of the opened records, 16 bytes each.
    pub tags_in: u64,
    /// Tags of the sealed records; zeros, which verify nothing, where what went into a record was forged.
    pub tags_out: u64,
    /// A word for each opened record: [`VERIFIED`](ringseal_kernels::gcm::VERIFIED) or
    /// [`FORGED`](ringseal_kernels::gcm::FORGED).
    pub verdicts: u64,
}

/// Keystream made ahead of time, by sender and key, and the steps that use it.
///
/// A step finds the keystream of each record, or makes it then: results are the same bytes. Keystream is for one record of
/// one collective under one key; it is used once, and overwritten after the step. A sender's new key, or
/// [`abort`](Self::abort), ends all that was made before.
///
/// How much a key encrypts is the caller's to count ([`volume`](crate::channel::volume)), as are collectives.
pub struct Keystream {
    options: KeystreamOptions,
    store: Store,
    maker: Maker,
    steps: [Kernel; 4],
    kernels: Kernels,
    /// For pads that are not there: two records a block.
    scratch: DeviceBuffer,
    misses: DeviceBuffer,
    /// The end of the latest step, as all share `scratch`.
    latest: Option<Event>,
}

/// The memory with the keys, that does what the store tells.
struct Maker {
    memory: PadMemory,
    keys: BTreeMap<u32, GcmKey>,
    record_bytes: u32,
}

impl Queue for Maker {
    fn make(&mut self, slot: usize, sender: u32, serial: u32, name: Name, bytes: u64) -> Result<()> {
        let Some(key) = self.keys.get(&sender) else {
            return Err(Error::InvalidArgument(format!("sender {sender} has no key: install one first")));
        };
        let mut sealed = key.sealed();
        let record_bytes = self.record_bytes;
        let chunk = PadChunk { serial, name, bytes, record_bytes, entry: 0, misses: 0 };
        let made = self.memory.make(slot, &sealed.round_keys, key.bits(), &chunk);
        sealed.round_keys.zeroize();
        made
    }

    fn wipe(&mut self, slot: usize) -> Result<()> {
        self.memory.wipe(slot)
    }
}

impl Keystream {
    /// Allocates the memory. Zeros, as long as nothing is made.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for impossible options, [`Error::Unsupported`] where the kernels are not for the device,
    /// [`Error::Cuda`].
    pub fn new(kernels: &Kernels, options: KeystreamOptions) -> Result<Self> {
        let KeystreamOptions { slots, slot_bytes, record_bytes, makers } = options;
        if record_bytes == 0 || !record_bytes.is_multiple_of(16) || record_bytes > LONGEST_RECORD {
            let text = "keystream: record_bytes must be a multiple of 16 from 16 to 256 KiB";
            return Err(Error::InvalidArgument(text.into()));
        }
        let whole = slot_bytes.is_multiple_of(record_bytes as usize);
        if slots == 0 || slot_bytes == 0 || !whole {
            let text = "keystream: slots and slot_bytes must be at least 1, and slot_bytes whole records";
            return Err(Error::InvalidArgument(text.into()));
        }
        kernels.gcm()?;
        let memory = PadMemory::new(kernels.module(), slots, slot_bytes, record_bytes, makers)?;
        let secret = |bytes: usize| -> Result<DeviceBuffer> {
            let mut buffer = DeviceBuffer::secret(kernels.device(), bytes)?;
            buffer.fill(0, &memory.stream)?;
            Ok(buffer)
        };
        let scratch = secret(2 * kernels.multiprocessors() as usize * record_bytes as usize)?;
        let misses = secret(4)?;
        memory.stream.synchronize()?;
        let kernel = |name| kernels.module().kernel(name, PADDED_SHARED);
        Ok(Self {
            options,
            store: Store::new(slots),
            steps: [
                kernel("padded_seal")?,
                kernel("padded_open")?,
                kernel("padded_reduce")?,
                kernel("padded_reduce_seal")?,
            ],
            maker: Maker { memory, keys: BTreeMap::new(), record_bytes },
            kernels: kernels.clone(),
            scratch,
            misses,
            latest: None,
        })
    }

    /// The options it was made with.
    pub fn options(&self) -> &KeystreamOptions {
        &self.options
    }

    /// Gives a sender its key: the first, or that of a new epoch or session. Keystream made under its earlier key is
    /// wiped. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for AES-192, [`Error::Cuda`].
    pub fn install(&mut self, sender: u32, key: &AesKey) -> Result<()> {
        if key.bits() == 192 {
            return Err(Error::Unsupported { backend: "cuda", what: "AES-192 in collectives".into() });
        }
        let key = GcmKey::new(&self.kernels, key, &self.maker.memory.stream)?;
        // Its memory is freed, which waits for what uses it.
        self.maker.keys.remove(&sender);
        self.store.install(sender, &mut self.maker)?;
        self.maker.keys.insert(sender, key);
        Ok(())
    }

    /// Has keystream made for the chunk that `side` seals in collective `sequence`, of `bytes` bytes or fewer. Doesn't
    /// wait. Whether it is made now or was before: not where all slots are taken, or the sender has come as far already.
    ///
    /// A wrong guess costs the making: it is wiped when the sender's later chunks come.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a sender without a key or numbers beyond their limits, [`Error::Cuda`].
    pub fn prepare(&mut self, sequence: u64, side: ChunkSide, bytes: u64) -> Result<bool> {
        check_nonce(sequence, side)?;
        if bytes == 0 {
            return Ok(false);
        }
        let name = Name { sequence, step: side.step };
        self.store.prepare(side.sender, name, bytes, &mut self.maker)
    }

    /// Queues a step on `stream`, with what keystream there is. No bytes, no step.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a sender without a key or one whose chunk is not later than its latest (nonces would
    /// repeat), for misaligned memory, for keys of two lengths, for numbers beyond their limits;
    /// [`Error::Unsupported`] for other reductions, and while the stream is captured: a graph would repeat nonces;
    /// [`Error::Cuda`]. The chunk's nonces count as used then.
    ///
    /// # Safety
    /// What `memory` names is valid on the stream's device, which is that of the kernels, until the stream has passed the
    /// work; nothing else writes it meanwhile.
    pub unsafe fn step(
        &mut self,
        work: ChunkWork,
        chunk: &Chunk,
        memory: &ChunkMemory,
        stream: &Stream,
    ) -> Result<()> {
        if chunk.bytes == 0 {
            return Ok(());
        }
        if stream.is_capturing()? {
            let what = "steps with keystream in a captured graph, which would repeat their nonces".into();
            return Err(Error::Unsupported { backend: "cuda", what });
        }
        let (opens, seals) =
            (work != ChunkWork::Seal, matches!(work, ChunkWork::Seal | ChunkWork::ReduceSeal));
        self.check(work, chunk, memory, opens, seals)?;
        let (key_in, key_out) = (opens.then_some(chunk.opens), seals.then_some(chunk.seals));
        let mut taken = Vec::with_capacity(2);
        let outcome = (|| {
            let mut side = |side: Option<ChunkSide>| self.side(chunk.sequence, side, &mut taken);
            let mut sides = [side(key_in)?, side(key_out)?];
            // SAFETY: the caller's.
            let launched = unsafe { self.launch(work, chunk, memory, &sides, stream) };
            sides.iter_mut().for_each(|side| side.key.round_keys.zeroize());
            launched
        })();
        // Keystream may be in use from here on, whatever the outcome. What can't be waited for is never used again.
        let end = stream.record()?;
        self.maker.memory.stream.wait(&end)?;
        self.latest = Some(end);
        for taken in taken {
            self.store.retire(taken, &mut self.maker)?;
        }
        outcome
    }

    /// Wipes all keystream and forgets all keys, after a failed collective or at a session's end: no step is done until
    /// senders have keys again. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn abort(&mut self) -> Result<()> {
        let outcome = self.store.abort(&mut self.maker);
        self.maker.keys.clear();
        outcome?;
        self.maker.memory.stream.synchronize()
    }

    /// Waits until all that was asked for is made.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn synchronize(&self) -> Result<()> {
        self.maker.memory.stream.synchronize()
    }

    /// How many records' keystream was not there when steps wanted it, modulo 2^32, once `stream` has come so far.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn misses(&self, stream: &Stream) -> Result<u32> {
        let mut word = [0; 4];
        self.misses.read(0, &mut word, stream)?;
        Ok(u32::from_le_bytes(word))
    }

    /// Whether no keystream lies in its memory, once all that was asked for is done: for audits, as it copies all of it.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn is_blank(&self) -> Result<bool> {
        let scratch = self.scratch.to_host(&self.maker.memory.stream)?;
        Ok(self.maker.memory.is_blank()? && scratch.iter().all(|&byte| byte == 0))
    }

    /// What a kernel takes of one side, and its keystream taken.
    fn side(&mut self, sequence: u64, side: Option<ChunkSide>, taken: &mut Vec<Taken>) -> Result<PaddedSide> {
        let none = PaddedSide {
            key: SealedKey { round_keys: [0; 60], ghash_key: 0 },
            pads: 0,
            heads: 0,
            count: 0,
            serial: 0,
            sender: 0,
            step: 0,
        };
        let Some(ChunkSide { sender, step }) = side else { return Ok(none) };
        let (serial, slot) = self.store.take(sender, Name { sequence, step }, &mut self.maker)?;
        let place = match slot {
            Some(slot) => {
                let at = slot.slot;
                taken.push(slot);
                (self.maker.memory.pads(at), self.maker.memory.heads(at), self.maker.memory.slot_records())
            }
            None => (0, 0, 0),
        };
        let (pads, heads, count) = place;
        let key = self.maker.keys.get(&sender).map_or(none.key, GcmKey::sealed);
        Ok(PaddedSide { key, pads, heads, count, serial, sender, step })
    }

    unsafe fn launch(
        &self,
        work: ChunkWork,
        chunk: &Chunk,
        memory: &ChunkMemory,
        &[opens, seals]: &[PaddedSide; 2],
        stream: &Stream,
    ) -> Result<()> {
        if let Some(latest) = &self.latest {
            stream.wait(latest)?;
        }
        let records = chunk.bytes.div_ceil(self.options.record_bytes.into());
        let mut params = PaddedParams {
            call: chunk.call,
            opens,
            seals,
            sequence: chunk.sequence,
            input: memory.input,
            local: memory.local,
            output: memory.output,
            sent: memory.sent,
            tags_in: memory.tags_in,
            tags_out: memory.tags_out,
            verdicts: memory.verdicts,
            scratch: self.scratch.pointer(),
            misses: self.misses.pointer(),
            bytes: chunk.bytes,
            record_bytes: self.options.record_bytes,
            rounds: self.rounds(work, chunk)?,
            reduction: reduction(chunk.dtype as u32, chunk.op as u32),
            ranks: chunk.call.ranks,
        };
        let blocks = records.min(self.kernels.multiprocessors().into()) as u32;
        let launch = Launch { blocks, threads: padded_seal::THREADS };
        // SAFETY: the parameters are those of the kernels, and the caller promises the chunk's memory; what is this value's
        // own is used by one step at a time.
        let launched = unsafe { self.steps[work as usize].launch(launch, stream, &params) };
        params.opens.key.round_keys.zeroize();
        params.seals.key.round_keys.zeroize();
        launched
    }

    /// Rounds of AES, by the length of the keys.
    fn rounds(&self, work: ChunkWork, chunk: &Chunk) -> Result<u32> {
        let bits = |side: ChunkSide| {
            let key = self.maker.keys.get(&side.sender);
            key.map(GcmKey::bits).ok_or_else(|| {
                Error::InvalidArgument(format!("sender {} has no key: install one first", side.sender))
            })
        };
        let bits = match work {
            ChunkWork::Seal => bits(chunk.seals)?,
            ChunkWork::Open | ChunkWork::Reduce => bits(chunk.opens)?,
            ChunkWork::ReduceSeal if bits(chunk.opens)? != bits(chunk.seals)? => {
                return Err(Error::InvalidArgument("the two senders' keys differ in length".into()));
            }
            ChunkWork::ReduceSeal => bits(chunk.opens)?,
        };
        Ok(if bits == 128 { 10 } else { 14 })
    }

    /// All that can be refused before nonces count as used.
    fn check(
        &self,
        work: ChunkWork,
        chunk: &Chunk,
        memory: &ChunkMemory,
        opens: bool,
        seals: bool,
    ) -> Result<()> {
        if opens {
            check_nonce(chunk.sequence, chunk.opens)?;
        }
        if seals {
            check_nonce(chunk.sequence, chunk.seals)?;
        }
        if chunk.bytes > MOST_BYTES {
            return Err(Error::Length {
                what: "a chunk",
                got: chunk.bytes.into(),
                limit: "the kernels take at most 16 GiB",
            });
        }
        let stores = matches!(work, ChunkWork::Open | ChunkWork::Reduce);
        let reduces = matches!(work, ChunkWork::Reduce | ChunkWork::ReduceSeal);
        let used = [
            ("input", memory.input, true, 16),
            ("local", memory.local, reduces, 16),
            ("output", memory.output, stores, 16),
            ("sent", memory.sent, seals, 16),
            ("tags_in", memory.tags_in, opens, 16),
            ("tags_out", memory.tags_out, seals, 16),
            ("verdicts", memory.verdicts, opens, 4),
        ];
        for (what, address, used, alignment) in used {
            if used && (address == 0 || !address.is_multiple_of(alignment)) {
                let text = format!("{what}: the address must be a multiple of {alignment}, not {address:#x}");
                return Err(Error::InvalidArgument(text));
            }
        }
        if reduces && !is_common(reduction(chunk.dtype as u32, chunk.op as u32)) {
            let what = format!("{:?} of {:?} in steps with keystream", chunk.op, chunk.dtype);
            return Err(Error::Unsupported { backend: "cuda", what });
        }
        self.rounds(work, chunk).map(drop)
    }
}

/// Longest chunk: quads are counted in 31 bits.
const MOST_BYTES: u64 = 16 << 30;

/// # Errors
/// [`Error::InvalidArgument`] for what a nonce has no room for.
fn check_nonce(sequence: u64, side: ChunkSide) -> Result<()> {
    if sequence >= MAX_SEQUENCE || side.step >= MAX_STEPS {
        return Err(Error::InvalidArgument(format!(
            "collective {sequence}, step {}: a nonce has no room for one of them; re-key",
            side.step
        )));
    }
    Ok(())
}

impl fmt::Debug for Keystream {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Keystream({:?}, {:?})", self.kernels.device(), self.options)
    }
}
