//! The arithmetic of a reduction, on little-endian bytes of any alignment.
//!
//! Integers wrap. f16 and bf16 are combined in f32 and rounded to nearest even. -0 is less than +0. NaN propagates,
//! also through minimum and maximum, and every NaN that comes out of an operation is the canonical quiet one: IEEE
//! 754-2019, 6.2.3 leaves the payload open, it differs between CPUs and GPUs, and all ranks must hold the same bits.

use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};

use crate::{Dtype, ReduceOp};

/// Elements of f16 or bf16 converted at a time: two f32 blocks of this length stay in the first-level cache.
const BLOCK: usize = 512;

/// Reduces `other` into `accumulator`, element by element. Both have the same length, a multiple of the element's.
pub(crate) fn combine(dtype: Dtype, op: ReduceOp, accumulator: &mut [u8], other: &[u8]) {
    debug_assert_eq!(accumulator.len(), other.len());
    match dtype {
        Dtype::F32 => float32(op, accumulator, other),
        Dtype::F64 => float64(op, accumulator, other),
        Dtype::F16 | Dtype::Bf16 => halves(dtype, op, accumulator, other),
        Dtype::I8 => int8(op, accumulator, other),
        Dtype::U8 => uint8(op, accumulator, other),
        Dtype::I32 => int32(op, accumulator, other),
        Dtype::U32 => uint32(op, accumulator, other),
        Dtype::I64 => int64(op, accumulator, other),
        Dtype::U64 => uint64(op, accumulator, other),
    }
}

/// Divides finished sums by the number of ranks; integers towards zero.
pub(crate) fn divide(dtype: Dtype, sums: &mut [u8], ranks: usize) {
    // At most `channel::MAX_RANKS`, so every conversion below is exact.
    let n = ranks as u16;
    match dtype {
        Dtype::F32 => each(sums, |a| canonical32(f32::from_le_bytes(a) / f32::from(n)).to_le_bytes()),
        Dtype::F64 => each(sums, |a| canonical64(f64::from_le_bytes(a) / f64::from(n)).to_le_bytes()),
        Dtype::F16 => each(sums, |a| {
            f16::from_f32(canonical32(f16::from_le_bytes(a).to_f32() / f32::from(n))).to_le_bytes()
        }),
        Dtype::Bf16 => each(sums, |a| {
            bf16::from_f32(canonical32(bf16::from_le_bytes(a).to_f32() / f32::from(n))).to_le_bytes()
        }),
        Dtype::I8 => each(sums, |a| ((i32::from(i8::from_le_bytes(a)) / i32::from(n)) as i8).to_le_bytes()),
        Dtype::U8 => each(sums, |a| ((u16::from(u8::from_le_bytes(a)) / n) as u8).to_le_bytes()),
        Dtype::I32 => each(sums, |a| (i32::from_le_bytes(a) / i32::from(n)).to_le_bytes()),
        Dtype::U32 => each(sums, |a| (u32::from_le_bytes(a) / u32::from(n)).to_le_bytes()),
        Dtype::I64 => each(sums, |a| (i64::from_le_bytes(a) / i64::from(n)).to_le_bytes()),
        Dtype::U64 => each(sums, |a| (u64::from_le_bytes(a) / u64::from(n)).to_le_bytes()),
    }
}

/// Whether sums of this type are kept in f32 until a step ends.
pub(crate) const fn is_narrow(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F16 | Dtype::Bf16)
}

/// The f32 form of f16 or bf16 elements, appended to `wide`.
pub(crate) fn widen(dtype: Dtype, narrow: &[u8], wide: &mut Vec<u8>) {
    let mut floats = [0.0; BLOCK];
    for block in narrow.chunks(2 * BLOCK) {
        let floats = &mut floats[..block.len() / 2];
        load(dtype, block, floats);
        floats.iter().for_each(|float| wide.extend(float.to_le_bytes()));
    }
}

