//! Ranks on GPUs: one on each, or several where there are more ranks than GPUs; or one of them, the others elsewhere.

use std::time::Duration;

use super::keystream::Missing;
use super::membership::Membership;
use ringseal::collective::{Crypto, Request};
use ringseal::cuda::{
    AutoCommunicator, AutoGroup, Calibrated, Collectives, Device, DeviceBuffer, GpuCommunicator, GpuGroup,
    GpuNodes, GpuOptions, LaunchForm, NcclCommunicator, RankBuffers, SeedGroup, SeedOptions, StepTimes,
    Stream,
};
use ringseal::study::choose::Choices;
use ringseal::{Dtype, Error, ReduceOp, Result, channel::GroupSecret, ptx};

/// The GPUs of `ranks` ranks, dealt in turn.
pub(super) fn devices(ranks: usize) -> Result<Vec<Device>> {
    let count = Device::count()?;
    if count == 0 {
        return Err(Error::NoDevice("the driver offers no GPU".into()));
    }
    (0..ranks).map(|rank| Device::open(rank % count)).collect()
}

/// What the ranks are, and how they are set up.
pub(super) enum GroupOptions {
    /// One kernel a rank.
    Fused(GpuOptions),
    /// The same, by the algorithm that is the fastest for a vector's length.
    Auto(GpuOptions),
    /// A launch for every operation.
    Seed(SeedOptions),
}

/// The same, if there are GPUs and each can do what is asked: AES-GCM takes compute capability 9.0, and every rank at least
/// one multiprocessor.
pub(super) fn fit(ranks: usize, crypto: Crypto) -> Option<Vec<Device>> {
    let devices = devices(ranks).ok()?;
    let suits = |device: &Device| -> Result<bool> {
        let sharing = devices.iter().filter(|other| other.ordinal() == device.ordinal()).count();
        let capability = device.compute_capability()?;
        let target = ptx::for_compute_capability(capability.major, capability.minor);
        Ok((target == Some(ptx::Target::Sm90a) || target.is_some() && crypto == Crypto::None)
            && device.multiprocessors()? as usize >= sharing)
    };
    devices.iter().all(|device| suits(device).unwrap_or(false)).then_some(devices)
}

/// The ranks, with room for their vectors on the GPUs.
pub(super) struct GpuRanks {
    team: Team,
    streams: Vec<Stream>,
    inputs: Vec<DeviceBuffer>,
    outputs: Vec<DeviceBuffer>,
    /// Where keystream is made before each all-reduce: how many it was not made for.
    unprepared: Option<usize>,
}

/// Whose ranks.
enum Team {
    /// All, of this process.
    Group(GpuGroup),
    /// All, of this process, by several algorithms.
    Auto(Box<AutoGroup>),
    /// All, of this process, in the published structure.
    Seed(Box<SeedGroup>),
    /// One, whose peers are other processes.
    Member(Box<dyn Collectives>),
    /// The same by several algorithms.
    AutoMember(Box<AutoCommunicator>),
}

impl Team {
    fn collectives(&self) -> &dyn Collectives {
        match self {
            Self::Group(group) => group,
            Self::Auto(group) => group.as_ref(),
            Self::Seed(group) => group.as_ref(),
            Self::Member(own) => own.as_ref(),
            Self::AutoMember(own) => own.as_ref(),
        }
    }

    fn collectives_mut(&mut self) -> &mut dyn Collectives {
        match self {
            Self::Group(group) => group,
            Self::Auto(group) => group.as_mut(),
            Self::Seed(group) => group.as_mut(),
            Self::Member(own) => own.as_mut(),
            Self::AutoMember(own) => own.as_mut(),
        }
    }
}

impl GpuRanks {
    /// One rank on each of `devices`; they share a fresh secret.
    pub(super) fn new(devices: &[Device], options: GroupOptions) -> Result<Self> {
        let (image, secret) = (image(&devices[0])?, GroupSecret::random()?);
        let mut keystream = false;
        let (team, max_bytes) = match options {
            GroupOptions::Fused(options) => {
                let max_bytes = options.max_bytes;
                keystream = options.keystream.is_some();
                (Team::Group(GpuGroup::new(devices, image, &secret, options)?), max_bytes)
            }
            GroupOptions::Auto(options) => {
                let max_bytes = options.max_bytes;
                (Team::Auto(Box::new(AutoGroup::new(devices, image, &secret, options)?)), max_bytes)
            }
            GroupOptions::Seed(options) => {
                let max_bytes = options.max_bytes;
                (Team::Seed(Box::new(SeedGroup::new(devices, image, &secret, options)?)), max_bytes)
            }
        };
        Self::with_team(devices, team, max_bytes, keystream)
    }

