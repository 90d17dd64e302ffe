//! Carries out one rank's program: opens, reduces, seals and sends, record by record.

use std::ops::Range;
use std::time::Duration;

use super::Partition;
use super::reduce::{combine, divide, is_narrow, narrow, widen};
use super::schedule::{Operand, Origin, Outgoing, Step};
use super::vectors::Vectors;
use crate::channel::{Call, Place, Session};
use crate::transport::{Abort, Cause, Delivery, Received, Sealed, Transport, deadline};
use crate::{Dtype, Error, ReduceOp};

/// Buffers kept for the next record. Enough for a pipeline; more would only hold memory where data flow one way.
const SPARE_BUFFERS: usize = 256;

/// Why a program ended early.
pub(super) enum Failure {
    /// A record did not verify, or another one than expected came.
    Record { step: usize, record: usize },
    /// A peer did not deliver.
    Deadline { peer: usize, step: usize, waited: Duration },
    /// A peer is gone.
    Lost { peer: usize, step: usize },
    /// Another rank failed first.
    Told(Abort),
    /// Backend or transport failed.
    Other(Error),
}

impl Failure {
    /// What to tell the other ranks, unless they know.
    pub(super) fn notice(&self, by: usize) -> Option<Abort> {
        let cause = match *self {
            Self::Record { step, record } => Cause::Record { step, record },
            Self::Deadline { peer, step, waited } => {
                Cause::Deadline { peer, step, waited_ms: waited.as_millis() as u64 }
            }
            Self::Lost { peer, step } => Cause::Lost { peer, step },
            Self::Told(_) => return None,
            Self::Other(_) => Cause::Other,
        };
        Some(Abort { by, cause })
    }

    /// The error of rank `rank`. A failure that another rank has seen is reported in that rank's words.
    pub(super) fn into_error(self, rank: usize) -> Error {
        match self {
            Self::Record { step, record } => Error::Record { rank, step, record },
            Self::Deadline { peer, step, waited } => {
                Error::Deadline { rank, peer, step, waited_ms: waited.as_millis() as u64 }
            }
            Self::Lost { peer, step } => Error::Lost { rank, peer, step: Some(step) },
            Self::Told(Abort { by, cause: Cause::Lost { peer, step } }) => {
                Error::Lost { rank: by, peer, step: Some(step) }
            }
            Self::Told(Abort { by, cause: Cause::Record { step, record } }) => {
                Error::Record { rank: by, step, record }
            }
            Self::Told(Abort { by, cause: Cause::Deadline { peer, step, waited_ms } }) => {
                Error::Deadline { rank: by, peer, step, waited_ms }
            }
            Self::Told(Abort { by, cause: Cause::Other }) => Error::Aborted { rank, by },
            Self::Other(error) => error,
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Other(error)
    }
}

/// A record of the chunk that a step works on.
#[derive(Clone)]
struct Piece {
    /// Bytes of the vector.
    range: Range<usize>,
    record: usize,
    last: bool,
}

impl Piece {
    fn place(&self, step: usize) -> Place {
        Place { step, record: self.record, last: self.last }
    }
}

/// One collective, on one rank.
pub(super) struct Execution<'a, 'v> {
    pub(super) session: &'a mut Session,
    pub(super) transport: &'a mut dyn Transport,
    pub(super) spare: &'a mut Vec<Vec<u8>>,
    pub(super) vectors: &'a mut Vectors<'v>,
    pub(super) call: Call,
    pub(super) dtype: Dtype,
    /// What a reduction does; without meaning for collectives that reduce nothing.
    pub(super) op: ReduceOp,
    /// In elements.
    pub(super) partition: Partition,
    pub(super) record_bytes: usize,
    pub(super) timeout: Duration,
}

impl Execution<'_, '_> {
    /// Does the steps, then waits until all ranks have done theirs: `closing` is a step number that no rank uses.
    pub(super) fn run(&mut self, steps: &[Step], closing: usize) -> Result<(), Failure> {
        for (number, step) in steps.iter().enumerate() {
            let chunk = self.partition.range(step.chunk);
            let chunk = chunk.start * self.dtype.size()..chunk.end * self.dtype.size();
            let records = chunk.len().div_ceil(self.record_bytes);
            for record in 0..records {
                let start = chunk.start + record * self.record_bytes;
                let range = start..chunk.end.min(start + self.record_bytes);
                self.piece(number, step, Piece { range, record, last: record + 1 == records })?;
            }
        }
        self.close(closing)
    }

    fn piece(&mut self, number: usize, step: &Step, piece: Piece) -> Result<(), Failure> {
        match (step.operands.as_slice(), &step.outgoing) {
            // What is only kept, or passed on as it came, is opened where it is to stay.
            ([Operand::Received(origin)], Outgoing::Nothing | Outgoing::Forward(_)) => {
                debug_assert!(step.store);
                let sealed = self.open_into_output(number, *origin, &piece)?;
                match &step.outgoing {
                    Outgoing::Forward(peers) => self.send(peers, sealed),
                    _ => {
                        self.recycle(sealed.into_parts().0);
                        Ok(())
                    }
                }
            }
            ([Operand::Local], outgoing) => {
                if step.store {
                    self.vectors.keep_input(piece.range.clone());
                }
                match outgoing {
                    Outgoing::Seal(peers) => {
                        let data = self.local(&piece);
                        self.seal_and_send(number, &piece, data, peers)
                    }
                    _ => Ok(()),
                }
            }
            (operands, outgoing) => {
                let mut result = self.reduced(number, operands, &piece)?;
                if step.finish && self.op == ReduceOp::Avg {
                    divide(self.dtype, &mut result, self.transport.ranks());
                }
                if step.store {
                    self.vectors.output(piece.range.clone()).copy_from_slice(&result);
                }
                match outgoing {
                    Outgoing::Seal(peers) => self.seal_and_send(number, &piece, result, peers),
                    _ => {
                        self.recycle(result);
                        Ok(())
                    }
                }
            }
        }
    }

