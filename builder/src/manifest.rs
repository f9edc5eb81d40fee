//! Reading what people write: manifests and locks.
//!
//! What is named may be anything, a device or a pipe too, which would never end: regular files of a sane size are read
//! and nothing else. Left out: what a manifest may say, which is the specification's.

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use trainyard_spec::toml::{self, FromToml, Validate};
use trainyard_spec::{ByteSize, Faults};

/// Most bytes of a manifest or lock.
const LARGEST: u64 = 4 << 20;

/// Why a manifest or lock cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The system refused.
    #[error("cannot read {path}: {source}", path = .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It is a folder, a device or a pipe.
    #[error("cannot read {path}: it is not a regular file", path = .path.display())]
    NotAFile {
        /// What was named.
        path: PathBuf,
    },
    /// Nobody writes so much by hand.
    #[error("{path} has {found}; a manifest or lock has at most {most}", path = .path.display(), most = ByteSize(LARGEST))]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        found: ByteSize,
    },
    /// It is not text.
    #[error("{path} is not UTF-8 text: byte {offset} cannot be read", path = .path.display())]
    NotText {
        /// The file.
        path: PathBuf,
        /// Where it stops being text.
        offset: usize,
    },
    /// It says something wrong.
    #[error(transparent)]
    Faults(#[from] Faults),
}

/// Reads a manifest or lock.
///
/// # Errors
/// When it is no regular file of text, or has faults, which are reported all together.
pub fn read<T>(path: &Path) -> Result<T, Error>
where
    T: Validate + for<'de> FromToml<'de>,
{
    Ok(toml::read(&path.display().to_string(), &text(path)?)?)
}

/// The text of a manifest or lock.
pub(crate) fn text(path: &Path) -> Result<String, Error> {
    let failed = |source| Error::Read { path: path.to_owned(), source };
    // Before it is opened, which for a pipe waits until somebody writes to it.
    if !std::fs::metadata(path).map_err(failed)?.is_file() {
        return Err(Error::NotAFile { path: path.to_owned() });
    }
    let file = std::fs::File::open(path).map_err(failed)?;
    let mut bytes = Vec::new();
    file.take(LARGEST + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > LARGEST {
        let found = ByteSize(std::fs::metadata(path).map_err(failed)?.len());
        return Err(Error::TooLarge { path: path.to_owned(), found });
    }
    String::from_utf8(bytes).map_err(|error| {
        let offset = error.utf8_error().valid_up_to();
        Error::NotText { path: path.to_owned(), offset }
    })
}
