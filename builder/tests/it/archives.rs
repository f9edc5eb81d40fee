//! Archives that are damaged, hostile, or larger than they may be.

use std::io::Write;
use std::path::Path;

use tar::{EntryType, Header};
use tempfile::TempDir;
use trainyard_builder::input::archive::{Error, Kind, Limits, visit_files};

/// A tar archive written header by header, so that it can hold what no honest tool writes.
fn tar(entries: &[(&str, EntryType, &str, &[u8])]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (path, kind, link, body) in entries {
        let mut header = Header::new_ustar();
        header.as_mut_bytes()[..path.len()].copy_from_slice(path.as_bytes());
        header.as_mut_bytes()[157..157 + link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(*kind);
        header.set_mode(0o644);
        header.set_size(body.len() as u64);
        header.set_cksum();
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend_from_slice(body);
        bytes.resize(bytes.len().next_multiple_of(512), 0);
    }
    bytes.resize(bytes.len() + 1024, 0);
    bytes
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    gzip.write_all(bytes).unwrap();
    gzip.finish().unwrap()
}

fn ar(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = ar::Builder::new(Vec::new());
    for (name, body) in members {
        let header = ar::Header::new(name.as_bytes().to_vec(), body.len() as u64);
        builder.append(&header, *body).unwrap();
    }
    builder.into_inner().unwrap()
}

fn deb(data_name: &str, data: &[u8]) -> Vec<u8> {
    ar(&[("debian-binary", b"2.0\n"), ("control.tar.gz", b"not read"), (data_name, data)])
}

fn zip(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let mut zip = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
    for (name, body) in entries {
        zip.start_file(*name, zip::write::SimpleFileOptions::default()).unwrap();
        zip.write_all(body).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

type Files = Vec<(String, Vec<u8>)>;

fn read(bytes: &[u8], kind: Kind, limits: Limits) -> Result<Files, Error> {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("archive");
    std::fs::write(&path, bytes).unwrap();
    let mut files = Vec::new();
    visit_files(&path, kind, limits, &mut |name, body| {
        let mut bytes = Vec::new();
        body.read_to_end(&mut bytes)?;
        files.push((name.to_owned(), bytes));
        Ok(())
    })?;
    Ok(files)
}

#[test]
fn honest_archives_of_every_kind_are_read() {
    let plain = tar(&[
        ("./", EntryType::Directory, "", b""),
        ("./usr/", EntryType::Directory, "", b""),
        ("./usr/a", EntryType::Regular, "", b"body"),
        ("./usr/b", EntryType::Symlink, "a", b""),
        ("./usr/c", EntryType::Link, "./usr/a", b""),
        ("./usr/d", EntryType::Symlink, "/lib/d", b""),
    ]);
    let without_absolute = tar(&[("usr/a", EntryType::Regular, "", b"body")]);
    let expect: Files = vec![("usr/a".to_owned(), b"body".to_vec())];
    for (name, kind, bytes) in [
        ("tar.gz", Kind::Tar, Some(gzip(&without_absolute))),
        ("zip", Kind::Zip, Some(zip(&[("usr/a", b"body")]))),
        ("deb", Kind::Deb, Some(deb("data.tar", &plain))),
        ("deb gz", Kind::Deb, Some(deb("data.tar.gz", &gzip(&plain)))),
        ("deb xz", Kind::Deb, packed("xz", &plain).map(|data| deb("data.tar.xz", &data))),
        ("deb zst", Kind::Deb, packed("zstd", &plain).map(|data| deb("data.tar.zst", &data))),
    ] {
        let Some(bytes) = bytes else { continue };
        assert_eq!(read(&bytes, kind, Limits::default()).unwrap(), expect, "{name}");
    }
}

/// What a compression tool of this machine makes of the bytes.
fn packed(tool: &str, bytes: &[u8]) -> Option<Vec<u8>> {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("data");
    std::fs::write(&path, bytes).unwrap();
    let output = std::process::Command::new(tool).arg("-c").arg(&path).output();
    match output {
        Ok(output) if output.status.success() => Some(output.stdout),
        other if std::env::var_os("CI").is_some() => panic!("{tool} is needed here: {other:?}"),
        _ => {
            eprintln!("SKIPPED: {tool} is not installed");
            None
        }
    }
}

#[test]
fn hostile_archives_are_refused_whole() {
    let file = EntryType::Regular;
    type Case<'a> = (&'a str, &'a [(&'a str, EntryType, &'a str, &'a [u8])]);
    let cases: [Case<'_>; 11] = [
        ("leads out", &[("../a", file, "", b"x")]),
        ("leads out", &[("a/../../b", file, "", b"x")]),
        ("leads out", &[("/etc/passwd", file, "", b"x")]),
        ("twice", &[("a", file, "", b"x"), ("./a", file, "", b"y")]),
        ("a link that leads out", &[("a", EntryType::Symlink, "../b", b"")]),
        ("a link that leads out", &[("d/a", EntryType::Symlink, "x/../../../b", b"")]),
        ("a link that leads out", &[("a", EntryType::Symlink, "/etc", b"")]),
        ("a hard link to no file", &[("a", EntryType::Link, "../b", b"")]),
        ("a hard link to no file", &[("a", EntryType::Link, "b", b""), ("b", file, "", b"x")]),
        ("neither", &[("a", EntryType::Char, "", b"")]),
        ("neither", &[("a", EntryType::Fifo, "", b"")]),
    ];
    for (problem, entries) in cases {
        let error = read(&gzip(&tar(entries)), Kind::Tar, Limits::default()).unwrap_err();
        assert!(matches!(error, Error::Hostile { .. }), "{entries:?}: {error:?}");
        assert!(error.to_string().contains(problem), "{entries:?}: {error}");
        let is_absolute_link = entries.iter().any(|(_, _, link, _)| link.starts_with('/'));
        let in_deb = read(&deb("data.tar", &tar(entries)), Kind::Deb, Limits::default());
        // A package's absolute links are links within the image.
        assert_eq!(in_deb.is_ok(), is_absolute_link, "{entries:?}");
    }
    for (problem, bytes) in [
        ("twice", repeated_in_zip()),
        ("a link that leads out", {
            let mut zip = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
            zip.add_symlink("a", "../b", zip::write::SimpleFileOptions::default()).unwrap();
            zip.finish().unwrap().into_inner()
        }),
    ] {
        let error = read(&bytes, Kind::Zip, Limits::default()).unwrap_err();
        assert!(matches!(error, Error::Hostile { .. }), "{error:?}");
        assert!(error.to_string().contains(problem), "{error}");
    }
    for entries in [&[("../a", b"x".as_slice())][..], &[("/a", b"x")], &[("a/../../b", b"x")]] {
        let error = read(&zip(entries), Kind::Zip, Limits::default()).unwrap_err();
        assert!(matches!(error, Error::Hostile { .. }), "{entries:?}: {error:?}");
    }
}

