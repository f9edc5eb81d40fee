//! CUDA libraries: chosen by name and toolkit release, and taken from wheels or from NVIDIA's redistributable archives.
//!
//! The wheel `cuda-toolkit` of a release requires exactly that release's wheels, and the release's `redistrib_X.Y.Z.json`
//! names its archives. Both hold the same libraries; of either only the shared objects that programs load are taken, under
//! their sonames, with the licence beside them. NCCL is released apart, as a wheel alone.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read as _;
use std::path::Path;

use serde::Deserialize;
use trainyard_spec::Digest;
use trainyard_spec::image::Platform;
use trainyard_spec::input::{CudaLibrary, CudaSource, PythonArtifact};
use trainyard_spec::lock::{LockedCuda, LockedFile, LockedInput};
use trainyard_spec::toml::{self, Collector, Validate};

use super::archive::{self, Kind, Limits};
use super::fetch::{Access, fetch};
use super::{Error, python};
use crate::http::Client;
use crate::index::simple::{self, Place};
use crate::index::{self, Redist};
use crate::progress::{Event, Progress};
use crate::settings::Settings;
use crate::store::Store;
use crate::unpacked::{self, Entries, Entry, Wanted, What};

/// The wheel whose releases are those of the toolkit.
const TOOLKIT: &str = "cuda-toolkit";
/// Most bytes of a release's list of archives.
const LIST_LIMIT: u64 = 8 << 20;
/// Folder of the image that the libraries lie in.
pub(crate) const FOLDER: &str = "usr/local/cuda/lib64";

/// What is known of each library.
const LIBRARIES: &str = include_str!("../../../manifests/cuda/libraries.toml");

/// What is known of a library. `manifests/cuda/libraries.toml` explains the fields.
#[derive(Debug, Clone, toml_spanner::Toml)]
#[toml(FromToml)]
pub(crate) struct Known {
    extra: Option<String>,
    wheel: Option<String>,
    component: Option<String>,
    files: Vec<String>,
    #[toml(default)]
    links: Vec<String>,
    #[toml(default)]
    needs: Vec<CudaLibrary>,
    licence: String,
    modify: bool,
    rule: String,
}

#[derive(Debug, toml_spanner::Toml)]
#[toml(FromToml)]
struct Libraries {
    #[expect(dead_code, reason = "its type refuses other versions")]
    version: trainyard_spec::FormatVersion<1>,
    library: BTreeMap<String, Known>,
}

impl Validate for Libraries {
    fn validate(&self, faults: &mut Collector<'_, '_>) {
        for known in self.library.values().filter(|known| known.extra.is_none() == known.wheel.is_none()) {
            faults.at("library", format!("{:?}: give extra or wheel", known.files), None);
        }
    }
}

/// What is known of a library.
pub(crate) fn known(library: CudaLibrary) -> Result<Known, Error> {
    let read: Result<Libraries, _> = toml::read("manifests/cuda/libraries.toml", LIBRARIES);
    let found = read.map_err(|faults| faults.to_string()).and_then(|mut all| {
        all.library
            .remove(library.as_str())
            .ok_or_else(|| format!("{} is not in its table", library.as_str()))
    });
    found.map_err(|message| Error::Cuda { what: "the table of CUDA libraries".to_owned(), message })
}

/// The library of this name.
pub(crate) fn library(name: &str) -> Option<CudaLibrary> {
    use CudaLibrary::{Cublas, CublasLt, Cudart, Nccl, Nvrtc};
    [Cudart, CublasLt, Cublas, Nccl, Nvrtc].into_iter().find(|library| library.as_str() == name)
}

/// Whether its licence allows to hand on changed files.
pub(crate) fn may_change(library: CudaLibrary) -> bool {
    known(library).is_ok_and(|known| known.modify)
}

/// The libraries asked for, and those that they load, in a fixed order.
fn with_needs(asked: &[CudaLibrary]) -> Result<BTreeMap<CudaLibrary, Known>, Error> {
    let mut all = BTreeMap::new();
    let mut left: Vec<_> = asked.to_vec();
    while let Some(library) = left.pop() {
        let known = known(library)?;
        left.extend(known.needs.iter().copied().filter(|needed| !all.contains_key(needed)));
        all.insert(library, known);
    }
    Ok(all)
}

