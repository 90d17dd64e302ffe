//! Host threads on one side of staging memory, copy engine and GPU on the other, piece after piece.
//!
//! Piece p uses slot p modulo the number of slots. A slot holds the text of a full piece and then a tag for each of its
//! records. Threads take records in ascending order, so that the pieces fill, or empty, one after another.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, Thread};
use std::time::Duration;

use zeroize::Zeroize;

use super::{Call, HostCipher};
use crate::aead::{TAG_BYTES, Tag};
use crate::{Error, Result};

/// How a copy is cut up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Bytes of the copy, at least 1.
    pub(crate) bytes: usize,
    pub(crate) record_bytes: usize,
    pub(crate) piece_records: usize,
    pub(crate) slots: usize,
}

impl Shape {
    pub(crate) const fn records(&self) -> usize {
        self.bytes.div_ceil(self.record_bytes)
    }

    pub(crate) const fn pieces(&self) -> usize {
        self.records().div_ceil(self.piece_records)
    }

    /// The bytes of a record.
    pub(crate) fn record(&self, record: usize) -> Range<usize> {
        let begin = record * self.record_bytes;
        begin..self.bytes.min(begin + self.record_bytes)
    }

    /// The records of a piece.
    pub(crate) fn piece(&self, piece: usize) -> Range<usize> {
        let begin = piece * self.piece_records;
        begin..self.records().min(begin + self.piece_records)
    }

    /// The bytes of a piece.
    pub(crate) fn piece_bytes(&self, piece: usize) -> Range<usize> {
        let begin = piece * self.text_bytes();
        begin..self.bytes.min(begin + self.text_bytes())
    }

    /// Bytes of a slot before the tags.
    pub(crate) const fn text_bytes(&self) -> usize {
        self.piece_records * self.record_bytes
    }

    /// Bytes of a slot.
    pub(crate) const fn slot_bytes(&self) -> usize {
        self.text_bytes() + TAG_BYTES * self.piece_records
    }

    /// How many pieces are sealed before the first of them is moved: see [`LEFT_ALONE`].
    fn lead(&self) -> usize {
        LEFT_ALONE.div_ceil(self.text_bytes()).min(self.slots / 2)
    }

    /// Where a record's text and tag lie in its slot.
    pub(crate) const fn places(&self, record: usize) -> (usize, usize) {
        let index = record % self.piece_records;
        (index * self.record_bytes, self.text_bytes() + TAG_BYTES * index)
    }
}

/// Bytes that are sealed between a piece and its being moved, so that it has left the caches of the processors that sealed it. From
/// there a GPU takes it at half the bus's rate; threads that are slower than the bus would have every piece fetched so.
const LEFT_ALONE: usize = 8 << 20;

/// The other side of staging memory.
pub(crate) trait Far {
    /// Address of a slot of the shape's `slot_bytes` bytes, which stay valid while the copy lasts.
    fn slot(&mut self, slot: usize) -> *mut u8;

    /// Queues the next piece: what lies sealed in its slot is to be taken, or its slot is to be filled.
    fn queue(&mut self, piece: usize) -> Result<()>;

    /// How many pieces, from the first, are done with their slots: taken from them, or complete in them.
    fn passed(&mut self) -> Result<usize>;
}

/// Sees, and may change, the slot of each piece as it is on its way: what an attacker on the bus can do.
pub(crate) type Tap = Box<dyn FnMut(&mut [u8]) + Send>;

/// What threads and feeder tell each other.
struct Progress {
    next_record: AtomicUsize,
    /// Pieces that the far side is done with.
    passed: AtomicUsize,
    /// Records of each piece that the threads are done with.
    done: Vec<AtomicUsize>,
    stop: AtomicBool,
    feeder: Thread,
}

