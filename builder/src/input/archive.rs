//! Reading archives of packages: source archives (`.tar.gz`), wheels (zip) and Debian packages (ar, tar).
//!
//! Files are visited one after the other in a bounded stream; nothing is written, linked or run. An archive with a path
//! or a link that leads out of it, with two entries of one path, with a device, or with more in it than the limits
//! allow, is refused whole.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Component, Path, PathBuf};

use flate2::read::MultiGzDecoder;
use tar::EntryType;

/// What an archive may hold at most.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Entries.
    pub entries: usize,
    /// Bytes of everything in it, unpacked.
    pub bytes: u64,
}

impl Default for Limits {
    /// More than any package in use has.
    fn default() -> Self {
        Self { entries: 1_000_000, bytes: 16 << 30 }
    }
}

/// Kinds of archives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A tar archive in gzip.
    TarGz,
    /// A zip archive.
    Zip,
    /// A Debian package, of which the files to install are read.
    Deb,
}

/// Why an archive could not be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is damaged, or of another kind.
    #[error("{archive} cannot be read: {source}", archive = .archive.display())]
    Unreadable {
        /// The archive.
        archive: PathBuf,
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

/// Is given each file's clean relative path and body.
pub type Visit<'a> = &'a mut dyn FnMut(&str, &mut dyn Read) -> io::Result<()>;

/// Visits every regular file of an archive.
///
/// # Errors
/// When the archive is unreadable, hostile or over the limits, or `visit` fails.
pub fn visit(path: &Path, kind: Kind, limits: Limits, visit: Visit<'_>) -> Result<(), Error> {
    let unreadable = |source| Error::Unreadable { archive: path.to_owned(), source };
    let file = BufReader::with_capacity(1 << 16, File::open(path).map_err(unreadable)?);
    let mut reading = Reading { archive: path, limits, paths: BTreeSet::new(), entries: 0, visit };
    match kind {
        Kind::TarGz => reading.tar(&mut MultiGzDecoder::new(file), false),
        Kind::Zip => reading.zip(file),
        Kind::Deb => reading.deb(file),
    }
}

struct Reading<'a> {
    archive: &'a Path,
    limits: Limits,
    paths: BTreeSet<String>,
    entries: usize,
    visit: Visit<'a>,
}

