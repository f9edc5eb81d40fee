//! What a distribution's installer would write beside its packages, and nobody's package holds: who is who, where
//! libraries are searched and found, and which packages are here, in the form that scanners read.
//!
//! Deliberately left out: what only a running system needs, such as logs, caches and machine ids.

use std::collections::BTreeSet;
use std::io::{self, Write as _};

use trainyard_spec::Name;
use trainyard_spec::image::ImageManifest;

use crate::input::cuda;
use crate::loader::{self, Loader, Objects};
use crate::store::{self, Store};
use crate::tree::{Conflict, File, Kind, Meta, Owner, Tree};

/// Where the folders of libraries stand, a file for each.
const FOLDERS: &str = "etc/ld.so.conf.d";

/// A Debian package that is in an image.
#[derive(Debug, Clone)]
pub(crate) struct Installed {
    /// Its name.
    pub(crate) package: String,
    /// Its control file: name, version, maintainer and what it depends on (deb-control(5)).
    pub(crate) control: String,
}

/// Why the files cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Something else is there.
    #[error(transparent)]
    Conflict(#[from] Conflict),
    /// The packages' own configuration of the loader cannot be read.
    #[error("cannot tell where libraries are searched: {0}")]
    Loader(#[from] io::Error),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] store::Error),
}

/// Writes the files of an image's users, programs and libraries as files of its distribution's first input. What a
/// package brings itself stays as it is.
pub(crate) struct Userland<'a> {
    /// The input.
    pub(crate) input: &'a Name,
    pub(crate) manifest: &'a ImageManifest,
    pub(crate) store: &'a Store,
}

impl Userland<'_> {
    /// Adds who is who, and where libraries are searched.
    pub(crate) fn add(&self, tree: &mut Tree) -> Result<(), Error> {
        // The manifest's user has been checked to be two numbers.
        let (uid, gid) = self.manifest.config.user.split_once(':').unwrap_or(("65532", "65532"));
        let users = format!(
            "root:x:0:0:root:/root:/usr/sbin/nologin\nnonroot:x:{uid}:{gid}::/nonexistent:/usr/sbin/nologin\n"
        );
        self.put("etc/passwd", users.as_bytes(), tree)?;
        self.put("etc/group", format!("root:x:0:\nnonroot:x:{gid}:\n").as_bytes(), tree)?;
        self.put(loader::CONFIGURATION, format!("include /{FOLDERS}/*.conf\n").as_bytes(), tree)?;
        let multiarch = loader::multiarch(self.manifest.platform);
        for (name, folder) in [("cuda", cuda::FOLDER), (multiarch, &format!("usr/lib/{multiarch}"))] {
            if tree.get(folder).is_some() {
                self.put(&format!("{FOLDERS}/{name}.conf"), format!("/{folder}\n").as_bytes(), tree)?;
            }
        }
        Ok(())
    }

    /// Adds which packages of `installed` are here, and which libraries, now that all others have left.
    pub(crate) fn record(
        &self,
        installed: &[Installed],
        objects: &Objects,
        tree: &mut Tree,
    ) -> Result<(), Error> {
        let present: BTreeSet<String> =
            tree.iter().filter_map(|(_, node)| node.owner.as_ref()?.package.clone()).collect();
        for Installed { package, control } in installed.iter().filter(|one| present.contains(&one.package)) {
            // Where distroless images have them and scanners look for them: a control file for each package.
            let path = format!("var/lib/dpkg/status.d/{package}");
            self.put(&path, format!("{}\n", control.trim_end()).as_bytes(), tree)?;
        }
        if objects.values().any(|report| report.interpreter.is_some()) {
            let cache = Loader::new(tree, objects, self.manifest.platform, None)?.cache();
            self.put(loader::CACHE, &cache, tree)?;
        }
        Ok(())
    }

    fn put(&self, path: &str, bytes: &[u8], tree: &mut Tree) -> Result<(), Error> {
        // The loader's cache is that of the whole image, also where a base image has one of its own.
        if tree.get(path).is_some() && path != loader::CACHE {
            return Ok(());
        }
        let mut incoming = self.store.incoming()?;
        incoming.write_all(bytes).map_err(store::io_error("write to", incoming.path()))?;
        let (digest, size) = self.store.keep(incoming)?;
        let file = File { source: self.store.path(&digest), digest, size, hard_link: None };
        let owner = Owner { input: self.input.clone(), package: None };
        match path {
            loader::CACHE => tree.overlay(path, owner, Meta::mode(0o644), Kind::File(file)),
            _ => tree.add(path, owner, Meta::mode(0o644), Kind::File(file))?,
        }
        Ok(())
    }
}
