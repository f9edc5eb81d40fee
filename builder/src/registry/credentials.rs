//! Credentials for registries, from the files that `podman login`, `skopeo login` and `docker login` write
//! (containers-auth.json(5)), and from the programs that these files name.
//!
//! Nothing is written here, and no secret is ever shown: errors name files, keys and programs alone.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io::{self, Read};
use std::path::PathBuf;
use std::time::Duration;

use base64::Engine as _;
use fs_err::File;
use serde::Deserialize;

use super::helper;

/// Most bytes of an authentication file.
const LARGEST_FILE: u64 = 1 << 20;

/// Where credentials are kept.
#[derive(Clone)]
pub struct CredentialSettings {
    /// Files in the order in which they are asked; the first that has something for a registry is used.
    pub files: Vec<PathBuf>,
    /// Whether a missing file is an error: it was named by the user.
    pub named: bool,
    /// The environment of credential helpers, in whose `PATH` they are found. They may need all of it.
    pub environment: BTreeMap<OsString, OsString>,
    /// How long a helper may take. It may be waiting for somebody to unlock a key.
    pub patience: Duration,
}

impl Default for CredentialSettings {
    fn default() -> Self {
        Self {
            files: Vec::new(),
            named: false,
            environment: BTreeMap::new(),
            patience: Duration::from_secs(60),
        }
    }
}

impl fmt::Debug for CredentialSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The environment may hold secrets.
        f.debug_struct("CredentialSettings").field("files", &self.files).finish_non_exhaustive()
    }
}

impl CredentialSettings {
    /// The files that the tools of this machine use.
    pub(crate) fn from_environment(environment: &BTreeMap<OsString, OsString>) -> Self {
        let variable = |name: &str| environment.get(OsStr::new(name)).filter(|value| !value.is_empty());
        let folder = |name: &str| variable(name).map(PathBuf::from);
        let home = |name: &str| folder("HOME").map(|home| home.join(name));
        let named = folder("REGISTRY_AUTH_FILE");
        let usual = [
            Some(folder("XDG_RUNTIME_DIR").map_or_else(
                || PathBuf::from(format!("/run/containers/{}/auth.json", rustix::process::getuid().as_raw())),
                |folder| folder.join("containers/auth.json"),
            )),
            folder("XDG_CONFIG_HOME").or_else(|| home(".config")).map(|at| at.join("containers/auth.json")),
            folder("DOCKER_CONFIG").or_else(|| home(".docker")).map(|at| at.join("config.json")),
        ];
        Self {
            named: named.is_some(),
            files: named.map_or_else(|| usual.into_iter().flatten().collect(), |file| vec![file]),
            environment: environment.clone(),
            ..Self::default()
        }
    }
}

/// What a registry is shown.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Credential {
    /// A user's password, or what stands in for one.
    Password { user: String, password: String },
    /// A refresh token, to be exchanged for others.
    Identity(String),
    /// A token that is shown as it is.
    Bearer(String),
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Password { .. } => "Password",
            Self::Identity(_) => "Identity",
            Self::Bearer(_) => "Bearer",
        })
    }
}

/// Why credentials could not be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read.
    #[error("cannot read the authentication file {path}: {source}", path = .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file is too large, or not JSON of the right form. What is in it is not shown.
    #[error("{path} is not an authentication file that can be read: {message}", path = .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What was found and needed.
        message: String,
    },
    /// A helper could not be started.
    #[error("cannot run the credential helper {program:?} that {path} names: {source}", path = .path.display())]
    Start {
        /// The program.
        program: String,
        /// The file that names it.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A helper gave nothing that can be used.
    #[error("the credential helper {program:?} {message} when asked for {host}")]
    Helper {
        /// The program.
        program: String,
        /// The registry.
        host: String,
        /// What it did.
        message: String,
    },
}

impl Error {
    /// The way out.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Read { path, .. } | Self::File { path, .. } => {
                Some(format!("repair {}, or set REGISTRY_AUTH_FILE to another file", path.display()))
            }
            Self::Start { program, path, .. } => {
                Some(format!("install {program}, or take it out of {}", path.display()))
            }
            Self::Helper { program, host, .. } => {
                Some(format!("see what it says to: echo {host} | {program} get"))
            }
        }
    }
}

