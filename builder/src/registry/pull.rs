//! Pulling: the document that a reference names, then the blobs that the store lacks, then a layout of them.
//!
//! Every byte is verified on its way into the store. A blob whose connection breaks is gone on with where the server can
//! do that.

use std::path::PathBuf;

use oci_spec::image::{Arch, Descriptor, DescriptorBuilder, ImageIndex, ImageManifest, MediaType, Os};
use serde::Serialize;
use trainyard_spec::Digest;
use trainyard_spec::image::Platform;
use trainyard_spec::lock::LockedFile;
use ureq::http::Method;

use super::Error;
use super::client::{Ask, Repository, passes, without_query};
use super::parallel::{self, Tell};
use crate::content::{DOCKER_INDEX, DOCKER_MANIFEST, Document, Kind};
use crate::http::{self, Sink};
use crate::oci::{self, Layout};
use crate::progress::{Event, Progress};
use crate::store::{self, Incoming};

/// What is asked for where a reference is resolved.
const ACCEPT: [&str; 4] = [
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
    DOCKER_MANIFEST,
    DOCKER_INDEX,
];
/// Platforms that are named where none is the right one.
const MOST_NAMED: usize = 20;
/// A download that has come so much further counts as one that has not failed.
const PROGRESS_MADE: u64 = 1 << 20;

/// What a pull did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Pulled {
    /// The image's digest: of its manifest, where the reference names an index.
    pub digest: Digest,
    /// Folder of the OCI layout that holds it, in the cache.
    pub layout: PathBuf,
    /// Bytes of its configuration and compressed layers.
    pub size: u64,
    /// Bytes that were fetched.
    pub fetched: u64,
}

/// A configuration or layer to be had.
struct Wanted {
    digest: Digest,
    size: u64,
}

impl Repository {
    /// Pulls the image that this was connected for into the cache; of an index, the image for `platform`.
    ///
    /// # Errors
    /// When there is no such image, or what the registry gives is not what it should be.
    pub fn pull(&self, platform: Platform, progress: Progress<'_>) -> Result<Pulled, Error> {
        self.store.sweep()?;
        let mut document = self.manifest(&self.reference.version(), progress)?;
        if kind(&document)? == Kind::Index {
            let digest = self.choose(&document, platform)?;
            document = self.manifest(&digest.to_string(), progress)?;
        }
        if kind(&document)? != Kind::Manifest {
            let message = "it is an index in an index".to_owned();
            return Err(Error::Document { what: document.digest.to_string(), message });
        }
        let manifest: ImageManifest = parse(&document)?;
        let digest = document.digest;
        let mut wanted: Vec<Wanted> = Vec::new();
        for described in [manifest.config()].into_iter().chain(manifest.layers()) {
            let (digest, size) = (digest_of(described, &document)?, described.size());
            match wanted.iter().find(|one| one.digest == digest) {
                Some(one) if one.size == size => {}
                Some(_) => {
                    let message = format!("it gives {digest} two sizes");
                    return Err(Error::Document { what: document.digest.to_string(), message });
                }
                None => wanted.push(Wanted { digest, size }),
            }
        }
        // Sizes are whatever the manifest says.
        let size = wanted.iter().fold(0, |sum: u64, one| sum.saturating_add(one.size));
        let show = |received| {
            let file = self.reference.to_string();
            Event::Downloading { file, received, size: Some(size) }
        };
        let fetched = parallel::each(&wanted, self.options.at_once, show, progress, |one, tell| {
            let fetched = self.fetch(one, tell)?;
            let _ = tell.reached(one.size);
            self.remember(&one.digest);
            Ok(if fetched { one.size } else { 0 })
        })?;
        let layout = self.store.folder("images")?.join(digest.hex());
        let _only_one = self.store.lock(&format!("image-{}", digest.short()))?;
        store::used(&layout);
        if !oci::is_whole(&layout) {
            let staging = self.store.staging()?;
            let described = DescriptorBuilder::default()
                .media_type(MediaType::from(document.media_type.as_str()))
                .digest(oci::to_oci(&digest)?)
                .size(document.bytes.len() as u64)
                .annotations(oci::named(&self.reference.to_string()))
                .build()
                .map_err(oci::Error::from)?;
            let blobs: Vec<Digest> = wanted.iter().map(|one| one.digest).collect();
            oci::lay_out(described, &[&document.bytes], &blobs, &self.store, &staging)?;
            // An artifact that is no image, or one whose documents contradict each other, is refused here.
            Layout::open(staging.path())?;
            staging.install(&layout)?;
        }
        progress(Event::Image { digest, reused: false });
        Ok(Pulled { digest, layout, size, fetched: fetched.iter().sum() })
    }

