//! The ranks of a run, all in this process, each on a thread of its own.

use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::cli::failure::{Failure, Outcome};

/// Opens once, for all threads that wait at it.
#[derive(Default)]
struct Gate {
    verdict: Mutex<Option<bool>>,
    changed: Condvar,
}

impl Gate {
    /// Lets the waiting threads through (`go`) or sends them home.
    fn open(&self, go: bool) {
        *self.verdict.lock().unwrap_or_else(PoisonError::into_inner) = Some(go);
        self.changed.notify_all();
    }

    fn wait(&self) -> bool {
        let verdict = self.verdict.lock().unwrap_or_else(PoisonError::into_inner);
        let verdict = self.changed.wait_while(verdict, |verdict| verdict.is_none());
        verdict.unwrap_or_else(PoisonError::into_inner).unwrap_or(false)
    }
}

/// Does `work` for every rank at once, each on a thread of its own. Returns the time from the first rank's start to
/// the last one's end; thread creation isn't in it.
fn on_every_rank<T: Send>(
    ranks: impl IntoIterator<Item = T>,
    work: impl Fn(T) -> ringseal::Result<()> + Sync,
) -> Outcome<Duration> {
    let gate = Gate::default();
    let runs = thread::scope(|scope| {
        let mut threads = Vec::new();
        for (number, rank) in ranks.into_iter().enumerate() {
            let (gate, work) = (&gate, &work);
            let run = move || {
                gate.wait().then(|| {
                    let start = Instant::now();
                    work(rank).map(|()| (start, Instant::now()))
                })
            };
            match thread::Builder::new().name(format!("rank {number}")).spawn_scoped(scope, run) {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    gate.open(false);
                    return Err(Failure::Input(format!("starting a thread for rank {number}: {error}; use fewer ranks")));
                }
            }
        }
        gate.open(true);
        Ok(threads.into_iter().map(|thread| thread.join()).collect::<Vec<_>>())
    })?;
    let mut times = Vec::with_capacity(runs.len());
    let mut first_error = None;
    for run in runs {
        match run {
            Ok(Some(Ok(span))) => times.push(span),
            Ok(Some(Err(error))) => first_error = Some(most_telling(first_error, error)),
            Ok(None) => {}
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
    if let Some(error) = first_error {
        return Err(error.into());
    }
    let start = times.iter().map(|(start, _)| start).min();
    let end = times.iter().map(|(_, end)| end).max();
    Ok(start.zip(end).map_or(Duration::ZERO, |(start, end)| *end - *start))
}

/// When several ranks fail, the one that saw the cause, not one that it dragged along.
fn most_telling(first: Option<ringseal::Error>, next: ringseal::Error) -> ringseal::Error {
    match first {
        Some(ringseal::Error::Aborted { .. } | ringseal::Error::Deadline { .. }) | None => next,
        Some(first) => first,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_runs_and_the_cause_is_reported() {
        let mut done = [false; 5];
        on_every_rank(done.iter_mut(), |done| {
            *done = true;
            Ok(())
        })
        .unwrap();
        assert_eq!(done, [true; 5]);
        let failure = on_every_rank(0..4, |rank| match rank {
            1 => Err(ringseal::Error::Record { rank, step: 2, record: 3 }),
            3 => Ok(()),
            _ => Err(ringseal::Error::Aborted { rank, by: 1 }),
        });
        let text = failure.unwrap_err().to_string();
        assert!(text.contains("rank 1") && text.contains("step 2"), "{text}");
    }
}
