//! The GPU kernels' arithmetic, chunks and schedule, run on the CPU, are those of the host: a collective gives the same
//! bits wherever it runs.

use ringseal::collective::schedule::{Operand, Outgoing, Schedule};
use ringseal::collective::{Algorithm, Collective, Partition};
use ringseal::{Dtype, ReduceOp};
use ringseal_kernels::{reduce, step};

use crate::group::inputs;
use crate::model::reduced;

#[test]
fn arithmetic() {
    for dtype in Dtype::ALL {
        for op in ReduceOp::ALL {
            let inputs = inputs(dtype, 32_000 / dtype.size(), 2, op as u64);
            let wanted = reduced(Algorithm::Ring, false, dtype, op, &inputs);
            let code = reduce::reduction(dtype as u32, op as u32);
            for (at, wanted) in wanted.as_chunks::<16>().0.iter().enumerate() {
                let quad = |rank: usize| {
                    let bytes = &inputs[rank][16 * at..16 * at + 16];
                    let words: Vec<_> =
                        bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
                    <[u32; 4]>::try_from(words).unwrap()
                };
                let wanted = wanted.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word));
                let wanted: Vec<_> = wanted.collect();
                let got = reduce::finish(code, 2, reduce::combine(code, quad(0), quad(1)));
                assert_eq!(got[..], wanted, "{dtype:?} {op:?} of {:x?} and {:x?}", quad(0), quad(1));
                if reduce::is_common(code) {
                    let common = reduce::combine_common(code, quad(0), quad(1));
                    assert_eq!(reduce::finish_common(code, 2, common)[..], wanted, "{dtype:?} {op:?}");
                }
            }
        }
    }
}

#[test]
fn chunks() {
    for dtype in Dtype::ALL {
        for ranks in 1..=9 {
            // Beyond 2^31 and 2^32 bytes too (cases.md 22).
            for count in (0..100).chain([1023, 65_537, (3 << 30) + 1, (5 << 32) + 7]) {
                for chunk in 0..ranks {
                    let host = Partition::aligned(count, ranks, dtype).range(chunk);
                    let bytes = (count * dtype.size()) as u64;
                    let (offset, length) = step::chunk(chunk as u32, ranks as u32, bytes);
                    let host = (host.start * dtype.size(), host.len() * dtype.size());
                    assert_eq!((offset as usize, length as usize), host, "{dtype:?} {count} {chunk}/{ranks}");
                }
            }
        }
    }
}

#[test]
fn ring_schedules() {
    let chunk = |chunk: u32| (chunk.into(), 1);
    for (algorithm, relay) in [(Algorithm::Ring, false), (Algorithm::RelayRing, true)] {
        for ranks in 1..=9 {
            let n = ranks as u32;
            schedule(Collective::AllReduce, algorithm, ranks, |rank, index| {
                step::ring_all_reduce(rank, n, index, relay, chunk)
            });
            schedule(Collective::ReduceScatter, algorithm, ranks, |rank, index| {
                step::ring_reduce_scatter(rank, n, index, chunk)
            });
            schedule(Collective::AllGather, algorithm, ranks, |rank, index| {
                step::ring_all_gather(rank, n, index, relay, chunk)
            });
            for root in 0..ranks {
                schedule(Collective::Broadcast { root }, algorithm, ranks, |rank, _| {
                    step::ring_broadcast(rank, n, root as u32, relay, 1)
                });
            }
        }
    }
}

/// Compares a schedule with the kernels' steps: `kernel` gives one of them for a rank and a number.
fn schedule(
    collective: Collective,
    algorithm: Algorithm,
    ranks: usize,
    kernel: impl Fn(u32, u32) -> step::Step,
) {
    let schedule = Schedule::new(collective, algorithm, ranks);
    for (rank, program) in schedule.programs.iter().enumerate() {
        // What the predecessor sends, in this order.
        let predecessor = &schedule.programs[(rank + ranks - 1) % ranks];
        let mut sent = (0..).zip(predecessor).filter(|(_, step)| step.outgoing != Outgoing::Nothing);
        for (number, host) in program.iter().enumerate() {
            let kernel = kernel(rank as u32, number as u32);
            let origin = host.operands.iter().find_map(|operand| match operand {
                Operand::Local => None,
                Operand::Received(origin) => Some(*origin),
            });
            let sends = host.outgoing != Outgoing::Nothing;
            let actions = [
                (origin.is_some(), step::RECEIVE),
                (host.operands.len() == 2, step::REDUCE),
                (host.finish, step::FINISH),
                (host.store, step::STORE),
                (sends, step::SEND),
                (matches!(host.outgoing, Outgoing::Forward(_)), step::FORWARD),
            ];
            let wanted: u32 = actions.iter().filter(|(on, _)| *on).map(|(_, action)| action).sum();
            let what = format!("{collective:?}, {algorithm:?}, rank {rank} of {ranks}, step {number}");
            assert_eq!((kernel.actions, kernel.offset), (wanted, host.chunk as u64), "{what}");
            assert!(!sends || kernel.sends == number as u32, "{what}");
            if let Some(origin) = origin {
                let sealed = (kernel.sealed_by as usize, kernel.sealed_in as usize);
                assert_eq!(sealed, (origin.sealed_by, origin.sealed_in), "{what}");
                let (message, step) = sent.next().expect("as many messages as are awaited");
                assert_eq!((kernel.receives, host.chunk), (message, step.chunk), "{what}");
            }
        }
    }
}
