//! The manifest as a C header: parameter structures, constants and launch figures, for C11 and C++11.
//!
//! A device address is a `uint64_t` (`CUdeviceptr`) whatever the kernel takes it for, so that structures are filled in the
//! same way from any host. Sizes, alignments and offsets are asserted, so a compiler that lays a structure out otherwise
//! refuses the header.

use std::fmt::Write as _;

use crate::manifest::{Field, Manifest, Structure};

/// File name of the header.
pub const FILE: &str = "ringseal_ptx.h";

/// Writes the header.
pub fn header(manifest: &Manifest) -> String {
    let mut out = PREAMBLE.to_owned();
    for constant in &manifest.constants {
        comment(&mut out, "", &constant.doc);
        let name = constant.name.replace("::", "_").to_uppercase();
        let suffix =
            if matches!(constant.ty.as_str(), "u64" | "usize" | "i64" | "isize") { "ull" } else { "u" };
        _ = writeln!(out, "#define RINGSEAL_{name} {}{suffix}", constant.value);
    }
    for structure in &manifest.structures {
        out.push('\n');
        define(&mut out, manifest, structure);
    }
    out.push_str(LAUNCH);
    for module in &manifest.modules {
        let target = module.target.name();
        _ = writeln!(out, "\n/* The kernels of {}. */", module.file);
        _ = writeln!(out, "static const ringseal_kernel ringseal_kernels_{target}[] = {{");
        for kernel in &module.kernels {
            let parameter = type_name(&kernel.parameter);
            _ = writeln!(
                out,
                "    {{ \"{}\", {}, {}, sizeof({parameter}) }}, /* {parameter} */",
                kernel.name, kernel.threads, kernel.shared_bytes
            );
        }
        out.push_str("    { 0, 0, 0, 0 } /* the end */\n};\n");
    }
    out.push_str(FIND);
    out
}

const PREAMBLE: &str = "\
/* Parameters and launch figures of ringseal's PTX kernels. Written by `ringseal ptx`; docs/ptx.md explains the kernels.
 * C11 or C++11. Fields that hold addresses hold device addresses (CUdeviceptr). */
#ifndef RINGSEAL_PTX_H
#define RINGSEAL_PTX_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
#define RINGSEAL_ALIGN(bytes) alignas(bytes)
#define RINGSEAL_ALIGN_OF(type) alignof(type)
#define RINGSEAL_ASSERT(condition) static_assert(condition, #condition)
#else
#define RINGSEAL_ALIGN(bytes) _Alignas(bytes)
#define RINGSEAL_ALIGN_OF(type) _Alignof(type)
#define RINGSEAL_ASSERT(condition) _Static_assert(condition, #condition)
#endif

";

const LAUNCH: &str = "
/* How to launch a kernel: one-dimensional blocks of `threads` threads; `shared_bytes` of dynamic shared memory, which
 * must be allowed first (CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) where it is more than 48 KiB; one parameter,
 * a structure of `parameter_bytes` bytes by value. */
typedef struct ringseal_kernel {
    const char *name;
    uint32_t threads;
    uint32_t shared_bytes;
    uint32_t parameter_bytes;
} ringseal_kernel;
";

const FIND: &str = "
/* The kernel of that name in one of the tables above; null if it isn't there. */
static inline const ringseal_kernel *ringseal_find_kernel(const ringseal_kernel *table, const char *name) {
    for (; table->name; table++) {
        if (strcmp(table->name, name) == 0) return table;
    }
    return NULL;
}

#endif
";

fn define(out: &mut String, manifest: &Manifest, structure: &Structure) {
    let name = type_name(&structure.name);
    comment(out, "", &structure.doc);
    _ = writeln!(out, "typedef struct {name} {{");
    let natural = structure.fields.iter().map(|f| align_of(manifest, &f.ty)).max().unwrap_or(1);
    for (index, field) in structure.fields.iter().enumerate() {
        comment(out, "    ", &field.doc);
        let (element, dimensions) = declaration(&field.ty);
        // Alignment that no field asks for is asked for by the first.
        let align = match element.as_str() {
            _ if index == 0 && structure.align > natural => structure.align,
            "u128" | "i128" => 16,
            _ => 0,
        };
        let align = if align > 0 { format!("RINGSEAL_ALIGN({align}) ") } else { String::new() };
        _ = writeln!(out, "    {align}{} {}{dimensions};", c_type(&element), field_name(field));
    }
    _ = writeln!(out, "}} {name};");
    _ = writeln!(out, "RINGSEAL_ASSERT(sizeof({name}) == {});", structure.bytes);
    _ = writeln!(out, "RINGSEAL_ASSERT(RINGSEAL_ALIGN_OF({name}) == {});", structure.align);
    for field in &structure.fields {
        _ = writeln!(out, "RINGSEAL_ASSERT(offsetof({name}, {}) == {});", field_name(field), field.offset);
    }
}

