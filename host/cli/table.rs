//! The benchmark's report: the table of nccl-tests, and the same figures as JSON.

use std::io::{self, Write};
use std::time::Duration;

use serde::Serialize;

use super::values::{dtype_name, op_name};
use ringseal::cuda::Breakdown;
use ringseal::{Dtype, ReduceOp};

/// Times of one measurement's iterations.
#[derive(Debug, Default)]
pub(crate) struct Times(Vec<Duration>);

impl Times {
    pub(crate) fn push(&mut self, time: Duration) {
        let place = self.0.partition_point(|&earlier| earlier <= time);
        self.0.insert(place, time);
    }

    /// Median, least and most, in microseconds. The median is the mean of the two middle ones where their number is
    /// even. Zeros before the first iteration.
    fn microseconds(&self) -> [f64; 3] {
        let Self(sorted) = self;
        let (Some(&least), Some(&most)) = (sorted.first(), sorted.last()) else { return [0.0; 3] };
        let middle = sorted.len() / 2;
        let median = (sorted[middle] + sorted[(sorted.len() - 1) / 2]) / 2;
        [median, least, most].map(|time| time.as_secs_f64() * 1e6)
    }
}

/// One size's results.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    bytes: usize,
    count: usize,
    out_of_place: Figures,
    in_place: Figures,
    /// The plain ring out of place, beside sealed runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    plain_ring: Option<Figures>,
    /// Sealed out-of-place time over the plain ring's, less one, in percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    overhead_percent: Option<f64>,
    /// Out of place, step by step.
    #[serde(skip_serializing_if = "Option::is_none")]
    breakdown: Option<Parts>,
}

/// A [`Breakdown`].
#[derive(Debug, Serialize)]
struct Parts {
    total_us: f64,
    link_us: f64,
    crypto_us: f64,
    wait_us: f64,
    launch_us: f64,
}

impl From<Breakdown> for Parts {
    fn from(breakdown: Breakdown) -> Self {
        let Breakdown { total_us, link_us, crypto_us, launch_us, wait_us } = breakdown;
        Self { total_us, link_us, crypto_us, wait_us, launch_us }
    }
}

/// What one kind of run measured.
#[derive(Debug, Serialize)]
pub(crate) struct Figures {
    time_us: f64,
    time_min_us: f64,
    time_max_us: f64,
    algbw_gb_per_s: f64,
    busbw_gb_per_s: f64,
    /// `None` when the check is off.
    wrong: Option<usize>,
}

impl Figures {
    /// `bytes` is a rank's buffer. Bandwidths as nccl-tests defines them: algbw = bytes / time,
    /// busbw = algbw x 2(n-1)/n; GB = 1e9 bytes.
    pub(crate) fn new(bytes: usize, ranks: usize, times: &Times, wrong: Option<usize>) -> Self {
        let [time_us, time_min_us, time_max_us] = times.microseconds();
        let algbw_gb_per_s = bytes as f64 / time_us / 1e3;
        let busbw_gb_per_s = algbw_gb_per_s * 2.0 * (ranks - 1) as f64 / ranks as f64;
        Self { time_us, time_min_us, time_max_us, algbw_gb_per_s, busbw_gb_per_s, wrong }
    }
}

impl Row {
    pub(crate) fn new(
        bytes: usize,
        count: usize,
        [out_of_place, in_place]: [Figures; 2],
        plain_ring: Option<Figures>,
    ) -> Self {
        let overhead_percent =
            plain_ring.as_ref().map(|plain| (out_of_place.time_us / plain.time_us - 1.0) * 100.0);
        Self { bytes, count, out_of_place, in_place, plain_ring, overhead_percent, breakdown: None }
    }

    /// The same with its breakdown, if there is one.
    pub(crate) fn broken_down(self, breakdown: Option<Breakdown>) -> Self {
        Self { breakdown: breakdown.map(Parts::from), ..self }
    }

    /// Elements of a rank's buffer.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Wrong elements in all kinds of run.
    pub(crate) fn wrong(&self) -> usize {
        [Some(&self.out_of_place), Some(&self.in_place), self.plain_ring.as_ref()]
            .into_iter()
            .flatten()
            .filter_map(|figures| figures.wrong)
            .sum()
    }
}

/// Writes the column headings; `plain` says whether the plain ring's columns are there.
pub(crate) fn write_headings(out: &mut dyn Write, plain: bool) -> io::Result<()> {
    let group = format!("{:>9} {:>7} {:>7} {:>6}", "time", "algbw", "busbw", "#wrong");
    let units = format!("{:>9} {:>7} {:>7} {:>6}", "(us)", "(GB/s)", "(GB/s)", "");
    let [mut kinds, mut names, mut all_units] = [
        format!("#{:>11} {:>13} {:>9} {:>6}  {:^32}  {:^32}", "", "", "", "", "out-of-place", "in-place"),
        format!("#{:>11} {:>13} {:>9} {:>6}  {group}  {group}", "size", "count", "type", "redop"),
        format!("#{:>11} {:>13} {:>9} {:>6}  {units}  {units}", "(B)", "(elements)", "", ""),
    ];
    if plain {
        kinds += &format!("  {:^24}", "plain ring, out-of-place");
        names += &format!("  {:>9} {:>7} {:>6} {:>9}", "time", "busbw", "#wrong", "overhead");
        all_units += &format!("  {:>9} {:>7} {:>6} {:>9}", "(us)", "(GB/s)", "", "(%)");
    }
    writeln!(out, "{}\n{}\n{}", kinds.trim_end(), names.trim_end(), all_units.trim_end())
}

