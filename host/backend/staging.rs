//! Messages as the GCM kernels take them: descriptors, tags, verdicts, additional data and text in one aligned piece of
//! memory, which one copy brings to a device and one brings back.

use std::ops::Range;

use ringseal_kernels::gcm::{self, AAD_MAX, VERIFIED};
use zeroize::{DefaultIsZeroes, Zeroize, Zeroizing};

use super::gcm::HashSubkey;
use super::{Record, le_words};
use crate::aead::Tag;
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
    ///
    /// # Errors
    /// [`Error::Unsupported`] for what the kernels can't take.
    pub(super) fn new(
        backend: &'static str,
        subkey: &HashSubkey,
        records: &[Record<'_>],
        tags: &[Tag],
    ) -> Result<Self> {
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
            check_supported(backend, record)?;
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
        Ok(staging)
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
    pub(super) fn sealed(&self, records: &mut [Record<'_>]) -> Vec<Tag> {
        let bytes: &[u8] = bytemuck::cast_slice(&self.memory);
        for (place, record) in self.places.iter().zip(records) {
            record.data.copy_from_slice(&bytes[place.text.clone()]);
        }
        let tag = |place: &Place| std::array::from_fn(|i| bytes[place.tag + i]);
        self.places.iter().map(tag).collect()
    }

    /// Hands the plaintexts back after opening, zeros for those that did not verify, and returns the verdicts. A verdict
    /// that the launch never wrote counts as a refusal.
    pub(super) fn opened(&self, records: &mut [Record<'_>]) -> Vec<bool> {
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

fn check_supported(backend: &'static str, record: &Record<'_>) -> Result<()> {
    let what = if record.aad.len() > AAD_MAX as usize {
        format!("more than {AAD_MAX} bytes of additional authenticated data")
    } else if u32::try_from(record.data.len()).is_err() {
        "AES-GCM of messages of 4 GiB or more".into()
    } else {
        return Ok(());
    };
    Err(Error::Unsupported { backend, what })
}
