//! Device memory for keystream made ahead, in slots, and the stream that makes and wipes it.

use ringseal_kernels::aes::RoundKeys;
use ringseal_kernels::padded::{HEAD_BYTES, PAD_FILL_SHARED, PadFillParams, pad_name, pads_fill_128};
use zeroize::Zeroize;

use super::memory::DeviceBuffer;
use super::module::{Kernel, Launch, Module};
use super::stream::Stream;
use crate::keystream::Name;
use crate::{Error, Result};

/// Slots of pads: each for one chunk. Zeros, as long as nothing is made.
pub(super) struct PadMemory {
    pads: DeviceBuffer,
    heads: DeviceBuffer,
    /// Of low priority.
    pub(super) stream: Stream,
    fill: [Kernel; 2],
    /// Multiprocessors that make pads at a time.
    makers: u32,
    slot_bytes: usize,
    /// Records of a slot at most.
    slot_records: usize,
    /// Of each slot, the bytes of pads that were made there since it was wiped, and how many pads.
    made: Vec<(usize, usize)>,
}

/// The chunk that pads are for.
pub(super) struct PadChunk {
    /// Its sender's key is known by this number, which is not 0.
    pub(super) serial: u32,
    /// Its collective and step.
    pub(super) name: Name,
    /// Its length.
    pub(super) bytes: u64,
    /// That of its records, a multiple of 16.
    pub(super) record_bytes: u32,
    /// Address of the [`ChunkPads`](ringseal_kernels::padded::ChunkPads) that is to say where the pads are; 0 for none.
    pub(super) entry: u64,
    /// What that has for its word of misses.
    pub(super) misses: u64,
}

/// Bytes of a chunk's pads that a slot takes, and how many pads: of whole records, but for the chunk's last. `stride` is a
/// record's length.
fn fitting(chunk_bytes: u64, slot_bytes: usize, slot_records: usize, stride: u32) -> (u64, u32) {
    let (slot_bytes, stride) = (slot_bytes as u64, u64::from(stride));
    let by_length = if chunk_bytes <= slot_bytes { chunk_bytes } else { slot_bytes / stride * stride };
    let bytes = by_length.min(slot_records as u64 * stride);
    (bytes, bytes.div_ceil(stride) as u32)
}

impl PadMemory {
    /// Allocates `slots` slots for chunks of up to `slot_bytes` bytes in records of `record_bytes` bytes or more.
    pub(super) fn new(
        module: &Module,
        slots: usize,
        slot_bytes: usize,
        record_bytes: u32,
        makers: Option<u32>,
    ) -> Result<Self> {
        let device = module.device();
        let stream = Stream::low_priority(device)?;
        let slot_records = slot_bytes.div_ceil(record_bytes as usize);
        let secret = |of_slot: usize| -> Result<DeviceBuffer> {
            let bytes = slots.checked_mul(of_slot).ok_or_else(|| {
                Error::InvalidArgument(format!("keystream: {slots} slots of {of_slot} bytes are too many"))
            })?;
            let mut buffer = DeviceBuffer::secret(device, bytes)?;
            buffer.fill(0, &stream)?;
            Ok(buffer)
        };
        let multiprocessors = device.multiprocessors()?;
        let memory = Self {
            pads: secret(slot_bytes)?,
            heads: secret(slot_records * HEAD_BYTES as usize)?,
            fill: [
                module.kernel("pads_fill_128", PAD_FILL_SHARED)?,
                module.kernel("pads_fill_256", PAD_FILL_SHARED)?,
            ],
            makers: makers.unwrap_or(multiprocessors).clamp(1, multiprocessors),
            slot_bytes,
            slot_records,
            made: vec![(0, 0); slots],
            stream,
        };
        memory.stream.synchronize()?;
        Ok(memory)
    }

    /// Records of a slot at most.
    pub(super) fn slot_records(&self) -> u32 {
        self.slot_records as u32
    }

    /// Where a slot's pads begin.
    pub(super) fn pads(&self, slot: usize) -> u64 {
        self.pads.pointer() + (slot * self.slot_bytes) as u64
    }

    /// Where their heads begin.
    pub(super) fn heads(&self, slot: usize) -> u64 {
        self.heads.pointer() + (slot * self.slot_records) as u64 * HEAD_BYTES
    }

    /// Queues the making of a chunk's pads, as many as there is room for. What is at `round_keys` is of AES with this many
    /// bits.
    pub(super) fn make(
        &mut self,
        slot: usize,
        round_keys: &RoundKeys,
        bits: usize,
        chunk: &PadChunk,
    ) -> Result<()> {
        let (bytes, count) = fitting(chunk.bytes, self.slot_bytes, self.slot_records, chunk.record_bytes);
        if count == 0 {
            return Ok(());
        }
        self.made[slot] = (bytes.next_multiple_of(16) as usize, count as usize);
        let mut params = PadFillParams {
            round_keys: *round_keys,
            pads: self.pads(slot),
            heads: self.heads(slot),
            bytes,
            name: pad_name(chunk.name.sequence, chunk.name.step),
            record_bytes: chunk.record_bytes,
            count,
            serial: chunk.serial,
            slot_records: self.slot_records(),
            entry: chunk.entry,
            misses: chunk.misses,
        };
        let launch = Launch { blocks: self.makers.min(count), threads: pads_fill_128::THREADS };
        let kernel = &self.fill[usize::from(bits == 256)];
        // SAFETY: the kernel's parameters; the slot's memory lives as long as the stream, and by the store's promise nothing
        // on any stream uses it that this stream doesn't wait for.
        let launched = unsafe { kernel.launch(launch, &self.stream, &params) };
        params.round_keys.zeroize();
        launched
    }

    /// Queues the overwriting of what was made in a slot with zeros.
    pub(super) fn wipe(&mut self, slot: usize) -> Result<()> {
        let (bytes, count) = self.made[slot];
        // SAFETY: the slot's own memory; as for `make`. Claims go first.
        unsafe {
            self.stream.fill(self.heads(slot), 0, count * HEAD_BYTES as usize)?;
            self.stream.fill(self.pads(slot), 0, bytes)?;
        }
        self.made[slot] = (0, 0);
        Ok(())
    }

    /// Whether all of it is zeros, once all that was asked for is done.
    pub(super) fn is_blank(&self) -> Result<bool> {
        for buffer in [&self.pads, &self.heads] {
            if buffer.to_host(&self.stream)?.iter().any(|&byte| byte != 0) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_as_long_as_a_slot_has_all_its_pads() {
        // Four ranks' chunks of 64 MiB: the last record is a short one.
        assert_eq!(fitting(16 << 20, 16 << 20, 4096, 254_208), (16 << 20, 66));
        for chunk in [1u64, 15, 16, 4096, 4097, 100_000, 1 << 20] {
            for stride in [16, 4096, 4352, 65536, 262_144] {
                let slot = (chunk as usize).next_multiple_of(16);
                let records = chunk.div_ceil(u64::from(stride)) as u32;
                assert_eq!(
                    fitting(chunk, slot, slot.div_ceil(16), stride),
                    (chunk, records),
                    "{chunk} by {stride}"
                );
            }
        }
    }

    #[test]
    fn a_longer_chunk_has_those_of_whole_records() {
        assert_eq!(fitting(10_000, 8192, 2, 4096), (8192, 2));
        assert_eq!(fitting(10_000, 9000, 9, 4096), (8192, 2));
        assert_eq!(fitting(10_000, 4000, 1, 4096), (0, 0));
        // More records than there are heads for.
        assert_eq!(fitting(10_000, 16_384, 2, 1024), (2048, 2));
    }
}
