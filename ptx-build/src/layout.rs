//! Layout of the kernels' parameter structures, read from the kernel crate's source.
//!
//! The PTX knows a parameter's size and nothing of its fields; who launches a kernel from another language needs both, and
//! what lies behind the addresses in them, for which the documentation's links are followed. The rules are those of `#[repr(C)]` (Rust reference, "Type layout"), and the size is checked against the PTX.

use std::collections::BTreeMap;

use syn::{
    Attribute, BinOp, Expr, ExprLit, Item, ItemConst, ItemStruct, ItemType, Lit, Meta, Type, UnOp, Visibility,
};

use crate::manifest::{Constant, Field, Structure};
use crate::sources::SourceFile;
use crate::{Error, Result};

/// The crate's structures, type aliases and constants, by name. A name means the item of the same file, otherwise the only
/// one of that name in the crate; using a name that has several meanings is an error.
#[derive(Default)]
pub(crate) struct Types {
    structs: Items<ItemStruct>,
    aliases: Items<ItemType>,
    consts: Items<ItemConst>,
}

type Items<T> = BTreeMap<String, Vec<Found<T>>>;

/// An item and where it stands.
struct Found<T> {
    file: String,
    /// The inline modules that it is in, the outermost first.
    modules: Vec<String>,
    item: T,
}

#[derive(Clone, Copy)]
struct Layout {
    bytes: u64,
    align: u64,
}

impl Types {
    /// Parses the Rust files.
    pub(crate) fn parse(files: &[SourceFile]) -> Result<Self> {
        let mut types = Self::default();
        for file in files.iter().filter(|f| f.path.ends_with(".rs")) {
            let parsed =
                syn::parse_file(&file.text).map_err(|e| Error::new(format!("{}: {e}", file.path)))?;
            types.add(&file.path, &[], parsed.items);
        }
        Ok(types)
    }

    fn add(&mut self, file: &str, modules: &[String], items: Vec<Item>) {
        fn put<T>(items: &mut Items<T>, name: &syn::Ident, file: &str, modules: &[String], item: T) {
            let found = Found { file: file.to_owned(), modules: modules.to_vec(), item };
            items.entry(name.to_string()).or_default().push(found);
        }
        for item in items {
            match item {
                Item::Struct(s) => put(&mut self.structs, &s.ident.clone(), file, modules, s),
                Item::Type(t) => put(&mut self.aliases, &t.ident.clone(), file, modules, t),
                Item::Const(c) => put(&mut self.consts, &c.ident.clone(), file, modules, c),
                Item::Mod(m) if !is_test(&m.attrs) => {
                    let inner = [modules, &[m.ident.to_string()]].concat();
                    self.add(file, &inner, m.content.map(|c| c.1).unwrap_or_default());
                }
                _ => {}
            }
        }
    }

    /// Describes the parameter structures of those names, the structures that they contain, and those that the
    /// documentation of any of these links to; with them the public integer constants that are linked to, by themselves or
    /// by the inline module they are in, or whose own documentation links to one of the structures or to one of `kernels`.
    /// What a link names and the rules of this module cannot describe is left out.
    pub(crate) fn describe(
        &self,
        parameters: &[&str],
        kernels: &[&str],
    ) -> Result<(Vec<Structure>, Vec<Constant>)> {
        let mut described: Vec<(String, Structure)> = Vec::new();
        for name in parameters {
            let found = one(&self.structs, name, "structure", "")?;
            self.with_contents(&found.file, name, &mut described, 0)?;
        }
        // Grows while links lead to more.
        let (mut next, mut links) = (0, Vec::new());
        while let Some((file, structure)) = described.get(next) {
            let docs = structure.fields.iter().map(|f| &f.doc).chain([&structure.doc]);
            let found: Vec<_> = docs.flat_map(|doc| linked(doc)).map(|link| (file.clone(), link)).collect();
            for (file, link) in &found {
                let name = last_segment(link);
                if let Ok(found) = one(&self.structs, name, "structure", file) {
                    let mut more = Vec::new();
                    if self.with_contents(&found.file, name, &mut more, 0).is_ok() {
                        let is_new =
                            |(_, s): &(String, Structure)| described.iter().all(|d| d.1.name != s.name);
                        more.retain(is_new);
                        described.extend(more);
                    }
                }
            }
            links.extend(found);
            next += 1;
        }
        for (index, (_, structure)) in described.iter().enumerate() {
            if described[..index].iter().any(|(_, s)| s.name == structure.name) {
                return Err(Error::new(format!("kernels use several structures named {}", structure.name)));
            }
        }
        let is_described =
            |name: &str| kernels.contains(&name) || described.iter().any(|(_, s)| s.name == name);
        let mut constants = Vec::new();
        for (name, items) in &self.consts {
            for found in items.iter().filter(|f| matches!(f.item.vis, Visibility::Public(_))) {
                let doc = doc(&found.item.attrs);
                let is_linked = links.iter().any(|(file, link)| {
                    let last = last_segment(link);
                    (last == name || found.modules.last().is_some_and(|m| m == last))
                        && (*file == found.file || link.contains("::") || self.consts[name].len() == 1)
                });
                let links_back = linked(&doc).iter().any(|link| link.split("::").any(&is_described));
                if !is_linked && !links_back {
                    continue;
                }
                let (Ok(ty), Ok(value)) =
                    (path_name(&found.item.ty), self.value(&found.item.expr, 0, &found.file))
                else {
                    continue;
                };
                let name = [&found.modules[..], std::slice::from_ref(name)].concat().join("::");
                constants.push(Constant { name, ty, value, doc });
            }
        }
        constants.sort_by(|a, b| a.name.cmp(&b.name));
        if let Some(pair) = constants.windows(2).find(|pair| pair[0].name == pair[1].name) {
            return Err(Error::new(format!(
                "the structures' documentation leads to several constants named {}; rename one or take its link away",
                pair[0].name
            )));
        }
        Ok((described.into_iter().map(|(_, s)| s).collect(), constants))
    }

