//! Keystream made before each all-reduce of a benchmark: which ones can have it, and what was missing.

use ringseal::collective::{Algorithm, Crypto};
use ringseal::cuda::LaunchForm;
use ringseal::{Dtype, ReduceOp};
use serde::Serialize;

use super::group::{Choice, Structure};
use crate::cli::BackendName;
use crate::cli::failure::{Failure, Outcome};
use crate::cli::values::ByteSize;

/// An all-reduce that keystream is wanted for.
pub(super) struct Wish {
    pub(super) backend: BackendName,
    pub(super) ranks: usize,
    pub(super) choice: Choice,
    pub(super) crypto: Crypto,
    pub(super) structure: Structure,
    pub(super) launch: Option<LaunchForm>,
    pub(super) dtype: Dtype,
    pub(super) op: ReduceOp,
}

impl Wish {
    /// Refuses what no kernel takes keystream for, before a GPU is looked for.
    pub(super) fn check(&self) -> Outcome {
        let refuse = |what: &str| Err(Failure::Input(format!("--keystream: {what}")));
        if !matches!(self.backend, BackendName::Cuda | BackendName::Auto) {
            return refuse("only GPUs make it ahead of time; use --backend cuda");
        }
        if self.crypto == Crypto::None {
            return refuse("--crypto none has none; use --crypto gcm");
        }
        if self.structure != Structure::Fused {
            return refuse("the kernels of --crypto seed make it as they go; use --crypto gcm");
        }
        if self.launch == Some(LaunchForm::PerStep) {
            return refuse("collectives of one launch take it; use --launch persistent");
        }
        match self.choice {
            Choice::Always(Algorithm::Direct | Algorithm::Tree) => {
                return refuse(
                    "--algo direct and tree don't take it; use ring, relay, or of two ranks exchange",
                );
            }
            Choice::Always(Algorithm::Exchange) if self.ranks != 2 => {
                return refuse("--algo exchange takes it of two ranks; use relay");
            }
            _ if self.ranks < 2 => return refuse("one rank seals nothing; use --ranks 2 or more"),
            Choice::Auto | Choice::Always(_) => {}
        }
        let common = matches!(self.dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16)
            && matches!(self.op, ReduceOp::Sum | ReduceOp::Avg);
        match common {
            true => Ok(()),
            false => refuse("sums and averages of float, half and bfloat16 take it; see --op and --datatype"),
        }
    }
}

/// What had no keystream when it was wanted, of this process's ranks in all all-reduces, also those that warm up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Missing {
    /// Records that found none, of all-reduces with some, modulo 2^32.
    pub(super) records: u32,
    /// All-reduces that none was made for.
    pub(super) all_reduces: usize,
}

/// The same of the all-reduces of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct MissingOfSize {
    /// Of a vector.
    pub(super) bytes: usize,
    #[serde(flatten)]
    pub(super) missing: Missing,
}

impl Missing {
    /// What was missing since `before`.
    pub(super) fn since(self, before: Self) -> Self {
        Self {
            records: self.records.wrapping_sub(before.records),
            all_reduces: self.all_reduces - before.all_reduces,
        }
    }

    /// In words, of all sizes and of each that missed any.
    pub(super) fn lines(self, by_size: &[MissingOfSize]) -> Vec<String> {
        let all = format!("keystream was made before each all-reduce: {}", self.phrase());
        let missed = by_size.iter().filter(|of| of.missing.records > 0 || of.missing.all_reduces > 0);
        let of = |of: &MissingOfSize| format!("of {}: {}", ByteSize(of.bytes), of.missing.phrase());
        std::iter::once(all).chain(missed.map(of)).collect()
    }

    fn phrase(self) -> String {
        let Self { records, all_reduces } = self;
        let none = match all_reduces {
            0 => String::new(),
            _ => format!(", and {all_reduces} all-reduces none at all"),
        };
        format!("{records} records had none{none}")
    }
}

#[cfg(test)]
mod tests {
    use ringseal::collective::KeyLength;

    use super::*;

    fn wish() -> Wish {
        Wish {
            backend: BackendName::Cuda,
            ranks: 4,
            choice: Choice::Auto,
            crypto: Crypto::Gcm(KeyLength::Aes256),
            structure: Structure::Fused,
            launch: None,
            dtype: Dtype::F32,
            op: ReduceOp::Sum,
        }
    }

    #[test]
    fn sealed_rings_and_exchanges_of_two_have_it() {
        for (ranks, algorithm) in [(4, Algorithm::Ring), (3, Algorithm::RelayRing), (2, Algorithm::Exchange)]
        {
            let wish = Wish { ranks, choice: Choice::Always(algorithm), ..wish() };
            assert!(wish.check().is_ok(), "{algorithm:?} of {ranks}");
        }
        for dtype in [Dtype::F16, Dtype::Bf16] {
            assert!(Wish { dtype, op: ReduceOp::Avg, ..wish() }.check().is_ok());
        }
        assert!(Wish { launch: Some(LaunchForm::Persistent), ..wish() }.check().is_ok());
        assert!(Wish { ranks: 1, ..wish() }.check().is_err());
    }

    #[test]
    fn what_was_missing_is_said() {
        let (few, all) = (Missing { records: 3, all_reduces: 0 }, Missing { records: 3, all_reduces: 2 });
        let of = |bytes, missing| MissingOfSize { bytes, missing };
        let sizes = [of(65536, few), of(1 << 20, all.since(all)), of(16 << 20, all.since(few))];
        let lines = all.lines(&sizes);
        assert_eq!(lines.len(), 3, "{lines:?}");
        assert!(
            lines[0].ends_with("all-reduce: 3 records had none, and 2 all-reduces none at all"),
            "{lines:?}"
        );
        assert!(lines[1].starts_with("of 64") && lines[1].ends_with(": 3 records had none"), "{lines:?}");
        assert!(lines[2].starts_with("of 16") && lines[2].contains("2 all-reduces"), "{lines:?}");
    }
}
