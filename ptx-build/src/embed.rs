//! What `build.rs` of the root package does: puts the PTX modules and the manifest where `host/ptx.rs` includes them from.

use std::fs;
use std::path::Path;

use crate::manifest::{Manifest, Target};
use crate::{Error, Result, recipe, sources};

/// Folder of the checked-in modules, from the workspace's root.
pub(crate) const CHECKED_IN: &str = "host/ptx";

/// The manifest's file name, beside the modules.
pub(crate) const MANIFEST: &str = "manifest.json";

/// Where the embedded modules came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The checked-in ones, which are up to date.
    CheckedIn,
    /// Compiled now, because the kernel sources have changed since the checked-in ones were made.
    Rebuilt,
}

/// Writes the modules and the manifest to `out`. The checked-in ones where the kernel sources' hash equals the manifest's, or
/// where there are no kernel sources (the published package); else newly compiled ones, which needs rust-src.
pub fn embed(root: &Path, out: &Path) -> Result<Origin> {
    if !root.join(sources::FOLDER).is_dir() {
        copy(root, &read_manifest(root)?, out)?;
        return Ok(Origin::CheckedIn);
    }
    match read_manifest(root) {
        Ok(manifest) if is_up_to_date(root, &manifest) => {
            copy(root, &manifest, out)?;
            Ok(Origin::CheckedIn)
        }
        _ => {
            write(&recipe::build(root, &out.join("ptx"))?, out)?;
            Ok(Origin::Rebuilt)
        }
    }
}

/// Whether the modules are what the sources compile to. A file that has gone is a change.
fn is_up_to_date(root: &Path, manifest: &Manifest) -> bool {
    sources::read(root, &manifest.sources).is_ok_and(|files| recipe::hash(&files) == manifest.sources_sha256)
}

/// Writes modules and manifest to a folder.
pub(crate) fn write(built: &recipe::Built, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).map_err(|e| Error::io(folder, e))?;
    let put = |name: &str, text: &str| {
        let path = folder.join(name);
        fs::write(&path, text).map_err(|e| Error::io(&path, e))
    };
    for (module, text) in built.manifest.modules.iter().zip(&built.texts) {
        put(&module.file, text)?;
    }
    put(MANIFEST, &to_json(&built.manifest))
}

/// The manifest as it is checked in.
pub(crate) fn to_json(manifest: &Manifest) -> String {
    serde_json::to_string_pretty(manifest).expect("a manifest is plain data") + "\n"
}

/// The checked-in manifest.
pub(crate) fn read_manifest(root: &Path) -> Result<Manifest> {
    let path = root.join(CHECKED_IN).join(MANIFEST);
    Manifest::from_json(&fs::read_to_string(&path).map_err(|e| Error::io(&path, e))?)
}

/// A checked-in module, if it is the one that the manifest describes.
pub(crate) fn read_module(root: &Path, manifest: &Manifest, target: Target) -> Result<String> {
    let module = manifest
        .module(target)
        .ok_or_else(|| Error::new(format!("{CHECKED_IN}/{MANIFEST} has no module for {target}")))?;
    let path = root.join(CHECKED_IN).join(&module.file);
    let text = fs::read_to_string(&path).map_err(|e| Error::io(&path, e))?;
    if sources::sha256(&text) != module.sha256 {
        return Err(Error::new(format!(
            "{}: not the file that {MANIFEST} describes (SHA-256 differs); make both anew with `cargo ptx build`",
            path.display()
        )));
    }
    Ok(text)
}

