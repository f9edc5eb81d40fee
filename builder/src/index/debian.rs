//! The package lists of Debian archives: which packages there are, and what they need (Debian Policy, chapter 7).
//!
//! A list counts if its suite's signed Release file has its sha256, or apt is told to trust the archive without. Needed is
//! what `Pre-Depends` and `Depends` say, excluded what `Conflicts` and `Breaks` say. Deliberately left out:
//! recommendations, and packages that are essential and that nothing names.

use std::collections::BTreeMap;
use std::io::{BufReader, Cursor, Read};

use debversion::Version;
use trainyard_spec::Digest;
use trainyard_spec::lock::LockedFile;

use super::Error;
use super::apt::{AptSource, Trust};
use super::deb822::Paragraphs;
use super::release::{Asking, Release};
use crate::decompress::decompress;
use crate::http::Endpoint;
use crate::solve::{Exclusion, Id, Need, Needs, Packages};

/// Most bytes of a package list, packed and unpacked.
const LIST_LIMIT: u64 = 256 << 20;
/// Versions named when none fits.
const VERSIONS_NAMED: usize = 4;

/// A binary package in a package list.
#[derive(Debug)]
struct Listed {
    name: Box<str>,
    version: Version,
    text: Box<str>,
    /// None where the list does not say it in a form that can be used.
    file: Option<Box<LockedFile>>,
    needs: Box<str>,
    excludes: Box<str>,
    /// Which of the lists it is in.
    list: usize,
}

/// The packages of all archives, for one architecture.
#[derive(Debug, Default)]
pub(crate) struct Lists {
    packages: Vec<Listed>,
    /// Which packages provide a name, and at which version where they say so.
    provided: BTreeMap<Box<str>, Vec<(Id, Option<Version>)>>,
    /// The address of each list.
    lists: Vec<String>,
    /// Whether newer versions from each list are taken without being asked for.
    automatic: Vec<bool>,
}

impl Lists {
    /// Reads the lists of all archives.
    ///
    /// # Errors
    /// When a server fails, a list makes no sense, or an archive is not signed as it has to be.
    pub(crate) fn load(
        sources: &[AptSource],
        architecture: &str,
        asking: &Asking<'_>,
    ) -> Result<Self, Error> {
        let mut found = Self::default();
        let mut provides = Vec::new();
        let is_asked = |source: &&AptSource| {
            source.architectures.is_empty() || source.architectures.iter().any(|one| one == architecture)
        };
        for source in sources.iter().filter(is_asked) {
            for suite in &source.suites {
                let release = Release::of(source, suite, asking)?;
                if release.is_none() && source.trust != Trust::Unsigned {
                    found.lists.push(format!("{}dists/{suite}/ (it has no Release file)", source.root));
                    found.automatic.push(false);
                    continue;
                }
                let also_all = release.as_ref().is_some_and(|release| release.all_apart);
                for component in &source.components {
                    for architecture in [architecture, "all"].into_iter().take(1 + usize::from(also_all)) {
                        let folder = format!("{component}/binary-{architecture}/");
                        found.add(&source.root, suite, &folder, release.as_ref(), &mut provides, asking)?;
                    }
                }
            }
        }
        found.sort(provides);
        Ok(found)
    }

    fn add(
        &mut self,
        root: &Endpoint,
        suite: &str,
        folder: &str,
        release: Option<&Release>,
        provides: &mut Vec<Box<str>>,
        asking: &Asking<'_>,
    ) -> Result<(), Error> {
        self.lists.push(format!("{root}dists/{suite}/{folder}"));
        self.automatic.push(release.is_none_or(|release| !release.not_automatic));
        for name in ["Packages.xz", "Packages.gz"] {
            let path = format!("{folder}{name}");
            let url = format!("{root}dists/{suite}/{path}");
            let body = match release {
                Some(release) => release.file(root, suite, &path, LIST_LIMIT, asking)?,
                None => unsigned(root, &format!("dists/{suite}/{path}"), asking)?,
            };
            let Some(body) = body else { continue };
            if let Some(list) = self.lists.last_mut() {
                list.clone_from(&url);
            }
            return self
                .read(&body, provides)
                .map_err(|error| Error::Page { url, message: error.to_string() });
        }
        Ok(())
    }

