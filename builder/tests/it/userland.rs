//! Images of a distribution's packages and of files: real packages from the archives that this machine is configured for.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;
use trainyard_builder::closure::Why;
use trainyard_builder::image::{self, build};
use trainyard_builder::oci::Layout;
use trainyard_builder::settings::Settings;
use trainyard_builder::{gpus, inspect, lock, unpack};
use trainyard_spec::lock::LockedInput;

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

    let real = ldconfig(&rootfs, &[]);
    assert!(real.contains_key("libc.so.6") && real.contains_key("libm.so.6"), "{real:?}");
    let written = ldconfig(&rootfs, &["-p"]);
    assert_eq!(written, real, "the cache is the one that ldconfig would write");

    // What is added to the folder, even hidden, makes another image; nothing new makes the same.
    let again = build(&path, &settings, &|_| {}).unwrap();
    assert!(again.reused && again.digest == image.digest);
    std::fs::write(folder.path().join("files/.hidden"), "new").unwrap();
    assert_ne!(build(&path, &settings, &|_| {}).unwrap().digest, image.digest);
}

/// What the cache of a root lists, name to the file's own path: as it is, or as ldconfig makes it anew.
fn ldconfig(root: &Path, print: &[&str]) -> BTreeMap<String, PathBuf> {
    let anew = root.join("cache");
    let cache = match print {
        [] => {
            let made =
                Command::new("/sbin/ldconfig").arg("-r").arg(root).args(["-X", "-C", "/cache"]).status();
            assert!(made.unwrap().success());
            &anew
        }
        _ => &root.join("etc/ld.so.cache"),
    };
    let listed = Command::new("/sbin/ldconfig").arg("-p").arg("-C").arg(cache).output().unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    if cache == &anew {
        std::fs::remove_file(&anew).unwrap();
    }
    let line = |line: &str| {
        let (name, path) = line.trim().split_once(" (libc6,x86-64) => /")?;
        Some((name.to_owned(), root.join(path).canonicalize().unwrap()))
    };
    let entries: BTreeMap<_, _> = listed.lines().filter_map(line).collect();
    assert_eq!(
        entries.len() + 1,
        listed.lines().filter(|line| !line.starts_with("Cache gen")).count(),
        "{listed}"
    );
    entries
}

