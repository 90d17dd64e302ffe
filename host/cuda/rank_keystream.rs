//! A rank's keystream made ahead, as the kernels of its all-reduces take it.

use ringseal_kernels::exchange::{ExchangeParams, PADDED_EXCHANGE_SHARED, PaddedExchangeParams};
use ringseal_kernels::sealed::{PADDED_RING_SHARED, PaddedRingParams, SealedRingParams};
use ringseal_kernels::step::{FORWARD, RECEIVE, SEND, Step};
use zeroize::Zeroize;

use super::ahead::{Ahead, KeystreamAhead, TakenPads};
use super::{DeviceBuffer, Kernel, Launch, Module, Stream};
use crate::Result;
use crate::channel::KeyLength;
use crate::keystream::{Bounds, Side, StepSides};

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
    /// Where the ring's kernel makes what is missing, two records for each block.
    scratch: Option<DeviceBuffer>,
    /// The longest record that there is room for.
    longest_record: usize,
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
        let [longest_record, shortest_record] = longest.records;
        let bounds = Bounds {
            collectives: options.collectives,
            sides: sides(0, &longest.steps).into_iter().flatten().flatten().count(),
            steps: longest.steps.len(),
            chunk_bytes: longest.chunk,
            partial: longest.exchange,
        };
        let ahead = Ahead::new(module, length, bounds, shortest_record as u32, options)?;
        let (name, shared) = match (longest.exchange, length) {
            (true, KeyLength::Aes128) => ("exchange_padded_128", PADDED_EXCHANGE_SHARED),
            (true, KeyLength::Aes256) => ("exchange_padded_256", PADDED_EXCHANGE_SHARED),
            (false, KeyLength::Aes128) => ("relay_padded_128", PADDED_RING_SHARED),
            (false, KeyLength::Aes256) => ("relay_padded_256", PADDED_RING_SHARED),
        };
        let scratch = match longest.exchange {
            true => None,
            false => {
                let stream = Stream::new(device)?;
                let bytes = 2 * longest.blocks as usize * longest_record;
                let mut scratch = DeviceBuffer::secret(device, bytes)?;
                scratch.fill(0, &stream)?;
                stream.synchronize()?;
                Some(scratch)
            }
        };
        Ok(Self { ahead, kernel: module.kernel(name, shared)?, scratch, longest_record })
    }

    /// Whether what is missing of such records can be made.
    pub(super) fn has_room_for(&self, record_bytes: usize) -> bool {
        self.scratch.is_none() || record_bytes <= self.longest_record
    }

    /// Queues the exchange's kernel.
    ///
    /// # Safety
    /// As for the kernel without keystream; `taken` comes back by [`Ahead::retire`] afterwards.
    pub(super) unsafe fn launch_exchange(
        &self,
        taken: &TakenPads,
        exchange: &ExchangeParams,
        launch: Launch,
        stream: &Stream,
    ) -> Result<()> {
        // It seals in its first step, and opens in its second.
        let &[seals, opens] = &taken.pads[..] else { unreachable!("an exchange seals once and opens once") };
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
        &self,
        taken: &TakenPads,
        sealed: &SealedRingParams,
        launch: Launch,
        stream: &Stream,
    ) -> Result<()> {
        let scratch = self.scratch.as_ref().map_or(0, DeviceBuffer::pointer);
        let mut params = PaddedRingParams { ring: *sealed, pads: taken.table, scratch };
        // SAFETY: the caller's; the kernel takes `PaddedRingParams`, and neither pads nor their table are written before they
        // come back.
        let result = unsafe { self.kernel.launch(launch, stream, &params) };
        params.ring.own.round_keys.zeroize();
        params.ring.predecessor.round_keys.zeroize();
        result
    }

    /// Whether no keystream is left in its memory.
    pub(super) fn is_blank(&self, stream: &Stream) -> Result<bool> {
        let scratch = match &self.scratch {
            Some(scratch) => scratch.to_host(stream)?,
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
