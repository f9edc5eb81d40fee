//! Jobs from one command to a falling loss, and what can happen to them on the way.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::yard::{done, has, home, job, processes, reported, root, run, said, trainyard, wait_until};

fn kill(id: u32, signal: Signal) {
    kill_process(Pid::from_raw(i32::try_from(id).unwrap()).unwrap(), signal).unwrap();
}

/// Starts a launch in a run directory of its own.
fn start(folder: &Path, steps: u32, options: &[&str]) -> (Child, PathBuf) {
    let path = job(folder, "tiny", steps);
    let run_dir = folder.join("run");
    let child = trainyard(&["launch", path.to_str().unwrap(), "--run-dir", run_dir.to_str().unwrap()])
        .args(options)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    (child, run_dir)
}

fn steps_done(run_dir: &Path) -> u64 {
    reported(run_dir, "step").last().map_or(0, |step| step["step"].as_u64().unwrap())
}

/// The trainer's processes of a run directory.
fn ranks(run_dir: &Path) -> Vec<u32> {
    processes(&format!("{}/job/trainer.json", run_dir.display()))
}

#[test]
fn the_quickstart_beats_a_unigram_model() {
    let run_dir = tempfile::tempdir().unwrap();
    let run_dir = run_dir.path().join("run");
    let answer =
        done(&["launch", "--nodes", "4", "--engine", "process", "--run-dir", run_dir.to_str().unwrap()]);
    let unigram = reported(&run_dir, "started")[0]["unigram-loss"].as_f64().unwrap();
    let loss = reported(&run_dir, "validation").last().unwrap()["loss"].as_f64().unwrap();
    assert!(loss < 0.7 * unigram, "validation loss {loss}, unigram {unigram}");
    for part in
        ["validation loss", "a unigram model has", "the trained model writes", "checkpoints", "HAMLET"]
    {
        assert!(answer.out.contains(part), "{part} is missing from {}", answer.out);
    }
    assert!(answer.err.contains("step") && answer.err.contains("tokens/s"), "{}", answer.err);
    assert!(ranks(&run_dir).is_empty());
}

#[test]
fn four_containers_end_with_the_same_bits_as_four_processes() {
    if !has("podman") {
        return;
    }
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let mut losses = Vec::new();
    for (folder, engine) in folders.iter().zip(["process", "podman"]) {
        let (child, run_dir) = start(folder.path(), 40, &["--engine", engine, "--nodes", "4"]);
        let answer = said(&child.wait_with_output().unwrap());
        if engine == "podman" && answer.code == Some(5) && std::env::var_os("CI").is_none() {
            eprintln!("SKIPPED, no container can be run here: {}", answer.err);
            return;
        }
        assert_eq!(answer.code, Some(0), "{engine}: {}", answer.err);
        let steps = reported(&run_dir, "step");
        losses.push(steps.iter().map(|step| step["loss"].to_string()).collect::<Vec<_>>());
        let parameters = fs::read_dir(run_dir.join("checkpoints")).unwrap().count();
        assert!(parameters > 0, "{engine}: no checkpoint");
    }
    assert_eq!(losses[0].len(), 40);
    assert_eq!(losses[0], losses[1]);
    let left = Command::new("podman")
        .args(["ps", "--all", "--quiet", "--filter", "label=trainyard.run"])
        .output()
        .unwrap();
    assert!(left.stdout.is_empty(), "containers were left: {}", String::from_utf8_lossy(&left.stdout));
}

#[test]
fn a_killed_rank_restarts_the_job_from_its_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let (child, run_dir) = start(folder.path(), 400, &["--engine", "process", "--nodes", "2"]);
    wait_until("there is a checkpoint", || !reported(&run_dir, "checkpoint").is_empty());
    kill(ranks(&run_dir)[0], Signal::KILL);
    let answer = said(&child.wait_with_output().unwrap());
    assert_eq!(answer.code, Some(0), "{}", answer.err);
    assert!(answer.err.contains("signal 9"), "{}", answer.err);
    let starts = reported(&run_dir, "started");
    assert_eq!(starts.len(), 2, "{starts:?}");
    assert!(starts[1]["first-step"].as_u64().unwrap() >= 20, "{starts:?}");
    assert_eq!(steps_done(&run_dir), 400);
}

#[test]
fn the_rank_that_was_told_to_end_is_the_one_named() {
    let folder = tempfile::tempdir().unwrap();
    let options = ["--engine", "process", "--nodes", "2", "--max-restarts", "0"];
    let (child, run_dir) = start(folder.path(), 100_000, &options);
    wait_until("it trains", || steps_done(&run_dir) > 5);
    let second = |id: &&u32| {
        let variables = fs::read(format!("/proc/{id}/environ")).unwrap();
        variables.split(|&byte| byte == 0).any(|variable| variable == b"RANK=1")
    };
    kill(*ranks(&run_dir).iter().find(second).unwrap(), Signal::TERM);
    let answer = said(&child.wait_with_output().unwrap());
    assert_eq!(answer.code, Some(7), "{}", answer.err);
    assert!(answer.err.contains("rank 1: was stopped by signal 15"), "{}", answer.err);
}

