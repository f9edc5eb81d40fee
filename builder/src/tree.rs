//! What an image holds, in memory, with the bodies of files by reference: what layers are written from.
//!
//! Responsible for order, for parents, for where things lie once /bin, /sbin and /lib are links into /usr, and for
//! conflicts between owners. Deliberately left out: times and the names of users, because nothing that an image does
//! depends on them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use trainyard_spec::{Digest, Name};

/// What is at which path, sorted bytewise by path, each folder before what is in it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tree {
    nodes: BTreeMap<String, Node>,
    usr_merged: bool,
}

/// What is at a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Whose it is; none for a folder that is only there for what is in it.
    pub owner: Option<Owner>,
    /// Who may do what with it.
    pub meta: Meta,
    /// A folder, a file or a link.
    pub kind: Kind,
}

/// Who put something into an image.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Owner {
    /// The manifest's input.
    pub input: Name,
    /// The package of that input, where it has packages.
    pub package: Option<String>,
}

impl std::fmt::Display for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.package {
            Some(package) => write!(f, "package {package} of input {}", self.input),
            None => write!(f, "input {}", self.input),
        }
    }
}

/// Permissions, and what else the system keeps of a file beside its body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Meta {
    /// Permission bits, with set-user-id, set-group-id and the sticky bit.
    pub mode: u32,
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Extended attributes, such as `security.capability`.
    pub xattrs: BTreeMap<String, Vec<u8>>,
}

impl Meta {
    /// Root's, with these permissions.
    pub const fn mode(mode: u32) -> Self {
        Self { mode, uid: 0, gid: 0, xattrs: BTreeMap::new() }
    }
}

/// A folder, a file or a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A folder.
    Folder,
    /// A file.
    File(File),
    /// A symbolic link, and what it says.
    Symlink(String),
}

/// A file's body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    /// Where its bytes are on this machine.
    pub source: PathBuf,
    /// Digest of its bytes.
    pub digest: Digest,
    /// Number of its bytes.
    pub size: u64,
    /// Files of one owner with the same name here are one file with several paths: hard links.
    pub hard_link: Option<String>,
}

/// Two owners that want the same path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("/{path} comes from {first} and from {second}{}", why.as_deref().unwrap_or_default())]
pub struct Conflict {
    /// The path, without the leading slash.
    pub path: String,
    /// Who had it first.
    pub first: String,
    /// Who wanted it too.
    pub second: String,
    /// In what the two differ, where that is not plain.
    pub why: Option<Box<str>>,
}

/// Folders of the root that are links into /usr in every distribution of today.
const MERGED: [&str; 5] = ["bin", "lib", "lib32", "lib64", "sbin"];
const FOLDER_MODE: u32 = 0o755;

impl Tree {
    /// An empty tree whose /bin, /sbin, /lib, /lib32 and /lib64 are links into /usr: what packages put there is moved to
    /// where the links lead, so that no two paths name one place.
    pub fn usr_merged() -> Self {
        Self { usr_merged: true, ..Self::default() }
    }

    /// Adds something at the clean absolute `path`, and the folders above it.
    ///
    /// # Errors
    /// When something else is at the path, or a file or link is where a folder is needed.
    pub fn add(&mut self, path: &str, owner: Owner, meta: Meta, kind: Kind) -> Result<(), Conflict> {
        let path = path.trim_start_matches('/');
        let (path, kind) = match self.usr_merged {
            true => match merge(path, kind) {
                Some(moved) => moved,
                None => return Ok(()),
            },
            false => (path.to_owned(), kind),
        };
        for (index, _) in path.match_indices('/') {
            let folder = Node { owner: None, meta: Meta::mode(FOLDER_MODE), kind: Kind::Folder };
            let above = self.nodes.entry(path[..index].to_owned()).or_insert(folder);
            if above.kind != Kind::Folder {
                return Err(conflict(&path[..index], above, &owner, None));
            }
        }
        let new = Node { owner: Some(owner.clone()), meta, kind };
        let Some(old) = self.nodes.get_mut(&path) else {
            self.nodes.insert(path, new);
            return Ok(());
        };
        match (&old.owner, same(old, &new)) {
            // What was only there for what is in it is now told how it shall be.
            (None, _) if new.kind == Kind::Folder => *old = new,
            (_, true) => {}
            _ => {
                let why = difference(old, &new);
                return Err(conflict(&path, old, &owner, why));
            }
        }
        Ok(())
    }

