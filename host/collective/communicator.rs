//! A rank's membership in a group.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::bootstrap::{Bootstrap, InProcess, agree, announce};
use super::execute::{Execution, Failure};
use super::schedule::{Algorithm, Collective, Operations, Step, chunks, program};
use super::vectors::{Buffers, Vectors};
use super::{Element, Partition};
use crate::backend::{Backend, cpu::Cpu};
use crate::channel::{Call, Crypto, GroupSecret, Handshake, KeyLength, NO_OP, Session, Terms, volume};
use crate::transport::{Abort, Cause, Transport, deadline, memory, socket};
use crate::{Dtype, Error, ReduceOp, Result};

/// Shortest and longest record in bytes. Useful ones have 16 to 128 KiB.
const RECORD_BYTES: std::ops::RangeInclusive<usize> = 16..=16 << 20;

/// How a communicator works. All but backend and timeout must be alike on all ranks; the algorithm in each collective,
/// the rest from the start.
#[derive(Clone)]
pub struct Options {
    /// What protects records. Default: AES-256-GCM.
    pub crypto: Crypto,
    /// How collectives are done; may be [changed](Communicator::set_algorithm). Default: relay ring.
    pub algorithm: Algorithm,
    /// Where the cipher runs. Default: on the CPU.
    pub backend: Arc<dyn Backend>,
    /// Bytes of a full record, a multiple of 16 from 16 to 16 MiB: sealed, sent and verified as one. Default: 64 KiB.
    pub record_bytes: usize,
    /// How long to wait for a peer's next record before giving up; may be [changed](Communicator::set_timeout).
    /// Default: 30 seconds.
    pub timeout: Duration,
    /// Bytes that a key may encrypt before the next epoch begins. Default: [`volume::DEFAULT_BYTES`], 389 GB. One
    /// collective must fit.
    pub key_bytes: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            crypto: Crypto::Gcm(KeyLength::Aes256),
            algorithm: Algorithm::RelayRing,
            backend: Arc::new(Cpu),
            record_bytes: 64 << 10,
            timeout: Duration::from_secs(30),
            key_bytes: volume::DEFAULT_BYTES,
        }
    }
}

impl std::fmt::Debug for Options {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Options")
            .field("crypto", &self.crypto)
            .field("algorithm", &self.algorithm)
            .field("backend", &self.backend.name())
            .field("record_bytes", &self.record_bytes)
            .field("timeout", &self.timeout)
            .field("key_bytes", &self.key_bytes)
            .finish()
    }
}

impl Options {
    fn terms(&self, ranks: usize) -> Result<Terms> {
        let record_bytes = self.record_bytes;
        if !RECORD_BYTES.contains(&record_bytes) || !record_bytes.is_multiple_of(16) {
            return Err(Error::InvalidArgument(format!(
                "records of {record_bytes} bytes: a multiple of 16 from {} to {} is needed",
                RECORD_BYTES.start(),
                RECORD_BYTES.end()
            )));
        }
        Ok(Terms { ranks, crypto: self.crypto, record_bytes, key_bytes: self.key_bytes })
    }
}

/// A collective, with all that its ranks must mean alike but element type and count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Every rank gets the reduction of all ranks' vectors.
    AllReduce(ReduceOp),
    /// Rank r gets chunk r of the reduction; [`Partition`] says which elements that are.
    ReduceScatter(ReduceOp),
    /// Rank r gives chunk r; every rank gets the whole vector.
    AllGather,
    /// Every rank gets rank `root`'s vector.
    Broadcast {
        /// The rank that gives.
        root: usize,
    },
}

impl Request {
    pub(crate) const fn collective(self) -> Collective {
        match self {
            Self::AllReduce(_) => Collective::AllReduce,
            Self::ReduceScatter(_) => Collective::ReduceScatter,
            Self::AllGather => Collective::AllGather,
            Self::Broadcast { root } => Collective::Broadcast { root },
        }
    }

