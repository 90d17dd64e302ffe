//! The kernels on one message, emulated, against RustCrypto's AES-GCM.

mod common;
#[path = "common/keys.rs"]
mod keys;

use aes_gcm::aead::{AeadInOut, KeyInit, array::Array};
use aes_gcm::{Aes128Gcm, Aes256Gcm, AesGcm, aead::consts::U12, aes::Aes192};
use common::{bytes, raw};
use keys::{ghash_key_of, hash_key, powers_of};
use ringseal_kernels::aes::expand_key;
use ringseal_kernels::device::emulated::{Launch, launch};
use ringseal_kernels::gcm::{FORGED, VERIFIED, nonce_j0};
use ringseal_kernels::ghash::GhashKey;
use ringseal_kernels::message::{self, DIGITS, MessageParams, Plan, Powers, Workspace, plan};
use ringseal_kernels::portable;

/// Bytes at `shift` from a multiple of 16, between bytes that nobody may write.
struct Buffer {
    memory: Vec<u128>,
    shift: usize,
    length: usize,
}

impl Buffer {
    const AROUND: u8 = 0xa5;

    fn new(bytes: &[u8], shift: usize) -> Self {
        let memory = vec![u128::from_ne_bytes([Self::AROUND; 16]); (shift + bytes.len()) / 16 + 2];
        let buffer = Self { memory, shift, length: bytes.len() };
        // SAFETY: inside the memory, and 16 bytes follow.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), buffer.address() as *mut u8, bytes.len()) };
        buffer
    }

    fn address(&self) -> u64 {
        self.memory.as_ptr() as u64 + self.shift as u64
    }

    /// The bytes, after a look at what is around them.
    fn bytes(&self) -> Vec<u8> {
        let all: Vec<u8> = self.memory.iter().flat_map(|block| block.to_ne_bytes()).collect();
        let (before, rest) = all.split_at(self.shift);
        let (bytes, after) = rest.split_at(self.length);
        assert!(before.iter().chain(after).all(|&byte| byte == Self::AROUND), "written outside the text");
        bytes.to_vec()
    }
}

/// The kernels of one module: sealing and opening, for AES-128, 192 and 256.
struct Kernels {
    message: [[unsafe fn(MessageParams); 2]; 3],
    shared: u32,
}

const SM_90A: Kernels = Kernels {
    message: [
        [message::gcm_seal_message_128, message::gcm_open_message_128],
        [message::gcm_seal_message_192, message::gcm_open_message_192],
        [message::gcm_seal_message_256, message::gcm_open_message_256],
    ],
    shared: message::MESSAGE_SHARED,
};

const SM_80: Kernels = Kernels {
    message: [
        [portable::gcm_seal_message_128, portable::gcm_open_message_128],
        [portable::gcm_seal_message_192, portable::gcm_open_message_192],
        [portable::gcm_seal_message_256, portable::gcm_open_message_256],
    ],
    shared: portable::MESSAGE_SHARED,
};

/// A key as the kernels take it, and the kernels.
struct Key {
    kernels: Kernels,
    bytes: Vec<u8>,
    ghash: Box<GhashKey>,
    powers: Box<Powers>,
    workspace: Box<Workspace>,
}

impl Key {
    /// The same key for the kernels of each module.
    fn each(seed: u64, length: usize) -> [Self; 2] {
        [SM_90A, SM_80].map(|kernels| Self::new(kernels, seed, length))
    }

    fn new(kernels: Kernels, seed: u64, length: usize) -> Self {
        let bytes = bytes(seed, length);
        let h = hash_key(&bytes);
        let ghash = ghash_key_of(h);
        let powers = powers_of(h);
        // SAFETY: all its fields are plain words.
        let workspace = unsafe { Box::<Workspace>::new_zeroed().assume_init() };
        Key { kernels, bytes, ghash, powers, workspace }
    }

    /// Runs the kernel.
    fn run(&mut self, seal: bool, plan: Plan, message: &Message<'_>) {
        let params = MessageParams {
            keys: expand_key(&self.bytes),
            ghash_key: &raw const *self.ghash as u64,
            powers: &raw const *self.powers as u64,
            workspace: &raw mut *self.workspace as u64,
            share: plan.share,
            message: message::Message {
                input: message.input.address(),
                output: message.output.address(),
                length: message.input.length as u64,
                aad: message.aad.address(),
                aad_length: message.aad.length as u64,
                tag: message.tag.as_ptr() as u64,
                verdict: message.verdict as *const u32 as u64,
                j0: message.j0,
            },
        };
        let kernel = self.kernels.message[self.bytes.len() / 8 - 2][usize::from(!seal)];
        // SAFETY: all addresses are of live buffers of the right length.
        launch(&[Launch::new(plan.blocks, 512, self.kernels.shared, || unsafe { kernel(params) })]);
        assert_eq!(self.workspace.done, 0, "the workspace is not left as it was");
    }