    /// Puts a structure into `described`, with those that it contains before it.
    fn with_contents(
        &self,
        file: &str,
        name: &str,
        described: &mut Vec<(String, Structure)>,
        depth: u32,
    ) -> Result<()> {
        let found = one(&self.structs, name, "structure", file)?;
        if described.iter().any(|(file, s)| *file == found.file && s.name == name) {
            return Ok(());
        }
        let (layout, fields) = self.structure(name, depth, file)?;
        for field in &found.item.fields {
            if let Some(inner) = self.contained(&field.ty, &found.file) {
                self.with_contents(&found.file, &inner, described, depth + 1)?;
            }
        }
        let structure = Structure {
            name: name.to_owned(),
            doc: doc(&found.item.attrs),
            bytes: narrow(layout.bytes)?,
            align: narrow(layout.align)?,
            fields,
        };
        described.push((found.file.clone(), structure));
        Ok(())
    }

    /// The structure that a field's type is or is an array of.
    fn contained(&self, ty: &Type, file: &str) -> Option<String> {
        match ty {
            Type::Array(array) => self.contained(&array.elem, file),
            Type::Paren(inner) => self.contained(&inner.elem, file),
            Type::Path(_) => {
                let name = path_name(ty).ok()?;
                match one(&self.aliases, &name, "type", file) {
                    Ok(alias) => self.contained(&alias.item.ty, &alias.file),
                    Err(_) => self.structs.contains_key(&name).then_some(name),
                }
            }
            _ => None,
        }
    }

    fn structure(&self, name: &str, depth: u32, file: &str) -> Result<(Layout, Vec<Field>)> {
        let Found { item, file, .. } = one(&self.structs, name, "structure", file)?;
        if depth > MAX_DEPTH {
            return Err(Error::new(format!("structure {name}: nested too deep")));
        }
        let mut align = repr_c_align(item)?;
        let (mut end, mut fields) = (0u64, Vec::new());
        for (index, field) in item.fields.iter().enumerate() {
            let layout = self.layout(&field.ty, depth, file)?;
            let offset = end.next_multiple_of(layout.align);
            end = offset + layout.bytes;
            align = align.max(layout.align);
            fields.push(Field {
                name: field.ident.as_ref().map_or_else(|| index.to_string(), ToString::to_string),
                ty: self.type_name(&field.ty, file, 0)?,
                doc: doc(&field.attrs),
                offset: narrow(offset)?,
                bytes: narrow(layout.bytes)?,
            });
        }
        Ok((Layout { bytes: end.next_multiple_of(align), align }, fields))
    }

