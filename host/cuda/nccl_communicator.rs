//! Collectives on the device memory of GPUs on any machines: sealed by the GPUs, carried by NCCL.
//!
//! The kernels are those of [`GpuGroup`](super::GpuGroup), in a launch for each step ([`LaunchForm::PerStep`]). What a rank
//! has for its successor they store, sealed, straight from the caller's vector into a buffer laid out as the successor's inbox
//! and signals. After each round of steps NCCL moves the round's message from there to the same place in the successor's inbox,
//! where the next step's kernel verifies and opens it straight into the result. All of it is queued on the caller's stream; nothing
//! passes through host memory. NCCL and whatever lies between the GPUs see ciphertext, tags, lengths and numbers of messages.
//!
//! With each message goes a word that says whether its sender has failed, and before the last launch NCCL finds the greatest of all
//! ranks' words, so that a failure wipes the result on every rank. That word is not authenticated: whoever changes it can
//! stop collectives, or keep ranks from learning that another failed, but never make a rank take what it hasn't verified.

use std::fmt;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ringseal_kernels::step::Step;

use super::nccl_link::{Link, Move, POLL, Ticket};
use super::rank::{GpuRank, Mailbox, Ready, check, check_one_each};
use super::ring_plan::Part;
use super::stream::Event;
use super::{
    Collectives, Device, DeviceBuffer, GpuOptions, HostBuffer, LaunchForm, Module, RankBuffers, Stream,
};
use crate::channel::GroupSecret;
use crate::collective::{Bootstrap, Request, agree, announce};
use crate::transport;
use crate::{Dtype, Error, Result, ptx};

/// Queues what whoever controls the network may do with the text of a message that has arrived: see
/// [`NcclCommunicator::tap`].
type Tap = Box<dyn FnMut(u64, usize, &Stream) -> Result<()> + Send>;

/// One rank of a group with a GPU for each, on any machines that NCCL reaches, for collectives on device memory.
///
/// What is on its way to the successor takes as much device memory as the mailboxes. Run on two H200s of one machine, by threads
/// and by processes; not on several machines.
///
/// # Failure
///
/// A record that doesn't verify fails the collective on every rank, wipes the results and poisons until all have called
/// [`rekey`](Self::rekey). When a rank doesn't come or NCCL reports an error, [`outcome`](Self::outcome) ends this rank's NCCL
/// communicator, and with it the waiting on the GPU; the result is wiped. Make a new group then.
pub struct NcclCommunicator {
    number: usize,
    ranks: usize,
    secret: GroupSecret,
    options: GpuOptions,
    /// None once it has been given up.
    link: Option<Link>,
    rank: GpuRank,
    /// What goes to the successor, as it will lie in its inbox and signals.
    outgoing: [DeviceBuffer; 2],
    /// The half of the mailboxes for the next collective; the device counts alike.
    half: u64,
    /// Collectives since the last outcome; where the first of them begins and the last one ends.
    pending: u32,
    begun: Event,
    done: Event,
    /// Stops this rank's kernels.
    alarm: (Stream, HostBuffer),
    bootstrap: Box<dyn Bootstrap>,
    tap: Option<Tap>,
}

