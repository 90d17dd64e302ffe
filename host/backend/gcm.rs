//! What GCM derives from a key on the host: the hash subkey, and from it a message's first counter block. Backends
//! need it, and so does whoever launches the PTX kernels on their own.

use aes::cipher::{BlockCipherEncrypt, KeyInit};
use ghash::GHash;
use ghash::universal_hash::UniversalHash;
use ringseal_kernels::gmac::GmacParams;
use ringseal_kernels::message::{Message, Plan};
use zeroize::Zeroizing;

use super::le_words;
use crate::aead::{AesKey, Iv};

/// The hash subkey H and the GHASH prepared from it. Zeroized on drop.
pub struct HashSubkey {
    block: Zeroizing<[u8; 16]>,
    hash: GHash,
}

impl HashSubkey {
    /// H = E_K(0) (NIST SP 800-38D, 6.4 and 7.1 step 1).
    pub fn new(key: &AesKey) -> Self {
        match key {
            AesKey::Aes128(bytes) => Self::with_cipher(&aes::Aes128::new(bytes.into())),
            AesKey::Aes192(bytes) => Self::with_cipher(&aes::Aes192::new(bytes.into())),
            AesKey::Aes256(bytes) => Self::with_cipher(&aes::Aes256::new(bytes.into())),
        }
    }

    /// As [`Self::new`], from an already expanded key.
    pub(crate) fn with_cipher<C>(cipher: &C) -> Self
    where
        C: BlockCipherEncrypt<BlockSize = aes::cipher::consts::U16>,
    {
        let mut block = Zeroizing::new([0; 16]);
        cipher.encrypt_block((&mut *block).into());
        let hash = GHash::new((&*block).into());
        Self { block, hash }
    }

    /// H itself, as a byte string.
    pub fn block(&self) -> &[u8; 16] {
        &self.block
    }

    /// A GHASH under H, with nothing hashed yet.
    pub(crate) fn hash(&self) -> GHash {
        self.hash.clone()
    }

    /// The pre-counter block J0 for an IV of any length (NIST SP 800-38D, 7.1 step 2).
    pub fn initial_counter(&self, iv: Iv<'_>) -> [u8; 16] {
        let mut block = [0; 16];
        if let Ok(nonce) = <[u8; 12]>::try_from(iv.as_bytes()) {
            block[..12].copy_from_slice(&nonce);
            block[15] = 1;
            return block;
        }
        let mut hash = self.hash();
        hash.update_padded(iv.as_bytes());
        block[8..].copy_from_slice(&bit_len(iv.as_bytes()).to_be_bytes());
        hash.update(&[block.into()]);
        hash.finalize().into()
    }
}

impl std::fmt::Debug for HashSubkey {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("HashSubkey(..)")
    }
}

/// AES of single blocks on the host: what masks the tags of kernels that have no AES of their own. Zeroized on drop.
pub(crate) enum BlockCipher {
    Aes128(Box<aes::Aes128>),
    Aes192(Box<aes::Aes192>),
    Aes256(Box<aes::Aes256>),
}

impl BlockCipher {
    pub(crate) fn new(key: &AesKey) -> Self {
        match key {
            AesKey::Aes128(bytes) => Self::Aes128(Box::new(aes::Aes128::new(bytes.into()))),
            AesKey::Aes192(bytes) => Self::Aes192(Box::new(aes::Aes192::new(bytes.into()))),
            AesKey::Aes256(bytes) => Self::Aes256(Box::new(aes::Aes256::new(bytes.into()))),
        }
    }

    /// The cipher of a block.
    pub(crate) fn encrypt(&self, mut block: [u8; 16]) -> [u8; 16] {
        match self {
            Self::Aes128(cipher) => cipher.encrypt_block((&mut block).into()),
            Self::Aes192(cipher) => cipher.encrypt_block((&mut block).into()),
            Self::Aes256(cipher) => cipher.encrypt_block((&mut block).into()),
        }
        block
    }
}

/// Whether the kernels for GMAC take a message: additional data only, at a multiple of 16.
pub(crate) fn is_gmac(message: &Message) -> bool {
    message.length == 0 && message.aad_length > 0 && message.aad.is_multiple_of(16)
}

/// What the kernels for GMAC take, for a message that [`is_gmac`]; `addresses` are those of the powers of H in both forms
/// and of the workspace. The mask is secret.
pub(crate) fn gmac_params(
    message: &Message,
    plan: Plan,
    cipher: &BlockCipher,
    [ghash_key, powers, workspace]: [u64; 3],
) -> GmacParams {
    let j0: [u8; 16] = bytemuck::cast(message.j0.map(u32::to_le));
    GmacParams {
        ghash_key,
        powers,
        workspace,
        share: plan.share,
        data: message.aad,
        length: message.aad_length,
        tag: message.tag,
        verdict: message.verdict,
        mask: le_words(cipher.encrypt(j0)),
    }
}

/// Length in bits. Can't overflow: `aead` admits at most 2^61 - 1 bytes.
pub(crate) fn bit_len(bytes: &[u8]) -> u64 {
    bytes.len() as u64 * 8
}
