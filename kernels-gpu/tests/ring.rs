//! Collectives round a ring in the emulator: all ranks' grids at once.

use std::ops::Range;

use aes::cipher::BlockCipherEncrypt;
use aes_gcm::aead::{AeadInOut, KeyInit, array::Array};
use ringseal_kernels::aes::expand_key;
use ringseal_kernels::device::emulated::{Launch, launch};
use ringseal_kernels::exchange::{
    EXCHANGE_SHARED, ExchangeParams, PADDED_EXCHANGE_SHARED, PaddedExchangeParams, exchange_padded_128,
    exchange_sealed_128, exchange_sealed_any_128,
};
use ringseal_kernels::fused::{
    FUSED_SHARED, relay_sealed_128, relay_sealed_any_128, ring_sealed_128, ring_sealed_any_128,
};
use ringseal_kernels::ghash::{GHASH_KEY_GRID, GhashKeyParams, ghash_key};
use ringseal_kernels::padded::{ChunkPads, PAD_FILL_SHARED, PadFillParams, PadHead, pad_name, pads_fill_128};
use ringseal_kernels::record::{AAD_BLOCKS, Call, Header};
use ringseal_kernels::reduce::reduction;
use ringseal_kernels::ring::{
    Notice, PLAIN_SHARED, RankState, RingParams, SIGNAL_BYTES, THREADS, failure, ring_plain, ring_plain_any,
};
use ringseal_kernels::sealed::{
    LONGEST_RECORD, PADDED_RING_SHARED, PaddedRingParams, RoundKeysParams, SealedKey, SealedRingParams,
    SenderKey, StepPads, relay_padded_128, store_round_keys,
};
use ringseal_kernels::short::{LONGEST_SHORT_RECORD, relay_short_128};
use ringseal_kernels::step::{
    SEND, Step, chunk, exchange, ring_all_gather, ring_all_reduce, ring_broadcast, ring_reduce_scatter,
};

const F32: u32 = 0;
const U8: u32 = 5;
const I32: u32 = 6;
const SUM: u32 = 0;
const AVG: u32 = 1;
const MAX: u32 = 3;

/// Memory with the alignment that device allocations have.
#[derive(Clone, Copy)]
#[repr(C, align(256))]
struct Line([u8; 256]);

struct Buffer(Vec<Line>);

impl Buffer {
    fn new(bytes: usize) -> Self {
        Buffer(vec![Line([0xa5; 256]); bytes.div_ceil(256) + 1])
    }

    fn address(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: lines are bytes.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * 256) }
    }
}

struct Setup {
    ranks: u32,
    grid: u32,
    bytes: usize,
    record_bytes: u32,
    reduction: u32,
    relay: bool,
    collective: Collective,
    /// What the chunks of a reduce-scatter or an all-gather are cut in, in bytes.
    element: u64,
    /// Distance of the vectors from an aligned address.
    shift: usize,
    /// The result takes the vector's place.
    in_place: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Collective {
    AllReduce,
    /// An all-reduce of two ranks that send their whole vectors.
    Exchange,
    ReduceScatter,
    AllGather,
    Broadcast(u32),
}

impl Setup {
    fn messages(&self) -> u32 {
        match self.collective {
            Collective::AllReduce => 2 * (self.ranks - 1),
            Collective::Exchange | Collective::Broadcast(_) => 1,
            Collective::ReduceScatter | Collective::AllGather => self.ranks - 1,
        }
    }

    /// Offset and length of a chunk.
    fn chunk(&self, index: u32) -> (u64, u64) {
        let bytes = self.bytes as u64;
        match self.collective {
            Collective::AllReduce => chunk(index, self.ranks, bytes),
            Collective::Exchange | Collective::Broadcast(_) => (0, bytes),
            Collective::ReduceScatter | Collective::AllGather => {
                let (count, ranks, index) = (bytes / self.element, self.ranks as u64, index as u64);
                let start = |index: u64| index * (count / ranks) + index.min(count % ranks);
                (self.element * start(index), self.element * (start(index + 1) - start(index)))
            }
        }
    }

    fn longest(&self) -> u64 {
        self.chunk(0).1
    }

    fn step(&self, rank: u32, index: u32) -> Step {
        let (ranks, relay, bytes) = (self.ranks, self.relay, self.bytes as u64);
        let chunk = |index| self.chunk(index);
        match self.collective {
            Collective::AllReduce => ring_all_reduce(rank, ranks, index, relay, chunk),
            Collective::Exchange => exchange(rank, index, bytes),
            Collective::ReduceScatter => ring_reduce_scatter(rank, ranks, index, chunk),
            Collective::AllGather => ring_all_gather(rank, ranks, index, relay, chunk),
            Collective::Broadcast(root) => ring_broadcast(rank, ranks, root, relay, bytes),
        }
    }

    /// Where in the vector the rank's result begins, and its length.
    fn wanted(&self, rank: u32) -> (u64, u64) {
        match self.collective {
            Collective::ReduceScatter => self.chunk(rank),
            _ => (0, self.bytes as u64),
        }
    }
}

/// All ranks' memory.
struct Group {
    setup: Setup,
    /// Never grows: the kernels hold addresses.
    states: Vec<RankState>,
    notices: Vec<Notice>,
    /// Of the states and of the notices.
    addresses: [Vec<u64>; 2],
    steps: Vec<Vec<Aligned>>,
    inputs: Vec<Buffer>,
    outputs: Vec<Buffer>,
    inboxes: Vec<Buffer>,
    signals: Vec<Buffer>,
    calls_limit: u64,
    /// Where ranks reach no other's memory.
    carried: Option<Carried>,
}

/// What others carry between launches: see [`Group::carry`].
struct Carried {
    /// What each rank has for its successor, as it will lie in its inbox and its signals.
    texts: Vec<Buffer>,
    signals: Vec<Buffer>,
    /// For each rank, its own notice in place of every rank's.
    notices: Vec<Vec<u64>>,
}

#[derive(Clone, Copy)]
#[repr(C, align(16))]
struct Aligned(Step);

impl Group {
    fn new(setup: Setup, vectors: &[Vec<u8>]) -> Self {
        let Setup { ranks, bytes, shift, .. } = setup;
        let (longest, messages) = (setup.longest() as usize, setup.messages() as usize);
        let records = longest.div_ceil(setup.record_bytes as usize);
        let per_rank = |bytes: usize| (0..ranks).map(|_| Buffer::new(bytes)).collect::<Vec<_>>();
        let (mut inputs, mut signals) =
            (per_rank(bytes + shift), per_rank(2 * messages * records * SIGNAL_BYTES as usize));
        for (input, vector) in inputs.iter_mut().zip(vectors) {
            input.bytes()[shift..shift + bytes].copy_from_slice(vector);
        }
        signals.iter_mut().for_each(|signals| signals.bytes().fill(0));
        let states = vec![RankState { sequence: 1, ..RankState::default() }; ranks as usize];
        let notices = vec![Notice::default(); ranks as usize];
        let steps = match setup.collective {
            Collective::Broadcast(_) => 1,
            _ => setup.messages() + 1,
        };
        let step = |rank, index| Aligned(setup.step(rank, index));
        Group {
            addresses: [
                states.iter().map(|state| std::ptr::from_ref(state) as u64).collect(),
                notices.iter().map(|notice| std::ptr::from_ref(notice) as u64).collect(),
            ],
            notices,
            steps: (0..ranks).map(|r| (0..steps).map(|i| step(r, i)).collect()).collect(),
            states,
            inputs,
            outputs: per_rank(bytes + shift),
            inboxes: per_rank(2 * messages * longest.next_multiple_of(256)),
            signals,
            calls_limit: 1000,
            carried: None,
            setup,
        }
    }

    /// Ranks whose kernels reach no other rank's memory.
    fn apart(setup: Setup, vectors: &[Vec<u8>]) -> Self {
        let mut group = Self::new(setup, vectors);
        let like = |buffers: &mut Vec<Buffer>| {
            let zeros = |buffer: &mut Buffer| Buffer(vec![Line([0; 256]); buffer.0.len()]);
            buffers.iter_mut().map(zeros).collect()
        };
        let notices = group.addresses[1].iter().map(|&own| vec![own; group.setup.ranks as usize]).collect();
        let (texts, signals) = (like(&mut group.inboxes), like(&mut group.signals));
        group.carried = Some(Carried { texts, signals, notices });
        group
    }

