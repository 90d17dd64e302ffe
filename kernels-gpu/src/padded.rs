//! Steps of a collective on records whose keystream was made ahead: XOR and GHASH at the speed of memory.
//!
//! A **pad** is the keystream of one record, in device memory: made by `pads_fill_*` from the record's nonce before there
//! is a text. Its [`PadHead`] says whose it is, and can be claimed once. A step claims the pads of its records; where one
//! isn't there, or is another record's, the block makes it by AES in memory of its own, and goes on: same bytes, only
//! later.
//!
//! A thread has its part of the next tile copied to shared memory while it works on this one (`cp.async`): 16 bytes of
//! each stream and block, 64 KiB a tile in all, in the place where the tables of AES lie when they are needed. So no
//! registers hold what is on its way.
//!
//! Cost of open, reduce, seal: 5 x 16 bytes of device memory a block (received, pad, local, pad, sent). At 4.2 TB/s that is
//! 838 GB/s of text. A tile of 1,024 blocks leaves an SM 5,400 cycles at 700 GB/s, of which ten products take 1,300 of the
//! tensor cores; 1,350 instructions a thread.

use crate::aes::{Keys, RoundKeys, Tables, xor};
use crate::device::{self, Quad, bits, copy_async, global, shared, thread, warp};
use crate::gcm::{FORGED, VERIFIED};
use crate::ghash::{
    self, APART, GROUP, GROUP_MATRICES_BYTES, GroupedChains, LANES_BYTES, LAST_BYTES, Matrices, THREADS,
    TILE, block_of, load_lanes, warp_sum,
};
use crate::params::{SHARED_BASE, TABLES_END};
use crate::record::{AAD_BLOCKS, AAD_BYTES, Call, Header};
use crate::reduce::{Reduction, combine_common, finish_common};
use crate::ring::store_quad;
use crate::sealed::{
    SealedKey, Stream, associated_data, inside, lengths, store_associated_data, with_associated_data,
};

/// What is known of a pad; beside it in device memory, secret as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(16))]
pub struct PadHead {
    /// The mask of the record's tag, E(K, J0).
    pub mask: Quad,
    /// Sequence and step of the record: the first 8 bytes of its nonce, as one number. See [`pad_name`].
    pub name: u64,
    /// The record's number and the key's serial number ([`pad_claim`]); 0 when there is no pad, or it is claimed. Written
    /// last.
    pub claim: u64,
    /// Blocks of the pad: a longer record's is another.
    pub blocks: u64,
    /// Bytes from one pad to the next, by which record i's pad lies i times that after the first.
    pub stride: u64,
}

/// Bytes of a [`PadHead`].
pub const HEAD_BYTES: u64 = size_of::<PadHead>() as u64;
const NAME: u64 = core::mem::offset_of!(PadHead, name) as u64;
const CLAIM: u64 = core::mem::offset_of!(PadHead, claim) as u64;
const BLOCKS: u64 = core::mem::offset_of!(PadHead, blocks) as u64;
const STRIDE: u64 = core::mem::offset_of!(PadHead, stride) as u64;

/// [`PadHead::name`] of the records of one step of a collective.
pub const fn pad_name(sequence: u64, step: u32) -> u64 {
    sequence << 16 | step as u64
}

/// [`PadHead::claim`] of record `record`, under the key with the serial number `serial`, which is not 0.
pub const fn pad_claim(serial: u32, record: u32) -> u64 {
    (serial as u64) << 32 | record as u64
}

/// Parameters of `pads_fill_*`. Pad i, of record i of a chunk of `bytes` bytes, lies at `pads + i * record_bytes`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct PadFillParams {
    /// The expanded key: [`expand_key`](crate::aes::expand_key).
    pub round_keys: RoundKeys,
    /// Address of the pads, a multiple of 16; whole blocks are written.
    pub pads: u64,
    /// Address of the [`PadHead`]s, whose claims are 0.
    pub heads: u64,
    /// Bytes of the chunk.
    pub bytes: u64,
    /// [`pad_name`].
    pub name: u64,
    /// Length of a record, a multiple of 16, at most [`LONGEST_RECORD`](crate::sealed::LONGEST_RECORD).
    pub record_bytes: u32,
    /// How many pads, from the chunk's first record on.
    pub count: u32,
    /// Which key it is: not 0, and no other's while the heads last.
    pub serial: u32,
    /// For [`ChunkPads::count`].
    pub slot_records: u32,
    /// Address of a [`ChunkPads`] to write, that says where these pads are; 0 for none.
    pub entry: u64,
    /// For [`ChunkPads::misses`].
    pub misses: u64,
}

/// Where pads of one sender's records of one chunk may be, for the persistent kernels: pad i at `pads + i * record_bytes`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ChunkPads {
    /// Address of the pads.
    pub pads: u64,
    /// Address of their [`PadHead`]s.
    pub heads: u64,
    /// How many pads there may be, from the first record on. 0 for none.
    pub count: u32,
    /// The serial number of the sender's key, as the heads have it.
    pub serial: u32,
    /// Address of a word that counts pads that were not there.
    pub misses: u64,
}

impl ChunkPads {
    /// No pads.
    pub const NONE: Self = Self { pads: 0, heads: 0, count: 0, serial: 0, misses: 0 };
}

