//! Inputs: what an image or a corpus is made from. A manifest names them, a lock pins them.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use toml_spanner::Toml;

use crate::Name;

/// One input of an image or corpus, as a manifest names it. Paths are relative to the manifest's folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Toml)]
#[serde(tag = "kind", rename_all = "kebab-case", rename_all_fields = "kebab-case", deny_unknown_fields)]
#[toml(Toml, tag = "kind", rename_all = "kebab-case", rename_all_fields = "kebab-case", recoverable)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Input {
    /// A distribution of a Python package, from the index that pip is configured for.
    Python {
        /// Package name.
        package: String,
        /// Exact version.
        version: String,
        /// Source archive or wheel.
        artifact: PythonArtifact,
    },
    /// Debian packages, from the archives that apt is configured for.
    Deb {
        /// Package names, or `name=version`; the newest version when the lock was made where none is given.
        packages: Vec<String>,
        /// Whether what they depend on is taken, too.
        #[serde(default = "yes")]
        #[toml(default = yes())]
        dependencies: bool,
    },
    /// NVIDIA's CUDA libraries.
    Cuda {
        /// Release of the CUDA toolkit, such as `13.0.2`.
        version: String,
        /// The libraries, each with what it needs from the others.
        libraries: Vec<CudaLibrary>,
        /// What they are taken from.
        #[serde(default)]
        #[toml(default)]
        from: CudaSource,
        /// Exact version of NCCL, which is released apart from the toolkit; the newest one for it when the lock was made if
        /// left out.
        nccl: Option<String>,
    },
    /// A base image, whose layers are the lowest of the image and stay as they are.
    Oci {
        /// `host[:port]/name[:tag][@digest]` in a registry; or, beginning with `./`, `../` or `/`, the folder of an OCI layout or
        /// an oci-archive. The lock pins its digest.
        image: String,
    },
    /// A file or folder beside the manifest.
    Files {
        /// Where it is.
        path: String,
        /// Absolute folder in the image.
        into: String,
    },
    /// Statically linked binaries of a cargo workspace, compiled with the locked toolchain.
    Cargo {
        /// Folder of the workspace.
        workspace: String,
        /// Packages to compile; every binary target of each is taken.
        packages: Vec<String>,
        /// Deb inputs of the same manifest whose C library and compiler runtime are linked in. They are not in the image.
        link: Vec<Name>,
        /// Absolute folder in the image.
        into: String,
    },
}

const fn yes() -> bool {
    true
}

/// A CUDA library.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, Toml)]
#[toml(Toml)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum CudaLibrary {
    /// The runtime, `libcudart`.
    #[serde(rename = "cudart")]
    #[toml(rename = "cudart")]
    Cudart,
    /// Matrix products without the BLAS interface, `libcublasLt`.
    #[serde(rename = "cublasLt")]
    #[toml(rename = "cublasLt")]
    CublasLt,
    /// The BLAS interface, `libcublas`.
    #[serde(rename = "cublas")]
    #[toml(rename = "cublas")]
    Cublas,
    /// Communication between GPUs, `libnccl`.
    #[serde(rename = "nccl")]
    #[toml(rename = "nccl")]
    Nccl,
    /// Compilation at run time, `libnvrtc`.
    #[serde(rename = "nvrtc")]
    #[toml(rename = "nvrtc")]
    Nvrtc,
}

impl CudaLibrary {
    /// As written in a manifest.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Cudart => "cudart",
            Self::CublasLt => "cublasLt",
            Self::Cublas => "cublas",
            Self::Nccl => "nccl",
            Self::Nvrtc => "nvrtc",
        }
    }
}

/// What CUDA libraries are taken from. The same release gives the same files either way.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Toml)]
#[serde(rename_all = "kebab-case")]
#[toml(Toml, rename_all = "kebab-case")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum CudaSource {
    /// Wheels, from the index that pip is configured for.
    #[default]
    Wheels,
    /// NVIDIA's redistributable archives, from the mirror that `TRAINYARD_CUDA_REDIST` names.
    Archives,
}

/// Which distribution of a Python package.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Toml)]
#[serde(rename_all = "kebab-case")]
#[toml(Toml, rename_all = "kebab-case")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum PythonArtifact {
    /// The source archive (`.tar.gz`). Nothing in it is ever run.
    Sdist,
    /// The wheel of the manifest's platform.
    Wheel,
}

/// The values of `kind`, in manifests and locks.
pub(crate) const KINDS: &str = "python, deb, cuda, oci, files, cargo";

impl Input {
    /// Names of other inputs that this one needs.
    pub fn needs(&self) -> BTreeSet<&Name> {
        match self {
            Self::Cargo { link, .. } => link.iter().collect(),
            Self::Python { .. }
            | Self::Deb { .. }
            | Self::Cuda { .. }
            | Self::Oci { .. }
            | Self::Files { .. } => BTreeSet::new(),
        }
    }

    /// Absolute folder in the image, where the input does not say itself where its files lie.
    pub fn into(&self) -> Option<&str> {
        match self {
            Self::Cargo { into, .. } | Self::Files { into, .. } => Some(into),
            Self::Python { .. } | Self::Deb { .. } | Self::Cuda { .. } | Self::Oci { .. } => None,
        }
    }
}
