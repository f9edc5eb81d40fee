//! The facts of an image that documents about it are written from, kept in the cache beside the image.
//!
//! Left out: anything of the machine that built it, such as paths, times and user names.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha1::{Digest as _, Sha1};
use trainyard_spec::image::ImageManifest;
use trainyard_spec::lock::Lock;
use trainyard_spec::{Digest, FormatVersion};

use super::inventory::Inventory;
use crate::store::{self, Store};
use crate::tree::{self, Tree};

/// Files of which the SHA-1 is remembered: reading smaller ones costs less than looking it up.
const LARGE: u64 = 1 << 20;

/// What an image is made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Facts {
    version: FormatVersion<1>,
    /// The image's digest.
    pub image: Digest,
    /// The version of Trainyard that built it.
    pub builder: String,
    /// The manifest that it was built from.
    pub manifest: ImageManifest,
    /// The manifest's lock.
    pub lock: Lock,
    /// Its packages, and those that are linked into its programs, by an id of their own.
    pub packages: BTreeMap<String, Package>,
    /// Its files by absolute path.
    pub files: BTreeMap<String, File>,
    /// Licences that SPDX has no name for: `LicenseRef-...` and their text.
    pub texts: BTreeMap<String, String>,
    /// Files that were read beside the manifest and lock, by name.
    pub sources: BTreeMap<String, Digest>,
    /// Why another machine would build another image; none where it would not.
    pub not_reproducible: Option<String>,
}

/// What a package is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A Debian package.
    Deb,
    /// A CUDA library.
    Cuda,
    /// A Rust crate that is linked into programs of the image.
    Crate,
    /// Rust's standard library, which is linked into each of them.
    StandardLibrary,
    /// An image that this one is built on.
    Base,
    /// What an input of the manifest brings that is in no package: programs, files, and what was written for it.
    Input,
}

/// A package of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Package {
    /// What it is.
    pub kind: Kind,
    /// Name.
    pub name: String,
    /// Version; none for an input of the manifest.
    pub version: Option<String>,
    /// Its licence as an SPDX expression, where it is known.
    pub licence: Option<String>,
    /// More about the licence.
    pub licence_note: Option<String>,
    /// Package URL.
    pub purl: Option<String>,
    /// Who hands it out: a name, and an address in angle brackets where there is one.
    pub supplier: Option<String>,
    /// Name and version of the Debian source package that it is built from.
    pub source: Option<(String, String)>,
    /// The file that it was taken from.
    pub archive: Option<Archive>,
    /// Ids of packages that it needs.
    pub needs: BTreeSet<String>,
    /// Ids of packages that are linked into its programs.
    pub linked: BTreeSet<String>,
}

/// The file that a package was taken from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Archive {
    /// Its name, without folders.
    pub name: String,
    /// sha256 of its bytes.
    pub sha256: Digest,
}

/// A file of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct File {
    /// sha256 of its bytes.
    pub sha256: Digest,
    /// SHA-1 of its bytes, which SPDX asks for.
    pub sha1: String,
    /// Bytes.
    pub size: u64,
    /// Id of its package.
    pub package: String,
    /// sha256 of what it was before GPU code was cut from it; none where it is as it was.
    pub original: Option<Digest>,
}

/// Why the facts of an image are not to be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// They were never written here, or by another version of Trainyard.
    #[error("what {image} is made of is not known here: {path} is {found}", path = .path.display())]
    Unknown {
        /// The image.
        image: Digest,
        /// Where it would stand.
        path: PathBuf,
        /// What was found there.
        found: String,
    },
    /// They cannot be read or written.
    #[error(transparent)]
    Store(#[from] store::Error),
    /// A file of the image cannot be read.
    #[error("cannot read {path}: {source}", path = .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A document has no canonical form.
    #[error("cannot write the document: {0}")]
    Json(#[from] serde_json::Error),
}

impl Error {
    /// The way out.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Unknown { .. } => Some("build the image here with: trainyard build MANIFEST"),
            Self::Store(error) => error.hint(),
            Self::Read { .. } | Self::Json(_) => None,
        }
    }
}

