//! Keys and signatures, against openssl, NaCl and a real registry.

use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tempfile::TempDir;
use trainyard_builder::registry::{Error, Repository};
use trainyard_builder::supply::key::{self, PrivateKey, PublicKey};
use trainyard_spec::Digest;

use super::validators::Validators;
use crate::registry::parts::{Layout, Login, Registry, connect, image, quiet, settings, tool};

/// A pair of key files, made by openssl; none where that is missing and may be.
fn keys(folder: &Path, name: &str, kind: &[&str]) -> Option<(PathBuf, PathBuf)> {
    let (private, public) = (folder.join(format!("{name}.key")), folder.join(format!("{name}.pub")));
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    tool("openssl", &[&["genpkey", "-out", &text(&private)][..], kind].concat())?;
    tool("openssl", &["pkey", "-in", &text(&private), "-pubout", "-out", &text(&public)])?;
    Some((private, public))
}

const P256: [&str; 4] = ["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"];
const ED25519: [&str; 2] = ["-algorithm", "ed25519"];

/// Whether openssl takes a signature.
fn openssl_verifies(public: &Path, payload: &[u8], signature: &[u8]) -> bool {
    let room = TempDir::new().unwrap();
    let (file, signed) = (room.path().join("payload"), room.path().join("signature"));
    std::fs::write(&file, payload).unwrap();
    std::fs::write(&signed, signature).unwrap();
    let is_short = std::fs::read_to_string(public).unwrap().lines().count() == 3;
    let mut command = std::process::Command::new("openssl");
    command.args(["pkeyutl", "-verify", "-pubin", "-rawin", "-inkey"]).arg(public);
    // Ed25519, whose key fits in a line, hashes by itself.
    if !is_short {
        command.args(["-digest", "sha256"]);
    }
    command.arg("-in").arg(&file).arg("-sigfile").arg(&signed).output().unwrap().status.success()
}

#[test]
fn openssl_takes_what_is_signed_with_its_keys() {
    let folder = TempDir::new().unwrap();
    let Some(p256) = keys(folder.path(), "p256", &P256) else { return };
    let Some(ed25519) = keys(folder.path(), "ed25519", &ED25519) else { return };
    for ((private, public), other) in [(&p256, &ed25519), (&ed25519, &p256)] {
        let key = PrivateKey::read(private, None).unwrap();
        let verifying = PublicKey::read(public).unwrap();
        assert_eq!(key.public(), verifying);
        let signature = key.sign(b"text").unwrap();
        assert!(verifying.verifies(b"text", &signature) && !verifying.verifies(b"Text", &signature));
        assert!(!PublicKey::read(&other.1).unwrap().verifies(b"text", &signature));
        assert!(
            openssl_verifies(public, b"text", &signature) && !openssl_verifies(public, b"Text", &signature)
        );
        let swapped = PublicKey::read(private).unwrap_err();
        assert!(swapped.to_string().contains("needed is \"PUBLIC KEY\""), "{swapped}");
        assert!(matches!(PrivateKey::read(public, None), Err(key::Error::Kind { .. })));
    }
    let rsa = keys(folder.path(), "rsa", &["-algorithm", "RSA"]).unwrap();
    let error = PrivateKey::read(&rsa.0, None).unwrap_err();
    assert!(error.to_string().contains("neither ECDSA over P-256 nor Ed25519"), "{error}");
    assert!(matches!(PublicKey::read(&rsa.1), Err(key::Error::Kind { .. })));
    std::fs::write(folder.path().join("none"), "no key").unwrap();
    assert!(matches!(PrivateKey::read(&folder.path().join("none"), None), Err(key::Error::Kind { .. })));
    assert!(matches!(PublicKey::read(&folder.path().join("missing")), Err(key::Error::Read { .. })));
}

