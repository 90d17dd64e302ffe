//! How the kernel crate becomes PTX: rustc's own `nvptx64-nvidia-cuda` target, with no CUDA toolkit.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use crate::manifest::{Kernel, Manifest, Module, Structure, Target};
use crate::sources::{self, SourceFile};
use crate::{Error, Result, layout, ptx};

/// The rustc whose output is checked in. Another one may write other PTX.
pub(crate) const RUSTC: &str = "1.95.0";

/// What puts rust-src in place, for error messages.
const SETUP_RUST_SRC: &str = "scripts/setup-rust-src";

const TRIPLE: &str = "nvptx64-nvidia-cuda";

/// Flags of rustc. The target's default CPU is `sm_30`, so the CPU is always named; the PTX version is the CPU's lowest one
/// unless an instruction needs a newer one, because a driver refuses what is newer than itself. Jump threading duplicates
/// barriers into the arms of divergent branches.
fn rustflags(target: Target) -> Vec<String> {
    let mut flags =
        vec![format!("-Ctarget-cpu={}", target.name()), "-Zmir-enable-passes=-JumpThreading".to_owned()];
    flags.extend(match target {
        Target::Sm90a => ["--cfg".to_owned(), "ringseal_sm_90a".to_owned()],
        // mma of single bits with `and` is PTX 7.1; sm_80 starts at 7.0.
        Target::Sm80 => ["-C".to_owned(), "target-feature=+ptx71".to_owned()],
    });
    flags
}

/// The build profile, whatever the workspace's says.
const PROFILE: [(&str, &str); 9] = [
    ("CODEGEN_UNITS", "1"),
    ("DEBUG", "false"),
    ("DEBUG_ASSERTIONS", "false"),
    ("INCREMENTAL", "false"),
    ("LTO", "fat"),
    ("OPT_LEVEL", "3"),
    ("OVERFLOW_CHECKS", "false"),
    ("PANIC", "abort"),
    ("STRIP", "none"),
];

const CARGO_ARGS: [&str; 8] =
    ["--locked", "--release", "--lib", "-Zbuild-std=core", "--target", TRIPLE, "--crate-type", "cdylib"];
const RUSTC_ARGS: [&str; 2] = ["--emit=asm", "-Clinker=true"];

/// The whole recipe as text: part of the sources' hash. The last item counts changes to what this crate does to the PTX
/// afterwards.
fn description() -> String {
    let flags: Vec<_> = Target::ALL.iter().map(|&t| rustflags(t)).collect();
    format!("{RUSTC} {flags:?} {PROFILE:?} {CARGO_ARGS:?} {RUSTC_ARGS:?} post-processing 1")
}

/// Hash of the kernel sources and the recipe.
pub(crate) fn hash(files: &[SourceFile]) -> String {
    sources::hash(files, &description())
}

/// The modules and what the manifest says of them.
pub(crate) struct Built {
    pub(crate) manifest: Manifest,
    /// PTX texts, in the order of the manifest's modules.
    pub(crate) texts: Vec<String>,
    /// rustc's warnings.
    pub(crate) warnings: String,
}

/// Compiles the kernels for every target, each with its own build folder below `scratch` (kept: it holds the compiled
/// `core`).
pub(crate) fn build(root: &Path, scratch: &Path) -> Result<Built> {
    let toolchain = &Toolchain::find(root)?;
    let outputs: Result<Vec<_>> = std::thread::scope(|scope| {
        let running: Vec<_> = Target::ALL
            .into_iter()
            .map(|target| scope.spawn(move || toolchain.compile(root, &scratch.join(target.name()), target)))
            .collect();
        running.into_iter().map(|thread| thread.join().expect("compile does not panic")).collect()
    });
    let outputs = outputs?;
    // Both targets' files, and what gives the crate its edition.
    let mut sources: Vec<_> =
        outputs.iter().flat_map(|o| o.sources.clone()).chain(["Cargo.toml".to_owned()]).collect();
    sources.sort();
    sources.dedup();
    let files = sources::read(root, &sources)?;
    let declared: Result<Vec<_>> = outputs.iter().map(|output| ptx::declarations(&output.ptx)).collect();
    let declared: Vec<_> = declared?.into_iter().flatten().collect();
    let unique = |of: fn(&ptx::Declaration) -> &str| -> Vec<&str> {
        declared.iter().map(of).collect::<BTreeSet<_>>().into_iter().collect()
    };
    let (structures, constants) =
        layout::Types::parse(&files)?.describe(&unique(|d| &d.params), &unique(|d| &d.name))?;
    let (mut modules, mut texts, mut warnings) = (Vec::new(), Vec::new(), String::new());
    for (target, output) in Target::ALL.into_iter().zip(outputs) {
        let text = finish(&output.ptx)?;
        for path in [root, &toolchain.sysroot] {
            if text.contains(&*path.to_string_lossy()) {
                return Err(Error::new(format!("the {target} PTX contains the path {}", path.display())));
            }
        }
        modules.push(describe(target, &text, &structures)?);
        texts.push(text);
        warnings += &output.warnings;
    }
    let manifest = Manifest {
        rustc: RUSTC.into(),
        sources_sha256: hash(&files),
        sources,
        structures,
        constants,
        modules,
    };
    Ok(Built { manifest, texts, warnings })
}

