//! Knowing that nothing has changed since an image was built, without asking cargo.
//!
//! Remembered beside the image is the digest of all it depends on: manifest, lock, settings, and every file of the
//! packages that were compiled, as cargo's own dependency lists name them. Files that changed while cargo ran leave
//! nothing remembered, because nobody knows which version was compiled.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use trainyard_spec::image::Compression;
use trainyard_spec::{Digest, FormatVersion};

use crate::image::Image;
use crate::settings::Settings;
use crate::store::{self, Store, digest_of};
use crate::{layer, lock};

/// What a build has read, apart from manifest, lock and store.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Sources {
    /// Folders of packages, every file of which counts.
    pub(crate) packages: BTreeSet<PathBuf>,
    /// Other folders, of which each file counts, hidden ones too.
    #[serde(default)]
    pub(crate) folders: BTreeSet<PathBuf>,
    /// Single files, which may be missing.
    pub(crate) files: BTreeSet<PathBuf>,
}

/// The image that was last built from a manifest.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Note {
    version: FormatVersion<1>,
    /// The manifest; none in notes of older versions.
    #[serde(default)]
    manifest: Option<PathBuf>,
    image: Image,
    sources: Sources,
    /// Digest of everything the image depends on; none where it could not be known.
    state: Option<Digest>,
}

impl Sources {
    /// The sources of binaries, from the dependency lists that cargo writes beside them.
    pub(crate) fn of<'a>(workspace: &Path, binaries: impl Iterator<Item = &'a Path>) -> io::Result<Self> {
        let mut sources = Self::default();
        for name in
            ["Cargo.toml", "Cargo.lock", "rust-toolchain.toml", "rust-toolchain", ".cargo/config.toml"]
        {
            sources.files.insert(workspace.join(name));
        }
        for binary in binaries {
            let list = fs_err::read_to_string(binary.with_extension("d"))?;
            for path in dependencies(&list) {
                let package = path.ancestors().skip(1).find(|folder| folder.join("Cargo.toml").is_file());
                sources.packages.extend(package.map(Path::to_owned));
                sources.files.insert(path);
            }
        }
        Ok(sources)
    }

    /// Every file that counts, sorted, each once.
    fn all(&self) -> io::Result<BTreeSet<PathBuf>> {
        let mut all = self.files.clone();
        for folder in &self.folders {
            for entry in walkdir::WalkDir::new(folder) {
                let entry = entry?;
                if !entry.file_type().is_dir() {
                    all.insert(entry.into_path());
                }
            }
        }
        for package in &self.packages {
            let is_source = |entry: &walkdir::DirEntry| {
                let name = entry.file_name().to_string_lossy();
                entry.depth() == 0
                    || !(name.starts_with('.') || (name == "target" && entry.file_type().is_dir()))
            };
            for entry in walkdir::WalkDir::new(package).into_iter().filter_entry(is_source) {
                let entry = entry?;
                if !entry.file_type().is_dir() {
                    all.insert(entry.into_path());
                }
            }
        }
        Ok(all)
    }

    fn state(&self, manifest: &Path, settings: &Settings) -> io::Result<Digest> {
        let mut text = format!(
            "{} {} {} {:?} {:?}\n",
            env!("CARGO_PKG_VERSION"),
            layer::format(Compression::Gzip),
            layer::format(Compression::Zstd),
            settings.link,
            settings.tools
        );
        for path in [manifest, &lock::path(manifest)].into_iter().map(Path::to_owned).chain(self.all()?) {
            let digest = match std::fs::File::open(&path).and_then(digest_of) {
                Ok((digest, _)) => digest.to_string(),
                Err(error) if error.kind() == io::ErrorKind::NotFound => "not there".to_owned(),
                Err(error) => return Err(error),
            };
            text += &format!("{} {digest}\n", path.display());
        }
        Ok(Digest::of(text.as_bytes()))
    }

    /// Whether a file may have changed since `moment`.
    fn changed_since(&self, moment: SystemTime) -> io::Result<bool> {
        for path in self.all()? {
            match std::fs::metadata(&path).and_then(|found| found.modified()) {
                Ok(modified) if modified < moment => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                _ => return Ok(true),
            }
        }
        Ok(false)
    }
}

