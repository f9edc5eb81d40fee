//! The deterministic layer writer: the same tree gives the same bytes, on every machine and at every time.
//!
//! What is fixed, and follows the OCI image layer format:
//! - ustar headers; what does not fit into one (long paths, long links, sizes from 8 GiB, extended attributes) stands in
//!   a pax header before it, with sorted keys (POSIX.1-2017 pax; `SCHILY.xattr.` for attributes); numeric ids and empty
//!   names; modification time 0; paths in bytewise order, folders first; of hard links the first path is the file; two
//!   zero blocks at the end.
//! - gzip by the pinned compressor at level 6, in a header without name, with time 0 and an unknown system.
//! - zstd by the pinned library at level 9 with its worker code, whose output does not depend on the number of workers.
//!
//! A change of any of these, or of a compressor's version, changes what `format` says.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use flate2::GzBuilder;
use fs_err::File;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tar::{EntryType, Header};
use trainyard_spec::image::Compression;
use trainyard_spec::{Digest, Name};

use crate::store::{self, Incoming, Store};
use crate::tree::{self, Kind, Meta, Tree};

/// Names what is fixed above. Part of what a finished layer is remembered by.
pub(crate) const fn format(compression: Compression) -> &'static str {
    match compression {
        Compression::Gzip => "tar pax 2, zlib-rs 6",
        Compression::Zstd => "tar pax 2, zstd 1.5.7 9",
    }
}
const GZIP_LEVEL: u32 = 6;
const ZSTD_LEVEL: i32 = 9;
/// A ustar header holds paths and links of up to 100 bytes, and sizes of 33 bits.
const LONGEST_PATH: usize = 100;
const LARGEST_FILE: u64 = 1 << 33;

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
    /// How it is compressed.
    pub compression: Compression,
}

/// Why a layer could not be written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
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
pub fn write(name: &Name, tree: &Tree, compression: Compression, store: &Store) -> Result<Layer, Error> {
    let failed = |source| Error::Write { layer: name.clone(), source };
    let packer = Packer::new(compression, store.incoming()?).map_err(failed)?;
    let mut tar = Digesting::new(packer);
    // The path that each hard-linked file was written at.
    let mut written: BTreeMap<&str, &str> = BTreeMap::new();
    for (path, node) in tree.iter() {
        let entry = |kind, link: &str, size| entry(path, &node.meta, kind, link, size);
        match &node.kind {
            Kind::Folder => tar.write_all(&entry(EntryType::Directory, "", 0)),
            Kind::Symlink(target) => tar.write_all(&entry(EntryType::Symlink, target, 0)),
            Kind::File(file) => match file.hard_link.as_deref().map(|link| (link, written.get(link))) {
                Some((_, Some(first))) => tar.write_all(&entry(EntryType::Link, first, 0)),
                link => {
                    if let Some((link, None)) = link {
                        written.insert(link, path);
                    }
                    tar.write_all(&entry(EntryType::Regular, "", file.size)).map_err(failed)?;
                    copy(file, name, &mut tar)?;
                    pad(file.size, &mut tar)
                }
            },
        }
        .map_err(failed)?;
    }
    tar.write_all(&[0; 1024]).map_err(failed)?;
    let (packer, diff_id, unpacked_size) = tar.finish();
    let (digest, size) = store.keep(packer.finish().map_err(failed)?)?;
    Ok(Layer { name: name.clone(), digest, size, diff_id, unpacked_size, compression })
}

