//! The content-addressed store: `<cache>/blobs/sha256/<hex>`.
//!
//! A blob is there whole and verified, or it is not there: bytes are written to a temporary file, hashed on the way,
//! flushed and renamed. A blob that has gone bad since is thrown away when it is next asked for. Any number of
//! processes may share a store, and one that is killed leaves only a temporary file that the next one removes.
//!
//! What lies in a cache, and is found there again, gets a new time then ([`used`]), by which [`crate::gc`] tells what nobody
//! needs. Where bytes come from is left out.

use std::fs::{File, TryLockError};
use std::io::{self, BufReader, Read, Seek, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};
use tempfile::NamedTempFile;
use trainyard_spec::Digest;
use trainyard_spec::lock::LockedFile;

use crate::http::Sink;

/// A store.
#[derive(Debug, Clone)]
pub struct Store {
    cache: PathBuf,
}

/// Why the store could not keep or give something.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file system refused.
    #[error("cannot {operation} {path}: {source}", path = .path.display())]
    Io {
        /// What was being done.
        operation: &'static str,
        /// Where.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Bytes that arrived are not the ones asked for. They were thrown away.
    #[error(
        "{file} is not what was locked: expected {expected_size} bytes with {expected}, found {found_size} bytes with {found}"
    )]
    Differs {
        /// The file.
        file: String,
        /// Bytes expected.
        expected_size: u64,
        /// Digest expected.
        expected: Digest,
        /// Bytes found.
        found_size: u64,
        /// Digest found.
        found: Digest,
    },
    /// A blob that was there a moment ago is gone or has other content now.
    #[error("{digest} is missing from the store {cache}, or damaged", cache = .cache.display())]
    Missing {
        /// The blob.
        digest: Digest,
        /// The store.
        cache: PathBuf,
    },
}

impl Error {
    /// The way out.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Io { source, .. } => match source.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                    Some("free some space, or choose another cache folder")
                }
                io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                    Some("choose a cache folder that you may write to")
                }
                _ => None,
            },
            Self::Differs { .. } => Some(
                "the download was damaged, or the server has another file under this name; try again, and do not lock anew before you know why",
            ),
            Self::Missing { .. } => Some("run the command again; what is missing is made anew"),
        }
    }
}

pub(crate) fn io_error(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io { operation, path, source }
}

/// A blob being written.
#[derive(Debug)]
pub struct Incoming {
    file: NamedTempFile,
    hasher: Sha256,
    size: u64,
}

impl Incoming {
    /// The temporary file.
    pub(crate) fn path(&self) -> &Path {
        self.file.path()
    }
}

impl Write for Incoming {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.hasher.update(&bytes[..written]);
        self.size += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Sink for Incoming {
    fn restart(&mut self) -> io::Result<()> {
        self.file.rewind()?;
        self.file.as_file().set_len(0)?;
        self.hasher = Sha256::new();
        self.size = 0;
        Ok(())
    }
}

impl Store {
    /// The store of a cache folder, which need not exist yet.
    pub fn new(cache: &Path) -> Self {
        Self { cache: cache.to_owned() }
    }

    /// Where a blob lies, if it is there.
    pub fn path(&self, digest: &Digest) -> PathBuf {
        self.cache.join("blobs/sha256").join(digest.hex())
    }

