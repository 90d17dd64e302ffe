//! The NumPy array format, versions 1.0 to 3.0: magic, version, header length, a Python dictionary as text, the data.
//!
//! Read here rather than by a crate: the published ones bring a whole Python-literal grammar (16 crates, half a
//! minute of build) for three fixed keys. The tests hold this reader against `npyz`.
//! Source: NumPy Enhancement Proposal 1 and `numpy.lib.format`.

use std::io::Read;

use ringseal::Dtype;

use super::{Contents, Form, Stored};

const MAGIC: &[u8; 6] = b"\x93NUMPY";
/// NumPy itself refuses longer headers by default (`max_header_size`); a plain array's takes about 118 bytes.
const MAX_HEADER_BYTES: usize = 10_000;
/// NumPy's own bound on dimensions (NPY_MAXDIMS since 2.0).
const MAX_DIMENSIONS: usize = 64;

/// Reads the header of a file of `length` bytes. The error is what is wrong, in words.
pub(super) fn parse(file: &mut impl Read, length: u64) -> Result<Contents, String> {
    let cut_off = |_| format!("the file is cut off inside its header ({length} bytes)");
    let mut header = vec![0; 8];
    if file.read_exact(&mut header).is_err() || header[..6] != *MAGIC {
        return Err("not a .npy file: it doesn't begin with NumPy's magic bytes".into());
    }
    let length_bytes = match (header[6], header[7]) {
        (1, 0) => 2,
        (2 | 3, 0) => 4,
        (major, minor) => return Err(format!(".npy format version {major}.{minor} is not known")),
    };
    let mut text_bytes = [0; 4];
    file.read_exact(&mut text_bytes[..length_bytes]).map_err(cut_off)?;
    header.extend_from_slice(&text_bytes[..length_bytes]);
    let text_bytes = u32::from_le_bytes(text_bytes) as usize;
    if text_bytes > MAX_HEADER_BYTES {
        return Err(format!(
            "the .npy header claims {text_bytes} bytes; a plain array needs less than 10000"
        ));
    }
    let text_start = header.len();
    header.resize(text_start + text_bytes, 0);
    file.read_exact(&mut header[text_start..]).map_err(cut_off)?;
    let text = std::str::from_utf8(&header[text_start..]).map_err(|_| "the .npy header is not text")?;

    let Description { element, fortran_order, shape } = Description::parse(text)?;
    let dtype = element_type(&element)?;
    let bytes = shape
        .iter()
        .try_fold(dtype.size() as u64, |product, &extent| product.checked_mul(extent))
        .ok_or_else(|| format!("shape {shape:?} is larger than any file"))?;
    let offset = header.len() as u64;
    let held = length.saturating_sub(offset);
    if held < bytes {
        return Err(format!("the file is cut off: {held} bytes of data, but shape {shape:?} needs {bytes}"));
    }
    if held > bytes {
        return Err(format!("{} bytes follow the array; the file is damaged", held - bytes));
    }
    let form = Form { element, shape, fortran_order };
    let tensors = vec![Stored { name: None, form, dtype: Some(dtype), offset, bytes }];
    Ok(Contents { tensors, header, metadata: Default::default() })
}

/// The element type as the collective reduces it.
fn element_type(text: &str) -> Result<Dtype, String> {
    match text {
        "<f4" => Ok(Dtype::F32),
        "<f8" => Ok(Dtype::F64),
        "<f2" => Ok(Dtype::F16),
        "|i1" => Ok(Dtype::I8),
        "|u1" => Ok(Dtype::U8),
        "<i4" => Ok(Dtype::I32),
        "<u4" => Ok(Dtype::U32),
        "<i8" => Ok(Dtype::I64),
        "<u8" => Ok(Dtype::U64),
        _ => Err(format!(
            "the array has element type '{text}', which can't be reduced; convert it to little-endian float16, \
             float32, float64, int8, uint8, int32, uint32, int64 or uint64 (bfloat16 needs .safetensors)"
        )),
    }
}

/// The header's dictionary.
#[derive(Debug, PartialEq, Eq)]
struct Description {
    element: String,
    fortran_order: bool,
    shape: Vec<u64>,
}

impl Description {
    fn parse(text: &str) -> Result<Self, String> {
        let mut literal = Literal(text);
        let (mut element, mut fortran_order, mut shape) = (None, None, None);
        literal.expect('{')?;
        while !literal.take('}') {
            let key = literal.string()?;
            literal.expect(':')?;
            match key {
                "descr" if literal.peek() == Some('[') => {
                    return Err("the array is structured (has named fields), which can't be reduced".into());
                }
                "descr" => element = Some(literal.string()?.to_owned()),
                "fortran_order" => fortran_order = Some(literal.boolean()?),
                "shape" => shape = Some(literal.shape()?),
                other => return Err(format!("the .npy header has an unknown key {other:?}")),
            }
            if !literal.take(',') {
                literal.expect('}')?;
                break;
            }
        }
        if literal.peek().is_some() {
            return Err(literal.malformed());
        }
        match (element, fortran_order, shape) {
            (Some(element), Some(fortran_order), Some(shape)) => Ok(Self { element, fortran_order, shape }),
            _ => Err("the .npy header lacks one of descr, fortran_order and shape".into()),
        }
    }
}

/// What is left of a Python literal.
struct Literal<'a>(&'a str);

impl<'a> Literal<'a> {
    /// The next character that isn't white space.
    fn peek(&mut self) -> Option<char> {
        self.0 = self.0.trim_start();
        self.0.chars().next()
    }

    fn take(&mut self, wanted: char) -> bool {
        let found = self.peek() == Some(wanted);
        if found {
            self.0 = &self.0[wanted.len_utf8()..];
        }
        found
    }

