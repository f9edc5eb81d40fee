//! Keeping only what an image needs: its own programs and files, the shared objects that these are linked to or said to
//! load, what the manifest keeps by name, and the licences of all that stays.
//!
//! Starting points are the entrypoint and every file of cargo and files inputs. From each ELF file the search goes on to
//! its loader and libraries, from each script to its interpreter, and over every link on the way. Left out: what programs
//! load without their file saying so; [`trainyard_spec::image::Closure::dlopen`] is for that.

use std::collections::BTreeSet;
use std::io::{self, Read as _};

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use serde::{Deserialize, Serialize};
use trainyard_spec::image::{Closure, ImageManifest};

use crate::loader::{Loader, Objects};
use crate::tree::{Kind, Owner, Tree};

/// Files that stay with any file of their package: what its licence asks to be handed on with it.
const LICENCES: [&str; 3] =
    ["usr/share/doc/*/copyright", "usr/share/licenses/**", "usr/share/doc/*/LICENSE*"];
/// Files by which people and scanners know a distribution.
const IDENTITY: [&str; 2] = ["etc/os-release", "usr/lib/os-release"];
/// Longest first line of a script (execve(2)).
const LONGEST_FIRST_LINE: u64 = 256;

/// A file that is not in the image although an input has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct LeftOut {
    /// Its path.
    pub path: String,
    /// Bytes.
    pub size: u64,
    /// Whose it is.
    pub owner: String,
    /// Why it is not needed.
    pub why: Why,
}

/// Why a file is not needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Why {
    /// It is a library, and nothing that stays is linked to it or said to load it.
    NotLoaded,
    /// It is a program, and nothing that stays names it.
    NotRun,
    /// It is neither, and the manifest does not keep it.
    NotKept,
}

/// Why it cannot be known what an image needs.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A library that is said to be loaded is not there.
    #[error("closure.dlopen names {library:?}, which is in none of the folders that the loader searches{}", and(.near))]
    NoLibrary {
        /// The library.
        library: String,
        /// Libraries whose names begin in the same way.
        near: Vec<String>,
    },
    /// A pattern fits nothing.
    #[error("closure.keep names {pattern:?}, which fits nothing in the image")]
    NothingKept {
        /// The pattern.
        pattern: String,
    },
    /// A pattern is none.
    #[error("closure.keep has {pattern:?}: {message}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        message: String,
    },
    /// A file cannot be read.
    #[error("cannot read {path:?} of the image: {source}")]
    Read {
        /// Its path in the image.
        path: String,
        /// What the system said.
        source: io::Error,
    },
}

fn and(names: &[String]) -> String {
    if names.is_empty() { String::new() } else { format!("; there are {}", names.join(", ")) }
}

impl Error {
    /// The way out.
    pub const fn hint(&self) -> Option<&'static str> {
        match self {
            Self::NoLibrary { .. } => Some(
                "write the name as programs ask for it, such as \"libnccl.so.2\", and add the input that has it",
            ),
            Self::NothingKept { .. } => {
                Some("write an absolute path or pattern, such as \"/etc/ssl/**\", or leave it out")
            }
            Self::Pattern { .. } | Self::Read { .. } => None,
        }
    }
}

