//! Element types and reduction operations of the collectives.

/// Element type. All little-endian in memory and on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Dtype {
    /// IEEE 754 binary32.
    F32 = 0,
    /// IEEE 754 binary64.
    F64 = 1,
    /// IEEE 754 binary16; accumulated in f32 within a step.
    F16 = 2,
    /// bfloat16; accumulated in f32 within a step.
    Bf16 = 3,
    /// Signed 8-bit, wrapping.
    I8 = 4,
    /// Unsigned 8-bit, wrapping.
    U8 = 5,
    /// Signed 32-bit, wrapping.
    I32 = 6,
    /// Unsigned 32-bit, wrapping.
    U32 = 7,
    /// Signed 64-bit, wrapping.
    I64 = 8,
    /// Unsigned 64-bit, wrapping.
    U64 = 9,
}

impl Dtype {
    /// Every element type, in the order of their codes.
    pub const ALL: [Self; 10] = [
        Self::F32,
        Self::F64,
        Self::F16,
        Self::Bf16,
        Self::I8,
        Self::U8,
        Self::I32,
        Self::U32,
        Self::I64,
        Self::U64,
    ];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::I8 | Self::U8 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F64 | Self::I64 | Self::U64 => 8,
        }
    }
}

/// Reduction operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ReduceOp {
    /// Sum; integers wrap.
    Sum = 0,
    /// Sum divided once by the number of ranks at the end.
    Avg = 1,
    /// Minimum; NaN on any rank gives NaN.
    Min = 2,
    /// Maximum; NaN on any rank gives NaN.
    Max = 3,
    /// Product; integers wrap.
    Prod = 4,
}

impl ReduceOp {
    /// Every operation, in the order of their codes.
    pub const ALL: [Self; 5] = [Self::Sum, Self::Avg, Self::Min, Self::Max, Self::Prod];
}
