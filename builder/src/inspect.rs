//! What an image holds, read from its bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;
use tar::{Archive, EntryType};
use trainyard_spec::Digest;

use crate::oci::{self, Layout};
use crate::store::digest_of;
use crate::unpack;

/// What an image holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Report {
    /// Digest of its OCI manifest.
    pub digest: Digest,
    /// Platform, as `os/architecture`.
    pub platform: String,
    /// Bytes of all compressed layers.
    pub size: u64,
    /// User that programs run as.
    pub user: String,
    /// Program and first arguments.
    pub entrypoint: Vec<String>,
    /// Working directory.
    pub working_dir: String,
    /// Environment.
    pub env: Vec<String>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Layers from the lowest.
    pub layers: Vec<LayerReport>,
}

/// What a layer holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct LayerReport {
    /// Digest of the compressed layer.
    pub digest: Digest,
    /// How it was made, if the image says.
    pub made_by: Option<String>,
    /// Bytes compressed.
    pub size: u64,
    /// Bytes of its files.
    pub unpacked_size: u64,
    /// Its files, by absolute path.
    pub files: BTreeMap<String, FileReport>,
    /// Entries that no image should have and that are not unpacked, each with what is wrong about it.
    pub remarks: Vec<String>,
}

/// A file of a layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct FileReport {
    /// Bytes.
    pub size: u64,
    /// Permission bits.
    pub mode: u32,
    /// Digest of its bytes.
    pub digest: Digest,
}

/// Why an image could not be inspected.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The layout is unreadable or damaged.
    #[error(transparent)]
    Layout(#[from] oci::Error),
    /// A layer is not a tar archive.
    #[error("layer {digest} of {folder} cannot be read: {source}", folder = .folder.display())]
    Layer {
        /// The layer.
        digest: String,
        /// The layout.
        folder: PathBuf,
        /// What went wrong.
        source: io::Error,
    },
}

/// Reads every byte of an image, verifies it and reports what is there.
///
/// # Errors
/// When the image is damaged or a layer cannot be read.
pub fn inspect(layout: &Layout) -> Result<Report, Error> {
    let configuration = &layout.configuration;
    let config = configuration.config().clone().unwrap_or_default();
    let made: Vec<Option<String>> = configuration
        .history()
        .iter()
        .flatten()
        .filter(|entry| entry.empty_layer() != Some(true))
        .map(|entry| entry.created_by().clone())
        .collect();
    let mut layers = Vec::new();
    for (index, described) in layout.manifest.layers().iter().enumerate() {
        let digest = described.digest().to_string();
        let failed =
            |source| Error::Layer { digest: digest.clone(), folder: layout.folder().to_owned(), source };
        let (files, remarks) = read(layout.layer(described)?).map_err(failed)?;
        layers.push(LayerReport {
            digest: digest.parse().map_err(|error| failed(io::Error::other(error)))?,
            made_by: made.get(index).cloned().flatten(),
            size: described.size(),
            unpacked_size: files.values().map(|file| file.size).sum(),
            files,
            remarks,
        });
    }
    Ok(Report {
        digest: layout.digest,
        platform: format!("{}/{}", configuration.os(), configuration.architecture()),
        size: layers.iter().map(|layer| layer.size).sum(),
        user: config.user().clone().unwrap_or_default(),
        entrypoint: config.entrypoint().clone().unwrap_or_default(),
        working_dir: config.working_dir().clone().unwrap_or_default(),
        env: config.env().clone().unwrap_or_default(),
        labels: config.labels().clone().into_iter().flatten().collect(),
        layers,
    })
}

/// The files of a layer, and remarks on its other entries.
fn read(layer: impl io::Read) -> io::Result<(BTreeMap<String, FileReport>, Vec<String>)> {
    let (mut files, mut remarks) = (BTreeMap::new(), Vec::new());
    let mut links = BTreeSet::new();
    let mut archive = Archive::new(layer);
    for entry in archive.entries()? {
        let mut entry = entry?;
        let named = entry.path()?.into_owned();
        let Some(path) = unpack::clean(&named).map(|path| Path::new("/").join(path)) else {
            remarks.push(format!("{}: leads out of the image", named.display()));
            continue;
        };
        if let Some(link) = path.ancestors().skip(1).find(|folder| links.contains(*folder)) {
            remarks.push(format!("{}: leads through the link {}", named.display(), link.display()));
            continue;
        }
        match entry.header().entry_type() {
            EntryType::Regular | EntryType::Continuous => {
                let (size, mode) = (entry.size(), entry.header().mode()?);
                let (digest, _) = digest_of(&mut entry)?;
                files.insert(path.display().to_string(), FileReport { size, mode, digest });
            }
            EntryType::Symlink => drop(links.insert(path)),
            EntryType::Directory | EntryType::Link => {}
            other => remarks.push(format!("{}: is a {}", named.display(), special(other))),
        }
    }
    Ok((files, remarks))
}

fn special(kind: EntryType) -> String {
    match kind {
        EntryType::Char => "character device".to_owned(),
        EntryType::Block => "block device".to_owned(),
        EntryType::Fifo => "named pipe".to_owned(),
        other => format!("tar entry of kind {:?}", char::from(other.as_byte())),
    }
}
