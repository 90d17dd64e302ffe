//! A GPU's thread blocks on one CPU thread: runs kernels' own source in tests and where there is no GPU.
//!
//! ```
//! use ringseal_kernels::device::{emulated, thread, global};
//! let mut out = [0u32; 64];
//! let address = out.as_mut_ptr() as u64;
//! emulated::launch(&[emulated::Launch::new(2, 32, 0, move || {
//!     let i = thread::block_index() * 32 + thread::index();
//!     // SAFETY: one word of `out` a thread.
//!     unsafe { global::store_u32(address + 4 * u64::from(i), i) }
//! })]);
//! assert_eq!(out[63], 63);
//! ```
//!
//! A thread is a stackful coroutine. The threads of a block run one after another, in order, each until it must wait; blocks
//! and grids take turns when all threads of a block wait or [`spin_pause`](super::spin_pause). The order never varies, and
//! [`nanotime`](super::nanotime) counts rounds of turns (1 us each), not time, so that every run is the same.
//!
//! It panics, with the places in the source, where a GPU would be silently wrong:
//! * **race**: two threads access a word of shared memory, one of them writing, and no barrier of a scope that holds both
//!   orders them;
//! * **poison**: a load of shared memory that nothing in this launch has stored;
//! * an access outside the launch's shared memory, or a misaligned one to any memory;
//! * wgmma reads what a thread stored without a fence for the asynchronous proxy;
//! * **divergence**: threads of one scope at different barriers, shuffles or other collective operations, or one of them
//!   gone;
//! * a block that waits for something that can no longer happen.
//!
//! An asynchronous copy is done as late as can be: when its thread waits for it.
//!
//! What it doesn't check: races in global memory, and reorderings by weak memory.

mod block;
pub mod copy_async;
mod memory;
pub mod primitives;
mod scheduler;

pub use block::{Order, Scope, collective, load_async};
pub use scheduler::{Launch, launch};
