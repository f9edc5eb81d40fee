//! Whether an image may be handed on: which of NVIDIA's files it has, and what their licences allow.
//!
//! Judged is the image itself, each layer as it is pushed, whoever made it: files by their names, and libraries by their
//! sonames too, so that a new name hides nothing. A library counts as changed where its GPU code has been cut out, where
//! the image's labels say so, or where the facts of its build know another digest. Other changes to a library of unknown
//! origin cannot be seen. Left out: every licence but those of NVIDIA's files, which forbid what others allow.

use std::io::{self, BufReader, Read, Write as _};
use std::path::{Path, PathBuf};

use fs_err::File;
use globset::{Glob, GlobSet, GlobSetBuilder};
use oci_spec::image::{ImageConfiguration, ImageManifest, MediaType};
use tar::{Archive, EntryType};
use trainyard_spec::toml::{self, Collector, Validate};
use trainyard_spec::{Digest, FormatVersion};

use super::Facts;
use crate::content::{Content, Kind};
use crate::image::{LOCAL_ONLY_LABEL, PRUNED_LABEL};
use crate::store::{self, Store, digest_of};
use crate::{decompress, elf, oci};

/// What is known of NVIDIA's files.
const TABLE: &str = include_str!("../../../manifests/cuda/redistribution.toml");
/// The first bytes of a program or library (System V ABI, "ELF Identification").
const ELF: [u8; 4] = [0x7f, b'E', b'L', b'F'];
/// The largest file that is read as a library. NVIDIA's own have less than a gigabyte.
const LARGEST: u64 = 16 << 30;
/// docker's media type of a configuration.
const DOCKER_CONFIG: &str = "application/vnd.docker.container.image.v1+json";

/// A file that may not be handed on as it is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fault {
    /// Its absolute path in the image.
    pub file: String,
    /// What is wrong about it.
    pub found: String,
    /// What its licence says.
    pub rule: String,
    /// The way out.
    pub way_out: String,
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} {}\n    {}\n    {}", self.file, self.found, self.rule, self.way_out)
    }
}

/// Why an image is not pushed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Its manifest says that it stays where it is.
    #[error(
        "image {image} is local-only: its libraries may have been changed in ways that must not be handed on"
    )]
    LocalOnly {
        /// The image.
        image: Digest,
    },
    /// It has files that may not be handed on.
    #[error("image {image} has files that may not be handed on:\n  {}", .faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n  "))]
    Files {
        /// The image.
        image: Digest,
        /// The files.
        faults: Vec<Fault>,
    },
    /// The table of files is wrong.
    #[error("the table of NVIDIA's files is wrong: {0}")]
    Table(String),
    /// The image cannot be read.
    #[error(transparent)]
    Layout(#[from] oci::Error),
    /// A layer cannot be read, so that nobody knows what is in it.
    #[error("layer {layer} cannot be read, so it is not known what it hands on: {source}")]
    Layer {
        /// The layer.
        layer: Digest,
        /// What went wrong.
        source: io::Error,
    },
    /// The store failed.
    #[error(transparent)]
    Store(#[from] store::Error),
}

impl Error {
    /// The way out.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::LocalOnly { .. } => Some(
                "write local-only = false and build again; within your organisation hand it on with `trainyard export`",
            ),
            Self::Store(error) => error.hint(),
            Self::Files { .. } | Self::Table(_) | Self::Layout(_) | Self::Layer { .. } => None,
        }
    }
}

/// What a licence allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, toml_spanner::Toml)]
#[toml(FromToml, rename_all = "kebab-case")]
enum Allowed {
    Changed,
    Unchanged,
    No,
}

#[derive(Debug, toml_spanner::Toml)]
#[toml(FromToml, rename_all = "kebab-case")]
struct Known {
    files: Vec<String>,
    allowed: Allowed,
    rule: String,
    way_out: String,
}

#[derive(Debug, toml_spanner::Toml)]
#[toml(FromToml)]
struct Listed {
    #[expect(dead_code, reason = "its type refuses other versions")]
    version: FormatVersion<1>,
    file: Vec<Known>,
}

impl Validate for Listed {
    fn validate(&self, faults: &mut Collector<'_, '_>) {
        for name in self.file.iter().flat_map(|known| &known.files) {
            if Glob::new(name).is_err() {
                faults.at("file", format!("{name:?} is no pattern"), None);
            }
        }
    }
}

/// NVIDIA's files by name.
struct Table {
    patterns: GlobSet,
    /// For each pattern, which entry it is of.
    entries: Vec<usize>,
    known: Vec<Known>,
}

