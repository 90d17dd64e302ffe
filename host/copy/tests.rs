//! Both sides on the CPU: the far side in place of the GPU's, by RustCrypto or by the emulated kernels.

use std::collections::HashSet;

use ringseal_kernels::gcm::{FORGED, Record, VERIFIED};

use super::*;
use crate::aead::{Aead, AesKey, Iv};
use crate::backend;
use crate::channel::GroupSecret;

/// A far side whose device memory are vectors, and whose kernels do what the notes say. A piece passes only when it is asked
/// about twice, as a device's would.
struct HostFar {
    notes: Notes,
    aead: Aead,
    staging: Vec<u8>,
    device_staging: Vec<u8>,
    memory: Vec<u8>,
    control: Vec<u8>,
    queued: usize,
    passed: usize,
}

impl HostFar {
    fn new(
        keys: &Keys,
        direction: Direction,
        shape: Shape,
        call: Call,
        backend: &str,
        mut memory: Vec<u8>,
    ) -> Self {
        let backend = backend::by_name(backend).unwrap();
        let staging = vec![0; shape.slots * shape.slot_bytes()];
        let (mut device_staging, mut control) = (staging.clone(), vec![0; Notes::control_bytes(shape)]);
        let notes = Notes {
            direction,
            call,
            shape,
            control: control.as_mut_ptr() as u64,
            texts: memory.as_mut_ptr() as u64,
            staging: device_staging.as_mut_ptr() as u64,
        };
        let aead = Aead::new(backend.as_ref(), &keys.key(direction).unwrap()).unwrap();
        Self { notes, aead, staging, device_staging, memory, control, queued: 0, passed: 0 }
    }

    fn work(&mut self, piece: usize) {
        let (notes, shape) = (self.notes, self.notes.shape);
        let (slot, texts) = (piece % shape.slots * shape.slot_bytes(), shape.piece_bytes(piece));
        let tags = slot + shape.text_bytes()..slot + shape.text_bytes() + 16 * shape.piece(piece).len();
        let staged = slot..slot + texts.len();
        notes.write(piece, &mut self.control[notes.of_piece(piece)]);
        match notes.direction {
            Direction::ToDevice => {
                self.memory[texts].copy_from_slice(&self.staging[staged]);
                self.control[notes.tags(piece)].copy_from_slice(&self.staging[tags]);
                self.run(piece);
            }
            Direction::ToHost => {
                self.run(piece);
                for range in [staged, tags] {
                    self.staging[range.clone()].copy_from_slice(&self.device_staging[range]);
                }
            }
        }
    }

    /// What a kernel does with a piece's descriptors.
    fn run(&mut self, piece: usize) {
        let descriptors = self.control[self.notes.of_piece(piece)].as_chunks::<64>().0;
        let descriptors = descriptors[..self.notes.shape.piece(piece).len()].to_vec();
        for descriptor in descriptors {
            // SAFETY: a record is plain words.
            let record: Record = unsafe { descriptor.as_ptr().cast::<Record>().read_unaligned() };
            let nonce: [u8; 16] = bytemuck::cast(record.j0);
            assert_eq!(nonce[12..], [0, 0, 0, 1]);
            let iv = Iv::from_nonce(nonce.first_chunk().unwrap());
            let (length, aad_length) = (record.length as usize, record.aad_length as usize);
            let part = |address: u64, bytes: usize, of: &Vec<u8>| {
                let begin = (address - of.as_ptr() as u64) as usize;
                assert!(begin + bytes <= of.len(), "outside its memory");
                begin..begin + bytes
            };
            let associated = self.control[part(record.aad, aad_length, &self.control)].to_vec();
            let input = part(record.input, length, &self.memory);
            let verdict = part(record.verdict, 4, &self.control);
            match self.notes.direction {
                Direction::ToDevice => {
                    assert_eq!(record.input, record.output);
                    let tag = self.control[part(record.tag, 16, &self.control)].try_into().unwrap();
                    let opened = self.aead.open_in_place(iv, &associated, &mut self.memory[input], &tag);
                    let found = if opened.is_ok() { VERIFIED } else { FORGED };
                    assert_eq!(self.control[verdict.clone()], [0; 4], "a record is opened twice");
                    self.control[verdict].copy_from_slice(&found.to_le_bytes());
                }
                Direction::ToHost => {
                    let output = part(record.output, length, &self.device_staging);
                    let tag = part(record.tag, 16, &self.device_staging);
                    self.device_staging[output.clone()].copy_from_slice(&self.memory[input]);
                    let text = &mut self.device_staging[output];
                    let made = self.aead.seal_in_place(iv, &associated, text).unwrap();
                    self.device_staging[tag].copy_from_slice(&made);
                }
            }
        }
    }

