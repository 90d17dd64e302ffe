//! Which algorithm an all-reduce takes, by its length: the one for which the cost model predicts the least time.
//!
//! The table is made once, from a [`Calibration`], and looked up for each all-reduce. Ranks of several processes must choose
//! alike: they take the table of one of them.
//!
//! Where the candidates themselves were measured, the model's time is corrected by the ratio of the measured to the
//! predicted one: interpolated by the logarithm of the length between two measured lengths, and that of the nearest
//! beyond them. So a choice at a measured length is what was measured, and the model only says how it goes on.

use std::fmt;

use super::calibration::Calibration;
use super::fit::{Observation, fit};
use super::model::{Method, Model, Topology};
use crate::channel::Crypto;
use crate::collective::Algorithm;
use crate::{Error, Result};

/// By how much of its time another algorithm must be faster to be taken: every algorithm has mailboxes of its own, and the
/// model errs by more than it is worth to take one for less.
const WORTH: f64 = 0.05;
/// The longest vectors of the table's first entry; each following length is twice the one before.
const SHORTEST: usize = 1 << 10;

/// What is to be chosen for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// Where the ranks are.
    pub topology: Topology,
    /// What protects records.
    pub crypto: Crypto,
    /// Number of ranks.
    pub ranks: usize,
    /// Bytes of the longest vectors.
    pub max_bytes: usize,
    /// The algorithms to choose from, at least one: where they take equally long, the earlier one.
    pub candidates: Vec<Algorithm>,
}

/// Algorithms by length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choices {
    /// Up to how many bytes each is taken; in rising order, the last one's are never reached.
    ranges: Vec<(usize, Algorithm)>,
}

impl Choices {
    /// One algorithm for every length.
    pub fn always(algorithm: Algorithm) -> Self {
        Self { ranges: vec![(usize::MAX, algorithm)] }
    }

    /// The fastest for each length by what `calibration` predicts, corrected by those of the observations that bear on the
    /// question.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] without a candidate, and as [`Model::new`].
    pub fn new(calibration: &Calibration, question: &Question, observations: &[Observation]) -> Result<Self> {
        let Question { topology, crypto, ranks, max_bytes, candidates } = question;
        if candidates.is_empty() {
            return Err(Error::InvalidArgument("no algorithm to choose from".into()));
        }
        let models = candidates
            .iter()
            .map(|&algorithm| {
                let method = Method::Fused(algorithm, *crypto);
                let model = Model::new(calibration, *topology, method, *ranks)?;
                let ratios = Ratios::new(&model, method, question, observations)?;
                Ok(Candidate { algorithm, model, ratios })
            })
            .collect::<Result<Vec<_>>>()?;
        let doubled = std::iter::successors(Some(SHORTEST), |bytes| bytes.checked_mul(2));
        let mut lengths: Vec<_> = doubled.take_while(|bytes| bytes < max_bytes).collect();
        lengths.push(*max_bytes);
        // From the longest on, which cost most: what is fastest there stays until another is clearly faster.
        let mut ranges: Vec<(usize, Algorithm)> = Vec::new();
        for &bytes in lengths.iter().rev() {
            let times =
                models.iter().map(|one| Ok((one.algorithm, one.us(bytes)?))).collect::<Result<Vec<_>>>()?;
            let fastest =
                times.iter().copied().fold(times[0], |best, next| if next.1 < best.1 { next } else { best });
            let present =
                ranges.last().and_then(|(_, present)| times.iter().find(|(name, _)| name == present));
            match present {
                None => ranges.push((usize::MAX, fastest.0)),
                Some((_, us)) if fastest.1 < us * (1.0 - WORTH) => ranges.push((bytes, fastest.0)),
                Some(_) => {}
            }
        }
        ranges.reverse();
        Ok(Self { ranges })
    }

    /// What vectors of so many bytes take.
    pub fn algorithm(&self, bytes: usize) -> Algorithm {
        let (Ok(at) | Err(at)) = self.ranges.binary_search_by_key(&bytes, |(up_to, _)| *up_to);
        self.ranges[at].1
    }

    /// Each algorithm that is taken at all, with the most bytes that it is taken for, of vectors of up to `max_bytes`.
    pub fn longest_of_each(&self, max_bytes: usize) -> Vec<(Algorithm, usize)> {
        let mut longest: Vec<(Algorithm, usize)> = Vec::new();
        for &(up_to, algorithm) in &self.ranges {
            let bytes = up_to.min(max_bytes);
            match longest.iter_mut().find(|(other, _)| *other == algorithm) {
                Some((_, most)) => *most = bytes,
                None => longest.push((algorithm, bytes)),
            }
        }
        longest
    }

