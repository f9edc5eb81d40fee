//! Checkpoints: a folder `step_N` with one safetensors file per rank that wrote it, and `manifest.json`.
//!
//! Each rank writes its share of the flat parameters and of both AdamW moments, so nothing is written twice; tensors are
//! keyed `kind/name@offset` with the global name of the tensor and the offset of the piece in it, so any number of ranks
//! can read them. A folder gets its name when all of it is on disk (see [`mod@write`]), so what carries the name and yet is
//! not whole was damaged later; [`read`] verifies every byte before it is used.
//!
//! Left out: when checkpoints are written and what becomes of their contents.

pub mod read;
pub mod write;

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use trainyard_spec::event::FailureClass;
use trainyard_spec::trainer::ModelConfig;
use trainyard_spec::{Digest, FormatVersion};

use crate::dist::CollectiveError;
use crate::tokenizer::Tokenizer;

/// Name of the manifest in a checkpoint's folder.
pub const MANIFEST: &str = "manifest.json";

/// What `manifest.json` says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct CheckpointManifest {
    /// Format version.
    pub version: FormatVersion<1>,
    /// What must be the same for a run to go on from here.
    pub identity: Identity,
    /// Steps done.
    pub step: u64,
    /// Samples consumed by all ranks together: the index of the next one.
    pub samples: u64,
    /// Ranks that wrote it.
    pub world_size: u32,
    /// Elements of the flat parameter buffer.
    pub parameters: u64,
    /// The files, in order of the elements they hold.
    pub files: Vec<FileEntry>,
}

/// What makes two runs the same run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Identity {
    /// Shape of the model.
    pub model: ModelConfig,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// Its number of tokens.
    pub vocabulary: u32,
    /// Digest of the data set's manifest.
    pub dataset: Digest,
    /// Seed of the initial weights and of the order of the data.
    pub seed: u64,
}

/// One rank's file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct FileEntry {
    /// Name in the checkpoint's folder.
    pub file: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Digest of the whole file.
    pub digest: Digest,
    /// First element of the flat buffers that it holds.
    pub start: u64,
    /// Element after the last.
    pub end: u64,
}

/// Which flat buffer a tensor is a piece of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The model's parameters.
    Parameter,
    /// AdamW's first moments.
    FirstMoment,
    /// AdamW's second moments.
    SecondMoment,
}

impl Kind {
    /// The key of the piece of tensor `name` that starts at `offset`.
    fn key(self, name: &str, offset: usize) -> String {
        let kind = match self {
            Self::Parameter => "parameter",
            Self::FirstMoment => "first-moment",
            Self::SecondMoment => "second-moment",
        };
        format!("{kind}/{name}@{offset}")
    }
}

