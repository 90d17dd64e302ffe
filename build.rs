//! Embeds the kernels' PTX; the logic is in `ptx-build`.
fn main() {}
