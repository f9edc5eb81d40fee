//! What a distribution's installer would write beside its packages, and nobody's package holds: who is who, and which
//! packages are here, in the form that scanners read.
//!
//! Deliberately left out: what only a running system needs, such as logs, caches and machine ids.

use std::io::Write as _;

use trainyard_spec::Name;
use trainyard_spec::image::ImageManifest;

use crate::store::{self, Store};
use crate::tree::{Conflict, File, Kind, Meta, Owner, Tree};

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
    /// The store failed.
    #[error(transparent)]
    Store(#[from] store::Error),
}

/// Adds the files to an image with packages of a distribution, as files of its first such input. What a package brings
/// itself stays as it is.
pub(crate) fn add(
    input: &Name,
    manifest: &ImageManifest,
    installed: &[Installed],
    tree: &mut Tree,
    store: &Store,
) -> Result<(), Error> {
    let mut put = |path: &str, text: &str| -> Result<(), Error> {
        if tree.get(path).is_some() {
            return Ok(());
        }
        let mut incoming = store.incoming()?;
        incoming.write_all(text.as_bytes()).map_err(store::io_error("write to", incoming.path()))?;
        let (digest, size) = store.keep(incoming)?;
        let file = File { source: store.path(&digest), digest, size, hard_link: None };
        let owner = Owner { input: input.clone(), package: None };
        Ok(tree.add(path, owner, Meta::mode(0o644), Kind::File(file))?)
    };
    // The manifest's user has been checked to be two numbers.
    let (uid, gid) = manifest.config.user.split_once(':').unwrap_or(("65532", "65532"));
    put(
        "/etc/passwd",
        &format!(
            "root:x:0:0:root:/root:/usr/sbin/nologin\nnonroot:x:{uid}:{gid}::/nonexistent:/usr/sbin/nologin\n"
        ),
    )?;
    put("/etc/group", &format!("root:x:0:\nnonroot:x:{gid}:\n"))?;
    for Installed { package, control } in installed {
        // Where distroless images have them and scanners look for them: a control file for each package.
        put(&format!("/var/lib/dpkg/status.d/{package}"), &format!("{}\n", control.trim_end()))?;
    }
    Ok(())
}