/// A comment of the documentation's lines; links become the C names of what they link to.
fn comment(out: &mut String, indent: &str, doc: &str) {
    if doc.is_empty() {
        return;
    }
    // A comment's end inside one would end it.
    let text = plain(doc).replace("*/", "* /");
    _ = writeln!(out, "{indent}/* {} */", text.lines().collect::<Vec<_>>().join(&format!("\n{indent} * ")));
}

/// Documentation without its links' targets: "[`name`](target)" and "[`name`]" become "`name`".
fn plain(doc: &str) -> String {
    let (mut text, mut rest) = (String::new(), doc);
    while let Some((before, after)) = rest.split_once("[`") {
        let Some((name, after)) = after.split_once("`]") else { break };
        text.push_str(before);
        _ = write!(text, "`{name}`");
        rest = after.strip_prefix('(').and_then(|t| Some(t.split_once(')')?.1)).unwrap_or(after);
    }
    text + rest
}

/// `CtrParams` becomes `ringseal_ctr_params`.
fn type_name(rust: &str) -> String {
    let mut name = "ringseal".to_owned();
    for letter in rust.chars() {
        if letter.is_uppercase() {
            name.push('_');
        }
        name.extend(letter.to_lowercase());
    }
    name
}

/// A field's name; one that C or C++ reserves, or a tuple's number, gets an underscore.
fn field_name(field: &Field) -> String {
    const RESERVED: [&str; 22] = [
        "auto",
        "bool",
        "case",
        "catch",
        "char",
        "class",
        "default",
        "delete",
        "double",
        "explicit",
        "float",
        "friend",
        "int",
        "long",
        "namespace",
        "new",
        "operator",
        "private",
        "register",
        "short",
        "signed",
        "template",
    ];
    match field.name.as_str() {
        name if name.starts_with(|c: char| c.is_ascii_digit()) => format!("_{name}"),
        name if RESERVED.contains(&name) => format!("{name}_"),
        name => name.to_owned(),
    }
}

/// The element type of a Rust type, and its array dimensions in C's order: "[[u32; 3]; 2]" is `u32` and "[2][3]".
fn declaration(ty: &str) -> (String, String) {
    match ty.strip_prefix('[').and_then(|t| t.strip_suffix(']')).and_then(|t| t.rsplit_once("; ")) {
        Some((element, length)) => {
            let (element, dimensions) = declaration(element);
            (element, format!("[{length}]{dimensions}"))
        }
        None if matches!(ty, "u128" | "i128") => (ty.to_owned(), "[16]".to_owned()),
        None => (ty.to_owned(), String::new()),
    }
}

fn c_type(element: &str) -> String {
    match element {
        "u8" | "u128" | "i128" => "uint8_t".into(),
        "u16" => "uint16_t".into(),
        "u32" => "uint32_t".into(),
        "u64" | "usize" => "uint64_t".into(),
        "i8" | "i16" | "i32" | "i64" => format!("int{}_t", &element[1..]),
        "isize" => "int64_t".into(),
        "f32" => "float".into(),
        "f64" => "double".into(),
        pointer if pointer.starts_with('*') => "uint64_t".into(),
        structure => type_name(structure),
    }
}

