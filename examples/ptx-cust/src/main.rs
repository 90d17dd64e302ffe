//! ringseal's PTX pack in a Rust program, by the `cust` crate: AES-CTR and AES-GCM against NIST vectors.
//!
//! ```sh
//! ringseal ptx --out pack
//! cargo run --release --manifest-path examples/ptx-cust/Cargo.toml -- pack
//! ```
//!
//! `cust` links libcuda; where only its stub is (`$CUDA_HOME/lib64/stubs`), add `RUSTFLAGS=-L$CUDA_HOME/lib64/stubs`.
//! The parameter structures and the key schedule are those of the kernels' own crate; docs/ptx.md explains the rest.

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

use cust::context::Context;
use cust::device::DeviceAttribute;
use cust::function::{BlockSize, GridSize};
use cust::memory::{CopyDestination, DeviceBuffer, DeviceCopy};
use cust::module::Module;
use cust::stream::{Stream, StreamFlags};
use ringseal_kernels::aes::expand_key;
use ringseal_kernels::ctr::{self, CtrParams};
use ringseal_kernels::gcm::{self, FORGED, Record, RecordsParams, VERIFIED};
use ringseal_kernels::ghash::{GHASH_KEY_GRID, GhashKey, GhashKeyParams, ghash_key};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// A parameter structure or descriptor of the kernels, as `cust` takes it.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Plain<T: Copy>(T);
// SAFETY: used with the kernel crate's `repr(C)` structures of integers, which hold nothing of the host's.
unsafe impl<T: Copy> DeviceCopy for Plain<T> {}

struct Pack {
    module: Module,
    stream: Stream,
}

impl Pack {
    fn load(folder: &Path, target: &str) -> Outcome<Self> {
        let file = |ending: &str| folder.join(format!("ringseal_{target}.{ending}"));
        let (cubin, ptx) = (file("cubin"), file("ptx"));
        // The cubin needs no compilation; the driver compiles the PTX, once, and keeps the result.
        let module = if cubin.is_file() {
            Module::from_cubin(std::fs::read(&cubin)?, &[])?
        } else {
            Module::from_ptx(std::fs::read_to_string(&ptx)?, &[])?
        };
        println!("loaded {}", if cubin.is_file() { cubin } else { ptx }.display());
        Ok(Self { module, stream: Stream::new(StreamFlags::NON_BLOCKING, None)? })
    }

    fn launch<T: Copy>(&self, name: &str, blocks: u32, threads: u32, shared: u32, parameters: T) -> Outcome {
        let mut function = self.module.get_function(name)?;
        if shared > 0 {
            allow_shared(&mut function, shared)?;
        }
        let mut parameters = Plain(parameters);
        let arguments = [std::ptr::from_mut(&mut parameters).cast()];
        // SAFETY: the kernel takes this structure by value, and the callers' addresses in it are alive until the wait.
        unsafe {
            self.stream.launch(&function, GridSize::x(blocks), BlockSize::x(threads), shared, &arguments)?;
        }
        Ok(self.stream.synchronize()?)
    }

    /// H = E(K, 0), the first 16 bytes of keystream from counter 0; then the matrices made from it.
    fn ghash_key(&self, key: &[u8]) -> Outcome<DeviceBuffer<u8>> {
        let h = DeviceBuffer::from_slice(&[0u32; 4])?;
        let parameters = CtrParams {
            keys: expand_key(key),
            counter: [0; 4],
            input: 0,
            output: h.as_device_ptr().as_raw(),
            bytes: 16,
            carry: 0,
        };
        let name = format!("aes{}_ctr_keystream", 8 * key.len());
        self.launch(&name, 1, ctr::aes128_ctr_keystream::THREADS, ctr::SHARED_BYTES, parameters)?;
        let mut words = [0; 4];
        h.copy_to(&mut words)?;
        // cuMemAlloc aligns to 256 bytes, which is all that the kernels need of the matrices' address.
        let matrices = DeviceBuffer::from_slice(&vec![0u8; size_of::<GhashKey>()])?;
        let parameters = GhashKeyParams { h: words, key: matrices.as_device_ptr().as_raw() };
        self.launch("ghash_key", GHASH_KEY_GRID, ghash_key::THREADS, ghash_key::SHARED, parameters)?;
        Ok(matrices)
    }
}

