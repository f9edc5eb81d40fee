//! Everything a build takes from its surroundings, resolved once by the caller.
//!
//! [`Settings::from_environment`] is the only place of this crate that reads the environment and the machine's
//! configuration files. Nothing here contacts a server.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::http::Network;
use crate::index::{self, IndexSettings};
use crate::registry::CredentialSettings;

/// Settings of one run.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Folder of the store, of cargo's target folder and of the images.
    pub cache: PathBuf,
    /// Use what the store holds and contact no server.
    pub offline: bool,
    /// Where packages come from.
    pub index: IndexSettings,
    /// How servers are reached.
    pub network: Network,
    /// Where credentials for registries are kept.
    pub credentials: CredentialSettings,
    /// Whose static C library a cargo input is linked with.
    pub link: LinkFrom,
    /// The whole environment of programs that are run: cargo, rustc, cc, pip.
    pub tools: BTreeMap<OsString, OsString>,
}

/// Whose static C library a cargo input is linked with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkFrom {
    /// The locked packages', or the host's own where its files are the same bytes. Anything else is refused.
    Locked,
    /// As [`LinkFrom::Locked`], and else the host's, in an image that says that it is not reproducible.
    HostAllowed,
}

/// Variables that programs may see: where tools are, how servers are reached, and nothing that changes a binary.
const PASSED_ON: [&str; 21] = [
    "PATH",
    "HOME",
    "CARGO_HOME",
    "RUSTUP_HOME",
    "RUSTUP_TOOLCHAIN",
    "RUSTUP_DIST_SERVER",
    "RUSTUP_AUTO_INSTALL",
    "CARGO_NET_OFFLINE",
    "CARGO_NET_GIT_FETCH_WITH_CLI",
    "CARGO_HTTP_CAINFO",
    "CARGO_HTTP_PROXY",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "no_proxy",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
];

impl Settings {
    /// Settings from this process's environment and this machine's pip and apt configuration.
    ///
    /// # Errors
    /// When a configuration file that exists cannot be read or makes no sense.
    pub fn from_environment(cache: PathBuf) -> Result<Self, index::Error> {
        let environment: BTreeMap<OsString, OsString> = std::env::vars_os().collect();
        Ok(Self {
            cache,
            offline: false,
            index: IndexSettings::resolve(&environment, Path::new("/"))?,
            network: Network::from_environment(&environment),
            credentials: CredentialSettings::from_environment(&environment),
            link: LinkFrom::Locked,
            tools: PASSED_ON
                .iter()
                .filter_map(|name| environment.get_key_value(&OsString::from(name)))
                .map(|(name, value)| (name.clone(), value.clone()))
                .collect(),
        })
    }
}
