//! How ranks that have no session yet exchange a few bytes.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ctutils::CtEq;

use crate::channel::{ANNOUNCEMENT_TAG_BYTES, GroupSecret, Handshake, Root, Terms};
use crate::transport::deadline;
use crate::{Error, Result};

/// Gathers a message of every rank at every rank.
///
/// Nothing about it is trusted: the handshake that runs over it notices changes.
pub trait Bootstrap: Send {
    /// Gives this rank's message, and takes all ranks' messages, by rank. All ranks do this equally often.
    ///
    /// # Errors
    /// [`Error::Handshake`] when a rank does not come in time; whatever the medium reports.
    fn gather(&mut self, message: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>>;

    /// The address of this machine by which the other ranks reach it. The default is for ranks of one machine.
    fn interface(&self) -> IpAddr {
        Ipv4Addr::LOCALHOST.into()
    }

    /// Something that notices when ranks die; `None` where the medium can't tell, and deadlines must do.
    fn watch(&self) -> Option<Box<dyn Watch>> {
        None
    }
}

/// Notices when other ranks die, beside the [`Bootstrap`] that it came from.
pub trait Watch: Send {
    /// Waits for at most `wait`, and names a rank that was lost, once. A rank that left in good order is not lost.
    fn lost(&mut self, wait: Duration) -> Option<usize>;
}

/// A [`Bootstrap`] over a store that the host program has already, such as PyTorch's or MPI's: a function that does
/// what [`Bootstrap::gather`] says.
pub struct CallbackBootstrap {
    gather: Box<Gather>,
    ranks: usize,
    interface: IpAddr,
}

type Gather = dyn FnMut(&[u8], Duration) -> Result<Vec<Vec<u8>>> + Send;

impl CallbackBootstrap {
    /// For `ranks` ranks, with a function that takes this rank's message and the longest time to wait, and returns all
    /// ranks' messages, by rank. It may report its own failures as [`Error::Handshake`].
    pub fn new(
        ranks: usize,
        gather: impl FnMut(&[u8], Duration) -> Result<Vec<Vec<u8>>> + Send + 'static,
    ) -> Self {
        Self { gather: Box::new(gather), ranks, interface: Ipv4Addr::LOCALHOST.into() }
    }

    /// With the address by which the ranks of other machines reach this one.
    #[must_use]
    pub fn on_interface(self, interface: IpAddr) -> Self {
        Self { interface, ..self }
    }
}

impl Bootstrap for CallbackBootstrap {
    fn gather(&mut self, message: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let all = (self.gather)(message, timeout)?;
        if all.len() == self.ranks {
            return Ok(all);
        }
        Err(Error::Handshake(format!(
            "the callback gathered {} messages, but there are {} ranks",
            all.len(),
            self.ranks
        )))
    }

    fn interface(&self) -> IpAddr {
        self.interface
    }
}

impl std::fmt::Debug for CallbackBootstrap {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("CallbackBootstrap").field("ranks", &self.ranks).finish_non_exhaustive()
    }
}

/// The bootstrap of a group that is a part of another: its ranks gather when all ranks of the whole do, each in its part,
/// and hear their part's messages only. All parts gather equally often.
pub(crate) struct Part {
    whole: Arc<Mutex<Box<dyn Bootstrap>>>,
    members: Vec<usize>,
}

impl Part {
    /// For the ranks `members` of the whole, in the order of their ranks in the part.
    pub(crate) fn new(whole: &Arc<Mutex<Box<dyn Bootstrap>>>, members: impl Iterator<Item = usize>) -> Self {
        Self { whole: whole.clone(), members: members.collect() }
    }
}

impl Bootstrap for Part {
    fn gather(&mut self, message: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let mut all = self.whole.lock().unwrap_or_else(PoisonError::into_inner).gather(message, timeout)?;
        let members = self.members.iter().map(|&member| all.get_mut(member).map(std::mem::take));
        members.collect::<Option<_>>().ok_or_else(|| Error::Handshake("a rank's message is missing".into()))
    }

    fn interface(&self) -> IpAddr {
        self.whole.lock().unwrap_or_else(PoisonError::into_inner).interface()
    }
}

/// Both rounds of the handshake. Between them, when all ranks have come, does `between`; when that fails on a rank, all
/// ranks fail.
pub(crate) fn agree(
    secret: &GroupSecret,
    terms: Terms,
    rank: usize,
    bootstrap: &mut dyn Bootstrap,
    timeout: Duration,
    between: impl FnOnce() -> Result<()>,
) -> Result<Root> {
    let handshake = Handshake::new(secret, terms, rank)?;
    let hellos = bootstrap.gather(handshake.hello(), timeout)?;
    let heard = handshake.hear(&hellos).and_then(|heard| between().map(|()| heard));
    // A rank that has nothing to confirm says so, so that the others needn't wait for it.
    let confirmation = heard.as_ref().map_or(Vec::new(), |heard| heard.confirmation().to_vec());
    let confirmations = bootstrap.gather(&confirmation, timeout)?;
    Ok(heard?.confirmed(&confirmations)?.0)
}

