//! The Release file of a suite: the digests of its lists, signed by the archive (the repository format of Debian's wiki).

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::time::{Duration, SystemTime};

use trainyard_spec::Digest;

use super::Error;
use super::apt::{AptSource, Trust};
use super::deb822::Paragraphs;
use crate::http::{Client, Endpoint};
use crate::progress::Progress;
use crate::signature::{self, Keyring};
use crate::store::Store;

/// Most bytes of a Release file.
const RELEASE_LIMIT: u64 = 32 << 20;
/// How far an archive's clock may be ahead: what apt allows.
const CLOCK_DIFFERENCE: Duration = Duration::from_secs(10);

/// What is needed to ask archives.
pub(crate) struct Asking<'a> {
    pub(crate) client: &'a Client,
    pub(crate) store: &'a Store,
    pub(crate) tools: &'a BTreeMap<OsString, OsString>,
    /// The time by which it is told whether a file has expired.
    pub(crate) now: SystemTime,
    pub(crate) progress: Progress<'a>,
}

/// What a suite says about itself.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Release {
    /// Size and sha256 of each of its files.
    files: BTreeMap<String, (u64, Digest)>,
    by_hash: bool,
    /// Whether packages of every architecture have lists of their own.
    pub(super) all_apart: bool,
    /// Whether its packages are taken only where no other suite has them.
    pub(super) not_automatic: bool,
}

impl Release {
    /// Gets and checks the Release file of a suite. None where the suite has none.
    ///
    /// # Errors
    /// When it is not signed by a key of its source, has expired, or makes no sense.
    pub(super) fn of(source: &AptSource, suite: &str, asking: &Asking<'_>) -> Result<Option<Self>, Error> {
        let get = |name: &str| -> Result<Option<(String, String)>, Error> {
            let path = format!("dists/{suite}/{name}");
            let url = format!("{}{path}", source.root);
            let bad = |message: String| Error::Page { url: url.clone(), message };
            let endpoint = source.root.join(&path).map_err(|error| bad(error.to_string()))?;
            match asking.client.page(&endpoint, "*/*", RELEASE_LIMIT, asking.progress) {
                // Signatures may be binary, and are only passed on.
                Ok(page) if name == "Release.gpg" => Ok(Some((url.clone(), latin1(&page.body)))),
                Ok(page) => match String::from_utf8(page.body) {
                    Ok(text) => Ok(Some((url.clone(), text))),
                    Err(_) => Err(bad("it is not UTF-8".to_owned())),
                },
                Err(error) if error.is_absent() => Ok(None),
                Err(error) => Err(error.into()),
            }
        };
        let (url, text, signature) = if let Some((url, whole)) = get("InRelease")? {
            let (text, signature) = signature::split_signed(&whole).ok_or_else(|| Error::Page {
                url: url.clone(),
                message: "it is no text with one signature around it".to_owned(),
            })?;
            (url, text, Some(signature.into_bytes()))
        } else if let Some((url, text)) = get("Release")? {
            (url, text, get("Release.gpg")?.map(|(_, signature)| bytes(&signature)))
        } else {
            return Ok(None);
        };
        if let Trust::Keys(keys) = &source.trust {
            let keyring = keys.read()?;
            let signature = signature.ok_or_else(|| Error::Unsigned { url: url.clone() })?;
            check(&url, text.as_bytes(), &signature, &keyring, asking)?;
        }
        let (release, dates) =
            Self::parse(&text).map_err(|message| Error::Page { url: url.clone(), message })?;
        dates.check(&url, source.check_valid_until, asking.now)?;
        Ok(Some(release))
    }

    fn parse(text: &str) -> Result<(Self, Dates), String> {
        let paragraph = Paragraphs::new(text.as_bytes()).next();
        let paragraph = paragraph.and_then(Result::ok).ok_or("it is empty")?;
        let field = |name: &str| paragraph.get(name).map_or("", String::as_str);
        let is = |name: &str| field(name).eq_ignore_ascii_case("yes");
        let mut files = BTreeMap::new();
        for line in field("sha256").lines().filter(|line| !line.is_empty()) {
            let words: Vec<_> = line.split_whitespace().collect();
            let [sha256, size, path] = words.as_slice() else {
                return Err(format!("{line:?} names no file"));
            };
            let wrong = || format!("{line:?} names no file");
            let digest = Digest::from_hex(sha256).map_err(|_| wrong())?;
            files.insert((*path).to_owned(), (size.parse().map_err(|_| wrong())?, digest));
        }
        if files.is_empty() {
            return Err("it has no SHA256 of any file".to_owned());
        }
        let all_apart = field("architectures").split_whitespace().any(|one| one == "all")
            && !field("no-support-for-architecture-all").split_whitespace().any(|one| one == "Packages");
        let dates = Dates { date: field("date").to_owned(), valid_until: field("valid-until").to_owned() };
        let (by_hash, not_automatic) = (is("acquire-by-hash"), is("notautomatic"));
        Ok((Self { files, by_hash, all_apart, not_automatic }, dates))
    }

