//! Whole images, of a small workspace that is compiled for real, and what real tools make of them.

use std::cell::RefCell;
use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Instant;

use tempfile::TempDir;
use trainyard_builder::image::{self, Image, build};
use trainyard_builder::input::cargo;
use trainyard_builder::oci::{self, Layout};
use trainyard_builder::progress::Event;
use trainyard_builder::settings::{LinkFrom, Settings};
use trainyard_builder::{inspect, lock, unpack, verify};
use trainyard_spec::lock::{Lock, LockedDeb, LockedInput};
use trainyard_spec::{Digest, FormatVersion, toml};

const MANIFEST: &str = r#"
version = 1
name = "fixture"
platform = "linux/amd64"
max-size = "2 MB"
[input.libc]
kind = "deb"
packages = ["libc6-dev", "libgcc-12-dev"]
dependencies = false
[input.programs]
kind = "cargo"
workspace = "../.."
packages = ["fixture"]
link = ["libc"]
into = "/usr/bin"
[config]
entrypoint = ["/usr/bin/fixture"]
user = "65532:65532"
env = { B = "2", A = "1" }
labels = { note = "two\nlines" }
"#;

/// Uses a crate of a registry, a build script, threads, floating point, and what tempts a compiler to write down paths.
const MAIN: &str = r#"
fn main() {
    let text = std::thread::spawn(|| itoa::Buffer::new().format(41 + 1).to_owned()).join().unwrap();
    let root = f64::from(text.len() as u32).sqrt();
    println!("{text} {root:.3} {} {}", file!(), env!("FROM_BUILD_SCRIPT"));
    if std::env::args().count() > 5 {
        panic!("too many");
    }
}
"#;

/// Writes the workspace, with the manifest and its lock two folders down, as in this project.
pub(crate) fn workspace(folder: &Path) -> PathBuf {
    let write = |name: &str, text: &str| {
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    let project = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let read = |name: &str| std::fs::read_to_string(project.join(name)).unwrap();
    // The same crate as this workspace has, so that it is in cargo's cache.
    let crates = read("Cargo.lock");
    let itoa = crates.split("[[package]]").find(|one| one.contains("name = \"itoa\"")).unwrap();
    let profile = read("Cargo.toml");
    let profile = profile.split("\n\n").find(|part| part.contains("[profile.image]")).unwrap();
    write(
        "Cargo.toml",
        &format!(
            "[package]\nname = \"fixture\"\nversion = \"0.1.0\"\nedition = \"2024\"\n[dependencies]\nitoa = \"1\"\n\n{profile}\n"
        ),
    );
    write(
        "Cargo.lock",
        &format!(
            "version = 4\n\n[[package]]\nname = \"fixture\"\nversion = \"0.1.0\"\ndependencies = [\n \"itoa\",\n]\n\n[[package]]{itoa}"
        ),
    );
    write("rust-toolchain.toml", &read("rust-toolchain.toml"));
    write("src/main.rs", MAIN);
    write("build.rs", "fn main() { println!(\"cargo::rustc-env=FROM_BUILD_SCRIPT=built\"); }\n");
    write("manifests/images/fixture.toml", MANIFEST);
    let manifest = folder.join("manifests/images/fixture.toml");
    // The C library is the project's own locked one; only the digest of the inputs differs.
    let real: Lock = toml::read("gpt-cpu.lock", &read("manifests/images/gpt-cpu.lock")).unwrap();
    write_lock(&manifest, real);
    manifest
}

fn write_lock(manifest: &Path, lock: Lock) {
    let text = std::fs::read_to_string(manifest).unwrap();
    let described: trainyard_spec::image::ImageManifest = toml::read("fixture.toml", &text).unwrap();
    let json = serde_json_canonicalizer::to_vec(&described.input).unwrap();
    let lock = Lock { version: FormatVersion, manifest: Digest::of(&json), ..lock };
    std::fs::write(lock::path(manifest), toml::write(&lock)).unwrap();
}

fn change_lock(manifest: &Path, change: impl FnOnce(&mut Lock)) {
    let mut lock: Lock = toml::read("lock", &std::fs::read_to_string(lock::path(manifest)).unwrap()).unwrap();
    change(&mut lock);
    write_lock(manifest, lock);
}

/// This machine's own settings. Its packages are used where they can be had, and else its own C library, which is
/// enough to compare two builds on one machine.
fn settings(cache: PathBuf) -> Settings {
    Settings { link: LinkFrom::HostAllowed, ..Settings::from_environment(cache).unwrap() }
}

fn quiet(_: Event) {}

pub(crate) struct Fixture {
    _folder: TempDir,
    pub(crate) manifest: PathBuf,
    pub(crate) settings: Settings,
    pub(crate) image: Image,
    compiled: usize,
}

/// One image for all tests that only look at it.
pub(crate) fn fixture() -> &'static Fixture {
    static FIXTURE: OnceLock<Fixture> = OnceLock::new();
    FIXTURE.get_or_init(|| {
        let folder = TempDir::new().unwrap();
        let manifest = workspace(&folder.path().join("checkout"));
        let settings = settings(folder.path().join("cache"));
        let events = RefCell::new(Vec::new());
        let image = build(&manifest, &settings, &|event| events.borrow_mut().push(event)).unwrap();
        let compiled = events.borrow().iter().filter(|event| matches!(event, Event::Compiled { .. })).count();
        Fixture { _folder: folder, manifest, settings, image, compiled }
    })
}

