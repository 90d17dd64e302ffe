//! `ringseal all-reduce`: on made-up data as a benchmark, or on gradient files.

mod benchmark;
mod files;
mod gpu;
mod group;
mod keystream;
mod membership;

use std::io::{self, Write};
use std::num::{NonZeroU32, NonZeroUsize};
use std::path::PathBuf;

use clap::{ArgAction, Args, Parser, ValueEnum};
use ringseal::collective::{Crypto, KeyLength};
use ringseal::cuda::LaunchForm;
use ringseal::{Dtype, ReduceOp};

use super::BackendName;
use super::failure::{Failure, Outcome};
use super::memory;
use super::values::{ByteSize, parse_dtype, parse_op};
use benchmark::{Benchmark, Sweep};
use group::{Choice, Setup, Structure};
use keystream::Wish;
use membership::{Membership, MembershipArguments};

/// Ranks of a benchmark, unless said otherwise.
const RANKS: usize = 4;

#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Number of ranks; all in this process unless --rank is given [default: 4, or one for each input file].
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// Reduction: sum, avg, min, max or prod.
    #[arg(short, long, value_name = "OP", value_parser = parse_op, default_value = "sum")]
    op: ReduceOp,
    /// Algorithm: ring (every hop opens and seals), relay (a ring that forwards finished chunks as their owners
    /// sealed them), direct (two hops), tree, exchange (one hop), or auto: direct when small, otherwise relay; on GPUs what a
    /// calibration at the start, of a fifth of a second, finds the fastest for a length. Sums of floats are rounded as the
    /// algorithm goes: name one where every run must give the same bits.
    #[arg(long, value_name = "NAME", value_parser = Choice::parse, default_value = "auto")]
    algo: Choice,
    /// How what leaves a rank is protected.
    #[arg(long, value_name = "NAME", value_enum, default_value_t)]
    crypto: Protection,
    /// AES key length.
    #[arg(long, value_name = "BITS", value_enum, default_value_t)]
    aes: Aes,
    /// With --crypto seed: chains of the MAC, from 1 (serial) to 65536 [default: 33792].
    #[arg(long, value_name = "N")]
    chains: Option<u32>,
    /// Bytes sealed as one message [default: 64K].
    #[arg(long, value_name = "BYTES")]
    record: Option<ByteSize>,
    /// Where the ranks are: cuda puts one on each GPU in turn, cpu all on the CPU; auto takes GPUs that can do it.
    #[arg(long, value_name = "NAME", value_enum, default_value_t)]
    backend: BackendName,
    /// On GPUs, multiprocessors that a rank may take, so that others have work for computation beside it [default: all,
    /// shared by the ranks on a GPU].
    #[arg(long, value_name = "N")]
    sm: Option<NonZeroU32>,
    /// On GPUs, how collectives are launched: persistent (one kernel a rank, whose blocks must all be resident at once),
    /// step (a kernel for each step, none of which waits for another), or auto (persistent where it can be).
    #[arg(long, value_name = "FORM", value_enum)]
    launch: Option<LaunchName>,
    #[command(flatten)]
    benchmark: BenchmarkArguments,
    #[command(flatten)]
    files: FileArguments,
    #[command(flatten)]
    membership: MembershipArguments,
}

