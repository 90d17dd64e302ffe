//! Groups that choose the algorithm of each all-reduce by its length, by a calibration made when they are set up.
//!
//! The candidates' all-reduces of a few lengths are timed where they will run, with and without cryptography, for a fifth of a
//! second at most; the cost model's figures are fitted to that, and say which algorithm to take from which length on
//! ([`Choices`]). Each algorithm that is taken at all has a group of its own, with mailboxes no larger than it needs.
//!
//! All ranks' results have the same bits. But of more than two ranks, sums of floats are rounded in an order that depends on the
//! algorithm, and the choice can differ from one set-up to the next: name the algorithm where every run must give the same
//! bits.

use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::rank::{GpuRank, check, vector_bytes};
use super::ring::{launches, load};
use super::{
    Collectives, Device, DeviceBuffer, GpuCommunicator, GpuGroup, GpuOptions, LaunchForm, Module,
    RankBuffers, Stream,
};
use crate::channel::{Crypto, GroupSecret};
use crate::collective::{Algorithm, Bootstrap, Request, Watch, agree, announce};
use crate::study::calibration::Calibration;
use crate::study::choose::{Choices, Question, calibrated};
use crate::study::fit::{Observation, Protection};
use crate::study::model::Topology;
use crate::{Dtype, Error, ReduceOp, Result};

/// Bytes of the vectors that are timed.
const LENGTHS: [usize; 5] = [2 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20];
/// How many of the lengths are timed among more than two ranks. The last is for two, whose exchange has kernels of its own: the
/// model, which has the ring's, is wrong about how they go on.
const AMONG_MORE: usize = 4;
/// All-reduces of each length; the first isn't counted.
const RUNS: usize = 4;
/// No further length is timed once this long was spent.
const BUDGET: Duration = Duration::from_millis(200);
/// With more ranks nothing is timed: fitting the model takes about a second with so many, and much longer with twice as many.
const MOST_RANKS: usize = 16;
/// The announcements' round after which lengths count theirs.
const FIRST_ROUND: u64 = 100;
/// Of where the ranks are, before any timing, and of what is chosen at last.
const PLACES: u64 = 1;
/// As above.
const CHOICE: u64 = 2;

/// What a choice is based on.
#[derive(Clone, Debug)]
pub struct Calibrated {
    /// The cost model's figures.
    pub calibration: Calibration,
    /// What they were fitted to.
    pub observations: Vec<Observation>,
    /// How long the all-reduces took that were timed.
    pub spent: Duration,
}

impl GpuOptions {
    /// The algorithms that are worth considering for so many ranks, of those that are supported with these options. A ring
    /// never takes less than a relay ring.
    pub fn candidates(&self, ranks: usize) -> Vec<Algorithm> {
        [Algorithm::RelayRing, Algorithm::Exchange, Algorithm::Direct, Algorithm::Tree]
            .into_iter()
            .filter(|&algorithm| check(&Self { algorithm, ..self.clone() }, ranks).is_ok())
            .collect()
    }
}

/// Vectors and streams of this process's ranks, to time with.
struct Room {
    streams: Vec<Stream>,
    vectors: Vec<DeviceBuffer>,
}

impl Room {
    fn new(devices: &[Device], bytes: usize) -> Result<Self> {
        let streams = devices.iter().map(Stream::new).collect::<Result<Vec<_>>>()?;
        let zeros = |(device, stream): (&Device, &Stream)| {
            let mut vector = DeviceBuffer::new(device, bytes)?;
            // Zeros stay zeros, so that every run takes the same paths.
            vector.fill(0, stream)?;
            Ok(vector)
        };
        Ok(Self { vectors: devices.iter().zip(&streams).map(zeros).collect::<Result<_>>()?, streams })
    }

