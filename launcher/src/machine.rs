//! What this machine can give a job, read once.
//!
//! Deliberately left out: what a job needs (the plan says) and whether that fits (preflight says).

use std::fs;
use std::path::{Path, PathBuf};

use rustix::process::{Resource, getegid, geteuid, getrlimit};

/// This machine, as far as a launch depends on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// Logical processors that this process may use.
    pub cores: u32,
    /// Bytes of memory that can be had without swapping, within this process's control group.
    pub memory_available: u64,
    /// Processes and threads that can still be started.
    pub processes_free: u64,
    /// Hard limit of open files.
    pub open_files: u64,
    /// The effective user.
    pub uid: u32,
    /// The effective group.
    pub gid: u32,
}

/// This machine did not say what it has.
#[derive(Debug, thiserror::Error)]
#[error("{}: {found}; Linux's proc file system must be mounted at /proc", path.display())]
pub struct MachineError {
    path: PathBuf,
    found: String,
}

impl Machine {
    /// Reads this machine.
    ///
    /// # Errors
    /// When /proc is not there or not Linux's.
    pub fn read() -> Result<Self, MachineError> {
        let meminfo = read("/proc/meminfo")?;
        let available = field(&meminfo, "MemAvailable:").ok_or_else(|| MachineError {
            path: "/proc/meminfo".into(),
            found: "no MemAvailable".to_owned(),
        })? * 1024;
        let pid_max: u64 = number("/proc/sys/kernel/pid_max")?;
        let running =
            read("/proc/loadavg")?.split(['/', ' ']).nth(4).and_then(|text| text.parse().ok()).unwrap_or(0);
        let user_limit = getrlimit(Resource::Nproc).maximum.unwrap_or(u64::MAX);
        let group = ControlGroup::own();
        Ok(Self {
            cores: std::thread::available_parallelism()
                .map_or(1, |cores| u32::try_from(cores.get()).unwrap_or(u32::MAX)),
            memory_available: available.min(group.memory_free.unwrap_or(u64::MAX)),
            processes_free: pid_max
                .min(user_limit)
                .saturating_sub(running)
                .min(group.processes_free.unwrap_or(u64::MAX)),
            open_files: getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX),
            uid: geteuid().as_raw(),
            gid: getegid().as_raw(),
        })
    }
}

/// What is left in the control group of this process, where it has limits (version 2 alone: version 1's
/// hierarchies are mounted in too many places to find them all).
struct ControlGroup {
    memory_free: Option<u64>,
    processes_free: Option<u64>,
}

impl ControlGroup {
    fn own() -> Self {
        let folder = fs::read_to_string("/proc/self/cgroup").ok().and_then(|text| {
            let path = text.lines().find_map(|line| line.strip_prefix("0::"))?.to_owned();
            Some(Path::new("/sys/fs/cgroup").join(path.trim_start_matches('/')))
        });
        let left = |limit: &str, used: &str| {
            let folder = folder.as_ref()?;
            let value = |name| fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
            Some(value(limit)?.saturating_sub(value(used)?))
        };
        Self {
            memory_free: left("memory.max", "memory.current"),
            processes_free: left("pids.max", "pids.current"),
        }
    }
}

/// Times that the kernel has killed a process of this machine for memory.
pub(crate) fn out_of_memory_kills() -> Option<u64> {
    field(&fs::read_to_string("/proc/vmstat").ok()?, "oom_kill")
}

/// When the process started, in clock ticks after boot. Together with the process id it names one process for good.
pub(crate) fn start_time(pid: u32) -> Option<u64> {
    stat(pid)?.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// Processes of a session.
pub(crate) fn session_members(session: u32) -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| {
            let fields = stat(*pid);
            let mut fields = fields.as_deref().unwrap_or_default().split_ascii_whitespace();
            let alive = !matches!(fields.next(), None | Some("Z" | "X"));
            alive && fields.nth(2).and_then(|text| text.parse().ok()) == Some(session)
        })
        .collect()
}

/// The fields of /proc/PID/stat after the program's name, which may itself hold spaces and parentheses.
fn stat(pid: u32) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    Some(text.rsplit_once(')')?.1.to_owned())
}

fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.split_ascii_whitespace().next() == Some(name))?;
    line.split_ascii_whitespace().nth(1)?.parse().ok()
}

fn read(path: &str) -> Result<String, MachineError> {
    fs::read_to_string(path).map_err(|source| MachineError { path: path.into(), found: source.to_string() })
}

fn number(path: &str) -> Result<u64, MachineError> {
    let text = read(path)?;
    text.trim()
        .parse()
        .map_err(|_| MachineError { path: path.into(), found: format!("{text:?} is no number") })
}
