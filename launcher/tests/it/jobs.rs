//! Run directories seen from outside.

use trainyard_launcher::jobs::{self, Phase, Stopped};
use trainyard_launcher::logs::Logs;
use trainyard_launcher::run_dir::{RunDir, RunDirError};
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
