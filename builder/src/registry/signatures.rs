//! Signatures and signed statements of an image, where cosign puts and looks for them: in manifests under tags that are
//! made of the image's digest, a layer for each. What others have put there stays.
//!
//! Like every list under a tag it is read, changed and written: of two who sign at one moment, one may be lost. Left out:
//! certificates and transparency logs.

use std::collections::BTreeSet;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use oci_spec::image::{Descriptor, DescriptorBuilder, ImageManifest, ImageManifestBuilder, MediaType};
use serde::Serialize;
use serde_json::json;
use trainyard_spec::Digest;

use super::client::{Ask, Repository};
use super::{Error, LARGEST_MANIFEST};
use crate::content::Document;
use crate::oci;
use crate::progress::Progress;
use crate::supply::key::{PrivateKey, PublicKey};
use crate::supply::signing::{self, Envelope};

const PAYLOAD: &str = "application/vnd.dev.cosign.simplesigning.v1+json";
const ENVELOPE: &str = "application/vnd.dsse.envelope.v1+json";
const SIGNATURE: &str = "dev.cosignproject.cosign/signature";
const PREDICATE: &str = "predicateType";
/// Most bytes of a payload that is read.
const LARGEST_PAYLOAD: u64 = 64 << 10;
/// Most bytes of an envelope that is read: bills of materials name each file.
const LARGEST_ENVELOPE: u64 = 128 << 20;
/// Most signatures or statements that are looked at.
const MOST: usize = 100;

/// What signing did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Signed {
    /// The image.
    pub digest: Digest,
    /// Signatures and statements that were put there.
    pub added: usize,
    /// Those that were there, by the same key.
    pub present: usize,
}

/// What a key's owner has signed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Verified {
    /// The image.
    pub digest: Digest,
    /// The names under which it was signed.
    pub signed_as: BTreeSet<String>,
    /// Types of the statements about it that were signed.
    pub statements: BTreeSet<String>,
}

impl Repository {
    /// The digest of what the reference names.
    ///
    /// # Errors
    /// When there is nothing.
    pub fn resolve(&self, progress: Progress<'_>) -> Result<Digest, Error> {
        Ok(self.manifest(&self.reference.version(), progress)?.digest)
    }

    /// Signs `image`, which has to be there, and statements about it by the type of their predicate. What the key has
    /// signed already is not signed again.
    ///
    /// # Errors
    /// When the image is not there, what is there cannot be read, or the registry refuses something.
    pub fn sign(
        &self,
        image: &Digest,
        key: &PrivateKey,
        statements: &[(&str, Vec<u8>)],
        progress: Progress<'_>,
    ) -> Result<Signed, Error> {
        self.manifest(&image.to_string(), progress)?;
        let mut signed = Signed { digest: *image, added: 0, present: 0 };
        let public = key.public();
        let mut layers = self.layers(&tag(image, "sig"), progress)?;
        let payload = signing::payload(&self.name(), image);
        if layers.iter().any(|layer| is_signed(layer, &payload, &public)) {
            signed.present += 1;
        } else {
            let signature = STANDARD.encode(key.sign(&payload)?);
            layers.push(self.layer(PAYLOAD, &payload, &[(SIGNATURE, &signature)], progress)?);
            self.put_layers(&tag(image, "sig"), layers, progress)?;
            signed.added += 1;
        }
        if statements.is_empty() {
            return Ok(signed);
        }
        let mut layers = self.layers(&tag(image, "att"), progress)?;
        let there: Vec<Vec<u8>> = self.statements(&layers, &public, progress)?;
        let before = layers.len();
        for (kind, statement) in statements {
            if there.contains(statement) {
                signed.present += 1;
                continue;
            }
            let envelope = oci::canonical(&Envelope::seal(statement, key)?)?;
            layers.push(self.layer(ENVELOPE, &envelope, &[(SIGNATURE, ""), (PREDICATE, kind)], progress)?);
            signed.added += 1;
        }
        if layers.len() > before {
            self.put_layers(&tag(image, "att"), layers, progress)?;
        }
        Ok(signed)
    }

    /// Finds what the owner of `key` has signed about `image`.
    ///
    /// # Errors
    /// [`Error::NotSigned`] where the image itself is not signed with it, or when the registry cannot be asked.
    pub fn verify(&self, image: &Digest, key: &PublicKey, progress: Progress<'_>) -> Result<Verified, Error> {
        let layers = self.layers(&tag(image, "sig"), progress)?;
        let mut signed_as = BTreeSet::new();
        for layer in layers.iter().filter(|layer| *layer.media_type() == MediaType::from(PAYLOAD)) {
            let payload = self.blob(layer, LARGEST_PAYLOAD, progress)?;
            if signing::is_about(&payload, image) && is_signed(layer, &payload, key) {
                let payload: serde_json::Value = serde_json::from_slice(&payload).unwrap_or_default();
                let name = payload["critical"]["identity"]["docker-reference"].as_str();
                signed_as.insert(name.unwrap_or_default().to_owned());
            }
        }
        if signed_as.is_empty() {
            let reference = self.reference.at(*image).to_string();
            return Err(Error::NotSigned { reference, others: layers.len() });
        }
        let layers = self.layers(&tag(image, "att"), progress)?;
        let statements = self.statements(&layers, key, progress)?;
        let statements =
            statements.iter().filter_map(|statement| signing::predicate(statement, image)).collect();
        Ok(Verified { digest: *image, signed_as, statements })
    }

