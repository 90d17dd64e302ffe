//! AES-GCM on device memory, a message at a time, in the order of the caller's streams.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use ringseal_kernels::message::Message;

use super::cipher::Kernels;
use super::gcm::{GcmKey, MessageWorkspace};
use super::stream::{Event, Stream};
use crate::aead::{AesKey, Iv};
use crate::backend::le_words;
use crate::{Error, Result};

/// Text of a message in device memory, and the additional data that its tag covers too.
#[derive(Clone, Copy, Debug)]
pub struct DeviceText {
    /// Address of the text that comes in. Fast where it and `output` are multiples of 16.
    pub input: u64,
    /// Address of the text that goes out: `input`, or apart from it.
    pub output: u64,
    /// Bytes of text.
    pub bytes: u64,
    /// Address of the additional data.
    pub aad: u64,
    /// Bytes of additional data.
    pub aad_bytes: u64,
}

/// An AES key on one GPU that seals and opens messages in device memory, each by the whole GPU. Any number of threads may
/// use one at once, on any streams: its launches wait for each other on the GPU. Zeroized on drop, never printed.
pub struct DeviceAead {
    key: GcmKey,
    launches: Mutex<Launches>,
}

/// What one launch at a time may use.
struct Launches {
    workspace: MessageWorkspace,
    /// The end of the latest one.
    latest: Event,
}

impl DeviceAead {
    /// Expands `key` on the GPU that has `kernels`, and waits for that.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when there are no GCM kernels for the device, otherwise [`Error::Cuda`].
    pub fn new(kernels: &Kernels, key: &AesKey) -> Result<Self> {
        let stream = Stream::new(kernels.device())?;
        // Ready when the key is, which waits for the stream.
        let workspace = MessageWorkspace::new(&stream)?;
        let key = GcmKey::new(kernels, key, &stream)?;
        let latest = Event::untimed(kernels.device())?;
        Ok(Self { key, launches: Mutex::new(Launches { workspace, latest }) })
    }

    /// Queues the sealing of a message (NIST SP 800-38D, 7.1), whose tag's 16 bytes go to `tag`, a multiple of 4. Doesn't
    /// wait.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when addresses are misaligned or null, when input and output overlap in part, or when the
    /// stream is being captured: each launch of the graph would use the IV again. [`Error::Length`] past the standard's
    /// limits; [`Error::Cuda`] when the driver refuses. After the first two, nothing is queued.
    ///
    /// # Safety
    /// Text, additional data and tag are valid on the stream's device, which is that of the key, until the stream has passed
    /// the work, and nothing else writes them, or reads what is written, until then. So long the key lives.
    pub unsafe fn seal(&self, iv: Iv<'_>, text: DeviceText, tag: u64, stream: &Stream) -> Result<()> {
        check_word("the tag", tag)?;
        let message = self.message(iv, text, tag, 0);
        self.launch(stream, |workspace| {
            // SAFETY: the caller's promise; the launches before have ended with the workspace.
            unsafe { self.key.seal_message(&message, workspace, stream) }
        })
    }

    /// Queues the opening of a message (NIST SP 800-38D, 7.2) with the tag at `tag`, as [`DeviceAead::seal`] its sealing.
    ///
    /// In the order of the stream, the four bytes at `verdict`, a multiple of 4, become 0 at first, and in the end
    /// [`VERIFIED`](super::VERIFIED) or [`FORGED`](super::FORGED). The output has plaintext
    /// that is not verified while the stream is at the work; when it has passed it, the plaintext if the verdict is
    /// `VERIFIED`, otherwise zeros.
    ///
    /// # Errors
    /// As [`DeviceAead::seal`].
    ///
    /// # Safety
    /// As [`DeviceAead::seal`], also for the verdict.
    pub unsafe fn open(
        &self,
        iv: Iv<'_>,
        text: DeviceText,
        tag: u64,
        verdict: u64,
        stream: &Stream,
    ) -> Result<()> {
        check_word("the tag", tag)?;
        check_word("the verdict", verdict)?;
        let message = self.message(iv, text, tag, verdict);
        self.launch(stream, |workspace| {
            // SAFETY: the caller's promise; the launches before have ended with the workspace.
            unsafe {
                // A launch that never ran must not look like one that verified.
                stream.fill(verdict, 0, 4)?;
                self.key.open_message(&message, workspace, stream)
            }
        })
    }

    fn message(&self, iv: Iv<'_>, text: DeviceText, tag: u64, verdict: u64) -> Message {
        let DeviceText { input, output, bytes: length, aad, aad_bytes: aad_length } = text;
        let j0 = le_words(self.key.subkey().initial_counter(iv));
        Message { input, output, length, aad, aad_length, tag, verdict, j0 }
    }

    /// Queues `work` after the launches before it, whatever their streams.
    fn launch(&self, stream: &Stream, work: impl FnOnce(&MessageWorkspace) -> Result<()>) -> Result<()> {
        stream.refuse_capture(
            "the stream is being captured, and a graph would use the IV again each time it is launched",
        )?;
        let launches = self.launches.lock().unwrap_or_else(PoisonError::into_inner);
        stream.wait(&launches.latest)?;
        work(&launches.workspace)?;
        stream.mark(&launches.latest)
    }
}

/// Kernels read and write words there.
fn check_word(what: &str, address: u64) -> Result<()> {
    if address == 0 || !address.is_multiple_of(4) {
        return Err(Error::InvalidArgument(format!("{what}'s address is 0 or not a multiple of 4")));
    }
    Ok(())
}

impl fmt::Debug for DeviceAead {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "DeviceAead({:?})", self.key)
    }
}
