//! The training study: which all-reduces a training iteration issues, and what sealing them costs.
pub mod buckets;
pub mod calibration;
pub mod choose;
pub mod fit;
pub mod iteration;
pub mod measure;
pub mod model;
pub mod overlap;
mod simulate;
pub mod workloads;