impl ChunkPads {
    /// Reads an entry of a table.
    ///
    /// # Safety
    /// `entry` is the device address of one, aligned to 16 bytes.
    #[inline(always)]
    pub(crate) unsafe fn load(entry: u64) -> Self {
        // SAFETY: the caller's; an entry is two quads.
        let (a, b) = unsafe { (global::load_16(entry), global::load_16(entry + 16)) };
        let double = |low: u32, high: u32| low as u64 | (high as u64) << 32;
        Self {
            pads: double(a[0], a[1]),
            heads: double(a[2], a[3]),
            count: b[0],
            serial: b[1],
            misses: double(b[2], b[3]),
        }
    }

    /// Writes an entry of a table.
    ///
    /// # Safety
    /// As [`Self::load`], and nobody reads it meanwhile.
    #[inline(always)]
    unsafe fn store(&self, entry: u64) {
        let halves = |double: u64| [double as u32, (double >> 32) as u32];
        let ([a, b], [c, d], [e, f]) = (halves(self.pads), halves(self.heads), halves(self.misses));
        // SAFETY: the caller's.
        unsafe {
            global::store_16(entry, [a, b, c, d]);
            global::store_16(entry + 16, [self.count, self.serial, e, f]);
        }
    }
}

/// One of the two sides of a step: the records that it opens, or those that it seals.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct PaddedSide {
    /// The key.
    pub key: SealedKey,
    /// Address of the pads, laid out as in [`PadFillParams`].
    pub pads: u64,
    /// Address of the [`PadHead`]s.
    pub heads: u64,
    /// How many pads there may be, from the chunk's first record on. 0 for none.
    pub count: u32,
    /// As in [`PadFillParams`].
    pub serial: u32,
    /// The rank that seals.
    pub sender: u32,
    /// The step in which it seals.
    pub step: u32,
}

/// Parameters of the steps on one chunk. Addresses are multiples of 16.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct PaddedParams {
    /// What the records' additional data say of the collective.
    pub call: Call,
    /// What is opened.
    pub opens: PaddedSide,
    /// What is sealed.
    pub seals: PaddedSide,
    /// The collective's number.
    pub sequence: u64,
    /// The ciphertext that is opened, readable to the next multiple of 16; the plaintext where nothing is.
    pub input: u64,
    /// What is reduced into the opened text.
    pub local: u64,
    /// Where plaintext goes; may be `local`.
    pub output: u64,
    /// Where ciphertext goes, writable to the next multiple of 16.
    pub sent: u64,
    /// Tags of the records that are opened, 16 bytes each.
    pub tags_in: u64,
    /// Tags of the sealed records. Zeros where what went into the record was forged.
    pub tags_out: u64,
    /// A word for each record that is opened: [`VERIFIED`] or [`FORGED`]. A forged record leaves zeros in the output.
    pub verdicts: u64,
    /// Memory for pads that are not there: two records for each block.
    pub scratch: u64,
    /// A word that counts pads that were not there.
    pub misses: u64,
    /// Bytes of the chunk.
    pub bytes: u64,
    /// As in [`PadFillParams`].
    pub record_bytes: u32,
    /// Rounds of AES: 10 or 14.
    pub rounds: u32,
    /// Element type and operation, one of [`is_common`](crate::reduce::is_common).
    pub reduction: Reduction,
    /// Ranks, by which an average is divided.
    pub ranks: u32,
}

// Shared memory: the tables of AES, or what records need, then the matrices.
const STAGE: u32 = SHARED_BASE;
/// 16 bytes of each thread.
const PLANE: u32 = 16 * THREADS;
const STAGE_BYTES: u32 = 8 * PLANE;
/// The tiles that wait for the next to be multiplied with it: in registers, they would be too many.
const EARLIER_IN: u32 = STAGE + STAGE_BYTES;
const EARLIER_IN_2: u32 = EARLIER_IN + PLANE;
const EARLIER_OUT: u32 = EARLIER_IN + 2 * PLANE;
const EARLIER_OUT_2: u32 = EARLIER_OUT + PLANE;
const LANES_IN: u32 = EARLIER_IN + 4 * PLANE;
const LANES_OUT: u32 = LANES_IN + LANES_BYTES;
const LAST_IN: u32 = LANES_OUT + LANES_BYTES;
const LAST_OUT: u32 = LAST_IN + LAST_BYTES;
const PARTS: u32 = LAST_OUT + LAST_BYTES;
const PARTS_BYTES: u32 = 4 * 16;
const ASSOCIATED: u32 = PARTS + 2 * PARTS_BYTES;
const _: () = assert!(ASSOCIATED + THREADS / 32 * 2 * AAD_BYTES <= TABLES_END);
const MATRICES_IN: u32 = TABLES_END;
const MATRICES_OUT: u32 = MATRICES_IN + GROUP_MATRICES_BYTES;
/// Of the record before, this one and the next, in turn: masks of the tags in and out, where the pads lie, and which of
/// them are claimed.
const CLAIMS: u32 = MATRICES_OUT + GROUP_MATRICES_BYTES;
const CLAIMS_BYTES: u32 = 4 * 16;
const PADS: u32 = 32;
const CLAIMED: u32 = 48;
const TURNS: u32 = 3;
/// Dynamic shared memory of the steps.
pub const PADDED_SHARED: u32 = CLAIMS + TURNS * CLAIMS_BYTES - SHARED_BASE;
/// Dynamic shared memory of `pads_fill_*`.
pub const PAD_FILL_SHARED: u32 = TABLES_END - SHARED_BASE;

// The planes of the stage, two each.
const FIRST: u32 = STAGE;
const FIRST_2: u32 = FIRST + PLANE;
const LOCAL: u32 = STAGE + 2 * PLANE;
const LOCAL_2: u32 = LOCAL + PLANE;
const PAD_IN: u32 = STAGE + 4 * PLANE;
const PAD_IN_2: u32 = PAD_IN + PLANE;
const PAD_OUT: u32 = STAGE + 6 * PLANE;
const PAD_OUT_2: u32 = PAD_OUT + PLANE;

