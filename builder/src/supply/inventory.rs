//! The packages of an image, noted while its inputs are gathered.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read as _;

use trainyard_spec::image::Platform;
use trainyard_spec::lock::{LockedCuda, LockedDeb, LockedFile};
use trainyard_spec::{Digest, Name};

use super::facts::{Archive, Kind, Package};
use super::{crates, debian, purl};
use crate::input::cuda::Part;
use crate::tree::{self, Owner, Tree};
use crate::unpacked::What;

/// Most bytes of a licence's text.
const LONGEST_TEXT: u64 = 1 << 20;
/// The licence of NVIDIA's libraries, which SPDX has no name for.
const CUDA_EULA: &str = "LicenseRef-NVIDIA-CUDA-EULA";

/// The packages of an image that is being put together.
#[derive(Debug, Default)]
pub(crate) struct Inventory {
    pub(super) packages: BTreeMap<String, Package>,
    pub(super) texts: BTreeMap<String, String>,
    /// Digests of the files of CUDA libraries as their makers hand them out, by absolute path.
    pub(super) originals: BTreeMap<String, Digest>,
    pub(super) sources: BTreeMap<String, Digest>,
}

impl Inventory {
    /// Notes a Debian package that is in the image.
    pub(crate) fn deb(&mut self, name: &str, locked: &LockedDeb, control: &str, platform: Platform) {
        let described = debian::describe(name, locked, control, platform);
        self.packages.insert(deb_id(name), described);
    }

    /// Notes a CUDA library, and what its files are before anything is cut from them.
    pub(crate) fn cuda(&mut self, part: &Part, locked: &LockedCuda) {
        let of_wheel = locked.file.name.ends_with(".whl");
        let kind = if of_wheel { "pypi" } else { "generic" };
        let package = Package {
            licence: Some(part.expression.clone()),
            licence_note: Some(part.rule.clone()),
            purl: Some(purl(kind, None, &part.package, &locked.version, &[])),
            supplier: Some("NVIDIA Corporation".to_owned()),
            archive: Some(archive(&locked.file)),
            needs: part.needs.iter().map(|library| cuda_id(library.as_str())).collect(),
            ..package(Kind::Cuda, part.library.as_str(), Some(&locked.version))
        };
        self.packages.insert(cuda_id(part.library.as_str()), package);
        for (path, entry) in &part.entries {
            if let What::File { digest, .. } = &entry.what {
                self.originals.insert(format!("/{path}"), *digest);
            }
        }
    }

    /// Notes a base image. What is in it, its own documents say.
    pub(crate) fn base(&mut self, input: &Name, image: &str, digest: &Digest) {
        let (repository, _) = image.split_once('@').unwrap_or((image, ""));
        let name =
            repository.rsplit('/').next().and_then(|name| name.split(':').next()).unwrap_or(repository);
        let package = Package {
            version: Some(digest.to_string()),
            purl: Some(purl("oci", None, name, &digest.to_string(), &[])),
            ..package(Kind::Base, name, None)
        };
        self.packages.insert(input_id(input), package);
    }

    /// Notes files beside the manifest.
    pub(crate) fn files(&mut self, input: &Name) {
        self.packages.insert(input_id(input), package(Kind::Input, input.as_str(), None));
    }

    /// Notes programs of a cargo workspace: the crates and packages that are linked into them.
    pub(crate) fn programs(&mut self, input: &Name, programs: &Programs<'_>) {
        let mut own = package(Kind::Input, input.as_str(), None);
        for (name, locked) in &programs.linked {
            own.linked.insert(deb_id(name));
            let described = debian::linked(name, locked);
            self.packages.entry(deb_id(name)).or_insert(described);
        }
        let standard = Package {
            licence: Some("MIT OR Apache-2.0".to_owned()),
            licence_note: Some(format!("rustc's commit is {}", programs.commit)),
            purl: Some(purl("generic", None, "rust-std", programs.rustc, &[])),
            supplier: Some("The Rust Project".to_owned()),
            ..package(Kind::StandardLibrary, "rust-std", Some(programs.rustc))
        };
        let standard_id = format!("rust-std@{}", programs.rustc);
        own.linked.insert(standard_id.clone());
        self.packages.insert(standard_id, standard);
        let crates::Linked { roots, packages } = crates::linked(programs.tree, programs.cargo_lock);
        own.linked.extend(roots);
        self.packages.extend(packages);
        self.packages.insert(input_id(input), own);
        self.sources
            .insert(format!("{}/Cargo.lock", programs.workspace), Digest::of(programs.cargo_lock.as_bytes()));
    }

