//! Which keystream made ahead is for which records, and when its memory may be used again: the part of
//! [`cuda::Keystream`](crate::cuda::Keystream) that has nothing to do with a GPU. `docs/adr/0009-keystream-made-ahead.md`
//! has the reasons.
//!
//! The memory is a number of slots of one length. A slot holds the keystream of one chunk: of one sender's key, one
//! collective and one step. It is made once, taken once, and wiped before it is made again, all in the order of one queue.

mod collectives;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ops::RangeBounds;

pub(crate) use collectives::{Bounds, Collectives, Entry, Maker, Planned, Side, StepSides, TakenChunks};

use crate::{Error, Result};

/// What tells a sender's chunks apart: the first 8 bytes of their records' nonces. Later chunks are greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Name {
    /// The collective's number in the session.
    pub(crate) sequence: u64,
    /// The step in which the sender seals.
    pub(crate) step: u32,
}

impl Name {
    /// None is earlier.
    const FIRST: Self = Self { sequence: 0, step: 0 };
    /// None is later.
    const LAST: Self = Self { sequence: u64::MAX, step: u32::MAX };
}

/// The queue of work on the slots' memory.
pub(crate) trait Queue {
    /// Makes keystream for a chunk of `bytes` bytes in a slot that is wiped, or holds what was never made.
    fn make(&mut self, slot: usize, sender: u32, serial: u32, name: Name, bytes: u64) -> Result<()>;

    /// Overwrites a slot with zeros.
    fn wipe(&mut self, slot: usize) -> Result<()>;
}

/// A sender's present key.
#[derive(Clone, Copy, Debug)]
struct Sender {
    serial: u32,
    /// The latest chunk that was sealed or opened under it.
    latest: Option<Name>,
}

/// A slot whose keystream a step uses. It comes back by [`Store::retire`]; lost, the slot is never used again.
#[derive(Debug)]
#[must_use]
pub(crate) struct Taken {
    pub(crate) slot: usize,
}

/// What lies where. A slot that is neither free nor made is used by a step, or never to be used again.
#[derive(Debug)]
pub(crate) struct Store {
    /// Slots that are wiped, or to be by what is queued.
    free: Vec<usize>,
    /// Slots that are made, or to be by what is queued, by their key's serial number and their chunk's name.
    made: BTreeMap<(u32, Name), usize>,
    senders: BTreeMap<u32, Sender>,
    /// Serial numbers of keys so far. None comes twice, so that keystream of an earlier key is never taken for a later one's.
    serials: u32,
}

impl Store {
    pub(crate) fn new(slots: usize) -> Self {
        Self { free: (0..slots).rev().collect(), made: BTreeMap::new(), senders: BTreeMap::new(), serials: 0 }
    }

    /// Gives a sender another key: a new epoch's, or the first. Keystream of its earlier key is wiped. Returns the key's
    /// serial number, from 1.
    ///
    /// # Errors
    /// The queue's; the sender has no key then. [`Error::KeyExhausted`] when no serial number is left.
    pub(crate) fn install(&mut self, sender: u32, queue: &mut impl Queue) -> Result<u32> {
        if let Some(Sender { serial: old, .. }) = self.senders.remove(&sender) {
            self.discard(queue, (old, Name::FIRST)..=(old, Name::LAST))?;
        }
        let serial = self.serials.checked_add(1).ok_or(Error::KeyExhausted { limit: u64::from(u32::MAX) })?;
        self.serials = serial;
        self.senders.insert(sender, Sender { serial, latest: None });
        Ok(serial)
    }

    /// Queues the making of keystream for a chunk. Whether it is made now or was before: not when no slot is free, nor when
    /// the sender's chunks have come as far already.
    ///
    /// # Errors
    /// The queue's, and [`Error::InvalidArgument`] for a sender without a key.
    pub(crate) fn prepare(
        &mut self,
        sender: u32,
        name: Name,
        bytes: u64,
        queue: &mut impl Queue,
    ) -> Result<bool> {
        let Sender { serial, latest } = self.sender(sender)?;
        if latest.is_some_and(|latest| name <= latest) {
            return Ok(false);
        }
        // Of whatever length: a step could claim pads of the first making while they are wiped for a second.
        if self.made.contains_key(&(serial, name)) {
            return Ok(true);
        }
        let Some(slot) = self.free.pop() else { return Ok(false) };
        // What fails half-way is not known: the slot is out of use then.
        queue.make(slot, sender, serial, name, bytes)?;
        self.made.insert((serial, name), slot);
        Ok(true)
    }

    /// How many slots are free.
    pub(crate) fn room(&self) -> usize {
        self.free.len()
    }

    /// Takes a chunk's keystream, if there is any, for the one step that may use it; with the key's serial number.
    /// Keystream of the sender's earlier chunks is wiped: their time is over.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the sender has no key, or its chunks have come as far already: the nonces would
    /// repeat. The queue's.
    pub(crate) fn take(
        &mut self,
        sender: u32,
        name: Name,
        queue: &mut impl Queue,
    ) -> Result<(u32, Option<Taken>)> {
        let Sender { serial, latest } = self.sender(sender)?;
        if latest.is_some_and(|latest| name <= latest) {
            return Err(Error::InvalidArgument(format!(
                "sender {sender}: collective {}, step {} is not later than the latest under its key, and its nonces were \
                 used; count on, or install another key",
                name.sequence, name.step
            )));
        }
        self.senders.insert(sender, Sender { serial, latest: Some(name) });
        self.discard(queue, (serial, Name::FIRST)..(serial, name))?;
        Ok((serial, self.made.remove(&(serial, name)).map(|slot| Taken { slot })))
    }

    /// Wipes keystream of collectives before `sequence`: they came without taking it.
    ///
    /// # Errors
    /// The queue's.
    pub(crate) fn pass(&mut self, sequence: u64, queue: &mut impl Queue) -> Result<()> {
        let serials: Vec<u32> = self.senders.values().map(|sender| sender.serial).collect();
        let end = Name { sequence, ..Name::FIRST };
        serials.into_iter().try_for_each(|serial| self.discard(queue, (serial, Name::FIRST)..(serial, end)))
    }

    /// Wipes what a step has used. The step has ended, or the queue waits for it before.
    ///
    /// # Errors
    /// The queue's.
    pub(crate) fn retire(&mut self, taken: Taken, queue: &mut impl Queue) -> Result<()> {
        queue.wipe(taken.slot)?;
        self.free.push(taken.slot);
        Ok(())
    }

    /// Wipes all keystream, and forgets all keys: nothing that was made can be taken any more.
    ///
    /// # Errors
    /// The queue's, after all slots were tried; those that failed are out of use.
    pub(crate) fn abort(&mut self, queue: &mut impl Queue) -> Result<()> {
        self.senders.clear();
        self.discard(queue, ..)
    }

    fn sender(&self, sender: u32) -> Result<Sender> {
        self.senders
            .get(&sender)
            .copied()
            .ok_or_else(|| Error::InvalidArgument(format!("sender {sender} has no key: install one first")))
    }

    /// Wipes the slots whose keystream is in `which`.
    fn discard(&mut self, queue: &mut impl Queue, which: impl RangeBounds<(u32, Name)>) -> Result<()> {
        let mut outcome = Ok(());
        for (_, slot) in self.made.extract_if(which, |_, _| true) {
            match queue.wipe(slot) {
                Ok(()) => self.free.push(slot),
                Err(error) => outcome = Err(error),
            }
        }
        outcome
    }
}
