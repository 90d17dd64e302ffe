//! How the command ends when it can't do what was asked: one line on standard error and an exit code.

use std::fmt;
use std::io;
use std::path::Path;

/// Exit code for a failed verification or wrong elements.
pub(crate) const EXIT_WRONG: u8 = 1;
/// Exit code for bad usage, bad input and failed input or output.
pub(crate) const EXIT_INPUT: u8 = 2;
/// Exit code when the reader of standard output went away: what a shell reports for SIGPIPE (128 + 13).
const EXIT_PIPE: u8 = 141;

/// Why the command stops.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Data did not verify, or a result was wrong.
    Wrong(String),
    /// The command line, a file or the machine does not allow it.
    Input(String),
    /// Whoever read standard output closed it; nothing to report.
    BrokenPipe,
}

/// `Result` with a [`Failure`].
pub(crate) type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// A [`Failure::Input`] that names the file first.
    pub(crate) fn file(path: &Path, what: impl fmt::Display) -> Self {
        Self::Input(format!("{}: {what}", shown(path)))
    }

    /// Failed writing to standard output.
    pub(crate) fn stdout(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe {
            Self::BrokenPipe
        } else {
            Self::Input(format!("standard output: {error}"))
        }
    }

    /// The process's exit code.
    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Wrong(_) => EXIT_WRONG,
            Self::Input(_) => EXIT_INPUT,
            Self::BrokenPipe => EXIT_PIPE,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Wrong(text) | Self::Input(text) => formatter.write_str(text),
            Self::BrokenPipe => formatter.write_str("standard output was closed"),
        }
    }
}

impl From<ringseal::Error> for Failure {
    fn from(error: ringseal::Error) -> Self {
        use ringseal::Error::{Aborted, Authentication, Deadline, Lost, Record};
        match error {
            Authentication | Record { .. } | Aborted { .. } | Deadline { .. } | Lost { .. } => {
                Self::Wrong(error.to_string())
            }
            _ => Self::Input(error.to_string()),
        }
    }
}

/// A path for a message: control characters escaped, so that a hostile file name can't drive the terminal or
/// break the message's one line.
pub(crate) fn shown(path: &Path) -> String {
    printable(&path.to_string_lossy())
}

/// Text from outside for a message, with control characters escaped.
pub(crate) fn printable(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut out, c| {
        if c.is_control() {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
        out
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hostile_name_stays_on_its_line() {
        assert_eq!(printable("a\nb\u{1b}[31m ü"), "a\\nb\\u{1b}[31m ü");
    }

    #[test]
    fn failures_map_to_the_documented_exit_codes() {
        assert_eq!(Failure::from(ringseal::Error::Authentication).code(), 1);
        let deadline = ringseal::Error::Deadline { rank: 0, peer: 1, step: 2, waited_ms: 3 };
        assert_eq!(Failure::from(deadline).code(), 1);
        assert_eq!(Failure::from(ringseal::Error::Lost { rank: 0, peer: 1, step: None }).code(), 1);
        assert_eq!(Failure::from(ringseal::Error::NoDevice("no driver".into())).code(), 2);
        assert_eq!(Failure::stdout(io::ErrorKind::BrokenPipe.into()).code(), 141);
        assert_eq!(Failure::stdout(io::ErrorKind::StorageFull.into()).code(), 2);
    }
}
