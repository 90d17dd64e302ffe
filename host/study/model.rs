//! What an all-reduce costs, by equations.
//!
//! All times are in microseconds, lengths in bytes of plaintext, rates in GB/s (10^9). The figures are those of a
//! [`Calibration`].
//!
//! # One rank's step
//!
//! A vector of `S` bytes is cut into chunks of `C = S / n` (a tree doesn't cut it). A step of the schedule works on one
//! chunk: it takes `o` operands, `x` of them received, stores the result `w` times (to the output, and to each peer that it
//! is sent to), and seals it (`z` = 1) or doesn't (`z` = 0).
//!
//! **The ring's persistent kernel.** A rank has `B` blocks, one on a multiprocessor: all of a GPU's, shared by the `g` ranks
//! that are on it. A block takes `m` records of `s` bytes of each chunk, by the kernels' own rule, and for one of them
//!
//! ```text
//! t(s) = record + (x + z) tag + max( (x + z) s / crypt,  (o + w) s / min(move, memory / (B g)) )
//! ```
//!
//! The direct algorithm's kernel is modelled alike, with figures of its own where it was measured.
//!
//! **The same with keystream made ahead** ([`Method::Ready`]) computes no cipher, but loads a pad for each record that it seals
//! or opens; `start` and `tag` are those of AES-128, and what making the pads takes is not in it:
//!
//! ```text
//! t(s) = record + (x + z) tag + (o + w + x + z) s / min(move, memory / (B g))
//! ```
//!
//! **The published structure.** Each operation is a kernel on the whole GPU, one after the other, on the whole chunk; every
//! kernel costs `k(C) = fixed + C / rate`:
//!
//! ```text
//! t(C) = x (k_mac + k_encrypt) + (o - 1) k_reduce + z (k_encrypt + k_mac) + copies k_copy
//! ```
//!
//! where a step copies to each peer, and to the output when no other kernel writes there. It seals anew what other
//! algorithms forward. On a shared GPU an all-reduce takes at least the sum of all ranks' bytes over the rates.
//!
//! # From step to all-reduce
//!
//! A record can be worked on once its rank is done with the one before and once it has arrived. It arrives when its sender
//! is done with it and the link has carried it, `s / (bandwidth / B)` after the record before, plus a hop. A GPU's NVLink
//! bandwidth is shared by what it sends to all its peers; so is a node's network bandwidth by what leaves the node.
//! A simulation plays the schedule by these rules. For a ring of equal links that comes to
//!
//! ```text
//! T = start + sum over steps of max(m t, t + hop)  -  what the last step doesn't wait for
//! ```
//!
//! with `t` not less than the link's time for a record: [`ring_closed_form`]. A test compares the two.
//!
//! Whoever launches for several ranks from one thread, as all ranks of one process do, may be the slowest part:
//! `T = max(T, launches x issue)`, with the persistent kernels' issue or the published structure's.
//!
//! # What it leaves out
//!
//! Contention with the training's own kernels for multiprocessors and memory; the clock, which tensor work lowers, other
//! than by rates that were measured with it; congestion between nodes.

use super::calibration::{Calibration, KernelCost, Link, RingKernel, SeedKernels};
use super::simulate::{Costs, Record, simulate};
use crate::channel::{Crypto, KeyLength};
use crate::collective::Algorithm;
use crate::collective::schedule::{Collective, Operand, Outgoing, Schedule, Step};
use crate::cuda::{LONGEST_EXCHANGED, LONGEST_RECORD, shared_out};
use crate::{Error, Result};

/// A way to do all-reduces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// A persistent kernel a rank, without or with cryptography.
    Fused(Algorithm, Crypto),
    /// Sealed with AES-128, all keystream made before the all-reduce begins: what a GPU that waits, or computes something that
    /// leaves room, can have. How long its making takes is not counted.
    Ready(Algorithm),
    /// The published structure, with separate kernels and AES-128.
    Seed(Algorithm),
    /// The published structure without its cryptography: copies and additions only.
    SeedPlain(Algorithm),
}

