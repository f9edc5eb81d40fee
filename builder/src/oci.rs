//! OCI image layouts: one image in a folder, in the form that Podman, skopeo and umoci read.
//!
//! JSON is written in canonical form (RFC 8785), so that the same values have the same digest. What is read is
//! verified: a document or layer whose bytes are not those of its digest is refused.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use fs_err::File;
use oci_spec::image::{
    Arch, Config, ConfigBuilder, Descriptor, DescriptorBuilder, History, HistoryBuilder, ImageConfiguration,
    ImageConfigurationBuilder, ImageIndex, ImageIndexBuilder, ImageManifest, ImageManifestBuilder, MediaType,
    OciLayoutBuilder, Os, RootFsBuilder,
};
use serde::Serialize;
use trainyard_spec::image::{Compression, Platform};
use trainyard_spec::{Digest, image};

use crate::decompress::decompress;
use crate::input::oci::{Base, environment};
use crate::layer::Layer;
use crate::store::{self, Staging, Store, digest_of};

/// Label of an image that another machine would build with another digest; its value says why.
pub const NOT_REPRODUCIBLE: &str = "trainyard.not-reproducible";
/// Annotation of an image in a layout: its name.
pub(crate) const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// Labels of an image that has a base (OCI image specification, "Pre-Defined Annotation Keys").
const BASE_LABEL: &str = "org.opencontainers.image.base";
/// A layer as Docker's own manifests (schema 2) name it.
pub(crate) const DOCKER_LAYER: &str = "application/vnd.docker.image.rootfs.diff.tar.gzip";
/// The time that an image claims to be from. Any fixed one will do.
const CREATED: &str = "1970-01-01T00:00:00Z";
/// Manifests and configurations are small; a larger one is an attack or a mistake.
const LARGEST_DOCUMENT: u64 = 4 << 20;

