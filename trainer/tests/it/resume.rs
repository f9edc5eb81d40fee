//! Runs are reproducible, and go on from a checkpoint as if nothing had happened.

use rustix::process::Signal;
use trainyard_spec::event::{FailureClass, TrainerEvent};
use trainyard_trainer::checkpoint::read::Checkpoint;

use crate::ranks::{Job, Lab, job, losses};

#[test]
fn runs_of_one_world_size_give_the_same_bits() {
    let lab = Lab::new();
    for (world_size, a, b) in [(1, "a1", "b1"), (3, "a3", "b3"), (4, "a4", "b4")] {
        let (first, second) = (lab.finish(&job(world_size, a)), lab.finish(&job(world_size, b)));
        assert_eq!(losses(&first), losses(&second), "{world_size} ranks");
        assert_eq!(losses(&first).len(), 20 + 2);
        assert_eq!(lab.newest(a).1, lab.newest(b).1, "{world_size} ranks");
    }
}

#[test]
fn ranks_share_the_work_of_one() {
    let lab = Lab::new();
    let alone = lab.finish(&job(1, "one").with("batch", 8.0));
    let together = lab.finish(&job(4, "four"));
    let accumulated = lab.finish(&job(2, "two").with("grad-accumulation", 2.0));
    for other in [together, accumulated] {
        for ((key, a), (_, b)) in losses(&alone).into_iter().zip(losses(&other)) {
            let (a, b) = (f64::from_bits(a), f64::from_bits(b));
            // The same samples in another order of summation; f32 rounding grows over the steps.
            assert!((a - b).abs() < 2e-4, "{key:?}: {a} {b}");
        }
    }
}

fn checkpoint_after(step: u64) -> impl Fn(&TrainerEvent) -> bool {
    move |event| matches!(event, TrainerEvent::Checkpoint { step: found, .. } if *found >= step)
}

#[test]
fn a_killed_run_goes_on_bit_for_bit() {
    let lab = Lab::new();
    let long = |folder| job(4, folder).with("steps", 300.0).with("checkpoint-every", 20.0);
    let straight = lab.finish(&long("straight"));

    let ranks = lab.start(&long("killed"));
    ranks[0].wait_for(checkpoint_after(60));
    for rank in &ranks {
        rank.signal(Signal::KILL);
    }
    ranks.into_iter().for_each(|rank| drop(rank.wait()));
    let resumed = lab.finish(&long("killed"));

    let TrainerEvent::Started { first_step, .. } = resumed[0] else { panic!("{resumed:?}") };
    assert!((60..300).contains(&first_step), "{first_step}");
    let rest = losses(&straight).split_off(&(first_step + 1, false));
    assert_eq!(losses(&resumed), rest);
    assert_eq!(lab.newest("killed").1, lab.newest("straight").1);
}

#[test]
fn another_world_size_goes_on_where_the_samples_end() {
    let lab = Lab::new();
    let until =
        |world_size, steps| Job { resume: "auto".to_owned(), ..job(world_size, "c") }.with("steps", steps);
    let mut last_loss = f64::INFINITY;
    let mut samples = 0;
    for (world_size, steps) in [(4, 40.0), (1, 50.0), (3, 80.0)] {
        let before = if lab.path("c").exists() { lab.newest("c").0.manifest.step } else { 0 };
        let events = lab.finish(&until(world_size, steps));
        let manifest = lab.newest("c").0.manifest;
        samples += (steps as u64 - before) * 2 * u64::from(world_size);
        assert_eq!((manifest.step, manifest.samples), (steps as u64, samples));
        let TrainerEvent::Started { first_step, .. } = events[0] else { panic!("{events:?}") };
        assert_eq!(first_step, before);
        let loss = f64::from_bits(losses(&events)[&(steps as u64, true)]);
        assert!(loss < last_loss, "the loss rises from {last_loss} to {loss}");
        last_loss = loss;
    }
    // A finished run has nothing left to do, and says so.
    let events = lab.finish(&until(3, 80.0));
    assert!(matches!(
        events[..],
        [TrainerEvent::Started { first_step: 80, .. }, TrainerEvent::Finished { step: 80 }]
    ));
}

