//! What a Debian package says of itself: its control file, and its copyright file where that is machine-readable (the
//! specification "copyright-format 1.0", known as DEP-5).
//!
//! Short names of licences are turned into those of SPDX. What SPDX has no name for becomes a `LicenseRef-` with the text
//! that the package brings. Files in other forms say nothing here: prose is not guessed at.

use std::collections::{BTreeMap, BTreeSet};

use spdx::Expression;
use trainyard_spec::image::Platform;
use trainyard_spec::lock::LockedDeb;

use super::facts::{Kind, Package};
use super::inventory::{archive, deb_id, package};
use super::purl;
use crate::index::deb822::Paragraphs;

/// Most paragraphs of a copyright file.
const MOST_PARAGRAPHS: usize = 10_000;

/// Describes a package that is in an image.
pub(super) fn describe(name: &str, locked: &LockedDeb, control: &str, platform: Platform) -> Package {
    let fields = Paragraphs::new(control.as_bytes()).next().and_then(Result::ok).unwrap_or_default();
    let field = |key: &str| fields.get(key).map(String::as_str);
    let architecture = field("architecture").unwrap_or(platform.architecture());
    let source = field("source").unwrap_or(name);
    let (source, version) = match source.split_once('(') {
        Some((source, version)) => (source.trim(), version.trim_end_matches(')').trim()),
        None => (source.trim(), locked.version.as_str()),
    };
    let supplier = field("maintainer").map(str::to_owned);
    // Ubuntu puts its own name there, in every package.
    let is_ubuntu = supplier.as_ref().is_some_and(|name| name.to_ascii_lowercase().contains("ubuntu"));
    let distribution = if is_ubuntu { "ubuntu" } else { "debian" };
    let depends = ["pre-depends", "depends"].into_iter().filter_map(field);
    // Of alternatives each counts: those that are not in the image are left out later.
    let needs = depends.flat_map(|list| list.split([',', '|'])).filter_map(|one| {
        one.trim().split([' ', '(', ':', '[', '\n']).next().filter(|name| !name.is_empty()).map(deb_id)
    });
    Package {
        purl: Some(purl("deb", Some(distribution), name, &locked.version, &[("arch", architecture)])),
        needs: needs.collect(),
        supplier,
        source: Some((source.to_owned(), version.to_owned())),
        archive: Some(archive(&locked.file)),
        ..package(Kind::Deb, name, Some(&locked.version))
    }
}

/// Describes a package of which objects are linked into programs, and that is not in the image.
pub(super) fn linked(name: &str, locked: &LockedDeb) -> Package {
    let file = locked.file.name.trim_end_matches(".deb");
    let architecture = file.rsplit('_').next().unwrap_or("all");
    Package {
        purl: Some(purl("deb", Some("debian"), name, &locked.version, &[("arch", architecture)])),
        licence_note: Some(
            "linked into programs of the image; the package's own copyright file is not in it".to_owned(),
        ),
        archive: Some(archive(&locked.file)),
        ..package(Kind::Deb, name, Some(&locked.version))
    }
}

/// The licence of a package, as its copyright file says it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Licence {
    /// SPDX expression.
    pub(super) expression: String,
    /// The texts of those in it that SPDX has no name for.
    pub(super) texts: BTreeMap<String, String>,
}

/// Reads a copyright file; none where it is not machine-readable.
pub(super) fn licence(package: &str, text: &str) -> Option<Licence> {
    let mut paragraphs = Paragraphs::new(text.as_bytes())
        .take(MOST_PARAGRAPHS)
        .collect::<Result<Vec<_>, _>>()
        .ok()?
        .into_iter();
    let header = paragraphs.next()?;
    header.get("format").filter(|format| format.contains("copyright-format/1"))?;
    let (mut of_files, mut texts) = (BTreeSet::new(), BTreeMap::new());
    for paragraph in paragraphs.chain([header]) {
        let Some(field) = paragraph.get("license") else { continue };
        let (name, text) = field.split_once('\n').unwrap_or((field, ""));
        if !text.is_empty() {
            texts.insert(name.trim().to_ascii_lowercase(), text.to_owned());
        }
        // A paragraph of its own gives the text of a name, and says of no file that it has it.
        if paragraph.contains_key("files") || paragraph.contains_key("format") {
            of_files.insert(name.trim().to_owned());
        }
    }
    let mut used = BTreeMap::new();
    let mut parts: BTreeSet<String> = BTreeSet::new();
    for name in of_files.iter().filter(|name| !name.is_empty()) {
        parts.insert(expression(name, package, &texts, &mut used));
    }
    let several = parts.len() > 1;
    let parts = parts
        .into_iter()
        .map(|part| if several && part.contains(" OR ") { format!("({part})") } else { part });
    let expression = parts.collect::<Vec<_>>().join(" AND ");
    // What does not make an expression was no licence of the format either.
    Expression::parse(&expression).ok()?;
    Some(Licence { expression, texts: used })
}

