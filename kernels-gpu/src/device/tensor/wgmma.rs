//! The warpgroup products on the GPU.

use super::{Counts, FirstCounts, Part, Quad, SecondCounts};
use core::arch::asm;

/// Orders this thread's earlier writes of operand registers before the products that follow. The warpgroup's 128
/// threads together.
#[inline(always)]
pub fn fence() {
    // SAFETY: a fence; convergence is the caller's contract.
    unsafe { asm!("wgmma.fence.sync.aligned;", options(nostack)) }
}

/// Closes the group of products issued since the last one.
#[inline(always)]
pub fn commit() {
    // SAFETY: as fence.
    unsafe { asm!("wgmma.commit_group.sync.aligned;", options(nostack)) }
}

/// Of the matrix at shared address `b`.
#[inline(always)]
const fn descriptor(b: u32) -> u64 {
    // Leading (k) offset 128 bytes, stride (n) offset 256 bytes, no swizzle; offsets and address in units of 16 bytes.
    (b >> 4) as u64 | (128 >> 4) << 16 | (256 >> 4) << 32
}

/// Keeps the operands' registers alive and unchanged until here.
#[inline(always)]
fn keep<const N: usize>(operands: &[Quad; N]) {
    for a in operands {
        // SAFETY: no instruction.
        unsafe {
            asm!("// {} {} {} {}", in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3], options(nostack));
        }
    }
}

/// `a + b * factor`, by the multiplier's pipe: a shift or a logical operation would load the one that AES keeps busy.
/// Volatile, as ptxas was seen to reorder what is purer across the wait.
#[inline(always)]
fn multiply_add(a: u32, b: u32, factor: u32) -> u32 {
    let sum;
    // SAFETY: arithmetic.
    unsafe {
        asm!("mad.lo.u32 {0}, {1}, {2}, {3};", out(reg32) sum, in(reg32) b, in(reg32) factor, in(reg32) a,
            options(nostack))
    };
    sum
}

const SECOND: u32 = 1 << 11;
const THIRD: u32 = 1 << 22;

/// Adds the low bits of three counts of a row, all below [`COUNT_END`](super::COUNT_END), to its word: those of the numbers
/// `first` (a multiple of 3, below 30; a constant) to `first` + 2, in the order of [`count_bit`](crate::gf128::count_bit).
#[inline(always)]
pub fn pack_three(word: u32, [a, b, c]: [u32; 3], first: u32) -> u32 {
    let two = multiply_add(a, b, SECOND);
    let three = multiply_add(two, c, THIRD) & (1 | SECOND | THIRD);
    multiply_add(word, three, 1 << (first / 3))
}

/// The word of a row with the low bits of its counts 30 and 31: see [`pack_three`].
#[inline(always)]
pub fn pack_last([a, b]: [u32; 2]) -> u32 {
    (multiply_add(a, b, SECOND) & (1 | SECOND)) << 10
}

/// Adds the low bits of the threes `$k` of counts to both rows' words, `$first` being the number of `$d`'s first
/// accumulator.
macro_rules! threes {
    ($low:ident, $high:ident, $d:ident, $first:expr, $($k:literal)*) => {
        $(
            {
                // Written out: a loop would index the counts at run time, from local memory.
                const AT: [usize; 3] = [
                    4 * (3 * $k / 2) + 3 * $k % 2 - $first,
                    4 * ((3 * $k + 1) / 2) + (3 * $k + 1) % 2 - $first,
                    4 * ((3 * $k + 2) / 2) + (3 * $k + 2) % 2 - $first,
                ];
                $low = pack_three($low, [$d[AT[0]], $d[AT[1]], $d[AT[2]]], 3 * $k);
                $high = pack_three($high, [$d[AT[0] + 2], $d[AT[1] + 2], $d[AT[2] + 2]], 3 * $k);
            }
        )*
    };
}

