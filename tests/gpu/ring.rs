//! Collectives among ranks on one GPU and on several: bit for bit what the CPU's ranks compute by the same schedule, and
//! failures. What those compute, one thread finds (`collective::reference`, which is tested against them).

use std::error::Error;
use std::mem;
use std::ops::Range;
use std::slice::from_ref;
use std::thread;
use std::time::{Duration, Instant};

use ringseal::channel::{Crypto, GroupSecret, KeyLength};
use ringseal::collective::{Algorithm, Partition, Request, reference};
use ringseal::cuda::{
    Collectives, Device, DeviceBuffer, GpuGroup, GpuOptions, Graph, Kernel, KeystreamAhead, Launch,
    LaunchForm, Module, RankBuffers, Stream,
};
use ringseal::{Dtype, Error as Failure, ReduceOp};
use ringseal_kernels::sealed::LONGEST_RECORD;

use crate::support::{
    GpuTest, HostTest, Outcome, all_are, ensure, image, is_small, longest, random_bytes, stride,
};
use crate::turns::alone;

pub(crate) const TESTS: &[GpuTest] = &[
    ("ring::plain_of_every_type_and_operation", |gpu| same_bits_as_cpu(from_ref(gpu), Crypto::None)),
    ("ring::plain_relay_of_every_type_and_operation", |gpu| {
        same_bits_as_cpu_by(from_ref(gpu), Crypto::None, Algorithm::RelayRing)
    }),
    ("ring::plain_other_collectives_of_every_type", |gpu| {
        others_have_the_same_bits(from_ref(gpu), Crypto::None, Algorithm::RelayRing)
    }),
    ("ring::plain_meshes_of_every_type_and_operation", |gpu| {
        MESHES.iter().try_for_each(|&mesh| same_bits_as_cpu_by(from_ref(gpu), Crypto::None, mesh))
    }),
    ("ring::plain_other_collectives_of_meshes", |gpu| {
        MESHES.iter().try_for_each(|&mesh| others_have_the_same_bits(from_ref(gpu), Crypto::None, mesh))
    }),
    ("ring::plain_meshes_do_not_run_ahead", |gpu| {
        MESHES.iter().try_for_each(|&mesh| run_ahead(from_ref(gpu), Crypto::None, mesh))
    }),
    ("ring::plain_ranks_do_not_run_ahead", |gpu| run_ahead(from_ref(gpu), Crypto::None, Algorithm::Ring)),
    ("ring::plain_graphs_can_be_replayed", |gpu| graph(from_ref(gpu), Crypto::None, Algorithm::Ring, SUMS)),
    ("ring::plain_ends_at_the_deadline_when_a_rank_is_missing", |gpu| {
        missing_rank(from_ref(gpu), Crypto::None)
    }),
    ("ring::plain_step_by_step_has_the_same_bits", |gpu| steps_have_the_same_bits(gpu, Crypto::None)),
    ("ring::more_ranks_than_multiprocessors_launch_each_step", more_ranks_than_fit),
];

/// For these the kernels must have AES-GCM.
pub(crate) const SEALED_TESTS: &[GpuTest] = &[
    ("ring::aes128_of_every_type_and_operation", |gpu| same_bits_as_cpu(from_ref(gpu), AES128)),
    ("ring::aes256_of_every_type_and_operation", |gpu| same_bits_as_cpu(from_ref(gpu), AES256)),
    ("ring::aes256_ends_at_the_deadline_when_a_rank_is_missing", |gpu| missing_rank(from_ref(gpu), AES256)),
    ("ring::relayed_aes128_of_every_type_and_operation", |gpu| {
        same_bits_as_cpu_by(from_ref(gpu), AES128, Algorithm::RelayRing)
    }),
    ("ring::relayed_aes256_of_every_type_and_operation", |gpu| {
        same_bits_as_cpu_by(from_ref(gpu), AES256, Algorithm::RelayRing)
    }),
    ("ring::aes128_other_collectives_of_every_type", |gpu| {
        others_have_the_same_bits(from_ref(gpu), AES128, Algorithm::Ring)
    }),
    ("ring::relayed_aes256_other_collectives_of_every_type", |gpu| {
        others_have_the_same_bits(from_ref(gpu), AES256, Algorithm::RelayRing)
    }),
    ("ring::sealed_ranks_do_not_run_ahead", |gpu| run_ahead(from_ref(gpu), AES256, Algorithm::RelayRing)),
    ("ring::changed_bytes_fail_all_ranks_at_every_step", |gpu| tamper(from_ref(gpu), SUMS, Algorithm::Ring)),
    ("ring::changed_bytes_fail_all_relaying_ranks_at_every_step", |gpu| {
        tamper(from_ref(gpu), SUMS, Algorithm::RelayRing)
    }),
    ("ring::changed_bytes_fail_the_other_collectives_at_every_step", |gpu| {
        let scattered = Request::ReduceScatter(ReduceOp::Sum);
        for request in [scattered, Request::AllGather, Request::Broadcast { root: 1 }] {
            tamper(from_ref(gpu), request, Algorithm::Ring)?;
            tamper(from_ref(gpu), request, Algorithm::RelayRing)?;
        }
        Ok(())
    }),
    ("ring::changed_bytes_fail_both_exchanging_ranks", |gpu| {
        tamper(from_ref(gpu), SUMS, Algorithm::Exchange)
    }),
    ("ring::direct_aes128_of_every_type_and_operation", |gpu| {
        same_bits_as_cpu_by(from_ref(gpu), AES128, Algorithm::Direct)
    }),
    ("ring::tree_aes256_of_every_type_and_operation", |gpu| {
        same_bits_as_cpu_by(from_ref(gpu), AES256, Algorithm::Tree)
    }),
    ("ring::exchange_aes256_of_every_type_and_operation", |gpu| {
        same_bits_as_cpu_by(from_ref(gpu), AES256, Algorithm::Exchange)
    }),
    ("ring::sealed_other_collectives_of_meshes", |gpu| {
        MESHES.iter().try_for_each(|&mesh| others_have_the_same_bits(from_ref(gpu), AES256, mesh))
    }),
    ("ring::sealed_meshes_do_not_run_ahead", |gpu| {
        MESHES.iter().try_for_each(|&mesh| run_ahead(from_ref(gpu), AES128, mesh))
    }),
    ("ring::changed_bytes_fail_all_direct_ranks_at_every_step", |gpu| {
        tamper(from_ref(gpu), SUMS, Algorithm::Direct)?;
        let scattered = Request::ReduceScatter(ReduceOp::Sum);
        for request in [scattered, Request::AllGather, Request::Broadcast { root: 1 }] {
            tamper(from_ref(gpu), request, Algorithm::Direct)?;
        }
        Ok(())
    }),
    ("ring::meshes_graphs_can_be_replayed", |gpu| {
        graph(from_ref(gpu), AES256, Algorithm::Direct, SUMS)?;
        graph(from_ref(gpu), AES128, Algorithm::Tree, Request::Broadcast { root: 2 })
    }),
    ("ring::new_epochs_on_the_way_of_direct_records", |gpu| epochs(from_ref(gpu), 4, Algorithm::Direct)),
    ("ring::exchanges_with_keystream_made_ahead", |gpu| {
        keystream_ahead(from_ref(gpu), 2, Algorithm::Exchange)
    }),
    ("ring::relays_with_keystream_made_ahead", |gpu| keystream_ahead(from_ref(gpu), 3, Algorithm::RelayRing)),
    ("ring::rings_with_keystream_made_ahead", |gpu| keystream_ahead(from_ref(gpu), 4, Algorithm::Ring)),
    ("ring::eight_relaying_ranks_with_keystream_do_not_wait_for_it", |gpu| {
        keystream_back_to_back(from_ref(gpu), Algorithm::RelayRing)
    }),
    ("ring::eight_ranks_with_keystream_do_not_wait_for_it", |gpu| {
        keystream_back_to_back(from_ref(gpu), Algorithm::Ring)
    }),
    ("ring::keystream_ahead_ends_with_its_keys", |gpu| keystream_ends(from_ref(gpu), Algorithm::Exchange)),
    ("ring::relayed_keystream_ahead_ends_with_its_keys", |gpu| {
        keystream_ends(from_ref(gpu), Algorithm::RelayRing)
    }),
    ("ring::exchanging_graphs_can_be_replayed", |gpu| {
        graph(from_ref(gpu), AES256, Algorithm::Exchange, SUMS)
    }),
    ("ring::new_epochs_on_the_way_of_exchanges", |gpu| epochs(from_ref(gpu), 2, Algorithm::Exchange)),
    ("ring::sealed_graphs_can_be_replayed", |gpu| graph(from_ref(gpu), AES256, Algorithm::Ring, SUMS)),
    ("ring::relayed_graphs_can_be_replayed", |gpu| {
        graph(from_ref(gpu), AES128, Algorithm::RelayRing, SUMS)?;
        graph(from_ref(gpu), AES128, Algorithm::RelayRing, Request::Broadcast { root: 2 })
    }),
    ("ring::graphs_of_an_earlier_session_are_refused", |gpu| {
        [Algorithm::Ring, Algorithm::RelayRing, Algorithm::Exchange, Algorithm::Direct, Algorithm::Tree]
            .into_iter()
            .try_for_each(|algorithm| graph_of_an_earlier_session(from_ref(gpu), algorithm))
    }),
    ("ring::a_graph_that_begins_an_epoch_is_refused", graph_that_begins_an_epoch),
    ("ring::streams_may_take_turns", |gpu| {
        [Algorithm::Ring, Algorithm::RelayRing, Algorithm::Exchange, Algorithm::Direct]
            .into_iter()
            .try_for_each(|algorithm| streams_in_turn(gpu, algorithm))
    }),
    ("ring::timeouts_of_any_length", timeouts_of_any_length),
    ("ring::inboxes_that_kernels_cannot_count_are_refused", |gpu| {
        let _alone = alone();
        let options = GpuOptions { algorithm: Algorithm::Exchange, ..options(AES128, 5 << 30) };
        match GpuGroup::new(&places(from_ref(gpu), 8), image(gpu)?, &GroupSecret::random()?, options) {
            Err(Failure::InvalidArgument(text)) if text.contains("2^36") => Ok(()),
            other => Err(format!("70 GiB of inbox gave {other:?}").into()),
        }
    }),
    ("ring::only_ciphertext_crosses", |gpu| only_ciphertext_crosses(from_ref(gpu))),
    ("ring::new_epochs_on_the_way", |gpu| epochs(from_ref(gpu), 2, Algorithm::Ring)),
    ("ring::new_epochs_on_the_way_of_relayed_records", |gpu| epochs(from_ref(gpu), 4, Algorithm::RelayRing)),
    ("ring::long_records_have_the_same_bits", long_records),
    ("ring::sealed_step_by_step_has_the_same_bits", |gpu| steps_have_the_same_bits(gpu, AES256)),
    ("ring::changed_bytes_fail_all_ranks_step_by_step", |gpu| {
        for algorithm in [Algorithm::Ring, Algorithm::RelayRing] {
            tamper_launched(from_ref(gpu), SUMS, algorithm, LaunchForm::PerStep)?;
        }
        tamper_launched(from_ref(gpu), Request::Broadcast { root: 1 }, Algorithm::Ring, LaunchForm::PerStep)
    }),
    ("ring::steps_can_be_timed", steps_can_be_timed),
    ("ring::step_by_step_graphs_can_be_replayed", |gpu| {
        graph_launched(from_ref(gpu), AES128, Algorithm::RelayRing, SUMS, LaunchForm::PerStep)
    }),
];

