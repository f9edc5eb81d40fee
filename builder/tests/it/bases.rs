//! Images on a base image: from a folder, an archive and a registry, whose layers stay as they are.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use tempfile::TempDir;
use trainyard_builder::image::{self, build};
use trainyard_builder::settings::Settings;
use trainyard_builder::{inspect, lock, oci, unpack, vendor};
use trainyard_spec::Digest;

use crate::registry::parts::{self, Image, Layout, Login, Registry, connect};

/// A layer of files, of links where a value begins with an arrow, and of folders where a name ends in a slash.
fn layer(entries: &[(&str, &str)]) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    for (path, body) in entries {
        let mut header = tar::Header::new_ustar();
        header.set_mode(if path.ends_with('/') { 0o755 } else { 0o644 });
        if let Some(target) = body.strip_prefix("-> ") {
            header.set_entry_type(tar::EntryType::Symlink);
            header.set_size(0);
            tar.append_link(&mut header, path, target).unwrap();
        } else {
            let kind = if path.ends_with('/') { tar::EntryType::Directory } else { tar::EntryType::Regular };
            header.set_entry_type(kind);
            header.set_size(body.len() as u64);
            tar.append_data(&mut header, path, body.as_bytes()).unwrap();
        }
    }
    tar.into_inner().unwrap()
}

/// A base with things that its second layer takes away.
fn base(folder: &Path, changed: &str) -> (Layout, Image) {
    let layout = Layout::new(folder);
    let layers = [
        layer(&[
            ("etc/passwd", "root:x:0:0::/:/nologin\n"),
            ("etc/mtab", "-> /proc/mounts"),
            ("lib", "-> usr/lib"),
            ("opt/a/one", "1"),
            ("opt/a/two", "2"),
            ("usr/lib/x", changed),
            ("var/gone", "g"),
        ]),
        layer(&[("opt/a/.wh..wh..opq", ""), ("opt/a/three", "3"), ("var/.wh.gone", ""), ("usr/lib/y", "y")]),
    ];
    let config =
        json!({"Env": ["PATH=/base/bin", "BASE=1"], "Entrypoint": ["/base"], "Labels": {"of": "base"}});
    let image = layout.image_of("amd64", &layers, &config);
    layout.finish(image.descriptor.clone(), "base");
    (layout, image)
}

/// A folder with a manifest, and the files that its image has above the base.
struct Bench {
    folder: TempDir,
    settings: Settings,
}

impl Bench {
    fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let settings = Settings::from_environment(folder.path().join("cache")).unwrap();
        let bench = Self { folder, settings };
        bench.file("own/bin/program", "");
        let program = bench.folder.path().join("own/bin/program");
        std::fs::set_permissions(program, PermissionsExt::from_mode(0o755)).unwrap();
        bench
    }

    fn file(&self, path: &str, text: &str) {
        let path = self.folder.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn manifest(&self, image: &str, more: &str) -> std::path::PathBuf {
        let text = format!(
            r#"
version = 1
name = "above"
platform = "linux/amd64"
[input.base]
kind = "oci"
image = "{image}"
[input.own]
kind = "files"
path = "own"
into = "/"
{more}
[config]
entrypoint = ["/bin/program"]
user = "65532:65532"
env = {{ PATH = "/bin" }}
"#
        );
        self.file("image.toml", &text);
        self.folder.path().join("image.toml")
    }

    fn lock(&self, image: &str) -> Result<std::path::PathBuf, lock::Error> {
        let path = self.manifest(image, "");
        lock::lock(&path, &self.settings, &|_| {}).map(|_| path)
    }

    fn build(&self, image: &str) -> image::Image {
        build(&self.lock(image).unwrap(), &self.settings, &|_| {}).unwrap()
    }
}

