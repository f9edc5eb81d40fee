//! What an image asks of the host that runs it, as labels say it, and whether a host meets it.
//!
//! | label | what it says | example |
//! |---|---|---|
//! | `trainyard.cuda.toolkit` | the newest release of CUDA that anything in the image was built with | `13.0` |
//! | `trainyard.cuda.driver` | the driver that came with it: every feature works from there on | `580.65.06` |
//! | `trainyard.cuda.gpus` | GPUs with machine code for them, each with its least driver | `8.0=580.65.06,9.0=580.65.06` |
//! | `trainyard.cuda.gpus.ptx` | GPUs that some code has to be compiled for when it starts, in the same way | `12.1=580.65.06` |
//! | `trainyard.cuda.gpus.later` | later GPUs than are known have this least driver | `590.44.01` |
//! | `trainyard.cuda.forward` | the release of a newer `libcuda.so` in the image, and branches of drivers that it goes with | `13.1=535,550,580` |
//!
//! `?` stands for a driver that is not known: the release is newer than the tables in `manifests/cuda`. An image without
//! GPU code has none of the labels.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::host::{Gpu, Host};
use super::tables::{DRIVERS, DriverVersion};
use crate::elf::{ComputeCapability, CudaRelease};

/// What the names of all labels begin with.
pub(crate) const LABELS: &str = "trainyard.cuda.";
const TOOLKIT: &str = "trainyard.cuda.toolkit";
const DRIVER: &str = "trainyard.cuda.driver";
const GPUS: &str = "trainyard.cuda.gpus";
const PTX: &str = "trainyard.cuda.gpus.ptx";
const LATER: &str = "trainyard.cuda.gpus.later";
const FORWARD: &str = "trainyard.cuda.forward";

/// What an image asks of a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Terms {
    /// The newest release of CUDA that anything in it was built with.
    pub toolkit: Option<CudaRelease>,
    /// The driver that came with that release.
    pub native: Option<DriverVersion>,
    /// GPUs that it runs on, of those that are known.
    pub gpus: BTreeMap<ComputeCapability, Coverage>,
    /// Where it can be compiled for GPUs later than those that are known: with which driver.
    pub later: Option<Option<DriverVersion>>,
    /// A newer `libcuda.so` in it.
    pub forward: Option<Forward>,
}

/// How an image runs on a kind of GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Coverage {
    /// Whether something has to be compiled for it, from PTX, by the driver.
    pub compiled: bool,
    /// The least driver, without forward compatibility; none where it is not known.
    pub least: Option<DriverVersion>,
}

/// A newer `libcuda.so` than the host's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forward {
    /// The release of CUDA that it is of.
    pub cuda: String,
    /// Branches of the host's driver that it goes with.
    pub drivers: BTreeSet<u32>,
}

/// Why something runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// The driver is as new as the image's CUDA.
    Native,
    /// The driver is older than the image's CUDA, of the same major version, and nothing has to be compiled.
    MinorVersion,
    /// The image's own `libcuda.so` takes the place of the host's.
    Forward,
}

/// Whether an image runs on a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It has no GPU code and asks for nothing.
    NeedsNoGpu,
    /// It runs, by this rule on the GPU that is hardest to run on.
    Runs(Rule),
    /// It does not run.
    Refused(Vec<Refusal>),
}

/// Why an image does not run on a host.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// There is no driver.
    #[error("the host has no NVIDIA driver; the image needs {}", or_unknown(needed.as_ref()))]
    NoDriver {
        /// The least driver.
        needed: Option<DriverVersion>,
    },
    /// There is no GPU.
    #[error("the host has no NVIDIA GPU; the image runs on {}", list(gpus))]
    NoGpu {
        /// GPUs that would do.
        gpus: BTreeSet<ComputeCapability>,
    },
    /// There is no code for a GPU.
    #[error("{gpu:?} has compute capability {found}; the image runs on {}", list(gpus))]
    NotCovered {
        /// The GPU's name.
        gpu: String,
        /// Its capability.
        found: ComputeCapability,
        /// GPUs that would do.
        gpus: BTreeSet<ComputeCapability>,
    },
    /// The driver is too old.
    #[error("the host's driver is {found}; for {gpu:?} the image needs {}", or_unknown(needed.as_ref()))]
    DriverTooOld {
        /// The GPU's name.
        gpu: String,
        /// The host's driver.
        found: DriverVersion,
        /// The least driver; none where it is not known.
        needed: Option<DriverVersion>,
        /// Whether a newer `libcuda.so` in the image could help.
        forward_helps: bool,
        /// Whether code has to be compiled for the GPU.
        compiled: bool,
    },
}