impl NcclCommunicator {
    /// Joins a group as rank `rank` of `ranks`, on `device`, which no other rank is on. All ranks pass the same options, except
    /// for the SM budget and the timeout; the form of launches is [`LaunchForm::PerStep`] in any case. The ranks find each other
    /// by `bootstrap`, over which NCCL's id travels, authenticated. Returns when all ranks have joined; either all do or none.
    ///
    /// # Errors
    /// [`Error::Handshake`] when a rank does not come within the timeout, can't join, holds another secret or assumes
    /// something else, or when the bootstrap is mixed up or replayed; [`Error::Unsupported`] when NCCL cannot be loaded, and for
    /// the persistent form and keystream ahead of time; [`Error::InvalidArgument`], as when two ranks are on one GPU;
    /// [`Error::NoDevice`], [`Error::Randomness`]; [`Error::Cuda`], with NCCL's own text where it fails.
    pub fn new(
        secret: &GroupSecret,
        rank: usize,
        ranks: usize,
        mut bootstrap: Box<dyn Bootstrap>,
        device: &Device,
        mut options: GpuOptions,
    ) -> Result<Self> {
        if options.launch == LaunchForm::Persistent {
            let what = "one launch for a whole collective whose records NCCL carries: it moves them between launches";
            return Err(Error::Unsupported { backend: "cuda", what: what.into() });
        }
        options.launch = LaunchForm::PerStep;
        check(&options, ranks)?;
        let (place, timeout) = ([rank, ranks], options.timeout);
        // May take long, and so comes before anybody waits for this rank.
        let module = embedded(device);
        let meeting = bootstrap.as_mut();
        let root = agree(secret, GpuRank::terms(&options, ranks), rank, meeting, timeout, || Ok(()))?;
        let own = module.and_then(|module| Ok((Offer::new(device, &options, rank)?.encode(), module)));
        let (offers, module) = announce(&root, 1, place, own, meeting, timeout)?;
        let own = agreed(&offers, rank).and_then(|(blocks, id)| {
            let mut gpu_rank = GpuRank::new(&module, rank, ranks, blocks, &options)?;
            // Later, loading could have to wait for NCCL's kernels, and they for a rank that stays away.
            gpu_rank.load(false, true)?;
            let outgoing = outgoing(&mut gpu_rank, rank, ranks)?;
            let alarm = (Stream::new(device)?, HostBuffer::new(device, 4)?);
            Ok((Vec::new(), (gpu_rank, outgoing, alarm, id)))
        });
        // Nobody waits in NCCL for a rank that has failed so far.
        let (_, (mut gpu_rank, outgoing, alarm, id)) = announce(&root, 2, place, own, meeting, timeout)?;
        let link = Link::join(&id, place, device, transport::deadline(timeout));
        let own = link.and_then(|link| gpu_rank.begin(&root).map(|()| (Vec::new(), link)));
        let (_, link) = announce(&root, 3, place, own, meeting, timeout)?;
        Ok(Self {
            number: rank,
            ranks,
            secret: secret.clone(),
            options,
            link: Some(link),
            rank: gpu_rank,
            outgoing,
            half: 0,
            pending: 0,
            begun: Event::untimed(device)?,
            done: Event::untimed(device)?,
            alarm,
            bootstrap,
            tap: None,
        })
    }

