//! Removing from a cache what nothing has needed for a while. All of it can be fetched or made again.
//!
//! Whatever is found in a cache gets a new time then, so an old one says that no build has needed it since. Kept besides are
//! the inputs in the locks of manifests whose image was needed lately, which an unchanged build does not look at, and what
//! the caller names. Nothing is removed while another process uses the cache; what is killed here leaves a cache with less
//! in it, and nothing half removed under its name.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::Serialize;
use trainyard_spec::ByteSize;
use trainyard_spec::lock::{Lock, LockedInput};

use crate::progress::{Event, Progress};
use crate::store::{self, Error, Store};
use crate::{lock, manifest, unchanged};

/// What is to be removed.
#[derive(Debug, Clone)]
pub struct Request {
    /// What was needed since then stays.
    pub since: SystemTime,
    /// Absolute paths of things that stay in any case.
    pub needed: BTreeSet<PathBuf>,
    /// Only tell what would be removed.
    pub dry_run: bool,
}

/// What was removed, or would be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Collected {
    /// By kind, in the order of [`FOLDERS`].
    pub kinds: Vec<Kind>,
    /// Bytes on the disk that are free now, or would be. Something may lie in two places, and is then free when both are.
    pub freed: ByteSize,
    /// Whether nothing was removed.
    pub dry_run: bool,
}

/// Things of a kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Kind {
    /// What they are.
    pub kind: &'static str,
    /// Things removed.
    pub removed: usize,
    /// Things that stay.
    pub kept: usize,
}

/// Folders of a cache whose entries are things, and what these are. Of locks and temporary files the store takes care.
const FOLDERS: [(&str, &str); 15] = [
    (unchanged::FOLDER, "notes of what was built"),
    ("images", "images"),
    ("rootfs", "unpacked images"),
    ("data", "token shards"),
    ("cargo", "compiled crates"),
    ("crates", "unpacked crates"),
    ("objects", "objects to link"),
    ("layers", "notes of layers"),
    ("packages", "notes of packages"),
    ("pruned", "notes of pruned libraries"),
    ("bases", "notes of base images"),
    ("corpora", "notes of corpora"),
    ("sha1", "notes of digests"),
    ("registries", "notes of registries"),
    ("blobs/sha256", "blobs"),
];

/// A thing of a cache: the entries of a folder whose names are equal up to their first dot.
#[derive(Debug, Default)]
struct Thing {
    paths: Vec<PathBuf>,
    used: Option<SystemTime>,
}

/// Removes from a cache what was not needed since a moment. What to remove is asked when nothing else uses the cache any
/// more.
///
/// # Errors
/// When the cache cannot be read or written, or `request` fails. What has been removed until then is gone.
pub fn collect<E: From<Error>>(
    cache: &Path,
    progress: Progress<'_>,
    request: impl FnOnce() -> Result<Request, E>,
) -> Result<Collected, E> {
    let store = Store::new(cache);
    let _alone =
        store.alone(|| progress(Event::Waiting { what: "nothing else uses the cache".to_owned() }))?;
    Ok(remove_all(cache, &store, request()?)?)
}

fn remove_all(cache: &Path, store: &Store, request: Request) -> Result<Collected, Error> {
    if !request.dry_run {
        store.sweep()?;
    }
    let cache = std::path::absolute(cache).map_err(store::io_error("find", cache))?;
    let mut needed = locked(&cache, request.since)?;
    needed.extend(request.needed);
    let mut kinds = Vec::new();
    let mut freed = Freed::default();
    for (folder, kind) in FOLDERS {
        let mut counted = Kind { kind, removed: 0, kept: 0 };
        for (name, thing) in things(&cache.join(folder))? {
            let stays = thing.used.is_none_or(|used| used >= request.since)
                || needed.contains(&cache.join(folder).join(name));
            if stays {
                counted.kept += 1;
                continue;
            }
            counted.removed += 1;
            for path in &thing.paths {
                freed.count(path)?;
                if !request.dry_run {
                    remove(path, store)?;
                    freed.removed();
                }
            }
        }
        if counted.removed + counted.kept > 0 {
            kinds.push(counted);
        }
    }
    Ok(Collected { kinds, freed: ByteSize(freed.bytes), dry_run: request.dry_run })
}