    /// RustCrypto's result, for a nonce of 96 bits.
    fn expected(&self, nonce: &[u8], aad: &[u8], text: &[u8]) -> (Vec<u8>, [u8; 16]) {
        let key = &self.bytes;
        let mut text = text.to_vec();
        let nonce: Array<u8, U12> = Array::try_from(nonce).unwrap();
        let buffer = text.as_mut_slice().into();
        let tag = match key.len() {
            16 => Aes128Gcm::new_from_slice(key).unwrap().encrypt_inout_detached(&nonce, aad, buffer),
            24 => AesGcm::<Aes192, U12>::new_from_slice(key)
                .unwrap()
                .encrypt_inout_detached(&nonce, aad, buffer),
            _ => Aes256Gcm::new_from_slice(key).unwrap().encrypt_inout_detached(&nonce, aad, buffer),
        };
        (text, tag.unwrap().into())
    }

    /// Seals, compares, opens in place, then opens with a bit changed in the text, in the tag and in the additional data.
    fn check(&mut self, text: usize, aad: usize, multiprocessors: u32, shifts: [usize; 3]) {
        self.check_with(&["nothing", "text", "tag", "aad"], text, aad, multiprocessors, shifts);
    }

    fn check_with(
        &mut self,
        changes: &[&str],
        text: usize,
        aad: usize,
        multiprocessors: u32,
        shifts: [usize; 3],
    ) {
        let shape = format!("{text} bytes, {aad} of additional data, {multiprocessors} multiprocessors");
        let plan = plan(text as u64, aad as u64, multiprocessors);
        assert!(plan.blocks <= multiprocessors, "{shape}: {plan:?}");
        let seed = 1 + (text + aad) as u64;
        let (plain, additional, nonce) = (bytes(seed, text), bytes(seed + 1, aad), bytes(seed + 2, 12));
        let input = Buffer::new(&plain, shifts[0]);
        let output = Buffer::new(&vec![0; text], shifts[1]);
        let additional_buffer = Buffer::new(&additional, shifts[2]);
        let (tag, verdict) = (Box::new(Aligned([0; 16])), Box::new(0));
        let message = Message {
            j0: nonce_j0(raw(&nonce)),
            input: &input,
            output: &output,
            aad: &additional_buffer,
            tag: &tag.0,
            verdict: &verdict,
        };
        self.run(true, plan, &message);
        let (expected, expected_tag) = self.expected(&nonce, &additional, &plain);
        assert!(output.bytes() == expected, "ciphertext: {shape}");
        assert_eq!(read(&tag.0), expected_tag, "tag: {shape}");
        assert!(input.bytes() == plain, "input written: {shape}");

        for &change in changes {
            let (mut sealed, mut tag, mut additional) = (expected.clone(), expected_tag, additional.clone());
            match change {
                "text" if text > 0 => sealed[seed as usize * 7919 % text] ^= 0x80,
                "tag" => tag[seed as usize % 16] ^= 1 << (seed % 8),
                "aad" if aad > 0 => additional[seed as usize * 7919 % aad] ^= 1,
                "nothing" => (),
                _ => continue,
            }
            let in_place = Buffer::new(&sealed, shifts[1]);
            let additional = Buffer::new(&additional, shifts[2]);
            let tag = Box::new(Aligned(tag));
            let verdict = Box::new(0);
            let message = Message {
                input: &in_place,
                output: &in_place,
                aad: &additional,
                tag: &tag.0,
                verdict: &verdict,
                ..message
            };
            self.run(false, plan, &message);
            let good = change == "nothing";
            let said = read(&*verdict);
            assert_eq!(said, if good { VERIFIED } else { FORGED }, "{change} changed: {shape}");
            let opened = in_place.bytes();
            let expected = if good { plain.clone() } else { vec![0; text] };
            assert!(opened == expected, "text with {change} changed: {shape}");
        }
    }
}

