//! Base images, from a registry, a folder or an archive: their layers as they are, and what these hold together.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use fs_err::File;
use oci_spec::image::{History, MediaType};
use serde::{Deserialize, Serialize};
use trainyard_spec::image::{Compression, Platform};
use trainyard_spec::lock::{LockedFile, LockedInput};
use trainyard_spec::{Digest, FormatVersion, Name};

use super::{Error, archive};
use crate::layer::Layer;
use crate::oci::{self, Layout};
use crate::progress::{Event, Progress};
use crate::registry::{Options, Reference, Repository};
use crate::settings::Settings;
use crate::store::{self, Store, digest_of};
use crate::tree::{Owner, Tree};
use crate::unpacked;

/// A base image.
#[derive(Debug)]
pub(crate) struct Base {
    /// What the manifest calls its image.
    pub(crate) image: String,
    /// Digest of its manifest.
    pub(crate) digest: Digest,
    /// Its layers, from the lowest.
    pub(crate) layers: Vec<Layer>,
    /// Its environment.
    pub(crate) env: Vec<String>,
    /// What it says of how it was made.
    pub(crate) history: Vec<History>,
}

/// Pins a base image.
///
/// # Errors
/// When it cannot be had, or has no image for the platform.
pub(crate) fn resolve(
    image: &str,
    folder: &Path,
    platform: Platform,
    settings: &Settings,
    progress: Progress<'_>,
) -> Result<LockedInput, Error> {
    Ok(LockedInput::Oci { digest: obtain(image, folder, platform, settings, progress)?.digest })
}

/// The layout of a locked base image, which is in the cache from then on.
fn locked(
    image: &str,
    digest: &Digest,
    folder: &Path,
    platform: Platform,
    settings: &Settings,
    progress: Progress<'_>,
) -> Result<Layout, Error> {
    let kept = settings.cache.join("images").join(digest.hex());
    if oci::is_whole(&kept) {
        store::used(&kept);
        return Ok(Layout::open(&kept)?);
    }
    let has_it = |folder: &&PathBuf| oci::blob_path(folder, digest).is_file();
    if let Some(folder) = settings.index.vendored.iter().find(has_it) {
        return Ok(Layout::by_digest(folder, digest)?.adopt(&Store::new(&settings.cache))?);
    }
    // A tag may have moved on; the locked digest is what is asked for.
    let pinned = match image.parse::<Reference>() {
        Ok(reference) if !is_path(image) => reference.at(*digest).to_string(),
        _ => image.to_owned(),
    };
    let found = obtain(&pinned, folder, platform, settings, progress)?;
    if found.digest == *digest {
        Ok(found)
    } else {
        Err(Error::BaseDiffers { image: image.to_owned(), found: found.digest, locked: *digest })
    }
}

/// Sees that a locked base image is in a store, blob by blob, and names these.
///
/// # Errors
/// When it cannot be had or is damaged.
pub(super) fn fetch(
    image: &str,
    digest: &Digest,
    folder: &Path,
    platform: Platform,
    store: &Store,
    settings: &Settings,
    progress: Progress<'_>,
) -> Result<Vec<LockedFile>, Error> {
    let layout = locked(image, digest, folder, platform, settings, progress)?;
    let named = |what: &str, sha256, size| LockedFile { name: format!("{image} ({what})"), size, sha256 };
    let manifest = fs_err::metadata(oci::blob_path(layout.folder(), digest));
    let manifest = manifest.map_err(store::io_error("look at", layout.folder()))?;
    let mut blobs = vec![named("manifest", *digest, manifest.len())];
    let described = layout.manifest.layers().iter().map(|layer| ("layer", layer));
    for (what, described) in [("configuration", layout.manifest.config())].into_iter().chain(described) {
        blobs.push(named(what, oci::place(layout.folder(), described)?.1, described.size()));
    }
    for blob in &blobs {
        if store.verified(&blob.sha256)?.is_none() {
            let path = oci::blob_path(layout.folder(), &blob.sha256);
            let mut incoming = store.incoming()?;
            let mut file = File::open(&path).map_err(store::io_error("open", &path))?;
            io::copy(&mut file, &mut incoming).map_err(store::io_error("copy", &path))?;
            store.keep_as(incoming, blob)?;
        }
    }
    Ok(blobs)
}

fn is_path(image: &str) -> bool {
    ["./", "../", "/"].iter().any(|start| image.starts_with(start))
}

/// Brings an image into the cache.
fn obtain(
    image: &str,
    folder: &Path,
    platform: Platform,
    settings: &Settings,
    progress: Progress<'_>,
) -> Result<Layout, Error> {
    if !is_path(image) {
        let reference: Reference = image.parse()?;
        let repository = Repository::connect(&reference, settings, Options::default(), progress)?;
        return Ok(Layout::open(&repository.pull(platform, progress)?.layout)?);
    }
    let path = folder.join(image);
    let store = Store::new(&settings.cache);
    if path.is_dir() {
        return Ok(Layout::open_for(&path, platform)?.adopt(&store)?);
    }
    let unpacked = store.staging()?;
    let into = unpacked.path();
    progress(Event::Unpacking { file: path.display().to_string() });
    archive::visit(&path, archive::Kind::Tar, archive::Limits::default(), &mut |entry, body| {
        let target = into.join(&entry.path);
        match entry.kind {
            archive::EntryKind::Folder => fs_err::create_dir_all(target),
            archive::EntryKind::File => {
                fs_err::create_dir_all(target.parent().unwrap_or(into))?;
                io::copy(body, &mut File::create_new(target)?).map(drop)
            }
            // A layout has none.
            archive::EntryKind::Symlink(_) | archive::EntryKind::HardLink(_) => Ok(()),
        }
    })?;
    Ok(Layout::open_for(into, platform)?.adopt(&store)?)
}

