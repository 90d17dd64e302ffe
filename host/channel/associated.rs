//! The additional authenticated data of a record: everything that sender and receiver must agree on.

/// Version of this protocol; any change of what is sealed how is a new one.
pub const VERSION: u8 = 1;
/// Bytes of [`AssociatedData`]: three AES blocks.
pub const ASSOCIATED_DATA_BYTES: usize = 48;
/// Stands for the operation where nothing is reduced.
pub const NO_OP: u8 = 0xff;

/// The additional data, as they are authenticated: the same 48 bytes on CPU and GPU, integers little-endian.
///
/// The first 32 bytes are the same for all records of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct AssociatedData {
    /// [`VERSION`].
    pub version: u8,
    /// Code of the collective.
    pub collective: u8,
    /// Code of the algorithm.
    pub algorithm: u8,
    /// Code of the element type.
    pub dtype: u8,
    /// Code of the operation, or [`NO_OP`].
    pub op: u8,
    /// Zero.
    pub reserved: u8,
    /// The broadcasting rank; otherwise zero.
    pub root: u16,
    /// The session of the group.
    pub session: u64,
    /// Number of the collective in the session.
    pub sequence: u64,
    /// Elements of the whole vector.
    pub count: u64,
    /// The rank that sealed the record.
    pub sender: u16,
    /// Number of ranks.
    pub ranks: u16,
    /// The step in which it sealed it.
    pub step: u32,
    /// Number of the record inside its chunk.
    pub record: u32,
    /// 1 for the last record of its chunk, otherwise 0.
    pub last: u32,
}

// The struct is authenticated as it lies in memory.
const _: () = assert!(cfg!(target_endian = "little") && size_of::<AssociatedData>() == ASSOCIATED_DATA_BYTES);

impl AssociatedData {
    /// The bytes to authenticate.
    pub fn as_bytes(&self) -> &[u8] {
        bytemuck::bytes_of(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernels write these bytes too.
    #[test]
    fn fields_lie_where_the_kernels_put_them() {
        let data = AssociatedData {
            version: VERSION,
            collective: 2,
            algorithm: 3,
            dtype: 4,
            op: NO_OP,
            reserved: 0,
            root: 0x0605,
            session: 0x0807_0605_0403_0201,
            sequence: 0x100f_0e0d_0c0b_0a09,
            count: 0x1817_1615_1413_1211,
            sender: 0x2221,
            ranks: 0x2423,
            step: 0x2827_2625,
            record: 0x2c2b_2a29,
            last: 1,
        };
        let wanted = "01020304ff0005060102030405060708090a0b0c0d0e0f101112131415161718\
                      2122232425262728292a2b2c01000000";
        assert_eq!(hex::encode(data.as_bytes()), wanted);
    }
}
