//! Finds a calibration's figures from measured all-reduces.
//!
//! The figures are those for which the model's times come nearest to the measured ones: the sum of squares of the
//! logarithms of their ratios is the least that a pattern search (Hooke and Jeeves, 1961) over the figures' logarithms
//! finds. It needs no derivatives, which the model's maxima don't have everywhere, and gives the same result every time.

use serde::{Deserialize, Serialize};

use super::calibration::Calibration;
use super::model::{Method, Model, Topology};
use crate::channel::{Crypto, KeyLength};
use crate::collective::Algorithm;
use crate::{Error, Result};

/// A measured all-reduce.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Observation {
    /// Which kernels.
    pub kernels: Protection,
    /// [`Algorithm::name`].
    pub algorithm: String,
    /// Whether all ranks shared one GPU; otherwise each had one, in one node.
    pub one_gpu: bool,
    /// Number of ranks.
    pub ranks: usize,
    /// Bytes of a rank's vector.
    pub bytes: usize,
    /// Median of its times in microseconds.
    pub us: f64,
    /// The longest record that the kernels could have, where that wasn't what those of this version can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub longest_record: Option<usize>,
}

/// Which kernels, and what they seal with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Protection {
    /// The persistent kernel, nothing sealed.
    Plain,
    /// The persistent kernel, AES-128-GCM.
    #[serde(rename = "aes-128")]
    Aes128,
    /// The persistent kernel, AES-256-GCM.
    #[serde(rename = "aes-256")]
    Aes256,
    /// The persistent kernel, AES-128-GCM, its keystream made before. No figure is fitted to it.
    #[serde(rename = "aes-128-ready")]
    Aes128Ready,
    /// The published structure, AES-128.
    Seed,
    /// The published structure without cryptography.
    SeedPlain,
}

impl Protection {
    /// Of a method's kernels.
    pub const fn of(method: Method) -> Self {
        match method {
            Method::Fused(_, crypto) => Self::fused(crypto),
            Method::Ready(_) => Self::Aes128Ready,
            Method::Seed(_) => Self::Seed,
            Method::SeedPlain(_) => Self::SeedPlain,
        }
    }

    /// Of the persistent kernels.
    pub const fn fused(crypto: Crypto) -> Self {
        match crypto {
            Crypto::None => Self::Plain,
            Crypto::Gcm(KeyLength::Aes128) => Self::Aes128,
            Crypto::Gcm(KeyLength::Aes256) => Self::Aes256,
        }
    }

    const fn crypto(self) -> Option<Crypto> {
        match self {
            Self::Plain => Some(Crypto::None),
            Self::Aes128 => Some(Crypto::Gcm(KeyLength::Aes128)),
            Self::Aes256 => Some(Crypto::Gcm(KeyLength::Aes256)),
            Self::Aes128Ready | Self::Seed | Self::SeedPlain => None,
        }
    }
}

impl Observation {
    /// What was measured, as the model names it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unknown algorithm.
    pub fn method(&self) -> Result<Method> {
        let algorithm = Algorithm::ALL
            .into_iter()
            .find(|algorithm| algorithm.name() == self.algorithm)
            .ok_or_else(|| Error::InvalidArgument(format!("no algorithm is called {:?}", self.algorithm)))?;
        Ok(match self.kernels {
            Protection::Plain => Method::Fused(algorithm, Crypto::None),
            Protection::Aes128 => Method::Fused(algorithm, Crypto::Gcm(KeyLength::Aes128)),
            Protection::Aes256 => Method::Fused(algorithm, Crypto::Gcm(KeyLength::Aes256)),
            Protection::Aes128Ready => Method::Ready(algorithm),
            Protection::Seed => Method::Seed(algorithm),
            Protection::SeedPlain => Method::SeedPlain(algorithm),
        })
    }

    /// Where it was measured.
    pub const fn topology(&self) -> Topology {
        if self.one_gpu { Topology::OneGpu } else { Topology::NvLink }
    }