/// The flags of nccl-tests, under the names that they have there.
#[derive(Args, Debug)]
#[command(next_help_heading = "Made-up data")]
struct BenchmarkArguments {
    /// Smallest buffer of a rank in bytes, such as 64K (powers of 1024) [default: 64K].
    #[arg(short = 'b', long = "minbytes", value_name = "BYTES", conflicts_with = "input")]
    begin: Option<ByteSize>,
    /// Largest buffer of a rank [default: 16M].
    #[arg(short = 'e', long = "maxbytes", value_name = "BYTES", conflicts_with = "input")]
    end: Option<ByteSize>,
    /// Factor from one size to the next [default: 4].
    #[arg(short = 'f', long = "stepfactor", value_name = "N", conflicts_with = "input")]
    factor: Option<usize>,
    /// Timed iterations; the median is reported.
    #[arg(short = 'n', long = "iters", value_name = "N", default_value = "10", conflicts_with = "input")]
    iterations: NonZeroUsize,
    /// Iterations before the timed ones.
    #[arg(short, long = "warmup_iters", value_name = "N", default_value_t = 2, conflicts_with = "input")]
    warmup: usize,
    /// 1 to check every element of every rank, 0 to not.
    #[arg(short, long, value_name = "0|1", action = ArgAction::Set, default_value = "1", conflicts_with = "input",
          value_parser = parse_switch)]
    check: bool,
    /// Element type: float, double, half, bfloat16, int8, uint8, int32, uint32, int64 or uint64.
    #[arg(short = 'd', long = "datatype", value_name = "TYPE", value_parser = parse_dtype, default_value = "float",
          conflicts_with = "input")]
    dtype: Dtype,
    /// Have the keystream of each all-reduce made before its time begins, so that times are those of all-reduces that find
    /// it ready, as where a GPU makes it while it has nothing else to do; says how many records found none. For sealed
    /// rings, relay rings and exchanges of two ranks on GPUs, sums and averages of float, half and bfloat16.
    #[arg(long, conflicts_with_all = ["input", "breakdown"])]
    keystream: bool,
    /// After the table, where the time goes: the link, the cryptography, waiting and launching, measured by CUDA events
    /// around a launch for each step. Needs --backend cuda and all ranks in one process, at most 16.
    #[arg(long, conflicts_with = "input")]
    breakdown: bool,
    /// Print the calibration that --algo auto made on GPUs: the cost model's figures and what they were fitted to, as JSON in
    /// comments.
    #[arg(long, conflicts_with = "input")]
    show_calibration: bool,
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
enum Protection {
    /// AES-GCM under fresh keys.
    #[default]
    Gcm,
    /// As gcm, but in the structure of arXiv 2501.11771, for comparison: a GPU kernel for every operation of every hop.
    /// Needs --backend cuda.
    Seed,
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

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum LaunchName {
    Auto,
    Persistent,
    Step,
}

impl From<LaunchName> for LaunchForm {
    fn from(name: LaunchName) -> Self {
        match name {
            LaunchName::Auto => Self::Auto,
            LaunchName::Persistent => Self::Persistent,
            LaunchName::Step => Self::PerStep,
        }
    }
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
        let Arguments {
            ranks,
            op,
            algo,
            crypto,
            aes,
            chains,
            record,
            backend,
            sm,
            launch,
            benchmark,
            files,
            membership,
        } = arguments;
        let FileArguments { input: inputs, output } = files;
        let ranks = ranks.unwrap_or(if inputs.is_empty() { RANKS } else { inputs.len() });
        if !inputs.is_empty() && ranks != 0 && ranks != inputs.len() {
            let what =
                format!("--ranks {ranks}, but --input names {} files: one a rank is needed", inputs.len());
            return Err(Failure::Input(what));
        }
        let structure = match (crypto, chains) {
            (Protection::Seed, chains) => Structure::Seed { chains },
            (_, None) => Structure::Fused,
            (_, Some(_)) => {
                return Err(Failure::Input("--chains: only --crypto seed has them".into()));
            }
        };
        let crypto = match (crypto, aes) {
            (Protection::None, _) => Crypto::None,
            (Protection::Gcm | Protection::Seed, Aes::Aes128) => Crypto::Gcm(KeyLength::Aes128),
            (Protection::Gcm | Protection::Seed, Aes::Aes256) => Crypto::Gcm(KeyLength::Aes256),
        };
        let launch = launch.map(LaunchForm::from);
        if benchmark.keystream {
            let dtype = benchmark.dtype;
            Wish { backend, ranks, choice: algo, crypto, structure, launch, dtype, op }.check()?;
        }
        let membership = Membership::new(membership, ranks)?;
        let setup = Setup::new(ranks, algo, crypto, structure, record, backend, membership)?
            .launched(launch)?
            .limited(sm.map(NonZeroU32::get))?
            .prepared(benchmark.keystream)?;
        if let Some(output) = output {
            return Ok(Self::Files { setup, op, inputs, output });
        }
        let BenchmarkArguments {
            begin,
            end,
            factor,
            iterations,
            warmup,
            check,
            dtype,
            keystream: _,
            breakdown,
            show_calibration,
            json,
        } = benchmark;
        let breakdown = if breakdown { Some(setup.step_by_step()?) } else { None };
        if show_calibration && !setup.calibrates() {
            let what = "--show-calibration: only --algo auto on GPUs makes a calibration; use --backend cuda";
            return Err(Failure::Input(what.into()));
        }
        let sweep = Sweep::new(begin, end, factor)?;
        // Of the largest size: inputs, outputs, about as much under way, and the expected result.
        memory::require(
            sweep.largest() as u128 * (3 * ranks as u128 + 1),
            &format!("{ranks} ranks with --maxbytes {}", ByteSize(sweep.largest())),
        )?;
        Ok(Self::Benchmark(Benchmark {
            setup,
            breakdown,
            show_calibration,
            sweep,
            iterations,
            warmup,
            check,
            dtype,
            op,
            json,
        }))
    }
}

/// Runs what the arguments ask for.
pub(crate) fn run(arguments: Arguments) -> Outcome {
    match Job::new(arguments)? {
        Job::Benchmark(benchmark) => benchmark.run(),
        Job::Files { setup, op, inputs, output } => files::reduce(&setup, op, &inputs, &output),
    }
}

/// Runs `all-reduce` with no arguments.
pub(crate) fn run_default() -> Outcome {
    #[derive(Parser)]
    struct Defaults {
        #[command(flatten)]
        arguments: Arguments,
    }
    run(Defaults::parse_from(["ringseal"]).arguments)?;
    writeln!(io::stdout(), "# ringseal --help: what else there is").map_err(Failure::stdout)
}
