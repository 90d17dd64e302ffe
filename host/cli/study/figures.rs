//! Every number of the study.

use std::collections::BTreeMap;

use ringseal::collective::Algorithm;
use ringseal::study::buckets::{DEFAULT_CAP_MIB, bucket_bytes, secured_ring_operations};
use ringseal::study::calibration::Calibration;
use ringseal::study::fit::{Observation, Protection, fit, median_error};
use ringseal::study::iteration::{Timeline, assumed_compute_us};
use ringseal::study::measure::{Measured, fitted_to};
use ringseal::study::model::{Method, Model, Topology};
use ringseal::study::workloads::Workload;
use serde::Serialize;

use super::super::failure::Outcome;

/// Ranks of the paper's experiments, and the fewest.
const RANKS: [usize; 3] = [2, 4, 8];
/// Ranks of the plots against the bucket cap and of operations.
const CAP_RANKS: usize = 4;
/// `bucket_cap_mb`.
const CAPS: [usize; 8] = [1, 5, 10, 25, 50, 100, 200, 400];
/// Ranks of the plot of cost against ranks.
const SCALE: [usize; 10] = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
/// The vector of that plot.
pub(super) const SCALE_BYTES: usize = 64 << 20;
/// GPUs of a node in it.
pub(super) const PER_NODE: usize = 8;
/// Lengths for which the model's error is stated.
const JUDGED: std::ops::RangeInclusive<usize> = 1 << 20..=256 << 20;

/// Microseconds, or ratios, by [`Method::name`].
pub(super) type ByMethod = BTreeMap<String, f64>;

#[derive(Serialize)]
pub(super) struct Figures {
    pub(super) calibration: String,
    pub(super) machine: Option<String>,
    pub(super) tflops: f64,
    pub(super) operations: Vec<Operations>,
    pub(super) measured: Vec<MeasuredRow>,
    pub(super) missing: Vec<String>,
    pub(super) errors: Vec<ErrorRow>,
    /// What was measured with a rank on each GPU.
    pub(super) across: Option<Across>,
    pub(super) modelled: Vec<ModelRow>,
    pub(super) caps: Vec<CapRow>,
    pub(super) scale: Vec<ScaleRow>,
}

/// What was measured with a rank on each GPU, of the same kind.
#[derive(Serialize)]
pub(super) struct Across {
    pub(super) machine: String,
    pub(super) measured: Vec<MeasuredRow>,
    pub(super) missing: Vec<String>,
    pub(super) errors: Vec<ErrorRow>,
}

/// What an iteration communicates at DDP's default cap.
#[derive(Serialize)]
pub(super) struct Operations {
    pub(super) workload: &'static str,
    pub(super) parameters: usize,
    pub(super) all_reduces: usize,
    pub(super) bytes: usize,
    /// Of one rank, by number of ranks, with the published ring.
    pub(super) ring: BTreeMap<usize, usize>,
    /// With the relay ring, or direct.
    pub(super) fewest: BTreeMap<usize, usize>,
}

/// One iteration's all-reduces, run.
#[derive(Serialize)]
pub(super) struct MeasuredRow {
    pub(super) workload: String,
    pub(super) ranks: usize,
    pub(super) us: ByMethod,
    /// Time over the plain ring's, less that, of the best sealed algorithm.
    pub(super) best: Option<Best>,
    /// The same of the one whose keystream was ready.
    pub(super) ready: Option<Best>,
}

/// The best sealed algorithm beside the published one.
#[derive(Clone, Serialize)]
pub(super) struct Best {
    pub(super) method: String,
    /// Less than nothing where it took less time than the plain ring.
    pub(super) cost_us: f64,
    /// The cost as a share of the plain ring's time.
    pub(super) share: f64,
    pub(super) seed_cost_us: f64,
    /// 1 - cost / seed's cost.
    pub(super) reduction: f64,
}

/// How far the model is off.
#[derive(Serialize)]
pub(super) struct ErrorRow {
    pub(super) what: String,
    pub(super) count: usize,
    pub(super) median: f64,
    pub(super) worst: f64,
}

/// One iteration, modelled on GPUs joined by NVLink.
#[derive(Serialize)]
pub(super) struct ModelRow {
    pub(super) workload: &'static str,
    pub(super) ranks: usize,
    pub(super) communication_us: ByMethod,
    /// Communication over the plain ring's.
    pub(super) slowdown: ByMethod,
    /// The iteration with its computation over the same with the plain ring.
    pub(super) iteration_slowdown: ByMethod,
    pub(super) compute_us: f64,
    /// As measured ones have them.
    pub(super) best: Option<Best>,
    pub(super) ready: Option<Best>,
}