    fn expect(&mut self, wanted: char) -> Result<(), String> {
        if self.take(wanted) { Ok(()) } else { Err(self.malformed()) }
    }

    fn string(&mut self) -> Result<&'a str, String> {
        let quote = if self.take('"') {
            '"'
        } else {
            self.expect('\'')?;
            '\''
        };
        let (string, rest) = self.0.split_once(quote).ok_or_else(|| self.malformed())?;
        self.0 = rest;
        Ok(string)
    }

    fn boolean(&mut self) -> Result<bool, String> {
        self.peek();
        for (word, value) in [("True", true), ("False", false)] {
            if let Some(rest) = self.0.strip_prefix(word) {
                self.0 = rest;
                return Ok(value);
            }
        }
        Err(self.malformed())
    }

    fn shape(&mut self) -> Result<Vec<u64>, String> {
        let mut shape = Vec::new();
        self.expect('(')?;
        while !self.take(')') {
            if shape.len() == MAX_DIMENSIONS {
                return Err(format!("the array has more than {MAX_DIMENSIONS} dimensions"));
            }
            shape.push(self.integer()?);
            if !self.take(',') {
                self.expect(')')?;
                break;
            }
        }
        Ok(shape)
    }

    fn integer(&mut self) -> Result<u64, String> {
        self.peek();
        let end = self.0.find(|c: char| !c.is_ascii_digit()).unwrap_or(self.0.len());
        let (digits, rest) = self.0.split_at(end);
        let number = digits.parse().map_err(|_| self.malformed())?;
        self.0 = rest.strip_prefix('L').unwrap_or(rest); // written by Python 2
        Ok(number)
    }

    fn malformed(&self) -> String {
        let excerpt: String = self.0.trim_end().chars().take(24).collect();
        format!("the .npy header is malformed at {excerpt:?}")
    }
}

#[cfg(test)]
mod tests {
    use npyz::WriterBuilder;

    use super::*;

    fn parse(bytes: &[u8]) -> Result<Contents, String> {
        super::parse(&mut &bytes[..], bytes.len() as u64)
    }

    /// A file as NumPy writes it, with the given dictionary.
    fn file(dictionary: &str, data: &[u8]) -> Vec<u8> {
        let length = (dictionary.len() as u16).to_le_bytes();
        [&MAGIC[..], &[1, 0], &length[..], dictionary.as_bytes(), data].concat()
    }

    #[test]
    fn agrees_with_npyz_on_every_shape_and_order() {
        for shape in [&[][..], &[0], &[5], &[3, 2], &[2, 1, 3]] {
            for order in [npyz::Order::C, npyz::Order::Fortran] {
                let count: u64 = shape.iter().product();
                let mut bytes = Vec::new();
                let mut writer = npyz::WriteOptions::new()
                    .default_dtype()
                    .shape(shape)
                    .order(order)
                    .writer(&mut bytes)
                    .begin_nd()
                    .unwrap();
                writer.extend((0..count).map(|value| value as f32)).unwrap();
                writer.finish().unwrap();

                let contents = parse(&bytes).unwrap();
                let array = &contents.tensors[0];
                assert_eq!(array.form.shape, shape);
                assert_eq!(array.form.fortran_order, order == npyz::Order::Fortran);
                assert_eq!((array.dtype, array.bytes), (Some(Dtype::F32), 4 * count));
                let data = &bytes[array.offset as usize..];
                assert_eq!(
                    data,
                    (0..count).flat_map(|value| (value as f32).to_le_bytes()).collect::<Vec<u8>>()
                );
                for length in 0..bytes.len() {
                    assert!(parse(&bytes[..length]).is_err(), "{shape:?} cut at {length}");
                }
            }
        }
    }

    #[test]
    fn element_types_are_named_in_the_refusal() {
        for descr in [">f4", "<V2", "|b1", "<c8", "|O", "<i2", "<U3", "<f16"] {
            let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': (0,), }}\n");
            let refusal = parse(&file(&header, &[])).unwrap_err();
            assert!(refusal.contains(descr), "{refusal}");
        }
        let structured = "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (0,), }\n";
        assert!(parse(&file(structured, &[])).unwrap_err().contains("structured"));
    }

    #[test]
    fn hostile_headers_are_refused() {
        let overflow = "{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296), }\n";
        assert!(parse(&file(overflow, &[])).unwrap_err().contains("larger than any file"));
        for dictionary in [
            "",
            "{",
            "{}",
            "((((((((((",
            "{'descr': '<f4', 'fortran_order': False}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,), }",
            "{'descr': '<f4', 'fortran_order': Maybe, 'shape': (0,), }",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (0,), } trailing",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (0,), 'more': 1}",
            "{'descr: <f4",
        ] {
            assert!(parse(&file(dictionary, &[])).is_err(), "{dictionary}");
        }
        let claims_more = [&MAGIC[..], &[2, 0], &u32::MAX.to_le_bytes()[..]].concat();
        assert!(parse(&claims_more).unwrap_err().contains("claims"));
        assert!(parse(&[&MAGIC[..], &[9, 0, 0, 0]].concat()).unwrap_err().contains("version 9.0"));
    }

    /// Damage may make another valid file (another shape with as many elements), but never one that claims data it
    /// doesn't have.
    #[test]
    fn a_damaged_byte_never_reaches_beyond_the_file() {
        let whole = file("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }\n", &[0; 24]);
        for place in 0..whole.len() - 24 {
            for value in 0..=255 {
                let mut damaged = whole.clone();
                damaged[place] = value;
                if let Ok(Contents { tensors, .. }) = parse(&damaged) {
                    assert!(tensors.iter().all(|array| array.offset + array.bytes == whole.len() as u64));
                }
            }
        }
    }
}
