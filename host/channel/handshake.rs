//! Agreement on a session: fresh randomness from every rank, and proof that all derived the same.
//!
//! Two rounds, in each of which every rank gives a message to all:
//!
//! 1. A hello: what the rank assumes about the group, and 32 fresh random bytes. All hellos together are the salt of
//!    HKDF-Extract, and the group secret is its input.
//! 2. A confirmation: bytes expanded from the result for this rank. It comes out alike only if secret, all hellos and
//!    the rank's number are alike, so a rank without the secret, a changed hello and a replayed one all show.
//!
//! How messages travel is the caller's business; they need no protection.

use ctutils::CtEq;
use hkdf::Hkdf;
use sha2::{Digest, Sha256};
use zeroize::{Zeroize, Zeroizing};

use super::secret::fill_random;
use super::{Crypto, GroupSecret, KeyLength, MAX_RANKS, VERSION};
use crate::aead::AesKey;
use crate::{Error, Result};

/// What the ranks of a group must have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Number of ranks.
    pub ranks: usize,
    /// What protects records.
    pub crypto: Crypto,
    /// Bytes of a full record.
    pub record_bytes: usize,
    /// Bytes that a key may encrypt.
    pub key_bytes: u64,
}

/// Label, then everything in [`Terms`], then randomness; integers little-endian.
const HELLO_BYTES: usize = 64;
const HELLO_LABEL: [u8; 8] = *b"ringseal";
/// Where the randomness begins.
const RANDOM: usize = 32;

/// Separates what is derived for one purpose from what is derived for others.
const CONFIRM_LABEL: &[u8] = b"ringseal 1 confirm";
const SESSION_LABEL: &[u8] = b"ringseal 1 session";
const KEY_LABEL: &[u8] = b"ringseal 1 key";
const COPY_LABEL: &[u8] = b"ringseal 1 copy";
const ANNOUNCE_LABEL: &[u8] = b"ringseal 1 announce";

/// Length of [`Root::announcement_tag`].
pub(crate) const ANNOUNCEMENT_TAG_BYTES: usize = 32;

/// First round: this rank's hello is out.
#[derive(Debug)]
pub struct Handshake {
    secret: GroupSecret,
    terms: Terms,
    rank: usize,
    hello: [u8; HELLO_BYTES],
}

impl Handshake {
    /// Begins as rank `rank`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when `rank` is not one of the ranks, or there are none or too many;
    /// [`Error::Randomness`].
    pub fn new(secret: &GroupSecret, terms: Terms, rank: usize) -> Result<Self> {
        if terms.ranks > MAX_RANKS || rank >= terms.ranks {
            return Err(Error::InvalidArgument(format!(
                "rank {rank} of {}: ranks are numbered from 0, and a group has 1 to {MAX_RANKS}",
                terms.ranks
            )));
        }
        let mut random = [0; HELLO_BYTES - RANDOM];
        fill_random(&mut random)?;
        Ok(Self::with_random(secret, terms, rank, random))
    }

    pub(super) fn with_random(
        secret: &GroupSecret,
        terms: Terms,
        rank: usize,
        random: [u8; HELLO_BYTES - RANDOM],
    ) -> Self {
        let mut hello = encode(&terms, rank);
        hello[RANDOM..].copy_from_slice(&random);
        Self { secret: secret.clone(), terms, rank, hello }
    }

    /// The message of the first round.
    pub fn hello(&self) -> &[u8] {
        &self.hello
    }

    /// Takes all ranks' hellos, by rank.
    ///
    /// # Errors
    /// [`Error::Handshake`] when one is malformed, in the wrong place, or made under other assumptions, or when this
    /// rank's own one was not delivered as it was sent.
    pub fn hear(self, hellos: &[Vec<u8>]) -> Result<Unconfirmed> {
        if hellos.len() != self.terms.ranks {
            return Err(Error::Handshake(format!(
                "{} ranks said hello, but the group has {}",
                hellos.len(),
                self.terms.ranks
            )));
        }
        for (rank, hello) in hellos.iter().enumerate() {
            self.check(rank, hello)?;
        }
        let salt = hellos.iter().fold(Sha256::new(), |hash, hello| hash.chain_update(hello)).finalize();
        let (mut extracted, _) = Hkdf::<Sha256>::extract(Some(&salt), self.secret.as_bytes());
        let root = Root(Zeroizing::new(extracted.into()));
        extracted.zeroize();
        Ok(Unconfirmed { root, rank: self.rank, terms: self.terms })
    }

