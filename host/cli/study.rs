//! `ringseal study`: what sealing costs the training of six models, measured where there is a GPU and modelled everywhere.

mod document;
mod export;
mod figures;
mod plot;

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};
use ringseal::cuda::Device;
use ringseal::study::calibration::Calibration;
use ringseal::study::measure::{Measured, Plan, calibrate, measure};
use ringseal::study::workloads::Workload;
use ringseal::{Error, ptx};

use super::failure::{Failure, Outcome};
use super::output::AtomicFile;
use figures::Figures;

#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// `cuda` also runs the all-reduces, all ranks on GPU 0, and fits the model to it; `model` only computes.
    #[arg(long, value_enum, default_value_t)]
    backend: Backend,
    /// Numbers of ranks to measure.
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_values_t = [2, 4, 8])]
    ranks: Vec<usize>,
    /// After GPU 0 alone, measure with one rank on each of these GPUs too: of the numbers of ranks those that there are enough for.
    #[arg(long, value_name = "GPU,GPU", value_delimiter = ',')]
    devices: Vec<usize>,
    /// Keep what --measured FILE holds, and replace only one part of it: with --devices what was measured across GPUs,
    /// otherwise what was measured on one.
    #[arg(long, requires = "measured")]
    merge: bool,
    /// Models to measure; all six unless given.
    #[arg(long, value_name = "NAME,NAME", value_delimiter = ',')]
    workloads: Vec<String>,
    /// How often each measurement is repeated; the median counts.
    #[arg(long, value_name = "COUNT", default_value_t = 5)]
    repeats: usize,
    /// Kernels to measure instead of the embedded ones: PTX, or a cubin, which needn't be compiled at run time.
    #[arg(long, value_name = "FILE")]
    kernels: Option<PathBuf>,
    /// Measurements: written after measuring, otherwise read.
    #[arg(long, value_name = "FILE")]
    measured: Option<PathBuf>,
    /// The model's figures: written after measuring, or with --fit, otherwise read. Unless given, those of an H200.
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    /// Without measuring, fit the model's figures to what --measured FILE holds, of H200s.
    #[arg(long, requires = "measured")]
    fit: bool,
    /// What a GPU computes in training, in TFLOP/s; an assumption that only the iteration's figures depend on.
    #[arg(long, value_name = "TFLOPS", default_value_t = 200.0)]
    tflops: f64,
    /// Directory for study.md, its plots and its figures as JSON; made if it doesn't exist.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Write the steps of an all-reduce, with their cryptographic operations, as JSON, and do nothing else.
    #[arg(long, value_name = "FILE")]
    export_schedule: Option<PathBuf>,
    /// The algorithm to export: ring, relay, direct or tree.
    #[arg(long, value_name = "NAME", default_value = "ring", requires = "export_schedule")]
    algorithm: String,
}

#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Backend {
    /// Compute only.
    #[default]
    Model,
    /// Measure on a GPU first.
    Cuda,
}

/// Runs the study.
pub(crate) fn run(arguments: &Arguments) -> Outcome {
    if let Some(path) = &arguments.export_schedule {
        return write(path, &export::schedule(&arguments.algorithm, &arguments.ranks)?);
    }
    arguments.check()?;
    let (calibration, measured) = arguments.sources()?;
    let bar = progress("modelling", Figures::PARTS);
    let figures =
        Figures::new(&calibration, measured.as_ref(), arguments.tflops, |what| advance(&bar, what))?;
    bar.finish_and_clear();
    if let Some(directory) = &arguments.out {
        let plots = directory.join("study");
        fs::create_dir_all(&plots).map_err(|error| Failure::file(&plots, error))?;
        for (name, svg) in plot::all(&figures)? {
            write(&plots.join(name), &svg)?;
        }
        write(&plots.join("study.json"), &json(&figures)?)?;
        write(&directory.join("study.md"), &document::markdown(&figures, &calibration))?;
    }
    let mut stdout = io::stdout().lock();
    stdout
        .write_all(document::summary(&figures).as_bytes())
        .and_then(|()| stdout.flush())
        .map_err(Failure::stdout)
}

