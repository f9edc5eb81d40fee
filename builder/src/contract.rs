//! The driver contract: what an image asks of a host, derived from the bytes of its ELF files.
//!
//! An image runs on a GPU when each of its files with GPU code does: by machine code, or by PTX that the driver compiles.
//! Machine code runs on any driver from the first of the image's CUDA major version on (minor-version compatibility);
//! PTX needs a driver that knows its version; code packed in zstd needs one that unpacks it, but only where the code is
//! for this GPU, since a driver opens nothing else. From one host's point of view, [`Terms::check`] says which of these
//! rules holds.
//!
//! It also says what the files ask of each other: libraries and symbol versions that nothing in the image gives. Those of
//! the driver come from the host; all others are faults.
//!
//! Left out: which folders the loader searches. A library is there when a file of the image has its name or SONAME.

pub mod host;
pub mod tables;
mod terms;

use std::collections::{BTreeMap, BTreeSet};

pub use tables::{DriverVersion, InvalidDriver};
pub(crate) use terms::LABELS;
pub use terms::{Coverage, Forward, InvalidLabel, Refusal, Rule, Terms, Verdict};

use crate::elf::fatbin::{Compression, Element, Kind};
use crate::elf::{Component, ComputeCapability, CudaRelease, Report};
use serde::Serialize;
use tables::{DRIVERS, TOOLKITS};

/// An ELF file of an image.
#[derive(Debug, Clone)]
pub struct Object {
    /// Its path in the image.
    pub path: String,
    /// What it says.
    pub report: Report,
}

/// What an image asks, and what its files ask of each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contract {
    /// What it asks of a host.
    pub terms: Terms,
    /// Libraries of CUDA in it, by path.
    pub components: BTreeMap<String, Component>,
    /// The newest symbol version that is needed, of `GLIBC`, `GLIBCXX` and `CXXABI`.
    pub floors: BTreeMap<&'static str, Vec<u32>>,
    /// Libraries that the host's driver gives.
    pub from_driver: BTreeSet<String>,
    /// What nothing in the image gives, in order of path.
    pub faults: Vec<Fault>,
}

/// A contract in plain text, for people and programs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Summary {
    /// What it asks of a host, in the labels that say so.
    pub labels: BTreeMap<String, String>,
    /// Libraries of CUDA by path, with their version and the release of CUDA that they were built with where known.
    pub components: BTreeMap<String, String>,
    /// The newest symbol version that is needed, of each kind: `GLIBC_2.27`.
    pub floors: Vec<String>,
    /// Libraries that the host's driver gives.
    pub from_driver: BTreeSet<String>,
    /// What nothing in the image gives.
    pub missing: Vec<String>,
}

impl Contract {
    /// Puts it in plain text.
    pub fn summary(&self) -> Summary {
        let component = |Component { name, version, cuda, .. }: &Component| {
            let version = version.as_deref().map(|version| format!(" {version}")).unwrap_or_default();
            let cuda = cuda.map(|cuda| format!(" (CUDA {cuda})")).unwrap_or_default();
            format!("{name}{version}{cuda}")
        };
        let dotted = |numbers: &[u32]| numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(".");
        Summary {
            labels: self.terms.labels(),
            components: self.components.iter().map(|(path, one)| (path.clone(), component(one))).collect(),
            floors: self.floors.iter().map(|(kind, newest)| format!("{kind}_{}", dotted(newest))).collect(),
            from_driver: self.from_driver.clone(),
            missing: self.faults.iter().map(ToString::to_string).collect(),
        }
    }
}

/// What one file needs and nothing gives.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum Fault {
    /// A library.
    #[error("{path:?} needs the library {library:?}, which is not in the image")]
    Library {
        /// Who needs it.
        path: String,
        /// The library.
        library: String,
    },
    /// A symbol version.
    #[error("{path:?} needs {version:?} of {library:?}, which the image's has not; its newest is {newest:?}")]
    Version {
        /// Who needs it.
        path: String,
        /// The library.
        library: String,
        /// The version.
        version: String,
        /// The newest of its kind that there is.
        newest: String,
    },
    /// The loader of a program.
    #[error("{path:?} is loaded by {loader:?}, which is not in the image")]
    Loader {
        /// The program.
        path: String,
        /// Its loader.
        loader: String,
    },
}

