//! The jobs of this machine, seen from outside: their ids, what is in their run directories, and how they are stopped.
//!
//! The folder of jobs has an entry for each id: the job's run directory, or a link to one that lies elsewhere. An entry
//! takes its id for good, whatever becomes of what it leads to.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, BufRead as _, BufReader};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use trainyard_spec::event::{Failure, JobEvent, JobRecord, TrainerEvent};
use trainyard_spec::plan::{EngineKind, LaunchPlan};
use trainyard_spec::protocol::NodeEvent;
use trainyard_spec::{Exit, Name};

use crate::engine;
use crate::journal::EVENTS;
use crate::run_dir::{Holder, PLAN, RunDir, RunDirError, holder, read_plan};

/// A job, as far as its run directory tells.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Status {
    /// Its id.
    pub id: Name,
    /// Its run directory.
    pub run_dir: PathBuf,
    /// Whether it runs.
    pub phase: Phase,
    /// How it ended, where it has.
    pub exit: Option<Exit>,
    /// What runs its nodes.
    pub engine: EngineKind,
    /// Nodes.
    pub nodes: usize,
    /// Ranks in all.
    pub world_size: u32,
    /// Attempts made.
    pub attempts: u32,
    /// Steps done, as last reported.
    pub step: u64,
    /// Steps that it ends at.
    pub steps: u64,
    /// Training loss, as last reported.
    pub loss: Option<f64>,
    /// Validation loss, as last reported.
    pub validation_loss: Option<f64>,
    /// Steps in the newest complete checkpoint.
    pub checkpoint: Option<u64>,
    /// The failure of each attempt that failed.
    pub failures: Vec<Failure>,
    /// When anything last happened, RFC 3339.
    pub last_event: Option<String>,
    /// The controller, while it runs.
    pub controller: Option<Holder>,
}

/// Whether a job runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// A controller is at work.
    Running,
    /// It was ended by its controller.
    Ended,
    /// Its controller is gone without having ended it; its nodes end by their leases, or by [`stop`].
    Abandoned,
}

/// Why a job cannot be looked at or stopped.
#[derive(Debug, thiserror::Error)]
pub enum JobsError {
    /// There is no such job.
    #[error(
        "no job {id:?} in {}, nor a run directory of that path; `trainyard status` lists the jobs of this machine",
        jobs.display()
    )]
    Unknown {
        /// What was asked for.
        id: String,
        /// Where it was looked for.
        jobs: PathBuf,
    },
    /// A file or folder.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A run directory.
    #[error(transparent)]
    RunDir(#[from] RunDirError),
    /// The controller does not stop.
    #[error("process {pid}, the job's controller, cannot be signalled: {source}; it belongs to another user")]
    Signal {
        /// The controller.
        pid: u32,
        /// What the system says.
        source: io::Error,
    },
    /// Something of the job is left.
    #[error("the job is stopped, but something is left of it: {}", errors.join("; "))]
    LeftOver {
        /// What could not be removed.
        errors: Vec<String>,
    },
}

/// An id for the next launch of a job with this name: the name and a number that no entry has, above all that have one.
///
/// # Errors
/// When the folder of jobs is there and cannot be read.
pub fn next_id(jobs: &Path, name: &Name) -> Result<Name, JobsError> {
    let taken = entries(jobs)?;
    let number = |entry: &String| -> Option<u32> {
        entry.strip_prefix(name.as_str())?.strip_prefix('-')?.parse().ok()
    };
    let last = taken.iter().filter_map(number).max().unwrap_or(0);
    let free = (u64::from(last) + 1..).map(|number| numbered(name, number));
    let free =
        free.into_iter().find(|id| taken.binary_search_by(|entry| entry.as_str().cmp(id.as_str())).is_err());
    Ok(free.expect("there are more numbers than entries"))
}

fn numbered(name: &Name, number: u64) -> Name {
    // A name is at most 63 characters, and the number must find room in it.
    let digits = number.to_string();
    let room = 62 - digits.len();
    let stem = name.as_str().get(..room).unwrap_or(name.as_str()).trim_end_matches('-');
    format!("{stem}-{digits}").parse().expect("a name, a dash and digits are a name")
}