    fn verified(&self) -> bool {
        let verdicts = self.control[self.notes.verdicts()].as_chunks().0;
        verdicts.iter().all(|verdict| u32::from_le_bytes(*verdict) == VERIFIED)
    }
}

impl Far for HostFar {
    fn slot(&mut self, slot: usize) -> *mut u8 {
        self.staging[slot * self.notes.shape.slot_bytes()..].as_mut_ptr()
    }

    fn queue(&mut self, piece: usize) -> Result<()> {
        assert_eq!(piece, self.queued, "pieces come in order");
        assert!(piece < self.passed + self.notes.shape.slots, "a slot is used again before it is free");
        self.work(piece);
        self.queued += 1;
        Ok(())
    }

    fn passed(&mut self) -> Result<usize> {
        let passed = self.passed;
        self.passed = self.queued;
        Ok(passed)
    }
}

fn options(threads: usize) -> CopyOptions {
    CopyOptions { record_bytes: 64, piece_records: 3, slots: 2, threads, ..CopyOptions::default() }
}

fn data(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i * 7 + i / 251) as u8).collect()
}

/// Copies one way and gives what arrived.
fn copy(
    direction: Direction,
    options: CopyOptions,
    bytes: usize,
    backend: &str,
    mut tap: Option<Tap>,
) -> (Result<()>, Vec<u8>) {
    let mut keys = Keys::new(&GroupSecret::random().unwrap(), &options).unwrap();
    let shape = options.shape(bytes);
    let call = keys.begin(direction, shape).unwrap();
    let cipher = HostCipher::new(&keys.key(direction).unwrap()).unwrap();
    let memory = if direction == Direction::ToHost { data(bytes) } else { vec![0; bytes] };
    let mut far = HostFar::new(&keys, direction, shape, call, backend, memory);
    match direction {
        Direction::ToDevice => {
            send(&mut far, &cipher, &call, shape, &data(bytes), options.threads, tap.as_mut()).unwrap();
            let verdict = if far.verified() { Ok(()) } else { Err(Error::Authentication) };
            (verdict, far.memory)
        }
        Direction::ToHost => {
            let mut host = vec![0xee; bytes];
            let result = receive(&mut far, &cipher, &call, shape, &mut host, options.threads, tap.as_mut());
            (result, host)
        }
    }
}

const BOTH: [Direction; 2] = [Direction::ToDevice, Direction::ToHost];

#[test]
fn every_length_arrives() {
    for threads in [1, 3] {
        for bytes in [1, 15, 16, 17, 63, 64, 65, 191, 192, 193, 384, 385, 1000, 5000] {
            for direction in BOTH {
                let (result, arrived) = copy(direction, options(threads), bytes, "cpu", None);
                result.unwrap();
                assert!(arrived == data(bytes), "{direction:?}, {bytes} bytes, {threads} threads");
            }
        }
    }
}

#[test]
fn the_emulated_kernels_are_the_same_far_side() {
    let options = CopyOptions { key: KeyLength::Aes128, ..options(2) };
    for direction in BOTH {
        let (result, arrived) = copy(direction, options, 333, "emulated", None);
        result.unwrap();
        assert!(arrived == data(333), "{direction:?}");
    }
}

/// Every byte of a piece's text and tags, each way.
#[test]
fn a_changed_byte_of_staging_fails_the_copy() {
    let options = CopyOptions { piece_records: 2, slots: 1, ..options(2) };
    let bytes = 5 * 64;
    for direction in BOTH {
        for at in 0..options.shape(bytes).slot_bytes() {
            let mut piece = 0;
            let tap: Tap = Box::new(move |slot| {
                // The last full piece: what came before it had arrived already.
                if piece == 1 {
                    slot[at] ^= 0x10;
                }
                piece += 1;
            });
            let (result, arrived) = copy(direction, options, bytes, "cpu", Some(tap));
            assert!(matches!(result, Err(Error::Authentication)), "{direction:?}, byte {at}");
            if direction == Direction::ToHost {
                assert_eq!(arrived, vec![0; bytes], "byte {at}: the destination is zeroed");
            }
        }
    }
}

