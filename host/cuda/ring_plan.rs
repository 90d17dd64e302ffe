//! Collectives as tables of the kernels' steps: of the ring's, or of the mesh's.

use std::ops::Range;

use ringseal_kernels::step::{
    SEND, Step, exchange, ring_all_gather, ring_all_reduce, ring_broadcast, ring_reduce_scatter,
};

use super::mesh_plan::{Program, programs};
use crate::Dtype;
use crate::collective::schedule::chunks;
use crate::collective::{Algorithm, Collective, Partition};

/// Offsets that are multiples of this leave quads whole.
const QUAD: usize = 16;

/// What one launch does of a rank's part in a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// All of it.
    Whole,
    /// One step; others of the same collective follow, and the closing one at last.
    Step {
        /// Its number.
        index: usize,
        /// Whether it is the rank's first.
        first: bool,
    },
    /// Counts the collective, and wipes its result if a rank has failed.
    Close,
}

impl Part {
    /// Whether the collective begins with it: of an empty one the closing launch is the only one.
    pub(super) fn is_first(self, plan: &Plan) -> bool {
        match self {
            Self::Whole => true,
            Self::Step { first, .. } => first,
            Self::Close => plan.bytes == 0,
        }
    }

    /// Whether it ends with it.
    pub(super) fn is_last(self) -> bool {
        !matches!(self, Self::Step { .. })
    }
}

/// A collective on vectors of one length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Plan {
    pub(super) collective: Collective,
    algorithm: Algorithm,
    ranks: usize,
    /// Of the whole vector.
    pub(super) bytes: usize,
    /// Chunks begin at multiples of this.
    grain: usize,
}

impl Plan {
    /// For vectors of `bytes` bytes, whole elements of type `dtype`. Chunks are the CPU's.
    pub(super) fn new(
        collective: Collective,
        algorithm: Algorithm,
        ranks: usize,
        bytes: usize,
        dtype: Dtype,
    ) -> Self {
        let grain = match collective {
            Collective::AllReduce | Collective::Broadcast { .. } => QUAD,
            Collective::ReduceScatter | Collective::AllGather => dtype.size(),
        };
        Self { collective, algorithm, ranks, bytes, grain }
    }

    /// Of all collectives, on the longest vectors and with chunks as long as any: what mailboxes must hold.
    pub(super) fn longest_of_each(algorithm: Algorithm, ranks: usize, bytes: usize) -> [Self; 4] {
        let broadcast = Collective::Broadcast { root: 0 };
        [Collective::AllReduce, Collective::ReduceScatter, Collective::AllGather, broadcast]
            .map(|collective| Self { collective, algorithm, ranks, bytes, grain: QUAD })
    }

    /// Whether the mesh's kernels do the collectives: ranks speak to others than their neighbours on the ring. Of two ranks an
    /// exchange is the ring's.
    pub(super) const fn meshes(algorithm: Algorithm, ranks: usize) -> bool {
        match algorithm {
            Algorithm::Ring | Algorithm::RelayRing => false,
            Algorithm::Exchange => ranks > 2,
            Algorithm::Direct | Algorithm::Tree => ranks > 1,
        }
    }

    /// The bytes of chunk `index`.
    fn chunk(&self, index: usize) -> Range<usize> {
        let chunks = chunks(self.collective, self.algorithm, self.ranks);
        Partition::in_units(self.bytes, chunks, self.grain).range(index)
    }

    /// Bytes of the longest chunk.
    pub(super) fn longest_chunk(&self) -> usize {
        self.chunk(0).len()
    }

    /// Messages that a rank receives at most, each in a place of its own.
    pub(super) fn messages(&self) -> usize {
        match (self.collective, self.algorithm) {
            (Collective::AllReduce, Algorithm::Exchange) => self.ranks - 1,
            // From both children and the parent.
            (Collective::AllReduce, Algorithm::Tree) => 3.min(self.ranks - 1),
            (Collective::AllReduce, _) => 2 * (self.ranks - 1),
            (Collective::ReduceScatter | Collective::AllGather, _) => self.ranks - 1,
            (Collective::Broadcast { .. }, _) => 1.min(self.ranks - 1),
        }
    }

    /// Chunks that are sealed by the rank that seals most.
    pub(super) fn seals(&self) -> usize {
        match (self.collective, self.algorithm) {
            _ if self.ranks == 1 => 0,
            (Collective::AllReduce, Algorithm::RelayRing | Algorithm::Direct) => self.ranks,
            (Collective::AllReduce, Algorithm::Tree | Algorithm::Exchange) => 1,
            (Collective::AllGather, Algorithm::Ring) => self.messages(),
            (Collective::AllGather, _) => 1,
            _ => self.messages(),
        }
    }