/// From a thread's first block of a tile to its second, in bytes.
const APART_BYTES: u64 = 16 * APART as u64;

/// The warp that claims the next record's pads.
const CLAIMER: u32 = 15;

#[inline(always)]
const fn next_turn(turn: u32) -> u32 {
    if turn + 1 == TURNS { 0 } else { turn + 1 }
}

/// One record of the chunk.
#[derive(Clone, Copy)]
struct Place {
    index: u32,
    bytes: u32,
    /// Where it starts in the chunk, in quads.
    start: u32,
    tiles: u32,
    /// Zero blocks before the text in its first tile.
    pad: u32,
}

impl Place {
    #[inline(always)]
    fn new(params: &PaddedParams, index: u32) -> Self {
        let start = index * (params.record_bytes / 16);
        let bytes = (params.bytes - 16 * start as u64).min(params.record_bytes as u64) as u32;
        let blocks = bytes.div_ceil(16);
        let tiles = blocks.div_ceil(TILE);
        Place { index, bytes, start, tiles, pad: tiles * TILE - blocks }
    }

    /// This thread's first block in the first tile, counted from the text's first.
    #[inline(always)]
    fn first(&self) -> i32 {
        block_of(thread::index(), 0) as i32 - self.pad as i32
    }

    #[inline(always)]
    fn header(&self, params: &PaddedParams, side: &PaddedSide) -> Header {
        Header {
            call: params.call,
            sequence: params.sequence,
            sender: side.sender,
            step: side.step,
            record: self.index,
            last: 16 * self.start as u64 + self.bytes as u64 == params.bytes,
        }
    }

    /// Where block `at` of the record lies in the chunk at `chunk`. Computed anew each time: kept, the addresses would take
    /// ten registers.
    #[inline(always)]
    fn address(&self, chunk: u64, at: i32) -> u64 {
        chunk.wrapping_add_signed(16 * bits::opaque(self.start).wrapping_add_signed(at) as i32 as i64)
    }
}

/// Bits of the word at [`CLAIMED`].
const CLAIMED_IN: u32 = 1;
const CLAIMED_OUT: u32 = 2;

/// Which pads of a record are claimed, from one lane, so that the compiler sees that it is uniform.
///
/// # Safety
/// The claims of `turn` are stored, before a barrier.
#[inline(always)]
unsafe fn claimed(turn: u32) -> u32 {
    // SAFETY: the caller's.
    unsafe { warp::shuffle(shared::load_u32::<{ CLAIMS + CLAIMED }>(turn * CLAIMS_BYTES), 0) }
}

/// Whether no pad of a record is missing.
///
/// # Safety
/// As [`claimed`].
#[inline(always)]
unsafe fn ready<const OPENS: bool, const SEALS: bool>(turn: u32) -> bool {
    let needed = if OPENS { CLAIMED_IN } else { 0 } | if SEALS { CLAIMED_OUT } else { 0 };
    // SAFETY: the caller's.
    unsafe { claimed(turn) == needed }
}

/// Where block `at` of a record's keystream lies, in and out. Loaded each time: see [`Place::address`].
///
/// # Safety
/// As [`claimed`].
#[inline(always)]
unsafe fn pad_in(turn: u32, at: i32) -> u64 {
    // SAFETY: the caller's.
    let [low, high, ..] = unsafe { shared::load_16::<{ CLAIMS + PADS }>(turn * CLAIMS_BYTES) };
    (low as u64 | (high as u64) << 32).wrapping_add_signed(16 * at as i64)
}

/// See [`pad_in`].
///
/// # Safety
/// As [`claimed`].
#[inline(always)]
unsafe fn pad_out(turn: u32, at: i32) -> u64 {
    // SAFETY: the caller's.
    let [.., low, high] = unsafe { shared::load_16::<{ CLAIMS + PADS }>(turn * CLAIMS_BYTES) };
    (low as u64 | (high as u64) << 32).wrapping_add_signed(16 * at as i64)
}

/// Claims a record's pad, and stores the record's mask: whether it was there. By one thread.
///
/// # Safety
/// The heads are alive; `mask` is this thread's until the next barrier.
#[inline(always)]
unsafe fn claim_pad(params: &PaddedParams, side: &PaddedSide, place: &Place, mask: u32) -> bool {
    if place.index >= side.count {
        return false;
    }
    let head = side.heads + HEAD_BYTES * place.index as u64;
    let claim = pad_claim(side.serial, place.index);
    let name = pad_name(params.sequence, side.step);
    // SAFETY: the caller's.
    unsafe { claim_head(head, claim, name, place.bytes, mask) }
}

/// Claims the pad whose head is at `head` for a record of `bytes` bytes, and stores the record's mask: whether it was
/// there. By one thread.
///
/// # Safety
/// As [`claim_pad`].
#[inline(always)]
pub(crate) unsafe fn claim_head(head: u64, claim: u64, name: u64, bytes: u32, mask: u32) -> bool {
    // SAFETY: the caller's. The rest of a head doesn't change while the claim stands, nor after this thread has taken
    // it.
    unsafe {
        if global::compare_exchange_u64(head + CLAIM, claim, 0) != claim
            || global::load_volatile_u64(head + NAME) != name
            || global::load_volatile_u64(head + BLOCKS) < bytes.div_ceil(16) as u64
        {
            return false;
        }
        shared::store_16::<0>(mask, global::load_volatile_16(head));
    }
    true
}