    fn layout(&self, ty: &Type, depth: u32, file: &str) -> Result<Layout> {
        let scalar = |bytes| Ok(Layout { bytes, align: bytes });
        match ty {
            Type::Ptr(_) => scalar(8),
            Type::Array(array) => {
                let element = self.layout(&array.elem, depth, file)?;
                Ok(Layout { bytes: element.bytes * self.value(&array.len, 0, file)?, ..element })
            }
            Type::Paren(inner) => self.layout(&inner.elem, depth, file),
            Type::Path(_) => match path_name(ty)?.as_str() {
                "u8" | "i8" => scalar(1),
                "u16" | "i16" => scalar(2),
                "u32" | "i32" | "f32" => scalar(4),
                "u64" | "i64" | "f64" | "usize" | "isize" => scalar(8),
                "u128" | "i128" => scalar(16),
                name if self.aliases.contains_key(name) && depth <= MAX_DEPTH => {
                    let alias = one(&self.aliases, name, "type", file)?;
                    self.layout(&alias.item.ty, depth + 1, &alias.file)
                }
                name => Ok(self.structure(name, depth + 1, file)?.0),
            },
            _ => Err(Error::new(
                "a kernel parameter may hold integers, floats, raw pointers, arrays and structures of these",
            )),
        }
    }

    fn type_name(&self, ty: &Type, file: &str, depth: u32) -> Result<String> {
        Ok(match ty {
            Type::Ptr(p) => {
                let kind = if p.mutability.is_some() { "mut" } else { "const" };
                format!("*{kind} {}", self.type_name(&p.elem, file, depth)?)
            }
            Type::Array(a) => {
                format!("[{}; {}]", self.type_name(&a.elem, file, depth)?, self.value(&a.len, 0, file)?)
            }
            Type::Paren(inner) => self.type_name(&inner.elem, file, depth)?,
            _ => {
                let name = path_name(ty)?;
                match one(&self.aliases, &name, "type", file) {
                    Ok(alias) if depth <= MAX_DEPTH => {
                        self.type_name(&alias.item.ty, &alias.file, depth + 1)?
                    }
                    _ => name,
                }
            }
        })
    }

    /// Value of a constant expression in a file.
    fn value(&self, expr: &Expr, depth: u32, file: &str) -> Result<u64> {
        let unknown =
            || Error::new("an array length in a kernel parameter must be an integer expression of constants");
        if depth > MAX_DEPTH {
            return Err(unknown());
        }
        Ok(match expr {
            Expr::Lit(lit) => match &lit.lit {
                Lit::Int(n) => n.base10_parse().map_err(|_| unknown())?,
                _ => return Err(unknown()),
            },
            Expr::Path(path) => {
                let name = path.path.segments.last().ok_or_else(unknown)?.ident.to_string();
                let found = one(&self.consts, &name, "constant", file)?;
                self.value(&found.item.expr, depth + 1, &found.file)?
            }
            Expr::Paren(e) => self.value(&e.expr, depth + 1, file)?,
            Expr::Group(e) => self.value(&e.expr, depth + 1, file)?,
            Expr::Cast(e) => self.value(&e.expr, depth + 1, file)?,
            Expr::Unary(e) if matches!(e.op, UnOp::Not(_)) => !self.value(&e.expr, depth + 1, file)?,
            Expr::Binary(e) => {
                let (a, b) = (self.value(&e.left, depth + 1, file)?, self.value(&e.right, depth + 1, file)?);
                let shift = u32::try_from(b).unwrap_or(u32::MAX);
                match e.op {
                    BinOp::Add(_) => a.checked_add(b),
                    BinOp::Sub(_) => a.checked_sub(b),
                    BinOp::Mul(_) => a.checked_mul(b),
                    BinOp::Div(_) => a.checked_div(b),
                    BinOp::Rem(_) => a.checked_rem(b),
                    BinOp::Shl(_) => a.checked_shl(shift),
                    BinOp::Shr(_) => a.checked_shr(shift),
                    _ => None,
                }
                .ok_or_else(unknown)?
            }
            _ => return Err(unknown()),
        })
    }
}

/// Deeper than any structure here; ends a cycle of type aliases or constants.
const MAX_DEPTH: u32 = 16;

fn narrow(n: u64) -> Result<u32> {
    u32::try_from(n).map_err(|_| Error::new(format!("a parameter of {n} bytes")))
}

/// What `name` means in `file`.
fn one<'a, T>(items: &'a Items<T>, name: &str, what: &str, file: &str) -> Result<&'a Found<T>> {
    let all = items.get(name).map_or(&[][..], Vec::as_slice);
    let here: Vec<_> = all.iter().filter(|found| found.file == file).collect();
    match (here.as_slice(), all) {
        ([found], _) => Ok(found),
        ([], [found]) => Ok(found),
        ([], []) => {
            Err(Error::new(format!("{what} {name} is in a kernel parameter, but no source file defines it")))
        }
        _ => Err(Error::new(format!(
            "{what} {name} is in a kernel parameter, but the crate has several of the name"
        ))),
    }
}