    /// Reads the licences of packages from the files that say them, before anything is left out of the tree.
    pub(crate) fn licences(&mut self, tree: &Tree) {
        for package in self.packages.values_mut() {
            match package.kind {
                Kind::Deb if package.licence.is_none() && package.licence_note.is_none() => {
                    let path = format!("usr/share/doc/{}/copyright", package.name);
                    let read = tree.resolve(&path).and_then(|path| text(tree, &path));
                    let Some(text) = read else {
                        package.licence_note = Some("the package brings no copyright file".to_owned());
                        continue;
                    };
                    let found = debian::licence(&package.name, &text);
                    package.licence_note = found
                        .is_none()
                        .then(|| format!("/{path} says it in words alone ({})", Digest::of(text.as_bytes())));
                    if let Some(found) = found {
                        package.licence = Some(found.expression);
                        self.texts.extend(found.texts);
                    }
                }
                Kind::Cuda if package.licence.as_deref() == Some(CUDA_EULA) => {
                    let mut licences = tree.files().filter(|(path, node, _)| {
                        let is_its = node.owner.as_ref().and_then(|owner| owner.package.as_ref());
                        is_its == Some(&package.name) && path.starts_with("usr/share/licenses/")
                    });
                    let read = licences.next().and_then(|(path, ..)| text(tree, path));
                    if let Some(text) = read {
                        self.texts.entry(CUDA_EULA.to_owned()).or_insert(text);
                    }
                }
                _ => {}
            }
        }
        let has_eula = self.packages.values().any(|package| package.licence.as_deref() == Some(CUDA_EULA));
        if has_eula {
            self.texts.entry(CUDA_EULA.to_owned()).or_insert_with(|| {
                "The CUDA Toolkit End User License Agreement of NVIDIA Corporation; the package brings no copy of it.".to_owned()
            });
        }
    }

    /// The id of the package that an owner in the tree stands for. What no package brings is its input's.
    pub(super) fn owner(owner: &Owner, packages: &mut BTreeMap<String, Package>) -> String {
        let of_package = owner
            .package
            .as_ref()
            .and_then(|name| [deb_id(name), cuda_id(name)].into_iter().find(|id| packages.contains_key(id)));
        of_package.unwrap_or_else(|| {
            let id = input_id(&owner.input);
            packages.entry(id.clone()).or_insert_with(|| package(Kind::Input, owner.input.as_str(), None));
            id
        })
    }
}

/// Programs of a cargo workspace.
pub(crate) struct Programs<'a> {
    /// Folder of the workspace, as the manifest names it.
    pub(crate) workspace: &'a str,
    /// What `cargo tree` says is linked into them.
    pub(crate) tree: &'a str,
    /// The workspace's `Cargo.lock`.
    pub(crate) cargo_lock: &'a str,
    /// Debian packages of which objects are linked into them.
    pub(crate) linked: Vec<(&'a String, &'a LockedDeb)>,
    /// Release of the compiler.
    pub(crate) rustc: &'a str,
    /// The compiler's commit.
    pub(crate) commit: &'a str,
}

pub(super) fn package(kind: Kind, name: &str, version: Option<&str>) -> Package {
    Package {
        kind,
        name: name.to_owned(),
        version: version.map(str::to_owned),
        licence: None,
        licence_note: None,
        purl: None,
        supplier: None,
        source: None,
        archive: None,
        needs: BTreeSet::new(),
        linked: BTreeSet::new(),
    }
}

pub(super) fn archive(file: &LockedFile) -> Archive {
    let name = file.name.rsplit('/').next().unwrap_or(&file.name).to_owned();
    Archive { name, sha256: file.sha256 }
}

pub(super) fn deb_id(name: &str) -> String {
    format!("deb:{name}")
}

fn cuda_id(name: &str) -> String {
    format!("cuda:{name}")
}

fn input_id(name: &Name) -> String {
    format!("input:{name}")
}

/// A text file of the tree; none where it is no text or a very long one.
fn text(tree: &Tree, path: &str) -> Option<String> {
    let tree::Kind::File(file) = &tree.get(path)?.kind else { return None };
    if file.size > LONGEST_TEXT {
        return None;
    }
    let mut bytes = Vec::new();
    fs_err::File::open(&file.source).ok()?.take(LONGEST_TEXT).read_to_end(&mut bytes).ok()?;
    String::from_utf8(bytes).ok()
}
