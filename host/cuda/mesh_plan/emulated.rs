//! The mesh kernels' own source in the emulator, all ranks' grids at once: the bits of the CPU's ranks by the same schedule, and
//! what a changed byte anywhere leads to.

use std::thread;

use ringseal_kernels::aes::expand_key;
use ringseal_kernels::device::emulated::{Launch, launch};
use ringseal_kernels::device::{global, spin_pause, thread as gpu_thread};
use ringseal_kernels::ghash::{GHASH_KEY_GRID, GhashKeyParams, ghash_key};
use ringseal_kernels::mesh::{
    Mesh, MeshParams, Outbox, failed_message, failed_parts, mesh_plain, mesh_plain_any, scratch_bytes,
    started_at,
};
use ringseal_kernels::record::Call;
use ringseal_kernels::reduce::{is_common, reduction};
use ringseal_kernels::ring::{PLAIN_SHARED, RankState, RingParams, SIGNAL_BYTES, THREADS, failure};
use ringseal_kernels::sealed::{RoundKeysParams, SenderKey, store_round_keys};
use ringseal_kernels::sealed_mesh::{
    SEALED_MESH_SHARED, SealedMeshParams, mesh_sealed_128, mesh_sealed_256, mesh_sealed_any_128,
    mesh_sealed_any_256,
};

use super::*;
use crate::aead::AesKey;
use crate::channel::{Crypto, GroupSecret, KeyLength};
use crate::collective::{Buffers, Communicator, Options, Request};
use crate::cuda::ring_keys::hash_key;
use crate::cuda::ring_plan::Plan;
use crate::{Dtype, ReduceOp};

/// Memory with the alignment that device allocations have.
#[derive(Clone, Copy)]
#[repr(C, align(256))]
struct Line([u8; 256]);

struct Buffer(Vec<Line>);

impl Buffer {
    fn new(bytes: usize, value: u8) -> Self {
        Self(vec![Line([value; 256]); bytes.div_ceil(256) + 1])
    }

    fn address(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: lines are bytes.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * 256) }
    }
}

#[derive(Clone, Copy, Debug)]
struct Case {
    request: Request,
    algorithm: Algorithm,
    ranks: usize,
    dtype: Dtype,
    count: usize,
    record_bytes: usize,
    grid: u32,
    /// Distance of the vectors from an aligned address.
    shift: usize,
    in_place: bool,
    length: Option<KeyLength>,
}

impl Case {
    fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    fn plan(&self) -> Plan {
        Plan::new(self.request.collective(), self.algorithm, self.ranks, self.bytes(), self.dtype)
    }
}

/// All ranks' memory, which never moves: the kernels hold addresses.
struct Group {
    case: Case,
    programs: Vec<Program>,
    steps: Vec<Buffer>,
    outboxes: Vec<Vec<Outbox>>,
    states: Vec<RankState>,
    notices: Vec<Buffer>,
    notice_addresses: Vec<u64>,
    inputs: Vec<Buffer>,
    outputs: Vec<Buffer>,
    inboxes: Vec<Buffer>,
    signals: Vec<Buffer>,
    scratch: Vec<Buffer>,
    keys: Box<[SenderKey]>,
}