/// An item's documentation, without the markup's leading spaces.
fn doc(attributes: &[Attribute]) -> String {
    let line = |attribute: &Attribute| match &attribute.meta {
        Meta::NameValue(pair) if pair.path.is_ident("doc") => match &pair.value {
            Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => Some(text.value().trim().to_owned()),
            _ => None,
        },
        _ => None,
    };
    attributes.iter().filter_map(line).collect::<Vec<_>>().join("\n")
}

/// The items that a documentation text links to: the target of "[`name`](target)", or else the name; without "()".
fn linked(doc: &str) -> Vec<String> {
    let mut links = Vec::new();
    let mut rest = doc;
    while let Some(start) = rest.find("[`") {
        rest = &rest[start + 2..];
        let Some((name, after)) = rest.split_once("`]") else { break };
        let target = after.strip_prefix('(').and_then(|t| Some(t.split_once(')')?.0)).unwrap_or(name);
        links.push(target.trim_end_matches("()").trim_end_matches('(').to_owned());
        rest = after;
    }
    links
}

fn last_segment(path: &str) -> &str {
    path.rsplit("::").next().unwrap_or(path)
}

fn path_name(ty: &Type) -> Result<String> {
    match ty {
        Type::Path(p) if p.qself.is_none() => match p.path.segments.last() {
            Some(segment) if segment.arguments.is_none() => return Ok(segment.ident.to_string()),
            _ => {}
        },
        Type::Tuple(t) if t.elems.is_empty() => return Ok("()".to_owned()),
        _ => {}
    }
    Err(Error::new("a type in a kernel parameter is generic or not a plain name"))
}

fn is_test(attrs: &[syn::Attribute]) -> bool {
    attrs.iter().any(|a| a.path().is_ident("cfg") && a.parse_args::<syn::Ident>().is_ok_and(|i| i == "test"))
}

