//! `trainyard completions` and `trainyard man`: generated from the command line's own definition.

use std::io::{self, Write as _};

use anyhow::Context;
use clap::CommandFactory;
use trainyard_spec::Exit;

use crate::cli::{Cli, Completions, Man};
use crate::failure::Failure;

pub(crate) fn completions(arguments: &Completions) -> Result<Exit, Failure> {
    // To memory first: writing to a closed pipe or a full disk is an error here, but a panic there.
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut Cli::command(), "trainyard", &mut script);
    io::stdout()
        .write_all(&script)
        .context("cannot write the completions")
        .map_err(|error| Failure::new(Exit::Infrastructure, error))?;
    Ok(Exit::Done)
}

pub(crate) fn man(arguments: &Man) -> Result<Exit, Failure> {
    let folder = &arguments.folder;
    std::fs::create_dir_all(folder)
        .and_then(|()| clap_mangen::generate_to(Cli::command(), folder))
        .with_context(|| format!("cannot write man pages to {}", folder.display()))
        .map_err(|error| Failure::new(Exit::Usage, error))?;
    Ok(Exit::Done)
}
