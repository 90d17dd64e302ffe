//! `ringseal seal` and `ringseal open` from outside: known answers, pipes, files, and refusals that write nothing.

mod support;

use std::fs;
use std::process::{Command, Output};

use support::{fails, listing, ringseal, run, succeeds};

const KEY: &str = "000102030405060708090a0b0c0d0e0f";
const NONCE: &str = "000000000000000000000000";

fn seal(arguments: &[&str], message: &[u8]) -> Output {
    run(ringseal([&["seal", "--key", KEY], arguments].concat()), message)
}

fn open(arguments: &[&str], sealed: &[u8]) -> Output {
    run(ringseal([&["open", "--key", KEY], arguments].concat()), sealed)
}

#[test]
fn known_answers() {
    let cases: [(&str, &str, &[u8], &str); 6] = [
        (NONCE, "", b"", "7346139595c0b41e497bbde365f42d0a"),
        (NONCE, "41", b"", "a45e818e67aa45ebd40a93a4f6a710d9"),
        (NONCE, "00000000000000000000000000000000", b"", "08789a0988d35feae8408a64eaafaf65"),
        (NONCE, "", b"x", "3131e86f975bef1f314fff6a2332ea5737"),
        ("0001020304050607", "", b"abc", "a6294c59f157c7fd4c49f15f4c35589b1f0d46"),
        ("000102030405060708090a0b0c0d0e0f", "", b"abc", "cbcaf0f964e7f4123f8f1c71b8802153c06fee"),
    ];
    for (nonce, aad, message, sealed) in cases {
        let arguments = ["--nonce", nonce, "--aad", aad];
        let bytes = succeeds(seal(&arguments, message));
        assert_eq!(hex::encode(&bytes), sealed);
        assert_eq!(succeeds(open(&arguments, &bytes)), message);
    }
}

#[test]
fn files_and_a_key_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).into_os_string().into_string().unwrap();
    let message: Vec<u8> = (0..100_000_u32).flat_map(u32::to_le_bytes).collect();
    fs::write(path("message"), &message).unwrap();
    fs::write(path("key"), format!("{}\n", "5e".repeat(32))).unwrap();
    let with = |command, input: &str, output: &str| {
        let key = path("key");
        let (input, output) = (path(input), path(output));
        let arguments = [command, "--key-file", &key, "--nonce", "abcd", "--in", &input, "--out", &output];
        assert!(succeeds(run(ringseal(arguments), b"")).is_empty());
    };
    with("seal", "message", "sealed");
    assert_eq!(fs::read(path("sealed")).unwrap().len(), message.len() + 16);
    with("open", "sealed", "opened");
    assert_eq!(fs::read(path("opened")).unwrap(), message);
    // In place: the input is read whole before the output replaces it.
    with("open", "sealed", "sealed");
    assert_eq!(fs::read(path("sealed")).unwrap(), message);
    assert_eq!(listing(directory.path()), ["key", "message", "opened", "sealed"]);
}

#[test]
fn any_change_is_refused_and_nothing_is_written() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("out");
    let arguments = ["--nonce", NONCE, "--aad", "aa", "--out", target.to_str().unwrap()];
    let sealed = succeeds(seal(&arguments[..4], b"attack at dawn"));
    for byte in 0..sealed.len() {
        let mut forged = sealed.clone();
        forged[byte] ^= 1;
        fails(&open(&arguments, &forged), 1, &["authentication failed", "nothing was written"]);
    }
    for length in 0..sealed.len() {
        let cut = open(&arguments, &sealed[..length]);
        fails(&cut, if length < 16 { 2 } else { 1 }, &[]);
    }
    fails(&open(&["--nonce", NONCE, "--aad", "ab"], &sealed), 1, &["authentication failed"]);
    fails(&open(&["--nonce", "01", "--aad", "aa"], &sealed), 1, &["authentication failed"]);
    let other_key = ["open", "--key", &"01".repeat(16), "--nonce", NONCE, "--aad", "aa"];
    fails(&run(ringseal(other_key), &sealed), 1, &["authentication failed"]);
    assert!(listing(directory.path()).is_empty());
    fs::write(&target, "before").unwrap();
    fails(&open(&arguments, b"0123456789abcdef"), 1, &[]);
    assert_eq!(fs::read(&target).unwrap(), b"before");
}

