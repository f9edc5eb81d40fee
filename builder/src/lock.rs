//! Making and reading locks: every input of a manifest pinned by sha256, in a file beside it.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use trainyard_spec::corpus::CorpusManifest;
use trainyard_spec::image::{ImageManifest, Platform};
use trainyard_spec::input::Input;
use trainyard_spec::lock::Lock;
use trainyard_spec::{Digest, Faults, FormatVersion, Name, toml};

use crate::input::cuda::Asked;
use crate::input::{self, cargo, cuda, deb, oci, python};
use crate::manifest;
use crate::progress::{Event, Progress};
use crate::settings::Settings;
use crate::store::{self, Store};

/// Why there is no lock to use.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The manifest or lock cannot be read, or is wrong.
    #[error(transparent)]
    Manifest(#[from] manifest::Error),
    /// The manifest has no lock.
    #[error("{manifest} is not locked: there is no {lock}", manifest = .manifest.display(), lock = .lock.display())]
    Missing {
        /// The manifest.
        manifest: PathBuf,
        /// Where its lock would be.
        lock: PathBuf,
    },
    /// The manifest's inputs have changed since it was locked.
    #[error("{lock} was made from other inputs than {manifest} has now", manifest = .manifest.display(), lock = .lock.display())]
    Stale {
        /// The manifest.
        manifest: PathBuf,
        /// Its lock.
        lock: PathBuf,
    },
    /// An input could not be resolved.
    #[error("input {input}: {source}")]
    Input {
        /// The input.
        input: Name,
        /// Why.
        source: Box<input::Error>,
    },
    /// The toolchain could not be resolved.
    #[error("input {input}: {source}")]
    Toolchain {
        /// The input.
        input: Name,
        /// Why.
        source: Box<cargo::Error>,
    },
    /// The lock or the store cannot be written.
    #[error(transparent)]
    Write(#[from] store::Error),
}

impl Error {
    /// The way out.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Missing { manifest, .. } | Self::Stale { manifest, .. } => {
                Some(format!("trainyard lock {}", manifest.display()))
            }
            Self::Input { source, .. } => source.hint(),
            Self::Toolchain { source, .. } => source.hint(),
            Self::Write(error) => error.hint().map(str::to_owned),
            Self::Manifest(_) => None,
        }
    }
}

/// Where the lock of a manifest is.
pub fn path(manifest: &Path) -> PathBuf {
    manifest.with_extension("lock")
}

/// Reads the lock of a manifest with these inputs.
///
/// # Errors
/// When there is none, it is wrong, or it was made from other inputs.
pub fn read(manifest: &Path, inputs: &BTreeMap<Name, Input>) -> Result<Lock, Error> {
    let path = path(manifest);
    let lock: Lock = match manifest::read(&path) {
        Err(manifest::Error::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return Err(Error::Missing { manifest: manifest.to_owned(), lock: path });
        }
        lock => lock?,
    };
    if lock.manifest != digest(inputs) {
        return Err(Error::Stale { manifest: manifest.to_owned(), lock: path });
    }
    Ok(lock)
}

/// Resolves every input of an image or corpus manifest and writes the lock beside it. The old lock stays as it is
/// until the new one is whole.
///
/// # Errors
/// When the manifest is wrong, an input cannot be resolved, or the lock cannot be written.
pub fn lock(manifest: &Path, settings: &Settings, progress: Progress<'_>) -> Result<Lock, Error> {
    let (inputs, platform) = inputs(manifest)?;
    let store = Store::new(&settings.cache);
    let _in_use = store.in_use()?;
    store.sweep()?;
    let folder = manifest.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut locked = BTreeMap::new();
    let debian = OnceCell::new();
    for (name, input) in &inputs {
        progress(Event::Resolving { input: name.clone() });
        let failed = |error| Error::Input { input: name.clone(), source: Box::new(error) };
        let pinned = match input {
            Input::Python { package, version, artifact } => {
                python::resolve(package, version, *artifact, platform, &store, settings, progress)
                    .map_err(failed)?
            }
            Input::Deb { packages, dependencies } => {
                // Only images have packages of a distribution, and images have a platform.
                let platform = platform.unwrap_or(Platform::Amd64);
                let asked = deb::Asked { packages, dependencies: *dependencies, platform };
                deb::resolve(&asked, &debian, &store, settings, progress).map_err(failed)?
            }
            Input::Cuda { version, libraries, from, nccl } => {
                let asked = Asked { version, libraries, from: *from, nccl: nccl.as_deref() };
                let platform = platform.unwrap_or(Platform::Amd64);
                cuda::resolve(&asked, platform, &store, settings, progress).map_err(failed)?
            }
            Input::Oci { image } => {
                let platform = platform.unwrap_or(Platform::Amd64);
                oci::resolve(image, folder, platform, settings, progress).map_err(failed)?
            }
            // They are beside the manifest, as the sources of a cargo input are.
            Input::Files { .. } => continue,
            Input::Cargo { workspace, .. } => cargo::resolve(&folder.join(workspace), &settings.tools)
                .map_err(|error| Error::Toolchain { input: name.clone(), source: Box::new(error) })?,
        };
        locked.insert(name.clone(), pinned);
    }
    let lock = Lock { version: FormatVersion, manifest: digest(&inputs), input: locked };
    let text = format!("# Written by `trainyard lock`; not for editing.\n{}", toml::write(&lock));
    store::write_whole(&path(manifest), text.as_bytes())?;
    Ok(lock)
}

/// The inputs of a manifest, whichever kind it is, and the platform where it has one.
///
/// # Errors
/// When it cannot be read, or is neither kind.
pub(crate) fn inputs(manifest: &Path) -> Result<(BTreeMap<Name, Input>, Option<Platform>), Error> {
    Ok(parse(manifest, &manifest::text(manifest)?).map_err(manifest::Error::from)?)
}

fn parse(path: &Path, text: &str) -> Result<(BTreeMap<Name, Input>, Option<Platform>), Faults> {
    let name = path.display().to_string();
    let as_image = match toml::read::<ImageManifest>(&name, text) {
        Ok(image) => return Ok((image.input, Some(image.platform))),
        Err(faults) => faults,
    };
    match toml::read::<CorpusManifest>(&name, text) {
        Ok(corpus) => Ok((corpus.input, None)),
        // It is meant to be the one that it is nearer to.
        Err(as_corpus) if as_corpus.faults.len() < as_image.faults.len() => Err(as_corpus),
        Err(_) => Err(as_image),
    }
}

/// The digest of inputs that a lock remembers: of their canonical JSON, so that comments and order do not count.
fn digest(inputs: &BTreeMap<Name, Input>) -> Digest {
    // Strings, lists and tables alone: nothing in them can fail to be JSON.
    let json = serde_json_canonicalizer::to_vec(inputs).unwrap_or_default();
    Digest::of(&json)
}
