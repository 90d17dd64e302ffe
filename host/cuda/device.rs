//! A GPU and its primary context.

use std::ffi::{CStr, c_int};
use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys;

use super::driver::{check, driver, visible_devices};
use crate::{Error, Result};

/// A GPU's compute capability, such as 9.0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ComputeCapability {
    /// Major number: 8 is Ampere and Ada, 9 Hopper.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
}

impl fmt::Display for ComputeCapability {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}.{}", self.major, self.minor)
    }
}

/// A GPU, with its primary context retained. Cheap to clone; usable from any thread.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    ordinal: usize,
    handle: sys::CUdevice,
    context: sys::CUcontext,
}

// SAFETY: a context handle may be used from any thread; the driver locks inside.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: retained once by `Device::open`; everything made in it holds this `Inner` and is gone by now. A failure
        // means that the process is ending, and there is nobody to tell.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.handle) };
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Device({})", self.0.ordinal)
    }
}

/// Proof that kernels and copies of one device may reach the memory of another.
#[derive(Clone, Copy, Debug)]
pub struct PeerAccess(());

/// Makes a device's context current until dropped, then puts back what was current before.
pub(super) struct Current {
    previous: Option<sys::CUcontext>,
}

impl Drop for Current {
    fn drop(&mut self) {
        if let Some(previous) = self.previous {
            // SAFETY: `previous` was current on this thread (null stands for none). If its owner destroyed it meanwhile,
            // the call fails and the thread keeps a context that is valid.
            let _ = unsafe { sys::cuCtxSetCurrent(previous) };
        }
    }
}

