//! Records carried by NCCL. One GPU shows that it loads, joins, moves bytes and fails as it should; two carry collectives.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ringseal::channel::{Crypto, GroupSecret, KeyLength};
use ringseal::collective::{
    Algorithm, Bootstrap, Buffers, Communicator, InProcess, Nodes, Options, Partition, Rail, Request,
};
use ringseal::cuda::{
    Collectives, Device, DeviceBuffer, GpuNodes, GpuOptions, LaunchForm, NcclCommunicator, NcclExchange,
    RankBuffers, Stream,
};
use ringseal::transport::lockstep::{Exchange, Lockstep};
use ringseal::{Dtype, Error, ReduceOp};

use crate::ring::gpus;
use crate::support::{GpuTest, HostTest, Outcome, ensure, random_bytes};
use crate::turns::alone;

pub(crate) const TESTS: &[GpuTest] = &[
    ("nccl::a_rank_alone_sends_itself_bytes", bytes_to_itself),
    ("nccl::a_group_of_one_joins_and_reduces", group_of_one),
    ("nccl::two_ranks_on_one_gpu_are_refused", one_gpu_for_two),
    ("nccl::a_rank_that_never_comes_is_an_error_at_the_deadline", missing_rank),
    ("nccl::device_memory::a_group_of_one_joins_and_reduces", device_group_of_one),
    ("nccl::device_memory::two_ranks_on_one_gpu_are_refused", device_one_gpu_for_two),
];

/// For these there must be two GPUs as well.
pub(crate) const ACROSS_GPUS_TESTS: &[HostTest] = &[
    ("nccl::across_gpus::collectives_are_right_by_every_algorithm", collectives),
    ("nccl::across_gpus::changed_bytes_fail_all_ranks_and_a_new_session_works", tamper),
    ("nccl::across_gpus::a_late_rank_fails_all_at_the_deadline", late_rank),
    ("nccl::across_gpus::nodes_of_one_rank_each", nodes),
    ("nccl::device_memory::across_gpus::collectives_are_right_by_every_algorithm", device_collectives),
    (
        "nccl::device_memory::across_gpus::a_changed_byte_fails_all_ranks_and_a_new_session_works",
        device_tamper,
    ),
    ("nccl::device_memory::across_gpus::nodes_of_one_rank_each", device_nodes),
    ("nccl::device_memory::across_gpus::a_rank_that_stays_away_is_an_error_at_the_deadline", device_absent),
];

/// Whether NCCL is found.
pub(crate) fn available() -> bool {
    !matches!(NcclExchange::id(), Err(Error::Unsupported { .. }))
}

const LONG: Duration = Duration::from_secs(60);
const CAPACITY: usize = 1 << 20;
/// Longer than what one exchange carries, in f32.
const COUNT: usize = 5_000_003;

fn options(timeout: Duration) -> Options {
    Options { timeout, ..Options::default() }
}

fn bytes_to_itself(device: &Device) -> Outcome {
    let _alone = alone();
    let end = Instant::now() + LONG;
    let mut link = NcclExchange::join(&NcclExchange::id()?, [0, 1], device, CAPACITY, end)?;
    let go_on = AtomicBool::new(false);
    for bytes in [1, 15, 4096, 100_001, CAPACITY, 0, 7] {
        let sent = random_bytes(bytes)?;
        let mut received = [vec![0; bytes]];
        link.exchange(std::slice::from_ref(&sent), &mut received, &go_on)?;
        ensure!(received[0] == sent, "{bytes} bytes came as others");
    }
    let long = link.exchange(&[vec![0; CAPACITY + 1]], &mut [Vec::new()], &go_on);
    ensure!(matches!(long, Err(Error::InvalidArgument(_))), "more than the capacity: {long:?}");
    for (id, place) in [(vec![0; 5], [0, 1]), (NcclExchange::id()?, [1, 1])] {
        let refused = NcclExchange::join(&id, place, device, CAPACITY, end);
        ensure!(matches!(refused, Err(Error::InvalidArgument(_))), "{refused:?}");
    }
    Ok(())
}