    /// The model's time over the measured one, less one.
    ///
    /// # Errors
    /// As [`Model::new`].
    pub fn error(&self, calibration: &Calibration) -> Result<f64> {
        let model = Model::new(calibration, self.topology(), self.method()?, self.ranks)?
            .with_records_up_to(self.longest_record.unwrap_or(usize::MAX));
        Ok(model.all_reduce_us(self.bytes)? / self.us - 1.0)
    }
}

/// The median of the errors' magnitudes; 0 without observations.
///
/// # Errors
/// As [`Observation::error`].
pub fn median_error<'a>(
    observations: impl IntoIterator<Item = &'a Observation>,
    calibration: &Calibration,
) -> Result<f64> {
    let mut errors = observations
        .into_iter()
        .map(|observation| Ok(observation.error(calibration)?.abs()))
        .collect::<Result<Vec<_>>>()?;
    errors.sort_by(f64::total_cmp);
    Ok(errors.get(errors.len() / 2).copied().unwrap_or(0.0))
}

/// Figures of `start`, changed so that the model comes nearest to the observations. Figures that no observation bears on
/// stay as they are: the network's always, NVLink's unless some were made over it, and so on. A sealed kernel moves bytes
/// as the plain one does. Where `start` has figures of the direct algorithm's own, those and no others are fitted to it. Of the published structure, what a launch takes of its thread and the rate of copying are fitted
/// to runs without cryptography, an addition costing what a copy costs; then what any launch takes of the GPU, and the MAC's
/// rate, to the sealed ones. The cipher's rate stays.
///
/// # Errors
/// As [`Observation::error`], and [`Error::InvalidArgument`] for a time that isn't positive.
pub fn fit(start: &Calibration, observations: &[Observation]) -> Result<Calibration> {
    if !observations.iter().all(|observation| observation.us > 0.0) {
        return Err(Error::InvalidArgument("an observed time is not positive".into()));
    }
    let mut calibration = start.clone();
    let own = |one: &Observation| start.direct.is_some() && one.algorithm == Algorithm::Direct.name();
    // The plain ring first: the others build on its figures.
    for (kernels, algorithm) in [
        (Protection::Plain, Algorithm::Ring),
        (Protection::Plain, Algorithm::Direct),
        (Protection::Aes128, Algorithm::Ring),
        (Protection::Aes128, Algorithm::Direct),
        (Protection::Aes256, Algorithm::Ring),
        (Protection::Aes256, Algorithm::Direct),
        (Protection::SeedPlain, Algorithm::Ring),
        (Protection::Seed, Algorithm::Ring),
    ] {
        let bears =
            |one: &&Observation| one.kernels == kernels && own(one) == (algorithm == Algorithm::Direct);
        let these: Vec<_> = observations.iter().filter(bears).collect();
        if these.is_empty() {
            continue;
        }
        let fitted = Fitted {
            kernels,
            algorithm,
            one_gpu: these.iter().any(|one| one.one_gpu),
            nvlink: these.iter().any(|one| !one.one_gpu),
        };
        if let Some(crypto) = kernels.crypto().filter(|_| kernels != Protection::Plain) {
            let plain = *calibration.kernel(algorithm, Crypto::None);
            let sealed = calibration.kernel_mut(algorithm, crypto);
            (sealed.record_us, sealed.move_gb_s) = (plain.record_us, plain.move_gb_s);
        }
        let squares = |calibration: &Calibration| {
            these
                .iter()
                .try_fold(0.0, |sum, one| Ok::<_, Error>(sum + (1.0 + one.error(calibration)?).ln().powi(2)))
        };
        squares(&calibration)?; // nothing below can fail once this hasn't
        let start: Vec<f64> = fitted.figures(&mut calibration).iter().map(|figure| figure.ln()).collect();
        let found = pattern_search(start, |logarithms| {
            let mut candidate = calibration.clone();
            fitted.set(&mut candidate, logarithms);
            squares(&candidate).unwrap_or(f64::INFINITY)
        });
        fitted.set(&mut calibration, &found);
    }
    Ok(calibration)
}

