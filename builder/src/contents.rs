//! What an image holds: every input of a manifest, from its lock to paths in one tree, and which layer each is in.
//!
//! Layers go from what changes least to what changes most, so that a new program moves a few megabytes: packages of a
//! distribution, CUDA libraries one by one, files, programs. Deliberately left out: how layers are written.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use fs_err::File;
use trainyard_spec::image::ImageManifest;
use trainyard_spec::input::{CudaLibrary, Input};
use trainyard_spec::lock::{Lock, LockedDeb, LockedInput};
use trainyard_spec::{Digest, Name};

use crate::image::{Error, Workshop};
use crate::input::cargo::{self, Compilation, Toolchain};
use crate::input::crates::{self, CrateFolder, Crates};
use crate::input::cuda::Asked;
use crate::input::link::Linked;
use crate::input::oci::{self, Base};
use crate::input::{cuda, deb};
use crate::progress::{Event, Progress};
use crate::settings::{LinkFrom, Settings};
use crate::store::digest_of;
use crate::supply::{self, Inventory};
use crate::tree::{self, Kind, Meta, Owner, Tree};
use crate::unchanged::Sources;
use crate::unpacked::{self, Entries};
use crate::userland::{Installed, Userland};

/// What an image holds.
#[derive(Debug, Default)]
pub(crate) struct Contents {
    /// Everything, with its owners.
    pub(crate) tree: Tree,
    /// Name of each layer, from the lowest, and whose paths it holds.
    pub(crate) layers: Vec<(Name, Owners)>,
    /// Labels that tell what is in it.
    pub(crate) labels: BTreeMap<String, String>,
    /// How it differs from what another machine would make.
    pub(crate) differs: Option<String>,
    /// The image below, where there is one.
    pub(crate) base: Option<Base>,
    /// The input that what belongs to no package lies with, where the image has a distribution's loader.
    pub(crate) distribution: Option<Name>,
    /// Packages of a distribution.
    pub(crate) installed: Vec<Installed>,
    /// Its packages, and those that are linked into its programs.
    pub(crate) inventory: Inventory,
    /// What it was made from, apart from locked inputs.
    pub(crate) sources: Sources,
}

/// The owners whose paths lie in one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Owners {
    /// A whole input.
    Input(Name),
    /// One library of a CUDA input.
    Library(Name, CudaLibrary),
}

impl Owners {
    /// The input that they are of.
    pub(crate) const fn input(&self) -> &Name {
        match self {
            Self::Input(input) | Self::Library(input, _) => input,
        }
    }

    /// Whether `owner` is one of them.
    pub(crate) fn hold(&self, owner: &Owner) -> bool {
        match self {
            Self::Input(input) => owner.input == *input,
            Self::Library(input, library) => {
                owner.input == *input && owner.package.as_deref() == Some(library.as_str())
            }
        }
    }
}

/// Label of each CUDA library's licence, with the library's name behind a dot.
const LICENCE_LABEL: &str = "trainyard.licence";
/// Folders of the root that lead into /usr where a distribution's packages are in an image.
const MERGED: [&str; 5] = ["bin", "lib", "lib32", "lib64", "sbin"];

/// Gathers what an image holds.
///
/// # Errors
/// When the lock does not fit the manifest, an input cannot be had, or two inputs want one path.
pub(crate) fn gather(gather: &Gather<'_>) -> Result<Contents, Error> {
    let linked: BTreeSet<&Name> = gather.manifest.input.values().flat_map(Input::needs).collect();
    let mut inputs: Vec<_> =
        gather.manifest.input.iter().filter(|(name, _)| !linked.contains(name)).collect();
    inputs.sort_by_key(|(name, input)| (rate_of_change(input), (*name).clone()));
    let has =
        |wanted: fn(&Input) -> bool| inputs.iter().find(|(_, input)| wanted(input)).map(|(name, _)| *name);
    let base = has(|input| matches!(input, Input::Oci { .. }));
    let packages = has(|input| matches!(input, Input::Deb { .. }));
    // Above a base image, the lowest layer of its own takes what is written for all.
    let lowest = inputs.iter().find(|(name, _)| Some(*name) != base).map(|(name, _)| *name);
    let distribution = packages.or_else(|| base.and(lowest)).cloned();
    let mut contents = Contents::default();
    if let Some(name) = base {
        gather.base(name, &mut contents)?;
    } else if distribution.is_some() {
        contents.tree = Tree::usr_merged();
    }
    for (name, input) in inputs.iter().filter(|(name, _)| Some(*name) != base) {
        gather.input(name, input, &mut contents)?;
    }
    if let Some(name) = &distribution {
        merge_usr(name, &mut contents.tree)?;
        let store = &gather.workshop.inputs;
        Userland { input: name, manifest: gather.manifest, store }.add(&mut contents.tree)?;
    }
    contents.distribution = distribution;
    contents.inventory.licences(&contents.tree);
    Ok(contents)
}

