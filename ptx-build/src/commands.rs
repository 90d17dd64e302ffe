//! `cargo ptx build | compare | lint | report`.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use crate::manifest::{Kernel, Manifest, Target};
use crate::{Error, Result, embed, ptx, ptxas, recipe, sass};

/// The workspace's folders.
pub struct Folders {
    /// The workspace's root.
    pub root: PathBuf,
    /// cargo's build folder.
    pub target: PathBuf,
}

impl Folders {
    /// The kernels' own build folders: their flags are not the workspace's, and `core` is compiled once and kept.
    fn scratch(&self) -> PathBuf {
        self.target.join("ptx")
    }
}

/// Compiles the kernels and writes modules and manifest to `host/ptx`. Refuses to write if a kernel that was there before has
/// more warp- or block-wide instructions than before, unless `accept_counts`: a duplicated barrier stands in a divergent
/// branch and hangs or corrupts, so somebody has to look. What it wrote it also checks as [`lint`] does, and fails if there is a
/// finding: modules that nobody may run had better not be measured.
pub fn build(folders: &Folders, accept_counts: bool) -> Result<String> {
    let built = recipe::build(&folders.root, &folders.scratch())?;
    let mut text = built.warnings.clone();
    if let Ok(before) = embed::read_manifest(&folders.root) {
        let raised = raised(&before, &built.manifest);
        let list = raised.join("\n");
        if !raised.is_empty() && !accept_counts {
            return Err(Error::new(format!(
                "{list}\nIf the sources explain every line, write the modules with `cargo ptx build --accept-counts`."
            )));
        }
        if !raised.is_empty() {
            _ = writeln!(text, "{list}");
        }
    }
    embed::write(&built, &folders.root.join(embed::CHECKED_IN))?;
    for module in &built.manifest.modules {
        _ = writeln!(text, "{}/{}: {} kernels", embed::CHECKED_IN, module.file, module.kernels.len());
    }
    match lint(folders) {
        Ok(clean) => Ok(text + &clean),
        Err(findings) => {
            Err(Error::new(format!("{text}{findings}\nThe modules are written; mend the sources.")))
        }
    }
}

/// Counts that are higher than before, one line each.
fn raised(before: &Manifest, after: &Manifest) -> Vec<String> {
    let mut lines = Vec::new();
    for module in &after.modules {
        for kernel in &module.kernels {
            let Some(old) = before.module(module.target).and_then(|m| m.kernel(&kernel.name)) else {
                continue;
            };
            for ((what, old), (_, new)) in old.counts.named().into_iter().zip(kernel.counts.named()) {
                if new > old {
                    lines.push(format!(
                        "kernel {} ({}): {what}: {old} before, {new} now",
                        kernel.name, module.target
                    ));
                }
            }
        }
    }
    lines
}

/// Compiles the kernels, which must give no warning, and compares with the checked-in modules and manifest, byte for byte.
pub fn compare(folders: &Folders) -> Result<String> {
    let built = recipe::build(&folders.root, &folders.scratch())?;
    if !built.warnings.is_empty() {
        return Err(Error::new(built.warnings));
    }
    let folder = folders.root.join(embed::CHECKED_IN);
    let mut pairs: Vec<_> =
        built.manifest.modules.iter().map(|m| m.file.as_str()).zip(&built.texts).collect();
    let manifest = embed::to_json(&built.manifest);
    pairs.push((embed::MANIFEST, &manifest));
    let mut differences = Vec::new();
    for (file, text) in pairs {
        let path = folder.join(file);
        let checked_in = fs::read_to_string(&path).map_err(|e| Error::io(&path, e))?;
        if let Some(difference) = first_difference(&checked_in, text) {
            differences.push(format!("{}/{file}: {difference}", embed::CHECKED_IN));
        }
    }
    if differences.is_empty() {
        return Ok("the checked-in PTX is what the sources compile to\n".to_owned());
    }
    differences.push("Bring them up to date with `cargo ptx build`, and check the files in.".to_owned());
    Err(Error::new(differences.join("\n")))
}

