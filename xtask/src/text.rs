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
        faults.extend(found(&text).map(|(line, what)| format!("{name}:{line}: {what} may not be named")));
    }
    if !faults.is_empty() {
        bail!("{}", faults.join("\n"));
    }
    Ok(())
}

/// Line and text of everything forbidden in `text`.
fn found(text: &str) -> impl Iterator<Item = (usize, String)> {
    text.lines().enumerate().flat_map(|(index, line)| {
        FORBIDDEN
            .iter()
            .map(|(first, second)| format!("{first}{second}"))
            .filter(|whole| line.contains(whole.as_str()))
            .map(move |whole| (index + 1, whole))
    })
}

#[cfg(test)]
mod tests {
    use super::{FORBIDDEN, found};

    #[test]
    fn each_forbidden_name_is_found_at_its_line() {
        for (first, second) in FORBIDDEN {
            let whole = format!("{first}{second}");
            assert_eq!(found(&format!("one\nsee {whole}")).collect::<Vec<_>>(), [(2, whole)]);
        }
        assert_eq!(found("nothing here").count(), 0);
    }
}
