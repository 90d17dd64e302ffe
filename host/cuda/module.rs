//! Compiled kernels: loading and launching.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{CString, c_int, c_void};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;

use super::device::Device;
use super::driver::{Version, check, describe, driver};
use super::stream::Stream;
use crate::ptx::Target;
use crate::{Error, Result, ptx};

/// Kernels to take from. Cheap to clone.
///
/// PTX is compiled by the driver when it is loaded, for which it takes about a second a kernel, until it has it in its cache.
/// Of the embedded kernels each is loaded by itself, when it is first asked for; everything else is loaded as a whole.
#[derive(Clone)]
pub struct Module(Arc<Inner>);

struct Inner {
    device: Device,
    source: Source,
}

enum Source {
    Whole(Loaded),
    /// The embedded module for a target: what was asked for, by name.
    Embedded(Target, Mutex<HashMap<String, Loaded>>),
}

/// A module of the driver's.
struct Loaded {
    device: Device,
    handle: sys::CUmodule,
    log: String,
}

// SAFETY: module handles may be used from any thread; the driver locks inside.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

impl Drop for Loaded {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.bind() {
            // SAFETY: loaded once, unloaded once; every `Kernel` holds the `Module` that holds this.
            let _ = unsafe { sys::cuModuleUnload(self.handle) };
        }
    }
}

impl Loaded {
    /// Compiles or finds in the driver's cache, if it is text.
    fn new(device: &Device, image: &[u8]) -> Result<Self> {
        // The driver reads PTX up to a zero byte; a cubin knows its own length.
        let text = if is_cubin(image) {
            None
        } else {
            let text = CString::new(image)
                .map_err(|_| Error::InvalidArgument("the PTX holds a zero byte: not PTX".into()))?;
            Some(text)
        };
        let pointer = text.as_ref().map_or(image.as_ptr(), |text| text.as_ptr().cast());

        let mut info = Log::new();
        let mut error = Log::new();
        let mut options = [
            sys::CUjit_option::CU_JIT_INFO_LOG_BUFFER,
            sys::CUjit_option::CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
            sys::CUjit_option::CU_JIT_LOG_VERBOSE,
        ];
        // Each value is passed in the bits of a pointer.
        let mut values = [
            info.0.as_mut_ptr().cast::<c_void>(),
            std::ptr::without_provenance_mut(info.0.len()),
            error.0.as_mut_ptr().cast(),
            std::ptr::without_provenance_mut(error.0.len()),
            std::ptr::without_provenance_mut(1),
        ];
        let _current = device.bind()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a context is current; the image is zero-terminated PTX or ELF; the two option arrays match in length,
        // and the logs outlive the call.
        let result = unsafe {
            sys::cuModuleLoadDataEx(
                &mut handle,
                pointer.cast(),
                options.len() as u32,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        if result != sys::CUresult::CUDA_SUCCESS {
            let log = error.text();
            let log = if log.is_empty() { String::new() } else { format!(": {log}") };
            return Err(Error::Cuda(format!("loading the kernels: {}{log}", describe(result))));
        }
        Ok(Self { device: device.clone(), handle, log: info.text() })
    }
}

fn is_cubin(image: &[u8]) -> bool {
    image.starts_with(b"\x7fELF")
}

impl Module {
    /// Loads the kernels that are embedded in this library, in the form for the device's architecture.
    ///
    /// # Errors
    /// [`Error::NoDevice`] when the device is too old for them; otherwise as [`Module::load`].
    pub fn embedded(device: &Device) -> Result<Self> {
        let capability = device.compute_capability()?;
        let Some(target) = ptx::for_compute_capability(capability.major, capability.minor) else {
            return Err(Error::NoDevice(format!(
                "GPU {} ({}) has compute capability {capability}, but the kernels need 8.0 or newer",
                device.ordinal(),
                device.name()?
            )));
        };
        Self::load(device, ptx::text(target).as_bytes())
    }

    /// Loads PTX (text, which the driver compiles or finds in its cache) or a cubin (for this very architecture).
    ///
    /// # Errors
    /// [`Error::NoDevice`] when the PTX is newer than the driver, naming both versions; [`Error::Cuda`] with the
    /// compiler's log when it doesn't compile or is for another architecture.
    pub fn load(device: &Device, image: &[u8]) -> Result<Self> {
        let version = driver()?;
        if !is_cubin(image) {
            check_ptx_version(image, version)?;
        }
        let embedded = Target::ALL.into_iter().find(|&target| ptx::text(target).as_bytes() == image);
        let source = match embedded {
            Some(target) => Source::Embedded(target, Mutex::default()),
            None => Source::Whole(Loaded::new(device, image)?),
        };
        Ok(Self(Arc::new(Inner { device: device.clone(), source })))
    }

    /// What the driver's compiler said; empty when the module came from its cache, and for the embedded kernels.
    pub fn log(&self) -> &str {
        match &self.0.source {
            Source::Whole(loaded) => &loaded.log,
            Source::Embedded(..) => "",
        }
    }

    /// The device it is loaded on.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Finds a kernel and allows its blocks `shared_bytes` bytes of dynamic shared memory.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when the module has no such kernel (some exist for one architecture only);
    /// [`Error::Cuda`] when it doesn't compile, or when the device has less shared memory a block.
    pub fn kernel(&self, name: &str, shared_bytes: u32) -> Result<Kernel> {
        let symbol = CString::new(name)
            .map_err(|_| Error::InvalidArgument(format!("kernel name {name:?} holds a zero byte")))?;
        let _current = self.0.device.bind()?;
        let absent = || {
            let what = format!("{name}: there is no such kernel for this architecture");
            Error::Unsupported { backend: "cuda", what }
        };
        let handle = match &self.0.source {
            Source::Whole(loaded) => loaded.handle,
            Source::Embedded(target, loaded) => {
                let mut loaded = loaded.lock().unwrap_or_else(PoisonError::into_inner);
                match loaded.entry(name.to_owned()) {
                    Entry::Occupied(found) => found.get().handle,
                    Entry::Vacant(place) => {
                        let text = ptx::kernel(*target, name).ok_or_else(absent)?;
                        place.insert(Loaded::new(&self.0.device, text.as_bytes())?).handle
                    }
                }
            }
        };
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is alive; the name is zero-terminated; the pointer is valid for the write.
        let result = unsafe { sys::cuModuleGetFunction(&mut function, handle, symbol.as_ptr()) };
        if result == sys::CUresult::CUDA_ERROR_NOT_FOUND {
            return Err(absent());
        }
        check(&format!("finding kernel {name}"), result)?;
        use sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let bytes = c_int::try_from(shared_bytes).unwrap_or(c_int::MAX);
        // SAFETY: `function` is of a live module.
        let result = unsafe {
            sys::cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes)
        };
        check(&format!("{shared_bytes} bytes of shared memory for kernel {name}"), result)?;
        Ok(Kernel {
            module: self.clone(),
            function,
            name: name.into(),
            shared_bytes,
            parameter_bytes: parameter_bytes(function),
        })
    }
}

impl fmt::Debug for Module {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Module({:?})", self.0.device)
    }
}

