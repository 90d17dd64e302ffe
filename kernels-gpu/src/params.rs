//! Shared-memory layout and other constants on which kernels and host agree.

/// Where dynamic shared memory begins: the driver reserves the first KiB (compute capability 8.0 and newer).
pub const SHARED_BASE: u32 = 0x400;

/// First byte after the T-tables of AES (128 KiB at [`SHARED_BASE`]): GHASH matrices and scratch begin here.
pub const TABLES_END: u32 = SHARED_BASE + 0x2_0000;

/// First address that a block cannot have on compute capability 9.0 (227 KiB a block).
pub const SHARED_END_SM_90: u32 = SHARED_BASE + 227 * 1024;

/// First address that a block cannot have on compute capability 8.0 (163 KiB a block).
pub const SHARED_END_SM_80: u32 = SHARED_BASE + 163 * 1024;