#[test]
fn layers_of_the_base_stay_and_own_ones_lie_above() {
    let bench = Bench::new();
    let (_, below) = base(&bench.folder.path().join("base"), "x");
    // What the base has taken away may come again, and what is the same is no conflict.
    for (path, text) in
        [("own/var/gone", "again"), ("own/opt/a/one", "new"), ("own/usr/lib/y", "y"), ("own/lib/z", "z")]
    {
        bench.file(path, text);
    }
    let image = bench.build("./base");
    let layout = oci::Layout::open(&image.layout).unwrap();
    let digests: Vec<_> = layout.manifest.layers().iter().map(|layer| layer.digest().to_string()).collect();
    assert_eq!(digests.len(), 3);
    assert!(below.layers.iter().map(Digest::to_string).eq(digests[..2].iter().cloned()), "{digests:?}");
    let config = serde_json::to_value(layout.configuration.config()).unwrap();
    assert_eq!(config["Env"], json!(["BASE=1", "PATH=/bin"]));
    assert_eq!(config["Entrypoint"], json!(["/bin/program"]));
    assert_eq!(config["Labels"]["org.opencontainers.image.base.digest"], json!(below.digest));
    assert_eq!(config["Labels"]["of"], Value::Null, "a base does not say what is above it");
    let history = layout.configuration.history().clone().unwrap();
    let made: Vec<_> = history.iter().map(|one| one.created_by().clone().unwrap()).collect();
    assert_eq!(made, ["a test", "a test", "trainyard build: layer own"]);

    let root = unpack::unpack(&layout, &bench.settings.cache).unwrap();
    let read = |path: &str| std::fs::read_to_string(root.join(path)).ok();
    for (path, text) in [
        ("var/gone", Some("again")),
        ("opt/a/one", Some("new")),
        ("opt/a/two", None),
        ("opt/a/three", Some("3")),
        ("usr/lib/x", Some("x")),
        ("usr/lib/z", Some("z")),
        ("etc/passwd", Some("root:x:0:0::/:/nologin\n")),
    ] {
        assert_eq!(read(path).as_deref(), text, "{path}");
    }
    let report = inspect::inspect(&layout).unwrap();
    let own: Vec<_> = report.layers[2].files.keys().map(String::as_str).collect();
    assert_eq!(
        own,
        ["/etc/group", "/etc/ld.so.conf", "/opt/a/one", "/usr/bin/program", "/usr/lib/z", "/var/gone"],
        "nothing that the base has already"
    );
    crate::supply::check_base(&image, &bench.settings, &below.digest);

    bench.file("own/usr/lib/x", "other");
    let path = bench.lock("./base").unwrap();
    let error = build(&path, &bench.settings, &|_| {}).unwrap_err();
    assert!(error.to_string().contains("/usr/lib/x comes from input base and from input own"), "{error}");
}

#[test]
fn a_base_is_the_same_from_a_folder_an_archive_or_a_registry() {
    let bench = Bench::new();
    let (layout, below) = base(&bench.folder.path().join("base"), "x");
    let first = bench.build("./base");
    let tarred = Command::new("tar")
        .args(["-cf", "base.tar", "-C", "base", "."])
        .current_dir(bench.folder.path())
        .status();
    assert!(tarred.unwrap().success());
    let layers = |image: &image::Image| image.layers.clone();
    let from_archive = bench.build("./base.tar");
    assert_eq!(layers(&from_archive), layers(&first));
    assert_ne!(from_archive.digest, first.digest, "the label that names the base differs");

    let Some(registry) = Registry::start(&Login::None) else { return };
    let reference = registry.reference("team/base:1");
    connect(&reference, &bench.settings).push(&layout.folder, &parts::quiet).unwrap();
    // A machine that has nothing yet, and then no network.
    let elsewhere = Settings { cache: bench.folder.path().join("elsewhere"), ..bench.settings.clone() };
    let path = bench.manifest(&reference.to_string(), "");
    lock::lock(&path, &elsewhere, &|_| {}).unwrap();
    let from_registry = build(&path, &elsewhere, &|_| {}).unwrap();
    assert_eq!(layers(&from_registry), layers(&first));
    let offline = Settings { offline: true, ..elsewhere.clone() };
    let again = build(&path, &offline, &|_| {}).unwrap();
    assert_eq!((again.digest, again.reused), (from_registry.digest, true));

    // The tag moves on; the lock does not, and neither does who has nothing.
    let (changed, _) = base(&bench.folder.path().join("changed"), "other");
    connect(&reference, &bench.settings).push(&changed.folder, &parts::quiet).unwrap();
    let nothing = Settings { cache: bench.folder.path().join("nothing"), ..bench.settings.clone() };
    assert_eq!(build(&path, &nothing, &|_| {}).unwrap().digest, from_registry.digest);
    let lock = std::fs::read_to_string(bench.folder.path().join("image.lock")).unwrap();
    assert!(lock.contains(&below.digest.to_string()) && !lock.contains("127.0.0.1"), "{lock}");
}

