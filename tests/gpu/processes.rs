//! A process per rank on one GPU or several: right results, and what is left when a process dies or stalls.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use ringseal::channel::{Crypto, GroupSecret, KeyLength};
use ringseal::collective::{Algorithm, Communicator, Options, Partition, Rail, Rendezvous, Request};
use ringseal::cuda::{
    AutoCommunicator, Collectives, Device, DeviceBuffer, GpuCommunicator, GpuNodes, GpuOptions,
    NcclCommunicator, RankBuffers, Stream,
};
use ringseal::{Dtype, Error, ReduceOp};

use crate::support::{GpuTest, HostTest, Outcome, ensure, image};
use crate::turns::alone;

pub(crate) const TESTS: &[GpuTest] = &[
    ("processes::results_are_right_before_and_after_a_new_session", right),
    ("processes::all_choose_the_algorithm_alike", choosing),
    ("processes::settings_that_differ_fail_all_ranks", differing),
    ("processes::nodes_get_right_results_before_and_after_a_new_session", nodes),
    ("processes::when_one_is_killed_the_others_end_with_an_error", killed),
    ("processes::when_one_stalls_the_others_end_at_the_deadline", stalled),
];

/// Where there is NCCL.
pub(crate) const NCCL_TESTS: &[GpuTest] =
    &[("nccl::device_memory::two_processes_on_one_gpu_say_what_is_wrong", sharing_over_nccl)];

/// For these there must be two GPUs as well.
pub(crate) const NCCL_ACROSS_GPUS_TESTS: &[HostTest] = &[
    ("nccl::device_memory::across_gpus::a_process_per_rank_gives_right_results", right_over_nccl),
    (
        "nccl::device_memory::across_gpus::when_a_process_is_killed_the_others_end_with_an_error",
        killed_over_nccl,
    ),
];

/// Set in a child: what to do, its rank, the number of ranks, where to meet, cipher, and timeout in milliseconds.
const CHILD: &str = "RINGSEAL_TEST_MEMBER";
const LONGEST: usize = 1 << 20;
/// What a rank says that is to reduce without end, once it has done so once.
const BEGUN: &str = "begun";
/// So that a hang is told from slowness.
const PATIENCE: Duration = Duration::from_secs(40);

pub(crate) fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// One rank. Says how it ended: `done`, or the error.
pub(crate) fn child() {
    match member() {
        Ok(()) => println!("done"),
        Err(error) => println!("{error}"),
    }
}

fn member() -> Outcome {
    let text = std::env::var(CHILD)?;
    let words: Vec<&str> = text.split(' ').collect();
    let [task, rank, ranks, address, cipher, timeout] = words[..] else { return Err("six words".into()) };
    let (rank, ranks): (usize, usize) = (rank.parse()?, ranks.parse()?);
    let timeout = Duration::from_millis(timeout.parse()?);
    let crypto = match cipher {
        "none" => Crypto::None,
        "128" => Crypto::Gcm(KeyLength::Aes128),
        _ => Crypto::Gcm(KeyLength::Aes256),
    };
    let device = Device::open(rank % Device::count()?)?;
    let secret = GroupSecret::from_bytes([if task == "impostor" { 6 } else { 7 }; 32]);
    let max_bytes = if task == "shorter" { LONGEST / 2 } else { LONGEST };
    // A task may be to work by an algorithm.
    let algorithm = Algorithm::ALL.into_iter().find(|algorithm| algorithm.name() == task);
    let algorithm = algorithm.unwrap_or(Algorithm::Ring);
    let options = GpuOptions { crypto, max_bytes, timeout, algorithm, ..GpuOptions::default() };
    let meeting = Rendezvous::connect(address, rank, ranks, timeout)?;
    let image = image(&device)?;
    if task == "nodes" {
        let between = |Rail { secret, node, nodes, bootstrap }| {
            Communicator::new(&secret, node, nodes, bootstrap, &Options { timeout, ..Options::default() })
        };
        let inside = |secret: &GroupSecret, [rank, ranks]: [usize; 2], bootstrap| {
            GpuCommunicator::with_image(secret, rank, ranks, bootstrap, &device, image, options.clone())
        };
        let place = [rank, ranks];
        return in_nodes(
            GpuNodes::join(&secret, place, 2, Box::new(meeting), &device, inside, between)?,
            &device,
        );
    }
    if task == "auto" {
        let communicator =
            AutoCommunicator::new(&secret, rank, ranks, Box::new(meeting), &device, image, options)?;
        return by_choice(communicator, rank, ranks, &device);
    }
    if task == "nccl-nodes" {
        let (place, between) = ([rank, ranks], options.clone());
        let meeting = Box::new(meeting);
        let nodes = GpuNodes::over_nccl_by_gpus(&secret, place, 1, meeting, &device, options, between)?;
        return in_nodes(nodes, &device);
    }
    let meeting = Box::new(meeting);
    let communicator: Box<dyn Collectives> = if task.starts_with("nccl") {
        Box::new(NcclCommunicator::new(&secret, rank, ranks, meeting, &device, options)?)
    } else {
        Box::new(GpuCommunicator::with_image(&secret, rank, ranks, meeting, &device, image, options)?)
    };
    let mut member = Member {
        rank,
        ranks,
        input: DeviceBuffer::new(&device, LONGEST)?,
        output: DeviceBuffer::new(&device, LONGEST)?,
        stream: Stream::new(&device)?,
        communicator,
    };
    match task {
        "endless" | "nccl-endless" => {
            member.reduces(LONGEST / 4)?;
            println!("{BEGUN}");
            loop {
                member.reduces(LONGEST / 4)?;
            }
        }
        _ => {
            for _ in 0..2 {
                for count in [1, 1000, 12_345, LONGEST / 4, 0, 77] {
                    member.reduces(count)?;
                    member.does(Request::ReduceScatter(ReduceOp::Sum), count)?;
                    member.does(Request::AllGather, count)?;
                    member.does(Request::Broadcast { root: ranks - 1 }, count)?;
                }
                member.communicator.rekey()?;
            }
            member.reduces(1000)?;
            member.communicator.close()?;
        }
    }
    Ok(())
}