/// For these there must be two GPUs as well.
pub(crate) const ACROSS_GPUS_TESTS: &[HostTest] = &[
    ("ring::across_gpus::plain_of_every_type_and_operation", || same_bits_as_cpu(&gpus()?, Crypto::None)),
    ("ring::across_gpus::aes256_of_every_type_and_operation", || same_bits_as_cpu(&gpus()?, AES256)),
    ("ring::across_gpus::aes256_ends_at_the_deadline_when_a_rank_is_missing", || {
        missing_rank(&gpus()?, AES256)
    }),
    ("ring::across_gpus::changed_bytes_fail_all_ranks_at_every_step", || {
        tamper(&gpus()?, SUMS, Algorithm::Ring)
    }),
    ("ring::across_gpus::changed_bytes_fail_both_exchanging_ranks", || {
        tamper(&gpus()?, SUMS, Algorithm::Exchange)
    }),
    ("ring::across_gpus::relayed_aes128_other_collectives_of_every_type", || {
        others_have_the_same_bits(&gpus()?, AES128, Algorithm::RelayRing)
    }),
    ("ring::across_gpus::sealed_ranks_do_not_run_ahead", || run_ahead(&gpus()?, AES256, Algorithm::Ring)),
    ("ring::across_gpus::relayed_aes256_of_every_type_and_operation", || {
        same_bits_as_cpu_by(&gpus()?, AES256, Algorithm::RelayRing)
    }),
    ("ring::across_gpus::direct_aes256_of_every_type_and_operation", || {
        same_bits_as_cpu_by(&gpus()?, AES256, Algorithm::Direct)
    }),
    ("ring::across_gpus::tree_aes128_other_collectives_of_every_type", || {
        others_have_the_same_bits(&gpus()?, AES128, Algorithm::Tree)
    }),
    ("ring::across_gpus::meshes_do_not_run_ahead", || {
        MESHES.iter().try_for_each(|&mesh| run_ahead(&gpus()?, AES256, mesh))
    }),
    ("ring::across_gpus::exchanges_with_keystream_made_ahead", || {
        keystream_ahead(&gpus()?, 2, Algorithm::Exchange)
    }),
    ("ring::across_gpus::relays_with_keystream_made_ahead", || {
        keystream_ahead(&gpus()?, 4, Algorithm::RelayRing)
    }),
    ("ring::across_gpus::only_ciphertext_crosses", || only_ciphertext_crosses(&gpus()?)),
];

pub(crate) fn gpus() -> Result<Vec<Device>, Failure> {
    (0..Device::count()?).map(Device::open).collect()
}

/// Where each rank is: the GPUs in turn.
pub(crate) fn places(gpus: &[Device], ranks: usize) -> Vec<Device> {
    gpus.iter().cycle().take(ranks).cloned().collect()
}

/// Those in which any two ranks may speak to each other, of more than two ranks.
const MESHES: [Algorithm; 3] = [Algorithm::Direct, Algorithm::Tree, Algorithm::Exchange];
const SUMS: Request = Request::AllReduce(ReduceOp::Sum);
const AES128: Crypto = Crypto::Gcm(KeyLength::Aes128);
const AES256: Crypto = Crypto::Gcm(KeyLength::Aes256);
/// Elements of the longest vectors, of any type.
const LONG: usize = (1 << 20) + 3;
/// What memory around a result holds, before and after.
const GUARD: u8 = 0xa5;
const GUARD_BYTES: usize = 64;

/// One collective of a test, on the elements from `offset` bytes on.
#[derive(Clone, Copy, Debug)]
struct Case {
    request: Request,
    dtype: Dtype,
    count: usize,
    offset: usize,
    in_place: bool,
}

impl Case {
    fn all_reduce(dtype: Dtype, op: ReduceOp, count: usize) -> Self {
        Self { request: Request::AllReduce(op), dtype, count, offset: 0, in_place: false }
    }

    fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// The part of the vector that a rank gives, from its first byte.
    fn given(&self, rank: usize, ranks: usize) -> Range<usize> {
        match self.request {
            Request::AllGather => self.chunk(rank, ranks),
            Request::Broadcast { root } if root != rank => 0..0,
            _ => 0..self.bytes(),
        }
    }

    /// The part that it gets.
    fn wanted(&self, rank: usize, ranks: usize) -> Range<usize> {
        match self.request {
            Request::ReduceScatter(_) => self.chunk(rank, ranks),
            _ => 0..self.bytes(),
        }
    }

    fn chunk(&self, rank: usize, ranks: usize) -> Range<usize> {
        let range = Partition::new(self.count, ranks).range(rank);
        range.start * self.dtype.size()..range.end * self.dtype.size()
    }
}

/// A group with all that a collective needs.
struct Ranks {
    group: GpuGroup,
    algorithm: Algorithm,
    streams: Vec<Stream>,
    vectors: Vec<Vec<u8>>,
    inputs: Vec<DeviceBuffer>,
    outputs: Vec<DeviceBuffer>,
    /// Memory for what is read from an output: fresh pages for each would take longer than reading it.
    read: Vec<u8>,
}

