//! The CUDA images: the digests that they have everywhere, what they ask of a host, and that their libraries load.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::yard::{done, run, trainyard};

const IMAGES: [&str; 3] = ["gpt-cpu", "gpt-cuda12", "gpt-cuda13"];

fn manifest(name: &str) -> String {
    format!("manifests/images/{name}.toml")
}

fn built(name: &str) -> Value {
    serde_json::from_str(&done(&["build", &manifest(name), "--format", "json"]).out).unwrap()
}

/// `cargo xtask bless` renews what is expected here; a difference on a machine with the same sources is a defect.
#[test]
fn the_locked_images_have_the_same_digests_everywhere() {
    let mut all = BTreeMap::new();
    for name in IMAGES {
        let image = built(name);
        assert_eq!(image["not-reproducible"], Value::Null);
        let layers: Vec<_> = image["layers"]
            .as_array()
            .unwrap()
            .iter()
            .map(|layer| format!("{} {} {}", layer["name"], layer["size"], layer["digest"]).replace('"', ""))
            .collect();
        all.insert(name, json!({"digest": image["digest"], "layers": layers}));
    }
    insta::assert_json_snapshot!(all);
}

/// An `nvidia-smi` that prints what a real one printed.
fn with_gpus(folder: &Path, printed: &str) -> PathBuf {
    let bin = folder.join("bin");
    fs::create_dir_all(&bin).unwrap();
    let program = bin.join("nvidia-smi");
    fs::write(&program, format!("#!/bin/sh\ncat <<'END'\n{printed}\nEND\n")).unwrap();
    fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    bin
}

#[test]
fn an_image_tells_what_it_asks_of_this_machine() {
    let folder = TempDir::new().unwrap();
    for (name, smi, code, said) in [
        (
            "gpt-cuda13",
            "580.95.05, 9.0, NVIDIA H100 80GB HBM3",
            0,
            "runs it: the driver is as new as the image's CUDA",
        ),
        ("gpt-cuda12", "535.104.05, 8.0, NVIDIA A100-SXM4-80GB", 0, "runs it: minor-version compatibility"),
        (
            "gpt-cuda13",
            "535.104.05, 9.0, NVIDIA H100 80GB HBM3",
            5,
            "the host's driver is 535.104.05; for \"NVIDIA H100 80GB HBM3\" the image needs 580.65.06 or later",
        ),
        ("gpt-cuda13", "580.95.05, 7.5, Tesla T4", 5, "\"Tesla T4\" has compute capability 7.5"),
        ("gpt-cpu", "580.95.05, 7.5, Tesla T4", 0, "runs it: it needs no GPU"),
    ] {
        built(name);
        let bin = with_gpus(folder.path(), smi);
        let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
        let answer = run(trainyard(&["inspect", &manifest(name), "--host"]).env("PATH", &path));
        assert_eq!(answer.code, Some(code), "{name} {smi}: {}", answer.err);
        assert!(
            answer.out.contains(said) || answer.err.contains(said),
            "{name} {smi}: {} {}",
            answer.out,
            answer.err
        );
        assert_eq!(answer.err.contains("hint: "), code == 5, "{}", answer.err);
        let answer =
            run(trainyard(&["inspect", &manifest(name), "--host", "--format", "json"]).env("PATH", &path));
        let report: Value = serde_json::from_str(&answer.out).unwrap();
        assert_eq!(report["host"]["runs"], code == 0, "{report}");
        assert_eq!(report["remarks"], json!([]), "labels and files say the same");
        assert_eq!(report["privileged"], json!({}));
    }
    let report: Value =
        serde_json::from_str(&done(&["inspect", &manifest("gpt-cuda13"), "--format", "json"]).out).unwrap();
    insta::assert_json_snapshot!(report["contract"]);
}

/// Loads every library that it is given, and all that these need.
const LOADS: &str = r#"
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char **names) {
    for (int i = 1; i < count; i++)
        if (!dlopen(names[i], RTLD_NOW)) {
            fprintf(stderr, "%s\n", dlerror());
            return 1;
        }
    return 0;
}
"#;

#[test]
fn the_libraries_load_and_hold_the_gpu_code_that_was_asked_for() {
    let folder = TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let root = path("root");
    done(&["build", &manifest("gpt-cuda13"), "--rootfs", &root]);
    let libraries = ["libcudart.so.13", "libcublasLt.so.13", "libnccl.so.2"];
    fs::write(path("loads.c"), LOADS).unwrap();
    let compiled =
        Command::new("gcc").args(["-o", &format!("{root}/loads"), &path("loads.c"), "-ldl"]).status();
    if !compiled.is_ok_and(|status| status.success()) {
        assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "CI has gcc");
        eprintln!("SKIPPED, there is no gcc");
        return;
    }
    let loads = if rustix::process::getuid().is_root() {
        // Nothing but the image, and the loader finds all by the image's own cache.
        Command::new("chroot").args([&root, "/loads"]).args(libraries).output().unwrap()
    } else {
        let folders =
            ["usr/lib/x86_64-linux-gnu", "usr/local/cuda/lib64"].map(|folder| format!("{root}/{folder}"));
        Command::new(format!("{root}/lib64/ld-linux-x86-64.so.2"))
            .args(["--inhibit-cache", "--library-path", &folders.join(":"), &format!("{root}/loads")])
            .args(libraries)
            .output()
            .unwrap()
    };
    assert!(loads.status.success(), "{}", String::from_utf8_lossy(&loads.stderr));

    let cuobjdump = cuobjdump(folder.path());
    let has = |library: &str, gpu: &str| {
        let file = format!("{root}/usr/local/cuda/lib64/{library}");
        let listed = Command::new(&cuobjdump).args(["-all", "-lelf", "-arch", gpu, &file]).output().unwrap();
        String::from_utf8(listed.stdout).unwrap().contains(&format!(".{gpu}."))
    };
    for (gpu, kept) in
        [("sm_75", false), ("sm_80", true), ("sm_90", true), ("sm_100", true), ("sm_120", false)]
    {
        assert_eq!(has("libnccl.so.2", gpu), kept, "NCCL for {gpu}");
        assert!(has("libcublasLt.so.13", gpu), "cuBLASLt, which may not be changed, for {gpu}");
    }
}

/// NVIDIA's cuobjdump, from its wheel.
fn cuobjdump(folder: &Path) -> PathBuf {
    let python = |arguments: &[&str]| {
        let done = Command::new("python3").arg("-m").args(arguments).current_dir(folder).status();
        assert!(done.is_ok_and(|status| status.success()), "python3 -m {arguments:?}");
    };
    python(&[
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        "wheels",
        "nvidia-cuda-cuobjdump==13.2.51",
    ]);
    let wheel = fs::read_dir(folder.join("wheels")).unwrap().next().unwrap().unwrap().path();
    python(&["zipfile", "--extract", wheel.to_str().unwrap(), "tools"]);
    let tool = folder.join("tools/nvidia/cu13/bin/cuobjdump");
    fs::set_permissions(&tool, PermissionsExt::from_mode(0o755)).unwrap();
    tool
}
