//! The crates of a workspace that come from cargo's registry, as files: pinned by its `Cargo.lock`, verified, and given to
//! cargo as a folder in the registry's place.
//!
//! cargo itself looks at every file of such a folder when it compiles it. Crates from git repositories, which have no file
//! that is pinned by a digest, and from other registries are refused.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;
use trainyard_spec::Digest;
use trainyard_spec::lock::LockedFile;
use trainyard_spec::toml::{Collector, Validate};

use super::archive::{self, Kind, Limits};
use super::fetch::{Access, fetch};
use super::{Error as InputError, cargo};
use crate::http::Client;
use crate::index::simple::Place;
use crate::manifest;
use crate::progress::{Event, Progress};
use crate::settings::Settings;
use crate::store::{self, Store, digest_of};

type Tools = BTreeMap<OsString, OsString>;

/// Why crates could not be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The workspace's lock file cannot be read.
    #[error(transparent)]
    Lock(#[from] manifest::Error),
    /// A crate comes from elsewhere, or is not pinned by the digest of its file.
    #[error("{path}: {name} {version} comes from {source_name:?}; needed is cargo's own registry, and a sha256", path = .path.display())]
    Source {
        /// The workspace's lock file.
        path: PathBuf,
        /// The crate.
        name: String,
        /// Its version.
        version: String,
        /// Where it comes from.
        source_name: String,
    },
    /// cargo has not kept the file of a crate.
    #[error("cargo has no {file} below {folder}", folder = .folder.display())]
    Absent {
        /// The file.
        file: String,
        /// Where cargo keeps such files.
        folder: PathBuf,
    },
    /// cargo failed.
    #[error(transparent)]
    Cargo(#[from] Box<cargo::Error>),
    /// A file could not be had, kept or read.
    #[error(transparent)]
    Input(#[from] Box<InputError>),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] store::Error),
}

impl Error {
    /// The way out.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Source { .. } => Some(
                "vendor this workspace with `cargo vendor`, and point cargo's own configuration to that"
                    .to_owned(),
            ),
            Self::Absent { .. } => Some(
                "cargo's own configuration may replace registries by folders; run this where it does not"
                    .to_owned(),
            ),
            Self::Cargo(error) => error.hint(),
            Self::Input(error) => error.hint(),
            Self::Store(error) => error.hint().map(str::to_owned),
            Self::Lock(_) => None,
        }
    }
}

/// A workspace's `Cargo.lock`, as far as it matters here.
#[derive(Debug, toml_spanner::Toml)]
#[toml(FromToml, ignore_unknown_fields)]
struct CargoLock {
    #[toml(default)]
    package: Vec<Package>,
}

#[derive(Debug, toml_spanner::Toml)]
#[toml(FromToml, ignore_unknown_fields)]
struct Package {
    name: String,
    version: String,
    source: Option<String>,
    checksum: Option<String>,
}

impl Validate for CargoLock {
    fn validate(&self, _: &mut Collector<'_, '_>) {}
}

/// The crates of a workspace that come from cargo's registry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Crates {
    /// Digest of each crate's file, by the file's name.
    pub(crate) files: BTreeMap<String, Digest>,
}

impl Crates {
    /// Those that a workspace's lock file names, for every platform and purpose: cargo wants to see them all.
    pub(crate) fn of(workspace: &Path) -> Result<Self, Error> {
        let path = workspace.join("Cargo.lock");
        let lock: CargoLock = manifest::read(&path)?;
        let mut files = BTreeMap::new();
        for Package { name, version, source, checksum } in lock.package {
            // A member of the workspace.
            let Some(source) = source else { continue };
            let is_registry = source.starts_with("registry+") && source.ends_with(REGISTRY);
            let digest = checksum.and_then(|hex| Digest::from_hex(&hex).ok());
            let file = format!("{name}-{version}.crate");
            let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.+".contains(&byte);
            match digest.filter(|_| is_registry && file.bytes().all(plain)) {
                Some(digest) => files.insert(file, digest),
                None => return Err(Error::Source { path, name, version, source_name: source }),
            };
        }
        Ok(Self { files })
    }

    /// Sees that every crate's file is in the store, and gives them with their sizes. What no vendored folder has, cargo
    /// is asked for.
    pub(crate) fn fetch(
        &self,
        workspace: &Path,
        store: &Store,
        settings: &Settings,
        progress: Progress<'_>,
    ) -> Result<Vec<LockedFile>, Error> {
        let mut fetched = Vec::new();
        let mut asked = false;
        for (name, digest) in &self.files {
            let path = match vendored(digest, store, settings) {
                Some(path) => path,
                None => {
                    if !asked {
                        cargo::fetch(workspace, settings).map_err(Box::new)?;
                        asked = true;
                    }
                    in_cargo_home(name, &settings.tools)?
                }
            };
            fetched.push(take(name, *digest, path, store, settings, progress)?);
        }
        Ok(fetched)
    }