fn first_difference(checked_in: &str, compiled: &str) -> Option<String> {
    if checked_in == compiled {
        return None;
    }
    let same = checked_in.lines().zip(compiled.lines()).take_while(|(a, b)| a == b).count();
    let line = |text: &str| text.lines().nth(same).unwrap_or("(end)").trim().to_owned();
    Some(format!("line {}: checked in {:?}, compiled {:?}", same + 1, line(checked_in), line(compiled)))
}

/// Checks the checked-in modules: that they are what the manifest describes, kernel by kernel, and that nothing is in them
/// that must not be.
pub fn lint(folders: &Folders) -> Result<String> {
    let manifest = embed::read_manifest(&folders.root)?;
    let (mut findings, mut kernels) = (Vec::new(), 0);
    for target in Target::ALL {
        let text = embed::read_module(&folders.root, &manifest, target)?;
        let module = manifest.module(target).expect("read_module found it");
        kernels += module.kernels.len();
        let found = ptx::findings(&text)?.into_iter().chain(lint_counts(&text, &module.kernels)?);
        findings.extend(found.map(|f| format!("{target}: {f}")));
    }
    if findings.is_empty() {
        Ok(format!("{kernels} kernels, no findings\n"))
    } else {
        Err(Error::new(findings.join("\n")))
    }
}

fn lint_counts(text: &str, kernels: &[Kernel]) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    let functions = ptx::functions(text)?;
    let entries: Vec<_> = functions.iter().filter(|f| f.is_entry).collect();
    for entry in &entries {
        let Some(kernel) = kernels.iter().find(|k| k.name == entry.name) else {
            findings.push(format!("{}: not in the manifest", entry.name));
            continue;
        };
        let found = ptx::counts(&entry.body);
        for ((what, expected), (_, found)) in kernel.counts.named().into_iter().zip(found.named()) {
            if expected != found {
                findings.push(format!("{}: {found} {what}, the manifest expects {expected}", entry.name));
            }
        }
        let bounds = format!(".maxntid {}, 1, 1", kernel.threads);
        if !entry.directives.contains(&bounds) {
            findings.push(format!("{}: lacks {bounds}", entry.name));
        }
    }
    for kernel in kernels.iter().filter(|k| !entries.iter().any(|e| e.name == k.name)) {
        findings.push(format!("{}: in the manifest, not in the PTX", kernel.name));
    }
    Ok(findings)
}

/// GPUs other than the target's own whose driver compiles its module, and which have the shared memory that AES wants: the
/// report assembles it for them too. Not 9.0, whose GPUs get the other module.
fn also_for(target: Target) -> &'static [&'static str] {
    match target {
        Target::Sm90a => &[],
        Target::Sm80 => &["sm_100"],
    }
}

/// Assembles the checked-in modules and returns a table of registers, stack, spills and shared memory. An error, with the
/// table, for spills, local memory, too many registers to launch, code that ptxas throws away, and `wgmma` that is serialised
/// or whose registers are reused early.
pub fn report(folders: &Folders) -> Result<String> {
    let manifest = embed::read_manifest(&folders.root)?;
    let mut table =
        String::from("| GPU | kernel | threads | registers | stack | spills | shared, dynamic | static |\n");
    table += "|---|---|---|---|---|---|---|---|\n";
    let mut findings = Vec::new();
    for target in Target::ALL {
        embed::read_module(&folders.root, &manifest, target)?;
        let module = manifest.module(target).expect("read_module found it");
        let path = folders.root.join(embed::CHECKED_IN).join(&module.file);
        for gpu in [&[target.name()], also_for(target)].concat() {
            let assembled = ptxas::run(&folders.target, &path, gpu)?;
            let found = ptxas::findings(&assembled.usages, &assembled.messages, module);
            findings.extend(
                found.into_iter().chain(sass::findings(&assembled.sass)).map(|f| format!("{gpu}: {f}")),
            );
            for usage in &assembled.usages {
                let Some(kernel) = module.kernel(&usage.name) else { continue };
                _ = writeln!(
                    table,
                    "| {gpu} | {} | {} | {} | {} | {} | {} | {} |",
                    kernel.name,
                    kernel.threads,
                    usage.registers,
                    usage.stack_bytes,
                    usage.spill_bytes,
                    kernel.shared_bytes,
                    usage.static_shared_bytes
                );
            }
        }
    }
    if findings.is_empty() { Ok(table) } else { Err(Error::new(format!("{table}\n{}", findings.join("\n")))) }
}

