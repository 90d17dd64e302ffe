//! Collectives on GPUs: one persistent kernel a rank for a whole collective, or a launch for each of its steps
//! ([`LaunchForm`]).
//!
//! A [`GpuGroup`] has one rank on each of the devices it is given; a device may be given more than once. Ranks store
//! records straight into their successors' inboxes, over NVLink where they are on different GPUs.

use std::thread;
use std::time::Duration;

use super::ahead::Ahead;
use super::breakdown::{Gate, StepTimes, Timer};
use super::rank::{GpuRank, Ready, check, check_one_each, launches_per_step, shared_blocks};
use super::ring_plan::Part;
use super::{Collectives, Device, DeviceBuffer, Event, KeystreamAhead, Module, Stream};
use crate::channel::{Crypto, GroupSecret, KeyLength, volume};
use crate::collective::{Algorithm, InProcess, Request};
use crate::{Dtype, Error, Result};

/// How a rank's part in a collective becomes kernel launches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LaunchForm {
    /// Persistent where it can be, else step by step: where more ranks share a GPU than it has multiprocessors.
    #[default]
    Auto,
    /// One kernel for the whole collective, which waits for other ranks' records as it goes. The fastest. All blocks of
    /// all ranks must be resident on their GPUs at once.
    Persistent,
    /// A kernel for each step, ordered among the ranks by CUDA events, and one that ends the collective. No kernel waits for
    /// one that has not ended, so that it works however few blocks a GPU runs at once, and under tools that run one
    /// kernel at a time. Not for [`Algorithm::Direct`] and [`Algorithm::Tree`], nor for ranks in several processes.
    PerStep,
}

/// How a group is set up.
#[derive(Clone, Debug)]
pub struct GpuOptions {
    /// What protects records.
    pub crypto: Crypto,
    /// How collectives are done.
    pub algorithm: Algorithm,
    /// Length in bytes of the longest vector of any collective. The inboxes take four times as much on each rank; by a tree six
    /// times, by an exchange twice for each other rank.
    pub max_bytes: usize,
    /// Bytes of a record, a multiple of 16; chosen by the vector's length when `None`. Sealed at most 992 KiB, by an exchange of
    /// two ranks 256.
    pub record_bytes: Option<usize>,
    /// How many multiprocessors a rank may take; all of its device's, shared evenly by the ranks on it, when `None`.
    pub sm_budget: Option<u32>,
    /// How collectives become launches.
    pub launch: LaunchForm,
    /// How long one collective may take before it fails.
    pub timeout: Duration,
    /// Bytes that a key may encrypt before the next epoch begins. One collective must fit.
    pub key_bytes: u64,
    /// Keystream that [`Collectives::make_keystream`] may make ahead of time: for sealed rings, and exchanges of two ranks, of
    /// one launch. [`KeystreamAhead::pays`] says where that shortens a training's iterations.
    pub keystream: Option<KeystreamAhead>,
}

impl Default for GpuOptions {
    fn default() -> Self {
        Self {
            crypto: Crypto::Gcm(KeyLength::Aes256),
            algorithm: Algorithm::Ring,
            max_bytes: 64 << 20,
            record_bytes: None,
            sm_budget: None,
            launch: LaunchForm::Auto,
            timeout: Duration::from_secs(30),
            key_bytes: volume::DEFAULT_BYTES,
            keystream: None,
        }
    }
}

impl GpuOptions {
    /// The algorithm that takes this many sealed ranks the least time, as measured on H200s from 1 MiB on: two ranks exchange
    /// their whole vectors, more form a relay ring.
    pub const fn fastest_algorithm(ranks: usize) -> Algorithm {
        if ranks == 2 { Algorithm::Exchange } else { Algorithm::RelayRing }
    }
}

