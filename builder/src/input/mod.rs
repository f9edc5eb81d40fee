//! Inputs: how each kind is resolved to a lock, fetched, and read without running anything in it.

pub mod archive;
pub mod cargo;
pub(crate) mod cuda;
pub(crate) mod deb;
mod fetch;
pub mod link;
pub(crate) mod python;

use crate::index;
use crate::store;
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
            Self::Archive(_) | Self::Cuda { .. } => None,
        }
    }

    /// Whether no server has or can be asked for the input, so that something else may stand in for it. Damaged or
    /// changed inputs are never out of reach.
    pub const fn is_out_of_reach(&self) -> bool {
        match self {
            Self::Index(error) => error.is_out_of_reach(),
            Self::Store(_)
            | Self::Archive(_)
            | Self::Cuda { .. }
            | Self::Lacks { .. }
            | Self::ObjectDiffers { .. } => false,
        }
    }
}
