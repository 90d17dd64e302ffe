//! AES-CTR on device memory under criterion: device times, by events. `cargo bench --bench cpu` has the CPU's.
//!
//! On a machine with no GPU it says so and measures nothing.

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ringseal::Result;
use ringseal::aead::AesKey;
use ringseal::backend::CounterWidth;
use ringseal::cuda::{Device, DeviceBuffer, DeviceKey, Kernels, Stream};

const KEY_BYTES: [usize; 3] = [16, 24, 32];
/// Any start will do: the counter's value has no bearing on the time.
const COUNTER: [u8; 16] = [0x5c; 16];

fn gpu(criterion: &mut Criterion) {
    match Device::open(0) {
        Ok(device) => measure_gpu(criterion, &device).unwrap_or_else(|error| panic!("{error}")),
        Err(error) => eprintln!("skipped: no CUDA device: {error}"),
    }
}

fn measure_gpu(criterion: &mut Criterion, device: &Device) -> Result<()> {
    let mut group = criterion.benchmark_group("ctr/gpu");
    group
        .sample_size(10)
        .measurement_time(Duration::from_millis(500))
        .warm_up_time(Duration::from_millis(100));
    let stream = &Stream::new(device)?;
    let kernels = Kernels::embedded(device)?;
    let mut input = DeviceBuffer::new(device, 1 << 30)?;
    let output = DeviceBuffer::new(device, 1 << 30)?;
    input.fill(0x71, stream)?;
    for bytes in KEY_BYTES {
        let key = DeviceKey::new(&kernels, &AesKey::from_bytes(&[0x3a; 32][..bytes])?);
        for size in [64 << 10, 1 << 20, 16 << 20, 1 << 30] {
            let run = |calls: u64| -> Result<Duration> {
                let start = stream.record()?;
                for _ in 0..calls {
                    let (source, destination) = (input.pointer(), output.pointer());
                    // SAFETY: both buffers are at least `size` long, don't overlap, and live until the end event.
                    unsafe {
                        key.ctr_xor(COUNTER, CounterWidth::Full128, source, destination, size, stream)?
                    };
                }
                let end = stream.record()?;
                end.synchronize()?;
                end.since(&start)
            };
            group.throughput(Throughput::Bytes(size));
            group.bench_function(BenchmarkId::new(format!("aes-{}", 8 * bytes), size), |bencher| {
                bencher.iter_custom(|calls| run(calls).unwrap_or_else(|error| panic!("{error}")));
            });
        }
    }
    Ok(())
}

criterion_group!(benches, gpu);
criterion_main!(benches);
