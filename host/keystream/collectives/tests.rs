//! Collectives against a model of a GPU that does what is queued late.

use std::collections::BTreeSet;

use super::*;

/// What is queued, in order.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Work {
    Make { slot: usize, sender: u32, name: Name, entry: Entry },
    Wipe { slot: usize },
}

/// A queue of which the first so many pieces are done.
#[derive(Default)]
struct Gpu {
    queued: Vec<Work>,
    done: usize,
    /// How much was queued when each making was marked.
    marks: Vec<(u64, usize)>,
    over: BTreeSet<u64>,
    entry: Option<Entry>,
}

impl Queue for Gpu {
    fn make(&mut self, slot: usize, sender: u32, _serial: u32, name: Name, _bytes: u64) -> Result<()> {
        let entry = self.entry.take().expect("every chunk has a place");
        self.queued.push(Work::Make { slot, sender, name, entry });
        Ok(())
    }

    fn wipe(&mut self, slot: usize) -> Result<()> {
        self.queued.push(Work::Wipe { slot });
        Ok(())
    }
}

impl Maker for Gpu {
    type End = u64;

    fn place(&mut self, _record_bytes: u32, entry: Entry) {
        self.entry = Some(entry);
    }

    fn mark(&mut self, making: u64) -> Result<()> {
        self.marks.push((making, self.queued.len()));
        Ok(())
    }

    fn is_made(&mut self, making: u64) -> Result<bool> {
        Ok(self.marks.iter().any(|&(number, queued)| number >= making && queued <= self.done))
    }

    fn is_over(&self, end: &u64) -> Result<bool> {
        Ok(self.over.contains(end))
    }

    fn recycle(&mut self, end: u64) {
        assert!(self.over.contains(&end), "collective {end} runs");
    }
}

impl Gpu {
    fn finish(&mut self) {
        self.done = self.queued.len();
    }

    /// Slots whose latest work made them.
    fn holding(&self) -> BTreeSet<usize> {
        let mut slots = BTreeSet::new();
        for work in &self.queued {
            match *work {
                Work::Make { slot, .. } => assert!(slots.insert(slot), "made where keystream lies: {slot}"),
                Work::Wipe { slot } => drop(slots.remove(&slot)),
            }
        }
        slots
    }
}

/// Ranks 0 and 1 on a ring: seal, reduce and seal, open.
fn steps(bytes: usize) -> Vec<StepSides> {
    let side = |sender, step| Some(Side { sender, step, bytes });
    vec![[None, side(0, 0)], [side(1, 0), side(0, 1)], [side(1, 1), None]]
}

const CHUNK: usize = 1000;
const RECORD: u32 = 256;
/// Records of all four chunks.
const RECORDS: u32 = 16;

fn plan(bytes: usize) -> Planned {
    Planned { bytes, record_bytes: RECORD, steps: steps(bytes / 2) }
}

fn group(collectives: usize, partial: bool) -> (Collectives<u64>, Gpu) {
    let bounds = Bounds { collectives, sides: 4, steps: 3, chunk_bytes: CHUNK, partial };
    let (mut group, mut gpu) = (Collectives::new(bounds), Gpu::default());
    group.begin([0, 1].into_iter(), &mut gpu).unwrap();
    (group, gpu)
}

fn make(group: &mut Collectives<u64>, gpu: &mut Gpu, bytes: &[usize]) -> usize {
    group.make(bytes.iter().map(|&bytes| plan(bytes)), gpu).unwrap()
}

/// One collective, as a launch does it; whether it had keystream.
fn run(group: &mut Collectives<u64>, gpu: &mut Gpu, number: u64, bytes: usize) -> bool {
    let queued = gpu.queued.len();
    let taken = group.take(bytes, RECORD, &steps(bytes / 2), gpu).unwrap();
    group.count(false, gpu).unwrap();
    let had = taken.is_some();
    if let Some(taken) = taken {
        group.retire(taken, number);
    }
    assert_eq!(gpu.queued.len(), queued, "a launch queued work for keystream");
    had
}