    /// A power of two up to 16 that divides all chunks' offsets.
    pub(super) fn unit(&self) -> usize {
        let chunks = chunks(self.collective, self.algorithm, self.ranks);
        let quads =
            self.grain == QUAD || (0..chunks).all(|index| self.chunk(index).start.is_multiple_of(QUAD));
        if quads { QUAD } else { self.grain }
    }

    /// Whether a rank can have all that it gets before its successor has started.
    pub(super) fn may_run_ahead(&self) -> bool {
        self.collective != Collective::AllReduce && self.ranks > 1 && self.bytes > 0
    }

    /// The part of the vector that rank `rank` gives.
    pub(super) fn given(&self, rank: usize) -> Range<usize> {
        match self.collective {
            Collective::AllGather => self.chunk(rank),
            _ => 0..self.bytes,
        }
    }

    /// The part of the vector that rank `rank` gets.
    pub(super) fn wanted(&self, rank: usize) -> Range<usize> {
        match self.collective {
            Collective::ReduceScatter => self.chunk(rank),
            _ => 0..self.bytes,
        }
    }

    /// How many rounds of launches the steps take when each is a launch, see [`Self::step_in`].
    pub(super) fn rounds(&self) -> usize {
        match self.collective {
            _ if self.bytes == 0 => 0,
            Collective::AllReduce if self.algorithm == Algorithm::Exchange => self.ranks,
            Collective::AllReduce => 2 * self.ranks - 1,
            Collective::ReduceScatter | Collective::AllGather | Collective::Broadcast { .. } => self.ranks,
        }
    }

    /// The step that rank `rank` does in round `round`, if any. What it receives was sent in an earlier round.
    pub(super) fn step_in(&self, rank: usize, round: usize) -> Option<Part> {
        let index = match self.collective {
            // The vector passes one rank after the other.
            Collective::Broadcast { root } => {
                ((rank + self.ranks - root) % self.ranks == round).then_some(0)?
            }
            _ => round,
        };
        (round < self.rounds()).then_some(Part::Step { index, first: index == 0 })
    }

    /// What rank `rank` does by the mesh's kernels; nothing for an empty vector.
    pub(super) fn program(&self, rank: usize) -> Program {
        if self.bytes == 0 {
            return Program::default();
        }
        let mut program = programs(self.collective, self.algorithm, self.ranks).swap_remove(rank);
        for step in program.steps.iter_mut().filter(|step| step.bytes > 0) {
            let chunk = self.chunk(step.offset as usize);
            (step.offset, step.bytes) = (chunk.start as u64, chunk.len() as u64);
        }
        program
    }

    /// The message that rank `rank`, whose steps these are, sends to its successor in round `round`, and its bytes, if there
    /// are any.
    pub(super) fn sent_in(&self, steps: &[Step], rank: usize, round: usize) -> Option<(u32, u64)> {
        let Some(Part::Step { index, .. }) = self.step_in(rank, round) else { return None };
        let step = steps.get(index)?;
        (step.actions & SEND != 0 && step.bytes > 0).then_some((step.sends, step.bytes))
    }