#[test]
fn encrypted_keys_are_those_of_cosign() {
    let folder = TempDir::new().unwrap();
    let Some((private, public)) = keys(folder.path(), "plain", &P256) else { return };
    let Some(validators) = Validators::get() else { return };
    let expect = PublicKey::read(&public).unwrap();
    let encrypted = |label: &str, password: &str| {
        let path = folder.path().join(Digest::of(format!("{label}{password}").as_bytes()).short());
        std::fs::write(&path, validators.encrypted(&private, label, password)).unwrap();
        path
    };
    for (label, password) in
        [("ENCRYPTED SIGSTORE PRIVATE KEY", "open sesame"), ("ENCRYPTED COSIGN PRIVATE KEY", "")]
    {
        let path = encrypted(label, password);
        assert_eq!(PrivateKey::read(&path, Some(password.as_bytes())).unwrap().public(), expect);
        let wrong = PrivateKey::read(&path, Some(b"wrong")).unwrap_err();
        assert!(matches!(wrong, key::Error::Password { .. }), "{wrong:?}");
        let none = PrivateKey::read(&path, None).unwrap_err();
        assert!(none.hint().unwrap().contains("COSIGN_PASSWORD"), "{none:?}");
    }
    // What asks for more memory or time than any key needs is not computed.
    let text = std::fs::read_to_string(encrypted("ENCRYPTED SIGSTORE PRIVATE KEY", "x")).unwrap();
    let body: String = text.lines().filter(|line| !line.starts_with('-')).collect();
    let document: Value = serde_json::from_slice(&STANDARD.decode(body).unwrap()).unwrap();
    for (place, value) in [
        ("/kdf/params/N", json!(1_u64 << 40)),
        ("/kdf/params/N", json!(65535)),
        ("/kdf/params/N", json!(0)),
        ("/kdf/params/p", json!(1 << 20)),
        ("/kdf/params/r", json!(0)),
        ("/kdf/name", json!("argon2")),
        ("/cipher/name", json!("none")),
        ("/cipher/nonce", json!("AAAA")),
        ("/ciphertext", json!("?")),
    ] {
        let mut changed = document.clone();
        *changed.pointer_mut(place).unwrap() = value;
        let path = folder.path().join("changed");
        let body = STANDARD.encode(changed.to_string());
        let lines: Vec<&str> =
            body.as_bytes().chunks(64).map(|line| std::str::from_utf8(line).unwrap()).collect();
        let label = "ENCRYPTED SIGSTORE PRIVATE KEY";
        std::fs::write(
            &path,
            format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", lines.join("\n")),
        )
        .unwrap();
        let error = PrivateKey::read(&path, Some(b"x")).unwrap_err();
        assert!(matches!(error, key::Error::Kind { .. }), "{place}: {error}");
    }
}

/// The layers under one of cosign's tags, with their bytes, by skopeo.
fn layers(registry: &Registry, tag: &str, room: &Path) -> Option<Vec<(Value, Vec<u8>)>> {
    let name = format!("docker://127.0.0.1:{}/team/signed:{tag}", registry.port);
    let raw = tool("skopeo", &["inspect", "--raw", "--tls-verify=false", &name])?;
    let folder = format!("dir:{}", room.join(tag).display());
    tool("skopeo", &["copy", "--quiet", "--src-tls-verify=false", &name, &folder])?;
    let manifest: Value = serde_json::from_str(&raw).unwrap();
    let read = |layer: &Value| {
        let digest = layer["digest"].as_str().unwrap().trim_start_matches("sha256:").to_owned();
        (layer.clone(), std::fs::read(room.join(tag).join(digest)).unwrap())
    };
    Some(manifest["layers"].as_array().unwrap().iter().map(read).collect())
}

