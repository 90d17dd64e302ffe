//! Device memory, and pinned host memory that the device can reach.

use std::ffi::c_void;
use std::fmt;
use std::sync::atomic::AtomicU32;

use cudarc::driver::sys;
use zeroize::Zeroize;

use super::device::Device;
use super::driver::check;
use super::stream::Stream;
use crate::{Error, Result};

/// What the driver shares between processes at once.
const SHARED_PAGE: usize = 2 << 20;

/// Memory on a device, aligned to 256 bytes, freed on drop once all work on it is done.
pub struct DeviceBuffer {
    device: Device,
    pointer: u64,
    bytes: usize,
    secret: bool,
}

impl DeviceBuffer {
    /// Allocates `bytes` bytes. What they hold is undefined. No bytes need no allocation; the pointer is then 0.
    ///
    /// # Errors
    /// [`Error::Cuda`] when the device has not that much memory left.
    pub fn new(device: &Device, bytes: usize) -> Result<Self> {
        let mut pointer = 0;
        if bytes > 0 {
            let _current = device.bind()?;
            // SAFETY: a context is current; the pointer is valid for the write.
            let result = unsafe { sys::cuMemAlloc_v2(&mut pointer, bytes) };
            check(&format!("cuMemAlloc of {bytes} bytes on GPU {}", device.ordinal()), result)?;
        }
        Ok(Self { device: device.clone(), pointer, bytes, secret: false })
    }

    /// As [`DeviceBuffer::new`], but overwritten with zeros before it is freed: for keys and tables made from keys.
    pub fn secret(device: &Device, bytes: usize) -> Result<Self> {
        let mut buffer = Self::new(device, bytes)?;
        buffer.secret = true;
        Ok(buffer)
    }

    /// As [`DeviceBuffer::new`], but in pages of its own, so that sharing it with another process shares nothing else:
    /// the driver shares whole pages of 2 MiB (CUDA driver API, `cuIpcGetMemHandle`).
    pub(super) fn shareable(device: &Device, bytes: usize) -> Result<Self> {
        let mut buffer = Self::new(device, bytes.next_multiple_of(SHARED_PAGE))?;
        buffer.bytes = bytes;
        Ok(buffer)
    }

    /// Allocates and fills from `bytes`.
    pub fn from_host(bytes: &[u8], stream: &Stream) -> Result<Self> {
        let mut buffer = Self::new(stream.device(), bytes.len())?;
        buffer.write(0, bytes, stream)?;
        Ok(buffer)
    }

    /// The device it is on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Its address, for a kernel's parameters.
    pub fn pointer(&self) -> u64 {
        self.pointer
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Copies `source` to `offset`, after the stream's earlier work, and waits for it.
    pub fn write(&mut self, offset: usize, source: &[u8], stream: &Stream) -> Result<()> {
        let destination = self.range(offset, source.len())?;
        // SAFETY: the range is inside this buffer; `source` is borrowed until the copy is done.
        unsafe { stream.copy(destination, source.as_ptr() as u64, source.len())? };
        stream.synchronize()
    }

    /// Copies from `offset` into `destination`, after the stream's earlier work, and waits for it.
    pub fn read(&self, offset: usize, destination: &mut [u8], stream: &Stream) -> Result<()> {
        let source = self.range(offset, destination.len())?;
        // SAFETY: the range is inside this buffer; `destination` is borrowed until the copy is done.
        unsafe { stream.copy(destination.as_mut_ptr() as u64, source, destination.len())? };
        stream.synchronize()
    }

    /// Copies all of it to the host, after the stream's earlier work.
    pub fn to_host(&self, stream: &Stream) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.bytes];
        self.read(0, &mut bytes, stream)?;
        Ok(bytes)
    }

    /// Sets every byte to `value`, in stream order; doesn't wait.
    pub fn fill(&mut self, value: u8, stream: &Stream) -> Result<()> {
        if self.bytes == 0 {
            return Ok(());
        }
        let _current = self.device.bind()?;
        // SAFETY: the whole of a live allocation; freeing it waits for the stream.
        check("cuMemsetD8Async", unsafe {
            sys::cuMemsetD8Async(self.pointer, value, self.bytes, stream.handle())
        })
    }

    fn range(&self, offset: usize, bytes: usize) -> Result<u64> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(self.pointer + offset as u64),
            _ => Err(Error::InvalidArgument(format!(
                "{bytes} bytes at offset {offset} don't lie in a device buffer of {} bytes",
                self.bytes
            ))),
        }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        let Ok(_current) = self.device.bind() else { return };
        if self.secret {
            // Work may still run that reads the secret, on a stream that doesn't order itself with the memset's.
            // SAFETY: a context is current.
            let _ = unsafe { sys::cuCtxSynchronize() };
            // SAFETY: the whole of a live allocation.
            let _ = unsafe { sys::cuMemsetD8_v2(self.pointer, 0, self.bytes) };
        }
        // SAFETY: allocated by `new`, freed once; the driver waits for work that may use it. After a kernel fault every
        // call fails, and the memory goes with the context.
        let _ = unsafe { sys::cuMemFree_v2(self.pointer) };
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "DeviceBuffer({:?}, {} bytes)", self.device, self.bytes)
    }
}

