//! The `ringseal` command as a whole: help, vectors, information.

mod support;

use std::path::Path;
use std::process::Command;

use support::{fails, listing, ringseal, run, succeeds};

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap()
}

#[test]
fn help_warns_of_keys_on_the_command_line() {
    for command in ["seal", "open"] {
        let help = text(succeeds(run(ringseal([command, "--help"]), b"")));
        assert!(help.contains("Other users") && help.contains("prefer --key-file"), "{help}");
    }
}

#[test]
fn bad_usage_exits_with_2() {
    fails(&run(ringseal(["no-such-command"]), b""), 2, &["no-such-command"]);
    fails(&run(ringseal(["vectors", "--backend", "tpu"]), b""), 2, &["tpu", "emulated"]);
    fails(&run(ringseal(["vectors", "--every", "0"]), b""), 2, &["--every"]);
}

#[test]
fn every_vector_passes_on_the_cpu() {
    let report = text(succeeds(run(ringseal(["vectors", "--backend", "cpu"]), b"")));
    let total: Vec<_> =
        report.lines().find(|line| line.starts_with("total")).unwrap().split_whitespace().collect();
    assert_eq!(total[1], total[2], "{report}");
    assert_eq!(total[3..], ["0", "0"], "{report}");
    assert!(total[1].parse::<usize>().unwrap() > 8000, "{report}");
}

#[test]
fn a_missing_gpu_is_an_error_only_when_it_is_asked_for() {
    let hidden = |arguments: &[&str]| {
        let mut command = ringseal(arguments);
        command.env("CUDA_VISIBLE_DEVICES", "");
        run(command, b"")
    };
    fails(&hidden(&["vectors", "--backend", "cuda"]), 2, &["no usable CUDA device"]);
    assert!(text(succeeds(hidden(&["vectors"]))).starts_with("backend: cpu"));
}

#[test]
fn information_needs_no_gpu() {
    let mut command = ringseal(["info"]);
    command.env("CUDA_VISIBLE_DEVICES", "");
    let report = text(succeeds(run(command, b"")));
    assert!(report.contains("embedded PTX: sm_90a, sm_80") && report.contains("GPU: "), "{report}");
}

#[test]
fn the_host_part_of_copies_needs_no_gpu() {
    let bench =
        ["copy-bench", "--backend", "cpu", "-b", "1000001", "-n", "1", "--slots", "2", "--aes", "128"];
    let report = text(succeeds(run(ringseal(bench), b"")));
    let row: Vec<_> = report.lines().last().unwrap().split_whitespace().collect();
    assert!(row[..5] == ["128", "host", "to", "device", "-"] && row[6].parse::<f64>().is_ok(), "{report}");
    fails(&run(ringseal(["copy-bench", "--backend", "emulated"]), b""), 2, &["--backend cpu"]);
}

#[test]
fn the_ptx_files_are_the_embedded_ones() {
    use ringseal::ptx;

    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("new/ptx");
    let arguments = |out: &Path| ["ptx", "--no-cubins", "--out", out.to_str().unwrap()].map(str::to_owned);
    for _ in 0..2 {
        // The second time over the first one's files.
        let names = text(succeeds(run(ringseal(arguments(&target)), b"")));
        assert_eq!(names.lines().count(), 4, "{names}");
    }
    let read = |name: &str| std::fs::read_to_string(target.join(name)).unwrap();
    assert_eq!(read("ringseal_sm_90a.ptx"), ptx::SM_90A);
    assert_eq!(read("ringseal_sm_80.ptx"), ptx::SM_80);
    assert_eq!(read("manifest.json"), ptx::MANIFEST_JSON);
    assert_eq!(read("ringseal_ptx.h"), ptx::header());
    assert_eq!(listing(&target).len(), 4);
    let file = directory.path().join("file");
    std::fs::write(&file, "").unwrap();
    fails(&run(ringseal(arguments(&file)), b""), 2, &[file.to_str().unwrap()]);
}

/// The header of all kernels that there are, against a C and a C++ compiler's own layout.
#[test]
fn the_ptx_header_compiles() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("ringseal_ptx.h");
    std::fs::write(&file, ringseal::ptx::header()).unwrap();
    for (compiler, language) in [("cc", ["-x", "c", "-std=c11"]), ("c++", ["-x", "c++", "-std=c++11"])] {
        let mut command = Command::new(compiler);
        command.args(language).args(["-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only"]).arg(&file);
        match command.output() {
            Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
            Err(error) => eprintln!("{compiler}: {error}; the header is not compiled with it"),
        }
    }
}

/// With assemblers of our own: one that copies, and one that refuses.
#[cfg(unix)]
#[test]
fn cubins_are_made_where_there_is_an_assembler() {
    use std::os::unix::fs::PermissionsExt;

    let directory = tempfile::tempdir().unwrap();
    let assembler = |name: &str, script: &str| {
        let folder = directory.path().join(name).join("bin");
        std::fs::create_dir_all(&folder).unwrap();
        let file = folder.join("ptxas");
        std::fs::write(&file, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
        file
    };
    let copies = assembler("good", "cp \"$6\" \"$5\"");
    let refuses = assembler("old", "echo unsupported .version >&2; exit 1");
    let out = directory.path().join("out");
    let command = |more: &[&str]| ringseal([&["ptx", "--out", out.to_str().unwrap()], more].concat());

    let names = text(succeeds(run(command(&["--ptxas", copies.to_str().unwrap()]), b"")));
    assert_eq!(names.lines().count(), 6, "{names}");
    let cubin = std::fs::read_to_string(out.join("ringseal_sm_90a.cubin")).unwrap();
    assert_eq!(cubin, ringseal::ptx::SM_90A);
    // The PTX has been written and said to be by then.
    let refused = run(command(&["--ptxas", refuses.to_str().unwrap()]), b"");
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("unsupported .version"));
    // Found, not named: a warning, and everything else is written.
    let mut found = command(&[]);
    found.env("CUDA_HOME", directory.path().join("old"));
    let output = run(found, b"");
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("no cubin for sm_90a"));
}

#[cfg(target_os = "linux")]
#[test]
fn a_closed_or_full_standard_output_is_no_panic() {
    let shell = |script: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", script, "sh", env!("CARGO_BIN_EXE_ringseal")]);
        run(command, b"")
    };
    let output = shell(r#"{ sleep 0.3; "$1" vectors --backend cpu; echo "$?" >&2; } | true"#);
    assert_eq!(String::from_utf8_lossy(&output.stderr).trim(), "141");
    fails(&shell(r#""$1" vectors --backend cpu >/dev/full"#), 2, &["standard output", "No space left"]);
    assert!(shell(r#""$1" vectors --backend cpu >&-"#).status.success());
}
