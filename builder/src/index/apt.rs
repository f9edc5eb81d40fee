//! apt's configuration, and the package lists of Debian archives.
//!
//! Left out for now: signatures of archives. A lock trusts the list it was made from, and pins every file by sha256.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Cursor, Read};
use std::path::Path;

use debversion::Version;
use trainyard_spec::Digest;
use url::Url;

use super::Error;
use crate::decompress::decompress;
use crate::http::{Client, Endpoint};
use crate::progress::Progress;

/// Most bytes of a package list, packed and unpacked.
const LIST_LIMIT: u64 = 256 << 20;

/// A Debian archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AptSource {
    /// The archive's root, below which `dists/` and `pool/` lie.
    pub root: Endpoint,
    /// Suites, such as a release's name.
    pub suites: Vec<String>,
    /// Components, such as `main`.
    pub components: Vec<String>,
    /// Architectures that it is asked for; empty for all.
    pub architectures: Vec<String>,
}

/// A binary package in a package list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Listed {
    pub(crate) version: String,
    pub(crate) path: String,
    pub(crate) size: u64,
    pub(crate) sha256: Digest,
}

pub(super) fn resolve(root: &Path) -> Result<Vec<AptSource>, Error> {
    let mut files = vec![root.join("etc/apt/sources.list")];
    let folder = root.join("etc/apt/sources.list.d");
    if folder.is_dir() {
        let entries =
            fs_err::read_dir(&folder).map_err(|source| Error::Read { path: folder.clone(), source })?;
        let mut parts: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        parts.sort();
        files.extend(parts);
    }
    let mut sources = Vec::new();
    for path in files {
        let parse = match path.extension().and_then(|extension| extension.to_str()) {
            Some("list") => parse_list,
            Some("sources") => parse_sources,
            _ => continue,
        };
        let text = match fs_err::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(source) => return Err(Error::Read { path, source }),
        };
        sources.extend(parse(&text));
    }
    Ok(sources)
}

/// Reads apt's one-line format. Lines of other kinds (`deb-src`, `cdrom:`, flat archives) are passed over.
pub fn parse_list(text: &str) -> Vec<AptSource> {
    let read = |line: &str| {
        let line = line.split('#').next()?.trim();
        let mut rest = line.strip_prefix("deb")?.strip_prefix([' ', '\t'])?.trim_start();
        let mut architectures = Vec::new();
        if let Some(options) = rest.strip_prefix('[') {
            let (options, after) = options.split_once(']')?;
            rest = after;
            let named = options.split_whitespace().filter_map(|option| option.strip_prefix("arch="));
            architectures = named.flat_map(|value| value.split(',')).map(str::to_owned).collect();
        }
        let mut words = rest.split_whitespace();
        let (uri, suite) = (words.next()?, words.next()?.to_owned());
        source(uri, vec![suite], words.map(str::to_owned).collect(), architectures)
    };
    text.lines().filter_map(read).collect()
}

/// Reads apt's deb822 format.
pub fn parse_sources(text: &str) -> Vec<AptSource> {
    let mut sources = Vec::new();
    let without_comments = text.lines().filter(|line| !line.starts_with('#')).collect::<Vec<_>>().join("\n");
    for paragraph in Paragraphs::new(without_comments.as_bytes()).map_while(Result::ok) {
        let words = |key: &str| -> Vec<String> {
            let value = paragraph.get(key).map_or("", String::as_str);
            value.split_whitespace().map(str::to_owned).collect()
        };
        // What apt takes for no.
        let disabled = words("enabled").first().is_some_and(|value| {
            ["no", "false", "without", "off", "disable", "0"].contains(&value.to_lowercase().as_str())
        });
        if disabled || !words("types").iter().any(|kind| kind == "deb") {
            continue;
        }
        let uris = words("uris");
        sources.extend(
            uris.iter()
                .filter_map(|uri| source(uri, words("suites"), words("components"), words("architectures"))),
        );
    }
    sources
}

fn source(
    uri: &str,
    suites: Vec<String>,
    components: Vec<String>,
    architectures: Vec<String>,
) -> Option<AptSource> {
    let url = Url::parse(uri).ok()?;
    // A suite that ends with a slash is a flat archive: it has no components and no pool.
    let regular = !components.is_empty() && suites.iter().all(|suite| !suite.ends_with('/'));
    (matches!(url.scheme(), "http" | "https") && regular).then(|| AptSource {
        root: Endpoint::new(url).folder(),
        suites,
        components,
        architectures,
    })
}

