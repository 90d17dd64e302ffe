//! A schedule played record by record: when each rank does what, and when it is over.
//!
//! Events are taken in the order of their time, so what shares a link gets it in the order in which it asks.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};

use crate::collective::schedule::{Operand, Schedule, Step};

/// What things cost, in microseconds.
pub(super) trait Costs {
    /// Lengths of the records that one worker of a rank has of a chunk of `chunk` bytes. All workers have as many.
    fn records(&self, chunk: usize) -> Vec<f64>;
    /// A worker's time for one record of a step.
    fn service_us(&self, step: &Step, bytes: f64) -> f64;
    /// What a record's way to a peer takes.
    fn transfer(&self, from: usize, to: usize, bytes: f64) -> Record;
}

/// A record on its way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    /// What it passes one at a time, with all others of the same number.
    pub(super) port: usize,
    /// How long it occupies the port.
    pub(super) carry_us: f64,
    /// After that, until the receiver goes on with it.
    pub(super) hop_us: f64,
}

/// A time that can be ordered; times are never NaN.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Time(f64);

impl Eq for Time {}

impl PartialOrd for Time {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Time {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// A rank's place in its program.
#[derive(Clone, Debug, Default)]
struct Cursor {
    step: usize,
    record: usize,
    free: f64,
    /// Waits for a record to arrive, and is not in the queue.
    waits: bool,
}

/// Microseconds until the last rank is done with a vector of `bytes` bytes. Empty chunks cost nothing.
pub(super) fn simulate(schedule: &Schedule, bytes: usize, costs: &impl Costs) -> f64 {
    let ranks = schedule.ranks();
    let records: Vec<Vec<f64>> =
        (0..schedule.chunks).map(|chunk| costs.records(length(bytes, schedule.chunks, chunk))).collect();
    let mut cursors = vec![Cursor::default(); ranks];
    let mut ports: HashMap<usize, f64> = HashMap::new();
    // What has been sent and not been taken, by sender and receiver; between two ranks records keep their order.
    let mut arrivals: HashMap<(usize, usize), VecDeque<f64>> = HashMap::new();
    let mut queue: BinaryHeap<Reverse<(Time, usize)>> =
        (0..ranks).map(|rank| Reverse((Time(0.0), rank))).collect();
    let mut end = 0.0_f64;
    while let Some(Reverse((Time(now), rank))) = queue.pop() {
        let program = &schedule.programs[rank];
        let cursor = &mut cursors[rank];
        while program.get(cursor.step).is_some_and(|step| cursor.record >= records[step.chunk].len()) {
            (cursor.step, cursor.record) = (cursor.step + 1, 0);
        }
        let Some(step) = program.get(cursor.step) else {
            end = end.max(cursor.free);
            continue;
        };
        let senders = step.operands.iter().filter_map(|operand| match operand {
            Operand::Received(origin) => Some(origin.from),
            Operand::Local => None,
        });
        // All of them must be there.
        let arrived = senders.clone().try_fold(cursor.free, |latest, from| {
            arrivals.get(&(from, rank)).and_then(VecDeque::front).map(|at| latest.max(*at))
        });
        let Some(ready) = arrived else {
            cursor.waits = true;
            continue;
        };
        if ready > now {
            queue.push(Reverse((Time(ready), rank)));
            continue;
        }
        for from in senders {
            if let Some(waiting) = arrivals.get_mut(&(from, rank)) {
                waiting.pop_front();
            }
        }
        let bytes = records[step.chunk][cursor.record];
        let mut done = now + costs.service_us(step, bytes);
        let mut woken = Vec::new();
        for &peer in step.outgoing.peers() {
            let record = costs.transfer(rank, peer, bytes);
            let port = ports.entry(record.port).or_insert(0.0);
            // The link carries a record while its sender writes it.
            *port = port.max(now) + record.carry_us;
            done = done.max(*port);
            arrivals.entry((rank, peer)).or_default().push_back(done + record.hop_us);
            woken.push((peer, done + record.hop_us));
        }
        cursor.record += 1;
        cursor.free = done;
        queue.push(Reverse((Time(done), rank)));
        for (peer, at) in woken {
            if std::mem::take(&mut cursors[peer].waits) {
                queue.push(Reverse((Time(at), peer)));
            }
        }
    }
    end
}

/// Bytes of a chunk, near enough: cut between bytes instead of units.
fn length(bytes: usize, chunks: usize, chunk: usize) -> usize {
    bytes / chunks + usize::from(chunk < bytes % chunks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::schedule::{Algorithm, Collective, Outgoing};

    /// Sending takes as long as receiving, and nothing else takes time.
    struct Unit {
        records: usize,
        hop_us: f64,
        carry_us: f64,
    }

    impl Costs for Unit {
        fn records(&self, chunk: usize) -> Vec<f64> {
            vec![1.0; if chunk == 0 { 0 } else { self.records }]
        }

        fn service_us(&self, step: &Step, _: f64) -> f64 {
            let received = step.operands.iter().filter(|operand| **operand != Operand::Local).count();
            (received + usize::from(matches!(step.outgoing, Outgoing::Seal(_)))) as f64
        }

        fn transfer(&self, from: usize, _: usize, _: f64) -> Record {
            Record { port: from, carry_us: self.carry_us, hop_us: self.hop_us }
        }
    }

    fn us(algorithm: Algorithm, ranks: usize, costs: &Unit) -> f64 {
        simulate(&Schedule::new(Collective::AllReduce, algorithm, ranks), 1 << 20, costs)
    }

    /// One record, no link: a rank is never idle, so the time is its operations'.
    #[test]
    fn a_ring_takes_as_long_as_its_operations() {
        let costs = Unit { records: 1, hop_us: 0.0, carry_us: 0.0 };
        for ranks in 1..=16 {
            assert_eq!(us(Algorithm::Ring, ranks, &costs), 4.0 * (ranks - 1) as f64);
        }
        assert_eq!(us(Algorithm::RelayRing, 4, &costs), 10.0);
    }

    #[test]
    fn hops_are_waited_for_unless_other_records_fill_the_time() {
        let hops = |records| us(Algorithm::Ring, 4, &Unit { records, hop_us: 1.0, carry_us: 0.0 });
        assert_eq!(hops(1), 12.0 + 6.0);
        // 12 operations on each of two records; the hop is shorter than the other record's.
        assert_eq!(hops(2), 24.0);
    }

    #[test]
    fn a_slow_link_sets_the_pace() {
        // 6 messages of 10 and the last step's opening.
        let costs = Unit { records: 1, hop_us: 0.0, carry_us: 10.0 };
        assert_eq!(us(Algorithm::Ring, 4, &costs), 61.0);
        // A direct all-reduce sends as much through the same port.
        assert!(us(Algorithm::Direct, 4, &costs) >= 60.0);
    }

    #[test]
    fn an_empty_vector_takes_no_time() {
        let schedule = Schedule::new(Collective::AllReduce, Algorithm::Ring, 4);
        assert_eq!(simulate(&schedule, 0, &Unit { records: 1, hop_us: 1.0, carry_us: 1.0 }), 0.0);
    }
}
