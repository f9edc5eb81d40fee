//! The project's own chores: `cargo xtask ci` runs every check and test, `cargo xtask bless` renews what is generated.
//!
//! Deliberately left out: anything a user of Trainyard needs.
#![expect(clippy::print_stdout, reason = "a program for developers, whose output is its job")]

mod bench;
mod dependencies;
mod readme;
mod schemas;
mod steps;
mod text;

use std::path::{Path, PathBuf};

use clap::Parser;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Chores of the Trainyard project", disable_help_subcommand = true)]
enum Xtask {
    /// Run every check and every test
    Ci,
    /// Run one check: format, lint, text, dependencies, schemas, docs, test, readme
    Check {
        /// The check's name
        name: String,
    },
    /// Measure an unchanged build and a launch until its first step
    Bench,
    /// Renew what is generated: JSON Schemas, snapshots and golden digests; review the difference before committing
    Bless,
}

fn main() -> anyhow::Result<()> {
    let root = root();
    match Xtask::parse() {
        Xtask::Ci => steps::all(&root),
        Xtask::Check { name } => steps::one(&root, &name),
        Xtask::Bench => bench::run(&root),
        Xtask::Bless => steps::bless(&root),
    }
}

/// The workspace's folder.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}