/// Finds the newest version of `package`, or exactly `version`, in all archives.
pub(crate) fn find(
    sources: &[AptSource],
    client: &Client,
    package: &str,
    version: Option<&str>,
    architecture: &str,
    progress: Progress<'_>,
) -> Result<Listed, Error> {
    if sources.is_empty() {
        return Err(Error::NoDebianArchive { package: package.to_owned() });
    }
    let mut best: Option<(Version, Listed)> = None;
    let mut looked = Vec::new();
    let is_asked = |source: &&AptSource| {
        source.architectures.is_empty() || source.architectures.iter().any(|one| one == architecture)
    };
    for source in sources.iter().filter(is_asked) {
        for suite in &source.suites {
            for component in &source.components {
                let folder = format!("dists/{suite}/{component}/binary-{architecture}/");
                looked.push(format!("{}{folder}", source.root));
                let Some(found) = find_in(&source.root, &folder, client, package, version, progress)? else {
                    continue;
                };
                for listed in found {
                    let Ok(parsed) = listed.version.parse::<Version>() else {
                        continue;
                    };
                    if best.as_ref().is_none_or(|(newest, _)| parsed > *newest) {
                        best = Some((parsed, listed));
                    }
                }
            }
        }
    }
    best.map(|(_, listed)| listed).ok_or_else(|| Error::NotFound {
        package: package.to_owned(),
        version: version.unwrap_or("(any version)").to_owned(),
        looked,
    })
}

fn find_in(
    root: &Endpoint,
    folder: &str,
    client: &Client,
    package: &str,
    version: Option<&str>,
    progress: Progress<'_>,
) -> Result<Option<Vec<Listed>>, Error> {
    for name in ["Packages.xz", "Packages.gz"] {
        let path = format!("{folder}{name}");
        let bad = |message: String| Error::Page { url: format!("{root}{path}"), message };
        let endpoint = root.join(&path).map_err(|error| bad(error.to_string()))?;
        let page = match client.page(&endpoint, "*/*", LIST_LIMIT, progress) {
            Ok(page) => page,
            Err(error) if error.is_absent() => continue,
            Err(error) => return Err(error.into()),
        };
        let unpacked = decompress(Cursor::new(page.body)).map_err(|error| bad(error.to_string()))?;
        let mut found = Vec::new();
        let mut unpacked = unpacked.take(LIST_LIMIT);
        for paragraph in Paragraphs::new(BufReader::new(&mut unpacked)) {
            let paragraph = paragraph.map_err(|error| bad(error.to_string()))?;
            let is_it = paragraph.get("package").is_some_and(|name| name == package)
                && version.is_none_or(|wanted| paragraph.get("version").is_some_and(|it| it == wanted));
            if is_it {
                found.push(listed(&paragraph).ok_or_else(|| {
                    bad(format!("{package} lacks a usable Version, Filename, Size or SHA256"))
                })?);
            }
        }
        if unpacked.limit() == 0 {
            return Err(bad(format!("the list has more than {LIST_LIMIT} bytes")));
        }
        return Ok(Some(found));
    }
    Ok(None)
}

fn listed(paragraph: &BTreeMap<String, String>) -> Option<Listed> {
    let path = paragraph.get("filename")?;
    let clean = path.split('/').all(|part| !part.is_empty() && part != "." && part != "..");
    clean.then_some(())?;
    Some(Listed {
        version: paragraph.get("version")?.clone(),
        path: path.clone(),
        size: paragraph.get("size")?.parse().ok()?,
        sha256: Digest::from_hex(paragraph.get("sha256")?).ok()?,
    })
}

/// The paragraphs of a deb822 file as fields by lower-case name. Continuation lines are joined with newlines.
pub(crate) struct Paragraphs<R> {
    lines: std::io::Lines<R>,
}

impl<R: BufRead> Paragraphs<R> {
    pub(crate) fn new(reader: R) -> Self {
        Self { lines: reader.lines() }
    }
}

impl<R: BufRead> Iterator for Paragraphs<R> {
    type Item = std::io::Result<BTreeMap<String, String>>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut fields = BTreeMap::new();
        let mut last: Option<String> = None;
        for line in self.lines.by_ref() {
            let line = match line {
                Ok(line) => line,
                Err(error) => return Some(Err(error)),
            };
            if line.trim().is_empty() {
                if fields.is_empty() {
                    continue;
                }
                return Some(Ok(fields));
            }
            if line.starts_with([' ', '\t']) {
                if let Some(value) = last.as_ref().and_then(|key| fields.get_mut(key)) {
                    let value: &mut String = value;
                    value.push('\n');
                    value.push_str(line.trim());
                }
            } else if let Some((key, value)) = line.split_once(':') {
                let key = key.to_ascii_lowercase();
                fields.insert(key.clone(), value.trim().to_owned());
                last = Some(key);
            }
        }
        (!fields.is_empty()).then_some(Ok(fields))
    }
}
