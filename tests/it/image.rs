//! The CPU image: the same bytes wherever it is built, and loadable by everybody's tools.

use std::fs;
use std::path::Path;
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::yard::{done, has, home, processes, root, run, trainyard, wait_until};

const MANIFEST: &str = "manifests/images/gpt-cpu.toml";

fn build() -> Value {
    serde_json::from_str(&done(&["build", MANIFEST, "--format", "json"]).out).unwrap()
}

#[test]
fn an_unchanged_image_is_reused_and_inspected() {
    let digest = build()["digest"].clone();
    let again = build();
    assert_eq!((&again["digest"], &again["reused"]), (&digest, &Value::Bool(true)));
    assert_eq!(again["not-reproducible"], Value::Null);

    let report: Value = serde_json::from_str(&done(&["inspect", MANIFEST, "--format", "json"]).out).unwrap();
    assert_eq!(report["digest"], digest);
    assert_eq!(report["user"], "65532:65532");
    assert!(report["size"].as_u64().unwrap() < 10_000_000, "{}", report["size"]);
    let files = report["layers"][0]["files"].as_object().unwrap();
    assert_eq!(files.keys().collect::<Vec<_>>(), ["/usr/bin/trainyard-node", "/usr/bin/trainyard-trainer"]);
    assert!(files.values().all(|file| file["mode"] == 0o755));
}

/// Copies the files that git knows, as a checkout elsewhere would have them.
fn checkout(to: &Path) {
    let listed = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .unwrap();
    for name in String::from_utf8(listed.stdout).unwrap().split('\0').filter(|name| !name.is_empty()) {
        let target = to.join(name);
        if root().join(name).is_file() {
            fs::create_dir_all(target.parent().unwrap()).unwrap();
            fs::copy(root().join(name), target).unwrap();
        }
    }
}

#[test]
fn another_checkout_user_s_setting_and_time_give_the_same_digest() {
    let digest = build()["digest"].clone();
    let folder = tempfile::tempdir().unwrap();
    let elsewhere = folder.path().join("another place/trainyard");
    checkout(&elsewhere);
    // Another cargo home, with the same crates in it: their paths differ.
    let cargo_home = folder.path().join("cargo");
    fs::create_dir(&cargo_home).unwrap();
    let own =
        std::env::var("CARGO_HOME").unwrap_or_else(|_| format!("{}/.cargo", std::env::var("HOME").unwrap()));
    std::os::unix::fs::symlink(Path::new(&own).join("registry"), cargo_home.join("registry")).unwrap();
    // What was fetched is not fetched again; everything else is made anew.
    let other_home = folder.path().join("home");
    fs::create_dir_all(other_home.join("cache")).unwrap();
    std::os::unix::fs::symlink(home().join("cache/blobs"), other_home.join("cache/blobs")).unwrap();

    let script = "umask 077; exec \"$@\"";
    let output = Command::new("sh")
        .args(["-c", script, "sh", env!("CARGO_BIN_EXE_trainyard"), "build", MANIFEST, "--format", "json"])
        .current_dir(&elsewhere)
        .env("TRAINYARD_HOME", &other_home)
        .env("CARGO_HOME", &cargo_home)
        .env("RUSTFLAGS", "-C target-cpu=native")
        .env("CARGO_PROFILE_IMAGE_OPT_LEVEL", "1")
        .env("TZ", "Asia/Tokyo")
        .env("LC_ALL", "C.UTF-8")
        .env("USER", "somebody")
        .env("SOURCE_DATE_EPOCH", "1234567890")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let other: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(other["reused"], Value::Bool(false));
    assert_eq!(other["digest"], digest, "two checkouts gave two images");
}