impl Method {
    /// The ring without cryptography, with which every security cost is counted.
    pub const PLAIN: Self = Self::Fused(Algorithm::Ring, Crypto::None);
    /// The published ring.
    pub const SEED: Self = Self::Seed(Algorithm::Ring);

    /// Sealed, by an algorithm, with AES-128.
    pub const fn sealed(algorithm: Algorithm) -> Self {
        Self::Fused(algorithm, Crypto::Gcm(KeyLength::Aes128))
    }

    /// The methods that the study compares by the model.
    pub const STUDY: [Self; 7] = [
        Self::PLAIN,
        Self::SEED,
        Self::Seed(Algorithm::Tree),
        Self::sealed(Algorithm::Ring),
        Self::sealed(Algorithm::RelayRing),
        Self::sealed(Algorithm::Direct),
        Self::Ready(Algorithm::RelayRing),
    ];

    /// Short name, as in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fused(Algorithm::Ring, Crypto::None) => "plain",
            Self::Fused(Algorithm::RelayRing, Crypto::None) => "plain-relay",
            Self::Fused(Algorithm::Direct, Crypto::None) => "plain-direct",
            Self::Fused(Algorithm::Tree, Crypto::None) => "plain-tree",
            Self::Fused(Algorithm::Exchange, Crypto::None) => "plain-exchange",
            Self::Fused(algorithm, Crypto::Gcm(_)) => algorithm.name(),
            Self::Ready(Algorithm::Ring) => "ring-ready",
            Self::Ready(Algorithm::RelayRing) => "relay-ready",
            Self::Ready(Algorithm::Direct) => "direct-ready",
            Self::Ready(Algorithm::Tree) => "tree-ready",
            Self::Ready(Algorithm::Exchange) => "exchange-ready",
            Self::Seed(Algorithm::Tree) => "seed-tree",
            Self::Seed(_) => "seed",
            Self::SeedPlain(Algorithm::Tree) => "seed-tree-plain",
            Self::SeedPlain(_) => "seed-plain",
        }
    }

    /// Which chunks go where.
    pub const fn algorithm(self) -> Algorithm {
        match self {
            Self::Fused(algorithm, _)
            | Self::Ready(algorithm)
            | Self::Seed(algorithm)
            | Self::SeedPlain(algorithm) => algorithm,
        }
    }
}

/// Where the ranks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Topology {
    /// All on one GPU, whose multiprocessors and memory they share; one process.
    OneGpu,
    /// One GPU each, all of one node, every pair joined through NVLink switches.
    NvLink,
    /// One GPU each, so many in a node, joined by NVLink inside and by one network interface a GPU outside. A ring
    /// leaves a node at one place, where it uses all of the node's interfaces.
    Nodes {
        /// GPUs of a node, at least one.
        per_node: usize,
    },
}

impl Topology {
    /// Short name, as in tables.
    pub fn name(self) -> String {
        match self {
            Self::OneGpu => "one-gpu".into(),
            Self::NvLink => "nvlink".into(),
            Self::Nodes { per_node } => format!("nodes-of-{per_node}"),
        }
    }
}

/// Microseconds of one all-reduce of `bytes` bytes a rank over `ranks` ranks.
///
/// # Errors
/// [`Error::InvalidArgument`] when there are no ranks, more ranks than multiprocessors on one GPU, or an empty node;
/// [`Error::Unsupported`] when the calibration has no figures for the published structure.
pub fn all_reduce_us(
    calibration: &Calibration,
    topology: Topology,
    method: Method,
    ranks: usize,
    bytes: usize,
) -> Result<f64> {
    Model::new(calibration, topology, method, ranks)?.all_reduce_us(bytes)
}

/// A method on a number of ranks, ready to predict any length.
#[derive(Debug)]
pub struct Model<'a> {
    calibration: &'a Calibration,
    topology: Topology,
    method: Method,
    schedule: Schedule,
    longest_record: usize,
}