impl Ranks {
    /// With one rank on each of the devices.
    fn new(devices: &[Device], options: GpuOptions) -> Result<Self, Box<dyn Error>> {
        let vectors = random_vectors(devices.len(), options.max_bytes)?;
        Self::with_vectors(devices, options, vectors)
    }

    /// Of [`random_vectors`], one for each device.
    fn with_vectors(
        devices: &[Device],
        options: GpuOptions,
        vectors: Vec<Vec<u8>>,
    ) -> Result<Self, Box<dyn Error>> {
        let bytes = options.max_bytes + GUARD_BYTES;
        let streams = devices.iter().map(Stream::new).collect::<Result<Vec<_>, _>>()?;
        let uploaded = vectors.iter().zip(&streams);
        Ok(Self {
            algorithm: options.algorithm,
            group: GpuGroup::new(devices, image(&devices[0])?, &GroupSecret::random()?, options)?,
            inputs: uploaded
                .map(|(vector, stream)| DeviceBuffer::from_host(vector, stream))
                .collect::<Result<_, _>>()?,
            outputs: devices
                .iter()
                .map(|device| DeviceBuffer::new(device, bytes + GUARD_BYTES))
                .collect::<Result<_, _>>()?,
            streams,
            vectors,
            read: Vec::new(),
        })
    }

    /// Queues a collective.
    fn start(&mut self, case: &Case) -> Result<(), Box<dyn Error>> {
        let streams: Vec<_> = self.streams.iter().collect();
        let mut buffers = Vec::new();
        for (rank, output) in self.outputs.iter_mut().enumerate() {
            output.fill(GUARD, streams[rank])?;
            let (given, wanted) = (case.given(rank, streams.len()), case.wanted(rank, streams.len()));
            let mut input = self.inputs[rank].pointer() + (case.offset + given.start) as u64;
            let vector = output.pointer() + case.offset as u64;
            if case.in_place {
                let place = vector + given.start as u64;
                // SAFETY: both ranges are inside their buffers, and neither is touched before the copy is done.
                unsafe { streams[rank].copy(place, input, given.len())? };
                input = place;
            }
            if matches!(case.request, Request::Broadcast { root } if root != rank) {
                // Nothing is there to be read.
                input = 0;
            }
            buffers.push(RankBuffers { input, output: vector + wanted.start as u64 });
        }
        // SAFETY: the buffers live until all streams are waited for, below or when they are freed; what the ranks give and
        // get lies inside.
        unsafe { self.group.run(case.request, &buffers, case.count, case.dtype, &streams)? };
        Ok(())
    }

    fn wait(&self) -> Result<(), Box<dyn Error>> {
        self.streams.iter().try_for_each(Stream::synchronize)?;
        Ok(())
    }

    /// Reads a rank's output; where in `bytes` its result lies, once it is sure that nothing around it was written.
    fn read(&self, case: &Case, rank: usize, bytes: &mut Vec<u8>) -> Result<Range<usize>, Box<dyn Error>> {
        bytes.resize(case.offset + case.bytes() + GUARD_BYTES, 0);
        self.outputs[rank].read(0, bytes, &self.streams[rank])?;
        let ranks = self.vectors.len();
        let shift = |part: Range<usize>| case.offset + part.start..case.offset + part.end;
        let wanted = shift(case.wanted(rank, ranks));
        let given = if case.in_place { shift(case.given(rank, ranks)) } else { 0..0 };
        let kept = |around: Range<usize>| {
            let start = given.start.clamp(around.start, around.end);
            let own = start..given.end.clamp(start, around.end);
            let guards = [around.start..own.start, own.end..around.end];
            bytes[own.clone()] == self.vectors[rank][own]
                && guards.into_iter().all(|guard| all_are(&bytes[guard], GUARD))
        };
        ensure!(
            kept(0..wanted.start) && kept(wanted.end..bytes.len()),
            "{case:?}: rank {rank} wrote beyond its result"
        );
        Ok(wanted)
    }

    /// Each rank's result, as [`Self::read`].
    fn results(&self, case: &Case) -> Result<Vec<Vec<u8>>, Box<dyn Error>> {
        let result = |rank| {
            let mut bytes = Vec::new();
            let place = self.read(case, rank, &mut bytes)?;
            Ok(bytes[place].to_vec())
        };
        (0..self.vectors.len()).map(result).collect()
    }

    /// As [`cpu_result`] of these ranks' vectors.
    fn expected(&self, case: &Case) -> Result<Vec<u8>, Box<dyn Error>> {
        cpu_result(&self.vectors, case, self.algorithm)
    }

    /// All of each rank's memory, to give and to get.
    fn buffers(&self) -> Vec<RankBuffers> {
        let pairs = self.inputs.iter().zip(&self.outputs);
        pairs
            .map(|(input, output)| RankBuffers { input: input.pointer(), output: output.pointer() })
            .collect()
    }

    /// The case recorded on all ranks' streams, to be launched on the first. The buffers must live as long.
    fn captured(&mut self, case: &Case) -> Result<Graph, Failure> {
        let buffers = self.buffers();
        let Self { group, streams, .. } = self;
        let all: Vec<_> = streams.iter().collect();
        streams[0].capture(|first| {
            let fork = first.record()?;
            all[1..].iter().try_for_each(|stream| stream.wait(&fork))?;
            // SAFETY: recorded, not run; the buffers live as long as the graph.
            let recorded = unsafe { group.run(case.request, &buffers, case.count, case.dtype, &all) };
            // Also after an error: a capture ends where it began.
            all[1..].iter().try_for_each(|stream| first.wait(&stream.record()?))?;
            recorded
        })
    }

    /// Does one collective that must succeed: each rank gets its part of the vector that is expected.
    fn succeeds(&mut self, case: &Case, expected: &[u8]) -> Outcome {
        self.start(case)?;
        self.wait()?;
        self.group.outcome().map_err(|error| format!("{case:?}: {error}"))?;
        let ranks = self.vectors.len();
        let mut bytes = mem::take(&mut self.read);
        for rank in 0..ranks {
            let place = self.read(case, rank, &mut bytes)?;
            let (result, expected) = (&bytes[place], &expected[case.wanted(rank, ranks)]);
            // Slices are compared many bytes at a time; which byte it is matters only then.
            if result != expected {
                let at = (0..result.len()).find(|&at| result[at] != expected[at]).unwrap_or(0);
                let (found, right) = (result[at], expected[at]);
                return Err(format!(
                    "{case:?}, {ranks} ranks: byte {at} on rank {rank} is {found:#04x}, not {right:#04x}"
                )
                .into());
            }
        }
        self.read = bytes;
        Ok(())
    }
}

/// Random vectors of up to `max_bytes` bytes for so many ranks, and a guard's bytes more each.
fn random_vectors(ranks: usize, max_bytes: usize) -> Result<Vec<Vec<u8>>, Box<dyn Error>> {
    (0..ranks).map(|_| random_bytes(max_bytes + GUARD_BYTES)).collect()
}

/// The vector that a case leaves on a CPU's ranks; of a reduce-scatter each has its part.
fn cpu_result(vectors: &[Vec<u8>], case: &Case, algorithm: Algorithm) -> Result<Vec<u8>, Box<dyn Error>> {
    let inputs: Vec<_> = vectors.iter().map(|vector| &vector[case.offset..][..case.bytes()]).collect();
    Ok(reference::results(case.request, algorithm, case.dtype, &inputs)?)
}

fn options(crypto: Crypto, max_bytes: usize) -> GpuOptions {
    let sm_budget = is_small().then_some(4);
    GpuOptions { crypto, max_bytes, sm_budget, ..GpuOptions::default() }
}

/// Random bits, so infinities, subnormal numbers and NaNs of all payloads are among the floats.
fn same_bits_as_cpu(gpus: &[Device], crypto: Crypto) -> Outcome {
    same_bits_as_cpu_by(gpus, crypto, Algorithm::Ring)
}

