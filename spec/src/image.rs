//! The image manifest: one small TOML file that says what an image holds.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use toml_spanner::Toml;

use crate::input::Input;
use crate::toml::{Collector, Validate};
use crate::{ByteSize, FormatVersion, Name};

/// An image manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Toml)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[toml(Toml, rename_all = "kebab-case", recoverable)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ImageManifest {
    /// Format version.
    pub version: FormatVersion<1>,
    /// Name of the image.
    pub name: Name,
    /// Platform that the image runs on.
    pub platform: Platform,
    /// Budget for the compressed layers; a larger image fails the build.
    pub max_size: Option<ByteSize>,
    /// Inputs by name.
    pub input: BTreeMap<Name, Input>,
    /// Layers from the one that changes least to the one that changes most.
    pub layer: Vec<Layer>,
    /// How a container starts.
    pub config: Config,
}

/// One layer of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Toml)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[toml(Toml, rename_all = "kebab-case", recoverable)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Layer {
    /// Name, shown by `inspect`.
    pub name: Name,
    /// The input that the layer holds.
    pub input: Name,
    /// Absolute folder in the image.
    pub into: String,
}

/// The runtime part of an OCI image configuration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Toml)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[toml(Toml, rename_all = "kebab-case", recoverable)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Config {
    /// Program and first arguments.
    pub entrypoint: Vec<String>,
    /// `uid:gid`, numeric. Root is refused.
    pub user: String,
    /// Absolute working directory.
    #[serde(default = "root")]
    #[toml(default = root())]
    pub working_dir: String,
    /// Environment variables.
    #[serde(default)]
    #[toml(default)]
    pub env: BTreeMap<String, String>,
    /// Labels.
    #[serde(default)]
    #[toml(default)]
    pub labels: BTreeMap<String, String>,
}

fn root() -> String {
    "/".to_owned()
}

/// An OCI platform. Only Linux images exist here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Platform {
    /// `linux/amd64`.
    Amd64,
    /// `linux/arm64`.
    Arm64,
}

/// Text that is not a [`Platform`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{found:?} is not a platform; known are \"linux/amd64\" and \"linux/arm64\"")]
pub struct PlatformError {
    found: String,
}

impl Platform {
    /// The architecture as OCI and Debian name it.
    pub const fn architecture(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }
}

impl FromStr for Platform {
    type Err = PlatformError;

    fn from_str(text: &str) -> Result<Self, PlatformError> {
        match text {
            "linux/amd64" => Ok(Self::Amd64),
            "linux/arm64" => Ok(Self::Arm64),
            _ => Err(PlatformError { found: text.to_owned() }),
        }
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "linux/{}", self.architecture())
    }
}

crate::toml::string_type!(Platform, "^linux/(amd64|arm64)$");

impl Validate for ImageManifest {
    fn validate(&self, faults: &mut Collector<'_, '_>) {
        check_needs(&self.input, faults);
        if self.layer.is_empty() {
            faults.at("layer", "an image needs at least one layer", None);
        }
        for layer in &self.layer {
            if !matches!(self.input.get(&layer.input), Some(Input::Cargo { .. })) {
                let (name, input) = (&layer.name, &layer.input);
                let message =
                    format!("layer {name} holds {input}, which is not a cargo input of this manifest");
                faults.at("layer", message, None);
            }
            if !is_clean_absolute(&layer.into) {
                let message = format!("layer {}: {:?} is not an absolute path", layer.name, layer.into);
                faults.at("layer", message, Some("write it like \"/usr/bin\", without . or .."));
            }
        }
        if self.config.entrypoint.is_empty() {
            faults.at("config.entrypoint", "the entrypoint is empty", None);
        }
        let ids: Vec<_> = self.config.user.split(':').map(str::parse::<u32>).collect();
        if !matches!(ids.as_slice(), [Ok(uid), Ok(_)] if *uid != 0) {
            let message = format!("user {:?} is not a numeric uid:gid other than root", self.config.user);
            faults.at("config.user", message, Some("use \"65532:65532\""));
        }
        if !is_clean_absolute(&self.config.working_dir) {
            faults.at("config.working-dir", "the working directory is not an absolute path", None);
        }
        for key in self.config.env.keys().filter(|key| key.is_empty() || key.contains(['=', '\0'])) {
            faults.at("config.env", format!("{key:?} is not the name of an environment variable"), None);
        }
    }
}

/// Reports inputs that need another input which is missing or of the wrong kind.
pub(crate) fn check_needs(inputs: &BTreeMap<Name, Input>, faults: &mut Collector<'_, '_>) {
    for (name, input) in inputs {
        for needed in input.needs() {
            if !matches!(inputs.get(needed), Some(Input::Deb { .. })) {
                let message =
                    format!("input {name} links {needed}, which is not a deb input of this manifest");
                faults.at(&format!("input.{name}.link"), message, None);
            }
        }
    }
}

fn is_clean_absolute(path: &str) -> bool {
    path.starts_with('/')
        && !path.contains('\0')
        && (path == "/" || path[1..].split('/').all(|part| !matches!(part, "" | "." | "..")))
}
