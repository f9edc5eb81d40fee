//! Token shards in llm.c's format: 256 little-endian i32 (magic, version, number of tokens, zeros), then the tokens.
//!
//! Vocabularies of up to 65,536 tokens are stored as u16 (magic 20240520, version 1, as for GPT-2), larger ones as u32
//! (magic 20240801, version 7, as for Llama 3).
//!
//! Left out: which tokens belong together (the dataset), and in which order they are read.

use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use sha2::{Digest as _, Sha256};
use trainyard_spec::Digest;

const HEADER_BYTES: usize = 256 * 4;

/// How tokens are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Width {
    U16,
    U32,
}

impl Width {
    const fn for_vocabulary(vocabulary: u32) -> Self {
        if vocabulary <= 1 << 16 { Self::U16 } else { Self::U32 }
    }

    const fn bytes(self) -> usize {
        match self {
            Self::U16 => 2,
            Self::U32 => 4,
        }
    }

    const fn magic_and_version(self) -> (i32, i32) {
        match self {
            Self::U16 => (20_240_520, 1),
            Self::U32 => (20_240_801, 7),
        }
    }
}

/// Why a shard cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ShardError {
    /// The operating system refused.
    #[error("{operation} {}: {source}", .path.display())]
    Io {
        /// What was tried.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Not a token shard, or of another kind.
    #[error("{}: {field} in the header is {found}; needed is {needed}", .path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// Which number.
        field: &'static str,
        /// The number there.
        found: i64,
        /// What it should be.
        needed: String,
    },
    /// The file does not have the size that its header promises.
    #[error("{}: {found} bytes; needed are {needed} by its header: it is truncated, or more was added", .path.display())]
    Size {
        /// The file.
        path: PathBuf,
        /// Its size.
        found: u64,
        /// The size its header promises.
        needed: u64,
    },
    /// A token that the vocabulary does not have.
    #[error("{}: token {found} at byte {offset}; needed is below the vocabulary's size, {vocabulary}", .path.display())]
    Token {
        /// The file.
        path: PathBuf,
        /// Where in the file.
        offset: u64,
        /// The token.
        found: u32,
        /// The vocabulary's size.
        vocabulary: u32,
    },
}

/// A shard, mapped into memory.
#[derive(Debug)]
pub struct Shard {
    path: PathBuf,
    map: Mmap,
    width: Width,
    tokens: usize,
    vocabulary: u32,
}

impl Shard {
    /// Opens a shard and verifies its header and its size. Tokens are checked as they are read.
    ///
    /// # Errors
    /// When the file cannot be read or is not a whole shard for a vocabulary of this size.
    pub fn open(path: &Path, vocabulary: u32) -> Result<Self, ShardError> {
        let io = |operation| move |source| ShardError::Io { operation, path: path.to_owned(), source };
        let file = File::open(path).map_err(io("cannot open"))?;
        let size = file.metadata().map_err(io("cannot read the size of"))?.len();
        if size < HEADER_BYTES as u64 {
            return Err(ShardError::Size { path: path.to_owned(), found: size, needed: HEADER_BYTES as u64 });
        }
        // SAFETY: shards are written to a temporary folder and renamed, never changed in place, so the bytes do not
        // change while mapped; whoever truncates a data set under a running job gets SIGBUS.
        let map = unsafe { Mmap::map(&file) }.map_err(io("cannot map"))?;
        let field = |index: usize| i32::from_le_bytes(std::array::from_fn(|byte| map[4 * index + byte]));
        let width = Width::for_vocabulary(vocabulary);
        let (magic, version) = width.magic_and_version();
        for (index, name, needed) in [(0, "magic", magic), (1, "version", version)] {
            if field(index) != needed {
                return Err(ShardError::Header {
                    path: path.to_owned(),
                    field: name,
                    found: field(index).into(),
                    needed: format!("{needed} for a vocabulary of {vocabulary}"),
                });
            }
        }
        let Ok(tokens) = usize::try_from(field(2)) else {
            return Err(ShardError::Header {
                path: path.to_owned(),
                field: "number of tokens",
                found: field(2).into(),
                needed: "at least 0".to_owned(),
            });
        };
        let needed = (HEADER_BYTES + tokens * width.bytes()) as u64;
        if size != needed {
            return Err(ShardError::Size { path: path.to_owned(), found: size, needed });
        }
        Ok(Self { path: path.to_owned(), map, width, tokens, vocabulary })
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.tokens
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.tokens == 0
    }

    /// Appends tokens `start..start + count` to `out`.
    ///
    /// # Errors
    /// When one of them is outside the vocabulary.
    ///
    /// # Panics
    /// When the range ends beyond the shard.
    pub fn read(&self, start: usize, count: usize, out: &mut Vec<u32>) -> Result<(), ShardError> {
        let width = self.width.bytes();
        let from = HEADER_BYTES + start * width;
        let bytes = &self.map[from..from + count * width];
        let first = out.len();
        match self.width {
            Width::U16 => {
                out.extend(bytes.chunks_exact(2).map(|b| u32::from(u16::from_le_bytes([b[0], b[1]]))));
            }
            Width::U32 => {
                out.extend(bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])));
            }
        }
        match out[first..].iter().position(|&token| token >= self.vocabulary) {
            None => Ok(()),
            Some(index) => Err(ShardError::Token {
                path: self.path.clone(),
                offset: (from + index * width) as u64,
                found: out[first + index],
                vocabulary: self.vocabulary,
            }),
        }
    }
}

