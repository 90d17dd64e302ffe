//! The products on the CPU, from the real fragments and the real layout in shared memory.

use super::{COUNT_END, Counts, FirstCounts, Fragment, Part, Quad, SecondCounts};
use crate::device::emulated::{Order, Scope, collective, load_async};
use crate::gf128::{MATRIX_WORDS, count_bit, matrix_word_place};

/// See the GPU's.
#[track_caller]
pub fn fence() {
    collective(Scope::Warpgroup, Order::Nothing, (), |_| {});
}

/// See the GPU's.
#[track_caller]
pub fn commit() {
    collective(Scope::Warpgroup, Order::Nothing, (), |_| {});
}

/// All columns of a product. Done at once: that operands stay untouched until [`Part::wait`] is checked in the machine code.
#[track_caller]
fn multiply<const ACCUMULATE: bool>(counts: &mut [u32; 64], a: &Quad, b: u32) {
    assert!(b.is_multiple_of(16), "a matrix at {b:#x}");
    let old = if ACCUMULATE { *counts } else { [0; 64] };
    let (new, ..) = collective(
        Scope::Warpgroup,
        Order::Nothing,
        (old, *a, b),
        |threads: &mut [([u32; 64], Quad, u32)]| {
            assert!(threads.iter().all(|thread| thread.2 == b), "divergence: different matrices");
            let mut columns = [[0u32; 8]; 128];
            for index in 0..MATRIX_WORDS {
                let (n, word) = matrix_word_place(index);
                [columns[n as usize][word as usize]] = load_async(b + 4 * index);
            }
            for warp in threads.chunks_exact_mut(32) {
                for half in 0..2 {
                    for g in 0..8 {
                        let row: [u32; 8] =
                            std::array::from_fn(|word| warp[4 * g + word % 4].1[half + 2 * (word / 4)]);
                        for (n, column) in columns.iter().enumerate() {
                            let count: u32 = row.iter().zip(column).map(|(a, b)| (a & b).count_ones()).sum();
                            let lane = 4 * g + n % 8 / 2;
                            let place = &mut warp[lane].0[4 * (n / 8) + 2 * half + n % 2];
                            *place = place.wrapping_add(count);
                        }
                    }
                }
            }
        },
    );
    *counts = new;
}

/// See the GPU's.
///
/// # Safety
/// None here; convergence is checked.
#[track_caller]
pub unsafe fn multiply_warp(counts: Fragment, a: &Quad, b: [u32; 2]) -> Fragment {
    let (new, ..) = collective(
        Scope::Warp,
        Order::Nothing,
        (counts, *a, b),
        |lanes: &mut [(Fragment, Quad, [u32; 2])]| {
            // Bits 32 i to 32 i + 31 of a column are in lane i mod 4 of those that the column is the group of.
            let columns: [[u32; 8]; 8] =
                std::array::from_fn(|n| std::array::from_fn(|i| lanes[4 * n + i % 4].2[i / 4]));
            for g in 0..8 {
                for half in 0..2 {
                    let row: [u32; 8] = std::array::from_fn(|i| lanes[4 * g + i % 4].1[half + 2 * (i / 4)]);
                    for (n, column) in columns.iter().enumerate() {
                        let count: u32 = row.iter().zip(column).map(|(a, b)| (a & b).count_ones()).sum();
                        let place = &mut lanes[4 * g + n / 2].0[2 * half + n % 2];
                        *place = place.wrapping_add(count);
                    }
                }
            }
        },
    );
    new
}

/// See the GPU's.
pub fn pack_three(word: u32, counts: [u32; 3], first: u32) -> u32 {
    (first..).zip(counts).fold(word, |word, (i, count)| {
        assert!(count < COUNT_END, "a count of {count}");
        word | (count & 1) << count_bit(i)
    })
}

/// See the GPU's.
pub fn pack_last([a, b]: [u32; 2]) -> u32 {
    assert!(a < COUNT_END && b < COUNT_END, "counts of {a} and {b}");
    (a & 1) << count_bit(30) | (b & 1) << count_bit(31)
}

/// All columns of a product, packed.
fn pack(counts: &[u32; 64]) -> [u32; 2] {
    let mut rows = [0; 2];
    for (i, &count) in counts.iter().enumerate() {
        assert!(count < COUNT_END, "a count of {count}");
        rows[i / 2 % 2] |= (count & 1) << count_bit(i as u32 / 4 * 2 + i as u32 % 2);
    }
    rows
}

/// The part with `N` accumulators of a thread, from number `first` on.
macro_rules! part {
    ($name:ident, $n:literal, $first:literal) => {
        impl Part for $name {
            fn zero() -> Self {
                Self([0; $n])
            }

            #[track_caller]
            unsafe fn multiply<const ACCUMULATE: bool>(&mut self, a: &Quad, b: u32) {
                let mut counts = [0; 64];
                counts[$first..$first + $n].copy_from_slice(&self.0);
                multiply::<ACCUMULATE>(&mut counts, a, b);
                self.0.copy_from_slice(&counts[$first..$first + $n]);
            }

            #[track_caller]
            fn wait<const N: usize>(&mut self, _: &[Quad; N]) {
                collective(Scope::Warpgroup, Order::Nothing, (), |_| {});
            }

            fn pack(&self, [low, high]: [u32; 2]) -> [u32; 2] {
                let mut counts = [0; 64];
                counts[$first..$first + $n].copy_from_slice(&self.0);
                let [a, b] = pack(&counts);
                [low | a, high | b]
            }
        }
    };
}

part!(Counts, 64, 0);
part!(FirstCounts, 24, 0);
part!(SecondCounts, 40, 24);
