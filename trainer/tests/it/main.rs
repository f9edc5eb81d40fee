//! Integration tests of the trainer.
#![expect(clippy::unwrap_used, reason = "tests stop at the first surprise")]

mod commands;
mod gradients;
mod group;
mod numbers;
mod ranks;
mod resume;