impl Arguments {
    /// What is checked before anything is measured.
    fn check(&self) -> Outcome {
        let input = |what: String| Err(Failure::Input(what));
        if !(self.tflops.is_finite() && self.tflops > 0.0) {
            return input(format!("--tflops {}: give a positive number", self.tflops));
        }
        match self.backend {
            Backend::Model if self.merge || !self.devices.is_empty() => {
                input("--devices and --merge are about measuring: add --backend cuda".into())
            }
            Backend::Cuda if self.fit => {
                input("--fit: with --backend cuda the model is fitted anyway; leave it out".into())
            }
            Backend::Cuda if self.devices.len() == 1 => input(
                "--devices: name two GPUs or more, such as 0,1; one alone is measured without it".into(),
            ),
            _ => Ok(()),
        }
    }

    /// The model's figures and the measurements; both are written where that is asked for.
    fn sources(&self) -> Outcome<(Calibration, Option<Measured>)> {
        if self.backend == Backend::Cuda {
            let (calibration, measured) = self.measure()?;
            self.write_calibration(&calibration)?;
            return Ok((calibration, Some(measured)));
        }
        let measured = self.read_measured()?;
        let calibration = match &measured {
            Some(measured) if self.fit => {
                let start = Calibration::h200();
                if measured.machine != start.machine {
                    return Err(Failure::Input(format!(
                        "--fit: the measurements are of {}, whose multiprocessors only its driver tells; use --backend cuda \
                         there",
                        measured.machine
                    )));
                }
                let fitted = calibrate(&start, measured, start.multiprocessors)?;
                self.write_calibration(&fitted)?;
                fitted
            }
            _ => {
                read(self.calibration.as_deref(), |text| Calibration::from_json(text).map_err(Failure::from))?
                    .unwrap_or_else(Calibration::h200)
            }
        };
        Ok((calibration, measured))
    }

    fn write_calibration(&self, calibration: &Calibration) -> Outcome {
        self.calibration.as_ref().map_or(Ok(()), |path| write(path, &calibration.to_json()))
    }

    fn read_measured(&self) -> Outcome<Option<Measured>> {
        read(self.measured.as_deref(), |text| {
            serde_json::from_str::<Measured>(text).map_err(|error| Failure::Input(error.to_string()))
        })
    }

    /// The GPUs of each part of what is to be measured.
    fn placements(&self) -> Vec<Vec<usize>> {
        match (self.devices.is_empty(), self.merge) {
            (true, _) => vec![vec![0]],
            (false, true) => vec![self.devices.clone()],
            (false, false) => vec![vec![0], self.devices.clone()],
        }
    }

    fn measure(&self) -> Outcome<(Calibration, Measured)> {
        let workloads = if self.workloads.is_empty() {
            Workload::all()
        } else {
            let named = |name: &String| {
                Workload::by_name(name).ok_or_else(|| {
                    let known: Vec<_> = Workload::all().iter().map(|workload| workload.name).collect();
                    Failure::Input(format!("no model {name:?}; choose from {}", known.join(", ")))
                })
            };
            self.workloads.iter().map(named).collect::<Outcome<_>>()?
        };
        let mut measured = if self.merge { self.read_measured()? } else { None };
        let count = Device::count()?;
        if count == 0 {
            return Err(Error::NoDevice("the driver offers no GPU".into()).into());
        }
        if let Some(gpu) = self.devices.iter().find(|gpu| **gpu >= count) {
            return Err(Error::NoDevice(format!("--devices: no GPU {gpu}; the driver offers {count}")).into());
        }
        let plan = |gpus| {
            let (ranks, workloads, repeats) = (self.ranks.clone(), workloads.clone(), self.repeats);
            let plan = Plan { gpus, ranks, workloads, repeats };
            plan.check().map(|()| plan)
        };
        let plans = self.placements().into_iter().map(plan).collect::<ringseal::Result<Vec<_>>>()?;
        let device = Device::open(plans[0].gpus[0])?;
        if let Some(others) = &measured {
            others.check_machine(&device.name()?)?;
        }
        let capability = device.compute_capability()?;
        let image = match &self.kernels {
            Some(path) => fs::read(path).map_err(|error| Failure::file(path, error))?,
            None => {
                let target = ptx::for_compute_capability(capability.major, capability.minor);
                let needed = || {
                    Error::NoDevice(format!("compute capability {capability}, but 8.0 or newer is needed"))
                };
                ptx::text(target.ok_or_else(needed)?).into()
            }
        };
        for plan in &plans {
            let bar = progress("measuring", plan.parts());
            let part = measure(&image, plan, |what| advance(&bar, what))?;
            bar.finish_and_clear();
            let all = match measured {
                Some(others) => others.merged(part)?,
                None => part,
            };
            // Each part at once: what comes after it may fail.
            if let Some(path) = &self.measured {
                write(path, &json(&all)?)?;
            }
            measured = Some(all);
        }
        let Some(measured) = measured else { return Err(Failure::Input("nothing to measure".into())) };
        let calibration = calibrate(&Calibration::h200(), &measured, device.multiprocessors()?)?;
        Ok((calibration, measured))
    }
}

