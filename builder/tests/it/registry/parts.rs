//! A real registry (Debian's docker-registry) on a free port of loopback, a token server that signs tokens for it, and
//! images to move.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use base64::Engine as _;
use flate2::{Compression, GzBuilder};
use serde_json::{Value, json};
use tempfile::TempDir;
use trainyard_builder::progress::Event;
use trainyard_builder::registry::{CredentialSettings, Options, Reference, Repository};
use trainyard_builder::settings::Settings;
use trainyard_spec::Digest;

use crate::room::Room;

pub(crate) const USER: &str = "ali";
pub(crate) const PASSWORD: &str = "open sesame";
/// The password as bcrypt has it, in the form of htpasswd(1).
const HTPASSWD: &str = "ali:$2b$05$abcdefghijklmnopqrstuupx2xBUC4954936wVIjyyPHmUBFu0wCW\n";

/// How a registry asks who asks.
pub(crate) enum Login<'a> {
    None,
    Basic,
    Token {
        realm: &'a str,
        certificate: &'a Path,
    },
    /// Nobody is asked; TLS with this certificate and key.
    Tls(&'a Path, &'a Path),
}

/// A registry with a storage folder of its own, which ends with the test.
pub(crate) struct Registry {
    child: Child,
    pub(crate) port: u16,
    _folder: TempDir,
}

impl Registry {
    /// A registry; none where docker-registry is missing and may be.
    pub(crate) fn start(login: &Login<'_>) -> Option<Self> {
        Self::configured(login, |_| {})
    }

