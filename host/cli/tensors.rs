//! Gradient files: `.safetensors` and `.npy`, one a rank, read by slices so that memory doesn't grow with the files.
//!
//! Only headers are held. The output begins with the first file's header, byte for byte where it may, so names,
//! shapes and order come out as they went in.

mod npy;
mod safetensors;

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use ringseal::Dtype;

use super::failure::{Failure, Outcome, printable, shown};

/// Files, one a rank, that hold the same tensors: names, shapes and element types agree, and every type can be
/// reduced.
#[derive(Debug)]
pub(crate) struct TensorFiles {
    files: Vec<(PathBuf, File)>,
    tensors: Vec<Tensor>,
    header: Vec<u8>,
    metadata_dropped: bool,
}

/// A tensor that every file has.
#[derive(Debug)]
pub(crate) struct Tensor {
    /// Element type.
    pub(crate) dtype: Dtype,
    /// Length in bytes.
    pub(crate) bytes: u64,
    label: String,
    /// Where its bytes begin, in each file.
    offsets: Vec<u64>,
}

impl Tensor {
    /// What to call it in a message.
    pub(crate) fn label(&self) -> &str {
        &self.label
    }
}

impl TensorFiles {
    /// Opens one file a rank; they must agree with each other and with the output's format.
    pub(crate) fn open(inputs: &[PathBuf], output: &Path) -> Outcome<Self> {
        let Some(first) = inputs.first() else {
            return Err(Failure::Input("--input: name at least one file, one a rank".into()));
        };
        let format = Format::of(first)?;
        for path in inputs.iter().map(PathBuf::as_path).chain([output]) {
            if Format::of(path)? != format {
                let what = format!(
                    "all inputs and the output must be in one format, and {} is another",
                    shown(first)
                );
                return Err(Failure::file(path, what));
            }
        }
        let mut files = Vec::with_capacity(inputs.len());
        let mut contents = Vec::with_capacity(inputs.len());
        for path in inputs {
            let (file, content) = Contents::read(path, format)?;
            files.push((path.clone(), file));
            contents.push(content);
        }
        let tensors = agree(inputs, &contents)?;
        let metadata_dropped = contents.iter().any(|content| content.metadata != contents[0].metadata);
        let first = contents.swap_remove(0);
        let header = if metadata_dropped {
            safetensors::without_metadata(&first.header).map_err(|what| Failure::file(&inputs[0], what))?
        } else {
            first.header
        };
        Ok(Self { files, tensors, header, metadata_dropped })
    }

    /// The number of files.
    pub(crate) fn ranks(&self) -> usize {
        self.files.len()
    }

    /// In the order of their data in the output.
    pub(crate) fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The bytes of one rank's data.
    pub(crate) fn data_bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.bytes).sum()
    }

    /// What the output has before its data.
    pub(crate) fn header(&self) -> &[u8] {
        &self.header
    }

    /// Whether the files carried `__metadata__` that differed, so that the output carries none.
    pub(crate) fn metadata_dropped(&self) -> bool {
        self.metadata_dropped
    }

    /// Fills `buffer` with `rank`'s bytes of `tensor`, from byte `start` of the tensor on.
    pub(crate) fn read(&self, rank: usize, tensor: &Tensor, start: u64, buffer: &mut [u8]) -> Outcome {
        let (path, file) = &self.files[rank];
        read_at(file, tensor.offsets[rank] + start, buffer).map_err(|error| {
            let what = match error.kind() {
                io::ErrorKind::UnexpectedEof => "the file shrank while it was read".into(),
                _ => error.to_string(),
            };
            Failure::file(path, format_args!("reading {}: {what}", tensor.label))
        })
    }
}

fn read_at(mut file: &File, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
    file.seek(SeekFrom::Start(offset))?;
    file.read_exact(buffer)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Safetensors,
    Npy,
}

impl Format {
    fn of(path: &Path) -> Outcome<Self> {
        let extension = path.extension().map(|extension| extension.to_ascii_lowercase());
        match extension.as_ref().and_then(|extension| extension.to_str()) {
            Some("safetensors") => Ok(Self::Safetensors),
            Some("npy") => Ok(Self::Npy),
            _ => Err(Failure::file(path, "the name must end in .safetensors or .npy")),
        }
    }
}

