//! Somebody on the links who changes, drops, repeats, swaps, reflects, cuts and splices records: no forgery is
//! accepted, every rank names the same place, nothing partial is left, and after rekeying all is right (cases.md 24).

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ringseal::channel::GroupSecret;
use ringseal::collective::schedule::{Operand, Schedule};
use ringseal::collective::{Algorithm, Buffers, Collective, Communicator, Options, Partition, Request};
use ringseal::transport::Transport;
use ringseal::transport::memory::{Link, Packet, Tap, tapped_network};
use ringseal::{Dtype, Error, ReduceOp, Result};

use crate::group::{PATIENT, inputs, on_all, options, tapped_group};
use crate::model::reduced;

/// Bytes of a record: four elements.
const RECORD: usize = 16;
/// Elements of a vector: for three ranks, chunks of 8 and hence two records.
const COUNT: usize = 24;
const RANKS: usize = 3;
const DTYPE: Dtype = Dtype::I32;
/// For attacks that leave a rank waiting.
const SHORT: Duration = Duration::from_millis(60);

const SUM: Request = Request::AllReduce(ReduceOp::Sum);
const REQUESTS: [Request; 4] =
    [SUM, Request::ReduceScatter(ReduceOp::Sum), Request::AllGather, Request::Broadcast { root: 1 }];

#[derive(Clone, Debug)]
enum Attack {
    /// Bit of ciphertext, or of the tag behind it.
    Flip(usize),
    Drop,
    /// So much later.
    Delay(Duration),
    /// Claim that it belongs to another session.
    Relabel,
    Twice,
    /// Deliver the next packet of the link first.
    Swap,
    /// Give the receiver what it has sent itself.
    Reflect,
    /// Only this many bytes.
    Cut(usize),
    /// So many zeros more.
    Extend(usize),
    /// What another packet carried, under this one's session.
    Replace(Packet),
    /// This tag, another packet's ciphertext.
    Splice(Packet),
}

#[derive(Default)]
struct Attacker {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    attack: Option<(Place, Attack)>,
    held: Option<Packet>,
    seen: HashMap<Link, usize>,
    log: Vec<(Link, Packet)>,
}

impl Attacker {
    fn prepare(&self, attack: Option<(Place, Attack)>) {
        *self.state.lock().unwrap() = State { attack, ..State::default() };
    }

    fn log(&self) -> Vec<(Link, Packet)> {
        self.state.lock().unwrap().log.clone()
    }
}

impl Tap for Attacker {
    fn pass(&self, link: Link, mut packet: Packet, deliver: &mut dyn FnMut(Link, Packet)) {
        let mut state = self.state.lock().unwrap();
        let seen = state.seen.entry(link).or_default();
        let index = *seen;
        *seen += 1;
        let own =
            state.log.iter().rev().find(|(other, _)| other.from == link.to).map(|(_, packet)| packet.clone());
        state.log.push((link, packet.clone()));
        let Some((place, attack)) = state.attack.clone() else { return deliver(link, packet) };
        if place.link != link || place.index != index {
            deliver(link, packet);
            if place.link == link
                && let Some(held) = state.held.take()
            {
                deliver(link, held);
            }
            return;
        }
        match attack {
            Attack::Flip(bit) => match packet.bytes.get_mut(bit / 8) {
                Some(byte) => *byte ^= 1 << (bit % 8),
                None => packet.tag[(bit - 8 * packet.bytes.len()) / 8] ^= 1 << (bit % 8),
            },
            Attack::Drop => return,
            Attack::Delay(time) => {
                // Holds up this link's sender alone.
                drop(state);
                std::thread::sleep(time);
            }
            Attack::Relabel => packet.session ^= 1,
            Attack::Twice => deliver(link, packet.clone()),
            Attack::Swap => {
                state.held = Some(packet);
                return;
            }
            Attack::Reflect => packet = own.unwrap_or(Packet { tag: [0; 16], ..packet }),
            Attack::Cut(bytes) => packet.bytes.truncate(bytes),
            Attack::Extend(bytes) => packet.bytes.resize(packet.bytes.len() + bytes, 0),
            Attack::Replace(other) => packet = Packet { session: packet.session, ..other },
            Attack::Splice(other) => packet.bytes = other.bytes,
        }
        deliver(link, packet);
    }
}

/// A packet of a collective, and what it means to its receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    link: Link,
    /// Number of the packet on its link.
    index: usize,
    step: usize,
    record: usize,
    /// The receiver has its result already, and so may other ranks.
    closing: bool,
}

struct Scene {
    request: Request,
    algorithm: Algorithm,
    inputs: Vec<Vec<u8>>,
    group: Vec<Communicator>,
    attacker: Arc<Attacker>,
}