impl Reading<'_> {
    fn unreadable(&self, source: io::Error) -> Error {
        // The budget's reader has no other way to say that it has run out.
        if source.get_ref().is_some_and(|inner| inner.is::<Spent>()) {
            return self.too_much(format!("{} bytes", self.limits.bytes));
        }
        Error::Unreadable { archive: self.archive.to_owned(), source }
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
        Ok(clean)
    }

    fn give(&mut self, path: &str, body: &mut dyn Read) -> Result<(), Error> {
        let mut watched = Watched { inner: body, failed: false };
        match (self.visit)(path, &mut watched) {
            Ok(()) => Ok(()),
            Err(source) if watched.failed => Err(self.unreadable(source)),
            Err(source) => {
                Err(Error::Visit { archive: self.archive.to_owned(), path: path.to_owned(), source })
            }
        }
    }

    /// `absolute_links`: whether a link's absolute target is one inside the archive, as it is in Debian packages.
    fn tar(&mut self, tar: &mut dyn Read, absolute_links: bool) -> Result<(), Error> {
        let mut archive = tar::Archive::new(Budget { inner: tar, left: self.limits.bytes });
        for entry in archive.entries().map_err(|error| self.unreadable(error))? {
            let mut entry = entry.map_err(|error| self.unreadable(error))?;
            let kind = entry.header().entry_type();
            let raw = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
            if kind == EntryType::XGlobalHeader {
                continue;
            }
            let path = self.enter(&raw, kind.is_dir())?;
            let link = || {
                let target = entry.link_name_bytes();
                target.map(|target| String::from_utf8_lossy(&target).into_owned()).unwrap_or_default()
            };
            match kind {
                EntryType::Directory => {}
                EntryType::Regular | EntryType::Continuous => self.give(&path, &mut entry)?,
                EntryType::Symlink => {
                    if !stays_inside(&path, &link(), absolute_links) {
                        return Err(self.hostile(&raw, "a link that leads out of it"));
                    }
                }
                EntryType::Link => {
                    if !clean(&link()).is_some_and(|target| self.paths.contains(&target)) {
                        return Err(self.hostile(&raw, "a hard link to no file before it"));
                    }
                }
                _ => return Err(self.hostile(&raw, "which is neither a folder nor a file nor a link")),
            }
        }
        Ok(())
    }

    fn zip(&mut self, file: BufReader<File>) -> Result<(), Error> {
        let broken = |error: zip::result::ZipError| io::Error::new(io::ErrorKind::InvalidData, error);
        let mut archive = zip::ZipArchive::new(file).map_err(|error| self.unreadable(broken(error)))?;
        if archive.has_duplicate_names() {
            return Err(self.hostile("", "entries that share a path"));
        }
        let mut left = self.limits.bytes;
        for index in 0..archive.len() {
            let mut entry = archive.by_index(index).map_err(|error| self.unreadable(broken(error)))?;
            let raw = String::from_utf8_lossy(entry.name_raw()).into_owned();
            let path = self.enter(&raw, entry.is_dir())?;
            if entry.is_dir() {
                continue;
            }
            if entry.is_symlink() {
                let mut target = String::new();
                let read = Read::by_ref(&mut entry).take(4096).read_to_string(&mut target);
                read.map_err(|error| self.unreadable(error))?;
                if !stays_inside(&path, &target, false) {
                    return Err(self.hostile(&raw, "a link that leads out of it"));
                }
                continue;
            }
            let mut body = Budget { inner: &mut entry, left };
            self.give(&path, &mut body)?;
            // A visitor need not read to the end, but what it skips has to be whole too.
            io::copy(&mut body, &mut io::sink()).map_err(|error| self.unreadable(error))?;
            left = body.left;
        }
        Ok(())
    }

    fn deb(&mut self, file: BufReader<File>) -> Result<(), Error> {
        let invalid = |message: &str| io::Error::new(io::ErrorKind::InvalidData, message.to_owned());
        let mut archive = ar::Archive::new(file);
        let mut first = true;
        while let Some(member) = archive.next_entry() {
            let mut member = member.map_err(|error| self.unreadable(error))?;
            let name = String::from_utf8_lossy(member.header().identifier()).trim_end_matches('/').to_owned();
            if first {
                first = false;
                let mut version = String::new();
                let read = Read::by_ref(&mut member).take(16).read_to_string(&mut version);
                read.map_err(|error| self.unreadable(error))?;
                if name != "debian-binary" || !version.starts_with("2.") {
                    return Err(self.unreadable(invalid("it is no Debian package of format 2")));
                }
                continue;
            }
            match name.as_str() {
                "data.tar" => return self.tar(&mut member, true),
                "data.tar.gz" => return self.tar(&mut MultiGzDecoder::new(member), true),
                "data.tar.xz" => return self.tar(&mut lzma_rust2::XzReader::new(member, true), true),
                "data.tar.zst" => {
                    let mut unpacked = ruzstd::decoding::StreamingDecoder::new(member)
                        .map_err(|error| self.unreadable(io::Error::other(error.to_string())))?;
                    return self.tar(&mut unpacked, true);
                }
                other if other.starts_with("data.tar") => {
                    return Err(
                        self.unreadable(invalid("its files are packed in a way that is not known here"))
                    );
                }
                _ => {}
            }
        }
        Err(self.unreadable(invalid("it holds no data.tar")))
    }
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

/// A budget has been spent.
#[derive(Debug, thiserror::Error)]
#[error("there is more in it than the limit allows")]
struct Spent;

/// Fails once more than a number of bytes have been read.
struct Budget<R> {
    inner: R,
    left: u64,
}

impl<R: Read> Read for Budget<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.left = self.left.checked_sub(read as u64).ok_or_else(|| io::Error::other(Spent))?;
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