/// Communication over the plain ring's at one cap, modelled.
#[derive(Serialize)]
pub(super) struct CapRow {
    pub(super) workload: &'static str,
    pub(super) cap_mib: usize,
    pub(super) all_reduces: usize,
    pub(super) slowdown: ByMethod,
    pub(super) iteration_slowdown: ByMethod,
}

/// An all-reduce of [`SCALE_BYTES`], modelled on nodes of [`PER_NODE`].
#[derive(Serialize)]
pub(super) struct ScaleRow {
    pub(super) ranks: usize,
    pub(super) us: ByMethod,
}

impl Figures {
    /// How often progress is reported.
    pub(super) const PARTS: usize = 6 * (RANKS.len() + CAPS.len()) + SCALE.len();

    pub(super) fn new(
        calibration: &Calibration,
        measured: Option<&Measured>,
        tflops: f64,
        mut progress: impl FnMut(&str),
    ) -> Outcome<Self> {
        let workloads = Workload::all();
        let (mut modelled, mut caps, mut scale) = (Vec::new(), Vec::new(), Vec::new());
        for workload in &workloads {
            for ranks in RANKS {
                progress(&format!("{}, {ranks} ranks", workload.name));
                modelled.push(model_row(calibration, workload, ranks, tflops)?);
            }
            for cap_mib in CAPS {
                progress(&format!("{}, buckets of {cap_mib} MB", workload.name));
                let [communication, iteration] =
                    times(calibration, workload, CAP_RANKS, cap_mib, assumed_compute_us(workload, tflops))?;
                caps.push(CapRow {
                    workload: workload.name,
                    cap_mib,
                    all_reduces: bucket_bytes(workload, cap_mib, 4).len(),
                    slowdown: over_plain(&communication),
                    iteration_slowdown: over_plain(&iteration),
                });
            }
        }
        for ranks in SCALE {
            progress(&format!("{ranks} ranks"));
            let us = methods(calibration)
                .map(|method| {
                    let model =
                        Model::new(calibration, Topology::Nodes { per_node: PER_NODE }, method, ranks)?;
                    Ok((method.name().to_owned(), rounded(model.all_reduce_us(SCALE_BYTES)?)))
                })
                .collect::<Outcome<_>>()?;
            scale.push(ScaleRow { ranks, us });
        }
        Ok(Self {
            calibration: calibration.source.clone(),
            machine: measured.map(|measured| format!("{}, {}", measured.machine, measured.driver)),
            tflops,
            operations: workloads.iter().map(operations).collect(),
            measured: measured.map(|measured| measured_rows(measured, true)).unwrap_or_default(),
            missing: measured.map(|measured| missing(measured, true)).unwrap_or_default(),
            errors: measured.map_or(Ok(Vec::new()), |measured| error_rows(measured, calibration))?,
            across: measured.map_or(Ok(None), |measured| across(measured, calibration))?,
            modelled,
            caps,
            scale,
        })
    }
}

/// Those that the calibration has figures for.
fn methods(calibration: &Calibration) -> impl Iterator<Item = Method> {
    let seed = calibration.seed.is_some();
    Method::STUDY.into_iter().filter(move |method| seed || !matches!(method, Method::Seed(_)))
}

/// To a tenth of a microsecond: more would only be noise in a file.
fn rounded(us: f64) -> f64 {
    (us * 10.0).round() / 10.0
}

fn operations(workload: &Workload) -> Operations {
    let sizes = bucket_bytes(workload, DEFAULT_CAP_MIB, 4);
    Operations {
        workload: workload.name,
        parameters: workload.parameters(),
        all_reduces: sizes.len(),
        bytes: sizes.iter().sum(),
        ring: RANKS.map(|ranks| (ranks, secured_ring_operations(sizes.len(), ranks))).into(),
        fewest: RANKS.map(|ranks| (ranks, sizes.len() * (3 * ranks - 2))).into(),
    }
}