#[test]
fn back_to_back_collectives_all_have_their_keystream() {
    let (mut group, mut gpu) = group(20, false);
    for round in 0..3 {
        assert_eq!(make(&mut group, &mut gpu, &[2 * CHUNK; 20]), 20);
        gpu.finish();
        for number in 0..20 {
            assert!(run(&mut group, &mut gpu, 20 * round + number, 2 * CHUNK), "{round}, {number}");
        }
        gpu.over.extend(20 * round..20 * (round + 1));
    }
    assert_eq!(group.without(), 0);
    group.reclaim(&mut gpu).unwrap();
    assert_eq!(gpu.holding(), BTreeSet::new(), "keystream is left");
}

#[test]
fn kernels_find_their_chunks_by_the_tables() {
    let (mut group, mut gpu) = group(2, false);
    assert_eq!(make(&mut group, &mut gpu, &[2 * CHUNK, CHUNK]), 2);
    gpu.finish();
    for (sequence, bytes) in [(0, 2 * CHUNK), (1, CHUNK)] {
        let taken = group.take(bytes, RECORD, &steps(bytes / 2), &mut gpu).unwrap().expect("it is ready");
        let chunks = [(0, 0, 0, true), (1, 0, 1, false), (0, 1, 1, true), (1, 1, 2, false)];
        for (&(sender, sealed_in, step, seals), (_, place)) in chunks.iter().zip(&taken.sides) {
            let made = Work::Make {
                slot: place.slot,
                sender,
                name: Name { sequence, step: sealed_in },
                entry: Entry { table: taken.table, step, seals },
            };
            assert!(gpu.queued.contains(&made), "{made:?}");
        }
        group.retire(taken, sequence);
        group.count(false, &mut gpu).unwrap();
    }
}

/// Ranks wait for each other in a collective. It doesn't wait for its keystream.
#[test]
fn what_is_not_ready_is_not_taken_and_counted() {
    let (mut group, mut gpu) = group(2, false);
    assert_eq!(make(&mut group, &mut gpu, &[2 * CHUNK, 2 * CHUNK]), 2);
    assert!(!run(&mut group, &mut gpu, 0, 2 * CHUNK));
    assert_eq!(group.without(), RECORDS);
    gpu.finish();
    assert!(run(&mut group, &mut gpu, 1, 2 * CHUNK));
    // None was asked for.
    assert!(!run(&mut group, &mut gpu, 2, 2 * CHUNK));
    assert_eq!(group.without(), RECORDS);
    // A record of an exchange takes what is ready.
    let (mut group, mut gpu) = self::group(2, true);
    make(&mut group, &mut gpu, &[2 * CHUNK]);
    assert!(run(&mut group, &mut gpu, 0, 2 * CHUNK));
}

#[test]
fn what_runs_keeps_its_keystream_until_it_is_over() {
    let (mut group, mut gpu) = group(2, false);
    assert_eq!(make(&mut group, &mut gpu, &[2 * CHUNK; 3]), 2, "more than there is room for");
    gpu.finish();
    assert!(run(&mut group, &mut gpu, 0, 2 * CHUNK));
    assert!(run(&mut group, &mut gpu, 1, 2 * CHUNK));
    let used = gpu.holding();
    assert_eq!(make(&mut group, &mut gpu, &[2 * CHUNK]), 0, "both run");
    assert_eq!(gpu.holding(), used);
    // They may end in any order.
    gpu.over.insert(1);
    assert_eq!(make(&mut group, &mut gpu, &[2 * CHUNK; 2]), 1);
    gpu.over.insert(0);
    assert_eq!(make(&mut group, &mut gpu, &[2 * CHUNK; 2]), 2, "one was asked for before");
    gpu.finish();
    assert!(run(&mut group, &mut gpu, 2, 2 * CHUNK) && run(&mut group, &mut gpu, 3, 2 * CHUNK));
}

