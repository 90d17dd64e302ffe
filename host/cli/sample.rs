//! Made-up gradients whose reduction is known exactly, so that every element can be checked.
//!
//! Values are small integers: their sums and products are exact in every element type, in any order of summation,
//! so the check needs no tolerance and no knowledge of the algorithm under test.

use half::{bf16, f16};
use ringseal::{Dtype, ReduceOp};

/// One buffer a rank and the result that each rank must have, in bytes.
#[derive(Debug)]
pub(crate) struct Sample {
    pub(crate) inputs: Vec<Vec<u8>>,
    pub(crate) expected: Vec<u8>,
}

impl Sample {
    /// `count` elements for each of `ranks`.
    pub(crate) fn new(ranks: usize, count: usize, dtype: Dtype, op: ReduceOp) -> Self {
        match dtype {
            Dtype::F32 => Self::of::<f32>(ranks, count, op),
            Dtype::F64 => Self::of::<f64>(ranks, count, op),
            Dtype::F16 => Self::of::<f16>(ranks, count, op),
            Dtype::Bf16 => Self::of::<bf16>(ranks, count, op),
            Dtype::I8 => Self::of::<i8>(ranks, count, op),
            Dtype::U8 => Self::of::<u8>(ranks, count, op),
            Dtype::I32 => Self::of::<i32>(ranks, count, op),
            Dtype::U32 => Self::of::<u32>(ranks, count, op),
            Dtype::I64 => Self::of::<i64>(ranks, count, op),
            Dtype::U64 => Self::of::<u64>(ranks, count, op),
        }
    }

    fn of<T: Element>(ranks: usize, count: usize, op: ReduceOp) -> Self {
        let bytes = count * size_of::<T>();
        let mut inputs = vec![Vec::with_capacity(bytes); ranks];
        let mut expected = Vec::with_capacity(bytes);
        let mut column = vec![0; ranks];
        for index in 0..count {
            for (rank, value) in column.iter_mut().enumerate() {
                *value = small_integer(rank, index, ranks, op);
                inputs[rank].extend_from_slice(T::from_integer(*value).bytes().as_ref());
            }
            expected.extend_from_slice(T::reduced(&column, op).bytes().as_ref());
        }
        Self { inputs, expected }
    }
}

