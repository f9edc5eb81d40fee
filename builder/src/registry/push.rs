//! Pushing: blobs that the registry lacks, then the documents that refer to them, the outermost last.
//!
//! A blob is sent in one request where that works, because not all registries take pieces. After a connection breaks,
//! the registry is asked how much it has, and the rest is sent; where it has forgotten the upload, a new one is begun.

use std::fs::File;
use std::path::Path;

use serde::Serialize;
use trainyard_spec::Digest;
use ureq::http::Method;
use url::Url;

use super::Error;
use super::auth::Scope;
use super::client::{Answer, Ask, Body, Repository, SLOW, passes, without_query};
use super::parallel::{self, Tell};
use super::reference::{Reference, is_repository};
use crate::content::{Blob, Content, Document};
use crate::oci;
use crate::progress::{Event, Progress};
use crate::store::{digest_of, write_whole};

/// Pieces for registries, or proxies before them, that refuse a blob because it is too large.
const SMALLER_CHUNK: u64 = 16 << 20;
/// How often an upload of one blob is begun again because the registry does not know it any more.
const MOST_RESTARTS: u32 = 3;
/// An upload that has come so much further counts as one that has not failed.
const PROGRESS_MADE: u64 = 1 << 20;

/// What a push did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Pushed {
    /// The image's digest, which the registry has confirmed.
    pub digest: Digest,
    /// Bytes that were sent.
    pub sent: u64,
    /// Blobs that were sent.
    pub uploaded: usize,
    /// Blobs that were there.
    pub present: usize,
    /// Blobs that the registry had in another repository.
    pub mounted: usize,
}

enum Outcome {
    Present,
    Mounted,
    Uploaded(u64),
}

/// An upload that goes on.
struct Upload {
    location: Url,
    /// Bytes that the registry has.
    offset: u64,
    /// Least bytes of a piece that is not the last.
    least: u64,
}

/// The work on one blob.
struct Sending<'a> {
    repository: &'a Repository,
    blob: &'a Blob,
    file: &'a File,
    tell: &'a Tell<'a>,
    upload: Option<Upload>,
    chunk: u64,
    restarts: u32,
    tried_mount: bool,
}

impl Repository {
    /// Pushes the image or index of an OCI layout to the reference that this was connected for.
    ///
    /// # Errors
    /// When the layout is damaged, the registry refuses something, or it has another digest in the end.
    pub fn push(&self, layout: &Path, progress: Progress<'_>) -> Result<Pushed, Error> {
        let content = Content::read(layout)?;
        let root = content.documents.last().map(|document| document.digest);
        let digest = root.ok_or_else(|| oci::Error::Layout {
            path: layout.to_owned(),
            message: "it holds no image".to_owned(),
        })?;
        if self.reference.digest().is_some_and(|named| named != digest) {
            return Err(Error::OtherImage { reference: self.reference.to_string(), found: digest });
        }
        let outcomes = self.push_blobs(layout, &content.blobs, progress)?;
        for document in &content.documents {
            let outermost = document.digest == digest;
            // The digest alone where no tag is named beside it.
            let version = match self.reference.named_tag() {
                Some(tag) if outermost => tag.to_owned(),
                _ => document.digest.to_string(),
            };
            self.put_manifest(document, &version, progress)?;
        }
        let count = |wanted: fn(&Outcome) -> bool| outcomes.iter().filter(|one| wanted(one)).count();
        Ok(Pushed {
            digest,
            sent: outcomes.iter().map(|one| if let Outcome::Uploaded(size) = one { *size } else { 0 }).sum(),
            uploaded: count(|one| matches!(one, Outcome::Uploaded(_))),
            present: count(|one| matches!(one, Outcome::Present)),
            mounted: count(|one| matches!(one, Outcome::Mounted)),
        })
    }

