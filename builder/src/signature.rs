//! Signatures of lists and packages in OpenPGP, checked by gpgv, or by sqv, one of which is wherever apt or rpm is.
//!
//! A program of the machine and not a library: what it takes for a good signature is then what the machine's own package
//! manager takes for one, with its rules on old algorithms, and no code of ours touches a key. Deliberately left out:
//! who is to be trusted, which is the configuration of apt and yum.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::process::{Command, Stdio};

use base64::Engine as _;

use crate::store::{self, Store};

/// Hash algorithms that are not taken: MD5, SHA-1 and RIPEMD-160 (RFC 9580, 9.5), which apt refuses as well.
const WEAK: [&str; 3] = ["1", "2", "3"];

/// Public keys.
#[derive(Debug, Clone, Default)]
pub(crate) struct Keyring {
    /// The keys in binary form, one after the other.
    pub(crate) keys: Vec<u8>,
    /// Where they are from, for people.
    pub(crate) from: Vec<String>,
    /// Fingerprints, in upper case, of those that count; all where none is named.
    pub(crate) only: Vec<String>,
}

/// Why a signature does not count.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There are no keys.
    #[error("there is no key to check it with")]
    NoKeys,
    /// There is no program.
    #[error("neither gpgv nor sqv is on this machine to check it with")]
    NoProgram,
    /// A program could not be run.
    #[error("{program} could not be run: {source}")]
    Run {
        /// The program.
        program: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// There is no good signature, or a bad one.
    #[error("{}", .problems.join(", "))]
    NotGood {
        /// What is wrong, signature by signature.
        problems: Vec<String>,
    },
    /// What is checked could not be written for the program.
    #[error(transparent)]
    Store(#[from] store::Error),
}

impl Error {
    /// The way out.
    pub const fn hint(&self) -> Option<&'static str> {
        match self {
            Self::NoKeys => {
                Some("name the keys where the archive is configured: Signed-By for apt, gpgkey for yum")
            }
            Self::NoProgram => Some("install gpgv (Debian, Ubuntu) or gnupg2 (Fedora, RHEL, CentOS)"),
            Self::NotGood { .. } => Some(
                "do not use the archive before you know why; where its keys were replaced, install its new keyring",
            ),
            Self::Run { .. } | Self::Store(_) => None,
        }
    }
}

impl Keyring {
    /// Adds the keys in the bytes of a file: binary, or armored blocks among any text.
    ///
    /// # Errors
    /// When it has no keys.
    pub(crate) fn add(&mut self, from: &str, bytes: &[u8]) -> Result<(), String> {
        // The first byte of a public key packet, in its old and new form (RFC 9580, 4.2).
        let keys = match bytes.first() {
            Some(0x98 | 0x99 | 0xc6) => bytes.to_vec(),
            _ => dearmor(bytes).ok_or_else(|| "it is neither a keyring nor an armored key".to_owned())?,
        };
        self.keys.extend(keys);
        self.from.push(from.to_owned());
        Ok(())
    }
}

/// The bytes of all armored blocks of public keys in a text.
fn dearmor(text: &[u8]) -> Option<Vec<u8>> {
    let text = std::str::from_utf8(text).ok()?;
    let mut found = Vec::new();
    let mut lines = text.lines().map(str::trim);
    while lines.any(|line| line == "-----BEGIN PGP PUBLIC KEY BLOCK-----") {
        let mut inside = String::new();
        // Headers end at the first empty line.
        for line in lines.by_ref().skip_while(|line| !line.is_empty()) {
            if line.starts_with("-----END") {
                break;
            }
            // The line that starts with = is a checksum.
            if !line.starts_with('=') {
                inside.push_str(line);
            }
        }
        found.extend(base64::engine::general_purpose::STANDARD.decode(inside).ok()?);
    }
    (!found.is_empty()).then_some(found)
}

