//! What a host has: its driver and its GPUs, from texts that the driver gives.
//!
//! Left out: how the texts are got.

use super::tables::{DRIVERS, DriverVersion};
use crate::elf::ComputeCapability;

/// The command whose output [`Host::from_smi`] reads, without the word `nvidia-smi`.
pub const SMI_ARGUMENTS: [&str; 2] = ["--query-gpu=driver_version,compute_cap,name", "--format=csv,noheader"];

/// Most GPUs of a host.
const MOST_GPUS: usize = 1024;

/// A host, as far as CUDA asks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Host {
    /// Its driver.
    pub driver: Option<DriverVersion>,
    /// Its GPUs.
    pub gpus: Vec<Gpu>,
}

/// A GPU of a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// The product's name.
    pub name: String,
    /// What it can do.
    pub capability: ComputeCapability,
}

/// Why a text of the driver cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// It has another form.
    #[error("{source_of}: {line:?} is not of the form {needed:?}")]
    Form {
        /// Where the text is from.
        source_of: &'static str,
        /// The line.
        line: String,
        /// The form that it must have.
        needed: &'static str,
    },
    /// GPUs of one host have different drivers, which cannot be.
    #[error("nvidia-smi names two drivers, {first} and {second}")]
    TwoDrivers {
        /// One.
        first: DriverVersion,
        /// Another.
        second: DriverVersion,
    },
    /// There are too many.
    #[error("nvidia-smi names more than {MOST_GPUS} GPUs")]
    TooMany,
}

impl Gpu {
    /// Whether it is made for data centers, going by its name.
    pub fn is_data_center(&self) -> bool {
        let is_desktop = self.name.contains("GeForce") || self.name.contains("RTX");
        let mut words = self.name.split(|c: char| !c.is_ascii_alphanumeric());
        !is_desktop && words.any(|word| DRIVERS.data_center.contains(word))
    }
}

/// The driver in `/proc/driver/nvidia/version`. Its first line ends in version, time and, of the open module, builder.
///
/// # Errors
/// When it has another form.
pub fn driver_from_proc(text: &str) -> Result<DriverVersion, Error> {
    let line = text.lines().next().unwrap_or_default();
    let found = line.strip_prefix("NVRM version:").filter(|rest| rest.contains("Kernel Module"));
    found.and_then(|rest| rest.split_whitespace().find_map(|word| word.parse().ok())).ok_or_else(|| {
        Error::Form {
            source_of: "/proc/driver/nvidia/version",
            line: line.chars().take(200).collect(),
            needed: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  ...",
        }
    })
}

impl Host {
    /// Driver and GPUs in what `nvidia-smi` prints when asked with [`SMI_ARGUMENTS`].
    ///
    /// # Errors
    /// When a line has another form.
    pub fn from_smi(text: &str) -> Result<Self, Error> {
        let mut host = Self::default();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            if host.gpus.len() == MOST_GPUS {
                return Err(Error::TooMany);
            }
            let read = || {
                let mut fields = line.splitn(3, ',').map(str::trim);
                let driver: DriverVersion = fields.next()?.parse().ok()?;
                let capability = fields.next().filter(|text| text.contains('.'))?.parse().ok()?;
                Some((driver, Gpu { name: fields.next()?.to_owned(), capability }))
            };
            let (driver, gpu) = read().ok_or_else(|| Error::Form {
                source_of: "nvidia-smi",
                line: line.chars().take(200).collect(),
                needed: "580.65.06, 9.0, NVIDIA H100 80GB HBM3",
            })?;
            if let Some(first) = host.driver.replace(driver.clone())
                && first != driver
            {
                return Err(Error::TwoDrivers { first, second: driver });
            }
            host.gpus.push(gpu);
        }
        Ok(host)
    }
}

#[cfg(test)]
mod tests {
    use super::{Error, Gpu, Host, driver_from_proc};

    #[test]
    fn drivers_in_proc() {
        for (text, expect) in [
            (
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04) \n",
                Some("535.104.05"),
            ),
            (
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22-I3-AM02-24-3)  Tue Sep 23 09:55:41 UTC 2025\nGCC version:  gcc version 13.3.0\n",
                Some("580.95.05"),
            ),
            (
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  418.67  Sat Apr  6 03:07:24 CDT 2019\n",
                Some("418.67"),
            ),
            ("", None),
            ("GCC version:  gcc version 11.4.0", None),
            ("NVRM version: NVIDIA UNIX x86_64 Kernel Module", None),
        ] {
            assert_eq!(
                driver_from_proc(text).ok().map(|driver| driver.to_string()).as_deref(),
                expect,
                "{text}"
            );
        }
    }

    #[test]
    fn hosts_from_smi() {
        let host =
            Host::from_smi("580.65.06, 9.0, NVIDIA H100 80GB HBM3\n580.65.06, 9.0, NVIDIA H100 80GB HBM3\n")
                .unwrap();
        assert_eq!(host.driver.unwrap().to_string(), "580.65.06");
        assert_eq!(host.gpus.len(), 2);
        assert_eq!(host.gpus[0].name, "NVIDIA H100 80GB HBM3");
        for bad in
            ["580.65.06, [N/A], NVIDIA H100", "No devices were found", "580.65.06", "580.65.06, sm_90, X"]
        {
            assert!(matches!(Host::from_smi(bad), Err(Error::Form { .. })), "{bad}");
        }
        let two = Host::from_smi("580.65.06, 9.0, A\n535.54.03, 9.0, B");
        assert!(matches!(two, Err(Error::TwoDrivers { .. })));
    }

    #[test]
    fn data_center_gpus_are_known_by_name() {
        for (name, expect) in [
            ("NVIDIA H100 80GB HBM3", true),
            ("NVIDIA A100-SXM4-80GB", true),
            ("Tesla V100-SXM2-16GB", true),
            ("NVIDIA L40S", true),
            ("NVIDIA GeForce RTX 4090", false),
            ("NVIDIA RTX A4000", false),
            ("NVIDIA TITAN V", false),
            ("Quadro P400", false),
            ("NVIDIA A1000", false),
        ] {
            let gpu = Gpu { name: name.to_owned(), capability: "8.0".parse().unwrap() };
            assert_eq!(gpu.is_data_center(), expect, "{name}");
        }
    }
}