/// One rank's part in nodes of two, each summing on the GPU, and by the CPU between them.
fn in_nodes(mut group: GpuNodes, device: &Device) -> Outcome {
    let stream = Stream::new(device)?;
    let (rank, ranks) = (group.rank(), group.ranks());
    let mut memory = DeviceBuffer::new(device, LONGEST)?;
    for round in 0..2 {
        for count in [1, 1000, 12_345, LONGEST / 4, 0, 77] {
            let input: Vec<u8> = (0..count).flat_map(|at| value(rank, at).to_le_bytes()).collect();
            memory.write(0, &input, &stream)?;
            let buffers = RankBuffers { input: memory.pointer(), output: memory.pointer() };
            // SAFETY: the memory holds `count` elements, and the call waits.
            unsafe { group.all_reduce(&[buffers], count, Dtype::U32, ReduceOp::Sum, &[&stream])? };
            let mut output = vec![0; 4 * count];
            memory.read(0, &mut output, &stream)?;
            let right: Vec<u8> = (0..count).flat_map(|at| sum(ranks, at, value).to_le_bytes()).collect();
            ensure!(output == right, "rank {rank}, round {round}: wrong sums of {count} elements");
        }
        // Averages of two bytes each, an odd number of them.
        let ones = [0x80, 0x3f].repeat(1001);
        memory.write(0, &ones, &stream)?;
        let buffers = RankBuffers { input: memory.pointer(), output: memory.pointer() };
        // SAFETY: as above.
        unsafe { group.all_reduce(&[buffers], 1001, Dtype::Bf16, ReduceOp::Avg, &[&stream])? };
        let mut output = vec![0; 2002];
        memory.read(0, &mut output, &stream)?;
        ensure!(output == ones, "rank {rank}, round {round}: the average of ones is not one");
        group.rekey()?;
    }
    Ok(Box::new(group).close()?)
}

/// One rank's part, by the algorithms that rank 0 found.
fn by_choice(mut group: AutoCommunicator, rank: usize, ranks: usize, device: &Device) -> Outcome {
    ensure!(group.calibrated().is_some() == (rank == 0), "rank {rank}: {:?}", group.calibrated());
    let stream = Stream::new(device)?;
    let mut memory = DeviceBuffer::new(device, LONGEST)?;
    let buffers = RankBuffers { input: memory.pointer(), output: memory.pointer() };
    for _ in 0..2 {
        for count in [1, 1000, 12_345, LONGEST / 4, 0, 77] {
            let input: Vec<u8> = (0..count).flat_map(|at| value(rank, at).to_le_bytes()).collect();
            memory.write(0, &input, &stream)?;
            let request = Request::AllReduce(ReduceOp::Sum);
            // SAFETY: the memory holds `count` elements, and lives until the stream has been waited for.
            unsafe { group.run(request, &[buffers], count, Dtype::U32, &[&stream])? };
            group.finish(&[&stream])?;
            let mut output = vec![0; 4 * count];
            memory.read(0, &mut output, &stream)?;
            let right: Vec<u8> = (0..count).flat_map(|at| sum(ranks, at, value).to_le_bytes()).collect();
            ensure!(output == right, "rank {rank}, {}: wrong sums of {count} elements", group.choices());
        }
        group.rekey()?;
    }
    Ok(Box::new(group).close()?)
}

