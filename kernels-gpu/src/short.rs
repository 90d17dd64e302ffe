//! Sealed collectives of short records, of one tile of GHASH each, where latency is all: what a collective takes is the sum of
//! what each of its steps does once a record has arrived.
//!
//! So the whole keystream of a record, to open it and to seal it, is made before it arrives; and blocks share a record's
//! steps (see [`ring`](crate::ring)), each of which prepares its next step while others are at theirs. Otherwise as the kernels
//! of the [`sealed`](crate::sealed) ring that open any rank's records: the same parameters, records and tags.

use crate::aes::{Keys, Tables, xor};
use crate::device::{Quad, bits, thread, warp};
use crate::ghash::{Chains, TILE, block_of};
use crate::record::{AAD_BLOCKS, AAD_BYTES, Header};
use crate::ring::{Block, Record, Wire, collective, finished, reduced};
use crate::sealed::{
    APART, ASSOCIATED, MASKS, Places, SEALED_SHARED, Sealed, SealedRingParams, Stream, TAGS, TAGS_BYTES,
    VERDICT, any_sender, associated_data, headers, inside, load_local, load_received, store_associated_data,
    store_local, store_mask, store_sent, with_associated_data,
};
use crate::step::{FINISH, FORWARD, RECEIVE, REDUCE, SEND, STORE, Step};

/// The longest record of these kernels, in bytes.
pub const LONGEST_SHORT_RECORD: u32 = 16 * TILE;

/// Records of at most [`LONGEST_SHORT_RECORD`] bytes, for sums and averages of f32, f16 and bf16.
struct Short<'a, const ROUNDS: usize>(Sealed<'a, ROUNDS>);

/// The key stream of a thread's blocks `at` and `at + APART`, zero where the text has neither of a warp's. Text ends where
/// the tile does, so a warp has some in all of its blocks, or in the second ones, or in none.
#[inline(always)]
fn key_stream<const ROUNDS: usize>(tables: Tables, keys: impl Keys, header: &Header, at: i32) -> [Quad; 2] {
    let mut blocks = [[0; 4]; 2];
    if warp::ballot(at + APART >= 0) != 0 {
        let stream = Stream::<ROUNDS>::new(tables, keys, header, at);
        if warp::ballot(at >= 0) != 0 {
            blocks = stream.key_stream(tables, keys, at);
        } else {
            blocks = [[0; 4], stream.second(tables, keys, at)];
        }
    }
    blocks
}

