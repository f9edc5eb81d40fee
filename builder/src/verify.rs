//! Proves an image: builds it again from its lock, with nothing left over from the first time, and compares.

use std::path::Path;

use serde::Serialize;
use trainyard_spec::Digest;

use crate::image::{self, Workshop};
use crate::inspect::{self, Report, inspect};
use crate::oci::{self, Layout};
use crate::progress::Progress;
use crate::settings::Settings;
use crate::store::Store;

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Verdict {
    /// Digest of the image that was verified.
    pub image: Digest,
    /// Digest of the image that was built again.
    pub rebuilt: Digest,
    /// What differs, from the outside in. Empty where the digests are equal.
    pub differences: Vec<String>,
}

/// Why an image could not be verified.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It could not be built again.
    #[error(transparent)]
    Build(#[from] image::Error),
    /// It could not be read.
    #[error(transparent)]
    Inspect(#[from] inspect::Error),
}

impl From<oci::Error> for Error {
    fn from(error: oci::Error) -> Self {
        Self::Inspect(error.into())
    }
}

impl From<crate::store::Error> for Error {
    fn from(error: crate::store::Error) -> Self {
        Self::Build(error.into())
    }
}

/// Builds the manifest's image again, in a folder of its own, and compares it with `layout`.
///
/// Only fetched inputs are shared with the first build, and each is digested again before it is used.
///
/// # Errors
/// When the image cannot be built or read. That it differs is no error, but the verdict.
pub fn verify(
    manifest: &Path,
    layout: &Path,
    settings: &Settings,
    progress: Progress<'_>,
) -> Result<Verdict, Error> {
    let store = Store::new(&settings.cache);
    let _in_use = store.in_use()?;
    let before = inspect(&Layout::open(layout)?)?;
    store.sweep()?;
    let room = store.staging()?;
    let fresh = Store::new(room.path());
    let workshop = Workshop { inputs: store, layers: fresh.clone(), cargo: room.path().join("cargo") };
    let assembled = image::assemble(manifest, &workshop, settings, progress)?;
    let rebuilt = assembled.documents.digest;
    if rebuilt == before.digest {
        return Ok(Verdict { image: before.digest, rebuilt, differences: Vec::new() });
    }
    let staging = fresh.staging()?;
    oci::write(
        &assembled.documents,
        assembled.manifest.name.as_str(),
        assembled.manifest.platform,
        &assembled.layers,
        &fresh,
        &staging,
    )?;
    let after = inspect(&Layout::open(staging.path())?)?;
    Ok(Verdict { image: before.digest, rebuilt, differences: differences(&before, &after) })
}

fn differences(before: &Report, after: &Report) -> Vec<String> {
    let mut found = Vec::new();
    let mut compare = |what: &str, before: String, after: String| {
        if before != after {
            found.push(format!("{what}: the image has {before}, the rebuilt one {after}"));
        }
    };
    compare("platform", before.platform.clone(), after.platform.clone());
    compare("user", before.user.clone(), after.user.clone());
    compare("entrypoint", format!("{:?}", before.entrypoint), format!("{:?}", after.entrypoint));
    compare("working directory", before.working_dir.clone(), after.working_dir.clone());
    compare("environment", format!("{:?}", before.env), format!("{:?}", after.env));
    compare("labels", format!("{:?}", before.labels), format!("{:?}", after.labels));
    compare("number of layers", before.layers.len().to_string(), after.layers.len().to_string());
    for (index, (before, after)) in before.layers.iter().zip(&after.layers).enumerate() {
        if before.digest == after.digest {
            continue;
        }
        compare(&format!("layer {index}"), before.digest.to_string(), after.digest.to_string());
        let paths: std::collections::BTreeSet<_> = before.files.keys().chain(after.files.keys()).collect();
        for path in paths {
            let show = |file: Option<&inspect::FileReport>| {
                file.map_or_else(
                    || "no such file".to_owned(),
                    |file| format!("{} ({} bytes, mode {:o})", file.digest, file.size, file.mode),
                )
            };
            compare(
                &format!("layer {index} {path}"),
                show(before.files.get(path)),
                show(after.files.get(path)),
            );
        }
    }
    if found.is_empty() {
        found
            .push("the files are the same, their packing differs (another version of Trainyard?)".to_owned());
    }
    found
}