impl Scene {
    fn new(request: Request, algorithm: Algorithm) -> Self {
        let attacker = Arc::new(Attacker::default());
        let options = Options { algorithm, record_bytes: RECORD, ..options() };
        let group = tapped_group(RANKS, &options, attacker.clone());
        Self { request, algorithm, inputs: inputs(DTYPE, COUNT, RANKS, 9), group, attacker }
    }

    fn own(rank: usize) -> std::ops::Range<usize> {
        let elements = Partition::new(COUNT, RANKS).range(rank);
        4 * elements.start..4 * elements.end
    }

    /// What a rank must get.
    fn wanted(&self, rank: usize) -> Vec<u8> {
        match self.request {
            Request::AllReduce(op) => reduced(self.algorithm, false, DTYPE, op, &self.inputs),
            Request::ReduceScatter(op) => {
                reduced(self.algorithm, true, DTYPE, op, &self.inputs)[Self::own(rank)].to_vec()
            }
            Request::AllGather => {
                (0..RANKS).flat_map(|rank| self.inputs[rank][Self::own(rank)].to_vec()).collect()
            }
            Request::Broadcast { root } => self.inputs[root].clone(),
        }
    }

    /// Every packet of the collective, from the schedule.
    fn places(&self) -> Vec<Place> {
        let collective = match self.request {
            Request::AllReduce(_) => Collective::AllReduce,
            Request::ReduceScatter(_) => Collective::ReduceScatter,
            Request::AllGather => Collective::AllGather,
            Request::Broadcast { root } => Collective::Broadcast { root },
        };
        let schedule = Schedule::new(collective, self.algorithm, RANKS);
        let closing = schedule.programs.iter().map(Vec::len).max().unwrap();
        let mut places = Vec::new();
        let mut on_link: HashMap<Link, usize> = HashMap::new();
        let mut place = |link: Link, step, record, closing| {
            let index = on_link.entry(link).or_default();
            places.push(Place { link, index: *index, step, record, closing });
            *index += 1;
        };
        for (to, program) in schedule.programs.iter().enumerate() {
            for (step, what) in program.iter().enumerate() {
                let bytes = 4 * Partition::new(COUNT, schedule.chunks).range(what.chunk).len();
                for record in 0..bytes / RECORD {
                    for operand in &what.operands {
                        if let Operand::Received(origin) = operand {
                            place(Link { from: origin.from, to }, step, record, false);
                        }
                    }
                }
            }
            for from in (0..RANKS).filter(|from| *from != to) {
                place(Link { from, to }, closing, 0, true);
            }
        }
        places
    }

    /// Each rank's result and output, which began as a5.
    fn run(&mut self) -> Vec<(Result<()>, Vec<u8>)> {
        let (request, inputs) = (self.request, &self.inputs);
        on_all(&mut self.group, |rank| {
            let input = &inputs[rank.rank()];
            let own = Self::own(rank.rank());
            let (given, bytes) = match request {
                Request::ReduceScatter(_) => (&input[..], own.len()),
                Request::AllGather => (&input[own], input.len()),
                _ => (&input[..], input.len()),
            };
            let mut output = vec![0xa5; bytes];
            let result = rank.run(request, DTYPE, Buffers::Apart { input: given, output: &mut output });
            (result, output)
        })
    }

    fn run_clean(&mut self) -> Vec<(Link, Packet)> {
        self.attacker.prepare(None);
        for (rank, (result, output)) in self.run().into_iter().enumerate() {
            result.unwrap();
            assert_eq!(output, self.wanted(rank));
        }
        self.attacker.log()
    }

    fn timeout(&mut self, timeout: Duration) {
        self.group.iter_mut().for_each(|rank| rank.set_timeout(timeout));
    }

    /// Attacks, checks that nobody was deceived, and recovers. Returns the error of the rank that was attacked, which
    /// should notice at `noticed`.
    fn attack(&mut self, place: Place, attack: &Attack, noticed: Place) -> Error {
        let what = format!("{:?} {:?} {place:?} {attack:?}", self.request, self.algorithm);
        self.attacker.prepare(Some((place, attack.clone())));
        let results = self.run();
        let mut victim = None;
        for (rank, (result, output)) in results.into_iter().enumerate() {
            match result {
                Ok(()) => {
                    assert!(
                        noticed.closing && rank != noticed.link.to,
                        "{what}: rank {rank} noticed nothing"
                    );
                    assert_eq!(output, self.wanted(rank), "{what}: rank {rank}");
                }
                Err(error) => {
                    assert!(
                        matches!(error, Error::Record { .. } | Error::Deadline { .. }),
                        "{what}: {error}"
                    );
                    assert!(output.iter().all(|byte| *byte == 0), "{what}: rank {rank} holds {output:x?}");
                    assert!(self.group[rank].is_poisoned());
                    victim = victim.or_else(|| (rank == place.link.to).then_some(error));
                }
            }
        }
        self.recover();
        victim.unwrap_or_else(|| panic!("{what}: the receiver noticed nothing"))
    }

