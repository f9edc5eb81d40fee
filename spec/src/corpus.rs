//! The corpus manifest: where a text to train on comes from.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use toml_spanner::Toml;

use crate::image::check_needs;
use crate::input::Input;
use crate::toml::{Collector, Validate};
use crate::{FormatVersion, Name};

/// A corpus: the texts that match `include` in its inputs' files, joined in order of path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Toml)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[toml(Toml, rename_all = "kebab-case", recoverable)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CorpusManifest {
    /// Format version.
    pub version: FormatVersion<1>,
    /// Name of the corpus.
    pub name: Name,
    /// Inputs by name.
    pub input: BTreeMap<Name, Input>,
    /// Glob patterns over paths inside the inputs' archives.
    pub include: Vec<String>,
    /// Glob patterns, relative to this manifest, of texts to train on where no package index can be reached.
    #[serde(default)]
    #[toml(default)]
    pub fallback: Vec<String>,
}

impl Validate for CorpusManifest {
    fn validate(&self, faults: &mut Collector<'_, '_>) {
        check_needs(&self.input, faults);
        if self.input.is_empty() {
            faults.at("input", "a corpus needs at least one input", None);
        }
        if self.include.is_empty() {
            faults.at("include", "no pattern, so no text would be taken", Some("include = [\"**/*.txt\"]"));
        }
        for (name, input) in &self.input {
            if !matches!(input, Input::Python { .. }) {
                faults.at(&format!("input.{name}.kind"), "a corpus is made from python inputs", None);
            }
        }
    }
}