/// A file. Keys that other tools keep there are left alone.
#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase")]
struct AuthFile {
    #[serde(default)]
    auths: BTreeMap<String, Entry>,
    #[serde(default)]
    cred_helpers: BTreeMap<String, String>,
    #[serde(default)]
    creds_store: String,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Entry {
    auth: String,
    username: String,
    password: String,
    identitytoken: String,
    registrytoken: String,
}

/// The credential for a repository: what the first file says that says anything.
///
/// # Errors
/// When a file cannot be read, or a helper that it names fails.
pub(crate) fn find(
    settings: &CredentialSettings,
    host: &str,
    repository: &str,
) -> Result<Option<Credential>, Error> {
    for path in &settings.files {
        let Some(file) = read(path, settings.named)? else { continue };
        let ask = |program: &str| helper::ask(program, host, path, settings);
        if let Some(program) = file.cred_helpers.get(host).filter(|program| !program.is_empty())
            && let Some(credential) = ask(program)?
        {
            return Ok(Some(credential));
        }
        if let Some((key, entry)) = entry(&file.auths, host, repository)
            && let Some(credential) = entry.credential().map_err(|message| Error::File {
                path: path.clone(),
                message: format!("the entry {key:?} {message}"),
            })?
        {
            return Ok(Some(credential));
        }
        if !file.creds_store.is_empty()
            && let Some(credential) = ask(&file.creds_store)?
        {
            return Ok(Some(credential));
        }
    }
    Ok(None)
}

fn read(path: &PathBuf, needed: bool) -> Result<Option<AuthFile>, Error> {
    let failed = |source| Error::Read { path: path.clone(), source };
    let wrong = |message| Error::File { path: path.clone(), message };
    let mut bytes = Vec::new();
    match File::open(path) {
        Err(error)
            if !needed && matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
        {
            return Ok(None);
        }
        file => file.and_then(|file| file.take(LARGEST_FILE + 1).read_to_end(&mut bytes)).map_err(failed)?,
    };
    if bytes.len() as u64 > LARGEST_FILE {
        return Err(wrong(format!("it has more than {LARGEST_FILE} bytes")));
    }
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Ok(None);
    }
    // What serde_json says about a value of the wrong type may hold the value.
    let file = serde_json::from_slice(&bytes).map_err(|error| {
        let what = if error.is_data() { "is of another form than needed" } else { "is not JSON" };
        wrong(format!("line {} column {} {what}", error.line(), error.column()))
    })?;
    Ok(Some(file))
}

/// The entry for a repository, from the most specific namespace to the host.
fn entry<'a>(
    auths: &'a BTreeMap<String, Entry>,
    host: &str,
    repository: &str,
) -> Option<(String, &'a Entry)> {
    let mut key = format!("{host}/{repository}");
    loop {
        if let Some(entry) = auths.get(&key) {
            return Some((key, entry));
        }
        key.truncate(key.rfind('/')?);
        if key == host {
            break;
        }
    }
    // docker writes addresses as keys.
    let plain = |key: &str| {
        let bare = key.strip_prefix("https://").or_else(|| key.strip_prefix("http://"));
        bare.map_or_else(|| key.to_owned(), |bare| bare.split('/').next().unwrap_or_default().to_owned())
    };
    auths
        .get_key_value(host)
        .or_else(|| auths.iter().find(|(key, _)| plain(key) == host))
        .map(|(key, entry)| (key.clone(), entry))
}

