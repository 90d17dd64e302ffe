//! The reduction of two 16-byte quads, for every element type and operation of the collectives.
//!
//! The semantics are those of the host's `ReduceOp`: integers wrap, f16 and bf16 are combined in f32 and rounded once
//! to nearest even, NaN propagates (also through minimum and maximum), -0 is less than +0, and an average divides
//! once, after the last sum. Every NaN result is the canonical quiet NaN: the payload, which IEEE 754-2019, 6.2.3
//! leaves open, differs between CPUs and GPUs, and all ranks must hold the same bits.

use crate::device::Quad;

/// Element types, by the host's codes (`Dtype`).
mod dtype {
    pub(super) const F32: u32 = 0;
    pub(super) const F64: u32 = 1;
    pub(super) const F16: u32 = 2;
    pub(super) const BF16: u32 = 3;
    pub(super) const I8: u32 = 4;
    pub(super) const U8: u32 = 5;
    pub(super) const I32: u32 = 6;
    pub(super) const U32: u32 = 7;
    pub(super) const I64: u32 = 8;
}

/// Operations, by the host's codes (`ReduceOp`).
mod op {
    pub(super) const SUM: u32 = 0;
    pub(super) const AVG: u32 = 1;
    pub(super) const MIN: u32 = 2;
    pub(super) const MAX: u32 = 3;
}

/// What to reduce: an element type and an operation, by the host's codes.
pub type Reduction = u32;

/// The code of an element type and an operation.
pub const fn reduction(dtype: u32, op: u32) -> Reduction {
    dtype << 8 | op
}

/// Whether [`combine_common`] knows this reduction.
pub const fn is_common(reduction: Reduction) -> bool {
    matches!(reduction >> 8, dtype::F32 | dtype::F16 | dtype::BF16) && reduction & 0xff <= op::AVG
}

/// Whether a result is divided by the number of ranks: see [`finish`].
#[inline(always)]
pub(crate) const fn averages(reduction: Reduction) -> bool {
    reduction & 0xff == op::AVG
}

/// As [`combine`] for the reductions that gradients are made of: sums and averages of f32, f16 and bf16. Short enough to
/// be unrolled in the loops that must keep up with the link.
#[inline(always)]
pub fn combine_common(reduction: Reduction, partial: Quad, local: Quad) -> Quad {
    match reduction >> 8 {
        dtype::F32 => words(partial, local, |a, b| f32_bits(f32::from_bits(a) + f32::from_bits(b))),
        dtype::F16 => words(partial, local, f16_sums),
        _ => words(partial, local, bf16_sums),
    }
}

/// As [`finish`] for the reductions of [`combine_common`].
#[inline(always)]
pub fn finish_common(reduction: Reduction, ranks: u32, sum: Quad) -> Quad {
    if !averages(reduction) {
        return sum;
    }
    match reduction >> 8 {
        dtype::F32 => words(sum, sum, |a, _| f32_bits(f32::from_bits(a) / ranks as f32)),
        dtype::F16 => words(sum, sum, |a, _| halves(a, a, |a, _| f32_to_f16(f16_to_f32(a) / ranks as f32))),
        _ => words(sum, sum, |a, _| halves(a, a, |a, _| f32_to_bf16(bf16_to_f32(a) / ranks as f32))),
    }
}

