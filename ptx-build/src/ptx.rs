//! PTX text: what rustc's NVPTX back end writes, what must be added to it, and what must not be in it.

use crate::braces::Braces;
use crate::manifest::Counts;
use crate::{Error, Result};

/// What the `kernel!` macro says about a kernel. It reaches the PTX as a comment (module-level assembly), because rustc has
/// neither a launch-bounds attribute nor any other way to carry a number from Rust into the PTX:
/// `// ringseal.kernel NAME params=STRUCT threads=N shared=N`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Declaration {
    pub(crate) name: String,
    pub(crate) params: String,
    pub(crate) threads: u32,
    pub(crate) shared: u32,
}

const MARKER: &str = "// ringseal.kernel ";

/// The most threads that a block can have.
const MAX_THREADS: u32 = 1024;

/// Reads the declarations.
pub(crate) fn declarations(ptx: &str) -> Result<Vec<Declaration>> {
    let mut found: Vec<Declaration> = Vec::new();
    for line in ptx.lines().filter_map(|l| l.trim().strip_prefix(MARKER)) {
        let declaration = declaration(line).ok_or_else(|| {
            Error::new(format!("the kernel! macro wrote a line I can't read: {MARKER}{line}"))
        })?;
        if !(1..=MAX_THREADS).contains(&declaration.threads) {
            return Err(Error::new(format!(
                "kernel {}: threads = {}",
                declaration.name, declaration.threads
            )));
        }
        if found.iter().any(|d| d.name == declaration.name) {
            return Err(Error::new(format!("kernel {} is declared twice", declaration.name)));
        }
        found.push(declaration);
    }
    Ok(found)
}

fn declaration(line: &str) -> Option<Declaration> {
    let (name, values) = line.split_once(' ')?;
    let (mut params, mut threads, mut shared) = (None, None, None);
    for word in values.split_whitespace() {
        match word.split_once('=')? {
            ("params", v) => params = Some(v.to_owned()),
            ("threads", v) => threads = Some(v.parse().ok()?),
            ("shared", v) => shared = Some(v.parse().ok()?),
            _ => return None,
        }
    }
    Some(Declaration { name: name.to_owned(), params: params?, threads: threads?, shared: shared? })
}

/// An `.entry` or a `.func` with a body.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) is_entry: bool,
    /// The parameters as written, one a line.
    pub(crate) params: Vec<String>,
    /// Directives between the parameter list and the body.
    pub(crate) directives: Vec<String>,
    pub(crate) body: Vec<String>,
    /// Index, in the text's lines, of the line that opens the body.
    body_line: usize,
}

/// Functions with a body, in order. Relies on the back end's layout: the brace that opens a function stands in column 0, alone.
/// Inline assembly may have braces of its own, there too.
pub(crate) fn functions(ptx: &str) -> Result<Vec<Function>> {
    let lines: Vec<&str> = ptx.lines().collect();
    let mut found = Vec::new();
    let mut i = 0;
    while i < lines.len() {
        let line = lines[i];
        let is_entry = line.split_whitespace().any(|w| w == ".entry");
        if line.starts_with(['\t', ' ', '/']) || !(is_entry || line.split_whitespace().any(|w| w == ".func"))
        {
            i += 1;
            continue;
        }
        let start = i;
        while i < lines.len() && lines[i] != "{" && !lines[i].ends_with(';') {
            i += 1;
        }
        if lines.get(i) != Some(&"{") {
            i += 1; // a declaration
            continue;
        }
        let body_line = i;
        let mut braces = Braces::default();
        while i < lines.len() && !braces.close_in(lines[i]) {
            i += 1;
        }
        if i == lines.len() {
            return Err(Error::new(format!(
                "PTX: the function that starts at line {} does not end",
                start + 1
            )));
        }
        found.push(function(&lines[start..body_line], is_entry, body_line, &lines[body_line + 1..i])?);
        i += 1;
    }
    Ok(found)
}

