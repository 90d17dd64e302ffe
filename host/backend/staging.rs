//! Messages as the GCM kernels take them: descriptors, tags, verdicts, additional data and text in one aligned piece of
//! memory, which one copy brings to a device and one brings back; and which messages share a launch.

use std::ops::Range;

use ringseal_kernels::gcm::{self, AAD_MAX, VERIFIED};
use ringseal_kernels::message;
use zeroize::{DefaultIsZeroes, Zeroize, Zeroizing};

use super::gcm::HashSubkey;
use super::{CounterWidth, PreparedKey, Record, le_words};
use crate::aead::{Iv, Tag};
use crate::{Error, Result};

/// The unit of alignment that the kernels ask for.
#[derive(Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(16))]
struct Block([u8; 16]);

impl DefaultIsZeroes for Block {}

const DESCRIPTOR_BYTES: usize = size_of::<gcm::Record>();

/// Offsets in bytes of one message's parts.
struct Place {
    aad: Range<usize>,
    text: Range<usize>,
    tag: usize,
    verdict: usize,
}

/// A batch of messages, in place: the text that comes out replaces the text that goes in. Zeroized on drop.
pub(super) struct Staging {
    memory: Zeroizing<Vec<Block>>,
    places: Vec<Place>,
    counters: Vec<[u8; 16]>,
}

impl Staging {
    /// Gathers `records`, and for opening their `tags`.
    fn new(subkey: &HashSubkey, records: &[Record<'_>], tags: &[Tag]) -> Self {
        let count = records.len();
        let tags_at = count * DESCRIPTOR_BYTES;
        let verdicts_at = tags_at + count * size_of::<Tag>();
        let mut end = (verdicts_at + count * 4).next_multiple_of(16);
        let mut take = |bytes: usize| {
            let start = end;
            end = (start + bytes).next_multiple_of(16);
            start..start + bytes
        };
        let mut places = Vec::with_capacity(count);
        for (index, record) in records.iter().enumerate() {
            places.push(Place {
                aad: take(record.aad.len()),
                text: take(record.data.len()),
                tag: tags_at + index * size_of::<Tag>(),
                verdict: verdicts_at + index * 4,
            });
        }
        let counters = records.iter().map(|record| subkey.initial_counter(record.iv)).collect();
        let mut staging = Self { memory: Zeroizing::new(vec![Block::default(); end / 16]), places, counters };
        let bytes = bytemuck::cast_slice_mut(&mut staging.memory);
        for (place, record) in staging.places.iter().zip(records) {
            bytes[place.aad.clone()].copy_from_slice(record.aad);
            bytes[place.text.clone()].copy_from_slice(record.data);
        }
        for (place, tag) in staging.places.iter().zip(tags) {
            bytes[place.tag..][..tag.len()].copy_from_slice(tag);
        }
        staging
    }

    /// For memory that the launch finds at `base`, a multiple of 16 as the launch sees it: the batch's only message, if
    /// it has no more, for the kernels on one message.
    pub(super) fn single(&self, base: u64) -> Option<message::Message> {
        let ([place], [counter]) = (&*self.places, &*self.counters) else {
            return None;
        };
        let at = |offset: usize| base + offset as u64;
        Some(message::Message {
            input: at(place.text.start),
            output: at(place.text.start),
            length: place.text.len() as u64,
            aad: at(place.aad.start),
            aad_length: place.aad.len() as u64,
            tag: at(place.tag),
            verdict: at(place.verdict),
            j0: le_words(*counter),
        })
    }

    /// Writes the descriptors for a launch that finds this memory at `base`, a multiple of 16 as the launch sees it.
    pub(super) fn place_at(&mut self, base: u64) {
        let at = |offset: usize| base + offset as u64;
        for (index, (place, counter)) in self.places.iter().zip(&self.counters).enumerate() {
            let descriptor = gcm::Record {
                input: at(place.text.start),
                output: at(place.text.start),
                aad: at(place.aad.start),
                tag: at(place.tag),
                verdict: at(place.verdict),
                length: place.text.len() as u32,
                aad_length: place.aad.len() as u32,
                j0: le_words(*counter),
            };
            let blocks = DESCRIPTOR_BYTES / size_of::<Block>();
            let target = self.memory[index * blocks..][..blocks].as_mut_ptr().cast::<gcm::Record>();
            // SAFETY: the slice has the descriptor's size and alignment; the descriptor is plain data without padding.
            unsafe { target.write(descriptor) };
        }
    }

    /// Number of messages.
    pub(super) fn count(&self) -> u32 {
        self.places.len() as u32
    }

    /// All of it, to be worked on by a launch or copied.
    pub(super) fn bytes(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.memory)
    }