/// Turns `A or B, and C` into `(A OR B) AND C`.
fn expression(
    licence: &str,
    package: &str,
    texts: &BTreeMap<String, String>,
    used: &mut BTreeMap<String, String>,
) -> String {
    let mut all = String::new();
    for (index, piece) in licence.split(',').map(str::trim).filter(|piece| !piece.is_empty()).enumerate() {
        let words: Vec<&str> = piece.split_whitespace().collect();
        let (joined, words) = match words.as_slice() {
            [first, rest @ ..] if first.eq_ignore_ascii_case("and") => (" AND ", rest),
            [first, rest @ ..] if first.eq_ignore_ascii_case("or") => (" OR ", rest),
            all => (" AND ", all),
        };
        let mut piece = String::new();
        let mut name: Vec<&str> = Vec::new();
        for word in words.iter().copied().chain(["and"]) {
            let joined = match word.to_ascii_lowercase().as_str() {
                "and" => " AND ",
                "or" => " OR ",
                _ => {
                    name.push(word);
                    continue;
                }
            };
            piece += &term(&std::mem::take(&mut name).join(" "), package, texts, used);
            piece += joined;
        }
        let piece = piece.strip_suffix(" AND ").unwrap_or(&piece);
        all = match index {
            0 => piece.to_owned(),
            _ => format!("({all}){joined}({piece})"),
        };
    }
    all
}

/// One licence, perhaps `with NAME exception`.
fn term(
    name: &str,
    package: &str,
    texts: &BTreeMap<String, String>,
    used: &mut BTreeMap<String, String>,
) -> String {
    if name.is_empty() {
        return String::new();
    }
    let (base, exception) = name.split_once(" with ").map_or((name, None), |(base, with)| (base, Some(with)));
    match (spdx_name(base), exception.map(spdx_exception)) {
        (Some(licence), None) => return licence.to_owned(),
        (Some(licence), Some(Some(exception))) => return format!("{licence} WITH {exception}"),
        _ => {}
    }
    let plain: String =
        name.chars().map(|one| if one.is_ascii_alphanumeric() || one == '.' { one } else { '-' }).collect();
    let reference =
        format!("LicenseRef-{}-{plain}", package.replace(|one: char| !one.is_ascii_alphanumeric(), "-"));
    let text = texts.get(&name.to_ascii_lowercase()).cloned();
    let text = text
        .unwrap_or_else(|| format!("{name} (the copyright file of {package} names it and gives no text)"));
    used.insert(reference.clone(), text);
    reference
}

/// SPDX's name of a licence that the format has a short name for.
fn spdx_name(name: &str) -> Option<&'static str> {
    let lower = name.to_ascii_lowercase();
    let renamed = match lower.as_str() {
        "expat" => "MIT",
        "artistic" => "Artistic-1.0",
        "zope-1.1" => "ZPL-1.1",
        "zope-2.0" => "ZPL-2.0",
        "zope-2.1" => "ZPL-2.1",
        _ => "",
    };
    if let Some(id) = spdx::license_id(renamed) {
        return Some(id.name);
    }
    // GPL-2+, LGPL-2.1, GFDL-NIV-1.3+: a version with or without its zero, and later ones by a plus sign.
    if let Some((family, version)) = lower.rsplit_once('-').filter(|(family, _)| is_gnu(family)) {
        let (version, later) =
            version.strip_suffix('+').map_or((version, "only"), |version| (version, "or-later"));
        let version = if version.contains('.') { version.to_owned() } else { format!("{version}.0") };
        let name = match family.strip_suffix("-niv") {
            Some(family) => format!("{family}-{version}-no-invariants-{later}"),
            None => format!("{family}-{version}-{later}"),
        };
        return known(&name);
    }
    known(&lower)
}

fn is_gnu(family: &str) -> bool {
    matches!(family, "gpl" | "lgpl" | "agpl" | "gfdl" | "gfdl-niv")
}

fn known(lower: &str) -> Option<&'static str> {
    spdx::identifiers::LICENSES
        .iter()
        .map(|licence| licence.name)
        .find(|name| name.eq_ignore_ascii_case(lower))
}