    /// For other ranks: nine bytes a range, little-endian.
    pub fn encode(&self) -> Vec<u8> {
        let range = |(up_to, algorithm): &(usize, Algorithm)| {
            let mut bytes = (*up_to as u64).to_le_bytes().to_vec();
            bytes.push(*algorithm as u8);
            bytes
        };
        self.ranges.iter().flat_map(range).collect()
    }

    /// What [`Self::encode`] made; `None` for anything else.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (ranges, []) = bytes.as_chunks::<9>() else { return None };
        let range = |[up_to @ .., code]: &[u8; 9]| {
            let algorithm = Algorithm::ALL.into_iter().find(|algorithm| *algorithm as u8 == *code)?;
            Some((usize::try_from(u64::from_le_bytes(*up_to)).ok()?, algorithm))
        };
        let ranges: Vec<_> = ranges.iter().map(range).collect::<Option<_>>()?;
        let rising = ranges.windows(2).all(|pair| pair[0].0 < pair[1].0);
        (rising && ranges.last().is_some_and(|(up_to, _)| *up_to == usize::MAX)).then_some(Self { ranges })
    }
}

/// An algorithm and what it takes.
struct Candidate<'a> {
    algorithm: Algorithm,
    model: Model<'a>,
    ratios: Ratios,
}

impl Candidate<'_> {
    fn us(&self, bytes: usize) -> Result<f64> {
        Ok(self.model.all_reduce_us(bytes)? * self.ratios.at(bytes))
    }
}

/// Measured times over predicted ones, by the logarithm of the length.
struct Ratios(Vec<(f64, f64)>);

impl Ratios {
    fn new(
        model: &Model<'_>,
        method: Method,
        question: &Question,
        observations: &[Observation],
    ) -> Result<Self> {
        let mut ratios = Vec::new();
        for one in observations {
            let bears = one.method()? == method
                && one.topology() == question.topology
                && one.ranks == question.ranks
                && one.bytes > 0;
            if bears {
                ratios.push(((one.bytes as f64).ln(), one.us / model.all_reduce_us(one.bytes)?));
            }
        }
        ratios.sort_by(|a, b| a.0.total_cmp(&b.0));
        Ok(Self(ratios))
    }

    fn at(&self, bytes: usize) -> f64 {
        let at = (bytes.max(1) as f64).ln();
        let next = self.0.partition_point(|(measured, _)| *measured < at);
        match (next.checked_sub(1).map(|before| self.0[before]), self.0.get(next)) {
            (None, None) => 1.0,
            (Some((_, ratio)), None) | (None, Some(&(_, ratio))) => ratio,
            (Some((from, first)), Some(&(to, last))) => first + (last - first) * (at - from) / (to - from),
        }
    }
}

/// The figures of `start` fitted to what was observed on a machine called `machine`, whose GPUs have so many
/// multiprocessors.
///
/// # Errors
/// As [`fit`].
pub fn calibrated(
    start: &Calibration,
    observations: &[Observation],
    machine: &str,
    multiprocessors: u32,
) -> Result<Calibration> {
    let start = Calibration { machine: machine.into(), multiprocessors, ..start.clone() };
    let source = format!(
        "Fitted to {} all-reduces at the set-up of a group; what none of them bears on is as in: {}",
        observations.len(),
        start.source
    );
    Ok(Calibration { source, ..fit(&start, observations)? })
}

