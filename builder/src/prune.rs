//! Making a CUDA library smaller: GPU code for other GPUs, and debug information, become zeros.
//!
//! Every byte that is kept stays where it is, and every header stays: offsets, symbols and relocations hold, and the
//! driver skips architectures that it does not need by their headers. Zeros cost next to nothing in a compressed layer.
//!
//! What is kept for a GPU is machine code of its generation for the same or an earlier member, and PTX for the same or an
//! earlier architecture. cuBLAS breaks when earlier members of the generation go: not all of its kernels exist for
//! each member.
//!
//! Left out: whether a licence allows it, which the caller knows; and the bytes themselves, which are read where they
//! are and written where the caller says.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::ops::Range;

use crate::elf::fatbin::{Element, Kind, Role};
use crate::elf::{self, ComputeCapability};

/// Size of a section that has nothing in it.
const NO_SIZE: [u8; 8] = 0_u64.to_le_bytes();

/// Zeros written at a time.
const ZEROS: [u8; 1 << 14] = [0; 1 << 14];

/// What to keep.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keep {
    /// GPUs that the library is to run on.
    pub gpus: BTreeSet<ComputeCapability>,
    /// Whether GPU code that the library keeps for itself (`.cask_resource`) stays as it is.
    pub resources: bool,
    /// Whether GPU code that only a linker reads (`__nv_relfatbin`) stays for these GPUs. The driver links it anew for a
    /// GPU without machine code; where each of the GPUs has some, nothing reads it.
    pub relocatable: bool,
    /// Whether debug information stays.
    pub debug: bool,
}

/// What becomes zeros in one library.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// Parts of the file, in order, that do not overlap.
    zeros: Vec<Range<usize>>,
    /// Bytes to write in place of others.
    patches: BTreeMap<usize, [u8; 8]>,
    size: usize,
    /// What goes, by where it is and what it is.
    pub removed: BTreeMap<Removed, Amount>,
    /// GPU code that stays, in the same way.
    pub kept: BTreeMap<Removed, Amount>,
}

/// A kind of bytes in a library.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Removed {
    /// The section.
    pub section: String,
    /// Its GPU code for one architecture, such as `sm_90a`; none for all of the section.
    pub code: Option<String>,
}

/// How much of something there is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Amount {
    /// Pieces.
    pub pieces: u64,
    /// Bytes.
    pub bytes: u64,
}

/// Why a library cannot be made smaller. Nothing of it was written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It cannot be read.
    #[error(transparent)]
    Elf(#[from] elf::Error),
    /// It is no 64-bit little-endian library.
    #[error("{file:?} cannot be pruned: it is not a 64-bit little-endian ELF library")]
    NotALibrary {
        /// The file.
        file: String,
    },
    /// No GPU was named.
    #[error("{file:?} cannot be pruned: no GPU is named, so all of its GPU code would go")]
    NoGpus {
        /// The file.
        file: String,
    },
    /// It has no GPU code for one of the GPUs.
    #[error("{file:?} has no GPU code that runs on a GPU of compute capability {gpu}: it has {has}")]
    NotCovered {
        /// The file.
        file: String,
        /// The GPU.
        gpu: ComputeCapability,
        /// Architectures that it has.
        has: String,
    },
    /// Parts of it that must stay overlap with parts that go.
    #[error("{file:?} cannot be pruned: bytes at offset {offset:#x} would go, and are needed for {needed}")]
    Shared {
        /// The file.
        file: String,
        /// The place.
        offset: usize,
        /// What needs them.
        needed: &'static str,
    },
    /// The bytes are not the ones that the plan was made for.
    #[error("the plan is for a file of {needed} bytes, and this one has {found}")]
    OtherFile {
        /// Bytes found.
        found: usize,
        /// Bytes needed.
        needed: usize,
    },
    /// It cannot be written.
    #[error("cannot write the pruned library: {0}")]
    Write(#[source] io::Error),
}

impl Error {
    /// The way out.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Elf(error) => error.hint(),
            Self::NotALibrary { .. } | Self::OtherFile { .. } => None,
            Self::NoGpus { .. } => Some("name the GPUs, as in: gpus = [\"sm_90\"]"),
            Self::NotCovered { .. } => {
                Some("name GPUs that the library is made for, or take another version of it")
            }
            Self::Shared { .. } => Some("leave this library as it is"),
            Self::Write(_) => Some("free some space"),
        }
    }
}

