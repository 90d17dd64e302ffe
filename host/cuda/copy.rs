//! Sealed copies between host and device memory: [`copy`](crate::copy) has the protocol.

use std::collections::VecDeque;
use std::fmt;

use ringseal_kernels::gcm::{Record, VERIFIED, nonce_j0};

use super::cipher::Kernels;
use super::gcm::GcmKey;
use super::memory::{DeviceBuffer, HostBuffer};
use super::stream::{Event, Stream};
use crate::channel::{ASSOCIATED_DATA_BYTES, GroupSecret};
use crate::copy::{Call, CopyOptions, Direction, Far, HostCipher, Keys, Shape, Tap, receive, send};
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
    /// Descriptors, additional data, verdicts and tags of the records of one copy.
    control: DeviceBuffer,
    copies: Stream,
    work: Stream,
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
        let staging_bytes = options.shape(1).slot_bytes().checked_mul(options.slots).ok_or_else(|| {
            Error::InvalidArgument("sealed copies: more staging memory than there can be".into())
        })?;
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
        if stream.is_capturing()? {
            return Err(Error::InvalidArgument(
                "the stream is being captured, and a sealed copy can't be part of a graph: it waits for its end".into(),
            ));
        }
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
        let control = self.describe(call, shape, |control, record| {
            // Opened where the copy engine puts it.
            let text = destination + shape.record(record).start as u64;
            (text, text, control.tag(record))
        })?;
        let direction = Direction::ToDevice;
        let mut far = self.far(direction, shape, control, destination);
        let cipher = &self.ciphers[direction as usize].1;
        send(&mut far, cipher, call, shape, source, self.options.threads, tap)?;
        let mut verdicts = vec![0; 4 * shape.records()];
        self.control.read(control.verdicts_offset(), &mut verdicts, &self.work)?;
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
        let staging = self.device_staging.pointer();
        let control = self.describe(call, shape, |_, record| {
            let slot = staging + (record / shape.piece_records % shape.slots * shape.slot_bytes()) as u64;
            let (text, tag) = shape.places(record);
            (source + shape.record(record).start as u64, slot + text as u64, slot + tag as u64)
        })?;
        let direction = Direction::ToHost;
        let mut far = self.far(direction, shape, control, source);
        let cipher = &self.ciphers[direction as usize].1;
        receive(&mut far, cipher, call, shape, destination, self.options.threads, tap)
    }

    fn far(&self, direction: Direction, shape: Shape, control: Control, address: u64) -> FarDevice<'_> {
        FarDevice {
            direction,
            shape,
            control,
            address,
            key: &self.ciphers[direction as usize].2,
            staging: self.staging.pointer(),
            device_staging: self.device_staging.pointer(),
            copies: &self.copies,
            work: &self.work,
            moved: VecDeque::new(),
            passed: 0,
        }
    }

    /// Writes the descriptors, additional data and blank verdicts of a copy's records to device memory, by the driver's
    /// own path. `place` gives the addresses of a record's input, output and tag.
    fn describe(
        &mut self,
        call: &Call,
        shape: Shape,
        place: impl Fn(&Control, usize) -> (u64, u64, u64),
    ) -> Result<Control> {
        let records = shape.records();
        let needed = Control { address: 0, records }.tag(records) as usize;
        if self.control.len() < needed {
            self.control = DeviceBuffer::new(self.kernels.device(), needed.next_power_of_two())?;
        }
        let control = Control { address: self.control.pointer(), records };
        let mut bytes = Vec::with_capacity(needed);
        for record in 0..records {
            let (input, output, tag) = place(&control, record);
            let nonce = call.nonce(record);
            let word =
                |at: usize| u32::from_le_bytes([nonce[at], nonce[at + 1], nonce[at + 2], nonce[at + 3]]);
            let addresses = [input, output, control.associated(record), tag, control.verdict(record)];
            bytes.extend(addresses.map(u64::to_le_bytes).as_flattened());
            // At most 1 GiB: the options say so.
            let lengths = [shape.record(record).len() as u32, ASSOCIATED_DATA_BYTES as u32];
            bytes.extend(lengths.map(u32::to_le_bytes).as_flattened());
            bytes.extend(nonce_j0([word(0), word(4), word(8)]).map(u32::to_le_bytes).as_flattened());
        }
        for record in 0..records {
            bytes.extend_from_slice(call.associated(record).as_bytes());
        }
        bytes.resize(control.verdicts_offset() + 4 * records, 0);
        self.control.write(0, &bytes, &self.work)?;
        Ok(control)
    }
}

