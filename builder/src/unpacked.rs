//! Packages unpacked once: what each entry of a package is, with the bodies of its files as blobs of the store.
//!
//! Two packages with the same file share its blob. A package is a function of its bytes, so what was found is remembered by
//! its digest. Deliberately left out: where the entries go in an image.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};
use trainyard_spec::{Digest, FormatVersion};

use crate::input::archive::{self, EntryKind, Limits};
use crate::store::{self, Store};
use crate::tree::{self, Kind, Meta};

/// An entry of a package.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Entry {
    mode: u32,
    uid: u32,
    gid: u32,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    xattrs: BTreeMap<String, Vec<u8>>,
    pub(crate) what: What,
}

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "kebab-case", deny_unknown_fields)]
pub(crate) enum What {
    /// A folder.
    Folder,
    /// A file whose body is in the store.
    File {
        /// Digest of the body.
        digest: Digest,
        /// Its bytes.
        size: u64,
    },
    /// A symbolic link.
    Symlink {
        /// What it says.
        target: String,
    },
    /// Another path of a file of this package.
    HardLink {
        /// The path under which the package has the body.
        target: String,
    },
}

impl Entry {
    /// Root's, without anything that is rarely there.
    pub(crate) const fn plain(mode: u32, what: What) -> Self {
        Self { mode, uid: 0, gid: 0, xattrs: BTreeMap::new(), what }
    }

    /// Digest of its body, where it has one of its own.
    const fn body(&self) -> Option<&Digest> {
        match &self.what {
            What::File { digest, .. } => Some(digest),
            What::Folder | What::Symlink { .. } | What::HardLink { .. } => None,
        }
    }

    /// Who may do what with it.
    fn meta(&self) -> Meta {
        Meta { mode: self.mode, uid: self.uid, gid: self.gid, xattrs: self.xattrs.clone() }
    }
}

/// A package's entries by clean relative path.
pub(crate) type Entries = BTreeMap<String, Entry>;

/// What is remembered of a package.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Remembered {
    version: FormatVersion<1>,
    entries: Entries,
}

/// The entries of a verified package file, all bodies in the store. Bodies are read where `wanted` says so; other files
/// are left out, as if the package had none there.
///
/// # Errors
/// When the archive is unreadable, hostile or over the limits, or the store cannot be written.
pub(crate) fn unpack(
    path: &Path,
    package: &Digest,
    kind: archive::Kind,
    store: &Store,
    wanted: &Wanted<'_>,
) -> Result<Entries, Error> {
    let key = Digest::of(format!("{package} {}", wanted.name).as_bytes());
    let note = store.folder("packages")?.join(format!("{}.json", key.hex()));
    let remembered = std::fs::read(&note).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
    if let Some(Remembered { entries, .. }) = remembered
        && entries.values().all(|entry| is_there(entry, store))
    {
        store::used(&note);
        entries.values().filter_map(Entry::body).for_each(|body| store::used(&store.path(body)));
        return Ok(entries);
    }
    let mut entries = Entries::new();
    // The visitor's own way to fail is an error of reading.
    let mut failed = None;
    let visited = archive::visit(path, kind, Limits::default(), &mut |entry, body| {
        let what = match &entry.kind {
            EntryKind::File if !(wanted.files)(&entry.path) => return Ok(()),
            EntryKind::HardLink(target) if !entries.contains_key(target) => return Ok(()),
            EntryKind::Folder if entry.path.is_empty() => return Ok(()),
            EntryKind::Folder => What::Folder,
            EntryKind::Symlink(target) => What::Symlink { target: target.clone() },
            EntryKind::HardLink(target) => What::HardLink { target: target.clone() },
            EntryKind::File => {
                let mut keep = || {
                    let mut incoming = store.incoming()?;
                    io::copy(body, &mut incoming).map_err(store::io_error("unpack to", incoming.path()))?;
                    store.keep(incoming)
                };
                match keep() {
                    Ok((digest, size)) => What::File { digest, size },
                    Err(error) => {
                        failed = Some(error);
                        return Err(io::Error::other("the store failed"));
                    }
                }
            }
        };
        let (mode, uid, gid, xattrs) = (entry.mode, entry.uid, entry.gid, entry.xattrs.clone());
        entries.insert(entry.path.clone(), Entry { mode, uid, gid, xattrs, what });
        Ok(())
    });
    match (failed, visited) {
        (Some(error), _) => return Err(error.into()),
        (None, visited) => visited?,
    }
    let remembered = Remembered { version: FormatVersion, entries };
    // Text, numbers and digests alone, which are always JSON.
    let json = serde_json::to_vec(&remembered).unwrap_or_default();
    store::write_whole(&note, &json)?;
    Ok(remembered.entries)
}

/// Which files of a package are wanted.
pub(crate) struct Wanted<'a> {
    /// Stands for the choice in what is remembered.
    pub(crate) name: &'a str,
    /// Whether a file is wanted, by its path.
    pub(crate) files: &'a dyn Fn(&str) -> bool,
}

/// All of them.
pub(crate) const ALL: Wanted<'static> = Wanted { name: "all", files: &|_| true };

/// What a tree has in the place of each entry, its body in the store. `whose` names the package among others.
pub(crate) fn nodes<'a>(
    entries: &'a Entries,
    whose: &str,
    store: &Store,
) -> impl Iterator<Item = (&'a str, Meta, Kind)> {
    // Paths of one body: all that are hard links to it, and its own.
    let target = |entry: &'a Entry| match &entry.what {
        What::HardLink { target } => Some(target.as_str()),
        _ => None,
    };
    let linked: BTreeSet<&str> = entries.values().filter_map(target).collect();
    let body = move |path: &str| match entries.get(path).map(|entry| &entry.what) {
        Some(What::File { digest, size }) => Some(tree::File {
            source: store.path(digest),
            digest: *digest,
            size: *size,
            hard_link: linked.contains(path).then(|| format!("{whose} {path}")),
        }),
        _ => None,
    };
    entries.iter().filter_map(move |(path, entry)| {
        let kind = match &entry.what {
            What::Folder => Kind::Folder,
            What::Symlink { target } => Kind::Symlink(target.clone()),
            What::File { .. } => Kind::File(body(path)?),
            What::HardLink { target } => match entries.get(target).map(|entry| &entry.what) {
                // A link to a link: it says the same.
                Some(What::Symlink { target }) => Kind::Symlink(target.clone()),
                _ => Kind::File(body(target)?),
            },
        };
        Some((path.as_str(), entry.meta(), kind))
    })
}

/// Bytes are verified when they are put into a layer.
fn is_there(entry: &Entry, store: &Store) -> bool {
    match entry.what {
        What::File { digest, size } => {
            std::fs::metadata(store.path(&digest)).is_ok_and(|found| found.len() == size)
        }
        What::Folder | What::Symlink { .. } | What::HardLink { .. } => true,
    }
}

/// Why a package cannot be unpacked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is no archive of its kind, or a hostile one.
    #[error(transparent)]
    Archive(#[from] archive::Error),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] store::Error),
}
