//! The simple repository API of Python package indexes: JSON (PEP 691) and, where a server knows only that, HTML
//! (PEP 503).

use std::collections::BTreeMap;
use std::ffi::OsString;

use html5gum::{Token, Tokenizer};
use pep440_rs::{Version, VersionSpecifier};
use serde::Deserialize;
use trainyard_spec::Digest;
use trainyard_spec::image::Platform;
use trainyard_spec::input::PythonArtifact;

use super::{Error, FindLinks, PythonIndexes};
use crate::http::{Client, Endpoint, Page};
use crate::progress::Progress;

const ACCEPT: &str =
    "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1";

/// Most bytes of a project's page. The longest in use are a few megabytes.
const PAGE_LIMIT: u64 = 64 << 20;

/// A file that an index offers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Offered {
    pub(crate) name: String,
    pub(crate) place: Place,
    /// Digest, where the index says one.
    pub(crate) sha256: Option<Digest>,
}

/// Where an offered file lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    Server(Endpoint),
    Folder(std::path::PathBuf),
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Server(endpoint) => endpoint.fmt(f),
            Self::Folder(path) => path.display().fmt(f),
        }
    }
}

/// Asks one place after the other for its files of `package`, until `pick` finds what it looks for. A later place, and
/// pip for its default, is asked only when it is reached; `failed` decides whether a failure of one ends the search.
pub(crate) fn search<T>(
    package: &str,
    places: &PythonIndexes,
    tools: &BTreeMap<OsString, OsString>,
    client: &Client,
    progress: Progress<'_>,
    mut pick: impl FnMut(Vec<Offered>) -> Result<Option<T>, Error>,
    mut failed: impl FnMut(Error) -> Result<(), Error>,
) -> Result<Option<T>, Error> {
    let page = |endpoint: &Endpoint| match client.page(endpoint, ACCEPT, PAGE_LIMIT, progress) {
        Ok(page) => read(&page),
        Err(error) if error.is_absent() => Ok(Vec::new()),
        Err(error) => Err(error.into()),
    };
    let mut look = |offers: Result<Vec<Offered>, Error>| match offers {
        Ok(offers) => pick(offers),
        Err(error) => failed(error).map(|()| None),
    };
    for place in &places.find_links {
        let offers = match place {
            FindLinks::Folder(folder) => Ok(in_folder(folder)),
            FindLinks::Page(endpoint) => page(endpoint),
        };
        if let Some(found) = look(offers)? {
            return Ok(Some(found));
        }
    }
    for index in places.to_ask(tools)? {
        let project = index
            .join(&format!("{}/", normalized(package)))
            .map_err(|error| Error::Page { url: index.to_string(), message: error.to_string() });
        if let Some(found) = look(project.and_then(|project| page(&project)))? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// Files in a folder; one that is not there offers nothing, as with pip.
fn in_folder(folder: &std::path::Path) -> Vec<Offered> {
    let mut files: Vec<_> = fs_err::read_dir(folder)
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            Some(Offered {
                name: path.file_name()?.to_str()?.to_owned(),
                place: Place::Folder(path),
                sha256: None,
            })
        })
        .collect();
    files.sort_by(|a, b| a.name.cmp(&b.name));
    files
}

/// Which of `offers` is the wanted artifact of `package` and `version`; a wheel for no platform in particular where
/// none is given.
pub(crate) fn choose(
    offers: Vec<Offered>,
    package: &str,
    version: &str,
    artifact: PythonArtifact,
    platform: Option<Platform>,
) -> Result<Option<Offered>, Error> {
    let fitting: Vec<Offered> = offers
        .into_iter()
        .filter(|offer| match artifact {
            PythonArtifact::Sdist => is_sdist(&offer.name, package, version),
            PythonArtifact::Wheel => is_wheel(&offer.name, package, version, platform),
        })
        .collect();
    match fitting.as_slice() {
        [] => Ok(None),
        [one] => Ok(Some(one.clone())),
        several => Err(Error::Ambiguous {
            package: package.to_owned(),
            version: version.to_owned(),
            files: several.iter().map(|offer| offer.name.clone()).collect(),
        }),
    }
}

