//! One primary context, shared by threads, by handles of any lifetime, and by other libraries in the process.

use std::process::{Command, Stdio};
use std::ptr::null_mut;
use std::thread;
use std::time::Instant;

use cudarc::driver::sys;
use ringseal::Error;
use ringseal::cuda::{Device, DeviceBuffer, HostBuffer, Kernel, Launch, Module, Stream};

use crate::support::{GpuTest, Outcome, ensure, random_bytes};

pub(crate) const TESTS: &[GpuTest] = &[
    ("context::made_on_one_thread_used_and_dropped_on_another", other_thread),
    ("context::two_threads_at_once", two_threads),
    ("context::buffers_outlive_the_device_handle", outlive),
    ("context::a_second_handle_between_allocation_and_copy", second_handle),
    ("context::the_primary_context_is_used_and_the_caller's_stays_current", primary_context),
    ("context::streams_of_other_libraries_work", borrowed_stream),
    ("context::pinned_memory_is_reached_by_kernels", pinned),
    ("context::a_graph_replays_what_was_captured", graph),
    ("context::a_capture_that_fails_leaves_the_stream_usable", failed_capture),
    ("module::the_jit_cache_may_be_disabled_or_unwritable", jit_cache),
    ("module::broken_ptx_is_an_error_with_the_compiler's_log", broken_ptx),
    ("module::unknown_kernels_and_wrong_parameters_are_errors", wrong_parameters),
    ("memory::ranges_are_checked", ranges),
];

/// Adds one to each 32-bit word: `words` of them at `pointer`.
const ADD_ONE: &[u8] = b"
.version 8.0
.target sm_80
.address_size 64
.visible .entry add_one(.param .align 8 .b8 parameters[16])
{
    .reg .pred %outside;
    .reg .b32 %thread, %block, %threads, %index, %words, %value;
    .reg .b64 %pointer, %offset;
    ld.param.u64 %pointer, [parameters];
    ld.param.u32 %words, [parameters+8];
    mov.u32 %thread, %tid.x;
    mov.u32 %block, %ctaid.x;
    mov.u32 %threads, %ntid.x;
    mad.lo.u32 %index, %block, %threads, %thread;
    setp.ge.u32 %outside, %index, %words;
    @%outside ret;
    mul.wide.u32 %offset, %index, 4;
    add.u64 %pointer, %pointer, %offset;
    ld.global.u32 %value, [%pointer];
    add.u32 %value, %value, 1;
    st.global.u32 [%pointer], %value;
    ret;
}
";

#[repr(C)]
#[derive(Clone, Copy)]
struct AddOne {
    pointer: u64,
    words: u32,
    reserved: u32,
}

fn add_one(kernel: &Kernel, pointer: u64, words: u32, stream: &Stream) -> ringseal::Result<()> {
    let launch = Launch { blocks: words.div_ceil(256), threads: 256 };
    // SAFETY: each caller passes memory of `words` words that lives until it has synchronized.
    unsafe { kernel.launch(launch, stream, &AddOne { pointer, words, reserved: 0 }) }
}

fn plus(bytes: &[u8], addend: u32) -> Vec<u8> {
    bytes
        .chunks_exact(4)
        .flat_map(|word| {
            let word = [word[0], word[1], word[2], word[3]];
            u32::from_le_bytes(word).wrapping_add(addend).to_le_bytes()
        })
        .collect()
}

fn other_thread(device: &Device) -> Outcome {
    let kernel = Module::load(device, ADD_ONE)?.kernel("add_one", 0)?;
    let stream = Stream::new(device)?;
    let data = random_bytes(4096)?;
    let buffer = DeviceBuffer::from_host(&data, &stream)?;
    let read = thread::spawn(move || {
        add_one(&kernel, buffer.pointer(), 1024, &stream)?;
        buffer.to_host(&stream)
        // Kernel, stream and buffer are dropped here.
    })
    .join()
    .map_err(|_| "the thread panicked")??;
    ensure!(read == plus(&data, 1), "wrong words");
    Ok(())
}

