//! How a vector is cut into chunks.

use std::ops::Range;

use crate::Dtype;

/// A vector of `count` elements cut into `chunks` runs of whole units. The first runs are one unit longer where the units
/// don't divide evenly, and the vector's last unit may be cut short.
///
/// Any count works: with fewer units than chunks the last chunks are empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partition {
    count: usize,
    chunks: usize,
    /// Elements of a unit.
    unit: usize,
}

impl Partition {
    /// Cuts `count` elements into `chunks` chunks, at least one, between any two elements. So are the vectors of a
    /// reduce-scatter and an all-gather cut, a chunk for each rank.
    ///
    /// # Panics
    /// When `chunks` is 0.
    pub const fn new(count: usize, chunks: usize) -> Self {
        assert!(chunks > 0, "a vector has at least one chunk");
        Self { count, chunks, unit: 1 }
    }

    /// Cuts only where a multiple of 16 bytes lies before the cut, so that every chunk is aligned like the vector. So is
    /// the vector of an all-reduce cut, on CPU and GPU alike.
    ///
    /// # Panics
    /// When `chunks` is 0.
    pub const fn aligned(count: usize, chunks: usize, dtype: Dtype) -> Self {
        Self { unit: 16 / dtype.size(), ..Self::new(count, chunks) }
    }

    /// Cuts `count` elements only at multiples of `unit`.
    pub(crate) const fn in_units(count: usize, chunks: usize, unit: usize) -> Self {
        Self { unit, ..Self::new(count, chunks) }
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
    pub fn longest(self) -> usize {
        // The first is as long as any, unless it holds the unit that is cut short; then it is the only one.
        self.range(0).len()
    }

    fn start(self, chunk: usize) -> usize {
        let units = self.count.div_ceil(self.unit);
        let unit = chunk * (units / self.chunks) + chunk.min(units % self.chunks);
        unit.saturating_mul(self.unit).min(self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_every_element_once_and_differ_by_at_most_one_unit() {
        for chunks in 1..=16 {
            for count in (0..=70).chain([1023, 1 << 20]) {
                for partition in [
                    Partition::new(count, chunks),
                    Partition::aligned(count, chunks, Dtype::F32),
                    Partition::aligned(count, chunks, Dtype::U8),
                ] {
                    let ranges: Vec<_> = (0..chunks).map(|chunk| partition.range(chunk)).collect();
                    assert_eq!((ranges[0].start, ranges[chunks - 1].end), (0, count));
                    assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
                    assert!(
                        ranges[1..]
                            .iter()
                            .all(|range| range.start % partition.unit == 0 || range.start == count)
                    );
                    let lengths: Vec<_> = ranges.iter().map(Range::len).collect();
                    assert_eq!(lengths.iter().max(), Some(&partition.longest()));
                    let full = lengths.iter().rposition(|length| *length > 0).unwrap_or(0);
                    // Whoever has the vector's end may have up to a unit less.
                    assert!(
                        lengths[..full].iter().all(|length| partition.longest() - length <= partition.unit)
                    );
                    assert!(lengths[full] + 2 * partition.unit > partition.longest());
                }
            }
        }
    }

    #[test]
    fn the_last_chunk_of_the_longest_vector_does_not_overflow() {
        assert_eq!(Partition::new(usize::MAX, 7).range(6).end, usize::MAX);
        assert_eq!(Partition::aligned(usize::MAX, 7, Dtype::U8).range(6).end, usize::MAX);
    }
}
