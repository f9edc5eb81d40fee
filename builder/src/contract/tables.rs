//! What is known of CUDA's releases and drivers: the tables in `manifests/cuda`, compiled in.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use std::sync::LazyLock;

use toml_spanner::{Context, Failed, FromToml, Item, Toml};
use trainyard_spec::FormatVersion;
use trainyard_spec::toml::{Collector, Validate};

use crate::elf::{ComputeCapability, CudaRelease};

/// A driver's version, such as 580.65.06.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct DriverVersion {
    numbers: [u32; 3],
    text: String,
}

/// What is no driver's version.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no version of a driver; one is written as in 580.65.06")]
pub struct InvalidDriver(pub String);

impl DriverVersion {
    /// The branch: 580 of 580.65.06.
    pub fn branch(&self) -> u32 {
        self.numbers[0]
    }
}

impl fmt::Display for DriverVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for DriverVersion {
    type Err = InvalidDriver;

    fn from_str(text: &str) -> Result<Self, InvalidDriver> {
        let invalid = || InvalidDriver(text.to_owned());
        let mut numbers = [0; 3];
        let parts: Vec<&str> = text.split('.').collect();
        if !(2..=3).contains(&parts.len()) {
            return Err(invalid());
        }
        for (number, part) in numbers.iter_mut().zip(parts) {
            let is_number = (1..=4).contains(&part.len()) && part.bytes().all(|c| c.is_ascii_digit());
            *number = is_number.then(|| part.parse().ok()).flatten().ok_or_else(invalid)?;
        }
        Ok(Self { numbers, text: text.to_owned() })
    }
}

/// Gives a type with `FromStr` its TOML form.
macro_rules! from_text {
    ($type:ty) => {
        impl<'de> FromToml<'de> for $type {
            fn from_toml(ctx: &mut Context<'de>, item: &Item<'de>) -> Result<Self, Failed> {
                toml_spanner::helper::parse_string::from_toml(ctx, item)
            }
        }
    };
}

from_text!(DriverVersion);
from_text!(CudaRelease);
from_text!(ComputeCapability);

/// `manifests/cuda/toolkits.toml`.
#[derive(Debug, Toml)]
#[toml(FromToml, rename_all = "kebab-case", recoverable)]
pub struct Toolkits {
    /// Format version.
    pub version: FormatVersion<1>,
    /// Major versions, in order.
    pub major: Vec<Major>,
    /// Releases, in order.
    pub toolkit: Vec<Toolkit>,
}

/// A major version of CUDA.
#[derive(Debug, Toml)]
#[toml(FromToml, rename_all = "kebab-case", recoverable)]
pub struct Major {
    /// Its number.
    pub number: u32,
    /// The least driver for machine code of any of its releases.
    pub driver: DriverVersion,
}

/// A release of CUDA.
#[derive(Debug, Toml)]
#[toml(FromToml, rename_all = "kebab-case", recoverable)]
pub struct Toolkit {
    /// The release.
    pub release: CudaRelease,
    /// Version of the PTX that it writes.
    pub ptx: CudaRelease,
    /// The driver that came with its first version.
    pub driver: DriverVersion,
    /// Drivers of its later versions.
    #[toml(default)]
    pub updates: Vec<DriverVersion>,
    /// GPUs that it makes machine code for; empty where they are those of the release before.
    #[toml(default)]
    pub architectures: Vec<ComputeCapability>,
}

/// `manifests/cuda/drivers.toml`.
#[derive(Debug, Toml)]
#[toml(FromToml, rename_all = "kebab-case", recoverable)]
pub struct Drivers {
    /// Format version.
    pub version: FormatVersion<1>,
    /// The first driver that unpacks zstd.
    pub zstd: DriverVersion,
    /// Libraries that come from the host.
    pub libraries: BTreeSet<String>,
    /// Words in names of data-center GPUs.
    pub data_center: BTreeSet<String>,
    /// Branches with long-term support.
    pub branch: Vec<Branch>,
}

/// A branch of drivers with long-term support.
#[derive(Debug, Toml)]
#[toml(FromToml, rename_all = "kebab-case", recoverable)]
pub struct Branch {
    /// Its number.
    pub number: u32,
    /// The month in which support ends.
    pub end: String,
}