/// Names of symbol versions whose newest is told.
const FLOORS: [&str; 3] = ["GLIBC", "GLIBCXX", "CXXABI"];

/// Derives an image's contract.
pub fn derive(objects: &[Object]) -> Contract {
    let mut components = BTreeMap::new();
    for object in objects {
        if let Some(component) = &object.report.component {
            components.insert(object.path.clone(), component.clone());
        }
    }
    let mut faults = Vec::new();
    let mut from_driver = BTreeSet::new();
    let mut floors: BTreeMap<&'static str, Vec<u32>> = BTreeMap::new();
    let given = Given::of(objects);
    for object in objects {
        given.check(object, &mut faults, &mut from_driver);
        for version in object.report.needs.versions.values().flatten() {
            if let Some((name, number)) = version.split_once('_')
                && let Some(name) = FLOORS.into_iter().find(|floor| *floor == name)
                && let Some(number) = numbers(number)
            {
                let floor = floors.entry(name).or_default();
                *floor = number.max(std::mem::take(floor));
            }
        }
    }
    faults.sort();
    Contract { terms: terms(objects), components, floors, from_driver, faults }
}

/// The numbers of a symbol version: 2 and 27 of `GLIBC_2.27`.
fn numbers(text: &str) -> Option<Vec<u32>> {
    text.split('.').map(|part| part.parse().ok()).collect()
}

/// What the files of an image give to each other.
struct Given<'a> {
    by_name: BTreeMap<&'a str, Vec<&'a Report>>,
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

impl<'a> Given<'a> {
    fn of(objects: &'a [Object]) -> Self {
        let mut by_name: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for Object { path, report } in objects {
            let names: BTreeSet<_> =
                std::iter::once(file_name(path)).chain(report.needs.soname.as_deref()).collect();
            for name in names {
                by_name.entry(name).or_default().push(report);
            }
        }
        Self { by_name }
    }

    /// Files of a name that fit to another, which are several where folders hold other versions of one library.
    fn find(&self, name: &str, to: &Report) -> Vec<&'a Report> {
        let all = self.by_name.get(name).into_iter().flatten().copied();
        all.filter(|one| (one.bits, one.machine) == (to.bits, to.machine)).collect()
    }

    fn check(&self, object: &Object, faults: &mut Vec<Fault>, from_driver: &mut BTreeSet<String>) {
        let Object { path, report } = object;
        for library in &report.needs.libraries {
            if !self.find(file_name(library), report).is_empty() {
                continue;
            }
            if DRIVERS.libraries.contains(library) {
                from_driver.insert(library.clone());
            } else {
                faults.push(Fault::Library { path: path.clone(), library: library.clone() });
            }
        }
        if let Some(loader) = &report.interpreter
            && self.find(file_name(loader), report).is_empty()
        {
            faults.push(Fault::Loader { path: path.clone(), loader: loader.clone() });
        }
        for (library, versions) in &report.needs.versions {
            let given = self.find(library, report);
            // A library that is not there is a fault already, and one without versions gives all of them.
            if given.is_empty() || given.iter().any(|one| one.needs.defined.is_empty()) {
                continue;
            }
            let defined: BTreeSet<&String> = given.iter().flat_map(|one| &one.needs.defined).collect();
            for version in versions.iter().filter(|version| !defined.contains(version)) {
                let kind = version.split_once('_').map_or("", |(kind, _)| kind);
                let same = defined.iter().filter_map(|one| {
                    let (name, number) = one.split_once('_').filter(|(name, _)| *name == kind)?;
                    Some((numbers(number)?, format!("{name}_{number}")))
                });
                faults.push(Fault::Version {
                    path: path.clone(),
                    library: library.clone(),
                    version: version.clone(),
                    newest: same.max().map_or_else(String::new, |(_, name)| name),
                });
            }
        }
    }
}