#[test]
fn sigterm_to_one_rank_stops_all_with_a_checkpoint() {
    let lab = Lab::new();
    let endless = job(3, "c").with("steps", 1_000_000.0).with("checkpoint-every", 1_000_000.0);
    let ranks = lab.start(&endless);
    ranks[0].wait_for(|event| matches!(event, TrainerEvent::Step { step: 5.., .. }));
    ranks[2].signal(Signal::TERM);
    let ended: Vec<_> = ranks.into_iter().map(crate::ranks::Rank::wait).collect();
    assert!(ended.iter().all(|rank| rank.status.code() == Some(143)), "{ended:?}");
    let step = ended[0].events.iter().find_map(|event| match event {
        TrainerEvent::Checkpoint { step, .. } => Some(*step),
        _ => None,
    });
    assert_eq!(Some(lab.newest("c").0.manifest.step), step);
    // So that whoever asks what happened is led to the rank that got the signal.
    let lost_a_peer = |rank: &crate::ranks::Ended| {
        rank.events
            .iter()
            .any(|event| matches!(event, TrainerEvent::Failed { class: FailureClass::Network, .. }))
    };
    assert_eq!(ended.iter().map(lost_a_peer).collect::<Vec<_>>(), [true, true, false]);
}

#[test]
fn killing_while_checkpoints_are_written_leaves_the_newest_whole() {
    let lab = Lab::new();
    let writing = job(2, "c").with("steps", 1_000_000.0).with("checkpoint-every", 1.0);
    let mut reached = 0;
    for round in 0_u64..12 {
        let ranks = lab.start(&writing);
        ranks[0].wait_for(checkpoint_after(reached + 2));
        // Steps and checkpoints take about the same time here, so this falls anywhere in them.
        std::thread::sleep(std::time::Duration::from_micros(700 * round));
        for rank in &ranks {
            rank.signal(Signal::KILL);
        }
        let said = ranks.into_iter().map(|rank| rank.wait().events).next().unwrap();
        assert!(!said.iter().any(|event| matches!(event, TrainerEvent::Warning { .. })), "{said:?}");
        for entry in std::fs::read_dir(lab.path("c")).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none() {
                Checkpoint::open(&path).unwrap();
            }
        }
        let step = lab.newest("c").0.manifest.step;
        assert!(step >= reached + 2, "from {reached} to {step}");
        reached = step;
    }
}

/// Damages the newest checkpoint of two.
fn damaged(damage: impl Fn(&std::path::Path)) -> (Lab, Job) {
    let lab = Lab::new();
    lab.finish(&job(2, "c"));
    damage(&lab.path("c/step_20"));
    (lab, job(2, "c").with("steps", 25.0))
}

