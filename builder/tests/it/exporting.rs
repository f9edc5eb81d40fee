//! Images as one file, and what skopeo and Podman make of them.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;
use trainyard_builder::export::{Error, Exported, Format, export};
use trainyard_builder::oci;
use trainyard_spec::Digest;

use crate::registry::parts::{INDEX, Image, Layout, blobs, gzip, image, noise, tar_of, tool};

fn write(layout: &Path, format: Format, target: &Path) -> Result<Exported, Error> {
    export(layout, format, target, &|_| {})
}

/// Entries in order, with what has to be the same for everybody.
fn entries(archive: &Path) -> Vec<(String, Vec<u8>)> {
    let mut archive = tar::Archive::new(std::fs::File::open(archive).unwrap());
    let entries = archive.entries().unwrap().map(|entry| {
        let mut entry = entry.unwrap();
        let header = entry.header();
        let owner = (header.uid().unwrap(), header.gid().unwrap(), header.mtime().unwrap());
        assert_eq!(owner, (0, 0, 0));
        assert!(header.username().unwrap().unwrap_or_default().is_empty());
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).unwrap();
        (entry.path().unwrap().display().to_string(), bytes)
    });
    entries.collect()
}

#[test]
fn an_oci_archive_holds_the_layout_and_nothing_else() {
    let folder = TempDir::new().unwrap();
    let (layout, made) = image(&folder.path().join("image"), 700, &[100_000, 0, 300_000]);
    layout.blob(b"what no document refers to");
    let target = folder.path().join("image.tar");
    let written = write(&layout.folder, Format::OciArchive, &target).unwrap();
    let (digest, size) = trainyard_builder::store::digest_of(std::fs::File::open(&target).unwrap()).unwrap();
    assert_eq!(written, Exported { file: target.clone(), size, digest });
    let found = entries(&target);
    let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!((names.len(), names[0], names[names.len() - 1]), (9, "blobs/", "oci-layout"));
    for (name, bytes) in found.iter().filter(|(name, _)| name.len() > 40) {
        assert_eq!(name, &format!("blobs/sha256/{}", Digest::of(bytes).hex()));
    }
    // Again, from another folder at another time: the same bytes.
    let copy = folder.path().join("copy");
    std::fs::create_dir_all(copy.join("blobs/sha256")).unwrap();
    for (name, bytes) in layout.blobs() {
        std::fs::write(copy.join("blobs/sha256").join(name), bytes).unwrap();
    }
    let index: Value =
        serde_json::from_slice(&std::fs::read(layout.folder.join("index.json")).unwrap()).unwrap();
    std::fs::write(copy.join("index.json"), serde_json::to_string_pretty(&index).unwrap()).unwrap();
    let again = write(&copy, Format::OciArchive, &folder.path().join("again.tar")).unwrap();
    assert_eq!(again.digest, written.digest);

    let source = format!("oci-archive:{}", target.display());
    let Some(raw) = tool("skopeo", &["inspect", "--raw", &source]) else { return };
    assert_eq!(Digest::of(raw.as_bytes()), made.digest);
    let back = folder.path().join("back");
    tool("skopeo", &["copy", "--quiet", &source, &format!("oci:{}:x", back.display())]);
    assert_eq!(blobs(&back).len(), 5);
}

#[test]
fn an_oci_archive_of_an_index_holds_all_its_images() {
    let folder = TempDir::new().unwrap();
    let layout = Layout::new(&folder.path().join("index"));
    let images =
        ["amd64", "arm64"].map(|name| layout.image(name, &[noise(710, 1000), name.as_bytes().to_vec()]));
    let manifests: Vec<_> = images.iter().map(|image| image.descriptor.clone()).collect();
    let (_, descriptor) =
        layout.document(INDEX, &json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}));
    layout.finish(descriptor, "both");
    let target = folder.path().join("index.tar");
    write(&layout.folder, Format::OciArchive, &target).unwrap();
    assert_eq!(entries(&target).len(), 2 + layout.blobs().len() + 2);
    let back = folder.path().join("back");
    let from = format!("oci-archive:{}", target.display());
    let copy = ["copy", "--quiet", "--all", &from, &format!("oci:{}:x", back.display())];
    let Some(_) = tool("skopeo", &copy) else { return };
    assert!(blobs(&back) == layout.blobs());

    let error = write(&layout.folder, Format::DockerArchive, &folder.path().join("docker.tar")).unwrap_err();
    assert!(matches!(error, Error::Layout(_)), "{error:?}");
}