fn two_threads(device: &Device) -> Outcome {
    let kernel = &Module::load(device, ADD_ONE)?.kernel("add_one", 0)?;
    let work = move || -> Result<(), String> {
        let attempt = || -> ringseal::Result<bool> {
            let stream = Stream::new(kernel_device(kernel))?;
            let data: Vec<u8> = (0..1u32 << 16).flat_map(u32::to_le_bytes).collect();
            let buffer = DeviceBuffer::from_host(&data, &stream)?;
            for _ in 0..200 {
                add_one(kernel, buffer.pointer(), 1 << 16, &stream)?;
            }
            Ok(buffer.to_host(&stream)? == plus(&data, 200))
        };
        match attempt() {
            Ok(true) => Ok(()),
            Ok(false) => Err("wrong words".into()),
            Err(error) => Err(error.to_string()),
        }
    };
    thread::scope(|scope| {
        let threads = [scope.spawn(work), scope.spawn(work)];
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| "a thread panicked".to_owned())?)
    })?;
    Ok(())
}

fn kernel_device(kernel: &Kernel) -> &Device {
    kernel.module().device()
}

fn outlive(_: &Device) -> Outcome {
    let device = Device::open(0)?;
    let stream = Stream::new(&device)?;
    let data = random_bytes(1 << 20)?;
    let buffer = DeviceBuffer::from_host(&data, &stream)?;
    let secret = DeviceBuffer::secret(&device, 4096)?;
    let kernel = Module::load(&device, ADD_ONE)?.kernel("add_one", 0)?;
    drop(device);
    add_one(&kernel, buffer.pointer(), 1 << 18, &stream)?;
    ensure!(buffer.to_host(&stream)? == plus(&data, 1), "wrong words");
    drop(stream);
    drop(secret);
    Ok(())
}

fn second_handle(device: &Device) -> Outcome {
    let stream = Stream::new(device)?;
    let mut buffer = DeviceBuffer::new(device, 1 << 16)?;
    // The last GPU: another one where there are several.
    let other = Device::open(Device::count()? - 1)?;
    let other_stream = Stream::new(&other)?;
    let other_buffer = DeviceBuffer::from_host(&[7; 1 << 16], &other_stream)?;
    let data = random_bytes(1 << 16)?;
    buffer.write(0, &data, &stream)?;
    ensure!(buffer.to_host(&stream)? == data, "wrong bytes on the first device");
    ensure!(other_buffer.to_host(&other_stream)? == [7; 1 << 16], "wrong bytes on the second device");
    Ok(())
}

fn primary_context(device: &Device) -> Outcome {
    let (mut own, mut current, mut primary) = (null_mut(), null_mut(), null_mut());
    let mut handle = 0;
    let buffer = DeviceBuffer::new(device, 16)?;
    let mut owner: sys::CUcontext = null_mut();
    // SAFETY: a driver context that this test makes, makes current, and destroys; all pointers are valid for the writes.
    unsafe {
        sys::cuDeviceGet(&mut handle, 0).result()?;
        sys::cuDevicePrimaryCtxRetain(&mut primary, handle).result()?;
        let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_CONTEXT;
        sys::cuPointerGetAttribute((&raw mut owner).cast(), attribute, buffer.pointer()).result()?;
        sys::cuCtxCreate_v4(&mut own, null_mut(), 0, handle).result()?;
    }
    let work = || -> ringseal::Result<()> {
        let stream = Stream::new(device)?;
        DeviceBuffer::from_host(&[1; 64], &stream)?.to_host(&stream)?;
        Ok(())
    };
    let outcome = work();
    // SAFETY: as above.
    unsafe {
        sys::cuCtxGetCurrent(&mut current).result()?;
        sys::cuCtxDestroy_v2(own).result()?;
        sys::cuDevicePrimaryCtxRelease_v2(handle).result()?;
    }
    outcome?;
    ensure!(owner == primary, "the buffer is not in the primary context");
    ensure!(current == own, "another context was left current");
    Ok(())
}

fn borrowed_stream(device: &Device) -> Outcome {
    let kernel = Module::load(device, ADD_ONE)?.kernel("add_one", 0)?;
    // SAFETY: null is the default stream, which always exists.
    let stream = unsafe { Stream::borrowed(device, null_mut()) };
    let data = random_bytes(4000)?;
    let buffer = DeviceBuffer::from_host(&data, &stream)?;
    add_one(&kernel, buffer.pointer(), 1000, &stream)?;
    ensure!(buffer.to_host(&stream)? == plus(&data, 1), "wrong words");
    Ok(())
}

fn pinned(device: &Device) -> Outcome {
    use std::sync::atomic::Ordering;
    let kernel = Module::load(device, ADD_ONE)?.kernel("add_one", 0)?;
    let stream = Stream::new(device)?;
    let flags = HostBuffer::new(device, 8)?;
    flags.words()[1].store(41, Ordering::Release);
    add_one(&kernel, flags.pointer(), 2, &stream)?;
    stream.synchronize()?;
    let words: Vec<u32> = flags.words().iter().map(|word| word.load(Ordering::Acquire)).collect();
    ensure!(words == [1, 42], "{words:?}");
    Ok(())
}

