//! What a rank says: events for the launcher, lines for people.
//!
//! Events go to the file that the launcher names, one JSON object a line, each in one write so that lines of several
//! writers do not mix. People read rank 0's standard output.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use trainyard_spec::event::TrainerEvent;

/// Where a rank's reports go.
#[derive(Debug)]
pub struct Reporter {
    events: Option<File>,
    /// Whether this rank reports what all ranks share.
    speaks_for_all: bool,
}

/// The file for events cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot write events to {} (TRAINYARD_EVENTS): {source}", .path.display())]
pub struct ReportError {
    path: PathBuf,
    source: io::Error,
}

impl Reporter {
    /// Opens the file for events, to append.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn open(events: Option<&Path>) -> Result<Self, ReportError> {
        let open = |path: &Path| {
            File::options()
                .create(true)
                .append(true)
                .open(path)
                .map_err(|source| ReportError { path: path.to_owned(), source })
        };
        Ok(Self { events: events.map(open).transpose()?, speaks_for_all: true })
    }

    /// From now on, only rank 0 reports what all ranks share.
    pub fn set_rank(&mut self, rank: u32) {
        self.speaks_for_all = rank == 0;
    }

    /// Reports something that is true for all ranks: `line` for people, `event` for the launcher.
    pub fn shared(&mut self, line: impl FnOnce() -> String, event: impl FnOnce() -> TrainerEvent) {
        if self.speaks_for_all {
            say(&line());
            self.own(&event());
        }
    }

    /// Reports something of this rank alone.
    pub fn own(&mut self, event: &TrainerEvent) {
        let Some(file) = &mut self.events else { return };
        let written = serde_json::to_vec(event).map_err(io::Error::from).and_then(|mut line| {
            line.push(b'\n');
            file.write_all(&line)
        });
        if let Err(error) = written {
            // A launcher that no longer listens is no reason to stop training; saying it once is enough.
            complain(&format!("events can no longer be written: {error}"));
            self.events = None;
        }
    }
}

fn say(line: &str) {
    // Nobody may be listening, which is no reason to stop.
    let _ = writeln!(io::stdout().lock(), "{line}");
}

/// Writes a line to standard error.
pub fn complain(line: &str) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}