    /// All crates from vendored folders, as a folder that cargo reads in its registry's place; none where a crate is not
    /// there.
    pub(crate) fn unpack(
        &self,
        store: &Store,
        settings: &Settings,
        progress: Progress<'_>,
    ) -> Result<Option<CrateFolder>, Error> {
        let found: Option<Vec<_>> = self
            .files
            .iter()
            .map(|(name, digest)| Some((name, digest, vendored(digest, store, settings)?)))
            .collect();
        let Some(found) = found.filter(|_| !settings.index.vendored.is_empty()) else { return Ok(None) };
        let mut key = format!("{FORMAT}\n");
        for (name, digest) in &self.files {
            key += &format!("{name} {digest}\n");
        }
        let key = Digest::of(key.as_bytes());
        let folder = store.folder("crates")?.join(key.hex());
        let _only_one = store.lock(&format!("crates-{}", key.short()))?;
        if folder.is_dir() {
            store::used(&folder);
            return Ok(Some(CrateFolder { folder }));
        }
        let staging = store.staging()?;
        for (name, digest, path) in found {
            let file = take(name, *digest, path, store, settings, progress)?;
            progress(Event::Unpacking { file: file.name });
            let stem = name.strip_suffix(".crate").unwrap_or(name);
            unpack(&store.path(digest), digest, &staging.path().join(stem))
                .map_err(|error| Box::new(InputError::from(error)))?;
        }
        staging.install(&folder)?;
        Ok(Some(CrateFolder { folder }))
    }
}

/// A folder of unpacked crates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CrateFolder {
    /// Where it is.
    pub(crate) folder: PathBuf,
}

impl CrateFolder {
    /// Options by which cargo takes crates from the folder, whatever its own configuration says.
    pub(crate) fn options(&self) -> Vec<String> {
        // A JSON string is one of TOML.
        let folder = serde_json::Value::from(self.folder.display().to_string());
        [
            format!("source.{REPLACEMENT}.directory={folder}"),
            format!("source.crates-io.replace-with=\"{REPLACEMENT}\""),
        ]
        .into_iter()
        .flat_map(|setting| ["--config".to_owned(), setting])
        .collect()
    }
}

/// How the address of cargo's own registry ends in a lock file.
const REGISTRY: &str = "/crates.io-index";
/// Name of the folder in cargo's configuration.
const REPLACEMENT: &str = "trainyard-vendored";
/// Changes when crates are unpacked in another way.
const FORMAT: &str = "crates 1";

/// What cargo wants beside a crate's files: digests by path.
#[derive(Serialize)]
struct Checksums {
    files: BTreeMap<String, String>,
    package: String,
}

/// Unpacks the verified file of a crate, which holds one folder of the crate's name, to `folder`.
fn unpack(path: &Path, digest: &Digest, folder: &Path) -> Result<(), archive::Error> {
    let mut files = BTreeMap::new();
    archive::visit_files(path, Kind::Tar, Limits::default(), &mut |inside, body| {
        let Some((_, inside)) = inside.split_once('/') else { return Ok(()) };
        let target = folder.join(inside);
        if let Some(parent) = target.parent() {
            fs_err::create_dir_all(parent)?;
        }
        let mut file = fs_err::File::create_new(&target)?;
        io::copy(body, &mut file)?;
        let (found, _) = digest_of(fs_err::File::open(&target)?)?;
        files.insert(inside.to_owned(), found.hex());
        Ok(())
    })?;
    let checksums = Checksums { files, package: digest.hex() };
    let written = serde_json::to_vec(&checksums).map_err(io::Error::from).and_then(|json| {
        fs_err::create_dir_all(folder)?;
        fs_err::write(folder.join(".cargo-checksum.json"), json)
    });
    written.map_err(|source| archive::Error::Unreadable { archive: path.to_owned(), at: None, source })
}

/// The file of a crate in the store or a vendored folder.
fn vendored(digest: &Digest, store: &Store, settings: &Settings) -> Option<PathBuf> {
    let folders = settings.index.vendored.iter().map(|folder| Store::new(folder).path(digest));
    std::iter::once(store.path(digest)).chain(folders).find(|path| path.is_file())
}

/// The file that cargo has kept of a crate.
fn in_cargo_home(name: &str, tools: &Tools) -> Result<PathBuf, Error> {
    let folder = cargo::home(tools).join("registry/cache");
    let registries = fs_err::read_dir(&folder).into_iter().flatten().filter_map(Result::ok);
    let mut found: Vec<_> =
        registries.map(|registry| registry.path().join(name)).filter(|path| path.is_file()).collect();
    found.sort();
    found.into_iter().next().ok_or_else(|| Error::Absent { file: name.to_owned(), folder })
}

/// Takes the file of a crate into the store.
fn take(
    name: &str,
    sha256: Digest,
    path: PathBuf,
    store: &Store,
    settings: &Settings,
    progress: Progress<'_>,
) -> Result<LockedFile, Error> {
    let size = fs_err::metadata(&path).map_err(store::io_error("read the size of", &path))?.len();
    let file = LockedFile { name: name.to_owned(), size, sha256 };
    // All these places are on this machine.
    let access = Access { offline: false, ..Access::of(settings, progress) };
    let places = |_: &Client| Ok::<_, InputError>(vec![Place::Folder(path)]);
    fetch(&file, store, places, &access).map_err(Box::new)?;
    Ok(file)
}
