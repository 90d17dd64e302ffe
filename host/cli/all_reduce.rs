//! `ringseal all-reduce`: on made-up data as a benchmark, or on gradient files.

mod benchmark;
mod files;
mod group;

use std::path::PathBuf;

use clap::{ArgAction, Args, ValueEnum};
use ringseal::{Dtype, ReduceOp};

use super::BackendName;
use super::failure::{Failure, Outcome};
use super::values::{ByteSize, parse_dtype, parse_op};
use benchmark::{Benchmark, Sweep};
use group::Setup;

/// Ranks of a benchmark, unless said otherwise.
const RANKS: usize = 4;

#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Number of ranks, all in this process [default: 4, or one for each input file].
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// Reduction: sum, avg, min, max or prod.
    #[arg(short, long, value_name = "OP", value_parser = parse_op, default_value = "sum")]
    op: ReduceOp,
    /// Algorithm.
    #[arg(long, value_name = "NAME", value_enum, default_value_t)]
    algo: Algorithm,
    /// How what leaves a rank is protected.
    #[arg(long, value_name = "NAME", value_enum, default_value_t)]
    crypto: Crypto,
    /// AES key length.
    #[arg(long, value_name = "BITS", value_enum, default_value_t)]
    aes: Aes,
    /// Bytes sealed as one message, such as 64K [default: chosen by size].
    #[arg(long, value_name = "BYTES")]
    record: Option<ByteSize>,
    /// Where the cryptography runs.
    #[arg(long, value_name = "NAME", value_enum, default_value_t)]
    backend: BackendName,
    #[command(flatten)]
    benchmark: BenchmarkArguments,
    #[command(flatten)]
    files: FileArguments,
}

/// The flags of nccl-tests.
#[derive(Args, Debug)]
#[command(next_help_heading = "Made-up data")]
struct BenchmarkArguments {
    /// Smallest buffer of a rank in bytes, such as 64K (powers of 1024) [default: 64K].
    #[arg(short, long, value_name = "BYTES", conflicts_with = "input")]
    begin: Option<ByteSize>,
    /// Largest buffer of a rank [default: 16M].
    #[arg(short, long, value_name = "BYTES", conflicts_with = "input")]
    end: Option<ByteSize>,
    /// Factor from one size to the next [default: 4].
    #[arg(short = 'f', long = "factor", value_name = "N", conflicts_with = "input")]
    factor: Option<usize>,
    /// Timed iterations; the median is reported.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 10, conflicts_with = "input")]
    iterations: usize,
    /// Iterations before the timed ones.
    #[arg(short, long, value_name = "N", default_value_t = 2, conflicts_with = "input")]
    warmup: usize,
    /// 1 to check every element of every rank, 0 to not.
    #[arg(short, long, value_name = "0|1", action = ArgAction::Set, default_value = "1", conflicts_with = "input",
          value_parser = parse_switch)]
    check: bool,
    /// Element type: float, double, half, bfloat16, int8, uint8, int32, uint32, int64 or uint64.
    #[arg(short = 'd', long = "datatype", value_name = "TYPE", value_parser = parse_dtype, default_value = "float",
          conflicts_with = "input")]
    dtype: Dtype,
    /// Also write the figures to this file, as JSON.
    #[arg(short = 'J', long = "json", value_name = "FILE", conflicts_with = "input")]
    json: Option<PathBuf>,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Gradient files")]
struct FileArguments {
    /// Files to reduce, one a rank, .safetensors or .npy, with the same tensors.
    #[arg(long, value_name = "FILE", num_args = 1.., requires = "output")]
    input: Vec<PathBuf>,
    /// The reduced file, which appears whole or not at all.
    #[arg(long, value_name = "FILE", requires = "input")]
    output: Option<PathBuf>,
}

#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Crypto {
    /// AES-GCM under keys of this run.
    #[default]
    Gcm,
    /// Plaintext, for comparison.
    None,
}

#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Aes {
    /// AES-128
    #[value(name = "128")]
    Aes128,
    /// AES-256
    #[default]
    #[value(name = "256")]
    Aes256,
}

fn parse_switch(text: &str) -> Result<bool, String> {
    match text {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err("0 or 1".into()),
    }
}

/// What to do, with every argument parsed.
enum Job {
    Benchmark(Benchmark),
    Files { setup: Setup, op: ReduceOp, inputs: Vec<PathBuf>, output: PathBuf },
}

impl Job {
    fn new(arguments: Arguments) -> Outcome<Self> {
        let Arguments { ranks, op, algo, crypto, aes, record, backend, benchmark, files } = arguments;
        let FileArguments { input: inputs, output } = files;
        let default_ranks = if inputs.is_empty() { RANKS } else { inputs.len() };
        let ranks = ranks.unwrap_or(default_ranks);
        if ranks == 0 {
            return Err(Failure::Input("--ranks 0: there must be at least one rank".into()));
        }
        if !inputs.is_empty() && ranks != inputs.len() {
            let what = format!("--ranks {ranks}, but --input names {} files: one a rank is needed", inputs.len());
            return Err(Failure::Input(what));
        }
        let setup = Setup::new(ranks, algo, crypto, aes, record, backend)?;
        if let Some(output) = output {
            return Ok(Self::Files { setup, op, inputs, output });
        }
        let BenchmarkArguments { begin, end, factor, iterations, warmup, check, dtype, json } = benchmark;
        let sweep = Sweep::new(begin, end, factor)?;
        Ok(Self::Benchmark(Benchmark::new(setup, sweep, iterations, warmup, check, dtype, op, json)?))
    }
}

/// Runs what the arguments ask for.
pub(crate) fn run(arguments: Arguments) -> Outcome {
    match Job::new(arguments)? {
        Job::Benchmark(benchmark) => benchmark.run(),
        Job::Files { setup, op, inputs, output } => files::reduce(setup, op, &inputs, &output),
    }
}