#[test]
fn a_closure_keeps_what_is_needed_and_tells_the_rest() {
    let folder = TempDir::new().unwrap();
    let inputs = r#"
[input.userland]
kind = "deb"
packages = ["libc6", "libgcc-s1", "libstdc++6", "gcc-12-base"]
dependencies = false
[input.own]
kind = "files"
path = "own"
into = "/"
CLOSURE"#;
    // A program that needs a library of a folder of its own, which only the cache tells of, and a script of it.
    let own = folder.path().join("own");
    for (path, text) in [
        ("src/answer.c", "int answer(void) { return 42; }"),
        ("src/program.c", "int answer(void); int main(void) { return answer() - 42; }"),
        ("own/etc/ld.so.conf.d/own.conf", "# ours\n/opt/own/lib\n"),
        ("own/opt/own/script", "#!/opt/own/program -x\n"),
    ] {
        let path = folder.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    std::fs::create_dir_all(own.join("opt/own/lib")).unwrap();
    let compiled = |arguments: &[&str]| {
        let done = Command::new("gcc").current_dir(folder.path()).args(arguments).status();
        done.is_ok_and(|status| status.success())
    };
    if !compiled(&[
        "-shared",
        "-fPIC",
        "-Wl,-soname,libanswer.so.1",
        "-o",
        "own/opt/own/lib/libanswer.so.1.0",
        "src/answer.c",
    ]) {
        assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "CI has gcc");
        eprintln!("SKIPPED, there is no gcc");
        return;
    }
    std::fs::set_permissions(own.join("opt/own/script"), PermissionsExt::from_mode(0o755)).unwrap();
    std::os::unix::fs::symlink("libanswer.so.1.0", own.join("opt/own/lib/libanswer.so.1")).unwrap();
    assert!(compiled(&["-o", "own/opt/own/program", "src/program.c", "own/opt/own/lib/libanswer.so.1"]));

    let settings = Settings::from_environment(folder.path().join("cache")).unwrap();
    let with = |closure: &str| manifest(folder.path(), &inputs.replace("CLOSURE", closure));
    let path = with("[closure]\ndlopen = [\"libgcc_s.so.1\"]\nkeep = [\"/usr/share/doc/libc6/changelog*\"]");
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
    let rootfs = unpack::unpack(&layout, &settings.cache).unwrap();
    let libraries = "usr/lib/x86_64-linux-gnu";
    for (path, kept) in [
        ("libc.so.6", true),
        ("ld-linux-x86-64.so.2", true),
        ("libgcc_s.so.1", true),
        ("libm.so.6", false),
        ("libstdc++.so.6", false),
        ("gconv", false),
    ] {
        assert_eq!(rootfs.join(libraries).join(path).exists(), kept, "{path}");
    }
    for (path, kept) in [
        ("usr/share/doc/libc6/copyright", true),
        ("usr/share/doc/libc6/changelog.Debian.gz", true),
        ("usr/share/doc/libstdc++6", false),
        ("var/lib/dpkg/status.d/libc6", true),
        ("var/lib/dpkg/status.d/libstdc++6", false),
        ("etc/ld.so.cache", true),
        ("lib64", true),
        ("sbin", false),
    ] {
        assert_eq!(rootfs.join(path).symlink_metadata().is_ok(), kept, "{path}");
    }
    let out = |path: &str| image.left_out.iter().find(|one| one.path.ends_with(path)).map(|one| one.why);
    assert_eq!(out("/libm.so.6"), Some(Why::NotLoaded));
    assert_eq!(out("/libstdc++6/copyright"), None, "its licence is in gcc-12-base");
    assert_eq!(out("/gconv-modules"), Some(Why::NotKept));
    assert!(image.left_out.is_sorted_by(|one, other| one.size >= other.size));
    assert!(image.left_out[0].owner.starts_with("package "), "{:?}", image.left_out[0]);
    assert_eq!(ldconfig(&rootfs, &["-p"]), ldconfig(&rootfs, &[]));
    if rustix::process::getuid().is_root() {
        for program in ["/opt/own/program", "/opt/own/script", "/usr/bin/program"] {
            let status = Command::new("chroot").arg(&rootfs).arg(program).status().unwrap();
            assert!(status.success(), "{program} finds its library through the cache: {status}");
        }
    }

    for (closure, said) in [
        (
            "dlopen = [\"libgcc_s.so.2\"]",
            "\"libgcc_s.so.2\", which is in none of the folders that the loader searches; there are libgcc_s.so.1",
        ),
        ("keep = [\"/etc/nothing/**\"]", "closure.keep names \"/etc/nothing/**\", which fits nothing"),
        ("keep = [\"/etc/[\"]", "closure.keep has \"/etc/[\""),
    ] {
        let error = build(&with(&format!("[closure]\n{closure}")), &settings, &|_| {}).unwrap_err();
        assert!(error.to_string().contains(said), "{error}");
    }
    let text = std::fs::read_to_string(&path).unwrap();
    for (program, said) in [
        ("/usr/bin/none", "is not in the image"),
        ("/opt/own/lib", "is not a file"),
        ("/opt/own/script.txt", "is not executable"),
    ] {
        std::fs::write(own.join("opt/own/script.txt"), "").unwrap();
        std::fs::write(&path, text.replace("keep = [\"/etc/[\"]", "").replace("/usr/bin/program", program))
            .unwrap();
        let error = build(&path, &settings, &|_| {}).unwrap_err();
        assert!(error.to_string().contains(said), "{error}");
    }
}

/// What apt itself would install into an empty root; none where this machine has no apt or no lists.
fn closure_of_apt(packages: &[&str]) -> Option<Vec<String>> {
    let output = Command::new("apt-get")
        .args(["install", "-s", "--no-install-recommends", "-o", "Dir::State::status=/dev/null"])
        .args(packages)
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).unwrap();
    let mut names: Vec<_> = text
        .lines()
        .filter_map(|line| line.strip_prefix("Inst ")?.split(' ').next())
        .map(|name| name.split(':').next().unwrap().to_owned())
        .collect();
    names.sort();
    (output.status.success() && !names.is_empty()).then_some(names)
}

#[test]
fn dependencies_are_those_that_apt_finds() {
    let folder = TempDir::new().unwrap();
    let settings = Settings::from_environment(folder.path().join("cache")).unwrap();
    let (libraries, program) = (&["libc6", "libgcc-s1", "libstdc++6"][..], &["openssh-client"][..]);
    let inputs = format!(
        "[input.a]\nkind = \"deb\"\npackages = {libraries:?}\n[input.b]\nkind = \"deb\"\npackages = {program:?}"
    );
    let path = manifest(folder.path(), &inputs);
    let locked = match lock::lock(&path, &settings, &|_| {}) {
        Err(lock::Error::Input { source, .. }) if source.is_out_of_reach() => {
            assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "CI must reach an archive: {source}");
            eprintln!("SKIPPED, no Debian archive has these packages: {source}");
            return;
        }
        locked => locked.unwrap(),
    };
    for (input, packages) in locked.input.values().zip([libraries, program]) {
        let LockedInput::Deb { package } = input else { panic!("{input:?}") };
        let Some(expect) = closure_of_apt(packages) else {
            eprintln!("SKIPPED, apt-get has no package lists here to compare with");
            return;
        };
        assert_eq!(package.keys().collect::<Vec<_>>(), expect.iter().collect::<Vec<_>>(), "{packages:?}");
    }
    build(&path, &settings, &|_| {}).unwrap();
}
