//! The same with real containers.

use std::process::Command;
use std::time::{Duration, Instant};

use trainyard_launcher::engine::{EngineChoice, EngineError, EngineSettings, choose};
use trainyard_launcher::supervise::Stop;
use trainyard_spec::Exit;
use trainyard_spec::event::{FailureClass, JobEvent};
use trainyard_spec::plan::{EnginePlan, NodeUser};
use trainyard_spec::protocol::NodeEvent;

use crate::lab::{Lab, image, never, rank_process, report};

const LONG: &str = "echo up; while true; do busybox sleep 0.1; done";

fn is_up(event: &JobEvent) -> bool {
    matches!(event, JobEvent::Node { said: NodeEvent::Output { line, .. }, .. } if line == "up")
}

#[test]
fn four_containers_see_each_other_and_nothing_else() {
    let Some(lab) = Lab::podman() else { return };
    let event = report(r#"{"event":"finished","step":3}"#);
    let script = format!(
        "b=/bin/busybox; {event}
         c=/trainyard/checkpoints
         if [ $RANK = 0 ]; then
           $b nc -ll -p $MASTER_PORT -e /bin/busybox cat &
           until [ -e $c/1 ] && [ -e $c/2 ] && [ -e $c/3 ]; do $b sleep 0.05; done
         else
           until [ \"$reply\" ]; do
             reply=$(echo hello from $($b hostname) | $b nc -w 1 $MASTER_ADDR $MASTER_PORT 2>/dev/null); $b sleep 0.05
           done
           echo $reply
         fi
         echo written >$c/$RANK
         $b grep -E 'NoNewPrivs|CapEff' /proc/self/status
         $b id -u; $b touch /etc/x 2>&1; $b touch /trainyard/data/x 2>&1; $b ip route | $b grep default; $b df /dev/shm | $b tail -1"
    );
    let plan = lab.plan("four-1", 4, 0, &script);
    let ran = lab.run(&plan, |_, _| {});
    assert_eq!(ran.outcome().exit, Exit::Done, "{:#?}", ran.records);
    let lines = ran.output();
    let count = |text: &str| lines.iter().filter(|line| line.contains(text)).count();
    for node in 1..4 {
        assert_eq!(count(&format!("hello from node-{node}")), 1, "{lines:#?}");
    }
    assert_eq!(count("NoNewPrivs:\t1"), 4, "{lines:#?}");
    assert_eq!(count("CapEff:\t0000000000000000"), 4, "{lines:#?}");
    assert_eq!(count("Read-only file system"), 8, "{lines:#?}");
    assert_eq!(count("default via"), 0, "{lines:#?}");
    assert_eq!(count("65536"), 4, "/dev/shm in KiB: {lines:#?}");
    let EnginePlan::Podman { user: NodeUser::Host { uid, .. } | NodeUser::KeepId { uid, .. }, .. } =
        plan.engine
    else {
        panic!("{:?}", plan.engine)
    };
    assert_eq!(lines.iter().filter(|line| **line == uid.to_string()).count(), 4, "{lines:#?}");
    for rank in 0..4 {
        let written = lab.dir.path().join(format!("four-1/checkpoints/{rank}"));
        assert_eq!(std::fs::read_to_string(written).unwrap(), "written\n");
    }
    let finished = |event: &JobEvent| matches!(event, JobEvent::Node { said: NodeEvent::Trainer { .. }, .. });
    eprintln!("first event of a rank after {:?}", ran.when(finished));
}

#[test]
fn a_killed_rank_and_a_killed_container_are_noticed_in_time() {
    let Some(lab) = Lab::podman() else { return };
    for (what, rank, class) in
        [("rank", Some(1), FailureClass::Unknown), ("container", None, FailureClass::Host)]
    {
        let id = format!("dead-{what}-1");
        let plan = lab.plan(&id, 2, 0, LONG);
        let mut up = 0;
        let mut killed: Option<Instant> = None;
        let mut noticed = None;
        let ran = lab.run(&plan, |record, _| {
            up += u32::from(is_up(&record.event));
            if up == 2 && killed.is_none() {
                let job = format!("label=trainyard.job={id}");
                let mut list = Command::new("podman");
                list.args(["ps", "-q", "--filter", job.as_str(), "--filter", "label=trainyard.node=1"]);
                let container = String::from_utf8(list.output().unwrap().stdout).unwrap().trim().to_owned();
                // A container's processes are the machine's, too.
                let rank = rank_process(&format!("{id}-0"), 1).unwrap().to_string();
                let killed_by = match what {
                    "rank" => Command::new("kill").args(["-9", rank.as_str()]).status(),
                    _ => Command::new("podman")
                        .args(["kill", "-s", "KILL", container.as_str()])
                        .output()
                        .map(|done| done.status),
                };
                assert!(killed_by.unwrap().success());
                killed = Some(Instant::now());
            }
            let stop = matches!(&record.event, JobEvent::Node { node: 0, said: NodeEvent::Stopping { .. } });
            noticed = noticed.or(killed.filter(|_| stop).map(|at| at.elapsed()));
        });
        let failure = &ran.outcome().failures[0];
        assert_eq!((failure.node, failure.rank, failure.class), (Some(1), rank, class), "{failure:?}");
        assert!(noticed.unwrap() < Duration::from_secs(2), "{what}: {noticed:?}");
    }
}

#[test]
fn a_fresh_attempt_has_fresh_containers() {
    let Some(lab) = Lab::podman() else { return };
    let script = "echo $TORCHELASTIC_RUN_ID; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || kill -9 $$";
    let ran = lab.run(&lab.plan("again-1", 1, 1, script), |_, _| {});
    assert_eq!(ran.outcome().exit, Exit::Done, "{:#?}", ran.records);
    assert_eq!(ran.output(), ["again-1-0", "again-1-1"]);
}

#[test]
fn stopping_containers_at_any_moment_leaves_nothing() {
    let Some(lab) = Lab::podman() else { return };
    for milliseconds in [0, 100, 400, 900, 1500] {
        let plan = lab.plan(&format!("moment-{milliseconds}"), 2, 0, LONG);
        let mut asked = false;
        let ran = lab.run(&plan, |_, ask| {
            if !std::mem::replace(&mut asked, true) {
                let ask = ask.clone();
                std::thread::spawn(move || {
                    std::thread::sleep(Duration::from_millis(milliseconds));
                    ask.send_replace(if milliseconds > 1000 { Stop::Now } else { Stop::Gracefully });
                });
            }
        });
        assert_eq!(ran.outcome().exit, Exit::Interrupted, "{milliseconds} ms");
    }
}

#[test]
fn a_dead_socket_is_an_error_or_a_note() {
    let lab = Lab::process();
    let socket = lab.dir.path().join("podman.sock");
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let settings = EngineSettings {
        container_host: Some(format!("unix://{}", socket.display())),
        ..EngineSettings::default()
    };
    let asked = lab.runtime.block_on(choose(EngineChoice::Podman, &settings, &image(), never()));
    let Err(error @ EngineError::NoService { .. }) = asked else { panic!("{asked:?}") };
    assert!(error.to_string().contains("systemctl start podman.socket"), "{error}");
    let auto = lab.runtime.block_on(choose(EngineChoice::Auto, &settings, &image(), never())).unwrap();
    assert_eq!(auto.engine, EnginePlan::Process);
    assert!(auto.notes[0].contains("no Podman service answers at"), "{:?}", auto.notes);
    let odd =
        EngineSettings { container_host: Some("ssh://host/run".to_owned()), ..EngineSettings::default() };
    let asked = lab.runtime.block_on(choose(EngineChoice::Podman, &odd, &image(), never()));
    assert!(matches!(asked, Err(EngineError::Address { .. })), "{asked:?}");
    let nothing = lab
        .runtime
        .block_on(choose(EngineChoice::Auto, &EngineSettings::default(), &image(), never()))
        .unwrap();
    assert_eq!(nothing.engine, EnginePlan::Process);
}
