//! Seals and opens the records of one session.

use std::sync::Arc;

use super::handshake::{Root, Terms, Unconfirmed};
use super::volume::{Reserved, Volume};
use super::{AssociatedData, Crypto, KeyLength, MAX_SEQUENCE, VERSION, nonce};
use crate::aead::{Aead, Iv, Tag};
use crate::backend::Backend;
use crate::transport::{Received, Sealed};
use crate::{Error, Result};

/// What all ranks of a collective must mean alike: codes as in [`AssociatedData`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// The collective.
    pub collective: u8,
    /// The algorithm.
    pub algorithm: u8,
    /// The element type.
    pub dtype: u8,
    /// The operation.
    pub op: u8,
    /// The broadcasting rank.
    pub root: u16,
    /// Elements of the whole vector.
    pub count: u64,
    /// Number of the collective in the session, from [`Session::begin`].
    pub sequence: u64,
}

/// Which record of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The step in which its sender seals it.
    pub step: usize,
    /// Its number inside the chunk.
    pub record: usize,
    /// Whether it is the chunk's last one.
    pub last: bool,
}

/// Keys and counters of one rank in one session.
pub struct Session {
    id: u64,
    rank: usize,
    ranks: usize,
    cipher: Cipher,
    epoch: u64,
    volume: Volume,
    sequence: u64,
    /// Sequence, step and record of the latest nonce used by this rank.
    latest: Option<(u64, usize, usize)>,
}

enum Cipher {
    Plain,
    Gcm(Keys),
}

/// Expanded keys of the current epoch, by sender, made when first needed.
struct Keys {
    root: Root,
    backend: Arc<dyn Backend>,
    length: KeyLength,
    by_sender: Vec<Option<Aead>>,
}

impl Session {
    /// Ends a handshake with all ranks' confirmations, by rank. The cipher runs on `backend`.
    ///
    /// # Errors
    /// [`Error::Handshake`] when a rank came to something else.
    pub fn new(
        unconfirmed: Unconfirmed,
        confirmations: &[Vec<u8>],
        backend: Arc<dyn Backend>,
    ) -> Result<Self> {
        let (root, terms, rank) = unconfirmed.confirmed(confirmations)?;
        Ok(Self::from_root(root, terms, rank, backend))
    }

    /// Of a handshake that has ended.
    pub(crate) fn from_root(root: Root, terms: Terms, rank: usize, backend: Arc<dyn Backend>) -> Self {
        let id = root.session();
        let cipher = match terms.crypto {
            Crypto::None => Cipher::Plain,
            Crypto::Gcm(length) => {
                let by_sender = (0..terms.ranks).map(|_| None).collect();
                Cipher::Gcm(Keys { root, backend, length, by_sender })
            }
        };
        Self {
            id,
            rank,
            ranks: terms.ranks,
            cipher,
            epoch: 0,
            volume: Volume::new(terms.key_bytes),
            sequence: 0,
            latest: None,
        }
    }

    /// A number that tells this session from others. Public.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The current epoch, counted from 0.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// How many collectives have begun.
    pub fn collectives(&self) -> u64 {
        self.sequence
    }

    /// Begins a collective and gives its sequence number, which is used up whatever happens next. `calls` are the
    /// block cipher calls of the rank that seals most; all ranks pass the same, and so enter an epoch together.
    ///
    /// # Errors
    /// [`Error::KeyExhausted`] when one key may not encrypt that much, or the sequence numbers are used up.
    pub fn begin(&mut self, calls: u64) -> Result<u64> {
        let sequence = self.sequence;
        if sequence >= MAX_SEQUENCE {
            return Err(Error::InvalidArgument(format!("{MAX_SEQUENCE} collectives in one session; re-key")));
        }
        self.sequence += 1;
        let Cipher::Gcm(keys) = &mut self.cipher else { return Ok(sequence) };
        match self.volume.reserve(calls) {
            Reserved::Here => {}
            Reserved::NextEpoch => {
                self.epoch += 1;
                keys.by_sender.iter_mut().for_each(|key| *key = None);
            }
            Reserved::Never => return Err(Error::KeyExhausted { limit: self.volume.limit_bytes() }),
        }
        Ok(sequence)
    }

    /// Seals a record. Places of a rank must come in ascending order.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when a nonce would be used twice or a field does not fit; whatever the backend
    /// reports.
    pub fn seal(&mut self, call: &Call, place: Place, mut data: Vec<u8>) -> Result<Sealed> {
        let at = (call.sequence, place.step, place.record);
        if self.latest.is_some_and(|latest| at <= latest) || call.sequence >= self.sequence {
            return Err(Error::InvalidArgument(
                "a record was to be sealed out of order, which could use a nonce twice".into(),
            ));
        }
        self.latest = Some(at);
        let nonce = nonce(call.sequence, place.step, place.record)?;
        let associated = self.associated(call, self.rank, place);
        let tag = match self.cipher.key(self.rank, self.epoch)? {
            None => plain_tag(&associated),
            Some(key) => key.seal_in_place(Iv::from_nonce(&nonce), associated.as_bytes(), &mut data)?,
        };
        Ok(Sealed::new(data, tag))
    }