    /// Microseconds of one all-reduce among several in a row: the median.
    fn time(&self, team: &mut impl Collectives, bytes: usize) -> Result<f64> {
        let streams: Vec<_> = self.streams.iter().collect();
        let place = |vector: &DeviceBuffer| RankBuffers { input: vector.pointer(), output: vector.pointer() };
        let buffers: Vec<_> = self.vectors.iter().map(place).collect();
        let mut marks = vec![streams[0].record()?];
        let sum = Request::AllReduce(ReduceOp::Sum);
        let mut queued = Ok(());
        for _ in 0..RUNS {
            // SAFETY: the vectors hold that many bytes, on their ranks' devices; the streams are waited for below.
            queued = unsafe { team.run(sum, &buffers, bytes / Dtype::F32.size(), Dtype::F32, &streams) };
            if queued.is_err() {
                break;
            }
            marks.push(streams[0].record()?);
        }
        for stream in &streams {
            stream.synchronize()?;
        }
        queued?;
        team.outcome()?;
        let times = marks.windows(2).skip(1).map(|pair| pair[1].since(&pair[0]));
        let mut times = times.collect::<Result<Vec<_>>>()?;
        times.sort();
        Ok(times[times.len() / 2].as_secs_f64() * 1e6)
    }
}

/// A candidate, to be timed: with cryptography, or without, for what lies between the ranks.
struct Probe<T> {
    algorithm: Algorithm,
    crypto: Crypto,
    team: T,
}

/// Which probes there are: all candidates as they will be used, and of sealed ones without keys those that differ most in
/// their number of hops.
fn probes(question: &Question) -> Vec<(Algorithm, Crypto)> {
    let mut probes: Vec<_> =
        question.candidates.iter().map(|&algorithm| (algorithm, question.crypto)).collect();
    if question.crypto != Crypto::None {
        let plain = [Algorithm::RelayRing, Algorithm::Direct].into_iter();
        let plain = plain.filter(|algorithm| question.candidates.contains(algorithm));
        probes.extend(plain.map(|algorithm| (algorithm, Crypto::None)));
    }
    probes
}

/// The lengths that are timed for vectors of up to `max_bytes`; at least the shortest.
fn lengths(max_bytes: usize, ranks: usize) -> impl Iterator<Item = usize> {
    let timed = if ranks == 2 { LENGTHS.len() } else { AMONG_MORE };
    LENGTHS.into_iter().take(timed).filter(move |&bytes| bytes <= max_bytes.max(LENGTHS[0]))
}

/// The longest of them.
fn longest(max_bytes: usize, ranks: usize) -> usize {
    lengths(max_bytes, ranks).last().unwrap_or(LENGTHS[0])
}

/// Options of the groups that are timed.
fn probing(options: &GpuOptions, ranks: usize, (algorithm, crypto): (Algorithm, Crypto)) -> GpuOptions {
    let max_bytes = longest(options.max_bytes, ranks);
    GpuOptions { algorithm, crypto, max_bytes, keystream: None, ..options.clone() }
}

/// Times the probes, the shortest vectors first. After each length `go_on` says whether to go on, given what was spent so far
/// or why it failed; all ranks must be told the same.
fn measure<T: Collectives>(
    probes: &mut [Probe<T>],
    room: &Room,
    question: &Question,
    mut go_on: impl FnMut(Result<Duration>) -> Result<bool>,
) -> Result<(Vec<Observation>, Duration)> {
    // Loads the kernels, which is not to be timed.
    let warm = probes.iter_mut().try_for_each(|probe| room.time(&mut probe.team, LENGTHS[0]).map(drop));
    go_on(warm.map(|()| Duration::ZERO))?;
    let start = Instant::now();
    let mut observations = Vec::new();
    for bytes in lengths(question.max_bytes, question.ranks) {
        let round = probes.iter_mut().try_for_each(|Probe { algorithm, crypto, team }| {
            observations.push(Observation {
                kernels: Protection::fused(*crypto),
                algorithm: algorithm.name().into(),
                one_gpu: question.topology == Topology::OneGpu,
                ranks: question.ranks,
                bytes,
                us: room.time(team, bytes)?,
                longest_record: None,
            });
            Ok(())
        });
        if !go_on(round.map(|()| start.elapsed()))? {
            break;
        }
    }
    Ok((observations, start.elapsed()))
}

