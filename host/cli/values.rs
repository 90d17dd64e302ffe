//! Values of command-line options, parsed into the types that the rest works with.

use std::fmt;
use std::str::FromStr;

use ringseal::aead::AesKey;
use ringseal::{Dtype, ReduceOp};
use zeroize::Zeroizing;

/// A number of bytes, written as in nccl-tests: `64`, `128K`, `1M`, `1G`, in powers of 1024.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ByteSize(pub(crate) usize);

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let shift = match text.bytes().last().map(|suffix| suffix.to_ascii_uppercase()) {
            Some(b'K') => 10,
            Some(b'M') => 20,
            Some(b'G') => 30,
            _ => 0,
        };
        let digits = if shift == 0 { text } else { &text[..text.len() - 1] };
        // usize::from_str would also take "+5".
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err("write bytes as a whole number with an optional K, M or G, such as 64K or 1G".into());
        }
        let too_large = || "larger than this machine can address".to_string();
        let number: usize = digits.parse().map_err(|_| too_large())?;
        number.checked_mul(1 << shift).map(Self).ok_or_else(too_large)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            n if n > 0 && n.is_multiple_of(1 << 30) => write!(formatter, "{}G", n >> 30),
            n if n > 0 && n.is_multiple_of(1 << 20) => write!(formatter, "{}M", n >> 20),
            n if n > 0 && n.is_multiple_of(1 << 10) => write!(formatter, "{}K", n >> 10),
            n => write!(formatter, "{n}"),
        }
    }
}

/// The element types as nccl-tests names them, in the order of [`Dtype::ALL`].
pub(crate) fn dtype_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "float",
        Dtype::F64 => "double",
        Dtype::F16 => "half",
        Dtype::Bf16 => "bfloat16",
        Dtype::I8 => "int8",
        Dtype::U8 => "uint8",
        Dtype::I32 => "int32",
        Dtype::U32 => "uint32",
        Dtype::I64 => "int64",
        Dtype::U64 => "uint64",
    }
}

/// The reduction operations as nccl-tests names them.
pub(crate) fn op_name(op: ReduceOp) -> &'static str {
    match op {
        ReduceOp::Sum => "sum",
        ReduceOp::Avg => "avg",
        ReduceOp::Min => "min",
        ReduceOp::Max => "max",
        ReduceOp::Prod => "prod",
    }
}

/// Parses an element type.
pub(crate) fn parse_dtype(text: &str) -> Result<Dtype, String> {
    by_name(text, &Dtype::ALL, dtype_name)
}

/// Parses a reduction operation.
pub(crate) fn parse_op(text: &str) -> Result<ReduceOp, String> {
    by_name(text, &ReduceOp::ALL, op_name)
}

fn by_name<T: Copy>(text: &str, all: &[T], name: fn(T) -> &'static str) -> Result<T, String> {
    let known = || all.iter().map(|&value| name(value)).collect::<Vec<_>>().join(", ");
    all.iter().copied().find(|&value| name(value) == text).ok_or_else(|| format!("choose one of {}", known()))
}

/// Hexadecimal bytes. The error never repeats the input, which may be a key.
pub(crate) fn parse_hex(text: &str) -> Result<Zeroizing<Vec<u8>>, String> {
    hex::decode(text).map(Zeroizing::new).map_err(|error| match error {
        hex::FromHexError::OddLength => format!("{} hexadecimal digits are not whole bytes", text.len()),
        _ => "not hexadecimal: use only the digits 0-9 and a-f, without spaces or 0x".into(),
    })
}

/// An AES key in hexadecimal.
pub(crate) fn parse_key(text: &str) -> Result<AesKey, String> {
    AesKey::from_bytes(&parse_hex(text)?).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_in_powers_of_1024() {
        let cases = [("0", 0), ("8", 8), ("64k", 65_536), ("1M", 1 << 20), ("3G", 3 << 30)];
        for (text, bytes) in cases {
            assert_eq!(text.parse::<ByteSize>().unwrap().0, bytes, "{text}");
        }
        for text in ["", "K", "-1", "+1", "1.5M", "1MB", "1 M", "0x10", "१", "é", "1T"] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
        let huge = "99999999999999999999G".parse::<ByteSize>().unwrap_err();
        assert!(huge.contains("larger"), "{huge}");
        assert!("18446744073709551615G".parse::<ByteSize>().is_err());
    }

    #[test]
    fn a_size_prints_as_it_is_written() {
        for text in ["0", "1000", "64K", "1M", "1500K", "2G"] {
            assert_eq!(text.parse::<ByteSize>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn every_dtype_and_op_has_a_name_of_its_own() {
        for dtype in Dtype::ALL {
            assert_eq!(parse_dtype(dtype_name(dtype)), Ok(dtype));
        }
        for op in ReduceOp::ALL {
            assert_eq!(parse_op(op_name(op)), Ok(op));
        }
        let refusal = parse_op("mean").unwrap_err();
        assert!(refusal.contains("sum, avg, min, max, prod"), "{refusal}");
        assert!(parse_dtype("fp8").is_err());
    }

    #[test]
    fn hex_is_whole_bytes_and_errors_keep_keys_secret() {
        assert_eq!(*parse_hex("00fFa5").unwrap(), [0x00, 0xff, 0xa5]);
        assert!(parse_hex("").unwrap().is_empty());
        for text in ["0", "0g", "0x00", "00 11", "é0"] {
            let refusal = parse_hex(text).unwrap_err();
            assert!(!refusal.contains(&format!("{text:?}")), "{refusal}");
        }
    }

    #[test]
    fn keys_have_the_three_aes_lengths() {
        assert!(matches!(parse_key(&"00".repeat(16)), Ok(AesKey::Aes128(_))));
        assert!(matches!(parse_key(&"00".repeat(24)), Ok(AesKey::Aes192(_))));
        assert!(matches!(parse_key(&"00".repeat(32)), Ok(AesKey::Aes256(_))));
        for bytes in [0, 1, 15, 17, 31, 33, 64] {
            assert!(parse_key(&"5e".repeat(bytes)).is_err(), "{bytes}");
        }
        assert!(!parse_key(&"5e".repeat(15)).unwrap_err().contains("5e5e"));
    }
}
