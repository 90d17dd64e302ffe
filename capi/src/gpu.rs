//! Collectives on device memory, sealed by the GPUs themselves.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::{Mutex, TryLockError};

use ringseal::collective::{Partition, Request};
use ringseal::cuda::{
    Collectives, Device, GpuCommunicator as Peer, GpuNodes, GpuOptions, KeystreamAhead, NcclCommunicator,
    RankBuffers, Stream,
};

use crate::argument;
use crate::communicator::{Callback, Carrier, Gather, GroupOptions, check_ranks, read, secret};
use crate::status::{Failure, Status, guard, release};

/// One rank of a group of processes with GPUs. One thread at a time may use a handle: a second one gets
/// RINGSEAL_STATUS_BUSY.
pub struct GpuCommunicator {
    device: Device,
    rank: usize,
    ranks: usize,
    collectives: Mutex<Box<dyn Collectives>>,
}

/// Joins a group of `ranks` processes as rank `rank`, on the GPU that CUDA numbers `device`, in its primary context, and
/// writes the handle to `out`. `max_bytes` is the length of the longest vector that will be reduced, the same on all ranks;
/// mailboxes take four times as much device memory, by a tree six times, by an exchange twice for each other rank. Otherwise
/// as ringseal_communicator_create(); the options' backend and host have no meaning.
///
/// By default the processes are of one machine, each with a GPU or a share of one. With RINGSEAL_TRANSPORT_NCCL as the
/// options' transport they are on any machines that NCCL reaches, each with a GPU of its own: schedules are then rings, and the
/// exchange of two ranks, the mailboxes take twice as much memory, no keystream is kept, and nothing can be captured in a graph. The call fails on all ranks, with
/// RINGSEAL_STATUS_UNSUPPORTED on one that finds no NCCL, and with RINGSEAL_STATUS_INVALID_ARGUMENT where two ranks are on one
/// GPU. With node_ranks too there are all-reduces only, which wait until they are done.
///
/// # Safety
/// Pointers are NULL or valid for what they are described to hold. `gather` may be called with `user` as long as the
/// handle is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_communicator_create(
    secret_bytes: *const u8,
    rank: usize,
    ranks: usize,
    device: usize,
    max_bytes: usize,
    group_options: *const GroupOptions,
    gather: Gather,
    user: *mut c_void,
    out: *mut *mut GpuCommunicator,
) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (out, secret, given, (options, host), (keystream, sm_budget, carrier)) = unsafe {
            let out = argument::place("out", out)?;
            out.write(std::ptr::null_mut());
            let given = read(group_options)?;
            let common = given.common()?;
            let of_gpus = (given.keystream()?, given.sm_budget()?, given.carrier()?);
            (out, secret(secret_bytes)?, given, common, of_gpus)
        };
        let gather = gather.ok_or_else(|| Failure::argument("gather is null"))?;
        check_ranks(ranks)?;
        if rank >= ranks {
            return Err(Failure::argument(format!("rank {rank}: there are {ranks} ranks")));
        }
        if carrier != Carrier::Peer && keystream.is_some() {
            return Err(Failure::argument(
                "options->keystream_collectives with RINGSEAL_TRANSPORT_NCCL: none is kept",
            ));
        }
        if let Carrier::NcclBetweenNodes(node_ranks) = carrier
            && !ranks.is_multiple_of(node_ranks)
        {
            let what =
                format!("options->node_ranks is {node_ranks}: nodes of so many don't divide {ranks} ranks");
            return Err(Failure::argument(what));
        }
        let device = Device::open(device)?;
        let options = |ranks| GpuOptions {
            crypto: options.crypto,
            algorithm: match given.schedule {
                // The GPU's default is not the CPU's.
                0 => GpuOptions::fastest_algorithm(ranks),
                _ => options.algorithm,
            },
            max_bytes,
            timeout: options.timeout,
            key_bytes: options.key_bytes,
            keystream,
            sm_budget,
            ..GpuOptions::default()
        };
        let bootstrap = Box::new(Callback { gather, user, ranks, host });
        let collectives: Box<dyn Collectives> = match carrier {
            Carrier::Peer => Box::new(Peer::new(&secret, rank, ranks, bootstrap, &device, options(ranks))?),
            Carrier::Nccl => {
                Box::new(NcclCommunicator::new(&secret, rank, ranks, bootstrap, &device, options(ranks))?)
            }
            Carrier::NcclBetweenNodes(node_ranks) => {
                let [inside, between] = [node_ranks, ranks / node_ranks].map(options);
                let place = [rank, ranks];
                Box::new(GpuNodes::over_nccl_by_gpus(
                    &secret, place, node_ranks, bootstrap, &device, inside, between,
                )?)
            }
        };
        let handle = Box::new(GpuCommunicator { device, rank, ranks, collectives: Mutex::new(collectives) });
        // SAFETY: checked above.
        unsafe { out.write(Box::into_raw(handle)) };
        Ok(())
    })
}

