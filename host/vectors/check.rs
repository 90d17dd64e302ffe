//! One vector: what it asks of a backend.

use std::fmt;

use crate::Error;
use crate::aead::{Aead, AesKey, Iv, TAG_BYTES, tag_from_bytes};
use crate::backend::{Backend, CounterWidth};

/// What a vector proves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The keystream from `iv` as a 128-bit counter block takes the plaintext to the ciphertext.
    Ctr,
    /// Sealing gives this ciphertext and tag, and opening gives the plaintext back.
    Seal,
    /// Opening gives this plaintext.
    Open,
    /// Opening is refused.
    Forged,
    /// The tag of the AAD alone.
    Gmac,
    /// Verifying the tag of the AAD alone is refused.
    ForgedGmac,
}

/// One published vector. What a kind has no use for is empty.
#[derive(Clone, Debug)]
pub(super) struct Vector {
    pub(super) place: String,
    pub(super) kind: Kind,
    pub(super) key: Vec<u8>,
    pub(super) iv: Vec<u8>,
    pub(super) aad: Vec<u8>,
    pub(super) plaintext: Vec<u8>,
    pub(super) ciphertext: Vec<u8>,
    pub(super) tag: Vec<u8>,
}

/// Why a vector did not pass.
#[derive(Debug)]
pub(super) enum Problem {
    /// The backend refused what it should have done.
    Backend(Error),
    /// The result is another one than published.
    Wrong(&'static str),
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        Self::Backend(error)
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Backend(error) => error.fmt(formatter),
            Self::Wrong(what) => formatter.write_str(what),
        }
    }
}

/// What an output buffer holds before a call, to tell "left alone" from "written".
const PREFILL: u8 = 0xa5;

impl Vector {
    /// The same vector as one of GMAC, where it has no plaintext and a whole tag (NIST SP 800-38D, 3).
    pub(super) fn as_gmac(&self) -> Option<Self> {
        let kind = match self.kind {
            Kind::Seal | Kind::Open => Kind::Gmac,
            Kind::Forged => Kind::ForgedGmac,
            Kind::Ctr | Kind::Gmac | Kind::ForgedGmac => return None,
        };
        let empty = self.ciphertext.is_empty() && self.tag.len() == TAG_BYTES;
        empty.then(|| Self { kind, ..self.clone() })
    }

    /// Runs the vector on `backend`.
    pub(super) fn check(&self, backend: &dyn Backend) -> Result<(), Problem> {
        let aead = Aead::new(backend, &AesKey::from_bytes(&self.key)?)?;
        match self.kind {
            Kind::Ctr => self.check_ctr(&aead),
            Kind::Seal => self.check_seal(&aead),
            Kind::Open => self.check_open(&aead),
            Kind::Forged => self.check_forged(&aead),
            Kind::Gmac => {
                expect(aead.gmac(Iv::new(&self.iv)?, &self.aad)? == *self.tag, "another tag")?;
                Ok(aead.verify_gmac(Iv::new(&self.iv)?, &self.aad, &tag_from_bytes(&self.tag)?)?)
            }
            Kind::ForgedGmac => {
                let verdict = aead.verify_gmac(Iv::new(&self.iv)?, &self.aad, &tag_from_bytes(&self.tag)?);
                refused(verdict)
            }
        }
    }

    fn check_ctr(&self, aead: &Aead) -> Result<(), Problem> {
        let Ok(counter_block) = self.iv.as_slice().try_into() else {
            return Err(Problem::Wrong("the counter block has another length than 16 bytes"));
        };
        let mut data = self.plaintext.clone();
        aead.ctr_xor(counter_block, CounterWidth::Full128, &mut data)?;
        expect(data == self.ciphertext, "another ciphertext")
    }

    fn check_seal(&self, aead: &Aead) -> Result<(), Problem> {
        let mut data = self.plaintext.clone();
        let tag = aead.seal_in_place(Iv::new(&self.iv)?, &self.aad, &mut data)?;
        expect(data == self.ciphertext, "another ciphertext")?;
        // A short tag is the first bytes of the whole one (NIST SP 800-38D, 7.1 step 6), which is all that can be
        // compared: ours are never cut.
        expect(tag.starts_with(&self.tag), "another tag")?;
        if self.tag.len() != TAG_BYTES {
            return expect(tag_from_bytes(&self.tag).is_err(), "a short tag is accepted");
        }
        aead.open_in_place(Iv::new(&self.iv)?, &self.aad, &mut data, &tag)?;
        expect(data == self.plaintext, "another plaintext")
    }

    fn check_open(&self, aead: &Aead) -> Result<(), Problem> {
        let mut output = vec![PREFILL; self.ciphertext.len()];
        let tag = tag_from_bytes(&self.tag)?;
        aead.open(Iv::new(&self.iv)?, &self.aad, &self.ciphertext, &mut output, &tag)?;
        expect(output == self.plaintext, "another plaintext")
    }

    fn check_forged(&self, aead: &Aead) -> Result<(), Problem> {
        let mut output = vec![PREFILL; self.ciphertext.len()];
        let Ok(iv) = Iv::new(&self.iv) else {
            return expect(self.iv.is_empty(), "a good IV is refused");
        };
        let tag = tag_from_bytes(&self.tag)?;
        refused(aead.open(iv, &self.aad, &self.ciphertext, &mut output, &tag))?;
        expect(output.iter().all(|byte| *byte == 0), "a forgery leaves data in the output")
    }
}

/// Only [`Error::Authentication`] refuses; any other error is the backend's own problem.
fn refused(verdict: crate::Result<()>) -> Result<(), Problem> {
    match verdict {
        Err(Error::Authentication) => Ok(()),
        Err(error) => Err(error.into()),
        Ok(()) => Err(Problem::Wrong("a forgery is accepted")),
    }
}

fn expect(holds: bool, otherwise: &'static str) -> Result<(), Problem> {
    if holds { Ok(()) } else { Err(Problem::Wrong(otherwise)) }
}
