//! What several tests of the kernels share.

/// Bytes that only depend on the seed.
pub(crate) fn bytes(seed: u64, length: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 32) as u8
    };
    std::iter::repeat_with(next).take(length).collect()
}

/// The first words of `bytes`, raw.
pub(crate) fn raw<const N: usize>(bytes: &[u8]) -> [u32; N] {
    std::array::from_fn(|i| u32::from_le_bytes(bytes[4 * i..][..4].try_into().unwrap()))
}
