//! Products of bf16 matrices by cuBLAS, which is found at run time.

use std::ffi::{c_int, c_void};

use cudarc::cublas::{result, sys};
use cudarc::driver::sys as driver;
use ringseal::cuda::{Device, Stream};
use ringseal::{Error, Result};

/// A factor: a matrix of bf16 elements in device memory, by columns.
#[derive(Clone, Copy)]
pub(crate) struct Factor {
    pub(crate) address: u64,
    /// Rows in memory, which is how far a column is from the next.
    pub(crate) rows: usize,
    pub(crate) transposed: bool,
}

/// What the elements of a product are.
#[derive(Clone, Copy)]
pub(crate) enum Elements {
    Bf16,
    F32,
}

/// cuBLAS for one stream.
pub(crate) struct Blas {
    context: driver::CUcontext,
    handle: sys::cublasHandle_t,
    ordinal: c_int,
}

impl Blas {
    /// # Errors
    /// [`Error::Unsupported`] where the library isn't found; [`Error::Cuda`].
    pub(crate) fn new(device: &Device, stream: &Stream) -> Result<Self> {
        // SAFETY: opening the library runs its initialisers, which have no preconditions.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::Unsupported {
                backend: "cuda",
                what: "this benchmark here: cuBLAS was not found; the folder of libcublas.so.13 (or .12) must be among those \
                       in LD_LIBRARY_PATH"
                    .into(),
            });
        }
        let ordinal = device.ordinal() as c_int;
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver has started, as the device is open; the pointer is valid for the write.
        check("cuDevicePrimaryCtxRetain", unsafe {
            driver::cuDevicePrimaryCtxRetain(&mut context, ordinal)
        })?;
        let mut blas = Self { context, handle: std::ptr::null_mut(), ordinal };
        blas.make_current()?;
        blas.handle = result::create_handle().map_err(failed)?;
        // SAFETY: both are alive; driver and runtime have the same streams.
        unsafe { result::set_stream(blas.handle, stream.handle().cast()) }.map_err(failed)?;
        Ok(blas)
    }

    /// Makes the device's context the thread's.
    pub(crate) fn make_current(&self) -> Result<()> {
        // SAFETY: retained for as long as `self` lives.
        check("cuCtxSetCurrent", unsafe { driver::cuCtxSetCurrent(self.context) })
    }

    /// Queues a product of `rows` by `columns` elements, to be written to `address`, by columns; the factors have `inner`
    /// columns and rows. Sums are f32.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    ///
    /// # Safety
    /// All matrices lie in the device's memory and are left alone until the stream has passed the product, but that factors
    /// may be read.
    pub(crate) unsafe fn product(
        &self,
        [rows, columns, inner]: [usize; 3],
        [a, b]: [Factor; 2],
        address: u64,
        elements: Elements,
    ) -> Result<()> {
        self.make_current()?;
        let operation = |factor: Factor| match factor.transposed {
            true => sys::cublasOperation_t::CUBLAS_OP_T,
            false => sys::cublasOperation_t::CUBLAS_OP_N,
        };
        let bf16 = sys::cudaDataType_t::CUDA_R_16BF;
        let out = match elements {
            Elements::Bf16 => bf16,
            Elements::F32 => sys::cudaDataType_t::CUDA_R_32F,
        };
        let (one, zero) = (1_f32, 0_f32);
        // SAFETY: the handle is alive, its context current; the scalars are host memory, of which nothing is needed after
        // the call; the matrices are the caller's promise. Sides are far below 2^31.
        unsafe {
            result::gemm_ex(
                self.handle,
                operation(a),
                operation(b),
                rows as c_int,
                columns as c_int,
                inner as c_int,
                (&raw const one).cast(),
                a.address as *const c_void,
                bf16,
                a.rows as c_int,
                b.address as *const c_void,
                bf16,
                b.rows as c_int,
                (&raw const zero).cast(),
                address as *mut c_void,
                out,
                rows as c_int,
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            )
        }
        .map_err(failed)
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // A process that fails at this is ending.
        let _ = self.make_current();
        if !self.handle.is_null() {
            // SAFETY: made by `new`, destroyed once.
            let _ = unsafe { result::destroy_handle(self.handle) };
        }
        // SAFETY: retained once.
        let _ = unsafe { driver::cuDevicePrimaryCtxRelease_v2(self.ordinal) };
    }
}

fn failed(error: result::CublasError) -> Error {
    Error::Cuda(format!("cuBLAS: {error}"))
}

/// The driver's result as an error.
pub(crate) fn check(call: &str, result: driver::CUresult) -> Result<()> {
    match result {
        driver::CUresult::CUDA_SUCCESS => Ok(()),
        other => Err(Error::Cuda(format!("{call}: {other:?}"))),
    }
}
