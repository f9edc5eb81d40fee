//! From a manifest and its lock to an image: the order of the work, and what is remembered between runs.
//!
//! An image is a pure function of the manifest, the lock and the sources that a cargo input compiles. What is done once
//! is not done again: a layer whose files have not changed is taken from the store, and so is a whole image.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fs_err::File;
use serde::{Deserialize, Serialize};
use trainyard_spec::image::ImageManifest;
use trainyard_spec::input::Input;
use trainyard_spec::lock::{Lock, LockedInput};
use trainyard_spec::{ByteSize, Digest, FormatVersion, Name};

use crate::input::cargo::{Compilation, Toolchain};
use crate::input::link::Linked;
use crate::input::{self, cargo, deb, link};
use crate::layer::{self, Layer};
use crate::progress::{Event, Progress};
use crate::settings::{LinkFrom, Settings};
use crate::store::{self, Store, digest_of};
use crate::tree::{Conflict, Tree};
use crate::unchanged::{self, Sources};
use crate::{lock, manifest, oci, tree};

/// Files named when an image is larger than its budget.
const LARGEST_NAMED: usize = 5;

/// An image in the cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Image {
    /// Its name in the manifest.
    pub name: Name,
    /// Digest of its OCI manifest.
    pub digest: Digest,
    /// Folder of the OCI layout that holds it.
    pub layout: PathBuf,
    /// Its layers, from the lowest.
    pub layers: Vec<Layer>,
    /// Whether it was there already.
    pub reused: bool,
    /// Why another machine would build another digest; none where it would not.
    pub not_reproducible: Option<String>,
}

impl Image {
    /// Bytes of all compressed layers.
    pub fn size(&self) -> u64 {
        self.layers.iter().map(|layer| layer.size).sum()
    }
}

