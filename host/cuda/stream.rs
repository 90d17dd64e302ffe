//! Order and time: streams, events, graphs.

use std::fmt;
use std::time::Duration;

use cudarc::driver::sys;

use super::device::Device;
use super::driver::check;
use crate::{Error, Result};

/// A queue of work on a device. Its work runs in order, beside the work of other streams.
pub struct Stream {
    device: Device,
    handle: sys::CUstream,
    owned: bool,
}

// SAFETY: stream handles may be used from any thread; the driver locks inside.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// Makes a stream that doesn't wait for the device's default stream.
    pub fn new(device: &Device) -> Result<Self> {
        let _current = device.bind()?;
        let mut handle = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a context is current; the pointer is valid for the write.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut handle, flags) })?;
        Ok(Self { device: device.clone(), handle, owned: true })
    }

    /// As [`new`](Self::new), with the lowest priority: of blocks that wait for a multiprocessor, other streams' go first.
    pub(super) fn low_priority(device: &Device) -> Result<Self> {
        let _current = device.bind()?;
        let (mut lowest, mut highest) = (0, 0);
        // SAFETY: a context is current; the pointers are valid for the writes.
        check("cuCtxGetStreamPriorityRange", unsafe {
            sys::cuCtxGetStreamPriorityRange(&mut lowest, &mut highest)
        })?;
        let mut handle = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: as above.
        check("cuStreamCreateWithPriority", unsafe {
            sys::cuStreamCreateWithPriority(&mut handle, flags, lowest)
        })?;
        Ok(Self { device: device.clone(), handle, owned: true })
    }

    /// Uses another library's stream, such as PyTorch's current one; it stays that library's to destroy. Null is the
    /// default stream.
    ///
    /// # Safety
    /// `handle` is a stream of `device`'s primary context and outlives the returned value.
    pub unsafe fn borrowed(device: &Device, handle: sys::CUstream) -> Self {
        Self { device: device.clone(), handle, owned: false }
    }

    /// The device that runs it.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The driver's handle.
    pub fn handle(&self) -> sys::CUstream {
        self.handle
    }

    /// Waits until all its work so far is done.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda), also for faults of earlier kernels on this device.
    pub fn synchronize(&self) -> Result<()> {
        let _current = self.device.bind()?;
        // SAFETY: the stream is alive.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.handle) })
    }

    /// Copies between any two of: device memory, a peer's memory, host memory. Doesn't wait, unless the host memory is
    /// not pinned.
    ///
    /// # Safety
    /// Both ranges are valid for the copy until the stream has passed it, and nothing else writes either, or reads the
    /// destination, until then.
    pub unsafe fn copy(&self, destination: u64, source: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _current = self.device.bind()?;
        // SAFETY: the caller's promise; the driver tells the kinds of memory apart by address.
        check("cuMemcpyAsync", unsafe { sys::cuMemcpyAsync(destination, source, bytes, self.handle) })
    }

    /// Sets `bytes` bytes of device memory to `value`, in stream order.
    ///
    /// # Safety
    /// As for the destination of [`copy`](Self::copy).
    pub unsafe fn fill(&self, destination: u64, value: u8, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _current = self.device.bind()?;
        // SAFETY: the caller's promise.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(destination, value, bytes, self.handle) })
    }

    /// Marks this point of the stream.
    pub fn record(&self) -> Result<Event> {
        let event = Event::new(&self.device)?;
        // SAFETY: both handles are alive and of one context.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.handle, self.handle) })?;
        Ok(event)
    }

    /// Marks this point of the stream by an event that exists already, in place of what it marked before.
    pub(super) fn mark(&self, event: &Event) -> Result<()> {
        let _current = self.device.bind()?;
        // SAFETY: both handles are alive.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.handle, self.handle) })
    }

    /// Whether what is put on it is recorded for a [`Graph`] instead of run.
    pub(super) fn is_capturing(&self) -> Result<bool> {
        let _current = self.device.bind()?;
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is alive; the pointer is valid for the write.
        check("cuStreamIsCapturing", unsafe { sys::cuStreamIsCapturing(self.handle, &mut status) })?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// [`Error::InvalidArgument`] with this message where it is being captured.
    pub(super) fn refuse_capture(&self, message: &str) -> Result<()> {
        match self.is_capturing()? {
            true => Err(Error::InvalidArgument(message.into())),
            false => Ok(()),
        }
    }

    /// Makes the work that follows wait for `event`, which may be of another device's stream.
    pub fn wait(&self, event: &Event) -> Result<()> {
        let _current = self.device.bind()?;
        // SAFETY: both handles are alive.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.handle, event.handle, 0) })
    }

    /// Records what `work` puts on this stream, without running it, as a [`Graph`] that replays it with one launch.
    ///
    /// # Errors
    /// Whatever `work` returns; [`Error::Cuda`](crate::Error::Cuda) when it does what cannot be recorded (allocating,
    /// waiting). No work is left on the stream then.
    pub fn capture(&self, work: impl FnOnce(&Self) -> Result<()>) -> Result<Graph> {
        let _current = self.device.bind()?;
        // Thread-local: another thread, or another library, may go on allocating meanwhile.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(self.handle, mode) })?;
        let outcome = work(self);
        let mut graph = std::ptr::null_mut();
        // SAFETY: ends what was begun above, on the same thread; the pointer is valid for the write.
        let ended = unsafe { sys::cuStreamEndCapture(self.handle, &mut graph) };
        let instantiated = outcome.and_then(|()| check("cuStreamEndCapture", ended)).and_then(|()| {
            let mut executable = std::ptr::null_mut();
            // SAFETY: `graph` is valid, as the capture ended well.
            check("cuGraphInstantiate", unsafe {
                sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0)
            })?;
            Ok(Graph { device: self.device.clone(), handle: executable })
        });
        if !graph.is_null() {
            // SAFETY: made by the capture; an executable graph doesn't need it any more.
            let _ = unsafe { sys::cuGraphDestroy(graph) };
        }
        instantiated
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned
            && let Ok(_current) = self.device.bind()
        {
            // SAFETY: made by `new`; the driver lets queued work finish.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.handle) };
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Stream({:?}, {:?})", self.device, self.handle)
    }
}

