//! Binary matrix products on the tensor cores: 64 x 256 bits by 256 x 128 (`wgmma`, compute capability 9.0) and
//! 16 x 256 by 256 x 8 (`mma.sync`, 8.0 and newer), and'ed, counted and added. The low bit of a count is the sum over
//! GF(2).
//!
//! Operands lie as the PTX ISA says (sections "Asynchronous Warpgroup Level Matrix Instructions" and "Matrix
//! multiply-accumulate operation using mma instruction"). With g = lane / 4, t = lane mod 4 and w the warp in its group:
//! * A, four words a thread: row 16 w + g bits 32 t to 32 t + 31, row 16 w + g + 8 the same bits, then both rows' bits
//!   128 + 32 t to 128 + 32 t + 31.
//! * Accumulators, 64 a thread: number i is row 16 w + g + 8 ((i / 2) mod 2), column 8 (i / 4) + 2 t + i mod 2.
//! * Of `mma.sync`, B: column g, bits 32 t to 32 t + 31, then bits 128 + 32 t to 128 + 32 t + 31; accumulators: row g, columns
//!   2 t and 2 t + 1, then row g + 8. That is what the 8 columns from 8 j on are of a warpgroup's product: A is the same, and
//!   number i of the accumulators is number 4 j + i there.
//! * B of `wgmma`, in shared memory: see [`matrix_word_place`](crate::gf128::matrix_word_place).

#[cfg(not(target_arch = "nvptx64"))]
mod emulated;
#[cfg(target_arch = "nvptx64")]
mod mma;
#[cfg(target_arch = "nvptx64")]
mod wgmma;

#[cfg(not(target_arch = "nvptx64"))]
pub use emulated::*;
#[cfg(target_arch = "nvptx64")]
pub use mma::*;
#[cfg(target_arch = "nvptx64")]
pub use wgmma::*;

use super::Quad;

/// One thread's share of a warpgroup's 64 x 128 counts.
pub struct Counts([u32; 64]);

/// One thread's share of the counts of columns 0 to 47.
pub struct FirstCounts([u32; 24]);

/// One thread's share of the counts of the other columns.
pub struct SecondCounts([u32; 40]);

/// Columns of a product that are multiplied and packed by themselves: all of them, or [`FirstCounts`] and then [`SecondCounts`], for
/// whose counts 40 registers do in place of 64.
pub trait Part {
    /// All zero.
    fn zero() -> Self;

    /// Starts `self = [self +] a x b`, b being the matrix at shared address `b`; `ACCUMULATE` tells whether the old counts are
    /// added. Neither these nor `a` may be touched until [`wait`](Self::wait).
    ///
    /// # Safety
    /// The warpgroup's 128 threads together, under control flow that the compiler can see is uniform. `b` is 16-byte
    /// aligned, the matrix is written and visible to the asynchronous proxy.
    unsafe fn multiply<const ACCUMULATE: bool>(&mut self, a: &Quad, b: u32);

    /// Waits for every group issued. `operands` are all A operands since the last wait: naming them here keeps their
    /// registers alive and unchanged until then.
    fn wait<const N: usize>(&mut self, operands: &[Quad; N]);

    /// The low bits of the counts, all below [`COUNT_END`], added to what this makes of the other columns' counts: of row g in
    /// the first word, of row g + 8 in the second, in the order of [`count_bit`](crate::gf128::count_bit). With columns in the
    /// order of [`column_bit`](crate::gf128::column_bit) that is raw word t of each row's product, which is an A operand again.
    fn pack(&self, words: [u32; 2]) -> [u32; 2];
}

/// One thread's share of a warp's 16 x 8 counts.
pub type Fragment = [u32; 4];

/// What counts must stay below to be packed: eight products of 256 bits are too many.
pub const COUNT_END: u32 = 2048;
