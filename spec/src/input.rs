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
    /// A Debian binary package, from the archives that apt is configured for.
    Deb {
        /// Package name.
        package: String,
        /// Exact version; the newest one when the lock was made if left out.
        version: Option<String>,
    },
    /// Statically linked binaries of a cargo workspace, compiled with the locked toolchain.
    Cargo {
        /// Folder of the workspace.
        workspace: String,
        /// Packages to compile; every binary target of each is taken.
        packages: Vec<String>,
        /// Deb inputs of the same manifest whose C library and compiler runtime are linked in.
        link: Vec<Name>,
    },
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
pub(crate) const KINDS: &str = "python, deb, cargo";

impl Input {
    /// Names of other inputs that this one needs.
    pub fn needs(&self) -> BTreeSet<&Name> {
        match self {
            Self::Cargo { link, .. } => link.iter().collect(),
            Self::Python { .. } | Self::Deb { .. } => BTreeSet::new(),
        }
    }
}
