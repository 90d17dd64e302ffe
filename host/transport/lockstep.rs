//! Ranks whose medium moves bytes only when both sides ask for it, as NCCL's send and receive do: a [`Transport`] made
//! of exchanges that all ranks do together.
//!
//! A thread of each rank does them, as long as a collective runs on any rank. In a round every rank tells every other how
//! many bytes it has for it and whether it needs another round; then the bytes follow. So a record can be sent without its
//! receiver knowing of it, no rank can wait for one that waits for it, and what was queued meanwhile travels together.
//! When the collective has ended on all ranks, all know it from the same round, and rest.
//!
//! A rank that does not come to a round holds up all others. Their waits end at their deadlines all the same, and the
//! round goes on when it comes.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::frame::{self, HEADER_BYTES, LONGEST_RECORD};
use super::inbox::Inbox;
use super::{Abort, Delivery, Received, Sealed, Transport};
use crate::{Error, Result};

/// What a rank tells another before a round's bytes: their number, and its flags.
const NOTE_BYTES: usize = 16;
/// No collective runs on the rank, and it sends nothing in this round.
const IDLE: u64 = 1;
/// The rank sends nothing after this round.
const LEAVING: u64 = 2;
/// How long a rank with nothing to send waits for something before the next round.
const PAUSE: Duration = Duration::from_micros(50);
/// How long a rank that leaves goes on with rounds that others may need.
const LEAVING_TIME: Duration = Duration::from_secs(1);

/// A medium that moves bytes between ranks when all of them ask for it. The untrusted world: it sees ciphertext and tags
/// only, and may do with them what it likes.
pub trait Exchange: Send + 'static {
    /// This rank.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn ranks(&self) -> usize;

    /// Bytes that one exchange can move from one rank to another, the same on all ranks.
    fn capacity(&self) -> usize;

    /// Moves `outgoing[r]` to each other rank r, and from each fills `incoming[r]`, whose length is that of what the rank
    /// sends. No bytes, no movement; a rank's own places are empty. All ranks do the same exchanges in the same order.
    /// Returns when this rank's bytes have come and gone, with an error soon after `stop` is set.
    ///
    /// # Errors
    /// Whatever the medium reports. Nothing is exchanged after that.
    fn exchange(&mut self, outgoing: &[Vec<u8>], incoming: &mut [Vec<u8>], stop: &AtomicBool) -> Result<()>;
}

/// A rank's end of links that are made of [`Exchange`]s.
pub struct Lockstep {
    rank: usize,
    ranks: usize,
    longest: usize,
    shared: Arc<Shared>,
    rounds: Option<JoinHandle<()>>,
    /// Disconnected when the thread has ended.
    running: Receiver<()>,
}

/// What a rank and the thread that does its rounds have in common.
struct Shared {
    inbox: Inbox,
    outbox: Mutex<Outbox>,
    wanted: Condvar,
    stop: AtomicBool,
}

struct Outbox {
    /// By rank: frames that no round has taken yet.
    frames: Vec<VecDeque<Vec<u8>>>,
    /// Whether a collective runs on the rank.
    running: bool,
    leaving: bool,
}

impl Outbox {
    fn is_empty(&self) -> bool {
        self.frames.iter().all(VecDeque::is_empty)
    }
}

impl Shared {
    fn outbox(&self) -> MutexGuard<'_, Outbox> {
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Outbox)) {
        change(&mut self.outbox());
        self.wanted.notify_one();
    }
}

impl Lockstep {
    /// Links a rank by `exchange`.
    ///
    /// # Errors
    /// [`Error::Io`] when the system gives no thread.
    pub fn new(exchange: impl Exchange) -> Result<Self> {
        let (rank, ranks) = (exchange.rank(), exchange.ranks());
        let longest = exchange.capacity().saturating_sub(HEADER_BYTES).min(LONGEST_RECORD);
        let frames = (0..ranks).map(|_| VecDeque::new()).collect();
        let shared = Arc::new(Shared {
            inbox: Inbox::new(ranks),
            outbox: Mutex::new(Outbox { frames, running: false, leaving: false }),
            wanted: Condvar::new(),
            stop: AtomicBool::new(false),
        });
        let (ended, running) = mpsc::channel();
        let name = format!("rank {rank} rounds");
        let thread = {
            let shared = shared.clone();
            thread::Builder::new().name(name.clone()).spawn(move || {
                let mut rounds = Rounds { exchange, shared };
                // Whatever ended them, nothing more comes.
                let _ = rounds.run();
                for peer in 0..ranks {
                    rounds.shared.inbox.lose(peer);
                }
                drop(rounds);
                drop(ended);
            })
        };
        let rounds = thread.map_err(|source| Error::Io { path: format!("the thread {name:?}"), source })?;
        Ok(Self { rank, ranks, longest, shared, rounds: Some(rounds), running })
    }

