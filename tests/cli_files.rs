//! `ringseal all-reduce --input ... --output ...`: real gradient files, and every way in which they can be bad.

mod support;

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use npyz::WriterBuilder;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use support::{fails, listing, ringseal, run, succeeds};
use tempfile::TempDir;

/// A directory with one file a rank.
struct Ranks {
    directory: TempDir,
    inputs: Vec<PathBuf>,
}

type Tensor<'a> = (&'a str, Dtype, &'a [usize], Vec<u8>);

fn encode(tensors: &[Tensor<'_>], metadata: Option<HashMap<String, String>>) -> Vec<u8> {
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, data)| (name, TensorView::new(*dtype, shape.to_vec(), data).unwrap()));
    safetensors::serialize(views, metadata).unwrap()
}

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn i64s(values: &[i64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn bf16s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|&value| half::bf16::from_f32(value).to_le_bytes()).collect()
}

impl Ranks {
    fn new(extension: &str, files: &[Vec<u8>]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let inputs =
            (0..files.len()).map(|rank| directory.path().join(format!("rank{rank}.{extension}"))).collect();
        let ranks = Self { directory, inputs };
        for (path, bytes) in ranks.inputs.iter().zip(files) {
            fs::write(path, bytes).unwrap();
        }
        ranks
    }

    fn output(&self) -> PathBuf {
        let extension = self.inputs[0].extension().unwrap();
        self.directory.path().join("sum").with_extension(extension)
    }

    fn reduce(&self, options: &[&str]) -> Output {
        self.reduce_to(&self.output(), options)
    }

    fn reduce_to(&self, output: &Path, options: &[&str]) -> Output {
        let mut command = ringseal(["all-reduce", "--backend", "cpu"]);
        command.args(options).arg("--input").args(&self.inputs).arg("--output").arg(output);
        run(command, b"")
    }

    /// The reduction fails, names what is bad, and leaves the directory as it was.
    #[track_caller]
    fn refuses(&self, options: &[&str], words: &[&str]) {
        let before = listing(self.directory.path());
        let error = fails(&self.reduce(options), 2, words);
        assert_eq!(error.trim_end().lines().count(), 1, "{error}");
        assert_eq!(listing(self.directory.path()), before, "{error}");
    }
}

/// What rank `rank` of a small model would have.
fn model(rank: usize) -> Vec<Tensor<'static>> {
    let scale = rank as f32 + 1.0;
    let weights: Vec<f32> = (0..6000).map(|i| i as f32 * scale).collect();
    vec![
        ("layer.weight", Dtype::F32, &[60, 100], f32s(&weights)),
        ("layer.bias", Dtype::BF16, &[5], bf16s(&[1.0, -2.0, 0.5, f32::INFINITY, scale])),
        ("steps", Dtype::I64, &[], i64s(&[10 + rank as i64])),
        ("empty", Dtype::F32, &[0, 7], Vec::new()),
    ]
}

#[test]
fn safetensors_files_are_summed_tensor_by_tensor() {
    let noted = Some(HashMap::from([("format".to_string(), "pt".to_string())]));
    for (ranks, scale, steps) in [(1, 1.0, 10), (2, 3.0, 21), (3, 6.0, 33), (5, 15.0, 60)] {
        let files: Vec<_> = (0..ranks).map(|rank| encode(&model(rank), noted.clone())).collect();
        let case = Ranks::new("safetensors", &files);
        let output = case.reduce(&[]);
        assert!(output.stderr.is_empty(), "no progress bar away from a terminal");
        succeeds(output);
        let bytes = fs::read(case.output()).unwrap();
        let sum = SafeTensors::deserialize(&bytes).unwrap();
        let weight = sum.tensor("layer.weight").unwrap();
        assert_eq!(weight.shape(), [60, 100]);
        assert_eq!(weight.data(), f32s(&(0..6000).map(|i| i as f32 * scale).collect::<Vec<_>>()));
        let n = ranks as f32;
        assert_eq!(
            sum.tensor("layer.bias").unwrap().data(),
            bf16s(&[n, -2.0 * n, 0.5 * n, f32::INFINITY, scale])
        );
        assert_eq!(sum.tensor("steps").unwrap().data(), i64s(&[steps]));
        assert_eq!(sum.tensor("empty").unwrap().shape(), [0, 7]);
        let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(*metadata.metadata(), noted, "equal metadata is kept");
        assert_eq!(listing(case.directory.path()).len(), ranks + 1, "no temporary file is left");
    }
}