fn function(head: &[&str], is_entry: bool, body_line: usize, body: &[&str]) -> Result<Function> {
    let joined = head.join("\n");
    let bad = || Error::new(format!("PTX: can't read this function head:\n{joined}"));
    let after = joined.split_once(if is_entry { ".entry" } else { ".func" }).ok_or_else(bad)?.1.trim_start();
    // A .func may return a value: `.func (.param ...) name(...)`.
    let after = match after.strip_prefix('(') {
        Some(returned) => returned.split_once(')').ok_or_else(bad)?.1.trim_start(),
        None => after,
    };
    let end = after.find(|c: char| !(c.is_alphanumeric() || "_$%".contains(c))).ok_or_else(bad)?;
    let (params, directives) =
        after[end..].trim_start().strip_prefix('(').ok_or_else(bad)?.split_once(')').ok_or_else(bad)?;
    let list = |text: &str| -> Vec<String> {
        text.lines().map(|l| l.trim().trim_end_matches(',').to_owned()).filter(|l| !l.is_empty()).collect()
    };
    Ok(Function {
        name: after[..end].to_owned(),
        is_entry,
        params: list(params),
        directives: list(directives),
        body: body.iter().map(|&l| l.to_owned()).collect(),
        body_line,
    })
}

/// Size and alignment of an entry's only parameter.
pub(crate) fn parameter_layout(entry: &Function) -> Result<(u32, u32)> {
    let bad = |what: &str| Error::new(format!("kernel {}: {what}: {}", entry.name, entry.params.join(", ")));
    let [parameter] = entry.params.as_slice() else {
        return Err(bad("a kernel takes exactly one parameter, a repr(C) structure by value, not"));
    };
    let words: Vec<_> = parameter.split_whitespace().collect();
    let scalar = |ty: &str| match ty {
        ".b8" | ".u8" | ".s8" => Some(1),
        ".b16" | ".u16" | ".s16" => Some(2),
        ".b32" | ".u32" | ".s32" | ".f32" => Some(4),
        ".b64" | ".u64" | ".s64" | ".f64" => Some(8),
        _ => None,
    };
    match words.as_slice() {
        [".param", ".align", align, ".b8", array] => {
            let bytes = array.split_once('[').and_then(|(_, n)| n.strip_suffix(']')?.parse().ok());
            bytes.zip(align.parse().ok()).ok_or_else(|| bad("can't read the parameter"))
        }
        [".param", ty, .., _] if scalar(ty).is_some() => Ok(scalar(ty).map(|n| (n, n)).expect("just tested")),
        _ => Err(bad("can't read the parameter")),
    }
}

/// Adds the launch bounds after each entry's parameter list. Without them ptxas may give a 512-thread kernel more registers
/// than its block can have, and the kernel cannot be launched.
pub(crate) fn add_launch_bounds(ptx: &str, declarations: &[Declaration]) -> Result<String> {
    let functions = functions(ptx)?;
    let mut lines: Vec<String> = ptx.lines().map(str::to_owned).collect();
    for declaration in declarations {
        if !functions.iter().any(|f| f.is_entry && f.name == declaration.name) {
            return Err(Error::new(format!(
                "kernel {} is declared, but the PTX has no such entry",
                declaration.name
            )));
        }
    }
    for function in functions.iter().rev().filter(|f| f.is_entry) {
        let declaration = declarations.iter().find(|d| d.name == function.name).ok_or_else(|| {
            Error::new(format!(
                "entry {} was not declared: on nvptx64 the kernel! macro must also write \
                 global_asm!(concat!(\"// ringseal.kernel \", stringify!(NAME), \" params=\", stringify!(STRUCT), \
                 \" threads={{threads}} shared={{shared}}\"), threads = const THREADS, shared = const SHARED)",
                function.name
            ))
        })?;
        if !function.directives.is_empty() {
            let directives = function.directives.join(" ");
            return Err(Error::new(format!(
                "entry {} has performance directives already: {directives}",
                function.name
            )));
        }
        let bounds = [format!(".maxntid {}, 1, 1", declaration.threads), ".minnctapersm 1".to_owned()];
        lines.splice(function.body_line..function.body_line, bounds);
    }
    Ok(lines.join("\n") + "\n")
}

/// Takes the crate disambiguators out of mangled names (`Cs` + base 62 + `_`, rustc's v0 scheme): they depend on where the
/// toolchain is installed, and nothing else in the PTX does.
pub(crate) fn strip_disambiguators(ptx: &str) -> String {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut out = String::with_capacity(ptx.len());
    let mut rest = ptx;
    while let Some(start) = rest.find("_R") {
        let before = rest[..start].chars().next_back();
        let end = rest[start..].find(|c| !is_name(c)).map_or(rest.len(), |n| start + n);
        out.push_str(&rest[..start]);
        if before.is_some_and(is_name) {
            out.push_str("_R");
            rest = &rest[start + 2..];
        } else {
            out.push_str(&strip_symbol(&rest[start..end]));
            rest = &rest[end..];
        }
    }
    out + rest
}