/// A zip archive with two entries of one name, which no honest tool writes.
fn repeated_in_zip() -> Vec<u8> {
    let mut bytes = zip(&[("same", b"1"), ("sama", b"2")]);
    for at in 0..bytes.len() - 4 {
        if &bytes[at..at + 4] == b"sama" {
            bytes[at + 3] = b'e';
        }
    }
    bytes
}

#[test]
fn bombs_stop_at_the_limit() {
    let zeros = vec![0; 4 << 20];
    let bomb = tar(&[("a", EntryType::Regular, "", &zeros)]);
    let limits = Limits { entries: 10, file_bytes: 1 << 19, bytes: 1 << 20 };
    for (kind, bytes) in [
        (Kind::Tar, gzip(&bomb)),
        (Kind::Zip, zip(&[("a", &zeros)])),
        (Kind::Deb, deb("data.tar.gz", &gzip(&bomb))),
    ] {
        assert!(bytes.len() < 64 << 10);
        let error = read(&bytes, kind, limits).unwrap_err();
        assert!(matches!(error, Error::TooMuch { .. }), "{kind:?}: {error:?}");
    }
    // Four files, each of which may be that large, are too much together; one that is too large alone is named.
    let small = vec![0; 300 << 10];
    let names = ["a", "b", "c", "d"];
    let four: Vec<_> = names.iter().map(|name| (*name, small.as_slice())).collect();
    let in_tar: Vec<_> = four.iter().map(|(name, body)| (*name, EntryType::Regular, "", *body)).collect();
    for (kind, bytes) in [(Kind::Tar, gzip(&tar(&in_tar))), (Kind::Zip, zip(&four))] {
        let said = read(&bytes, kind, limits).unwrap_err().to_string();
        assert!(said.contains("more than 1048576 bytes"), "{kind:?}: {said}");
    }
    let said = read(&gzip(&bomb), Kind::Tar, limits).unwrap_err().to_string();
    assert!(said.contains("more than 524288 bytes in \"a\""), "{said}");

    // A name that would be read into memory whole.
    let long = tar(&[("././@LongLink", EntryType::GNULongName, "", &vec![b'x'; 4 << 20])]);
    let generous = Limits { entries: 10, file_bytes: 1 << 30, bytes: 1 << 30 };
    let said = read(&gzip(&long), Kind::Tar, generous).unwrap_err().to_string();
    assert!(said.contains("more than 1048576 bytes to describe one entry"), "{said}");

    let names: Vec<String> = (0..11).map(|n| n.to_string()).collect();
    let many: Vec<_> =
        names.iter().map(|name| (name.as_str(), EntryType::Regular, "", b"".as_slice())).collect();
    let error = read(&gzip(&tar(&many)), Kind::Tar, limits).unwrap_err();
    assert!(error.to_string().contains("more than 10 entries"), "{error}");
}

