//! Corpora: the texts of a manifest's inputs, joined into one file.
//!
//! The text is a pure function of the manifest and its lock, kept in the store. Where no index can be reached, the texts
//! that the manifest names as its fallback stand in, and the result says so. Cutting text into tokens is left to the
//! trainer.

use std::io::{self, Read, Write};
use std::path::{Component, Path, PathBuf};

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use serde::{Deserialize, Serialize};
use trainyard_spec::corpus::CorpusManifest;
use trainyard_spec::lock::{Lock, LockedInput};
use trainyard_spec::{Digest, FormatVersion, Name};

use crate::input::archive::{self, Limits};
use crate::input::{self, python};
use crate::progress::{Event, Progress};
use crate::settings::Settings;
use crate::store::{self, Store};
use crate::{lock, manifest};

/// Names how texts are joined. Part of what a corpus is remembered by.
const FORMAT: &str = "texts in order of input and path, each ending with a line feed; 1";
/// Most bytes of all texts, which are held in memory to be put in order.
const MOST_TEXT: u64 = 4 << 30;

/// A text to train on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Corpus {
    /// The text, in UTF-8.
    pub text: PathBuf,
    /// Digest of the text.
    pub digest: Digest,
    /// Bytes of the text.
    pub bytes: u64,
    /// The corpus's name.
    pub name: Name,
    /// Whether it is what the manifest asks for.
    pub source: Source,
}

/// Where a corpus's text came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// The locked inputs.
    Locked,
    /// The texts that stand in for inputs that are out of reach.
    Fallback {
        /// Why the inputs could not be had.
        reason: String,
    },
}

/// Why there is no text.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A text beside the manifest cannot be read.
    #[error("cannot read {path}: {source}", path = .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The manifest cannot be read, or is wrong.
    #[error(transparent)]
    Manifest(#[from] manifest::Error),
    /// The lock is missing, wrong or out of date.
    #[error(transparent)]
    Lock(#[from] lock::Error),
    /// The lock pins something else than the manifest asks for.
    #[error("input {input} is locked as another kind than {manifest} asks for", manifest = .manifest.display())]
    Kind {
        /// The input.
        input: Name,
        /// The manifest.
        manifest: PathBuf,
    },
    /// A pattern makes no sense.
    #[error("{manifest}: {pattern:?} is not a pattern: {message}", manifest = .manifest.display())]
    Pattern {
        /// The manifest.
        manifest: PathBuf,
        /// The pattern.
        pattern: String,
        /// What is wrong.
        message: String,
    },
    /// An input could not be had.
    #[error(transparent)]
    Input(#[from] input::Error),
    /// No text matches.
    #[error("no file matches {patterns} of {manifest}", manifest = .manifest.display())]
    Empty {
        /// The patterns.
        patterns: String,
        /// The manifest.
        manifest: PathBuf,
    },
    /// A file is no text.
    #[error("{path} is not UTF-8 text: byte {offset} cannot be read")]
    NotText {
        /// The file.
        path: String,
        /// Where it stops being text.
        offset: usize,
    },
    /// The store failed.
    #[error(transparent)]
    Store(#[from] store::Error),
}

impl From<archive::Error> for Error {
    fn from(error: archive::Error) -> Self {
        Self::Input(error.into())
    }
}

impl Error {
    /// The way out.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Lock(error) => error.hint(),
            Self::Kind { manifest, .. } => Some(format!("trainyard lock {}", manifest.display())),
            Self::Input(error) => error.hint(),
            Self::Store(error) => error.hint().map(str::to_owned),
            Self::NotText { .. } => {
                Some("leave the file out with a narrower pattern, or convert it".to_owned())
            }
            Self::Read { .. } | Self::Manifest(_) | Self::Pattern { .. } | Self::Empty { .. } => None,
        }
    }
}

/// Makes the text of a corpus manifest, or finds it in the store.
///
/// # Errors
/// When the manifest or lock is wrong, an input is damaged or hostile, or one is out of reach and the manifest names
/// nothing to stand in for it.
pub fn corpus(manifest: &Path, settings: &Settings, progress: Progress<'_>) -> Result<Corpus, Error> {
    let described: CorpusManifest = manifest::read(manifest)?;
    let lock = lock::read(manifest, &described.input)?;
    let store = Store::new(&settings.cache);
    let _in_use = store.in_use()?;
    let make = Make { path: manifest, manifest: &described, store: &store, settings, progress };
    match make.locked(&lock) {
        Err(Error::Input(error)) if error.is_out_of_reach() && !described.fallback.is_empty() => {
            make.fallback(error.to_string())
        }
        other => other,
    }
}

/// All that the work on one corpus looks at.
struct Make<'a> {
    path: &'a Path,
    manifest: &'a CorpusManifest,
    store: &'a Store,
    settings: &'a Settings,
    progress: Progress<'a>,
}

/// A text in the store, remembered by what it was made from.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Remembered {
    version: FormatVersion<1>,
    text: Digest,
    bytes: u64,
}