/// What is wrong with a checkpoint that once was whole.
#[derive(Debug, thiserror::Error)]
pub enum Damage {
    /// The manifest is not one, or of another version.
    #[error("{MANIFEST}: {0}")]
    Manifest(#[source] serde_json::Error),
    /// There is not one file for each rank that wrote it.
    #[error("manifest.json: world-size is {found}; needed is {needed}, the number of files")]
    WorldSize {
        /// What the manifest says.
        found: u32,
        /// What follows from its files.
        needed: u32,
    },
    /// A file is named by a path.
    #[error("manifest.json: {file:?} is not the plain name of a file in this folder")]
    Name {
        /// What stands there.
        file: String,
    },
    /// A file that should be there is not.
    #[error("{file} is missing")]
    Missing {
        /// The file.
        file: String,
    },
    /// A file was cut off, or more was added.
    #[error("{file} has {found} bytes; needed are {needed}")]
    Size {
        /// The file.
        file: String,
        /// Its size.
        found: u64,
        /// Its size by the manifest.
        needed: u64,
    },
    /// A file's bytes changed.
    #[error("{file} has the digest {found}; needed is {needed}")]
    Digest {
        /// The file.
        file: String,
        /// The digest of its bytes.
        found: Digest,
        /// Its digest by the manifest.
        needed: Digest,
    },
    /// The files do not hold every element once.
    #[error("{file} starts at element {found}; needed is {needed}, where the file before it ends")]
    Gap {
        /// The file, or the manifest for the end.
        file: String,
        /// Where it starts.
        found: u64,
        /// Where it should.
        needed: u64,
    },
    /// A file is not safetensors, or lacks a tensor.
    #[error("{file}: {source}")]
    Tensors {
        /// The file.
        file: String,
        /// What is wrong.
        source: safetensors::SafeTensorError,
    },
    /// A tensor has another type or size.
    #[error("{file}: {key} is {found}; needed are {needed} elements of F32")]
    Tensor {
        /// The file.
        file: String,
        /// The tensor.
        key: String,
        /// What it is.
        found: String,
        /// Elements needed.
        needed: usize,
    },
}

/// Why a checkpoint could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The operating system refused.
    #[error("checkpoint: {operation} {}: {source}", .path.display())]
    Io {
        /// What was tried.
        operation: &'static str,
        /// On what.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file could not be made.
    #[error("checkpoint: cannot write {}: {source}", .path.display())]
    Serialize {
        /// The file.
        path: PathBuf,
        /// Why.
        source: safetensors::SafeTensorError,
    },
    /// Another rank could not do its part.
    #[error("{0}")]
    Peer(Refusal),
    /// The folder is not the same for all ranks.
    #[error("checkpoint: {} does not show what another rank has written there ({file}); needed is one folder that all nodes share", .folder.display())]
    NotShared {
        /// The folder.
        folder: PathBuf,
        /// The file.
        file: String,
    },
    /// A rank was lost meanwhile.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// The checkpoint is not whole.
    #[error("checkpoint {} is damaged: {damage}", .path.display())]
    Damaged {
        /// Its folder.
        path: PathBuf,
        /// What is wrong.
        damage: Damage,
    },
    /// The checkpoint is of another run.
    #[error(
        "checkpoint {} belongs to another run: its {field} is {found}, this run's is {needed}; give the run another folder, or \
         make the two agree", .path.display()
    )]
    Foreign {
        /// Its folder.
        path: PathBuf,
        /// What differs.
        field: &'static str,
        /// What the checkpoint has.
        found: String,
        /// What this run has.
        needed: String,
    },
    /// There are checkpoints, and none is whole.
    #[error("no checkpoint in {} is whole ({}); start anew in another folder, or with the damaged ones moved away", .folder.display(), .problems.join("; "))]
    NoneWhole {
        /// The folder.
        folder: PathBuf,
        /// What is wrong with each.
        problems: Vec<String>,
    },
    /// A new run would mix its checkpoints with another's.
    #[error("{} holds checkpoints (newest: step {newest}), and this run does not resume; use --resume auto, or another folder", .folder.display())]
    Occupied {
        /// The folder.
        folder: PathBuf,
        /// Step of the newest.
        newest: u64,
    },
    /// The run would go on beside checkpoints of its own future.
    #[error("resuming from step {step} while {} holds step {newest}; move the newer checkpoints away, or use another folder", .folder.display())]
    NotNewest {
        /// The folder.
        folder: PathBuf,
        /// Step of the one asked for.
        step: u64,
        /// Step of the newest.
        newest: u64,
    },
    /// There is no checkpoint.
    #[error("{} is not a checkpoint and holds none", .path.display())]
    NotFound {
        /// The path.
        path: PathBuf,
    },
}

/// A rank's failure, as it tells the others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[error("rank {rank}: {message}")]
pub struct Refusal {
    /// The rank.
    pub rank: u32,
    /// Whose fault it is.
    pub class: FailureClass,
    /// What went wrong.
    pub message: String,
}

impl CheckpointError {
    /// Whose fault it is.
    pub fn class(&self) -> FailureClass {
        let of_io = |error: &io::Error| match error.kind() {
            io::ErrorKind::PermissionDenied
            | io::ErrorKind::ReadOnlyFilesystem
            | io::ErrorKind::NotADirectory
            | io::ErrorKind::AlreadyExists => FailureClass::User,
            _ => FailureClass::Host,
        };
        match self {
            Self::Io { source, .. } => of_io(source),
            Self::Serialize { source: safetensors::SafeTensorError::IoError(source), .. } => of_io(source),
            Self::Serialize { .. } => FailureClass::Host,
            Self::Peer(refusal) => refusal.class,
            Self::Collective(_) => FailureClass::Network,
            Self::NotShared { .. }
            | Self::Damaged { .. }
            | Self::Foreign { .. }
            | Self::NoneWhole { .. }
            | Self::Occupied { .. }
            | Self::NotNewest { .. }
            | Self::NotFound { .. } => FailureClass::User,
        }
    }
}

fn io_error<'a>(operation: &'static str, path: &'a Path) -> impl Fn(io::Error) -> CheckpointError + 'a {
    move |source| CheckpointError::Io { operation, path: path.to_owned(), source }
}

/// Name of the folder of step `step`.
fn folder_name(step: u64) -> String {
    format!("step_{step}")
}

/// Steps of the checkpoints in `folder`, ascending. None when there is no such folder.
fn steps(folder: &Path) -> Result<Vec<u64>, CheckpointError> {
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        result => result.map_err(io_error("cannot list", folder))?,
    };
    let mut steps = Vec::new();
    for entry in entries {
        let name = entry.map_err(io_error("cannot list", folder))?.file_name();
        let step = name.to_str().and_then(|name| name.strip_prefix("step_")).and_then(|n| n.parse().ok());
        // "step_007" is not ours: it would be found under another name than it has.
        steps.extend(step.filter(|&step| name.to_str() == Some(&folder_name(step))));
    }
    steps.sort_unstable();
    Ok(steps)
}