#[test]
fn another_checkout_user_and_environment_give_the_same_digest() {
    let first = fixture();
    let folder = TempDir::new().unwrap();
    let manifest = workspace(&folder.path().join("another check out é"));
    let mut other = settings(folder.path().join("cache"));

    // Another CARGO_HOME, with the same crates in it.
    let home = |name: &str| other.tools.get(&OsString::from(name)).map(PathBuf::from);
    let cargo_home = home("CARGO_HOME").unwrap_or_else(|| home("HOME").unwrap().join(".cargo"));
    let new_home = folder.path().join("crates");
    std::fs::create_dir(&new_home).unwrap();
    std::os::unix::fs::symlink(cargo_home.join("registry"), new_home.join("registry")).unwrap();
    for name in ["config.toml", "bin"] {
        if cargo_home.join(name).exists() {
            std::os::unix::fs::symlink(cargo_home.join(name), new_home.join(name)).unwrap();
        }
    }
    if !new_home.join("config.toml").exists() {
        let config = "[build]\nrustc-wrapper = \"/bin/false\"\n[target.x86_64-unknown-linux-gnu]\nlinker = \"cc\"\nrustflags = [\"--cfg\", \"other\"]\n";
        std::fs::write(new_home.join("config.toml"), config).unwrap();
    }
    // Another umask, given to cargo by a wrapper: this process's own would be every test's.
    let tools = folder.path().join("tools");
    std::fs::create_dir(&tools).unwrap();
    let path = other.tools[&OsString::from("PATH")].clone();
    let real = std::env::split_paths(&path)
        .map(|folder| folder.join("cargo"))
        .find(|cargo| cargo.is_file())
        .unwrap();
    let wrapper = tools.join("cargo");
    std::fs::write(&wrapper, format!("#!/bin/sh\numask 077\nexec '{}' \"$@\"\n", real.display())).unwrap();
    std::fs::set_permissions(&wrapper, PermissionsExt::from_mode(0o755)).unwrap();
    let path = std::env::join_paths(std::iter::once(tools).chain(std::env::split_paths(&path))).unwrap();
    let changes: [(&str, OsString); 8] = [
        ("PATH", path),
        ("CARGO_HOME", new_home.into()),
        ("CARGO_BUILD_JOBS", "1".into()),
        ("CARGO_INCREMENTAL", "0".into()),
        ("RUSTFLAGS", "-Ctarget-cpu=native --cfg other".into()),
        ("TZ", "Asia/Kolkata".into()),
        ("LC_ALL", "tr_TR.UTF-8".into()),
        ("SOURCE_DATE_EPOCH", "1234567890".into()),
    ];
    other.tools.extend(changes.map(|(name, value)| (name.into(), value)));

    let second = build(&manifest, &other, &quiet).unwrap();
    assert_eq!(second.layers, first.image.layers, "the programs differ");
    assert_eq!(second.digest, first.image.digest);
}