#[test]
fn records_and_pieces_cannot_change_places() {
    for direction in BOTH {
        let swap: Tap = Box::new(|slot| {
            let (first, second) = slot[..128].split_at_mut(64);
            first.swap_with_slice(second);
            let tags = 3 * 64;
            let (first, second) = slot[tags..tags + 32].split_at_mut(16);
            first.swap_with_slice(second);
        });
        let (result, _) = copy(direction, options(2), 192, "cpu", Some(swap));
        assert!(matches!(result, Err(Error::Authentication)), "{direction:?}: swapped");
        let mut earlier: Option<Vec<u8>> = None;
        let replay: Tap = Box::new(move |slot| match &earlier {
            Some(earlier) => slot.copy_from_slice(earlier),
            None => earlier = Some(slot.to_vec()),
        });
        let (result, _) = copy(direction, options(2), 384, "cpu", Some(replay));
        assert!(matches!(result, Err(Error::Authentication)), "{direction:?}: replayed");
    }
}

#[test]
fn staging_never_holds_plaintext() {
    for direction in BOTH {
        let tap: Tap = Box::new(|slot| {
            assert!(!slot.chunks(16).any(|block| block == [0x55; 16]));
        });
        let options = options(1);
        let mut keys = Keys::new(&GroupSecret::random().unwrap(), &options).unwrap();
        let shape = options.shape(192);
        let call = keys.begin(direction, shape).unwrap();
        let cipher = HostCipher::new(&keys.key(direction).unwrap()).unwrap();
        let mut far = HostFar::new(&keys, direction, shape, call, "cpu", vec![0x55; 192]);
        let mut tap = Some(tap);
        match direction {
            Direction::ToDevice => {
                send(&mut far, &cipher, &call, shape, &[0x55; 192], 1, tap.as_mut()).unwrap();
            }
            Direction::ToHost => {
                receive(&mut far, &cipher, &call, shape, &mut [0; 192], 1, tap.as_mut()).unwrap();
            }
        }
    }
}

#[test]
fn a_failing_far_side_ends_the_threads() {
    struct Broken(Vec<u8>);
    impl Far for Broken {
        fn slot(&mut self, slot: usize) -> *mut u8 {
            self.0[slot * options(3).shape(1).slot_bytes()..].as_mut_ptr()
        }
        fn queue(&mut self, _: usize) -> Result<()> {
            Err(Error::Cuda("gone".into()))
        }
        fn passed(&mut self) -> Result<usize> {
            Ok(0)
        }
    }
    let options = options(3);
    let mut keys = Keys::new(&GroupSecret::random().unwrap(), &options).unwrap();
    let shape = options.shape(5000);
    let cipher = HostCipher::new(&keys.key(Direction::ToHost).unwrap()).unwrap();
    let mut far = Broken(vec![0; 2 * shape.slot_bytes()]);
    let call = keys.begin(Direction::ToDevice, shape).unwrap();
    let sent = send(&mut far, &cipher, &call, shape, &data(5000), 3, None);
    assert!(matches!(sent, Err(Error::Cuda(_))));
    let mut host = vec![1; 5000];
    let received = receive(&mut far, &cipher, &call, shape, &mut host, 3, None);
    assert!(matches!(received, Err(Error::Cuda(_))));
    assert_eq!(host, [0; 5000]);
}

/// No key meets a nonce twice: directions and epochs have their own keys, copies their own numbers.
#[test]
fn no_key_meets_a_nonce_twice() {
    let options = CopyOptions { key_bytes: 16 * 40, ..options(1) };
    let mut keys = Keys::new(&GroupSecret::random().unwrap(), &options).unwrap();
    let mut seen = HashSet::new();
    for copy in 0..20 {
        let direction = BOTH[copy % 2];
        let call = keys.begin(direction, options.shape(300)).unwrap();
        let key = keys.key(direction).unwrap();
        for record in 0..options.shape(300).records() {
            assert!(seen.insert((key.as_bytes().to_vec(), call.nonce(record))));
        }
    }
    assert_eq!(keys.epoch(), 19, "25 of 40 calls each: every copy but the first needs new keys");
    assert!(matches!(keys.begin(BOTH[0], options.shape(4000)), Err(Error::KeyExhausted { .. })));
    let [to_device, to_host] = BOTH.map(|direction| keys.key(direction).unwrap());
    assert_ne!(to_device.as_bytes(), to_host.as_bytes());
}

/// What the processor allows of them.
fn host_ciphers(key: &AesKey) -> [HostCipher; 2] {
    [HostCipher::new(key).unwrap(), HostCipher::by_library(key).unwrap()]
}

/// Lengths around those of vectors and groups of them.
fn lengths() -> impl Iterator<Item = usize> {
    (0..1100).chain([4095, 4096, 65_536, 66_001])
}

