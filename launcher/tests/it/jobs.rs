//! Run directories seen from outside.

use std::path::Path;
use std::time::{Duration, SystemTime};

use trainyard_launcher::jobs::{self, Phase, Stopped};
use trainyard_launcher::logs::Logs;
use trainyard_launcher::run_dir::{self, RunDir, RunDirError};
use trainyard_spec::Exit;
use trainyard_spec::event::JobEvent;
use trainyard_spec::protocol::NodeEvent;

use crate::lab::{Lab, report};

#[test]
fn a_status_is_what_the_records_say() {
    let lab = Lab::process();
    let step = report(
        r#"{"event":"step","step":7,"loss":2.5,"learning-rate":0.1,"grad-norm":1,"tokens-per-second":9}"#,
    );
    let script = format!("{step} echo hello; echo there >&2");
    let ran = lab.run(&lab.plan("told-1", 2, 0, &script), |_, _| {});
    assert_eq!(ran.outcome().exit, Exit::Done);
    let jobs_folder = lab.dir.path();
    let all = jobs::list(jobs_folder).unwrap();
    let [status] = all.as_slice() else { panic!("{all:?}") };
    assert_eq!((status.phase, status.exit, status.attempts), (Phase::Ended, Some(Exit::Done), 1));
    assert_eq!((status.step, status.loss, status.world_size), (7, Some(2.5), 2));
    assert_eq!(jobs::next_id(jobs_folder, &"told".parse().unwrap()).unwrap().as_str(), "told-2");
    let run_dir = jobs::find(jobs_folder, "told-1").unwrap();
    assert!(jobs::find(jobs_folder, "../told-1").is_err() && jobs::find(jobs_folder, "untold-1").is_err());
    assert_eq!(lab.runtime.block_on(jobs::stop(&run_dir)).unwrap(), Stopped::Before);
    let lines = lab.runtime.block_on(async {
        let mut logs = Logs::open(&run_dir, Some(1), true).unwrap();
        let lines = logs.next().await.unwrap().unwrap();
        assert_eq!(logs.next().await.unwrap(), None);
        lines
    });
    assert_eq!(lines.len(), 2);
    assert!(lines.iter().all(|line| line.contains(" node-1 rank-1 ")), "{lines:?}");
}

#[test]
fn a_job_whose_run_directory_lies_elsewhere_is_found_by_id_and_by_path() {
    let lab = Lab::process();
    let jobs_folder = lab.dir.path().join("jobs");
    let name = "far".parse().unwrap();
    assert_eq!(jobs::next_id(&jobs_folder, &name).unwrap().as_str(), "far-1");
    let mut plan = lab.plan("far-1", 1, 0, "echo hello");
    plan.run_dir = lab.dir.path().join("elsewhere/run").display().to_string();
    let dir = jobs::create(&jobs_folder, &plan).unwrap().unwrap();
    let path = dir.path().to_owned();
    drop(dir);
    for job in ["far-1", &plan.run_dir] {
        assert_eq!(jobs::find(&jobs_folder, job).unwrap(), path, "{job}");
    }
    assert_eq!(jobs::list(&jobs_folder).unwrap()[0].run_dir, path);
    // The id is taken, for this job and for good.
    plan.run_dir = jobs_folder.join("far-1").display().to_string();
    assert!(jobs::create(&jobs_folder, &plan).unwrap().is_none());
    std::fs::remove_dir_all(&path).unwrap();
    assert_eq!(jobs::next_id(&jobs_folder, &name).unwrap().as_str(), "far-2");
    assert!(jobs::list(&jobs_folder).unwrap().is_empty());
}

#[test]
fn ids_go_on_after_the_highest_whatever_else_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let long: trainyard_spec::Name = "x".repeat(63).parse().unwrap();
    for (name, entries, next) in [
        ("a", &["a-1", "a-3", "b-9", "a-x"][..], "a-4"),
        ("c", &["c-18446744073709551615", "c-2"], "c-3"),
        ("d", &["d-4294967295"], "d-4294967296"),
        ("d", &["d-4294967296"], "d-4294967297"),
        (long.as_str(), &[&format!("{}-1", "x".repeat(61))], &format!("{}-2", "x".repeat(61))),
    ] {
        for entry in entries {
            std::fs::create_dir(folder.path().join(entry)).unwrap();
        }
        assert_eq!(jobs::next_id(folder.path(), &name.parse().unwrap()).unwrap().as_str(), next);
    }
}