/// Reduces one quad: `partial` holds the result of the ranks so far, `local` this rank's elements.
#[inline(always)]
pub fn combine(reduction: Reduction, partial: Quad, local: Quad) -> Quad {
    let op = reduction & 0xff;
    match reduction >> 8 {
        dtype::F32 => {
            words(partial, local, |a, b| f32_bits(float32(op, f32::from_bits(a), f32::from_bits(b))))
        }
        dtype::F64 => pairs(partial, local, |a, b| float64(op, f64::from_bits(a), f64::from_bits(b))),
        dtype::F16 => words(partial, local, |a, b| {
            halves(a, b, |a, b| f32_to_f16(float32(op, f16_to_f32(a), f16_to_f32(b))))
        }),
        dtype::BF16 => words(partial, local, |a, b| {
            halves(a, b, |a, b| f32_to_bf16(float32(op, bf16_to_f32(a), bf16_to_f32(b))))
        }),
        dtype::I8 => bytes(partial, local, |a, b| signed(op, a as i8 as i32, b as i8 as i32)),
        dtype::U8 => bytes(partial, local, |a, b| unsigned(op, a, b)),
        dtype::I32 => words(partial, local, |a, b| signed(op, a as i32, b as i32)),
        dtype::U32 => words(partial, local, |a, b| unsigned(op, a, b)),
        dtype::I64 => pairs(partial, local, |a, b| match op {
            op::MIN => (a as i64).min(b as i64) as u64,
            op::MAX => (a as i64).max(b as i64) as u64,
            _ => wrapping64(op, a, b),
        }),
        _ => pairs(partial, local, |a, b| match op {
            op::MIN => a.min(b),
            op::MAX => a.max(b),
            _ => wrapping64(op, a, b),
        }),
    }
}

/// Divides a finished sum by the number of ranks when the operation is an average; otherwise the sum as it is.
#[inline(always)]
pub fn finish(reduction: Reduction, ranks: u32, sum: Quad) -> Quad {
    if !averages(reduction) {
        return sum;
    }
    // Never 0; tells the compiler so.
    let ranks = ranks.max(1);
    match reduction >> 8 {
        dtype::F32 => words(sum, sum, |a, _| f32_bits(f32::from_bits(a) / ranks as f32)),
        dtype::F64 => pairs(sum, sum, |a, _| f64_bits(f64::from_bits(a) / ranks as f64)),
        dtype::F16 => words(sum, sum, |a, _| halves(a, a, |a, _| f32_to_f16(f16_to_f32(a) / ranks as f32))),
        dtype::BF16 => {
            words(sum, sum, |a, _| halves(a, a, |a, _| f32_to_bf16(bf16_to_f32(a) / ranks as f32)))
        }
        dtype::I8 => bytes(sum, sum, |a, _| (a as i8 as i32).wrapping_div(ranks as i32) as u32),
        dtype::I32 => words(sum, sum, |a, _| (a as i32 as i64 / ranks as i64) as u32),
        dtype::U8 => bytes(sum, sum, |a, _| a / ranks),
        dtype::U32 => words(sum, sum, |a, _| a / ranks),
        dtype::I64 => pairs(sum, sum, |a, _| (a as i64).wrapping_div(ranks as i64) as u64),
        _ => pairs(sum, sum, |a, _| a / ranks as u64),
    }
}

/// Whether partial results are kept in f32 until a step ends: those of f16 and bf16.
pub const fn is_narrow(reduction: Reduction) -> bool {
    matches!(reduction >> 8, dtype::F16 | dtype::BF16)
}

/// The first four (`HIGH` false) or the last four of a quad's eight f16 or bf16 elements, in f32.
#[inline(always)]
pub fn widened<const HIGH: bool>(reduction: Reduction, quad: Quad) -> Quad {
    let (a, b) = if HIGH { (quad[2], quad[3]) } else { (quad[0], quad[1]) };
    match reduction >> 8 {
        dtype::F16 => [
            f16_to_f32(a & 0xffff).to_bits(),
            f16_to_f32(a >> 16).to_bits(),
            f16_to_f32(b & 0xffff).to_bits(),
            f16_to_f32(b >> 16).to_bits(),
        ],
        _ => [a << 16, a & 0xffff_0000, b << 16, b & 0xffff_0000],
    }
}

/// Four f32 elements, rounded to f16 or bf16.
#[inline(always)]
pub fn rounded(reduction: Reduction, [a, b, c, d]: Quad) -> [u32; 2] {
    let pair = |a: u32, b: u32| {
        let (a, b) = (f32::from_bits(a), f32::from_bits(b));
        match reduction >> 8 {
            dtype::F16 => f32_to_f16(a) | f32_to_f16(b) << 16,
            _ => f32_to_bf16(a) | f32_to_bf16(b) << 16,
        }
    };
    [pair(a, b), pair(c, d)]
}