/// Where what a rank gives and what it gets lie in its device's memory, aligned to an element.
///
/// | collective | input | output |
/// |---|---|---|
/// | all-reduce | the whole vector | the whole vector |
/// | reduce-scatter | the whole vector | this rank's [chunk](crate::collective::Partition) |
/// | all-gather | this rank's chunk | the whole vector |
/// | broadcast | the whole vector; not looked at but on the root | the whole vector |
#[derive(Clone, Copy, Debug)]
pub struct RankBuffers {
    /// Device address of what the rank gives.
    pub input: u64,
    /// Device address of what it gets: the place in the vector that `input` has there, or apart from it.
    pub output: u64,
}

/// Launches of a collective that are queued on held streams: the driver makes a thread that queues more than it has room for
/// wait, which would be for ever. How many that are is not documented.
const QUEUED_AHEAD: usize = 512;

/// Ranks on GPUs that do collectives together, all of one process.
#[derive(Debug)]
pub struct GpuGroup {
    secret: GroupSecret,
    ranks: Vec<GpuRank>,
    bootstraps: Vec<InProcess>,
    /// When every step is a launch.
    order: Option<Order>,
}

impl Drop for GpuGroup {
    /// After a failure a rank's kernel may still write to another's memory, which must not be freed before.
    fn drop(&mut self) {
        for rank in &self.ranks {
            let _ = rank.device().synchronize();
        }
    }
}

/// The events that order launches of single steps.
#[derive(Debug)]
struct Order {
    /// After the latest step of each rank.
    done: Vec<Event>,
    /// After the last steps of all.
    all_done: Event,
}

impl Order {
    fn new(devices: &[Device]) -> Result<Self> {
        Ok(Self {
            done: devices.iter().map(Event::untimed).collect::<Result<_>>()?,
            all_done: Event::untimed(&devices[0])?,
        })
    }
}

impl GpuGroup {
    /// Sets up one rank on each of `devices`, with the kernels of `image` (PTX or a cubin).
    ///
    /// # Errors
    /// [`Error::Unsupported`] when two devices cannot reach each other's memory; [`Error::InvalidArgument`] for options
    /// out of their domain; [`Error::Cuda`], for example when memory runs out.
    pub fn new(devices: &[Device], image: &[u8], secret: &GroupSecret, options: GpuOptions) -> Result<Self> {
        check(&options, devices.len())?;
        // Refuses what can't be done before anything is loaded.
        launches(devices, &options)?;
        Self::with_modules(devices, &load(devices, image)?, secret, options)
    }

    /// As [`Self::new`], with kernels that are [loaded](load) already.
    pub(super) fn with_modules(
        devices: &[Device],
        modules: &[Module],
        secret: &GroupSecret,
        mut options: GpuOptions,
    ) -> Result<Self> {
        let count = devices.len();
        check(&options, count)?;
        let blocks;
        (options.launch, blocks) = launches(devices, &options)?;
        let mut ranks = Vec::with_capacity(count);
        for (number, (device, module)) in devices.iter().zip(modules).enumerate() {
            for peer in devices {
                device.enable_peer_access(peer)?;
            }
            ranks.push(GpuRank::new(module, number, count, blocks, &options)?);
        }
        let mailboxes: Vec<_> = ranks.iter().map(GpuRank::own_mailbox).collect();
        for rank in &mut ranks {
            rank.connect(&mailboxes)?;
        }
        let order = match options.launch {
            LaunchForm::PerStep => Some(Order::new(devices)?),
            LaunchForm::Auto | LaunchForm::Persistent => None,
        };
        let mut group = Self { secret: secret.clone(), ranks, bootstraps: InProcess::group(count), order };
        group.rekey()?;
        Ok(group)
    }

