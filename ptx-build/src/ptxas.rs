//! NVIDIA's assembler and disassembler, used only to check: what each kernel costs in registers, whether it spills, and what its
//! machine code is.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::manifest::Module;
use crate::{Error, Result};

/// What `ptxas -v` says of a kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) name: String,
    pub(crate) registers: u32,
    pub(crate) stack_bytes: u32,
    pub(crate) spill_bytes: u32,
    pub(crate) static_shared_bytes: u32,
    pub(crate) barriers: u32,
}

/// Where `scripts/setup-ptxas` puts the tools, below the build folder.
const TOOLS: &str = "cuda-tools/bin";

/// What NVIDIA's tools say of a module.
pub(crate) struct Assembled {
    pub(crate) usages: Vec<Usage>,
    /// ptxas's own words.
    pub(crate) messages: String,
    /// The machine code, disassembled.
    pub(crate) sass: String,
}

/// Assembles a module for a GPU (`sm_90a` and the like), reads the figures, and disassembles the result.
pub(crate) fn run(target_dir: &Path, module: &Path, gpu: &str) -> Result<Assembled> {
    let cubin = target_dir.join("ptx").join(gpu).with_extension("cubin");
    let folder = cubin.parent().expect("just joined");
    fs::create_dir_all(folder).map_err(|e| Error::io(folder, e))?;
    let tool = |name: &str, arguments: &[&OsStr]| -> Result<(String, String)> {
        let own = target_dir.join(TOOLS).join(name);
        let program = if own.is_file() { own } else { PathBuf::from(name) };
        let output = Command::new(&program).args(arguments).output().map_err(|e| {
            Error::new(format!("{}: {e}; get it with:\n\n    scripts/setup-ptxas\n", program.display()))
        })?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
        if !output.status.success() {
            return Err(Error::new(format!("{name} refuses {}:\n{stdout}{stderr}", module.display())));
        }
        Ok((stdout, stderr))
    };
    let verbose = ["-v", "-arch", gpu, "-o"].map(OsStr::new);
    let (stdout, stderr) = tool("ptxas", &[&verbose[..], &[cubin.as_os_str(), module.as_os_str()]].concat())?;
    let messages = stdout + &stderr;
    let (sass, _) = tool("nvdisasm", &[OsStr::new("-c"), cubin.as_os_str()])?;
    Ok(Assembled { usages: usages(&messages), messages, sass })
}

