//! The crates that are linked into programs, from what `cargo tree` says and the checksums of `Cargo.lock`.

use std::collections::{BTreeMap, BTreeSet};

use spdx::{Expression, ParseMode};
use trainyard_spec::Digest;
use trainyard_spec::toml::{self, Collector, Validate};

use super::facts::{Archive, Kind, Package};
use super::inventory::package;
use super::purl;

/// Crates that are linked into programs.
#[derive(Debug, Default)]
pub(super) struct Linked {
    /// Ids of those that the programs are of.
    pub(super) roots: BTreeSet<String>,
    /// All, by id.
    pub(super) packages: BTreeMap<String, Package>,
}

/// The part of `Cargo.lock` that matters here.
#[derive(Debug, toml_spanner::Toml)]
#[toml(FromToml, ignore_unknown_fields)]
struct CargoLock {
    #[toml(default)]
    package: Vec<LockedCrate>,
}

#[derive(Debug, toml_spanner::Toml)]
#[toml(FromToml, ignore_unknown_fields)]
struct LockedCrate {
    name: String,
    version: String,
    checksum: Option<String>,
}

impl Validate for CargoLock {
    fn validate(&self, _: &mut Collector<'_, '_>) {}
}

/// Reads lines of `cargo tree --prefix depth --format "{p}\t{l}"` (see [`crate::input::cargo::tree`]).
pub(super) fn linked(tree: &str, cargo_lock: &str) -> Linked {
    // cargo has just read the same file.
    let locked: Option<CargoLock> = toml::read("Cargo.lock", cargo_lock).ok();
    let checksums: BTreeMap<(String, String), String> = locked
        .into_iter()
        .flat_map(|lock| lock.package)
        .filter_map(|one| Some(((one.name, one.version), one.checksum?)))
        .collect();
    let mut found = Linked::default();
    // Ids from the root to the crate that the last line was about.
    let mut above: Vec<String> = Vec::new();
    for line in tree.lines() {
        let Some(Line { depth, name, version, source, licence }) = Line::of(line) else { continue };
        let id = format!("crate:{name}@{version}");
        above.truncate(depth);
        match above.last().and_then(|parent| found.packages.get_mut(parent)) {
            Some(parent) => drop(parent.needs.insert(id.clone())),
            None => drop(found.roots.insert(id.clone())),
        }
        above.push(id.clone());
        found.packages.entry(id).or_insert_with(|| {
            let checksum = checksums.get(&(name.to_owned(), version.to_owned()));
            let (licence, licence_note) = expression(licence);
            Package {
                licence,
                licence_note,
                purl: Some(match source {
                    Source::Registry => purl("cargo", None, name, version, &[]),
                    Source::Git(url) => {
                        purl("cargo", None, name, version, &[("vcs_url", &format!("git+{url}"))])
                    }
                    Source::Workspace => purl("generic", None, name, version, &[]),
                }),
                archive: checksum
                    .and_then(|hex| Digest::from_hex(hex).ok())
                    .map(|sha256| Archive { name: format!("{name}-{version}.crate"), sha256 }),
                ..package(Kind::Crate, name, Some(version))
            }
        });
    }
    found
}

/// The licence that a crate declares, as an expression; what is none is said as it stands.
fn expression(declared: &str) -> (Option<String>, Option<String>) {
    if declared.is_empty() {
        return (None, Some("the crate declares no licence expression".to_owned()));
    }
    // Crates of old separate alternatives by a slash.
    let canonical = Expression::canonicalize(declared).ok();
    let text = canonical.map(|changed| changed.unwrap_or_else(|| declared.to_owned()));
    match text.filter(|text| Expression::parse_mode(text, ParseMode::STRICT).is_ok()) {
        Some(text) => (Some(text), None),
        None => (None, Some(format!("the crate declares {declared:?}, which is no SPDX expression"))),
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Source<'a> {
    Registry,
    Git(&'a str),
    Workspace,
}

#[derive(Debug, PartialEq, Eq)]
struct Line<'a> {
    depth: usize,
    name: &'a str,
    version: &'a str,
    source: Source<'a>,
    licence: &'a str,
}

impl<'a> Line<'a> {
    /// `2serde v1.0.0 (SOURCE)<tab>LICENCE`, with ` (*)` behind it where what is below stands further up.
    fn of(line: &'a str) -> Option<Self> {
        let digits = line.find(|one: char| !one.is_ascii_digit())?;
        let depth = line[..digits].parse().ok()?;
        let (crate_, licence) = line[digits..].split_once('\t')?;
        let licence = licence.strip_suffix("(*)").unwrap_or(licence).trim();
        let (name, rest) = crate_.split_once(' ')?;
        let (version, source) = rest.split_once(' ').unwrap_or((rest, ""));
        let version = version.strip_prefix('v')?;
        let source = match source.trim().strip_prefix('(').and_then(|source| source.strip_suffix(')')) {
            Some(path) if path.starts_with('/') => Source::Workspace,
            Some(url) if url.contains("://") => Source::Git(url),
            _ => Source::Registry,
        };
        Some(Self { depth, name, version, source, licence })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TREE: &str = "0app v0.1.0 (/home/me/app)\tMIT\n\
        1serde v1.0.2\tMIT/Apache-2.0\n\
        2serde_core v1.0.2\tMIT OR Apache-2.0\n\
        1tool v2.0.0 (https://git.test/tool?rev=1#abc)\tLicense of mine\n\
        \n\
        0other v0.1.0 (/home/me/other)\t\n\
        1serde v1.0.2\tMIT/Apache-2.0 (*)\n";
    const LOCK: &str = "version = 4\n[[package]]\nname = \"serde\"\nversion = \"1.0.2\"\nsource = \"x\"\n\
        checksum = \"ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb\"\n";

    #[test]
    fn crates_and_what_they_need() {
        let Linked { roots, packages } = linked(TREE, LOCK);
        assert_eq!(roots.iter().collect::<Vec<_>>(), ["crate:app@0.1.0", "crate:other@0.1.0"]);
        let needs = |id: &str| packages[id].needs.iter().map(String::as_str).collect::<Vec<_>>();
        assert_eq!(needs("crate:app@0.1.0"), ["crate:serde@1.0.2", "crate:tool@2.0.0"]);
        assert_eq!(needs("crate:other@0.1.0"), ["crate:serde@1.0.2"]);
        assert_eq!(needs("crate:serde@1.0.2"), ["crate:serde_core@1.0.2"]);
        let serde = &packages["crate:serde@1.0.2"];
        assert_eq!(serde.licence.as_deref(), Some("MIT OR Apache-2.0"));
        assert_eq!(serde.archive.as_ref().unwrap().sha256, Digest::of(b"a"));
        assert_eq!(packages["crate:serde_core@1.0.2"].archive, None);
        for (id, purl) in [
            ("crate:serde@1.0.2", "pkg:cargo/serde@1.0.2"),
            ("crate:app@0.1.0", "pkg:generic/app@0.1.0"),
            (
                "crate:tool@2.0.0",
                "pkg:cargo/tool@2.0.0?vcs_url=git%2Bhttps:%2F%2Fgit.test%2Ftool%3Frev%3D1%23abc",
            ),
        ] {
            assert_eq!(packages[id].purl.as_deref(), Some(purl));
        }
        assert!(packages["crate:tool@2.0.0"].licence_note.as_ref().unwrap().contains("License of mine"));
        assert!(packages["crate:other@0.1.0"].licence.is_none());
        let said = format!("{packages:?}");
        assert!(!said.contains("/home/me"), "no path of a machine: {said}");
    }
}