/// `x` ten times, in xz with a window of 4 GiB.
const XZ_OF_HUGE_WINDOW: &[u8] = b"\xfd\x37\x7a\x58\x5a\x00\x00\x04\xe6\xd6\xb4\x46\x02\x00\x21\x01\x28\x00\x00\x00\xe6\xa0\x11\xb3\
    \xe0\x00\x09\x00\x06\x5d\x00\x3c\x6b\x7c\x00\x00\x00\x00\x00\x00\x98\x4f\xb5\x4d\x7d\x98\xfd\xf4\x00\x01\x22\x0a\x15\x1a\xe1\x67\
    \x1f\xb6\xf3\x7d\x01\x00\x00\x00\x00\x04\x59\x5a";
/// Nothing, in zstd with a window of 2 TiB.
const ZSTD_OF_HUGE_WINDOW: &[u8] = b"\x28\xb5\x2f\xfd\x00\xf8\x01\x00\x00";

/// An ar archive of one member with this name and size in its header.
fn member(name: &str, size: &str) -> Vec<u8> {
    format!("!<arch>\n{name:<16}{:<12}{:<6}{:<6}{:<8}{size:<10}`\n", 0, 0, 0, 100644).into_bytes()
}

#[test]
fn damaged_archives_are_unreadable() {
    // Noise, so that the archive is long and one flipped bit leaves it readable but for its checksum.
    let noise: Vec<u8> = (0..3000_u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_be_bytes()).collect();
    let good = gzip(&tar(&[("dir/name", EntryType::Regular, "", &noise)]));
    let zipped = zip(&[("dir/name", &noise)]);
    let flipped = |bytes: &[u8]| {
        let mut bytes = bytes.to_vec();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        bytes
    };
    for (kind, bytes) in [
        (Kind::Tar, flipped(&good)),
        (Kind::Tar, good[..good.len() / 2].to_vec()),
        (Kind::Zip, flipped(&zipped)),
        (Kind::Deb, deb("data.tar.gz", &good[..good.len() / 2])),
    ] {
        let error = read(&bytes, kind, Limits::default()).unwrap_err();
        assert!(matches!(error, Error::Unreadable { .. }), "{kind:?}: {error:?}");
        assert!(error.to_string().contains("dir/name"), "an entry is named: {error}");
    }
    for (kind, bytes) in [
        (Kind::Tar, b"no archive".to_vec()),
        (Kind::Zip, zipped[..zipped.len() - 10].to_vec()),
        (Kind::Deb, b"no archive".to_vec()),
        (Kind::Deb, ar(&[("debian-binary", b"3.0\n"), ("data.tar", b"")])),
        (Kind::Deb, ar(&[("data.tar", &tar(&[]))])),
        (Kind::Deb, ar(&[("debian-binary", b"2.0\n")])),
        (Kind::Deb, deb("data.tar.lz9", b"")),
        // Headers that point outside, or claim more than there is or than memory has.
        (Kind::Deb, member("/999", "4")),
        (Kind::Deb, member("//", "9999999999")),
        (Kind::Deb, member("#1/9999999999", "9999999999")),
        (Kind::Deb, member("debian-binary", "-1")),
        (Kind::Deb, member("debian-binary", "9999999999")),
        (Kind::Deb, [ar(&[("debian-binary", b"2.0\n")]), member("data.tar", "99")[8..].to_vec()].concat()),
        (Kind::Deb, deb("data.tar.xz", XZ_OF_HUGE_WINDOW)),
        (Kind::Deb, deb("data.tar.zst", ZSTD_OF_HUGE_WINDOW)),
    ] {
        let error = read(&bytes, kind, Limits::default()).unwrap_err();
        assert!(matches!(error, Error::Unreadable { .. }), "{kind:?}: {error:?}");
    }
    let absent = visit_files(Path::new("/nonexistent/x"), Kind::Zip, Limits::default(), &mut |_, _| Ok(()));
    assert!(absent.unwrap_err().to_string().contains("/nonexistent/x"));
}
