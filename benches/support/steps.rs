//! What the benches of single steps have in common.

use aes::cipher::{BlockCipherEncrypt, KeyInit};
use ringseal::Result;
use ringseal::cuda::{DeviceBuffer, Launch, Module, Stream};
use ringseal_kernels::aes::expand_key;
use ringseal_kernels::ghash::{GHASH_KEY_GRID, GhashKey, GhashKeyParams};
use ringseal_kernels::sealed::SealedKey;

/// What the command line asks for.
pub(crate) struct Arguments {
    /// PTX, or a cubin.
    pub(crate) image: Vec<u8>,
    /// Blocks; all multiprocessors' when `None`.
    pub(crate) sm: Option<u32>,
    /// Bytes of a record.
    pub(crate) record: u32,
    json: Option<String>,
}

impl Arguments {
    /// `[--ptx FILE] [--sm N] [--record BYTES] [--json FILE]`.
    pub(crate) fn parse() -> Self {
        let mut parsed =
            Self { image: ringseal::ptx::SM_90A.into(), sm: None, record: 256 << 10, json: None };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().unwrap_or_else(|| panic!("{word} needs a value"));
            match word.as_str() {
                "--ptx" => parsed.image = std::fs::read(value()).expect("a PTX file"),
                "--sm" => parsed.sm = Some(value().parse().expect("a number")),
                "--record" => parsed.record = value().parse().expect("a number"),
                "--json" => parsed.json = Some(value()),
                // Given by `cargo bench` itself.
                "--bench" => {}
                _ => panic!("unknown argument {word}"),
            }
        }
        parsed
    }

    /// Writes the results, if a file was named for them.
    pub(crate) fn write(&self, run: &serde_json::Value) {
        if let Some(path) = &self.json {
            std::fs::write(path, format!("{run:#}\n")).expect("results can be written");
        }
    }
}

/// A key of `bytes` bytes for benches alone, and the memory that it needs: their launches repeat nonces, so it must protect
/// nothing.
pub(crate) fn key(module: &Module, stream: &Stream, bytes: usize) -> Result<(SealedKey, DeviceBuffer)> {
    let key = &[0x5a; 32][..bytes];
    let mut h = aes::Block::default();
    match bytes {
        16 => aes::Aes128::new_from_slice(key).expect("16 bytes").encrypt_block(&mut h),
        _ => aes::Aes256::new_from_slice(key).expect("32 bytes").encrypt_block(&mut h),
    }
    let matrices = DeviceBuffer::new(stream.device(), size_of::<GhashKey>())?;
    let word = |i: usize| u32::from_le_bytes([0, 1, 2, 3].map(|b| h[4 * i + b]));
    let params = GhashKeyParams { h: [0, 1, 2, 3].map(word), key: matrices.pointer() };
    let launch = Launch { blocks: GHASH_KEY_GRID, threads: 256 };
    // SAFETY: the kernel's parameters; the buffer holds a key.
    unsafe { module.kernel("ghash_key", 0)?.launch(launch, stream, &params)? };
    Ok((SealedKey { round_keys: expand_key(key), ghash_key: matrices.pointer() }, matrices))
}
