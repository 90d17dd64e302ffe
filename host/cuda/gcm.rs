//! AES-GCM on device memory: batches of records, sealed or opened by one launch, and single messages, over which one launch
//! spreads the whole GPU.

use std::fmt;

use ringseal_kernels::aes::{RoundKeys, expand_key};
use ringseal_kernels::gcm::{self, RecordsParams, gcm_seal_records_128};
use ringseal_kernels::ghash::{GHASH_KEY_GRID, GhashKey, GhashKeyParams, ghash_key};
use ringseal_kernels::gmac::{gmac_make, gmac_verify};
use ringseal_kernels::message::{
    self, BYTES_MAX, DIGITS, Message, MessageParams, Powers, PowersParams, Workspace, gcm_seal_message_128,
    ghash_powers, plan,
};
use ringseal_kernels::portable;
use ringseal_kernels::sealed::SealedKey;
use zeroize::{Zeroize, Zeroizing};

use super::cipher::Kernels;
use super::memory::DeviceBuffer;
use super::module::{Kernel, Launch, Module};
use super::stream::Stream;
use crate::aead::{self, AesKey};
use crate::backend::gcm::{BlockCipher, HashSubkey, gmac_params, is_gmac};
use crate::backend::le_words;
use crate::{Error, Result};

/// What is said where the module has no GCM kernels.
pub(crate) fn no_gcm() -> Error {
    Error::Unsupported { backend: "cuda", what: "AES-GCM by this module, which lacks its kernels".into() }
}

/// The kernels of one module.
pub(super) struct GcmKernels {
    ghash_key: Kernel,
    ghash_powers: Kernel,
    /// Making and verifying; none in the portable module.
    gmac: Option<[Kernel; 2]>,
    aes128: Ciphers,
    aes192: Ciphers,
    aes256: Ciphers,
}

/// The kernels for one key length.
struct Ciphers {
    seal_records: Kernel,
    open_records: Kernel,
    seal_message: Kernel,
    open_message: Kernel,
}

impl GcmKernels {
    /// # Errors
    /// [`Error::Unsupported`] when the module has none.
    pub(super) fn new(module: &Module) -> Result<Self> {
        // Modules differ in what their kernels of the same names need.
        let gmac = match module.kernel("gmac_make", gmac_make::SHARED) {
            Ok(make) => Some([make, module.kernel("gmac_verify", gmac_verify::SHARED)?]),
            Err(Error::Unsupported { .. }) => None,
            Err(error) => return Err(error),
        };
        let (records_shared, message_shared) = match gmac {
            Some(_) => (gcm::RECORDS_SHARED, message::MESSAGE_SHARED),
            None => (portable::RECORDS_SHARED, portable::MESSAGE_SHARED),
        };
        let ciphers = |bits: usize| -> Result<Ciphers> {
            let kernel = |work, shared| module.kernel(&format!("gcm_{work}_{bits}"), shared);
            Ok(Ciphers {
                seal_records: kernel("seal_records", records_shared)?,
                open_records: kernel("open_records", records_shared)?,
                seal_message: kernel("seal_message", message_shared)?,
                open_message: kernel("open_message", message_shared)?,
            })
        };
        Ok(Self {
            ghash_key: module.kernel("ghash_key", ghash_key::SHARED)?,
            ghash_powers: module.kernel("ghash_powers", ghash_powers::SHARED)?,
            gmac,
            aes128: ciphers(128)?,
            aes192: ciphers(192)?,
            aes256: ciphers(256)?,
        })
    }
}

/// An AES key expanded for one device's GCM kernels: round keys here, powers of the hash subkey on the device. Zeroized
/// on drop on both sides, never printed.
pub struct GcmKey {
    round_keys: Zeroizing<RoundKeys>,
    /// For the masks of tags of messages without a text.
    cipher: BlockCipher,
    subkey: HashSubkey,
    ghash: DeviceBuffer,
    powers: DeviceBuffer,
    bits: usize,
    /// Last, so that the modules go when freeing the buffers has waited for the device.
    kernels: Kernels,
}

/// What launches on a message keep in device memory. One launch at a time may use it, so that each stream wants its own.
pub struct MessageWorkspace(DeviceBuffer);