    /// The operands, combined in their order. f16 and bf16 stay in f32 until all are.
    fn reduced(&mut self, number: usize, operands: &[Operand], piece: &Piece) -> Result<Vec<u8>, Failure> {
        let wide = is_narrow(self.dtype) && operands.len() > 2;
        let mut result = Vec::new();
        for (index, operand) in operands.iter().enumerate() {
            let mut data = match operand {
                // The common case needs no copy of the input.
                Operand::Local if index > 0 && !wide => {
                    combine(self.dtype, self.op, &mut result, self.vectors.input(piece.range.clone()));
                    continue;
                }
                Operand::Local => self.local(piece),
                Operand::Received(origin) => self.open(number, *origin, piece)?,
            };
            if wide {
                let mut floats = self.spare.pop().unwrap_or_default();
                floats.clear();
                widen(self.dtype, &data, &mut floats);
                self.recycle(std::mem::replace(&mut data, floats));
            }
            if index == 0 {
                result = data;
                continue;
            }
            combine(if wide { Dtype::F32 } else { self.dtype }, self.op, &mut result, &data);
            self.recycle(data);
        }
        if wide {
            let mut rounded = self.local(piece);
            narrow(self.dtype, &result, &mut rounded);
            self.recycle(std::mem::replace(&mut result, rounded));
        }
        Ok(result)
    }

    fn local(&mut self, piece: &Piece) -> Vec<u8> {
        let mut data = self.spare.pop().unwrap_or_default();
        data.clear();
        data.extend_from_slice(self.vectors.input(piece.range.clone()));
        data
    }

    fn open(&mut self, number: usize, origin: Origin, piece: &Piece) -> Result<Vec<u8>, Failure> {
        let received = self.receive(number, origin.from)?;
        let place = piece.place(origin.sealed_in);
        let opened = self.session.open(&self.call, origin.sealed_by, place, received, piece.range.len());
        opened.map_err(|error| refused(error, number, piece.record))
    }

    fn open_into_output(&mut self, number: usize, origin: Origin, piece: &Piece) -> Result<Sealed, Failure> {
        let received = self.receive(number, origin.from)?;
        let place = piece.place(origin.sealed_in);
        let out = self.vectors.output(piece.range.clone());
        let verified = self.session.open_into(&self.call, origin.sealed_by, place, received, out);
        verified.map_err(|error| refused(error, number, piece.record))
    }

    fn receive(&mut self, number: usize, from: usize) -> Result<Received, Failure> {
        match self.transport.receive(from, self.session.id(), deadline(self.timeout))? {
            Delivery::Record(received) => Ok(received),
            Delivery::Aborted(abort) => Err(Failure::Told(abort)),
            Delivery::Lost => Err(Failure::Lost { peer: from, step: number }),
            Delivery::TimedOut => Err(Failure::Deadline { peer: from, step: number, waited: self.timeout }),
        }
    }

    fn seal_and_send(
        &mut self,
        number: usize,
        piece: &Piece,
        data: Vec<u8>,
        peers: &[usize],
    ) -> Result<(), Failure> {
        let sealed = self.session.seal(&self.call, piece.place(number), data)?;
        self.send(peers, sealed)
    }

    fn send(&mut self, peers: &[usize], sealed: Sealed) -> Result<(), Failure> {
        let Some((last, others)) = peers.split_last() else { return Ok(()) };
        for &peer in others {
            self.transport.send(peer, self.session.id(), sealed.clone())?;
        }
        self.transport.send(*last, self.session.id(), sealed)?;
        Ok(())
    }

    /// Every rank seals an empty record for all others, and no rank is done before it has verified theirs. So a
    /// failure on any rank is one on all, and ranks that disagree notice it even if they have no data to exchange.
    fn close(&mut self, step: usize) -> Result<(), Failure> {
        let (rank, ranks) = (self.transport.rank(), self.transport.ranks());
        if ranks == 1 {
            return Ok(());
        }
        let others: Vec<_> = (1..ranks).map(|distance| (rank + distance) % ranks).collect();
        let piece = Piece { range: 0..0, record: 0, last: true };
        self.seal_and_send(step, &piece, Vec::new(), &others)?;
        for from in others.into_iter().rev() {
            self.open(step, Origin { from, sealed_by: from, sealed_in: step }, &piece)?;
        }
        Ok(())
    }

    fn recycle(&mut self, buffer: Vec<u8>) {
        if self.spare.len() < SPARE_BUFFERS {
            self.spare.push(buffer);
        }
    }
}

fn refused(error: Error, step: usize, record: usize) -> Failure {
    match error {
        Error::Authentication => Failure::Record { step, record },
        other => Failure::Other(other),
    }
}
