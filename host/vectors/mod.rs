//! The vendored test vectors (NIST CAVP, SP 800-38A, FIPS 197, RFC 3686, Wycheproof, our own cases) and their runner.
//!
//! They are compiled in, so that an installed `ringseal vectors` can check the very backend that it would use.
//! Provenance and sha256 of each file are in `vendor-vectors/README.md`.

mod check;
mod parse;

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroUsize;

use crate::backend::Backend;
use crate::{Error, Result};
use check::Vector;

/// Vectors from one source, all of one kind.
#[derive(Debug)]
pub struct Suite {
    name: &'static str,
    vectors: Vec<Vector>,
}

/// What became of one suite on one backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SuiteReport {
    /// Name of the suite.
    pub name: &'static str,
    /// How many vectors were run: `passed` and `failures` together.
    pub ran: usize,
    /// How many gave the published result.
    pub passed: usize,
    /// Those that did not.
    pub failures: Vec<Failure>,
    /// How many were not run, by reason.
    pub skipped: BTreeMap<String, usize>,
}

/// A vector that did not give the published result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Where the vector stands: file and line, or file and test number.
    pub vector: String,
    /// What happened instead.
    pub what: String,
}

/// What became of every suite on one backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Name of the backend.
    pub backend: &'static str,
    /// One entry a suite, in a fixed order.
    pub suites: Vec<SuiteReport>,
}

/// Runs every suite on `backend`, of each suite one vector in `every` (1 runs all; groups of 15 are alike, so a
/// number without the factors 3 and 5 samples fairly).
///
/// # Errors
/// [`Error::File`] when a vendored file is malformed. A vector that fails is no error but an entry of the report.
pub fn run(backend: &dyn Backend, every: NonZeroUsize) -> Result<Report> {
    let suites = suites()?.iter().map(|suite| suite.run(backend, every)).collect();
    Ok(Report { backend: backend.name(), suites })
}

/// Every suite, parsed.
///
/// # Errors
/// [`Error::File`] when a vendored file is malformed.
pub fn suites() -> Result<Vec<Suite>> {
    let mut suites = vec![
        Suite::new("fips-197", each(&FIPS_197, parse::ctr)?),
        Suite::new("sp800-38a-ctr", each(&SP800_38A, parse::ctr)?),
        Suite::new("rfc3686-ctr", each(&RFC_3686, parse::ctr)?),
    ];
    let encrypt = each(&CAVP_ENCRYPT, parse::gcm_encrypt)?;
    let decrypt = each(&CAVP_DECRYPT, parse::gcm_decrypt)?;
    let gmac = encrypt.iter().chain(&decrypt).filter_map(Vector::as_gmac).collect();
    suites.extend([
        Suite::new("cavp-gcm-encrypt", encrypt),
        Suite::new("cavp-gcm-decrypt", decrypt),
        Suite::new("cavp-gmac", gmac),
        Suite::new("wycheproof-gcm", each(&WYCHEPROOF_GCM, parse::wycheproof)?),
        Suite::new("wycheproof-gmac", each(&WYCHEPROOF_GMAC, parse::wycheproof)?),
        Suite::new("ringseal-cases", each(&CASES, parse::gcm_encrypt)?),
    ]);
    Ok(suites)
}

impl Suite {
    fn new(name: &'static str, vectors: Vec<Vector>) -> Self {
        Self { name, vectors }
    }

    /// Name, such as `cavp-gcm-encrypt`.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Number of vectors.
    #[expect(clippy::len_without_is_empty, reason = "no suite is empty")]
    pub fn len(&self) -> usize {
        self.vectors.len()
    }

    /// Runs one vector in `every` on `backend`, beginning with the first.
    pub fn run(&self, backend: &dyn Backend, every: NonZeroUsize) -> SuiteReport {
        let mut report = SuiteReport {
            name: self.name,
            ran: 0,
            passed: 0,
            failures: Vec::new(),
            skipped: BTreeMap::new(),
        };
        for vector in self.vectors.iter().step_by(every.get()) {
            match vector.check(backend) {
                Ok(()) => {
                    report.ran += 1;
                    report.passed += 1;
                }
                Err(check::Problem::Backend(error @ Error::Unsupported { .. })) => {
                    report.skip(error.to_string(), 1)
                }
                Err(problem) => {
                    report.ran += 1;
                    report.failures.push(Failure { vector: vector.place.clone(), what: problem.to_string() });
                }
            }
        }
        let left_out = self.len() - self.vectors.iter().step_by(every.get()).len();
        if left_out > 0 {
            report.skip(format!("one in {every} sampled"), left_out);
        }
        report
    }
}

