//! The layer writer: known answers, and properties of any tree.

use std::collections::BTreeMap;
use std::io::Read;

use flate2::read::GzDecoder;
use proptest::prelude::*;
use tar::EntryType;
use tempfile::TempDir;
use trainyard_builder::layer::{self, Layer};
use trainyard_builder::store::Store;
use trainyard_builder::tree::{File, Kind, Meta, Owner, Tree};
use trainyard_spec::Digest;
use trainyard_spec::image::Compression;

type Content = BTreeMap<String, (Vec<u8>, bool)>;

/// Trees whose files lie in a folder of their own.
struct Maker {
    folder: TempDir,
    tree: Tree,
}

impl Maker {
    fn new() -> Self {
        Self { folder: TempDir::new().unwrap(), tree: Tree::default() }
    }

    fn add(&mut self, path: &str, meta: Meta, kind: Kind) {
        let owner = Owner { input: "test".parse().unwrap(), package: None };
        self.tree.add(path, owner, meta, kind).unwrap();
    }

    fn body(&self, body: &[u8], hard_link: Option<&str>) -> Kind {
        let digest = Digest::of(body);
        let source = self.folder.path().join(digest.hex());
        std::fs::write(&source, body).unwrap();
        Kind::File(File { source, digest, size: body.len() as u64, hard_link: hard_link.map(str::to_owned) })
    }

    fn file(&mut self, path: &str, body: &[u8], mode: u32) {
        let kind = self.body(body, None);
        self.add(path, Meta::mode(mode), kind);
    }

    /// The layer, its bytes, and its bytes before compression.
    fn write(&self, compression: Compression) -> (Layer, Vec<u8>, Vec<u8>) {
        let store = Store::new(&self.folder.path().join("cache"));
        let layer = layer::write(&"test".parse().unwrap(), &self.tree, compression, &store).unwrap();
        let packed = std::fs::read(store.path(&layer.digest)).unwrap();
        let mut unpacked = Vec::new();
        match compression {
            Compression::Gzip => GzDecoder::new(packed.as_slice()).read_to_end(&mut unpacked).unwrap(),
            Compression::Zstd => zstd::Decoder::new(&*packed).unwrap().read_to_end(&mut unpacked).unwrap(),
        };
        (layer, packed, unpacked)
    }
}

/// Writes the files in the given order, and gives the layer and its bytes before compression.
fn write<'a>(files: impl Iterator<Item = (&'a String, &'a (Vec<u8>, bool))>) -> (Layer, Vec<u8>, Vec<u8>) {
    let mut maker = Maker::new();
    for (path, (body, executable)) in files {
        maker.file(path, body, if *executable { 0o755 } else { 0o644 });
    }
    maker.write(Compression::Gzip)
}

/// Everything that a layer can hold.
fn everything() -> Maker {
    let mut maker = Maker::new();
    let mut capable = Meta::mode(0o4755);
    capable.xattrs.insert("security.capability".to_owned(), b"\x01\0\0\x02 = \xff".to_vec());
    capable.gid = 42;
    let body = maker.body(b"#!/bin/true\n", None);
    maker.add("/usr/bin/ping", capable, body);
    maker.add("/usr/bin/sh", Meta::mode(0o777), Kind::Symlink("bash".to_owned()));
    maker.add("/tmp", Meta::mode(0o1777), Kind::Folder);
    for path in ["/usr/bin/perl5.36", "/usr/bin/perl"] {
        let body = maker.body(b"perl", Some("perl"));
        maker.add(path, Meta::mode(0o755), body);
    }
    let long = format!("/opt/{}/{}", "x".repeat(90), "ü".repeat(40));
    maker.file(&long, b"long", 0o644);
    maker.add("/opt/link", Meta::mode(0o777), Kind::Symlink(long));
    maker
}

#[test]
fn everything_comes_back() {
    for compression in [Compression::Gzip, Compression::Zstd] {
        let (_, _, unpacked) = everything().write(compression);
        let mut archive = tar::Archive::new(unpacked.as_slice());
        let mut found = BTreeMap::new();
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let path = entry.path().unwrap().display().to_string();
            let xattrs: Vec<_> = entry
                .pax_extensions()
                .unwrap()
                .into_iter()
                .flatten()
                .map(Result::unwrap)
                .filter(|record| record.key().unwrap().starts_with("SCHILY"))
                .map(|record| (record.key().unwrap().to_owned(), record.value_bytes().to_vec()))
                .collect();
            let header = entry.header();
            let link = entry.link_name().unwrap().map(|link| link.display().to_string());
            found.insert(
                path,
                (header.entry_type(), header.mode().unwrap(), header.gid().unwrap(), link, xattrs),
            );
        }
        let capability = ("SCHILY.xattr.security.capability".to_owned(), b"\x01\0\0\x02 = \xff".to_vec());
        assert_eq!(found["usr/bin/ping"], (EntryType::Regular, 0o4755, 42, None, vec![capability]));
        assert_eq!(found["tmp/"].1, 0o1777);
        assert_eq!(
            (found["usr/bin/sh"].0, found["usr/bin/sh"].3.as_deref()),
            (EntryType::Symlink, Some("bash"))
        );
        assert_eq!(found["usr/bin/perl"].0, EntryType::Regular, "the first path in order is the file");
        let perl = &found["usr/bin/perl5.36"];
        assert_eq!((perl.0, perl.3.as_deref()), (EntryType::Link, Some("usr/bin/perl")));
        let long = found["opt/link"].3.clone().unwrap();
        assert!(found.contains_key(long.trim_start_matches('/')), "{found:?}");
    }
}

