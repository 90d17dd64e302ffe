//! The primitives on the GPU.

use core::arch::asm;
use core::arch::nvptx as intrinsics;

core::arch::global_asm!(".extern .shared .align 1024 .b8 dynamic_shared[];");

#[allow(improper_ctypes)]
unsafe extern "unadjusted" {
    #[link_name = "llvm.nvvm.shfl.sync.bfly.i32"]
    fn shfl_sync_bfly(mask: i32, value: i32, lane_mask: i32, clamp: i32) -> i32;
    #[link_name = "llvm.nvvm.shfl.sync.idx.i32"]
    fn shfl_sync_idx(mask: i32, value: i32, lane: i32, clamp: i32) -> i32;
    #[link_name = "llvm.nvvm.vote.ballot.sync"]
    fn vote_ballot_sync(mask: i32, predicate: bool) -> i32;
    #[link_name = "llvm.nvvm.bar.warp.sync"]
    fn bar_warp_sync(mask: i32);
    #[link_name = "llvm.nvvm.barrier.cta.sync.aligned.count"]
    fn barrier_count(id: i32, threads: i32);
}

/// Waits for all threads of the block; their accesses to memory before it happen before those after it.
#[inline(always)]
pub fn sync_threads() {
    // SAFETY: a barrier has no preconditions beyond convergence, which the caller's kernel keeps.
    unsafe { intrinsics::_syncthreads() }
}

/// Waits for the 128 threads of this thread's warpgroup. Uses the hardware barriers 1 to 8.
#[inline(always)]
pub fn sync_warpgroup() {
    // SAFETY: as sync_threads; the group's threads all name the same barrier.
    unsafe { barrier_count(1 + (thread::index() / 128) as i32, 128) }
}

/// Stands in a loop that waits for another block or device. Nothing on the GPU.
#[inline(always)]
pub fn spin_pause() {}

/// The time of the device's global clock, in nanoseconds.
#[inline(always)]
pub fn nanotime() -> u64 {
    let time: u64;
    // SAFETY: reads a special register.
    unsafe { asm!("mov.u64 {}, %globaltimer;", out(reg64) time, options(nostack)) };
    time
}

/// Ends the launch with an error.
#[inline(always)]
pub fn trap() -> ! {
    // SAFETY: trap never returns.
    unsafe { asm!("trap;", "exit;", options(noreturn, nostack)) }
}

/// Where this thread stands.
pub mod thread {
    use super::intrinsics;

    /// Number of the thread in its block.
    #[inline(always)]
    pub fn index() -> u32 {
        // SAFETY: reads a special register.
        unsafe { intrinsics::_thread_idx_x() as u32 }
    }

    /// Threads of the block.
    #[inline(always)]
    pub fn block_size() -> u32 {
        // SAFETY: reads a special register.
        unsafe { intrinsics::_block_dim_x() as u32 }
    }

    /// Number of the block in the grid.
    #[inline(always)]
    pub fn block_index() -> u32 {
        // SAFETY: reads a special register.
        unsafe { intrinsics::_block_idx_x() as u32 }
    }

    /// Blocks of the grid.
    #[inline(always)]
    pub fn grid_size() -> u32 {
        // SAFETY: reads a special register.
        unsafe { intrinsics::_grid_dim_x() as u32 }
    }

    /// Number of the thread in its warp.
    #[inline(always)]
    pub fn lane() -> u32 {
        index() % 32
    }

    /// Number of the warp in the block.
    #[inline(always)]
    pub fn warp() -> u32 {
        index() / 32
    }
}

/// What the 32 threads of a warp do together; all of them.
pub mod warp {
    const ALL: i32 = -1;
    const CLAMP: i32 = 31;

    /// The value of the lane whose number differs in the bits of `lane_mask`.
    #[inline(always)]
    pub fn shuffle_xor(value: u32, lane_mask: u32) -> u32 {
        // SAFETY: all lanes take part, by this function's contract.
        unsafe { super::shfl_sync_bfly(ALL, value as i32, lane_mask as i32, CLAMP) as u32 }
    }

