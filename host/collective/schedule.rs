//! Schedules as values: what each rank does with each chunk, step by step, with no cryptography and no data inside.
//!
//! The executor interprets them, op counts and the cost model are computed from them, and [`Schedule::check`] proves
//! one right by carrying symbols through it.
//!
//! A rank works through its steps in order, and through a step's chunk record by record: it takes each operand of the
//! record, combines them in the order in which they are listed, and passes the result on before it begins the next
//! record. So a chunk's records travel through the ranks as through a pipeline. Between two ranks records keep their
//! order.
//!
//! # Order of summation
//!
//! With `x[r]` the input of rank r, and n ranks (all numbers modulo n):
//!
//! | algorithm | chunk c of an all-reduce | chunk c of a reduce-scatter |
//! |---|---|---|
//! | ring, relay ring | `((x[c] + x[c+1]) + x[c+2]) + ...` | `((x[c+1] + x[c+2]) + ...) + x[c]` |
//! | direct | `((x[0] + x[1]) + x[2]) + ...`, in one step | the same |
//! | exchange | `((x[0] + x[1]) + x[2]) + ...`, in one step; the vector is one chunk | as direct |
//! | tree | `t(0)` | `t(0)` with the ranks renumbered so that rank c is 0 |
//!
//! where `t(v) = (x[v] + t(2v+1)) + t(2v+2)`, one step for each v, leaving out what is n or more. Where a step ends,
//! f16 and bf16 are rounded.

mod check;

pub use check::Flaw;

/// What a collective leaves where. `n` is the number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Collective {
    /// Every rank gets the reduction of all ranks' vectors.
    AllReduce,
    /// Rank r gets chunk r (of n) of the reduction.
    ReduceScatter,
    /// Rank r gives chunk r (of n); every rank gets all chunks.
    AllGather,
    /// Every rank gets rank `root`'s vector.
    Broadcast {
        /// The rank that gives.
        root: usize,
    },
}

impl Collective {
    /// The code that the ranks authenticate, and the root (0 where there is none).
    pub const fn code(self) -> (u8, usize) {
        match self {
            Self::AllReduce => (0, 0),
            Self::ReduceScatter => (1, 0),
            Self::AllGather => (2, 0),
            Self::Broadcast { root } => (3, root),
        }
    }
}

/// How a collective is done. The discriminants are the codes that the ranks authenticate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Algorithm {
    /// Each rank speaks to its successor only, and every hop opens and seals: 4(n-1) operations for an all-reduce, as
    /// in arXiv 2501.11771.
    Ring = 0,
    /// The ring, but finished chunks travel on as their owners sealed them: 3n-2 operations.
    RelayRing = 1,
    /// Each rank speaks to all others: two hops whatever n is, and 3n-2 operations. For small vectors, and where every
    /// pair of ranks has its own link.
    Direct = 2,
    /// A binary tree of ranks, up and down. Not split into chunks, so the root carries more than the others; here for
    /// comparison.
    Tree = 3,
    /// Each rank sends its whole vector to all others, which reduce it themselves: one hop, and n operations on the whole
    /// vector, where `Direct` has 3n-2 on an n-th. For two ranks, who by it seal, open and send no more than by any other
    /// algorithm, and for the smallest vectors. The other collectives are those of `Direct`.
    Exchange = 4,
}

impl Algorithm {
    /// Every algorithm, in the order of their codes.
    pub const ALL: [Self; 5] = [Self::Ring, Self::RelayRing, Self::Direct, Self::Tree, Self::Exchange];

    /// Name as on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::RelayRing => "relay",
            Self::Direct => "direct",
            Self::Tree => "tree",
            Self::Exchange => "exchange",
        }
    }
}

/// Where records come from and who sealed them. What a rank sealed in one of its steps, it sealed once: the pair names
/// the records' nonces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The rank that sends them.
    pub from: usize,
    /// The rank that sealed them: the sender, or whoever it forwards for.
    pub sealed_by: usize,
    /// The step, by that rank's own count, in which it sealed them.
    pub sealed_in: usize,
}

/// One input of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    /// This rank's own input.
    Local,
    /// What a peer sends, opened.
    Received(Origin),
}

