//! Rust types as element types.

use crate::Dtype;

/// A Rust type that collectives work on.
pub trait Element: bytemuck::Pod + Send + Sync + sealed::Sealed {
    /// Its element type.
    const DTYPE: Dtype;
}

mod sealed {
    /// Keeps size and meaning of [`super::Element`]s in this crate's hands.
    pub trait Sealed {}
}

macro_rules! element {
    ($($rust:ty => $dtype:ident),* $(,)?) => {
        $(
            impl sealed::Sealed for $rust {}
            impl Element for $rust {
                const DTYPE: Dtype = Dtype::$dtype;
            }
            const _: () = assert!(size_of::<$rust>() == Dtype::$dtype.size());
        )*
    };
}

element! {
    f32 => F32, f64 => F64, half::f16 => F16, half::bf16 => Bf16,
    i8 => I8, u8 => U8, i32 => I32, u32 => U32, i64 => I64, u64 => U64,
}