/// Pinned host memory that every device of the process can read and write at its own [`pointer`](Self::pointer):
/// for flags between host and kernels, and for copies that run beside the caller. Zeros at first.
pub struct HostBuffer {
    device: Device,
    pointer: *mut c_void,
    bytes: usize,
}

// SAFETY: plain memory; what is shared is reached as atomics or through `unsafe`.
unsafe impl Send for HostBuffer {}
// SAFETY: as above.
unsafe impl Sync for HostBuffer {}

impl HostBuffer {
    /// Allocates at least `bytes` bytes, rounded up to whole words.
    pub fn new(device: &Device, bytes: usize) -> Result<Self> {
        let bytes = bytes.next_multiple_of(4).max(4);
        let mut pointer = std::ptr::null_mut();
        let _current = device.bind()?;
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: a context is current; the pointer is valid for the write.
        let result = unsafe { sys::cuMemHostAlloc(&mut pointer, bytes, flags) };
        check(&format!("cuMemHostAlloc of {bytes} bytes"), result)?;
        // SAFETY: `bytes` bytes were just allocated, and nothing else knows of them.
        unsafe { std::ptr::write_bytes(pointer.cast::<u8>(), 0, bytes) };
        Ok(Self { device: device.clone(), pointer, bytes })
    }

    /// Its address on the host and on every device: the two are one under unified addressing, which every 64-bit system
    /// with a supported GPU has.
    pub fn pointer(&self) -> u64 {
        self.pointer as u64
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Never: it has at least one word.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Its words, for flags that host and device both touch.
    pub fn words(&self) -> &[AtomicU32] {
        // SAFETY: aligned to a page, initialised, alive as long as `self`; atomics allow concurrent access.
        unsafe { std::slice::from_raw_parts(self.pointer.cast(), self.bytes / 4) }
    }

    /// Its bytes.
    ///
    /// # Safety
    /// No device work that writes it may be running.
    pub unsafe fn as_slice(&self) -> &[u8] {
        // SAFETY: initialised, alive as long as `self`; the caller rules out writers.
        unsafe { std::slice::from_raw_parts(self.pointer.cast(), self.bytes) }
    }

    /// Its bytes, to be written.
    ///
    /// # Safety
    /// No device work that touches it may be running.
    pub unsafe fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: initialised, alive as long as `self`, borrowed uniquely; the caller rules out the device.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.cast(), self.bytes) }
    }
}

impl Drop for HostBuffer {
    /// Wipes it first: a rank's vector may have passed through.
    fn drop(&mut self) {
        if let Ok(_current) = self.device.bind() {
            // SAFETY: still allocated, and whoever drops it has waited for the device.
            unsafe { self.as_mut_slice() }.zeroize();
            // SAFETY: allocated by `new`, freed once.
            let _ = unsafe { sys::cuMemFreeHost(self.pointer) };
        }
    }
}

impl fmt::Debug for HostBuffer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "HostBuffer({} bytes)", self.bytes)
    }
}
