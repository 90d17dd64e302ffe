//! What is in each PTX module: enough to launch its kernels without reading their source.

use serde::{Deserialize, Serialize};

/// What a PTX module is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Target {
    /// H100, H200: has `wgmma`. Runs on compute capability 9.0 and nothing else ("a" targets are not portable).
    #[serde(rename = "sm_90a")]
    Sm90a,
    /// A100 and, compiled by the driver, everything newer.
    #[serde(rename = "sm_80")]
    Sm80,
}

impl Target {
    /// Every target, the most specific first.
    pub const ALL: [Self; 2] = [Self::Sm90a, Self::Sm80];

    /// The name that rustc and ptxas use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sm90a => "sm_90a",
            Self::Sm80 => "sm_80",
        }
    }

    /// File name of the module.
    pub const fn file(self) -> &'static str {
        match self {
            Self::Sm90a => "ringseal_sm_90a.ptx",
            Self::Sm80 => "ringseal_sm_80.ptx",
        }
    }

    /// The module for a device of compute capability `major.minor`; `None` below 8.0, which no module supports. Whether the
    /// device has the shared memory that a kernel needs ([`Kernel::shared_bytes`]) is to be asked of it: 8.6, 8.9 and 12.0 have
    /// less than the AES kernels' 128 KiB.
    pub const fn for_compute_capability(major: u32, minor: u32) -> Option<Self> {
        match (major, minor) {
            (9, 0) => Some(Self::Sm90a),
            (8.., _) => Some(Self::Sm80),
            _ => None,
        }
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// The checked-in `manifest.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Version of the rustc that made the modules.
    pub rustc: String,
    /// The files of the kernel crate that the modules are made from.
    pub sources: Vec<String>,
    /// SHA-256 (hex) of these files and the recipe: equal means that the modules are up to date.
    pub sources_sha256: String,
    /// The kernels' parameter structures, what these are made of, and what their documentation says lies at the addresses
    /// in them. A structure comes after those that it contains.
    pub structures: Vec<Structure>,
    /// Constants that the documentation of the structures names, or whose own names one of them.
    pub constants: Vec<Constant>,
    /// The modules, in the order of [`Target::ALL`].
    pub modules: Vec<Module>,
}

/// One PTX module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Module {
    /// What it is compiled for.
    pub target: Target,
    /// File name, beside the manifest.
    pub file: String,
    /// PTX ISA version: a driver must know it to load the module.
    pub ptx_isa: String,
    /// SHA-256 (hex) of the file.
    pub sha256: String,
    /// Flags given to rustc.
    pub rustflags: Vec<String>,
    /// Its kernels, by name.
    pub kernels: Vec<Kernel>,
}

/// One kernel: an entry point of a module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kernel {
    /// Entry name.
    pub name: String,
    /// Threads of a block (one-dimensional); the entry is compiled for exactly this many at most.
    pub threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// The structure that is its one parameter, passed by value: [`Manifest::structure`].
    pub parameter: String,
    /// Warp- and block-wide instructions in the entry. They are expected values: `cargo ptx lint` holds the PTX to them.
    pub counts: Counts,
}

/// A `repr(C)` structure of the kernel crate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Structure {
    /// Its name in the kernel crate.
    pub name: String,
    /// What it is.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub doc: String,
    /// Its size in bytes.
    pub bytes: u32,
    /// Its alignment in bytes.
    pub align: u32,
    /// Its fields, in order.
    pub fields: Vec<Field>,
}

/// A field of a structure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Field {
    /// Field name; of a tuple's field, its number.
    pub name: String,
    /// Its Rust type, with aliases resolved and array lengths as numbers.
    #[serde(rename = "type")]
    pub ty: String,
    /// What it holds.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub doc: String,
    /// Offset in bytes.
    pub offset: u32,
    /// Size in bytes.
    pub bytes: u32,
}

/// An integer constant of the kernel crate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Constant {
    /// Its name, after those of the inline modules it is in: `failure::DEADLINE`.
    pub name: String,
    /// Its Rust type.
    #[serde(rename = "type")]
    pub ty: String,
    /// Its value.
    pub value: u64,
    /// What it means.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub doc: String,
}

/// How often instructions that a warp or block must execute together stand in an entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counts {
    /// Block and cluster barriers: `bar.*` and `barrier.*`.
    pub barriers: u32,
    /// `bar.warp.sync`.
    pub warp_barriers: u32,
    /// `shfl.*`.
    pub shuffles: u32,
    /// `vote.*`, `match.*`, `elect.*`, `activemask.*`.
    pub votes: u32,
    /// `redux.*`.
    pub reductions: u32,
    /// `mma.*`.
    pub mma: u32,
    /// `wgmma.mma_async.*`.
    pub wgmma: u32,
}

impl Counts {
    /// The counts with their names, in a fixed order.
    pub fn named(&self) -> [(&'static str, u32); 7] {
        [
            ("barriers", self.barriers),
            ("warp barriers", self.warp_barriers),
            ("shuffles", self.shuffles),
            ("votes", self.votes),
            ("reductions", self.reductions),
            ("mma", self.mma),
            ("wgmma", self.wgmma),
        ]
    }
}

impl Manifest {
    /// Reads a manifest.
    pub fn from_json(text: &str) -> crate::Result<Self> {
        serde_json::from_str(text).map_err(|e| crate::Error::new(format!("manifest.json: {e}")))
    }

    /// The structure of that name.
    pub fn structure(&self, name: &str) -> Option<&Structure> {
        self.structures.iter().find(|s| s.name == name)
    }

    /// The module of a target.
    pub fn module(&self, target: Target) -> Option<&Module> {
        self.modules.iter().find(|m| m.target == target)
    }
}

impl Module {
    /// The kernel of that name.
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.iter().find(|k| k.name == name)
    }
}
