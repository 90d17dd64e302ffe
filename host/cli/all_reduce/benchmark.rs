//! Times all-reduces on made-up data and checks every element.

use std::io;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use ringseal::cuda::{Breakdown, Calibrated, StepTimes};
use ringseal::{Dtype, ReduceOp};
use serde::Serialize;

use super::group::{Group, Setup};
use super::keystream::{Missing, MissingOfSize};
use crate::cli::failure::{Failure, Outcome};
use crate::cli::output::AtomicFile;
use crate::cli::sample::{Sample, wrong_elements};
use crate::cli::table::{self, Figures, Row, Times};
use crate::cli::values::{ByteSize, dtype_name, op_name};

/// Sizes when none are asked for: a few seconds on a laptop.
const BEGIN: ByteSize = ByteSize(64 << 10);
const END: ByteSize = ByteSize(16 << 20);
const FACTOR: usize = 4;

/// Sizes in bytes, each a factor times the one before.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sweep {
    begin: usize,
    end: usize,
    factor: usize,
}

impl Sweep {
    pub(super) fn new(
        begin: Option<ByteSize>,
        end: Option<ByteSize>,
        factor: Option<usize>,
    ) -> Outcome<Self> {
        let begin = begin.unwrap_or_else(|| end.map_or(BEGIN, |end| end.min(BEGIN)));
        let end = end.unwrap_or(begin.max(END));
        let factor = factor.unwrap_or(FACTOR);
        if begin.0 == 0 {
            return Err(Failure::Input("--minbytes 0: the smallest size must be at least 1 byte".into()));
        }
        if end < begin {
            return Err(Failure::Input(format!("--maxbytes {end} is less than --minbytes {begin}")));
        }
        if factor < 2 {
            return Err(Failure::Input(format!("--stepfactor {factor}: sizes must grow; use 2 or more")));
        }
        Ok(Self { begin: begin.0, end: end.0, factor })
    }

    /// The last of the sizes.
    pub(super) fn largest(self) -> usize {
        self.sizes().last().unwrap_or(self.begin)
    }

    fn sizes(self) -> impl Iterator<Item = usize> {
        std::iter::successors(Some(self.begin), move |&size| size.checked_mul(self.factor))
            .take_while(move |&size| size <= self.end)
    }
}

/// A benchmark, with its arguments parsed.
pub(super) struct Benchmark {
    pub(super) setup: Setup,
    /// With a launch for each step, and that without encryption.
    pub(super) breakdown: Option<[Setup; 2]>,
    pub(super) show_calibration: bool,
    pub(super) sweep: Sweep,
    pub(super) iterations: NonZeroUsize,
    pub(super) warmup: usize,
    pub(super) check: bool,
    pub(super) dtype: Dtype,
    pub(super) op: ReduceOp,
    pub(super) json: Option<PathBuf>,
}

/// What the JSON file holds.
#[derive(Serialize)]
struct Document<'a> {
    ringseal: &'static str,
    description: &'a str,
    ranks: usize,
    dtype: &'static str,
    op: &'static str,
    iterations: NonZeroUsize,
    warmup: usize,
    rows: &'a [Row],
    /// Where keystream was made ahead of time.
    #[serde(skip_serializing_if = "Option::is_none")]
    missing_keystream: Option<Missing>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    missing_keystream_by_size: &'a [MissingOfSize],
}

/// Which result a run leaves where.
#[derive(Clone, Copy)]
enum Place {
    Out,
    In,
}

