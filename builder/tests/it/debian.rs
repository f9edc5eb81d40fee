//! Debian packages: found in lists, locked, and fetched from whichever archive gives the locked bytes.

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use trainyard_builder::index::{AptSource, parse_list};
use trainyard_builder::{index, input, lock, store};
use trainyard_spec::Digest;
use trainyard_spec::lock::{LockedDeb, LockedInput};

use crate::room::Room;
use crate::server::{Answer, Server};

const CRT: &[u8] = b"an object";

/// A package with one object that is linked, and one that is not.
fn package(object: &[u8]) -> Vec<u8> {
    let gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    let mut tar = tar::Builder::new(gzip);
    for (path, body) in [("./usr/lib/x86_64-linux-gnu/crti.o", object), ("./usr/share/doc/x", b"text")] {
        let mut header = tar::Header::new_ustar();
        header.set_size(body.len() as u64);
        header.set_mode(0o644);
        tar.append_data(&mut header, path, body).unwrap();
    }
    let data = tar.into_inner().unwrap().finish().unwrap();
    let mut ar = ar::Builder::new(Vec::new());
    let scriptlets: &[u8] = b"never unpacked";
    for (name, body) in
        [("debian-binary", b"2.0\n".as_slice()), ("control.tar.gz", scriptlets), ("data.tar.gz", &data)]
    {
        ar.append(&ar::Header::new(name.into(), body.len() as u64), body).unwrap();
    }
    ar.into_inner().unwrap()
}

/// A package list of these versions of `libdemo`, all of them this file.
fn list(versions: &[&str], file: &[u8]) -> Vec<u8> {
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    write!(gzip, "Package: other\nVersion: 99\nFilename: pool/other.deb\nSize: 1\n\n").unwrap();
    for version in versions {
        let (size, sha256) = (file.len(), Digest::of(file).hex());
        write!(
            gzip,
            "Package: libdemo\nVersion: {version}\nDescription: a demo\n over several\n .\n lines\n\
             Filename: pool/libdemo_{version}.deb\nSize: {size}\nSHA256: {sha256}\n\n"
        )
        .unwrap();
    }
    gzip.finish().unwrap()
}

/// An archive that serves a list in one suite, and a file under every name of its pool.
fn archive(versions: &[&str], listed: &[u8], served: Vec<u8>) -> Server {
    let list = list(versions, listed);
    Server::start(move |path, _| match path {
        "/debian/dists/stable/main/binary-amd64/Packages.gz" => Answer::Body("x", list.clone()),
        path if path.starts_with("/debian/pool/libdemo_") => Answer::Body("x", served.clone()),
        _ => Answer::Status(404),
    })
}

fn source(server: &Server) -> AptSource {
    let line = format!("deb [trusted=yes] {} stable main", server.url("/debian"));
    parse_list(&line).pop().unwrap()
}

/// A room whose packages come from these archives, with a manifest that links `libdemo`.
fn room(archives: Vec<AptSource>, version: Option<&str>) -> (Room, PathBuf) {
    let mut room = Room::new(&[]);
    room.settings.index.debian = archives;
    // The manifest has a program too, whose compiler is asked for its version.
    let known = ["PATH", "HOME", "CARGO_HOME", "RUSTUP_HOME", "RUSTUP_TOOLCHAIN"];
    room.settings.tools =
        known.iter().filter_map(|name| Some((OsString::from(*name), std::env::var_os(name)?))).collect();
    let version = version.map(|version| format!("={version}")).unwrap_or_default();
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let text = format!(
        r#"
version = 1
name = "demo"
platform = "linux/amd64"
[input.demo]
kind = "deb"
packages = ["libdemo{version}"]
dependencies = false
[input.programs]
kind = "cargo"
workspace = "{}"
packages = ["demo"]
link = ["demo"]
into = "/usr/bin"
[config]
entrypoint = ["/usr/bin/demo"]
user = "65532:65532"
"#,
        workspace.display()
    );
    let manifest = room.path("demo.toml");
    std::fs::write(&manifest, text).unwrap();
    (room, manifest)
}