/// In words, such as `direct up to 65536 bytes, relay above`.
impl fmt::Display for Choices {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (up_to, algorithm)) in self.ranges.iter().enumerate() {
            let separator = if at == 0 { "" } else { ", " };
            write!(formatter, "{separator}{}", algorithm.name())?;
            match (at + 1 == self.ranges.len(), at) {
                (false, _) => write!(formatter, " up to {up_to} bytes")?,
                (true, 0) => {}
                (true, _) => formatter.write_str(" above")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channel::KeyLength;
    use crate::study::calibration::Link;
    use crate::study::fit::Protection;

    const KEYS: Crypto = Crypto::Gcm(KeyLength::Aes128);
    const MOST: usize = 1 << 30;

    fn question(topology: Topology, crypto: Crypto, ranks: usize) -> Question {
        let candidates = vec![Algorithm::RelayRing, Algorithm::Direct, Algorithm::Ring];
        Question { topology, crypto, ranks, max_bytes: MOST, candidates }
    }

    fn choices(calibration: &Calibration, question: &Question) -> Choices {
        Choices::new(calibration, question, &[]).unwrap()
    }

    /// Two hops against 2(n-1) of them.
    #[test]
    fn slow_hops_make_short_vectors_go_direct() {
        let mut far = Calibration::h200();
        far.nvlink.hop_us = 50.0;
        let chosen = choices(&far, &question(Topology::NvLink, KEYS, 8));
        assert_eq!(chosen.algorithm(1 << 10), Algorithm::Direct);
        // With more ranks the ring has more hops.
        let most = |ranks| {
            let chosen = choices(&far, &question(Topology::NvLink, KEYS, ranks));
            chosen
                .longest_of_each(MOST)
                .iter()
                .find(|(name, _)| *name == Algorithm::Direct)
                .map(|(_, most)| *most)
        };
        assert!(most(3) <= most(8) && most(8) <= most(16), "{:?} {:?} {:?}", most(3), most(8), most(16));
    }

    #[test]
    fn without_hops_a_ring_of_fewest_operations_is_taken() {
        let mut near = Calibration::h200();
        near.nvlink = Link { gb_s: 1e4, hop_us: 0.0 };
        (near.aes_128.tag_us, near.aes_128.record_us) = (0.0, 0.0);
        near.aes_128.crypt_gb_s = Some(0.1);
        let both = Question {
            candidates: vec![Algorithm::Ring, Algorithm::RelayRing],
            ..question(Topology::NvLink, KEYS, 8)
        };
        let chosen = choices(&near, &both);
        for bytes in [1 << 20, 64 << 20, MOST] {
            assert_eq!(chosen.algorithm(bytes), Algorithm::RelayRing, "{bytes} bytes: {chosen}");
        }
        // Where nothing is sealed the two do the same, and the first stays.
        let plain = Question { crypto: Crypto::None, ..both };
        assert_eq!(choices(&near, &plain), Choices::always(Algorithm::Ring));
    }

    #[test]
    fn a_choice_is_no_slower_than_any_candidate_by_more_than_a_twentieth() {
        let calibration = Calibration::h200();
        for crypto in [Crypto::None, KEYS] {
            for topology in [Topology::OneGpu, Topology::NvLink] {
                for ranks in [3, 4, 8] {
                    let question = question(topology, crypto, ranks);
                    let chosen = choices(&calibration, &question);
                    for bytes in [1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26, MOST] {
                        let us = |algorithm| {
                            let model =
                                Model::new(&calibration, topology, Method::Fused(algorithm, crypto), ranks);
                            model.unwrap().all_reduce_us(bytes).unwrap()
                        };
                        let own = us(chosen.algorithm(bytes));
                        for other in &question.candidates {
                            assert!(own * (1.0 - WORTH) <= us(*other), "{question:?}, {bytes}: {chosen}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn only_candidates_are_chosen_and_none_is_an_error() {
        let mut far = Calibration::h200();
        far.nvlink.hop_us = 50.0;
        let ring = Question { candidates: vec![Algorithm::Ring], ..question(Topology::NvLink, KEYS, 8) };
        assert_eq!(choices(&far, &ring), Choices::always(Algorithm::Ring));
        let none = Question { candidates: Vec::new(), ..ring.clone() };
        assert!(matches!(Choices::new(&far, &none, &[]), Err(Error::InvalidArgument(_))));
        assert!(
            Choices::new(&far, &Question { topology: Topology::OneGpu, ranks: 133, ..ring }, &[]).is_err()
        );
    }

    fn observation(algorithm: Algorithm, bytes: usize, us: f64) -> Observation {
        let algorithm = algorithm.name().into();
        Observation {
            kernels: Protection::Aes128,
            algorithm,
            one_gpu: false,
            ranks: 4,
            bytes,
            us,
            longest_record: None,
        }
    }

    /// Whatever the model says.
    #[test]
    fn at_measured_lengths_the_measured_times_count() {
        let calibration = Calibration::h200();
        let question = Question {
            candidates: vec![Algorithm::RelayRing, Algorithm::Direct],
            ..question(Topology::NvLink, KEYS, 4)
        };
        for (short, long) in
            [(Algorithm::Direct, Algorithm::RelayRing), (Algorithm::RelayRing, Algorithm::Direct)]
        {
            let mut observations = Vec::new();
            for (bytes, fast) in [(4 << 10, short), (64 << 10, short), (1 << 20, long), (8 << 20, long)] {
                let slow = if fast == short { long } else { short };
                observations.push(observation(fast, bytes, 100.0));
                observations.push(observation(slow, bytes, 150.0));
            }
            // Of other ranks, and of other keys: they say nothing.
            observations.push(Observation { ranks: 8, ..observation(long, 4 << 10, 1.0) });
            let other = Observation { kernels: Protection::Aes256, ..observation(long, 4 << 10, 1.0) };
            observations.push(other);
            let chosen = Choices::new(&calibration, &question, &observations).unwrap();
            for (bytes, algorithm) in
                [(1 << 10, short), (4 << 10, short), (64 << 10, short), (1 << 20, long), (8 << 20, long)]
            {
                assert_eq!(chosen.algorithm(bytes), algorithm, "{bytes}: {chosen}");
            }
        }
    }

    /// Another machine's times, made by its own figures, lead to its own choices.
    #[test]
    fn a_calibration_made_at_set_up_chooses_as_the_machine_would() {
        let mut other = Calibration::h200();
        (other.nvlink.gb_s, other.nvlink.hop_us) = (50.0, 20.0);
        other.aes_128.crypt_gb_s = Some(2.0);
        let question = question(Topology::NvLink, KEYS, 4);
        let mut observations = Vec::new();
        for kernels in [Protection::Plain, Protection::Aes128] {
            for algorithm in &question.candidates {
                for bytes in [2 << 10, 128 << 10, 8 << 20] {
                    let mut one = Observation { kernels, ..observation(*algorithm, bytes, 1.0) };
                    one.us = 1.0 + one.error(&other).unwrap();
                    observations.push(one);
                }
            }
        }
        let found = calibrated(&Calibration::h200(), &observations, "another", 100).unwrap();
        assert_eq!((found.machine.as_str(), found.multiprocessors), ("another", 100));
        let found = calibrated(&Calibration::h200(), &observations, "another", 132).unwrap();
        assert!(crate::study::fit::median_error(&observations, &found).unwrap() < 0.05);
        let [own, fitted] = [&other, &found].map(|calibration| choices(calibration, &question));
        for bytes in [1 << 10, 1 << 14, 1 << 24, 1 << 28] {
            assert_eq!(own.algorithm(bytes), fitted.algorithm(bytes), "{bytes}: {own}; {fitted}");
        }
    }

    fn three() -> Choices {
        let ranges =
            [(4096, Algorithm::Exchange), (65_536, Algorithm::Direct), (usize::MAX, Algorithm::RelayRing)];
        Choices { ranges: ranges.into() }
    }

    #[test]
    fn lengths_fall_into_their_ranges() {
        let three = three();
        for (bytes, algorithm) in [
            (0, Algorithm::Exchange),
            (4096, Algorithm::Exchange),
            (4097, Algorithm::Direct),
            (65_536, Algorithm::Direct),
            (65_537, Algorithm::RelayRing),
            (usize::MAX, Algorithm::RelayRing),
        ] {
            assert_eq!(three.algorithm(bytes), algorithm, "{bytes}");
        }
        assert_eq!(three.to_string(), "exchange up to 4096 bytes, direct up to 65536 bytes, relay above");
        assert_eq!(Choices::always(Algorithm::Ring).to_string(), "ring");
        let longest =
            [(Algorithm::Exchange, 4096), (Algorithm::Direct, 65_536), (Algorithm::RelayRing, 1 << 20)];
        assert_eq!(three.longest_of_each(1 << 20), longest);
    }

    #[test]
    fn other_ranks_read_what_one_wrote_and_nothing_else() {
        let three = three();
        let bytes = three.encode();
        assert_eq!(Choices::decode(&bytes), Some(three));
        let mut falling = bytes.clone();
        falling[9..11].fill(0);
        falling[11] = 0;
        let mut unknown = bytes.clone();
        unknown[8] = 99;
        for wrong in [&bytes[..bytes.len() - 1], &bytes[..18], &[], &falling, &unknown] {
            assert_eq!(Choices::decode(wrong), None, "{wrong:?}");
        }
    }
}