/// Leaves the group at once and frees the handle, after this rank's own work on the GPU. NULL is allowed. The other ranks'
/// collectives fail: after ones that went well, call ringseal_gpu_communicator_close().
///
/// # Safety
/// NULL, or a handle that is not destroyed yet and in no use.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_communicator_destroy(communicator: *mut GpuCommunicator) {
    // SAFETY: the caller's contract.
    unsafe { release(communicator) };
}

/// Leaves in good order, together with all other ranks, and frees the handle, also when it fails.
///
/// # Safety
/// NULL, or a handle that is not destroyed yet and in no use.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_communicator_close(communicator: *mut GpuCommunicator) -> Status {
    guard(|| {
        if communicator.is_null() {
            return Err(Failure::argument("communicator is null"));
        }
        // SAFETY: made by `Box::into_raw`; the caller gives it up.
        let communicator = unsafe { Box::from_raw(communicator) };
        let collectives = communicator.collectives.into_inner();
        Ok(collectives
            .map_err(|_| Failure::new(Status::Internal, "a call on this communicator panicked"))?
            .close()?)
    })
}

/// # Safety
/// Null or a valid handle.
unsafe fn with(
    communicator: *const GpuCommunicator,
    body: impl FnOnce(&mut dyn Collectives, &GpuCommunicator) -> Result<(), Failure>,
) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        let communicator = unsafe { argument::reference("communicator", communicator)? };
        match communicator.collectives.try_lock() {
            Ok(mut collectives) => body(collectives.as_mut(), communicator),
            Err(TryLockError::WouldBlock) => {
                Err(Failure::new(Status::Busy, "another thread is using this communicator"))
            }
            Err(TryLockError::Poisoned(_)) => {
                Err(Failure::new(Status::Internal, "a call on this communicator panicked; destroy it"))
            }
        }
    })
}

/// What a call gives and gets, of whole vectors of `count` elements.
struct Vectors {
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: u32,
}

/// Refuses addresses that can't be right, before anything is queued. `given` and `wanted` are the elements of the vector that
/// lie at input and output.
fn check(vectors: &Vectors, given: Range<usize>, wanted: Range<usize>, size: usize) -> Result<(), Failure> {
    let parts = [(vectors.input.addr(), given, "input"), (vectors.output.addr(), wanted, "output")];
    for (address, elements, name) in &parts {
        if *address == 0 && !elements.is_empty() {
            return Err(Failure::argument(format!("{name} is null, but has elements")));
        }
        if !address.is_multiple_of(size) {
            return Err(Failure::argument(format!("{name} is not aligned to an element")));
        }
    }
    let [(input, given, _), (output, wanted, _)] = parts;
    // In place, all elements that both have lie at the same address.
    let in_place = input.wrapping_sub(given.start * size) == output.wrapping_sub(wanted.start * size);
    let apart = input.saturating_add(given.len() * size) <= output
        || output.saturating_add(wanted.len() * size) <= input
        || given.is_empty()
        || wanted.is_empty();
    match in_place || apart {
        true => Ok(()),
        false => Err(Failure::argument(
            "input and output overlap: each part must lie where the other's vector has it, or apart from it",
        )),
    }
}

/// # Safety
/// The communicator is null or a handle; the rest is as the collectives say.
unsafe fn queue(
    communicator: *const GpuCommunicator,
    vectors: Vectors,
    request: impl FnOnce() -> Result<Request, Failure>,
    stream: *mut c_void,
) -> Status {
    // SAFETY: the caller's contract.
    unsafe {
        with(communicator, |collectives, GpuCommunicator { device, rank, ranks, .. }| {
            let (dtype, request) = (argument::dtype(vectors.dtype)?, request()?);
            argument::length(vectors.count, dtype)?;
            let (whole, own) = (0..vectors.count, Partition::new(vectors.count, *ranks).range(*rank));
            let (given, wanted) = match request {
                Request::AllReduce(_) => (whole.clone(), whole),
                Request::ReduceScatter(_) => (whole, own),
                Request::AllGather => (own, whole),
                Request::Broadcast { root } if root == *rank => (whole.clone(), whole),
                // Its input is not looked at.
                Request::Broadcast { .. } => (0..0, whole),
            };
            check(&vectors, given, wanted, dtype.size())?;
            let buffers =
                RankBuffers { input: vectors.input.addr() as u64, output: vectors.output.addr() as u64 };
            let stream = Stream::borrowed(device, stream.cast());
            Ok(collectives.run(request, &[buffers], vectors.count, dtype, &[&stream])?)
        })
    }
}

