//! Shared by the tests: outcomes, random bytes, the kernels under test.

use std::error::Error;

use ringseal::cuda::{Device, Kernels, Module};

/// What a test returns.
pub(crate) type Outcome = Result<(), Box<dyn Error>>;

/// A test that runs on any machine, by its name.
pub(crate) type HostTest = (&'static str, fn() -> Outcome);

/// A test that needs a GPU, by its name.
pub(crate) type GpuTest = (&'static str, fn(&Device) -> Outcome);

/// Fails the test with a message, unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(format!($($message)+).into());
        }
    };
}
pub(crate) use ensure;

/// The kernels under test.
pub(crate) fn kernels(device: &Device) -> Result<Kernels, Box<dyn Error>> {
    match std::env::var_os("RINGSEAL_TEST_PTX") {
        Some(path) => Ok(Kernels::new(&Module::load(device, &std::fs::read(path)?)?)?),
        None => Ok(Kernels::embedded(device)?),
    }
}

/// PTX or cubin of the kernels under test.
pub(crate) fn image(device: &Device) -> Result<Vec<u8>, Box<dyn Error>> {
    if let Some(path) = std::env::var_os("RINGSEAL_TEST_PTX") {
        return Ok(std::fs::read(path)?);
    }
    let capability = device.compute_capability()?;
    let target = ringseal::ptx::for_compute_capability(capability.major, capability.minor);
    Ok(ringseal::ptx::text(target.ok_or("no kernels for this GPU")?).into())
}

/// Fresh random bytes, so that no run tests what the last one did.
pub(crate) fn random_bytes(bytes: usize) -> Result<Vec<u8>, Box<dyn Error>> {
    let mut vector = vec![0; bytes];
    getrandom::fill(&mut vector)?;
    Ok(vector)
}

/// As [`random_bytes`], of a fixed length.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], Box<dyn Error>> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}
