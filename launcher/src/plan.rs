//! The plan: job, image, engine and machine in; everything a launch will do out. Pure.
//!
//! Deliberately left out: whether the machine can bear it (preflight), and what only an engine can know, such as whether a
//! port is free.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use trainyard_spec::job::JobManifest;
use trainyard_spec::plan::{EnginePlan, ImagePlan, LaunchPlan, Mount, NodePlan, RankPlan, Rendezvous};
use trainyard_spec::trainer::TrainerConfig;
use trainyard_spec::{ByteSize, Digest, FormatVersion, Name, env};

use crate::machine::Machine;

/// What a launch is made from.
#[derive(Debug, Clone)]
pub struct Launch {
    /// Id of the job, new for each launch.
    pub id: Name,
    /// What to train.
    pub job: JobManifest,
    /// What runs it.
    pub image: Image,
    /// Folder of token shards.
    pub data_dir: PathBuf,
    /// Nodes; the job's own number is not looked at.
    pub nodes: u32,
    /// Fresh attempts after a failure; the job's own number is not looked at.
    pub max_restarts: u32,
    /// The job's run directory.
    pub run_dir: PathBuf,
    /// What the nodes are, as [`crate::engine::choose`] found.
    pub engine: EnginePlan,
}

/// An image on this machine.
#[derive(Debug, Clone)]
pub struct Image {
    /// Its manifest's digest.
    pub digest: Digest,
    /// Folder of the OCI layout that holds it.
    pub layout: PathBuf,
    /// Folder with its unpacked files.
    pub rootfs: PathBuf,
}

/// Why no plan can be made.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// A path is not text.
    #[error("{}: the path is not valid UTF-8; choose another folder", path.display())]
    NotUtf8 {
        /// The path.
        path: PathBuf,
    },
    /// A path is relative.
    #[error("{}: the path is not absolute", path.display())]
    Relative {
        /// The path.
        path: PathBuf,
    },
    /// No nodes were asked for.
    #[error("nodes is {nodes} and ranks-per-node {ranks}; needed is at least 1 of each")]
    Ranks {
        /// Nodes.
        nodes: u32,
        /// Ranks on each.
        ranks: u32,
    },
    /// More ranks than can meet on one machine.
    #[error(
        "{nodes} nodes of {ranks} ranks are asked for on this machine, and at most {MOST_RANKS} ranks can meet on its \
         ports: ask for fewer nodes, --nodes {}", (MOST_RANKS / ranks).max(1)
    )]
    TooMany {
        /// Nodes.
        nodes: u32,
        /// Ranks on each.
        ranks: u32,
    },
}

/// All nodes are on this machine, and each rank takes a port of rank 0's address: of 64,512 unprivileged ports about
/// half are given to outgoing connections.
const MOST_RANKS: u32 = 28_000;
/// The port that rank 0 listens on unless it is taken; torchrun's default.
pub const FIRST_PORT: u16 = 29_500;
/// The agent's program inside the image.
pub const AGENT: &str = "/usr/bin/trainyard-node";
const TRAINER: &str = "/usr/bin/trainyard-trainer";
/// Where the folders of [`LaunchPlan::mounts`] lie in a container.
const NODE_JOB: &str = "/trainyard/job";
const NODE_DATA: &str = "/trainyard/data";
const NODE_CHECKPOINTS: &str = "/trainyard/checkpoints";
const NODE_RUN: &str = "/trainyard/run";
/// Without NCCL nothing lives in /dev/shm but what the program itself puts there.
const SHM_BYTES: u64 = 64 << 20;
/// A controller that is only slow must not lose its job; an orphan should not last.
const LEASE_MS: u64 = 15_000;
/// Time to write a last checkpoint.
const GRACE_MS: u64 = 10_000;

