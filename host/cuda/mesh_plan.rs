//! A schedule's steps as those of the mesh kernels: one received or sent record at a time, messages in places of their own, and
//! each message sent in a lower step than it is received in.

use ringseal_kernels::step::{
    ACCUMULATE, FINISH, FORWARD, KEEP, KEEP_ROUNDED, NOTHING, RECEIVE, REDUCE, SEND, SEND_KEPT, SEND_STORED,
    STORE, Step,
};

use crate::collective::schedule::{Operand, Origin, Outgoing, Step as Scheduled, program};
use crate::collective::{Algorithm, Collective};

/// A message to another rank: to whom, and which of that rank's it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Destination {
    pub(super) rank: usize,
    pub(super) message: usize,
}

/// What one rank does.
#[derive(Clone, Debug, Default)]
pub(super) struct Program {
    /// With the chunk's number in the place of its offset, and its length 0 where there is nothing to do.
    pub(super) steps: Vec<Step>,
    /// What the steps' `to` and `fan_out` count.
    pub(super) destinations: Vec<Destination>,
}

/// A step before its place in the table is known.
struct Pass {
    step: Step,
    to: Vec<usize>,
}

/// What each rank does in a collective of at least two ranks.
pub(super) fn programs(collective: Collective, algorithm: Algorithm, ranks: usize) -> Vec<Program> {
    let passes: Vec<Vec<Pass>> = (0..ranks)
        .map(|rank| {
            let steps = program(collective, algorithm, ranks, rank);
            steps.iter().enumerate().flat_map(|(number, step)| lowered(rank, number, step)).collect()
        })
        .collect();
    // By receiver and sender: the numbers of the messages, in the order in which they are sent and received.
    let mut messages = vec![vec![Vec::new(); ranks]; ranks];
    let mut counts = vec![0; ranks];
    for (rank, passes) in passes.iter().enumerate() {
        for pass in passes.iter().filter(|pass| pass.step.actions & RECEIVE != 0) {
            messages[rank][pass.step.from as usize].push(counts[rank]);
            counts[rank] += 1;
        }
    }
    let mut programs = vec![Program::default(); ranks];
    // By receiver and message: the step in which it is sent, once its place is known.
    let mut sent: Vec<Vec<Option<usize>>> = counts.iter().map(|&count| vec![None; count]).collect();
    let mut done = vec![0; ranks];
    let mut told = vec![vec![0; ranks]; ranks];
    let mut received = vec![0; ranks];
    // Each rank goes on as far as what it receives has been sent, until all are done.
    while let Some(rank) = (0..ranks).find(|&rank| {
        passes[rank]
            .get(done[rank])
            .is_some_and(|pass| pass.step.actions & RECEIVE == 0 || sent[rank][received[rank]].is_some())
    }) {
        let Pass { step, to } = &passes[rank][done[rank]];
        let program = &mut programs[rank];
        let mut step = *step;
        let mut at = program.steps.len();
        if step.actions & RECEIVE != 0 {
            step.receives = received[rank] as u32;
            // Later than it is sent.
            at = at.max(sent[rank][received[rank]].map_or(0, |sent| sent + 1));
            received[rank] += 1;
        }
        step.to = program.destinations.len() as u32;
        step.fan_out = to.len() as u32;
        for &peer in to {
            let message = messages[peer][rank][told[rank][peer]];
            told[rank][peer] += 1;
            program.destinations.push(Destination { rank: peer, message });
            sent[peer][message] = Some(at);
        }
        program.steps.resize(at, NOTHING);
        program.steps.push(step);
        done[rank] += 1;
    }
    programs
}

/// Step `number` of rank `rank`'s schedule.
fn lowered(rank: usize, number: usize, step: &Scheduled) -> Vec<Pass> {
    let own = Step {
        offset: step.chunk as u64,
        bytes: 1,
        sealed_by: rank as u32,
        sealed_in: number as u32,
        ..NOTHING
    };
    let store = if step.store { STORE } else { 0 };
    let opened = |origin: &Origin, actions: u32| Step {
        actions: RECEIVE | actions,
        from: origin.from as u32,
        sealed_by: origin.sealed_by as u32,
        sealed_in: origin.sealed_in as u32,
        ..own
    };
    let received: Vec<(usize, &Origin)> = step
        .operands
        .iter()
        .enumerate()
        .filter_map(|(at, operand)| match operand {
            Operand::Local => None,
            Operand::Received(origin) => Some((at, origin)),
        })
        .collect();
    let Some(last) = received.len().checked_sub(1) else {
        let to = step.outgoing.peers().to_vec();
        return vec![Pass { step: Step { actions: SEND | store, ..own }, to }];
    };
    let finish = if step.finish { FINISH } else { 0 };
    let local = step.operands.iter().position(|operand| *operand == Operand::Local);
    let mut passes = Vec::new();
    for (index, (at, origin)) in received.iter().enumerate() {
        let mut actions = if index > 0 { ACCUMULATE } else { 0 };
        // After the operand before it; a first one after the second, which gives the same bits.
        if local.is_some_and(|local| local == at + 1 || local == 0 && index == 0) {
            actions |= REDUCE;
        }
        if index < last {
            actions |= KEEP;
            passes.push(Pass { step: opened(origin, actions), to: Vec::new() });
            continue;
        }
        actions |= finish | store;
        match &step.outgoing {
            Outgoing::Nothing => passes.push(Pass { step: opened(origin, actions), to: Vec::new() }),
            Outgoing::Forward(peers) => {
                let step = opened(origin, actions | SEND | FORWARD);
                passes.push(Pass { step, to: peers.clone() });
            }
            Outgoing::Seal(peers) => {
                let (kept, source) = if step.store { (0, SEND_STORED) } else { (KEEP_ROUNDED, SEND_KEPT) };
                passes.push(Pass { step: opened(origin, actions | kept), to: Vec::new() });
                passes.push(Pass { step: Step { actions: SEND | source, ..own }, to: peers.clone() });
            }
        }
    }
    passes
}

