//! How an image was built, as a statement of the in-toto attestation framework, version 1, with SLSA's provenance,
//! version 1, as its predicate. `docs/build-type-v1.md` says what its fields mean.
//!
//! It claims no more than it knows: that a machine with this version of Trainyard built the image from these inputs. Whose
//! machine that was, a signature says.

use serde_json::{Value, json};
use trainyard_spec::lock::LockedInput;

use super::facts::{Error, Facts, Kind};
use super::{cyclonedx, purl, spdx};

/// Media type of a statement.
pub const MEDIA_TYPE: &str = "application/vnd.in-toto+json";
/// What its predicate is.
pub const PREDICATE_TYPE: &str = "https://slsa.dev/provenance/v1";
/// What the predicates are whose documents are bills of materials.
pub const SPDX_PREDICATE: &str = "https://spdx.dev/Document";
/// As [`SPDX_PREDICATE`].
pub const CYCLONEDX_PREDICATE: &str = "https://cyclonedx.org/bom";

/// How the parameters are to be read: a type URI names, and need not be an address. This one is the package URL of this
/// software, and in it the document that describes the build.
const BUILD_TYPE: &str = "pkg:generic/trainyard#docs/build-type-v1.md";

/// Writes the statement, in canonical JSON.
///
/// # Errors
/// When it has no canonical form.
pub fn write(facts: &Facts) -> Result<Vec<u8>, Error> {
    let mut definition = json!({
        "buildType": BUILD_TYPE,
        "externalParameters": {"manifest": facts.manifest},
        "resolvedDependencies": dependencies(facts),
    });
    if let Some(reason) = &facts.not_reproducible {
        definition["internalParameters"] = json!({"notReproducible": reason});
    }
    let predicate = json!({
        "buildDefinition": definition,
        "runDetails": {"builder": {
            "id": "pkg:generic/trainyard",
            "version": {"trainyard": facts.builder},
        }},
    });
    statement(facts, PREDICATE_TYPE, &predicate)
}

/// The bills of materials and the provenance as statements about the image, each with the type of its predicate.
///
/// # Errors
/// When one has no canonical form.
pub fn statements(facts: &Facts) -> Result<Vec<(&'static str, Vec<u8>)>, Error> {
    let of = |kind, document: Vec<u8>| {
        let predicate: Value = serde_json::from_slice(&document)?;
        Ok::<_, Error>((kind, statement(facts, kind, &predicate)?))
    };
    Ok(vec![
        of(SPDX_PREDICATE, spdx::write(facts)?)?,
        of(CYCLONEDX_PREDICATE, cyclonedx::write(facts)?)?,
        (PREDICATE_TYPE, write(facts)?),
    ])
}

fn statement(facts: &Facts, kind: &str, predicate: &Value) -> Result<Vec<u8>, Error> {
    let statement = json!({
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": facts.manifest.name.as_str(), "digest": {"sha256": facts.image.hex()}}],
        "predicateType": kind,
        "predicate": predicate,
    });
    Ok(serde_json_canonicalizer::to_vec(&statement)?)
}

/// Everything that the build took, by digest.
fn dependencies(facts: &Facts) -> Vec<Value> {
    let mut all = Vec::new();
    let mut add = |name: &str, uri: Option<&str>, digest: (&str, &str)| {
        let mut value = json!({"name": name, "digest": {digest.0: digest.1}});
        if let Some(uri) = uri {
            value["uri"] = uri.into();
        }
        all.push(value);
    };
    for (input, locked) in &facts.lock.input {
        match locked {
            LockedInput::Python { package, version, file } => {
                let url = purl("pypi", None, package, version, &[]);
                add(&file.name, Some(&url), ("sha256", &file.sha256.hex()));
            }
            LockedInput::Deb { package } => {
                for (name, locked) in package {
                    let known = facts.packages.get(&super::inventory::deb_id(name));
                    let known = known.filter(|known| known.version.as_ref() == Some(&locked.version));
                    let url = known.and_then(|known| known.purl.clone());
                    let url = url.unwrap_or_else(|| purl("deb", Some("debian"), name, &locked.version, &[]));
                    add(&locked.file.name, Some(&url), ("sha256", &locked.file.sha256.hex()));
                }
            }
            LockedInput::Cuda { package, .. } => {
                for (name, locked) in package {
                    let kind = if locked.file.name.ends_with(".whl") { "pypi" } else { "generic" };
                    let url = purl(kind, None, name, &locked.version, &[]);
                    add(&locked.file.name, Some(&url), ("sha256", &locked.file.sha256.hex()));
                }
            }
            LockedInput::Oci { digest } => {
                let known = facts.packages.get(&format!("input:{input}"));
                let url = known.and_then(|known| known.purl.as_deref());
                add(&format!("base image of input {input}"), url, ("sha256", &digest.hex()));
            }
            LockedInput::Cargo { rustc, commit } => {
                let url = purl("generic", None, "rustc", rustc, &[]);
                add(&format!("toolchain of input {input}"), Some(&url), ("gitCommit", commit));
            }
        }
    }
    for (path, file) in &facts.files {
        let of_manifest = facts.manifest.input.iter().find(|(name, input)| {
            matches!(input, trainyard_spec::input::Input::Files { .. })
                && file.package == format!("input:{name}")
        });
        if of_manifest.is_some() {
            add(path, None, ("sha256", &file.sha256.hex()));
        }
    }
    for (name, digest) in &facts.sources {
        add(name, None, ("sha256", &digest.hex()));
    }
    for package in facts.packages.values().filter(|package| package.kind == Kind::Crate) {
        if let Some(archive) = &package.archive {
            add(&archive.name, package.purl.as_deref(), ("sha256", &archive.sha256.hex()));
        }
    }
    all
}
