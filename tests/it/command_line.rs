//! What is refused, how, and with which exit code. Nothing here starts a job.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use insta::assert_snapshot;

use crate::yard::{done, job, root, run, said, trainyard};

#[test]
fn help() {
    assert_snapshot!(done(&["--help"]).out);
    assert_snapshot!(done(&["launch", "--help"]).out);
}

#[test]
fn completions_and_man_pages_name_every_command() {
    let script = done(&["completions", "bash"]).out;
    let folder = tempfile::tempdir().unwrap();
    done(&["man", folder.path().to_str().unwrap()]);
    for command in [
        "launch", "status", "logs", "stop", "lock", "build", "vendor", "inspect", "verify", "push", "pull",
        "export", "index", "gc", "data",
    ] {
        assert!(script.contains(&format!("trainyard,{command}")), "{command}");
        assert!(folder.path().join(format!("trainyard-{command}.1")).is_file(), "{command}");
    }
}

#[test]
fn output_that_cannot_be_written_is_exit_7() {
    for arguments in [&["completions", "bash"][..], &["status", "--format", "json"]] {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let answer = said(&trainyard(arguments).stdout(full).output().unwrap());
        assert_eq!(answer.code, Some(7), "{arguments:?}: {}", answer.err);
        assert!(answer.err.contains("No space left"), "{arguments:?}: {}", answer.err);
    }
}

#[test]
fn a_wrong_command_line_is_exit_2() {
    for (arguments, said) in [
        (&["launch", "--nodes", "0"][..], "--nodes is 0"),
        (&["launch", "--nodes", "four"], "four"),
        (&["launch", "--nodes", "100001"], "--nodes is 100001"),
        (&["launch", "--engine", "docker"], "docker"),
        (&["launch", "no-such-job.toml"], "no-such-job.toml"),
        (&["launch", "--resume", "no-such-job"], "no-such-job"),
        (&["launch", "--data", "no-such-text"], "no-such-text"),
        (&["stop", "no-such-job"], "no-such-job"),
        (&["status", "../.."], "../.."),
        (&["inspect", "no-such-image"], "no-such-image"),
        (&["build", "no-such-manifest.toml"], "no-such-manifest.toml"),
        (&["build", "manifests/images/gpt-cpu.toml", "--vendored", "no-such-folder"], "no-such-folder"),
        (&["vendor", "no-such-manifest.toml", "--output", "x"], "no-such-manifest.toml"),
        (&["vendor", "manifests/data/shakespeare.toml", "--output", "src"], "src holds other things"),
        (&["frobnicate"], "frobnicate"),
        (&["launch", "--data", "/dev/zero"], "/dev/zero: it is not a regular file"),
        (&["data", "prepare", "no-such-text", "--output", "x"], "no-such-text"),
        (&["data", "prepare", "/dev/zero", "--output", "x"], "/dev/zero: it is not a regular file"),
        (&["data", "prepare", "README.md", "--output", "src"], "src exists"),
        (&["data", "prepare", "README.md", "--output", "x", "--validation-fraction", "nan"], "NaN"),
        (&["launch", "/dev/zero"], "/dev/zero: it is not a regular file"),
        (&["build", "/dev/zero"], "/dev/zero"),
        (&["launch", "--run-dir", "/dev/null"], "/dev/null: is not a folder"),
        (&["launch", "--run-dir", "src"], "is not empty"),
    ] {
        let answer = run(&mut trainyard(arguments));
        assert_eq!(answer.code, Some(2), "{arguments:?}: {}", answer.err);
        assert!(answer.err.contains(said), "{arguments:?}: {}", answer.err);
        assert!(answer.out.is_empty(), "{arguments:?}: {}", answer.out);
    }
}

#[test]
fn a_wrong_job_is_exit_3_with_every_fault_and_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let path = job(folder.path(), "wrong", 40);
    let text = fs::read_to_string(&path).unwrap();
    let text = text.replace("layers = 2", "layers = \"two\"").replace("[train]", "[train]\ncolour = 1");
    fs::write(&path, text).unwrap();
    let answer = run(&mut trainyard(&["launch", path.to_str().unwrap()]));
    assert_eq!(answer.code, Some(3), "{}", answer.err);
    assert!(answer.err.contains("expected an integer, found string at `model.layers`"), "{}", answer.err);
    assert!(answer.err.contains("unexpected key at `train.colour`"), "{}", answer.err);
}