    fn push_blobs(
        &self,
        layout: &Path,
        blobs: &[Blob],
        progress: Progress<'_>,
    ) -> Result<Vec<Outcome>, Error> {
        let size = blobs.iter().fold(0, |sum: u64, blob| sum.saturating_add(blob.size));
        let show = |sent| Event::Uploading { to: self.reference.to_string(), sent, size };
        parallel::each(blobs, self.options.at_once, show, progress, |blob, tell| {
            let path = oci::blob_path(layout, &blob.digest);
            let read = |source| Error::Read { path: path.clone(), source };
            let file = File::open(&path).map_err(read)?;
            let mut sending = Sending {
                repository: self,
                blob,
                file: &file,
                tell,
                upload: None,
                chunk: self.options.chunk.max(1),
                restarts: 0,
                tried_mount: false,
            };
            let outcome = sending.send(|| {
                let (found, size) = digest_of(&file).map_err(read)?;
                if found == blob.digest && size == blob.size {
                    return Ok(());
                }
                Err(oci::Error::Damaged { path: path.clone(), expected: blob.digest, found }.into())
            })?;
            // What another transfer's failure does to this one is of no account.
            let _ = tell.reached(blob.size);
            self.remember(&blob.digest);
            Ok(outcome)
        })
    }

    /// Puts a small blob there, if it is not.
    pub(super) fn put_blob(&self, bytes: &[u8], progress: Progress<'_>) -> Result<Digest, Error> {
        let digest = Digest::of(bytes);
        if self.has(&digest, progress)? {
            return Ok(digest);
        }
        self.http.again(&digest.to_string(), progress, Error::passes, || {
            let started = self.send(&Ask::post(&self.url("blobs", "uploads/")))?;
            let mut url = self.refers(&started.url, &started.location()?)?;
            url.query_pairs_mut().append_pair("digest", &digest.to_string());
            let headers = [("content-type", "application/octet-stream")];
            let put =
                Ask { method: Method::PUT, headers: &headers, body: Body::Bytes(bytes), ..Ask::post(&url) };
            self.send(&put).map(drop)
        })?;
        Ok(digest)
    }