    /// Verifies and decrypts a record of `sender` that has `bytes` bytes.
    ///
    /// # Errors
    /// [`Error::Authentication`]; whatever the backend reports.
    pub fn open(
        &mut self,
        call: &Call,
        sender: usize,
        place: Place,
        received: Received,
        bytes: usize,
    ) -> Result<Vec<u8>> {
        let Received { bytes: mut data, tag } = received;
        if data.len() != bytes {
            return Err(Error::Authentication);
        }
        self.verify(call, sender, place, &mut data, &tag)?;
        Ok(data)
    }

    /// Verifies a record of `sender` and decrypts it into `out`, of its length. Gives the record back as it came, now
    /// fit for being passed on. On an error `out` is zeros or as it was.
    ///
    /// # Errors
    /// [`Error::Authentication`]; whatever the backend reports.
    pub fn open_into(
        &mut self,
        call: &Call,
        sender: usize,
        place: Place,
        received: Received,
        out: &mut [u8],
    ) -> Result<Sealed> {
        if received.bytes.len() != out.len() {
            return Err(Error::Authentication);
        }
        out.copy_from_slice(&received.bytes);
        self.verify(call, sender, place, out, &received.tag)?;
        Ok(Sealed::new(received.bytes, received.tag))
    }

    fn verify(&mut self, call: &Call, sender: usize, place: Place, data: &mut [u8], tag: &Tag) -> Result<()> {
        let nonce = nonce(call.sequence, place.step, place.record)?;
        let associated = self.associated(call, sender, place);
        match self.cipher.key(sender, self.epoch)? {
            None if plain_tag(&associated) == *tag => Ok(()),
            None => Err(Error::Authentication),
            Some(key) => key.open_in_place(Iv::from_nonce(&nonce), associated.as_bytes(), data, tag),
        }
    }

    fn associated(&self, call: &Call, sender: usize, place: Place) -> AssociatedData {
        // No field is cut: ranks are at most MAX_RANKS, and `nonce` has refused steps and records that don't fit.
        AssociatedData {
            version: VERSION,
            collective: call.collective,
            algorithm: call.algorithm,
            dtype: call.dtype,
            op: call.op,
            reserved: 0,
            root: call.root,
            session: self.id,
            sequence: call.sequence,
            count: call.count,
            sender: sender as u16,
            ranks: self.ranks as u16,
            step: place.step as u32,
            record: place.record as u32,
            last: place.last.into(),
        }
    }
}

impl Cipher {
    fn key(&mut self, sender: usize, epoch: u64) -> Result<Option<&Aead>> {
        let Self::Gcm(Keys { root, backend, length, by_sender }) = self else { return Ok(None) };
        let slot = &mut by_sender[sender];
        if slot.is_none() {
            *slot = Some(Aead::new(backend.as_ref(), &root.cipher_key(sender, epoch, *length)?)?);
        }
        Ok(slot.as_ref())
    }
}

