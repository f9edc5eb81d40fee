//! Debian packages: found in the archives that apt is configured for, pinned by sha256, and unpacked without any
//! scriptlet.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use trainyard_spec::Digest;
use trainyard_spec::image::Platform;
use trainyard_spec::lock::{LockedFile, LockedInput};

use super::archive::{self, Kind, Limits};
use super::fetch::{Access, fetch};
use super::{Error, link};
use crate::http::Client;
use crate::index::simple::Place;
use crate::index::{self, apt};
use crate::progress::{Event, Progress};
use crate::settings::Settings;
use crate::store::{Store, digest_of};

/// Pins a package and the objects in it that a cargo input may link.
///
/// # Errors
/// When no archive has it, a server fails, or the package is not what its archive says.
pub(crate) fn resolve(
    package: &str,
    version: Option<&str>,
    platform: Platform,
    store: &Store,
    settings: &Settings,
    progress: Progress<'_>,
) -> Result<LockedInput, Error> {
    if settings.offline {
        return Err(index::Error::Offline { file: package.to_owned() }.into());
    }
    let client = Client::new(&settings.network);
    let sources = &settings.index.debian;
    let listed = apt::find(sources, &client, package, version, platform.architecture(), progress)?;
    let file = LockedFile { name: listed.path, size: listed.size, sha256: listed.sha256 };
    let path = get(&file, store, settings, progress)?;
    progress(Event::Unpacking { file: file.name.clone() });
    let mut objects = BTreeMap::new();
    archive::visit(&path, Kind::Deb, Limits::default(), &mut |name, body| {
        if is_object(name) {
            objects.insert(name.to_owned(), digest_of(body)?.0);
        }
        Ok(())
    })?;
    Ok(LockedInput::Deb { package: package.to_owned(), version: listed.version, file, objects })
}

/// A folder with the package's locked objects, each verified just now.
///
/// # Errors
/// When the package cannot be had, or it or an object is not what was locked.
pub(crate) fn objects(
    file: &LockedFile,
    objects: &BTreeMap<String, Digest>,
    store: &Store,
    settings: &Settings,
    progress: Progress<'_>,
) -> Result<PathBuf, Error> {
    let folder = store.folder("objects")?.join(file.sha256.hex());
    if first_difference(&folder, objects).is_none() {
        return Ok(folder);
    }
    let path = get(file, store, settings, progress)?;
    let _only_one = store.lock(&format!("objects-{}", file.sha256.short()))?;
    progress(Event::Unpacking { file: file.name.clone() });
    let staging = store.staging()?;
    archive::visit(&path, Kind::Deb, Limits::default(), &mut |name, body| {
        if !objects.contains_key(name) {
            return Ok(());
        }
        let target = staging.path().join(name);
        if let Some(parent) = target.parent() {
            fs_err::create_dir_all(parent)?;
        }
        let mut file = fs_err::File::create_new(&target)?;
        io::copy(body, &mut file)?;
        file.sync_all()
    })?;
    if let Some((object, found, locked)) = first_difference(staging.path(), objects) {
        let package = file.name.clone();
        return Err(match found {
            Some(found) => Error::ObjectDiffers { package, object, found, locked },
            None => Error::Lacks { package, object },
        });
    }
    staging.install(&folder)?;
    Ok(folder)
}

/// The first object that is missing or other than locked, with its digest found and locked.
fn first_difference(
    folder: &Path,
    objects: &BTreeMap<String, Digest>,
) -> Option<(String, Option<Digest>, Digest)> {
    objects.iter().find_map(|(name, locked)| {
        // What cannot be read is as good as missing: it is unpacked anew.
        let found = File::open(folder.join(name)).and_then(digest_of).ok().map(|(digest, _)| digest);
        (found != Some(*locked)).then(|| (name.clone(), found, *locked))
    })
}

/// Whether a file of a package is something that a static binary may be linked with.
fn is_object(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    // libm.a may be a script that names the versioned archive beside it.
    link::NEEDED.contains(&name) || (name.starts_with("libm-") && name.ends_with(".a"))
}

fn get(
    file: &LockedFile,
    store: &Store,
    settings: &Settings,
    progress: Progress<'_>,
) -> Result<PathBuf, Error> {
    let access = Access { offline: settings.offline, network: &settings.network, progress };
    let places = |_: &Client| {
        let sources = &settings.index.debian;
        if sources.is_empty() {
            return Err(index::Error::NoDebianArchive { package: file.name.clone() });
        }
        let mut places = Vec::new();
        for source in sources {
            let endpoint = source.root.join(&file.name).map_err(|error| index::Error::Page {
                url: source.root.to_string(),
                message: format!("{:?} is no path: {error}", file.name),
            })?;
            // Several suites of one archive share their pool.
            let place = Place::Server(endpoint);
            if !places.contains(&place) {
                places.push(place);
            }
        }
        Ok(places)
    };
    fetch(file, store, places, &access)
}
