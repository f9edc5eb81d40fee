//! pip's configuration: which indexes it would ask.
//!
//! Follows pip: a command's section over `[global]`, within each the more specific file over the less specific one, and
//! variables over files. Left out: `trusted-host`, which would let anybody answer in a server's place.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

use ini::{Ini, ParseOption};
use url::Url;

use super::Error;
use crate::http::Endpoint;

/// Where pip would look for packages.
#[derive(Debug, Clone, Default)]
pub struct PythonIndexes {
    /// Indexes in the order in which they are asked. Empty to ask pip for its default.
    pub indexes: Vec<Endpoint>,
    /// Folders and pages that list files, asked first.
    pub find_links: Vec<FindLinks>,
    /// Ask `find_links` alone.
    pub no_index: bool,
    /// Further indexes, asked after the default where `indexes` is empty.
    pub extra: Vec<Endpoint>,
}

/// A place that lists files of any package.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FindLinks {
    /// A folder with files.
    Folder(PathBuf),
    /// A page with links.
    Page(Endpoint),
}

impl PythonIndexes {
    pub(super) fn resolve(environment: &BTreeMap<OsString, OsString>, root: &Path) -> Result<Self, Error> {
        let configured = Configured::read(environment, root)?;
        let endpoint = |value: &Value| {
            let url = Url::parse(&value.text).map_err(|error| Error::Configuration {
                place: value.place.clone(),
                message: format!("an index's address cannot be read: {error}"),
            })?;
            Ok(Endpoint::new(url).folder())
        };
        let list = |key| configured.list(key).into_iter();
        Ok(Self {
            indexes: configured.one("index-url").iter().map(endpoint).collect::<Result<_, Error>>()?,
            extra: list("extra-index-url").map(|value| endpoint(&value)).collect::<Result<_, Error>>()?,
            find_links: list("find-links")
                .map(|value| match Url::parse(&value.text) {
                    Ok(url) if url.scheme() == "file" => {
                        FindLinks::Folder(url.to_file_path().unwrap_or_default())
                    }
                    Ok(url) => FindLinks::Page(Endpoint::new(url)),
                    Err(_) => FindLinks::Folder(PathBuf::from(value.text)),
                })
                .collect(),
            no_index: configured.one("no-index").is_some_and(|value| {
                matches!(value.text.to_lowercase().as_str(), "1" | "true" | "t" | "yes" | "y" | "on")
            }),
        })
    }

    /// All indexes to ask, with pip's own default where none is configured.
    ///
    /// # Errors
    /// [`Error::NoPythonIndex`] where nothing is configured and pip cannot be asked.
    pub(crate) fn to_ask(&self, tools: &BTreeMap<OsString, OsString>) -> Result<Vec<Endpoint>, Error> {
        if self.no_index && self.find_links.is_empty() {
            let asked = "pip's configuration says no-index, and names no find-links".to_owned();
            return Err(Error::NoPythonIndex { asked });
        }
        if self.no_index {
            return Ok(Vec::new());
        }
        let mut all = if self.indexes.is_empty() {
            match default_of_pip(tools) {
                Ok(index) => vec![index],
                Err(_) if !self.extra.is_empty() => Vec::new(),
                Err(asked) if self.find_links.is_empty() => return Err(Error::NoPythonIndex { asked }),
                Err(_) => Vec::new(),
            }
        } else {
            self.indexes.clone()
        };
        all.extend(self.extra.iter().cloned());
        Ok(all)
    }
}

#[derive(Debug, Clone)]
struct Value {
    text: String,
    place: String,
}

/// What files and variables say, from the least to the most specific.
struct Configured(Vec<(String, Value)>);