#[test]
fn restarts_that_are_spent_are_exit_7_and_name_the_first_failure() {
    let folder = tempfile::tempdir().unwrap();
    let options = ["--engine", "process", "--nodes", "2", "--max-restarts", "0"];
    let (child, run_dir) = start(folder.path(), 100_000, &options);
    wait_until("it trains", || steps_done(&run_dir) > 5);
    kill(ranks(&run_dir)[0], Signal::KILL);
    let answer = said(&child.wait_with_output().unwrap());
    assert_eq!(answer.code, Some(7), "{}", answer.err);
    assert!(answer.err.contains("rank") && answer.err.contains("signal 9"), "{}", answer.err);
    assert!(ranks(&run_dir).is_empty());
}

#[test]
fn ctrl_c_leaves_nothing_running_and_the_job_can_go_on() {
    let folder = tempfile::tempdir().unwrap();
    // In the shared home folder, so that --resume finds it.
    let path = job(folder.path(), "interrupted", 300);
    let child = trainyard(&["launch", path.to_str().unwrap(), "--engine", "process", "--nodes", "2"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let jobs = home().join("jobs");
    let running = || -> Option<PathBuf> {
        let folders = fs::read_dir(&jobs).ok()?.flatten().map(|entry| entry.path());
        folders
            .filter(|path| {
                path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("interrupted-"))
            })
            .max_by_key(|path| path.metadata().and_then(|found| found.modified()).ok())
    };
    wait_until("it trains", || running().is_some_and(|run_dir| (6..300).contains(&steps_done(&run_dir))));
    let run_dir = running().unwrap();
    kill(child.id(), Signal::INT);
    let answer = said(&child.wait_with_output().unwrap());
    assert_eq!(answer.code, Some(130), "{}", answer.err);
    assert!(ranks(&run_dir).is_empty(), "ranks were left");
    let id = run_dir.file_name().unwrap().to_str().unwrap();
    assert!(answer.err.contains(&format!("--resume {id}")), "{}", answer.err);

    done(&["launch", "--resume", id]);
    assert_eq!(steps_done(&run_dir), 300);
    assert!(reported(&run_dir, "started")[1]["first-step"].as_u64().unwrap() > 0);
}

#[test]
fn a_detached_job_is_seen_followed_and_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let path = job(folder.path(), "detached", 100_000);
    let launched =
        done(&["launch", path.to_str().unwrap(), "--engine", "process", "--nodes", "2", "--detach"]);
    let id = launched.out.trim().to_owned();
    let status =
        || -> Value { serde_json::from_str(&done(&["status", &id, "--format", "json"]).out).unwrap() };
    wait_until("it trains", || status()["step"].as_u64().unwrap() > 5);
    assert_eq!(status()["phase"], "running");
    assert!(done(&["status"]).out.contains(&id));

    let mut follower = trainyard(&["logs", "-f", "--rank", "0", &id]).stdout(Stdio::piped()).spawn().unwrap();
    wait_until("rank 0 wrote something", || !done(&["logs", "--rank", "0", &id]).out.is_empty());
    assert_eq!(run(&mut trainyard(&["logs", "--rank", "7", &id])).code, Some(2));
    done(&["stop", &id]);
    // The follower ends with the job.
    assert!(follower.wait().unwrap().success());
    assert_eq!((&status()["phase"], &status()["exit"]), (&"ended".into(), &"interrupted".into()));
    assert!(ranks(&home().join("jobs").join(&id)).is_empty());
    assert!(done(&["stop", &id]).err.contains("had ended before"));
}

#[test]
fn a_second_launch_in_a_run_directory_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (mut child, run_dir) = start(folder.path(), 100_000, &["--engine", "process", "--nodes", "1"]);
    wait_until("it trains", || steps_done(&run_dir) > 2);
    let (second, _) = start(folder.path(), 100, &["--engine", "process", "--nodes", "1"]);
    let answer = said(&second.wait_with_output().unwrap());
    assert_eq!(answer.code, Some(5), "{}", answer.err);
    assert!(answer.err.contains("is running this job"), "{}", answer.err);
    kill(child.id(), Signal::TERM);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let (third, _) = start(folder.path(), 100, &["--engine", "process", "--nodes", "1"]);
    let answer = said(&third.wait_with_output().unwrap());
    assert_eq!(answer.code, Some(2), "{}", answer.err);
}