fn group_of_one(device: &Device) -> Outcome {
    let _alone = alone();
    let bootstrap = Box::new(InProcess::group(1).remove(0));
    let mut rank = Communicator::over_nccl(&GroupSecret::random()?, 0, 1, bootstrap, device, &options(LONG))?;
    let mut vector = [1.5_f32, -2.0];
    rank.all_reduce_in_place(&mut vector, ReduceOp::Avg)?;
    ensure!(vector == [1.5, -2.0], "{vector:?}");
    rank.rekey()?;
    Ok(rank.all_reduce_in_place(&mut vector, ReduceOp::Sum)?)
}

/// Both ranks hear of it at once.
fn one_gpu_for_two(device: &Device) -> Outcome {
    let _alone = alone();
    let start = Instant::now();
    let failures = on_each(vec![device.clone(); 2], |place, bootstrap, device| {
        let secret = GroupSecret::from_bytes([9; 32]);
        match Communicator::over_nccl(&secret, place[0], place[1], bootstrap, device, &options(LONG)) {
            Ok(_) => Err("NCCL took two ranks on one GPU".into()),
            Err(error) => Ok(error.to_string()),
        }
    })?;
    ensure!(start.elapsed() < LONG / 2, "it took {:?}: {failures:?}", start.elapsed());
    ensure!(failures.iter().all(|text| text.contains("ranks 0 and 1 are on one GPU")), "{failures:?}");
    Ok(())
}

fn missing_rank(device: &Device) -> Outcome {
    let _alone = alone();
    let start = Instant::now();
    let end = start + Duration::from_secs(2);
    let joined = NcclExchange::join(&NcclExchange::id()?, [0, 2], device, CAPACITY, end);
    ensure!(matches!(joined, Err(Error::Handshake(_))), "{joined:?}");
    ensure!(start.elapsed() < Duration::from_secs(10), "it took {:?}", start.elapsed());
    Ok(())
}

/// `work` of each rank, given its number and how many there are, in a thread of its own.
fn on_each<T: Send>(
    devices: Vec<Device>,
    work: impl Fn([usize; 2], Box<dyn Bootstrap>, &Device) -> Result<T, Box<dyn std::error::Error>> + Sync,
) -> Result<Vec<T>, Box<dyn std::error::Error>> {
    let ranks = devices.len();
    let outcomes: Vec<Result<T, String>> = std::thread::scope(|scope| {
        let work = &work;
        let threads =
            devices.iter().zip(InProcess::group(ranks)).enumerate().map(|(rank, (device, bootstrap))| {
                scope.spawn(move || {
                    work([rank, ranks], Box::new(bootstrap), device)
                        .map_err(|error| format!("rank {rank}: {error}"))
                })
            });
        let threads: Vec<_> = threads.collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err("panicked".into()))).collect()
    });
    Ok(outcomes.into_iter().collect::<Result<_, _>>()?)
}

fn value(rank: usize, at: usize) -> u32 {
    (at as u32).wrapping_mul(0x9e37_79b9) ^ (rank as u32) << 20
}

fn vector(rank: usize, count: usize) -> Vec<u32> {
    (0..count).map(|at| value(rank, at)).collect()
}

/// The sum of all ranks' vectors.
fn check(sums: &[u32], ranks: usize, what: &str) -> Outcome {
    for (at, &found) in sums.iter().enumerate() {
        let right = (0..ranks).fold(0_u32, |sum, rank| sum.wrapping_add(value(rank, at)));
        ensure!(found == right, "{what}: element {at} is {found}, not {right}");
    }
    Ok(())
}

fn collectives() -> Outcome {
    let _alone = alone();
    let secret = GroupSecret::random()?;
    on_each(gpus()?, |[rank, ranks], bootstrap, device| {
        let mut group = Communicator::over_nccl(&secret, rank, ranks, bootstrap, device, &options(LONG))?;
        for algorithm in Algorithm::ALL {
            group.set_algorithm(algorithm);
            for count in [0, 1, 1000, COUNT] {
                let start = Instant::now();
                let mut sums = vector(rank, count);
                group.all_reduce_in_place(&mut sums, ReduceOp::Sum)?;
                let time = start.elapsed();
                check(&sums, ranks, algorithm.name())?;
                if rank == 0 && count == COUNT {
                    println!(
                        "{}: {} bytes in {:.1} ms",
                        algorithm.name(),
                        4 * count,
                        1e3 * time.as_secs_f64()
                    );
                }
            }
            let (root, mut given) = (ranks - 1, vector(rank, 70_000));
            group.broadcast_in_place(&mut given, root)?;
            ensure!(given == vector(root, 70_000), "{}: a broadcast is wrong", algorithm.name());
        }
        group.rekey()?;
        let mut sums = vector(rank, 1000);
        group.all_reduce_in_place(&mut sums, ReduceOp::Sum)?;
        check(&sums, ranks, "after a new session")
    })?;
    Ok(())
}