    /// This rank, counted from 0.
    pub fn rank(&self) -> usize {
        self.number
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Blocks that each rank runs, one on a multiprocessor.
    pub fn blocks(&self) -> u32 {
        self.rank.blocks()
    }

    /// Queues steps and messages, round by round, and what closes the collective.
    ///
    /// # Safety
    /// As [`Self::run`].
    unsafe fn queue(&mut self, ready: &Ready, buffers: RankBuffers, stream: &Stream) -> Result<()> {
        let plan = ready.plan();
        let predecessor = (self.number + self.ranks - 1) % self.ranks;
        let tables = [plan.steps(self.number), plan.steps(predecessor)];
        let end = transport::deadline(self.options.timeout);
        for round in 0..plan.rounds() {
            if let Some(part) = plan.step_in(self.number, round) {
                // SAFETY: the caller's promise.
                unsafe { self.rank.launch(ready.only(part), buffers, stream)? };
            }
            self.pass_on(ready, round, &tables, stream, end)?;
        }
        if plan.rounds() > 0 && self.ranks > 1 {
            let [own, others] = self.rank.aborted_words();
            let link = self.link.as_ref().ok_or_else(|| self.lost())?;
            // SAFETY: words of the rank's, which its kernels on this stream use before and after.
            let code = unsafe { link.greatest(own, others, stream)? };
            link.settle(code, || self.in_time(end))?;
        }
        // SAFETY: the caller's promise.
        unsafe { self.rank.launch(ready.only(Part::Close), buffers, stream)? };
        if plan.bytes > 0 {
            self.half ^= 1;
        }
        Ok(())
    }

    /// Queues what this rank sends and receives after round `round`. `tables` are its own steps and its predecessor's.
    fn pass_on(
        &mut self,
        ready: &Ready,
        round: usize,
        tables: &[Vec<Step>; 2],
        stream: &Stream,
        end: Instant,
    ) -> Result<()> {
        let plan = ready.plan();
        let (ranks, number) = (self.ranks, self.number);
        let (successor, predecessor) = ((number + 1) % ranks, (number + ranks - 1) % ranks);
        let [own, others] = self.rank.aborted_words();
        let length = |range: &std::ops::Range<u64>| (range.end - range.start) as usize;
        let mut moves = Vec::new();
        if let Some((message, bytes)) = plan.sent_in(&tables[0], number, round) {
            let places = self.rank.places(ready, self.half, message, bytes);
            for (buffer, place) in self.outgoing.iter().zip(&places) {
                let from = buffer.pointer() + place.start;
                moves.push(Move::Send { from, bytes: length(place), to: successor });
            }
            moves.push(Move::Send { from: own, bytes: 4, to: successor });
        }
        let mut arrived = None;
        if let Some((message, bytes)) = plan.sent_in(&tables[1], predecessor, round) {
            let places = self.rank.places(ready, self.half, message, bytes);
            for (buffer, place) in self.rank.mailbox().into_iter().zip(&places) {
                let to = buffer.pointer() + place.start;
                moves.push(Move::Receive { to, bytes: length(place), from: predecessor });
            }
            moves.push(Move::Receive { to: others, bytes: 4, from: predecessor });
            let [text, _] = places;
            arrived = Some((self.rank.mailbox()[0].pointer() + text.start, length(&text)));
        }
        if moves.is_empty() {
            return Ok(());
        }
        let link = self.link.as_ref().ok_or_else(|| self.lost())?;
        // SAFETY: the places lie in the rank's mailbox and in what goes to its successor's, which has the same length; only
        // kernels on this stream use them.
        let code = unsafe { link.group(moves, stream)? };
        link.settle(code, || self.in_time(end))?;
        match (&mut self.tap, arrived) {
            (Some(tap), Some((address, bytes))) => tap(address, bytes, stream),
            _ => Ok(()),
        }
    }

    /// Whether NCCL may be waited for any longer.
    fn in_time(&self, end: Instant) -> Result<()> {
        if Instant::now() < end { Ok(()) } else { Err(self.late()) }
    }

    /// A rank did not come; which one NCCL doesn't say.
    fn late(&self) -> Error {
        Error::Deadline {
            rank: self.number,
            peer: (self.number + self.ranks - 1) % self.ranks,
            step: 0,
            waited_ms: self.options.timeout.as_millis() as u64,
        }
    }

    fn lost(&self) -> Error {
        let peer = (self.number + self.ranks - 1) % self.ranks;
        Error::Lost { rank: self.number, peer, step: None }
    }

    fn wait(&mut self) -> Result<()> {
        if self.pending == 0 {
            return Ok(());
        }
        let mut end = None;
        while !self.done.is_reached()? {
            if let Some(link) = &self.link {
                link.check()?;
            }
            if end.is_none() && self.begun.is_reached()? {
                end = Some(transport::deadline(self.options.timeout.saturating_mul(self.pending)));
            }
            if let Some(end) = end {
                self.in_time(end)?;
            }
            std::thread::sleep(POLL);
        }
        self.pending = 0;
        Ok(())
    }

    /// Fails the collectives from here on, because what they are a part of has failed elsewhere: the other ranks' too, if all
    /// ranks still do the next one. All must [`rekey`](Self::rekey).
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn fail(&mut self) -> Result<()> {
        let (stream, word) = &self.alarm;
        word.words()[0].store(1 + self.number as u32, Ordering::Release);
        let own_and_others = self.rank.aborted_words();
        for place in own_and_others {
            // SAFETY: the words are the rank's, and the source lives as long; the copy is waited for. Kernels read them as
            // volatile words, and any value but 0 means the same.
            unsafe { stream.copy(place, word.pointer(), 4)? };
        }
        stream.synchronize()
    }

    /// Ends this rank's part in the group: the GPU waits for nobody any more, and no result is left.
    fn give_up(&mut self) {
        self.rank.poison();
        // There is nobody to tell: kernels that can't be stopped end at their deadline.
        let _ = self.fail();
        // Ends NCCL's kernels.
        self.link = None;
        let end = transport::deadline(self.options.timeout) + Duration::from_secs(1);
        while self.pending > 0 && matches!(self.done.is_reached(), Ok(false)) && Instant::now() < end {
            std::thread::sleep(POLL);
        }
        self.pending = 0;
    }

    /// Calls `tap` with address and bytes of the text of each message that arrives, on the stream on which it does: it may
    /// queue changes of it, as whoever controls the network can make; for tests of what happens then.
    pub fn tap(&mut self, tap: impl FnMut(u64, usize, &Stream) -> Result<()> + Send + 'static) {
        self.tap = Some(Box::new(tap));
    }
}

impl Collectives for NcclCommunicator {
    /// The host waits until NCCL has queued its part, which on the first collectives means for the other ranks, but not for the
    /// GPU. A stream other than the last collective's comes after it. Can't be captured in a graph.
    ///
    /// # Errors
    /// Before anything happens also [`Error::InvalidArgument`] when the stream is being captured, and [`Error::Lost`] when
    /// the group has been given up. Then [`Error::Deadline`] and [`Error::Cuda`], after which it is given up, and the result wiped.
    unsafe fn run(
        &mut self,
        request: Request,
        buffers: &[RankBuffers],
        count: usize,
        dtype: Dtype,
        streams: &[&Stream],
    ) -> Result<()> {
        check_one_each(buffers, streams, 1)?;
        let (buffers, stream) = (buffers[0], streams[0]);
        if self.link.is_none() {
            return Err(self.lost());
        }
        stream
            .refuse_capture("the stream is being captured: the host takes part in a collective over NCCL")?;
        let ready = self.rank.prepare(request, count, dtype)?;
        self.rank.affords(&ready)?;
        stream.wait(&self.done)?;
        if self.pending == 0 {
            stream.mark(&self.begun)?;
        }
        self.pending += 1;
        // SAFETY: the caller's promise.
        let queued = unsafe { self.queue(&ready, buffers, stream) };
        let outcome = queued.and(stream.mark(&self.done));
        if outcome.is_err() {
            self.give_up();
            // What was queued has ended, or never will.
            let bytes = ready.plan().wanted(self.number).len();
            // SAFETY: the caller's promise. After a fault nothing works, and memory goes with the context.
            let wiped = unsafe { stream.fill(buffers.output, 0, bytes) };
            let _ = wiped.and_then(|()| stream.synchronize());
        }
        outcome
    }

