//! Which key, nonce and additional data a record of a copy has.

use zeroize::Zeroizing;

use super::{COPY_CODE, CopyOptions, Direction, Shape};
use crate::aead::AesKey;
use crate::channel::{
    AssociatedData, GroupSecret, KeyLength, MAX_SEQUENCE, NO_OP, NONCE_BYTES, Reserved, Root, VERSION,
    Volume, nonce, volume,
};
use crate::{Dtype, Error, Result};

/// Keys and counters of the copies of one session.
pub(crate) struct Keys {
    root: Root,
    length: KeyLength,
    volume: Volume,
    epoch: u64,
    sequence: u64,
}

/// One copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    direction: Direction,
    session: u64,
    sequence: u64,
    shape: Shape,
}

impl Keys {
    /// Derives a session from the secret and fresh randomness.
    ///
    /// # Errors
    /// [`Error::Randomness`].
    pub(crate) fn new(secret: &GroupSecret, options: &CopyOptions) -> Result<Self> {
        Ok(Self {
            root: Root::of_copies(secret)?,
            length: options.key,
            volume: Volume::new(options.key_bytes),
            epoch: 0,
            sequence: 0,
        })
    }

    /// Begins a copy, whose number is used up whatever happens next. Both directions' keys count as having encrypted it.
    /// Changes [`epoch`](Self::epoch) where the keys would encrypt too much.
    ///
    /// # Errors
    /// [`Error::KeyExhausted`] when one key may not encrypt that much, [`Error::InvalidArgument`] when a nonce has no room
    /// for the records or the numbers are used up.
    pub(crate) fn begin(&mut self, direction: Direction, shape: Shape) -> Result<Call> {
        // The last record's: a nonce that does not fit must not come up in the middle.
        nonce(self.sequence, 0, shape.records() - 1)?;
        let full = volume::calls_of_message(shape.record_bytes);
        match self.volume.reserve((shape.records() as u64).saturating_mul(full)) {
            Reserved::Here => {}
            Reserved::NextEpoch => self.epoch += 1,
            Reserved::Never => return Err(Error::KeyExhausted { limit: self.volume.limit_bytes() }),
        }
        let call = Call { direction, session: self.root.session(), sequence: self.sequence, shape };
        debug_assert!(self.sequence < MAX_SEQUENCE, "the nonce has said so");
        self.sequence += 1;
        Ok(call)
    }

    /// Which keys are in use, counted from 0.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The present epoch's key of a direction.
    pub(crate) fn key(&self, direction: Direction) -> Result<AesKey> {
        let mut bytes = Zeroizing::new([0; 32]);
        let bytes = &mut bytes[..self.length.bytes()];
        self.root.copy_key(direction as u8, self.epoch, bytes);
        AesKey::from_bytes(bytes)
    }
}

impl Call {
    /// The nonce of a record, which is one of the copy's.
    pub(crate) fn nonce(&self, record: usize) -> [u8; NONCE_BYTES] {
        nonce(self.sequence, 0, record).expect("`begin` has checked the last record's")
    }

    /// The additional data of a record.
    pub(crate) fn associated(&self, record: usize) -> AssociatedData {
        AssociatedData {
            version: VERSION,
            collective: COPY_CODE,
            algorithm: self.direction as u8,
            dtype: Dtype::U8 as u8,
            op: NO_OP,
            reserved: 0,
            root: 0,
            session: self.session,
            sequence: self.sequence,
            count: self.shape.bytes as u64,
            sender: self.direction as u16,
            ranks: 2,
            step: 0,
            // `begin` has checked that it fits.
            record: record as u32,
            last: (record + 1 == self.shape.records()).into(),
        }
    }
}