impl<'a> Model<'a> {
    /// Prepares the schedule.
    ///
    /// # Errors
    /// As [`all_reduce_us`].
    pub fn new(
        calibration: &'a Calibration,
        topology: Topology,
        method: Method,
        ranks: usize,
    ) -> Result<Self> {
        let invalid = |what: String| Err(Error::InvalidArgument(what));
        if ranks == 0 {
            return invalid("no ranks: at least one is needed".into());
        }
        if topology == Topology::OneGpu && ranks > calibration.multiprocessors as usize {
            return invalid(format!(
                "{ranks} ranks on one GPU of {} multiprocessors",
                calibration.multiprocessors
            ));
        }
        if topology == (Topology::Nodes { per_node: 0 }) {
            return invalid("a node has at least one GPU".into());
        }
        if matches!(method, Method::Seed(_) | Method::SeedPlain(_)) && calibration.seed.is_none() {
            let what = "the published structure, which this calibration has no figures for".into();
            return Err(Error::Unsupported { backend: "model", what });
        }
        let schedule = Schedule::new(Collective::AllReduce, method.algorithm(), ranks);
        let model = Self { calibration, topology, method, schedule, longest_record: LONGEST_RECORD };
        let exchanges = method.algorithm() == Algorithm::Exchange && ranks == 2 && model.sealed();
        Ok(if exchanges { model.with_records_up_to(LONGEST_EXCHANGED) } else { model })
    }

    /// With records of at most so many bytes, where the kernels that are embedded may have longer ones.
    pub fn with_records_up_to(mut self, bytes: usize) -> Self {
        self.longest_record = self.longest_record.min(bytes);
        self
    }

    /// Microseconds of one all-reduce of `bytes` bytes a rank.
    ///
    /// # Errors
    /// [`Error::Unsupported`] as [`all_reduce_us`].
    pub fn all_reduce_us(&self, bytes: usize) -> Result<f64> {
        let (calibration, ranks) = (self.calibration, self.schedule.ranks());
        let device = match self.method {
            Method::Fused(algorithm, crypto) => {
                self.persistent_us(bytes, *calibration.kernel(algorithm, crypto), Keystream::Made)
            }
            Method::Ready(algorithm) => {
                let kernel = *calibration.kernel(algorithm, Crypto::Gcm(KeyLength::Aes128));
                self.persistent_us(bytes, kernel, Keystream::Ready)
            }
            Method::Seed(_) | Method::SeedPlain(_) => {
                let Some(kernels) = &calibration.seed else { return Ok(f64::INFINITY) };
                let sealed = self.sealed();
                let costs = Seed { calibration, topology: self.topology, kernels, ranks, sealed };
                let path = simulate(&self.schedule, bytes, &costs);
                // Kernels of several ranks share the GPU, whose work is all of theirs.
                let work = if self.topology == Topology::OneGpu {
                    costs.work_us(&self.schedule, bytes)
                } else {
                    0.0
                };
                path.max(work)
            }
        };
        let issue = match (self.method, &calibration.seed) {
            (Method::Seed(_) | Method::SeedPlain(_), Some(kernels)) => {
                let launches = |steps: &Vec<Step>| -> usize {
                    steps.iter().map(|step| seed_launches(step, self.sealed()).total()).sum()
                };
                let of_ranks = self.schedule.programs.iter().map(launches);
                let driven = if self.topology == Topology::OneGpu {
                    of_ranks.sum()
                } else {
                    of_ranks.max().unwrap_or(0)
                };
                driven as f64 * kernels.issue_us
            }
            _ => (if self.topology == Topology::OneGpu { ranks } else { 1 }) as f64 * calibration.issue_us,
        };
        Ok(device.max(issue))
    }

    fn persistent_us(&self, bytes: usize, kernel: RingKernel, keystream: Keystream) -> f64 {
        let chunk = bytes / self.schedule.chunks;
        let ranks = self.schedule.ranks();
        let costs = Fused::new(self.calibration, self.topology, kernel, ranks, chunk, self.longest_record);
        kernel.start_us + simulate(&self.schedule, bytes, &Fused { keystream, ..costs })
    }

    fn sealed(&self) -> bool {
        !matches!(self.method, Method::SeedPlain(_) | Method::Fused(_, Crypto::None))
    }
}