/// Why an image could not be built.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A source or binary cannot be read.
    #[error("cannot read {path}: {source}", path = .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
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
    /// The host's static libraries are not the locked ones.
    #[error("this host would link other bytes than the lock names: {differences}")]
    HostDiffers {
        /// File by file.
        differences: String,
    },
    /// An input could not be had.
    #[error(transparent)]
    Input(#[from] input::Error),
    /// Binaries could not be compiled.
    #[error(transparent)]
    Cargo(#[from] cargo::Error),
    /// There is nothing to link.
    #[error(transparent)]
    Link(#[from] link::Error),
    /// Two inputs want one path.
    #[error(transparent)]
    Conflict(#[from] Conflict),
    /// A layer could not be written.
    #[error(transparent)]
    Layer(#[from] layer::Error),
    /// The layout could not be written.
    #[error(transparent)]
    Layout(#[from] oci::Error),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] store::Error),
    /// The image is larger than it may be.
    #[error("the image has {found} compressed; max-size is {budget}; its largest files are {largest}")]
    Budget {
        /// Size found.
        found: ByteSize,
        /// Size allowed.
        budget: ByteSize,
        /// The largest files, with their sizes before compression.
        largest: String,
    },
}

impl Error {
    /// The way out.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Lock(error) => error.hint(),
            Self::Kind { manifest, .. } => Some(format!("trainyard lock {}", manifest.display())),
            Self::HostDiffers { .. } => {
                Some("configure apt, or use a host whose apt is configured for a Debian archive, to link the locked packages".to_owned())
            }
            Self::Input(error) => error.hint(),
            Self::Cargo(error) => error.hint(),
            Self::Link(error) => error.hint().map(str::to_owned),
            Self::Store(error) | Self::Layer(layer::Error::Store(error)) | Self::Layout(oci::Error::Store(error)) => {
                error.hint().map(str::to_owned)
            }
            Self::Budget { .. } => Some("raise max-size in the manifest, or leave something out".to_owned()),
            Self::Layer(layer::Error::Changed { .. }) => Some("run the command again".to_owned()),
            Self::Read { .. } | Self::Manifest(_) | Self::Conflict(_) | Self::Layer(_) | Self::Layout(_) => None,
        }
    }
}

/// Where a build keeps its work: the cache, or, to verify an image, a folder of its own.
#[derive(Debug, Clone)]
pub(crate) struct Workshop {
    /// Fetched inputs.
    pub(crate) inputs: Store,
    /// Layers.
    pub(crate) layers: Store,
    /// The folder above cargo's target folders.
    pub(crate) cargo: PathBuf,
}

/// An image that has been put together and not yet laid out.
#[derive(Debug)]
pub(crate) struct Assembled {
    pub(crate) manifest: ImageManifest,
    pub(crate) layers: Vec<Layer>,
    pub(crate) documents: oci::Documents,
    pub(crate) not_reproducible: Option<String>,
    pub(crate) sources: Sources,
}

/// Builds the image of a manifest into the cache, or finds it there.
///
/// # Errors
/// When the manifest or lock is wrong, an input cannot be had, compilation fails, or the image is over its budget.
pub fn build(manifest: &Path, settings: &Settings, progress: Progress<'_>) -> Result<Image, Error> {
    let store = Store::new(&settings.cache);
    if let Some(image) = unchanged::image(manifest, settings)
        && oci::is_whole(&image.layout)
    {
        // It may have been linked differently than the lock says, which has to be said each time.
        if let Some(reason) = &image.not_reproducible {
            progress(Event::NotReproducible { reason: reason.clone() });
        }
        progress(Event::Image { digest: image.digest, reused: true });
        return Ok(Image { reused: true, ..image });
    }
    store.sweep()?;
    let started = unchanged::moment(&store)?;
    let workshop =
        Workshop { inputs: store.clone(), layers: store.clone(), cargo: settings.cache.join("cargo") };
    let assembled = assemble(manifest, &workshop, settings, progress)?;
    let Assembled { manifest: described, layers, documents, not_reproducible, sources } = assembled;
    let digest = documents.digest;
    let layout = settings.cache.join("images").join(digest.hex());
    let _only_one = store.lock(&format!("image-{}", digest.short()))?;
    let reused = oci::is_whole(&layout);
    if !reused {
        let staging = store.staging()?;
        oci::write(&documents, described.name.as_str(), described.platform, &layers, &store, &staging)?;
        staging.install(&layout)?;
    }
    let image = Image { name: described.name, digest, layout, layers, reused, not_reproducible };
    unchanged::remember(manifest, settings, &image, &sources, started)?;
    progress(Event::Image { digest, reused });
    Ok(image)
}

/// Puts an image together in a workshop.
pub(crate) fn assemble(
    path: &Path,
    workshop: &Workshop,
    settings: &Settings,
    progress: Progress<'_>,
) -> Result<Assembled, Error> {
    let manifest: ImageManifest = manifest::read(path)?;
    let lock = lock::read(path, &manifest.input)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let build = Build { path, folder, manifest: &manifest, lock: &lock, workshop, settings, progress };
    let mut whole = Tree::default();
    let mut layers = Vec::new();
    let mut labels = BTreeMap::new();
    let mut sources = Sources::default();
    for layer in &manifest.layer {
        let Files { files, differs, sources: read } = build.files(&layer.input)?;
        sources.packages.extend(read.packages);
        sources.files.extend(read.files);
        if let Some(differs) = differs {
            labels.insert(oci::NOT_REPRODUCIBLE.to_owned(), differs);
        }
        let mut tree = Tree::default();
        for (name, file) in files {
            let target = format!("{}/{name}", layer.into.trim_end_matches('/'));
            // Layers share one root: what one holds, another must not.
            whole.add(&target, file.clone())?;
            tree.add(&target, file)?;
        }
        let written = write_layer(&layer.name, &tree, &workshop.layers)?;
        progress(Event::Layer { name: layer.name.clone(), size: written.size });
        layers.push(written);
    }
    check_budget(&manifest, &layers, &whole)?;
    let documents = oci::describe(&manifest, &layers, &labels)?;
    let not_reproducible = labels.remove(oci::NOT_REPRODUCIBLE);
    Ok(Assembled { manifest, layers, documents, not_reproducible, sources })
}

/// All that the work on one manifest looks at.
struct Build<'a> {
    path: &'a Path,
    folder: &'a Path,
    manifest: &'a ImageManifest,
    lock: &'a Lock,
    workshop: &'a Workshop,
    settings: &'a Settings,
    progress: Progress<'a>,
}

/// The files of an input.
struct Files {
    /// By name.
    files: Vec<(String, tree::File)>,
    /// How they differ from what another machine would make.
    differs: Option<String>,
    /// What they were made from.
    sources: Sources,
}

impl Build<'_> {
    /// The files of a layer's input.
    fn files(&self, input: &Name) -> Result<Files, Error> {
        let kind = || Error::Kind { input: input.clone(), manifest: self.path.to_owned() };
        let (Some(Input::Cargo { workspace, packages, link }), Some(LockedInput::Cargo { rustc, commit })) =
            (self.manifest.input.get(input), self.lock.input.get(input))
        else {
            return Err(kind());
        };
        let workspace = self.folder.join(workspace);
        let workspace = fs_err::canonicalize(&workspace)
            .map_err(|source| Error::Read { path: workspace.clone(), source })?;
        let tools = &self.settings.tools;
        let toolchain = Toolchain::of(&workspace, tools)?;
        toolchain.check(rustc, commit)?;
        let linked = self.linked(link)?;
        // cargo does not notice that other files are linked, so these have a target folder of their own.
        let workspace_key = Digest::of(workspace.as_os_str().as_encoded_bytes()).short();
        let target = self.workshop.cargo.join(format!("{workspace_key}-{}", linked.digest().short()));
        let compilation = Compilation {
            workspace: &workspace,
            packages,
            toolchain: &toolchain,
            linked: &linked,
            target: &target,
        };
        let binaries = cargo::compile(&compilation, &self.workshop.layers, tools, self.progress)?;
        let paths = binaries.iter().map(|binary| binary.path.as_path());
        let sources =
            Sources::of(&workspace, paths).map_err(|source| Error::Read { path: target.clone(), source })?;
        let files = binaries.into_iter().map(|binary| {
            let read = |source| Error::Read { path: binary.path.clone(), source };
            let (digest, size) = digest_of(File::open(&binary.path).map_err(read)?).map_err(read)?;
            Ok((
                binary.name,
                tree::File { owner: input.clone(), source: binary.path, digest, size, executable: true },
            ))
        });
        Ok(Files { files: files.collect::<Result<_, Error>>()?, differs: linked.differs, sources })
    }

    /// What is linked: the locked packages, or what the host has where these are out of reach.
    fn linked(&self, names: &[Name]) -> Result<Linked, Error> {
        let mut folders = Vec::new();
        let mut wanted = BTreeMap::new();
        let mut unreachable = None;
        for name in names {
            let Some(LockedInput::Deb { objects, file, .. }) = self.lock.input.get(name) else {
                return Err(Error::Kind { input: name.clone(), manifest: self.path.to_owned() });
            };
            wanted.extend(objects.clone());
            match deb::objects(file, objects, &self.workshop.inputs, self.settings, self.progress) {
                Ok(folder) => folders.push(folder),
                Err(error) if error.is_out_of_reach() => unreachable = Some(error),
                Err(error) => return Err(error.into()),
            }
        }
        let Some(unreachable) = unreachable else { return Ok(Linked::from_packages(&folders)?) };
        let linked = match Linked::from_host(&wanted, &self.settings.tools) {
            Ok(linked) => linked,
            // What has to be said is why the locked packages could not be had.
            Err(_) if self.settings.link == LinkFrom::Locked => return Err(unreachable.into()),
            Err(error) => return Err(error.into()),
        };
        match (&linked.differs, self.settings.link) {
            (None, _) => {}
            (Some(differences), LinkFrom::Locked) => {
                return Err(Error::HostDiffers { differences: differences.clone() });
            }
            (Some(differences), LinkFrom::HostAllowed) => {
                (self.progress)(Event::NotReproducible { reason: format!("{unreachable}; {differences}") });
            }
        }
        Ok(linked)
    }
}

/// A layer in the store, remembered by what is in it.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Remembered {
    version: FormatVersion<1>,
    layer: Layer,
}

