//! What an image holds, read from its bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::Serialize;
use tar::{Archive, EntryType};
use trainyard_spec::Digest;

use crate::contract::{self, Contract, Object};
use crate::elf;
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
    /// What it asks of a host, by its ELF files.
    #[serde(serialize_with = "as_summary")]
    pub contract: Contract,
    /// What is wrong with what it says about itself: ELF files that cannot be read, labels that its files contradict.
    pub remarks: Vec<String>,
    /// Files that run with other rights than those of who starts them, by absolute path, with what gives them.
    pub privileged: BTreeMap<String, String>,
    /// Layers from the lowest.
    pub layers: Vec<LayerReport>,
}

fn as_summary<S: serde::Serializer>(contract: &Contract, to: S) -> Result<S::Ok, S::Error> {
    contract.summary().serialize(to)
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
    let mut image = Image::default();
    for (index, described) in layout.manifest.layers().iter().enumerate() {
        let digest = described.digest().to_string();
        let failed =
            |source| Error::Layer { digest: digest.clone(), folder: layout.folder().to_owned(), source };
        let (files, remarks) = read(layout.layer(described)?, &mut image).map_err(failed)?;
        layers.push(LayerReport {
            digest: digest.parse().map_err(|error| failed(io::Error::other(error)))?,
            made_by: made.get(index).cloned().flatten(),
            size: described.size(),
            unpacked_size: files.values().map(|file| file.size).sum(),
            files,
            remarks,
        });
    }
    let labels: BTreeMap<String, String> = config.labels().clone().into_iter().flatten().collect();
    let Image { objects, privileged, mut unreadable } = image;
    let objects: Vec<_> = objects
        .into_iter()
        .map(|(path, report)| Object { path: path.display().to_string(), report })
        .collect();
    let contract = contract::derive(&objects);
    let said: BTreeMap<_, _> =
        labels.iter().filter(|(label, _)| label.starts_with(contract::LABELS)).collect();
    let found = contract.terms.labels();
    if !said.is_empty() && !said.iter().map(|(label, value)| (*label, *value)).eq(&found) {
        unreadable.push(format!("its labels say {said:?}; its files say {found:?}"));
    }
    Ok(Report {
        digest: layout.digest,
        platform: format!("{}/{}", configuration.os(), configuration.architecture()),
        size: layers.iter().map(|layer| layer.size).sum(),
        user: config.user().clone().unwrap_or_default(),
        entrypoint: config.entrypoint().clone().unwrap_or_default(),
        working_dir: config.working_dir().clone().unwrap_or_default(),
        env: config.env().clone().unwrap_or_default(),
        labels,
        contract,
        remarks: unreadable,
        privileged: privileged.into_iter().map(|(path, why)| (path.display().to_string(), why)).collect(),
        layers,
    })
}

/// What all layers so far make together.
#[derive(Default)]
struct Image {
    /// ELF files.
    objects: BTreeMap<PathBuf, elf::Report>,
    privileged: BTreeMap<PathBuf, String>,
    unreadable: Vec<String>,
}

impl Image {
    /// Forgets what was at a path, and below it.
    fn remove(&mut self, path: &Path) {
        fn without<T>(map: &mut BTreeMap<PathBuf, T>, path: &Path) {
            // Paths are in order of their parts, so that what is below one follows it.
            let from = map.range(path.to_owned()..);
            let below: Vec<_> =
                from.map(|(other, _)| other.clone()).take_while(|other| other.starts_with(path)).collect();
            for path in below {
                map.remove(&path);
            }
        }
        without(&mut self.objects, path);
        without(&mut self.privileged, path);
    }

    /// Takes note of an ELF file.
    fn read(&mut self, path: &Path, mut body: impl Read) -> io::Result<Digest> {
        let mut magic = Vec::new();
        body.by_ref().take(4).read_to_end(&mut magic)?;
        let mut whole = magic.as_slice().chain(body);
        if magic != elf::MAGIC {
            return Ok(digest_of(&mut whole)?.0);
        }
        let mut file = tempfile::NamedTempFile::new()?;
        io::copy(&mut whole, &mut file)?;
        let (digest, _) = digest_of(file.reopen()?)?;
        let name = path.display().to_string();
        match elf::map(file.path()).and_then(|bytes| elf::read(&name, &bytes)) {
            Ok(report) => drop(report.map(|report| self.objects.insert(path.to_owned(), report))),
            Err(error) => self.unreadable.push(error.to_string()),
        }
        Ok(digest)
    }
}

/// The files of a layer, and remarks on its other entries.
fn read(layer: impl Read, image: &mut Image) -> io::Result<(BTreeMap<String, FileReport>, Vec<String>)> {
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
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if let Some(removed) = name.strip_prefix(".wh.") {
            match removed {
                ".wh..opq" => image.remove(path.parent().unwrap_or(&path)),
                removed => image.remove(&path.with_file_name(removed)),
            }
            continue;
        }
        let kind = entry.header().entry_type();
        if kind != EntryType::Directory {
            image.remove(&path);
        }
        match kind {
            EntryType::Regular | EntryType::Continuous => {
                let (size, mode) = (entry.size(), entry.header().mode()?);
                let capable = capabilities(&mut entry)?;
                let gives: Vec<_> = [
                    (mode & 0o4000 != 0, "set-user-id"),
                    (mode & 0o2000 != 0, "set-group-id"),
                    (capable, "capabilities"),
                ]
                .into_iter()
                .filter_map(|(has, what)| has.then_some(what))
                .collect();
                if !gives.is_empty() {
                    image.privileged.insert(path.clone(), gives.join(", "));
                }
                let digest = image.read(&path, &mut entry)?;
                files.insert(path.display().to_string(), FileReport { size, mode, digest });
            }
            EntryType::Symlink => drop(links.insert(path)),
            EntryType::Directory | EntryType::Link => {}
            other => remarks.push(format!("{}: is a {}", named.display(), special(other))),
        }
    }
    Ok((files, remarks))
}

/// Whether a file has capabilities of its own (`security.capability`, capabilities(7)).
fn capabilities(entry: &mut tar::Entry<'_, impl Read>) -> io::Result<bool> {
    let Some(extensions) = entry.pax_extensions()? else { return Ok(false) };
    // Attributes with a line feed cannot be told apart from what follows them; they are none of these.
    Ok(extensions.flatten().any(|one| one.key_bytes() == b"SCHILY.xattr.security.capability"))
}

fn special(kind: EntryType) -> String {
    match kind {
        EntryType::Char => "character device".to_owned(),
        EntryType::Block => "block device".to_owned(),
        EntryType::Fifo => "named pipe".to_owned(),
        other => format!("tar entry of kind {:?}", char::from(other.as_byte())),
    }
}