    /// Hands the ciphertexts back after sealing, and returns the tags.
    fn sealed(&self, records: &mut [Record<'_>]) -> Vec<Tag> {
        let bytes: &[u8] = bytemuck::cast_slice(&self.memory);
        for (place, record) in self.places.iter().zip(records) {
            record.data.copy_from_slice(&bytes[place.text.clone()]);
        }
        let tag = |place: &Place| std::array::from_fn(|i| bytes[place.tag + i]);
        self.places.iter().map(tag).collect()
    }

    /// Hands the plaintexts back after opening, zeros for those that did not verify, and returns the verdicts. A verdict
    /// that the launch never wrote counts as a refusal.
    fn opened(&self, records: &mut [Record<'_>]) -> Vec<bool> {
        let bytes: &[u8] = bytemuck::cast_slice(&self.memory);
        let open = |(place, record): (&Place, &mut Record<'_>)| {
            let verified = bytes[place.verdict..][..4] == VERIFIED.to_le_bytes();
            match verified {
                true => record.data.copy_from_slice(&bytes[place.text.clone()]),
                false => record.data.zeroize(),
            }
            verified
        };
        self.places.iter().zip(records).map(open).collect()
    }
}

/// What a batch is launched for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    Seal,
    Open,
}

/// A key whose kernels take batches.
pub(super) trait Launcher: Send + Sync {
    /// As [`PreparedKey::ctr_xor`].
    fn ctr_xor(&self, counter_block: [u8; 16], width: CounterWidth, data: &mut [u8]) -> Result<()>;
    /// The key's hash subkey.
    fn subkey(&self) -> Result<&HashSubkey>;
    /// Has a batch worked on: by the kernels on one message if it is [`Staging::single`], else by those on records.
    /// Afterwards [`Staging::bytes`] has the results.
    fn launch(&self, work: Work, staging: &mut Staging) -> Result<()>;
}

/// Makes a [`PreparedKey`] of one.
pub(super) struct Staged<L>(pub(super) L);

impl<L: Launcher> Staged<L> {
    /// Does the work on all records with few launches; `results` takes what each batch leaves.
    fn run(
        &self,
        work: Work,
        records: &mut [Record<'_>],
        tags: &[Tag],
        mut results: impl FnMut(&Staging, &mut [Record<'_>]),
    ) -> Result<()> {
        for range in batches(records) {
            let batch = &mut records[range.clone()];
            let mut staging = Staging::new(self.0.subkey()?, batch, tags.get(range).unwrap_or_default());
            self.0.launch(work, &mut staging)?;
            results(&staging, batch);
        }
        Ok(())
    }
}

impl<L: Launcher> PreparedKey for Staged<L> {
    fn ctr_xor(&self, counter_block: [u8; 16], width: CounterWidth, data: &mut [u8]) -> Result<()> {
        match data {
            [] => Ok(()),
            data => self.0.ctr_xor(counter_block, width, data),
        }
    }

    fn seal_in_place(&self, iv: Iv<'_>, aad: &[u8], data: &mut [u8]) -> Result<Tag> {
        Ok(self.seal_records(&mut [Record { iv, aad, data }])?[0])
    }

    fn open_in_place(&self, iv: Iv<'_>, aad: &[u8], data: &mut [u8], tag: &Tag) -> Result<()> {
        match self.open_records(&mut [Record { iv, aad, data }], &[*tag])?[..] {
            [true] => Ok(()),
            _ => Err(Error::Authentication),
        }
    }

    fn seal_records(&self, records: &mut [Record<'_>]) -> Result<Vec<Tag>> {
        let mut tags = Vec::with_capacity(records.len());
        self.run(Work::Seal, records, &[], |staging, batch| tags.extend(staging.sealed(batch)))?;
        Ok(tags)
    }

    fn open_records(&self, records: &mut [Record<'_>], tags: &[Tag]) -> Result<Vec<bool>> {
        let mut verdicts = Vec::with_capacity(records.len());
        self.run(Work::Open, records, tags, |staging, batch| verdicts.extend(staging.opened(batch)))?;
        Ok(verdicts)
    }
}

/// Bytes of text from which a message gets a launch and the whole device of its own: the batch kernels leave a record to
/// one thread block, and launches cost little beside so long a message.
const APART: usize = 16 << 20;

/// Whether a message should not share a launch with others, or, for its additional data, can't.
fn is_apart(record: &Record<'_>) -> bool {
    record.data.len() >= APART || record.aad.len() > AAD_MAX as usize
}

/// The records of each launch: runs of those that share one, and those apart alone.
fn batches(records: &[Record<'_>]) -> Vec<Range<usize>> {
    let mut start = 0;
    let chunks = records.chunk_by(|left, right| !is_apart(left) && !is_apart(right));
    let ranges = chunks.map(|chunk| {
        let range = start..start + chunk.len();
        start = range.end;
        range
    });
    ranges.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_share_a_launch_unless_long() {
        let (short, long) = (vec![0; 2048], vec![0; 2049]);
        let batches_of = |aads: &[&[u8]]| -> Vec<_> {
            let iv = Iv::from_nonce(&[0; 12]);
            let records: Vec<_> = aads.iter().map(|aad| Record { iv, aad, data: &mut [] }).collect();
            batches(&records).into_iter().map(|range| (range.start, range.end)).collect()
        };
        assert_eq!(batches_of(&[]), []);
        assert_eq!(batches_of(&[&short, &short, &short]), [(0, 3)]);
        assert_eq!(
            batches_of(&[&long, &short, &short, &long, &long, &short]),
            [(0, 1), (1, 3), (3, 4), (4, 5), (5, 6)]
        );
    }
}
