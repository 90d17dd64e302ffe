//! Layout of the kernels' parameter structures, read from the kernel crate's source.
//!
//! The PTX knows a parameter's size and nothing of its fields; who launches a kernel from another language needs both. The
//! rules are those of `#[repr(C)]` (Rust reference, "Type layout"), and the size is checked against the PTX.

use std::collections::BTreeMap;

use syn::{BinOp, Expr, Item, ItemConst, ItemStruct, ItemType, Lit, Type, UnOp};

use crate::manifest::{Field, Parameter};
use crate::sources::SourceFile;
use crate::{Error, Result};

/// The crate's structures, type aliases and constants, by name. Names of parameter structures and of what they are made of
/// are unique in the crate; if two items share a name, using it is an error.
#[derive(Default)]
pub(crate) struct Types {
    structs: BTreeMap<String, Vec<ItemStruct>>,
    aliases: BTreeMap<String, Vec<ItemType>>,
    consts: BTreeMap<String, Vec<ItemConst>>,
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
            types.add(parsed.items);
        }
        Ok(types)
    }

    fn add(&mut self, items: Vec<Item>) {
        for item in items {
            match item {
                Item::Struct(s) => self.structs.entry(s.ident.to_string()).or_default().push(s),
                Item::Type(t) => self.aliases.entry(t.ident.to_string()).or_default().push(t),
                Item::Const(c) => self.consts.entry(c.ident.to_string()).or_default().push(c),
                Item::Mod(m) if !is_test(&m.attrs) => self.add(m.content.map(|c| c.1).unwrap_or_default()),
                _ => {}
            }
        }
    }

    /// The layout of a parameter structure.
    pub(crate) fn parameter(&self, name: &str) -> Result<Parameter> {
        let (layout, fields) = self.structure(name, 0)?;
        Ok(Parameter {
            name: name.to_owned(),
            bytes: narrow(layout.bytes)?,
            align: narrow(layout.align)?,
            fields,
        })
    }

    fn structure(&self, name: &str, depth: u32) -> Result<(Layout, Vec<Field>)> {
        let item = one(&self.structs, name, "structure")?;
        if depth > MAX_DEPTH {
            return Err(Error::new(format!("structure {name}: nested too deep")));
        }
        let mut align = repr_c_align(item)?;
        let (mut end, mut fields) = (0u64, Vec::new());
        for (index, field) in item.fields.iter().enumerate() {
            let layout = self.layout(&field.ty, depth)?;
            let offset = end.next_multiple_of(layout.align);
            end = offset + layout.bytes;
            align = align.max(layout.align);
            fields.push(Field {
                name: field.ident.as_ref().map_or_else(|| index.to_string(), ToString::to_string),
                ty: self.type_name(&field.ty)?,
                offset: narrow(offset)?,
                bytes: narrow(layout.bytes)?,
            });
        }
        Ok((Layout { bytes: end.next_multiple_of(align), align }, fields))
    }

    fn layout(&self, ty: &Type, depth: u32) -> Result<Layout> {
        let scalar = |bytes| Ok(Layout { bytes, align: bytes });
        match ty {
            Type::Ptr(_) => scalar(8),
            Type::Array(array) => {
                let element = self.layout(&array.elem, depth)?;
                Ok(Layout { bytes: element.bytes * self.value(&array.len, 0)?, ..element })
            }
            Type::Paren(inner) => self.layout(&inner.elem, depth),
            Type::Path(_) => match path_name(ty)?.as_str() {
                "u8" | "i8" => scalar(1),
                "u16" | "i16" => scalar(2),
                "u32" | "i32" | "f32" => scalar(4),
                "u64" | "i64" | "f64" | "usize" | "isize" => scalar(8),
                "u128" | "i128" => scalar(16),
                name if self.aliases.contains_key(name) && depth <= MAX_DEPTH => {
                    self.layout(&one(&self.aliases, name, "type")?.ty, depth + 1)
                }
                name => Ok(self.structure(name, depth + 1)?.0),
            },
            _ => Err(Error::new(
                "a kernel parameter may hold integers, floats, raw pointers, arrays and structures of these",
            )),
        }
    }

    fn type_name(&self, ty: &Type) -> Result<String> {
        Ok(match ty {
            Type::Ptr(p) => {
                let kind = if p.mutability.is_some() { "mut" } else { "const" };
                format!("*{kind} {}", self.type_name(&p.elem)?)
            }
            Type::Array(a) => format!("[{}; {}]", self.type_name(&a.elem)?, self.value(&a.len, 0)?),
            Type::Paren(inner) => self.type_name(&inner.elem)?,
            _ => path_name(ty)?,
        })
    }

    /// Value of a constant expression.
    fn value(&self, expr: &Expr, depth: u32) -> Result<u64> {
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
                self.value(&one(&self.consts, &name, "constant")?.expr, depth + 1)?
            }
            Expr::Paren(e) => self.value(&e.expr, depth + 1)?,
            Expr::Group(e) => self.value(&e.expr, depth + 1)?,
            Expr::Cast(e) => self.value(&e.expr, depth + 1)?,
            Expr::Unary(e) if matches!(e.op, UnOp::Not(_)) => !self.value(&e.expr, depth + 1)?,
            Expr::Binary(e) => {
                let (a, b) = (self.value(&e.left, depth + 1)?, self.value(&e.right, depth + 1)?);
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

fn one<'a, T>(items: &'a BTreeMap<String, Vec<T>>, name: &str, what: &str) -> Result<&'a T> {
    match items.get(name).map(Vec::as_slice) {
        Some([item]) => Ok(item),
        Some(_) => Err(Error::new(format!(
            "{what} {name} is in a kernel parameter, but the crate has several of the name"
        ))),
        None => {
            Err(Error::new(format!("{what} {name} is in a kernel parameter, but no source file defines it")))
        }
    }
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

    /// The compiler's own layout of the same text is the oracle.
    macro_rules! same_as_rustc {
        ($name:ident { $($field:ident),* } $($item:item)*) => {{
            #[allow(dead_code, reason = "only its layout matters")]
            mod rustc { $($item)* }
            let parsed = types(&[$(stringify!($item)),*].join("\n")).parameter(stringify!($name)).unwrap();
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
            let error = types(text).parameter("P").unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
    }

    #[test]
    fn test_modules_do_not_count() {
        let t = types("#[repr(C)] struct P { a: u8 } #[cfg(test)] mod tests { struct P; }");
        assert_eq!(t.parameter("P").unwrap().bytes, 1);
    }

    #[test]
    fn syntax_errors_name_the_file() {
        let file = SourceFile { path: "src/aes.rs".into(), text: "fn x( {".into() };
        assert!(Types::parse(&[file]).err().unwrap().to_string().starts_with("src/aes.rs: "));
    }
}
