//! The index of a folder of vendored inputs: what each file in it is. Nothing is looked up through it: a file is found by
//! its digest.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Digest, FormatVersion};

/// What `index.json` of a vendored folder says.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct VendoredIndex {
    /// Format version.
    pub version: FormatVersion<1>,
    /// The files by sha256; each lies at `blobs/sha256/HEX`.
    pub files: BTreeMap<Digest, VendoredFile>,
}

/// A vendored file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct VendoredFile {
    /// Name, as its index or registry gives it.
    pub name: String,
    /// Bytes.
    pub size: u64,
}
