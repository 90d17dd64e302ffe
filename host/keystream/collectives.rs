//! Keystream of the collectives to come: which collectives have all of theirs, and when it is wiped.
//!
//! Ranks that run a collective wait for each other on the device. So nothing is queued while it is launched, neither work nor
//! a wait: what it has used is wiped when the host next makes keystream, or waits for it, and finds that it is over.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use super::{Name, Queue, Store, Taken};
use crate::Result;
use crate::channel::MAX_SEQUENCE;

/// A chunk of a collective that a rank seals or opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Side {
    /// The rank that seals it.
    pub(crate) sender: u32,
    /// That rank's step.
    pub(crate) step: u32,
    /// Its length.
    pub(crate) bytes: usize,
}

/// What a step opens, and what it seals.
pub(crate) type StepSides = [Option<Side>; 2];

/// A collective that keystream is made for.
pub(crate) struct Planned {
    /// Of its vector.
    pub(crate) bytes: usize,
    /// Of a record.
    pub(crate) record_bytes: u32,
    /// Each sender's steps ascend.
    pub(crate) steps: Vec<StepSides>,
}

/// Where one chunk of a collective stands in the tables that tell kernels where its keystream is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Each collective has one.
    pub(crate) table: usize,
    /// The rank's step.
    pub(crate) step: usize,
    /// Whether it seals the chunk there.
    pub(crate) seals: bool,
}

/// What makes keystream and knows how far the device has come.
pub(crate) trait Maker: Queue {
    /// The end of a collective.
    type End;

    /// What is made next has records of this length, and its place is written to the entry.
    fn place(&mut self, record_bytes: u32, entry: Entry);

    /// Gives what was queued so far a number, greater than those before.
    fn mark(&mut self, making: u64) -> Result<()>;

    /// Whether all is made up to this number, as far as is known without waiting.
    fn is_made(&mut self, making: u64) -> Result<bool>;

    /// Whether the collective is over, as far as is known without waiting.
    fn is_over(&self, end: &Self::End) -> Result<bool>;

    /// Takes back the end of a collective that is over.
    fn recycle(&mut self, end: Self::End);
}

/// A collective of which keystream is made or being made.
#[derive(Debug)]
struct Made {
    bytes: usize,
    table: usize,
    making: u64,
}

/// What a collective takes. It comes back by [`Collectives::retire`]; lost, its memory is never used again.
#[must_use]
#[derive(Debug)]
pub(crate) struct TakenChunks {
    /// Of the chunks of any bytes, in the order of the steps: the keys' serial numbers, and where the keystream is.
    pub(crate) sides: Vec<(u32, Taken)>,
    /// Its entries say the same.
    pub(crate) table: usize,
}

/// What is bounded by the memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// Collectives that may have keystream, or use it, at a time.
    pub(crate) collectives: usize,
    /// Chunks of each that have keystream.
    pub(crate) sides: usize,
    /// Steps of each.
    pub(crate) steps: usize,
    /// Of a chunk.
    pub(crate) chunk_bytes: usize,
    /// Whether keystream of some of a collective's records is of use. Where every record waits for the one before, one that
    /// has none takes what is gained by all others.
    pub(crate) partial: bool,
}

/// A rank's collectives in a session, and their keystream.
#[derive(Debug)]
pub(crate) struct Collectives<End> {
    bounds: Bounds,
    store: Store,
    /// The number of the next collective, from 0; unknown once one was captured in a graph, whose replays only the device
    /// counts.
    next: Option<u64>,
    /// By number.
    made: BTreeMap<u64, Made>,
    /// So many times something was made.
    makings: u64,
    /// Tables of none.
    tables: Vec<usize>,
    /// Of collectives that run or ran.
    used: Vec<(End, TakenChunks)>,
    /// Slots that nothing uses, whose wiping is not queued yet.
    unwiped: Vec<usize>,
    /// Records that were to have keystream, of collectives that went without.
    without: u32,
}

/// Queues wiping late: with what is made next, at the latest in the same slot.
struct Late<'a, M> {
    maker: &'a mut M,
    unwiped: &'a mut Vec<usize>,
}