/// What is done to rustc's output.
fn finish(raw: &str) -> Result<String> {
    let declarations = ptx::declarations(raw)?;
    ptx::raise_isa(&ptx::add_launch_bounds(&ptx::strip_disambiguators(raw), &declarations)?)
}

/// The manifest entry of a finished module.
fn describe(target: Target, text: &str, structures: &[Structure]) -> Result<Module> {
    let functions = ptx::functions(text)?;
    let mut kernels = Vec::new();
    for declaration in ptx::declarations(text)? {
        let name = &declaration.name;
        let entry =
            functions.iter().find(|f| f.is_entry && f.name == *name).expect("add_launch_bounds checked it");
        let parameter =
            structures.iter().find(|s| s.name == declaration.params).expect("all parameters are described");
        let (bytes, align) = ptx::parameter_layout(entry)?;
        if (bytes, align) != (parameter.bytes, parameter.align) {
            return Err(Error::new(format!(
                "kernel {name}: {} has {} bytes (alignment {}) by its source, but {bytes} ({align}) in the PTX",
                parameter.name, parameter.bytes, parameter.align
            )));
        }
        kernels.push(Kernel {
            name: declaration.name,
            threads: declaration.threads,
            shared_bytes: declaration.shared,
            parameter: declaration.params,
            counts: ptx::counts(&entry.body),
        });
    }
    kernels.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(Module {
        target,
        file: target.file().into(),
        ptx_isa: ptx::isa(text)?.to_owned(),
        sha256: sources::sha256(text),
        rustflags: rustflags(target),
        kernels,
    })
}

/// What rustc made for a target.
struct Output {
    ptx: String,
    /// The kernel crate's files that it read.
    sources: Vec<String>,
    warnings: String,
}

/// The pinned rustc with the standard library's sources.
struct Toolchain {
    cargo: PathBuf,
    sysroot: PathBuf,
}

impl Toolchain {
    fn find(root: &Path) -> Result<Self> {
        // Inside a build script or `cargo run`, cargo names itself and its rustc.
        let tool =
            |variable: &str, name: &str| env::var_os(variable).map_or_else(|| name.into(), PathBuf::from);
        let rustc = tool("RUSTC", "rustc");
        let ask = |arg: &[&str]| -> Result<String> {
            let output = Command::new(&rustc)
                .args(arg)
                .current_dir(root)
                .output()
                .map_err(|e| Error::io(&rustc, e))?;
            Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
        };
        let version = ask(&["--version"])?;
        if version.split_whitespace().nth(1) != Some(RUSTC) {
            return Err(Error::new(format!(
                "the kernels are compiled by rustc {RUSTC}, and this is {version}; rust-toolchain.toml names the right one"
            )));
        }
        let sysroot = PathBuf::from(ask(&["--print", "sysroot"])?);
        if !sysroot.join("lib/rustlib/src/rust/library/core/src/lib.rs").is_file() {
            return Err(Error::new(format!(
                "compiling the kernels needs the standard library's sources (rust-src), which {} lacks; get them with:\n\n    \
                 {SETUP_RUST_SRC}\n",
                sysroot.display()
            )));
        }
        Ok(Self { cargo: tool("CARGO", "cargo"), sysroot })
    }

