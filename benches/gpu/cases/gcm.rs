//! AES-GCM on records, and on one message by the whole GPU: seal, and open of what was sealed.

use std::rc::Rc;

use ringseal::cuda::{DeviceBuffer, GcmKey, Kernels, MessageWorkspace, Stream};
use ringseal::{Error, Result};
use ringseal_kernels::gcm::{Record, VERIFIED, nonce_j0};
use ringseal_kernels::message::Message;

use super::{ALL, ALL_RECORDS, Case, FEW, FEW_RECORDS, LOAD_AND_STORE, Memory, Prepared, random_key};

/// Wavefronts of the matrix products: 8 for the data; for the state 4 in one message, every second tile in records.
const MATRICES: f64 = 12.0;
const RECORD_MATRICES: f64 = 10.0;
/// One broadcast load of the upper counter bytes' contribution. A warp that crosses a multiple of 256 needs two, so that
/// this is the least, and the limit no lower than the true one.
const UPPER: f64 = 2.85;
/// Wavefronts of GMAC: the load, the store to shared memory and the load from there; then the products, the state's in
/// every second tile.
const GMAC: f64 = LOAD_AND_STORE / 2.0 + 4.0 + 4.0 + RECORD_MATRICES;
/// Additional data of a record, as many bytes as a collective's records have.
const AAD: u32 = 48;

pub(super) fn cases(kernels: &Kernels) -> Result<Vec<Case>> {
    let stream = Stream::new(kernels.device())?;
    // No AES on the GPU: any key length will do.
    let key = Rc::new(GcmKey::new(kernels, &random_key(128)?, &stream)?);
    let mut cases = vec![Case {
        name: "gmac one".into(),
        key_bits: 128,
        wavefronts: Some(GMAC),
        few: FEW,
        all: ALL,
        prepare: Box::new(move |memory, stream, (_, bytes)| gmac(&key, memory, stream, bytes)),
    }];
    for (key_bits, look_ups) in [(128, 128.0), (192, 160.0), (256, 192.0)] {
        let stream = Stream::new(kernels.device())?;
        let key = Rc::new(GcmKey::new(kernels, &random_key(key_bits)?, &stream)?);
        for (name, open) in [("gcm seal", false), ("gcm open", true)] {
            let key = Rc::clone(&key);
            cases.push(Case {
                name: name.into(),
                key_bits,
                wavefronts: Some(look_ups + LOAD_AND_STORE + RECORD_MATRICES + UPPER),
                few: FEW_RECORDS,
                all: ALL_RECORDS,
                prepare: Box::new(move |memory, stream, size| records(&key, memory, stream, size, open)),
            });
        }
        for (name, open) in [("gcm seal one", false), ("gcm open one", true)] {
            let key = Rc::clone(&key);
            cases.push(Case {
                name: name.into(),
                key_bits,
                wavefronts: Some(look_ups + LOAD_AND_STORE + MATRICES + UPPER),
                few: FEW,
                all: ALL,
                prepare: Box::new(move |memory, stream, (_, bytes)| {
                    message(&key, memory, stream, bytes, open)
                }),
            });
        }
    }
    Ok(cases)
}

/// Most places that calls rotate through: as many as a graph has calls.
const PLACES: u64 = 32;

/// Descriptors for every place. Sealing goes from the input buffer to the output; opening, of what this seals first,
/// back, which leaves the input as it was.
fn records(
    key: &Rc<GcmKey>,
    memory: &Rc<Memory>,
    stream: &Stream,
    (messages, bytes): (u64, u64),
    open: bool,
) -> Result<Prepared> {
    let stride = bytes.next_multiple_of(16);
    let places = memory.places(messages * stride).min(PLACES);
    let total = places * messages;
    let additional = DeviceBuffer::from_host(&[0x3c; AAD as usize], stream)?;
    let tags = DeviceBuffer::new(stream.device(), total as usize * 16)?;
    let mut verdicts = DeviceBuffer::new(stream.device(), total as usize * 4)?;
    verdicts.fill(0, stream)?;
    let descriptors = |from: &DeviceBuffer, to: &DeviceBuffer| -> Result<DeviceBuffer> {
        let mut descriptors = Vec::with_capacity(total as usize * size_of::<Record>());
        for index in 0..total {
            let (place, message) = (index / messages, index % messages);
            let offset = memory.offset(place as usize, messages * stride) + message * stride;
            let record = Record {
                input: from.pointer() + offset,
                output: to.pointer() + offset,
                aad: additional.pointer(),
                tag: tags.pointer() + 16 * index,
                verdict: verdicts.pointer() + 4 * index,
                length: bytes as u32,
                aad_length: AAD,
                j0: nonce_j0([index as u32, messages as u32, bytes as u32]),
            };
            // SAFETY: a record is 64 bytes of integers, with no padding.
            descriptors.extend_from_slice(&unsafe {
                std::mem::transmute::<Record, [u8; size_of::<Record>()]>(record)
            });
        }
        DeviceBuffer::from_host(&descriptors, stream)
    };
    let sealing = descriptors(&memory.input, &memory.output)?;
    let opening = descriptors(&memory.output, &memory.input)?;
    // SAFETY: the descriptors name parts of buffers that all live until the wait.
    unsafe { key.seal_records(sealing.pointer(), total as u32, stream)? };
    stream.synchronize()?;

    let (key, kept, additional) = (Rc::clone(key), Rc::clone(memory), (additional, tags));
    Ok(Prepared {
        run: Box::new(move |stream, call| {
            let _memory = (&kept, &additional);
            let first = call as u64 % places * messages * size_of::<Record>() as u64;
            // SAFETY: the descriptors and what they name belong to this closure, which outlives the measurement.
            unsafe {
                match open {
                    true => key.open_records(opening.pointer() + first, messages as u32, stream),
                    false => key.seal_records(sealing.pointer() + first, messages as u32, stream),
                }
            }
        }),
        check: Box::new(move |stream| {
            // Calls count from 1, so that the second place is used even by the shortest measurement.
            let used = 1 % places * messages;
            let verdicts = verdicts.to_host(stream)?;
            let verified = |word: &[u8]| word == VERIFIED.to_le_bytes();
            let mut used = verdicts.chunks_exact(4).skip(used as usize).take(messages as usize);
            match !open || used.all(verified) {
                true => Ok(()),
                false => Err(Error::Cuda("a record that was sealed did not open".into())),
            }
        }),
    })
}