impl Entry {
    /// What the entry holds; nothing where a helper keeps it. The error ends "the entry …".
    fn credential(&self) -> Result<Option<Credential>, String> {
        if !self.registrytoken.is_empty() {
            return Ok(Some(Credential::Bearer(self.registrytoken.clone())));
        }
        if !self.identitytoken.is_empty() {
            return Ok(Some(Credential::Identity(self.identitytoken.clone())));
        }
        if self.auth.is_empty() {
            let (user, password) = (self.username.clone(), self.password.clone());
            return Ok((!user.is_empty()).then_some(Credential::Password { user, password }));
        }
        let decoded = base64::engine::general_purpose::STANDARD
            .decode(self.auth.trim())
            .ok()
            .and_then(|bytes| String::from_utf8(bytes).ok())
            .ok_or("has an auth that is not base64 of text")?;
        let (user, password) =
            decoded.split_once(':').ok_or("has an auth that is not base64 of user:password")?;
        // docker pads what it writes.
        let password = password.trim_end_matches('\0');
        Ok(Some(Credential::Password { user: user.to_owned(), password: password.to_owned() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn password(user: &str) -> Option<Credential> {
        Some(Credential::Password { user: user.to_owned(), password: "secret".to_owned() })
    }

    fn auth(user: &str) -> String {
        base64::engine::general_purpose::STANDARD.encode(format!("{user}:secret"))
    }

    fn settings(files: &[&str]) -> (tempfile::TempDir, CredentialSettings) {
        let folder = tempfile::tempdir().unwrap();
        let files = files.iter().enumerate().map(|(index, text)| {
            let path = folder.path().join(format!("{index}.json"));
            std::fs::write(&path, text).unwrap();
            path
        });
        let settings = CredentialSettings { files: files.collect(), ..CredentialSettings::default() };
        (folder, settings)
    }

    #[test]
    fn the_most_specific_entry_of_the_first_file_is_used() {
        let (a, b, c, d, e) = (auth("host"), auth("team"), auth("image"), auth("url"), auth("second"));
        let first = format!(
            r#"{{"auths": {{"h.x": {{"auth": "{a}"}}, "h.x/team": {{"auth": "{b}", "email": "x"}},
                "h.x/team/a": {{"auth": "{c}"}}, "https://url.x/v1/": {{"auth": "{d}"}}, "empty.x": {{}},
                "plain.x:5": {{"username": "plain", "password": "secret"}},
                "identity.x": {{"identitytoken": "token", "auth": "{a}"}}}}, "currentContext": "other"}}"#
        );
        let second = format!(r#"{{"auths": {{"h.x": {{"auth": "{e}"}}, "empty.x": {{"auth": "{e}"}}}}}}"#);
        let (_folder, settings) = settings(&[&first, "", &second]);
        for (host, repository, expected) in [
            ("h.x", "other", password("host")),
            ("h.x", "team/b/c", password("team")),
            ("h.x", "team/a", password("image")),
            ("h.x", "team/a/deeper", password("image")),
            ("h.x", "teamwork", password("host")),
            ("url.x", "a", password("url")),
            ("plain.x:5", "a", password("plain")),
            ("plain.x", "a", None),
            ("empty.x", "a", password("second")),
            ("identity.x", "a", Some(Credential::Identity("token".to_owned()))),
            ("none.x", "a", None),
        ] {
            assert_eq!(find(&settings, host, repository).unwrap(), expected, "{host}/{repository}");
        }
    }

    #[test]
    fn wrong_files_are_named_and_what_is_in_them_is_not() {
        let secret = "hunter2";
        for (text, said) in [
            (r#"{"auths": {"h.x": {"auth": "hunter2"#, "line 1 column 35 is not JSON"),
            (r#"{"auths": {"h.x": "hunter2"}}"#, "another form"),
            (r#"{"auths": {"h.x": {"auth": "hunter2!"}}}"#, "\"h.x\" has an auth that is not base64"),
            (r#"{"auths": {"h.x": {"auth": "aHVudGVyMg=="}}}"#, "user:password"),
            ("not JSON: hunter2", "line 1 column 2 is not JSON"),
        ] {
            let (folder, settings) = settings(&[text]);
            let error = find(&settings, "h.x", "a").unwrap_err();
            let shown = format!("{error} {error:?} {}", error.hint().unwrap());
            assert!(shown.contains(said), "{shown}");
            assert!(shown.contains(folder.path().to_str().unwrap()), "{shown}");
            assert!(!shown.contains(secret), "{shown}");
        }
    }

    #[test]
    fn files_are_where_podman_and_docker_keep_them() {
        let paths = |variables: &[(&str, &str)]| {
            let environment =
                variables.iter().map(|(name, value)| (OsString::from(name), OsString::from(value)));
            let settings = CredentialSettings::from_environment(&environment.collect());
            settings.files.iter().map(|path| path.display().to_string()).collect::<Vec<_>>()
        };
        let run = format!("/run/containers/{}/auth.json", rustix::process::getuid().as_raw());
        assert_eq!(
            paths(&[("HOME", "/h")]),
            [&run, "/h/.config/containers/auth.json", "/h/.docker/config.json"]
        );
        assert_eq!(
            paths(&[("XDG_RUNTIME_DIR", "/r"), ("XDG_CONFIG_HOME", "/c"), ("DOCKER_CONFIG", "/d")]),
            ["/r/containers/auth.json", "/c/containers/auth.json", "/d/config.json"]
        );
        assert_eq!(paths(&[("HOME", "/h"), ("REGISTRY_AUTH_FILE", "/f")]), ["/f"]);

        let settings = CredentialSettings {
            files: vec![PathBuf::from("/nonexistent/auth.json")],
            named: true,
            ..CredentialSettings::default()
        };
        assert!(matches!(find(&settings, "h.x", "a"), Err(Error::Read { .. })));
        assert!(find(&CredentialSettings { named: false, ..settings }, "h.x", "a").unwrap().is_none());
    }
}
