//! Keystream of a rank's exchanges, made before they begin: see `docs/adr/0009-keystream-made-ahead.md`.

use ringseal_kernels::aes::RoundKeys;
use ringseal_kernels::padded::ChunkPads;
use zeroize::Zeroizing;

use super::pads::{PadChunk, PadMemory};
use super::ring_keys::PresentKeys;
use super::{DeviceBuffer, Module, Stream};
use crate::channel::{KeyLength, MAX_SEQUENCE};
use crate::keystream::{Name, Queue, Store, Taken};
use crate::{Error, Result};

/// How much keystream of exchanges to come a rank keeps, and what may make it.
///
/// A collective has twice its vector's bytes of keystream on each rank: what it seals and what it opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeystreamAhead {
    /// Collectives whose keystream is kept at once, at least 1.
    pub collectives: usize,
    /// Bytes of a vector, at least 1; what a longer one has beyond finds no keystream.
    pub bytes: usize,
    /// Multiprocessors that make keystream at a time. None: all.
    pub makers: Option<u32>,
}

impl KeystreamAhead {
    /// # Errors
    /// [`Error::InvalidArgument`] for impossible options.
    pub(super) fn check(&self) -> Result<()> {
        if self.collectives == 0 || self.bytes == 0 {
            return Err(Error::InvalidArgument("keystream ahead of no collectives, or of no bytes".into()));
        }
        Ok(())
    }
}

/// A rank's keystream of exchanges to come.
pub(super) struct Ahead {
    store: Store,
    maker: Maker,
    /// Counts records whose keystream was not there.
    misses: DeviceBuffer,
    /// The number of the next collective, from 0; unknown once one was captured in a graph, whose replays only the device
    /// counts.
    next: Option<u64>,
}

/// The memory with the keys, that does what the store tells.
struct Maker {
    memory: PadMemory,
    /// This rank, and its peer.
    senders: [u32; 2],
    round_keys: [Zeroizing<RoundKeys>; 2],
    bits: usize,
    /// Of the vector that keystream is made for.
    record_bytes: u32,
}

impl Queue for Maker {
    fn make(&mut self, slot: usize, sender: u32, serial: u32, name: Name, bytes: u64) -> Result<()> {
        let round_keys = &self.round_keys[usize::from(sender != self.senders[0])];
        self.memory.make(
            slot,
            round_keys,
            self.bits,
            &PadChunk { serial, name, bytes, record_bytes: self.record_bytes },
        )
    }

    fn wipe(&mut self, slot: usize) -> Result<()> {
        self.memory.wipe(slot)
    }
}

/// What one exchange's kernel takes. Comes back by [`Ahead::retire`].
#[must_use]
pub(super) struct TakenPads {
    pub(super) seals: ChunkPads,
    pub(super) opens: ChunkPads,
    slots: Vec<Taken>,
}

impl TakenPads {
    /// Whether there is keystream of either side.
    pub(super) fn any(&self) -> bool {
        !self.slots.is_empty()
    }
}

impl std::fmt::Debug for Ahead {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Ahead({:?})", self.store)
    }
}

impl Ahead {
    /// For rank `rank` of two, whose records have `record_bytes` bytes or more. Nothing is made before
    /// [`begin`](Self::begin).
    pub(super) fn new(
        module: &Module,
        rank: usize,
        length: KeyLength,
        record_bytes: u32,
        options: &KeystreamAhead,
    ) -> Result<Self> {
        let slots = options.collectives.checked_mul(2).ok_or_else(|| {
            Error::InvalidArgument(format!("keystream ahead of {} collectives", options.collectives))
        })?;
        let memory =
            PadMemory::new(module, slots, options.bytes.next_multiple_of(16), record_bytes, options.makers)?;
        let mut misses = DeviceBuffer::new(module.device(), 4)?;
        misses.fill(0, &memory.stream)?;
        memory.stream.synchronize()?;
        let none = || Zeroizing::new([0; 60]);
        let bits = match length {
            KeyLength::Aes128 => 128,
            KeyLength::Aes256 => 256,
        };
        let senders = [rank as u32, 1 - rank as u32];
        Ok(Self {
            store: Store::new(slots),
            maker: Maker { memory, senders, round_keys: [none(), none()], bits, record_bytes },
            misses,
            next: None,
        })
    }

