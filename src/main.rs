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
    match commands::run(cli::Cli::parse()) {
        Ok(exit) => exit.into(),
        Err(failure) => failure.report().into(),
    }
}
