//! Reading archives of packages: tar archives, wheels (zip) and Debian packages (ar, tar).
//!
//! Entries are visited one after the other in a bounded stream; nothing is written, linked or run. An archive with a path
//! or a link that leads out of it, with two entries of one path, with a device, or with more in it than the limits
//! allow, is refused whole.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Component, Path, PathBuf};

use tar::EntryType;

use crate::decompress::decompress;

/// Most bytes of what a tar archive says about one entry: long names and extended headers are read into memory.
const DESCRIPTION_LIMIT: u64 = 1 << 20;

/// What an archive may hold at most.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Entries.
    pub entries: usize,
    /// Bytes of one file, unpacked.
    pub file_bytes: u64,
    /// Bytes of everything in it, unpacked.
    pub bytes: u64,
}

impl Default for Limits {
    /// More than any package in use has.
    fn default() -> Self {
        Self { entries: 1_000_000, file_bytes: 8 << 30, bytes: 16 << 30 }
    }
}

/// Kinds of archives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A tar archive, compressed in gzip, xz, zstd or not at all.
    Tar,
    /// A layer of an image: as [`Kind::Tar`], with links that may be absolute.
    Layer,
    /// A zip archive.
    Zip,
    /// A Debian package, of which the files to install are read.
    Deb,
    /// A Debian package, of which what it says about itself is read.
    DebControl,
}

/// Why an archive could not be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is damaged, or of another kind.
    #[error("{archive} cannot be read{at}: {source}", archive = .archive.display(), at = At(.at.as_deref()))]
    Unreadable {
        /// The archive.
        archive: PathBuf,
        /// The last entry that was reached.
        at: Option<String>,
        /// What went wrong.
        source: io::Error,
    },
    /// An entry would do harm.
    #[error("{archive} holds {path:?}, {problem}; nothing of it is used", archive = .archive.display())]
    Hostile {
        /// The archive.
        archive: PathBuf,
        /// The path as it stands there.
        path: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// It holds too much.
    #[error("{archive} holds more than {limit}; nothing of it is used", archive = .archive.display())]
    TooMuch {
        /// The archive.
        archive: PathBuf,
        /// The limit.
        limit: String,
    },
    /// What was read could not be kept.
    #[error("{path} in {archive} could not be unpacked: {source}", archive = .archive.display())]
    Visit {
        /// The archive.
        archive: PathBuf,
        /// The file in it.
        path: String,
        /// What went wrong.
        source: io::Error,
    },
}

/// Shows the last entry that was reached, if any was.
struct At<'a>(Option<&'a str>);

impl std::fmt::Display for At<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.map_or(Ok(()), |at| write!(f, " at {at:?}"))
    }
}

/// An entry of an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Clean path, relative to the archive's root.
    pub path: String,
    /// What it is.
    pub kind: EntryKind,
    /// Permission bits. An archive that says none has those of a plain file or folder.
    pub mode: u32,
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Extended attributes.
    pub xattrs: BTreeMap<String, Vec<u8>>,
}

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EntryKind {
    /// A folder.
    Folder,
    /// A file, whose body the visitor is given.
    File,
    /// A symbolic link, and what it says.
    Symlink(String),
    /// Another path of a file that came before.
    HardLink(String),
}

/// Is given each entry, and the body where it is a file.
pub type Visit<'a> = &'a mut dyn FnMut(&Entry, &mut dyn Read) -> io::Result<()>;

/// Visits every regular file of an archive, with its path.
///
/// # Errors
/// As [`visit`].
pub fn visit_files(
    path: &Path,
    kind: Kind,
    limits: Limits,
    look: &mut dyn FnMut(&str, &mut dyn Read) -> io::Result<()>,
) -> Result<(), Error> {
    visit(path, kind, limits, &mut |entry, body| match entry.kind {
        EntryKind::File => look(&entry.path, body),
        _ => Ok(()),
    })
}

/// Visits every entry of an archive.
///
/// # Errors
/// When the archive is unreadable, hostile or over the limits, or `visit` fails.
pub fn visit(path: &Path, kind: Kind, limits: Limits, visit: Visit<'_>) -> Result<(), Error> {
    let file = File::open(path).map_err(|source| Error::Unreadable {
        archive: path.to_owned(),
        at: None,
        source,
    })?;
    let file = BufReader::with_capacity(1 << 16, file);
    let left =
        Left { all: Cell::new(limits.bytes), part: Cell::new(0), part_is: Cell::new(Spent::Description) };
    let mut reading =
        Reading { archive: path, limits, left: &left, paths: BTreeSet::new(), entries: 0, at: None, visit };
    match kind {
        Kind::Tar | Kind::Layer => {
            let mut unpacked = decompress(file).map_err(|error| reading.unreadable(error))?;
            reading.tar(&mut unpacked, kind == Kind::Layer)
        }
        Kind::Zip => reading.zip(file),
        Kind::Deb => reading.deb(file, "data.tar"),
        Kind::DebControl => reading.deb(file, "control.tar"),
    }
}