/// Changes a bit of the next long bytes.
struct Tamper {
    link: NcclExchange,
    armed: &'static AtomicBool,
}

impl Exchange for Tamper {
    fn rank(&self) -> usize {
        self.link.rank()
    }

    fn ranks(&self) -> usize {
        self.link.ranks()
    }

    fn capacity(&self) -> usize {
        self.link.capacity()
    }

    fn exchange(
        &mut self,
        outgoing: &[Vec<u8>],
        incoming: &mut [Vec<u8>],
        stop: &AtomicBool,
    ) -> ringseal::Result<()> {
        self.link.exchange(outgoing, incoming, stop)?;
        let long = incoming.iter_mut().find(|bytes| bytes.len() > 1000);
        if let Some(bytes) = long
            && self.armed.swap(false, Ordering::Relaxed)
        {
            bytes[500] ^= 1;
        }
        Ok(())
    }
}

fn tamper() -> Outcome {
    static ARMED: AtomicBool = AtomicBool::new(false);
    let _alone = alone();
    ARMED.store(true, Ordering::Relaxed);
    let (secret, id) = (GroupSecret::random()?, NcclExchange::id()?);
    on_each(gpus()?, |[rank, ranks], bootstrap, device| {
        let link = NcclExchange::join(&id, [rank, ranks], device, CAPACITY, Instant::now() + LONG)?;
        let link = Lockstep::new(Tamper { link, armed: &ARMED })?;
        let mut group = Communicator::join(&secret, &options(LONG), Box::new(link), bootstrap)?;
        let mut sums = vector(rank, 1_000_000);
        let failure = group.all_reduce_in_place(&mut sums, ReduceOp::Sum);
        ensure!(matches!(failure, Err(Error::Record { .. })), "{failure:?}");
        ensure!(sums.iter().all(|&element| element == 0), "something is left after a failure");
        group.rekey()?;
        let mut sums = vector(rank, 1_000_000);
        group.all_reduce_in_place(&mut sums, ReduceOp::Sum)?;
        check(&sums, ranks, "after a failure")
    })?;
    Ok(())
}

fn late_rank() -> Outcome {
    let _alone = alone();
    let secret = GroupSecret::random()?;
    on_each(gpus()?, |[rank, ranks], bootstrap, device| {
        let mut group = Communicator::over_nccl(&secret, rank, ranks, bootstrap, device, &options(LONG))?;
        group.set_timeout(Duration::from_secs(1));
        if rank == 1 {
            std::thread::sleep(Duration::from_secs(3));
        }
        let (start, mut sums) = (Instant::now(), vector(rank, 100_000));
        let failure = group.all_reduce_in_place(&mut sums, ReduceOp::Sum);
        ensure!(matches!(failure, Err(Error::Deadline { .. })), "{failure:?}");
        ensure!(start.elapsed() < Duration::from_secs(3), "it took {:?}", start.elapsed());
        ensure!(sums.iter().all(|&element| element == 0), "something is left after a failure");
        group.set_timeout(LONG);
        group.rekey()?;
        let mut sums = vector(rank, 100_000);
        group.all_reduce_in_place(&mut sums, ReduceOp::Sum)?;
        check(&sums, ranks, "after a deadline")
    })?;
    Ok(())
}