    /// After round `round` of launches: moves each message that was sent in it, its signals, and whether the sender has failed to
    /// the receiver. Before the last launches all learn whether any has.
    fn carry(&mut self, round: u32) {
        let ranks = self.setup.ranks;
        let mut last = true;
        for rank in 0..ranks {
            let table = &self.steps[rank as usize];
            let index = match self.setup.collective {
                Collective::Broadcast(root) => {
                    last &= round + 1 == ranks;
                    if (rank + ranks - root) % ranks == round { 0 } else { continue }
                }
                _ => {
                    last &= round as usize + 1 == table.len();
                    round as usize
                }
            };
            let (step, params) = (table[index].0, self.params(rank));
            if step.actions & SEND == 0 || step.bytes == 0 {
                continue;
            }
            let (own, next) = (rank as usize, ((rank + 1) % ranks) as usize);
            let (half, message) = (self.states[own].turn & 1, step.sends as u64);
            let text = (half * params.inbox_half + message * params.message_stride) as usize;
            let records = step.bytes.div_ceil(params.record_bytes as u64);
            let signal =
                ((half * params.signals_half + message * params.records as u64) * SIGNAL_BYTES) as usize;
            let carried = self.carried.as_mut().unwrap();
            for (from, to, at, bytes) in [
                (&mut carried.texts, &mut self.inboxes, text, step.bytes as usize),
                (&mut carried.signals, &mut self.signals, signal, (records * SIGNAL_BYTES) as usize),
            ] {
                to[next].bytes()[at..at + bytes].copy_from_slice(&from[own].bytes()[at..at + bytes]);
            }
            self.notices[next].aborted = self.states[own].aborted;
        }
        if last {
            let greatest = self.states.iter().map(|state| state.aborted).max().unwrap();
            self.notices.iter_mut().for_each(|notice| notice.aborted = greatest);
        }
    }

    fn params(&self, rank: u32) -> RingParams {
        let Setup { ranks, record_bytes, reduction, shift, in_place, .. } = self.setup;
        let (own, next) = (rank as usize, ((rank + 1) % ranks) as usize);
        let longest = self.setup.longest();
        let (messages, records) = (self.setup.messages() as u64, longest.div_ceil(record_bytes as u64));
        let output = if in_place { &self.inputs } else { &self.outputs }[own].address() + shift as u64;
        let (first, wanted) = self.setup.wanted(rank);
        let parts = matches!(self.setup.collective, Collective::ReduceScatter | Collective::AllGather);
        let (outbox, signals_out, notices) = match &self.carried {
            None => (&self.inboxes[next], &self.signals[next], &self.addresses[1]),
            Some(carried) => (&carried.texts[own], &carried.signals[own], &carried.notices[own]),
        };
        RingParams {
            state: self.addresses[0][own],
            notice: self.addresses[1][own],
            notices: notices.as_ptr() as u64,
            steps: self.steps[own].as_ptr() as u64,
            input: self.inputs[own].address() + shift as u64,
            output,
            result: output + first,
            bytes: wanted,
            inbox: self.inboxes[own].address(),
            outbox: outbox.address(),
            inbox_half: messages * longest.next_multiple_of(256),
            message_stride: longest.next_multiple_of(256),
            signals_in: self.signals[own].address(),
            signals_out: signals_out.address(),
            signals_half: messages * records,
            timeout_ns: 1_000_000_000,
            epoch: 0,
            calls: 1,
            calls_limit: self.calls_limit,
            step_count: self.steps[own].len() as u32,
            records: records as u32,
            record_bytes,
            reduction,
            rank,
            ranks,
            unit: if parts { self.setup.element as u32 } else { 16 },
            awaits_successor: (parts || matches!(self.setup.collective, Collective::Broadcast(_))) as u32,
            more: 0,
            reserved: 0,
        }
    }

    /// Launches the plain kernel of `ranks`.
    fn plain(&self, ranks: impl Iterator<Item = u32>, kernel: unsafe fn(RingParams)) {
        let grids: Vec<_> = ranks
            .map(|rank| {
                let params = self.params(rank);
                // SAFETY: the group's memory is as the parameters say.
                Launch::new(self.setup.grid, THREADS, PLAIN_SHARED, move || unsafe { kernel(params) })
            })
            .collect();
        launch(&grids);
    }

    fn output(&mut self, rank: u32) -> Vec<u8> {
        let Setup { shift, bytes, in_place, .. } = self.setup;
        let output = if in_place { &mut self.inputs } else { &mut self.outputs }[rank as usize].bytes();
        assert!(
            output[..shift].iter().chain(&output[shift + bytes..]).all(|&byte| byte == 0xa5),
            "beyond the vector"
        );
        output[shift..shift + bytes].to_vec()
    }
}

/// As device memory has it.
#[repr(C, align(16))]
struct StepPadsAligned(StepPads);

/// A key for each rank.
struct Keys {
    keys: Vec<[u8; 16]>,
    senders: Box<[SenderKey]>,
}

impl Keys {
    fn new(ranks: u32) -> Self {
        // SAFETY: keys are plain words, and all of each is written before it is read.
        let senders = unsafe { Box::<[SenderKey]>::new_zeroed_slice(ranks as usize).assume_init() };
        let keys: Vec<[u8; 16]> =
            (0..ranks).map(|rank| std::array::from_fn(|i| (rank * 16 + i as u32) as u8)).collect();
        for (key, sender) in keys.iter().zip(&senders) {
            let mut h = Array::from([0; 16]);
            aes::Aes128::new(key.into()).encrypt_block(&mut h);
            let h = std::array::from_fn(|i| u32::from_le_bytes(h[4 * i..][..4].try_into().unwrap()));
            let address = std::ptr::from_ref(sender) as u64;
            let params = GhashKeyParams { h, key: address };
            // SAFETY: the key's address.
            launch(&[Launch::new(GHASH_KEY_GRID, 256, 0, || unsafe { ghash_key(params) })]);
            let params = RoundKeysParams { round_keys: expand_key(key), key: address };
            // SAFETY: the key's address.
            launch(&[Launch::new(1, 32, 0, || unsafe { store_round_keys(params) })]);
        }
        Keys { keys, senders }
    }

    fn sealed(&self, rank: u32) -> SealedKey {
        let ghash_key = std::ptr::from_ref(&self.senders[rank as usize].ghash) as u64;
        SealedKey { round_keys: expand_key(&self.keys[rank as usize]), ghash_key }
    }
}

fn call(setup: &Setup) -> Call {
    Call {
        codes: [0x0403_0201, 0x0807_0605, 9, 10],
        count: setup.bytes as u64,
        ranks: setup.ranks,
        reserved: 0,
    }
}

/// A kernel and, when it takes them, its keys.
#[derive(Clone, Copy)]
enum Protection<'a> {
    Plain(unsafe fn(RingParams)),
    Sealed(&'a Keys, unsafe fn(SealedRingParams)),
}

impl Group {
    /// A launch for each step and one at the end, one grid alone after the other: none can wait for another. `after` is
    /// called after each round of launches.
    fn step_by_step(&mut self, protection: Protection<'_>, mut after: impl FnMut(&mut Self, u32)) {
        let ranks = self.setup.ranks;
        let alone = |group: &Self, rank: u32, params: RingParams| match protection {
            Protection::Plain(kernel) => {
                // SAFETY: the group's memory is as the parameters say.
                launch(&[Launch::new(group.setup.grid, THREADS, PLAIN_SHARED, move || unsafe {
                    kernel(params)
                })]);
            }
            Protection::Sealed(keys, kernel) => {
                let params = group.sealed_params(keys, rank, params);
                // SAFETY: as above.
                let body = move || unsafe { kernel(params) };
                launch(&[Launch::new(group.setup.grid, THREADS, FUSED_SHARED, body)]);
            }
        };
        let rounds = match self.setup.collective {
            Collective::Broadcast(_) => ranks,
            _ => self.steps[0].len() as u32,
        };
        for round in 0..rounds {
            // The order within a round doesn't matter.
            for rank in (0..ranks).map(|rank| (rank + round) % ranks) {
                let index = match self.setup.collective {
                    Collective::Broadcast(root) if (rank + ranks - root) % ranks != round => continue,
                    Collective::Broadcast(_) => 0,
                    _ => round,
                };
                let params = self.params(rank);
                let steps = params.steps + index as u64 * size_of::<Step>() as u64;
                alone(self, rank, RingParams { steps, step_count: 1, more: 1, ..params });
            }
            after(self, round);
        }
        for rank in 0..ranks {
            alone(self, rank, RingParams { step_count: 1, records: 0, ..self.params(rank) });
        }
    }

