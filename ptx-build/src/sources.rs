//! The kernel crate's files and their hash.

use std::fs;
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::{Error, Result};

/// The kernel crate's folder in the workspace.
pub(crate) const FOLDER: &str = "kernels-gpu";

/// One source file, by its path from the kernel crate's folder with `/` between the parts.
pub(crate) struct SourceFile {
    pub(crate) path: String,
    pub(crate) text: String,
}

/// Reads the files of that name.
pub(crate) fn read(root: &Path, paths: &[String]) -> Result<Vec<SourceFile>> {
    let read = |relative: &String| {
        let path = root.join(FOLDER).join(relative);
        let text = fs::read_to_string(&path).map_err(|e| Error::io(&path, e))?;
        Ok(SourceFile { path: relative.clone(), text })
    };
    paths.iter().map(read).collect()
}

/// The kernel crate's files in a dependency file of rustc's: all that the compiler read to make the PTX, so not the
/// emulator. No other file can change the PTX unless one of these changes too, to name it.
pub(crate) fn listed(dependencies: &str) -> Vec<String> {
    let prefix = format!("{FOLDER}/");
    dependencies
        .lines()
        .filter_map(|line| Some(line.strip_prefix(&prefix)?.strip_suffix(':')?.to_owned()))
        .collect()
}

/// Hash of the files and of the recipe that compiles them. Lengths go in too, so that text cannot move between files.
pub(crate) fn hash(files: &[SourceFile], recipe: &str) -> String {
    let mut sha = Sha256::new();
    let mut part = |text: &str| {
        sha.update((text.len() as u64).to_le_bytes());
        sha.update(text.as_bytes());
    };
    part(recipe);
    for file in files {
        part(&file.path);
        part(&file.text);
    }
    hex(&sha.finalize())
}

/// SHA-256 of a text, in hex.
pub(crate) fn sha256(text: &str) -> String {
    hex(&Sha256::digest(text.as_bytes()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> SourceFile {
        SourceFile { path: path.into(), text: text.into() }
    }

    #[test]
    fn hash_sees_text_names_recipe_and_file_borders() {
        let base = hash(&[file("src/a.rs", "x"), file("src/b.rs", "y")], "r");
        assert_eq!(base, hash(&[file("src/a.rs", "x"), file("src/b.rs", "y")], "r"));
        for other in [
            hash(&[file("src/a.rs", "x"), file("src/b.rs", "z")], "r"),
            hash(&[file("src/a.rs", "x"), file("src/c.rs", "y")], "r"),
            hash(&[file("src/a.rs", "x"), file("src/b.rs", "y")], "s"),
            hash(&[file("src/a.rs", "xy"), file("src/b.rs", "")], "r"),
            hash(&[file("src/a.rs", "x")], "r"),
        ] {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn sha256_is_fips_180() {
        // FIPS 180-4 example: SHA-256("abc").
        assert_eq!(sha256("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }

    #[test]
    fn dependencies_are_the_crates_own_files() {
        // As rustc writes it: what depends, and each file again with a colon.
        let text = "/x/deps/ringseal_kernels.s: kernels-gpu/src/lib.rs kernels-gpu/src/aes.rs\n\nkernels-gpu/src/lib.rs:\n\
                    kernels-gpu/src/aes.rs:\n/rust/library/core/src/lib.rs:\n";
        assert_eq!(listed(text), ["src/lib.rs", "src/aes.rs"]);
    }

    #[test]
    fn a_missing_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = read(dir.path(), &["src/gone.rs".to_owned()]).err().unwrap().to_string();
        assert!(error.contains("src/gone.rs"), "{error}");
    }
}
