//! The interface on the CPU backend: results against the model, refusals, limits.

use aes_gcm::aead::AeadInOut;
use aes_gcm::aead::inout::InOutBuf;
use aes_gcm::{Aes128Gcm, Aes256Gcm, KeyInit};
use proptest::prelude::*;
use ringseal::aead::{
    Aead, AesKey, Iv, MAX_AAD_BYTES, MAX_IV_BYTES, MAX_PLAINTEXT_BYTES, Tag, check_aad_len, check_iv_len,
    check_overlap, check_plaintext_len, tag_from_bytes, tags_equal,
};
use ringseal::backend::{Backend, CounterWidth, PreparedKey, Record, by_name, gcm::HashSubkey};
use ringseal::{Error, Result};

use crate::model;

const PREFILL: u8 = 0xa5;
const KEY: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
const IV: [u8; 12] = [0x42; 12];

fn cpu(key: &[u8]) -> Aead {
    Aead::new(by_name("cpu").unwrap().as_ref(), &AesKey::from_bytes(key).unwrap()).unwrap()
}

fn iv(bytes: &[u8]) -> Iv<'_> {
    Iv::new(bytes).unwrap()
}

/// Bytes that differ from their neighbours.
fn message(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 256) as u8).collect()
}

fn key_bytes() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![Just(16), Just(24), Just(32)].prop_flat_map(|len| prop::collection::vec(any::<u8>(), len))
}

fn bytes(max: usize) -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..=max)
}

proptest! {
    #[test]
    fn seal_is_the_model(
        key in key_bytes(),
        nonce in prop::collection::vec(any::<u8>(), 1..=70),
        aad in bytes(70),
        plaintext in bytes(300),
    ) {
        let aead = cpu(&key);
        let (expected, expected_tag) = model::gcm_seal(&key, &nonce, &aad, &plaintext);
        let mut data = plaintext.clone();
        let tag = aead.seal_in_place(iv(&nonce), &aad, &mut data).unwrap();
        prop_assert_eq!((&data, tag), (&expected, expected_tag));
        let mut apart = vec![PREFILL; plaintext.len()];
        prop_assert_eq!(aead.seal(iv(&nonce), &aad, &plaintext, &mut apart).unwrap(), tag);
        prop_assert_eq!(&apart, &expected);

        aead.open(iv(&nonce), &aad, &expected, &mut apart, &tag).unwrap();
        prop_assert_eq!(&apart, &plaintext);
        aead.open_in_place(iv(&nonce), &aad, &mut data, &tag).unwrap();
        prop_assert_eq!(&data, &plaintext);
    }

    #[test]
    fn ctr_is_the_model(
        key in key_bytes(),
        high in any::<u128>(),
        low in prop_oneof![any::<u32>(), (0u32..20).prop_map(|below| u32::MAX - below)],
        all_ones in any::<bool>(),
        data in bytes(400),
    ) {
        // Counters just below a wrap of 32 and of 128 bits are as likely as others.
        let high = if all_ones { u128::MAX } else { high };
        let counter = (high & !0xffff_ffff | u128::from(low)).to_be_bytes();
        for (width, bits) in [(CounterWidth::Gcm32, 32), (CounterWidth::Full128, 128)] {
            let mut ours = data.clone();
            cpu(&key).ctr_xor(counter, width, &mut ours).unwrap();
            prop_assert_eq!(&ours, &model::ctr(&key, counter, bits, &data));
        }
    }

    #[test]
    fn gmac_is_the_tag_of_an_empty_message(key in key_bytes(), nonce in prop::collection::vec(any::<u8>(), 1..=20), aad in bytes(100)) {
        let tag = cpu(&key).gmac(iv(&nonce), &aad).unwrap();
        prop_assert_eq!(tag, model::gcm_seal(&key, &nonce, &aad, b"").1);
        cpu(&key).verify_gmac(iv(&nonce), &aad, &tag).unwrap();
    }
}