/// Stands where a tag would: shows that honest ranks mean the same record of the same call, and no more.
fn plain_tag(associated: &AssociatedData) -> Tag {
    // FNV-1a, two words wide (Fowler, Noll, Vo).
    let mut hash = [0xcbf2_9ce4_8422_2325_u64, 0x6c62_272e_07bb_0142];
    for (index, word) in associated.as_bytes().as_chunks().0.iter().enumerate() {
        let lane = &mut hash[index % 2];
        *lane = (*lane ^ u64::from_le_bytes(*word)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    let mut tag = [0; 16];
    tag[..8].copy_from_slice(&hash[0].to_le_bytes());
    tag[8..].copy_from_slice(&hash[1].to_le_bytes());
    tag
}

impl std::fmt::Debug for Session {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Session")
            .field("id", &self.id)
            .field("rank", &self.rank)
            .field("ranks", &self.ranks)
            .field("epoch", &self.epoch)
            .field("sequence", &self.sequence)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use aes_gcm::aead::{Aead as _, KeyInit, Payload};

    use super::*;
    use crate::backend::cpu::Cpu;
    use crate::channel::{GroupSecret, Handshake, Terms};

    const CALL: Call = Call { collective: 1, algorithm: 2, dtype: 3, op: 4, root: 0, count: 77, sequence: 0 };

    /// The sessions of two ranks, from the hellos of the handshake's test.
    fn sessions(key_bytes: u64) -> [Session; 2] {
        let crypto = Crypto::Gcm(KeyLength::Aes256);
        let terms = Terms { ranks: 2, crypto, record_bytes: 65536, key_bytes };
        let secret = GroupSecret::from_bytes(std::array::from_fn(|at| at as u8));
        let ranks = [0, 1].map(|rank| Handshake::with_random(&secret, terms, rank, [0xa0 + rank as u8; 32]));
        let hellos = ranks.each_ref().map(|rank| rank.hello().to_vec());
        let heard = ranks.map(|rank| rank.hear(&hellos).unwrap());
        let confirmations = heard.each_ref().map(|rank| rank.confirmation().to_vec());
        heard.map(|rank| Session::new(rank, &confirmations, Arc::new(Cpu)).unwrap())
    }

    fn place(step: usize, record: usize) -> Place {
        Place { step, record, last: true }
    }

    /// Against another implementation of AES-GCM, with key, nonce and additional data put together by hand.
    #[test]
    fn a_sealed_record_is_as_documented() {
        let [_, mut one] = sessions(1 << 30);
        for _ in 0..0x0102 {
            one.begin(1).unwrap();
        }
        let call = Call { sequence: 0x0101, ..CALL };
        let sealed = one.seal(&call, place(5, 6), b"gradients".to_vec()).unwrap();
        let key = hex::decode("6888d813d62f9c770c290d8e1fd4efaecf328861ac9e043b864f95b119aba077").unwrap();
        let nonce = hex::decode("000000000101000500000006").unwrap();
        let session = hex::encode(18_190_968_416_718_656_608_u64.to_le_bytes());
        let associated = [
            "010102030400",
            "0000",
            &session,
            "0101000000000000",
            "4d00000000000000",
            "0100",
            "0200",
            "05000000",
            "06000000",
            "01000000",
        ];
        let associated = hex::decode(associated.concat()).unwrap();
        let sealed = [sealed.bytes(), sealed.tag()].concat();
        let opened = aes_gcm::Aes256Gcm::new_from_slice(&key)
            .unwrap()
            .decrypt(nonce.as_slice().try_into().unwrap(), Payload { msg: &sealed, aad: &associated });
        assert_eq!(opened.unwrap(), b"gradients");
    }

    #[test]
    fn no_place_is_sealed_twice_or_before_its_collective() {
        let [mut zero, _] = sessions(1 << 30);
        assert!(zero.seal(&CALL, place(0, 0), vec![1]).is_err(), "not begun");
        zero.begin(1).unwrap();
        zero.seal(&CALL, place(2, 1), vec![1]).unwrap();
        for (step, record) in [(2, 1), (2, 0), (1, 9)] {
            assert!(zero.seal(&CALL, place(step, record), vec![1]).is_err(), "{step} {record}");
        }
        zero.seal(&CALL, place(2, 2), vec![1]).unwrap();
        let next = Call { sequence: zero.begin(1).unwrap(), ..CALL };
        zero.seal(&next, place(0, 0), vec![1]).unwrap();
        assert!(zero.seal(&CALL, place(3, 0), vec![1]).is_err(), "an earlier collective");
    }

    /// Every field of what the ranks must mean alike, and every place, is authenticated.
    #[test]
    fn a_record_opens_only_as_what_it_was_sealed_as() {
        let [mut zero, mut one] = sessions(1 << 30);
        for session in [&mut zero, &mut one] {
            session.begin(1).unwrap();
            session.begin(1).unwrap();
        }
        let sealed = zero.seal(&CALL, place(4, 5), b"gradients".to_vec()).unwrap();
        let mut open = |call: &Call, sender: usize, place: Place| {
            let (bytes, tag) = sealed.clone().into_parts();
            one.open(call, sender, place, Received { bytes, tag }, 9)
        };
        assert_eq!(open(&CALL, 0, place(4, 5)).unwrap(), b"gradients");
        for call in [
            Call { collective: 0, ..CALL },
            Call { algorithm: 0, ..CALL },
            Call { dtype: 0, ..CALL },
            Call { op: 0, ..CALL },
            Call { root: 1, ..CALL },
            Call { count: 76, ..CALL },
            Call { sequence: 1, ..CALL },
        ] {
            assert!(matches!(open(&call, 0, place(4, 5)), Err(Error::Authentication)), "{call:?}");
        }
        for (sender, place) in
            [(1, place(4, 5)), (0, place(3, 5)), (0, place(4, 4)), (0, Place { last: false, ..place(4, 5) })]
        {
            assert!(matches!(open(&CALL, sender, place), Err(Error::Authentication)), "{sender} {place:?}");
        }
    }

    /// Same place, same everything, one epoch later.
    #[test]
    fn an_epoch_has_other_keys() {
        let [mut early, _] = sessions(160);
        let [mut late, mut reader] = sessions(160);
        let before = early.begin(5).unwrap();
        late.begin(5).unwrap();
        reader.begin(5).unwrap();
        // The next collective doesn't fit any more where the first has been.
        early.begin(1).unwrap();
        assert_eq!((late.begin(6).unwrap(), reader.begin(6).unwrap(), before), (1, 1, 0));
        assert_eq!((early.epoch(), late.epoch()), (0, 1));
        let call = Call { sequence: 1, ..CALL };
        let [old, new] =
            [early, late].map(|mut session| session.seal(&call, place(0, 0), vec![0; 32]).unwrap());
        assert_ne!(old.bytes(), new.bytes());
        let mut open = |sealed: Sealed| {
            let (bytes, tag) = sealed.into_parts();
            reader.open(&call, 0, place(0, 0), Received { bytes, tag }, 32)
        };
        assert!(matches!(open(old), Err(Error::Authentication)));
        assert_eq!(open(new).unwrap(), [0; 32]);
    }
}