    fn check(&self, rank: usize, hello: &[u8]) -> Result<()> {
        let failed = |what: &str| Err(Error::Handshake(format!("rank {rank}: {what}")));
        let wanted = encode(&self.terms, rank);
        if hello.len() != HELLO_BYTES || hello[..8] != wanted[..8] {
            return failed("its hello is malformed");
        }
        let differs = |field: std::ops::Range<usize>| hello[field.clone()] != wanted[field];
        if differs(8..9) {
            return failed("it speaks another version of the protocol");
        }
        if differs(9..10) {
            return failed("it uses another cipher; all ranks must use the same");
        }
        if differs(10..12) {
            return failed("it assumes another number of ranks");
        }
        if differs(12..16) {
            return failed("it takes itself for another rank");
        }
        if differs(16..24) {
            return failed("it uses records of another length");
        }
        if differs(24..32) {
            return failed("it uses another volume limit for keys");
        }
        if rank == self.rank && hello != self.hello {
            return failed("its hello came back changed");
        }
        Ok(())
    }
}

/// All that is said in clear before the randomness.
fn encode(terms: &Terms, rank: usize) -> [u8; HELLO_BYTES] {
    let mut hello = [0; HELLO_BYTES];
    hello[..8].copy_from_slice(&HELLO_LABEL);
    hello[8] = VERSION;
    hello[9] = terms.crypto.code();
    // Both fit: there are at most MAX_RANKS.
    hello[10..12].copy_from_slice(&(terms.ranks as u16).to_le_bytes());
    hello[12..16].copy_from_slice(&(rank as u32).to_le_bytes());
    hello[16..24].copy_from_slice(&(terms.record_bytes as u64).to_le_bytes());
    hello[24..32].copy_from_slice(&terms.key_bytes.to_le_bytes());
    hello
}

/// Second round: the root is derived, and it remains to be seen whether all ranks have the same.
#[derive(Debug)]
pub struct Unconfirmed {
    root: Root,
    rank: usize,
    terms: Terms,
}

impl Unconfirmed {
    /// The message of the second round.
    pub fn confirmation(&self) -> [u8; 32] {
        self.root.confirmation(self.rank)
    }

    /// Takes all ranks' confirmations, by rank, and ends the handshake.
    ///
    /// # Errors
    /// [`Error::Handshake`] when a rank came to something else.
    pub(crate) fn confirmed(self, confirmations: &[Vec<u8>]) -> Result<(Root, Terms, usize)> {
        if confirmations.len() != self.terms.ranks {
            return Err(Error::Handshake(format!(
                "{} ranks confirmed, but the group has {}",
                confirmations.len(),
                self.terms.ranks
            )));
        }
        for (rank, confirmation) in confirmations.iter().enumerate() {
            if !bool::from(self.root.confirmation(rank).as_slice().ct_eq(confirmation.as_slice())) {
                return Err(Error::Handshake(format!(
                    "rank {rank} holds another group secret, or messages were changed or replayed on the way"
                )));
            }
        }
        Ok((self.root, self.terms, self.rank))
    }
}

/// What a session's keys are expanded from.
#[derive(Clone)]
pub(crate) struct Root(Zeroizing<[u8; 32]>);

impl Root {
    fn expand(&self, info: &[&[u8]], out: &mut [u8]) {
        let Ok(hkdf) = Hkdf::<Sha256>::from_prk(&*self.0) else {
            unreachable!("the root is as long as a hash")
        };
        let expanded = hkdf.expand_multi_info(info, out);
        assert!(expanded.is_ok(), "HKDF-SHA256 gives up to 8160 bytes (RFC 5869, 2.3)");
    }

    fn confirmation(&self, rank: usize) -> [u8; 32] {
        let mut out = [0; 32];
        self.expand(&[CONFIRM_LABEL, &(rank as u64).to_le_bytes()], &mut out);
        out
    }

    /// A number for the session; public.
    pub(crate) fn session(&self) -> u64 {
        let mut out = [0; 8];
        self.expand(&[SESSION_LABEL], &mut out);
        u64::from_le_bytes(out)
    }

    /// Authenticates what rank `rank` says in a round of the set-up: HKDF-Expand is HMAC of its info under the root
    /// (RFC 5869, 2.3).
    pub(crate) fn announcement_tag(
        &self,
        round: u64,
        rank: usize,
        message: &[u8],
    ) -> [u8; ANNOUNCEMENT_TAG_BYTES] {
        let mut out = [0; ANNOUNCEMENT_TAG_BYTES];
        let rank = (rank as u64).to_le_bytes();
        self.expand(&[ANNOUNCE_LABEL, &round.to_le_bytes(), &rank, message], &mut out);
        out
    }