impl Facts {
    /// The facts of an image that has just been put together.
    pub(crate) fn of(made: Made<'_>, inventory: Inventory, store: &Store) -> Result<Self, Error> {
        let Inventory { mut packages, texts, originals, sources } = inventory;
        let mut files = BTreeMap::new();
        for (path, node, file) in made.tree.files() {
            let Some(owner) = &node.owner else { continue };
            let package = Inventory::owner(owner, &mut packages);
            let path = format!("/{path}");
            let original = originals.get(&path).filter(|original| **original != file.digest).copied();
            let sha1 = sha1(file, store)?;
            files.insert(path, File { sha256: file.digest, sha1, size: file.size, package, original });
        }
        // Of a package that is not needed nothing may be left.
        let present: BTreeSet<String> = files.values().map(|file| file.package.clone()).collect();
        let linked: BTreeSet<String> = packages.values().flat_map(|package| package.linked.clone()).collect();
        packages.retain(|id, package| {
            !matches!(package.kind, Kind::Deb | Kind::Cuda) || present.contains(id) || linked.contains(id)
        });
        let ids: BTreeSet<String> = packages.keys().cloned().collect();
        packages.values_mut().for_each(|package| package.needs.retain(|id| ids.contains(id)));
        Ok(Self {
            version: FormatVersion,
            image: made.image,
            builder: env!("CARGO_PKG_VERSION").to_owned(),
            manifest: made.manifest.clone(),
            lock: made.lock.clone(),
            packages,
            files,
            texts,
            sources,
            not_reproducible: made.not_reproducible,
        })
    }

    /// The facts of an image that was built into this cache.
    ///
    /// # Errors
    /// [`Error::Unknown`] where there are none that this version of Trainyard reads.
    pub fn read(image: &Digest, cache: &Path) -> Result<Self, Error> {
        let path = place(image, cache);
        let unknown = |found: String| Error::Unknown { image: *image, path: path.clone(), found };
        let bytes = std::fs::read(&path).map_err(|error| unknown(format!("not readable: {error}")))?;
        let facts: Self =
            serde_json::from_slice(&bytes).map_err(|error| unknown(format!("of another form: {error}")))?;
        if facts.image == *image { Ok(facts) } else { Err(unknown(format!("about {}", facts.image))) }
    }

    /// Writes them into the cache.
    pub(crate) fn write(&self, cache: &Path) -> Result<(), Error> {
        Ok(store::write_whole(&place(&self.image, cache), &serde_json_canonicalizer::to_vec(self)?)?)
    }

    /// Files of a package, by path.
    pub fn files_of<'a>(&'a self, package: &'a str) -> impl Iterator<Item = (&'a String, &'a File)> {
        self.files.iter().filter(move |(_, file)| file.package == package)
    }
}

/// An image that has been put together.
pub(crate) struct Made<'a> {
    pub(crate) image: Digest,
    pub(crate) manifest: &'a ImageManifest,
    pub(crate) lock: &'a Lock,
    pub(crate) tree: &'a Tree,
    pub(crate) not_reproducible: Option<String>,
}

fn place(image: &Digest, cache: &Path) -> PathBuf {
    cache.join("images").join(format!("{}.facts.json", image.hex()))
}

/// The SHA-1 of a file, from its bytes or as it is remembered for their sha256.
fn sha1(file: &tree::File, store: &Store) -> Result<String, Error> {
    let is_large = file.size >= LARGE;
    let note = store.folder("sha1")?.join(file.digest.hex());
    if is_large
        && let Ok(remembered) = std::fs::read_to_string(&note)
        && remembered.len() == 40
        && remembered.bytes().all(|byte| byte.is_ascii_hexdigit())
    {
        store::used(&note);
        return Ok(remembered);
    }
    let read = |source| Error::Read { path: file.source.clone(), source };
    let mut hasher = Sha1::new();
    let opened = fs_err::File::open(&file.source).map_err(read)?;
    io::copy(&mut io::BufReader::with_capacity(1 << 18, opened), &mut Hashing(&mut hasher)).map_err(read)?;
    let found = hex(&hasher.finalize());
    if is_large {
        store::write_whole(&note, found.as_bytes())?;
    }
    Ok(found)
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

struct Hashing<'a>(&'a mut Sha1);

impl io::Write for Hashing<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
