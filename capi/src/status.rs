//! What calls return, and the message that goes with it.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use ringseal::Error;

/// What a call came to. Zero is success; further numbers may be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// A tag did not verify: the data were changed, or key, IV or additional data are others. Outputs are zeros.
    Authentication = 1,
    /// A rank did not deliver in time.
    Deadline = 2,
    /// Another rank failed first.
    Aborted = 3,
    /// The ranks did not come to a session: one is missing, has another secret, or other options.
    Handshake = 4,
    /// The communicator failed before and carries no data until it is rekeyed.
    Poisoned = 5,
    /// An argument is null, out of its domain, or doesn't fit the others.
    InvalidArgument = 6,
    /// A length is beyond a limit of the standard.
    Length = 7,
    /// A key has encrypted all that it may; rekey.
    KeyExhausted = 8,
    /// The backend can't do that.
    Unsupported = 9,
    /// There is no usable GPU or driver.
    NoDevice = 10,
    /// A CUDA call failed.
    Cuda = 11,
    /// The system failed to read, write, or connect.
    Io = 12,
    /// The system gave no random bytes.
    Randomness = 13,
    /// The handle is in use by another thread.
    Busy = 14,
    /// A mistake in the library. Please report it.
    Internal = 15,
    /// A rank's process ended, or the connection to it. Make a new group.
    Lost = 16,
}

/// Why a call failed.
pub(crate) struct Failure {
    status: Status,
    message: String,
}

impl Failure {
    pub(crate) fn new(status: Status, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }

    pub(crate) fn argument(message: impl Into<String>) -> Self {
        Self::new(Status::InvalidArgument, message)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let status = match error {
            Error::Authentication | Error::Record { .. } => Status::Authentication,
            Error::Deadline { .. } => Status::Deadline,
            Error::Aborted { .. } => Status::Aborted,
            Error::Lost { .. } => Status::Lost,
            Error::Handshake(_) => Status::Handshake,
            Error::Randomness(_) => Status::Randomness,
            Error::Poisoned => Status::Poisoned,
            Error::InvalidArgument(_) | Error::File { .. } => Status::InvalidArgument,
            Error::Length { .. } => Status::Length,
            Error::KeyExhausted { .. } => Status::KeyExhausted,
            Error::Unsupported { .. } => Status::Unsupported,
            Error::NoDevice(_) => Status::NoDevice,
            Error::Cuda(_) => Status::Cuda,
            Error::Io { .. } => Status::Io,
            _ => Status::Internal,
        };
        Self::new(status, error.to_string())
    }
}

thread_local! {
    static MESSAGE: RefCell<CString> = RefCell::default();
}

/// Runs the body of a call: a failure or a panic becomes a status and the thread's message.
pub(crate) fn guard(body: impl FnOnce() -> Result<(), Failure>) -> Status {
    // What a panic leaves behind is not used again: a communicator's lock is poisoned, and ciphers don't change.
    let outcome = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
        Err(Failure::new(Status::Internal, format!("panicked: {text}")))
    });
    let (status, message) = match outcome {
        Ok(()) => (Status::Ok, String::new()),
        Err(failure) => (failure.status, failure.message),
    };
    // A thread that is ending has no message any more.
    let _ = MESSAGE
        .try_with(|kept| *kept.borrow_mut() = CString::new(message.replace('\0', " ")).unwrap_or_default());
    status
}

/// Frees a handle's value. The thread's message stays, so that a caller can clean up before it reads it.
///
/// # Safety
/// Null, or from `Box::into_raw`, not freed yet and in no use.
pub(crate) unsafe fn release<T>(handle: *mut T) {
    if !handle.is_null() {
        // SAFETY: the caller's contract.
        let value = unsafe { Box::from_raw(handle) };
        // There is nobody to tell that a destructor panicked.
        let _ = catch_unwind(AssertUnwindSafe(move || drop(value)));
    }
}

/// Why the calling thread's last call that returned a status failed; empty if it didn't. Valid until the thread's next
/// such call: don't free it.
#[unsafe(no_mangle)]
pub extern "C" fn ringseal_last_error() -> *const c_char {
    MESSAGE.try_with(|kept| kept.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// The name of a status, such as "authentication"; "unknown" for numbers that are none. Static: don't free it.
#[unsafe(no_mangle)]
pub extern "C" fn ringseal_status_name(status: i32) -> *const c_char {
    const NAMES: [&std::ffi::CStr; 17] = [
        c"ok",
        c"authentication",
        c"deadline",
        c"aborted",
        c"handshake",
        c"poisoned",
        c"invalid argument",
        c"length",
        c"key exhausted",
        c"unsupported",
        c"no device",
        c"cuda",
        c"io",
        c"randomness",
        c"busy",
        c"internal",
        c"lost",
    ];
    usize::try_from(status).ok().and_then(|status| NAMES.get(status)).unwrap_or(&c"unknown").as_ptr()
}