impl MessageWorkspace {
    /// Made ready on `stream`, for launches on it.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn new(stream: &Stream) -> Result<Self> {
        // Sums of a message's parts stay there, unmasked: with the ciphertext they tell the hash subkey.
        let mut buffer = DeviceBuffer::secret(stream.device(), size_of::<Workspace>())?;
        buffer.fill(0, stream)?;
        Ok(Self(buffer))
    }
}

impl fmt::Debug for MessageWorkspace {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "MessageWorkspace({:?})", self.0.device())
    }
}

impl GcmKey {
    /// Expands `key` by a launch on `stream` and waits for it, so that any stream may use the result.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when there are no GCM kernels for the device, otherwise
    /// [`Error::Cuda`].
    pub fn new(kernels: &Kernels, key: &AesKey, stream: &Stream) -> Result<Self> {
        let gcm = kernels.gcm()?;
        let subkey = HashSubkey::new(key);
        let ghash = DeviceBuffer::secret(kernels.device(), size_of::<GhashKey>())?;
        let powers = DeviceBuffer::secret(kernels.device(), size_of::<Powers>())?;
        let h = Zeroizing::new(le_words(*subkey.block()));
        let launch = Launch { blocks: GHASH_KEY_GRID, threads: ghash_key::THREADS };
        let mut params = GhashKeyParams { h: *h, key: ghash.pointer() };
        // SAFETY: the parameters are those of the kernel; the buffer is a `GhashKey`'s and lives until the wait below.
        let launched = unsafe { gcm.ghash_key.launch(launch, stream, &params) };
        params.h.zeroize();
        launched?;
        let launch = Launch { blocks: DIGITS, threads: ghash_powers::THREADS };
        let mut params = PowersParams { h: *h, powers: powers.pointer() };
        // SAFETY: as above, for a `Powers`.
        let launched = unsafe { gcm.ghash_powers.launch(launch, stream, &params) };
        params.h.zeroize();
        launched?;
        stream.synchronize()?;
        let round_keys = Zeroizing::new(expand_key(key.as_bytes()));
        let cipher = BlockCipher::new(key);
        Ok(Self { kernels: kernels.clone(), round_keys, cipher, subkey, ghash, powers, bits: key.bits() })
    }

    /// The key as kernels take it, with a copy of secrets: to be zeroized.
    pub(super) fn sealed(&self) -> SealedKey {
        SealedKey { round_keys: *self.round_keys, ghash_key: self.ghash.pointer() }
    }

    /// Its length in bits.
    pub(super) fn bits(&self) -> usize {
        self.bits
    }

    /// The hash subkey, for the counter blocks of records.
    pub fn subkey(&self) -> &HashSubkey {
        &self.subkey
    }