    fn post(&self, to: usize, frame: Vec<u8>) {
        self.shared.change(|outbox| outbox.frames[to].push_back(frame));
    }
}

/// The thread's side.
struct Rounds<E> {
    exchange: E,
    shared: Arc<Shared>,
}

impl<E: Exchange> Rounds<E> {
    /// Does rounds until the rank has left and no rank needs another.
    fn run(&mut self) -> Result<()> {
        let mut resting = true;
        loop {
            let Some((outgoing, flags)) = self.next(resting) else { return Ok(()) };
            resting = self.round(&outgoing, flags)?;
        }
    }

    /// What this rank gives to the next round, once there must be one. `None` when it has left.
    fn next(&self, resting: bool) -> Option<(Vec<Vec<u8>>, u64)> {
        let mut outbox = self.shared.outbox();
        while resting && !outbox.running && outbox.is_empty() {
            if outbox.leaving {
                return None;
            }
            outbox = self.shared.wanted.wait(outbox).unwrap_or_else(PoisonError::into_inner);
        }
        if outbox.is_empty() {
            let waited = self.shared.wanted.wait_timeout(outbox, PAUSE);
            outbox = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let idle = !outbox.running && outbox.is_empty();
        let capacity = self.exchange.capacity();
        let outgoing = outbox.frames.iter_mut().map(|frames| {
            let mut bytes = frames.pop_front().unwrap_or_default();
            while let Some(next) = frames.pop_front_if(|next| bytes.len() + next.len() <= capacity) {
                bytes.extend_from_slice(&next);
            }
            bytes
        });
        let outgoing: Vec<_> = outgoing.collect();
        let leaving = outbox.leaving && outbox.is_empty();
        Some((outgoing, u64::from(idle) * IDLE + u64::from(leaving) * LEAVING))
    }

    /// Does a round. Returns whether no rank needs another.
    fn round(&mut self, outgoing: &[Vec<u8>], flags: u64) -> Result<bool> {
        let (rank, ranks) = (self.exchange.rank(), self.exchange.ranks());
        let others = || (0..ranks).filter(|&other| other != rank);
        let mut notes = vec![Vec::new(); ranks];
        let mut heard = vec![Vec::new(); ranks];
        for other in others() {
            notes[other] =
                [outgoing[other].len() as u64, flags].iter().flat_map(|word| word.to_le_bytes()).collect();
            heard[other] = vec![0; NOTE_BYTES];
        }
        self.exchange.exchange(&notes, &mut heard, &self.shared.stop)?;

        let mut resting = flags & IDLE != 0;
        let mut left = Vec::new();
        let mut incoming = vec![Vec::new(); ranks];
        for other in others() {
            let ([bytes, flags], []) = heard[other].as_chunks::<8>() else { unreachable!("two words") };
            let (bytes, flags) = (u64::from_le_bytes(*bytes), u64::from_le_bytes(*flags));
            if bytes > self.exchange.capacity() as u64 {
                return Err(Error::InvalidArgument(format!("rank {other} announced {bytes} bytes at once")));
            }
            incoming[other] = vec![0; bytes as usize];
            resting &= flags & IDLE != 0;
            if flags & LEAVING != 0 {
                left.push(other);
            }
        }
        if outgoing.iter().chain(&incoming).any(|bytes| !bytes.is_empty()) {
            self.exchange.exchange(outgoing, &mut incoming, &self.shared.stop)?;
        }
        for (from, bytes) in incoming.iter().enumerate() {
            let mut rest = bytes.as_slice();
            while !rest.is_empty() {
                // What is no frame was sent by no rank, and where the next one begins is unknown.
                frame::read(&mut rest, from, &self.shared.inbox)
                    .map_err(|source| Error::Io { path: format!("what came from rank {from}"), source })?;
            }
        }
        for rank in left {
            self.shared.inbox.lose(rank);
        }
        Ok(resting)
    }
}

impl Transport for Lockstep {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn send(&mut self, to: usize, session: u64, record: Sealed) -> Result<()> {
        if record.bytes().len() > self.longest {
            return Err(Error::InvalidArgument(format!(
                "a record of {} bytes, but these links carry at most {}",
                record.bytes().len(),
                self.longest
            )));
        }
        if to == self.rank {
            let (bytes, tag) = record.into_parts();
            self.shared.inbox.put(to, (session, Received { bytes, tag }));
        } else {
            self.post(to, frame::record(session, &record));
        }
        Ok(())
    }

    fn receive(&mut self, from: usize, session: u64, deadline: Instant) -> Result<Delivery> {
        Ok(self.shared.inbox.receive(from, session, deadline))
    }

    fn run(&mut self, running: bool) {
        self.shared.change(|outbox| outbox.running = running);
    }

