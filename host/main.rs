//! The `ringseal` command.
fn main() {}