fn same_bits_as_cpu_by(gpus: &[Device], crypto: Crypto, algorithm: Algorithm) -> Outcome {
    let long = LONG.min(longest() / 8);
    let mut cases = Vec::new();
    for dtype in Dtype::ALL {
        for op in ReduceOp::ALL {
            let common = matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16)
                && matches!(op, ReduceOp::Sum | ReduceOp::Avg);
            let counts: Vec<usize> = match common {
                true => (0..=33).step_by(stride()).chain([1023, long]).collect(),
                false => vec![0, 1, 15, 33, 1023],
            };
            for count in counts {
                let number = cases.len();
                let offset = if number.is_multiple_of(3) { dtype.size() } else { 0 };
                let case = Case::all_reduce(dtype, op, count);
                cases.push(Case { offset, in_place: number % 2 == 1, ..case });
            }
        }
    }
    let ranks: &[usize] = if is_small() { &[1, 2, 3] } else { &[1, 2, 3, 4, 5, 8] };
    let mut groups: Vec<_> = ranks.iter().map(|&ranks| (ranks, algorithm, cases.clone())).collect();
    if algorithm == Algorithm::Ring {
        // Two operands give the same bits in either order, hence by either algorithm. Exchanges of several MiB go another
        // way than shorter ones, and longer ones again.
        let longer = if is_small() { 4 * long } else { (12 << 20) + 7 };
        for (dtype, op, offset, in_place) in [
            (Dtype::U8, ReduceOp::Avg, 1, false),
            (Dtype::U8, ReduceOp::Max, 0, true),
            (Dtype::F32, ReduceOp::Sum, 0, false),
            (Dtype::F32, ReduceOp::Sum, 0, true),
            (Dtype::Bf16, ReduceOp::Avg, 2, true),
        ] {
            let case = Case::all_reduce(dtype, op, longer / dtype.size());
            cases.push(Case { offset, in_place, ..case });
        }
        groups.push((2, Algorithm::Exchange, cases));
    }
    all_have_the_same_bits(gpus, crypto, groups)
}

/// Reduce-scatter, all-gather and broadcast, whose chunks begin between any two elements.
fn others_have_the_same_bits(gpus: &[Device], crypto: Crypto, algorithm: Algorithm) -> Outcome {
    let long = (LONG / 4).min(longest() / 8);
    let mut groups = Vec::new();
    for &ranks in if is_small() { [2, 3].iter() } else { [1, 2, 3, 5, 8].iter() } {
        let mut cases = Vec::new();
        for dtype in Dtype::ALL {
            let mut requests = ReduceOp::ALL.map(Request::ReduceScatter).to_vec();
            requests.extend([Request::AllGather, Request::Broadcast { root: 0 }]);
            requests.push(Request::Broadcast { root: ranks - 1 });
            for request in requests {
                let common = dtype == Dtype::Bf16 && request != Request::ReduceScatter(ReduceOp::Max);
                let long = if common { long } else { 0 };
                for count in [0, 1, 7, 1023, long] {
                    let number = cases.len();
                    let offset = if number.is_multiple_of(3) { dtype.size() } else { 0 };
                    cases.push(Case { request, dtype, count, offset, in_place: number % 2 == 1 });
                }
            }
        }
        if is_small() {
            // Of every type, request and length some: the step divides none of their numbers.
            cases = cases.into_iter().step_by(7).collect();
        }
        if ranks == 2 {
            // Two operands give the same bits in either order, hence by either algorithm.
            groups.push((ranks, Algorithm::Exchange, cases.clone()));
        }
        groups.push((ranks, algorithm, cases));
    }
    all_have_the_same_bits(gpus, crypto, groups)
}

/// Does the cases on groups of so many ranks.
fn all_have_the_same_bits(
    gpus: &[Device],
    crypto: Crypto,
    groups: Vec<(usize, Algorithm, Vec<Case>)>,
) -> Outcome {
    let mut prepared = Vec::new();
    // The CPU's part comes first, while others have the GPU.
    for (ranks, algorithm, cases) in groups {
        let longest = cases.iter().map(Case::bytes).max().unwrap_or(0);
        let vectors = random_vectors(ranks, longest)?;
        let expected =
            cases.iter().map(|case| cpu_result(&vectors, case, algorithm)).collect::<Result<Vec<_>, _>>()?;
        prepared.push((algorithm, longest, vectors, cases, expected));
    }
    let _alone = alone();
    for (algorithm, longest, vectors, cases, expected) in prepared {
        let options = GpuOptions { algorithm, ..options(crypto, longest) };
        let mut ranks = Ranks::with_vectors(&places(gpus, vectors.len()), options, vectors)?;
        for (case, expected) in cases.iter().zip(expected) {
            ranks.succeeds(case, &expected)?;
        }
    }
    Ok(())
}

/// Queues many collectives in which ranks have little or nothing to receive, while the last rank is held: none of the others
/// may overwrite what it has yet to read.
fn run_ahead(gpus: &[Device], crypto: Crypto, algorithm: Algorithm) -> Outcome {
    let _alone = alone();
    const PLACE: usize = 4096;
    let devices = places(gpus, 3);
    let cases: Vec<_> = (0..24)
        .map(|number| {
            let request = match number % 6 {
                0 | 1 => Request::Broadcast { root: 0 },
                2 => Request::AllGather,
                3 => Request::ReduceScatter(ReduceOp::Sum),
                4 => Request::Broadcast { root: 1 },
                _ => SUMS,
            };
            let count = if number % 4 == 0 { PLACE / 4 } else { 1 };
            // Each has other elements.
            Case { request, dtype: Dtype::U32, count, offset: 4 * number, in_place: false }
        })
        .collect();
    let options = GpuOptions { algorithm, sm_budget: Some(4), ..options(crypto, PLACE * cases.len()) };
    let mut ranks = Ranks::new(&devices, options)?;
    let expected = cases.iter().map(|case| ranks.expected(case)).collect::<Result<Vec<_>, _>>()?;
    for (case, expected) in cases.iter().zip(&expected) {
        ranks.succeeds(case, expected)?;
    }
    let mut meddler = Meddler::new(&devices[2])?;
    for (output, stream) in ranks.outputs.iter_mut().zip(&ranks.streams) {
        output.fill(GUARD, stream)?;
    }
    ranks.wait()?;
    meddler.start(1, 0, &ranks.streams[2])?;
    let streams: Vec<_> = ranks.streams.iter().collect();
    for (number, case) in cases.iter().enumerate() {
        let buffers: Vec<_> = (0..3)
            .map(|rank| RankBuffers {
                input: ranks.inputs[rank].pointer() + (case.offset + case.given(rank, 3).start) as u64,
                output: ranks.outputs[rank].pointer() + (number * PLACE) as u64,
            })
            .collect();
        // SAFETY: the buffers live until the streams are waited for; each collective's results have a place of their own.
        unsafe { ranks.group.run(case.request, &buffers, case.count, case.dtype, &streams)? };
    }
    // Long enough for the others to do all that they can.
    thread::sleep(Duration::from_millis(20));
    meddler.stop()?;
    ranks.wait()?;
    ranks.group.outcome()?;
    for (number, (case, expected)) in cases.iter().zip(&expected).enumerate() {
        for rank in 0..3 {
            let expected = &expected[case.wanted(rank, 3)];
            let mut result = vec![0; expected.len()];
            ranks.outputs[rank].read(number * PLACE, &mut result, &ranks.streams[rank])?;
            ensure!(result == expected, "collective {number}, {case:?}: rank {rank} has another result");
        }
    }
    Ok(())
}

/// While `stop` is 0, for at most 20 seconds: stores `value` to `address` again and again, unless that is null.
const MEDDLE: &[u8] = b"
.version 8.0
.target sm_80
.address_size 64
.visible .entry meddle(.param .align 8 .b8 parameters[24])
{
    .reg .pred %p;
    .reg .b32 %value, %stopped;
    .reg .b64 %address, %stop, %now, %end;
    ld.param.u64 %address, [parameters];
    ld.param.u64 %stop, [parameters+8];
    ld.param.u32 %value, [parameters+16];
    mov.u64 %end, %globaltimer;
    add.u64 %end, %end, 20000000000;
again:
    setp.eq.u64 %p, %address, 0;
    @%p bra stored;
    st.volatile.global.u32 [%address], %value;
stored:
    ld.volatile.global.u32 %stopped, [%stop];
    setp.ne.u32 %p, %stopped, 0;
    @%p ret;
    mov.u64 %now, %globaltimer;
    setp.lt.u64 %p, %now, %end;
    @%p bra again;
    ret;
}
";

