//! The facts of an image as CycloneDX 1.6 in JSON (`https://cyclonedx.org/docs/1.6/json/`).
//!
//! Files are components inside of the package that they are of. Left out: vulnerabilities, which are news and no facts of
//! an image.

use serde_json::{Map, Value, json};

use super::facts::{Error, Facts, Kind, Package};
use super::{CREATED, purl, uuid};

/// Media type of the document.
pub const MEDIA_TYPE: &str = "application/vnd.cyclonedx+json";

/// Writes the document, in canonical JSON.
///
/// # Errors
/// When it has no canonical form.
pub fn write(facts: &Facts) -> Result<Vec<u8>, Error> {
    let name = facts.manifest.name.as_str();
    let platform = facts.manifest.platform;
    let image = purl(
        "oci",
        None,
        name,
        &facts.image.to_string(),
        &[("arch", platform.architecture()), ("os", "linux")],
    );
    let in_image = facts
        .packages
        .iter()
        .filter(|(id, package)| package.kind == Kind::Base || facts.files_of(id).next().is_some());
    let in_image: Vec<_> = in_image.map(|(id, _)| id).collect();
    let mut dependencies = vec![json!({"ref": image, "dependsOn": in_image})];
    for (id, package) in &facts.packages {
        let needs: Vec<_> = package.needs.union(&package.linked).collect();
        dependencies.push(json!({"ref": id, "dependsOn": needs}));
    }
    let components: Vec<Value> =
        facts.packages.iter().map(|(id, package)| component(id, package, facts)).collect();
    let mut document = json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": CREATED,
            "tools": {"components": [{"type": "application", "name": "trainyard", "version": facts.builder}]},
            "component": {
                "bom-ref": image,
                "type": "container",
                "name": name,
                "version": facts.image.to_string(),
                "purl": image,
                "hashes": [hash("SHA-256", &facts.image.hex())],
            },
        },
        "components": components,
        "dependencies": dependencies,
    });
    let content = serde_json_canonicalizer::to_vec(&document)?;
    document["serialNumber"] = format!("urn:uuid:{}", uuid(&content)).into();
    Ok(serde_json_canonicalizer::to_vec(&document)?)
}

fn component(id: &str, package: &Package, facts: &Facts) -> Value {
    let mut fields = Map::new();
    let mut put = |key: &str, value: Value| drop(fields.insert(key.to_owned(), value));
    put("bom-ref", id.into());
    put("type", kind(package.kind).into());
    put("name", package.name.clone().into());
    if let Some(version) = &package.version {
        put("version", version.clone().into());
    }
    if let Some(expression) = &package.licence {
        put("licenses", licences(expression, facts));
    }
    if let Some(supplier) = &package.supplier {
        put("supplier", json!({"name": supplier}));
    }
    if let Some(url) = &package.purl {
        put("purl", url.clone().into());
    }
    let mut properties = Vec::new();
    let mut property = |name: &str, value: String| properties.push(json!({"name": name, "value": value}));
    if let Some((source, version)) = &package.source {
        property("trainyard:source-package", format!("{source} {version}"));
    }
    if let Some(note) = &package.licence_note {
        property("trainyard:licence-note", note.clone());
    }
    if let Some(archive) = &package.archive {
        // It is of the package as it was handed out, and not of what is in the image.
        put(
            "externalReferences",
            json!([{
                "type": "distribution",
                "url": archive.name,
                "hashes": [hash("SHA-256", &archive.sha256.hex())],
            }]),
        );
    }
    let files: Vec<Value> = facts
        .files_of(id)
        .map(|(path, file)| {
            let mut value = json!({
                "bom-ref": format!("file:{path}"),
                "type": "file",
                "name": path,
                "hashes": [hash("SHA-256", &file.sha256.hex())],
            });
            if let Some(original) = &file.original {
                value["properties"] = json!([{"name": "trainyard:original", "value": original.to_string()}]);
            }
            value
        })
        .collect();
    if !files.is_empty() {
        put("components", files.into());
    }
    if !properties.is_empty() {
        put("properties", properties.into());
    }
    Value::Object(fields)
}

/// A licence by its expression, or by itself with its text where SPDX has no name for it.
fn licences(expression: &str, facts: &Facts) -> Value {
    match facts.texts.get(expression) {
        Some(text) => json!([{"license": {
            "name": expression,
            "text": {"contentType": "text/plain", "content": text},
        }}]),
        None => json!([{"expression": expression}]),
    }
}

const fn kind(kind: Kind) -> &'static str {
    match kind {
        Kind::Deb | Kind::Cuda | Kind::Crate | Kind::StandardLibrary => "library",
        Kind::Base => "container",
        Kind::Input => "application",
    }
}

fn hash(algorithm: &str, value: &str) -> Value {
    json!({"alg": algorithm, "content": value})
}
