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

/// Starts `counts = [counts +] a x b`, b being the matrix at shared address `b`; `ACCUMULATE` tells whether the old
/// counts are added. Neither `counts` nor `a` may be touched until [`wait`].
///
/// # Safety
/// The warpgroup's 128 threads together, under control flow that the compiler can see is uniform. `b` is 16-byte
/// aligned, the matrix is written and visible to the asynchronous proxy.
#[inline(always)]
pub unsafe fn multiply<const ACCUMULATE: bool>(counts: &mut Counts, a: &Quad, b: u32) {
    let descriptor = descriptor(b);
    let d = &mut counts.0;
    // SAFETY: the caller's.
    unsafe {
        asm!(
                "{{",
                ".reg .pred p;",
                "setp.ne.b32 p, {69}, 0;",
                "wgmma.mma_async.sync.aligned.m64n128k256.s32.b1.b1.and.popc",
                "{{{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}, {9}, {10}, {11}, {12}, {13}, {14}, {15},",
                "{16}, {17}, {18}, {19}, {20}, {21}, {22}, {23}, {24}, {25}, {26}, {27}, {28}, {29}, {30}, {31},",
                "{32}, {33}, {34}, {35}, {36}, {37}, {38}, {39}, {40}, {41}, {42}, {43}, {44}, {45}, {46}, {47},",
                "{48}, {49}, {50}, {51}, {52}, {53}, {54}, {55}, {56}, {57}, {58}, {59}, {60}, {61}, {62}, {63}}},",
                "{{{64}, {65}, {66}, {67}}}, {68}, p;",
                "}}",
                inout(reg32) d[0], inout(reg32) d[1], inout(reg32) d[2], inout(reg32) d[3],
                inout(reg32) d[4], inout(reg32) d[5], inout(reg32) d[6], inout(reg32) d[7],
                inout(reg32) d[8], inout(reg32) d[9], inout(reg32) d[10], inout(reg32) d[11],
                inout(reg32) d[12], inout(reg32) d[13], inout(reg32) d[14], inout(reg32) d[15],
                inout(reg32) d[16], inout(reg32) d[17], inout(reg32) d[18], inout(reg32) d[19],
                inout(reg32) d[20], inout(reg32) d[21], inout(reg32) d[22], inout(reg32) d[23],
                inout(reg32) d[24], inout(reg32) d[25], inout(reg32) d[26], inout(reg32) d[27],
                inout(reg32) d[28], inout(reg32) d[29], inout(reg32) d[30], inout(reg32) d[31],
                inout(reg32) d[32], inout(reg32) d[33], inout(reg32) d[34], inout(reg32) d[35],
                inout(reg32) d[36], inout(reg32) d[37], inout(reg32) d[38], inout(reg32) d[39],
                inout(reg32) d[40], inout(reg32) d[41], inout(reg32) d[42], inout(reg32) d[43],
                inout(reg32) d[44], inout(reg32) d[45], inout(reg32) d[46], inout(reg32) d[47],
                inout(reg32) d[48], inout(reg32) d[49], inout(reg32) d[50], inout(reg32) d[51],
                inout(reg32) d[52], inout(reg32) d[53], inout(reg32) d[54], inout(reg32) d[55],
                inout(reg32) d[56], inout(reg32) d[57], inout(reg32) d[58], inout(reg32) d[59],
                inout(reg32) d[60], inout(reg32) d[61], inout(reg32) d[62], inout(reg32) d[63],
                in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3],
                in(reg64) descriptor, const ACCUMULATE as i32,
                options(nostack)
        )
    }
}

