//! Runs the `ringseal` binary and looks at what it did.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// The binary with these arguments.
pub(crate) fn ringseal<S: AsRef<std::ffi::OsStr>>(arguments: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringseal"));
    command.args(arguments);
    command
}

/// Runs to the end with `input` on standard input.
pub(crate) fn run(mut command: Command, input: &[u8]) -> Output {
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    let writer = std::thread::spawn(move || {
        let _ = stdin.write_all(&input); // the command may refuse before it reads
    });
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    output
}

/// Standard output of a command that must succeed.
#[track_caller]
pub(crate) fn succeeds(output: Output) -> Vec<u8> {
    assert!(output.status.success(), "{:?}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// The error of a command that must fail with `code`: nothing on standard output, each of `words` on standard error.
#[track_caller]
pub(crate) fn fails(output: &Output, code: i32, words: &[&str]) -> String {
    let error = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(code), "{error}");
    assert!(output.stdout.is_empty(), "{error}");
    assert!(error.starts_with("error: "), "{error}");
    for word in words {
        assert!(error.contains(word), "{word:?} is not in: {error}");
    }
    error
}

/// Names of the files in a directory, sorted.
pub(crate) fn listing(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