/// What the kernel wrote behind the compiler's back.
fn read<T: Copy>(value: &T) -> T {
    // SAFETY: a reference.
    unsafe { std::ptr::from_ref(value).read_volatile() }
}

#[repr(align(16))]
struct Aligned([u8; 16]);

#[derive(Clone, Copy)]
struct Message<'a> {
    j0: [u32; 4],
    input: &'a Buffer,
    output: &'a Buffer,
    aad: &'a Buffer,
    tag: &'a [u8; 16],
    verdict: &'a u32,
}

const ALIGNED: [usize; 3] = [0; 3];

#[test]
fn one_thread_block() {
    for mut key in Key::each(7, 16) {
        for (text, aad) in
            [(0, 0), (0, 1), (1, 0), (16, 16), (31, 20), (2048, 0), (16_384, 0), (16_385, 48), (40_000, 13)]
        {
            key.check(text, aad, 1, ALIGNED);
        }
    }
}

#[test]
fn many_thread_blocks() {
    for mut key in Key::each(8, 32) {
        for (text, aad, multiprocessors) in [(2049, 0, 2), (8192, 48, 3), (100_000, 20, 5), (65_536, 64, 40)]
        {
            key.check(text, aad, multiprocessors, ALIGNED);
        }
    }
}

#[test]
fn additional_data_of_many_tiles() {
    for mut key in Key::each(9, 24) {
        for (text, aad, multiprocessors) in [(0, 50_000, 3), (100, 40_001, 2), (20_000, 33_000, 3)] {
            key.check(text, aad, multiprocessors, ALIGNED);
        }
    }
}

#[test]
fn any_alignment() {
    for mut key in Key::each(10, 16) {
        for shifts in [[1, 0, 0], [0, 7, 3], [4, 12, 15], [8, 8, 8]] {
            key.check(5003, 100, 2, shifts);
        }
    }
}

/// More tiles than a segment has.
#[test]
fn segments() {
    for mut key in Key::each(11, 16) {
        key.check_with(&["nothing"], (63 + 63 + 3) * 16_384 + 5, 48, 1, ALIGNED);
    }
}

/// The counter wraps in its 32 bits (SP 800-38D section 6.2): an IV that is not 96 bits long may begin anywhere.
#[test]
fn the_counter_wraps() {
    use ctr::cipher::{InnerIvInit, StreamCipher};
    let mut key = Key::new(SM_90A, 12, 16);
    let j0 = [1, 2, 3, (u32::MAX - 300).to_be()];
    let text = vec![0; 20_000];
    let (input, output) = (Buffer::new(&text, 0), Buffer::new(&text, 0));
    let aad = Buffer::new(&[], 0);
    let (tag, verdict) = (Box::new(Aligned([0; 16])), Box::new(0));
    let message = Message { j0, input: &input, output: &output, aad: &aad, tag: &tag.0, verdict: &verdict };
    key.run(true, plan(20_000, 0, 3), &message);
    let counter: [u8; 16] = std::array::from_fn(|i| j0[i / 4].to_le_bytes()[i % 4]);
    let cipher = aes::Aes128::new_from_slice(&key.bytes).unwrap();
    let core = ctr::CtrCore::<_, ctr::flavors::Ctr32BE>::inner_iv_init(cipher, &counter.into());
    let mut stream = ctr::cipher::StreamCipherCoreWrapper::from_core(core);
    let mut expected = vec![0; 16 + 20_000];
    stream.apply_keystream(&mut expected);
    assert!(output.bytes() == expected[16..]);
}

#[test]
fn plans_cover_the_message_within_the_limits() {
    for multiprocessors in [1, 2, 108, 132, 200] {
        for length in [0, 1, 16, 2048, 2049, 65_536, 1 << 22, (1 << 36) - 32] {
            for aad in [0, 1, 48, 1 << 40] {
                let plan = plan(length, aad, multiprocessors);
                let blocks = length.div_ceil(16) + aad.div_ceil(16);
                assert!(plan.blocks >= 1 && plan.blocks <= multiprocessors.min(message::BLOCKS_MAX));
                assert!(plan.share * u64::from(plan.blocks) >= blocks);
                assert!(
                    plan.share * u64::from(plan.blocks - 1) < blocks.max(1),
                    "a thread block without work"
                );
                assert!(
                    plan.share * u64::from(plan.blocks - 1) < 1 << (4 * DIGITS),
                    "a power that isn't prepared"
                );
            }
        }
    }
}
