//! Collectives on every backend and algorithm: against a sequential model, against published bugs, under failure and
//! under attack.

mod arithmetic;
mod chaos;
mod conformance;
mod epochs;
mod failure;
mod group;
mod kernels;
mod model;
mod properties;
mod reference;
mod tamper;
mod wire;