/// A toolkit release, `13.0.2`.
#[derive(Debug, Clone, Copy)]
struct Release {
    major: u32,
    minor: u32,
}

impl Release {
    fn of(version: &str) -> Result<Self, Error> {
        let numbers: Vec<_> = version.split('.').map(str::parse::<u32>).collect();
        match numbers.as_slice() {
            [Ok(major), Ok(minor), Ok(_)] => Ok(Self { major: *major, minor: *minor }),
            _ => Err(Error::Cuda {
                what: format!("CUDA {version}"),
                message: "needed is a toolkit release of three numbers, as in \"13.0.2\"".to_owned(),
            }),
        }
    }

    fn fill(self, text: &str) -> String {
        text.replace("{major}", &self.major.to_string()).replace("{minor}", &self.minor.to_string())
    }
}

/// What a manifest asks for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked<'a> {
    pub(crate) version: &'a str,
    pub(crate) libraries: &'a [CudaLibrary],
    pub(crate) from: CudaSource,
    pub(crate) nccl: Option<&'a str>,
}

/// Pins the wheels or archives that hold the libraries.
///
/// # Errors
/// When a release or library is not to be found, a server fails, or a file is not what its index says.
pub(crate) fn resolve(
    asked: &Asked<'_>,
    platform: Platform,
    store: &Store,
    settings: &Settings,
    progress: Progress<'_>,
) -> Result<LockedInput, Error> {
    if settings.offline {
        return Err(index::Error::Offline { file: format!("CUDA {}", asked.version) }.into());
    }
    let release = Release::of(asked.version)?;
    let resolving = Resolving { asked, release, platform, store, settings, progress };
    let mut package = BTreeMap::new();
    for (library, known) in with_needs(asked.libraries)? {
        let (name, locked) = match (asked.from, &known.component) {
            (CudaSource::Archives, Some(component)) => (component.clone(), resolving.archive(component)?),
            _ => resolving.wheel(library, &known)?,
        };
        package.insert(name, locked);
    }
    Ok(LockedInput::Cuda { version: asked.version.to_owned(), package })
}

struct Resolving<'a> {
    asked: &'a Asked<'a>,
    release: Release,
    platform: Platform,
    store: &'a Store,
    settings: &'a Settings,
    progress: Progress<'a>,
}

