//! The keys of a rank on a GPU: of this epoch and, prepared ahead, of the next.

use aes::cipher::{BlockCipherEncrypt, KeyInit};
use ringseal_kernels::aes::{RoundKeys, expand_key};
use ringseal_kernels::ghash::{GHASH_KEY_GRID, GhashKey, GhashKeyParams, ghash_key};
use ringseal_kernels::sealed::SealedKey;
use zeroize::{Zeroize, Zeroizing};

use super::{DeviceBuffer, Kernel, Launch, Module, Stream};
use crate::channel::{KeyLength, Reserved, Root, Terms, Volume};
use crate::{Error, Result};

/// One rank's keys and counters in a session: its own key and its predecessor's, of an even epoch and of an odd one.
#[derive(Debug)]
pub(super) struct RankKeys {
    root: Root,
    terms: Terms,
    /// The ranks whose keys are kept: this one, and its predecessor.
    senders: [usize; 2],
    length: KeyLength,
    epoch: u64,
    volume: Volume,
    prepare: Kernel,
    epochs: [[PreparedKey; 2]; 2],
}

struct PreparedKey {
    round_keys: Zeroizing<RoundKeys>,
    ghash: DeviceBuffer,
}

impl std::fmt::Debug for PreparedKey {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("PreparedKey(..)")
    }
}

impl RankKeys {
    /// Prepares the keys of a session's first two epochs for rank `rank`.
    pub(super) fn new(
        root: Root,
        terms: Terms,
        rank: usize,
        length: KeyLength,
        module: &Module,
        stream: &Stream,
    ) -> Result<Self> {
        let empty = || -> Result<PreparedKey> {
            let ghash = DeviceBuffer::secret(stream.device(), size_of::<GhashKey>())?;
            Ok(PreparedKey { round_keys: Zeroizing::new([0; 60]), ghash })
        };
        let mut keys = Self {
            root,
            terms,
            senders: [rank, (rank + terms.ranks - 1) % terms.ranks],
            length,
            epoch: 0,
            volume: Volume::new(terms.key_bytes),
            prepare: module.kernel("ghash_key", ghash_key::SHARED)?,
            epochs: [[empty()?, empty()?], [empty()?, empty()?]],
        };
        keys.prepare(0, stream)?;
        keys.prepare(1, stream)?;
        Ok(keys)
    }

    /// Goes on to another session; no work under the old one's keys may be left.
    pub(super) fn renew(&mut self, root: Root, stream: &Stream) -> Result<()> {
        self.root = root;
        self.epoch = 0;
        self.volume = Volume::new(self.terms.key_bytes);
        self.prepare(0, stream)?;
        self.prepare(1, stream)
    }

    /// The session's number; public.
    pub(super) fn session(&self) -> u64 {
        self.root.session()
    }

    /// The epoch of the latest reservation.
    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The block cipher calls that a key may make.
    pub(super) fn calls_limit(&self) -> u64 {
        self.volume.limit_bytes() / 16
    }

    /// Reserves block cipher calls under the present keys, or else enters the next epoch: true then.
    ///
    /// # Errors
    /// [`Error::KeyExhausted`] when no key may make so many.
    pub(super) fn reserve(&mut self, calls: u64) -> Result<bool> {
        match self.volume.reserve(calls) {
            Reserved::Here => Ok(false),
            Reserved::NextEpoch => {
                self.epoch += 1;
                Ok(true)
            }
            Reserved::Never => Err(Error::KeyExhausted { limit: self.volume.limit_bytes() }),
        }
    }

    /// After the first collective of an epoch: prepares the next one's keys, on the rank's stream, where those of the
    /// epoch before were.
    pub(super) fn prepare_next(&mut self, stream: &Stream) -> Result<()> {
        self.prepare(self.epoch + 1, stream)
    }

    fn prepare(&mut self, epoch: u64, stream: &Stream) -> Result<()> {
        for (prepared, &sender) in self.epochs[(epoch % 2) as usize].iter_mut().zip(&self.senders) {
            let mut key = Zeroizing::new([0; 32]);
            let key = &mut key[..self.length.bytes()];
            self.root.key(sender, epoch, key);
            *prepared.round_keys = expand_key(key);
            let mut params = GhashKeyParams { h: hash_key(key), key: prepared.ghash.pointer() };
            let launch = Launch { blocks: GHASH_KEY_GRID, threads: ghash_key::THREADS };
            // SAFETY: the kernel fills the buffer, which lives until the stream has passed: it is freed by a call that
            // waits for the device.
            let result = unsafe { self.prepare.launch(launch, stream, &params) };
            params.h.zeroize();
            result?;
        }
        Ok(())
    }

    /// This epoch's own key and predecessor's key, with copies of secrets: to be zeroized.
    pub(super) fn present(&self) -> [SealedKey; 2] {
        let keys = &self.epochs[(self.epoch % 2) as usize];
        [0, 1].map(|which| SealedKey {
            round_keys: *keys[which].round_keys,
            ghash_key: keys[which].ghash.pointer(),
        })
    }
}

/// GHASH's key, the cipher of the zero block (SP 800-38D, 7.1, step 1), as little-endian words.
pub(super) fn hash_key(key: &[u8]) -> [u32; 4] {
    let mut block = Zeroizing::new([0; 16]);
    let encrypted = match key.len() {
        16 => aes::Aes128::new_from_slice(key).map(|cipher| cipher.encrypt_block((&mut *block).into())),
        _ => aes::Aes256::new_from_slice(key).map(|cipher| cipher.encrypt_block((&mut *block).into())),
    };
    assert!(encrypted.is_ok(), "a key of 16 or 32 bytes");
    std::array::from_fn(|word| {
        u32::from_le_bytes([block[4 * word], block[4 * word + 1], block[4 * word + 2], block[4 * word + 3]])
    })
}
