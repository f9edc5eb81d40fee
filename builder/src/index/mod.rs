//! Where packages come from: this machine's own pip and apt configuration, or the caller's mirrors.
//!
//! No address of an index is written in this crate. Where nothing is configured, pip is asked for its default, and
//! only when something has to be fetched.

pub(crate) mod apt;
pub(crate) mod deb822;
pub(crate) mod debian;
mod pip;
pub(crate) mod release;
pub(crate) mod simple;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

pub use apt::{AptSource, SignedBy, Trust, parse_list, parse_sources};
pub use pip::{FindLinks, PythonIndexes};
use trainyard_spec::Digest;

use crate::{http, signature};

/// Where packages come from.
#[derive(Debug, Clone, Default)]
pub struct IndexSettings {
    /// Indexes of Python packages.
    pub python: PythonIndexes,
    /// Debian archives.
    pub debian: Vec<AptSource>,
    /// NVIDIA's redistributable archives.
    pub cuda: Option<Redist>,
    /// Folders of locked files by digest, which are looked into first: what [`crate::vendor`] writes, or another cache.
    pub vendored: Vec<PathBuf>,
}

/// A mirror of NVIDIA's redistributable archives: what holds `redistrib_X.Y.Z.json`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Redist {
    /// A folder of this machine.
    Folder(PathBuf),
    /// A server.
    Server(http::Endpoint),
}

impl Redist {
    /// Reads an address or the path of a folder.
    ///
    /// # Errors
    /// When it is neither.
    pub fn parse(text: &str) -> Result<Self, Error> {
        match url::Url::parse(text) {
            Ok(url) if matches!(url.scheme(), "http" | "https") => {
                Ok(Self::Server(http::Endpoint::new(url).folder()))
            }
            _ if Path::new(text).is_absolute() => Ok(Self::Folder(text.into())),
            _ => Err(Error::Configuration {
                place: trainyard_spec::env::CUDA_REDIST.to_owned(),
                message: format!("{text:?} is neither an http address nor the absolute path of a folder"),
            }),
        }
    }

    /// Where a file of it is.
    pub(crate) fn join(&self, name: &str) -> Result<simple::Place, Error> {
        match self {
            Self::Folder(folder) => Ok(simple::Place::Folder(folder.join(name))),
            Self::Server(root) => {
                let bad = |error: &dyn std::fmt::Display| Error::Page {
                    url: root.to_string(),
                    message: format!("{name:?} is no path: {error}"),
                };
                Ok(simple::Place::Server(root.join(name).map_err(|error| bad(&error))?))
            }
        }
    }
}

impl IndexSettings {
    /// Reads pip's variables from `environment`, and pip's and apt's configuration below `root`.
    ///
    /// # Errors
    /// When a file that exists cannot be read or makes no sense.
    pub fn resolve(environment: &BTreeMap<OsString, OsString>, root: &Path) -> Result<Self, Error> {
        let redist = environment.get(&OsString::from(trainyard_spec::env::CUDA_REDIST));
        let redist = redist.map(|text| Redist::parse(&text.to_string_lossy())).transpose()?;
        let python = PythonIndexes::resolve(environment, root)?;
        let vendored = environment.get(&OsString::from(trainyard_spec::env::VENDORED));
        let vendored = vendored.filter(|folder| !folder.is_empty()).map(PathBuf::from).into_iter().collect();
        Ok(Self { python, debian: apt::resolve(root)?, cuda: redist, vendored })
    }
}

