//! The image manifest: one small TOML file that says what an image holds.

use std::collections::{BTreeMap, BTreeSet};
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
    /// How layers are compressed.
    #[serde(default)]
    #[toml(default)]
    pub compression: Compression,
    /// GPU architectures, such as `sm_90`, that code is kept for in libraries whose licence allows changing them; all where
    /// none is named.
    #[serde(default)]
    #[toml(default)]
    pub gpus: Vec<Gpu>,
    /// Whether the image never leaves this organisation, so that libraries may be changed whose licence forbids to hand on
    /// changed ones. Such an image is not pushed.
    #[serde(default)]
    #[toml(default)]
    pub local_only: bool,
    /// Where the driver's own libraries come from.
    #[serde(default)]
    #[toml(default)]
    pub driver: DriverMode,
    /// Keeps only what is needed, where it is given.
    pub closure: Option<Closure>,
    /// How a container starts.
    pub config: Config,
}

/// How layers are compressed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Toml)]
#[serde(rename_all = "kebab-case")]
#[toml(Toml, rename_all = "kebab-case")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Compression {
    /// Read by every tool.
    #[default]
    Gzip,
    /// Smaller and faster; needs tools of 2020 or later.
    Zstd,
}

/// Where the libraries of the NVIDIA driver, such as `libcuda.so.1`, come from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Toml)]
#[serde(rename_all = "kebab-case")]
#[toml(Toml, rename_all = "kebab-case")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum DriverMode {
    /// From the host, when a container starts (CDI). An image with libraries of a driver is refused.
    #[default]
    Cdi,
    /// From the host, or from a newer `libcuda.so` in the image where the host's driver is too old: the package
    /// `cuda-compat` of one of the inputs. Only for data-center GPUs, and only with `local-only`.
    Compat,
}

/// What stays in an image of which only what is needed is kept: the files of cargo and files inputs, the shared objects
/// that these and [`Closure::dlopen`] need, and [`Closure::keep`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, Toml)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[toml(Toml, rename_all = "kebab-case", recoverable)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Closure {
    /// Shared objects that programs load by themselves, by soname.
    #[serde(default)]
    #[toml(default)]
    pub dlopen: Vec<String>,
    /// Patterns of absolute paths; `**` crosses a slash.
    #[serde(default)]
    #[toml(default)]
    pub keep: Vec<String>,
}

/// A GPU architecture, `sm_90` or `sm_90a`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Gpu {
    /// Compute capability times ten: 90 for 9.0.
    pub capability: u16,
    /// Whether it is the variant whose code runs on this capability alone.
    pub specific: bool,
}

/// Text that is not a [`Gpu`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{found:?} is not a GPU architecture; one is written like \"sm_90\" or \"sm_90a\"")]
pub struct GpuError {
    found: String,
}

impl FromStr for Gpu {
    type Err = GpuError;

    fn from_str(text: &str) -> Result<Self, GpuError> {
        let wrong = || GpuError { found: text.to_owned() };
        let digits = text.strip_prefix("sm_").ok_or_else(wrong)?;
        let (digits, specific) = digits.strip_suffix('a').map_or((digits, false), |digits| (digits, true));
        if !(2..=3).contains(&digits.len()) || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(wrong());
        }
        Ok(Self { capability: digits.parse().map_err(|_| wrong())?, specific })
    }
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}", self.capability, if self.specific { "a" } else { "" })
    }
}

crate::toml::string_type!(Gpu, "^sm_[0-9]{2,3}a?$");

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
        let linked: BTreeSet<_> = self.input.values().flat_map(Input::needs).collect();
        if self.input.keys().all(|name| linked.contains(name)) {
            faults.at("input", "an image needs at least one input that is in it", None);
        }
        for (name, input) in &self.input {
            if matches!(input, Input::Python { .. }) {
                let message = format!("input {name}: python packages are for corpora; an image takes none");
                faults.at(&format!("input.{name}.kind"), message, None);
            }
            if let Some(into) = input.into().filter(|into| !is_clean_absolute(into)) {
                let message = format!("input {name}: {into:?} is not an absolute path");
                let hint = Some("write it like \"/usr/bin\", without . or ..");
                faults.at(&format!("input.{name}.into"), message, hint);
            }
        }
        let mut bases = self.input.iter().filter(|(_, input)| matches!(input, Input::Oci { .. }));
        if let (Some((first, _)), second) = (bases.next(), bases.next()) {
            if let Some((second, _)) = second {
                let message = format!("inputs {first} and {second} are base images; an image has one");
                faults.at(&format!("input.{second}.kind"), message, None);
            }
            if self.closure.is_some() {
                let message = "a base image stays whole, so that nothing of it can be left out";
                faults.at(
                    "closure",
                    message,
                    Some("take packages instead of the base image, or leave closure out"),
                );
            }
            if self.input.len() == 1 {
                faults.at(
                    "input",
                    "a base image alone is no new image",
                    Some("add an input with programs or files"),
                );
            }
        }
        if self.driver == DriverMode::Compat && !self.local_only {
            let message = "driver \"compat\" puts libraries of NVIDIA's driver into the image, which may not be handed on";
            faults.at("driver", message, Some("add local-only = true"));
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
