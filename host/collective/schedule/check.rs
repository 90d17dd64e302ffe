//! Proves a schedule right by carrying symbols through it: which ranks' inputs a value consists of.

use std::collections::{HashSet, VecDeque};

use super::{Collective, Operand, Origin, Outgoing, Schedule, Step};

/// What is wrong with a schedule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank}, step {step}: {what}")]
pub struct Flaw {
    /// The rank in whose program it shows.
    pub rank: usize,
    /// The step; as many as there are steps when it shows at the end.
    pub step: usize,
    /// What it is.
    pub what: String,
}

/// How often each rank's input is in a value, and whether the value is finished.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Value {
    inputs: Vec<usize>,
    finished: bool,
}

impl Value {
    fn input(rank: usize, ranks: usize) -> Self {
        let mut inputs = vec![0; ranks];
        inputs[rank] = 1;
        Self { inputs, finished: false }
    }
}

#[derive(Clone, Debug)]
struct Message {
    chunk: usize,
    sealed_by: usize,
    sealed_in: usize,
    value: Value,
}

struct Rank {
    next: usize,
    /// What each chunk of the output holds.
    output: Vec<Option<Value>>,
}

struct Simulation<'a> {
    schedule: &'a Schedule,
    ranks: Vec<Rank>,
    /// `links[from][to]`
    links: Vec<Vec<VecDeque<Message>>>,
    sealed: HashSet<(usize, usize)>,
}

impl Schedule {
    /// Checks that the schedule ends (no rank waits for ever), that each rank then holds every input exactly once
    /// where it should and nothing else, that records are opened under the identity they were sealed with, and that
    /// it can work in place.
    ///
    /// # Errors
    /// The first [`Flaw`] that shows.
    pub fn check(&self) -> Result<(), Flaw> {
        let count = self.ranks();
        let mut simulation = Simulation {
            schedule: self,
            ranks: (0..count).map(|_| Rank { next: 0, output: vec![None; self.chunks] }).collect(),
            links: vec![vec![VecDeque::new(); count]; count],
            sealed: HashSet::new(),
        };
        while simulation.advance()? {}
        simulation.check_end()
    }

    fn wanted(&self, rank: usize, chunk: usize) -> Option<Value> {
        let ranks = self.ranks();
        let all = Value { inputs: vec![1; ranks], finished: ranks > 1 };
        match self.collective {
            Collective::AllReduce => Some(all),
            Collective::ReduceScatter => (rank == chunk).then_some(all),
            Collective::AllGather => Some(Value::input(chunk, ranks)),
            Collective::Broadcast { root } => Some(Value::input(root, ranks)),
        }
    }
}

impl Simulation<'_> {
    /// Lets every rank do one step if it can. False when none could.
    fn advance(&mut self) -> Result<bool, Flaw> {
        let mut moved = false;
        for rank in 0..self.ranks.len() {
            let Some(step) = self.schedule.programs[rank].get(self.ranks[rank].next) else { continue };
            let ready = step.operands.iter().all(|operand| match operand {
                Operand::Local => true,
                Operand::Received(origin) => {
                    self.links.get(origin.from).is_none_or(|links| !links[rank].is_empty())
                }
            });
            if ready {
                self.step(rank, step)?;
                self.ranks[rank].next += 1;
                moved = true;
            }
        }
        Ok(moved)
    }

    fn step(&mut self, rank: usize, step: &Step) -> Result<(), Flaw> {
        let flaw = |what: &str| Err(self.flaw(rank, what));
        if step.chunk >= self.schedule.chunks {
            return flaw("there is no such chunk");
        }
        let received: Vec<Origin> = step.operands.iter().filter_map(received).collect();
        let senders: HashSet<usize> = received.iter().map(|origin| origin.from).collect();
        if senders.len() < received.len() {
            return flaw("two operands come from one peer");
        }
        if senders.contains(&rank) || step.outgoing.peers().contains(&rank) {
            return flaw("it speaks to itself");
        }
        let count = self.ranks.len();
        if senders.iter().chain(step.outgoing.peers()).any(|&peer| peer >= count) {
            return flaw("there is no such peer");
        }
        let peers: HashSet<_> = step.outgoing.peers().iter().collect();
        if peers.len() < step.outgoing.peers().len() {
            return flaw("one peer gets it twice");
        }
        let mut value = Value { inputs: vec![0; count], finished: false };
        for operand in &step.operands {
            let part = self.operand(rank, step, operand)?;
            if part.finished && step.operands.len() > 1 {
                return Err(self.flaw(rank, "a finished value is reduced again"));
            }
            value.finished |= part.finished;
            value.inputs.iter_mut().zip(part.inputs).for_each(|(sum, part)| *sum += part);
        }
        if step.finish {
            if value.finished {
                return Err(self.flaw(rank, "a value is finished twice"));
            }
            value.finished = true;
        }
        let (sealed_by, sealed_in) = match (&step.outgoing, step.operands.as_slice()) {
            (Outgoing::Nothing, _) => (rank, 0),
            (Outgoing::Seal(_), _) => {
                let identity = (rank, self.ranks[rank].next);
                if !self.sealed.insert(identity) {
                    return Err(self.flaw(rank, "a nonce is used twice"));
                }
                identity
            }
            (Outgoing::Forward(_), [Operand::Received(origin)]) if !step.finish => {
                (origin.sealed_by, origin.sealed_in)
            }
            (Outgoing::Forward(_), _) => {
                return Err(self.flaw(rank, "what is forwarded is not what was received"));
            }
        };
        for &peer in step.outgoing.peers() {
            let message = Message { chunk: step.chunk, sealed_by, sealed_in, value: value.clone() };
            self.links[rank][peer].push_back(message);
        }
        if step.store && self.ranks[rank].output[step.chunk].replace(value).is_some() {
            return Err(self.flaw(rank, "a chunk is stored twice"));
        }
        Ok(())
    }

    fn operand(&mut self, rank: usize, step: &Step, operand: &Operand) -> Result<Value, Flaw> {
        let Operand::Received(origin) = operand else {
            if self.ranks[rank].output[step.chunk].is_some() {
                return Err(self.flaw(rank, "in place, its input is overwritten already"));
            }
            return Ok(Value::input(rank, self.ranks.len()));
        };
        let Some(message) = self.links[origin.from][rank].pop_front() else {
            return Err(self.flaw(rank, "nothing was sent"));
        };
        if message.chunk != step.chunk {
            return Err(self.flaw(rank, "another chunk arrives"));
        }
        if (message.sealed_by, message.sealed_in) != (origin.sealed_by, origin.sealed_in) {
            return Err(self.flaw(rank, "the records were sealed by another rank or in another step"));
        }
        Ok(message.value)
    }

    fn check_end(&self) -> Result<(), Flaw> {
        for (rank, state) in self.ranks.iter().enumerate() {
            if state.next < self.schedule.programs[rank].len() {
                return Err(self.flaw(rank, "it waits for ever"));
            }
        }
        for (rank, state) in self.ranks.iter().enumerate() {
            if self.links.iter().any(|links| !links[rank].is_empty()) {
                return Err(self.flaw(rank, "a message is never received"));
            }
            for (chunk, value) in state.output.iter().enumerate() {
                let wanted = self.schedule.wanted(rank, chunk);
                if *value != wanted {
                    return Err(self.flaw(rank, &format!("chunk {chunk} is {value:?}, not {wanted:?}")));
                }
            }
        }
        Ok(())
    }

    fn flaw(&self, rank: usize, what: &str) -> Flaw {
        Flaw { rank, step: self.ranks[rank].next, what: what.into() }
    }
}

