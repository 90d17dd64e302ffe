//! `ringseal info`: what this machine offers, and what would run on it.

use std::io::{self, Write};

use ringseal::cuda::{self, Device, Module};
use ringseal::ptx;

use super::failure::{Failure, Outcome, printable};

/// Prints the driver, each GPU, and which of the embedded PTX modules loads on it.
pub(crate) fn run() -> Outcome {
    let mut stdout = io::stdout().lock();
    write(&mut stdout).and_then(|()| stdout.flush()).map_err(Failure::stdout)
}

fn write(out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "ringseal {}", env!("CARGO_PKG_VERSION"))?;
    writeln!(out, "embedded PTX: {}", ptx::Target::ALL.map(|target| target.to_string()).join(", "))?;
    let count = match cuda::driver() {
        Ok(version) => {
            writeln!(out, "driver: supports CUDA {version}")?;
            Device::count()
        }
        Err(error) => Err(error),
    };
    match count {
        Ok(0) => writeln!(out, "GPU: none; the cpu and emulated backends work")?,
        Ok(count) => {
            for ordinal in 0..count {
                match describe(ordinal) {
                    Ok(lines) => write!(out, "GPU {ordinal}: {lines}")?,
                    Err(error) => writeln!(out, "GPU {ordinal}: {}", printable(&error.to_string()))?,
                }
            }
        }
        Err(error) => {
            writeln!(out, "GPU: {}; the cpu and emulated backends work", printable(&error.to_string()))?
        }
    }
    Ok(())
}

fn describe(ordinal: usize) -> ringseal::Result<String> {
    let device = Device::open(ordinal)?;
    let capability = device.compute_capability()?;
    let (name, gigabytes) = (device.name()?, device.memory_bytes()? as f64 / 1e9);
    let (processors, shared) = (device.multiprocessors()?, device.shared_memory_limit()?);
    let module = match ptx::for_compute_capability(capability.major, capability.minor) {
        None => "none: compute capability 8.0 (A100) or newer is needed".into(),
        Some(target) => match Module::embedded(&device).and_then(|module| module.kernel("aes128_ctr_xor", 0))
        {
            Ok(_) => format!("{target} loads"),
            Err(error) => format!("{target} does not load: {}", printable(&error.to_string())),
        },
    };
    Ok(format!(
        "{name}, compute capability {capability}, {processors} SMs, {gigabytes:.1} GB, {shared} bytes of shared memory a \
         block\n  PTX: {module}\n"
    ))
}
