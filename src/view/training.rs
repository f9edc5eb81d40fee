//! The state of a job as a person wants to see it: a fold over the job's records.

use std::time::Duration;

use trainyard_spec::Exit;
use trainyard_spec::event::{Failure, JobEvent, TrainerEvent};
use trainyard_spec::protocol::NodeEvent;

/// What is known of a job's training so far.
#[derive(Debug, Default)]
pub(crate) struct Training {
    /// Attempt that runs, from 0.
    pub(crate) attempt: u32,
    /// Steps in all; 0 until the trainer has started.
    pub(crate) steps: u64,
    /// Steps done.
    pub(crate) step: u64,
    /// Trainable parameters.
    pub(crate) parameters: u64,
    /// (step, loss) of every step, in order of steps.
    pub(crate) losses: Vec<(f64, f64)>,
    /// (step, loss) of every validation, in order of steps.
    pub(crate) validations: Vec<(f64, f64)>,
    /// Validation loss of a unigram model.
    pub(crate) unigram: Option<f64>,
    /// Tokens per second, a mean in which the newest steps count most.
    pub(crate) tokens_per_second: f64,
    /// Path of the newest checkpoint, as the trainer sees it.
    pub(crate) checkpoint: Option<String>,
    /// Warnings of the trainer, each once.
    pub(crate) warnings: Vec<String>,
    /// The failure of each attempt that failed.
    pub(crate) failures: Vec<Failure>,
    /// How the job ended.
    pub(crate) ended: Option<Exit>,
    tokens_per_step: u64,
    /// Steps of this attempt.
    steps_seen: u64,
}

/// Part that the newest step has in the mean speed.
const NEWEST_STEP: f64 = 0.1;

impl Training {
    /// Takes in the next event of the job.
    pub(crate) fn learn(&mut self, event: &JobEvent) {
        match event {
            JobEvent::AttemptStarted { attempt, .. } => self.attempt = *attempt,
            JobEvent::AttemptFailed { failure, .. } => self.failures.push(failure.clone()),
            JobEvent::Ended { exit, .. } => self.ended = Some(*exit),
            JobEvent::Node { said: NodeEvent::Trainer { said, .. }, .. } => self.learn_from_trainer(said),
            JobEvent::Created { .. } | JobEvent::Note { .. } | JobEvent::Node { .. } => {}
        }
    }

    fn learn_from_trainer(&mut self, event: &TrainerEvent) {
        match event {
            TrainerEvent::Started { parameters, steps, first_step, tokens_per_step, unigram_loss } => {
                self.parameters = *parameters;
                self.steps = *steps;
                self.step = *first_step;
                self.tokens_per_step = *tokens_per_step;
                self.steps_seen = 0;
                self.unigram = Some(*unigram_loss);
                // A fresh attempt goes back to its checkpoint: what came after it is done again.
                self.losses.retain(|(step, _)| *step <= *first_step as f64);
                self.validations.retain(|(step, _)| *step <= *first_step as f64);
            }
            TrainerEvent::Step { step, loss, tokens_per_second, .. } => {
                self.step = *step;
                self.losses.push((*step as f64, *loss));
                // The first step of an attempt also waits for all ranks to come.
                let old = if self.steps_seen < 2 { *tokens_per_second } else { self.tokens_per_second };
                self.tokens_per_second = old + (tokens_per_second - old) * NEWEST_STEP;
                self.steps_seen += 1;
            }
            TrainerEvent::Validation { step, loss } => self.validations.push((*step as f64, *loss)),
            TrainerEvent::Checkpoint { path, .. } => self.checkpoint = Some(path.clone()),
            TrainerEvent::Warning { message } if !self.warnings.contains(message) => {
                self.warnings.push(message.clone());
            }
            TrainerEvent::Warning { .. } | TrainerEvent::Failed { .. } | TrainerEvent::Finished { .. } => {}
        }
    }

    /// Time left at the mean speed; none before the first step.
    pub(crate) fn time_left(&self) -> Option<Duration> {
        let tokens = self.steps.saturating_sub(self.step).checked_mul(self.tokens_per_step)?;
        let seconds = tokens as f64 / self.tokens_per_second;
        (self.tokens_per_second > 0.0).then(|| Duration::try_from_secs_f64(seconds).ok()).flatten()
    }

    /// The progress line. A narrow terminal cuts off its end.
    pub(crate) fn line(&self) -> String {
        let mut line = format!("step {:>w$}/{}", self.step, self.steps, w = self.steps.to_string().len());
        if let Some((_, loss)) = self.losses.last() {
            line += &format!("  loss {loss:.3}");
        }
        if let Some(left) = self.time_left() {
            let seconds = left.as_secs_f64().round() as u64;
            line += &format!("  {}:{:02} left", seconds / 60, seconds % 60);
            line += &format!("  {} tokens/s", grouped(self.tokens_per_second as u64));
        }
        if let Some((_, loss)) = self.validations.last() {
            line += &format!("  val {loss:.3}");
        }
        line
    }
}

/// `12345678` as `12,345,678`.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trainer(said: TrainerEvent) -> JobEvent {
        JobEvent::Node { node: 0, said: NodeEvent::Trainer { rank: 0, said } }
    }

    fn started(first_step: u64) -> JobEvent {
        trainer(TrainerEvent::Started {
            parameters: 1_000,
            steps: 300,
            first_step,
            tokens_per_step: 4_096,
            unigram_loss: 3.3,
        })
    }

    fn step(step: u64) -> JobEvent {
        trainer(TrainerEvent::Step {
            step,
            loss: 4.0 - step as f64 / 100.0,
            learning_rate: 1e-3,
            grad_norm: 1.0,
            tokens_per_second: 8_192.0,
        })
    }

    #[test]
    fn a_fresh_attempt_forgets_what_is_done_again() {
        let mut training = Training::default();
        training.learn(&started(0));
        (1..=100).for_each(|n| training.learn(&step(n)));
        training.learn(&trainer(TrainerEvent::Validation { step: 60, loss: 3.5 }));
        assert_eq!(training.line(), "step 100/300  loss 3.000  1:40 left  8,192 tokens/s  val 3.500");
        training.learn(&started(50));
        assert_eq!((training.losses.len(), training.validations.len(), training.step), (50, 0, 50));
    }

    #[test]
    fn nothing_known_yet() {
        assert_eq!(Training::default().line(), "step 0/0");
        assert_eq!(Training::default().time_left(), None);
    }

    #[test]
    fn groups_of_three() {
        for (number, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (12_345_678, "12,345,678")] {
            assert_eq!(grouped(number), text);
        }
    }
}