#[test]
fn verify_proves_an_image_and_finds_a_changed_one() {
    build();
    let proven = done(&["verify", MANIFEST]);
    let folder = tempfile::tempdir().unwrap();
    let layout = folder.path().join("layout");
    done(&["build", MANIFEST, "--output", layout.to_str().unwrap()]);
    let index = fs::read_to_string(layout.join("index.json")).unwrap();
    assert!(index.contains(proven.out.trim()), "{index} does not name {}", proven.out);

    let largest = fs::read_dir(layout.join("blobs/sha256"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .max_by_key(|path| path.metadata().unwrap().len())
        .unwrap();
    let mut bytes = fs::read(&largest).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::remove_file(&largest).unwrap();
    fs::write(&largest, bytes).unwrap();
    let answer = run(&mut trainyard(&["verify", MANIFEST, "--image", layout.to_str().unwrap()]));
    assert_eq!(answer.code, Some(4), "{}", answer.err);
    assert!(answer.err.contains("damaged"), "{}", answer.err);
}

#[test]
fn other_tools_read_the_layout() {
    let digest = build()["digest"].as_str().unwrap().to_owned();
    let folder = tempfile::tempdir().unwrap();
    let layout = folder.path().join("layout");
    done(&["build", MANIFEST, "--output", layout.to_str().unwrap()]);
    let layout = layout.to_str().unwrap();
    if has("skopeo") {
        let source = format!("oci:{layout}:gpt-cpu");
        let inspected = Command::new("skopeo").args(["inspect", &source]).output().unwrap();
        let inspected: Value = serde_json::from_slice(&inspected.stdout).unwrap();
        assert_eq!(
            (&inspected["Digest"], &inspected["Architecture"]),
            (&digest.as_str().into(), &"amd64".into())
        );
        // What Docker loads is an archive of its own kind.
        let archive = format!("docker-archive:{}", folder.path().join("docker.tar").display());
        let copied = Command::new("skopeo").args(["copy", &source, &archive]).output().unwrap();
        assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
    }
    if has("umoci") {
        let bundle = folder.path().join("bundle");
        let unpacked = Command::new("umoci")
            .args(["raw", "unpack", "--rootless", "--image", &format!("{layout}:gpt-cpu")])
            .arg(&bundle)
            .output()
            .unwrap();
        assert!(unpacked.status.success(), "{}", String::from_utf8_lossy(&unpacked.stderr));
        let agent = Command::new(bundle.join("usr/bin/trainyard-node")).arg("--version").output().unwrap();
        assert!(agent.status.success());
    }
    if has("podman") {
        // Podman names the image after the path, and names are lower case.
        let pulled = Command::new("podman")
            .args(["pull", "--quiet", "oci:layout"])
            .current_dir(folder.path())
            .output()
            .unwrap();
        assert!(pulled.status.success(), "{}", String::from_utf8_lossy(&pulled.stderr));
        let id = String::from_utf8_lossy(&pulled.stdout).trim().to_owned();
        let found = Command::new("podman")
            .args(["image", "inspect", "--format", "{{.Digest}}", &id])
            .output()
            .unwrap();
        assert_eq!(String::from_utf8_lossy(&found.stdout).trim(), digest);
        let built = Command::new("podman")
            .args(["build", "--quiet", "--file"])
            .arg(root().join("containerfiles/gpt-cpu.Containerfile"))
            .arg(rootfs(folder.path()))
            .output()
            .unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    }
}

fn rootfs(folder: &Path) -> std::path::PathBuf {
    let rootfs = folder.join("rootfs");
    done(&["build", MANIFEST, "--rootfs", rootfs.to_str().unwrap()]);
    rootfs
}

#[test]
fn ctrl_c_during_a_build_ends_all_that_it_started() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("cache")).unwrap();
    build();
    std::os::unix::fs::symlink(home().join("cache/blobs"), folder.path().join("cache/blobs")).unwrap();
    let child = trainyard(&["build", MANIFEST])
        .env("TRAINYARD_HOME", folder.path())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let here = folder.path().to_str().unwrap().to_owned();
    // A compiler names its output folder.
    wait_until("compilers run", || processes(&here).len() > 1);
    // This process alone is told, as `kill` does, and not its group, as a terminal does.
    kill_process(Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap(), Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    assert_eq!(processes(&here), Vec::<u32>::new(), "something was left running");
    assert!(!folder.path().join("cache/images").exists(), "an image was left");
}