    /// The value of lane `lane % 32`.
    #[inline(always)]
    pub fn shuffle(value: u32, lane: u32) -> u32 {
        // SAFETY: as shuffle_xor.
        unsafe { super::shfl_sync_idx(ALL, value as i32, lane as i32, CLAMP) as u32 }
    }

    /// Bit l tells lane l's predicate.
    #[inline(always)]
    pub fn ballot(predicate: bool) -> u32 {
        // SAFETY: as shuffle_xor.
        unsafe { super::vote_ballot_sync(ALL, predicate) as u32 }
    }

    /// Waits for the warp's threads and orders their memory accesses.
    #[inline(always)]
    pub fn sync() {
        // SAFETY: as shuffle_xor.
        unsafe { super::bar_warp_sync(ALL) }
    }
}

/// Dynamic shared memory, by the kernels' addresses, in which the window begins at `SHARED_BASE`.
///
/// Where it really begins is ptxas's to know: at 0 on sm_80 to sm_89; at 0x400 from sm_90 on, plus the block's rank in its
/// cluster shifted left by 24. So each access adds the symbol, which costs nothing: the instruction takes it as a constant or
/// from a uniform register.
pub mod shared {
    use core::arch::asm;

    use crate::params::SHARED_BASE;

    /// `OFFSET` from the window's beginning.
    const fn from_base(offset: u32) -> i32 {
        offset.cast_signed() - SHARED_BASE.cast_signed()
    }

    #[inline(always)]
    fn base() -> u32 {
        let base;
        // SAFETY: takes an address.
        unsafe { asm!("mov.u32 {}, dynamic_shared;", out(reg32) base, options(pure, nomem, nostack)) };
        base
    }

    /// The hardware's address of `address`.
    #[inline(always)]
    pub(super) fn place(address: u32) -> u32 {
        base().wrapping_add(address).wrapping_sub(SHARED_BASE)
    }

    /// Ends the launch unless the window begins at `SHARED_BASE` in the block's own memory: for kernels that give addresses to
    /// the hardware themselves (matrix descriptors).
    #[inline(always)]
    pub fn require_base() {
        if base() & 0xff_ffff != SHARED_BASE {
            super::trap();
        }
    }

    /// Loads the word at `address + OFFSET`.
    ///
    /// # Safety
    /// A multiple of 4 in the window, written before, and not written by others meanwhile.
    #[inline(always)]
    pub unsafe fn load_u32<const OFFSET: u32>(address: u32) -> u32 {
        let value;
        // SAFETY: the caller's.
        unsafe {
            asm!("ld.shared.u32 {}, [{}+{}];", out(reg32) value,
                in(reg32) base().wrapping_add(address), const from_base(OFFSET), options(pure, readonly, nostack))
        };
        value
    }

    /// Loads the 16 bytes at `address + OFFSET`.
    ///
    /// # Safety
    /// A multiple of 16 in the window, written before, and not written by others meanwhile.
    #[inline(always)]
    pub unsafe fn load_16<const OFFSET: u32>(address: u32) -> [u32; 4] {
        let (a, b, c, d);
        // SAFETY: the caller's.
        unsafe {
            asm!("ld.shared.v4.u32 {{{}, {}, {}, {}}}, [{}+{}];",
                out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d,
                in(reg32) base().wrapping_add(address), const from_base(OFFSET), options(pure, readonly, nostack))
        };
        [a, b, c, d]
    }

    /// As [`load_16`], where it stands in the program: not ahead of time, when its registers are needed for other things.
    ///
    /// # Safety
    /// As [`load_16`].
    #[inline(always)]
    pub unsafe fn load_in_place_16(address: u32) -> [u32; 4] {
        let (a, b, c, d);
        // SAFETY: the caller's.
        unsafe {
            asm!("ld.volatile.shared.v4.u32 {{{}, {}, {}, {}}}, [{}+{}];",
                out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d,
                in(reg32) base().wrapping_add(address), const from_base(0), options(nostack))
        };
        [a, b, c, d]
    }

