//! A real HTTP server on loopback that answers as a test tells it to.

use std::io::Write;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use tiny_http::{Header, Response, Server as Http};
use trainyard_spec::Digest;

/// An answer.
pub(crate) enum Answer {
    /// A body of a media type.
    Body(&'static str, Vec<u8>),
    /// An error.
    Status(u16),
    /// A body that breaks off after some bytes.
    Broken { says: usize, sends: Vec<u8> },
    /// A body that stops after some bytes, with the connection left open.
    Stalled { says: usize, sends: Vec<u8> },
    /// A body with the address of the next part of a list.
    Paged { body: Vec<u8>, next: String },
    /// Another address.
    Redirect(String),
}

/// A request as the server saw it.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) path: String,
    pub(crate) authorization: Option<String>,
}

pub(crate) struct Server {
    address: SocketAddr,
    http: Arc<Http>,
    seen: Arc<Mutex<Vec<Seen>>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Answers the request for a path, of which so many came before.
    pub(crate) fn start(answer: impl Fn(&str, usize) -> Answer + Send + Sync + 'static) -> Self {
        let http = Arc::new(Http::http("127.0.0.1:0").unwrap());
        let address = http.server_addr().to_ip().unwrap();
        let seen = Arc::new(Mutex::new(Vec::<Seen>::new()));
        let answer = Arc::new(answer);
        let thread = std::thread::spawn({
            let (http, seen) = (Arc::clone(&http), Arc::clone(&seen));
            move || {
                for request in http.incoming_requests() {
                    let path = request.url().to_owned();
                    let authorization =
                        request.headers().iter().find(|header| header.field.equiv("authorization"));
                    let authorization = authorization.map(|header| header.value.to_string());
                    let before = {
                        let mut seen = seen.lock().unwrap();
                        let before = seen.iter().filter(|one| one.path == path).count();
                        seen.push(Seen { path: path.clone(), authorization });
                        before
                    };
                    let answer = Arc::clone(&answer);
                    // One that stalls must not keep the others waiting.
                    std::thread::spawn(move || reply(request, answer(&path, before)));
                }
            }
        });
        Self { address, http, seen, thread: Some(thread) }
    }

    /// A server of `demo` with one source archive, in the JSON form of the index.
    pub(crate) fn of_demo(sdist: Vec<u8>) -> Self {
        let digest = Digest::of(&sdist).hex();
        Self::start(move |path, _| match path {
            "/simple/demo/" => Answer::Body("application/vnd.pypi.simple.v1+json", project(&digest)),
            "/files/demo-1.0.tar.gz" => Answer::Body("application/gzip", sdist.clone()),
            _ => Answer::Status(404),
        })
    }

    pub(crate) fn index(&self) -> String {
        format!("http://{}/simple", self.address)
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub(crate) fn index_for(&self, user: &str, password: &str) -> String {
        format!("http://{user}:{password}@{}/simple", self.address)
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    pub(crate) fn count(&self, path: &str) -> usize {
        self.seen().iter().filter(|one| one.path == path).count()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.http.unblock();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The index's page of `demo`, with this digest for its file.
pub(crate) fn project(hex: &str) -> Vec<u8> {
    format!(
        r#"{{"meta":{{"api-version":"1.1"}},"name":"demo","files":[
            {{"filename":"demo-0.9.tar.gz","url":"../../files/demo-0.9.tar.gz","hashes":{{}}}},
            {{"filename":"demo-1.0.tar.gz","url":"../../files/demo-1.0.tar.gz","hashes":{{"sha256":"{hex}"}}}}]}}"#
    )
    .into_bytes()
}

fn reply(request: tiny_http::Request, answer: Answer) {
    let header = |name: &str, value: &str| Header::from_bytes(name, value).unwrap();
    // A client that hangs up early is what some tests are about.
    let _ = match answer {
        Answer::Body(kind, body) => {
            request.respond(Response::from_data(body).with_header(header("content-type", kind)))
        }
        Answer::Status(status) => request.respond(Response::empty(status)),
        Answer::Paged { body, next } => {
            let link = format!("<{next}>; rel=\"next\"");
            request.respond(Response::from_data(body).with_header(header("link", &link)))
        }
        Answer::Redirect(to) => request.respond(Response::empty(302).with_header(header("location", &to))),
        Answer::Broken { says, sends } => partial(request, says, &sends).map(drop),
        Answer::Stalled { says, sends } => partial(request, says, &sends).map(|connection| {
            std::thread::sleep(std::time::Duration::from_secs(30));
            drop(connection);
        }),
    };
}

fn partial(request: tiny_http::Request, says: usize, sends: &[u8]) -> std::io::Result<Box<dyn Write + Send>> {
    let mut connection = request.into_writer();
    write!(connection, "HTTP/1.1 200 OK\r\ncontent-length: {says}\r\nconnection: close\r\n\r\n")?;
    connection.write_all(sends)?;
    connection.flush()?;
    Ok(connection)
}