fn read<T>(path: Option<&Path>, parse: impl Fn(&str) -> Outcome<T>) -> Outcome<Option<T>> {
    let Some(path) = path else { return Ok(None) };
    let text = fs::read_to_string(path).map_err(|error| Failure::file(path, error))?;
    parse(&text).map(Some).map_err(|failure| Failure::file(path, failure))
}

fn write(path: &Path, text: &str) -> Outcome {
    let mut file = AtomicFile::create(path)?;
    file.write(text.as_bytes())?;
    file.commit()?;
    Ok(())
}

fn json(value: &impl serde::Serialize) -> Outcome<String> {
    let text = serde_json::to_string_pretty(value).map_err(|error| Failure::Input(error.to_string()))?;
    Ok(text + "\n")
}

/// On standard error, and only where that is a terminal.
fn progress(prefix: &'static str, parts: usize) -> ProgressBar {
    let bar = ProgressBar::new(parts as u64).with_finish(ProgressFinish::AndClear).with_prefix(prefix);
    match ProgressStyle::with_template("{prefix} {bar:30} {pos}/{len} {wide_msg}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

fn advance(bar: &ProgressBar, what: &str) {
    // One that has begun doesn't count yet.
    if !bar.message().is_empty() {
        bar.inc(1);
    }
    bar.set_message(what.to_owned());
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Study {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn parsed(line: &str) -> Result<Arguments, String> {
        let words = std::iter::once("study").chain(line.split_whitespace());
        let arguments = Study::try_parse_from(words).map_err(|error| error.to_string())?.arguments;
        arguments.check().map_err(|failure| failure.to_string())?;
        Ok(arguments)
    }

    #[test]
    fn what_is_measured_follows_from_devices_and_merge() {
        for (line, placements) in [
            ("--backend cuda", &[&[0][..]][..]),
            ("--backend cuda --devices 0,1", &[&[0], &[0, 1]]),
            ("--backend cuda --devices 2,1 --merge --measured file", &[&[2, 1]]),
            ("--backend cuda --merge --measured file", &[&[0]]),
        ] {
            assert_eq!(parsed(line).unwrap().placements(), placements, "{line}");
        }
    }

    #[test]
    fn what_can_not_be_meant_is_refused() {
        for (line, advice) in [
            ("--devices 0,1", "add --backend cuda"),
            ("--merge --measured file", "add --backend cuda"),
            ("--backend cuda --merge", "--measured"),
            ("--backend cuda --devices 0", "such as 0,1"),
            ("--backend cuda --fit --measured file", "leave it out"),
            ("--fit", "--measured"),
            ("--tflops=-1", "positive"),
        ] {
            let refusal = parsed(line).unwrap_err();
            assert!(refusal.contains(advice), "{line}: {refusal}");
        }
    }
}
