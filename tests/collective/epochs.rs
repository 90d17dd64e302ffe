//! Keys change before they have encrypted too much, on all ranks at once.

use ringseal::collective::{Algorithm, Crypto, Options};
use ringseal::{Error, ReduceOp};

use crate::group::{group, on_all, options};

#[test]
fn epochs_advance_on_all_ranks_alike_and_results_stay_right() {
    for algorithm in Algorithm::ALL {
        let options = Options { algorithm, key_bytes: 8 << 10, ..options() };
        let epochs = on_all(&mut group(4, &options), |rank| {
            for round in 1..=20 {
                let mut vector = [round; 200];
                rank.all_reduce_in_place(&mut vector, ReduceOp::Sum).unwrap();
                assert_eq!(vector, [4 * round; 200]);
            }
            rank.session().epoch()
        });
        assert!(epochs[0] >= 2, "{algorithm:?}: {epochs:?}");
        assert!(epochs.iter().all(|epoch| *epoch == epochs[0]), "{algorithm:?}: {epochs:?}");
    }
}

#[test]
fn a_collective_too_long_for_one_key_is_refused_by_every_rank_and_changes_nothing() {
    let options = Options { key_bytes: 4 << 10, ..options() };
    let mut group = group(3, &options);
    on_all(&mut group, |rank| {
        let mut long = vec![7_u8; 64 << 10];
        let error = rank.all_reduce_in_place(&mut long, ReduceOp::Sum).unwrap_err();
        assert!(matches!(error, Error::KeyExhausted { limit: 4096 }), "{error}");
        assert!(long.iter().all(|byte| *byte == 7) && !rank.is_poisoned());
        let mut short = [1_u8; 64];
        rank.all_reduce_in_place(&mut short, ReduceOp::Sum).unwrap();
        assert_eq!(short, [3; 64]);
    });
}

/// Without a cipher there is nothing to exhaust.
#[test]
fn the_plain_baseline_has_no_volume_limit() {
    let options = Options { key_bytes: 16, crypto: Crypto::None, ..options() };
    on_all(&mut group(2, &options), |rank| {
        let mut vector = [1_u8; 1000];
        rank.all_reduce_in_place(&mut vector, ReduceOp::Sum).unwrap();
        assert_eq!((vector, rank.session().epoch()), ([2; 1000], 0));
    });
}
