//! What is removed from a cache, what stays, and who is waited for.

#![expect(clippy::disallowed_methods, reason = "how old a file is, only the clock tells")]

use std::collections::BTreeSet;
use std::fs::FileTimes;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, SystemTime};

use tempfile::TempDir;
use trainyard_builder::gc::{self, Collected, Request};
use trainyard_builder::image::{self, Image};
use trainyard_builder::oci::Layout;
use trainyard_builder::progress::Event;
use trainyard_builder::settings::Settings;
use trainyard_builder::store::{self, Store};
use trainyard_builder::{lock, unpack};
use trainyard_spec::lock::{Lock, LockedFile, LockedInput};
use trainyard_spec::toml;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// A folder with a manifest of one file, and a cache.
struct Yard {
    folder: TempDir,
    settings: Settings,
}

impl Yard {
    fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let settings =
            Settings { offline: true, ..Settings::from_environment(folder.path().join("cache")).unwrap() };
        Self { folder, settings }
    }

    fn manifest(&self) -> PathBuf {
        self.folder.path().join("image.toml")
    }

    /// The image of a program that says `text`.
    fn build(&self, text: &str) -> Image {
        let program = self.folder.path().join("own/bin/program");
        std::fs::create_dir_all(program.parent().unwrap()).unwrap();
        std::fs::write(&program, text).unwrap();
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
        let manifest = r#"
version = 1
name = "small"
platform = "linux/amd64"
[input.own]
kind = "files"
path = "own"
into = "/"
[config]
entrypoint = ["/bin/program"]
user = "65532:65532"
"#;
        std::fs::write(self.manifest(), manifest).unwrap();
        lock::lock(&self.manifest(), &self.settings, &|_| {}).unwrap();
        image::build(&self.manifest(), &self.settings, &|_| {}).unwrap()
    }

    fn rootfs(&self, image: &Image) -> PathBuf {
        unpack::unpack(&Layout::open(&image.layout).unwrap(), &self.settings.cache).unwrap()
    }

    /// Makes all that is in the cache 40 days old.
    fn age(&self) {
        let old = FileTimes::new().set_modified(SystemTime::now() - 40 * DAY);
        for entry in walkdir(&self.settings.cache) {
            std::fs::File::open(entry).unwrap().set_times(old).unwrap();
        }
    }

    fn collect(&self, days: u32, needed: &[&Path], dry_run: bool) -> Collected {
        let needed: BTreeSet<_> = needed.iter().map(|path| path.to_path_buf()).collect();
        let request =
            || Ok::<_, store::Error>(Request { since: SystemTime::now() - days * DAY, needed, dry_run });
        gc::collect(&self.settings.cache, &|_| {}, request).unwrap()
    }

    /// Bytes on the disk that the cache has.
    fn size(&self) -> u64 {
        let mut seen = BTreeSet::new();
        let found = walkdir(&self.settings.cache).into_iter().map(|path| path.symlink_metadata().unwrap());
        found.filter(|found| seen.insert(found.ino())).map(|found| found.blocks() * 512).sum()
    }
}

fn walkdir(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(walkdir(&path));
        }
        found.push(path);
    }
    found
}

fn removed(collected: &Collected, kind: &str) -> (usize, usize) {
    let found = collected.kinds.iter().find(|one| one.kind == kind);
    found.map_or((0, 0), |one| (one.removed, one.kept))
}

#[test]
fn what_was_not_needed_lately_goes_and_the_rest_still_works() {
    let yard = Yard::new();
    let old = yard.build("one");
    let old_root = yard.rootfs(&old);
    let new = yard.build("two");
    let new_root = yard.rootfs(&new);
    assert_eq!(removed(&yard.collect(30, &[], false), "images"), (0, 2), "both are new");

    yard.age();
    // An unchanged build needs its image, and a launch its root.
    assert!(yard.build("two").reused);
    yard.rootfs(&new);
    let before = yard.size();
    let told = yard.collect(30, &[], true);
    assert_eq!(yard.size(), before, "a dry run removes nothing");
    let done = yard.collect(30, &[], false);
    assert_eq!((&told.kinds, told.freed), (&done.kinds, done.freed), "a dry run tells what is done");
    assert_eq!(done.freed.0, before - yard.size(), "what is free now is what was removed");
    assert!(done.freed.0 > 0);
    assert_eq!(removed(&done, "images"), (1, 1));
    assert_eq!(removed(&done, "unpacked images"), (1, 1));
    assert!(!old.layout.exists() && !old_root.exists() && new.layout.exists() && new_root.exists());
    assert!(!old.layout.with_extension("facts.json").exists());
    assert!(yard.build("two").reused);
    assert_eq!(yard.build("one").digest, old.digest, "what was removed is made anew");
}

#[test]
fn what_jobs_and_locks_need_stays_however_old_it_is() {
    let yard = Yard::new();
    let image = yard.build("one");
    let root = yard.rootfs(&image);
    // A file that only the lock names: nothing looks at it while nothing changes.
    let store = Store::new(&yard.settings.cache);
    let keep = |bytes: &[u8]| {
        let mut incoming = store.incoming().unwrap();
        std::io::Write::write_all(&mut incoming, bytes).unwrap();
        store.keep(incoming).unwrap().0
    };
    let (locked, other) = (keep(b"locked"), keep(b"other"));
    let path = lock::path(&yard.manifest());
    let mut lock: Lock = toml::read("lock", &std::fs::read_to_string(&path).unwrap()).unwrap();
    let file = LockedFile { name: "a-1.tar.gz".into(), size: 6, sha256: locked };
    let input = LockedInput::Python { package: "a".into(), version: "1".into(), file };
    lock.input.insert("text".parse().unwrap(), input);
    std::fs::write(&path, toml::write(&lock)).unwrap();
    yard.age();
    let note = std::fs::read_dir(yard.settings.cache.join("built")).unwrap().next().unwrap().unwrap().path();
    store::used(&note);

    let done = yard.collect(30, &[&image.layout, &root], false);
    assert!(store.path(&locked).exists() && !store.path(&other).exists());
    assert!(image.layout.exists() && root.join("bin/program").exists());
    assert_eq!(removed(&done, "unpacked images"), (0, 1));

    // Nobody needs anything any more.
    yard.age();
    yard.collect(0, &[], false);
    assert!(!image.layout.exists() && !root.exists() && !store.path(&locked).exists());
    assert_eq!(yard.build("one").digest, image.digest);
}

#[test]
fn nothing_is_removed_while_the_cache_is_in_use() {
    let yard = Yard::new();
    let image = yard.build("one");
    yard.age();
    let store = Store::new(&yard.settings.cache);
    // Two at once.
    let (first, second) = (store.in_use().unwrap(), store.in_use().unwrap());
    let (waits, waiting) = mpsc::channel();
    std::thread::scope(|threads| {
        let collecting = threads.spawn(|| {
            let request = || {
                Ok::<_, store::Error>(Request {
                    since: SystemTime::now(),
                    needed: BTreeSet::new(),
                    dry_run: false,
                })
            };
            let tell = |event| waits.send(event).unwrap();
            gc::collect(&yard.settings.cache, &tell, request).unwrap()
        });
        assert!(matches!(waiting.recv().unwrap(), Event::Waiting { .. }));
        drop(first);
        std::thread::sleep(Duration::from_millis(50));
        assert!(image.layout.exists() && !collecting.is_finished());
        drop(second);
        assert_eq!(removed(&collecting.join().unwrap(), "images"), (1, 0));
    });
    assert!(!image.layout.exists());
}