    /// Stores a word at `address + OFFSET`.
    ///
    /// # Safety
    /// A multiple of 4 in the window; no other thread accesses it between the barriers around this store.
    #[inline(always)]
    pub unsafe fn store_u32<const OFFSET: u32>(address: u32, value: u32) {
        // SAFETY: the caller's.
        unsafe {
            asm!("st.shared.u32 [{}+{}], {};", in(reg32) base().wrapping_add(address), const from_base(OFFSET),
                in(reg32) value, options(nostack))
        }
    }

    /// Adds to the word at `address`, bit by bit (exclusive or), whatever other threads add to it at the same time.
    ///
    /// # Safety
    /// A multiple of 4 in the window, written before; between the barriers around this it is accessed in no other way.
    #[inline(always)]
    pub unsafe fn xor_u32(address: u32, value: u32) {
        // SAFETY: the caller's.
        unsafe {
            asm!("red.shared.xor.b32 [{}+{}], {};", in(reg32) base().wrapping_add(address), const from_base(0),
                in(reg32) value, options(nostack))
        }
    }

    /// Stores 16 bytes at `address + OFFSET`.
    ///
    /// # Safety
    /// A multiple of 16 in the window; no other thread accesses it between the barriers around this store.
    #[inline(always)]
    pub unsafe fn store_16<const OFFSET: u32>(address: u32, value: [u32; 4]) {
        // SAFETY: the caller's.
        unsafe {
            asm!("st.shared.v4.u32 [{}+{}], {{{}, {}, {}, {}}};",
                in(reg32) base().wrapping_add(address), const from_base(OFFSET),
                in(reg32) value[0], in(reg32) value[1], in(reg32) value[2], in(reg32) value[3], options(nostack))
        }
    }
}

/// Global memory, by address.
pub mod global {
    use core::arch::asm;