    /// Puts something at a path in place of what is there; a folder in place of a folder keeps what is in it. Where links of
    /// the root lead into /usr, later paths follow them.
    pub fn overlay(&mut self, path: &str, owner: Owner, meta: Meta, kind: Kind) {
        for (index, _) in path.match_indices('/') {
            let folder = Node { owner: None, meta: Meta::mode(FOLDER_MODE), kind: Kind::Folder };
            let above = self.nodes.entry(path[..index].to_owned()).or_insert_with(|| folder.clone());
            if above.kind != Kind::Folder {
                *above = folder;
            }
        }
        if kind != Kind::Folder {
            self.remove(path);
        }
        if path == "lib" {
            self.usr_merged = matches!(&kind, Kind::Symlink(target) if target.trim_matches('/') == "usr/lib");
        }
        self.nodes.insert(path.to_owned(), Node { owner: Some(owner), meta, kind });
    }

    /// Removes what is at a path, and below it.
    pub fn remove(&mut self, path: &str) {
        let inside = format!("{path}/");
        let below: Vec<_> = self
            .nodes
            .range(inside.clone()..)
            .map(|(path, _)| path.clone())
            .take_while(|path| path.starts_with(&inside))
            .collect();
        self.nodes.remove(path);
        for path in below {
            self.nodes.remove(&path);
        }
    }

    /// Adds a link of the root into /usr, which nothing but a link may lie in the way of.
    ///
    /// # Errors
    /// When something is at the path.
    pub fn link_root(&mut self, name: &str, owner: Owner, target: &str) -> Result<(), Conflict> {
        let new = Node {
            owner: Some(owner.clone()),
            meta: Meta::mode(0o777),
            kind: Kind::Symlink(target.to_owned()),
        };
        match self.nodes.get(name) {
            Some(old) if !same(old, &new) => Err(conflict(name, old, &owner, difference(old, &new))),
            _ => {
                self.nodes.insert(name.to_owned(), new);
                Ok(())
            }
        }
    }

    /// Paths without a leading slash, and what is there.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Node)> {
        self.nodes.iter().map(|(path, node)| (path.as_str(), node))
    }

    /// The files alone.
    pub fn files(&self) -> impl Iterator<Item = (&str, &Node, &File)> {
        self.iter().filter_map(|(path, node)| match &node.kind {
            Kind::File(file) => Some((path, node, file)),
            Kind::Folder | Kind::Symlink(_) => None,
        })
    }

    /// Lets `change` look at and change each file that has an owner.
    ///
    /// # Errors
    /// The first of `change`'s.
    pub fn change_files<E>(
        &mut self,
        mut change: impl FnMut(&str, &Owner, &mut File) -> Result<(), E>,
    ) -> Result<(), E> {
        for (path, node) in &mut self.nodes {
            if let (Some(owner), Kind::File(file)) = (&node.owner, &mut node.kind) {
                change(path, owner, file)?;
            }
        }
        Ok(())
    }

    /// What is at a clean path, links not followed.
    pub fn get(&self, path: &str) -> Option<&Node> {
        self.nodes.get(path.trim_start_matches('/'))
    }

    /// Names and paths of what is in a folder, from the first name to the last.
    pub fn children(&self, folder: &str) -> impl Iterator<Item = (&str, &str)> {
        let inside = if folder.is_empty() { String::new() } else { format!("{folder}/") };
        let start = inside.clone();
        let below = self.nodes.range(start..).map(|(path, _)| path.as_str());
        below
            .map_while(move |path| Some((path.strip_prefix(inside.as_str())?, path)))
            .filter(|(name, _)| !name.contains('/'))
    }

    /// Where a path of the image leads, through any links, without a leading slash: as the kernel would resolve it. None
    /// where nothing is, or links lead in a circle.
    pub fn resolve(&self, path: &str) -> Option<String> {
        self.resolve_through(path, |_| {})
    }

    /// As [`Tree::resolve`], and tells the path of every link on the way.
    pub fn resolve_through(&self, path: &str, mut through: impl FnMut(&str)) -> Option<String> {
        // As many as Linux follows (path_resolution(7)).
        let mut links = 40;
        let mut at: Vec<String> = Vec::new();
        let mut rest: Vec<String> = parts(path).rev().map(str::to_owned).collect();
        while let Some(part) = rest.pop() {
            if part == ".." {
                at.pop();
                continue;
            }
            at.push(part);
            let node = self.nodes.get(&at.join("/"))?;
            if let Kind::Symlink(target) = &node.kind {
                through(&at.join("/"));
                links -= 1;
                if links == 0 {
                    return None;
                }
                at.pop();
                if target.starts_with('/') {
                    at.clear();
                }
                rest.extend(parts(target).rev().map(str::to_owned));
            }
        }
        Some(at.join("/"))
    }

    /// Splits the tree by owner: what `place` gives the same number lies in the same tree, together with the folders above
    /// it. Folders that nobody owns lie where something in them does.
    pub fn split(&self, place: impl Fn(&Owner, &str) -> usize) -> BTreeMap<usize, Self> {
        let mut trees: BTreeMap<usize, Self> = BTreeMap::new();
        for (path, node) in &self.nodes {
            let Some(owner) = &node.owner else { continue };
            let tree = trees.entry(place(owner, path)).or_default();
            for (index, _) in path.match_indices('/') {
                if let Some(above) = self.nodes.get(&path[..index]) {
                    tree.nodes.entry(path[..index].to_owned()).or_insert_with(|| above.clone());
                }
            }
            tree.nodes.insert(path.clone(), node.clone());
        }
        trees
    }

    /// Keeps what `keep` says, and the folders above it.
    pub fn retain(&mut self, keep: impl Fn(&str, &Node) -> bool) {
        let mut kept = BTreeSet::new();
        for (path, _) in self.nodes.iter().filter(|(path, node)| keep(path, node)) {
            kept.extend(path.match_indices('/').map(|(index, _)| path[..index].to_owned()));
            kept.insert(path.clone());
        }
        self.nodes.retain(|path, _| kept.contains(path));
    }
}

