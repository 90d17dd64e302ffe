//! A rank's keystream made ahead, as the kernels of its all-reduces take it.

use ringseal_kernels::exchange::{ExchangeParams, PADDED_EXCHANGE_SHARED, PaddedExchangeParams};
use ringseal_kernels::padded::ChunkPads;
use ringseal_kernels::sealed::{PADDED_RING_SHARED, PaddedRingParams, SealedRingParams, StepPads};
use ringseal_kernels::step::{FORWARD, RECEIVE, SEND, Step};
use zeroize::Zeroize;

use super::ahead::{Ahead, KeystreamAhead, Side, TakenPads};
use super::{DeviceBuffer, Event, HostBuffer, Kernel, Launch, Module, Stream};
use crate::Result;
use crate::channel::KeyLength;

/// What a step opens, and what it seals.
type StepSides = [Option<Side>; 2];

/// The chunks that the rank `rank` opens and seals in its steps.
pub(super) fn sides(rank: usize, steps: &[Step]) -> Vec<StepSides> {
    let of = |step: &Step| {
        let side = |sender, step_number| Side { sender, step: step_number, bytes: step.bytes as usize };
        let opens = step.actions & RECEIVE != 0;
        let seals = step.actions & (SEND | FORWARD) == SEND;
        [opens.then(|| side(step.sealed_by, step.sealed_in)), seals.then(|| side(rank as u32, step.sends))]
    };
    steps.iter().map(of).collect()
}

/// Keystream of a rank's all-reduces to come, and the kernel that takes it, for the common reductions.
#[derive(Debug)]
pub(super) struct RankKeystream {
    pub(super) ahead: Ahead,
    kernel: Kernel,
    /// For the ring's kernel.
    ring: Option<Ring>,
}

/// What the ring's kernel needs beside its keystream.
#[derive(Debug)]
struct Ring {
    /// Two records for each block.
    scratch: DeviceBuffer,
    /// Tables of [`StepPads`], of collectives in turn, as they are and where they are made.
    tables: DeviceBuffer,
    made: HostBuffer,
    /// Of each table, the end of the collective that used it last.
    used: Vec<Option<Event>>,
    next: usize,
}

/// What one collective takes: keystream, and the table that says where it is.
pub(super) struct Taken {
    pads: TakenPads,
    by_step: Vec<StepPads>,
    /// The ring's table.
    table: Option<usize>,
}

/// A rank's all-reduces of the longest vectors that keystream is kept for.
pub(super) struct Longest {
    /// Steps of their tables.
    pub(super) steps: Vec<Step>,
    /// Their longest and shortest records.
    pub(super) records: [usize; 2],
    pub(super) chunk: usize,
    pub(super) blocks: u32,
    pub(super) exchange: bool,
}

impl RankKeystream {
    pub(super) fn new(
        module: &Module,
        length: KeyLength,
        longest: &Longest,
        options: &KeystreamAhead,
    ) -> Result<Self> {
        let device = module.device();
        let sides = sides(0, &longest.steps).into_iter().flatten().flatten().count();
        let [longest_record, shortest_record] = longest.records;
        let ahead = Ahead::new(module, length, sides, longest.chunk, shortest_record as u32, options)?;
        let (name, shared) = match (longest.exchange, length) {
            (true, KeyLength::Aes128) => ("exchange_padded_128", PADDED_EXCHANGE_SHARED),
            (true, KeyLength::Aes256) => ("exchange_padded_256", PADDED_EXCHANGE_SHARED),
            (false, KeyLength::Aes128) => ("relay_padded_128", PADDED_RING_SHARED),
            (false, KeyLength::Aes256) => ("relay_padded_256", PADDED_RING_SHARED),
        };
        let ring = match longest.exchange {
            true => None,
            false => {
                let stream = Stream::new(device)?;
                let bytes = 2 * longest.blocks as usize * longest_record;
                let mut scratch = DeviceBuffer::secret(device, bytes)?;
                scratch.fill(0, &stream)?;
                stream.synchronize()?;
                // Those of collectives that run or wait, and of one that is being queued.
                let count = options.collectives + 2;
                let table = longest.steps.len() * size_of::<StepPads>();
                Some(Ring {
                    scratch,
                    tables: DeviceBuffer::new(device, count * table)?,
                    made: HostBuffer::new(device, count * table)?,
                    used: (0..count).map(|_| None).collect(),
                    next: 0,
                })
            }
        };
        Ok(Self { ahead, kernel: module.kernel(name, shared)?, ring })
    }

    /// The keystream of the next collective's steps, if there is any.
    pub(super) fn take(&mut self, steps: &[StepSides]) -> Result<Option<Taken>> {
        let mut table = None;
        if let Some(ring) = &self.ring {
            let most = ring.tables.len() / ring.used.len() / size_of::<StepPads>();
            let free = match &ring.used[ring.next] {
                None => true,
                Some(end) => end.is_reached()?,
            };
            // More collectives wait than there are tables: this one does without.
            if !free || steps.len() > most {
                return Ok(None);
            }
            table = Some(ring.next);
        }
        let sides: Vec<Side> = steps.iter().flatten().copied().flatten().collect();
        let Some(pads) = self.ahead.take(&sides)? else { return Ok(None) };
        let mut found = pads.pads.iter().copied();
        let mut of = |side: &Option<Side>| side.and_then(|_| found.next()).unwrap_or(ChunkPads::NONE);
        let by_step =
            steps.iter().map(|[opens, seals]| StepPads { opens: of(opens), seals: of(seals) }).collect();
        Ok(Some(Taken { pads, by_step, table }))
    }

