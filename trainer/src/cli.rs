//! The command line, as clap parses it.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Trains GPT-2 style decoders on CPUs.
///
/// Exit codes: 0 all is done; 1 it failed, and said why; 2 the command line is wrong; 143 it was asked to stop (SIGTERM
/// or SIGINT) and has written a checkpoint.
#[derive(Debug, Parser)]
#[command(name = "trainyard-trainer", version)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train as one rank of a job; the others are found through torchrun's environment variables.
    Train(Train),
    /// Write text with a trained model.
    Sample(Sample),
    /// Print what a run will take: parameters, memory, arithmetic, messages.
    Plan(Plan),
}

/// Arguments of `train`.
#[derive(Debug, Args)]
pub struct Train {
    /// The trainer's configuration (JSON).
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
    /// The data set, as `trainyard data prepare` writes it.
    #[arg(long, value_name = "DIR")]
    pub data: PathBuf,
    /// Where checkpoints are written and found; the same folder for all ranks.
    #[arg(long, value_name = "DIR")]
    pub checkpoints: PathBuf,
    /// auto: the newest whole checkpoint, if there is one; none: from the start; or the path of a checkpoint.
    #[arg(long, value_name = "auto|none|PATH", default_value = "auto")]
    pub resume: String,
    /// Threads of this rank [default: OMP_NUM_THREADS, or the processors divided by the ranks of the node].
    #[arg(long, value_name = "N")]
    pub threads: Option<NonZeroUsize>,
    /// Longest wait for other ranks while nothing moves.
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub timeout: u64,
}

/// Arguments of `sample`.
#[derive(Debug, Args)]
pub struct Sample {
    /// A checkpoint, or a folder of checkpoints, of which the newest whole one is taken.
    #[arg(long, value_name = "PATH")]
    pub checkpoint: PathBuf,
    /// Text to go on from.
    #[arg(long, value_name = "TEXT", default_value = "\n", hide_default_value = true)]
    pub prompt: String,
    /// Tokens to write.
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub tokens: u32,
    /// Softmax temperature; 0 always takes the likeliest token.
    #[arg(long, value_name = "X", default_value_t = 0.8)]
    pub temperature: f64,
    /// Decides what is drawn.
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub seed: u64,
    /// Threads to compute with [default: all processors].
    #[arg(long, value_name = "N")]
    pub threads: Option<NonZeroUsize>,
}

/// Arguments of `plan`.
#[derive(Debug, Args)]
pub struct Plan {
    /// The trainer's configuration (JSON).
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
    /// Tokens of the tokenizer.
    #[arg(long, value_name = "V", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    pub vocab: u32,
    /// Ranks in all.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub world_size: u32,
    /// How to print it.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    pub format: Format,
}

/// A form of output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    Text,
    /// For programs.
    Json,
}
