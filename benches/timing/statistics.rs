//! Welch's t-test between two sets of times, as dudect uses it (Reparaz, Balasch, Verbauwhede, "Dude, is my code constant
//! time?", 2017).

use serde::Serialize;

/// Shares of the pooled times that each test keeps: the slowest are cut off, since interruptions, which have nothing to do
/// with the data, are among them.
pub(crate) const CROPS: [f64; 6] = [1.0, 0.99, 0.95, 0.9, 0.75, 0.5];

/// Two classes compared.
#[derive(Serialize)]
pub(crate) struct Comparison {
    pub(crate) kernel: String,
    pub(crate) class: String,
    pub(crate) against: String,
    /// Times of either class.
    pub(crate) launches: [usize; 2],
    /// Mean of either class in nanoseconds, nothing cut off.
    pub(crate) mean_ns: [f64; 2],
    /// Median of either class in nanoseconds.
    pub(crate) median_ns: [f64; 2],
    /// t for each of [`CROPS`].
    pub(crate) t: [f64; CROPS.len()],
    /// That of them which is furthest from 0.
    pub(crate) worst_t: f64,
}

/// Compares the times in nanoseconds of two classes.
pub(crate) fn compare(kernel: &str, classes: [&str; 2], times: [&[f64]; 2]) -> Comparison {
    let mut pooled = times.concat();
    pooled.sort_by(f64::total_cmp);
    let t = CROPS.map(|share| {
        let last = (pooled.len() as f64 * share) as usize;
        let limit = pooled[last.clamp(1, pooled.len()) - 1];
        welch(times.map(|times| Moments::of(times.iter().copied().filter(|&time| time <= limit))))
    });
    let worst_t = t.iter().copied().fold(0.0, |worst: f64, t| if t.abs() > worst.abs() { t } else { worst });
    Comparison {
        kernel: kernel.into(),
        class: classes[0].into(),
        against: classes[1].into(),
        launches: times.map(<[f64]>::len),
        mean_ns: times.map(|times| Moments::of(times.iter().copied()).mean),
        median_ns: times.map(median),
        t,
        worst_t,
    }
}

fn median(times: &[f64]) -> f64 {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}

struct Moments {
    count: f64,
    mean: f64,
    /// Sum of the squared distances from the mean.
    squares: f64,
}

impl Moments {
    /// Welford's updates, which keep their precision.
    fn of(times: impl Iterator<Item = f64>) -> Self {
        let mut moments = Self { count: 0.0, mean: 0.0, squares: 0.0 };
        for time in times {
            moments.count += 1.0;
            let distance = time - moments.mean;
            moments.mean += distance / moments.count;
            moments.squares += distance * (time - moments.mean);
        }
        moments
    }

    /// Variance of the mean.
    fn error(&self) -> f64 {
        self.squares / (self.count - 1.0) / self.count
    }
}

/// Welch's t; 0 where no difference can be told, because the times left don't differ at all.
fn welch([a, b]: [Moments; 2]) -> f64 {
    let error = (a.error() + b.error()).sqrt();
    if error > 0.0 { (a.mean - b.mean) / error } else { 0.0 }
}
