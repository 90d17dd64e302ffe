//! AES-GCM and GMAC (NIST SP 800-38D) on any [`Backend`], with every limit of the standard checked first.
//!
//! ```
//! use ringseal::aead::{Aead, AesKey, Iv};
//!
//! let key = AesKey::from_bytes(&[7; 32])?;
//! let aead = Aead::new(ringseal::backend::by_name("cpu")?.as_ref(), &key)?;
//!
//! let mut data = *b"gradients";
//! let tag = aead.seal_in_place(Iv::new(&[1; 12])?, b"step 1", &mut data)?;
//! assert_ne!(&data, b"gradients");
//!
//! aead.open_in_place(Iv::new(&[1; 12])?, b"step 1", &mut data, &tag)?;
//! assert_eq!(&data, b"gradients");
//! # Ok::<(), ringseal::Error>(())
//! ```
//!
//! Sealing two messages with the same key and IV gives away both and lets anyone forge. Where the caller can't
//! rule that out, use a [`channel`](crate::channel), which derives its nonces.

use ctutils::CtEq;
use zeroize::{Zeroize, ZeroizeOnDrop};

use crate::backend::{Backend, CounterWidth, PreparedKey, Record};
use crate::{Error, Result};

/// Longest plaintext and ciphertext in bytes: 2^39 - 256 bits (NIST SP 800-38D, 5.2.1.1).
pub const MAX_PLAINTEXT_BYTES: u128 = (1 << 36) - 32;
/// Longest additional authenticated data in bytes: 2^64 - 1 bits, in whole bytes (NIST SP 800-38D, 5.2.1.1).
pub const MAX_AAD_BYTES: u128 = (1 << 61) - 1;
/// Longest IV in bytes: 2^64 - 1 bits, in whole bytes (NIST SP 800-38D, 5.2.1.1).
pub const MAX_IV_BYTES: u128 = (1 << 61) - 1;
/// Bytes of a tag. Shorter ones (SP 800-38D, 5.2.1.2) are not offered: each forgery attempt would succeed more often.
pub const TAG_BYTES: usize = 16;

/// A 128-bit authentication tag.
pub type Tag = [u8; TAG_BYTES];

/// An AES key of 16, 24 or 32 bytes. Zeroized on drop, never printed.
#[derive(Clone, ZeroizeOnDrop)]
pub enum AesKey {
    /// AES-128.
    Aes128([u8; 16]),
    /// AES-192.
    Aes192([u8; 24]),
    /// AES-256.
    Aes256([u8; 32]),
}

impl AesKey {
    /// Takes a key of 16, 24 or 32 bytes; the length chooses AES-128, AES-192 or AES-256 (FIPS 197, 5).
    ///
    /// # Errors
    /// [`Error::Length`] for any other length.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        match bytes.len() {
            16 => Ok(Self::Aes128(copied(bytes))),
            24 => Ok(Self::Aes192(copied(bytes))),
            32 => Ok(Self::Aes256(copied(bytes))),
            got => Err(Error::Length {
                what: "AES key",
                got: got as u128,
                limit: "a key has 16, 24 or 32 bytes (FIPS 197, 5)",
            }),
        }
    }

    /// The key's bytes. Don't print, store or copy them without zeroizing the copy.
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Aes128(bytes) => bytes,
            Self::Aes192(bytes) => bytes,
            Self::Aes256(bytes) => bytes,
        }
    }

    /// Key length in bits: 128, 192 or 256.
    pub fn bits(&self) -> usize {
        8 * self.as_bytes().len()
    }
}

impl std::fmt::Debug for AesKey {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Aes128(_) => "AesKey::Aes128(..)",
            Self::Aes192(_) => "AesKey::Aes192(..)",
            Self::Aes256(_) => "AesKey::Aes256(..)",
        })
    }
}

/// An initialization vector of at least one byte (NIST SP 800-38D, 5.2.1.1); 12 bytes is the common form.
#[derive(Clone, Copy, Debug)]
pub struct Iv<'a>(pub(crate) &'a [u8]);

impl<'a> Iv<'a> {
    /// Takes an IV of 1 to [`MAX_IV_BYTES`] bytes.
    ///
    /// # Errors
    /// [`Error::Length`] when it is empty or too long.
    pub fn new(bytes: &'a [u8]) -> Result<Self> {
        check_iv_len(bytes.len() as u128)?;
        Ok(Self(bytes))
    }