/// Waits for every group issued. `operands` are all A operands since the last wait: naming them here keeps their
/// registers alive and unchanged until then.
#[inline(always)]
pub fn wait<const N: usize>(counts: &mut Counts, operands: &[Quad; N]) {
    let d = &mut counts.0;
    // SAFETY: as fence.
    unsafe {
        asm!(
            "wgmma.wait_group.sync.aligned 0;",
            "// {0} {1} {2} {3} {4} {5} {6} {7} {8} {9} {10} {11} {12} {13} {14} {15}",
            "// {16} {17} {18} {19} {20} {21} {22} {23} {24} {25} {26} {27} {28} {29} {30} {31}",
            "// {32} {33} {34} {35} {36} {37} {38} {39} {40} {41} {42} {43} {44} {45} {46} {47}",
            "// {48} {49} {50} {51} {52} {53} {54} {55} {56} {57} {58} {59} {60} {61} {62} {63}",
            inout(reg32) d[0], inout(reg32) d[1], inout(reg32) d[2], inout(reg32) d[3],
            inout(reg32) d[4], inout(reg32) d[5], inout(reg32) d[6], inout(reg32) d[7],
            inout(reg32) d[8], inout(reg32) d[9], inout(reg32) d[10], inout(reg32) d[11],
            inout(reg32) d[12], inout(reg32) d[13], inout(reg32) d[14], inout(reg32) d[15],
            inout(reg32) d[16], inout(reg32) d[17], inout(reg32) d[18], inout(reg32) d[19],
            inout(reg32) d[20], inout(reg32) d[21], inout(reg32) d[22], inout(reg32) d[23],
            inout(reg32) d[24], inout(reg32) d[25], inout(reg32) d[26], inout(reg32) d[27],
            inout(reg32) d[28], inout(reg32) d[29], inout(reg32) d[30], inout(reg32) d[31],
            inout(reg32) d[32], inout(reg32) d[33], inout(reg32) d[34], inout(reg32) d[35],
            inout(reg32) d[36], inout(reg32) d[37], inout(reg32) d[38], inout(reg32) d[39],
            inout(reg32) d[40], inout(reg32) d[41], inout(reg32) d[42], inout(reg32) d[43],
            inout(reg32) d[44], inout(reg32) d[45], inout(reg32) d[46], inout(reg32) d[47],
            inout(reg32) d[48], inout(reg32) d[49], inout(reg32) d[50], inout(reg32) d[51],
            inout(reg32) d[52], inout(reg32) d[53], inout(reg32) d[54], inout(reg32) d[55],
            inout(reg32) d[56], inout(reg32) d[57], inout(reg32) d[58], inout(reg32) d[59],
            inout(reg32) d[60], inout(reg32) d[61], inout(reg32) d[62], inout(reg32) d[63],
            options(nostack)
        );
    }
    keep(operands);
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

/// The low bits of the counts, all below [`COUNT_END`](super::COUNT_END): of row g in the first word, of row g + 8 in the
/// second, in the order of [`count_bit`](crate::gf128::count_bit). With columns in the order of
/// [`column_bit`](crate::gf128::column_bit) that is raw word t of each row's product, which is an A operand again.
#[inline(always)]
pub fn pack(counts: &Counts) -> [u32; 2] {
    let d = &counts.0;
    let mut low = pack_last([d[60], d[61]]);
    let mut high = pack_last([d[62], d[63]]);
    // Written out: a loop would index the counts at run time, from local memory.
    macro_rules! threes {
        ($($k:literal)*) => {
            $(
                low = three::<{ 3 * $k }, 0>(low, d);
                high = three::<{ 3 * $k }, 2>(high, d);
            )*
        };
    }
    /// Adds the low bits of counts `I` to `I` + 2 of a row to its word.
    #[inline(always)]
    fn three<const I: usize, const ROW: usize>(word: u32, d: &[u32; 64]) -> u32 {
        let at = |i: usize| 4 * (i / 2) + ROW + i % 2;
        pack_three(word, [d[at(I)], d[at(I + 1)], d[at(I + 2)]], I as u32)
    }
    threes!(0 1 2 3 4 5 6 7 8 9);
    [low, high]
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

impl Part for FirstCounts {
    #[inline(always)]
    fn zero() -> Self {
        Self([0; 24])
    }

    #[inline(always)]
    unsafe fn multiply<const ACCUMULATE: bool>(&mut self, a: &Quad, b: u32) {
        let descriptor = descriptor(b + 0 / 8 * 256);
        let d = &mut self.0;
        // SAFETY: the caller's.
        unsafe {
            asm!(
                "{{",
                ".reg .pred p;",
                "setp.ne.b32 p, {29}, 0;",
                "wgmma.mma_async.sync.aligned.m64n48k256.s32.b1.b1.and.popc",
                "{{{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}, {9}, {10}, {11}, {12}, {13}, {14}, {15},",
                "{16}, {17}, {18}, {19}, {20}, {21}, {22}, {23}}},",
                "{{{24}, {25}, {26}, {27}}}, {28}, p;",
                "}}",
                inout(reg32) d[0], inout(reg32) d[1], inout(reg32) d[2], inout(reg32) d[3],
                inout(reg32) d[4], inout(reg32) d[5], inout(reg32) d[6], inout(reg32) d[7],
                inout(reg32) d[8], inout(reg32) d[9], inout(reg32) d[10], inout(reg32) d[11],
                inout(reg32) d[12], inout(reg32) d[13], inout(reg32) d[14], inout(reg32) d[15],
                inout(reg32) d[16], inout(reg32) d[17], inout(reg32) d[18], inout(reg32) d[19],
                inout(reg32) d[20], inout(reg32) d[21], inout(reg32) d[22], inout(reg32) d[23],
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
                "// {0} {1} {2} {3} {4} {5} {6} {7} {8} {9} {10} {11} {12} {13} {14} {15}",
                "// {16} {17} {18} {19} {20} {21} {22} {23}",
                inout(reg32) d[0], inout(reg32) d[1], inout(reg32) d[2], inout(reg32) d[3],
                inout(reg32) d[4], inout(reg32) d[5], inout(reg32) d[6], inout(reg32) d[7],
                inout(reg32) d[8], inout(reg32) d[9], inout(reg32) d[10], inout(reg32) d[11],
                inout(reg32) d[12], inout(reg32) d[13], inout(reg32) d[14], inout(reg32) d[15],
                inout(reg32) d[16], inout(reg32) d[17], inout(reg32) d[18], inout(reg32) d[19],
                inout(reg32) d[20], inout(reg32) d[21], inout(reg32) d[22], inout(reg32) d[23],
                options(nostack)
            );
        }
        keep(operands);
    }

    #[inline(always)]
    fn pack(&self, [mut low, mut high]: [u32; 2]) -> [u32; 2] {
        let d = &self.0;
        threes!(low, high, d, 0, 0 1 2 3);
        [low, high]
    }
}

impl Part for SecondCounts {
    #[inline(always)]
    fn zero() -> Self {
        Self([0; 40])
    }

    #[inline(always)]
    unsafe fn multiply<const ACCUMULATE: bool>(&mut self, a: &Quad, b: u32) {
        let descriptor = descriptor(b + 48 / 8 * 256);
        let d = &mut self.0;
        // SAFETY: the caller's.
        unsafe {
            asm!(
                "{{",
                ".reg .pred p;",
                "setp.ne.b32 p, {45}, 0;",
                "wgmma.mma_async.sync.aligned.m64n80k256.s32.b1.b1.and.popc",
                "{{{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}, {9}, {10}, {11}, {12}, {13}, {14}, {15},",
                "{16}, {17}, {18}, {19}, {20}, {21}, {22}, {23}, {24}, {25}, {26}, {27}, {28}, {29}, {30}, {31},",
                "{32}, {33}, {34}, {35}, {36}, {37}, {38}, {39}}},",
                "{{{40}, {41}, {42}, {43}}}, {44}, p;",
                "}}",
                inout(reg32) d[0], inout(reg32) d[1], inout(reg32) d[2], inout(reg32) d[3],
                inout(reg32) d[4], inout(reg32) d[5], inout(reg32) d[6], inout(reg32) d[7],
                inout(reg32) d[8], inout(reg32) d[9], inout(reg32) d[10], inout(reg32) d[11],
                inout(reg32) d[12], inout(reg32) d[13], inout(reg32) d[14], inout(reg32) d[15],
                inout(reg32) d[16], inout(reg32) d[17], inout(reg32) d[18], inout(reg32) d[19],
                inout(reg32) d[20], inout(reg32) d[21], inout(reg32) d[22], inout(reg32) d[23],
                inout(reg32) d[24], inout(reg32) d[25], inout(reg32) d[26], inout(reg32) d[27],
                inout(reg32) d[28], inout(reg32) d[29], inout(reg32) d[30], inout(reg32) d[31],
                inout(reg32) d[32], inout(reg32) d[33], inout(reg32) d[34], inout(reg32) d[35],
                inout(reg32) d[36], inout(reg32) d[37], inout(reg32) d[38], inout(reg32) d[39],
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
                "// {0} {1} {2} {3} {4} {5} {6} {7} {8} {9} {10} {11} {12} {13} {14} {15}",
                "// {16} {17} {18} {19} {20} {21} {22} {23} {24} {25} {26} {27} {28} {29} {30} {31}",
                "// {32} {33} {34} {35} {36} {37} {38} {39}",
                inout(reg32) d[0], inout(reg32) d[1], inout(reg32) d[2], inout(reg32) d[3],
                inout(reg32) d[4], inout(reg32) d[5], inout(reg32) d[6], inout(reg32) d[7],
                inout(reg32) d[8], inout(reg32) d[9], inout(reg32) d[10], inout(reg32) d[11],
                inout(reg32) d[12], inout(reg32) d[13], inout(reg32) d[14], inout(reg32) d[15],
                inout(reg32) d[16], inout(reg32) d[17], inout(reg32) d[18], inout(reg32) d[19],
                inout(reg32) d[20], inout(reg32) d[21], inout(reg32) d[22], inout(reg32) d[23],
                inout(reg32) d[24], inout(reg32) d[25], inout(reg32) d[26], inout(reg32) d[27],
                inout(reg32) d[28], inout(reg32) d[29], inout(reg32) d[30], inout(reg32) d[31],
                inout(reg32) d[32], inout(reg32) d[33], inout(reg32) d[34], inout(reg32) d[35],
                inout(reg32) d[36], inout(reg32) d[37], inout(reg32) d[38], inout(reg32) d[39],
                options(nostack)
            );
        }
        keep(operands);
    }

    #[inline(always)]
    fn pack(&self, [mut low, mut high]: [u32; 2]) -> [u32; 2] {
        let d = &self.0;
        low |= pack_last([d[36], d[37]]);
        high |= pack_last([d[38], d[39]]);
        threes!(low, high, d, 24, 4 5 6 7 8 9);
        [low, high]
    }
}