#[test]
fn wrong_bases_are_told() {
    let bench = Bench::new();
    let folder = bench.folder.path().join("base");
    let (layout, below) = base(&folder, "x");
    let said = |image: &str| bench.lock(image).unwrap_err().to_string();
    assert!(said("ubuntu").contains("does not name an image in a registry"), "{}", said("ubuntu"));
    assert!(said("./none").contains("none"), "{}", said("./none"));
    bench.file("no.tar", "no archive");
    assert!(said("./no.tar").contains("no.tar"), "{}", said("./no.tar"));

    // Another image in the folder than was locked.
    let path = bench.lock("./base").unwrap();
    let nothing = Settings { cache: bench.folder.path().join("nothing"), ..bench.settings.clone() };
    std::fs::remove_dir_all(&folder).unwrap();
    let (_, other) = base(&folder, "other");
    let error = build(&path, &nothing, &|_| {}).unwrap_err().to_string();
    assert!(
        error.contains(&other.digest.to_string()) && error.contains(&below.digest.to_string()),
        "{error}"
    );

    // A layer that is damaged, and one whose diff id is a lie.
    let layer = folder.join("blobs/sha256").join(other.layers[0].hex());
    let whole = std::fs::read(&layer).unwrap();
    std::fs::write(&layer, &whole[1..]).unwrap();
    assert!(said("./base").contains("is damaged"), "{}", said("./base"));
    std::fs::write(&layer, whole).unwrap();
    let config = folder.join("blobs/sha256").join(other.config.hex());
    let mut lie: Value = serde_json::from_slice(&std::fs::read(config).unwrap()).unwrap();
    lie["rootfs"]["diff_ids"][1] = json!(Digest::of(b"a lie"));
    let (_, config) = layout.document("application/vnd.oci.image.config.v1+json", &lie);
    let manifest = folder.join("blobs/sha256").join(other.digest.hex());
    let mut manifest: Value = serde_json::from_slice(&std::fs::read(manifest).unwrap()).unwrap();
    manifest["config"] = config;
    let (_, descriptor) = layout.document(parts::MANIFEST, &manifest);
    layout.finish(descriptor, "lie");
    let path = bench.lock("./base").unwrap();
    let error = build(&path, &bench.settings, &|_| {}).unwrap_err().to_string();
    assert!(error.contains("its configuration says that layer"), "{error}");
}

#[test]
fn a_vendored_base_is_enough_without_the_place_that_it_came_from() {
    let bench = Bench::new();
    let below = bench.folder.path().join("base");
    base(&below, "x");
    let manifest = bench.lock("./base").unwrap();
    let first = build(&manifest, &bench.settings, &|_| {}).unwrap();
    let vendored = bench.folder.path().join("vendored");
    let found = vendor::vendor(&manifest, &vendored, &bench.settings, &|_| {}).unwrap();
    assert_eq!((found.files, found.crates), (4, 0), "manifest, configuration and two layers");

    std::fs::remove_dir_all(&below).unwrap();
    let mut there = bench.settings.clone();
    there.cache = bench.folder.path().join("there");
    there.offline = true;
    build(&manifest, &there, &|_| {}).unwrap_err();
    there.index.vendored = vec![vendored.clone()];
    assert_eq!(build(&manifest, &there, &|_| {}).unwrap().digest, first.digest);

    // A layer that has gone bad is told.
    let layer = &first.layers[0].digest;
    std::fs::remove_file(vendored.join("blobs/sha256").join(layer.hex())).unwrap();
    std::fs::write(vendored.join("blobs/sha256").join(layer.hex()), "rot").unwrap();
    there.cache = bench.folder.path().join("again");
    let refused = build(&manifest, &there, &|_| {}).unwrap_err();
    assert!(refused.to_string().contains("is damaged"), "{refused}");
}
