//! AdamW with decoupled weight decay, the learning-rate schedule, and clipping by global norm.
//!
//! An [`AdamW`] keeps moments for one range of the flat parameter buffer: all of it, or a rank's share when optimizer
//! state is sharded. Deliberately left out: who reduces gradients, and who gathers parameters afterwards.

use std::ops::Range;

use trainyard_spec::trainer::TrainConfig;

use crate::model::{Model, ModelError};
use crate::ops::{AdamWStep, Ops, Span};

/// AdamW's constants.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWConfig {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay of the parameters that the layout marks as decayed.
    pub weight_decay: f64,
}

impl From<&TrainConfig> for AdamWConfig {
    fn from(config: &TrainConfig) -> Self {
        Self {
            beta1: config.beta1,
            beta2: config.beta2,
            epsilon: config.epsilon,
            weight_decay: config.weight_decay,
        }
    }
}

/// AdamW's state for a range of the parameters.
#[derive(Debug)]
pub struct AdamW {
    config: AdamWConfig,
    range: Range<usize>,
    first: Span,
    second: Span,
}

impl AdamW {
    /// State for `range` of the model's parameters, with both moments 0.
    ///
    /// # Errors
    /// When memory runs out.
    ///
    /// # Panics
    /// When `range` ends beyond the parameters.
    pub fn new<O: Ops>(
        model: &mut Model<O>,
        range: Range<usize>,
        config: AdamWConfig,
    ) -> Result<Self, ModelError> {
        assert!(range.end <= model.layout().elements(), "{range:?} beyond the parameters");
        Ok(Self {
            config,
            first: model.ops.allocate("first moments", range.len())?,
            second: model.ops.allocate("second moments", range.len())?,
            range,
        })
    }

    /// The range of the flat parameter buffer that this state belongs to.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// First moments of the range.
    pub fn first_moments(&self) -> Span {
        self.first
    }

    /// Second moments of the range.
    pub fn second_moments(&self) -> Span {
        self.second
    }

    /// Updates the parameters of the range from the model's gradients times `gradient_scale`. `step` counts from 1.
    pub fn update<O: Ops>(&self, model: &mut Model<O>, step: u64, learning_rate: f64, gradient_scale: f64) {
        let config = self.config;
        // Beyond 2^31 steps both corrections are 1.
        let power = |beta: f64| beta.powi(i32::try_from(step).unwrap_or(i32::MAX));
        let (parameters, gradients) = (model.parameters(), model.gradients());
        let Model { ops, layout, .. } = model;
        for (parameter, part) in layout.within(self.range.clone()) {
            let own = part.start - self.range.start..part.end - self.range.start;
            ops.adamw(
                parameters.slice(part.clone()),
                self.first.slice(own.clone()),
                self.second.slice(own),
                gradients.slice(part),
                &AdamWStep {
                    learning_rate,
                    beta1: config.beta1,
                    beta2: config.beta2,
                    epsilon: config.epsilon,
                    weight_decay: if parameter.decayed { config.weight_decay } else { 0.0 },
                    bias_correction1: 1.0 - power(config.beta1),
                    bias_correction2: 1.0 - power(config.beta2),
                    gradient_scale,
                },
            );
        }
    }
}

/// Linear warm-up to the highest learning rate, then a cosine to the lowest at the last step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// Highest learning rate.
    pub highest: f64,
    /// Learning rate of the last step.
    pub lowest: f64,
    /// Steps of warm-up.
    pub warmup_steps: u64,
    /// Steps in all.
    pub steps: u64,
}

impl From<&TrainConfig> for Schedule {
    fn from(config: &TrainConfig) -> Self {
        Self {
            highest: config.learning_rate,
            lowest: config.min_learning_rate,
            warmup_steps: config.warmup_steps,
            steps: config.steps,
        }
    }
}

impl Schedule {
    /// Learning rate of `step`, counted from 1: `highest * step / warmup_steps` while warming up.
    pub fn learning_rate(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return self.highest * step as f64 / self.warmup_steps as f64;
        }
        let length = self.steps.saturating_sub(self.warmup_steps).max(1) as f64;
        let done = ((step - self.warmup_steps) as f64 / length).min(1.0);
        let share = 0.5 * (1.0 + (std::f64::consts::PI * done).cos());
        self.lowest + share * (self.highest - self.lowest)
    }
}

/// What gradients of global norm `norm` are multiplied by so that it is at most `limit`. PyTorch's `clip_grad_norm_`.
pub fn clip_scale(norm: f64, limit: f64) -> f64 {
    (limit / (norm + 1e-6)).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedule_warms_up_and_ends_at_the_lowest() {
        let schedule = Schedule { highest: 1.0, lowest: 0.1, warmup_steps: 4, steps: 10 };
        for (step, expect) in [(1, 0.25), (2, 0.5), (4, 1.0), (7, 0.55), (10, 0.1), (11, 0.1)] {
            assert!((schedule.learning_rate(step) - expect).abs() < 1e-12, "{step}");
        }
    }

    #[test]
    fn schedule_without_a_decay() {
        let schedule = Schedule { highest: 1.0, lowest: 1.0, warmup_steps: 0, steps: 0 };
        assert_eq!(schedule.learning_rate(1), 1.0);
    }

    #[test]
    fn clipping_scales_down_only() {
        assert_eq!(clip_scale(0.5, 1.0), 1.0);
        assert!((clip_scale(4.0, 1.0) - 0.25).abs() < 1e-6);
    }
}
