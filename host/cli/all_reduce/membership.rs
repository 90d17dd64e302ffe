//! A process that is one rank of a group.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use ringseal::channel::GroupSecret;
use ringseal::collective::{Bootstrap, Communicator, Nodes, Options, Rail, Rendezvous};
use ringseal::cuda::Device;
use zeroize::Zeroizing;

use crate::cli::BackendName;
use crate::cli::failure::{Failure, Outcome};
use crate::cli::values::parse_hex;

/// Where the group secret is when no file is named.
const SECRET_VARIABLE: &str = "RINGSEAL_SECRET";
/// A secret has 64 hexadecimal digits and a line end at most; this much is read to tell when a file holds more.
const SECRET_FILE_BYTES: u64 = 1024;

#[derive(Args, Debug)]
#[command(next_help_heading = "A process per rank")]
pub(super) struct MembershipArguments {
    /// Be this rank, counted from 0, of --ranks; the others are processes of their own. Rank 0 prints the table.
    #[arg(long, value_name = "R", requires = "rendezvous", requires = "ranks", conflicts_with = "input")]
    rank: Option<usize>,
    /// Where the ranks meet: HOST:PORT, at which rank 0 listens, or unix:PATH.
    #[arg(long, value_name = "ADDR", requires = "rank")]
    rendezvous: Option<String>,
    /// File with the group secret, 32 random bytes in hexadecimal, on one line [default: the variable
    /// RINGSEAL_SECRET].
    #[arg(long, value_name = "FILE", requires = "rank")]
    secret_file: Option<PathBuf>,
    /// Seconds to wait for another rank.
    #[arg(long, value_name = "SECONDS", requires = "rank", default_value = "30", value_parser = parse_seconds)]
    timeout: Duration,
    /// What carries records between processes. With --backend cuda and unless there are nodes, tcp is only how GPUs of one
    /// machine find each other's memory.
    #[arg(long, value_name = "NAME", value_enum, requires = "rank", default_value_t)]
    transport: Carrier,
    /// Ranks of a node: sums inside nodes first, then between them, where --transport is used; inside it is TCP, or with
    /// --backend cuda and --transport nccl the GPUs' own links.
    #[arg(long, value_name = "N", requires = "rank")]
    node_ranks: Option<usize>,
}

/// What carries records.
#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Carrier {
    /// A connection between each two ranks.
    #[default]
    Tcp,
    /// NCCL, through the memory of the ranks' GPUs: one for each rank, rank r's being GPU r modulo their number. With --backend
    /// cuda vectors are in that memory too, and sealed there; with others in host memory.
    Nccl,
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    match text.parse().map(Duration::try_from_secs_f64) {
        Ok(Ok(duration)) if !duration.is_zero() => Ok(duration),
        _ => Err("a number of seconds, more than 0".into()),
    }
}

/// A rank that has joined its group.
pub(super) enum Joined {
    /// Of ranks that are all alike.
    One(Box<Communicator>),
    /// Of ranks in nodes.
    Nodes(Box<Nodes>),
}

/// How this process belongs to its group.
pub(super) struct Membership {
    pub(super) rank: usize,
    pub(super) secret: GroupSecret,
    pub(super) timeout: Duration,
    pub(super) carrier: Carrier,
    pub(super) node_ranks: Option<usize>,
    rendezvous: String,
}

impl Membership {
    /// `None` when all ranks are in this process.
    pub(super) fn new(arguments: MembershipArguments, ranks: usize) -> Outcome<Option<Self>> {
        let MembershipArguments { rank, rendezvous, secret_file, timeout, transport: carrier, node_ranks } =
            arguments;
        let Some((rank, rendezvous)) = rank.zip(rendezvous) else { return Ok(None) };
        if rank >= ranks {
            return Err(Failure::Input(format!(
                "--rank {rank}: the ranks of --ranks {ranks} are numbered from 0 to {}",
                ranks.saturating_sub(1)
            )));
        }
        if let Some(node_ranks) = node_ranks
            && (node_ranks == 0 || !ranks.is_multiple_of(node_ranks))
        {
            let what =
                format!("--node-ranks {node_ranks}: all nodes of --ranks {ranks} have equally many ranks");
            return Err(Failure::Input(what));
        }
        let secret = match secret_file {
            Some(path) => from_file(&path)?,
            None => from_variable()?,
        };
        Ok(Some(Self { rank, secret, timeout, carrier, node_ranks, rendezvous }))
    }

