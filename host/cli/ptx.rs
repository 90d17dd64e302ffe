//! `ringseal ptx`: the kernels as files, for use in other CUDA programs.

use std::env;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use ringseal::ptx::{self, Target};

use super::failure::{Failure, Outcome, shown};
use super::output::AtomicFile;

#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Directory to write into; made if it doesn't exist.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// NVIDIA's assembler, which makes machine code (cubins) of the PTX, so that the driver needn't. Without the option:
    /// ptxas of $CUDA_HOME, $CUDA_PATH, /usr/local/cuda or $PATH; no cubins where there is none.
    #[arg(long, value_name = "FILE")]
    ptxas: Option<PathBuf>,
    /// Writes no cubins even where ptxas is found; assembling takes about a minute.
    #[arg(long, conflicts_with = "ptxas")]
    no_cubins: bool,
}

/// Writes each target's PTX, its cubin where there is an assembler, the manifest and the C header; prints their names.
pub(crate) fn run(arguments: &Arguments) -> Outcome {
    let directory = &arguments.out;
    fs::create_dir_all(directory).map_err(|error| Failure::file(directory, error))?;
    let header = ptx::header();
    let modules = Target::ALL.map(|target| (target.file(), ptx::text(target)));
    for (name, text) in
        modules.into_iter().chain([("manifest.json", ptx::MANIFEST_JSON), (ptx::HEADER_FILE, &header)])
    {
        write(&directory.join(name), text.as_bytes())?;
    }
    if arguments.no_cubins {
        return Ok(());
    }
    let Some(ptxas) = arguments.ptxas.clone().or_else(find_ptxas) else { return Ok(()) };
    for target in Target::ALL {
        match assemble(&ptxas, &directory.join(target.file()), target)? {
            Ok(cubin) => write(&directory.join(format!("ringseal_{target}.cubin")), &cubin)?,
            // An assembler that was only found may be too old for the module; one that was named must do.
            Err(reason) if arguments.ptxas.is_none() => {
                super::warn(&format!("no cubin for {target}: {reason}"))
            }
            Err(reason) => return Err(Failure::Input(reason)),
        }
    }
    Ok(())
}

fn write(path: &Path, bytes: &[u8]) -> Outcome {
    let mut file = AtomicFile::create(path)?;
    file.write(bytes)?;
    file.commit()?;
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{}", shown(path)).and_then(|()| stdout.flush()).map_err(Failure::stdout)
}

/// The assembler of a CUDA toolkit on this machine.
fn find_ptxas() -> Option<PathBuf> {
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os).map(PathBuf::from);
    let folders = toolkits.chain([PathBuf::from("/usr/local/cuda")]).map(|toolkit| toolkit.join("bin"));
    let path = env::var_os("PATH").unwrap_or_default();
    folders.chain(env::split_paths(&path)).map(|folder| folder.join("ptxas")).find(|file| file.is_file())
}

/// The cubin of a module, or why the assembler makes none.
fn assemble(ptxas: &Path, module: &Path, target: Target) -> Outcome<Result<Vec<u8>, String>> {
    let folder = tempfile::tempdir().map_err(|error| Failure::Input(format!("temporary folder: {error}")))?;
    let cubin = folder.path().join("module.cubin");
    let output = Command::new(ptxas)
        .args(["-O3", "-arch", target.name(), "-o"])
        .args([&cubin, module])
        .output()
        .map_err(|error| Failure::file(ptxas, error))?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Ok(Err(format!("{} refuses {}: {words}", shown(ptxas), shown(module))));
    }
    fs::read(&cubin).map(Ok).map_err(|error| Failure::file(&cubin, error))
}