/// Stops all when one leaves by an error or a panic; forgotten by who leaves well.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Seals `source` into the slots; the far side takes them.
///
/// # Errors
/// The far side's, and [`HostCipher::seal`]'s.
pub(crate) fn send<F: Far>(
    far: &mut F,
    cipher: &HostCipher,
    call: &Call,
    shape: Shape,
    source: &[u8],
    threads: usize,
    tap: Option<&mut Tap>,
) -> Result<()> {
    let slots = slots(far, shape);
    let progress = Progress::new(shape);
    let seal = |record: usize, scratch: &mut Vec<u8>| -> Result<()> {
        let text = &source[shape.record(record)];
        let (nonce, associated) = (call.nonce(record), call.associated(record));
        let slot = slots[record / shape.piece_records % shape.slots] as *mut u8;
        let (text_at, tag_at) = shape.places(record);
        // SAFETY: inside the slot, which the far side has passed or never used; each record has its own part.
        unsafe {
            let tag = cipher.seal_into(slot.add(text_at), &nonce, associated.as_bytes(), text, scratch)?;
            slot.add(tag_at).copy_from_nonoverlapping(tag.as_ptr(), tag.len());
        }
        Ok(())
    };
    let mut tap = tap;
    progress.run(
        shape,
        threads,
        // A slot is free once the far side has passed the piece that used it before.
        &|piece, passed| piece < passed + shape.slots,
        &seal,
        |progress| {
            for piece in 0..shape.pieces() {
                let leader = (piece + shape.lead()).min(shape.pieces() - 1);
                while !(progress.is_done(shape, piece) && progress.is_done(shape, leader)) {
                    let passed = far.passed()?;
                    progress.publish(passed);
                    if progress.stopped() {
                        return Ok(());
                    }
                    progress.rest(shape, passed + shape.slots);
                }
                if let Some(tap) = &mut tap {
                    // SAFETY: the threads are done with the slot, and the far side has not begun.
                    tap(unsafe { slot_bytes(&slots, shape, piece) });
                }
                far.queue(piece)?;
                progress.publish(far.passed()?);
            }
            Ok(())
        },
    )
}

/// Opens what the far side puts into the slots, into `destination`. Zeroes all of it on an error.
///
/// # Errors
/// [`Error::Authentication`]; the far side's.
pub(crate) fn receive<F: Far>(
    far: &mut F,
    cipher: &HostCipher,
    call: &Call,
    shape: Shape,
    destination: &mut [u8],
    threads: usize,
    tap: Option<&mut Tap>,
) -> Result<()> {
    let slots = slots(far, shape);
    let progress = Progress::new(shape);
    let address = destination.as_mut_ptr() as usize;
    let open = |record: usize, _: &mut Vec<u8>| -> Result<()> {
        let bytes = shape.record(record);
        let slot = slots[record / shape.piece_records % shape.slots] as *const u8;
        let (text_at, tag_at) = shape.places(record);
        let mut tag: Tag = [0; 16];
        // SAFETY: `destination` is borrowed for as long as the threads run, and each record is taken once.
        let text =
            unsafe { std::slice::from_raw_parts_mut((address as *mut u8).add(bytes.start), bytes.len()) };
        let (nonce, associated) = (call.nonce(record), call.associated(record));
        // SAFETY: inside the slot, which the far side has filled and leaves alone until its piece is done.
        unsafe {
            slot.add(tag_at).copy_to_nonoverlapping(tag.as_mut_ptr(), tag.len());
            cipher.open_from(slot.add(text_at), &nonce, associated.as_bytes(), &tag, text)
        }
    };
    let mut tap = tap;
    let (mut queued, mut seen) = (0, 0);
    let result = progress.run(shape, threads, &|piece, passed| piece < passed, &open, |progress| {
        while seen < shape.pieces() && !progress.stopped() {
            while queued < shape.pieces()
                && (queued < shape.slots || progress.is_done(shape, queued - shape.slots))
            {
                far.queue(queued)?;
                queued += 1;
            }
            let passed = far.passed()?;
            if passed == seen {
                progress.rest(shape, seen);
            }
            while seen < passed {
                if let Some(tap) = &mut tap {
                    // SAFETY: the far side is done with the slot, and no thread has been told so.
                    tap(unsafe { slot_bytes(&slots, shape, seen) });
                }
                seen += 1;
                progress.publish(seen);
            }
        }
        Ok(())
    });
    if result.is_err() {
        destination.zeroize();
    }
    result
}

fn slots<F: Far>(far: &mut F, shape: Shape) -> Vec<usize> {
    (0..shape.slots).map(|slot| far.slot(slot) as usize).collect()
}