/// Which figures are fitted at once.
struct Fitted {
    kernels: Protection,
    /// The ring stands for all that have no figures of their own.
    algorithm: Algorithm,
    one_gpu: bool,
    nvlink: bool,
}

impl Fitted {
    fn figures<'c>(&self, calibration: &'c mut Calibration) -> Vec<&'c mut f64> {
        match self.kernels.crypto() {
            // Memory and links are the ring's to say.
            Some(Crypto::None) if self.algorithm == Algorithm::Direct => {
                let plain = calibration.kernel_mut(self.algorithm, Crypto::None);
                vec![&mut plain.start_us, &mut plain.record_us, &mut plain.move_gb_s]
            }
            Some(Crypto::None) => {
                let plain = &mut calibration.plain;
                let mut figures = vec![&mut plain.start_us, &mut plain.record_us, &mut plain.move_gb_s];
                if self.one_gpu {
                    figures.push(&mut calibration.memory_gb_s);
                    figures.push(&mut calibration.same_gpu.hop_us);
                    figures.push(&mut calibration.issue_us);
                }
                if self.nvlink {
                    figures.extend([&mut calibration.nvlink.gb_s, &mut calibration.nvlink.hop_us]);
                }
                figures
            }
            Some(crypto) => {
                let sealed = calibration.kernel_mut(self.algorithm, crypto);
                let mut figures = vec![&mut sealed.start_us, &mut sealed.tag_us];
                figures.extend(&mut sealed.crypt_gb_s);
                figures
            }
            None => calibration.seed.as_mut().map_or(Vec::new(), |seed| match self.kernels {
                Protection::Seed => vec![&mut seed.mac.fixed_us, &mut seed.mac.gb_s],
                _ => vec![&mut seed.issue_us, &mut seed.copy.gb_s],
            }),
        }
    }

    fn set(&self, calibration: &mut Calibration, logarithms: &[f64]) {
        for (figure, logarithm) in self.figures(calibration).into_iter().zip(logarithms) {
            *figure = rounded(logarithm.exp());
        }
        if let Some(seed) = &mut calibration.seed {
            seed.encrypt.fixed_us = seed.mac.fixed_us;
            seed.copy.fixed_us = seed.mac.fixed_us;
            seed.reduce = seed.copy;
        }
    }
}

/// To four digits, more than any of them is known to. A time that is nothing beside the others stays above 0, so that it
/// has a logarithm; a rate that binds nowhere stays one that can be written down and read again.
fn rounded(figure: f64) -> f64 {
    let figure = figure.clamp(0.01, 1e6);
    let unit = 10_f64.powf(figure.log10().floor() - 3.0);
    ((figure / unit).round() * unit * 1e6).round() / 1e6
}

