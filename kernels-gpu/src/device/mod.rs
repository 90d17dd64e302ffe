//! Everything a kernel asks of the hardware, in two implementations with the same functions: `nvptx` (LLVM intrinsics and
//! PTX) and [`emulated`] (a thread block on the CPU). Kernels use nothing else, so their own source runs, and is tested,
//! where there is no GPU. Named after `cuda_std` (`thread`, `warp`, `shared`).
//!
//! * Blocks are one-dimensional. All addresses are plain numbers: `u64` for global memory, `u32` for shared memory, where
//!   they are absolute (the dynamic window begins at [`SHARED_BASE`](crate::params::SHARED_BASE)).
//! * Memory is little-endian; a 16-byte access is `[u32; 4]` and must be aligned to 16.
//! * Barriers, shuffles and votes must be reached by all threads of their scope together. They are LLVM intrinsics and never
//!   `asm!`, which LLVM may duplicate into divergent branches.
//!
//! The emulator panics where a GPU would be silently wrong: see [`emulated`].

#[cfg(not(target_arch = "nvptx64"))]
pub mod emulated;
#[cfg(target_arch = "nvptx64")]
mod nvptx;
pub mod tensor;

#[cfg(not(target_arch = "nvptx64"))]
pub use emulated::{copy_async, primitives::*};
#[cfg(target_arch = "nvptx64")]
pub use nvptx::*;

/// A quad: the 16 bytes of one cipher block or one vector access, as little-endian words.
pub type Quad = [u32; 4];

/// Declares kernels.
///
/// ```ignore
/// kernel! {
///     threads = 512,
///     shared = TABLES_END - SHARED_BASE,
///     /// What it does.
///     fn name(params: NameParams) { .. }
/// }
/// ```
///
/// On the GPU that is an entry point, and a comment in the PTX that carries threads and shared memory to the build (rustc has
/// no launch bounds). On the CPU it is an `unsafe fn` that the emulator calls once a thread, and a module of the same name with
/// `THREADS` and `SHARED` for the launch. The parameter is one `#[repr(C)]` `Copy` structure, passed by value and indexed by
/// constants only: a run-time index would move it to local memory.
///
/// # Safety of the kernels
/// The addresses in the parameters are valid for the accesses that the kernel documents, for as long as it runs.
#[cfg(not(target_arch = "nvptx64"))]
#[macro_export]
macro_rules! kernel {
    (
        threads = $threads:expr, shared = $shared:expr,
        $(#[$meta:meta])* fn $name:ident($params:ident : $type:ty) $body:block
    ) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// Runs on each thread of a block; the addresses in the parameters are valid for what is documented.
        pub unsafe fn $name($params: $type) $body

        /// How to launch the kernel of this name.
        pub mod $name {
            /// Threads of a block.
            pub const THREADS: u32 = {
                #[allow(unused_imports)]
                use super::*;
                $threads
            };
            /// Bytes of dynamic shared memory.
            pub const SHARED: u32 = {
                #[allow(unused_imports)]
                use super::*;
                $shared
            };
        }
    };
}

/// See the emulated form.
#[cfg(target_arch = "nvptx64")]
#[macro_export]
macro_rules! kernel {
    (
        threads = $threads:expr, shared = $shared:expr,
        $(#[$meta:meta])* fn $name:ident($params:ident : $type:ty) $body:block
    ) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// Runs on each thread of a block; the addresses in the parameters are valid for what is documented.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name($params: $type) $body

        ::core::arch::global_asm!(
            concat!("// ringseal.kernel ", stringify!($name), " params=", stringify!($type), " threads={} shared={}"),
            const $threads,
            const $shared,
        );
    };
}
