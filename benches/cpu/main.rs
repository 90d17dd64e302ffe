//! AES-GCM and AES-CTR on one core under criterion, from 16 bytes to 64 MiB: RustCrypto, which the CPU backend uses; graviola,
//! which seals the host's side of copies; and OpenSSL, if the system has it. All in place, with a key that is expanded
//! already. Before they are timed their results are compared.
#![allow(
    clippy::print_stdout,
    reason = "which OpenSSL was measured, or that none was, belongs in the output"
)]

mod openssl;

use std::hint::black_box;
use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ringseal::aead::{Aead, AesKey, Iv, Tag};
use ringseal::backend::{self, CounterWidth};
use ringseal::copy::HostCipher;

use crate::openssl::Cipher;

/// As long as a collective's records have it.
const AAD: [u8; 48] = [0x3c; 48];
/// The same each time: nothing here leaves the process.
const NONCE: [u8; 12] = [0x5c; 12];
const COUNTER: [u8; 16] = [0x5c; 16];
const KEY: [u8; 32] = [0x3a; 32];
const SIZES: [usize; 7] = [16, 256, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20];

/// One library's AES-GCM.
trait Gcm {
    fn seal(&mut self, data: &mut [u8]) -> Tag;
    /// Whether it verified.
    fn open(&mut self, data: &mut [u8], tag: &Tag) -> bool;
}

struct RustCrypto(Aead);

impl Gcm for RustCrypto {
    fn seal(&mut self, data: &mut [u8]) -> Tag {
        let iv = Iv::new(&NONCE).expect("12 bytes are an IV");
        self.0.seal_in_place(iv, &AAD, data).expect("the length is allowed")
    }

    fn open(&mut self, data: &mut [u8], tag: &Tag) -> bool {
        self.0.open_in_place(Iv::new(&NONCE).expect("12 bytes are an IV"), &AAD, data, tag).is_ok()
    }
}

struct Host(HostCipher);

impl Gcm for Host {
    fn seal(&mut self, data: &mut [u8]) -> Tag {
        self.0.seal(&NONCE, &AAD, data).expect("the length is allowed")
    }

    fn open(&mut self, data: &mut [u8], tag: &Tag) -> bool {
        self.0.open(&NONCE, &AAD, data, tag).is_ok()
    }
}

struct OpenSsl(Cipher);

impl Gcm for OpenSsl {
    fn seal(&mut self, data: &mut [u8]) -> Tag {
        self.0.seal(&NONCE, &AAD, data)
    }

    fn open(&mut self, data: &mut [u8], tag: &Tag) -> bool {
        self.0.open(&NONCE, &AAD, data, tag)
    }
}

fn aead(key: &AesKey) -> Aead {
    let backend = backend::by_name("cpu").expect("the CPU backend is always there");
    Aead::new(backend.as_ref(), key).expect("the CPU takes any key")
}

fn group<'a>(criterion: &'a mut Criterion, name: &str) -> BenchmarkGroup<'a, WallTime> {
    let mut group = criterion.benchmark_group(name);
    group
        .sample_size(20)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(500));
    group
}

fn gcm(criterion: &mut Criterion) {
    for bits in [128, 256] {
        let bytes = &KEY[..bits / 8];
        let key = AesKey::from_bytes(bytes).expect("16 and 32 are key lengths");
        let mut libraries: Vec<(&str, Box<dyn Gcm>)> = vec![("rustcrypto", Box::new(RustCrypto(aead(&key))))];
        // On a processor that has no instructions for one of them this is another, so named by what it is.
        for host in [HostCipher::by_library(&key), HostCipher::new(&key)] {
            let host = host.expect("any key will do");
            let name = match format!("{host:?}").as_str() {
                "HostCipher(graviola)" => "graviola",
                "HostCipher(one pass)" => "one pass",
                _ => continue,
            };
            libraries.push((name, Box::new(Host(host))));
        }
        match Cipher::new("gcm", bytes) {
            Some(cipher) => {
                println!("{}", cipher.version());
                libraries.push(("openssl", Box::new(OpenSsl(cipher))));
            }
            None => println!("no OpenSSL 3 (libcrypto.so.3) here: its column is left out"),
        }
        for size in SIZES {
            let plain = vec![0x71; size];
            let mut expected = plain.clone();
            let tag = libraries[0].1.seal(&mut expected);
            for (name, library) in &mut libraries {
                let mut data = plain.clone();
                assert!(library.seal(&mut data) == tag && data == expected, "{name} seals otherwise");
                let mut group = group(criterion, &format!("aes-{bits}-gcm seal"));
                group.throughput(Throughput::Bytes(size as u64));
                group.bench_function(BenchmarkId::new(*name, size), |bencher| {
                    bencher.iter(|| library.seal(black_box(&mut data)));
                });
                group.finish();
                let mut group = self::group(criterion, &format!("aes-{bits}-gcm open"));
                group.throughput(Throughput::Bytes(size as u64));
                // In place, so that each time the ciphertext has to come back first: the copy is timed with it.
                group.bench_function(BenchmarkId::new(*name, size), |bencher| {
                    bencher.iter(|| {
                        data.copy_from_slice(&expected);
                        assert!(library.open(black_box(&mut data), &tag), "{name} doesn't open it");
                    });
                });
                group.finish();
                assert!(data == plain, "{name} opens otherwise");
            }
        }
    }
}

fn ctr(criterion: &mut Criterion) {
    for bits in [128, 256] {
        let bytes = &KEY[..bits / 8];
        let aead = aead(&AesKey::from_bytes(bytes).expect("16 and 32 are key lengths"));
        let rustcrypto = |data: &mut [u8]| {
            aead.ctr_xor(COUNTER, CounterWidth::Full128, data).expect("the length is allowed");
        };
        let mut openssl = Cipher::new("ctr", bytes);
        let mut group = group(criterion, &format!("aes-{bits}-ctr"));
        for size in SIZES {
            let mut data = vec![0x71; size];
            group.throughput(Throughput::Bytes(size as u64));
            if let Some(openssl) = &mut openssl {
                openssl.ctr(&COUNTER, &mut data);
                rustcrypto(&mut data);
                assert!(data.iter().all(|&byte| byte == 0x71), "OpenSSL encrypts otherwise");
                group.bench_function(BenchmarkId::new("openssl", size), |bencher| {
                    bencher.iter(|| openssl.ctr(&COUNTER, black_box(&mut data)));
                });
            }
            group.bench_function(BenchmarkId::new("rustcrypto", size), |bencher| {
                bencher.iter(|| rustcrypto(black_box(&mut data)));
            });
        }
    }
}

criterion_group!(benches, gcm, ctr);
criterion_main!(benches);
