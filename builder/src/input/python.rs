//! Python packages: found through pip's indexes, pinned by sha256, and read as archives. No code in them ever runs.

use std::path::PathBuf;

use trainyard_spec::image::Platform;
use trainyard_spec::input::PythonArtifact;
use trainyard_spec::lock::{LockedFile, LockedInput};

use super::archive::Kind;
use super::fetch::{Access, fetch, fetch_unknown};
use super::{Error, archive};
use crate::http::Client;
use crate::index::{self, simple};
use crate::progress::Progress;
use crate::settings::Settings;
use crate::store::Store;

/// Pins a distribution file, which is fetched to know its size and digest.
///
/// # Errors
/// When no index has it, a server fails, or the file is not what its index says.
pub(crate) fn resolve(
    package: &str,
    version: &str,
    artifact: PythonArtifact,
    platform: Option<Platform>,
    store: &Store,
    settings: &Settings,
    progress: Progress<'_>,
) -> Result<LockedInput, Error> {
    if settings.offline {
        return Err(index::Error::Offline { file: package.to_owned() }.into());
    }
    let client = Client::new(&settings.network);
    let python = &settings.index.python;
    let pick = |offers| simple::choose(offers, package, version, artifact, platform);
    // A place that comes later must not decide what is locked because an earlier one is down.
    let found = simple::search(package, python, &settings.tools, &client, progress, pick, Err)?;
    let Some(offer) = found else {
        return Err(index::Error::NotFound {
            package: package.to_owned(),
            version: format!("{version} ({})", name_of(artifact)),
            looked: places(settings)?,
        }
        .into());
    };
    let file = fetch_unknown(&offer.name, &offer.place, store, &client, progress)?;
    if let Some(said) = offer.sha256
        && said != file.sha256
    {
        return Err(crate::store::Error::Differs {
            file: file.name,
            expected_size: file.size,
            expected: said,
            found_size: file.size,
            found: file.sha256,
        }
        .into());
    }
    Ok(LockedInput::Python { package: package.to_owned(), version: version.to_owned(), file })
}

/// The distribution file, from the store or an index.
///
/// # Errors
/// When it cannot be had, or is not what was locked.
pub(crate) fn get(
    package: &str,
    file: &LockedFile,
    store: &Store,
    settings: &Settings,
    progress: Progress<'_>,
) -> Result<PathBuf, Error> {
    let access = Access::of(settings, progress);
    let find = |client: &Client| {
        let (mut changed, mut failed) = (None, None);
        let pick = |offers: Vec<simple::Offered>| {
            let named = offers.into_iter().filter(|offer| offer.name == file.name);
            for offer in named {
                match offer.sha256 {
                    Some(found) if found != file.sha256 => {
                        changed.get_or_insert(index::Error::Changed {
                            index: offer.place.to_string(),
                            file: file.name.clone(),
                            found,
                            locked: file.sha256,
                        });
                    }
                    _ => return Ok(Some(offer.place)),
                }
            }
            Ok(None)
        };
        // The digest says what is right, whoever gives it.
        let pass_over = |error| {
            failed.get_or_insert(error);
            Ok(())
        };
        let python = &settings.index.python;
        if let Some(place) =
            simple::search(package, python, &settings.tools, client, progress, pick, pass_over)?
        {
            return Ok(vec![place]);
        }
        Err(match changed.or(failed) {
            Some(error) => error,
            None => index::Error::NotFound {
                package: package.to_owned(),
                version: file.name.clone(),
                looked: places(settings)?,
            },
        })
    };
    fetch(file, store, find, &access)
}

/// How a distribution file is packed.
///
/// # Errors
/// When its name says nothing that is known.
pub(crate) fn kind(file: &LockedFile) -> Result<Kind, archive::Error> {
    match &file.name {
        name if name.ends_with(".tar.gz") => Ok(Kind::Tar),
        name if name.ends_with(".whl") || name.ends_with(".zip") => Ok(Kind::Zip),
        name => Err(archive::Error::Unreadable {
            archive: PathBuf::from(name),
            at: None,
            source: std::io::Error::new(
                std::io::ErrorKind::Unsupported,
                "a distribution of a Python package is a .tar.gz or a .whl",
            ),
        }),
    }
}

const fn name_of(artifact: PythonArtifact) -> &'static str {
    match artifact {
        PythonArtifact::Sdist => "source archive",
        PythonArtifact::Wheel => "wheel",
    }
}

/// The places that are asked, for an error.
pub(crate) fn places(settings: &Settings) -> Result<Vec<String>, index::Error> {
    let python = &settings.index.python;
    let links = python.find_links.iter().map(|place| match place {
        index::FindLinks::Folder(folder) => folder.display().to_string(),
        index::FindLinks::Page(endpoint) => endpoint.to_string(),
    });
    let indexes = python.to_ask(&settings.tools)?;
    Ok(links.chain(indexes.iter().map(ToString::to_string)).collect())
}