    fn sealed_params(&self, keys: &Keys, rank: u32, ring: RingParams) -> SealedRingParams {
        let ranks = self.setup.ranks;
        SealedRingParams {
            ring,
            own: keys.sealed(rank),
            predecessor: keys.sealed((rank + ranks - 1) % ranks),
            call: call(&self.setup),
            senders: keys.senders.as_ptr() as u64,
        }
    }

    fn sealed(&self, keys: &Keys, kernel: unsafe fn(SealedRingParams)) {
        let ranks = self.setup.ranks;
        let grids: Vec<_> = (0..ranks).map(|rank| self.sealed_rank(rank, keys, kernel)).collect();
        launch(&grids);
    }

    /// One rank's launch of [`Self::sealed`].
    fn sealed_rank(&self, rank: u32, keys: &Keys, kernel: unsafe fn(SealedRingParams)) -> Launch<'_> {
        let params = self.sealed_params(keys, rank, self.params(rank));
        // SAFETY: the group's memory is as the parameters say.
        Launch::new(self.setup.grid, THREADS, FUSED_SHARED, move || unsafe { kernel(params) })
    }

    /// A collective with pads for all steps, of the kind that `guess` gives for a step and a side; returns how many records
    /// had none, of all ranks.
    fn padded_relay(&self, keys: &Keys, guess: impl Fn(u32, u32) -> Guess) -> u32 {
        self.padded_relay_of(keys, keys, guess)
    }

    /// As [`Self::padded_relay`], of ranks that seal with the keys `own`.
    fn padded_relay_of(&self, keys: &Keys, own: &Keys, guess: impl Fn(u32, u32) -> Guess) -> u32 {
        let record_bytes = self.setup.record_bytes;
        let blocks = self.setup.grid;
        // Of each rank, what its steps' pads are kept in, and the table of where they are.
        let mut pads: Vec<Vec<[Pads; 2]>> = Vec::new();
        for rank in 0..self.setup.ranks {
            let sequence = self.states[rank as usize].sequence - 1;
            let sides = |step: &Step| {
                let side = |side: u32, sender: u32, sealed_in: u32| {
                    let guess = guess(step.sends, side);
                    let name = pad_name(sequence, sealed_in & 0xffff);
                    Pads::of_chunk(keys, sender, name, step.bytes, record_bytes, guess)
                };
                [side(0, step.sealed_by, step.sealed_in), side(1, rank, step.sends)]
            };
            pads.push(self.steps[rank as usize].iter().map(|step| sides(&step.0)).collect());
        }
        let tables: Vec<Vec<StepPadsAligned>> = pads
            .iter()
            .map(|steps| {
                let entry =
                    |[opens, seals]: &[Pads; 2]| StepPads { opens: opens.params(), seals: seals.params() };
                steps.iter().map(|step| StepPadsAligned(entry(step))).collect()
            })
            .collect();
        let scratch: Vec<Buffer> = (0..self.setup.ranks)
            .map(|_| {
                let mut buffer = Buffer::new(2 * (blocks * record_bytes) as usize);
                buffer.bytes().fill(0);
                buffer
            })
            .collect();
        let grids: Vec<_> = (0..self.setup.ranks)
            .map(|rank| {
                let ring = self.sealed_params(keys, rank, self.params(rank));
                let ring = SealedRingParams { own: own.sealed(rank), ..ring };
                let params = PaddedRingParams {
                    ring,
                    pads: tables[rank as usize].as_ptr() as u64,
                    scratch: scratch[rank as usize].address(),
                };
                // SAFETY: the group's memory is as the parameters say, and so is that of the pads.
                Launch::new(blocks, THREADS, PADDED_RING_SHARED, move || unsafe { relay_padded_128(params) })
            })
            .collect();
        launch(&grids);
        for mut scratch in scratch {
            assert!(scratch.bytes().iter().all(|&byte| byte == 0), "keystream is left in scratch memory");
        }
        pads.iter().flatten().flatten().map(|pads| pads.misses[0]).sum()
    }

    /// Launches the kernel of both ranks whose first `sealers` blocks seal.
    fn exchange(&self, keys: &Keys, sealers: u32, sealed: &[Vec<u64>; 2], kernel: unsafe fn(ExchangeParams)) {
        launch(&[0, 1].map(|rank| self.half_exchange(rank, keys, sealers, sealed, kernel)));
    }

    /// One rank's launch of [`Self::exchange`].
    fn half_exchange(
        &self,
        rank: u32,
        keys: &Keys,
        sealers: u32,
        sealed: &[Vec<u64>; 2],
        kernel: unsafe fn(ExchangeParams),
    ) -> Launch<'_> {
        let ring = self.sealed_params(keys, rank, self.params(rank));
        let sealed = sealed[rank as usize].as_ptr() as u64;
        let params = ExchangeParams { ring, sealed, sealers, reserved: 0 };
        // SAFETY: the group's memory is as the parameters say.
        Launch::new(self.setup.grid, THREADS, EXCHANGE_SHARED, move || unsafe { kernel(params) })
    }

    /// Opens record `index` of message `message` to `rank` in a collective, with another AES-GCM.
    fn open(&mut self, keys: &Keys, sequence: u64, rank: u32, message: u32, index: u32) -> Vec<u8> {
        let params = self.params(rank);
        let step = self.steps[rank as usize][message as usize + 1].0;
        let start = index as u64 * params.record_bytes as u64;
        let bytes = (step.bytes - start).min(params.record_bytes as u64);
        let half = (sequence - 1) % 2;
        let slot = (half * params.inbox_half + message as u64 * params.message_stride + start) as usize;
        let signal = half * params.signals_half + (message * params.records + index) as u64;
        let mut text = self.inboxes[rank as usize].bytes()[slot..slot + bytes as usize].to_vec();
        let signals = self.signals[rank as usize].bytes();
        let tag: [u8; 16] = signals[(signal * SIGNAL_BYTES) as usize..][..16].try_into().unwrap();
        let header = Header {
            call: call(&self.setup),
            sequence: sequence - 1,
            sender: step.sealed_by,
            step: step.sealed_in,
            record: index,
            last: start + bytes == step.bytes,
        };
        let bytes = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>();
        let nonce: [u8; 12] = bytes(&header.nonce()).try_into().unwrap();
        let aad: Vec<u8> = (0..AAD_BLOCKS).flat_map(|i| bytes(&header.associated_data(i))).collect();
        let cipher = aes_gcm::Aes128Gcm::new(&keys.keys[step.sealed_by as usize].into());
        cipher
            .decrypt_inout_detached(&nonce.into(), &aad, text.as_mut_slice().into(), &tag.into())
            .expect("authentic");
        text
    }
}

#[test]
fn sealed_sums_are_right_and_only_aes_gcm_crosses() {
    for (ranks, grid, count, record_bytes) in
        [(2, 1, 7, 4096), (2, 2, 9000, 4096), (3, 1, 1023, 16384), (2, 1, 17001, 32768), (3, 2, 30000, 20480)]
    {
        sums_cross_sealed(setup(ranks, grid, 4 * count, record_bytes, reduction(F32, SUM)), ring_sealed_128);
    }
}

/// Several records in flight, so that a block opens those of two senders in turn.
#[test]
fn relayed_sums_are_right_and_cross_as_their_owners_sealed_them() {
    for (ranks, grid, count, record_bytes) in [(2, 1, 1023, 4096), (3, 1, 9000, 4096), (5, 2, 30000, 8192)] {
        let setup = setup(ranks, grid, 4 * count, record_bytes, reduction(F32, SUM));
        sums_cross_sealed(Setup { relay: true, ..setup }, relay_sealed_128);
    }
}

/// With as many blocks as records or fewer, and with several blocks for each record's steps, more than there are steps too.
#[test]
fn short_records_cross_as_their_owners_sealed_them() {
    for (ranks, grid, count, record_bytes) in [
        (2, 1, 1023, 4096),
        (2, 5, 2047, 4096),
        (2, 7, 2, 256),
        (3, 3, 3001, LONGEST_SHORT_RECORD),
        (3, 9, 3001, 2048),
        (4, 13, 4093, 4096),
        (5, 3, 30000, 8192),
    ] {
        let setup = || setup(ranks, grid, 4 * count, record_bytes, reduction(F32, SUM));
        sums_cross_sealed(Setup { relay: true, ..setup() }, relay_short_128);
        sums_cross_sealed(setup(), relay_short_128);
    }
}

