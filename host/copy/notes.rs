//! What describes the records of a copy to the device's kernels.

use std::ops::Range;

use ringseal_kernels::gcm::{Record, nonce_j0};

use super::{Call, Direction, Shape};
use crate::aead::Tag;
use crate::channel::ASSOCIATED_DATA_BYTES;

/// The addresses of one copy on the device. Its control memory holds, piece after piece, the notes on a piece's records
/// (descriptors, additional data, tags), and then the verdicts of all. Ranges are offsets in it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Notes {
    pub(crate) direction: Direction,
    pub(crate) call: Call,
    pub(crate) shape: Shape,
    /// Control memory, at a multiple of 16.
    pub(crate) control: u64,
    /// The device's end of the copy, at a multiple of 16.
    pub(crate) texts: u64,
    /// The slots on the device, for what it seals.
    pub(crate) staging: u64,
}

const RECORD: usize = size_of::<Record>();
const TAG: usize = size_of::<Tag>();
const EACH: usize = RECORD + ASSOCIATED_DATA_BYTES + TAG;

// Descriptors are written field by field, in the order of the structure.
const _: () = assert!(RECORD == 64 && std::mem::offset_of!(Record, j0) == 48);
const _: () =
    assert!(std::mem::offset_of!(Record, verdict) == 32 && std::mem::offset_of!(Record, length) == 40);

impl Notes {
    /// Bytes of control memory.
    pub(crate) fn control_bytes(shape: Shape) -> usize {
        Self::all_verdicts(shape).end
    }

    /// A word for each record.
    pub(crate) fn verdicts(&self) -> Range<usize> {
        Self::all_verdicts(self.shape)
    }

    fn all_verdicts(shape: Shape) -> Range<usize> {
        let begin = EACH * shape.records();
        begin..begin + 4 * shape.records()
    }

    pub(crate) fn of_piece(&self, piece: usize) -> Range<usize> {
        let records = self.shape.piece(piece);
        EACH * records.start..EACH * records.end
    }

    /// The part of a piece's notes that has its tags: the last.
    pub(crate) fn tags(&self, piece: usize) -> Range<usize> {
        let end = self.of_piece(piece).end;
        end - TAG * self.shape.piece(piece).len()..end
    }

    /// Address of a piece's descriptors.
    pub(crate) fn descriptors(&self, piece: usize) -> u64 {
        self.control + self.of_piece(piece).start as u64
    }

    /// Writes a piece's notes but for the tags. Text that comes to the device is opened where it arrives, with tags from the
    /// notes; what leaves is sealed into its slot on the device, as are its tags.
    pub(crate) fn write(&self, piece: usize, notes: &mut [u8]) {
        let records = self.shape.piece(piece);
        let (descriptors, rest) = notes.split_at_mut(RECORD * records.len());
        let (associated, _) = rest.split_at_mut(ASSOCIATED_DATA_BYTES * records.len());
        let associated_at = self.descriptors(piece) + descriptors.len() as u64;
        let tags_at = self.control + self.tags(piece).start as u64;
        let verdicts_at = self.control + self.verdicts().start as u64;
        let slot = self.staging + (piece % self.shape.slots * self.shape.slot_bytes()) as u64;
        let descriptors = descriptors.as_chunks_mut::<RECORD>().0.iter_mut();
        let associated = associated.as_chunks_mut::<ASSOCIATED_DATA_BYTES>().0.iter_mut();
        for (index, (record, (descriptor, associated))) in
            records.zip(descriptors.zip(associated)).enumerate()
        {
            let bytes = self.shape.record(record);
            let text = self.texts + bytes.start as u64;
            let (output, tag) = match self.direction {
                Direction::ToDevice => (text, tags_at + (TAG * index) as u64),
                Direction::ToHost => {
                    let (text, tag) = self.shape.places(record);
                    (slot + text as u64, slot + tag as u64)
                }
            };
            let aad = associated_at + (ASSOCIATED_DATA_BYTES * index) as u64;
            let addresses = [text, output, aad, tag, verdicts_at + 4 * record as u64];
            // At most 1 GiB: the options say so.
            let lengths = [bytes.len() as u32, ASSOCIATED_DATA_BYTES as u32];
            let nonce = self.call.nonce(record);
            let words = nonce.as_chunks().0;
            let j0 = nonce_j0([0, 1, 2].map(|word| u32::from_le_bytes(words[word])));
            descriptor[..40].copy_from_slice(addresses.map(u64::to_le_bytes).as_flattened());
            descriptor[40..48].copy_from_slice(lengths.map(u32::to_le_bytes).as_flattened());
            descriptor[48..].copy_from_slice(j0.map(u32::to_le_bytes).as_flattened());
            associated.copy_from_slice(self.call.associated(record).as_bytes());
        }
    }
}