    /// For copies between host and device: both ends are this process's, so fresh randomness is all of the salt.
    pub(crate) fn of_copies(secret: &GroupSecret) -> Result<Self> {
        let mut salt = [0; 32];
        fill_random(&mut salt)?;
        let (mut extracted, _) = Hkdf::<Sha256>::extract(Some(&salt), secret.as_bytes());
        let root = Self(Zeroizing::new(extracted.into()));
        extracted.zeroize();
        Ok(root)
    }

    /// The key of a direction of copies in an epoch. Never a collective's: the label differs.
    pub(crate) fn copy_key(&self, direction: u8, epoch: u64, out: &mut [u8]) {
        let bits = out.len() as u64 * 8;
        self.expand(&[COPY_LABEL, &[direction], &epoch.to_le_bytes(), &bits.to_le_bytes()], out);
    }

    /// The key of a sender in an epoch.
    pub(crate) fn key(&self, sender: usize, epoch: u64, out: &mut [u8]) {
        let bits = out.len() as u64 * 8;
        self.expand(
            &[KEY_LABEL, &(sender as u64).to_le_bytes(), &epoch.to_le_bytes(), &bits.to_le_bytes()],
            out,
        );
    }

    /// [`Self::key`] for its cipher.
    pub(crate) fn cipher_key(&self, sender: usize, epoch: u64, length: KeyLength) -> Result<AesKey> {
        let mut key = Zeroizing::new([0; 32]);
        let key = &mut key[..length.bytes()];
        self.key(sender, epoch, key);
        AesKey::from_bytes(key)
    }
}