fn parts(path: &str) -> impl DoubleEndedIterator<Item = &str> {
    path.split('/').filter(|part| !matches!(*part, "" | "."))
}

fn same(old: &Node, new: &Node) -> bool {
    let body = match (&old.kind, &new.kind) {
        (Kind::File(old), Kind::File(new)) => old.digest == new.digest,
        (old, new) => old == new,
    };
    body && old.meta == new.meta
}

fn difference(old: &Node, new: &Node) -> Option<String> {
    let of = |node: &Node| match &node.kind {
        Kind::Folder => "a folder".to_owned(),
        Kind::File(_) => "a file".to_owned(),
        Kind::Symlink(target) => format!("a link to {target}"),
    };
    if std::mem::discriminant(&old.kind) != std::mem::discriminant(&new.kind)
        || matches!(old.kind, Kind::Symlink(_))
    {
        return Some(format!(": {} and {}", of(old), of(new)));
    }
    let rights = |node: &Node| format!("{:04o} {}:{}", node.meta.mode, node.meta.uid, node.meta.gid);
    (old.meta != new.meta).then(|| format!(", with {} and {}", rights(old), rights(new)))
}

fn conflict(path: &str, old: &Node, second: &Owner, why: Option<String>) -> Conflict {
    let first = old.owner.as_ref().map_or_else(|| "another (a folder)".to_owned(), ToString::to_string);
    Conflict { path: path.to_owned(), first, second: second.to_string(), why: why.map(Box::from) }
}