    fn recover(&mut self) {
        on_all(&mut self.group, |rank| rank.rekey().unwrap());
        self.run_clean();
    }

    /// Attacks a place, which the receiver must name.
    fn forge(&mut self, place: Place, attack: &Attack) {
        self.forge_noticed_at(place, attack, place);
    }

    fn forge_noticed_at(&mut self, place: Place, attack: &Attack, noticed: Place) {
        let error = self.attack(place, attack, noticed);
        let Error::Record { rank, step, record } = error else {
            panic!("{:?} {place:?} {attack:?}: {error}", self.algorithm);
        };
        assert_eq!(
            (rank, step, record),
            (noticed.link.to, noticed.step, noticed.record),
            "{:?} {place:?} {attack:?}",
            self.algorithm
        );
    }
}

fn each_scene(test: impl Fn(Scene)) {
    for request in REQUESTS {
        for algorithm in Algorithm::ALL {
            test(Scene::new(request, algorithm));
        }
    }
}

/// What the receiver gets next on the same link.
fn next(places: &[Place], place: Place) -> Option<Place> {
    places.iter().copied().find(|other| other.link == place.link && other.index == place.index + 1)
}

#[test]
fn the_places_are_those_of_the_packets() {
    each_scene(|mut scene| {
        let places = scene.places();
        let log = scene.run_clean();
        assert_eq!(places.len(), log.len());
        for place in places {
            let sent = log.iter().filter(|(link, _)| *link == place.link).nth(place.index);
            let bytes = sent.map(|(_, packet)| packet.bytes.len());
            assert_eq!(bytes, Some(if place.closing { 0 } else { RECORD }), "{place:?}");
        }
    });
}

#[test]
fn every_flipped_bit_of_a_record_and_its_tag() {
    for algorithm in Algorithm::ALL {
        let mut scene = Scene::new(SUM, algorithm);
        let places = scene.places();
        let data = |place: &&Place| !place.closing;
        let (first, last) = (places.iter().find(data).unwrap(), places.iter().rfind(data).unwrap());
        for place in [first, last] {
            for bit in 0..8 * (RECORD + 16) {
                scene.forge(*place, &Attack::Flip(bit));
            }
        }
        let closing = places.iter().find(|place| place.closing).unwrap();
        for bit in 0..128 {
            scene.forge(*closing, &Attack::Flip(bit));
        }
    }
}

#[test]
fn a_changed_record_in_every_place() {
    each_scene(|mut scene| {
        for (number, place) in scene.places().into_iter().enumerate() {
            let bytes = if place.closing { 0 } else { RECORD };
            scene.forge(place, &Attack::Flip(number * 7 % (8 * (bytes + 16))));
            scene.forge(place, &Attack::Extend(1));
            scene.forge(place, &Attack::Extend(16));
            scene.forge(place, &Attack::Reflect);
            if bytes > 0 {
                scene.forge(place, &Attack::Cut(bytes - 1));
                scene.forge(place, &Attack::Cut(0));
            }
        }
    });
}

/// The second copy comes where the next record should. After the last record of a link nothing is expected, until the
/// next collective.
#[test]
fn a_record_twice_in_every_place() {
    each_scene(|mut scene| {
        let places = scene.places();
        for &place in &places {
            if let Some(next) = next(&places, place) {
                scene.forge_noticed_at(place, &Attack::Twice, next);
                continue;
            }
            scene.attacker.prepare(Some((place, Attack::Twice)));
            for (rank, (result, output)) in scene.run().into_iter().enumerate() {
                result.unwrap();
                assert_eq!(output, scene.wanted(rank));
            }
            scene.attacker.prepare(None);
            let results = scene.run();
            let victim = results[place.link.to].0.as_ref().unwrap_err();
            assert!(matches!(victim, Error::Record { rank, .. } if *rank == place.link.to), "{victim}");
            assert!(
                results.iter().all(|(result, output)| result.is_ok() || output.iter().all(|byte| *byte == 0))
            );
            scene.recover();
        }
    });
}

