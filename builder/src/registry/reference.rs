//! Names of images in registries: `host[:port]/name[:tag][@digest]`.
//!
//! The grammar is that of the OCI distribution specification and of `docker` and `podman`, without their short names:
//! which registry is meant by a name without a host depends on who reads it, so it is refused.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use trainyard_spec::Digest;

/// The tag that is meant where neither tag nor digest is named.
pub const DEFAULT_TAG: &str = "latest";
/// Bytes of host and name together, as `docker` and `podman` limit them.
const LONGEST_NAME: usize = 255;
const LONGEST_TAG: usize = 128;

/// The name of an image in a registry.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reference {
    host: String,
    repository: String,
    tag: Option<String>,
    digest: Option<Digest>,
}

/// Text that is not a [`Reference`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} does not name an image in a registry: {fault}")]
pub struct ReferenceError {
    text: String,
    fault: &'static str,
}

impl ReferenceError {
    /// The way out.
    pub fn hint(&self) -> String {
        "write the registry's host in full, as in registry.example.com/team/gpt:1.0".to_owned()
    }
}

impl Reference {
    /// Host, and port where it is not the usual one.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Name within the registry.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// What the registry is asked for: the digest, or else the tag.
    pub fn version(&self) -> String {
        self.digest.map_or_else(|| self.tag().to_owned(), |digest| digest.to_string())
    }

    /// The tag; [`DEFAULT_TAG`] where none is named.
    pub fn tag(&self) -> &str {
        self.tag.as_deref().unwrap_or(DEFAULT_TAG)
    }

    /// The tag, where one is named, or nothing else is.
    pub fn named_tag(&self) -> Option<&str> {
        self.tag.as_deref().or(self.digest.is_none().then_some(DEFAULT_TAG))
    }

    /// The digest, where one is named.
    pub const fn digest(&self) -> Option<Digest> {
        self.digest
    }

    /// The same repository's image of this digest.
    #[must_use]
    pub fn at(&self, digest: Digest) -> Self {
        Self { tag: None, digest: Some(digest), ..self.clone() }
    }

    /// Whether the host is this machine, so that what is sent cannot be read on the way.
    pub fn is_loopback(&self) -> bool {
        let name = match self.host.rsplit_once(':') {
            Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
            _ => &self.host,
        };
        let v6 = name.strip_prefix('[').and_then(|name| name.strip_suffix(']'));
        name == "localhost"
            || name.ends_with(".localhost")
            || name.parse().is_ok_and(|address: Ipv4Addr| address.is_loopback())
            || v6.and_then(|name| name.parse().ok()).is_some_and(|address: Ipv6Addr| address.is_loopback())
    }
}

impl FromStr for Reference {
    type Err = ReferenceError;

    fn from_str(text: &str) -> Result<Self, ReferenceError> {
        let wrong = |fault| ReferenceError { text: text.to_owned(), fault };
        if text.contains("://") {
            return Err(wrong("it is an address; a reference has no scheme"));
        }
        let (rest, digest) = match text.split_once('@') {
            Some((rest, digest)) => {
                let digest = digest
                    .parse()
                    .map_err(|_| wrong("after @ comes sha256: and 64 lower-case hex digits"))?;
                (rest, Some(digest))
            }
            None => (text, None),
        };
        let (host, path) = rest.split_once('/').ok_or_else(|| wrong("it has no registry host"))?;
        // The rule by which docker and podman tell a host from the first part of a name.
        if !host.contains(['.', ':']) && host != "localhost" {
            return Err(wrong("it has no registry host"));
        }
        if !is_host(host) {
            return Err(wrong("its host is not a host name or address, with a port or without"));
        }
        let (repository, tag) = match path.split_once(':') {
            Some((repository, tag)) => (repository, Some(tag.to_owned())),
            None => (path, None),
        };
        if !is_repository(repository) {
            return Err(wrong(
                "a name is lower-case letters and digits in parts between slashes, with single . _ or - inside them",
            ));
        }
        if host.len() + 1 + repository.len() > LONGEST_NAME {
            return Err(wrong("host and name have more than 255 bytes"));
        }
        if tag.as_deref().is_some_and(|tag| !is_tag(tag)) {
            return Err(wrong(
                "a tag is up to 128 letters, digits, _ . or -, and does not begin with . or -",
            ));
        }
        Ok(Self { host: host.to_owned(), repository: repository.to_owned(), tag, digest })
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.host, self.repository)?;
        if let Some(tag) = self.named_tag() {
            write!(f, ":{tag}")?;
        }
        self.digest.map_or(Ok(()), |digest| write!(f, "@{digest}"))
    }
}

