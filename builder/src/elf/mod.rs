//! Reading ELF files: what the dynamic loader, the CUDA driver and a person need to know of one.
//!
//! Everything is read as the loader does, through program headers and the dynamic table; sections are used only for
//! what has no other place: GPU code, notes, and the versions of CUDA's own libraries. Nothing is executed, mapped at
//! its address or relocated. A header is believed only as far as the file reaches: counts, names and sizes are bounded,
//! and what is allocated does not depend on them.
//!
//! Left out: whether the files of an image fit together, which is [`crate::contract`]'s.

mod arch;
mod dynamic;
pub mod fatbin;
mod layout;
mod versions;

use std::fmt;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use object::elf::{FileHeader32, FileHeader64};
use object::{Endianness, elf};
use serde::Deserialize;

pub use arch::{Arch, ComputeCapability, InvalidArch, Variant};
pub use dynamic::Needs;
pub(crate) use layout::{Layout, Section};
pub use versions::{Component, CudaRelease, InvalidRelease};

use fatbin::GpuCode;

/// What every ELF file begins with.
pub(crate) const MAGIC: &[u8] = b"\x7fELF";

/// Most entries of one table.
const MOST_ENTRIES: usize = 1 << 13;

/// Longest name: a path, the name of a library or of a symbol version.
const LONGEST_NAME: usize = 4096;

/// Longest forward compatibility note.
const LONGEST_NOTE: usize = 64 << 10;

/// What one ELF file says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Bits of an address: 32 or 64.
    pub bits: u8,
    /// Whether numbers in it are little-endian.
    pub little_endian: bool,
    /// The processor, as ELF numbers it: 62 for x86-64, 183 for AArch64.
    pub machine: u16,
    /// What it is for.
    pub kind: Kind,
    /// The program that loads it, such as `/lib64/ld-linux-x86-64.so.2`.
    pub interpreter: Option<String>,
    /// What the loader is asked for.
    pub needs: Needs,
    /// GPU code, by section.
    pub gpu_code: Vec<GpuCode>,
    /// Which drivers a forward-compatible `libcuda.so` may run on.
    pub forward: Option<ForwardCompatibility>,
    /// The library of CUDA that it is.
    pub component: Option<Component>,
}

/// What an ELF file is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A program that needs a loader.
    Program,
    /// A program that runs without one.
    StaticProgram,
    /// A library.
    SharedObject,
    /// Input of a linker.
    Relocatable,
    /// What was taken out of a program or library for debuggers: its headers are there, and nothing of what they name.
    DebugInformation,
    /// Something else, as ELF numbers it.
    Other(u16),
}

/// The note by which a forward-compatible `libcuda.so` says where it may be used.
///
/// Its JSON has the keys `Format`, `CUDA Version`, `Driver` and `Device`; NVIDIA's container toolkit reads the same.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ForwardCompatibility {
    /// Version of the note.
    #[serde(rename = "Format")]
    pub format: u32,
    /// Release of CUDA that it brings.
    #[serde(rename = "CUDA Version")]
    pub cuda: String,
    /// Branches of the host's driver that it works with, such as 535. Empty where it does not say.
    #[serde(rename = "Driver", default)]
    pub drivers: Vec<u32>,
    /// Kinds of devices that it works with, by numbers that are not documented.
    #[serde(rename = "Device", default)]
    pub devices: Vec<u32>,
}

/// Why an ELF file cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The system refused.
    #[error("cannot read {path}: {source}", path = .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// It is damaged.
    #[error("{file:?} is not a sound ELF file: {problem}")]
    Damaged {
        /// The file.
        file: String,
        /// What is wrong.
        problem: String,
    },
    /// It has more of something than any real file.
    #[error("{file:?} has more than {most} {of}")]
    TooMany {
        /// The file.
        file: String,
        /// Of what.
        of: &'static str,
        /// How many it may have.
        most: usize,
    },
    /// GPU code in a form that is not known here.
    #[error(
        "{file:?} holds GPU code that cannot be read: {what} at offset {offset:#x} is {found}, and must be {needed}"
    )]
    Fatbin {
        /// The file.
        file: String,
        /// Offset of it in the file.
        offset: u64,
        /// The field.
        what: &'static str,
        /// What stands there.
        found: String,
        /// What may stand there.
        needed: &'static str,
    },
    /// The forward compatibility note is not what NVIDIA's tools read.
    #[error("{file:?}: its note .note.cuda.fwd_compatibility cannot be read: {problem}")]
    Note {
        /// The file.
        file: String,
        /// What is wrong.
        problem: String,
    },
}

impl Error {
    /// The way out.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Io { .. } => None,
            Self::Damaged { .. } | Self::TooMany { .. } => {
                Some("the file was damaged before it was packaged; take another version of its package")
            }
            Self::Fatbin { .. } => Some(
                "a newer CUDA than this program knows has made it; update trainyard, or take an older version of the library",
            ),
            Self::Note { .. } => Some("take libcuda.so from another release of cuda-compat"),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Program => f.write_str("program"),
            Self::StaticProgram => f.write_str("static program"),
            Self::SharedObject => f.write_str("shared object"),
            Self::Relocatable => f.write_str("relocatable object"),
            Self::DebugInformation => f.write_str("debug information"),
            Self::Other(number) => write!(f, "ELF type {number}"),
        }
    }
}