impl Resolving<'_> {
    fn wheel(&self, library: CudaLibrary, known: &Known) -> Result<(String, LockedCuda), Error> {
        let (name, wanted) = match (&known.extra, &known.wheel) {
            (Some(extra), _) => self.required(extra)?,
            (None, Some(wheel)) => {
                let version = self.asked.nccl.filter(|_| library == CudaLibrary::Nccl).unwrap_or("*");
                (self.release.fill(wheel), version.to_owned())
            }
            (None, None) => unreachable!("the table has been checked"),
        };
        let version = if wanted.contains('*') {
            let client = Client::new(&self.settings.network);
            let pick = |offers| Ok(simple::newest(offers, &name, &wanted, self.platform));
            let (python, tools) = (&self.settings.index.python, &self.settings.tools);
            let found = simple::search(&name, python, tools, &client, self.progress, pick, Err)?;
            found.ok_or_else(|| index::Error::NotFound {
                package: name.clone(),
                version: wanted.clone(),
                looked: python::places(self.settings).unwrap_or_default(),
            })?
        } else {
            wanted
        };
        let locked = self.locked_wheel(&name, &version)?;
        Ok((name, LockedCuda { version, file: locked }))
    }

    fn locked_wheel(&self, name: &str, version: &str) -> Result<LockedFile, Error> {
        let (platform, artifact) = (Some(self.platform), PythonArtifact::Wheel);
        match python::resolve(name, version, artifact, platform, self.store, self.settings, self.progress)? {
            LockedInput::Python { file, .. } => Ok(file),
            _ => unreachable!("a Python package is locked as one"),
        }
    }

    /// Name and version of the wheel that the toolkit's release requires for an extra.
    fn required(&self, extra: &str) -> Result<(String, String), Error> {
        let file = self.locked_wheel(TOOLKIT, self.asked.version)?;
        let path = self.store.require(&file.sha256)?;
        let mut metadata = String::new();
        archive::visit_files(&path, Kind::Zip, Limits::default(), &mut |inside, body| {
            if inside.ends_with(".dist-info/METADATA") {
                body.take(LIST_LIMIT).read_to_string(&mut metadata)?;
            }
            Ok(())
        })?;
        requirement(&metadata, extra).ok_or_else(|| Error::Cuda {
            what: format!("{TOOLKIT} {}", self.asked.version),
            message: format!("it requires nothing for {extra:?}, so this release has no such library"),
        })
    }

    /// The archive of a component, as the release's list names it.
    fn archive(&self, component: &str) -> Result<LockedCuda, Error> {
        let name = format!("redistrib_{}.json", self.asked.version);
        let wrong = |message: String| Error::Cuda { what: name.clone(), message };
        let bytes = match redist(self.settings)?.join(&name)? {
            Place::Folder(path) => {
                std::fs::read(&path).map_err(|source| index::Error::Read { path: path.clone(), source })?
            }
            Place::Server(endpoint) => {
                let client = Client::new(&self.settings.network);
                let page = client.page(&endpoint, "*/*", LIST_LIMIT, self.progress);
                page.map_err(index::Error::from)?.body
            }
        };
        let list: BTreeMap<String, serde_json::Value> =
            serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))?;
        let platform = match self.platform {
            Platform::Amd64 => "linux-x86_64",
            Platform::Arm64 => "linux-sbsa",
        };
        let found = list.get(component).ok_or_else(|| wrong(format!("it lists no {component}")))?;
        let version = found.get("version").and_then(serde_json::Value::as_str);
        let listed = found.get(platform).cloned().unwrap_or_default();
        let listed: Listed = serde_json::from_value(listed)
            .map_err(|error| wrong(format!("{component} for {platform}: {error}")))?;
        let size = listed.size.parse().map_err(|_| wrong(format!("{component}: its size is no number")))?;
        let clean = listed.relative_path.split('/').all(|part| !matches!(part, "" | "." | ".."));
        let (Some(version), true, Ok(sha256)) = (version, clean, Digest::from_hex(&listed.sha256)) else {
            return Err(wrong(format!("{component} lacks a usable version, relative_path or sha256")));
        };
        let file = LockedFile { name: listed.relative_path, size, sha256 };
        fetch_archive(&file, self.store, self.settings, self.progress)?;
        Ok(LockedCuda { version: version.to_owned(), file })
    }
}

/// A component for one platform, in a release's list of archives.
#[derive(Deserialize)]
struct Listed {
    relative_path: String,
    sha256: String,
    size: String,
}

/// Name and version of a requirement for an extra: `Requires-Dist: NAME==VERSION; ... extra == 'EXTRA'`.
fn requirement(metadata: &str, extra: &str) -> Option<(String, String)> {
    let marker = [format!("extra == '{extra}'"), format!("extra == \"{extra}\"")];
    metadata.lines().take_while(|line| !line.is_empty()).find_map(|line| {
        let (requirement, markers) = line.strip_prefix("Requires-Dist:")?.split_once(';')?;
        let (name, version) = requirement.trim().split_once("==")?;
        let is_it = marker.iter().any(|marker| markers.contains(marker));
        is_it.then(|| (name.trim().to_owned(), version.trim().to_owned()))
    })
}

/// Where redistributable archives come from.
fn redist(settings: &Settings) -> Result<&Redist, Error> {
    settings.index.cuda.as_ref().ok_or_else(|| Error::Cuda {
        what: "from = \"archives\"".to_owned(),
        message: "no mirror of NVIDIA's redistributable archives is configured: set TRAINYARD_CUDA_REDIST to the address \
                  or folder that holds redistrib_X.Y.Z.json, or write from = \"wheels\""
            .to_owned(),
    })
}

fn fetch_archive(
    file: &LockedFile,
    store: &Store,
    settings: &Settings,
    progress: Progress<'_>,
) -> Result<std::path::PathBuf, Error> {
    let access = Access::of(settings, progress);
    // Only a file that has to be fetched needs a mirror.
    fetch(file, store, |_| Ok::<_, Error>(vec![redist(settings)?.join(&file.name)?]), &access)
}

