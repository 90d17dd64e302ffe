//! The ranks of a run, all in this process, each on a thread of its own.

use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ringseal::channel::GroupSecret;
use ringseal::collective::{Algorithm, Buffers, Communicator, Crypto, Options, Request};
use ringseal::{Dtype, ReduceOp};

use crate::cli::BackendName;
use crate::cli::failure::{Failure, Outcome};
use crate::cli::values::ByteSize;

/// More threads than this are no help to anybody.
const MAX_RANKS: usize = 256;
/// Ranks of one process don't die alone, but many of them, or the emulated backend, take their time.
const TIMEOUT: Duration = Duration::from_secs(600);
/// Up to this many bytes of a rank, `auto` goes direct: two hops instead of 2(n-1).
const DIRECT_BYTES: usize = 64 << 10;

/// Which algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// By the size.
    Auto,
    /// Always this one.
    Always(Algorithm),
}

impl Choice {
    /// Parses `auto` or an algorithm's name.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let known = Algorithm::ALL.iter().find(|algorithm| algorithm.name() == text);
        match (text, known) {
            ("auto", _) => Ok(Self::Auto),
            (_, Some(&algorithm)) => Ok(Self::Always(algorithm)),
            _ => Err(format!("choose one of auto, {}", Algorithm::ALL.map(Algorithm::name).join(", "))),
        }
    }

    fn algorithm(self, bytes: usize) -> Algorithm {
        match self {
            Self::Always(algorithm) => algorithm,
            Self::Auto if bytes <= DIRECT_BYTES => Algorithm::Direct,
            Self::Auto => Algorithm::RelayRing,
        }
    }
}

/// How many ranks, and how they work together.
#[derive(Clone, Debug)]
pub(super) struct Setup {
    ranks: usize,
    choice: Choice,
    options: Options,
}

impl Setup {
    pub(super) fn new(
        ranks: usize,
        choice: Choice,
        crypto: Crypto,
        record: Option<ByteSize>,
        backend: BackendName,
    ) -> Outcome<Self> {
        if ranks == 0 {
            return Err(Failure::Input("--ranks 0: there must be at least one rank".into()));
        }
        if ranks > MAX_RANKS {
            return Err(Failure::Input(format!("--ranks {ranks}: at most {MAX_RANKS} run in one process")));
        }
        let backend = match backend {
            // The ranks' vectors are in this process's memory, and so is the link: a GPU would only add copies.
            BackendName::Auto => BackendName::Cpu.open()?,
            named => named.open()?,
        };
        if crypto != Crypto::None && !backend.has_gcm() {
            let what =
                format!("--backend {}: it has no AES-GCM here; use cpu, or --crypto none", backend.name());
            return Err(Failure::Input(what));
        }
        let defaults = Options::default();
        let record_bytes = record.map_or(defaults.record_bytes, |ByteSize(bytes)| bytes);
        let options = Options { crypto, backend, record_bytes, timeout: TIMEOUT, ..defaults };
        Ok(Self { ranks, choice, options })
    }

    pub(super) fn ranks(&self) -> usize {
        self.ranks
    }

    /// The ring without encryption, to compare with; `None` when there is nothing to compare.
    pub(super) fn plain_ring(&self) -> Option<Self> {
        let options = Options { crypto: Crypto::None, ..self.options.clone() };
        let plain = Self { choice: Choice::Always(Algorithm::Ring), options, ..self.clone() };
        (self.options.crypto != Crypto::None).then_some(plain)
    }

    /// In words, for the head of a table.
    pub(super) fn description(&self) -> String {
        let Self { ranks, choice, options } = self;
        let algorithm = match choice {
            Choice::Auto => {
                format!("direct up to {} and relay ring above", ByteSize(DIRECT_BYTES))
            }
            Choice::Always(algorithm) => algorithm.name().into(),
        };
        let crypto = match options.crypto {
            Crypto::None => "not encrypted".into(),
            Crypto::Gcm(length) => {
                format!("AES-{}-GCM by the {} backend", 8 * length.bytes(), options.backend.name())
            }
        };
        let record = ByteSize(options.record_bytes);
        format!("all-reduce over {ranks} ranks in one process, {algorithm}, {crypto}, records of {record}")
    }
}

/// The ranks, ready to work.
pub(super) struct Group {
    ranks: Vec<Communicator>,
    choice: Choice,
}

impl Group {
    /// Makes the ranks; they share a fresh secret.
    pub(super) fn new(setup: &Setup) -> Outcome<Self> {
        let ranks = Communicator::in_process(setup.ranks, &GroupSecret::random()?, &setup.options)?;
        Ok(Self { ranks, choice: setup.choice })
    }

    /// Reduces each rank's input into each rank's output. Returns how long it took.
    pub(super) fn all_reduce(
        &mut self,
        inputs: &[Vec<u8>],
        outputs: &mut [Vec<u8>],
        dtype: Dtype,
        op: ReduceOp,
    ) -> Outcome<Duration> {
        let vectors = inputs.iter().zip(outputs).map(|(input, output)| Buffers::Apart { input, output });
        self.run(vectors, inputs[0].len(), dtype, op)
    }

    /// Reduces the ranks' vectors where they lie. Returns how long it took.
    pub(super) fn all_reduce_in_place(
        &mut self,
        vectors: &mut [Vec<u8>],
        dtype: Dtype,
        op: ReduceOp,
    ) -> Outcome<Duration> {
        let bytes = vectors[0].len();
        self.run(vectors.iter_mut().map(|vector| Buffers::InPlace(vector)), bytes, dtype, op)
    }

    fn run<'a>(
        &mut self,
        vectors: impl Iterator<Item = Buffers<'a>>,
        bytes: usize,
        dtype: Dtype,
        op: ReduceOp,
    ) -> Outcome<Duration> {
        let algorithm = self.choice.algorithm(bytes);
        self.ranks.iter_mut().for_each(|rank| rank.set_algorithm(algorithm));
        on_every_rank(self.ranks.iter_mut().zip(vectors), |(rank, vector)| {
            rank.run(Request::AllReduce(op), dtype, vector)
        })
    }
}

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
                    return Err(Failure::Input(format!(
                        "starting a thread for rank {number}: {error}; use fewer ranks"
                    )));
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
    fn algorithms_go_by_their_names() {
        assert_eq!(Choice::parse("auto"), Ok(Choice::Auto));
        for algorithm in Algorithm::ALL {
            assert_eq!(Choice::parse(algorithm.name()), Ok(Choice::Always(algorithm)));
        }
        let refusal = Choice::parse("magic").unwrap_err();
        assert!(refusal.contains("auto, ring, relay, direct, tree"), "{refusal}");
    }

    #[test]
    fn auto_goes_direct_when_the_message_is_small() {
        assert_eq!(Choice::Auto.algorithm(DIRECT_BYTES), Algorithm::Direct);
        assert_eq!(Choice::Auto.algorithm(DIRECT_BYTES + 1), Algorithm::RelayRing);
        assert_eq!(Choice::Always(Algorithm::Tree).algorithm(1), Algorithm::Tree);
    }

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