/// Reduces four elements of f16 or bf16, in f32; those of [`combine_common`] when `COMMON`.
#[inline(always)]
pub fn combine_wide<const COMMON: bool>(reduction: Reduction, partial: Quad, other: Quad) -> Quad {
    let op = if COMMON { op::SUM } else { reduction & 0xff };
    words(partial, other, |a, b| f32_bits(float32(op, f32::from_bits(a), f32::from_bits(b))))
}

#[inline(always)]
fn words(a: Quad, b: Quad, f: impl Fn(u32, u32) -> u32) -> Quad {
    [f(a[0], b[0]), f(a[1], b[1]), f(a[2], b[2]), f(a[3], b[3])]
}

#[inline(always)]
fn halves(a: u32, b: u32, f: impl Fn(u32, u32) -> u32) -> u32 {
    f(a & 0xffff, b & 0xffff) | f(a >> 16, b >> 16) << 16
}

#[inline(always)]
fn bytes(a: Quad, b: Quad, f: impl Fn(u32, u32) -> u32) -> Quad {
    let at = |a: u32, b: u32, shift: u32| (f(a >> shift & 0xff, b >> shift & 0xff) & 0xff) << shift;
    words(a, b, |a, b| at(a, b, 0) | at(a, b, 8) | at(a, b, 16) | at(a, b, 24))
}

#[inline(always)]
fn pairs(a: Quad, b: Quad, f: impl Fn(u64, u64) -> u64) -> Quad {
    let join = |low: u32, high: u32| low as u64 | (high as u64) << 32;
    let low = f(join(a[0], a[1]), join(b[0], b[1]));
    let high = f(join(a[2], a[3]), join(b[2], b[3]));
    [low as u32, (low >> 32) as u32, high as u32, (high >> 32) as u32]
}

#[inline(always)]
fn signed(op: u32, a: i32, b: i32) -> u32 {
    match op {
        op::SUM | op::AVG => a.wrapping_add(b) as u32,
        op::MIN => a.min(b) as u32,
        op::MAX => a.max(b) as u32,
        _ => a.wrapping_mul(b) as u32,
    }
}

#[inline(always)]
fn unsigned(op: u32, a: u32, b: u32) -> u32 {
    match op {
        op::SUM | op::AVG => a.wrapping_add(b),
        op::MIN => a.min(b),
        op::MAX => a.max(b),
        _ => a.wrapping_mul(b),
    }
}

#[inline(always)]
fn wrapping64(op: u32, a: u64, b: u64) -> u64 {
    match op {
        op::SUM | op::AVG => a.wrapping_add(b),
        _ => a.wrapping_mul(b),
    }
}

/// Not `f32::min`, which drops a NaN (IEEE 754-2008 minNum).
#[inline(always)]
fn float32(op: u32, a: f32, b: f32) -> f32 {
    match op {
        op::SUM | op::AVG => a + b,
        op::MIN | op::MAX => {
            if a.is_nan() || b.is_nan() {
                return f32::NAN;
            }
            let a_first = total_order32(a.to_bits()) < total_order32(b.to_bits());
            if a_first == (op == op::MIN) { a } else { b }
        }
        _ => a * b,
    }
}

#[inline(always)]
fn float64(op: u32, a: f64, b: f64) -> u64 {
    f64_bits(match op {
        op::SUM | op::AVG => a + b,
        op::MIN | op::MAX => {
            if a.is_nan() || b.is_nan() {
                return f64_bits(f64::NAN);
            }
            let a_first = total_order64(a.to_bits()) < total_order64(b.to_bits());
            if a_first == (op == op::MIN) { a } else { b }
        }
        _ => a * b,
    })
}

/// Signed integers in the order of the floats whose bits they came from (IEEE 754-2019, 5.10).
#[inline(always)]
fn total_order32(bits: u32) -> i32 {
    bits as i32 ^ ((bits as i32 >> 31) as u32 >> 1) as i32
}

#[inline(always)]
fn total_order64(bits: u64) -> i64 {
    bits as i64 ^ ((bits as i64 >> 63) as u64 >> 1) as i64
}

#[inline(always)]
fn f32_bits(value: f32) -> u32 {
    if value.is_nan() { 0x7fc0_0000 } else { value.to_bits() }
}

