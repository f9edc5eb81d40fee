//! Where the loader of the GNU C library finds shared objects in an image: the folders that it searches, what they hold,
//! and the cache that it reads instead of them.
//!
//! The search follows ld.so(8): a name with a slash is a path; any other is looked for in `DT_RPATH` where there is no
//! `DT_RUNPATH`, `LD_LIBRARY_PATH`, `DT_RUNPATH`, the folders of `/etc/ld.so.conf`, and the loader's own. The cache has the
//! form that ldconfig writes since glibc 2.32. Left out: subfolders for kinds of processors (`glibc-hwcaps`), which no
//! package in use here has.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::io;

use globset::GlobBuilder;
use trainyard_spec::image::Platform;

use crate::elf::{self, Kind, Report};
use crate::tree::{self, Tree};

/// Where the cache lies.
pub(crate) const CACHE: &str = "etc/ld.so.cache";
/// Where the folders stand that are searched beside the loader's own.
pub(crate) const CONFIGURATION: &str = "etc/ld.so.conf";
/// Largest file of the configuration.
const LARGEST_CONFIGURATION: u64 = 64 << 10;
/// Most files of the configuration that one may name the next.
const DEEPEST_CONFIGURATION: usize = 4;

/// The ELF files of an image, by path without a leading slash.
pub(crate) type Objects = BTreeMap<String, Report>;

/// Reads every ELF file of an image.
///
/// # Errors
/// When one is damaged, or holds GPU code in a form that is not known.
pub(crate) fn objects(tree: &Tree) -> Result<Objects, elf::Error> {
    let mut objects = Objects::new();
    for (path, _, file) in tree.files() {
        let bytes = elf::map(&file.source)?;
        if let Some(report) = elf::read(path, &bytes)? {
            objects.insert(path.to_owned(), report);
        }
    }
    Ok(objects)
}

/// The Debian name of a platform's folder of libraries.
pub(crate) const fn multiarch(platform: Platform) -> &'static str {
    match platform {
        Platform::Amd64 => "x86_64-linux-gnu",
        Platform::Arm64 => "aarch64-linux-gnu",
    }
}

/// Word size and processor of a platform's ELF files, and how the cache marks them.
const fn marks(platform: Platform) -> (u8, u16, u32) {
    match platform {
        Platform::Amd64 => (64, 62, 0x0303),
        Platform::Arm64 => (64, 183, 0x0a03),
    }
}

/// How an image's programs find libraries.
#[derive(Debug)]
pub(crate) struct Loader<'a> {
    tree: &'a Tree,
    objects: &'a Objects,
    platform: Platform,
    /// Folders of the environment, searched first.
    environment: Vec<String>,
    /// Folders that are searched for everything, in order.
    folders: Vec<String>,
}

impl<'a> Loader<'a> {
    /// The loader of an image whose programs start with this `LD_LIBRARY_PATH`.
    ///
    /// # Errors
    /// When the image's `/etc/ld.so.conf` cannot be read.
    pub(crate) fn new(
        tree: &'a Tree,
        objects: &'a Objects,
        platform: Platform,
        environment: Option<&str>,
    ) -> io::Result<Self> {
        let environment = environment.unwrap_or_default().split([':', ';']).filter(|part| !part.is_empty());
        let mut folders = Vec::new();
        configured(tree, CONFIGURATION, DEEPEST_CONFIGURATION, &mut folders)?;
        let multiarch = multiarch(platform);
        for own in ["lib", "usr/lib"] {
            folders.push(format!("{own}/{multiarch}"));
        }
        folders.extend(["lib64", "usr/lib64", "lib", "usr/lib"].map(str::to_owned));
        // Links lead several names to one folder.
        let mut seen = BTreeSet::new();
        let folders = folders
            .iter()
            .filter_map(|folder| tree.resolve(folder))
            .filter(|folder| seen.insert(folder.clone()));
        Ok(Self {
            tree,
            objects,
            platform,
            environment: environment.map(str::to_owned).collect(),
            folders: folders.collect(),
        })
    }