/// Removes from `tree` what is not needed, `also` being so, and tells what that was, the largest first.
///
/// # Errors
/// When the manifest keeps or loads what is not there.
pub(crate) fn keep_needed(
    manifest: &ImageManifest,
    closure: &Closure,
    also: &[String],
    tree: &mut Tree,
    loader: &Loader<'_>,
) -> Result<Vec<LeftOut>, Error> {
    let objects = loader.objects();
    let mut needed = Needed { tree, objects, loader, kept: BTreeSet::new(), ahead: Vec::new() };
    for (path, node) in tree.iter() {
        // What belongs to no package is the image's own: its programs and files, and what the builder writes.
        if node.owner.as_ref().is_some_and(|owner| owner.package.is_none()) {
            needed.path(path);
        }
    }
    for path in also {
        needed.path(path);
    }
    if let Some(program) = manifest.config.entrypoint.first() {
        needed.path(program);
    }
    for library in &closure.dlopen {
        let path = loader.find(library, "").ok_or_else(|| no_library(library, objects))?;
        needed.path(&path);
    }
    for pattern in &closure.keep {
        let glob = patterns(&[pattern.trim_start_matches('/')])
            .map_err(|error| Error::Pattern { pattern: pattern.clone(), message: error.to_string() })?;
        let mut any = false;
        for (path, _) in tree.iter().filter(|(path, _)| glob.is_match(path)) {
            needed.path(path);
            any = true;
        }
        if !any {
            return Err(Error::NothingKept { pattern: pattern.clone() });
        }
    }
    let mut kept = needed.all()?;
    let own = |patterns: &GlobSet, owners: Option<&BTreeSet<Owner>>| -> Vec<String> {
        tree.iter()
            .filter(|(path, node)| {
                let stays = |owner: &Owner| owners.is_none_or(|owners| owners.contains(owner));
                patterns.is_match(path) && node.owner.as_ref().is_some_and(stays)
            })
            .map(|(path, _)| path.to_owned())
            .collect()
    };
    // These patterns are fixed and sound.
    let owners = kept.iter().filter_map(|path| tree.get(path)?.owner.clone()).collect();
    kept.extend(own(&patterns(&LICENCES).unwrap_or_default(), Some(&owners)));
    kept.extend(own(&patterns(&IDENTITY).unwrap_or_default(), None));
    let mut left_out: Vec<LeftOut> = tree
        .files()
        .filter(|(path, ..)| !kept.contains(*path))
        .map(|(path, node, file)| LeftOut {
            path: format!("/{path}"),
            size: file.size,
            owner: node.owner.as_ref().map(ToString::to_string).unwrap_or_default(),
            why: match objects.get(path).map(|report| report.kind) {
                Some(crate::elf::Kind::SharedObject) => Why::NotLoaded,
                Some(crate::elf::Kind::Program | crate::elf::Kind::StaticProgram) => Why::NotRun,
                _ => Why::NotKept,
            },
        })
        .collect();
    left_out.sort_by(|one, other| other.size.cmp(&one.size).then_with(|| one.path.cmp(&other.path)));
    // A link of the root that leads nowhere now is of no use.
    let stale: BTreeSet<_> = kept
        .iter()
        .filter(|path| {
            !path.contains('/') && tree.get(path).is_some_and(|node| matches!(node.kind, Kind::Symlink(_)))
        })
        .filter(|path| {
            !kept.iter().any(|other| {
                tree.resolve(path).is_some_and(|target| other.starts_with(&format!("{target}/")))
            })
        })
        .cloned()
        .collect();
    kept.retain(|path| !stale.contains(path));
    // Folders stay with what is in them; a folder that is kept by name stays empty, too.
    tree.retain(|path, node| kept.contains(path) && (node.kind != Kind::Folder || node.owner.is_some()));
    Ok(left_out)
}

fn patterns(patterns: &[&str]) -> Result<GlobSet, globset::Error> {
    let mut set = GlobSetBuilder::new();
    for pattern in patterns {
        set.add(GlobBuilder::new(pattern).literal_separator(true).build()?);
    }
    set.build()
}

fn no_library(library: &str, objects: &Objects) -> Error {
    let stem = library.split('.').next().unwrap_or(library);
    let names = objects.keys().filter_map(|path| path.rsplit('/').next());
    let near: BTreeSet<_> =
        names.filter(|name| name.split('.').next() == Some(stem)).map(str::to_owned).collect();
    Error::NoLibrary { library: library.to_owned(), near: near.into_iter().collect() }
}

/// The search for what is needed.
struct Needed<'a> {
    tree: &'a Tree,
    objects: &'a Objects,
    loader: &'a Loader<'a>,
    kept: BTreeSet<String>,
    /// Files that are kept and have not been looked into.
    ahead: Vec<String>,
}

impl Needed<'_> {
    /// Keeps what is at a path, with every link on the way to it.
    fn path(&mut self, path: &str) {
        let mut links = Vec::new();
        let target = self.tree.resolve_through(path, |link| links.push(link.to_owned()));
        self.kept.extend(links);
        if let Some(target) = target
            && self.kept.insert(target.clone())
        {
            self.ahead.push(target);
        }
    }

    /// Follows all files to what they need.
    fn all(mut self) -> Result<BTreeSet<String>, Error> {
        while let Some(path) = self.ahead.pop() {
            let Some(report) = self.objects.get(&path) else {
                if let Some(interpreter) = self.interpreter(&path)? {
                    self.path(&interpreter);
                }
                continue;
            };
            if let Some(interpreter) = &report.interpreter {
                self.path(interpreter);
            }
            // What is found nowhere is the driver's, or a fault that is told when the whole image is read.
            let found: Vec<_> = report
                .needs
                .libraries
                .iter()
                .filter_map(|library| self.loader.find(library, &path))
                .collect();
            for library in found {
                self.path(&library);
            }
        }
        Ok(self.kept)
    }

    /// The interpreter that a script names.
    fn interpreter(&self, path: &str) -> Result<Option<String>, Error> {
        let Some(Kind::File(file)) = self.tree.get(path).map(|node| &node.kind) else { return Ok(None) };
        let mut first = Vec::new();
        let open = fs_err::File::open(&file.source);
        open.and_then(|file| file.take(LONGEST_FIRST_LINE).read_to_end(&mut first))
            .map_err(|source| Error::Read { path: path.to_owned(), source })?;
        let line = first.split(|byte| *byte == b'\n').next().and_then(|line| line.strip_prefix(b"#!"));
        let text = line.and_then(|line| std::str::from_utf8(line).ok());
        Ok(text.and_then(|text| text.split_whitespace().next()).map(str::to_owned))
    }
}
