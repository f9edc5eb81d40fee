//! The `trainyard` command.

mod cli;
mod commands;
mod failure;
mod host;
mod interrupt;
mod settings;
mod view;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    // Beyond a limit of file size (`ulimit -f`) a write then fails with an error, instead of ending the process.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, std::sync::Arc::default());
    let result = commands::run(cli::Cli::parse());
    interrupt::end_if_ending();
    match result {
        Ok(exit) => exit.into(),
        Err(failure) => failure.report().into(),
    }
}