/// The longest reason that a rank gives the others for not joining. A bootstrap may carry no more than a kilobyte, and a rank whose
/// message is refused for its length would leave the others waiting.
const REASON_BYTES: usize = 900;

fn reason(error: &Error) -> String {
    let mut text = error.to_string();
    text.truncate(text.floor_char_boundary(REASON_BYTES));
    text
}

/// Gathers what the ranks of a session tell each other while they set up, authenticated: bound to the session, so to
/// fresh salts of all ranks, to the sender and to `round`, which is used once in a session. A rank that has failed tells
/// the others so, and all ranks fail. Gives back what belongs to this rank's announcement.
pub(crate) fn announce<T>(
    root: &Root,
    round: u64,
    [rank, ranks]: [usize; 2],
    announcement: Result<(Vec<u8>, T)>,
    bootstrap: &mut dyn Bootstrap,
    timeout: Duration,
) -> Result<(Vec<Vec<u8>>, T)> {
    let mut message = match &announcement {
        Ok((bytes, _)) => [&[1], bytes.as_slice()].concat(),
        Err(error) => [&[0], reason(error).as_bytes()].concat(),
    };
    message.extend_from_slice(&root.announcement_tag(round, rank, &message));
    let gathered = bootstrap.gather(&message, timeout)?;
    let (_, own) = announcement?;
    if gathered.len() != ranks {
        return Err(Error::Handshake(format!("{} of {ranks} ranks announced themselves", gathered.len())));
    }
    let read = |(rank, mut message): (usize, Vec<u8>)| {
        let tag = message.split_off(message.len().saturating_sub(ANNOUNCEMENT_TAG_BYTES));
        if !bool::from(root.announcement_tag(round, rank, &message).as_slice().ct_eq(tag.as_slice())) {
            return Err(Error::Handshake(format!(
                "what rank {rank} announced was changed, or is of another session: bootstraps were mixed up or replayed"
            )));
        }
        match message.split_first() {
            Some((1, bytes)) => Ok(bytes.to_vec()),
            Some((_, reason)) => {
                Err(Error::Handshake(format!("rank {rank} cannot join: {}", String::from_utf8_lossy(reason))))
            }
            None => Err(Error::Handshake(format!("rank {rank} announced nothing"))),
        }
    };
    Ok((gathered.into_iter().enumerate().map(read).collect::<Result<_>>()?, own))
}

/// The ranks of one process.
pub struct InProcess {
    rank: usize,
    meeting: Arc<Meeting>,
}

struct Meeting {
    round: Mutex<Round>,
    complete: Condvar,
}

struct Round {
    number: u64,
    seats: Vec<Seat>,
    /// What the round before gathered. The next one can't end before every rank has fetched it, since it needs them
    /// all again.
    gathered: Vec<Vec<u8>>,
}

#[derive(Clone)]
enum Seat {
    Absent,
    Present(Vec<u8>),
    /// Came and left when its time was over; its message doesn't count in a later attempt.
    GaveUp,
}

impl InProcess {
    /// One for each rank.
    pub fn group(ranks: usize) -> Vec<Self> {
        let round = Round { number: 0, seats: vec![Seat::Absent; ranks], gathered: Vec::new() };
        let meeting = Arc::new(Meeting { round: Mutex::new(round), complete: Condvar::new() });
        (0..ranks).map(|rank| Self { rank, meeting: meeting.clone() }).collect()
    }
}

impl Round {
    fn all_present(&self) -> Option<Vec<Vec<u8>>> {
        let message = |seat: &Seat| match seat {
            Seat::Present(message) => Some(message.clone()),
            Seat::Absent | Seat::GaveUp => None,
        };
        self.seats.iter().map(message).collect()
    }

    fn absent(&self) -> Vec<usize> {
        let seats = self.seats.iter().enumerate();
        seats.filter(|(_, seat)| matches!(seat, Seat::Absent)).map(|(rank, _)| rank).collect()
    }
}

