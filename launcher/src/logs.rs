//! The logs of a job's ranks, as they are and as they grow.

use std::io;
use std::path::Path;
use std::time::Duration;

use crate::journal::rank_log;
use crate::run_dir::{RunDirError, holder, read_plan};
use crate::tail::{Format, Tail};

/// Reads the logs of a job line by line.
#[derive(Debug)]
pub struct Logs {
    run_dir: std::path::PathBuf,
    tails: Vec<(u32, Tail)>,
    follow: bool,
}

const PERIOD: Duration = Duration::from_millis(100);

impl Logs {
    /// Opens the logs of one rank, or of all. With `follow`, they end when the job's controller does.
    ///
    /// # Errors
    /// When the run directory holds no plan.
    pub fn open(run_dir: &Path, rank: Option<u32>, follow: bool) -> Result<Self, RunDirError> {
        let plan = read_plan(run_dir)?;
        let ranks = (0..plan.world_size).filter(|number| rank.is_none_or(|rank| rank == *number));
        let tails = ranks.map(|rank| (rank, Tail::new(&rank_log(run_dir, rank), Format::Plain))).collect();
        Ok(Self { run_dir: run_dir.to_owned(), tails, follow })
    }

    /// The next lines, in order of time where they come together; none at the end. Each has time, node and rank in front.
    ///
    /// # Errors
    /// When a log cannot be read.
    pub async fn next(&mut self) -> Result<Option<Vec<String>>, LogsError> {
        loop {
            // Looked at before reading: what a controller wrote before it ended is then read below.
            let over = !self.follow || holder(&self.run_dir)?.is_none();
            let mut lines = Vec::new();
            for (rank, tail) in &mut self.tails {
                lines.extend(tail.lines().map_err(|source| LogsError::Read { rank: *rank, source })?);
            }
            // Each line starts with its time in a form that sorts.
            lines.sort_by(|a, b| a.split(' ').next().cmp(&b.split(' ').next()));
            if !lines.is_empty() {
                return Ok(Some(lines));
            }
            if over {
                return Ok(None);
            }
            tokio::time::sleep(PERIOD).await;
        }
    }
}

/// A log cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum LogsError {
    /// The log of a rank.
    #[error("cannot read the log of rank {rank}: {source}")]
    Read {
        /// The rank.
        rank: u32,
        /// What the system says.
        source: io::Error,
    },
    /// The run directory.
    #[error(transparent)]
    RunDir(#[from] RunDirError),
}