impl<M: Maker> Queue for Late<'_, M> {
    fn make(&mut self, slot: usize, sender: u32, serial: u32, name: Name, bytes: u64) -> Result<()> {
        if let Some(at) = self.unwiped.iter().position(|&unwiped| unwiped == slot) {
            self.maker.wipe(slot)?;
            self.unwiped.swap_remove(at);
        }
        self.maker.make(slot, sender, serial, name, bytes)
    }

    fn wipe(&mut self, slot: usize) -> Result<()> {
        self.unwiped.push(slot);
        Ok(())
    }
}

impl<End> Collectives<End> {
    pub(crate) fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            store: Store::new(bounds.collectives * bounds.sides),
            next: None,
            made: BTreeMap::new(),
            makings: 0,
            tables: (0..bounds.collectives).rev().collect(),
            used: Vec::new(),
            unwiped: Vec::new(),
            without: 0,
        }
    }

    /// Begins a session whose keys are these senders': all that was made before is wiped. No collective of the session before
    /// runs any more.
    ///
    /// # Errors
    /// The queue's. Nothing is made or taken then.
    pub(crate) fn begin(
        &mut self,
        senders: impl Iterator<Item = u32>,
        maker: &mut impl Maker<End = End>,
    ) -> Result<()> {
        self.end(maker)?;
        self.enter_epoch(senders, maker)?;
        self.next = Some(0);
        Ok(())
    }

    /// Ends a session: nothing is made or taken before another begins, and what nothing uses is wiped.
    ///
    /// # Errors
    /// The queue's.
    pub(crate) fn end(&mut self, maker: &mut impl Maker<End = End>) -> Result<()> {
        self.next = None;
        self.forget();
        self.store.abort(&mut Late { maker, unwiped: &mut self.unwiped })?;
        self.reclaim(maker)
    }

    /// Gives all senders other keys: what was made under those before is never taken.
    ///
    /// # Errors
    /// [`Error::KeyExhausted`](crate::Error::KeyExhausted) when no serial number is left.
    pub(crate) fn enter_epoch(
        &mut self,
        mut senders: impl Iterator<Item = u32>,
        maker: &mut impl Maker<End = End>,
    ) -> Result<()> {
        self.forget();
        let mut queue = Late { maker, unwiped: &mut self.unwiped };
        senders.try_for_each(|sender| self.store.install(sender, &mut queue).map(drop))
    }

    /// Queues the wiping of what nothing uses any more, and the making of keystream of the next collectives, in this order.
    /// Of how many there is keystream, or will be.
    ///
    /// # Errors
    /// The maker's, and [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a sender without a key.
    pub(crate) fn make(
        &mut self,
        plans: impl Iterator<Item = Planned>,
        maker: &mut impl Maker<End = End>,
    ) -> Result<usize> {
        self.reclaim(maker)?;
        let Some(next) = self.next else { return Ok(0) };
        self.makings += 1;
        let mut made = 0;
        for (sequence, plan) in (next..MAX_SEQUENCE).zip(plans) {
            if !self.made.contains_key(&sequence) && !self.make_one(sequence, &plan, maker)? {
                break;
            }
            made += 1;
        }
        maker.mark(self.makings)?;
        Ok(made)
    }

    /// Whether there is room for all of it.
    fn make_one(&mut self, sequence: u64, plan: &Planned, maker: &mut impl Maker<End = End>) -> Result<bool> {
        let Planned { bytes, record_bytes, ref steps } = *plan;
        let sides = || steps.iter().flatten().flatten().filter(|side| side.bytes > 0);
        let fits = self.bounds.partial || sides().all(|side| side.bytes <= self.bounds.chunk_bytes);
        if !fits || steps.len() > self.bounds.steps || sides().count() > self.store.room() {
            return Ok(false);
        }
        let Some(&table) = self.tables.last() else { return Ok(false) };
        for (step, sides) in steps.iter().enumerate() {
            for (side, seals) in sides.iter().zip([false, true]) {
                let Some(Side { sender, step: sealed_in, bytes }) = *side else { continue };
                if bytes > 0 {
                    maker.place(record_bytes, Entry { table, step, seals });
                    let name = Name { sequence, step: sealed_in };
                    let mut queue = Late { maker, unwiped: &mut self.unwiped };
                    // There is room, and names ascend: it is made, but for what has failed before.
                    self.store.prepare(sender, name, bytes as u64, &mut queue)?;
                }
            }
        }
        self.tables.pop();
        self.made.insert(sequence, Made { bytes, table, making: self.makings });
        Ok(true)
    }

    /// The keystream of the next collective, of a vector of `bytes` bytes, if it is ready. Queues nothing, and doesn't wait.
    ///
    /// # Errors
    /// As [`Store::take`], and the maker's.
    pub(crate) fn take(
        &mut self,
        bytes: usize,
        record_bytes: u32,
        steps: &[StepSides],
        maker: &mut impl Maker<End = End>,
    ) -> Result<Option<TakenChunks>> {
        let Some(sequence) = self.next else { return Ok(None) };
        let ready = match self.made.get(&sequence) {
            Some(made) if made.bytes == bytes => self.bounds.partial || maker.is_made(made.making)?,
            _ => false,
        };
        let found = self.made.remove(&sequence).map(|Made { table, .. }| table);
        let mut queue = Late { maker, unwiped: &mut self.unwiped };
        let (mut taken, mut outcome, mut complete, mut records) = (Vec::new(), Ok(()), true, 0);
        for &Side { sender, step, bytes } in steps.iter().flatten().flatten().filter(|side| side.bytes > 0) {
            records += bytes.div_ceil(record_bytes as usize) as u32;
            match self.store.take(sender, Name { sequence, step }, &mut queue) {
                Ok((serial, Some(slot))) => taken.push((serial, slot)),
                Ok((_, None)) => complete = false,
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            }
        }
        match found {
            Some(table) if ready && complete && !taken.is_empty() && outcome.is_ok() => {
                return Ok(Some(TakenChunks { sides: taken, table }));
            }
            Some(table) => {
                self.tables.push(table);
                self.without = self.without.wrapping_add(records);
            }
            None => {}
        }
        taken.into_iter().try_for_each(|(_, slot)| self.store.retire(slot, &mut queue))?;
        outcome.map(|()| None)
    }

    /// Has what a collective takes wiped once it is over.
    pub(crate) fn retire(&mut self, taken: TakenChunks, end: End) {
        self.used.push((end, taken));
    }

    /// Counts a collective.
    ///
    /// # Errors
    /// None that the maker has: nothing is queued.
    pub(crate) fn count(&mut self, captured: bool, maker: &mut impl Maker<End = End>) -> Result<()> {
        self.next = if captured { None } else { self.next.map(|next| next + 1) };
        let next = self.next.unwrap_or(u64::MAX);
        if self.made.first_key_value().is_none_or(|(&sequence, _)| sequence >= next) {
            return Ok(());
        }
        // It took none of its keystream.
        let later = self.made.split_off(&next);
        let earlier = std::mem::replace(&mut self.made, later);
        self.tables.extend(earlier.into_values().map(|made| made.table));
        self.store.pass(next, &mut Late { maker, unwiped: &mut self.unwiped })
    }

    /// The ends of collectives whose keystream is to be wiped.
    pub(crate) fn ends(&self) -> impl Iterator<Item = &End> {
        self.used.iter().map(|(end, _)| end)
    }

    /// Queues the wiping of all that nothing uses any more.
    ///
    /// # Errors
    /// The maker's.
    pub(crate) fn reclaim(&mut self, maker: &mut impl Maker<End = End>) -> Result<()> {
        let mut at = 0;
        while let Some((end, _)) = self.used.get(at) {
            if !maker.is_over(end)? {
                at += 1;
                continue;
            }
            let (end, TakenChunks { sides, table }) = self.used.swap_remove(at);
            maker.recycle(end);
            self.tables.push(table);
            let mut queue = Late { maker, unwiped: &mut self.unwiped };
            sides.into_iter().try_for_each(|(_, slot)| self.store.retire(slot, &mut queue))?;
        }
        while let Some(&slot) = self.unwiped.last() {
            maker.wipe(slot)?;
            self.unwiped.pop();
        }
        Ok(())
    }

    /// The number of the latest making.
    pub(crate) fn makings(&self) -> u64 {
        self.makings
    }

    /// Records that were to have keystream, of collectives that went without, modulo 2^32.
    pub(crate) fn without(&self) -> u32 {
        self.without
    }

    /// No collective has keystream any more.
    fn forget(&mut self) {
        let made = std::mem::take(&mut self.made);
        self.tables.extend(made.into_values().map(|made| made.table));
    }
}