proptest! {
    // Lengths beyond the piece that the CPU backend works in, against a faster oracle than the model.
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn seal_is_aes_gcm(key in any::<[u8; 32]>(), nonce in any::<[u8; 12]>(), aad in bytes(40), len in 0usize..70_000) {
        let plaintext = message(len);
        let mut ours = plaintext.clone();
        let tag = cpu(&key).seal_in_place(Iv::from_nonce(&nonce), &aad, &mut ours).unwrap();
        let mut theirs = plaintext.clone();
        let their_tag = Aes256Gcm::new(&key.into())
            .encrypt_inout_detached(&nonce.into(), &aad, InOutBuf::from(theirs.as_mut_slice()))
            .unwrap();
        prop_assert_eq!(tag.as_slice(), their_tag.as_slice());
        prop_assert!(ours == theirs);
        cpu(&key).open_in_place(Iv::from_nonce(&nonce), &aad, &mut ours, &tag).unwrap();
        prop_assert!(ours == plaintext);
    }
}

/// cases.md 1: GCM wraps 32 bits, plain CTR carries through all 128.
#[test]
fn counter_widths_differ_at_the_wrap() {
    let counter = 0xffff_fffdu128.to_be_bytes();
    let [gcm, full] = [CounterWidth::Gcm32, CounterWidth::Full128].map(|width| {
        let mut data = [0; 80];
        cpu(&KEY).ctr_xor(counter, width, &mut data).unwrap();
        data
    });
    assert_eq!(gcm[..48], full[..48]);
    assert_eq!(gcm[48..64], model::aes_block(&KEY, [0; 16]));
    assert_eq!(full[48..64], model::aes_block(&KEY, (1u128 << 32).to_be_bytes()));
}

/// cases.md 2: limits are known from the length alone.
#[test]
fn limits() {
    assert_eq!(MAX_PLAINTEXT_BYTES, 68_719_476_704);
    check_plaintext_len(MAX_PLAINTEXT_BYTES).unwrap();
    let error = check_plaintext_len(MAX_PLAINTEXT_BYTES + 1).unwrap_err();
    assert!(matches!(error, Error::Length { what: "plaintext", got: 68_719_476_705, .. }), "{error}");
    check_plaintext_len(u128::MAX).unwrap_err();

    assert_eq!((MAX_AAD_BYTES, MAX_IV_BYTES), ((1 << 61) - 1, (1 << 61) - 1));
    check_aad_len(0).unwrap();
    check_aad_len(MAX_AAD_BYTES).unwrap();
    check_aad_len(MAX_AAD_BYTES + 1).unwrap_err();
    check_iv_len(1).unwrap();
    check_iv_len(MAX_IV_BYTES).unwrap();
    check_iv_len(MAX_IV_BYTES + 1).unwrap_err();
    check_iv_len(0).unwrap_err();
    assert!(matches!(Iv::new(&[]), Err(Error::Length { what: "IV", got: 0, .. })));
}

/// cases.md 2: refused before a byte is written or read: the addresses lead nowhere.
#[test]
fn too_long_a_message_is_refused_before_it_is_touched() {
    let nowhere = std::ptr::without_provenance_mut(64);
    let len = MAX_PLAINTEXT_BYTES as usize + 1;
    // SAFETY: the limit is checked before the addresses are used; with a fault the test would die.
    let sealed = unsafe { cpu(&KEY).seal_raw(iv(&IV), b"", nowhere, nowhere, len) };
    assert!(matches!(sealed, Err(Error::Length { what: "plaintext", .. })), "{sealed:?}");
    // SAFETY: as above.
    let opened = unsafe { cpu(&KEY).open_raw(iv(&IV), b"", nowhere, nowhere, len, &[0; 16]) };
    assert!(matches!(opened, Err(Error::Length { what: "plaintext", .. })), "{opened:?}");
}

#[test]
fn key_lengths() {
    for len in 0..=64 {
        let key = AesKey::from_bytes(&message(len));
        match len {
            16 | 24 | 32 => {
                let key = key.unwrap();
                assert_eq!((key.bits(), key.as_bytes()), (8 * len, message(len).as_slice()));
                assert!(!format!("{key:?}").contains("1, 2"), "{key:?}");
            }
            _ => assert!(matches!(key, Err(Error::Length { what: "AES key", .. })), "{len}"),
        }
    }
}

