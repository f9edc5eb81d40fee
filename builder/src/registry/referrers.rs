//! What refers to an image: signatures, bills of materials, provenance. Each is a manifest of its own whose subject is
//! the image, so that the image's digest does not depend on it.
//!
//! Registries without the referrers API keep a list of them under a tag made of the image's digest (distribution
//! specification, "Referrers Tag Schema"). Such a list is read, changed and written: of two who do so at one moment, one
//! may be lost.

use std::collections::BTreeMap;

use oci_spec::image::{
    Descriptor, DescriptorBuilder, ImageIndex, ImageIndexBuilder, ImageManifestBuilder, MediaType,
};
use trainyard_spec::Digest;
use url::Url;

use super::Error;
use super::client::{Ask, Repository, without_query};
use crate::content::Document;
use crate::oci;
use crate::progress::Progress;

/// Most pages of a list.
const MOST_PAGES: usize = 100;
/// The empty configuration of a manifest that is no image (image specification, "Guidance for an empty descriptor").
const EMPTY: &[u8] = b"{}";

/// Something to attach to an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Artifact {
    /// What it is, as a media type.
    pub artifact_type: String,
    /// Media type of its bytes.
    pub media_type: String,
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Annotations of its manifest.
    pub annotations: BTreeMap<String, String>,
}

impl Repository {
    /// What refers to `subject`, an image of this repository, and is of `artifact_type` where one is given.
    ///
    /// # Errors
    /// When the registry cannot be asked, or its list makes no sense.
    pub fn referrers(
        &self,
        subject: &Digest,
        artifact_type: Option<&str>,
        progress: Progress<'_>,
    ) -> Result<Vec<Descriptor>, Error> {
        let all = match self.listed(subject, artifact_type, progress)? {
            Some(all) => all,
            None => self.tagged(subject, progress)?,
        };
        // A registry need not filter, and a list under a tag cannot.
        let wanted = |one: &Descriptor| {
            artifact_type.is_none_or(|wanted| {
                one.artifact_type().as_ref().is_some_and(|found| found.as_ref() == wanted)
            })
        };
        Ok(all.into_iter().filter(wanted).collect())
    }

    /// Attaches an artifact to `subject`, an image of this repository, and gives the digest of its manifest. Attaching
    /// the same again changes nothing.
    ///
    /// # Errors
    /// When the image is not there, or the registry refuses something.
    pub fn attach(
        &self,
        subject: &Digest,
        artifact: &Artifact,
        progress: Progress<'_>,
    ) -> Result<Digest, Error> {
        let image = self.manifest(&subject.to_string(), progress)?;
        let kind = |name: &str| MediaType::from(name);
        let subject_descriptor = described(kind(&image.media_type), &image.bytes)?;
        self.put_blob(EMPTY, progress)?;
        self.put_blob(&artifact.bytes, progress)?;
        let manifest = ImageManifestBuilder::default()
            .schema_version(2_u32)
            .media_type(MediaType::ImageManifest)
            .artifact_type(kind(&artifact.artifact_type))
            .config(described(MediaType::EmptyJSON, EMPTY)?)
            .layers(vec![described(kind(&artifact.media_type), &artifact.bytes)?])
            .subject(subject_descriptor)
            .annotations(oci::hashed(artifact.annotations.clone()))
            .build()
            .map_err(oci::Error::from)?;
        let bytes = oci::canonical(&manifest)?;
        let digest = Digest::of(&bytes);
        let entry = DescriptorBuilder::default()
            .media_type(MediaType::ImageManifest)
            .digest(oci::to_oci(&digest)?)
            .size(bytes.len() as u64)
            .artifact_type(kind(&artifact.artifact_type))
            .annotations(oci::hashed(artifact.annotations.clone()))
            .build()
            .map_err(oci::Error::from)?;
        let document = Document { digest, media_type: MediaType::ImageManifest.to_string(), bytes };
        let answer = self.put_manifest(&document, &digest.to_string(), progress)?;
        // Only a registry that has the API says this.
        if answer.header("oci-subject").is_none() {
            self.enlist(subject, entry, progress)?;
        }
        Ok(digest)
    }

    /// The registry's own list; none where it keeps none.
    fn listed(
        &self,
        subject: &Digest,
        artifact_type: Option<&str>,
        progress: Progress<'_>,
    ) -> Result<Option<Vec<Descriptor>>, Error> {
        let mut url = self.url("referrers", &subject.to_string());
        if let Some(wanted) = artifact_type {
            url.query_pairs_mut().append_pair("artifactType", wanted);
        }
        let headers = [("accept", "application/vnd.oci.image.index.v1+json")];
        let mut all = Vec::new();
        for _ in 0..MOST_PAGES {
            let (bytes, answer) = match self.document(&Ask::get(&url, &headers), progress) {
                Err(error) if error.status() == Some(404) && all.is_empty() => return Ok(None),
                answer => answer?,
            };
            all.extend(entries(&bytes, &url)?);
            let Some(next) = answer.header("link").and_then(next) else { return Ok(Some(all)) };
            url = self.refers(&answer.url, next)?;
        }
        let message = format!("its list of referrers has more than {MOST_PAGES} pages");
        Err(Error::Answer { url: without_query(&url), message })
    }

    /// The list under a tag, for registries that keep none themselves.
    fn tagged(&self, subject: &Digest, progress: Progress<'_>) -> Result<Vec<Descriptor>, Error> {
        let tag = tag(subject);
        match self.manifest(&tag, progress) {
            Ok(document) => entries(&document.bytes, &self.url("manifests", &tag)),
            Err(error) if error.status() == Some(404) => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    /// Adds to the list under a tag.
    fn enlist(&self, subject: &Digest, entry: Descriptor, progress: Progress<'_>) -> Result<(), Error> {
        let mut all = self.tagged(subject, progress)?;
        if all.iter().any(|one| one.digest() == entry.digest()) {
            return Ok(());
        }
        all.push(entry);
        let index = ImageIndexBuilder::default()
            .schema_version(2_u32)
            .media_type(MediaType::ImageIndex)
            .manifests(all)
            .build()
            .map_err(oci::Error::from)?;
        let bytes = oci::canonical(&index)?;
        let document =
            Document { digest: Digest::of(&bytes), media_type: MediaType::ImageIndex.to_string(), bytes };
        self.put_manifest(&document, &tag(subject), progress).map(drop)
    }
}

fn described(kind: MediaType, bytes: &[u8]) -> Result<Descriptor, Error> {
    Ok(oci::descriptor(kind, bytes)?)
}

fn entries(bytes: &[u8], url: &Url) -> Result<Vec<Descriptor>, Error> {
    let index: ImageIndex = serde_json::from_slice(bytes)
        .map_err(|error| Error::Document { what: without_query(url), message: error.to_string() })?;
    Ok(index.manifests().clone())
}

/// The tag under which a registry without the API has what refers to an image.
fn tag(subject: &Digest) -> String {
    subject.to_string().replace(':', "-")
}

/// The next page of a list, from the header Link (RFC 8288).
fn next(link: &str) -> Option<&str> {
    let (address, parameters) = link.trim().strip_prefix('<')?.split_once('>')?;
    let is_next = |parameter: &str| matches!(parameter.trim(), "rel=\"next\"" | "rel=next");
    parameters.split(';').any(is_next).then_some(address)
}
