//! What is pushed or exported: the image of an OCI layout, or an index with all its images.

use std::collections::BTreeMap;
use std::path::Path;

use oci_spec::image::{Descriptor, ImageIndex, ImageManifest, MediaType};
use trainyard_spec::Digest;

use crate::oci;

/// docker's media types of what the image specification calls manifest and index. The documents are the same.
pub(crate) const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
pub(crate) const DOCKER_INDEX: &str = "application/vnd.docker.distribution.manifest.list.v2+json";

/// Most documents of an index, and how deep they may be nested.
const MOST_DOCUMENTS: usize = 1000;
const DEEPEST: usize = 4;

/// What a document is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Manifest,
    Index,
}

impl Kind {
    pub(crate) fn of(media_type: &MediaType) -> Option<Self> {
        match media_type {
            MediaType::ImageManifest => Some(Self::Manifest),
            MediaType::ImageIndex => Some(Self::Index),
            MediaType::Other(name) if name == DOCKER_MANIFEST => Some(Self::Manifest),
            MediaType::Other(name) if name == DOCKER_INDEX => Some(Self::Index),
            _ => None,
        }
    }
}

/// A manifest or index.
#[derive(Debug)]
pub(crate) struct Document {
    pub(crate) digest: Digest,
    pub(crate) media_type: String,
    pub(crate) bytes: Vec<u8>,
}

/// A configuration or layer.
#[derive(Debug, Clone)]
pub(crate) struct Blob {
    pub(crate) digest: Digest,
    pub(crate) size: u64,
}

/// All parts of what is pushed.
#[derive(Debug, Default)]
pub(crate) struct Content {
    /// Each after those that it refers to, so that the last is what the reference will name.
    pub(crate) documents: Vec<Document>,
    pub(crate) blobs: Vec<Blob>,
}

impl Content {
    /// Reads the documents of a layout that holds one image or one index.
    pub(crate) fn read(layout: &Path) -> Result<Self, oci::Error> {
        let index: ImageIndex = oci::index(layout)?;
        let [root] = index.manifests().as_slice() else {
            let message = format!("it holds {} images; needed is one, or one index", index.manifests().len());
            return Err(oci::Error::Layout { path: layout.to_owned(), message });
        };
        let mut content = Self::default();
        let mut blobs = BTreeMap::new();
        content.add(layout, root, 0, &mut blobs)?;
        content.blobs = blobs.into_iter().map(|(digest, size)| Blob { digest, size }).collect();
        Ok(content)
    }

    fn add(
        &mut self,
        layout: &Path,
        described: &Descriptor,
        depth: usize,
        blobs: &mut BTreeMap<Digest, u64>,
    ) -> Result<(), oci::Error> {
        let wrong = |message: String| oci::Error::Layout { path: layout.to_owned(), message };
        let (_, digest) = oci::place(layout, described)?;
        if self.documents.iter().any(|known| known.digest == digest) {
            return Ok(());
        }
        if depth > DEEPEST || self.documents.len() >= MOST_DOCUMENTS {
            return Err(wrong(format!(
                "it has more than {MOST_DOCUMENTS} documents, or deeper than {DEEPEST}"
            )));
        }
        let media_type = described.media_type();
        let bytes = oci::raw(layout, described)?;
        let unreadable = |error: serde_json::Error| wrong(format!("its document {digest} is wrong: {error}"));
        match Kind::of(media_type) {
            Some(Kind::Manifest) => {
                let manifest: ImageManifest = serde_json::from_slice(&bytes).map_err(unreadable)?;
                for blob in manifest.layers().iter().chain([manifest.config()]) {
                    let (path, digest) = oci::place(layout, blob)?;
                    if blobs.insert(digest, blob.size()).is_some_and(|size| size != blob.size()) {
                        return Err(wrong(format!("its documents give {} two sizes", path.display())));
                    }
                }
            }
            Some(Kind::Index) => {
                let index: ImageIndex = serde_json::from_slice(&bytes).map_err(unreadable)?;
                for child in index.manifests() {
                    self.add(layout, child, depth + 1, blobs)?;
                }
            }
            None => {
                return Err(wrong(format!(
                    "{digest} is {:?}; known are image manifests and indexes",
                    media_type.as_ref()
                )));
            }
        }
        self.documents.push(Document { digest, media_type: media_type.to_string(), bytes });
        Ok(())
    }
}
