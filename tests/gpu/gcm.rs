//! AES-GCM of the CUDA backend: the published vectors, and batches bit for bit against RustCrypto on the CPU.

use std::error::Error;
use std::num::NonZeroUsize;

use ringseal::aead::{Aead, AesKey, Iv, Tag};
use ringseal::backend::cuda::Cuda;
use ringseal::backend::{self, Backend, Record};
use ringseal::cuda::Device;
use ringseal::vectors;

use crate::support::{GpuTest, Outcome, ensure, kernels, random, random_bytes};

pub(crate) const TESTS: &[GpuTest] = &[
    ("gcm::published_vectors", published_vectors),
    ("gcm::batches_of_every_shape", every_shape),
    ("gcm::every_length_to_4097", every_length),
    ("gcm::more_records_than_masks", many_records),
    ("gcm::one_long_message", one_long_message),
    ("gcm::forgeries_leave_zeros", forgeries),
];

/// Whether the kernels under test have GCM at all.
pub(crate) fn available(device: &Device) -> bool {
    kernels(device).is_ok_and(|kernels| kernels.has_gcm())
}

/// One key on the GPU and on the CPU.
struct Pair {
    gpu: Aead,
    cpu: Aead,
}

impl Pair {
    fn random(device: &Device, key_bytes: usize) -> Result<Self, Box<dyn Error>> {
        let key = AesKey::from_bytes(&random::<32>()?[..key_bytes])?;
        let on = |backend: &dyn Backend| Aead::new(backend, &key);
        Ok(Self { gpu: on(&Cuda::new(&kernels(device)?))?, cpu: on(backend::by_name("cpu")?.as_ref())? })
    }
}

#[derive(Clone)]
struct Message {
    iv: Vec<u8>,
    aad: Vec<u8>,
    data: Vec<u8>,
}

impl Message {
    fn random(iv: usize, aad: usize, bytes: usize) -> Result<Self, Box<dyn Error>> {
        Ok(Self { iv: random_bytes(iv)?, aad: random_bytes(aad)?, data: random_bytes(bytes)? })
    }
}

fn records(messages: &mut [Message]) -> ringseal::Result<Vec<Record<'_>>> {
    messages.iter_mut().map(|Message { iv, aad, data }| Ok(Record { iv: Iv::new(iv)?, aad, data })).collect()
}

fn seal(aead: &Aead, messages: &mut [Message]) -> ringseal::Result<Vec<Tag>> {
    aead.seal_records(&mut records(messages)?)
}

/// Seals on both, compares, and opens on the GPU what was sealed there.
fn compare(pair: &Pair, messages: Vec<Message>) -> Outcome {
    let (mut gpu, mut cpu) = (messages.clone(), messages.clone());
    let tags = seal(&pair.gpu, &mut gpu)?;
    let expected = seal(&pair.cpu, &mut cpu)?;
    for (index, message) in messages.iter().enumerate() {
        let shape = || {
            let Message { iv, aad, data } = message;
            format!("message {index}: IV of {}, {} bytes of AAD, {} of text", iv.len(), aad.len(), data.len())
        };
        ensure!(gpu[index].data == cpu[index].data, "ciphertext of {}", shape());
        ensure!(tags[index] == expected[index], "tag of {}", shape());
    }
    let verdicts = pair.gpu.open_records(&mut records(&mut gpu)?, &tags)?;
    ensure!(verdicts.iter().all(|verified| *verified), "a good record was refused");
    ensure!(gpu.iter().zip(&messages).all(|(opened, sent)| opened.data == sent.data), "another plaintext");
    Ok(())
}

fn published_vectors(device: &Device) -> Outcome {
    let report = vectors::run(&Cuda::new(&kernels(device)?), NonZeroUsize::MIN)?;
    ensure!((report.failed(), report.skipped()) == (0, 0), "{report}");
    println!("{report}");
    Ok(())
}

fn every_shape(device: &Device) -> Outcome {
    for key_bytes in [16, 24, 32] {
        let pair = Pair::random(device, key_bytes)?;
        let mut messages = Vec::new();
        for bytes in [0, 1, 15, 16, 17, 4096, 16_383, 16_384, 16_385, 65_536, 262_144, 262_145, 300_007] {
            for aad in [0, 1, 16, 48, 63, 2048] {
                for iv in [12, 1, 16, 129] {
                    messages.push(Message::random(iv, aad, bytes)?);
                }
            }
        }
        compare(&pair, messages)?;
    }
    Ok(())
}

fn every_length(device: &Device) -> Outcome {
    for key_bytes in [16, 24, 32] {
        let pair = Pair::random(device, key_bytes)?;
        let messages: Result<_, _> = (0..=4097).map(|bytes| Message::random(12, 48, bytes)).collect();
        compare(&pair, messages?)?;
    }
    Ok(())
}

/// A block prepares the tag masks of 512 records at a time: enough records that every block does it again.
fn many_records(device: &Device) -> Outcome {
    let count = 513 * device.multiprocessors()? as usize + 7;
    let messages: Result<_, _> = (0..count).map(|_| Message::random(12, 13, 40)).collect();
    compare(&Pair::random(device, 16)?, messages?)
}

fn one_long_message(device: &Device) -> Outcome {
    for key_bytes in [16, 32] {
        compare(&Pair::random(device, key_bytes)?, vec![Message::random(12, 48, (64 << 20) + 5)?])?;
    }
    Ok(())
}

/// Of a batch, every other record has one bit changed: in the text, the tag, the additional data or the IV.
fn forgeries(device: &Device) -> Outcome {
    let pair = Pair::random(device, 32)?;
    let messages: Result<Vec<_>, _> =
        (0..1000).map(|index| Message::random(12, 20, 100 * index + 1)).collect();
    let messages = messages?;
    let mut sealed = messages.clone();
    let mut tags = seal(&pair.gpu, &mut sealed)?;
    for index in (0..sealed.len()).step_by(2) {
        let [place, bit] = random::<2>()?.map(usize::from);
        let Message { iv, aad, data } = &mut sealed[index];
        let target: &mut [u8] = match index / 2 % 4 {
            0 => data,
            1 => &mut tags[index],
            2 => aad,
            _ => iv,
        };
        let at = place % target.len();
        target[at] ^= 1 << (bit % 8);
    }
    let verdicts = pair.gpu.open_records(&mut records(&mut sealed)?, &tags)?;
    for (index, verified) in verdicts.into_iter().enumerate() {
        ensure!(
            verified == (index % 2 == 1),
            "record {index} was {}",
            if verified { "accepted" } else { "refused" }
        );
        let expected =
            if verified { messages[index].data.clone() } else { vec![0; messages[index].data.len()] };
        ensure!(sealed[index].data == expected, "text of record {index}");
    }
    Ok(())
}
