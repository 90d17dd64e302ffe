//! What only a GPU can show. With no GPU each of these tests is reported as ignored, never as passed; the probing tests
//! run everywhere.
//!
//! `RINGSEAL_TEST_PTX=FILE` tests that PTX in place of the embedded one. `RINGSEAL_TEST_SMALL=1` leaves out long messages and
//! processes, for tools that make kernels a hundred times slower (scripts/sanitize). `RINGSEAL_TEST_TRACE=1` names each test
//! that takes the GPU for itself, which finds one that does not end.
#![allow(clippy::print_stdout, reason = "what is skipped, and start-up times, belong in the output")]

mod aead;
mod auto;
mod context;
mod copy;
mod ctr;
mod gcm;
mod keystream;
mod nccl;
mod probe;
mod processes;
mod ring;
mod seed;
mod support;
mod turns;

use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use ringseal::cuda::Device;

/// What `RINGSEAL_TEST_SMALL` leaves out: what is about length, starts processes, or runs beside a kernel that only a copy
/// ends.
const LARGE: &[&str] = &[
    "ctr::one_gibibyte",
    "ctr::past_four_gibibytes",
    "gcm::one_message_past_4_gib",
    "gcm::gmac_past_4_gib",
    "gcm::published_vectors",
    "nccl::",
    "module::the_jit_cache_may_be_disabled_or_unwritable",
    "probe::",
    "processes::",
    "ring::aes256_ends_at_the_deadline",
    "ring::changed_bytes",
    "ring::plain_ends_at_the_deadline",
    "seed::changed_bytes",
];

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
        trials.push(Trial::test(*name, move || timed(name, test)));
    }
    for (name, test) in context::TESTS.iter().chain(ctr::TESTS) {
        trials.push(Trial::test(*name, shared(name, *test)).with_ignored_flag(device.is_err()));
    }
    let has_gcm = device.as_ref().is_ok_and(gcm::available);
    if device.is_ok() && !has_gcm && !arguments.list {
        println!("skipped: the kernels for this GPU have no AES-GCM: its tests count as ignored");
    }
    let has_rings = device.as_ref().is_ok_and(|device| support::has_kernel(device, "ring_sealed_128"));
    if device.is_ok() && !has_rings && !arguments.list {
        println!("skipped: the kernels for this GPU have no sealed ring: its tests count as ignored");
    }
    for (name, test) in gcm::TESTS.iter().chain(copy::TESTS).chain(aead::TESTS) {
        trials.push(Trial::test(*name, shared(name, *test)).with_ignored_flag(!has_gcm));
    }
    for (name, test) in keystream::TESTS {
        trials.push(Trial::test(*name, shared(name, *test)).with_ignored_flag(!has_rings));
    }
    // Those that share the GPU come first: waiting for it alone keeps others from sharing it.
    for (name, test) in ring::TESTS.iter().chain(auto::TESTS).chain(seed::TESTS) {
        let run = move || timed(name, || test(&Device::open(0)?));
        trials.push(Trial::test(*name, run).with_ignored_flag(device.is_err()));
    }
    for (name, test) in ring::SEALED_TESTS.iter().chain(auto::SEALED_TESTS).chain(processes::TESTS) {
        let run = move || timed(name, || test(&Device::open(0)?));
        trials.push(Trial::test(*name, run).with_ignored_flag(!has_rings));
    }
    let several = has_rings && Device::count().is_ok_and(|count| count >= 2);
    if has_rings && !several && !arguments.list {
        println!("skipped: one GPU: the tests across GPUs count as ignored");
    }
    for (name, test) in ring::ACROSS_GPUS_TESTS.iter().chain(seed::ACROSS_GPUS_TESTS) {
        trials.push(Trial::test(*name, move || timed(name, test)).with_ignored_flag(!several));
    }
    let has_nccl = device.is_ok() && nccl::available();
    if device.is_ok() && !has_nccl && !arguments.list {
        println!("skipped: no libnccl.so.2 in LD_LIBRARY_PATH: the tests of NCCL count as ignored");
    }
    for (name, test) in nccl::TESTS.iter().chain(processes::NCCL_TESTS) {
        let run = move || timed(name, || test(&Device::open(0)?));
        trials.push(Trial::test(*name, run).with_ignored_flag(!has_nccl));
    }
    for (name, test) in nccl::ACROSS_GPUS_TESTS.iter().chain(processes::NCCL_ACROSS_GPUS_TESTS) {
        let run = move || timed(name, test);
        trials.push(Trial::test(*name, run).with_ignored_flag(!has_nccl || !several));
    }
    if support::is_small() {
        trials.retain(|trial| !LARGE.iter().any(|large| trial.name().starts_with(large)));
    }
    libtest_mimic::run(&arguments, trials).exit();
}

/// A test that may run beside others; the rest take the GPU for themselves.
fn shared(
    name: &'static str,
    test: fn(&Device) -> support::Outcome,
) -> impl FnOnce() -> Result<(), Failed> + Send + 'static {
    move || {
        timed(name, || {
            let _turn = turns::beside_others();
            test(&Device::open(0)?)
        })
    }
}

/// Shorter tests don't say how long they took.
const SLOW: Duration = Duration::from_secs(1);

/// Runs a test, and says how long it took once it had its turn.
fn timed(name: &'static str, test: impl FnOnce() -> support::Outcome) -> Result<(), Failed> {
    turns::is(name);
    let start = Instant::now();
    let result = test();
    let time = start.elapsed().saturating_sub(turns::waited());
    if time >= SLOW {
        println!("{name} took {:.1} s", time.as_secs_f64());
    }
    result.map_err(|error| Failed::from(error.to_string()))
}
