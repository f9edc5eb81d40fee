//! Debian archives that are signed, well and badly, by keys that gpg makes; checked by gpgv and by sqv.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

use tempfile::TempDir;
use trainyard_builder::index::{AptSource, SignedBy, Trust, parse_list};
use trainyard_builder::{index, input, lock};
use trainyard_spec::Digest;

use crate::room::Room;
use crate::server::{Answer, Server};

/// Keys in a folder of their own.
pub(crate) struct Keys {
    home: TempDir,
}

/// Whether a program is here; without it, tests are skipped, except in CI.
pub(crate) fn is_there(program: &str) -> bool {
    match Command::new(program).arg("--version").output() {
        Ok(_) => true,
        Err(error) => {
            assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "CI must have {program}: {error}");
            eprintln!("SKIPPED: {program}: {error}");
            false
        }
    }
}

impl Keys {
    /// Makes a key of a name. None where gpg is missing and may be.
    pub(crate) fn make(name: &str, expires: &str) -> Option<Self> {
        if !is_there("gpg") || !is_there("gpgv") {
            return None;
        }
        let keys = Self { home: TempDir::new().unwrap() };
        let rsa = ["--passphrase", "", "--quick-generate-key", name, "rsa2048", "sign", expires];
        // A key of the past is one that has expired by now.
        let past =
            (expires == "1d").then_some(["--faked-system-time", "20200101T000000"]).into_iter().flatten();
        keys.gpg(&past.chain(rsa).collect::<Vec<_>>(), b"");
        Some(keys)
    }

    /// Runs gpg with these arguments and bytes.
    pub(crate) fn gpg(&self, arguments: &[&str], bytes: &[u8]) -> Vec<u8> {
        let input = self.home.path().join("input");
        std::fs::write(&input, bytes).unwrap();
        let output = Command::new("gpg")
            .arg("--homedir")
            .arg(self.home.path())
            .args(["--batch", "--yes", "--quiet", "--pinentry-mode", "loopback"])
            .args(arguments)
            .stdin(std::fs::File::open(&input).unwrap())
            .output()
            .unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    }

    /// The public keys in a file, armored or not.
    pub(crate) fn export(&self, armored: bool) -> PathBuf {
        let path = self.home.path().join(if armored { "keys.asc" } else { "keys.gpg" });
        let arguments: &[&str] = if armored { &["--armor", "--export"] } else { &["--export"] };
        std::fs::write(&path, self.gpg(arguments, b"")).unwrap();
        path
    }

    pub(crate) fn fingerprint(&self) -> String {
        let listed = String::from_utf8(self.gpg(&["--with-colons", "--list-keys"], b"")).unwrap();
        listed.lines().find_map(|line| line.strip_prefix("fpr:")).unwrap().trim_matches(':').to_owned()
    }

    fn clearsign(&self, text: &str) -> Vec<u8> {
        self.gpg(&["--clearsign"], text.as_bytes())
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        // gpg leaves an agent behind that holds the key.
        let _ =
            Command::new("gpgconf").arg("--homedir").arg(self.home.path()).args(["--kill", "all"]).status();
    }
}

const LIST: &str = "Package: demo\nVersion: 1\nFilename: pool/demo.deb\nSize: 3\nSHA256: ";

fn list() -> String {
    format!("{LIST}{}\n", Digest::of(b"deb").hex())
}

/// The Release file of a suite with that list.
fn release(fields: &str, list: &str) -> String {
    let hex = Digest::of(list.as_bytes()).hex();
    format!("Suite: stable\n{fields}SHA256:\n {hex} {} main/binary-amd64/Packages.gz\n", list.len())
}