fn copy(root: &Path, manifest: &Manifest, out: &Path) -> Result<()> {
    for target in Target::ALL {
        let path = out.join(target.file());
        fs::write(&path, read_module(root, manifest, target)?).map_err(|e| Error::io(&path, e))?;
    }
    let path = out.join(MANIFEST);
    fs::write(&path, to_json(manifest)).map_err(|e| Error::io(&path, e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::Module;

    /// A workspace whose checked-in modules are up to date.
    fn workspace() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        fs::create_dir_all(root.join("kernels-gpu/src")).unwrap();
        fs::write(root.join("kernels-gpu/Cargo.toml"), "[package]\n").unwrap();
        fs::write(root.join("kernels-gpu/src/lib.rs"), "//! Kernels.\n").unwrap();
        let texts: Vec<_> = Target::ALL.iter().map(|t| format!("// {t}\n")).collect();
        let modules = Target::ALL
            .iter()
            .zip(&texts)
            .map(|(&target, text)| Module {
                target,
                file: target.file().into(),
                ptx_isa: "8.1".into(),
                sha256: sources::sha256(text),
                rustflags: vec![],
                kernels: vec![],
            })
            .collect();
        let sources = vec!["Cargo.toml".to_owned(), "src/lib.rs".to_owned()];
        let manifest = Manifest {
            rustc: recipe::RUSTC.into(),
            sources_sha256: recipe::hash(&sources::read(root, &sources).unwrap()),
            sources,
            structures: vec![],
            constants: vec![],
            modules,
        };
        write(&recipe::Built { manifest, texts, warnings: String::new() }, &root.join(CHECKED_IN)).unwrap();
        dir
    }

    #[test]
    fn embeds_the_checked_in_modules_while_the_hash_holds() {
        let (dir, out) = (workspace(), tempfile::tempdir().unwrap());
        assert_eq!(embed(dir.path(), out.path()).unwrap(), Origin::CheckedIn);
        assert_eq!(fs::read_to_string(out.path().join("ringseal_sm_90a.ptx")).unwrap(), "// sm_90a\n");
        assert_eq!(fs::read_to_string(out.path().join("ringseal_sm_80.ptx")).unwrap(), "// sm_80\n");
        let manifest = fs::read_to_string(out.path().join(MANIFEST)).unwrap();
        assert_eq!(Manifest::from_json(&manifest).unwrap(), read_manifest(dir.path()).unwrap());
    }

    #[test]
    fn the_published_package_has_no_kernel_sources() {
        let (dir, out) = (workspace(), tempfile::tempdir().unwrap());
        fs::remove_dir_all(dir.path().join("kernels-gpu")).unwrap();
        assert_eq!(embed(dir.path(), out.path()).unwrap(), Origin::CheckedIn);
        assert!(out.path().join(MANIFEST).is_file());
    }

    #[test]
    fn a_changed_source_is_never_embedded_as_it_was() {
        let (dir, out) = (workspace(), tempfile::tempdir().unwrap());
        fs::write(dir.path().join("kernels-gpu/src/lib.rs"), "//! Other kernels.\n").unwrap();
        // This workspace cannot be compiled, so the attempt to is the error.
        embed(dir.path(), out.path()).unwrap_err();
        assert!(!out.path().join("ringseal_sm_90a.ptx").exists());
    }

    #[test]
    fn a_removed_source_is_a_change_and_an_unlisted_one_is_not() {
        let (dir, out) = (workspace(), tempfile::tempdir().unwrap());
        fs::write(dir.path().join("kernels-gpu/src/emulator.rs"), "//! For the CPU.\n").unwrap();
        assert_eq!(embed(dir.path(), out.path()).unwrap(), Origin::CheckedIn);
        fs::remove_file(dir.path().join("kernels-gpu/src/lib.rs")).unwrap();
        embed(dir.path(), out.path()).unwrap_err();
    }

    #[test]
    fn an_edited_module_is_refused() {
        let (dir, out) = (workspace(), tempfile::tempdir().unwrap());
        fs::write(dir.path().join("host/ptx/ringseal_sm_80.ptx"), "// other\n").unwrap();
        let error = embed(dir.path(), out.path()).unwrap_err().to_string();
        assert!(error.contains("ringseal_sm_80.ptx") && error.contains("cargo ptx build"), "{error}");
    }
}