#[test]
fn bad_arguments_are_named_and_keys_never_repeated() {
    let secret = "5ec7e75ec7e75ec7e75ec7e75ec7e7";
    for command in ["seal", "open"] {
        let error = fails(
            &run(ringseal([command, "--key", secret, "--nonce", NONCE]), b""),
            2,
            &["--key", "15 bytes"],
        );
        assert!(!error.contains(secret));
        let not_hex = format!("{secret}xy");
        let error =
            fails(&run(ringseal([command, "--key", &not_hex, "--nonce", NONCE]), b""), 2, &["--key", "hex"]);
        assert!(!error.contains(secret));
        fails(&run(ringseal([command, "--key", KEY, "--nonce", ""]), b""), 2, &["--nonce"]);
        fails(&run(ringseal([command, "--key", KEY, "--nonce", "0"]), b""), 2, &["--nonce", "whole bytes"]);
        fails(&run(ringseal([command, "--key", KEY, "--nonce", "00", "--aad", "0x00"]), b""), 2, &["--aad"]);
        fails(&run(ringseal([command, "--nonce", "00"]), b""), 2, &["--key-file"]);
        fails(
            &run(ringseal([command, "--key", KEY, "--key-file", "k", "--nonce", "00"]), b""),
            2,
            &["--key"],
        );
        let missing = [command, "--key-file", "no/such/key", "--nonce", "00"];
        fails(&run(ringseal(missing), b""), 2, &["no/such/key"]);
        let missing = [command, "--key", KEY, "--nonce", "00", "--in", "no/such/input"];
        fails(&run(ringseal(missing), b""), 2, &["no/such/input"]);
        let missing = [command, "--key", KEY, "--nonce", "00", "--out", "no/such/directory/out"];
        fails(&run(ringseal(missing), b""), 2, &["no/such/directory"]);
    }
}

#[test]
fn a_key_file_must_hold_hexadecimal_text() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("key");
    for contents in [&b""[..], &[0xff; 32], b"0011", &[b'0'; 5000], b"00112233445566778899aabbccddeeff 00"] {
        fs::write(&path, contents).unwrap();
        let arguments = ["seal", "--key-file", path.to_str().unwrap(), "--nonce", "00"];
        fails(&run(ringseal(arguments), b""), 2, &[path.to_str().unwrap()]);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn full_and_closed_outputs_are_reported_without_a_panic() {
    let shell = |script: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", script, "sh", env!("CARGO_BIN_EXE_ringseal"), KEY]);
        run(command, &[0; 200_000])
    };
    let output = shell(r#""$1" seal --key "$2" --nonce 00 >/dev/full"#);
    fails(&output, 2, &["standard output", "No space left"]);
    // The reader goes away after one byte.
    let output = shell(r#"{ "$1" seal --key "$2" --nonce 00; echo "$?" >&2; } | head -c 1 >/dev/null"#);
    assert_eq!(String::from_utf8_lossy(&output.stderr).trim(), "141");
    // Standard error is closed too: still the right code.
    let output = shell(r#""$1" seal --key zz --nonce 00 2>/dev/full"#);
    assert_eq!(output.status.code(), Some(2));
    // A file-size limit stands in for a full disk; the signal is ignored, so writes fail with an error.
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("out");
    let limited = format!(
        r#"trap '' XFSZ; ulimit -f 8; exec "$1" seal --key "$2" --nonce 00 --out '{}'"#,
        target.display()
    );
    fails(&shell(&limited), 2, &[target.to_str().unwrap(), "too large"]);
    assert!(listing(directory.path()).is_empty());
}