/// Writes a layer, or finds it in the store.
fn write_layer(name: &Name, tree: &Tree, store: &Store) -> Result<Layer, Error> {
    let mut content = format!("{}\n", layer::FORMAT);
    for (path, entry) in tree.iter() {
        content += &match entry {
            tree::Entry::Folder => format!("folder {path}\n"),
            tree::Entry::File(file) => {
                format!("file {path} {} {} {}\n", file.digest, file.size, file.executable)
            }
        };
    }
    let key = Digest::of(content.as_bytes());
    let note = store.folder("layers")?.join(format!("{}.json", key.hex()));
    let remembered = std::fs::read(&note).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
    if let Some(Remembered { layer, .. }) = remembered
        && std::fs::metadata(store.path(&layer.digest)).is_ok_and(|found| found.len() == layer.size)
    {
        return Ok(Layer { name: name.clone(), ..layer });
    }
    let layer = layer::write(name, tree, store)?;
    let remembered = Remembered { version: FormatVersion, layer: layer.clone() };
    let bytes = serde_json::to_vec(&remembered).map_err(oci::Error::Json)?;
    store::write_whole(&note, &bytes)?;
    Ok(layer)
}

fn check_budget(manifest: &ImageManifest, layers: &[Layer], whole: &Tree) -> Result<(), Error> {
    let found = ByteSize(layers.iter().map(|layer| layer.size).sum());
    let Some(budget) = manifest.max_size.filter(|budget| found > *budget) else { return Ok(()) };
    let mut files: Vec<_> = whole.files().collect();
    files.sort_by_key(|(path, file)| (std::cmp::Reverse(file.size), *path));
    let largest: Vec<_> = files
        .iter()
        .take(LARGEST_NAMED)
        .map(|(path, file)| format!("/{path} ({})", ByteSize(file.size)))
        .collect();
    Err(Error::Budget { found, budget, largest: largest.join(", ") })
}

/// The layout of the image that was last built from a manifest, if it is still in the cache.
pub fn last_built(manifest: &Path, cache: &Path) -> Option<PathBuf> {
    let layout = unchanged::last(manifest, cache)?.layout;
    layout.is_dir().then_some(layout)
}