    /// Waits for the collectives so far, as nothing else may: NCCL has no deadline, but this has one, which begins when the stream
    /// comes to the first of them.
    ///
    /// # Errors
    /// [`Error::Deadline`] when a rank did not come, and [`Error::Cuda`] with NCCL's own text, after which the group has been
    /// given up.
    fn outcome(&mut self) -> Result<()> {
        if let Err(error) = self.wait() {
            self.give_up();
            return Err(error);
        }
        self.rank.outcome()
    }

    fn finish(&mut self, streams: &[&Stream]) -> Result<()> {
        let outcome = self.outcome();
        streams.iter().try_for_each(|stream| stream.synchronize())?;
        outcome
    }

    /// # Errors
    /// [`Error::Lost`] when the group has been given up.
    fn rekey(&mut self) -> Result<()> {
        if let Err(error) = self.wait() {
            self.give_up();
            return Err(error);
        }
        if self.link.is_none() {
            return Err(self.lost());
        }
        // No signal of the old session may pass for one of the new.
        let (stream, _) = &self.alarm;
        self.outgoing[1].fill(0, stream)?;
        stream.synchronize()?;
        self.rank.rekey(&self.secret, self.bootstrap.as_mut())?;
        self.half = 0;
        Ok(())
    }

    fn is_poisoned(&self) -> bool {
        self.rank.is_poisoned()
    }

    fn close(mut self: Box<Self>) -> Result<()> {
        self.outcome()?;
        self.bootstrap.gather(b"", self.options.timeout)?;
        Ok(())
    }
}

impl Drop for NcclCommunicator {
    fn drop(&mut self) {
        if self.pending > 0 {
            // Otherwise the GPU might wait for others for ever, and the memory be freed under it.
            self.give_up();
        }
        self.link = None;
        let _ = self.rank.device().synchronize();
    }
}

impl fmt::Debug for NcclCommunicator {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, ranks, .. } = self;
        write!(formatter, "NcclCommunicator(rank {number} of {ranks} on {:?})", self.rank.device())
    }
}

/// The kernels for a device.
fn embedded(device: &Device) -> Result<Module> {
    let capability = device.compute_capability()?;
    let target = ptx::for_compute_capability(capability.major, capability.minor).ok_or_else(|| {
        Error::NoDevice(format!("compute capability {capability}, but 8.0 or newer is needed"))
    })?;
    Module::load(device, ptx::text(target).as_bytes())
}

/// Memory for what goes to the successor, to which the rank is connected: as long as its own mailbox, since all ranks have the same
/// options. All notices are its own, as NCCL carries none: so a failure stops this rank, and the successor, which never runs
/// behind a message, counts as started.
fn outgoing(rank: &mut GpuRank, number: usize, ranks: usize) -> Result<[DeviceBuffer; 2]> {
    let own = rank.own_mailbox();
    let stream = Stream::new(rank.device())?;
    let like = |buffer: &DeviceBuffer| {
        let mut outgoing = DeviceBuffer::new(buffer.device(), buffer.len())?;
        outgoing.fill(0, &stream)?;
        Ok::<_, Error>(outgoing)
    };
    let [inbox, signals] = rank.mailbox();
    let outgoing = [like(inbox)?, like(signals)?];
    stream.synchronize()?;
    let mut mailboxes = vec![own; ranks];
    if ranks > 1 {
        let [inbox, signals] = outgoing.each_ref().map(DeviceBuffer::pointer);
        mailboxes[(number + 1) % ranks] = Mailbox { notice: own.notice, inbox, signals };
    }
    rank.connect(&mailboxes)?;
    Ok(outgoing)
}