/// Whether a piece of GPU code stays for one of the GPUs.
fn stays(element: &Element, gpus: &BTreeSet<ComputeCapability>) -> bool {
    let made_for = element.arch.capability;
    gpus.iter().any(|gpu| match element.kind {
        Kind::Ptx | Kind::LtoIr => made_for <= *gpu,
        Kind::MachineCode => made_for.major == gpu.major && made_for.minor <= gpu.minor,
    })
}

/// Finds what can go from the library `bytes`. `name` is for errors.
///
/// # Errors
/// When anything in it is not understood, or it has nothing for one of the GPUs while it has GPU code.
pub fn plan(name: &str, bytes: &[u8], keep: &Keep) -> Result<Plan, Error> {
    if keep.gpus.is_empty() {
        return Err(Error::NoGpus { file: name.to_owned() });
    }
    let not_a_library = || Error::NotALibrary { file: name.to_owned() };
    let report = elf::read(name, bytes)?.ok_or_else(not_a_library)?;
    let layout = elf::layout(name, bytes)?.ok_or_else(not_a_library)?;
    if report.bits != 64 || !report.little_endian || report.kind != elf::Kind::SharedObject {
        return Err(not_a_library());
    }
    let shared = |offset, needed| Error::Shared { file: name.to_owned(), offset, needed };
    let mut plan = Plan { size: bytes.len(), ..Plan::default() };
    for gpu in &keep.gpus {
        if report.loadable().next().is_some() && !report.loadable().any(|element| element.runs_on(*gpu)) {
            let has: BTreeSet<_> = report.loadable().map(ToString::to_string).collect();
            let has = has.into_iter().collect::<Vec<_>>().join(", ");
            return Err(Error::NotCovered { file: name.to_owned(), gpu: *gpu, has });
        }
    }
    let is_linked = keep.gpus.iter().all(|gpu| {
        report.loadable().any(|element| element.kind == Kind::MachineCode && element.runs_on(*gpu))
    });
    let mut needed = Vec::new();
    for code in &report.gpu_code {
        let is_fixed = code.role == Role::Embedded || (code.role == Role::Resource && keep.resources);
        let is_unread = code.role == Role::Relocatable && !keep.relocatable && is_linked;
        for element in code.elements.iter().filter(|element| !element.is_blank) {
            let (start, size) = element.payload_range();
            let what = Removed { section: code.section.clone(), code: Some(element.to_string()) };
            let range = range(start, size).ok_or_else(not_a_library)?;
            let stays = is_fixed || (!is_unread && stays(element, &keep.gpus));
            let list = if stays { &mut plan.kept } else { &mut plan.removed };
            list.entry(what).or_default().add(size);
            if stays { needed.push(range) } else { plan.zeros.push(range) }
        }
        let headers = code.elements.iter().map(|element| (element.offset, element.header));
        needed.extend(headers.filter_map(|(start, size)| range(start, size)));
    }
    if !keep.debug {
        plan.drop_debug(&layout, bytes).map_err(|offset| shared(offset, "the program"))?;
    }
    plan.zeros.retain(|range| !range.is_empty());
    plan.zeros.sort_by_key(|range| (range.start, range.end));
    for pair in plan.zeros.windows(2) {
        if pair[1].start < pair[0].end {
            return Err(shared(pair[1].start, "another part"));
        }
    }
    let headers = plan.patches.keys().map(|start| (*start..*start + NO_SIZE.len(), "the section headers"));
    let needed = needed.into_iter().map(|range| (range, "GPU code that stays"));
    let start = std::iter::once((0..64, "the ELF header"));
    let loaded = layout.sections.iter().filter(|section| section.is_loaded && !is_gpu_code(&section.name));
    let loaded = loaded.filter_map(|section| Some((range(section.offset, section.size)?, "the program")));
    for (range, what) in needed.chain(headers).chain(start).chain(loaded) {
        if let Some(offset) = overlap(&plan.zeros, &range) {
            return Err(shared(offset, what));
        }
    }
    Ok(plan)
}

