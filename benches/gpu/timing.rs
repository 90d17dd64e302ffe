//! Device time of a piece of work: medians over repeated runs, by events.

use std::time::Duration;

use ringseal::Result;
use ringseal::cuda::Stream;

/// Timed runs; the median of them is reported.
const RUNS: usize = 10;
/// Work shorter than this is timed many at a time in a graph, to keep launch gaps out.
const SHORT: Duration = Duration::from_micros(200);
/// Repetitions in one graph.
const IN_GRAPH: usize = 32;

/// Device time of one piece of work.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Time {
    pub(crate) median: Duration,
    pub(crate) fastest: Duration,
}

/// Times `work(stream, i)`, where `i` counts the calls, so that `work` can rotate among buffers; `evict` goes before each
/// timing and is not timed.
pub(crate) fn time(
    stream: &Stream,
    evict: &dyn Fn(&Stream) -> Result<()>,
    work: &dyn Fn(&Stream, usize) -> Result<()>,
) -> Result<Time> {
    let mut calls = 0;
    let mut next = || {
        calls += 1;
        work(stream, calls)
    };
    // The first launches pay for loading; then one tells how long the work is.
    next()?;
    next()?;
    let estimate = once(stream, &mut next)?;
    let mut times = Vec::with_capacity(RUNS);
    if estimate < SHORT {
        let mut graph = stream.capture(|stream| (0..IN_GRAPH).try_for_each(|i| work(stream, i)))?;
        // SAFETY: `work` outlives the graph, and with it the buffers that it uses.
        let mut replay = || unsafe { graph.launch(stream) };
        replay()?;
        for _ in 0..RUNS {
            evict(stream)?;
            times.push(once(stream, &mut replay)? / IN_GRAPH as u32);
        }
    } else {
        for _ in 0..RUNS {
            evict(stream)?;
            times.push(once(stream, &mut next)?);
        }
    }
    times.sort();
    Ok(Time { median: (times[RUNS / 2 - 1] + times[RUNS / 2]) / 2, fastest: times[0] })
}

fn once(stream: &Stream, work: &mut dyn FnMut() -> Result<()>) -> Result<Duration> {
    let start = stream.record()?;
    work()?;
    let end = stream.record()?;
    end.synchronize()?;
    end.since(&start)
}