impl Refusal {
    /// The way out.
    pub fn hint(&self) -> String {
        match self {
            Self::NoDriver { needed } => {
                format!("install the NVIDIA driver, {}", or_unknown(needed.as_ref()))
            }
            Self::NoGpu { .. } => "choose a host with GPUs, or an image that needs none".to_owned(),
            Self::NotCovered { found, .. } => {
                let number = format!("sm_{}{}", found.major, found.minor);
                format!("build the image with {number} among its gpus, with libraries that have code for it")
            }
            Self::DriverTooOld { needed, forward_helps, compiled, .. } => {
                let mut hint = match needed {
                    Some(needed) => {
                        let branches =
                            DRIVERS.branch.iter().filter(|branch| branch.number >= needed.branch());
                        let branches: Vec<_> = branches
                            .map(|branch| format!("{} until {}", branch.number, branch.end))
                            .collect();
                        let support = if branches.is_empty() {
                            String::new()
                        } else {
                            format!(" (with long-term support: {})", branches.join(", "))
                        };
                        format!("update the host's driver to {needed} or later{support}")
                    }
                    None => "update the host's driver to that of the image's CUDA release".to_owned(),
                };
                if *compiled {
                    hint.push_str(", or build the image with machine code for this GPU");
                }
                if *forward_helps {
                    hint.push_str(", or put the cuda-compat package of the image's CUDA release into it");
                }
                hint.push_str(", or build the image with an older CUDA");
                hint
            }
        }
    }
}

fn or_unknown(driver: Option<&DriverVersion>) -> String {
    driver.map_or_else(
        || "a driver of its CUDA release, which is newer than is known here".to_owned(),
        |driver| format!("{driver} or later"),
    )
}

fn list(gpus: &BTreeSet<ComputeCapability>) -> String {
    if gpus.is_empty() {
        return "no GPU that is known".to_owned();
    }
    gpus.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Native => "the driver is as new as the image's CUDA",
            Self::MinorVersion => "minor-version compatibility",
            Self::Forward => "forward compatibility: the image brings its own libcuda.so",
        })
    }
}

impl Terms {
    /// Whether the image runs on a host.
    pub fn check(&self, host: &Host) -> Verdict {
        if *self == Self::none() {
            return Verdict::NeedsNoGpu;
        }
        let covered = || self.gpus.keys().copied().collect();
        let Some(driver) = &host.driver else {
            let least = self.gpus.values().filter_map(|coverage| coverage.least.as_ref()).min();
            return Verdict::Refused(vec![Refusal::NoDriver { needed: least.cloned() }]);
        };
        if host.gpus.is_empty() {
            return Verdict::Refused(vec![Refusal::NoGpu { gpus: covered() }]);
        }
        // One refusal for each kind of GPU, not for each GPU.
        let kinds: BTreeMap<_, _> = host.gpus.iter().map(|gpu| ((gpu.capability, &gpu.name), gpu)).collect();
        let mut worst = Rule::Native;
        let mut refusals = Vec::new();
        for gpu in kinds.into_values() {
            match self.rule(driver, gpu) {
                Ok(rule) => worst = worst.max(rule),
                Err(refusal) => refusals.push(refusal),
            }
        }
        if refusals.is_empty() { Verdict::Runs(worst) } else { Verdict::Refused(refusals) }
    }

