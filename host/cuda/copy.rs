//! Sealed copies between host and device memory: [`copy`](crate::copy) has the protocol.

use std::fmt;

use ringseal_kernels::gcm::VERIFIED;

use super::cipher::Kernels;
use super::gcm::GcmKey;
use super::memory::{DeviceBuffer, HostBuffer};
use super::stream::{Event, Stream};
use crate::aead::Tag;
use crate::channel::GroupSecret;
use crate::copy::{Call, CopyOptions, Direction, Far, HostCipher, Keys, Notes, Shape, Tap, receive, send};
use crate::{Error, Result};

/// Copies between host and device memory of which only ciphertext and tags leave either.
pub struct SealedCopy {
    kernels: Kernels,
    options: CopyOptions,
    keys: Keys,
    /// Expanded keys and their epoch, by direction.
    ciphers: [(u64, HostCipher, GcmKey); 2],
    /// The slots on the host: pinned, and taken for the attacker's.
    staging: HostBuffer,
    /// As many on the device, for what the device seals.
    device_staging: DeviceBuffer,
    /// The notes on one copy's records, and the verdicts.
    control: DeviceBuffer,
    /// The notes as the host writes them: ordinary memory, which the driver copies and no device reaches.
    written: Vec<u8>,
    copies: Stream,
    work: Stream,
    /// Reached when what is in the slot has been moved.
    moved: Vec<Event>,
    /// Reached when the device has sealed the piece that comes next.
    sealed: Event,
    failed: bool,
    tap: Option<Tap>,
}

impl SealedCopy {
    /// Allocates the staging memory and derives keys from the secret and fresh randomness.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for impossible options, [`Error::Unsupported`] where the kernels have no AES-GCM,
    /// [`Error::Cuda`], [`Error::Randomness`].
    pub fn new(kernels: &Kernels, secret: &GroupSecret, options: CopyOptions) -> Result<Self> {
        options.check()?;
        let device = kernels.device();
        let staging_bytes = options.staging_bytes();
        let keys = Keys::new(secret, &options)?;
        let work = Stream::new(device)?;
        let expand = |direction| expanded(kernels, &keys, direction, &work);
        Ok(Self {
            ciphers: [expand(Direction::ToDevice)?, expand(Direction::ToHost)?],
            kernels: kernels.clone(),
            options,
            staging: HostBuffer::new(device, staging_bytes)?,
            device_staging: DeviceBuffer::new(device, staging_bytes)?,
            control: DeviceBuffer::new(device, 0)?,
            written: Vec::new(),
            moved: (0..options.slots).map(|_| Event::untimed(device)).collect::<Result<_>>()?,
            sealed: Event::untimed(device)?,
            copies: Stream::new(device)?,
            work,
            keys,
            failed: false,
            tap: None,
        })
    }

