//! What an image is made of, for those who have to answer for it: bills of materials, provenance, signatures, and
//! whether it may be handed on.
//!
//! All of it follows from [`Facts`], which a build keeps beside the image: documents are a pure function of them, without
//! a clock or a random number, and so the same for the same image wherever they are written. None of it is in the image,
//! whose digest does not depend on it.

mod crates;
pub mod cyclonedx;
mod debian;
mod facts;
mod inventory;
pub mod key;
pub mod provenance;
pub mod redistribution;
pub(crate) mod signing;
pub mod spdx;

pub(crate) use facts::Made;
pub use facts::{Archive, Error, Facts, File, Kind, Package};
pub(crate) use inventory::{Inventory, Programs};

use std::collections::BTreeMap;

use trainyard_spec::Digest;

use crate::registry::Artifact;

/// The time that documents claim to be from. Any fixed one will do.
const CREATED: &str = "1970-01-01T00:00:00Z";

/// Annotation of an attached statement: what its predicate is.
const PREDICATE_ANNOTATION: &str = "in-toto.io/predicate-type";

/// The documents that are attached to an image in a registry: both bills of materials, and the provenance.
///
/// # Errors
/// When one has no canonical form.
pub fn documents(facts: &Facts) -> Result<Vec<Artifact>, Error> {
    let attached = |kind: &str, bytes| Artifact {
        artifact_type: kind.to_owned(),
        media_type: kind.to_owned(),
        bytes,
        annotations: BTreeMap::new(),
    };
    let annotation = (PREDICATE_ANNOTATION.to_owned(), provenance::PREDICATE_TYPE.to_owned());
    Ok(vec![
        attached(spdx::MEDIA_TYPE, spdx::write(facts)?),
        attached(cyclonedx::MEDIA_TYPE, cyclonedx::write(facts)?),
        Artifact {
            annotations: [annotation].into(),
            ..attached(provenance::MEDIA_TYPE, provenance::write(facts)?)
        },
    ])
}

/// A UUID made from content: version 8 of RFC 9562, whose bits are the maker's own.
fn uuid(content: &[u8]) -> String {
    let hex = Digest::of(content).hex();
    // Version and variant stand in two fixed places.
    format!("{}-{}-8{}-8{}-{}", &hex[..8], &hex[8..12], &hex[13..16], &hex[17..20], &hex[20..32])
}

/// A package URL of `kind`, with its version and qualifiers (the specification of package URLs, `purl-spec`).
fn purl(
    kind: &str,
    namespace: Option<&str>,
    name: &str,
    version: &str,
    qualifiers: &[(&str, &str)],
) -> String {
    use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
    const KEPT: &AsciiSet =
        &NON_ALPHANUMERIC.remove(b'.').remove(b'-').remove(b'_').remove(b'~').remove(b':');
    let encoded = |text: &str| utf8_percent_encode(text, KEPT).to_string();
    let mut purl = format!("pkg:{kind}/");
    if let Some(namespace) = namespace {
        purl += &format!("{namespace}/");
    }
    purl += &format!("{}@{}", encoded(name), encoded(version));
    for (index, (key, value)) in qualifiers.iter().enumerate() {
        let before = if index == 0 { '?' } else { '&' };
        purl += &format!("{before}{key}={}", encoded(value));
    }
    purl
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_follow_from_content() {
        let first = uuid(b"a");
        assert_eq!(first, uuid(b"a"));
        assert_ne!(first, uuid(b"b"));
        assert_eq!(first, "ca978112-ca1b-8dca-8ac2-31b39a23dc4d");
    }

    #[test]
    fn package_urls() {
        for (found, expect) in [
            (
                purl("deb", Some("debian"), "libstdc++6", "1:2.36-9+deb12u10~x", &[("arch", "amd64")]),
                "pkg:deb/debian/libstdc%2B%2B6@1:2.36-9%2Bdeb12u10~x?arch=amd64",
            ),
            (purl("cargo", None, "serde", "1.0.0+a", &[]), "pkg:cargo/serde@1.0.0%2Ba"),
            (
                purl("oci", None, "a", "sha256:00", &[("arch", "x"), ("os", "y/z")]),
                "pkg:oci/a@sha256:00?arch=x&os=y%2Fz",
            ),
        ] {
            assert_eq!(found, expect);
        }
    }
}
