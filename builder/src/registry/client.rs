//! One repository of a registry: how it is spoken to, and requests with authentication, redirects and bounds.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use ureq::http::{HeaderMap, Method, Request, Response};
use url::Url;

use super::auth::{Auth, Scope};
use super::reference::Reference;
use super::{Error, LARGEST_MANIFEST};
use crate::http::{self, Client};
use crate::progress::Progress;
use crate::settings::Settings;
use crate::store::Store;

const MOST_REDIRECTS: usize = 5;
/// Most bytes of an error's document.
const LARGEST_ERROR: u64 = 1 << 14;
/// Most letters of an error's message that are shown.
const LONGEST_MESSAGE: usize = 300;
/// A registry that puts a large blob in its place may take this many times longer than usual to answer.
pub(super) const SLOW: u32 = 10;

/// How a registry is used.
#[derive(Debug, Clone)]
pub struct Options {
    /// Speak plain HTTP. This machine's own registries are spoken to in either way.
    pub plain_http: bool,
    /// Blobs that are moved at a time.
    pub at_once: usize,
    /// Most bytes of a blob in one request. Many registries take a blob in one piece only, so this is a matter of the
    /// registries that do not.
    pub chunk: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { plain_http: false, at_once: 4, chunk: u64::MAX }
    }
}

/// A repository of a registry that has answered.
pub struct Repository {
    pub(super) reference: Reference,
    pub(super) options: Options,
    pub(super) http: Client,
    pub(super) store: Store,
    auth: Auth,
    base: Url,
    /// Whether it is spoken to without TLS, and may refer to addresses without TLS.
    plain: bool,
}

/// A request.
pub(super) struct Ask<'a> {
    pub(super) method: Method,
    pub(super) url: &'a Url,
    pub(super) headers: &'a [(&'a str, &'a str)],
    pub(super) body: Body<'a>,
    pub(super) scope: Scope<'a>,
    /// How many times longer than usual the answer is waited for.
    pub(super) patience: u32,
}

/// What is sent with a request.
#[derive(Clone, Copy)]
pub(super) enum Body<'a> {
    None,
    Bytes(&'a [u8]),
    /// Part of a file, from an offset on.
    Section {
        file: &'a File,
        offset: u64,
        length: u64,
        /// Told how far into the file the body has been read; may end the request.
        reached: &'a dyn Fn(u64) -> io::Result<()>,
    },
}

impl<'a> Ask<'a> {
    pub(super) fn get(url: &'a Url, headers: &'a [(&'a str, &'a str)]) -> Self {
        Self { method: Method::GET, url, headers, body: Body::None, scope: Scope::Pull, patience: 1 }
    }
}

/// An answer whose status is a success.
pub(super) struct Answer {
    /// Where it came from after redirects.
    pub(super) url: Url,
    pub(super) response: Response<ureq::Body>,
}

impl Repository {
    /// Finds out how the registry of `reference` is spoken to.
    ///
    /// # Errors
    /// When it does not answer, or not as a registry does.
    pub fn connect(
        reference: &Reference,
        settings: &Settings,
        options: Options,
        progress: Progress<'_>,
    ) -> Result<Self, Error> {
        if settings.offline {
            return Err(Error::Offline { reference: reference.to_string() });
        }
        let either = reference.is_loopback() && !options.plain_http;
        let usual = if reference.is_loopback() || options.plain_http { "http" } else { "https" };
        // A proxy would look for this machine's own registry on itself.
        let proxy = settings.network.proxy.clone().filter(|_| !reference.is_loopback());
        let network = http::Network { proxy, ..settings.network.clone() };
        let over = |scheme: &str| {
            let plain = scheme == "http";
            let url = format!("{scheme}://{}/", reference.host());
            let base = Url::parse(&url).map_err(|error| Error::Answer { url, message: error.to_string() })?;
            let credentials = settings.credentials.clone();
            Ok::<_, Error>(Self {
                reference: reference.clone(),
                options: options.clone(),
                http: Client::new(&network),
                store: Store::new(&settings.cache),
                auth: Auth::new(reference.host(), reference.repository(), plain, credentials),
                base,
                plain,
            })
        };
        let repository = over(usual)?;
        match repository.greet(progress) {
            // A server of this machine that speaks TLS says so, or hangs up.
            Err(plainly @ (Error::NoRegistry { status: 400, .. } | Error::Http(_))) if either => {
                let with_tls = over("https")?;
                match with_tls.greet(progress) {
                    Ok(()) => Ok(with_tls),
                    Err(error) => Err(if matches!(plainly, Error::Http(_)) { plainly } else { error }),
                }
            }
            Err(error) => Err(error),
            Ok(()) => Ok(repository),
        }
    }

    /// What it was connected for.
    pub fn reference(&self) -> &Reference {
        &self.reference
    }

