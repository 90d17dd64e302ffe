//! `ringseal vectors`: the published test vectors, on the backend of choice.

use std::io::{self, Write};
use std::num::NonZeroUsize;

use clap::Args;

use super::BackendName;
use super::failure::{Failure, Outcome};

#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Where the cryptography runs.
    #[arg(long, value_name = "NAME", value_enum, default_value_t)]
    backend: BackendName,
    /// Run one vector in N of each suite; for the emulated backend, which is slow.
    #[arg(long, value_name = "N", default_value = "1")]
    every: NonZeroUsize,
}

/// Runs every suite and prints its counts.
pub(crate) fn run(arguments: &Arguments) -> Outcome {
    let backend = arguments.backend.open()?;
    let report = ringseal::vectors::run(&*backend, arguments.every)?;
    let mut stdout = io::stdout().lock();
    let headings = format!("{:<18} {:>7} {:>7} {:>7} {:>7}", "suite", "ran", "passed", "failed", "skipped");
    write!(stdout, "backend: {}\n{headings}\n{report}", report.backend)
        .and_then(|()| stdout.flush())
        .map_err(Failure::stdout)?;
    match (report.failed(), report.ran()) {
        (0, 0) => Err(Failure::Wrong(format!("the {} backend ran no vector", report.backend))),
        (0, _) => Ok(()),
        (failed, ran) => {
            Err(Failure::Wrong(format!("{failed} of {ran} vectors failed on the {} backend", report.backend)))
        }
    }
}