    fn has(&self, digest: &Digest, progress: Progress<'_>) -> Result<bool, Error> {
        let url = self.url("blobs", &digest.to_string());
        let found = self.send_again(&Ask { method: Method::HEAD, ..Ask::post(&url) }, progress);
        match found {
            Ok(_) => Ok(true),
            Err(error) if error.status() == Some(404) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Puts a manifest or index there, and compares the digest that the registry gives it.
    pub(super) fn put_manifest(
        &self,
        document: &Document,
        version: &str,
        progress: Progress<'_>,
    ) -> Result<Answer, Error> {
        let url = self.url("manifests", version);
        let headers = [("content-type", document.media_type.as_str())];
        let put = Ask {
            method: Method::PUT,
            headers: &headers,
            body: Body::Bytes(&document.bytes),
            patience: SLOW,
            ..Ask::post(&url)
        };
        let answer = self.send_again(&put, progress)?;
        let expected = document.digest.to_string();
        let found = match answer.header("docker-content-digest") {
            Some(found) => found.to_owned(),
            // Registries need not say it; then it has to be there under its digest.
            None => {
                let url = self.url("manifests", &expected);
                let headers = [("accept", document.media_type.as_str())];
                let head = Ask { method: Method::HEAD, headers: &headers, ..Ask::post(&url) };
                self.send_again(&head, progress)?;
                expected.clone()
            }
        };
        if found != expected {
            let what = format!("what {} now has", self.reference);
            return Err(Error::Differs { what, expected, found: format!("{found:?}") });
        }
        Ok(answer)
    }

    /// A note of the repository in which this registry has a blob, from which another may take it.
    fn note(&self, digest: &Digest) -> Result<std::path::PathBuf, Error> {
        let key = Digest::of(format!("{} {digest}", self.reference.host()).as_bytes());
        Ok(self.store.folder("registries")?.join(key.hex()))
    }

    pub(super) fn remember(&self, digest: &Digest) {
        // Without the note a blob is sent once more than it has to be.
        let _ = self.note(digest).map(|note| write_whole(&note, self.reference.repository().as_bytes()));
    }

    fn remembered(&self, digest: &Digest) -> Option<String> {
        let name = std::fs::read_to_string(self.note(digest).ok()?).ok()?;
        (is_repository(&name) && name != self.reference.repository()).then_some(name)
    }
}

impl<'a> Ask<'a> {
    /// A request that is part of a push.
    pub(super) fn post(url: &'a Url) -> Self {
        Self { method: Method::POST, scope: Scope::Push, ..Self::get(url, &[]) }
    }
}

impl Sending<'_> {
    /// Sends the blob if it has to be; `verify` is called once before.
    fn send(&mut self, verify: impl Fn() -> Result<(), Error>) -> Result<Outcome, Error> {
        let (repository, tell) = (self.repository, self.tell);
        let (what, mut verified) = (self.blob.digest.to_string(), false);
        let progress = |event| tell.event(event);
        loop {
            let passes = |error: &Error| passes(error, tell.stopped());
            let done = repository.http.again(&what, &progress, passes, || {
                if self.upload.is_none() {
                    if let Some(outcome) = self.begin()? {
                        return Ok(Some(outcome));
                    }
                    if !verified {
                        verify()?;
                        verified = true;
                    }
                }
                self.step()
            })?;
            if let Some(outcome) = done {
                return Ok(outcome);
            }
        }
    }

    /// Begins an upload, where the registry does not have the blob.
    fn begin(&mut self) -> Result<Option<Outcome>, Error> {
        let repository = self.repository;
        let digest = self.blob.digest.to_string();
        let url = repository.url("blobs", &digest);
        match repository.send(&Ask { method: Method::HEAD, ..Ask::post(&url) }) {
            Ok(_) => return Ok(Some(Outcome::Present)),
            Err(error) if error.status() == Some(404) => {}
            Err(error) => return Err(error),
        }
        let mut url = repository.url("blobs", "uploads/");
        let elsewhere = repository.remembered(&self.blob.digest).filter(|_| !self.tried_mount);
        let mut started = None;
        if let Some(from) = &elsewhere {
            self.tried_mount = true;
            let mut url = url.clone();
            url.query_pairs_mut().append_pair("mount", &digest).append_pair("from", from);
            // Whoever may not read there gets an upload, or is refused and asks for one below.
            started = repository.send(&Ask { scope: Scope::Mount(from), ..Ask::post(&url) }).ok();
        }
        let answer = match started {
            Some(answer) if answer.response.status().as_u16() == 201 => return Ok(Some(Outcome::Mounted)),
            Some(answer) => answer,
            None => {
                url.set_query(None);
                repository.send(&Ask::post(&url))?
            }
        };
        let least = answer.header("oci-chunk-min-length").and_then(|least| least.parse().ok()).unwrap_or(1);
        let location = repository.refers(&answer.url, &answer.location()?)?;
        self.upload = Some(Upload { location, offset: 0, least });
        Ok(None)
    }

    /// Sends the next piece, or completes the upload. After a failure, finds out what the registry has.
    fn step(&mut self) -> Result<Option<Outcome>, Error> {
        let Some(upload) = &self.upload else { return Ok(None) };
        let before = upload.offset;
        let error = match self.advance(before) {
            Ok(outcome) => return Ok(outcome),
            Err(error) => error,
        };
        match error.status() {
            // Too large for a proxy, or for the registry: in pieces, from the beginning.
            Some(413) if self.chunk > SMALLER_CHUNK && self.blob.size > SMALLER_CHUNK => {
                self.chunk = SMALLER_CHUNK;
                self.upload = None;
                return Ok(None);
            }
            // The upload is gone, or is elsewhere than was thought.
            Some(404 | 416) if self.restarts < MOST_RESTARTS => {
                self.restarts += 1;
                self.upload = None;
                return Ok(None);
            }
            _ if passes(&error, self.tell.stopped()).is_none() => return Err(error),
            _ => {}
        }
        match self.ask_where() {
            Ok(upload) => {
                let further = upload.offset.saturating_sub(before);
                let done = upload.offset == self.blob.size;
                self.upload = Some(upload);
                if further >= PROGRESS_MADE || (done && further > 0) { Ok(None) } else { Err(error) }
            }
            // What is not known any more is begun anew with the next attempt.
            Err(_) => {
                self.upload = None;
                Err(error)
            }
        }
    }

    fn advance(&mut self, offset: u64) -> Result<Option<Outcome>, Error> {
        let (repository, size) = (self.repository, self.blob.size);
        let Some(upload) = &mut self.upload else { return Ok(None) };
        if offset < size {
            let length = self.chunk.max(upload.least).min(size - offset);
            let end = offset + length;
            let range = format!("{offset}-{}", end - 1);
            let whole = length == size;
            let headers = [("content-type", "application/octet-stream"), ("content-range", &range)];
            let tell = self.tell;
            let patch = Ask {
                method: Method::PATCH,
                // A blob in one piece is sent as docker and podman send it, which all registries take.
                headers: if whole { &headers[..1] } else { &headers },
                body: Body::Section { file: self.file, offset, length, reached: &|at| tell.reached(at) },
                patience: SLOW,
                ..Ask::post(&upload.location)
            };
            let answer = repository.send(&patch)?;
            let location = repository.refers(&answer.url, &answer.location()?)?;
            let reached = answer.header("range").map_or(Some(end), |range| end_of(range, end));
            let reached =
                reached.filter(|reached| (offset + 1..=end).contains(reached)).ok_or_else(|| {
                    let message =
                        format!("it was sent bytes {offset} to {end}, and says it has another part");
                    Error::Answer { url: without_query(&answer.url), message }
                })?;
            upload.location = location;
            upload.offset = reached;
            return Ok(None);
        }
        let mut url = upload.location.clone();
        url.query_pairs_mut().append_pair("digest", &self.blob.digest.to_string());
        repository.send(&Ask { method: Method::PUT, patience: SLOW, ..Ask::post(&url) })?;
        Ok(Some(Outcome::Uploaded(size)))
    }

    /// Asks how much of the blob the registry has.
    fn ask_where(&self) -> Result<Upload, Error> {
        let repository = self.repository;
        let Some(Upload { location, offset, least }) = &self.upload else { return Err(gone(self.blob)) };
        let answer = repository.send(&Ask { method: Method::GET, ..Ask::post(location) })?;
        let reached = answer.header("range").and_then(|range| end_of(range, *offset));
        let reached = reached.filter(|reached| *reached <= self.blob.size).ok_or_else(|| gone(self.blob))?;
        let location = match answer.location() {
            Ok(to) => repository.refers(&answer.url, &to)?,
            Err(_) => location.clone(),
        };
        Ok(Upload { location, offset: reached, least: *least })
    }
}

fn gone(blob: &Blob) -> Error {
    let message = "the registry does not say how much of it there is".to_owned();
    Error::Document { what: format!("the upload of {}", blob.digest), message }
}

/// How many bytes a header `Range: 0-<last>` speaks of. Registries say `0-0` of one byte, and of none: then it is taken
/// for what is `known`, unless that is more.
fn end_of(range: &str, known: u64) -> Option<u64> {
    let (first, last) = range.trim().trim_start_matches("bytes=").split_once('-')?;
    if first != "0" {
        return None;
    }
    match last.parse::<u64>().ok()? {
        0 => Some(known.min(1)),
        last => last.checked_add(1),
    }
}

/// The reference that a push has made true, with its digest.
impl Pushed {
    /// What was pushed, named so that nothing else is ever meant by it.
    pub fn named(&self, reference: &Reference) -> String {
        format!("{}/{}@{}", reference.host(), reference.repository(), self.digest)
    }
}

#[cfg(test)]
mod tests {
    use super::end_of;

    #[test]
    fn what_a_registry_has() {
        for (range, known, expected) in [
            ("0-99", 0, Some(100)),
            ("bytes=0-99", 0, Some(100)),
            ("0-0", 0, Some(0)),
            ("0-0", 1, Some(1)),
            ("0-0", 50, Some(1)),
            ("1-99", 0, None),
            ("0--1", 0, None),
            ("99", 0, None),
            ("0-18446744073709551615", 0, None),
        ] {
            assert_eq!(end_of(range, known), expected, "{range}");
        }
    }
}
