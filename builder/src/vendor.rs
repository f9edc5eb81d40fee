//! Every locked input of a manifest in a folder, from which another machine builds the same image without a server.
//!
//! The folder is a store of its own: `blobs/sha256/HEX` for each locked file, and for each crate of the workspaces that the
//! manifest compiles. A build looks there before it asks a server, and verifies what it finds. Left out: the toolchain,
//! which has to be installed where the build is, and files beside the manifest, which are in the checkout.

use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;
use trainyard_spec::image::Platform;
use trainyard_spec::input::Input;
use trainyard_spec::lock::LockedFile;
use trainyard_spec::vendored::{VendoredFile, VendoredIndex};

use crate::input::crates::{self, Crates};
use crate::progress::Progress;
use crate::settings::Settings;
use crate::store::{self, Store};
use crate::{input, lock};

/// What the folder says that it holds.
const INDEX: &str = "index.json";
/// Most bytes of an index. One of a thousand files has a hundred kilobytes.
const INDEX_LIMIT: u64 = 16 << 20;

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Vendored {
    /// The folder.
    pub folder: PathBuf,
    /// Locked files of the manifest.
    pub files: usize,
    /// Crates of the workspaces that it compiles.
    pub crates: usize,
    /// Bytes of both.
    pub size: u64,
}

/// Why inputs could not be vendored.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The manifest or lock is missing or wrong.
    #[error(transparent)]
    Lock(#[from] lock::Error),
    /// An input could not be had.
    #[error(transparent)]
    Input(#[from] input::Error),
    /// A crate could not be had.
    #[error(transparent)]
    Crates(#[from] crates::Error),
    /// There is something else in the folder.
    #[error("{folder} holds other things than vendored inputs: {found:?}", folder = .folder.display())]
    Taken {
        /// The folder.
        folder: PathBuf,
        /// What is there.
        found: String,
    },
    /// The folder's index is not one.
    #[error("{path} is no index of vendored inputs: {source}", path = .path.display())]
    Index {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: io::Error,
    },
    /// The folder could not be written.
    #[error(transparent)]
    Store(#[from] store::Error),
}

impl Error {
    /// The way out.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Lock(error) => error.hint(),
            Self::Input(error) => error.hint(),
            Self::Crates(error) => error.hint(),
            Self::Store(error) => error.hint().map(str::to_owned),
            Self::Taken { .. } => Some("name a new folder, or one that this command has written".to_owned()),
            Self::Index { .. } => Some("remove it, and run the command again".to_owned()),
        }
    }
}

/// Sees that every locked input of an image or corpus manifest is in `folder`. What is there already, of this manifest or
/// another, stays; what was interrupted goes on.
///
/// # Errors
/// When manifest or lock is wrong, an input cannot be had, or the folder holds something else.
pub fn vendor(
    manifest: &Path,
    folder: &Path,
    settings: &Settings,
    progress: Progress<'_>,
) -> Result<Vendored, Error> {
    let (inputs, platform) = lock::inputs(manifest)?;
    let lock = lock::read(manifest, &inputs)?;
    let beside = manifest.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let workspaces = inputs.values().filter_map(|input| match input {
        Input::Cargo { workspace, .. } => Some(beside.join(workspace)),
        _ => None,
    });
    let workspaces = workspaces.map(|workspace| Ok((Crates::of(&workspace)?, workspace)));
    let workspaces: Vec<_> = workspaces.collect::<Result<_, crates::Error>>()?;
    let absolute = std::path::absolute(folder).map_err(store::io_error("find", folder))?;
    fs_err::create_dir_all(&absolute).map_err(store::io_error("create", &absolute))?;
    // Two that write to one folder would remove each other's temporary files.
    let only_one = fs_err::File::open(&absolute).map_err(store::io_error("open", &absolute))?;
    only_one.file().lock().map_err(store::io_error("lock", &absolute))?;
    check_ours(&absolute)?;
    let mut index = read_index(&absolute)?;
    let _in_use = Store::new(&settings.cache).in_use()?;
    let store = Store::new(&absolute);
    store.sweep()?;
    // The cache is a store, too, and so a place to copy from.
    let mut settings = settings.clone();
    settings.index.vendored.push(settings.cache.clone());

    let mut vendored = Vendored { folder: folder.to_owned(), files: 0, crates: 0, size: 0 };
    let mut all: Vec<LockedFile> = Vec::new();
    for (name, locked) in &lock.input {
        let Some(input) = inputs.get(name) else { continue };
        // Only images have inputs for one platform, and images have a platform.
        let platform = platform.unwrap_or(Platform::Amd64);
        let asked = input::Asked { input, locked, folder: beside, platform };
        let files = input::fetch_all(&asked, &store, &settings, progress)?;
        vendored.files += files.len();
        all.extend(files);
    }
    for (crates, workspace) in workspaces {
        let crates = crates.fetch(&workspace, &store, &settings, progress)?;
        vendored.crates += crates.len();
        all.extend(crates);
    }
    for LockedFile { name, size, sha256 } in all {
        vendored.size += size;
        index.files.insert(sha256, VendoredFile { name, size });
    }
    // Last, so that what it names is there.
    let path = absolute.join(INDEX);
    let failed = |error| store::io_error("write", &path)(io::Error::from(error));
    let mut json = serde_json::to_vec_pretty(&index).map_err(failed)?;
    json.push(b'\n');
    store::write_whole(&path, &json)?;
    for leftover in WORKING_FOLDERS {
        let path = absolute.join(leftover);
        match fs_err::remove_dir_all(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(store::io_error("remove", &path)(error).into());
            }
            _ => {}
        }
    }
    Ok(vendored)
}

/// Folders of a store that are needed only while it is written.
const WORKING_FOLDERS: [&str; 2] = ["tmp", "locks"];

/// Refuses a folder that somebody uses for something else.
fn check_ours(folder: &Path) -> Result<(), Error> {
    for entry in fs_err::read_dir(folder).map_err(store::io_error("list", folder))? {
        let name = entry.map_err(store::io_error("list", folder))?.file_name();
        let known = name == INDEX || name == "blobs" || WORKING_FOLDERS.iter().any(|known| name == *known);
        // What writing the index was interrupted in.
        if !known && !name.as_encoded_bytes().starts_with(b".tmp") {
            return Err(Error::Taken { folder: folder.to_owned(), found: name.display().to_string() });
        }
    }
    Ok(())
}

fn read_index(folder: &Path) -> Result<VendoredIndex, Error> {
    let path = folder.join(INDEX);
    let read = || -> io::Result<VendoredIndex> {
        let mut bytes = Vec::new();
        let file = fs_err::File::open(&path)?;
        io::Read::read_to_end(&mut io::Read::take(file, INDEX_LIMIT), &mut bytes)?;
        Ok(serde_json::from_slice(&bytes)?)
    };
    match read() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(VendoredIndex::default()),
        Err(source) => Err(Error::Index { path, source }),
        Ok(index) => Ok(index),
    }
}