    /// The path of a blob whose bytes have just been checked, or `None` where there is none. A damaged one is removed.
    ///
    /// # Errors
    /// When the blob cannot be read, or a damaged one not be removed.
    pub fn verified(&self, digest: &Digest) -> Result<Option<PathBuf>, Error> {
        let path = self.path(digest);
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(io_error("open", &path)(error)),
        };
        let (found, _) = digest_of(file).map_err(io_error("read", &path))?;
        if found == *digest {
            used(&path);
            return Ok(Some(path));
        }
        match fs_err::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(io_error("remove the damaged", &path)(error))
            }
            _ => Ok(None),
        }
    }

    /// As [`Store::verified`], where the blob has to be there.
    ///
    /// # Errors
    /// [`Error::Missing`] where it is not.
    pub fn require(&self, digest: &Digest) -> Result<PathBuf, Error> {
        self.verified(digest)?.ok_or_else(|| Error::Missing { digest: *digest, cache: self.cache.clone() })
    }

    /// Starts a blob.
    ///
    /// # Errors
    /// When the store cannot be written.
    pub fn incoming(&self) -> Result<Incoming, Error> {
        let folder = self.folder("tmp")?;
        let gate_path = folder.join(".gate");
        let gate = open_lock(&gate_path)?;
        // Between being created and being locked a file looks abandoned, so no sweep may run then.
        gate.lock_shared().map_err(io_error("lock", &gate_path))?;
        let file = tempfile::Builder::new()
            .prefix("blob-")
            .tempfile_in(&folder)
            .map_err(io_error("create a file in", &folder))?;
        file.as_file().lock().map_err(io_error("lock", file.path()))?;
        Ok(Incoming { file, hasher: Sha256::new(), size: 0 })
    }

    /// Keeps what was written under its own digest.
    ///
    /// # Errors
    /// When the store cannot be written.
    pub fn keep(&self, incoming: Incoming) -> Result<(Digest, u64), Error> {
        let digest = Digest::from_bytes(incoming.hasher.clone().finalize().into());
        let size = incoming.size;
        self.install(incoming, &digest)?;
        Ok((digest, size))
    }

    /// Keeps what was written if it is `expected`, and throws it away otherwise.
    ///
    /// # Errors
    /// [`Error::Differs`], or when the store cannot be written.
    pub fn keep_as(&self, incoming: Incoming, expected: &LockedFile) -> Result<(), Error> {
        let found = Digest::from_bytes(incoming.hasher.clone().finalize().into());
        if found != expected.sha256 || incoming.size != expected.size {
            return Err(Error::Differs {
                file: expected.name.clone(),
                expected_size: expected.size,
                expected: expected.sha256,
                found_size: incoming.size,
                found,
            });
        }
        self.install(incoming, &found)
    }

    fn install(&self, incoming: Incoming, digest: &Digest) -> Result<(), Error> {
        self.folder("blobs/sha256")?;
        let path = self.path(digest);
        let temporary = incoming.file.path().to_owned();
        let file = incoming.file.as_file();
        file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o444))
            .and_then(|()| file.sync_all())
            .map_err(io_error("flush", &temporary))?;
        incoming.file.persist(&path).map_err(|error| io_error("rename to", &path)(error.error))?;
        sync_folder(&path)
    }

    /// Waits until no other process works on `name`, for as long as the returned file is kept.
    ///
    /// # Errors
    /// When the store cannot be written.
    pub fn lock(&self, name: &str) -> Result<File, Error> {
        let path = self.folder("locks")?.join(name);
        let file = open_lock(&path)?;
        file.lock().map_err(io_error("lock", &path))?;
        Ok(file)
    }

    /// Keeps [`crate::gc`] from the cache for as long as the returned file is kept. Any number of processes work at once.
    /// None where the cache cannot be written to and has no file to lock.
    ///
    /// # Errors
    /// When the file cannot be made or locked.
    pub fn in_use(&self) -> Result<Option<File>, Error> {
        let opened = self.folder("locks").and_then(|folder| open_lock(&folder.join(IN_USE)));
        let path = self.cache.join("locks").join(IN_USE);
        let file = match opened {
            Ok(file) => file,
            // Who may only read takes what there is.
            Err(Error::Io { source, .. })
                if matches!(
                    source.kind(),
                    io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied
                ) =>
            {
                let Ok(file) = File::open(&path) else { return Ok(None) };
                file
            }
            Err(error) => return Err(error),
        };
        file.lock_shared().map_err(io_error("lock", &path))?;
        Ok(Some(file))
    }

    /// Waits until no other process uses the cache, and keeps them from it for as long as the returned file is kept;
    /// `wait` is called before waiting.
    ///
    /// # Errors
    /// When the store cannot be written.
    pub(crate) fn alone(&self, wait: impl FnOnce()) -> Result<File, Error> {
        let path = self.folder("locks")?.join(IN_USE);
        let file = open_lock(&path)?;
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) => wait(),
            Err(TryLockError::Error(error)) => return Err(io_error("lock", &path)(error)),
        }
        file.lock().map_err(io_error("lock", &path))?;
        Ok(file)
    }

    /// Removes what processes that were killed have left behind.
    ///
    /// # Errors
    /// When the store cannot be written.
    pub fn sweep(&self) -> Result<(), Error> {
        let folder = self.folder("tmp")?;
        let gate_path = folder.join(".gate");
        let gate = open_lock(&gate_path)?;
        match gate.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(()),
            Err(TryLockError::Error(error)) => return Err(io_error("lock", &gate_path)(error)),
        }
        for entry in fs_err::read_dir(&folder).map_err(io_error("list", &folder))? {
            let path = entry.map_err(io_error("list", &folder))?.path();
            if path == gate_path {
                continue;
            }
            // A folder is made by a process that holds its lock file beside it.
            if path.is_dir() {
                let lock = path.with_extension("lock");
                if is_abandoned(&lock) {
                    fs_err::remove_dir_all(&path).map_err(io_error("remove", &path))?;
                    // The lock of an abandoned folder goes with it; another sweep cannot run meanwhile.
                    let _ = fs_err::remove_file(&lock);
                }
            } else if path.extension().is_none_or(|extension| extension != "lock") && is_abandoned(&path) {
                fs_err::remove_file(&path).map_err(io_error("remove", &path))?;
            }
        }
        Ok(())
    }

    /// A folder to build something in that will be renamed into its place. It is removed when dropped, and by
    /// [`Store::sweep`] where its process was killed.
    ///
    /// # Errors
    /// When the store cannot be written.
    pub fn staging(&self) -> Result<Staging, Error> {
        let folder = self.folder("tmp")?;
        let gate_path = folder.join(".gate");
        let gate = open_lock(&gate_path)?;
        gate.lock_shared().map_err(io_error("lock", &gate_path))?;
        let staged = tempfile::Builder::new()
            .prefix("staging-")
            .tempdir_in(&folder)
            .map_err(io_error("create a folder in", &folder))?;
        let lock_path = staged.path().with_extension("lock");
        let lock = open_lock(&lock_path)?;
        lock.lock().map_err(io_error("lock", &lock_path))?;
        Ok(Staging { folder: staged, _lock: lock, lock_path })
    }

    /// The folder `name` of the cache, created where it is not there.
    ///
    /// # Errors
    /// When it cannot be created.
    pub fn folder(&self, name: &str) -> Result<PathBuf, Error> {
        let path = self.cache.join(name);
        if !path.is_dir() {
            fs_err::create_dir_all(&path).map_err(io_error("create", &path))?;
        }
        Ok(path)
    }
}