    /// Takes the common 96-bit form, which needs no check.
    pub const fn from_nonce(nonce: &'a [u8; 12]) -> Self {
        Self(nonce)
    }

    /// The IV's bytes.
    pub const fn as_bytes(self) -> &'a [u8] {
        self.0
    }
}

/// Parses a tag of exactly [`TAG_BYTES`] bytes.
///
/// # Errors
/// [`Error::Length`] for any other length: a cut tag is refused and never compared on its first bytes only.
pub fn tag_from_bytes(bytes: &[u8]) -> Result<Tag> {
    bytes.try_into().map_err(|_| Error::Length {
        what: "tag",
        got: bytes.len() as u128,
        limit: "a tag has exactly 16 bytes; short tags are refused",
    })
}

/// Compares two tags in a time that does not depend on their contents.
#[must_use]
pub fn tags_equal(left: &Tag, right: &Tag) -> bool {
    left.ct_eq(right).into()
}

/// Checks a plaintext's (or ciphertext's) length in bytes against [`MAX_PLAINTEXT_BYTES`], from the length alone.
///
/// # Errors
/// [`Error::Length`] when it is too long.
pub fn check_plaintext_len(bytes: u128) -> Result<()> {
    if bytes <= MAX_PLAINTEXT_BYTES {
        return Ok(());
    }
    Err(Error::Length {
        what: "plaintext",
        got: bytes,
        limit: "a message has at most 2^36 - 32 bytes (NIST SP 800-38D, 5.2.1.1)",
    })
}

/// Checks the length in bytes of additional authenticated data against [`MAX_AAD_BYTES`], from the length alone.
///
/// # Errors
/// [`Error::Length`] when they are too long.
pub fn check_aad_len(bytes: u128) -> Result<()> {
    if bytes <= MAX_AAD_BYTES {
        return Ok(());
    }
    Err(Error::Length {
        what: "additional authenticated data",
        got: bytes,
        limit: "they have at most 2^61 - 1 bytes (NIST SP 800-38D, 5.2.1.1)",
    })
}

/// Checks an IV's length in bytes, 1 to [`MAX_IV_BYTES`], from the length alone.
///
/// # Errors
/// [`Error::Length`] when it is empty or too long.
pub fn check_iv_len(bytes: u128) -> Result<()> {
    if (1..=MAX_IV_BYTES).contains(&bytes) {
        return Ok(());
    }
    Err(Error::Length {
        what: "IV",
        got: bytes,
        limit: "an IV has 1 to 2^61 - 1 bytes (NIST SP 800-38D, 5.2.1.1)",
    })
}

/// Refuses an output that overlaps its input without being the same bytes; addresses and length in bytes.
///
/// In place (same address) and disjoint are both right. In between, a block would be overwritten before it is read.
/// For host and device addresses alike.
///
/// # Errors
/// [`Error::InvalidArgument`] when the ranges overlap in part.
pub fn check_overlap(input: u64, output: u64, bytes: u64) -> Result<()> {
    let distance = input.abs_diff(output);
    if distance == 0 || distance >= bytes {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!(
        "the output overlaps the input {distance} bytes apart over {bytes} bytes; pass the same address or disjoint ranges"
    )))
}

/// AES-GCM under one key on one backend. The expanded key is zeroized on drop.
pub struct Aead {
    backend: &'static str,
    key: Box<dyn PreparedKey>,
}

impl Aead {
    /// Expands `key` on `backend`, once for any number of messages.
    ///
    /// # Errors
    /// Whatever the backend reports, such as [`Error::NoDevice`].
    pub fn new(backend: &dyn Backend, key: &AesKey) -> Result<Self> {
        Ok(Self { backend: backend.name(), key: backend.prepare(key)? })
    }

