//! Images as one file, for tools and machines without a registry: `oci-archive`, a tar of an OCI layout, and
//! `docker-archive`, what `docker save` writes and `docker load` and `podman load` read.
//!
//! The same image gives the same bytes: ustar headers alone, owner 0:0, mode 0644, time 0, entries in a fixed order.
//! Every blob is verified while it is copied, and a file is there whole or not at all.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde::Serialize;
use sha2::{Digest as _, Sha256};
use tar::{Builder, EntryType, Header};
use trainyard_spec::Digest;

use crate::content::Content;
use crate::oci::{self, Layout};
use crate::progress::{Event, Progress};
use crate::registry::is_tag;

/// Most bytes of a layer before compression. What is larger is not an image but an attack on the disk.
const LARGEST_LAYER: u64 = 256 << 30;

/// A form of an image in one file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// A tar of the OCI layout: every digest stays what it is.
    OciArchive,
    /// What `docker load` reads: layers are not compressed, and the image keeps the digest of its configuration alone.
    DockerArchive,
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Exported {
    /// The file.
    pub file: PathBuf,
    /// Its bytes.
    pub size: u64,
    /// Digest of its bytes.
    pub digest: Digest,
}

/// Why an image could not be exported.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is something in the file's place.
    #[error("{path} exists; name a file that does not", path = .path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// The layout is unreadable or damaged.
    #[error(transparent)]
    Layout(#[from] oci::Error),
    /// A layer cannot be decompressed.
    #[error("layer {digest} cannot be decompressed: {source}")]
    Layer {
        /// The layer.
        digest: Digest,
        /// What went wrong.
        source: io::Error,
    },
    /// The file could not be written.
    #[error("cannot write {path}: {source}", path = .path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

impl Error {
    /// The way out.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Write { source, .. }
                if matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) =>
            {
                Some("free some space, or write the file elsewhere")
            }
            _ => None,
        }
    }
}

/// Writes the image of an OCI layout to `target`, which must not exist.
///
/// # Errors
/// When the layout is damaged, or the file cannot be written.
pub fn export(
    layout: &Path,
    format: Format,
    target: &Path,
    progress: Progress<'_>,
) -> Result<Exported, Error> {
    let failed = |source| Error::Write { path: target.to_owned(), source };
    let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if target.symlink_metadata().is_ok() {
        return Err(Error::Exists { path: target.to_owned() });
    }
    let temporary = tempfile::Builder::new()
        .prefix(".trainyard-")
        .permissions(PermissionsExt::from_mode(0o644))
        .tempfile_in(folder)
        .map_err(failed)?;
    let mut archive = Archive { tar: Builder::new(temporary), target, progress };
    match format {
        Format::OciArchive => archive.oci(layout)?,
        Format::DockerArchive => archive.docker(&Layout::open(layout)?)?,
    }
    let mut temporary = archive.tar.into_inner().map_err(failed)?;
    let file = temporary.as_file_mut();
    file.sync_all().and_then(|()| file.rewind()).map_err(failed)?;
    let (digest, size) = crate::store::digest_of(file).map_err(failed)?;
    temporary.persist_noclobber(target).map_err(|error| match error.error.kind() {
        io::ErrorKind::AlreadyExists => Error::Exists { path: target.to_owned() },
        _ => failed(error.error),
    })?;
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed)?;
    Ok(Exported { file: target.to_owned(), size, digest })
}

/// An archive in the making.
struct Archive<'a> {
    tar: Builder<tempfile::NamedTempFile>,
    target: &'a Path,
    progress: Progress<'a>,
}

/// The entry of an image in `manifest.json`.
#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct DockerImage {
    config: String,
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

