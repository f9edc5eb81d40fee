//! The agent with real ranks: shells.
#![expect(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use trainyard_spec::FormatVersion;
use trainyard_spec::event::TrainerEvent;
use trainyard_spec::plan::{LEASE_FILE, NodePlan, RankPlan};
use trainyard_spec::protocol::{NodeEvent, RankStatus, StopReason, Stream};

fn plan(folder: &Path, ranks: u32, script: &str) -> NodePlan {
    let rank = |rank: u32| RankPlan {
        rank,
        local_rank: rank,
        env: BTreeMap::from([
            ("RANK".to_owned(), rank.to_string()),
            ("TRAINYARD_EVENTS".to_owned(), folder.join(format!("events-{rank}")).display().to_string()),
        ]),
    };
    NodePlan {
        version: FormatVersion,
        node: 0,
        hostname: "node-0".parse().unwrap(),
        command: ["/bin/sh", "-c", script].map(str::to_owned).to_vec(),
        env: BTreeMap::from([("SHARED".to_owned(), "shared".to_owned())]),
        ranks: (0..ranks).map(rank).collect(),
        run_dir: folder.display().to_string(),
        lease_ms: 60_000,
        grace_ms: 1000,
    }
}

fn start(folder: &Path, plan: &NodePlan) -> Child {
    let path = folder.join("plan.json");
    std::fs::write(&path, serde_json::to_vec(plan).unwrap()).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_trainyard-node"));
    command.env("TRAINYARD_NODE_PLAN", path).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap()
}

/// Reads to the end, calling `look` for each event.
fn watch(mut agent: Child, mut look: impl FnMut(&NodeEvent, u32)) -> (Vec<NodeEvent>, ExitStatus) {
    let pid = agent.id();
    let lines = BufReader::new(agent.stdout.take().unwrap()).lines();
    let events = lines.map(|line| {
        let event = serde_json::from_str(&line.unwrap()).unwrap();
        look(&event, pid);
        event
    });
    let events: Vec<_> = events.collect();
    (events, agent.wait().unwrap())
}

fn run(ranks: u32, script: &str) -> (Vec<NodeEvent>, Option<i32>) {
    let folder = tempfile::tempdir().unwrap();
    let agent = start(folder.path(), &plan(folder.path(), ranks, script));
    let (events, status) = watch(agent, |_, _| {});
    (events, status.code())
}

fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), signal).unwrap();
}

fn exited(rank: u32, status: RankStatus) -> NodeEvent {
    NodeEvent::RankExited { rank, status }
}

fn is_line(event: &NodeEvent, text: &str) -> bool {
    matches!(event, NodeEvent::Output { line, .. } if line == text)
}

#[test]
fn says_all_that_ranks_write_and_report_before_their_end() {
    let script = "echo \"$RANK $SHARED [$TRAINYARD_NODE_PLAN]\"; printf 'half' >&2; \
        echo '{\"event\":\"finished\",\"step\":4}' >$TRAINYARD_EVENTS; echo nonsense >$TRAINYARD_EVENTS";
    let (events, code) = run(1, script);
    assert_eq!(code, Some(0));
    let (first, last) = (&events[0], &events[events.len() - 2..]);
    assert_eq!(*first, NodeEvent::Ready);
    assert_eq!(last, [exited(0, RankStatus::Code(0)), NodeEvent::Done]);
    let output = |stream, line: &str| NodeEvent::Output { rank: 0, stream, line: line.to_owned() };
    for expected in [
        output(Stream::Stdout, "0 shared []"),
        output(Stream::Stderr, "half"),
        output(Stream::Stderr, "not an event: nonsense"),
        NodeEvent::Trainer { rank: 0, said: TrainerEvent::Finished { step: 4 } },
    ] {
        assert!(events.contains(&expected), "{expected:?} in {events:?}");
    }
}

