//! What goes wrong in a job of processes, and what is made of it.

use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use trainyard_launcher::supervise::Stop;
use trainyard_spec::Exit;
use trainyard_spec::event::{FailureClass, JobEvent};
use trainyard_spec::plan::EngineKind;
use trainyard_spec::protocol::NodeEvent;

use crate::lab::{Lab, rank_process, report};

/// A rank that runs until it is stopped.
const LONG: &str = "echo up; while true; do sleep 0.1; done";

fn kill(pid: i32) {
    send(pid, Signal::KILL);
}

fn send(pid: i32, signal: Signal) {
    kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}

fn agent_process(lab: &Lab, node_folder: &str) -> i32 {
    let text = std::fs::read(lab.dir.path().join(node_folder).join("agent.json")).unwrap();
    let agent: serde_json::Value = serde_json::from_slice(&text).unwrap();
    i32::try_from(agent["pid"].as_i64().unwrap()).unwrap()
}

fn attempt_failed(event: &JobEvent) -> bool {
    matches!(event, JobEvent::AttemptFailed { .. })
}

fn is_up(event: &JobEvent) -> Option<u32> {
    match event {
        JobEvent::Node { said: NodeEvent::Output { rank, line, .. }, .. } if line == "up" => Some(*rank),
        _ => None,
    }
}

#[test]
fn ranks_get_the_whole_environment_and_their_lines_are_kept() {
    let lab = Lab::process();
    let script = "echo $RANK/$WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT; printf 'a\\377b\\n' >&2; cat";
    let plan = lab.plan("whole-1", 3, 0, script);
    let ran = lab.run(&plan, |_, _| {});
    assert_eq!(ran.outcome().exit, Exit::Done);
    let mut lines = ran.output();
    lines.sort();
    let hello = |rank| format!("{rank}/3 at {}:29500", plan.rendezvous.address);
    assert_eq!(lines, [&hello(0), &hello(1), &hello(2), "a\u{fffd}b", "a\u{fffd}b", "a\u{fffd}b"]);
    let log = std::fs::read_to_string(lab.dir.path().join("whole-1/logs/rank-2.log")).unwrap();
    assert!(log.contains("Z node-2 rank-2 out 2/3 at "), "{log}");
    assert!(log.contains("Z node-2 rank-2 err a\u{fffd}b"), "{log}");
}

#[test]
fn a_killed_rank_is_noticed_in_time_and_named() {
    let lab = Lab::process();
    let plan = lab.plan("killed-1", 3, 0, LONG);
    let mut killed = None;
    let mut up = 0;
    let mut last = None;
    let ran = lab.run(&plan, |record, _| {
        up += u32::from(is_up(&record.event).is_some());
        if up == 3 && killed.is_none() {
            kill(rank_process("killed-1-0", 1).unwrap());
            killed = Some(std::time::Instant::now());
        }
        if attempt_failed(&record.event) {
            last = killed.map(|at| at.elapsed());
        }
    });
    let outcome = ran.outcome();
    assert_eq!(outcome.exit, Exit::Infrastructure);
    let failure = &outcome.failures[0];
    assert_eq!((failure.node, failure.rank, failure.class), (Some(1), Some(1), FailureClass::Unknown));
    assert_eq!(failure.message, "was killed by signal 9");
    // Noticed, settled and all other nodes stopped.
    assert!(last.unwrap() < Duration::from_secs(2), "{last:?}");
}

