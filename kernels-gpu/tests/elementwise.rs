//! The reduction and wiping kernels, emulated, against the reduction of one quad, which the ring's tests cover.

use ringseal_kernels::device::emulated::{Launch, launch};
use ringseal_kernels::elementwise::{ReduceParams, WipeParams, reduce_any, reduce_common, wipe_if_failed};
use ringseal_kernels::reduce::{combine, finish, is_common, reduction};

/// Sizes of the element types, by their codes.
const SIZES: [usize; 10] = [4, 8, 2, 2, 1, 1, 4, 4, 8, 8];
const GUARD: u8 = 0xa5;

#[derive(Clone, Copy)]
#[repr(C, align(16))]
struct Line([u8; 16]);

/// Bytes at a distance from an aligned address, between guards.
struct Buffer {
    lines: Vec<Line>,
    shift: usize,
    length: usize,
}

impl Buffer {
    fn new(content: &[u8], shift: usize) -> Self {
        let mut buffer = Self {
            lines: vec![Line([GUARD; 16]); content.len() / 16 + 4],
            shift: 16 + shift,
            length: content.len(),
        };
        buffer.bytes()[16 + shift..][..content.len()].copy_from_slice(content);
        buffer
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: lines are bytes.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.lines.len() * 16) }
    }

    fn address(&self) -> u64 {
        self.lines.as_ptr() as u64 + self.shift as u64
    }

    #[track_caller]
    fn check(&mut self, expected: &[u8]) {
        let (begin, end) = (self.shift, self.shift + self.length);
        let bytes = self.bytes();
        assert!(bytes[..begin].iter().chain(&bytes[end..]).all(|&byte| byte == GUARD), "beyond the output");
        assert_eq!(bytes[begin..end], *expected);
    }
}

fn random(seed: u64, length: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 32) as u8
    };
    std::iter::repeat_with(next).take(length).collect()
}

/// Quad by quad, the last one filled with zeros.
fn model(reduction: u32, ranks: u32, complete: bool, partial: &[u8], local: &[u8]) -> Vec<u8> {
    let quad = |bytes: &[u8]| {
        let mut block = [0; 16];
        block[..bytes.len()].copy_from_slice(bytes);
        std::array::from_fn(|i| u32::from_le_bytes(block[4 * i..][..4].try_into().unwrap()))
    };
    let pairs = partial.chunks(16).zip(local.chunks(16));
    let result = pairs.flat_map(|(partial, local)| {
        let sum = combine(reduction, quad(partial), quad(local));
        let result = if complete { finish(reduction, ranks, sum) } else { sum };
        result.map(u32::to_le_bytes).concat()[..partial.len()].to_vec()
    });
    result.collect()
}

#[test]
fn every_type_and_operation_at_every_alignment() {
    for (code, size) in SIZES.into_iter().enumerate() {
        for op in 0..5 {
            let reduction = reduction(code as u32, op);
            for (case, count) in [0, 1, 5, 17, 600, 30_000].into_iter().enumerate() {
                // The long ones only where the loop of four quads can be reached.
                if count == 30_000 && !is_common(reduction) {
                    continue;
                }
                let (bytes, complete) = (count * size, case % 2 == 1);
                let (partial, local) = (random(7 + case as u64, bytes), random(99 + case as u64, bytes));
                let expected = model(reduction, 3, complete, &partial, &local);
                for shift in [0, size] {
                    let source = Buffer::new(&partial, shift);
                    // In place of an operand, and apart.
                    let mut second = Buffer::new(&local, shift);
                    let mut apart = Buffer::new(&vec![0; bytes], shift);
                    let in_place = case % 3 == 0;
                    let output = if in_place { second.address() } else { apart.address() };
                    let params = ReduceParams {
                        partial: source.address(),
                        local: second.address(),
                        output,
                        bytes: bytes as u64,
                        reduction,
                        ranks: 3,
                        complete: complete.into(),
                    };
                    let common = is_common(reduction);
                    launch(&[Launch::new(1 + case as u32 % 2, 512, 0, || {
                        // SAFETY: the buffers are of this length, and aligned to an element.
                        unsafe { if common { reduce_common(params) } else { reduce_any(params) } }
                    })]);
                    if in_place { second.check(&expected) } else { apart.check(&expected) }
                }
            }
        }
    }
}

#[test]
fn results_are_wiped_after_a_failure_only() {
    for (failure, bytes) in [(0u64, 1000), (1 << 56, 1000), (1 << 56, 0), (1, 9000)] {
        let content = random(3, bytes);
        let mut output = Buffer::new(&content, 3);
        let params =
            WipeParams { failure: &raw const failure as u64, output: output.address(), bytes: bytes as u64 };
        // SAFETY: the buffer is of this length.
        launch(&[Launch::new(1, 512, 0, || unsafe { wipe_if_failed(params) })]);
        output.check(&if failure == 0 { content } else { vec![0; bytes] });
    }
}
