//! apt's configuration: which Debian archives this machine takes packages from.
//!
//! Deliberately left out: apt's preferences. Versions are chosen as apt does where there are none.

use std::path::Path;

use url::Url;

use super::Error;
use super::deb822::Paragraphs;
use crate::http::Endpoint;

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
