//! Builds, checks and describes the PTX of ringseal's kernels.
