//! Events: what a training program says while it runs, and what the launcher records of a job. JSON lines.

use serde::{Deserialize, Serialize};

use crate::plan::EngineKind;
use crate::protocol::NodeEvent;
use crate::{Digest, Exit, FormatVersion, Name};

/// What a training program reports, one JSON object a line, to the file named by [`crate::env::EVENTS`]. Only rank 0
/// reports what all ranks share. Losses are means over tokens, in nats.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case", rename_all_fields = "kebab-case")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum TrainerEvent {
    /// Data and model are ready; the first step follows.
    Started {
        /// Trainable parameters.
        parameters: u64,
        /// Steps that the job ends at.
        steps: u64,
        /// Step that this attempt starts from: 0, or that of the checkpoint resumed from.
        first_step: u64,
        /// Tokens consumed by one step, in all ranks together.
        tokens_per_step: u64,
        /// Loss on the validation text of a model that knows token frequencies of the training text alone.
        unigram_loss: f64,
    },
    /// A step is done.
    Step {
        /// Steps done, from 1.
        step: u64,
        /// Training loss of the step, mean over all ranks.
        loss: f64,
        /// Learning rate used.
        learning_rate: f64,
        /// Global norm of the gradients before clipping.
        grad_norm: f64,
        /// Tokens per second of this step, in all ranks together.
        tokens_per_second: f64,
    },
    /// The model was tried on held-out text.
    Validation {
        /// Steps done.
        step: u64,
        /// Validation loss.
        loss: f64,
    },
    /// A complete checkpoint is on disk.
    Checkpoint {
        /// Steps done.
        step: u64,
        /// Its folder, as seen by the program.
        path: String,
        /// Bytes written by all ranks.
        bytes: u64,
        /// Seconds it took.
        seconds: f64,
    },
    /// Something worth a person's attention that does not end the run.
    Warning {
        /// What, and what to do.
        message: String,
    },
    /// The rank cannot go on; it exits after this.
    Failed {
        /// Whose fault it is.
        class: FailureClass,
        /// What went wrong, with its place.
        message: String,
    },
    /// All steps are done.
    Finished {
        /// Steps done.
        step: u64,
    },
}

/// Whose fault a failure is. Decides whether a fresh attempt makes sense.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum FailureClass {
    /// The program, its configuration or its data: the same would happen again, so it is not retried.
    User,
    /// A host, its disk or its engine.
    Host,
    /// The connection between ranks or to a node. A rank that only lost its peers reports this, so it is never
    /// named as first cause while another failure is known.
    Network,
    /// The kernel killed a process for memory.
    OutOfMemory,
    /// Killed from outside, or it gave no reason.
    Unknown,
}

/// One line of a job's `events.jsonl`, in the order in which the controller learned of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct JobRecord {
    /// Format version.
    pub version: FormatVersion<1>,
    /// The controller's wall clock, RFC 3339, UTC. For people; nothing is decided by it.
    pub time: String,
    /// What happened.
    #[serde(flatten)]
    pub event: JobEvent,
}

/// What happened to a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "job", rename_all = "kebab-case", rename_all_fields = "kebab-case")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum JobEvent {
    /// The job was accepted.
    Created {
        /// Its id.
        id: Name,
        /// The image's manifest digest.
        image: Digest,
        /// Nodes.
        nodes: u32,
        /// Ranks in all.
        world_size: u32,
        /// The engine that runs it.
        engine: EngineKind,
    },
    /// What the controller does next, or something worth a person's attention.
    Note {
        /// One line.
        message: String,
    },
    /// An attempt starts.
    AttemptStarted {
        /// Number of the attempt, from 0.
        attempt: u32,
        /// Id of the attempt, new for each.
        run_id: String,
    },
    /// A node said something.
    Node {
        /// Index of the node.
        node: u32,
        /// What.
        said: NodeEvent,
    },
    /// An attempt ended without finishing.
    AttemptFailed {
        /// Number of the attempt.
        attempt: u32,
        /// The first thing that went wrong.
        failure: Failure,
    },
    /// The job is over.
    Ended {
        /// Its exit code.
        exit: Exit,
        /// The failure that ended it, if one did.
        failure: Option<Failure>,
    },
}

/// The first thing that went wrong in an attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Failure {
    /// Index of the node, or none when it was not one node that failed.
    pub node: Option<u32>,
    /// The rank, or none when the node itself failed.
    pub rank: Option<u32>,
    /// Whose fault it is.
    pub class: FailureClass,
    /// What happened: "killed by signal 9", with the rank's own last words where it had any.
    pub message: String,
}