/// Writes one shard. It is whole only after [`ShardWriter::finish`].
pub(crate) struct ShardWriter {
    path: PathBuf,
    file: BufWriter<File>,
    width: Width,
    tokens: usize,
    hasher: Sha256,
}

/// Most tokens in a shard, llm.c's own choice.
pub(crate) const SHARD_TOKENS: usize = 100_000_000;

impl ShardWriter {
    pub(crate) fn create(path: PathBuf, vocabulary: u32) -> Result<Self, ShardError> {
        let file = File::create_new(&path)
            .and_then(|file| {
                let mut file = BufWriter::with_capacity(1 << 20, file);
                file.write_all(&[0; HEADER_BYTES])?;
                Ok(file)
            })
            .map_err(|source| ShardError::Io { operation: "cannot create", path: path.clone(), source })?;
        Ok(Self { path, file, width: Width::for_vocabulary(vocabulary), tokens: 0, hasher: Sha256::new() })
    }

    pub(crate) const fn tokens(&self) -> usize {
        self.tokens
    }

    /// Appends tokens, which must be below the vocabulary's size.
    pub(crate) fn write(&mut self, tokens: &[u32]) -> Result<(), ShardError> {
        let bytes: Vec<u8> = match self.width {
            Width::U16 => tokens.iter().flat_map(|&token| (token as u16).to_le_bytes()).collect(),
            Width::U32 => tokens.iter().flat_map(|token| token.to_le_bytes()).collect(),
        };
        self.hasher.update(&bytes);
        self.tokens += tokens.len();
        self.file.write_all(&bytes).map_err(|source| self.io("cannot write", source))
    }

    /// Writes the header and waits until everything is on disk. Returns the digest of the tokens' bytes.
    pub(crate) fn finish(mut self) -> Result<Digest, ShardError> {
        let (magic, version) = self.width.magic_and_version();
        let mut header = [0; HEADER_BYTES];
        for (index, number) in [magic, version, self.tokens as i32].into_iter().enumerate() {
            header[4 * index..4 * index + 4].copy_from_slice(&number.to_le_bytes());
        }
        let written = self.file.flush().and_then(|()| {
            use std::os::unix::fs::FileExt as _;
            self.file.get_ref().write_all_at(&header, 0)?;
            self.file.get_ref().sync_all()
        });
        written.map_err(|source| self.io("cannot write", source))?;
        Ok(Digest::from_bytes(self.hasher.finalize().into()))
    }

    fn io(&self, operation: &'static str, source: io::Error) -> ShardError {
        ShardError::Io { operation, path: self.path.clone(), source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(vocabulary: u32, tokens: &[u32]) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shard.bin");
        let mut writer = ShardWriter::create(path.clone(), vocabulary).unwrap();
        writer.write(tokens).unwrap();
        writer.finish().unwrap();
        (folder, path)
    }

    /// Bytes that llm.c's `write_datafile` makes of the same tokens.
    #[test]
    fn known_answers() {
        for (vocabulary, tokens, start, end) in [
            (
                50_257,
                &[1_u32, 50_256][..],
                [0x88, 0xd8, 0x34, 0x01, 1, 0, 0, 0, 2, 0, 0, 0],
                &[1, 0, 0x50, 0xc4][..],
            ),
            (
                128_256,
                &[70_000][..],
                [0xa1, 0xd9, 0x34, 0x01, 7, 0, 0, 0, 1, 0, 0, 0],
                &[0x70, 0x11, 1, 0][..],
            ),
        ] {
            let (_folder, path) = write(vocabulary, tokens);
            let bytes = std::fs::read(&path).unwrap();
            assert_eq!(bytes[..12], start);
            assert!(bytes[12..1024].iter().all(|&byte| byte == 0));
            assert_eq!(&bytes[1024..], end);
            let mut read = Vec::new();
            Shard::open(&path, vocabulary).unwrap().read(0, tokens.len(), &mut read).unwrap();
            assert_eq!(read, tokens);
        }
    }

    #[test]
    fn names_what_is_wrong() {
        type Damage = fn(&mut Vec<u8>);
        let damage: [(&str, Damage); 5] = [
            ("magic in the header is 0", |bytes| bytes[..4].fill(0)),
            ("version in the header is 9", |bytes| bytes[4] = 9),
            ("number of tokens in the header is -1", |bytes| bytes[8..12].fill(255)),
            ("1029 bytes; needed are 1030", |bytes| bytes.truncate(1029)),
            ("100 bytes; needed are 1024", |bytes| bytes.truncate(100)),
        ];
        for (expect, damage) in damage {
            let (_folder, path) = write(256, &[1, 2, 3]);
            let mut bytes = std::fs::read(&path).unwrap();
            damage(&mut bytes);
            std::fs::write(&path, bytes).unwrap();
            let error = Shard::open(&path, 256).unwrap_err().to_string();
            assert!(error.contains(expect), "{error}");
        }
    }

    #[test]
    fn token_outside_the_vocabulary_is_named_with_its_place() {
        let (_folder, path) = write(256, &[1, 2, 300]);
        let shard = Shard::open(&path, 256).unwrap();
        shard.read(0, 2, &mut Vec::new()).unwrap();
        let error = shard.read(1, 2, &mut Vec::new()).unwrap_err().to_string();
        assert!(
            error.contains("token 300 at byte 1028; needed is below the vocabulary's size, 256"),
            "{error}"
        );
    }
}