    fn read(&mut self, packed: &[u8], provides: &mut Vec<Box<str>>) -> std::io::Result<()> {
        let mut unpacked = decompress(Cursor::new(packed))?.take(LIST_LIMIT);
        for paragraph in Paragraphs::new(BufReader::new(&mut unpacked)) {
            let mut paragraph = paragraph?;
            let mut take = |key: &str| paragraph.remove(key).unwrap_or_default();
            let (name, text) = (take("package"), take("version"));
            if name.is_empty() || text.is_empty() {
                return Err(std::io::Error::other(format!("{name:?} lacks a Package or Version")));
            }
            // A version that is none cannot be asked for.
            let Ok(version) = text.parse::<Version>() else { continue };
            let file = file(&take("filename"), &take("size"), &take("sha256"));
            let needs = joined([take("pre-depends"), take("depends")]);
            let excludes = joined([take("conflicts"), take("breaks")]);
            provides.push(take("provides").into());
            self.packages.push(Listed {
                name: name.into(),
                version,
                text: text.into(),
                file: file.map(Box::new),
                needs,
                excludes,
                list: self.lists.len() - 1,
            });
        }
        match unpacked.limit() {
            0 => Err(std::io::Error::other(format!("the list has more than {LIST_LIMIT} bytes"))),
            _ => Ok(()),
        }
    }

    /// Puts packages in order, each version of each name once, from the first list that has it.
    fn sort(&mut self, provides: Vec<Box<str>>) {
        let mut packages: Vec<_> = std::mem::take(&mut self.packages).into_iter().zip(provides).collect();
        // The sort is stable: of one version, the first list's comes first.
        let automatic = |package: &Listed| self.automatic.get(package.list).copied().unwrap_or(true);
        packages.sort_by(|(a, _), (b, _)| {
            let rank = automatic(b).cmp(&automatic(a));
            a.name.cmp(&b.name).then(rank).then_with(|| b.version.cmp(&a.version))
        });
        packages
            .dedup_by(|(later, _), (first, _)| later.name == first.name && later.version == first.version);
        for (package, provides) in packages {
            let id = self.packages.len();
            for provided in provides.split(',').filter_map(Relation::parse) {
                let version = provided.constraint.map(|(_, version)| version);
                self.provided.entry(provided.name.into()).or_default().push((id, version));
            }
            self.packages.push(package);
        }
    }

    /// The packages of a name, the newest first.
    fn named(&self, name: &str) -> std::ops::Range<Id> {
        let start = self.packages.partition_point(|package| &*package.name < name);
        let length = self.packages[start..].partition_point(|package| &*package.name == name);
        start..start + length
    }

    /// What is asked for by a package's name, and exact version where one is given.
    ///
    /// # Errors
    /// When no list has it.
    pub(crate) fn ask(&self, name: &str, version: Option<&str>) -> Result<Need, Error> {
        let fits = |id: &Id| version.is_none_or(|version| &*self.packages[*id].text == version);
        let any_of: Vec<Id> = self.named(name).filter(fits).collect();
        if any_of.is_empty() {
            return Err(Error::NotFound {
                package: name.to_owned(),
                version: version.unwrap_or("(any version)").to_owned(),
                looked: self.lists.clone(),
            });
        }
        Ok(Need { what: name.to_owned(), any_of, only_with: Vec::new(), there_is: String::new() })
    }

    /// The file of a package.
    ///
    /// # Errors
    /// When its list does not say what is needed to get it.
    pub(crate) fn file(&self, id: Id) -> Result<&LockedFile, Error> {
        let package = &self.packages[id];
        package.file.as_deref().ok_or_else(|| Error::Page {
            url: self.lists[package.list].clone(),
            message: format!("{} lacks a usable Filename, Size or SHA256", package.name),
        })
    }