/// What others read it with agrees.
#[test]
fn tar_reads_everything() {
    let (_, _, unpacked) = everything().write(Compression::Gzip);
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("layer.tar");
    std::fs::write(&path, unpacked).unwrap();
    let output = std::process::Command::new("tar").arg("-tvf").arg(&path).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    assert!(text.contains("perl5.36 link to usr/bin/perl") && text.contains("-rwsr-xr-x 0/42"), "{text}");
}

/// Known answers: whoever changes these on purpose also changes the format's name in the layer writer, and says so in
/// the changelog, because every image's digest changes. Bless with `INSTA_UPDATE=always`.
#[test]
fn golden_digests() {
    let text: Vec<u8> =
        (0..200_000_u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_string().into_bytes()).collect();
    let cases: [(&str, Content); 3] = [
        ("empty", Content::new()),
        ("one program", [("/usr/bin/app".to_owned(), (b"#!/bin/true\n".to_vec(), true))].into()),
        (
            "several",
            [
                ("/usr/share/text".to_owned(), (text, false)),
                ("/usr/share/empty".to_owned(), (Vec::new(), false)),
                ("/a".to_owned(), (vec![0; 513], false)),
            ]
            .into(),
        ),
    ];
    let mut found = String::new();
    for (name, content) in &cases {
        let (layer, _, _) = write(content.iter());
        found +=
            &format!("{name}: {} {} {} {}\n", layer.diff_id, layer.unpacked_size, layer.digest, layer.size);
    }
    for compression in [Compression::Gzip, Compression::Zstd] {
        let (layer, _, _) = everything().write(compression);
        found += &format!("everything, {compression:?}: {} {} {}\n", layer.diff_id, layer.digest, layer.size);
    }
    insta::assert_snapshot!("golden_digests", found);
}

#[test]
fn nothing_of_this_machine_is_in_a_layer() {
    let content: Content = [("/usr/bin/app".to_owned(), (b"x".to_vec(), true))].into();
    let (layer, packed, unpacked) = write(content.iter());
    // RFC 1952: no flags, no time, an unknown system.
    assert_eq!(
        (&packed[..3], packed[3], &packed[4..8], packed[9]),
        (&[0x1f, 0x8b, 8][..], 0, &[0; 4][..], 255)
    );
    assert_eq!(Digest::of(&packed), layer.digest);
    assert_eq!(Digest::of(&unpacked), layer.diff_id);
    for entry in tar::Archive::new(unpacked.as_slice()).entries().unwrap() {
        let entry = entry.unwrap();
        let header = entry.header();
        assert_eq!((header.uid().unwrap(), header.gid().unwrap(), header.mtime().unwrap()), (0, 0, 0));
        assert_eq!((header.username().unwrap(), header.groupname().unwrap()), (Some(""), Some("")));
        assert_eq!(header.mode().unwrap(), 0o755);
    }
}

#[test]
fn a_file_that_changes_meanwhile_is_refused() {
    for (digest, size) in [(Digest::of(b"old"), 3), (Digest::of(b"new"), 2), (Digest::of(b"new"), 4)] {
        let mut maker = Maker::new();
        let source = maker.folder.path().join("x");
        std::fs::write(&source, "new").unwrap();
        maker.add("/x", Meta::mode(0o644), Kind::File(File { source, digest, size, hard_link: None }));
        let store = Store::new(&maker.folder.path().join("cache"));
        let error =
            layer::write(&"test".parse().unwrap(), &maker.tree, Compression::Gzip, &store).unwrap_err();
        assert!(matches!(error, layer::Error::Changed { .. }), "{error:?}");
    }
}

fn content() -> impl Strategy<Value = Content> {
    // Files end in a digit and folders do not, so that no file is where a folder has to be.
    let path = proptest::collection::vec("[a-z.é-]{1,4}[a-z]", 0..4).prop_flat_map(|folders| {
        "[a-z]{0,3}[0-9]".prop_map(move |name| {
            let mut path: String = folders.iter().map(|folder| format!("/{folder}")).collect();
            path += "/";
            path += &name;
            path
        })
    });
    let body = (proptest::collection::vec(any::<u8>(), 0..1500), any::<bool>());
    proptest::collection::btree_map(path, body, 0..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_tree_is_written_sorted_and_whole_whatever_its_order(content in content(), shift in 0_usize..12) {
        let (layer, _, unpacked) = write(content.iter());
        let turned = shift % content.len().max(1);
        let (again, _, _) = write(content.iter().skip(turned).chain(content.iter().take(turned)));
        prop_assert_eq!(&layer, &again);

        let mut found = Content::new();
        let mut paths = Vec::new();
        for entry in tar::Archive::new(unpacked.as_slice()).entries().unwrap() {
            let mut entry = entry.unwrap();
            let path = String::from_utf8(entry.path_bytes().into_owned()).unwrap();
            let parent = path.trim_end_matches('/').rsplit_once('/').map(|(parent, _)| format!("{parent}/"));
            prop_assert!(parent.is_none_or(|parent| paths.contains(&parent)), "{} comes before its folder", path);
            if entry.header().entry_type().is_file() {
                let mut body = Vec::new();
                entry.read_to_end(&mut body).unwrap();
                found.insert(format!("/{path}"), (body, entry.header().mode().unwrap() == 0o755));
            }
            paths.push(path);
        }
        let sorted: Vec<String> = paths.iter().map(|path| path.trim_end_matches('/').to_owned()).collect();
        prop_assert!(sorted.is_sorted(), "{:?}", paths);
        prop_assert_eq!(found, content);
    }
}
