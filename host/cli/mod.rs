//! The command line: arguments in, exit code out.

mod all_reduce;
mod copy_bench;
mod failure;
mod info;
mod interruption;
mod memory;
mod output;
mod ptx;
mod sample;
mod seal;
mod study;
mod table;
mod tensors;
mod values;
mod vectors;

use std::fmt::Display;
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Parser, Subcommand, ValueEnum};
use ringseal::backend::{self, Backend};

use failure::{Failure, Outcome};

/// Sealed (AES-GCM) collectives, and the cryptography they are made of.
///
/// With no command: `ringseal all-reduce --ranks 4` over a few sizes.
#[derive(Parser, Debug)]
#[command(version, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

const EXIT_CODES: &str = "Exit codes: 0 done; 1 something did not verify or was wrong; 2 bad usage, input or output; 130 and 143 ended by SIGINT \
     (Ctrl-C) or SIGTERM, with no unfinished file left behind; 141 standard output was closed";

#[derive(Subcommand, Debug)]
enum Command {
    /// All-reduce made-up data and print a table as nccl-tests does, or reduce gradient files.
    AllReduce(Box<all_reduce::Arguments>),
    /// Seal a message with AES-GCM: writes the ciphertext followed by the 16-byte tag.
    Seal(seal::Arguments),
    /// Open a sealed message; writes nothing unless its tag verifies.
    Open(seal::Arguments),
    /// Run the published test vectors (NIST CAVP, SP 800-38A, Wycheproof and others) and print counts.
    Vectors(vectors::Arguments),
    /// Write the kernels as PTX, with a manifest of their parameters, for use in other CUDA programs.
    Ptx(ptx::Arguments),
    /// Predict, and on a GPU measure, what sealing costs the training of six models.
    Study(study::Arguments),
    /// Time sealed copies between host and GPU memory beside plain ones.
    CopyBench(copy_bench::Arguments),
    /// Tell what this machine offers: driver, GPUs, and which PTX loads on them.
    Info,
}

/// Where the cryptography runs.
#[derive(ValueEnum, Clone, Copy, Debug, Default)]
enum BackendName {
    /// The GPU where there is one whose kernels do AES-GCM, otherwise the CPU.
    #[default]
    Auto,
    /// This machine's processor.
    Cpu,
    /// The GPU, or an error.
    Cuda,
    /// The GPU kernels' own source, run on the CPU; slow, for checking.
    Emulated,
}

impl BackendName {
    fn open(self) -> Outcome<Arc<dyn Backend>> {
        let name = match self {
            Self::Auto => "auto",
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
            Self::Emulated => "emulated",
        };
        Ok(backend::by_name(name)?)
    }
}

/// Runs the command.
pub(crate) fn main() -> ExitCode {
    let Cli { command } = Cli::parse();
    let outcome = match command {
        None => all_reduce::run_default(),
        Some(Command::AllReduce(arguments)) => all_reduce::run(*arguments),
        Some(Command::Seal(arguments)) => seal::seal(arguments),
        Some(Command::Open(arguments)) => seal::open(arguments),
        Some(Command::Vectors(arguments)) => vectors::run(&arguments),
        Some(Command::Ptx(arguments)) => ptx::run(&arguments),
        Some(Command::Study(arguments)) => study::run(&arguments),
        Some(Command::CopyBench(arguments)) => copy_bench::run(&arguments),
        Some(Command::Info) => info::run(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if !matches!(failure, Failure::BrokenPipe) {
                say("error", &failure);
            }
            ExitCode::from(failure.code())
        }
    }
}

/// Tells the user something that doesn't stop the command.
fn warn(what: &str) {
    say("warning", what);
}

fn say(kind: &str, what: impl Display) {
    // Not eprintln!, which panics when standard error is closed.
    let _ = writeln!(io::stderr(), "{kind}: {what}");
}