    /// The statements that `key`'s owner has signed.
    fn statements(
        &self,
        layers: &[Descriptor],
        key: &PublicKey,
        progress: Progress<'_>,
    ) -> Result<Vec<Vec<u8>>, Error> {
        let mut found = Vec::new();
        for layer in layers.iter().filter(|layer| *layer.media_type() == MediaType::from(ENVELOPE)) {
            let bytes = self.blob(layer, LARGEST_ENVELOPE, progress)?;
            // What is no envelope is nothing that the key has signed.
            let envelope = serde_json::from_slice::<Envelope>(&bytes).ok();
            found.extend(envelope.and_then(|envelope| envelope.open(key)));
        }
        Ok(found)
    }

    /// Name of the repository with its registry.
    fn name(&self) -> String {
        format!("{}/{}", self.reference.host(), self.reference.repository())
    }

    /// The layers under a tag; none where it is not there.
    fn layers(&self, tag: &str, progress: Progress<'_>) -> Result<Vec<Descriptor>, Error> {
        let document = match self.manifest(tag, progress) {
            Err(error) if error.status() == Some(404) => return Ok(Vec::new()),
            document => document?,
        };
        let wrong = |message: String| Error::Document { what: tag.to_owned(), message };
        let manifest: ImageManifest =
            serde_json::from_slice(&document.bytes).map_err(|error| wrong(error.to_string()))?;
        let layers = manifest.layers();
        if layers.len() > MOST {
            return Err(wrong(format!("it has {} signatures; at most {MOST} are looked at", layers.len())));
        }
        Ok(layers.clone())
    }

    /// A small blob, verified.
    fn blob(&self, described: &Descriptor, limit: u64, progress: Progress<'_>) -> Result<Vec<u8>, Error> {
        let expected = described.digest().to_string();
        let url = self.url("blobs", &expected);
        let limit = limit.min(described.size());
        let bytes = self
            .http
            .again(&expected, progress, Error::passes, || self.send(&Ask::get(&url, &[]))?.read(limit))?;
        let found = Digest::of(&bytes).to_string();
        if found == expected {
            Ok(bytes)
        } else {
            Err(Error::Differs { what: url.to_string(), expected, found })
        }
    }

    fn layer(
        &self,
        kind: &str,
        bytes: &[u8],
        annotations: &[(&str, &str)],
        progress: Progress<'_>,
    ) -> Result<Descriptor, Error> {
        let digest = self.put_blob(bytes, progress)?;
        let annotations = annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        let described = DescriptorBuilder::default()
            .media_type(MediaType::from(kind))
            .digest(oci::to_oci(&digest)?)
            .size(bytes.len() as u64)
            .annotations(oci::hashed(annotations.collect()))
            .build();
        Ok(described.map_err(oci::Error::from)?)
    }

    /// Puts a manifest with these layers under a tag. It has the form of an image, as cosign's own.
    fn put_layers(&self, tag: &str, layers: Vec<Descriptor>, progress: Progress<'_>) -> Result<(), Error> {
        let diff_ids: Vec<String> = layers.iter().map(|layer| layer.digest().to_string()).collect();
        let config = json!({
            "architecture": "", "os": "", "config": {}, "created": "0001-01-01T00:00:00Z",
            "history": layers.iter().map(|_| json!({"created": "0001-01-01T00:00:00Z"})).collect::<Vec<_>>(),
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        });
        let config = oci::canonical(&config)?;
        self.put_blob(&config, progress)?;
        let manifest = ImageManifestBuilder::default()
            .schema_version(2_u32)
            .media_type(MediaType::ImageManifest)
            .config(oci::descriptor(MediaType::ImageConfig, &config)?)
            .layers(layers)
            .build()
            .map_err(oci::Error::from)?;
        let bytes = oci::canonical(&manifest)?;
        if bytes.len() as u64 > LARGEST_MANIFEST {
            let message = format!("it would have {} bytes; at most {LARGEST_MANIFEST} are read", bytes.len());
            return Err(Error::Document { what: tag.to_owned(), message });
        }
        let document =
            Document { digest: Digest::of(&bytes), media_type: MediaType::ImageManifest.to_string(), bytes };
        self.put_manifest(&document, tag, progress).map(drop)
    }
}

/// Whether a layer is of this payload, and its signature by `key`'s owner.
fn is_signed(layer: &Descriptor, payload: &[u8], key: &PublicKey) -> bool {
    let signature = layer.annotations().as_ref().and_then(|annotations| annotations.get(SIGNATURE));
    let signature = signature.and_then(|signature| STANDARD.decode(signature).ok());
    layer.digest().to_string() == Digest::of(payload).to_string()
        && signature.is_some_and(|signature| key.verifies(payload, &signature))
}

/// The tag under which cosign has something about an image.
fn tag(image: &Digest, kind: &str) -> String {
    format!("sha256-{}.{kind}", image.hex())
}