impl Archive<'_> {
    /// The files of a layout that belong to its image, or to its index and the images of that.
    fn oci(&mut self, layout: &Path) -> Result<(), Error> {
        let content = Content::read(layout)?;
        for folder in ["blobs/", "blobs/sha256/"] {
            let mut header = header(EntryType::Directory, 0o755);
            let failed = |source| Error::Write { path: self.target.to_owned(), source };
            self.tar.append_data(&mut header, folder, io::empty()).map_err(failed)?;
        }
        let documents = content.documents.iter().map(|document| document.digest);
        let all: BTreeSet<Digest> = documents.chain(content.blobs.iter().map(|blob| blob.digest)).collect();
        for digest in all {
            let path = oci::blob_path(layout, &digest);
            let file = File::open(&path).map_err(|source| oci::Error::Read { path: path.clone(), source })?;
            let found = self.stream(&format!("blobs/sha256/{}", digest.hex()), file, |source| {
                oci::Error::Read { path: path.clone(), source }.into()
            })?;
            if found != digest {
                return Err(oci::Error::Damaged { path, expected: digest, found }.into());
            }
        }
        self.bytes("index.json", &oci::canonical(&oci::index(layout)?)?)?;
        self.bytes("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)
    }

    /// Configuration, layers by the digests that it lists them by, and what names them.
    fn docker(&mut self, layout: &Layout) -> Result<(), Error> {
        let config = oci::raw(layout.folder(), layout.manifest.config())?;
        let config_name = format!("{}.json", Digest::of(&config).hex());
        self.bytes(&config_name, &config)?;
        let mut names = Vec::new();
        for (described, diff_id) in
            layout.manifest.layers().iter().zip(layout.configuration.rootfs().diff_ids())
        {
            let (path, digest) = oci::place(layout.folder(), described)?;
            let expected: Digest = diff_id.parse().map_err(|_| oci::Error::Layout {
                path: layout.folder().to_owned(),
                message: format!("it names a layer by {diff_id:?}; known is sha256"),
            })?;
            let name = format!("{}.tar", expected.hex());
            if !names.contains(&name) {
                let unreadable = |source| Error::Layer { digest, source };
                let layer = layout.layer(described)?;
                let found = self.stream(&name, layer.take(LARGEST_LAYER), unreadable)?;
                if found != expected {
                    return Err(oci::Error::Damaged { path, expected, found }.into());
                }
            }
            names.push(name);
        }
        let named = oci::index(layout.folder())?.manifests().first().and_then(tag_of);
        if let (Some((name, tag)), Some(top)) = (&named, names.last()) {
            let top = top.trim_end_matches(".tar");
            let repositories = serde_json::json!({ name: { tag: top } });
            self.bytes("repositories", &oci::canonical(&repositories)?)?;
        }
        let repo_tags = named.map(|(name, tag)| vec![format!("{name}:{tag}")]);
        let image = DockerImage { config: config_name, repo_tags, layers: names };
        self.bytes("manifest.json", &oci::canonical(&[image])?)
    }

    fn bytes(&mut self, name: &str, bytes: &[u8]) -> Result<(), Error> {
        let mut header = header(EntryType::Regular, 0o644);
        header.set_size(bytes.len() as u64);
        self.tar
            .append_data(&mut header, name, bytes)
            .map_err(|source| Error::Write { path: self.target.to_owned(), source })
    }

    /// Writes an entry whose size is known when it has been written, and gives its digest.
    fn stream(
        &mut self,
        name: &str,
        mut from: impl Read,
        unreadable: impl Fn(io::Error) -> Error,
    ) -> Result<Digest, Error> {
        let failed = |source| Error::Write { path: self.target.to_owned(), source };
        let mut header = header(EntryType::Regular, 0o644);
        let mut entry = self.tar.append_writer(&mut header, name).map_err(failed)?;
        let mut hasher = Sha256::new();
        let mut buffer = vec![0; 1 << 18];
        let mut written = 0;
        loop {
            let read = match from.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(unreadable(error)),
            };
            hasher.update(&buffer[..read]);
            entry.write_all(&buffer[..read]).map_err(failed)?;
            written += read as u64;
            (self.progress)(Event::Archiving { file: name.to_owned(), written });
        }
        entry.finish().map_err(failed)?;
        Ok(Digest::from_bytes(hasher.finalize().into()))
    }
}

fn header(kind: EntryType, mode: u32) -> Header {
    let mut header = Header::new_ustar();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(0);
    header
}

/// Name and tag that docker gives the image, where the layout names it.
fn tag_of(described: &oci_spec::image::Descriptor) -> Option<(String, String)> {
    let name = described.annotations().as_ref()?.get(oci::REF_NAME)?;
    let name = name.split('@').next().unwrap_or_default();
    let (name, tag) = match name.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => (name, tag),
        _ => (name, crate::registry::DEFAULT_TAG),
    };
    // A name that docker would refuse is left out: what is loaded is then known by its digest.
    let plain = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'-' | b'/' | b':');
    let first = name.bytes().next()?;
    let named = name.bytes().all(plain) && first.is_ascii_alphanumeric() && !name.contains("//");
    (named && is_tag(tag)).then(|| (name.to_owned(), tag.to_owned()))
}
