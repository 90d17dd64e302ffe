//! The kernels on records, emulated, against RustCrypto's AES-GCM.

mod common;
#[path = "common/keys.rs"]
mod keys;

use aes_gcm::aead::{AeadInOut, KeyInit, array::Array};
use aes_gcm::{Aes128Gcm, Aes256Gcm, AesGcm, aead::consts::U12, aes::Aes192};
use common::{bytes, raw};
use keys::{ghash_key_of, hash_key};
use ringseal_kernels::aes::expand_key;
use ringseal_kernels::device::emulated::{Launch, launch};
use ringseal_kernels::gcm::{self, FORGED, Record, RecordsParams, VERIFIED, nonce_j0};
use ringseal_kernels::portable;

/// Memory aligned as kernels want it.
#[repr(C, align(16))]
#[derive(Clone, Copy)]
struct Aligned([u8; 16]);

struct Buffer(Vec<Aligned>);

impl Buffer {
    fn new(bytes: &[u8]) -> Self {
        let blocks = bytes.chunks(16).map(|chunk| {
            let mut block = [0xa5; 16];
            block[..chunk.len()].copy_from_slice(chunk);
            Aligned(block)
        });
        // One more, to see writes past the end.
        Buffer(blocks.chain([Aligned([0xa5; 16])]).collect())
    }

