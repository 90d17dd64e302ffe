//! Keystream of a rank's collectives, made before they begin: see `docs/adr/0009-keystream-made-ahead.md`.

use std::collections::BTreeMap;

use ringseal_kernels::aes::RoundKeys;
use ringseal_kernels::padded::ChunkPads;
use zeroize::Zeroizing;

use super::pads::{PadChunk, PadMemory};
use super::{DeviceBuffer, Module, Stream};
use crate::channel::{KeyLength, MAX_SEQUENCE};
use crate::keystream::{Name, Queue, Store, Taken};
use crate::{Error, Result};

/// How much keystream of all-reduces to come a rank keeps, and what may make it.
///
/// An all-reduce of a vector of S bytes has 2 S of keystream on each rank by [`Exchange`](crate::collective::Algorithm), and
/// of n ranks about 3 S by [`RelayRing`](crate::collective::Algorithm) and 4 S by [`Ring`](crate::collective::Algorithm):
/// what the rank seals and what it opens.
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

/// A chunk of a collective that a rank seals or opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Side {
    /// The rank that seals it.
    pub(super) sender: u32,
    /// That rank's step.
    pub(super) step: u32,
    /// Its length.
    pub(super) bytes: usize,
}

/// A rank's keystream of collectives to come.
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
    round_keys: BTreeMap<u32, Zeroizing<RoundKeys>>,
    bits: usize,
    /// Of the collective that keystream is made for.
    record_bytes: u32,
}

impl Queue for Maker {
    fn make(&mut self, slot: usize, sender: u32, serial: u32, name: Name, bytes: u64) -> Result<()> {
        let Some(round_keys) = self.round_keys.get(&sender) else {
            return Err(Error::InvalidArgument(format!(
                "no keystream of rank {sender}: it seals nothing here"
            )));
        };
        let chunk = PadChunk { serial, name, bytes, record_bytes: self.record_bytes };
        self.memory.make(slot, round_keys, self.bits, &chunk)
    }

    fn wipe(&mut self, slot: usize) -> Result<()> {
        self.memory.wipe(slot)
    }
}

/// What one collective's kernel takes. Comes back by [`Ahead::retire`].
#[must_use]
pub(super) struct TakenPads {
    /// Of each of the sides that were asked for.
    pub(super) pads: Vec<ChunkPads>,
    slots: Vec<Taken>,
}

impl std::fmt::Debug for Ahead {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Ahead({:?})", self.store)
    }
}

impl Ahead {
    /// For collectives of which each has up to `sides` chunks of up to `chunk_bytes` bytes that a rank seals or opens, in
    /// records of `record_bytes` bytes or more. Nothing is made before [`begin`](Self::begin).
    pub(super) fn new(
        module: &Module,
        length: KeyLength,
        sides: usize,
        chunk_bytes: usize,
        record_bytes: u32,
        options: &KeystreamAhead,
    ) -> Result<Self> {
        let slots = options.collectives.checked_mul(sides).ok_or_else(|| {
            Error::InvalidArgument(format!("keystream ahead of {} collectives", options.collectives))
        })?;
        let slot_bytes = chunk_bytes.next_multiple_of(16);
        let memory = PadMemory::new(module, slots, slot_bytes, record_bytes, options.makers)?;
        let mut misses = DeviceBuffer::new(module.device(), 4)?;
        misses.fill(0, &memory.stream)?;
        memory.stream.synchronize()?;
        Ok(Self {
            store: Store::new(slots),
            maker: Maker { memory, round_keys: BTreeMap::new(), bits: 8 * length.bytes(), record_bytes },
            misses,
            next: None,
        })
    }

    /// Begins a session with its first keys, by sender: whatever was made before is wiped.
    pub(super) fn begin(&mut self, keys: Vec<(u32, Zeroizing<RoundKeys>)>) -> Result<()> {
        self.next = None;
        self.store.abort(&mut self.maker)?;
        self.enter_epoch(keys)?;
        self.next = Some(0);
        Ok(())
    }

    /// Goes on to other keys: keystream of those before is wiped.
    pub(super) fn enter_epoch(&mut self, keys: Vec<(u32, Zeroizing<RoundKeys>)>) -> Result<()> {
        for (sender, round_keys) in keys {
            self.store.install(sender, &mut self.maker)?;
            self.maker.round_keys.insert(sender, round_keys);
        }
        Ok(())
    }

    /// Has keystream made for the next collectives, of which each gives its sides, in the order of each sender's steps, and the
    /// bytes of a record. Doesn't wait. Of how many there is keystream, or will be.
    pub(super) fn make(&mut self, collectives: impl Iterator<Item = (Vec<Side>, u32)>) -> Result<usize> {
        let Some(next) = self.next else { return Ok(0) };
        let mut made = 0;
        for (sequence, (sides, record_bytes)) in (next..MAX_SEQUENCE).zip(collectives) {
            self.maker.record_bytes = record_bytes;
            for Side { sender, step, bytes } in sides {
                let name = Name { sequence, step };
                if bytes > 0 && !self.store.prepare(sender, name, bytes as u64, &mut self.maker)? {
                    return Ok(made);
                }
            }
            made += 1;
        }
        Ok(made)
    }

    /// The keystream of the next collective's sides, if there is any.
    pub(super) fn take(&mut self, sides: &[Side]) -> Result<Option<TakenPads>> {
        let Some(sequence) = self.next else { return Ok(None) };
        let mut taken = TakenPads { pads: Vec::with_capacity(sides.len()), slots: Vec::new() };
        let mut outcome = Ok(());
        for &Side { sender, step, .. } in sides {
            let (serial, slot) = match self.store.take(sender, Name { sequence, step }, &mut self.maker) {
                Ok(found) => found,
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            };
            let mut pads = ChunkPads { serial, misses: self.misses.pointer(), ..ChunkPads::NONE };
            if let Some(slot) = slot {
                let memory = &self.maker.memory;
                pads.pads = memory.pads(slot.slot);
                pads.heads = memory.heads(slot.slot);
                pads.count = memory.slot_records();
                taken.slots.push(slot);
            }
            taken.pads.push(pads);
        }
        if outcome.is_err() || taken.slots.is_empty() {
            self.give_back(taken)?;
            return outcome.map(|()| None);
        }
        Ok(Some(taken))
    }

    /// Wipes what a kernel on `stream` has used, once it has ended.
    pub(super) fn retire(&mut self, taken: TakenPads, stream: &Stream) -> Result<()> {
        // Keystream that can't be waited for is never used again.
        let end = stream.record()?;
        self.maker.memory.stream.wait(&end)?;
        self.give_back(taken)
    }

    /// Wipes what nothing uses any more.
    fn give_back(&mut self, taken: TakenPads) -> Result<()> {
        taken.slots.into_iter().try_for_each(|slot| self.store.retire(slot, &mut self.maker))
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