    /// Name of the backend that this key was expanded on.
    pub fn backend_name(&self) -> &'static str {
        self.backend
    }

    /// Encrypts `data` where it lies and returns the tag (NIST SP 800-38D, 7.1).
    ///
    /// # Errors
    /// [`Error::Length`] before a byte is written; whatever the backend reports, after which `data` is zeros.
    pub fn seal_in_place(&self, iv: Iv<'_>, aad: &[u8], data: &mut [u8]) -> Result<Tag> {
        check_lengths(aad, data)?;
        self.key.seal_in_place(iv, aad, data).inspect_err(|_| data.zeroize())
    }

    /// Verifies and decrypts `data` where it lies (NIST SP 800-38D, 7.2).
    ///
    /// # Errors
    /// [`Error::Length`] before a byte is written; [`Error::Authentication`] or whatever the backend reports, after
    /// which `data` is zeros and never plaintext.
    pub fn open_in_place(&self, iv: Iv<'_>, aad: &[u8], data: &mut [u8], tag: &Tag) -> Result<()> {
        check_lengths(aad, data)?;
        self.key.open_in_place(iv, aad, data, tag).inspect_err(|_| data.zeroize())
    }

    /// Encrypts `plaintext` into `ciphertext`, of the same length, and returns the tag.
    ///
    /// # Errors
    /// [`Error::Length`] and [`Error::InvalidArgument`] (unequal lengths) before a byte is written; whatever the
    /// backend reports, after which `ciphertext` is zeros.
    pub fn seal(&self, iv: Iv<'_>, aad: &[u8], plaintext: &[u8], ciphertext: &mut [u8]) -> Result<Tag> {
        check_lengths(aad, plaintext)?;
        check_same_len(plaintext, ciphertext)?;
        ciphertext.copy_from_slice(plaintext);
        self.seal_in_place(iv, aad, ciphertext)
    }

    /// Verifies `ciphertext` and decrypts it into `plaintext`, of the same length.
    ///
    /// # Errors
    /// [`Error::Length`] and [`Error::InvalidArgument`] (unequal lengths) before a byte is written;
    /// [`Error::Authentication`] or whatever the backend reports, after which `plaintext` is zeros.
    pub fn open(
        &self,
        iv: Iv<'_>,
        aad: &[u8],
        ciphertext: &[u8],
        plaintext: &mut [u8],
        tag: &Tag,
    ) -> Result<()> {
        check_lengths(aad, ciphertext)?;
        check_same_len(ciphertext, plaintext)?;
        // Copied before it is verified, so that the bytes verified are the bytes decrypted even if the caller's
        // ciphertext lies in memory that somebody else can write.
        plaintext.copy_from_slice(ciphertext);
        self.open_in_place(iv, aad, plaintext, tag)
    }

    /// [`Self::seal`] on addresses that may be the same, as a C caller passes them.
    ///
    /// # Errors
    /// As [`Self::seal`]; [`Error::InvalidArgument`] before a byte is written when the ranges overlap in part.
    ///
    /// # Safety
    /// `plaintext` is valid for reads and `ciphertext` for writes of `bytes` bytes, and nothing else accesses them
    /// during the call. With `bytes` 0 both may be null.
    pub unsafe fn seal_raw(
        &self,
        iv: Iv<'_>,
        aad: &[u8],
        plaintext: *const u8,
        ciphertext: *mut u8,
        bytes: usize,
    ) -> Result<Tag> {
        check_aad_len(aad.len() as u128)?;
        // SAFETY: the caller's contract is that of `gather`.
        let data = unsafe { gather(plaintext, ciphertext, bytes)? };
        self.seal_in_place(iv, aad, data)
    }

    /// [`Self::open`] on addresses that may be the same, as a C caller passes them.
    ///
    /// # Errors
    /// As [`Self::open`]; [`Error::InvalidArgument`] before a byte is written when the ranges overlap in part.
    ///
    /// # Safety
    /// `ciphertext` is valid for reads and `plaintext` for writes of `bytes` bytes, and nothing else writes to them
    /// or reads `plaintext` during the call. With `bytes` 0 both may be null.
    pub unsafe fn open_raw(
        &self,
        iv: Iv<'_>,
        aad: &[u8],
        ciphertext: *const u8,
        plaintext: *mut u8,
        bytes: usize,
        tag: &Tag,
    ) -> Result<()> {
        check_aad_len(aad.len() as u128)?;
        // SAFETY: the caller's contract is that of `gather`.
        let data = unsafe { gather(ciphertext, plaintext, bytes)? };
        self.open_in_place(iv, aad, data, tag)
    }

    /// GMAC: the tag of `aad` alone (NIST SP 800-38D, 3).
    ///
    /// # Errors
    /// [`Error::Length`]; whatever the backend reports.
    pub fn gmac(&self, iv: Iv<'_>, aad: &[u8]) -> Result<Tag> {
        self.seal_in_place(iv, aad, &mut [])
    }

    /// Verifies a [`Self::gmac`] tag.
    ///
    /// # Errors
    /// [`Error::Authentication`]; [`Error::Length`]; whatever the backend reports.
    pub fn verify_gmac(&self, iv: Iv<'_>, aad: &[u8], tag: &Tag) -> Result<()> {
        self.open_in_place(iv, aad, &mut [], tag)
    }

    /// Seals many messages where they lie, in one launch where the backend can; a tag for each, in order.
    ///
    /// # Errors
    /// [`Error::Length`] before a byte of any message is written; whatever the backend reports, after which every
    /// message is zeros.
    pub fn seal_records(&self, records: &mut [Record<'_>]) -> Result<Vec<Tag>> {
        records.iter().try_for_each(|record| check_lengths(record.aad, record.data))?;
        self.key.seal_records(records).inspect_err(|_| zero_records(records))
    }

    /// Opens many messages where they lie; a verdict for each, in order. The data of one that did not verify are
    /// zeros.
    ///
    /// # Errors
    /// [`Error::Length`] and [`Error::InvalidArgument`] (unequal numbers of records and tags) before a byte of any
    /// message is written; whatever the backend reports, after which every message is zeros.
    pub fn open_records(&self, records: &mut [Record<'_>], tags: &[Tag]) -> Result<Vec<bool>> {
        records.iter().try_for_each(|record| check_lengths(record.aad, record.data))?;
        if records.len() != tags.len() {
            return Err(Error::InvalidArgument(format!("{} records but {} tags", records.len(), tags.len())));
        }
        self.key.open_records(records, tags).inspect_err(|_| zero_records(records))
    }

    /// XORs the AES-CTR keystream that starts at `counter_block` into `data`, in place. It hides and protects
    /// nothing against change; GCM is [`Self::seal_in_place`].
    ///
    /// # Errors
    /// [`Error::Length`] when a counter would repeat; whatever the backend reports, after which `data` is zeros.
    pub fn ctr_xor(&self, counter_block: [u8; 16], width: CounterWidth, data: &mut [u8]) -> Result<()> {
        check_keystream_len(width, data.len() as u128)?;
        self.key.ctr_xor(counter_block, width, data).inspect_err(|_| data.zeroize())
    }
}

impl std::fmt::Debug for Aead {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Aead").field("backend", &self.backend).finish_non_exhaustive()
    }
}