/// A library as an image gets it.
#[derive(Debug)]
pub(crate) struct Part {
    /// Which.
    pub(crate) library: CudaLibrary,
    /// What goes where, by path in the image.
    pub(crate) entries: Entries,
    /// The locked package that it was taken from.
    pub(crate) package: String,
    /// Libraries that it loads itself.
    pub(crate) needs: Vec<CudaLibrary>,
    /// SPDX licence expression of its files.
    pub(crate) expression: String,
    /// What the licence allows.
    pub(crate) rule: String,
}

/// The libraries of a locked input, one after the other.
///
/// # Errors
/// When a package cannot be had, or lacks what a library needs.
pub(crate) fn parts(
    asked: &Asked<'_>,
    locked: &BTreeMap<String, LockedCuda>,
    store: &Store,
    settings: &Settings,
    progress: Progress<'_>,
) -> Result<Vec<Part>, Error> {
    let release = Release::of(asked.version)?;
    let mut parts = Vec::new();
    for (library, known) in with_needs(asked.libraries)? {
        let holds = |name: &&String| {
            let is_archive = known.component.as_ref() == Some(name);
            let wheel = known.wheel.as_ref().map(|wheel| release.fill(wheel));
            // A wheel that the toolkit requires is called nvidia- and the extra, with or without cuda- and -cuNN.
            let required = known.extra.as_ref().is_some_and(|extra| is_wheel_of(name, extra));
            is_archive || wheel.as_ref() == Some(name) || required
        };
        let package = locked.keys().find(holds).ok_or_else(|| Error::Lacks {
            package: format!("the lock of CUDA {}", asked.version),
            object: library.as_str().to_owned(),
        })?;
        let file = &locked[package].file;
        let path = get(package, file, store, settings, progress)?;
        let kind = if is_wheel(file) { Kind::Zip } else { Kind::Tar };
        progress(Event::Unpacking { file: file.name.clone() });
        let names: Vec<String> = known.files.iter().map(|name| release.fill(name)).collect();
        let entries = take(&path, file, kind, &names, store)?;
        let mut placed = place(library, &entries, &names, file)?;
        if let Some(first) = names.first() {
            for link in &known.links {
                let what = What::Symlink { target: first.clone() };
                placed.insert(format!("{FOLDER}/{link}"), Entry::plain(0o777, what));
            }
        }
        let Known { needs, licence: expression, rule, .. } = known;
        parts.push(Part { library, entries: placed, package: package.clone(), needs, expression, rule });
    }
    Ok(parts)
}

/// The wheel or archive of a locked package, from the store or from where it is offered.
///
/// # Errors
/// When it cannot be had, or is not what was locked.
pub(crate) fn get(
    package: &str,
    file: &LockedFile,
    store: &Store,
    settings: &Settings,
    progress: Progress<'_>,
) -> Result<std::path::PathBuf, Error> {
    if is_wheel(file) {
        python::get(package, file, store, settings, progress)
    } else {
        fetch_archive(file, store, settings, progress)
    }
}

fn is_wheel(file: &LockedFile) -> bool {
    file.name.ends_with(".whl")
}

fn is_wheel_of(name: &str, extra: &str) -> bool {
    let Some(stem) = name.strip_prefix("nvidia-") else { return false };
    let stem = stem.strip_prefix("cuda-").unwrap_or(stem);
    let stem = stem.split("-cu1").next().unwrap_or(stem);
    // The wheel of cudart is called runtime.
    stem == extra || (extra == "cudart" && stem == "runtime")
}

fn take(
    path: &Path,
    file: &LockedFile,
    kind: Kind,
    names: &[String],
    store: &Store,
) -> Result<Entries, Error> {
    // Of an archive the library's link under its soname is wanted, and so the file that it leads to.
    let stems: BTreeSet<&str> = names.iter().filter_map(|name| name.split(".so.").next()).collect();
    let wanted = |path: &str| {
        let name = path.rsplit('/').next().unwrap_or(path);
        name.split_once(".so.").is_some_and(|(stem, _)| stems.contains(stem)) || is_licence(path)
    };
    let choice = format!("cuda {}", names.join(" "));
    Ok(unpacked::unpack(path, &file.sha256, kind, store, &Wanted { name: &choice, files: &wanted })?)
}

