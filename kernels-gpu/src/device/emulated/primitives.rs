//! The primitives on the emulator: the same functions as on the GPU.

use super::block::{Order, Pause, Scope, collective, running};

/// Waits for all threads of the block; their accesses to memory before it happen before those after it.
#[track_caller]
pub fn sync_threads() {
    collective(Scope::Block, Order::Memory, (), |_| ());
}

/// Waits for the 128 threads of this thread's warpgroup. Uses the hardware barriers 1 to 8.
#[track_caller]
pub fn sync_warpgroup() {
    collective(Scope::Warpgroup, Order::Memory, (), |_| ());
}

/// Stands in a loop that waits for another block or device: lets them run.
pub fn spin_pause() {
    running().pause(Pause::Spinning);
}

/// The time of the device's global clock, in nanoseconds: 1 us for each round of turns.
pub fn nanotime() -> u64 {
    1_000_000 + 1000 * running().round.get()
}

/// Ends the launch with an error.
#[track_caller]
pub fn trap() -> ! {
    panic!("trap")
}

/// Where this thread stands.
pub mod thread {
    use super::running;

    /// Number of the thread in its block.
    pub fn index() -> u32 {
        u32::from(running().current.get())
    }

    /// Threads of the block.
    pub fn block_size() -> u32 {
        running().threads
    }

    /// Number of the block in the grid.
    pub fn block_index() -> u32 {
        running().index
    }

    /// Blocks of the grid.
    pub fn grid_size() -> u32 {
        running().grid
    }

    /// Number of the thread in its warp.
    pub fn lane() -> u32 {
        index() % 32
    }

    /// Number of the warp in the block.
    pub fn warp() -> u32 {
        index() / 32
    }
}

/// What the 32 threads of a warp do together; all of them.
pub mod warp {
    use super::{Order, Scope, collective};

    /// The value of the lane whose number differs in the bits of `lane_mask`.
    #[track_caller]
    pub fn shuffle_xor(value: u32, lane_mask: u32) -> u32 {
        exchange((value, lane_mask), |lane, lane_mask| lane ^ lane_mask)
    }

    /// The value of lane `lane % 32`.
    #[track_caller]
    pub fn shuffle(value: u32, lane: u32) -> u32 {
        exchange((value, lane), |_, lane| lane % 32)
    }

    /// Bit l tells lane l's predicate.
    #[track_caller]
    pub fn ballot(predicate: bool) -> u32 {
        collective(Scope::Warp, Order::Nothing, u32::from(predicate), |values| {
            let votes = values.iter().enumerate().fold(0, |votes, (lane, value)| votes | value << lane);
            values.fill(votes);
        })
    }

    /// Waits for the warp's threads and orders their memory accesses.
    #[track_caller]
    pub fn sync() {
        collective(Scope::Warp, Order::Memory, (), |_| ());
    }

    /// Each lane gets the value of the lane that `source(own lane, own argument)` names.
    #[track_caller]
    fn exchange(value: (u32, u32), source: impl Fn(u32, u32) -> u32) -> u32 {
        collective(Scope::Warp, Order::Nothing, value, |values| {
            let before = values.to_vec();
            for (lane, value) in values.iter_mut().enumerate() {
                value.0 = before[source(lane as u32, value.1) as usize].0;
            }
        })
        .0
    }
}

/// Dynamic shared memory, by absolute address.
pub mod shared {
    use std::panic::Location;

    use super::running;

    /// Ends the launch unless the dynamic window begins where the kernels' constants say. Here it does.
    pub fn require_base() {}

    /// Loads the word at `address + OFFSET`.
    ///
    /// # Safety
    /// A multiple of 4 in the window, written before, and not written by others meanwhile.
    #[track_caller]
    pub unsafe fn load_u32<const OFFSET: u32>(address: u32) -> u32 {
        load::<1>(address + OFFSET)[0]
    }

    /// Loads the 16 bytes at `address + OFFSET`.
    ///
    /// # Safety
    /// A multiple of 16 in the window, written before, and not written by others meanwhile.
    #[track_caller]
    pub unsafe fn load_16<const OFFSET: u32>(address: u32) -> [u32; 4] {
        load::<4>(address + OFFSET)
    }