impl Validate for Toolkits {
    fn validate(&self, faults: &mut Collector<'_, '_>) {
        if !self.toolkit.is_sorted_by(|a, b| a.release < b.release && a.ptx <= b.ptx && a.driver < b.driver) {
            faults.at("toolkit", "releases are not in order", None);
        }
        for pair in self.toolkit.windows(2) {
            let drivers = pair[0].updates.iter().chain([&pair[1].driver]);
            if !std::iter::once(&pair[0].driver).chain(drivers).is_sorted_by(|a, b| a < b) {
                faults.at("toolkit", format!("drivers of {} are not in order", pair[0].release), None);
            }
        }
        for toolkit in &self.toolkit {
            if !self.major.iter().any(|major| major.number == toolkit.release.major) {
                faults.at(
                    "major",
                    format!("nothing is said of the major version of {}", toolkit.release),
                    None,
                );
            }
        }
    }
}

impl Validate for Drivers {
    fn validate(&self, _: &mut Collector<'_, '_>) {}
}

impl Toolkits {
    /// What is said of a release.
    pub fn release(&self, release: CudaRelease) -> Option<&Toolkit> {
        self.toolkit.iter().find(|toolkit| toolkit.release == release)
    }

    /// The first release that writes, and whose driver reads, a version of PTX.
    pub fn of_ptx(&self, ptx: CudaRelease) -> Option<&Toolkit> {
        self.toolkit.iter().find(|toolkit| toolkit.ptx >= ptx)
    }

    /// The least driver for machine code of a major version.
    pub fn least_of_major(&self, major: u32) -> Option<&DriverVersion> {
        self.major.iter().find(|found| found.number == major).map(|found| &found.driver)
    }

    /// All GPUs that some release knows.
    pub fn gpus(&self) -> BTreeSet<ComputeCapability> {
        self.toolkit.iter().flat_map(|toolkit| &toolkit.architectures).copied().collect()
    }
}

/// The tables of releases.
///
/// # Panics
/// Never: a test reads them.
pub static TOOLKITS: LazyLock<Toolkits> = LazyLock::new(|| {
    let text = include_str!("../../../manifests/cuda/toolkits.toml");
    #[expect(clippy::panic, reason = "the text is part of the program, and a test reads it")]
    trainyard_spec::toml::read("manifests/cuda/toolkits.toml", text)
        .unwrap_or_else(|faults| panic!("{faults}"))
});

/// The tables of drivers.
///
/// # Panics
/// Never: a test reads them.
pub static DRIVERS: LazyLock<Drivers> = LazyLock::new(|| {
    let text = include_str!("../../../manifests/cuda/drivers.toml");
    #[expect(clippy::panic, reason = "the text is part of the program, and a test reads it")]
    trainyard_spec::toml::read("manifests/cuda/drivers.toml", text)
        .unwrap_or_else(|faults| panic!("{faults}"))
});

#[cfg(test)]
mod tests {
    use super::{DRIVERS, DriverVersion, TOOLKITS};

    #[test]
    fn the_tables_are_sound() {
        let driver = |text: &str| text.parse::<DriverVersion>().unwrap();
        assert_eq!(TOOLKITS.release("13.0".parse().unwrap()).unwrap().driver, driver("580.65.06"));
        assert_eq!(TOOLKITS.of_ptx("8.5".parse().unwrap()).unwrap().release, "12.5".parse().unwrap());
        assert_eq!(TOOLKITS.of_ptx("8.6".parse().unwrap()).unwrap().release, "12.8".parse().unwrap());
        assert!(TOOLKITS.of_ptx("99.0".parse().unwrap()).is_none());
        assert!(TOOLKITS.gpus().contains(&"12.1".parse().unwrap()));
        assert!(DRIVERS.libraries.contains("libcuda.so.1"));
    }

    #[test]
    fn drivers_are_compared_by_number() {
        let driver = |text: &str| text.parse::<DriverVersion>();
        assert!(driver("525.60.13").unwrap() < driver("525.105.17").unwrap());
        assert!(driver("580.65").unwrap() < driver("580.65.06").unwrap());
        for bad in ["", "580", "580.", "580.65.06.1", "580.x", "5800000.1"] {
            assert!(driver(bad).is_err(), "{bad}");
        }
    }
}
