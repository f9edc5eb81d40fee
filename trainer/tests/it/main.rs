//! Integration tests of the trainer.

mod gradients;
mod numbers;