    /// Gets a file of the suite and checks it. None where the suite has no such file.
    ///
    /// # Errors
    /// When it cannot be had, or is not what the suite says.
    pub(super) fn file(
        &self,
        root: &Endpoint,
        suite: &str,
        path: &str,
        limit: u64,
        asking: &Asking<'_>,
    ) -> Result<Option<Vec<u8>>, Error> {
        let Some((size, sha256)) = self.files.get(path) else { return Ok(None) };
        let plain = format!("dists/{suite}/{path}");
        let folder = plain.rsplit_once('/').map_or("", |(folder, _)| folder);
        let hashed = format!("{folder}/by-hash/SHA256/{}", sha256.hex());
        let bad = |message: String| Error::Page { url: format!("{root}{plain}"), message };
        let mut body = None;
        for address in self.by_hash.then_some(&hashed).into_iter().chain([&plain]) {
            let endpoint = root.join(address).map_err(|error| bad(error.to_string()))?;
            match asking.client.page(&endpoint, "*/*", limit.min(*size), asking.progress) {
                Ok(page) => {
                    body = Some(page.body);
                    break;
                }
                Err(error) if error.is_absent() => {}
                Err(error) => return Err(error.into()),
            }
        }
        // Archives list files that they have only in another compression.
        let Some(body) = body else { return Ok(None) };
        let found = Digest::of(&body);
        if found != *sha256 {
            return Err(bad(format!("it has {found}; the suite's Release says {sha256}")));
        }
        Ok(Some(body))
    }
}

/// When a Release file was made, and until when it counts.
struct Dates {
    date: String,
    valid_until: String,
}

impl Dates {
    fn check(&self, url: &str, check_valid_until: bool, now: SystemTime) -> Result<(), Error> {
        let parse = |text: &str| {
            parse_date(text)
                .ok_or_else(|| Error::Page { url: url.to_owned(), message: format!("{text:?} is no date") })
        };
        if !self.date.is_empty() && parse(&self.date)? > now + CLOCK_DIFFERENCE {
            return Err(Error::OutOfDate {
                url: url.to_owned(),
                when: format!("is of {:?}, which is to come", self.date),
            });
        }
        if check_valid_until && !self.valid_until.is_empty() && parse(&self.valid_until)? < now {
            return Err(Error::OutOfDate {
                url: url.to_owned(),
                when: format!("was valid until {:?}", self.valid_until),
            });
        }
        Ok(())
    }
}

/// `Sat, 06 Sep 2025 09:31:26 UTC`, with or without the zero.
fn parse_date(text: &str) -> Option<SystemTime> {
    let rest = text
        .strip_suffix("UTC")
        .or_else(|| text.strip_suffix("GMT"))
        .or_else(|| text.strip_suffix("+0000"))?;
    let (weekday, rest) = rest.trim().split_once(' ')?;
    let (day, rest) = rest.trim_start().split_once(' ')?;
    httpdate::parse_http_date(&format!("{weekday} {day:0>2} {rest} GMT")).ok()
}

/// Checks the signature of what was read from an address.
pub(super) fn check(
    url: &str,
    data: &[u8],
    signature: &[u8],
    keyring: &Keyring,
    asking: &Asking<'_>,
) -> Result<(), Error> {
    signature::check(data, signature, keyring, asking.store, asking.tools).map_err(|source| {
        Error::Signature { url: url.to_owned(), keyring: keyring.from.join(", "), source: Box::new(source) }
    })
}

fn latin1(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| char::from(*byte)).collect()
}

fn bytes(latin1: &str) -> Vec<u8> {
    latin1.chars().filter_map(|c| u8::try_from(u32::from(c)).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_archives() {
        let seconds = |text| {
            parse_date(text).map(|time| time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs())
        };
        for (text, expect) in [
            ("Sat, 06 Sep 2025 09:31:26 UTC", Some(1_757_151_086)),
            ("Sat, 6 Sep 2025 09:31:26 UTC", Some(1_757_151_086)),
            ("Sat, 06 Sep 2025 09:31:26 +0000", Some(1_757_151_086)),
            ("Sat, 06 Sep 2025 09:31:26", None),
            ("tomorrow UTC", None),
        ] {
            assert_eq!(seconds(text), expect, "{text}");
        }
    }

    #[test]
    fn what_has_expired_or_is_to_come_is_refused() {
        let now = parse_date("Sat, 06 Sep 2025 09:31:26 UTC").unwrap();
        for (date, valid_until, check, good) in [
            ("Sat, 06 Sep 2025 09:31:30 UTC", "", true, true),
            ("Sat, 06 Sep 2025 09:41:26 UTC", "", true, false),
            ("", "Sat, 06 Sep 2025 09:31:25 UTC", true, false),
            ("", "Sat, 06 Sep 2025 09:31:25 UTC", false, true),
            ("", "Sat, 06 Sep 2025 09:31:27 UTC", true, true),
            ("", "soon", true, false),
        ] {
            let dates = Dates { date: date.to_owned(), valid_until: valid_until.to_owned() };
            assert_eq!(dates.check("url", check, now).is_ok(), good, "{date} {valid_until}");
        }
    }

    #[test]
    fn digests_are_read_or_missed() {
        let hex = "0".repeat(64);
        let (release, _) = Release::parse(&format!(
            "Architectures: all amd64\nAcquire-By-Hash: yes\nMD5Sum:\n 0 1 x\nSHA256:\n {hex}  17 main/x\n"
        ))
        .unwrap();
        assert!(release.by_hash && release.all_apart && !release.not_automatic);
        assert_eq!(
            release.files.iter().map(|(path, (size, _))| (path.as_str(), *size)).collect::<Vec<_>>(),
            [("main/x", 17)]
        );
        for bad in ["", "Origin: x\n", &format!("SHA256:\n {hex} x main/x\n"), "SHA256:\n 00 1 main/x\n"] {
            assert!(Release::parse(bad).is_err(), "{bad}");
        }
    }
}
