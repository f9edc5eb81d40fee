//! Engines: what starts, signals, watches and removes nodes.
//!
//! An engine keeps what each agent says in a file of the run directory, so that nothing is lost with a controller, and
//! reports how a node's agent ended. Deliberately left out: what the agents say, and what is done about it (supervise).

mod container;
mod image;
mod libpod;
mod podman;
mod process;
mod trial;

use std::io;
use std::path::{Path, PathBuf};

use tokio::sync::{mpsc, oneshot, watch};
use trainyard_spec::plan::{EnginePlan, LaunchPlan, NodePlan, NodeUser, Rendezvous};

use crate::plan::Image;
use crate::run_dir::RunDirError;
use crate::supervise::Stop;
use crate::tail::Format;

use podman::Podman;
use process::Processes;

/// Which engine a person asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum EngineChoice {
    /// Podman where it can run a container of the image, else processes.
    #[default]
    Auto,
    /// Processes on this machine.
    Process,
    /// Podman, or an error that says why not.
    Podman,
}

/// Where an engine may be found, from the environment.
#[derive(Debug, Clone, Default)]
pub struct EngineSettings {
    /// Address of the Podman service, as in `CONTAINER_HOST`.
    pub container_host: Option<String>,
    /// `XDG_RUNTIME_DIR`.
    pub runtime_dir: Option<PathBuf>,
    /// `PATH`, on which `podman` is looked for.
    pub path: Option<std::ffi::OsString>,
}

/// An engine that works here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chosen {
    /// Which, for [`crate::plan::Launch::engine`].
    pub engine: EnginePlan,
    /// What a person should know about the choice, one line each.
    pub notes: Vec<String>,
}

/// An engine that does not do its work.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The address of the Podman service is not one that can be used.
    #[error(
        "CONTAINER_HOST is {found:?}; needed is unix:///path/to/podman.sock: other transports are not known here"
    )]
    Address {
        /// What it says.
        found: String,
    },
    /// There is no Podman.
    #[error(
        "Podman is not installed: no service answers at {looked} and no `podman` is on PATH; install Podman, or use --engine process"
    )]
    NoPodman {
        /// The sockets looked at.
        looked: String,
    },
    /// The service does not answer.
    #[error(
        "no Podman service answers at {socket}: {found}; start it with `systemctl start podman.socket` (rootless: `systemctl --user start podman.socket`), unset CONTAINER_HOST, or use --engine process"
    )]
    NoService {
        /// Its socket.
        socket: String,
        /// What happened.
        found: String,
    },
    /// The service could not be started.
    #[error("cannot start `podman system service`: {found}; try it by hand, or use --engine process")]
    Service {
        /// What happened.
        found: String,
    },
    /// No container can be run.
    #[error(
        "Podman cannot run a container of the image: {found}; `podman info` shows its runtime and limits; or use --engine process"
    )]
    Trial {
        /// What each runtime said.
        found: String,
    },
    /// The service refused a request.
    #[error("Podman cannot {action}: {found}")]
    Podman {
        /// What was asked.
        action: String,
        /// What it says.
        found: String,
    },
    /// The image cannot be read from its layout.
    #[error("{}: {found}; build the image again", path.display())]
    Layout {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        found: String,
    },
    /// Podman holds something else than the image that was given to it.
    #[error(
        "Podman's image has digest {found}; needed is {needed}: remove it with `podman rmi {found}` and launch again"
    )]
    Digest {
        /// Podman's digest.
        found: String,
        /// The plan's.
        needed: trainyard_spec::Digest,
    },
    /// An agent cannot be started.
    #[error("cannot start {}: {source}; build the image again", path.display())]
    Agent {
        /// Its program.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// No port is free.
    #[error("no TCP port can be bound on {address}: {source}")]
    Port {
        /// The address.
        address: String,
        /// What the system says.
        source: io::Error,
    },
    /// A file cannot be written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The run directory cannot be written.
    #[error(transparent)]
    RunDir(#[from] RunDirError),
    /// It was told to stop.
    #[error("interrupted")]
    Interrupted,
    /// Something is still there after it was removed.
    #[error("cannot remove {what}: {found}")]
    Remains {
        /// What.
        what: String,
        /// Why.
        found: String,
    },
}

/// Finds an engine that works here, by trying it with the image: nothing but a container that has run proves that
/// containers run. When `stop` asks to, it ends soon; to drop it before it ends may leave its trial behind.
///
/// # Errors
/// When the engine that was asked for does not work. [`EngineChoice::Auto`] falls back to processes and says why.
pub async fn choose(
    choice: EngineChoice,
    settings: &EngineSettings,
    image: &Image,
    mut stop: watch::Receiver<Stop>,
) -> Result<Chosen, EngineError> {
    let process = |notes| Chosen { engine: EnginePlan::Process, notes };
    match choice {
        EngineChoice::Process => Ok(process(Vec::new())),
        EngineChoice::Podman => trial::choose(settings, image, &mut stop).await,
        EngineChoice::Auto => match trial::choose(settings, image, &mut stop).await {
            Ok(chosen) => Ok(chosen),
            Err(EngineError::Interrupted) => Err(EngineError::Interrupted),
            Err(EngineError::NoPodman { .. }) => {
                Ok(process(vec!["Podman is not here: nodes are processes of this machine".to_owned()]))
            }
            Err(error) => Ok(process(vec![format!("nodes are processes of this machine: {error}")])),
        },
    }
}

/// The user of nodes, for people.
pub(crate) fn user_text(user: NodeUser) -> String {
    match user {
        NodeUser::Host { uid, gid } => format!("{uid}:{gid}"),
        NodeUser::KeepId { uid, gid } => format!("{uid}:{gid} (rootless)"),
    }
}

/// A node that was started.
#[derive(Debug)]
pub(crate) struct Started {
    /// Its folder in the run directory.
    pub(crate) folder: PathBuf,
    /// File in which what its agent says is kept.
    pub(crate) said: PathBuf,
    /// How that file is written.
    pub(crate) format: Format,
    /// How the agent ended, once it has.
    pub(crate) exit: oneshot::Receiver<NodeExit>,
    /// Signals for the agent.
    pub(crate) signals: mpsc::UnboundedSender<Signal>,
}

/// What an agent is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Signal {
    /// Stop your ranks, with time for a last checkpoint.
    Terminate,
    /// Die.
    Kill,
}

