//! The multiprocessors' clock rate while a kernel runs, counted on the multiprocessors themselves.
//!
//! The driver's tools don't do: they show 1.98 GHz while tensor work holds a processing cluster at 1.79.

use ringseal::cuda::{Device, DeviceBuffer, Kernel, Launch, Module, Stream};
use ringseal::{Error, Result};

/// Nanoseconds to count for: some hundreds of steps of the coarsest global timer.
const SPAN: u64 = 400_000;
/// Multiprocessors to count on, some in each processing cluster or nearly: they start before the work, which may leave no room beside itself, and
/// the work has all others.
const COUNTED: u32 = 8;

#[repr(C)]
#[derive(Clone, Copy)]
struct Parameters {
    out: u64,
    nanoseconds: u64,
}

/// Clock rates in GHz over the multiprocessors counted on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rates {
    pub(crate) low: f64,
    pub(crate) median: f64,
    pub(crate) high: f64,
}

/// The counting kernel, with a stream of its own to run beside others.
pub(crate) struct Clock {
    kernel: Kernel,
    stream: Stream,
    counts: DeviceBuffer,
}

impl Clock {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        Ok(Self {
            kernel: Module::load(device, include_bytes!("clock.ptx"))?.kernel("count_clocks", 0)?,
            stream: Stream::new(device)?,
            counts: DeviceBuffer::new(device, COUNTED as usize * 16)?,
        })
    }

    /// Counts while what `work` launches keeps the device busy, for at least a millisecond.
    pub(crate) fn rates(&self, work: impl FnOnce() -> Result<()>) -> Result<Rates> {
        let parameters = Parameters { out: self.counts.pointer(), nanoseconds: SPAN };
        let launch = Launch { blocks: COUNTED, threads: 32 };
        // SAFETY: the parameters are those that clock.ptx declares; `counts` has 16 bytes a block.
        unsafe { self.kernel.launch(launch, &self.stream, &parameters)? };
        work()?;
        let bytes = self.counts.to_host(&self.stream)?;
        let word = |bytes: &[u8]| bytes.try_into().map(u64::from_le_bytes).unwrap_or(0);
        let mut rates: Vec<f64> =
            bytes.chunks_exact(16).map(|pair| word(&pair[..8]) as f64 / word(&pair[8..]) as f64).collect();
        rates.sort_by(f64::total_cmp);
        match rates[..] {
            [low, .., high] if high.is_finite() => Ok(Rates { low, median: rates[rates.len() / 2], high }),
            _ => Err(Error::Cuda("the clock kernel counted nothing".into())),
        }
    }
}
