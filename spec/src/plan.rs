//! The launch plan: everything a launch will do, as a value that can be printed before anything is done.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::trainer::TrainerConfig;
use crate::{Digest, FormatVersion, Name};

/// A whole launch. It is a pure function of a job, an image, this machine and the settings.
///
/// [`LaunchPlan::nodes`] is what the first attempt runs if [`LaunchPlan::rendezvous`] is free. Later attempts differ in
/// run id, restart count, rendezvous and folder alone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LaunchPlan {
    /// Format version.
    pub version: FormatVersion<1>,
    /// The job's id.
    pub job: Name,
    /// What runs the nodes.
    pub engine: EnginePlan,
    /// The image.
    pub image: ImagePlan,
    /// Absolute path of the job's run directory on this machine.
    pub run_dir: String,
    /// Ranks in all.
    pub world_size: u32,
    /// Compute threads of each rank.
    pub threads_per_rank: u32,
    /// Fresh attempts after a failure.
    pub max_restarts: u32,
    /// Folders and files of this machine that every node sees.
    pub mounts: Vec<Mount>,
    /// Bytes of each node's private `/dev/shm`; process nodes share this machine's.
    pub shm_bytes: u64,
    /// Bytes of memory that the whole job is expected to need on this machine, at least.
    pub memory_bytes: u64,
    /// Where rank 0 listens, unless it is taken.
    pub rendezvous: Rendezvous,
    /// The trainer's configuration.
    pub trainer: TrainerConfig,
    /// The nodes.
    pub nodes: Vec<NodePlan>,
}

/// The image that the nodes run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ImagePlan {
    /// Its manifest's digest.
    pub digest: Digest,
    /// Folder of the OCI layout that holds it.
    pub layout: String,
    /// Folder with its unpacked files, for process nodes.
    pub rootfs: String,
}

/// Where rank 0 listens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Rendezvous {
    /// Host name or address of node 0.
    pub address: String,
    /// TCP port.
    pub port: u16,
}

/// What runs the nodes, with all that a controller needs to reach it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", rename_all_fields = "kebab-case", deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum EnginePlan {
    /// A node is a process group on this machine.
    Process,
    /// A node is a container, through Podman's libpod API.
    Podman {
        /// The service's socket; none: the controller starts a service of its own.
        socket: Option<String>,
        /// OCI runtime to ask for; none: Podman's default.
        runtime: Option<String>,
        /// How the nodes' user relates to this machine's.
        user: NodeUser,
    },
}

impl EnginePlan {
    /// The kind alone.
    pub const fn kind(&self) -> EngineKind {
        match self {
            Self::Process => EngineKind::Process,
            Self::Podman { .. } => EngineKind::Podman,
        }
    }
}

/// The user of a container's processes. What a node writes belongs to this user on the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "kebab-case", rename_all_fields = "kebab-case")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum NodeUser {
    /// This user and group of the machine, in its own user namespace. The controller hands it what it may write to.
    Host {
        /// User id.
        uid: u32,
        /// Group id.
        gid: u32,
    },
    /// The controller's own user, mapped to itself by a rootless Podman.
    KeepId {
        /// User id.
        uid: u32,
        /// Group id.
        gid: u32,
    },
}

/// What a node is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum EngineKind {
    /// A process group on this machine.
    Process,
    /// A container, through Podman's libpod API.
    Podman,
}

impl EngineKind {
    /// As written on the command line.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Podman => "podman",
        }
    }
}

/// A folder or file of this machine, seen by a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Mount {
    /// Absolute path on this machine.
    pub host: String,
    /// Absolute path as the node sees it; the same as `host` for process nodes.
    pub node: String,
    /// Whether the node may only read it.
    pub read_only: bool,
}

/// What one `trainyard-node` does, for one attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct NodePlan {
    /// Format version.
    pub version: FormatVersion<1>,
    /// Index of the node, from 0.
    pub node: u32,
    /// Its host name inside the job.
    pub hostname: Name,
    /// Program and arguments of each rank.
    pub command: Vec<String>,
    /// Environment that all ranks share.
    pub env: BTreeMap<String, String>,
    /// The ranks.
    pub ranks: Vec<RankPlan>,
    /// Folder for the agent's own files, as the node sees it; [`LEASE_FILE`] in it is the lease.
    pub run_dir: String,
    /// Milliseconds without a change of the lease file after which the agent stops its ranks, and without a word of
    /// the agent after which the controller takes the node for lost.
    pub lease_ms: u64,
    /// Milliseconds between SIGTERM and SIGKILL when ranks are stopped.
    pub grace_ms: u64,
}

/// Name of the lease file in [`NodePlan::run_dir`].
pub const LEASE_FILE: &str = "lease";

/// One rank of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RankPlan {
    /// Global rank.
    pub rank: u32,
    /// Rank within the node.
    pub local_rank: u32,
    /// Environment of this rank alone.
    pub env: BTreeMap<String, String>,
}