#[repr(C)]
#[derive(Clone, Copy)]
struct MeddleParams {
    address: u64,
    stop: u64,
    value: u32,
    reserved: u32,
}

/// Runs [`MEDDLE`] until it is stopped.
pub(crate) struct Meddler {
    kernel: Kernel,
    stop: DeviceBuffer,
    /// Beside the one that is held or meddled with.
    stream: Stream,
}

impl Meddler {
    pub(crate) fn new(device: &Device) -> Result<Self, Box<dyn Error>> {
        let stream = Stream::new(device)?;
        let stop = DeviceBuffer::from_host(&[0; 4], &stream)?;
        Ok(Self { kernel: Module::load(device, MEDDLE)?.kernel("meddle", 0)?, stop, stream })
    }

    /// Several blocks, so that a store follows on another within a fraction of a microsecond.
    pub(crate) fn start(&mut self, blocks: u32, address: u64, stream: &Stream) -> Outcome {
        self.stop.write(0, &[0; 4], &self.stream)?;
        let value = u32::from_le_bytes(crate::support::random()?);
        let params = MeddleParams { address, stop: self.stop.pointer(), value, reserved: 0 };
        // SAFETY: `address` is null or a word of a live mailbox, whose content may be anything.
        unsafe { self.kernel.launch(Launch { blocks, threads: 32 }, stream, &params)? };
        Ok(())
    }

    pub(crate) fn stop(&mut self) -> Outcome {
        self.stop.write(0, &[1; 4], &self.stream)?;
        Ok(())
    }
}

/// Keystream of two collectives of up to 4 MiB.
const AHEAD: KeystreamAhead = KeystreamAhead { collectives: 2, bytes: 4 << 20, makers: Some(8) };

/// Few blocks, so that records are as long as they may be, by default and when asked for.
fn long_records(gpu: &Device) -> Outcome {
    const BYTES: usize = (8 << 20) + 12;
    if BYTES > longest() {
        return Ok(());
    }
    let _alone = alone();
    let long =
        |crypto, record_bytes| GpuOptions { sm_budget: Some(2), record_bytes, ..options(crypto, BYTES) };
    let longest = LONGEST_RECORD as usize;
    for (algorithm, crypto, record_bytes, launch) in [
        (Algorithm::Ring, AES128, None, LaunchForm::Persistent),
        (Algorithm::Ring, AES256, Some(longest), LaunchForm::Persistent),
        (Algorithm::RelayRing, AES128, Some(longest - 16), LaunchForm::Persistent),
        (Algorithm::RelayRing, AES256, None, LaunchForm::Persistent),
        (Algorithm::RelayRing, AES128, Some(longest), LaunchForm::PerStep),
        (Algorithm::Direct, AES128, Some(longest), LaunchForm::Persistent),
    ] {
        let options = GpuOptions { algorithm, launch, ..long(crypto, record_bytes) };
        let mut ranks = Ranks::new(&places(from_ref(gpu), 3), options)?;
        for (dtype, in_place) in [(Dtype::F32, false), (Dtype::Bf16, true)] {
            let count = BYTES / dtype.size();
            let case = Case { in_place, ..Case::all_reduce(dtype, ReduceOp::Avg, count) };
            let expected = ranks.expected(&case)?;
            ranks.succeeds(&case, &expected)?;
        }
    }
    let keystream = Some(KeystreamAhead { collectives: 1, bytes: BYTES, makers: None });
    let options = GpuOptions { algorithm: Algorithm::RelayRing, keystream, ..long(AES256, Some(longest)) };
    let mut ranks = Ranks::new(&places(from_ref(gpu), 3), options)?;
    let case = Case::all_reduce(Dtype::F32, ReduceOp::Sum, BYTES / 4);
    let expected = ranks.expected(&case)?;
    let before = ranks.group.keystream_misses()?;
    ensure!(ranks.group.make_keystream(&[BYTES])? == 1, "no keystream of long records");
    ranks.group.wait_for_keystream()?;
    ranks.succeeds(&case, &expected)?;
    let misses = ranks.group.keystream_misses()?.wrapping_sub(before);
    ensure!(misses == 0, "{misses} long records had no keystream");
    let refused = GpuOptions { algorithm: Algorithm::Ring, ..long(AES128, Some(longest + 16)) };
    match GpuGroup::new(&places(from_ref(gpu), 2), image(gpu)?, &GroupSecret::random()?, refused) {
        Err(Failure::InvalidArgument(text)) if text.contains("sealed records have at most") => Ok(()),
        other => Err(format!("a longer record gave {other:?}").into()),
    }
}

/// With keystream of all records, of some and of none: the CPU's bits; afterwards nothing is left of it.
fn keystream_ahead(gpus: &[Device], count: usize, algorithm: Algorithm) -> Outcome {
    let _alone = alone();
    let devices = places(gpus, count);
    for (crypto, record_bytes) in [(AES128, None), (AES256, Some(4096)), (AES256, None)] {
        let longest = 6 << 20;
        let options =
            GpuOptions { algorithm, keystream: Some(AHEAD), record_bytes, ..options(crypto, longest) };
        let mut ranks = Ranks::new(&devices, options)?;
        let mut cases = Vec::new();
        for count in [1, 1000, 4096, 100_001, 1 << 20] {
            for (dtype, in_place) in [(Dtype::F32, false), (Dtype::F32, true), (Dtype::Bf16, false)] {
                let offset = if count == 1000 { dtype.size() } else { 0 };
                cases.push(Case { offset, in_place, ..Case::all_reduce(dtype, ReduceOp::Avg, count) });
            }
        }
        // Longer than there is keystream for; and of a type for which none is taken.
        cases.push(Case::all_reduce(Dtype::F32, ReduceOp::Sum, longest / 4));
        cases.push(Case::all_reduce(Dtype::I32, ReduceOp::Sum, 5000));
        let expected = cases.iter().map(|case| ranks.expected(case)).collect::<Result<Vec<_>, _>>()?;
        for (case, expected) in cases.iter().zip(&expected) {
            let bytes = case.bytes();
            // Right guesses, waited for; then right ones that may be under way, wrong lengths, and none.
            let guesses: [(&[usize], bool); 4] =
                [(&[bytes, bytes], true), (&[bytes], false), (&[bytes / 2 + 1], true), (&[], false)];
            for (guess, waited) in guesses {
                let before = ranks.group.keystream_misses()?;
                let made = ranks.group.make_keystream(guess)?;
                // A ring's records wait for each other: some keystream is of no use.
                let none = algorithm != Algorithm::Exchange && guess.iter().any(|&bytes| bytes > AHEAD.bytes);
                let wanted = if none { 0 } else { guess.len() };
                ensure!(made == wanted, "{case:?}: keystream of {made} collectives");
                if waited {
                    ranks.group.wait_for_keystream()?;
                }
                ranks.succeeds(case, expected)?;
                let misses = ranks.group.keystream_misses()?.wrapping_sub(before);
                let hit = guess.len() == 2 && bytes <= AHEAD.bytes && case.dtype != Dtype::I32;
                ensure!(!hit || misses == 0, "{case:?}: {misses} records had no keystream");
                if guess.len() == 2 {
                    ranks.succeeds(case, expected)?;
                    let misses = ranks.group.keystream_misses()?.wrapping_sub(before);
                    ensure!(!hit || misses == 0, "{case:?}: {misses} records of the second had no keystream");
                }
            }
        }
        ranks.group.wait_for_keystream()?;
        // What was made for the integers went unused; the next collective has it wiped.
        ranks.succeeds(&cases[0], &expected[0])?;
        ranks.group.wait_for_keystream()?;
        ensure!(ranks.group.keystream_is_blank()?, "keystream is left");
    }
    Ok(())
}

