//! The program, its home folder, and small jobs for it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// The project's folder.
pub(crate) fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The home folder that all tests share, so that fetched inputs and compiled images are there once.
pub(crate) fn home() -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("home")
}

/// The program with `arguments`, in the shared home folder.
pub(crate) fn trainyard(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_trainyard"));
    command.args(arguments).current_dir(root()).env("TRAINYARD_HOME", home()).env("NO_COLOR", "1");
    command
}

/// What a finished command said.
pub(crate) struct Said {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

pub(crate) fn said(output: &Output) -> Said {
    Said {
        code: output.status.code(),
        out: String::from_utf8_lossy(&output.stdout).into_owned(),
        err: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

pub(crate) fn run(command: &mut Command) -> Said {
    said(&command.output().unwrap())
}

/// Runs the program and expects it to do what was asked.
pub(crate) fn done(arguments: &[&str]) -> Said {
    let said = run(&mut trainyard(arguments));
    assert_eq!(said.code, Some(0), "{arguments:?}: {}", said.err);
    said
}

/// A job that takes a few seconds of two cores, made from the quickstart's: `steps` steps of a smaller model.
pub(crate) fn job(folder: &Path, name: &str, steps: u32) -> PathBuf {
    let quickstart = fs::read_to_string(root().join("manifests/jobs/gpt-small.toml")).unwrap();
    let manifests = root().join("manifests");
    let mut text = quickstart.replace("\"../", &format!("\"{}/", manifests.display()));
    for (key, value) in [
        ("name", format!("{name:?}")),
        ("layers", "2".to_owned()),
        ("heads", "2".to_owned()),
        ("channels", "32".to_owned()),
        ("steps", steps.to_string()),
        ("warmup-steps", "5".to_owned()),
        ("eval-every", steps.to_string()),
        ("eval-sequences", "16".to_owned()),
        ("checkpoint-every", "20".to_owned()),
    ] {
        let lines = text.lines().map(|line| {
            if line.starts_with(&format!("{key} = ")) { format!("{key} = {value}") } else { line.to_owned() }
        });
        text = lines.collect::<Vec<_>>().join("\n") + "\n";
    }
    let path = folder.join("job.toml");
    fs::write(&path, text).unwrap();
    path
}

/// Everything that happened to a job, in order.
pub(crate) fn records(run_dir: &Path) -> Vec<Value> {
    let text = fs::read_to_string(run_dir.join("events.jsonl")).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// What the trainer of rank 0 reported of a kind, such as "validation".
pub(crate) fn reported(run_dir: &Path, kind: &str) -> Vec<Value> {
    let said = |record: &Value| record["said"]["said"].clone();
    records(run_dir).iter().map(said).filter(|said| said["event"] == kind).collect()
}

/// Ids of processes whose command line names `text`.
pub(crate) fn processes(text: &str) -> Vec<u32> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        // A process that has ended and is not yet reaped has no command line.
        if id != std::process::id() && String::from_utf8_lossy(&line).contains(text) {
            found.push(id);
        }
    }
    found
}

/// Waits until `holds` for at most a minute.
pub(crate) fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !holds() {
        assert!(start.elapsed().as_secs() < 60, "waited a minute until {what}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

/// Whether a program that a test talks to is here. CI must have it; elsewhere the test is skipped, and says so.
pub(crate) fn has(program: &str) -> bool {
    // Not every program has this option, but any that is there starts.
    let found = Command::new(program).arg("--version").output().is_ok();
    assert!(found || std::env::var_os("CI").is_none(), "{program} is missing, and CI must have it");
    if !found {
        eprintln!("SKIPPED: {program} is not installed");
    }
    found
}