/// Allows more dynamic shared memory than 48 KiB, for which `cust` 0.3 has no call of its own.
fn allow_shared(function: &mut cust::function::Function<'_>, bytes: u32) -> Outcome {
    use cust::sys::{CUfunction_attribute, cuFuncSetAttribute};
    let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // SAFETY: a live function of the current context.
    let result = unsafe { cuFuncSetAttribute(function.to_raw(), attribute, i32::try_from(bytes)?) };
    if result as u32 == 0 { Ok(()) } else { Err(format!("cuFuncSetAttribute: {result:?}").into()) }
}

/// What was compared, and what differed.
#[derive(Default)]
struct Report {
    wrong: u32,
}

impl Report {
    fn expect<T: PartialEq>(&mut self, what: &str, got: T, wanted: T) {
        let same = got == wanted;
        println!("{what:60} {}", if same { "ok" } else { "WRONG" });
        self.wrong += u32::from(!same);
    }
}

fn hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).expect("hex digits")).collect()
}

fn words(block: &[u8]) -> [u32; 4] {
    std::array::from_fn(|i| u32::from_le_bytes(block[4 * i..4 * i + 4].try_into().expect("four bytes")))
}

/// Bytes in device memory, with zeros to a multiple of 16.
fn upload(bytes: &[u8]) -> Outcome<DeviceBuffer<u8>> {
    let mut padded = bytes.to_vec();
    padded.resize(bytes.len().next_multiple_of(16).max(16), 0);
    Ok(DeviceBuffer::from_slice(&padded)?)
}

fn download(buffer: &DeviceBuffer<u8>, bytes: usize) -> Outcome<Vec<u8>> {
    let mut all = vec![0; buffer.len()];
    buffer.copy_to(&mut all)?;
    all.truncate(bytes);
    Ok(all)
}

fn ctr_xor(pack: &Pack, key: &[u8], counter: &[u8], data: &[u8]) -> Outcome<Vec<u8>> {
    let (input, output) = (upload(data)?, upload(&vec![0; data.len()])?);
    let parameters = CtrParams {
        keys: expand_key(key),
        counter: words(counter),
        input: input.as_device_ptr().as_raw(),
        output: output.as_device_ptr().as_raw(),
        bytes: data.len() as u64,
        carry: 1, // SP 800-38A counts in all 128 bits
    };
    let name = format!("aes{}_ctr_xor", 8 * key.len());
    pack.launch(&name, 1, ctr::aes128_ctr_xor::THREADS, ctr::SHARED_BYTES, parameters)?;
    download(&output, data.len())
}

/// A GCM vector.
struct Vector {
    name: &'static str,
    key: Vec<u8>,
    nonce: Vec<u8>,
    plaintext: Vec<u8>,
    aad: Vec<u8>,
    ciphertext: Vec<u8>,
    tag: Vec<u8>,
}

fn gcm_records(pack: &Pack, report: &mut Report, vector: &Vector) -> Outcome {
    let matrices = pack.ghash_key(&vector.key)?;
    let length = vector.plaintext.len();
    let (input, aad) = (upload(&vector.plaintext)?, upload(&vector.aad)?);
    let (mut output, opened) = (upload(&vec![0; length])?, upload(&vec![0; length])?);
    let tag = upload(&[0; 16])?;
    let run = |kernel: &str, from: &DeviceBuffer<u8>, to: &DeviceBuffer<u8>| -> Outcome<u32> {
        let verdict = DeviceBuffer::from_slice(&[0u32])?;
        let record = Record {
            input: from.as_device_ptr().as_raw(),
            output: to.as_device_ptr().as_raw(),
            aad: aad.as_device_ptr().as_raw(),
            tag: tag.as_device_ptr().as_raw(),
            verdict: verdict.as_device_ptr().as_raw(),
            length: u32::try_from(length)?,
            aad_length: u32::try_from(vector.aad.len())?,
            // J0 of a 96-bit nonce: the nonce, then 1 big-endian.
            j0: words(&[&vector.nonce[..], &[0, 0, 0, 1]].concat()),
        };
        let records = DeviceBuffer::from_slice(&[Plain(record)])?;
        let parameters = RecordsParams {
            keys: expand_key(&vector.key),
            ghash_key: matrices.as_device_ptr().as_raw(),
            records: records.as_device_ptr().as_raw(),
            count: 1,
        };
        let name = format!("{kernel}_{}", 8 * vector.key.len());
        pack.launch(&name, 1, gcm::gcm_seal_records_128::THREADS, gcm::RECORDS_SHARED, parameters)?;
        let mut value = [0];
        verdict.copy_to(&mut value)?;
        Ok(value[0])
    };
    run("gcm_seal_records", &input, &output)?;
    report.expect(vector.name, download(&output, length)?, vector.ciphertext.clone());
    report.expect("  tag", download(&tag, 16)?, vector.tag.clone());
    report.expect("  verdict", run("gcm_open_records", &output, &opened)?, VERIFIED);
    report.expect("  opened", download(&opened, length)?, vector.plaintext.clone());
    let mut forged = vector.ciphertext.clone();
    forged[7] ^= 1;
    output = upload(&forged)?;
    report.expect("  verdict", run("gcm_open_records", &output, &opened)?, FORGED);
    report.expect("  forged: zeros", download(&opened, length)?, vec![0; length]);
    Ok(())
}