/// SPDX's name of `NAME exception`.
fn spdx_exception(name: &str) -> Option<&'static str> {
    let lower = name.to_ascii_lowercase();
    let stem = lower.strip_suffix(" exception").unwrap_or(&lower).replace(' ', "-");
    let renamed = match stem.as_str() {
        "gcc-runtime-library" => "GCC-exception-3.1",
        "autoconf" => "Autoconf-exception-2.0",
        "bison" => "Bison-exception-2.2",
        "classpath" => "Classpath-exception-2.0",
        "llvm" => "LLVM-exception",
        "libtool" => "Libtool-exception",
        "font" => "Font-exception-2.0",
        _ => return None,
    };
    spdx::exception_id(renamed).map(|id| id.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(licences: &[&str], expect: &str) {
        let mut text =
            "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n".to_owned();
        for (index, licence) in licences.iter().enumerate() {
            text += &format!("\nFiles: {index}/*\nCopyright: somebody\nLicense: {licence}\n");
        }
        let found = licence("libx+", &text).map(|licence| licence.expression);
        assert_eq!(found.as_deref(), (!expect.is_empty()).then_some(expect), "{licences:?}");
    }

    #[test]
    fn short_names_become_those_of_spdx() {
        check(&["Expat"], "MIT");
        check(&["GPL-2+"], "GPL-2.0-or-later");
        check(&["LGPL-2.1"], "LGPL-2.1-only");
        check(&["GFDL-NIV-1.3+"], "GFDL-1.3-no-invariants-or-later");
        check(&["BSD-3-clause", "zlib", "Expat", "zlib"], "BSD-3-Clause AND MIT AND Zlib");
        check(
            &["GPL-2+ or Artistic-2.0, and BSD-3-clause"],
            "(GPL-2.0-or-later OR Artistic-2.0) AND (BSD-3-Clause)",
        );
        check(&["GPL-3+ with GCC-Runtime-Library exception"], "GPL-3.0-or-later WITH GCC-exception-3.1");
        check(&["Expat or GPL-2", "ISC"], "ISC AND (MIT OR GPL-2.0-only)");
        check(&["GPL-2 with odd exception"], "LicenseRef-libx--GPL-2-with-odd-exception");
        check(&["public-domain and ISC"], "LicenseRef-libx--public-domain AND ISC");
        // What is no expression is not made one.
        check(&["and"], "");
        check(&[], "");
    }

    #[test]
    fn texts_are_those_that_the_file_gives() {
        let text = "Format: http://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\n\
            Files: *\nLicense: permissive and Expat\n\nFiles: a\nLicense: odd\n Do as you like.\n .\n Twice.\n\n\
            License: permissive\n Permission to do\n anything.\n\nLicense: unused\n Not here.\n";
        let found = licence("demo", text).unwrap();
        assert_eq!(found.expression, "LicenseRef-demo-odd AND LicenseRef-demo-permissive AND MIT");
        let texts: Vec<_> = found.texts.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
        assert_eq!(
            texts,
            [
                ("LicenseRef-demo-odd", "Do as you like.\n.\nTwice."),
                ("LicenseRef-demo-permissive", "Permission to do\nanything."),
            ]
        );
        for prose in [
            "This package was debianized by\n",
            "",
            "License: MIT\n",
            "Format: other\n\nFiles: *\nLicense: MIT\n",
        ] {
            assert_eq!(licence("demo", prose), None, "{prose:?}");
        }
    }

    #[test]
    fn control_files_say_source_and_needs() {
        let locked = LockedDeb {
            version: "12.2.0-14".to_owned(),
            file: trainyard_spec::lock::LockedFile {
                name: "pool/main/g/gcc-12/libstdc++6_12.2.0-14_amd64.deb".to_owned(),
                size: 1,
                sha256: trainyard_spec::Digest::of(b"x"),
            },
            objects: BTreeMap::new(),
        };
        let control = "Package: libstdc++6\nSource: gcc-12 (12.2.0-1)\nArchitecture: amd64\n\
            Maintainer: Debian GCC Maintainers <gcc@debian.test>\nPre-Depends: libc6 (>= 2.36)\n\
            Depends: gcc-12-base (= 12.2.0-14), libgcc-s1:any (>= 4.2) | libgcc1\n";
        let found = describe("libstdc++6", &locked, control, Platform::Amd64);
        assert_eq!(found.purl.as_deref(), Some("pkg:deb/debian/libstdc%2B%2B6@12.2.0-14?arch=amd64"));
        assert_eq!(found.source, Some(("gcc-12".to_owned(), "12.2.0-1".to_owned())));
        let needs: Vec<_> = found.needs.iter().map(String::as_str).collect();
        assert_eq!(needs, ["deb:gcc-12-base", "deb:libc6", "deb:libgcc-s1", "deb:libgcc1"]);
        assert_eq!(found.archive.unwrap().name, "libstdc++6_12.2.0-14_amd64.deb");
        let ubuntu = describe(
            "a",
            &locked,
            "Maintainer: Ubuntu Developers <x@y>\nArchitecture: all\n",
            Platform::Amd64,
        );
        assert_eq!(ubuntu.purl.as_deref(), Some("pkg:deb/ubuntu/a@12.2.0-14?arch=all"));
        assert_eq!(ubuntu.source.unwrap(), ("a".to_owned(), "12.2.0-14".to_owned()));
        let linked = linked("libc6-dev", &locked);
        assert_eq!(linked.purl.as_deref(), Some("pkg:deb/debian/libc6-dev@12.2.0-14?arch=amd64"));
    }
}