#[cfg(test)]
mod emulated;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Dtype;
    use crate::collective::schedule::Schedule;
    use crate::cuda::ring_plan::Plan;

    const ALGORITHMS: [Algorithm; 3] = [Algorithm::Direct, Algorithm::Tree, Algorithm::Exchange];

    fn collectives(ranks: usize) -> impl Iterator<Item = Collective> {
        let roots = (0..ranks).map(|root| Collective::Broadcast { root });
        [Collective::AllReduce, Collective::ReduceScatter, Collective::AllGather].into_iter().chain(roots)
    }

    #[test]
    fn messages_are_sent_in_lower_steps_than_received_and_have_places_of_their_own() {
        for algorithm in ALGORITHMS {
            for ranks in 2..=17 {
                for collective in collectives(ranks) {
                    let what = format!("{collective:?}, {algorithm:?}, {ranks} ranks");
                    let programs = programs(collective, algorithm, ranks);
                    let plan = Plan::new(collective, algorithm, ranks, 1 << 20, Dtype::F32);
                    let mut sent = std::collections::HashMap::new();
                    for (rank, program) in programs.iter().enumerate() {
                        for (number, step) in program.steps.iter().enumerate() {
                            let to = &program.destinations[step.to as usize..][..step.fan_out as usize];
                            assert_eq!(to.is_empty(), step.actions & SEND == 0, "{what}");
                            for to in to {
                                let message = (rank, number, step.sealed_by, step.sealed_in, step.offset);
                                let taken = sent.insert((to.rank, to.message), message);
                                assert_eq!(taken, None, "{what}: a place is used twice");
                            }
                        }
                    }
                    for (rank, program) in programs.iter().enumerate() {
                        let receive = program.steps.iter().enumerate();
                        for (number, step) in receive.filter(|(_, step)| step.actions & RECEIVE != 0) {
                            let (from, before, by, sealed_in, chunk) =
                                sent.remove(&(rank, step.receives as usize)).expect("it is sent");
                            assert!((step.receives as usize) < plan.messages(), "{what}");
                            assert!(before < number, "{what}: rank {rank} receives in step {number}");
                            assert_eq!(
                                (from, by, sealed_in),
                                (step.from as usize, step.sealed_by, step.sealed_in)
                            );
                            assert_eq!(chunk, step.offset, "{what}");
                        }
                    }
                    assert!(sent.is_empty(), "{what}: not all messages are received");
                }
            }
        }
    }

    /// Seals, opens and forwards are the schedule's, and all of its steps are there.
    #[test]
    fn operations_are_those_of_the_schedule() {
        for algorithm in ALGORITHMS {
            for ranks in 2..=9 {
                for collective in collectives(ranks) {
                    let schedule = Schedule::new(collective, algorithm, ranks);
                    for (rank, program) in programs(collective, algorithm, ranks).iter().enumerate() {
                        let count = |mask: u32, wanted: u32| {
                            program.steps.iter().filter(|step| step.actions & mask == wanted).count()
                        };
                        let operations = schedule.operations(rank);
                        let what = format!("{collective:?}, {algorithm:?}, rank {rank} of {ranks}");
                        assert_eq!(count(SEND | FORWARD, SEND), operations.seals, "{what}");
                        assert_eq!(count(RECEIVE, RECEIVE), operations.opens, "{what}");
                        assert_eq!(count(FORWARD, FORWARD), operations.forwards, "{what}");
                        let stored = schedule.programs[rank].iter().filter(|step| step.store).count();
                        assert_eq!(count(STORE, STORE), stored, "{what}");
                    }
                }
            }
        }
    }
}