/// Plans a launch.
///
/// # Errors
/// When a path cannot be written down in a plan, or there is nothing to run.
pub fn plan(launch: &Launch, machine: &Machine) -> Result<LaunchPlan, PlanError> {
    let per_node = launch.job.ranks_per_node;
    if launch.nodes == 0 || per_node == 0 {
        return Err(PlanError::Ranks { nodes: launch.nodes, ranks: per_node });
    }
    let world_size = launch.nodes.checked_mul(per_node).filter(|ranks| *ranks <= MOST_RANKS);
    let world_size = world_size.ok_or(PlanError::TooMany { nodes: launch.nodes, ranks: per_node })?;
    let run_dir = text(&launch.run_dir)?;
    let rootfs = text(&launch.image.rootfs)?;
    let process = matches!(launch.engine, EnginePlan::Process);
    let mount = |host: String, node: &str, read_only| Mount {
        node: if process { host.clone() } else { node.to_owned() },
        host,
        read_only,
    };
    let mounts = vec![
        mount(format!("{run_dir}/job"), NODE_JOB, true),
        mount(text(&launch.data_dir)?, NODE_DATA, true),
        mount(format!("{run_dir}/checkpoints"), NODE_CHECKPOINTS, false),
    ];
    // All nodes are on this machine, so all ranks share its processors.
    let threads_per_rank = (machine.cores / world_size).max(1);
    let command = vec![
        if process { format!("{rootfs}{TRAINER}") } else { TRAINER.to_owned() },
        "train".to_owned(),
        "--config".to_owned(),
        format!("{}/{TRAINER_CONFIG}", mounts[0].node),
        "--data".to_owned(),
        mounts[1].node.clone(),
        "--checkpoints".to_owned(),
        mounts[2].node.clone(),
        "--resume".to_owned(),
        "auto".to_owned(),
        "--threads".to_owned(),
        threads_per_rank.to_string(),
    ];
    let rendezvous =
        Rendezvous { address: if process { loopback(&launch.id) } else { hostname(0) }, port: FIRST_PORT };
    let mut plan = LaunchPlan {
        version: FormatVersion,
        job: launch.id.clone(),
        engine: launch.engine.clone(),
        image: ImagePlan { digest: launch.image.digest, layout: text(&launch.image.layout)?, rootfs },
        run_dir,
        world_size,
        threads_per_rank,
        max_restarts: launch.max_restarts,
        mounts,
        shm_bytes: SHM_BYTES,
        memory_bytes: u64::from(world_size) * rank_memory(&launch.job)
            + u64::from(launch.nodes) * AGENT_MEMORY,
        trainer: TrainerConfig {
            version: FormatVersion,
            model: launch.job.model.clone(),
            train: launch.job.train.clone(),
        },
        rendezvous: rendezvous.clone(),
        nodes: (0..launch.nodes)
            .map(|node| node_plan(node, launch, world_size, threads_per_rank, &command))
            .collect(),
    };
    plan.nodes = attempt(&plan, 0, &rendezvous);
    Ok(plan)
}

/// Name of the trainer's configuration in the first of [`LaunchPlan::mounts`].
pub(crate) const TRAINER_CONFIG: &str = "trainer.json";

fn node_plan(node: u32, launch: &Launch, world_size: u32, threads: u32, command: &[String]) -> NodePlan {
    let per_node = launch.job.ranks_per_node;
    let pairs = |pairs: &[(&str, String)]| -> BTreeMap<String, String> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect()
    };
    NodePlan {
        version: FormatVersion,
        node,
        hostname: hostname(node).parse().expect("node-N is a DNS label"),
        command: command.to_vec(),
        env: pairs(&[
            (env::GROUP_RANK, node.to_string()),
            (env::GROUP_WORLD_SIZE, launch.nodes.to_string()),
            (env::LOCAL_WORLD_SIZE, per_node.to_string()),
            (env::MAX_RESTARTS, launch.max_restarts.to_string()),
            (env::NCCL_ASYNC_ERROR_HANDLING, "1".to_owned()),
            (env::OMP_NUM_THREADS, threads.to_string()),
            (env::ROLE_NAME, "trainer".to_owned()),
            (env::ROLE_WORLD_SIZE, world_size.to_string()),
            (env::WORLD_SIZE, world_size.to_string()),
        ]),
        ranks: (0..per_node)
            .map(|local_rank| {
                let rank = node * per_node + local_rank;
                RankPlan {
                    rank,
                    local_rank,
                    env: pairs(&[
                        (env::LOCAL_RANK, local_rank.to_string()),
                        (env::RANK, rank.to_string()),
                        (env::ROLE_RANK, rank.to_string()),
                    ]),
                }
            })
            .collect(),
        run_dir: String::new(),
        lease_ms: LEASE_MS,
        grace_ms: GRACE_MS,
    }
}

/// The nodes of one attempt: those of the plan with the attempt's own run id, restart count, rendezvous and folders.
pub fn attempt(plan: &LaunchPlan, attempt: u32, rendezvous: &Rendezvous) -> Vec<NodePlan> {
    let mut nodes = plan.nodes.clone();
    for node in &mut nodes {
        node.run_dir = match plan.engine {
            EnginePlan::Process => format!("{}/{}", plan.run_dir, node_folder(attempt, node.node)),
            EnginePlan::Podman { .. } => NODE_RUN.to_owned(),
        };
        for (name, value) in [
            (env::MASTER_ADDR, rendezvous.address.clone()),
            (env::MASTER_PORT, rendezvous.port.to_string()),
            (env::RESTART_COUNT, attempt.to_string()),
            (env::RUN_ID, run_id(&plan.job, attempt)),
        ] {
            node.env.insert(name.to_owned(), value);
        }
        for rank in &mut node.ranks {
            for (name, file) in [(env::EVENTS, "events"), (env::ERROR_FILE, "error")] {
                rank.env.insert(name.to_owned(), format!("{}/{file}-rank-{}.json", node.run_dir, rank.rank));
            }
        }
    }
    nodes
}

