//! `ringseal all-reduce --rank`: a process per rank, and what is left when one of them dies.
#![allow(clippy::print_stdout, reason = "what is skipped belongs in the output")]

mod support;

use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use support::{fails, listing, ringseal, run, succeeds};

/// Far longer than anything here takes, so that a hang is told from slowness.
const PATIENCE: Duration = Duration::from_secs(60);
const SECRET: &str = "5c5d6e9f2a1b3c4d5e6f708192a3b4c5d6e7f8091a2b3c4d5e6f708192a3b4c5";

struct Meeting {
    directory: tempfile::TempDir,
}

impl Meeting {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("secret"), format!("{SECRET}\n")).unwrap();
        Self { directory }
    }

    fn rank(&self, rank: usize, ranks: usize, arguments: &[&str]) -> Command {
        self.rank_with("secret", rank, ranks, arguments)
    }

    fn rank_with(&self, secret: &str, rank: usize, ranks: usize, arguments: &[&str]) -> Command {
        let path = |name| self.directory.path().join(name).display().to_string();
        let mut command = ringseal(["all-reduce", "--rank", &rank.to_string()]);
        if !arguments.contains(&"--backend") {
            command.args(["--backend", "cpu"]);
        }
        command.args(["--ranks", &ranks.to_string(), "--rendezvous", &format!("unix:{}", path("door"))]);
        command.args(["--secret-file", &path(secret)]).args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn start(&self, ranks: usize, arguments: &[&str]) -> Vec<Child> {
        (0..ranks).map(|rank| self.rank(rank, ranks, arguments).spawn().unwrap()).collect()
    }
}