fn check_lengths(aad: &[u8], data: &[u8]) -> Result<()> {
    check_plaintext_len(data.len() as u128)?;
    check_aad_len(aad.len() as u128)
}

fn check_same_len(input: &[u8], output: &[u8]) -> Result<()> {
    if input.len() == output.len() {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!(
        "the input has {} bytes but the output {}",
        input.len(),
        output.len()
    )))
}

/// A counter of 32 bits gives 2^32 blocks before it repeats; one of 128 bits outlasts any memory.
pub(crate) fn check_keystream_len(width: CounterWidth, bytes: u128) -> Result<()> {
    match width {
        CounterWidth::Gcm32 if bytes > 16 << 32 => Err(Error::Length {
            what: "keystream",
            got: bytes,
            limit: "a 32-bit counter gives at most 2^36 bytes (NIST SP 800-38A, appendix B)",
        }),
        CounterWidth::Gcm32 | CounterWidth::Full128 => Ok(()),
    }
}

fn zero_records(records: &mut [Record<'_>]) {
    records.iter_mut().for_each(|record| record.data.zeroize());
}

fn copied<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(bytes);
    array
}

/// Checks limits and overlap, then brings the input to the output's place.
///
/// # Safety
/// `input` is valid for reads and `output` for writes of `bytes` bytes, for `'a`, with no other access; both may be
/// null when `bytes` is 0.
unsafe fn gather<'a>(input: *const u8, output: *mut u8, bytes: usize) -> Result<&'a mut [u8]> {
    check_plaintext_len(bytes as u128)?;
    check_overlap(input.addr() as u64, output.addr() as u64, bytes as u64)?;
    if bytes == 0 {
        return Ok(&mut []);
    }
    if !std::ptr::eq(input, output) {
        // SAFETY: both are valid for `bytes` by the caller's contract; `check_overlap` showed them disjoint.
        unsafe { std::ptr::copy_nonoverlapping(input, output, bytes) };
    }
    // SAFETY: valid for writes by the caller's contract, initialized by the copy (or, in place, by the caller who
    // promised that it can be read), and not accessed otherwise.
    Ok(unsafe { std::slice::from_raw_parts_mut(output, bytes) })
}
