//! What a run found: the table on the terminal and the JSON for benches/results/.

use serde::Serialize;

/// One kernel at one size.
#[derive(Serialize)]
pub(crate) struct Row {
    /// What ran, such as "ctr".
    pub(crate) kernel: String,
    /// Key length in bits; 0 where no cipher is involved.
    pub(crate) key_bits: u32,
    /// Messages in the call.
    pub(crate) messages: u64,
    /// Bytes of each message.
    pub(crate) bytes: u64,
    /// Median device time of a call in microseconds.
    pub(crate) median_us: f64,
    /// Fastest call in microseconds.
    pub(crate) fastest_us: f64,
    /// Plaintext bytes over the median time, in 10^9 bytes a second.
    pub(crate) gb_per_s: f64,
    /// Shared-memory wavefronts for 32 blocks; none for what they don't bound.
    pub(crate) wavefronts: Option<f64>,
    /// Clock rate of the multiprocessors while it ran, in GHz: lowest, median, highest.
    pub(crate) clock_ghz: Option<[f64; 3]>,
    /// Multiprocessors x clock x 512 / wavefronts, in 10^9 bytes a second.
    pub(crate) limit_gb_per_s: Option<f64>,
    /// Rate over limit.
    pub(crate) of_limit: Option<f64>,
    /// Rate over that of a device copy in the same run.
    pub(crate) of_copy: f64,
}

/// A whole run.
#[derive(Serialize)]
pub(crate) struct Report {
    /// The driver's name for the GPU.
    pub(crate) device: String,
    /// Newest CUDA version that the driver supports.
    pub(crate) driver: String,
    /// Its multiprocessors.
    pub(crate) multiprocessors: u32,
    /// The kernels' sha256: of the embedded PTX, or of the file that was given.
    pub(crate) ptx_sha256: String,
    /// Bytes copied from device to device memory (read once, written once), in 10^9 a second.
    pub(crate) copy_gb_per_s: f64,
    /// The measurements.
    pub(crate) rows: Vec<Row>,
}

/// The table's heading.
pub(crate) const HEADING: &str = "kernel           key   messages x bytes      median us      GB/s   clock GHz      W   limit  of limit  of copy";

impl Row {
    /// One line of the table.
    pub(crate) fn line(&self) -> String {
        let number = |value: Option<f64>, digits: usize| {
            value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
        };
        let clock =
            self.clock_ghz.map_or_else(|| "-".to_owned(), |[low, _, high]| format!("{low:.3}-{high:.3}"));
        let size = match self.messages {
            1 => self.bytes.to_string(),
            messages => format!("{messages} x {}", self.bytes),
        };
        format!(
            "{:<16} {:>3} {:>18} {:>14.2} {:>9.1} {:>11} {:>6} {:>7} {:>9} {:>8.3}",
            self.kernel,
            if self.key_bits == 0 { "-".into() } else { self.key_bits.to_string() },
            size,
            self.median_us,
            self.gb_per_s,
            clock,
            number(self.wavefronts, 1),
            number(self.limit_gb_per_s, 0),
            number(self.of_limit, 3),
            self.of_copy,
        )
    }
}