    /// The packages that a relation names: those of that name, newest first, and then those that provide it, by name.
    fn fitting(&self, relation: &Relation<'_>) -> Vec<Id> {
        let mut fitting: Vec<Id> =
            self.named(relation.name).filter(|id| relation.fits(Some(&self.packages[*id].version))).collect();
        for (id, version) in self.provided.get(relation.name).into_iter().flatten() {
            if relation.fits(version.as_ref()) && !fitting.contains(id) {
                fitting.push(*id);
            }
        }
        fitting
    }

    /// What there is of the names in a dependency, for people.
    fn there_is(&self, alternatives: &[Relation<'_>]) -> String {
        let mut known = Vec::new();
        for relation in alternatives {
            let named = self.named(relation.name).map(|id| (id, None));
            let provided = self.provided.get(relation.name).into_iter().flatten();
            let provided = provided.map(|(id, version)| (*id, Some(version.as_ref())));
            known.extend(named.chain(provided).map(|(id, provided)| {
                let of = format!("{} {}", self.packages[id].name, self.packages[id].text);
                match provided {
                    None => of,
                    Some(None) => format!("{of} (which provides {} without a version)", relation.name),
                    Some(Some(version)) => format!("{of} (which provides {} {version})", relation.name),
                }
            }));
        }
        if known.is_empty() {
            return "which no archive has".to_owned();
        }
        known.truncate(VERSIONS_NAMED);
        format!("and there is only {}", known.join(", "))
    }
}

impl Packages for Lists {
    fn count(&self) -> usize {
        self.packages.len()
    }

    fn name(&self, id: Id) -> &str {
        &self.packages[id].name
    }

    fn version(&self, id: Id) -> &str {
        &self.packages[id].text
    }