/// Of eight ranks, more streams than a device has queues (`CUDA_DEVICE_MAX_CONNECTIONS`): collectives that wait for each other
/// on the device wait for nothing else, and all of them have their keystream where it was ready.
fn keystream_back_to_back(gpus: &[Device], algorithm: Algorithm) -> Outcome {
    let _alone = alone();
    let (devices, collectives) = (places(gpus, 8), 10);
    // Chunks whose last record is a short one, of the longest vector too.
    for (longest, record_bytes) in [(3 << 20, None), ((1 << 20) + 16 * 9, Some(8192))] {
        let keystream = Some(KeystreamAhead { collectives, bytes: longest, makers: None });
        let options = GpuOptions { algorithm, keystream, record_bytes, ..options(AES128, longest) };
        let mut ranks = Ranks::new(&devices, options)?;
        for bytes in [16, 64 << 10, 1 << 20, longest] {
            let case = Case::all_reduce(Dtype::F32, ReduceOp::Sum, bytes / 4);
            let expected = ranks.expected(&case)?;
            let before = ranks.group.keystream_misses()?;
            for round in 0..3 {
                let made = ranks.group.make_keystream(&vec![bytes; collectives])?;
                ensure!(made == collectives, "{bytes} bytes, round {round}: keystream of {made} collectives");
                ranks.group.wait_for_keystream()?;
                for _ in 1..collectives {
                    ranks.start(&case)?;
                }
                ranks.succeeds(&case, &expected)?;
            }
            let misses = ranks.group.keystream_misses()?.wrapping_sub(before);
            ensure!(misses == 0, "{bytes} bytes: {misses} records had no keystream");
            // Made while collectives run, and ready or not.
            for _ in 0..4 * collectives {
                ranks.group.make_keystream(&[bytes, bytes])?;
                ranks.start(&case)?;
            }
            ranks.succeeds(&case, &expected)?;
        }
        ranks.group.wait_for_keystream()?;
        let made = ranks.group.make_keystream(&[longest])?;
        ranks.group.wait_for_keystream()?;
        ensure!(made == 1 && !ranks.group.keystream_is_blank()?, "no keystream of the next collective");
        ranks.group.rekey()?;
        ranks.group.wait_for_keystream()?;
        ensure!(ranks.group.keystream_is_blank()?, "keystream is left");
    }
    Ok(())
}

/// Neither a new epoch, nor a failure and new keys, nor a captured graph uses keystream that was made before.
fn keystream_ends(gpus: &[Device], algorithm: Algorithm) -> Outcome {
    let _alone = alone();
    let (devices, bytes) = (places(gpus, 2), 1 << 20);
    let group = |key_bytes| GpuOptions {
        algorithm,
        keystream: Some(AHEAD),
        record_bytes: Some(64 << 10),
        sm_budget: Some(16),
        key_bytes,
        ..options(AES128, bytes)
    };
    let case = Case::all_reduce(Dtype::F32, ReduceOp::Sum, bytes / 4);
    // A key for two collectives and a bit.
    let mut ranks = Ranks::new(&devices, group(5 * bytes as u64 / 2))?;
    let expected = ranks.expected(&case)?;
    for _ in 0..7 {
        ranks.group.make_keystream(&[bytes, bytes])?;
        ranks.group.wait_for_keystream()?;
        ranks.succeeds(&case, &expected)?;
    }

    let mut ranks = Ranks::new(&devices, group(GpuOptions::default().key_bytes))?;
    let expected = ranks.expected(&case)?;
    ranks.succeeds(&case, &expected)?;
    let mut meddler = Meddler::new(&devices[1])?;
    let storm = Stream::new(&devices[1])?;
    for _ in 0..3 {
        ranks.group.rekey()?;
        ensure!(ranks.group.make_keystream(&[bytes, bytes])? == 2, "no keystream after new keys");
        ranks.group.wait_for_keystream()?;
        let [inbox, _] = ranks.group.mailbox(1);
        meddler.start(8, inbox.pointer() + (64 << 10) + 12, &storm)?;
        ranks.start(&case)?;
        ranks.wait()?;
        meddler.stop()?;
        storm.synchronize()?;
        match ranks.group.outcome() {
            Err(Failure::Record { rank: 1, step: 0, record: 1 }) => {}
            other => return Err(format!("a changed record with keystream: {other:?}").into()),
        }
        match ranks.group.make_keystream(&[bytes]) {
            Err(Failure::Poisoned) => {}
            other => return Err(format!("keystream for a poisoned group: {other:?}").into()),
        }
        recovers(&mut ranks, &case, &expected)?;
    }
    ranks.group.rekey()?;
    ranks.group.wait_for_keystream()?;
    ensure!(ranks.group.keystream_is_blank()?, "keystream outlived its keys");
    Ok(())
}

/// What a failure leaves behind: poisoned ranks, until they are re-keyed.
fn recovers(ranks: &mut Ranks, case: &Case, expected: &[u8]) -> Outcome {
    ensure!(ranks.group.is_poisoned(), "not poisoned");
    match ranks.start(case) {
        Err(error) if matches!(error.downcast_ref(), Some(Failure::Poisoned)) => {}
        other => return Err(format!("a poisoned group gave {other:?}").into()),
    }
    ranks.wait()?;
    ranks.group.rekey()?;
    ranks.succeeds(case, expected)?;
    ranks.succeeds(case, expected)
}

/// The last rank's kernel starts only after the others have given up.
fn missing_rank(gpus: &[Device], crypto: Crypto) -> Outcome {
    let _alone = alone();
    for count in [2, 3] {
        let devices = places(gpus, count);
        let mut meddler = Meddler::new(&devices[count - 1])?;
        let limit = Duration::from_millis(300);
        let options = GpuOptions { timeout: limit, sm_budget: Some(16), ..options(crypto, 1 << 20) };
        let mut ranks = Ranks::new(&devices, options)?;
        let case = Case::all_reduce(Dtype::F32, ReduceOp::Sum, 100_000);
        let expected = ranks.expected(&case)?;
        ranks.succeeds(&case, &expected)?;
        meddler.start(1, 0, &ranks.streams[count - 1])?;
        let begun = Instant::now();
        ranks.start(&case)?;
        ranks.streams[..count - 1].iter().try_for_each(Stream::synchronize)?;
        let waited = begun.elapsed();
        meddler.stop()?;
        ranks.wait()?;
        ensure!(waited >= limit && waited < 10 * limit, "the others gave up after {waited:?}");
        match ranks.group.outcome() {
            Err(Failure::Deadline { waited_ms: 300, .. }) => {}
            other => return Err(format!("{count} ranks without the last: {other:?}").into()),
        }
        ensure!(ranks.results(&case)?.concat().iter().all(|&byte| byte == 0), "a result was left");
        recovers(&mut ranks, &case, &expected)?;
    }
    Ok(())
}

/// Overwrites four bytes of a record or a tag between the sender and the receiver: the storm of stores begins before the
/// collective, and between the sender's store and the receiver's load lie the rest of a long record or its opening.
fn tamper(gpus: &[Device], request: Request, algorithm: Algorithm) -> Outcome {
    tamper_launched(gpus, request, algorithm, LaunchForm::Auto)
}