/// The newest version of a wheel for the platform that fits `wanted`: a PEP 440 version with `*` at its end. Pre-releases
/// are left out.
pub(crate) fn newest(
    offers: Vec<Offered>,
    package: &str,
    wanted: &str,
    platform: Platform,
) -> Option<String> {
    let fits = |version: &Version| {
        let any = wanted == "*";
        let specifier = format!("=={wanted}").parse::<VersionSpecifier>();
        !version.any_prerelease() && (any || specifier.is_ok_and(|specifier| specifier.contains(version)))
    };
    let versions = offers.into_iter().filter_map(|offer| {
        let text = offer.name.split('-').nth(1)?.to_owned();
        is_wheel(&offer.name, package, &text, Some(platform)).then_some(text)
    });
    let parsed = versions.filter_map(|text| Some((text.parse::<Version>().ok()?, text)));
    parsed.filter(|(version, _)| fits(version)).max().map(|(_, text)| text)
}

/// A project's name as PEP 503 compares it.
pub(crate) fn normalized(name: &str) -> String {
    let mut out = String::with_capacity(name.len());
    for part in name.split(['-', '_', '.']).filter(|part| !part.is_empty()) {
        if !out.is_empty() {
            out.push('-');
        }
        out.push_str(&part.to_lowercase());
    }
    out
}

fn is_sdist(file: &str, package: &str, version: &str) -> bool {
    file.strip_suffix(".tar.gz").is_some_and(|stem| {
        // Old archives have dashes in the name, and versions may have them too.
        stem.match_indices('-').any(|(at, _)| {
            normalized(&stem[..at]) == normalized(package) && is_same_version(&stem[at + 1..], version)
        })
    })
}

/// Whether two versions are equal in the sense of PEP 440, which knows several spellings of one version.
fn is_same_version(a: &str, b: &str) -> bool {
    a == b || matches!((a.parse::<Version>(), b.parse::<Version>()), (Ok(a), Ok(b)) if a == b)
}

fn is_wheel(file: &str, package: &str, version: &str, platform: Option<Platform>) -> bool {
    let Some(stem) = file.strip_suffix(".whl") else {
        return false;
    };
    let parts: Vec<&str> = stem.split('-').collect();
    let (5 | 6) = parts.len() else { return false };
    let machine = platform.map(|platform| match platform {
        Platform::Amd64 => "_x86_64",
        Platform::Arm64 => "_aarch64",
    });
    normalized(parts[0]) == normalized(package)
        && is_same_version(parts[1], version)
        && parts[parts.len() - 1].split('.').any(|tag| {
            tag == "any" || machine.is_some_and(|machine| tag.contains("linux") && tag.ends_with(machine))
        })
}

fn read(page: &Page) -> Result<Vec<Offered>, Error> {
    if page.media_type.ends_with("json") { read_json(page) } else { read_html(page) }
}

#[derive(Deserialize)]
struct Project {
    files: Vec<ProjectFile>,
}

#[derive(Deserialize)]
struct ProjectFile {
    filename: String,
    url: String,
    #[serde(default)]
    hashes: BTreeMap<String, String>,
}

fn read_json(page: &Page) -> Result<Vec<Offered>, Error> {
    let bad = |message: String| Error::Page { url: page.endpoint.to_string(), message };
    let project: Project = serde_json::from_slice(&page.body).map_err(|error| bad(error.to_string()))?;
    let offer = |file: ProjectFile| {
        Ok(Offered {
            place: Place::Server(page.endpoint.join(&file.url).map_err(|error| bad(error.to_string()))?),
            sha256: match file.hashes.get("sha256") {
                Some(hex) => Some(Digest::from_hex(hex).map_err(|error| bad(error.to_string()))?),
                None => None,
            },
            name: file.filename,
        })
    };
    project.files.into_iter().map(offer).collect()
}

