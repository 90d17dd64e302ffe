//! The kernels' own source through the public interface, against the model of the standards.

use proptest::prelude::*;
use ringseal::aead::{Aead, AesKey};
use ringseal::backend::{CounterWidth, by_name};

use crate::model;

fn emulated(key: &[u8]) -> Aead {
    Aead::new(by_name("emulated").unwrap().as_ref(), &AesKey::from_bytes(key).unwrap()).unwrap()
}

proptest! {
    // A launch fills 128 KiB of tables with 512 threads: some 20 ms.
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn ctr_is_the_model(
        key in prop_oneof![Just(16), Just(24), Just(32)]
            .prop_flat_map(|len| prop::collection::vec(any::<u8>(), len)),
        high in prop_oneof![any::<u128>(), Just(u128::MAX)],
        low in prop_oneof![any::<u32>(), (0u32..600).prop_map(|below| u32::MAX - below)],
        data in prop::collection::vec(any::<u8>(), 0..=20_000),
        offset in 0usize..=16,
    ) {
        let counter = (high & !0xffff_ffff | u128::from(low)).to_be_bytes();
        for (width, bits) in [(CounterWidth::Gcm32, 32), (CounterWidth::Full128, 128)] {
            let mut ours = vec![0xa5; offset];
            ours.extend(&data);
            emulated(&key).ctr_xor(counter, width, &mut ours[offset..]).unwrap();
            prop_assert_eq!(&ours[offset..], &model::ctr(&key, counter, bits, &data));
            prop_assert!(ours[..offset].iter().all(|byte| *byte == 0xa5));
        }
    }
}

/// More data than one launch's blocks take in one turn.
#[test]
fn long_ctr_is_the_cpu_backend() {
    let key = [9; 16];
    let data: Vec<u8> = (0..300_007usize).map(|i| (i * 31 + i / 251) as u8).collect();
    for width in [CounterWidth::Gcm32, CounterWidth::Full128] {
        let counter = (u128::MAX - 9000).to_be_bytes();
        let cpu = Aead::new(by_name("cpu").unwrap().as_ref(), &AesKey::from_bytes(&key).unwrap()).unwrap();
        let (mut ours, mut expected) = (data.clone(), data.clone());
        emulated(&key).ctr_xor(counter, width, &mut ours).unwrap();
        cpu.ctr_xor(counter, width, &mut expected).unwrap();
        assert!(ours == expected);
    }
}
