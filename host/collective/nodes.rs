//! All-reduce over nodes of equally many ranks: inside each node, then between the nodes, then inside again.
//!
//! Links inside a node are many times as fast as those between nodes. So each rank first gets its chunk of its node's sum, by
//! a reduce-scatter inside; all-reduces that chunk with the ranks of the same number in the other nodes, its *rail*; and
//! gathers all chunks inside. With n nodes, a rank sends 2 (n - 1) / n of its chunk to other nodes, where a ring through all
//! ranks would send up to twice the whole vector over each link between two nodes.
//!
//! Everything that leaves a rank is sealed in each of the three. Each node and each rail is a group with a session and a
//! secret of its own, derived from the whole's, so that ranks of two nodes can't be taken for ranks of one.

use std::sync::{Arc, Mutex};

use zeroize::Zeroizing;

use super::bootstrap::{Bootstrap, Part};
use super::communicator::{Communicator, Options, Request};
use super::reduce::divide;
use super::{Buffers, Partition};
use crate::channel::GroupSecret;
use crate::{Dtype, Error, ReduceOp, Result};

/// What of a rank's groups a secret is for.
const NODE: u64 = 0;
const RAIL: u64 = 1;

/// A rank's rail, for whoever links it: the ranks of the same number in all nodes.
pub struct Rail {
    /// Its own secret.
    pub secret: GroupSecret,
    /// This rank's node, which is its rank in the rail.
    pub node: usize,
    /// Number of nodes, which is the number of its ranks.
    pub nodes: usize,
    /// Where its ranks find each other.
    pub bootstrap: Box<dyn Bootstrap>,
}

/// A rank's node, for whoever links it.
pub(crate) struct NodePart {
    /// Its own secret.
    pub(crate) secret: GroupSecret,
    /// This rank's number in the node.
    pub(crate) number: usize,
    /// Number of the node's ranks.
    pub(crate) ranks: usize,
    /// Where its ranks find each other.
    pub(crate) bootstrap: Box<dyn Bootstrap>,
}

/// Both groups that a rank is in, with secrets of their own, over the whole's bootstrap. Its number among all comes before how
/// many there are.
///
/// # Errors
/// [`Error::InvalidArgument`] when the nodes don't divide the ranks.
pub(crate) fn node_parts(
    secret: &GroupSecret,
    [rank, ranks]: [usize; 2],
    node_ranks: usize,
    bootstrap: Box<dyn Bootstrap>,
) -> Result<(NodePart, Rail)> {
    let [node, number] = split(rank, ranks, node_ranks)?;
    let (whole, nodes) = (Arc::new(Mutex::new(bootstrap)), ranks / node_ranks);
    let part = |of, which: usize| secret.of_part([of, which as u64, node_ranks as u64, ranks as u64]);
    let inside = Box::new(Part::new(&whole, node * node_ranks..(node + 1) * node_ranks));
    let between = Box::new(Part::new(&whole, (number..ranks).step_by(node_ranks)));
    Ok((
        NodePart { secret: part(NODE, node), number, ranks: node_ranks, bootstrap: inside },
        Rail { secret: part(RAIL, number), node, nodes, bootstrap: between },
    ))
}

/// One rank of a group whose ranks are in nodes, for all-reduces.
///
/// # Failure
///
/// As for [`Communicator`]: what fails on one rank fails on all ranks of its node and its rail, and so on all. A rank returns
/// when all ranks of its rail have the whole result. So here too, only who holds up or changes the very last messages, which
/// say no more than that, makes some ranks fail and lets others succeed.
#[derive(Debug)]
pub struct Nodes {
    inside: Communicator,
    between: Communicator,
}