/// Claims the pad of record `record` of a chunk, of `bytes` bytes in records of `stride` bytes, that its sender seals in
/// step `step` of collective `sequence`, counted from 0; stores the record's mask. Whether it was there. By one thread.
///
/// # Safety
/// As [`claim_pad`]; the chunk's heads are alive.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "what names a record, and a place")]
pub(crate) unsafe fn claim_of_chunk(
    pads: &ChunkPads,
    sequence: u64,
    step: u32,
    record: u32,
    bytes: u32,
    stride: u32,
    mask: u32,
) -> bool {
    let head = pads.heads + HEAD_BYTES * record as u64;
    let (claim, name) = (pad_claim(pads.serial, record), pad_name(sequence, step));
    // SAFETY: the caller's; there are `count` heads. The rest of a head doesn't change while the claim stands, nor after this
    // thread has taken it.
    unsafe {
        let mut claimed =
            record < pads.count && global::compare_exchange_u64(head + CLAIM, claim, 0) == claim;
        if claimed {
            // All under way at once: the record waits for this.
            let (found, blocks) =
                (global::load_volatile_u64(head + NAME), global::load_volatile_u64(head + BLOCKS));
            let (apart, tag) = (global::load_volatile_u64(head + STRIDE), global::load_volatile_16(head));
            claimed = (found == name) & (blocks >= bytes.div_ceil(16) as u64) & (apart == stride as u64);
            shared::store_16::<0>(mask, tag);
        }
        if !claimed && pads.misses != 0 {
            global::add_u32(pads.misses, 1);
        }
        claimed
    }
}

/// Claims the pads of record `index`, if there is such a record. By one thread.
///
/// # Safety
/// As [`claim_pad`], for the claims of `turn`.
#[inline(always)]
unsafe fn claim_pads<const OPENS: bool, const SEALS: bool>(params: &PaddedParams, index: u32, turn: u32) {
    if index as u64 * params.record_bytes as u64 >= params.bytes {
        return;
    }
    let claims = CLAIMS + turn * CLAIMS_BYTES;
    let place = Place::new(params, index);
    let start = 16 * place.start as u64;
    let scratch = params.scratch + 2 * thread::block_index() as u64 * params.record_bytes as u64;
    // SAFETY: the caller's.
    unsafe {
        let opens = OPENS && claim_pad(params, &params.opens, &place, claims);
        let seals = SEALS && claim_pad(params, &params.seals, &place, claims + 16);
        let pad_in = if opens { params.opens.pads + start } else { scratch };
        let pad_out = if seals { params.seals.pads + start } else { scratch + params.record_bytes as u64 };
        let pads = [pad_in as u32, (pad_in >> 32) as u32, pad_out as u32, (pad_out >> 32) as u32];
        shared::store_16::<PADS>(claims, pads);
        let claimed = if opens { CLAIMED_IN } else { 0 } | if seals { CLAIMED_OUT } else { 0 };
        shared::store_u32::<CLAIMED>(claims, claimed);
        let missing = (OPENS && !opens) as u32 + (SEALS && !seals) as u32;
        if missing != 0 {
            global::add_u32(params.misses, missing);
        }
    }
}

/// Makes the pad of one record, by the whole block.
///
/// # Safety
/// The tables are filled; `pad` is writable for whole blocks.
#[inline(always)]
pub(crate) unsafe fn make_pad<const ROUNDS: usize>(
    tables: Tables,
    keys: impl Keys,
    header: &Header,
    pad: u64,
    bytes: u32,
) {
    let blocks = bytes.div_ceil(16) as i32;
    let mut at = block_of(thread::index(), 0) as i32;
    let stream = Stream::<ROUNDS>::new(tables, keys, header, at);
    while at < blocks {
        let [first, second] = stream.key_stream(tables, keys, at);
        // SAFETY: the caller's.
        unsafe {
            global::store_16(pad + 16 * at as u64, first);
            if at + (APART as i32) < blocks {
                global::store_16(pad + 16 * (at as u64 + APART as u64), second);
            }
        }
        at += TILE as i32;
    }
}

/// E(K, J0), by any thread.
#[inline(always)]
fn mask<const ROUNDS: usize>(tables: Tables, keys: &RoundKeys, header: &Header) -> Quad {
    let [a, b, c] = header.nonce();
    let [mask] = tables.encrypt::<ROUNDS, 1>(keys, [[a, b, c, 1u32.swap_bytes()]]);
    mask
}

/// Makes a pad that is missing, and its record's mask.
///
/// # Safety
/// As [`make_pad`]; the mask's place is nobody's until the next barrier.
#[inline(always)]
unsafe fn make_missing<const ROUNDS: usize>(
    tables: Tables,
    keys: &RoundKeys,
    header: &Header,
    pad: u64,
    bytes: u32,
    mask_at: u32,
) {
    // SAFETY: the caller's.
    unsafe {
        make_pad::<ROUNDS>(tables, keys, header, pad, bytes);
        if thread::warp() == 0 {
            let mask = mask::<ROUNDS>(tables, keys, header);
            if thread::lane() == 0 {
                shared::store_16::<0>(mask_at, mask);
            }
        }
    }
}

