//! What the trainer is told: model, optimizer, schedule and data. The same types are the tables of a job manifest and
//! the JSON file handed to `trainyard-trainer`.

use serde::{Deserialize, Serialize};
use toml_spanner::Toml;

use crate::FormatVersion;

/// The trainer's whole configuration, as the launcher writes it to `trainer.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TrainerConfig {
    /// Format version.
    pub version: FormatVersion<1>,
    /// Shape of the model.
    pub model: ModelConfig,
    /// Optimizer, schedule and bookkeeping.
    pub train: TrainConfig,
}

/// Shape of a GPT-2 style decoder. The vocabulary's size comes from the tokenizer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Toml)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[toml(Toml, rename_all = "kebab-case", recoverable)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ModelConfig {
    /// Number of blocks.
    pub layers: u32,
    /// Attention heads per block.
    pub heads: u32,
    /// Width of the residual stream, C; a multiple of `heads`.
    pub channels: u32,
    /// Longest sequence, T, in tokens.
    pub context: u32,
}

/// Optimizer (AdamW with decoupled weight decay), learning-rate schedule (linear warm-up, then cosine), batch and
/// bookkeeping. One step consumes `batch * grad-accumulation * world size` sequences of `context` tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Toml)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[toml(Toml, rename_all = "kebab-case", recoverable)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TrainConfig {
    /// Optimizer steps in all.
    pub steps: u64,
    /// Sequences per rank and micro-batch, B.
    pub batch: u32,
    /// Micro-batches per step.
    #[serde(default = "default::one")]
    #[toml(default = default::one())]
    pub grad_accumulation: u32,
    /// Highest learning rate, reached after warm-up.
    pub learning_rate: f64,
    /// Learning rate at the last step.
    pub min_learning_rate: f64,
    /// Steps of linear warm-up.
    pub warmup_steps: u64,
    /// Decoupled weight decay of matrices; biases, norms and position embeddings are not decayed.
    pub weight_decay: f64,
    /// AdamW's decay of the first moment.
    #[serde(default = "default::beta1")]
    #[toml(default = default::beta1())]
    pub beta1: f64,
    /// AdamW's decay of the second moment.
    #[serde(default = "default::beta2")]
    #[toml(default = default::beta2())]
    pub beta2: f64,
    /// AdamW's epsilon.
    #[serde(default = "default::epsilon")]
    #[toml(default = default::epsilon())]
    pub epsilon: f64,
    /// Gradients are scaled down to this global norm when above it.
    pub clip_norm: f64,
    /// Seed of the initial weights and of the order of the data.
    pub seed: u64,
    /// Steps between validations; the last step always validates.
    pub eval_every: u64,
    /// Sequences per validation, in all ranks together.
    pub eval_sequences: u32,
    /// Steps between checkpoints; the last step always writes one.
    pub checkpoint_every: u64,
    /// Newest checkpoints kept.
    #[serde(default = "default::keep_last")]
    #[toml(default = default::keep_last())]
    pub keep_last: u32,
}

mod default {
    pub(super) const fn one() -> u32 {
        1
    }
    pub(super) const fn beta1() -> f64 {
        0.9
    }
    pub(super) const fn beta2() -> f64 {
        0.95
    }
    pub(super) const fn epsilon() -> f64 {
        1e-8
    }
    pub(super) const fn keep_last() -> u32 {
        2
    }
}

impl TrainerConfig {
    /// Every rule across fields that the configuration breaks, as "key: what was found and what was needed". A job
    /// manifest's rules are the same; this is for configurations that come as JSON.
    pub fn broken_rules(&self) -> Vec<String> {
        let mut broken = Vec::new();
        let mut report = |key: &str, message: String| broken.push(format!("{key}: {message}"));
        self.model.validate(&mut report);
        self.train.validate(&mut report);
        broken
    }
}

impl ModelConfig {
    pub(crate) fn validate(&self, report: &mut dyn FnMut(&str, String)) {
        for (key, value) in [
            ("layers", self.layers),
            ("heads", self.heads),
            ("channels", self.channels),
            ("context", self.context),
        ] {
            if !(1..=1 << 20).contains(&value) {
                report(&format!("model.{key}"), format!("{key} is {value}; needed is 1 to 1048576"));
            }
        }
        if self.heads > 0 && !self.channels.is_multiple_of(self.heads) {
            let message = format!("channels ({}) is not a multiple of heads ({})", self.channels, self.heads);
            report("model.channels", message);
        }
    }
}

impl TrainConfig {
    pub(crate) fn validate(&self, report: &mut dyn FnMut(&str, String)) {
        let mut positive = |key: &str, value: u64| {
            if value == 0 {
                report(&format!("train.{key}"), format!("{key} is 0; needed is at least 1"));
            }
        };
        positive("steps", self.steps);
        positive("batch", self.batch.into());
        positive("grad-accumulation", self.grad_accumulation.into());
        positive("eval-every", self.eval_every);
        positive("eval-sequences", self.eval_sequences.into());
        positive("checkpoint-every", self.checkpoint_every);
        positive("keep-last", self.keep_last.into());
        let decay = |value: f64| (0.0..1.0).contains(&value);
        for (key, value, holds, needed) in [
            ("learning-rate", self.learning_rate, self.learning_rate > 0.0, "above 0"),
            ("weight-decay", self.weight_decay, self.weight_decay >= 0.0, "at least 0"),
            ("beta1", self.beta1, decay(self.beta1), "at least 0 and below 1"),
            ("beta2", self.beta2, decay(self.beta2), "at least 0 and below 1"),
            ("epsilon", self.epsilon, self.epsilon > 0.0, "above 0"),
            ("clip-norm", self.clip_norm, self.clip_norm > 0.0, "above 0"),
        ] {
            if !(holds && value.is_finite()) {
                report(&format!("train.{key}"), format!("{key} is {value}; needed is {needed}"));
            }
        }
        if !(0.0..=self.learning_rate).contains(&self.min_learning_rate) {
            let message = format!(
                "min-learning-rate is {}; needed is 0 to learning-rate ({})",
                self.min_learning_rate, self.learning_rate
            );
            report("train.min-learning-rate", message);
        }
        if self.warmup_steps > self.steps {
            let message = format!("warmup-steps ({}) is more than steps ({})", self.warmup_steps, self.steps);
            report("train.warmup-steps", message);
        }
    }
}
