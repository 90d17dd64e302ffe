//! Steps on records with keystream made ahead, emulated, against RustCrypto's AES-GCM: with all pads, with some, with none,
//! and with pads that are not what they should be.

mod common;
#[path = "common/keys.rs"]
mod keys;

use aes_gcm::aead::{AeadInOut, KeyInit};
use aes_gcm::{Aes128Gcm, Aes256Gcm};
use common::bytes;
use half::bf16;
use keys::{ghash_key_of, hash_key};
use ringseal_kernels::aes::expand_key;
use ringseal_kernels::device::emulated::{Launch, launch};
use ringseal_kernels::gcm::{FORGED, VERIFIED};
use ringseal_kernels::ghash::GhashKey;
use ringseal_kernels::padded::{
    PAD_FILL_SHARED, PADDED_SHARED, PadFillParams, PadHead, PaddedParams, PaddedSide, pad_claim, pad_name,
    padded_open, padded_reduce, padded_reduce_seal, padded_seal, pads_fill_128, pads_fill_256,
};
use ringseal_kernels::record::{AAD_BLOCKS, Call, Header};
use ringseal_kernels::reduce::reduction;
use ringseal_kernels::sealed::SealedKey;

const F32: u32 = 0;
const BF16: u32 = 3;
const SUM: u32 = 0;
const AVG: u32 = 1;
const SEQUENCE: u64 = 0x0123_4567_89ab;
const CALL: Call = Call { codes: [0x0403_0201, 0x0807_0605, 9, 10], count: 12_345, ranks: 3, reserved: 0 };

/// Memory with the alignment that kernels want.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
struct Block([u8; 16]);

#[derive(Clone)]
struct Buffer(Vec<Block>);

impl Buffer {
    /// Followed by a block of 0xa5, to see writes past the end.
    fn new(bytes: &[u8]) -> Self {
        let mut blocks = vec![Block([0xa5; 16]); bytes.len().div_ceil(16) + 1];
        for (block, bytes) in blocks.iter_mut().zip(bytes.chunks(16)) {
            block.0[..bytes.len()].copy_from_slice(bytes);
        }
        Buffer(blocks)
    }

    fn blank(bytes: usize) -> Self {
        Self::new(&vec![0xa5; bytes])
    }

    fn address(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    fn bytes(&self) -> Vec<u8> {
        self.0.iter().flat_map(|block| block.0).collect()
    }
}

/// One sender's key and pads.
struct Side {
    key: Vec<u8>,
    ghash: Box<GhashKey>,
    pads: Buffer,
    heads: Vec<PadHead>,
    serial: u32,
    sender: u32,
    step: u32,
}

impl Side {
    fn new(key: &[u8], chunk: &Chunk, serial: u32, sender: u32, step: u32) -> Self {
        Side {
            ghash: ghash_key_of(hash_key(key)),
            key: key.to_vec(),
            pads: Buffer::blank(chunk.bytes.next_multiple_of(16)),
            heads: vec![PadHead::default(); chunk.records()],
            serial,
            sender,
            step,
        }
    }

    /// Makes the first `count` pads.
    fn fill(&self, chunk: &Chunk, count: usize) {
        let params = PadFillParams {
            round_keys: expand_key(&self.key),
            pads: self.pads.address(),
            heads: self.heads.as_ptr() as u64,
            bytes: chunk.bytes as u64,
            name: pad_name(SEQUENCE, self.step),
            record_bytes: chunk.record,
            count: count as u32,
            serial: self.serial,
            slot_records: 0,
            entry: 0,
            misses: 0,
        };
        // SAFETY: pads and heads are of live memory of the right length.
        launch(&[Launch::new(2, 512, PAD_FILL_SHARED, || unsafe {
            if self.key.len() == 16 { pads_fill_128(params) } else { pads_fill_256(params) }
        })]);
    }

    fn side(&self) -> PaddedSide {
        PaddedSide {
            key: SealedKey { round_keys: expand_key(&self.key), ghash_key: &raw const *self.ghash as u64 },
            pads: self.pads.address(),
            heads: self.heads.as_ptr() as u64,
            count: self.heads.len() as u32,
            serial: self.serial,
            sender: self.sender,
            step: self.step,
        }
    }

