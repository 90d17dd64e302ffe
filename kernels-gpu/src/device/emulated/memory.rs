//! Shared memory of one block, each word with the last accesses to it.

use std::panic::Location;

use crate::params::SHARED_BASE;

/// A place in a kernel's source.
pub(super) type Place = &'static Location<'static>;

/// Where a block's clock stood at the last barriers that a thread took part in, innermost scope first. An access that is
/// older than the barrier of a scope that holds both threads, happened before.
#[derive(Clone, Copy, Default)]
pub(super) struct Barriers {
    pub(super) warp: u32,
    pub(super) warpgroup: u32,
    pub(super) block: u32,
}

#[derive(Clone, Copy)]
enum Access {
    Load,
    Store,
    Add,
}

/// Which threads loaded a word since the last store that orders them, or added to it: one, or some of the smallest scope that
/// holds them.
#[derive(Clone, Copy, PartialEq)]
enum Threads {
    Thread(u16),
    Warp(u16),
    Warpgroup(u16),
    Block,
}

/// What was done lastly to a word: when, by whom and where.
#[derive(Clone, Copy)]
struct Last {
    time: u32,
    threads: Threads,
    place: Place,
}

#[derive(Clone, Copy)]
struct Word {
    load: Last,
    store: Last,
    /// Additions since, which no order is needed among: the store is older, and has an order with each.
    additions: Option<Last>,
    /// How many fences for the asynchronous proxy the block had executed at the store.
    fences: u32,
}

/// The window, and a shadow of each of its words. Kept from launch to launch: the clock goes on, and what is older than
/// `start` never happened.
pub(super) struct SharedMemory {
    values: Vec<u32>,
    shadow: Vec<Word>,
    /// The block's clock: the number of barriers so far.
    clock: u32,
    start: u32,
    words: usize,
    /// Fences for the asynchronous proxy so far, and what the number was after each thread's last.
    fences: u32,
    last_fences: [u32; 1024],
}

impl SharedMemory {
    pub(super) fn new() -> Self {
        SharedMemory {
            values: Vec::new(),
            shadow: Vec::new(),
            clock: 1,
            start: 1,
            words: 0,
            fences: 0,
            last_fences: [0; 1024],
        }
    }

    /// Forgets everything, and opens a window of so many bytes.
    #[track_caller]
    pub(super) fn reset(&mut self, bytes: u32) {
        assert!(bytes.is_multiple_of(16), "{bytes} bytes of shared memory: not a multiple of 16");
        self.words = bytes as usize / 4;
        if self.clock > u32::MAX / 2 {
            *self = SharedMemory { words: self.words, ..SharedMemory::new() };
        }
        self.clock += 1;
        self.start = self.clock;
        self.fences = 0;
        self.last_fences.fill(0);
        if self.words > self.values.len() {
            let place = Location::caller();
            let never = Last { time: 0, threads: Threads::Block, place };
            let never = Word { load: never, store: never, additions: None, fences: 0 };
            self.values.resize(self.words, 0);
            self.shadow.resize(self.words, never);
        }
    }

    /// The clock after a barrier.
    pub(super) fn tick(&mut self) -> u32 {
        self.clock += 1;
        self.clock
    }

    pub(super) fn load<const N: usize>(
        &mut self,
        address: u32,
        thread: u16,
        barriers: Barriers,
        place: Place,
    ) -> [u32; N] {
        let first = self.locate::<N>(address, place);
        for (i, word) in self.shadow[first..first + N].iter_mut().enumerate() {
            if word.store.time < self.start {
                poison(address + 4 * i as u32, thread, place);
            }
            let (written, how) = word.written();
            if !written.before(thread, barriers) {
                race(address + 4 * i as u32, written, how, thread, Access::Load, place);
            }
            let threads = match word.load.time < self.start {
                true => Threads::Thread(thread),
                false => word.load.joined_by(thread, barriers),
            };
            word.load = Last { time: self.clock, threads, place };
        }
        self.values[first..first + N].try_into().expect("N words")
    }

    pub(super) fn store<const N: usize>(
        &mut self,
        address: u32,
        value: [u32; N],
        thread: u16,
        barriers: Barriers,
        place: Place,
    ) {
        let first = self.locate::<N>(address, place);
        for (i, word) in self.shadow[first..first + N].iter_mut().enumerate() {
            let (written, how) = word.written();
            if written.time >= self.start && !written.before(thread, barriers) {
                race(address + 4 * i as u32, written, how, thread, Access::Store, place);
            }
            if word.load.time >= self.start && !word.load.before(thread, barriers) {
                race(address + 4 * i as u32, word.load, Access::Load, thread, Access::Store, place);
            }
            let store = Last { time: self.clock, threads: Threads::Thread(thread), place };
            *word = Word { load: word.load, store, additions: None, fences: self.fences };
        }
        self.values[first..first + N].copy_from_slice(&value);
    }