fn strip_symbol(symbol: &str) -> String {
    let mut out = String::with_capacity(symbol.len());
    let mut rest = symbol;
    while let Some(start) = rest.find("Cs") {
        let tail = &rest[start + 2..];
        let digits = tail.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(tail.len());
        // The name follows, and it begins with its length.
        let is_crate =
            tail[digits..].starts_with('_') && tail[digits + 1..].starts_with(|c: char| c.is_ascii_digit());
        out.push_str(&rest[..=start]);
        rest = if is_crate { &tail[digits + 1..] } else { &rest[start + 1..] };
    }
    out + rest
}

/// An instruction that the threads of a warp or block must execute together.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Collective {
    Barrier,
    WarpBarrier,
    Shuffle,
    Vote,
    Reduction,
    Mma,
    Wgmma,
}

fn collective(opcode: &str) -> Option<Collective> {
    let is = |prefixes: &[&str]| prefixes.iter().any(|p| opcode.starts_with(p));
    Some(match opcode {
        _ if is(&["bar.warp.sync"]) => Collective::WarpBarrier,
        _ if is(&["bar.", "barrier."]) => Collective::Barrier,
        _ if is(&["shfl."]) => Collective::Shuffle,
        _ if is(&["vote.", "match.", "elect.", "activemask"]) => Collective::Vote,
        _ if is(&["redux."]) => Collective::Reduction,
        _ if is(&["mma."]) => Collective::Mma,
        _ if is(&["wgmma.mma_async"]) => Collective::Wgmma,
        _ => return None,
    })
}

/// The opcodes of a line: what follows a line's start, a `;`, a brace, a label or a predicate.
fn opcodes(line: &str) -> impl Iterator<Item = &str> {
    let code = line.split("//").next().unwrap_or_default();
    code.split([';', '{', '}']).filter_map(|statement| {
        let mut words = statement.split_whitespace();
        words.find(|w| !w.starts_with('@') && !w.ends_with(':'))
    })
}

/// Counts the collective instructions of a body.
pub(crate) fn counts(body: &[String]) -> Counts {
    let mut counts = Counts::default();
    for kind in body.iter().flat_map(|line| opcodes(line)).filter_map(collective) {
        *match kind {
            Collective::Barrier => &mut counts.barriers,
            Collective::WarpBarrier => &mut counts.warp_barriers,
            Collective::Shuffle => &mut counts.shuffles,
            Collective::Vote => &mut counts.votes,
            Collective::Reduction => &mut counts.reductions,
            Collective::Mma => &mut counts.mma,
            Collective::Wgmma => &mut counts.wgmma,
        } += 1;
    }
    counts
}

/// What must not be in the PTX, whatever the manifest says. One line a finding, naming the function.
pub(crate) fn findings(ptx: &str) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    for line in ptx.lines().filter(|l| l.starts_with(".extern .func")) {
        findings.push(format!("{line}: a driver cannot resolve it"));
    }
    for function in functions(ptx)? {
        let name = &function.name;
        let mut in_asm = false;
        for line in &function.body {
            match line.trim() {
                "// begin inline asm" => in_asm = true,
                "// end inline asm" => in_asm = false,
                line if line.starts_with(".local") => {
                    findings.push(format!(
                        "{name}: local memory ({line}): an array is indexed by a run-time value"
                    ));
                }
                _ => {}
            }
            for (opcode, kind) in opcodes(line).filter_map(|o| Some((o, collective(o)?))) {
                // asm! is never convergent, so LLVM may duplicate it into the arms of a divergent branch. The matrix
                // instructions have no intrinsics; the kernels keep them under warp-uniform control flow.
                if in_asm && !matches!(kind, Collective::Mma | Collective::Wgmma) {
                    findings.push(format!("{name}: {opcode} in inline assembly: use the LLVM intrinsic"));
                }
                if !function.is_entry {
                    findings.push(format!("{name}: {opcode} outside an entry, where no count covers it"));
                }
            }
        }
    }
    Ok(findings)
}

/// The PTX ISA version of a module.
pub(crate) fn isa(ptx: &str) -> Result<&str> {
    ptx.lines()
        .find_map(|l| l.strip_prefix(".version "))
        .map(str::trim)
        .ok_or_else(|| Error::new("the PTX has no .version directive"))
}

/// Bytes of parameters that a kernel may have before PTX 8.1 (PTX ISA, "Kernel function parameters").
const PARAMETER_LIMIT: u32 = 4352;