/// What follows from the measurements on `device`'s machine.
fn decide(
    device: &Device,
    question: &Question,
    (observations, spent): (Vec<Observation>, Duration),
) -> Result<(Choices, Calibrated)> {
    let (machine, multiprocessors) = (device.name()?, device.multiprocessors()?);
    let calibration = calibrated(&Calibration::h200(), &observations, &machine, multiprocessors)?;
    let choices = Choices::new(&calibration, question, &observations)?;
    Ok((choices, Calibrated { calibration, observations, spent }))
}

/// A team for each algorithm that is taken.
struct Teams<T> {
    choices: Choices,
    teams: Vec<(Algorithm, T)>,
    max_bytes: usize,
}

impl<T: Collectives> Teams<T> {
    /// `make` sets up the team of an algorithm for vectors of up to so many bytes. Other collectives than all-reduces are the
    /// last team's.
    fn new(
        choices: Choices,
        max_bytes: usize,
        mut make: impl FnMut(Algorithm, usize) -> Result<T>,
    ) -> Result<Self> {
        let longest = choices.longest_of_each(max_bytes);
        let teams = longest.into_iter().map(|(algorithm, bytes)| Ok((algorithm, make(algorithm, bytes)?)));
        Ok(Self { teams: teams.collect::<Result<_>>()?, choices, max_bytes })
    }

    /// # Safety
    /// As [`Collectives::run`].
    unsafe fn run(
        &mut self,
        request: Request,
        buffers: &[RankBuffers],
        count: usize,
        dtype: Dtype,
        streams: &[&Stream],
    ) -> Result<()> {
        if self.is_poisoned() {
            return Err(Error::Poisoned);
        }
        let bytes = vector_bytes(count, dtype, self.max_bytes)?;
        let algorithm = match request {
            Request::AllReduce(_) => self.choices.algorithm(bytes),
            _ => self.choices.algorithm(usize::MAX),
        };
        match self.teams.iter_mut().find(|(name, _)| *name == algorithm) {
            // SAFETY: the caller's.
            Some((_, team)) => unsafe { team.run(request, buffers, count, dtype, streams) },
            None => Err(Error::InvalidArgument(format!("no group does the {} algorithm", algorithm.name()))),
        }
    }

    /// The first failure. All are asked, so that each knows.
    fn outcome(&mut self) -> Result<()> {
        let outcomes: Vec<_> = self.teams.iter_mut().map(|(_, team)| team.outcome()).collect();
        outcomes.into_iter().collect()
    }

    fn rekey(&mut self) -> Result<()> {
        self.teams.iter_mut().try_for_each(|(_, team)| team.rekey())
    }

    fn is_poisoned(&self) -> bool {
        self.teams.iter().any(|(_, team)| team.is_poisoned())
    }

    fn close(self) -> Result<()> {
        self.teams.into_iter().try_for_each(|(_, team)| Box::new(team).close())
    }
}

/// A [`GpuGroup`] whose all-reduces each take the algorithm that a calibration found the fastest for their length. It is
/// made when the group is set up.
pub struct AutoGroup {
    teams: Teams<GpuGroup>,
    calibrated: Option<Calibrated>,
}

impl fmt::Debug for AutoGroup {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "AutoGroup({})", self.teams.choices)
    }
}

impl AutoGroup {
    /// Sets up one rank on each of `devices`, with the kernels of `image` (PTX or a cubin); `options.algorithm` is not looked
    /// at. Nothing is calibrated, and [`GpuOptions::fastest_algorithm`] taken, where there is no choice, of more than 16 ranks,
    /// and where each step is a launch.
    ///
    /// # Errors
    /// As [`GpuGroup::new`], and a failure of a collective.
    pub fn new(devices: &[Device], image: &[u8], secret: &GroupSecret, options: GpuOptions) -> Result<Self> {
        let ranks = devices.len();
        refuse_keystream(&options)?;
        let modules = load(devices, image)?;
        let group = |options: GpuOptions| GpuGroup::with_modules(devices, &modules, secret, options);
        let shared = |device: &Device| devices.iter().filter(|o| o.ordinal() == device.ordinal()).count() > 1;
        let topology = if devices.iter().any(shared) { Topology::OneGpu } else { Topology::NvLink };
        let question = question(&options, ranks, topology);
        // Where the ranks can't all be resident, a ring is what there is.
        let ring = GpuOptions { algorithm: Algorithm::RelayRing, ..options.clone() };
        let persistent = launches(devices, &ring)?.0 == LaunchForm::Persistent;
        let (choices, calibrated) = if persistent && calibrates(&question, &options) {
            let room = Room::new(devices, longest(options.max_bytes, ranks))?;
            let probe = |(algorithm, crypto)| {
                Ok(Probe { algorithm, crypto, team: group(probing(&options, ranks, (algorithm, crypto)))? })
            };
            let mut probes = probes(&question).into_iter().map(probe).collect::<Result<Vec<_>>>()?;
            let measured = measure(&mut probes, &room, &question, |spent| Ok(spent? < BUDGET))?;
            let (choices, calibrated) = decide(&devices[0], &question, measured)?;
            (choices, Some(calibrated))
        } else {
            (Choices::always(uncalibrated(&options, ranks)), None)
        };
        let teams = Teams::new(choices, options.max_bytes, |algorithm, max_bytes| {
            group(GpuOptions { algorithm, max_bytes, ..options.clone() })
        })?;
        Ok(Self { teams, calibrated })
    }

