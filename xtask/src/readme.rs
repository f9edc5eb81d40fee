//! README's claims: every command in a `console` block is one that `trainyard` or cargo accepts.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};

/// Asks the real program for the help of every command that README shows, and checks every option used against it.
/// The two commands that a newcomer runs are run for real elsewhere: this one is being run right now by the second,
/// and the end-to-end tests run the first.
pub(crate) fn check(root: &Path) -> anyhow::Result<()> {
    let text = fs::read_to_string(root.join("README.md")).context("cannot read README.md")?;
    let mut faults = Vec::new();
    let mut seen = 0;
    for command in commands(&text) {
        let words: Vec<&str> = command.split_whitespace().take_while(|word| !word.starts_with('#')).collect();
        let arguments = match words.as_slice() {
            ["cargo", "run", "--release", "--", arguments @ ..] | ["trainyard", arguments @ ..] => arguments,
            ["cargo", "xtask", "ci"] => continue,
            _ => {
                faults.push(format!("{command}: not a command of this project"));
                continue;
            }
        };
        seen += 1;
        if let Err(fault) = accepted(root, arguments) {
            faults.push(format!("{command}: {fault:#}"));
        }
    }
    if seen == 0 {
        bail!("README.md shows no command of trainyard");
    }
    if !faults.is_empty() {
        bail!("README.md: {}", faults.join("\nREADME.md: "));
    }
    Ok(())
}

fn commands(text: &str) -> impl Iterator<Item = &str> {
    let mut inside = false;
    text.lines().filter_map(move |line| {
        if let Some(info) = line.trim_start().strip_prefix("```") {
            inside = info == "console";
            return None;
        }
        line.strip_prefix("$ ").filter(|_| inside)
    })
}

fn accepted(root: &Path, arguments: &[&str]) -> anyhow::Result<()> {
    let subcommands: Vec<&str> =
        arguments.iter().copied().take_while(|word| word.chars().all(|c| c.is_ascii_lowercase())).collect();
    let mut help = None;
    // A word after the subcommand may be its argument: the longest prefix that has a help text is the subcommand.
    for length in (1..=subcommands.len()).rev() {
        let output = Command::new("cargo")
            .args(["run", "--quiet", "--locked", "--bin", "trainyard", "--"])
            .args(&subcommands[..length])
            .arg("--help")
            .current_dir(root)
            .output()?;
        if output.status.success() {
            help = Some(String::from_utf8(output.stdout)?);
            break;
        }
    }
    let help = help.context("no such subcommand")?;
    for option in arguments.iter().take_while(|word| **word != "--").filter(|word| word.starts_with('-')) {
        let name = option.split('=').next().unwrap_or(option);
        if !help.split(|c: char| c.is_whitespace() || c == ',').any(|word| word == name) {
            bail!("{name} is not an option of it");
        }
    }
    Ok(())
}
