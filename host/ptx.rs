//! The kernels as PTX text, and what is in it.
//!
//! The driver compiles PTX for its GPU when a module is loaded; nothing here needs a driver. `ringseal ptx --out DIR` writes
//! the same files for use in other CUDA programs.

use std::sync::LazyLock;

use ringseal_ptx_build::braces::Braces;
pub use ringseal_ptx_build::manifest::{
    Constant, Counts, Field, Kernel, Manifest, Module, Structure, Target,
};

// Statics: a constant of so many bytes would be in every object file that names it.

/// The module for H100 and H200 (compute capability 9.0).
pub static SM_90A: &str = include_str!(concat!(env!("OUT_DIR"), "/ringseal_sm_90a.ptx"));

/// The module for A100 (compute capability 8.0) and, compiled by the driver, everything newer.
pub static SM_80: &str = include_str!(concat!(env!("OUT_DIR"), "/ringseal_sm_80.ptx"));

/// The manifest's text.
pub static MANIFEST_JSON: &str = include_str!(concat!(env!("OUT_DIR"), "/manifest.json"));

/// What is in the modules: kernels, parameters, block sizes, shared memory.
pub fn manifest() -> &'static Manifest {
    static MANIFEST: LazyLock<Manifest> =
        LazyLock::new(|| Manifest::from_json(MANIFEST_JSON).expect("build.rs wrote it from the same types"));
    &MANIFEST
}

/// The C header that describes the same: parameter structures, constants, launch figures.
pub fn header() -> String {
    ringseal_ptx_build::header::header(manifest())
}

/// File name of [`header()`].
pub const HEADER_FILE: &str = ringseal_ptx_build::header::FILE;

/// The PTX text of a target.
pub const fn text(target: Target) -> &'static str {
    match target {
        Target::Sm90a => SM_90A,
        Target::Sm80 => SM_80,
    }
}

/// A run of lines, and the kernel that it is; `None` for what all kernels need.
type Part = (Option<&'static str>, &'static str);

/// Cuts a module's text at its kernels.
fn parts(text: &'static str) -> Vec<Part> {
    const ENTRY: &str = ".visible .entry ";
    let mut parts = Vec::new();
    let (mut start, mut end) = (0, 0);
    let (mut kernel, mut braces) = (None, Braces::default());
    for line in text.split_inclusive('\n') {
        if let Some(head) = line.strip_prefix(ENTRY) {
            parts.push((None, &text[start..end]));
            start = end;
            kernel = head.split('(').next();
        }
        end += line.len();
        if kernel.is_some() && braces.close_in(line) {
            parts.push((kernel.take(), &text[start..end]));
            start = end;
        }
    }
    parts.push((None, &text[start..]));
    parts
}

/// The module of a target with one of its kernels only, which takes the driver a fraction of the time to compile; `None` when
/// the target has no such kernel.
pub fn kernel(target: Target, name: &str) -> Option<String> {
    // Found once: to look through megabytes for each kernel would hold up the start of every group.
    static SM_90A_PARTS: LazyLock<Vec<Part>> = LazyLock::new(|| parts(SM_90A));
    static SM_80_PARTS: LazyLock<Vec<Part>> = LazyLock::new(|| parts(SM_80));
    let parts = match target {
        Target::Sm90a => &*SM_90A_PARTS,
        Target::Sm80 => &*SM_80_PARTS,
    };
    let found = parts.iter().any(|(kernel, _)| *kernel == Some(name));
    let needed = parts.iter().filter(|(kernel, _)| kernel.is_none_or(|kernel| kernel == name));
    found.then(|| needed.map(|(_, text)| *text).collect())
}