impl Make<'_> {
    fn locked(&self, lock: &Lock) -> Result<Corpus, Error> {
        let mut key = format!("{FORMAT}\n{:?}\n", self.manifest.include);
        let mut files = Vec::new();
        for name in self.manifest.input.keys() {
            let Some(LockedInput::Python { package, file, .. }) = lock.input.get(name) else {
                return Err(Error::Kind { input: name.clone(), manifest: self.path.to_owned() });
            };
            key += &format!("{name} {}\n", file.sha256);
            files.push((name, package, file));
        }
        let note = self.store.folder("corpora")?.join(Digest::of(key.as_bytes()).hex());
        let remembered = std::fs::read(&note).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        if let Some(Remembered { text, bytes, .. }) = remembered
            && self.store.verified(&text)?.is_some()
        {
            store::used(&note);
            return Ok(self.made(text, bytes, Source::Locked));
        }
        let include = self.globs(&self.manifest.include)?;
        let mut texts = Vec::new();
        let mut left = MOST_TEXT;
        for (name, package, file) in files {
            let path = python::get(package, file, self.store, self.settings, self.progress)?;
            (self.progress)(Event::Unpacking { file: file.name.clone() });
            let kind = python::kind(file)?;
            archive::visit_files(&path, kind, Limits::default(), &mut |inside, body| {
                if include.is_match(inside) {
                    let mut bytes = Vec::new();
                    let read = body.take(left + 1).read_to_end(&mut bytes)?;
                    left = left.checked_sub(read as u64).ok_or_else(|| {
                        let message = format!("a corpus has at most {MOST_TEXT} bytes of text");
                        io::Error::new(io::ErrorKind::FileTooLarge, message)
                    })?;
                    texts.push((format!("{name}: {inside}"), bytes));
                }
                Ok(())
            })?;
        }
        let (text, bytes) = self.join(texts, &self.manifest.include)?;
        let remembered = Remembered { version: FormatVersion, text, bytes };
        // Only digests and numbers, which are always JSON.
        let json = serde_json::to_vec(&remembered).unwrap_or_default();
        store::write_whole(&note, &json)?;
        Ok(self.made(text, bytes, Source::Locked))
    }

    fn fallback(&self, reason: String) -> Result<Corpus, Error> {
        let folder =
            self.path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut paths = std::collections::BTreeSet::new();
        for pattern in &self.manifest.fallback {
            let (fixed, rest) = split(pattern);
            let root = folder.join(fixed);
            let globs = self.globs(&[&rest])?;
            if !root.exists() {
                continue;
            }
            // Folders that no match can lie in are not looked into: a project's own hold what compilers write.
            let depth = if rest.contains("**") { usize::MAX } else { Path::new(&rest).components().count() };
            for entry in walkdir::WalkDir::new(&root).follow_links(false).max_depth(depth) {
                let entry =
                    entry.map_err(|error| Error::Read { path: root.clone(), source: error.into() })?;
                let inside = entry.path().strip_prefix(&root).unwrap_or(entry.path());
                if entry.file_type().is_file() && globs.is_match(inside) {
                    paths.insert(entry.into_path());
                }
            }
        }
        let mut texts = Vec::new();
        for path in paths {
            let bytes = fs_err::read(&path).map_err(|source| Error::Read { path: path.clone(), source })?;
            texts.push((path.display().to_string(), bytes));
        }
        let (text, bytes) = self.join(texts, &self.manifest.fallback)?;
        Ok(self.made(text, bytes, Source::Fallback { reason }))
    }

    fn made(&self, digest: Digest, bytes: u64, source: Source) -> Corpus {
        let text = self.store.path(&digest);
        Corpus { text, digest, bytes, name: self.manifest.name.clone(), source }
    }

    /// Joins texts in order of their names.
    fn join(&self, mut texts: Vec<(String, Vec<u8>)>, patterns: &[String]) -> Result<(Digest, u64), Error> {
        if texts.is_empty() {
            return Err(Error::Empty { patterns: patterns.join(", "), manifest: self.path.to_owned() });
        }
        texts.sort();
        let mut incoming = self.store.incoming()?;
        for (path, bytes) in texts {
            if let Err(error) = std::str::from_utf8(&bytes) {
                return Err(Error::NotText { path, offset: error.valid_up_to() });
            }
            let end: &[u8] = if bytes.ends_with(b"\n") { b"" } else { b"\n" };
            incoming
                .write_all(&bytes)
                .and_then(|()| incoming.write_all(end))
                .map_err(store::io_error("write a text to", incoming.path()))?;
        }
        Ok(self.store.keep(incoming)?)
    }

    fn globs(&self, patterns: &[impl AsRef<str>]) -> Result<GlobSet, Error> {
        let wrong = |pattern: &str, error: globset::Error| Error::Pattern {
            manifest: self.path.to_owned(),
            pattern: pattern.to_owned(),
            message: error.kind().to_string(),
        };
        let mut set = GlobSetBuilder::new();
        for pattern in patterns {
            let pattern = pattern.as_ref();
            // As in a shell: only ** crosses a slash.
            let glob = GlobBuilder::new(pattern).literal_separator(true).build();
            set.add(glob.map_err(|error| wrong(pattern, error))?);
        }
        set.build().map_err(|error| wrong("", error))
    }
}

/// Splits a pattern before its first part that is one, so that `../../src/**/*.rs` is looked for in `../../src`.
fn split(pattern: &str) -> (PathBuf, String) {
    let is_plain = |part: &Component<'_>| !part.as_os_str().to_string_lossy().contains(['*', '?', '[', '{']);
    let parts: Vec<_> = Path::new(pattern).components().collect();
    // The last part is always matched, so that a plain path finds its file.
    let fixed = parts.iter().take_while(|part| is_plain(part)).count().min(parts.len().saturating_sub(1));
    let rest: PathBuf = parts[fixed..].iter().collect();
    (parts[..fixed].iter().collect(), rest.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_looked_for_below_their_plain_part() {
        for (pattern, fixed, rest) in [
            ("../../src/**/*.rs", "../../src", "**/*.rs"),
            ("*.md", "", "*.md"),
            ("../README.md", "..", "README.md"),
        ] {
            assert_eq!(split(pattern), (PathBuf::from(fixed), rest.to_owned()), "{pattern}");
        }
    }
}