#[test]
fn says_that_it_is_at_work() {
    let folder = tempfile::tempdir().unwrap();
    let plan = NodePlan { lease_ms: 2000, ..plan(folder.path(), 1, "sleep 1.5") };
    let (events, _) = watch(start(folder.path(), &plan), |_, _| {});
    let words = events.iter().filter(|event| **event == NodeEvent::Alive).count();
    assert!((1..=3).contains(&words), "every 0.4 s of 1.5: {events:?}");
}

#[test]
fn exit_codes() {
    for (script, code) in [("exit 0", 0), ("exit 5", 1), ("kill -9 $$", 1)] {
        assert_eq!(run(2, script).1, Some(code), "{script}");
    }
    let folder = tempfile::tempdir().unwrap();
    let mut broken = plan(folder.path(), 2, "");
    broken.command = vec!["/nowhere/program".to_owned()];
    let (events, status) = watch(start(folder.path(), &broken), |_, _| {});
    assert_eq!(status.code(), Some(2));
    let Some(NodeEvent::Broken { message }) = events.last() else { panic!("{events:?}") };
    assert!(message.starts_with("rank 0: cannot start /nowhere/program: "), "{message}");
    for (content, mode, found) in [
        ("exit 0", 0o755, "Exec format error"),
        ("", 0o755, "Exec format error"),
        ("#!/bin/sh", 0o644, "Permission denied"),
    ] {
        let program = folder.path().join("program");
        std::fs::write(&program, content).unwrap();
        std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        broken.command = vec![program.display().to_string()];
        let (events, _) = watch(start(folder.path(), &broken), |_, _| {});
        let Some(NodeEvent::Broken { message }) = events.last() else { panic!("{events:?}") };
        assert!(message.contains(found), "{message}");
    }
    for (name, content, expected) in
        [("none.json", None, "cannot read"), ("bad.json", Some("{}"), "not a node plan")]
    {
        let path = folder.path().join(name);
        content.into_iter().for_each(|content| std::fs::write(&path, content).unwrap());
        let mut command = Command::new(env!("CARGO_BIN_EXE_trainyard-node"));
        let output = command.env("TRAINYARD_NODE_PLAN", &path).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains(expected) && text.contains(name), "{text}");
    }
}

#[test]
fn one_failed_rank_stops_the_others_after_it_was_named() {
    let (events, code) = run(3, "[ $RANK = 1 ] && exit 4; while true; do sleep 0.05; done");
    assert_eq!(code, Some(1));
    let ends: Vec<_> = events
        .iter()
        .filter(|event| matches!(event, NodeEvent::RankExited { .. } | NodeEvent::Stopping { .. }))
        .collect();
    assert_eq!(*ends[0], exited(1, RankStatus::Code(4)));
    assert_eq!(*ends[1], NodeEvent::Stopping { reason: StopReason::RankFailed });
    assert_eq!(ends.len(), 4);
}

#[test]
fn passes_on_the_wish_to_stop_and_kills_who_does_not() {
    for (script, status, at_least) in [
        ("trap 'exit 0' TERM; echo up; while true; do sleep 0.05; done", RankStatus::Code(0), 0),
        ("trap '' TERM; echo up; while true; do sleep 0.05; done", RankStatus::Signal(9), 1000),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let agent = start(folder.path(), &plan(folder.path(), 1, script));
        let mut asked = None;
        let (events, exit) = watch(agent, |event, pid| {
            if is_line(event, "up") {
                signal(pid, Signal::TERM);
                asked = Some(Instant::now());
            }
        });
        assert_eq!(exit.code(), Some(143));
        assert!(events.contains(&exited(0, status)), "{events:?}");
        let took = asked.unwrap().elapsed().as_millis();
        assert!(took >= at_least && took < at_least + 1000, "{took} ms");
    }
}

