//! `ringseal all-reduce` on made-up data: the table, the JSON, and refusals.

mod support;

use serde_json::Value;
use support::{fails, listing, ringseal, run, succeeds};

fn all_reduce(arguments: &[&str]) -> std::process::Output {
    run(ringseal([&["all-reduce", "--backend", "cpu"], arguments].concat()), b"")
}

fn table(arguments: &[&str]) -> Vec<Vec<String>> {
    let text = String::from_utf8(succeeds(all_reduce(arguments))).unwrap();
    let rows = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    rows.map(|row| row.split_whitespace().map(str::to_owned).collect()).collect()
}

#[test]
fn with_no_arguments_it_does_the_main_job_and_points_to_help() {
    let text = String::from_utf8(succeeds(run(ringseal::<&str>([]), b""))).unwrap();
    for words in
        ["4 ranks", "out-of-place", "in-place", "overhead", "every element of every rank is right", "--help"]
    {
        assert!(text.contains(words), "{words:?} is not in:\n{text}");
    }
}

#[test]
fn the_table_has_the_columns_of_nccl_tests_and_nothing_is_wrong() {
    let rows = table(&[
        "--ranks", "3", "-b", "4", "-e", "64K", "-f", "16", "-n", "3", "-w", "1", "-d", "half", "-o", "max",
    ]);
    let sizes: Vec<_> = rows.iter().map(|row| row[0].as_str()).collect();
    assert_eq!(sizes, ["4", "64", "1024", "16384"]);
    for row in rows {
        let [count, dtype, op] = [1, 2, 3].map(|column| row[column].as_str());
        assert_eq!(count.parse::<usize>().unwrap() * 2, row[0].parse::<usize>().unwrap());
        assert_eq!((dtype, op), ("half", "max"));
        let numbers: Vec<f64> = row[4..].iter().map(|cell| cell.parse().unwrap()).collect();
        let [out_of_place, in_place, plain] = [&numbers[..4], &numbers[4..8], &numbers[8..]];
        assert!(out_of_place[0] > 0.0 && in_place[0] > 0.0 && plain[0] > 0.0);
        assert_eq!((out_of_place[3], in_place[3], plain[2]), (0.0, 0.0, 0.0), "wrong elements");
        // The columns are rounded to 0.1 us.
        let overhead = (out_of_place[0] / plain[0] - 1.0) * 100.0;
        assert!((overhead - plain[3]).abs() <= 0.02 * (100.0 + overhead), "{overhead} {row:?}");
    }
}

#[test]
fn every_dtype_and_op_is_right_for_any_number_of_ranks() {
    for dtype in
        ["float", "double", "half", "bfloat16", "int8", "uint8", "int32", "uint32", "int64", "uint64"]
    {
        for op in ["sum", "avg", "min", "max", "prod"] {
            let rows = table(&[
                "--ranks", "3", "-b", "4104", "-e", "4104", "-n", "1", "-w", "0", "-d", dtype, "-o", op,
            ]);
            assert_eq!([&rows[0][7], &rows[0][11], &rows[0][14]], ["0"; 3], "{dtype} {op}");
        }
    }
    for ranks in ["1", "2", "5", "8", "16"] {
        let rows = table(&["--ranks", ranks, "-b", "1", "-e", "4K", "-f", "3", "-n", "1", "-w", "0"]);
        assert_eq!(rows[0][..2], ["0", "0"], "a buffer smaller than an element holds none");
        for row in rows {
            assert_eq!([&row[7], &row[11]], ["0"; 2], "{ranks} ranks: {row:?}");
        }
    }
}

#[test]
fn every_algorithm_and_setting_is_right() {
    for algorithm in ["auto", "ring", "relay", "direct", "tree"] {
        for setting in [&["--crypto", "none"][..], &["--aes", "128"], &["--aes", "256", "--record", "16K"]] {
            let arguments =
                [&["-b", "100000", "-e", "100000", "-n", "2", "--algo", algorithm], setting].concat();
            let rows = table(&arguments);
            assert_eq!([&rows[0][7], &rows[0][11]], ["0"; 2], "{arguments:?}");
        }
    }
}

#[test]
fn the_emulated_gpu_kernels_seal_too() {
    let arguments =
        ["all-reduce", "--backend", "emulated", "--ranks", "2", "-b", "4K", "-e", "4K", "-n", "1", "-w", "0"];
    let text = String::from_utf8(succeeds(run(ringseal(arguments), b""))).unwrap();
    assert!(text.contains("backend emulated") && text.contains("every rank is right"), "{text}");
}

#[test]
fn ranks_on_gpus_need_gpus() {
    let mut command = ringseal(["all-reduce", "--backend", "cuda"]);
    command.env("CUDA_VISIBLE_DEVICES", "");
    fails(&run(command, b""), 2, &["no usable CUDA device"]);
}

#[test]
fn the_published_structure_is_for_gpus_only() {
    fails(&all_reduce(&["--crypto", "seed"]), 2, &["--crypto seed", "--backend cuda"]);
    fails(&all_reduce(&["--chains", "4"]), 2, &["--chains", "--crypto seed"]);
}