/// A text that is signed in itself: the text, and its signature (RFC 9580, 7). Nothing may stand around it.
pub(crate) fn split_signed(text: &str) -> Option<(String, String)> {
    let mut lines = text.lines().map(|line| line.trim_end_matches([' ', '\t', '\r']));
    if lines.next()? != "-----BEGIN PGP SIGNED MESSAGE-----" {
        return None;
    }
    // Headers end at the first empty line.
    lines.by_ref().find(|line| line.is_empty())?;
    let mut signed = Vec::new();
    loop {
        match lines.next()? {
            "-----BEGIN PGP SIGNATURE-----" => break,
            line => match line.strip_prefix("- ") {
                Some(line) => signed.push(line),
                None if line.starts_with('-') => return None,
                None => signed.push(line),
            },
        }
    }
    let mut signature = "-----BEGIN PGP SIGNATURE-----\n".to_owned();
    loop {
        let line = lines.next()?;
        signature += &format!("{line}\n");
        if line == "-----END PGP SIGNATURE-----" {
            break;
        }
    }
    lines.all(str::is_empty).then(|| (signed.join("\n"), signature))
}

/// Checks a detached signature of `data`: one by a key of the keyring has to be good, and none bad.
///
/// # Errors
/// When that is not so, or cannot be found out.
pub(crate) fn check(
    data: &[u8],
    signature: &[u8],
    keyring: &Keyring,
    store: &Store,
    tools: &BTreeMap<OsString, OsString>,
) -> Result<(), Error> {
    if keyring.keys.is_empty() {
        return Err(Error::NoKeys);
    }
    let staging = store.staging()?;
    let mut paths = Vec::new();
    for (name, bytes) in [("keyring.gpg", keyring.keys.as_slice()), ("signature", signature), ("data", data)]
    {
        let path = staging.path().join(name);
        fs_err::write(&path, bytes).map_err(store::io_error("write", &path))?;
        paths.push(path);
    }
    let run = |program: &'static str, arguments: &[&str]| {
        let output = Command::new(program)
            .args(arguments)
            .arg("--keyring")
            .args(&paths)
            .env_clear()
            .envs(tools)
            .env("LC_ALL", "C")
            .stdin(Stdio::null())
            .output();
        match output {
            Ok(output) => Ok(Some(output)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(Error::Run { program, source }),
        }
    };
    let home = staging.path().display().to_string();
    let gpgv = ["--homedir", &home, "--ignore-time-conflict", "--status-fd", "1"];
    if let Some(output) = run("gpgv", &gpgv)? {
        let status = String::from_utf8_lossy(&output.stdout).into_owned();
        return judge(&status, &keyring.only, &String::from_utf8_lossy(&output.stderr));
    }
    let Some(output) = run("sqv", &[])? else { return Err(Error::NoProgram) };
    // It prints the fingerprint of each key that made a good signature.
    let good = String::from_utf8_lossy(&output.stdout);
    if output.status.success() && good.lines().any(|signer| counts(&keyring.only, signer.trim())) {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(Error::NotGood { problems: vec![format!("sqv says {:?}", said.trim())] })
}

fn counts(only: &[String], fingerprint: &str) -> bool {
    only.is_empty() || only.iter().any(|one| one == fingerprint)
}

/// Reads what gpgv reports (doc/DETAILS of GnuPG), with the rule by which apt takes it: one good signature, and none bad.
fn judge(status: &str, only: &[String], said: &str) -> Result<(), Error> {
    let (mut good, mut bad) = (false, false);
    let mut problems = Vec::new();
    let mut current_is_good = false;
    for line in status.lines() {
        let mut words = line.split_whitespace().skip(1);
        let (keyword, key) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        match keyword {
            "NEWSIG" => current_is_good = false,
            "GOODSIG" => current_is_good = true,
            "VALIDSIG" if current_is_good => {
                // Behind the fingerprint: date, time, expiry, version, a reserved word, key's algorithm, hash, class, main key.
                let rest: Vec<_> = words.collect();
                let hash = rest.get(6).copied().unwrap_or_default();
                let main = rest.get(8).copied().unwrap_or(key);
                if WEAK.contains(&hash) {
                    problems.push(format!("the signature by key {main} is of a weak kind (hash {hash})"));
                } else if counts(only, main) || counts(only, key) {
                    good = true;
                } else {
                    problems.push(format!("key {main} is none of those that count"));
                }
            }
            "BADSIG" => {
                bad = true;
                problems.push(format!("the signature by key {key} is of other bytes"));
            }
            "EXPKEYSIG" => problems.push(format!("key {key} has expired")),
            "EXPSIG" => problems.push(format!("the signature by key {key} has expired")),
            "REVKEYSIG" => problems.push(format!("key {key} was revoked")),
            "NO_PUBKEY" => problems.push(format!("key {key}, by which it is signed, is not there")),
            _ => {}
        }
    }
    if good && !bad {
        return Ok(());
    }
    if problems.is_empty() {
        problems.push(format!("gpgv says {:?}", said.trim()));
    }
    Err(Error::NotGood { problems })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signed_texts() {
        let signature = "-----BEGIN PGP SIGNATURE-----\n\nabc\n-----END PGP SIGNATURE-----\n";
        let whole = format!(
            "-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA256\n\nOrigin: x \r\n- - y\n\nz\n{signature}"
        );
        let (text, found) = split_signed(&whole).unwrap();
        assert_eq!((text.as_str(), found.as_str()), ("Origin: x\n- y\n\nz", signature));
        for bad in [
            format!("Origin: evil\n\n{whole}"),
            format!("{whole}Origin: evil\n"),
            whole.replace("-----END PGP SIGNATURE-----\n", ""),
            whole.replace("- - y", "-----BEGIN OTHER-----"),
            "-----BEGIN PGP SIGNED MESSAGE-----\n".to_owned(),
            String::new(),
        ] {
            assert_eq!(split_signed(&bad), None, "{bad}");
        }
    }

    #[test]
    fn what_gpgv_reports() {
        let valid = |key: &str, hash: u8| {
            format!(
                "[GNUPG:] NEWSIG\n[GNUPG:] GOODSIG {key} someone\n\
                 [GNUPG:] VALIDSIG {key}SUB 2026-01-01 1 0 4 0 1 {hash} 01 {key}\n"
            )
        };
        let unknown = "[GNUPG:] NEWSIG\n[GNUPG:] ERRSIG AA 1 8 01 1 9 BB\n[GNUPG:] NO_PUBKEY AA\n";
        let bad = "[GNUPG:] NEWSIG\n[GNUPG:] BADSIG AA someone\n";
        // Expired keys are told in place of GOODSIG, and are valid otherwise.
        let expired =
            "[GNUPG:] NEWSIG\n[GNUPG:] EXPKEYSIG AA x\n[GNUPG:] VALIDSIG AA 2026-01-01 1 0 4 0 1 8 01 AA\n";
        for (status, only, expect) in [
            (valid("AA", 8), &[][..], None),
            (valid("AA", 8), &["AA"], None),
            (valid("AA", 8), &["AASUB"], None),
            (valid("AA", 8), &["CC"], Some("key AA is none of those that count")),
            (valid("AA", 2), &[], Some("weak kind (hash 2)")),
            (valid("AA", 8) + unknown, &[], None),
            (valid("AA", 8) + bad, &[], Some("the signature by key AA is of other bytes")),
            (unknown.to_owned(), &[], Some("key AA, by which it is signed, is not there")),
            (valid("AA", 2) + expired, &[], Some("key AA has expired")),
            (String::new(), &[], Some("gpgv says \"no data\"")),
        ] {
            let only: Vec<_> = only.iter().map(|one| (*one).to_owned()).collect();
            let found = judge(&status, &only, "no data\n").err().map(|error| error.to_string());
            match expect {
                None => assert_eq!(found, None, "{status}"),
                Some(expect) => assert!(found.as_ref().unwrap().contains(expect), "{found:?}"),
            }
        }
    }

    #[test]
    fn keys_are_told_from_other_files() {
        let mut keyring = Keyring::default();
        keyring.add("binary", &[0x99, 1, 2]).unwrap();
        let block = "-----BEGIN PGP PUBLIC KEY BLOCK-----\nVersion: x\n\nAQID\n=abcd\n-----END PGP PUBLIC KEY BLOCK-----\n";
        keyring.add("armored", format!("text\n{block}more\n{block}").as_bytes()).unwrap();
        assert_eq!(keyring.keys, [0x99, 1, 2, 1, 2, 3, 1, 2, 3]);
        for other in ["", "<html>", "-----BEGIN PGP PUBLIC KEY BLOCK-----\n\n!!!!\n"] {
            assert!(keyring.add("other", other.as_bytes()).is_err(), "{other}");
        }
        assert_eq!(keyring.from, ["binary", "armored"]);
    }
}
