//! One thread block while it runs, and the operations that its threads do together.

use std::any::TypeId;
use std::cell::{Cell, RefCell};
use std::panic::Location;

use corosensei::Yielder;

use super::copy_async::Copies;
use super::memory::{Barriers, Place, SharedMemory};

/// Which threads do something together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// 32 threads.
    Warp,
    /// 128 threads, the first a multiple of 128.
    Warpgroup,
    /// All threads of the block.
    Block,
}

/// Whether an operation orders memory accesses of its threads, as barriers do and shuffles don't.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Accesses before the operation happen before those after it.
    Memory,
    /// No order.
    Nothing,
}

/// Why a thread gave up its turn.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Pause {
    /// It waits for others, who will wake it.
    Waiting,
    /// It wants a turn again after everyone else.
    Spinning,
}

/// Whom a thread waits with.
struct Meeting {
    place: Place,
    kind: TypeId,
    /// The threads that have come, and where their values lie on their stacks.
    present: Vec<(u16, *mut ())>,
}

/// What the threads of a block share.
pub(super) struct Block {
    pub(super) index: u32,
    pub(super) grid: u32,
    pub(super) threads: u32,
    pub(super) current: Cell<u16>,
    /// The scheduler's rounds so far, for the clock.
    pub(super) round: Cell<u64>,
    pub(super) memory: RefCell<SharedMemory>,
    barriers: Vec<Cell<Barriers>>,
    /// Each thread's asynchronous copies.
    pub(super) copies: Vec<RefCell<Copies>>,
    yielders: Vec<Cell<*const Yielder<(), Pause>>>,
    /// Meetings of warps, then of warpgroups, then of the block.
    meetings: RefCell<Vec<Option<Meeting>>>,
    /// Threads to wake.
    pub(super) woken: RefCell<Vec<u16>>,
}

impl Block {
    pub(super) fn new(index: u32, grid: u32, threads: u32, memory: SharedMemory) -> Self {
        let warps = threads.div_ceil(32) as usize;
        let meetings = warps + threads.div_ceil(128) as usize + 1;
        Block {
            index,
            grid,
            threads,
            current: Cell::new(0),
            round: Cell::new(0),
            memory: RefCell::new(memory),
            barriers: vec![Cell::default(); threads as usize],
            copies: (0..threads).map(|_| RefCell::default()).collect(),
            yielders: vec![Cell::new(std::ptr::null()); threads as usize],
            meetings: RefCell::new((0..meetings).map(|_| None).collect()),
            woken: RefCell::default(),
        }
    }

    /// The running thread's barriers.
    pub(super) fn barriers(&self) -> Barriers {
        self.barriers[usize::from(self.current.get())].get()
    }

    pub(super) fn set_yielder(&self, yielder: &Yielder<(), Pause>) {
        self.yielders[usize::from(self.current.get())].set(yielder);
    }

    /// Ends the running thread's turn.
    pub(super) fn pause(&self, pause: Pause) {
        // SAFETY: the yielder lives on the running coroutine's own stack, from before the kernel starts.
        unsafe { (*self.yielders[usize::from(self.current.get())].get()).suspend(pause) }
    }

    /// What each waiting thread waits at, for the message of a deadlock.
    pub(super) fn describe_meetings(&self) -> String {
        let mut text = String::new();
        for meeting in self.meetings.borrow().iter().flatten() {
            let first = meeting.present[0].0;
            text += &format!("; {} thread(s) from {first} wait at {}", meeting.present.len(), meeting.place);
        }
        text
    }

    /// Slot of the meeting, and its first thread and size.
    fn scope(&self, scope: Scope, thread: u32) -> (usize, u32, u32) {
        let warps = self.threads.div_ceil(32);
        let (slot, first, size) = match scope {
            Scope::Warp => (thread / 32, thread / 32 * 32, 32),
            Scope::Warpgroup => (warps + thread / 128, thread / 128 * 128, 128),
            Scope::Block => (warps + self.threads.div_ceil(128), 0, self.threads),
        };
        (slot as usize, first, size.min(self.threads - first))
    }
}

