//! The C interface of ringseal: `include/ringseal.h` is made from this crate, which builds `libringseal_c`, shared and
//! static.
//!
//! Each function that can fail returns a [`Status`](status::Status) and leaves a message with the calling thread. No
//! panic passes the boundary.

pub mod aead;
mod argument;
pub mod communicator;
pub mod gpu;
pub mod gpu_aead;
pub mod gpu_copy;
pub mod status;

use std::ffi::c_char;

/// The version of the interface that this header describes. A library with another number has another interface:
/// compare it with ringseal_abi_version() where the library is loaded at run time. Functions, numbers of enumerations, and fields
/// at the end of options may be added without another version: options say by struct_bytes which fields they have, and a
/// library takes those of earlier headers.
pub const ABI_VERSION: u32 = 1;

/// The version of the interface that the library has: RINGSEAL_ABI_VERSION of its header.
#[unsafe(no_mangle)]
pub extern "C" fn ringseal_abi_version() -> u32 {
    ABI_VERSION
}

/// The library's version, such as "0.1.0". Static: don't free it.
#[unsafe(no_mangle)]
pub extern "C" fn ringseal_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