/// Files of an archive by name below its suite.
type Files = Vec<(&'static str, Vec<u8>)>;

fn serve(files: Files) -> Server {
    Server::start(move |path, _| {
        let name = path.strip_prefix("/debian/dists/stable/").unwrap_or("");
        match files.iter().find(|(file, _)| *file == name) {
            Some((_, body)) => Answer::Body("x", body.clone()),
            None => Answer::Status(404),
        }
    })
}

fn source(server: &Server, keys: SignedBy) -> AptSource {
    let line = format!("deb {} stable main", server.url("/debian"));
    AptSource { trust: Trust::Keys(keys), ..parse_list(&line).pop().unwrap() }
}

/// Locks `demo`, whose package nobody serves: how far that came tells what was made of the lists.
fn lock(source: AptSource, path: &OsString) -> index::Error {
    let mut room = Room::new(&[]);
    room.settings.index.debian = vec![source];
    room.settings.tools = [(OsString::from("PATH"), path.clone())].into();
    let manifest = room.path("demo.toml");
    let text = "version = 1\nname = \"demo\"\nplatform = \"linux/amd64\"\n[input.demo]\nkind = \"deb\"\n\
        packages = [\"demo\"]\n[config]\nentrypoint = [\"/a\"]\nuser = \"1:1\"\n";
    std::fs::write(&manifest, text).unwrap();
    let error = match room.lock(&manifest).unwrap_err() {
        lock::Error::Input { source, .. } => match *source {
            input::Error::Index(error) => error,
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    };
    assert_eq!(room.leftovers(), Vec::<OsString>::new());
    error
}

/// Whether the lists were taken, so that the package was looked for.
fn is_taken(error: &index::Error) -> bool {
    matches!(error, index::Error::NotFound { package, .. } if package == "pool/demo.deb")
}

/// The programs of this machine, and a folder that has sqv alone.
fn programs() -> Vec<(&'static str, OsString, Option<TempDir>)> {
    let mut programs = vec![("gpgv", std::env::var_os("PATH").unwrap(), None)];
    if is_there("sqv") {
        let folder = TempDir::new().unwrap();
        let found =
            std::env::split_paths(&programs[0].1).map(|folder| folder.join("sqv")).find(|path| path.exists());
        std::os::unix::fs::symlink(found.unwrap(), folder.path().join("sqv")).unwrap();
        programs.push(("sqv", folder.path().into(), Some(folder)));
    }
    programs
}

#[test]
fn signatures_of_archives() {
    let Some(mine) = Keys::make("mine@example.test", "never") else { return };
    let theirs = Keys::make("theirs@example.test", "never").unwrap();
    let old = Keys::make("old@example.test", "1d").unwrap();
    let by_files = |files: &[PathBuf]| SignedBy { files: files.to_vec(), ..SignedBy::default() };
    let (binary, armored) = (mine.export(false), mine.export(true));
    let block = SignedBy { blocks: vec![std::fs::read_to_string(&armored).unwrap()], ..SignedBy::default() };
    let only =
        |keys: &Keys| SignedBy { only: vec![keys.fingerprint()], ..by_files(std::slice::from_ref(&binary)) };

    let list = list();
    let packages = ("main/binary-amd64/Packages.gz", list.clone().into_bytes());
    let text = release("", &list);
    let signed = mine.clearsign(&text);
    let inline = vec![("InRelease", signed.clone()), packages.clone()];
    let apart = |signature: Vec<u8>| {
        vec![("Release", text.clone().into_bytes()), ("Release.gpg", signature), packages.clone()]
    };
    let changed =
        String::from_utf8(signed.clone()).unwrap().replace("Suite: stable", "Suite: stabel").into_bytes();
    let around = [b"Suite: evil\n\n".to_vec(), signed.clone()].concat();
    let other_list = ("main/binary-amd64/Packages.gz", list.replace("demo.deb", "evil.deb").into_bytes());
    let expired = old.gpg(&["--faked-system-time", "20200101T010000", "--clearsign"], text.as_bytes());
    let dated = |fields: &str| vec![("InRelease", mine.clearsign(&release(fields, &list))), packages.clone()];
    let two = apart(
        [theirs.gpg(&["--detach-sign"], text.as_bytes()), mine.gpg(&["--detach-sign"], text.as_bytes())]
            .concat(),
    );

    // Files, keys, and what is said; nothing where the lists are taken.
    let cases: Vec<(&str, Files, SignedBy, Option<&str>)> = vec![
        ("binary key", inline.clone(), by_files(std::slice::from_ref(&binary)), None),
        ("armored key", inline.clone(), by_files(std::slice::from_ref(&armored)), None),
        ("several keyrings", inline.clone(), by_files(&[theirs.export(true), binary.clone()]), None),
        ("key in the source", inline.clone(), block, None),
        ("fingerprint", inline.clone(), only(&mine), None),
        (
            "apart, armored",
            apart(mine.gpg(&["--armor", "--detach-sign"], text.as_bytes())),
            by_files(std::slice::from_ref(&binary)),
            None,
        ),
        (
            "apart, binary",
            apart(mine.gpg(&["--detach-sign"], text.as_bytes())),
            by_files(std::slice::from_ref(&binary)),
            None,
        ),
        ("also by an unknown key", two, by_files(std::slice::from_ref(&binary)), None),
        (
            "valid for now",
            dated("Valid-Until: Thu, 01 Jan 2950 00:00:00 UTC\n"),
            by_files(std::slice::from_ref(&binary)),
            None,
        ),
        ("other fingerprint", inline.clone(), only(&theirs), Some("does not count")),
        ("unknown key", inline.clone(), by_files(&[theirs.export(false)]), Some("does not count")),
        ("no keys", inline, SignedBy::default(), Some("there is no key to check it with")),
        (
            "changed text",
            vec![("InRelease", changed), packages.clone()],
            by_files(std::slice::from_ref(&binary)),
            Some("does not count"),
        ),
        (
            "text around",
            vec![("InRelease", around), packages.clone()],
            by_files(std::slice::from_ref(&binary)),
            Some("no text with one signature"),
        ),
        (
            "expired key",
            vec![("InRelease", expired), packages.clone()],
            by_files(&[old.export(false)]),
            Some("does not count"),
        ),
        (
            "no signature",
            vec![("Release", text.clone().into_bytes()), packages.clone()],
            by_files(std::slice::from_ref(&binary)),
            Some("is not signed"),
        ),
        (
            "other list",
            vec![("InRelease", signed), other_list],
            by_files(std::slice::from_ref(&binary)),
            Some("the suite's Release says sha256"),
        ),
        (
            "expired suite",
            dated("Valid-Until: Sat, 01 Jan 2022 00:00:00 UTC\n"),
            by_files(std::slice::from_ref(&binary)),
            Some("was valid until"),
        ),
        (
            "suite to come",
            dated("Date: Thu, 01 Jan 2950 00:00:00 UTC\n"),
            by_files(std::slice::from_ref(&binary)),
            Some("which is to come"),
        ),
    ];
    for (program, path, _folder) in programs() {
        for (what, files, keys, expect) in &cases {
            let server = serve(files.clone());
            let error = lock(source(&server, keys.clone()), &path);
            // sqv takes a signature that was made while its key was valid; gpgv does not. apt goes by the one it has.
            let expect = expect.filter(|_| (program, *what) != ("sqv", "expired key"));
            match expect {
                None => assert!(is_taken(&error), "{program}, {what}: {error}"),
                Some(expect) => {
                    assert!(error.to_string().contains(expect), "{program}, {what}: {error}");
                    assert!(!error.is_out_of_reach(), "{program}, {what}: {error}");
                    // Nothing unproved was used.
                    assert_eq!(server.count("/debian/pool/demo.deb"), 0, "{program}, {what}");
                }
            }
        }
        // Told to trust it, apt asks for no signature, and nor does this.
        let server = serve(vec![
            ("Release", text.clone().into_bytes()),
            ("main/binary-amd64/Packages.gz", list.clone().into_bytes()),
        ]);
        let trusted = AptSource { trust: Trust::Unsigned, ..source(&server, SignedBy::default()) };
        assert!(is_taken(&lock(trusted, &path)));
    }
}

#[test]
fn bad_signatures_name_archive_keyring_and_key() {
    let Some(mine) = Keys::make("mine@example.test", "never") else { return };
    let theirs = Keys::make("theirs@example.test", "never").unwrap();
    let list = list();
    let text = release("", &list);
    let fingerprint = mine.fingerprint();
    let id = &fingerprint[fingerprint.len() - 16..];
    let signed = mine.clearsign(&text);
    let changed = String::from_utf8(signed.clone()).unwrap().replace("stable", "stabel").into_bytes();
    let (right, wrong) = (mine.export(false), theirs.export(false));
    for (body, keyring, problem) in [
        (signed, &wrong, format!("key {id}, by which it is signed, is not there")),
        (changed, &right, format!("the signature by key {id} is of other bytes")),
    ] {
        let server = serve(vec![("InRelease", body)]);
        let keys = SignedBy { files: vec![keyring.clone()], ..SignedBy::default() };
        let error = lock(source(&server, keys), &std::env::var_os("PATH").unwrap());
        let url = server.url("/debian/dists/stable/InRelease");
        let expect =
            format!("the signature of {url} does not count: {problem} (keys from {})", keyring.display());
        assert_eq!(error.to_string(), expect);
        assert!(error.hint().is_some());
    }
    // Without any program to check it, nothing is taken.
    let server = serve(vec![("InRelease", mine.clearsign(&text))]);
    let keys = SignedBy { files: vec![right], ..SignedBy::default() };
    let error = lock(source(&server, keys), &OsString::from("/nonexistent"));
    assert!(error.to_string().contains("neither gpgv nor sqv is on this machine"), "{error}");
}

#[test]
fn lists_are_had_by_their_digest() {
    let Some(mine) = Keys::make("mine@example.test", "never") else { return };
    let list = list();
    let text = release("Acquire-By-Hash: yes\n", &list);
    let hashed = format!("main/binary-amd64/by-hash/SHA256/{}", Digest::of(list.as_bytes()).hex());
    let files = vec![
        ("InRelease", mine.clearsign(&text)),
        (Box::leak(hashed.into_boxed_str()), list.into_bytes()),
        ("main/binary-amd64/Packages.gz", b"a newer list".to_vec()),
    ];
    let server = serve(files);
    let keys = SignedBy { files: vec![mine.export(false)], ..SignedBy::default() };
    assert!(is_taken(&lock(source(&server, keys), &std::env::var_os("PATH").unwrap())));
    assert_eq!(server.count("/debian/dists/stable/main/binary-amd64/Packages.gz"), 0);
}