    fn address(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    fn bytes(&self) -> Vec<u8> {
        self.0.iter().flat_map(|block| block.0).collect()
    }
}

/// The kernels of one module: sealing and opening, for AES-128, 192 and 256.
struct Kernels {
    records: [[unsafe fn(RecordsParams); 2]; 3],
    shared: u32,
}

const SM_90A: Kernels = Kernels {
    records: [
        [gcm::gcm_seal_records_128, gcm::gcm_open_records_128],
        [gcm::gcm_seal_records_192, gcm::gcm_open_records_192],
        [gcm::gcm_seal_records_256, gcm::gcm_open_records_256],
    ],
    shared: gcm::RECORDS_SHARED,
};

const SM_80: Kernels = Kernels {
    records: [
        [portable::gcm_seal_records_128, portable::gcm_open_records_128],
        [portable::gcm_seal_records_192, portable::gcm_open_records_192],
        [portable::gcm_seal_records_256, portable::gcm_open_records_256],
    ],
    shared: portable::RECORDS_SHARED,
};

/// Seals all cases in one launch, compares, opens them again, some forged; by the kernels of both modules.
fn check(key: &[u8], grid: u32, cases: &[(usize, usize)]) {
    for kernels in [SM_90A, SM_80] {
        check_kernels(&kernels, key, grid, cases);
    }
}

fn check_kernels(kernels: &Kernels, key: &[u8], grid: u32, cases: &[(usize, usize)]) {
    let ghash = ghash_key_of(hash_key(key));
    let keys = expand_key(key);
    let texts: Vec<Vec<u8>> = (0..cases.len()).map(|i| bytes(1 + i as u64, cases[i].0)).collect();
    let aads: Vec<Vec<u8>> = (0..cases.len()).map(|i| bytes(1001 + i as u64, cases[i].1)).collect();
    let nonces: Vec<Vec<u8>> = (0..cases.len()).map(|i| bytes(2001 + i as u64, 12)).collect();
    let inputs: Vec<Buffer> = texts.iter().map(|text| Buffer::new(text)).collect();
    let outputs: Vec<Buffer> = texts.iter().map(|text| Buffer::new(&vec![0xa5; text.len()])).collect();
    let aad_buffers: Vec<Buffer> = aads.iter().map(|aad| Buffer::new(aad)).collect();
    let tags = vec![[0u8; 16]; cases.len()];
    let verdicts = vec![0u32; cases.len()];
    let records: Vec<Record> = (0..cases.len())
        .map(|i| Record {
            input: inputs[i].address(),
            output: outputs[i].address(),
            aad: aad_buffers[i].address(),
            tag: tags[i].as_ptr() as u64,
            verdict: &raw const verdicts[i] as u64,
            length: cases[i].0 as u32,
            aad_length: cases[i].1 as u32,
            j0: nonce_j0(raw(&nonces[i])),
        })
        .collect();
    let params = |records: &[Record]| RecordsParams {
        keys,
        ghash_key: &raw const *ghash as u64,
        records: records.as_ptr() as u64,
        count: records.len() as u32,
    };
    let run = |seal: bool, params: RecordsParams| {
        let kernel = kernels.records[key.len() / 8 - 2][usize::from(!seal)];
        // SAFETY: all addresses are of live buffers of the right length.
        launch(&[Launch::new(grid, 512, kernels.shared, move || unsafe { kernel(params) })]);
    };
    run(true, params(&records));
    for i in 0..cases.len() {
        let (expected, tag) = seal(key, &nonces[i], &aads[i], &texts[i]);
        let sealed = outputs[i].bytes();
        assert!(sealed[..cases[i].0] == expected[..], "ciphertext of record {i}, {:?}", cases[i]);
        assert!(sealed[cases[i].0..].iter().all(|&b| b == 0xa5), "written past the end of record {i}");
        assert_eq!(tags[i], tag, "tag of record {i}, {:?}", cases[i]);
    }
    // Open in place, every third with one bit of its tag, text or additional data changed.
    let mut opened: Vec<Buffer> = outputs.iter().map(|output| Buffer(output.0.clone())).collect();
    let mut open_tags = tags.clone();
    let forged: Vec<bool> = (0..cases.len())
        .map(|i| match i % 3 {
            1 => {
                open_tags[i][i % 16] ^= 1 << (i % 8);
                true
            }
            2 if cases[i].0 > 0 => {
                let at = i * 7919 % cases[i].0;
                opened[i].0[at / 16].0[at % 16] ^= 0x80;
                true
            }
            _ => false,
        })
        .collect();
    let open_records: Vec<Record> = (0..cases.len())
        .map(|i| Record {
            input: opened[i].address(),
            output: opened[i].address(),
            tag: open_tags[i].as_ptr() as u64,
            ..records[i]
        })
        .collect();
    run(false, params(&open_records));
    for i in 0..cases.len() {
        assert_eq!(verdicts[i], if forged[i] { FORGED } else { VERIFIED }, "record {i}, {:?}", cases[i]);
        let expected = if forged[i] { vec![0; cases[i].0] } else { texts[i].clone() };
        let plain = opened[i].bytes();
        assert!(plain[..cases[i].0] == expected[..], "text of record {i}, {:?}", cases[i]);
        assert!(plain[cases[i].0..].iter().all(|&b| b == 0xa5), "written past the end of record {i}");
    }
}

fn seal(key: &[u8], nonce: &[u8], aad: &[u8], text: &[u8]) -> (Vec<u8>, [u8; 16]) {
    let mut text = text.to_vec();
    let nonce: Array<u8, U12> = Array::try_from(nonce).unwrap();
    let buffer = text.as_mut_slice().into();
    let tag = match key.len() {
        16 => Aes128Gcm::new_from_slice(key).unwrap().encrypt_inout_detached(&nonce, aad, buffer),
        24 => AesGcm::<Aes192, U12>::new_from_slice(key).unwrap().encrypt_inout_detached(&nonce, aad, buffer),
        _ => Aes256Gcm::new_from_slice(key).unwrap().encrypt_inout_detached(&nonce, aad, buffer),
    };
    (text, tag.unwrap().into())
}

#[test]
fn records_of_every_shape() {
    let cases = [
        (0, 0),
        (16384, 64),
        (1, 0),
        (16, 13),
        (17, 20),
        (4096 + 5, 64),
        (16384 + 16, 31),
        (0, 64),
        (65536, 64),
        (2 * 16384 - 1, 2048),
    ];
    check(&bytes(77, 16), 3, &cases);
}

#[test]
fn long_records_cross_segments() {
    check(&bytes(78, 32), 1, &[(262_144 + 16_384 + 7, 64), (300, 1)]);
}

#[test]
fn aes_192() {
    check(&bytes(79, 24), 2, &[(20_000, 40), (33, 0), (15, 17)]);
}

/// More records than a thread block prepares masks for at once.
#[test]
fn many_records() {
    check(&bytes(80, 16), 1, &[(20, 5); 300]);
}