fn is_gpu_code(section: &str) -> bool {
    matches!(section, ".nv_fatbin" | "__nv_relfatbin" | ".cask_resource")
}

fn range(start: u64, size: u64) -> Option<Range<usize>> {
    Some(usize::try_from(start).ok()?..usize::try_from(start.checked_add(size)?).ok()?)
}

/// Where `range` meets one of `zeros`, which are sorted and do not overlap.
fn overlap(zeros: &[Range<usize>], range: &Range<usize>) -> Option<usize> {
    if range.is_empty() {
        return None;
    }
    let next = zeros.partition_point(|zero| zero.end <= range.start);
    zeros.get(next).filter(|zero| zero.start < range.end).map(|zero| zero.start.max(range.start))
}

impl Amount {
    fn add(&mut self, bytes: u64) {
        self.pieces += 1;
        self.bytes += bytes;
    }
}

impl Plan {
    /// Adds debug information to what goes; says where the program itself is in the way.
    fn drop_debug(&mut self, layout: &elf::Layout, bytes: &[u8]) -> Result<(), usize> {
        let is_debug = |section: &&elf::Section| !section.is_loaded && section.name.starts_with(".debug_");
        for section in layout.sections.iter().filter(is_debug).filter(|section| section.size > 0) {
            let place = range(section.offset, section.size).filter(|place| place.end <= bytes.len());
            let (Some(place), Ok(size_offset)) = (place, usize::try_from(section.size_offset)) else {
                return Err(bytes.len());
            };
            let loaded = layout.segments.iter().filter_map(|segment| range(segment.offset, segment.size));
            if let Some(offset) =
                loaded.filter_map(|segment| overlap(std::slice::from_ref(&place), &segment)).min()
            {
                return Err(offset);
            }
            let what = Removed { section: section.name.clone(), code: None };
            self.removed.entry(what).or_default().add(section.size);
            self.zeros.push(place);
            // Whoever looks for debug information finds that it was taken out, and not that it is broken.
            self.patches.insert(size_offset, NO_SIZE);
        }
        Ok(())
    }

    /// Bytes that become zeros.
    pub fn zeroed(&self) -> u64 {
        self.zeros.iter().map(|range| range.len() as u64).sum()
    }

    /// Writes the pruned library, which has the same size. No more than a few pages are in memory where `bytes` is
    /// mapped.
    ///
    /// # Errors
    /// When `bytes` has another size than what the plan was made for, or it cannot be written.
    pub fn write(&self, bytes: &[u8], to: &mut impl Write) -> Result<(), Error> {
        if bytes.len() != self.size {
            return Err(Error::OtherFile { found: bytes.len(), needed: self.size });
        }
        let mut at = 0;
        for zero in &self.zeros {
            self.copy(bytes, at..zero.start, to).map_err(Error::Write)?;
            let mut left = zero.len();
            while left > 0 {
                let count = left.min(ZEROS.len());
                to.write_all(&ZEROS[..count]).map_err(Error::Write)?;
                left -= count;
            }
            at = zero.end;
        }
        self.copy(bytes, at..bytes.len(), to).map_err(Error::Write)
    }

    /// Writes a part that stays, with the patches in it.
    fn copy(&self, bytes: &[u8], part: Range<usize>, to: &mut impl Write) -> io::Result<()> {
        let mut at = part.start;
        for (start, patch) in self.patches.range(part.clone()) {
            to.write_all(&bytes[at..*start])?;
            to.write_all(patch)?;
            at = start + patch.len();
        }
        to.write_all(&bytes[at..part.end])
    }
}
