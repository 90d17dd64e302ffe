//! C programs, compiled with the system's `cc` against header and library, and run.
#![allow(clippy::print_stdout, reason = "what is skipped belongs in the output")]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where cargo has put the library for this test.
fn library() -> PathBuf {
    let executable = std::env::current_exe().unwrap();
    let found =
        executable.ancestors().skip(1).take(2).find(|folder| folder.join("libringseal_c.so").exists());
    found.expect("the shared library lies beside the tests").to_path_buf()
}

fn compile_and_run(source: &str, shared: bool) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let (library, out) = (library(), tempfile::tempdir().unwrap());
    let program = out.path().join("program");
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-pthread"]);
    cc.arg("-I").arg(root.join("include")).arg(root.join(source)).arg("-o").arg(&program);
    match shared {
        true => {
            cc.arg("-L").arg(&library).arg("-lringseal_c").arg(format!("-Wl,-rpath,{}", library.display()))
        }
        false => cc.arg(library.join("libringseal_c.a")).args(["-lm"]),
    };
    cc.arg("-ldl");
    let compiled = cc.output().expect("cc is needed, the C compiler that Rust links with anyway");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let ran = Command::new(&program).output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{}\n{stdout}\n{stderr}", ran.status);
    stdout.into_owned()
}

#[test]
fn wrong_calls_get_a_status() {
    let printed = compile_and_run("capi/tests/errors.c", true);
    assert!(printed.ends_with("checks\n"), "{printed}");
}

#[test]
fn the_example_runs_with_either_library() {
    for shared in [true, false] {
        let printed = compile_and_run("examples/c/all_reduce.c", shared);
        assert_eq!(printed.matches("sums are right").count(), 3, "{printed}");
    }
}

/// Runs an example past the test's captured output, so that what was skipped is seen.
fn run_and_show(source: &str) -> String {
    let printed = compile_and_run(source, true);
    std::io::stderr().write_all(printed.as_bytes()).unwrap();
    printed
}

/// What it checks on a GPU it says; without one it says why it checks nothing.
#[test]
fn the_example_on_device_memory_runs() {
    let printed = run_and_show("examples/c/gpu_seal.c");
    assert!(printed.starts_with("the GPU seals as the CPU") || printed.starts_with("SKIPPED: "), "{printed}");
}

/// The copies need a GPU; what is refused doesn't.
#[test]
fn the_example_of_sealed_copies_runs() {
    let printed = run_and_show("examples/c/gpu_copy.c");
    let copied = printed.strip_prefix("what can't be is refused\n").unwrap();
    assert!(copied.starts_with("what was copied") || copied.starts_with("SKIPPED: "), "{printed}");
}

/// On a GPU, if there is one, two processes share it.
#[test]
fn the_example_of_all_reduces_on_device_memory_runs() {
    let printed = run_and_show("examples/c/gpu_all_reduce.c");
    let (right, skipped) = (printed.matches("sums are right").count(), printed.matches("SKIPPED: ").count());
    assert!(right + skipped == 2 && (right == 0 || skipped == 0), "{printed}");
}
