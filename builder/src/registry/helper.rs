//! Credential helpers: programs named `docker-credential-…` that keep credentials, asked as docker asks them.
//!
//! A helper reads the registry's host on its standard input, so that nothing is shown in a list of processes, and
//! answers on its standard output. What it says when it fails is not repeated, because nobody knows what is in it.

use std::io::{self, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use serde::Deserialize;

use super::credentials::{Credential, CredentialSettings, Error};

/// Most bytes of an answer.
const LARGEST_ANSWER: u64 = 1 << 16;
/// Time between two looks at whether a helper has ended.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// What helpers say, with an exit code that is not 0, when they keep nothing for a registry.
const NOT_FOUND: &str = "credentials not found in native keychain";
/// The user name of a refresh token.
const TOKEN_USER: &str = "<token>";

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Answer {
    username: String,
    secret: String,
}

/// Asks the helper `name`, which the file at `path` names, for a registry's credential.
pub(super) fn ask(
    name: &str,
    host: &str,
    path: &Path,
    settings: &CredentialSettings,
) -> Result<Option<Credential>, Error> {
    let program = format!("docker-credential-{name}");
    // A name with a slash would be a path, and this file may come from elsewhere.
    if !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.')) {
        let source =
            io::Error::new(io::ErrorKind::InvalidInput, "a helper's name is letters, digits, - _ and .");
        return Err(Error::Start { program, path: path.to_owned(), source });
    }
    let failed = |message: &str| Error::Helper {
        program: program.clone(),
        host: host.to_owned(),
        message: message.to_owned(),
    };
    let mut child = Command::new(&program)
        .arg("get")
        .env_clear()
        .envs(&settings.environment)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|source| Error::Start { program: program.clone(), path: path.to_owned(), source })?;
    let said = talk(&mut child, host, settings.patience);
    // What has not ended by itself is not wanted any more. A program that has ended cannot be killed.
    let _ = child.kill();
    let ended = child.wait();
    let said = said.map_err(|error| failed(&error.to_string()))?;
    let status = ended.map_err(|error| failed(&format!("could not be waited for ({error})")))?;
    if !status.success() {
        let nothing = String::from_utf8_lossy(&said).trim().eq_ignore_ascii_case(NOT_FOUND);
        return if nothing { Ok(None) } else { Err(failed(&format!("failed with {status}"))) };
    }
    let answer: Answer = serde_json::from_slice(&said)
        .map_err(|_| failed("did not answer with JSON that has Username and Secret"))?;
    Ok(match answer {
        Answer { secret, .. } if secret.is_empty() => None,
        Answer { username, secret } if username == TOKEN_USER => Some(Credential::Identity(secret)),
        Answer { username, secret } => Some(Credential::Password { user: username, password: secret }),
    })
}

/// Gives the helper the host, and reads what it says until it has ended.
fn talk(child: &mut Child, host: &str, patience: Duration) -> io::Result<Vec<u8>> {
    let late = || {
        io::Error::new(io::ErrorKind::TimedOut, format!("did not answer within {} s", patience.as_secs_f64()))
    };
    let start = Instant::now();
    if let Some(mut input) = child.stdin.take() {
        match input.write_all(host.as_bytes()) {
            // It may answer without having read.
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => return Err(error),
            _ => {}
        }
    }
    let (give, take) = mpsc::channel();
    if let Some(output) = child.stdout.take() {
        // Not joined: something that the helper has started may keep its output open for ever.
        thread::spawn(move || {
            let mut said = Vec::new();
            let read = output.take(LARGEST_ANSWER).read_to_end(&mut said);
            // Nobody listens any more where it was too late.
            let _ = give.send(read.map(|_| said));
        });
    }
    let said = take.recv_timeout(patience).map_err(|_| late())??;
    while child.try_wait()?.is_none() {
        if start.elapsed() > patience {
            return Err(late());
        }
        thread::sleep(LOOK_EVERY);
    }
    Ok(said)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::super::credentials::find;
    use super::*;

    /// Settings whose files name a helper that is this shell script.
    fn with_helper(script: &str) -> (tempfile::TempDir, CredentialSettings) {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("docker-credential-test");
        std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
        let file = folder.path().join("auth.json");
        std::fs::write(&file, r#"{"credHelpers": {"h.x": "test"}, "credsStore": "test"}"#).unwrap();
        let path = format!("{}:/usr/bin:/bin", folder.path().display());
        let settings = CredentialSettings {
            files: vec![file],
            environment: [("PATH".into(), path.into()), ("HIDDEN".into(), "hunter2".into())].into(),
            patience: Duration::from_millis(700),
            ..CredentialSettings::default()
        };
        (folder, settings)
    }

    #[test]
    fn a_helper_gets_the_host_on_its_input_and_gives_a_credential() {
        let script = r#"read -r host; [ "$*" = get ] && echo "{\"ServerURL\":\"x\",\"Username\":\"user of $host\",\"Secret\":\"s\"}""#;
        let (_folder, settings) = with_helper(script);
        for host in ["h.x", "store.x:5000"] {
            let expected = Credential::Password { user: format!("user of {host}"), password: "s".to_owned() };
            assert_eq!(find(&settings, host, "a").unwrap(), Some(expected));
        }
        let (_folder, settings) = with_helper(r#"echo '{"Username":"<token>","Secret":"s"}'"#);
        assert_eq!(find(&settings, "h.x", "a").unwrap(), Some(Credential::Identity("s".to_owned())));
        let (_folder, settings) = with_helper("echo credentials not found in native keychain; exit 1");
        assert_eq!(find(&settings, "h.x", "a").unwrap(), None);
    }

    #[test]
    fn a_helper_that_fails_hangs_or_talks_too_much_is_named_and_nothing_secret_said() {
        for (script, said) in [
            ("echo hunter2; echo hunter2 >&2; exit 3", "failed with exit status: 3"),
            ("echo hunter2", "did not answer with JSON"),
            ("echo '{\"Secret\": \"hunter2\"}'", "did not answer with JSON"),
            ("exec sleep 30", "did not answer within 0.7 s"),
            ("exec >&-; exec sleep 30", "did not answer within 0.7 s"),
            ("sleep 5 & echo hunter2; exit 1", "did not answer within 0.7 s"),
            ("yes hunter2", "failed with"),
        ] {
            let (_folder, settings) = with_helper(script);
            let start = Instant::now();
            let error = find(&settings, "h.x", "a").unwrap_err();
            let shown = format!("{error} {error:?} {} {settings:?}", error.hint().unwrap());
            assert!(shown.contains(said), "{script}: {shown}");
            assert!(!shown.contains("hunter2"), "{script}: {shown}");
            assert!(start.elapsed() < Duration::from_secs(4), "{script} was waited for");
        }
    }

    #[test]
    fn a_helper_that_is_missing_or_a_path_is_refused() {
        for name in ["missing", "../test", "a/b", "a b"] {
            let (folder, settings) = with_helper("exit 0");
            std::fs::write(folder.path().join("auth.json"), format!(r#"{{"credsStore": {name:?}}}"#))
                .unwrap();
            let error = find(&settings, "h.x", "a").unwrap_err();
            assert!(matches!(error, Error::Start { .. }), "{name}: {error}");
            assert!(error.hint().unwrap().contains("install docker-credential-"), "{error:?}");
        }
    }
}
