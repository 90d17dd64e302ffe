//! Both sides on the CPU: the far side in place of the GPU's, by RustCrypto or by the emulated kernels.

use std::collections::HashSet;

use super::*;
use crate::aead::{Aead, AesKey, Iv};
use crate::backend;
use crate::channel::GroupSecret;

/// A far side whose device memory is a vector. A piece passes only when it is asked about twice, as a device's would.
struct HostFar {
    direction: Direction,
    shape: Shape,
    call: Call,
    aead: Aead,
    staging: Vec<u8>,
    memory: Vec<u8>,
    queued: usize,
    passed: usize,
    verified: bool,
}

impl HostFar {
    fn new(
        keys: &Keys,
        direction: Direction,
        shape: Shape,
        call: Call,
        backend: &str,
        memory: Vec<u8>,
    ) -> Self {
        let backend = backend::by_name(backend).unwrap();
        Self {
            direction,
            shape,
            call,
            aead: Aead::new(backend.as_ref(), &keys.key(direction).unwrap()).unwrap(),
            staging: vec![0; shape.slots * shape.slot_bytes()],
            memory,
            queued: 0,
            passed: 0,
            verified: true,
        }
    }

    fn work(&mut self, piece: usize) {
        for record in self.shape.piece(piece) {
            let slot = piece % self.shape.slots * self.shape.slot_bytes();
            let (text_at, tag_at) = self.shape.places(record);
            let nonce = self.call.nonce(record);
            let (iv, associated) = (Iv::from_nonce(&nonce), self.call.associated(record));
            let text = &mut self.memory[self.shape.record(record)];
            let (staged, tag) =
                (slot + text_at..slot + text_at + text.len(), slot + tag_at..slot + tag_at + 16);
            match self.direction {
                Direction::ToDevice => {
                    text.copy_from_slice(&self.staging[staged]);
                    let tag = self.staging[tag].try_into().unwrap();
                    self.verified &= self.aead.open_in_place(iv, associated.as_bytes(), text, &tag).is_ok();
                }
                Direction::ToHost => {
                    self.staging[staged.clone()].copy_from_slice(text);
                    let text = &mut self.staging[staged];
                    let made = self.aead.seal_in_place(iv, associated.as_bytes(), text).unwrap();
                    self.staging[tag].copy_from_slice(&made);
                }
            }
        }
    }
}

impl Far for HostFar {
    fn slot(&mut self, slot: usize) -> *mut u8 {
        self.staging[slot * self.shape.slot_bytes()..].as_mut_ptr()
    }

    fn queue(&mut self, piece: usize) -> Result<()> {
        assert_eq!(piece, self.queued, "pieces come in order");
        assert!(piece < self.passed + self.shape.slots, "a slot is used again before it is free");
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
            let verdict = if far.verified { Ok(()) } else { Err(Error::Authentication) };
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

/// graviola against RustCrypto, in all lengths around its vector sizes.
#[test]
fn host_ciphers_agree() {
    for length in [16, 32] {
        let key = AesKey::from_bytes(&data(length)).unwrap();
        let (fast, portable) = (HostCipher::new(&key).unwrap(), HostCipher::portable(&key).unwrap());
        for bytes in (0..600).chain([4095, 4096, 65_536]) {
            let (nonce, associated) = ([bytes as u8; 12], data(bytes % 50));
            let (mut one, mut other) = (data(bytes), data(bytes));
            let tag = fast.seal(&nonce, &associated, &mut one).unwrap();
            assert_eq!(tag, portable.seal(&nonce, &associated, &mut other).unwrap(), "{bytes} bytes");
            assert_eq!(one, other, "{bytes} bytes");
            fast.open(&nonce, &associated, &mut one, &tag).unwrap();
            assert_eq!(one, data(bytes));
            let mut wrong = tag;
            wrong[15] ^= 1;
            assert!(matches!(fast.open(&nonce, &associated, &mut other, &wrong), Err(Error::Authentication)));
            assert!(other.iter().all(|byte| *byte == 0), "{bytes} bytes: zeroed");
        }
    }
}

#[test]
fn impossible_options_are_refused() {
    for options in [
        CopyOptions { record_bytes: 0, ..options(1) },
        CopyOptions { record_bytes: 40, ..options(1) },
        CopyOptions { piece_records: 0, ..options(1) },
        CopyOptions { slots: 0, ..options(1) },
        CopyOptions { threads: 0, ..options(1) },
    ] {
        assert!(matches!(options.check(), Err(Error::InvalidArgument(_))), "{options:?}");
    }
    CopyOptions::default().check().unwrap();
}
