//! GMAC (NIST SP 800-38D section 3: AES-GCM of additional data without a text) by the whole GPU, as fast as memory is read.
//!
//! Shared memory is laid out as in the kernels on one message, but for the tables.
//!
//! Data is cut, from its end, into shares of equally many blocks ([`plan`](crate::message::plan)), a thread block each.
//! Each thread copies the blocks that it will feed to its chains ([`GroupedChains`]) to shared memory, [`AHEAD`] groups of
//! tiles ahead: 96 to 128 KiB a multiprocessor are under way, where 4.4 TB/s and 1 us of latency ask for 33. As a thread
//! reads only what it has copied, the loop has no barrier. Shares become a tag as in [`message`](crate::message).
//!
//! No AES: the host encrypts the pre-counter block, and passes what masks the tag.
//!
//! Shared-memory wavefronts for 32 blocks: 4.4 to load, 4 to store and 4 to load again from shared memory, 8 + 2 matrices.

use crate::device::{self, Quad, copy_async, global, shared, thread};
use crate::gcm::FORGED;
use crate::ghash::{APART, GROUP, GroupedChains, TILE, TileChains, load_lanes};
use crate::message::{
    End, LANES_AT, MASK_AT, MATRICES_AT, behind, combine, load_weight, message_shared, store_weight,
};
use crate::params::{SHARED_BASE, TABLES_END};

/// Parameters of the kernels for GMAC.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct GmacParams {
    /// Address of the [`GhashKey`](crate::ghash::GhashKey).
    pub ghash_key: u64,
    /// Address of the [`Powers`](crate::message::Powers).
    pub powers: u64,
    /// Address of the [`Workspace`](crate::message::Workspace).
    pub workspace: u64,
    /// Blocks of a share: [`Plan::share`](crate::message::Plan::share) for no text.
    pub share: u64,
    /// Address of the data, a multiple of 16.
    pub data: u64,
    /// Bytes of data, at most [`BYTES_MAX`](crate::message::BYTES_MAX).
    pub length: u64,
    /// Address of the tag, a multiple of 4: written by making, read by verifying.
    pub tag: u64,
    /// Address of the verdict, a multiple of 4: see [`Message::verdict`](crate::message::Message::verdict).
    pub verdict: u64,
    /// The pre-counter block J0 (SP 800-38D section 7.1 step 2) encrypted, raw words.
    pub mask: [u32; 4],
}

/// Groups of tiles that are copied ahead, in the place of the tables that AES would need.
pub const AHEAD: u32 = 4;
/// Blocks of a group.
const GROUP_BLOCKS: u32 = GROUP as u32 * TILE;
const GROUP_BYTES: u32 = 16 * GROUP_BLOCKS;
/// Dynamic shared memory of the kernels.
pub const GMAC_SHARED: u32 = message_shared::<GroupedChains>();
const RING_AT: u32 = SHARED_BASE;
const _: () = assert!(RING_AT + AHEAD * GROUP_BYTES <= TABLES_END);
kernel! {
    threads = 512, shared = GMAC_SHARED,
    /// Makes the tag, on [`Plan::blocks`](crate::message::Plan::blocks) thread blocks.
    fn gmac_make(params: GmacParams) {
        // SAFETY: the kernel's contract.
        unsafe { gmac::<true>(&params) };
    }
}
kernel! {
    threads = 512, shared = GMAC_SHARED,
    /// Verifies the tag, on [`Plan::blocks`](crate::message::Plan::blocks) thread blocks.
    fn gmac_verify(params: GmacParams) {
        // SAFETY: the kernel's contract.
        if unsafe { gmac::<false>(&params) } && thread::index() == 0 {
            // SAFETY: the verdict.
            unsafe { global::store_u32(params.verdict, FORGED) };
        }
    }
}