    /// As [`Registry::start`], with changes to its configuration.
    pub(crate) fn configured(login: &Login<'_>, change: impl Fn(&mut Value)) -> Option<Self> {
        let folder = TempDir::new().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        let mut config = json!({
            "version": "0.1",
            "log": {"level": "error", "accesslog": {"disabled": true}},
            "storage": {"filesystem": {"rootdirectory": path("data")}},
            "http": {"relativeurls": true},
        });
        match login {
            Login::None => {}
            Login::Basic => {
                std::fs::write(path("htpasswd"), HTPASSWD).unwrap();
                config["auth"] = json!({"htpasswd": {"realm": "test", "path": path("htpasswd")}});
            }
            Login::Token { realm, certificate } => {
                config["auth"] = json!({"token": {
                    "realm": realm, "service": "test registry", "issuer": "test issuer", "rootcertbundle": certificate,
                }});
            }
            Login::Tls(certificate, key) => {
                config["http"]["tls"] = json!({"certificate": certificate, "key": key});
            }
        }
        change(&mut config);
        // Another process may take the port before the registry does.
        for _ in 0..5 {
            let port = free_port();
            config["http"]["addr"] = json!(format!("127.0.0.1:{port}"));
            // JSON is YAML.
            std::fs::write(path("config.yml"), config.to_string()).unwrap();
            let log = std::fs::File::create(path("log")).unwrap();
            let mut child = match Command::new("docker-registry")
                .args(["serve", &path("config.yml")])
                .stdin(Stdio::null())
                .stdout(log.try_clone().unwrap())
                .stderr(log)
                .spawn()
            {
                Ok(child) => child,
                Err(error) => {
                    missing("docker-registry", &error);
                    return None;
                }
            };
            let start = Instant::now();
            while start.elapsed() < Duration::from_secs(20) && child.try_wait().unwrap().is_none() {
                if TcpStream::connect(("127.0.0.1", port)).is_ok() {
                    return Some(Self { child, port, _folder: folder });
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            child.kill().unwrap();
            child.wait().unwrap();
        }
        panic!("docker-registry does not start: {}", std::fs::read_to_string(path("log")).unwrap());
    }

    pub(crate) fn reference(&self, rest: &str) -> Reference {
        reference(self.port, rest)
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

pub(crate) fn reference(port: u16, rest: &str) -> Reference {
    format!("127.0.0.1:{port}/{rest}").parse().unwrap()
}

pub(crate) fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn missing(program: &str, error: &dyn std::fmt::Display) {
    assert!(std::env::var_os("CI").is_none(), "{program} is needed here: {error}");
    eprintln!("SKIPPED: {program}: {error}");
}

/// Runs a tool of this machine; none where it is missing and may be.
pub(crate) fn tool(program: &str, arguments: &[&str]) -> Option<String> {
    match Command::new(program).args(arguments).output() {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{program} {arguments:?}: {said}");
            Some(String::from_utf8_lossy(&output.stdout).into_owned())
        }
        Err(error) => {
            missing(program, &error);
            None
        }
    }
}

/// Settings of a room of its own, which retry soon.
pub(crate) fn settings() -> (Room, Settings) {
    let mut room = Room::new(&[]);
    room.settings.network.retry_delay = Duration::from_millis(2);
    let settings = room.settings.clone();
    (room, settings)
}

/// Settings whose credentials are those of this authentication file.
pub(crate) fn with_auth_file(settings: &Settings, folder: &Path, file: &Value) -> Settings {
    let path = folder.join("auth.json");
    std::fs::write(&path, file.to_string()).unwrap();
    let credentials = CredentialSettings { files: vec![path], ..CredentialSettings::default() };
    Settings { credentials, ..settings.clone() }
}

/// An authentication file that has a password for a registry.
pub(crate) fn password_for(host: &str, password: &str) -> Value {
    let auth = base64::engine::general_purpose::STANDARD.encode(format!("{USER}:{password}"));
    json!({"auths": {host: {"auth": auth}}})
}

pub(crate) fn quiet(_: Event) {}

pub(crate) fn connect(reference: &Reference, settings: &Settings) -> Repository {
    Repository::connect(reference, settings, Options::default(), &quiet).unwrap()
}

/// Bytes that do not compress, the same for the same seed.
pub(crate) fn noise(seed: u32, size: usize) -> Vec<u8> {
    let mut state = u64::from(seed) + 1;
    let next = || {
        // xorshift64, by Marsaglia.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    std::iter::repeat_with(next).flatten().take(size).collect()
}

/// An OCI layout in the making.
pub(crate) struct Layout {
    pub(crate) folder: PathBuf,
}

/// An image of a layout.
pub(crate) struct Image {
    pub(crate) digest: Digest,
    pub(crate) config: Digest,
    pub(crate) descriptor: Value,
    pub(crate) layers: Vec<Digest>,
}

impl Layout {
    pub(crate) fn new(folder: &Path) -> Self {
        std::fs::create_dir_all(folder.join("blobs/sha256")).unwrap();
        std::fs::write(folder.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
        Self { folder: folder.to_owned() }
    }

    pub(crate) fn blob(&self, bytes: &[u8]) -> Digest {
        let digest = Digest::of(bytes);
        std::fs::write(self.folder.join("blobs/sha256").join(digest.hex()), bytes).unwrap();
        digest
    }

    pub(crate) fn document(&self, media_type: &str, document: &Value) -> (Digest, Value) {
        let bytes = serde_json::to_vec(document).unwrap();
        let digest = self.blob(&bytes);
        (digest, json!({"mediaType": media_type, "digest": digest, "size": bytes.len()}))
    }

    /// Adds an image whose layers each hold one file of these bytes.
    pub(crate) fn image(&self, architecture: &str, files: &[Vec<u8>]) -> Image {
        let tars: Vec<_> = files.iter().map(|bytes| tar_of(bytes)).collect();
        self.image_of(architecture, &tars, &json!({"Entrypoint": ["/file"], "User": "65532:65532"}))
    }

    /// Adds an image of these layers.
    pub(crate) fn image_of(&self, architecture: &str, tars: &[Vec<u8>], config: &Value) -> Image {
        let (mut layers, mut diff_ids) = (Vec::new(), Vec::new());
        let mut digests = Vec::new();
        for tar in tars {
            let gzip = gzip(tar);
            let digest = self.blob(&gzip);
            diff_ids.push(Digest::of(tar));
            digests.push(digest);
            layers.push(json!({
                "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": digest, "size": gzip.len(),
            }));
        }
        let (config, described) = self.document(
            "application/vnd.oci.image.config.v1+json",
            &json!({
                "architecture": architecture, "os": "linux", "created": "1970-01-01T00:00:00Z",
                "config": config,
                "rootfs": {"type": "layers", "diff_ids": diff_ids},
                "history": diff_ids.iter().map(|_| json!({"created_by": "a test"})).collect::<Vec<_>>(),
            }),
        );
        let (digest, mut descriptor) = self.document(
            MANIFEST,
            &json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": described, "layers": layers}),
        );
        descriptor["platform"] = json!({"os": "linux", "architecture": architecture});
        Image { digest, config, descriptor, layers: digests }
    }

    /// What the layout says that it holds.
    pub(crate) fn finish(&self, mut descriptor: Value, name: &str) {
        descriptor["annotations"] = json!({"org.opencontainers.image.ref.name": name});
        let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [descriptor]});
        std::fs::write(self.folder.join("index.json"), index.to_string()).unwrap();
    }

    /// All blobs, by name.
    pub(crate) fn blobs(&self) -> Vec<(String, Vec<u8>)> {
        blobs(&self.folder)
    }
}

pub(crate) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(crate) const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// A layout of one image, with layers of noise of these sizes.
pub(crate) fn image(folder: &Path, seed: u32, sizes: &[usize]) -> (Layout, Image) {
    let layout = Layout::new(folder);
    let files: Vec<Vec<u8>> = (seed..).zip(sizes).map(|(seed, size)| noise(seed, *size)).collect();
    let image = layout.image("amd64", &files);
    layout.finish(image.descriptor.clone(), "fixture");
    (layout, image)
}

pub(crate) fn blobs(layout: &Path) -> Vec<(String, Vec<u8>)> {
    let mut all: Vec<_> = std::fs::read_dir(layout.join("blobs/sha256"))
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|entry| (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap()))
        .collect();
    all.sort();
    all
}

pub(crate) fn tar_of(bytes: &[u8]) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_ustar();
    header.set_size(bytes.len() as u64);
    header.set_mode(0o755);
    tar.append_data(&mut header, "file", bytes).unwrap();
    tar.into_inner().unwrap()
}

pub(crate) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut gzip = GzBuilder::new().write(Vec::new(), Compression::none());
    gzip.write_all(bytes).unwrap();
    gzip.finish().unwrap()
}