#[test]
fn an_image_says_what_it_holds() {
    let fixture = fixture();
    let report = inspect::inspect(&Layout::open(&fixture.image.layout).unwrap()).unwrap();
    assert_eq!((report.digest, report.size), (fixture.image.digest, fixture.image.size()));
    assert_eq!((report.platform.as_str(), report.user.as_str()), ("linux/amd64", "65532:65532"));
    assert_eq!(report.env, ["A=1", "B=2"]);
    assert_eq!(report.labels["note"], "two\nlines");
    assert_eq!(report.layers[0].files.keys().collect::<Vec<_>>(), ["/usr/bin/fixture"]);
    assert_eq!(fixture.compiled, 2, "itoa and the program; a build script is a part of its crate");

    let rootfs =
        unpack::unpack(&Layout::open(&fixture.image.layout).unwrap(), &fixture.settings.cache).unwrap();
    let program = rootfs.join("usr/bin/fixture");
    let output = Command::new(&program).env_clear().output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "42 1.414 src/main.rs built\n");
    let bytes = std::fs::read(&program).unwrap();
    for path in [&fixture.settings.cache, &fixture.manifest] {
        let folder = path.parent().unwrap().display().to_string();
        assert!(!contains(&bytes, folder.as_bytes()), "the program holds {folder}");
    }
    assert!(contains(&bytes, b"/crates/") || contains(&bytes, b"/rustc/"), "paths are rewritten");
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

#[test]
fn an_unchanged_image_is_reused_and_a_changed_one_is_not() {
    let folder = TempDir::new().unwrap();
    let manifest = workspace(&folder.path().join("checkout"));
    let settings = settings(folder.path().join("cache"));
    let first = build(&manifest, &settings, &quiet).unwrap();
    assert!(!first.reused);

    let events = RefCell::new(Vec::new());
    let start = Instant::now();
    let second = build(&manifest, &settings, &|event| events.borrow_mut().push(event)).unwrap();
    let took = start.elapsed();
    assert_eq!(second, Image { reused: true, ..first.clone() });
    assert!(
        !events.borrow().iter().any(|event| matches!(event, Event::Compiling { .. })),
        "cargo need not be asked"
    );
    assert!(took.as_secs_f64() < 0.3, "{took:?}");

    // What is damaged or gone is made again.
    let layer = first.layout.join("blobs/sha256").join(first.layers[0].digest.hex());
    std::fs::remove_file(&layer).unwrap();
    assert_eq!(build(&manifest, &settings, &quiet).unwrap().digest, first.digest);
    assert!(layer.is_file());

    let main = folder.path().join("checkout/src/main.rs");
    let source = std::fs::read_to_string(&main).unwrap();
    std::fs::write(&main, source.replace("41 + 1", "41 + 2")).unwrap();
    let changed = build(&manifest, &settings, &quiet).unwrap();
    assert_ne!(changed.digest, first.digest);
    assert!(!changed.reused);
    assert_eq!(image::last_built(&manifest, &settings.cache), Some(changed.layout));

    // The first image is not what the sources make now, and the verdict says which file it is.
    let verdict = verify::verify(&manifest, &first.layout, &settings, &quiet).unwrap();
    assert_eq!((verdict.image, verdict.rebuilt), (first.digest, changed.digest));
    assert!(
        verdict.differences.iter().any(|line| line.contains("/usr/bin/fixture")),
        "{:?}",
        verdict.differences
    );

    std::fs::write(&main, source).unwrap();
    let verdict = verify::verify(&manifest, &first.layout, &settings, &quiet).unwrap();
    assert_eq!(verdict.differences, Vec::<String>::new());
    assert_eq!(verdict.rebuilt, first.digest);
}

