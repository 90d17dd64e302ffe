//! A schedule as the list of steps that one thread puts on the ranks' streams, in an order in which every message is sent
//! before it is awaited.

use crate::collective::schedule::{Operand, Outgoing, Schedule};

/// What every rank does, in an order in which it can be queued.
#[derive(Debug)]
pub(super) struct Plan {
    /// Chunks that a vector is cut into.
    pub(super) chunks: usize,
    /// The steps of all ranks.
    pub(super) works: Vec<Work>,
    /// Every reception, in the order of the steps: what follows from one comes later.
    pub(super) receptions: Vec<Reception>,
    /// Messages that each rank receives.
    pub(super) slots: Vec<usize>,
}

/// One step of one rank.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) rank: usize,
    /// By the rank's own count, as nonces have it.
    pub(super) step: usize,
    pub(super) chunk: usize,
    /// What is combined, in this order.
    pub(super) sources: Vec<Source>,
    /// An average is divided now.
    pub(super) finish: bool,
    /// The result goes to the output.
    pub(super) store: bool,
    /// Who else gets it, sealed once: ranks, and their slots for it.
    pub(super) sends: Vec<(usize, usize)>,
}

/// An operand.
#[derive(Debug)]
pub(super) enum Source {
    /// The rank's input.
    Local,
    /// This entry of [`Plan::receptions`].
    Received(usize),
}

/// A message, as its receiver knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reception {
    /// The receiver.
    pub(super) rank: usize,
    /// Its slot.
    pub(super) slot: usize,
    /// The sender, which is who sealed it.
    pub(super) from: usize,
    /// The sender's step.
    pub(super) step: usize,
}

impl Plan {
    /// Orders a schedule. Nothing is forwarded as it came: who would, seals anew, as in the published structure.
    pub(super) fn new(schedule: &Schedule) -> Self {
        let ranks = schedule.ranks();
        let (mut works, mut receptions) = (Vec::new(), Vec::<Reception>::new());
        let mut slots = vec![0; ranks];
        // Sent and not received yet.
        let mut under_way = Vec::<(Reception, usize)>::new();
        let mut next = vec![0; ranks];
        loop {
            let before = works.len();
            for (rank, next) in next.iter_mut().enumerate() {
                let Some(step) = schedule.programs[rank].get(*next) else { continue };
                let senders = step.operands.iter().filter_map(|operand| match operand {
                    Operand::Local => None,
                    Operand::Received(origin) => Some(origin.from),
                });
                // Between two ranks messages keep their order, so the first of the chunk is the one.
                let awaited: Option<Vec<usize>> = senders
                    .map(|from| {
                        under_way.iter().position(|(message, chunk)| {
                            (message.rank, message.from, *chunk) == (rank, from, step.chunk)
                        })
                    })
                    .collect();
                let Some(awaited) = awaited else { continue };
                let mut received = awaited.iter().map(|&at| under_way[at].0).collect::<Vec<_>>().into_iter();
                let sources = step.operands.iter().map(|operand| match (operand, received.as_slice()) {
                    (Operand::Received(_), [_, ..]) => {
                        receptions.extend(received.next());
                        Source::Received(receptions.len() - 1)
                    }
                    _ => Source::Local,
                });
                let sources = sources.collect();
                let mut at = 0;
                under_way.retain(|_| {
                    at += 1;
                    !awaited.contains(&(at - 1))
                });
                let peers = match &step.outgoing {
                    Outgoing::Nothing => &[][..],
                    Outgoing::Seal(peers) | Outgoing::Forward(peers) => peers,
                };
                let mut sends = Vec::new();
                for &peer in peers {
                    let message = Reception { rank: peer, slot: slots[peer], from: rank, step: *next };
                    sends.push((peer, slots[peer]));
                    slots[peer] += 1;
                    under_way.push((message, step.chunk));
                }
                works.push(Work {
                    rank,
                    step: *next,
                    chunk: step.chunk,
                    sources,
                    finish: step.finish,
                    store: step.store,
                    sends,
                });
                *next += 1;
            }
            if works.len() == before {
                break;
            }
        }
        Self { chunks: schedule.chunks, works, receptions, slots }
    }

    /// Most messages that a rank seals.
    pub(super) fn seals(&self) -> usize {
        let of = |rank| self.works.iter().filter(|work| work.rank == rank && !work.sends.is_empty()).count();
        (0..self.slots.len()).map(of).max().unwrap_or(0)
    }

    /// The ranks that `rank` hears from.
    pub(super) fn heard(&self, rank: usize) -> Vec<usize> {
        let mut heard: Vec<_> = self
            .receptions
            .iter()
            .filter(|reception| reception.rank == rank)
            .map(|reception| reception.from)
            .collect();
        heard.sort_unstable();
        heard.dedup();
        heard
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::{Algorithm, Collective};

    /// Every step is there, and what a step awaits was sent before, into a slot of its own.
    #[test]
    fn messages_are_sent_before_they_are_awaited() {
        for ranks in 1..=16 {
            for algorithm in Algorithm::ALL {
                let schedule = Schedule::new(Collective::AllReduce, algorithm, ranks);
                let plan = Plan::new(&schedule);
                let steps: usize = schedule.programs.iter().map(Vec::len).sum();
                assert_eq!(plan.works.len(), steps, "{algorithm:?}, {ranks} ranks");
                let mut sent = Vec::new();
                for work in &plan.works {
                    for source in &work.sources {
                        if let Source::Received(number) = source {
                            let reception = plan.receptions[*number];
                            assert_eq!(reception.rank, work.rank);
                            let place = sent.iter().position(|&message| message == (reception, work.chunk));
                            sent.swap_remove(place.expect("awaited, but not sent"));
                        }
                    }
                    for &(rank, slot) in &work.sends {
                        sent.push((Reception { rank, slot, from: work.rank, step: work.step }, work.chunk));
                    }
                }
                assert!(sent.is_empty());
                let mut slots: Vec<_> = plan.receptions.iter().map(|r| (r.rank, r.slot)).collect();
                slots.sort_unstable();
                let all = plan.slots.iter().enumerate();
                assert!(
                    slots.into_iter().eq(all.flat_map(|(rank, &n)| (0..n).map(move |slot| (rank, slot))))
                );
            }
        }
    }

    /// 4(n-1) operations of each rank in a ring (arXiv 2501.11771).
    #[test]
    fn operations_are_as_published() {
        for ranks in 1..=16 {
            let plan = Plan::new(&Schedule::new(Collective::AllReduce, Algorithm::Ring, ranks));
            for rank in 0..ranks {
                let works = plan.works.iter().filter(|work| work.rank == rank);
                let seals = works.filter(|work| !work.sends.is_empty()).count();
                let opens = plan.receptions.iter().filter(|reception| reception.rank == rank).count();
                assert_eq!((seals, opens), (2 * (ranks - 1), 2 * (ranks - 1)));
            }
            assert_eq!(plan.seals(), 2 * (ranks - 1));
        }
    }
}