fn graph(device: &Device) -> Outcome {
    let kernel = Module::load(device, ADD_ONE)?.kernel("add_one", 0)?;
    let stream = Stream::new(device)?;
    let data = random_bytes(4096)?;
    let buffer = DeviceBuffer::from_host(&data, &stream)?;
    let mut graph = stream.capture(|stream| {
        add_one(&kernel, buffer.pointer(), 1024, stream)?;
        add_one(&kernel, buffer.pointer(), 1024, stream)
    })?;
    ensure!(buffer.to_host(&stream)? == data, "the capture ran the work");
    for _ in 0..5 {
        // SAFETY: `buffer` is alive until the synchronizing read below.
        unsafe { graph.launch(&stream)? };
    }
    ensure!(buffer.to_host(&stream)? == plus(&data, 10), "wrong words");
    Ok(())
}

fn failed_capture(device: &Device) -> Outcome {
    let stream = Stream::new(device)?;
    let refused = stream.capture(|_| Err(Error::InvalidArgument("no".into())));
    ensure!(matches!(refused, Err(Error::InvalidArgument(_))), "{refused:?}");
    ensure!(stream.capture(Stream::synchronize).is_err(), "waiting cannot be captured");
    let data = random_bytes(64)?;
    ensure!(DeviceBuffer::from_host(&data, &stream)?.to_host(&stream)? == data, "the stream is unusable");
    Ok(())
}

fn jit_cache(_: &Device) -> Outcome {
    // Each compiles the kernels anew: at once, to wait less.
    let started: Vec<_> = [("CUDA_CACHE_DISABLE", "1"), ("CUDA_CACHE_PATH", "/proc/nowhere")]
        .into_iter()
        .map(|(variable, value)| {
            let child = Command::new(std::env::current_exe()?)
                .args(["ctr::short", "--exact"])
                .env(variable, value)
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()?;
            Ok((variable, value, child, Instant::now()))
        })
        .collect::<std::io::Result<_>>()?;
    for (variable, value, child, start) in started {
        let output = child.wait_with_output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        ensure!(output.status.success() && text.contains("1 passed"), "{variable}={value}: {output:?}");
        println!("ended with {variable}={value} within {:.2} s", start.elapsed().as_secs_f64());
    }
    Ok(())
}

fn broken_ptx(device: &Device) -> Outcome {
    let text = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry f() { nonsense.u32 %r1; }\n";
    match Module::load(device, text.as_bytes()) {
        Err(Error::Cuda(message)) => ensure!(message.contains("line 4"), "no log in: {message}"),
        other => return Err(format!("{other:?}").into()),
    }
    let new = Module::load(device, b".version 99.0\n.target sm_80\n.address_size 64\n");
    ensure!(matches!(&new, Err(Error::NoDevice(text)) if text.contains("PTX 99.0")), "{new:?}");
    Ok(())
}

fn wrong_parameters(device: &Device) -> Outcome {
    let module = Module::load(device, ADD_ONE)?;
    ensure!(module.kernel("no_such_kernel", 0).is_err(), "an unknown kernel was found");
    let kernel = module.kernel("add_one", 0)?;
    let stream = Stream::new(device)?;
    // SAFETY: refused before the launch.
    let refused = unsafe { kernel.launch(Launch { blocks: 1, threads: 32 }, &stream, &0u32) };
    ensure!(matches!(refused, Err(Error::InvalidArgument(_))), "{refused:?}");
    // SAFETY: an empty grid is never launched.
    unsafe { kernel.launch(Launch { blocks: 0, threads: 32 }, &stream, &[0u64; 2])? };
    stream.synchronize()?;
    Ok(())
}

fn ranges(device: &Device) -> Outcome {
    let stream = Stream::new(device)?;
    let mut buffer = DeviceBuffer::new(device, 16)?;
    for (offset, bytes) in [(0, 17), (16, 1), (usize::MAX, 2)] {
        ensure!(buffer.write(offset, &vec![0; bytes], &stream).is_err(), "{bytes} at {offset}");
    }
    let empty = DeviceBuffer::new(device, 0)?;
    ensure!(empty.pointer() == 0 && empty.to_host(&stream)?.is_empty(), "an empty buffer");
    Ok(())
}
