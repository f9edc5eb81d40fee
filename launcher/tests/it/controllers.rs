//! Controllers as processes of their own: asked to stop, killed, and followed by others.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use trainyard_launcher::jobs::{self, Phase, Stopped};
use trainyard_launcher::run_dir::RunDir;
use trainyard_launcher::supervise::{Stop, run};
use trainyard_spec::Exit;
use trainyard_spec::plan::LaunchPlan;

use crate::lab::{Lab, processes_with};

const RUN_DIR: &str = "TRAINYARD_TEST_RUN_DIR";

/// Ranks that say good-bye when they are told to stop.
const POLITE: &str = "trap 'echo bye; exit 0' TERM; echo up; while true; do /bin/busybox sleep 0.1; done";

/// Not a test of its own: what the controllers below run, in a process of theirs.
#[test]
#[ignore = "started by other tests"]
fn controller() {
    let run_dir = PathBuf::from(std::env::var_os(RUN_DIR).unwrap());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        let (ask, stop) = watch::channel(Stop::No);
        let mut asked = signal(SignalKind::terminate()).unwrap();
        tokio::spawn(async move {
            for stop in [Stop::Gracefully, Stop::Now] {
                asked.recv().await;
                ask.send_replace(stop);
            }
        });
        let (tell, _told) = mpsc::unbounded_channel();
        run(RunDir::open(&run_dir).unwrap(), stop, tell).await.unwrap();
    });
}

/// Starts a controller and waits until the ranks run.
fn start(plan: &LaunchPlan) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["controllers::controller", "--exact", "--ignored"]).env(RUN_DIR, &plan.run_dir);
    let controller = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    let started = Instant::now();
    let log = PathBuf::from(&plan.run_dir).join("logs/rank-1.log");
    while std::fs::read_to_string(&log).map_or(true, |text| text.matches(" up\n").count() == 0) {
        assert!(started.elapsed() < Duration::from_secs(20), "no rank came up");
        std::thread::sleep(Duration::from_millis(20));
    }
    controller
}

fn create(lab: &Lab, id: &str) -> (LaunchPlan, PathBuf) {
    let plan = lab.plan(id, 2, 0, POLITE);
    // Handed over by being dropped here and opened there.
    drop(RunDir::create(&plan).unwrap());
    (plan, lab.dir.path().join(id))
}

fn stop_with_a_controller(lab: &Lab, id: &str) {
    let (plan, run_dir) = create(lab, id);
    let mut controller = start(&plan);
    let status = jobs::status(&run_dir).unwrap();
    assert_eq!((status.phase, status.controller.unwrap().pid), (Phase::Running, controller.id()));
    let started = Instant::now();
    assert_eq!(lab.runtime.block_on(jobs::stop(&run_dir)).unwrap(), Stopped::ByController);
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    assert!(controller.wait().unwrap().success());
    lab.assert_nothing_left(&plan);
    assert_eq!(jobs::status(&run_dir).unwrap().exit, Some(Exit::Interrupted));
    let log = std::fs::read_to_string(run_dir.join("logs/rank-0.log")).unwrap();
    assert!(log.contains(" out bye\n"), "{log}");
}

fn stop_without_a_controller(lab: &Lab, id: &str) {
    let (plan, run_dir) = create(lab, id);
    let mut controller = start(&plan);
    controller.kill().unwrap();
    controller.wait().unwrap();
    assert_eq!(jobs::status(&run_dir).unwrap().phase, Phase::Abandoned);
    assert_eq!(lab.runtime.block_on(jobs::stop(&run_dir)).unwrap(), Stopped::Remains);
    lab.assert_nothing_left(&plan);
    let status = jobs::status(&run_dir).unwrap();
    assert_eq!((status.phase, status.exit), (Phase::Ended, Some(Exit::Interrupted)));
}

fn a_lease_ends_the_nodes_of_a_killed_controller(lab: &Lab, id: &str) {
    let (plan, run_dir) = create(lab, id);
    let mut controller = start(&plan);
    controller.kill().unwrap();
    controller.wait().unwrap();
    let up = || !processes_with(&format!("TORCHELASTIC_RUN_ID={id}-0")).is_empty();
    assert!(up());
    let started = Instant::now();
    while up() {
        assert!(started.elapsed() < Duration::from_secs(10), "the lease is 3 s");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(started.elapsed() > Duration::from_millis(1500), "it was renewed at most 0.6 s before");
    // Another controller goes on where the lost one was, with a fresh attempt.
    let mut second = start_again(&plan);
    assert_eq!(lab.runtime.block_on(jobs::stop(&run_dir)).unwrap(), Stopped::ByController);
    assert!(second.wait().unwrap().success());
    assert_eq!(jobs::status(&run_dir).unwrap().attempts, 2);
    lab.assert_nothing_left(&plan);
}

fn start_again(plan: &LaunchPlan) -> Child {
    std::fs::remove_file(PathBuf::from(&plan.run_dir).join("logs/rank-1.log")).unwrap();
    start(plan)
}

#[test]
fn processes_stop_with_a_controller() {
    stop_with_a_controller(&Lab::process(), "live-1");
}

#[test]
fn processes_stop_without_a_controller() {
    stop_without_a_controller(&Lab::process(), "lost-1");
}

#[test]
fn processes_end_by_their_lease() {
    a_lease_ends_the_nodes_of_a_killed_controller(&Lab::process(), "lease-1");
}

#[test]
fn containers_stop_with_a_controller() {
    let Some(lab) = Lab::podman() else { return };
    stop_with_a_controller(&lab, "live-2");
}

#[test]
fn containers_stop_without_a_controller() {
    let Some(lab) = Lab::podman() else { return };
    stop_without_a_controller(&lab, "lost-2");
}

#[test]
fn containers_end_by_their_lease() {
    let Some(lab) = Lab::podman() else { return };
    a_lease_ends_the_nodes_of_a_killed_controller(&lab, "lease-2");
}