    /// One rank of a group of `ranks` processes, on `device`; with `auto` by the algorithm that is the fastest for a vector's
    /// length.
    pub(super) fn member(
        device: &Device,
        member: &Membership,
        ranks: usize,
        options: GpuOptions,
        auto: bool,
    ) -> Result<Self> {
        let (secret, meeting) = (&member.secret, member.meet(ranks)?);
        let (max_bytes, keystream) = (options.max_bytes, options.keystream.is_some());
        let image = image(device)?;
        let team = if auto {
            let own = AutoCommunicator::new(secret, member.rank, ranks, meeting, device, image, options)?;
            Team::AutoMember(Box::new(own))
        } else {
            let own =
                GpuCommunicator::with_image(secret, member.rank, ranks, meeting, device, image, options)?;
            Team::Member(Box::new(own))
        };
        Self::with_team(std::slice::from_ref(device), team, max_bytes, keystream)
    }

    /// One rank of a group of `ranks` processes, each on a GPU of its own: `device` is this one's.
    pub(super) fn over_nccl(
        device: &Device,
        member: &Membership,
        ranks: usize,
        options: GpuOptions,
    ) -> Result<Self> {
        let (meeting, max_bytes) = (member.meet(ranks)?, options.max_bytes);
        let own = NcclCommunicator::new(&member.secret, member.rank, ranks, meeting, device, options)?;
        Self::with_team(std::slice::from_ref(device), Team::Member(Box::new(own)), max_bytes, false)
    }

    /// The same in nodes of `node_ranks`, whose GPUs reach each other without NCCL. The options are those inside nodes and
    /// between them.
    pub(super) fn in_nodes(
        device: &Device,
        member: &Membership,
        ranks: usize,
        node_ranks: usize,
        [inside, between]: [GpuOptions; 2],
    ) -> Result<Self> {
        let (place, meeting, max_bytes) = ([member.rank, ranks], member.meet(ranks)?, inside.max_bytes);
        // What is said of launches is about those inside: between nodes there is one form.
        let between = GpuOptions { launch: LaunchForm::Auto, ..between };
        let own =
            GpuNodes::over_nccl_by_gpus(&member.secret, place, node_ranks, meeting, device, inside, between)?;
        Self::with_team(std::slice::from_ref(device), Team::Member(Box::new(own)), max_bytes, false)
    }

    fn with_team(devices: &[Device], team: Team, max_bytes: usize, keystream: bool) -> Result<Self> {
        let streams = devices.iter().map(Stream::new).collect::<Result<Vec<_>>>()?;
        let room = |(device, stream)| {
            let mut buffer = DeviceBuffer::new(device, max_bytes.max(1))?;
            // Zeros stay zeros, where nothing else is put in.
            buffer.fill(0, stream)?;
            Ok(buffer)
        };
        Ok(Self {
            team,
            inputs: devices.iter().zip(&streams).map(room).collect::<Result<_>>()?,
            outputs: devices.iter().zip(&streams).map(room).collect::<Result<_>>()?,
            streams,
            unprepared: keystream.then_some(0),
        })
    }

    /// What is worth knowing of how the ranks were set up, a line each.
    pub(super) fn notes(&self) -> Vec<String> {
        let (chosen, form) = match &self.team {
            Team::Group(group) => (None, group.launch_form()),
            Team::Auto(group) => (Some(choice(group.choices(), group.calibrated())), group.launch_form()),
            Team::AutoMember(own) => (Some(choice(own.choices(), own.calibrated())), LaunchForm::Persistent),
            Team::Seed(_) | Team::Member(_) => return Vec::new(),
        };
        let steps = (form == LaunchForm::PerStep).then(|| "a launch for each step, ordered by events".into());
        chosen.into_iter().chain(steps).collect()
    }

    /// What was calibrated at set-up, if anything was, and on this rank.
    pub(super) fn calibrated(&self) -> Option<&Calibrated> {
        match &self.team {
            Team::Auto(group) => group.calibrated(),
            Team::AutoMember(own) => own.calibrated(),
            Team::Group(_) | Team::Seed(_) | Team::Member(_) => None,
        }
    }

    /// What had no keystream so far, where it is made before all-reduces.
    pub(super) fn missing_keystream(&self) -> Result<Option<Missing>> {
        let Some(all_reduces) = self.unprepared else { return Ok(None) };
        Ok(Some(Missing { records: self.team.collectives().keystream_misses()?, all_reduces }))
    }

    /// Has the keystream of an all-reduce of `bytes` bytes made, where it is to be, and waits for it.
    fn prepare(&mut self, bytes: usize) -> Result<()> {
        let Some(unprepared) = &mut self.unprepared else { return Ok(()) };
        let ranks = self.team.collectives_mut();
        *unprepared += 1 - ranks.make_keystream(&[bytes])?;
        ranks.wait_for_keystream()
    }

    /// Ends in good order.
    pub(super) fn close(self) -> Result<()> {
        match self.team {
            Team::Group(_) | Team::Auto(_) | Team::Seed(_) => Ok(()),
            Team::Member(own) => own.close(),
            Team::AutoMember(own) => own.close(),
        }
    }

