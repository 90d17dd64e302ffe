//! Division of finished sums in device memory, for averages whose last reduction doesn't know by how many.

use ringseal_kernels::elementwise::{ReduceParams, reduce_common};
use ringseal_kernels::reduce::{is_common, reduction};

use super::{DeviceBuffer, Kernel, Launch, Module, Stream};
use crate::{Dtype, ReduceOp, Result};

/// Bytes that one launch divides, and so of the other operand.
const PIECE: usize = 4 << 20;

/// Divides by the kernels of a reduction, whose other operand changes nothing: it has kernels that divide only what they have
/// reduced.
#[derive(Debug)]
pub(super) struct Divider {
    common: Kernel,
    any: Kernel,
    blocks: u32,
    /// Elements that a sum is the same with, and their type.
    neutral: DeviceBuffer,
    dtype: Option<Dtype>,
}

impl Divider {
    /// # Errors
    /// Those of compiling and allocating.
    pub(super) fn new(module: &Module) -> Result<Self> {
        let device = module.device();
        Ok(Self {
            common: module.kernel("reduce_common", 0)?,
            any: module.kernel("reduce_any", 0)?,
            blocks: device.multiprocessors()?,
            neutral: DeviceBuffer::new(device, PIECE)?,
            dtype: None,
        })
    }

    /// Queues the division of `bytes` bytes at `sums`, elements of type `dtype`, by a number of ranks. Waits for the stream
    /// when the type is another than before.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda).
    ///
    /// # Safety
    /// The sums are in memory of the module's device, aligned to an element, and are left alone until `stream`, which comes
    /// after earlier divisions' streams, has passed.
    pub(super) unsafe fn divide(
        &mut self,
        dtype: Dtype,
        sums: u64,
        bytes: usize,
        ranks: usize,
        stream: &Stream,
    ) -> Result<()> {
        if self.dtype != Some(dtype) {
            self.dtype = None;
            stream.synchronize()?;
            self.neutral.write(0, &neutral(dtype).repeat(PIECE / dtype.size()), stream)?;
            self.dtype = Some(dtype);
        }
        let reduction = reduction(dtype as u32, ReduceOp::Avg as u32);
        let kernel = if is_common(reduction) { &self.common } else { &self.any };
        for begin in (0..bytes).step_by(PIECE) {
            let (piece, at) = (PIECE.min(bytes - begin), sums + begin as u64);
            let params = ReduceParams {
                partial: at,
                local: self.neutral.pointer(),
                output: at,
                bytes: piece as u64,
                reduction,
                ranks: ranks as u32,
                complete: 1,
            };
            let threads = reduce_common::THREADS;
            let blocks = (piece.div_ceil(16 * threads as usize) as u32).min(self.blocks);
            // SAFETY: the kernel's parameters; the caller's promise, and the other operand is as long as a piece.
            unsafe { kernel.launch(Launch { blocks, threads }, stream, &params)? };
        }
        Ok(())
    }
}

/// An element whose sum with any other is the other: of floating-point numbers -0, since 0 would make 0 of -0 (IEEE 754-2019,
/// section 6.3).
fn neutral(dtype: Dtype) -> Vec<u8> {
    let mut element = vec![0; dtype.size()];
    if matches!(dtype, Dtype::F32 | Dtype::F64 | Dtype::F16 | Dtype::Bf16) {
        element[dtype.size() - 1] = 0x80;
    }
    element
}

#[cfg(test)]
mod tests {
    use ringseal_kernels::reduce::{combine, combine_common, finish, finish_common};

    use super::*;
    use crate::collective::divide;

    /// The kernels' arithmetic on any bits: special values among them.
    #[test]
    fn sums_are_divided_as_on_the_host() {
        for dtype in Dtype::ALL {
            let reduction = reduction(dtype as u32, ReduceOp::Avg as u32);
            let quad = |bytes: &[u8]| {
                [0, 4, 8, 12].map(|at| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()))
            };
            let other = quad(&neutral(dtype).repeat(16 / dtype.size()));
            for seed in 0..20_000_u32 {
                // Zeros and the greatest exponents of each type come up, by few random bits in many bytes.
                let word = |i: u32| {
                    let random =
                        (seed * 4 + i).wrapping_mul(0x9e37_79b9).rotate_left(15).wrapping_mul(0x85eb_ca6b);
                    match seed % 5 {
                        0 => random & 0x8000_8000,
                        1 => random | 0x7f80_7c00,
                        2 => random & 0x80ff_80ff,
                        _ => random,
                    }
                };
                let sums = [0, 1, 2, 3].map(word);
                for ranks in [1, 3, 64] {
                    let mut expected: Vec<u8> = sums.iter().flat_map(|word| word.to_le_bytes()).collect();
                    divide(dtype, &mut expected, ranks as usize);
                    let found = finish(reduction, ranks, combine(reduction, sums, other));
                    assert_eq!(found, quad(&expected), "{dtype:?}: {sums:x?} by {ranks}");
                    if is_common(reduction) {
                        let found = finish_common(reduction, ranks, combine_common(reduction, sums, other));
                        assert_eq!(found, quad(&expected), "{dtype:?}: {sums:x?} by {ranks}, common");
                    }
                }
            }
        }
    }
}