impl Configured {
    fn read(environment: &BTreeMap<OsString, OsString>, root: &Path) -> Result<Self, Error> {
        let variable = |name: &str| environment.get(OsStr::new(name)).filter(|value| !value.is_empty());
        let own_file = variable("PIP_CONFIG_FILE").map(PathBuf::from);
        let mut files = Vec::new();
        // pip reads no file at all then.
        let none = own_file.as_deref() == Some(Path::new("/dev/null"));
        if !none {
            for folder in variable("XDG_CONFIG_DIRS")
                .map(|folders| std::env::split_paths(folders).collect())
                .unwrap_or_else(|| vec![root.join("etc/xdg")])
            {
                files.push(folder.join("pip/pip.conf"));
            }
            files.push(root.join("etc/pip.conf"));
            // A file of one's own stands in for the user's.
            let replaced = own_file.as_deref().is_some_and(Path::exists);
            if let Some(home) = variable("HOME").map(PathBuf::from).filter(|_| !replaced) {
                files.push(home.join(".pip/pip.conf"));
                let config = variable("XDG_CONFIG_HOME").map_or_else(|| home.join(".config"), PathBuf::from);
                files.push(config.join("pip/pip.conf"));
            }
            if let Some(venv) = variable("VIRTUAL_ENV") {
                files.push(Path::new(venv).join("pip.conf"));
            }
            files.extend(own_file);
        }
        let mut parsed = Vec::new();
        for path in files {
            let text = match fs_err::read_to_string(&path) {
                Ok(text) => text,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                Err(source) => return Err(Error::Read { path, source }),
            };
            let option = ParseOption {
                enabled_quote: false,
                enabled_escape: false,
                enabled_indented_mutiline_value: true,
                ..ParseOption::default()
            };
            let ini = Ini::load_from_str_opt(&text, option).map_err(|error| Error::Configuration {
                place: path.display().to_string(),
                message: error.to_string(),
            })?;
            parsed.push((path, ini));
        }
        let mut found = Vec::new();
        for section in ["global", "install", "download"] {
            for (path, ini) in &parsed {
                for (key, text) in ini.section(Some(section)).into_iter().flat_map(|all| all.iter()) {
                    let place = format!("{} [{section}] {key}", path.display());
                    let text = text.trim().to_owned();
                    found.push((key.trim().replace('_', "-"), Value { text, place }));
                }
            }
        }
        for key in ["index-url", "extra-index-url", "find-links", "no-index"] {
            let name = format!("PIP_{}", key.replace('-', "_").to_uppercase());
            if let Some(text) = variable(&name) {
                let text = text.to_string_lossy().trim().to_owned();
                found.push((key.to_owned(), Value { text, place: name }));
            }
        }
        Ok(Self(found))
    }

    fn one(&self, key: &str) -> Option<Value> {
        let (_, value) = self.0.iter().rev().find(|(found, _)| found == key)?;
        (!value.text.is_empty()).then(|| value.clone())
    }

    fn list(&self, key: &str) -> Vec<Value> {
        let split = |value: Value| {
            let place = value.place;
            value
                .text
                .split_whitespace()
                .map(|text| Value { text: text.to_owned(), place: place.clone() })
                .collect()
        };
        self.one(key).map(split).unwrap_or_default()
    }
}

/// The default index as pip's own help names it, or how it could not be had.
fn default_of_pip(tools: &BTreeMap<OsString, OsString>) -> Result<Endpoint, String> {
    let mut tried = Vec::new();
    for command in [&["pip"][..], &["pip3"], &["python3", "-m", "pip"]] {
        let output = Command::new(command[0])
            .args(&command[1..])
            .args(["download", "--help"])
            .env_clear()
            .envs(tools)
            .env("COLUMNS", "200")
            .output();
        let text = match output {
            Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).into_owned(),
            Ok(output) => {
                tried.push(format!("`{}` ended with {}", command.join(" "), output.status));
                continue;
            }
            Err(error) => {
                tried.push(format!("`{}`: {error}", command.join(" ")));
                continue;
            }
        };
        match default_in_help(&text) {
            Some(index) => return Ok(index),
            None => tried.push(format!("`{} download --help` names no default", command.join(" "))),
        }
    }
    Err(tried.join("; "))
}

/// The address in `--index-url <url> ... (default ADDRESS)`, however the help is wrapped.
fn default_in_help(help: &str) -> Option<Endpoint> {
    let (_, after) = help.split_once("--index-url <url>")?;
    let words: String = after.split_whitespace().collect::<Vec<_>>().join(" ");
    let (_, default) = words.split_once("(default ")?;
    let (address, _) = default.split_once(')')?;
    Some(Endpoint::new(Url::parse(&address.replace(' ', "")).ok()?).folder())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_default_in_wrapped_help() {
        let help = "  -i, --index-url <url>       Base URL of the Index (default\n         https://index.test/\n   simple). This should\n  --no-index";
        let found = default_in_help(help).map(|endpoint| endpoint.to_string());
        assert_eq!(found.as_deref(), Some("https://index.test/simple/"));
        assert_eq!(default_in_help("--no-index Ignore it (default never)"), None);
    }
}