    pub(crate) const fn op(self) -> Option<ReduceOp> {
        match self {
            Self::AllReduce(op) | Self::ReduceScatter(op) => Some(op),
            Self::AllGather | Self::Broadcast { .. } => None,
        }
    }
}

/// What is the same for all collectives of a kind.
struct Plan {
    steps: Vec<Step>,
    chunks: usize,
    /// A step number that no rank's program uses.
    closing: usize,
    /// Chunks sealed by the rank that seals most.
    seals: usize,
}

impl Plan {
    fn new(collective: Collective, algorithm: Algorithm, ranks: usize, rank: usize) -> Self {
        let (mut closing, mut seals) = (0, 0);
        for rank in 0..ranks {
            let steps = program(collective, algorithm, ranks, rank);
            closing = closing.max(steps.len());
            seals = seals.max(Operations::of(&steps).seals);
        }
        let chunks = chunks(collective, algorithm, ranks);
        Self { steps: program(collective, algorithm, ranks, rank), chunks, closing, seals }
    }

    /// Block cipher calls of the rank that seals most.
    fn calls(&self, longest_chunk: usize, record_bytes: usize) -> u64 {
        let records = longest_chunk.div_ceil(record_bytes) as u64;
        let chunk = longest_chunk.div_ceil(16) as u64 + records;
        (self.seals as u64).saturating_mul(chunk).saturating_add(volume::calls_of_message(0))
    }
}

/// One rank of a group that does collectives together.
///
/// All ranks call the same methods in the same order, each from a thread of its own. Methods return when the
/// collective is complete on all ranks, with the same bits on each.
///
/// # Failure
///
/// When a record does not verify, a peer does not deliver in time, or the ranks disagree on the call, every rank
/// returns an error, its receive buffer (in place: its vector) is zeroed, and the communicator is poisoned: it refuses
/// everything but [`rekey`](Self::rekey). Arguments that are wrong on their own are refused before anything is sent,
/// and change nothing on this rank; the others give up when their time is over.
///
/// An attacker who holds up the very last messages can make some ranks fail and let others succeed; what these have is
/// complete and right, and they learn of the failure in their next collective.
pub struct Communicator {
    secret: GroupSecret,
    options: Options,
    transport: Box<dyn Transport>,
    bootstrap: Box<dyn Bootstrap>,
    session: Session,
    poisoned: bool,
    plans: HashMap<(Collective, Algorithm), Arc<Plan>>,
    spare: Vec<Vec<u8>>,
}

/// Ranks of [`Communicator::in_process`] at most.
const MOST_IN_PROCESS: usize = 1024;

impl Communicator {
    /// Makes a group of `ranks` ranks in this process. Move each to a thread of its own.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when there are no ranks or more than 1024, or an option is out of its domain;
    /// [`Error::Randomness`].
    pub fn in_process(ranks: usize, secret: &GroupSecret, options: &Options) -> Result<Vec<Self>> {
        if ranks == 0 {
            return Err(Error::InvalidArgument("a group has at least one rank".into()));
        }
        // Links grow with the square of their number.
        if ranks > MOST_IN_PROCESS {
            return Err(Error::InvalidArgument(format!(
                "{ranks} ranks in one process: at most {MOST_IN_PROCESS}; use a process a rank (Communicator::new)"
            )));
        }
        let links = memory::network(ranks).into_iter().map(|link| Box::new(link) as Box<dyn Transport>);
        Self::in_process_over(links.collect(), secret, options)
    }