impl Nodes {
    /// Joins as the first number of `place` among as many ranks as the second says, with nodes of `node_ranks` ranks each: rank
    /// r is in node r / `node_ranks`. `inside` links the ranks of a node, given its secret, this rank's number there and `node_ranks`; `between` links a rail.
    /// Returns when all ranks have joined.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the nodes don't divide the ranks; whatever the two report.
    pub fn join(
        secret: &GroupSecret,
        place: [usize; 2],
        node_ranks: usize,
        bootstrap: Box<dyn Bootstrap>,
        inside: impl FnOnce(&GroupSecret, [usize; 2], Box<dyn Bootstrap>) -> Result<Communicator>,
        between: impl FnOnce(Rail) -> Result<Communicator>,
    ) -> Result<Self> {
        let (NodePart { secret, number, ranks, bootstrap }, rail) =
            node_parts(secret, place, node_ranks, bootstrap)?;
        let inside = inside(&secret, [number, ranks], bootstrap)?;
        Ok(Self { inside, between: between(rail)? })
    }

    /// As [`Self::join`], with both kinds of links over TCP.
    ///
    /// # Errors
    /// As [`Communicator::new`].
    pub fn over_tcp(
        secret: &GroupSecret,
        place: [usize; 2],
        node_ranks: usize,
        bootstrap: Box<dyn Bootstrap>,
        options: &Options,
    ) -> Result<Self> {
        Self::join(
            secret,
            place,
            node_ranks,
            bootstrap,
            |secret, [rank, ranks], bootstrap| Communicator::new(secret, rank, ranks, bootstrap, options),
            |rail| Communicator::new(&rail.secret, rail.node, rail.nodes, rail.bootstrap, options),
        )
    }

    /// The ranks of this rank's node.
    pub fn inside(&self) -> &Communicator {
        &self.inside
    }

    /// The ranks of this rank's rail.
    pub fn between(&self) -> &Communicator {
        &self.between
    }

    /// This rank, counted from 0 through all nodes.
    pub fn rank(&self) -> usize {
        self.between.rank() * self.inside.ranks() + self.inside.rank()
    }

    /// Number of ranks of all nodes.
    pub fn ranks(&self) -> usize {
        self.between.ranks() * self.inside.ranks()
    }

    /// Whether a collective has failed and [`Self::rekey`] is needed.
    pub fn is_poisoned(&self) -> bool {
        self.inside.is_poisoned() || self.between.is_poisoned()
    }

    /// Starts new sessions with new keys, together with all other ranks. Ends the poisoning after a failure.
    ///
    /// # Errors
    /// As [`Communicator::rekey`].
    pub fn rekey(&mut self) -> Result<()> {
        // Both, so that all ranks meet equally often.
        let inside = self.inside.rekey();
        inside.and(self.between.rekey())
    }

    /// Reduces the vectors of all ranks, elements of type `dtype` as bytes, into every rank's output, with the same bits on
    /// each: a node's chunks are summed as by [`Communicator::reduce_scatter`], then the nodes' as by
    /// [`Communicator::all_reduce`]; an average is the sum, divided once.
    ///
    /// # Errors
    /// As [`Communicator::run`]. After all but [`Error::InvalidArgument`] and [`Error::Poisoned`] the output is zeros.
    pub fn all_reduce(&mut self, op: ReduceOp, dtype: Dtype, mut buffers: Buffers<'_>) -> Result<()> {
        if self.is_poisoned() {
            return Err(Error::Poisoned);
        }
        let bytes = match &buffers {
            Buffers::InPlace(vector) => vector.len(),
            Buffers::Apart { input, output } if input.len() == output.len() => input.len(),
            Buffers::Apart { input, output } => {
                let what = format!("an input of {} bytes and an output of {}", input.len(), output.len());
                return Err(Error::InvalidArgument(what));
            }
        };
        if !bytes.is_multiple_of(dtype.size()) {
            let what = format!("{bytes} bytes are no whole number of {dtype:?} elements");
            return Err(Error::InvalidArgument(what));
        }
        self.in_three(op, dtype, bytes, &mut buffers).inspect_err(|_| {
            self.inside.give_up();
            self.between.give_up();
            let (Buffers::InPlace(output) | Buffers::Apart { output, .. }) = &mut buffers;
            output.fill(0);
        })
    }