    /// Queues a launch for each step: round by round, so that an event has been recorded when it is waited for. A rank's step
    /// comes after its predecessor's of the round before. All ranks' results are complete, or one has failed, before any
    /// rank closes the collective; so a failure wipes every rank's result. `begun` becomes true once anything is queued.
    ///
    /// # Safety
    /// As [`Self::run`].
    unsafe fn run_steps(
        &mut self,
        ready: &[Ready],
        buffers: &[RankBuffers],
        streams: &[&Stream],
        begun: &mut bool,
        mut timer: Option<&mut Timer>,
    ) -> Result<()> {
        let Some(Order { done, all_done }) = &self.order else { return Ok(()) };
        let (ranks, plan) = (self.ranks.len(), ready[0].plan());
        let mut launch = |own: &mut GpuRank, rank: usize, part: Part| {
            let stream = streams[rank];
            // SAFETY: by the caller's promise.
            let mut launch = || unsafe { own.launch(ready[rank].only(part), buffers[rank], stream) };
            match &mut timer {
                Some(timer) => timer.time(rank, stream, launch),
                None => launch(),
            }
        };
        for round in 0..plan.rounds() {
            let at_work: Vec<_> =
                (0..ranks).filter_map(|rank| Some((rank, plan.step_in(rank, round)?))).collect();
            for &(rank, _) in at_work.iter().filter(|_| round > 0) {
                streams[rank].wait(&done[(rank + ranks - 1) % ranks])?;
            }
            for (rank, part) in at_work {
                launch(&mut self.ranks[rank], rank, part)?;
                *begun = true;
                streams[rank].mark(&done[rank])?;
            }
        }
        if plan.rounds() > 0 {
            done[1..].iter().try_for_each(|done| streams[0].wait(done))?;
            streams[0].mark(all_done)?;
            streams[1..].iter().try_for_each(|stream| stream.wait(all_done))?;
        }
        for (rank, own) in self.ranks.iter_mut().enumerate() {
            launch(own, rank, Part::Close)?;
        }
        Ok(())
    }

