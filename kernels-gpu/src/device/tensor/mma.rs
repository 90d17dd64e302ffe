//! The warp's products on the GPU.

use super::{Fragment, Quad};
use core::arch::asm;

/// `counts + a x b`: 16 x 256 bits by 256 x 8, the fragments as the PTX ISA lays them out (see the module above). Done when
/// it returns.
///
/// # Safety
/// The warp's 32 threads together, under control flow that is uniform for the compiler to see.
#[inline(always)]
pub unsafe fn multiply_warp(counts: Fragment, a: &Quad, b: [u32; 2]) -> Fragment {
    let [mut c, mut d, mut e, mut f] = counts;
    // SAFETY: the caller's. Volatile, or it would be moved to where only some lanes need it.
    unsafe {
        asm!(
            "mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {{{0}, {1}, {2}, {3}}}, {{{4}, {5}, {6}, {7}}}, {{{8}, {9}}}, {{{0}, {1}, {2}, {3}}};",
            inout(reg32) c, inout(reg32) d, inout(reg32) e, inout(reg32) f,
            in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3],
            in(reg32) b[0], in(reg32) b[1],
            options(nomem, nostack)
        )
    }
    [c, d, e, f]
}
