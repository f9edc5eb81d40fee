//! The facts of an image as SPDX 2.3 in JSON (`https://spdx.github.io/spdx-spec/v2.3/`).
//!
//! Every package and every file is there, each file with the package that it is of. What SPDX has no field for, such as
//! what a file was before GPU code was cut from it, stands in comments.

use serde_json::{Map, Value, json};
use trainyard_spec::Digest;

use super::facts::{self, Error, Facts, File, Kind, Package};
use super::{CREATED, purl, uuid};

/// Media type of the document.
pub const MEDIA_TYPE: &str = "application/spdx+json";
/// What stands for a fact that is not known.
const UNKNOWN: &str = "NOASSERTION";
/// The namespace that the specification leaves to those who have no address of their own.
const NAMESPACE: &str = "https://spdx.org/spdxdocs";

/// Writes the document, in canonical JSON.
///
/// # Errors
/// When it has no canonical form.
pub fn write(facts: &Facts) -> Result<Vec<u8>, Error> {
    let image = "SPDXRef-Image".to_owned();
    let mut packages = vec![image_package(&image, facts)];
    let mut relationships = vec![relationship("SPDXRef-DOCUMENT", "DESCRIBES", &image)];
    for (id, package) in &facts.packages {
        let reference = reference("Package", id);
        let files: Vec<_> = facts.files_of(id).collect();
        packages.push(described(&reference, package, &files));
        if !files.is_empty() || package.kind == Kind::Base {
            relationships.push(relationship(&image, "CONTAINS", &reference));
        }
        for (path, _) in files {
            relationships.push(relationship(&reference, "CONTAINS", &file_reference(path)));
        }
        for needed in &package.needs {
            relationships.push(relationship(&reference, "DEPENDS_ON", &self::reference("Package", needed)));
        }
        for linked in &package.linked {
            relationships.push(relationship(&reference, "STATIC_LINK", &self::reference("Package", linked)));
        }
    }
    let files: Vec<Value> = facts.files.iter().map(|(path, file)| described_file(path, file)).collect();
    let texts: Vec<Value> = facts
        .texts
        .iter()
        .map(|(id, text)| json!({"licenseId": id, "extractedText": text, "name": id}))
        .collect();
    let mut document = json!({
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": facts.manifest.name.as_str(),
        "creationInfo": {
            "created": CREATED,
            "creators": [format!("Tool: trainyard-{}", facts.builder)],
            "comment": "The time is fixed, so that the same image has the same document.",
        },
        "packages": packages,
        "files": files,
        "relationships": relationships,
        "hasExtractedLicensingInfos": texts,
    });
    let content = serde_json_canonicalizer::to_vec(&document)?;
    document["documentNamespace"] = format!("{NAMESPACE}/{}-{}", facts.manifest.name, uuid(&content)).into();
    Ok(serde_json_canonicalizer::to_vec(&document)?)
}

fn image_package(id: &str, facts: &Facts) -> Value {
    let name = facts.manifest.name.as_str();
    let platform = facts.manifest.platform;
    let url = purl(
        "oci",
        None,
        name,
        &facts.image.to_string(),
        &[("arch", platform.architecture()), ("os", "linux")],
    );
    json!({
        "SPDXID": id,
        "name": name,
        "versionInfo": facts.image.to_string(),
        "downloadLocation": UNKNOWN,
        "filesAnalyzed": false,
        "primaryPackagePurpose": "CONTAINER",
        "checksums": [checksum("SHA256", &facts.image.hex())],
        "licenseConcluded": UNKNOWN,
        "licenseDeclared": UNKNOWN,
        "copyrightText": UNKNOWN,
        "externalRefs": [external(&url)],
    })
}