    /// As [`load_16`].
    ///
    /// # Safety
    /// As [`load_16`].
    #[track_caller]
    pub unsafe fn load_in_place_16(address: u32) -> [u32; 4] {
        load::<4>(address)
    }

    /// Stores a word at `address + OFFSET`.
    ///
    /// # Safety
    /// A multiple of 4 in the window; no other thread accesses it between the barriers around this store.
    #[track_caller]
    pub unsafe fn store_u32<const OFFSET: u32>(address: u32, value: u32) {
        store(address + OFFSET, [value]);
    }

    /// Adds to the word at `address`, bit by bit (exclusive or), whatever other threads add to it at the same time.
    ///
    /// # Safety
    /// A multiple of 4 in the window, written before; between the barriers around this it is accessed in no other way.
    #[track_caller]
    pub unsafe fn xor_u32(address: u32, value: u32) {
        let block = running();
        let (thread, barriers) = (block.current.get(), block.barriers());
        block.memory.borrow_mut().xor(address, value, thread, barriers, Location::caller());
    }

    /// Stores 16 bytes at `address + OFFSET`.
    ///
    /// # Safety
    /// A multiple of 16 in the window; no other thread accesses it between the barriers around this store.
    #[track_caller]
    pub unsafe fn store_16<const OFFSET: u32>(address: u32, value: [u32; 4]) {
        store(address + OFFSET, value);
    }

    #[track_caller]
    fn load<const N: usize>(address: u32) -> [u32; N] {
        let block = running();
        let (thread, barriers) = (block.current.get(), block.barriers());
        block.memory.borrow_mut().load(address, thread, barriers, Location::caller())
    }

    #[track_caller]
    fn store<const N: usize>(address: u32, value: [u32; N]) {
        let block = running();
        let (thread, barriers) = (block.current.get(), block.barriers());
        block.memory.borrow_mut().store(address, value, thread, barriers, Location::caller());
    }
}

/// Global memory, by address.
pub mod global {
    use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

    /// The address as a pointer. A misaligned access faults on the GPU.
    #[track_caller]
    fn pointer<T>(address: u64) -> *mut T {
        let pointer = address as *mut T;
        assert!(
            !pointer.is_null() && address.is_multiple_of(size_of::<T>() as u64),
            "global memory: {} bytes at {address:#x}: misaligned or null",
            size_of::<T>()
        );
        pointer
    }

    /// 16 bytes with the alignment that they need on the GPU.
    #[derive(Clone, Copy)]
    #[repr(C, align(16))]
    struct Aligned([u32; 4]);

