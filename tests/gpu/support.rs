//! Shared by the tests: outcomes, random bytes, the kernels under test.

use std::cell::RefCell;
use std::error::Error;
use std::sync::{Mutex, OnceLock, PoisonError};

use aes::Aes128;
use ctr::Ctr128BE;
use ctr::cipher::{KeyIvInit, StreamCipher};
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

/// The kernels under test, on the first device. Loaded once: that takes a while, and all others wait for it.
pub(crate) fn kernels(device: &Device) -> Result<Kernels, Box<dyn Error>> {
    static LOADED: Mutex<Option<Kernels>> = Mutex::new(None);
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(kernels) = &*loaded {
        return Ok(kernels.clone());
    }
    let kernels = match std::env::var_os("RINGSEAL_TEST_PTX") {
        Some(_) => Kernels::new(&Module::load(device, image(device)?)?)?,
        None => Kernels::embedded(device)?,
    };
    Ok(loaded.insert(kernels).clone())
}

/// PTX or cubin of the kernels under test.
pub(crate) fn image(device: &Device) -> Result<&'static [u8], Box<dyn Error>> {
    static FILE: OnceLock<Vec<u8>> = OnceLock::new();
    if let Some(path) = std::env::var_os("RINGSEAL_TEST_PTX") {
        if let Some(read) = FILE.get() {
            return Ok(read);
        }
        let bytes = std::fs::read(path)?;
        return Ok(FILE.get_or_init(|| bytes));
    }
    let capability = device.compute_capability()?;
    let target = ringseal::ptx::for_compute_capability(capability.major, capability.minor);
    Ok(ringseal::ptx::text(target.ok_or("no kernels for this GPU")?).as_bytes())
}

/// Whether `RINGSEAL_TEST_SMALL` is set: fewer and shorter messages.
pub(crate) fn is_small() -> bool {
    std::env::var_os("RINGSEAL_TEST_SMALL").is_some()
}

/// Bytes of the longest message that is tested.
pub(crate) fn longest() -> usize {
    if is_small() { 70_000 } else { usize::MAX }
}

/// Of a row of lengths, each how-manieth is tested. A prime number, so that small ones meet every place in a block.
pub(crate) fn stride() -> usize {
    if is_small() { 37 } else { 1 }
}

/// Whether the kernels under test have one of this name.
pub(crate) fn has_kernel(device: &Device, name: &str) -> bool {
    let module = image(device).and_then(|image| Ok(Module::load(device, image)?));
    module.is_ok_and(|module| module.kernel(name, 0).is_ok())
}

/// Whether every byte is this one: many at a time, unlike `all`, which ends at the first that isn't.
pub(crate) fn all_are(bytes: &[u8], value: u8) -> bool {
    bytes.chunks(4096).all(|piece| piece.iter().fold(0, |differing, &byte| differing | byte ^ value) == 0)
}

thread_local! {
    /// A keystream under a key of the system's: that would take many times as long to make as many bytes itself.
    static NUMBERS: RefCell<Option<Ctr128BE<Aes128>>> = const { RefCell::new(None) };
}

/// Puts random bytes over others, which may be any: a keystream added to them.
pub(crate) fn randomize(bytes: &mut [u8]) -> Result<(), Box<dyn Error>> {
    NUMBERS.with_borrow_mut(|numbers| {
        let numbers = match numbers {
            Some(numbers) => numbers,
            none => {
                let mut seed = [0; 16];
                getrandom::fill(&mut seed)?;
                none.insert(Ctr128BE::new(&seed.into(), &[0; 16].into()))
            }
        };
        numbers.apply_keystream(bytes);
        Ok(())
    })
}

/// Fresh random bytes, so that no run tests what the last one did.
pub(crate) fn random_bytes(bytes: usize) -> Result<Vec<u8>, Box<dyn Error>> {
    let mut vector = vec![0; bytes];
    randomize(&mut vector)?;
    Ok(vector)
}

/// As [`random_bytes`], of a fixed length.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], Box<dyn Error>> {
    let mut bytes = [0; N];
    randomize(&mut bytes)?;
    Ok(bytes)
}

/// Up to `bytes` bytes of the pattern from `start` on, over and over, in runs.
pub(crate) fn runs(pattern: &[u8], start: usize, bytes: usize) -> impl Iterator<Item = &[u8]> {
    let (mut at, mut left) = (start % pattern.len(), bytes);
    std::iter::from_fn(move || {
        let run = &pattern[at..pattern.len().min(at + left)];
        (at, left) = (0, left - run.len());
        (!run.is_empty()).then_some(run)
    })
}