struct Reading<'a> {
    archive: &'a Path,
    limits: Limits,
    left: &'a Left,
    paths: BTreeSet<String>,
    entries: usize,
    at: Option<String>,
    visit: Visit<'a>,
}

impl Reading<'_> {
    fn unreadable(&self, source: io::Error) -> Error {
        // The budget's reader has no other way to say that it has run out.
        match source.get_ref().and_then(|inner| inner.downcast_ref::<Spent>()) {
            Some(Spent::All) => self.too_much(format!("{} bytes", self.limits.bytes)),
            Some(Spent::Description) => {
                self.too_much(format!("{DESCRIPTION_LIMIT} bytes to describe one entry"))
            }
            Some(Spent::File) => {
                let at = self.at.as_deref().unwrap_or_default();
                self.too_much(format!("{} bytes in {at:?}", self.limits.file_bytes))
            }
            None => Error::Unreadable { archive: self.archive.to_owned(), at: self.at.clone(), source },
        }
    }

    fn too_much(&self, limit: String) -> Error {
        Error::TooMuch { archive: self.archive.to_owned(), limit }
    }

    fn hostile(&self, path: &str, problem: &'static str) -> Error {
        Error::Hostile { archive: self.archive.to_owned(), path: path.to_owned(), problem }
    }

    /// Takes note of an entry, and gives its clean path.
    fn enter(&mut self, path: &str, is_folder: bool) -> Result<String, Error> {
        self.entries += 1;
        if self.entries > self.limits.entries {
            return Err(self.too_much(format!("{} entries", self.limits.entries)));
        }
        let clean = clean(path).ok_or_else(|| self.hostile(path, "which leads out of it"))?;
        // Folders may be listed more than once: nothing depends on which comes last.
        if !is_folder && !self.paths.insert(clean.clone()) {
            return Err(self.hostile(path, "twice"));
        }
        self.at = Some(clean.clone());
        Ok(clean)
    }

    fn give(&mut self, entry: &Entry, body: &mut dyn Read) -> Result<(), Error> {
        let path = &entry.path;
        self.left.begin(Spent::File, self.limits.file_bytes);
        let mut watched = Watched { inner: body, failed: false };
        let visited = (self.visit)(entry, &mut watched);
        match visited {
            // A visitor need not read to the end, but what it skips has to be whole too.
            Ok(()) => io::copy(body, &mut io::sink()).map(drop).map_err(|error| self.unreadable(error)),
            Err(source) if watched.failed => Err(self.unreadable(source)),
            Err(source) => Err(Error::Visit { archive: self.archive.to_owned(), path: path.clone(), source }),
        }
    }

    /// `absolute_links`: whether a link's absolute target is one inside the archive, as it is in Debian packages.
    fn tar(&mut self, tar: &mut dyn Read, absolute_links: bool) -> Result<(), Error> {
        let left = self.left;
        let mut archive = tar::Archive::new(Budget { inner: tar, left });
        let mut entries = archive.entries().map_err(|error| self.unreadable(error))?;
        loop {
            left.begin(Spent::Description, DESCRIPTION_LIMIT);
            let Some(entry) = entries.next() else { break };
            let mut entry = entry.map_err(|error| self.unreadable(error))?;
            let kind = entry.header().entry_type();
            let raw = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
            if kind == EntryType::XGlobalHeader {
                continue;
            }
            let path = self.enter(&raw, kind.is_dir())?;
            let target = entry.link_name_bytes();
            let target =
                target.map(|target| String::from_utf8_lossy(&target).into_owned()).unwrap_or_default();
            let kind = match kind {
                EntryType::Directory => EntryKind::Folder,
                EntryType::Regular | EntryType::Continuous => EntryKind::File,
                EntryType::Symlink if stays_inside(&path, &target, absolute_links) => {
                    EntryKind::Symlink(target)
                }
                EntryType::Symlink => return Err(self.hostile(&raw, "a link that leads out of it")),
                EntryType::Link => match clean(&target).filter(|target| self.paths.contains(target)) {
                    Some(target) => EntryKind::HardLink(target),
                    None => return Err(self.hostile(&raw, "a hard link to no file before it")),
                },
                _ => return Err(self.hostile(&raw, "which is neither a folder nor a file nor a link")),
            };
            let described = described(entry.header());
            let (mode, uid, gid) = described.map_err(|error| self.unreadable(error))?;
            let xattrs = xattrs(&mut entry).map_err(|error| self.unreadable(error))?;
            self.give(&Entry { path, kind, mode: mode & 0o7777, uid, gid, xattrs }, &mut entry)?;
        }
        // Checksums come last, behind the end of the tar archive.
        left.begin(Spent::File, self.limits.file_bytes);
        io::copy(&mut archive.into_inner(), &mut io::sink()).map_err(|error| self.unreadable(error))?;
        Ok(())
    }

    fn zip(&mut self, file: BufReader<File>) -> Result<(), Error> {
        let broken = |error: zip::result::ZipError| io::Error::new(io::ErrorKind::InvalidData, error);
        let mut archive = zip::ZipArchive::new(file).map_err(|error| self.unreadable(broken(error)))?;
        if archive.has_duplicate_names() {
            return Err(self.hostile("*", "a path that it has twice"));
        }
        for index in 0..archive.len() {
            let mut entry = archive.by_index(index).map_err(|error| self.unreadable(broken(error)))?;
            let raw = String::from_utf8_lossy(entry.name_raw()).into_owned();
            let path = self.enter(&raw, entry.is_dir())?;
            let mode =
                entry.unix_mode().map_or(if entry.is_dir() { 0o755 } else { 0o644 }, |mode| mode & 0o7777);
            let kind = if entry.is_dir() {
                EntryKind::Folder
            } else if entry.is_symlink() {
                let mut target = String::new();
                let read = Read::by_ref(&mut entry).take(4096).read_to_string(&mut target);
                read.map_err(|error| self.unreadable(error))?;
                if !stays_inside(&path, &target, false) {
                    return Err(self.hostile(&raw, "a link that leads out of it"));
                }
                EntryKind::Symlink(target)
            } else {
                EntryKind::File
            };
            let described = Entry { path, kind, mode, uid: 0, gid: 0, xattrs: BTreeMap::new() };
            let mut body = Budget { inner: &mut entry, left: self.left };
            self.give(&described, &mut body)?;
        }
        Ok(())
    }

    /// A package is an ar archive of the plainest form, with every member's name whole in its header (deb(5)). Readers
    /// of all forms of ar take offsets and sizes of tables from the archive, which this one therefore has no use for.
    fn deb(&mut self, mut file: BufReader<File>, wanted: &str) -> Result<(), Error> {
        let invalid = |message: &str| io::Error::new(io::ErrorKind::InvalidData, message.to_owned());
        let mut magic = [0; 8];
        file.read_exact(&mut magic).map_err(|error| self.unreadable(error))?;
        if magic != *b"!<arch>\n" {
            return Err(self.unreadable(invalid("it is no Debian package")));
        }
        let mut is_first = true;
        loop {
            let mut header = [0; 60];
            match file.read_exact(&mut header) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    return Err(self.unreadable(invalid(&format!("it holds no {wanted}"))));
                }
                Err(error) => return Err(self.unreadable(error)),
            }
            let field = |range| std::str::from_utf8(&header[range]).unwrap_or("").trim_end();
            let name = field(0..16).trim_end_matches('/').to_owned();
            let size: u64 = field(48..58)
                .parse()
                .map_err(|_| self.unreadable(invalid("the size of a member is no number")))?;
            let mut member = file.by_ref().take(size);
            if is_first {
                is_first = false;
                let mut version = Vec::new();
                let read = Read::by_ref(&mut member).take(16).read_to_end(&mut version);
                read.map_err(|error| self.unreadable(error))?;
                if name != "debian-binary" || !version.starts_with(b"2.") {
                    return Err(self.unreadable(invalid("it is no Debian package of format 2")));
                }
            }
            if let Some(packed) = name.strip_prefix(wanted) {
                self.data(packed, &mut member)?;
                return match member.limit() {
                    0 => Ok(()),
                    _ => {
                        let message = format!("its {wanted} is shorter or longer than it says");
                        Err(self.unreadable(invalid(&message)))
                    }
                };
            }
            // Members start at even offsets.
            let skipped = member.limit() + size % 2;
            io::copy(&mut file.by_ref().take(skipped), &mut io::sink())
                .map_err(|error| self.unreadable(error))?;
        }
    }

    /// A tar archive of a package, packed as the end of its name says.
    fn data(&mut self, packed: &str, member: &mut dyn Read) -> Result<(), Error> {
        if !["", ".gz", ".xz", ".zst"].contains(&packed) {
            let source = io::Error::other("its files are packed in a way that is not known here");
            return Err(self.unreadable(source));
        }
        let mut unpacked = decompress(BufReader::new(member)).map_err(|error| self.unreadable(error))?;
        self.tar(&mut unpacked, true)
    }
}