    fn compile(&self, root: &Path, target_dir: &Path, target: Target) -> Result<Output> {
        let mut cargo = Command::new(&self.cargo);
        // Whoever runs us (cargo for a build script, clippy, a CI job) may have set flags, wrappers and profiles.
        for (name, _) in env::vars_os() {
            if is_foreign_setting(&name) {
                cargo.env_remove(name);
            }
        }
        let mut flags = rustflags(target);
        flags.push(format!("--remap-path-prefix={}=ringseal", root.display()));
        flags.push(format!("--remap-path-prefix={}=rust", self.sysroot.display()));
        cargo
            .current_dir(root)
            .args(["rustc", "--quiet", "--manifest-path"])
            .arg(root.join(sources::FOLDER).join("Cargo.toml"))
            .arg("--target-dir")
            .arg(target_dir)
            .args(CARGO_ARGS)
            .args(["--config", "profile.release.package.ringseal-kernels.opt-level=3"]) // the host build has less
            .arg("--")
            .args(RUSTC_ARGS)
            .env("RUSTC_BOOTSTRAP", "1")
            .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"))
            .envs(PROFILE.map(|(name, value)| (format!("CARGO_PROFILE_RELEASE_{name}"), value)));
        let output = cargo.output().map_err(|e| Error::io(&self.cargo, e))?;
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        if !output.status.success() {
            return Err(Error::new(format!("the kernels do not compile for {target}:\n{stderr}")));
        }
        let read = |extension: &str| {
            let path =
                target_dir.join(TRIPLE).join("release/deps/ringseal_kernels").with_extension(extension);
            fs::read_to_string(&path).map_err(|e| Error::io(&path, e))
        };
        Ok(Output {
            ptx: read("s")?,
            sources: sources::listed(&read("d")?),
            warnings: without_known_warnings(&stderr),
        })
    }
}

/// rustc's messages without the warning that the recipe itself causes (the name of an LLVM feature is not a stable one).
fn without_known_warnings(stderr: &str) -> String {
    let known = "warning: unstable feature specified for `-Ctarget-feature`: `ptx71`";
    stderr.split_inclusive("\n\n").filter(|message| !message.trim_start().starts_with(known)).collect()
}

/// Environment variables that would change what the inner cargo builds. Those that say where things are (`CARGO_HOME`,
/// `RUSTUP_*`) and how to reach a registry stay.
fn is_foreign_setting(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    ["CARGO_ENCODED_RUSTFLAGS", "CARGO_MAKEFLAGS", "MAKEFLAGS", "CARGO_INCREMENTAL", "RUSTFLAGS"]
        .contains(&&*name)
        || [
            "RUSTC",
            "CARGO_BUILD_",
            "CARGO_PROFILE_",
            "CARGO_TARGET_",
            "CARGO_UNSTABLE_",
            "CARGO_FEATURE_",
            "CARGO_CFG_",
        ]
        .iter()
        .any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_settings_that_change_the_output_are_foreign() {
        for name in
            ["RUSTFLAGS", "RUSTC_WORKSPACE_WRAPPER", "RUSTC", "CARGO_TARGET_DIR", "CARGO_PROFILE_RELEASE_LTO"]
        {
            assert!(is_foreign_setting(OsStr::new(name)), "{name}");
        }
        for name in ["PATH", "CARGO_HOME", "RUSTUP_HOME", "RUSTUP_TOOLCHAIN", "CARGO_HTTP_PROXY", "HOME"] {
            assert!(!is_foreign_setting(OsStr::new(name)), "{name}");
        }
    }

    #[test]
    fn only_the_recipes_own_warning_is_dropped() {
        let known =
            "warning: unstable feature specified for `-Ctarget-feature`: `ptx71`\n  |\n  = note: x\n\n";
        let other = "warning: unused variable: `x`\n --> src/lib.rs:1:1\n\n";
        assert_eq!(without_known_warnings(&format!("{known}{other}{known}")), other);
    }

    #[test]
    fn flags_name_the_cpu_and_keep_barriers_single() {
        for target in Target::ALL {
            let flags = rustflags(target);
            assert!(flags.contains(&format!("-Ctarget-cpu={target}")));
            assert!(flags.iter().any(|f| f.contains("-JumpThreading")));
            assert_eq!(flags.iter().any(|f| f == "ringseal_sm_90a"), target == Target::Sm90a);
        }
    }
}
