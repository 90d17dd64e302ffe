//! Keystream of a rank's collectives, made before they begin: see `docs/adr/0009-keystream-made-ahead.md`.

use std::collections::{BTreeMap, VecDeque};

use ringseal_kernels::aes::RoundKeys;
use ringseal_kernels::padded::ChunkPads;
use ringseal_kernels::sealed::StepPads;
use zeroize::Zeroizing;

use super::pads::{PadChunk, PadMemory};
use super::{DeviceBuffer, Event, Module, Stream};
use crate::channel::KeyLength;
use crate::keystream::{Bounds, Collectives, Entry, Maker, Name, Planned, Queue, StepSides, TakenChunks};
use crate::{Error, Result};

/// How much keystream of all-reduces to come a rank keeps, and what may make it.
///
/// An all-reduce of a vector of S bytes has 2 S of keystream on each rank by [`Exchange`](crate::collective::Algorithm), and
/// of n ranks about 3 S by [`RelayRing`](crate::collective::Algorithm) and 4 S by [`Ring`](crate::collective::Algorithm):
/// what the rank seals and what it opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeystreamAhead {
    /// Collectives whose keystream is kept at once, at least 1: those that it is made for, and those that use it and are not
    /// over. Who makes it while earlier collectives run has room for both.
    pub collectives: usize,
    /// Bytes of a vector, at least 1. A ring's longer one has no keystream, an exchange's none beyond.
    pub bytes: usize,
    /// Multiprocessors that make keystream at a time. None: all.
    pub makers: Option<u32>,
}

impl KeystreamAhead {
    /// Whether keystream made ahead shortens an iteration of a training whose all-reduces take `sm_budget` of a GPU's
    /// `multiprocessors` ([`GpuOptions::sm_budget`](super::GpuOptions::sm_budget)): if they are at most a quarter.
    ///
    /// Measured with exchanges between two H200s beside BERT-Large's products, whatever the key's length: it pays on 16 and 32 of
    /// 132 multiprocessors, and costs on 64 and 132 (`docs/timeline.md`). There keystream is made beside the products; a GPU that
    /// idles between iterations can gain with more. Rings, and ranks that share a GPU, were not measured.
    #[must_use]
    pub fn pays(sm_budget: Option<u32>, multiprocessors: u32) -> bool {
        sm_budget.is_some_and(|budget| budget <= multiprocessors / 4)
    }

    /// # Errors
    /// [`Error::InvalidArgument`] for impossible options.
    pub(super) fn check(&self) -> Result<()> {
        if self.collectives == 0 || self.bytes == 0 {
            return Err(Error::InvalidArgument("keystream ahead of no collectives, or of no bytes".into()));
        }
        Ok(())
    }
}

/// A rank's keystream of collectives to come.
pub(super) struct Ahead {
    collectives: Collectives<Event>,
    maker: PadMaker,
}

/// The memory with the keys.
struct PadMaker {
    memory: PadMemory,
    round_keys: BTreeMap<u32, Zeroizing<RoundKeys>>,
    bits: usize,
    /// Tables of [`StepPads`].
    tables: DeviceBuffer,
    table_bytes: usize,
    /// Counts records whose keystream was not there.
    misses: DeviceBuffer,
    /// Of what is made next.
    record_bytes: u32,
    entry: u64,
    /// The latest making that is known to be done, and those after it.
    done: u64,
    under_way: VecDeque<(u64, Event)>,
    /// Events to mark collectives' ends with: making one takes the host time in every launch.
    spare: Vec<Event>,
}

impl Queue for PadMaker {
    fn make(&mut self, slot: usize, sender: u32, serial: u32, name: Name, bytes: u64) -> Result<()> {
        let Some(round_keys) = self.round_keys.get(&sender) else {
            return Err(Error::InvalidArgument(format!(
                "no keystream of rank {sender}: it seals nothing here"
            )));
        };
        let (record_bytes, entry, misses) = (self.record_bytes, self.entry, self.misses.pointer());
        let chunk = PadChunk { serial, name, bytes, record_bytes, entry, misses };
        self.memory.make(slot, round_keys, self.bits, &chunk)
    }