/// Lengths around those that fill warps, and that leave the additional data before the tile.
#[test]
fn short_records_of_many_lengths() {
    for bytes in [4, 12, 16, 20, 508, 8160, 8188, 8192, 8196, 16336, 16340, 16368, 16384] {
        let setup = Setup { relay: true, ..setup(2, 3, 2 * bytes, 16384, reduction(F32, SUM)) };
        sums_are_right(setup, relay_short_128);
    }
}

/// The counters' upper bytes of the longest record fill their place in shared memory; one that is longer by a tile is two.
#[test]
fn the_longest_records_have_the_same_bits() {
    let bytes = LONGEST_RECORD as usize + 16400;
    sums_are_right(setup(2, 1, 2 * bytes, LONGEST_RECORD, reduction(F32, SUM)), ring_sealed_128);
}

/// One sealed sum of f32.
fn sums_are_right(setup: Setup, kernel: unsafe fn(SealedRingParams)) {
    let Setup { ranks, bytes, .. } = setup;
    let vectors = vectors(ranks, bytes);
    let expected = expected(&setup, &vectors, add_f32, |sum| sum);
    let mut group = Group::new(setup, &vectors);
    group.sealed(&Keys::new(ranks), kernel);
    for rank in 0..ranks {
        assert_eq!(group.states[rank as usize].failure, 0, "{bytes} bytes: rank {rank}");
        assert!(group.output(rank) == expected, "{bytes} bytes: rank {rank}");
    }
}

fn sums_cross_sealed(setup: Setup, kernel: unsafe fn(SealedRingParams)) {
    let Setup { ranks, bytes, record_bytes, .. } = setup;
    let count = bytes / 4;
    let vectors = vectors(ranks, 4 * count);
    let expected = expected(&setup, &vectors, add_f32, |sum| sum);
    let keys = Keys::new(ranks);
    let mut group = Group::new(setup, &vectors);
    for sequence in 1..4 {
        group.sealed(&keys, kernel);
        for rank in 0..ranks {
            assert_eq!(group.states[rank as usize].failure, 0, "{ranks} ranks, {count}: rank {rank}");
            assert!(group.output(rank) == expected, "{ranks} ranks, {count}: rank {rank}");
            for step in group.steps[rank as usize].clone().iter().skip(1) {
                for index in 0..step.0.bytes.div_ceil(record_bytes as u64) {
                    let plain = group.open(&keys, sequence, rank, step.0.receives, index as u32);
                    let start = step.0.offset as usize + index as usize * record_bytes as usize;
                    // Finished chunks travel in the last messages.
                    if step.0.receives >= ranks - 1 {
                        assert!(plain == expected[start..start + plain.len()]);
                    }
                }
            }
        }
    }
}

/// What the ring computes: the sum of chunk c starts with rank c's elements, and rank c - 1 ends it.
fn expected<const N: usize>(
    setup: &Setup,
    vectors: &[Vec<u8>],
    add: impl Fn([u8; N], [u8; N]) -> [u8; N],
    finish: impl Fn([u8; N]) -> [u8; N],
) -> Vec<u8> {
    let mut result = vec![0; setup.bytes];
    for c in 0..setup.ranks {
        let (offset, bytes) = chunk(c, setup.ranks, setup.bytes as u64);
        for at in (offset as usize..(offset + bytes) as usize).step_by(N) {
            let element = |rank: u32| vectors[(rank % setup.ranks) as usize][at..at + N].try_into().unwrap();
            let sum = (1..setup.ranks).fold(element(c), |sum, k| add(sum, element(c + k)));
            result[at..at + N].copy_from_slice(&finish(sum));
        }
    }
    result
}

/// Finite floats of many magnitudes, whose sums depend on the order.
fn vectors(ranks: u32, bytes: usize) -> Vec<Vec<u8>> {
    let word = |rank: u32, i: u32| {
        let random = (i ^ rank << 24).wrapping_mul(0x9e37_79b9).rotate_left(13).wrapping_mul(0x85eb_ca6b);
        (random & 0x83ff_ffff | (0x3c00_0000 + (random >> 26 << 23))).to_le_bytes()
    };
    (0..ranks)
        .map(|rank| (0..bytes.div_ceil(4) as u32).flat_map(|i| word(rank, i)).take(bytes).collect())
        .collect()
}

fn add_f32(a: [u8; 4], b: [u8; 4]) -> [u8; 4] {
    (f32::from_le_bytes(a) + f32::from_le_bytes(b)).to_le_bytes()
}

fn setup(ranks: u32, grid: u32, bytes: usize, record_bytes: u32, reduction: u32) -> Setup {
    Setup {
        ranks,
        grid,
        bytes,
        record_bytes,
        reduction,
        relay: false,
        collective: Collective::AllReduce,
        element: 4,
        shift: 0,
        in_place: false,
    }
}

#[test]
fn plain_f32_sums_have_the_bits_of_the_schedule() {
    for (ranks, grid, count) in [(1, 1, 33), (2, 3, 9000), (3, 1, 1023), (4, 2, 9001), (5, 2, 7), (2, 1, 1)] {
        let setup = setup(ranks, grid, 4 * count, 4096, reduction(F32, SUM));
        let vectors = vectors(ranks, 4 * count);
        let expected = expected(&setup, &vectors, add_f32, |sum| sum);
        let mut group = Group::new(setup, &vectors);
        // Both halves of the inboxes, and the first anew.
        for sequence in 1..4 {
            group.plain(0..ranks, ring_plain);
            for rank in 0..ranks {
                assert_eq!(group.states[rank as usize].failure, 0);
                assert_eq!(group.states[rank as usize].sequence, sequence + 1);
                assert_eq!(group.output(rank), expected, "{count} on {ranks} ranks: rank {rank}");
            }
        }
    }
}

/// The sum of two is the same in either order, so that the exchange has the bits of the ring.
#[test]
fn an_exchange_of_two_is_one_hop_and_has_the_same_bits() {
    for (grid, count, record_bytes) in [(1, 1, 4096), (1, 1023, 16384), (2, 9001, 4096), (2, 17001, 32768)] {
        let ring = setup(2, grid, 4 * count, record_bytes, reduction(F32, SUM));
        let vectors = vectors(2, 4 * count);
        let expected = expected(&ring, &vectors, add_f32, |sum| sum);
        let keys = Keys::new(2);
        let two = || Setup {
            collective: Collective::Exchange,
            ..setup(2, grid, 4 * count, record_bytes, reduction(F32, SUM))
        };
        let (mut plain, mut sealed) = (Group::new(two(), &vectors), Group::new(two(), &vectors));
        for sequence in 1..4 {
            plain.plain(0..2, ring_plain);
            sealed.sealed(&keys, ring_sealed_128);
            for rank in 0..2 {
                for group in [&mut plain, &mut sealed] {
                    assert_eq!(group.states[rank as usize].failure, 0, "{count}: rank {rank}");
                    assert!(group.output(rank) == expected, "{count}: rank {rank}");
                }
                // What crossed is the peer's vector, sealed.
                let records = (4 * count).div_ceil(record_bytes as usize) as u32;
                let crossed: Vec<u8> =
                    (0..records).flat_map(|index| sealed.open(&keys, sequence, rank, 0, index)).collect();
                assert!(crossed == vectors[1 - rank as usize], "{count}: to rank {rank}");
            }
        }
    }
}

/// By the kernel for short records: other blocks open than seal where the grid has twice as many as there are records, which it
/// doesn't in place. In turn with the exchange's own kernel, on the same mailboxes, and with a kernel of each kind on a rank, as
/// happens where one alone has keystream.
#[test]
fn a_short_exchange_has_the_same_bits() {
    for (grid, count, record_bytes, in_place) in [
        (1, 1, 4096, true),
        (2, 1023, 4096, false),
        (1, 1023, 4096, true),
        (3, 9001, LONGEST_SHORT_RECORD, true),
        (3, 9001, LONGEST_SHORT_RECORD, false),
        (5, 9001, LONGEST_SHORT_RECORD, false),
        (6, 9001, LONGEST_SHORT_RECORD, false),
    ] {
        let two = Setup { in_place, ..setup(2, grid, 4 * count, record_bytes, reduction(F32, SUM)) };
        sealed_exchanges(two, 1..5, |group, keys, sealed, sequence| match sequence {
            2 => launch(&[
                group.sealed_rank(0, keys, relay_short_128),
                group.half_exchange(1, keys, 0, sealed, exchange_sealed_128),
            ]),
            3 => group.exchange(keys, 0, sealed, exchange_sealed_128),
            _ => group.sealed(keys, relay_short_128),
        });
    }
}