#[test]
fn a_second_wish_to_stop_kills_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let mut stubborn = plan(folder.path(), 1, "trap '' TERM; echo up; while true; do sleep 0.05; done");
    stubborn.grace_ms = 60_000;
    let started = Instant::now();
    let (events, _) = watch(start(folder.path(), &stubborn), |event, pid| match event {
        NodeEvent::Output { .. } => signal(pid, Signal::TERM),
        NodeEvent::Stopping { .. } => signal(pid, Signal::INT),
        _ => {}
    });
    assert!(events.contains(&exited(0, RankStatus::Signal(9))), "{events:?}");
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_lease_that_is_not_renewed_ends_the_node() {
    let folder = tempfile::tempdir().unwrap();
    let mut leased = plan(folder.path(), 1, "echo up; while true; do sleep 0.05; done");
    leased.lease_ms = 400;
    let agent = start(folder.path(), &leased);
    let lease = folder.path().join(LEASE_FILE);
    let started = Instant::now();
    let renewals = std::thread::spawn(move || {
        for count in 0..10 {
            std::fs::write(&lease, count.to_string()).unwrap();
            std::thread::sleep(Duration::from_millis(100));
        }
    });
    let (events, status) = watch(agent, |_, _| {});
    renewals.join().unwrap();
    assert_eq!(status.code(), Some(3));
    assert!(events.contains(&NodeEvent::Stopping { reason: StopReason::LeaseExpired }), "{events:?}");
    assert!(started.elapsed() > Duration::from_millis(1200), "{:?}", started.elapsed());
}

#[test]
fn nobody_reading_does_not_hold_up_supervision() {
    // More than pipe and queue hold, from a rank that then waits to be told to stop.
    let folder = tempfile::tempdir().unwrap();
    let script = "head -c 60000000 /dev/zero | tr '\\0' 'x' | fold -w 1000; touch written; while true; do sleep 0.05; done";
    let written = folder.path().join("written");
    let script = script.replace("touch written", &format!("touch {}", written.display()));
    let mut agent = start(folder.path(), &plan(folder.path(), 1, &script));
    let started = Instant::now();
    while !written.exists() {
        assert!(started.elapsed() < Duration::from_secs(30), "the rank is held up");
        std::thread::sleep(Duration::from_millis(10));
    }
    signal(agent.id(), Signal::TERM);
    let mut text = String::new();
    agent.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(agent.wait().unwrap().code(), Some(143));
    let events: Vec<NodeEvent> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let kept = events.iter().filter(|event| matches!(event, NodeEvent::Output { .. })).count() as u64;
    let lost: u64 =
        events.iter().map(|event| if let NodeEvent::OutputLost { lines } = event { *lines } else { 0 }).sum();
    assert_eq!(kept + lost, 60_000, "every line is kept or counted");
    assert!(lost > 0 && kept > 30_000, "kept {kept}, lost {lost}");
    assert_eq!(events.last(), Some(&NodeEvent::Done));
}

#[test]
fn a_reader_that_is_gone_is_ignored() {
    let folder = tempfile::tempdir().unwrap();
    let marker = folder.path().join("marker");
    let script = format!("echo a; sleep 0.3; echo b; sleep 0.1; echo c >{}", marker.display());
    let mut agent = start(folder.path(), &plan(folder.path(), 1, &script));
    drop(agent.stdout.take());
    assert_eq!(agent.wait().unwrap().code(), Some(0));
    assert!(marker.exists());
}

#[test]
fn nothing_outlives_the_agent() {
    let folder = tempfile::tempdir().unwrap();
    // In sessions of their own, so that no group signal reaches them; one is a grandchild by the time it is looked for.
    let script = "setsid sleep 1000 >/dev/null 2>&1 & (setsid sh -c 'sleep 1000 & sleep 1000' >/dev/null 2>&1 &) ; sleep 0.2; exit 0";
    let mut node = plan(folder.path(), 1, script);
    let marker = folder.path().display().to_string();
    node.env.insert("MARKER".to_owned(), marker.clone());
    let (_, status) = watch(start(folder.path(), &node), |_, _| {});
    assert_eq!(status.code(), Some(0));
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let environment = std::fs::read(entry.path().join("environ")).unwrap_or_default();
        let left = String::from_utf8_lossy(&environment).contains(&format!("MARKER={marker}"));
        assert!(!left, "{:?} is left", entry.path());
    }
}