/// Rounds f32 elements to f16 or bf16.
pub(crate) fn narrow(dtype: Dtype, wide: &[u8], narrow: &mut [u8]) {
    let mut floats = [0.0; BLOCK];
    for (block, out) in wide.chunks(4 * BLOCK).zip(narrow.chunks_mut(2 * BLOCK)) {
        let floats = &mut floats[..block.len() / 4];
        floats
            .iter_mut()
            .zip(block.as_chunks().0)
            .for_each(|(float, bytes)| *float = f32::from_le_bytes(*bytes));
        store(dtype, floats, out);
    }
}

fn halves(dtype: Dtype, op: ReduceOp, accumulator: &mut [u8], other: &[u8]) {
    let (mut left, mut right) = ([0.0; BLOCK], [0.0; BLOCK]);
    for (accumulator, other) in accumulator.chunks_mut(2 * BLOCK).zip(other.chunks(2 * BLOCK)) {
        let (left, right) = (&mut left[..other.len() / 2], &mut right[..other.len() / 2]);
        load(dtype, accumulator, left);
        load(dtype, other, right);
        float32(op, bytemuck::cast_slice_mut(left), bytemuck::cast_slice(right));
        store(dtype, left, accumulator);
    }
}

/// At most a block of f16 or bf16 elements as f32.
fn load(dtype: Dtype, narrow: &[u8], floats: &mut [f32]) {
    let mut bits = [0; BLOCK];
    let bits = &mut bits[..floats.len()];
    bits.iter_mut().zip(narrow.as_chunks().0).for_each(|(bits, bytes)| *bits = u16::from_le_bytes(*bytes));
    if dtype == Dtype::F16 {
        bits.reinterpret_cast::<f16>().convert_to_f32_slice(floats);
    } else {
        floats.iter_mut().zip(bits).for_each(|(float, bits)| *float = f32::from_bits(u32::from(*bits) << 16));
    }
}

fn store(dtype: Dtype, floats: &[f32], narrow: &mut [u8]) {
    let mut bits = [0; BLOCK];
    let bits = &mut bits[..floats.len()];
    if dtype == Dtype::F16 {
        bits.reinterpret_cast_mut::<f16>().convert_from_f32_slice(floats);
    } else {
        bits.iter_mut().zip(floats).for_each(|(bits, float)| *bits = bf16_bits(*float));
    }
    narrow.as_chunks_mut().0.iter_mut().zip(bits).for_each(|(bytes, bits)| *bytes = bits.to_le_bytes());
}

/// Rounds to nearest even: adds just under half a unit, or exactly half when the last kept bit is odd. A form that
/// vectorises, unlike `bf16::from_f32`; the canonical NaN stays one.
fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

fn each<const N: usize>(accumulator: &mut [u8], f: impl Fn([u8; N]) -> [u8; N]) {
    accumulator.as_chunks_mut().0.iter_mut().for_each(|a| *a = f(*a));
}

fn pairs<const N: usize>(accumulator: &mut [u8], other: &[u8], f: impl Fn([u8; N], [u8; N]) -> [u8; N]) {
    let pairs = accumulator.as_chunks_mut().0.iter_mut().zip(other.as_chunks().0);
    pairs.for_each(|(a, b)| *a = f(*a, *b));
}

macro_rules! integer {
    ($name:ident, $int:ty) => {
        fn $name(op: ReduceOp, accumulator: &mut [u8], other: &[u8]) {
            let with = |f: fn($int, $int) -> $int| {
                move |a, b| f(<$int>::from_le_bytes(a), <$int>::from_le_bytes(b)).to_le_bytes()
            };
            match op {
                ReduceOp::Sum | ReduceOp::Avg => pairs(accumulator, other, with(<$int>::wrapping_add)),
                ReduceOp::Min => pairs(accumulator, other, with(Ord::min)),
                ReduceOp::Max => pairs(accumulator, other, with(Ord::max)),
                ReduceOp::Prod => pairs(accumulator, other, with(<$int>::wrapping_mul)),
            }
        }
    };
}

