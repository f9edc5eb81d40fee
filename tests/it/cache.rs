//! The cache as a person sees it: what is removed, told and made again.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::yard::{Said, run, trainyard};

const MANIFEST: &str = r#"
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

/// A manifest of an image that needs no server and no compiler.
fn small(folder: &Path) -> PathBuf {
    let program = folder.join("own/bin/program");
    fs::create_dir_all(program.parent().unwrap()).unwrap();
    fs::write(&program, "").unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let manifest = folder.join("image.toml");
    fs::write(&manifest, MANIFEST).unwrap();
    manifest
}

fn own(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = trainyard(arguments);
    command.env("TRAINYARD_HOME", folder.join("home"));
    command
}

fn done(folder: &Path, arguments: &[&str]) -> Said {
    let said = run(&mut own(folder, arguments));
    assert_eq!(said.code, Some(0), "{arguments:?}: {}", said.err);
    said
}

#[test]
fn what_is_removed_is_told_and_made_again() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let manifest = small(folder);
    let manifest = manifest.to_str().unwrap();
    done(folder, &["lock", manifest]);
    let digest = done(folder, &["build", manifest]).out;
    let images = folder.join("home/cache/images");
    let kept: Value = serde_json::from_str(&done(folder, &["gc", "--format", "json"]).out).unwrap();
    let removed = |told: &Value| -> u64 {
        told["kinds"].as_array().unwrap().iter().map(|kind| kind["removed"].as_u64().unwrap()).sum()
    };
    assert_eq!(
        (removed(&kept), kept["freed"].as_u64(), kept["dry-run"].as_bool()),
        (0, Some(0), Some(false))
    );

    let told = done(folder, &["gc", "--keep-days", "0", "--dry-run"]).out;
    assert!(told.contains("images") && told.contains("would be free"), "{told}");
    assert_ne!(fs::read_dir(&images).unwrap().count(), 0);
    let told = done(folder, &["gc", "--keep-days", "0"]).out;
    assert!(told.contains("are free"), "{told}");
    assert_eq!(fs::read_dir(&images).unwrap().count(), 0);
    assert_eq!(done(folder, &["build", manifest]).out, digest);
}

/// Killed at any moment, it leaves a cache from which builds come out the same.
#[test]
fn a_killed_gc_leaves_a_sound_cache() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let manifest = small(folder);
    let manifest = manifest.to_str().unwrap();
    done(folder, &["lock", manifest]);
    let digest = done(folder, &["build", manifest]).out;
    let cache = folder.join("home/cache");
    let (mut cut_short, mut delay) = (0, Duration::ZERO);
    while cut_short < 8 {
        // Enough to be at it for a while.
        for number in 0..300 {
            let target = cache.join(format!("rootfs/{number}/usr/lib"));
            fs::create_dir_all(&target).unwrap();
            fs::write(target.join("x"), "x").unwrap();
        }
        let mut gc = own(folder, &["gc", "--keep-days", "0"]);
        let mut gc = gc.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(delay);
        gc.kill().unwrap();
        if gc.wait().unwrap().success() {
            // It was done before it was killed: the next one is killed earlier.
            delay = delay.mul_f64(0.7);
            continue;
        }
        delay += Duration::from_millis(3);
        cut_short += 1;
        for number in 0..300 {
            let left = cache.join(format!("rootfs/{number}"));
            assert!(!left.exists() || left.join("usr/lib/x").is_file(), "half of {number} was removed");
        }
        assert_eq!(done(folder, &["build", manifest]).out, digest);
        done(folder, &["verify", manifest]);
    }
    done(folder, &["gc", "--keep-days", "0"]);
    assert_eq!(fs::read_dir(cache.join("rootfs")).unwrap().count(), 0);
    let left: Vec<_> =
        fs::read_dir(cache.join("tmp")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, [".gate"], "what was left behind is gone, too");
}
