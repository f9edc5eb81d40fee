//! From a manifest and its lock to an image: the order of the work, and what is remembered between runs.
//!
//! An image is a pure function of the manifest, the lock and the sources that a cargo input compiles. What is done once
//! is not done again: a layer whose files have not changed is taken from the store, and so is a whole image.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use trainyard_spec::image::{Closure, Compression, ImageManifest};
use trainyard_spec::{ByteSize, Digest, FormatVersion, Name};

use crate::closure::{self, LeftOut};
use crate::contents::{self, Contents, Gather};
use crate::input::{self, cargo, link};
use crate::layer::{self, Layer};
use crate::loader::{self, Loader, Objects};
use crate::progress::{Event, Progress};
use crate::settings::Settings;
use crate::store::{self, Store};
use crate::supply::{self, Facts, Made};
use crate::tree::{Conflict, Kind, Owner, Tree};
use crate::unchanged::{self, Sources};
use crate::userland::Userland;
use crate::{driver, gpus, lock, manifest, oci, userland};

/// Label of each library that was made smaller, with its file name behind a dot: how much of it became zeros.
pub(crate) const PRUNED_LABEL: &str = "trainyard.pruned";
/// Label of an image that may not be handed on.
pub(crate) const LOCAL_ONLY_LABEL: &str = "trainyard.local-only";
/// Where programs are looked for when an image does not say (runc's default).
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
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
    /// Files that its inputs have and that it does not need, where only what is needed is kept. The largest first.
    #[serde(default)]
    pub left_out: Vec<LeftOut>,
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
    /// What no package holds could not be written.
    #[error(transparent)]
    Userland(#[from] userland::Error),
    /// Libraries of the driver are there that should not be, or the other way round.
    #[error(transparent)]
    Driver(#[from] driver::Error),
    /// It cannot be known what is needed.
    #[error(transparent)]
    Closure(#[from] closure::Error),
    /// The program that a container starts is not there.
    #[error("the entrypoint {program:?} {found}")]
    Entrypoint {
        /// The program.
        program: String,
        /// What is there instead.
        found: &'static str,
    },
    /// The GPU code cannot be read or cut, or something needs what is not there.
    #[error(transparent)]
    Gpus(#[from] gpus::Error),
    /// A layer could not be written.
    #[error(transparent)]
    Layer(#[from] layer::Error),
    /// The layout could not be written.
    #[error(transparent)]
    Layout(#[from] oci::Error),
    /// What it is made of could not be written down.
    #[error(transparent)]
    Facts(#[from] supply::Error),
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
            Self::Gpus(error) => error.hint().map(str::to_owned),
            Self::Driver(error) => error.hint().map(str::to_owned),
            Self::Closure(error) => error.hint().map(str::to_owned),
            Self::Entrypoint { .. } => {
                Some("write its absolute path as it is in the image; an input's `into` says where its files go".to_owned())
            }
            Self::Cargo(error) => error.hint(),
            Self::Link(error) => error.hint().map(str::to_owned),
            Self::Facts(error) => error.hint().map(str::to_owned),
            Self::Store(error) | Self::Layer(layer::Error::Store(error)) | Self::Layout(oci::Error::Store(error)) => {
                error.hint().map(str::to_owned)
            }
            Self::Budget { .. } => Some("raise max-size in the manifest, or leave something out".to_owned()),
            Self::Layer(layer::Error::Changed { .. }) => Some("run the command again".to_owned()),
            Self::Userland(_) | Self::Read { .. } | Self::Manifest(_) | Self::Conflict(_) | Self::Layer(_) | Self::Layout(_) => None,
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
    pub(crate) left_out: Vec<LeftOut>,
    pub(crate) not_reproducible: Option<String>,
    pub(crate) sources: Sources,
    pub(crate) facts: Facts,
}

/// Builds the image of a manifest into the cache, or finds it there.
///
/// # Errors
/// When the manifest or lock is wrong, an input cannot be had, compilation fails, or the image is over its budget.
pub fn build(manifest: &Path, settings: &Settings, progress: Progress<'_>) -> Result<Image, Error> {
    let store = Store::new(&settings.cache);
    let _in_use = store.in_use()?;
    if let Some(image) = unchanged::image(manifest, settings)
        && oci::is_whole(&image.layout)
        // An image of an older Trainyard may have none.
        && Facts::read(&image.digest, &settings.cache).is_ok()
    {
        // It may have been linked differently than the lock says, which has to be said each time.
        if let Some(reason) = &image.not_reproducible {
            progress(Event::NotReproducible { reason: reason.clone() });
        }
        progress(Event::Image { digest: image.digest, reused: true });
        unchanged::used(manifest, &settings.cache);
        store::used(&image.layout);
        return Ok(Image { reused: true, ..image });
    }
    store.sweep()?;
    let started = unchanged::moment(&store)?;
    let workshop =
        Workshop { inputs: store.clone(), layers: store.clone(), cargo: settings.cache.join("cargo") };
    let assembled = assemble(manifest, &workshop, settings, progress)?;
    let Assembled { manifest: described, layers, documents, left_out, not_reproducible, sources, facts } =
        assembled;
    let digest = documents.digest;
    let layout = settings.cache.join("images").join(digest.hex());
    let _only_one = store.lock(&format!("image-{}", digest.short()))?;
    let reused = oci::is_whole(&layout);
    if reused {
        store::used(&layout);
    } else {
        let staging = store.staging()?;
        oci::write(&documents, described.name.as_str(), described.platform, &layers, &store, &staging)?;
        staging.install(&layout)?;
    }
    facts.write(&settings.cache)?;
    let image = Image { name: described.name, digest, layout, layers, reused, left_out, not_reproducible };
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
    let gather = Gather { path, folder, manifest: &manifest, lock: &lock, workshop, settings, progress };
    let Contents {
        mut tree,
        layers: planned,
        mut labels,
        differs,
        base,
        distribution,
        installed,
        inventory,
        sources,
    } = contents::gather(&gather)?;
    let mut objects = loader::objects(&tree).map_err(gpus::Error::from)?;
    let of_driver = driver::arrange(&manifest, &mut tree, &objects)?;
    let left_out = match &manifest.closure {
        Some(closure) => keep_needed(&manifest, closure, &of_driver, &mut tree, &mut objects)?,
        None => Vec::new(),
    };
    if let Some(input) = &distribution {
        let userland = Userland { input, manifest: &manifest, store: &workshop.inputs };
        userland.record(&installed, &objects, &mut tree)?;
    }
    check_entrypoint(&manifest, &tree)?;
    for (path, zeroed) in gpus::prune(&manifest, &mut tree, &mut objects, &workshop.layers, progress)? {
        labels.insert(
            format!("{PRUNED_LABEL}.{}", path.rsplit('/').next().unwrap_or(&path)),
            zeroed.to_string(),
        );
    }
    labels.extend(gpus::contract(&objects)?.terms.labels());
    if manifest.local_only {
        labels.insert(LOCAL_ONLY_LABEL.to_owned(), "true".to_owned());
    }
    // What is written for the whole image lies with its input, whose layers may each be a library's.
    let written_for_all = |owner: &Owner| {
        let mut layers = planned.iter().map(|(_, owners)| owners);
        layers.position(|owners| owners.input() == &owner.input)
    };
    let place = |owner: &Owner, _: &str| {
        planned
            .iter()
            .position(|(_, owners)| owners.hold(owner))
            .or_else(|| written_for_all(owner))
            .unwrap_or(planned.len())
    };
    let mut trees = tree.split(place);
    let mut layers: Vec<Layer> = base.iter().flat_map(|base| base.layers.clone()).collect();
    for (index, (name, _)) in planned.iter().enumerate() {
        // A library that another input has already given is in that one's layer.
        let Some(part) = trees.remove(&index) else { continue };
        let written = write_layer(name, &part, manifest.compression, &workshop.layers)?;
        progress(Event::Layer { name: name.clone(), size: written.size });
        layers.push(written);
    }
    check_budget(&manifest, &layers, &tree)?;
    labels.extend(differs.clone().map(|differs| (oci::NOT_REPRODUCIBLE.to_owned(), differs)));
    let documents = oci::describe(&manifest, base.as_ref(), &layers, &labels)?;
    let made = Made {
        image: documents.digest,
        manifest: &manifest,
        lock: &lock,
        tree: &tree,
        not_reproducible: differs.clone(),
    };
    let facts = Facts::of(made, inventory, &workshop.inputs)?;
    Ok(Assembled { manifest, layers, documents, left_out, not_reproducible: differs, sources, facts })
}

/// Takes out of an image what it does not need.
fn keep_needed(
    manifest: &ImageManifest,
    closure: &Closure,
    of_driver: &[String],
    tree: &mut Tree,
    objects: &mut Objects,
) -> Result<Vec<LeftOut>, Error> {
    let environment = manifest.config.env.get("LD_LIBRARY_PATH").map(String::as_str);
    let whole = tree.clone();
    let loader =
        Loader::new(&whole, objects, manifest.platform, environment).map_err(userland::Error::from)?;
    let left_out = closure::keep_needed(manifest, closure, of_driver, tree, &loader)?;
    objects.retain(|path, _| tree.get(path).is_some());
    Ok(left_out)
}

/// A layer in the store, remembered by what is in it.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Remembered {
    version: FormatVersion<1>,
    layer: Layer,
}

/// Writes a layer, or finds it in the store.
fn write_layer(name: &Name, tree: &Tree, compression: Compression, store: &Store) -> Result<Layer, Error> {
    let mut content = format!("{}\n", layer::format(compression));
    for (path, node) in tree.iter() {
        let kind = match &node.kind {
            Kind::Folder => "folder".to_owned(),
            Kind::Symlink(target) => format!("link {target:?}"),
            Kind::File(file) => format!("file {} {} {:?}", file.digest, file.size, file.hard_link),
        };
        content += &format!("{path:?} {:?} {kind}\n", node.meta);
    }
    let key = Digest::of(content.as_bytes());
    let note = store.folder("layers")?.join(format!("{}.json", key.hex()));
    let remembered = std::fs::read(&note).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
    if let Some(Remembered { layer, .. }) = remembered
        && std::fs::metadata(store.path(&layer.digest)).is_ok_and(|found| found.len() == layer.size)
    {
        store::used(&note);
        store::used(&store.path(&layer.digest));
        return Ok(Layer { name: name.clone(), ..layer });
    }
    let layer = layer::write(name, tree, compression, store)?;
    let remembered = Remembered { version: FormatVersion, layer: layer.clone() };
    let bytes = serde_json::to_vec(&remembered).map_err(oci::Error::Json)?;
    store::write_whole(&note, &bytes)?;
    Ok(layer)
}

/// Refuses an image whose containers could not start.
fn check_entrypoint(manifest: &ImageManifest, tree: &Tree) -> Result<(), Error> {
    let Some(program) = manifest.config.entrypoint.first() else { return Ok(()) };
    let wrong = |found| Err(Error::Entrypoint { program: program.clone(), found });
    let path = manifest.config.env.get("PATH").map_or(DEFAULT_PATH, String::as_str);
    let places: Vec<String> = match program.contains('/') {
        true if program.starts_with('/') => vec![program.clone()],
        true => vec![format!("{}/{program}", manifest.config.working_dir)],
        false => path.split(':').map(|folder| format!("{folder}/{program}")).collect(),
    };
    let found = places.iter().find_map(|place| tree.resolve(place)).and_then(|path| tree.get(&path));
    match found.map(|node| (&node.kind, node.meta.mode & 0o111)) {
        None => wrong("is not in the image"),
        Some((Kind::File(_), 0)) => wrong("is not executable"),
        Some((Kind::File(_), _)) => Ok(()),
        Some(_) => wrong("is not a file"),
    }
}

fn check_budget(manifest: &ImageManifest, layers: &[Layer], whole: &Tree) -> Result<(), Error> {
    let found = ByteSize(layers.iter().map(|layer| layer.size).sum());
    let Some(budget) = manifest.max_size.filter(|budget| found > *budget) else { return Ok(()) };
    let mut files: Vec<_> = whole.files().map(|(path, _, file)| (path, file.size)).collect();
    files.sort_by_key(|(path, size)| (std::cmp::Reverse(*size), *path));
    let largest: Vec<_> = files
        .iter()
        .take(LARGEST_NAMED)
        .map(|(path, size)| format!("/{path} ({})", ByteSize(*size)))
        .collect();
    Err(Error::Budget { found, budget, largest: largest.join(", ") })
}

/// The layout of the image that was last built from a manifest, if it is still in the cache.
pub fn last_built(manifest: &Path, cache: &Path) -> Option<PathBuf> {
    let layout = unchanged::last(manifest, cache)?.layout;
    layout.is_dir().then_some(layout)
}
