//! Records and aborts as bytes on a connection.

use std::io::{self, Read};

use super::inbox::Inbox;
use super::{Abort, Cause, Received, Sealed};
use crate::aead::Tag;

/// No record is longer: what claims to be was never sent by a rank.
pub(super) const LONGEST_RECORD: usize = 16 << 20;
/// Kind, session, tag, length.
pub(super) const HEADER_BYTES: usize = 1 + 8 + 16 + 4;
const RECORD: u8 = 0;
const ABORT: u8 = 1;

/// A record as a frame.
pub(super) fn record(session: u64, record: &Sealed) -> Vec<u8> {
    frame(RECORD, session, record.tag(), record.bytes())
}

/// An abort as a frame.
pub(super) fn abort(session: u64, abort: Abort) -> Vec<u8> {
    frame(ABORT, session, &[0; 16], &encode(abort))
}

fn frame(kind: u8, session: u64, tag: &Tag, bytes: &[u8]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(HEADER_BYTES + bytes.len());
    frame.push(kind);
    frame.extend_from_slice(&session.to_le_bytes());
    frame.extend_from_slice(tag);
    frame.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    frame.extend_from_slice(bytes);
    frame
}

/// One frame, from a connection into the inbox.
pub(super) fn read(stream: &mut impl Read, from: usize, inbox: &Inbox) -> io::Result<()> {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header)?;
    let session = u64::from_le_bytes(std::array::from_fn(|at| header[1 + at]));
    let tag: Tag = std::array::from_fn(|at| header[9 + at]);
    let length = u32::from_le_bytes(std::array::from_fn(|at| header[25 + at])) as usize;
    if length > LONGEST_RECORD {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes)?;
    match header[0] {
        RECORD => inbox.put(from, (session, Received { bytes, tag })),
        ABORT => {
            let abort = decode(&bytes).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
            inbox.abort(session, abort);
        }
        _ => return Err(io::ErrorKind::InvalidData.into()),
    }
    Ok(())
}

/// An abort as words: who, which cause, and what it says.
fn encode(abort: Abort) -> Vec<u8> {
    let words = match abort.cause {
        Cause::Record { step, record } => [0, step as u64, record as u64, 0],
        Cause::Deadline { peer, step, waited_ms } => [1, step as u64, peer as u64, waited_ms],
        Cause::Lost { peer, step } => [2, step as u64, peer as u64, 0],
        Cause::Other => [3, 0, 0, 0],
    };
    [abort.by as u64].iter().chain(&words).flat_map(|word| word.to_le_bytes()).collect()
}

fn decode(bytes: &[u8]) -> Option<Abort> {
    let (words, []) = bytes.as_chunks::<8>() else { return None };
    let words: [u64; 5] =
        words.iter().map(|word| u64::from_le_bytes(*word)).collect::<Vec<_>>().try_into().ok()?;
    let [by, cause, step, other, waited_ms] = words;
    let (by, step, other) =
        (usize::try_from(by).ok()?, usize::try_from(step).ok()?, usize::try_from(other).ok()?);
    let cause = match cause {
        0 => Cause::Record { step, record: other },
        1 => Cause::Deadline { peer: other, step, waited_ms },
        2 => Cause::Lost { peer: other, step },
        3 => Cause::Other,
        _ => return None,
    };
    Some(Abort { by, cause })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_abort_is_refused() {
        let abort = Abort { by: 1, cause: Cause::Lost { peer: 2, step: 3 } };
        assert_eq!(decode(&encode(abort)), Some(abort));
        assert!(decode(&[0; 41]).is_none() && decode(&[9; 40]).is_none());
    }
}
