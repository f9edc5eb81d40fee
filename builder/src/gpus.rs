//! The GPU code of an image: cut to the GPUs that its manifest names, and what it asks of a host.
//!
//! A library is made smaller only where its licence allows to hand on changed files, or the image stays in the house.
//! What was made smaller is kept in the store, and made once.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use trainyard_spec::image::{Gpu, ImageManifest};
use trainyard_spec::{ByteSize, Digest, FormatVersion};

use crate::contract::{self, Contract, Object};
use crate::elf::{self, ComputeCapability};
use crate::input::cuda;
use crate::loader::Objects;
use crate::progress::{Event, Progress};
use crate::prune::{self, Keep};
use crate::store::{self, Store};
use crate::tree::{File, Tree};

/// Part of what a smaller library is remembered by.
const FORMAT: &str = "zeros 1";

/// Why the GPU code of an image cannot be read or cut.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read as what it says it is.
    #[error(transparent)]
    Elf(#[from] elf::Error),
    /// A library cannot be made smaller.
    #[error(transparent)]
    Prune(#[from] prune::Error),
    /// Files need what nothing in the image gives.
    #[error("files of the image need what is not in it:\n  {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n  "))]
    Unresolved(Vec<contract::Fault>),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] store::Error),
}

impl Error {
    /// The way out.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Elf(error) => error.hint(),
            Self::Prune(error) => error.hint(),
            Self::Unresolved(_) => Some(
                "add the packages that have these libraries to the manifest, or leave out what needs them",
            ),
            Self::Store(error) => error.hint(),
        }
    }
}

/// A library that has been made smaller.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Remembered {
    version: FormatVersion<1>,
    digest: Digest,
    zeroed: u64,
}

/// Makes the CUDA libraries of an image smaller, as far as the manifest asks and their licences allow, and reads them
/// again. Returns how many bytes of each became zeros, by path.
///
/// # Errors
/// When a library is not understood, or has no code for one of the GPUs.
pub(crate) fn prune(
    manifest: &ImageManifest,
    tree: &mut Tree,
    objects: &mut Objects,
    store: &Store,
    progress: Progress<'_>,
) -> Result<BTreeMap<String, ByteSize>, Error> {
    let mut zeroed = BTreeMap::new();
    if manifest.gpus.is_empty() {
        return Ok(zeroed);
    }
    let keep = Keep {
        gpus: manifest.gpus.iter().map(capability).collect(),
        resources: !manifest.local_only,
        relocatable: false,
        debug: false,
    };
    tree.change_files(|path, owner, file| {
        let library = owner.package.as_deref().and_then(cuda::library);
        let allowed = library.is_some_and(|library| manifest.local_only || cuda::may_change(library));
        if !allowed || !path.contains(".so") {
            return Ok(());
        }
        progress(Event::Pruning { file: path.to_owned() });
        let (smaller, bytes) = smaller(path, file, &keep, store)?;
        *file = smaller;
        if let Some(report) = elf::read(path, &elf::map(&file.source)?)? {
            objects.insert(path.to_owned(), report);
        }
        zeroed.insert(format!("/{path}"), ByteSize(bytes));
        Ok::<_, Error>(())
    })?;
    Ok(zeroed)
}

fn smaller(path: &str, file: &File, keep: &Keep, store: &Store) -> Result<(File, u64), Error> {
    let key = Digest::of(format!("{FORMAT} {} {keep:?}", file.digest).as_bytes());
    let note = store.folder("pruned")?.join(format!("{}.json", key.hex()));
    let remembered = std::fs::read(&note).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let found = remembered.filter(|Remembered { digest, .. }| {
        std::fs::metadata(store.path(digest)).is_ok_and(|found| found.len() == file.size)
    });
    let Remembered { digest, zeroed, .. } = match found {
        Some(found) => {
            store::used(&note);
            store::used(&store.path(&found.digest));
            found
        }
        None => {
            let bytes = elf::map(&file.source)?;
            let plan = prune::plan(path, &bytes, keep)?;
            let mut incoming = store.incoming()?;
            plan.write(&bytes, &mut incoming)?;
            let (digest, _) = store.keep(incoming)?;
            let made = Remembered { version: FormatVersion, digest, zeroed: plan.zeroed() };
            // Digests and numbers alone, which are always JSON.
            store::write_whole(&note, &serde_json::to_vec(&made).unwrap_or_default())?;
            made
        }
    };
    Ok((File { source: store.path(&digest), digest, ..file.clone() }, zeroed))
}

fn capability(gpu: &Gpu) -> ComputeCapability {
    ComputeCapability { major: gpu.capability / 10, minor: gpu.capability % 10 }
}

/// Derives what an image with these ELF files asks of a host.
///
/// # Errors
/// When one needs what nothing in the image gives.
pub(crate) fn contract(objects: &Objects) -> Result<Contract, Error> {
    let objects: Vec<_> = objects
        .iter()
        .map(|(path, report)| Object { path: format!("/{path}"), report: report.clone() })
        .collect();
    let contract = contract::derive(&objects);
    if contract.faults.is_empty() { Ok(contract) } else { Err(Error::Unresolved(contract.faults)) }
}
