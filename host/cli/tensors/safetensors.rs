//! The safetensors format: an 8-byte little-endian header length, a JSON header, the data.

use std::io::Read;

use ringseal::Dtype;
use safetensors::Dtype as Element;
use safetensors::tensor::Metadata;

use super::{Contents, Form, Stored};

const LENGTH_BYTES: u64 = 8;
/// The format's own bound on the JSON header.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Reads the header of a file of `length` bytes. The error is what is wrong, in words.
pub(super) fn parse(file: &mut impl Read, length: u64) -> Result<Contents, String> {
    let cut_off = |needed: u64| format!("the file is cut off: {length} bytes, but its header needs {needed}");
    let mut header = vec![0; LENGTH_BYTES as usize];
    if length < LENGTH_BYTES {
        return Err(format!("not a safetensors file: {length} bytes are too few"));
    }
    file.read_exact(&mut header).map_err(|error| error.to_string())?;
    let json_bytes = u64::from_le_bytes(std::array::from_fn(|i| header[i]));
    if json_bytes > MAX_HEADER_BYTES {
        return Err(format!("not a safetensors file: it claims a header of {json_bytes} bytes"));
    }
    let data_start = LENGTH_BYTES + json_bytes;
    if length < data_start {
        return Err(cut_off(data_start));
    }
    header.resize(data_start as usize, 0);
    let json = &mut header[LENGTH_BYTES as usize..];
    file.read_exact(json).map_err(|error| error.to_string())?;
    // The crate's own checks: offsets in order, without gaps, equal to shape x element size, no overflow.
    let metadata: Metadata = serde_json::from_slice(json)
        .map_err(|error| format!("the safetensors header is malformed: {error}"))?;
    let end = data_start + metadata.data_len() as u64;
    if end > length {
        return Err(format!("the file is cut off: {length} bytes, but its tensors end at {end}"));
    }
    if end < length {
        return Err(format!("{} bytes follow the last tensor; the file is damaged", length - end));
    }
    let tensors = metadata
        .offset_keys()
        .into_iter()
        .filter_map(|name| {
            let info = metadata.info(&name)?;
            let (start, end) = info.data_offsets;
            Some(Stored {
                name: Some(name),
                form: Form {
                    element: info.dtype.to_string(),
                    shape: info.shape.iter().map(|&extent| extent as u64).collect(),
                    fortran_order: false,
                },
                dtype: reducible(info.dtype),
                offset: data_start + start as u64,
                bytes: (end - start) as u64,
            })
        })
        .collect();
    Ok(Contents { tensors, metadata: metadata.metadata().clone().unwrap_or_default(), header })
}

/// The header again, without its `__metadata__`.
pub(super) fn without_metadata(header: &[u8]) -> Result<Vec<u8>, String> {
    let words = |error: &dyn std::fmt::Display| format!("rewriting the header: {error}");
    let metadata: Metadata =
        serde_json::from_slice(&header[LENGTH_BYTES as usize..]).map_err(|error| words(&error))?;
    let tensors = metadata.offset_keys().into_iter();
    let tensors = tensors.filter_map(|name| metadata.info(&name).cloned().map(|info| (name, info))).collect();
    let bare = Metadata::new(None, tensors).map_err(|error| words(&error))?;
    let mut json = serde_json::to_vec(&bare).map_err(|error| words(&error))?;
    json.resize(json.len().next_multiple_of(8), b' '); // keeps the data aligned, as the format asks
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);
    Ok(header)
}