    /// As [`Self::in_process`], over links of the caller's, one for each rank in ascending order.
    ///
    /// # Errors
    /// As [`Self::in_process`].
    pub fn in_process_over(
        links: Vec<Box<dyn Transport>>,
        secret: &GroupSecret,
        options: &Options,
    ) -> Result<Vec<Self>> {
        let terms = options.terms(links.len())?;
        let handshakes: Vec<_> =
            (0..links.len()).map(|rank| Handshake::new(secret, terms, rank)).collect::<Result<_>>()?;
        let hellos: Vec<_> = handshakes.iter().map(|rank| rank.hello().to_vec()).collect();
        let heard: Vec<_> = handshakes.into_iter().map(|rank| rank.hear(&hellos)).collect::<Result<_>>()?;
        let confirmations: Vec<_> = heard.iter().map(|rank| rank.confirmation().to_vec()).collect();
        let bootstraps = InProcess::group(links.len());
        let parts = heard.into_iter().zip(links).zip(bootstraps);
        parts
            .map(|((heard, transport), bootstrap)| {
                let session = Session::new(heard, &confirmations, options.backend.clone())?;
                Ok(Self::assemble(secret, options, transport, Box::new(bootstrap), session))
            })
            .collect()
    }

    /// Joins a group whose ranks may be processes anywhere, as rank `rank` of `ranks`, over connections of its own.
    /// Returns when all ranks have joined.
    ///
    /// # Errors
    /// As [`Self::join`]. Either all ranks join or none does.
    pub fn new(
        secret: &GroupSecret,
        rank: usize,
        ranks: usize,
        bootstrap: Box<dyn Bootstrap>,
        options: &Options,
    ) -> Result<Self> {
        let interface = bootstrap.interface();
        let door = || socket::Door::open(interface).and_then(|door| Ok((door.place()?, door)));
        Self::linked(secret, [rank, ranks], bootstrap, options, door, |door, places, end| {
            Ok(Box::new(door.connect(rank, places, end)?))
        })
    }

    /// Joins a group over links that its ranks make once they have a session: `offer` gives what this rank tells the others
    /// for it, authenticated, and `link` makes the links from what all ranks have told, before an instant. The number of
    /// this rank comes before that of all.
    pub(crate) fn linked<T>(
        secret: &GroupSecret,
        [rank, ranks]: [usize; 2],
        mut bootstrap: Box<dyn Bootstrap>,
        options: &Options,
        offer: impl FnOnce() -> Result<(Vec<u8>, T)>,
        link: impl FnOnce(T, &[Vec<u8>], Instant) -> Result<Box<dyn Transport>>,
    ) -> Result<Self> {
        let (terms, timeout) = (options.terms(ranks)?, options.timeout);
        let root = agree(secret, terms, rank, bootstrap.as_mut(), timeout, || Ok(()))?;
        let (offers, own) = announce(&root, 1, [rank, ranks], offer(), bootstrap.as_mut(), timeout)?;
        let links = link(own, &offers, deadline(timeout)).map(|links| (Vec::new(), links));
        let (_, transport) = announce(&root, 2, [rank, ranks], links, bootstrap.as_mut(), timeout)?;
        let session = Session::from_root(root, terms, rank, options.backend.clone());
        Ok(Self::assemble(secret, options, transport, bootstrap, session))
    }

    /// Joins a group as the rank that `transport` says. Returns when all ranks have joined.
    ///
    /// # Errors
    /// [`Error::Handshake`] when a rank does not come within the timeout, holds another secret or assumes something
    /// else; [`Error::InvalidArgument`] when an option is out of its domain; [`Error::Randomness`].
    pub fn join(
        secret: &GroupSecret,
        options: &Options,
        transport: Box<dyn Transport>,
        mut bootstrap: Box<dyn Bootstrap>,
    ) -> Result<Self> {
        let session = handshake(secret, options, transport.as_ref(), bootstrap.as_mut())?;
        Ok(Self::assemble(secret, options, transport, bootstrap, session))
    }

    fn assemble(
        secret: &GroupSecret,
        options: &Options,
        transport: Box<dyn Transport>,
        bootstrap: Box<dyn Bootstrap>,
        session: Session,
    ) -> Self {
        Self {
            secret: secret.clone(),
            options: options.clone(),
            transport,
            bootstrap,
            session,
            poisoned: false,
            plans: HashMap::new(),
            spare: Vec::new(),
        }
    }

