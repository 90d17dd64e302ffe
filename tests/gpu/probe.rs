//! Finding devices under what users do to the environment. The driver reads it once, so each case is its own process.

use std::process::{Command, Output};

use ringseal::Error;
use ringseal::cuda::Device;

use crate::support::{HostTest, Outcome, ensure};

const CHILD: &str = "RINGSEAL_TEST_PROBE";

pub(crate) const TESTS: &[HostTest] = &[
    ("probe::no_visible_device_is_a_clear_error", no_visible_device),
    ("probe::an_unknown_uuid_is_a_clear_error", unknown_uuid),
    ("probe::an_ordinal_out_of_range_is_a_clear_error", ordinal_out_of_range),
];

pub(crate) fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// Opens the device whose number is asked for and prints what came of it.
pub(crate) fn child() {
    let ordinal = std::env::var(CHILD).ok().and_then(|text| text.parse().ok()).unwrap_or(0);
    match Device::open(ordinal) {
        Ok(device) => println!("opened {device:?}"),
        Err(Error::NoDevice(text)) => println!("no device: {text}"),
        Err(other) => println!("wrong kind of error: {other}"),
    }
}

fn probe(ordinal: usize, visible: &str) -> Result<(String, Output), Box<dyn std::error::Error>> {
    let output = Command::new(std::env::current_exe()?)
        .env(CHILD, ordinal.to_string())
        .env("CUDA_VISIBLE_DEVICES", visible)
        .output()?;
    Ok((String::from_utf8_lossy(&output.stdout).into_owned(), output))
}

fn expect_no_device(ordinal: usize, visible: &str) -> Outcome {
    let (text, output) = probe(ordinal, visible)?;
    ensure!(output.status.success(), "the process ended with {}: {output:?}", output.status);
    ensure!(text.starts_with("no device: "), "CUDA_VISIBLE_DEVICES={visible:?}, GPU {ordinal}: {text}");
    // Where there is a driver, the user learns that it is the variable that hides the GPUs.
    ensure!(
        text.contains("no NVIDIA driver") || text.contains("CUDA_VISIBLE_DEVICES"),
        "the reason is not named: {text}"
    );
    Ok(())
}

fn no_visible_device() -> Outcome {
    expect_no_device(0, "")
}

fn unknown_uuid() -> Outcome {
    expect_no_device(0, "GPU-00000000-0000-0000-0000-000000000000")
}

fn ordinal_out_of_range() -> Outcome {
    expect_no_device(999, "0")?;
    expect_no_device(0, "999")
}