/// Makes a record's missing pads, with the tables of AES in place of all that records need in shared memory.
///
/// # Safety
/// All threads of the block; the record's claims are stored.
#[inline(always)]
unsafe fn make_missing_pads<const OPENS: bool, const SEALS: bool>(
    params: &PaddedParams,
    place: &Place,
    turn: u32,
) {
    let claims = CLAIMS + turn * CLAIMS_BYTES;
    device::sync_threads();
    let tables = Tables::fill::<THREADS>();
    device::sync_threads();
    // SAFETY: the caller's; the scratch memory is this block's.
    unsafe {
        let claimed = claimed(turn);
        if OPENS && claimed & CLAIMED_IN == 0 {
            let (keys, header) = (&params.opens.key.round_keys, place.header(params, &params.opens));
            match params.rounds {
                10 => make_missing::<10>(tables, keys, &header, pad_in(turn, 0), place.bytes, claims),
                _ => make_missing::<14>(tables, keys, &header, pad_in(turn, 0), place.bytes, claims),
            }
        }
        if SEALS && claimed & CLAIMED_OUT == 0 {
            let (keys, header) = (&params.seals.key.round_keys, place.header(params, &params.seals));
            match params.rounds {
                10 => make_missing::<10>(tables, keys, &header, pad_out(turn, 0), place.bytes, claims + 16),
                _ => make_missing::<14>(tables, keys, &header, pad_out(turn, 0), place.bytes, claims + 16),
            }
        }
    }
    device::sync_threads();
    // SAFETY: the caller's.
    unsafe { load_all_lanes::<OPENS, SEALS>(params) };
    device::sync_threads();
}

/// # Safety
/// The keys are filled; visible after the next barrier.
#[inline(always)]
unsafe fn load_all_lanes<const OPENS: bool, const SEALS: bool>(params: &PaddedParams) {
    // SAFETY: the caller's.
    unsafe {
        if OPENS {
            load_lanes(params.opens.key.ghash_key, LANES_IN);
        }
        if SEALS {
            load_lanes(params.seals.key.ghash_key, LANES_OUT);
        }
    }
}

/// Overwrites this thread's part of the pads that its block has made.
///
/// # Safety
/// No thread reads them any more.
#[inline(always)]
unsafe fn wipe_scratch(params: &PaddedParams) {
    let scratch = params.scratch + 2 * thread::block_index() as u64 * params.record_bytes as u64;
    let mut at = 16 * thread::index();
    while at < 2 * params.record_bytes {
        // SAFETY: the block's scratch memory.
        unsafe { global::store_16(scratch + at as u64, [0; 4]) };
        at += 16 * THREADS;
    }
}

/// Starts to copy this thread's two blocks of a tile, the first of which is block `at` of the text and lies at `source`, to
/// its places in the planes at `TO`; what lies outside the text becomes zeros.
///
/// # Safety
/// The text is readable and aligned to 16; the places are not read until the copies have been waited for.
#[inline(always)]
unsafe fn fetch<const TO: u32, const SECOND: u32>(source: u64, at: i32, bytes: u32) {
    const { assert!(SECOND == TO + PLANE) };
    let size = |at: i32| if at < 0 { 0 } else { bytes.saturating_sub(16 * at as u32).min(16) };
    let place = 16 * thread::index();
    // SAFETY: the caller's.
    unsafe {
        copy_async::start(place + TO, source, size(at));
        copy_async::start(place + SECOND, source.wrapping_add(APART_BYTES), size(at + APART as i32));
    }
    copy_async::commit();
}

/// What [`fetch`] brought.
///
/// # Safety
/// It has been waited for.
#[inline(always)]
unsafe fn fetched<const TO: u32, const SECOND: u32>() -> [Quad; 2] {
    let place = 16 * thread::index();
    // SAFETY: this thread's places.
    unsafe { [shared::load_16::<TO>(place), shared::load_16::<SECOND>(place)] }
}

/// Chains for a record of `tiles` tiles; what [`take`] needs of them first is stored in the planes at `AT`. `before` is
/// the thread's second block of the tile before the first.
///
/// # Safety
/// The planes are the chains'.
#[inline(always)]
unsafe fn chains<const AT: u32, const SECOND: u32>(before: Quad, tiles: u32) -> GroupedChains {
    if tiles.is_multiple_of(GROUP as u32) {
        return GroupedChains::new(before, 0);
    }
    // SAFETY: the caller's.
    unsafe { keep_earlier::<AT, SECOND>([[0; 4], before]) };
    GroupedChains::new([0; 4], 0)
}

/// As [`GroupedChains::take`], with the tile that waits for the next in two planes.
///
/// # Safety
/// As [`GroupedChains::take`]; the chains and planes are those of [`chains`].
#[inline(always)]
unsafe fn take<const AT: u32, const SECOND: u32>(
    chains: &mut GroupedChains,
    blocks: [Quad; 2],
    left: u32,
    matrices: Matrices,
) {
    // SAFETY: the caller's; this thread's places.
    unsafe {
        if left.is_multiple_of(GROUP as u32) {
            let [a, b] = fetched::<AT, SECOND>();
            chains.take_group([a, b, blocks[0], blocks[1]], matrices);
        } else {
            keep_earlier::<AT, SECOND>(blocks);
        }
    }
}

/// Stores the tile that waits for the next.
///
/// # Safety
/// The planes at `AT` are the chains'.
#[inline(always)]
unsafe fn keep_earlier<const AT: u32, const SECOND: u32>(blocks: [Quad; 2]) {
    let place = 16 * thread::index();
    // SAFETY: this thread's places.
    unsafe {
        shared::store_16::<AT>(place, blocks[0]);
        shared::store_16::<SECOND>(place, blocks[1]);
    }
}

/// Streams that a step reads, and copies of each tile that are under way when the next but these is waited for.
const fn streams(opens: bool, reduces: bool, seals: bool) -> u32 {
    1 + opens as u32 + reduces as u32 + seals as u32
}