impl Device {
    /// How many GPUs the driver offers to this process.
    ///
    /// # Errors
    /// As [`driver`].
    pub fn count() -> Result<usize> {
        driver()?;
        let mut count = 0;
        // SAFETY: the driver has started; the pointer is valid for the write.
        check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// Opens the GPU with this number, counted by the driver from 0 (after `CUDA_VISIBLE_DEVICES`).
    ///
    /// # Errors
    /// [`Error::NoDevice`] when there is no such GPU; otherwise as [`driver`].
    pub fn open(ordinal: usize) -> Result<Self> {
        let count = Self::count()?;
        if ordinal >= count {
            let visible = visible_devices();
            return Err(Error::NoDevice(match count {
                0 => format!("the driver offers no GPU{visible}"),
                1 => format!("GPU {ordinal} was asked for, but the driver offers only GPU 0{visible}"),
                _ => {
                    format!("GPU {ordinal} was asked for, but the driver offers 0 to {}{visible}", count - 1)
                }
            }));
        }
        let mut handle = 0;
        // SAFETY: the driver has started; the pointer is valid for the write. `ordinal < count`, which came from a c_int.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut handle, ordinal as c_int) })?;
        let mut context = std::ptr::null_mut();
        // SAFETY: `handle` came from the driver; released in `Inner::drop`.
        check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, handle) })?;
        Ok(Self(Arc::new(Inner { ordinal, handle, context })))
    }

    /// The number it was opened by.
    pub fn ordinal(&self) -> usize {
        self.0.ordinal
    }

    /// The driver's name for it, such as "NVIDIA H200".
    pub fn name(&self) -> Result<String> {
        let mut name = [0; 256];
        // SAFETY: the buffer is as long as said; the driver ends the text with a zero.
        check("cuDeviceGetName", unsafe {
            sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int, self.0.handle)
        })?;
        // SAFETY: zero-terminated, see above.
        Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
    }

    /// Bytes of device memory.
    pub fn memory_bytes(&self) -> Result<usize> {
        let mut bytes = 0;
        // SAFETY: the pointer is valid for the write.
        check("cuDeviceTotalMem", unsafe { sys::cuDeviceTotalMem_v2(&mut bytes, self.0.handle) })?;
        Ok(bytes)
    }

    /// Bytes of device memory that nobody uses, in any process.
    pub fn free_bytes(&self) -> Result<usize> {
        let (mut free, mut total) = (0, 0);
        let _current = self.bind()?;
        // SAFETY: a context is current; the pointers are valid for the writes.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok(free)
    }

    /// Its compute capability, which decides what PTX it can run.
    pub fn compute_capability(&self) -> Result<ComputeCapability> {
        use sys::CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        };
        Ok(ComputeCapability {
            major: self.attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            minor: self.attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        })
    }

    /// How many multiprocessors (SMs) it has.
    pub fn multiprocessors(&self) -> Result<u32> {
        self.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
    }

    /// The most dynamic shared memory that a kernel's block may ask for, in bytes.
    pub fn shared_memory_limit(&self) -> Result<u32> {
        self.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
    }

    /// Where it is on the machine's buses, as text padded with zeros: the same in every process.
    pub(super) fn bus_id(&self) -> Result<[u8; 16]> {
        let mut id = [0; 16];
        // SAFETY: the pointer is valid for 16 writes, of which the last is zero.
        check("cuDeviceGetPCIBusId", unsafe {
            sys::cuDeviceGetPCIBusId(id.as_mut_ptr(), id.len() as c_int, self.0.handle)
        })?;
        Ok(id.map(|byte: std::ffi::c_char| byte as u8))
    }

    /// A number that no other GPU has, on any machine.
    pub(super) fn uuid(&self) -> Result<[u8; 16]> {
        let mut id = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: the pointer is valid for the write.
        check("cuDeviceGetUuid", unsafe { sys::cuDeviceGetUuid_v2(&mut id, self.0.handle) })?;
        Ok(id.bytes.map(|byte: std::ffi::c_char| byte as u8))
    }

    fn attribute(&self, which: sys::CUdevice_attribute) -> Result<u32> {
        let mut value = 0;
        // SAFETY: the pointer is valid for the write.
        check("cuDeviceGetAttribute", unsafe {
            sys::cuDeviceGetAttribute(&mut value, which, self.0.handle)
        })?;
        Ok(u32::try_from(value).unwrap_or(0))
    }

    /// Waits for all work on this device, of every stream and every library in this process.
    pub fn synchronize(&self) -> Result<()> {
        let _current = self.bind()?;
        // SAFETY: a context is current.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }

    /// Lets this device's kernels read and write `peer`'s memory (one direction; ask the other way too for both).
    /// It stays so for the process, as another library may rely on it.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when the hardware or the machine's configuration has no peer access between the two.
    pub fn enable_peer_access(&self, peer: &Self) -> Result<PeerAccess> {
        if self.0.handle == peer.0.handle {
            return Ok(PeerAccess(()));
        }
        let mut possible = 0;
        // SAFETY: both handles came from the driver; the pointer is valid for the write.
        check("cuDeviceCanAccessPeer", unsafe {
            sys::cuDeviceCanAccessPeer(&mut possible, self.0.handle, peer.0.handle)
        })?;
        if possible == 0 {
            let what = format!("peer access from GPU {} to GPU {}", self.0.ordinal, peer.0.ordinal);
            return Err(Error::Unsupported { backend: "cuda", what });
        }
        let _current = self.bind()?;
        // SAFETY: `peer` keeps its context alive.
        match unsafe { sys::cuCtxEnablePeerAccess(peer.0.context, 0) } {
            // PyTorch or NCCL may have asked first; it is the same context.
            sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(PeerAccess(())),
            result => check("cuCtxEnablePeerAccess", result).map(|()| PeerAccess(())),
        }
    }

    /// Makes the context current for as long as the returned value lives.
    pub(super) fn bind(&self) -> Result<Current> {
        let mut previous = std::ptr::null_mut();
        // SAFETY: the driver has started; the pointer is valid for the write.
        check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&mut previous) })?;
        if previous == self.0.context {
            return Ok(Current { previous: None });
        }
        // SAFETY: the context is retained by `self`.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.0.context) })?;
        Ok(Current { previous: Some(previous) })
    }
}
