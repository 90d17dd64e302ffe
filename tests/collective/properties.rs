//! Random ranks, counts, record lengths, types, operations, algorithms and ciphers against the model.

use proptest::prelude::*;
use ringseal::collective::{Algorithm, Buffers, Crypto, KeyLength, Options, Request};
use ringseal::{Dtype, ReduceOp};

use crate::group::{group, inputs, on_each, options};
use crate::model::reduced;

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn all_reduce_is_the_model(
        ranks in 1..9_usize,
        count in 0..700_usize,
        record in 1..40_usize,
        dtype in prop::sample::select(Dtype::ALL.to_vec()),
        op in prop::sample::select(ReduceOp::ALL.to_vec()),
        algorithm in prop::sample::select(Algorithm::ALL.to_vec()),
        crypto in prop::sample::select(vec![
            Crypto::None, Crypto::Gcm(KeyLength::Aes128), Crypto::Gcm(KeyLength::Aes256),
        ]),
        seed in any::<u32>(),
    ) {
        let options = Options { algorithm, crypto, record_bytes: 16 * record, ..options() };
        let inputs = inputs(dtype, count, ranks, seed.into());
        let wanted = reduced(algorithm, false, dtype, op, &inputs);
        let mut vectors = inputs.clone();
        on_each(&mut group(ranks, &options), &mut vectors, |rank, vector| {
            rank.run(Request::AllReduce(op), dtype, Buffers::InPlace(vector)).unwrap();
        });
        for vector in vectors {
            prop_assert_eq!(&vector, &wanted);
        }
    }
}