/// What lies between two ranks, and which share of it a block of the sender has.
fn link(calibration: &Calibration, topology: Topology, from: usize, to: usize) -> Link {
    match topology {
        Topology::OneGpu => calibration.same_gpu,
        Topology::NvLink => calibration.nvlink,
        Topology::Nodes { per_node } if from / per_node == to / per_node => calibration.nvlink,
        Topology::Nodes { per_node } => {
            let Link { gb_s, hop_us } = calibration.network;
            Link { gb_s: gb_s * per_node as f64, hop_us }
        }
    }
}

/// Whose sending a link's bandwidth is shared with: everything else with the same number.
fn port(topology: Topology, ranks: usize, from: usize, to: usize) -> usize {
    match topology {
        Topology::Nodes { per_node } if from / per_node != to / per_node => ranks + from / per_node,
        _ => from,
    }
}

/// Where a sealed record's keystream comes from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Keystream {
    /// The multiprocessor's cipher.
    Made,
    /// Memory.
    Ready,
}

/// Costs of the persistent kernels.
struct Fused<'a> {
    calibration: &'a Calibration,
    topology: Topology,
    kernel: RingKernel,
    keystream: Keystream,
    ranks: usize,
    /// Blocks of a rank that have a record.
    blocks: f64,
    record_bytes: usize,
    /// What one block loads and stores at most.
    move_gb_s: f64,
}

impl<'a> Fused<'a> {
    fn new(
        calibration: &'a Calibration,
        topology: Topology,
        kernel: RingKernel,
        ranks: usize,
        chunk: usize,
        longest_record: usize,
    ) -> Self {
        let sharing = if topology == Topology::OneGpu { ranks as u32 } else { 1 };
        let all = calibration.multiprocessors / sharing;
        let record_bytes = shared_out(chunk, all, longest_record);
        let blocks = f64::from(all).min(chunk.div_ceil(record_bytes).max(1) as f64);
        let move_gb_s = kernel.move_gb_s.min(calibration.memory_gb_s / (blocks * f64::from(sharing)));
        let keystream = Keystream::Made;
        Self { calibration, topology, kernel, keystream, ranks, blocks, record_bytes, move_gb_s }
    }
}

impl Costs for Fused<'_> {
    /// The first block's: it has as many as any.
    fn records(&self, chunk: usize) -> Vec<f64> {
        let stride = self.record_bytes * self.blocks as usize;
        (0..chunk).step_by(stride).map(|at| (chunk - at).min(self.record_bytes) as f64).collect()
    }

    fn service_us(&self, step: &Step, bytes: f64) -> f64 {
        let received = received(step);
        let sealed = matches!(step.outgoing, Outgoing::Seal(_));
        let crypto = self.kernel.crypt_gb_s.map_or(0.0, |_| f64::from(received + u32::from(sealed)));
        let moved = (step.operands.len() + usize::from(step.store) + step.outgoing.peers().len()) as f64;
        let (moved, crypt_us) = match (self.keystream, self.kernel.crypt_gb_s) {
            (Keystream::Ready, _) => (moved + crypto, 0.0),
            (Keystream::Made, rate) => (moved, rate.map_or(0.0, |rate| crypto * bytes / rate / 1e3)),
        };
        let move_us = moved * bytes / self.move_gb_s / 1e3;
        self.kernel.record_us + crypto * self.kernel.tag_us + crypt_us.max(move_us)
    }

    fn transfer(&self, from: usize, to: usize, bytes: f64) -> Record {
        let link = link(self.calibration, self.topology, from, to);
        // Inside one GPU the stores are counted among what is moved.
        let carry_us =
            if self.topology == Topology::OneGpu { 0.0 } else { bytes * self.blocks / link.gb_s / 1e3 };
        Record { port: port(self.topology, self.ranks, from, to), carry_us, hop_us: link.hop_us }
    }
}

/// Costs of the published structure.
struct Seed<'a> {
    calibration: &'a Calibration,
    topology: Topology,
    kernels: &'a SeedKernels,
    ranks: usize,
    sealed: bool,
}

/// Kernels of one step.
struct SeedLaunches {
    encrypt: usize,
    mac: usize,
    copy: usize,
    reduce: usize,
}