/// Where things lie in the memory that describes the records of a copy: descriptors, additional data, verdicts, tags.
#[derive(Clone, Copy)]
struct Control {
    address: u64,
    records: usize,
}

// The descriptors are written field by field, in the order of the structure.
const _: () = assert!(size_of::<Record>() == 64 && std::mem::offset_of!(Record, j0) == 48);
const _: () =
    assert!(std::mem::offset_of!(Record, verdict) == 32 && std::mem::offset_of!(Record, length) == 40);

impl Control {
    fn descriptor(&self, record: usize) -> u64 {
        self.address + (record * size_of::<Record>()) as u64
    }

    fn associated(&self, record: usize) -> u64 {
        self.descriptor(self.records) + (record * ASSOCIATED_DATA_BYTES) as u64
    }

    fn verdict(&self, record: usize) -> u64 {
        self.associated(self.records) + 4 * record as u64
    }

    fn verdicts_offset(&self) -> usize {
        self.records * (size_of::<Record>() + ASSOCIATED_DATA_BYTES)
    }

    fn tag(&self, record: usize) -> u64 {
        self.verdict(self.records).next_multiple_of(16) + 16 * record as u64
    }
}

/// The device as the pipeline sees it. Copies and kernels have a stream each, so that they overlap.
struct FarDevice<'a> {
    direction: Direction,
    shape: Shape,
    control: Control,
    /// The device's end of the copy.
    address: u64,
    key: &'a GcmKey,
    staging: u64,
    device_staging: u64,
    copies: &'a Stream,
    work: &'a Stream,
    /// What is reached when a piece has been moved, for those that were not yet when last asked.
    moved: VecDeque<Event>,
    passed: usize,
}

impl Far for FarDevice<'_> {
    fn slot(&mut self, slot: usize) -> *mut u8 {
        (self.staging + (slot * self.shape.slot_bytes()) as u64) as *mut u8
    }

    fn queue(&mut self, piece: usize) -> Result<()> {
        let shape = self.shape;
        let records = shape.piece(piece);
        let (bytes, tag_bytes) = (shape.piece_bytes(piece), 16 * records.len());
        let offset = (piece % shape.slots * shape.slot_bytes()) as u64;
        let (host, device) = (self.staging + offset, self.device_staging + offset);
        let tags_at = shape.text_bytes() as u64;
        let (descriptors, count) = (self.control.descriptor(records.start), records.len() as u32);
        // SAFETY: slots, control memory and keys live in the `SealedCopy`, which waits for both streams before it gives any
        // of them up; its caller vouches for the device's end. The pipeline queues a piece only when its slot is free.
        unsafe {
            match self.direction {
                Direction::ToDevice => {
                    self.copies.copy(self.address + bytes.start as u64, host, bytes.len())?;
                    self.copies.copy(self.control.tag(records.start), host + tags_at, tag_bytes)?;
                    let moved = self.copies.record()?;
                    self.work.wait(&moved)?;
                    self.key.open_records(descriptors, count, self.work)?;
                    self.moved.push_back(moved);
                }
                Direction::ToHost => {
                    self.key.seal_records(descriptors, count, self.work)?;
                    self.copies.wait(&self.work.record()?)?;
                    self.copies.copy(host, device, bytes.len())?;
                    self.copies.copy(host + tags_at, device + tags_at, tag_bytes)?;
                    self.moved.push_back(self.copies.record()?);
                }
            }
        }
        Ok(())
    }

    fn passed(&mut self) -> Result<usize> {
        while let Some(event) = self.moved.front()
            && event.is_reached()?
        {
            self.moved.pop_front();
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