/// Why a package could not be found.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nothing says where Python packages come from.
    #[error("no index of Python packages is configured: {asked}")]
    NoPythonIndex {
        /// How pip's default could not be had.
        asked: String,
    },
    /// Nothing says where Debian packages come from.
    #[error("no Debian archive is configured, and {package} is not in the store")]
    NoDebianArchive {
        /// The package or file needed.
        package: String,
    },
    /// A configuration file is unreadable.
    #[error("cannot read {path}: {source}", path = .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A configuration file or variable makes no sense.
    #[error("{place}: {message}")]
    Configuration {
        /// File or variable.
        place: String,
        /// What was found and needed.
        message: String,
    },
    /// No index has the package.
    #[error("{package} {version} was not found in {places}", places = .looked.join(", "))]
    NotFound {
        /// Package, or file.
        package: String,
        /// Version, and what kind of file.
        version: String,
        /// Where it was looked for.
        looked: Vec<String>,
    },
    /// An index offers several files that fit.
    #[error("{package} {version} has several wheels that fit: {files}", files = .files.join(", "))]
    Ambiguous {
        /// Package.
        package: String,
        /// Version.
        version: String,
        /// The files.
        files: Vec<String>,
    },
    /// An index offers other bytes under the locked name.
    #[error("{index} now offers {file} with {found}; locked is {locked}")]
    Changed {
        /// The index.
        index: String,
        /// The file.
        file: String,
        /// What it offers.
        found: Digest,
        /// What is locked.
        locked: Digest,
    },
    /// An index's answer makes no sense.
    #[error("{url} is not a package index's answer: {message}")]
    Page {
        /// The page.
        url: String,
        /// What was found and needed.
        message: String,
    },
    /// An archive is not signed, and has to be.
    #[error("{url} is not signed")]
    Unsigned {
        /// The file that has no signature.
        url: String,
    },
    /// A signature does not count.
    #[error("the signature of {url} does not count: {source} (keys from {keyring})")]
    Signature {
        /// What is signed.
        url: String,
        /// Where the keys are from.
        keyring: String,
        /// Why.
        source: Box<signature::Error>,
    },
    /// An archive's signed file is too old, or from the time to come.
    #[error("{url} {when}")]
    OutOfDate {
        /// The file.
        url: String,
        /// What it says about its time.
        when: String,
    },
    /// A server was needed and may not be asked.
    #[error("{file} is not in the store, and no server may be asked offline")]
    Offline {
        /// The file or package needed.
        file: String,
    },
    /// A server failed.
    #[error(transparent)]
    Http(#[from] http::Error),
}

impl Error {
    /// The way out.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::NoPythonIndex { .. } => Some(
                "set PIP_INDEX_URL to an index's address, write index-url into pip's configuration, or install pip",
            ),
            Self::NoDebianArchive { .. } => {
                Some("give the address of a Debian archive, or use a host whose apt is configured for one")
            }
            Self::NotFound { .. } => Some(
                "check name and version; archives drop superseded versions, so `trainyard lock` may have to choose a newer one",
            ),
            Self::Ambiguous { .. } => Some("take the source archive instead: artifact = \"sdist\""),
            Self::Changed { .. } => Some("find out why the file was replaced before you lock anew"),
            Self::Unsigned { .. } => Some(
                "if you trust the archive and the way to it, say so where apt is configured: trusted=yes",
            ),
            Self::Signature { source, .. } => source.hint(),
            Self::OutOfDate { .. } => Some(
                "check this machine's clock; a mirror that is no longer renewed needs check-valid-until=no in apt's configuration",
            ),
            Self::Offline { .. } => Some("run once without --offline"),
            Self::Http(http::Error::Transport { .. }) => {
                Some("check the network, the proxy and the certificates")
            }
            Self::Read { .. } | Self::Configuration { .. } | Self::Page { .. } | Self::Http(_) => None,
        }
    }

    /// Whether no server has or can be asked for the file, rather than one answering something unwanted.
    pub const fn is_out_of_reach(&self) -> bool {
        match self {
            Self::NoPythonIndex { .. }
            | Self::NoDebianArchive { .. }
            | Self::NotFound { .. }
            | Self::Offline { .. }
            | Self::Http(
                http::Error::Status { .. } | http::Error::Transport { .. } | http::Error::Body { .. },
            ) => true,
            Self::Read { .. }
            | Self::Configuration { .. }
            | Self::Ambiguous { .. }
            | Self::Changed { .. }
            | Self::Page { .. }
            | Self::Unsigned { .. }
            | Self::Signature { .. }
            | Self::OutOfDate { .. }
            | Self::Http(http::Error::TooLarge { .. } | http::Error::Sink { .. }) => false,
        }
    }
}