fn nodes() -> Outcome {
    let _alone = alone();
    let secret = GroupSecret::random()?;
    on_each(gpus()?, |place, bootstrap, device| {
        let mut node = Nodes::join(
            &secret,
            place,
            1,
            bootstrap,
            |secret, [rank, ranks], bootstrap| {
                Communicator::new(secret, rank, ranks, bootstrap, &options(LONG))
            },
            |Rail { secret, node, nodes, bootstrap }| {
                Communicator::over_nccl(&secret, node, nodes, bootstrap, device, &options(LONG))
            },
        )?;
        let mut sums = vector(place[0], COUNT);
        node.all_reduce(ReduceOp::Sum, Dtype::U32, Buffers::InPlace(bytemuck::cast_slice_mut(&mut sums)))?;
        check(&sums, place[1], "nodes")
    })?;
    Ok(())
}

fn gpu_options(algorithm: Algorithm, crypto: Crypto) -> GpuOptions {
    GpuOptions { algorithm, crypto, max_bytes: 4 * COUNT, timeout: LONG, ..GpuOptions::default() }
}

/// A rank with a stream and buffers for vectors of up to [`COUNT`] elements.
struct OnDevice {
    group: NcclCommunicator,
    stream: Stream,
    input: DeviceBuffer,
    output: DeviceBuffer,
}

impl OnDevice {
    fn new(group: NcclCommunicator, device: &Device) -> ringseal::Result<Self> {
        let buffer = || DeviceBuffer::new(device, 4 * COUNT);
        Ok(Self { group, stream: Stream::new(device)?, input: buffer()?, output: buffer()? })
    }

    /// What a collective of `count` elements makes of `given`, in a vector of `wanted` elements that held others.
    fn run(
        &mut self,
        request: Request,
        given: &[u32],
        wanted: usize,
        count: usize,
    ) -> ringseal::Result<Vec<u32>> {
        self.input.write(0, bytemuck::cast_slice(given), &self.stream)?;
        self.output.fill(0xee, &self.stream)?;
        let buffers = RankBuffers { input: self.input.pointer(), output: self.output.pointer() };
        // SAFETY: the buffers hold `COUNT` elements, and are left alone until the outcome is known.
        unsafe { self.group.run(request, &[buffers], count, Dtype::U32, &[&self.stream])? };
        self.group.finish(&[&self.stream])?;
        self.result(wanted)
    }

    fn result(&self, wanted: usize) -> ringseal::Result<Vec<u32>> {
        let mut result = vec![0; wanted];
        self.output.read(0, bytemuck::cast_slice_mut(&mut result), &self.stream)?;
        Ok(result)
    }
}

fn device_group_of_one(device: &Device) -> Outcome {
    let _alone = alone();
    let secret = GroupSecret::random()?;
    let group = |options| {
        let bootstrap = Box::new(InProcess::group(1).remove(0));
        NcclCommunicator::new(&secret, 0, 1, bootstrap, device, options)
    };
    let options = gpu_options(Algorithm::RelayRing, Crypto::Gcm(KeyLength::Aes256));
    let persistent = group(GpuOptions { launch: LaunchForm::Persistent, ..options.clone() });
    ensure!(matches!(persistent, Err(Error::Unsupported { .. })), "{persistent:?}");
    let mut rank = OnDevice::new(group(options)?, device)?;
    for count in [0, 1, 70_000] {
        let given = vector(0, count);
        ensure!(
            rank.run(Request::AllReduce(ReduceOp::Sum), &given, count, count)? == given,
            "{count} elements"
        );
    }
    let mut captured = None;
    let buffers = RankBuffers { input: rank.input.pointer(), output: rank.output.pointer() };
    let (group, stream) = (&mut rank.group, &rank.stream);
    stream.capture(|stream| {
        // SAFETY: the buffers are long enough, and nothing else uses them.
        captured = Some(unsafe { group.all_reduce(&[buffers], 10, Dtype::U32, ReduceOp::Sum, &[stream]) });
        Ok(())
    })?;
    ensure!(matches!(captured, Some(Err(Error::InvalidArgument(_)))), "captured: {captured:?}");
    rank.group.rekey()?;
    ensure!(rank.run(Request::AllReduce(ReduceOp::Max), &[3, 1], 2, 2)? == [3, 1], "after a new session");
    Ok(Box::new(rank.group).close()?)
}