impl Report {
    /// GPU code that the driver loads as it stands. What only a linker reads, and what a library of kernels keeps for
    /// itself, is not there.
    pub fn loadable(&self) -> impl Iterator<Item = &fatbin::Element> {
        let sections = self.gpu_code.iter().filter(|code| code.role.is_loaded());
        sections.flat_map(|code| &code.elements).filter(|element| !element.is_blank && !element.is_empty)
    }
}

/// Maps a file into memory, to be read.
///
/// # Errors
/// When it cannot be opened.
pub fn map(path: &Path) -> Result<Mmap, Error> {
    let failed = |source| Error::Io { path: path.to_owned(), source };
    let file = std::fs::File::open(path).map_err(failed)?;
    // SAFETY: the map is only read. Blobs of the store are never written to once they are there; who truncates one
    // meanwhile ends this process with SIGBUS, and gains nothing else.
    unsafe { Mmap::map(&file) }.map_err(failed)
}

/// Reads the ELF file `bytes`; `None` where it is none. `name` is its path in the image, for errors and for the version
/// in a file's name.
///
/// # Errors
/// When it is damaged, or holds GPU code in a form that is not known.
pub fn read(name: &str, bytes: &[u8]) -> Result<Option<Report>, Error> {
    let Some(layout) = layout(name, bytes)? else {
        return Ok(None);
    };
    let needs = dynamic::read(name, bytes, &layout)?;
    let interpreter = layout.interpreter.clone();
    let kind = match layout.kind {
        _ if layout.is_debug_information => Kind::DebugInformation,
        elf::ET_REL => Kind::Relocatable,
        elf::ET_EXEC | elf::ET_DYN => {
            let is_program = layout.kind == elf::ET_EXEC
                || needs.is_position_independent_program
                || (interpreter.is_some() && needs.soname.is_none());
            match (is_program, interpreter.is_some()) {
                (true, true) => Kind::Program,
                (true, false) => Kind::StaticProgram,
                (false, _) => Kind::SharedObject,
            }
        }
        other => Kind::Other(other.0),
    };
    // CUDA exists for 64-bit little-endian hosts only; its fatbins in an object file are not linked yet.
    let is_cuda_host = layout.bits == 64
        && layout.little_endian
        && matches!(kind, Kind::Program | Kind::StaticProgram | Kind::SharedObject);
    let (gpu_code, forward, component) = if is_cuda_host {
        (
            fatbin::find(name, bytes, &layout)?,
            forward(name, bytes, &layout)?,
            versions::component(name, bytes, &layout, needs.soname.as_deref()),
        )
    } else {
        (Vec::new(), None, None)
    };
    Ok(Some(Report {
        bits: layout.bits,
        little_endian: layout.little_endian,
        machine: layout.machine,
        kind,
        interpreter,
        needs,
        gpu_code,
        forward,
        component,
    }))
}

/// Segments and sections of an ELF file; `None` where it is none.
pub(crate) fn layout(name: &str, bytes: &[u8]) -> Result<Option<Layout>, Error> {
    if !bytes.starts_with(MAGIC) {
        return Ok(None);
    }
    match bytes.get(4) {
        Some(1) => layout::read::<FileHeader32<Endianness>>(name, bytes).map(Some),
        Some(2) => layout::read::<FileHeader64<Endianness>>(name, bytes).map(Some),
        class => Err(damaged(name, format!("its class is {class:?}, and must be 1 or 2"))),
    }
}

fn damaged(file: &str, problem: impl Into<String>) -> Error {
    Error::Damaged { file: file.to_owned(), problem: problem.into() }
}

/// The note of a forward-compatible `libcuda.so`: one ELF note of the owner `NVIDIA Corporation`.
fn forward(name: &str, bytes: &[u8], layout: &Layout) -> Result<Option<ForwardCompatibility>, Error> {
    let Some(section) = layout.section(".note.cuda.fwd_compatibility") else {
        return Ok(None);
    };
    let fault = |problem: &str| Error::Note { file: name.to_owned(), problem: problem.to_owned() };
    let note = section.bytes(bytes).ok_or_else(|| fault("it reaches beyond the file"))?;
    if note.len() > LONGEST_NOTE {
        return Err(fault("it is larger than 64 KiB"));
    }
    let size = |at: usize| {
        let word = note.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_le_bytes(word)).ok()
    };
    let align = usize::try_from(section.align).unwrap_or(4).clamp(4, 64);
    let text = (|| {
        let (name_size, text_size) = (size(0)?, size(4)?);
        let owner = note.get(12..12_usize.checked_add(name_size)?)?;
        let start = 12_usize.checked_add(name_size.checked_next_multiple_of(align)?)?;
        let text = note.get(start..start.checked_add(text_size)?)?;
        Some((owner, text))
    })();
    let (owner, text) = text.ok_or_else(|| fault("its sizes do not fit"))?;
    let trimmed = |bytes: &[u8]| {
        let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        bytes[..end].to_vec()
    };
    if trimmed(owner) != b"NVIDIA Corporation" {
        return Err(fault("its owner is not NVIDIA Corporation"));
    }
    let note: ForwardCompatibility =
        serde_json::from_slice(&trimmed(text)).map_err(|error| fault(&error.to_string()))?;
    if note.format != 1 {
        return Err(fault(&format!("its format is {}, and must be 1", note.format)));
    }
    Ok(Some(note))
}
