//! Exit codes of `trainyard`. Scripts may rely on them.

use serde::{Deserialize, Serialize};

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[repr(u8)]
pub enum Exit {
    /// Everything asked for was done.
    Done = 0,
    /// The command line is wrong, or names something that is not there.
    Usage = 2,
    /// A manifest, lock or job file is invalid.
    Invalid = 3,
    /// An input could not be fetched, or did not match its lock.
    Input = 4,
    /// Preflight refused: this machine or a host cannot run the job as asked.
    Preflight = 5,
    /// The training program failed.
    Program = 6,
    /// The infrastructure failed (a node, the disk, the engine) and retries are spent.
    Infrastructure = 7,
    /// Attempts made no progress beyond the last checkpoint.
    NoProgress = 8,
    /// Interrupted by Ctrl-C or SIGTERM; everything was stopped.
    Interrupted = 130,
}

impl Exit {
    /// The process exit code.
    pub const fn code(self) -> u8 {
        self as u8
    }
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        exit.code().into()
    }
}
