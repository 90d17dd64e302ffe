//! Groups that choose their algorithm: whatever they choose, the sums are right, and the calibration can be looked at.

use std::slice::from_ref;
use std::time::Duration;

use bytemuck::{cast_slice, cast_slice_mut};
use ringseal::channel::{Crypto, GroupSecret, KeyLength};
use ringseal::collective::Request;
use ringseal::cuda::{AutoGroup, Collectives, Device, DeviceBuffer, GpuOptions, RankBuffers, Stream};
use ringseal::study::calibration::Calibration;
use ringseal::{Dtype, ReduceOp};

use crate::ring::places;
use crate::support::{GpuTest, Outcome, ensure, image};
use crate::turns::alone;

pub(crate) const TESTS: &[GpuTest] =
    &[("auto::plain_sums_are_right_at_every_length", |gpu| sums(gpu, Crypto::None))];

/// For these the kernels must have AES-GCM.
pub(crate) const SEALED_TESTS: &[GpuTest] =
    &[("auto::sealed_sums_are_right_at_every_length", |gpu| sums(gpu, Crypto::Gcm(KeyLength::Aes256)))];

const LONGEST: usize = 4 << 20;

/// Element `at` of a rank.
fn value(rank: usize, at: usize) -> u32 {
    (at as u32).wrapping_mul(0x9e37_79b9) ^ (rank as u32) << 20
}

fn sums(gpu: &Device, crypto: Crypto) -> Outcome {
    let _alone = alone();
    for ranks in [1, 2, 3, 4] {
        let devices = places(from_ref(gpu), ranks);
        let options = GpuOptions { crypto, max_bytes: LONGEST, ..GpuOptions::default() };
        let mut group = AutoGroup::new(&devices, image(gpu)?, &GroupSecret::random()?, options.clone())?;
        let chosen = group.choices().longest_of_each(LONGEST);
        match group.calibrated() {
            None => ensure!(ranks == 1, "{ranks} ranks were not calibrated"),
            Some(calibrated) => {
                ensure!(calibrated.observations.iter().all(|one| one.us > 0.0), "{calibrated:?}");
                let text = calibrated.calibration.to_json();
                ensure!(Calibration::from_json(&text)? == calibrated.calibration, "{text}");
                // A length is finished once it is begun.
                ensure!(calibrated.spent < Duration::from_secs(2), "calibrating took {:?}", calibrated.spent);
                let candidates = options.candidates(ranks);
                ensure!(chosen.iter().all(|(name, _)| candidates.contains(name)), "{:?}", group.choices());
            }
        }
        let streams = devices.iter().map(Stream::new).collect::<Result<Vec<_>, _>>()?;
        let all: Vec<_> = streams.iter().collect();
        let mut vectors =
            devices.iter().map(|device| DeviceBuffer::new(device, LONGEST)).collect::<Result<Vec<_>, _>>()?;
        // The ends of the ranges, and beyond.
        let ends = chosen.iter().flat_map(|(_, bytes)| [bytes / 4, bytes / 4 + 1]);
        let counts = [0, 1, 1000].into_iter().chain(ends).filter(|count| 4 * count <= LONGEST);
        for count in counts.collect::<Vec<_>>() {
            for (rank, vector) in vectors.iter_mut().enumerate() {
                let input: Vec<_> = (0..count).map(|at| value(rank, at)).collect();
                vector.write(0, cast_slice(&input), &streams[rank])?;
            }
            let place =
                |vector: &DeviceBuffer| RankBuffers { input: vector.pointer(), output: vector.pointer() };
            let buffers: Vec<_> = vectors.iter().map(place).collect();
            let sum = Request::AllReduce(ReduceOp::Sum);
            // SAFETY: the vectors hold `count` elements, and live until the streams are waited for.
            unsafe { group.run(sum, &buffers, count, Dtype::U32, &all)? };
            streams.iter().try_for_each(Stream::synchronize)?;
            group.outcome()?;
            let total = |at: usize| (0..ranks).fold(0_u32, |sum, rank| sum.wrapping_add(value(rank, at)));
            let right: Vec<_> = (0..count).map(total).collect();
            let mut output = vec![0_u32; count];
            for (rank, vector) in vectors.iter().enumerate() {
                vector.read(0, cast_slice_mut(&mut output), &streams[rank])?;
                ensure!(output == right, "{ranks} ranks, {count} elements: rank {rank} has other sums");
            }
        }
        group.rekey()?;
        ensure!(!group.is_poisoned(), "poisoned by a new session");
    }
    Ok(())
}