impl<const ROUNDS: usize> Wire for Short<'_, ROUNDS> {
    const SEALED: bool = true;
    const VERDICT: u32 = VERDICT;
    const SHARES: bool = true;

    #[inline(always)]
    unsafe fn transfer(
        &mut self,
        block: &Block,
        step: &Step,
        record: &Record,
        arrived: impl FnOnce() -> bool,
    ) -> Option<(Quad, Quad)> {
        let sealed = &mut self.0;
        let (params, tables, opener) = (sealed.params, sealed.tables, sealed.opener);
        let own = &params.own.round_keys;
        let (actions, bytes) = (step.actions, record.bytes);
        let opens = actions & RECEIVE != 0;
        let seals = actions & (SEND | FORWARD) == SEND;
        let [header_in, header] = headers(params.call, block, step, record);

        let pad = TILE - bytes.div_ceil(16);
        // Not to be computed once for all records: it would take registers all along.
        let at = block_of(bits::opaque(thread::index()), 0) as i32 - pad as i32;
        let before = at + APART - TILE as i32;
        let places = [at, at + APART];

        // SAFETY: the latest record ended with barriers, as this one will; all threads are here.
        unsafe {
            if opens && step.sealed_by != Sealed::<ROUNDS>::sender() {
                sealed.switch_to(step.sealed_by);
            }
        }
        let tags = TAGS + sealed.turn * TAGS_BYTES;
        sealed.turn ^= 1;
        let aad_in = ASSOCIATED + thread::warp() * 2 * AAD_BYTES;
        let aad_out = aad_in + AAD_BYTES;
        // SAFETY: these places were last read before the latest barrier; each is one warp's.
        unsafe {
            if opens && thread::warp() == 1 {
                store_mask::<ROUNDS>(tables, opener, &header_in, tags + MASKS);
            }
            if seals && thread::warp() == 2 {
                store_mask::<ROUNDS>(tables, own, &header, tags + MASKS + 16);
            }
            store_associated_data(&header_in, aad_in);
            store_associated_data(&header, aad_out);
        }
        let mut key_stream_in = [[0; 4]; 2];
        let mut key_stream_out = [[0; 4]; 2];
        if opens {
            key_stream_in = key_stream::<ROUNDS>(tables, opener, &header_in, at);
        }
        if seals {
            key_stream_out = key_stream::<ROUNDS>(tables, own, &header, at);
        }

        // All that does not need the record is done by now.
        if !arrived() {
            return None;
        }
        let mut chains_in = Chains::new([0; 4]);
        let mut chains_out = Chains::new([0; 4]);
        let place = Places::of(&params.ring, record);
        // SAFETY: all threads of the block come here alike; the additional data are stored; places in the record, or none.
        unsafe {
            let mut values;
            if opens {
                let received = load_received(place.inbox(), places, bytes, false);
                let mut local = [[0; 4]; 2];
                if actions & REDUCE != 0 {
                    local = load_local(place.input(), places, bytes, false);
                }
                if actions & FORWARD != 0 {
                    store_sent(place.outbox(), places, bytes, false, received);
                }
                values = [xor(received[0], key_stream_in[0]), xor(received[1], key_stream_in[1])];
                if actions & REDUCE != 0 {
                    values = [
                        reduced::<true>(block, values[0], local[0]),
                        reduced::<true>(block, values[1], local[1]),
                    ];
                }
                if pad < AAD_BLOCKS {
                    chains_in.take([[0; 4], associated_data(aad_in, before)], sealed.opener_matrices);
                }
                chains_in.take(with_associated_data(aad_in, at, received), sealed.opener_matrices);
            } else {
                values = load_local(place.input(), places, bytes, false);
            }
            if actions & FINISH != 0 {
                values = [finished::<true>(block, values[0]), finished::<true>(block, values[1])];
            }
            if actions & STORE != 0 {
                store_local(place.output(), places, bytes, false, values);
            }
            if seals {
                let sent = [
                    inside(xor(values[0], key_stream_out[0]), places[0], bytes),
                    inside(xor(values[1], key_stream_out[1]), places[1], bytes),
                ];
                store_sent(place.outbox(), places, bytes, false, sent);
                if pad < AAD_BLOCKS {
                    chains_out.take([[0; 4], associated_data(aad_out, before)], sealed.own_matrices);
                }
                chains_out.take(with_associated_data(aad_out, at, sent), sealed.own_matrices);
            }
            sealed.store_lasts([opens, seals], &mut chains_in, &mut chains_out, bytes, tags);
            Some(Sealed::<ROUNDS>::tags(opens, seals, tags))
        }
    }
}

kernel! {
    threads = 512,
    shared = SEALED_SHARED,
    /// As `relay_sealed_128`, for records of one tile, as fast as one after another can be.
    fn relay_short_128(params: SealedRingParams) {
        // SAFETY: by the launcher's promise.
        unsafe { collective(params.ring, || Short(any_sender::<10>(&params))) }
    }
}

kernel! {
    threads = 512,
    shared = SEALED_SHARED,
    /// As `relay_sealed_256`, for records of one tile, as fast as one after another can be.
    fn relay_short_256(params: SealedRingParams) {
        // SAFETY: by the launcher's promise.
        unsafe { collective(params.ring, || Short(any_sender::<14>(&params))) }
    }
}