/// Writes one row.
pub(crate) fn write_row(out: &mut dyn Write, row: &Row, dtype: Dtype, op: ReduceOp) -> io::Result<()> {
    let wrong = |figures: &Figures| figures.wrong.map_or_else(|| "N/A".into(), |wrong| wrong.to_string());
    write!(out, " {:>11} {:>13} {:>9} {:>6}", row.bytes, row.count, dtype_name(dtype), op_name(op))?;
    for figures in [&row.out_of_place, &row.in_place] {
        let Figures { time_us, algbw_gb_per_s, busbw_gb_per_s, .. } = figures;
        write!(out, "  {time_us:>9.1} {algbw_gb_per_s:>7.2} {busbw_gb_per_s:>7.2} {:>6}", wrong(figures))?;
    }
    if let (Some(plain), Some(overhead)) = (&row.plain_ring, row.overhead_percent) {
        let Figures { time_us, busbw_gb_per_s, .. } = plain;
        write!(out, "  {time_us:>9.1} {busbw_gb_per_s:>7.2} {:>6} {overhead:>9.1}", wrong(plain))?;
    }
    writeln!(out)?;
    out.flush()
}

/// Writes the rows' breakdowns as a table of their own, if they have any.
pub(crate) fn write_breakdowns(out: &mut dyn Write, rows: &[Row]) -> io::Result<()> {
    let mut parts = rows.iter().filter_map(|row| Some((row.bytes, row.breakdown.as_ref()?))).peekable();
    if parts.peek().is_none() {
        return Ok(());
    }
    writeln!(
        out,
        "#\n# breakdown, out of place, a launch for each step, by CUDA events; means over the ranks:"
    )?;
    writeln!(out, "#   total: until the rank has ended; the sum of the others")?;
    writeln!(
        out,
        "#   link: the steps' kernels without encryption (load, reduce, store to the peer), less launch"
    )?;
    writeln!(out, "#   crypto: what they take more with it")?;
    writeln!(out, "#   wait: between the rank's kernels, for the events of others")?;
    writeln!(out, "#   launch: the kernels' begin and end, as of one that has nothing to do")?;
    let headings = ["size", "total", "link", "crypto", "wait", "launch"];
    let units = ["(B)", "(us)", "(us)", "(us)", "(us)", "(us)"];
    for [first, rest @ ..] in [headings, units] {
        write!(out, "#{first:>11}")?;
        rest.iter().try_for_each(|cell| write!(out, " {cell:>9}"))?;
        writeln!(out)?;
    }
    for (bytes, Parts { total_us, link_us, crypto_us, wait_us, launch_us }) in parts {
        write!(out, "#{bytes:>11}")?;
        for us in [total_us, link_us, crypto_us, wait_us, launch_us] {
            write!(out, " {us:>9.1}")?;
        }
        writeln!(out)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(microseconds: &[u64]) -> Times {
        let mut times = Times::default();
        microseconds.iter().for_each(|&us| times.push(Duration::from_micros(us)));
        times
    }

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(times(&[9]).microseconds(), [9.0, 9.0, 9.0]);
        assert_eq!(times(&[9, 1, 2]).microseconds(), [2.0, 1.0, 9.0]);
        assert_eq!(times(&[9, 1, 2, 4]).microseconds(), [3.0, 1.0, 9.0]);
    }

    #[test]
    fn bandwidths_follow_nccl_tests() {
        let figures = Figures::new(1_000_000, 4, &times(&[500, 400, 1000]), Some(0));
        assert!((figures.time_us - 500.0).abs() < 1e-9);
        assert!((figures.algbw_gb_per_s - 2.0).abs() < 1e-9);
        assert!((figures.busbw_gb_per_s - 3.0).abs() < 1e-9);
        assert!((figures.time_min_us - 400.0).abs() < 1e-9 && (figures.time_max_us - 1000.0).abs() < 1e-9);
    }

    #[test]
    fn rows_line_up_with_their_headings() {
        let figures = |us| Figures::new(1 << 20, 4, &times(&[us]), Some(3));
        let row = Row::new(1 << 20, 1 << 18, [figures(150), figures(100)], Some(figures(100)));
        let mut text = Vec::new();
        write_headings(&mut text, true).unwrap();
        write_row(&mut text, &row, Dtype::F32, ReduceOp::Sum).unwrap();
        let text = String::from_utf8(text).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[1].len(), lines[3].len(), "{text}");
        assert!(lines[3].ends_with("50.0"), "{text}");
        assert_eq!(row.wrong(), 9);
        let mut text = Vec::new();
        write_breakdowns(&mut text, std::slice::from_ref(&row)).unwrap();
        assert!(text.is_empty());
        let parts =
            Breakdown { total_us: 210.0, link_us: 50.0, crypto_us: 100.0, launch_us: 20.0, wait_us: 40.0 };
        write_breakdowns(&mut text, &[row.broken_down(Some(parts))]).unwrap();
        let text = String::from_utf8(text).unwrap();
        let lines: Vec<_> = text.lines().collect();
        let [.., headings, units, cells] = lines[..] else { panic!("{text}") };
        assert_eq!([headings.len(), units.len()], [cells.len(); 2], "{text}");
        let cells: Vec<_> = cells.split_whitespace().skip(1).collect();
        assert_eq!(cells, ["1048576", "210.0", "50.0", "100.0", "40.0", "20.0"], "{text}");
    }
}