/// A point in a stream.
pub struct Event {
    device: Device,
    handle: sys::CUevent,
}

// SAFETY: event handles may be used from any thread; the driver locks inside.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    fn new(device: &Device) -> Result<Self> {
        Self::with(device, sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    /// An event that only orders work and takes no time, which makes it cheaper. Marks nothing yet: nobody waits for it.
    pub(super) fn untimed(device: &Device) -> Result<Self> {
        Self::with(device, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    fn with(device: &Device, flags: sys::CUevent_flags) -> Result<Self> {
        let _current = device.bind()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a context is current; the pointer is valid for the write.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut handle, flags as u32) })?;
        Ok(Self { device: device.clone(), handle })
    }

    /// Waits until the stream has reached it.
    pub fn synchronize(&self) -> Result<()> {
        let _current = self.device.bind()?;
        // SAFETY: the event is alive.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.handle) })
    }

    /// Whether the stream has reached it; doesn't wait.
    pub fn is_reached(&self) -> Result<bool> {
        let _current = self.device.bind()?;
        // SAFETY: the event is alive.
        match unsafe { sys::cuEventQuery(self.handle) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check("cuEventQuery", result).map(|()| true),
        }
    }

    /// Device time from `earlier` to this event, once both are reached; half a microsecond fine.
    pub fn since(&self, earlier: &Self) -> Result<Duration> {
        // The same function is exported under two names; the bindings for CUDA 13 know only `cuEventElapsedTime_v2`, which
        // drivers before 12.8 don't export.
        type Elapsed = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;
        let _current = self.device.bind()?;
        let mut milliseconds = 0.0;
        // SAFETY: the library is loaded; the name is exported with this type by every supported driver.
        let elapsed = unsafe { sys::culib().get::<Elapsed>(b"cuEventElapsedTime\0") }
            .map_err(|error| crate::Error::Cuda(format!("cuEventElapsedTime: {error}")))?;
        // SAFETY: both events are alive; the pointer is valid for the write.
        check("cuEventElapsedTime", unsafe { elapsed(&mut milliseconds, earlier.handle, self.handle) })?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) * 1e-3))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.bind() {
            // SAFETY: made by `new`, destroyed once.
            let _ = unsafe { sys::cuEventDestroy_v2(self.handle) };
        }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Event({:?}, {:?})", self.device, self.handle)
    }
}

/// Recorded work, launched as one.
pub struct Graph {
    device: Device,
    handle: sys::CUgraphExec,
}

// SAFETY: an executable graph may move between threads; `launch` takes it uniquely, as the driver asks.
unsafe impl Send for Graph {}

impl Graph {
    /// Runs the recorded work on `stream`.
    ///
    /// # Safety
    /// Every pointer that was recorded is still valid for the work, as at the recording.
    pub unsafe fn launch(&mut self, stream: &Stream) -> Result<()> {
        let _current = self.device.bind()?;
        // SAFETY: both handles are alive; the caller's promise covers the work.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.handle, stream.handle) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.bind() {
            // SAFETY: made by `capture`, destroyed once; a running launch is let finish.
            let _ = unsafe { sys::cuGraphExecDestroy(self.handle) };
        }
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Graph({:?})", self.device)
    }
}
