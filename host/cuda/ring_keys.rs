//! The keys of a group on GPUs: of this epoch and, prepared ahead, of the next.

use aes::cipher::{BlockCipherEncrypt, KeyInit};
use ringseal_kernels::aes::{RoundKeys, expand_key};
use ringseal_kernels::ghash::{GHASH_KEY_GRID, GhashKey, GhashKeyParams, ghash_key};
use ringseal_kernels::sealed::SealedKey;
use zeroize::{Zeroize, Zeroizing};

use super::{DeviceBuffer, Kernel, Launch, Module, Stream};
use crate::channel::{GroupSecret, Handshake, KeyLength, Reserved, Root, Terms, Unconfirmed, Volume};
use crate::{Error, Result};

/// Keys and counters of a session whose ranks are all in this process.
#[derive(Debug)]
pub(super) struct GroupKeys {
    secret: GroupSecret,
    terms: Terms,
    root: Root,
    length: KeyLength,
    epoch: u64,
    volume: Volume,
    ranks: Vec<RankKeys>,
}

/// What one rank needs: its own key and its predecessor's, of an even epoch and of an odd one.
#[derive(Debug)]
struct RankKeys {
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

impl GroupKeys {
    /// Derives a session afresh, and prepares the keys of its first two epochs. One module and stream for each rank.
    pub(super) fn new(
        secret: &GroupSecret,
        terms: Terms,
        length: KeyLength,
        modules: &[Module],
        streams: &[&Stream],
    ) -> Result<Self> {
        let ranks = modules.iter().zip(streams).map(|(module, stream)| RankKeys::new(module, stream));
        let mut keys = Self {
            secret: secret.clone(),
            terms,
            root: agree(secret, terms)?,
            length,
            epoch: 0,
            volume: Volume::new(terms.key_bytes),
            ranks: ranks.collect::<Result<_>>()?,
        };
        keys.prepare(0, streams)?;
        keys.prepare(1, streams)?;
        Ok(keys)
    }

    /// Derives another session; no work under the old one's keys may be left.
    pub(super) fn renew(&mut self, streams: &[&Stream]) -> Result<()> {
        self.root = agree(&self.secret, self.terms)?;
        self.epoch = 0;
        self.volume = Volume::new(self.terms.key_bytes);
        self.prepare(0, streams)?;
        self.prepare(1, streams)
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

    /// After the first collective of an epoch: prepares the next one's keys, on the ranks' streams, where those of the
    /// epoch before were.
    pub(super) fn prepare_next(&mut self, streams: &[&Stream]) -> Result<()> {
        self.prepare(self.epoch + 1, streams)
    }

    fn prepare(&mut self, epoch: u64, streams: &[&Stream]) -> Result<()> {
        let count = self.ranks.len();
        for (number, (rank, stream)) in self.ranks.iter_mut().zip(streams).enumerate() {
            for (prepared, sender) in
                rank.epochs[(epoch % 2) as usize].iter_mut().zip([number, (number + count - 1) % count])
            {
                let mut key = Zeroizing::new([0; 32]);
                let key = &mut key[..self.length.bytes()];
                self.root.key(sender, epoch, key);
                *prepared.round_keys = expand_key(key);
                let mut params = GhashKeyParams { h: hash_key(key), key: prepared.ghash.pointer() };
                let launch = Launch { blocks: GHASH_KEY_GRID, threads: ghash_key::THREADS };
                // SAFETY: the kernel fills the buffer, which lives until the stream has passed: it is freed by a call
                // that waits for the device.
                let result = unsafe { rank.prepare.launch(launch, stream, &params) };
                params.h.zeroize();
                result?;
            }
        }
        Ok(())
    }

    /// This epoch's own key and predecessor's key of a rank, with copies of secrets: to be zeroized.
    pub(super) fn of_rank(&self, rank: usize) -> [SealedKey; 2] {
        let keys = &self.ranks[rank].epochs[(self.epoch % 2) as usize];
        [0, 1].map(|which| SealedKey {
            round_keys: *keys[which].round_keys,
            ghash_key: keys[which].ghash.pointer(),
        })
    }
}

impl RankKeys {
    fn new(module: &Module, stream: &Stream) -> Result<Self> {
        let empty = || -> Result<PreparedKey> {
            let ghash = DeviceBuffer::secret(stream.device(), size_of::<GhashKey>())?;
            Ok(PreparedKey { round_keys: Zeroizing::new([0; 60]), ghash })
        };
        Ok(Self {
            prepare: module.kernel("ghash_key", ghash_key::SHARED)?,
            epochs: [[empty()?, empty()?], [empty()?, empty()?]],
        })
    }
}

/// The handshake of all ranks, here in one process.
fn agree(secret: &GroupSecret, terms: Terms) -> Result<Root> {
    let handshakes: Vec<_> =
        (0..terms.ranks).map(|rank| Handshake::new(secret, terms, rank)).collect::<Result<_>>()?;
    let hellos: Vec<_> = handshakes.iter().map(|rank| rank.hello().to_vec()).collect();
    let heard: Vec<_> = handshakes.into_iter().map(|rank| rank.hear(&hellos)).collect::<Result<_>>()?;
    let confirmations: Vec<_> = heard.iter().map(|rank| rank.confirmation().to_vec()).collect();
    let roots = heard.into_iter().map(|rank: Unconfirmed| Ok(rank.confirmed(&confirmations)?.0));
    let mut roots = roots.collect::<Result<Vec<_>>>()?;
    roots.pop().ok_or_else(|| Error::InvalidArgument("a group has at least one rank".into()))
}

/// GHASH's key, the cipher of the zero block (SP 800-38D, 7.1, step 1), as little-endian words.
fn hash_key(key: &[u8]) -> [u32; 4] {
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
