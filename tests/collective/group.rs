//! Groups of ranks on threads, and data for them.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use half::{bf16, f16};
use ringseal::Dtype;
use ringseal::channel::GroupSecret;
use ringseal::collective::{Communicator, Options};
use ringseal::transport::Transport;
use ringseal::transport::memory::{Tap, tapped_network};

/// Long enough for a loaded machine: only what must time out does.
pub(crate) const PATIENT: Duration = Duration::from_secs(60);

/// Records so short that small vectors have several.
pub(crate) fn options() -> Options {
    Options { record_bytes: 64, timeout: PATIENT, ..Options::default() }
}

pub(crate) fn secret() -> GroupSecret {
    GroupSecret::from_bytes([0x5e; 32])
}

pub(crate) fn group(ranks: usize, options: &Options) -> Vec<Communicator> {
    Communicator::in_process(ranks, &secret(), options).unwrap()
}

pub(crate) fn tapped_group(ranks: usize, options: &Options, tap: Arc<dyn Tap>) -> Vec<Communicator> {
    let links = tapped_network(ranks, tap);
    let links = links.into_iter().map(|link| Box::new(link) as Box<dyn Transport>).collect();
    Communicator::in_process_over(links, &secret(), options).unwrap()
}

/// Does `work` on every rank at once; the results by rank.
pub(crate) fn on_all<R: Send>(
    group: &mut [Communicator],
    work: impl Fn(&mut Communicator) -> R + Sync,
) -> Vec<R> {
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = group.iter_mut().map(|rank| scope.spawn(move || work(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// As [`on_all`], with a buffer for each rank.
pub(crate) fn on_each<T: Send, R: Send>(
    group: &mut [Communicator],
    buffers: &mut [T],
    work: impl Fn(&mut Communicator, &mut T) -> R + Sync,
) -> Vec<R> {
    thread::scope(|scope| {
        let work = &work;
        let pairs = group.iter_mut().zip(buffers);
        let threads: Vec<_> = pairs.map(|(rank, buffer)| scope.spawn(move || work(rank, buffer))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Numbers that look random and are the same each time (Steele, Lea, Flood: SplitMix64).
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    pub(crate) fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }
}

/// `count` elements as bytes. Floats are mostly of like size, so that the order of summation shows, with infinities,
/// NaNs, signed zeros, and the largest and smallest numbers in between. Integers are any.
pub(crate) fn data(dtype: Dtype, count: usize, seed: u64) -> Vec<u8> {
    let mut numbers = Numbers(seed.wrapping_mul(0x2545_f491_4f6c_dd1d));
    (0..count).flat_map(|_| element(dtype, numbers.draw())).collect()
}

fn element(dtype: Dtype, random: u64) -> Vec<u8> {
    let special = random.is_multiple_of(64).then_some((random >> 8) as usize % 8);
    let uniform = (random >> 11) as f64 / (1u64 << 50) as f64 - 4.0;
    macro_rules! float {
        ($float:ty, $value:expr) => {{
            let specials: [$float; 8] = [
                <$float>::NAN,
                <$float>::INFINITY,
                <$float>::NEG_INFINITY,
                -<$float>::from_bits(0),
                <$float>::from_bits(0),
                <$float>::MAX,
                <$float>::from_bits(1),
                // A NaN with sign and payload.
                <$float>::from_bits(<$float>::NEG_INFINITY.to_bits() | 5),
            ];
            special.map_or($value, |special| specials[special]).to_le_bytes().to_vec()
        }};
    }
    match dtype {
        Dtype::F64 => float!(f64, uniform),
        Dtype::F32 => float!(f32, uniform as f32),
        Dtype::F16 => float!(f16, f16::from_f64(uniform)),
        Dtype::Bf16 => float!(bf16, bf16::from_f64(uniform)),
        _ => random.to_le_bytes()[..dtype.size()].to_vec(),
    }
}

/// The inputs of all ranks.
pub(crate) fn inputs(dtype: Dtype, count: usize, ranks: usize, seed: u64) -> Vec<Vec<u8>> {
    (0..ranks).map(|rank| data(dtype, count, seed << 8 | rank as u64)).collect()
}