fn tamper_launched(gpus: &[Device], request: Request, algorithm: Algorithm, launch: LaunchForm) -> Outcome {
    let _alone = alone();
    const RECORD: usize = 64 << 10;
    /// Where in a record, or in its tag.
    enum Word {
        Text(usize),
        Tag(usize),
    }
    // Exchanges of several MiB go another way than others.
    let groups = match algorithm {
        _ if request != SUMS => {
            // Of a broadcast the whole vector is one chunk.
            let chunks = if matches!(request, Request::Broadcast { .. }) { 1 } else { 3 };
            let crypto = if algorithm == Algorithm::Ring { AES128 } else { AES256 };
            vec![(3, crypto, 2 * RECORD * chunks)]
        }
        Algorithm::Ring => vec![(2, AES256, 4 * RECORD), (3, AES128, 6 * RECORD)],
        Algorithm::Exchange => {
            vec![(2, AES128, 2 * RECORD), (2, AES256, 48 * RECORD), (2, AES128, 192 * RECORD)]
        }
        _ => vec![(3, AES128, 6 * RECORD), (4, AES256, 8 * RECORD)],
    };
    for (count, crypto, bytes) in groups {
        let devices = places(gpus, count);
        let options = GpuOptions {
            record_bytes: Some(RECORD),
            sm_budget: Some(16),
            algorithm,
            launch,
            ..options(crypto, bytes)
        };
        let mut ranks = Ranks::new(&devices, options)?;
        let case = Case { request, ..Case::all_reduce(Dtype::F32, ReduceOp::Sum, bytes / 4) };
        let expected = ranks.expected(&case)?;
        // Loads the kernels, which may have to wait for those that run.
        ranks.succeeds(&case, &expected)?;
        let mut bytes = Vec::new();
        let messages = match request {
            _ if algorithm == Algorithm::Exchange => 1,
            Request::AllReduce(_) => 2 * (count - 1),
            _ => count - 1,
        };
        for number in 0..messages {
            // A broadcast has one message, of which every rank but the root is a victim.
            let (message, victim) = match request {
                Request::Broadcast { root } => (0, (root + 1 + number) % count),
                _ => (number, number % count),
            };
            let mut meddler = Meddler::new(&devices[victim])?;
            let storm = Stream::new(&devices[victim])?;
            for (record, word) in [
                (0, Word::Text(0)),
                (1, Word::Text(RECORD / 2 + 12)),
                (1, Word::Text(RECORD - 4)),
                (0, Word::Tag(0)),
                (1, Word::Tag(12)),
            ] {
                // Re-keyed ranks, or new ones, begin with the first halves of their mailboxes.
                ranks.group.rekey()?;
                let [inbox, signals] = ranks.group.mailbox(victim);
                let number = message * 2 + record;
                let address = match word {
                    Word::Text(at) => inbox.pointer() + (number * RECORD + at) as u64,
                    Word::Tag(at) => signals.pointer() + (number * 32 + at) as u64,
                };
                meddler.start(8, address, &storm)?;
                ranks.start(&case)?;
                ranks.wait()?;
                meddler.stop()?;
                storm.synchronize()?;
                match ranks.group.outcome() {
                    Err(Failure::Record { rank, step, record: number })
                        if (rank, step, number) == (victim, message, record) => {}
                    other => {
                        return Err(format!(
                            "{request:?}, {count} ranks: record {record} of message {message} to rank {victim}: {other:?}"
                        )
                        .into());
                    }
                }
                for rank in 0..count {
                    let place = ranks.read(&case, rank, &mut bytes)?;
                    let result = &bytes[place];
                    let wiped = all_are(result, 0);
                    // Ranks that had all they need before the message was refused may keep it. Only with its last message
                    // has a rank all of an all-reduce.
                    let last = message == messages - 1
                        || !matches!(request, Request::AllReduce(_))
                        // Its second half only brings finished chunks, each to one rank.
                        || algorithm == Algorithm::Direct && message >= count - 1;
                    let complete = last && rank != victim && *result == expected[case.wanted(rank, count)];
                    ensure!(wiped || complete, "message {message} to rank {victim}: rank {rank} kept data");
                }
                recovers(&mut ranks, &case, &expected)?;
            }
        }
    }
    Ok(())
}

/// All that the ranks' memory received is looked through for a plaintext that would be seen.
fn only_ciphertext_crosses(gpus: &[Device]) -> Outcome {
    let _alone = alone();
    let bytes = 1 << 20;
    let ones = 1.0f32.to_le_bytes().repeat(bytes / 4);
    for (crypto, readable) in [(Crypto::None, true), (AES128, false), (AES256, false)] {
        let mut ranks = Ranks::new(&places(gpus, 3), options(crypto, bytes))?;
        for (input, stream) in ranks.inputs.iter_mut().zip(&ranks.streams) {
            input.write(0, &ones, stream)?;
        }
        ranks.vectors.iter_mut().for_each(|vector| vector[..bytes].copy_from_slice(&ones));
        let case = Case { in_place: true, ..Case::all_reduce(Dtype::F32, ReduceOp::Sum, bytes / 4) };
        let expected = ranks.expected(&case)?;
        ranks.succeeds(&case, &expected)?;
        for rank in 0..3 {
            let received = ranks.group.mailbox(rank)[0].to_host(&ranks.streams[rank])?;
            let found = [1.0f32, 2.0, 3.0].map(|sum| {
                let sums = sum.to_le_bytes().repeat(4);
                received.chunks_exact(16).any(|block| block == sums)
            });
            ensure!(found == [readable; 3], "{crypto:?}: rank {rank} received sums in plain: {found:?}");
        }
    }
    Ok(())
}

/// One capture of a collective on all ranks' streams, replayed with other vectors, and with a collective outside of the
/// graph in between: the ranks count their collectives on the device.
fn graph(gpus: &[Device], crypto: Crypto, algorithm: Algorithm, request: Request) -> Outcome {
    graph_launched(gpus, crypto, algorithm, request, LaunchForm::Auto)
}

fn graph_launched(
    gpus: &[Device],
    crypto: Crypto,
    algorithm: Algorithm,
    request: Request,
    launch: LaunchForm,
) -> Outcome {
    let _alone = alone();
    let bytes = 1 << 20;
    let case = Case { request, ..Case::all_reduce(Dtype::F32, ReduceOp::Sum, bytes / 4 - 3) };
    let count = if algorithm == Algorithm::Exchange { 2 } else { 3 };
    let mut ranks =
        Ranks::new(&places(gpus, count), GpuOptions { algorithm, launch, ..options(crypto, bytes) })?;
    let expected = ranks.expected(&case)?;
    ranks.succeeds(&case, &expected)?;
    let mut graph = ranks.captured(&case)?;
    for _ in 0..3 {
        for (rank, vector) in ranks.vectors.iter_mut().enumerate() {
            *vector = random_bytes(vector.len())?;
            ranks.inputs[rank].write(0, vector, &ranks.streams[rank])?;
            ranks.outputs[rank].fill(GUARD, &ranks.streams[rank])?;
        }
        let expected = ranks.expected(&case)?;
        ranks.wait()?;
        // SAFETY: the buffers and the group are alive.
        unsafe { graph.launch(&ranks.streams[0])? };
        ranks.wait()?;
        ranks.group.outcome()?;
        for (rank, result) in ranks.results(&case)?.into_iter().enumerate() {
            ensure!(result == expected[case.wanted(rank, count)], "replayed, rank {rank} has another result");
        }
        ranks.succeeds(&case, &expected)?;
    }
    Ok(())
}

/// A graph carries its session's keys, and a new session begins its numbers again: replayed, it would seal under nonces that its
/// keys have had.
fn graph_of_an_earlier_session(gpus: &[Device], algorithm: Algorithm) -> Outcome {
    let _alone = alone();
    let bytes = 1 << 18;
    let case = Case::all_reduce(Dtype::F32, ReduceOp::Sum, bytes / 4);
    let count = if algorithm == Algorithm::Exchange { 2 } else { 3 };
    let options = GpuOptions { algorithm, ..options(AES128, bytes) };
    let mut ranks = Ranks::new(&places(gpus, count), options)?;
    let expected = ranks.expected(&case)?;
    ranks.succeeds(&case, &expected)?;
    let mut graph = ranks.captured(&case)?;
    // SAFETY: the buffers and the group are alive.
    unsafe { graph.launch(&ranks.streams[0])? };
    ranks.wait()?;
    ranks.group.outcome()?;
    for _ in 0..2 {
        ranks.group.rekey()?;
        // SAFETY: as above.
        unsafe { graph.launch(&ranks.streams[0])? };
        ranks.wait()?;
        let outcome = ranks.group.outcome();
        ensure!(
            matches!(outcome, Err(Failure::KeyExhausted { .. })),
            "an earlier session's graph: {outcome:?}"
        );
    }
    ranks.group.rekey()?;
    ranks.succeeds(&case, &expected)
}

/// The keys of the epoch after are made on the stream after an epoch's first collective: recorded, they wouldn't be made in time.
fn graph_that_begins_an_epoch(gpu: &Device) -> Outcome {
    let _alone = alone();
    let bytes = 1 << 18;
    let options = GpuOptions { key_bytes: 3 * bytes as u64, ..options(AES256, bytes) };
    let mut ranks = Ranks::new(&places(from_ref(gpu), 2), options)?;
    let case = Case::all_reduce(Dtype::F32, ReduceOp::Sum, bytes / 4);
    let expected = ranks.expected(&case)?;
    // What a first collective allocates can't be allocated while a stream is captured.
    ranks.succeeds(&case, &expected)?;
    let mut refused = 0;
    for _ in 0..8 {
        match ranks.captured(&case) {
            Ok(_) => {}
            Err(Failure::InvalidArgument(_)) => {
                refused += 1;
                ranks.succeeds(&case, &expected)?;
                // Of the epoch that has begun now.
                let mut graph = ranks.captured(&case)?;
                // SAFETY: the buffers and the group are alive.
                unsafe { graph.launch(&ranks.streams[0])? };
                ranks.wait()?;
                ranks.group.outcome()?;
            }
            Err(error) => return Err(error.into()),
        }
    }
    ensure!(refused != 0, "no epoch ended");
    Ok(())
}