#[test]
fn a_job_that_is_not_text_is_exit_3_and_says_where() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("job.toml");
    fs::write(&path, b"name = \"caf\xe9\"").unwrap();
    let answer = run(&mut trainyard(&["launch", path.to_str().unwrap()]));
    assert_eq!(answer.code, Some(3), "{}", answer.err);
    assert!(answer.err.contains("not UTF-8 text: byte 11"), "{}", answer.err);
}

#[test]
fn a_manifest_without_lock_or_with_a_stale_one_is_exit_3_and_names_the_way_out() {
    let folder = tempfile::tempdir().unwrap();
    let manifest = folder.path().join("image.toml");
    let quickstart = fs::read_to_string(root().join("manifests/images/gpt-cpu.toml")).unwrap();
    fs::write(&manifest, &quickstart).unwrap();
    let answer = run(&mut trainyard(&["build", manifest.to_str().unwrap()]));
    assert_eq!(answer.code, Some(3), "{}", answer.err);
    assert!(answer.err.contains("trainyard lock"), "{}", answer.err);

    let lock = fs::read_to_string(root().join("manifests/images/gpt-cpu.lock")).unwrap();
    fs::write(folder.path().join("image.lock"), lock).unwrap();
    fs::write(&manifest, quickstart.replace("libgcc-12-dev", "libgcc-11-dev")).unwrap();
    let answer = run(&mut trainyard(&["build", manifest.to_str().unwrap()]));
    assert_eq!(answer.code, Some(3), "{}", answer.err);
    assert!(answer.err.contains("other inputs") && answer.err.contains("trainyard lock"), "{}", answer.err);
}

#[test]
fn texts_that_cannot_be_trained_on_are_exit_4() {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes, said) in [
        ("short.txt", &b"abc"[..], "tokens"),
        ("empty.txt", b"", "tokens"),
        ("latin1.txt", b"caf\xe9 and more text than that, enough of it to be cut in two parts", "byte 3"),
    ] {
        let text = folder.path().join(name);
        fs::write(&text, bytes).unwrap();
        let out = folder.path().join("out");
        let (text, out) = (text.to_str().unwrap(), out.to_str().unwrap());
        let answer = run(&mut trainyard(&["data", "prepare", text, "--output", out]));
        assert_eq!(answer.code, Some(4), "{name}: {}", answer.err);
        assert!(answer.err.contains(said), "{name}: {}", answer.err);
        assert!(!folder.path().join("out").exists(), "{name}: something half done was left");
    }
}

#[test]
fn prepared_shards_are_in_llm_c_s_format() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text.txt");
    fs::write(&text, "It was a dark and stormy night. ".repeat(100)).unwrap();
    let out = folder.path().join("shards");
    done(&["data", "prepare", text.to_str().unwrap(), "--output", out.to_str().unwrap()]);
    let shard = fs::read_dir(&out)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.extension().is_some_and(|extension| extension == "bin"))
        .unwrap();
    let magic = u32::from_le_bytes(fs::read(shard).unwrap()[..4].try_into().unwrap());
    assert_eq!(magic, 20_240_520);
}

#[test]
fn no_home_folder_is_told() {
    // The user of this id has no entry in the password file.
    let answer = run(trainyard(&["status"])
        .env_remove("TRAINYARD_HOME")
        .env("HOME", "relative/home")
        .env_remove("XDG_CACHE_HOME"));
    assert_eq!(answer.code, Some(2), "{}", answer.err);
    assert!(answer.err.contains("TRAINYARD_HOME"), "{}", answer.err);
}

#[test]
fn a_home_folder_that_cannot_be_written_is_told() {
    if rustix::process::getuid().is_root() {
        // Root may write everywhere but where nobody may: to a file in a folder's place.
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().join("home");
        fs::write(&home, "a file").unwrap();
        let answer = run(trainyard(&["launch", "--nodes", "1"]).env("TRAINYARD_HOME", &home));
        assert_eq!(answer.code, Some(4), "{}", answer.err);
        assert!(answer.err.contains(home.to_str().unwrap()), "{}", answer.err);
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o555)).unwrap();
    let answer = run(trainyard(&["launch", "--nodes", "1"]).env("TRAINYARD_HOME", folder.path()));
    assert_eq!(answer.code, Some(4), "{}", answer.err);
    assert!(answer.err.contains(folder.path().to_str().unwrap()), "{}", answer.err);
}