#[test]
fn the_first_cause_is_named_though_peers_fail_before_it_is_known() {
    let lab = Lab::process();
    let lost = report(r#"{"event":"failed","class":"network","message":"lost rank 1"}"#);
    let script = format!("[ $RANK = 1 ] && {{ sleep 0.2; echo out of ideas >&2; exit 3; }}; {lost} exit 1");
    let ran = lab.run(&lab.plan("cause-1", 3, 5, &script), |_, _| {});
    let outcome = ran.outcome();
    assert_eq!(outcome.failures.len(), 1, "the program's own fault is not retried");
    assert_eq!(outcome.exit, Exit::Program);
    assert_eq!(outcome.failures[0].rank, Some(1));
    assert_eq!(outcome.failures[0].message, "exited with code 3: out of ideas");
}

#[test]
fn a_failed_attempt_is_followed_by_a_fresh_one_on_another_port_if_need_be() {
    let lab = Lab::process();
    let script = format!(
        "echo attempt $TORCHELASTIC_RESTART_COUNT $TORCHELASTIC_RUN_ID $MASTER_PORT; {} [ $TORCHELASTIC_RESTART_COUNT = 2 ] || kill -9 $$",
        report(
            r#"{"event":"checkpoint","step":'$TORCHELASTIC_RESTART_COUNT',"path":"p","bytes":1,"seconds":1}"#
        )
    );
    let plan = lab.plan("fresh-1", 1, 2, &script);
    let taken =
        std::net::TcpListener::bind((plan.rendezvous.address.as_str(), plan.rendezvous.port)).unwrap();
    let ran = lab.run(&plan, |_, _| {});
    drop(taken);
    assert_eq!(ran.outcome().exit, Exit::Done, "{:?}", ran.outcome());
    let lines = ran.output();
    for (number, line) in lines.iter().enumerate() {
        assert!(line.starts_with(&format!("attempt {number} fresh-1-{number} ")), "{lines:?}");
        assert!(!line.ends_with(" 29500"), "{lines:?}");
    }
    assert_eq!(lines.len(), 3);
}

#[test]
fn retries_end() {
    let lab = Lab::process();
    for (id, restarts, exit, attempts) in
        [("spent-1", 1, Exit::Infrastructure, 2), ("stuck-1", 9, Exit::NoProgress, 3)]
    {
        let ran = lab.run(&lab.plan(id, 1, restarts, "kill -9 $$"), |_, _| {});
        assert_eq!((ran.outcome().exit, ran.outcome().failures.len()), (exit, attempts), "{id}");
    }
}

#[test]
fn a_killed_agent_takes_its_ranks_along_and_is_named() {
    let lab = Lab::process();
    // Also something that does not die with the rank's own process.
    let plan = lab.plan("agent-1", 2, 0, &format!("sleep 1000 & {LONG}"));
    let mut up = 0;
    let ran = lab.run(&plan, |record, _| {
        up += u32::from(is_up(&record.event).is_some());
        if up == 2 && is_up(&record.event).is_some() {
            kill(agent_process(&lab, "agent-1/attempt-0/node-1"));
        }
    });
    let failure = &ran.outcome().failures[0];
    assert_eq!((failure.node, failure.rank, failure.class), (Some(1), None, FailureClass::Host));
    assert_eq!(failure.message, "node-1 was killed by signal 9 before its ranks had ended");
}

#[test]
fn an_agent_that_hangs_is_noticed_and_replaced() {
    let lab = Lab::process();
    let script = format!("echo up; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || {{ {LONG}; }}");
    let plan = lab.plan("hung-1", 2, 1, &script);
    let mut up = 0;
    let mut stopped = None;
    let ran = lab.run(&plan, |record, _| {
        up += u32::from(is_up(&record.event).is_some());
        if up == 2 && stopped.is_none() {
            send(agent_process(&lab, "hung-1/attempt-0/node-1"), Signal::STOP);
            stopped = Some(std::time::Instant::now());
        }
    });
    let outcome = ran.outcome();
    assert_eq!(outcome.exit, Exit::Done, "{outcome:?}");
    let failure = &outcome.failures[0];
    assert_eq!((failure.node, failure.rank, failure.class), (Some(1), None, FailureClass::Host));
    assert_eq!(failure.message, "node-1 hangs: its agent has said nothing for 3 s");
    assert!(stopped.unwrap().elapsed() < Duration::from_secs(10), "the lease is 3 s");
    let alive = |event: &JobEvent| matches!(event, JobEvent::Node { said: NodeEvent::Alive, .. });
    assert!(
        !ran.records.iter().any(|(_, record)| alive(&record.event)),
        "records hold what decides something"
    );
}

#[test]
fn a_program_that_ends_well_without_its_last_step_has_failed() {
    let lab = Lab::process();
    let ran = lab.run(&lab.plan("nothing-1", 2, 5, "exit 0"), |_, _| {});
    let outcome = ran.outcome();
    assert_eq!((outcome.exit, outcome.failures.len()), (Exit::Program, 1));
    assert!(outcome.failures[0].message.contains("none said that the last step is done"), "{outcome:?}");
}

#[test]
fn what_ranks_leave_behind_is_removed() {
    let lab = Lab::process();
    let busybox = format!("{}/bin/busybox", crate::lab::image().rootfs.display());
    let script = format!("{busybox} setsid {busybox} sleep 1000 >/dev/null 2>&1 & sleep 0.2; echo done");
    let ran = lab.run(&lab.plan("orphan-1", 1, 0, &script), |_, _| {});
    assert_eq!(ran.outcome().exit, Exit::Done);
}

#[test]
fn ranks_that_do_not_want_to_stop_are_killed() {
    let lab = Lab::process();
    let plan = lab.plan("stubborn-1", 2, 0, &format!("trap '' TERM; {LONG}"));
    let mut asked = None;
    let ran = lab.run(&plan, |record, ask| {
        if is_up(&record.event) == Some(0) {
            asked = Some(std::time::Instant::now());
            ask.send_replace(Stop::Gracefully);
        }
    });
    assert_eq!(ran.outcome().exit, Exit::Interrupted);
    let took = asked.unwrap().elapsed();
    assert!(took > Duration::from_secs(2) && took < Duration::from_secs(5), "{took:?}");
}

#[test]
fn stopping_at_any_moment_leaves_nothing() {
    let lab = Lab::process();
    for milliseconds in [0, 1, 3, 6, 10, 20, 50, 120] {
        let id = format!("moment-{milliseconds}");
        let plan = lab.plan(&id, 4, 0, LONG);
        let mut asked = false;
        let ran = lab.run(&plan, |_, ask| {
            if !std::mem::replace(&mut asked, true) {
                let ask = ask.clone();
                std::thread::spawn(move || {
                    std::thread::sleep(Duration::from_millis(milliseconds));
                    ask.send_replace(if milliseconds % 2 == 0 { Stop::Gracefully } else { Stop::Now });
                });
            }
        });
        assert_eq!(ran.outcome().exit, Exit::Interrupted, "{milliseconds} ms");
    }
}

#[test]
fn an_image_without_an_agent_is_a_failure_of_the_host() {
    let lab = Lab::process();
    let mut plan = lab.plan("empty-1", 2, 0, "true");
    plan.image.rootfs = lab.dir.path().display().to_string();
    let ran = lab.run(&plan, |_, _| {});
    assert_eq!(ran.outcome().exit, Exit::Infrastructure);
    assert!(ran.outcome().failures[0].message.contains("/usr/bin/trainyard-node"), "{:?}", ran.outcome());
    assert!(
        ran.when(|event| matches!(event, JobEvent::Created { engine: EngineKind::Process, .. })).as_secs()
            < 1
    );
}