    /// Whether no keystream lies in any rank's memory, once all that was asked for is done: for audits, as it copies all
    /// of it.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn keystream_is_blank(&self) -> Result<bool> {
        for rank in &self.ranks {
            if !rank.keystream_is_blank()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Does a collective twice and waits for it, the second time with events around every launch: see
    /// [`Breakdown`](super::Breakdown). By rank.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] unless every step is a launch ([`LaunchForm::PerStep`]); [`Error::Unsupported`] for more
    /// launches than can surely be queued ahead, as those of more than 16 ranks; otherwise as [`Self::run`] and [`Self::outcome`].
    ///
    /// # Safety
    /// As [`Self::run`].
    pub unsafe fn time_steps(
        &mut self,
        request: Request,
        buffers: &[RankBuffers],
        count: usize,
        dtype: Dtype,
        streams: &[&Stream],
    ) -> Result<Vec<StepTimes>> {
        if self.order.is_none() {
            return Err(Error::InvalidArgument(
                "times of steps: the group's collectives are one launch each; set it up with LaunchForm::PerStep"
                    .into(),
            ));
        }
        // Loads the kernels, which could have to wait for held streams.
        // SAFETY: by the caller's promise.
        unsafe { self.run(request, buffers, count, dtype, streams)? };
        streams.iter().try_for_each(|stream| stream.synchronize())?;
        self.outcome()?;
        let ready: Vec<_> =
            self.ranks.iter_mut().map(|rank| rank.prepare(request, count, dtype)).collect::<Result<_>>()?;
        let launches = (ready[0].plan().rounds() + 1) * self.ranks.len();
        if launches > QUEUED_AHEAD {
            let what = format!("a breakdown of {launches} launches: at most {QUEUED_AHEAD}; use fewer ranks");
            return Err(Error::Unsupported { backend: "cuda", what });
        }
        let (gate, mut begun) = (Gate::new(self.ranks[0].device())?, false);
        let queued = (|| {
            streams.iter().try_for_each(|stream| gate.hold(stream))?;
            let mut timer = Timer::new(streams)?;
            // SAFETY: by the caller's promise.
            unsafe { self.run_steps(&ready, buffers, streams, &mut begun, Some(&mut timer))? };
            Ok(timer)
        })();
        gate.open();
        // All of them, before the gate goes.
        let passed: Vec<Result<()>> = streams.iter().map(|stream| stream.synchronize()).collect();
        if queued.is_err() && begun {
            self.ranks.iter_mut().for_each(GpuRank::poison);
        }
        let timer = queued?;
        passed.into_iter().collect::<Result<()>>()?;
        self.outcome()?;
        timer.times()
    }

    /// Where the messages to a rank arrive, all that ever crosses: its inbox and its signals.
    pub fn mailbox(&self, rank: usize) -> [&DeviceBuffer; 2] {
        self.ranks[rank].mailbox()
    }

    /// Blocks that each rank runs, one on a multiprocessor.
    pub fn blocks(&self) -> u32 {
        self.ranks[0].blocks()
    }

    /// How its collectives become launches; not [`LaunchForm::Auto`].
    pub fn launch_form(&self) -> LaunchForm {
        if self.order.is_some() { LaunchForm::PerStep } else { LaunchForm::Persistent }
    }
}

impl Collectives for GpuGroup {
    unsafe fn run(
        &mut self,
        request: Request,
        buffers: &[RankBuffers],
        count: usize,
        dtype: Dtype,
        streams: &[&Stream],
    ) -> Result<()> {
        let ranks = self.ranks.len();
        if self.is_poisoned() {
            return Err(Error::Poisoned);
        }
        check_one_each(buffers, streams, ranks)?;
        // All that may wait for a device comes first: once a kernel runs, it waits for those of the other ranks.
        let ready: Vec<_> =
            self.ranks.iter_mut().map(|rank| rank.prepare(request, count, dtype)).collect::<Result<_>>()?;
        if self.order.is_some() {
            let mut begun = false;
            // SAFETY: by the caller's promise.
            let queued = unsafe { self.run_steps(&ready, buffers, streams, &mut begun, None) };
            if queued.is_err() && begun {
                self.ranks.iter_mut().for_each(GpuRank::poison);
            }
            return queued;
        }
        for (number, ready) in ready.into_iter().enumerate() {
            // SAFETY: by the caller's promise.
            let queued = unsafe { self.ranks[number].launch(ready, buffers[number], streams[number]) };
            if let Err(error) = queued {
                if number > 0 {
                    // Other ranks have started.
                    self.ranks.iter_mut().for_each(GpuRank::poison);
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn outcome(&mut self) -> Result<()> {
        let outcomes: Vec<_> = self.ranks.iter_mut().map(GpuRank::outcome).collect();
        // What was seen first-hand says more than that another rank gave up.
        let (told, seen): (Vec<_>, Vec<_>) = outcomes
            .into_iter()
            .filter_map(Result::err)
            .partition(|error| matches!(error, Error::Aborted { .. }));
        match seen.into_iter().chain(told).next() {
            None => Ok(()),
            Some(error) => Err(error),
        }
    }

    fn rekey(&mut self) -> Result<()> {
        let secret = &self.secret;
        thread::scope(|scope| {
            let threads: Vec<_> = self
                .ranks
                .iter_mut()
                .zip(&mut self.bootstraps)
                .map(|(rank, bootstrap)| scope.spawn(|| rank.rekey(secret, bootstrap)))
                .collect();
            let results: Vec<Result<()>> = threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect();
            results.into_iter().collect()
        })
    }

    fn is_poisoned(&self) -> bool {
        self.ranks.iter().any(GpuRank::is_poisoned)
    }

    fn close(self: Box<Self>) -> Result<()> {
        Ok(())
    }

    fn make_keystream(&mut self, bytes: &[usize]) -> Result<usize> {
        let made: Vec<usize> =
            self.ranks.iter_mut().map(|rank| rank.make_keystream(bytes)).collect::<Result<_>>()?;
        Ok(made.into_iter().min().unwrap_or(0))
    }

    fn wait_for_keystream(&mut self) -> Result<()> {
        self.ranks.iter_mut().try_for_each(GpuRank::wait_for_keystream)
    }

    fn keystream_misses(&self) -> Result<u32> {
        self.ranks
            .iter()
            .filter_map(GpuRank::keystream)
            .map(Ahead::misses)
            .try_fold(0, |sum: u32, misses| Ok(sum.wrapping_add(misses?)))
    }
}

/// The kernels of `image` on each of the devices, of which some may be the same.
pub(super) fn load(devices: &[Device], image: &[u8]) -> Result<Vec<Module>> {
    let mut modules = Vec::with_capacity(devices.len());
    for device in devices {
        let same = devices.iter().position(|other| other.ordinal() == device.ordinal());
        modules.push(match same.and_then(|first| modules.get(first)) {
            Some(module) => Module::clone(module),
            None => Module::load(device, image)?,
        });
    }
    Ok(modules)
}

/// How collectives become launches when all ranks are in this process, and how many blocks each rank runs.
pub(super) fn launches(devices: &[Device], options: &GpuOptions) -> Result<(LaunchForm, u32)> {
    let multiprocessors = devices.iter().map(Device::multiprocessors).collect::<Result<Vec<_>>>()?;
    let sharing = |device: &Device| devices.iter().filter(|o| o.ordinal() == device.ordinal()).count();
    let gpus: Vec<_> = multiprocessors.into_iter().zip(devices.iter().map(sharing)).collect();
    divide(&gpus, options)
}

/// As [`launches`], of ranks of which each is on a GPU with so many multiprocessors that so many ranks share.
fn divide(gpus: &[(u32, usize)], options: &GpuOptions) -> Result<(LaunchForm, u32)> {
    let budget = options.sm_budget.unwrap_or(u32::MAX);
    if budget == 0 {
        return Err(Error::InvalidArgument("no multiprocessor for a rank: an SM budget of 0".into()));
    }
    let shares = gpus.iter().map(|&(multiprocessors, sharing)| shared_blocks(multiprocessors, sharing));
    let resident = shares.collect::<Result<Vec<_>>>().map(|shares| shares.into_iter().fold(budget, u32::min));
    match (options.launch, resident) {
        (LaunchForm::PerStep, Ok(blocks)) => Ok((LaunchForm::PerStep, blocks)),
        // Blocks that find no room come later.
        (LaunchForm::PerStep, Err(_)) => Ok((LaunchForm::PerStep, 1)),
        (LaunchForm::Auto, Err(_)) if launches_per_step(options.algorithm, gpus.len()) => {
            Ok((LaunchForm::PerStep, 1))
        }
        (LaunchForm::Auto | LaunchForm::Persistent, resident) => Ok((LaunchForm::Persistent, resident?)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_are_not_resident_together_launch_each_step() {
        let form = |launch, algorithm, gpus: &[(u32, usize)], sm_budget| {
            divide(gpus, &GpuOptions { launch, algorithm, sm_budget, ..GpuOptions::default() })
        };
        let (full, crowded) = ([(132, 4); 4], [(132, 133); 133]);
        for (launch, gpus, budget, expected) in [
            (LaunchForm::Auto, &full[..], None, (LaunchForm::Persistent, 33)),
            (LaunchForm::Auto, &full, Some(16), (LaunchForm::Persistent, 16)),
            (LaunchForm::PerStep, &full, None, (LaunchForm::PerStep, 33)),
            (LaunchForm::PerStep, &full, Some(2), (LaunchForm::PerStep, 2)),
            (LaunchForm::Auto, &crowded, None, (LaunchForm::PerStep, 1)),
            (LaunchForm::Auto, &[(132, 1), (8, 9)], Some(4), (LaunchForm::PerStep, 1)),
        ] {
            assert_eq!(form(launch, Algorithm::RelayRing, gpus, budget).unwrap(), expected);
        }
        for refused in [
            form(LaunchForm::Persistent, Algorithm::Ring, &crowded, None),
            form(LaunchForm::Auto, Algorithm::Direct, &crowded, None),
            form(LaunchForm::PerStep, Algorithm::Ring, &full, Some(0)),
        ] {
            assert!(matches!(refused, Err(Error::InvalidArgument(_))), "{refused:?}");
        }
        let step = |algorithm| GpuOptions { launch: LaunchForm::PerStep, algorithm, ..GpuOptions::default() };
        assert!(check(&step(Algorithm::RelayRing), 3).is_ok());
        assert!(matches!(check(&step(Algorithm::Direct), 3), Err(Error::Unsupported { .. })));
    }
}