/// Where a step's result goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outgoing {
    /// Nowhere.
    Nothing,
    /// Sealed once, to each of these ranks.
    Seal(Vec<usize>),
    /// The received records, as they came, to each of these ranks, after they have verified.
    Forward(Vec<usize>),
}

impl Outgoing {
    /// The ranks that it goes to.
    pub fn peers(&self) -> &[usize] {
        match self {
            Self::Nothing => &[],
            Self::Seal(peers) | Self::Forward(peers) => peers,
        }
    }

    fn seal(peers: Vec<usize>) -> Self {
        if peers.is_empty() { Self::Nothing } else { Self::Seal(peers) }
    }

    fn forward(peers: Vec<usize>) -> Self {
        if peers.is_empty() { Self::Nothing } else { Self::Forward(peers) }
    }
}

/// What a rank does with one chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The chunk.
    pub chunk: usize,
    /// What is combined, in this order; at least one. Received ones come from different peers.
    pub operands: Vec<Operand>,
    /// The result is complete: an average is divided now.
    pub finish: bool,
    /// The result goes to this rank's output.
    pub store: bool,
    /// Who else gets it.
    pub outgoing: Outgoing,
}

/// Cryptographic operations of one rank, each on a whole chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Operations {
    /// Chunks sealed.
    pub seals: usize,
    /// Chunks verified and opened.
    pub opens: usize,
    /// Chunks passed on as they came; these cost no cryptography.
    pub forwards: usize,
}

impl Operations {
    /// Seals and opens.
    pub const fn total(self) -> usize {
        self.seals + self.opens
    }

    pub(super) fn of(steps: &[Step]) -> Self {
        let mut operations = Self::default();
        for step in steps {
            operations.opens += step.operands.iter().filter(|operand| **operand != Operand::Local).count();
            match step.outgoing {
                Outgoing::Nothing => {}
                Outgoing::Seal(_) => operations.seals += 1,
                Outgoing::Forward(_) => operations.forwards += 1,
            }
        }
        operations
    }
}

/// What every rank does in one collective.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// What it achieves.
    pub collective: Collective,
    /// Chunks that the vector is cut into, by [`Partition`](super::Partition).
    pub chunks: usize,
    /// Each rank's steps.
    pub programs: Vec<Vec<Step>>,
}

impl Schedule {
    /// The schedule of a collective on `ranks` ranks.
    ///
    /// # Panics
    /// When `ranks` is 0 or the root is not a rank.
    pub fn new(collective: Collective, algorithm: Algorithm, ranks: usize) -> Self {
        Self {
            collective,
            chunks: chunks(collective, algorithm, ranks),
            programs: (0..ranks).map(|rank| program(collective, algorithm, ranks, rank)).collect(),
        }
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.programs.len()
    }

    /// Cryptographic operations of a rank. Empty chunks are skipped and cost nothing.
    pub fn operations(&self, rank: usize) -> Operations {
        Operations::of(&self.programs[rank])
    }
}

/// Chunks that a vector is cut into.
pub fn chunks(collective: Collective, algorithm: Algorithm, ranks: usize) -> usize {
    match (collective, algorithm) {
        (Collective::Broadcast { .. }, _)
        | (Collective::AllReduce, Algorithm::Tree | Algorithm::Exchange) => 1,
        _ => ranks,
    }
}