    /// The image's ELF files.
    pub(crate) const fn objects(&self) -> &'a Objects {
        self.objects
    }

    /// The path, links not followed, at which a file of the image finds a library.
    pub(crate) fn find(&self, library: &str, from: &str) -> Option<String> {
        if library.contains('/') {
            return self.fits(library.trim_start_matches('/'));
        }
        let needs = self.objects.get(from).map(|report| &report.needs);
        let origin = from.rsplit_once('/').map_or("", |(folder, _)| folder);
        let own = |written: Option<&str>| -> Vec<String> {
            let folders = written.unwrap_or_default().split(':').filter(|folder| !folder.is_empty());
            folders
                .map(|folder| {
                    folder.replace("${ORIGIN}", "$ORIGIN").replace("$ORIGIN", &format!("/{origin}"))
                })
                .collect()
        };
        let runpath = needs.and_then(|needs| needs.runpath.as_deref());
        let rpath = needs.and_then(|needs| needs.rpath.as_deref()).filter(|_| runpath.is_none());
        own(rpath)
            .iter()
            .chain(&self.environment)
            .chain(&own(runpath))
            .chain(&self.folders)
            .find_map(|folder| self.fits(&format!("{}/{library}", folder.trim_matches('/'))))
    }

    /// The path itself, if it leads to an ELF file of the platform.
    fn fits(&self, path: &str) -> Option<String> {
        let (bits, machine, _) = marks(self.platform);
        let report = self.objects.get(&self.tree.resolve(path)?)?;
        ((report.bits, report.machine) == (bits, machine)).then(|| path.to_owned())
    }

    /// What the folders hold, as the cache lists it: for each name the first path that has it.
    fn listed(&self) -> BTreeMap<Name, String> {
        let mut listed = BTreeMap::new();
        for folder in &self.folders {
            for (name, path) in self.tree.children(folder) {
                let is_named = (name.starts_with("lib") || name.starts_with("ld-")) && name.contains(".so");
                if !is_named || self.fits(path).is_none() {
                    continue;
                }
                let Some(target) = self.tree.resolve(path) else { continue };
                let Some(report) =
                    self.objects.get(&target).filter(|report| report.kind != Kind::DebugInformation)
                else {
                    continue;
                };
                // A file is asked for by the name that it gives itself, where a link or it itself has that name.
                let soname = report.needs.soname.as_deref().unwrap_or(name);
                let is_link = *path != target;
                let key = if is_link { name } else { soname };
                let value = format!("{folder}/{key}");
                let value = if self.fits(&value).is_some() { value } else { path.to_owned() };
                listed.entry(Name(key.to_owned())).or_insert(value);
            }
        }
        listed
    }

    /// The cache's bytes.
    ///
    /// glibc's dl-cache.h: magic and version; numbers of entries and bytes of names; a byte for the byte order; a place for
    /// extensions, which there are none of; an entry each of marks, offsets of name and path from the start, and kernel and
    /// processor, which are left zero; the names. Entries go from the greatest name to the least.
    pub(crate) fn cache(&self) -> Vec<u8> {
        const LITTLE_ENDIAN: u8 = 2;
        const HEADER: usize = 48;
        const ENTRY: usize = 24;
        let listed = self.listed();
        let (_, _, mark) = marks(self.platform);
        let names_at = HEADER + listed.len() * ENTRY;
        let mut names = Vec::new();
        let mut entries = Vec::new();
        let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX).to_le_bytes();
        let mut put = |text: &str| {
            let at = number(names_at + names.len());
            names.extend_from_slice(text.as_bytes());
            names.push(0);
            at
        };
        for (name, path) in listed.iter().rev() {
            let (key, value) = (put(&name.0), put(&format!("/{path}")));
            entries.extend_from_slice(&mark.to_le_bytes());
            entries.extend_from_slice(&key);
            entries.extend_from_slice(&value);
            entries.extend_from_slice(&[0; 12]);
        }
        let mut cache = b"glibc-ld.so.cache1.1".to_vec();
        cache.extend(number(listed.len()));
        cache.extend(number(names.len()));
        cache.push(LITTLE_ENDIAN);
        cache.resize(HEADER, 0);
        cache.extend(entries);
        cache.extend(names);
        cache
    }
}

/// The name of a library, in the order of the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Name(String);

impl Ord for Name {
    /// Runs of digits by the number that they are, which is greater than any other character.
    fn cmp(&self, other: &Self) -> Ordering {
        let (mut left, mut right) = (self.0.as_bytes(), other.0.as_bytes());
        loop {
            let digits = |text: &[u8]| text.iter().take_while(|byte| byte.is_ascii_digit()).count();
            let order = match (digits(left), digits(right)) {
                (0, 0) => match (left.split_first(), right.split_first()) {
                    (Some((one, one_rest)), Some((other, other_rest))) if one == other => {
                        (left, right) = (one_rest, other_rest);
                        continue;
                    }
                    (one, other) => one.map(|(byte, _)| byte).cmp(&other.map(|(byte, _)| byte)),
                },
                (_, 0) => Ordering::Greater,
                (0, _) => Ordering::Less,
                (one, other) => {
                    let strip = |digits: &[u8]| -> Vec<u8> {
                        digits.iter().skip_while(|byte| **byte == b'0').copied().collect()
                    };
                    let (a, b) = (strip(&left[..one]), strip(&right[..other]));
                    (left, right) = (&left[one..], &right[other..]);
                    a.len().cmp(&b.len()).then(a.cmp(&b))
                }
            };
            if order != Ordering::Equal {
                return order;
            }
            if left.is_empty() && right.is_empty() {
                // `liba.so.1` and `liba.so.01`.
                return self.0.cmp(&other.0);
            }
        }
    }
}

impl PartialOrd for Name {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The folders that a file of the configuration and those that it includes name (ldconfig(8)).
fn configured(tree: &Tree, path: &str, deepest: usize, folders: &mut Vec<String>) -> io::Result<()> {
    let Some(tree::Kind::File(file)) =
        tree.resolve(path).and_then(|path| tree.get(&path)).map(|node| &node.kind)
    else {
        return Ok(());
    };
    let refuse = |message: &str| io::Error::other(format!("/{path}: {message}"));
    if file.size > LARGEST_CONFIGURATION || deepest == 0 {
        return Err(refuse("it is larger than 64 KiB, or files include one another"));
    }
    for line in fs_err::read_to_string(&file.source)?.lines() {
        let line = line.split('#').next().unwrap_or_default().trim();
        let Some(patterns) = line.strip_prefix("include").filter(|rest| rest.starts_with([' ', '\t'])) else {
            if line.starts_with('/') {
                folders.push(line.trim_matches('/').to_owned());
            }
            continue;
        };
        for pattern in patterns.split_whitespace() {
            let base = path.rsplit_once('/').map_or("", |(folder, _)| folder);
            let pattern = match pattern.strip_prefix('/') {
                Some(pattern) => pattern.to_owned(),
                None => format!("{base}/{pattern}"),
            };
            let glob = GlobBuilder::new(&pattern).literal_separator(true).build();
            let glob = glob.map_err(|error| refuse(&error.to_string()))?.compile_matcher();
            let included: Vec<String> =
                tree.iter().map(|(path, _)| path.to_owned()).filter(|path| glob.is_match(path)).collect();
            for path in included {
                configured(tree, &path, deepest - 1, folders)?;
            }
        }
    }
    Ok(())
}