/// What all files with GPU code ask of a host together.
fn terms(objects: &[Object]) -> Terms {
    let with_code: Vec<Vec<&Element>> = objects
        .iter()
        .map(|object| object.report.loadable().collect())
        .filter(|code: &Vec<_>| !code.is_empty())
        .collect();
    let forward = objects.iter().find_map(|object| {
        let note = object.report.forward.as_ref()?;
        Some(Forward { cuda: note.cuda.clone(), drivers: note.drivers.iter().copied().collect() })
    });
    let components = objects.iter().filter_map(|object| object.report.component.as_ref());
    let majors = components.clone().filter_map(|component| component.cuda_major);
    let written =
        with_code.iter().flatten().filter(|element| element.kind == Kind::Ptx).map(|element| ptx(element));
    // PTX that is newer than the tables is of a release that is newer, too.
    let by_ptx = |ptx: CudaRelease| {
        let toolkit = TOOLKITS.of_ptx(ptx).filter(|toolkit| toolkit.ptx == ptx)?;
        Some(toolkit.release)
    };
    let releases: Vec<CudaRelease> = components
        .clone()
        .filter_map(|component| component.cuda)
        .chain(written.clone().filter_map(by_ptx))
        .collect();
    let is_newer_than_known = written.clone().any(|ptx| TOOLKITS.of_ptx(ptx).is_none());
    let toolkit = releases.iter().copied().max();
    let major = majors.chain(toolkit.map(|release| release.major)).max();
    let native = toolkit.filter(|_| !is_newer_than_known).and_then(|toolkit| TOOLKITS.release(toolkit));
    let least = major.and_then(|major| TOOLKITS.least_of_major(major));
    let known = TOOLKITS.gpus();
    let cover = |gpu| {
        let mut all = Coverage { compiled: false, least: least.cloned() };
        for code in &with_code {
            let one = coverage(code, gpu)?;
            all.compiled |= one.compiled;
            all.least = all.least.zip(one.least).map(|(all, one)| all.max(one));
        }
        Some(all)
    };
    // Without code of its own, a library of CUDA runs what it is given.
    let asks = !with_code.is_empty() || major.is_some();
    let unknown = ComputeCapability { major: u16::MAX, minor: 0 };
    let gpus = known.iter().filter(|_| asks).filter_map(|gpu| Some((*gpu, cover(*gpu)?))).collect();
    let later = asks.then(|| cover(unknown)).flatten().map(|coverage| coverage.least);
    Terms { toolkit, native: native.map(|toolkit| toolkit.driver.clone()), gpus, later, forward }
}

/// The version of PTX that an element is written in.
fn ptx(element: &Element) -> CudaRelease {
    CudaRelease { major: element.version.0.into(), minor: element.version.1.into() }
}

/// How one file runs on a GPU; none where it does not. The least driver is that of its own code alone.
fn coverage(code: &[&Element], gpu: ComputeCapability) -> Option<Coverage> {
    let usable = |kind| code.iter().filter(move |element| element.kind == kind && element.runs_on(gpu));
    let mut least: Option<DriverVersion> = "0.0".parse().ok();
    let compiled = usable(Kind::MachineCode).next().is_none();
    let kind = if compiled { Kind::Ptx } else { Kind::MachineCode };
    if compiled {
        let newest = usable(kind).map(|element| ptx(element)).max()?;
        least = TOOLKITS.of_ptx(newest).map(|toolkit| toolkit.driver.clone());
    }
    if usable(kind).any(|element| element.compression == Compression::Zstd) {
        least = least.map(|least| least.max(DRIVERS.zstd.clone()));
    }
    Some(Coverage { compiled, least })
}