/// What one file contains.
#[derive(Debug)]
struct Contents {
    /// In the order of their data.
    tensors: Vec<Stored>,
    /// The file's bytes before its data.
    header: Vec<u8>,
    /// Free text that safetensors may carry.
    metadata: HashMap<String, String>,
}

/// One tensor of one file.
#[derive(Debug)]
struct Stored {
    /// `None` in `.npy`, whose one array has no name.
    name: Option<String>,
    form: Form,
    /// The element type as the collective reduces it, if it can.
    dtype: Option<Dtype>,
    /// Where its bytes begin in the file.
    offset: u64,
    bytes: u64,
}

/// What ranks must agree on, in the file's own words.
#[derive(Debug, PartialEq, Eq)]
struct Form {
    element: String,
    shape: Vec<u64>,
    fortran_order: bool,
}

impl Contents {
    fn read(path: &Path, format: Format) -> Outcome<(File, Self)> {
        let fail = |error: io::Error| Failure::file(path, error);
        // Asked before opening, since opening a named pipe would wait for a writer.
        if !path.metadata().map_err(fail)?.is_file() {
            return Err(Failure::file(path, "is not a regular file"));
        }
        let mut file = File::open(path).map_err(fail)?;
        let length = file.metadata().map_err(fail)?.len();
        let contents = match format {
            Format::Safetensors => safetensors::parse(&mut file, length),
            Format::Npy => npy::parse(&mut file, length),
        };
        let contents = contents.map_err(|what| Failure::file(path, printable(&what)))?;
        Ok((file, contents))
    }
}

impl Stored {
    fn label(&self) -> String {
        self.name.as_ref().map_or_else(|| "the array".into(), |name| format!("tensor {name:?}"))
    }
}

/// Every file has exactly the tensors of the first, and they can be reduced.
fn agree(paths: &[PathBuf], contents: &[Contents]) -> Outcome<Vec<Tensor>> {
    let by_name: Vec<HashMap<_, _>> = contents
        .iter()
        .map(|content| content.tensors.iter().map(|tensor| (&tensor.name, tensor)).collect())
        .collect();
    let reference_path = shown(&paths[0]);
    for (path, content) in paths.iter().zip(contents) {
        if let Some(extra) = content.tensors.iter().find(|tensor| !by_name[0].contains_key(&tensor.name)) {
            return Err(Failure::file(path, format_args!("{} is not in {reference_path}", extra.label())));
        }
    }
    let mut tensors = Vec::with_capacity(contents[0].tensors.len());
    for reference in &contents[0].tensors {
        let label = reference.label();
        let mut offsets = Vec::with_capacity(paths.len());
        for (path, stored) in paths.iter().zip(&by_name) {
            let Some(stored) = stored.get(&reference.name) else {
                return Err(Failure::file(
                    path,
                    format_args!("{label} is missing, but {reference_path} has it"),
                ));
            };
            if let Some((here, there)) = difference(&stored.form, &reference.form) {
                let what = format!("{label} has {here}, but {there} in {reference_path}");
                return Err(Failure::file(path, what));
            }
            offsets.push(stored.offset);
        }
        let Some(dtype) = reference.dtype else {
            let what = format!(
                "{label} has element type {}, which can't be reduced; convert it to f32, f64, f16, bf16, i8, u8, \
                 i32, u32, i64 or u64, or leave it out",
                reference.form.element
            );
            return Err(Failure::file(&paths[0], what));
        };
        tensors.push(Tensor { dtype, bytes: reference.bytes, label, offsets });
    }
    Ok(tensors)
}

/// The first respect in which two tensors differ, in words.
fn difference(here: &Form, there: &Form) -> Option<(String, String)> {
    let order = |form: &Form| if form.fortran_order { "Fortran order" } else { "C order" }.to_string();
    if here.element != there.element {
        Some((format!("element type {}", here.element), there.element.clone()))
    } else if here.shape != there.shape {
        Some((format!("shape {:?}", here.shape), format!("{:?}", there.shape)))
    } else if here.fortran_order != there.fortran_order {
        Some((order(here), order(there)))
    } else {
        None
    }
}
