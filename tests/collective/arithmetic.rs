//! Results that can be told without a model (cases.md 17, 19, 21, 22).

use half::bf16;
use ringseal::ReduceOp;
use ringseal::collective::{Algorithm, Communicator, Element, Options};

use crate::group::{group, on_all, on_each, options};

fn by_each_algorithm(ranks: usize, check: impl Fn(&mut [Communicator])) {
    for algorithm in Algorithm::ALL {
        check(&mut group(ranks, &Options { algorithm, ..options() }));
    }
}

/// Each rank's vector after an all-reduce of what `input` gives it.
fn all_reduced<T: Element>(
    group: &mut [Communicator],
    op: ReduceOp,
    input: impl Fn(usize) -> Vec<T> + Sync,
) -> Vec<Vec<T>> {
    on_all(group, |rank| {
        let mut vector = input(rank.rank());
        rank.all_reduce_in_place(&mut vector, op).unwrap();
        vector
    })
}

#[test]
fn rank_numbers_add_up_in_place() {
    for (ranks, sum) in [(3, 6), (4, 10), (5, 15)] {
        by_each_algorithm(ranks, |group| {
            for vector in all_reduced(group, ReduceOp::Sum, |rank| vec![rank as i64 + 1; 41]) {
                assert_eq!(vector, [sum; 41]);
            }
        });
    }
}

#[test]
fn nothing_is_reduced_to_nothing_and_counts_as_a_collective() {
    for ranks in 1..=4 {
        by_each_algorithm(ranks, |group| {
            let sequences = on_all(group, |rank| {
                rank.all_reduce::<f32>(&[], &mut [], ReduceOp::Sum).unwrap();
                rank.all_reduce_in_place::<u8>(&mut [], ReduceOp::Max).unwrap();
                rank.session().collectives()
            });
            assert_eq!(sequences, vec![2; ranks]);
        });
    }
}

#[test]
fn a_nan_on_any_rank_is_a_nan_on_all() {
    for ranks in [2, 3, 5] {
        by_each_algorithm(ranks, |group| {
            for culprit in 0..ranks {
                for op in ReduceOp::ALL {
                    let input = |rank| vec![if rank == culprit { f32::NAN } else { rank as f32 }; 7];
                    for vector in all_reduced(group, op, input) {
                        assert_eq!(vector.map_bits(), [0x7fc0_0000; 7], "{op:?}");
                    }
                }
            }
        });
    }
}

trait Bits {
    fn map_bits(&self) -> Vec<u32>;
}

impl Bits for Vec<f32> {
    fn map_bits(&self) -> Vec<u32> {
        self.iter().map(|value| value.to_bits()).collect()
    }
}

#[test]
fn opposite_infinities_are_no_number_and_negative_zeros_stay() {
    by_each_algorithm(3, |group| {
        let infinities = [f32::INFINITY, f32::NEG_INFINITY, 1.0];
        for vector in all_reduced(group, ReduceOp::Sum, |rank| vec![infinities[rank]; 4]) {
            assert!(vector.iter().all(|value| value.is_nan()));
        }
        for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max] {
            for vector in all_reduced(group, op, |_| vec![-0.0_f32; 4]) {
                assert_eq!(vector.map_bits(), [0x8000_0000; 4], "{op:?}");
            }
        }
        for (op, wanted) in [(ReduceOp::Min, 0x8000_0000), (ReduceOp::Max, 0)] {
            for negative in 0..3 {
                let input = |rank| vec![if rank == negative { -0.0_f32 } else { 0.0 }; 4];
                for vector in all_reduced(group, op, input) {
                    assert_eq!(vector.map_bits(), [wanted; 4], "{op:?}");
                }
            }
        }
    });
}

#[test]
fn bf16_average_on_three_ranks() {
    by_each_algorithm(3, |group| {
        // 1 + 2 + 4 = 7 has no rounding; 7/3 is rounded once, to the nearest of the 8-bit significands.
        for vector in all_reduced(group, ReduceOp::Avg, |rank| vec![bf16::from_f32((1 << rank) as f32); 9]) {
            assert_eq!(vector, [bf16::from_f32(7.0 / 3.0); 9]);
            assert_eq!(vector[0].to_bits(), 0x4015);
        }
    });
}

#[test]
fn integers_wrap() {
    by_each_algorithm(2, |group| {
        for vector in all_reduced(group, ReduceOp::Sum, |rank| vec![[120_i8, 100][rank]; 5]) {
            assert_eq!(vector, [-36; 5]);
        }
        for vector in all_reduced(group, ReduceOp::Prod, |_| vec![u64::MAX; 5]) {
            assert_eq!(vector, [1; 5]);
        }
        for vector in all_reduced(group, ReduceOp::Avg, |_| vec![-7_i32; 5]) {
            assert_eq!(vector, [-7; 5]);
        }
        // Towards zero.
        for vector in all_reduced(group, ReduceOp::Avg, |rank| vec![-(rank as i32); 5]) {
            assert_eq!(vector, [0; 5]);
        }
    });
}

/// Moved elements keep their bits, NaN payloads too.
#[test]
fn typed_reduce_scatter_all_gather_and_broadcast() {
    let odd_nan = f32::from_bits(0xffa1_2345);
    by_each_algorithm(3, |group| {
        on_all(group, |rank| {
            let me = rank.rank();
            let mut chunk = [0_u32; 2];
            rank.reduce_scatter(&[1, 2, 3, 4, 5, 6], &mut chunk, ReduceOp::Sum).unwrap();
            assert_eq!(chunk, [6 * me as u32 + 3, 6 * me as u32 + 6]);
            let mut whole = [0; 6];
            rank.all_gather(&chunk, &mut whole).unwrap();
            assert_eq!(whole, [3, 6, 9, 12, 15, 18]);
            let mut vector = [odd_nan; 4];
            rank.broadcast(&[odd_nan; 4][..if me == 1 { 4 } else { 0 }], &mut vector, 1).unwrap();
            assert!(vector.iter().all(|value| value.to_bits() == odd_nan.to_bits()));
            let mut mine = [me as f64; 3];
            rank.broadcast_in_place(&mut mine, 2).unwrap();
            assert_eq!(mine, [2.0; 3]);
            let mut scattered = [me as i8; 3];
            rank.reduce_scatter_in_place(&mut scattered, ReduceOp::Max).unwrap();
            let wanted: Vec<_> = (0..3).map(|at| if at == me { 2 } else { me as i8 }).collect();
            assert_eq!(scattered[..], wanted);
            let mut gathered = [me as u8; 3];
            rank.all_gather_in_place(&mut gathered).unwrap();
            assert_eq!(gathered, [0, 1, 2]);
        });
    });
}

/// The last byte of the vector is the last byte of its allocation (cases.md 20).
#[test]
fn one_element_at_the_end_of_an_allocation() {
    by_each_algorithm(4, |group| {
        let mut vectors: Vec<_> = (0..4).map(|rank| vec![rank].into_boxed_slice()).collect();
        on_each(group, &mut vectors, |rank, vector| {
            rank.all_reduce_in_place::<i32>(vector, ReduceOp::Sum).unwrap()
        });
        assert!(vectors.iter().all(|vector| **vector == [6]));
    });
}
