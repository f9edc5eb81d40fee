//! Token data sets: a folder with `dataset.json` and token shards, written by [`prepare`](prepare::prepare).
//!
//! Responsible for what a data set is, for windows of its tokens and for their order. Left out: batches and ranks,
//! which are the training loop's, and where texts come from.

pub mod order;
pub mod prepare;
pub mod shard;

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use trainyard_spec::{Digest, FormatVersion};

use crate::tokenizer::Tokenizer;
use shard::{Shard, ShardError};

/// Name of the manifest in a data set's folder.
pub const MANIFEST: &str = "dataset.json";

/// What `dataset.json` says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct DatasetManifest {
    /// Format version.
    pub version: FormatVersion<1>,
    /// What turned text into tokens.
    pub tokenizer: Tokenizer,
    /// Number of different tokens.
    pub vocabulary: u32,
    /// The texts, joined.
    pub source: Source,
    /// Part of the text, at its end, that is held out.
    pub validation_fraction: f64,
    /// Tokens to train on.
    pub train: Split,
    /// Tokens held out.
    pub validation: Split,
    /// Loss in nats on the validation text of a model that knows the token frequencies of the training text alone,
    /// each count raised by one.
    pub unigram_loss: f64,
}

/// The joined texts that a data set was made from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Source {
    /// Bytes.
    pub bytes: u64,
    /// Digest of the bytes.
    pub digest: Digest,
}

/// A part of a data set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Split {
    /// Tokens in all shards.
    pub tokens: u64,
    /// The shards, in order.
    pub shards: Vec<ShardEntry>,
}

/// One shard of a split.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct ShardEntry {
    /// File name in the data set's folder.
    pub file: String,
    /// Tokens.
    pub tokens: u64,
    /// Digest of the tokens' bytes, the header left out.
    pub digest: Digest,
}

/// Why a data set cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The manifest cannot be read.
    #[error("cannot read {}: {source}; `trainyard data prepare` makes a data set", .path.display())]
    Read {
        /// The manifest.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The manifest is not one.
    #[error("{}: {source}", .path.display())]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// What is wrong in it.
        source: serde_json::Error,
    },
    /// The manifest contradicts itself.
    #[error("{}: {field} is {found}; needed is {needed}", .path.display())]
    Field {
        /// The manifest.
        path: PathBuf,
        /// The field.
        field: String,
        /// What it says.
        found: u64,
        /// What follows from the rest.
        needed: u64,
    },
    /// A shard is named by a path.
    #[error("{}: {file:?} is not the plain name of a file in this folder", .path.display())]
    Name {
        /// The manifest.
        path: PathBuf,
        /// What stands there.
        file: String,
    },
    /// A shard is unusable.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// There is not one window.
    #[error("{}: the {split} text has {found} tokens; needed are at least {needed} (context {context} and one to predict): use a longer text or a smaller context", .path.display())]
    TooShort {
        /// The data set's folder.
        path: PathBuf,
        /// Which part.
        split: &'static str,
        /// Tokens there.
        found: u64,
        /// Tokens of one window.
        needed: u64,
        /// The model's context.
        context: u32,
    },
}

/// A data set that is there and whole.
#[derive(Debug)]
pub struct Dataset {
    /// What `dataset.json` says.
    pub manifest: DatasetManifest,
    /// Digest of `dataset.json`: the data set's identity.
    pub digest: Digest,
    /// Tokens to train on.
    pub train: Tokens,
    /// Tokens held out.
    pub validation: Tokens,
}

/// The tokens of one split.
#[derive(Debug)]
pub struct Tokens {
    shards: Vec<Shard>,
}

impl Dataset {
    /// Opens the data set in `folder`.
    ///
    /// # Errors
    /// When the manifest or a shard is not there, damaged, or the two disagree.
    pub fn open(folder: &Path) -> Result<Self, DataError> {
        let path = folder.join(MANIFEST);
        let bytes = std::fs::read(&path).map_err(|source| DataError::Read { path: path.clone(), source })?;
        let manifest: DatasetManifest = serde_json::from_slice(&bytes)
            .map_err(|source| DataError::Manifest { path: path.clone(), source })?;
        let field = |field: &str, found, needed| {
            let (path, field) = (path.clone(), field.to_owned());
            if found == needed { Ok(()) } else { Err(DataError::Field { path, field, found, needed }) }
        };
        field("vocabulary", manifest.vocabulary.into(), manifest.tokenizer.vocabulary().into())?;
        let open = |name: &str, split: &Split| {
            let mut shards = Vec::with_capacity(split.shards.len());
            for entry in &split.shards {
                // A name from outside must not lead out of the folder.
                if Path::new(&entry.file).file_name() != Some(entry.file.as_ref()) {
                    return Err(DataError::Name { path: path.clone(), file: entry.file.clone() });
                }
                let shard = Shard::open(&folder.join(&entry.file), manifest.vocabulary)?;
                field(&format!("tokens of {}", entry.file), entry.tokens, shard.len() as u64)?;
                shards.push(shard);
            }
            let tokens = Tokens { shards };
            field(&format!("{name}.tokens"), split.tokens, tokens.len())?;
            Ok::<_, DataError>(tokens)
        };
        let (train, validation) =
            (open("train", &manifest.train)?, open("validation", &manifest.validation)?);
        Ok(Self { digest: Digest::of(&bytes), train, validation, manifest })
    }

    /// Whether both parts hold at least one window for a model of this context.
    ///
    /// # Errors
    /// When one does not; it names the tokens needed and found.
    pub fn require_context(&self, folder: &Path, context: u32) -> Result<(), DataError> {
        for (split, tokens) in [("training", &self.train), ("validation", &self.validation)] {
            let (found, needed) = (tokens.len(), u64::from(context) + 1);
            if found < needed {
                return Err(DataError::TooShort { path: folder.to_owned(), split, found, needed, context });
            }
        }
        Ok(())
    }
}

impl Tokens {
    /// Number of tokens.
    pub fn len(&self) -> u64 {
        self.shards.iter().map(|shard| shard.len() as u64).sum()
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of windows: they start every `context` tokens, and each has one token more, the last to predict.
    pub fn windows(&self, context: u32) -> u64 {
        self.len().saturating_sub(1) / u64::from(context)
    }

    /// Appends the inputs and the targets of a window: the same tokens, one apart.
    ///
    /// # Errors
    /// When a token is outside the vocabulary.
    ///
    /// # Panics
    /// When there is no such window.
    pub fn read_window(
        &self,
        window: u64,
        context: u32,
        inputs: &mut Vec<u32>,
        targets: &mut Vec<u32>,
    ) -> Result<(), ShardError> {
        let mut start = window * u64::from(context);
        let mut tokens = Vec::with_capacity(context as usize + 1);
        for shard in &self.shards {
            let missing = context as usize + 1 - tokens.len();
            let held = shard.len() as u64;
            if start < held && missing > 0 {
                let count = missing.min((held - start) as usize);
                shard.read(start as usize, count, &mut tokens)?;
                start = 0;
            } else {
                start = start.saturating_sub(held);
            }
        }
        assert_eq!(tokens.len(), context as usize + 1, "window {window} is beyond the split");
        inputs.extend_from_slice(&tokens[..context as usize]);
        targets.extend_from_slice(&tokens[1..]);
        Ok(())
    }
}
