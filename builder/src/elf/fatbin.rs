//! GPU code inside ELF files: NVIDIA's fat binaries.
//!
//! The layout is not documented; what is known of it was found in real libraries of CUDA 12 and 13, and what is not
//! known is refused. All numbers are little-endian.
//!
//! A region has a header of 16 bytes (u32 magic `0xBA55ED50`, u16 version 1, u16 size of the header, u64 bytes after it)
//! and elements one after the other. An element has a header of 64 bytes or more:
//!
//! | at | what |
//! |---|---|
//! | 0 | u16 kind: 1 PTX, 2 machine code (an ELF file), 8 input of a linker at run time (LTO-IR) |
//! | 2 | u16 version, `0x0101` |
//! | 4 | u32 size of the header |
//! | 8 | u64 size of the payload, padded to 8 |
//! | 16 | u32 size of the payload where it is compressed |
//! | 24 | u16 minor, u16 major: of PTX, its ISA version |
//! | 28 | u32 architecture, as in `sm_90` |
//! | 40 | u64 flags |
//! | 56 | u64 size after decompression |
//!
//! `.nv_fatbin` and `__nv_relfatbin` hold regions and nothing else. Other data, such as cuBLASLt's `.cask_resource` and
//! cuFFT's `.data`, may hold regions among other things; there they are found by their magic number.
//!
//! Left out: what is in a payload. It is neither decompressed nor disassembled.

use std::fmt;

use super::{Arch, ComputeCapability, Error, Layout, Section, Variant};

/// First word of a region.
const MAGIC: u32 = 0xBA55_ED50;

/// Bytes of a region's header.
const REGION_HEADER: u64 = 16;

/// Fewest and most bytes of an element's header.
const ELEMENT_HEADER: std::ops::RangeInclusive<u64> = 64..=4096;

/// Most elements of one file. The library with the most has about 20 000.
const MOST_ELEMENTS: usize = 1 << 18;

const FLAG_LZ4: u64 = 0x2000;
const FLAG_ZSTD: u64 = 0x8000;
const FLAG_EXACT: u64 = 0x10_0000;
const FLAG_FAMILY: u64 = 0x20_0000;
/// The payload is scrambled, as LTO-IR is.
const FLAG_SCRAMBLED: u64 = 0x1_0000;
/// 64 bits, debug information, the host's system, and a note about capabilities: nothing of it matters here.
const FLAGS_WITHOUT_EFFECT: u64 = 0x1 | 0x2 | 0x10 | 0x20 | 0x40 | 0x100_0000;

/// The GPU code in one section.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuCode {
    /// The section's name, or the segment's number where there are no sections.
    pub section: String,
    /// Who reads it.
    pub role: Role,
    /// Its place in the file.
    pub offset: u64,
    /// Its bytes.
    pub size: u64,
    /// Number of regions.
    pub regions: usize,
    /// Elements of all regions, in order.
    pub elements: Vec<Element>,
}

/// Who reads a section with GPU code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The driver, when the library is loaded or a kernel of it is first used (`.nv_fatbin`).
    Loaded,
    /// A linker of GPU code (`__nv_relfatbin`).
    Relocatable,
    /// The library itself, which picks kernels by the GPU that it finds (`.cask_resource`).
    Resource,
    /// The library itself, which hands it to the driver (any other data).
    Embedded,
}

/// One piece of GPU code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Element {
    /// Place of its header in the file.
    pub offset: u64,
    /// Bytes of its header.
    pub header: u64,
    /// Bytes of its payload, padded.
    pub payload: u64,
    /// Bytes after decompression; 0 where it is not compressed.
    pub uncompressed: u64,
    /// What it is.
    pub kind: Kind,
    /// What it was compiled for.
    pub arch: Arch,
    /// Major and minor of its PTX ISA, or of its ELF layout.
    pub version: (u16, u16),
    /// How it is packed.
    pub compression: Compression,
    /// Whether its payload was zeroed.
    pub is_blank: bool,
    /// Whether it is machine code without any function: a linker leaves one in a library without GPU code of its own.
    pub is_empty: bool,
}