fn reducible(element: Element) -> Option<Dtype> {
    match element {
        Element::F32 => Some(Dtype::F32),
        Element::F64 => Some(Dtype::F64),
        Element::F16 => Some(Dtype::F16),
        Element::BF16 => Some(Dtype::Bf16),
        Element::I8 => Some(Dtype::I8),
        Element::U8 => Some(Dtype::U8),
        Element::I32 => Some(Dtype::I32),
        Element::U32 => Some(Dtype::U32),
        Element::I64 => Some(Dtype::I64),
        Element::U64 => Some(Dtype::U64),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use safetensors::tensor::TensorView;

    use super::*;

    fn file(metadata: Option<HashMap<String, String>>) -> Vec<u8> {
        let data: Vec<u8> = (0..24).collect();
        let tensors = [
            ("w", TensorView::new(Element::F32, vec![2, 2], &data[..16]).unwrap()),
            ("b", TensorView::new(Element::BF16, vec![4], &data[16..]).unwrap()),
            ("none", TensorView::new(Element::BOOL, vec![0, 3], &[]).unwrap()),
        ];
        safetensors::serialize(tensors, metadata).unwrap()
    }

    fn parse(bytes: &[u8]) -> Result<Contents, String> {
        super::parse(&mut &bytes[..], bytes.len() as u64)
    }

    #[test]
    fn offsets_point_at_the_data() {
        let bytes = file(None);
        let contents = parse(&bytes).unwrap();
        let w = contents.tensors.iter().find(|tensor| tensor.name.as_deref() == Some("w")).unwrap();
        assert_eq!(bytes[w.offset as usize..][..w.bytes as usize], (0..16).collect::<Vec<u8>>());
        assert_eq!((w.dtype, &w.form.shape[..]), (Some(Dtype::F32), &[2, 2][..]));
        let none = contents.tensors.iter().find(|tensor| tensor.name.as_deref() == Some("none")).unwrap();
        assert_eq!((none.dtype, none.bytes, &none.form.element[..]), (None, 0, "BOOL"));
        assert_eq!(contents.header, bytes[..bytes.len() - 24]);
    }

    #[test]
    fn a_file_cut_anywhere_is_refused() {
        let bytes = file(None);
        for length in 0..bytes.len() {
            assert!(parse(&bytes[..length]).is_err(), "{length} bytes");
        }
        let longer = [&bytes[..], b"x"].concat();
        assert!(parse(&longer).unwrap_err().contains("1 bytes follow"));
    }

    #[test]
    fn metadata_can_be_left_out() {
        let noted = HashMap::from([("step".into(), "7".into())]);
        let contents = parse(&file(Some(noted.clone()))).unwrap();
        assert_eq!(contents.metadata, noted);
        let bare = without_metadata(&contents.header).unwrap();
        assert!(bare.len().is_multiple_of(8));
        let again = parse(&[bare, (0..24).collect()].concat()).unwrap();
        assert!(again.metadata.is_empty());
        assert_eq!(again.tensors.len(), contents.tensors.len());
    }

    #[test]
    fn hostile_headers_are_refused_without_a_large_allocation() {
        let huge = [&u64::MAX.to_le_bytes()[..], b"{}"].concat();
        assert!(parse(&huge).unwrap_err().contains("claims a header"));
        let claims_more = [&99_999_999_u64.to_le_bytes()[..], b"{}"].concat();
        assert!(parse(&claims_more).unwrap_err().contains("cut off"));
        let deep = "[".repeat(100_000);
        let nested = [&(deep.len() as u64).to_le_bytes()[..], deep.as_bytes()].concat();
        assert!(parse(&nested).unwrap_err().contains("malformed"));
        let overflow = br#"{"w":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}"#;
        let overflow = [&(overflow.len() as u64).to_le_bytes()[..], overflow].concat();
        assert!(parse(&overflow).unwrap_err().contains("malformed"));
    }

    /// Damage may make another valid file (other names), but never one that claims data it doesn't have.
    #[test]
    fn a_damaged_byte_never_reaches_beyond_the_file() {
        let whole = file(None);
        for place in 0..whole.len() - 24 {
            for value in (0..=255).step_by(5) {
                let mut damaged = whole.clone();
                damaged[place] = value;
                if let Ok(Contents { tensors, .. }) = parse(&damaged) {
                    assert!(tensors.iter().all(|tensor| tensor.offset + tensor.bytes <= whole.len() as u64));
                    assert_eq!(tensors.iter().map(|tensor| tensor.bytes).sum::<u64>(), 24);
                }
            }
        }
    }
}
