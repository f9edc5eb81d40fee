//! GPU architectures and compute capabilities, and which code runs where.

use std::fmt;
use std::str::FromStr;

/// What a GPU can do, such as 9.0: the number that its driver gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ComputeCapability {
    /// The generation.
    pub major: u16,
    /// The member of it.
    pub minor: u16,
}

/// An architecture that code is compiled for, such as `90a`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Arch {
    /// The capability that the code asks for.
    pub capability: ComputeCapability,
    /// How far it carries.
    pub variant: Variant,
}

/// How far code of an architecture carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Variant {
    /// By the rules of its kind.
    Baseline,
    /// To this very capability (suffix `a`).
    Exact,
    /// To capabilities of one major with the same or a later minor (suffix `f`).
    Family,
}

/// What is no architecture.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no GPU architecture; one is written as in sm_90 or 9.0")]
pub struct InvalidArch(pub String);

impl ComputeCapability {
    /// The capability of the number in `sm_90` or `compute_120`; `None` where there cannot be one.
    pub(crate) fn from_number(number: u32) -> Option<Self> {
        let number = u16::try_from(number).ok().filter(|number| (10..1000).contains(number))?;
        Some(Self { major: number / 10, minor: number % 10 })
    }
}

/// GPUs inside processors (Tegra), as major and minor: machine code for other members of their generation is not for
/// them, and theirs is for nobody else.
const IN_PROCESSORS: [(u16, u16); 7] = [(5, 3), (6, 2), (7, 2), (8, 7), (8, 8), (10, 1), (11, 0)];

impl Arch {
    /// Whether machine code of this architecture runs on a GPU: its own generation, at most as late a member.
    ///
    /// Source: CUDA C++ programming guide, binary compatibility and feature-set targets.
    pub fn machine_code_runs_on(self, gpu: ComputeCapability) -> bool {
        let is_apart = |one: ComputeCapability| IN_PROCESSORS.contains(&(one.major, one.minor));
        if is_apart(gpu) || is_apart(self.capability) {
            return self.capability == gpu;
        }
        match self.variant {
            Variant::Exact => self.capability == gpu,
            Variant::Baseline | Variant::Family => {
                self.capability.major == gpu.major && self.capability.minor <= gpu.minor
            }
        }
    }

    /// Whether a driver can compile PTX of this architecture for a GPU.
    pub fn ptx_runs_on(self, gpu: ComputeCapability) -> bool {
        match self.variant {
            Variant::Baseline => self.capability <= gpu,
            Variant::Exact | Variant::Family => self.machine_code_runs_on(gpu),
        }
    }
}

impl fmt::Display for ComputeCapability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl FromStr for ComputeCapability {
    type Err = InvalidArch;

    /// Reads `sm_90` or `9.0`.
    fn from_str(text: &str) -> Result<Self, InvalidArch> {
        let digits = |text: &str, most: usize| {
            let is_number =
                !text.is_empty() && text.len() <= most && text.bytes().all(|c| c.is_ascii_digit());
            is_number.then(|| text.parse().ok()).flatten()
        };
        let read = || match text.strip_prefix("sm_") {
            Some(number) => Self::from_number(digits(number, 3)?),
            None => {
                let (major, minor) = text.split_once('.')?;
                Self::from_number(digits(major, 2)? * 10 + digits(minor, 1)?)
            }
        };
        read().ok_or_else(|| InvalidArch(text.to_owned()))
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = match self.variant {
            Variant::Baseline => "",
            Variant::Exact => "a",
            Variant::Family => "f",
        };
        write!(f, "{}{}{suffix}", self.capability.major, self.capability.minor)
    }
}

#[cfg(test)]
mod tests {
    use super::{Arch, ComputeCapability, Variant};

    #[test]
    fn capabilities_are_read() {
        for (text, expect) in [
            ("sm_90", Some((9, 0))),
            ("sm_103", Some((10, 3))),
            ("8.9", Some((8, 9))),
            ("12.0", Some((12, 0))),
            ("sm_90a", None),
            ("sm_", None),
            ("sm_9", None),
            ("90", None),
            ("9.0.0", None),
            ("+9.0", None),
            ("0.5", None),
            ("sm_99999", None),
        ] {
            let expect = expect.map(|(major, minor)| ComputeCapability { major, minor });
            assert_eq!(text.parse().ok(), expect, "{text}");
        }
    }

    #[test]
    fn code_carries_as_far_as_its_kind_allows() {
        let arch =
            |number, variant| Arch { capability: ComputeCapability::from_number(number).unwrap(), variant };
        use Variant::{Baseline, Exact, Family};
        for (number, variant, gpu, machine_code, ptx) in [
            (80, Baseline, "8.0", true, true),
            (80, Baseline, "8.9", true, true),
            (86, Baseline, "8.0", false, false),
            (80, Baseline, "9.0", false, true),
            (90, Exact, "9.0", true, true),
            (90, Exact, "10.0", false, false),
            (100, Exact, "10.3", false, false),
            (100, Family, "10.3", true, true),
            (103, Family, "10.0", false, false),
            (100, Family, "12.0", false, false),
            (120, Baseline, "12.1", true, true),
            (80, Baseline, "8.7", false, true),
            (87, Baseline, "8.7", true, true),
            (87, Baseline, "8.9", false, true),
        ] {
            let (arch, gpu) = (arch(number, variant), gpu.parse().unwrap());
            assert_eq!(arch.machine_code_runs_on(gpu), machine_code, "sm_{arch} on {gpu}");
            assert_eq!(arch.ptx_runs_on(gpu), ptx, "compute_{arch} on {gpu}");
        }
    }
}
