//! The dynamic table: what the loader is asked for, and which symbol versions are needed and given.
//!
//! It is found through program headers, as the loader does, so that a file without sections reads the same.

use std::collections::{BTreeMap, BTreeSet};

use object::elf;

use super::{Error, LONGEST_NAME, Layout, MOST_ENTRIES, damaged};

/// What a file asks the loader for, and what it gives to others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Needs {
    /// The name that others ask for it by.
    pub soname: Option<String>,
    /// Libraries that it cannot do without, in order.
    pub libraries: Vec<String>,
    /// Folders to search before `LD_LIBRARY_PATH`, as written (`DT_RPATH`).
    pub rpath: Option<String>,
    /// Folders to search after `LD_LIBRARY_PATH`, as written (`DT_RUNPATH`).
    pub runpath: Option<String>,
    /// Symbol versions that it needs, such as `GLIBC_2.27`, by library.
    pub versions: BTreeMap<String, BTreeSet<String>>,
    /// Symbol versions that it gives.
    pub defined: BTreeSet<String>,
    pub(super) is_position_independent_program: bool,
}

/// A file's bytes with its byte order and word size.
struct Words<'a> {
    name: &'a str,
    bytes: &'a [u8],
    little_endian: bool,
    is_64: bool,
}

impl<'a> Words<'a> {
    fn array<const N: usize>(&self, offset: u64) -> Option<[u8; N]> {
        let start = usize::try_from(offset).ok()?;
        let mut word: [u8; N] = self.bytes.get(start..start.checked_add(N)?)?.try_into().ok()?;
        if !self.little_endian {
            word.reverse();
        }
        Some(word)
    }

    fn half(&self, offset: u64) -> Result<u16, Error> {
        self.array(offset).map(u16::from_le_bytes).ok_or_else(|| self.short())
    }

    fn word(&self, offset: u64) -> Result<u32, Error> {
        self.array(offset).map(u32::from_le_bytes).ok_or_else(|| self.short())
    }

    fn address(&self, offset: u64) -> Result<u64, Error> {
        if self.is_64 {
            self.array(offset).map(u64::from_le_bytes).ok_or_else(|| self.short())
        } else {
            self.word(offset).map(u64::from)
        }
    }

    fn short(&self) -> Error {
        damaged(self.name, "a table of it reaches beyond the file")
    }

    fn string(&self, table: Option<(u64, u64)>, at: u64) -> Result<String, Error> {
        let bytes = table.and_then(|(start, size)| {
            let first = usize::try_from(start.checked_add(at)?).ok()?;
            let end = usize::try_from(start.checked_add(size)?).ok()?;
            let rest = self.bytes.get(first..end)?;
            let rest = &rest[..rest.len().min(LONGEST_NAME + 1)];
            Some(&rest[..rest.iter().position(|byte| *byte == 0)?])
        });
        let bytes = bytes.ok_or_else(|| {
            damaged(
                self.name,
                format!("a name in its dynamic table does not end within {LONGEST_NAME} bytes"),
            )
        })?;
        let text = std::str::from_utf8(bytes)
            .map_err(|_| damaged(self.name, "a name in its dynamic table is not UTF-8 text"))?;
        Ok(text.to_owned())
    }
}

