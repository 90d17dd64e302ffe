//! The store against a model of a GPU whose queue runs late, in any order with the steps that use the keystream.

use std::collections::{BTreeSet, VecDeque};

use super::*;

const RECORDS: usize = 3;

/// A pad and whether it can be claimed, as the kernels see it.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Pad {
    serial: u32,
    name: Name,
    record: usize,
}

enum Work {
    Make {
        slot: usize,
        serial: u32,
        name: Name,
    },
    Wipe {
        slot: usize,
    },
    /// Waits for a step.
    Wait {
        step: usize,
    },
}

/// A step that runs, and the slot whose keystream it may claim.
struct Step {
    number: usize,
    slot: usize,
    serial: u32,
    name: Name,
    /// Whether it uses any of it.
    claimed: bool,
}

/// The device: memory, the queue of the store, and the steps that run.
#[derive(Default)]
struct Gpu {
    memory: Vec<[Option<Pad>; RECORDS]>,
    queue: VecDeque<Work>,
    running: Vec<Step>,
    steps: usize,
    claimed: BTreeSet<(u32, Name, usize)>,
    /// The next operation on the queue fails.
    fails: bool,
}

impl Queue for Gpu {
    fn make(&mut self, slot: usize, _sender: u32, serial: u32, name: Name, _bytes: u64) -> Result<()> {
        self.push(Work::Make { slot, serial, name })
    }

    fn wipe(&mut self, slot: usize) -> Result<()> {
        self.push(Work::Wipe { slot })
    }
}

impl Gpu {
    fn new(slots: usize) -> Self {
        Gpu { memory: vec![[None; RECORDS]; slots], ..Gpu::default() }
    }

    fn push(&mut self, work: Work) -> Result<()> {
        if std::mem::take(&mut self.fails) {
            return Err(Error::Cuda("as the test wants".into()));
        }
        self.queue.push_back(work);
        Ok(())
    }

    /// Does one piece of the queue's work, if it waits for nothing.
    fn advance(&mut self) {
        match self.queue.front() {
            Some(&Work::Wait { step }) if self.running.iter().any(|running| running.number == step) => return,
            None => return,
            Some(_) => {}
        }
        // A step may have its slot while the queue still has to wipe what was there before; it has claimed nothing then.
        let used = |slot| self.running.iter().any(|step| step.slot == slot && step.claimed);
        match self.queue.pop_front() {
            Some(Work::Make { slot, serial, name }) => {
                assert!(!used(slot), "made under a step's hands");
                assert_eq!(self.memory[slot], [None; RECORDS], "made where keystream lies");
                self.memory[slot] = std::array::from_fn(|record| Some(Pad { serial, name, record }));
            }
            Some(Work::Wipe { slot }) => {
                assert!(!used(slot), "wiped under a step's hands");
                self.memory[slot] = [None; RECORDS];
            }
            _ => {}
        }
    }

    /// One record of a running step claims its pad, as `claim_pad` does; whether it was there.
    fn claim(&mut self, step: usize, record: usize) -> bool {
        let step = self.running.iter_mut().find(|running| running.number == step).expect("it runs");
        let wanted = Pad { serial: step.serial, name: step.name, record };
        let pad = &mut self.memory[step.slot][record];
        if *pad != Some(wanted) {
            return false;
        }
        *pad = None;
        step.claimed = true;
        assert!(self.claimed.insert((wanted.serial, wanted.name, record)), "{wanted:?} was used twice");
        true
    }
}

/// Random numbers that depend on the seed only.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) % end
    }
}

/// Prepares, takes, rekeys, aborts in any order, while the queue runs late and steps take long.
#[test]
fn keystream_is_used_once_and_never_late() {
    let (mut hits, mut misses) = (0, 0);
    for seed in 1..1000 {
        let mut random = Random(seed);
        let slots = 1 + random.below(4) as usize;
        let (mut store, mut gpu) = (Store::new(slots), Gpu::new(slots));
        // The serial number of each sender's present key, by this test's own count.
        let mut keys: [Option<u32>; 2] = [None; 2];
        let mut sequence = 0;
        let mut taken: Vec<(usize, Taken)> = Vec::new();
        for _ in 0..200 {
            let sender = random.below(2) as u32;
            match random.below(12) {
                0 => {
                    let serial = store.install(sender, &mut gpu).unwrap();
                    assert!(keys.iter().all(|&key| key < Some(serial)), "a serial number comes again");
                    keys[sender as usize] = Some(serial);
                }
                1 if random.below(4) == 0 => {
                    store.abort(&mut gpu).unwrap();
                    keys = [None; 2];
                }
                2..5 => {
                    let name = Name { sequence: sequence + random.below(4), step: random.below(2) as u32 };
                    let made = store.prepare(sender, name, 1, &mut gpu);
                    assert_eq!(made.is_ok(), keys[sender as usize].is_some());
                }
                5..8 => {
                    // A step: what was predicted, or not.
                    sequence += random.below(3);
                    let name = Name { sequence, step: random.below(2) as u32 };
                    let Ok((serial, slot)) = store.take(sender, name, &mut gpu) else { continue };
                    assert_eq!(Some(serial), keys[sender as usize], "not the present key");
                    let Some(slot) = slot else { continue };
                    gpu.steps += 1;
                    gpu.running.push(Step {
                        number: gpu.steps,
                        slot: slot.slot,
                        serial,
                        name,
                        claimed: false,
                    });
                    for record in 0..RECORDS {
                        // Making may be as late as the last record.
                        for _ in 0..random.below(3) {
                            gpu.advance();
                        }
                        if gpu.claim(gpu.steps, record) { hits += 1 } else { misses += 1 }
                    }
                    taken.push((gpu.steps, slot));
                }
                8 if !taken.is_empty() => {
                    let at = random.below(taken.len() as u64) as usize;
                    let (step, slot) = taken.swap_remove(at);
                    gpu.queue.push_back(Work::Wait { step });
                    store.retire(slot, &mut gpu).unwrap();
                }
                9 if !gpu.running.is_empty() => {
                    let at = random.below(gpu.running.len() as u64) as usize;
                    // It ends late: after the host has asked for the wiping.
                    let step = gpu.running[at].number;
                    if !taken.iter().any(|&(of, _)| of == step) {
                        gpu.running.swap_remove(at);
                    }
                }
                _ => gpu.advance(),
            }
        }
        // Whatever is left, nothing stays in memory.
        for (step, slot) in taken {
            gpu.queue.push_back(Work::Wait { step });
            store.retire(slot, &mut gpu).unwrap();
        }
        gpu.running.clear();
        store.abort(&mut gpu).unwrap();
        while !gpu.queue.is_empty() {
            gpu.advance();
        }
        assert!(gpu.memory.iter().all(|slot| *slot == [None; RECORDS]), "keystream is left");
        assert_eq!(store.free.len(), slots, "a slot is lost");
    }
    assert!(hits > 1000 && misses > 1000, "{hits} hits, {misses} misses: one of both was hardly tried");
}