    /// Queues the exchange's kernel.
    ///
    /// # Safety
    /// As for the kernel without keystream; `taken` comes back by [`Self::retire`] afterwards.
    pub(super) unsafe fn launch_exchange(
        &self,
        taken: &Taken,
        exchange: &ExchangeParams,
        launch: Launch,
        stream: &Stream,
    ) -> Result<()> {
        let side = |of: fn(&StepPads) -> ChunkPads| {
            taken.by_step.iter().map(of).find(|pads| pads.misses != 0).unwrap_or(ChunkPads::NONE)
        };
        let (seals, opens) = (side(|step| step.seals), side(|step| step.opens));
        let mut params = PaddedExchangeParams { exchange: *exchange, seals, opens };
        // SAFETY: the caller's; the kernel takes `PaddedExchangeParams`, and pads are not made or wiped before they come
        // back.
        let result = unsafe { self.kernel.launch(launch, stream, &params) };
        params.exchange.ring.own.round_keys.zeroize();
        params.exchange.ring.predecessor.round_keys.zeroize();
        result
    }

    /// Queues the ring's kernel.
    ///
    /// # Safety
    /// As [`Self::launch_exchange`].
    pub(super) unsafe fn launch_ring(
        &mut self,
        taken: &Taken,
        sealed: &SealedRingParams,
        launch: Launch,
        stream: &Stream,
    ) -> Result<()> {
        let (Some(ring), Some(table)) = (&mut self.ring, taken.table) else {
            unreachable!("the ring takes keystream with a table");
        };
        let place = table * (ring.tables.len() / ring.used.len());
        let bytes = size_of_val(&taken.by_step[..]);
        // SAFETY: entries are words without padding.
        let source = unsafe { std::slice::from_raw_parts(taken.by_step.as_ptr().cast::<u8>(), bytes) };
        // SAFETY: the collective that used this table last has ended, so neither place is in use; both stay as they are
        // until `retire` has this one's end.
        unsafe {
            ring.made.as_mut_slice()[place..place + bytes].copy_from_slice(source);
            let (from, to) = (ring.made.pointer() + place as u64, ring.tables.pointer() + place as u64);
            stream.copy(to, from, bytes)?;
        }
        let pads = ring.tables.pointer() + place as u64;
        let mut params = PaddedRingParams { ring: *sealed, pads, scratch: ring.scratch.pointer() };
        // SAFETY: the caller's; the kernel takes `PaddedRingParams`, and pads are not made or wiped before they come back.
        let result = unsafe { self.kernel.launch(launch, stream, &params) };
        params.ring.own.round_keys.zeroize();
        params.ring.predecessor.round_keys.zeroize();
        result
    }

    /// Has what was taken wiped once `stream` has passed the collective.
    pub(super) fn retire(&mut self, taken: Taken, stream: &Stream) -> Result<()> {
        if let (Some(ring), Some(table)) = (&mut self.ring, taken.table) {
            ring.used[table] = Some(stream.record()?);
            ring.next = (table + 1) % ring.used.len();
        }
        self.ahead.retire(taken.pads, stream)
    }

    /// Whether no keystream is left in its memory.
    pub(super) fn is_blank(&self, stream: &Stream) -> Result<bool> {
        let scratch = match &self.ring {
            Some(ring) => ring.scratch.to_host(stream)?,
            None => Vec::new(),
        };
        Ok(self.ahead.is_blank()? && scratch.iter().all(|&byte| byte == 0))
    }
}

#[cfg(test)]
mod tests {
    use ringseal_kernels::step::{chunk, exchange, ring_all_reduce};

    use super::*;

    /// Of an all-reduce of `bytes` bytes.
    fn ring(rank: u32, ranks: u32, relay: bool, bytes: u64) -> Vec<StepSides> {
        let chunk = |index| chunk(index, ranks, bytes);
        let steps: Vec<_> =
            (0..2 * ranks - 1).map(|index| ring_all_reduce(rank, ranks, index, relay, chunk)).collect();
        sides(rank as usize, &steps)
    }

    /// What a rank opens is what its sender has keystream for, and the store can take each sender's in order.
    #[test]
    fn what_is_opened_is_what_was_sealed_and_steps_ascend() {
        for relay in [false, true] {
            for ranks in 2..7 {
                let all: Vec<_> = (0..ranks).map(|rank| ring(rank, ranks, relay, 10_000)).collect();
                let sealed: Vec<Side> = all.iter().flatten().filter_map(|step| step[1]).collect();
                for (rank, steps) in all.iter().enumerate() {
                    let flat: Vec<Side> = steps.iter().flatten().copied().flatten().collect();
                    for side in steps.iter().filter_map(|step| step[0]) {
                        assert!(side.sender as usize != rank && sealed.contains(&side), "{rank}: {side:?}");
                    }
                    let count = if relay { 3 * ranks - 2 } else { 4 * (ranks - 1) };
                    assert_eq!(flat.len(), count as usize, "{rank} of {ranks}, relay {relay}");
                    for sender in 0..ranks {
                        let of: Vec<u32> =
                            flat.iter().filter(|side| side.sender == sender).map(|side| side.step).collect();
                        assert!(of.is_sorted_by(|a, b| a < b), "{rank} of {ranks}, sender {sender}: {of:?}");
                    }
                }
            }
        }
        let steps: Vec<_> = (0..2).map(|index| exchange(1, index, 50)).collect();
        let side = |sender| Some(Side { sender, step: 0, bytes: 50 });
        assert_eq!(sides(1, &steps), [[None, side(1)], [side(0), None]]);
    }
}