#[test]
fn images_and_statements_are_signed_once_and_verified_by_others() {
    let Some(registry) = Registry::start(&Login::None) else { return };
    let (room, settings) = settings();
    let Some((private, public)) = keys(room.folder.path(), "mine", &P256) else { return };
    let Some(theirs) = keys(room.folder.path(), "theirs", &ED25519) else { return };
    let (layout, pushed): (Layout, _) = image(&room.path("image"), 900, &[1000]);
    let reference = registry.reference("team/signed:1");
    let repository = connect(&reference, &settings);
    let key = PrivateKey::read(&private, None).unwrap();
    let unknown = repository.sign(&pushed.digest, &key, &[], &quiet).unwrap_err();
    assert!(matches!(unknown, Error::Refused { status: 404, .. }), "{unknown:?}");
    repository.push(&layout.folder, &quiet).unwrap();
    assert_eq!(repository.resolve(&quiet).unwrap(), pushed.digest);
    let unsigned = repository.verify(&pushed.digest, &key.public(), &quiet).unwrap_err();
    assert!(matches!(unsigned, Error::NotSigned { others: 0, .. }), "{unsigned:?}");

    let statement = |kind: &str| {
        let subject = json!([{"name": "x", "digest": {"sha256": pushed.digest.hex()}}]);
        let kind_of = "https://in-toto.io/Statement/v1";
        json!({"_type": kind_of, "subject": subject, "predicateType": kind, "predicate": {}})
            .to_string()
            .into_bytes()
    };
    let statements = [
        ("https://a.test/1", statement("https://a.test/1")),
        ("https://b.test/2", statement("https://b.test/2")),
    ];
    let signed = |key: &PrivateKey| repository.sign(&pushed.digest, key, &statements, &quiet).unwrap();
    let first = signed(&key);
    assert_eq!((first.added, first.present), (3, 0));
    let again = signed(&key);
    assert_eq!((again.added, again.present), (0, 3), "the same again changes nothing");
    let other = PrivateKey::read(&theirs.0, None).unwrap();
    assert_eq!(signed(&other).added, 3);
    assert_eq!((signed(&key).added, signed(&other).added), (0, 0), "each leaves the other's there");

    for key in [&key, &other] {
        let verified = repository.verify(&pushed.digest, &key.public(), &quiet).unwrap();
        assert_eq!(
            verified.signed_as.iter().collect::<Vec<_>>(),
            [&format!("127.0.0.1:{}/team/signed", registry.port)]
        );
        assert_eq!(verified.statements.iter().collect::<Vec<_>>(), ["https://a.test/1", "https://b.test/2"]);
    }
    let stranger = keys(room.folder.path(), "stranger", &P256).unwrap();
    let stranger = PublicKey::read(&stranger.1).unwrap();
    let error = repository.verify(&pushed.digest, &stranger, &quiet).unwrap_err();
    assert!(matches!(error, Error::NotSigned { others: 2, .. }) && error.hint().is_some(), "{error:?}");

    check_outside(&registry, &pushed.digest, room.folder.path(), [&public, &theirs.1]);
    check_moved(&registry, &repository, &pushed.digest, &key, room.folder.path());
}

/// openssl takes the signatures of the payloads, and the in-toto project's library the envelopes.
fn check_outside(registry: &Registry, image: &Digest, room: &Path, publics: [&Path; 2]) {
    let Some(found) = layers(registry, &format!("sha256-{}.sig", image.hex()), room) else { return };
    assert_eq!(found.len(), 2);
    for ((layer, payload), public) in found.iter().zip(publics) {
        assert_eq!(layer["mediaType"], "application/vnd.dev.cosign.simplesigning.v1+json");
        let signature = layer["annotations"]["dev.cosignproject.cosign/signature"].as_str().unwrap();
        assert!(openssl_verifies(public, payload, &STANDARD.decode(signature).unwrap()));
        let payload: Value = serde_json::from_slice(payload).unwrap();
        assert_eq!(payload["critical"]["image"]["docker-manifest-digest"], image.to_string());
    }
    let Some(validators) = Validators::get() else { return };
    let envelopes = layers(registry, &format!("sha256-{}.att", image.hex()), room).unwrap();
    assert_eq!(envelopes.len(), 4);
    for (index, (layer, envelope)) in envelopes.iter().enumerate() {
        let kind = ["https://a.test/1", "https://b.test/2"][index % 2];
        assert_eq!(layer["mediaType"], "application/vnd.dsse.envelope.v1+json");
        assert_eq!(layer["annotations"]["predicateType"], kind);
        validators.envelope(envelope, publics[index / 2]).unwrap();
        validators.envelope(envelope, publics[1 - index / 2]).unwrap_err();
    }
}

/// A signature of one image says nothing about another, wherever it is put.
fn check_moved(registry: &Registry, repository: &Repository, image: &Digest, key: &PrivateKey, room: &Path) {
    let (layout, other) = self::image(&room.join("other"), 901, &[10]);
    connect(&registry.reference("team/signed:2"), &settings().1).push(&layout.folder, &quiet).unwrap();
    let host = format!("docker://127.0.0.1:{}/team/signed", registry.port);
    for kind in ["sig", "att"] {
        let from = format!("{host}:sha256-{}.{kind}", image.hex());
        let to = format!("{host}:sha256-{}.{kind}", other.digest.hex());
        let copied = tool(
            "skopeo",
            &["copy", "--quiet", "--src-tls-verify=false", "--dest-tls-verify=false", &from, &to],
        );
        if copied.is_none() {
            return;
        }
    }
    let error = repository.verify(&other.digest, &key.public(), &quiet).unwrap_err();
    assert!(matches!(error, Error::NotSigned { others: 2, .. }), "{error:?}");
    assert_eq!(repository.sign(&other.digest, key, &[], &quiet).unwrap().added, 1);
    let verified = repository.verify(&other.digest, &key.public(), &quiet).unwrap();
    assert!(verified.statements.is_empty(), "those are about the first image: {verified:?}");
}