const CHUNK: Name = Name { sequence: 5, step: 1 };

fn with_key() -> (Store, Gpu) {
    let (mut store, mut gpu) = (Store::new(2), Gpu::new(2));
    store.install(7, &mut gpu).unwrap();
    (store, gpu)
}

#[test]
fn a_new_key_ends_the_old_ones_keystream() {
    let (mut store, mut gpu) = with_key();
    assert!(store.prepare(7, CHUNK, 1, &mut gpu).unwrap());
    let serial = store.install(7, &mut gpu).unwrap();
    let (of, slot) = store.take(7, CHUNK, &mut gpu).unwrap();
    assert_eq!(of, serial);
    assert!(slot.is_none(), "stale keystream");
}

#[test]
fn nothing_is_taken_after_an_abort() {
    let (mut store, mut gpu) = with_key();
    assert!(store.prepare(7, CHUNK, 1, &mut gpu).unwrap());
    store.abort(&mut gpu).unwrap();
    assert!(matches!(store.take(7, CHUNK, &mut gpu), Err(Error::InvalidArgument(_))));
    assert!(matches!(store.prepare(7, CHUNK, 1, &mut gpu), Err(Error::InvalidArgument(_))));
    store.install(7, &mut gpu).unwrap();
    assert!(store.take(7, CHUNK, &mut gpu).unwrap().1.is_none(), "keystream from before the abort");
}

#[test]
fn a_chunk_has_its_nonces_once() {
    let (mut store, mut gpu) = with_key();
    store.prepare(7, CHUNK, 1, &mut gpu).unwrap();
    let (_, slot) = store.take(7, CHUNK, &mut gpu).unwrap();
    // Neither while the step runs, nor afterwards, nor earlier chunks; with or without keystream.
    store.take(7, CHUNK, &mut gpu).unwrap_err();
    assert!(!store.prepare(7, CHUNK, 1, &mut gpu).unwrap());
    store.retire(slot.expect("made above"), &mut gpu).unwrap();
    store.take(7, CHUNK, &mut gpu).unwrap_err();
    store.take(7, Name { step: 0, ..CHUNK }, &mut gpu).unwrap_err();
    assert!(!store.prepare(7, CHUNK, 1, &mut gpu).unwrap());
    store.take(7, Name { step: 2, ..CHUNK }, &mut gpu).unwrap().1.ok_or(()).unwrap_err();
}

#[test]
fn memory_is_bounded_and_what_is_past_makes_room() {
    let (mut store, mut gpu) = with_key();
    let name = |sequence| Name { sequence, step: 0 };
    assert!(store.prepare(7, name(1), 1, &mut gpu).unwrap());
    assert!(store.prepare(7, name(2), 1, &mut gpu).unwrap());
    assert!(store.prepare(7, name(2), 1, &mut gpu).unwrap(), "is there already");
    assert!(!store.prepare(7, name(3), 1, &mut gpu).unwrap());
    // Neither of the collectives came.
    assert!(store.take(7, name(3), &mut gpu).unwrap().1.is_none());
    assert!(store.prepare(7, name(4), 1, &mut gpu).unwrap());
    assert!(store.prepare(7, name(5), 1, &mut gpu).unwrap());
}

/// Wiped and made again, it could go from under a step that claims the first making's pads.
#[test]
fn what_was_made_stays_whatever_length_is_asked_for_next() {
    let (mut store, mut gpu) = with_key();
    assert!(store.prepare(7, CHUNK, 1, &mut gpu).unwrap());
    assert!(store.prepare(7, CHUNK, 2, &mut gpu).unwrap());
    assert!(matches!(gpu.queue.make_contiguous(), [Work::Make { name: CHUNK, .. }]));
    assert!(store.take(7, CHUNK, &mut gpu).unwrap().1.is_some());
}

/// A slot of which it is not known what it holds is never made or taken again.
#[test]
fn a_failed_queue_takes_its_slot_out_of_use() {
    let (mut store, mut gpu) = with_key();
    gpu.fails = true;
    store.prepare(7, CHUNK, 1, &mut gpu).unwrap_err();
    assert!(store.prepare(7, CHUNK, 1, &mut gpu).unwrap());
    gpu.fails = true;
    store.abort(&mut gpu).unwrap_err();
    store.install(7, &mut gpu).unwrap();
    assert!(!store.prepare(7, CHUNK, 1, &mut gpu).unwrap(), "both slots are out of use");
    assert!(store.take(7, CHUNK, &mut gpu).unwrap().1.is_none());
}
