//! Hands an image of an OCI layout to Podman, by digest.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use trainyard_spec::Digest;

use super::EngineError;
use super::libpod::Libpod;

/// The parts of an OCI image manifest that are needed to find its blobs.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Manifest {
    #[serde(default)]
    media_type: Option<String>,
    config: Descriptor,
    layers: Vec<Descriptor>,
}

#[derive(Debug, Deserialize)]
struct Descriptor {
    digest: Digest,
}

const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";

/// Makes sure that Podman has the image, and nothing else under its id. Returns the id, by which containers name it.
pub(super) async fn ensure(podman: &Libpod, layout: &Path, digest: Digest) -> Result<Digest, EngineError> {
    let bytes = read(&blob(layout, digest))?;
    if Digest::of(&bytes) != digest {
        let found = format!("has digest {}, not its own", Digest::of(&bytes));
        return Err(EngineError::Layout { path: blob(layout, digest), found });
    }
    let manifest: Manifest = serde_json::from_slice(&bytes)
        .map_err(|error| EngineError::Layout { path: blob(layout, digest), found: error.to_string() })?;
    let id = manifest.config.digest;
    if held(podman, id).await?.as_deref() == Some(digest.to_string().as_str()) {
        return Ok(id);
    }
    let archive = archive(layout, digest, &bytes, &manifest)?;
    podman.load(archive.path()).await?;
    match held(podman, id).await? {
        Some(found) if found == digest.to_string() => Ok(id),
        found => {
            Err(EngineError::Digest { found: found.unwrap_or_else(|| "unknown".to_owned()), needed: digest })
        }
    }
}

/// Digest of the manifest of the image with this id, if Podman has one.
async fn held(podman: &Libpod, id: Digest) -> Result<Option<String>, EngineError> {
    let failed = |error: podman_api::Error| EngineError::Podman {
        action: format!("look for image {}", id.short()),
        found: error.to_string(),
    };
    let image = podman.api.images().get(id.hex());
    if !image.exists().await.map_err(failed)? {
        return Ok(None);
    }
    Ok(image.inspect().await.map_err(failed)?.digest)
}

fn blob(layout: &Path, digest: Digest) -> PathBuf {
    layout.join("blobs/sha256").join(digest.hex())
}

fn read(path: &Path) -> Result<Vec<u8>, EngineError> {
    fs::read(path).map_err(|error| EngineError::Layout { path: path.to_owned(), found: error.to_string() })
}

/// The image alone as an OCI archive; its layout may hold more.
fn archive(
    layout: &Path,
    digest: Digest,
    bytes: &[u8],
    manifest: &Manifest,
) -> Result<tempfile::NamedTempFile, EngineError> {
    let index = serde_json::json!({
        "schemaVersion": 2,
        "manifests": [{
            "mediaType": manifest.media_type.as_deref().unwrap_or(MANIFEST_TYPE),
            "digest": digest,
            "size": bytes.len(),
            // Images without a name are what `podman image prune` removes.
            "annotations": { "org.opencontainers.image.ref.name": format!("localhost/trainyard:{}", digest.short()) },
        }],
    });
    let mut file = tempfile::NamedTempFile::new().map_err(|source| EngineError::Io {
        action: "write in",
        path: std::env::temp_dir(),
        source,
    })?;
    let path = file.path().to_owned();
    let failed = |source| EngineError::Io { action: "write", path: path.clone(), source };
    let mut tar = tar::Builder::new(std::io::BufWriter::new(file.as_file_mut()));
    append(&mut tar, "oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#).map_err(failed)?;
    append(&mut tar, "index.json", index.to_string().as_bytes()).map_err(failed)?;
    for blob_digest in
        [digest, manifest.config.digest].into_iter().chain(manifest.layers.iter().map(|l| l.digest))
    {
        let path = blob(layout, blob_digest);
        let mut body = File::open(&path)
            .map_err(|error| EngineError::Layout { path: path.clone(), found: error.to_string() })?;
        tar.append_file(format!("blobs/sha256/{}", blob_digest.hex()), &mut body).map_err(failed)?;
    }
    tar.into_inner().and_then(|mut file| file.flush()).map_err(failed)?;
    Ok(file)
}

fn append(tar: &mut tar::Builder<impl std::io::Write>, name: &str, bytes: &[u8]) -> std::io::Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_mode(0o644);
    header.set_size(bytes.len() as u64);
    tar.append_data(&mut header, name, bytes)
}