integer!(int8, i8);
integer!(uint8, u8);
integer!(int32, i32);
integer!(uint32, u32);
integer!(int64, i64);
integer!(uint64, u64);

macro_rules! float {
    ($name:ident, $float:ty, $int:ty, $uint:ty, $canonical:ident, $nan:expr) => {
        fn $name(op: ReduceOp, accumulator: &mut [u8], other: &[u8]) {
            /// As a signed integer that sorts like the float (IEEE 754-2019, 5.10).
            fn order(value: $float) -> $int {
                let bits = value.to_bits() as $int;
                bits ^ ((bits >> (<$int>::BITS - 1)) as $uint >> 1) as $int
            }
            // Not `min` and `max` of the standard library, which drop a NaN (IEEE 754-2008, 5.3.1).
            fn least(a: $float, b: $float) -> $float {
                if a.is_nan() || b.is_nan() {
                    $nan
                } else if order(a) < order(b) {
                    a
                } else {
                    b
                }
            }
            fn greatest(a: $float, b: $float) -> $float {
                if a.is_nan() || b.is_nan() {
                    $nan
                } else if order(a) > order(b) {
                    a
                } else {
                    b
                }
            }
            match op {
                ReduceOp::Sum | ReduceOp::Avg => pairs(accumulator, other, |a, b| {
                    $canonical(<$float>::from_le_bytes(a) + <$float>::from_le_bytes(b)).to_le_bytes()
                }),
                ReduceOp::Min => pairs(accumulator, other, |a, b| {
                    least(<$float>::from_le_bytes(a), <$float>::from_le_bytes(b)).to_le_bytes()
                }),
                ReduceOp::Max => pairs(accumulator, other, |a, b| {
                    greatest(<$float>::from_le_bytes(a), <$float>::from_le_bytes(b)).to_le_bytes()
                }),
                ReduceOp::Prod => pairs(accumulator, other, |a, b| {
                    $canonical(<$float>::from_le_bytes(a) * <$float>::from_le_bytes(b)).to_le_bytes()
                }),
            }
        }

        fn $canonical(value: $float) -> $float {
            if value.is_nan() { $nan } else { value }
        }
    };
}

float!(float32, f32, i32, u32, canonical32, f32::from_bits(0x7fc0_0000));
float!(float64, f64, i64, u64, canonical64, f64::from_bits(0x7ff8_0000_0000_0000));

#[cfg(test)]
mod tests {
    use super::*;

    fn reduce<const N: usize>(dtype: Dtype, op: ReduceOp, a: [u8; N], b: [u8; N]) -> [u8; N] {
        let mut accumulator = a;
        combine(dtype, op, &mut accumulator, &b);
        let mut swapped = b;
        combine(dtype, op, &mut swapped, &a);
        assert_eq!(accumulator, swapped, "{dtype:?} {op:?}: every operation commutes, bit for bit");
        accumulator
    }

    #[test]
    fn integers_wrap() {
        let add = |a: i8, b: i8| {
            i8::from_le_bytes(reduce(Dtype::I8, ReduceOp::Sum, a.to_le_bytes(), b.to_le_bytes()))
        };
        assert_eq!(add(120, 100), -36);
        let product = reduce(Dtype::U64, ReduceOp::Prod, u64::MAX.to_le_bytes(), u64::MAX.to_le_bytes());
        assert_eq!(u64::from_le_bytes(product), 1);
        let mut sum = i64::MIN.to_le_bytes();
        divide(Dtype::I64, &mut sum, 3);
        assert_eq!(i64::from_le_bytes(sum), i64::MIN / 3);
        let mut sum = 200u8.to_le_bytes();
        divide(Dtype::U8, &mut sum, 300);
        assert_eq!(sum, [0]);
    }

