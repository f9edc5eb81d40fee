//! Where everything that happens to a job goes: its `events.jsonl`, the logs of its ranks, and whoever watches.
//!
//! A disk that is full must not end a job: what cannot be written is told once, and the job goes on.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write as _};
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use tokio::sync::mpsc::UnboundedSender;
use trainyard_spec::FormatVersion;
use trainyard_spec::event::{JobEvent, JobRecord};
use trainyard_spec::protocol::{NodeEvent, Stream};

use crate::plan::hostname;
use crate::run_dir::RunDirError;

/// Name of the records' file in a run directory.
pub(crate) const EVENTS: &str = "events.jsonl";

/// The log of a rank in a run directory.
pub(crate) fn rank_log(run_dir: &Path, rank: u32) -> PathBuf {
    run_dir.join(format!("logs/rank-{rank}.log"))
}

#[derive(Debug)]
pub(crate) struct Journal {
    run_dir: PathBuf,
    events: BufWriter<File>,
    logs: BTreeMap<u32, BufWriter<File>>,
    watcher: UnboundedSender<JobRecord>,
    write_failed: bool,
}

impl Journal {
    pub(crate) fn open(run_dir: &Path, watcher: UnboundedSender<JobRecord>) -> Result<Self, RunDirError> {
        let path = run_dir.join(EVENTS);
        let events = append(&path).map_err(|source| RunDirError::Io { action: "open", path, source })?;
        Ok(Self { run_dir: run_dir.to_owned(), events, logs: BTreeMap::new(), watcher, write_failed: false })
    }

    /// Keeps an event. Lines of ranks go to their logs, everything else to the records.
    pub(crate) fn record(&mut self, event: JobEvent) {
        let record = JobRecord { version: FormatVersion, time: now(), event };
        if let Err((path, error)) = self.write(&record) {
            self.write_failed(&path, &error);
        }
        // Nobody has to watch.
        let _ = self.watcher.send(record);
    }

    pub(crate) fn note(&mut self, message: String) {
        self.record(JobEvent::Note { message });
    }

    fn write(&mut self, record: &JobRecord) -> Result<(), (PathBuf, io::Error)> {
        if let JobEvent::Node { node, said: NodeEvent::Output { rank, stream, line } } = &record.event {
            let path = rank_log(&self.run_dir, *rank);
            let failed = |error| (path.clone(), error);
            let log = match self.logs.entry(*rank) {
                std::collections::btree_map::Entry::Occupied(log) => log.into_mut(),
                std::collections::btree_map::Entry::Vacant(place) => {
                    place.insert(append(&path).map_err(failed)?)
                }
            };
            let stream = match stream {
                Stream::Stdout => "out",
                Stream::Stderr => "err",
            };
            let time = &record.time;
            return writeln!(log, "{time} {} rank-{rank} {stream} {line}", hostname(*node)).map_err(failed);
        }
        let line = serde_json::to_string(record).expect("formats of this project have text keys alone");
        writeln!(self.events, "{line}").map_err(|error| (self.run_dir.join(EVENTS), error))
    }

    /// Hands to the system what was kept back to be written together.
    pub(crate) fn flush(&mut self) {
        if let Err(error) = self.events.flush() {
            self.write_failed(&self.run_dir.join(EVENTS), &error);
        }
        let failed: Vec<_> = self
            .logs
            .iter_mut()
            .filter_map(|(rank, log)| log.flush().err().map(|error| (*rank, error)))
            .collect();
        for (rank, error) in failed {
            self.write_failed(&rank_log(&self.run_dir, rank), &error);
        }
    }

    fn write_failed(&mut self, path: &Path, error: &io::Error) {
        if !std::mem::replace(&mut self.write_failed, true) {
            let message =
                format!("cannot write {}: {error}; the job goes on, its logs have gaps", path.display());
            let event = JobEvent::Note { message };
            let _ = self.watcher.send(JobRecord { version: FormatVersion, time: now(), event });
        }
    }
}

fn append(path: &Path) -> io::Result<BufWriter<File>> {
    Ok(BufWriter::new(OpenOptions::new().create(true).append(true).open(path)?))
}

fn now() -> String {
    format!("{:.3}", Timestamp::now())
}
