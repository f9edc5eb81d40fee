//! Unpacking images that others made, honest and hostile.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde_json::json;
use tar::{EntryType, Header};
use tempfile::TempDir;
use trainyard_builder::inspect;
use trainyard_builder::oci::{self, Layout};
use trainyard_builder::unpack::{self, unpack};
use trainyard_spec::Digest;

type Entry<'a> = (&'a str, EntryType, &'a str);

fn layer(entries: &[Entry<'_>]) -> Vec<u8> {
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    for (path, kind, text) in entries {
        let is_link = matches!(kind, EntryType::Symlink | EntryType::Link);
        let body = if is_link { "" } else { text };
        let mut header = Header::new_ustar();
        header.as_mut_bytes()[..path.len()].copy_from_slice(path.as_bytes());
        if is_link {
            header.as_mut_bytes()[157..157 + text.len()].copy_from_slice(text.as_bytes());
        }
        header.set_entry_type(*kind);
        header.set_mode(0o644);
        header.set_size(body.len() as u64);
        header.set_cksum();
        gzip.write_all(header.as_bytes()).unwrap();
        gzip.write_all(body.as_bytes()).unwrap();
        gzip.write_all(&vec![0; body.len().next_multiple_of(512) - body.len()]).unwrap();
    }
    gzip.write_all(&[0; 1024]).unwrap();
    gzip.finish().unwrap()
}

/// An OCI layout of these layers, written without the builder.
fn layout(folder: &Path, layers: &[Vec<u8>]) {
    let blobs = folder.join("blobs/sha256");
    std::fs::create_dir_all(&blobs).unwrap();
    let put = |bytes: &[u8], kind: &str| {
        let digest = Digest::of(bytes);
        std::fs::write(blobs.join(digest.hex()), bytes).unwrap();
        json!({"mediaType": format!("application/vnd.oci.image.{kind}"), "digest": digest, "size": bytes.len()})
    };
    let described: Vec<_> = layers.iter().map(|bytes| put(bytes, "layer.v1.tar+gzip")).collect();
    let diff_ids: Vec<_> = layers.iter().map(|bytes| Digest::of(bytes)).collect();
    let config =
        json!({"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": diff_ids}});
    let config = put(config.to_string().as_bytes(), "config.v1+json");
    let manifest = json!({"schemaVersion": 2, "config": config, "layers": described});
    let manifest = put(manifest.to_string().as_bytes(), "manifest.v1+json");
    std::fs::write(
        folder.join("index.json"),
        json!({"schemaVersion": 2, "manifests": [manifest]}).to_string(),
    )
    .unwrap();
    std::fs::write(folder.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
}

fn unpacked(layers: &[&[Entry<'_>]]) -> (TempDir, Result<PathBuf, unpack::Error>) {
    let folder = TempDir::new().unwrap();
    let layers: Vec<_> = layers.iter().map(|entries| layer(entries)).collect();
    layout(&folder.path().join("image"), &layers);
    let layout = Layout::open(&folder.path().join("image")).unwrap();
    let result = unpack(&layout, &folder.path().join("cache"));
    (folder, result)
}

#[test]
fn later_layers_replace_and_remove() {
    let (file, dir) = (EntryType::Regular, EntryType::Directory);
    let (_folder, rootfs) = unpacked(&[
        &[
            ("d/", dir, ""),
            ("d/keep", file, "1"),
            ("d/gone", file, "1"),
            ("o/a", file, "1"),
            ("o/s/b", file, "1"),
            ("x", file, "1"),
        ],
        &[
            ("d/.wh.gone", file, ""),
            ("o/new", file, "2"),
            ("o/.wh..wh..opq", file, ""),
            ("x", file, "2"),
            ("l", EntryType::Symlink, "x"),
            ("h", EntryType::Link, "x"),
        ],
    ]);
    let rootfs = rootfs.unwrap();
    let mut found: Vec<String> = walk(&rootfs);
    found.sort();
    assert_eq!(found, ["d/keep=1", "h=2", "l->x", "o/new=2", "x=2"]);
}

#[test]
fn a_damaged_root_is_made_anew() {
    let (folder, rootfs) =
        unpacked(&[&[("bin/x", EntryType::Regular, "1"), ("bin/y", EntryType::Regular, "2")]]);
    let rootfs = rootfs.unwrap();
    let layout = Layout::open(&folder.path().join("image")).unwrap();
    let x = rootfs.join("bin/x");
    let damages: [&dyn Fn(); 4] = [
        &|| std::fs::write(&x, "").unwrap(),
        &|| std::fs::remove_file(&x).unwrap(),
        &|| std::fs::set_permissions(&x, PermissionsExt::from_mode(0o600)).unwrap(),
        &|| std::fs::write(rootfs.join("bin/z"), "3").unwrap(),
    ];
    let mode = || x.metadata().unwrap().permissions().mode();
    let whole = (walk(&rootfs), mode());
    for damage in damages {
        damage();
        assert_eq!(unpack(&layout, &folder.path().join("cache")).unwrap(), rootfs);
        assert_eq!((walk(&rootfs), mode()), whole);
    }
}

fn walk(folder: &Path) -> Vec<String> {
    fn inner(root: &Path, folder: &Path, found: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(root).unwrap().display().to_string();
            if let Ok(target) = std::fs::read_link(&path) {
                found.push(format!("{name}->{}", target.display()));
            } else if path.is_dir() {
                inner(root, &path, found);
            } else {
                found.push(format!("{name}={}", std::fs::read_to_string(&path).unwrap()));
            }
        }
    }
    let mut found = Vec::new();
    inner(folder, folder, &mut found);
    found
}

#[test]
fn hostile_layers_are_refused_and_write_nothing_outside() {
    let file = EntryType::Regular;
    let cases: [&[&[Entry<'_>]]; 7] = [
        &[&[("../evil", file, "x")]],
        &[&[("a/../../evil", file, "x")]],
        &[&[("a", EntryType::Symlink, ".."), ("a/evil", file, "x")]],
        &[&[("a", EntryType::Symlink, "/tmp")], &[("a/evil", file, "x")]],
        &[&[("a", EntryType::Link, "../../image/index.json")]],
        &[&[("a", EntryType::Symlink, "/etc"), ("b", EntryType::Link, "a/passwd")]],
        &[&[("dev", EntryType::Block, "")]],
    ];
    for layers in cases {
        let (folder, result) = unpacked(layers);
        let error = result.unwrap_err();
        assert!(matches!(error, unpack::Error::Hostile { .. }), "{layers:?}: {error:?}");
        assert!(!folder.path().join("evil").exists() && !folder.path().join("cache/evil").exists());
        let rootfs = std::fs::read_dir(folder.path().join("cache/rootfs"));
        assert_eq!(rootfs.map_or(0, Iterator::count), 0, "nothing looks unpacked");
    }
}

#[test]
fn damaged_layouts_are_named() {
    let folder = TempDir::new().unwrap();
    let bytes = layer(&[("x", EntryType::Regular, "1")]);
    layout(folder.path(), std::slice::from_ref(&bytes));
    let blob = folder.path().join("blobs/sha256").join(Digest::of(&bytes).hex());
    std::fs::write(&blob, "rot").unwrap();
    let error = unpack(&Layout::open(folder.path()).unwrap(), &folder.path().join("cache")).unwrap_err();
    assert!(error.to_string().contains(&blob.display().to_string()), "{error}");

    std::fs::remove_file(folder.path().join("index.json")).unwrap();
    assert!(matches!(Layout::open(folder.path()).unwrap_err(), oci::Error::Layout { .. }));
    assert!(Layout::open(&folder.path().join("nowhere")).is_err());
}

#[test]
fn what_is_not_unpacked_is_remarked_on() {
    let folder = tempfile::tempdir().unwrap();
    let entries: &[Entry<'_>] = &[
        ("bin/sh", EntryType::Regular, "shell"),
        ("../escape", EntryType::Regular, "out"),
        ("link", EntryType::Symlink, "/etc"),
        ("link/passwd", EntryType::Regular, "root"),
        ("dev/sda", EntryType::Block, ""),
        ("pipe", EntryType::Fifo, ""),
    ];
    layout(folder.path(), &[layer(entries)]);
    let report = inspect::inspect(&Layout::open(folder.path()).unwrap()).unwrap();
    let [layer] = report.layers.as_slice() else { panic!("{report:?}") };
    assert_eq!(layer.files.keys().collect::<Vec<_>>(), ["/bin/sh"]);
    assert_eq!(
        layer.remarks,
        [
            "../escape: leads out of the image",
            "link/passwd: leads through the link /link",
            "dev/sda: is a block device",
            "pipe: is a named pipe",
        ]
    );
}

#[test]
fn documents_that_contradict_what_refers_to_them_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    layout(folder.path(), &[layer(&[("file", EntryType::Regular, "text")])]);
    let index = folder.path().join("index.json");
    let text = std::fs::read_to_string(&index).unwrap();
    let sizes: Vec<_> = text.match_indices("\"size\":").map(|(at, _)| at + 7).collect();
    let [size] = sizes.as_slice() else { panic!("{text}") };
    for (changed, expect) in [
        (text.replace("\"schemaVersion\":2", "\"schemaVersion\":3"), "schemaVersion is 3; known is 2"),
        (format!("{}9{}", &text[..*size], &text[*size..]), "bytes; what refers to it says 9"),
    ] {
        std::fs::write(&index, changed).unwrap();
        let error = Layout::open(folder.path()).unwrap_err().to_string();
        assert!(error.contains(expect), "{error}");
    }
    std::fs::remove_file(&index).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, &index, rustix::fs::Mode::RUSR).unwrap();
    let error = Layout::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("not a regular file"), "{error}");
}