/// The point near `start` at which `value` is least. Steps along each axis, then on in the direction in which that led,
/// and with half the step when nothing is gained.
fn pattern_search(start: Vec<f64>, value: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    /// A factor of e^0.5 at first, and of 1.0005 at last.
    const STEPS: [f64; 2] = [0.5, 0.0005];
    let explore = |from: &[f64], mut least: f64, step: f64| {
        let mut point = from.to_vec();
        for axis in 0..point.len() {
            let here = point[axis];
            for there in [here + step, here - step] {
                point[axis] = there;
                let found = value(&point);
                if found < least {
                    least = found;
                    break;
                }
                point[axis] = here;
            }
        }
        (point, least)
    };
    let (mut base, mut step) = (start, STEPS[0]);
    let mut least = value(&base);
    while step > STEPS[1] {
        let (mut point, mut found) = explore(&base, least, step);
        if found >= least {
            step /= 2.0;
            continue;
        }
        while found < least {
            let ahead: Vec<_> = point.iter().zip(&base).map(|(new, old)| 2.0 * new - old).collect();
            (base, least) = (point, found);
            let at = value(&ahead);
            (point, found) = explore(&ahead, at, step);
        }
    }
    base
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::calibration::{DirectKernels, RingKernel};

    #[test]
    fn a_search_finds_the_bottom_of_a_bent_valley() {
        // Rosenbrock's function has it at (1, 1).
        let found = pattern_search(vec![-1.0, 1.0], |at| {
            100.0 * (at[1] - at[0] * at[0]).powi(2) + (1.0 - at[0]).powi(2)
        });
        assert!((found[0] - 1.0).abs() < 0.01 && (found[1] - 1.0).abs() < 0.02, "{found:?}");
    }

    /// Longer vectors that took less time, as noise has it, are best explained by rates without end.
    #[test]
    fn rates_that_bind_nowhere_can_be_written_and_read() {
        let one = |bytes, us| Observation {
            kernels: Protection::Plain,
            algorithm: "ring".into(),
            one_gpu: true,
            ranks: 2,
            bytes,
            us,
            longest_record: None,
        };
        let observations = [one(1 << 10, 31.0), one(64 << 10, 30.0), one(1 << 20, 26.0), one(4 << 20, 25.0)];
        let found = fit(&Calibration::h200(), &observations).unwrap();
        assert!(found.memory_gb_s > 1e5 && found.memory_gb_s <= 1e6, "{found:?}");
        assert_eq!(Calibration::from_json(&found.to_json()).unwrap(), found);
    }

    /// Times made by the model itself give back its figures.
    #[test]
    fn figures_are_recovered_from_the_times_that_they_make() {
        let truth = Calibration::h200();
        let mut observations = Vec::new();
        for kernels in [Protection::Plain, Protection::Aes128] {
            for (ranks, one_gpu) in [(2, true), (4, true), (2, false)] {
                for bytes in [1 << 10, 1 << 20, 16 << 20, 256 << 20] {
                    let mut one = Observation {
                        kernels,
                        algorithm: "ring".into(),
                        one_gpu,
                        ranks,
                        bytes,
                        us: 1.0,
                        longest_record: None,
                    };
                    one.us = 1.0 + one.error(&truth).unwrap();
                    observations.push(one);
                }
            }
        }
        let mut start = truth.clone();
        start.nvlink.gb_s *= 1.4;
        start.plain.start_us *= 0.6;
        start.aes_128.crypt_gb_s = Some(2.0);
        let found = fit(&start, &observations).unwrap();
        assert!(median_error(&observations, &start).unwrap() > 0.02);
        assert!(median_error(&observations, &found).unwrap() < 0.01);
        let ratio = found.nvlink.gb_s / truth.nvlink.gb_s;
        assert!((ratio - 1.0).abs() < 0.05, "{ratio}");
        assert_eq!(found.aes_256, truth.aes_256);
    }

    /// Its kernel's figures don't bear on the ring's, nor the ring's on them.
    #[test]
    fn direct_has_figures_of_its_own_where_it_was_measured() {
        let mut truth = Calibration::h200();
        let slower = |kernel: RingKernel, crypt| RingKernel {
            move_gb_s: 20.0,
            crypt_gb_s: kernel.crypt_gb_s.map(|_| crypt),
            ..kernel
        };
        let own = DirectKernels {
            plain: slower(truth.plain, 0.0),
            aes_128: slower(truth.aes_128, 3.0),
            aes_256: slower(truth.aes_256, 2.0),
        };
        truth.direct = Some(own);
        let mut observations = Vec::new();
        for (kernels, algorithm) in [
            (Protection::Plain, Algorithm::Ring),
            (Protection::Plain, Algorithm::Direct),
            (Protection::Aes128, Algorithm::Ring),
            (Protection::Aes128, Algorithm::Direct),
        ] {
            for (ranks, bytes) in [(2, 1 << 10), (4, 1 << 20), (4, 16 << 20), (2, 256 << 20)] {
                let algorithm = algorithm.name().into();
                let mut one = Observation {
                    kernels,
                    algorithm,
                    one_gpu: true,
                    ranks,
                    bytes,
                    us: 1.0,
                    longest_record: None,
                };
                one.us = 1.0 + one.error(&truth).unwrap();
                observations.push(one);
            }
        }
        let guess = |kernel: RingKernel| RingKernel { move_gb_s: 29.0, ..kernel };
        let [plain, aes_128, aes_256] = [truth.plain, truth.aes_128, truth.aes_256].map(guess);
        let start = Calibration { direct: Some(DirectKernels { plain, aes_128, aes_256 }), ..truth.clone() };
        let found = fit(&start, &observations).unwrap();
        let error = |calibration| {
            let direct = observations.iter().filter(|one| one.algorithm == "direct");
            median_error(direct, calibration).unwrap()
        };
        assert!(error(&start) > 0.02 && error(&found) < 0.01, "{} {}", error(&start), error(&found));
        let [ring, direct] =
            [found.aes_128, found.direct.unwrap().aes_128].map(|kernel| kernel.crypt_gb_s.unwrap());
        assert!((direct / 3.0 - 1.0).abs() < 0.05, "{direct}");
        assert!((ring / truth.aes_128.crypt_gb_s.unwrap() - 1.0).abs() < 0.05, "{ring}");
        // Without them it is the ring's observation like any other.
        let shared = fit(&Calibration { direct: None, ..truth }, &observations).unwrap();
        assert!(shared.direct.is_none() && shared.aes_128.crypt_gb_s.unwrap() < ring);
    }

    fn measured() -> Vec<Observation> {
        crate::study::measure::fitted_to(&crate::study::measure::measured_h200())
    }

    /// The target is 15 % in the median, over what was measured from 1 MiB to 256 MiB.
    #[test]
    fn the_checked_in_calibration_predicts_what_was_measured() {
        let (calibration, observations) = (Calibration::h200(), measured());
        for kernels in [Protection::Plain, Protection::Aes128, Protection::Aes256, Protection::Seed] {
            let these = observations
                .iter()
                .filter(|one| one.kernels == kernels && (1 << 20..=256 << 20).contains(&one.bytes));
            let error = median_error(these, &calibration).unwrap();
            assert!((1e-6..0.15).contains(&error), "{kernels:?}: {error}");
        }
    }

    /// The other two numbers of ranks say what the third one takes.
    #[test]
    fn a_number_of_ranks_that_was_left_out_is_predicted() {
        let (left_out, rest): (Vec<_>, Vec<_>) = measured().into_iter().partition(|one| one.ranks == 4);
        let calibration = fit(&Calibration::h200(), &rest).unwrap();
        let judged = left_out.iter().filter(|one| (1 << 20..=256 << 20).contains(&one.bytes));
        let error = median_error(judged, &calibration).unwrap();
        assert!((1e-6..0.15).contains(&error), "{error}");
    }

    /// So it isn't edited by hand: fitting again finds nothing better.
    #[test]
    fn the_checked_in_calibration_is_the_fit_of_what_was_measured() {
        let (calibration, observations) = (Calibration::h200(), measured());
        let again = fit(&calibration, &observations).unwrap();
        let [before, after] = [&calibration, &again].map(|which| median_error(&observations, which).unwrap());
        assert!((after - before).abs() < 0.005, "{before} {after}\n{}", again.to_json());
    }

    #[test]
    fn what_the_model_does_not_know_is_an_error() {
        let mut one = Observation {
            kernels: Protection::Plain,
            algorithm: "star".into(),
            one_gpu: true,
            ranks: 2,
            bytes: 1,
            us: 1.0,
            longest_record: None,
        };
        assert!(one.method().is_err());
        one.algorithm = "ring".into();
        one.us = 0.0;
        assert!(fit(&Calibration::h200(), &[one]).is_err());
    }
}