    /// A manifest or index, by tag or digest, verified as far as the reference and the registry say what it is.
    pub(super) fn manifest(&self, version: &str, progress: Progress<'_>) -> Result<Document, Error> {
        let url = self.url("manifests", version);
        let accept = ACCEPT.join(", ");
        let headers = [("accept", accept.as_str())];
        let (bytes, answer) = self.document(&Ask::get(&url, &headers), progress)?;
        let digest = Digest::of(&bytes);
        let expected =
            if version.contains(':') { Some(version) } else { answer.header("docker-content-digest") };
        // Another algorithm's digest is nothing to compare with.
        if let Some(expected) = expected.filter(|expected| expected.starts_with("sha256:"))
            && expected != digest.to_string()
        {
            return Err(Error::Differs {
                what: without_query(&url),
                expected: format!("{expected:?}"),
                found: digest.to_string(),
            });
        }
        let said = answer.header("content-type").unwrap_or_default();
        let said = said.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        let own: Option<String> = serde_json::from_slice::<serde_json::Value>(&bytes)
            .map_err(|error| Error::Document { what: without_query(&url), message: error.to_string() })?
            .get("mediaType")
            .and_then(|own| own.as_str().map(str::to_owned));
        // What the document says is part of its digest; what the server says is not.
        Ok(Document { digest, media_type: own.unwrap_or(said), bytes })
    }

    /// The image of an index for a platform.
    fn choose(&self, index: &Document, wanted: Platform) -> Result<Digest, Error> {
        let parsed: ImageIndex = parse(index)?;
        let architecture = Arch::from(wanted.architecture());
        let mut found = Vec::new();
        for described in parsed.manifests() {
            let Some(platform) = described.platform() else { continue };
            if *platform.os() == Os::Linux && *platform.architecture() == architecture {
                return digest_of(described, index);
            }
            found.push(format!("{}/{}", platform.os(), platform.architecture()));
        }
        found.sort();
        found.dedup();
        found.truncate(MOST_NAMED);
        let found = if found.is_empty() { "none".to_owned() } else { format!("{:?}", found.join(", ")) };
        Err(Error::NoPlatform { reference: self.reference.to_string(), platform: wanted, found })
    }

    /// Gets a blob, where the store lacks it.
    fn fetch(&self, wanted: &Wanted, tell: &Tell<'_>) -> Result<bool, Error> {
        if self.store.verified(&wanted.digest)?.is_some() {
            return Ok(false);
        }
        // Another process may be at it: whoever comes second finds the blob in the store.
        let _only_one = self.store.lock(&format!("blob-{}", wanted.digest.hex()))?;
        if self.store.verified(&wanted.digest)?.is_some() {
            return Ok(false);
        }
        let mut incoming = self.store.incoming()?;
        let mut received = 0;
        let progress = |event| tell.event(event);
        let passes = |error: &Error| passes(error, tell.stopped());
        while received < wanted.size {
            self.http.again(&wanted.digest.to_string(), &progress, passes, || {
                let before = received;
                match self.receive(wanted, &mut incoming, &mut received, tell) {
                    Err(error)
                        if error.passes().is_some() && received >= before.saturating_add(PROGRESS_MADE) =>
                    {
                        Ok(())
                    }
                    result => result,
                }
            })?;
        }
        let expected =
            LockedFile { name: wanted.digest.to_string(), size: wanted.size, sha256: wanted.digest };
        self.store.keep_as(incoming, &expected).map_err(|error| match error {
            store::Error::Differs { expected, found, expected_size, found_size, .. } => Error::Differs {
                what: without_query(&self.url("blobs", &wanted.digest.to_string())),
                expected: format!("{expected_size} bytes with {expected}"),
                found: format!("{found_size} bytes with {found}"),
            },
            error => error.into(),
        })?;
        Ok(true)
    }