    /// Adds to a word, in whatever order with others that do.
    pub(super) fn xor(&mut self, address: u32, value: u32, thread: u16, barriers: Barriers, place: Place) {
        let at = self.locate::<1>(address, place);
        let word = &mut self.shadow[at];
        if word.store.time < self.start {
            poison(address, thread, place);
        }
        if !word.store.before(thread, barriers) {
            race(address, word.store, Access::Store, thread, Access::Add, place);
        }
        if word.load.time >= self.start && !word.load.before(thread, barriers) {
            race(address, word.load, Access::Load, thread, Access::Add, place);
        }
        let (written, _) = word.written();
        let threads = written.joined_by(thread, barriers);
        word.additions = Some(Last { time: self.clock, threads, place });
        word.fences = self.fences;
        self.values[at] ^= value;
    }

    /// Makes a thread's stores so far visible to the asynchronous proxy.
    pub(super) fn fence(&mut self, thread: u16) {
        self.fences += 1;
        self.last_fences[usize::from(thread)] = self.fences;
    }

    /// A load by the asynchronous proxy: the storer must have fenced, before a barrier.
    pub(super) fn load_async<const N: usize>(
        &mut self,
        address: u32,
        thread: u16,
        barriers: Barriers,
        place: Place,
    ) -> [u32; N] {
        let value = self.load(address, thread, barriers, place);
        let first = self.locate::<N>(address, place);
        for (i, word) in self.shadow[first..first + N].iter().enumerate() {
            let (written, _) = word.written();
            let Threads::Thread(storer) = written.threads else {
                panic!("several threads added to what the hardware loads at {place}: {}", written.place);
            };
            if self.last_fences[usize::from(storer)] <= word.fences {
                panic!(
                    "no fence for the asynchronous proxy: thread {} stores shared memory at {:#x} at {}, and the hardware \
                     loads it at {place}",
                    storer,
                    address + 4 * i as u32,
                    written.place
                );
            }
        }
        value
    }

    fn locate<const N: usize>(&self, address: u32, place: Place) -> usize {
        let offset = address.wrapping_sub(SHARED_BASE) as usize;
        if !address.is_multiple_of(4 * N as u32) || offset / 4 + N > self.words {
            panic!(
                "shared memory: {} bytes at {address:#x} by {place}: misaligned or outside {SHARED_BASE:#x}..{:#x}",
                4 * N,
                SHARED_BASE as usize + 4 * self.words
            );
        }
        offset / 4
    }
}

impl Word {
    /// How its value came about.
    fn written(&self) -> (Last, Access) {
        self.additions.map_or((self.store, Access::Store), |additions| (additions, Access::Add))
    }
}

impl Last {
    /// Whether all of it is this thread's, or before a barrier.
    fn before(&self, thread: u16, barriers: Barriers) -> bool {
        let (same_thread, same_warp, same_warpgroup) = match self.threads {
            Threads::Thread(t) => (t == thread, t / 32 == thread / 32, t / 128 == thread / 128),
            Threads::Warp(w) => (false, w == thread / 32, w / 4 == thread / 128),
            Threads::Warpgroup(g) => (false, false, g == thread / 128),
            Threads::Block => (false, false, false),
        };
        same_thread
            || self.time < barriers.block
            || (same_warpgroup && self.time < barriers.warpgroup)
            || (same_warp && self.time < barriers.warp)
    }

    /// Whose it is once this thread does the same: its alone after what is before it.
    fn joined_by(&self, thread: u16, barriers: Barriers) -> Threads {
        if self.before(thread, barriers) { Threads::Thread(thread) } else { join(self.threads, thread) }
    }
}

fn join(threads: Threads, thread: u16) -> Threads {
    let (warp, warpgroup) = match threads {
        Threads::Thread(t) if t == thread => return threads,
        Threads::Thread(t) => (Some(t / 32), t / 128),
        Threads::Warp(w) => (Some(w), w / 4),
        Threads::Warpgroup(g) => (None, g),
        Threads::Block => return threads,
    };
    if warp == Some(thread / 32) {
        Threads::Warp(thread / 32)
    } else if warpgroup == thread / 128 {
        Threads::Warpgroup(warpgroup)
    } else {
        Threads::Block
    }
}

#[cold]
fn poison(address: u32, thread: u16, place: Place) -> ! {
    panic!("poison: thread {thread} loads shared memory at {address:#x}, which nothing has stored: {place}")
}

#[cold]
fn race(address: u32, before: Last, did: Access, thread: u16, now: Access, place: Place) -> ! {
    let verb = |access| match access {
        Access::Load => "loads",
        Access::Store => "stores",
        Access::Add => "adds",
    };
    let other = match before.threads {
        Threads::Thread(t) => format!("thread {t}"),
        Threads::Warp(w) => format!("warp {w}"),
        Threads::Warpgroup(g) => format!("warpgroup {g}"),
        Threads::Block => "more than one warpgroup".to_owned(),
    };
    let other_place = before.place;
    panic!(
        "race in shared memory at {address:#x}: {other} {} at {other_place}, then thread {thread} {} at {place}, with no \
         barrier between them",
        verb(did),
        verb(now)
    )
}
