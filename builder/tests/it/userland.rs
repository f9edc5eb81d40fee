//! Images of a distribution's packages and of files: real packages from the archives that this machine is configured for.

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;
use trainyard_builder::image::{self, build};
use trainyard_builder::oci::Layout;
use trainyard_builder::settings::Settings;
use trainyard_builder::{gpus, inspect, lock, unpack};

/// A manifest with a program of this machine that needs the C library, and these inputs beside it.
fn manifest(folder: &Path, inputs: &str) -> PathBuf {
    std::fs::create_dir_all(folder.join("files")).unwrap();
    std::fs::copy("/bin/true", folder.join("files/program")).unwrap();
    let text = format!(
        r#"
version = 1
name = "userland"
platform = "linux/amd64"
compression = "zstd"
{inputs}
[input.files]
kind = "files"
path = "files"
into = "/usr/bin"
[config]
entrypoint = ["/usr/bin/program"]
user = "65532:65532"
"#
    );
    let path = folder.join("image.toml");
    std::fs::write(&path, text).unwrap();
    path
}

#[test]
fn a_program_whose_libraries_are_missing_is_refused() {
    let folder = TempDir::new().unwrap();
    let path = manifest(folder.path(), "");
    let settings = Settings::from_environment(folder.path().join("cache")).unwrap();
    lock::lock(&path, &settings, &|_| {}).unwrap();
    let error = build(&path, &settings, &|_| {}).unwrap_err();
    assert!(matches!(error, image::Error::Gpus(gpus::Error::Unresolved(_))), "{error:?}");
    let said = error.to_string();
    assert!(said.contains("/usr/bin/program") && said.contains("libc.so.6"), "{said}");
    assert!(error.hint().is_some());
}

#[test]
fn packages_and_files_make_a_root_that_runs() {
    let folder = TempDir::new().unwrap();
    let inputs = "[input.userland]\nkind = \"deb\"\npackages = [\"libc6\", \"libgcc-s1\", \"gcc-12-base\"]\ndependencies = false";
    let path = manifest(folder.path(), inputs);
    let settings = Settings::from_environment(folder.path().join("cache")).unwrap();
    match lock::lock(&path, &settings, &|_| {}) {
        Err(lock::Error::Input { source, .. }) if source.is_out_of_reach() => {
            assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "CI must reach an archive: {source}");
            eprintln!("SKIPPED, no Debian archive has these packages: {source}");
            return;
        }
        locked => drop(locked.unwrap()),
    }
    let image = build(&path, &settings, &|_| {}).unwrap();
    let layout = Layout::open(&image.layout).unwrap();
    let report = inspect::inspect(&layout).unwrap();
    let [userland, files] = report.layers.as_slice() else { panic!("{report:?}") };
    for file in ["/usr/lib/x86_64-linux-gnu/libc.so.6", "/etc/passwd", "/var/lib/dpkg/status.d/libc6"] {
        assert!(userland.files.contains_key(file), "{file} in {:?}", userland.files.keys());
    }
    assert_eq!(files.files.keys().collect::<Vec<_>>(), ["/usr/bin/program"]);
    assert!(userland.remarks.is_empty() && files.remarks.is_empty(), "{report:?}");

    let rootfs = unpack::unpack(&layout, &settings.cache).unwrap();
    assert_eq!(std::fs::read_link(rootfs.join("lib64")).unwrap(), Path::new("usr/lib64"));
    let control = std::fs::read_to_string(rootfs.join("var/lib/dpkg/status.d/libc6")).unwrap();
    assert!(control.starts_with("Package: libc6\n"), "{control}");
    if rustix::process::getuid().is_root() {
        let status = Command::new("chroot").arg(&rootfs).arg("/usr/bin/program").status().unwrap();
        assert!(status.success(), "the loader finds the C library of the image: {status}");
    }

    // What is added to the folder, even hidden, makes another image; nothing new makes the same.
    let again = build(&path, &settings, &|_| {}).unwrap();
    assert!(again.reused && again.digest == image.digest);
    std::fs::write(folder.path().join("files/.hidden"), "new").unwrap();
    assert_ne!(build(&path, &settings, &|_| {}).unwrap().digest, image.digest);
}
