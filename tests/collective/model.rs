//! What a collective must give, bit for bit: one element after the other, from the order of summation as documented
//! and not from the schedule that the executor interprets. Integers are computed without bounds and cut afterwards.

use half::{bf16, f16};
use ringseal::collective::Algorithm;
use ringseal::{Dtype, ReduceOp};

/// The elements of `bytes` as bit patterns.
fn elements(dtype: Dtype, bytes: &[u8]) -> Vec<u64> {
    let element = |bytes: &[u8]| bytes.iter().rev().fold(0, |bits, byte| bits << 8 | u64::from(*byte));
    bytes.chunks_exact(dtype.size()).map(element).collect()
}

/// The chunk that an element belongs to, counting one element after the other.
fn chunk_of(element: usize, count: usize, chunks: usize) -> usize {
    let mut end = 0;
    for chunk in 0..chunks {
        end += count / chunks + usize::from(chunk < count % chunks);
        if element < end {
            return chunk;
        }
    }
    unreachable!()
}

/// The whole reduced vector. `rotated` for a reduce-scatter, whose ring starts one rank later and whose trees have
/// their roots where the chunks go.
pub(crate) fn reduced(
    algorithm: Algorithm,
    rotated: bool,
    dtype: Dtype,
    op: ReduceOp,
    inputs: &[Vec<u8>],
) -> Vec<u8> {
    let n = inputs.len();
    if n == 1 {
        return inputs[0].clone();
    }
    let inputs: Vec<_> = inputs.iter().map(|input| elements(dtype, input)).collect();
    let count = inputs[0].len();
    let mut out = Vec::new();
    // An all-reduce is cut between units of 16 bytes only.
    let unit = if rotated { 1 } else { 16 / dtype.size() };
    (0..count).for_each(|element| {
        let x = |rank: usize| inputs[rank % n][element];
        let chunk = chunk_of(element / unit, count.div_ceil(unit), n);
        let mut result = match algorithm {
            Algorithm::Ring | Algorithm::RelayRing => {
                let first = chunk + usize::from(rotated);
                (1..n).fold(x(first), |sum, distance| step(dtype, op, &[sum, x(first + distance)]))
            }
            Algorithm::Direct | Algorithm::Exchange => step(dtype, op, &(0..n).map(x).collect::<Vec<_>>()),
            Algorithm::Tree => tree(dtype, op, &|node| x(node + if rotated { chunk } else { 0 }), n, 0),
        };
        if op == ReduceOp::Avg {
            result = divided(dtype, result, n);
        }
        out.extend(&result.to_le_bytes()[..dtype.size()]);
    });
    out
}

fn tree(dtype: Dtype, op: ReduceOp, x: &dyn Fn(usize) -> u64, n: usize, node: usize) -> u64 {
    let children = [2 * node + 1, 2 * node + 2].into_iter().filter(|child| *child < n);
    let mut operands = vec![x(node)];
    operands.extend(children.map(|child| tree(dtype, op, x, n, child)));
    step(dtype, op, &operands)
}

/// One step: all operands, in the accumulator's type, rounded at the end.
fn step(dtype: Dtype, op: ReduceOp, operands: &[u64]) -> u64 {
    if operands.len() == 1 {
        return operands[0];
    }
    match dtype {
        Dtype::F64 => {
            let floats = operands.iter().map(|bits| f64::from_bits(*bits));
            canonical64(floats.reduce(|a, b| float64(op, a, b)).unwrap())
        }
        Dtype::F32 | Dtype::F16 | Dtype::Bf16 => {
            let floats = operands.iter().map(|bits| to_f32(dtype, *bits));
            from_f32(dtype, floats.reduce(|a, b| float32(op, a, b)).unwrap())
        }
        _ => {
            let numbers = operands.iter().map(|bits| number(dtype, *bits));
            numbers
                .reduce(|a, b| {
                    let exact = match op {
                        ReduceOp::Sum | ReduceOp::Avg => a + b,
                        ReduceOp::Min => a.min(b),
                        ReduceOp::Max => a.max(b),
                        ReduceOp::Prod => a.wrapping_mul(b),
                    };
                    number(dtype, exact as u64)
                })
                .unwrap() as u64
        }
    }
}

fn divided(dtype: Dtype, bits: u64, n: usize) -> u64 {
    match dtype {
        Dtype::F64 => canonical64(f64::from_bits(bits) / n as f64),
        Dtype::F32 | Dtype::F16 | Dtype::Bf16 => from_f32(dtype, to_f32(dtype, bits) / n as f32),
        _ => (number(dtype, bits) / n as i128) as u64,
    }
}

/// The integer whose low bits these are.
fn number(dtype: Dtype, bits: u64) -> i128 {
    match dtype {
        Dtype::I8 => (bits as i8).into(),
        Dtype::U8 => (bits as u8).into(),
        Dtype::I32 => (bits as i32).into(),
        Dtype::U32 => (bits as u32).into(),
        Dtype::I64 => (bits as i64).into(),
        _ => bits.into(),
    }
}

fn float32(op: ReduceOp, a: f32, b: f32) -> f32 {
    match op {
        ReduceOp::Sum | ReduceOp::Avg => a + b,
        ReduceOp::Prod => a * b,
        _ if a.is_nan() || b.is_nan() => f32::NAN,
        ReduceOp::Min => std::cmp::min_by(a, b, f32::total_cmp),
        ReduceOp::Max => std::cmp::max_by(a, b, f32::total_cmp),
    }
}

fn float64(op: ReduceOp, a: f64, b: f64) -> f64 {
    match op {
        ReduceOp::Sum | ReduceOp::Avg => a + b,
        ReduceOp::Prod => a * b,
        _ if a.is_nan() || b.is_nan() => f64::NAN,
        ReduceOp::Min => std::cmp::min_by(a, b, f64::total_cmp),
        ReduceOp::Max => std::cmp::max_by(a, b, f64::total_cmp),
    }
}

fn canonical64(value: f64) -> u64 {
    if value.is_nan() { 0x7ff8_0000_0000_0000 } else { value.to_bits() }
}

fn to_f32(dtype: Dtype, bits: u64) -> f32 {
    match dtype {
        Dtype::F16 => f16::from_bits(bits as u16).to_f32(),
        Dtype::Bf16 => bf16::from_bits(bits as u16).to_f32(),
        _ => f32::from_bits(bits as u32),
    }
}

fn from_f32(dtype: Dtype, value: f32) -> u64 {
    match dtype {
        Dtype::F16 if value.is_nan() => 0x7e00,
        Dtype::Bf16 if value.is_nan() => 0x7fc0,
        Dtype::F16 => f16::from_f32(value).to_bits().into(),
        Dtype::Bf16 => bf16::from_f32(value).to_bits().into(),
        _ if value.is_nan() => 0x7fc0_0000,
        _ => value.to_bits().into(),
    }
}
