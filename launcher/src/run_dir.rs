//! A job's run directory: its layout, and the lock that makes one controller its owner.
//!
//! ```text
//! plan.json            what is launched
//! lock                 held by the controller; says who it is
//! events.jsonl         what happened, as job records
//! job/trainer.json     what nodes may read
//! checkpoints/         what nodes write
//! logs/rank-N.log      what ranks wrote, with time and node
//! attempt-A/node-N/    a node's plan, lease, pipes and what its agent said
//! ```

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use trainyard_spec::plan::LaunchPlan;

use crate::machine::start_time;
use crate::plan::TRAINER_CONFIG;

/// Why a run directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RunDirError {
    /// The file system refused.
    #[error("cannot {action} {}: {source}{}", path.display(), hint(.source))]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// Something is there already.
    #[error("{}: {found}; needed is a run directory that is new or empty", path.display())]
    Used {
        /// The directory.
        path: PathBuf,
        /// What is there.
        found: &'static str,
    },
    /// It lies elsewhere than its plan says, and so do its checkpoints.
    #[error("{}: this job was planned to run in {}; move its folder back there", path.display(), planned.display())]
    Moved {
        /// Where it is.
        path: PathBuf,
        /// Where it was.
        planned: PathBuf,
    },
    /// A controller is at work.
    #[error(
        "{}: process {} is running this job; wait for it, or end it with `trainyard stop`",
        path.display(),
        holder.as_ref().map_or_else(|| "of unknown id".to_owned(), |holder| holder.pid.to_string())
    )]
    Held {
        /// The directory.
        path: PathBuf,
        /// Who holds it.
        holder: Option<Holder>,
    },
    /// The plan cannot be read back.
    #[error("{}: not a launch plan that this trainyard reads: {source}", path.display())]
    Plan {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: serde_json::Error,
    },
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => "; name a folder that you own with --run-dir or TRAINYARD_HOME",
        io::ErrorKind::ReadOnlyFilesystem => "; name a folder elsewhere with --run-dir or TRAINYARD_HOME",
        io::ErrorKind::StorageFull => {
            "; free some space there, or name a folder on another disk with --run-dir or TRAINYARD_HOME"
        }
        _ => "",
    }
}

fn failed<'a>(action: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> RunDirError + 'a {
    move |source| RunDirError::Io { action, path: path.to_owned(), source }
}

/// The controller of a run directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Holder {
    /// Its process id.
    pub pid: u32,
    /// When it started, in clock ticks after boot: a process id may be given again, the pair is not.
    pub start_time: u64,
}

impl Holder {
    /// Whether that very process still runs.
    pub fn is_alive(self) -> bool {
        start_time(self.pid) == Some(self.start_time)
    }
}

/// A run directory with its plan, held by this process until dropped.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    plan: LaunchPlan,
    _lock: File,
}

/// File of a run directory that makes it one.
pub(crate) const PLAN: &str = "plan.json";
const LOCK: &str = "lock";
/// Time for which [`RunDir::open`] waits for the process that created the folder to let it go.
const HAND_OVER: Duration = Duration::from_secs(2);

impl RunDir {
    /// Makes the run directory of a plan, with all that its nodes need before they start. Drop it, then
    /// [`RunDir::open`] it in another process to hand the launch over.
    ///
    /// # Errors
    /// When the folder cannot be written, or holds a launch.
    pub fn create(plan: &LaunchPlan) -> Result<Self, RunDirError> {
        let path = PathBuf::from(&plan.run_dir);
        if fs::symlink_metadata(&path).is_err() {
            folder(&path, 0o755)?;
        }
        check_folder(&path)?;
        let lock = hold(&path, Duration::ZERO)?;
        check_empty(&path)?;
        for name in ["job", "logs", "checkpoints"] {
            folder(&path.join(name), 0o755)?;
        }
        write_whole(&path.join("job").join(TRAINER_CONFIG), &json(&plan.trainer))?;
        // The plan comes last: a folder with a plan is complete.
        write_whole(&path.join(PLAN), &json(plan))?;
        Ok(Self { path, plan: plan.clone(), _lock: lock })
    }

    /// Takes over a run directory that [`RunDir::create`] made, to run its job for the first time or again from its last
    /// checkpoint.
    ///
    /// # Errors
    /// When there is no readable plan, or another process holds the folder.
    pub fn open(path: &Path) -> Result<Self, RunDirError> {
        let plan = read_plan(path)?;
        let planned = PathBuf::from(&plan.run_dir);
        let same = |a: &fs::Metadata, b: &fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
        if !fs::metadata(path).is_ok_and(|here| fs::metadata(&planned).is_ok_and(|there| same(&here, &there)))
        {
            return Err(RunDirError::Moved { path: path.to_owned(), planned });
        }
        let lock = hold(path, HAND_OVER)?;
        Ok(Self { path: path.to_owned(), plan, _lock: lock })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The plan.
    pub fn plan(&self) -> &LaunchPlan {
        &self.plan
    }

    /// Number of the first attempt that was not made here yet.
    pub(crate) fn next_attempt(&self) -> Result<u32, RunDirError> {
        let mut next = 0;
        for entry in fs::read_dir(&self.path).map_err(failed("list", &self.path))? {
            let entry = entry.map_err(failed("list", &self.path))?;
            let number = entry
                .file_name()
                .to_str()
                .and_then(|name| name.strip_prefix("attempt-")?.parse::<u32>().ok());
            next = next.max(number.map_or(0, |number| number.saturating_add(1)));
        }
        Ok(next)
    }
}

/// Whether a new job can have this run directory: nothing is there, or an empty folder.
///
/// # Errors
/// When something is there, or another process runs a job in it.
pub fn check_free(path: &Path) -> Result<(), RunDirError> {
    if fs::symlink_metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
        return Ok(());
    }
    check_folder(path)?;
    match holder(path)? {
        Some(holder) => Err(RunDirError::Held { path: path.to_owned(), holder: Some(holder) }),
        None => check_empty(path),
    }
}