impl SeedLaunches {
    const fn total(&self) -> usize {
        self.encrypt + self.mac + self.copy + self.reduce
    }
}

fn seed_launches(step: &Step, sealed: bool) -> SeedLaunches {
    let received = received(step) as usize;
    let peers = step.outgoing.peers().len();
    // Without cryptography a received chunk that isn't added to is copied to the output.
    let kept = usize::from(step.store && step.operands.len() == 1 && !(sealed && received == 1));
    let crypto = if sealed { received + usize::from(peers > 0) } else { 0 };
    SeedLaunches { encrypt: crypto, mac: crypto, copy: peers + kept, reduce: step.operands.len() - 1 }
}

impl Costs for Seed<'_> {
    fn records(&self, chunk: usize) -> Vec<f64> {
        if chunk == 0 { Vec::new() } else { vec![chunk as f64] }
    }

    fn service_us(&self, step: &Step, bytes: f64) -> f64 {
        self.step_us(step, |kernel| kernel.us(bytes))
    }

    fn transfer(&self, from: usize, to: usize, bytes: f64) -> Record {
        let link = link(self.calibration, self.topology, from, to);
        let carry_us = if self.topology == Topology::OneGpu { 0.0 } else { bytes / link.gb_s / 1e3 };
        Record { port: port(self.topology, self.ranks, from, to), carry_us, hop_us: link.hop_us }
    }
}

impl Seed<'_> {
    fn step_us(&self, step: &Step, us: impl Fn(KernelCost) -> f64) -> f64 {
        let SeedLaunches { encrypt, mac, copy, reduce } = seed_launches(step, self.sealed);
        let kernels = self.kernels;
        [(encrypt, kernels.encrypt), (mac, kernels.mac), (copy, kernels.copy), (reduce, kernels.reduce)]
            .into_iter()
            .map(|(count, kernel)| count as f64 * us(kernel))
            .sum()
    }

    /// What the bytes of all ranks take of one GPU; what doesn't grow with the bytes may overlap.
    fn work_us(&self, schedule: &Schedule, bytes: usize) -> f64 {
        let chunk = bytes as f64 / schedule.chunks as f64;
        let steps = schedule.programs.iter().flatten();
        steps.map(|step| self.step_us(step, |kernel| kernel.us(chunk) - kernel.fixed_us)).sum()
    }
}

fn received(step: &Step) -> u32 {
    step.operands.iter().filter(|operand| **operand != Operand::Local).count() as u32
}

