//! The kernel crate's files and their hash.

use std::fs;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::{Error, Result};

/// The kernel crate's folder in the workspace.
pub(crate) const FOLDER: &str = "kernels-gpu";

/// One source file, by its path from the kernel crate's folder with `/` between the parts.
pub(crate) struct SourceFile {
    pub(crate) path: String,
    pub(crate) text: String,
}

/// Everything that the PTX is made from: `Cargo.toml` and the Rust files under `src`, sorted by path. Tests outside `src`
/// do not count.
pub(crate) fn read(root: &Path) -> Result<Vec<SourceFile>> {
    let folder = root.join(FOLDER);
    let mut paths = vec![folder.join("Cargo.toml")];
    collect(&folder.join("src"), &mut paths)?;
    let mut files = Vec::with_capacity(paths.len());
    for path in paths {
        let text = fs::read_to_string(&path).map_err(|e| Error::io(&path, e))?;
        let relative = path.strip_prefix(&folder).expect("listed below the folder");
        let parts: Vec<_> = relative.components().map(|c| c.as_os_str().to_string_lossy()).collect();
        files.push(SourceFile { path: parts.join("/"), text });
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

fn collect(folder: &Path, paths: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).map_err(|e| Error::io(folder, e))? {
        let path = entry.map_err(|e| Error::io(folder, e))?.path();
        if path.is_dir() {
            collect(&path, paths)?;
        } else if path.extension().is_some_and(|e| e == "rs") {
            paths.push(path);
        }
    }
    Ok(())
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
    fn reads_the_manifest_and_sources_but_not_the_tests() {
        let dir = tempfile::tempdir().unwrap();
        let kernels = dir.path().join(FOLDER);
        for (path, text) in [
            ("Cargo.toml", "[package]"),
            ("src/lib.rs", "mod device;"),
            ("src/device/mod.rs", "//"),
            ("src/notes.txt", "no"),
            ("tests/t.rs", "no"),
        ] {
            let path = kernels.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let paths: Vec<_> = read(dir.path()).unwrap().into_iter().map(|f| f.path).collect();
        assert_eq!(paths, ["Cargo.toml", "src/device/mod.rs", "src/lib.rs"]);
    }
}