/// Blocks of one half each, and of both; what crosses, and the result, are those of the ring's kernels.
#[test]
fn the_exchanges_own_kernels_have_the_same_bits() {
    for (sealers, grid, count, record_bytes) in [
        (1, 2, 1, 4096),
        (1, 2, 1023, 16384),
        (1, 3, 9001, 4096),
        (2, 3, 17001, 32768),
        (2, 4, 30000, 16384),
        (1, 2, 40001, 65536),
        (0, 1, 1023, 16384),
        (0, 2, 20001, 16384),
        (0, 1, 40001, 65536),
    ] {
        for in_place in [false, true] {
            let two = Setup { in_place, ..setup(2, grid, 4 * count, record_bytes, reduction(F32, SUM)) };
            sealed_exchanges(two, 1..4, |group, keys, sealed, _| {
                group.exchange(keys, sealers, sealed, exchange_sealed_128)
            });
        }
    }
}

/// Exchanges the same vectors again and again, by what `launch` does, and checks the sums and what crossed. What it is given
/// last but one is where sealing blocks count their records, of each rank.
fn sealed_exchanges(
    setup: Setup,
    sequences: Range<u64>,
    launch: impl Fn(&Group, &Keys, &[Vec<u64>; 2], u64),
) {
    let two = Setup { collective: Collective::Exchange, ..setup };
    let Setup { grid, bytes, record_bytes, in_place, .. } = two;
    let vectors = vectors(2, bytes);
    let expected = expected(&two, &vectors, add_f32, |sum| sum);
    let keys = Keys::new(2);
    let mut group = Group::new(two, &vectors);
    let sealed = [vec![0; grid as usize], vec![0; grid as usize]];
    for sequence in sequences {
        launch(&group, &keys, &sealed, sequence);
        for rank in 0..2 {
            let state = group.states[rank as usize];
            assert_eq!((state.failure, state.sequence), (0, sequence + 1), "{bytes} bytes: rank {rank}");
            assert!(group.output(rank) == expected, "{bytes} bytes, in place {in_place}: rank {rank}");
            let records = bytes.div_ceil(record_bytes as usize) as u32;
            let crossed: Vec<u8> =
                (0..records).flat_map(|index| group.open(&keys, sequence, rank, 0, index)).collect();
            assert!(crossed == vectors[1 - rank as usize], "{bytes} bytes: to rank {rank}");
            if in_place {
                group.inputs[rank as usize].bytes()[..bytes].copy_from_slice(&vectors[rank as usize]);
            }
        }
    }
}

/// Keystream that one sender's records of an exchange find.
struct Pads {
    pads: Buffer,
    heads: Vec<PadHead>,
    misses: Vec<u32>,
}

/// How pads differ from what an exchange needs.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Guess {
    Right,
    /// Only the first are there.
    First(u32),
    OtherCollective,
    OtherKey,
    OtherRecordLength,
    TooShort,
    Claimed,
}

impl Pads {
    /// What is made ahead for the exchange `sequence` of `rank`'s records, in memory of this value's own.
    fn new(group: &Group, keys: &Keys, rank: u32, sequence: u64, guess: Guess) -> Self {
        let bytes = group.setup.bytes as u64;
        Self::of_chunk(keys, rank, pad_name(sequence - 1, 0), bytes, group.setup.record_bytes, guess)
    }

    /// What is made ahead for the records of a chunk of `bytes` bytes that `rank` seals.
    fn of_chunk(keys: &Keys, rank: u32, name: u64, bytes: u64, record_bytes: u32, guess: Guess) -> Self {
        let mut own = Pads {
            pads: Buffer::new(bytes.next_multiple_of(16) as usize),
            heads: vec![PadHead::default(); bytes.div_ceil(16) as usize],
            misses: vec![0],
        };
        let mut entry = Buffer::new(size_of::<ChunkPads>());
        let count = bytes.div_ceil(record_bytes as u64) as u32;
        let heads = own.heads.len() as u64;
        let mut fill = PadFillParams {
            round_keys: expand_key(&keys.keys[rank as usize]),
            pads: own.pads.address(),
            heads: own.heads.as_ptr() as u64,
            bytes,
            name,
            record_bytes,
            count,
            serial: SERIAL,
            slot_records: own.heads.len() as u32,
            entry: entry.address(),
            misses: own.misses.as_ptr() as u64,
        };
        match guess {
            Guess::Right | Guess::Claimed => {}
            Guess::First(pads) => fill.count = pads.min(count),
            // One step, or one collective, further.
            Guess::OtherCollective => fill.name += 1 << 16,
            Guess::OtherKey => fill.serial += 1,
            Guess::OtherRecordLength => {
                fill.record_bytes /= 2;
                fill.count = bytes.div_ceil(fill.record_bytes as u64) as u32;
            }
            Guess::TooShort => {
                fill.record_bytes = 16;
                fill.bytes = 16 * (count as u64).saturating_sub(1) + 1;
            }
        }
        if fill.count > 0 {
            // SAFETY: there is a head for each block, and the pads are as long as the chunk.
            launch(&[Launch::new(2, THREADS, PAD_FILL_SHARED, || unsafe { pads_fill_128(fill) })]);
            let words = [fill.pads, fill.heads, heads | u64::from(fill.serial) << 32, fill.misses];
            assert_eq!(entry.bytes()[..32], words.map(u64::to_le_bytes).concat(), "where they are");
        }
        if guess == Guess::Claimed {
            own.heads.iter_mut().for_each(|head| head.claim = 0);
        }
        own
    }

    fn params(&self) -> ChunkPads {
        ChunkPads {
            pads: self.pads.address(),
            heads: self.heads.as_ptr() as u64,
            count: self.heads.len() as u32,
            serial: SERIAL,
            misses: self.misses.as_ptr() as u64,
        }
    }
}

const SERIAL: u32 = 7;

/// Pads that are another's are never used: what crosses is what AES-GCM makes of the vectors.
#[test]
fn an_exchange_with_pads_has_the_same_bits() {
    let guesses = [
        Guess::Right,
        Guess::First(1),
        Guess::First(0),
        Guess::OtherCollective,
        Guess::OtherKey,
        Guess::OtherRecordLength,
        Guess::TooShort,
        Guess::Claimed,
    ];
    for (case, (sealers, grid, count, record_bytes)) in [
        (1, 2, 1, 4096),
        (1, 2, 9001, 16384),
        (2, 3, 17001, 32768),
        (0, 1, 20001, 16384),
        (1, 2, 40001, 65536),
    ]
    .into_iter()
    .enumerate()
    {
        let keys = Keys::new(2);
        for (turn, guess) in guesses.into_iter().enumerate() {
            if case > 1 && guess != Guess::Right && turn % 4 != case % 4 {
                continue;
            }
            let in_place = turn % 2 == 1;
            let two = || Setup {
                collective: Collective::Exchange,
                in_place,
                ..setup(2, grid, 4 * count, record_bytes, reduction(F32, SUM))
            };
            let vectors = vectors(2, 4 * count);
            let expected = expected(&two(), &vectors, add_f32, |sum| sum);
            let mut group = Group::new(two(), &vectors);
            let sealed = [vec![0u64; grid as usize], vec![0; grid as usize]];
            let records = (4 * count).div_ceil(record_bytes as usize) as u32;
            for sequence in 1..3 {
                // Each rank has pads of its own for both senders; the second rank's are always right.
                let pads: Vec<[Pads; 2]> = (0..2)
                    .map(|rank| {
                        let guess = if rank == 0 { guess } else { Guess::Right };
                        [rank, 1 - rank].map(|sender| Pads::new(&group, &keys, sender, sequence, guess))
                    })
                    .collect();
                let grids: Vec<_> = (0..2)
                    .map(|rank| {
                        let ring = group.sealed_params(&keys, rank, group.params(rank));
                        let sealed = sealed[rank as usize].as_ptr() as u64;
                        let [seals, opens] = &pads[rank as usize];
                        let params = PaddedExchangeParams {
                            exchange: ExchangeParams { ring, sealed, sealers, reserved: 0 },
                            seals: seals.params(),
                            opens: opens.params(),
                        };
                        // SAFETY: the group's memory is as the parameters say, and so is that of the pads.
                        Launch::new(grid, THREADS, PADDED_EXCHANGE_SHARED, move || unsafe {
                            exchange_padded_128(params)
                        })
                    })
                    .collect();
                launch(&grids);
                let missing = match guess {
                    Guess::Right => 0,
                    Guess::First(pads) => records - pads.min(records),
                    // The only record of the shortest vector is a block.
                    Guess::TooShort if 4 * count <= 16 => continue,
                    _ => records,
                };
                for rank in 0..2 {
                    let what = format!("{guess:?}, {count} elements, rank {rank}");
                    for pads in &pads[rank as usize] {
                        assert_eq!(pads.misses[0], if rank == 0 { missing } else { 0 }, "{what}");
                        let left = pads.heads.iter().filter(|head| head.claim >> 32 == SERIAL as u64).count();
                        assert!(missing != 0 || left == 0, "{what}: {left} pads are left");
                    }
                    let state = group.states[rank as usize];
                    assert_eq!((state.failure, state.sequence), (0, sequence + 1), "{what}");
                    assert!(group.output(rank) == expected, "{what}");
                    let crossed: Vec<u8> =
                        (0..records).flat_map(|index| group.open(&keys, sequence, rank, 0, index)).collect();
                    assert!(crossed == vectors[1 - rank as usize], "{what}");
                    if in_place {
                        group.inputs[rank as usize].bytes()[..4 * count]
                            .copy_from_slice(&vectors[rank as usize]);
                    }
                }
            }
        }
    }
}

