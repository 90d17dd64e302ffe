//! What the ranks of a group share.

use hkdf::Hkdf;
use sha2::Sha256;
use zeroize::ZeroizeOnDrop;

use crate::{Error, Result};

/// Separates the secrets of parts from what else is derived.
const PART_LABEL: &[u8] = b"ringseal 1 part";

/// The 32 bytes that make a rank a member of its group, from attestation or another trusted channel. Whoever holds
/// them can speak as any rank. Zeroized on drop, never printed.
#[derive(Clone, ZeroizeOnDrop)]
pub struct GroupSecret([u8; 32]);

impl GroupSecret {
    /// Takes 32 uniformly random bytes.
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// A fresh secret from the operating system, for a group whose ranks are all made by this process.
    ///
    /// # Errors
    /// [`Error::Randomness`] when the system gives none.
    pub fn random() -> Result<Self> {
        let mut secret = Self([0; 32]);
        fill_random(&mut secret.0)?;
        Ok(secret)
    }

    /// The secret of a group that is a part of this secret's group: `numbers` say which, and no two have the same. Ranks of
    /// different parts, or of a part and the whole, can't be taken for members of one group (HKDF of RFC 5869 with the secret
    /// as its pseudorandom key, section 3.3).
    pub(crate) fn of_part(&self, numbers: [u64; 4]) -> Self {
        let info: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let mut part = Self([0; 32]);
        let hkdf = Hkdf::<Sha256>::from_prk(&self.0);
        // Both lengths are the hash's, which it takes.
        let expanded =
            hkdf.ok().map(|hkdf| hkdf.expand_multi_info(&[PART_LABEL, &info], &mut part.0).is_ok());
        assert!(expanded == Some(true), "32 bytes are a key of HKDF-SHA-256 and may be asked of it");
        part
    }

    pub(super) const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl std::fmt::Debug for GroupSecret {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("GroupSecret(..)")
    }
}

/// Fills `bytes` from the operating system's generator.
pub(super) fn fill_random(bytes: &mut [u8]) -> Result<()> {
    getrandom::fill(bytes).map_err(|error| Error::Randomness(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_not_printed_and_not_repeated() {
        let secret = GroupSecret::from_bytes([0xab; 32]);
        let text = format!("{secret:?}").to_lowercase();
        assert!(!text.contains("ab") && !text.contains("171"), "{text}");
        assert_ne!(GroupSecret::random().unwrap().0, GroupSecret::random().unwrap().0);
    }

    #[test]
    fn parts_have_secrets_of_their_own() {
        let secret = GroupSecret::from_bytes([0xab; 32]);
        let part = |numbers| secret.of_part(numbers).0;
        assert_eq!(part([0, 1, 2, 3]), part([0, 1, 2, 3]));
        let all = [part([0, 1, 2, 3]), part([1, 1, 2, 3]), part([0, 1, 3, 2]), secret.0];
        for (at, one) in all.iter().enumerate() {
            assert!(all[..at].iter().all(|other| other != one));
        }
        assert_ne!(part([0; 4]), GroupSecret::from_bytes([0xac; 32]).of_part([0; 4]).0);
    }
}