    fn wipe(&mut self, slot: usize) -> Result<()> {
        self.memory.wipe(slot)
    }
}

impl Maker for PadMaker {
    type End = Event;

    fn place(&mut self, record_bytes: u32, Entry { table, step, seals }: Entry) {
        let side = usize::from(seals) * size_of::<ChunkPads>();
        self.entry = self.table(table) + (step * size_of::<StepPads>() + side) as u64;
        self.record_bytes = record_bytes;
    }

    fn mark(&mut self, making: u64) -> Result<()> {
        let done = Event::untimed(self.memory.stream.device())?;
        self.memory.stream.mark(&done)?;
        self.under_way.push_back((making, done));
        Ok(())
    }

    fn is_made(&mut self, making: u64) -> Result<bool> {
        while self.done < making
            && let Some((number, done)) = self.under_way.front()
        {
            if !done.is_reached()? {
                break;
            }
            self.done = *number;
            self.under_way.pop_front();
        }
        Ok(self.done >= making)
    }

    fn is_over(&self, end: &Event) -> Result<bool> {
        end.is_reached()
    }

    fn recycle(&mut self, end: Event) {
        self.spare.push(end);
    }
}

impl PadMaker {
    /// Where a collective's table lies.
    fn table(&self, table: usize) -> u64 {
        self.tables.pointer() + (table * self.table_bytes) as u64
    }
}

/// What one collective's kernel takes. Comes back by [`Ahead::retire`].
#[must_use]
pub(super) struct TakenPads {
    chunks: TakenChunks,
    /// Address of a [`StepPads`] for each step.
    pub(super) table: u64,
    /// The same of each chunk of any bytes, in the order of the steps.
    pub(super) pads: Vec<ChunkPads>,
}

impl std::fmt::Debug for Ahead {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Ahead({:?})", self.collectives)
    }
}

impl Ahead {
    /// For collectives of these bounds, with records of `record_bytes` bytes or more. Nothing is made before
    /// [`begin`](Self::begin).
    pub(super) fn new(
        module: &Module,
        length: KeyLength,
        bounds: Bounds,
        record_bytes: u32,
        options: &KeystreamAhead,
    ) -> Result<Self> {
        let too_many =
            || Error::InvalidArgument(format!("keystream ahead of {} collectives", bounds.collectives));
        let slots = bounds.collectives.checked_mul(bounds.sides).ok_or_else(too_many)?;
        let slot_bytes = bounds.chunk_bytes.next_multiple_of(16);
        let memory = PadMemory::new(module, slots, slot_bytes, record_bytes, options.makers)?;
        let table_bytes = bounds.steps * size_of::<StepPads>();
        let zeros = |bytes| -> Result<DeviceBuffer> {
            let mut buffer = DeviceBuffer::new(module.device(), bytes)?;
            buffer.fill(0, &memory.stream)?;
            Ok(buffer)
        };
        let tables = zeros(bounds.collectives.checked_mul(table_bytes).ok_or_else(too_many)?)?;
        let misses = zeros(4)?;
        memory.stream.synchronize()?;
        let maker = PadMaker {
            memory,
            round_keys: BTreeMap::new(),
            bits: 8 * length.bytes(),
            tables,
            table_bytes,
            misses,
            record_bytes,
            entry: 0,
            done: 0,
            under_way: VecDeque::new(),
            spare: Vec::new(),
        };
        Ok(Self { collectives: Collectives::new(bounds), maker })
    }

    /// Begins a session with its first keys, by sender: whatever was made before is wiped. The device is idle.
    pub(super) fn begin(&mut self, keys: Vec<(u32, Zeroizing<RoundKeys>)>) -> Result<()> {
        self.collectives.begin(keys.iter().map(|&(sender, _)| sender), &mut self.maker)?;
        self.maker.round_keys.extend(keys);
        Ok(())
    }

