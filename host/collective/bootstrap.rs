//! How ranks that have no session yet exchange a few bytes.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::channel::{GroupSecret, Handshake, Terms, Unconfirmed};
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
}

/// Both rounds of the handshake: what this rank came to, and all ranks' confirmations of it. Between the rounds, when
/// all ranks have come, does `between`; when that fails, all ranks fail.
pub(crate) fn agree(
    secret: &GroupSecret,
    terms: Terms,
    rank: usize,
    bootstrap: &mut dyn Bootstrap,
    timeout: Duration,
    between: impl FnOnce() -> Result<()>,
) -> Result<(Unconfirmed, Vec<Vec<u8>>)> {
    let handshake = Handshake::new(secret, terms, rank)?;
    let hellos = bootstrap.gather(handshake.hello(), timeout)?;
    let heard = handshake.hear(&hellos).and_then(|heard| between().map(|()| heard));
    // A rank that has nothing to confirm says so, so that the others needn't wait for it.
    let confirmation = heard.as_ref().map_or(Vec::new(), |heard| heard.confirmation().to_vec());
    let confirmations = bootstrap.gather(&confirmation, timeout)?;
    Ok((heard?, confirmations))
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