/// The folders, from what cargo sets for a program that it runs.
pub fn folders() -> Result<Folders> {
    let package =
        std::env::var_os("CARGO_MANIFEST_DIR").ok_or_else(|| Error::new("run me as `cargo ptx`"))?;
    let root = Path::new(&package)
        .parent()
        .ok_or_else(|| Error::new("the package has no workspace around it"))?
        .to_owned();
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    Ok(Folders { target: std::path::absolute(&target).map_err(|e| Error::io(&target, e))?, root })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::{Counts, Module};

    fn kernel(name: &str, barriers: u32) -> Kernel {
        Kernel {
            name: name.into(),
            threads: 512,
            shared_bytes: 0,
            parameter: "P".into(),
            counts: Counts { barriers, ..Counts::default() },
        }
    }

    fn manifest(kernels: Vec<Kernel>) -> Manifest {
        let module = Module {
            target: Target::Sm80,
            file: Target::Sm80.file().into(),
            ptx_isa: "8.1".into(),
            sha256: String::new(),
            rustflags: vec![],
            kernels,
        };
        Manifest {
            rustc: "1.95.0".into(),
            sources: vec![],
            sources_sha256: String::new(),
            structures: vec![],
            constants: vec![],
            modules: vec![module],
        }
    }

    const PTX: &str = "\
.visible .entry seal(
\t.param .align 8 .b8 seal_param_0[8]
)
.maxntid 512, 1, 1
.minnctapersm 1
{
\tbar.sync \t0;
\tbar.sync \t0;
\tret;
}
";

    #[test]
    fn only_raised_counts_of_known_kernels_are_refused() {
        let before = manifest(vec![kernel("seal", 2), kernel("open", 2)]);
        let after = manifest(vec![kernel("new", 9), kernel("open", 1), kernel("seal", 3)]);
        assert_eq!(raised(&before, &after), ["kernel seal (sm_80): barriers: 2 before, 3 now"]);
        assert_eq!(raised(&after, &after), [""; 0]);
    }

    #[test]
    fn lint_holds_the_module_to_the_manifest() {
        assert_eq!(lint_counts(PTX, &[kernel("seal", 2)]).unwrap(), [""; 0]);
        assert_eq!(
            lint_counts(PTX, &[kernel("seal", 1)]).unwrap(),
            ["seal: 2 barriers, the manifest expects 1"]
        );
        let moved = lint_counts(PTX, &[kernel("open", 2)]).unwrap();
        assert_eq!(moved, ["seal: not in the manifest", "open: in the manifest, not in the PTX"]);
        let unbounded = PTX.replace("512, 1", "256, 1");
        assert_eq!(
            lint_counts(&unbounded, &[kernel("seal", 2)]).unwrap(),
            ["seal: lacks .maxntid 512, 1, 1"]
        );
    }

    #[test]
    fn differences_name_the_line() {
        assert_eq!(first_difference("a\nb\n", "a\nb\n"), None);
        assert_eq!(first_difference("a\nb\n", "a\nc\n").unwrap(), "line 2: checked in \"b\", compiled \"c\"");
        assert_eq!(
            first_difference("a\n", "a\nc\n").unwrap(),
            "line 2: checked in \"(end)\", compiled \"c\""
        );
    }
}