fn run(folder: &Path) -> Outcome<u32> {
    let _context: Context = cust::quick_init()?;
    let device = cust::device::Device::get_device(0)?;
    let major = device.get_attribute(DeviceAttribute::ComputeCapabilityMajor)?;
    let minor = device.get_attribute(DeviceAttribute::ComputeCapabilityMinor)?;
    let hopper = (major, minor) == (9, 0);
    let pack = Pack::load(folder, if hopper { "sm_90a" } else { "sm_80" })?;
    let mut report = Report::default();

    // NIST SP 800-38A, F.5.1 and F.5.5.
    let counter = hex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff");
    let text = hex("6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51\
                    30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710");
    report.expect(
        "SP 800-38A F.5.1, AES-128-CTR",
        ctr_xor(&pack, &hex("2b7e151628aed2a6abf7158809cf4f3c"), &counter, &text)?,
        hex("874d6191b620e3261bef6864990db6ce9806f66b7970fdff8617187bb9fffdff\
             5ae4df3edbd5d35e5b4f09020db03eab1e031dda2fbe03d1792170a0f3009cee"),
    );
    report.expect(
        "SP 800-38A F.5.5, AES-256-CTR",
        ctr_xor(
            &pack,
            &hex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4"),
            &counter,
            &text,
        )?,
        hex("601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5\
             2b0930daa23de94ce87017ba2d84988ddfc9c58db67aada613c2dd08457941a6"),
    );
    if !hopper {
        println!("no GCM kernels looked for on this GPU");
        return Ok(report.wrong);
    }
    // CAVP gcmEncryptExtIV128.rsp and 256: IVlen 96, PTlen 408, AADlen 160, Taglen 128, Count 0.
    let vectors = [
        Vector {
            name: "CAVP, AES-128-GCM, 51 bytes",
            key: hex("fe47fcce5fc32665d2ae399e4eec72ba"),
            nonce: hex("5adb9609dbaeb58cbd6e7275"),
            plaintext: hex("7c0e88c88899a779228465074797cd4c2e1498d259b54390b85e3eef1c02df60\
                            e743f1b840382c4bccaf3bafb4ca8429bea063"),
            aad: hex("88319d6e1d3ffa5f987199166c8a9b56c2aeba5a"),
            ciphertext: hex("98f4826f05a265e6dd2be82db241c0fbbbf9ffb1c173aa83964b7cf539304373\
                             6365253ddbc5db8778371495da76d269e5db3e"),
            tag: hex("291ef1982e4defedaa2249f898556b47"),
        },
        Vector {
            name: "CAVP, AES-256-GCM, 51 bytes",
            key: hex("24501ad384e473963d476edcfe08205237acfd49b5b8f33857f8114e863fec7f"),
            nonce: hex("9ff18563b978ec281b3f2794"),
            plaintext: hex("27f348f9cdc0c5bd5e66b1ccb63ad920ff2219d14e8d631b3872265cf117ee86\
                            757accb158bd9abb3868fdc0d0b074b5f01b2c"),
            aad: hex("adb5ec720ccf9898500028bf34afccbcaca126ef"),
            ciphertext: hex("eb7cb754c824e8d96f7c6d9b76c7d26fb874ffbf1d65c6f64a698d839b0b0614\
                             5dae82057ad55994cf59ad7f67c0fa5e85fab8"),
            tag: hex("bc95c532fecc594c36d1550286a7a3f0"),
        },
    ];
    for vector in &vectors {
        gcm_records(&pack, &mut report, vector)?;
    }
    Ok(report.wrong)
}

fn main() -> ExitCode {
    let Some(folder) = std::env::args_os().nth(1) else {
        eprintln!("usage: ptx-cust FOLDER   (what `ringseal ptx --out FOLDER` wrote)");
        return ExitCode::from(2);
    };
    match run(Path::new(&folder)) {
        Ok(0) => {
            println!("all right");
            ExitCode::SUCCESS
        }
        Ok(wrong) => {
            println!("{wrong} WRONG");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}
