//! Images to and from a real registry, and to files, from the command line.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use trainyard_spec::Digest;

use crate::yard::{has, run, trainyard};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// A layout of an image with one empty layer.
fn layout(folder: &Path) -> (PathBuf, Digest) {
    image_of(&folder.join("layout"), "amd64", &json!({}))
}

fn image_of(folder: &Path, architecture: &str, labels: &Value) -> (PathBuf, Digest) {
    let folder = folder.to_owned();
    let blobs = folder.join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    let described = |kind: &str, bytes: &[u8]| {
        let digest = Digest::of(bytes);
        fs::write(blobs.join(digest.hex()), bytes).unwrap();
        json!({"mediaType": kind, "digest": digest, "size": bytes.len()})
    };
    let tar = [0; 1024];
    let layer = described("application/vnd.oci.image.layer.v1.tar", &tar);
    let config = json!({
        "architecture": architecture, "os": "linux", "config": {"Labels": labels},
        "rootfs": {"type": "layers", "diff_ids": [Digest::of(&tar)]},
    });
    let config = described("application/vnd.oci.image.config.v1+json", config.to_string().as_bytes());
    let manifest =
        json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [layer]}).to_string();
    let image = described(MANIFEST, manifest.as_bytes());
    fs::write(folder.join("index.json"), json!({"schemaVersion": 2, "manifests": [image]}).to_string())
        .unwrap();
    fs::write(folder.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    (folder, Digest::of(manifest.as_bytes()))
}

struct Registry(Child);