fn described(id: &str, package: &Package, files: &[(&String, &File)]) -> Value {
    let mut fields = Map::new();
    let mut put = |key: &str, value: Value| drop(fields.insert(key.to_owned(), value));
    put("SPDXID", id.into());
    put("name", package.name.clone().into());
    put("downloadLocation", UNKNOWN.into());
    put("copyrightText", UNKNOWN.into());
    put("licenseConcluded", UNKNOWN.into());
    put("licenseDeclared", package.licence.as_deref().unwrap_or(UNKNOWN).into());
    put("primaryPackagePurpose", purpose(package.kind).into());
    put("filesAnalyzed", (!files.is_empty()).into());
    if !files.is_empty() {
        put("packageVerificationCode", json!({"packageVerificationCodeValue": verification_code(files)}));
        put("licenseInfoFromFiles", json!([UNKNOWN]));
    }
    if let Some(version) = &package.version {
        put("versionInfo", version.clone().into());
    }
    if let Some(note) = &package.licence_note {
        put("licenseComments", note.clone().into());
    }
    if let Some(supplier) = &package.supplier {
        put("supplier", format!("Organization: {}", actor(supplier)).into());
    }
    if let Some((source, version)) = &package.source {
        put("sourceInfo", format!("built from the Debian source package {source} {version}").into());
    }
    if let Some(archive) = &package.archive {
        put("packageFileName", archive.name.clone().into());
        put("checksums", json!([checksum("SHA256", &archive.sha256.hex())]));
    }
    if let Some(url) = &package.purl {
        put("externalRefs", json!([external(url)]));
    }
    Value::Object(fields)
}

fn described_file(path: &str, file: &File) -> Value {
    let mut value = json!({
        "SPDXID": file_reference(path),
        "fileName": format!(".{path}"),
        "checksums": [checksum("SHA1", &file.sha1), checksum("SHA256", &file.sha256.hex())],
        "licenseConcluded": UNKNOWN,
        "licenseInfoInFiles": [UNKNOWN],
        "copyrightText": UNKNOWN,
    });
    if let Some(original) = &file.original {
        value["comment"] = format!("GPU code was cut from this file; before, it was {original}").into();
    }
    value
}

const fn purpose(kind: Kind) -> &'static str {
    match kind {
        Kind::Deb | Kind::Cuda | Kind::Crate | Kind::StandardLibrary => "LIBRARY",
        Kind::Base => "CONTAINER",
        Kind::Input => "OTHER",
    }
}

/// The code over a package's files: SHA-1 of their SHA-1s, sorted (clause 7.9).
fn verification_code(files: &[(&String, &File)]) -> String {
    use sha1::Digest as _;
    let mut all: Vec<&str> = files.iter().map(|(_, file)| file.sha1.as_str()).collect();
    all.sort_unstable();
    facts::hex(&sha1::Sha1::digest(all.concat().as_bytes()))
}

/// `Name <address>` as SPDX writes it: `Name (address)`.
fn actor(supplier: &str) -> String {
    match supplier.split_once('<') {
        Some((name, address)) => {
            format!("{} ({})", name.trim().trim_matches('"'), address.trim_end_matches('>').trim())
        }
        None => supplier.to_owned(),
    }
}

fn checksum(algorithm: &str, value: &str) -> Value {
    json!({"algorithm": algorithm, "checksumValue": value})
}

fn external(url: &str) -> Value {
    json!({"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": url})
}

fn relationship(from: &str, kind: &str, to: &str) -> Value {
    json!({"spdxElementId": from, "relationshipType": kind, "relatedSpdxElement": to})
}

/// An element's id, which has letters, digits, dots and hyphens alone: readable, and told apart by a digest.
fn reference(kind: &str, id: &str) -> String {
    let plain: String =
        id.chars().map(|one| if one.is_ascii_alphanumeric() || one == '.' { one } else { '-' }).collect();
    format!("SPDXRef-{kind}-{plain}-{}", &Digest::of(id.as_bytes()).hex()[..12])
}

fn file_reference(path: &str) -> String {
    format!("SPDXRef-File-{}", &Digest::of(path.as_bytes()).hex()[..24])
}
