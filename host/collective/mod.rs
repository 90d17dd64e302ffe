//! Sealed collectives: all-reduce, reduce-scatter, all-gather and broadcast over `n` ranks.

mod partition;
pub mod schedule;

pub use partition::Partition;
pub use schedule::{Algorithm, Collective};