/// A buffer for the compiler's messages, filled with zeros.
struct Log(Box<[u8]>);

impl Log {
    fn new() -> Self {
        Self(vec![0; 16 << 10].into_boxed_slice())
    }

    fn text(&self) -> String {
        let end = self.0.iter().position(|&byte| byte == 0).unwrap_or(self.0.len());
        String::from_utf8_lossy(&self.0[..end]).trim().to_owned()
    }
}

/// Refuses PTX that is newer than the driver before the driver does, as its own message names neither version.
fn check_ptx_version(image: &[u8], driver: Version) -> Result<()> {
    let Some((ptx, needed)) = ptx_version(image) else {
        return Err(Error::InvalidArgument(
            "the kernels are neither a cubin nor PTX: no .version line".into(),
        ));
    };
    if driver < needed {
        return Err(Error::NoDevice(format!(
            "the kernels are PTX {ptx}, which needs a driver that supports CUDA {needed}, but the installed one supports \
             CUDA {driver}"
        )));
    }
    Ok(())
}

/// The PTX version of a module, and the CUDA release that brought it (PTX ISA, chapter "Release Notes").
fn ptx_version(image: &[u8]) -> Option<(Version, Version)> {
    let text = String::from_utf8_lossy(image);
    let line = text.lines().find_map(|line| line.trim().strip_prefix(".version"))?;
    let (major, minor) = line.trim().split_once('.')?;
    let ptx = Version { major: major.parse().ok()?, minor: minor.trim().parse().ok()? };
    let (major, minor) = match (ptx.major, ptx.minor) {
        (..=6, _) => (10, 0),
        (7, minor) => (11, minor),
        (8, minor @ ..=5) => (12, minor),
        (8, minor) => (12, minor + 1),
        (major, minor) => (major + 4, minor),
    };
    Some((ptx, Version { major, minor }))
}

/// Size of the kernel's one parameter, where the driver can tell (from CUDA 12.4 on).
fn parameter_bytes(function: sys::CUfunction) -> Option<usize> {
    type ParamInfo = unsafe extern "C" fn(sys::CUfunction, usize, *mut usize, *mut usize) -> sys::CUresult;
    // SAFETY: the library is loaded; where the name is exported, it has this type.
    let info = unsafe { sys::culib().get::<ParamInfo>(b"cuFuncGetParamInfo\0") }.ok()?;
    let (mut offset, mut bytes) = (0, 0);
    // SAFETY: `function` is of a live module; the pointers are valid for the writes.
    let result = unsafe { info(function, 0, &mut offset, &mut bytes) };
    (result == sys::CUresult::CUDA_SUCCESS).then_some(bytes)
}

