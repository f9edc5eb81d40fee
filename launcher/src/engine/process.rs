//! Nodes as process groups of this machine.
//!
//! Each agent leads a session of its own, which all its ranks stay in: the session is what is killed when an agent can no
//! longer do it. Deliberately left out: isolation. The nodes share this machine's file system, network and /dev/shm.

use std::fs::{self, File, OpenOptions};
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal as UnixSignal, kill_process};
use tokio::process::{Child, Command};
use tokio::sync::{mpsc, oneshot};
use trainyard_spec::env;
use trainyard_spec::plan::{LaunchPlan, NodePlan, Rendezvous};

use super::{EngineError, NodeExit, Signal, Started};
use crate::machine::{session_members, start_time};
use crate::plan::AGENT;
use crate::run_dir::{Holder, json, write_whole};
use crate::tail::Format;

/// File of a node's folder in which its agent's lines are kept.
const SAID: &str = "said.jsonl";
/// File of a node's folder that names the agent's process.
const AGENT_PID: &str = "agent.json";
/// What a program may count on when its node is a process; everything else is in the plan.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The agents of one launch.
#[derive(Debug)]
pub(crate) struct Processes {
    program: PathBuf,
    /// Agents of this attempt. The agent makes itself the leader of a session, whose id is its own.
    agents: Vec<Holder>,
}

impl Processes {
    pub(super) fn new(plan: &LaunchPlan) -> Self {
        let program = PathBuf::from(format!("{}{AGENT}", plan.image.rootfs));
        Self { program, agents: Vec::new() }
    }

    pub(super) fn start(&mut self, node: &NodePlan, folder: &Path) -> Result<Started, EngineError> {
        let said = folder.join(SAID);
        let agent = |source| EngineError::Agent { path: self.program.clone(), source };
        let child = Command::new(&self.program)
            .env_clear()
            .env("PATH", PATH)
            .env(env::NODE_PLAN, Path::new(&node.run_dir).join(super::NODE_PLAN_FILE))
            .stdin(Stdio::null())
            .stdout(append(&said)?)
            .stderr(append(&folder.join("agent.log"))?)
            .current_dir(folder)
            .spawn()
            .map_err(agent)?;
        let pid = child.id().expect("a process that was not waited for has an id");
        let agent = Holder { pid, start_time: start_time(pid).unwrap_or(0) };
        self.agents.push(agent);
        write_whole(&folder.join(AGENT_PID), &json(&agent))?;
        let (signals, requests) = mpsc::unbounded_channel();
        let (tell, exit) = oneshot::channel();
        tokio::spawn(watch(child, pid, requests, tell));
        Ok(Started { folder: folder.to_owned(), said, format: Format::Plain, exit, signals })
    }

    pub(super) async fn teardown(&mut self) -> Vec<EngineError> {
        let mut errors = Vec::new();
        for agent in self.agents.drain(..) {
            errors.extend(kill_session(agent).await.err());
        }
        errors
    }
}

fn append(path: &Path) -> Result<File, EngineError> {
    let file = OpenOptions::new().create(true).append(true).open(path);
    file.map_err(|source| EngineError::Io { action: "open", path: path.to_owned(), source })
}

/// Owns the agent's process, so that no signal goes to another process of the same id.
async fn watch(
    mut child: Child,
    pid: u32,
    mut requests: mpsc::UnboundedReceiver<Signal>,
    tell: oneshot::Sender<NodeExit>,
) {
    let status = loop {
        tokio::select! {
            status = child.wait() => break status,
            Some(request) = requests.recv() => signal(pid, match request {
                Signal::Terminate => UnixSignal::TERM,
                Signal::Kill => UnixSignal::KILL,
            }),
        }
    };
    let how = match status {
        Ok(status) => describe(status),
        Err(error) => format!("cannot be waited for: {error}"),
    };
    // Nobody listens any more when the attempt was given up.
    let _ = tell.send(NodeExit { how, out_of_memory: false });
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exited with code {code}"),
        (_, Some(signal)) => format!("was killed by signal {signal}"),
        _ => "ended".to_owned(),
    }
}

fn signal(pid: u32, signal: UnixSignal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        // A process that has just ended needs no signal.
        let _ = kill_process(pid, signal);
    }
}

/// Kills an agent and its session until nothing is left of them.
async fn kill_session(agent: Holder) -> Result<(), EngineError> {
    let session = agent.pid;
    let started = Instant::now();
    loop {
        let mut members = session_members(session);
        // It may not have come so far as to have a session.
        members.extend(agent.is_alive().then_some(agent.pid));
        if members.is_empty() {
            return Ok(());
        }
        if started.elapsed() > Duration::from_secs(5) {
            let what = format!("processes {members:?} of session {session}");
            return Err(EngineError::Remains { what, found: "they do not die of SIGKILL".to_owned() });
        }
        for pid in members {
            signal(pid, UnixSignal::KILL);
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// An address and port on which rank 0 can listen: the plan's, or another port where that is taken.
pub(super) fn rendezvous(first: &Rendezvous) -> Result<Rendezvous, EngineError> {
    let bind =
        |port| TcpListener::bind((first.address.as_str(), port)).and_then(|listener| listener.local_addr());
    let found = bind(first.port).or_else(|_| bind(0));
    let port = found.map_err(|source| EngineError::Port { address: first.address.clone(), source })?.port();
    Ok(Rendezvous { address: first.address.clone(), port })
}

/// Ends the agents of a job that has no controller: asks first, then kills.
pub(super) async fn cleanup(run_dir: &Path) -> Vec<EngineError> {
    let mut agents = Vec::new();
    let mut errors = Vec::new();
    for attempt in folders(run_dir, "attempt-") {
        for node in folders(&attempt, "node-") {
            let path = node.join(AGENT_PID);
            match fs::read(&path).map(|bytes| serde_json::from_slice::<Holder>(&bytes)) {
                Ok(Ok(agent)) => agents.push(agent),
                Ok(Err(error)) => {
                    let source = std::io::Error::other(error);
                    errors.push(EngineError::Io { action: "read", path, source });
                }
                // The controller ended before the agent started.
                Err(_) => {}
            }
        }
    }
    // Of an agent that is gone, ranks may be left; a process id that was given again is somebody else's.
    agents.retain(|agent| agent.is_alive() || start_time(agent.pid).is_none());
    for agent in &agents {
        signal(agent.pid, UnixSignal::TERM);
    }
    let started = Instant::now();
    while agents.iter().any(|agent| agent.is_alive()) && started.elapsed() < super::CLEANUP_GRACE {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for agent in agents {
        errors.extend(kill_session(agent).await.err());
    }
    errors
}

fn folders(parent: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(parent) else { return Vec::new() };
    let named =
        |entry: &fs::DirEntry| entry.file_name().to_str().is_some_and(|name| name.starts_with(prefix));
    entries.flatten().filter(named).map(|entry| entry.path()).collect()
}
