//! Device kernels of ringseal. `#![no_std]` on the GPU; on the CPU the same source runs in the emulator ([`device`]).
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(abi_ptx, stdarch_nvptx, asm_experimental_arch, link_llvm_intrinsics, abi_unadjusted)
)]
// LLVM's shuffles, votes and barriers have no other name in Rust.
#![cfg_attr(target_arch = "nvptx64", allow(internal_features))]

#[macro_use]
pub mod device;

pub mod aes;
pub mod ctr;
pub mod elementwise;
#[cfg(any(ringseal_sm_90a, not(target_arch = "nvptx64")))]
pub mod exchange;
#[cfg(any(ringseal_sm_90a, not(target_arch = "nvptx64")))]
pub mod fused;
pub mod gcm;
pub mod gf128;
pub mod ghash;
#[cfg(any(ringseal_sm_90a, not(target_arch = "nvptx64")))]
pub mod gmac;
pub mod mesh;
pub mod message;
#[cfg(any(ringseal_sm_90a, not(target_arch = "nvptx64")))]
pub mod padded;
pub mod params;
#[cfg(not(ringseal_sm_90a))]
pub mod portable;
pub mod record;
pub mod reduce;
pub mod ring;
#[cfg(any(ringseal_sm_90a, not(target_arch = "nvptx64")))]
pub mod sealed;
#[cfg(any(ringseal_sm_90a, not(target_arch = "nvptx64")))]
pub mod sealed_mesh;
#[cfg(any(ringseal_sm_90a, not(target_arch = "nvptx64")))]
pub mod short;
pub mod step;
pub mod table_ghash;

#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    device::trap()
}