/// How many blocks, and of how many threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks in the grid.
    pub blocks: u32,
    /// Threads in a block.
    pub threads: u32,
}

/// One kernel of a module.
#[derive(Clone)]
pub struct Kernel {
    module: Module,
    function: sys::CUfunction,
    name: String,
    shared_bytes: u32,
    parameter_bytes: Option<usize>,
}

// SAFETY: function handles may be used from any thread; the driver locks inside.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// Queues the kernel on `stream`; doesn't wait. A grid of no blocks is not launched at all.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when `parameters` is not of the size that the kernel declares; [`Error::Cuda`] when the
    /// launch is refused. A fault inside the kernel shows at the next wait.
    ///
    /// # Safety
    /// `parameters` is what this kernel takes; every address in it is valid, on the stream's device, for what the kernel
    /// does there, until the stream has passed the launch.
    pub unsafe fn launch<P: Copy>(&self, launch: Launch, stream: &Stream, parameters: &P) -> Result<()> {
        if launch.blocks == 0 {
            return Ok(());
        }
        let given = size_of::<P>();
        if let Some(declared) = self.parameter_bytes
            && declared != given
        {
            return Err(Error::InvalidArgument(format!(
                "kernel {} takes {declared} bytes of parameters, not {given}: the PTX and the host library don't match",
                self.name
            )));
        }
        let _current = self.module.0.device.bind()?;
        let mut arguments = [std::ptr::from_ref(parameters).cast_mut().cast::<c_void>()];
        // SAFETY: the function is of a live module; the driver copies the one parameter, of the declared size, before it
        // returns; the rest is the caller's promise.
        let result = unsafe {
            sys::cuLaunchKernel(
                self.function,
                launch.blocks,
                1,
                1,
                launch.threads,
                1,
                1,
                self.shared_bytes,
                stream.handle(),
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        check(&format!("launching {} on {} x {} threads", self.name, launch.blocks, launch.threads), result)
    }

    /// The module it is in.
    pub fn module(&self) -> &Module {
        &self.module
    }

    /// Its name in the module.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How many of its blocks run on one multiprocessor at once.
    pub fn resident_blocks(&self, threads: u32) -> Result<u32> {
        let _current = self.module.0.device.bind()?;
        let mut blocks = 0;
        let threads = c_int::try_from(threads).unwrap_or(c_int::MAX);
        // SAFETY: the function is of a live module; the pointer is valid for the write.
        check("cuOccupancyMaxActiveBlocksPerMultiprocessor", unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut blocks,
                self.function,
                threads,
                self.shared_bytes as usize,
            )
        })?;
        Ok(u32::try_from(blocks).unwrap_or(0))
    }

    /// Registers a thread.
    pub fn registers(&self) -> Result<u32> {
        self.attribute(sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_NUM_REGS)
    }

    /// Bytes of local memory a thread: spills, and arrays that didn't fit registers.
    pub fn local_bytes(&self) -> Result<u32> {
        self.attribute(sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)
    }

    fn attribute(&self, which: sys::CUfunction_attribute) -> Result<u32> {
        let _current = self.module.0.device.bind()?;
        let mut value = 0;
        // SAFETY: the function is of a live module; the pointer is valid for the write.
        check("cuFuncGetAttribute", unsafe { sys::cuFuncGetAttribute(&mut value, which, self.function) })?;
        Ok(u32::try_from(value).unwrap_or(0))
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Kernel({}, {:?})", self.name, self.module)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ptx_newer_than_the_driver_is_refused_by_both_versions() {
        let image = b"//\n// comment\n.version 9.0\n.target sm_90a\n";
        let text = check_ptx_version(image, Version { major: 12, minor: 4 }).unwrap_err().to_string();
        assert!(text.contains("PTX 9.0") && text.contains("13.0") && text.contains("12.4"), "{text}");
        assert!(check_ptx_version(image, Version { major: 13, minor: 0 }).is_ok());
        assert!(check_ptx_version(b"hello", Version { major: 13, minor: 0 }).is_err());
    }

    #[test]
    fn ptx_versions_map_to_cuda_releases() {
        let cuda = |text: &str| {
            let (_, Version { major, minor }) = ptx_version(format!(".version {text}\n").as_bytes()).unwrap();
            (major, minor)
        };
        assert_eq!(cuda("7.8"), (11, 8));
        assert_eq!(cuda("8.0"), (12, 0));
        assert_eq!(cuda("8.5"), (12, 5));
        assert_eq!(cuda("8.6"), (12, 7));
        assert_eq!(cuda("8.8"), (12, 9));
        assert_eq!(cuda("9.0"), (13, 0));
    }
}