fn is_host(host: &str) -> bool {
    let (name, port) = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, rest)) => {
            if address.parse::<Ipv6Addr>().is_err() {
                return false;
            }
            ("v6", if rest.is_empty() { None } else { rest.strip_prefix(':').or(Some("")) })
        }
        None => host.split_once(':').map_or((host, None), |(name, port)| (name, Some(port))),
    };
    let is_label = |label: &str| {
        let inside = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        !label.is_empty() && label.bytes().all(inside) && !label.starts_with('-') && !label.ends_with('-')
    };
    name.split('.').all(is_label)
        && port.is_none_or(|port| {
            !port.is_empty()
                && port.bytes().all(|byte| byte.is_ascii_digit())
                && port.parse::<u16>().is_ok_and(|port| port > 0)
        })
}

/// Whether this is a name within a registry.
pub(super) fn is_repository(name: &str) -> bool {
    name.split('/').all(|part| {
        // Letters and digits, with separators between them: one dot, one or two underscores, any number of dashes.
        part.split(|letter: char| !matches!(letter, '.' | '_' | '-'))
            .filter(|separator| !separator.is_empty())
            .all(|separator| {
                matches!(separator, "." | "_" | "__") || separator.bytes().all(|byte| byte == b'-')
            })
            && part.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'-'))
            && part.starts_with(|letter: char| letter.is_ascii_alphanumeric())
            && part.ends_with(|letter: char| letter.is_ascii_alphanumeric())
    })
}

/// Whether this is a tag.
pub(crate) fn is_tag(tag: &str) -> bool {
    tag.len() <= LONGEST_TAG
        && tag.starts_with(|letter: char| letter.is_ascii_alphanumeric() || letter == '_')
        && tag.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_reference() {
        let digest = Digest::of(b"x");
        for (text, host, repository, version, shown) in [
            ("reg.example.com/a/b:1", "reg.example.com", "a/b", "1", None),
            ("localhost/a", "localhost", "a", "latest", Some("localhost/a:latest")),
            ("127.0.0.1:5000/a__b/c-d--e.f:v1_.-", "127.0.0.1:5000", "a__b/c-d--e.f", "v1_.-", None),
            ("[::1]:5000/a:1", "[::1]:5000", "a", "1", None),
            ("[::1]/a:1", "[::1]", "a", "1", None),
            ("host:1/a:1", "host:1", "a", "1", None),
            (&format!("h.x/a@{digest}"), "h.x", "a", &digest.to_string(), None),
            (&format!("h.x/a:t@{digest}"), "h.x", "a", &digest.to_string(), None),
        ] {
            let read: Reference = text.parse().unwrap();
            assert_eq!(
                (read.host(), read.repository(), read.version().as_str()),
                (host, repository, version)
            );
            assert_eq!(read.to_string(), shown.unwrap_or(text));
        }
    }

    #[test]
    fn what_is_no_reference_is_refused() {
        let long = format!("h.x/{}", "a".repeat(252));
        let tag = format!("h.x/a:{}", "t".repeat(129));
        for (text, fault) in [
            ("ubuntu", "no registry host"),
            ("ubuntu:24.04", "no registry host"),
            ("library/ubuntu", "no registry host"),
            ("https://h.x/a", "no scheme"),
            ("h.x/", "a name is"),
            ("h.x/A", "a name is"),
            ("h.x/a//b", "a name is"),
            ("h.x/a..b", "a name is"),
            ("h.x/a___b", "a name is"),
            ("h.x/a-_b", "a name is"),
            ("h.x/-a", "a name is"),
            ("h.x/a/../b", "a name is"),
            ("h.x/a b", "a name is"),
            ("h.x/a?b=c", "a name is"),
            (&long, "255"),
            ("h.x/a:", "a tag is"),
            ("h.x/a:.t", "a tag is"),
            ("h.x/a:t:u", "a tag is"),
            (&tag, "a tag is"),
            ("h.x/a@sha256:12", "64 lower-case"),
            ("h.x/a@sha512:12", "64 lower-case"),
            ("user:secret@h.x/a", "64 lower-case"),
            ("h.x:/a", "its host"),
            ("h.x:0/a", "its host"),
            ("h.x:70000/a", "its host"),
            ("h..x/a", "its host"),
            ("-h.x/a", "its host"),
            ("h.x#/a", "its host"),
            ("[::g]:1/a", "its host"),
            ("[::1]5/a", "its host"),
        ] {
            let error = text.parse::<Reference>().unwrap_err();
            assert!(error.to_string().contains(fault), "{text}: {error}");
            assert!(error.hint().contains("in full"));
        }
    }

    #[test]
    fn loopback_is_told_from_what_looks_like_it() {
        for (text, loopback) in [
            ("localhost/a", true),
            ("localhost:5000/a", true),
            ("registry.localhost/a", true),
            ("127.8.0.1:5000/a", true),
            ("[::1]:5000/a", true),
            ("localhost.example.com/a", false),
            ("127.0.0.1.example.com/a", false),
            ("10.0.0.1/a", false),
            ("[::2]/a", false),
        ] {
            assert_eq!(text.parse::<Reference>().unwrap().is_loopback(), loopback, "{text}");
        }
    }
}
