//! Sealed collectives for GPUs, with crypto kernels written in Rust and compiled to PTX.
//!
//! A confidential GPU protects its own memory, but what it sends over NVLink, PCIe or a network is either slow or in
//! the clear, and NCCL encrypts nothing. Here every byte that leaves a GPU package is sealed with AES-GCM inside the
//! collective itself: the ranks share a secret, the links carry only ciphertext and tags, and a changed, replayed,
//! reordered or missing record is an error on every rank, never a wrong sum.
//!
//! # What to call
//!
//! * [`collective`]: all-reduce and its relatives over `n` ranks, sealed.
//! * [`channel`]: sealed records between ranks, with derived keys and nonces, for other protocols.
//! * [`aead`]: AES-GCM and GMAC for one message or a batch. The caller brings keys and nonces.
//! * [`vectors`]: the published test vectors, on a backend of your choice.
//! * [`cuda`]: devices, memory and kernel launches, for data that are already on the GPU.
//!
//! A sealed all-reduce of three ranks, here the threads of one process; no GPU is needed:
//!
//! ```
//! use ringseal::ReduceOp;
//! use ringseal::channel::GroupSecret;
//! use ringseal::collective::{Communicator, Options};
//!
//! // Between machines the secret comes from attestation, and every rank calls `Communicator::join`.
//! let secret = GroupSecret::random()?;
//! let ranks = Communicator::in_process(3, &secret, &Options::default())?;
//! std::thread::scope(|scope| {
//!     for mut communicator in ranks {
//!         scope.spawn(move || {
//!             let mut gradient = vec![1.0_f32 + communicator.rank() as f32; 1000];
//!             communicator.all_reduce_in_place(&mut gradient, ReduceOp::Sum).unwrap();
//!             assert_eq!(gradient, [6.0; 1000]);
//!         });
//!     }
//! });
//! # Ok::<(), ringseal::Error>(())
//! ```
//!
//! One sealed message:
//!
//! ```
//! use ringseal::aead::{Aead, AesKey, Iv};
//!
//! let key = AesKey::from_bytes(&[7; 16])?;
//! let backend = ringseal::backend::by_name("cpu")?;
//! let aead = Aead::new(backend.as_ref(), &key)?;
//!
//! let nonce = [0; 12]; // never twice with one key
//! let mut data = b"a gradient".to_vec();
//! let tag = aead.seal_in_place(Iv::from_nonce(&nonce), b"layer 3", &mut data)?;
//! aead.open_in_place(Iv::from_nonce(&nonce), b"layer 3", &mut data, &tag)?;
//! assert_eq!(data, b"a gradient");
//! # Ok::<(), ringseal::Error>(())
//! ```
//!
//! # Layers
//!
//! | layer | what it knows |
//! |---|---|
//! | [`collective`] | schedules as data: who sends which chunk when; no cryptography |
//! | [`channel`] | keys, nonces, additional data, verification, rekeying |
//! | [`backend`] | where the cipher runs: `cpu`, `cuda`, or `emulated`, the GPU kernels' own source run on the CPU |
//! | [`transport`] | moves ciphertext and tags; never sees a key or a plaintext |
//!
//! CUDA is found at run time: the crate builds and works without GPU, driver or toolkit, and says what is missing
//! when `cuda` is asked for. Nothing falls back silently: what a backend can't do is [`Error::Unsupported`].
//!
//! # What it does not protect
//!
//! The ranks trust each other: whoever holds the group secret can speak as any rank. The lengths and timing of
//! messages are visible, and an attacker on the link can always stop traffic; that gives an error within a deadline.

pub mod aead;
pub mod backend;
pub mod channel;
pub mod collective;
pub mod copy;
pub mod cuda;
mod dtype;
mod error;
mod keystream;
pub mod ptx;
pub mod study;
pub mod transport;
pub mod vectors;

pub use dtype::{Dtype, ReduceOp};
pub use error::{Error, Result};

/// Runs the README's examples as documentation tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