/// The end of a process that must end soon.
fn end(mut child: Child) -> Output {
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > PATIENCE {
            child.kill().unwrap();
            panic!("a rank hangs: {:?}", child.wait_with_output());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

const SHORT: [&str; 8] = ["-b", "1K", "-e", "64K", "-n", "2", "-w", "1"];

#[test]
fn a_process_per_rank_gives_right_results_and_rank_0_prints_them() {
    for (ranks, algorithm) in [(1, "auto"), (2, "auto"), (3, "ring"), (4, "relay"), (3, "tree")] {
        let meeting = Meeting::new();
        let outputs: Vec<_> = meeting
            .start(ranks, &[&SHORT[..], &["--algo", algorithm]].concat())
            .into_iter()
            .map(end)
            .collect();
        for (rank, output) in outputs.into_iter().enumerate() {
            let text = String::from_utf8(succeeds(output)).unwrap();
            match rank {
                0 => assert!(text.contains("in a process each") && text.contains("rank is right"), "{text}"),
                _ => assert!(text.is_empty(), "{text}"),
            }
        }
        assert_eq!(listing(meeting.directory.path()), ["secret"], "the socket's file was left");
    }
}

#[test]
fn ranks_in_nodes_get_right_results() {
    let meeting = Meeting::new();
    for (rank, output) in
        meeting.start(4, &[&SHORT[..], &["--node-ranks", "2"]].concat()).into_iter().map(end).enumerate()
    {
        let text = String::from_utf8(succeeds(output)).unwrap();
        assert!(rank != 0 || text.contains("in nodes of 2") && text.contains("rank is right"), "{text}");
    }
    for ranks in ["3", "0"] {
        let output = end(meeting.rank(0, 4, &["--node-ranks", ranks]).spawn().unwrap());
        fails(&output, 2, &["equally many"]);
    }
    let output = end(meeting.rank(0, 4, &["--node-ranks", "2", "--algo", "ring"]).spawn().unwrap());
    fails(&output, 2, &["--algo"]);
}

/// Without GPU or NCCL, all ranks say what is missing, and none waits for another.
#[test]
fn without_nccl_every_rank_says_so() {
    let (on_host, on_gpus) = (["--backend", "cpu"], ["--backend", "cuda"]);
    for (backend, nodes) in [(on_host, &[][..]), (on_gpus, &[]), (on_gpus, &["--node-ranks", "1"])] {
        let (meeting, start) = (Meeting::new(), Instant::now());
        let arguments = [&SHORT[..], &["--transport", "nccl"], &backend, nodes].concat();
        for output in meeting.start(2, &arguments).into_iter().map(end) {
            if output.status.success() {
                println!("skipped: there are GPUs and NCCL here");
                return;
            }
            let text = String::from_utf8_lossy(&output.stderr);
            assert!(["NCCL", "GPU", "driver", "CUDA"].iter().any(|missing| text.contains(missing)), "{text}");
        }
        assert!(start.elapsed() < Duration::from_secs(20), "a rank waited for its deadline");
    }
}

#[test]
fn ranks_meet_over_tcp_with_the_secret_from_the_environment() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let children: Vec<_> = (0..3)
        .rev() // rank 0 comes last
        .map(|rank| {
            let mut command = ringseal(["all-reduce", "--backend", "cpu", "--ranks", "3"]);
            command.args(["--rank", &rank.to_string(), "--rendezvous", &format!("127.0.0.1:{port}")]);
            command.args(SHORT).env("RINGSEAL_SECRET", SECRET).stdout(Stdio::piped()).stderr(Stdio::piped());
            command.spawn().unwrap()
        })
        .collect();
    for child in children {
        succeeds(end(child));
    }
}

#[test]
fn another_secret_or_other_settings_fail_all_ranks() {
    for (secret, odd, words) in [
        ("other", &[][..], "holds another group secret"),
        ("secret", &["--aes", "128"], "another cipher"),
        ("secret", &["--record", "4K"], "records of another length"),
    ] {
        let meeting = Meeting::new();
        std::fs::write(meeting.directory.path().join("other"), "77".repeat(32)).unwrap();
        let third = meeting.rank_with(secret, 2, 3, &[&SHORT[..], odd].concat()).spawn().unwrap();
        let children: Vec<_> =
            (0..2).map(|rank| meeting.rank(rank, 3, &SHORT).spawn().unwrap()).chain([third]).collect();
        let errors: Vec<_> =
            children.into_iter().map(|child| fails(&end(child), 2, &["no session"])).collect();
        assert!(errors[0].contains(words) && errors[0].contains("rank 2"), "{errors:?}");
    }
}

#[test]
fn a_rank_that_never_comes_is_an_error_within_the_deadline() {
    let meeting = Meeting::new();
    let arguments = [&SHORT[..], &["--timeout", "0.3"]].concat();
    let start = Instant::now();
    let children = (0..2).map(|rank| meeting.rank(rank, 3, &arguments).spawn().unwrap()).collect::<Vec<_>>();
    for child in children {
        fails(&end(child), 2, &["no session", "300 ms"]);
    }
    assert!(start.elapsed() < Duration::from_secs(10));
}

/// At twenty moments from the meeting to the middle of the collectives.
#[test]
fn when_one_process_is_killed_the_others_end_with_an_error() {
    const RANKS: usize = 3;
    for attempt in 0..20u64 {
        let meeting = Meeting::new();
        let mut children =
            meeting.start(RANKS, &["-b", "8M", "-e", "8M", "-n", "1000000", "-c", "0", "--timeout", "4"]);
        // Spread over set-up and work; where exactly it strikes differs from run to run.
        std::thread::sleep(Duration::from_millis(5 + attempt * attempt));
        let victim = attempt as usize % RANKS;
        children[victim].kill().unwrap();
        let killed = Instant::now();
        for (rank, child) in children.into_iter().enumerate() {
            let output = end(child);
            if rank != victim {
                let error = String::from_utf8(output.stderr).unwrap();
                assert!(!output.status.success(), "attempt {attempt}: rank {rank} ended well");
                assert!(error.starts_with("error: "), "attempt {attempt}, rank {rank}: {error}");
            }
        }
        assert!(killed.elapsed() < Duration::from_secs(15), "attempt {attempt}: {:?}", killed.elapsed());
    }
}

/// Stopped, not ended: no connection breaks, so that only the deadline helps.
#[test]
fn when_one_process_stalls_the_others_end_at_the_deadline() {
    let meeting = Meeting::new();
    let mut children =
        meeting.start(3, &["-b", "1M", "-e", "1M", "-n", "1000000", "-c", "0", "--timeout", "2"]);
    std::thread::sleep(Duration::from_millis(800));
    let mut stalled = children.remove(1);
    let stop = Command::new("kill").args(["-STOP", &stalled.id().to_string()]).status().unwrap();
    assert!(stop.success());
    let start = Instant::now();
    for child in children {
        let error = String::from_utf8(end(child).stderr).unwrap();
        assert!(error.contains("within 2000 ms"), "{error}");
    }
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    stalled.kill().unwrap();
    stalled.wait().unwrap();
}

#[test]
fn arguments_that_make_no_sense_are_refused() {
    let meeting = Meeting::new();
    fails(&run(meeting.rank(3, 3, &[]), b""), 2, &["--rank 3", "0 to 2"]);
    let base = ["all-reduce", "--ranks", "2", "--rank", "0", "--rendezvous"];
    let mut command = ringseal(base.iter().chain(&["unix:/nowhere/door"]));
    fails(&run(command, b""), 2, &["--secret-file", "RINGSEAL_SECRET"]);
    command = ringseal(base.iter().chain(&["nowhere"]));
    command.env("RINGSEAL_SECRET", SECRET);
    fails(&run(command, b""), 2, &["HOST:PORT"]);
    command = ringseal(base.iter().chain(&["unix:x"]));
    command.env("RINGSEAL_SECRET", "5c5d");
    let error = fails(&run(command, b""), 2, &["RINGSEAL_SECRET", "64 hexadecimal digits"]);
    assert!(!error.contains("5c5d"), "the secret was printed: {error}");
}
