//! The training study: which all-reduces a training iteration issues, and what sealing them costs.
pub mod buckets;
pub mod workloads;