#[test]
fn a_run_directory_is_new_or_empty_and_stays_where_it_is() {
    let lab = Lab::process();
    let at = |name: &str| lab.dir.path().join(name);
    std::fs::write(at("file"), "").unwrap();
    std::fs::create_dir(at("full")).unwrap();
    std::fs::write(at("full/something"), "").unwrap();
    std::os::unix::fs::symlink(at("nothing"), at("dangling")).unwrap();
    let mut plan = lab.plan("place-1", 1, 0, "true");
    for (place, expect) in
        [("file", "is not a folder"), ("full", "is not empty"), ("dangling", "is a link that leads nowhere")]
    {
        plan.run_dir = at(place).display().to_string();
        for error in [run_dir::check_free(&at(place)).unwrap_err(), RunDir::create(&plan).unwrap_err()] {
            assert!(matches!(error, RunDirError::Used { .. }), "{error}");
            assert!(error.to_string().contains(expect), "{error}");
        }
        assert!(jobs::create(&at("jobs"), &plan).is_err());
        assert!(!at("jobs/place-1").exists(), "the id is free again");
    }
    plan.run_dir = at("empty").display().to_string();
    std::fs::create_dir(at("empty")).unwrap();
    drop(RunDir::create(&plan).unwrap());
    std::fs::rename(at("empty"), at("moved")).unwrap();
    assert!(matches!(RunDir::open(&at("moved")), Err(RunDirError::Moved { .. })));
}

#[test]
fn what_a_job_that_may_go_on_needs_is_known() {
    let lab = Lab::process();
    let jobs_folder = lab.dir.path();
    let (past, future) = (SystemTime::UNIX_EPOCH, SystemTime::now() + Duration::from_secs(3600));
    let needed = |moment| jobs::needed(jobs_folder, moment).unwrap();
    let plan = lab.plan("needs-1", 1, 0, "sleep 0.2");
    let image = Path::new(&plan.image.layout);
    let mut while_running = None;
    let ran = lab.run(&plan, |record, _| {
        if matches!(&record.event, JobEvent::Node { said: NodeEvent::Ready, .. }) {
            while_running = Some(needed(future));
        }
    });
    assert_eq!(ran.outcome().exit, Exit::Done);
    let while_running = while_running.unwrap();
    for path in [image, Path::new(&plan.image.rootfs), &jobs_folder.join("data")] {
        assert!(while_running.contains(path), "{path:?} is not in {while_running:?}");
    }
    assert!(needed(past).is_empty(), "it is done");

    // One that failed can be gone on with for a while.
    let failing = lab.plan("fails-1", 1, 0, "exit 1");
    assert_ne!(lab.run(&failing, |_, _| {}).outcome().exit, Exit::Done);
    assert!(needed(past).contains(image) && needed(future).is_empty());

    // One whose controller is gone may still run, however long ago that was.
    drop(RunDir::create(&lab.plan("left-1", 1, 0, "true")).unwrap());
    assert!(needed(future).contains(image));
    // A folder that is no job, and a plan that nobody can read any more, need nothing.
    std::fs::create_dir(jobs_folder.join("other")).unwrap();
    std::fs::write(jobs_folder.join("left-1/plan.json"), "{\"version\": 9}").unwrap();
    assert!(needed(future).is_empty());
}

#[test]
fn one_controller_per_run_directory() {
    let lab = Lab::process();
    let plan = lab.plan("twice-1", 1, 0, "sleep 0.2");
    let mut refusals = Vec::new();
    let ran = lab.run(&plan, |record, _| {
        if matches!(&record.event, JobEvent::Node { said: NodeEvent::Ready, .. }) {
            refusals.push(RunDir::create(&plan).unwrap_err());
        }
    });
    assert_eq!(ran.outcome().exit, Exit::Done);
    let [RunDirError::Held { holder: Some(holder), .. }] = refusals.as_slice() else {
        panic!("{refusals:?}")
    };
    assert_eq!(holder.pid, std::process::id());
    assert!(matches!(RunDir::create(&plan), Err(RunDirError::Used { .. })));
}

#[test]
fn a_run_directory_that_cannot_be_written() {
    let lab = Lab::process();
    let mut plan = lab.plan("nowhere-1", 1, 0, "true");
    plan.run_dir = "/proc/nowhere-1".to_owned();
    let error = RunDir::create(&plan).unwrap_err().to_string();
    assert!(error.starts_with("cannot create /proc/nowhere-1: "), "{error}");
}
