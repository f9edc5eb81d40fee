//! The lock: every input of a manifest, pinned by sha256. It names files and never where they are served from, so that
//! it survives mirrors.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use toml_spanner::Toml;

use crate::toml::{Collector, Validate};
use crate::{Digest, FormatVersion, Name};

/// A lock, written by `trainyard lock` beside the manifest with the extension `.lock`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Toml)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[toml(Toml, rename_all = "kebab-case", recoverable)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Lock {
    /// Format version.
    pub version: FormatVersion<1>,
    /// Digest of the manifest's input tables, to notice a lock that is out of date.
    pub manifest: Digest,
    /// Locked inputs by name.
    pub input: BTreeMap<Name, LockedInput>,
}

/// One pinned input.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Toml)]
#[serde(tag = "kind", rename_all = "kebab-case", rename_all_fields = "kebab-case", deny_unknown_fields)]
#[toml(Toml, tag = "kind", rename_all = "kebab-case", rename_all_fields = "kebab-case", recoverable)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum LockedInput {
    /// A file of a Python package.
    Python {
        /// Package name.
        package: String,
        /// Version.
        version: String,
        /// The distribution file.
        file: LockedFile,
    },
    /// Debian packages.
    Deb {
        /// By name: those asked for and what they depend on.
        package: BTreeMap<String, LockedDeb>,
    },
    /// CUDA libraries.
    Cuda {
        /// Release of the toolkit.
        version: String,
        /// The wheels or archives that hold them.
        package: BTreeMap<String, LockedCuda>,
    },
    /// A base image.
    Oci {
        /// Digest of its OCI manifest, by which all that it holds is verified.
        digest: Digest,
    },
    /// The toolchain that compiles and links a cargo input. The crates are pinned by the workspace's own `Cargo.lock`,
    /// which cargo is told to follow to the letter.
    Cargo {
        /// rustc's release, as in `rust-toolchain.toml`.
        rustc: String,
        /// rustc's commit, which also fixes the linker that comes with it.
        commit: String,
    },
}

/// A Debian package.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Toml)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[toml(Toml, rename_all = "kebab-case", recoverable)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LockedDeb {
    /// Version.
    pub version: String,
    /// The package file; its name is the path below an archive's root (`pool/...`).
    pub file: LockedFile,
    /// Static objects and archives in the package that a cargo input links, by path in the package.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[toml(default, skip_if = BTreeMap::is_empty)]
    pub objects: BTreeMap<String, Digest>,
}

/// A wheel or archive of CUDA libraries.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Toml)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[toml(Toml, rename_all = "kebab-case", recoverable)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LockedCuda {
    /// Version.
    pub version: String,
    /// The file.
    pub file: LockedFile,
}

/// A file by name, size and content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Toml)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[toml(Toml, rename_all = "kebab-case", recoverable)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LockedFile {
    /// Name as its index gives it.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// sha256 of the content.
    pub sha256: Digest,
}

impl LockedInput {
    /// Every file that it names. What a base image holds is in its manifest, and the crates of a cargo input are in its
    /// workspace's own lock file.
    pub fn files(&self) -> Vec<&LockedFile> {
        match self {
            Self::Python { file, .. } => vec![file],
            Self::Deb { package } => package.values().map(|package| &package.file).collect(),
            Self::Cuda { package, .. } => package.values().map(|package| &package.file).collect(),
            Self::Oci { .. } | Self::Cargo { .. } => Vec::new(),
        }
    }
}

impl Validate for Lock {
    fn validate(&self, _: &mut Collector<'_, '_>) {}
}