/// An image with layers in every compression, one of them twice.
fn mixed(folder: &Path) -> (Layout, Image) {
    let layout = Layout::new(folder);
    let image = layout
        .image("amd64", &[noise(720, 200_000), noise(721, 1000), noise(722, 1000), noise(720, 200_000)]);
    // The second is zstd, in two frames, and the third is not compressed at all.
    let mut manifest: Value = serde_json::from_slice(&read(&layout, &image.digest)).unwrap();
    let tar = tar_of(&noise(721, 1000));
    let (first, second) = tar.split_at(700);
    let zstd = |bytes| zstd::encode_all(bytes, 1).unwrap();
    let mut replace = |index: usize, kind: &str, bytes: &[u8]| {
        let described = &mut manifest["layers"][index];
        described["mediaType"] = json!(format!("application/vnd.oci.image.layer.v1.tar{kind}"));
        described["digest"] = json!(layout.blob(bytes));
        described["size"] = json!(bytes.len());
    };
    replace(1, "+zstd", &[zstd(first), zstd(second)].concat());
    replace(2, "", &tar_of(&noise(722, 1000)));
    let (digest, descriptor) = layout.document(super::registry::parts::MANIFEST, &manifest);
    layout.finish(descriptor.clone(), "team/mixed:1.2");
    (layout, Image { digest, descriptor, ..image })
}

fn read(layout: &Layout, digest: &Digest) -> Vec<u8> {
    std::fs::read(layout.folder.join("blobs/sha256").join(digest.hex())).unwrap()
}

#[test]
fn a_docker_archive_holds_layers_as_docker_load_takes_them() {
    let folder = TempDir::new().unwrap();
    let (layout, image) = mixed(&folder.path().join("image"));
    let target = folder.path().join("docker.tar");
    let written = write(&layout.folder, Format::DockerArchive, &target).unwrap();
    let again = write(&layout.folder, Format::DockerArchive, &folder.path().join("again.tar")).unwrap();
    assert_eq!(again.digest, written.digest);

    let found: BTreeMap<String, Vec<u8>> = entries(&target).into_iter().collect();
    let manifest: Value = serde_json::from_slice(&found["manifest.json"]).unwrap();
    let name = |seed, size| format!("{}.tar", Digest::of(&tar_of(&noise(seed, size))).hex());
    let layers = [name(720, 200_000), name(721, 1000), name(722, 1000), name(720, 200_000)];
    let config = format!("{}.json", image.config.hex());
    assert_eq!(manifest, json!([{"Config": config, "RepoTags": ["team/mixed:1.2"], "Layers": layers}]));
    assert_eq!(found.len(), 1 + 3 + 2, "a layer that stands there twice is written once");
    assert!(found[&config] == read(&layout, &image.config));
    for layer in &layers {
        assert_eq!(*layer, format!("{}.tar", Digest::of(&found[layer]).hex()));
    }
    let repositories: Value = serde_json::from_slice(&found["repositories"]).unwrap();
    assert_eq!(repositories, json!({"team/mixed": {"1.2": layers[3].trim_end_matches(".tar")}}));

    let Some(inspected) =
        tool("skopeo", &["inspect", "--config", &format!("docker-archive:{}", target.display())])
    else {
        return;
    };
    assert!(inspected.contains("65532:65532"), "{inspected}");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (root, run) = (path("root"), path("run"));
    let own = ["--root", &root, "--runroot", &run, "--storage-driver", "vfs", "--cgroup-manager", "cgroupfs"];
    let with = |more: &[&str]| {
        let all: Vec<&str> = own.iter().chain(more).copied().collect();
        tool("podman", &all)
    };
    let Some(_) = with(&["load", "--quiet", "--input", &path("docker.tar")]) else { return };
    let loaded = with(&["images", "--no-trunc", "--format", "{{.Id}} {{.Repository}}:{{.Tag}}"]).unwrap();
    let (id, name) = loaded.trim().split_once(' ').unwrap();
    assert_eq!(id.trim_start_matches("sha256:"), image.config.hex());
    assert!(name.ends_with("/team/mixed:1.2"), "{name}");
}

