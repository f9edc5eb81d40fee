//! Where Trainyard keeps its files on this machine, resolved once from the environment.

use std::env;
use std::path::PathBuf;

use trainyard_spec::env as names;

/// Folders for state. Neither has to exist yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Settings {
    /// What can be made again: fetched inputs, built images, token shards.
    pub(crate) cache: PathBuf,
    /// Jobs: checkpoints, logs, metrics.
    pub(crate) jobs: PathBuf,
}

/// The password of an encrypted signing key, where the environment has one.
pub(crate) fn key_password() -> Option<Vec<u8>> {
    use std::os::unix::ffi::OsStringExt as _;
    env::var_os(names::COSIGN_PASSWORD).map(std::ffi::OsString::into_vec)
}

/// No folder to keep files in.
#[derive(Debug, thiserror::Error)]
#[error(
    "there is no home folder to keep images and jobs in: HOME is unset and this user has no entry in the password file"
)]
pub(crate) struct NoHome;

impl Settings {
    /// Reads the environment.
    pub(crate) fn from_environment() -> Result<Self, NoHome> {
        let folder = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        if let Some(home) = env::var_os(names::HOME).filter(|value| !value.is_empty()).map(PathBuf::from) {
            let home = std::path::absolute(home).map_err(|_| NoHome)?;
            return Ok(Self { cache: home.join("cache"), jobs: home.join("jobs") });
        }
        // Falls back to the password file where HOME is unset.
        let home = || env::home_dir().filter(|path| path.is_absolute()).ok_or(NoHome);
        let cache = match folder("XDG_CACHE_HOME") {
            Some(folder) => folder,
            None => home()?.join(".cache"),
        };
        let state = match folder("XDG_STATE_HOME") {
            Some(folder) => folder,
            None => home()?.join(".local/state"),
        };
        Ok(Self { cache: cache.join("trainyard"), jobs: state.join("trainyard/jobs") })
    }
}
