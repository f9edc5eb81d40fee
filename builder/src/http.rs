//! Reading from package servers: bounded, with timeouts, and again after failures that pass.
//!
//! Credentials in an address are sent to that address's host and are never part of an error, an event or a file.
//! Caching is left to the store, and what a page means to its index.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::io::{self, Read, Write};
use std::rc::Rc;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use backon::{BlockingRetryable, ExponentialBuilder};
use ureq::http::{HeaderMap, Request, Response};
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{AsSendBody, ResponseExt, SendBody};
use url::Url;

use crate::progress::{Event, Progress};

/// A server that is there answers a connection much faster than this.
const CONNECT_PATIENCE: Duration = Duration::from_secs(10);
/// A server that wants to be left alone for longer than this is asked again nevertheless.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// How servers are reached.
#[derive(Clone)]
pub struct Network {
    /// Certificates that servers are checked against; empty to use those built in.
    pub roots: Arc<Vec<Certificate<'static>>>,
    /// Proxy.
    pub proxy: Option<ureq::Proxy>,
    /// How long a server may stay silent.
    pub patience: Duration,
    /// How often a failure that may pass is tried again.
    pub retries: usize,
    /// Wait before the first retry; it doubles each time.
    pub retry_delay: Duration,
}

impl fmt::Debug for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Network")
            .field("roots", &self.roots.len())
            .field("proxy", &self.proxy.is_some())
            .field("patience", &self.patience)
            .field("retries", &self.retries)
            .finish_non_exhaustive()
    }
}

impl Network {
    /// The machine's own certificates (`SSL_CERT_FILE`, `PIP_CERT` or the system's) and proxy.
    pub(crate) fn from_environment(environment: &BTreeMap<OsString, OsString>) -> Self {
        // Unreadable certificates leave fewer roots, and then servers are refused rather than trusted.
        let mut roots: Vec<_> = rustls_native_certs::load_native_certs()
            .certs
            .iter()
            .map(|cert| Certificate::from_der(cert).to_owned())
            .collect();
        if let Some(pem) =
            environment.get(&OsString::from("PIP_CERT")).and_then(|path| fs_err::read(path).ok())
        {
            roots.extend(parse_pem(&pem).filter_map(|item| match item {
                Ok(PemItem::Certificate(cert)) => Some(cert),
                _ => None,
            }));
        }
        Self { roots: Arc::new(roots), proxy: ureq::Proxy::try_from_env(), ..Self::default() }
    }
}

impl Default for Network {
    fn default() -> Self {
        Self {
            roots: Arc::new(Vec::new()),
            proxy: None,
            patience: Duration::from_secs(30),
            retries: 3,
            retry_delay: Duration::from_millis(300),
        }
    }
}

/// The address of something on a server, apart from the credentials that it needs.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Endpoint {
    url: Url,
    authorization: Option<String>,
}

impl Endpoint {
    /// Takes the credentials out of `url`.
    pub fn new(mut url: Url) -> Self {
        let authorization = (!url.username().is_empty()).then(|| {
            let plain =
                |text: &str| percent_encoding::percent_decode_str(text).decode_utf8_lossy().into_owned();
            let pair = format!("{}:{}", plain(url.username()), plain(url.password().unwrap_or("")));
            use base64::Engine as _;
            format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(pair))
        });
        // Both fail only on addresses without a host, which hold no credentials either.
        let _ = url.set_username("");
        let _ = url.set_password(None);
        Self { url, authorization }
    }

    /// The address of `reference`, which may be relative to this one. Credentials stay with their host.
    ///
    /// # Errors
    /// When `reference` is not an address.
    pub fn join(&self, reference: &str) -> Result<Self, url::ParseError> {
        let joined = Self::new(self.url.join(reference)?);
        let same_host = joined.url.origin() == self.url.origin();
        Ok(Self {
            authorization: joined
                .authorization
                .or_else(|| same_host.then(|| self.authorization.clone()).flatten()),
            ..joined
        })
    }

    /// This address as a folder, so that [`Endpoint::join`] appends to it.
    pub fn folder(mut self) -> Self {
        if !self.url.path().ends_with('/') {
            let path = format!("{}/", self.url.path());
            self.url.set_path(&path);
        }
        self
    }

    /// The address without credentials.
    pub fn url(&self) -> &Url {
        &self.url
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.url, f)
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Endpoint({})", self.url)
    }
}