    /// What the ranks do for each length.
    pub fn choices(&self) -> &Choices {
        &self.teams.choices
    }

    /// How its collectives become launches; not [`LaunchForm::Auto`].
    pub fn launch_form(&self) -> LaunchForm {
        self.teams.teams.first().map_or(LaunchForm::Persistent, |(_, team)| team.launch_form())
    }

    /// Why; `None` when nothing was measured.
    pub fn calibrated(&self) -> Option<&Calibrated> {
        self.calibrated.as_ref()
    }
}

impl Collectives for AutoGroup {
    /// Another than an all-reduce takes the longest vectors' algorithm.
    unsafe fn run(
        &mut self,
        request: Request,
        buffers: &[RankBuffers],
        count: usize,
        dtype: Dtype,
        streams: &[&Stream],
    ) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { self.teams.run(request, buffers, count, dtype, streams) }
    }

    fn outcome(&mut self) -> Result<()> {
        self.teams.outcome()
    }

    fn rekey(&mut self) -> Result<()> {
        self.teams.rekey()
    }

    fn is_poisoned(&self) -> bool {
        self.teams.is_poisoned()
    }

    fn close(self: Box<Self>) -> Result<()> {
        self.teams.close()
    }
}

fn question(options: &GpuOptions, ranks: usize, topology: Topology) -> Question {
    Question {
        topology,
        crypto: options.crypto,
        ranks,
        max_bytes: options.max_bytes,
        candidates: options.candidates(ranks),
    }
}

/// Whether there is something to find out.
fn calibrates(question: &Question, options: &GpuOptions) -> bool {
    question.candidates.len() > 1
        && (2..=MOST_RANKS).contains(&question.ranks)
        && options.launch != LaunchForm::PerStep
}

/// What is taken when nothing is measured.
fn uncalibrated(options: &GpuOptions, ranks: usize) -> Algorithm {
    match options.candidates(ranks)[..] {
        [only] => only,
        _ => GpuOptions::fastest_algorithm(ranks),
    }
}

/// One bootstrap for several groups of the same ranks, who set them up in the same order.
#[derive(Clone)]
struct Shared(Arc<Mutex<Box<dyn Bootstrap>>>);

impl Shared {
    fn with<R>(&self, work: impl FnOnce(&mut dyn Bootstrap) -> R) -> R {
        work(self.0.lock().unwrap_or_else(PoisonError::into_inner).as_mut())
    }
}

impl Bootstrap for Shared {
    fn gather(&mut self, message: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.with(|bootstrap| bootstrap.gather(message, timeout))
    }

    fn interface(&self) -> IpAddr {
        self.with(|bootstrap| bootstrap.interface())
    }

    fn watch(&self) -> Option<Box<dyn Watch>> {
        self.with(|bootstrap| bootstrap.watch())
    }
}

/// A [`GpuCommunicator`] whose all-reduces each take the algorithm that a calibration found the fastest for their length. All
/// ranks measure together; what rank 0 finds is what all of them do, authenticated like everything else that they agree on
/// at set-up.
pub struct AutoCommunicator {
    teams: Teams<GpuCommunicator>,
    calibrated: Option<Calibrated>,
}