impl Registry {
    fn start(folder: &Path) -> (Self, u16) {
        let port = free_port();
        let config = json!({
            "version": "0.1", "log": {"level": "error", "accesslog": {"disabled": true}},
            "storage": {"filesystem": {"rootdirectory": folder.join("data")}},
            "http": {"addr": format!("127.0.0.1:{port}")},
        });
        // JSON is YAML.
        fs::write(folder.join("config.yml"), config.to_string()).unwrap();
        let child = Command::new("docker-registry")
            .arg("serve")
            .arg(folder.join("config.yml"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let start = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(start.elapsed() < Duration::from_secs(20), "docker-registry does not start");
            std::thread::sleep(Duration::from_millis(10));
        }
        (Self(child), port)
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// The program with a home folder and credentials of its own.
fn own(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = trainyard(arguments);
    fs::write(folder.join("auth.json"), "{}").unwrap();
    command.env("TRAINYARD_HOME", folder.join("home")).env("REGISTRY_AUTH_FILE", folder.join("auth.json"));
    command
}

#[test]
fn an_image_is_pushed_pulled_and_exported() {
    if !has("docker-registry") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (layout, digest) = layout(folder.path());
    let layout = layout.to_str().unwrap();
    let (_registry, port) = Registry::start(folder.path());
    let reference = format!("localhost:{port}/team/empty:1");

    let pushed = run(&mut own(folder.path(), &["push", layout, &reference]));
    assert_eq!(pushed.code, Some(0), "{}", pushed.err);
    assert_eq!(pushed.out, format!("localhost:{port}/team/empty@{digest}\n"));
    assert!(pushed.err.contains(&format!("Pushed {reference} (")), "{}", pushed.err);
    let again = run(&mut own(folder.path(), &["push", layout, &reference, "--format", "json"]));
    let again: Value = serde_json::from_str(&again.out).unwrap();
    assert_eq!(again, json!({"digest": digest, "sent": 0, "uploaded": 0, "present": 2, "mounted": 0}));

    let named = pushed.out.trim();
    let pulled = run(&mut own(folder.path(), &["pull", named, "--output", &path("pulled")]));
    assert_eq!(pulled.code, Some(0), "{}", pulled.err);
    assert_eq!(pulled.out, format!("{digest}\n"));
    let inspected = run(&mut own(folder.path(), &["inspect", &path("pulled"), "--format", "json"]));
    assert!(inspected.out.contains(&digest.to_string()), "{} {}", inspected.out, inspected.err);
    let twice = run(&mut own(folder.path(), &["pull", named, "--output", &path("pulled")]));
    assert_eq!(twice.code, Some(2), "{}", twice.err);
    assert!(twice.err.contains("pulled exists"), "{}", twice.err);

    for (format, document) in [("oci-archive", "index.json"), ("docker-archive", "manifest.json")] {
        let output = path(format);
        let arguments = ["export", &path("pulled"), "--format", format, "--output", &output];
        let exported = run(&mut own(folder.path(), &arguments));
        assert_eq!(exported.code, Some(0), "{}", exported.err);
        let bytes = fs::read(&output).unwrap();
        assert_eq!(exported.out, format!("{}\n", Digest::of(&bytes)));
        let listed = Command::new("tar").arg("-tf").arg(&output).output().unwrap();
        let listed = String::from_utf8(listed.stdout).unwrap();
        assert!(listed.lines().any(|name| name == document), "{format}: {listed}");
        assert_eq!(run(&mut own(folder.path(), &arguments)).code, Some(2), "the file exists now");
    }
}

#[test]
fn an_image_is_signed_and_verified() {
    if !has("docker-registry") || !has("openssl") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let openssl = |arguments: &[&str]| {
        assert!(Command::new("openssl").args(arguments).output().unwrap().status.success())
    };
    for name in ["mine", "other"] {
        let (key, public) = (path(&format!("{name}.key")), path(&format!("{name}.pub")));
        openssl(&["genpkey", "-algorithm", "ed25519", "-out", &key]);
        openssl(&["pkey", "-in", &key, "-pubout", "-out", &public]);
    }
    let (layout, digest) = layout(folder.path());
    let (_registry, port) = Registry::start(folder.path());
    let reference = format!("localhost:{port}/team/empty:1");
    let (key, public) = (path("mine.key"), path("mine.pub"));

    let pushed =
        run(&mut own(folder.path(), &["push", layout.to_str().unwrap(), &reference, "--sign", &key]));
    assert_eq!(pushed.code, Some(0), "{}", pushed.err);
    assert!(pushed.err.contains("nothing is attached to"), "{}", pushed.err);
    assert!(pushed.err.contains("Signed signatures and statements: 1 added, 0 were there"), "{}", pushed.err);
    let again = run(&mut own(folder.path(), &["sign", &reference, "--key", &key]));
    assert_eq!(
        (again.code, again.out),
        (Some(0), format!("localhost:{port}/team/empty@{digest}\n")),
        "{}",
        again.err
    );
    assert!(again.err.contains("Signed signatures and statements: 0 added, 1 were there"), "{}", again.err);

    let verified = run(&mut own(folder.path(), &["verify-signature", &reference, "--key", &public]));
    assert_eq!((verified.code, &verified.out), (Some(0), &format!("localhost:{port}/team/empty@{digest}\n")));
    let arguments = ["verify-signature", &reference, "--key", &public, "--format", "json"];
    let verified: Value = serde_json::from_str(&run(&mut own(folder.path(), &arguments)).out).unwrap();
    let name = format!("localhost:{port}/team/empty");
    assert_eq!(verified, json!({"digest": digest, "signed-as": [name], "statements": []}));
    for (key, code, said) in [
        (path("other.pub"), 4, "is not signed with this key; signatures by others: 1"),
        (key, 2, "needed is \"PUBLIC KEY\""),
        (path("missing"), 2, "cannot read the key"),
    ] {
        let answer = run(&mut own(folder.path(), &["verify-signature", &reference, "--key", &key]));
        assert_eq!(answer.code, Some(code), "{}", answer.err);
        assert!(answer.err.contains(said) && answer.out.is_empty(), "{}", answer.err);
    }
}

#[test]
fn an_image_that_must_not_be_handed_on_is_not_pushed() {
    let folder = tempfile::tempdir().unwrap();
    let (layout, _) =
        image_of(&folder.path().join("layout"), "amd64", &json!({"trainyard.local-only": "true"}));
    // Nobody listens there: it is refused before anything is sent.
    let nobody = format!("127.0.0.1:{}/a", free_port());
    let pushed = run(&mut own(folder.path(), &["push", layout.to_str().unwrap(), &nobody]));
    assert_eq!(pushed.code, Some(3), "{}", pushed.err);
    assert!(pushed.err.contains("local-only") && pushed.err.contains("hint: "), "{}", pushed.err);
    for arguments in [&["provenance"][..], &["sbom", "--format", "spdx"], &["sbom", "--format", "cyclonedx"]]
    {
        let said = run(&mut own(folder.path(), &[arguments, &[layout.to_str().unwrap()]].concat()));
        assert_eq!(said.code, Some(2), "{}", said.err);
        assert!(said.err.contains("is not known here") && said.err.contains("hint: "), "{}", said.err);
    }
}

#[test]
fn what_cannot_be_pushed_or_pulled_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let (layout, _) = layout(folder.path());
    let layout = layout.to_str().unwrap();
    let output = folder.path().join("new").to_str().unwrap().to_owned();
    let nobody = format!("127.0.0.1:{}/a", free_port());
    for (arguments, code, said) in [
        (&["push", layout, "ubuntu"][..], 2, "hint: write the registry's host in full"),
        (&["pull", "library/ubuntu:24.04", "--output", &output], 2, "no registry host"),
        (&["pull", "https://h.x/a", "--output", &output], 2, "no scheme"),
        (&["push", "no-such-image", &nobody], 2, "neither a folder nor a manifest"),
        (&["push", "src", &nobody], 4, "no index.json"),
        (&["push", layout, &nobody], 4, "127.0.0.1"),
        (&["pull", &nobody, "--output", &output], 4, "127.0.0.1"),
        (&["export", "src", "--format", "oci-archive", "--output", &output], 4, "no index.json"),
        (&["export", layout, "--format", "oci-archive", "--output", "/dev/null"], 2, "/dev/null exists"),
        (&["export", layout, "--format", "qcow2", "--output", &output], 2, "qcow2"),
    ] {
        let answer = run(&mut own(folder.path(), arguments));
        assert_eq!(answer.code, Some(code), "{arguments:?}: {}", answer.err);
        assert!(answer.err.contains(said), "{arguments:?}: {}", answer.err);
        assert!(answer.out.is_empty(), "{arguments:?}: {}", answer.out);
        assert!(!Path::new(&output).exists(), "{arguments:?}: something half done was left");
    }
}

#[test]
fn images_for_two_platforms_have_one_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (amd64, digest) = layout(folder.path());
    let (arm64, other) = image_of(&folder.path().join("arm64"), "arm64", &json!({}));
    let (amd64, arm64) = (amd64.to_str().unwrap(), arm64.to_str().unwrap());
    let joined = run(&mut own(folder.path(), &["index", arm64, amd64, "--output", &path("one")]));
    assert_eq!(joined.code, Some(0), "{}", joined.err);
    let turned = run(&mut own(folder.path(), &["index", amd64, arm64, "--output", &path("other")]));
    assert_eq!(joined.out, turned.out, "their order does not count");
    let twice = run(&mut own(folder.path(), &["index", amd64, amd64, "--output", &path("twice")]));
    assert_eq!(twice.code, Some(2), "{}", twice.err);
    assert!(twice.err.contains("are both for linux/amd64"), "{}", twice.err);
    assert!(!Path::new(&path("twice")).exists());

    if !has("docker-registry") || !has("skopeo") {
        return;
    }
    let (_registry, port) = Registry::start(folder.path());
    let reference = format!("localhost:{port}/team/both:1");
    let pushed = run(&mut own(folder.path(), &["push", &path("one"), &reference]));
    assert_eq!(pushed.code, Some(0), "{}", pushed.err);
    assert_eq!(pushed.out.trim().rsplit('@').next(), Some(joined.out.trim()));
    let pulled = run(&mut own(folder.path(), &["pull", &reference, "--output", &path("pulled")]));
    let here = if cfg!(target_arch = "aarch64") { other } else { digest };
    assert_eq!(pulled.out, format!("{here}\n"), "{}", pulled.err);
    let source = format!("docker://{reference}");
    for architecture in ["amd64", "arm64"] {
        let inspected = Command::new("skopeo")
            .args(["--override-arch", architecture, "inspect", "--tls-verify=false", &source])
            .output()
            .unwrap();
        let inspected: Value = serde_json::from_slice(&inspected.stdout).unwrap();
        assert_eq!(inspected["Architecture"], architecture);
    }
}