/// cases.md 3: the bit lengths in the tag go past 32 bits.
#[test]
#[ignore = "needs 5 GiB of memory and half a minute"]
fn bit_lengths_past_32_bits() {
    for len in [1usize << 29, (1 << 31) - 16, (1 << 32) + 16] {
        let mut data = vec![0; len];
        let tag = cpu(&KEY).seal_in_place(iv(&IV), b"", &mut data).unwrap();
        let last = (len / 16 + 1) as u32;
        let counter: Vec<u8> = IV.into_iter().chain(last.to_be_bytes()).collect();
        assert_eq!(data[len - 16..], model::aes_block(&KEY, counter.try_into().unwrap()));
        Aes128Gcm::new(&KEY.into())
            .decrypt_inout_detached(&IV.into(), b"", InOutBuf::from(data.as_mut_slice()), &tag.into())
            .unwrap();
        assert!(data.iter().all(|byte| *byte == 0));
    }
}

/// cases.md 6: every bit of tag, ciphertext, AAD and IV counts, and a refusal leaves zeros, never plaintext.
#[test]
fn every_flipped_bit_is_refused() {
    let aead = cpu(&KEY);
    let aad = b"step 3";
    let plaintext = message(37);
    let mut sealed = plaintext.clone();
    let tag = aead.seal_in_place(iv(&IV), aad, &mut sealed).unwrap();

    let whole = [IV.as_slice(), aad, &sealed, &tag].concat();
    for bit in 0..8 * whole.len() {
        let mut changed = whole.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        let (nonce, rest) = changed.split_at(IV.len());
        let (aad, rest) = rest.split_at(aad.len());
        let (ciphertext, tag) = rest.split_at(sealed.len());
        let tag = tag_from_bytes(tag).unwrap();

        let mut output = vec![PREFILL; ciphertext.len()];
        let apart = aead.open(iv(nonce), aad, ciphertext, &mut output, &tag);
        assert!(matches!(apart, Err(Error::Authentication)), "bit {bit}: {apart:?}");
        assert_eq!(output, vec![0; ciphertext.len()], "bit {bit}");

        let mut data = ciphertext.to_vec();
        let in_place = aead.open_in_place(iv(nonce), aad, &mut data, &tag);
        assert!(matches!(in_place, Err(Error::Authentication)), "bit {bit}: {in_place:?}");
        assert_eq!(data, vec![0; ciphertext.len()], "bit {bit}");
    }

    let mut output = vec![PREFILL; sealed.len()];
    aead.open(iv(&IV), aad, &sealed, &mut output, &tag).unwrap();
    assert_eq!(output, plaintext);
}

/// cases.md 6: an output of another length is refused and left alone.
#[test]
fn unequal_lengths_are_refused_untouched() {
    let aead = cpu(&KEY);
    for len in [0, 15, 17] {
        let mut output = vec![PREFILL; len];
        let sealed = aead.seal(iv(&IV), b"", &[1; 16], &mut output);
        assert!(matches!(sealed, Err(Error::InvalidArgument(_))), "{sealed:?}");
        let opened = aead.open(iv(&IV), b"", &[1; 16], &mut output, &[0; 16]);
        assert!(matches!(opened, Err(Error::InvalidArgument(_))), "{opened:?}");
        assert_eq!(output, vec![PREFILL; len]);
    }
}