/// Waits for a thread's oldest copies, of so many streams.
#[inline(always)]
fn wait_oldest<const OPENS: bool, const REDUCES: bool, const SEALS: bool>() {
    match const { streams(OPENS, REDUCES, SEALS) } {
        2 => copy_async::wait::<1>(),
        3 => copy_async::wait::<2>(),
        _ => copy_async::wait::<3>(),
    }
}

/// Starts all copies of a record's first tile, in the order in which they are waited for.
///
/// # Safety
/// As [`fetch`].
#[inline(always)]
unsafe fn fetch_first<const OPENS: bool, const REDUCES: bool, const SEALS: bool>(
    params: &PaddedParams,
    place: &Place,
    turn: u32,
) {
    let (at, bytes) = (place.first(), place.bytes);
    // SAFETY: the caller's.
    unsafe {
        fetch::<FIRST, FIRST_2>(place.address(params.input, at), at, bytes);
        if OPENS {
            fetch::<PAD_IN, PAD_IN_2>(pad_in(turn, at), at, bytes);
        }
        if REDUCES {
            fetch::<LOCAL, LOCAL_2>(place.address(params.local, at), at, bytes);
        }
        if SEALS {
            fetch::<PAD_OUT, PAD_OUT_2>(pad_out(turn, at), at, bytes);
        }
    }
}

/// Stores a block of plaintext at `address`, or the part of it that is in the text.
///
/// # Safety
/// The text is writable and aligned to 16.
#[inline(always)]
unsafe fn store_text(address: u64, at: i32, bytes: u32, whole: bool, block: Quad) {
    // SAFETY: the caller's.
    unsafe {
        if whole {
            global::store_16(address, block);
        } else if at >= 0 {
            store_quad(address, 0, bytes.saturating_sub(16 * at as u32), block);
        }
    }
}

/// Stores a block of ciphertext at `address`, if it is one of the text's.
///
/// # Safety
/// The text is writable to the next multiple of 16, and aligned to it.
#[inline(always)]
unsafe fn store_sent(address: u64, at: i32, bytes: u32, whole: bool, block: Quad) {
    if whole || at >= 0 && 16 * (at as u32) < bytes {
        // SAFETY: the caller's.
        unsafe { global::store_16(address, block) };
    }
}

/// Stores part `part` of the sum for a tag, by one warp.
///
/// # Safety
/// The words are stored, before a barrier; the place is this warp's until the next.
#[inline(always)]
unsafe fn store_part(last: u32, lanes: u32, part: u32, parts: u32) {
    // SAFETY: the caller's.
    unsafe {
        let sum = warp_sum(ghash::part(last, lanes, part));
        if thread::lane().is_multiple_of(8) {
            shared::store_u32::<0>(parts + 16 * part + thread::lane() / 2, sum);
        }
    }
}

/// The tag from the parts and the mask.
///
/// # Safety
/// They are stored, before a barrier.
#[inline(always)]
unsafe fn tag(parts: u32, mask: u32) -> Quad {
    // SAFETY: the caller's.
    let ([a, b, c, d], mask) = unsafe {
        let low = xor(shared::load_16::<0>(parts), shared::load_16::<16>(parts));
        let high = xor(shared::load_16::<32>(parts), shared::load_16::<48>(parts));
        (xor(low, high), shared::load_16::<0>(mask))
    };
    xor([a.swap_bytes(), b.swap_bytes(), c.swap_bytes(), d.swap_bytes()], mask)
}

/// One warp: overwrites a forged record's output.
///
/// # Safety
/// The block's stores of it came before a barrier.
#[inline(always)]
unsafe fn wipe<const STORES: bool, const SEALS: bool>(params: &PaddedParams, place: &Place) {
    let blocks = place.bytes.div_ceil(16);
    let mut at = thread::lane() as i32;
    while at < blocks as i32 {
        // SAFETY: the record's outputs.
        unsafe {
            if STORES {
                store_text(place.address(params.output, at), at, place.bytes, false, [0; 4]);
            }
            if SEALS {
                store_sent(place.address(params.sent, at), at, place.bytes, false, [0; 4]);
            }
        }
        at += 32;
    }
    device::fence::system();
    warp::sync();
}

