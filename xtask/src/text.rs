//! What may not stand in any file of the project: addresses of package registries, and paths of one machine.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};

/// Parts of host names, each split so that this list does not find itself.
const FORBIDDEN: [(&str, &str); 13] = [
    ("pypi.", "org"),
    ("pythonhosted.", "org"),
    ("crates.", "io/"),
    ("index.crates.", "io"),
    ("deb.debian.", "org"),
    ("security.debian.", "org"),
    ("snapshot.debian.", "org"),
    ("archive.ubuntu.", "com"),
    ("registry.npmjs.", "org"),
    ("mirror.centos.", "org"),
    ("developer.download.nvidia.", "com"),
    ("/home/", "user"),
    ("/work/", "main"),
];

pub(crate) fn check(root: &Path) -> anyhow::Result<()> {
    let listed = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()
        .context("cannot run git to list the project's files")?;
    let mut faults = Vec::new();
    for name in String::from_utf8(listed.stdout)?.split('\0').filter(|name| !name.is_empty()) {
        // Cargo writes the registry's own name into its lock file.
        if name == "Cargo.lock" {
            continue;
        }
        // What is deleted but not committed, and what is not text, holds nothing to find.
        let Ok(text) = fs::read_to_string(root.join(name)) else {
            continue;
        };
        for (number, line) in text.lines().enumerate() {
            for (first, second) in FORBIDDEN {
                if line.contains(&format!("{first}{second}")) {
                    faults.push(format!("{name}:{}: {first}{second} may not be named", number + 1));
                }
            }
        }
    }
    if !faults.is_empty() {
        bail!("{}", faults.join("\n"));
    }
    Ok(())
}