/// Queues an all-reduce of `count` elements in device memory on the CUDA stream `stream` (a cudaStream_t or CUstream; NULL
/// is the default stream), and doesn't wait. A rank's collectives run one after another, on whatever streams they are; of a
/// captured graph's launches the caller must see to that. `input` and `output` may be the same address or apart. When the stream has
/// passed it, ringseal_gpu_outcome() says whether it went well; until that has said so, don't use `output`.
///
/// # Safety
/// Both hold `count` elements on the rank's device, aligned to an element, and are left alone until the stream has passed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_all_reduce(
    communicator: *const GpuCommunicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: u32,
    op: u32,
    stream: *mut c_void,
) -> Status {
    let vectors = Vectors { input, output, count, dtype };
    // SAFETY: the caller's contract.
    unsafe { queue(communicator, vectors, || Ok(Request::AllReduce(argument::op(op)?)), stream) }
}

/// As ringseal_gpu_all_reduce(), but `output` gets this rank's chunk alone: ringseal_chunk() says which elements. In place,
/// `output` is the chunk's address in `input`, whose other elements stay.
///
/// # Safety
/// As ringseal_gpu_all_reduce(); `output` holds a chunk.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_reduce_scatter(
    communicator: *const GpuCommunicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: u32,
    op: u32,
    stream: *mut c_void,
) -> Status {
    let vectors = Vectors { input, output, count, dtype };
    // SAFETY: the caller's contract.
    unsafe { queue(communicator, vectors, || Ok(Request::ReduceScatter(argument::op(op)?)), stream) }
}

/// Queues the gathering of a vector of `count` elements in every rank's `output`; each rank gives its chunk of it at `input`:
/// ringseal_chunk() says which elements. In place, `input` is the chunk's address in `output`. Otherwise as
/// ringseal_gpu_all_reduce().
///
/// # Safety
/// As ringseal_gpu_all_reduce(); `input` holds a chunk.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_all_gather(
    communicator: *const GpuCommunicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: u32,
    stream: *mut c_void,
) -> Status {
    let vectors = Vectors { input, output, count, dtype };
    // SAFETY: the caller's contract.
    unsafe { queue(communicator, vectors, || Ok(Request::AllGather), stream) }
}

/// Queues the copying of `count` elements at rank `root`'s `input` to every rank's `output`. The other ranks' `input` is not
/// looked at and may be NULL. Otherwise as ringseal_gpu_all_reduce().
///
/// # Safety
/// As ringseal_gpu_all_reduce().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_broadcast(
    communicator: *const GpuCommunicator,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    dtype: u32,
    root: usize,
    stream: *mut c_void,
) -> Status {
    let vectors = Vectors { input, output, count, dtype };
    // SAFETY: the caller's contract.
    unsafe { queue(communicator, vectors, || Ok(Request::Broadcast { root }), stream) }
}

/// Whether keystream made ahead of time shortens a training's iterations whose all-reduces take `sm_budget` of a GPU's
/// `multiprocessors` (the options' sm_budget; 0: all): where they are at most a quarter, as measured beside matrix products on
/// two H200s. A GPU that idles between iterations can gain with more.
#[unsafe(no_mangle)]
pub extern "C" fn ringseal_keystream_pays(sm_budget: usize, multiprocessors: usize) -> bool {
    let number = |of: usize| u32::try_from(of).unwrap_or(u32::MAX);
    KeystreamAhead::pays((sm_budget != 0).then(|| number(sm_budget)), number(multiprocessors))
}

/// Has keystream made, on a stream of low priority of the library's own, for the next `count` collectives: all-reduces of
/// F32, F16 or BF16 sums or averages, of `bytes[0]`, `bytes[1]`, ... bytes, in this order. Doesn't wait. Writes to `made`,
/// unless it is NULL, for how many of them, from the first on, there is or will be keystream: no more than the options keep,
/// and none once a collective was captured in a graph, until the communicator is rekeyed.
///
/// A ring uses it when all of the collective's is ready as it is launched, an exchange what is ready when it gets to a record;
/// else it is made on the way. What was made for another collective or length is wiped unused, and what earlier collectives
/// have used is wiped before, if they are over; it takes room until then. Results are the same, and other ranks need not do
/// it. The options must keep keystream (keystream_collectives), which sealed rings and relay rings can, and exchanges of two
/// ranks.
///
/// # Safety
/// Pointers are NULL or valid; `bytes` holds `count` lengths.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_make_keystream(
    communicator: *const GpuCommunicator,
    bytes: *const usize,
    count: usize,
    made: *mut usize,
) -> Status {
    // SAFETY: the caller's contract.
    unsafe {
        with(communicator, |collectives, _| {
            let bytes = argument::numbers("bytes", bytes, count)?;
            let made = if made.is_null() { None } else { Some(argument::place("made", made)?) };
            let keystreams = collectives.make_keystream(bytes)?;
            if let Some(made) = made {
                made.write(keystreams);
            }
            Ok(())
        })
    }
}