/// A record that is missing, or late, is missed at the latest when the time is over; if another comes in its place, at
/// once.
#[test]
fn missing_and_swapped_records_in_every_place() {
    for algorithm in Algorithm::ALL {
        let mut scene = Scene::new(SUM, algorithm);
        for place in scene.places() {
            for attack in [Attack::Drop, Attack::Relabel, Attack::Swap] {
                scene.timeout(SHORT);
                scene.attacker.prepare(Some((place, attack.clone())));
                let results = scene.run();
                scene.timeout(PATIENT);
                for (rank, (result, output)) in results.into_iter().enumerate() {
                    match result {
                        Ok(()) => {
                            assert!(place.closing && rank != place.link.to);
                            assert_eq!(output, scene.wanted(rank));
                        }
                        Err(error) => {
                            assert!(
                                matches!(error, Error::Record { .. } | Error::Deadline { .. }),
                                "{error}"
                            );
                            assert_eq!(output, [0; 4 * COUNT], "{algorithm:?} {place:?} {attack:?}");
                        }
                    }
                }
                scene.recover();
            }
        }
    }
}

/// Late is as good as in time until the time is over.
#[test]
fn delayed_records() {
    for algorithm in Algorithm::ALL {
        let mut scene = Scene::new(SUM, algorithm);
        let place = scene.places()[0];
        scene.attacker.prepare(Some((place, Attack::Delay(SHORT))));
        for (rank, (result, output)) in scene.run().into_iter().enumerate() {
            result.unwrap();
            assert_eq!(output, scene.wanted(rank));
        }
        scene.timeout(SHORT);
        scene.attacker.prepare(Some((place, Attack::Delay(4 * SHORT))));
        for (result, output) in scene.run() {
            assert!(matches!(result, Err(Error::Deadline { .. })), "{result:?}");
            assert_eq!(output, [0; 4 * COUNT]);
        }
        scene.timeout(PATIENT);
        scene.recover();
    }
}

/// Records of another time or place, with honest tags: of the collective before, of the same collective, of the session
/// before, of a group with another secret, and of an earlier group with the same one.
#[test]
fn honest_records_in_the_wrong_place() {
    for algorithm in Algorithm::ALL {
        let mut scene = Scene::new(SUM, algorithm);
        let mut stranger = Scene::new(SUM, algorithm);
        stranger.group = {
            let links = tapped_network(RANKS, stranger.attacker.clone());
            let links = links.into_iter().map(|link| Box::new(link) as Box<dyn Transport>).collect();
            let options = Options { algorithm, record_bytes: RECORD, ..options() };
            Communicator::in_process_over(links, &GroupSecret::from_bytes([0xdd; 32]), &options).unwrap()
        };
        let of_stranger = stranger.run_clean();
        let of_restarted = Scene::new(SUM, algorithm).run_clean();
        let same_place = |log: &[(Link, Packet)], place: Place| {
            log.iter().filter(|(link, _)| *link == place.link).nth(place.index).unwrap().1.clone()
        };
        for place in scene.places() {
            // Ends in a new session, in which `before` is the latest collective.
            let before = scene.run_clean();
            scene.forge(place, &Attack::Replace(same_place(&before, place)));
            scene.forge(place, &Attack::Replace(same_place(&before, place)));
            scene.forge(place, &Attack::Replace(same_place(&of_stranger, place)));
            scene.forge(place, &Attack::Replace(same_place(&of_restarted, place)));
            if !place.closing {
                scene.forge(place, &Attack::Splice(same_place(&before, place)));
            }
        }
    }
}

/// The same collective, sequence number apart, in the next epoch.
#[test]
fn records_of_an_earlier_epoch() {
    for algorithm in Algorithm::ALL {
        let attacker = Arc::new(Attacker::default());
        let options = Options { algorithm, record_bytes: RECORD, key_bytes: 1 << 10, ..options() };
        let group = tapped_group(RANKS, &options, attacker.clone());
        let mut scene = Scene { group, attacker, ..Scene::new(SUM, algorithm) };
        let place = scene.places()[0];
        let old = scene.run_clean();
        while scene.group[0].session().epoch() == 0 {
            scene.run_clean();
        }
        let old = old.iter().find(|(link, _)| *link == place.link).unwrap().1.clone();
        scene.forge(place, &Attack::Replace(old));
    }
}

/// A rank whose closing record is held up doesn't know whether the others succeeded; those that did learn of its failure
/// in their next collective.
#[test]
fn who_succeeded_alone_learns_of_it_next_time() {
    let mut scene = Scene::new(SUM, Algorithm::RelayRing);
    let place = scene.places().into_iter().find(|place| place.closing).unwrap();
    scene.attacker.prepare(Some((place, Attack::Flip(0))));
    scene.run();
    scene.attacker.prepare(None);
    for (rank, (result, _)) in scene.run().into_iter().enumerate() {
        let error = result.unwrap_err();
        assert!(
            matches!(error, Error::Poisoned)
                || matches!(error, Error::Record { rank, .. } if rank == place.link.to),
            "rank {rank}: {error}"
        );
    }
    scene.recover();
}
