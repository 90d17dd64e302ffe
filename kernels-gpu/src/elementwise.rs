//! Reduction and wiping as kernels of their own, for collectives whose steps are launches.
//!
//! A reduction reads two vectors and writes one: its limit is the device memory's rate.

use crate::device::{Quad, global, thread};
use crate::reduce::{Reduction, combine, combine_common, finish, finish_common};
use crate::ring::{load_quad, store_quad};

/// Threads of a block.
const THREADS: u32 = 512;

/// Parameters of [`reduce_common()`] and [`reduce_any()`].
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ReduceParams {
    /// Address of the first operand, aligned to an element.
    pub partial: u64,
    /// Address of the second, aligned to an element.
    pub local: u64,
    /// Address of the result, aligned to an element: one of the operands, or apart from both.
    pub output: u64,
    /// Bytes of each.
    pub bytes: u64,
    /// Element type and operation: [`reduction`](crate::reduce::reduction).
    pub reduction: Reduction,
    /// Ranks that an average is divided by.
    pub ranks: u32,
    /// 1 when the result is complete: an average is divided now.
    pub complete: u32,
}

kernel! {
    threads = 512, shared = 0,
    /// `output = partial op local`, for sums and averages of f32, f16 and bf16, on any grid.
    fn reduce_common(params: ReduceParams) {
        // SAFETY: by the launcher's promise.
        unsafe { reduce::<true>(&params) }
    }
}

kernel! {
    threads = 512, shared = 0,
    /// `output = partial op local`, for every element type and operation, on any grid.
    fn reduce_any(params: ReduceParams) {
        // SAFETY: by the launcher's promise.
        unsafe { reduce::<false>(&params) }
    }
}

/// The kernels' body.
///
/// # Safety
/// The addresses in the parameters are valid.
#[inline(always)]
unsafe fn reduce<const COMMON: bool>(params: &ReduceParams) {
    let stride = thread::grid_size() as u64 * THREADS as u64 * 16;
    let mut at = (thread::block_index() * THREADS + thread::index()) as u64 * 16;
    if COMMON && (params.partial | params.local | params.output).is_multiple_of(16) {
        // All loads before the first store. What isn't four whole quads is left to the loop below.
        while at + 3 * stride + 16 <= params.bytes {
            // SAFETY: by the caller's promise.
            unsafe {
                let load = |base: u64| {
                    [
                        global::load_16(base + at),
                        global::load_16(base + at + stride),
                        global::load_16(base + at + 2 * stride),
                        global::load_16(base + at + 3 * stride),
                    ]
                };
                let [a, b, c, d] = load(params.partial);
                let [e, f, g, h] = load(params.local);
                global::store_16(params.output + at, reduced::<COMMON>(params, a, e));
                global::store_16(params.output + at + stride, reduced::<COMMON>(params, b, f));
                global::store_16(params.output + at + 2 * stride, reduced::<COMMON>(params, c, g));
                global::store_16(params.output + at + 3 * stride, reduced::<COMMON>(params, d, h));
            }
            at += 4 * stride;
        }
    }
    while at < params.bytes {
        let rest = params.bytes - at;
        let bytes = if rest < 16 { rest as u32 } else { 16 };
        // SAFETY: by the caller's promise; a quad is read before the same thread overwrites it.
        unsafe {
            let partial = load_quad(params.partial + at, 0, bytes);
            let local = load_quad(params.local + at, 0, bytes);
            store_quad(params.output + at, 0, bytes, reduced::<COMMON>(params, partial, local));
        }
        at += stride;
    }
}

#[inline(always)]
fn reduced<const COMMON: bool>(params: &ReduceParams, partial: Quad, local: Quad) -> Quad {
    let ReduceParams { reduction, ranks, complete, .. } = *params;
    match (COMMON, complete != 0) {
        (true, false) => combine_common(reduction, partial, local),
        (true, true) => finish_common(reduction, ranks, combine_common(reduction, partial, local)),
        (false, false) => combine(reduction, partial, local),
        (false, true) => finish(reduction, ranks, combine(reduction, partial, local)),
    }
}

/// Parameters of [`wipe_if_failed()`].
#[derive(Clone, Copy)]
#[repr(C)]
pub struct WipeParams {
    /// Address of a word of 8 bytes: 0 unless something failed.
    pub failure: u64,
    /// Address of what is wiped then.
    pub output: u64,
    /// Its bytes.
    pub bytes: u64,
}

kernel! {
    threads = 512, shared = 0,
    /// Overwrites a result with zeros if anything that it was made from failed, on any grid.
    fn wipe_if_failed(params: WipeParams) {
        // SAFETY: by the launcher's promise.
        unsafe {
            if global::load_volatile_u64(params.failure) == 0 {
                return;
            }
            let stride = thread::grid_size() as u64 * 512 * 16;
            let mut at = (thread::block_index() * 512 + thread::index()) as u64 * 16;
            while at < params.bytes {
                let rest = params.bytes - at;
                store_quad(params.output + at, 0, if rest < 16 { rest as u32 } else { 16 }, [0; 4]);
                at += stride;
            }
        }
    }
}