impl Benchmark {
    /// Measures every size, prints the table, and fails if an element was wrong.
    pub(super) fn run(self) -> Outcome {
        let json = self.json.as_deref().map(AtomicFile::create).transpose()?;
        let mut group = Group::new(&self.setup, self.sweep.largest())?;
        let mut plain =
            self.setup.plain_ring().map(|setup| Group::new(&setup, self.sweep.largest())).transpose()?;
        let description = self.setup.description()?;
        let mut stdout: Box<dyn io::Write> = match self.setup.own_ranks().start {
            0 => Box::new(io::stdout().lock()),
            _ => Box::new(io::sink()),
        };
        let mut notes = group.notes();
        if self.show_calibration {
            notes.extend(self.calibration(&group)?);
        }
        self.write_preamble(&mut stdout, &description, &notes, plain.is_some()).map_err(Failure::stdout)?;
        let (mut rows, mut missing, mut missing_by_size) =
            (Vec::new(), group.missing_keystream()?, Vec::new());
        for size in self.sweep.sizes() {
            let row = self.measure(size, &mut group, plain.as_mut())?;
            let before = std::mem::replace(&mut missing, group.missing_keystream()?);
            if let (Some(missing), Some(before)) = (missing, before) {
                missing_by_size.push(MissingOfSize { bytes: size, missing: missing.since(before) });
            }
            table::write_row(&mut stdout, &row, self.dtype, self.op).map_err(Failure::stdout)?;
            rows.push(row);
        }
        for group in [Some(group), plain].into_iter().flatten() {
            group.close()?;
        }
        let rows = self.break_down(rows)?;
        table::write_breakdowns(&mut stdout, &rows).map_err(Failure::stdout)?;
        for line in missing.map(|missing| missing.lines(&missing_by_size)).unwrap_or_default() {
            writeln!(stdout, "# {line}").map_err(Failure::stdout)?;
        }
        self.write_summary(&mut stdout, &rows).map_err(Failure::stdout)?;
        if let Some(mut file) = json {
            file.write(&self.document(&description, &rows, missing, &missing_by_size)?)?;
            file.commit()?;
        }
        match rows.iter().map(Row::wrong).sum() {
            0 => Ok(()),
            wrong => Err(Failure::Wrong(format!("{wrong} elements are wrong; see the #wrong columns"))),
        }
    }

    /// What was calibrated, line by line.
    fn calibration(&self, group: &Group) -> Outcome<Vec<String>> {
        let Some(Calibrated { calibration, observations, .. }) = group.calibrated() else {
            return Ok(vec!["calibration: none, as there was nothing to choose".into()]);
        };
        let observations =
            serde_json::to_string(observations).map_err(|error| Failure::Input(error.to_string()))?;
        let text = format!("calibration: {}observations: {observations}", calibration.to_json());
        Ok(text.lines().map(str::to_owned).collect())
    }

    fn measure(&self, size: usize, group: &mut Group, plain: Option<&mut Group>) -> Outcome<Row> {
        let count = size / self.dtype.size();
        let ranks = self.setup.ranks();
        let sample = Sample::new(ranks, count, self.dtype, self.op);
        let own = self.setup.own_ranks();
        let mut outputs = vec![vec![0; sample.expected.len()]; own.len()];
        let mut figures = |group: &mut Group, place| self.repeat(group, place, &sample, &mut outputs);
        let sealed = [figures(group, Place::Out)?, figures(group, Place::In)?];
        let plain = plain.map(|group| figures(group, Place::Out)).transpose()?;
        Ok(Row::new(sample.expected.len(), count, sealed, plain))
    }

    /// The rows with their breakdowns, when they are asked for. Each is of the runs of median length.
    fn break_down(&self, rows: Vec<Row>) -> Outcome<Vec<Row>> {
        let Some([sealed, plain]) = &self.breakdown else { return Ok(rows) };
        let largest = self.sweep.largest();
        let (mut sealed, mut plain) = (Group::new(sealed, largest)?, Group::new(plain, largest)?);
        let median = |group: &mut Group, count: usize| -> Outcome<Vec<StepTimes>> {
            let mut runs = Vec::new();
            for iteration in 0..self.warmup.saturating_add(self.iterations.get()) {
                let times = group.time_steps(count, self.dtype, self.op)?;
                if iteration >= self.warmup {
                    runs.push(times);
                }
            }
            runs.sort_by_key(|times| times.iter().map(|rank| rank.span).sum::<Duration>());
            Ok(runs.swap_remove(runs.len() / 2))
        };
        rows.into_iter()
            .map(|row| {
                let times = [median(&mut sealed, row.count())?, median(&mut plain, row.count())?];
                let breakdown = Breakdown::new(&times[0], &times[1]);
                Ok(row.broken_down(Some(breakdown)))
            })
            .collect()
    }