/// A folder in the making.
#[derive(Debug)]
pub struct Staging {
    folder: tempfile::TempDir,
    _lock: File,
    lock_path: PathBuf,
}

impl Staging {
    /// The folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Puts the folder in the place of `target`, in one step, whether something is there or not.
    ///
    /// # Errors
    /// When the file system refuses.
    pub fn install(self, target: &Path) -> Result<(), Error> {
        if let Some(parent) = target.parent() {
            fs_err::create_dir_all(parent).map_err(io_error("create", parent))?;
        }
        // No two processes swap at once: each would find the other's work in its own staging folder, which is harmless.
        let swapped = rustix::fs::renameat_with(
            rustix::fs::CWD,
            self.folder.path(),
            rustix::fs::CWD,
            target,
            rustix::fs::RenameFlags::EXCHANGE,
        );
        match swapped {
            Ok(()) => {}
            Err(_) => fs_err::rename(self.folder.path(), target).map_err(io_error("rename to", target))?,
        }
        sync_folder(target)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let _ = fs_err::remove_file(&self.lock_path);
    }
}

/// Name of the lock that everybody has who uses the cache.
const IN_USE: &str = "in-use";

/// Notes that something of a cache is needed now. Only its owner can, and what is not noted is removed earlier and made
/// anew, so a failure is none.
pub fn used(path: &Path) {
    use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, utimensat};
    let at = |nanoseconds| Timespec { tv_sec: 0, tv_nsec: nanoseconds };
    let now = Timestamps { last_access: at(UTIME_OMIT), last_modification: at(UTIME_NOW) };
    let _ = utimensat(CWD, path, &now, AtFlags::SYMLINK_NOFOLLOW);
}

fn is_abandoned(path: &Path) -> bool {
    match File::open(path) {
        Ok(file) => file.try_lock().is_ok(),
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

fn open_lock(path: &Path) -> Result<File, Error> {
    File::options().create(true).truncate(false).write(true).open(path).map_err(io_error("open", path))
}

fn sync_folder(path: &Path) -> Result<(), Error> {
    let folder = path.parent().unwrap_or(path);
    File::open(folder).and_then(|file| file.sync_all()).map_err(io_error("flush", folder))
}

/// Writes a file beside `path`, flushes it and renames it.
///
/// # Errors
/// When the file system refuses.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs_err::create_dir_all(folder).map_err(io_error("create", folder))?;
    let mut file = tempfile::Builder::new()
        .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644))
        .tempfile_in(folder)
        .map_err(io_error("create a file in", folder))?;
    file.write_all(bytes).and_then(|()| file.as_file().sync_all()).map_err(io_error("write", path))?;
    file.persist(path).map_err(|error| io_error("rename to", path)(error.error))?;
    sync_folder(path)
}

/// The digest and size of everything in `reader`.
///
/// # Errors
/// When it cannot be read.
pub fn digest_of(reader: impl Read) -> io::Result<(Digest, u64)> {
    let mut reader = BufReader::with_capacity(1 << 18, reader);
    let mut hasher = Sha256::new();
    let mut size = 0;
    loop {
        let bytes = io::BufRead::fill_buf(&mut reader)?;
        if bytes.is_empty() {
            return Ok((Digest::from_bytes(hasher.finalize().into()), size));
        }
        hasher.update(bytes);
        let read = bytes.len();
        size += read as u64;
        io::BufRead::consume(&mut reader, read);
    }
}