#[test]
fn wrong_guesses_are_wiped_and_make_room() {
    let (mut group, mut gpu) = group(3, false);
    // Another length; a collective that takes none; and one that isn't due yet.
    assert_eq!(make(&mut group, &mut gpu, &[CHUNK, CHUNK, CHUNK]), 3);
    gpu.finish();
    assert!(!run(&mut group, &mut gpu, 0, 2 * CHUNK));
    assert_eq!(group.without(), RECORDS);
    group.count(false, &mut gpu).unwrap();
    assert_eq!(make(&mut group, &mut gpu, &[CHUNK, CHUNK]), 2);
    gpu.finish();
    assert!(run(&mut group, &mut gpu, 2, CHUNK));
    assert!(run(&mut group, &mut gpu, 3, CHUNK));
    gpu.over.extend([2, 3]);
    group.reclaim(&mut gpu).unwrap();
    assert_eq!(gpu.holding(), BTreeSet::new(), "keystream is left");
    assert_eq!(make(&mut group, &mut gpu, &[CHUNK; 4]), 3);
}

#[test]
fn rings_have_keystream_of_whole_collectives() {
    let (mut group, mut gpu) = group(2, false);
    assert_eq!(make(&mut group, &mut gpu, &[2 * CHUNK + 2]), 0, "its chunks are longer than slots");
    assert!(!run(&mut group, &mut gpu, 0, 2 * CHUNK + 2));
    let (mut group, mut gpu) = self::group(2, true);
    assert_eq!(make(&mut group, &mut gpu, &[2 * CHUNK + 2]), 1);
    assert!(run(&mut group, &mut gpu, 0, 2 * CHUNK + 2));
}

#[test]
fn neither_keys_nor_sessions_share_keystream() {
    let (mut group, mut gpu) = group(2, false);
    make(&mut group, &mut gpu, &[2 * CHUNK; 2]);
    gpu.finish();
    assert!(run(&mut group, &mut gpu, 0, 2 * CHUNK));
    group.enter_epoch([0, 1].into_iter(), &mut gpu).unwrap();
    assert!(!run(&mut group, &mut gpu, 1, 2 * CHUNK), "of the key before");
    assert_eq!(make(&mut group, &mut gpu, &[2 * CHUNK; 2]), 1, "the first one runs");
    gpu.over.insert(0);
    group.begin([0, 1].into_iter(), &mut gpu).unwrap();
    assert_eq!(gpu.holding(), BTreeSet::new(), "keystream outlived its session");
    assert!(!run(&mut group, &mut gpu, 2, 2 * CHUNK));
    assert_eq!(make(&mut group, &mut gpu, &[2 * CHUNK; 2]), 2);
    gpu.finish();
    assert!(run(&mut group, &mut gpu, 3, 2 * CHUNK));
}

#[test]
fn a_failure_wipes_what_nothing_uses() {
    let (mut group, mut gpu) = group(3, false);
    make(&mut group, &mut gpu, &[2 * CHUNK; 3]);
    gpu.finish();
    assert!(run(&mut group, &mut gpu, 0, 2 * CHUNK) && run(&mut group, &mut gpu, 1, 2 * CHUNK));
    gpu.over.insert(0);
    group.end(&mut gpu).unwrap();
    assert_eq!(gpu.holding().len(), 4, "those of the collective that runs, and no others");
    assert_eq!(make(&mut group, &mut gpu, &[2 * CHUNK]), 0, "there is no session");
    assert!(!run(&mut group, &mut gpu, 2, 2 * CHUNK));
    gpu.over.insert(1);
    group.begin([0, 1].into_iter(), &mut gpu).unwrap();
    assert_eq!(gpu.holding(), BTreeSet::new(), "keystream is left");
    assert_eq!(make(&mut group, &mut gpu, &[2 * CHUNK; 3]), 3);
}

/// A graph's replays are counted by the device only.
#[test]
fn a_captured_collective_ends_it() {
    let (mut group, mut gpu) = group(2, false);
    make(&mut group, &mut gpu, &[2 * CHUNK; 2]);
    gpu.finish();
    group.count(true, &mut gpu).unwrap();
    assert!(!run(&mut group, &mut gpu, 1, 2 * CHUNK));
    assert_eq!(make(&mut group, &mut gpu, &[2 * CHUNK]), 0);
    assert_eq!(group.without(), 0);
    assert_eq!(gpu.holding(), BTreeSet::new(), "keystream is left");
}
