//! Links between ranks on GPUs of any machines, by NCCL's send and receive.
//!
//! The path of a record: sealed by the session's backend in host memory, copied to the sender's GPU, carried by NCCL to the
//! receiver's, copied to host memory, verified and opened there. NCCL, the GPUs' memory that it uses and whatever lies
//! between them see ciphertext, tags and lengths.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::nccl_link::{Link, Move, POLL, Ticket};
use super::stream::Event;
use super::{Device, DeviceBuffer, HostBuffer, Stream};
use crate::channel::GroupSecret;
use crate::collective::{Bootstrap, Communicator, Options};
use crate::transport::lockstep::{Exchange, Lockstep};
use crate::{Error, Result};

/// Bytes that an exchange moves from one rank to another at most, if no record is longer: enough to hide what a round costs.
const CAPACITY: usize = 4 << 20;
/// A frame's bytes around a record, rounded up.
const FRAME_BYTES: usize = 64;

/// A rank of an NCCL communicator that moves bytes between host memories.
pub struct NcclExchange {
    // Goes first, which ends what still uses the memory.
    link: Link,
    rank: usize,
    ranks: usize,
    capacity: usize,
    stream: Stream,
    done: Event,
    // By rank, `capacity` bytes each.
    outgoing: Staging,
    incoming: Staging,
}

/// Pinned memory of the host, and as much of the device.
struct Staging {
    host: HostBuffer,
    device: DeviceBuffer,
}

impl Staging {
    fn new(device: &Device, bytes: usize) -> Result<Self> {
        Ok(Self { host: HostBuffer::new(device, bytes)?, device: DeviceBuffer::new(device, bytes)? })
    }
}

impl NcclExchange {
    /// What rank 0 gives to all ranks, for [`NcclExchange::join`]: NCCL's unique id.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when NCCL cannot be loaded; [`Error::Cuda`] with NCCL's own text.
    pub fn id() -> Result<Vec<u8>> {
        Link::id()
    }

    /// Joins as rank `rank` of `ranks`, each on a GPU of its own, which NCCL demands. `capacity` is the most bytes that one
    /// exchange moves from one rank to another, the same on all ranks; each rank takes twice as much pinned memory and
    /// twice as much of the device's for every rank.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when NCCL cannot be loaded, [`Error::InvalidArgument`] when `id` is none or the rank no rank,
    /// [`Error::Handshake`] when the others don't come before `end`, [`Error::Cuda`] with NCCL's own text.
    pub fn join(
        id: &[u8],
        [rank, ranks]: [usize; 2],
        device: &Device,
        capacity: usize,
        end: Instant,
    ) -> Result<Self> {
        if rank >= ranks || capacity == 0 {
            return Err(Error::InvalidArgument(format!("rank {rank} of {ranks}, {capacity} bytes at once")));
        }
        let bytes = capacity.checked_mul(ranks);
        let bytes = bytes.ok_or_else(|| Error::InvalidArgument(format!("a capacity of {capacity} bytes")))?;
        let (outgoing, incoming) = (Staging::new(device, bytes)?, Staging::new(device, bytes)?);
        let (stream, done) = (Stream::new(device)?, Event::untimed(device)?);
        let link = Link::join(id, [rank, ranks], device, end)?;
        Ok(Self { link, rank, ranks, capacity, stream, done, outgoing, incoming })
    }

    /// All sends and receives of an exchange.
    fn moves(&self, outgoing: &[Vec<u8>], incoming: &[Vec<u8>]) -> Vec<Move> {
        let mut moves = Vec::new();
        for (peer, (sent, received)) in outgoing.iter().zip(incoming).enumerate() {
            let at = (peer * self.capacity) as u64;
            let (from, to) = (self.outgoing.device.pointer() + at, self.incoming.device.pointer() + at);
            if !sent.is_empty() {
                moves.push(Move::Send { from, bytes: sent.len(), to: peer });
            }
            if !received.is_empty() {
                moves.push(Move::Receive { to, bytes: received.len(), from: peer });
            }
        }
        moves
    }
}

impl Exchange for NcclExchange {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn capacity(&self) -> usize {
        self.capacity
    }

