//! Headers of an ELF file as plain values, whatever its class and byte order.

use object::elf::{self, FileType};
use object::read::elf::{FileHeader, ProgramHeader, SectionHeader};
use object::{Endianness, read};

use super::{Error, LONGEST_NAME, damaged};

/// Most sections, and most segments.
const MOST_HEADERS: usize = 1 << 17;

/// Longest name of a section that is kept, with its end.
const LONGEST_SECTION_NAME: u64 = 64;

/// Where things are in an ELF file.
#[derive(Debug)]
pub(crate) struct Layout {
    pub(crate) bits: u8,
    pub(crate) little_endian: bool,
    pub(super) machine: u16,
    pub(super) kind: FileType,
    pub(super) interpreter: Option<String>,
    /// Whether the bytes that are loaded are in another file.
    pub(super) is_debug_information: bool,
    pub(crate) segments: Vec<Segment>,
    pub(crate) sections: Vec<Section>,
    /// The dynamic table's place in the file, and the size of its entries' words.
    pub(super) dynamic: Option<(u64, u64)>,
}

/// A part of the file that is loaded.
#[derive(Debug)]
pub(crate) struct Segment {
    pub(crate) offset: u64,
    pub(super) address: u64,
    pub(crate) size: u64,
}

/// A section that has bytes in the file.
#[derive(Debug, Clone)]
pub(crate) struct Section {
    pub(crate) name: String,
    pub(crate) offset: u64,
    pub(crate) size: u64,
    pub(super) align: u64,
    /// Whether it is there when the program runs.
    pub(crate) is_loaded: bool,
    pub(super) is_code: bool,
    pub(super) is_program_data: bool,
    pub(super) is_dynamic_symbols: bool,
    /// Number of the section that names are in.
    pub(super) link: u32,
    /// Place in the file of the size in its header, where the file has 64 bits.
    pub(crate) size_offset: u64,
    /// Its number.
    pub(super) index: u32,
}

impl Section {
    /// Its bytes; `None` where it reaches beyond the file.
    pub(crate) fn bytes<'a>(&self, file: &'a [u8]) -> Option<&'a [u8]> {
        let start = usize::try_from(self.offset).ok()?;
        file.get(start..start.checked_add(usize::try_from(self.size).ok()?)?)
    }
}

impl Layout {
    pub(crate) fn section(&self, name: &str) -> Option<&Section> {
        self.sections.iter().find(|section| section.name == name)
    }

    /// Where the byte at `address` lies in the file, if that is where the file says.
    pub(super) fn offset(&self, address: u64) -> Option<u64> {
        let segment = self
            .segments
            .iter()
            .find(|segment| address.checked_sub(segment.address).is_some_and(|into| into < segment.size))?;
        segment.offset.checked_add(address - segment.address)
    }
}

pub(super) fn read<H>(name: &str, bytes: &[u8]) -> Result<Layout, Error>
where
    H: FileHeader<Endian = Endianness>,
{
    let fault = |error: read::Error| damaged(name, error.to_string());
    let header = H::parse(bytes).map_err(fault)?;
    let endian = header.endian().map_err(fault)?;
    let programs = header.program_headers(endian, bytes).map_err(fault)?;
    let too_many = |of| Error::TooMany { file: name.to_owned(), of, most: MOST_HEADERS };
    if programs.len() > MOST_HEADERS {
        return Err(too_many("segments"));
    }
    let table = header.section_headers(endian, bytes).map_err(fault)?;
    if table.len() > MOST_HEADERS {
        return Err(too_many("sections"));
    }
    // A program's code has bytes in its own file, whatever else has none.
    let is_absent = |section: &H::SectionHeader| {
        section.sh_type(endian) == elf::SHT_NOBITS && section.sh_flags(endian).contains(elf::SHF_EXECINSTR)
    };
    let is_debug_information = table.iter().any(is_absent);
    let mut segments = Vec::new();
    let mut dynamic = None;
    let mut interpreter = None;
    for program in programs.iter().filter(|_| !is_debug_information) {
        let (offset, size) = program.file_range(endian);
        match program.p_type(endian) {
            elf::PT_LOAD => {
                segments.push(Segment { offset, address: program.p_vaddr(endian).into(), size });
            }
            elf::PT_DYNAMIC => dynamic = Some((offset, size)),
            elf::PT_INTERP if interpreter.is_none() => {
                let fault = || damaged(name, "the path of its loader is no text of at most 4095 bytes");
                let path = text(bytes, offset, size.min(LONGEST_NAME as u64)).ok_or_else(fault)?;
                interpreter = Some(String::from_utf8(path.to_vec()).map_err(|_| fault())?);
            }
            _ => {}
        }
    }
    let names = match table {
        [] => None,
        _ => table.get(header.shstrndx(endian, bytes).map_err(fault)? as usize),
    };
    let names = names.and_then(|section| section.file_range(endian));
    let first: u64 = header.e_shoff(endian).into();
    let entry = u64::from(header.e_shentsize(endian));
    let mut sections = Vec::new();
    for (index, section) in table.iter().enumerate() {
        let Some((offset, size)) = section.file_range(endian) else {
            continue;
        };
        // A name that is cut off or missing is none that is looked for.
        let at = u64::from(section.sh_name(endian));
        let found = names.and_then(|(start, size)| {
            let left = size.checked_sub(at)?.min(LONGEST_SECTION_NAME);
            text(bytes, start.checked_add(at)?, left)
        });
        let flags = section.sh_flags(endian);
        let kind = section.sh_type(endian);
        let number = u64::try_from(index).unwrap_or(u64::MAX);
        let size_offset = number.checked_mul(entry).and_then(|at| at.checked_add(first)?.checked_add(32));
        sections.push(Section {
            name: String::from_utf8_lossy(found.unwrap_or_default()).into_owned(),
            offset,
            size,
            align: section.sh_addralign(endian).into(),
            is_loaded: flags.contains(elf::SHF_ALLOC),
            is_code: flags.contains(elf::SHF_EXECINSTR),
            is_program_data: kind == elf::SHT_PROGBITS,
            is_dynamic_symbols: kind == elf::SHT_DYNSYM,
            link: section.sh_link(endian),
            size_offset: size_offset.ok_or_else(|| damaged(name, "its section headers reach too far"))?,
            index: u32::try_from(index).unwrap_or(u32::MAX),
        });
    }
    // Sections do not share bytes, and segments no more than a page here and there. Where many do, the file was made to
    // be read over and over.
    let most = (bytes.len() as u64).saturating_mul(2).saturating_add(1 << 20);
    for total in [
        total(sections.iter().map(|section| section.size)),
        total(segments.iter().map(|segment| segment.size)),
    ] {
        if total > most {
            return Err(damaged(name, format!("its parts have {total} bytes, more than the file")));
        }
    }
    Ok(Layout {
        bits: if header.is_type_64() { 64 } else { 32 },
        little_endian: header.is_little_endian(),
        machine: header.e_machine(endian).0,
        kind: header.e_type(endian),
        interpreter,
        is_debug_information,
        segments,
        sections,
        dynamic,
    })
}

fn total(sizes: impl Iterator<Item = u64>) -> u64 {
    sizes.fold(0, u64::saturating_add)
}

/// The text of at most `size` bytes, with the zero that ends it, at `offset`.
fn text(bytes: &[u8], offset: u64, size: u64) -> Option<&[u8]> {
    let start = usize::try_from(offset).ok()?;
    let rest = bytes.get(start..start.checked_add(usize::try_from(size).ok()?)?)?;
    Some(&rest[..rest.iter().position(|byte| *byte == 0)?])
}
