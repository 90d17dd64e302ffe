//! What is measured: each kernel, its sizes, and its wavefronts.

mod gcm;

use std::rc::Rc;

use ringseal::Result;
use ringseal::aead::AesKey;
use ringseal::backend::CounterWidth;
use ringseal::cuda::{Device, DeviceBuffer, DeviceKey, Kernels, Module, Stream};

/// Input and output that calls rotate through.
pub(crate) struct Memory {
    pub(crate) input: DeviceBuffer,
    pub(crate) output: DeviceBuffer,
    scratch: DeviceBuffer,
}

/// More than the L2 cache of any GPU here.
const SCRATCH: usize = 256 << 20;

impl Memory {
    /// Two buffers of `bytes` bytes, the input random.
    pub(crate) fn new(stream: &Stream, bytes: usize) -> Result<Self> {
        let device = stream.device();
        let mut input = DeviceBuffer::new(device, bytes)?;
        let mut random = vec![0; bytes.min(16 << 20)];
        getrandom::fill(&mut random).map_err(|error| ringseal::Error::Cuda(error.to_string()))?;
        input.write(0, &random, stream)?;
        let mut filled = random.len();
        while filled < bytes {
            let more = filled.min(bytes - filled);
            // SAFETY: both ranges are inside the buffer and don't overlap; the next copy is ordered after this one.
            unsafe { stream.copy(input.pointer() + filled as u64, input.pointer(), more)? };
            filled += more;
        }
        let mut output = DeviceBuffer::new(device, bytes)?;
        output.fill(0xa5, stream)?;
        let scratch = DeviceBuffer::new(device, SCRATCH)?;
        stream.synchronize()?;
        Ok(Self { input, output, scratch })
    }

    /// How many calls on `bytes` bytes each find memory of their own.
    fn places(&self, bytes: u64) -> u64 {
        (self.input.len() as u64 / bytes.next_multiple_of(256)).max(1)
    }

    /// Where in the buffers call number `call` reads and writes `bytes` bytes.
    fn offset(&self, call: usize, bytes: u64) -> u64 {
        call as u64 % self.places(bytes) * bytes.next_multiple_of(256)
    }

    /// Queues the replacement of what the L2 cache holds.
    pub(crate) fn evict(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both ranges are inside their buffers, which live until the measurement has synchronized.
        unsafe { stream.copy(self.scratch.pointer(), self.input.pointer(), self.scratch.len()) }
    }
}

type Run = Box<dyn Fn(&Stream, usize) -> Result<()>>;
type Check = Box<dyn Fn(&Stream) -> Result<()>>;

/// A piece of work on messages whose memory is set up.
pub(crate) struct Prepared {
    run: Run,
    check: Check,
}

impl Prepared {
    /// Queues call number `call`; calls rotate through memory.
    pub(crate) fn run(&self, stream: &Stream, call: usize) -> Result<()> {
        (self.run)(stream, call)
    }

    /// Fails when what ran gave no valid result.
    pub(crate) fn check(&self, stream: &Stream) -> Result<()> {
        (self.check)(stream)
    }
}

/// Sets a case up for so many messages of so many bytes.
type Prepare = Box<dyn Fn(&Rc<Memory>, &Stream, (u64, u64)) -> Result<Prepared>>;

/// One kernel with one key length.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) key_bits: u32,
    /// Shared-memory wavefronts for 32 blocks.
    pub(crate) wavefronts: Option<f64>,
    few: Sizes,
    all: Sizes,
    prepare: Prepare,
}

/// Messages and bytes of each.
type Sizes = &'static [(u64, u64)];

const FEW: Sizes = &[(1, 64 << 10), (1, 1 << 20), (1, 4 << 20), (1, 64 << 20), (1, 256 << 20), (1, 1 << 30)];
const ALL: Sizes = &[
    (1, 16),
    (1, 256),
    (1, 4 << 10),
    (1, 16 << 10),
    (1, 64 << 10),
    (1, 256 << 10),
    (1, 1 << 20),
    (1, 4 << 20),
    (1, 16 << 20),
    (1, 64 << 20),
    (1, 256 << 20),
    (1, 1 << 30),
    (1, 4 << 30),
];
/// A record is one block of threads' work: one alone says how long that takes, batches how fast all of them are. 924 is
/// seven for each of 132 multiprocessors.
const FEW_RECORDS: Sizes =
    &[(1, 64 << 10), (1, 4 << 20), (1024, 64 << 10), (16384, 64 << 10), (924, 1 << 20)];
const ALL_RECORDS: Sizes = &[
    (1, 16),
    (1, 4 << 10),
    (1, 64 << 10),
    (1, 256 << 10),
    (1, 1 << 20),
    (1, 4 << 20),
    (132, 64 << 10),
    (1024, 64 << 10),
    (65536, 16 << 10),
    (16384, 64 << 10),
    (8192, 128 << 10),
    (924, 1 << 20),
];

impl Case {
    pub(crate) fn sizes(&self, full: bool) -> Sizes {
        if full { self.all } else { self.few }
    }

    pub(crate) fn prepare(&self, memory: &Rc<Memory>, stream: &Stream, size: (u64, u64)) -> Result<Prepared> {
        (self.prepare)(memory, stream, size)
    }
}

/// A 16-byte global load and store a block, for 32 blocks; a store alone is half of it.
const LOAD_AND_STORE: f64 = 8.8;
/// The terms that CTR looks up anew for 256 counters.
const CACHED: f64 = 1.25;

/// Not a multiple of 256, so that the tiles' ends are in it.
const COUNTER: [u8; 16] = [0x5c; 16];

/// Every case, with the kernels of `image`.
pub(crate) fn all(device: &Device, image: &[u8]) -> Result<Vec<Case>> {
    let kernels = Kernels::new(&Module::load(device, image)?)?;
    let mut cases = Vec::new();
    for (key_bits, look_ups) in [(128, 128.0), (192, 160.0), (256, 192.0)] {
        for (name, global) in [("ctr", LOAD_AND_STORE), ("keystream", LOAD_AND_STORE / 2.0)] {
            let key = Rc::new(DeviceKey::new(&kernels, &random_key(key_bits)?));
            cases.push(Case {
                name: name.into(),
                key_bits,
                wavefronts: Some(look_ups + CACHED + global),
                few: FEW,
                all: ALL,
                prepare: Box::new(move |memory, _, (_, bytes)| Ok(ctr(&key, memory, bytes, name == "ctr"))),
            });
        }
    }
    if kernels.has_gcm() {
        cases.extend(gcm::cases(&kernels)?);
    }
    Ok(cases)
}

fn ctr(key: &Rc<DeviceKey>, memory: &Rc<Memory>, bytes: u64, xor: bool) -> Prepared {
    let (key, memory) = (Rc::clone(key), Rc::clone(memory));
    let width = CounterWidth::Full128;
    Prepared {
        run: Box::new(move |stream, call| {
            let offset = memory.offset(call, bytes);
            let (source, destination) = (memory.input.pointer() + offset, memory.output.pointer() + offset);
            // SAFETY: the memory outlives the measurement, which synchronizes; the ranges don't overlap.
            unsafe {
                match xor {
                    true => key.ctr_xor(COUNTER, width, source, destination, bytes, stream),
                    false => key.keystream(COUNTER, width, destination, bytes, stream),
                }
            }
        }),
        // The tests compare every byte with the CPU's.
        check: Box::new(|_| Ok(())),
    }
}

fn random_key(bits: u32) -> Result<AesKey> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(|error| ringseal::Error::Cuda(error.to_string()))?;
    AesKey::from_bytes(&bytes[..bits as usize / 8])
}
