//! Keys change before they have encrypted too much, on all ranks at once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use ringseal::aead::{AesKey, Iv, Tag};
use ringseal::backend::cpu::Cpu;
use ringseal::backend::{Backend, CounterWidth, PreparedKey};
use ringseal::collective::{Algorithm, Crypto, Options};
use ringseal::{Error, ReduceOp, Result};

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

/// Counts the block cipher calls that each key seals with.
#[derive(Default)]
struct Counting {
    calls: Arc<Mutex<HashMap<Vec<u8>, u64>>>,
}

struct CountingKey {
    key: AesKey,
    inner: Box<dyn PreparedKey>,
    calls: Arc<Mutex<HashMap<Vec<u8>, u64>>>,
}

impl Backend for Counting {
    fn name(&self) -> &'static str {
        "counting"
    }

    fn prepare(&self, key: &AesKey) -> Result<Box<dyn PreparedKey>> {
        Ok(Box::new(CountingKey { key: key.clone(), inner: Cpu.prepare(key)?, calls: self.calls.clone() }))
    }
}

impl PreparedKey for CountingKey {
    fn ctr_xor(&self, counter_block: [u8; 16], width: CounterWidth, data: &mut [u8]) -> Result<()> {
        self.inner.ctr_xor(counter_block, width, data)
    }

    fn seal_in_place(&self, iv: Iv<'_>, aad: &[u8], data: &mut [u8]) -> Result<Tag> {
        // The hash subkey is made once for a key, the tag's mask for each message.
        let mut calls = self.calls.lock().unwrap();
        *calls.entry(self.key.as_bytes().to_vec()).or_insert(1) += data.len().div_ceil(16) as u64 + 1;
        drop(calls);
        self.inner.seal_in_place(iv, aad, data)
    }

    fn open_in_place(&self, iv: Iv<'_>, aad: &[u8], data: &mut [u8], tag: &Tag) -> Result<()> {
        self.inner.open_in_place(iv, aad, data, tag)
    }
}

/// What the session sets aside covers what is then sealed, for every collective and algorithm; and not by far too much.
#[test]
fn no_key_encrypts_more_than_its_limit() {
    for algorithm in Algorithm::ALL {
        let counting = Arc::new(Counting::default());
        let calls = counting.calls.clone();
        let key_bytes = 8 << 10;
        let options = Options { algorithm, backend: counting, key_bytes, ..options() };
        on_all(&mut group(3, &options), |rank| {
            for count in 0..120 {
                let mut vector = vec![1_i8; count * 5];
                rank.all_reduce_in_place(&mut vector, ReduceOp::Sum).unwrap();
                rank.reduce_scatter_in_place(&mut vector, ReduceOp::Sum).unwrap();
                rank.all_gather_in_place(&mut vector).unwrap();
                rank.broadcast_in_place(&mut vector, count % 3).unwrap();
            }
        });
        let calls = calls.lock().unwrap();
        assert!(calls.len() > 30, "{algorithm:?}: {} keys", calls.len());
        assert!(calls.values().all(|calls| *calls <= key_bytes / 16), "{algorithm:?}");
        let most = *calls.values().max().unwrap();
        assert!(most > key_bytes / 16 * 3 / 4, "{algorithm:?}: {most} of {}", key_bytes / 16);
    }
}