/// Puts a library's files where programs look for them, whatever the package calls their folder.
fn place(
    library: CudaLibrary,
    entries: &Entries,
    names: &[String],
    file: &LockedFile,
) -> Result<Entries, Error> {
    let mut placed = Entries::new();
    for name in names {
        let named = |(path, _): &(&String, &Entry)| {
            path.rsplit('/').next() == Some(name) && !path.contains("/stubs/")
        };
        let found = entries.iter().find(named).and_then(|(path, _)| body(entries, path));
        let (_, entry) =
            found.ok_or_else(|| Error::Lacks { package: file.name.clone(), object: name.clone() })?;
        placed.insert(format!("{FOLDER}/{name}"), Entry::plain(0o755, entry.what.clone()));
    }
    let licence =
        entries.iter().find(|(path, entry)| is_licence(path) && matches!(entry.what, What::File { .. }));
    if let Some((_, entry)) = licence {
        let path = format!("usr/share/licenses/{}/LICENSE", library.as_str());
        placed.insert(path, Entry::plain(0o644, entry.what.clone()));
    }
    Ok(placed)
}

/// The file that a path of a package leads to.
fn body<'a>(entries: &'a Entries, path: &str) -> Option<(&'a String, &'a Entry)> {
    let (mut path, mut entry) = entries.get_key_value(path)?;
    for _ in 0..8 {
        let target = match &entry.what {
            What::File { .. } => return Some((path, entry)),
            What::Symlink { target } => match path.rsplit_once('/') {
                Some((folder, _)) => format!("{folder}/{target}"),
                None => target.clone(),
            },
            What::HardLink { target } => target.clone(),
            What::Folder => return None,
        };
        (path, entry) = entries.get_key_value(&target)?;
    }
    None
}

fn is_licence(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path).to_ascii_lowercase();
    matches!(name.as_str(), "license" | "license.txt" | "copying" | "copying.txt")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_toolkit_s_wheel_says_what_it_requires() {
        let metadata = "Metadata-Version: 2.4\n\
            Requires-Dist: nvidia-cublas==13.1.0.3.*; (sys_platform == 'linux') and extra == 'all'\n\
            Requires-Dist: nvidia-cublas==13.1.0.3.*; (sys_platform == 'linux') and extra == 'cublas'\n\
            Requires-Dist: nvidia-cuda-runtime==13.0.96.*; extra == \"cudart\"\n\n\
            Requires-Dist: evil==1; extra == 'nvrtc'\n";
        let pair = |name: &str, version: &str| Some((name.to_owned(), version.to_owned()));
        assert_eq!(requirement(metadata, "cublas"), pair("nvidia-cublas", "13.1.0.3.*"));
        assert_eq!(requirement(metadata, "cudart"), pair("nvidia-cuda-runtime", "13.0.96.*"));
        assert_eq!(requirement(metadata, "nvrtc"), None, "a description is not metadata");
    }

    #[test]
    fn the_table_knows_every_library() {
        use CudaLibrary::{Cublas, CublasLt, Cudart, Nccl, Nvrtc};
        let all = with_needs(&[Cublas, Cudart, Nccl, Nvrtc]).unwrap();
        assert_eq!(
            all.keys().copied().collect::<BTreeSet<_>>(),
            [Cudart, CublasLt, Cublas, Nccl, Nvrtc].into()
        );
        assert!(all[&Nccl].licence == "BSD-3-Clause" && all[&CublasLt].licence != "BSD-3-Clause");
        for release in ["13.0", "13", "13.0.2.1", "13.0.x"] {
            assert!(Release::of(release).is_err(), "{release}");
        }
    }

    #[test]
    fn wheels_are_known_by_their_names() {
        for (name, extra, is_it) in [
            ("nvidia-cublas", "cublas", true),
            ("nvidia-cublas-cu12", "cublas", true),
            ("nvidia-cuda-runtime", "cudart", true),
            ("nvidia-cuda-runtime-cu12", "cudart", true),
            ("nvidia-cuda-nvrtc", "nvrtc", true),
            ("nvidia-nccl-cu13", "cublas", false),
            ("nvidia-cusparse", "cublas", false),
        ] {
            assert_eq!(is_wheel_of(name, extra), is_it, "{name} {extra}");
        }
    }
}