/// Raises the PTX version to 8.1 where a kernel's parameter is larger than older versions allow; the back end does not.
pub(crate) fn raise_isa(ptx: &str) -> Result<String> {
    let old = isa(ptx)?;
    let number = |version: &str| {
        let (major, minor) = version.split_once('.')?;
        Some((major.parse::<u32>().ok()?, minor.parse::<u32>().ok()?))
    };
    let version = number(old).ok_or_else(|| Error::new(format!("PTX version {old}")))?;
    let mut is_large = false;
    for entry in functions(ptx)?.iter().filter(|f| f.is_entry) {
        is_large |= parameter_layout(entry)?.0 > PARAMETER_LIMIT;
    }
    if !is_large || version >= (8, 1) {
        return Ok(ptx.to_owned());
    }
    Ok(ptx.replacen(&format!(".version {old}"), ".version 8.1", 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Laid out as the back end does it.
    const PTX: &str = "\
.version 8.1
.target sm_90a
.address_size 64

// ringseal.kernel first params=P threads=512 shared=131072
// ringseal.kernel second params=Q threads=256 shared=0

.func _RNvNtCsgJ6ytTPJmYV_4core9panicking9panic_fmt()
.noreturn;

\t// .globl\tfirst
.visible .entry first(
\t.param .align 8 .b8 first_param_0[264]
)
{
\t.reg .pred \t%p<3>;

\tld.param.b64 \t%rd1, [first_param_0+240];
\tbar.sync \t0;
\t@%p1 bra \t$L__BB0_4;
$L__BB0_3:
\t@!%p1 bar.warp.sync \t-1;
\tshfl.sync.bfly.b32 \t%r4, %r3, 1, 31, -1;
\t// begin inline asm
\t{ .reg .pred p; wgmma.mma_async.sync.aligned.m64n128k256.s32.b1.b1.and.popc {%r1, %r2}, %rd1, %rd2, p; }
\t// end inline asm
\t{ // callseq 0, 0
\tcall.uni _RNvNtCsgJ6ytTPJmYV_4core9panicking9panic_fmt, ();
\t} // callseq 0
\tbarrier.sync \t0; // bar.sync in a comment
\tret;

}
\t// .globl\tsecond
.visible .entry second(
\t.param .u64 .ptr .align 1 second_param_0
)
{
\tbar.sync \t0;
\tret;

}
.func _RNvNtCsgJ6ytTPJmYV_4core9panicking9panic_fmt()
.noreturn
{
$L__BB2_1:
\tbra.uni \t$L__BB2_1;

}";

    fn with(replaced: &str, by: &str) -> String {
        assert!(PTX.contains(replaced));
        PTX.replacen(replaced, by, 1)
    }

    #[test]
    fn reads_declarations() {
        let found = declarations(PTX).unwrap();
        assert_eq!(found.len(), 2);
        assert_eq!(
            found[1],
            Declaration { name: "second".into(), params: "Q".into(), threads: 256, shared: 0 }
        );
    }

    #[test]
    fn refuses_bad_declarations() {
        for (from, to) in [
            ("threads=512", "threads=many"),
            ("threads=512", "threads=0"),
            ("threads=512", "threads=1025"),
            ("threads=512 ", ""),
            ("kernel second", "kernel first"),
            ("shared=0", "smem=0"),
        ] {
            assert!(declarations(&with(from, to)).is_err(), "{from} -> {to}");
        }
    }

    #[test]
    fn finds_functions() {
        let found = functions(PTX).unwrap();
        let names: Vec<_> = found.iter().map(|f| (f.name.as_str(), f.is_entry)).collect();
        assert_eq!(
            names,
            [("first", true), ("second", true), ("_RNvNtCsgJ6ytTPJmYV_4core9panicking9panic_fmt", false)]
        );
        assert_eq!(parameter_layout(&found[0]).unwrap(), (264, 8));
        assert_eq!(parameter_layout(&found[1]).unwrap(), (8, 8));
        assert!(functions(PTX.strip_suffix('}').unwrap()).is_err());
    }

    #[test]
    fn refuses_two_parameters() {
        let ptx = with("first_param_0[264]\n", "first_param_0[264],\n\t.param .u64 first_param_1\n");
        let error = parameter_layout(&functions(&ptx).unwrap()[0]).unwrap_err().to_string();
        assert!(error.contains("kernel first") && error.contains("exactly one"), "{error}");
    }

    #[test]
    fn adds_launch_bounds_between_parameters_and_body() {
        let bounded = add_launch_bounds(PTX, &declarations(PTX).unwrap()).unwrap();
        assert!(bounded.contains("first_param_0[264]\n)\n.maxntid 512, 1, 1\n.minnctapersm 1\n{\n"));
        assert!(bounded.contains("second_param_0\n)\n.maxntid 256, 1, 1\n.minnctapersm 1\n{\n"));
        assert_eq!(bounded.matches(".maxntid").count(), 2, "functions get none");
        let without: Vec<_> = bounded
            .lines()
            .filter(|l| !l.starts_with(".maxntid") && !l.starts_with(".minnctapersm"))
            .collect();
        assert_eq!(without, PTX.lines().collect::<Vec<_>>());
        // Still readable, and not added twice.
        assert_eq!(functions(&bounded).unwrap()[0].directives, [".maxntid 512, 1, 1", ".minnctapersm 1"]);
        assert!(add_launch_bounds(&bounded, &declarations(PTX).unwrap()).is_err());
    }

    #[test]
    fn entries_and_declarations_must_agree() {
        let error = |ptx: &str| add_launch_bounds(ptx, &declarations(ptx).unwrap()).unwrap_err().to_string();
        assert!(error(&with("ringseal.kernel second", "ringseal.kernel third")).contains("third"));
        assert!(error(&with("// ringseal.kernel second", "// kernel second")).contains("entry second"));
    }

    #[test]
    fn large_parameters_need_a_newer_ptx() {
        let version = |ptx: &str| isa(&raise_isa(ptx).unwrap()).unwrap().to_owned();
        let older = with(".version 8.1", ".version 7.1");
        assert_eq!(version(&older), "7.1");
        assert_eq!(version(&older.replace("[264]", "[4352]")), "7.1");
        assert_eq!(version(&older.replace("[264]", "[4360]")), "8.1");
        assert_eq!(version(&with(".version 8.1", ".version 8.10").replace("[264]", "[4360]")), "8.10");
        assert!(raise_isa(&with(".version 8.1", ".version new")).is_err());
    }

    #[test]
    fn counts_by_opcode_not_by_mention() {
        let first = &functions(PTX).unwrap()[0];
        assert_eq!(
            counts(&first.body),
            Counts { barriers: 2, warp_barriers: 1, shuffles: 1, wgmma: 1, ..Counts::default() }
        );
        let lines =
            ["@%p0 vote.sync.any.pred %p1, %p2, -1;", "redux.sync.xor.b32 a, b, -1; mma.sync.aligned.x {a};"];
        let body: Vec<_> = lines.iter().map(|&l| l.to_owned()).collect();
        assert_eq!(counts(&body), Counts { votes: 1, reductions: 1, mma: 1, ..Counts::default() });
    }

    #[test]
    fn clean_module_has_no_findings() {
        assert_eq!(findings(PTX).unwrap(), [""; 0]);
    }

    #[test]
    fn finds_local_memory_asm_barriers_and_functions_with_barriers() {
        let found = |ptx: String| findings(&ptx).unwrap().join("\n");
        let local = found(with("\t.reg .pred \t%p<3>;", "\t.local .align 8 .b8 \t__local_depot0[256];"));
        assert!(local.starts_with("first: local memory"), "{local}");
        let asm = found(with("{ .reg .pred p; wgmma", "{ bar.sync 0; wgmma"));
        assert_eq!(asm, "first: bar.sync in inline assembly: use the LLVM intrinsic");
        let function = found(with("\tbra.uni", "\tshfl.sync.idx.b32 \t%r1;\n\tbra.uni"));
        assert!(function.contains("panic_fmt: shfl.sync.idx.b32 outside an entry"), "{function}");
        let external = found(with("\t// .globl\tfirst", ".extern .func vprintf;\n\t// .globl\tfirst"));
        assert!(external.contains("vprintf"), "{external}");
    }

    #[test]
    fn strips_only_disambiguators() {
        let stripped = strip_disambiguators(PTX);
        assert!(!stripped.contains("gJ6ytTPJmYV"));
        assert_eq!(stripped.matches("_RNvNtC4core9panicking9panic_fmt").count(), 3);
        assert_eq!(
            strip_disambiguators("x_RCsab_4core _RNvCsX 7_RCs9_1a"),
            "x_RCsab_4core _RNvCsX 7_RCs9_1a"
        );
        assert_eq!(strip_disambiguators("_RNvCs1a_1b1c"), "_RNvC1b1c");
    }
}
