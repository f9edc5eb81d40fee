//! Inputs: how each kind is resolved to a lock, fetched, and read without running anything in it.

pub mod archive;
pub mod cargo;
pub mod crates;
pub(crate) mod cuda;
pub(crate) mod deb;
mod fetch;
pub mod link;
pub(crate) mod oci;
pub(crate) mod python;

use std::path::Path;

use trainyard_spec::image::Platform;
use trainyard_spec::input::Input;
use trainyard_spec::lock::{LockedCuda, LockedDeb, LockedFile, LockedInput};

use crate::index;
use crate::oci as layout;
use crate::progress::Progress;
use crate::registry;
use crate::settings::Settings;
use crate::store::{self, Store};
use crate::unpacked;

/// Why an input could not be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It could not be found or fetched.
    #[error(transparent)]
    Index(#[from] index::Error),
    /// It could not be kept, or is not what was locked.
    #[error(transparent)]
    Store(#[from] store::Error),
    /// It is no archive of its kind, or a hostile one.
    #[error(transparent)]
    Archive(#[from] archive::Error),
    /// An image in a registry could not be had.
    #[error(transparent)]
    Registry(#[from] Box<registry::Error>),
    /// An image in a folder is unreadable or damaged.
    #[error(transparent)]
    Layout(#[from] layout::Error),
    /// A base image is named in a way that cannot be understood.
    #[error(transparent)]
    Reference(#[from] registry::ReferenceError),
    /// A base image is not the locked one.
    #[error("the base image {image} is {found} now; locked is {locked}")]
    BaseDiffers {
        /// The image.
        image: String,
        /// Digest found.
        found: trainyard_spec::Digest,
        /// Digest locked.
        locked: trainyard_spec::Digest,
    },
    /// A base image has a layer that cannot stay as it is.
    #[error("layer {digest} of the base image {image} is {media_type:?}; known are gzip and zstd")]
    BaseLayer {
        /// The image.
        image: String,
        /// The layer.
        digest: trainyard_spec::Digest,
        /// Its media type.
        media_type: String,
    },
    /// Packages of a distribution do not go together, or need what there is not.
    #[error("the packages asked for cannot be had together: {reason}")]
    Unsolvable {
        /// Who needs what, at which version, and what there is.
        reason: String,
    },
    /// A CUDA release is not what is asked for.
    #[error("{what}: {message}")]
    Cuda {
        /// The release or its list.
        what: String,
        /// What was found and needed.
        message: String,
    },
    /// A package lacks what the lock says is in it.
    #[error("{package} holds no {object}")]
    Lacks {
        /// The package file.
        package: String,
        /// What was looked for.
        object: String,
    },
    /// What a package holds is not what was locked.
    #[error("{object} in {package} has {found}; locked is {locked}")]
    ObjectDiffers {
        /// The package file.
        package: String,
        /// The object.
        object: String,
        /// Digest found.
        found: trainyard_spec::Digest,
        /// Digest locked.
        locked: trainyard_spec::Digest,
    },
}

/// Sees that every file of a locked input is in a store, and names them.
///
/// # Errors
/// When one cannot be had, or is not what was locked.
pub(crate) fn fetch_all(
    asked: &Asked<'_>,
    store: &Store,
    settings: &Settings,
    progress: Progress<'_>,
) -> Result<Vec<LockedFile>, Error> {
    match asked.locked {
        LockedInput::Python { package, file, .. } => {
            python::get(package, file, store, settings, progress)?;
        }
        LockedInput::Deb { package } => {
            for LockedDeb { file, .. } in package.values() {
                deb::get(file, store, settings, progress)?;
            }
        }
        LockedInput::Cuda { package, .. } => {
            for (name, LockedCuda { file, .. }) in package {
                cuda::get(name, file, store, settings, progress)?;
            }
        }
        LockedInput::Oci { digest } => {
            let Input::Oci { image } = asked.input else { return Ok(Vec::new()) };
            return oci::fetch(image, digest, asked.folder, asked.platform, store, settings, progress);
        }
        // Its crates come from cargo.
        LockedInput::Cargo { .. } => {}
    }
    Ok(asked.locked.files().into_iter().cloned().collect())
}

/// An input, as a manifest asks for it and as it is locked.
pub(crate) struct Asked<'a> {
    pub(crate) input: &'a Input,
    pub(crate) locked: &'a LockedInput,
    /// Folder of the manifest.
    pub(crate) folder: &'a Path,
    pub(crate) platform: Platform,
}

impl From<registry::Error> for Error {
    fn from(error: registry::Error) -> Self {
        Box::new(error).into()
    }
}

impl From<unpacked::Error> for Error {
    fn from(error: unpacked::Error) -> Self {
        match error {
            unpacked::Error::Archive(error) => error.into(),
            unpacked::Error::Store(error) => error.into(),
        }
    }
}

impl Error {
    /// The way out.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Index(error) => error.hint().map(str::to_owned),
            Self::Store(error) => error.hint().map(str::to_owned),
            Self::Lacks { .. } | Self::ObjectDiffers { .. } => {
                Some("the lock was not made from this package; make it anew with `trainyard lock`".to_owned())
            }
            Self::Unsolvable { .. } => Some(
                "ask for other versions, add the archive that has what is missing, or take exactly the packages named with dependencies = false".to_owned(),
            ),
            Self::Registry(error) => error.hint(),
            Self::Reference(error) => Some(format!(
                "{}, or the path of a layout or archive that begins with ./, ../ or /",
                error.hint()
            )),
            Self::BaseDiffers { .. } => Some(
                "name the image by the locked digest, or find out why it was replaced before you lock anew"
                    .to_owned(),
            ),
            Self::BaseLayer { .. } => {
                Some("copy it with compression: skopeo copy --dest-compress ...".to_owned())
            }
            Self::Archive(_) | Self::Layout(_) | Self::Cuda { .. } => None,
        }
    }

    /// Whether no server has or can be asked for the input, so that something else may stand in for it. Damaged or
    /// changed inputs are never out of reach.
    pub const fn is_out_of_reach(&self) -> bool {
        match self {
            Self::Index(error) => error.is_out_of_reach(),
            Self::Store(_)
            | Self::Archive(_)
            | Self::Registry(_)
            | Self::Reference(_)
            | Self::Layout(_)
            | Self::BaseDiffers { .. }
            | Self::BaseLayer { .. }
            | Self::Unsolvable { .. }
            | Self::Cuda { .. }
            | Self::Lacks { .. }
            | Self::ObjectDiffers { .. } => false,
        }
    }
}