/// Kinds of GPU code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Text that the driver compiles.
    Ptx,
    /// Machine code (SASS) in an ELF file.
    MachineCode,
    /// What nvJitLink makes machine code of.
    LtoIr,
}

/// How a payload is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Compression {
    /// It is not.
    None,
    /// A raw LZ4 block.
    Lz4,
    /// A zstd frame, which drivers read since CUDA 12.4.
    Zstd,
}

impl Role {
    /// Whether the driver loads it as it stands.
    pub fn is_loaded(self) -> bool {
        matches!(self, Self::Loaded | Self::Embedded)
    }
}

impl Element {
    /// Whether a driver can use it for a GPU as it stands, or compile it.
    pub fn runs_on(&self, gpu: ComputeCapability) -> bool {
        match self.kind {
            Kind::Ptx => self.arch.ptx_runs_on(gpu),
            Kind::MachineCode => self.arch.machine_code_runs_on(gpu),
            Kind::LtoIr => false,
        }
    }

    /// Place and size of its payload in the file.
    pub(crate) fn payload_range(&self) -> (u64, u64) {
        (self.offset + self.header, self.payload)
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::Ptx => write!(f, "compute_{}", self.arch),
            Kind::MachineCode => write!(f, "sm_{}", self.arch),
            Kind::LtoIr => write!(f, "lto_{}", self.arch),
        }
    }
}

/// Reads one file's regions, and counts their elements.
struct Reader<'a> {
    name: &'a str,
    bytes: &'a [u8],
    elements: usize,
}

/// Finds all GPU code in a file.
pub(super) fn find(name: &str, bytes: &[u8], layout: &Layout) -> Result<Vec<GpuCode>, Error> {
    let mut reader = Reader { name, bytes, elements: 0 };
    let mut found = Vec::new();
    for section in &layout.sections {
        let role = match section.name.as_str() {
            ".nv_fatbin" => Role::Loaded,
            "__nv_relfatbin" => Role::Relocatable,
            ".cask_resource" => Role::Resource,
            _ if section.is_program_data && section.is_loaded && !section.is_code => Role::Embedded,
            _ => continue,
        };
        found.extend(reader.section(section, role)?);
    }
    if layout.sections.is_empty() {
        for (number, segment) in layout.segments.iter().enumerate() {
            found.extend(reader.among_others(
                &format!("segment {number}"),
                Role::Embedded,
                (segment.offset, segment.size),
            )?);
        }
    }
    Ok(found)
}