#[test]
fn options_of_the_collective_apply() {
    let files: Vec<_> = (0..4).map(|rank| encode(&model(rank), None)).collect();
    let case = Ranks::new("safetensors", &files);
    let mut results = Vec::new();
    for options in [
        &["-o", "max"][..],
        &["-o", "max", "--algo", "ring", "--aes", "128", "--record", "16K", "--ranks", "4"],
        &["-o", "max", "--crypto", "none"],
    ] {
        succeeds(case.reduce(options));
        results.push(fs::read(case.output()).unwrap());
    }
    assert!(results.iter().all(|result| *result == files[3]), "rank 3 has the largest values");
}

#[test]
fn the_order_of_tensors_in_a_file_does_not_matter() {
    // The same names at other offsets: F32 before and after in the serializer's order by name.
    let first =
        encode(&[("a", Dtype::F32, &[2], f32s(&[1.0, 2.0])), ("b", Dtype::F32, &[1], f32s(&[3.0]))], None);
    let header = br#"{"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#;
    let data = f32s(&[30.0, 10.0, 20.0]);
    let second = [&(header.len() as u64).to_le_bytes()[..], header, &data].concat();
    let case = Ranks::new("safetensors", &[first, second]);
    succeeds(case.reduce(&[]));
    let bytes = fs::read(case.output()).unwrap();
    let sum = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(sum.tensor("a").unwrap().data(), f32s(&[11.0, 22.0]));
    assert_eq!(sum.tensor("b").unwrap().data(), f32s(&[33.0]));
}

#[test]
fn metadata_that_differs_is_left_out_and_said_so() {
    let noted = |step: &str| Some(HashMap::from([("step".to_string(), step.to_string())]));
    let case = Ranks::new("safetensors", &[encode(&model(0), noted("1")), encode(&model(1), noted("2"))]);
    let output = case.reduce(&[]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("__metadata__"));
    succeeds(output);
    let bytes = fs::read(case.output()).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(*metadata.metadata(), None);
    assert_eq!(SafeTensors::deserialize(&bytes).unwrap().tensor("steps").unwrap().data(), i64s(&[21]));
}

#[test]
fn nan_on_any_rank_reaches_the_result() {
    for op in ["sum", "avg", "min", "max", "prod"] {
        let file = |values: &[f32]| encode(&[("g", Dtype::F32, &[3], f32s(values))], None);
        let files = [file(&[1.0, 2.0, 3.0]), file(&[1.0, f32::NAN, 3.0]), file(&[1.0, 2.0, 3.0])];
        let case = Ranks::new("safetensors", &files);
        succeeds(case.reduce(&["-o", op]));
        let bytes = fs::read(case.output()).unwrap();
        let sum = SafeTensors::deserialize(&bytes).unwrap();
        let data = sum.tensor("g").unwrap().data();
        let values: Vec<_> =
            data.chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
        assert!(!values[0].is_nan() && values[1].is_nan() && !values[2].is_nan(), "{op}: {values:?}");
    }
}

#[test]
fn files_that_disagree_are_refused_by_tensor() {
    let base = || model(0);
    let against = |other: Vec<Tensor<'_>>, words: &[&str]| {
        let case = Ranks::new("safetensors", &[encode(&base(), None), encode(&other, None)]);
        case.refuses(&[], &[&["rank1.safetensors"], words].concat());
    };
    let mut renamed = base();
    renamed[0].0 = "layer.wait";
    against(renamed, &["layer.wait"]);
    let mut missing = base();
    missing.remove(0);
    against(missing, &["layer.weight", "missing"]);
    let mut extra = base();
    extra.push(("more", Dtype::F32, &[1], f32s(&[0.0])));
    against(extra, &["\"more\""]);
    let mut transposed = base();
    transposed[0].2 = &[100, 60];
    against(transposed, &["layer.weight", "[100, 60]", "[60, 100]"]);
    let mut narrowed = base();
    narrowed[1].1 = Dtype::F16;
    against(narrowed, &["layer.bias", "F16", "BF16"]);
}