fn input_error(error: lock::Error) -> input::Error {
    match error {
        lock::Error::Input { source, .. } => *source,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_newest_version_is_locked_or_the_one_asked_for() {
    let file = package(CRT);
    let older = archive(&["1:1.0-2", "2.0-1"], &file, file.clone());
    let newer = archive(&["1:1.0-10~rc1", "1:1.0-9"], &file, file.clone());
    for (asked, expect) in [(None, "1:1.0-10~rc1"), (Some("2.0-1"), "2.0-1"), (Some("1:1.0-2"), "1:1.0-2")] {
        let (room, manifest) = room(vec![source(&older), source(&newer)], asked);
        let locked = room.lock(&manifest).unwrap();
        let demo = locked.input.iter().find(|(name, _)| name.to_string() == "demo").unwrap().1;
        let LockedInput::Deb { package } = demo else { panic!("{demo:?}") };
        let LockedDeb { version, file: pinned, objects } = &package["libdemo"];
        assert_eq!(version, expect);
        assert_eq!(pinned.name, format!("pool/libdemo_{expect}.deb"));
        assert_eq!((pinned.size, pinned.sha256), (file.len() as u64, Digest::of(&file)));
        let path = "usr/lib/x86_64-linux-gnu/crti.o".to_owned();
        assert_eq!(*objects, [(path, Digest::of(CRT))].into());
        let written = std::fs::read_to_string(lock::path(&manifest)).unwrap();
        let again: trainyard_spec::lock::Lock = trainyard_spec::toml::read("demo.lock", &written).unwrap();
        assert_eq!(again, locked, "a lock is read as it was written");
    }
}

#[test]
fn packages_that_are_nowhere_are_named() {
    let file = package(CRT);
    let server = archive(&["1.0"], &file, file.clone());
    let foreign = AptSource { architectures: vec!["riscv64".to_owned()], ..source(&server) };
    for (sources, version, expect) in [
        (vec![source(&server)], Some("3.0"), "libdemo 3.0 was not found in http"),
        (vec![foreign], None, "libdemo (any version) was not found"),
        (vec![], None, "no Debian archive is configured, and libdemo is not in the store"),
    ] {
        let (room, manifest) = room(sources, version);
        let error = input_error(room.lock(&manifest).unwrap_err());
        assert!(error.to_string().contains(expect), "{error}");
        assert!(error.hint().is_some() && error.is_out_of_reach(), "{error:?}");
        assert!(!lock::path(&manifest).exists());
    }
    assert!(server.seen().iter().all(|seen| !seen.path.contains("riscv64")));
}

#[test]
fn an_archive_that_fails_is_made_up_for_by_the_next() {
    let file = package(CRT);
    let mut damaged = file.clone();
    damaged[100] ^= 1;
    let good = archive(&["1.0"], &file, file.clone());
    // Each has the list, so that the lock needs the file from it first.
    let first: [(&str, Option<Vec<u8>>, u16); 4] = [
        ("absent", None, 404),
        ("down", None, 500),
        ("damaged", Some(damaged.clone()), 0),
        ("longer", Some([file.as_slice(), b"x"].concat()), 0),
    ];
    for (what, served, status) in first {
        let bad = Server::start(move |path, _| match (path.contains("/pool/"), &served) {
            (true, Some(body)) => Answer::Body("x", body.clone()),
            (true, None) => Answer::Status(status),
            (false, _) => Answer::Status(404),
        });
        let (room, manifest) = room(vec![source(&bad), source(&good)], None);
        room.lock(&manifest).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(bad.count("/debian/pool/libdemo_1.0.deb") > 0, "{what}");
        assert_eq!(room.leftovers(), Vec::<OsString>::new(), "{what}");
    }

    // Wrong bytes are told before mere failures, and are never out of reach.
    let list = list(&["1.0"], &file);
    let bad = Server::start(move |path, _| match path {
        "/debian/dists/stable/main/binary-amd64/Packages.gz" => Answer::Body("x", list.clone()),
        path if path.contains("/pool/") => Answer::Body("x", damaged.clone()),
        _ => Answer::Status(404),
    });
    let down = Server::start(|path, _| Answer::Status(if path.contains("/pool/") { 500 } else { 404 }));
    let (room, manifest) = room(vec![source(&down), source(&bad)], None);
    let error = input_error(room.lock(&manifest).unwrap_err());
    assert!(matches!(error, input::Error::Store(store::Error::Differs { .. })), "{error:?}");
    assert!(!error.is_out_of_reach());
}

#[test]
fn lists_that_make_no_sense_are_named() {
    let file = Arc::new(package(CRT));
    let gzip = |text: &str| {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(text.as_bytes()).unwrap();
        gzip.finish().unwrap()
    };
    let hex = Digest::of(&file).hex();
    let paragraph = format!("Package: libdemo\nVersion: 1\nFilename: pool/a.deb\nSize: 9\nSHA256: {hex}\n");
    for (name, body) in [
        ("no gzip", b"Package: libdemo\n".to_vec()),
        ("cut", gzip(&paragraph.repeat(50))[..60].to_vec()),
        ("no digest", gzip(&paragraph.replace("SHA256", "MD5"))),
        ("leads out", gzip(&paragraph.replace("pool/a", "pool/../../a"))),
        ("elsewhere", gzip(&paragraph.replace("pool/a", "/etc/a"))),
        ("no size", gzip(&paragraph.replace("Size: 9", "Size: many"))),
    ] {
        let server = Server::start(move |path, _| match path {
            path if path.ends_with("Packages.gz") => Answer::Body("x", body.clone()),
            _ => Answer::Status(404),
        });
        let (room, manifest) = room(vec![source(&server)], None);
        let error = input_error(room.lock(&manifest).unwrap_err());
        assert!(matches!(error, input::Error::Index(index::Error::Page { .. })), "{name}: {error:?}");
        assert!(error.to_string().contains("Packages.gz"), "{name}: {error}");
    }
}
