//! How much memory is free, so that a run that cannot fit is refused instead of being killed half-way.

use super::failure::{Failure, Outcome};

/// Refuses `needed` bytes when the system says that fewer are free; where it doesn't say, it lets them pass.
pub(crate) fn require(needed: u128, what: &str) -> Outcome {
    let status = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    match available(&status) {
        Some(free) if needed > u128::from(free) => Err(Failure::Input(format!(
            "{what} needs {:.1} GB of memory, but {:.1} GB are free",
            needed as f64 / 1e9,
            free as f64 / 1e9
        ))),
        _ => Ok(()),
    }
}

/// Bytes free for new work by Linux's estimate (proc_meminfo(5), MemAvailable).
fn available(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_kernels_own_format() {
        let status =
            "MemTotal:       24570000 kB\nMemFree:         9000000 kB\nMemAvailable:   20000000 kB\n";
        assert_eq!(available(status), Some(20_480_000_000));
        assert_eq!(available("MemTotal: 1 kB\n"), None);
        assert_eq!(available("MemAvailable: many kB\n"), None);
    }

    #[test]
    fn more_than_any_machine_has_is_refused_by_name() {
        if cfg!(target_os = "linux") {
            let refusal = require(u128::MAX, "4 ranks").unwrap_err().to_string();
            assert!(refusal.starts_with("4 ranks needs"), "{refusal}");
        }
        assert!(require(0, "nothing").is_ok());
    }
}