/// Makes the run directory of a plan, and takes the plan's id for it; none where another launch has just taken that id.
///
/// # Errors
/// When a folder cannot be written, or the run directory is in use.
pub fn create(jobs: &Path, plan: &LaunchPlan) -> Result<Option<RunDir>, RunDirError> {
    let failed = |action, path: &Path| {
        let path = path.to_owned();
        move |source| RunDirError::Io { action, path, source }
    };
    fs::create_dir_all(jobs).map_err(failed("create", jobs))?;
    let entry = jobs.join(plan.job.as_str());
    let elsewhere = Path::new(&plan.run_dir) != entry;
    let taken = if elsewhere { symlink(&plan.run_dir, &entry) } else { fs::create_dir(&entry) };
    match taken {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(None),
        taken => taken.map_err(failed("create", &entry))?,
    }
    RunDir::create(plan).map(Some).inspect_err(|_| {
        // The id of what was never launched is free again; a folder with something in it stays.
        let _ = if elsewhere { fs::remove_file(&entry) } else { fs::remove_dir(&entry) };
    })
}

/// The run directory of a job, by its id or by its own path.
///
/// # Errors
/// When there is no such job.
pub fn find(jobs: &Path, job: &str) -> Result<PathBuf, JobsError> {
    let named = job.parse::<Name>().ok().map(|id| resolve(&jobs.join(id.as_str())));
    let found = named.into_iter().chain(std::path::absolute(job)).find(|path| path.join(PLAN).is_file());
    found.ok_or_else(|| JobsError::Unknown { id: job.to_owned(), jobs: jobs.to_owned() })
}

/// Where an entry of the folder of jobs leads to.
fn resolve(entry: &Path) -> PathBuf {
    fs::read_link(entry).unwrap_or_else(|_| entry.to_owned())
}

/// All jobs of a folder, sorted by id. Folders without a plan, or with one of another version, are left out.
///
/// # Errors
/// When the folder is there and cannot be read.
pub fn list(jobs: &Path) -> Result<Vec<Status>, JobsError> {
    let statuses = entries(jobs)?.into_iter().map(|name| status(&resolve(&jobs.join(name))));
    statuses.filter(|status| !matches!(status, Err(JobsError::RunDir(_)))).collect()
}

/// Absolute paths that jobs of a folder may yet need: image and data of each that runs, was left by its controller, or
/// ended early since `moment` and can be gone on with.
///
/// # Errors
/// When the folder is there and cannot be read, or a job that runs has a plan of another version.
pub fn needed(jobs: &Path, moment: SystemTime) -> Result<BTreeSet<PathBuf>, JobsError> {
    let mut needed = BTreeSet::new();
    for name in entries(jobs)? {
        let run_dir = resolve(&jobs.join(name));
        let plan = match read_plan(&run_dir) {
            Ok(plan) => plan,
            Err(error) => match holder(&run_dir)? {
                Some(_) => return Err(error.into()),
                // What was never a job, or is one no more.
                None => continue,
            },
        };
        let status = status(&run_dir)?;
        let ended = fs::metadata(run_dir.join(EVENTS)).and_then(|events| events.modified());
        let recent = ended.is_ok_and(|ended| ended >= moment);
        if status.phase != Phase::Ended || (status.exit != Some(Exit::Done) && recent) {
            needed.extend([plan.image.layout, plan.image.rootfs].map(PathBuf::from));
            needed.extend(plan.mounts.into_iter().map(|mount| PathBuf::from(mount.host)));
        }
    }
    Ok(needed)
}

