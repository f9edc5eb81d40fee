//! How long a person waits: an unchanged build, and a launch until its first step, with a warm cache.
//!
//! The trainer's own benchmarks are in `trainer/benches` and `trainer/examples`; docs/benchmarks.md has all tables.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::Value;

const RUNS: usize = 5;

pub(crate) fn run(root: &Path) -> anyhow::Result<()> {
    build_program(root)?;
    let program = root.join("target/release/trainyard");
    let folder = root.join("target/bench");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    let home = folder.join("home");
    let image = root.join("manifests/images/gpt-cpu.toml");
    let trainyard = |arguments: &[&str]| {
        let output =
            Command::new(&program).args(arguments).current_dir(root).env("TRAINYARD_HOME", &home).output()?;
        if !output.status.success() {
            bail!("{arguments:?} ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr));
        }
        Ok(String::from_utf8(output.stdout)?)
    };
    let image = image.to_str().context("the project's path is not text")?;
    let cold = Instant::now();
    trainyard(&["build", image])?;
    let cold = cold.elapsed();
    let report: Value = serde_json::from_str(&trainyard(&["inspect", image, "--format", "json"])?)?;
    println!("image, compressed: {:.2} MB", report["size"].as_f64().context("no size")? / 1e6);
    println!("first build, with compilation: {:.1} s", cold.as_secs_f64());
    let warm = median(|_| {
        let start = Instant::now();
        trainyard(&["build", image])?;
        Ok(start.elapsed())
    })?;
    println!("unchanged build, median of {RUNS}: {:.3} s", warm.as_secs_f64());
    for engine in ["process", "podman"] {
        let first = |run: usize| {
            let run_dir = folder.join(format!("{engine}-{run}"));
            let job = short_job(root, &folder)?;
            let (job, dir) = (job.display().to_string(), run_dir.display().to_string());
            let start = jiff::Timestamp::now();
            trainyard(&["launch", &job, "--engine", engine, "--nodes", "4", "--run-dir", &dir])?;
            first_step(&run_dir, start)
        };
        // The first launch prepares data and, for Podman, loads the image.
        match first(RUNS) {
            Ok(_) => {
                let time = median(first)?;
                println!("{engine}: command to first step, median of {RUNS}: {:.2} s", time.as_secs_f64());
            }
            Err(error) => println!("{engine}: not measured here: {error:#}"),
        }
    }
    Ok(())
}

fn build_program(root: &Path) -> anyhow::Result<()> {
    let status = Command::new("cargo").args(["build", "--release", "--locked"]).current_dir(root).status()?;
    if !status.success() {
        bail!("cargo build --release ended with {status}");
    }
    Ok(())
}

fn median(mut measure: impl FnMut(usize) -> anyhow::Result<Duration>) -> anyhow::Result<Duration> {
    let mut times = (0..RUNS).map(&mut measure).collect::<anyhow::Result<Vec<_>>>()?;
    times.sort();
    Ok(times[RUNS / 2])
}

/// The quickstart, with fewer steps.
fn short_job(root: &Path, folder: &Path) -> anyhow::Result<PathBuf> {
    let text = fs::read_to_string(root.join("manifests/jobs/gpt-small.toml"))?;
    let text = text
        .replace("\"../", &format!("\"{}/", root.join("manifests").display()))
        .lines()
        .map(|line| match line.split(" = ").next() {
            Some("steps") => "steps = 60",
            _ => line,
        })
        .collect::<Vec<_>>()
        .join("\n");
    let path = folder.join("job.toml");
    fs::write(&path, text)?;
    Ok(path)
}

/// Time from `start` until the controller learned of the first step.
fn first_step(run_dir: &Path, start: jiff::Timestamp) -> anyhow::Result<Duration> {
    let events = fs::read_to_string(run_dir.join("events.jsonl"))?;
    let record =
        events.lines().find(|line| line.contains("\"event\":\"step\"")).context("no step was recorded")?;
    let record: Value = serde_json::from_str(record)?;
    let time: jiff::Timestamp = record["time"].as_str().context("a record has no time")?.parse()?;
    Ok(time.duration_since(start).try_into()?)
}