    /// Begins anew under other keys, after a failed copy too.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn re_key(&mut self, secret: &GroupSecret) -> Result<()> {
        self.failed = true;
        self.keys = Keys::new(secret, &self.options)?;
        for direction in [Direction::ToDevice, Direction::ToHost] {
            self.ciphers[direction as usize] = expanded(&self.kernels, &self.keys, direction, &self.work)?;
        }
        self.failed = false;
        Ok(())
    }

    /// Whether a copy has failed and [`re_key`](Self::re_key) is needed.
    pub fn is_poisoned(&self) -> bool {
        self.failed
    }

    /// Copies `source` to device memory at `destination`, a multiple of 16, after the earlier work of `stream`. When it
    /// returns, all records have verified on the device.
    ///
    /// # Errors
    /// [`Error::Authentication`] when one has not; the destination is zeros then, and further copies are
    /// [`Error::Poisoned`] until [`re_key`](Self::re_key). [`Error::KeyExhausted`], [`Error::InvalidArgument`],
    /// [`Error::Cuda`].
    ///
    /// # Safety
    /// `destination` is valid for `source.len()` bytes on the kernels' device, and nothing else uses it meanwhile but the
    /// stream's earlier work.
    pub unsafe fn to_device(&mut self, destination: u64, source: &[u8], stream: &Stream) -> Result<()> {
        let Some((call, shape)) = self.begin(Direction::ToDevice, destination, source.len(), stream)? else {
            return Ok(());
        };
        let mut tap = self.tap.take();
        let outcome = self.send(&call, shape, destination, source, tap.as_mut());
        self.tap = tap;
        if outcome.is_err() {
            self.failed = true;
            // Whatever is queued comes before the zeros. A device that fails at this has failed at everything.
            let _ = self.copies.synchronize();
            // SAFETY: the caller's promise.
            let _ = unsafe { self.work.fill(destination, 0, source.len()) };
            let _ = self.work.synchronize();
        }
        outcome
    }

    /// Copies device memory at `source`, a multiple of 16, to `destination`, after the earlier work of `stream`.
    ///
    /// # Errors
    /// As [`to_device`](Self::to_device).
    ///
    /// # Safety
    /// `source` is valid for `destination.len()` bytes on the kernels' device, and nothing writes it meanwhile but the
    /// stream's earlier work.
    pub unsafe fn to_host(&mut self, destination: &mut [u8], source: u64, stream: &Stream) -> Result<()> {
        let Some((call, shape)) = self.begin(Direction::ToHost, source, destination.len(), stream)? else {
            return Ok(());
        };
        let mut tap = self.tap.take();
        let outcome = self.receive(&call, shape, destination, source, tap.as_mut());
        self.tap = tap;
        if outcome.is_err() {
            self.failed = true;
            destination.fill(0);
            // Staging is not to be used again, or freed, while the device writes it.
            let _ = self.work.synchronize();
            let _ = self.copies.synchronize();
        }
        outcome
    }

    /// Lets `tap` see, and change, the staging memory of each piece on its way, as whoever controls the bus can; for tests
    /// of what happens then.
    pub fn tap(&mut self, tap: impl FnMut(&mut [u8]) + Send + 'static) {
        self.tap = Some(Box::new(tap));
    }

    /// Checks and numbers a copy, and puts its work after the stream's. `None` when there is nothing to copy.
    fn begin(
        &mut self,
        direction: Direction,
        address: u64,
        bytes: usize,
        stream: &Stream,
    ) -> Result<Option<(Call, Shape)>> {
        if self.failed {
            return Err(Error::Poisoned);
        }
        if !address.is_multiple_of(16) {
            return Err(Error::InvalidArgument(
                "a sealed copy's device address must be a multiple of 16".into(),
            ));
        }
        stream.refuse_capture(
            "the stream is being captured, and a sealed copy can't be part of a graph: it waits for its end",
        )?;
        if bytes == 0 {
            return Ok(None);
        }
        let shape = self.options.shape(bytes);
        let call = self.keys.begin(direction, shape)?;
        if self.ciphers[direction as usize].0 != self.keys.epoch() {
            self.ciphers[direction as usize] = expanded(&self.kernels, &self.keys, direction, &self.work)?;
        }
        let earlier = stream.record()?;
        self.copies.wait(&earlier)?;
        self.work.wait(&earlier)?;
        Ok(Some((call, shape)))
    }

    fn send(
        &mut self,
        call: &Call,
        shape: Shape,
        destination: u64,
        source: &[u8],
        tap: Option<&mut Tap>,
    ) -> Result<()> {
        let notes = self.notes(Direction::ToDevice, call, shape, destination)?;
        let threads = self.options.threads;
        self.with_far(notes, |far, cipher| send(far, cipher, call, shape, source, threads, tap))?;
        let mut verdicts = vec![0; notes.verdicts().len()];
        self.control.read(notes.verdicts().start, &mut verdicts, &self.work)?;
        if verdicts.as_chunks().0.iter().all(|verdict| u32::from_le_bytes(*verdict) == VERIFIED) {
            Ok(())
        } else {
            Err(Error::Authentication)
        }
    }

    fn receive(
        &mut self,
        call: &Call,
        shape: Shape,
        destination: &mut [u8],
        source: u64,
        tap: Option<&mut Tap>,
    ) -> Result<()> {
        let notes = self.notes(Direction::ToHost, call, shape, source)?;
        let threads = self.options.threads;
        self.with_far(notes, |far, cipher| receive(far, cipher, call, shape, destination, threads, tap))
    }

    /// Has `work` done with the device as the pipeline sees it, and the host's key of the same direction.
    fn with_far(
        &mut self,
        notes: Notes,
        work: impl FnOnce(&mut FarDevice<'_>, &HostCipher) -> Result<()>,
    ) -> Result<()> {
        let mut written = std::mem::take(&mut self.written);
        let mut far = FarDevice { copy: self, notes, written: &mut written, queued: 0, passed: 0 };
        let outcome = work(&mut far, &self.ciphers[notes.direction as usize].1);
        self.written = written;
        outcome
    }

    /// Memory for the notes on a copy's records, on both sides, and blank verdicts.
    fn notes(&mut self, direction: Direction, call: &Call, shape: Shape, texts: u64) -> Result<Notes> {
        let needed = Notes::control_bytes(shape);
        if self.control.len() < needed {
            self.control = DeviceBuffer::new(self.kernels.device(), needed.next_power_of_two())?;
        }
        let (control, staging) = (self.control.pointer(), self.device_staging.pointer());
        let notes = Notes { direction, call: *call, shape, control, texts, staging };
        let verdicts = notes.verdicts();
        if self.written.len() < verdicts.start {
            self.written.resize(verdicts.start, 0);
        }
        // SAFETY: inside the buffer, which lives until the stream's work is done; the copy before this one is.
        unsafe { self.work.fill(control + verdicts.start as u64, 0, verdicts.len())? };
        Ok(notes)
    }
}