    /// Queues the sealing of `count` records, whose descriptors
    /// ([`Record`](ringseal_kernels::gcm::Record)) lie in device memory at `records`. No records, no launch.
    ///
    /// # Errors
    /// [`Error::Cuda`] when the launch is refused.
    ///
    /// # Safety
    /// The descriptors, and all that they name, are aligned as they say and valid on the stream's device, which is that
    /// of the kernels, until the stream has passed the work; so is this key.
    pub unsafe fn seal_records(&self, records: u64, count: u32, stream: &Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_records(&self.ciphers()?.seal_records, records, count, stream) }
    }

    /// Queues the opening of `count` records, as [`GcmKey::seal_records`] their sealing. Their verdicts tell which
    /// verified; the text of the others is zeros.
    ///
    /// # Errors
    /// [`Error::Cuda`] when the launch is refused.
    ///
    /// # Safety
    /// As [`GcmKey::seal_records`].
    pub unsafe fn open_records(&self, records: u64, count: u32, stream: &Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_records(&self.ciphers()?.open_records, records, count, stream) }
    }

    /// Queues the sealing of one message by the whole GPU. Fastest where the text, or without one the additional data,
    /// begins at a multiple of 16.
    ///
    /// # Errors
    /// [`Error::Length`] past the standard's limits and [`BYTES_MAX`], [`Error::InvalidArgument`] when input and output
    /// overlap in part, [`Error::Cuda`] when the launch is refused.
    ///
    /// # Safety
    /// What `message` names is aligned as it says and valid on the stream's device, which is that of the kernels, until
    /// the stream has passed the work; so are this key and the workspace, which no other stream uses meanwhile.
    pub unsafe fn seal_message(
        &self,
        message: &Message,
        workspace: &MessageWorkspace,
        stream: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe {
            match &self.kernels.gcm()?.gmac {
                Some([make, _]) if is_gmac(message) => self.launch_gmac(make, message, workspace, stream),
                _ => self.launch_message(&self.ciphers()?.seal_message, message, workspace, stream),
            }
        }
    }

    /// Queues the opening of one message, as [`GcmKey::seal_message`] its sealing. The verdict tells whether it
    /// verified; the text of one that didn't is zeros.
    ///
    /// # Errors
    /// As [`GcmKey::seal_message`].
    ///
    /// # Safety
    /// As [`GcmKey::seal_message`].
    pub unsafe fn open_message(
        &self,
        message: &Message,
        workspace: &MessageWorkspace,
        stream: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe {
            match &self.kernels.gcm()?.gmac {
                Some([_, verify]) if is_gmac(message) => self.launch_gmac(verify, message, workspace, stream),
                _ => self.launch_message(&self.ciphers()?.open_message, message, workspace, stream),
            }
        }
    }

    fn ciphers(&self) -> Result<&Ciphers> {
        let kernels = self.kernels.gcm()?;
        Ok(match self.bits {
            128 => &kernels.aes128,
            192 => &kernels.aes192,
            _ => &kernels.aes256,
        })
    }

    unsafe fn launch_records(
        &self,
        kernel: &Kernel,
        records: u64,
        count: u32,
        stream: &Stream,
    ) -> Result<()> {
        let blocks = count.min(self.kernels.multiprocessors());
        let launch = Launch { blocks, threads: gcm_seal_records_128::THREADS };
        let mut params =
            RecordsParams { keys: *self.round_keys, ghash_key: self.ghash.pointer(), records, count };
        // SAFETY: the parameters are those of the kernels on records; the caller promises the addresses.
        let launched = unsafe { kernel.launch(launch, stream, &params) };
        params.keys.zeroize();
        launched
    }

    unsafe fn launch_message(
        &self,
        kernel: &Kernel,
        message: &Message,
        workspace: &MessageWorkspace,
        stream: &Stream,
    ) -> Result<()> {
        aead::check_plaintext_len(message.length.into())?;
        check_message_len(message.length, message.aad_length)?;
        aead::check_overlap(message.input, message.output, message.length)?;
        let plan = plan(message.length, message.aad_length, self.kernels.multiprocessors());
        let launch = Launch { blocks: plan.blocks, threads: gcm_seal_message_128::THREADS };
        let mut params = MessageParams {
            keys: *self.round_keys,
            ghash_key: self.ghash.pointer(),
            powers: self.powers.pointer(),
            workspace: workspace.0.pointer(),
            share: plan.share,
            message: *message,
        };
        // SAFETY: the parameters are those of the kernels on a message; the caller promises the addresses.
        let launched = unsafe { kernel.launch(launch, stream, &params) };
        params.keys.zeroize();
        launched
    }

    unsafe fn launch_gmac(
        &self,
        kernel: &Kernel,
        message: &Message,
        workspace: &MessageWorkspace,
        stream: &Stream,
    ) -> Result<()> {
        check_message_len(0, message.aad_length)?;
        let plan = plan(0, message.aad_length, self.kernels.multiprocessors());
        let launch = Launch { blocks: plan.blocks, threads: gmac_make::THREADS };
        let addresses = [self.ghash.pointer(), self.powers.pointer(), workspace.0.pointer()];
        let mut params = gmac_params(message, plan, &self.cipher, addresses);
        // SAFETY: the parameters are those of the kernels for GMAC; the caller promises the addresses.
        let launched = unsafe { kernel.launch(launch, stream, &params) };
        params.mask.zeroize();
        launched
    }
}

/// No GPU has as much memory, but then nothing is known of what `aad_length` says.
///
/// # Errors
/// [`Error::Length`] for more than [`BYTES_MAX`].
fn check_message_len(text: u64, aad: u64) -> Result<()> {
    let bytes = u128::from(text) + u128::from(aad);
    if bytes <= BYTES_MAX.into() {
        return Ok(());
    }
    Err(Error::Length {
        what: "text and additional authenticated data",
        got: bytes,
        limit: "the kernels take at most 2^47 bytes",
    })
}

impl fmt::Debug for GcmKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "GcmKey(AES-{} on {:?})", self.bits, self.kernels.device())
    }
}
