//! The layer writer: known answers, and properties of any tree.

use std::collections::BTreeMap;
use std::io::Read;

use flate2::read::GzDecoder;
use proptest::prelude::*;
use tempfile::TempDir;
use trainyard_builder::layer::{self, Layer};
use trainyard_builder::store::Store;
use trainyard_builder::tree::{File, Tree};
use trainyard_spec::Digest;

type Content = BTreeMap<String, (Vec<u8>, bool)>;

/// Writes the files in the given order, and gives the layer and its bytes before compression.
fn write<'a>(files: impl Iterator<Item = (&'a String, &'a (Vec<u8>, bool))>) -> (Layer, Vec<u8>, Vec<u8>) {
    let folder = TempDir::new().unwrap();
    let mut tree = Tree::default();
    for (index, (path, (body, executable))) in files.enumerate() {
        let source = folder.path().join(index.to_string());
        std::fs::write(&source, body).unwrap();
        let file = File {
            owner: "test".parse().unwrap(),
            source,
            digest: Digest::of(body),
            size: body.len() as u64,
            executable: *executable,
        };
        tree.add(path, file).unwrap();
    }
    let store = Store::new(&folder.path().join("cache"));
    let layer = layer::write(&"test".parse().unwrap(), &tree, &store).unwrap();
    let packed = std::fs::read(store.path(&layer.digest)).unwrap();
    let mut unpacked = Vec::new();
    GzDecoder::new(packed.as_slice()).read_to_end(&mut unpacked).unwrap();
    (layer, packed, unpacked)
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
fn a_path_that_does_not_fit_is_refused() {
    let content: Content = [(format!("/{}", "x".repeat(100)), (Vec::new(), false))].into();
    let folder = TempDir::new().unwrap();
    let source = folder.path().join("x");
    std::fs::write(&source, "").unwrap();
    let mut tree = Tree::default();
    for path in content.keys() {
        let file = File {
            owner: "test".parse().unwrap(),
            source: source.clone(),
            digest: Digest::of(b""),
            size: 0,
            executable: false,
        };
        tree.add(path, file).unwrap();
    }
    let store = Store::new(&folder.path().join("cache"));
    let error = layer::write(&"test".parse().unwrap(), &tree, &store).unwrap_err();
    assert!(matches!(error, layer::Error::Path { .. }), "{error:?}");
}

#[test]
fn a_file_that_changes_meanwhile_is_refused() {
    let folder = TempDir::new().unwrap();
    let source = folder.path().join("x");
    std::fs::write(&source, "new").unwrap();
    for (digest, size) in [(Digest::of(b"old"), 3), (Digest::of(b"new"), 2), (Digest::of(b"new"), 4)] {
        let mut tree = Tree::default();
        let file =
            File { owner: "test".parse().unwrap(), source: source.clone(), digest, size, executable: false };
        tree.add("/x", file).unwrap();
        let error = layer::write(&"test".parse().unwrap(), &tree, &Store::new(&folder.path().join("cache")))
            .unwrap_err();
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