const fn rate_of_change(input: &Input) -> u8 {
    match input {
        Input::Oci { .. } => 0,
        Input::Deb { .. } => 1,
        Input::Cuda { .. } => 2,
        Input::Python { .. } => 3,
        Input::Files { .. } => 4,
        Input::Cargo { .. } => 5,
    }
}

/// Adds the links into /usr that packages count on.
fn merge_usr(input: &Name, tree: &mut Tree) -> Result<(), Error> {
    let owner = Owner { input: input.clone(), package: None };
    for folder in MERGED {
        let target = format!("usr/{folder}");
        if tree.get(&target).is_some() && tree.get(folder).is_none() {
            tree.link_root(folder, owner.clone(), &target)?;
        }
    }
    Ok(())
}

/// All that the work on one manifest looks at.
pub(crate) struct Gather<'a> {
    pub(crate) path: &'a Path,
    pub(crate) folder: &'a Path,
    pub(crate) manifest: &'a ImageManifest,
    pub(crate) lock: &'a Lock,
    pub(crate) workshop: &'a Workshop,
    pub(crate) settings: &'a Settings,
    pub(crate) progress: Progress<'a>,
}

impl Gather<'_> {
    fn input(&self, name: &Name, input: &Input, contents: &mut Contents) -> Result<(), Error> {
        let kind = || Error::Kind { input: name.clone(), manifest: self.path.to_owned() };
        match (input, self.lock.input.get(name)) {
            (Input::Deb { .. }, Some(LockedInput::Deb { package })) => {
                for (package, locked) in package {
                    let (entries, control) =
                        deb::unpack(&locked.file, &self.workshop.inputs, self.settings, self.progress)?;
                    contents.inventory.deb(package, locked, &control, self.manifest.platform);
                    contents.installed.push(Installed { package: package.clone(), control });
                    let owner = Owner { input: name.clone(), package: Some(package.clone()) };
                    self.add(&entries, &owner, &mut contents.tree)?;
                }
                contents.layers.push((name.clone(), Owners::Input(name.clone())));
            }
            (
                Input::Cuda { version, libraries, from, nccl },
                Some(LockedInput::Cuda { version: locked, package }),
            ) if version == locked => {
                let asked = Asked { version, libraries, from: *from, nccl: nccl.as_deref() };
                let parts =
                    cuda::parts(&asked, package, &self.workshop.inputs, self.settings, self.progress)?;
                for part in parts {
                    contents.inventory.cuda(&part, &package[&part.package]);
                    let library = part.library;
                    let owner = Owner { input: name.clone(), package: Some(library.as_str().to_owned()) };
                    self.add(&part.entries, &owner, &mut contents.tree)?;
                    let licence = format!("{} ({})", part.expression, part.rule);
                    contents.labels.insert(format!("{LICENCE_LABEL}.{}", library.as_str()), licence);
                    let layer = library.as_str().to_lowercase().parse().map_err(|_| kind())?;
                    contents.layers.push((layer, Owners::Library(name.clone(), library)));
                }
            }
            (Input::Files { path, into }, _) => {
                self.files(name, &self.folder.join(path), into, contents)?;
                contents.inventory.files(name);
                contents.layers.push((name.clone(), Owners::Input(name.clone())));
            }
            (
                Input::Cargo { workspace, packages, link, into },
                Some(LockedInput::Cargo { rustc, commit }),
            ) => {
                let programs = Programs { workspace, packages, link, rustc, commit };
                self.programs(name, &programs, into, contents)?;
                contents.layers.push((name.clone(), Owners::Input(name.clone())));
            }
            _ => return Err(kind()),
        }
        Ok(())
    }

    /// Begins with a base image.
    fn base(&self, name: &Name, contents: &mut Contents) -> Result<(), Error> {
        let (Some(Input::Oci { image }), Some(LockedInput::Oci { digest })) =
            (self.manifest.input.get(name), self.lock.input.get(name))
        else {
            return Err(Error::Kind { input: name.clone(), manifest: self.path.to_owned() });
        };
        let Workshop { inputs: store, layers, .. } = self.workshop;
        let (folder, platform) = (self.folder, self.manifest.platform);
        let asked = oci::Asked { input: name, image, digest, folder, platform, store, layers };
        let (base, tree) = oci::base(&asked, self.settings, self.progress)?;
        contents.inventory.base(name, image, digest);
        contents.tree = tree;
        contents.base = Some(base);
        Ok(())
    }

    /// Adds a package's entries, whose bodies are in the store.
    fn add(&self, entries: &Entries, owner: &Owner, tree: &mut Tree) -> Result<(), Error> {
        for (path, meta, kind) in unpacked::nodes(entries, &owner.to_string(), &self.workshop.inputs) {
            tree.add(path, owner.clone(), meta, kind)?;
        }
        Ok(())
    }

    /// Adds a file or folder beside the manifest. Only permission to run is taken over: everything else differs from one
    /// checkout to another.
    fn files(&self, input: &Name, from: &Path, into: &str, contents: &mut Contents) -> Result<(), Error> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| Error::Read { path, source }
        };
        let owner = Owner { input: input.clone(), package: None };
        let base = if from.is_dir() { from } else { from.parent().unwrap_or(from) };
        for entry in walkdir::WalkDir::new(from).sort_by_file_name() {
            let entry = entry.map_err(|error| failed(from)(error.into()))?;
            let inside = entry.path().strip_prefix(base).unwrap_or(entry.path());
            let Some(inside) = inside.to_str() else {
                let source = std::io::Error::other("its name is not UTF-8");
                return Err(Error::Read { path: entry.path().to_owned(), source });
            };
            let target = format!("{}/{inside}", into.trim_end_matches('/'));
            let (meta, kind) = if entry.file_type().is_dir() {
                (Meta::mode(0o755), Kind::Folder)
            } else if entry.file_type().is_symlink() {
                let link = fs_err::read_link(entry.path()).map_err(failed(entry.path()))?;
                (Meta::mode(0o777), Kind::Symlink(link.display().to_string()))
            } else if entry.file_type().is_file() {
                let found = fs_err::metadata(entry.path()).map_err(failed(entry.path()))?;
                let mode = if found.permissions().mode() & 0o100 != 0 { 0o755 } else { 0o644 };
                (Meta::mode(mode), Kind::File(on_disk(entry.path())?))
            } else {
                let source = std::io::Error::other("it is neither a file nor a folder nor a link");
                return Err(Error::Read { path: entry.path().to_owned(), source });
            };
            if inside.is_empty() {
                continue;
            }
            contents.tree.add(&target, owner.clone(), meta, kind)?;
        }
        contents.sources.folders.insert(from.to_owned());
        Ok(())
    }

    /// Compiles the binaries of a cargo workspace and adds them.
    fn programs(
        &self,
        input: &Name,
        programs: &Programs<'_>,
        into: &str,
        contents: &mut Contents,
    ) -> Result<(), Error> {
        let workspace = self.folder.join(programs.workspace);
        let workspace = fs_err::canonicalize(&workspace)
            .map_err(|source| Error::Read { path: workspace.clone(), source })?;
        let tools = &self.settings.tools;
        let toolchain = Toolchain::of(&workspace, tools)?;
        toolchain.check(programs.rustc, programs.commit)?;
        let linked = self.linked(programs.link)?;
        // cargo does not notice that other files are linked, so these have a target folder of their own.
        let workspace_key = Digest::of(workspace.as_os_str().as_encoded_bytes()).short();
        let target = self.workshop.cargo.join(format!("{workspace_key}-{}", linked.digest().short()));
        let crates = self.crates(&workspace).map_err(|error| cargo::Error::from(Box::new(error)))?;
        let compilation = Compilation {
            workspace: &workspace,
            packages: programs.packages,
            toolchain: &toolchain,
            linked: &linked,
            target: &target,
            crates: crates.as_ref(),
        };
        let binaries = cargo::compile(&compilation, &self.workshop.layers, self.settings, self.progress)?;
        let paths = binaries.iter().map(|binary| binary.path.as_path());
        let read =
            Sources::of(&workspace, paths).map_err(|source| Error::Read { path: target.clone(), source })?;
        contents.sources.packages.extend(read.packages);
        contents.sources.files.extend(read.files);
        let lock_path = workspace.join("Cargo.lock");
        let cargo_lock = fs_err::read_to_string(&lock_path)
            .map_err(|source| Error::Read { path: lock_path.clone(), source })?;
        contents.inventory.programs(
            input,
            &supply::Programs {
                workspace: programs.workspace,
                tree: &cargo::tree(&workspace, programs.packages, crates.as_ref(), tools)?,
                cargo_lock: &cargo_lock,
                // Others are linked where the host's own are.
                linked: if linked.differs.is_none() { self.objects(programs.link) } else { Vec::new() },
                rustc: programs.rustc,
                commit: programs.commit,
            },
        );
        contents.differs = contents.differs.take().or(linked.differs);
        let owner = Owner { input: input.clone(), package: None };
        for binary in binaries {
            let path = format!("{}/{}", into.trim_end_matches('/'), binary.name);
            let kind = Kind::File(on_disk(&binary.path)?);
            contents.tree.add(&path, owner.clone(), Meta::mode(0o755), kind)?;
        }
        Ok(())
    }

    /// Locked packages of which objects are linked.
    fn objects(&self, names: &[Name]) -> Vec<(&String, &LockedDeb)> {
        let locked = names.iter().filter_map(|name| match self.lock.input.get(name) {
            Some(LockedInput::Deb { package }) => Some(package),
            _ => None,
        });
        locked.flatten().filter(|(_, locked)| !locked.objects.is_empty()).collect()
    }

    /// The crates of a workspace from vendored folders, where one is given and has them all.
    fn crates(&self, workspace: &Path) -> Result<Option<CrateFolder>, crates::Error> {
        if self.settings.index.vendored.is_empty() {
            return Ok(None);
        }
        Crates::of(workspace)?.unpack(&self.workshop.inputs, self.settings, self.progress)
    }

    /// What is linked: the locked packages, or what the host has where these are out of reach.
    fn linked(&self, names: &[Name]) -> Result<Linked, Error> {
        let mut folders = Vec::new();
        let mut wanted = BTreeMap::new();
        let mut unreachable = None;
        for name in names {
            let Some(LockedInput::Deb { package }) = self.lock.input.get(name) else {
                return Err(Error::Kind { input: name.clone(), manifest: self.path.to_owned() });
            };
            for LockedDeb { file, objects, .. } in package.values() {
                wanted.extend(objects.clone());
                match deb::objects(file, objects, &self.workshop.inputs, self.settings, self.progress) {
                    Ok(folder) => folders.push(folder),
                    Err(error) if error.is_out_of_reach() => unreachable = Some(error),
                    Err(error) => return Err(error.into()),
                }
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

/// What a cargo input compiles, and with what.
struct Programs<'a> {
    workspace: &'a str,
    packages: &'a [String],
    link: &'a [Name],
    rustc: &'a str,
    commit: &'a str,
}

fn on_disk(path: &Path) -> Result<tree::File, Error> {
    let read = |source| Error::Read { path: path.to_owned(), source };
    let (digest, size) = digest_of(File::open(path).map_err(read)?).map_err(read)?;
    Ok(tree::File { source: PathBuf::from(path), digest, size, hard_link: None })
}