/// The steps of one rank; [`Schedule::new`] for all of them.
///
/// # Panics
/// When `rank` or the root is not less than `ranks`.
pub fn program(collective: Collective, algorithm: Algorithm, ranks: usize, rank: usize) -> Vec<Step> {
    assert!(rank < ranks, "rank {rank} of {ranks}");
    if let Collective::Broadcast { root } = collective {
        assert!(root < ranks, "root {root} of {ranks} ranks");
    }
    if ranks == 1 {
        return vec![Step { store: true, ..input(0, Outgoing::Nothing) }];
    }
    let relay = algorithm == Algorithm::RelayRing;
    match (collective, algorithm) {
        (Collective::AllReduce, Algorithm::Ring | Algorithm::RelayRing) => {
            Ring { rank, ranks }.all_reduce(relay)
        }
        (Collective::ReduceScatter, Algorithm::Ring | Algorithm::RelayRing) => {
            Ring { rank, ranks }.reduce_scatter()
        }
        (Collective::AllGather, Algorithm::Ring | Algorithm::RelayRing) => {
            Ring { rank, ranks }.all_gather(relay)
        }
        (Collective::Broadcast { root }, Algorithm::Ring | Algorithm::RelayRing) => {
            Ring { rank, ranks }.broadcast(root, relay)
        }
        (Collective::AllReduce, Algorithm::Direct) => Direct { rank, ranks }.all_reduce(),
        (Collective::AllReduce, Algorithm::Exchange) => Direct { rank, ranks }.exchange(),
        (Collective::ReduceScatter, Algorithm::Direct | Algorithm::Exchange) => {
            Direct { rank, ranks }.reduce_scatter()
        }
        (Collective::AllGather, Algorithm::Direct | Algorithm::Exchange) => {
            Direct { rank, ranks }.all_gather()
        }
        (Collective::Broadcast { root }, Algorithm::Direct | Algorithm::Exchange) => {
            Direct { rank, ranks }.broadcast(root)
        }
        (Collective::AllReduce, Algorithm::Tree) => Tree { rank, ranks, root: 0 }.all_reduce(),
        (Collective::ReduceScatter, Algorithm::Tree) => {
            (0..ranks).map(|root| Tree { rank, ranks, root }.reduce(root)).collect()
        }
        (Collective::AllGather, Algorithm::Tree) => {
            (0..ranks).map(|root| Tree { rank, ranks, root }.broadcast(root, root)).collect()
        }
        (Collective::Broadcast { root }, Algorithm::Tree) => {
            vec![Tree { rank, ranks, root }.broadcast(0, 0)]
        }
    }
}

/// A step that takes this rank's input.
fn input(chunk: usize, outgoing: Outgoing) -> Step {
    Step { chunk, operands: vec![Operand::Local], finish: false, store: false, outgoing }
}

/// A step that takes what was received and keeps it.
fn keep(chunk: usize, origin: Origin, outgoing: Outgoing) -> Step {
    Step { chunk, operands: vec![Operand::Received(origin)], finish: false, store: true, outgoing }
}

/// Step k of a ring all-reduce works on the chunk k places before the one that the rank began with. The first n-1
/// messages reduce, the others spread the finished chunks (Patarasu and Yuan, 2009).
#[derive(Clone, Copy)]
struct Ring {
    rank: usize,
    ranks: usize,
}

impl Ring {
    fn before(self, distance: usize) -> usize {
        (self.rank + 2 * self.ranks - distance) % self.ranks
    }

    fn next(self) -> usize {
        (self.rank + 1) % self.ranks
    }

    fn hop(self, sealed_in: usize) -> Origin {
        let from = self.before(1);
        Origin { from, sealed_by: from, sealed_in }
    }

    /// `first` is how many places before the rank's own number the chunk lies that it begins with.
    fn reduce(self, first: usize) -> Vec<Step> {
        let last = self.ranks - 1;
        (0..self.ranks)
            .map(|k| {
                let chunk = self.before(first + k);
                if k == 0 {
                    return input(chunk, Outgoing::Seal(vec![self.next()]));
                }
                Step {
                    chunk,
                    operands: vec![Operand::Received(self.hop(k - 1)), Operand::Local],
                    finish: k == last,
                    store: k == last,
                    outgoing: if k == last { Outgoing::Nothing } else { Outgoing::Seal(vec![self.next()]) },
                }
            })
            .collect()
    }

    /// The steps that take over the finished chunks. The last step before them is the one in which the rank has sent
    /// the chunk `first` places before its own number.
    fn spread(self, steps: &mut Vec<Step>, first: usize, relay: bool) {
        let owned_in = steps.len() - 1;
        for distance in 1..self.ranks {
            let k = owned_in + distance;
            let origin = if relay {
                Origin { from: self.before(1), sealed_by: self.before(distance), sealed_in: owned_in }
            } else {
                self.hop(k - 1)
            };
            let outgoing = match (distance == self.ranks - 1, relay) {
                (true, _) => Outgoing::Nothing,
                (false, true) => Outgoing::Forward(vec![self.next()]),
                (false, false) => Outgoing::Seal(vec![self.next()]),
            };
            steps.push(keep(self.before(first + distance), origin, outgoing));
        }
    }

