//! The keys of a rank on a GPU: of this epoch and, prepared ahead, of the next.

use ringseal_kernels::aes::{RoundKeys, expand_key};
use ringseal_kernels::ghash::{GHASH_KEY_GRID, GhashKeyParams, ghash_key};
use ringseal_kernels::sealed::{RoundKeysParams, SealedKey, SenderKey, store_round_keys};
use zeroize::{Zeroize, Zeroizing};

use super::{DeviceBuffer, Kernel, Launch, Module, Stream};
use crate::aead::AesKey;
use crate::backend::gcm::HashSubkey;
use crate::backend::le_words;
use crate::channel::{KeyLength, Reserved, Root, Terms, Volume};
use crate::{Error, Result};

/// One rank's keys and counters in a session: the senders' keys of an even epoch and of an odd one.
#[derive(Debug)]
pub(super) struct RankKeys {
    root: Root,
    terms: Terms,
    rank: usize,
    /// The ranks whose keys are kept: this one, its predecessor, and any others whose records it opens.
    senders: Vec<usize>,
    length: KeyLength,
    epoch: u64,
    volume: Volume,
    ghash: Kernel,
    round_keys: Kernel,
    epochs: [PreparedKeys; 2],
}

struct PreparedKeys {
    own: Zeroizing<RoundKeys>,
    predecessor: Zeroizing<RoundKeys>,
    /// A [`SenderKey`] for each rank; those of the senders are filled.
    table: DeviceBuffer,
}

impl std::fmt::Debug for PreparedKeys {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("PreparedKeys(..)")
    }
}

/// What a collective's kernel takes. Copies of it are the taker's to zeroize.
pub(super) struct PresentKeys {
    pub(super) own: SealedKey,
    pub(super) predecessor: SealedKey,
    /// Address of the table of [`SenderKey`]s.
    pub(super) senders: u64,
}

impl Drop for PresentKeys {
    fn drop(&mut self) {
        self.own.round_keys.zeroize();
        self.predecessor.round_keys.zeroize();
    }
}

impl RankKeys {
    /// Prepares the keys of a session's first two epochs for rank `rank`, which opens its predecessor's records or, with
    /// `any_sender`, those of all ranks.
    pub(super) fn new(
        root: Root,
        terms: Terms,
        rank: usize,
        any_sender: bool,
        length: KeyLength,
        module: &Module,
        stream: &Stream,
    ) -> Result<Self> {
        let empty = || -> Result<PreparedKeys> {
            let table = DeviceBuffer::secret(stream.device(), terms.ranks * size_of::<SenderKey>())?;
            Ok(PreparedKeys { own: Zeroizing::new([0; 60]), predecessor: Zeroizing::new([0; 60]), table })
        };
        let senders =
            if any_sender { (0..terms.ranks).collect() } else { vec![rank, predecessor(rank, terms.ranks)] };
        let mut keys = Self {
            root,
            terms,
            rank,
            senders,
            length,
            epoch: 0,
            volume: Volume::new(terms.key_bytes),
            ghash: module.kernel("ghash_key", ghash_key::SHARED)?,
            round_keys: module.kernel("store_round_keys", store_round_keys::SHARED)?,
            epochs: [empty()?, empty()?],
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

    /// Whether a collective of so many block cipher calls begins a new epoch.
    pub(super) fn enters(&self, calls: u64) -> bool {
        self.volume.ask(calls) == Reserved::NextEpoch
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
        let prepared = &mut self.epochs[(epoch % 2) as usize];
        for &sender in &self.senders {
            let key = self.root.cipher_key(sender, epoch, self.length)?;
            let round_keys = Zeroizing::new(expand_key(key.as_bytes()));
            let address = prepared.table.pointer() + (sender * size_of::<SenderKey>()) as u64;
            let mut ghash = GhashKeyParams { h: hash_key(&key), key: address };
            let mut rounds = RoundKeysParams { round_keys: *round_keys, key: address };
            let (grid, threads) = (GHASH_KEY_GRID, ghash_key::THREADS);
            // SAFETY: the kernels fill an entry of the table, which lives until the stream has passed: it is freed by a
            // call that waits for the device.
            let results = unsafe {
                [
                    self.ghash.launch(Launch { blocks: grid, threads }, stream, &ghash),
                    self.round_keys.launch(
                        Launch { blocks: 1, threads: store_round_keys::THREADS },
                        stream,
                        &rounds,
                    ),
                ]
            };
            ghash.h.zeroize();
            rounds.round_keys.zeroize();
            results.into_iter().collect::<Result<()>>()?;
            if sender == self.rank {
                prepared.own.copy_from_slice(&*round_keys);
            }
            if sender == predecessor(self.rank, self.terms.ranks) {
                prepared.predecessor.copy_from_slice(&*round_keys);
            }
        }
        Ok(())
    }

    /// Address of this epoch's table of [`SenderKey`]s, which holds all that the mesh's kernels need.
    pub(super) fn senders(&self) -> u64 {
        self.epochs[(self.epoch % 2) as usize].table.pointer()
    }

    /// This epoch's expanded keys of all whose records this rank seals or opens.
    pub(super) fn round_keys(&self) -> Result<Vec<(u32, Zeroizing<RoundKeys>)>> {
        let expand = |&sender: &usize| {
            let key = self.root.cipher_key(sender, self.epoch, self.length)?;
            Ok((sender as u32, Zeroizing::new(expand_key(key.as_bytes()))))
        };
        self.senders.iter().map(expand).collect()
    }

    /// This epoch's keys.
    pub(super) fn present(&self) -> PresentKeys {
        let keys = &self.epochs[(self.epoch % 2) as usize];
        let key = |round_keys: &RoundKeys, sender: usize| SealedKey {
            round_keys: *round_keys,
            ghash_key: keys.table.pointer() + (sender * size_of::<SenderKey>()) as u64,
        };
        PresentKeys {
            own: key(&keys.own, self.rank),
            predecessor: key(&keys.predecessor, predecessor(self.rank, self.terms.ranks)),
            senders: keys.table.pointer(),
        }
    }
}

const fn predecessor(rank: usize, ranks: usize) -> usize {
    (rank + ranks - 1) % ranks
}

/// GHASH's key as the kernels take it, little-endian words.
pub(super) fn hash_key(key: &AesKey) -> [u32; 4] {
    le_words(*HashSubkey::new(key).block())
}
