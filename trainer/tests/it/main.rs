//! Integration tests of the trainer.
#![expect(clippy::unwrap_used, reason = "tests stop at the first surprise")]

mod bits;
mod commands;
mod golden;
mod gradients;
mod group;
mod numbers;
mod ranks;
mod resume;