impl Group {
    fn new(case: Case, vectors: &[Vec<u8>]) -> Self {
        let plan = case.plan();
        let programs: Vec<Program> = (0..case.ranks).map(|rank| plan.program(rank)).collect();
        let chunk = plan.longest_chunk();
        let (stride, records) = (chunk.next_multiple_of(256), chunk.div_ceil(case.record_bytes));
        let per_rank =
            |bytes: usize, value: u8| (0..case.ranks).map(|_| Buffer::new(bytes, value)).collect::<Vec<_>>();
        let mut inputs = per_rank(case.bytes() + case.shift, 0xa5);
        for (input, vector) in inputs.iter_mut().zip(vectors) {
            input.bytes()[case.shift..][..vector.len()].copy_from_slice(vector);
        }
        let (inboxes, signals) = (
            per_rank(2 * plan.messages() * stride, 0xa5),
            per_rank(2 * plan.messages() * records * SIGNAL_BYTES as usize, 0),
        );
        let outbox = |to: &Destination| Outbox {
            inbox: inboxes[to.rank].address() + (to.message * stride) as u64,
            signals: signals[to.rank].address() + (to.message * records) as u64 * SIGNAL_BYTES,
        };
        let outboxes = programs.iter().map(|p| p.destinations.iter().map(outbox).collect()).collect();
        let notices = per_rank(started_at(case.ranks as u32) as usize, 0);
        let steps = programs.iter().map(|program| {
            let mut table = Buffer::new(size_of_val(program.steps.as_slice()), 0);
            let bytes = size_of_val(program.steps.as_slice());
            // SAFETY: steps are words without padding.
            let steps = unsafe { std::slice::from_raw_parts(program.steps.as_ptr().cast(), bytes) };
            table.bytes()[..bytes].copy_from_slice(steps);
            table
        });
        Self {
            steps: steps.collect(),
            outboxes,
            states: vec![RankState { sequence: 1, ..RankState::default() }; case.ranks],
            notice_addresses: notices.iter().map(Buffer::address).collect(),
            notices,
            inputs,
            outputs: per_rank(case.bytes() + case.shift, 0xa5),
            inboxes,
            signals,
            scratch: per_rank(scratch_bytes(chunk as u64) as usize, 0xa5),
            keys: case.length.map_or_else(Box::default, |length| keys(case.ranks, length)),
            programs,
            case,
        }
    }

    fn ring(&self, rank: usize) -> RingParams {
        let (case, plan) = (&self.case, self.case.plan());
        let (given, wanted) = (plan.given(rank), plan.wanted(rank));
        let chunk = plan.longest_chunk();
        let (stride, records) = (chunk.next_multiple_of(256), chunk.div_ceil(case.record_bytes));
        let (dtype, op) = match case.request.op() {
            Some(op) => (case.dtype, op),
            None => (Dtype::F32, ReduceOp::Sum),
        };
        let input = self.inputs[rank].address() + (case.shift + given.start) as u64;
        // In place: the part that the rank gets has the place in the vector that it has there.
        let output = match case.in_place {
            true => input - given.start as u64,
            false => self.outputs[rank].address() + case.shift as u64,
        } + wanted.start as u64;
        RingParams {
            state: std::ptr::from_ref(&self.states[rank]) as u64,
            notice: self.notices[rank].address(),
            notices: self.notice_addresses.as_ptr() as u64,
            steps: self.steps[rank].address(),
            input: input - given.start as u64,
            output: output - wanted.start as u64,
            result: output,
            bytes: wanted.len() as u64,
            inbox: self.inboxes[rank].address(),
            outbox: 0,
            inbox_half: (plan.messages() * stride) as u64,
            message_stride: stride as u64,
            signals_in: self.signals[rank].address(),
            signals_out: 0,
            signals_half: (plan.messages() * records) as u64,
            timeout_ns: 1_000_000_000,
            epoch: 0,
            calls: 1,
            calls_limit: 1000,
            step_count: self.programs[rank].steps.len() as u32,
            records: records as u32,
            record_bytes: case.record_bytes as u32,
            reduction: reduction(dtype as u32, op as u32),
            rank: rank as u32,
            ranks: case.ranks as u32,
            unit: plan.unit() as u32,
            awaits_successor: 0,
            more: 0,
            reserved: 0,
        }
    }