/// The steps' body.
///
/// # Safety
/// The addresses in the parameters are valid.
#[inline(always)]
unsafe fn padded<const OPENS: bool, const REDUCES: bool, const STORES: bool, const SEALS: bool>(
    params: &PaddedParams,
) {
    let grid = thread::grid_size();
    let records = params.bytes.div_ceil(params.record_bytes as u64) as u32;
    let mut index = thread::block_index();
    if index >= records {
        return;
    }
    let mut turn = 0;
    let (matrices_in, matrices_out) = (GroupedChains::at(MATRICES_IN), GroupedChains::at(MATRICES_OUT));
    // SAFETY: the regions of shared memory are disjoint; the keys are filled.
    unsafe {
        if OPENS {
            Matrices::load_group(params.opens.key.ghash_key, MATRICES_IN);
        }
        if SEALS {
            Matrices::load_group(params.seals.key.ghash_key, MATRICES_OUT);
        }
        load_all_lanes::<OPENS, SEALS>(params);
        if thread::index() == 32 * CLAIMER {
            claim_pads::<OPENS, SEALS>(params, index, turn);
        }
    }
    device::sync_threads();
    let aad_in = ASSOCIATED + thread::warp() * 2 * AAD_BYTES;
    let aad_out = aad_in + AAD_BYTES;
    let mut place = Place::new(params, index);
    // SAFETY: claimed above.
    let mut made_ahead = unsafe { ready::<OPENS, SEALS>(turn) };
    let mut fetching = false;
    while index < records {
        // SAFETY: all threads come here alike; this warp's places and this turn's claims were last used before the latest
        // barrier.
        unsafe {
            if !made_ahead {
                make_missing_pads::<OPENS, SEALS>(params, &place, turn);
            }
            if !fetching {
                fetch_first::<OPENS, REDUCES, SEALS>(params, &place, turn);
            }
            if thread::index() == 32 * CLAIMER {
                claim_pads::<OPENS, SEALS>(params, index + grid, next_turn(turn));
            }
            if OPENS {
                store_associated_data(&place.header(params, &params.opens), aad_in);
            }
            if SEALS {
                store_associated_data(&place.header(params, &params.seals), aad_out);
            }
        }
        let (tiles, pad, bytes) = (place.tiles, place.pad, place.bytes);
        // The additional data that would lie in the tile before the first.
        let before = block_of(thread::index(), 1) as i32 - TILE as i32 - pad as i32;
        let (mut chains_in, mut chains_out) = (GroupedChains::new([0; 4], 0), GroupedChains::new([0; 4], 0));
        // SAFETY: stored above by this warp; this thread's places.
        unsafe {
            let aad = |place: u32| if pad < AAD_BLOCKS { associated_data(place, before) } else { [0; 4] };
            if OPENS {
                chains_in = chains::<EARLIER_IN, EARLIER_IN_2>(aad(aad_in), tiles);
            }
            if SEALS {
                chains_out = chains::<EARLIER_OUT, EARLIER_OUT_2>(aad(aad_out), tiles);
            }
        }
        let mut at = place.first();
        let mut tile = 0;
        while tile < tiles {
            let whole = tile * TILE >= pad && (tile + 1 < tiles || bytes.is_multiple_of(16));
            let left = tiles - 1 - tile;
            let (second, next) = (at + APART as i32, at + TILE as i32);
            // SAFETY: this thread's copies, which it has waited for; all threads of the block run this loop alike.
            unsafe {
                wait_oldest::<OPENS, REDUCES, SEALS>();
                let mut values = fetched::<FIRST, FIRST_2>();
                fetch::<FIRST, FIRST_2>(place.address(params.input, next), next, bytes);
                if OPENS {
                    let text = if whole { values } else { with_associated_data(aad_in, at, values) };
                    take::<EARLIER_IN, EARLIER_IN_2>(&mut chains_in, text, left, matrices_in);
                    wait_oldest::<OPENS, REDUCES, SEALS>();
                    let key_stream = fetched::<PAD_IN, PAD_IN_2>();
                    fetch::<PAD_IN, PAD_IN_2>(pad_in(turn, next), next, bytes);
                    values = [xor(values[0], key_stream[0]), xor(values[1], key_stream[1])];
                }
                if REDUCES {
                    wait_oldest::<OPENS, REDUCES, SEALS>();
                    let local = fetched::<LOCAL, LOCAL_2>();
                    fetch::<LOCAL, LOCAL_2>(place.address(params.local, next), next, bytes);
                    values = [
                        combine_common(params.reduction, values[0], local[0]),
                        combine_common(params.reduction, values[1], local[1]),
                    ];
                }
                if STORES {
                    if REDUCES {
                        values = [
                            finish_common(params.reduction, params.ranks, values[0]),
                            finish_common(params.reduction, params.ranks, values[1]),
                        ];
                    }
                    let output = place.address(params.output, at);
                    store_text(output, at, bytes, whole, values[0]);
                    store_text(output + APART_BYTES, second, bytes, whole, values[1]);
                }
                if SEALS {
                    wait_oldest::<OPENS, REDUCES, SEALS>();
                    let key_stream = fetched::<PAD_OUT, PAD_OUT_2>();
                    fetch::<PAD_OUT, PAD_OUT_2>(pad_out(turn, next), next, bytes);
                    let mut sent = [xor(values[0], key_stream[0]), xor(values[1], key_stream[1])];
                    if !whole {
                        sent = [inside(sent[0], at, bytes), inside(sent[1], second, bytes)];
                    }
                    let output = place.address(params.sent, at);
                    store_sent(output, at, bytes, whole, sent[0]);
                    store_sent(output + APART_BYTES, second, bytes, whole, sent[1]);
                    let text = if whole { sent } else { with_associated_data(aad_out, at, sent) };
                    take::<EARLIER_OUT, EARLIER_OUT_2>(&mut chains_out, text, left, matrices_out);
                }
            }
            at = next;
            tile += 1;
        }
        copy_async::wait::<0>();
        // SAFETY: these places were last read before the latest barrier, and each is written before one.
        unsafe {
            if OPENS {
                let word = chains_in.last(lengths(bytes), matrices_in);
                shared::store_u32::<LAST_IN>(4 * thread::index(), word);
            }
            if SEALS {
                let word = chains_out.last(lengths(bytes), matrices_out);
                shared::store_u32::<LAST_OUT>(4 * thread::index(), word);
            }
            device::sync_threads();
            if !made_ahead {
                wipe_scratch(params);
            }
            let (done, masks) = (place, CLAIMS + turn * CLAIMS_BYTES);
            index += grid;
            turn = next_turn(turn);
            if index < records {
                place = Place::new(params, index);
                made_ahead = ready::<OPENS, SEALS>(turn);
                fetching = made_ahead;
                if fetching {
                    fetch_first::<OPENS, REDUCES, SEALS>(params, &place, turn);
                }
            }
            let (warp, part) = (thread::warp(), thread::warp() % 4);
            if OPENS && warp < 4 {
                store_part(LAST_IN, LANES_IN, part, PARTS);
            }
            if SEALS && (4..8).contains(&warp) {
                store_part(LAST_OUT, LANES_OUT, part, PARTS + PARTS_BYTES);
            }
            device::sync_threads();
            if warp == 0 {
                end::<OPENS, STORES, SEALS>(params, &done, masks);
            }
        }
    }
}