    /// Goes on to other keys: keystream of those before is wiped.
    pub(super) fn enter_epoch(&mut self, keys: Vec<(u32, Zeroizing<RoundKeys>)>) -> Result<()> {
        self.collectives.enter_epoch(keys.iter().map(|&(sender, _)| sender), &mut self.maker)?;
        self.maker.round_keys.extend(keys);
        Ok(())
    }

    /// Has all wiped that no collective uses, until the next [`begin`](Self::begin). Doesn't wait.
    pub(super) fn end(&mut self) -> Result<()> {
        self.collectives.end(&mut self.maker)
    }

    /// Has what collectives used wiped, if they are over, and keystream made for the next ones, in this order. Doesn't wait. Of
    /// how many there is keystream, or will be.
    pub(super) fn make(&mut self, plans: impl Iterator<Item = Planned>) -> Result<usize> {
        self.collectives.make(plans, &mut self.maker)
    }

    /// The keystream of the next collective, of a vector of `bytes` bytes, if it is ready. Neither waits nor queues anything.
    pub(super) fn take(
        &mut self,
        bytes: usize,
        record_bytes: usize,
        steps: &[StepSides],
    ) -> Result<Option<TakenPads>> {
        let Some(chunks) = self.collectives.take(bytes, record_bytes as u32, steps, &mut self.maker)? else {
            return Ok(None);
        };
        let memory = &self.maker.memory;
        let pads = chunks.sides.iter().map(|(serial, taken)| ChunkPads {
            pads: memory.pads(taken.slot),
            heads: memory.heads(taken.slot),
            count: memory.slot_records(),
            serial: *serial,
            misses: self.maker.misses.pointer(),
        });
        let pads = pads.collect();
        Ok(Some(TakenPads { table: self.maker.table(chunks.table), chunks, pads }))
    }

    /// Has what a kernel on `stream` uses wiped when it has ended.
    pub(super) fn retire(&mut self, taken: TakenPads, stream: &Stream) -> Result<()> {
        // Keystream whose end is not known is never used again.
        let end = match self.maker.spare.pop() {
            Some(end) => end,
            None => Event::untimed(stream.device())?,
        };
        stream.mark(&end)?;
        self.collectives.retire(taken.chunks, end);
        Ok(())
    }

    /// Counts a collective.
    pub(super) fn count(&mut self, captured: bool) -> Result<()> {
        self.collectives.count(captured, &mut self.maker)
    }

    /// Waits until all that was asked for is made, all collectives with keystream are over, and what they used is wiped.
    pub(super) fn synchronize(&mut self) -> Result<()> {
        self.collectives.ends().try_for_each(Event::synchronize)?;
        self.collectives.reclaim(&mut self.maker)?;
        self.maker.memory.stream.synchronize()?;
        self.maker.done = self.collectives.makings();
        self.maker.under_way.clear();
        Ok(())
    }

    /// Records that were to have keystream and had none when they were sealed or opened, modulo 2^32.
    pub(super) fn misses(&self) -> Result<u32> {
        let mut word = [0; 4];
        self.maker.misses.read(0, &mut word, &self.maker.memory.stream)?;
        Ok(u32::from_le_bytes(word).wrapping_add(self.collectives.without()))
    }

    /// Whether no keystream is left in its memory.
    pub(super) fn is_blank(&self) -> Result<bool> {
        self.maker.memory.is_blank()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As each number of multiprocessors in `docs/timeline.md` was measured.
    #[test]
    fn keystream_pays_for_few_multiprocessors() {
        for (budget, pays) in
            [(Some(16), true), (Some(32), true), (Some(64), false), (Some(132), false), (None, false)]
        {
            assert_eq!(KeystreamAhead::pays(budget, 132), pays, "{budget:?} of 132");
        }
        assert!(KeystreamAhead::pays(Some(33), 132) && !KeystreamAhead::pays(Some(34), 132));
    }
}