/// Why a server's answer could not be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The server answered with an error.
    #[error("{url} answered with status {status}")]
    Status {
        /// Address without credentials.
        url: String,
        /// HTTP status.
        status: u16,
        /// How long the server wants to be left alone.
        retry_after: Option<Duration>,
    },
    /// No answer, or it broke off.
    #[error("{url} could not be read: {source}")]
    Transport {
        /// Address without credentials.
        url: String,
        /// What went wrong.
        source: Box<ureq::Error>,
    },
    /// The answer's body broke off.
    #[error("{url} broke off after {received} bytes: {source}")]
    Body {
        /// Address without credentials.
        url: String,
        /// Bytes that had arrived.
        received: u64,
        /// What went wrong.
        source: io::Error,
    },
    /// The answer is larger than what was asked for can be.
    #[error("{url} sends more than the {limit} bytes that were expected")]
    TooLarge {
        /// Address without credentials.
        url: String,
        /// Bytes expected at most.
        limit: u64,
    },
    /// What arrived could not be written.
    #[error("what {url} sent could not be written: {source}")]
    Sink {
        /// Address without credentials.
        url: String,
        /// What went wrong.
        source: io::Error,
    },
}

impl Error {
    /// Whether the server does not have what was asked for.
    pub(crate) const fn is_absent(&self) -> bool {
        matches!(self, Self::Status { status: 404 | 410 | 403, .. })
    }

    /// The least time after which it makes sense to try again, where it does.
    pub(crate) fn passes(&self) -> Option<Duration> {
        match self {
            Self::Status { status, retry_after, .. } => {
                status_passes(*status).then(|| retry_after.unwrap_or_default())
            }
            other => other.may_pass().then_some(Duration::ZERO),
        }
    }

    fn may_pass(&self) -> bool {
        match self {
            Self::Status { status, .. } => status_passes(*status),
            Self::Transport { source, .. } => match **source {
                // A firewall that swallows packets will do so again, at the same length.
                ureq::Error::Timeout(ureq::Timeout::Connect) => false,
                ureq::Error::Io(_)
                | ureq::Error::Timeout(_)
                | ureq::Error::ConnectionFailed
                | ureq::Error::Protocol(_) => true,
                _ => false,
            },
            Self::Body { .. } => true,
            Self::TooLarge { .. } | Self::Sink { .. } => false,
        }
    }
}

/// Whether an answer with this status may be another one soon.
pub(crate) const fn status_passes(status: u16) -> bool {
    matches!(status, 408 | 425 | 429 | 500..=599)
}

/// How long a server wants to be left alone, where it says so in seconds. A date, which only a clock could tell, is not
/// read.
pub(crate) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get("retry-after")?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds).min(LONGEST_WAIT))
}

/// A small answer, read whole.
#[derive(Debug)]
pub(crate) struct Page {
    /// Where it came from after redirects.
    pub(crate) endpoint: Endpoint,
    /// Media type.
    pub(crate) media_type: String,
    /// Body.
    pub(crate) body: Vec<u8>,
}

/// A place that a download can be written to more than once.
pub(crate) trait Sink: Write {
    /// Forgets what was written so far.
    ///
    /// # Errors
    /// When the place cannot be emptied.
    fn restart(&mut self) -> io::Result<()>;
}

/// A client for package servers.
#[derive(Debug)]
pub(crate) struct Client {
    agent: ureq::Agent,
    policy: ExponentialBuilder,
    patience: Duration,
}

impl Client {
    pub(crate) fn new(network: &Network) -> Self {
        let roots = if network.roots.is_empty() {
            RootCerts::WebPki
        } else {
            RootCerts::Specific(Arc::clone(&network.roots))
        };
        let agent = ureq::Agent::config_builder()
            .tls_config(TlsConfig::builder().root_certs(roots).build())
            .proxy(network.proxy.clone())
            .http_status_as_error(false)
            .timeout_connect(Some(network.patience.min(CONNECT_PATIENCE)))
            .timeout_recv_response(Some(network.patience))
            .timeout_per_read(Some(network.patience))
            .timeout_per_write(Some(network.patience))
            .user_agent(concat!("trainyard/", env!("CARGO_PKG_VERSION")))
            .build()
            .new_agent();
        let policy =
            ExponentialBuilder::new().with_min_delay(network.retry_delay).with_max_times(network.retries);
        Self { agent, policy, patience: network.patience }
    }

    /// Sends one request as it is, and waits for its answer `patience` times as long as usual. No redirect is followed,
    /// and no status is an error.
    pub(crate) fn send(
        &self,
        request: Request<()>,
        body: Option<&mut dyn Read>,
        patience: u32,
    ) -> Result<Response<ureq::Body>, Error> {
        // A query may hold a signature that lets its bearer in.
        let url = request.uri().to_string();
        let url = url.split('?').next().unwrap_or_default().to_owned();
        let sent = match body {
            None => self.agent.run(self.once(request, patience)),
            Some(body) => self.agent.run(self.once(request.map(|()| SendBody::from_reader(body)), patience)),
        };
        sent.map_err(|source| Error::Transport { url, source: Box::new(source) })
    }