fn entries(jobs: &Path) -> Result<Vec<String>, JobsError> {
    let failed = |source| JobsError::Read { path: jobs.to_owned(), source };
    let mut names = Vec::new();
    match fs::read_dir(jobs) {
        Ok(entries) => {
            for entry in entries {
                names.extend(entry.map_err(failed)?.file_name().into_string().ok());
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    names.sort();
    Ok(names)
}

/// The status of the job in a run directory.
///
/// # Errors
/// When it holds no readable plan.
pub fn status(run_dir: &Path) -> Result<Status, JobsError> {
    let plan = read_plan(run_dir)?;
    // Looked at before the records, so that a job which ends meanwhile is not taken for abandoned.
    let controller = holder(run_dir)?;
    let mut status = Status {
        id: plan.job,
        run_dir: run_dir.to_owned(),
        phase: Phase::Running,
        exit: None,
        engine: plan.engine.kind(),
        nodes: plan.nodes.len(),
        world_size: plan.world_size,
        attempts: 0,
        step: 0,
        steps: plan.trainer.train.steps,
        loss: None,
        validation_loss: None,
        checkpoint: None,
        failures: Vec::new(),
        last_event: None,
        controller,
    };
    let path = run_dir.join(EVENTS);
    let failed = |source| JobsError::Read { path: path.clone(), source };
    match fs::File::open(&path) {
        Ok(file) => {
            for line in BufReader::new(file).split(b'\n') {
                // The last line may be half written, and one after a full disk may be broken.
                if let Ok(record) = serde_json::from_slice::<JobRecord>(&line.map_err(failed)?) {
                    status.take(record);
                }
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    if controller.is_none() {
        status.phase = if status.exit.is_some() { Phase::Ended } else { Phase::Abandoned };
    }
    Ok(status)
}

impl Status {
    fn take(&mut self, record: JobRecord) {
        self.last_event = Some(record.time);
        match record.event {
            JobEvent::Created { .. } => self.exit = None,
            JobEvent::AttemptStarted { .. } => self.attempts += 1,
            JobEvent::AttemptFailed { failure, .. } => self.failures.push(failure),
            JobEvent::Ended { exit, .. } => self.exit = Some(exit),
            JobEvent::Node { said: NodeEvent::Trainer { said, .. }, .. } => match said {
                TrainerEvent::Started { steps, first_step, .. } => {
                    (self.steps, self.step) = (steps, first_step)
                }
                TrainerEvent::Step { step, loss, .. } => (self.step, self.loss) = (step, Some(loss)),
                TrainerEvent::Validation { loss, .. } => self.validation_loss = Some(loss),
                TrainerEvent::Checkpoint { step, .. } => self.checkpoint = Some(step),
                TrainerEvent::Warning { .. }
                | TrainerEvent::Failed { .. }
                | TrainerEvent::Finished { .. } => {}
            },
            JobEvent::Node { .. } | JobEvent::Note { .. } => {}
        }
    }
}

/// How a stopped job was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// Its controller stopped it.
    ByController,
    /// It had no controller any more; what was left of it was removed.
    Remains,
    /// It had ended before.
    Before,
}

/// Time that a controller gets to stop its job with a last checkpoint, then to kill it.
const CONTROLLER_GRACE: [Duration; 2] = [Duration::from_secs(25), Duration::from_secs(15)];

/// Stops a job: asks its controller, or removes what a lost controller left behind.
///
/// # Errors
/// When the controller is another user's, or something cannot be removed.
pub async fn stop(run_dir: &Path) -> Result<Stopped, JobsError> {
    let mut asked = false;
    if let Some(controller) = holder(run_dir)? {
        asked = true;
        for grace in CONTROLLER_GRACE {
            signal(controller, Signal::TERM)?;
            if gone(run_dir, grace).await? {
                return Ok(Stopped::ByController);
            }
        }
        signal(controller, Signal::KILL)?;
        gone(run_dir, CONTROLLER_GRACE[1]).await?;
    }
    if !asked && status(run_dir)?.phase == Phase::Ended {
        return Ok(Stopped::Before);
    }
    let dir = RunDir::open(run_dir)?;
    let errors: Vec<_> = engine::cleanup(dir.plan()).await.iter().map(ToString::to_string).collect();
    record_end(&dir)?;
    if errors.is_empty() { Ok(Stopped::Remains) } else { Err(JobsError::LeftOver { errors }) }
}

fn record_end(dir: &RunDir) -> Result<(), JobsError> {
    let (nobody, _) = tokio::sync::mpsc::unbounded_channel();
    let mut journal = crate::journal::Journal::open(dir.path(), nobody)?;
    journal.record(JobEvent::Ended { exit: Exit::Interrupted, failure: None });
    journal.flush();
    Ok(())
}

async fn gone(run_dir: &Path, patience: Duration) -> Result<bool, JobsError> {
    let started = Instant::now();
    while started.elapsed() < patience {
        if holder(run_dir)?.is_none() {
            return Ok(true);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(false)
}

fn signal(controller: Holder, signal: Signal) -> Result<(), JobsError> {
    let Some(pid) =
        i32::try_from(controller.pid).ok().and_then(Pid::from_raw).filter(|_| controller.is_alive())
    else {
        return Ok(());
    };
    match kill_process(pid, signal) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(error) => Err(JobsError::Signal { pid: controller.pid, source: error.into() }),
    }
}
