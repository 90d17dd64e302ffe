//! Finding and starting the driver, and turning its error codes into [`Error`].

use std::ffi::{CStr, c_char};
use std::fmt;
use std::sync::OnceLock;

use cudarc::driver::sys;

use crate::{Error, Result};

/// A CUDA version, such as 12.4; for a driver, the newest CUDA it supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}.{}", self.major, self.minor)
    }
}

/// The oldest driver whose functions this module calls, and the release that brought PTX 8.0.
const OLDEST: Version = Version { major: 12, minor: 0 };

/// Starts the driver on the first call and returns the newest CUDA version that it supports.
///
/// # Errors
/// [`Error::NoDevice`] when there is no driver library, when it is too old (naming both versions), or when it has no
/// device to offer (naming `CUDA_VISIBLE_DEVICES` where that is set). The outcome holds for the whole process, as the
/// driver reads its environment only once.
pub fn driver() -> Result<Version> {
    static STARTED: OnceLock<std::result::Result<Version, String>> = OnceLock::new();
    STARTED.get_or_init(start).clone().map_err(Error::NoDevice)
}

fn start() -> std::result::Result<Version, String> {
    // SAFETY: opening the driver library runs its initialisers, which have no preconditions.
    if !unsafe { sys::is_culib_present() } {
        return Err("no NVIDIA driver was found (libcuda.so.1 cannot be loaded)".into());
    }
    let mut number = 0;
    // SAFETY: the library is present (so the lookup cannot panic), and the pointer is valid for the write. This is the
    // one call that works before cuInit.
    let result = unsafe { sys::cuDriverGetVersion(&mut number) };
    if result != sys::CUresult::CUDA_SUCCESS {
        return Err(format!("the driver does not tell its version ({})", describe(result)));
    }
    let number = u32::try_from(number).unwrap_or(0);
    let version = Version { major: number / 1000, minor: number % 1000 / 10 };
    check_version(version)?;
    // SAFETY: no preconditions.
    match unsafe { sys::cuInit(0) } {
        sys::CUresult::CUDA_SUCCESS => Ok(version),
        sys::CUresult::CUDA_ERROR_NO_DEVICE => Err(format!("the driver offers no GPU{}", visible_devices())),
        other => Err(format!("the driver does not start: {}{}", describe(other), visible_devices())),
    }
}

fn check_version(version: Version) -> std::result::Result<(), String> {
    if version < OLDEST {
        return Err(format!(
            "the installed driver supports CUDA {version}, but ringseal needs one that supports CUDA {OLDEST} or newer"
        ));
    }
    Ok(())
}

/// What the environment hides, for an error message; empty when it hides nothing.
pub(super) fn visible_devices() -> String {
    match std::env::var_os("CUDA_VISIBLE_DEVICES") {
        Some(value) => format!(" (CUDA_VISIBLE_DEVICES is set to {value:?})"),
        None => String::new(),
    }
}

/// Turns a result code into an error that names the call.
pub(super) fn check(call: &str, result: sys::CUresult) -> Result<()> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(Error::Cuda(format!("{call}: {}", describe(result))))
}

/// The driver's own name and text for a result code.
pub(super) fn describe(result: sys::CUresult) -> String {
    // SAFETY: the library is loaded, as it returned `result`; both functions store a pointer to a static string, or null.
    let text = |lookup: unsafe fn(sys::CUresult, *mut *const c_char) -> sys::CUresult| unsafe {
        let mut text = std::ptr::null();
        if lookup(result, &mut text) != sys::CUresult::CUDA_SUCCESS || text.is_null() {
            return None;
        }
        Some(CStr::from_ptr(text).to_string_lossy().into_owned())
    };
    match (text(sys::cuGetErrorName), text(sys::cuGetErrorString)) {
        (Some(name), Some(meaning)) => format!("{name} ({meaning})"),
        (Some(name), None) => name,
        _ => format!("error {}", result as u32),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_driver_is_refused_by_both_versions() {
        let text = check_version(Version { major: 11, minor: 8 }).unwrap_err();
        assert!(text.contains("11.8") && text.contains("12.0"), "{text}");
        assert!(check_version(Version { major: 12, minor: 0 }).is_ok());
        assert!(check_version(Version { major: 13, minor: 0 }).is_ok());
    }

    #[test]
    fn probing_never_panics() {
        match driver() {
            Ok(version) => assert!(version >= OLDEST),
            Err(Error::NoDevice(text)) => assert!(!text.is_empty()),
            Err(other) => panic!("{other}"),
        }
    }
}