    fn all_reduce(self, relay: bool) -> Vec<Step> {
        let mut steps = self.reduce(0);
        if let Some(last) = steps.last_mut() {
            last.outgoing = Outgoing::Seal(vec![self.next()]);
        }
        // The finished chunk is the one that lies n-1 before the first.
        self.spread(&mut steps, self.ranks - 1, relay);
        steps
    }

    fn reduce_scatter(self) -> Vec<Step> {
        self.reduce(1)
    }

    fn all_gather(self, relay: bool) -> Vec<Step> {
        let own = Step { store: true, ..input(self.rank, Outgoing::Seal(vec![self.next()])) };
        let mut steps = vec![own];
        self.spread(&mut steps, 0, relay);
        steps
    }

    fn broadcast(self, root: usize, relay: bool) -> Vec<Step> {
        let distance = (self.rank + self.ranks - root) % self.ranks;
        if distance == 0 {
            return vec![Step { store: true, ..input(0, Outgoing::Seal(vec![self.next()])) }];
        }
        let origin = Origin { sealed_by: if relay { root } else { self.before(1) }, ..self.hop(0) };
        let outgoing = match (distance == self.ranks - 1, relay) {
            (true, _) => Outgoing::Nothing,
            (false, true) => Outgoing::Forward(vec![self.next()]),
            (false, false) => Outgoing::Seal(vec![self.next()]),
        };
        vec![keep(0, origin, outgoing)]
    }
}

/// Every rank sends chunk c to rank c, which reduces it and sends the result to all.
#[derive(Clone, Copy)]
struct Direct {
    rank: usize,
    ranks: usize,
}

impl Direct {
    /// The others, beginning with the next one, so that the ranks don't all turn to the same one first.
    fn others(self) -> Vec<usize> {
        (1..self.ranks).map(|distance| (self.rank + distance) % self.ranks).collect()
    }

    fn reduce(self, outgoing: Outgoing) -> Vec<Step> {
        let mut steps: Vec<Step> =
            self.others().into_iter().map(|peer| input(peer, Outgoing::Seal(vec![peer]))).collect();
        let operand = |from: usize| match (self.rank + self.ranks - from) % self.ranks {
            0 => Operand::Local,
            distance => Operand::Received(Origin { from, sealed_by: from, sealed_in: distance - 1 }),
        };
        steps.push(Step {
            chunk: self.rank,
            operands: (0..self.ranks).map(operand).collect(),
            finish: true,
            store: true,
            outgoing,
        });
        steps
    }

    fn collect(self, steps: &mut Vec<Step>) {
        let sealed_in = steps.len() - 1;
        steps.extend(
            self.others()
                .into_iter()
                .rev()
                .map(|peer| keep(peer, Origin { from: peer, sealed_by: peer, sealed_in }, Outgoing::Nothing)),
        );
    }

    fn all_reduce(self) -> Vec<Step> {
        let mut steps = self.reduce(Outgoing::Seal(self.others()));
        self.collect(&mut steps);
        steps
    }

    fn exchange(self) -> Vec<Step> {
        let operand = |from: usize| match from == self.rank {
            true => Operand::Local,
            false => Operand::Received(Origin { from, sealed_by: from, sealed_in: 0 }),
        };
        vec![
            input(0, Outgoing::Seal(self.others())),
            Step {
                chunk: 0,
                operands: (0..self.ranks).map(operand).collect(),
                finish: true,
                store: true,
                outgoing: Outgoing::Nothing,
            },
        ]
    }

    fn reduce_scatter(self) -> Vec<Step> {
        self.reduce(Outgoing::Nothing)
    }

    fn all_gather(self) -> Vec<Step> {
        let mut steps = vec![Step { store: true, ..input(self.rank, Outgoing::Seal(self.others())) }];
        self.collect(&mut steps);
        steps
    }

    fn broadcast(self, root: usize) -> Vec<Step> {
        if self.rank == root {
            return vec![Step { store: true, ..input(0, Outgoing::Seal(self.others())) }];
        }
        vec![keep(0, Origin { from: root, sealed_by: root, sealed_in: 0 }, Outgoing::Nothing)]
    }
}