fn check_empty(path: &Path) -> Result<(), RunDirError> {
    let used = |found| Err(RunDirError::Used { path: path.to_owned(), found });
    if path.join(PLAN).exists() {
        return used("holds another launch already");
    }
    for entry in fs::read_dir(path).map_err(failed("list", path))? {
        // Left by a launch that was refused.
        if entry.map_err(failed("list", path))?.file_name() != LOCK {
            return used("is not empty");
        }
    }
    Ok(())
}

fn check_folder(path: &Path) -> Result<(), RunDirError> {
    let used = |found| Err(RunDirError::Used { path: path.to_owned(), found });
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => Ok(()),
        Ok(_) => used("is not a folder"),
        Err(error) if error.kind() == io::ErrorKind::NotFound => used("is a link that leads nowhere"),
        Err(source) => Err(failed("look at", path)(source)),
    }
}

/// The plan in a run directory.
///
/// # Errors
/// When there is none, or it is of another version.
pub fn read_plan(run_dir: &Path) -> Result<LaunchPlan, RunDirError> {
    let path = run_dir.join(PLAN);
    let bytes = fs::read(&path).map_err(failed("read", &path))?;
    serde_json::from_slice(&bytes).map_err(|source| RunDirError::Plan { path, source })
}

/// The live controller of a run directory, if there is one.
///
/// # Errors
/// When the lock file is there and cannot be looked at.
pub fn holder(run_dir: &Path) -> Result<Option<Holder>, RunDirError> {
    let path = run_dir.join(LOCK);
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(failed("open", &path)(source)),
    };
    for _ in 0..10 {
        match file.try_lock_shared() {
            Ok(()) => return Ok(None),
            // It says who it is right after it has the lock.
            Err(TryLockError::WouldBlock) => match read_holder(&file) {
                Some(holder) => return Ok(Some(holder)),
                None => std::thread::sleep(Duration::from_millis(20)),
            },
            Err(TryLockError::Error(source)) => return Err(failed("lock", &path)(source)),
        }
    }
    Err(RunDirError::Held { path: run_dir.to_owned(), holder: None })
}

fn read_holder(mut file: &File) -> Option<Holder> {
    let mut text = String::new();
    file.rewind().ok()?;
    file.read_to_string(&mut text).ok()?;
    serde_json::from_str(&text).ok()
}

fn hold(run_dir: &Path, patience: Duration) -> Result<File, RunDirError> {
    let path = run_dir.join(LOCK);
    let mut options = OpenOptions::new();
    let mut file = options
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .map_err(failed("open", &path))?;
    let started = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => break,
            // Also met for a moment when somebody only looks who holds it.
            Err(TryLockError::WouldBlock) if started.elapsed() < patience.max(Duration::from_millis(100)) => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(TryLockError::WouldBlock) => {
                return Err(RunDirError::Held { path: run_dir.to_owned(), holder: read_holder(&file) });
            }
            Err(TryLockError::Error(source)) => return Err(failed("lock", &path)(source)),
        }
    }
    let pid = std::process::id();
    let holder = Holder { pid, start_time: start_time(pid).unwrap_or(0) };
    file.set_len(0).and_then(|()| file.write_all(&json(&holder))).map_err(failed("write", &path))?;
    Ok(file)
}

/// Makes a folder and its parents.
pub(crate) fn folder(path: &Path, mode: u32) -> Result<(), RunDirError> {
    DirBuilder::new().recursive(true).mode(mode).create(path).map_err(failed("create", path))
}

/// Writes a file so that it is either whole or not there.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), RunDirError> {
    let parent = path.parent().unwrap_or(path);
    let mut file = tempfile::Builder::new()
        .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644))
        .tempfile_in(parent)
        .map_err(failed("write in", parent))?;
    file.write_all(bytes).and_then(|()| file.as_file().sync_all()).map_err(failed("write", path))?;
    file.persist(path).map_err(|error| failed("write", path)(error.error))?;
    Ok(())
}

/// A value as JSON for people to read too.
pub(crate) fn json<T: Serialize>(value: &T) -> Vec<u8> {
    let mut bytes = serde_json::to_vec_pretty(value).expect("formats of this project have text keys alone");
    bytes.push(b'\n');
    bytes
}
