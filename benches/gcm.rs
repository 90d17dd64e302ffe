//! AES-GCM on the CPU under criterion: RustCrypto, as the CPU backend uses it. The GPU's kernels are measured by
//! `cargo bench --bench gpu`.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ringseal::aead::{Aead, AesKey, Iv};
use ringseal::backend;

/// As long as a collective's records have it.
const AAD: [u8; 48] = [0x3c; 48];
/// The same nonce each time: nothing here leaves the process.
const NONCE: [u8; 12] = [0x5c; 12];

fn cpu(criterion: &mut Criterion) {
    let backend = backend::by_name("cpu").expect("the CPU backend is always there");
    let iv = Iv::new(&NONCE).expect("12 bytes are an IV");
    for bytes in [16, 24, 32] {
        let key = AesKey::from_bytes(&[0x3a; 32][..bytes]).expect("16, 24 and 32 are key lengths");
        let aead = Aead::new(backend.as_ref(), &key).expect("the CPU takes any key");
        for size in [16, 1 << 10, 64 << 10, 1 << 20, 16 << 20] {
            let mut group = criterion.benchmark_group("gcm/cpu");
            group
                .sample_size(20)
                .measurement_time(Duration::from_secs(1))
                .warm_up_time(Duration::from_millis(300))
                .throughput(Throughput::Bytes(size as u64));
            let mut data = vec![0x71; size];
            group.bench_function(BenchmarkId::new(format!("seal aes-{}", 8 * bytes), size), |bencher| {
                bencher.iter(|| {
                    aead.seal_in_place(iv, &AAD, black_box(&mut data)).expect("the length is allowed")
                });
            });
            let plain = data.clone();
            let mut sealed = plain.clone();
            let tag = aead.seal_in_place(iv, &AAD, &mut sealed).expect("the length is allowed");
            // Opening is in place, so each time the ciphertext has to come back first; sealing the plaintext again would
            // double the time, copying it adds a few per cent.
            group.bench_function(BenchmarkId::new(format!("open aes-{}", 8 * bytes), size), |bencher| {
                bencher.iter(|| {
                    data.copy_from_slice(&sealed);
                    aead.open_in_place(iv, &AAD, black_box(&mut data), &tag).expect("what was sealed opens")
                });
            });
        }
    }
}

criterion_group!(benches, cpu);
criterion_main!(benches);