/// Where something lies once /lib and the like are links into /usr; none for those links themselves.
fn merge(path: &str, kind: Kind) -> Option<(String, Kind)> {
    let (first, rest) = path.split_once('/').unwrap_or((path, ""));
    if !MERGED.contains(&first) {
        return Some((path.to_owned(), kind));
    }
    if rest.is_empty() {
        return match kind {
            Kind::Symlink(_) => None,
            kind => Some((format!("usr/{first}"), kind)),
        };
    }
    // A link that goes up has another way to go from its new place; from the root the way is the same.
    let kind = match kind {
        Kind::Symlink(target) if !target.starts_with('/') && target.contains("..") => {
            let mut at: Vec<&str> = parts(path).collect();
            at.pop();
            for part in parts(&target) {
                match part {
                    ".." => drop(at.pop()),
                    part => at.push(part),
                }
            }
            Kind::Symlink(format!("/{}", at.join("/")))
        }
        kind => kind,
    };
    Some((format!("usr/{path}"), kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(input: &str) -> Owner {
        Owner { input: input.parse().unwrap(), package: None }
    }

    fn file(body: &str) -> Kind {
        let digest = Digest::of(body.as_bytes());
        Kind::File(File { source: PathBuf::new(), digest, size: body.len() as u64, hard_link: None })
    }

    fn add(tree: &mut Tree, path: &str, input: &str, kind: Kind) -> Result<(), String> {
        tree.add(path, owner(input), Meta::mode(0o644), kind).map_err(|conflict| conflict.to_string())
    }

    fn paths(tree: &Tree) -> Vec<&str> {
        tree.iter().map(|(path, _)| path).collect()
    }

    fn link(target: &str) -> Kind {
        Kind::Symlink(target.to_owned())
    }

    #[test]
    fn folders_come_before_what_is_in_them() {
        let mut tree = Tree::default();
        for path in ["/usr/bin/b", "/usr/bin-a", "/a"] {
            add(&mut tree, path, "x", file(path)).unwrap();
        }
        assert_eq!(paths(&tree), ["a", "usr", "usr/bin", "usr/bin-a", "usr/bin/b"]);
    }

    #[test]
    fn conflicts_name_both_owners() {
        let mut tree = Tree::default();
        add(&mut tree, "/usr/bin/b", "x", file("b")).unwrap();
        add(&mut tree, "/usr/bin/b", "y", file("b")).expect("the same file twice is no conflict");
        add(&mut tree, "/usr/bin", "y", Kind::Folder).expect("a folder that nobody had told of");
        for (path, kind, expect) in [
            ("/usr/bin/b", file("c"), "/usr/bin/b comes from input x and from input z"),
            ("/usr/bin/b/c", file("c"), "/usr/bin/b comes from input x and from input z"),
            (
                "/usr/bin/b",
                link("c"),
                "/usr/bin/b comes from input x and from input z: a file and a link to c",
            ),
            ("/usr/bin", file("c"), "/usr/bin comes from input y and from input z: a folder and a file"),
        ] {
            assert_eq!(add(&mut tree, path, "z", kind).unwrap_err(), expect);
        }
        let conflict = tree.add("/usr/bin/b", owner("z"), Meta::mode(0o4755), file("b")).unwrap_err();
        assert!(conflict.to_string().ends_with("input z, with 0644 0:0 and 4755 0:0"), "{conflict}");
    }

    #[test]
    fn what_lies_outside_of_usr_is_moved_into_it() {
        let mut tree = Tree::usr_merged();
        add(&mut tree, "/lib", "x", link("usr/lib")).unwrap();
        add(&mut tree, "/lib/x/libc.so.6", "x", file("c")).unwrap();
        add(&mut tree, "/lib/x/libm.so", "x", link("libm.so.6")).unwrap();
        add(&mut tree, "/lib/x/share", "x", link("../../usr/share/x")).unwrap();
        add(&mut tree, "/library", "x", file("l")).unwrap();
        assert_eq!(
            paths(&tree),
            [
                "library",
                "usr",
                "usr/lib",
                "usr/lib/x",
                "usr/lib/x/libc.so.6",
                "usr/lib/x/libm.so",
                "usr/lib/x/share"
            ]
        );
        assert_eq!(tree.get("/usr/lib/x/libm.so").unwrap().kind, link("libm.so.6"));
        assert_eq!(tree.get("/usr/lib/x/share").unwrap().kind, link("/usr/share/x"));
        let conflict = add(&mut tree, "/usr/lib/x/libc.so.6", "y", file("other")).unwrap_err();
        assert!(conflict.starts_with("/usr/lib/x/libc.so.6 comes from"), "{conflict}");
    }

    #[test]
    fn links_are_followed_as_the_kernel_does() {
        let mut tree = Tree::default();
        add(&mut tree, "/usr/lib/a.so.1", "x", file("a")).unwrap();
        add(&mut tree, "/lib", "x", link("usr/lib")).unwrap();
        add(&mut tree, "/usr/lib/a.so", "x", link("../lib/./a.so.1")).unwrap();
        add(&mut tree, "/opt/b", "x", link("/lib/a.so")).unwrap();
        add(&mut tree, "/loop", "x", link("loop")).unwrap();
        for (path, expect) in [
            ("/usr/lib/a.so.1", Some("usr/lib/a.so.1")),
            ("/lib/a.so", Some("usr/lib/a.so.1")),
            ("opt/b", Some("usr/lib/a.so.1")),
            ("/../opt/../opt/b", Some("usr/lib/a.so.1")),
            ("/loop", None),
            ("/usr/lib/c.so", None),
        ] {
            assert_eq!(tree.resolve(path).as_deref(), expect, "{path}");
        }
    }

    #[test]
    fn a_part_has_the_folders_above_it() {
        let mut tree = Tree::default();
        add(&mut tree, "/usr/lib/a", "x", file("a")).unwrap();
        add(&mut tree, "/usr/bin/b", "y", file("b")).unwrap();
        let parts = tree.split(|owner, _| usize::from(owner.input.as_str() == "y"));
        assert_eq!(paths(&parts[&0]), ["usr", "usr/lib", "usr/lib/a"]);
        assert_eq!(paths(&parts[&1]), ["usr", "usr/bin", "usr/bin/b"]);
        tree.retain(|path, _| path == "usr/lib/a");
        assert_eq!(paths(&tree), ["usr", "usr/lib", "usr/lib/a"]);
    }
}