/// Why a layout could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A folder is no layout, or one that this code does not know.
    #[error("{path} is not an OCI layout that can be read: {message}", path = .path.display())]
    Layout {
        /// The folder or file.
        path: PathBuf,
        /// What was found and needed.
        message: String,
    },
    /// A file of the layout is not what its digest says.
    #[error("{path} is damaged: it should have {expected}, and has {found}", path = .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Digest that names it.
        expected: Digest,
        /// Digest of its bytes.
        found: Digest,
    },
    /// A file could not be read.
    #[error("cannot read {path}: {source}", path = .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The values do not make an OCI document.
    #[error("cannot write the image's documents: {0}")]
    Document(#[from] oci_spec::OciSpecError),
    /// The values have no canonical JSON form.
    #[error("cannot write the image's documents: {0}")]
    Json(#[from] serde_json::Error),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] store::Error),
}

/// The two documents of an image, ready to be written.
#[derive(Debug, Clone)]
pub(crate) struct Documents {
    manifest: Vec<u8>,
    configuration: Vec<u8>,
    /// Digest of the manifest: the image's digest.
    pub(crate) digest: Digest,
}

/// Describes an image of `layers`.
pub(crate) fn describe(
    manifest: &image::ImageManifest,
    base: Option<&Base>,
    layers: &[Layer],
    extra_labels: &BTreeMap<String, String>,
) -> Result<Documents, Error> {
    let below = base.map_or(0, |base| base.layers.len());
    let history = layers.iter().skip(below).map(|layer| {
        let made = format!("trainyard build: layer {}", layer.name);
        HistoryBuilder::default().created(CREATED).created_by(made).build()
    });
    let configuration = ImageConfigurationBuilder::default()
        .created(CREATED)
        .architecture(Arch::from(manifest.platform.architecture()))
        .os(Os::Linux)
        .config(config(manifest, base, extra_labels)?)
        .rootfs(
            RootFsBuilder::default()
                .typ("layers")
                .diff_ids(layers.iter().map(|layer| layer.diff_id.to_string()).collect::<Vec<_>>())
                .build()?,
        )
        .history(
            base.iter()
                .flat_map(|base| base.history.clone())
                .map(Ok)
                .chain(history)
                .collect::<Result<Vec<History>, _>>()?,
        )
        .build()?;
    let configuration = canonical(&configuration)?;
    let manifest = ImageManifestBuilder::default()
        .schema_version(2_u32)
        .media_type(MediaType::ImageManifest)
        .config(descriptor(MediaType::ImageConfig, &configuration)?)
        .layers(
            layers
                .iter()
                .map(|layer| {
                    let kind = match layer.compression {
                        Compression::Gzip => MediaType::ImageLayerGzip,
                        Compression::Zstd => MediaType::ImageLayerZstd,
                    };
                    Ok(Descriptor::new(kind, layer.size, to_oci(&layer.digest)?))
                })
                .collect::<Result<Vec<_>, Error>>()?,
        )
        .build()?;
    let manifest = canonical(&manifest)?;
    Ok(Documents { digest: Digest::of(&manifest), manifest, configuration })
}

fn config(
    manifest: &image::ImageManifest,
    base: Option<&Base>,
    extra_labels: &BTreeMap<String, String>,
) -> Result<Config, Error> {
    let mut labels =
        BTreeMap::from([("org.opencontainers.image.title".to_owned(), manifest.name.to_string())]);
    if let Some(base) = base {
        labels.insert(format!("{BASE_LABEL}.name"), base.image.clone());
        labels.insert(format!("{BASE_LABEL}.digest"), base.digest.to_string());
    }
    labels.extend(manifest.config.labels.clone());
    labels.extend(extra_labels.clone());
    Ok(ConfigBuilder::default()
        .user(manifest.config.user.as_str())
        .entrypoint(manifest.config.entrypoint.clone())
        .env(environment(base, &manifest.config.env))
        .working_dir(manifest.config.working_dir.as_str())
        .labels(hashed(labels))
        .build()?)
}

#[expect(clippy::disallowed_types, reason = "the type that oci-spec takes")]
type Hashed = std::collections::HashMap<String, String>;

/// What `oci-spec` takes. Nothing depends on its order: canonical JSON sorts it.
pub(crate) fn hashed(sorted: BTreeMap<String, String>) -> Hashed {
    sorted.into_iter().collect()
}

pub(crate) fn canonical(document: &impl Serialize) -> Result<Vec<u8>, Error> {
    Ok(serde_json_canonicalizer::to_vec(document)?)
}

pub(crate) fn descriptor(kind: MediaType, bytes: &[u8]) -> Result<Descriptor, Error> {
    Ok(Descriptor::new(kind, bytes.len() as u64, to_oci(&Digest::of(bytes))?))
}

pub(crate) fn to_oci(digest: &Digest) -> Result<oci_spec::image::Digest, Error> {
    Ok(digest.to_string().parse()?)
}

/// Writes a layout of the image into `staging`, which the caller installs.
pub(crate) fn write(
    documents: &Documents,
    name: &str,
    platform: Platform,
    layers: &[Layer],
    store: &Store,
    staging: &Staging,
) -> Result<(), Error> {
    let platform = oci_spec::image::PlatformBuilder::default()
        .architecture(Arch::from(platform.architecture()))
        .os(Os::Linux)
        .build()?;
    let described = DescriptorBuilder::default()
        .media_type(MediaType::ImageManifest)
        .digest(to_oci(&documents.digest)?)
        .size(documents.manifest.len() as u64)
        .platform(platform)
        .annotations(named(name))
        .build()?;
    let layers: Vec<Digest> = layers.iter().map(|layer| layer.digest).collect();
    lay_out(described, &[&documents.manifest, &documents.configuration], &layers, store, staging)
}

/// The annotation by which other tools find an image in a layout.
pub(crate) fn named(name: &str) -> Hashed {
    hashed(BTreeMap::from([(REF_NAME.to_owned(), name.to_owned())]))
}

/// Writes a layout of the image that `described` names into `staging`: documents as they are, and blobs of the store.
pub(crate) fn lay_out(
    described: Descriptor,
    documents: &[&[u8]],
    stored: &[Digest],
    store: &Store,
    staging: &Staging,
) -> Result<(), Error> {
    let blobs = staging.path().join("blobs/sha256");
    fs_err::create_dir_all(&blobs).map_err(store::io_error("create", &blobs))?;
    let index = ImageIndexBuilder::default()
        .schema_version(2_u32)
        .media_type(MediaType::ImageIndex)
        .manifests(vec![described])
        .build()?;
    for bytes in documents {
        store::write_whole(&blobs.join(Digest::of(bytes).hex()), bytes)?;
    }
    for digest in stored {
        let source = store.path(digest);
        let target = blobs.join(digest.hex());
        // One layer may stand in an image twice.
        if target.exists() {
            continue;
        }
        // A link costs nothing; another file system costs a copy.
        if fs_err::hard_link(&source, &target).is_err() {
            fs_err::copy(&source, &target).map_err(store::io_error("copy a layer to", &target))?;
        }
    }
    let marker = OciLayoutBuilder::default().image_layout_version("1.0.0").build()?;
    store::write_whole(&staging.path().join("oci-layout"), &canonical(&marker)?)?;
    store::write_whole(&staging.path().join("index.json"), &canonical(&index)?)?;
    Ok(())
}

/// A layout that has been opened: its documents are read and verified, its layers not yet.
#[derive(Debug, Clone)]
pub struct Layout {
    folder: PathBuf,
    /// The image's digest.
    pub digest: Digest,
    /// The image manifest.
    pub manifest: ImageManifest,
    /// The image configuration.
    pub configuration: ImageConfiguration,
    /// The bytes of the manifest.
    raw: Vec<u8>,
}

impl Layout {
    /// Opens a layout that holds one image.
    ///
    /// # Errors
    /// When the folder is no such layout, or a document is damaged.
    pub fn open(folder: &Path) -> Result<Self, Error> {
        let index = index(folder)?;
        let [described] = index.manifests().as_slice() else {
            let message = format!("it holds {} images; needed is one", index.manifests().len());
            return Err(wrong(&folder.join("index.json"), message));
        };
        Self::of(folder, described)
    }

    /// Opens an image of a folder with `blobs/sha256/HEX` by its digest, whether or not the folder has an index.
    pub(crate) fn by_digest(folder: &Path, digest: &Digest) -> Result<Self, Error> {
        let path = blob_path(folder, digest);
        let size = std::fs::metadata(&path).map_err(|source| Error::Read { path, source })?.len();
        Self::of(folder, &Descriptor::new(MediaType::ImageManifest, size, to_oci(digest)?))
    }

    fn of(folder: &Path, described: &Descriptor) -> Result<Self, Error> {
        let (path, digest) = place(folder, described)?;
        let raw = raw(folder, described)?;
        let manifest: ImageManifest =
            serde_json::from_slice(&raw).map_err(|error| wrong(&path, error.to_string()))?;
        require_schema(&path, manifest.schema_version())?;
        let configuration: ImageConfiguration = document(folder, manifest.config())?;
        if configuration.rootfs().diff_ids().len() != manifest.layers().len() {
            let message = format!(
                "its configuration lists {} layers and its manifest {}",
                configuration.rootfs().diff_ids().len(),
                manifest.layers().len()
            );
            return Err(wrong(folder, message));
        }
        Ok(Self { folder: folder.to_owned(), digest, manifest, configuration, raw })
    }

    /// Opens the image for a platform of a layout that holds one image, or an index of images.
    ///
    /// # Errors
    /// When the folder is no such layout, has no image for the platform, or a document is damaged.
    pub fn open_for(folder: &Path, platform: Platform) -> Result<Self, Error> {
        let mut index = index(folder)?;
        if let [described] = index.manifests().as_slice()
            && *described.media_type() == MediaType::ImageIndex
        {
            index = document(folder, described)?;
        }
        let fits = |described: &&Descriptor| {
            described.platform().as_ref().is_none_or(|of| {
                *of.os() == Os::Linux && *of.architecture() == Arch::from(platform.architecture())
            })
        };
        let fitting: Vec<_> = index.manifests().iter().filter(fits).collect();
        let [described] = fitting.as_slice() else {
            let message = format!("it holds {} images for {platform}; needed is one", fitting.len());
            return Err(wrong(&folder.join("index.json"), message));
        };
        Self::of(folder, described)
    }

    /// Copies the image into the cache that `store` is of, every blob verified.
    ///
    /// # Errors
    /// When a blob is damaged or the cache cannot be written.
    pub(crate) fn adopt(&self, store: &Store) -> Result<Self, Error> {
        let target = store.folder("images")?.join(self.digest.hex());
        let _only_one = store.lock(&format!("image-{}", self.digest.short()))?;
        if !is_whole(&target) {
            let mut blobs = Vec::new();
            for described in self.manifest.layers() {
                let (path, expected) = place(&self.folder, described)?;
                let failed = |source| Error::Read { path: path.clone(), source };
                let mut incoming = store.incoming()?;
                io::copy(&mut File::open(&path).map_err(failed)?, &mut incoming).map_err(failed)?;
                let (found, size) = store.keep(incoming)?;
                if found != expected {
                    return Err(Error::Damaged { path, expected, found });
                }
                require_size(&path, described, size)?;
                blobs.push(found);
            }
            let staging = store.staging()?;
            let documents = [&self.raw, &raw(&self.folder, self.manifest.config())?];
            let media_type = self.manifest.media_type().clone().unwrap_or(MediaType::ImageManifest);
            let described = descriptor(media_type, &self.raw)?;
            lay_out(described, &documents.map(Vec::as_slice), &blobs, store, &staging)?;
            staging.install(&target)?;
        }
        Self::open(&target)
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The tar archive of a layer whose bytes have just been verified.
    ///
    /// # Errors
    /// When the layer is missing or damaged, or of a kind that is not known.
    pub fn layer(&self, described: &Descriptor) -> Result<Box<dyn io::Read>, Error> {
        let (path, expected) = place(&self.folder, described)?;
        let read = |source| Error::Read { path: path.clone(), source };
        let (found, size) = digest_of(File::open(&path).map_err(read)?).map_err(read)?;
        if found != expected {
            return Err(Error::Damaged { path, expected, found });
        }
        require_size(&path, described, size)?;
        let file = io::BufReader::new(File::open(&path).map_err(read)?);
        match described.media_type() {
            MediaType::ImageLayer | MediaType::ImageLayerGzip | MediaType::ImageLayerZstd => {}
            MediaType::Other(name) if name == DOCKER_LAYER => {}
            other => return Err(wrong(&path, format!("a layer is {other}; known are tar, gzip and zstd"))),
        }
        decompress(file).map_err(read)
    }
}

/// Whether a folder is a layout with all its files: documents verified, layers of the right size. Their bytes are
/// verified when they are read.
pub(crate) fn is_whole(folder: &Path) -> bool {
    let Ok(layout) = Layout::open(folder) else { return false };
    layout.manifest.layers().iter().all(|described| {
        let path = place(folder, described).map(|(path, _)| path);
        path.is_ok_and(|path| std::fs::metadata(path).is_ok_and(|found| found.len() == described.size()))
    })
}

/// What a layout says that it holds.
pub(crate) fn index(folder: &Path) -> Result<ImageIndex, Error> {
    let path = folder.join("index.json");
    let bytes = match bounded(&path) {
        Err(Error::Read { source, .. })
            if matches!(source.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
        {
            return Err(wrong(folder, "it has no index.json".to_owned()));
        }
        bytes => bytes?,
    };
    let index: ImageIndex =
        serde_json::from_slice(&bytes).map_err(|error| wrong(&path, error.to_string()))?;
    require_schema(&path, index.schema_version())?;
    Ok(index)
}

/// Where a layout has a blob.
pub(crate) fn blob_path(folder: &Path, digest: &Digest) -> PathBuf {
    folder.join("blobs/sha256").join(digest.hex())
}

pub(crate) fn place(folder: &Path, described: &Descriptor) -> Result<(PathBuf, Digest), Error> {
    let digest: Digest = described.digest().to_string().parse().map_err(|_| Error::Layout {
        path: folder.to_owned(),
        message: format!("it names something by {}; known is sha256", described.digest()),
    })?;
    Ok((blob_path(folder, &digest), digest))
}

fn document<T: serde::de::DeserializeOwned>(folder: &Path, described: &Descriptor) -> Result<T, Error> {
    let (path, _) = place(folder, described)?;
    serde_json::from_slice(&raw(folder, described)?).map_err(|error| wrong(&path, error.to_string()))
}

/// The verified bytes of a document.
pub(crate) fn raw(folder: &Path, described: &Descriptor) -> Result<Vec<u8>, Error> {
    let (path, expected) = place(folder, described)?;
    let bytes = bounded(&path)?;
    let found = Digest::of(&bytes);
    if found != expected {
        return Err(Error::Damaged { path, expected, found });
    }
    require_size(&path, described, bytes.len() as u64)?;
    Ok(bytes)
}

/// Reads a document. What is longer than any is cut off, and then has another digest or is no JSON.
fn bounded(path: &Path) -> Result<Vec<u8>, Error> {
    let read = |source| Error::Read { path: path.to_owned(), source };
    if !std::fs::metadata(path).map_err(read)?.is_file() {
        return Err(wrong(path, "it is not a regular file".to_owned()));
    }
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(read)?;
    io::Read::read_to_end(&mut io::Read::take(file, LARGEST_DOCUMENT), &mut bytes).map_err(read)?;
    Ok(bytes)
}

fn require_schema(path: &Path, found: u32) -> Result<(), Error> {
    if found == 2 { Ok(()) } else { Err(wrong(path, format!("its schemaVersion is {found}; known is 2"))) }
}

fn require_size(path: &Path, described: &Descriptor, found: u64) -> Result<(), Error> {
    if described.size() == found {
        return Ok(());
    }
    Err(wrong(path, format!("it has {found} bytes; what refers to it says {}", described.size())))
}

fn wrong(path: &Path, message: String) -> Error {
    Error::Layout { path: path.to_owned(), message }
}