pub(super) fn read(name: &str, bytes: &[u8], layout: &Layout) -> Result<Needs, Error> {
    let words = Words { name, bytes, little_endian: layout.little_endian, is_64: layout.bits == 64 };
    let mut needs = Needs::default();
    let Some((table, size)) = layout.dynamic else {
        return Ok(needs);
    };
    let word = u64::from(layout.bits / 8);
    let mut entries: Vec<(i64, u64)> = Vec::new();
    for index in 0..size / (2 * word) {
        if entries.len() == MOST_ENTRIES {
            return Err(too_many(name, "entries in its dynamic table"));
        }
        let at = table.checked_add(index * 2 * word).ok_or_else(|| words.short())?;
        let value_at = at.checked_add(word).ok_or_else(|| words.short())?;
        let tag = words.address(at)?.cast_signed();
        if tag == elf::DT_NULL.0 {
            break;
        }
        entries.push((tag, words.address(value_at)?));
    }
    let value =
        |tag: elf::DynamicTag| entries.iter().find(|(found, _)| *found == tag.0).map(|(_, value)| *value);
    let strings = value(elf::DT_STRTAB).and_then(|address| layout.offset(address)).zip(value(elf::DT_STRSZ));
    let string = |tag| value(tag).map(|at| words.string(strings, at)).transpose();
    needs.soname = string(elf::DT_SONAME)?;
    needs.rpath = string(elf::DT_RPATH)?;
    needs.runpath = string(elf::DT_RUNPATH)?;
    for (tag, at) in &entries {
        if *tag == elf::DT_NEEDED.0 {
            needs.libraries.push(words.string(strings, *at)?);
        }
    }
    needs.is_position_independent_program =
        value(elf::DT_FLAGS_1).is_some_and(|flags| flags & elf::DF_1_PIE.0 != 0);
    let start = |tag| {
        let inside = |offset: &u64| *offset < bytes.len() as u64;
        let found =
            value(tag).map(|address| layout.offset(address).filter(inside).ok_or_else(|| words.short()));
        found.transpose()
    };
    if let Some(offset) = start(elf::DT_VERNEED)? {
        needs.versions = needed(&words, strings, offset, value(elf::DT_VERNEEDNUM).unwrap_or(0))?;
    }
    if let Some(offset) = start(elf::DT_VERDEF)? {
        needs.defined = defined(&words, strings, offset, value(elf::DT_VERDEFNUM).unwrap_or(0))?;
    }
    Ok(needs)
}

fn too_many(name: &str, of: &'static str) -> Error {
    Error::TooMany { file: name.to_owned(), of, most: MOST_ENTRIES }
}

/// `Verneed` entries, each with its `Vernaux` entries; both are the same in both classes.
fn needed(
    words: &Words<'_>,
    strings: Option<(u64, u64)>,
    start: u64,
    count: u64,
) -> Result<BTreeMap<String, BTreeSet<String>>, Error> {
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut seen = 0;
    let mut at = start;
    for _ in 0..count {
        let library = words.string(strings, words.word(at + 4)?.into())?;
        let versions = found.entry(library).or_default();
        let mut one = at + u64::from(words.word(at + 8)?);
        for _ in 0..words.half(at + 2)? {
            seen += 1;
            if seen > MOST_ENTRIES {
                return Err(too_many(words.name, "symbol versions"));
            }
            versions.insert(words.string(strings, words.word(one + 8)?.into())?);
            match words.word(one + 12)? {
                0 => break,
                next => one += u64::from(next),
            }
        }
        seen += 1;
        match words.word(at + 12)? {
            0 => break,
            next => at += u64::from(next),
        }
        if seen > MOST_ENTRIES {
            return Err(too_many(words.name, "symbol versions"));
        }
    }
    Ok(found)
}

/// `Verdef` entries, of which the first auxiliary entry is the version's name. The base version names the file itself.
fn defined(
    words: &Words<'_>,
    strings: Option<(u64, u64)>,
    start: u64,
    count: u64,
) -> Result<BTreeSet<String>, Error> {
    let mut found = BTreeSet::new();
    let mut at = start;
    for seen in 0..count {
        if seen > MOST_ENTRIES as u64 {
            return Err(too_many(words.name, "symbol versions"));
        }
        let is_base = words.half(at + 2)? & elf::VER_FLG_BASE.0 != 0;
        if !is_base && words.half(at + 6)? > 0 {
            let name = at + u64::from(words.word(at + 12)?);
            found.insert(words.string(strings, words.word(name)?.into())?);
        }
        match words.word(at + 16)? {
            0 => break,
            next => at += u64::from(next),
        }
    }
    Ok(found)
}
