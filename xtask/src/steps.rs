//! The checks in the order in which they fail fastest, and how each is run.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, bail};

use crate::{dependencies, readme, schemas, text};

type Check = fn(&Path) -> anyhow::Result<()>;

const CHECKS: [(&str, Check); 8] = [
    ("format", |root| run(root, "cargo fmt --all --check")),
    ("text", text::check),
    ("dependencies", dependencies::check),
    ("lint", |root| run(root, "cargo clippy --workspace --all-targets --locked -- -D warnings")),
    ("schemas", schemas::check),
    ("docs", docs),
    ("readme", readme::check),
    // Last, so that the test runner's closing lines are the last that is printed.
    ("test", test),
];

pub(crate) fn all(root: &Path) -> anyhow::Result<()> {
    let start = Instant::now();
    for (name, check) in CHECKS {
        let begun = Instant::now();
        println!("== {name}");
        check(root)
            .with_context(|| format!("check {name} failed; run it alone with: cargo xtask check {name}"))?;
        println!("== {name}: {:.1} s", begun.elapsed().as_secs_f64());
    }
    println!("== all checks passed in {:.0} s", start.elapsed().as_secs_f64());
    Ok(())
}

pub(crate) fn one(root: &Path, name: &str) -> anyhow::Result<()> {
    let Some((_, check)) = CHECKS.iter().find(|(known, _)| *known == name) else {
        let known: Vec<_> = CHECKS.iter().map(|(known, _)| *known).collect();
        bail!("no check is called {name:?}; known are {}", known.join(", "));
    };
    check(root)
}

pub(crate) fn bless(root: &Path) -> anyhow::Result<()> {
    schemas::write(root)?;
    let mut command = Command::new("cargo");
    command
        .args(["test", "--workspace", "--locked"])
        .env("INSTA_UPDATE", "always")
        .env("TRAINYARD_BLESS", "1");
    status(root, &mut command)
}

fn docs(root: &Path) -> anyhow::Result<()> {
    let mut command = Command::new("cargo");
    command
        .args(["doc", "--workspace", "--no-deps", "--document-private-items", "--locked", "--quiet"])
        .env("RUSTDOCFLAGS", "-D warnings");
    status(root, &mut command)
}

/// Doc tests, then everything else: with nextest where it is installed, with cargo's own runner elsewhere.
fn test(root: &Path) -> anyhow::Result<()> {
    run(root, "cargo test --doc --workspace --locked --quiet")?;
    let nextest =
        Command::new("cargo").args(["nextest", "--version"]).output().is_ok_and(|out| out.status.success());
    if nextest {
        run(root, "cargo nextest run --workspace --locked --no-fail-fast")
    } else {
        println!("cargo-nextest is not installed; running the tests with cargo test");
        run(root, "cargo test --workspace --locked --no-fail-fast")
    }
}

/// Runs a command line without quoting.
fn run(root: &Path, line: &str) -> anyhow::Result<()> {
    let mut words = line.split_whitespace();
    let mut command = Command::new(words.next().unwrap_or_default());
    status(root, command.args(words))
}

fn status(root: &Path, command: &mut Command) -> anyhow::Result<()> {
    let status = command.current_dir(root).status().with_context(|| format!("cannot start {command:?}"))?;
    if !status.success() {
        bail!("{command:?} ended with {status}");
    }
    Ok(())
}