fn read_html(page: &Page) -> Result<Vec<Offered>, Error> {
    let bad = |message: String| Error::Page { url: page.endpoint.to_string(), message };
    let mut base = page.endpoint.clone();
    let mut offers = Vec::new();
    for Ok(token) in Tokenizer::new(page.body.as_slice()) {
        let Token::StartTag(tag) = token else { continue };
        let Some(href) = tag.attributes.get(b"href".as_slice()) else {
            continue;
        };
        let href = String::from_utf8_lossy(href);
        let joined = base.join(&href).map_err(|error| bad(format!("{href:?}: {error}")))?;
        match tag.name.as_slice() {
            b"base" => base = joined,
            b"a" => {
                let name =
                    joined.url().path_segments().and_then(|mut parts| parts.next_back()).map(|last| {
                        percent_encoding::percent_decode_str(last).decode_utf8_lossy().into_owned()
                    });
                let sha256 = joined
                    .url()
                    .fragment()
                    .and_then(|fragment| fragment.strip_prefix("sha256="))
                    .map(Digest::from_hex)
                    .transpose()
                    .map_err(|error| bad(error.to_string()))?;
                offers.extend(name.filter(|name| !name.is_empty()).map(|name| Offered {
                    name,
                    place: Place::Server(joined.clone()),
                    sha256,
                }));
            }
            _ => {}
        }
    }
    Ok(offers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use url::Url;

    fn page(media_type: &str, body: &str) -> Page {
        Page {
            endpoint: Endpoint::new(Url::parse("https://me:secret@index.test/simple/demo/").unwrap()),
            media_type: media_type.to_owned(),
            body: body.as_bytes().to_vec(),
        }
    }

    #[test]
    fn json_and_html_say_the_same() {
        let hex = "ab".repeat(32);
        let json = format!(
            r#"{{"meta":{{"api-version":"1.0"}},"files":[{{"filename":"demo-1.tar.gz","url":"../../f/demo-1.tar.gz","hashes":{{"sha256":"{hex}"}}}}]}}"#
        );
        let html = format!("<!DOCTYPE html><a href='../../f/demo-1.tar.gz#sha256={hex}'>demo</a>");
        let from_json = read(&page("application/vnd.pypi.simple.v1+json", &json)).unwrap();
        let from_html = read(&page("text/html", &html)).unwrap();
        for offers in [&from_json, &from_html] {
            assert_eq!(offers.len(), 1);
            assert_eq!(offers[0].name, "demo-1.tar.gz");
            assert_eq!(offers[0].sha256, Digest::from_hex(&hex).ok());
            let Place::Server(endpoint) = &offers[0].place else { panic!("{offers:?}") };
            assert!(endpoint.to_string().starts_with("https://index.test/f/demo-1.tar.gz"));
        }
    }

    #[test]
    fn credentials_are_never_shown() {
        let page = page("application/json", "{");
        let error = read(&page).unwrap_err();
        assert!(!format!("{error} {error:?} {page:?}").contains("secret"), "{error:?}");
    }

    #[test]
    fn names_and_tags() {
        assert_eq!(normalized("Foo.-_bar"), "foo-bar");
        assert!(is_sdist("Foo_Bar-1.0.tar.gz", "foo-bar", "1.0"));
        for (file, package, version, fits) in [
            ("foo-bar-1.0.tar.gz", "foo", "1.0", false),
            ("foo-1.0.tar.gz", "foo", "1.0.0", true),
            ("foo-1.0.0rc1.tar.gz", "foo", "1.0-RC.1", true),
            ("foo-1.0.post1.tar.gz", "foo", "1.0-1", true),
            ("foo-1.0-1.tar.gz", "foo", "1.0.post1", true),
            ("foo-1.0.1.tar.gz", "foo", "1.0", false),
            ("foo-11.0.tar.gz", "foo", "1.0", false),
            ("foo-1.0+cpu.tar.gz", "foo", "1.0", false),
            ("foo-1.0.zip", "foo", "1.0", false),
            ("foo.tar.gz", "foo", "1.0", false),
        ] {
            assert_eq!(is_sdist(file, package, version), fits, "{file} {package} {version}");
        }
        for (file, fits) in [
            ("demo-1.0-py3-none-any.whl", true),
            ("demo-1.0-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", true),
            ("demo-1.0-py3-none-manylinux2014_aarch64.whl", false),
            ("demo-1.0-cp312-cp312-macosx_11_0_x86_64.whl", false),
            ("demo-1.1-py3-none-any.whl", false),
            ("demo-1.0.whl", false),
        ] {
            assert_eq!(is_wheel(file, "demo", "1.0", Some(Platform::Amd64)), fits, "{file}");
        }
    }
}
