//! `ringseal ptx`: the kernels as files, for use in other CUDA programs.

use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use ringseal::ptx::{self, Target};

use super::failure::{Failure, Outcome, shown};
use super::output::AtomicFile;

#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Directory to write into; made if it doesn't exist.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

/// Writes each target's PTX and the manifest that describes them, and prints their names.
pub(crate) fn run(arguments: &Arguments) -> Outcome {
    let directory = &arguments.out;
    fs::create_dir_all(directory).map_err(|error| Failure::file(directory, error))?;
    let modules = Target::ALL.map(|target| (format!("ringseal_{target}.ptx"), ptx::text(target)));
    let files = modules.iter().map(|(name, text)| (name.as_str(), *text));
    let mut stdout = io::stdout().lock();
    for (name, text) in files.chain([("manifest.json", ptx::MANIFEST_JSON)]) {
        let path = directory.join(name);
        let mut file = AtomicFile::create(&path)?;
        file.write(text.as_bytes())?;
        file.commit()?;
        writeln!(stdout, "{}", shown(&path)).map_err(Failure::stdout)?;
    }
    stdout.flush().map_err(Failure::stdout)
}
