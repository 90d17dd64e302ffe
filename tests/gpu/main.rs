//! What only a GPU can show. With no GPU each of these tests is reported as ignored, never as passed; the probing tests
//! run everywhere.
//!
//! `RINGSEAL_TEST_PTX=FILE` tests that PTX in place of the embedded one.
#![allow(clippy::print_stdout, reason = "what is skipped, and start-up times, belong in the output")]

mod context;
mod copy;
mod ctr;
mod gcm;
mod probe;
mod processes;
mod ring;
mod seed;
mod support;

use libtest_mimic::{Arguments, Failed, Trial};
use ringseal::cuda::Device;

fn main() {
    if probe::is_child() {
        return probe::child();
    }
    if processes::is_child() {
        return processes::child();
    }
    let arguments = Arguments::from_args();
    let device = Device::open(0);
    if let Err(error) = &device
        && !arguments.list
    {
        println!("skipped: no CUDA device: the tests that need one count as ignored ({error})");
    }
    let mut trials = Vec::new();
    for (name, test) in probe::TESTS {
        trials.push(Trial::test(*name, || outcome(test())));
    }
    for (name, test) in context::TESTS.iter().chain(ctr::TESTS).chain(ring::TESTS).chain(seed::TESTS) {
        let run = move || outcome(test(&Device::open(0).map_err(|error| error.to_string())?));
        trials.push(Trial::test(*name, run).with_ignored_flag(device.is_err()));
    }
    let has_gcm = device.as_ref().is_ok_and(gcm::available);
    if device.is_ok() && !has_gcm && !arguments.list {
        println!("skipped: the kernels for this GPU have no AES-GCM: its tests count as ignored");
    }
    for (name, test) in gcm::TESTS.iter().chain(copy::TESTS).chain(ring::SEALED_TESTS).chain(processes::TESTS)
    {
        let run = move || outcome(test(&Device::open(0).map_err(|error| error.to_string())?));
        trials.push(Trial::test(*name, run).with_ignored_flag(!has_gcm));
    }
    let several = has_gcm && Device::count().is_ok_and(|count| count >= 2);
    if has_gcm && !several && !arguments.list {
        println!("skipped: one GPU: the tests across GPUs count as ignored");
    }
    for (name, test) in ring::ACROSS_GPUS_TESTS.iter().chain(seed::ACROSS_GPUS_TESTS) {
        trials.push(Trial::test(*name, || outcome(test())).with_ignored_flag(!several));
    }
    libtest_mimic::run(&arguments, trials).exit();
}

fn outcome(result: support::Outcome) -> Result<(), Failed> {
    result.map_err(|error| Failed::from(error.to_string()))
}