/// The things of a folder by name.
fn things(folder: &Path) -> Result<BTreeMap<String, Thing>, Error> {
    let mut things: BTreeMap<String, Thing> = BTreeMap::new();
    let entries = match fs_err::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(things),
        entries => entries.map_err(store::io_error("list", folder))?,
    };
    for entry in entries {
        let entry = entry.map_err(store::io_error("list", folder))?;
        // Nothing of ours has another name.
        let Ok(name) = entry.file_name().into_string() else { continue };
        let used = entry.metadata().and_then(|found| found.modified());
        let used = used.map_err(store::io_error("read the time of", &entry.path()))?;
        let stem = name.split('.').next().unwrap_or_default();
        let thing = things.entry(stem.to_owned()).or_default();
        thing.used = thing.used.max(Some(used));
        thing.paths.push(entry.path());
    }
    Ok(things)
}

/// Where the inputs lie that are named by the locks of manifests whose images were needed since `moment`.
fn locked(cache: &Path, moment: SystemTime) -> Result<BTreeSet<PathBuf>, Error> {
    let mut paths = BTreeSet::new();
    let store = Store::new(cache);
    for note in things(&cache.join(unchanged::FOLDER))?.into_values() {
        if note.used.is_none_or(|used| used < moment) {
            continue;
        }
        let manifests = note.paths.iter().filter_map(|path| unchanged::manifest_of(path));
        // A lock that is gone or of another version names nothing.
        for lock in manifests.filter_map(|path| manifest::read::<Lock>(&lock::path(&path)).ok()) {
            for input in lock.input.values() {
                paths.extend(input.files().into_iter().map(|file| store.path(&file.sha256)));
                if let LockedInput::Oci { digest } = input {
                    paths.insert(cache.join("images").join(digest.hex()));
                }
            }
        }
    }
    Ok(paths)
}

/// Removes a file, or a folder in one step.
fn remove(path: &Path, store: &Store) -> Result<(), Error> {
    if !path.symlink_metadata().map_err(store::io_error("look at", path))?.is_dir() {
        return fs_err::remove_file(path).map_err(store::io_error("remove", path));
    }
    // A folder that nobody has locked in that place is removed by whoever sweeps next, should this process be killed.
    let name = path.file_name().unwrap_or_default().display();
    let aside = store.folder("tmp")?.join(format!("removed-{name}"));
    fs_err::rename(path, &aside).map_err(store::io_error("remove", path))?;
    fs_err::remove_dir_all(&aside).map_err(store::io_error("remove", &aside))
}

/// Bytes on the disk that are free when all that was counted is gone.
#[derive(Debug, Default)]
struct Freed {
    bytes: u64,
    /// Names counted, and not yet removed, of each file that has several: by device and number.
    names: BTreeMap<(u64, u64), u64>,
}

impl Freed {
    fn count(&mut self, path: &Path) -> Result<(), Error> {
        for entry in walkdir::WalkDir::new(path) {
            let found = entry.and_then(|entry| entry.metadata());
            let found = found.map_err(|error| store::io_error("look at", path)(error.into()))?;
            if !found.is_dir() && found.nlink() > 1 {
                let counted = self.names.entry((found.dev(), found.ino())).or_default();
                *counted += 1;
                if *counted < found.nlink() {
                    continue;
                }
            }
            self.bytes += found.blocks() * 512;
        }
        Ok(())
    }

    /// What was counted is removed, and its files have fewer names.
    fn removed(&mut self) {
        self.names.clear();
    }
}
