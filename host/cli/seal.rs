//! `ringseal seal` and `ringseal open`: AES-GCM on files and pipes, so that anyone can check it with vectors of
//! their own.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use ringseal::aead::{self, Aead, AesKey, Iv};
use zeroize::Zeroizing;

use super::BackendName;
use super::failure::{Failure, Outcome, shown};
use super::memory;
use super::output::AtomicFile;
use super::values::{parse_hex, parse_key};

/// A key file holds 64 hexadecimal digits and a line end at most; this much is read to tell when it holds more.
const KEY_FILE_BYTES: u64 = 1024;
/// After each such piece of input, memory is asked for.
const PIECE_BYTES: u64 = 256 << 20;

#[derive(Args, Debug)]
#[group(required = true, multiple = false)]
struct KeySource {
    /// AES key of 16, 24 or 32 bytes in hexadecimal. Other users of this machine can see it in the list of
    /// processes while the command runs, and the shell keeps it in its history: prefer --key-file.
    #[arg(long, value_name = "HEX")]
    key: Option<String>,
    /// File with the AES key in hexadecimal, on one line.
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub(crate) struct Arguments {
    #[command(flatten)]
    key: KeySource,
    /// Nonce (IV) in hexadecimal; 12 bytes is the common length. Never use one twice with the same key: that gives
    /// away both messages and lets others forge tags.
    #[arg(long, value_name = "HEX")]
    nonce: String,
    /// Additional authenticated data in hexadecimal: protected against change, not hidden.
    #[arg(long, value_name = "HEX", default_value = "", hide_default_value = true)]
    aad: String,
    /// Where the cryptography runs.
    #[arg(long, value_name = "NAME", value_enum, default_value_t)]
    backend: BackendName,
    /// Input file [default: standard input].
    #[arg(long = "in", value_name = "FILE")]
    input: Option<PathBuf>,
    /// Output file, which appears whole or not at all [default: standard output].
    #[arg(long = "out", value_name = "FILE")]
    output: Option<PathBuf>,
}

impl KeySource {
    fn read(self) -> Outcome<AesKey> {
        let Some(path) = self.key_file else {
            return parse_key(&Zeroizing::new(self.key.unwrap_or_default())).map_err(option("--key"));
        };
        let mut text = Zeroizing::new(Vec::with_capacity(KEY_FILE_BYTES as usize));
        File::open(&path)
            .and_then(|file| file.take(KEY_FILE_BYTES).read_to_end(&mut text))
            .map_err(|error| Failure::file(&path, error))?;
        std::str::from_utf8(&text)
            .map_err(|_| "not text: a key file holds the key in hexadecimal".into())
            .and_then(|text| parse_key(text.trim_ascii()))
            .map_err(|what| Failure::file(&path, what))
    }
}

/// What to do, with every argument parsed.
struct Job {
    aead: Aead,
    nonce: Zeroizing<Vec<u8>>,
    aad: Zeroizing<Vec<u8>>,
    input: Option<PathBuf>,
    output: Sink,
}

enum Sink {
    File(AtomicFile),
    Stdout,
}

impl Job {
    fn new(arguments: Arguments) -> Outcome<Self> {
        let Arguments { key, nonce, aad, backend, input, output } = arguments;
        let key = key.read()?;
        let nonce = parse_hex(&nonce).map_err(option("--nonce"))?;
        Iv::new(&nonce).map_err(|error| Failure::Input(format!("--nonce: {error}")))?;
        let aad = parse_hex(&aad).map_err(option("--aad"))?;
        let aead = Aead::new(&*backend.open()?, &key)?;
        let output = match output {
            Some(path) => Sink::File(AtomicFile::create(&path)?),
            None => Sink::Stdout,
        };
        Ok(Self { aead, nonce, aad, input, output })
    }

    fn iv(&self) -> Outcome<Iv<'_>> {
        Ok(Iv::new(&self.nonce)?)
    }

    /// The input's name for messages.
    fn input_name(&self) -> &Path {
        self.input.as_deref().unwrap_or(Path::new("standard input"))
    }

    fn read(&self) -> Outcome<Vec<u8>> {
        let name = self.input_name();
        match &self.input {
            Some(path) => read_whole(File::open(path).map_err(|error| Failure::file(path, error))?, name),
            None => read_whole(io::stdin().lock(), name),
        }
    }

    fn write(self, pieces: &[&[u8]]) -> Outcome {
        match self.output {
            Sink::File(mut file) => {
                pieces.iter().try_for_each(|piece| file.write(piece))?;
                file.commit()
            }
            Sink::Stdout => {
                let mut stdout = io::stdout().lock();
                pieces
                    .iter()
                    .try_for_each(|piece| stdout.write_all(piece))
                    .and_then(|()| stdout.flush())
                    .map_err(Failure::stdout)
            }
        }
    }
}

/// Reads a message, writes its ciphertext and tag.
pub(crate) fn seal(arguments: Arguments) -> Outcome {
    let job = Job::new(arguments)?;
    let mut data = job.read()?;
    let tag = job.aead.seal_in_place(job.iv()?, &job.aad, &mut data)?;
    job.write(&[&data, &tag])
}

/// Reads ciphertext and tag, writes the message if the tag verifies.
pub(crate) fn open(arguments: Arguments) -> Outcome {
    let job = Job::new(arguments)?;
    let mut data = job.read()?;
    let Some(length) = data.len().checked_sub(aead::TAG_BYTES) else {
        let what = format!("{} bytes are too few: a sealed message ends with a 16-byte tag", data.len());
        return Err(Failure::file(job.input_name(), what));
    };
    let (message, tag) = data.split_at_mut(length);
    let tag = aead::tag_from_bytes(tag)?;
    job.aead.open_in_place(job.iv()?, &job.aad, message, &tag).map_err(|error| match error {
        ringseal::Error::Authentication => Failure::Wrong(format!(
            "{error}: the key, nonce, additional data or sealed bytes are not those of the seal; nothing was written"
        )),
        other => other.into(),
    })?;
    job.write(&[message])
}

/// Reads to the end, as long as memory lasts: no byte of a message may be given out before its last is verified.
fn read_whole(mut input: impl Read, name: &Path) -> Outcome<Vec<u8>> {
    let mut data = Vec::new();
    loop {
        let read = input.by_ref().take(PIECE_BYTES).read_to_end(&mut data);
        if read.map_err(|error| Failure::file(name, error))? < PIECE_BYTES as usize {
            return Ok(data);
        }
        // The buffer doubles when it is full.
        memory::require(2 * data.len() as u128, &format!("{}: more than {} bytes", shown(name), data.len()))?;
    }
}

fn option(name: &'static str) -> impl Fn(String) -> Failure {
    move |what| Failure::Input(format!("{name}: {what}"))
}