#[test]
fn element_types_that_cannot_be_reduced_are_refused_by_tensor() {
    for (dtype, name, bytes) in [
        (Dtype::BOOL, "BOOL", 2),
        (Dtype::F8_E4M3, "F8_E4M3", 2),
        (Dtype::F8_E5M2, "F8_E5M2", 2),
        (Dtype::I16, "I16", 4),
        (Dtype::C64, "C64", 16),
    ] {
        let file =
            encode(&[("fine", Dtype::F32, &[1], f32s(&[1.0])), ("mask", dtype, &[2], vec![0; bytes])], None);
        Ranks::new("safetensors", &[file.clone(), file]).refuses(&[], &["rank0", "\"mask\"", name, "bf16"]);
    }
}

#[test]
fn a_file_cut_off_anywhere_is_refused_and_named() {
    let whole = encode(&model(0), None);
    let data = whole.len() - 6000 * 4;
    for length in [0, 1, 7, 8, 9, 100, data, data + 1, whole.len() - 1] {
        let case = Ranks::new("safetensors", &[whole.clone(), whole[..length].to_vec()]);
        case.refuses(&[], &["rank1.safetensors"]);
    }
    let longer = [&whole[..], b"x"].concat();
    Ranks::new("safetensors", &[longer, whole]).refuses(&[], &["rank0.safetensors", "follow"]);
}

#[test]
fn hostile_headers_and_names_are_refused_on_one_clean_line() {
    let with_header = |header: &[u8]| [&(header.len() as u64).to_le_bytes()[..], header].concat();
    for header in [
        &b"not json"[..],
        b"{\"a\":1}",
        b"[]",
        b"\xff\xfe",
        br#"{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}"#,
        br#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#,
        br#"{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#,
    ] {
        Ranks::new("safetensors", &[with_header(header)]).refuses(&[], &["rank0.safetensors"]);
    }
    // A name with a newline and a terminal escape stays inert.
    let name = "evil\n\u{1b}[2Jname";
    let file = encode(&[(name, Dtype::BOOL, &[1], vec![0])], None);
    let case = Ranks::new("safetensors", &[file]);
    let error = fails(&case.reduce(&[]), 2, &["evil"]);
    assert!(!error.contains('\u{1b}'), "{error:?}");
}

fn npy<T: npyz::AutoSerialize + Copy>(shape: &[u64], order: npyz::Order, values: &[T]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let options = npyz::WriteOptions::new().default_dtype().shape(shape).order(order);
    let mut writer = options.writer(&mut bytes).begin_nd().unwrap();
    writer.extend(values.iter().copied()).unwrap();
    writer.finish().unwrap();
    bytes
}

#[test]
fn npy_files_are_summed_and_read_back_by_another_reader() {
    for order in [npyz::Order::C, npyz::Order::Fortran] {
        let file =
            |scale: f64| npy(&[2, 3], order, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0].map(|value: f64| value * scale));
        let case = Ranks::new("npy", &[file(1.0), file(2.0), file(4.0)]);
        succeeds(case.reduce(&["-o", "avg"]));
        let bytes = fs::read(case.output()).unwrap();
        let sum = npyz::NpyFile::new(&bytes[..]).unwrap();
        assert_eq!((sum.shape(), sum.order()), (&[2, 3][..], order));
        let thirds = [7.0, 14.0, 21.0, 28.0, 35.0, 42.0].map(|value: f64| value / 3.0);
        assert_eq!(sum.into_vec::<f64>().unwrap(), thirds);
    }
    let wrapping =
        Ranks::new("npy", &[npy(&[1], npyz::Order::C, &[120_i8]), npy(&[1], npyz::Order::C, &[100_i8])]);
    succeeds(wrapping.reduce(&[]));
    let bytes = fs::read(wrapping.output()).unwrap();
    assert_eq!(npyz::NpyFile::new(&bytes[..]).unwrap().into_vec::<i8>().unwrap(), [-36]);
}

