//! The kernels' own source through the public interface, against the model of the standards.

use proptest::prelude::*;
use ringseal::Error;
use ringseal::aead::{Aead, AesKey, Iv};
use ringseal::backend::{CounterWidth, Record, by_name};

use crate::model;

fn emulated(key: &[u8]) -> Aead {
    Aead::new(by_name("emulated").unwrap().as_ref(), &AesKey::from_bytes(key).unwrap()).unwrap()
}

proptest! {
    // A launch fills 128 KiB of tables with 512 threads: some 20 ms.
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn ctr_is_the_model(
        key in key_bytes(),
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

fn key_bytes() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![Just(16), Just(24), Just(32)].prop_flat_map(|len| prop::collection::vec(any::<u8>(), len))
}

fn bytes(range: std::ops::RangeInclusive<usize>) -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), range)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]
    /// A batch with IVs, additional data and texts of any length; of what is opened, one is forged.
    #[test]
    fn batches_are_the_model(
        key in key_bytes(),
        messages in prop::collection::vec((bytes(1..=40), bytes(0..=60), bytes(0..=3000)), 1..=6),
        (forged, at, bit) in (any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0u8..8),
    ) {
        let aead = emulated(&key);
        let mut data: Vec<Vec<u8>> = messages.iter().map(|(_, _, text)| text.clone()).collect();
        let mut records: Vec<Record> = messages
            .iter()
            .zip(&mut data)
            .map(|((iv, aad, _), data)| Record { iv: Iv::new(iv).unwrap(), aad, data })
            .collect();
        let mut tags = aead.seal_records(&mut records).unwrap();
        for ((iv, aad, text), (record, tag)) in messages.iter().zip(records.iter().zip(&tags)) {
            let (ciphertext, expected) = model::gcm_seal(&key, iv, aad, text);
            prop_assert_eq!((&*record.data, tag), (&*ciphertext, &expected));
        }

        // A bit of the ciphertext, or of the tag behind it.
        let forged = forged.index(messages.len());
        let length = records[forged].data.len();
        let at = at.index(length + 16);
        match at.checked_sub(length) {
            None => records[forged].data[at] ^= 1u8 << bit,
            Some(at) => tags[forged][at] ^= 1u8 << bit,
        }
        let verdicts = aead.open_records(&mut records, &tags).unwrap();
        for (index, (_, _, text)) in messages.iter().enumerate() {
            prop_assert_eq!(verdicts[index], index != forged);
            let expected = if index == forged { vec![0; length] } else { text.clone() };
            prop_assert_eq!(&data[index], &expected);
        }
    }
}

/// cases.md 5: the shapes with nothing in them, and a batch of none.
#[test]
fn nothing_to_seal() {
    let aead = emulated(&[3; 32]);
    assert!(aead.seal_records(&mut []).unwrap().is_empty());
    assert!(aead.open_records(&mut [], &[]).unwrap().is_empty());
    let iv = Iv::from_nonce(&[5; 12]);
    let tag = aead.gmac(iv, b"").unwrap();
    assert_eq!(tag, model::gcm_seal(&[3; 32], &[5; 12], b"", b"").1);
    aead.verify_gmac(iv, b"", &tag).unwrap();
    assert!(matches!(aead.verify_gmac(iv, b"x", &tag), Err(Error::Authentication)));
    aead.ctr_xor([0; 16], CounterWidth::Full128, &mut []).unwrap();
}

/// Additional data too long for the batch kernels: such records get launches of their own, and a batch with them is
/// still in its order.
#[test]
fn long_additional_data_in_a_batch() {
    let aead = emulated(&[3; 16]);
    let iv = [5; 12];
    let aads = [0, 2048, 2049, 20_000, 17].map(|bytes| vec![bytes as u8; bytes]);
    let mut data: Vec<_> = (1..=5).map(|bytes| vec![0x3c; 100 * bytes]).collect();
    let expected: Vec<_> =
        data.iter().zip(&aads).map(|(text, aad)| model::gcm_seal(&[3; 16], &iv, aad, text)).collect();
    let plain = data.clone();
    let batch = |data: &mut [Vec<u8>], work: &mut dyn FnMut(&mut [Record<'_>])| {
        let iv = Iv::from_nonce(&iv);
        let records = data.iter_mut().zip(&aads).map(|(data, aad)| Record { iv, aad, data });
        work(&mut records.collect::<Vec<_>>());
    };
    let mut tags = Vec::new();
    batch(&mut data, &mut |records| tags = aead.seal_records(records).unwrap());
    let sealed: Vec<_> = data.iter().cloned().zip(tags.iter().copied()).collect();
    assert!(sealed == expected);
    tags[3][0] ^= 1;
    batch(&mut data, &mut |records| {
        assert_eq!(aead.open_records(records, &tags).unwrap(), [true, true, true, false, true]);
    });
    for (index, (opened, plain)) in data.iter().zip(&plain).enumerate() {
        assert!(*opened == if index == 3 { vec![0; plain.len()] } else { plain.clone() }, "{index}");
    }
}
