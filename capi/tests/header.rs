//! `include/ringseal.h` is what cbindgen makes of the sources. `RINGSEAL_WRITE_HEADER=1` writes it.

use std::path::Path;

#[test]
fn the_header_is_what_the_sources_say() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(here.join("cbindgen.toml")).unwrap();
    // cbindgen goes on from there to the modules.
    let builder = cbindgen::Builder::new().with_config(config).with_src(here.join("src/lib.rs"));
    let mut header = Vec::new();
    builder.generate().unwrap().write(&mut header);
    // The sections on safety are for readers of the Rust sources; the header's beginning says it for all.
    let header = without_safety(&String::from_utf8(header).unwrap());
    let path = here.join("../include/ringseal.h");
    if std::env::var_os("RINGSEAL_WRITE_HEADER").is_some() {
        std::fs::write(&path, &header).unwrap();
    }
    let checked_in = std::fs::read_to_string(&path).unwrap();
    assert!(
        checked_in == header,
        "include/ringseal.h is not what the sources say: RINGSEAL_WRITE_HEADER=1 cargo test -p ringseal-capi --test header"
    );
}

/// Drops each comment's section from ` * # Safety` on.
fn without_safety(header: &str) -> String {
    let mut kept: Vec<&str> = Vec::new();
    let mut dropping = false;
    for line in header.lines() {
        if line.trim_end() == " * # Safety" {
            dropping = true;
            // The empty line before it.
            kept.pop();
        }
        dropping &= line.trim_end() != " */";
        if !dropping {
            kept.push(line);
        }
    }
    kept.join("\n") + "\n"
}