    /// The steps of rank `rank` by the ring's kernels; none for an empty vector. An exchange's other collectives are the
    /// ring's: of two ranks they have the same operations and the same bits as by any other algorithm.
    pub(super) fn steps(&self, rank: usize) -> Vec<Step> {
        if self.bytes == 0 {
            return Vec::new();
        }
        let chunk = |index: u32| {
            let range = self.chunk(index as usize);
            (range.start as u64, range.len() as u64)
        };
        let (rank, ranks, relay) = (rank as u32, self.ranks as u32, self.algorithm == Algorithm::RelayRing);
        match self.collective {
            Collective::AllReduce if self.algorithm == Algorithm::Exchange && ranks > 1 => {
                (0..ranks).map(|index| exchange(rank, index, self.bytes as u64)).collect()
            }
            Collective::AllReduce => {
                (0..2 * ranks - 1).map(|index| ring_all_reduce(rank, ranks, index, relay, chunk)).collect()
            }
            Collective::ReduceScatter => {
                (0..ranks).map(|index| ring_reduce_scatter(rank, ranks, index, chunk)).collect()
            }
            Collective::AllGather => {
                (0..ranks).map(|index| ring_all_gather(rank, ranks, index, relay, chunk)).collect()
            }
            Collective::Broadcast { root } => {
                vec![ring_broadcast(rank, ranks, root as u32, relay, self.bytes as u64)]
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use ringseal_kernels::step::RECEIVE;

    use super::*;
    use crate::collective::schedule::Schedule;

    const COLLECTIVES: [Collective; 4] = [
        Collective::AllReduce,
        Collective::ReduceScatter,
        Collective::AllGather,
        Collective::Broadcast { root: 0 },
    ];

    #[test]
    fn seals_are_those_of_the_schedule() {
        for collective in COLLECTIVES {
            for algorithm in Algorithm::ALL {
                for ranks in 1..=9 {
                    let schedule = Schedule::new(collective, algorithm, ranks);
                    let most = (0..ranks).map(|rank| schedule.operations(rank).seals).max();
                    let plan = Plan::new(collective, algorithm, ranks, 1000, Dtype::F32);
                    assert_eq!(Some(plan.seals()), most, "{collective:?} {algorithm:?} {ranks}");
                }
            }
        }
    }

    /// Each step once and in order, and none before what it receives has been sent.
    #[test]
    fn rounds_wait_for_nothing() {
        for collective in COLLECTIVES.into_iter().chain([Collective::Broadcast { root: 1 }]) {
            for algorithm in [Algorithm::Ring, Algorithm::RelayRing, Algorithm::Exchange] {
                for ranks in 1..=if algorithm == Algorithm::Exchange { 2 } else { 9 } {
                    if ranks == 1 && collective == (Collective::Broadcast { root: 1 }) {
                        continue;
                    }
                    let plan = Plan::new(collective, algorithm, ranks, 1000, Dtype::F32);
                    let tables: Vec<_> = (0..ranks).map(|rank| plan.steps(rank)).collect();
                    let mut done = vec![0; ranks];
                    // Messages from each rank.
                    let mut sent = vec![Vec::new(); ranks];
                    for round in 0..plan.rounds() {
                        let before = sent.clone();
                        for rank in 0..ranks {
                            let Some(part) = plan.step_in(rank, round) else { continue };
                            assert_eq!(part, Part::Step { index: done[rank], first: done[rank] == 0 });
                            let step = tables[rank][done[rank]];
                            done[rank] += 1;
                            if step.actions & RECEIVE != 0 {
                                let predecessor = &before[(rank + ranks - 1) % ranks];
                                assert!(predecessor.contains(&step.receives), "{plan:?}, {rank}, {round}");
                            }
                            if step.actions & SEND != 0 {
                                sent[rank].push(step.sends);
                            }
                        }
                    }
                    assert!((0..ranks).all(|rank| done[rank] == tables[rank].len()), "{plan:?}");
                    let empty = Plan::new(collective, algorithm, ranks, 0, Dtype::F32);
                    assert_eq!((empty.rounds(), empty.step_in(0, 0)), (0, None));
                    assert!(Part::Close.is_first(&empty) && !Part::Close.is_first(&plan));
                }
            }
        }
    }

    /// Where messages are moved between rounds: each is there, whole, in the round that takes it.
    #[test]
    fn messages_sent_by_round_are_those_received() {
        for collective in COLLECTIVES.into_iter().chain([Collective::Broadcast { root: 1 }]) {
            for algorithm in [Algorithm::Ring, Algorithm::RelayRing, Algorithm::Exchange] {
                for ranks in 2..=if algorithm == Algorithm::Exchange { 2 } else { 9 } {
                    for count in [1, 3, 1000] {
                        let plan = Plan::new(collective, algorithm, ranks, 4 * count, Dtype::F32);
                        let tables: Vec<_> = (0..ranks).map(|rank| plan.steps(rank)).collect();
                        let mut inboxes = vec![HashMap::new(); ranks];
                        for round in 0..plan.rounds() {
                            for rank in 0..ranks {
                                let Some(Part::Step { index, .. }) = plan.step_in(rank, round) else {
                                    continue;
                                };
                                let step = tables[rank][index];
                                if step.actions & RECEIVE != 0 && step.bytes > 0 {
                                    let message = inboxes[rank].remove(&step.receives);
                                    assert_eq!(message, Some(step.bytes), "{plan:?}, {rank}, {round}");
                                }
                            }
                            for (rank, table) in tables.iter().enumerate() {
                                if let Some((message, bytes)) = plan.sent_in(table, rank, round) {
                                    let unread = inboxes[(rank + 1) % ranks].insert(message, bytes);
                                    assert_eq!(unread, None, "{plan:?}, {rank}, {round}");
                                }
                            }
                        }
                        assert!(inboxes.iter().all(HashMap::is_empty), "{plan:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn units_divide_all_offsets_and_chunks_fit_their_places() {
        for collective in COLLECTIVES {
            for dtype in Dtype::ALL {
                for ranks in 1..=9 {
                    for count in (0..70).chain([1023, 4096 * 9]) {
                        let bytes = count * dtype.size();
                        let plan = Plan::new(collective, Algorithm::Ring, ranks, bytes, dtype);
                        let unit = plan.unit() as u64;
                        let whole = Plan { grain: QUAD, ..plan };
                        for rank in 0..ranks {
                            // Empty chunks are skipped.
                            for step in plan.steps(rank).iter().filter(|step| step.bytes > 0) {
                                assert_eq!(step.offset % unit, 0, "{plan:?}");
                                assert!(step.bytes as usize <= plan.longest_chunk(), "{plan:?}");
                            }
                        }
                        assert!(plan.longest_chunk() <= whole.longest_chunk(), "{plan:?}");
                    }
                }
            }
        }
    }
}
