//! What the ranks of a group share.

use zeroize::ZeroizeOnDrop;

use crate::{Error, Result};

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
}
