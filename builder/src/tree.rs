//! The files of one layer, in memory, with their bodies by reference: what the layer writer turns into bytes.
//!
//! Responsible for order, for parents, and for conflicts between owners. Deliberately left out: modes other than
//! "executable or not", owners other than root and times, because nothing that an image holds depends on them.

use std::collections::BTreeMap;
use std::path::PathBuf;

use trainyard_spec::{Digest, Name};

/// A layer's files, sorted bytewise by path, each folder before what is in it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tree {
    entries: BTreeMap<String, Entry>,
}

/// What is at a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    /// A folder.
    Folder,
    /// A file.
    File(File),
}

/// A file of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    /// The input that it comes from.
    pub owner: Name,
    /// Where its bytes are on this machine.
    pub source: PathBuf,
    /// Digest of its bytes.
    pub digest: Digest,
    /// Number of its bytes.
    pub size: u64,
    /// Whether it may be run.
    pub executable: bool,
}

/// Two inputs that want the same path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("/{path} comes from input {first} and from input {second}")]
pub struct Conflict {
    /// The path, without the leading slash.
    pub path: String,
    /// Who had it first.
    pub first: String,
    /// Who wanted it too.
    pub second: Name,
}

impl Tree {
    /// Adds a file at the clean absolute `path`, and the folders above it.
    ///
    /// # Errors
    /// When something else is at the path, or a file is where a folder is needed.
    pub fn add(&mut self, path: &str, file: File) -> Result<(), Conflict> {
        let path = path.trim_start_matches('/');
        let conflict = |at: &str, entry: &Entry| Conflict {
            path: at.to_owned(),
            first: match entry {
                Entry::File(other) => other.owner.to_string(),
                Entry::Folder => "another (a folder)".to_owned(),
            },
            second: file.owner.clone(),
        };
        for (index, _) in path.match_indices('/') {
            match self.entries.entry(path[..index].to_owned()).or_insert(Entry::Folder) {
                Entry::Folder => {}
                other => return Err(conflict(&path[..index], other)),
            }
        }
        match self.entries.get(path) {
            None => {
                self.entries.insert(path.to_owned(), Entry::File(file));
                Ok(())
            }
            Some(Entry::File(same)) if same.digest == file.digest && same.executable == file.executable => {
                Ok(())
            }
            Some(other) => Err(conflict(path, other)),
        }
    }

    /// Paths without a leading slash, and what is there.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.entries.iter().map(|(path, entry)| (path.as_str(), entry))
    }

    /// The files alone.
    pub fn files(&self) -> impl Iterator<Item = (&str, &File)> {
        self.iter().filter_map(|(path, entry)| match entry {
            Entry::File(file) => Some((path, file)),
            Entry::Folder => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(owner: &str, body: &str) -> File {
        File {
            owner: owner.parse().unwrap(),
            source: PathBuf::new(),
            digest: Digest::of(body.as_bytes()),
            size: body.len() as u64,
            executable: false,
        }
    }

    #[test]
    fn folders_come_before_what_is_in_them() {
        let mut tree = Tree::default();
        tree.add("/usr/bin/b", file("x", "b")).unwrap();
        tree.add("/usr/bin-a", file("x", "a")).unwrap();
        tree.add("/a", file("x", "a")).unwrap();
        let paths: Vec<_> = tree.iter().map(|(path, _)| path).collect();
        assert_eq!(paths, ["a", "usr", "usr/bin", "usr/bin-a", "usr/bin/b"]);
    }

    #[test]
    fn conflicts_name_both_owners() {
        let mut tree = Tree::default();
        tree.add("/usr/bin/b", file("x", "b")).unwrap();
        tree.add("/usr/bin/b", file("y", "b")).expect("the same file twice is no conflict");
        let conflict = tree.add("/usr/bin/b", file("y", "c")).unwrap_err();
        assert_eq!(conflict.to_string(), "/usr/bin/b comes from input x and from input y");
        let conflict = tree.add("/usr/bin/b/c", file("y", "c")).unwrap_err();
        assert_eq!((conflict.path.as_str(), conflict.first.as_str()), ("usr/bin/b", "x"));
        assert!(tree.add("/usr", file("y", "c")).is_err());
    }
}
