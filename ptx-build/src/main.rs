//! `cargo ptx`: builds and checks the kernels' PTX.

use std::io::Write;
use std::process::ExitCode;

use ringseal_ptx_build::{Result, commands};

const USAGE: &str = "\
usage: cargo ptx COMMAND

  build     compile the kernels and write host/ptx (needs rust-src)
            --accept-counts  even if a kernel's barriers, shuffles and the like have become more
  compare   compile the kernels and compare with host/ptx, byte for byte (needs rust-src)
  lint      check host/ptx: collective instructions against the manifest, no local memory, no barrier in asm!
  report    assemble host/ptx and print registers, stack, spills, shared memory (needs ptxas)
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match run(&arguments) {
        Ok(text) => {
            _ = std::io::stdout().write_all(text.as_bytes());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[&str]) -> Result<String> {
    match arguments {
        ["build"] => commands::build(&commands::folders()?, false),
        ["build", "--accept-counts"] => commands::build(&commands::folders()?, true),
        ["compare"] => commands::compare(&commands::folders()?),
        ["lint"] => commands::lint(&commands::folders()?),
        ["report"] => commands::report(&commands::folders()?),
        ["help" | "--help" | "-h"] => Ok(USAGE.to_owned()),
        _ => {
            eprint!("{USAGE}");
            std::process::exit(2);
        }
    }
}
