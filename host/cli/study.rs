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
    /// The model's figures: written after measuring, otherwise read. Unless given, those of an H200.
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
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
    if !(arguments.tflops.is_finite() && arguments.tflops > 0.0) {
        return Err(Failure::Input(format!("--tflops {}: give a positive number", arguments.tflops)));
    }
    let (calibration, measured) = match arguments.backend {
        Backend::Model => (
            read(arguments.calibration.as_deref(), |text| {
                Calibration::from_json(text).map_err(Failure::from)
            })?
            .unwrap_or_else(Calibration::h200),
            read(arguments.measured.as_deref(), |text| {
                serde_json::from_str::<Measured>(text).map_err(|error| Failure::Input(error.to_string()))
            })?,
        ),
        Backend::Cuda => {
            let (calibration, measured) = arguments.measure()?;
            if let Some(path) = &arguments.measured {
                write(path, &json(&measured)?)?;
            }
            if let Some(path) = &arguments.calibration {
                write(path, &calibration.to_json())?;
            }
            (calibration, Some(measured))
        }
    };
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
        if Device::count()? == 0 {
            return Err(Error::NoDevice("the driver offers no GPU".into()).into());
        }
        let device = Device::open(0)?;
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
        let plan = Plan { ranks: self.ranks.clone(), workloads, repeats: self.repeats };
        let bar = progress("measuring", plan.parts());
        let measured = measure(&device, &image, &plan, |what| advance(&bar, what))?;
        bar.finish_and_clear();
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
