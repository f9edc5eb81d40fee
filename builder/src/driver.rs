//! Libraries of the NVIDIA driver in an image: none, or those of forward compatibility.
//!
//! The driver's libraries belong to the kernel's module, so they come from the host. The exception is `libcuda.so` of the
//! package `cuda-compat`, which goes with older drivers of data-center GPUs; its own note says with which. NVIDIA's
//! container toolkit looks for it in `/usr/local/cuda/compat` and takes it where it is newer than the host's.

use trainyard_spec::image::{DriverMode, ImageManifest};

use crate::contract::tables::DRIVERS;
use crate::loader::Objects;
use crate::tree::{Conflict, Kind, Meta, Tree};

/// Where NVIDIA's container toolkit looks for a newer `libcuda.so`.
const COMPAT: &str = "usr/local/cuda/compat";

/// Why an image's libraries of the driver are wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There are some.
    #[error("/{path} ({owner}) is a library of the driver, which comes from the host")]
    Inside {
        /// The library.
        path: String,
        /// Whose it is.
        owner: String,
    },
    /// There are none.
    #[error("driver is \"compat\", and no input has a libcuda.so that says which drivers it goes with")]
    None,
    /// Something lies where the toolkit looks.
    #[error(transparent)]
    Conflict(#[from] Conflict),
}

impl Error {
    /// The way out.
    pub const fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Inside { .. } => Some(
                "leave its package out, or, if it is of cuda-compat, set driver = \"compat\" and local-only = true",
            ),
            Self::None => Some("add the package cuda-compat of the image's CUDA release to an input"),
            Self::Conflict(_) => None,
        }
    }
}

/// Checks an image's libraries of the driver, and puts a link to them where they are looked for. Gives the paths that
/// have to stay.
///
/// # Errors
/// When there are some and should not be, or the other way round.
pub(crate) fn arrange(
    manifest: &ImageManifest,
    tree: &mut Tree,
    objects: &Objects,
) -> Result<Vec<String>, Error> {
    let of_driver = |path: &str| {
        let soname = objects.get(path).and_then(|report| report.needs.soname.as_deref());
        let name = path.rsplit('/').next().unwrap_or(path);
        soname.is_some_and(|soname| DRIVERS.libraries.contains(soname)) || DRIVERS.libraries.contains(name)
    };
    let inside: Vec<String> = objects.keys().filter(|path| of_driver(path)).cloned().collect();
    let owner = |path: &str| tree.get(path).and_then(|node| node.owner.clone());
    match (manifest.driver, inside.first()) {
        (DriverMode::Cdi, None) => return Ok(Vec::new()),
        (DriverMode::Cdi, Some(path)) => {
            let owner = owner(path).map(|owner| owner.to_string()).unwrap_or_default();
            return Err(Error::Inside { path: path.clone(), owner });
        }
        (DriverMode::Compat, _) => {}
    }
    let noted = objects.iter().find(|(_, report)| report.forward.is_some()).map(|(path, _)| path);
    let (path, owner) = noted.and_then(|path| Some((path, owner(path)?))).ok_or(Error::None)?;
    let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder).to_owned();
    if tree.resolve(COMPAT).as_deref() != Some(folder.as_str()) {
        tree.add(COMPAT, owner, Meta::mode(0o777), Kind::Symlink(format!("/{folder}")))?;
    }
    let mut kept = vec![COMPAT.to_owned()];
    kept.extend(tree.children(&folder).map(|(_, path)| path.to_owned()));
    Ok(kept)
}
