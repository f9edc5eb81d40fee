//! The deterministic layer writer: the same tree gives the same bytes, on every machine and at every time.
//!
//! What is fixed, and follows the OCI image layer format (application/vnd.oci.image.layer.v1.tar+gzip):
//! - ustar headers alone; numeric ids 0:0 and empty names; mode 0755 for folders and programs, 0644 for other files;
//!   modification time 0; paths in bytewise order, folders first; two zero blocks at the end.
//! - gzip by the pinned compressor at [`LEVEL`], in a header without name, with time 0 and an unknown system.
//!
//! A change of any of these, or of the compressor's version, changes [`FORMAT`].

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use flate2::{Compression, GzBuilder};
use fs_err::File;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tar::{EntryType, Header};
use trainyard_spec::{Digest, Name};

use crate::store::{self, Store};
use crate::tree::{Entry, Tree};

/// Names what is fixed above. Part of what a finished layer is remembered by.
pub(crate) const FORMAT: &str = "tar ustar 1, zlib-rs 6";
const LEVEL: u32 = 6;
/// A ustar header holds paths of up to 100 bytes without splitting them.
const LONGEST_PATH: usize = 100;

/// A finished layer in the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Layer {
    /// Its name in the manifest.
    pub name: Name,
    /// Digest of the compressed layer.
    pub digest: Digest,
    /// Bytes of the compressed layer.
    pub size: u64,
    /// Digest of the layer before compression, as the image configuration lists it.
    pub diff_id: Digest,
    /// Bytes of the layer before compression.
    pub unpacked_size: u64,
}

/// Why a layer could not be written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A path is too long for the format.
    #[error("/{path} has {} bytes; a path in a layer has at most {LONGEST_PATH}", path.len())]
    Path {
        /// The path.
        path: String,
    },
    /// A file could not be read.
    #[error("cannot read {path}: {source}", path = .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file changed while it was being written to a layer.
    #[error("{path} changed while the image was being built", path = .path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// The layer could not be written.
    #[error("cannot write layer {layer} to the store: {source}")]
    Write {
        /// The layer.
        layer: Name,
        /// What the system said.
        source: io::Error,
    },
    /// The store failed.
    #[error(transparent)]
    Store(#[from] store::Error),
}

/// Writes `tree` as a layer into the store, digesting it before and after compression on the way.
///
/// # Errors
/// When a file cannot be read or has changed, or the store cannot be written.
pub fn write(name: &Name, tree: &Tree, store: &Store) -> Result<Layer, Error> {
    let gzip = GzBuilder::new().mtime(0).operating_system(255);
    let mut tar = Digesting::new(gzip.write(store.incoming()?, Compression::new(LEVEL)));
    let failed = |source| Error::Write { layer: name.clone(), source };
    for (path, entry) in tree.iter() {
        if path.len() + 1 > LONGEST_PATH {
            return Err(Error::Path { path: path.to_owned() });
        }
        match entry {
            Entry::Folder => {
                tar.write_all(header(&format!("{path}/"), EntryType::Directory, 0o755, 0).as_bytes())
            }
            Entry::File(file) => {
                let mode = if file.executable { 0o755 } else { 0o644 };
                tar.write_all(header(path, EntryType::Regular, mode, file.size).as_bytes())
                    .map_err(failed)?;
                copy(&file.source, file.size, file.digest, name, &mut tar)?;
                pad(file.size, &mut tar)
            }
        }
        .map_err(failed)?;
    }
    tar.write_all(&[0; 1024]).map_err(failed)?;
    let (gzip, diff_id, unpacked_size) = tar.finish();
    let incoming = gzip.finish().map_err(failed)?;
    let (digest, size) = store.keep(incoming)?;
    Ok(Layer { name: name.clone(), digest, size, diff_id, unpacked_size })
}

fn header(path: &str, kind: EntryType, mode: u32, size: u64) -> Header {
    let mut header = Header::new_ustar();
    // The path has been measured, and it is relative and clean: a tree holds no other.
    header.as_mut_bytes()[..path.len()].copy_from_slice(path.as_bytes());
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(size);
    header.set_cksum();
    header
}

fn copy(source: &Path, size: u64, digest: Digest, layer: &Name, tar: &mut impl Write) -> Result<(), Error> {
    let read = |error: io::Error| Error::Read { path: source.to_owned(), source: error };
    let mut file = File::open(source).map_err(read)?;
    let mut hasher = Sha256::new();
    let mut left = size;
    let mut buffer = vec![0; 1 << 16];
    loop {
        let count = io::Read::read(&mut file, &mut buffer).map_err(read)?;
        if count == 0 {
            break;
        }
        left = left.checked_sub(count as u64).ok_or_else(|| Error::Changed { path: source.to_owned() })?;
        hasher.update(&buffer[..count]);
        tar.write_all(&buffer[..count]).map_err(|source| Error::Write { layer: layer.clone(), source })?;
    }
    if left == 0 && Digest::from_bytes(hasher.finalize().into()) == digest {
        Ok(())
    } else {
        Err(Error::Changed { path: source.to_owned() })
    }
}

fn pad(size: u64, tar: &mut impl Write) -> io::Result<()> {
    let used = (size % 512) as usize;
    if used == 0 { Ok(()) } else { tar.write_all(&[0; 512][used..]) }
}

/// Passes bytes on, and digests and counts them.
struct Digesting<W> {
    inner: W,
    hasher: Sha256,
    count: u64,
}

impl<W> Digesting<W> {
    fn new(inner: W) -> Self {
        Self { inner, hasher: Sha256::new(), count: 0 }
    }

    fn finish(self) -> (W, Digest, u64) {
        (self.inner, Digest::from_bytes(self.hasher.finalize().into()), self.count)
    }
}

impl<W: Write> Write for Digesting<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.hasher.update(&bytes[..written]);
        self.count += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}