    /// Asks whether this is a registry, and how it wants to be shown who asks.
    fn greet(&self, progress: Progress<'_>) -> Result<(), Error> {
        let url = self.address(&["v2", ""]);
        let response = self.http.again(self.reference.host(), progress, Error::passes, || {
            let request = Request::get(url.as_str()).body(()).map_err(|_| request_fault(&url))?;
            let mut response = self.http.send(request, None, 1)?;
            let status = response.status().as_u16();
            if http::status_passes(status) { Err(refused(&url, &mut response)) } else { Ok(response) }
        })?;
        match response.status().as_u16() {
            200..=299 => Ok(()),
            401 => self.auth.challenged(&url, response.headers(), None),
            // Some let only those in who show who they are with each request; then that request says what is wrong.
            403 => Ok(()),
            status => Err(Error::NoRegistry { url: without_query(&url), status }),
        }
    }

    /// The address of something in this repository.
    pub(super) fn url(&self, kind: &str, what: &str) -> Url {
        let parts = ["v2"].into_iter().chain(self.reference.repository().split('/')).chain([kind]);
        let parts: Vec<&str> = parts.chain(what.split('/')).collect();
        self.address(&parts)
    }

    fn address(&self, parts: &[&str]) -> Url {
        let mut url = self.base.clone();
        url.set_path(&parts.join("/"));
        url
    }

    /// Where an answer refers to.
    pub(super) fn refers(&self, from: &Url, to: &str) -> Result<Url, Error> {
        let place = |to: &str, message| Error::Place { url: without_query(from), to: to.to_owned(), message };
        let mut url = from.join(to).map_err(|_| place("", "which is no address"))?;
        // Credentials of the answer's choice are nobody's.
        let _ = url.set_username("");
        let _ = url.set_password(None);
        url.set_fragment(None);
        match url.scheme() {
            "https" => Ok(url),
            "http" if self.plain => Ok(url),
            "http" => Err(place(&without_query(&url), "which is not over TLS")),
            _ => Err(place(&without_query(&url), "which is neither HTTPS nor HTTP")),
        }
    }

    /// Sends a request, shows who asks where that is wanted, and follows redirects of requests that only read.
    pub(super) fn send(&self, ask: &Ask<'_>) -> Result<Answer, Error> {
        let mut url = ask.url.clone();
        let mut redirects = 0;
        let mut challenged = false;
        loop {
            // Storage that a registry refers to has its own ways, and must not see what the registry is shown.
            let own = url.origin() == self.base.origin();
            let authorization = if own { self.auth.authorization(&self.http, ask.scope)? } else { None };
            let mut response = ask.send(&url, authorization.as_deref(), &self.http)?;
            let status = response.status().as_u16();
            match status {
                200..=299 => return Ok(Answer { url, response }),
                401 if own && challenged => return Err(self.auth.unauthorized(self.auth.has_credential())),
                401 if own => {
                    challenged = true;
                    self.auth.challenged(&url, response.headers(), authorization.as_deref())?;
                }
                301 | 302 | 303 | 307 | 308 if matches!(ask.method, Method::GET | Method::HEAD) => {
                    redirects += 1;
                    if redirects > MOST_REDIRECTS {
                        let message = format!("it redirects more than {MOST_REDIRECTS} times");
                        return Err(Error::Answer { url: without_query(&url), message });
                    }
                    url = self.refers(&url, &location(&url, response.headers())?)?;
                }
                _ => return Err(refused(&url, &mut response)),
            }
        }
    }

    /// As [`Repository::send`], and again after failures that pass.
    pub(super) fn send_again(&self, ask: &Ask<'_>, progress: Progress<'_>) -> Result<Answer, Error> {
        self.http.again(&without_query(ask.url), progress, Error::passes, || self.send(ask))
    }

    /// A small document, with its media type as the server gives it.
    pub(super) fn document(&self, ask: &Ask<'_>, progress: Progress<'_>) -> Result<(Vec<u8>, Answer), Error> {
        self.http.again(&without_query(ask.url), progress, Error::passes, || {
            let mut answer = self.send(ask)?;
            let bytes = answer.read(LARGEST_MANIFEST)?;
            Ok((bytes, answer))
        })
    }
}

impl Ask<'_> {
    fn send(
        &self,
        url: &Url,
        authorization: Option<&str>,
        client: &Client,
    ) -> Result<Response<ureq::Body>, Error> {
        let mut request = Request::builder()
            .method(self.method.clone())
            .uri(url.as_str())
            // What is hashed and bounded is the blob itself, so it must not arrive in another coding.
            .header("accept-encoding", "identity");
        for (name, value) in self.headers {
            request = request.header(*name, *value);
        }
        if let Some(authorization) = authorization {
            request = request.header("authorization", authorization);
        }
        let (mut bytes, mut section);
        let (length, body): (u64, Option<&mut dyn Read>) = match self.body {
            Body::None => (0, None),
            Body::Bytes(all) => {
                bytes = all;
                (all.len() as u64, Some(&mut bytes))
            }
            Body::Section { file, offset, length, reached } => {
                section = Section { file, at: offset, end: offset + length, reached };
                (length, Some(&mut section))
            }
        };
        if !matches!(self.method, Method::GET | Method::HEAD) {
            request = request.header("content-length", length);
        }
        let request = request.body(()).map_err(|_| request_fault(url))?;
        Ok(client.send(request, body, self.patience)?)
    }
}