    macro_rules! load {
        ($(#[$meta:meta])* $name:ident, $type:ty) => {
            $(#[$meta])*
            ///
            /// # Safety
            /// Device-accessible memory, aligned to its size.
            #[track_caller]
            pub unsafe fn $name(address: u64) -> $type {
                // SAFETY: the caller's.
                unsafe { pointer::<$type>(address).read_volatile() }
            }
        };
    }

    macro_rules! store {
        ($(#[$meta:meta])* $name:ident, $type:ty) => {
            $(#[$meta])*
            ///
            /// # Safety
            /// Device-accessible memory, aligned to its size.
            #[track_caller]
            pub unsafe fn $name(address: u64, value: $type) {
                // SAFETY: the caller's.
                unsafe { pointer::<$type>(address).write_volatile(value) }
            }
        };
    }

    macro_rules! atomic {
        ($(#[$meta:meta])* $name:ident, $type:ty, $atomic:ty, |$cell:ident $(, $operand:ident)*| $act:expr) => {
            $(#[$meta])*
            ///
            /// # Safety
            /// Device-accessible memory, aligned to its size.
            #[track_caller]
            pub unsafe fn $name(address: u64 $(, $operand: $type)*) -> $type {
                // SAFETY: the caller's.
                let $cell = unsafe { <$atomic>::from_ptr(pointer(address)) };
                $act
            }
        };
    }

    load!(/// Loads a byte.
        load_u8, u8);
    load!(/// Loads 2 bytes.
        load_u16, u16);
    load!(/// Loads 4 bytes.
        load_u32, u32);
    load!(/// Loads 8 bytes.
        load_u64, u64);
    load!(/// Loads 4 bytes anew each time.
        load_volatile_u32, u32);
    load!(/// Loads 8 bytes anew each time.
        load_volatile_u64, u64);
    store!(/// Stores a byte.
        store_u8, u8);
    store!(/// Stores 2 bytes.
        store_u16, u16);
    store!(/// Stores 4 bytes.
        store_u32, u32);
    store!(/// Stores 8 bytes.
        store_u64, u64);
    atomic!(/// Loads 4 bytes; what another thread of the system stored before its release, is seen after it.
        load_acquire_sys_u32, u32, AtomicU32, |cell| cell.load(Ordering::Acquire));
    atomic!(/// Loads 8 bytes; what another thread of the system stored before its release, is seen after it.
        load_acquire_sys, u64, AtomicU64, |cell| cell.load(Ordering::Acquire));
    atomic!(/// Stores `desired` if `expected` is there; returns what was there. Atomic in the system.
    compare_exchange_u32_sys, u32, AtomicU32, |cell, expected, desired| {
        cell.compare_exchange(expected, desired, Ordering::AcqRel, Ordering::Acquire).unwrap_or_else(|old| old)
    });
    atomic!(/// Stores `desired` if `expected` is there; returns what was there. Atomic in the system.
    compare_exchange_u64, u64, AtomicU64, |cell, expected, desired| {
        cell.compare_exchange(expected, desired, Ordering::AcqRel, Ordering::Acquire).unwrap_or_else(|old| old)
    });
    atomic!(/// Adds; returns what was there. Atomic on the device.
        add_u32, u32, AtomicU32, |cell, operand| cell.fetch_add(operand, Ordering::AcqRel));
    atomic!(/// Adds; returns what was there. Atomic on the device.
        add_u64, u64, AtomicU64, |cell, operand| cell.fetch_add(operand, Ordering::AcqRel));
    atomic!(/// Bitwise or; returns what was there. Atomic on the device.
        or_u32, u32, AtomicU32, |cell, operand| cell.fetch_or(operand, Ordering::AcqRel));
    atomic!(/// Bitwise exclusive or; returns what was there. Atomic on the device.
        xor_u32, u32, AtomicU32, |cell, operand| cell.fetch_xor(operand, Ordering::AcqRel));

    /// Stores 4 bytes after all that this thread stored before, for the whole system to see.
    ///
    /// # Safety
    /// Device-accessible memory, aligned to its size.
    #[track_caller]
    pub unsafe fn store_release_sys_u32(address: u64, value: u32) {
        // SAFETY: the caller's.
        unsafe { AtomicU32::from_ptr(pointer(address)) }.store(value, Ordering::Release);
    }

    /// Stores 8 bytes after all that this thread stored before, for the whole system to see.
    ///
    /// # Safety
    /// Device-accessible memory, aligned to its size.
    #[track_caller]
    pub unsafe fn store_release_sys(address: u64, value: u64) {
        // SAFETY: the caller's.
        unsafe { AtomicU64::from_ptr(pointer(address)) }.store(value, Ordering::Release);
    }

    /// Loads 16 bytes.
    ///
    /// # Safety
    /// Device-accessible memory, aligned to 16.
    #[track_caller]
    pub unsafe fn load_16(address: u64) -> [u32; 4] {
        // SAFETY: the caller's.
        unsafe { pointer::<Aligned>(address).read_volatile().0 }
    }

    /// As [`load_16`].
    ///
    /// # Safety
    /// As [`load_16`].
    #[track_caller]
    pub unsafe fn load_past_l1_16(address: u64) -> [u32; 4] {
        // SAFETY: the caller's.
        unsafe { load_16(address) }
    }

    /// Loads 16 bytes anew each time, for memory that another device writes: the bytes verified are the bytes used.
    ///
    /// # Safety
    /// Device-accessible memory, aligned to 16.
    #[track_caller]
    pub unsafe fn load_volatile_16(address: u64) -> [u32; 4] {
        // SAFETY: the caller's.
        unsafe { load_16(address) }
    }

    /// As [`load_volatile_16`], of what is read once.
    ///
    /// # Safety
    /// Device memory, aligned to 16, that no other device writes.
    #[track_caller]
    pub unsafe fn load_once_16(address: u64) -> [u32; 4] {
        // SAFETY: the caller's.
        unsafe { load_16(address) }
    }

    /// Has the L2 cache load what it keeps together with the byte at `address`. Nothing here.
    ///
    /// # Safety
    /// Device-accessible memory.
    pub unsafe fn prefetch(_address: u64) {}

    /// Stores 16 bytes.
    ///
    /// # Safety
    /// Device-accessible memory, aligned to 16.
    #[track_caller]
    pub unsafe fn store_16(address: u64, value: [u32; 4]) {
        // SAFETY: the caller's.
        unsafe { pointer::<Aligned>(address).write_volatile(Aligned(value)) }
    }
}

/// Byte and bit instructions.
pub mod bits {
    /// `value`. On a GPU the compiler knows nothing of it, so that what a loop computes from it is not kept across it.
    #[inline(always)]
    pub fn opaque(value: u32) -> u32 {
        value
    }

    /// As [`opaque`], of 64 bits.
    #[inline(always)]
    pub fn opaque_64(value: u64) -> u64 {
        value
    }

    /// Four bytes chosen from `low` (0 to 3) and `high` (4 to 7): nibble i of `SELECTOR` names byte i of the result.
    #[inline(always)]
    pub fn permute_bytes<const SELECTOR: u32>(low: u32, high: u32) -> u32 {
        const { assert!(SELECTOR & !0x7777 == 0, "the sign mode of prmt is not emulated") };
        let bytes = u64::from(high) << 32 | u64::from(low);
        (0..4)
            .fold(0, |value, i| value | ((bytes >> (8 * (SELECTOR >> (4 * i) & 7))) as u32 & 0xff) << (8 * i))
    }

    /// `base` plus 256 times byte `BYTE`, 0 or 1, of `word`.
    #[inline(always)]
    pub fn scaled_byte<const BYTE: u32>(word: u32, base: u32) -> u32 {
        const { assert!(BYTE < 2) };
        base.wrapping_add(256 * (word >> (8 * BYTE) & 0xff))
    }

    /// The low word of `high:low` shifted right by `count % 32`.
    #[inline(always)]
    pub fn funnel_shift_right(low: u32, high: u32, count: u32) -> u32 {
        ((u64::from(high) << 32 | u64::from(low)) >> (count % 32)) as u32
    }

    /// Any function of three bits, bitwise: bit `4a + 2b + c` of `TABLE` is its value.
    #[inline(always)]
    pub fn lop3<const TABLE: u32>(a: u32, b: u32, c: u32) -> u32 {
        let literal = |value: u32, wanted: bool| if wanted { value } else { !value };
        (0..8u32).filter(|row| TABLE >> row & 1 == 1).fold(0, |result, row| {
            result | literal(a, row & 4 != 0) & literal(b, row & 2 != 0) & literal(c, row & 1 != 0)
        })
    }
}

/// Memory fences of one thread. The emulator runs one thread at a time, in program order, so that only the last has an effect:
/// [`load_async`](super::load_async) asks for it.
pub mod fence {
    /// Orders this thread's accesses for its block.
    pub fn block() {}

    /// Orders this thread's accesses for its device.
    pub fn device() {}

    /// Orders this thread's accesses for all devices and the host.
    pub fn system() {}

    /// Orders ordinary stores to shared memory before reads by the asynchronous proxy (wgmma, bulk copies): after the
    /// stores, before the barrier.
    pub fn proxy_async_shared() {
        let block = super::running();
        block.memory.borrow_mut().fence(block.current.get());
    }
}
