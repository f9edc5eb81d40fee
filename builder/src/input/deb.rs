//! Debian packages: found in the archives that apt is configured for, pinned by sha256, and unpacked without any
//! scriptlet.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use trainyard_spec::Digest;
use trainyard_spec::image::Platform;
use trainyard_spec::lock::{LockedDeb, LockedFile, LockedInput};

use super::archive::{self, Kind, Limits};
use super::fetch::{Access, fetch};
use super::{Error, link};
use crate::http::Client;
use crate::index;
use crate::index::debian::Lists;
use crate::index::release::Asking;
use crate::index::simple::Place;
use crate::progress::{Event, Progress};
use crate::settings::Settings;
use crate::solve::{self, Packages as _};
use crate::store::{self, Store, digest_of};
use crate::unchanged;
use crate::unpacked::{self, Entries};

/// What a manifest asks for.
pub(crate) struct Asked<'a> {
    /// Names, or `name=version`.
    pub(crate) packages: &'a [String],
    /// Whether what they depend on is taken, too.
    pub(crate) dependencies: bool,
    pub(crate) platform: Platform,
}

/// Pins packages. `lists` holds the archives' lists once they have been read.
///
/// # Errors
/// When no archive has a package or what it needs, a server fails, or a package is not what its archive says.
pub(crate) fn resolve(
    asked: &Asked<'_>,
    lists: &OnceCell<Lists>,
    store: &Store,
    settings: &Settings,
    progress: Progress<'_>,
) -> Result<LockedInput, Error> {
    let first = asked.packages.first().cloned().unwrap_or_default();
    if settings.offline {
        return Err(index::Error::Offline { file: first }.into());
    }
    let sources = &settings.index.debian;
    if sources.is_empty() {
        return Err(index::Error::NoDebianArchive { package: first }.into());
    }
    let lists = match lists.get() {
        Some(lists) => lists,
        None => {
            let client = Client::new(&settings.network);
            let now = unchanged::moment(store)?;
            let asking = Asking { client: &client, store, tools: &settings.tools, now, progress };
            let read = Lists::load(sources, asked.platform.architecture(), &asking)?;
            lists.get_or_init(|| read)
        }
    };
    let mut needs = Vec::new();
    for asked in asked.packages {
        let (name, version) =
            asked.split_once('=').map_or((asked.as_str(), None), |(name, version)| (name, Some(version)));
        needs.push(lists.ask(name, version)?);
    }
    let taken = if asked.dependencies {
        solve::solve(lists, &needs).map_err(|reason| Error::Unsolvable { reason })?
    } else {
        needs.iter().filter_map(|need| need.any_of.first().copied()).collect()
    };
    let mut package = BTreeMap::new();
    for id in taken {
        let file = lists.file(id)?.clone();
        let objects = link_objects(&file, store, settings, progress)?;
        let locked = LockedDeb { version: lists.version(id).to_owned(), file, objects };
        package.insert(lists.name(id).to_owned(), locked);
    }
    Ok(LockedInput::Deb { package })
}

/// A locked package: its files, all bodies in the store, and its control file.
///
/// # Errors
/// When the package cannot be had, or is not what was locked.
pub(crate) fn unpack(
    file: &LockedFile,
    store: &Store,
    settings: &Settings,
    progress: Progress<'_>,
) -> Result<(Entries, String), Error> {
    let path = get(file, store, settings, progress)?;
    progress(Event::Unpacking { file: file.name.clone() });
    let mut control = String::new();
    archive::visit_files(&path, Kind::DebControl, Limits::default(), &mut |inside, body| {
        if inside == "control" {
            body.take(CONTROL_LIMIT).read_to_string(&mut control)?;
        }
        Ok(())
    })?;
    Ok((unpacked::unpack(&path, &file.sha256, Kind::Deb, store, &unpacked::ALL)?, control))
}

/// Most bytes of a control file.
const CONTROL_LIMIT: u64 = 1 << 20;

