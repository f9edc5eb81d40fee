//! Inputs in a folder, from which another machine builds the same without a server.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use trainyard_builder::input::crates;
use trainyard_builder::settings::{LinkFrom, Settings};
use trainyard_builder::store::{self, Store};
use trainyard_builder::supply::{Facts, spdx};
use trainyard_builder::{corpus, image, index, input, vendor};
use trainyard_spec::Digest;
use trainyard_spec::vendored::VendoredIndex;

use crate::images::{fixture, workspace};
use crate::room::{Room, sdist};
use crate::server::Server;

fn demo() -> Vec<u8> {
    sdist(&[("texts/one.txt", b"To be, or not to be\n")])
}

fn quiet(_: trainyard_builder::progress::Event) {}

fn index(folder: &Path) -> VendoredIndex {
    serde_json::from_slice(&std::fs::read(folder.join("index.json")).unwrap()).unwrap()
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// A room that reaches no server and has this vendored folder.
fn elsewhere(vendored: &Path) -> Room {
    let mut room = Room::new(&[]);
    room.settings.offline = true;
    room.settings.index.vendored = vec![vendored.to_owned()];
    room
}

#[test]
fn a_corpus_comes_from_the_folder_alone() {
    let server = Server::of_demo(demo());
    let room = Room::new(&[&server.index()]);
    let manifest = room.corpus_manifest("");
    room.lock(&manifest).unwrap();
    let made = room.corpus(&manifest).unwrap();
    let folder = room.path("vendored");
    let vendored = vendor::vendor(&manifest, &folder, &room.settings, &quiet).unwrap();
    assert_eq!((vendored.files, vendored.crates, vendored.size), (1, 0, demo().len() as u64));
    assert_eq!(names(&folder), ["blobs", "index.json"], "nothing else may be left");
    let digest = Digest::of(&demo());
    assert_eq!(index(&folder).files[&digest].name, "demo-1.0.tar.gz");
    assert_eq!(server.count("/files/demo-1.0.tar.gz"), 1, "the cache has it");
    drop(server);

    let there = elsewhere(&folder);
    assert_eq!(there.corpus(&manifest).unwrap().digest, made.digest);

    // A file that has gone bad is never used, and is made good by running the command again.
    let blob = Store::new(&folder).path(&digest);
    std::fs::remove_file(&blob).unwrap();
    std::fs::write(&blob, "rot").unwrap();
    let refused = elsewhere(&folder).corpus(&manifest).unwrap_err();
    let corpus::Error::Input(input::Error::Store(store::Error::Differs { found_size, .. })) = &refused else {
        panic!("{refused:?}");
    };
    assert_eq!(*found_size, 3);
    assert_eq!(std::fs::read(&blob).unwrap(), b"rot", "a vendored folder is only read");
    vendor::vendor(&manifest, &folder, &room.settings, &quiet).unwrap();
    assert_eq!(elsewhere(&folder).corpus(&manifest).unwrap().digest, made.digest);

    // Without the file the way out is told.
    std::fs::remove_file(&blob).unwrap();
    let refused = elsewhere(&folder).corpus(&manifest).unwrap_err();
    assert!(
        matches!(&refused, corpus::Error::Input(input::Error::Index(index::Error::Offline { .. }))),
        "{refused:?}"
    );
}

#[test]
fn what_was_interrupted_goes_on_and_nothing_of_others_is_touched() {
    let server = Server::of_demo(demo());
    let room = Room::new(&[&server.index()]);
    let manifest = room.corpus_manifest("");
    room.lock(&manifest).unwrap();
    let folder = room.path("vendored");

    // As a killed run leaves it: a half of a file that nobody writes any more, and no index.
    std::fs::create_dir_all(folder.join("tmp")).unwrap();
    std::fs::write(folder.join("tmp/blob-killed"), "half").unwrap();
    std::fs::write(folder.join(".tmpindex"), "half").unwrap();
    // As another manifest's run leaves it.
    let other = VendoredIndex {
        files: [(
            Digest::of(b"other"),
            trainyard_spec::vendored::VendoredFile { name: "other".into(), size: 5 },
        )]
        .into(),
        ..VendoredIndex::default()
    };
    std::fs::write(folder.join("index.json"), serde_json::to_vec(&other).unwrap()).unwrap();
    vendor::vendor(&manifest, &folder, &room.settings, &quiet).unwrap();
    assert_eq!(names(&folder.join("blobs/sha256")), [Digest::of(&demo()).hex()]);
    assert_eq!(index(&folder).files.len(), 2, "the other manifest's file is still listed");
    assert!(!folder.join("tmp").exists());

    for (name, text) in [("index.json", "{\"version\": 2, \"files\": {}}"), ("index.json", "[]")] {
        std::fs::write(folder.join(name), text).unwrap();
        let refused = vendor::vendor(&manifest, &folder, &room.settings, &quiet).unwrap_err();
        assert!(matches!(refused, vendor::Error::Index { .. }), "{refused:?}");
    }
    let own = room.path("own");
    std::fs::create_dir(&own).unwrap();
    std::fs::write(own.join("thesis.tex"), "").unwrap();
    let refused = vendor::vendor(&manifest, &own, &room.settings, &quiet).unwrap_err();
    assert!(matches!(&refused, vendor::Error::Taken { found, .. } if found == "thesis.tex"), "{refused:?}");
    assert_eq!(names(&own), ["thesis.tex"]);
}

/// Settings of another machine: nothing in its cache or in cargo's, and no server.
fn bare(folder: &Path, vendored: &Path) -> Settings {
    let mut settings = Settings::from_environment(folder.join("cache")).unwrap();
    // rustup finds its toolchains through the folder of the user, where nothing says otherwise.
    let own = |name: &str| settings.tools.get(&OsString::from(name)).cloned();
    let rustup = own("RUSTUP_HOME")
        .unwrap_or_else(|| PathBuf::from(own("HOME").unwrap()).join(".rustup").into_os_string());
    let changes = [("RUSTUP_HOME", rustup), ("CARGO_HOME", folder.join("cargo").into_os_string())];
    settings.tools.extend(changes.map(|(name, value)| (name.into(), value)));
    settings.offline = true;
    settings.link = LinkFrom::Locked;
    settings.index.debian.clear();
    settings.index.vendored = vec![vendored.to_owned()];
    settings
}

#[test]
fn an_image_comes_from_the_folder_alone_with_the_same_digest() {
    let first = fixture();
    let folder = tempfile::TempDir::new().unwrap();
    let vendored = folder.path().join("vendored");
    let found = match vendor::vendor(&first.manifest, &vendored, &first.settings, &quiet) {
        Err(vendor::Error::Input(error)) if error.is_out_of_reach() => {
            assert!(std::env::var_os("CI").is_none(), "CI must reach a Debian archive: {error}");
            eprintln!("SKIPPED, no Debian archive has the locked packages: {error}");
            return;
        }
        other => other.unwrap(),
    };
    assert_eq!((found.files, found.crates), (2, 1));
    let itoa = index(&vendored).files.into_iter().find(|(_, file)| file.name.starts_with("itoa-"));
    let (itoa, _) = itoa.unwrap();

    // Another checkout, on a machine that has nothing.
    let manifest = workspace(&folder.path().join("checkout"));
    let settings = bare(&folder.path().join("there"), &vendored);
    let second = image::build(&manifest, &settings, &quiet).unwrap();
    assert_eq!(second.not_reproducible, None);
    assert_eq!(second.digest, first.image.digest);
    let bill = |image: &image::Image, cache: &Path| {
        spdx::write(&Facts::read(&image.digest, cache).unwrap()).unwrap()
    };
    assert_eq!(bill(&second, &settings.cache), bill(&first.image, &first.settings.cache));
    assert!(!folder.path().join("there/cargo/registry").exists(), "cargo asked for an index");

    // A crate whose file is another one is refused before cargo sees it.
    let blob = Store::new(&vendored).path(&itoa);
    std::fs::remove_file(&blob).unwrap();
    std::fs::write(&blob, "rot").unwrap();
    let refused =
        image::build(&manifest, &bare(&folder.path().join("again"), &vendored), &quiet).unwrap_err();
    assert!(refused.to_string().contains("is not what was locked"), "{refused:?}");
    assert!(matches!(refused, image::Error::Cargo(_)), "{refused:?}");

    // Without it, cargo says which one it has not.
    std::fs::remove_file(&blob).unwrap();
    let refused =
        image::build(&manifest, &bare(&folder.path().join("third"), &vendored), &quiet).unwrap_err();
    assert!(refused.to_string().contains("itoa"), "{refused}");
}

#[test]
fn crates_that_no_digest_pins_are_refused() {
    let folder = tempfile::TempDir::new().unwrap();
    let settings = Settings::from_environment(folder.path().join("cache")).unwrap();
    let manifest = workspace(&folder.path().join("checkout"));
    let lock = folder.path().join("checkout/Cargo.lock");
    let text = std::fs::read_to_string(&lock).unwrap();
    let source = text.lines().find(|line| line.starts_with("source = ")).unwrap();
    let checksum = text.lines().find(|line| line.starts_with("checksum = ")).unwrap();
    for changed in [
        text.replace(source, "source = \"git+https://example.test/itoa#0123\""),
        text.replace(source, "source = \"registry+https://example.test/index\""),
        text.replace(checksum, "checksum = \"abc\""),
        text.replace(checksum, ""),
        text.replace("name = \"itoa\"", "name = \"../itoa\""),
    ] {
        std::fs::write(&lock, &changed).unwrap();
        let refused = vendor::vendor(&manifest, &folder.path().join("v"), &settings, &quiet);
        let refused = refused.unwrap_err();
        assert!(matches!(refused, vendor::Error::Crates(crates::Error::Source { .. })), "{refused:?}");
        assert!(!folder.path().join("v").exists());
    }
}