fn device_one_gpu_for_two(device: &Device) -> Outcome {
    let _alone = alone();
    let start = Instant::now();
    let failures = on_each(vec![device.clone(); 2], |[rank, ranks], bootstrap, device| {
        let secret = GroupSecret::from_bytes([9; 32]);
        let options = gpu_options(Algorithm::Ring, Crypto::None);
        match NcclCommunicator::new(&secret, rank, ranks, bootstrap, device, options) {
            Ok(_) => Err("NCCL took two ranks on one GPU".into()),
            Err(error) => Ok(error.to_string()),
        }
    })?;
    ensure!(start.elapsed() < LONG / 2, "it took {:?}: {failures:?}", start.elapsed());
    ensure!(failures.iter().all(|text| text.contains("ranks 0 and 1 are on one GPU")), "{failures:?}");
    Ok(())
}

/// Plain and sealed, each collective twice: in both halves of the mailboxes.
fn device_collectives() -> Outcome {
    let _alone = alone();
    let secret = GroupSecret::random()?;
    for algorithm in [Algorithm::Ring, Algorithm::RelayRing, Algorithm::Exchange] {
        for crypto in [Crypto::None, Crypto::Gcm(KeyLength::Aes128), Crypto::Gcm(KeyLength::Aes256)] {
            let devices = gpus()?;
            if algorithm == Algorithm::Exchange && devices.len() > 2 {
                continue;
            }
            on_each(devices, |[rank, ranks], bootstrap, device| {
                let options = gpu_options(algorithm, crypto);
                let group = NcclCommunicator::new(&secret, rank, ranks, bootstrap, device, options)?;
                let mut on_device = OnDevice::new(group, device)?;
                for count in [0, 1, 1000, 1000, COUNT, COUNT] {
                    let what = format!("{}, {crypto:?}, {count} elements", algorithm.name());
                    let own = Partition::new(count, ranks).range(rank);
                    let (given, whole) = (vector(rank, count), Request::AllReduce(ReduceOp::Sum));
                    let sums = on_device.run(whole, &given, count, count)?;
                    check(&sums, ranks, &what)?;
                    let part = Request::ReduceScatter(ReduceOp::Sum);
                    let chunk = on_device.run(part, &given, own.len(), count)?;
                    ensure!(chunk == sums[own], "{what}: a reduce-scatter is wrong");
                    let gathered = on_device.run(Request::AllGather, &chunk, count, count)?;
                    ensure!(gathered == sums, "{what}: an all-gather is wrong");
                    let root = ranks - 1;
                    let broadcast = on_device.run(Request::Broadcast { root }, &given, count, count)?;
                    ensure!(broadcast == vector(root, count), "{what}: a broadcast is wrong");
                }
                Ok(Box::new(on_device.group).close()?)
            })?;
        }
    }
    Ok(())
}

fn device_tamper() -> Outcome {
    let _alone = alone();
    let secret = GroupSecret::random()?;
    let failures = on_each(gpus()?, |[rank, ranks], bootstrap, device| {
        let options = gpu_options(Algorithm::Ring, Crypto::Gcm(KeyLength::Aes128));
        let mut group = NcclCommunicator::new(&secret, rank, ranks, bootstrap, device, options)?;
        let mut armed = rank == 0;
        group.tap(move |text, bytes, stream| match std::mem::take(&mut armed) {
            // Some byte that was random: one time in 256 it is this already, so eight of them.
            // SAFETY: the message has arrived on the stream, and is longer.
            true => unsafe { stream.fill(text + bytes as u64 / 2, 0x5a, 8) },
            false => Ok(()),
        });
        let mut on_device = OnDevice::new(group, device)?;
        let (sum, given) = (Request::AllReduce(ReduceOp::Sum), vector(rank, 1_000_000));
        let failure = match on_device.run(sum, &given, given.len(), given.len()) {
            Ok(_) => return Err("changed bytes were taken".into()),
            Err(failure) => failure,
        };
        let left = on_device.result(given.len())?;
        ensure!(left.iter().all(|&element| element == 0), "something is left after a failure");
        let again = on_device.run(sum, &given, given.len(), given.len());
        ensure!(matches!(again, Err(Error::Poisoned)), "a failed group goes on: {again:?}");
        on_device.group.rekey()?;
        check(&on_device.run(sum, &given, given.len(), given.len())?, ranks, "after a failure")?;
        Box::new(on_device.group).close()?;
        Ok(failure)
    })?;
    for (rank, failure) in failures.iter().enumerate() {
        let right = match rank {
            0 => matches!(failure, Error::Record { rank: 0, .. }),
            _ => matches!(failure, Error::Aborted { by: 0, .. }),
        };
        ensure!(right, "rank {rank}: {failure:?}");
    }
    Ok(())
}