/// Waits until all keystream that was asked for is made, collectives with keystream are over, and all that was used is wiped.
///
/// # Safety
/// NULL or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_wait_for_keystream(communicator: *const GpuCommunicator) -> Status {
    // SAFETY: the caller's contract.
    unsafe { with(communicator, |collectives, _| Ok(collectives.wait_for_keystream()?)) }
}

/// Writes how many records so far, modulo 2^32, found no keystream, of this rank's collectives with some. Wait for the
/// collectives' stream first.
///
/// # Safety
/// Pointers are NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_keystream_misses(
    communicator: *const GpuCommunicator,
    misses: *mut u32,
) -> Status {
    // SAFETY: the caller's contract.
    unsafe {
        with(communicator, |collectives, _| {
            let misses = argument::place("misses", misses)?;
            misses.write(collectives.keystream_misses()?);
            Ok(())
        })
    }
}

/// Says how the collectives went that the rank's stream has passed: synchronize the stream first. With
/// RINGSEAL_TRANSPORT_NCCL don't: it waits for the collectives so far itself, and gives up on a rank that stays away, for
/// which the stream would wait for ever. After a failure the outputs are wiped, and the communicator carries no data until it
/// is rekeyed.
///
/// # Safety
/// NULL or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_outcome(communicator: *const GpuCommunicator) -> Status {
    // SAFETY: the caller's contract.
    unsafe { with(communicator, |collectives, _| Ok(collectives.outcome()?)) }
}

/// As ringseal_communicator_rekey(), after all work on the device.
///
/// # Safety
/// NULL or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_communicator_rekey(communicator: *const GpuCommunicator) -> Status {
    // SAFETY: the caller's contract.
    unsafe { with(communicator, |collectives, _| Ok(collectives.rekey()?)) }
}

/// Writes whether the communicator must be rekeyed because a collective has failed.
///
/// # Safety
/// Pointers are NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringseal_gpu_communicator_poisoned(
    communicator: *const GpuCommunicator,
    poisoned: *mut bool,
) -> Status {
    // SAFETY: the caller's contract.
    unsafe {
        with(communicator, |collectives, _| {
            argument::place("poisoned", poisoned)?.write(collectives.is_poisoned());
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a call with these addresses, in bytes, would be queued.
    fn passes(input: usize, given: Range<usize>, output: usize, wanted: Range<usize>) -> bool {
        let (input, output) = (std::ptr::without_provenance(input), std::ptr::without_provenance_mut(output));
        check(&Vectors { input, output, count: 10, dtype: 0 }, given, wanted, 4).is_ok()
    }

    #[test]
    fn parts_lie_in_place_or_apart() {
        // An all-reduce.
        assert!(
            passes(400, 0..10, 400, 0..10)
                && passes(400, 0..10, 440, 0..10)
                && passes(440, 0..10, 400, 0..10)
        );
        assert!(
            !passes(400, 0..10, 404, 0..10)
                && !passes(400, 0..10, 436, 0..10)
                && !passes(436, 0..10, 400, 0..10)
        );
        // A reduce-scatter of the second of two ranks, and an all-gather.
        assert!(
            passes(400, 0..10, 420, 5..10)
                && passes(400, 0..10, 440, 5..10)
                && passes(400, 0..10, 380, 5..10)
        );
        assert!(!passes(400, 0..10, 400, 5..10) && !passes(400, 0..10, 424, 5..10));
        assert!(passes(420, 5..10, 400, 0..10) && !passes(400, 5..10, 400, 0..10));
        // Nothing, nowhere, and not quite.
        assert!(passes(0, 0..0, 400, 0..10) && passes(0, 0..0, 0, 0..0) && passes(404, 0..0, 400, 0..10));
        assert!(!passes(0, 0..10, 400, 0..10) && !passes(400, 0..10, 0, 0..10));
        assert!(!passes(402, 0..10, 480, 0..10) && !passes(400, 0..10, 482, 0..10));
    }
}