fn received(operand: &Operand) -> Option<Origin> {
    match operand {
        Operand::Local => None,
        Operand::Received(origin) => Some(*origin),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::schedule::Algorithm;

    fn collectives(ranks: usize) -> impl Iterator<Item = Collective> {
        [Collective::AllReduce, Collective::ReduceScatter, Collective::AllGather]
            .into_iter()
            .chain((0..ranks).map(|root| Collective::Broadcast { root }))
    }

    #[test]
    fn every_schedule_is_right() {
        for ranks in 1..=16 {
            for collective in collectives(ranks) {
                for algorithm in Algorithm::ALL {
                    let schedule = Schedule::new(collective, algorithm, ranks);
                    assert_eq!(schedule.check(), Ok(()), "{collective:?} {algorithm:?} {ranks} ranks");
                }
            }
        }
    }

    /// Every field of every step matters: change one, and the check fails.
    #[test]
    fn every_change_is_noticed() {
        for ranks in 2..=4 {
            for collective in collectives(ranks) {
                for algorithm in Algorithm::ALL {
                    let schedule = Schedule::new(collective, algorithm, ranks);
                    for rank in 0..ranks {
                        for step in 0..schedule.programs[rank].len() {
                            for change in changes(&schedule.programs[rank][step], ranks, schedule.chunks) {
                                let mut changed = schedule.clone();
                                changed.programs[rank][step] = change;
                                assert_ne!(
                                    changed.check(),
                                    Ok(()),
                                    "{collective:?} {algorithm:?}, rank {rank}, step {step}: {:?}",
                                    changed.programs[rank][step]
                                );
                            }
                            let mut cut = schedule.clone();
                            cut.programs[rank].remove(step);
                            assert_ne!(
                                cut.check(),
                                Ok(()),
                                "{collective:?} {algorithm:?} without {rank}/{step}"
                            );
                        }
                    }
                }
            }
        }
    }

    fn changes(step: &Step, ranks: usize, chunks: usize) -> Vec<Step> {
        let mut changes = vec![
            Step { store: !step.store, ..step.clone() },
            Step { finish: !step.finish, ..step.clone() },
            Step { operands: [&step.operands[..], &[Operand::Local]].concat(), ..step.clone() },
            Step { operands: step.operands[1..].to_vec(), ..step.clone() },
        ];
        if chunks > 1 {
            changes.push(Step { chunk: (step.chunk + 1) % chunks, ..step.clone() });
        }
        for (index, operand) in step.operands.iter().enumerate() {
            let Operand::Received(origin) = *operand else { continue };
            for origin in [
                Origin { from: (origin.from + 1) % ranks, ..origin },
                Origin { sealed_by: (origin.sealed_by + 1) % ranks, ..origin },
                Origin { sealed_in: origin.sealed_in + 1, ..origin },
            ] {
                let mut operands = step.operands.clone();
                operands[index] = Operand::Received(origin);
                changes.push(Step { operands, ..step.clone() });
            }
        }
        match &step.outgoing {
            Outgoing::Nothing => changes.push(Step { outgoing: Outgoing::Seal(vec![0]), ..step.clone() }),
            Outgoing::Seal(peers) => {
                changes.push(Step { outgoing: Outgoing::Nothing, ..step.clone() });
                changes.push(Step { outgoing: Outgoing::Forward(peers.clone()), ..step.clone() });
            }
            Outgoing::Forward(peers) => {
                changes.push(Step { outgoing: Outgoing::Nothing, ..step.clone() });
                changes.push(Step { outgoing: Outgoing::Seal(peers.clone()), ..step.clone() });
            }
        }
        changes
    }
}
