//! Where a rank's input and output lie.

use std::ops::Range;

use zeroize::Zeroize;

use super::{Partition, Request};
use crate::{Dtype, Error, Result};

/// A rank's vectors, as bytes.
#[derive(Debug)]
pub enum Buffers<'a> {
    /// The result replaces the input.
    InPlace(&'a mut [u8]),
    /// The input stays as it is.
    Apart {
        /// What this rank gives.
        input: &'a [u8],
        /// Where the result goes.
        output: &'a mut [u8],
    },
}

/// Buffers whose lengths fit the request. Ranges are bytes of the whole vector.
pub(super) struct Vectors<'a> {
    buffers: Buffers<'a>,
    /// The part of the vector that the input holds when it lies apart.
    given: Range<usize>,
    /// The part of the vector that this rank gets.
    wanted: Range<usize>,
    bytes: usize,
}

impl<'a> Vectors<'a> {
    /// # Errors
    /// [`Error::InvalidArgument`] when the lengths don't fit each other or the element type.
    pub(super) fn new(
        buffers: Buffers<'a>,
        request: Request,
        dtype: Dtype,
        ranks: usize,
        rank: usize,
    ) -> Result<Self> {
        let bytes = match (&buffers, request) {
            (Buffers::InPlace(buffer), _) => buffer.len(),
            (Buffers::Apart { input, .. }, Request::AllReduce(_) | Request::ReduceScatter(_)) => input.len(),
            (Buffers::Apart { output, .. }, Request::AllGather | Request::Broadcast { .. }) => output.len(),
        };
        let size = dtype.size();
        if !bytes.is_multiple_of(size) {
            return Err(Error::InvalidArgument(format!(
                "{bytes} bytes are no whole number of {dtype:?} elements"
            )));
        }
        let chunk = Partition::new(bytes / size, ranks).range(rank);
        let chunk = chunk.start * size..chunk.end * size;
        let whole = 0..bytes;
        let (given, wanted) = match request {
            Request::AllReduce(_) => (whole.clone(), whole),
            Request::ReduceScatter(_) => (whole, chunk),
            Request::AllGather => (chunk, whole),
            Request::Broadcast { root } if root == rank => (whole.clone(), whole),
            Request::Broadcast { .. } => (0..0, whole),
        };
        if let Buffers::Apart { input, output } = &buffers {
            let unused = given.is_empty() && matches!(request, Request::Broadcast { .. });
            for (name, got, part) in [("input", input.len(), &given), ("output", output.len(), &wanted)] {
                if got != part.len() && !(name == "input" && unused) {
                    return Err(Error::InvalidArgument(format!(
                        "rank {rank}: the {name} has {got} bytes; {} are needed for a vector of {bytes}",
                        part.len()
                    )));
                }
            }
        }
        Ok(Self { buffers, given, wanted, bytes })
    }

    /// Bytes of the whole vector.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn input(&self, range: Range<usize>) -> &[u8] {
        match &self.buffers {
            Buffers::InPlace(buffer) => &buffer[range],
            Buffers::Apart { input, .. } => &input[within(range, &self.given)],
        }
    }

    pub(super) fn output(&mut self, range: Range<usize>) -> &mut [u8] {
        match &mut self.buffers {
            Buffers::InPlace(buffer) => &mut buffer[range],
            Buffers::Apart { output, .. } => &mut output[within(range, &self.wanted)],
        }
    }

    /// Makes the input the output.
    pub(super) fn keep_input(&mut self, range: Range<usize>) {
        if let Buffers::Apart { input, output } = &mut self.buffers {
            let from = within(range.clone(), &self.given);
            output[within(range, &self.wanted)].copy_from_slice(&input[from]);
        }
    }

    /// Leaves nothing where a result was to be.
    pub(super) fn zero_output(&mut self) {
        let wanted = self.wanted.clone();
        self.output(wanted).zeroize();
    }
}

fn within(range: Range<usize>, part: &Range<usize>) -> Range<usize> {
    range.start - part.start..range.end - part.start
}