/// How an agent ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeExit {
    /// "exited with code 0", "killed by signal 9".
    pub(crate) how: String,
    /// Whether the kernel killed something in the node for memory, where the engine knows.
    pub(crate) out_of_memory: bool,
}

/// The engine of a launch.
#[derive(Debug)]
pub(crate) enum Engine {
    Process(Processes),
    Podman(Box<Podman>),
}

impl Engine {
    /// Makes the engine ready for all attempts of a plan: reaches it, and hands it the image.
    pub(crate) async fn open(plan: &LaunchPlan) -> Result<Self, EngineError> {
        Ok(match &plan.engine {
            EnginePlan::Process => Self::Process(Processes::new(plan)),
            EnginePlan::Podman { .. } => Self::Podman(Box::new(Podman::open(plan).await?)),
        })
    }

    /// Makes what the nodes of an attempt share, and says where rank 0 will listen.
    pub(crate) async fn prepare(
        &mut self,
        plan: &LaunchPlan,
        attempt: u32,
    ) -> Result<Rendezvous, EngineError> {
        match self {
            Self::Process(_) => process::rendezvous(&plan.rendezvous),
            Self::Podman(podman) => {
                podman.prepare(plan, attempt).await?;
                Ok(plan.rendezvous.clone())
            }
        }
    }

    /// Starts all nodes of an attempt. Each folder is the node's in the run directory, with its plan in it. After an
    /// error some may run; [`Engine::teardown`] removes them.
    pub(crate) async fn start(&mut self, nodes: &[(NodePlan, PathBuf)]) -> Result<Vec<Started>, EngineError> {
        match self {
            Self::Process(processes) => {
                nodes.iter().map(|(node, folder)| processes.start(node, folder)).collect()
            }
            Self::Podman(podman) => podman.start(nodes).await,
        }
    }

    /// Removes everything of the attempt, whatever state it is in. Returns what could not be done.
    pub(crate) async fn teardown(&mut self) -> Vec<EngineError> {
        match self {
            Self::Process(processes) => processes.teardown().await,
            Self::Podman(podman) => podman.teardown().await,
        }
    }
}

/// Removes everything of a job that has no controller any more. Returns what could not be done.
pub(crate) async fn cleanup(plan: &LaunchPlan) -> Vec<EngineError> {
    match &plan.engine {
        EnginePlan::Process => process::cleanup(Path::new(&plan.run_dir)).await,
        EnginePlan::Podman { .. } => podman::cleanup(plan).await,
    }
}

/// File of a node's folder that holds its plan.
pub(crate) const NODE_PLAN_FILE: &str = "plan.json";
/// Time that agents without a controller get to stop their ranks before they are killed.
const CLEANUP_GRACE: std::time::Duration = std::time::Duration::from_secs(12);