fn align_of(manifest: &Manifest, ty: &str) -> u32 {
    match declaration(ty).0.as_str() {
        "u8" | "i8" => 1,
        "u16" | "i16" => 2,
        "u32" | "i32" | "f32" => 4,
        "u128" | "i128" => 16,
        element => manifest.structure(element).map_or(8, |s| s.align),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;

    use super::*;
    use crate::manifest::{Constant, Counts, Kernel, Module, Target};

    fn field(name: &str, ty: &str, offset: u32, bytes: u32) -> Field {
        Field { name: name.into(), ty: ty.into(), doc: String::new(), offset, bytes }
    }

    fn structure(name: &str, bytes: u32, align: u32, fields: Vec<Field>) -> Structure {
        Structure {
            name: name.into(),
            doc: "What */ it [`Is`](crate::is).\nMore.".into(),
            bytes,
            align,
            fields,
        }
    }

    /// Everything that a structure may hold.
    fn manifest() -> Manifest {
        let module = |target: Target, kernels| Module {
            target,
            file: target.file().into(),
            ptx_isa: "8.0".into(),
            sha256: String::new(),
            rustflags: vec![],
            kernels,
        };
        let kernel = Kernel {
            name: "fill".into(),
            threads: 512,
            shared_bytes: 131_072,
            parameter: "FillParams".into(),
            counts: Counts::default(),
        };
        Manifest {
            rustc: "1.95.0".into(),
            sources: vec![],
            sources_sha256: String::new(),
            structures: vec![
                structure("Wide", 1024, 1024, vec![field("0", "[[u16; 3]; 2]", 0, 12)]),
                structure(
                    "FillParams",
                    3120,
                    1024,
                    vec![
                        field("default", "u8", 0, 1),
                        field("wide", "[Wide; 2]", 1024, 2048),
                        field("address", "*mut u32", 3072, 8),
                        field("big", "u128", 3088, 16),
                        field("scale", "f64", 3104, 8),
                        field("last", "i16", 3112, 2),
                    ],
                ),
            ]
            .into_iter()
            .map(|mut s| {
                s.bytes = s.bytes.next_multiple_of(s.align);
                s
            })
            .collect(),
            constants: vec![
                Constant {
                    name: "cause::LATE".into(),
                    ty: "u32".into(),
                    value: 2,
                    doc: "It was late.".into(),
                },
                Constant { name: "MOST".into(), ty: "u64".into(), value: 1 << 40, doc: String::new() },
            ],
            modules: vec![module(Target::Sm90a, vec![kernel]), module(Target::Sm80, vec![])],
        }
    }

    /// Compiles a text as C11 or C++11 with all warnings as errors; `None` where there is no such compiler.
    fn compiles(compiler: &str, language: [&str; 3], text: &str) -> Option<bool> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("test");
        std::fs::write(&file, text).unwrap();
        let null = Path::new("/dev/null");
        let output = Command::new(compiler)
            .args(language)
            .args(["-Wall", "-Wextra", "-Werror", "-pedantic", "-c", "-o"])
            .args([null, &file])
            .output()
            .ok()?;
        if !output.status.success() {
            eprintln!("{}", String::from_utf8_lossy(&output.stderr));
        }
        Some(output.status.success())
    }

    const C: [&str; 3] = ["-x", "c", "-std=c11"];
    const CXX: [&str; 3] = ["-x", "c++", "-std=c++11"];

    #[test]
    fn compilers_agree_with_every_size_and_offset() {
        let text = header(&manifest());
        let user = "\nint main(void) { return (int)ringseal_find_kernel(ringseal_kernels_sm_90a, \"fill\")->threads \
                    + (ringseal_find_kernel(ringseal_kernels_sm_80, \"fill\") != 0); }\n";
        for (compiler, language) in [("cc", C), ("c++", CXX)] {
            match compiles(compiler, language, &(text.clone() + user)) {
                Some(good) => assert!(good, "{compiler} refuses:\n{text}"),
                None => eprintln!("no {compiler} here: the header is not compiled as that"),
            }
        }
    }

    #[test]
    fn a_wrong_offset_does_not_compile() {
        let mut manifest = manifest();
        manifest.structures[1].fields[5].offset += 2;
        assert_ne!(compiles("cc", C, &header(&manifest)), Some(true));
        let mut manifest = self::manifest();
        manifest.structures[0].bytes *= 2;
        assert_ne!(compiles("cc", C, &header(&manifest)), Some(true));
    }

    #[test]
    fn names_and_comments() {
        let text = header(&manifest());
        for part in [
            "/* It was late. */\n#define RINGSEAL_CAUSE_LATE 2u\n#define RINGSEAL_MOST 1099511627776ull\n",
            "/* What * / it `Is`.\n * More. */\ntypedef struct ringseal_wide {\n    RINGSEAL_ALIGN(1024) uint16_t _0[2][3];\n",
            "    uint8_t default_;\n    ringseal_wide wide[2];\n    uint64_t address;\n    RINGSEAL_ALIGN(16) uint8_t big[16];\n",
            "{ \"fill\", 512, 131072, sizeof(ringseal_fill_params) }, /* ringseal_fill_params */",
        ] {
            assert!(text.contains(part), "{part}\nis not in\n{text}");
        }
    }
}