fn model_row(calibration: &Calibration, workload: &Workload, ranks: usize, tflops: f64) -> Outcome<ModelRow> {
    let compute_us = assumed_compute_us(workload, tflops);
    let [communication_us, iteration] = times(calibration, workload, ranks, DEFAULT_CAP_MIB, compute_us)?;
    Ok(ModelRow {
        workload: workload.name,
        ranks,
        slowdown: over_plain(&communication_us),
        iteration_slowdown: over_plain(&iteration),
        best: best(&communication_us),
        ready: ready(&communication_us),
        communication_us,
        compute_us: rounded(compute_us),
    })
}

/// Of an iteration's communication alone, and of the iteration.
fn times(
    calibration: &Calibration,
    workload: &Workload,
    ranks: usize,
    cap_mib: usize,
    compute_us: f64,
) -> Outcome<[ByMethod; 2]> {
    let communication = Timeline::communication(workload, cap_mib);
    let iteration = Timeline::proportional(workload, cap_mib, compute_us);
    let mut both = [ByMethod::new(), ByMethod::new()];
    for method in methods(calibration) {
        let model = Model::new(calibration, Topology::NvLink, method, ranks)?;
        for (times, timeline) in both.iter_mut().zip([&communication, &iteration]) {
            times.insert(method.name().into(), rounded(timeline.predicted_us(&model)?));
        }
    }
    Ok(both)
}

fn over_plain(us: &ByMethod) -> ByMethod {
    let plain = us.get(Method::PLAIN.name()).copied().unwrap_or(f64::NAN);
    us.iter().map(|(name, time)| (name.clone(), (time / plain * 1000.0).round() / 1000.0)).collect()
}

fn missing(measured: &Measured, one_gpu: bool) -> Vec<String> {
    measured.missing_of(one_gpu).map(str::to_owned).collect()
}

fn across(measured: &Measured, calibration: &Calibration) -> Outcome<Option<Across>> {
    let Some(origin) = &measured.across else { return Ok(None) };
    let mut errors = Vec::new();
    let judged = || measured.observations.iter().filter(|one| !one.one_gpu && JUDGED.contains(&one.bytes));
    for (kernels, name) in KINDS {
        for algorithm in Algorithm::ALL.map(Algorithm::name) {
            let these = judged().filter(|one| one.kernels == kernels && one.algorithm == algorithm);
            errors.extend(error_row(format!("{algorithm}, {name}"), these.collect(), calibration)?);
        }
    }
    Ok(Some(Across {
        machine: format!("{}, {}", measured.machine, origin.driver),
        measured: measured_rows(measured, false),
        missing: missing(measured, false),
        errors,
    }))
}

fn measured_rows(measured: &Measured, one_gpu: bool) -> Vec<MeasuredRow> {
    let mut rows: Vec<MeasuredRow> = Vec::new();
    for one in measured.iterations.iter().filter(|one| one.one_gpu == one_gpu) {
        let place = rows.iter().position(|row| row.workload == one.workload && row.ranks == one.ranks);
        let place = place.unwrap_or_else(|| {
            let us = ByMethod::new();
            rows.push(MeasuredRow {
                workload: one.workload.clone(),
                ranks: one.ranks,
                us,
                best: None,
                ready: None,
            });
            rows.len() - 1
        });
        rows[place].us.insert(one.method.clone(), one.us);
    }
    for row in &mut rows {
        row.best = best(&row.us);
        row.ready = ready(&row.us);
    }
    rows.sort_by_key(|row| row.ranks);
    rows
}

/// The best of those sealed as they go. `None` unless the plain ring and the published one are there to compare with.
fn best(us: &ByMethod) -> Option<Best> {
    fastest(us, Method::sealed)
}

/// The best of those whose keystream was ready, whose making is not in their time.
fn ready(us: &ByMethod) -> Option<Best> {
    fastest(us, Method::Ready)
}

fn fastest(us: &ByMethod, method: impl Fn(Algorithm) -> Method) -> Option<Best> {
    let named = |algorithm| {
        let name = method(algorithm).name();
        us.get(name).map(|time| (name, *time))
    };
    let (method, time) = Algorithm::ALL.into_iter().filter_map(named).min_by(|a, b| a.1.total_cmp(&b.1))?;
    beside_seed(us, method, time)
}

/// What `time` costs over the plain ring, beside what the published ring costs.
fn beside_seed(us: &ByMethod, method: &str, time: f64) -> Option<Best> {
    let plain = us.get(Method::PLAIN.name())?;
    let seed_cost_us = us.get(Method::SEED.name())? - plain;
    let cost_us = time - plain;
    Some(Best {
        method: method.into(),
        cost_us,
        share: cost_us / plain,
        seed_cost_us,
        reduction: 1.0 - cost_us / seed_cost_us,
    })
}

