//! The node protocol: what `trainyard-node`, PID 1 of every node, says to the controller, and how it is kept alive.
//!
//! The agent writes [`NodeEvent`]s to standard output, one JSON object a line. Nothing but these lines goes there.
//! Engines keep that output (a file, a container log), so it outlives a controller, and a new one reads it from the
//! start: a node's state is a fold over its lines.
//!
//! The controller renews the node's lease by changing the content of the plan's lease file. An agent that sees no
//! change for the lease's length, by its own monotonic clock, stops its ranks: a job without a controller ends.
//!
//! The lease holds both ways. An agent says something at least every fifth of it, [`NodeEvent::Alive`] where there is
//! nothing else; a controller that hears nothing for the lease's length takes the node for lost.

use serde::{Deserialize, Serialize};

use crate::event::TrainerEvent;

/// What an agent says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "node-event", rename_all = "kebab-case", rename_all_fields = "kebab-case")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum NodeEvent {
    /// The agent runs and has read its plan.
    Ready,
    /// The agent watches its ranks. Says nothing else; not kept in a job's records.
    Alive,
    /// A rank was started.
    RankStarted {
        /// Global rank.
        rank: u32,
        /// Its process id inside the node.
        pid: u32,
    },
    /// A rank's training program reported something.
    Trainer {
        /// Global rank.
        rank: u32,
        /// What.
        said: TrainerEvent,
    },
    /// A rank wrote a line to standard output or standard error. Bytes that are not UTF-8 are replaced.
    Output {
        /// Global rank.
        rank: u32,
        /// Where to.
        stream: Stream,
        /// The line without its end.
        line: String,
    },
    /// Lines of output that were dropped, because the agent's own output was not read fast enough.
    OutputLost {
        /// How many.
        lines: u64,
    },
    /// A rank ended. All that it reported and wrote came before.
    RankExited {
        /// Global rank.
        rank: u32,
        /// How.
        status: RankStatus,
    },
    /// The agent is stopping its ranks.
    Stopping {
        /// Why.
        reason: StopReason,
    },
    /// The agent cannot do its work; it exits after this.
    Broken {
        /// Why.
        message: String,
    },
    /// All ranks have ended; the agent exits after this.
    Done,
}

/// A standard stream of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// How a rank's process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum RankStatus {
    /// It exited with a code.
    Code(i32),
    /// A signal ended it.
    Signal(i32),
}

/// Why an agent stops its ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum StopReason {
    /// The agent was asked to with SIGTERM or SIGINT.
    Asked,
    /// A rank of this node failed, so that the others could only wait for it.
    RankFailed,
    /// No controller renewed the lease.
    LeaseExpired,
}