impl Table {
    fn read() -> Result<Self, Error> {
        let wrong = |message: &dyn ToString| Error::Table(message.to_string());
        let listed: Listed =
            toml::read("manifests/cuda/redistribution.toml", TABLE).map_err(|faults| wrong(&faults))?;
        let (mut patterns, mut entries) = (GlobSetBuilder::new(), Vec::new());
        for (index, known) in listed.file.iter().enumerate() {
            for name in &known.files {
                patterns.add(Glob::new(name).map_err(|error| wrong(&error))?);
                entries.push(index);
            }
        }
        let patterns = patterns.build().map_err(|error| wrong(&error))?;
        Ok(Self { patterns, entries, known: listed.file })
    }

    /// What is known of a file of this name.
    fn of(&self, name: &str) -> Option<&Known> {
        self.patterns.matches(name).first().map(|index| &self.known[self.entries[*index]])
    }
}

/// Judges the image or images of a layout. `facts` gives those of an image that was built here.
///
/// # Errors
/// When one may not be handed on, or cannot be read.
pub fn check(layout: &Path, store: &Store, facts: impl Fn(&Digest) -> Option<Facts>) -> Result<(), Error> {
    let table = Table::read()?;
    let content = Content::read(layout)?;
    for document in &content.documents {
        if Kind::of(&MediaType::from(document.media_type.as_str())) != Some(Kind::Manifest) {
            continue;
        }
        let wrong = |error: serde_json::Error| oci::Error::Layout {
            path: layout.to_owned(),
            message: format!("its document {} is wrong: {error}", document.digest),
        };
        let manifest: ImageManifest = serde_json::from_slice(&document.bytes).map_err(wrong)?;
        let kind = manifest.config().media_type();
        if *kind != MediaType::ImageConfig && kind.as_ref() != DOCKER_CONFIG {
            continue;
        }
        let configuration: ImageConfiguration =
            serde_json::from_slice(&oci::raw(layout, manifest.config())?).map_err(wrong)?;
        let labels =
            configuration.config().as_ref().and_then(|config| config.labels().clone()).unwrap_or_default();
        let image = document.digest;
        if labels.get(LOCAL_ONLY_LABEL).is_some_and(|value| value == "true") {
            return Err(Error::LocalOnly { image });
        }
        let mut faults = of_labels(&table, labels.keys());
        faults.extend(facts(&image).iter().flat_map(|facts| of_facts(&table, facts)));
        for layer in manifest.layers() {
            let (path, digest) = oci::place(layout, layer)?;
            faults.extend(of_layer(&table, &path, digest, store)?);
        }
        // What the layers show is told once, and not again for a label.
        faults.sort();
        faults.dedup_by(|second, first| base(&second.file) == base(&first.file) && second.rule == first.rule);
        if !faults.is_empty() {
            return Err(Error::Files { image, faults });
        }
    }
    Ok(())
}

impl Known {
    fn fault(&self, file: &str, found: impl Into<String>) -> Fault {
        Fault {
            file: file.to_owned(),
            found: found.into(),
            rule: self.rule.clone(),
            way_out: self.way_out.clone(),
        }
    }
}

/// Libraries that a label says were cut.
fn of_labels<'a>(table: &Table, labels: impl Iterator<Item = &'a String>) -> Vec<Fault> {
    let pruned = labels.filter_map(|label| label.strip_prefix(PRUNED_LABEL)?.strip_prefix('.'));
    let known = pruned.filter_map(|name| Some((name, table.of(name)?)));
    known
        .filter(|(_, known)| known.allowed == Allowed::Unchanged)
        .map(|(name, known)| known.fault(name, "was changed, as a label of the image says"))
        .collect()
}

/// Libraries that are not as their makers hand them out.
fn of_facts(table: &Table, facts: &Facts) -> Vec<Fault> {
    let changed = facts.files.iter().filter_map(|(path, file)| Some((path, file.sha256, file.original?)));
    let known = changed.filter_map(|(path, now, before)| Some((path, now, before, table.of(base(path))?)));
    known
        .filter(|(.., known)| known.allowed == Allowed::Unchanged)
        .map(|(path, now, before, known)| known.fault(path, format!("was changed from {before} to {now}")))
        .collect()
}