impl SuiteReport {
    fn skip(&mut self, reason: String, count: usize) {
        *self.skipped.entry(reason).or_default() += count;
    }
}

impl Report {
    /// Number of vectors run.
    pub fn ran(&self) -> usize {
        self.suites.iter().map(|suite| suite.ran).sum()
    }

    /// Number of vectors that gave the published result.
    pub fn passed(&self) -> usize {
        self.suites.iter().map(|suite| suite.passed).sum()
    }

    /// Number of vectors that did not.
    pub fn failed(&self) -> usize {
        self.suites.iter().map(|suite| suite.failures.len()).sum()
    }

    /// Number of vectors not run.
    pub fn skipped(&self) -> usize {
        self.suites.iter().flat_map(|suite| suite.skipped.values()).sum()
    }
}

/// A table with a line a suite, then the failures, then the reasons for skipping.
impl fmt::Display for Report {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = |name: &str, counts: [usize; 4]| {
            let [ran, passed, failed, skipped] = counts;
            writeln!(formatter, "{name:<18} {ran:>7} {passed:>7} {failed:>7} {skipped:>7}")
        };
        for suite in &self.suites {
            let skipped = suite.skipped.values().sum();
            line(suite.name, [suite.ran, suite.passed, suite.failures.len(), skipped])?;
        }
        line("total", [self.ran(), self.passed(), self.failed(), self.skipped()])?;
        for suite in &self.suites {
            for Failure { vector, what } in &suite.failures {
                writeln!(formatter, "FAILED {} {vector}: {what}", suite.name)?;
            }
            for (reason, count) in &suite.skipped {
                writeln!(formatter, "skipped {} of {}: {reason}", count, suite.name)?;
            }
        }
        Ok(())
    }
}

/// Parses all files of one kind, each a name and its text.
fn each(
    files: &[(&'static str, &'static str)],
    parse: fn(&'static str, &'static str) -> Result<Vec<Vector>>,
) -> Result<Vec<Vector>> {
    let parsed: Result<Vec<_>> = files.iter().map(|(name, text)| parse(name, text)).collect();
    Ok(parsed?.into_iter().flatten().collect())
}

/// A file's name and text.
macro_rules! vendored {
    ($folder:literal, $name:literal) => {
        ($name, include_str!(concat!("../../vendor-vectors/", $folder, "/", $name)))
    };
}

const FIPS_197: [(&str, &str); 1] = [vendored!("nist", "fips-197.txt")];
const SP800_38A: [(&str, &str); 1] = [vendored!("nist", "sp800-38a-ctr.txt")];
const RFC_3686: [(&str, &str); 3] = [
    vendored!("rfc3686", "aes-128-ctr.txt"),
    vendored!("rfc3686", "aes-192-ctr.txt"),
    vendored!("rfc3686", "aes-256-ctr.txt"),
];
const CAVP_ENCRYPT: [(&str, &str); 3] = [
    vendored!("cavp-gcm", "gcmEncryptExtIV128.rsp"),
    vendored!("cavp-gcm", "gcmEncryptExtIV192.rsp"),
    vendored!("cavp-gcm", "gcmEncryptExtIV256.rsp"),
];
const CAVP_DECRYPT: [(&str, &str); 3] = [
    vendored!("cavp-gcm", "gcmDecrypt128.rsp"),
    vendored!("cavp-gcm", "gcmDecrypt192.rsp"),
    vendored!("cavp-gcm", "gcmDecrypt256.rsp"),
];
const WYCHEPROOF_GCM: [(&str, &str); 1] = [vendored!("wycheproof", "aes_gcm_test.json")];
const WYCHEPROOF_GMAC: [(&str, &str); 1] = [vendored!("wycheproof", "aes_gmac_test.json")];
const CASES: [(&str, &str); 1] = [vendored!("ringseal", "cases.rsp")];