    /// Warms up, times the iterations and checks the last one's result on every rank.
    fn repeat(
        &self,
        group: &mut Group,
        place: Place,
        sample: &Sample,
        outputs: &mut [Vec<u8>],
    ) -> Outcome<Figures> {
        let mut times = Times::default();
        for iteration in 0..self.warmup.saturating_add(self.iterations.get()) {
            let inputs = &sample.inputs[self.setup.own_ranks()];
            for (output, input) in outputs.iter_mut().zip(inputs) {
                match place {
                    Place::Out => output.fill(0xa5), // a result left over from before must not pass the check
                    Place::In => output.copy_from_slice(input),
                }
            }
            let time = match place {
                Place::Out => group.all_reduce(inputs, outputs, self.dtype, self.op)?,
                Place::In => group.all_reduce_in_place(outputs, self.dtype, self.op)?,
            };
            if iteration >= self.warmup {
                times.push(time);
            }
        }
        let wrong = self.check.then(|| {
            outputs.iter().map(|output| wrong_elements(output, &sample.expected, self.dtype.size())).sum()
        });
        Ok(Figures::new(sample.expected.len(), self.setup.ranks(), &times, wrong))
    }

    fn write_preamble(
        &self,
        out: &mut dyn io::Write,
        description: &str,
        notes: &[String],
        plain: bool,
    ) -> io::Result<()> {
        let Self { iterations, warmup, .. } = self;
        writeln!(out, "# ringseal {}: {description}", env!("CARGO_PKG_VERSION"))?;
        notes.iter().try_for_each(|note| writeln!(out, "# {note}"))?;
        let span = match self.setup.own_ranks().len() == self.setup.ranks() {
            true => "from the first rank's start to the last one's end",
            false => "from this rank's start to its end",
        };
        writeln!(out, "# time: median of {iterations} after {warmup} to warm up, {span}")?;
        writeln!(out, "# GB = 1e9 bytes of plaintext of one rank; busbw = algbw x 2(n-1)/n")?;
        if plain {
            writeln!(
                out,
                "# plain ring: the same without encryption; overhead: out-of-place time over the plain ring's, less one"
            )?;
        }
        writeln!(out, "#")?;
        table::write_headings(out, plain)
    }

    fn write_summary(&self, out: &mut dyn io::Write, rows: &[Row]) -> io::Result<()> {
        let wrong: usize = rows.iter().map(Row::wrong).sum();
        match (self.check, wrong) {
            (false, _) => writeln!(out, "# results were not checked (-c 0)")?,
            (true, 0) if self.setup.own_ranks().len() < self.setup.ranks() => {
                writeln!(out, "# every element of this rank is right")?;
            }
            (true, 0) => writeln!(out, "# every element of every rank is right")?,
            (true, wrong) => writeln!(out, "# {wrong} elements are wrong")?,
        }
        out.flush()
    }

    fn document(
        &self,
        description: &str,
        rows: &[Row],
        missing_keystream: Option<Missing>,
        missing_keystream_by_size: &[MissingOfSize],
    ) -> Outcome<Vec<u8>> {
        let document = Document {
            ringseal: env!("CARGO_PKG_VERSION"),
            description,
            ranks: self.setup.ranks(),
            dtype: dtype_name(self.dtype),
            op: op_name(self.op),
            iterations: self.iterations,
            warmup: self.warmup,
            rows,
            missing_keystream,
            missing_keystream_by_size,
        };
        let mut json =
            serde_json::to_vec_pretty(&document).map_err(|error| Failure::Input(error.to_string()))?;
        json.push(b'\n');
        Ok(json)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(begin: Option<&str>, end: Option<&str>, factor: Option<usize>) -> Outcome<Vec<usize>> {
        let size = |text: &str| text.parse().unwrap();
        Ok(Sweep::new(begin.map(size), end.map(size), factor)?.sizes().collect())
    }

    #[test]
    fn sizes_grow_by_the_factor_up_to_the_end() {
        assert_eq!(sizes(Some("8"), Some("100"), Some(2)).unwrap(), [8, 16, 32, 64]);
        assert_eq!(sizes(Some("1M"), Some("1M"), None).unwrap(), [1 << 20]);
        // One end alone moves the other, never into a contradiction.
        assert_eq!(sizes(Some("1G"), None, None).unwrap(), [1 << 30]);
        assert_eq!(sizes(None, Some("1K"), None).unwrap(), [1 << 10]);
        assert_eq!(sizes(None, None, None).unwrap().len(), 5);
        // The last step would overflow.
        assert_eq!(
            sizes(Some("9223372036854775808"), Some("18446744073709551615"), Some(3)).unwrap().len(),
            1
        );
    }

    #[test]
    fn sweeps_that_never_end_are_refused() {
        assert!(sizes(Some("0"), None, None).is_err());
        assert!(sizes(Some("2M"), Some("1M"), None).is_err());
        assert!(sizes(None, None, Some(0)).is_err());
        assert!(sizes(None, None, Some(1)).is_err());
    }
}
