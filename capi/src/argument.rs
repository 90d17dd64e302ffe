//! Arguments as C passes them, checked.

use std::ffi::{CStr, c_char};

use ringseal::{Dtype, ReduceOp};

use crate::status::Failure;

/// The longest object that a pointer can span.
const LONGEST: usize = isize::MAX as usize;

/// What a handle or structure pointer leads to.
///
/// # Safety
/// Null, or valid for reads for `'a`.
pub(crate) unsafe fn reference<'a, T>(name: &str, pointer: *const T) -> Result<&'a T, Failure> {
    if !pointer.is_null() && !pointer.is_aligned() {
        return Err(Failure::argument(format!("{name} is misaligned")));
    }
    // SAFETY: valid by the caller's contract; alignment is checked above.
    unsafe { pointer.as_ref() }.ok_or_else(|| Failure::argument(format!("{name} is null")))
}

/// Where a result goes.
///
/// # Safety
/// Null, or valid for writes for `'a`, with no other access.
pub(crate) unsafe fn place<T>(name: &str, pointer: *mut T) -> Result<*mut T, Failure> {
    match pointer.is_null() || !pointer.is_aligned() {
        true => Err(Failure::argument(format!("{name} is null or misaligned"))),
        false => Ok(pointer),
    }
}

fn check(name: &str, null: bool, bytes: usize) -> Result<(), Failure> {
    if bytes > LONGEST {
        return Err(Failure::argument(format!("{name}: {bytes} bytes are more than an address space has")));
    }
    if null && bytes > 0 {
        return Err(Failure::argument(format!("{name} is null, but should have {bytes} bytes")));
    }
    Ok(())
}

/// Bytes that the caller gives. Null is allowed for none.
///
/// # Safety
/// Null, or valid for reads of `bytes` bytes for `'a`, which nobody changes meanwhile.
pub(crate) unsafe fn bytes<'a>(name: &str, pointer: *const u8, bytes: usize) -> Result<&'a [u8], Failure> {
    check(name, pointer.is_null(), bytes)?;
    match bytes {
        0 => Ok(&[]),
        // SAFETY: not null and not too long, as checked; otherwise the caller's contract.
        _ => Ok(unsafe { std::slice::from_raw_parts(pointer, bytes) }),
    }
}

/// Numbers that the caller gives. Null is allowed for none.
///
/// # Safety
/// Null, or valid for reads of `count` numbers for `'a`, which nobody changes meanwhile.
pub(crate) unsafe fn numbers<'a>(
    name: &str,
    pointer: *const usize,
    count: usize,
) -> Result<&'a [usize], Failure> {
    check(name, pointer.is_null(), count.saturating_mul(size_of::<usize>()))?;
    match count {
        0 => Ok(&[]),
        _ if !pointer.is_aligned() => Err(Failure::argument(format!("{name} is misaligned"))),
        // SAFETY: not null, aligned and not too long, as checked; otherwise the caller's contract.
        _ => Ok(unsafe { std::slice::from_raw_parts(pointer, count) }),
    }
}

/// Bytes that the caller gives to be written. Null is allowed for none.
///
/// # Safety
/// Null, or valid for reads and writes of `bytes` bytes for `'a`, with no other access.
pub(crate) unsafe fn bytes_mut<'a>(
    name: &str,
    pointer: *mut u8,
    bytes: usize,
) -> Result<&'a mut [u8], Failure> {
    check(name, pointer.is_null(), bytes)?;
    match bytes {
        0 => Ok(&mut []),
        // SAFETY: not null and not too long, as checked; otherwise the caller's contract.
        _ => Ok(unsafe { std::slice::from_raw_parts_mut(pointer, bytes) }),
    }
}

/// A text that may be null.
///
/// # Safety
/// Null, or a zero-terminated string that nobody changes for `'a`.
pub(crate) unsafe fn text<'a>(name: &str, pointer: *const c_char) -> Result<Option<&'a str>, Failure> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: not null; otherwise the caller's contract.
    let text = unsafe { CStr::from_ptr(pointer) }.to_str();
    text.map(Some).map_err(|_| Failure::argument(format!("{name} is not UTF-8")))
}

pub(crate) fn dtype(code: u32) -> Result<Dtype, Failure> {
    let known = Dtype::ALL.into_iter().find(|&dtype| dtype as u32 == code);
    known.ok_or_else(|| Failure::argument(format!("{code} is no element type (enum ringseal_dtype)")))
}

pub(crate) fn op(code: u32) -> Result<ReduceOp, Failure> {
    let known = ReduceOp::ALL.into_iter().find(|&op| op as u32 == code);
    known.ok_or_else(|| Failure::argument(format!("{code} is no reduction (enum ringseal_op)")))
}

/// Bytes of `count` elements.
pub(crate) fn length(count: usize, dtype: Dtype) -> Result<usize, Failure> {
    let bytes = count.checked_mul(dtype.size()).filter(|&bytes| bytes <= LONGEST);
    bytes.ok_or_else(|| {
        Failure::argument(format!(
            "{count} elements of {} bytes are more than an address space has",
            dtype.size()
        ))
    })
}
