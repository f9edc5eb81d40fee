//! What is signed: a payload that names an image (cosign's "simple signing"), and statements in envelopes (DSSE).

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use trainyard_spec::Digest;

use super::key::{Error, PrivateKey, PublicKey};
use super::provenance;

/// What a payload says that it is.
const PAYLOAD_TYPE: &str = "cosign container image signature";

/// The payload that a signature of an image signs. `name` is the image's repository with its registry.
pub(crate) fn payload(name: &str, image: &Digest) -> Vec<u8> {
    let payload = json!({
        "critical": {
            "identity": {"docker-reference": name},
            "image": {"docker-manifest-digest": image.to_string()},
            "type": PAYLOAD_TYPE,
        },
        "optional": null,
    });
    // Keys are sorted, and strings alone are in it.
    payload.to_string().into_bytes()
}

/// Whether a payload that was signed is about `image`.
pub(crate) fn is_about(payload: &[u8], image: &Digest) -> bool {
    let payload: Value = serde_json::from_slice(payload).unwrap_or_default();
    let critical = &payload["critical"];
    critical["type"] == PAYLOAD_TYPE && critical["image"]["docker-manifest-digest"] == image.to_string()
}

/// A signed statement (DSSE, version 1).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Envelope {
    payload: String,
    payload_type: String,
    signatures: Vec<Signature>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Signature {
    #[serde(default)]
    keyid: String,
    sig: String,
}

impl Envelope {
    pub(crate) fn seal(statement: &[u8], key: &PrivateKey) -> Result<Self, Error> {
        let signature = key.sign(&authenticated(provenance::MEDIA_TYPE, statement))?;
        Ok(Self {
            payload: STANDARD.encode(statement),
            payload_type: provenance::MEDIA_TYPE.to_owned(),
            signatures: vec![Signature { keyid: String::new(), sig: STANDARD.encode(signature) }],
        })
    }

    /// The statement, where `key` has signed it.
    pub(crate) fn open(&self, key: &PublicKey) -> Option<Vec<u8>> {
        if self.payload_type != provenance::MEDIA_TYPE {
            return None;
        }
        let statement = STANDARD.decode(&self.payload).ok()?;
        let signed = authenticated(&self.payload_type, &statement);
        let mut signatures = self.signatures.iter().filter_map(|one| STANDARD.decode(&one.sig).ok());
        signatures.any(|signature| key.verifies(&signed, &signature)).then_some(statement)
    }
}

/// What a signature of an envelope is of: its "pre-authentication encoding".
fn authenticated(kind: &str, body: &[u8]) -> Vec<u8> {
    let mut all = format!("DSSEv1 {} {kind} {} ", kind.len(), body.len()).into_bytes();
    all.extend_from_slice(body);
    all
}

/// The type of a statement's predicate, where it is about `image`.
pub(crate) fn predicate(statement: &[u8], image: &Digest) -> Option<String> {
    let statement: Value = serde_json::from_slice(statement).ok()?;
    let mut subjects = statement["subject"].as_array()?.iter();
    subjects.any(|subject| subject["digest"]["sha256"] == image.hex()).then_some(())?;
    statement["predicateType"].as_str().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_encoding_is_that_of_the_specification() {
        // The example of DSSE's protocol.
        assert_eq!(
            authenticated("http://example.com/HelloWorld", b"hello world"),
            b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
        );
    }

    #[test]
    fn payloads_name_one_image() {
        let (image, other) = (Digest::of(b"a"), Digest::of(b"b"));
        let payload = payload("h.test/a", &image);
        assert_eq!(
            String::from_utf8(payload.clone()).unwrap(),
            format!(
                r#"{{"critical":{{"identity":{{"docker-reference":"h.test/a"}},"image":{{"docker-manifest-digest":"{image}"}},"type":"cosign container image signature"}},"optional":null}}"#
            )
        );
        assert!(is_about(&payload, &image) && !is_about(&payload, &other) && !is_about(b"{}", &image));
        let statement = format!(
            r#"{{"subject": [{{"digest": {{"sha256": "{}"}}}}], "predicateType": "x"}}"#,
            image.hex()
        );
        assert_eq!(predicate(statement.as_bytes(), &image).as_deref(), Some("x"));
        assert_eq!(predicate(statement.as_bytes(), &other), None);
    }
}
