//! The start files and static libraries that a cargo input is linked with: the C library and the compiler's runtime.
//!
//! They come from the locked packages. Where those cannot be had, the host's own are as good if they are the same
//! bytes; other bytes make another image, and are refused unless the caller allows them.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::Command;

use fs_err::File;
use trainyard_spec::Digest;

use crate::store::digest_of;

/// What is linked into every static binary. In newer C libraries libutil, librt, libpthread and libdl are empty, but
/// the standard library still names them.
pub(crate) const NEEDED: [&str; 13] = [
    "crtbeginS.o",
    "crtendS.o",
    "crti.o",
    "crtn.o",
    "libc.a",
    "libdl.a",
    "libgcc.a",
    "libgcc_eh.a",
    "libm.a",
    "libpthread.a",
    "librt.a",
    "libutil.a",
    "rcrt1.o",
];

/// Files to link, by the names that [`NEEDED`] gives them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Linked {
    files: BTreeMap<&'static str, PathBuf>,
    digests: BTreeMap<&'static str, Digest>,
    /// How the files differ from the locked ones; none where they are the same bytes.
    pub(crate) differs: Option<String>,
}

/// Why there is nothing to link.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The locked packages lack a file.
    #[error("the locked packages hold no {name}")]
    Incomplete {
        /// The file.
        name: &'static str,
    },
    /// The host has no such file.
    #[error("this host has no {name}: `cc -print-file-name={name}` {answer}")]
    Absent {
        /// The file.
        name: &'static str,
        /// What the compiler said.
        answer: String,
    },
    /// A file could not be read.
    #[error("cannot read {path}: {source}", path = .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The host's files are not the locked ones.
    #[error("this host's static libraries are not the locked ones: {differences}")]
    Differs {
        /// Each file that differs, with both digests.
        differences: String,
    },
}

impl Error {
    /// The way out.
    pub const fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Incomplete { .. } => {
                Some("name the packages of the C library and of the compiler's runtime in `link`")
            }
            Self::Absent { .. } => Some(
                "install a C compiler and the static C library (libc6-dev on Debian, glibc-static on Fedora and RHEL)",
            ),
            Self::Differs { .. } => {
                Some("configure apt, or give the address of a Debian archive, to link the locked packages")
            }
            Self::Read { .. } => None,
        }
    }
}

impl Linked {
    /// The files in unpacked packages.
    pub(crate) fn from_packages(folders: &[PathBuf]) -> Result<Self, Error> {
        let mut found = BTreeMap::new();
        for folder in folders {
            for entry in walkdir::WalkDir::new(folder) {
                let entry =
                    entry.map_err(|error| Error::Read { path: folder.clone(), source: error.into() })?;
                found.insert(entry.file_name().to_owned(), entry.into_path());
            }
        }
        Self::choose(|name| {
            let path = found.get(std::ffi::OsStr::new(name)).cloned();
            path.ok_or(Error::Incomplete { name })
        })
    }

    /// The host's own files, as its C compiler finds them.
    pub(crate) fn from_host(
        locked: &BTreeMap<String, Digest>,
        tools: &BTreeMap<OsString, OsString>,
    ) -> Result<Self, Error> {
        let mut linked = Self::choose(|name| host_file(name, tools))?;
        let mut differences = Vec::new();
        for (name, path) in &linked.files {
            let found = linked.digests[name];
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let wanted = locked.iter().find(|(locked, _)| locked.rsplit('/').next() == Some(&name));
            match wanted {
                Some((_, wanted)) if *wanted == found => {}
                Some((_, wanted)) => {
                    differences.push(format!("{} is {found}, locked is {wanted}", path.display()))
                }
                None => differences.push(format!("{} is not in the lock", path.display())),
            }
        }
        linked.differs = (!differences.is_empty()).then(|| differences.join("; "));
        Ok(linked)
    }

    fn choose(mut find: impl FnMut(&'static str) -> Result<PathBuf, Error>) -> Result<Self, Error> {
        let mut files = BTreeMap::new();
        let mut digests = BTreeMap::new();
        for name in NEEDED {
            let mut path = find(name)?;
            if name == "libm.a"
                && let Some(real) = behind_script(&path)?
            {
                path = real;
            }
            let read = |source| Error::Read { path: path.clone(), source };
            let (digest, _) = digest_of(File::open(&path).map_err(read)?).map_err(read)?;
            digests.insert(name, digest);
            files.insert(name, path);
        }
        Ok(Self { files, digests, differs: None })
    }

    /// The digest of all files together.
    pub(crate) fn digest(&self) -> Digest {
        let all: Vec<String> =
            self.digests.iter().map(|(name, digest)| format!("{name} {digest}\n")).collect();
        Digest::of(all.concat().as_bytes())
    }

    /// Names and paths.
    pub(crate) fn files(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        self.files.iter().map(|(name, path)| (*name, path.as_path()))
    }
}

/// On x86-64, libm.a is a linker script that names the real archive, `libm-VERSION.a`, beside it by an absolute path.
fn behind_script(path: &Path) -> Result<Option<PathBuf>, Error> {
    let read = |source| Error::Read { path: path.to_owned(), source };
    let mut start = Vec::new();
    File::open(path).map_err(read)?.take(4096).read_to_end(&mut start).map_err(read)?;
    if start.starts_with(b"!<arch>") {
        return Ok(None);
    }
    let text = String::from_utf8_lossy(&start);
    let real = text
        .split(|c: char| c.is_whitespace() || c == '(' || c == ')')
        .filter_map(|word| word.rsplit('/').next())
        .find(|name| name.starts_with("libm-") && name.ends_with(".a"))
        .map(|name| path.with_file_name(name));
    real.map_or(Err(Error::Incomplete { name: "libm.a" }), |real| Ok(Some(real)))
}

fn host_file(name: &'static str, tools: &BTreeMap<OsString, OsString>) -> Result<PathBuf, Error> {
    let absent = |answer: String| Error::Absent { name, answer };
    let output = Command::new("cc")
        .arg(format!("-print-file-name={name}"))
        .env_clear()
        .envs(tools)
        .output()
        .map_err(|error| absent(format!("cannot be run: {error}")))?;
    let path = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    // A compiler that does not find the file answers with the bare name.
    if path.is_absolute() && path.is_file() {
        Ok(path)
    } else {
        Err(absent(format!("says {:?}", path.display())))
    }
}
