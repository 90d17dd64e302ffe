//! Builds, checks and describes the PTX of ringseal's kernels.
//!
//! The kernels are Rust (`kernels-gpu`), compiled by rustc's own `nvptx64-nvidia-cuda` target once for each
//! [`manifest::Target`]. The PTX and its [`manifest::Manifest`] are checked in under `host/ptx`, so that nobody who only
//! uses ringseal needs the standard library's sources. Who calls what:
//!
//! * `build.rs` of the root package calls [`embed::embed`];
//! * `cargo ptx build | compare | lint | report` (the binary of this package) call the functions in [`commands`];
//! * the `ringseal` library takes only [`manifest`], [`header`], which writes it out for C, and [`braces`].

pub mod braces;
pub mod header;
pub mod manifest;

#[cfg(feature = "build")]
pub mod commands;
#[cfg(feature = "build")]
pub mod embed;
#[cfg(feature = "build")]
mod layout;
#[cfg(feature = "build")]
mod ptx;
#[cfg(feature = "build")]
mod ptxas;
#[cfg(feature = "build")]
mod recipe;
#[cfg(feature = "build")]
mod sass;
#[cfg(feature = "build")]
mod sources;

/// What went wrong, in words that say what to do about it.
#[derive(Debug)]
pub struct Error(String);

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Error {}

impl Error {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    #[cfg(feature = "build")]
    pub(crate) fn io(path: &std::path::Path, error: std::io::Error) -> Self {
        Self(format!("{}: {error}", path.display()))
    }
}

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
