//! A place for one test: its own cache, manifests and settings, which contact only the servers that the test starts.

use std::cell::RefCell;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;
use trainyard_builder::corpus::{self, Corpus};
use trainyard_builder::http::{Endpoint, Network};
use trainyard_builder::index::{IndexSettings, PythonIndexes};
use trainyard_builder::lock;
use trainyard_builder::progress::Event;
use trainyard_builder::registry::CredentialSettings;
use trainyard_builder::settings::{LinkFrom, Settings};

pub(crate) struct Room {
    pub(crate) folder: TempDir,
    pub(crate) settings: Settings,
    pub(crate) events: RefCell<Vec<Event>>,
}

impl Room {
    /// A room whose Python packages come from these indexes.
    pub(crate) fn new(indexes: &[&str]) -> Self {
        let folder = TempDir::new().unwrap();
        let endpoint = |text: &&str| Endpoint::new(text.parse().unwrap()).folder();
        let settings = Settings {
            cache: folder.path().join("cache"),
            offline: false,
            index: IndexSettings {
                python: PythonIndexes {
                    indexes: indexes.iter().map(endpoint).collect(),
                    ..PythonIndexes::default()
                },
                ..IndexSettings::default()
            },
            network: Network {
                patience: Duration::from_secs(5),
                retry_delay: Duration::from_millis(5),
                ..Network::default()
            },
            credentials: CredentialSettings::default(),
            link: LinkFrom::Locked,
            // No tools: neither pip nor cargo is found by mistake.
            tools: [(OsString::from("PATH"), OsString::from("/nonexistent"))].into(),
        };
        Self { folder, settings, events: RefCell::default() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes a manifest of a corpus of `demo` 1.0.
    pub(crate) fn corpus_manifest(&self, fallback: &str) -> PathBuf {
        let path = self.path("demo.toml");
        let text = format!(
            r#"
version = 1
name = "demo"
include = ["*/texts/*.txt"]
fallback = [{fallback}]
[input.demo]
kind = "python"
package = "demo"
version = "1.0"
artifact = "sdist"
"#
        );
        std::fs::write(&path, text).unwrap();
        path
    }

    pub(crate) fn lock(&self, manifest: &Path) -> Result<trainyard_spec::lock::Lock, lock::Error> {
        lock::lock(manifest, &self.settings, &|event| self.events.borrow_mut().push(event))
    }

    pub(crate) fn corpus(&self, manifest: &Path) -> Result<Corpus, corpus::Error> {
        corpus::corpus(manifest, &self.settings, &|event| self.events.borrow_mut().push(event))
    }

    /// Names of what lies in the store's folder for unfinished work.
    pub(crate) fn leftovers(&self) -> Vec<OsString> {
        let folder = self.settings.cache.join("tmp");
        let entries = std::fs::read_dir(folder).into_iter().flatten();
        entries.map(|entry| entry.unwrap().file_name()).filter(|name| name != ".gate").collect()
    }
}

/// A source archive of `demo` 1.0 with these texts.
pub(crate) fn sdist(texts: &[(&str, &[u8])]) -> Vec<u8> {
    let gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    let mut tar = tar::Builder::new(gzip);
    let setup: (&str, &[u8]) = ("setup.py", b"raise SystemExit('this must never run')");
    for (name, body) in texts.iter().chain([&setup]) {
        let mut header = tar::Header::new_ustar();
        header.set_size(body.len() as u64);
        header.set_mode(0o644);
        tar.append_data(&mut header, format!("demo-1.0/{name}"), *body).unwrap();
    }
    tar.into_inner().unwrap().finish().unwrap()
}
