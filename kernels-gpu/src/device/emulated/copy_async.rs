//! Copies from global to shared memory that go on while the thread does other things: each thread for itself. What it
//! started since its last [`commit`] is a group.
//!
//! The emulator copies as late as a GPU may, when the thread waits: what is read too early is poison or a race.

use std::collections::VecDeque;
use std::panic::Location;

use super::block::running;
use super::memory::Place;
use super::primitives::global;

/// A thread's copies that it has not waited for.
#[derive(Default)]
pub(super) struct Copies {
    started: Vec<Copy>,
    groups: VecDeque<Vec<Copy>>,
}

struct Copy {
    to: u32,
    from: u64,
    bytes: u32,
    place: Place,
}

/// Starts copying `bytes` bytes (up to 16) from `from` to shared memory at `to`, where zeros fill up 16.
///
/// # Safety
/// `to` is a multiple of 16 in the window, and no thread accesses the 16 bytes until this one has waited for the copy.
/// `from` is a multiple of 16; its `bytes` bytes are device-accessible memory and stay what they are until then.
#[track_caller]
pub unsafe fn start(to: u32, from: u64, bytes: u32) {
    assert!(bytes <= 16, "{bytes} bytes copied at once");
    assert!(from.is_multiple_of(16), "global memory: a copy from {from:#x}: misaligned");
    let block = running();
    let place = Location::caller();
    block.copies[usize::from(block.current.get())].borrow_mut().started.push(Copy { to, from, bytes, place });
}

/// Ends the group of the copies started since the last call; it may be empty.
pub fn commit() {
    let block = running();
    let mut copies = block.copies[usize::from(block.current.get())].borrow_mut();
    let group = std::mem::take(&mut copies.started);
    copies.groups.push_back(group);
}

/// Waits until all but the last `LEFT` groups are copied. Only this thread sees what they stored, until a barrier.
pub fn wait<const LEFT: u32>() {
    let block = running();
    let (thread, barriers) = (block.current.get(), block.barriers());
    let mut copies = block.copies[usize::from(thread)].borrow_mut();
    while copies.groups.len() > LEFT as usize {
        for Copy { to, from, bytes, place } in copies.groups.pop_front().into_iter().flatten() {
            let mut block_words = [0u8; 16];
            for (i, byte) in block_words.iter_mut().enumerate().take(bytes as usize) {
                // SAFETY: promised to `start`, until now.
                *byte = unsafe { global::load_u8(from + i as u64) };
            }
            let words: [u32; 4] =
                std::array::from_fn(|w| u32::from_le_bytes(std::array::from_fn(|i| block_words[4 * w + i])));
            block.memory.borrow_mut().store(to, words, thread, barriers, place);
        }
    }
}