/// What a rank tells the others before any memory is set up.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Offer {
    /// How many it could run.
    blocks: u32,
    max_bytes: u64,
    algorithm: u64,
    ticket: Ticket,
}

impl Offer {
    const NUMBERS_BYTES: usize = 20;

    fn new(device: &Device, options: &GpuOptions, rank: usize) -> Result<Self> {
        Ok(Self {
            blocks: device.multiprocessors()?.min(options.sm_budget.unwrap_or(u32::MAX)),
            max_bytes: options.max_bytes as u64,
            algorithm: options.algorithm as u64,
            ticket: Ticket::new(device, rank)?,
        })
    }

    fn encode(&self) -> Vec<u8> {
        let Self { blocks, max_bytes, algorithm, ticket } = self;
        [&blocks.to_le_bytes()[..], &max_bytes.to_le_bytes(), &algorithm.to_le_bytes(), &ticket.encode()]
            .concat()
    }

    fn decode(bytes: &[u8]) -> Result<Self> {
        let Some((numbers, ticket)) = bytes.split_first_chunk::<{ Self::NUMBERS_BYTES }>() else {
            return Err(Error::Handshake("a rank's announcement is of another version".into()));
        };
        let eight = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| numbers[at + byte]));
        Ok(Self {
            blocks: u32::from_le_bytes(std::array::from_fn(|byte| numbers[byte])),
            max_bytes: eight(4),
            algorithm: eight(12),
            ticket: Ticket::decode(ticket)?,
        })
    }
}

/// How many blocks every rank runs, as many as the rank with the fewest can; and NCCL's id.
fn agreed(offers: &[Vec<u8>], own: usize) -> Result<(u32, Vec<u8>)> {
    let offers: Vec<Offer> = offers.iter().map(|offer| Offer::decode(offer)).collect::<Result<_>>()?;
    for (rank, offer) in offers.iter().enumerate() {
        if (offer.max_bytes, offer.algorithm) != (offers[own].max_bytes, offers[own].algorithm) {
            return Err(Error::Handshake(format!("rank {rank} has another algorithm or longest vector")));
        }
    }
    let blocks = offers.iter().map(|offer| offer.blocks).min().unwrap_or(0);
    if blocks == 0 {
        return Err(Error::InvalidArgument("no multiprocessor for a rank: an SM budget of 0".into()));
    }
    let tickets: Vec<_> = offers.into_iter().map(|offer| offer.ticket).collect();
    Ok((blocks, Ticket::common_id(&tickets)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::nccl_link::ID_BYTES;

    fn offer(gpu: u8, blocks: u32, max_bytes: u64, algorithm: u64, id: &[u8]) -> Vec<u8> {
        let ticket = Ticket::decode(&[&[gpu; 16], id].concat()).unwrap();
        Offer { blocks, max_bytes, algorithm, ticket }.encode()
    }

    #[test]
    fn ranks_agree_on_blocks_and_the_first_ones_id() {
        let id = [7; ID_BYTES];
        let offers = [offer(0, 132, 1 << 20, 1, &id), offer(1, 16, 1 << 20, 1, &[])];
        assert_eq!(agreed(&offers, 1).unwrap(), (16, id.to_vec()));
        for odd in [offer(1, 132, 1 << 21, 1, &[]), offer(1, 132, 1 << 20, 2, &[])] {
            let error = agreed(&[offers[0].clone(), odd], 0).unwrap_err();
            assert!(matches!(&error, Error::Handshake(text) if text.contains("rank 1")), "{error}");
        }
        let shared = agreed(&[offers[0].clone(), offers[1].clone(), offers[0].clone()], 1).unwrap_err();
        assert!(
            matches!(&shared, Error::InvalidArgument(text) if text.contains("ranks 0 and 2")),
            "{shared}"
        );
        assert!(matches!(agreed(&[offer(0, 0, 1, 1, &id)], 0), Err(Error::InvalidArgument(_))));
        assert!(matches!(agreed(&[vec![0; Offer::NUMBERS_BYTES - 1]], 0), Err(Error::Handshake(_))));
    }
}