/// Element `at` of a rank.
fn value(rank: usize, at: usize) -> u32 {
    (at as u32).wrapping_mul(0x9e37_79b9) ^ (rank as u32) << 20
}

struct Member {
    rank: usize,
    ranks: usize,
    communicator: Box<dyn Collectives>,
    input: DeviceBuffer,
    output: DeviceBuffer,
    stream: Stream,
}

impl Member {
    /// Sums `count` integers, and checks every one. A failure must leave zeros.
    fn reduces(&mut self, count: usize) -> Outcome {
        self.does(Request::AllReduce(ReduceOp::Sum), count)
    }

    /// A collective on a vector of `count` integers, likewise.
    fn does(&mut self, request: Request, count: usize) -> Outcome {
        let (rank, ranks) = (self.rank, self.ranks);
        let partition = Partition::new(count, ranks);
        let given = if request == Request::AllGather { partition.range(rank) } else { 0..count };
        let wanted = match request {
            Request::ReduceScatter(_) => partition.range(rank),
            _ => 0..count,
        };
        let owner = |at: usize| (0..ranks).find(|&rank| partition.range(rank).contains(&at));
        let right = |at: usize| match request {
            Request::AllGather => owner(at).map_or(0, |owner| value(owner, at)),
            Request::Broadcast { root } => value(root, at),
            _ => sum(ranks, at, value),
        };
        let expected: Vec<u32> = wanted.map(right).collect();
        let input: Vec<u8> = given.flat_map(|at| value(rank, at).to_le_bytes()).collect();
        self.input.write(0, &input, &self.stream)?;
        self.output.fill(0xa5, &self.stream)?;
        let buffers = RankBuffers { input: self.input.pointer(), output: self.output.pointer() };
        // SAFETY: both buffers hold `count` elements and live until the stream has been waited for.
        unsafe { self.communicator.run(request, &[buffers], count, Dtype::U32, &[&self.stream])? };
        let outcome = self.communicator.finish(&[&self.stream]);
        let mut output = vec![0; 4 * expected.len()];
        self.output.read(0, &mut output, &self.stream)?;
        let output: Vec<u32> = output.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        if let Err(error) = outcome {
            ensure!(self.communicator.is_poisoned(), "a failure did not poison: {error}");
            // It can have had all before another rank failed.
            let whole = output.iter().all(|&element| element == 0) || output == expected;
            ensure!(whole, "a failure left parts of a result: {error}");
            return Err(error.into());
        }
        let pairs = output.iter().zip(&expected);
        if let Some((at, (found, right))) = pairs.enumerate().find(|(_, (found, right))| found != right) {
            return Err(
                format!("rank {rank}, {request:?} of {count}: element {at} is {found}, not {right}").into()
            );
        }
        Ok(())
    }
}

fn sum(ranks: usize, at: usize, value: impl Fn(usize, usize) -> u32) -> u32 {
    (0..ranks).fold(0, |sum, rank| sum.wrapping_add(value(rank, at)))
}

struct Team {
    directory: tempfile::TempDir,
    ranks: usize,
    cipher: &'static str,
    timeout_ms: u64,
}

impl Team {
    fn new(ranks: usize, cipher: &'static str, timeout_ms: u64) -> std::io::Result<Self> {
        Ok(Self { directory: tempfile::tempdir()?, ranks, cipher, timeout_ms })
    }

    fn start(&self, rank: usize, task: &str) -> std::io::Result<Child> {
        let Self { directory, ranks, cipher, timeout_ms } = self;
        let door = directory.path().join("door");
        let member = format!("{task} {rank} {ranks} unix:{} {cipher} {timeout_ms}", door.display());
        Command::new(std::env::current_exe()?)
            .env(CHILD, member)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
    }