#[test]
fn an_exchange_of_other_types_misaligned_and_of_odd_length() {
    for in_place in [false, true] {
        let count = 20021;
        let setup = Setup {
            shift: 3,
            collective: Collective::Exchange,
            in_place,
            ..setup(2, 3, count, 4096, reduction(U8, AVG))
        };
        let vectors = vectors(2, count);
        let expected = expected::<1>(&setup, &vectors, |[a], [b]| [a.wrapping_add(b)], |[sum]| [sum / 2]);
        let mut group = Group::new(setup, &vectors);
        group.exchange(&Keys::new(2), 1, &[vec![0], vec![0]], exchange_sealed_any_128);
        assert!((0..2).all(|rank| group.output(rank) == expected));
    }
}

/// A wrong key stands for any change: the opening block sees it, and its rank's output is wiped.
#[test]
fn an_exchange_whose_tags_are_wrong_fails_and_leaves_zeros() {
    let vectors = vectors(2, 40_000);
    let two = Setup { collective: Collective::Exchange, ..setup(2, 2, 40_000, 4096, reduction(F32, SUM)) };
    let mut group = Group::new(two, &vectors);
    let mut keys = Keys::new(2);
    keys.senders[1].ghash.lanes[3] = keys.senders[0].ghash.lanes[3];
    let right = Keys::new(2);
    let params = |rank: u32, keys: &Keys| ExchangeParams {
        ring: SealedRingParams {
            ring: group.params(rank),
            own: right.sealed(rank),
            predecessor: keys.sealed(1 - rank),
            call: call(&group.setup),
            senders: 0,
        },
        sealed: 0,
        sealers: 1,
        reserved: 0,
    };
    let both = [params(0, &keys), params(1, &right)];
    let grids = both.map(|params| {
        // SAFETY: the group's memory is as the parameters say.
        Launch::new(2, THREADS, EXCHANGE_SHARED, move || unsafe { exchange_sealed_128(params) })
    });
    launch(&grids);
    assert_eq!(group.states[0].failure >> 56, failure::AUTHENTICATION);
    assert_ne!(group.states[0].aborted, 0);
    assert!(group.output(0).iter().all(|&byte| byte == 0));
}

/// With chunks that begin anywhere, and some of them empty.
#[test]
fn reduce_scatters_end_with_each_rank_s_chunk() {
    for (ranks, grid, count) in [(1, 1, 5), (2, 1, 9001), (3, 2, 9000), (4, 1, 1023), (5, 1, 3)] {
        let setup = |relay| Setup {
            relay,
            collective: Collective::ReduceScatter,
            ..setup(ranks, grid, 4 * count, 4096, reduction(F32, SUM))
        };
        let vectors = vectors(ranks, 4 * count);
        let expected = |rank: u32| {
            let (offset, bytes) = setup(false).chunk(rank);
            let (from, to) = (offset as usize, (offset + bytes) as usize);
            let part = |of: u32| &vectors[(of % ranks) as usize][from..to];
            let add = |sum: Vec<u8>, of: u32| {
                let pairs = sum.as_chunks::<4>().0.iter().zip(part(of).as_chunks::<4>().0);
                pairs.flat_map(|(a, b)| add_f32(*a, *b)).collect()
            };
            // From the rank after the owner to the owner.
            (from..to, (2..=ranks).fold(part(rank + 1).to_vec(), |sum, k| add(sum, rank + k)))
        };
        everywhere(setup, &vectors, expected);
    }
}

#[test]
fn all_gathers_end_with_all_chunks() {
    for (ranks, grid, count) in [(1, 1, 5), (2, 1, 9001), (3, 2, 9000), (4, 1, 1023), (5, 1, 3)] {
        let setup = |relay| Setup {
            relay,
            collective: Collective::AllGather,
            ..setup(ranks, grid, 4 * count, 4096, reduction(F32, SUM))
        };
        let vectors = vectors(ranks, 4 * count);
        let part = |rank: u32| {
            let (offset, bytes) = setup(false).chunk(rank);
            &vectors[rank as usize][offset as usize..][..bytes as usize]
        };
        let whole: Vec<u8> = (0..ranks).flat_map(part).copied().collect();
        everywhere(setup, &vectors, |_| (0..4 * count, whole.clone()));
    }
}

#[test]
fn broadcasts_end_with_the_root_s_vector() {
    for (ranks, grid, count, root) in [(1, 1, 5, 0), (2, 1, 9001, 1), (3, 2, 9000, 0), (4, 1, 1, 2)] {
        let setup = |relay| Setup {
            relay,
            collective: Collective::Broadcast(root),
            ..setup(ranks, grid, 4 * count, 4096, reduction(F32, SUM))
        };
        let vectors = vectors(ranks, 4 * count);
        everywhere(setup, &vectors, |_| (0..4 * count, vectors[root as usize].clone()));
    }
}

/// Plain and sealed, hop by hop and relayed, thrice each. `expected` gives the part of the vector that a rank gets.
fn everywhere(
    setup: impl Fn(bool) -> Setup,
    vectors: &[Vec<u8>],
    expected: impl Fn(u32) -> (std::ops::Range<usize>, Vec<u8>),
) {
    let keys = Keys::new(vectors.len() as u32);
    for (relay, sealed, pads) in [
        (false, None, false),
        (false, Some(ring_sealed_128 as Kernel), false),
        (true, Some(relay_sealed_128), false),
        (true, Some(relay_short_128), false),
        (false, Some(relay_short_128), false),
        (true, Some(relay_sealed_128), true),
    ] {
        let mut group = Group::new(setup(relay), vectors);
        let ranks = group.setup.ranks;
        for turn in 0..3 {
            match sealed {
                None => group.plain(0..ranks, ring_plain),
                Some(_) if pads && ranks > 1 => {
                    let guess = |step, side| {
                        if (step + side + turn) % 3 == 0 { Guess::First(1) } else { Guess::Right }
                    };
                    group.padded_relay(&keys, guess);
                }
                Some(kernel) => group.sealed(&keys, kernel),
            }
            for rank in 0..ranks {
                let (part, wanted) = expected(rank);
                let what = format!("rank {rank} of {ranks}, sealed {}, relay {relay}", sealed.is_some());
                assert_eq!(group.states[rank as usize].failure, 0, "{what}");
                let output = group.output(rank);
                assert!(output[part.clone()] == wanted, "{what}");
                let mut around = output[..part.start].iter().chain(&output[part.end..]);
                assert!(around.all(|&byte| byte == 0xa5), "{what}: beyond its part");
            }
        }
    }
}

type Kernel = unsafe fn(SealedRingParams);

