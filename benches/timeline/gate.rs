//! Holds streams back until their work is queued, so that what is measured is not how fast the host queues it.

use std::sync::atomic::Ordering;

use cudarc::driver::sys;
use ringseal::Result;
use ringseal::cuda::{Device, HostBuffer, Stream};

use crate::cublas::check;

/// A word of pinned memory that streams of any device wait for.
pub(crate) struct Gate(HostBuffer);

/// A gate that is closed; opens when dropped, so that no error leaves streams waiting.
pub(crate) struct Closed<'a>(&'a Gate);

impl Gate {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        Ok(Self(HostBuffer::new(device, 4)?))
    }

    /// No stream may be waiting at the gate.
    pub(crate) fn close(&self) -> Closed<'_> {
        self.0.words()[0].store(0, Ordering::SeqCst);
        Closed(self)
    }
}

impl Closed<'_> {
    /// Makes the stream's further work wait until the gate is open. The stream's context is the thread's.
    pub(crate) fn hold(&self, stream: &Stream) -> Result<()> {
        let equal = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_EQ as u32;
        // SAFETY: the stream is alive; the word lives longer than the stream waits, as nobody drops a closed gate.
        check("cuStreamWaitValue32", unsafe {
            sys::cuStreamWaitValue32_v2(stream.handle(), self.0.0.pointer(), 1, equal)
        })
    }

    /// Lets the streams go on, also those that come to the gate later.
    pub(crate) fn open(&self) {
        self.0.0.words()[0].store(1, Ordering::SeqCst);
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.open();
    }
}
