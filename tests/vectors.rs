//! The vendored vectors, on the backends that need no GPU, and the runner itself.

use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;

use ringseal::aead::{AesKey, Iv, Tag};
use ringseal::backend::{Backend, CounterWidth, PreparedKey};
use ringseal::{Error, Result, backend, vectors};
use sha2::{Digest, Sha256};

#[test]
fn every_vector_passes_on_the_cpu() {
    let report = vectors::run(backend::by_name("cpu").unwrap().as_ref(), NonZeroUsize::MIN).unwrap();
    assert_eq!((report.failed(), report.skipped()), (0, 0), "{report}");
    // The counts of vendor-vectors/README.md: a file that parses to fewer vectors must not go unseen.
    let counts: Vec<_> = report.suites.iter().map(|suite| (suite.name, suite.ran)).collect();
    assert_eq!(
        counts,
        [
            ("fips-197", 4),
            ("sp800-38a-ctr", 3),
            ("rfc3686-ctr", 9),
            ("cavp-gcm-encrypt", 3150),
            ("cavp-gcm-decrypt", 3375),
            ("cavp-gmac", 1035),
            ("wycheproof-gcm", 316),
            ("wycheproof-gmac", 414),
            ("ringseal-cases", 10),
        ]
    );
}

/// A backend that deciphers rightly but believes every tag.
struct Gullible;

/// A backend that can do nothing yet.
struct Unfinished;

struct GullibleKey(Box<dyn PreparedKey>);

impl Backend for Gullible {
    fn name(&self) -> &'static str {
        "gullible"
    }
    fn prepare(&self, key: &AesKey) -> Result<Box<dyn PreparedKey>> {
        Ok(Box::new(GullibleKey(backend::cpu::Cpu.prepare(key)?)))
    }
}

impl PreparedKey for GullibleKey {
    fn ctr_xor(&self, counter_block: [u8; 16], width: CounterWidth, data: &mut [u8]) -> Result<()> {
        self.0.ctr_xor(counter_block, width, data)
    }
    fn seal_in_place(&self, iv: Iv<'_>, aad: &[u8], data: &mut [u8]) -> Result<Tag> {
        self.0.seal_in_place(iv, aad, data)
    }
    fn open_in_place(&self, iv: Iv<'_>, aad: &[u8], data: &mut [u8], _tag: &Tag) -> Result<()> {
        self.0.seal_in_place(iv, aad, data).map(|_| ())
    }
}

impl Backend for Unfinished {
    fn name(&self) -> &'static str {
        "unfinished"
    }
    fn prepare(&self, _key: &AesKey) -> Result<Box<dyn PreparedKey>> {
        Err(Error::Unsupported { backend: "unfinished", what: "anything".into() })
    }
}

/// The runner itself: it must see a backend that accepts forgeries, and fail exactly the forgeries.
#[test]
fn accepted_forgeries_are_reported() {
    let report = vectors::run(&Gullible, NonZeroUsize::MIN).unwrap();
    let failed: Vec<_> = report
        .suites
        .iter()
        .map(|suite| (suite.name, suite.failures.len()))
        .filter(|entry| entry.1 > 0)
        .collect();
    let forgeries_with_no_plaintext = 351;
    assert_eq!(
        failed,
        [
            ("cavp-gcm-decrypt", 1724),
            ("cavp-gmac", forgeries_with_no_plaintext),
            ("wycheproof-gcm", 81),
            ("wycheproof-gmac", 324)
        ]
    );
}

/// What a backend can't do is counted apart and never as passed.
#[test]
fn unsupported_is_skipped_not_passed() {
    let every = NonZeroUsize::new(7).unwrap();
    let report = vectors::run(&Unfinished, every).unwrap();
    let all: usize = vectors::suites().unwrap().iter().map(vectors::Suite::len).sum();
    assert_eq!((report.ran(), report.passed(), report.failed(), report.skipped()), (0, 0, 0, all));
    let reasons: Vec<_> = report.suites[0].skipped.keys().map(String::as_str).collect();
    assert_eq!(reasons, ["one in 7 sampled", "the unfinished backend does not support anything"]);
}

/// The kernels' own source. Long suites are sampled, as a message costs some 20 ms; `ringseal vectors --backend emulated`
/// runs them whole.
#[test]
fn vectors_pass_on_the_emulated_kernels() {
    let emulated = backend::by_name("emulated").unwrap();
    for suite in vectors::suites().unwrap() {
        let every = if suite.len() <= 20 { 1 } else { 61 };
        let report = suite.run(emulated.as_ref(), NonZeroUsize::new(every).unwrap());
        assert!(report.failures.is_empty(), "{report:?}");
        assert_eq!(report.passed, suite.len().div_ceil(every), "{report:?}");
    }
}

/// Every vendored file is the one that `vendor-vectors/README.md` describes, and none is missing there.
#[test]
fn files_are_those_of_the_readme() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("vendor-vectors");
    let readme = fs::read_to_string(root.join("README.md")).unwrap();
    let folders =
        fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_dir());
    let files: Vec<_> =
        folders.flat_map(|folder| fs::read_dir(folder).unwrap()).map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 14);
    for file in files {
        let data = fs::read(&file).unwrap();
        let name = file.strip_prefix(&root).unwrap().display();
        let row = format!("| `{name}` | {} | `{}` |", data.len(), hex::encode(Sha256::digest(&data)));
        assert!(readme.contains(&row), "{row} is not in README.md");
    }
}