impl std::fmt::Debug for Root {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Root(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channel::KeyLength;

    const TERMS: Terms = Terms {
        ranks: 3,
        crypto: Crypto::Gcm(KeyLength::Aes256),
        record_bytes: 65536,
        key_bytes: super::super::volume::DEFAULT_BYTES,
    };

    fn secret(byte: u8) -> GroupSecret {
        GroupSecret::from_bytes([byte; 32])
    }

    fn start(secrets: [u8; 3], terms: [Terms; 3]) -> (Vec<Handshake>, Vec<Vec<u8>>) {
        let ranks: Vec<_> =
            (0..3).map(|rank| Handshake::new(&secret(secrets[rank]), terms[rank], rank).unwrap()).collect();
        let hellos = ranks.iter().map(|rank| rank.hello().to_vec()).collect();
        (ranks, hellos)
    }

    /// Each rank's root, or its error.
    fn finish(ranks: Vec<Handshake>, hellos: &[Vec<Vec<u8>>]) -> Vec<Result<Root>> {
        let heard: Vec<_> = ranks.into_iter().zip(hellos).map(|(rank, hellos)| rank.hear(hellos)).collect();
        let confirmations: Vec<_> = heard
            .iter()
            .map(|rank| rank.as_ref().map_or(vec![], |rank| rank.confirmation().to_vec()))
            .collect();
        heard.into_iter().map(|rank| Ok(rank?.confirmed(&confirmations)?.0)).collect()
    }

    #[test]
    fn all_ranks_derive_the_same_and_never_the_same_again() {
        let mut sessions = std::collections::HashSet::new();
        for _ in 0..20 {
            let (ranks, hellos) = start([1; 3], [TERMS; 3]);
            let roots: Vec<_> = finish(ranks, &vec![hellos; 3]).into_iter().map(Result::unwrap).collect();
            let key = |root: &Root, sender, epoch| {
                let mut key = [0; 32];
                root.key(sender, epoch, &mut key);
                key
            };
            assert!(roots.iter().all(|root| key(root, 2, 7) == key(&roots[0], 2, 7)));
            assert!(roots.iter().all(|root| root.session() == roots[0].session()));
            for other in [key(&roots[0], 1, 7), key(&roots[0], 2, 8)] {
                assert_ne!(other, key(&roots[0], 2, 7));
            }
            let mut short = [0; 16];
            roots[0].key(2, 7, &mut short);
            assert_ne!(short, key(&roots[0], 2, 7)[..16], "key lengths don't share bytes");
            assert!(sessions.insert(roots[0].session()));
        }
    }

    /// HKDF itself, against RFC 5869, appendix A.1.
    #[test]
    fn hkdf_is_as_published() {
        let salt: Vec<u8> = (0..=0x0c).collect();
        let hkdf = Hkdf::<Sha256>::new(Some(&salt), &[0x0b; 22]);
        let mut out = [0; 42];
        hkdf.expand(&hex::decode("f0f1f2f3f4f5f6f7f8f9").unwrap(), &mut out).unwrap();
        assert_eq!(
            hex::encode(out),
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
        );
    }

    /// Against HMAC-SHA256 of another implementation (Python's `hmac`), put together by hand: what a group derives must
    /// not change by accident.
    #[test]
    fn what_is_derived_from_given_hellos() {
        let terms = Terms { ranks: 2, key_bytes: 1 << 30, ..TERMS };
        let secret = GroupSecret::from_bytes(std::array::from_fn(|at| at as u8));
        let [zero, one] =
            [0, 1].map(|rank| Handshake::with_random(&secret, terms, rank, [0xa0 + rank as u8; 32]));
        let hellos = [zero.hello().to_vec(), one.hello().to_vec()];
        let [zero, one] = [zero, one].map(|rank| rank.hear(&hellos).unwrap());
        let confirmations = [zero.confirmation().to_vec(), one.confirmation().to_vec()];
        assert_eq!(
            hex::encode(&confirmations[1]),
            "86c5b9be747dc3caca1cce1561438586084f7285a16b19c26caab6c8c4754dd0"
        );
        let (root, ..) = one.confirmed(&confirmations).unwrap();
        assert_eq!(root.session(), 18_190_968_416_718_656_608);
        let mut key = [0; 32];
        root.key(1, 3, &mut key);
        assert_eq!(hex::encode(key), "2763eeb1369231b9ff845043fc47deb5e8d28e1d09cbd3c46199685a156f44fa");
    }

    #[test]
    fn another_secret_is_noticed_by_every_rank() {
        let (ranks, hellos) = start([1, 1, 2], [TERMS; 3]);
        let errors: Vec<_> = finish(ranks, &vec![hellos; 3]).into_iter().map(Result::unwrap_err).collect();
        assert!(errors.iter().all(|error| matches!(error, Error::Handshake(_))));
        assert!(errors[0].to_string().contains("rank 2"));
    }

    #[test]
    fn every_changed_bit_of_a_hello_is_noticed() {
        for bit in 0..8 * HELLO_BYTES {
            let (ranks, hellos) = start([1; 3], [TERMS; 3]);
            let mut changed = hellos.clone();
            changed[1][bit / 8] ^= 1 << (bit % 8);
            let roots = finish(ranks, &[hellos.clone(), hellos, changed]);
            assert!(roots.iter().all(Result::is_err), "bit {bit}");
        }
    }

    #[test]
    fn replayed_and_swapped_hellos_are_noticed() {
        let (_, old) = start([1; 3], [TERMS; 3]);
        let (ranks, hellos) = start([1; 3], [TERMS; 3]);
        let replayed = vec![hellos[0].clone(), old[1].clone(), hellos[2].clone()];
        assert!(finish(ranks, &[replayed, hellos.clone(), hellos]).iter().all(Result::is_err));
        let (ranks, mut hellos) = start([1; 3], [TERMS; 3]);
        hellos.swap(1, 2);
        assert!(finish(ranks, &vec![hellos; 3]).iter().all(Result::is_err));
    }

    #[test]
    fn what_the_ranks_disagree_on_is_named() {
        for (terms, word) in [
            (Terms { crypto: Crypto::None, ..TERMS }, "cipher"),
            (Terms { crypto: Crypto::Gcm(KeyLength::Aes128), ..TERMS }, "cipher"),
            (Terms { record_bytes: 4096, ..TERMS }, "records"),
            (Terms { key_bytes: 1 << 20, ..TERMS }, "volume"),
            (Terms { ranks: 4, ..TERMS }, "number of ranks"),
        ] {
            let (ranks, hellos) = start([1; 3], [TERMS, terms, TERMS]);
            let error = finish(ranks, &vec![hellos; 3]).remove(0).unwrap_err().to_string();
            assert!(error.contains("rank 1") && error.contains(word), "{error}");
        }
        for (ranks, rank) in [(0, 0), (3, 3), (MAX_RANKS + 1, 0)] {
            Handshake::new(&secret(1), Terms { ranks, ..TERMS }, rank).unwrap_err();
        }
    }
}