impl fmt::Debug for AutoCommunicator {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "AutoCommunicator({})", self.teams.choices)
    }
}

impl AutoCommunicator {
    /// Joins a group, as [`GpuCommunicator::with_image`]; `options.algorithm` is not looked at. Nothing is calibrated, and
    /// [`GpuOptions::fastest_algorithm`] taken, where there is no choice and of more than 16 ranks.
    ///
    /// # Errors
    /// As [`GpuCommunicator::new`], and a failure of a collective.
    pub fn new(
        secret: &GroupSecret,
        rank: usize,
        ranks: usize,
        bootstrap: Box<dyn Bootstrap>,
        device: &Device,
        image: &[u8],
        options: GpuOptions,
    ) -> Result<Self> {
        refuse_keystream(&options)?;
        let mut meeting = Shared(Arc::new(Mutex::new(bootstrap)));
        let (own, timeout) = ([rank, ranks], options.timeout);
        // May take long, and so comes before anybody waits for this rank.
        let module = Module::load(device, image);
        let terms = GpuRank::terms(&options, ranks);
        let root = agree(secret, terms, rank, &mut meeting, timeout, || Ok(()))?;
        let place = module.and_then(|module| Ok((device.bus_id()?.to_vec(), module)));
        let (places, module) = announce(&root, PLACES, own, place, &mut meeting, timeout)?;
        let shared = |place: &Vec<u8>| places.iter().filter(|other| *other == place).count() > 1;
        let topology = if places.iter().any(shared) { Topology::OneGpu } else { Topology::NvLink };
        let question = question(&options, ranks, topology);
        let join = |options: GpuOptions| {
            let (meeting, module) = (Box::new(meeting.clone()), Ok(module.clone()));
            GpuCommunicator::with_module(secret, own, meeting, device, module, options)
        };
        let (choices, calibrated) = match calibrates(&question, &options) {
            false => (Choices::always(uncalibrated(&options, ranks)), None),
            true => {
                let most = longest(options.max_bytes, ranks);
                let probe = |(algorithm, crypto)| {
                    Ok(Probe {
                        algorithm,
                        crypto,
                        team: join(probing(&options, ranks, (algorithm, crypto)))?,
                    })
                };
                let mut probes = probes(&question).into_iter().map(probe).collect::<Result<Vec<_>>>()?;
                let mut round = FIRST_ROUND;
                let mut announcing = meeting.clone();
                // How long rank 0 has been at it decides for all.
                let go_on = |spent: Result<Duration>| {
                    round += 1;
                    let spent = spent.map(|spent| ((spent.as_micros() as u64).to_le_bytes().to_vec(), ()));
                    let (all, ()) = announce(&root, round, own, spent, &mut announcing, timeout)?;
                    let micros = all[0].as_slice().try_into().map(u64::from_le_bytes);
                    let micros = micros.map_err(|_| malformed())?;
                    Ok(Duration::from_micros(micros) < BUDGET)
                };
                let room = Room::new(std::slice::from_ref(device), most)?;
                let measured = measure(&mut probes, &room, &question, go_on)?;
                probes.into_iter().try_for_each(|probe| Box::new(probe.team).close())?;
                let found = match rank {
                    0 => decide(device, &question, measured)
                        .map(|(choices, calibrated)| (choices.encode(), Some(calibrated))),
                    _ => Ok((Vec::new(), None)),
                };
                let (all, calibrated) = announce(&root, CHOICE, own, found, &mut meeting.clone(), timeout)?;
                let choices = Choices::decode(&all[0]).ok_or_else(malformed)?;
                check_choice(&choices, &question)?;
                (choices, calibrated)
            }
        };
        let teams = Teams::new(choices, options.max_bytes, |algorithm, max_bytes| {
            join(GpuOptions { algorithm, max_bytes, ..options.clone() })
        })?;
        Ok(Self { teams, calibrated })
    }

    /// What the ranks do for each length.
    pub fn choices(&self) -> &Choices {
        &self.teams.choices
    }

    /// Why, on rank 0; `None` on others, and when nothing was measured.
    pub fn calibrated(&self) -> Option<&Calibrated> {
        self.calibrated.as_ref()
    }
}

