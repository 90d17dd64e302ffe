//! The keys of a [`SeedGroup`](super::SeedGroup): of its present epoch.

use ringseal_kernels::table_ghash::{MacKeyParams, mac_key_bytes};
use zeroize::Zeroize;

use super::ring_keys::hash_key;
use super::seed::SeedKernels;
use super::{DeviceBuffer, DeviceKey, Stream};
use crate::backend::gcm::BlockCipher;
use crate::channel::{GroupSecret, Handshake, KeyLength, Reserved, Root, Terms, Unconfirmed, Volume};
use crate::{Error, Result};

/// Keys and counters of a session whose ranks are all in this process.
pub(super) struct SeedKeys {
    secret: GroupSecret,
    terms: Terms,
    root: Root,
    length: KeyLength,
    chains: u32,
    epoch: u64,
    volume: Volume,
    /// For each rank: its own key, and those of the ranks that it hears from.
    ranks: Vec<Vec<SenderKey>>,
}

/// What a rank needs of a sender's key.
pub(super) struct SenderKey {
    sender: usize,
    /// On the device: for counter mode.
    pub(super) text: DeviceKey,
    /// On the device: for the MAC, prepared by [`SeedKernels::prepare_mac`].
    pub(super) mac: DeviceBuffer,
    /// On the host: for the tags' masks, one block a message.
    host: BlockCipher,
}

impl std::fmt::Debug for SeedKeys {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("SeedKeys(..)")
    }
}

impl SeedKeys {
    /// Derives a session afresh and prepares the keys of its first epoch, on a stream for each rank. `senders` names
    /// whose keys each rank needs.
    pub(super) fn new(
        secret: &GroupSecret,
        terms: Terms,
        length: KeyLength,
        chains: u32,
        kernels: &[SeedKernels],
        senders: &[Vec<usize>],
        streams: &[&Stream],
    ) -> Result<Self> {
        let root = agree(secret, terms)?;
        let mut ranks = Vec::with_capacity(kernels.len());
        for (kernels, senders) in kernels.iter().zip(senders) {
            let key = |&sender| SenderKey::new(kernels, &root, length, sender, chains);
            ranks.push(senders.iter().map(key).collect::<Result<_>>()?);
        }
        let volume = Volume::new(terms.key_bytes);
        let mut keys = Self { secret: secret.clone(), terms, root, length, chains, epoch: 0, volume, ranks };
        keys.prepare(kernels, streams)?;
        Ok(keys)
    }

    /// Derives another session; no work under the old one's keys may be left.
    pub(super) fn renew(&mut self, kernels: &[SeedKernels], streams: &[&Stream]) -> Result<()> {
        self.root = agree(&self.secret, self.terms)?;
        self.epoch = 0;
        self.volume = Volume::new(self.terms.key_bytes);
        self.prepare(kernels, streams)
    }

    /// The session's number; public.
    pub(super) fn session(&self) -> u64 {
        self.root.session()
    }

    /// Reserves block cipher calls under the present keys, or else enters the next epoch: then its keys are prepared on the
    /// ranks' streams, which have passed all work under the old ones.
    ///
    /// # Errors
    /// [`Error::KeyExhausted`] when no key may make so many; [`Error::Cuda`].
    pub(super) fn reserve(&mut self, calls: u64, kernels: &[SeedKernels], streams: &[&Stream]) -> Result<()> {
        match self.volume.reserve(calls) {
            Reserved::Here => Ok(()),
            Reserved::NextEpoch => {
                self.epoch += 1;
                self.prepare(kernels, streams)
            }
            Reserved::Never => Err(Error::KeyExhausted { limit: self.volume.limit_bytes() }),
        }
    }

    fn prepare(&mut self, kernels: &[SeedKernels], streams: &[&Stream]) -> Result<()> {
        for ((keys, kernels), stream) in self.ranks.iter_mut().zip(kernels).zip(streams) {
            for key in keys {
                key.prepare(kernels, &self.root, self.epoch, self.length, self.chains, stream)?;
            }
        }
        Ok(())
    }

    /// What `rank` needs of `sender`'s key; `None` unless it was named to [`new`](Self::new).
    pub(super) fn of(&self, rank: usize, sender: usize) -> Option<&SenderKey> {
        self.ranks[rank].iter().find(|key| key.sender == sender)
    }
}

impl SenderKey {
    fn new(
        kernels: &SeedKernels,
        root: &Root,
        length: KeyLength,
        sender: usize,
        chains: u32,
    ) -> Result<Self> {
        let key = root.cipher_key(sender, 0, length)?;
        Ok(Self {
            sender,
            text: DeviceKey::new(kernels.cipher(), &key),
            mac: DeviceBuffer::secret(kernels.cipher().device(), mac_key_bytes(chains) as usize)?,
            host: BlockCipher::new(&key),
        })
    }

    fn prepare(
        &mut self,
        kernels: &SeedKernels,
        root: &Root,
        epoch: u64,
        length: KeyLength,
        chains: u32,
        stream: &Stream,
    ) -> Result<()> {
        let key = root.cipher_key(self.sender, epoch, length)?;
        self.text = DeviceKey::new(kernels.cipher(), &key);
        self.host = BlockCipher::new(&key);
        let mut params = MacKeyParams { h: hash_key(&key), key: self.mac.pointer(), chains };
        // SAFETY: the kernel fills the buffer, which lives until the stream has passed: it is freed by a call that waits
        // for the device.
        let result = unsafe { kernels.prepare_mac(&params, stream) };
        params.h.zeroize();
        result
    }

    /// The cipher of a block, on the host.
    pub(super) fn encrypt(&self, block: [u8; 16]) -> [u8; 16] {
        self.host.encrypt(block)
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