/// What is remembered of a layer.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Remembered {
    version: FormatVersion<1>,
    diff_id: Digest,
    unpacked_size: u64,
}

/// What a build asks of a base image.
pub(crate) struct Asked<'a> {
    pub(crate) input: &'a Name,
    pub(crate) image: &'a str,
    pub(crate) digest: &'a Digest,
    /// Folder of the manifest.
    pub(crate) folder: &'a Path,
    pub(crate) platform: Platform,
    /// Where bodies of files are kept.
    pub(crate) store: &'a Store,
    /// Where the image's layers are wanted.
    pub(crate) layers: &'a Store,
}

/// A locked base image, and all that it holds as a tree.
///
/// # Errors
/// When it cannot be had, is damaged, or has a layer of a form that is not known.
pub(crate) fn base(
    asked: &Asked<'_>,
    settings: &Settings,
    progress: Progress<'_>,
) -> Result<(Base, Tree), Error> {
    let layout = locked(asked.image, asked.digest, asked.folder, asked.platform, settings, progress)?;
    let mut tree = Tree::default();
    let mut layers = Vec::new();
    for (index, described) in layout.manifest.layers().iter().enumerate() {
        let (path, digest) = oci::place(layout.folder(), described)?;
        let compression = match described.media_type() {
            MediaType::ImageLayerGzip => Compression::Gzip,
            MediaType::ImageLayerZstd => Compression::Zstd,
            MediaType::Other(name) if name == oci::DOCKER_LAYER => Compression::Gzip,
            other => {
                let media_type = other.to_string();
                return Err(Error::BaseLayer { image: asked.image.to_owned(), digest, media_type });
            }
        };
        let note = asked.store.folder("bases")?.join(format!("{}.json", digest.hex()));
        let remembered = std::fs::read(&note).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let Remembered { diff_id, unpacked_size, .. } = match remembered {
            Some(remembered) => {
                store::used(&note);
                remembered
            }
            None => {
                let read = |source| oci::Error::Read { path: path.clone(), source };
                let (diff_id, unpacked_size) = digest_of(layout.layer(described)?).map_err(read)?;
                let made = Remembered { version: FormatVersion, diff_id, unpacked_size };
                // Digests and numbers alone, which are always JSON.
                store::write_whole(&note, &serde_json::to_vec(&made).unwrap_or_default())?;
                made
            }
        };
        let said = layout.configuration.rootfs().diff_ids().get(index).cloned().unwrap_or_default();
        if said != diff_id.to_string() {
            return Err(oci::Error::Layout {
                path: layout.folder().to_owned(),
                message: format!(
                    "its configuration says that layer {digest} unpacks to {said:?}; it unpacks to {diff_id}"
                ),
            }
            .into());
        }
        progress(Event::Unpacking { file: format!("layer {}", digest.short()) });
        overlay(&path, &digest, asked, &mut tree)?;
        if !asked.layers.path(&digest).exists() {
            let mut incoming = asked.layers.incoming()?;
            let failed = |source| oci::Error::Read { path: path.clone(), source };
            io::copy(&mut File::open(&path).map_err(failed)?, &mut incoming).map_err(failed)?;
            asked.layers.keep(incoming)?;
        } else {
            store::used(&asked.layers.path(&digest));
        }
        let size = described.size();
        layers.push(Layer { name: asked.input.clone(), digest, size, diff_id, unpacked_size, compression });
    }
    let config = layout.configuration.config().clone().unwrap_or_default();
    let base = Base {
        image: asked.image.to_owned(),
        digest: *asked.digest,
        layers,
        env: config.env().clone().unwrap_or_default(),
        history: layout.configuration.history().clone().unwrap_or_default(),
    };
    Ok((base, tree))
}

/// Lays what a layer holds over what is below it (OCI image layer format, "Whiteouts").
fn overlay(path: &Path, digest: &Digest, asked: &Asked<'_>, tree: &mut Tree) -> Result<(), Error> {
    let entries = unpacked::unpack(path, digest, archive::Kind::Layer, asked.store, &unpacked::ALL)?;
    let split = |path: &str| -> (String, String) {
        path.rsplit_once('/')
            .map_or((String::new(), path.to_owned()), |(folder, name)| (folder.to_owned(), name.to_owned()))
    };
    let join = |folder: &str, name: &str| {
        if folder.is_empty() { name.to_owned() } else { format!("{folder}/{name}") }
    };
    for (folder, name) in entries.keys().map(|path| split(path)) {
        match name.strip_prefix(".wh.") {
            Some(".wh..opq") => {
                let below: Vec<_> = tree.children(&folder).map(|(_, path)| path.to_owned()).collect();
                below.iter().for_each(|path| tree.remove(path));
            }
            Some(removed) => tree.remove(&join(&folder, removed)),
            None => {}
        }
    }
    let owner = Owner { input: asked.input.clone(), package: None };
    for (path, meta, kind) in unpacked::nodes(&entries, &digest.to_string(), asked.store) {
        if !split(path).1.starts_with(".wh.") {
            tree.overlay(path, owner.clone(), meta, kind);
        }
    }
    Ok(())
}

/// Environment variables of a base image with others laid over them, sorted by name.
pub(crate) fn environment(base: Option<&Base>, own: &BTreeMap<String, String>) -> Vec<String> {
    let below = base.iter().flat_map(|base| &base.env).filter_map(|text| text.split_once('='));
    let mut all: BTreeMap<&str, &str> = below.collect();
    all.extend(own.iter().map(|(name, value)| (name.as_str(), value.as_str())));
    all.into_iter().map(|(name, value)| format!("{name}={value}")).collect()
}