impl Bootstrap for InProcess {
    fn gather(&mut self, message: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let deadline = deadline(timeout);
        let mut round = self.meeting.round.lock().unwrap_or_else(PoisonError::into_inner);
        let number = round.number;
        round.seats[self.rank] = Seat::Present(message.to_vec());
        if let Some(gathered) = round.all_present() {
            round.gathered = gathered;
            round.seats.fill(Seat::Absent);
            round.number += 1;
            self.meeting.complete.notify_all();
        }
        while round.number == number {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                round.seats[self.rank] = Seat::GaveUp;
                let missing = round.absent();
                return Err(Error::Handshake(format!(
                    "ranks {missing:?} did not come within {} ms",
                    timeout.as_millis()
                )));
            }
            round = self.meeting.complete.wait_timeout(round, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(round.gathered.clone())
    }
}

impl std::fmt::Debug for InProcess {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("InProcess").field("rank", &self.rank).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channel::Crypto;

    #[test]
    fn every_rank_hears_every_rank_in_every_round() {
        let group = InProcess::group(4);
        std::thread::scope(|scope| {
            for (rank, mut bootstrap) in group.into_iter().enumerate() {
                scope.spawn(move || {
                    for round in 0..50u8 {
                        let all = bootstrap.gather(&[rank as u8, round], Duration::from_secs(20)).unwrap();
                        assert_eq!(all, (0..4).map(|rank| vec![rank, round]).collect::<Vec<_>>());
                    }
                });
            }
        });
    }

    /// What an honest rank announced in another round, another session, or another rank's place is refused by all.
    #[test]
    fn announcements_of_other_rounds_sessions_and_ranks_are_refused() {
        let terms = Terms { ranks: 2, crypto: Crypto::None, record_bytes: 0, key_bytes: 1 };
        let secret = GroupSecret::random().unwrap();
        let roots = |secret: &GroupSecret| -> Vec<Root> {
            std::thread::scope(|scope| {
                let ranks = InProcess::group(2).into_iter().enumerate().map(|(rank, mut bootstrap)| {
                    scope.spawn(move || {
                        agree(secret, terms, rank, &mut bootstrap, Duration::from_secs(20), || Ok(()))
                            .unwrap()
                    })
                });
                ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
            })
        };
        let [now, before] = [roots(&secret), roots(&secret)];
        let signed = |root: &Root, round, rank, text: &[u8]| {
            let mut message = [&[1], text].concat();
            message.extend_from_slice(&root.announcement_tag(round, rank, &message));
            message
        };
        let hear = |second: Vec<u8>| {
            let mut callback =
                CallbackBootstrap::new(2, move |own, _| Ok(vec![own.to_vec(), second.clone()]));
            let own = Ok((b"zero".to_vec(), ()));
            announce(&now[0], 3, [0, 2], own, &mut callback, Duration::ZERO).map(|(all, ())| all)
        };
        assert_eq!(hear(signed(&now[1], 3, 1, b"one")).unwrap(), [b"zero".to_vec(), b"one".to_vec()]);
        let mut changed = signed(&now[1], 3, 1, b"one");
        changed[2] ^= 1;
        for wrong in [
            changed,
            signed(&now[1], 2, 1, b"one"),
            signed(&now[1], 3, 0, b"one"),
            signed(&before[1], 3, 1, b"one"),
            Vec::new(),
        ] {
            let error = hear(wrong).unwrap_err();
            assert!(matches!(&error, Error::Handshake(text) if text.contains("rank 1")), "{error}");
        }
        let mut failed = [&[0], b"no memory".as_slice()].concat();
        failed.extend_from_slice(&now[1].announcement_tag(3, 1, &failed));
        let error = hear(failed).unwrap_err().to_string();
        assert!(error.contains("rank 1 cannot join: no memory"), "{error}");
        // A compiler's log, say: bootstraps of the C API carry a kilobyte.
        let mut callback = CallbackBootstrap::new(2, |own, _| {
            assert!((800..=1000).contains(&own.len()), "{} bytes", own.len());
            Err(Error::Handshake("heard".into()))
        });
        let long: Result<(Vec<u8>, ())> = Err(Error::Cuda("\u{fc}".repeat(9_000)));
        let error = announce(&now[0], 3, [0, 2], long, &mut callback, Duration::ZERO).unwrap_err();
        assert!(matches!(error, Error::Handshake(text) if text == "heard"));
        let mut short = CallbackBootstrap::new(2, |own, _| Ok(vec![own.to_vec()]));
        assert!(matches!(short.gather(b"", Duration::ZERO), Err(Error::Handshake(_))));
    }

    #[test]
    fn a_missing_rank_is_named_and_a_later_attempt_works() {
        let mut group = InProcess::group(2);
        let error = group[0].gather(b"early", Duration::from_millis(5)).unwrap_err().to_string();
        assert!(error.contains("[1]"), "{error}");
        std::thread::scope(|scope| {
            for bootstrap in &mut group {
                scope.spawn(|| {
                    let all = bootstrap.gather(b"now", Duration::from_secs(20)).unwrap();
                    assert_eq!(all, [b"now", b"now"]);
                });
            }
        });
    }
}