impl Collectives for AutoCommunicator {
    /// Another than an all-reduce takes the longest vectors' algorithm.
    unsafe fn run(
        &mut self,
        request: Request,
        buffers: &[RankBuffers],
        count: usize,
        dtype: Dtype,
        streams: &[&Stream],
    ) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { self.teams.run(request, buffers, count, dtype, streams) }
    }

    fn outcome(&mut self) -> Result<()> {
        self.teams.outcome()
    }

    fn rekey(&mut self) -> Result<()> {
        self.teams.rekey()
    }

    fn is_poisoned(&self) -> bool {
        self.teams.is_poisoned()
    }

    fn close(self: Box<Self>) -> Result<()> {
        self.teams.close()
    }
}

/// Keystream ahead of time is one algorithm's, so there is nothing to choose.
fn refuse_keystream(options: &GpuOptions) -> Result<()> {
    match options.keystream {
        None => Ok(()),
        Some(_) => Err(Error::InvalidArgument(
            "keystream ahead of time in a group that chooses its algorithm: name one".into(),
        )),
    }
}

fn malformed() -> Error {
    Error::Handshake("what rank 0 announced of the calibration is of another version".into())
}

/// Refuses a choice of what this rank would not do.
fn check_choice(choices: &Choices, question: &Question) -> Result<()> {
    let chosen = choices.longest_of_each(question.max_bytes);
    match chosen.iter().find(|(algorithm, _)| !question.candidates.contains(algorithm)) {
        None => Ok(()),
        Some((algorithm, _)) => Err(Error::Handshake(format!(
            "rank 0 chose the {} algorithm, which this rank doesn't support",
            algorithm.name()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channel::KeyLength;
    use crate::cuda::KeystreamAhead;

    const SEALED: Crypto = Crypto::Gcm(KeyLength::Aes128);

    /// Takes vectors of up to so many bytes, and notes their lengths.
    struct Noting {
        most: usize,
        seen: Vec<usize>,
        poisoned: bool,
    }

    impl Collectives for Noting {
        unsafe fn run(
            &mut self,
            _: Request,
            _: &[RankBuffers],
            count: usize,
            dtype: Dtype,
            _: &[&Stream],
        ) -> Result<()> {
            self.seen.push(vector_bytes(count, dtype, self.most)?);
            Ok(())
        }

        fn outcome(&mut self) -> Result<()> {
            if self.poisoned {
                Err(Error::Deadline { rank: 0, peer: 1, step: 0, waited_ms: 1 })
            } else {
                Ok(())
            }
        }

        fn is_poisoned(&self) -> bool {
            self.poisoned
        }

        fn rekey(&mut self) -> Result<()> {
            self.poisoned = false;
            Ok(())
        }

        fn close(self: Box<Self>) -> Result<()> {
            Ok(())
        }
    }

    fn teams(choices: Choices) -> Teams<Noting> {
        Teams::new(choices, 1 << 20, |_, most| Ok(Noting { most, seen: Vec::new(), poisoned: false }))
            .unwrap()
    }

    fn run(teams: &mut Teams<Noting>, request: Request, bytes: usize) -> Result<()> {
        // SAFETY: nothing is done with them.
        unsafe { teams.run(request, &[], bytes, Dtype::U8, &[]) }
    }

    #[test]
    fn each_length_goes_to_its_algorithm_s_team_which_has_room_for_it() {
        let mut bytes = Choices::always(Algorithm::RelayRing).encode();
        let short = [&(4096_u64).to_le_bytes()[..], &[Algorithm::Direct as u8]].concat();
        bytes.splice(0..0, short);
        let mut teams = teams(Choices::decode(&bytes).unwrap());
        let sum = Request::AllReduce(ReduceOp::Sum);
        for bytes in [0, 1, 4096, 4097, 1 << 20] {
            run(&mut teams, sum, bytes).unwrap();
        }
        // Other collectives are the last one's, whatever their length.
        run(&mut teams, Request::AllGather, 5).unwrap();
        let seen: Vec<_> =
            teams.teams.iter().map(|(name, team)| (*name, team.most, team.seen.clone())).collect();
        let expected = [
            (Algorithm::Direct, 4096, vec![0, 1, 4096]),
            (Algorithm::RelayRing, 1 << 20, vec![4097, 1 << 20, 5]),
        ];
        assert_eq!(seen, expected);
        assert!(matches!(run(&mut teams, sum, (1 << 20) + 1), Err(Error::InvalidArgument(_))));
    }

    #[test]
    fn a_failure_of_one_team_stops_all() {
        let mut bytes = Choices::always(Algorithm::RelayRing).encode();
        bytes.splice(0..0, [&(64_u64).to_le_bytes()[..], &[Algorithm::Direct as u8]].concat());
        let mut teams = teams(Choices::decode(&bytes).unwrap());
        teams.teams[1].1.poisoned = true;
        let sum = Request::AllReduce(ReduceOp::Sum);
        assert!(matches!(run(&mut teams, sum, 1), Err(Error::Poisoned)));
        assert!(teams.outcome().is_err());
        teams.rekey().unwrap();
        assert!(teams.outcome().is_ok() && run(&mut teams, sum, 1).is_ok());
    }

    #[test]
    fn candidates_are_what_the_options_allow() {
        let candidates = |options: GpuOptions, ranks| options.candidates(ranks);
        for ranks in [2, 3, 8] {
            let all = candidates(GpuOptions::default(), ranks);
            assert!(all.contains(&Algorithm::RelayRing) && !all.contains(&Algorithm::Ring), "{all:?}");
            let steps =
                candidates(GpuOptions { launch: LaunchForm::PerStep, ..GpuOptions::default() }, ranks);
            assert!(
                !steps.contains(&Algorithm::Direct) && steps.contains(&Algorithm::RelayRing),
                "{steps:?}"
            );
        }
        let keystream = Some(KeystreamAhead { collectives: 1, bytes: 1 << 20, makers: None });
        let ahead = GpuOptions { keystream, crypto: SEALED, ..GpuOptions::default() };
        assert_eq!(ahead.candidates(2), [Algorithm::RelayRing, Algorithm::Exchange]);
        assert_eq!(ahead.candidates(4), [Algorithm::RelayRing]);
        assert_eq!(uncalibrated(&ahead, 2), Algorithm::Exchange);
        assert!(refuse_keystream(&ahead).is_err() && refuse_keystream(&GpuOptions::default()).is_ok());
    }

    #[test]
    fn what_is_timed_covers_every_candidate_and_the_way_between_ranks() {
        let options = GpuOptions { crypto: SEALED, ..GpuOptions::default() };
        let question = question(&options, 4, Topology::OneGpu);
        let probes = probes(&question);
        assert!(question.candidates.iter().all(|&algorithm| probes.contains(&(algorithm, SEALED))));
        assert!(probes.contains(&(Algorithm::RelayRing, Crypto::None)));
        assert_eq!(lengths(1 << 20, 4).collect::<Vec<_>>(), LENGTHS[..3]);
        assert_eq!(lengths(1, 4).collect::<Vec<_>>(), LENGTHS[..1]);
        assert_eq!(lengths(1 << 30, 4).collect::<Vec<_>>(), LENGTHS[..4]);
        assert_eq!(lengths(1 << 30, 2).collect::<Vec<_>>(), LENGTHS);
        let most = |ranks| probing(&options, ranks, (Algorithm::RelayRing, Crypto::None)).max_bytes;
        assert_eq!([most(2), most(4)], [LENGTHS[4], LENGTHS[3]]);
        assert_eq!(probing(&options, 4, (Algorithm::RelayRing, Crypto::None)).crypto, Crypto::None);
    }

    #[test]
    fn a_choice_that_this_rank_cannot_do_is_refused() {
        let options = GpuOptions { launch: LaunchForm::PerStep, ..GpuOptions::default() };
        let question = question(&options, 4, Topology::OneGpu);
        assert!(check_choice(&Choices::always(Algorithm::RelayRing), &question).is_ok());
        let refusal = check_choice(&Choices::always(Algorithm::Tree), &question);
        assert!(matches!(&refusal, Err(Error::Handshake(what)) if what.contains("tree")), "{refusal:?}");
    }
}