    /// The kernel of rank `rank`.
    fn kernel(&self, rank: usize) -> Launch<'static> {
        let ring = self.ring(rank);
        let mesh = Mesh {
            outboxes: self.outboxes[rank].as_ptr() as u64,
            scratch: self.scratch[rank].address(),
            awaits_others: self.case.plan().may_run_ahead() as u32,
            reserved: 0,
        };
        let common = is_common(ring.reduction);
        let grid = self.case.grid;
        let Some(length) = self.case.length else {
            let params = MeshParams { ring, mesh };
            let kernel: unsafe fn(MeshParams) = if common { mesh_plain } else { mesh_plain_any };
            // SAFETY: the group's memory is as the parameters say.
            return Launch::new(grid, THREADS, PLAIN_SHARED, move || unsafe { kernel(params) });
        };
        let call =
            Call { codes: [1, 2, 3, 4], count: self.case.count as u64, ranks: ring.ranks, reserved: 0 };
        let params = SealedMeshParams { ring, mesh, call, senders: self.keys.as_ptr() as u64 };
        let kernel: unsafe fn(SealedMeshParams) = match (length, common) {
            (KeyLength::Aes128, true) => mesh_sealed_128,
            (KeyLength::Aes128, false) => mesh_sealed_any_128,
            (KeyLength::Aes256, true) => mesh_sealed_256,
            (KeyLength::Aes256, false) => mesh_sealed_any_256,
        };
        // SAFETY: as above.
        Launch::new(grid, THREADS, SEALED_MESH_SHARED, move || unsafe { kernel(params) })
    }

    fn run(&self) {
        launch(&(0..self.case.ranks).map(|rank| self.kernel(rank)).collect::<Vec<_>>());
    }

    /// What rank `rank` got.
    fn result(&mut self, rank: usize) -> Vec<u8> {
        let wanted = self.case.plan().wanted(rank);
        let (shift, bytes, in_place) = (self.case.shift, self.case.bytes(), self.case.in_place);
        let memory = if in_place { &mut self.inputs } else { &mut self.outputs }[rank].bytes();
        let (begin, end) = (shift + wanted.start, shift + wanted.end);
        let around = if in_place { (shift, shift + bytes) } else { (begin, end) };
        let untouched = memory[..around.0].iter().chain(&memory[around.1..]).all(|&byte| byte == 0xa5);
        assert!(untouched, "rank {rank} wrote beyond its result");
        memory[begin..end].to_vec()
    }
}

fn keys(ranks: usize, length: KeyLength) -> Box<[SenderKey]> {
    // SAFETY: keys are plain words, and all of each is written before it is read.
    let keys = unsafe { Box::<[SenderKey]>::new_zeroed_slice(ranks).assume_init() };
    for (rank, sender) in keys.iter().enumerate() {
        let bytes: Vec<u8> = (0..length.bytes()).map(|i| (16 * rank + i) as u8).collect();
        let key = AesKey::from_bytes(&bytes).unwrap();
        let address = std::ptr::from_ref(sender) as u64;
        let params = GhashKeyParams { h: hash_key(&key), key: address };
        // SAFETY: the key's address.
        launch(&[Launch::new(GHASH_KEY_GRID, 256, 0, || unsafe { ghash_key(params) })]);
        let params = RoundKeysParams { round_keys: expand_key(&bytes), key: address };
        // SAFETY: the key's address.
        launch(&[Launch::new(1, 32, 0, || unsafe { store_round_keys(params) })]);
    }
    keys
}