/// The value of one element on one rank: pseudo-random, and the same on every run.
fn small_integer(rank: usize, index: usize, ranks: usize, op: ReduceOp) -> i8 {
    // The finalizer of MurmurHash3: neighbouring elements and ranks are unrelated, so that a shifted or swapped
    // chunk shows up.
    let mut hash = (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (rank as u64 + 1) << 56;
    hash = (hash ^ hash >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash = (hash ^ hash >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    hash ^= hash >> 33;
    match op {
        // At most 2^8, which bfloat16's 8 significant bits and half's exponent both hold.
        ReduceOp::Prod if rank < 8 => [1, -1, 2, -2][(hash % 4) as usize],
        ReduceOp::Prod => [1, -1][(hash % 2) as usize],
        // Sums stay within 256 in magnitude, the last integer up to which bfloat16 holds every one.
        _ => {
            let bound = (256 / ranks).clamp(1, 127) as u64;
            ((hash % (2 * bound + 1)) as i64 - bound as i64) as i8
        }
    }
}

trait Element: Copy {
    fn from_integer(value: i8) -> Self;
    /// The reduction of one element over the ranks.
    fn reduced(column: &[i8], op: ReduceOp) -> Self;
    fn bytes(self) -> impl AsRef<[u8]>;
}

macro_rules! integers {
    ($($integer:ty),*) => {$(
        impl Element for $integer {
            fn from_integer(value: i8) -> Self {
                value as Self
            }

            fn reduced(column: &[i8], op: ReduceOp) -> Self {
                let values = column.iter().map(|&value| value as Self);
                match op {
                    ReduceOp::Sum => values.fold(0, Self::wrapping_add),
                    // The number of ranks may not fit in the type.
                    ReduceOp::Avg => {
                        (values.fold(0, Self::wrapping_add) as i128 / column.len() as i128) as Self
                    }
                    ReduceOp::Min => values.min().unwrap_or(0),
                    ReduceOp::Max => values.max().unwrap_or(0),
                    ReduceOp::Prod => values.fold(1, Self::wrapping_mul),
                }
            }

            fn bytes(self) -> impl AsRef<[u8]> {
                self.to_le_bytes()
            }
        }
    )*};
}

integers!(i8, u8, i32, u32, i64, u64);

/// `$wide` is the type in which the average is divided, and from which it is rounded once.
macro_rules! floats {
    ($($float:ty: $wide:ty, $round:expr;)*) => {$(
        impl Element for $float {
            fn from_integer(value: i8) -> Self {
                $round(<$wide>::from(value))
            }

            fn reduced(column: &[i8], op: ReduceOp) -> Self {
                let values = column.iter().map(|&value| i32::from(value));
                let exact = match op {
                    ReduceOp::Sum | ReduceOp::Avg => values.sum(),
                    ReduceOp::Min => values.min().unwrap_or(0),
                    ReduceOp::Max => values.max().unwrap_or(0),
                    ReduceOp::Prod => values.product::<i32>(),
                } as $wide;
                let divisor = if op == ReduceOp::Avg { column.len() as $wide } else { 1.0 };
                $round(exact / divisor)
            }

            fn bytes(self) -> impl AsRef<[u8]> {
                self.to_le_bytes()
            }
        }
    )*};
}

floats! {
    f32: f32, std::convert::identity;
    f64: f64, std::convert::identity;
    f16: f32, f16::from_f32;
    bf16: f32, bf16::from_f32;
}

/// The number of elements of `size` bytes in which `got` differs from `expected`.
pub(crate) fn wrong_elements(got: &[u8], expected: &[u8], size: usize) -> usize {
    if got == expected {
        return 0;
    }
    let differing = got.chunks(size).zip(expected.chunks(size)).filter(|(got, expected)| got != expected);
    differing.count() + got.len().abs_diff(expected.len()).div_ceil(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_in_half_precision_are_exact_in_any_order() {
        for ranks in [1, 2, 3, 4, 8, 64, 200] {
            let sample = Sample::new(ranks, 300, Dtype::Bf16, ReduceOp::Sum);
            let value = |bytes: &[u8], i: usize| bf16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]);
            for index in 0..300 {
                let add = |sum: bf16, input: &Vec<u8>| sum + value(input, index);
                let forward = sample.inputs.iter().fold(bf16::ZERO, add);
                let backward = sample.inputs.iter().rev().fold(bf16::ZERO, add);
                assert_eq!(forward, value(&sample.expected, index), "{ranks} ranks");
                assert_eq!(backward, forward, "{ranks} ranks");
            }
        }
    }

    #[test]
    fn products_are_exact_in_half_precision() {
        let sample = Sample::new(9, 300, Dtype::F16, ReduceOp::Prod);
        for index in 0..300 {
            let value = |bytes: &Vec<u8>| f16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]]);
            let product = sample.inputs.iter().fold(f16::ONE, |product, input| product * value(input));
            assert_eq!(product, value(&sample.expected));
            assert!(product.is_finite() && product != f16::ZERO);
        }
    }

    #[test]
    fn averages_are_of_more_ranks_than_a_byte_counts() {
        assert_eq!(u8::reduced(&[1; 256], ReduceOp::Avg), 0, "256 is 0 in a byte, and its 256th is 0");
        assert_eq!(i8::reduced(&[-1; 255], ReduceOp::Avg), 0, "-255 is 1 in a byte");
        assert_eq!(i8::reduced(&[1; 200], ReduceOp::Avg), 0, "200 is -56 in a byte");
        assert_eq!(i32::reduced(&[-3; 256], ReduceOp::Avg), -3);
    }

    #[test]
    fn ranks_and_elements_differ() {
        let sample = Sample::new(4, 4096, Dtype::I8, ReduceOp::Sum);
        for (rank, input) in sample.inputs.iter().enumerate() {
            for other in &sample.inputs[..rank] {
                assert!(wrong_elements(input, other, 1) > 3000);
            }
            assert!(wrong_elements(&input[1..], &input[..4095], 1) > 3000);
        }
    }

    #[test]
    fn wrong_elements_are_counted_as_elements() {
        let expected = [0; 16];
        let mut got = expected;
        assert_eq!(wrong_elements(&got, &expected, 4), 0);
        (got[0], got[3], got[4], got[15]) = (1, 1, 1, 1);
        assert_eq!(wrong_elements(&got, &expected, 4), 3);
        assert_eq!(wrong_elements(&got[..8], &expected, 4), 4);
    }
}
