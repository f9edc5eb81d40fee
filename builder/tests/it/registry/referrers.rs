//! What refers to an image: by the tag schema of a registry without the API, and by the API.

use std::collections::BTreeMap;

use serde_json::json;
use trainyard_builder::registry::{Artifact, Error};
use trainyard_spec::Digest;

use super::parts::{INDEX, Login, MANIFEST, Registry, connect, image, quiet, reference, settings, tool};
use crate::server::{Answer, Server};

fn artifact(kind: &str, bytes: &[u8]) -> Artifact {
    Artifact {
        artifact_type: kind.to_owned(),
        media_type: "application/json".to_owned(),
        bytes: bytes.to_vec(),
        annotations: BTreeMap::from([("made-by".to_owned(), "a test".to_owned())]),
    }
}

#[test]
fn artifacts_are_attached_to_an_image_whose_digest_stays() {
    let Some(registry) = Registry::start(&Login::None) else { return };
    let (room, settings) = settings();
    let (layout, image) = image(&room.path("image"), 600, &[1000]);
    let reference = registry.reference("team/fixture:1");
    let repository = connect(&reference, &settings);
    let unknown =
        repository.attach(&image.digest, &artifact("application/x.sbom", b"{}"), &quiet).unwrap_err();
    assert!(matches!(unknown, Error::Refused { status: 404, .. }), "{unknown:?}");

    repository.push(&layout.folder, &quiet).unwrap();
    assert_eq!(repository.referrers(&image.digest, None, &quiet).unwrap(), []);
    let sbom =
        repository.attach(&image.digest, &artifact("application/x.sbom", b"{\"a\":1}"), &quiet).unwrap();
    let signature =
        repository.attach(&image.digest, &artifact("application/x.signature", b"{}"), &quiet).unwrap();
    // The same once more is the same.
    assert_eq!(
        repository.attach(&image.digest, &artifact("application/x.sbom", b"{\"a\":1}"), &quiet).unwrap(),
        sbom
    );

    let listed = |kind| {
        let found = repository.referrers(&image.digest, kind, &quiet).unwrap();
        found.iter().map(|one| one.digest().to_string()).collect::<Vec<_>>()
    };
    assert_eq!(listed(None), [sbom.to_string(), signature.to_string()]);
    assert_eq!(listed(Some("application/x.signature")), [signature.to_string()]);
    assert_eq!(listed(Some("application/x.other")), Vec::<String>::new());

    let host = format!("docker://127.0.0.1:{}/team/fixture", registry.port);
    let inspect = |name: String| tool("skopeo", &["inspect", "--raw", "--tls-verify=false", &name]);
    let Some(raw) = inspect(format!("{host}@{sbom}")) else { return };
    assert_eq!(Digest::of(raw.as_bytes()), sbom);
    let manifest: serde_json::Value = serde_json::from_str(&raw).unwrap();
    assert_eq!(manifest["subject"]["digest"], image.digest.to_string());
    assert_eq!(manifest["subject"]["mediaType"], MANIFEST);
    assert_eq!(manifest["artifactType"], "application/x.sbom");
    assert_eq!(manifest["layers"][0]["digest"], Digest::of(b"{\"a\":1}").to_string());
    let raw = inspect(format!("{host}:{}", image.digest.to_string().replace(':', "-"))).unwrap();
    assert_eq!(serde_json::from_str::<serde_json::Value>(&raw).unwrap()["mediaType"], INDEX);
    assert_eq!(Digest::of(inspect(format!("{host}:1")).unwrap().as_bytes()), image.digest);
}

/// A server with the referrers API, which answers in pages.
fn with_api(pages: usize) -> (Server, u16) {
    let server = Server::start(move |path, _| {
        let page = path.rsplit("page=").next().and_then(|page| page.parse().ok()).unwrap_or(0);
        let entry = |kind: &str| json!({"mediaType": MANIFEST, "digest": Digest::of(format!("{kind}{page}").as_bytes()), "size": 7, "artifactType": kind});
        let index =
            json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry("a/b"), entry("c/d")]});
        let body = index.to_string().into_bytes();
        match path.split('?').next().unwrap() {
            "/v2/" => Answer::Body("application/json", b"{}".to_vec()),
            path if path.contains("/referrers/sha256:") && page + 1 < pages => {
                Answer::Paged { body, next: format!("{path}?page={}", page + 1) }
            }
            path if path.contains("/referrers/sha256:") => Answer::Body("application/json", body),
            _ => Answer::Status(404),
        }
    });
    let port = server.url("").rsplit(':').next().unwrap().parse().unwrap();
    (server, port)
}

#[test]
fn the_api_is_asked_for_all_pages_and_filtered_here_too() {
    let (_room, settings) = settings();
    let (server, port) = with_api(3);
    let repository = connect(&reference(port, "a"), &settings);
    let subject = Digest::of(b"subject");
    let all = repository.referrers(&subject, None, &quiet).unwrap();
    assert_eq!(all.len(), 6);
    let some = repository.referrers(&subject, Some("a/b"), &quiet).unwrap();
    assert_eq!(some.len(), 3);
    assert!(server.seen().iter().any(|one| one.path.ends_with("?artifactType=a%2Fb")), "{:?}", server.seen());
    assert!(!server.seen().iter().any(|one| one.path.contains("/manifests/")), "no tag is asked for");

    let (_server, port) = with_api(usize::MAX);
    let error = connect(&reference(port, "a"), &settings).referrers(&subject, None, &quiet).unwrap_err();
    assert!(error.to_string().contains("more than 100 pages"), "{error}");
}