/// The tag of one message that is additional data only.
fn gmac(key: &Rc<GcmKey>, memory: &Rc<Memory>, stream: &Stream, bytes: u64) -> Result<Prepared> {
    let places = memory.places(bytes).min(PLACES);
    let tags = DeviceBuffer::new(stream.device(), places as usize * 16)?;
    let workspace = MessageWorkspace::new(stream)?;
    let (key, memory) = (Rc::clone(key), Rc::clone(memory));
    Ok(Prepared {
        run: Box::new(move |stream, call| {
            let place = call as u64 % places;
            let message = Message {
                input: 0,
                output: 0,
                length: 0,
                aad: memory.input.pointer() + memory.offset(place as usize, bytes),
                aad_length: bytes,
                tag: tags.pointer() + 16 * place,
                verdict: 0,
                j0: nonce_j0([place as u32, 2, bytes as u32]),
            };
            // SAFETY: what the message names belongs to this closure, which outlives the measurement; one stream.
            unsafe { key.seal_message(&message, &workspace, stream) }
        }),
        // The tests compare tags with the CPU's.
        check: Box::new(|_| Ok(())),
    })
}

/// One message over the whole GPU. Sealing goes from the input buffer to the output; opening, of what this seals first,
/// back.
fn message(
    key: &Rc<GcmKey>,
    memory: &Rc<Memory>,
    stream: &Stream,
    bytes: u64,
    open: bool,
) -> Result<Prepared> {
    let places = memory.places(bytes).min(PLACES);
    let additional = DeviceBuffer::from_host(&[0x3c; AAD as usize], stream)?;
    let tags = DeviceBuffer::new(stream.device(), places as usize * 16)?;
    let mut verdicts = DeviceBuffer::new(stream.device(), places as usize * 4)?;
    verdicts.fill(0, stream)?;
    let workspace = MessageWorkspace::new(stream)?;
    let message = |from: &DeviceBuffer, to: &DeviceBuffer, place: u64| Message {
        input: from.pointer() + memory.offset(place as usize, bytes),
        output: to.pointer() + memory.offset(place as usize, bytes),
        length: bytes,
        aad: additional.pointer(),
        aad_length: AAD.into(),
        tag: tags.pointer() + 16 * place,
        verdict: verdicts.pointer() + 4 * place,
        j0: nonce_j0([place as u32, 1, bytes as u32]),
    };
    let sealing: Vec<_> = (0..places).map(|place| message(&memory.input, &memory.output, place)).collect();
    let opening: Vec<_> = (0..places).map(|place| message(&memory.output, &memory.input, place)).collect();
    for message in &sealing {
        // SAFETY: the message names parts of buffers that all live until the wait; one stream.
        unsafe { key.seal_message(message, &workspace, stream)? };
    }
    stream.synchronize()?;

    let (key, kept, additional) = (Rc::clone(key), Rc::clone(memory), (additional, tags));
    Ok(Prepared {
        run: Box::new(move |stream, call| {
            let _memory = (&kept, &additional);
            let place = call % places as usize;
            // SAFETY: what the message names belongs to this closure, which outlives the measurement; one stream.
            unsafe {
                match open {
                    true => key.open_message(&opening[place], &workspace, stream),
                    false => key.seal_message(&sealing[place], &workspace, stream),
                }
            }
        }),
        check: Box::new(move |stream| {
            // Calls count from 1.
            let used = 4 * (1 % places) as usize;
            match !open || verdicts.to_host(stream)?[used..used + 4] == VERIFIED.to_le_bytes() {
                true => Ok(()),
                false => Err(Error::Cuda("a message that was sealed did not open".into())),
            }
        }),
    })
}
