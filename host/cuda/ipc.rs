//! Device memory of one process in another: CUDA's memory handles (CUDA driver API, "Memory Management", `cuIpc*`).

use std::fmt;

use cudarc::driver::sys;

use super::driver::check;
use super::{Device, DeviceBuffer};
use crate::Result;

/// Bytes of a memory handle.
pub(super) const HANDLE_BYTES: usize = size_of::<sys::CUipcMemHandle>();
const _: () = assert!(HANDLE_BYTES == 64);

/// A handle to a buffer that was made [shareable](DeviceBuffer::shareable), for other processes of this machine.
pub(super) fn export(buffer: &DeviceBuffer) -> Result<[u8; HANDLE_BYTES]> {
    let _current = buffer.device().bind()?;
    let mut handle = sys::CUipcMemHandle { reserved: [0; HANDLE_BYTES] };
    // SAFETY: a live allocation of the current context; the pointer is valid for the write.
    check("cuIpcGetMemHandle", unsafe { sys::cuIpcGetMemHandle(&mut handle, buffer.pointer()) })?;
    Ok(handle.reserved.map(|byte| byte as u8))
}

/// Another process's memory, mapped for a device of this one, until dropped.
pub(super) struct Imported {
    device: Device,
    pointer: u64,
}

impl Imported {
    /// Maps it. Memory of another GPU is reached by peer access, which is enabled for it.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda), also when the GPUs have no peer access to each other, or the handle is of
    /// this process or another machine.
    pub(super) fn open(device: &Device, handle: [u8; HANDLE_BYTES]) -> Result<Self> {
        let _current = device.bind()?;
        let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| byte as std::ffi::c_char) };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut pointer = 0;
        // SAFETY: a context is current; the pointer is valid for the write; the driver checks the handle.
        let result = unsafe { sys::cuIpcOpenMemHandle_v2(&mut pointer, handle, flags) };
        check(&format!("cuIpcOpenMemHandle on GPU {}", device.ordinal()), result)?;
        Ok(Self { device: device.clone(), pointer })
    }

    /// Its address on the device.
    pub(super) fn pointer(&self) -> u64 {
        self.pointer
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.bind() {
            // SAFETY: mapped by `open`, unmapped once; whoever owns it has waited for work that uses it.
            let _ = unsafe { sys::cuIpcCloseMemHandle(self.pointer) };
        }
    }
}

impl fmt::Debug for Imported {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Imported({:?})", self.device)
    }
}