#[test]
fn what_this_machine_cannot_bear_is_refused_before_anything_starts() {
    let folder = tempfile::tempdir().unwrap();
    let path = job(folder.path(), "huge", 40);
    let run_dir = folder.path().join("run");
    for (nodes, said) in
        [("10000", "fix: ask for fewer nodes"), ("100000", "ask for fewer nodes, --nodes 28000")]
    {
        let answer =
            run(trainyard(&["launch", path.to_str().unwrap(), "--engine", "process", "--nodes", nodes])
                .args(["--run-dir", run_dir.to_str().unwrap()]));
        assert_eq!(answer.code, Some(5), "{}", answer.err);
        assert!(answer.err.contains(said), "{}", answer.err);
        assert!(!run_dir.exists(), "a refused launch left its run directory");
    }
}

/// A file system of its own, for as long as it is kept.
struct Mounted<'a>(&'a Path);

impl<'a> Mounted<'a> {
    fn new(at: &'a Path, options: &str) -> Self {
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(at).status().unwrap();
        assert!(mounted.success());
        Self(at)
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0).status();
    }
}

#[test]
fn a_disk_that_is_full_or_read_only_is_refused_before_anything_starts() {
    if !rustix::process::getuid().is_root() {
        eprintln!("SKIPPED: only root can mount a small file system");
        return;
    }
    for (options, said) in [("size=1m", "free"), ("ro", "read-only")] {
        let folder = tempfile::tempdir().unwrap();
        let path = job(folder.path(), "disk", 40);
        let disk = folder.path().join("disk");
        fs::create_dir(&disk).unwrap();
        let _mounted = Mounted::new(&disk, options);
        let run_dir = disk.join("run");
        let answer =
            run(trainyard(&["launch", path.to_str().unwrap(), "--engine", "process", "--nodes", "1"])
                .args(["--run-dir", run_dir.to_str().unwrap()]));
        assert_eq!(answer.code, Some(5), "{options}: {}", answer.err);
        assert!(
            answer.err.to_lowercase().contains(said) && answer.err.contains("fix:"),
            "{options}: {}",
            answer.err
        );
    }
}

#[test]
fn a_dry_run_prints_the_plan_and_starts_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = job(folder.path(), "planned", 40);
    let run_dir = folder.path().join("run");
    let arguments = ["launch", path.to_str().unwrap(), "--nodes", "3", "--engine", "process", "--dry-run"];
    let options = ["--format", "json", "--run-dir", run_dir.to_str().unwrap()];
    let plan: Value = serde_json::from_str(&run(trainyard(&arguments).args(options)).out).unwrap();
    assert_eq!((&plan["world-size"], &plan["version"]), (&3.into(), &1.into()));
    let ranks: Vec<_> = plan["nodes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|node| node["ranks"][0]["env"]["RANK"].clone())
        .collect();
    assert_eq!(ranks, ["0", "1", "2"]);
    assert!(!run_dir.exists());
    assert!(done(&arguments).out.contains("rendezvous"));
}

#[test]
fn a_text_too_short_for_the_context_is_exit_4_before_there_is_a_job() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("short.txt");
    fs::write(&text, "It was a dark and stormy night. ".repeat(4)).unwrap();
    let (child, run_dir) = start(folder.path(), 30, &["--data", text.to_str().unwrap()]);
    let answer = said(&child.wait_with_output().unwrap());
    assert_eq!(answer.code, Some(4), "{}", answer.err);
    assert!(answer.err.contains("tokens; needed are at least"), "{}", answer.err);
    assert!(!run_dir.exists());
}

#[test]
fn a_job_in_a_run_directory_of_its_own_is_found_by_its_id_and_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let (child, run_dir) =
        start(folder.path(), 100_000, &["--engine", "process", "--nodes", "1", "--detach"]);
    let launched = said(&child.wait_with_output().unwrap());
    assert_eq!(launched.code, Some(0), "{}", launched.err);
    let id = launched.out.trim();
    wait_until("it trains", || steps_done(&run_dir) > 25);
    assert!(done(&["status"]).out.contains(id));
    assert!(done(&["status", run_dir.to_str().unwrap()]).out.contains("running"));
    done(&["stop", id]);
    assert!(ranks(&run_dir).is_empty());
    done(&["launch", "--resume", run_dir.to_str().unwrap(), "--detach"]);
    wait_until("it goes on", || reported(&run_dir, "started").len() == 2);
    done(&["stop", run_dir.to_str().unwrap()]);
    assert!(ranks(&run_dir).is_empty());

    fs::write(run_dir.join("plan.json"), "").unwrap();
    let answer = run(&mut trainyard(&["launch", "--resume", id]));
    assert_eq!(answer.code, Some(3), "{}", answer.err);
    assert!(answer.err.contains("plan.json: not a launch plan"), "{}", answer.err);
}

#[test]
fn own_text_is_trained_on() {
    let folder = tempfile::tempdir().unwrap();
    let text = root().join("README.md");
    let options = ["--engine", "process", "--nodes", "2", "--data", text.to_str().unwrap()];
    let (child, run_dir) = start(folder.path(), 30, &options);
    let answer = said(&child.wait_with_output().unwrap());
    assert_eq!(answer.code, Some(0), "{}", answer.err);
    assert_eq!(steps_done(&run_dir), 30);
}