/// The last rank joins, and then does nothing until the others have failed.
fn device_absent() -> Outcome {
    let _alone = alone();
    let secret = GroupSecret::random()?;
    let devices = gpus()?;
    let all_failed = std::sync::Barrier::new(devices.len());
    on_each(devices, |[rank, ranks], bootstrap, device| {
        let options = GpuOptions {
            timeout: Duration::from_secs(3),
            ..gpu_options(Algorithm::RelayRing, Crypto::Gcm(KeyLength::Aes256))
        };
        let group = NcclCommunicator::new(&secret, rank, ranks, bootstrap, device, options);
        let attempt = group.map(|group| {
            let mut on_device = OnDevice::new(group, device)?;
            if rank + 1 == ranks {
                return Ok((None, Duration::ZERO, Vec::new(), None));
            }
            let (sum, given) = (Request::AllReduce(ReduceOp::Sum), vector(rank, 100_000));
            let start = Instant::now();
            let failure = on_device.run(sum, &given, given.len(), given.len());
            let waited = start.elapsed();
            Ok((Some(failure), waited, on_device.result(given.len())?, Some(on_device.group.rekey())))
        });
        // Whatever happened, so that no rank waits here alone.
        all_failed.wait();
        let outcome: ringseal::Result<_> = attempt?;
        let (failure, waited, left, rekeyed) = outcome?;
        if rank + 1 < ranks {
            ensure!(matches!(failure, Some(Err(Error::Deadline { .. }))), "{failure:?}");
            ensure!(waited < Duration::from_secs(15), "it took {waited:?}");
            ensure!(left.iter().all(|&element| element == 0), "something is left after a failure");
            ensure!(matches!(rekeyed, Some(Err(Error::Lost { .. }))), "{rekeyed:?}");
        }
        Ok(())
    })?;
    Ok(())
}

/// Sums, averages that are divided once, and vectors of nothing.
fn device_nodes() -> Outcome {
    let _alone = alone();
    let secret = GroupSecret::random()?;
    on_each(gpus()?, |[rank, ranks], bootstrap, device| {
        let options = || gpu_options(Algorithm::Ring, Crypto::Gcm(KeyLength::Aes128));
        let place = [rank, ranks];
        let mut nodes =
            GpuNodes::over_nccl_by_gpus(&secret, place, 1, bootstrap, device, options(), options())?;
        let stream = Stream::new(device)?;
        let mut memory = DeviceBuffer::new(device, 4 * COUNT)?;
        let buffers = RankBuffers { input: memory.pointer(), output: memory.pointer() };
        for count in [0, 1, 1000, COUNT] {
            memory.write(0, bytemuck::cast_slice(&vector(rank, count)), &stream)?;
            // SAFETY: the memory holds `count` elements, and the call waits.
            unsafe { nodes.all_reduce(&[buffers], count, Dtype::U32, ReduceOp::Sum, &[&stream])? };
            let mut sums = vec![0; count];
            memory.read(0, bytemuck::cast_slice_mut(&mut sums), &stream)?;
            check(&sums, ranks, "nodes")?;
        }
        // More than one launch divides; an odd number of elements of two bytes.
        let ones = [0x80, 0x3f].repeat(4_000_001);
        memory.write(0, &ones, &stream)?;
        // SAFETY: as above.
        unsafe { nodes.all_reduce(&[buffers], ones.len() / 2, Dtype::Bf16, ReduceOp::Avg, &[&stream])? };
        let mut averages = vec![0; ones.len()];
        memory.read(0, &mut averages, &stream)?;
        ensure!(averages == ones, "the average of ones is not one");
        nodes.rekey()?;
        // SAFETY: as above.
        unsafe { nodes.all_reduce(&[buffers], 10, Dtype::F32, ReduceOp::Max, &[&stream])? };
        Ok(Box::new(nodes).close()?)
    })?;
    Ok(())
}