    /// The model: each record of the chunk sealed by another AES-GCM.
    fn seal(&self, chunk: &Chunk, text: &[u8]) -> (Vec<u8>, Vec<[u8; 16]>) {
        let (mut sealed, mut tags) = (text.to_vec(), Vec::new());
        let records = chunk.records();
        for (index, record) in sealed.chunks_mut(chunk.record as usize).enumerate() {
            let header = Header {
                call: CALL,
                sequence: SEQUENCE,
                sender: self.sender,
                step: self.step,
                record: index as u32,
                last: index + 1 == records,
            };
            let bytes = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>();
            let nonce: [u8; 12] = bytes(&header.nonce()).try_into().unwrap();
            let aad: Vec<u8> = (0..AAD_BLOCKS).flat_map(|i| bytes(&header.associated_data(i))).collect();
            let tag = if self.key.len() == 16 {
                Aes128Gcm::new_from_slice(&self.key).unwrap().encrypt_inout_detached(
                    &nonce.into(),
                    &aad,
                    record.into(),
                )
            } else {
                Aes256Gcm::new_from_slice(&self.key).unwrap().encrypt_inout_detached(
                    &nonce.into(),
                    &aad,
                    record.into(),
                )
            };
            tags.push(tag.unwrap().into());
        }
        (sealed, tags)
    }
}

#[derive(Clone, Copy, Debug)]
struct Chunk {
    bytes: usize,
    record: u32,
    grid: u32,
    reduction: u32,
}

impl Chunk {
    fn records(&self) -> usize {
        self.bytes.div_ceil(self.record as usize)
    }
}

/// What a step leaves.
struct Outcome {
    output: Vec<u8>,
    sent: Vec<u8>,
    tags: Vec<[u8; 16]>,
    verdicts: Vec<u32>,
    misses: u32,
    scratch: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Work {
    Seal,
    Open,
    Reduce,
    ReduceSeal,
}

fn run(
    work: Work,
    chunk: &Chunk,
    opens: &Side,
    seals: &Side,
    input: &[u8],
    tags_in: &[[u8; 16]],
    local: &[u8],
) -> Outcome {
    let (input, local) = (Buffer::new(input), Buffer::new(local));
    let (output, sent) = (Buffer::blank(chunk.bytes), Buffer::blank(chunk.bytes));
    let tags_in = Buffer(tags_in.iter().map(|&tag| Block(tag)).collect());
    let tags_out = Buffer::blank(16 * chunk.records());
    let verdicts = vec![0u32; chunk.records()];
    let scratch = Buffer::blank(2 * (chunk.grid * chunk.record) as usize);
    let misses = 0u32;
    let params = PaddedParams {
        call: CALL,
        opens: opens.side(),
        seals: seals.side(),
        sequence: SEQUENCE,
        input: input.address(),
        local: local.address(),
        output: output.address(),
        sent: sent.address(),
        tags_in: tags_in.address(),
        tags_out: tags_out.address(),
        verdicts: verdicts.as_ptr() as u64,
        scratch: scratch.address(),
        misses: &raw const misses as u64,
        bytes: chunk.bytes as u64,
        record_bytes: chunk.record,
        rounds: if opens.key.len() == 16 { 10 } else { 14 },
        reduction: chunk.reduction,
        ranks: 3,
    };
    // SAFETY: all addresses are of live buffers of the right length.
    launch(&[Launch::new(chunk.grid, 512, PADDED_SHARED, || unsafe {
        match work {
            Work::Seal => padded_seal(params),
            Work::Open => padded_open(params),
            Work::Reduce => padded_reduce(params),
            Work::ReduceSeal => padded_reduce_seal(params),
        }
    })]);
    // SAFETY: as the kernels left it.
    let misses = unsafe { (&raw const misses).read_volatile() };
    let tags = tags_out.0[..chunk.records()].iter().map(|block| block.0).collect();
    let (output, sent) = (output.bytes(), sent.bytes());
    assert!(output[chunk.bytes..].iter().all(|&byte| byte == 0xa5), "written past the output");
    assert!(
        sent[chunk.bytes.next_multiple_of(16)..].iter().all(|&byte| byte == 0xa5),
        "written past what is sent"
    );
    Outcome {
        output: output[..chunk.bytes].to_vec(),
        sent: sent[..chunk.bytes].to_vec(),
        tags,
        verdicts,
        misses,
        scratch: scratch.bytes(),
    }
}

/// Elements that are small numbers, so that sums have no NaN.
fn vector(seed: u64, chunk: &Chunk) -> Vec<u8> {
    let random = bytes(seed, chunk.bytes.div_ceil(2));
    let mut bytes: Vec<u8> = match chunk.reduction >> 8 {
        F32 => random.iter().flat_map(|&byte| (f32::from(byte) * 0.37 - 40.0).to_le_bytes()).collect(),
        _ => random.iter().flat_map(|&byte| bf16::from_f32(f32::from(byte) - 128.0).to_le_bytes()).collect(),
    };
    bytes.truncate(chunk.bytes);
    bytes
}

fn reduced(chunk: &Chunk, a: &[u8], b: &[u8], finish: bool) -> Vec<u8> {
    let average = finish && chunk.reduction & 0xff == AVG;
    let divide = |sum: f32| if average { sum / 3.0 } else { sum };
    match chunk.reduction >> 8 {
        F32 => {
            let word = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
            let pairs = a.chunks(4).zip(b.chunks(4));
            pairs.flat_map(|(a, b)| divide(word(a) + word(b)).to_le_bytes()).collect()
        }
        _ => {
            let word = |bytes: &[u8]| bf16::from_le_bytes(bytes.try_into().unwrap()).to_f32();
            let sum = |a: &[u8], b: &[u8]| bf16::from_f32(word(a) + word(b));
            let pairs = a.chunks(2).zip(b.chunks(2));
            pairs
                .map(|(a, b)| sum(a, b))
                .map(|sum| if average { bf16::from_f32(divide(sum.to_f32())) } else { sum })
                .flat_map(bf16::to_le_bytes)
                .collect()
        }
    }
}

const KEYS: [[u8; 32]; 2] = [[0x11; 32], [0x22; 32]];

/// The four steps with `ready` pads of each side, the others missing.
fn check(chunk: Chunk, key_bytes: usize, ready: [usize; 2]) {
    let text = vector(1, &chunk);
    let local = vector(2, &chunk);
    let sides = || {
        let opens = Side::new(&KEYS[0][..key_bytes], &chunk, 7, 1, 5);
        let seals = Side::new(&KEYS[1][..key_bytes], &chunk, 8, 2, 6);
        opens.fill(&chunk, ready[0]);
        seals.fill(&chunk, ready[1]);
        (opens, seals)
    };
    let (received, tags_in) = sides().0.seal(&chunk, &text);
    for work in [Work::Seal, Work::Open, Work::Reduce, Work::ReduceSeal] {
        let context = format!("{chunk:?}, {key_bytes}, {ready:?}, {work:?}");
        let (opens, seals) = sides();
        let (does_open, does_seal) = (work != Work::Seal, matches!(work, Work::Seal | Work::ReduceSeal));
        let input = if does_open { &received } else { &text };
        let outcome = run(work, &chunk, &opens, &seals, input, &tags_in, &local);
        let plain = match work {
            Work::Seal | Work::Open => text.clone(),
            _ => reduced(&chunk, &text, &local, work == Work::Reduce),
        };
        if does_seal {
            let (sealed, tags) = seals.seal(&chunk, &plain);
            assert!(outcome.sent == sealed, "{context}");
            assert_eq!(outcome.tags, tags, "{context}");
        } else {
            assert!(outcome.output == plain, "{context}");
        }
        if does_open {
            assert!(outcome.verdicts.iter().all(|&verdict| verdict == VERIFIED), "{context}");
        }
        let missing = |used: bool, ready: usize| if used { chunk.records() - ready } else { 0 };
        let expected = missing(does_open, ready[0]) + missing(does_seal, ready[1]);
        assert_eq!(outcome.misses as usize, expected, "{context}");
        // Every pad that was used is claimed, and what was made in its place is gone.
        let claimed = |side: &Side| side.heads.iter().all(|head| head.claim == 0);
        assert!(!does_open || claimed(&opens), "{context}");
        assert!(!does_seal || claimed(&seals), "{context}");
        if outcome.misses > 0 {
            let wiped = outcome.scratch.chunks(2 * chunk.record as usize).take(chunk.grid as usize);
            assert!(
                wiped.into_iter().all(|own| own.iter().all(|&b| b == 0) || own.iter().all(|&b| b == 0xa5)),
                "{context}"
            );
        }
    }
}

#[test]
fn all_pads_ready() {
    let f32 = |bytes, record, grid| Chunk { bytes, record, grid, reduction: reduction(F32, SUM) };
    check(f32(4, 4096, 1), 16, [1, 1]);
    check(f32(3 * 16384 + 4 * 1023, 16384, 1), 16, [4, 4]);
    check(f32(2 * 40_960 + 100, 40_960, 2), 32, [3, 3]);
    check(f32(65_536 + 32_768, 32_768, 1), 16, [3, 3]);
    let average = Chunk { bytes: 40_002, record: 16_400, grid: 1, reduction: reduction(BF16, AVG) };
    check(average, 16, [3, 3]);
}

#[test]
fn missing_pads_are_made_in_place() {
    for (key, ready) in [(16, [0, 0]), (32, [0, 0]), (16, [2, 0]), (32, [0, 3]), (16, [1, 2])] {
        check(
            Chunk { bytes: 4 * 8192 + 20, record: 8192, grid: 2, reduction: reduction(F32, SUM) },
            key,
            ready,
        );
    }
}

/// A pad of another collective, step, key or record, or one that was claimed before, must not be used.
#[test]
fn a_pad_serves_its_own_record_only() {
    let chunk = Chunk { bytes: 2 * 4096, record: 4096, grid: 1, reduction: reduction(F32, SUM) };
    let text = vector(1, &chunk);
    type Spoil = fn(&mut Side);
    let spoils: [(&str, Spoil); 6] = [
        ("another collective", |side| side.heads[0].name += 1 << 16),
        ("another step", |side| side.heads[0].name ^= 1),
        ("another key", |side| side.heads[0].claim = pad_claim(side.serial + 1, 0)),
        ("another record", |side| side.heads[0].claim = pad_claim(side.serial, 1)),
        ("claimed", |side| side.heads[0].claim = 0),
        ("too short", |side| side.heads[0].blocks = 255),
    ];
    for (what, spoil) in spoils {
        let opens = Side::new(&KEYS[0][..16], &chunk, 7, 1, 5);
        let mut seals = Side::new(&KEYS[1][..16], &chunk, 8, 2, 6);
        seals.fill(&chunk, 2);
        // Were it used, the ciphertext would be wrong.
        seals.pads.0[..256].fill(Block([0x5a; 16]));
        spoil(&mut seals);
        let outcome = run(Work::Seal, &chunk, &opens, &seals, &text, &[[0; 16]; 2], &text);
        let (sealed, tags) = seals.seal(&chunk, &text);
        assert!(outcome.sent == sealed, "{what}");
        assert_eq!(outcome.tags, tags, "{what}");
        assert_eq!(outcome.misses, 1, "{what}");
    }
}

/// The second step on the same pads finds them claimed.
#[test]
fn a_pad_serves_once() {
    let chunk = Chunk { bytes: 3 * 4096, record: 4096, grid: 1, reduction: reduction(F32, SUM) };
    let text = vector(1, &chunk);
    let opens = Side::new(&KEYS[0][..16], &chunk, 7, 1, 5);
    let seals = Side::new(&KEYS[1][..16], &chunk, 8, 2, 6);
    opens.fill(&chunk, 3);
    let (received, tags) = opens.seal(&chunk, &text);
    let misses = [0, 3].map(|expected| {
        let outcome = run(Work::Open, &chunk, &opens, &seals, &received, &tags, &text);
        assert!(outcome.output == text);
        (outcome.misses, expected)
    });
    assert!(misses.iter().all(|(misses, expected)| misses == expected), "{misses:?}");
}

#[test]
fn forged_records_leave_nothing() {
    let chunk = Chunk { bytes: 3 * 8192 + 52, record: 8192, grid: 2, reduction: reduction(F32, SUM) };
    let (text, local) = (vector(1, &chunk), vector(2, &chunk));
    for (work, forged, at) in
        [(Work::Open, 0, 17), (Work::Reduce, 2, 8191), (Work::ReduceSeal, 1, 0), (Work::ReduceSeal, 3, 51)]
    {
        for forge_tag in [false, true] {
            let opens = Side::new(&KEYS[0][..16], &chunk, 7, 1, 5);
            let seals = Side::new(&KEYS[1][..16], &chunk, 8, 2, 6);
            opens.fill(&chunk, 4);
            seals.fill(&chunk, 4);
            let (mut received, mut tags) = opens.seal(&chunk, &text);
            if forge_tag {
                tags[forged][at % 16] ^= 0x10;
            } else {
                received[8192 * forged + at] ^= 1;
            }
            let outcome = run(work, &chunk, &opens, &seals, &received, &tags, &local);
            let whole = if work == Work::Open { text.clone() } else { reduced(&chunk, &text, &local, true) };
            let (sealed, tags_out) = seals.seal(&chunk, &whole);
            for (record, &tag_out) in tags_out.iter().enumerate() {
                let range = 8192 * record..chunk.bytes.min(8192 * (record + 1));
                let bad = record == forged;
                assert_eq!(outcome.verdicts[record], if bad { FORGED } else { VERIFIED });
                let (got, good) = match work {
                    Work::ReduceSeal => (&outcome.sent[range.clone()], &sealed[range]),
                    _ => (&outcome.output[range.clone()], &whole[range]),
                };
                assert!(
                    if bad { got.iter().all(|&byte| byte == 0) } else { got == good },
                    "{work:?} {record}"
                );
                if work == Work::ReduceSeal {
                    assert_eq!(outcome.tags[record], if bad { [0; 16] } else { tag_out });
                }
            }
        }
    }
}