    fn in_three(
        &mut self,
        op: ReduceOp,
        dtype: Dtype,
        bytes: usize,
        buffers: &mut Buffers<'_>,
    ) -> Result<()> {
        let (rank, ranks) = (self.inside.rank(), self.inside.ranks());
        let elements = Partition::new(bytes / dtype.size(), ranks).range(rank).len();
        let mut chunk = Zeroizing::new(vec![0; elements * dtype.size()]);
        let partial = if op == ReduceOp::Avg { ReduceOp::Sum } else { op };
        let input: &[u8] = match buffers {
            Buffers::InPlace(vector) => vector,
            Buffers::Apart { input, .. } => input,
        };
        let reduced = Buffers::Apart { input, output: &mut chunk };
        self.inside.run(Request::ReduceScatter(partial), dtype, reduced)?;
        self.between.run(Request::AllReduce(partial), dtype, Buffers::InPlace(&mut chunk))?;
        if op == ReduceOp::Avg {
            divide(dtype, &mut chunk, self.ranks());
        }
        let (Buffers::InPlace(output) | Buffers::Apart { output, .. }) = buffers;
        self.inside.run(Request::AllGather, dtype, Buffers::Apart { input: &chunk, output })?;
        // Nobody is done before all nodes are: an all-reduce of nothing, whose end is authenticated.
        self.between.run(Request::AllReduce(partial), dtype, Buffers::InPlace(&mut []))
    }
}

