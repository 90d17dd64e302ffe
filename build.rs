//! Embeds the kernels' PTX; the logic is in `ptx-build`.

use std::path::PathBuf;

use ringseal_ptx_build::embed::{Origin, embed};

fn main() {
    let folder = |name| PathBuf::from(std::env::var_os(name).expect("cargo sets it"));
    let (root, out) = (folder("CARGO_MANIFEST_DIR"), folder("OUT_DIR"));
    for input in ["build.rs", "host/ptx", "kernels-gpu/Cargo.toml", "kernels-gpu/src"] {
        // Cargo takes a missing path for a changed one, and the published package has no kernels-gpu.
        if root.join(input).exists() {
            println!("cargo::rerun-if-changed={input}");
        }
    }
    match embed(&root, &out) {
        Ok(Origin::CheckedIn) => {}
        Ok(Origin::Rebuilt) => println!(
            "cargo::warning=the kernel sources have changed since host/ptx was made, so the PTX was compiled anew; check it in \
             with `cargo ptx build`"
        ),
        Err(error) => {
            for line in error.to_string().lines() {
                println!("cargo::error={line}");
            }
        }
    }
}