    fn rule(&self, driver: &DriverVersion, gpu: &Gpu) -> Result<Rule, Refusal> {
        let later = || {
            let is_later = self.gpus.keys().next_back().is_none_or(|newest| gpu.capability > *newest);
            let least = self.later.clone().filter(|_| is_later)?;
            Some(Coverage { compiled: true, least })
        };
        let coverage =
            self.gpus.get(&gpu.capability).cloned().or_else(later).ok_or_else(|| Refusal::NotCovered {
                gpu: gpu.name.clone(),
                found: gpu.capability,
                gpus: self.gpus.keys().copied().collect(),
            })?;
        if coverage.least.as_ref().is_some_and(|least| driver >= least) {
            let is_native = self.native.as_ref().is_some_and(|native| driver >= native);
            return Ok(if is_native { Rule::Native } else { Rule::MinorVersion });
        }
        let is_data_center = gpu.is_data_center();
        let goes_with = |forward: &Forward| forward.drivers.contains(&driver.branch());
        if is_data_center && self.forward.as_ref().is_some_and(goes_with) {
            return Ok(Rule::Forward);
        }
        Err(Refusal::DriverTooOld {
            gpu: gpu.name.clone(),
            found: driver.clone(),
            needed: coverage.least,
            forward_helps: is_data_center && self.forward.is_none(),
            compiled: coverage.compiled,
        })
    }

    /// What an image without GPU code asks.
    pub fn none() -> Self {
        Self { toolkit: None, native: None, gpus: BTreeMap::new(), later: None, forward: None }
    }

    /// The labels that say it.
    pub fn labels(&self) -> BTreeMap<String, String> {
        let or_unknown =
            |driver: Option<&DriverVersion>| driver.map_or_else(|| "?".to_owned(), ToString::to_string);
        let gpus = |compiled: bool| {
            let those = self.gpus.iter().filter(|(_, coverage)| coverage.compiled == compiled);
            let text: Vec<_> = those
                .map(|(gpu, coverage)| format!("{gpu}={}", or_unknown(coverage.least.as_ref())))
                .collect();
            (!text.is_empty()).then(|| text.join(","))
        };
        let forward = self.forward.as_ref().map(|forward| {
            let drivers: Vec<_> = forward.drivers.iter().map(ToString::to_string).collect();
            format!("{}={}", forward.cuda, drivers.join(","))
        });
        [
            (TOOLKIT, self.toolkit.map(|toolkit| toolkit.to_string())),
            (DRIVER, self.native.as_ref().map(ToString::to_string)),
            (GPUS, gpus(false)),
            (PTX, gpus(true)),
            (LATER, self.later.as_ref().map(|later| or_unknown(later.as_ref()))),
            (FORWARD, forward),
        ]
        .into_iter()
        .filter_map(|(label, value)| Some((label.to_owned(), value?)))
        .collect()
    }

    /// Reads what [`Terms::labels`] says; other labels are passed over.
    ///
    /// # Errors
    /// When one of the labels is not as it is documented.
    pub fn from_labels(labels: &BTreeMap<String, String>) -> Result<Self, InvalidLabel> {
        let invalid = |label: &'static str| InvalidLabel {
            label,
            value: labels.get(label).cloned().unwrap_or_default(),
        };
        let driver = |text: &str| if text == "?" { Some(None) } else { text.parse().ok().map(Some) };
        let mut terms = Self::none();
        for (label, compiled) in [(GPUS, false), (PTX, true)] {
            let Some(text) = labels.get(label) else { continue };
            for part in text.split(',') {
                let read = || {
                    let (gpu, least) = part.split_once('=')?;
                    Some((gpu.parse().ok()?, Coverage { compiled, least: driver(least)? }))
                };
                let (gpu, coverage) = read().ok_or_else(|| invalid(label))?;
                terms.gpus.insert(gpu, coverage);
            }
        }
        let get = |label| labels.get(label).map(String::as_str);
        terms.toolkit = get(TOOLKIT).map(|text| text.parse().map_err(|_| invalid(TOOLKIT))).transpose()?;
        terms.native = get(DRIVER).map(|text| text.parse().map_err(|_| invalid(DRIVER))).transpose()?;
        terms.later = get(LATER).map(|text| driver(text).ok_or_else(|| invalid(LATER))).transpose()?;
        let read = |text: &str| {
            let (cuda, drivers) = text.split_once('=')?;
            let drivers = drivers.split(',').filter(|part| !part.is_empty()).map(|part| part.parse().ok());
            Some(Forward { cuda: cuda.to_owned(), drivers: drivers.collect::<Option<_>>()? })
        };
        terms.forward = get(FORWARD).map(|text| read(text).ok_or_else(|| invalid(FORWARD))).transpose()?;
        Ok(terms)
    }
}

/// A label that does not say what it should.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the image's label {label} is {value:?}, which cannot be read")]
pub struct InvalidLabel {
    /// The label.
    pub label: &'static str,
    /// What it says.
    pub value: String,
}