#[test]
fn a_damaged_checkpoint_is_named_and_the_one_before_it_used() {
    let file = "rank_1_of_2.safetensors";
    let rewrite = |path: &std::path::Path, change: fn(&mut Vec<u8>)| {
        let mut bytes = std::fs::read(path).unwrap();
        change(&mut bytes);
        std::fs::write(path, bytes).unwrap();
    };
    let edit = |step: &std::path::Path, from: &str, to: &str| {
        let path = step.join("manifest.json");
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.contains(from), "{text}");
        std::fs::write(path, text.replace(from, to)).unwrap();
    };
    type Damage<'a> = Box<dyn Fn(&std::path::Path) + 'a>;
    let cases: [(Damage<'_>, &str); 7] = [
        (
            Box::new(|step| rewrite(&step.join(file), |bytes| bytes.truncate(100))),
            "has 100 bytes; needed are",
        ),
        (
            Box::new(|step| rewrite(&step.join(file), |bytes| *bytes.last_mut().unwrap() ^= 1)),
            "has the digest",
        ),
        (
            Box::new(|step| std::fs::remove_file(step.join(file)).unwrap()),
            "rank_1_of_2.safetensors is missing",
        ),
        (Box::new(|step| std::fs::write(step.join("manifest.json"), "{").unwrap()), "manifest.json: EOF"),
        (Box::new(|step| edit(step, file, "../rank_1_of_2.safetensors")), "is not the plain name of a file"),
        (
            Box::new(|step| edit(step, "\"world-size\": 2", "\"world-size\": 0")),
            "world-size is 0; needed is 2, the number of files",
        ),
        (
            Box::new(|step| std::fs::remove_file(step.join("manifest.json")).unwrap()),
            "manifest.json is missing",
        ),
    ];
    for (damage, expect) in cases {
        let (lab, auto) = damaged(damage);
        let explicit = Job { resume: lab.path("c/step_20").display().to_string(), ..auto.clone() };
        let ended = lab.run(&explicit);
        ended[0].fails(FailureClass::User, expect);

        let events = lab.finish(&auto);
        let TrainerEvent::Warning { message } = &events[0] else { panic!("{events:?}") };
        assert!(message.contains("step_20 is damaged") && message.contains(expect), "{message}");
        assert!(matches!(events[1], TrainerEvent::Started { first_step: 15, .. }), "{events:?}");
        assert!(lab.path("c/step_20.damaged-1").exists());
        assert_eq!(lab.newest("c").0.manifest.step, 25);
    }
}

#[test]
fn checkpoints_that_do_not_fit_are_refused() {
    let lab = Lab::new();
    lab.finish(&job(1, "c"));
    let longer = job(1, "c").with("steps", 25.0);
    let at = |step: u64| lab.path(&format!("c/step_{step}")).display().to_string();
    for (job, expect) in [
        (longer.clone().with("channels", 32.0), "its model is 2 layers, 2 heads, 16 channels"),
        (longer.clone().with("seed", 8.0), "its seed is 7, this run's is 8"),
        (Job { resume: "none".to_owned(), ..longer.clone() }, "holds checkpoints (newest: step 20)"),
        (Job { resume: at(15), ..longer.clone() }, "resuming from step 15 while"),
        (Job { resume: at(16), ..longer.clone() }, "step_16 is not a checkpoint"),
    ] {
        lab.run(&job)[0].fails(FailureClass::User, expect);
        assert_eq!(lab.newest("c").0.manifest.step, 20);
    }
    for step in [15, 20] {
        std::fs::write(lab.path(&format!("c/step_{step}/manifest.json")), "[]").unwrap();
    }
    lab.run(&longer)[0].fails(FailureClass::User, "no checkpoint in");
    // An explicit path to a whole one in another folder starts a folder of its own.
    lab.finish(&job(1, "d"));
    let moved = Job { resume: lab.path("d/step_20").display().to_string(), checkpoints: "e", ..longer };
    lab.finish(&moved);
    assert_eq!(lab.newest("e").0.manifest.step, 25);
}

#[test]
fn what_cannot_be_written_is_said_and_leaves_nothing_half_done() {
    let lab = Lab::new();
    std::fs::write(lab.path("file"), "").unwrap();
    lab.run(&job(1, "file/c"))[0].fails(FailureClass::User, "cannot create");

    // The limit on the size of a file stands in for a full disk: both fail in the middle of a write.
    lab.finish(&job(1, "c"));
    let longer = job(1, "c").with("steps", 25.0);
    let (train, events) = lab.command(&longer, 0, crate::ranks::address(), "run");
    let mut limited = std::process::Command::new("sh");
    limited.args(["-c", "trap '' XFSZ; ulimit -f 8; exec \"$@\"", "sh"]);
    limited.arg(train.get_program()).args(train.get_args());
    limited.envs(train.get_envs().filter_map(|(key, value)| Some((key, value?))));
    let ended = crate::ranks::Rank::of(limited, events).wait();
    ended.fails(FailureClass::Host, "cannot write");
    let left: Vec<_> =
        std::fs::read_dir(lab.path("c")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "{left:?}");
    assert_eq!(lab.newest("c").0.manifest.step, 20);
}