/// Mode, user id and group id. Ids that a header leaves blank are root's.
fn described(header: &tar::Header) -> io::Result<(u32, u32, u32)> {
    let old = header.as_old();
    let id = |field: &[u8], value: io::Result<u64>| {
        if field.iter().all(|byte| matches!(byte, 0 | b' ')) {
            return Ok(0);
        }
        value.and_then(|id| u32::try_from(id).map_err(io::Error::other))
    };
    Ok((header.mode()?, id(&old.uid, header.uid())?, id(&old.gid, header.gid())?))
}

/// Extended attributes in the form in which GNU tar, star and bsdtar write them.
fn xattrs(entry: &mut tar::Entry<'_, impl Read>) -> io::Result<BTreeMap<String, Vec<u8>>> {
    let mut found = BTreeMap::new();
    for extension in entry.pax_extensions()?.into_iter().flatten() {
        let extension = extension?;
        if let Some(name) = extension.key().ok().and_then(|key| key.strip_prefix("SCHILY.xattr.")) {
            found.insert(name.to_owned(), extension.value_bytes().to_vec());
        }
    }
    Ok(found)
}

/// The path without `.` and a leading `./`; none when it is absolute or empty, or has `..` or a NUL.
fn clean(path: &str) -> Option<String> {
    let mut parts = Vec::new();
    for part in Path::new(path).components() {
        match part {
            Component::Normal(part) => parts.push(part.to_str()?),
            Component::CurDir => {}
            Component::RootDir | Component::ParentDir | Component::Prefix(_) => return None,
        }
    }
    let is_root = parts.is_empty() && matches!(path, "." | "./");
    ((!parts.is_empty() || is_root) && !path.contains('\0')).then(|| parts.join("/"))
}