    /// This rank, counted from 0.
    pub fn rank(&self) -> usize {
        self.transport.rank()
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.transport.ranks()
    }

    /// How this communicator works.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Keys and counters, for inspection.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Whether a collective has failed and [`Self::rekey`] is needed.
    pub fn is_poisoned(&self) -> bool {
        self.poisoned
    }

    /// Does the following collectives by another algorithm, on all ranks alike.
    pub fn set_algorithm(&mut self, algorithm: Algorithm) {
        self.options.algorithm = algorithm;
    }

    /// Waits this long for a peer from now on.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.options.timeout = timeout;
    }

    /// Fails on purpose, because what the collective was a part of has failed elsewhere: the other ranks' collectives of this
    /// session fail too, and all must [`rekey`](Self::rekey). Does nothing after a failure.
    pub fn give_up(&mut self) {
        if !self.poisoned {
            self.poisoned = true;
            self.transport.abort(self.session.id(), Abort { by: self.rank(), cause: Cause::Other });
        }
    }

    /// Starts a new session with new keys, together with all other ranks. Ends the poisoning after a failure.
    ///
    /// # Errors
    /// As [`Self::join`]. The communicator is poisoned then.
    pub fn rekey(&mut self) -> Result<()> {
        self.poisoned = true;
        self.session =
            handshake(&self.secret, &self.options, self.transport.as_ref(), self.bootstrap.as_mut())?;
        self.poisoned = false;
        Ok(())
    }

    /// Reduces `input` over all ranks into every rank's `output`, of the same length.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn all_reduce<T: Element>(&mut self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<()> {
        self.run(Request::AllReduce(op), T::DTYPE, apart(input, output))
    }

    /// Reduces `vector` over all ranks, where it lies. Zeroed on failure.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn all_reduce_in_place<T: Element>(&mut self, vector: &mut [T], op: ReduceOp) -> Result<()> {
        self.run(Request::AllReduce(op), T::DTYPE, in_place(vector))
    }

    /// Reduces `input` over all ranks; `output` gets this rank's [chunk](Partition) of the result.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn reduce_scatter<T: Element>(&mut self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<()> {
        self.run(Request::ReduceScatter(op), T::DTYPE, apart(input, output))
    }

    /// Reduces `vector` over all ranks; this rank's [chunk](Partition) of the result replaces the same chunk of
    /// `vector`, whose other chunks stay. The chunk is zeroed on failure.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn reduce_scatter_in_place<T: Element>(&mut self, vector: &mut [T], op: ReduceOp) -> Result<()> {
        self.run(Request::ReduceScatter(op), T::DTYPE, in_place(vector))
    }

    /// Gathers all ranks' `input`, each rank's [chunk](Partition) of the whole, into every rank's `output`.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn all_gather<T: Element>(&mut self, input: &[T], output: &mut [T]) -> Result<()> {
        self.run(Request::AllGather, T::DTYPE, apart(input, output))
    }

    /// Gathers the whole of `vector`, of which this rank gives its [chunk](Partition). All of it is zeroed on failure.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn all_gather_in_place<T: Element>(&mut self, vector: &mut [T]) -> Result<()> {
        self.run(Request::AllGather, T::DTYPE, in_place(vector))
    }

    /// Gives `input` of rank `root` to every rank's `output`. Other ranks' `input` is not looked at.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn broadcast<T: Element>(&mut self, input: &[T], output: &mut [T], root: usize) -> Result<()> {
        self.run(Request::Broadcast { root }, T::DTYPE, apart(input, output))
    }

    /// Gives `vector` of rank `root` to all ranks. Zeroed on failure, also at the root.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn broadcast_in_place<T: Element>(&mut self, vector: &mut [T], root: usize) -> Result<()> {
        self.run(Request::Broadcast { root }, T::DTYPE, in_place(vector))
    }

    /// Does a collective on elements of type `dtype` given as bytes, little-endian, of any alignment.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when lengths don't fit or the root is no rank, and [`Error::Poisoned`] after a
    /// failure, both before anything happens; [`Error::KeyExhausted`] when one key may not encrypt that much;
    /// [`Error::Record`], [`Error::Deadline`], [`Error::Aborted`] and whatever the backend reports, all of which
    /// poison.
    pub fn run(&mut self, request: Request, dtype: Dtype, buffers: Buffers<'_>) -> Result<()> {
        if self.poisoned {
            return Err(Error::Poisoned);
        }
        let (rank, ranks) = (self.rank(), self.ranks());
        if let Request::Broadcast { root } = request
            && root >= ranks
        {
            return Err(Error::InvalidArgument(format!("root {root}: there are {ranks} ranks")));
        }
        let mut vectors = Vectors::new(buffers, request, dtype, ranks, rank)?;
        let plan = self.plan(request.collective());
        let count = vectors.bytes() / dtype.size();
        let partition = match request {
            Request::AllReduce(_) => Partition::aligned(count, plan.chunks, dtype),
            _ => Partition::new(count, plan.chunks),
        };
        let calls = plan.calls(partition.longest() * dtype.size(), self.options.record_bytes);
        let sequence = self.session.begin(calls)?;
        let (collective, root) = request.collective().code();
        let call = Call {
            collective,
            algorithm: self.options.algorithm as u8,
            dtype: dtype as u8,
            op: request.op().map_or(NO_OP, |op| op as u8),
            // Fits: ranks are at most `MAX_RANKS`.
            root: root as u16,
            count: count as u64,
            sequence,
        };
        let mut execution = Execution {
            session: &mut self.session,
            transport: self.transport.as_mut(),
            spare: &mut self.spare,
            vectors: &mut vectors,
            call,
            dtype,
            op: request.op().unwrap_or(ReduceOp::Sum),
            partition,
            record_bytes: self.options.record_bytes,
            timeout: self.options.timeout,
        };
        execution.transport.run(true);
        let outcome = execution.run(&plan.steps, plan.closing);
        let outcome = outcome.map_err(|failure| self.fail(failure, &mut vectors));
        self.transport.run(false);
        outcome
    }

    fn plan(&mut self, collective: Collective) -> Arc<Plan> {
        let (rank, ranks, algorithm) = (self.rank(), self.ranks(), self.options.algorithm);
        let plan = self.plans.entry((collective, algorithm));
        plan.or_insert_with(|| Arc::new(Plan::new(collective, algorithm, ranks, rank))).clone()
    }

    fn fail(&mut self, failure: Failure, vectors: &mut Vectors<'_>) -> Error {
        self.poisoned = true;
        vectors.zero_output();
        if let Some(abort) = failure.notice(self.rank()) {
            self.transport.abort(self.session.id(), abort);
        }
        failure.into_error(self.rank())
    }
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Communicator")
            .field("rank", &self.rank())
            .field("ranks", &self.ranks())
            .field("options", &self.options)
            .field("session", &self.session)
            .field("poisoned", &self.poisoned)
            .finish_non_exhaustive()
    }
}

fn handshake(
    secret: &GroupSecret,
    options: &Options,
    transport: &dyn Transport,
    bootstrap: &mut dyn Bootstrap,
) -> Result<Session> {
    let terms = options.terms(transport.ranks())?;
    let root = agree(secret, terms, transport.rank(), bootstrap, options.timeout, || Ok(()))?;
    Ok(Session::from_root(root, terms, transport.rank(), options.backend.clone()))
}

fn apart<'a, T: Element>(input: &'a [T], output: &'a mut [T]) -> Buffers<'a> {
    Buffers::Apart { input: bytemuck::cast_slice(input), output: bytemuck::cast_slice_mut(output) }
}

fn in_place<T: Element>(vector: &mut [T]) -> Buffers<'_> {
    Buffers::InPlace(bytemuck::cast_slice_mut(vector))
}
