//! Output files that appear whole or not at all.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use tempfile::{Builder, NamedTempFile};

use super::failure::{Failure, Outcome, shown};
use super::interruption::Doomed;

/// A file being written beside its target; [`commit`](Self::commit) moves it there. Dropped before that, or interrupted, it
/// leaves nothing behind and the target as it was.
#[derive(Debug)]
pub(crate) struct AtomicFile {
    target: PathBuf,
    temporary: BufWriter<NamedTempFile>,
    doomed: Doomed,
}

impl AtomicFile {
    /// Prepares to write `path`. Everything that can be refused early is refused here, before any work is done: a
    /// missing or unwritable directory, a target that isn't a regular file or is write-protected.
    pub(crate) fn create(path: &Path) -> Outcome<Self> {
        let fail = |error: io::Error| Failure::file(path, error);
        let existing = match fs::metadata(path) {
            Ok(metadata) if metadata.is_file() => {
                // A rename would replace even a write-protected file; opening it respects the protection.
                OpenOptions::new().write(true).open(path).map_err(fail)?;
                Some(metadata.permissions())
            }
            Ok(_) => {
                let what = "exists and is not a regular file; name a file, or leave the option out where standard \
                            output will do";
                return Err(Failure::file(path, what));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(fail(error)),
        };
        // A symbolic link stays one: the file it points to is what gets replaced.
        let target = if existing.is_some() { path.canonicalize().map_err(fail)? } else { path.to_path_buf() };
        if target.file_name().is_none() || path.as_os_str().as_encoded_bytes().ends_with(b"/") {
            return Err(Failure::file(path, "is not a file name"));
        }
        let directory = directory_of(&target);
        let mut builder = Builder::new();
        builder.prefix(".ringseal-").suffix(".part");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            builder.permissions(fs::Permissions::from_mode(0o666)); // less the umask, as for any new file
        }
        let created = Doomed::create(|| builder.tempfile_in(directory), NamedTempFile::path);
        let (temporary, doomed) = created.map_err(|error| {
            Failure::file(
                path,
                format_args!("cannot create a file in {}: {}", shown(directory), cause(&error)),
            )
        })?;
        if let Some(permissions) = existing {
            temporary.as_file().set_permissions(permissions).map_err(fail)?;
        }
        Ok(Self { target, temporary: BufWriter::with_capacity(1 << 20, temporary), doomed })
    }

    /// Appends bytes.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Outcome {
        self.temporary.write_all(bytes).map_err(|error| Failure::file(&self.target, error))
    }

    /// Makes the bytes durable, then visible under the target's name in one step.
    pub(crate) fn commit(self) -> Outcome {
        let Self { target, temporary, doomed } = self;
        let fail = |error: io::Error| Failure::file(&target, error);
        let temporary = temporary.into_inner().map_err(|error| fail(error.into_error()))?;
        temporary.as_file().sync_all().map_err(fail)?;
        doomed.spare(|| temporary.persist(&target)).map_err(|error| fail(error.error))?;
        // The rename itself lasts through a crash only when the directory is flushed too.
        #[cfg(unix)]
        File::open(directory_of(&target)).and_then(|directory| directory.sync_all()).map_err(fail)?;
        Ok(())
    }
}

/// The system's own words, without the temporary file's path that `tempfile` adds.
fn cause(error: &io::Error) -> io::Error {
    error.raw_os_error().map_or_else(|| error.kind().into(), io::Error::from_raw_os_error)
}

fn directory_of(target: &Path) -> &Path {
    match target.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(directory: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn nothing_is_left_without_a_commit() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("out");
        fs::write(&target, "before").unwrap();
        let mut file = AtomicFile::create(&target).unwrap();
        file.write(b"half").unwrap();
        drop(file);
        assert_eq!(names(directory.path()), ["out"]);
        assert_eq!(fs::read(&target).unwrap(), b"before");
    }

    #[test]
    fn a_commit_replaces_the_file_and_keeps_its_permissions() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("out");
        fs::write(&target, "before").unwrap();
        let before = fs::metadata(&target).unwrap().permissions();
        let mut file = AtomicFile::create(&target).unwrap();
        file.write(b"after").unwrap();
        file.commit().unwrap();
        assert_eq!(names(directory.path()), ["out"]);
        assert_eq!(fs::read(&target).unwrap(), b"after");
        assert_eq!(fs::metadata(&target).unwrap().permissions(), before);
    }

    #[cfg(unix)]
    #[test]
    fn a_symbolic_link_stays_one() {
        let directory = tempfile::tempdir().unwrap();
        let (target, link) = (directory.path().join("out"), directory.path().join("link"));
        fs::write(&target, "before").unwrap();
        std::os::unix::fs::symlink("out", &link).unwrap();
        let mut file = AtomicFile::create(&link).unwrap();
        file.write(b"after").unwrap();
        file.commit().unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&target).unwrap(), b"after");
    }

    #[test]
    fn what_is_not_a_regular_file_is_refused_and_named() {
        let directory = tempfile::tempdir().unwrap();
        let refusal = AtomicFile::create(directory.path()).unwrap_err().to_string();
        assert!(refusal.contains(directory.path().to_str().unwrap()), "{refusal}");
        assert!(AtomicFile::create(Path::new("")).is_err());
        assert!(AtomicFile::create(&directory.path().join("missing/out")).is_err());
        assert!(AtomicFile::create(&directory.path().join("new/")).is_err());
        #[cfg(unix)]
        assert!(AtomicFile::create(Path::new("/dev/null")).is_err());
    }
}
