//! Files of packages: from the store, and else from the first place that has them.

use std::io::{self, Read, Write};
use std::path::PathBuf;

use trainyard_spec::lock::LockedFile;

use super::Error;
use crate::http::{self, Client, Endpoint};
use crate::index;
use crate::index::simple::Place;
use crate::progress::Progress;
use crate::settings::Settings;
use crate::store::{self, Incoming, Store};

/// Most bytes of a file whose size nobody has said.
const UNKNOWN_SIZE_LIMIT: u64 = 8 << 30;

/// Takes `file` from the store, or gets it from a vendored folder, or from the first of `places` that gives what was
/// locked.
///
/// # Errors
/// When no place does: bytes that differ, then the first failure of a server, before mere absence.
pub(crate) fn fetch<E: Into<Error>>(
    file: &LockedFile,
    store: &Store,
    places: impl FnOnce(&Client) -> Result<Vec<Place>, E>,
    access: &Access<'_>,
) -> Result<PathBuf, Error> {
    if let Some(path) = store.verified(&file.sha256)? {
        return Ok(path);
    }
    let vendored: Vec<Place> = access
        .vendored
        .iter()
        .map(|folder| Store::new(folder).path(&file.sha256))
        .filter(|path| path.is_file())
        .map(Place::Folder)
        .collect();
    if access.offline && vendored.is_empty() {
        return Err(index::Error::Offline { file: file.name.clone() }.into());
    }
    // Another process may be at it: whoever comes second finds the file in the store.
    let _only_one = store.lock(&format!("blob-{}", file.sha256.hex()))?;
    if let Some(path) = store.verified(&file.sha256)? {
        return Ok(path);
    }
    let client = Client::new(access.network);
    let copied = from_first(file, store, vendored, &client, access);
    match copied {
        Err(error) if access.offline || !may_be_elsewhere(&error) => Err(error),
        Err(_) => from_first(file, store, places(&client).map_err(Into::into)?, &client, access),
        copied => copied,
    }
}

/// Whether another place may have what one has not given: anything but the store's own failures.
const fn may_be_elsewhere(error: &Error) -> bool {
    matches!(error, Error::Index(_) | Error::Store(store::Error::Differs { .. }))
}

fn from_first(
    file: &LockedFile,
    store: &Store,
    places: Vec<Place>,
    client: &Client,
    access: &Access<'_>,
) -> Result<PathBuf, Error> {
    let mut looked = Vec::new();
    let (mut differs, mut failed) = (None, None);
    for place in places {
        let mut incoming = store.incoming()?;
        let got = copy(&place, &file.name, file.size, client, &mut incoming, access.progress)
            .and_then(|()| Ok(store.keep_as(incoming, file)?));
        match got {
            Ok(()) => return Ok(store.require(&file.sha256)?),
            // The digest says what is right, so another place may be asked whatever is wrong with this one.
            Err(Error::Index(index::Error::Http(error))) if error.is_absent() => {
                looked.push(place.to_string())
            }
            Err(
                error @ (Error::Store(store::Error::Differs { .. })
                | Error::Index(index::Error::Http(http::Error::TooLarge { .. }))),
            ) => {
                differs.get_or_insert(error);
            }
            Err(error @ Error::Index(_)) => {
                failed.get_or_insert(error);
            }
            // The store's own failures are the same for every place.
            Err(error) => return Err(error),
        }
    }
    let version = "with the locked digest".to_owned();
    Err(differs
        .or(failed)
        .unwrap_or_else(|| index::Error::NotFound { package: file.name.clone(), version, looked }.into()))
}

/// Gets a file whose digest or size nobody has said, and pins what arrives.
///
/// # Errors
/// When the server fails or the store cannot be written.
pub(crate) fn fetch_unknown(
    name: &str,
    place: &Place,
    store: &Store,
    client: &Client,
    progress: Progress<'_>,
) -> Result<LockedFile, Error> {
    let mut incoming = store.incoming()?;
    copy(place, name, UNKNOWN_SIZE_LIMIT, client, &mut incoming, progress)?;
    let (sha256, size) = store.keep(incoming)?;
    Ok(LockedFile { name: name.to_owned(), size, sha256 })
}

/// How far servers may be asked.
#[derive(Clone, Copy)]
pub(crate) struct Access<'a> {
    pub(crate) offline: bool,
    pub(crate) network: &'a http::Network,
    pub(crate) vendored: &'a [PathBuf],
    pub(crate) progress: Progress<'a>,
}

impl<'a> Access<'a> {
    /// As far as settings allow.
    pub(crate) fn of(settings: &'a Settings, progress: Progress<'a>) -> Self {
        let Settings { offline, network, index, .. } = settings;
        Self { offline: *offline, network, vendored: &index.vendored, progress }
    }
}

fn copy(
    place: &Place,
    name: &str,
    limit: u64,
    client: &Client,
    incoming: &mut Incoming,
    progress: Progress<'_>,
) -> Result<(), Error> {
    match place {
        Place::Server(endpoint) => download(endpoint, name, limit, client, incoming, progress),
        Place::Folder(path) => {
            let source = fs_err::File::open(path)
                .map_err(|source| index::Error::Read { path: path.clone(), source })?;
            // One byte more than there may be tells a file that is too long.
            io::copy(&mut source.take(limit.saturating_add(1)), incoming)
                .and_then(|_| incoming.flush())
                .map_err(store::io_error("copy to the store", path))?;
            Ok(())
        }
    }
}

fn download(
    endpoint: &Endpoint,
    name: &str,
    limit: u64,
    client: &Client,
    incoming: &mut Incoming,
    progress: Progress<'_>,
) -> Result<(), Error> {
    use crate::http::Error as Http;
    client.download(endpoint, name, limit, incoming, progress).map_err(|error| match error {
        // The store is what failed here, and its errors name the way out.
        Http::Sink { source, .. } => store::io_error("write a download to", incoming.path())(source).into(),
        other => index::Error::Http(other).into(),
    })
}
