//! What may be pushed, and what is attached to it.

use std::path::Path;

use serde_json::{Value, json};
use trainyard_builder::elf::ComputeCapability;
use trainyard_builder::image::build;
use trainyard_builder::prune::{self, Keep};
use trainyard_builder::registry::Artifact;
use trainyard_builder::store::Store;
use trainyard_builder::supply::redistribution::{Error, check};
use trainyard_builder::supply::{self, Facts};
use trainyard_spec::Digest;

use super::Supplied;
use crate::elf_files::{Library, ZSTD, machine_code, region};
use crate::images;
use crate::registry::parts::{Layout, Login, MANIFEST, Registry, connect, quiet, settings, tool};

/// A library with GPU code for two GPUs.
fn library(soname: &'static str) -> Vec<u8> {
    Library::named(soname)
        .section(".nv_fatbin", 2, region(&[machine_code(80, ZSTD), machine_code(90, ZSTD)]))
        .bytes()
}

/// The same, cut to one GPU.
fn pruned(soname: &'static str) -> Vec<u8> {
    let whole = library(soname);
    let gpus = ["sm_90"].map(|gpu| gpu.parse::<ComputeCapability>().unwrap()).into();
    let keep = Keep { gpus, resources: true, relocatable: true, debug: true };
    let mut bytes = Vec::new();
    prune::plan(soname, &whole, &keep).unwrap().write(&whole, &mut bytes).unwrap();
    assert_ne!(bytes, whole);
    bytes
}

/// A layer with these files; a path that ends with ` -> TARGET` is a hard link.
fn tar_of(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    for (path, bytes) in files {
        let mut header = tar::Header::new_ustar();
        header.set_mode(0o755);
        if let Some((path, target)) = path.split_once(" -> ") {
            header.set_entry_type(tar::EntryType::Link);
            header.set_size(0);
            tar.append_link(&mut header, path, target).unwrap();
        } else {
            header.set_size(bytes.len() as u64);
            tar.append_data(&mut header, path, *bytes).unwrap();
        }
    }
    tar.into_inner().unwrap()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 1).unwrap()
}

/// A layout with an image of these packed layers.
fn layout(folder: &Path, layers: &[Vec<u8>], labels: &Value, config_type: &str) -> Layout {
    let layout = Layout::new(folder);
    let described: Vec<Value> = layers
        .iter()
        .map(|bytes| {
            // The media type lies, as some tools' do: what counts is what is there.
            let kind = "application/vnd.oci.image.layer.v1.tar+gzip";
            json!({"mediaType": kind, "digest": layout.blob(bytes), "size": bytes.len()})
        })
        .collect();
    let config = json!({
        "architecture": "amd64", "os": "linux", "config": {"Labels": labels},
        "rootfs": {"type": "layers", "diff_ids": layers.iter().map(|layer| Digest::of(layer)).collect::<Vec<_>>()},
    });
    let (_, config) = layout.document(config_type, &config);
    let (_, image) =
        layout.document(MANIFEST, &json!({"schemaVersion": 2, "config": config, "layers": described}));
    layout.finish(image, "x");
    layout
}

const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const CUBLAS: &str = "usr/local/cuda/lib64/libcublasLt.so.13";
const A_2_3: &str = "unmodified by section 2.3";