/// Of errors' tables.
const KINDS: [(Protection, &str); 6] = [
    (Protection::Plain, "plain"),
    (Protection::Aes128, "sealed, AES-128"),
    (Protection::Aes256, "sealed, AES-256"),
    (Protection::Aes128Ready, "sealed, AES-128, keystream ready"),
    (Protection::Seed, "seed"),
    (Protection::SeedPlain, "seed without cryptography"),
];

/// `None` without observations.
fn error_row(what: String, these: Vec<&Observation>, calibration: &Calibration) -> Outcome<Option<ErrorRow>> {
    if these.is_empty() {
        return Ok(None);
    }
    let errors = these.iter().map(|one| one.error(calibration)).collect::<ringseal::Result<Vec<_>>>()?;
    let worst = errors
        .into_iter()
        .fold(0.0, |worst: f64, error| if error.abs() > worst.abs() { error } else { worst });
    Ok(Some(ErrorRow { what, count: these.len(), median: median_error(these, calibration)?, worst }))
}

/// Of what was measured on one GPU.
fn error_rows(measured: &Measured, calibration: &Calibration) -> Outcome<Vec<ErrorRow>> {
    let judged = || measured.observations.iter().filter(|one| one.one_gpu && JUDGED.contains(&one.bytes));
    let mut rows = Vec::new();
    for (kernels, name) in KINDS {
        for algorithm in Algorithm::ALL.map(Algorithm::name) {
            let these = judged().filter(|one| one.kernels == kernels && one.algorithm == algorithm);
            rows.extend(error_row(format!("{algorithm}, {name}"), these.collect(), calibration)?);
        }
    }
    for ranks in RANKS {
        let these = judged().filter(|one| one.ranks == ranks);
        rows.extend(error_row(format!("{ranks} ranks, all of these"), these.collect(), calibration)?);
    }
    rows.extend(error_row("all".into(), judged().collect(), calibration)?);
    let (held_out, rest): (Vec<_>, Vec<_>) =
        fitted_to(measured).into_iter().partition(|one| one.one_gpu && one.ranks == 4);
    if !held_out.is_empty() && calibration.seed.is_some() {
        let without = fit(calibration, &rest)?;
        let these = held_out.iter().filter(|one| JUDGED.contains(&one.bytes)).collect();
        rows.extend(error_row("4 ranks, from a fit without them".into(), these, &without)?);
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use ringseal::study::measure::Iteration;

    use super::*;

    #[test]
    fn the_best_is_the_fastest_sealed_one() {
        let us = [("plain", 10.0), ("seed", 110.0), ("ring", 30.0), ("relay", 20.0), ("seed-tree", 15.0)];
        let best = best(&us.map(|(name, time)| (name.to_owned(), time)).into()).unwrap();
        assert_eq!((best.method.as_str(), best.cost_us, best.seed_cost_us), ("relay", 10.0, 100.0));
        assert!((best.reduction - 0.9).abs() < 1e-12);
    }

    #[test]
    fn keystream_that_is_ready_is_told_apart() {
        let one = |method: &str, us| Iteration {
            workload: "BERT".into(),
            method: method.into(),
            one_gpu: true,
            ranks: 4,
            all_reduces: 1,
            bytes: 1,
            us,
        };
        let measured = Measured {
            machine: String::new(),
            driver: String::new(),
            ringseal: String::new(),
            across: None,
            observations: Vec::new(),
            iterations: vec![
                one("plain", 10.0),
                one("seed", 110.0),
                one("relay", 30.0),
                one("relay-ready", 15.0),
            ],
            missing: Vec::new(),
        };
        assert!(measured_rows(&measured, false).is_empty());
        let rows = measured_rows(&measured, true);
        let [row] = &rows[..] else { panic!("{} rows", rows.len()) };
        let (best, ready) = (row.best.as_ref().unwrap(), row.ready.as_ref().unwrap());
        assert_eq!((best.method.as_str(), best.cost_us, ready.cost_us), ("relay", 20.0, 5.0));
        assert!((ready.reduction - 0.95).abs() < 1e-12);
    }

    #[test]
    fn nothing_is_the_best_without_something_to_compare_with() {
        assert!(best(&[("plain".to_owned(), 1.0), ("ring".to_owned(), 2.0)].into()).is_none());
    }
}
