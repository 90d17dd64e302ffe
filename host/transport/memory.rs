//! Ranks of one process, linked by queues. Records change hands without being copied.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::inbox::Inbox;
use super::{Abort, Delivery, Received, Sealed, Transport};
use crate::Result;
use crate::aead::Tag;

/// From one rank to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Link {
    /// Sender.
    pub from: usize,
    /// Receiver.
    pub to: usize,
}

/// All that crosses a link for one record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    /// The session that it claims to belong to.
    pub session: u64,
    /// Ciphertext.
    pub bytes: Vec<u8>,
    /// Tag.
    pub tag: Tag,
}

/// Somebody on the links who sees every packet and decides what is delivered, for tests and demonstrations.
pub trait Tap: Send + Sync {
    /// Called, by the sender's thread, for each packet instead of its delivery. Whatever is given to `deliver`, in
    /// this call, arrives; on any link.
    fn pass(&self, link: Link, packet: Packet, deliver: &mut dyn FnMut(Link, Packet));
}

/// Links `ranks` ranks.
///
/// # Panics
/// When `ranks` is 0.
pub fn network(ranks: usize) -> Vec<Memory> {
    connect(ranks, None)
}

/// As [`network`], with somebody on the links.
///
/// # Panics
/// When `ranks` is 0.
pub fn tapped_network(ranks: usize, tap: Arc<dyn Tap>) -> Vec<Memory> {
    connect(ranks, Some(tap))
}

fn connect(ranks: usize, tap: Option<Arc<dyn Tap>>) -> Vec<Memory> {
    assert!(ranks > 0, "there is at least one rank");
    let network = Arc::new(Network {
        inboxes: (0..ranks).map(|_| Inbox::new(ranks)).collect(),
        aborting: Mutex::new(()),
        tap,
    });
    (0..ranks).map(|rank| Memory { rank, network: network.clone() }).collect()
}

struct Network {
    inboxes: Vec<Inbox>,
    /// Held while an abort is announced, so that the first one is the first for every rank.
    aborting: Mutex<()>,
    tap: Option<Arc<dyn Tap>>,
}

/// A rank's end of a [`network`].
pub struct Memory {
    rank: usize,
    network: Arc<Network>,
}

impl Transport for Memory {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.network.inboxes.len()
    }

    fn send(&mut self, to: usize, session: u64, record: Sealed) -> Result<()> {
        let (bytes, tag) = record.into_parts();
        let (link, packet) = (Link { from: self.rank, to }, Packet { session, bytes, tag });
        let mut deliver = |link: Link, Packet { session, bytes, tag }: Packet| {
            self.network.inboxes[link.to].put(link.from, (session, Received { bytes, tag }));
        };
        match &self.network.tap {
            None => deliver(link, packet),
            Some(tap) => tap.pass(link, packet, &mut deliver),
        }
        Ok(())
    }

    fn receive(&mut self, from: usize, session: u64, deadline: Instant) -> Result<Delivery> {
        Ok(self.network.inboxes[self.rank].receive(from, session, deadline))
    }

    fn abort(&mut self, session: u64, abort: Abort) {
        let _first = self.network.aborting.lock().unwrap_or_else(PoisonError::into_inner);
        for inbox in &self.network.inboxes {
            inbox.abort(session, abort);
        }
    }
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Memory").field("rank", &self.rank).finish_non_exhaustive()
    }
}