/// Whether a link at `path` leads to something inside the archive.
fn stays_inside(path: &str, target: &str, absolute_links: bool) -> bool {
    let mut depth = path.matches('/').count();
    if target.is_empty() || target.contains('\0') {
        return false;
    }
    for part in Path::new(target).components() {
        match part {
            Component::RootDir if absolute_links => depth = 0,
            Component::RootDir | Component::Prefix(_) => return false,
            Component::CurDir => {}
            Component::Normal(_) => depth += 1,
            Component::ParentDir => match depth.checked_sub(1) {
                Some(up) => depth = up,
                None => return false,
            },
        }
    }
    true
}

/// Which budget has been spent.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("there is more in it than the limit allows")]
enum Spent {
    All,
    File,
    Description,
}

/// Bytes that may still be read: of the whole archive, and of the part of it that is being read.
struct Left {
    all: Cell<u64>,
    part: Cell<u64>,
    part_is: Cell<Spent>,
}

impl Left {
    fn begin(&self, part: Spent, bytes: u64) {
        self.part_is.set(part);
        self.part.set(bytes);
    }
}

/// Fails once more has been read than is left.
struct Budget<'a, R> {
    inner: R,
    left: &'a Left,
}

impl<R: Read> Read for Budget<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        for (left, spent) in [(&self.left.part, self.left.part_is.get()), (&self.left.all, Spent::All)] {
            let rest = left.get().checked_sub(read as u64).ok_or_else(|| io::Error::other(spent))?;
            left.set(rest);
        }
        Ok(read)
    }
}

/// Remembers whether reading failed, to tell an archive's fault from its visitor's.
struct Watched<'a> {
    inner: &'a mut dyn Read,
    failed: bool,
}

impl Read for Watched<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.inner.read(buffer).inspect_err(|error| self.failed = error.kind() != io::ErrorKind::Interrupted)
    }
}

#[cfg(test)]
mod tests {
    use super::{clean, stays_inside};

    #[test]
    fn paths_stay_inside() {
        for (path, expect) in [
            ("a/b", Some("a/b")),
            ("./a//b/.", Some("a/b")),
            ("./", Some("")),
            ("", None),
            ("/a", None),
            ("a/../b", None),
            ("..", None),
            ("a\0b", None),
        ] {
            assert_eq!(clean(path).as_deref(), expect, "{path:?}");
        }
    }

    #[test]
    fn links_stay_inside() {
        for (path, target, of_root, inside) in [
            ("a/b", "c", false, true),
            ("a/b", "../c", false, true),
            ("a/b", "../../c", false, false),
            ("a/b", "x/../../../c", false, false),
            ("a/b", "/c", false, false),
            ("a/b", "/c", true, true),
            ("a/b", "/../c", true, false),
            ("a", "", false, false),
        ] {
            assert_eq!(stays_inside(path, target, of_root), inside, "{path} -> {target}");
        }
    }
}