thread_local! {
    static RUNNING: Cell<*const Block> = const { Cell::new(std::ptr::null()) };
}

/// Makes `block` the one that the primitives act on, while `body` runs.
pub(super) fn enter<R>(block: &Block, body: impl FnOnce() -> R) -> R {
    struct Restore(*const Block);
    impl Drop for Restore {
        fn drop(&mut self) {
            RUNNING.set(self.0);
        }
    }
    let _restore = Restore(RUNNING.replace(block));
    body()
}

/// The block of the running thread.
#[track_caller]
pub(super) fn running() -> &'static Block {
    let block = RUNNING.get();
    assert!(!block.is_null(), "a device primitive outside of emulated::launch");
    // SAFETY: `enter` keeps it in place while a thread of it runs, and every user returns before that thread does.
    unsafe { &*block }
}

/// What all threads of a scope do together, and the hook for instructions that the emulator does not know (wgmma, mma):
/// waits until each has brought a value, applies `act` once to all of them in the order of the threads, and returns to each its
/// own, changed value. `act` may access shared memory; that counts as the last thread's access.
///
/// # Panics
/// If the threads came from different places or with different types.
#[track_caller]
pub fn collective<T: Copy + 'static>(
    scope: Scope,
    order: Order,
    mut value: T,
    act: impl FnOnce(&mut [T]),
) -> T {
    let place = Location::caller();
    let block = running();
    let thread = block.current.get();
    let (slot, first, size) = block.scope(scope, u32::from(thread));
    let mut meetings = block.meetings.borrow_mut();
    let meeting = meetings[slot].get_or_insert_with(|| Meeting {
        place,
        kind: TypeId::of::<T>(),
        present: Vec::with_capacity(size as usize),
    });
    if meeting.place != place || meeting.kind != TypeId::of::<T>() {
        panic!(
            "divergence: thread {} of the {scope:?} waits at {}, thread {thread} comes to {place}",
            meeting.present[0].0, meeting.place
        );
    }
    let pointer: *mut T = &mut value;
    meeting.present.push((thread, pointer.cast()));
    if meeting.present.len() < size as usize {
        drop(meetings);
        block.pause(Pause::Waiting);
        // SAFETY: the last thread wrote a T there through the pointer.
        return unsafe { pointer.read_volatile() };
    }
    let mut present = meetings[slot].take().expect("just used").present;
    drop(meetings);
    present.sort_unstable_by_key(|&(thread, _)| thread);
    // SAFETY: each points to a live T on the stack of a suspended thread, or of this one.
    let mut values: Vec<T> =
        present.iter().map(|&(_, pointer)| unsafe { pointer.cast::<T>().read() }).collect();
    act(&mut values);
    for (&(_, pointer), &value) in present.iter().zip(&values) {
        // SAFETY: as above.
        unsafe { pointer.cast::<T>().write(value) };
    }
    if order == Order::Memory {
        let now = block.memory.borrow_mut().tick();
        for cell in &block.barriers[first as usize..(first + size) as usize] {
            let mut barriers = cell.get();
            match scope {
                Scope::Warp => barriers.warp = now,
                Scope::Warpgroup => barriers.warpgroup = now,
                Scope::Block => barriers.block = now,
            }
            cell.set(barriers);
        }
    }
    block.woken.borrow_mut().extend(present.iter().map(|&(t, _)| t).filter(|&t| t != thread));
    // SAFETY: as above.
    unsafe { pointer.read_volatile() }
}

/// Loads words of shared memory as the hardware's asynchronous proxy does (the matrices of wgmma): for use by `act` in a
/// [`collective`].
///
/// # Panics
/// As any load, and if a thread that stored them has not called
/// [`proxy_async_shared`](super::super::fence::proxy_async_shared) since.
#[track_caller]
pub fn load_async<const N: usize>(address: u32) -> [u32; N] {
    let block = running();
    let (thread, barriers) = (block.current.get(), block.barriers());
    block.memory.borrow_mut().load_async(address, thread, barriers, Location::caller())
}
