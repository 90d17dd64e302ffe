//! What Ctrl-C and SIGTERM leave of files that are being written: nothing.
//!
//! A thread waits for the signals, so that it may do what no signal handler may. It begins with the first file; before that,
//! and where there are no such signals, the system's default stands.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

static UNFINISHED: Mutex<Unfinished> = Mutex::new(Unfinished { watched: false, paths: BTreeSet::new() });

/// Files that are in nobody's way until they are whole.
struct Unfinished {
    /// Whether a thread waits for signals.
    watched: bool,
    paths: BTreeSet<PathBuf>,
}

fn unfinished() -> MutexGuard<'static, Unfinished> {
    // A set of paths is whole whenever its lock is free, also after a panic.
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file that is removed if the process is interrupted while this lives.
#[derive(Debug)]
pub(super) struct Doomed(PathBuf);

impl Doomed {
    /// Creates a file by `create`, and dooms the path that `path` says is its own: no interruption comes in between.
    pub(super) fn create<T>(
        create: impl FnOnce() -> io::Result<T>,
        path: impl FnOnce(&T) -> &Path,
    ) -> io::Result<(T, Self)> {
        let mut unfinished = unfinished();
        if !unfinished.watched {
            watch()?;
            unfinished.watched = true;
        }
        let file = create()?;
        let path = path(&file).to_path_buf();
        unfinished.paths.insert(path.clone());
        Ok((file, Self(path)))
    }

    /// Gives the file its final name by `rename`, which no interruption cuts in two.
    pub(super) fn spare<T>(self, rename: impl FnOnce() -> T) -> T {
        let mut unfinished = unfinished();
        let renamed = rename();
        unfinished.paths.remove(&self.0);
        drop(unfinished);
        renamed
    }
}

impl Drop for Doomed {
    fn drop(&mut self) {
        unfinished().paths.remove(&self.0);
    }
}

/// Starts the thread that waits for the signals that a user or a supervisor ends a process with.
#[cfg(unix)]
fn watch() -> io::Result<()> {
    use signal_hook::consts::{SIGINT, SIGTERM};

    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM])?;
    let end = move || {
        if let Some(signal) = signals.forever().next() {
            // Kept to the end, so that no file begins and none is renamed any more.
            let unfinished = unfinished();
            for path in &unfinished.paths {
                // What can't be removed can't be reported better than by its being there.
                let _ = std::fs::remove_file(path);
            }
            // As a shell reports a process that a signal ended (POSIX.1-2017, XCU 2.8.2); at once, as other threads are at
            // work.
            signal_hook::low_level::exit(128 + signal);
        }
    };
    std::thread::Builder::new().name("interruption".into()).spawn(end).map(|_| ())
}

#[cfg(not(unix))]
fn watch() -> io::Result<()> {
    Ok(())
}