/// cases.md 7: partial overlap is refused and nothing written; exactly in place and side by side work.
#[test]
fn partial_overlap_is_refused() {
    const LEN: usize = 48;
    let aead = cpu(&KEY);
    let (expected, expected_tag) = model::gcm_seal(&KEY, &IV, b"", &message(LEN));
    for (from, to) in [(0, 1), (0, 16), (16, 0), (0, 47), (47, 0), (0, 0), (0, 48), (48, 0)] {
        let mut buffer = vec![PREFILL; 2 * LEN];
        buffer[from..from + LEN].copy_from_slice(&message(LEN));
        let before = buffer.clone();
        let start = buffer.as_mut_ptr();
        // SAFETY: both ranges lie in `buffer`, which nothing else uses meanwhile.
        let sealed = unsafe { aead.seal_raw(iv(&IV), b"", start.add(from), start.add(to), LEN) };
        if from.abs_diff(to) % LEN == 0 {
            assert_eq!(sealed.unwrap(), expected_tag);
            assert_eq!(buffer[to..to + LEN], expected, "{from} to {to}");
            let start = buffer.as_mut_ptr();
            // SAFETY: as above, the other way round.
            unsafe { aead.open_raw(iv(&IV), b"", start.add(to), start.add(from), LEN, &expected_tag) }
                .unwrap();
            assert_eq!(buffer[from..from + LEN], message(LEN), "{from} to {to}");
        } else {
            assert!(matches!(sealed, Err(Error::InvalidArgument(_))), "{from} to {to}: {sealed:?}");
            let start = buffer.as_mut_ptr();
            // SAFETY: as above.
            let opened =
                unsafe { aead.open_raw(iv(&IV), b"", start.add(from), start.add(to), LEN, &[0; 16]) };
            assert!(matches!(opened, Err(Error::InvalidArgument(_))), "{from} to {to}: {opened:?}");
            assert_eq!(buffer, before);
        }
    }
    check_overlap(0, 0, u64::MAX).unwrap();
    check_overlap(0, u64::MAX, u64::MAX).unwrap();
    check_overlap(u64::MAX, 1, u64::MAX).unwrap_err();
    check_overlap(5, 6, 0).unwrap();
}

#[test]
fn raw_calls_take_null_for_nothing() {
    let null = std::ptr::null_mut();
    // SAFETY: nothing is read or written with a length of 0.
    let tag = unsafe { cpu(&KEY).seal_raw(iv(&[0; 12]), b"", null, null, 0) }.unwrap();
    assert_eq!(hex::encode(tag), "7346139595c0b41e497bbde365f42d0a");
    // SAFETY: as above.
    unsafe { cpu(&KEY).open_raw(iv(&[0; 12]), b"", null, null, 0, &tag) }.unwrap();
}

/// cases.md 8: no tag but a whole one.
#[test]
fn short_and_long_tags_are_refused() {
    let tag = cpu(&KEY).gmac(iv(&IV), b"aad").unwrap();
    let longer = [tag.as_slice(), &tag].concat();
    for len in 0..=32 {
        match tag_from_bytes(&longer[..len]) {
            Ok(parsed) => assert_eq!((len, parsed), (16, tag)),
            Err(error) => assert!(len != 16 && matches!(error, Error::Length { what: "tag", .. }), "{error}"),
        }
    }
}

#[test]
fn tags_compare_by_every_bit() {
    let tag: Tag = *b"sixteen byte tag";
    assert!(tags_equal(&tag, &tag.clone()));
    for bit in 0..128 {
        let mut other = tag;
        other[bit / 8] ^= 1 << (bit % 8);
        assert!(!tags_equal(&tag, &other), "bit {bit}");
    }
}

/// cases.md 10, host part: any alignment of any small length.
#[test]
fn misaligned_slices() {
    let aead = cpu(&KEY);
    for len in 0..=33 {
        let (expected, expected_tag) = model::gcm_seal(&KEY, &IV, b"aad", &message(len));
        for offset in [0, 1, 4, 8] {
            let mut buffer = [PREFILL; 64];
            buffer[offset..offset + len].copy_from_slice(&message(len));
            let tag = aead.seal_in_place(iv(&IV), b"aad", &mut buffer[offset..offset + len]).unwrap();
            assert_eq!(tag, expected_tag);
            assert_eq!(buffer[offset..offset + len], expected);
            let outside = buffer[..offset].iter().chain(&buffer[offset + len..]);
            assert!(outside.into_iter().all(|byte| *byte == PREFILL), "{len} bytes at {offset}");
        }
    }
}

#[test]
fn batches_give_each_record_its_own_verdict() {
    let aead = cpu(&KEY);
    let nonces: Vec<[u8; 12]> = (0..5).map(|record| [record; 12]).collect();
    let mut data: Vec<Vec<u8>> = (0..5).map(|record| message(100 * record)).collect();
    let mut records: Vec<_> = nonces
        .iter()
        .zip(&mut data)
        .map(|(nonce, data)| Record { iv: Iv::from_nonce(nonce), aad: b"batch", data })
        .collect();
    let mut tags = aead.seal_records(&mut records).unwrap();
    for (record, tag) in tags.iter().enumerate() {
        let (ciphertext, expected) = model::gcm_seal(&KEY, &nonces[record], b"batch", &message(100 * record));
        assert_eq!((records[record].data.to_vec(), *tag), (ciphertext, expected));
    }

    let few = aead.open_records(&mut records, &tags[..4]);
    assert!(matches!(few, Err(Error::InvalidArgument(_))), "{few:?}");

    tags[3][0] ^= 1;
    assert_eq!(aead.open_records(&mut records, &tags).unwrap(), [true, true, true, false, true]);
    for (record, data) in data.iter().enumerate() {
        assert_eq!(*data, if record == 3 { vec![0; 300] } else { message(100 * record) });
    }
}