    /// Reduces the inputs into the outputs. Returns the GPU's time; the copies between host and GPUs aren't in it.
    pub(super) fn all_reduce(
        &mut self,
        inputs: &[Vec<u8>],
        outputs: &mut [Vec<u8>],
        dtype: Dtype,
        op: ReduceOp,
    ) -> Result<Duration> {
        self.upload(inputs)?;
        for ((device, host), stream) in self.outputs.iter_mut().zip(&*outputs).zip(&self.streams) {
            device.write(0, host, stream)?; // an earlier result must not pass for this one's
        }
        let addresses = |(input, output): (&DeviceBuffer, &DeviceBuffer)| RankBuffers {
            input: input.pointer(),
            output: output.pointer(),
        };
        let buffers: Vec<_> = self.inputs.iter().zip(&self.outputs).map(addresses).collect();
        let time = self.run(&buffers, inputs[0].len(), dtype, op)?;
        download(&self.outputs, outputs, &self.streams)?;
        Ok(time)
    }

    /// Reduces the vectors in place. Returns the GPU's time; the copies between host and GPUs aren't in it.
    pub(super) fn all_reduce_in_place(
        &mut self,
        vectors: &mut [Vec<u8>],
        dtype: Dtype,
        op: ReduceOp,
    ) -> Result<Duration> {
        self.upload(vectors)?;
        let addresses =
            |buffer: &DeviceBuffer| RankBuffers { input: buffer.pointer(), output: buffer.pointer() };
        let buffers: Vec<_> = self.inputs.iter().map(addresses).collect();
        let time = self.run(&buffers, vectors[0].len(), dtype, op)?;
        download(&self.inputs, vectors, &self.streams)?;
        Ok(time)
    }

    /// Times an all-reduce of `count` elements of what the inputs last held, out of place, step by step; by rank.
    pub(super) fn time_steps(&mut self, count: usize, dtype: Dtype, op: ReduceOp) -> Result<Vec<StepTimes>> {
        let Team::Group(group) = &mut self.team else {
            return Err(Error::InvalidArgument("times of steps: all ranks must be in this process".into()));
        };
        let buffers: Vec<_> = self
            .inputs
            .iter()
            .zip(&self.outputs)
            .map(|(input, output)| RankBuffers { input: input.pointer(), output: output.pointer() })
            .collect();
        let streams: Vec<&Stream> = self.streams.iter().collect();
        // SAFETY: as in `run`; it waits for the streams.
        unsafe { group.time_steps(Request::AllReduce(op), &buffers, count, dtype, &streams) }
    }

    fn upload(&mut self, vectors: &[Vec<u8>]) -> Result<()> {
        for ((device, host), stream) in self.inputs.iter_mut().zip(vectors).zip(&self.streams) {
            device.write(0, host, stream)?;
        }
        Ok(())
    }

    fn run(&mut self, buffers: &[RankBuffers], bytes: usize, dtype: Dtype, op: ReduceOp) -> Result<Duration> {
        let count = bytes / dtype.size();
        self.prepare(count * dtype.size())?;
        let streams: Vec<&Stream> = self.streams.iter().collect();
        for stream in &streams {
            stream.synchronize()?;
        }
        let start = streams[0].record()?;
        let ranks = self.team.collectives_mut();
        // SAFETY: the buffers hold `max_bytes` on their ranks' devices, which the group checks `bytes` against; they
        // are allocations, so aligned; nothing else uses them until the streams have been waited for, below.
        let queued = unsafe { ranks.all_reduce(buffers, count, dtype, op, &streams) };
        let end = streams[0].record()?;
        let outcome = ranks.finish(&streams);
        queued.and(outcome)?;
        end.since(&start)
    }
}

/// Which algorithm is taken, and what that goes by.
fn choice(choices: &Choices, calibrated: Option<&Calibrated>) -> String {
    match calibrated {
        None => format!("auto: {choices}"),
        Some(Calibrated { observations, spent, .. }) => format!(
            "auto: {choices}; by a calibration of {} all-reduces' times, in {:.0} ms",
            observations.len(),
            spent.as_secs_f64() * 1e3
        ),
    }
}

/// The embedded kernels for a device.
fn image(device: &Device) -> Result<&'static [u8]> {
    let capability = device.compute_capability()?;
    let target = ptx::for_compute_capability(capability.major, capability.minor).ok_or_else(|| {
        Error::NoDevice(format!("compute capability {capability}, but 8.0 or newer is needed"))
    })?;
    Ok(ptx::text(target).as_bytes())
}

fn download(buffers: &[DeviceBuffer], vectors: &mut [Vec<u8>], streams: &[Stream]) -> Result<()> {
    for ((device, host), stream) in buffers.iter().zip(vectors).zip(streams) {
        device.read(0, host, stream)?;
    }
    Ok(())
}
