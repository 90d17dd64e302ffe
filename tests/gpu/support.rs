//! Shared by the tests: outcomes, random bytes.

use std::error::Error;

use ringseal::cuda::Device;

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

/// Fresh random bytes, so that no run tests what the last one did.
pub(crate) fn random_bytes(bytes: usize) -> Result<Vec<u8>, Box<dyn Error>> {
    let mut vector = vec![0; bytes];
    getrandom::fill(&mut vector)?;
    Ok(vector)
}