fn of_layer(table: &Table, path: &Path, layer: Digest, store: &Store) -> Result<Vec<Fault>, Error> {
    let read = |source| oci::Error::Read { path: path.to_owned(), source };
    let (found, _) = digest_of(File::open(path).map_err(read)?).map_err(read)?;
    if found != layer {
        return Err(oci::Error::Damaged { path: path.to_owned(), expected: layer, found }.into());
    }
    let failed = |source| Error::Layer { layer, source };
    let packed = BufReader::with_capacity(1 << 18, File::open(path).map_err(read)?);
    let mut archive = Archive::new(decompress::decompress(packed).map_err(failed)?);
    let mut faults = Vec::new();
    for entry in archive.entries().map_err(failed)? {
        let mut entry = entry.map_err(failed)?;
        let named = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        let named = format!("/{}", named.trim_start_matches("./").trim_start_matches('/'));
        let by_name = table.of(base(&named));
        match entry.header().entry_type() {
            EntryType::Regular | EntryType::Continuous => {}
            // Another name of a file that is looked at under its own.
            EntryType::Link => {
                let forbidden = by_name.filter(|known| known.allowed == Allowed::No);
                faults.extend(forbidden.map(|known| known.fault(&named, "may not be handed on")));
                continue;
            }
            _ => continue,
        }
        let mut first = [0; ELF.len()];
        let is_elf = entry.size() >= ELF.len() as u64 && {
            entry.read_exact(&mut first).map_err(failed)?;
            first == ELF
        };
        let library =
            if is_elf { Some(Library::spool(&named, &first, &mut entry, layer, store)?) } else { None };
        let by_soname = library.as_ref().and_then(|library| table.of(library.soname.as_deref()?));
        let Some(known) = by_name.or(by_soname) else { continue };
        match (known.allowed, library) {
            (Allowed::No, _) => faults.push(known.fault(&named, "may not be handed on")),
            (Allowed::Unchanged, Some(library)) => {
                faults.extend(library.changed.map(|found| known.fault(&named, found)));
            }
            (Allowed::Unchanged | Allowed::Changed, _) => {}
        }
    }
    Ok(faults)
}

/// What a library says of itself.
struct Library {
    soname: Option<String>,
    /// How it shows that it was changed.
    changed: Option<String>,
}

impl Library {
    /// Reads a library out of a layer.
    fn spool(
        named: &str,
        first: &[u8],
        body: &mut impl Read,
        layer: Digest,
        store: &Store,
    ) -> Result<Self, Error> {
        let mut body = body.take(LARGEST);
        let mut incoming = store.incoming()?;
        let path: PathBuf = incoming.path().to_owned();
        let written = incoming.write_all(first).and_then(|()| io::copy(&mut body, &mut incoming).map(drop));
        written.and_then(|()| incoming.flush()).map_err(|source| Error::Layer { layer, source })?;
        let report = elf::map(&path).and_then(|bytes| elf::read(named, &bytes));
        if body.limit() == 0 {
            let changed = Some("is larger than any library that NVIDIA hands out".to_owned());
            return Ok(Self { soname: None, changed });
        }
        Ok(match report {
            Ok(Some(report)) => {
                let blank = report.gpu_code.iter().flat_map(|code| &code.elements).any(|one| one.is_blank);
                let changed = blank.then(|| "was changed: GPU code was cut out of it".to_owned());
                Self { soname: report.needs.soname, changed }
            }
            Ok(None) => Self { soname: None, changed: None },
            Err(error) => {
                Self { soname: None, changed: Some(format!("is not as NVIDIA hands it out: {error}")) }
            }
        })
    }
}

/// A file's name without its folders.
fn base(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::input::cuda;

    #[test]
    fn names_of_every_kind_are_known() {
        let table = Table::read().unwrap();
        for (name, expect) in [
            ("libcublasLt.so.13", Some(Allowed::Unchanged)),
            ("libcublasLt.so.13.1.0.3", Some(Allowed::Unchanged)),
            ("libcudart_static.a", Some(Allowed::Unchanged)),
            ("libdevice.10.bc", Some(Allowed::Unchanged)),
            ("libnvrtc-builtins.so.13.0", Some(Allowed::Unchanged)),
            ("libnccl.so.2", Some(Allowed::Changed)),
            ("libcuda.so.580.95.05", Some(Allowed::No)),
            ("libnvJitLink.so.13", Some(Allowed::No)),
            ("libnvfatbin.so", Some(Allowed::No)),
            ("libcufile.so.0", Some(Allowed::No)),
            ("libnvidia-ptxjitcompiler.so.1", Some(Allowed::No)),
            ("libcudadevices.so", None),
            ("libc.so.6", None),
            ("my-libcuda.so", None),
        ] {
            assert_eq!(table.of(name).map(|known| known.allowed), expect, "{name}");
        }
    }

    #[test]
    fn both_tables_say_the_same_of_libraries_that_we_build_in() {
        let table = Table::read().unwrap();
        for name in ["cudart", "cublasLt", "cublas", "nccl", "nvrtc"] {
            let library = cuda::library(name).unwrap();
            let listed = table.of(&format!("lib{name}.so.1")).unwrap();
            let may_change = cuda::may_change(library);
            assert_eq!(listed.allowed == Allowed::Changed, may_change, "{name}");
            assert_ne!(listed.allowed, Allowed::No, "{name}");
        }
    }
}
