//! NCCL's own all-reduce, plain, to compare with: one process, one rank on each device.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::sync::OnceLock;

use cudarc::driver::sys::CUstream;
use libloading::Library;

use super::{Device, Stream};
use crate::cuda::RankBuffers;
use crate::{Dtype, Error, ReduceOp, Result};

pub(super) type Comm = *mut c_void;
type CommInitAll = unsafe extern "C" fn(*mut Comm, c_int, *const c_int) -> c_int;
type CommDestroy = unsafe extern "C" fn(Comm) -> c_int;
pub(super) type Group = unsafe extern "C" fn() -> c_int;
type ErrorString = unsafe extern "C" fn(c_int) -> *const c_char;
type GetVersion = unsafe extern "C" fn(*mut c_int) -> c_int;
pub(super) type AllReduce =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, CUstream) -> c_int;

/// The library, loaded at run time, once. It is never unloaded: threads of its own may still be ending communicators.
#[derive(Clone, Copy)]
pub(super) struct Functions(&'static Library);

static LOADED: OnceLock<Library> = OnceLock::new();

impl Functions {
    /// Loads `libnccl.so.2`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when there is none.
    pub(super) fn load() -> Result<Self> {
        if let Some(library) = LOADED.get() {
            return Ok(Self(library));
        }
        // SAFETY: the library's initialisers have no preconditions.
        let library = unsafe { Library::new("libnccl.so.2") };
        let what = |error| {
            format!("NCCL here: {error}; the folder of libnccl.so.2 must be among those in LD_LIBRARY_PATH")
        };
        let library = library.map_err(|error| Error::Unsupported { backend: "cuda", what: what(error) })?;
        Ok(Self(LOADED.get_or_init(|| library)))
    }

    /// # Errors
    /// [`Error::Cuda`] when the library has no such function.
    ///
    /// # Safety
    /// `T` is the function's type.
    pub(super) unsafe fn symbol<T>(self, name: &[u8]) -> Result<libloading::Symbol<'static, T>> {
        // SAFETY: the caller's promise.
        unsafe { self.0.get(name) }.map_err(|error| Error::Cuda(format!("NCCL: {error}")))
    }

    /// # Errors
    /// [`Error::Cuda`] with NCCL's own text, unless `code` is success.
    pub(super) fn check(self, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the type is the one in nccl.h; it returns a static string.
        let text = unsafe {
            let describe = self.symbol::<ErrorString>(b"ncclGetErrorString\0")?;
            CStr::from_ptr(describe(code)).to_string_lossy().into_owned()
        };
        Err(Error::Cuda(format!("NCCL: {text}")))
    }
}

/// NCCL communicators of this process, one on each device.
pub struct Nccl {
    functions: Functions,
    communicators: Vec<Comm>,
}

impl Nccl {
    /// Loads `libnccl.so.2` and connects `devices`, all different.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when the library cannot be loaded; [`Error::Cuda`] with NCCL's own text when it fails.
    pub fn new(devices: &[Device]) -> Result<Self> {
        let ordinals: Vec<c_int> = devices.iter().map(|device| device.ordinal() as c_int).collect();
        let mut nccl = Self { functions: Functions::load()?, communicators: Vec::new() };
        let mut communicators = vec![std::ptr::null_mut(); devices.len()];
        // SAFETY: the type is the one in nccl.h; both arrays have one place for each device.
        unsafe {
            let init = nccl.functions.symbol::<CommInitAll>(b"ncclCommInitAll\0")?;
            nccl.functions.check(init(
                communicators.as_mut_ptr(),
                devices.len() as c_int,
                ordinals.as_ptr(),
            ))?;
        }
        nccl.communicators = communicators;
        Ok(nccl)
    }

    /// NCCL's version, such as 2.28.9.
    pub fn version(&self) -> Result<String> {
        let mut code = 0;
        // SAFETY: the type is the one in nccl.h; the pointer is valid for the write.
        unsafe {
            let version = self.functions.symbol::<GetVersion>(b"ncclGetVersion\0")?;
            self.functions.check(version(&mut code))?;
        }
        Ok(format!("{}.{}.{}", code / 10000, code / 100 % 100, code % 100))
    }

    /// Queues an all-reduce on the streams, and doesn't wait.
    ///
    /// # Errors
    /// [`Error::Cuda`] with NCCL's own text.
    ///
    /// # Safety
    /// As [`Collectives::run`](super::Collectives::run).
    pub unsafe fn all_reduce(
        &self,
        buffers: &[RankBuffers],
        count: usize,
        dtype: Dtype,
        op: ReduceOp,
        streams: &[&Stream],
    ) -> Result<()> {
        // SAFETY: the types are those in nccl.h; the rest is the caller's promise.
        unsafe {
            let reduce = self.functions.symbol::<AllReduce>(b"ncclAllReduce\0")?;
            self.functions.check(self.functions.symbol::<Group>(b"ncclGroupStart\0")?())?;
            for ((buffer, &communicator), stream) in buffers.iter().zip(&self.communicators).zip(streams) {
                self.functions.check(reduce(
                    buffer.input as *const c_void,
                    buffer.output as *mut c_void,
                    count,
                    dtype_code(dtype),
                    op_code(op),
                    communicator,
                    stream.handle(),
                ))?;
            }
            self.functions.check(self.functions.symbol::<Group>(b"ncclGroupEnd\0")?())
        }
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        // SAFETY: the type is the one in nccl.h; each communicator was made by `new` and is destroyed once.
        if let Ok(destroy) = unsafe { self.functions.symbol::<CommDestroy>(b"ncclCommDestroy\0") } {
            for &communicator in &self.communicators {
                // SAFETY: as above.
                unsafe { destroy(communicator) };
            }
        }
    }
}

impl fmt::Debug for Nccl {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Nccl({} ranks)", self.communicators.len())
    }
}

/// `ncclDataType_t`.
fn dtype_code(dtype: Dtype) -> c_int {
    match dtype {
        Dtype::I8 => 0,
        Dtype::U8 => 1,
        Dtype::I32 => 2,
        Dtype::U32 => 3,
        Dtype::I64 => 4,
        Dtype::U64 => 5,
        Dtype::F16 => 6,
        Dtype::F32 => 7,
        Dtype::F64 => 8,
        Dtype::Bf16 => 9,
    }
}

/// `ncclRedOp_t`.
fn op_code(op: ReduceOp) -> c_int {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Prod => 1,
        ReduceOp::Max => 2,
        ReduceOp::Min => 3,
        ReduceOp::Avg => 4,
    }
}
