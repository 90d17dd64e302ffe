//! Runs the threads of all blocks in turn.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::marker::PhantomData;

use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};

use super::block::{self, Block, Pause};
use super::memory::SharedMemory;

/// Bytes of a thread's stack.
const STACK_BYTES: usize = 64 * 1024;

/// Rounds in which every thread only spins, before the launch is taken to hang: 20 s on its clock.
const IDLE_ROUNDS: u64 = 20_000_000;

/// One grid of a launch.
pub struct Launch<'a> {
    grid: u32,
    threads: u32,
    shared_bytes: u32,
    kernel: Box<dyn Fn() + 'a>,
}

impl<'a> Launch<'a> {
    /// `grid` blocks of `threads` threads and `shared_bytes` of dynamic shared memory each, where each thread calls `kernel`.
    pub fn new(grid: u32, threads: u32, shared_bytes: u32, kernel: impl Fn() + 'a) -> Self {
        assert!((1..=1024).contains(&threads), "{threads} threads in a block");
        Launch { grid, threads, shared_bytes, kernel: Box::new(kernel) }
    }
}

/// Stacks and memories for the next launch: a block of 512 threads would otherwise map 512 stacks each time.
#[derive(Default)]
struct Pool {
    stacks: Vec<DefaultStack>,
    memories: Vec<SharedMemory>,
}

thread_local! {
    static POOL: RefCell<Pool> = RefCell::default();
}

/// Runs all grids to their end, at the same time. A block starts when those before it are done or spin, so that blocks
/// which wait for each other are all resident in the end.
///
/// # Panics
/// As [the module](super) says; a panic of a thread is passed on.
#[track_caller]
pub fn launch(grids: &[Launch<'_>]) {
    let mut waiting: VecDeque<(u32, &Launch<'_>)> =
        grids.iter().flat_map(|launch| (0..launch.grid).map(move |index| (index, launch))).collect();
    let mut resident: Vec<Resident<'_>> = Vec::new();
    let (mut rounds, mut idle) = (0u64, 0u64);
    while !(waiting.is_empty() && resident.is_empty()) {
        let mut progress = false;
        let mut at = 0;
        while at < resident.len() {
            progress |= resident[at].run(rounds);
            if resident[at].alive == 0 {
                resident.remove(at).retire();
            } else {
                at += 1;
            }
        }
        rounds += 1;
        if progress {
            idle = 0;
        } else if let Some((index, launch)) = waiting.pop_front() {
            resident.push(Resident::new(index, launch));
        } else {
            idle += 1;
            assert!(idle < IDLE_ROUNDS, "every block has only been spinning for {IDLE_ROUNDS} rounds");
        }
    }
}

type Thread = Coroutine<(), Pause, (), DefaultStack>;

/// A block that has started.
struct Resident<'a> {
    block: Box<Block>,
    threads: Vec<Thread>,
    ready: VecDeque<u16>,
    alive: u32,
    /// The coroutines borrow the launch's kernel.
    launch: PhantomData<&'a Launch<'a>>,
}

impl<'a> Resident<'a> {
    fn new(index: u32, launch: &'a Launch<'a>) -> Self {
        let mut memory = POOL.with_borrow_mut(|pool| pool.memories.pop()).unwrap_or_else(SharedMemory::new);
        memory.reset(launch.shared_bytes);
        let block = Box::new(Block::new(index, launch.grid, launch.threads, memory));
        let threads = (0..launch.threads)
            .map(|_| {
                let stack = POOL.with_borrow_mut(|pool| pool.stacks.pop());
                let stack =
                    stack.unwrap_or_else(|| DefaultStack::new(STACK_BYTES).expect("memory for a stack"));
                let body = move |yielder: &Yielder<(), Pause>, ()| {
                    block::running().set_yielder(yielder);
                    (launch.kernel)();
                };
                // SAFETY: `launch` outlives this structure, whose Drop ends every coroutine.
                unsafe { Coroutine::with_stack_unchecked(stack, body) }
            })
            .collect();
        let ready = (0..launch.threads as u16).collect();
        Resident { block, threads, ready, alive: launch.threads, launch: PhantomData }
    }

    /// Gives each thread that is not waiting a turn, and those that it wakes, until all wait, spin or are done. Whether any
    /// did more than spin.
    fn run(&mut self, round: u64) -> bool {
        self.block.round.set(round);
        let mut spinning = VecDeque::new();
        let mut progress = false;
        while let Some(thread) = self.ready.pop_front() {
            self.block.current.set(thread);
            let coroutine = &mut self.threads[usize::from(thread)];
            match block::enter(&self.block, || coroutine.resume(())) {
                CoroutineResult::Yield(Pause::Spinning) => spinning.push_back(thread),
                CoroutineResult::Yield(Pause::Waiting) => progress = true,
                CoroutineResult::Return(()) => {
                    progress = true;
                    self.alive -= 1;
                }
            }
            self.ready.extend(self.block.woken.borrow_mut().drain(..));
        }
        assert!(
            self.alive == 0 || !spinning.is_empty(),
            "deadlock in block {}: {} of {} threads are gone{}",
            self.block.index,
            self.block.threads - self.alive,
            self.block.threads,
            self.block.describe_meetings()
        );
        self.ready = spinning;
        progress
    }

    /// Returns what it used to the pool.
    fn retire(mut self) {
        POOL.with_borrow_mut(|pool| {
            pool.stacks.extend(self.threads.drain(..).map(Coroutine::into_stack));
            pool.memories.push(self.block.memory.replace(SharedMemory::new()));
        });
    }
}

impl Drop for Resident<'_> {
    fn drop(&mut self) {
        for thread in &mut self.threads {
            // SAFETY: only after another thread's panic. What lies on this thread's stack is never used again: kernels own
            // nothing, and the emulator keeps nothing that needs dropping there.
            unsafe { thread.force_reset() };
        }
    }
}