#[inline(always)]
fn f64_bits(value: f64) -> u64 {
    if value.is_nan() { 0x7ff8_0000_0000_0000 } else { value.to_bits() }
}

/// The sums of two pairs of f16. The instruction rounds the exact sum once, and f32 has at least 2 x 11 + 2 bits, so that
/// rounding to f32 first gives the same (Figueroa, "When is double rounding innocuous?", 1995); so do sums of subnormal
/// numbers, which are exact.
#[cfg(target_arch = "nvptx64")]
#[inline(always)]
fn f16_sums(a: u32, b: u32) -> u32 {
    let sums: u32;
    // SAFETY: arithmetic on registers.
    unsafe {
        core::arch::asm!("add.rn.f16x2 {0}, {1}, {2};", out(reg32) sums, in(reg32) a, in(reg32) b,
            options(pure, nomem, nostack, preserves_flags));
    }
    let nans: u32;
    // SAFETY: arithmetic on registers.
    unsafe {
        core::arch::asm!("set.nan.u32.f16x2 {0}, {1}, {1};", out(reg32) nans, in(reg32) sums,
            options(pure, nomem, nostack, preserves_flags));
    }
    replaced::<F16_NAN>(sums, nans)
}

/// As [`f16_sums`], of bf16, whose significands have 8 bits. Compute capability 8.0 has no addition: a product with 1.
#[cfg(target_arch = "nvptx64")]
#[inline(always)]
fn bf16_sums(a: u32, b: u32) -> u32 {
    let sums: u32;
    // SAFETY: arithmetic on registers.
    unsafe {
        core::arch::asm!("fma.rn.bf16x2 {0}, {1}, {2}, {3};", out(reg32) sums, in(reg32) a, in(reg32) 0x3f80_3f80,
            in(reg32) b, options(pure, nomem, nostack, preserves_flags));
    }
    replaced::<BF16_NAN>(sums, bf16_nans(sums))
}

/// A mask of those of two bf16 that are not numbers.
#[cfg(ringseal_sm_90a)]
#[inline(always)]
fn bf16_nans(halves: u32) -> u32 {
    let nans: u32;
    // SAFETY: arithmetic on registers.
    unsafe {
        core::arch::asm!("set.nan.u32.bf16x2 {0}, {1}, {1};", out(reg32) nans, in(reg32) halves,
            options(pure, nomem, nostack, preserves_flags));
    }
    nans
}

/// The halves with `NAN` in the place of each whose bits are set in `nans`.
#[cfg(any(target_arch = "nvptx64", test))]
#[inline(always)]
const fn replaced<const NAN: u32>(halves: u32, nans: u32) -> u32 {
    (halves & !nans) | ((0x0001_0001 * NAN) & nans)
}

const F16_NAN: u32 = 0x7e00;
#[cfg(any(all(target_arch = "nvptx64", not(ringseal_sm_90a)), test))]
const BF16_INFINITY: u32 = 0x7f80;
const BF16_NAN: u32 = 0x7fc0;

/// A mask of those of two bf16 that are not numbers, whose bits but the sign are greater than infinity's: compute capability 8.0 has no
/// comparison of them.
#[cfg(any(all(target_arch = "nvptx64", not(ringseal_sm_90a)), test))]
#[inline(always)]
const fn bf16_nans(halves: u32) -> u32 {
    let sign = ((halves & 0x7fff_7fff) + 0x0001_0001 * (0x7fff - BF16_INFINITY)) & 0x8000_8000;
    sign | (sign - (sign >> 15))
}

#[cfg(not(target_arch = "nvptx64"))]
fn f16_sums(a: u32, b: u32) -> u32 {
    halves(a, b, |a, b| f32_to_f16(f16_to_f32(a) + f16_to_f32(b)))
}

#[cfg(not(target_arch = "nvptx64"))]
fn bf16_sums(a: u32, b: u32) -> u32 {
    halves(a, b, |a, b| f32_to_bf16(bf16_to_f32(a) + bf16_to_f32(b)))
}

#[inline(always)]
fn bf16_to_f32(bits: u32) -> f32 {
    f32::from_bits(bits << 16)
}

