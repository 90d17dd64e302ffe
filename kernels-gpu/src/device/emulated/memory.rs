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
}

/// Which threads loaded a word since the last store that orders them: one, or some of the smallest scope that holds them.
#[derive(Clone, Copy, PartialEq)]
enum Loaders {
    Thread(u16),
    Warp(u16),
    Warpgroup(u16),
    Block,
}

#[derive(Clone, Copy)]
struct Word {
    stored: u32,
    loaded: u32,
    storer: u16,
    loaders: Loaders,
    store_place: Place,
    load_place: Place,
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
            let never = Word {
                stored: 0,
                loaded: 0,
                storer: 0,
                loaders: Loaders::Block,
                store_place: place,
                load_place: place,
                fences: 0,
            };
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
            if word.stored < self.start {
                poison(address + 4 * i as u32, thread, place);
            }
            if unordered_store(word, thread, barriers) {
                race(address + 4 * i as u32, word, Access::Store, thread, Access::Load, place);
            }
            word.loaders = if word.loaded < self.start || ordered_loads(word, thread, barriers) {
                Loaders::Thread(thread)
            } else {
                join(word.loaders, thread)
            };
            word.loaded = self.clock;
            word.load_place = place;
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
            if word.stored >= self.start && unordered_store(word, thread, barriers) {
                race(address + 4 * i as u32, word, Access::Store, thread, Access::Store, place);
            }
            if word.loaded >= self.start && !ordered_loads(word, thread, barriers) {
                race(address + 4 * i as u32, word, Access::Load, thread, Access::Store, place);
            }
            word.stored = self.clock;
            word.storer = thread;
            word.store_place = place;
            word.fences = self.fences;
        }
        self.values[first..first + N].copy_from_slice(&value);
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
            if self.last_fences[usize::from(word.storer)] <= word.fences {
                panic!(
                    "no fence for the asynchronous proxy: thread {} stores shared memory at {:#x} at {}, and the hardware \
                     loads it at {place}",
                    word.storer,
                    address + 4 * i as u32,
                    word.store_place
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

/// Whether the last store was another thread's and no barrier has ordered it before this access.
fn unordered_store(word: &Word, thread: u16, barriers: Barriers) -> bool {
    word.storer != thread
        && word.stored >= barriers.block
        && (word.storer / 128 != thread / 128 || word.stored >= barriers.warpgroup)
        && (word.storer / 32 != thread / 32 || word.stored >= barriers.warp)
}

/// Whether all loads since the last store are this thread's, or before a barrier.
fn ordered_loads(word: &Word, thread: u16, barriers: Barriers) -> bool {
    let (same_thread, same_warp, same_warpgroup) = match word.loaders {
        Loaders::Thread(t) => (t == thread, t / 32 == thread / 32, t / 128 == thread / 128),
        Loaders::Warp(w) => (false, w == thread / 32, w / 4 == thread / 128),
        Loaders::Warpgroup(g) => (false, false, g == thread / 128),
        Loaders::Block => (false, false, false),
    };
    same_thread
        || word.loaded < barriers.block
        || (same_warpgroup && word.loaded < barriers.warpgroup)
        || (same_warp && word.loaded < barriers.warp)
}

fn join(loaders: Loaders, thread: u16) -> Loaders {
    let (warp, warpgroup) = match loaders {
        Loaders::Thread(t) if t == thread => return loaders,
        Loaders::Thread(t) => (Some(t / 32), t / 128),
        Loaders::Warp(w) => (Some(w), w / 4),
        Loaders::Warpgroup(g) => (None, g),
        Loaders::Block => return loaders,
    };
    if warp == Some(thread / 32) {
        Loaders::Warp(thread / 32)
    } else if warpgroup == thread / 128 {
        Loaders::Warpgroup(warpgroup)
    } else {
        Loaders::Block
    }
}

#[cold]
fn poison(address: u32, thread: u16, place: Place) -> ! {
    panic!("poison: thread {thread} loads shared memory at {address:#x}, which nothing has stored: {place}")
}

#[cold]
fn race(address: u32, word: &Word, before: Access, thread: u16, now: Access, place: Place) -> ! {
    let verb = |access| match access {
        Access::Load => "loads",
        Access::Store => "stores",
    };
    let (other, other_place) = match before {
        Access::Store => (format!("thread {}", word.storer), word.store_place),
        Access::Load => (
            match word.loaders {
                Loaders::Thread(t) => format!("thread {t}"),
                Loaders::Warp(w) => format!("warp {w}"),
                Loaders::Warpgroup(g) => format!("warpgroup {g}"),
                Loaders::Block => "more than one warpgroup".to_owned(),
            },
            word.load_place,
        ),
    };
    panic!(
        "race in shared memory at {address:#x}: {other} {} at {other_place}, then thread {thread} {} at {place}, with no \
         barrier between them",
        verb(before),
        verb(now)
    )
}