    fn abort(&mut self, session: u64, abort: Abort) {
        self.shared.inbox.abort(session, abort);
        for peer in (0..self.ranks).filter(|&peer| peer != self.rank) {
            self.post(peer, frame::abort(session, abort));
        }
    }
}

impl Drop for Lockstep {
    fn drop(&mut self) {
        self.shared.change(|outbox| outbox.leaving = true);
        let _ = self.running.recv_timeout(LEAVING_TIME);
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(rounds) = self.rounds.take() {
            let _ = rounds.join();
        }
    }
}

impl fmt::Debug for Lockstep {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Lockstep").field("rank", &self.rank).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ReduceOp;
    use crate::channel::GroupSecret;
    use crate::collective::{Algorithm, Communicator, Options};

    /// Moves bytes as NCCL does: each side waits for the other. What `tap` does to the bytes, happens on the way.
    struct Table {
        rank: usize,
        places: Arc<Places>,
    }

    struct Places {
        ranks: usize,
        /// By sender and receiver.
        bytes: Mutex<Vec<Option<Vec<u8>>>>,
        changed: Condvar,
        tap: fn(&mut Vec<u8>),
    }

    fn table(ranks: usize, tap: fn(&mut Vec<u8>)) -> Vec<Table> {
        let bytes = Mutex::new(vec![None; ranks * ranks]);
        let places = Arc::new(Places { ranks, bytes, changed: Condvar::new(), tap });
        (0..ranks).map(|rank| Table { rank, places: places.clone() }).collect()
    }

    const CAPACITY: usize = 100_000;

    impl Exchange for Table {
        fn rank(&self) -> usize {
            self.rank
        }

        fn ranks(&self) -> usize {
            self.places.ranks
        }

        fn capacity(&self) -> usize {
            CAPACITY
        }

        fn exchange(
            &mut self,
            outgoing: &[Vec<u8>],
            incoming: &mut [Vec<u8>],
            stop: &AtomicBool,
        ) -> Result<()> {
            let Places { ranks, bytes, changed, tap } = &*self.places;
            let own = self.rank;
            let others: Vec<_> = (0..*ranks).filter(|&other| other != own).collect();
            let mut places = bytes.lock().unwrap();
            for &to in &others {
                assert!(outgoing[to].len() <= CAPACITY);
                if !outgoing[to].is_empty() {
                    assert!(places[own * ranks + to].is_none());
                    let mut bytes = outgoing[to].clone();
                    tap(&mut bytes);
                    places[own * ranks + to] = Some(bytes);
                }
            }
            changed.notify_all();
            let mut awaited: Vec<_> =
                others.iter().copied().filter(|&from| !incoming[from].is_empty()).collect();
            loop {
                awaited.retain(|&from| match places[from * ranks + own].take() {
                    None => true,
                    Some(bytes) => {
                        assert_eq!(bytes.len(), incoming[from].len(), "both sides say alike how much it is");
                        incoming[from] = bytes;
                        changed.notify_all();
                        false
                    }
                });
                if awaited.is_empty() && others.iter().all(|to| places[own * ranks + to].is_none()) {
                    return Ok(());
                }
                if stop.load(Ordering::Relaxed) {
                    return Err(Error::Cuda("stopped".into()));
                }
                places = changed.wait_timeout(places, Duration::from_millis(1)).unwrap().0;
            }
        }
    }

    fn group(ranks: usize, tap: fn(&mut Vec<u8>), options: &Options) -> Vec<Communicator> {
        let links = table(ranks, tap).into_iter();
        let links = links.map(|end| Box::new(Lockstep::new(end).unwrap()) as Box<dyn Transport>);
        Communicator::in_process_over(links.collect(), &GroupSecret::random().unwrap(), options).unwrap()
    }

    fn options() -> Options {
        Options { record_bytes: 4096, timeout: Duration::from_secs(20), ..Options::default() }
    }

    /// Each rank's outcome of `work` in a thread of its own.
    fn on_all<T: Send>(
        ranks: Vec<Communicator>,
        work: impl Fn(&mut Communicator) -> T + Sync,
    ) -> (Vec<T>, Vec<Communicator>) {
        thread::scope(|scope| {
            let work = &work;
            let threads = ranks.into_iter().map(|mut rank| scope.spawn(move || (work(&mut rank), rank)));
            threads.collect::<Vec<_>>().into_iter().map(|thread| thread.join().unwrap()).unzip()
        })
    }

    fn all_reduce(rank: &mut Communicator, count: usize) -> Result<Vec<u32>> {
        let mut vector: Vec<u32> = (0..count as u32).map(|at| at * (rank.rank() as u32 + 1)).collect();
        let outcome = rank.all_reduce_in_place(&mut vector, ReduceOp::Sum);
        assert!(outcome.is_ok() || vector.iter().all(|&element| element == 0), "zeros after a failure");
        outcome.map(|()| vector)
    }