/// A binary tree in the numbering of a heap: node v has the children 2v+1 and 2v+2; the root is node 0.
#[derive(Clone, Copy)]
struct Tree {
    rank: usize,
    ranks: usize,
    root: usize,
}

impl Tree {
    fn node(self) -> usize {
        (self.rank + self.ranks - self.root) % self.ranks
    }

    fn rank_of(self, node: usize) -> usize {
        (node + self.root) % self.ranks
    }

    fn children(self) -> Vec<usize> {
        let node = self.node();
        [2 * node + 1, 2 * node + 2]
            .into_iter()
            .filter(|&child| child < self.ranks)
            .map(|child| self.rank_of(child))
            .collect()
    }

    fn parent(self) -> Option<usize> {
        self.node().checked_sub(1).map(|above| self.rank_of(above / 2))
    }

    /// Every rank does this as its step number `chunk`.
    fn reduce(self, chunk: usize) -> Step {
        let received = |from: usize| Operand::Received(Origin { from, sealed_by: from, sealed_in: chunk });
        let mut operands = vec![Operand::Local];
        operands.extend(self.children().into_iter().map(received));
        let parent = self.parent();
        Step {
            chunk,
            operands,
            finish: parent.is_none(),
            store: parent.is_none(),
            outgoing: Outgoing::seal(parent.into_iter().collect()),
        }
    }

    /// The root has sealed the chunk as its step number `sealed_in`.
    fn broadcast(self, chunk: usize, sealed_in: usize) -> Step {
        let Some(from) = self.parent() else {
            return Step { store: true, ..input(chunk, Outgoing::seal(self.children())) };
        };
        let origin = Origin { from, sealed_by: self.root, sealed_in };
        keep(chunk, origin, Outgoing::forward(self.children()))
    }

    fn all_reduce(self) -> Vec<Step> {
        let mut reduce = self.reduce(0);
        if self.parent().is_none() {
            reduce.outgoing = Outgoing::seal(self.children());
            return vec![reduce];
        }
        vec![reduce, self.broadcast(0, 0)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The counts that protocol.md and arXiv 2501.11771 give. One rank alone needs no cryptography.
    #[test]
    fn operations_are_as_published() {
        for n in 1..=16 {
            let ring = Schedule::new(Collective::AllReduce, Algorithm::Ring, n);
            let relay = Schedule::new(Collective::AllReduce, Algorithm::RelayRing, n);
            let direct = Schedule::new(Collective::AllReduce, Algorithm::Direct, n);
            for rank in 0..n {
                assert_eq!(ring.operations(rank).total(), 4 * (n - 1));
                let fewest = if n == 1 { 0 } else { 3 * n - 2 };
                assert_eq!(relay.operations(rank).total(), fewest);
                assert_eq!(direct.operations(rank).total(), fewest);
                let exchange = Schedule::new(Collective::AllReduce, Algorithm::Exchange, n);
                assert_eq!(exchange.operations(rank).total(), if n == 1 { 0 } else { n });
                assert_eq!(relay.operations(rank).opens, 2 * (n - 1));
                assert_eq!(relay.operations(rank).forwards, n.saturating_sub(2));
                assert_eq!(ring.operations(rank).forwards, 0);
            }
        }
    }

    /// A tree has n-1 edges, and each carries one sealed vector up; the root seals once for all on the way down.
    #[test]
    fn a_tree_opens_once_for_each_edge_and_direction() {
        for n in 2..=16 {
            let tree = Schedule::new(Collective::AllReduce, Algorithm::Tree, n);
            let all: Vec<_> = (0..n).map(|rank| tree.operations(rank)).collect();
            assert_eq!(all.iter().map(|operations| operations.seals).sum::<usize>(), n);
            assert_eq!(all.iter().map(|operations| operations.opens).sum::<usize>(), 2 * (n - 1));
        }
    }

    #[test]
    fn steps_are_as_many_as_hops() {
        for n in 2..=16 {
            for algorithm in [Algorithm::Ring, Algorithm::RelayRing, Algorithm::Direct] {
                for steps in Schedule::new(Collective::AllReduce, algorithm, n).programs {
                    assert_eq!(steps.len(), 2 * n - 1);
                }
            }
        }
    }
}