#[test]
fn images_without_a_name_for_docker_are_exported_without_one() {
    let folder = TempDir::new().unwrap();
    let (layout, image) = image(&folder.path().join("image"), 730, &[100]);
    for (index, (name, expected)) in [
        ("fixture", json!(["fixture:latest"])),
        ("host:5000/a/b", json!(["host:5000/a/b:latest"])),
        ("host:5000/a/b:t@sha256:12", json!(["host:5000/a/b:t"])),
        ("Capitals", Value::Null),
        ("a b", Value::Null),
        ("", Value::Null),
        ("../up", Value::Null),
        ("a:.t", Value::Null),
    ]
    .into_iter()
    .enumerate()
    {
        layout.finish(image.descriptor.clone(), name);
        let target = folder.path().join(format!("{index}.tar"));
        write(&layout.folder, Format::DockerArchive, &target).unwrap();
        let found: BTreeMap<String, Vec<u8>> = entries(&target).into_iter().collect();
        let manifest: Value = serde_json::from_slice(&found["manifest.json"]).unwrap();
        assert_eq!(manifest[0]["RepoTags"], expected, "{name}");
        assert_eq!(found.contains_key("repositories"), !expected.is_null(), "{name}");
    }
}

#[test]
fn what_is_damaged_or_in_the_way_leaves_nothing_behind() {
    let folder = TempDir::new().unwrap();
    let (layout, image) = image(&folder.path().join("image"), 740, &[1000, 2000]);
    let out = folder.path().join("out");
    std::fs::create_dir(&out).unwrap();
    let both = [Format::OciArchive, Format::DockerArchive];
    let names =
        || std::fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>();

    std::fs::write(out.join("there"), "mine").unwrap();
    std::os::unix::fs::symlink("nowhere", out.join("link")).unwrap();
    for format in both {
        for name in ["there", "link"] {
            let error = write(&layout.folder, format, &out.join(name)).unwrap_err();
            assert!(matches!(error, Error::Exists { .. }), "{error:?}");
        }
        assert!(matches!(write(&layout.folder, format, &out.join("no/folder")), Err(Error::Write { .. })));
        assert!(matches!(write(folder.path(), format, &out.join("new")), Err(Error::Layout(_))));
    }
    assert_eq!(std::fs::read_to_string(out.join("there")).unwrap(), "mine");

    // The layer's bytes are those of its digest, and not what the configuration lists.
    let other = Layout::new(&folder.path().join("other"));
    let lied = other.image("amd64", &[noise(741, 1000)]);
    let mut manifest: Value = serde_json::from_slice(&read(&other, &lied.digest)).unwrap();
    let bytes = gzip(&tar_of(b"another"));
    manifest["layers"][0]["digest"] = json!(other.blob(&bytes));
    manifest["layers"][0]["size"] = json!(bytes.len());
    let (_, descriptor) = other.document(super::registry::parts::MANIFEST, &manifest);
    other.finish(descriptor, "lied");
    let error = write(&other.folder, Format::DockerArchive, &out.join("new")).unwrap_err();
    assert!(matches!(error, Error::Layout(oci::Error::Damaged { .. })), "{error:?}");

    let blob = layout.folder.join("blobs/sha256").join(image.layers[1].hex());
    let mut bytes = std::fs::read(&blob).unwrap();
    bytes[50] ^= 1;
    std::fs::write(&blob, bytes).unwrap();
    for format in both {
        let error = write(&layout.folder, format, &out.join("new")).unwrap_err();
        assert!(matches!(error, Error::Layout(oci::Error::Damaged { .. })), "{error:?}");
    }
    assert_eq!(names().len(), 2, "{:?}", names());
}