#[test]
fn the_check_can_be_left_out() {
    let rows = table(&["-b", "1K", "-e", "1K", "-n", "1", "-c", "0"]);
    assert_eq!(rows[0][7], "N/A");
}

#[test]
fn the_json_file_holds_the_same_figures() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("figures.json");
    let arguments = ["--ranks", "2", "-b", "1K", "-e", "4K", "-n", "3", "-J", path.to_str().unwrap()];
    let rows = table(&arguments);
    let document: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(document["ranks"], 2);
    assert_eq!(document["dtype"], "float");
    assert_eq!(document["rows"].as_array().unwrap().len(), rows.len());
    for (object, row) in document["rows"].as_array().unwrap().iter().zip(rows) {
        assert_eq!(object["bytes"].to_string(), row[0]);
        let time = object["out_of_place"]["time_us"].as_f64().unwrap();
        assert_eq!(format!("{time:.1}"), row[4]);
        assert_eq!(object["in_place"]["wrong"], 0);
        assert!(object["out_of_place"]["time_min_us"].as_f64().unwrap() <= time);
        assert!(object["overhead_percent"].is_number());
    }
}

#[test]
fn bad_arguments_are_named_and_nothing_is_written() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("figures.json");
    let path = path.to_str().unwrap();
    let cases: [(&[&str], &[&str]); 21] = [
        (&["--ranks", "0"], &["--ranks 0"]),
        (&["--ranks", "-1"], &["-1"]),
        (&["--ranks", "many"], &["--ranks", "many"]),
        (&["--ranks", "1000000"], &["--ranks 1000000", "256"]),
        (&["-b", "0"], &["--minbytes 0"]),
        (&["-b", "2M", "-e", "1M"], &["--maxbytes 1M", "--minbytes 2M"]),
        (&["-b", "lots"], &["--minbytes", "lots"]),
        (&["-e", "99999999999999999999999"], &["--maxbytes"]),
        (&["-b", "999999999G"], &["memory"]),
        (&["-f", "1"], &["--stepfactor 1"]),
        (&["-n", "0"], &["--iters"]),
        (&["-c", "yes"], &["--check", "yes"]),
        (&["-d", "fp8"], &["--datatype", "fp8", "bfloat16"]),
        (&["-o", "mean"], &["--op", "mean", "avg"]),
        (&["--algo", "magic"], &["--algo", "magic", "ring"]),
        (&["--crypto", "rot13"], &["--crypto", "rot13", "gcm"]),
        (&["--aes", "192"], &["--aes", "192", "128", "256"]),
        (&["--record", "0"], &["records of 0 bytes", "16"]),
        (&["--record", "1T"], &["--record"]),
        (&["--record", "100"], &["records of 100 bytes", "16"]),
        (&["stray"], &["stray"]),
    ];
    for (arguments, words) in cases {
        fails(&all_reduce(&[arguments, &["-J", path]].concat()), 2, words);
    }
    fails(&all_reduce(&["-J", "no/such/directory/figures.json"]), 2, &["no/such/directory"]);
    assert!(listing(directory.path()).is_empty());
}

#[cfg(target_os = "linux")]
#[test]
fn a_reader_that_leaves_stops_the_run_without_a_panic() {
    let mut command = std::process::Command::new("sh");
    let script = r#"{ "$1" all-reduce -b 1K -e 1M -f 2 -n 2; echo "$?" >&2; } | head -n 1 >/dev/null"#;
    command.args(["-c", script, "sh", env!("CARGO_BIN_EXE_ringseal")]);
    let output = run(command, b"");
    assert_eq!(String::from_utf8_lossy(&output.stderr).trim(), "141");
}

#[test]
fn keystream_is_refused_where_no_kernel_takes_it() {
    fails(&all_reduce(&["--keystream"]), 2, &["--keystream", "--backend cuda"]);
    // Before a GPU is looked for.
    let cases: [(&[&str], &[&str]); 10] = [
        (&["--crypto", "none"], &["--crypto gcm"]),
        (&["--crypto", "seed"], &["--crypto seed", "--crypto gcm"]),
        (&["--launch", "step"], &["--launch persistent"]),
        (&["--algo", "direct"], &["direct", "ring, relay"]),
        (&["--algo", "tree"], &["tree", "ring, relay"]),
        (&["--algo", "exchange", "--ranks", "3"], &["two ranks"]),
        (&["-d", "double"], &["--datatype"]),
        (&["-o", "max"], &["--op"]),
        (&["--breakdown"], &["--breakdown"]),
        (&["--input", "a.npy", "--output", "b.npy"], &["--input"]),
    ];
    for (arguments, words) in cases {
        let arguments = [&["all-reduce", "--backend", "cuda", "--keystream"], arguments].concat();
        fails(&run(ringseal(arguments), b""), 2, &[&["--keystream"], words].concat());
    }
}

#[test]
fn what_only_gpus_do_is_refused_on_a_cpu() {
    for (arguments, words) in [
        (&["--launch", "step"][..], "nothing is launched on a CPU"),
        (&["--breakdown"], "--backend cuda"),
        (&["--sm", "8"], "no multiprocessors"),
    ] {
        fails(&all_reduce(arguments), 2, &[words]);
    }
}
