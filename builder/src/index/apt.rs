//! apt's configuration: which Debian archives this machine takes packages from.
//!
//! Deliberately left out: apt's preferences. Versions are chosen as apt does where there are none.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use url::Url;

use super::Error;
use super::deb822::Paragraphs;
use crate::http::Endpoint;
use crate::signature::Keyring;

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
    /// Whose signatures count.
    pub trust: Trust,
    /// Whether a suite that says until when it is valid is refused afterwards.
    pub check_valid_until: bool,
}

/// Whose signatures of an archive count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trust {
    /// It needs none: apt is told to trust it.
    Unsigned,
    /// Those of these keys.
    Keys(SignedBy),
}

/// Keys as apt's `Signed-By` names them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SignedBy {
    /// Files.
    pub files: Vec<PathBuf>,
    /// Keys in full, armored.
    pub blocks: Vec<String>,
    /// Fingerprints of those keys that count, where not all do.
    pub only: Vec<String>,
}

impl SignedBy {
    fn parse(text: &str) -> Self {
        if text.contains("-----BEGIN PGP PUBLIC KEY BLOCK-----") {
            // A line of a paragraph cannot be empty: it has a dot.
            let lines: Vec<_> = text.lines().map(|line| if line == "." { "" } else { line }).collect();
            return Self { blocks: vec![lines.join("\n")], ..Self::default() };
        }
        let mut found = Self::default();
        for word in text.split([',', ' ', '\n']).filter(|word| !word.is_empty()) {
            match word.starts_with('/') {
                true => found.files.push(word.into()),
                false => found.only.push(word.trim_end_matches('!').to_ascii_uppercase()),
            }
        }
        found
    }

    /// Reads the keys.
    ///
    /// # Errors
    /// When a file cannot be read or holds no keys.
    pub(crate) fn read(&self) -> Result<Keyring, Error> {
        let mut keyring = Keyring { only: self.only.clone(), ..Keyring::default() };
        let mut add = |from: String, bytes: &[u8]| {
            keyring.add(&from, bytes).map_err(|message| Error::Configuration { place: from, message })
        };
        for path in &self.files {
            let bytes = fs_err::read(path).map_err(|source| Error::Read { path: path.clone(), source })?;
            add(path.display().to_string(), &bytes)?;
        }
        for block in &self.blocks {
            add("the key in apt's configuration".to_owned(), block.as_bytes())?;
        }
        Ok(keyring)
    }
}

pub(super) fn resolve(root: &Path) -> Result<Vec<AptSource>, Error> {
    let mut files = vec![root.join("etc/apt/sources.list")];
    files.extend(parts(&root.join("etc/apt/sources.list.d"))?);
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
    let machine = machine_keys(root)?;
    for source in &mut sources {
        if let Trust::Keys(keys) = &mut source.trust {
            keys.files =
                keys.files.iter().map(|path| root.join(path.strip_prefix("/").unwrap_or(path))).collect();
            if keys.files.is_empty() && keys.blocks.is_empty() {
                keys.files.clone_from(&machine);
            }
        }
    }
    Ok(sources)
}

/// The keys that count where a source names none: those that apt trusts for every archive.
fn machine_keys(root: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut keys = parts(&root.join("etc/apt/trusted.gpg.d"))?;
    keys.retain(|path| path.extension().is_some_and(|extension| extension == "gpg" || extension == "asc"));
    keys.push(root.join("etc/apt/trusted.gpg"));
    // apt leaves empty files there.
    keys.retain(|path| std::fs::metadata(path).is_ok_and(|found| found.len() > 0));
    Ok(keys)
}

/// What lies in a folder, sorted; nothing where there is none.
fn parts(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let entries =
        fs_err::read_dir(folder).map_err(|source| Error::Read { path: folder.to_owned(), source })?;
    let mut parts: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    parts.sort();
    Ok(parts)
}

/// What apt takes for no.
fn is_no(word: &str) -> bool {
    ["no", "false", "without", "off", "disable", "0"].contains(&word.to_lowercase().as_str())
}

/// What apt takes for yes.
fn is_yes(word: &str) -> bool {
    ["yes", "true", "with", "on", "enable", "1"].contains(&word.to_lowercase().as_str())
}

/// Reads apt's one-line format. Lines of other kinds (`deb-src`, `cdrom:`, flat archives) are passed over.
pub fn parse_list(text: &str) -> Vec<AptSource> {
    let read = |line: &str| {
        let line = line.split('#').next()?.trim();
        let mut rest = line.strip_prefix("deb")?.strip_prefix([' ', '\t'])?.trim_start();
        let mut options = BTreeMap::new();
        if let Some(inside) = rest.strip_prefix('[') {
            let (inside, after) = inside.split_once(']')?;
            rest = after;
            let named = inside.split_whitespace().filter_map(|option| option.split_once('='));
            options = named.map(|(key, value)| (key.to_ascii_lowercase(), value.to_owned())).collect();
        }
        let option = |key: &str| options.get(key).map_or("", String::as_str);
        let mut words = rest.split_whitespace();
        let (uri, suite) = (words.next()?, words.next()?.to_owned());
        let what = Suites {
            suites: vec![suite],
            components: words.map(str::to_owned).collect(),
            architectures: option("arch")
                .split(',')
                .filter(|one| !one.is_empty())
                .map(str::to_owned)
                .collect(),
        };
        source(uri, what, option("trusted"), option("signed-by"), option("check-valid-until"))
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
        let first = |key: &str| words(key).into_iter().next().unwrap_or_default();
        if is_no(&first("enabled")) || !words("types").iter().any(|kind| kind == "deb") {
            continue;
        }
        let signed_by = paragraph.get("signed-by").map_or("", String::as_str);
        for uri in words("uris") {
            let what = Suites {
                suites: words("suites"),
                components: words("components"),
                architectures: words("architectures"),
            };
            sources.extend(source(&uri, what, &first("trusted"), signed_by, &first("check-valid-until")));
        }
    }
    sources
}

/// What of an archive is asked for.
struct Suites {
    suites: Vec<String>,
    components: Vec<String>,
    architectures: Vec<String>,
}

fn source(
    uri: &str,
    what: Suites,
    trusted: &str,
    signed_by: &str,
    check_valid_until: &str,
) -> Option<AptSource> {
    let url = Url::parse(uri).ok()?;
    let Suites { suites, components, architectures } = what;
    // A suite that ends with a slash is a flat archive: it has no components and no pool.
    let regular = !components.is_empty() && suites.iter().all(|suite| !suite.ends_with('/'));
    let trust = if is_yes(trusted) { Trust::Unsigned } else { Trust::Keys(SignedBy::parse(signed_by)) };
    (matches!(url.scheme(), "http" | "https") && regular).then(|| AptSource {
        root: Endpoint::new(url).folder(),
        suites,
        components,
        architectures,
        trust,
        check_valid_until: !is_no(check_valid_until),
    })
}
