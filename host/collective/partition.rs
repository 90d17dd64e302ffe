//! How a vector is cut into chunks.

use std::ops::Range;

/// A vector of `count` elements cut into `chunks` runs, the first `count % chunks` of them one element longer.
///
/// Any count works: with fewer elements than chunks the last chunks are empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partition {
    count: usize,
    chunks: usize,
}

impl Partition {
    /// Cuts `count` elements into `chunks` chunks, at least one.
    ///
    /// # Panics
    /// When `chunks` is 0.
    pub const fn new(count: usize, chunks: usize) -> Self {
        assert!(chunks > 0, "a vector has at least one chunk");
        Self { count, chunks }
    }

    /// The elements of chunk `chunk`.
    ///
    /// # Panics
    /// When there is no such chunk.
    pub fn range(self, chunk: usize) -> Range<usize> {
        assert!(chunk < self.chunks, "chunk {chunk} of {}", self.chunks);
        self.start(chunk)..self.start(chunk + 1)
    }

    /// Elements of the longest chunk.
    pub const fn longest(self) -> usize {
        self.count.div_ceil(self.chunks)
    }

    fn start(self, chunk: usize) -> usize {
        chunk * (self.count / self.chunks) + chunk.min(self.count % self.chunks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_every_element_once_and_differ_by_at_most_one() {
        for chunks in 1..=16 {
            for count in (0..=40).chain([1023, 1 << 20]) {
                let partition = Partition::new(count, chunks);
                let ranges: Vec<_> = (0..chunks).map(|chunk| partition.range(chunk)).collect();
                assert_eq!((ranges[0].start, ranges[chunks - 1].end), (0, count));
                assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
                let lengths: Vec<_> = ranges.iter().map(Range::len).collect();
                assert_eq!(lengths.iter().max(), Some(&partition.longest()));
                assert!(lengths.iter().all(|length| partition.longest() - length <= 1));
            }
        }
    }

    #[test]
    fn the_last_chunk_of_the_longest_vector_does_not_overflow() {
        let partition = Partition::new(usize::MAX, 7);
        assert_eq!(partition.range(6).end, usize::MAX);
    }
}
