//! Plans are values: the same in, the same out.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use trainyard_launcher::machine::Machine;
use trainyard_launcher::plan::{Image, Launch, attempt, describe, plan};
use trainyard_spec::Digest;
use trainyard_spec::plan::{EnginePlan, NodeUser, Rendezvous};

use crate::lab::manifest;

fn machine() -> Machine {
    Machine {
        cores: 8,
        memory_available: 8 << 30,
        processes_free: 30_000,
        open_files: 20_000,
        uid: 1000,
        gid: 1000,
    }
}

fn launch(engine: EnginePlan) -> Launch {
    let mut job = manifest();
    job.ranks_per_node = 2;
    Launch {
        id: "test-1".parse().unwrap(),
        job,
        image: Image {
            digest: Digest::of(b"image"),
            layout: "/cache/layout".into(),
            rootfs: "/cache/rootfs".into(),
        },
        data_dir: "/cache/data".into(),
        nodes: 2,
        max_restarts: 3,
        run_dir: "/jobs/test-1".into(),
        engine,
    }
}

#[test]
fn a_plan_of_processes() {
    let plan = plan(&launch(EnginePlan::Process), &machine()).unwrap();
    insta::assert_snapshot!(describe(&plan));
    insta::assert_json_snapshot!(plan);
}

#[test]
fn a_plan_of_containers() {
    let user = NodeUser::Host { uid: 65532, gid: 65532 };
    let engine = EnginePlan::Podman { socket: None, runtime: Some("runc".to_owned()), user };
    let plan = plan(&launch(engine), &machine()).unwrap();
    insta::assert_snapshot!(describe(&plan));
}

#[test]
fn attempts_differ_in_what_must_be_fresh_alone() {
    let plan = plan(&launch(EnginePlan::Process), &machine()).unwrap();
    assert_eq!(attempt(&plan, 0, &plan.rendezvous), plan.nodes);
    let second = attempt(&plan, 1, &Rendezvous { address: "127.0.0.9".to_owned(), port: 1234 });
    let changed: Vec<_> = plan.nodes[0]
        .env
        .iter()
        .filter(|(name, value)| second[0].env[*name] != **value)
        .map(|(name, _)| name)
        .collect();
    assert_eq!(changed, ["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"]);
    assert_eq!(second[1].run_dir, "/jobs/test-1/attempt-1/node-1");
    assert_eq!(second[1].ranks.len(), plan.nodes[1].ranks.len());
}

#[test]
fn what_cannot_be_planned() {
    type Change = fn(&mut Launch);
    let cases: [(Change, &str); 4] = [
        (|launch| launch.nodes = 0, "needed is at least 1"),
        (|launch| launch.nodes = u32::MAX, "ask for fewer nodes, --nodes 14000"),
        (|launch| launch.run_dir = PathBuf::from("jobs"), "not absolute"),
        (|launch| launch.data_dir = PathBuf::from(OsStr::from_bytes(b"/d\xff")), "not valid UTF-8"),
    ];
    for (change, expected) in cases {
        let mut launch = launch(EnginePlan::Process);
        change(&mut launch);
        let error = plan(&launch, &machine()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