#[test]
fn npy_files_that_disagree_or_are_cut_off_are_refused() {
    let c = |values: &[f32]| npy(&[values.len() as u64], npyz::Order::C, values);
    Ranks::new("npy", &[c(&[1.0]), c(&[1.0, 2.0])]).refuses(&[], &["rank1.npy", "shape [2]", "[1]"]);
    let doubles = npy(&[1], npyz::Order::C, &[1.0_f64]);
    Ranks::new("npy", &[c(&[1.0]), doubles]).refuses(&[], &["rank1.npy", "<f8", "<f4"]);
    let square = |order| npy(&[2, 2], order, &[1.0_f32; 4]);
    let case = Ranks::new("npy", &[square(npyz::Order::C), square(npyz::Order::Fortran)]);
    case.refuses(&[], &["rank1.npy", "Fortran order"]);
    let whole = c(&[1.0, 2.0]);
    for length in [0, 5, 9, 11, 64, whole.len() - 1] {
        Ranks::new("npy", &[whole.clone(), whole[..length].to_vec()]).refuses(&[], &["rank1.npy"]);
    }
    let bools = npy(&[2], npyz::Order::C, &[true, false]);
    Ranks::new("npy", &[bools]).refuses(&[], &["rank0.npy", "|b1"]);
}

#[test]
fn arguments_must_fit_the_files() {
    let file = encode(&model(0), None);
    let case = Ranks::new("safetensors", &[file.clone(), file]);
    case.refuses(&["--ranks", "3"], &["--ranks 3", "2 files"]);
    case.refuses(&["--ranks", "0"], &["--ranks 0"]);
    let input = case.inputs[0].to_str().unwrap();
    let other = |arguments: &[&str], words: &[&str]| {
        let before = listing(case.directory.path());
        fails(&run(ringseal([&["all-reduce"], arguments].concat()), b""), 2, words);
        assert_eq!(listing(case.directory.path()), before);
    };
    let output = case.output();
    let output = output.to_str().unwrap();
    other(&["--input", input], &["--output"]);
    other(&["--output", output], &["--input"]);
    other(&["--input", input, "--output", output, "-b", "1K"], &["--minbytes", "--input"]);
    other(&["--input", input, "--output", output, "-d", "half"], &["--datatype", "--input"]);
    other(&["--input", input, "--output", output, "-o", "median"], &["median"]);
    other(&["--input", "no/such.safetensors", "--output", output], &["no/such.safetensors"]);
    other(&["--input", input, "--output", "no/such/sum.safetensors"], &["no/such/sum.safetensors"]);
    other(&["--input", input, "--output", "sum.npy"], &["sum.npy", "one format"]);
    other(&["--input", "gradients.pt", "--output", "sum.pt"], &["gradients.pt", ".safetensors or .npy"]);
    let directory = case.directory.path().to_str().unwrap();
    other(&["--input", directory, "--output", output], &[directory]);
}

#[test]
fn the_output_may_be_one_of_the_inputs() {
    let case = Ranks::new("safetensors", &[encode(&model(0), None), encode(&model(1), None)]);
    succeeds(case.reduce_to(&case.inputs[1], &[]));
    let bytes = fs::read(&case.inputs[1]).unwrap();
    assert_eq!(SafeTensors::deserialize(&bytes).unwrap().tensor("steps").unwrap().data(), i64s(&[21]));
}