    macro_rules! load {
        ($(#[$meta:meta])* $name:ident, $type:ty, $register:ident, $instruction:literal, $($option:ident),*) => {
            $(#[$meta])*
            ///
            /// # Safety
            /// Device-accessible memory, aligned to its size.
            #[inline(always)]
            pub unsafe fn $name(address: u64) -> $type {
                let value;
                // SAFETY: the caller's.
                unsafe {
                    asm!(concat!($instruction, " {}, [{}];"), out($register) value, in(reg64) address,
                        options($($option),*))
                };
                value
            }
        };
    }

    macro_rules! store {
        ($(#[$meta:meta])* $name:ident, $type:ty, $register:ident, $instruction:literal) => {
            $(#[$meta])*
            ///
            /// # Safety
            /// Device-accessible memory, aligned to its size.
            #[inline(always)]
            pub unsafe fn $name(address: u64, value: $type) {
                // SAFETY: the caller's.
                unsafe {
                    asm!(concat!($instruction, " [{}], {};"), in(reg64) address, in($register) value, options(nostack))
                }
            }
        };
    }

    macro_rules! exchange {
        ($(#[$meta:meta])* $name:ident, $type:ty, $register:ident, $instruction:literal) => {
            $(#[$meta])*
            ///
            /// # Safety
            /// Device-accessible memory, aligned to its size.
            #[inline(always)]
            pub unsafe fn $name(address: u64, expected: $type, desired: $type) -> $type {
                let old;
                // SAFETY: the caller's.
                unsafe {
                    asm!(concat!($instruction, " {}, [{}], {}, {};"), out($register) old, in(reg64) address,
                        in($register) expected, in($register) desired, options(nostack))
                };
                old
            }
        };
    }

    macro_rules! fetch {
        ($(#[$meta:meta])* $name:ident, $type:ty, $register:ident, $instruction:literal) => {
            $(#[$meta])*
            ///
            /// # Safety
            /// Device-accessible memory, aligned to its size.
            #[inline(always)]
            pub unsafe fn $name(address: u64, operand: $type) -> $type {
                let old;
                // SAFETY: the caller's.
                unsafe {
                    asm!(concat!($instruction, " {}, [{}], {};"), out($register) old, in(reg64) address,
                        in($register) operand, options(nostack))
                };
                old
            }
        };
    }

    load!(/// Loads 2 bytes.
        load_u16, u16, reg16, "ld.global.u16", pure, readonly, nostack);
    load!(/// Loads 4 bytes.
        load_u32, u32, reg32, "ld.global.u32", pure, readonly, nostack);
    load!(/// Loads 8 bytes.
        load_u64, u64, reg64, "ld.global.u64", pure, readonly, nostack);
    load!(/// Loads 4 bytes anew each time.
        load_volatile_u32, u32, reg32, "ld.volatile.global.u32", nostack);
    load!(/// Loads 8 bytes anew each time.
        load_volatile_u64, u64, reg64, "ld.volatile.global.u64", nostack);
    load!(/// Loads 4 bytes; what another thread of the system stored before its release, is seen after it.
        load_acquire_sys_u32, u32, reg32, "ld.acquire.sys.global.u32", nostack);
    load!(/// Loads 8 bytes; what another thread of the system stored before its release, is seen after it.
        load_acquire_sys, u64, reg64, "ld.acquire.sys.global.u64", nostack);
    store!(/// Stores 2 bytes.
        store_u16, u16, reg16, "st.global.u16");
    store!(/// Stores 4 bytes.
        store_u32, u32, reg32, "st.global.u32");
    store!(/// Stores 8 bytes.
        store_u64, u64, reg64, "st.global.u64");
    store!(/// Stores 4 bytes after all that this thread stored before, for the whole system to see.
        store_release_sys_u32, u32, reg32, "st.release.sys.global.u32");
    store!(/// Stores 8 bytes after all that this thread stored before, for the whole system to see.
        store_release_sys, u64, reg64, "st.release.sys.global.u64");
    exchange!(/// Stores `desired` if `expected` is there; returns what was there. Atomic in the system.
        compare_exchange_u32_sys, u32, reg32, "atom.acq_rel.sys.global.cas.b32");
    exchange!(/// Stores `desired` if `expected` is there; returns what was there. Atomic in the system.
        compare_exchange_u64, u64, reg64, "atom.acq_rel.sys.global.cas.b64");
    fetch!(/// Adds; returns what was there. Atomic on the device.
        add_u32, u32, reg32, "atom.acq_rel.gpu.global.add.u32");
    fetch!(/// Adds; returns what was there. Atomic on the device.
        add_u64, u64, reg64, "atom.acq_rel.gpu.global.add.u64");
    fetch!(/// Bitwise or; returns what was there. Atomic on the device.
        or_u32, u32, reg32, "atom.acq_rel.gpu.global.or.b32");
    fetch!(/// Bitwise exclusive or; returns what was there. Atomic on the device.
        xor_u32, u32, reg32, "atom.acq_rel.gpu.global.xor.b32");

    /// Loads a byte.
    ///
    /// # Safety
    /// Device-accessible memory.
    #[inline(always)]
    pub unsafe fn load_u8(address: u64) -> u8 {
        let value: u16;
        // SAFETY: the caller's.
        unsafe {
            asm!("ld.global.u8 {}, [{}];", out(reg16) value, in(reg64) address, options(pure, readonly, nostack))
        };
        value as u8
    }

    /// Stores a byte.
    ///
    /// # Safety
    /// Device-accessible memory.
    #[inline(always)]
    pub unsafe fn store_u8(address: u64, value: u8) {
        // SAFETY: the caller's.
        unsafe { asm!("st.global.u8 [{}], {};", in(reg64) address, in(reg16) value as u16, options(nostack)) }
    }

    /// Loads 16 bytes.
    ///
    /// # Safety
    /// Device-accessible memory, aligned to 16.
    #[inline(always)]
    pub unsafe fn load_16(address: u64) -> [u32; 4] {
        let (a, b, c, d);
        // SAFETY: the caller's.
        unsafe {
            asm!("ld.global.v4.u32 {{{}, {}, {}, {}}}, [{}];",
                out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg64) address,
                options(pure, readonly, nostack))
        };
        [a, b, c, d]
    }

    /// As [`load_16`], of what is read once: it leaves the L1 cache to other things.
    ///
    /// # Safety
    /// As [`load_16`].
    #[inline(always)]
    pub unsafe fn load_past_l1_16(address: u64) -> [u32; 4] {
        let (a, b, c, d);
        // SAFETY: the caller's.
        unsafe {
            asm!("ld.global.L1::no_allocate.v4.u32 {{{}, {}, {}, {}}}, [{}];",
                out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg64) address,
                options(pure, readonly, nostack))
        };
        [a, b, c, d]
    }

    /// Loads 16 bytes anew each time, for memory that another device writes: the bytes verified are the bytes used.
    ///
    /// # Safety
    /// Device-accessible memory, aligned to 16.
    #[inline(always)]
    pub unsafe fn load_volatile_16(address: u64) -> [u32; 4] {
        let (a, b, c, d);
        // SAFETY: the caller's.
        unsafe {
            asm!("ld.volatile.global.v4.u32 {{{}, {}, {}, {}}}, [{}];",
                out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg64) address, options(nostack))
        };
        [a, b, c, d]
    }

    /// As [`load_volatile_16`], of what is read once: the L2 cache evicts it before other things.
    ///
    /// # Safety
    /// Device memory, aligned to 16, that no other device writes.
    #[inline(always)]
    pub unsafe fn load_once_16(address: u64) -> [u32; 4] {
        let (a, b, c, d);
        // SAFETY: the caller's.
        unsafe {
            asm!("{{",
                ".reg .b64 policy;",
                "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;",
                "ld.relaxed.gpu.global.L2::cache_hint.v4.u32 {{{}, {}, {}, {}}}, [{}], policy;",
                "}}",
                out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg64) address, options(nostack))
        };
        [a, b, c, d]
    }

    /// Has the L2 cache load what it keeps together with the byte at `address`.
    ///
    /// # Safety
    /// Device-accessible memory.
    #[inline(always)]
    pub unsafe fn prefetch(address: u64) {
        // SAFETY: the caller's.
        unsafe { asm!("prefetch.global.L2 [{}];", in(reg64) address, options(nostack)) }
    }

    /// Stores 16 bytes.
    ///
    /// # Safety
    /// Device-accessible memory, aligned to 16.
    #[inline(always)]
    pub unsafe fn store_16(address: u64, value: [u32; 4]) {
        // SAFETY: the caller's.
        unsafe {
            asm!("st.global.v4.u32 [{}], {{{}, {}, {}, {}}};", in(reg64) address,
                in(reg32) value[0], in(reg32) value[1], in(reg32) value[2], in(reg32) value[3], options(nostack))
        }
    }
}

/// Copies from global to shared memory that go on while the thread does other things (PTX ISA, "cp.async"): each thread
/// for itself. What it started since its last [`commit`](copy_async::commit) is a group.
pub mod copy_async {
    use core::arch::asm;

    /// Starts copying `bytes` bytes (up to 16) from `from` to shared memory at `to`, where zeros fill up 16.
    ///
    /// # Safety
    /// `to` is a multiple of 16 in the window, and no thread accesses the 16 bytes until this one has waited for the copy.
    /// `from` is a multiple of 16; its `bytes` bytes are device-accessible memory and stay what they are until then.
    #[inline(always)]
    pub unsafe fn start(to: u32, from: u64, bytes: u32) {
        // SAFETY: the caller's.
        unsafe {
            asm!("cp.async.cg.shared.global [{}], [{}], 16, {};", in(reg32) super::shared::place(to),
                in(reg64) from, in(reg32) bytes, options(nostack))
        }
    }

    /// Ends the group of the copies started since the last call; it may be empty.
    #[inline(always)]
    pub fn commit() {
        // SAFETY: no operands.
        unsafe { asm!("cp.async.commit_group;", options(nostack)) }
    }

    /// Waits until all but the last `LEFT` groups are copied. Only this thread sees what they stored, until a barrier.
    #[inline(always)]
    pub fn wait<const LEFT: u32>() {
        // SAFETY: no operands.
        unsafe { asm!("cp.async.wait_group {};", const LEFT, options(nostack)) }
    }
}

/// Byte and bit instructions.
pub mod bits {
    use core::arch::asm;

    /// `value`, of which the compiler knows nothing: what a loop computes from it is not kept in registers across it.
    #[inline(always)]
    pub fn opaque(mut value: u32) -> u32 {
        // SAFETY: no instruction. Volatile, or it would be moved out of the loop.
        unsafe { asm!("// {}", inout(reg32) value, options(nostack)) };
        value
    }

    /// As [`opaque`], of 64 bits.
    #[inline(always)]
    pub fn opaque_64(mut value: u64) -> u64 {
        // SAFETY: as opaque.
        unsafe { asm!("// {}", inout(reg64) value, options(nostack)) };
        value
    }

    /// Four bytes chosen from `low` (0 to 3) and `high` (4 to 7): nibble i of `SELECTOR` names byte i of the result.
    #[inline(always)]
    pub fn permute_bytes<const SELECTOR: u32>(low: u32, high: u32) -> u32 {
        let value;
        // SAFETY: arithmetic.
        unsafe {
            asm!("prmt.b32 {}, {}, {}, {};", out(reg32) value, in(reg32) low, in(reg32) high, const SELECTOR,
                options(pure, nomem, nostack))
        };
        value
    }

    /// `base` plus 256 times byte `BYTE`, 0 or 1, of `word`: a dot product, on the pipe that multiplies.
    #[inline(always)]
    pub fn scaled_byte<const BYTE: u32>(word: u32, base: u32) -> u32 {
        const { assert!(BYTE < 2) };
        let value;
        // SAFETY: arithmetic.
        unsafe {
            asm!("dp2a.lo.u32.u32 {}, {}, {}, {};", out(reg32) value, in(reg32) 0x100u32 << (16 * BYTE), in(reg32) word,
                in(reg32) base, options(pure, nomem, nostack))
        };
        value
    }

    /// The low word of `high:low` shifted right by `count % 32`.
    #[inline(always)]
    pub fn funnel_shift_right(low: u32, high: u32, count: u32) -> u32 {
        let value;
        // SAFETY: arithmetic.
        unsafe {
            asm!("shf.r.wrap.b32 {}, {}, {}, {};", out(reg32) value, in(reg32) low, in(reg32) high, in(reg32) count,
                options(pure, nomem, nostack))
        };
        value
    }

    /// Any function of three bits, bitwise: bit `4a + 2b + c` of `TABLE` is its value.
    #[inline(always)]
    pub fn lop3<const TABLE: u32>(a: u32, b: u32, c: u32) -> u32 {
        let value;
        // SAFETY: arithmetic.
        unsafe {
            asm!("lop3.b32 {}, {}, {}, {}, {};", out(reg32) value, in(reg32) a, in(reg32) b, in(reg32) c, const TABLE,
                options(pure, nomem, nostack))
        };
        value
    }
}

/// Memory fences of one thread.
pub mod fence {
    use core::arch::asm;

    /// Orders this thread's accesses for its block.
    #[inline(always)]
    pub fn block() {
        // SAFETY: a fence.
        unsafe { asm!("fence.acq_rel.cta;", options(nostack)) }
    }

    /// Orders this thread's accesses for its device.
    #[inline(always)]
    pub fn device() {
        // SAFETY: a fence.
        unsafe { asm!("fence.acq_rel.gpu;", options(nostack)) }
    }

    /// Orders this thread's accesses for all devices and the host.
    #[inline(always)]
    pub fn system() {
        // SAFETY: a fence.
        unsafe { asm!("fence.acq_rel.sys;", options(nostack)) }
    }

    /// Orders ordinary stores to shared memory before reads by the asynchronous proxy (wgmma, bulk copies): after the
    /// stores, before the barrier. Compute capability 9.0 and newer.
    #[inline(always)]
    pub fn proxy_async_shared() {
        // SAFETY: a fence.
        unsafe { asm!("fence.proxy.async.shared::cta;", options(nostack)) }
    }
}