/// Rounds to nearest even: adding just under half a unit, or exactly half when the last kept bit is odd.
#[inline(always)]
fn f32_to_bf16(value: f32) -> u32 {
    let bits = value.to_bits();
    let rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    if value.is_nan() { BF16_NAN } else { rounded }
}

#[cfg(target_arch = "nvptx64")]
#[inline(always)]
fn f16_to_f32(bits: u32) -> f32 {
    let value: f32;
    // SAFETY: a conversion between registers.
    unsafe {
        core::arch::asm!("cvt.f32.f16 {0}, {1};", out(reg32) value, in(reg16) bits as u16,
            options(pure, nomem, nostack, preserves_flags));
    }
    value
}

#[cfg(target_arch = "nvptx64")]
#[inline(always)]
fn f32_to_f16(value: f32) -> u32 {
    let bits: u16;
    // SAFETY: a conversion between registers.
    unsafe {
        core::arch::asm!("cvt.rn.f16.f32 {0}, {1};", out(reg16) bits, in(reg32) value,
            options(pure, nomem, nostack, preserves_flags));
    }
    if value.is_nan() { F16_NAN } else { bits as u32 }
}

#[cfg(not(target_arch = "nvptx64"))]
fn f16_to_f32(bits: u32) -> f32 {
    half::f16::from_bits(bits as u16).to_f32()
}

#[cfg(not(target_arch = "nvptx64"))]
fn f32_to_f16(value: f32) -> u32 {
    if value.is_nan() { F16_NAN } else { half::f16::from_f32(value).to_bits() as u32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nans_and_nothing_else_become_the_canonical_one() {
        for low in 0..=0xffff_u32 {
            let high = low.wrapping_mul(0x9e37) & 0xffff;
            let expected = |bits: u32, nan: bool, canonical: u32| if nan { canonical } else { bits };
            let bf16 = |bits: u32| expected(bits, half::bf16::from_bits(bits as u16).is_nan(), BF16_NAN);
            let pair = low | high << 16;
            assert_eq!(replaced::<BF16_NAN>(pair, bf16_nans(pair)), bf16(low) | bf16(high) << 16);
        }
    }

    /// What the GPU's packed additions do, which round the exact sum once, is what the sums in f32 are, rounded twice. Sums of
    /// f16 are exact in f64.
    #[test]
    fn sums_rounded_twice_are_sums_rounded_once() {
        let mut state = 1_u32;
        let mut random = || {
            state = state.wrapping_mul(0x915f_77f5).wrapping_add(12345);
            state >> 16
        };
        for _ in 0..2_000_000 {
            let (a, b) = (random() & 0xffff, random() & 0xffff);
            let (x, y) = (half::bf16::from_bits(a as u16), half::bf16::from_bits(b as u16));
            if !x.is_nan() && !y.is_nan() {
                let exact = odd_sum(x.to_f64(), y.to_f64());
                let once = half::bf16::from_f64(exact);
                let expected = if once.is_nan() { BF16_NAN } else { once.to_bits() as u32 };
                assert_eq!(bf16_sums(a, b) & 0xffff, expected, "{a:#06x} + {b:#06x}");
            }
            let (x, y) = (half::f16::from_bits(a as u16), half::f16::from_bits(b as u16));
            if !x.is_nan() && !y.is_nan() {
                let once = half::f16::from_f64(x.to_f64() + y.to_f64());
                let expected = if once.is_nan() { F16_NAN } else { once.to_bits() as u32 };
                assert_eq!(f16_sums(a, b) & 0xffff, expected, "{a:#06x} + {b:#06x}");
            }
        }
    }

    /// The sum rounded to odd (Boldo and Melquiond, 2008), so that rounding it again is rounding the exact one.
    fn odd_sum(a: f64, b: f64) -> f64 {
        let sum = a + b;
        if !sum.is_finite() {
            return sum;
        }
        // The error of the sum (Knuth's two-sum), exact.
        let part = sum - a;
        let error = (a - (sum - part)) + (b - part);
        if error == 0.0 || sum.to_bits() & 1 == 1 {
            return sum;
        }
        let away = (error > 0.0) == (sum > 0.0);
        f64::from_bits(if away { sum.to_bits() + 1 } else { sum.to_bits() - 1 })
    }
}