    #[test]
    fn nan_propagates_as_the_canonical_one_and_zeros_are_ordered() {
        let odd_nan = f32::from_bits(0xffa1_2345);
        for op in ReduceOp::ALL {
            for other in [0.0, -1.0, f32::INFINITY, f32::NAN] {
                let bits = reduce(Dtype::F32, op, odd_nan.to_le_bytes(), other.to_le_bytes());
                assert_eq!(u32::from_le_bytes(bits), 0x7fc0_0000);
                let bits = reduce(
                    Dtype::F64,
                    op,
                    f64::from_bits(0xfff4_0000_dead_beef).to_le_bytes(),
                    f64::from(other).to_le_bytes(),
                );
                assert_eq!(u64::from_le_bytes(bits), 0x7ff8_0000_0000_0000);
                let bits =
                    reduce(Dtype::F16, op, 0xfd01u16.to_le_bytes(), f16::from_f32(other).to_le_bytes());
                assert_eq!(u16::from_le_bytes(bits), 0x7e00);
                let bits =
                    reduce(Dtype::Bf16, op, 0xff81u16.to_le_bytes(), bf16::from_f32(other).to_le_bytes());
                assert_eq!(u16::from_le_bytes(bits), 0x7fc0);
            }
        }
        let of_zeros = |op, a: f32, b: f32| {
            f32::from_le_bytes(reduce(Dtype::F32, op, a.to_le_bytes(), b.to_le_bytes())).to_bits()
        };
        assert_eq!(of_zeros(ReduceOp::Min, 0.0, -0.0), (-0.0f32).to_bits());
        assert_eq!(of_zeros(ReduceOp::Max, 0.0, -0.0), 0);
        assert_eq!(of_zeros(ReduceOp::Sum, -0.0, -0.0), (-0.0f32).to_bits());
        assert_eq!(of_zeros(ReduceOp::Sum, f32::INFINITY, f32::NEG_INFINITY), 0x7fc0_0000);
    }

    /// Against the conversions of the `half` crate, for every bf16 and f16 and at every rounding boundary between two.
    #[test]
    fn narrowing_rounds_to_nearest_even() {
        for bits in 0..=u16::MAX {
            for (dtype, value) in
                [(Dtype::Bf16, bf16::from_bits(bits).to_f32()), (Dtype::F16, f16::from_bits(bits).to_f32())]
            {
                for delta in -1..=1 {
                    for half_unit in [0, 1 << 12, 1 << 15] {
                        let float = f32::from_bits(
                            (value.to_bits()).wrapping_add(half_unit).wrapping_add_signed(delta),
                        );
                        let float = canonical32(float);
                        let mut out = [0; 2];
                        narrow(dtype, &float.to_le_bytes(), &mut out);
                        let wanted = if dtype == Dtype::F16 {
                            f16::from_f32(float).to_bits()
                        } else {
                            bf16::from_f32(float).to_bits()
                        };
                        assert_eq!(u16::from_le_bytes(out), wanted, "{dtype:?} {float:e}");
                    }
                }
            }
        }
    }

    #[test]
    fn blocks_and_tails_are_the_same_as_single_elements() {
        for dtype in [Dtype::F16, Dtype::Bf16] {
            let bytes = |seed: u32| -> Vec<u8> {
                (0..2 * BLOCK as u32 + 7)
                    .flat_map(|i| ((i + seed).wrapping_mul(0x9e37_79b9) >> 16).to_le_bytes()[..2].to_vec())
                    .collect()
            };
            let (a, b) = (bytes(1), bytes(99));
            for op in ReduceOp::ALL {
                let mut whole = a.clone();
                combine(dtype, op, &mut whole, &b);
                let mut wide = Vec::new();
                widen(dtype, &a, &mut wide);
                let mut other = Vec::new();
                widen(dtype, &b, &mut other);
                combine(Dtype::F32, op, &mut wide, &other);
                let mut by_wide = vec![0; a.len()];
                narrow(dtype, &wide, &mut by_wide);
                assert_eq!(whole, by_wide);
                for i in (0..a.len()).step_by(2) {
                    let mut one = a[i..i + 2].to_vec();
                    combine(dtype, op, &mut one, &b[i..i + 2]);
                    assert_eq!(one, whole[i..i + 2]);
                }
            }
        }
    }
}
