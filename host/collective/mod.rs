//! Sealed collectives: all-reduce, reduce-scatter, all-gather and broadcast over `n` ranks.
//!
//! ```
//! use ringseal::ReduceOp;
//! use ringseal::channel::GroupSecret;
//! use ringseal::collective::{Communicator, Options};
//!
//! let ranks = Communicator::in_process(3, &GroupSecret::random()?, &Options::default())?;
//! std::thread::scope(|scope| {
//!     for mut rank in ranks {
//!         scope.spawn(move || {
//!             let mut gradient = vec![1.0_f32 + rank.rank() as f32; 1000];
//!             rank.all_reduce_in_place(&mut gradient, ReduceOp::Sum).unwrap();
//!             assert_eq!(gradient, [6.0; 1000]);
//!         });
//!     }
//! });
//! # Ok::<(), ringseal::Error>(())
//! ```
//!
//! # Arithmetic
//!
//! Every rank gets the same bits: those of the [schedule's order of summation](schedule#order-of-summation), in the
//! element type. f16 and bf16 are accumulated in f32 and rounded to nearest even where a step ends; an average is the
//! sum's bits divided once by the number of ranks, integers towards zero. Integers wrap. NaN on any rank gives NaN on
//! all, in minimum and maximum too, and a NaN that comes out of an operation is the canonical quiet one. Infinities and
//! signed zeros are those of IEEE 754, and -0 is less than +0. What is only moved (all-gather, broadcast, a single
//! rank) keeps its bits.

mod bootstrap;
mod communicator;
mod element;
mod execute;
mod nodes;
mod partition;
mod reduce;
pub mod reference;
mod rendezvous;
pub mod schedule;
mod vectors;

pub use crate::channel::{Crypto, KeyLength};
pub use bootstrap::{Bootstrap, CallbackBootstrap, InProcess, Watch};
pub(crate) use bootstrap::{agree, announce};
pub use communicator::{Communicator, Options, Request};
pub use element::Element;
pub(crate) use nodes::{NodePart, node_parts};
pub use nodes::{Nodes, Rail};
pub use partition::Partition;
pub(crate) use reduce::divide;
pub use rendezvous::Rendezvous;
pub use schedule::{Algorithm, Collective};
pub use vectors::Buffers;