/// Reads the figures out of `ptxas -v`'s output.
pub(crate) fn usages(text: &str) -> Vec<Usage> {
    let mut found: Vec<Usage> = Vec::new();
    // "Function properties" also come for functions that are no kernels, under the kernel that was named last.
    let mut in_kernel = false;
    for line in text.lines() {
        let line = line.trim_start_matches("ptxas info").trim_start_matches([' ', ':']);
        if let Some(rest) = line.strip_prefix("Compiling entry function '") {
            let name = rest.split('\'').next().unwrap_or_default().to_owned();
            found.push(Usage { name, ..Usage::default() });
        } else if let Some(name) = line.strip_prefix("Function properties for ") {
            in_kernel = found.last().is_some_and(|u| u.name == name.trim());
        } else if let Some(usage) = found.last_mut() {
            for part in line.split(',').map(str::trim) {
                let number =
                    |suffix: &str| part.strip_suffix(suffix).and_then(|n| n.trim().parse::<u32>().ok());
                if let Some(n) =
                    part.strip_prefix("Used ").and_then(|p| p.strip_suffix(" registers")?.parse().ok())
                {
                    usage.registers = n;
                } else if let Some(n) =
                    part.strip_prefix("used ").and_then(|p| p.strip_suffix(" barriers")?.parse().ok())
                {
                    usage.barriers = n;
                } else if let Some(n) = number("bytes smem") {
                    usage.static_shared_bytes = n;
                } else if let Some(n) = number("bytes cumulative stack size") {
                    usage.stack_bytes = usage.stack_bytes.max(n);
                } else if let Some(n) = number("bytes stack frame").filter(|_| in_kernel) {
                    usage.stack_bytes = usage.stack_bytes.max(n);
                } else if let Some(n) =
                    number("bytes spill stores").or(number("bytes spill loads")).filter(|_| in_kernel)
                {
                    usage.spill_bytes += n;
                }
            }
        }
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

/// Kernels, by how their names begin, that may have so many bytes of local memory: for addresses, from a record's beginning to its
/// loop. [`sass`](crate::sass) sees to it that there is none in the loop.
const OUTSIDE_LOOPS: [(&str, u32); 2] = [("ring_sealed_", 40), ("relay_sealed_", 56)];

/// Registers of an SM that one block may take.
const REGISTERS: u32 = 65536;

/// What is wrong with a module, one line a finding. C7513, C7514 and C7520: ptxas gave up running `wgmma` asynchronously,
/// which costs most of its rate and says that registers of an instruction in flight were touched.
pub(crate) fn findings(usages: &[Usage], messages: &str, module: &Module) -> Vec<String> {
    let mut findings = Vec::new();
    for usage in usages {
        let name = &usage.name;
        let Some(kernel) = module.kernel(name) else {
            findings.push(format!("{name}: not in the manifest"));
            continue;
        };
        let tolerated =
            OUTSIDE_LOOPS.iter().find(|(start, _)| name.starts_with(start)).map_or(0, |(_, bytes)| *bytes);
        // Whatever is spilled has a place in the stack.
        if usage.spill_bytes > 0 && usage.stack_bytes.max(1) > tolerated {
            findings.push(format!("{name}: {} bytes of spills", usage.spill_bytes));
        }
        if usage.stack_bytes > tolerated {
            findings.push(format!("{name}: {} bytes of stack (local memory)", usage.stack_bytes));
        }
        // The hardware hands out registers to a thread by 8.
        if usage.registers.next_multiple_of(8) * kernel.threads > REGISTERS {
            let (threads, registers) = (kernel.threads, usage.registers);
            findings.push(format!("{name}: {threads} threads x {registers} registers cannot be launched"));
        }
        // Seen when a check of an address was false on one GPU and ptxas knew it: nothing but the trap was left.
        if usage.barriers == 0 && kernel.counts.barriers > 0 {
            findings.push(format!("{name}: ptxas found its barriers unreachable"));
        }
    }
    for kernel in module.kernels.iter().filter(|k| !usages.iter().any(|u| u.name == k.name)) {
        findings.push(format!("{}: ptxas did not report it", kernel.name));
    }
    let codes = ["C7513", "C7514", "C7520"];
    findings.extend(messages.lines().filter(|l| codes.iter().any(|c| l.contains(c))).map(str::to_owned));
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::{Counts, Kernel, Target};

    const OUTPUT: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'seal' for 'sm_90a'
ptxas info    : Function properties for seal
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 63 registers, used 1 barriers
ptxas info    : Compile time = 3.0 ms
ptxas info    : Compiling entry function 'open' for 'sm_90a'
ptxas info    : Function properties for open
    256 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 2 barriers, 256 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Function properties for helper
    64 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
";

    #[test]
    fn reads_figures() {
        let usages = usages(OUTPUT);
        let open = Usage {
            name: "open".into(),
            registers: 168,
            stack_bytes: 256,
            spill_bytes: 20,
            static_shared_bytes: 1024,
            barriers: 2,
        };
        let seal = Usage { name: "seal".into(), registers: 63, barriers: 1, ..Usage::default() };
        assert_eq!(usages, [open, seal]);
    }

    /// A module with these kernels, each of 512 threads and one barrier.
    fn module(names: &[&str]) -> Module {
        let kernels = names.iter().map(|&name| Kernel {
            name: name.into(),
            threads: 512,
            shared_bytes: 0,
            parameter: "P".into(),
            counts: Counts { barriers: 1, ..Counts::default() },
        });
        Module {
            target: Target::Sm90a,
            file: Target::Sm90a.file().into(),
            ptx_isa: "8.0".into(),
            sha256: String::new(),
            rustflags: vec![],
            kernels: kernels.collect(),
        }
    }

    #[test]
    fn finds_spills_stack_registers_and_serialised_wgmma() {
        let text = format!(
            "{OUTPUT}ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async serialized\n"
        );
        let found = findings(&usages(OUTPUT), &text, &module(&["open", "seal"]));
        assert_eq!(found.len(), 4, "{found:?}");
        assert!(found[0].contains("open: 20 bytes of spills"));
        assert!(found[1].contains("256 bytes of stack"));
        assert!(found[2].contains("512 threads x 168"));
        assert!(found[3].contains("C7514"));
    }

    #[test]
    fn tolerates_a_few_addresses_in_local_memory_where_it_is_said() {
        let usage = |name: &str, stack_bytes| Usage {
            name: name.into(),
            registers: 128,
            stack_bytes,
            spill_bytes: 80,
            barriers: 1,
            ..Usage::default()
        };
        let found = |name: &str, stack| findings(&[usage(name, stack)], "", &module(&[name]));
        assert_eq!(found("ring_sealed_128", 40), [""; 0]);
        assert_eq!(found("ring_sealed_128", 48).len(), 2);
        assert_eq!(found("seal", 40).len(), 2);
    }

    #[test]
    fn finds_kernels_that_were_thrown_away() {
        let seal = Usage { name: "seal".into(), registers: 63, barriers: 1, ..Usage::default() };
        assert_eq!(findings(std::slice::from_ref(&seal), "", &module(&["seal"])), [""; 0]);
        let found = findings(std::slice::from_ref(&seal), "", &module(&["open"]));
        assert_eq!(found, ["seal: not in the manifest", "open: ptxas did not report it"]);
        let trap = Usage { barriers: 0, registers: 4, ..seal };
        assert_eq!(findings(&[trap], "", &module(&["seal"])), ["seal: ptxas found its barriers unreachable"]);
    }
}
