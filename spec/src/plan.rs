//! The launch plan: everything a launch will do, as a value that can be printed before anything is done.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::trainer::TrainerConfig;
use crate::{Digest, FormatVersion, Name};

/// A whole launch. It is a pure function of a job, an image, the nodes and the settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LaunchPlan {
    /// Format version.
    pub version: FormatVersion<1>,
    /// The job's id.
    pub job: Name,
    /// What runs the nodes.
    pub engine: EngineKind,
    /// The image's manifest digest.
    pub image: Digest,
    /// Ranks in all.
    pub world_size: u32,
    /// Fresh attempts after a failure.
    pub max_restarts: u32,
    /// Folders and files of this machine that every node sees.
    pub mounts: Vec<Mount>,
    /// Bytes of each node's private `/dev/shm`.
    pub shm_bytes: u64,
    /// The trainer's configuration.
    pub trainer: TrainerConfig,
    /// The nodes.
    pub nodes: Vec<NodePlan>,
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
    /// Milliseconds without a change of the lease file after which the agent stops its ranks.
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
