//! The connection to a Podman service, and the service itself where none runs.
//!
//! Requests go through podman-api. Two are written here, on the same HTTP client: making a container (podman-api cannot name
//! a log file) and loading an image (it wants the whole archive in memory).

use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use hyper::{Body, Client, Method, Request, body, header};
use hyperlocal::{UnixConnector, Uri};
use serde::Deserialize;
use tokio::io::AsyncReadExt as _;
use tokio::process::{Child, Command};

use super::EngineError;
use super::container::Container;

/// A Podman service.
#[derive(Debug)]
pub(super) struct Libpod {
    /// podman-api's client.
    pub(super) api: podman_api::Podman,
    socket: PathBuf,
    /// The service, where it was started here, and the folder of its socket.
    _own: Option<(Child, tempfile::TempDir)>,
}

/// Time in which a service must answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Seconds without a request after which a service of our own ends, should the controller be gone.
const IDLE_SECONDS: &str = "60";

impl Libpod {
    /// Reaches the service at a socket.
    pub(super) async fn connect(socket: &Path) -> Result<Self, EngineError> {
        let api = podman_api::Podman::unix(socket);
        let no_service = |found| EngineError::NoService { socket: socket.display().to_string(), found };
        match tokio::time::timeout(PATIENCE, api.ping()).await {
            Ok(Ok(_)) => Ok(Self { api, socket: socket.to_owned(), _own: None }),
            Ok(Err(error)) => Err(no_service(error.to_string())),
            Err(_) => Err(no_service(format!("no answer in {} s", PATIENCE.as_secs()))),
        }
    }

    /// Starts a service that ends with this value. `runtime` is the OCI runtime of all its containers; none: the default.
    pub(super) async fn start(runtime: Option<&str>) -> Result<Self, EngineError> {
        let failed = |found: String| EngineError::Service { found };
        // The path of a socket is at most 107 bytes, so it cannot lie in a run directory.
        let folder = tempfile::Builder::new().prefix("trainyard-podman-").tempdir();
        let folder = folder.map_err(|error| failed(error.to_string()))?;
        let socket = folder.path().join("podman.sock");
        let mut child = Command::new("podman")
            // Services before Podman 4.7 ignore the runtime that a request asks for.
            .args(runtime.iter().flat_map(|name| ["--runtime", *name]))
            .args(["system", "service", "--time", IDLE_SECONDS])
            .arg(format!("unix://{}", socket.display()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            // Not to be interrupted by the terminal while it is needed to clean up.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| failed(error.to_string()))?;
        let started = Instant::now();
        loop {
            if let Ok(Some(status)) = child.try_wait() {
                let mut text = String::new();
                if let Some(mut stderr) = child.stderr.take() {
                    // Without its last words the status has to do.
                    let _ = stderr.read_to_string(&mut text).await;
                }
                return Err(failed(format!("{status}: {}", text.trim())));
            }
            match Self::connect(&socket).await {
                Ok(service) => {
                    // Its warnings are nothing to this job, and must not fill a pipe.
                    if let Some(mut stderr) = child.stderr.take() {
                        tokio::spawn(
                            async move { tokio::io::copy(&mut stderr, &mut tokio::io::sink()).await },
                        );
                    }
                    return Ok(Self { _own: Some((child, folder)), ..service });
                }
                Err(error) if started.elapsed() > PATIENCE => return Err(failed(error.to_string())),
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    }

    /// Makes a container. Returns its id.
    pub(super) async fn create(&self, container: &Container) -> Result<String, EngineError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "PascalCase")]
        struct Created {
            id: String,
        }
        let json = serde_json::to_vec(container).expect("a request has text keys alone");
        let action = format!("create container {}", container.name);
        let created = self.post("containers/create", "application/json", json.into(), &action).await?;
        let created: Created = serde_json::from_slice(&created)
            .map_err(|error| EngineError::Podman { action, found: error.to_string() })?;
        Ok(created.id)
    }

    /// Loads an image from an archive.
    pub(super) async fn load(&self, archive: &Path) -> Result<(), EngineError> {
        let io = |source| EngineError::Io { action: "read", path: archive.to_owned(), source };
        let mut file = tokio::fs::File::open(archive).await.map_err(io)?;
        let (mut sender, body) = Body::channel();
        let send = async move {
            loop {
                let mut chunk = Vec::with_capacity(1 << 20);
                if (&mut file).take(1 << 20).read_to_end(&mut chunk).await? == 0 {
                    return Ok(());
                }
                // A service that does not want more says why in its answer.
                if sender.send_data(chunk.into()).await.is_err() {
                    return Ok(());
                }
            }
        };
        let post = self.post("images/load", "application/x-tar", body, "load the image");
        let (sent, loaded): (Result<(), std::io::Error>, _) = tokio::join!(send, post);
        sent.map_err(io)?;
        loaded.map(drop)
    }

    async fn post(&self, path: &str, mime: &str, body: Body, action: &str) -> Result<Vec<u8>, EngineError> {
        #[derive(Deserialize)]
        struct Refusal {
            message: String,
        }
        let failed = |found: String| EngineError::Podman { action: action.to_owned(), found };
        let version = podman_api::LATEST_API_VERSION;
        let uri: hyper::Uri = Uri::new(&self.socket, &format!("/v{version}/libpod/{path}")).into();
        let request = Request::builder()
            .method(Method::POST)
            .uri(uri)
            .header(header::HOST, "podman")
            .header(header::CONTENT_TYPE, mime)
            .body(body)
            .map_err(|error| failed(error.to_string()))?;
        let client = Client::builder().pool_max_idle_per_host(0).build::<_, Body>(UnixConnector);
        let response = client.request(request).await.map_err(|error| failed(error.to_string()))?;
        let status = response.status();
        let bytes = body::to_bytes(response.into_body()).await.map_err(|error| failed(error.to_string()))?;
        if status.is_success() {
            return Ok(bytes.to_vec());
        }
        let refusal = serde_json::from_slice::<Refusal>(&bytes).map(|refusal| refusal.message);
        Err(failed(refusal.unwrap_or_else(|_| format!("status {status}"))))
    }
}

/// Where a service listens by default, in the order of preference of the user.
pub(super) fn default_sockets(uid: u32, runtime_dir: Option<&Path>) -> Vec<PathBuf> {
    let rootful = PathBuf::from("/run/podman/podman.sock");
    if uid == 0 {
        return vec![rootful];
    }
    runtime_dir.map(|folder| folder.join("podman/podman.sock")).into_iter().chain([rootful]).collect()
}

/// Whether the service at a socket is root's.
pub(super) fn is_rootful(socket: &Path) -> bool {
    std::fs::metadata(socket).is_ok_and(|socket| socket.uid() == 0)
}

/// Whether a program is on a path.
pub(super) fn on_path(program: &str, path: Option<&OsStr>) -> bool {
    path.is_some_and(|path| std::env::split_paths(path).any(|folder| folder.join(program).is_file()))
}
