//! An image's files in a folder, for running them without a container engine.
//!
//! Layers come from outside, so their paths are hostile: nothing is written outside the folder, through a symlink, or
//! as anything else than a folder, a file or a link. Owners and times are left out: whoever unpacks owns the files.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};

use fs_err::File;
use tar::{Archive, EntryType};
use trainyard_spec::Digest;

use crate::oci::{self, Layout};
use crate::store::{self, Store, digest_of};

/// Why an image could not be unpacked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The layout is unreadable or damaged.
    #[error(transparent)]
    Layout(#[from] oci::Error),
    /// A layer could not be read or a file not be written.
    #[error("cannot unpack {path}: {source}", path = .path.display())]
    Io {
        /// The path in the image.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// An entry of a layer would do harm.
    #[error("a layer holds {path:?}, {problem}; nothing was unpacked")]
    Hostile {
        /// The path as it stands there.
        path: PathBuf,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The store failed.
    #[error(transparent)]
    Store(#[from] store::Error),
}

/// Unpacks the image to the cache, once, and gives the folder.
///
/// # Errors
/// When the image is damaged or hostile, or the cache cannot be written.
pub fn unpack(layout: &Layout, cache: &Path) -> Result<PathBuf, Error> {
    let store = Store::new(cache);
    let _in_use = store.in_use()?;
    let target = cache.join("rootfs").join(layout.digest.hex());
    let _only_one = store.lock(&format!("rootfs-{}", layout.digest.short()))?;
    let note = target.with_extension("state");
    let io = |source| Error::Io { path: PathBuf::from("/"), source };
    // What is executed without any container around it is worth reading over each time.
    let remembered = std::fs::read_to_string(&note).ok();
    if target.is_dir() && remembered == Some(state(&target).map_err(io)?.to_string()) {
        store::used(&target);
        return Ok(target);
    }
    let staging = store.staging()?;
    unpack_into(layout, staging.path())?;
    let state = state(staging.path()).map_err(io)?;
    staging.install(&target)?;
    store::write_whole(&note, state.to_string().as_bytes())?;
    Ok(target)
}

/// Digest of the paths, kinds, modes and contents of all that is in a folder.
fn state(folder: &Path) -> io::Result<Digest> {
    let mut text = String::new();
    for entry in walkdir::WalkDir::new(folder).sort_by_file_name() {
        let entry = entry?;
        let metadata = entry.metadata()?;
        let content = if metadata.is_file() {
            digest_of(std::fs::File::open(entry.path())?)?.0.to_string()
        } else if metadata.is_symlink() {
            format!("{:?}", std::fs::read_link(entry.path())?)
        } else {
            "folder".to_owned()
        };
        let path = entry.path().strip_prefix(folder).unwrap_or(entry.path());
        writeln!(text, "{path:?} {:o} {content}", metadata.permissions().mode()).map_err(io::Error::other)?;
    }
    Ok(Digest::of(text.as_bytes()))
}

/// Unpacks the image into an existing empty folder.
///
/// # Errors
/// As [`unpack`].
pub fn unpack_into(layout: &Layout, folder: &Path) -> Result<(), Error> {
    // A temporary folder is its maker's alone; an image's root is everybody's to read.
    let io = |source| Error::Io { path: PathBuf::from("/"), source };
    fs_err::set_permissions(folder, PermissionsExt::from_mode(0o755)).map_err(io)?;
    for described in layout.manifest.layers() {
        apply(layout.layer(described)?, folder)?;
    }
    Ok(())
}

fn apply(layer: impl Read, folder: &Path) -> Result<(), Error> {
    let mut archive = Archive::new(layer);
    let unreadable = |source| Error::Io { path: PathBuf::from("a layer"), source };
    let mut written = BTreeSet::new();
    for entry in archive.entries().map_err(unreadable)? {
        let mut entry = entry.map_err(unreadable)?;
        let path = entry.path().map_err(unreadable)?.into_owned();
        let hostile = |problem| Error::Hostile { path: path.clone(), problem };
        let io = |source| Error::Io { path: path.clone(), source };
        let clean = clean(&path).ok_or_else(|| hostile("which leads out of the image"))?;
        if clean.as_os_str().is_empty() {
            continue;
        }
        let target = folder.join(&clean);
        require_real_parents(folder, &clean).map_err(|()| hostile("which leads through a link"))?;
        if let Some(parent) = target.parent() {
            fs_err::create_dir_all(parent).map_err(io)?;
        }
        if let Some(hidden) = clean.file_name().and_then(|name| name.to_str()?.strip_prefix(".wh.")) {
            match hidden {
                // OCI image layer specification, "Opaque Whiteout": all that lower layers have here.
                ".wh..opq" => empty(target.parent().unwrap_or(folder), &written).map_err(io)?,
                "" | "." | ".." => return Err(hostile("a whiteout of no file")),
                name => remove(&target.with_file_name(name)).map_err(io)?,
            }
            continue;
        }
        written.insert(target.clone());
        let mode = entry.header().mode().map_err(io)? & 0o755;
        match entry.header().entry_type() {
            EntryType::Directory => {
                if !target.symlink_metadata().is_ok_and(|found| found.is_dir()) {
                    remove(&target).map_err(io)?;
                    fs_err::create_dir(&target).map_err(io)?;
                }
                fs_err::set_permissions(&target, PermissionsExt::from_mode(mode | 0o700)).map_err(io)?;
            }
            EntryType::Regular | EntryType::Continuous => {
                remove(&target).map_err(io)?;
                let mut file = File::create_new(&target).map_err(io)?;
                io::copy(&mut entry, &mut file).map_err(io)?;
                file.sync_all().map_err(io)?;
                fs_err::set_permissions(&target, PermissionsExt::from_mode(mode)).map_err(io)?;
            }
            EntryType::Symlink => {
                let link = entry.link_name().map_err(io)?.ok_or_else(|| hostile("a link to nothing"))?;
                remove(&target).map_err(io)?;
                std::os::unix::fs::symlink(link, &target).map_err(io)?;
            }
            EntryType::Link => {
                let link = entry.link_name().map_err(io)?.ok_or_else(|| hostile("a link to nothing"))?;
                let link =
                    self::clean(&link).ok_or_else(|| hostile("a hard link that leads out of the image"))?;
                require_real_parents(folder, &link)
                    .map_err(|()| hostile("a hard link that leads through a link"))?;
                remove(&target).map_err(io)?;
                fs_err::hard_link(folder.join(link), &target).map_err(io)?;
            }
            _ => return Err(hostile("which is neither a folder nor a file nor a link")),
        }
    }
    Ok(())
}

/// The path without a leading slash and without `.`; none when it has `..`.
pub(crate) fn clean(path: &Path) -> Option<PathBuf> {
    let mut clean = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(part) => clean.push(part),
            Component::CurDir | Component::RootDir => {}
            Component::ParentDir | Component::Prefix(_) => return None,
        }
    }
    Some(clean)
}

/// Refuses a path one of whose folders is something else than a folder.
fn require_real_parents(folder: &Path, clean: &Path) -> Result<(), ()> {
    let mut at = folder.to_owned();
    for part in clean.parent().into_iter().flat_map(Path::components) {
        at.push(part);
        match at.symlink_metadata() {
            Ok(found) if found.is_dir() => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            _ => return Err(()),
        }
    }
    Ok(())
}

fn remove(path: &Path) -> io::Result<()> {
    match path.symlink_metadata() {
        Ok(found) if found.is_dir() => fs_err::remove_dir_all(path),
        Ok(_) => fs_err::remove_file(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// Removes what is in `folder` but not, or not above what is, in `kept`.
fn empty(folder: &Path, kept: &BTreeSet<PathBuf>) -> io::Result<()> {
    for entry in fs_err::read_dir(folder)? {
        let path = entry?.path();
        if kept.range(path.clone()..).next().is_some_and(|next| next.starts_with(&path)) {
            continue;
        }
        remove(&path)?;
    }
    Ok(())
}
