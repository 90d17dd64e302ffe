//! What is measured: each kernel, its sizes, and its wavefronts.

use ringseal::Result;
use ringseal::aead::AesKey;
use ringseal::backend::CounterWidth;
use ringseal::cuda::{Device, DeviceBuffer, DeviceKey, Kernels, Module, Stream};

/// Input and output that calls rotate through.
pub(crate) struct Memory {
    pub(crate) input: DeviceBuffer,
    pub(crate) output: DeviceBuffer,
}

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
        stream.synchronize()?;
        Ok(Self { input, output })
    }

    /// Where call number `call` reads and writes `bytes` bytes.
    pub(crate) fn place(&self, call: usize, bytes: u64) -> (u64, u64) {
        let places = (self.input.len() as u64 / bytes.next_multiple_of(256)).max(1);
        let offset = call as u64 % places * bytes.next_multiple_of(256);
        (self.input.pointer() + offset, self.output.pointer() + offset)
    }
}

type Work = Box<dyn Fn(&Stream, u64, u64, u64, u64) -> Result<()>>;

/// One kernel with one key length.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) key_bits: u32,
    /// Shared-memory wavefronts for 32 blocks.
    pub(crate) wavefronts: Option<f64>,
    work: Work,
}

/// Messages and bytes of each.
type Sizes = &'static [(u64, u64)];

const FEW: Sizes = &[(1, 64 << 10), (1, 1 << 20), (1, 4 << 20), (1, 64 << 20), (1, 1 << 30)];
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

impl Case {
    pub(crate) fn sizes(&self, full: bool) -> Sizes {
        if full { ALL } else { FEW }
    }

    pub(crate) fn run(
        &self,
        stream: &Stream,
        source: u64,
        destination: u64,
        messages: u64,
        bytes: u64,
    ) -> Result<()> {
        (self.work)(stream, source, destination, messages, bytes)
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
        let key = DeviceKey::new(&kernels, &random_key(key_bits)?);
        cases.push(Case {
            name: "ctr".into(),
            key_bits,
            wavefronts: Some(look_ups + CACHED + LOAD_AND_STORE),
            work: Box::new(move |stream, source, destination, _, bytes| {
                // SAFETY: the memory outlives the measurement, which synchronizes; the ranges don't overlap.
                unsafe { key.ctr_xor(COUNTER, CounterWidth::Full128, source, destination, bytes, stream) }
            }),
        });
        let key = DeviceKey::new(&kernels, &random_key(key_bits)?);
        cases.push(Case {
            name: "keystream".into(),
            key_bits,
            wavefronts: Some(look_ups + CACHED + LOAD_AND_STORE / 2.0),
            work: Box::new(move |stream, _, destination, _, bytes| {
                // SAFETY: as above.
                unsafe { key.keystream(COUNTER, CounterWidth::Full128, destination, bytes, stream) }
            }),
        });
    }
    Ok(cases)
}

fn random_key(bits: u32) -> Result<AesKey> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(|error| ringseal::Error::Cuda(error.to_string()))?;
    AesKey::from_bytes(&bytes[..bits as usize / 8])
}