#[cfg(target_os = "linux")]
#[test]
fn what_cannot_be_read_or_written_leaves_nothing_behind() {
    use std::os::unix::fs::PermissionsExt;
    use std::process::Command;

    let file = encode(&model(0), None);
    let case = Ranks::new("safetensors", &[file.clone(), file]);
    fs::write(case.output(), "before").unwrap();

    // A file-size limit stands in for a full disk; the signal is ignored, so writes fail with an error.
    let mut limited = Command::new("sh");
    let script = r#"trap '' XFSZ; ulimit -f 8; exec "$@""#;
    limited.args([
        "-c",
        script,
        "sh",
        env!("CARGO_BIN_EXE_ringseal"),
        "all-reduce",
        "--backend",
        "cpu",
        "--input",
    ]);
    limited.args(&case.inputs).arg("--output").arg(case.output());
    fails(&run(limited, b""), 2, &["sum.safetensors", "too large"]);
    assert_eq!(fs::read(case.output()).unwrap(), b"before");

    // A named pipe would block a reader that opened it.
    let pipe = case.directory.path().join("pipe.safetensors");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let mut command = ringseal(["all-reduce", "--input"]);
    command.arg(&pipe).arg("--output").arg(case.output());
    fails(&run(command, b""), 2, &["pipe.safetensors", "not a regular file"]);
    fs::remove_file(&pipe).unwrap();

    // Permissions don't bind a privileged user; then the case can't be made.
    fs::set_permissions(&case.inputs[1], fs::Permissions::from_mode(0o000)).unwrap();
    if fs::File::open(&case.inputs[1]).is_err() {
        case.refuses(&[], &["rank1.safetensors", "denied"]);
    }
    assert_eq!(fs::read(case.output()).unwrap(), b"before");
    assert_eq!(listing(case.directory.path()), ["rank0.safetensors", "rank1.safetensors", "sum.safetensors"]);
}

/// An .npy file of this many f32, which takes no place on the disk.
#[cfg(unix)]
fn sparse_npy(path: &Path, count: u64) {
    let dictionary = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({count},), }}");
    // Version 1.0: the data begin at a multiple of 64 bytes, after spaces and a line feed.
    let mut header = b"\x93NUMPY\x01\x00".to_vec();
    let length = (10 + dictionary.len() + 1).next_multiple_of(64) - 10;
    header.extend((length as u16).to_le_bytes());
    header.extend(format!("{dictionary:<width$}\n", width = length - 1).into_bytes());
    let mut file = fs::File::create(path).unwrap();
    std::io::Write::write_all(&mut file, &header).unwrap();
    file.set_len(header.len() as u64 + 4 * count).unwrap();
}

/// What `look` finds at last. Gives up, and ends the child, when that takes longer than any machine needs.
#[cfg(unix)]
fn wait_for<T>(child: &mut Child, mut look: impl FnMut(&mut Child) -> Option<T>) -> T {
    let end = Instant::now() + Duration::from_secs(120);
    loop {
        if let Some(found) = look(child) {
            return found;
        }
        if Instant::now() > end {
            child.kill().unwrap();
            panic!("waited for too long");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[cfg(unix)]
#[test]
fn an_interrupted_reduction_leaves_nothing_behind() {
    for (signal, code) in [("INT", 130), ("TERM", 143)] {
        let directory = tempfile::tempdir().unwrap();
        let [first, second, sum] =
            ["rank0.npy", "rank1.npy", "sum.npy"].map(|name| directory.path().join(name));
        // 64 GiB each, so that it is at work when the signal comes.
        sparse_npy(&first, 16 << 30);
        sparse_npy(&second, 16 << 30);
        fs::write(&sum, "before").unwrap();
        let mut command = ringseal(["all-reduce", "--backend", "cpu", "--input"]);
        command.args([&first, &second]).arg("--output").arg(&sum);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        wait_for(&mut child, |child| {
            assert_eq!(child.try_wait().unwrap(), None, "it has ended by itself");
            listing(directory.path()).iter().any(|name| name.ends_with(".part")).then_some(())
        });
        let kill = Command::new("sh").args(["-c", &format!("kill -{signal} {}", child.id())]).status();
        assert!(kill.unwrap().success());
        let status = wait_for(&mut child, |child| child.try_wait().unwrap());
        assert_eq!(status.code(), Some(code), "SIG{signal}: {status}");
        assert_eq!(listing(directory.path()), ["rank0.npy", "rank1.npy", "sum.npy"]);
        assert_eq!(fs::read(&sum).unwrap(), b"before");
    }
}