impl Answer {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.response.headers().get(name)?.to_str().ok()
    }

    pub(super) fn location(&self) -> Result<String, Error> {
        location(&self.url, self.response.headers())
    }

    /// The whole body, of at most `limit` bytes.
    pub(super) fn read(&mut self, limit: u64) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::new();
        let read = self.response.body_mut().as_reader().take(limit + 1).read_to_end(&mut bytes);
        let (url, received) = (without_query(&self.url), bytes.len() as u64);
        read.map_err(|source| http::Error::Body { url: url.clone(), received, source })?;
        if received > limit {
            return Err(http::Error::TooLarge { url, limit }.into());
        }
        Ok(bytes)
    }
}

/// Part of a file as the body of a request.
struct Section<'a> {
    file: &'a File,
    at: u64,
    end: u64,
    reached: &'a dyn Fn(u64) -> io::Result<()>,
}

impl Read for Section<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.end - self.at).unwrap_or(usize::MAX).min(buffer.len());
        let read = self.file.read_at(&mut buffer[..most], self.at)?;
        if read == 0 && most > 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file became shorter"));
        }
        self.at += read as u64;
        (self.reached)(self.at)?;
        Ok(read)
    }
}

fn location(url: &Url, headers: &HeaderMap) -> Result<String, Error> {
    let location = headers.get("location").and_then(|value| value.to_str().ok());
    location.map(str::to_owned).ok_or_else(|| Error::Answer {
        url: without_query(url),
        message: "it refers to another place and does not say which".to_owned(),
    })
}

/// An answer that is an error, with what its document says.
fn refused(url: &Url, response: &mut Response<ureq::Body>) -> Error {
    let mut bytes = Vec::new();
    // What says nothing, or breaks off, is an error all the same.
    let _ = response.body_mut().as_reader().take(LARGEST_ERROR).read_to_end(&mut bytes);
    Error::Refused {
        url: without_query(url),
        status: response.status().as_u16(),
        said: said(&bytes),
        retry_after: http::retry_after(response.headers()),
    }
}

/// What an error's document says (distribution specification, "Error Codes"), made printable.
fn said(document: &[u8]) -> String {
    let document: serde_json::Value = serde_json::from_slice(document).unwrap_or_default();
    let first = &document["errors"][0];
    let text = |key: &str| first[key].as_str().unwrap_or_default();
    let text = match (text("code"), text("message")) {
        ("", "") => return String::new(),
        (code, message) => format!("{code}: {message}"),
    };
    let text: String = text.chars().take(LONGEST_MESSAGE).collect();
    format!(", {text:?}")
}

/// An address for an error: a query may hold a signature that lets its bearer in.
pub(super) fn without_query(url: &Url) -> String {
    let mut url = url.clone();
    url.set_query(None);
    let _ = url.set_username("");
    let _ = url.set_password(None);
    url.to_string()
}

/// A request that cannot be made, which a part from outside must be to blame for. That part may be secret.
pub(super) fn request_fault(url: &Url) -> Error {
    Error::Answer {
        url: without_query(url),
        message: "an address or credential for it holds what no request may hold".to_owned(),
    }
}

/// Waiting is for failures that pass, and not for those that another transfer has caused.
pub(super) fn passes(error: &Error, stopped: bool) -> Option<Duration> {
    error.passes().filter(|_| !stopped)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_registry_says_is_short_and_printable() {
        let document = br#"{"errors": [{"code": "DENIED", "message": "no\u001b[2J \"way\"", "detail": {}}]}"#;
        assert_eq!(said(document), r#", "DENIED: no\u{1b}[2J \"way\"""#);
        let long = format!(r#"{{"errors": [{{"message": "{}"}}]}}"#, "x".repeat(5000));
        assert!(said(long.as_bytes()).len() < 400);
        for nothing in ["", "[]", "<html>", r#"{"errors": []}"#, r#"{"errors": [{"code": 1}]}"#] {
            assert_eq!(said(nothing.as_bytes()), "", "{nothing}");
        }
    }

    #[test]
    fn addresses_are_shown_without_what_lets_their_bearer_in() {
        let url = Url::parse("https://user:pass@h.x/a?X-Amz-Signature=secret").unwrap();
        assert_eq!(without_query(&url), "https://h.x/a");
    }
}