/// Id of an attempt. Job ids are unique on a machine, so these are.
pub(crate) fn run_id(job: &Name, attempt: u32) -> String {
    format!("{job}-{attempt}")
}

/// Folder of a node's attempt in the run directory.
pub(crate) fn node_folder(attempt: u32, node: u32) -> String {
    format!("attempt-{attempt}/node-{node}")
}

/// A node's host name inside the job.
pub(crate) fn hostname(node: u32) -> String {
    format!("node-{node}")
}

/// A loopback address of the job's own, so that jobs side by side do not meet on one port. Two ids may share one; the
/// engine then takes another port.
fn loopback(job: &Name) -> String {
    let digest = Digest::of(job.as_str().as_bytes()).hex();
    let octet = |at: usize| u8::from_str_radix(&digest[at..at + 2], 16).unwrap_or(1);
    format!("127.{}.{}.{}", 64 + octet(0) % 64, octet(2), octet(4).clamp(1, 254))
}

/// Bytes of an agent with its threads.
const AGENT_MEMORY: u64 = 4 << 20;
/// Bytes of a rank's program, stacks and buffers of the network, whatever the model.
const RANK_BASE_MEMORY: u64 = 16 << 20;

/// A lower bound of a rank's memory in bytes: weights, gradients and both AdamW moments in f32, and the logits with their
/// gradients.
fn rank_memory(job: &JobManifest) -> u64 {
    let (layers, channels, context) =
        (u64::from(job.model.layers), u64::from(job.model.channels), u64::from(job.model.context));
    // The byte tokenizer's size; others are larger, and this is a lower bound.
    let vocabulary = 256;
    let matrices = layers.saturating_mul(channels.saturating_mul(channels)).saturating_mul(12);
    let parameters = matrices.saturating_add((vocabulary + context).saturating_mul(channels));
    let logits = u64::from(job.train.batch).saturating_mul(context).saturating_mul(vocabulary);
    parameters.saturating_mul(16).saturating_add(logits.saturating_mul(8)).saturating_add(RANK_BASE_MEMORY)
}

fn text(path: &Path) -> Result<String, PlanError> {
    if !path.is_absolute() {
        return Err(PlanError::Relative { path: path.to_owned() });
    }
    path.to_str().map(str::to_owned).ok_or_else(|| PlanError::NotUtf8 { path: path.to_owned() })
}

/// The plan for people. The JSON form is serde's.
pub fn describe(plan: &LaunchPlan) -> String {
    let mut out = String::new();
    let mut row = |name: &str, value: String| {
        let _ = writeln!(out, "{name:<12} {value}");
    };
    row("job", plan.job.to_string());
    row("image", plan.image.digest.to_string());
    row(
        "engine",
        match &plan.engine {
            EnginePlan::Process => "process: a process group per node on this machine".to_owned(),
            EnginePlan::Podman { socket, runtime, user } => format!(
                "podman: a container per node; service {}; OCI runtime {}; user {}",
                socket.as_deref().unwrap_or("started for this job"),
                runtime.as_deref().unwrap_or("Podman's default"),
                crate::engine::user_text(*user),
            ),
        },
    );
    let threads = plan.threads_per_rank;
    let shape = format!("{} nodes, {} ranks, {threads} threads per rank", plan.nodes.len(), plan.world_size);
    row("nodes", shape);
    row("rendezvous", format!("{}:{}", plan.rendezvous.address, plan.rendezvous.port));
    row("restarts", plan.max_restarts.to_string());
    row("memory", format!("at least {}", ByteSize(plan.memory_bytes)));
    row("/dev/shm", format!("{} per node", ByteSize(plan.shm_bytes)));
    row("run dir", plan.run_dir.clone());
    for mount in &plan.mounts {
        let mode = if mount.read_only { "ro" } else { "rw" };
        row("mount", format!("{} at {} ({mode})", mount.host, mount.node));
    }
    if let Some(node) = plan.nodes.first() {
        row("command", node.command.join(" "));
        for (name, value) in &node.env {
            row("env", format!("{name}={value}"));
        }
    }
    for node in &plan.nodes {
        let ranks: Vec<_> = node.ranks.iter().map(|rank| rank.rank.to_string()).collect();
        row(node.hostname.as_str(), format!("ranks {}", ranks.join(" ")));
    }
    out
}
