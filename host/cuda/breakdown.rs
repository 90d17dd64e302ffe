//! What a collective's time is made of, by events around its launches.
//!
//! Only the launch-per-step form has launches to put events around. The streams are held until every launch is queued, so
//! that the host's own time is in none of the figures.

use std::sync::atomic::Ordering;
use std::time::Duration;

use cudarc::driver::sys;

use super::driver::check;
use super::{Device, Event, HostBuffer, Stream};
use crate::Result;

/// One rank's part in a collective of a launch for each step, by events on its stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepTimes {
    /// From the moment at which all ranks may begin until this one has ended.
    pub span: Duration,
    /// Of each step's kernel, from when its turn has come until it has ended.
    pub steps: Vec<Duration>,
    /// Of the kernel that ends the collective: it begins and ends as the others do, and has no record to work on.
    pub closing: Duration,
}

impl StepTimes {
    fn launches(&self) -> f64 {
        self.steps.len() as f64 + 1.0
    }

    /// What the steps take beyond what any launch takes.
    fn work_us(&self) -> f64 {
        let steps: f64 = self.steps.iter().copied().map(us).sum();
        steps - self.steps.len() as f64 * us(self.closing)
    }
}

fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Where a collective's time went, in microseconds; each the mean over the ranks. The parts add up to the total.
///
/// Step by step: the persistent form overlaps the parts, and takes less. Ranks that share a GPU work beside each other, so
/// that each takes longer for its own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Breakdown {
    /// [`StepTimes::span`].
    pub total_us: f64,
    /// What the steps take without cryptography, less the launches' share: reading the vector and the mailbox, reducing, storing
    /// to the successor's memory.
    pub link_us: f64,
    /// What they take more with it: the difference of two runs. Can be negative where that lies within their scatter.
    pub crypto_us: f64,
    /// So many launches, each as long as the one that has no record to work on: the kernels' start (with cryptography, filling
    /// the tables of AES) and end.
    pub launch_us: f64,
    /// The rest, in which the rank's stream waited for others' events or went from one launch to the next.
    pub wait_us: f64,
}

impl Breakdown {
    /// Of a collective that was timed as it is, and without cryptography. For one that has none, both are the same.
    pub fn new(timed: &[StepTimes], plain: &[StepTimes]) -> Self {
        let mean = |times: &[StepTimes], of: fn(&StepTimes) -> f64| {
            times.iter().map(of).sum::<f64>() / times.len().max(1) as f64
        };
        let total_us = mean(timed, |rank| us(rank.span));
        let launch_us = mean(timed, |rank| rank.launches() * us(rank.closing));
        let link_us = mean(plain, StepTimes::work_us);
        let crypto_us = mean(timed, StepTimes::work_us) - link_us;
        Self { total_us, link_us, crypto_us, launch_us, wait_us: total_us - link_us - crypto_us - launch_us }
    }
}

/// The events of one collective.
#[derive(Debug)]
pub(super) struct Timer {
    starts: Vec<Event>,
    /// Before and after each of a rank's launches.
    launches: Vec<Vec<[Event; 2]>>,
}

impl Timer {
    /// Begins at what the streams have come to.
    pub(super) fn new(streams: &[&Stream]) -> Result<Self> {
        let starts = streams.iter().map(|stream| stream.record()).collect::<Result<_>>()?;
        Ok(Self { starts, launches: streams.iter().map(|_| Vec::new()).collect() })
    }

    /// Does `launch`, which is rank `rank`'s next one on `stream`.
    pub(super) fn time(
        &mut self,
        rank: usize,
        stream: &Stream,
        launch: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let before = stream.record()?;
        launch()?;
        self.launches[rank].push([before, stream.record()?]);
        Ok(())
    }

    /// Once the streams have passed everything.
    pub(super) fn times(&self) -> Result<Vec<StepTimes>> {
        let of_rank = |(start, launches): (&Event, &Vec<[Event; 2]>)| {
            let times = launches.iter().map(|[before, after]| after.since(before));
            let mut steps = times.collect::<Result<Vec<_>>>()?;
            let span = launches.last().map_or(Ok(Duration::ZERO), |[_, end]| end.since(start))?;
            let closing = steps.pop().unwrap_or_default();
            Ok(StepTimes { span, steps, closing })
        };
        self.starts.iter().zip(&self.launches).map(of_rank).collect()
    }
}

/// Holds streams until it is opened, which it must be before it goes.
pub(super) struct Gate(HostBuffer);

impl Gate {
    /// Closed.
    pub(super) fn new(device: &Device) -> Result<Self> {
        HostBuffer::new(device, 4).map(Self)
    }

    /// Lets no later work of the stream begin. The gate must outlive what it holds.
    pub(super) fn hold(&self, stream: &Stream) -> Result<()> {
        let _current = stream.device().bind()?;
        let flags = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: the stream is alive; the word is pinned, and lives until the stream has passed.
        check("cuStreamWaitValue32", unsafe {
            sys::cuStreamWaitValue32_v2(stream.handle(), self.0.pointer(), 1, flags)
        })
    }

    /// Lets all go on.
    pub(super) fn open(&self) {
        self.0.words()[0].store(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(span: u64, steps: &[u64], closing: u64) -> StepTimes {
        let us = Duration::from_micros;
        StepTimes { span: us(span), steps: steps.iter().copied().map(us).collect(), closing: us(closing) }
    }

    #[test]
    fn the_parts_add_up() {
        let sealed = [times(100, &[20, 25, 15], 5), times(110, &[22, 25, 17], 5)];
        let plain = [times(60, &[8, 9, 9], 2), times(60, &[8, 9, 9], 2)];
        let parts = Breakdown::new(&sealed, &plain);
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-6, "{a} {b}: {parts:?}");
        near(parts.total_us, 105.0);
        near(parts.link_us, 20.0);
        // Means of 45 and 49 us of work, less the link's.
        near(parts.crypto_us, 27.0);
        near(parts.launch_us, 20.0);
        near(parts.wait_us, 38.0);
        near(parts.link_us + parts.crypto_us + parts.launch_us + parts.wait_us, parts.total_us);
        near(Breakdown::new(&plain, &plain).crypto_us, 0.0);
    }
}