/// One warp: compares and writes a record's tags and its verdict.
///
/// # Safety
/// Parts and masks are stored, before a barrier; so are all texts of the record.
#[inline(always)]
unsafe fn end<const OPENS: bool, const STORES: bool, const SEALS: bool>(
    params: &PaddedParams,
    place: &Place,
    masks: u32,
) {
    // SAFETY: the caller's; the record's tags and verdict.
    unsafe {
        let mut forged = false;
        if OPENS {
            let [a, b, c, d] =
                xor(tag(PARTS, masks), global::load_volatile_16(params.tags_in + 16 * place.index as u64));
            // All bits at once (SP 800-38D, 7.2, step 8); from one lane, so that the compiler sees that it is uniform.
            forged = warp::shuffle(a | b | c | d, 0) != 0;
            if forged {
                wipe::<STORES, SEALS>(params, place);
            }
        }
        if SEALS {
            let tag = tag(PARTS + PARTS_BYTES, masks + 16);
            if thread::lane() == 0 {
                let tag = if forged { [0; 4] } else { tag };
                global::store_16(params.tags_out + 16 * place.index as u64, tag);
            }
        }
        if OPENS && thread::lane() == 0 {
            let verdict = if forged { FORGED } else { VERIFIED };
            global::store_u32(params.verdicts + 4 * place.index as u64, verdict);
        }
    }
}

/// The body of `pads_fill_*`: a record's pad and mask, then its claim for all to see.
///
/// # Safety
/// The addresses in the parameters are valid.
#[inline(always)]
unsafe fn fill<const ROUNDS: usize>(params: &PadFillParams) {
    let tables = Tables::fill::<THREADS>();
    device::sync_threads();
    let mut index = thread::block_index();
    if params.entry != 0 && index == 0 && thread::index() == 0 {
        let pads = ChunkPads {
            pads: params.pads,
            heads: params.heads,
            count: params.slot_records,
            serial: params.serial,
            misses: params.misses,
        };
        // SAFETY: the entry is nobody else's while this kernel runs.
        unsafe { pads.store(params.entry) };
    }
    while index < params.count {
        let start = index as u64 * params.record_bytes as u64;
        let bytes = (params.bytes - start).min(params.record_bytes as u64) as u32;
        let header = Header {
            call: Call { codes: [0; 4], count: 0, ranks: 0, reserved: 0 },
            sequence: params.name >> 16,
            sender: 0,
            step: params.name as u32 & 0xffff,
            record: index,
            last: false,
        };
        let head = params.heads + HEAD_BYTES * index as u64;
        // SAFETY: the pad and the head of this record.
        unsafe {
            make_pad::<ROUNDS>(tables, &params.round_keys, &header, params.pads + start, bytes);
            if thread::warp() == 0 {
                let mask = mask::<ROUNDS>(tables, &params.round_keys, &header);
                if thread::lane() == 0 {
                    global::store_16(head, mask);
                    global::store_u64(head + NAME, params.name);
                    global::store_u64(head + BLOCKS, bytes.div_ceil(16) as u64);
                    global::store_u64(head + STRIDE, params.record_bytes as u64);
                }
            }
            device::sync_threads();
            if thread::index() == 0 {
                global::store_release_sys(head + CLAIM, pad_claim(params.serial, index));
            }
        }
        index += thread::grid_size();
    }
}

kernel! {
    threads = 512,
    shared = PAD_FILL_SHARED,
    /// Makes pads ahead of time, AES-128.
    fn pads_fill_128(params: PadFillParams) {
        // SAFETY: by the launcher's promise.
        unsafe { fill::<10>(&params) }
    }
}

kernel! {
    threads = 512,
    shared = PAD_FILL_SHARED,
    /// Makes pads ahead of time, AES-256.
    fn pads_fill_256(params: PadFillParams) {
        // SAFETY: by the launcher's promise.
        unsafe { fill::<14>(&params) }
    }
}

kernel! {
    threads = 512,
    shared = PADDED_SHARED,
    /// Seals a chunk of `input` to `sent`.
    fn padded_seal(params: PaddedParams) {
        // SAFETY: by the launcher's promise.
        unsafe { padded::<false, false, false, true>(&params) }
    }
}

kernel! {
    threads = 512,
    shared = PADDED_SHARED,
    /// Opens a chunk of `input` to `output`.
    fn padded_open(params: PaddedParams) {
        // SAFETY: by the launcher's promise.
        unsafe { padded::<true, false, true, false>(&params) }
    }
}

kernel! {
    threads = 512,
    shared = PADDED_SHARED,
    /// Opens a chunk of `input`, reduces `local` into it and seals that to `sent`.
    fn padded_reduce_seal(params: PaddedParams) {
        // SAFETY: by the launcher's promise.
        unsafe { padded::<true, true, false, true>(&params) }
    }
}

kernel! {
    threads = 512,
    shared = PADDED_SHARED,
    /// Opens a chunk of `input`, reduces `local` into it, finishes an average and stores that to `output`.
    fn padded_reduce(params: PaddedParams) {
        // SAFETY: by the launcher's promise.
        unsafe { padded::<true, true, true, false>(&params) }
    }
}