/// The target whose module a device of compute capability `major.minor` loads; `None` below 8.0, which is not supported.
pub const fn for_compute_capability(major: u32, minor: u32) -> Option<Target> {
    Target::for_compute_capability(major, minor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_embedded_module_is_what_its_manifest_says() {
        for target in Target::ALL {
            let module = manifest().module(target).unwrap();
            assert!(text(target).contains(&format!("\n.target {target}")), "{target}");
            assert!(text(target).contains(&format!("\n.version {}", module.ptx_isa)), "{target}");
            for kernel in &module.kernels {
                assert!(
                    text(target).contains(&format!(".entry {}(", kernel.name)),
                    "{target} {}",
                    kernel.name
                );
                assert!(manifest().structure(&kernel.parameter).is_some(), "{target} {}", kernel.name);
            }
            assert_eq!(text(target).matches("\n.visible .entry ").count(), module.kernels.len());
        }
    }

    #[test]
    fn a_kernel_alone_is_what_it_is_in_its_module() {
        const ENTRY: &str = "\n.visible .entry ";
        for target in Target::ALL {
            let kernels = &manifest().module(target).unwrap().kernels;
            let alone: Vec<_> = kernels.iter().map(|k| super::kernel(target, &k.name).unwrap()).collect();
            // The frame is what is left of a module without its kernels.
            let whole: usize = text(target).lines().count();
            let sum: usize = alone.iter().map(|text| text.lines().count()).sum();
            let frame = (sum - whole) / (kernels.len() - 1);
            assert_eq!(sum, whole + frame * (kernels.len() - 1), "{target}: a line is lost or doubled");
            assert!(frame < 200, "{target}: {frame} lines belong to no kernel");
            for (kernel, alone) in kernels.iter().zip(&alone) {
                assert_eq!(alone.matches(ENTRY).count(), 1, "{}", kernel.name);
                let body = &alone[alone.find(&format!("{ENTRY}{}(", kernel.name)).unwrap()..];
                let end = body.find("\n\tret;\n").unwrap();
                assert!(text(target).contains(&body[..end]), "{}", kernel.name);
                assert_eq!(alone.matches('{').count(), alone.matches('}').count(), "{}", kernel.name);
            }
            assert_eq!(super::kernel(target, "no_such_kernel"), None);
            assert_eq!(super::kernel(target, ""), None);
        }
    }

    #[test]
    fn the_structures_are_those_of_the_kernel_crate() {
        use std::mem::{align_of, offset_of, size_of};

        use ringseal_kernels::gcm::{AAD_MAX, FORGED, Record, RecordsParams, VERIFIED};
        use ringseal_kernels::ghash::{GHASH_KEY_GRID, GhashKey};

        let layout = |name: &str| {
            let found = manifest().structure(name).unwrap();
            (found.bytes as usize, found.align as usize)
        };
        assert_eq!(layout("RecordsParams"), (size_of::<RecordsParams>(), align_of::<RecordsParams>()));
        assert_eq!(layout("Record"), (size_of::<Record>(), align_of::<Record>()));
        assert_eq!(layout("GhashKey"), (size_of::<GhashKey>(), align_of::<GhashKey>()));
        let record = manifest().structure("Record").unwrap();
        let verdict = record.fields.iter().find(|field| field.name == "verdict").unwrap();
        assert_eq!(verdict.offset as usize, offset_of!(Record, verdict));
        for (name, value) in [
            ("AAD_MAX", AAD_MAX),
            ("GHASH_KEY_GRID", GHASH_KEY_GRID),
            ("VERIFIED", VERIFIED),
            ("FORGED", FORGED),
        ] {
            let constant = manifest().constants.iter().find(|constant| constant.name == name).unwrap();
            assert_eq!(constant.value, u64::from(value), "{name}");
        }
    }

    #[test]
    fn compute_capabilities() {
        assert_eq!(for_compute_capability(9, 0), Some(Target::Sm90a));
        for newer in [(8, 0), (8, 6), (8, 9), (10, 0), (10, 3), (12, 0)] {
            assert_eq!(for_compute_capability(newer.0, newer.1), Some(Target::Sm80), "{newer:?}");
        }
        for older in [(7, 5), (7, 0), (0, 0)] {
            assert_eq!(for_compute_capability(older.0, older.1), None, "{older:?}");
        }
    }
}
