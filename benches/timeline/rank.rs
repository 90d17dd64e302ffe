//! One rank's part of the backward pass: its memory, its streams, its products.

use ringseal::Result;
use ringseal::cuda::{Device, DeviceBuffer, RankBuffers, Stream};
use ringseal::study::overlap::{Backward, Matrix};

use crate::cublas::{Blas, Elements, Factor};
use crate::gate::Closed;

/// A rank and its share of the batch.
pub(crate) struct Rank {
    pub(crate) device: Device,
    // Goes before its stream.
    blas: Blas,
    /// Runs the products.
    pub(crate) compute: Stream,
    /// Runs the all-reduces.
    pub(crate) communication: Stream,
    tokens: usize,
    /// Weights of all buckets, bf16, one bucket after the other.
    weights: DeviceBuffer,
    /// Where each bucket's weights begin in them, in bytes.
    weights_at: Vec<u64>,
    /// Each bucket's gradients, f32.
    gradients: Vec<DeviceBuffer>,
    /// What came in at a layer, and the gradient of what went out; the same for all layers.
    activations: [DeviceBuffer; 2],
    /// The gradient of what came in.
    passed_on: DeviceBuffer,
}

impl Rank {
    /// # Errors
    /// Those of allocating, and of [`Blas::new`].
    pub(crate) fn new(device: &Device, number: usize, backward: &Backward, tokens: usize) -> Result<Self> {
        let compute = Stream::new(device)?;
        let blas = Blas::new(device, &compute)?;
        let mut weights_at = Vec::new();
        let mut weights_bytes = 0;
        for bucket in &backward.buckets {
            weights_at.push(weights_bytes as u64);
            weights_bytes += (2 * bucket.elements).next_multiple_of(256);
        }
        let gradients = |bucket: &ringseal::study::overlap::Bucket| {
            let mut gradients = DeviceBuffer::new(device, 4 * bucket.elements)?;
            // Also where no product writes.
            gradients.fill(0, &compute)?;
            Ok(gradients)
        };
        let side = 2 * tokens * backward.longest_side();
        // Ranks have other data, so that averages are of different things.
        let noise = |bytes, seed: usize| noise(device, &compute, bytes, (seed + 3 * number) as u64);
        let rank = Self {
            device: device.clone(),
            communication: Stream::new(device)?,
            blas,
            tokens,
            weights: noise(weights_bytes, 0)?,
            weights_at,
            gradients: backward.buckets.iter().map(gradients).collect::<Result<_>>()?,
            activations: [noise(side, 1)?, noise(side, 2)?],
            passed_on: DeviceBuffer::new(device, side)?,
            compute,
        };
        rank.compute.synchronize()?;
        Ok(rank)
    }

    /// Makes the products that follow wait until the gate is open.
    ///
    /// # Errors
    /// [`Error::Cuda`](ringseal::Error::Cuda).
    pub(crate) fn wait_at(&self, gate: &Closed<'_>) -> Result<()> {
        self.blas.make_current()?;
        gate.hold(&self.compute)
    }

    /// Queues the products of a bucket's layers.
    ///
    /// # Errors
    /// As [`Blas::product`].
    pub(crate) fn backward(&self, bucket: usize, matrices: &[Matrix]) -> Result<()> {
        for matrix in matrices {
            let Matrix { offset, rows, columns } = *matrix;
            let tokens = self.tokens;
            let weights = self.weights.pointer() + self.weights_at[bucket] + 2 * offset as u64;
            let gradient = self.gradients[bucket].pointer() + 4 * offset as u64;
            let [came_in, went_out] = self.activations.each_ref().map(DeviceBuffer::pointer);
            let factor = |address, rows, transposed| Factor { address, rows, transposed };
            // A token is a column; with y = W x, the gradients of x and W are Wᵀ dy and dy xᵀ.
            // SAFETY: the matrix lies in its bucket, activations have room for the longest side; the buffers live in `self`,
            // whose streams are waited for before it is given up, and products of one stream run in order.
            unsafe {
                self.blas.product(
                    [columns, tokens, rows],
                    [factor(weights, rows, true), factor(went_out, rows, false)],
                    self.passed_on.pointer(),
                    Elements::Bf16,
                )?;
                self.blas.product(
                    [rows, columns, tokens],
                    [factor(went_out, rows, false), factor(came_in, columns, true)],
                    gradient,
                    Elements::F32,
                )?;
            }
        }
        Ok(())
    }

    /// A bucket's gradients, which are reduced in place.
    pub(crate) fn buffers(&self, bucket: usize) -> RankBuffers {
        let address = self.gradients[bucket].pointer();
        RankBuffers { input: address, output: address }
    }

    /// A bucket's gradients as they are now.
    pub(crate) fn gradients(&self, bucket: usize) -> Result<Vec<u8>> {
        self.gradients[bucket].to_host(&self.compute)
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.compute.synchronize();
        let _ = self.communication.synchronize();
    }
}

/// Device memory full of bf16 numbers of both signs with magnitudes from 2^-7 to 2^-6: products of zeros take less energy than
/// those of a training, and run at another clock.
fn noise(device: &Device, stream: &Stream, bytes: usize, seed: u64) -> Result<DeviceBuffer> {
    let mut buffer = DeviceBuffer::new(device, bytes)?;
    let mut state = seed;
    let mut number = || {
        // SplitMix64 (Steele, Lea, Flood 2014).
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        // Sign and fraction at random, the exponent of 2^-7.
        (((mixed >> 40) as u16 & 0x807f) | 0x3c00).to_le_bytes()
    };
    let first: Vec<u8> = (0..bytes.min(4 << 20) / 2).flat_map(|_| number()).collect();
    buffer.write(0, &first, stream)?;
    let mut filled = first.len();
    while filled > 0 && filled < bytes {
        let more = filled.min(bytes - filled);
        // SAFETY: both ranges lie in the buffer and don't overlap; it is not used before the stream has passed.
        unsafe { stream.copy(buffer.pointer() + filled as u64, buffer.pointer(), more)? };
        filled += more;
    }
    Ok(buffer)
}