impl Reader<'_> {
    fn section(&mut self, section: &Section, role: Role) -> Result<Option<GpuCode>, Error> {
        match role {
            Role::Loaded | Role::Relocatable => self.nothing_else(section, role).map(Some),
            Role::Resource | Role::Embedded => {
                self.among_others(&section.name, role, (section.offset, section.size))
            }
        }
    }

    fn refuse(
        &self,
        offset: u64,
        what: &'static str,
        found: impl fmt::Display,
        needed: &'static str,
    ) -> Error {
        Error::Fatbin { file: self.name.to_owned(), offset, what, found: found.to_string(), needed }
    }

    fn end(&self, (offset, size): (u64, u64)) -> Result<u64, Error> {
        let end = offset.checked_add(size).filter(|end| *end <= self.bytes.len() as u64);
        end.ok_or_else(|| self.refuse(offset, "the section's size", size, "at most what the file holds"))
    }

    /// A section of regions, with zeros between them where a linker aligned them.
    fn nothing_else(&mut self, section: &Section, role: Role) -> Result<GpuCode, Error> {
        let place = (section.offset, section.size);
        let end = self.end(place)?;
        let mut code = new(&section.name, role, place);
        let mut at = section.offset;
        while at < end {
            let rest = self.slice(at, (end - at).min(8)).unwrap_or_default();
            if rest.iter().all(|byte| *byte == 0) {
                at += rest.len().max(1) as u64;
                continue;
            }
            at = self.region(at, end, &mut code)?;
        }
        Ok(code)
    }

    /// Regions among other data, each where its header stands at a multiple of 8.
    fn among_others(&mut self, name: &str, role: Role, place: (u64, u64)) -> Result<Option<GpuCode>, Error> {
        let end = self.end(place)?;
        let mut code = new(name, role, place);
        let mut at = place.0;
        while let Some(data) = self.slice(at, end - at) {
            let Some(hit) = memchr::memmem::find(data, &MAGIC.to_le_bytes()) else {
                break;
            };
            let hit = at + hit as u64;
            at = if self.is_region(hit, end) { self.region(hit, end, &mut code)? } else { hit + 4 };
        }
        Ok((code.regions > 0).then_some(code))
    }

    /// Whether a region begins at a magic number, of whatever version. The number alone may be any data: programs that
    /// read fatbins have it as a constant.
    fn is_region(&self, at: u64, end: u64) -> bool {
        let fields = (self.u16(at + 4), self.u16(at + 6));
        at.is_multiple_of(8)
            && end - at >= REGION_HEADER
            && matches!(fields, (Some(1..=15), Some(header)) if (16..=256).contains(&header) && header % 8 == 0)
    }

    /// Reads the region at `at` and says where it ends.
    fn region(&mut self, at: u64, end: u64, code: &mut GpuCode) -> Result<u64, Error> {
        let magic = self.u32(at).unwrap_or_default();
        if magic != MAGIC {
            return Err(self.refuse(at, "the magic number", format_args!("{magic:#010x}"), "0xba55ed50"));
        }
        if end - at < REGION_HEADER {
            return Err(self.refuse(at, "the rest of the section", end - at, "at least 16 bytes"));
        }
        let version = self.u16(at + 4).unwrap_or_default();
        if version != 1 {
            return Err(self.refuse(at + 4, "the version of fatbins", version, "1"));
        }
        let header = u64::from(self.u16(at + 6).unwrap_or_default());
        if header != REGION_HEADER {
            return Err(self.refuse(at + 6, "the size of a fatbin's header", header, "16"));
        }
        let size = self.u64(at + 8).unwrap_or_default();
        let first = at + header;
        if size > end - first {
            return Err(self.refuse(at + 8, "the size of a fatbin", size, "at most the rest of its section"));
        }
        let region_end = first + size;
        let mut next = first;
        while next < region_end {
            if self.elements == MOST_ELEMENTS {
                let of = "pieces of GPU code";
                return Err(Error::TooMany { file: self.name.to_owned(), of, most: MOST_ELEMENTS });
            }
            self.elements += 1;
            let element = self.element(next, region_end)?;
            next += element.header + element.payload;
            code.elements.push(element);
        }
        code.regions += 1;
        Ok(region_end)
    }

    fn element(&self, at: u64, end: u64) -> Result<Element, Error> {
        if end - at < *ELEMENT_HEADER.start() {
            return Err(self.refuse(at, "the rest of a fatbin", end - at, "at least 64 bytes"));
        }
        // All of the fixed part of the header is inside the file now.
        let u16 = |into: u64| self.u16(at + into).unwrap_or_default();
        let u32 = |into: u64| self.u32(at + into).unwrap_or_default();
        let u64 = |into: u64| self.u64(at + into).unwrap_or_default();
        let kind = match u16(0) {
            1 => Kind::Ptx,
            2 => Kind::MachineCode,
            8 => Kind::LtoIr,
            other => {
                return Err(self.refuse(at, "the kind of GPU code", other, "1 (PTX), 2 (ELF) or 8 (LTO-IR)"));
            }
        };
        if u16(2) != 0x0101 {
            let found = format!("{:#06x}", u16(2));
            return Err(self.refuse(at + 2, "the version of an element", found, "0x0101"));
        }
        let header = u64::from(u32(4));
        if !ELEMENT_HEADER.contains(&header) || !header.is_multiple_of(8) || header > end - at {
            let needed = "a multiple of 8 from 64 to 4096, inside its fatbin";
            return Err(self.refuse(at + 4, "the size of an element's header", header, needed));
        }
        let payload = u64(8);
        if !payload.is_multiple_of(8) || payload > end - at - header {
            let needed = "a multiple of 8, at most the rest of its fatbin";
            return Err(self.refuse(at + 8, "the size of a payload", payload, needed));
        }
        let flags = u64(40);
        let compression = match (flags & FLAG_LZ4 != 0, flags & FLAG_ZSTD != 0) {
            (false, false) => Compression::None,
            (true, false) => Compression::Lz4,
            (false, true) => Compression::Zstd,
            (true, true) => {
                return Err(self.refuse(at + 40, "the compression", "both LZ4 and zstd", "one of them"));
            }
        };
        let variant = match (flags & FLAG_EXACT != 0, flags & FLAG_FAMILY != 0) {
            (false, false) => Variant::Baseline,
            (true, false) => Variant::Exact,
            (false, true) => Variant::Family,
            (true, true) => {
                return Err(self.refuse(at + 40, "the architecture's suffix", "both a and f", "one of them"));
            }
        };
        let known = FLAG_LZ4 | FLAG_ZSTD | FLAG_EXACT | FLAG_FAMILY | FLAG_SCRAMBLED | FLAGS_WITHOUT_EFFECT;
        if flags & !known != 0 {
            let found = format!("{flags:#x}");
            return Err(self.refuse(at + 40, "the flags of an element", found, "within 0x131a073"));
        }
        let compressed = u64::from(u32(16));
        if compressed > payload {
            return Err(self.refuse(
                at + 16,
                "the compressed size",
                compressed,
                "at most the payload's size",
            ));
        }
        let capability = ComputeCapability::from_number(u32(28))
            .ok_or_else(|| self.refuse(at + 28, "the architecture", u32(28), "a number as in sm_90"))?;
        let start = self.slice(at + header, payload.min(8)).unwrap_or_default();
        let is_blank = start.iter().all(|byte| *byte == 0);
        let is_plain = flags & FLAG_SCRAMBLED == 0 && !is_blank;
        if compression == Compression::Zstd && is_plain && !start.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
            let found = format!("{start:02x?}");
            return Err(self.refuse(at + header, "the start of a zstd payload", found, "28 b5 2f fd"));
        }
        Ok(Element {
            offset: at,
            header,
            payload,
            uncompressed: if compression == Compression::None { 0 } else { u64(56) },
            kind,
            arch: Arch { capability, variant },
            version: (u16(26), u16(24)),
            compression,
            is_blank,
            is_empty: kind == Kind::MachineCode
                && compression == Compression::None
                && is_plain
                && memchr::memmem::find(self.slice(at + header, payload).unwrap_or_default(), b".text.")
                    .is_none(),
        })
    }

    fn slice(&self, at: u64, size: u64) -> Option<&[u8]> {
        let start = usize::try_from(at).ok()?;
        self.bytes.get(start..start.checked_add(usize::try_from(size).ok()?)?)
    }

    fn array<const N: usize>(&self, at: u64) -> Option<[u8; N]> {
        self.slice(at, N as u64)?.try_into().ok()
    }

    fn u16(&self, at: u64) -> Option<u16> {
        self.array(at).map(u16::from_le_bytes)
    }

    fn u32(&self, at: u64) -> Option<u32> {
        self.array(at).map(u32::from_le_bytes)
    }

    fn u64(&self, at: u64) -> Option<u64> {
        self.array(at).map(u64::from_le_bytes)
    }
}

fn new(section: &str, role: Role, (offset, size): (u64, u64)) -> GpuCode {
    GpuCode { section: section.to_owned(), role, offset, size, regions: 0, elements: Vec::new() }
}