    fn exchange(&mut self, outgoing: &[Vec<u8>], incoming: &mut [Vec<u8>], stop: &AtomicBool) -> Result<()> {
        let capacity = self.capacity;
        let fits = |places: &[Vec<u8>]| {
            places.len() == self.ranks && places.iter().all(|bytes| bytes.len() <= capacity)
        };
        if !fits(outgoing) || !fits(incoming) {
            return Err(Error::InvalidArgument("an exchange of more than the capacity".into()));
        }
        if outgoing.iter().chain(incoming.iter()).all(Vec::is_empty) {
            return Ok(());
        }
        let go_on = || match stop.load(Ordering::Relaxed) {
            false => Ok(()),
            true => Err(Error::Cuda("NCCL: stopped".into())),
        };
        let _current = self.stream.device().bind()?;
        // SAFETY: the exchange before was waited for, so that no device work uses the memory.
        let pinned = unsafe { self.outgoing.host.as_mut_slice() };
        for (place, bytes) in pinned.chunks_exact_mut(capacity).zip(outgoing) {
            place[..bytes.len()].copy_from_slice(bytes);
        }
        for (peer, bytes) in outgoing.iter().enumerate() {
            let at = peer * capacity;
            let (from, to) = (self.outgoing.host.pointer(), self.outgoing.device.pointer());
            // SAFETY: both ranges are inside of live buffers, and are left alone until the wait below.
            unsafe { self.stream.copy(to + at as u64, from + at as u64, bytes.len())? };
        }
        // SAFETY: each place is `capacity` bytes of a live buffer, which suffice as checked above, and is left alone until the
        // wait below.
        let code = unsafe { self.link.group(self.moves(outgoing, incoming), &self.stream)? };
        self.link.settle(code, go_on)?;
        for (peer, bytes) in incoming.iter().enumerate() {
            let at = (peer * capacity) as u64;
            let (from, to) = (self.incoming.device.pointer(), self.incoming.host.pointer());
            // SAFETY: as above.
            unsafe { self.stream.copy(to + at, from + at, bytes.len())? };
        }
        self.stream.mark(&self.done)?;
        while !self.done.is_reached()? {
            self.link.check()?;
            go_on()?;
            std::thread::sleep(POLL);
        }
        // SAFETY: the stream has passed the copies.
        let pinned = unsafe { self.incoming.host.as_slice() };
        for (place, bytes) in pinned.chunks_exact(capacity).zip(incoming) {
            let length = bytes.len();
            bytes.copy_from_slice(&place[..length]);
        }
        Ok(())
    }
}

impl fmt::Debug for NcclExchange {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "NcclExchange(rank {} of {} on {:?})", self.rank, self.ranks, self.stream.device())
    }
}

impl Communicator {
    /// As [`Communicator::new`], over NCCL instead of TCP: each rank has a GPU of its own, `device`, on any machine that NCCL
    /// reaches. Vectors lie in host memory and are sealed and opened by the options' backend; records travel through the
    /// GPUs' memory by NCCL's send and receive, which move ciphertext and tags. The ranks find each other by `bootstrap`,
    /// over which NCCL's id travels, authenticated.
    ///
    /// A rank whose process ends shows when NCCL notices, otherwise as a missed deadline.
    ///
    /// # Errors
    /// As [`Communicator::join`]; [`Error::Unsupported`] when NCCL cannot be loaded; [`Error::InvalidArgument`] when two
    /// ranks are on one GPU; [`Error::Cuda`] with NCCL's own text.
    pub fn over_nccl(
        secret: &GroupSecret,
        rank: usize,
        ranks: usize,
        bootstrap: Box<dyn Bootstrap>,
        device: &Device,
        options: &Options,
    ) -> Result<Self> {
        let capacity = CAPACITY.max(options.record_bytes.saturating_add(FRAME_BYTES));
        let ticket = || Ok((Ticket::new(device, rank)?.encode(), ()));
        Self::linked(secret, [rank, ranks], bootstrap, options, ticket, |(), tickets, end| {
            let tickets = tickets.iter().map(|ticket| Ticket::decode(ticket)).collect::<Result<Vec<_>>>()?;
            let id = Ticket::common_id(&tickets)?;
            let exchange = NcclExchange::join(&id, [rank, ranks], device, capacity, end)?;
            Ok(Box::new(Lockstep::new(exchange)?))
        })
    }
}