/// A thread's counts of some columns, from column `$from` on: the instruction, the numbers of what it names (counts by lines, A's
/// words, the matrix, whether to accumulate), and which counts are packed.
macro_rules! part {
    (
        $name:ident, $from:literal, $instruction:literal,
        counts [$f0:literal $($f:literal)*] $([$m0:literal $($m:literal)*])* last [$l0:literal $($l:literal)*],
        a [$a0:literal $a1:literal $a2:literal $a3:literal], b $b:literal, accumulate $accumulate:literal,
        threes [$($three:literal)*] $(, ends $end:literal)?
    ) => {
        impl Part for $name {
            #[inline(always)]
            fn zero() -> Self {
                Self([0; $l0 + [$l0 $(, $l)*].len()])
            }

            #[inline(always)]
            unsafe fn multiply<const ACCUMULATE: bool>(&mut self, a: &Quad, b: u32) {
                let descriptor = descriptor(b + $from / 8 * 256);
                let d = &mut self.0;
                // SAFETY: the caller's.
                unsafe {
                    asm!(
                        "{{",
                        ".reg .pred p;",
                        concat!("setp.ne.b32 p, {", $accumulate, "}, 0;"),
                        $instruction,
                        concat!("{{{", $f0, "}", $(", {", $f, "}",)* ","),
                        $(concat!("{", $m0, "}", $(", {", $m, "}",)* ","),)*
                        concat!("{", $l0, "}", $(", {", $l, "}",)* "}},"),
                        concat!(
                            "{{{", $a0, "}, {", $a1, "}, {", $a2, "}, {", $a3, "}}}, {", $b, "}, p;"
                        ),
                        "}}",
                        inout(reg32) d[$f0], $(inout(reg32) d[$f],)*
                        $(inout(reg32) d[$m0], $(inout(reg32) d[$m],)*)*
                        inout(reg32) d[$l0], $(inout(reg32) d[$l],)*
                        in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3],
                        in(reg64) descriptor, const ACCUMULATE as i32,
                        options(nostack)
                    )
                }
            }

            #[inline(always)]
            fn wait<const N: usize>(&mut self, operands: &[Quad; N]) {
                let d = &mut self.0;
                // SAFETY: as fence.
                unsafe {
                    asm!(
                        "wgmma.wait_group.sync.aligned 0;",
                        concat!("// {", $f0, "}", $(" {", $f, "}",)*),
                        $(concat!("// {", $m0, "}", $(" {", $m, "}",)*),)*
                        concat!("// {", $l0, "}", $(" {", $l, "}",)*),
                        inout(reg32) d[$f0], $(inout(reg32) d[$f],)*
                        $(inout(reg32) d[$m0], $(inout(reg32) d[$m],)*)*
                        inout(reg32) d[$l0], $(inout(reg32) d[$l],)*
                        options(nostack)
                    );
                }
                keep(operands);
            }

            #[inline(always)]
            fn pack(&self, [mut low, mut high]: [u32; 2]) -> [u32; 2] {
                let d = &self.0;
                $(
                    low |= pack_last([d[$end], d[$end + 1]]);
                    high |= pack_last([d[$end + 2], d[$end + 3]]);
                )?
                threes!(low, high, d, $from / 2, $($three)*);
                [low, high]
            }
        }
    };
}

part! {
    Counts, 0, "wgmma.mma_async.sync.aligned.m64n128k256.s32.b1.b1.and.popc",
    counts [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15]
        [16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31]
        [32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47]
        last [48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63],
    a [64 65 66 67], b 68, accumulate 69,
    threes [0 1 2 3 4 5 6 7 8 9], ends 60
}

part! {
    FirstCounts, 0, "wgmma.mma_async.sync.aligned.m64n48k256.s32.b1.b1.and.popc",
    counts [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15]
        last [16 17 18 19 20 21 22 23],
    a [24 25 26 27], b 28, accumulate 29,
    threes [0 1 2 3]
}

part! {
    SecondCounts, 48, "wgmma.mma_async.sync.aligned.m64n80k256.s32.b1.b1.and.popc",
    counts [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15]
        [16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31]
        last [32 33 34 35 36 37 38 39],
    a [40 41 42 43], b 44, accumulate 45,
    threes [4 5 6 7 8 9], ends 36
}