    fn once<B: AsSendBody>(&self, request: Request<B>, patience: u32) -> Request<B> {
        self.agent
            .configure_request(request)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_recv_response(Some(self.patience * patience))
            .build()
    }

    /// Reads a page of at most `limit` bytes.
    pub(crate) fn page(
        &self,
        endpoint: &Endpoint,
        accept: &str,
        limit: u64,
        progress: Progress<'_>,
    ) -> Result<Page, Error> {
        self.retrying(endpoint, progress, || {
            let mut response = self.ask(endpoint, accept)?;
            let media_type = response
                .headers()
                .get("content-type")
                .and_then(|value| value.to_str().ok())
                .map(|value| value.split(';').next().unwrap_or("").trim().to_ascii_lowercase())
                .unwrap_or_default();
            let reached =
                Url::parse(&response.get_uri().to_string()).map_or_else(|_| endpoint.clone(), Endpoint::new);
            let mut body = Vec::new();
            let mut reader = response.body_mut().as_reader().take(limit + 1);
            reader.read_to_end(&mut body).map_err(|source| Error::Body {
                url: endpoint.to_string(),
                received: 0,
                source,
            })?;
            if body.len() as u64 > limit {
                return Err(Error::TooLarge { url: endpoint.to_string(), limit });
            }
            Ok(Page {
                endpoint: if reached.url.origin() == endpoint.url.origin() {
                    Endpoint { authorization: endpoint.authorization.clone(), ..reached }
                } else {
                    reached
                },
                media_type,
                body,
            })
        })
    }

    /// Writes what is at `endpoint`, at most `limit` bytes, into `sink`.
    pub(crate) fn download(
        &self,
        endpoint: &Endpoint,
        file: &str,
        limit: u64,
        sink: &mut dyn Sink,
        progress: Progress<'_>,
    ) -> Result<(), Error> {
        let url = || endpoint.to_string();
        self.retrying(endpoint, progress, || {
            sink.restart().map_err(|source| Error::Sink { url: url(), source })?;
            let mut response = self.ask(endpoint, "*/*")?;
            let size = response.body().content_length();
            if size.is_some_and(|size| size > limit) {
                return Err(Error::TooLarge { url: url(), limit });
            }
            let mut reader = response.body_mut().as_reader();
            let mut buffer = vec![0; 1 << 16];
            let mut received = 0;
            loop {
                let read = match reader.read(&mut buffer) {
                    Ok(0) => break,
                    Ok(read) => read,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(source) => {
                        return Err(Error::Body { url: url(), received, source });
                    }
                };
                received += read as u64;
                if received > limit {
                    return Err(Error::TooLarge { url: url(), limit });
                }
                sink.write_all(&buffer[..read]).map_err(|source| Error::Sink { url: url(), source })?;
                progress(Event::Downloading { file: file.to_owned(), received, size });
            }
            Ok(())
        })
    }

    fn ask(&self, endpoint: &Endpoint, accept: &str) -> Result<Response<ureq::Body>, Error> {
        let mut request = self
            .agent
            .get(endpoint.url.as_str())
            .header("accept", accept)
            // What is hashed and bounded is the file itself, so it must not arrive in another coding.
            .header("accept-encoding", "identity");
        if let Some(authorization) = &endpoint.authorization {
            request = request.header("authorization", authorization);
        }
        let response = request
            .call()
            .map_err(|source| Error::Transport { url: endpoint.to_string(), source: Box::new(source) })?;
        let status = response.status().as_u16();
        if response.status().is_success() {
            Ok(response)
        } else {
            let retry_after = retry_after(response.headers());
            Err(Error::Status { url: endpoint.to_string(), status, retry_after })
        }
    }

    fn retrying<T>(
        &self,
        endpoint: &Endpoint,
        progress: Progress<'_>,
        attempt: impl FnMut() -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.again(&endpoint.to_string(), progress, Error::passes, attempt)
    }

    /// Makes an attempt at `what`, and more of them after failures that pass: those for which `passes` gives the least
    /// time to wait.
    pub(crate) fn again<T, E: fmt::Display>(
        &self,
        what: &str,
        progress: Progress<'_>,
        passes: impl Fn(&E) -> Option<Duration>,
        attempt: impl FnMut() -> Result<T, E>,
    ) -> Result<T, E> {
        let asked = Rc::new(Cell::new(Duration::ZERO));
        let least = Rc::clone(&asked);
        attempt
            .retry(self.policy)
            .sleep(move |delay: Duration| thread::sleep(delay.max(least.get())))
            .when(|error| passes(error).is_some())
            .notify(|error, _| {
                asked.set(passes(error).unwrap_or_default());
                progress(Event::Retrying { file: what.to_owned(), reason: error.to_string() });
            })
            .call()
    }
}
