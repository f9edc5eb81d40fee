//! What the workspace depends on: the direction of its own crates, and the licences of everybody else's.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::bail;
use cargo_metadata::{DependencyKind, MetadataCommand, Package};
use spdx::{Expression, ParseMode};

/// Licences that an image may carry without further duties than naming them.
const LICENCES: [&str; 14] = [
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Crates of the workspace, and the ones of the workspace that each may depend on.
const DIRECTION: [(&str, &[&str]); 7] = [
    ("trainyard-spec", &[]),
    ("trainyard-builder", &["trainyard-spec"]),
    ("trainyard-launcher", &["trainyard-spec"]),
    ("trainyard-node", &["trainyard-spec"]),
    ("trainyard-trainer", &["trainyard-spec"]),
    ("trainyard", &["trainyard-builder", "trainyard-launcher", "trainyard-spec", "trainyard-trainer"]),
    ("xtask", &["trainyard-spec"]),
];

pub(crate) fn check(root: &Path) -> anyhow::Result<()> {
    let metadata = MetadataCommand::new().current_dir(root).other_options(["--locked".to_owned()]).exec()?;
    let own: BTreeSet<_> = metadata.workspace_packages().iter().map(|package| package.id.clone()).collect();
    let mut faults = Vec::new();
    for package in &metadata.packages {
        if own.contains(&package.id) {
            faults.extend(direction(package));
        } else {
            faults.extend(licence(package));
            faults.extend(source(package));
        }
    }
    if !faults.is_empty() {
        bail!("{}", faults.join("\n"));
    }
    Ok(())
}

fn direction(package: &Package) -> Vec<String> {
    let Some((_, allowed)) = DIRECTION.iter().find(|(name, _)| package.name.as_str() == *name) else {
        return vec![format!(
            "{}: say in xtask/src/dependencies.rs what this crate may depend on",
            package.name
        )];
    };
    package
        .dependencies
        .iter()
        .filter(|dependency| dependency.path.is_some() && dependency.kind != DependencyKind::Development)
        .filter(|dependency| !allowed.contains(&dependency.name.as_str()))
        .map(|dependency| format!("{} may not depend on {}", package.name, dependency.name))
        .collect()
}

fn licence(package: &Package) -> Option<String> {
    let text = package.license.as_deref().unwrap_or_default();
    (!allowed(text))
        .then(|| format!("{} {}: licence {text:?} is not on the list", package.name, package.version))
}

fn allowed(licence: &str) -> bool {
    Expression::parse_mode(licence, ParseMode::LAX).is_ok_and(|expression| {
        expression.evaluate(|required| LICENCES.contains(&required.to_string().as_str()))
    })
}

fn source(package: &Package) -> Option<String> {
    let source = package.source.as_ref().map(ToString::to_string).unwrap_or_default();
    (!source.starts_with("registry+"))
        .then(|| format!("{} {}: comes from {source:?}, not from a registry", package.name, package.version))
}

#[cfg(test)]
mod tests {
    use super::allowed;

    #[test]
    fn licences() {
        for good in ["MIT", "MIT OR Apache-2.0", "MIT/GPL-3.0", "(MIT OR ISC) AND Unicode-3.0"] {
            assert!(allowed(good), "{good}");
        }
        for bad in ["", "GPL-3.0-only", "MIT AND GPL-3.0", "Apache-2.0 WITH GCC-exception-2.0", "free"] {
            assert!(!allowed(bad), "{bad}");
        }
    }
}