    /// Begins a session with its first keys: whatever was made before is wiped.
    pub(super) fn begin(&mut self, keys: &PresentKeys) -> Result<()> {
        self.next = None;
        self.store.abort(&mut self.maker)?;
        self.enter_epoch(keys)?;
        self.next = Some(0);
        Ok(())
    }

    /// Goes on to other keys: keystream of those before is wiped.
    pub(super) fn enter_epoch(&mut self, keys: &PresentKeys) -> Result<()> {
        for sender in self.maker.senders {
            self.store.install(sender, &mut self.maker)?;
        }
        let [own, peer] = &mut self.maker.round_keys;
        own.copy_from_slice(&keys.own.round_keys);
        peer.copy_from_slice(&keys.predecessor.round_keys);
        Ok(())
    }

    /// Has keystream made for the next collectives, of which each gives the bytes of its vector and of a record. Doesn't
    /// wait. Of how many there is keystream, or will be.
    pub(super) fn make(&mut self, vectors: impl Iterator<Item = (usize, u32)>) -> Result<usize> {
        let Some(next) = self.next else { return Ok(0) };
        let mut made = 0;
        for (sequence, (bytes, record_bytes)) in (next..MAX_SEQUENCE).zip(vectors) {
            self.maker.record_bytes = record_bytes;
            for sender in self.maker.senders {
                let name = Name { sequence, step: 0 };
                if bytes > 0 && !self.store.prepare(sender, name, bytes as u64, &mut self.maker)? {
                    return Ok(made);
                }
            }
            made += 1;
        }
        Ok(made)
    }

    /// The keystream of the next collective, if there is any.
    pub(super) fn take(&mut self) -> Result<Option<TakenPads>> {
        let Some(sequence) = self.next else { return Ok(None) };
        let mut taken = TakenPads { seals: ChunkPads::NONE, opens: ChunkPads::NONE, slots: Vec::new() };
        for (side, sender) in self.maker.senders.into_iter().enumerate() {
            let (serial, slot) = self.store.take(sender, Name { sequence, step: 0 }, &mut self.maker)?;
            let mut pads = ChunkPads { serial, misses: self.misses.pointer(), ..ChunkPads::NONE };
            if let Some(slot) = slot {
                let memory = &self.maker.memory;
                pads.pads = memory.pads(slot.slot);
                pads.heads = memory.heads(slot.slot);
                pads.count = memory.slot_records();
                taken.slots.push(slot);
            }
            *if side == 0 { &mut taken.seals } else { &mut taken.opens } = pads;
        }
        Ok(Some(taken))
    }

    /// Wipes what a kernel on `stream` has used, once it has ended.
    pub(super) fn retire(&mut self, taken: TakenPads, stream: &Stream) -> Result<()> {
        if !taken.any() {
            return Ok(());
        }
        // Keystream that can't be waited for is never used again.
        let end = stream.record()?;
        self.maker.memory.stream.wait(&end)?;
        for slot in taken.slots {
            self.store.retire(slot, &mut self.maker)?;
        }
        Ok(())
    }

    /// Counts a collective.
    pub(super) fn count(&mut self, captured: bool) {
        self.next = if captured { None } else { self.next.map(|next| next + 1) };
    }

    /// Waits until all that was asked for is made and wiped.
    pub(super) fn synchronize(&self) -> Result<()> {
        self.maker.memory.stream.synchronize()
    }

    /// Records whose keystream was not there, modulo 2^32.
    pub(super) fn misses(&self) -> Result<u32> {
        let mut word = [0; 4];
        self.misses.read(0, &mut word, &self.maker.memory.stream)?;
        Ok(u32::from_le_bytes(word))
    }

    /// Whether no keystream is left in its memory.
    pub(super) fn is_blank(&self) -> Result<bool> {
        self.maker.memory.is_blank()
    }
}