/// The paths in a list of dependencies in make's format, `target: path path`, with spaces in paths escaped.
fn dependencies(list: &str) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    for line in list.lines() {
        let Some((_, mut rest)) = line.split_once(": ") else { continue };
        let mut path = String::new();
        while let Some(next) = rest.chars().next() {
            rest = &rest[next.len_utf8()..];
            match next {
                '\\' if rest.starts_with(' ') => {
                    path.push(' ');
                    rest = &rest[1..];
                }
                ' ' => paths.push(PathBuf::from(std::mem::take(&mut path))),
                other => path.push(other),
            }
        }
        paths.push(PathBuf::from(path));
    }
    paths.retain(|path| !path.as_os_str().is_empty());
    paths
}

/// Folder of a cache with what was last built from each manifest.
pub(crate) const FOLDER: &str = "built";

/// Where the newest image of a manifest is written down.
fn note(manifest: &Path, cache: &Path) -> PathBuf {
    let manifest = std::fs::canonicalize(manifest).unwrap_or_else(|_| manifest.to_owned());
    cache.join(FOLDER).join(format!("{}.json", Digest::of(manifest.as_os_str().as_encoded_bytes()).hex()))
}

/// What was remembered. A note that cannot be read counts as none: it is only ever a shortcut.
fn recall(manifest: &Path, cache: &Path) -> Option<Note> {
    serde_json::from_slice(&std::fs::read(note(manifest, cache)).ok()?).ok()
}

/// Notes that the image that was last built from a manifest is needed now.
pub(crate) fn used(manifest: &Path, cache: &Path) {
    store::used(&note(manifest, cache));
}

/// The manifest that a file of [`FOLDER`] is about, where it says.
pub(crate) fn manifest_of(note: &Path) -> Option<PathBuf> {
    serde_json::from_slice::<Note>(&std::fs::read(note).ok()?).ok()?.manifest
}

/// The image that was last built from a manifest.
pub(crate) fn last(manifest: &Path, cache: &Path) -> Option<Image> {
    recall(manifest, cache).map(|note| note.image)
}

/// The image that was last built from a manifest, if all it depends on is as it was.
pub(crate) fn image(manifest: &Path, settings: &Settings) -> Option<Image> {
    let note = recall(manifest, &settings.cache)?;
    let state = note.sources.state(manifest, settings).ok()?;
    (note.state? == state).then_some(note.image)
}

/// The time by the file system's own clock, by which files' ages are told: that of a file made just now.
pub(crate) fn moment(store: &Store) -> Result<SystemTime, store::Error> {
    let made = store.incoming()?;
    let time = fs_err::metadata(made.path()).and_then(|found| found.modified());
    time.map_err(store::io_error("read the time of", made.path()))
}

/// Remembers an image that was built by work begun at `started`.
pub(crate) fn remember(
    manifest: &Path,
    settings: &Settings,
    image: &Image,
    sources: &Sources,
    started: SystemTime,
) -> Result<(), store::Error> {
    let state = match sources.changed_since(started) {
        Ok(false) => sources.state(manifest, settings).ok(),
        _ => None,
    };
    let note_path = note(manifest, &settings.cache);
    let note = Note {
        version: FormatVersion,
        manifest: std::path::absolute(manifest).ok(),
        image: image.clone(),
        sources: sources.clone(),
        state,
    };
    let json = serde_json::to_vec(&note)
        .map_err(|error| store::io_error("write down in", &note_path)(io::Error::other(error)))?;
    store::write_whole(&note_path, &json)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependency_lists() {
        let found = dependencies("/t/image/app: /w/my\\ app/src/main.rs /w/dep/src/lib.rs\n\n");
        assert_eq!(found, [PathBuf::from("/w/my app/src/main.rs"), PathBuf::from("/w/dep/src/lib.rs")]);
        assert_eq!(dependencies(""), Vec::<PathBuf>::new());
    }
}