    /// Receives what is lacking of a blob, up to its end or a failure.
    fn receive(
        &self,
        wanted: &Wanted,
        incoming: &mut Incoming,
        received: &mut u64,
        tell: &Tell<'_>,
    ) -> Result<(), Error> {
        use std::io::{Read, Write};
        let url = self.url("blobs", &wanted.digest.to_string());
        let range = format!("bytes={received}-");
        let headers = [("accept", "*/*"), ("range", range.as_str())];
        // The first request is one that all servers know.
        let headers = if *received == 0 { &headers[..1] } else { &headers[..] };
        let mut answer = self.send(&Ask { method: Method::GET, ..Ask::get(&url, headers) })?;
        let from = without_query(&answer.url);
        let path = incoming.path().to_owned();
        let sink = |source| store::io_error("write a download to", &path)(source);
        if *received > 0 && !continues(&answer, *received) {
            // A server that cannot go on begins anew.
            incoming.restart().map_err(sink)?;
            *received = 0;
        }
        let left = wanted.size - *received;
        if answer.response.body().content_length().is_some_and(|length| length > left) {
            return Err(http::Error::TooLarge { url: from, limit: wanted.size }.into());
        }
        let mut reader = answer.response.body_mut().as_reader();
        let mut buffer = vec![0; 1 << 16];
        loop {
            let body = |source| http::Error::Body { url: from.clone(), received: *received, source };
            let read = match reader.read(&mut buffer) {
                Ok(0) if *received == wanted.size => return Ok(()),
                // Shorter than its own headers said, or than the manifest says.
                Ok(0) => return Err(body(std::io::ErrorKind::UnexpectedEof.into()).into()),
                Ok(read) => read,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(source) => return Err(body(source).into()),
            };
            tell.reached(*received).map_err(body)?;
            if *received + read as u64 > wanted.size {
                return Err(http::Error::TooLarge { url: from, limit: wanted.size }.into());
            }
            incoming.write_all(&buffer[..read]).map_err(sink)?;
            *received += read as u64;
        }
    }
}

/// Whether an answer goes on at this byte.
fn continues(answer: &super::client::Answer, at: u64) -> bool {
    let start = answer.header("content-range").and_then(|range| {
        let (start, _) = range.trim().strip_prefix("bytes ")?.split_once('-')?;
        start.parse::<u64>().ok()
    });
    answer.response.status().as_u16() == 206 && start == Some(at)
}

fn kind(document: &Document) -> Result<Kind, Error> {
    Kind::of(&MediaType::from(document.media_type.as_str())).ok_or_else(|| Error::Document {
        what: document.digest.to_string(),
        message: format!(
            "it is {:?}; known are image manifests and indexes of OCI and docker",
            document.media_type
        ),
    })
}

fn parse<T: serde::de::DeserializeOwned>(document: &Document) -> Result<T, Error> {
    serde_json::from_slice(&document.bytes)
        .map_err(|error| Error::Document { what: document.digest.to_string(), message: error.to_string() })
}

fn digest_of(described: &Descriptor, document: &Document) -> Result<Digest, Error> {
    let named = described.digest().to_string();
    named.parse().map_err(|_| Error::Document {
        what: document.digest.to_string(),
        message: format!("it names something by {named:?}; known is sha256"),
    })
}
