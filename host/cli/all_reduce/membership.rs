//! A process that is one rank of a group.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use ringseal::channel::GroupSecret;
use ringseal::collective::{Bootstrap, Rendezvous};
use zeroize::Zeroizing;

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
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    match text.parse().map(Duration::try_from_secs_f64) {
        Ok(Ok(duration)) if !duration.is_zero() => Ok(duration),
        _ => Err("a number of seconds, more than 0".into()),
    }
}

/// How this process belongs to its group.
pub(super) struct Membership {
    pub(super) rank: usize,
    pub(super) secret: GroupSecret,
    pub(super) timeout: Duration,
    rendezvous: String,
}

impl Membership {
    /// `None` when all ranks are in this process.
    pub(super) fn new(arguments: MembershipArguments, ranks: usize) -> Outcome<Option<Self>> {
        let MembershipArguments { rank: Some(rank), rendezvous: Some(rendezvous), secret_file, timeout } =
            arguments
        else {
            return Ok(None);
        };
        if rank >= ranks {
            return Err(Failure::Input(format!(
                "--rank {rank}: the ranks of --ranks {ranks} are numbered from 0 to {}",
                ranks.saturating_sub(1)
            )));
        }
        let secret = match secret_file {
            Some(path) => from_file(&path)?,
            None => from_variable()?,
        };
        Ok(Some(Self { rank, secret, timeout, rendezvous }))
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
