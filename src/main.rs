//! The `trainyard` command.

mod cli;
mod commands;
mod failure;
mod interrupt;
mod settings;
mod view;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let result = commands::run(cli::Cli::parse());
    interrupt::end_if_ending();
    match result {
        Ok(exit) => exit.into(),
        Err(failure) => failure.report().into(),
    }
}
