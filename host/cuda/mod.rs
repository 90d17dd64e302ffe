//! NVIDIA GPUs by the driver API, found at run time.
//!
//! Nothing here links to or needs CUDA when the crate is built; [`driver`] looks for the driver library the first time
//! that it is asked, and every failure is an [`Error`](crate::Error) that says what is missing. Nothing here panics on a
//! machine with no GPU or no driver.
//!
//! * [`Device`] holds the device's *primary* context, the one that PyTorch, CuPy, NCCL and the CUDA runtime use, so
//!   pointers and streams pass freely between them and this crate. Every call makes it current for its own duration and
//!   then puts back what was current before, so any thread may use any handle, and a caller's own device choice stays.
//! * [`Module`] holds compiled kernels, [`Kernel`] launches one: it takes exactly one parameter struct by value,
//!   as `kernels-gpu` defines it.
//! * [`Kernels`], with [`DeviceKey`] for AES-CTR and [`GcmKey`] for AES-GCM, are the cipher on device memory.
//! * [`DeviceAead`] seals and opens messages in device memory in the order of the caller's streams.
//! * [`SealedCopy`] copies between host and device with nothing but ciphertext on the way.
//! * [`Keystream`] makes the keystream of collectives' records ahead of time, and does steps with it.
//! * [`DeviceBuffer`] and [`HostBuffer`] own memory; [`Stream`], [`Event`] and [`Graph`] order and time work.
//!
//! Every handle keeps what it needs alive: buffers, modules and streams may outlive the `Device` they came from.

mod aead;
mod ahead;
mod auto;
mod breakdown;
mod cipher;
mod collectives;
mod communicator;
mod copy;
mod device;
mod divide;
mod driver;
mod gcm;
mod ipc;
mod keystream;
mod memory;
mod mesh_plan;
mod module;
mod nccl;
mod nccl_communicator;
mod nccl_exchange;
mod nccl_link;
mod nodes;
mod pads;
mod rank;
mod rank_keystream;
mod ring;
mod ring_keys;
mod ring_plan;
mod seed;
mod seed_keys;
mod seed_plan;
mod stream;

pub use aead::{DeviceAead, DeviceText};
pub use ahead::KeystreamAhead;
pub use auto::{AutoCommunicator, AutoGroup, Calibrated};
pub use breakdown::{Breakdown, StepTimes};
pub use cipher::{DeviceKey, Kernels};
pub use collectives::Collectives;
pub use communicator::GpuCommunicator;
pub use copy::SealedCopy;
pub use device::{ComputeCapability, Device, PeerAccess};
pub use driver::{Version, driver};
pub(crate) use gcm::no_gcm;
pub use gcm::{GcmKey, MessageWorkspace};
pub use keystream::{Chunk, ChunkMemory, ChunkSide, ChunkWork, Keystream, KeystreamOptions};
pub use memory::{DeviceBuffer, HostBuffer};
pub use module::{Kernel, Launch, Module};
pub use nccl::Nccl;
pub use nccl_communicator::NcclCommunicator;
pub use nccl_exchange::NcclExchange;
pub use nodes::GpuNodes;
pub(crate) use rank::{LONGEST_EXCHANGED, LONGEST_RECORD, shared_out};
pub use ring::{GpuGroup, GpuOptions, LaunchForm, RankBuffers};
pub use ringseal_kernels::gcm::{FORGED, VERIFIED};
pub use seed::{SeedGroup, SeedKernels, SeedOptions};
pub use stream::{Event, Graph, Stream};