/// With pads for all records, for none, and for some: the bits of the ring without.
#[test]
fn relayed_collectives_with_pads_have_the_same_bits() {
    let right = |_, _| Guess::Right;
    let none = |_, _| Guess::First(0);
    // The first record of some chunks, all of others, and what is another's.
    let some = |step: u32, side: u32| match (step + 2 * side) % 5 {
        0 => Guess::Right,
        1 => Guess::First(1),
        2 => Guess::OtherRecordLength,
        3 => Guess::OtherKey,
        _ => Guess::Claimed,
    };
    for (ranks, grid, count, record_bytes) in [
        (2, 2, 9001, 4096),
        (3, 1, 1023, 16384),
        (3, 2, 30_000, 16384),
        (4, 1, 17_001, 4096),
        (2, 1, 1, 4096),
    ] {
        let setup =
            || Setup { relay: true, ..setup(ranks, grid, 4 * count, record_bytes, reduction(F32, SUM)) };
        let keys = Keys::new(ranks);
        let vectors = vectors(ranks, 4 * count);
        let expected = expected(&setup(), &vectors, add_f32, |sum| sum);
        let mut group = Group::new(setup(), &vectors);
        let records: u32 =
            (0..ranks).map(|chunk| setup().chunk(chunk).1.div_ceil(record_bytes as u64) as u32).sum();
        // A rank opens 2 (n-1) chunks and seals n: in all, each chunk is opened and sealed so often.
        let all = records * (3 * ranks - 2);
        for (turn, misses) in [
            group.padded_relay(&keys, right),
            group.padded_relay(&keys, none),
            group.padded_relay(&keys, some),
        ]
        .into_iter()
        .enumerate()
        {
            match turn {
                0 => assert_eq!(misses, 0),
                1 => assert_eq!(misses, all),
                _ => assert!(records < ranks || 0 < misses && misses < all, "{misses} of {all}"),
            }
        }
        for rank in 0..ranks {
            let what = format!("{count} elements, rank {rank} of {ranks}");
            assert_eq!(group.states[rank as usize].failure, 0, "{what}");
            assert!(group.output(rank) == expected, "{what}");
        }
    }
}

/// A tag that doesn't verify stops the ranks, whether the record's keystream was there or not.
#[test]
fn relayed_records_with_pads_whose_tags_are_wrong_fail_all() {
    for guess in [Guess::Right, Guess::First(0)] {
        let vectors = vectors(3, 40_000);
        let mut group =
            Group::new(Setup { relay: true, ..setup(3, 1, 40_000, 4096, reduction(F32, SUM)) }, &vectors);
        let mut keys = Keys::new(3);
        // What ranks 1 and 2 make of rank 0's records is not what rank 0 makes of them.
        let lanes = keys.senders[1].ghash.lanes[3];
        keys.senders[0].ghash.lanes[3] = lanes;
        let other = Keys::new(3);
        let right = keys.senders[0].ghash.lanes[3] == other.senders[0].ghash.lanes[3];
        assert!(!right);
        group.padded_relay_of(&keys, &other, |_, _| guess);
        for rank in 0..3 {
            assert_ne!(group.states[rank as usize].aborted, 0, "{guess:?}: rank {rank}");
            assert!(group.output(rank).iter().all(|&byte| byte == 0), "{guess:?}: rank {rank}");
        }
    }
}

/// Otherwise it could overwrite what the successor has yet to read.
#[test]
fn a_root_does_not_leave_before_its_successor_has_come() {
    let vectors = vectors(2, 4000);
    let setup = setup(2, 2, 4000, 1024, reduction(F32, SUM));
    let mut group = Group::new(Setup { collective: Collective::Broadcast(0), ..setup }, &vectors);
    group.plain(0..1, ring_plain);
    assert_eq!(group.states[0].failure >> 56, failure::ABSENT);
    assert!(group.output(0).iter().all(|&byte| byte == 0));
}

#[test]
fn plain_other_types_misaligned_and_odd_lengths() {
    for (ranks, count) in [(2, 33), (3, 1023), (4, 1)] {
        let setup = Setup { shift: 4, ..setup(ranks, 1, 4 * count, 1024, reduction(I32, MAX)) };
        let vectors = vectors(ranks, 4 * count);
        let max = |a, b| i32::from_le_bytes(a).max(i32::from_le_bytes(b)).to_le_bytes();
        let expected = expected(&setup, &vectors, max, |sum| sum);
        let mut group = Group::new(setup, &vectors);
        group.plain(0..ranks, ring_plain_any);
        assert!((0..ranks).all(|rank| group.output(rank) == expected));
    }
    for (ranks, count) in [(2, 33), (3, 1021)] {
        let setup = Setup { shift: 3, ..setup(ranks, 2, count, 256, reduction(U8, AVG)) };
        let vectors = vectors(ranks, count);
        let expected =
            expected::<1>(&setup, &vectors, |[a], [b]| [a.wrapping_add(b)], |[sum]| [sum / ranks as u8]);
        let mut group = Group::new(setup, &vectors);
        group.plain(0..ranks, ring_plain_any);
        assert!((0..ranks).all(|rank| group.output(rank) == expected));
    }
}

#[test]
fn sealed_other_types_misaligned_and_odd_lengths() {
    let (ranks, count) = (2, 1021);
    let setup = Setup { shift: 3, ..setup(ranks, 1, count, 4096, reduction(U8, AVG)) };
    let vectors = vectors(ranks, count);
    let expected =
        expected::<1>(&setup, &vectors, |[a], [b]| [a.wrapping_add(b)], |[sum]| [sum / ranks as u8]);
    let mut group = Group::new(setup, &vectors);
    group.sealed(&Keys::new(ranks), ring_sealed_any_128);
    assert!((0..ranks).all(|rank| group.output(rank) == expected));
}

#[test]
fn relayed_other_types_misaligned_and_odd_lengths() {
    let (ranks, count) = (3, 1021);
    let setup = Setup { shift: 3, relay: true, ..setup(ranks, 1, count, 256, reduction(U8, AVG)) };
    let vectors = vectors(ranks, count);
    let expected =
        expected::<1>(&setup, &vectors, |[a], [b]| [a.wrapping_add(b)], |[sum]| [sum / ranks as u8]);
    let mut group = Group::new(setup, &vectors);
    group.sealed(&Keys::new(ranks), relay_sealed_any_128);
    assert!((0..ranks).all(|rank| group.output(rank) == expected));
}

#[test]
fn a_missing_rank_is_an_error_on_all_others_and_their_outputs_are_zeroed() {
    let vectors = vectors(3, 4000);
    let mut group = Group::new(setup(3, 2, 4000, 1024, reduction(F32, SUM)), &vectors);
    group.plain(0..2, ring_plain);
    // Rank 0 awaits the missing one; rank 1 awaits its second message from rank 0.
    assert_eq!(group.states[0].failure >> 56, failure::DEADLINE);
    assert_eq!(group.notices[0].failure, group.states[0].failure);
    for rank in 0..2 {
        assert_ne!(group.states[rank].aborted, 0);
        assert!(group.output(rank as u32).iter().all(|&byte| byte == 0));
    }
}

/// What stops a rank stands where its peers write, and is copied where they don't.
#[test]
fn a_stop_cannot_be_taken_back() {
    let vectors = vectors(2, 400);
    let mut group = Group::new(setup(2, 1, 400, 1024, reduction(F32, SUM)), &vectors);
    group.notices[1].aborted = 7;
    for _ in 0..2 {
        group.plain(0..2, ring_plain);
        assert_eq!(group.states[1].aborted, 7);
        assert!(group.output(1).iter().all(|&byte| byte == 0));
        group.notices.fill(Notice::default());
    }
}

#[test]
fn chunks_cover_the_vector_in_whole_quads() {
    for ranks in [1, 2, 3, 4, 5, 7, 8] {
        for bytes in (0..200).chain([1023 * 8, 1 << 40]) {
            let mut next = 0;
            for c in 0..ranks {
                let (offset, length) = chunk(c, ranks, bytes);
                assert_eq!(offset, next);
                assert!(offset % 16 == 0 || length == 0);
                assert!(length <= chunk(0, ranks, bytes).1);
                next = offset + length;
            }
            assert_eq!(next, bytes);
        }
    }
}

#[test]
fn a_graph_that_is_replayed_too_often_is_refused() {
    let vectors = vectors(2, 400);
    let mut group = Group::new(setup(2, 1, 400, 1024, reduction(F32, SUM)), &vectors);
    group.calls_limit = 2;
    for _ in 0..2 {
        group.plain(0..2, ring_plain);
        assert!(group.states.iter().all(|state| state.failure == 0));
    }
    group.plain(0..2, ring_plain);
    assert!(group.states.iter().all(|state| state.aborted != 0));
    assert!(group.states.iter().any(|state| state.failure >> 56 == failure::EXHAUSTED));
    assert!((0..2).all(|rank| group.output(rank).iter().all(|&byte| byte == 0)));
}