/// The driver copies as much from ordinary memory without waiting for the stream (CUDA C++ Programming Guide, asynchronous
/// concurrent execution).
const UPLOAD_BYTES: usize = 64 << 10;

/// The device as the pipeline sees it. Copies and kernels have a stream each, so that they overlap.
struct FarDevice<'a> {
    copy: &'a SealedCopy,
    notes: Notes,
    /// Each piece's part is written once.
    written: &'a mut [u8],
    queued: usize,
    passed: usize,
}

impl FarDevice<'_> {
    /// Queues the upload of a piece's notes, without the tags where there are none.
    ///
    /// # Safety
    /// The copy's memory outlives the work; `tags` is the address of as many tags as the piece has records.
    unsafe fn note(&mut self, piece: usize, tags: Option<*const u8>) -> Result<()> {
        let (mut range, tags_at) = (self.notes.of_piece(piece), self.notes.tags(piece));
        self.notes.write(piece, &mut self.written[range.clone()]);
        match tags {
            // Read once, here: what staging holds later doesn't matter.
            // SAFETY: the caller's promise.
            Some(tags) => unsafe {
                let written = &mut self.written[tags_at];
                tags.copy_to_nonoverlapping(written.as_mut_ptr(), written.len());
            },
            None => range.end = tags_at.start,
        }
        let mut to = self.notes.descriptors(piece);
        for part in self.written[range].chunks(UPLOAD_BYTES) {
            // SAFETY: the piece's part of the control memory; the caller's promise.
            unsafe { self.copy.work.copy(to, part.as_ptr() as u64, part.len())? };
            to += part.len() as u64;
        }
        Ok(())
    }
}

impl Far for FarDevice<'_> {
    fn slot(&mut self, slot: usize) -> *mut u8 {
        (self.copy.staging.pointer() + (slot * self.notes.shape.slot_bytes()) as u64) as *mut u8
    }

    fn queue(&mut self, piece: usize) -> Result<()> {
        let (Notes { shape, direction, texts, staging, .. }, copy) = (self.notes, self.copy);
        let SealedCopy { copies, work, sealed, .. } = copy;
        let slot = piece % shape.slots;
        let (host, device) = (self.slot(slot), staging + (slot * shape.slot_bytes()) as u64);
        let (bytes, count) = (shape.piece_bytes(piece), shape.piece(piece).len());
        let (tags_at, tag_bytes) = (shape.text_bytes(), size_of::<Tag>() * count);
        let descriptors = self.notes.descriptors(piece);
        let key = &copy.ciphers[direction as usize].2;
        // SAFETY: slots, control memory and keys live in the `SealedCopy`, which waits for both streams before it gives any
        // of them up; its caller vouches for the device's end. The pipeline queues a piece only when its slot is free.
        unsafe {
            match direction {
                Direction::ToDevice => {
                    copies.copy(texts + bytes.start as u64, host as u64, bytes.len())?;
                    copies.mark(&copy.moved[slot])?;
                    self.note(piece, Some(host.add(tags_at)))?;
                    work.wait(&copy.moved[slot])?;
                    key.open_records(descriptors, count as u32, work)?;
                }
                Direction::ToHost => {
                    self.note(piece, None)?;
                    key.seal_records(descriptors, count as u32, work)?;
                    work.mark(sealed)?;
                    copies.wait(sealed)?;
                    if bytes.len() == tags_at {
                        // A full piece's tags come right after its text, and one copy takes less time than two.
                        copies.copy(host as u64, device, tags_at + tag_bytes)?;
                    } else {
                        copies.copy(host as u64, device, bytes.len())?;
                        copies.copy(host.add(tags_at) as u64, device + tags_at as u64, tag_bytes)?;
                    }
                    copies.mark(&copy.moved[slot])?;
                }
            }
        }
        self.queued += 1;
        Ok(())
    }

    fn passed(&mut self) -> Result<usize> {
        while self.passed < self.queued
            && self.copy.moved[self.passed % self.notes.shape.slots].is_reached()?
        {
            self.passed += 1;
        }
        Ok(self.passed)
    }
}

impl Drop for SealedCopy {
    fn drop(&mut self) {
        // A copy waits for its work, unless the caller's stream or a thread failed in between.
        let _ = self.copies.synchronize();
        let _ = self.work.synchronize();
    }
}

/// A direction's key of the present epoch, for both sides.
fn expanded(
    kernels: &Kernels,
    keys: &Keys,
    direction: Direction,
    stream: &Stream,
) -> Result<(u64, HostCipher, GcmKey)> {
    let key = keys.key(direction)?;
    Ok((keys.epoch(), HostCipher::new(&key)?, GcmKey::new(kernels, &key, stream)?))
}

impl fmt::Debug for SealedCopy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "SealedCopy({:?}, {:?})", self.kernels.device(), self.options)
    }
}