    #[test]
    fn collectives_are_those_of_other_links() {
        for ranks in 1..=4 {
            let (sums, group) = on_all(group(ranks, |_| {}, &options()), |rank| {
                let mut sums = Vec::new();
                for algorithm in Algorithm::ALL {
                    rank.set_algorithm(algorithm);
                    sums.extend([0, 1, 40_000].map(|count| all_reduce(rank, count).unwrap()));
                    let (root, mut given) = (rank.ranks() - 1, [rank.rank() as u32]);
                    rank.broadcast_in_place(&mut given, root).unwrap();
                    assert_eq!(given, [root as u32]);
                }
                sums
            });
            let factor = (1..=ranks as u32).sum::<u32>();
            for sum in sums.iter().flatten() {
                assert!((0..).zip(sum).all(|(at, &sum): (u32, _)| sum == at * factor));
            }
            drop(group);
        }
    }

    #[test]
    fn changed_bytes_fail_all_ranks_and_a_new_session_works() {
        static CHANGES: AtomicBool = AtomicBool::new(false);
        let flip = |bytes: &mut Vec<u8>| {
            // A record's, not what says how long something is.
            if bytes.len() > 1000 && CHANGES.swap(false, Ordering::Relaxed) {
                bytes[HEADER_BYTES + 500] ^= 1;
            }
        };
        let (sums, ranks) = on_all(group(3, flip, &options()), |rank| all_reduce(rank, 10_000).unwrap());
        assert!(sums.iter().all(|sum| sum == &sums[0]));
        CHANGES.store(true, Ordering::Relaxed);
        let (failures, ranks) = on_all(ranks, |rank| all_reduce(rank, 10_000).unwrap_err());
        assert!(failures.iter().all(|error| matches!(error, Error::Record { .. })), "{failures:?}");
        let (again, _ranks) = on_all(ranks, |rank| {
            assert!(matches!(all_reduce(rank, 1), Err(Error::Poisoned)));
            rank.rekey().unwrap();
            all_reduce(rank, 10_000).unwrap()
        });
        assert_eq!(again, sums);
    }

    #[test]
    fn a_rank_that_comes_late_fails_with_the_others_and_all_can_go_on() {
        let options = Options { timeout: Duration::from_millis(200), ..options() };
        let (failures, ranks) = on_all(group(3, |_| {}, &options), |rank| {
            if rank.rank() == 1 {
                thread::sleep(Duration::from_millis(600));
            }
            let start = Instant::now();
            let failure = all_reduce(rank, 5000).unwrap_err();
            assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
            failure
        });
        assert!(failures.iter().all(|error| matches!(error, Error::Deadline { .. })), "{failures:?}");
        let (sums, _ranks) = on_all(ranks, |rank| {
            rank.set_timeout(Duration::from_secs(20));
            rank.rekey().unwrap();
            all_reduce(rank, 5000).unwrap()
        });
        assert!(sums.iter().all(|sum| sum == &sums[0] && sum[7] == 42));
    }

    #[test]
    fn a_rank_that_leaves_is_lost_and_holds_up_nobody() {
        let mut ranks = group(3, |_| {}, &options());
        let last = ranks.pop().unwrap();
        let start = Instant::now();
        let leaving = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            drop(last);
        });
        let short = |rank: &mut Communicator| {
            rank.set_timeout(Duration::from_millis(300));
            all_reduce(rank, 5000).unwrap_err()
        };
        let (failures, ranks) = on_all(ranks, short);
        let gone = |error: &Error| matches!(error, Error::Deadline { .. } | Error::Lost { .. });
        assert!(failures.iter().all(gone), "{failures:?}");
        leaving.join().unwrap();
        drop(ranks);
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    }

    #[test]
    fn what_is_no_frame_and_what_is_too_long_ends_the_links() {
        for tap in [|bytes: &mut Vec<u8>| bytes[0] = 0xff, |bytes: &mut Vec<u8>| bytes.fill(0xff)] {
            let (failures, _ranks) = on_all(group(2, tap, &options()), |rank| {
                rank.set_timeout(Duration::from_millis(500));
                all_reduce(rank, 5000).unwrap_err()
            });
            let gone = |error: &Error| matches!(error, Error::Deadline { .. } | Error::Lost { .. });
            assert!(failures.iter().all(gone), "{failures:?}");
        }
        let long = Options { record_bytes: 1 << 20, ..options() };
        let (failures, _ranks) =
            on_all(group(2, |_| {}, &long), |rank| all_reduce(rank, 1 << 20).unwrap_err());
        let refused = |error: &Error| matches!(error, Error::InvalidArgument(_) | Error::Aborted { .. });
        assert!(failures.iter().all(refused), "{failures:?}");
    }
}