/// # Safety
/// Nobody else uses the piece's slot meanwhile.
unsafe fn slot_bytes<'a>(slots: &[usize], shape: Shape, piece: usize) -> &'a mut [u8] {
    // SAFETY: a slot has that many bytes; the caller rules out others.
    unsafe { std::slice::from_raw_parts_mut(slots[piece % shape.slots] as *mut u8, shape.slot_bytes()) }
}

/// The feeder looks again after this even if no piece is done: a thread may have failed.
const REST: Duration = Duration::from_micros(200);

/// Between looks at what others do: short, for a piece takes tens of microseconds, but not forever.
fn pause() {
    for _ in 0..64 {
        std::hint::spin_loop();
    }
    thread::yield_now();
}

impl Progress {
    fn new(shape: Shape) -> Self {
        Self {
            next_record: AtomicUsize::new(0),
            passed: AtomicUsize::new(0),
            done: (0..shape.pieces()).map(|_| AtomicUsize::new(0)).collect(),
            stop: AtomicBool::new(false),
            feeder: thread::current(),
        }
    }

    // Release and acquire: what one side has written to a slot is seen by the other before it is told of it.
    fn publish(&self, passed: usize) {
        self.passed.store(passed, Ordering::Release);
    }

    fn is_done(&self, shape: Shape, piece: usize) -> bool {
        self.done[piece].load(Ordering::Acquire) == shape.piece(piece).len()
    }

    /// The feeder's wait, where threads may take records of the first `free` pieces. As long as there is a piece that none has
    /// begun, it leaves them the processor until one is done; then they may soon wait for it.
    fn rest(&self, shape: Shape, free: usize) {
        let begun = self.next_record.load(Ordering::Relaxed).div_ceil(shape.piece_records);
        if begun < free.min(shape.pieces()) {
            thread::park_timeout(REST);
        } else {
            pause();
        }
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Runs `work` for every record on `threads` threads, each record as soon as `may_begin` says of its piece and the
    /// pieces passed; and `feed` on this thread. The first error ends all.
    fn run(
        &self,
        shape: Shape,
        threads: usize,
        may_begin: &(dyn Fn(usize, usize) -> bool + Sync),
        work: &(dyn Fn(usize, &mut Vec<u8>) -> Result<()> + Sync),
        feed: impl FnOnce(&Self) -> Result<()>,
    ) -> Result<()> {
        let worker = || -> Result<()> {
            let mut scratch = Vec::new();
            let stop = Stop(&self.stop);
            loop {
                let record = self.next_record.fetch_add(1, Ordering::Relaxed);
                if record >= shape.records() {
                    std::mem::forget(stop);
                    return Ok(());
                }
                let piece = record / shape.piece_records;
                while !may_begin(piece, self.passed.load(Ordering::Acquire)) {
                    if self.stopped() {
                        return Ok(());
                    }
                    pause();
                }
                work(record, &mut scratch)?;
                if self.done[piece].fetch_add(1, Ordering::Release) + 1 == shape.piece(piece).len() {
                    self.feeder.unpark();
                }
            }
        };
        thread::scope(|scope| {
            let mut workers = Vec::new();
            let fed = {
                let stop = Stop(&self.stop);
                let mut started = Ok(());
                while started.is_ok() && workers.len() < threads.min(shape.records()) {
                    match thread::Builder::new().spawn_scoped(scope, worker) {
                        Ok(worker) => workers.push(worker),
                        Err(source) => {
                            let path = "starting the threads of a sealed copy (fewer may do)".into();
                            started = Err(Error::Io { path, source });
                        }
                    }
                }
                let fed = started.and_then(|()| feed(self));
                if fed.is_ok() {
                    // The threads finish what the far side has delivered.
                    std::mem::forget(stop);
                }
                fed
            };
            let results: Vec<Result<()>> = workers
                .into_iter()
                .map(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect();
            // A record that does not verify says more than what the far side said because of it.
            let forged = results.iter().any(|result| matches!(result, Err(Error::Authentication)));
            let worked: Result<()> =
                if forged { Err(Error::Authentication) } else { results.into_iter().collect() };
            worked.and(fed)
        })
    }
}