/// Microseconds of an all-reduce by a ring, sealed or not, whose ranks and links are all alike. The number of ranks only
/// enters as a factor, so it holds for any.
///
/// # Errors
/// [`Error::InvalidArgument`] for nodes, whose links differ, and as [`all_reduce_us`].
pub fn ring_closed_form(
    calibration: &Calibration,
    topology: Topology,
    crypto: Crypto,
    ranks: usize,
    bytes: usize,
) -> Result<f64> {
    if matches!(topology, Topology::Nodes { .. }) || ranks < 2 {
        return Err(Error::InvalidArgument("a ring of at least two ranks and equal links is needed".into()));
    }
    let kernel = *calibration.ring(crypto);
    let chunk = bytes / ranks;
    let costs = Fused::new(calibration, topology, kernel, ranks, chunk, LONGEST_RECORD);
    let records = costs.records(chunk);
    let m = records.len() as f64;
    let mean = records.iter().sum::<f64>() / m.max(1.0);
    let Record { carry_us, hop_us, .. } = costs.transfer(0, 1, mean);
    // The kinds of step, how many there are of each, and whether they send.
    let steps = crate::collective::schedule::program(Collective::AllReduce, Algorithm::Ring, ranks, 0);
    let kinds = [(0, 1), (1, ranks - 2), (ranks - 1, 1), (ranks, ranks - 2), (2 * ranks - 2, 1)];
    let mut us = kernel.start_us;
    for (step, count) in kinds.into_iter().filter(|(_, count)| *count > 0) {
        let sends = step < 2 * ranks - 2;
        let t = costs.service_us(&steps[step], mean).max(if sends { carry_us } else { 0.0 });
        let each = if sends { (m * t).max(t + hop_us) } else { m * t };
        us += count as f64 * each;
    }
    let driven = if topology == Topology::OneGpu { ranks } else { 1 };
    Ok(us.max(driven as f64 * calibration.issue_us))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: Crypto = Crypto::Gcm(KeyLength::Aes256);

    #[test]
    fn the_closed_form_is_the_simulation_to_within_a_tenth() {
        let calibration = Calibration::h200();
        for topology in [Topology::OneGpu, Topology::NvLink] {
            for crypto in [Crypto::None, KEYS] {
                for ranks in [2, 3, 4, 8, 64] {
                    for bytes in [1 << 10, 1 << 20, 16 << 20, 256 << 20] {
                        let method = Method::Fused(Algorithm::Ring, crypto);
                        let played = all_reduce_us(&calibration, topology, method, ranks, bytes).unwrap();
                        let formula = ring_closed_form(&calibration, topology, crypto, ranks, bytes).unwrap();
                        let ratio = formula / played;
                        assert!(
                            (0.9..1.1).contains(&ratio),
                            "{topology:?} {crypto:?} {ranks} {bytes}: {ratio}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn a_thousand_ranks_are_simulated() {
        let calibration = Calibration::h200();
        let us = |ranks, per_node| {
            let topology = Topology::Nodes { per_node };
            all_reduce_us(&calibration, topology, Method::Fused(Algorithm::Ring, KEYS), ranks, 64 << 20)
                .unwrap()
        };
        let formula = ring_closed_form(&calibration, Topology::NvLink, KEYS, 1024, 64 << 20).unwrap();
        // One node is NVLink alone; with many the network's hops come on top.
        assert!((us(1024, 1024) / formula - 1.0).abs() < 0.1);
        assert!(us(1024, 8) > us(1024, 1024));
    }

    #[test]
    fn sealing_costs_and_more_so_with_longer_keys_and_more_operations() {
        let calibration = Calibration::h200();
        for ranks in [3, 4, 8] {
            let us = |method| all_reduce_us(&calibration, Topology::NvLink, method, ranks, 64 << 20).unwrap();
            let ring = |crypto| us(Method::Fused(Algorithm::Ring, crypto));
            assert!(ring(Crypto::None) < ring(Crypto::Gcm(KeyLength::Aes128)));
            assert!(ring(Crypto::Gcm(KeyLength::Aes128)) < ring(KEYS));
            assert!(us(Method::Fused(Algorithm::RelayRing, KEYS)) < ring(KEYS));
        }
    }

    /// Of long vectors the cipher is what sealing costs; pads are bytes to load, so they cost as well.
    #[test]
    fn keystream_that_is_ready_costs_less_than_the_cipher_and_more_than_nothing() {
        let calibration = Calibration::h200();
        for topology in [Topology::OneGpu, Topology::NvLink] {
            for ranks in [2, 4, 8] {
                let us = |method| all_reduce_us(&calibration, topology, method, ranks, 64 << 20).unwrap();
                let relay = |crypto| us(Method::Fused(Algorithm::RelayRing, crypto));
                let ready = us(Method::Ready(Algorithm::RelayRing));
                assert!(ready > relay(Crypto::None), "{topology:?} {ranks}");
                assert!(ready < relay(Crypto::Gcm(KeyLength::Aes128)), "{topology:?} {ranks}");
            }
        }
    }

    #[test]
    fn one_rank_only_launches() {
        let calibration = Calibration::h200();
        let us = all_reduce_us(&calibration, Topology::NvLink, Method::PLAIN, 1, 0).unwrap();
        assert!((us - calibration.plain.start_us.max(calibration.issue_us)).abs() < 1e-9);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let calibration = Calibration { seed: None, ..Calibration::h200() };
        for (topology, method, ranks) in [
            (Topology::NvLink, Method::PLAIN, 0),
            (Topology::OneGpu, Method::PLAIN, 133),
            (Topology::Nodes { per_node: 0 }, Method::PLAIN, 2),
            (Topology::NvLink, Method::SEED, 2),
        ] {
            assert!(all_reduce_us(&calibration, topology, method, ranks, 1).is_err());
        }
    }
}
