//! A proxy between a client and a registry that does to each request what a test tells it to: at the level of
//! connections, so that what breaks is broken for real.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// What becomes of a request.
#[derive(Debug, Clone)]
pub(super) enum Fate {
    /// It goes through.
    Pass,
    /// The connection breaks after so many bytes of its body, and the registry hears nothing of it.
    Lost(usize),
    /// The connections break after so many bytes of its body, on both sides.
    Broken(usize),
    /// As before, and the registry keeps these bytes: it gets them as a request of their own, and is asked for them
    /// under the address that the client knows.
    Kept(usize),
    /// The registry does it, and its answer is lost.
    Unanswered,
    /// The connection breaks after so many bytes of the answer's body.
    Cut(usize),
    /// A byte of the answer's body becomes another.
    Changed(usize),
    /// It is answered with a status and headers, and the registry hears nothing of it.
    Status(u16, &'static str),
    /// It is answered with another address.
    Elsewhere(String),
}

/// A request as the proxy saw it.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    pub(super) method: String,
    /// Path and query.
    pub(super) path: String,
    pub(super) headers: Vec<(String, String)>,
    /// Which of the requests with this method and kind of path it is, from 0.
    pub(super) nth: usize,
}

impl Seen {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// Whether it is about this method and a path with this in it.
    pub(super) fn is(&self, method: &str, part: &str) -> bool {
        self.method == method && self.path.contains(part)
    }
}

pub(super) struct Proxy {
    pub(super) port: u16,
    seen: Arc<Mutex<Vec<Seen>>>,
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Proxy {
    /// A proxy before the registry at `port`.
    pub(super) fn start(registry: u16, fate: impl Fn(&Seen) -> Fate + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let end = Arc::new(AtomicBool::new(false));
        let fate = Arc::new(fate);
        let kept = Arc::new(Mutex::new(None));
        let thread = std::thread::spawn({
            let (seen, end) = (Arc::clone(&seen), Arc::clone(&end));
            move || {
                for client in listener.incoming() {
                    if end.load(Ordering::SeqCst) {
                        return;
                    }
                    let (seen, fate, kept) = (Arc::clone(&seen), Arc::clone(&fate), Arc::clone(&kept));
                    std::thread::spawn(move || serve(client.unwrap(), registry, &seen, &kept, &*fate));
                }
            }
        });
        Self { port, seen, end, thread: Some(thread) }
    }

    pub(super) fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    pub(super) fn count(&self, method: &str, part: &str) -> usize {
        self.seen().iter().filter(|one| one.is(method, part)).count()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.end.store(true, Ordering::SeqCst);
        // Wakes the thread that listens.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Serves one request of a connection. Connections that break are what tests are about.
fn serve(
    client: TcpStream,
    registry: u16,
    all: &Mutex<Vec<Seen>>,
    kept: &Mutex<Option<String>>,
    fate: &dyn Fn(&Seen) -> Fate,
) -> Option<()> {
    let mut reader = BufReader::new(client.try_clone().ok()?);
    let (first, headers) = head(&mut reader)?;
    let mut words = first.split(' ');
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let seen = {
        let mut all = all.lock().unwrap();
        let kind = |path: &str| {
            ["/uploads/", "/blobs/", "/manifests/", "/token", "/referrers/"]
                .into_iter()
                .find(|kind| path.contains(kind))
        };
        let nth = all.iter().filter(|one| one.method == method && kind(&one.path) == kind(&path)).count();
        let seen = Seen { method, path, headers, nth };
        all.push(seen.clone());
        seen
    };
    let length = seen.header("content-length").map_or(0, |length| length.parse().unwrap());
    let fate = fate(&seen);
    let limit = match fate {
        Fate::Lost(limit) | Fate::Broken(limit) | Fate::Kept(limit) => limit.min(length),
        _ => length,
    };
    let mut body = vec![0; limit];
    reader.read_exact(&mut body).ok()?;
    match fate {
        Fate::Lost(_) => return client.shutdown(Shutdown::Both).ok(),
        Fate::Status(status, headers) => return answer(&client, status, headers),
        Fate::Elsewhere(to) => return answer(&client, 307, &format!("location: {to}\r\n")),
        _ => {}
    }
    if seen.is("GET", "/uploads/")
        && let Some(headers) = kept.lock().unwrap().take()
    {
        return answer(&client, 204, &headers);
    }
    let mut upstream = TcpStream::connect(("127.0.0.1", registry)).ok()?;
    let mut request = format!("{first}\r\n");
    let own =
        |name: &str| name == "connection" || (name == "content-length" && matches!(fate, Fate::Kept(_)));
    if let Fate::Kept(_) = fate {
        request += &format!("content-length: {limit}\r\n");
    }
    for (name, value) in seen.headers.iter().filter(|(name, _)| !own(name)) {
        request += &format!("{name}: {value}\r\n");
    }
    request += "connection: close\r\n\r\n";
    upstream.write_all(request.as_bytes()).ok()?;
    upstream.write_all(&body).ok()?;
    if let Fate::Broken(_) = fate {
        // The registry has what was sent before the client can ask.
        std::thread::sleep(std::time::Duration::from_millis(50));
        upstream.shutdown(Shutdown::Both).ok()?;
        std::thread::sleep(std::time::Duration::from_millis(100));
        return client.shutdown(Shutdown::Both).ok();
    }
    let mut upstream = BufReader::new(upstream);
    let (first, headers) = head(&mut upstream)?;
    let mut body = Vec::new();
    upstream.read_to_end(&mut body).ok()?;
    match fate {
        Fate::Kept(_) => {
            let wanted = headers.iter().filter(|(name, _)| matches!(name.as_str(), "location" | "range"));
            let wanted: Vec<String> = wanted.map(|(name, value)| format!("{name}: {value}\r\n")).collect();
            *kept.lock().unwrap() = Some(wanted.concat());
            return client.shutdown(Shutdown::Both).ok();
        }
        Fate::Unanswered => return client.shutdown(Shutdown::Both).ok(),
        Fate::Cut(at) => body.truncate(at),
        Fate::Changed(at) => body[at] ^= 1,
        _ => {}
    }
    let mut client = client;
    let mut text = format!("{first}\r\n");
    headers.iter().for_each(|(name, value)| text += &format!("{name}: {value}\r\n"));
    client.write_all(format!("{text}\r\n").as_bytes()).ok()?;
    client.write_all(&body).ok()?;
    client.shutdown(Shutdown::Both).ok()
}

fn answer(mut client: &TcpStream, status: u16, headers: &str) -> Option<()> {
    let text = format!("HTTP/1.1 {status} Told\r\ncontent-length: 0\r\nconnection: close\r\n{headers}\r\n");
    client.write_all(text.as_bytes()).ok()?;
    client.shutdown(Shutdown::Both).ok()
}

/// First line and headers, with names in lower case.
fn head(reader: &mut impl BufRead) -> Option<(String, Vec<(String, String)>)> {
    let mut line = || {
        let mut text = String::new();
        reader.read_line(&mut text).ok()?;
        Some(text.trim_end().to_owned())
    };
    let first = line().filter(|first| !first.is_empty())?;
    let mut headers = Vec::new();
    loop {
        let text = line()?;
        let Some((name, value)) = text.split_once(':') else { return Some((first, headers)) };
        headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
}