#[test]
fn what_cannot_be_built_as_locked_is_refused() {
    let fixture = fixture();
    // In the fixture's cache everything is compiled already; only the manifest and lock are others.
    let folder = TempDir::new().unwrap();
    let manifest = workspace(&folder.path().join("checkout"));
    let settings =
        Settings { cache: fixture.settings.cache.clone(), ..settings(folder.path().join("cache")) };

    change_lock(&manifest, |lock| {
        for input in lock.input.values_mut() {
            if let LockedInput::Cargo { commit, .. } = input {
                *commit = "0".repeat(40);
            }
        }
    });
    let error = build(&manifest, &settings, &quiet).unwrap_err();
    assert!(matches!(error, image::Error::Cargo(cargo::Error::Toolchain { .. })), "{error:?}");
    assert!(error.hint().unwrap().starts_with("rustup toolchain install 1."), "{error:?}");

    // Packages that cannot be had, and a host whose C library is another: refused, file by file.
    let manifest = workspace(&folder.path().join("second"));
    change_lock(&manifest, |lock| {
        for input in lock.input.values_mut() {
            if let LockedInput::Deb { package } = input {
                for LockedDeb { file, objects, .. } in package.values_mut() {
                    file.sha256 = Digest::of(file.name.as_bytes());
                    objects.values_mut().for_each(|digest| *digest = Digest::of(b"other"));
                }
            }
        }
    });
    let mut strict = Settings { link: LinkFrom::Locked, ..settings.clone() };
    strict.index.debian.clear();
    let error = build(&manifest, &strict, &quiet).unwrap_err();
    match &error {
        image::Error::HostDiffers { differences } => {
            let locked = Digest::of(b"other").to_string();
            assert!(differences.contains("libc.a") && differences.contains(&locked), "{differences}");
        }
        // A host without a static C library has nothing to compare.
        image::Error::Input(_) => assert!(error.to_string().contains("no Debian archive is configured")),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_host_library_that_is_allowed_marks_the_image() {
    let folder = TempDir::new().unwrap();
    let manifest = workspace(&folder.path().join("checkout"));
    change_lock(&manifest, |lock| {
        for input in lock.input.values_mut() {
            if let LockedInput::Deb { package } = input {
                for LockedDeb { file, objects, .. } in package.values_mut() {
                    file.sha256 = Digest::of(file.name.as_bytes());
                    objects.values_mut().for_each(|digest| *digest = Digest::of(b"other"));
                }
            }
        }
    });
    let mut settings = settings(folder.path().join("cache"));
    settings.index.debian.clear();
    let events = RefCell::new(Vec::new());
    let image = build(&manifest, &settings, &|event| events.borrow_mut().push(event)).unwrap();
    assert!(image.not_reproducible.is_some());
    assert!(events.borrow().iter().any(|event| matches!(event, Event::NotReproducible { .. })));
    let report = inspect::inspect(&Layout::open(&image.layout).unwrap()).unwrap();
    assert!(report.labels[oci::NOT_REPRODUCIBLE].contains("libc.a"), "{:?}", report.labels);

    let text = std::fs::read_to_string(&manifest).unwrap();
    std::fs::write(&manifest, text.replace("2 MB", "10 kB")).unwrap();
    let error = build(&manifest, &settings, &quiet).unwrap_err();
    let said = error.to_string();
    assert!(matches!(error, image::Error::Budget { .. }), "{error:?}");
    assert!(said.contains("10.0 kB") && said.contains("/usr/bin/fixture"), "{said}");
}

#[test]
fn a_program_that_does_not_compile_shows_what_the_compiler_said() {
    let folder = TempDir::new().unwrap();
    let manifest = workspace(&folder.path().join("checkout"));
    std::fs::write(folder.path().join("checkout/src/main.rs"), "fn main() { nonsense }").unwrap();
    let error = build(&manifest, &settings(folder.path().join("cache")), &quiet).unwrap_err();
    assert!(error.to_string().contains("cannot find value `nonsense`"), "{error}");
}

#[test]
fn c_code_is_refused_because_hosts_compile_it_differently() {
    let folder = TempDir::new().unwrap();
    let manifest = workspace(&folder.path().join("checkout"));
    let script = "fn main() { let cc = std::env::var(\"CC\").unwrap(); assert!(std::process::Command::new(cc).status().unwrap().success()); }";
    std::fs::write(folder.path().join("checkout/build.rs"), script).unwrap();
    let error = build(&manifest, &settings(folder.path().join("cache")), &quiet).unwrap_err();
    assert!(error.to_string().contains("must not hold C code"), "{error}");
}

/// Runs a tool of this machine; none where it is missing, which is a failure where everything has to be there.
fn tool(program: &str, arguments: &[&str]) -> Option<String> {
    match Command::new(program).args(arguments).output() {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{program} {arguments:?}: {said}");
            Some(String::from_utf8_lossy(&output.stdout).into_owned())
        }
        Err(error) if std::env::var_os("CI").is_some() => panic!("{program} is needed here: {error}"),
        Err(error) => {
            eprintln!("SKIPPED: {program}: {error}");
            None
        }
    }
}

#[test]
fn skopeo_reads_it_and_converts_it_for_docker() {
    let fixture = fixture();
    let folder = TempDir::new().unwrap();
    let source = format!("oci:{}", fixture.image.layout.display());
    let Some(raw) = tool("skopeo", &["inspect", "--raw", &source]) else { return };
    assert_eq!(Digest::of(raw.as_bytes()), fixture.image.digest);
    let archive = format!("docker-archive:{}:fixture:latest", folder.path().join("image.tar").display());
    tool("skopeo", &["copy", "--quiet", &source, &archive]);
    assert!(folder.path().join("image.tar").is_file());
}

#[test]
fn umoci_unpacks_the_same_files() {
    let fixture = fixture();
    let folder = TempDir::new().unwrap();
    let target = folder.path().join("bundle").display().to_string();
    let image = format!("{}:fixture", fixture.image.layout.display());
    let Some(_) = tool("umoci", &["unpack", "--rootless", "--image", &image, &target]) else { return };
    let ours =
        unpack::unpack(&Layout::open(&fixture.image.layout).unwrap(), &fixture.settings.cache).unwrap();
    let name = "usr/bin/fixture";
    let theirs = std::fs::read(folder.path().join("bundle/rootfs").join(name)).unwrap();
    assert!(std::fs::read(ours.join(name)).unwrap() == theirs);
}

#[test]
fn podman_runs_it() {
    let fixture = fixture();
    // Podman makes a name of the layout's path, which must not have capitals.
    let name = format!("trainyard-builder-{}", std::process::id());
    let folder = tempfile::Builder::new().prefix(&name).rand_bytes(0).tempdir().unwrap();
    std::os::unix::fs::symlink(&fixture.image.layout, folder.path().join("image")).unwrap();
    let root = folder.path().join("root").display().to_string();
    let run = folder.path().join("run").display().to_string();
    let own = ["--root", &root, "--runroot", &run, "--storage-driver", "vfs", "--cgroup-manager", "cgroupfs"];
    let with_own = |arguments: &[&'static str]| -> Vec<&str> {
        own.iter().copied().chain(arguments.iter().copied()).collect()
    };
    let source = format!("oci:{}", folder.path().join("image").display());
    let mut pull = with_own(&["pull", "--quiet"]);
    pull.push(&source);
    let Some(id) = tool("podman", &pull) else { return };
    let id = id.trim();
    let said = with_own(&["image", "inspect", "--format", "{{.Digest}} {{.User}}"]);
    let said = tool("podman", &[said.as_slice(), &[id]].concat()).unwrap();
    assert_eq!(said.trim(), format!("{} 65532:65532", fixture.image.digest));

    // Limits of a build machine are lower than Podman's defaults, and some machines' cgroups want runc.
    let limit = |name, which| {
        let most = rustix::process::getrlimit(which).maximum.unwrap_or(u64::MAX).min(1024);
        format!("--ulimit={name}={most}:{most}")
    };
    let files = limit("nofile", rustix::process::Resource::Nofile);
    let processes = limit("nproc", rustix::process::Resource::Nproc);
    let mut said = Vec::new();
    for runtime in ["crun", "runc"] {
        let start = [
            own.as_slice(),
            &[
                "--runtime",
                runtime,
                "run",
                "--rm",
                "--network=none",
                "--log-driver=none",
                &files,
                &processes,
                id,
            ],
        ]
        .concat();
        match Command::new("podman").args(start).output() {
            Ok(output) if output.status.success() => {
                assert_eq!(String::from_utf8_lossy(&output.stdout), "42 1.414 src/main.rs built\n");
                return;
            }
            Ok(output) => said.push(format!("{runtime}: {}", String::from_utf8_lossy(&output.stderr))),
            Err(error) => said.push(format!("{runtime}: {error}")),
        }
    }
    assert!(std::env::var_os("CI").is_none(), "no container runtime works here: {said:?}");
    eprintln!("SKIPPED: no container runtime works here: {said:?}");
}
