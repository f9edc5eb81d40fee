//! `trainyard-trainer`: one rank of a training job, and what belongs to it.

use std::process::ExitCode;

use clap::Parser as _;
use trainyard_trainer::{cli, commands};

fn main() -> ExitCode {
    // Beyond a limit of file size (`ulimit -f`) a write then fails with an error, instead of ending the process.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, std::sync::Arc::default());
    commands::run(&cli::Cli::parse())
}
