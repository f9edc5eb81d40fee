//! Images in registries: the client side of the OCI distribution specification, version 1.1.
//!
//! [`Repository::connect`] finds out how a registry is spoken to; the repository is then pushed to, pulled from, and
//! asked what refers to an image. Bytes are moved by digest: what a registry gives is verified before it is used, and
//! what it says of a push is compared with what was pushed.
//!
//! Credentials go to the registry's own host, and to the token server that it names, over TLS; over plain HTTP only to
//! this machine, or where the caller says so. Redirects and uploads to other hosts never carry any. Left out: deleting,
//! listing of tags and catalogues, and manifests of docker's first schema.

mod auth;
mod client;
mod credentials;
mod helper;
mod parallel;
mod pull;
mod push;
mod reference;
mod referrers;
mod signatures;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use trainyard_spec::Digest;
use trainyard_spec::image::Platform;

pub use client::{Options, Repository};
pub use credentials::{CredentialSettings, Error as CredentialError};
pub use pull::Pulled;
pub use push::Pushed;
pub(crate) use reference::is_tag;
pub use reference::{DEFAULT_TAG, Reference, ReferenceError};
pub use referrers::Artifact;
pub use signatures::{Signed, Verified};

use crate::supply::key;
use crate::{http, oci, store};

/// Manifests are small; the specification asks registries to take those of up to this many bytes.
const LARGEST_MANIFEST: u64 = 4 << 20;

/// Why a registry did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The network may not be used.
    #[error("{reference} is in a registry, and the network may not be used")]
    Offline {
        /// What was asked for.
        reference: String,
    },
    /// No answer, or one that broke off.
    #[error(transparent)]
    Http(#[from] http::Error),
    /// The registry answered with an error.
    #[error("{url} answered with status {status}{said}")]
    Refused {
        /// Address, without its query.
        url: String,
        /// HTTP status.
        status: u16,
        /// What it said besides, made printable.
        said: String,
        /// How long it wants to be left alone.
        retry_after: Option<Duration>,
    },
    /// The registry wants credentials that are not there, or does not take those that are.
    #[error("{host} does not let {} have {repository}", if *.shown { "the user whose credentials it was shown" } else { "just anybody" })]
    Unauthorized {
        /// The registry.
        host: String,
        /// The repository.
        repository: String,
        /// Whether it was shown credentials.
        shown: bool,
    },
    /// Credentials could not be had.
    #[error(transparent)]
    Credentials(#[from] CredentialError),
    /// There is a server, and it is no registry.
    #[error("{url} has status {status}; a registry has 200 or 401 there")]
    NoRegistry {
        /// Address.
        url: String,
        /// HTTP status.
        status: u16,
    },
    /// An answer is none of those that the specification knows.
    #[error("{url} answers as no registry does: {message}")]
    Answer {
        /// Address, without its query.
        url: String,
        /// What was found and needed.
        message: String,
    },
    /// The registry sends its clients to a place that they must not go to.
    #[error("{url} refers to {to:?}, {message}")]
    Place {
        /// Address, without its query.
        url: String,
        /// Where it refers to, without the query.
        to: String,
        /// Why that is wrong.
        message: &'static str,
    },
    /// Bytes are not those that were asked for. They were thrown away.
    #[error("{what} is not what it should be: expected {expected}, found {found}")]
    Differs {
        /// What was asked for.
        what: String,
        /// Digest and perhaps size expected.
        expected: String,
        /// Digest and perhaps size found.
        found: String,
    },
    /// An index has no image for a platform.
    #[error("{reference} has no image for {platform}; it has {found}")]
    NoPlatform {
        /// The index.
        reference: String,
        /// What was asked for.
        platform: Platform,
        /// What there is.
        found: String,
    },
    /// The image to push is another than the reference says.
    #[error("the image is {found}, and {reference} names another")]
    OtherImage {
        /// Where it should be pushed to.
        reference: String,
        /// The image's digest.
        found: Digest,
    },
    /// Nobody with the key has signed the image.
    #[error("{reference} is not signed with this key; signatures by others: {others}")]
    NotSigned {
        /// The image.
        reference: String,
        /// Signatures that are not by the key, or not of this image.
        others: usize,
    },
    /// A key cannot sign.
    #[error(transparent)]
    Key(#[from] key::Error),
    /// A document has another form than is needed.
    #[error("{what} cannot be read: {message}")]
    Document {
        /// The document.
        what: String,
        /// What was found and needed.
        message: String,
    },
    /// A file of the layout cannot be read.
    #[error("cannot read {path}: {source}", path = .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The layout is unreadable or damaged.
    #[error(transparent)]
    Layout(#[from] oci::Error),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] store::Error),
}

impl Error {
    /// The way out.
    pub fn hint(&self) -> Option<String> {
        let owned = |text: &str| Some(text.to_owned());
        match self {
            Self::Offline { .. } => owned("leave out --offline"),
            // rustls says so of a server that does not speak TLS at all.
            Self::Http(error) if error.to_string().contains("InvalidContentType") => {
                owned("the server does not speak TLS; if that is intended, say --plain-http")
            }
            Self::Refused { status: 403, .. } => owned(
                "the registry knows who asks, and does not allow it; ask its owner, or log in as somebody else",
            ),
            Self::Refused { status: 404, .. } => {
                owned("see whether the name is right, and whether it is there")
            }
            Self::Refused { status: 429, .. } => owned("the registry wants fewer requests; try again later"),
            Self::Unauthorized { host, shown, .. } => Some(if *shown {
                format!("see whether the name is right, or log in again with: podman login {host}")
            } else {
                format!("log in with: podman login {host}")
            }),
            Self::NoRegistry { .. } => owned("see whether host and port are those of a registry"),
            Self::Credentials(error) => error.hint(),
            Self::Place { .. } => {
                owned("tell the registry's owner; --plain-http allows addresses without TLS")
            }
            Self::Differs { .. } => {
                owned("the registry, or something on the way, is broken or hostile; try again")
            }
            Self::NoPlatform { .. } => {
                owned("push an image for this platform, or name another one by its digest")
            }
            Self::NotSigned { .. } => {
                owned("name the public key of who should have signed it, or sign it with: trainyard sign")
            }
            Self::Key(error) => error.hint().map(str::to_owned),
            Self::OtherImage { .. } => owned("leave out the digest, or push the image that it names"),
            Self::Store(error) | Self::Layout(oci::Error::Store(error)) => error.hint().map(str::to_owned),
            Self::Http(_)
            | Self::Refused { .. }
            | Self::Answer { .. }
            | Self::Document { .. }
            | Self::Read { .. }
            | Self::Layout(_) => None,
        }
    }

    /// The least time after which it makes sense to try again, where it does.
    fn passes(&self) -> Option<Duration> {
        match self {
            Self::Http(error) => error.passes(),
            Self::Refused { status, retry_after, .. } => {
                http::status_passes(*status).then(|| retry_after.unwrap_or_default())
            }
            _ => None,
        }
    }

    const fn status(&self) -> Option<u16> {
        match self {
            Self::Refused { status, .. } => Some(*status),
            _ => None,
        }
    }
}