/// The headers of an entry: a pax header where it needs one, and its own.
fn entry(path: &str, meta: &Meta, kind: EntryType, link: &str, size: u64) -> Vec<u8> {
    let path = if kind.is_dir() { format!("{path}/") } else { path.to_owned() };
    let mut records: BTreeMap<String, &[u8]> = BTreeMap::new();
    let size_text = size.to_string();
    if path.len() > LONGEST_PATH {
        records.insert("path".to_owned(), path.as_bytes());
    }
    if link.len() > LONGEST_PATH {
        records.insert("linkpath".to_owned(), link.as_bytes());
    }
    if size >= LARGEST_FILE {
        records.insert("size".to_owned(), size_text.as_bytes());
    }
    // A link to a file that has been written has that file's attributes.
    for (name, value) in meta.xattrs.iter().filter(|_| kind != EntryType::Link) {
        records.insert(format!("SCHILY.xattr.{name}"), value);
    }
    let mut bytes = Vec::new();
    if !records.is_empty() {
        let mut body = Vec::new();
        for (key, value) in records {
            record(&key, value, &mut body);
        }
        bytes.extend(header("././@PaxHeader", &Meta::mode(0o644), EntryType::XHeader, "", body.len() as u64));
        body.resize(body.len().next_multiple_of(512), 0);
        bytes.extend(body);
    }
    bytes.extend(header(&path, meta, kind, link, size));
    bytes
}

/// A record of a pax header, which starts with its own length in decimal digits.
fn record(key: &str, value: &[u8], out: &mut Vec<u8>) {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while rest + length.to_string().len() != length {
        length = rest + length.to_string().len();
    }
    out.extend(format!("{length} {key}=").into_bytes());
    out.extend(value);
    out.push(b'\n');
}

fn header(path: &str, meta: &Meta, kind: EntryType, link: &str, size: u64) -> [u8; 512] {
    let mut header = Header::new_ustar();
    // What is too long stands whole in the pax header before this one.
    let cut = |text: &str| text.as_bytes()[..text.len().min(LONGEST_PATH)].to_vec();
    let (path, link) = (cut(path), cut(link));
    header.as_mut_bytes()[..path.len()].copy_from_slice(&path);
    header.as_mut_bytes()[LINK_AT..LINK_AT + link.len()].copy_from_slice(&link);
    header.set_entry_type(kind);
    header.set_mode(if kind.is_symlink() { 0o777 } else { meta.mode });
    header.set_uid(meta.uid.into());
    header.set_gid(meta.gid.into());
    header.set_mtime(0);
    header.set_size(if size < LARGEST_FILE { size } else { 0 });
    header.set_cksum();
    *header.as_bytes()
}

/// Where a ustar header holds the target of a link.
const LINK_AT: usize = 157;

/// A compressor in front of the store.
enum Packer {
    Gzip(Box<flate2::write::GzEncoder<Incoming>>),
    Zstd(Box<zstd::Encoder<'static, Incoming>>),
}

impl Packer {
    fn new(compression: Compression, incoming: Incoming) -> io::Result<Self> {
        Ok(match compression {
            Compression::Gzip => {
                let gzip = GzBuilder::new().mtime(0).operating_system(255);
                Self::Gzip(Box::new(gzip.write(incoming, flate2::Compression::new(GZIP_LEVEL))))
            }
            Compression::Zstd => {
                let mut encoder = zstd::Encoder::new(incoming, ZSTD_LEVEL)?;
                let workers = std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(4);
                encoder.multithread(u32::try_from(workers).unwrap_or(1))?;
                encoder.include_checksum(true)?;
                Self::Zstd(Box::new(encoder))
            }
        })
    }

    fn finish(self) -> io::Result<Incoming> {
        match self {
            Self::Gzip(encoder) => encoder.finish(),
            Self::Zstd(encoder) => encoder.finish(),
        }
    }
}

impl Write for Packer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Gzip(encoder) => encoder.write(bytes),
            Self::Zstd(encoder) => encoder.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Gzip(encoder) => encoder.flush(),
            Self::Zstd(encoder) => encoder.flush(),
        }
    }
}

fn copy(body: &tree::File, layer: &Name, tar: &mut impl Write) -> Result<(), Error> {
    let tree::File { source, size, digest, .. } = body;
    let source: &Path = source;
    let read = |error: io::Error| Error::Read { path: source.to_owned(), source: error };
    let mut file = File::open(source).map_err(read)?;
    let mut hasher = Sha256::new();
    let mut left = *size;
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
    if left == 0 && Digest::from_bytes(hasher.finalize().into()) == *digest {
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