/// The part of the vector that each rank gives: floats of like size, so that the order of summation shows, with some NaNs,
/// infinities and signed zeros; integers are any.
fn given(case: &Case) -> Vec<Vec<u8>> {
    let plan = case.plan();
    let element = |rank: usize, at: usize| -> Vec<u8> {
        let random = ((at * case.ranks + rank) as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let random = (random ^ random >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 11;
        let value = match random % 97 {
            0 => f64::NAN,
            1 => f64::INFINITY,
            2 => f64::NEG_INFINITY,
            3 => -0.0,
            4 => 0.0,
            _ => (random >> 8) as f64 / (1u64 << 43) as f64 - 4.0,
        };
        match case.dtype {
            Dtype::F32 => (value as f32).to_le_bytes().to_vec(),
            Dtype::F64 => value.to_le_bytes().to_vec(),
            Dtype::F16 => half::f16::from_f64(value).to_le_bytes().to_vec(),
            Dtype::Bf16 => half::bf16::from_f64(value).to_le_bytes().to_vec(),
            _ => random.to_le_bytes()[..case.dtype.size()].to_vec(),
        }
    };
    (0..case.ranks)
        .map(|rank| {
            let vector: Vec<u8> = (0..case.count).flat_map(|at| element(rank, at)).collect();
            let mut place = vec![0xa5; case.bytes()];
            place[plan.given(rank)].copy_from_slice(&vector[plan.given(rank)]);
            place
        })
        .collect()
}

/// What the CPU's ranks get by the same schedule.
fn expected(case: &Case, vectors: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let options = Options { crypto: Crypto::None, algorithm: case.algorithm, ..Options::default() };
    let secret = GroupSecret::random().unwrap();
    let ranks = Communicator::in_process(case.ranks, &secret, &options).unwrap();
    let plan = case.plan();
    thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .into_iter()
            .zip(vectors)
            .map(|(mut communicator, vector)| {
                scope.spawn(move || {
                    let rank = communicator.rank();
                    let given = match case.request {
                        Request::Broadcast { root } if root != rank => 0..0,
                        _ => plan.given(rank),
                    };
                    let mut output = vec![0; plan.wanted(rank).len()];
                    let buffers = Buffers::Apart { input: &vector[given], output: &mut output };
                    communicator.run(case.request, case.dtype, buffers).unwrap();
                    output
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Both halves of the mailboxes, and the first anew.
fn has_the_bits_of_the_cpu(case: Case) {
    let vectors = given(&case);
    let expected = expected(&case, &vectors);
    let mut group = Group::new(case, &vectors);
    for sequence in 1..=3 {
        group.run();
        for rank in 0..case.ranks {
            let state = group.states[rank];
            assert_eq!((state.failure, state.sequence), (0, sequence + 1), "{case:?}: rank {rank}");
            assert!(group.result(rank) == expected[rank], "{case:?}: rank {rank}, collective {sequence}");
            if case.in_place {
                group.inputs[rank].bytes()[case.shift..][..case.bytes()].copy_from_slice(&vectors[rank]);
            }
        }
    }
}

const ALGORITHMS: [Algorithm; 3] = [Algorithm::Direct, Algorithm::Tree, Algorithm::Exchange];

fn case(algorithm: Algorithm, ranks: usize, count: usize) -> Case {
    Case {
        request: Request::AllReduce(ReduceOp::Sum),
        algorithm,
        ranks,
        dtype: Dtype::F32,
        count,
        record_bytes: 4096,
        grid: 1,
        shift: 0,
        in_place: false,
        length: None,
    }
}

#[test]
fn plain_all_reduces_have_the_bits_of_the_cpu() {
    for algorithm in ALGORITHMS {
        for (ranks, count, grid, in_place) in
            [(2, 1, 1, false), (3, 1023, 1, true), (4, 9001, 2, false), (5, 4099, 1, true), (6, 3, 1, false)]
        {
            has_the_bits_of_the_cpu(Case { grid, in_place, ..case(algorithm, ranks, count) });
        }
    }
}

/// Of which a thread moves several quads at once.
#[test]
fn plain_all_reduces_of_long_records() {
    for (algorithm, dtype) in
        [(Algorithm::Direct, Dtype::Bf16), (Algorithm::Tree, Dtype::F32), (Algorithm::Exchange, Dtype::F16)]
    {
        let (record_bytes, request) = (64 << 10, Request::AllReduce(ReduceOp::Avg));
        let count = if algorithm == Algorithm::Direct { 120_003 } else { 30_003 };
        has_the_bits_of_the_cpu(Case { dtype, record_bytes, request, ..case(algorithm, 3, count) });
    }
}

#[test]
fn plain_all_reduces_of_every_type_and_operation() {
    for (number, dtype) in Dtype::ALL.into_iter().enumerate() {
        for (turn, op) in ReduceOp::ALL.into_iter().enumerate() {
            let shift = if number % 2 == 0 { dtype.size() } else { 0 };
            let case = case(ALGORITHMS[(number + turn) % 3], 3 + turn % 2, 700);
            let request = Request::AllReduce(op);
            has_the_bits_of_the_cpu(Case { request, dtype, record_bytes: 512, shift, ..case });
        }
    }
}

#[test]
fn plain_other_collectives() {
    for algorithm in ALGORITHMS {
        others(|ranks| Case { record_bytes: 1024, ..case(algorithm, ranks, 0) });
    }
}

fn others(case: impl Fn(usize) -> Case) {
    for (ranks, dtype, count) in [(2, Dtype::Bf16, 2003), (3, Dtype::U8, 2), (5, Dtype::F16, 1023)] {
        for request in [
            Request::ReduceScatter(ReduceOp::Avg),
            Request::AllGather,
            Request::Broadcast { root: 0 },
            Request::Broadcast { root: ranks - 1 },
        ] {
            has_the_bits_of_the_cpu(Case { request, dtype, count, ..case(ranks) });
        }
    }
}

#[test]
fn sealed_all_reduces_have_the_bits_of_the_cpu() {
    for algorithm in ALGORITHMS {
        for (ranks, count, grid, length) in [
            (2, 1023, 1, KeyLength::Aes256),
            (3, 9001, 2, KeyLength::Aes128),
            (4, 5000, 1, KeyLength::Aes128),
            (5, 3, 1, KeyLength::Aes256),
        ] {
            let (length, in_place) = (Some(length), ranks % 2 == 0);
            has_the_bits_of_the_cpu(Case { grid, length, in_place, ..case(algorithm, ranks, count) });
        }
    }
}

/// Records of more than a tile, of ends that are no whole quads, in vectors that are not aligned.
#[test]
fn sealed_all_reduces_of_other_types() {
    for (number, (dtype, op)) in [
        (Dtype::Bf16, ReduceOp::Sum),
        (Dtype::F16, ReduceOp::Avg),
        (Dtype::F16, ReduceOp::Max),
        (Dtype::U8, ReduceOp::Avg),
        (Dtype::I64, ReduceOp::Min),
        (Dtype::F64, ReduceOp::Prod),
    ]
    .into_iter()
    .enumerate()
    {
        let shift = if number % 2 == 0 { dtype.size() } else { 0 };
        let count = 70_001 / dtype.size();
        let case = case(ALGORITHMS[number % 3], 3 + number / 3, count);
        let request = Request::AllReduce(op);
        let length = Some(KeyLength::Aes128);
        has_the_bits_of_the_cpu(Case { request, dtype, record_bytes: 32 << 10, shift, length, ..case });
    }
}

#[test]
fn sealed_other_collectives() {
    for algorithm in ALGORITHMS {
        let length = Some(KeyLength::Aes256);
        others(|ranks| Case { record_bytes: 1024, length, ..case(algorithm, ranks, 0) });
    }
}

/// What is changed of a message on its way.
#[derive(Clone, Copy, Debug)]
enum Change {
    /// A bit of this byte of this record.
    Text(u64, u64),
    /// A bit of this byte of this record's tag.
    Tag(u64, u64),
}

/// Somebody between sender and receiver: hands the records of one message on when they come, one of them changed.
#[derive(Clone, Copy)]
struct Between {
    /// Where the sender's kernel stores, and where the receiver's loads.
    wire: Outbox,
    mailbox: Outbox,
    bytes: u64,
    record_bytes: u64,
    change: Change,
    /// The receiver's state: after a failure nothing more may come.
    state: u64,
}

impl Between {
    /// One thread's work.
    fn hand_on(&self) {
        for record in 0..self.bytes.div_ceil(self.record_bytes) {
            let signal = record * SIGNAL_BYTES;
            let start = record * self.record_bytes;
            let length = (self.bytes - start).min(self.record_bytes);
            // SAFETY: the message's place in both mailboxes.
            unsafe {
                while global::load_volatile_u64(self.wire.signals + signal + 16) != 1 {
                    if global::load_volatile_u32(self.state + std::mem::offset_of!(RankState, aborted) as u64)
                        != 0
                    {
                        return;
                    }
                    spin_pause();
                }
                let copy = |from: u64, to: u64, length: u64, changed: Option<u64>| {
                    for at in 0..length {
                        let bit = u8::from(changed == Some(at));
                        global::store_u8(to + at, global::load_u8(from + at) ^ bit);
                    }
                };
                let (text, tag) = match self.change {
                    Change::Text(of, at) if of == record => (Some(at), None),
                    Change::Tag(of, at) if of == record => (None, Some(at)),
                    _ => (None, None),
                };
                copy(self.wire.inbox + start, self.mailbox.inbox + start, length, text);
                copy(self.wire.signals + signal, self.mailbox.signals + signal, 16, tag);
                global::store_release_sys(self.mailbox.signals + signal + 16, 1);
            }
        }
    }
}

/// Every message, its text and its tag, in its first record or its last: the receiver refuses it, wipes what it has, tells the others, and passes
/// on nothing that depends on it.
fn refuses_changes(case: Case) {
    let vectors = given(&case);
    let expected = expected(&case, &vectors);
    let programs: Vec<_> = (0..case.ranks).map(|rank| case.plan().program(rank)).collect();
    for (sender, program) in programs.iter().enumerate() {
        for step in program.steps.iter().filter(|step| step.fan_out > 0) {
            let last = (step.bytes - 1) / case.record_bytes as u64;
            let end = (step.bytes - 1) % case.record_bytes as u64;
            for at in step.to as usize..(step.to + step.fan_out) as usize {
                let changes =
                    [Change::Text(0, 5), Change::Text(last, end), Change::Tag(last, 15), Change::Tag(0, 0)];
                for change in [changes[(sender + at) % 4], changes[(sender + at + 2) % 4]] {
                    let mut group = Group::new(case, &vectors);
                    let (wire, signals) =
                        (Buffer::new(step.bytes as usize, 0), Buffer::new(32 * (last as usize + 1), 0));
                    let wire = Outbox { inbox: wire.address(), signals: signals.address() };
                    let between = Between {
                        wire,
                        mailbox: std::mem::replace(&mut group.outboxes[sender][at], wire),
                        bytes: step.bytes,
                        record_bytes: case.record_bytes as u64,
                        change,
                        state: std::ptr::from_ref(&group.states[program.destinations[at].rank]) as u64,
                    };
                    let mut grids: Vec<_> = (0..case.ranks).map(|rank| group.kernel(rank)).collect();
                    grids.push(Launch::new(1, 32, 0, move || {
                        if gpu_thread::index() == 0 {
                            between.hand_on();
                        }
                    }));
                    launch(&grids);
                    let to = program.destinations[at];
                    let (Change::Text(record, _) | Change::Tag(record, _)) = change;
                    check_refusal(
                        &mut group,
                        &expected,
                        sender,
                        to,
                        record,
                        &format!("{case:?}, {change:?}"),
                    );
                }
            }
        }
    }
}

fn check_refusal(
    group: &mut Group,
    expected: &[Vec<u8>],
    sender: usize,
    to: Destination,
    record: u64,
    what: &str,
) {
    let message = failed_message(sender as u32, to.message as u32);
    let wanted = failure::pack(failure::AUTHENTICATION, message, record as u32);
    assert_eq!(group.states[to.rank].failure, wanted, "{what}: from {sender} to {to:?}");
    for (rank, expected) in expected.iter().enumerate() {
        let result = group.result(rank);
        let wiped = result.iter().all(|&byte| byte == 0);
        // A rank that had all it needs before may keep it.
        assert!(wiped || rank != to.rank && result == *expected, "{what}: rank {rank} kept data");
    }
    let steps = &group.programs[to.rank].steps;
    let refused = steps.iter().position(|s| s.actions & RECEIVE != 0 && s.receives as usize == to.message);
    for step in &steps[refused.expect("it is received")..] {
        for outbox in &group.outboxes[to.rank][step.to as usize..][..step.fan_out as usize] {
            // SAFETY: a signal of the message, whose kernels have ended.
            let signal = unsafe { global::load_u64(outbox.signals + record * SIGNAL_BYTES + 16) };
            assert_eq!(signal, 0, "{what}: rank {} passed on what came of it", to.rank);
        }
    }
}

#[test]
fn changed_messages_are_refused_and_nothing_comes_of_them() {
    for (algorithm, ranks) in [(Algorithm::Direct, 3), (Algorithm::Tree, 4), (Algorithm::Exchange, 3)] {
        // Two records of each chunk.
        let chunks = if algorithm == Algorithm::Direct { ranks } else { 1 };
        let length = Some(KeyLength::Aes128);
        refuses_changes(Case { length, record_bytes: 256, ..case(algorithm, ranks, 100 * chunks) });
    }
}

#[test]
fn changed_messages_of_other_collectives_are_refused() {
    for algorithm in [Algorithm::Direct, Algorithm::Tree] {
        for request in
            [Request::ReduceScatter(ReduceOp::Sum), Request::AllGather, Request::Broadcast { root: 1 }]
        {
            let length = Some(KeyLength::Aes256);
            let count = if matches!(request, Request::Broadcast { .. }) { 100 } else { 300 };
            refuses_changes(Case { request, length, record_bytes: 256, ..case(algorithm, 3, count) });
        }
    }
}

/// Otherwise it could overwrite what another has yet to read.
#[test]
fn no_rank_completes_a_collective_before_all_have_started_it() {
    for algorithm in ALGORITHMS {
        for request in
            [Request::Broadcast { root: 0 }, Request::AllGather, Request::ReduceScatter(ReduceOp::Sum)]
        {
            let case = Case { request, ..case(algorithm, 4, 100) };
            let mut group = Group::new(case, &given(&case));
            launch(&(0..3).map(|rank| group.kernel(rank)).collect::<Vec<_>>());
            for rank in 0..3 {
                assert_ne!(group.states[rank].aborted, 0, "{case:?}: rank {rank} completed it");
                assert!(group.result(rank).iter().all(|&byte| byte == 0), "{case:?}: rank {rank} kept data");
            }
        }
    }
    // The root has nothing to receive: it awaits the missing one's start.
    let case = Case { request: Request::Broadcast { root: 0 }, ..case(Algorithm::Direct, 3, 100) };
    let group = Group::new(case, &given(&case));
    launch(&(0..2).map(|rank| group.kernel(rank)).collect::<Vec<_>>());
    assert_eq!(group.states[0].failure, failure::pack(failure::ABSENT, failed_message(2, 0), 0));
}

#[test]
fn a_missing_rank_is_named_and_all_others_fail() {
    for algorithm in ALGORITHMS {
        let case = case(algorithm, 3, 300);
        let mut group = Group::new(case, &given(&case));
        launch(&(0..2).map(|rank| group.kernel(rank)).collect::<Vec<_>>());
        let (field, cause) =
            ((group.states[0].failure >> 32) as u32 & 0xff_ffff, group.states[0].failure >> 56);
        assert_eq!((cause, failed_parts(field).0), (failure::DEADLINE, 2), "{algorithm:?}");
        for rank in 0..2 {
            assert_ne!(group.states[rank].aborted, 0);
            assert!(group.result(rank).iter().all(|&byte| byte == 0));
        }
    }
}