/// The alignment that `#[repr(C, align(N))]` asks for; an error without `C`.
fn repr_c_align(item: &ItemStruct) -> Result<u64> {
    let bad = |what: &str| Error::new(format!("structure {}: {what}", item.ident));
    if !item.generics.params.is_empty() {
        return Err(bad("a kernel parameter cannot be generic"));
    }
    let (mut is_c, mut align) = (false, 1);
    for attr in item.attrs.iter().filter(|a| a.path().is_ident("repr")) {
        attr.parse_nested_meta(|meta| {
            if meta.path.is_ident("C") {
                is_c = true;
            } else if meta.path.is_ident("align") {
                let content;
                syn::parenthesized!(content in meta.input);
                align = content.parse::<syn::LitInt>()?.base10_parse()?;
            } else if !meta.path.is_ident("transparent") {
                return Err(meta.error("only C, align and transparent"));
            } else {
                is_c = true; // one field: C's rules give the same layout
            }
            Ok(())
        })
        .map_err(|e| bad(&format!("repr: {e}")))?;
    }
    if is_c { Ok(align) } else { Err(bad("a kernel parameter must be #[repr(C)]")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn types(text: &str) -> Types {
        Types::parse(&[
            SourceFile { path: "Cargo.toml".into(), text: "not rust".into() },
            SourceFile { path: "src/lib.rs".into(), text: text.into() },
        ])
        .unwrap()
    }

    /// The structure of that name.
    fn describe(text: &str, name: &str) -> Result<Structure> {
        Ok(types(text).describe(&[name], &[])?.0.pop().expect("it comes after what it contains"))
    }

    /// The compiler's own layout of the same text is the oracle.
    macro_rules! same_as_rustc {
        ($name:ident { $($field:ident),* } $($item:item)*) => {{
            #[allow(dead_code, reason = "only its layout matters")]
            mod rustc { $($item)* }
            let parsed = describe(&[$(stringify!($item)),*].join("\n"), stringify!($name)).unwrap();
            assert_eq!(parsed.bytes as usize, size_of::<rustc::$name>());
            assert_eq!(parsed.align as usize, align_of::<rustc::$name>());
            let offsets: Vec<_> = parsed.fields.iter().map(|f| (f.name.as_str(), f.offset as usize)).collect();
            assert_eq!(offsets, [$((stringify!($field), std::mem::offset_of!(rustc::$name, $field))),*]);
            parsed
        }};
    }

    #[test]
    fn scalars_arrays_pointers_padding() {
        let p = same_as_rustc!(P { a, b, c, d, e, f }
            pub(super) const ROUNDS: usize = 14;
            #[repr(C)]
            pub(super) struct P {
                pub a: u8,
                pub b: [u32; 4 * (ROUNDS + 1)],
                pub c: *mut u32,
                pub d: u16,
                pub e: f64,
                pub f: u8,
            }
        );
        let ty: Vec<_> = p.fields.iter().map(|f| f.ty.as_str()).collect();
        assert_eq!(ty, ["u8", "[u32; 60]", "*mut u32", "u16", "f64", "u8"]);
        assert_eq!(p.fields[1].bytes, 240);
    }

    #[test]
    fn nested_aligned_aliased() {
        same_as_rustc!(Outer { a, b, c, d }
            pub(super) const N: u32 = 1 << 3;
            pub(super) type Word = u32;
            pub(super) type Words = [Word; (N as usize) - 1];
            #[repr(C, align(16))]
            pub(super) struct Quad([u32; 4]);
            #[repr(C)]
            pub(super) struct Inner { x: u8, y: Words }
            #[repr(transparent)]
            pub(super) struct Address(u64);
            #[repr(C)]
            pub(super) struct Outer { pub a: u8, pub b: Quad, pub c: [Inner; 3], pub d: Address }
        );
    }

    #[test]
    fn refuses_what_has_no_fixed_layout() {
        for (text, word) in [
            ("struct P { a: u32 }", "repr(C)"),
            ("#[repr(C)] struct P { a: &'static u32 }", "raw pointers"),
            ("#[repr(C)] struct P<T> { a: T }", "generic"),
            ("#[repr(C)] struct P { a: Option<u32> }", "generic"),
            ("#[repr(C)] struct P { a: Missing }", "Missing"),
            ("#[repr(C)] struct P { a: [u8; N] }", "constant N"),
            ("#[repr(C)] struct P { a: [u8; f()] }", "integer expression"),
            ("#[repr(C)] struct P { a: P }", "nested too deep"),
            ("const A: usize = A; #[repr(C)] struct P { a: [u8; A] }", "integer expression"),
            ("#[repr(C)] struct P { a: u8 } mod m { #[repr(C)] struct P { a: u8 } }", "several"),
            ("#[repr(C, packed)] struct P { a: u8 }", "only C"),
            ("", "no source file defines it"),
        ] {
            let error = describe(text, "P").unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
    }

    #[test]
    fn structures_come_with_contents_links_and_constants() {
        let file = |path: &str, text: &str| SourceFile { path: path.into(), text: text.into() };
        let types = Types::parse(&[
            file(
                "src/a.rs",
                "const THREADS: u32 = 512;
                 /// Parameters.
                 #[repr(C)] pub struct P {
                     /// Address of [`Record`]s, at most [`MOST`](crate::b::MOST); fails with a [`cause`].
                     pub records: u64,
                     pub inner: [Inner; 2],
                 }
                 #[repr(C)] struct Inner { x: u32 }
                 #[repr(C, align(16))] pub struct Record { /// A [`Key`](crate::b::Key).
                     pub key: u64, pub next: u64 }
                 pub mod cause { pub const A: u64 = 1; const HIDDEN: u64 = 2; }
                 pub const UNRELATED: u32 = 3;
                 /// Blocks of a launch of [`fill()`].
                 pub const GRID: u32 = THREADS / 128 + 1;
                 /// Bytes of a [`Record`].
                 pub const SIZE: usize = size_of::<Record>();",
            ),
            file(
                "src/b.rs",
                "const THREADS: u32 = 256;
                 pub const MOST: u32 = 2048;
                 #[repr(C)] pub struct Key { words: [u32; THREADS as usize] }
                 struct Record(u8);",
            ),
        ])
        .unwrap();
        let (structures, constants) = types.describe(&["P"], &["fill"]).unwrap();
        let names: Vec<_> = structures.iter().map(|s| (s.name.as_str(), s.bytes)).collect();
        assert_eq!(names, [("Inner", 4), ("P", 16), ("Record", 16), ("Key", 1024)]);
        assert_eq!(structures[1].doc, "Parameters.");
        assert!(structures[1].fields[0].doc.starts_with("Address of [`Record`]s"));
        let named: Vec<_> = constants.iter().map(|c| (c.name.as_str(), c.value)).collect();
        assert_eq!(named, [("GRID", 5), ("MOST", 2048), ("cause::A", 1)]);
        assert_eq!(constants[0].ty, "u32");
    }

    #[test]
    fn test_modules_do_not_count() {
        let t = types("#[repr(C)] struct P { a: u8 } #[cfg(test)] mod tests { struct P; }");
        assert_eq!(t.describe(&["P"], &[]).unwrap().0[0].bytes, 1);
    }

    #[test]
    fn syntax_errors_name_the_file() {
        let file = SourceFile { path: "src/aes.rs".into(), text: "fn x( {".into() };
        assert!(Types::parse(&[file]).err().unwrap().to_string().starts_with("src/aes.rs: "));
    }
}