    fn start_all(&self, task: &str) -> std::io::Result<Vec<Child>> {
        (0..self.ranks).map(|rank| self.start(rank, task)).collect()
    }
}

/// How a process ended that must end soon, and what it said.
fn end(child: &mut Child) -> Result<(ExitStatus, String), Box<dyn std::error::Error>> {
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if start.elapsed() > PATIENCE {
            child.kill()?;
            child.wait()?;
            return Err("a rank hangs".into());
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let mut text = String::new();
    if let Some(mut stdout) = child.stdout.take() {
        stdout.read_to_string(&mut text)?;
    }
    Ok((status, text))
}

fn right(_: &Device) -> Outcome {
    let _alone = alone();
    for (ranks, cipher, task) in [
        (1, "256", "work"),
        (2, "none", "work"),
        (2, "128", "work"),
        (2, "256", "work"),
        (3, "256", "work"),
        (4, "256", "work"),
        (3, "none", "direct"),
        (3, "256", "direct"),
        (4, "128", "tree"),
        (3, "128", "exchange"),
    ] {
        let start = Instant::now();
        for (rank, mut child) in Team::new(ranks, cipher, 20_000)?.start_all(task)?.into_iter().enumerate() {
            let (status, text) = end(&mut child)?;
            ensure!(
                status.success() && text == "done\n",
                "{ranks} ranks, {task}, {cipher}, rank {rank}: {status}: {text}"
            );
        }
        println!(
            "{ranks} processes, {task}, {cipher}: {:.2} s with their start",
            start.elapsed().as_secs_f64()
        );
    }
    Ok(())
}

fn nodes(_: &Device) -> Outcome {
    let _alone = alone();
    for (rank, mut child) in Team::new(4, "256", 20_000)?.start_all("nodes")?.into_iter().enumerate() {
        let (status, text) = end(&mut child)?;
        ensure!(status.success() && text == "done\n", "rank {rank}: {status}: {text}");
    }
    Ok(())
}

/// On all GPUs that there are.
fn right_over_nccl() -> Outcome {
    let _alone = alone();
    let ranks = Device::count()?;
    for (cipher, task) in [("none", "nccl"), ("128", "nccl"), ("256", "nccl"), ("256", "nccl-nodes")] {
        for (rank, mut child) in Team::new(ranks, cipher, 20_000)?.start_all(task)?.into_iter().enumerate() {
            let (status, text) = end(&mut child)?;
            ensure!(
                status.success() && text == "done\n",
                "{ranks} ranks, {task}, {cipher}, rank {rank}: {status}: {text}"
            );
        }
    }
    Ok(())
}

fn sharing_over_nccl(_: &Device) -> Outcome {
    let _alone = alone();
    let ranks = Device::count()? + 1;
    let start = Instant::now();
    for (rank, mut child) in Team::new(ranks, "256", 20_000)?.start_all("nccl")?.into_iter().enumerate() {
        let (status, text) = end(&mut child)?;
        let told = text.contains(&format!("ranks 0 and {} are on one GPU", ranks - 1));
        ensure!(status.success() && told, "rank {rank}: {status}: {text}");
    }
    ensure!(start.elapsed() < Duration::from_secs(20), "a rank waited for its deadline");
    Ok(())
}

/// NCCL may say so at once, or nothing: then the deadline helps.
fn killed_over_nccl() -> Outcome {
    let _alone = alone();
    for victim in [0, 1] {
        let team = Team::new(Device::count()?, "256", 3_000)?;
        let mut children = team.start_all("nccl-endless")?;
        begun(&mut children[victim])?;
        children[victim].kill()?;
        let start = Instant::now();
        for (rank, child) in children.iter_mut().enumerate() {
            let (status, text) = end(child)?;
            let told = ["nothing from rank", "NCCL", "was lost"].iter().any(|words| text.contains(words));
            ensure!(rank == victim || status.success() && told, "rank {rank}: {status}: {text}");
        }
        let took = start.elapsed();
        ensure!(took < Duration::from_secs(15), "the others took {took:?}");
        println!("rank {victim} of {} killed; the others ended after {took:?}", team.ranks);
    }
    Ok(())
}

fn choosing(_: &Device) -> Outcome {
    let _alone = alone();
    for (ranks, cipher) in [(2, "256"), (3, "none"), (3, "128")] {
        for (rank, mut child) in Team::new(ranks, cipher, 30_000)?.start_all("auto")?.into_iter().enumerate()
        {
            let (status, text) = end(&mut child)?;
            ensure!(status.success() && text == "done\n", "{ranks} ranks, rank {rank}: {status}: {text}");
        }
    }
    Ok(())
}

fn differing(_: &Device) -> Outcome {
    let _alone = alone();
    for (task, words) in [("impostor", "holds another group secret"), ("shorter", "greatest length")] {
        let team = Team::new(2, "256", 20_000)?;
        let mut children = [team.start(0, "work")?, team.start(1, task)?];
        let [(_, zero), (_, one)] = [end(&mut children[0])?, end(&mut children[1])?];
        ensure!(zero.contains("no session") && zero.contains(words), "rank 0: {zero}");
        ensure!(one.contains("no session"), "rank 1: {one}");
    }
    Ok(())
}

/// Waits until a rank that reduces without end has begun.
fn begun(child: &mut Child) -> Outcome {
    let stdout = child.stdout.as_mut().ok_or("no output")?;
    let mut line = String::new();
    // Nothing follows until the rank ends, so that nothing is lost with this reader.
    BufReader::new(stdout).read_line(&mut line)?;
    ensure!(line.trim_end() == BEGUN, "a rank ended early: {line}");
    Ok(())
}

/// At moments on the way to the collectives and in their middle, with free memory as it was in the end.
fn killed(device: &Device) -> Outcome {
    let _alone = alone();
    let before = device.free_bytes()?;
    let mut in_collectives = 0;
    // A process needs about half a second until it reduces. The first is killed before it has come to the meeting, which
    // the others notice only at the deadline.
    let on_the_way = [0, 450, 500, 600].map(Some);
    for (attempt, moment) in on_the_way.into_iter().chain([None; 6]).enumerate() {
        let team = Team::new(2 + attempt % 2 * 2, "256", 3_000)?;
        let mut children = team.start_all("endless")?;
        let victim = attempt / 2 % team.ranks;
        let moment = match moment {
            Some(moment) => moment,
            None => {
                begun(&mut children[victim])?;
                3 * attempt as u64
            }
        };
        std::thread::sleep(Duration::from_millis(moment));
        children[victim].kill()?;
        let start = Instant::now();
        for (rank, child) in children.iter_mut().enumerate() {
            let (status, text) = end(child)?;
            if rank == victim {
                continue;
            }
            let typed = ["was lost", "no session", "nothing from rank", "was aborted by"];
            let told = typed.iter().any(|words| text.contains(words));
            ensure!(status.success() && told, "attempt {attempt}, rank {rank}: {status}: {text}");
            in_collectives += usize::from(text.contains(&format!("rank {victim} was lost")));
        }
        let took = start.elapsed();
        ensure!(took < Duration::from_secs(6), "attempt {attempt}: the others took {took:?}");
        println!(
            "attempt {attempt}: rank {victim} of {} killed; the others ended after {took:?}",
            team.ranks
        );
    }
    ensure!(in_collectives > 0, "no process was killed in a collective");
    // Other tests may hold memory for a while.
    let start = Instant::now();
    while device.free_bytes()? + (64 << 20) < before {
        let free = device.free_bytes()?;
        ensure!(start.elapsed() < PATIENCE, "{before} bytes were free before, {free} after");
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Stopped, not ended: no connection breaks, so that only the deadline helps.
fn stalled(_: &Device) -> Outcome {
    let _alone = alone();
    let team = Team::new(2, "256", 3_000)?;
    let mut children = team.start_all("endless")?;
    begun(&mut children[1])?;
    ensure!(children[0].try_wait()?.is_none(), "rank 0 ended early");
    let stop = Command::new("kill").args(["-STOP", &children[1].id().to_string()]).status()?;
    ensure!(stop.success(), "kill -STOP: {stop}");
    let start = Instant::now();
    let ended = end(&mut children[0]);
    let took = start.elapsed();
    children[1].kill()?;
    children[1].wait()?;
    let (_, text) = ended?;
    let deadline = Error::Deadline { rank: 0, peer: 1, step: 0, waited_ms: 3_000 }.to_string();
    let words = deadline.split_once("within").map_or("", |(_, words)| words);
    ensure!(text.contains(words), "rank 0: {text}");
    ensure!(took < Duration::from_secs(8), "rank 0 took {took:?}");
    Ok(())
}
