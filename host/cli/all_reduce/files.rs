//! Reduces gradient files, one a rank, into one file.

use std::path::{Path, PathBuf};

use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};
use ringseal::ReduceOp;

use super::group::{Group, Setup};
use crate::cli::failure::{Failure, Outcome};
use crate::cli::output::AtomicFile;
use crate::cli::tensors::{Tensor, TensorFiles};
use crate::cli::warn;

/// Bytes of tensors held at once, over all ranks. A tensor larger than a rank's share is reduced by slices.
const BUFFER_BYTES: usize = 128 << 20;
/// The least share of a rank: enough for whole records at every step.
const LEAST_SLICE_BYTES: usize = 1 << 20;

/// Reduces `inputs` into `output`, which is left as it was on any failure.
pub(super) fn reduce(setup: &Setup, op: ReduceOp, inputs: &[PathBuf], output: &Path) -> Outcome {
    let files = TensorFiles::open(inputs, output)?;
    let mut target = AtomicFile::create(output)?;
    let largest = files.tensors().iter().map(|tensor| tensor.bytes).max().unwrap_or(0);
    let mut group =
        Group::new(&setup.uncalibrated(), largest.min(slice_bytes(files.ranks()) as u64) as usize)?;
    if files.metadata_dropped() {
        warn("the inputs' __metadata__ differ, so the output has none");
    }
    let progress = progress_bar(files.data_bytes());
    target.write(files.header())?;
    let mut buffers = vec![Vec::new(); files.ranks()];
    for tensor in files.tensors() {
        for (start, length) in slices(tensor.bytes, files.ranks()) {
            read(&files, tensor, start, length, &mut buffers)?;
            group.all_reduce_in_place(&mut buffers, tensor.dtype, op)?;
            if let Some(rank) = buffers.iter().position(|buffer| *buffer != buffers[0]) {
                let what = format!("{}: ranks 0 and {rank} have different results", tensor.label());
                return Err(Failure::Wrong(what));
            }
            target.write(&buffers[0])?;
            progress.inc(length as u64);
        }
    }
    target.commit()
}

/// Where each slice of a tensor begins and how long it is, in bytes. No slice splits an element.
fn slices(bytes: u64, ranks: usize) -> impl Iterator<Item = (u64, usize)> {
    let slice = slice_bytes(ranks);
    (0..bytes).step_by(slice).map(move |start| (start, (bytes - start).min(slice as u64) as usize))
}

/// Bytes of a full slice: whole elements of every type.
fn slice_bytes(ranks: usize) -> usize {
    (BUFFER_BYTES / ranks).max(LEAST_SLICE_BYTES).next_multiple_of(8)
}

/// Reads a slice of every rank's tensor.
fn read(files: &TensorFiles, tensor: &Tensor, start: u64, length: usize, buffers: &mut [Vec<u8>]) -> Outcome {
    for (rank, buffer) in buffers.iter_mut().enumerate() {
        buffer.resize(length, 0);
        files.read(rank, tensor, start, buffer)?;
    }
    Ok(())
}

/// On standard error, and only where that is a terminal.
fn progress_bar(bytes: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:40} {bytes}/{total_bytes} {bytes_per_sec}, {eta} left");
    let bar = ProgressBar::new(bytes).with_finish(ProgressFinish::AndClear);
    style.map_or(bar.clone(), |style| bar.with_style(style))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_cover_a_tensor_once_and_keep_elements_whole() {
        for (bytes, ranks) in
            [(0, 4), (1, 4), (8 << 30, 3), (BUFFER_BYTES as u64 * 2 + 16, 1), (5 << 20, 4096)]
        {
            let mut end = 0;
            for (start, length) in slices(bytes, ranks) {
                assert_eq!(start, end);
                assert!(length > 0 && start.is_multiple_of(8));
                end = start + length as u64;
            }
            assert_eq!(end, bytes);
        }
    }
}