/// The node of a rank, and its number there.
fn split(rank: usize, ranks: usize, node_ranks: usize) -> Result<[usize; 2]> {
    if node_ranks == 0 || !ranks.is_multiple_of(node_ranks) || rank >= ranks {
        return Err(Error::InvalidArgument(format!(
            "rank {rank} of {ranks} in nodes of {node_ranks}: all nodes have equally many ranks"
        )));
    }
    Ok([rank / node_ranks, rank % node_ranks])
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::collective::InProcess;
    use crate::transport::memory::{Link, Packet, Tap, tapped_network};
    use crate::transport::{Transport, memory};

    fn options() -> Options {
        Options { record_bytes: 1024, timeout: Duration::from_secs(20), ..Options::default() }
    }

    /// `work` on each rank of simulated nodes, in a thread each. The links of a group come from `links`, given the secret's
    /// kind, its number and its ranks; groups are told apart by their bootstraps alone, as over real ones.
    fn on_nodes<T: Send>(
        [nodes, node_ranks]: [usize; 2],
        options: &Options,
        links: impl Fn(u64, usize, usize) -> Vec<memory::Memory>,
        work: impl Fn(&mut Nodes) -> T + Sync,
    ) -> Vec<T> {
        let ranks = nodes * node_ranks;
        let mut inside: Vec<_> = (0..nodes).map(|node| links(NODE, node, node_ranks).into_iter()).collect();
        let mut rails: Vec<_> = (0..node_ranks).map(|rail| links(RAIL, rail, nodes).into_iter()).collect();
        let secret = GroupSecret::random().unwrap();
        thread::scope(|scope| {
            let (work, secret) = (&work, &secret);
            let threads = InProcess::group(ranks).into_iter().enumerate().map(|(rank, bootstrap)| {
                let inside = inside[rank / node_ranks].next().unwrap();
                let rail = rails[rank % node_ranks].next().unwrap();
                scope.spawn(move || {
                    let join = |secret: &GroupSecret, link: memory::Memory, bootstrap| {
                        Communicator::join(secret, options, Box::new(link) as Box<dyn Transport>, bootstrap)
                    };
                    let mut rank = Nodes::join(
                        secret,
                        [rank, ranks],
                        node_ranks,
                        Box::new(bootstrap),
                        |secret, place, bootstrap| {
                            assert_eq!(place, [rank % node_ranks, node_ranks]);
                            join(secret, inside, bootstrap)
                        },
                        |Rail { secret, node, nodes, bootstrap }| {
                            assert_eq!([node, nodes], [rank / node_ranks, ranks / node_ranks]);
                            join(&secret, rail, bootstrap)
                        },
                    )
                    .unwrap();
                    work(&mut rank)
                })
            });
            threads.collect::<Vec<_>>().into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn plain(_: u64, _: usize, ranks: usize) -> Vec<memory::Memory> {
        memory::network(ranks)
    }

    fn vector(rank: &Nodes, count: usize) -> Vec<u8> {
        (0..count as u32).flat_map(|at| (at % 1000 * (rank.rank() as u32 + 1)).to_le_bytes()).collect()
    }

    fn sum(rank: &mut Nodes, count: usize, op: ReduceOp) -> Result<Vec<u8>> {
        let mut vector = vector(rank, count);
        let outcome = rank.all_reduce(op, Dtype::U32, Buffers::InPlace(&mut vector));
        assert!(outcome.is_ok() || vector.iter().all(|&byte| byte == 0), "zeros after a failure");
        outcome.map(|()| vector)
    }

    #[test]
    fn every_rank_gets_the_sum_over_all_nodes() {
        for shape in [[1, 1], [1, 3], [3, 1], [2, 2], [3, 4]] {
            let ranks = (shape[0] * shape[1]) as u32;
            for (op, factor) in [
                (ReduceOp::Sum, ranks * (ranks + 1) / 2),
                (ReduceOp::Max, ranks),
                (ReduceOp::Min, 1),
                (ReduceOp::Avg, 0),
            ] {
                let expected = |at: u32| match op {
                    ReduceOp::Avg => at % 1000 * (ranks * (ranks + 1) / 2) / ranks,
                    _ => at % 1000 * factor,
                };
                let results = on_nodes(shape, &options(), plain, |rank| {
                    [0, 1, 5, 3001].map(|count| {
                        let input = vector(rank, count);
                        let mut output = vec![7; input.len()];
                        let buffers = Buffers::Apart { input: &input, output: &mut output };
                        rank.all_reduce(op, Dtype::U32, buffers).unwrap();
                        assert_eq!(sum(rank, count, op).unwrap(), output);
                        output
                    })
                });
                for result in results.iter().flatten() {
                    let (elements, []) = result.as_chunks::<4>() else { panic!() };
                    assert!(
                        (0..).zip(elements).all(|(at, &bytes)| u32::from_le_bytes(bytes) == expected(at))
                    );
                }
            }
        }
    }

    /// Floating-point sums have the same bits on all ranks, and little depends on the nodes' shape.
    #[test]
    fn every_rank_gets_the_same_bits() {
        let results = on_nodes([3, 2], &options(), plain, |rank| {
            let seed = rank.rank() as f32;
            let mut vector: Vec<u8> =
                (0..2000).flat_map(|at| ((at as f32).sin() * 1.1_f32.powf(seed)).to_le_bytes()).collect();
            rank.all_reduce(ReduceOp::Avg, Dtype::F32, Buffers::InPlace(&mut vector)).unwrap();
            vector
        });
        assert!(results.iter().all(|result| result == &results[0]));
        let (first, _) = results[0].as_chunks::<4>();
        for (at, bytes) in first.iter().enumerate() {
            let exact: f64 = (0..6).map(|rank| (at as f64).sin() * 1.1_f64.powi(rank)).sum::<f64>() / 6.0;
            assert!((f64::from(f32::from_le_bytes(*bytes)) - exact).abs() < 1e-5);
        }
    }

    /// Changes one byte of the packet with a number.
    struct Flip {
        passed: AtomicUsize,
        target: usize,
    }

    impl Tap for Flip {
        fn pass(&self, link: Link, mut packet: Packet, deliver: &mut dyn FnMut(Link, Packet)) {
            if self.passed.fetch_add(1, Ordering::Relaxed) == self.target {
                match packet.bytes.first_mut() {
                    Some(byte) => *byte ^= 1,
                    None => packet.tag[0] ^= 1,
                }
            }
            deliver(link, packet);
        }
    }

    /// Whatever is changed inside a node or on a rail, all ranks of all nodes fail at once, leave zeros, and can go on.
    #[test]
    fn a_changed_byte_fails_all_ranks_of_all_nodes() {
        // The packets of group 1 of a kind: two ranks send two each in a reduce-scatter and in an all-gather, three each in an
        // all-reduce, among them what says that they are done. What follows on a rail says that all nodes are.
        for (kind, packets) in [(NODE, 8), (RAIL, 6)] {
            for target in 0..packets {
                let links = |of, which, ranks| match (of, which) {
                    (of, 1) if of == kind => {
                        tapped_network(ranks, Arc::new(Flip { passed: AtomicUsize::new(0), target }))
                    }
                    _ => memory::network(ranks),
                };
                let start = Instant::now();
                let outcomes = on_nodes([2, 2], &options(), links, |rank| {
                    let failure = sum(rank, 1000, ReduceOp::Sum).unwrap_err();
                    assert!(rank.is_poisoned());
                    assert!(matches!(sum(rank, 0, ReduceOp::Sum), Err(Error::Poisoned)));
                    rank.rekey().unwrap();
                    (failure, sum(rank, 1000, ReduceOp::Sum).unwrap())
                });
                assert!(start.elapsed() < Duration::from_secs(10), "no rank waited for its deadline");
                let failures: Vec<_> = outcomes.iter().map(|(failure, _)| failure).collect();
                let at = format!("kind {kind}, packet {target}");
                assert!(
                    failures.iter().any(|error| matches!(error, Error::Record { .. })),
                    "{at}: {failures:?}"
                );
                let told = |error: &&Error| matches!(error, Error::Record { .. } | Error::Aborted { .. });
                assert!(failures.iter().all(told), "{at}: {failures:?}");
                assert!(outcomes.iter().all(|(_, again)| again == &outcomes[0].1));
            }
        }
    }

    #[test]
    fn arguments_that_do_not_fit_change_nothing() {
        on_nodes([2, 1], &options(), plain, |rank| {
            let refused = rank.all_reduce(ReduceOp::Sum, Dtype::U32, Buffers::InPlace(&mut [1, 2, 3]));
            assert!(matches!(refused, Err(Error::InvalidArgument(_))));
            let buffers = Buffers::Apart { input: &[0; 8], output: &mut [0; 4] };
            assert!(matches!(
                rank.all_reduce(ReduceOp::Sum, Dtype::U32, buffers),
                Err(Error::InvalidArgument(_))
            ));
            sum(rank, 10, ReduceOp::Sum).unwrap();
        });
        for (rank, ranks, node_ranks) in [(0, 4, 3), (0, 4, 0), (4, 4, 2)] {
            assert!(matches!(split(rank, ranks, node_ranks), Err(Error::InvalidArgument(_))));
        }
    }

    /// A bootstrap that mixes ranks of two nodes into one group gets no session.
    #[test]
    fn nodes_that_are_mixed_up_do_not_join() {
        let secret = GroupSecret::random().unwrap();
        let outcomes: Vec<_> = thread::scope(|scope| {
            let threads = InProcess::group(2).into_iter().enumerate().map(|(rank, mut bootstrap)| {
                let secret = &secret;
                scope.spawn(move || {
                    let part = secret.of_part([NODE, rank as u64, 2, 4]);
                    let terms = crate::channel::Terms {
                        ranks: 2,
                        crypto: options().crypto,
                        record_bytes: 1024,
                        key_bytes: 1 << 30,
                    };
                    let timeout = Duration::from_secs(20);
                    super::super::agree(&part, terms, rank, &mut bootstrap, timeout, || Ok(())).map(|_| ())
                })
            });
            threads.collect::<Vec<_>>().into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(outcomes.iter().all(|outcome| matches!(outcome, Err(Error::Handshake(_)))), "{outcomes:?}");
    }

    #[test]
    fn nodes_join_over_tcp() {
        let secret = GroupSecret::random().unwrap();
        let sums: Vec<_> = thread::scope(|scope| {
            let threads = InProcess::group(4).into_iter().enumerate().map(|(rank, bootstrap)| {
                let secret = &secret;
                scope.spawn(move || {
                    let mut rank =
                        Nodes::over_tcp(secret, [rank, 4], 2, Box::new(bootstrap), &options()).unwrap();
                    sum(&mut rank, 5000, ReduceOp::Sum).unwrap()
                })
            });
            threads.collect::<Vec<_>>().into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(sums.iter().all(|sum| sum == &sums[0]) && sums[0][4..8] == 10_u32.to_le_bytes());
    }
}
