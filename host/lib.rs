//! Sealed collectives for GPUs, with crypto kernels written in Rust and compiled to PTX.

pub mod aead;
pub mod backend;
pub mod channel;
pub mod collective;
pub mod cuda;
mod dtype;
mod error;
pub mod ptx;
pub mod study;
pub mod transport;
pub mod vectors;

pub use dtype::{Dtype, ReduceOp};
pub use error::{Error, Result};