/// What crosses, and every result, are those of a single launch, whatever the collective.
#[test]
fn step_by_step_nothing_waits_and_the_bytes_are_the_same() {
    use Collective::{AllGather, AllReduce, Broadcast, Exchange, ReduceScatter};
    for (collective, ranks, count, in_place) in [
        (AllReduce, 1, 33, false),
        (AllReduce, 2, 5000, true),
        (AllReduce, 3, 6001, false),
        (AllReduce, 4, 3, true),
        (Exchange, 2, 5000, true),
        (ReduceScatter, 3, 5000, false),
        (AllGather, 3, 5000, false),
        (Broadcast(2), 3, 5000, false),
    ] {
        let keys = Keys::new(ranks);
        for (relay, protection) in [
            (false, Protection::Plain(ring_plain)),
            (false, Protection::Sealed(&keys, ring_sealed_128)),
            (true, Protection::Sealed(&keys, relay_sealed_128)),
            (true, Protection::Sealed(&keys, relay_short_128)),
        ] {
            if relay && collective == Exchange {
                continue;
            }
            let of = || Setup {
                relay,
                collective,
                in_place,
                ..setup(ranks, 2, 4 * count, 4096, reduction(F32, SUM))
            };
            let vectors = vectors(ranks, 4 * count);
            let (mut whole, mut steps) = (Group::new(of(), &vectors), Group::new(of(), &vectors));
            // Both halves of the inboxes, and the first anew; in place, on the results of the time before.
            for sequence in 1..4 {
                match protection {
                    Protection::Plain(kernel) => whole.plain(0..ranks, kernel),
                    Protection::Sealed(keys, kernel) => whole.sealed(keys, kernel),
                }
                steps.step_by_step(protection, |_, _| {});
                for rank in 0..ranks {
                    let what = format!("rank {rank} of {ranks}, {count}, relay {relay}, number {sequence}");
                    let of_rank = rank as usize;
                    assert_eq!(steps.states[of_rank].failure, 0, "{what}");
                    let counts =
                        |state: &RankState| (state.sequence, state.turn & 1, state.calls, state.exited);
                    let expected = (sequence + 1, sequence % 2, sequence, 0);
                    assert_eq!(counts(&steps.states[of_rank]), expected, "{what}");
                    assert_eq!(counts(&whole.states[of_rank]), expected, "{what}");
                    assert!(steps.output(rank) == whole.output(rank), "{what}");
                    assert!(steps.inboxes[of_rank].bytes() == whole.inboxes[of_rank].bytes(), "{what}");
                    assert!(steps.signals[of_rank].bytes() == whole.signals[of_rank].bytes(), "{what}");
                }
            }
        }
    }
}

/// As ranks do whose records NCCL carries: they reach no other rank's memory, and the bytes are the same.
#[test]
fn ranks_apart_do_all_collectives() {
    use Collective::{AllGather, AllReduce, Broadcast, Exchange, ReduceScatter};
    for (collective, ranks, count) in [
        (AllReduce, 2, 5000),
        (AllReduce, 3, 6001),
        (AllReduce, 4, 3),
        (Exchange, 2, 5000),
        (ReduceScatter, 3, 5000),
        (AllGather, 3, 5000),
        (Broadcast(2), 3, 5000),
        (Broadcast(0), 2, 1),
    ] {
        let keys = Keys::new(ranks);
        for (relay, protection) in [
            (false, Protection::Plain(ring_plain)),
            (false, Protection::Sealed(&keys, ring_sealed_128)),
            (true, Protection::Sealed(&keys, relay_sealed_128)),
        ] {
            if relay && collective == Exchange {
                continue;
            }
            let of = || Setup { relay, collective, ..setup(ranks, 2, 4 * count, 4096, reduction(F32, SUM)) };
            let vectors = vectors(ranks, 4 * count);
            let (mut linked, mut apart) = (Group::new(of(), &vectors), Group::apart(of(), &vectors));
            for sequence in 1..4 {
                linked.step_by_step(protection, |_, _| {});
                apart.step_by_step(protection, Group::carry);
                for rank in 0..ranks {
                    let what = format!("rank {rank} of {ranks}, {count}, relay {relay}, number {sequence}");
                    let state = apart.states[rank as usize];
                    assert_eq!((state.failure, state.sequence), (0, sequence + 1), "{what}");
                    assert!(apart.output(rank) == linked.output(rank), "{what}");
                }
            }
        }
    }
}

/// A byte changed on its way fails that rank alone at first; none waits for what it doesn't send, and all results are wiped.
#[test]
fn ranks_apart_all_fail_by_a_changed_byte() {
    let (ranks, count) = (3, 3000);
    let keys = Keys::new(ranks);
    for (relay, kernel) in [(false, ring_sealed_128 as Kernel), (true, relay_sealed_128)] {
        let of = || Setup { relay, ..setup(ranks, 2, 4 * count, 2048, reduction(F32, SUM)) };
        let vectors = vectors(ranks, 4 * count);
        for message in 0..of().messages() {
            let mut group = Group::apart(of(), &vectors);
            let stride = of().longest().next_multiple_of(256) as usize;
            group.step_by_step(Protection::Sealed(&keys, kernel), |group, round| {
                group.carry(round);
                if round == message {
                    group.inboxes[1].bytes()[message as usize * stride + 2048 + 5] ^= 0x40;
                }
            });
            let found = failure::pack(failure::AUTHENTICATION, message, 1);
            for rank in 0..ranks {
                let state = group.states[rank as usize];
                assert_eq!(state.failure, if rank == 1 { found } else { 0 }, "relay {relay}, {message}");
                assert_ne!(state.aborted, 0, "relay {relay}, {message}: rank {rank}");
                assert!(group.output(rank).iter().all(|&byte| byte == 0), "relay {relay}, {message}");
            }
        }
    }
}

/// A byte of any message: no rank releases anything after the round in which it is found, and at the end all have failed and
/// every result is zeros. After a reset the next collective is right.
#[test]
fn step_by_step_a_changed_byte_stops_all_later_launches() {
    let (ranks, count) = (3, 3000);
    let keys = Keys::new(ranks);
    for (relay, kernel) in [(false, ring_sealed_128 as Kernel), (true, relay_sealed_128)] {
        let of = || Setup { relay, ..setup(ranks, 2, 4 * count, 2048, reduction(F32, SUM)) };
        let vectors = vectors(ranks, 4 * count);
        let expected = expected(&of(), &vectors, add_f32, |sum| sum);
        for message in 0..of().messages() {
            let mut group = Group::new(of(), &vectors);
            let stride = of().longest().next_multiple_of(256) as usize;
            let mut released = Vec::new();
            group.step_by_step(Protection::Sealed(&keys, kernel), |group, round| {
                if round == message {
                    group.inboxes[1].bytes()[message as usize * stride + 2048 + 5] ^= 0x40;
                }
                if round > message {
                    let signals = group.signals.iter_mut().map(|signals| signals.bytes().to_vec()).collect();
                    if round == message + 1 {
                        released = signals;
                    } else {
                        assert!(released == signals, "relay {relay}, message {message}, round {round}");
                    }
                }
            });
            let found = failure::pack(failure::AUTHENTICATION, message, 1);
            for rank in 0..ranks {
                let state = group.states[rank as usize];
                assert_eq!(state.failure, if rank == 1 { found } else { 0 }, "relay {relay}, {message}");
                assert_eq!((state.aborted, state.sequence), (2, 2), "relay {relay}, {message}: rank {rank}");
                assert!(group.output(rank).iter().all(|&byte| byte == 0), "relay {relay}, {message}");
            }
            group.states.fill(RankState { sequence: 1, ..RankState::default() });
            group.notices.fill(Notice::default());
            group.signals.iter_mut().for_each(|signals| signals.bytes().fill(0));
            group.step_by_step(Protection::Sealed(&keys, kernel), |_, _| {});
            assert!((0..ranks).all(|rank| group.output(rank) == expected), "relay {relay}, {message}");
        }
    }
}

/// Keys that may not make the collective's calls fail it in its first launch.
#[test]
fn step_by_step_calls_are_counted_once() {
    let vectors = vectors(2, 4000);
    let mut group = Group::new(setup(2, 1, 4000, 1024, reduction(F32, SUM)), &vectors);
    group.calls_limit = 2;
    for times in 1..=2 {
        group.step_by_step(Protection::Plain(ring_plain), |_, _| {});
        assert!(group.states.iter().all(|state| state.failure == 0 && state.calls == times));
    }
    group.step_by_step(Protection::Plain(ring_plain), |_, _| {});
    assert!(group.states.iter().any(|state| state.failure >> 56 == failure::EXHAUSTED));
    assert!((0..2).all(|rank| group.output(rank).iter().all(|&byte| byte == 0)));
}