#[test]
fn what_a_licence_forbids_is_refused_with_the_file_the_rule_and_the_way_out() {
    let (room, settings) = settings();
    let store = Store::new(&settings.cache);
    let (whole, cut) = (library("libcublasLt.so.13"), pruned("libcublasLt.so.13"));
    let (nccl, driver) = (pruned("libnccl.so.2"), library("libcuda.so.1"));
    let jit = library("libnvJitLink.so.13");
    let none = json!({});
    let check = |layers: &[Vec<u8>], labels: &Value, expect: &[&str]| {
        let name = Digest::of(format!("{layers:?} {labels}").as_bytes()).short();
        let layout = layout(&room.path(&name), layers, labels, CONFIG);
        match check(&layout.folder, &store, |_| None) {
            Ok(()) => assert!(expect.is_empty(), "passed: {expect:?}"),
            Err(error) => {
                let said = format!("{error} {}", error.hint().unwrap_or_default());
                assert!(!expect.is_empty(), "{said}");
                expect.iter().for_each(|expect| assert!(said.contains(expect), "{expect:?} in {said}"));
            }
        }
    };
    let plain = |path: &str, bytes: &[u8]| vec![tar_of(&[("etc/passwd", b"root"), (path, bytes)])];

    check(&plain(CUBLAS, &whole), &none, &[]);
    check(
        &plain(CUBLAS, &cut),
        &none,
        &["/usr/local/cuda/lib64/libcublasLt.so.13", "cut out", A_2_3, "leave out `gpus`"],
    );
    check(&plain("usr/lib/libnccl.so.2", &nccl), &json!({"trainyard.pruned.libnccl.so.2": "9 MB"}), &[]);
    check(
        &plain("usr/lib/libcuda.so.580.1", &driver),
        &none,
        &["libcuda.so.580.1", "2.6", "the driver of the host"],
    );
    check(
        &plain("opt/libnvJitLink.so.13", &jit),
        &none,
        &["libnvJitLink.so.13", "Attachment A", "leave it out"],
    );
    // A new name hides nothing, and neither does another compression, or an upper layer that takes the file away.
    check(&plain("opt/libmath.so", &cut), &none, &["/opt/libmath.so", A_2_3]);
    check(&plain("opt/data", &jit), &none, &["/opt/data", "Attachment A"]);
    check(&[zstd(&plain(CUBLAS, &cut)[0])], &none, &["libcublasLt.so.13"]);
    let away = tar_of(&[("usr/local/cuda/lib64/.wh.libcublasLt.so.13", b"")]);
    check(&[plain(CUBLAS, &cut).remove(0), away], &none, &["libcublasLt.so.13"]);
    let linked = tar_of(&[("a/libx", b"text"), ("a/libcuda.so.1 -> a/libx", b"")]);
    check(&[linked], &none, &["/a/libcuda.so.1"]);
    // Labels count, and so does what is no library at all where one should be.
    check(&plain(CUBLAS, &whole), &json!({"trainyard.pruned.libcublasLt.so.13": "1 MB"}), &["as a label"]);
    check(
        &plain(CUBLAS, &whole),
        &json!({"trainyard.local-only": "true"}),
        &["local-only", "trainyard export"],
    );
    check(&plain(CUBLAS, &whole), &json!({"trainyard.local-only": "false"}), &[]);
    let torn = &whole[..whole.len() / 2];
    check(&plain(CUBLAS, torn), &none, &["is not as NVIDIA hands it out"]);
    check(&plain("usr/lib/torn.so", torn), &none, &[]);
    // Each file is told.
    let both = tar_of(&[(CUBLAS, &cut), ("b/libcufile.so.0", b"x")]);
    check(&[both], &none, &["libcublasLt.so.13", "libcufile.so.0"]);
    // What cannot be read is not let through.
    let mut broken = zstd(&plain(CUBLAS, &whole)[0]);
    broken.truncate(broken.len() / 2);
    check(&[broken], &none, &["cannot be read"]);

    let damaged = layout(&room.path("damaged"), &plain(CUBLAS, &whole), &none, CONFIG);
    let blob = damaged.blobs().into_iter().max_by_key(|(_, bytes)| bytes.len()).unwrap().0;
    std::fs::write(damaged.folder.join("blobs/sha256").join(blob), tar_of(&[])).unwrap();
    assert!(matches!(check_plain(&damaged.folder, &store), Err(Error::Layout(_))));
    // What is no image has no layers to look into.
    let artifact = layout(&room.path("artifact"), &[b"notes".to_vec()], &none, "application/x.notes");
    check_plain(&artifact.folder, &store).unwrap();
    assert!(room.leftovers().is_empty(), "{:?}", room.leftovers());
}

fn check_plain(folder: &Path, store: &Store) -> Result<(), Error> {
    check(folder, store, |_| None)
}

/// A library that differs from what was locked is refused, and an image that stays here.
pub(super) fn check_differences(supplied: &Supplied) {
    let store = Store::new(&supplied.settings.cache);
    let facts = |digest: &Digest| Facts::read(digest, &supplied.settings.cache).ok();
    check(&supplied.image.layout, &store, facts).unwrap();
    let changed = |digest: &Digest| {
        let mut facts = facts(digest).unwrap();
        let file = facts.files.get_mut("/usr/local/cuda/lib64/libcudart.so.13").unwrap();
        file.original = Some(Digest::of(b"as NVIDIA had it"));
        Some(facts)
    };
    let error = check(&supplied.image.layout, &store, changed).unwrap_err().to_string();
    assert!(error.contains("libcudart.so.13") && error.contains("was changed from sha256:"), "{error}");

    // An image of which the manifest says that it stays here.
    let text = std::fs::read_to_string(&supplied.manifest).unwrap();
    let local = text.replace("compression = \"zstd\"", "compression = \"zstd\"\nlocal-only = true");
    std::fs::write(&supplied.manifest, local).unwrap();
    let image = build(&supplied.manifest, &supplied.settings, &quiet).unwrap();
    let error = check(&image.layout, &store, facts).unwrap_err();
    assert!(matches!(error, Error::LocalOnly { .. }), "{error}");
}

#[test]
fn documents_are_attached_once_and_come_back_as_they_were() {
    let Some(registry) = Registry::start(&Login::None) else { return };
    let supplied = images::fixture();
    let repository = connect(&registry.reference("team/supplied:1"), &supplied.settings);
    let pushed = repository.push(&supplied.image.layout, &quiet).unwrap();
    let facts = Facts::read(&pushed.digest, &supplied.settings.cache).unwrap();
    let documents = supply::documents(&facts).unwrap();
    let attach = || -> Vec<Digest> {
        let each = |one: &Artifact| repository.attach(&pushed.digest, one, &quiet).unwrap();
        documents.iter().map(each).collect()
    };
    let first = attach();
    assert_eq!(attach(), first, "the same again");
    assert_eq!(repository.referrers(&pushed.digest, None, &quiet).unwrap().len(), 3);
    assert_eq!(repository.push(&supplied.image.layout, &quiet).unwrap().digest, supplied.image.digest);

    for (document, digest) in documents.iter().zip(&first) {
        let name = format!("docker://127.0.0.1:{}/team/supplied@{digest}", registry.port);
        let raw = tool("skopeo", &["inspect", "--raw", "--tls-verify=false", &name]);
        let Some(raw) = raw else { return };
        let manifest: Value = serde_json::from_str(&raw).unwrap();
        assert_eq!(manifest["artifactType"], document.artifact_type);
        assert_eq!(manifest["layers"][0]["digest"], Digest::of(&document.bytes).to_string());
        let of_kind = repository.referrers(&pushed.digest, Some(&document.artifact_type), &quiet).unwrap();
        assert_eq!(of_kind.len(), 1, "{}", document.artifact_type);
    }
}