    /// Whether vectors are to be in host memory, wherever they are sealed.
    pub(super) fn through_host(&self, backend: BackendName) -> bool {
        match self.carrier {
            Carrier::Tcp => self.node_ranks.is_some(),
            Carrier::Nccl => !matches!(backend, BackendName::Cuda),
        }
    }

    /// Joins the other ranks, with vectors in host memory.
    pub(super) fn join(&self, ranks: usize, options: &Options) -> ringseal::Result<Joined> {
        let (rank, meeting) = (self.rank, self.meet(ranks)?);
        let device = || Device::open(rank % Device::count()?.max(1));
        let link = |secret: &GroupSecret, [rank, ranks]: [usize; 2], meeting| match self.carrier {
            Carrier::Tcp => Communicator::new(secret, rank, ranks, meeting, options),
            Carrier::Nccl => Communicator::over_nccl(secret, rank, ranks, meeting, &device()?, options),
        };
        let Some(node_ranks) = self.node_ranks else {
            return Ok(Joined::One(Box::new(link(&self.secret, [rank, ranks], meeting)?)));
        };
        let inside = |secret: &GroupSecret, [rank, ranks]: [usize; 2], meeting| {
            Communicator::new(secret, rank, ranks, meeting, options)
        };
        let between = |rail: Rail| link(&rail.secret, [rail.node, rail.nodes], rail.bootstrap);
        let nodes = Nodes::join(&self.secret, [rank, ranks], node_ranks, meeting, inside, between)?;
        Ok(Joined::Nodes(Box::new(nodes)))
    }

    /// Meets the other ranks.
    pub(super) fn meet(&self, ranks: usize) -> ringseal::Result<Box<dyn Bootstrap>> {
        Ok(Box::new(Rendezvous::connect(&self.rendezvous, self.rank, ranks, self.timeout)?))
    }
}

fn from_file(path: &Path) -> Outcome<GroupSecret> {
    let mut text = Zeroizing::new(Vec::with_capacity(SECRET_FILE_BYTES as usize));
    File::open(path)
        .and_then(|file| file.take(SECRET_FILE_BYTES).read_to_end(&mut text))
        .map_err(|error| Failure::file(path, error))?;
    let text = str::from_utf8(&text).unwrap_or_default();
    parse(text.trim_ascii()).map_err(|what| Failure::file(path, what))
}

fn from_variable() -> Outcome<GroupSecret> {
    let text = Zeroizing::new(std::env::var(SECRET_VARIABLE).map_err(|_| {
        Failure::Input(format!(
            "the ranks of a group share a secret: name its file with --secret-file, or set {SECRET_VARIABLE}"
        ))
    })?);
    parse(text.trim_ascii()).map_err(|what| Failure::Input(format!("{SECRET_VARIABLE}: {what}")))
}

fn parse(text: &str) -> Result<GroupSecret, String> {
    const WHAT: &str = "a group secret is 32 random bytes, as 64 hexadecimal digits";
    let bytes = parse_hex(text).map_err(|_| WHAT)?;
    let secret: Zeroizing<[u8; 32]> = Zeroizing::new(bytes.as_slice().try_into().map_err(|_| WHAT)?);
    Ok(GroupSecret::from_bytes(*secret))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_have_64_digits() {
        assert!(parse(&"5a".repeat(32)).is_ok());
        for text in ["", "5a", &"5a".repeat(31), &"5a".repeat(33), &"zz".repeat(32)] {
            let refused = parse(text).unwrap_err();
            assert!(refused.contains("64 hex") && (text.is_empty() || !refused.contains(text)), "{refused}");
        }
    }

    #[test]
    fn timeouts_are_positive() {
        assert_eq!(parse_seconds("0.5"), Ok(Duration::from_millis(500)));
        for text in ["0", "-1", "soon", "NaN", "1e400"] {
            parse_seconds(text).unwrap_err();
        }
    }
}
