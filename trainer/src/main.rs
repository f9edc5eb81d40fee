//! `trainyard-trainer`: one rank of a training job, and what belongs to it.

use std::process::ExitCode;

use clap::Parser as _;
use trainyard_trainer::{cli, commands};

fn main() -> ExitCode {
    commands::run(&cli::Cli::parse())
}