/// A backend whose device fails after it has begun.
struct Failing;

impl Backend for Failing {
    fn name(&self) -> &'static str {
        "failing"
    }
    fn prepare(&self, _key: &AesKey) -> Result<Box<dyn PreparedKey>> {
        Ok(Box::new(Failing))
    }
}

impl PreparedKey for Failing {
    fn ctr_xor(&self, _counter_block: [u8; 16], _width: CounterWidth, _data: &mut [u8]) -> Result<()> {
        Err(Error::Cuda("lost".into()))
    }
    fn seal_in_place(&self, _iv: Iv<'_>, _aad: &[u8], _data: &mut [u8]) -> Result<Tag> {
        Err(Error::Cuda("lost".into()))
    }
    fn open_in_place(&self, _iv: Iv<'_>, _aad: &[u8], _data: &mut [u8], _tag: &Tag) -> Result<()> {
        Err(Error::Cuda("lost".into()))
    }
}

fn record(data: &mut [u8]) -> Record<'_> {
    Record { iv: Iv::from_nonce(&IV), aad: b"", data }
}

/// Plaintext must not stay where the caller expects ciphertext, nor the reverse.
#[test]
fn a_failing_backend_leaves_zeros() {
    let aead = Aead::new(&Failing, &AesKey::from_bytes(&KEY).unwrap()).unwrap();
    let lost = |result: Result<()>| assert!(matches!(result, Err(Error::Cuda(_))), "{result:?}");
    let mut output = [PREFILL; 16];
    lost(aead.seal(iv(&IV), b"", &[1; 16], &mut output).map(drop));
    assert_eq!(output, [0; 16]);
    output.fill(PREFILL);
    lost(aead.open(iv(&IV), b"", &[1; 16], &mut output, &[0; 16]));
    assert_eq!(output, [0; 16]);
    output.fill(PREFILL);
    lost(aead.ctr_xor([0; 16], CounterWidth::Full128, &mut output));
    assert_eq!(output, [0; 16]);
    output.fill(PREFILL);
    lost(aead.seal_records(&mut [record(&mut output)]).map(drop));
    assert_eq!(output, [0; 16]);
    output.fill(PREFILL);
    lost(aead.open_records(&mut [record(&mut output)], &[[0; 16]]).map(drop));
    assert_eq!(output, [0; 16]);
}

#[test]
fn backends_by_name() {
    assert_eq!(by_name("cpu").unwrap().name(), "cpu");
    assert_eq!(by_name("emulated").unwrap().name(), "emulated");
    let unknown = by_name("gpu").err().unwrap();
    assert!(
        matches!(&unknown, Error::InvalidArgument(text) if text.contains("auto, cpu, cuda, emulated")),
        "{unknown}"
    );
}

/// H and J0 as a launcher of its own gets them.
#[test]
fn hash_subkey_and_first_counter() {
    for len in [16, 24, 32] {
        let key = message(len);
        let subkey = HashSubkey::new(&AesKey::from_bytes(&key).unwrap());
        assert_eq!(*subkey.block(), model::aes_block(&key, [0; 16]));
    }
    let subkey = HashSubkey::new(&AesKey::from_bytes(&KEY).unwrap());
    assert_eq!(subkey.initial_counter(Iv::from_nonce(&IV)), *b"BBBBBBBBBBBB\0\0\0\x01");
    // cases.md 1: an IV chosen so that J0 is ff..fe.
    let wrapping = hex::decode("1b3fe4b5bb2da3bde1bb22e4c1712dcc").unwrap();
    assert_eq!(subkey.initial_counter(iv(&wrapping)), (u128::MAX - 1).to_be_bytes());
}
