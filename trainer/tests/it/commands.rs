//! The command line: what it refuses, and what it prints.

use std::process::{Command, Output};

use trainyard_spec::event::FailureClass;

use crate::ranks::{Job, Lab, job};

fn trainer(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_trainyard-trainer")).args(arguments).output().unwrap()
}

#[test]
fn bad_configurations_are_named() {
    let lab = Lab::new();
    for (job, expect) in [
        (job(1, "c").with("steps", 0.0), "train.steps: steps is 0; needed is at least 1"),
        (job(1, "c").with("heads", 3.0), "model.channels: channels (16) is not a multiple of heads (3)"),
        (job(1, "c").with("step", 1.0), "unknown field `step`"),
        (job(1, "c").with("context", 1e6), "needed are at least 1000001 (context 1000000"),
        (
            job(1, "c").with("learning-rate", 1e38).with("warmup-steps", 0.0),
            "the first tensor that is not finite is",
        ),
    ] {
        lab.run(&job)[0].fails(FailureClass::User, expect);
    }
}

#[test]
fn bad_data_is_named() {
    let lab = Lab::new();
    let shard = lab.path("data/train_000000.bin");
    let whole = std::fs::read(&shard).unwrap();
    let mut token = whole.clone();
    token[1024 + 100 * 2 + 1] = 1;
    let manifest = std::fs::read_to_string(lab.path("data/dataset.json")).unwrap();
    let newer = manifest.replace("\"version\": 1", "\"version\": 2");
    let outside = manifest.replace("\"train_000000.bin", "\"../train_000000.bin");
    for (bytes, manifest, expect) in [
        (&token, &manifest, "train_000000.bin: token 3"),
        (&whole[..2000].to_vec(), &manifest, "train_000000.bin: 2000 bytes; needed are"),
        (&whole, &newer, "format version 2 is unknown here"),
        (&whole, &outside, "\"../train_000000.bin\" is not the plain name of a file"),
        (&whole, &"{}".to_owned(), "dataset.json: missing field"),
    ] {
        std::fs::write(&shard, bytes).unwrap();
        std::fs::write(lab.path("data/dataset.json"), manifest).unwrap();
        lab.run(&job(1, "c").with("steps", 500.0))[0].fails(FailureClass::User, expect);
    }
    std::fs::remove_dir_all(lab.path("data")).unwrap();
    lab.run(&job(1, "c"))[0].fails(FailureClass::User, "`trainyard data prepare` makes a data set");
}

#[test]
fn samples_are_what_was_learnt_and_repeat() {
    let lab = Lab::new();
    lab.finish(&Job { config: [("steps", 300.0), ("batch", 8.0)].into(), ..job(1, "c") });
    let folder = lab.path("c").display().to_string();
    let sample = |seed: &str| {
        let output = trainer(&[
            "sample",
            "--checkpoint",
            &folder,
            "--prompt",
            "king ",
            "--tokens",
            "100",
            "--temperature",
            "0.5",
            "--seed",
            seed,
        ]);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let text = sample("1");
    assert_eq!(text, sample("1"));
    assert_ne!(text, sample("2"));
    assert!(text.starts_with("king ") && text.len() == 5 + 100 + 1, "{text:?}");
    let known = ["king", "queen", "crown", "sword", "and", "the", "of", "to"];
    let words: Vec<&str> = text.split_whitespace().collect();
    let learnt = words.iter().filter(|word| known.contains(word)).count();
    assert!(learnt * 2 > words.len(), "{learnt} of {} words are the text's: {text}", words.len());

    std::fs::write(lab.path("c/step_300/manifest.json"), "").unwrap();
    let output = trainer(&["sample", "--checkpoint", &folder, "--tokens", "1"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && said.contains("step_300 is damaged") && said.contains("step_295 is used"),
        "{said}"
    );

    let output = trainer(&["sample", "--checkpoint", "/nowhere"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("/nowhere is not a checkpoint"), "{output:?}");
}

#[test]
fn the_plan_says_what_a_run_takes() {
    let lab = Lab::new();
    let config = lab.config(&job(4, "c")).display().to_string();
    let output = trainer(&["plan", "--config", &config, "--world-size", "4", "--format", "json"]);
    let plan: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    // 256 x 16 and 16 x 16 embeddings; per block 12 C^2 weights, 9 C biases, 4 C of norms; 2 C of the last norm.
    let parameters = 256 * 16 + 16 * 16 + 2 * (12 * 256 + 13 * 16) + 32;
    assert_eq!(plan["parameters"], parameters);
    assert_eq!(plan["flops-per-token"], 6 * (2 * 12 * 256 + 256 * 16) + 2 * 6 * 16 * 16);
    assert_eq!(plan["tokens-per-step"], 4 * 2 * 16);
    assert_eq!(plan["sent-bytes-per-step"], parameters * 4 * 2 * 3 / 4);
    let purposes = plan["memory"].as_array().unwrap();
    let total: u64 = purposes.iter().map(|entry| entry["bytes"].as_u64().unwrap()).sum();
    assert_eq!(plan["memory-bytes"], total);
    assert!(trainer(&["plan", "--config", &config]).stdout.starts_with(b"parameters "));
}
