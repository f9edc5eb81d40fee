//! The job manifest: what to train, on what text, on how many nodes.

use serde::{Deserialize, Serialize};
use toml_spanner::Toml;

use crate::toml::{Collector, Validate};
use crate::trainer::{ModelConfig, TrainConfig};
use crate::{FormatVersion, Name};

/// A job manifest. Paths are relative to its folder.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Toml)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[toml(Toml, rename_all = "kebab-case", recoverable)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct JobManifest {
    /// Format version.
    pub version: FormatVersion<1>,
    /// Name of the job; each launch gets the name and a number.
    pub name: Name,
    /// The image manifest to run.
    pub image: String,
    /// Nodes; `--nodes` overrides it.
    pub nodes: u32,
    /// Ranks on each node.
    #[serde(default = "one")]
    #[toml(default = one())]
    pub ranks_per_node: u32,
    /// Fresh attempts after a failure; `--max-restarts` overrides it.
    #[serde(default = "restarts")]
    #[toml(default = restarts())]
    pub max_restarts: u32,
    /// The text.
    pub data: Data,
    /// The model.
    pub model: ModelConfig,
    /// How it is trained.
    pub train: TrainConfig,
    /// What the trained model is asked to write at the end.
    pub sample: Option<Sample>,
}

/// The text to train on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Toml)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[toml(Toml, rename_all = "kebab-case", recoverable)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Data {
    /// The corpus manifest; `--data FILE` overrides it with a text file.
    pub corpus: String,
    /// The tokenizer: `"byte"`, the only one of this version (`docs/tokenizers.md`).
    pub tokenizer: String,
    /// Part of the text, at its end, that is held out for validation: above 0, at most 0.5.
    pub validation_fraction: f64,
}

/// What the trained model is asked to write.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Toml)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[toml(Toml, rename_all = "kebab-case", recoverable)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Sample {
    /// Text to go on from.
    pub prompt: String,
    /// Tokens to write.
    pub tokens: u32,
    /// Softmax temperature; 0 always takes the likeliest token.
    pub temperature: f64,
}

const fn one() -> u32 {
    1
}
const fn restarts() -> u32 {
    3
}

/// Most nodes, and most ranks on a node, that a job may ask for.
pub const MAX_NODES: u32 = 100_000;

impl Validate for JobManifest {
    fn validate(&self, faults: &mut Collector<'_, '_>) {
        for (key, value) in [("nodes", self.nodes), ("ranks-per-node", self.ranks_per_node)] {
            if !(1..=MAX_NODES).contains(&value) {
                faults.at(key, format!("{key} is {value}; needed is 1 to {MAX_NODES}"), None);
            }
        }
        let fraction = self.data.validation_fraction;
        if !(fraction > 0.0 && fraction <= 0.5) {
            let message = format!("validation-fraction is {fraction}; needed is above 0 and at most 0.5");
            faults.at("data.validation-fraction", message, None);
        }
        if self.data.tokenizer != "byte" {
            let message = format!("tokenizer is {:?}; needed is \"byte\"", self.data.tokenizer);
            faults.at("data.tokenizer", message, Some("docs/tokenizers.md says why it is the only one"));
        }
        if let Some(sample) = &self.sample
            && !(0.0..=100.0).contains(&sample.temperature)
        {
            let message = format!("temperature is {}; needed is 0 to 100", sample.temperature);
            faults.at("sample.temperature", message, None);
        }
        let mut report = |key: &str, message: String| faults.at(key, message, None);
        self.model.validate(&mut report);
        self.train.validate(&mut report);
    }
}