/// The objects in a package that a cargo input may link, with their digests.
fn link_objects(
    file: &LockedFile,
    store: &Store,
    settings: &Settings,
    progress: Progress<'_>,
) -> Result<BTreeMap<String, Digest>, Error> {
    let path = get(file, store, settings, progress)?;
    progress(Event::Unpacking { file: file.name.clone() });
    let mut objects = BTreeMap::new();
    archive::visit_files(&path, Kind::Deb, Limits::default(), &mut |name, body| {
        if is_object(name) {
            objects.insert(name.to_owned(), digest_of(body)?.0);
        }
        Ok(())
    })?;
    Ok(objects)
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
        store::used(&folder);
        return Ok(folder);
    }
    let path = get(file, store, settings, progress)?;
    let _only_one = store.lock(&format!("objects-{}", file.sha256.short()))?;
    progress(Event::Unpacking { file: file.name.clone() });
    let staging = store.staging()?;
    archive::visit_files(&path, Kind::Deb, Limits::default(), &mut |name, body| {
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

/// The package file, from the store or from an archive.
///
/// # Errors
/// When it cannot be had, or is not what was locked.
pub(crate) fn get(
    file: &LockedFile,
    store: &Store,
    settings: &Settings,
    progress: Progress<'_>,
) -> Result<PathBuf, Error> {
    let access = Access::of(settings, progress);
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

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;
    use crate::http::Network;
    use crate::index::IndexSettings;
    use crate::settings::LinkFrom;

    /// A package with these files.
    fn package(files: &[(&str, &[u8])]) -> Vec<u8> {
        let mut tar = tar::Builder::new(Vec::new());
        for (path, body) in files {
            let mut header = tar::Header::new_ustar();
            header.set_size(body.len() as u64);
            header.set_mode(0o644);
            tar.append_data(&mut header, format!("./{path}"), *body).unwrap();
        }
        let data = tar.into_inner().unwrap();
        let mut ar = ar::Builder::new(Vec::new());
        for (name, body) in [("debian-binary", b"2.0\n".as_slice()), ("data.tar", &data)] {
            ar.append(&ar::Header::new(name.into(), body.len() as u64), body).unwrap();
        }
        ar.into_inner().unwrap()
    }

    #[test]
    fn objects_are_exactly_the_locked_ones() {
        let cache = tempfile::TempDir::new().unwrap();
        let settings = Settings {
            cache: cache.path().to_owned(),
            offline: true,
            index: IndexSettings::default(),
            network: Network::default(),
            credentials: crate::registry::CredentialSettings::default(),
            link: LinkFrom::Locked,
            tools: BTreeMap::<OsString, OsString>::new(),
        };
        let store = Store::new(cache.path());
        let bytes =
            package(&[("usr/lib/crti.o", b"i"), ("usr/lib/crtn.o", b"n"), ("usr/share/doc", b"text")]);
        let mut incoming = store.incoming().unwrap();
        io::Write::write_all(&mut incoming, &bytes).unwrap();
        let (sha256, size) = store.keep(incoming).unwrap();
        let file = LockedFile { name: "pool/demo.deb".to_owned(), size, sha256 };
        let locked = |entries: &[(&str, &[u8])]| -> BTreeMap<String, Digest> {
            entries.iter().map(|(name, body)| ((*name).to_owned(), Digest::of(body))).collect()
        };
        let get = |locked: &BTreeMap<String, Digest>| objects(&file, locked, &store, &settings, &|_| {});

        let right = locked(&[("usr/lib/crti.o", b"i"), ("usr/lib/crtn.o", b"n")]);
        let folder = get(&right).unwrap();
        let found: Vec<_> = walkdir::WalkDir::new(&folder)
            .sort_by_file_name()
            .into_iter()
            .map(Result::unwrap)
            .filter(|entry| entry.file_type().is_file())
            .map(|entry| entry.path().strip_prefix(&folder).unwrap().display().to_string())
            .collect();
        assert_eq!(found, ["usr/lib/crti.o", "usr/lib/crtn.o"]);

        // What has been damaged or lost since is made anew.
        std::fs::write(folder.join("usr/lib/crti.o"), "rot").unwrap();
        std::fs::remove_file(folder.join("usr/lib/crtn.o")).unwrap();
        assert_eq!(get(&right).unwrap(), folder);
        assert_eq!(std::fs::read(folder.join("usr/lib/crti.o")).unwrap(), b"i");
        assert!(folder.join("usr/lib/crtn.o").exists());

        let lacks = get(&locked(&[("usr/lib/libc.a", b"c")])).unwrap_err();
        assert!(matches!(&lacks, Error::Lacks { object, .. } if object == "usr/lib/libc.a"), "{lacks:?}");
        let differs = get(&locked(&[("usr/lib/crti.o", b"other")])).unwrap_err();
        assert!(matches!(differs, Error::ObjectDiffers { .. }), "{differs:?}");
        assert_eq!(get(&right).unwrap(), folder, "what failed has replaced nothing");
        let leftovers = std::fs::read_dir(cache.path().join("tmp")).unwrap().count();
        assert_eq!(leftovers, 1, "the gate alone");
    }
}