    fn dependencies(&self, id: Id) -> Result<Needs, String> {
        let package = &self.packages[id];
        let mut found = Needs::default();
        for group in groups(&package.needs) {
            let alternatives: Vec<_> = group.split('|').map(related).collect::<Result<_, _>>()?;
            let mut any_of = Vec::new();
            for relation in &alternatives {
                any_of.extend(
                    self.fitting(relation).into_iter().filter(|id| !any_of.contains(id)).collect::<Vec<_>>(),
                );
            }
            let there_is = if any_of.is_empty() { self.there_is(&alternatives) } else { String::new() };
            found.needs.push(Need { what: group.to_owned(), any_of, only_with: Vec::new(), there_is });
        }
        for group in groups(&package.excludes) {
            let mut packages = self.fitting(&related(group)?);
            packages.retain(|other| *other != id);
            found.excludes.push(Exclusion { what: group.to_owned(), packages });
        }
        Ok(found)
    }
}

/// Gets a list that nothing is known of. None where the archive has no such list.
fn unsigned(root: &Endpoint, path: &str, asking: &Asking<'_>) -> Result<Option<Vec<u8>>, Error> {
    let endpoint = root
        .join(path)
        .map_err(|error| Error::Page { url: format!("{root}{path}"), message: error.to_string() })?;
    match asking.client.page(&endpoint, "*/*", LIST_LIMIT, asking.progress) {
        Ok(page) => Ok(Some(page.body)),
        Err(error) if error.is_absent() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn joined(fields: [String; 2]) -> Box<str> {
    let [first, second] = fields;
    match (first.is_empty(), second.is_empty()) {
        (_, true) => first.into(),
        (true, _) => second.into(),
        _ => format!("{first}, {second}").into(),
    }
}

fn related(text: &str) -> Result<Relation<'_>, String> {
    Relation::parse(text).ok_or_else(|| format!("{:?} is no relation to a package", text.trim()))
}

fn groups(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|group| !group.is_empty())
}

fn file(path: &str, size: &str, sha256: &str) -> Option<LockedFile> {
    let clean = path.split('/').all(|part| !part.is_empty() && part != "." && part != "..");
    clean.then_some(())?;
    Some(LockedFile {
        name: path.to_owned(),
        size: size.parse().ok()?,
        sha256: Digest::from_hex(sha256).ok()?,
    })
}

/// A relation to one package, such as `libc6 (>= 2.34)`.
#[derive(Debug, PartialEq, Eq)]
struct Relation<'a> {
    name: &'a str,
    constraint: Option<(Comparison, Version)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Comparison {
    Earlier,
    EarlierOrEqual,
    Equal,
    LaterOrEqual,
    Later,
}

impl<'a> Relation<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let text = text.trim();
        let end = text.find(|c: char| c.is_whitespace() || c == '(').unwrap_or(text.len());
        let (name, rest) = text.split_at(end);
        // All packages are of one architecture here.
        let name = name.split_once(':').map_or(name, |(name, _)| name);
        let rest = rest.trim();
        if name.is_empty() {
            return None;
        }
        if rest.is_empty() {
            return Some(Self { name, constraint: None });
        }
        let inside = rest.strip_prefix('(')?.strip_suffix(')')?.trim();
        let end = inside.find(|c: char| !matches!(c, '<' | '>' | '='))?;
        let (sign, version) = inside.split_at(end);
        let comparison = match sign {
            "<<" => Comparison::Earlier,
            // `<` and `>` are old and mean what they do not say.
            "<=" | "<" => Comparison::EarlierOrEqual,
            "=" => Comparison::Equal,
            ">=" | ">" => Comparison::LaterOrEqual,
            ">>" => Comparison::Later,
            _ => return None,
        };
        Some(Self { name, constraint: Some((comparison, version.trim().parse().ok()?)) })
    }

    /// Whether a version fits. What is provided without a version fits only where none is asked for.
    fn fits(&self, version: Option<&Version>) -> bool {
        let Some((comparison, wanted)) = &self.constraint else { return true };
        let Some(version) = version else { return false };
        match comparison {
            Comparison::Earlier => version < wanted,
            Comparison::EarlierOrEqual => version <= wanted,
            Comparison::Equal => version == wanted,
            Comparison::LaterOrEqual => version >= wanted,
            Comparison::Later => version > wanted,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::solve::solve;

    /// Lists with the packages of a text in the format of a package list.
    fn lists(text: &str) -> Lists {
        let mut found = Lists { lists: vec!["list".to_owned()], ..Lists::default() };
        let mut provides = Vec::new();
        found.read(text.as_bytes(), &mut provides).unwrap();
        found.sort(provides);
        found
    }

    /// A list from lines `name version; Field: value; ...`.
    fn list(lines: &[&str]) -> Lists {
        let paragraphs = lines.iter().map(|line| {
            let mut parts = line.split("; ");
            let (name, version) = parts.next().unwrap().split_once(' ').unwrap();
            let fields: String = parts.map(|field| format!("{field}\n")).collect();
            format!("Package: {name}\nVersion: {version}\n{fields}\n")
        });
        lists(&paragraphs.collect::<String>())
    }

    fn taken(lists: &Lists, asked: &[&str]) -> Result<Vec<String>, String> {
        let asked: Vec<_> = asked
            .iter()
            .map(|asked| {
                let (name, version) = asked.split_once('=').map_or((*asked, None), |(n, v)| (n, Some(v)));
                lists.ask(name, version).unwrap()
            })
            .collect();
        let found = solve(lists, &asked)?;
        Ok(found.iter().map(|id| format!("{} {}", lists.name(*id), lists.version(*id))).collect())
    }

    #[test]
    fn closures() {
        let all = list(&[
            "app 1.0; Pre-Depends: base; Depends: lib (>= 2), shell | editor, mail; Recommends: extra",
            "app 0.9; Depends: nothing",
            "base 1:1; Depends: lib:any",
            "lib 2.0~rc1",
            "lib 2.1; Depends: base",
            "lib 3.0; Breaks: app (<< 2)",
            "editor 1; Provides: vi (= 8)",
            "shell 1; Conflicts: base (<= 1:1)",
            "postfix 3; Provides: mail; Conflicts: mail",
            "exim 4; Provides: mail; Depends: absent",
            "reader 1; Depends: vi (>= 7)",
            "picky 1; Depends: vi (>= 9) | lib (= 2.1)",
            "extra 1",
            "either 1; Depends: editor | lib",
            "both 1; Depends: either, lib",
        ]);
        for (asked, expect) in [
            // The newest lib is excluded, so is the first alternative, and one mail program needs what is absent.
            (vec!["app"], vec!["app 1.0", "base 1:1", "editor 1", "lib 2.1", "postfix 3"]),
            (vec!["lib"], vec!["lib 3.0"]),
            (vec!["lib=2.0~rc1"], vec!["lib 2.0~rc1"]),
            (vec!["reader"], vec!["editor 1", "reader 1"]),
            (vec!["picky"], vec!["base 1:1", "lib 2.1", "picky 1"]),
            (vec!["either"], vec!["editor 1", "either 1"]),
        ] {
            for _ in 0..20 {
                assert_eq!(taken(&all, &asked).unwrap(), expect, "{asked:?}");
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_explained() {
        let all = list(&[
            "app 1.0; Depends: middle (>= 1)",
            "middle 1.5; Depends: lib (>= 2), other",
            "lib 1.9",
            "lib 1.8",
            "other 1",
            "lonely 1; Depends: nobody | nothing",
            "virtual 1; Depends: vi (>= 9)",
            "editor 8; Provides: vi (= 8)",
            "old 7; Provides: vi",
            "left 1; Depends: shared (= 1)",
            "right 1; Depends: shared (= 2)",
            "shared 1",
            "shared 2",
            "enemy 1; Conflicts: other",
            "odd 1; Depends: what (is) this",
        ]);
        for (asked, expect) in [
            (
                vec!["app"],
                "app 1.0 needs middle (>= 1); middle 1.5 needs lib (>= 2), and there is only lib 1.9, lib 1.8",
            ),
            (vec!["lonely"], "lonely 1 needs nobody | nothing, which no archive has"),
            (
                vec!["virtual"],
                "virtual 1 needs vi (>= 9), and there is only editor 8 (which provides vi 8), \
                 old 7 (which provides vi without a version)",
            ),
            (vec!["enemy", "other"], "enemy 1 excludes other, which is other 1"),
            (vec!["odd"], "odd 1 cannot be taken: \"what (is) this\" is no relation to a package"),
        ] {
            assert_eq!(taken(&all, &asked).unwrap_err(), expect, "{asked:?}");
        }
        let both = taken(&all, &["left", "right"]).unwrap_err();
        for part in ["left 1 needs shared (= 1)", "right 1 needs shared (= 2)"] {
            assert!(both.contains(part), "{both}");
        }
        let chain = taken(&all, &["enemy", "middle"]).unwrap_err();
        assert!(chain.contains("middle 1.5 needs"), "{chain}");
    }

    #[test]
    fn relations() {
        for (text, version, fits) in [
            ("a", None, true),
            ("a (>= 1)", None, false),
            ("a:any (>= 1.0-1)", Some("1.0-1"), true),
            ("a(<<1:0)", Some("9"), true),
            ("a (= 2)", Some("2"), true),
            ("a (>> 2~)", Some("2~~"), false),
            ("a (<= 2)", Some("2.0"), false),
        ] {
            let version: Option<Version> = version.map(|version| version.parse().unwrap());
            let relation = Relation::parse(text).unwrap();
            assert_eq!((relation.name, relation.fits(version.as_ref())), ("a", fits), "{text}");
        }
        for text in ["", "(>= 1)", "a (1)", "a (>= )", "a (== 1)", "a >= 1", "a (>= 1) b"] {
            assert_eq!(Relation::parse(text), None, "{text}");
        }
    }
}