/// Collectives of a rank that are queued on two streams in turn, and small enough to run at once, have numbers of their own all
/// the same.
fn streams_in_turn(gpu: &Device, algorithm: Algorithm) -> Outcome {
    let _alone = alone();
    let bytes = 1 << 13;
    let case = Case::all_reduce(Dtype::F32, ReduceOp::Sum, bytes / 4);
    let count = if algorithm == Algorithm::Exchange { 2 } else { 3 };
    let options = GpuOptions { algorithm, sm_budget: Some(4), ..options(AES128, bytes) };
    let mut ranks = Ranks::new(&places(from_ref(gpu), count), options)?;
    let expected = ranks.expected(&case)?;
    ranks.succeeds(&case, &expected)?;
    let others: Vec<Stream> = (0..count).map(|_| Stream::new(gpu)).collect::<Result<_, _>>()?;
    let buffers = ranks.buffers();
    for turn in 0..50 {
        let streams: Vec<_> = if turn % 2 == 0 { &others } else { &ranks.streams }.iter().collect();
        // SAFETY: the buffers live until the waits below; all collectives give the same.
        unsafe { ranks.group.run(case.request, &buffers, case.count, case.dtype, &streams)? };
    }
    others.iter().try_for_each(Stream::synchronize)?;
    ranks.wait()?;
    ranks.group.outcome()?;
    ranks.succeeds(&case, &expected)
}

/// Longer than a kernel can count.
fn timeouts_of_any_length(gpu: &Device) -> Outcome {
    for timeout in [Duration::MAX, Duration::from_millis(u64::MAX), Duration::from_secs(17_000_000_000)] {
        let _alone = alone();
        let options = GpuOptions { timeout, ..options(AES128, 1 << 14) };
        let mut ranks = Ranks::new(&places(from_ref(gpu), 2), options)?;
        let case = Case::all_reduce(Dtype::F32, ReduceOp::Sum, 1 << 12);
        let expected = ranks.expected(&case)?;
        ranks.succeeds(&case, &expected)?;
    }
    Ok(())
}

fn by_steps(crypto: Crypto, max_bytes: usize) -> GpuOptions {
    GpuOptions { launch: LaunchForm::PerStep, ..options(crypto, max_bytes) }
}

/// All collectives, each many times in a row without waiting, as the persistent form and the CPU have them.
fn steps_have_the_same_bits(gpu: &Device, crypto: Crypto) -> Outcome {
    let _alone = alone();
    for count in [1, 2, 3, 4] {
        for algorithm in [Algorithm::Ring, Algorithm::RelayRing, Algorithm::Exchange] {
            if algorithm == Algorithm::Exchange && count > 2 {
                continue;
            }
            let bytes = 1 << 18;
            let launch = by_steps(crypto, 4 * bytes);
            let mut ranks = Ranks::new(&places(from_ref(gpu), count), GpuOptions { algorithm, ..launch })?;
            ensure!(ranks.group.launch_form() == LaunchForm::PerStep, "another form was taken");
            let scatter = Request::ReduceScatter(ReduceOp::Sum);
            let mut cases = Vec::new();
            for request in [SUMS, scatter, Request::AllGather, Request::Broadcast { root: count - 1 }, SUMS] {
                for elements in [0, 1, bytes / 4 - 5, bytes] {
                    let in_place = cases.len() % 2 == 1;
                    cases.push(Case { request, dtype: Dtype::F32, count: elements, offset: 0, in_place });
                }
            }
            let expected = cases.iter().map(|case| ranks.expected(case)).collect::<Result<Vec<_>, _>>()?;
            for (case, expected) in cases.iter().zip(&expected) {
                ranks.succeeds(case, expected)?;
                for _ in 0..5 {
                    ranks.start(case)?;
                }
                ranks.succeeds(case, expected)?;
            }
        }
    }
    Ok(())
}

/// Every launch has its time, and they lie in the rank's span; the group works on.
fn steps_can_be_timed(gpu: &Device) -> Outcome {
    let _alone = alone();
    let (count, bytes) = (3, 1 << 20);
    for crypto in [Crypto::None, AES256] {
        let mut ranks = Ranks::new(&places(from_ref(gpu), count), by_steps(crypto, bytes))?;
        let case = Case::all_reduce(Dtype::F32, ReduceOp::Sum, bytes / 4);
        let streams: Vec<_> = ranks.streams.iter().collect();
        let buffers = ranks.buffers();
        // SAFETY: the buffers hold the vectors; it waits for the streams.
        let times = unsafe { ranks.group.time_steps(SUMS, &buffers, case.count, case.dtype, &streams)? };
        ensure!(times.len() == count, "{times:?}");
        for rank in &times {
            ensure!(rank.steps.len() == 2 * count - 1, "{rank:?}");
            let own = rank.steps.iter().sum::<Duration>() + rank.closing;
            // Each time is rounded to half a microsecond.
            let rounding = Duration::from_nanos(500 * 2 * count as u64);
            let inside = own <= rank.span + rounding;
            ensure!(inside && rank.steps.iter().all(|&step| step > Duration::ZERO), "{rank:?}");
        }
        let expected = ranks.expected(&case)?;
        ranks.succeeds(&case, &expected)?;
    }
    let mut persistent = Ranks::new(&places(from_ref(gpu), 2), options(Crypto::None, 64))?;
    let streams: Vec<_> = persistent.streams.iter().collect();
    let nowhere = [RankBuffers { input: 0, output: 0 }; 2];
    // SAFETY: of no elements.
    let refusal = unsafe { persistent.group.time_steps(SUMS, &nowhere, 0, Dtype::F32, &streams) };
    ensure!(matches!(refusal, Err(Failure::InvalidArgument(_))), "{refusal:?}");
    Ok(())
}

/// One more rank than there are multiprocessors: their persistent kernels would wait for each other in vain.
fn more_ranks_than_fit(gpu: &Device) -> Outcome {
    let _alone = alone();
    let count = gpu.multiprocessors()? as usize + 1;
    let devices = places(from_ref(gpu), count);
    let persistent =
        GpuOptions { launch: LaunchForm::Persistent, sm_budget: None, ..options(Crypto::None, 4096) };
    let refusal = GpuGroup::new(&devices, image(gpu)?, &GroupSecret::random()?, persistent);
    ensure!(matches!(refusal, Err(Failure::InvalidArgument(_))), "{refusal:?}");
    let mut ranks = Ranks::new(&devices, options(Crypto::None, 4096))?;
    ensure!(ranks.group.launch_form() == LaunchForm::PerStep, "auto took the persistent form");
    let case = Case::all_reduce(Dtype::I32, ReduceOp::Sum, 1000);
    let expected = ranks.expected(&case)?;
    ranks.succeeds(&case, &expected)
}

/// Keys that last for two collectives or one.
fn epochs(gpus: &[Device], count: usize, algorithm: Algorithm) -> Outcome {
    let _alone = alone();
    let bytes = 1 << 18;
    for key_bytes in [3 * bytes as u64, 5 * bytes as u64] {
        let options = GpuOptions { key_bytes, algorithm, ..options(AES256, bytes) };
        let mut ranks = Ranks::new(&places(gpus, count), options)?;
        let case = Case::all_reduce(Dtype::Bf16, ReduceOp::Avg, bytes / 2);
        let expected = ranks.expected(&case)?;
        for _ in 0..9 {
            ranks.start(&case)?;
        }
        ranks.succeeds(&case, &expected)?;
    }
    let mut ranks = Ranks::new(
        &places(gpus, count),
        GpuOptions { key_bytes: 1 << 10, algorithm, ..options(AES256, bytes) },
    )?;
    let case = Case::all_reduce(Dtype::F32, ReduceOp::Sum, bytes / 4);
    match ranks.start(&case) {
        Err(error) if matches!(error.downcast_ref(), Some(Failure::KeyExhausted { .. })) => Ok(()),
        other => Err(format!("more than a key may encrypt gave {other:?}").into()),
    }
}