/// Each against RustCrypto, in place.
#[test]
fn host_ciphers_agree() {
    for length in [16, 24, 32] {
        let key = AesKey::from_bytes(&data(length)).unwrap();
        let portable = HostCipher::portable(&key).unwrap();
        for fast in host_ciphers(&key) {
            for bytes in lengths() {
                let (nonce, associated) = ([bytes as u8; 12], data(bytes % 50));
                let (mut one, mut other) = (data(bytes), data(bytes));
                let tag = fast.seal(&nonce, &associated, &mut one).unwrap();
                assert_eq!(tag, portable.seal(&nonce, &associated, &mut other).unwrap(), "{bytes} bytes");
                assert_eq!(one, other, "{bytes} bytes");
                fast.open(&nonce, &associated, &mut one, &tag).unwrap();
                assert_eq!(one, data(bytes));
                let mut wrong = tag;
                wrong[15] ^= 1;
                assert!(matches!(
                    fast.open(&nonce, &associated, &mut other, &wrong),
                    Err(Error::Authentication)
                ));
                assert!(other.iter().all(|byte| *byte == 0), "{bytes} bytes: zeroed");
            }
        }
    }
}

/// By way of staging memory, at every alignment; its neighbours stay as they are. Additional data are longer than a group, too.
#[test]
fn host_ciphers_agree_through_staging() {
    let key = AesKey::from_bytes(&data(32)).unwrap();
    let portable = HostCipher::portable(&key).unwrap();
    for fast in host_ciphers(&key) {
        let mut scratch = vec![7; 3];
        for bytes in lengths() {
            let (shift, associated) = (bytes % 67, data(bytes % 1200));
            let nonce = [bytes as u8; 12];
            let mut staging = vec![0xee; shift + bytes + 64];
            // SAFETY: inside the vector.
            let tag = unsafe {
                fast.seal_into(
                    staging.as_mut_ptr().add(shift),
                    &nonce,
                    &associated,
                    &data(bytes),
                    &mut scratch,
                )
                .unwrap()
            };
            let mut wanted = data(bytes);
            assert_eq!(tag, portable.seal(&nonce, &associated, &mut wanted).unwrap(), "{bytes} bytes");
            assert!(staging[shift..shift + bytes] == wanted, "{bytes} bytes");
            assert!(staging[..shift].iter().chain(&staging[shift + bytes..]).all(|byte| *byte == 0xee));

            let mut opened = vec![0xdd; bytes + 1];
            let open = |staging: &[u8], opened: &mut [u8]| {
                // SAFETY: as above.
                unsafe {
                    fast.open_from(
                        staging.as_ptr().add(shift),
                        &nonce,
                        &associated,
                        &tag,
                        &mut opened[..bytes],
                    )
                }
            };
            open(&staging, &mut opened).unwrap();
            assert!(opened[..bytes] == data(bytes) && opened[bytes] == 0xdd, "{bytes} bytes");
            if bytes != 0 {
                staging[shift + bytes / 2] ^= 0x10;
                assert!(matches!(open(&staging, &mut opened), Err(Error::Authentication)));
                assert!(opened[..bytes].iter().all(|byte| *byte == 0) && opened[bytes] == 0xdd, "zeroed");
            }
        }
    }
}

#[test]
fn fetching_copies_every_length() {
    let source = data(1100);
    for bytes in 0..source.len() {
        let mut copied = vec![0; bytes];
        cipher::fetch(&mut copied, &source[..bytes]);
        assert!(copied == source[..bytes], "{bytes} bytes");
    }
}

/// With new keys when the old are used up.
#[test]
fn a_rehearsal_seals_as_a_copy_does() {
    let mut rehearsal = Rehearsal::new(CopyOptions { key_bytes: 16 * 40, ..options(2) }).unwrap();
    for _ in 0..3 {
        rehearsal.to_device(&data(300)).unwrap();
        rehearsal.to_device(&[]).unwrap();
    }
    assert!(matches!(rehearsal.to_device(&data(4000)), Err(Error::KeyExhausted { .. })));
    assert!(Rehearsal::new(CopyOptions { slots: 0, ..options(1) }).is_err());
}

#[test]
fn impossible_options_are_refused() {
    for options in [
        CopyOptions { record_bytes: 0, ..options(1) },
        CopyOptions { record_bytes: 40, ..options(1) },
        CopyOptions { piece_records: 0, ..options(1) },
        CopyOptions { slots: 0, ..options(1) },
        CopyOptions { threads: 0, ..options(1) },
        CopyOptions { piece_records: (1 << 60) + (1 << 46), ..options(1) },
        CopyOptions { record_bytes: 1 << 30, piece_records: 1 << 32, slots: 2, ..options(1) },
        CopyOptions { slots: usize::MAX, ..options(1) },
    ] {
        assert!(matches!(options.check(), Err(Error::InvalidArgument(_))), "{options:?}");
    }
    CopyOptions::default().check().unwrap();
}