/// The kernels' body; what [`combine`] returns.
///
/// # Safety
/// The addresses in the parameters are valid.
#[inline(always)]
unsafe fn gmac<const MAKE: bool>(params: &GmacParams) -> bool {
    let index = thread::index();
    let behind = behind(params.share);
    let groups = params.share.div_ceil(GROUP_BLOCKS as u64) as u32;
    // Blocks are numbered from the data's first.
    let end = params.length.div_ceil(16) as i64 - behind as i64;
    let source = Source {
        data: params.data,
        length: params.length,
        begin: (end - params.share as i64).max(0),
        first: end - groups as i64 * GROUP_BLOCKS as i64,
        groups,
    };
    // SAFETY: the regions of shared memory are disjoint; the keys are filled.
    let matrices = unsafe {
        let mut group = 0;
        while group < AHEAD {
            source.copy(group);
            group += 1;
        }
        let weight = load_weight(params.powers, behind);
        load_lanes(params.ghash_key, LANES_AT);
        store_weight(weight);
        if index == 0 {
            shared::store_16::<MASK_AT>(0, params.mask);
        }
        GroupedChains::store(GroupedChains::fetch(params.ghash_key), MATRICES_AT)
    };
    device::sync_threads();
    let mut chains = GroupedChains::new([0; 4], 0);
    let mut group = 0;
    while group < groups {
        copy_async::wait::<{ AHEAD - 1 }>();
        // SAFETY: this thread has copied its blocks, and waited; all threads of a warpgroup run this alike.
        unsafe {
            chains.take_group(load(group), matrices);
            // What was loaded has been used: its place is free.
            source.copy(group + AHEAD);
        }
        group += 1;
    }
    let lengths = if thread::block_index() == thread::grid_size() - 1 {
        crate::message::lengths(params.length, 0)
    } else {
        [0; 4]
    };
    let end = End { workspace: params.workspace, tag: params.tag, verdict: params.verdict, behind };
    // SAFETY: all threads run this alike; lanes, weights and mask are stored.
    unsafe {
        let word = chains.last(lengths, matrices);
        combine::<MAKE>(word, &end)
    }
}

/// A thread block's share of the data.
struct Source {
    data: u64,
    length: u64,
    /// The share's first block.
    begin: i64,
    /// The first group's first block, which may lie before the share.
    first: i64,
    groups: u32,
}

impl Source {
    /// Starts copying this thread's blocks of a group, if there is such a group. What lies before the share, and what the
    /// data's last block lacks, becomes zero.
    ///
    /// # Safety
    /// This thread is done with the group [`AHEAD`] before.
    #[inline(always)]
    unsafe fn copy(&self, group: u32) {
        if group < self.groups {
            let first = self.first + group as i64 * GROUP_BLOCKS as i64;
            let at = first + thread::index() as i64;
            let to = place(group);
            let from = self.data.wrapping_add((at as u64).wrapping_mul(16));
            // SAFETY: the caller's; blocks of the share, or nothing of them.
            unsafe {
                if first >= self.begin && (first as u64 + GROUP_BLOCKS as u64) * 16 <= self.length {
                    copy_async::start(to, from, 16);
                    copy_async::start(to + SLOT_BYTES, from + SLOT_BYTES as u64, 16);
                    copy_async::start(to + 2 * SLOT_BYTES, from + 2 * SLOT_BYTES as u64, 16);
                    copy_async::start(to + 3 * SLOT_BYTES, from + 3 * SLOT_BYTES as u64, 16);
                } else {
                    let mut slot = 0;
                    while slot < SLOTS {
                        let at = at + (slot * APART) as i64;
                        let inside = at >= self.begin && 16 * (at as u64) < self.length;
                        let bytes = if inside { (self.length - 16 * at as u64).min(16) } else { 0 };
                        let from = self.data + if inside { 16 * at as u64 } else { 0 };
                        copy_async::start(to + slot * SLOT_BYTES, from, bytes as u32);
                        slot += 1;
                    }
                }
            }
        }
        // Of a group that isn't there too, so that the same number of groups is always under way.
        copy_async::commit();
    }
}

/// A thread's blocks of a group are so many, and so many bytes apart.
const SLOTS: u32 = 2 * GROUP as u32;
const SLOT_BYTES: u32 = 16 * APART;
const _: () = assert!(SLOTS == 4);

/// Where this thread's first block of a group lies in shared memory.
#[inline(always)]
fn place(group: u32) -> u32 {
    RING_AT + group % AHEAD * GROUP_BYTES + 16 * thread::index()
}

/// This thread's blocks of a group.
///
/// # Safety
/// This thread has copied them, and waited.
#[inline(always)]
unsafe fn load(group: u32) -> [Quad; 2 * GROUP] {
    let place = place(group);
    // SAFETY: the caller's.
    unsafe {
        [
            shared::load_16::<0>(place),
            shared::load_16::<SLOT_BYTES>(place),
            shared::load_16::<{ 2 * SLOT_BYTES }>(place),
            shared::load_16::<{ 3 * SLOT_BYTES }>(place),
        ]
    }
}
