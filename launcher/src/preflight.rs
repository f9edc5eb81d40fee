//! Preflight: whether this machine can bear a plan, before anything is started.
//!
//! Every check says what it found, what is needed and how to mend it, and all are made, so that a person sees all that
//! is wrong at once. Deliberately left out: whether an engine works ([`crate::engine::choose`] tries it), and GPUs.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use serde::Serialize;
use trainyard_spec::ByteSize;
use trainyard_spec::plan::{EngineKind, EnginePlan, LaunchPlan, NodeUser};

use crate::machine::Machine;

/// One check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Check {
    /// What was looked at.
    pub name: &'static str,
    /// Whether it is as needed.
    pub passed: bool,
    /// What is there.
    pub found: String,
    /// What the plan needs.
    pub needed: String,
    /// The way out; empty where the check passed.
    pub fix: String,
}

/// Checks of a plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Report {
    /// In a fixed order.
    pub checks: Vec<Check>,
}

impl Report {
    /// Whether the launch may go on.
    pub fn passed(&self) -> bool {
        self.checks.iter().all(|check| check.passed)
    }
}

/// Threads of an agent: supervision, signals and output.
const AGENT_THREADS: u64 = 3;
/// Threads of an agent per rank: both outputs and the events.
const READERS_PER_RANK: u64 = 3;
/// Files that the controller holds open per node: what its agent says, its lease, and the log of a rank.
const FILES_PER_NODE: u64 = 4;
/// Files that the controller holds open for itself.
const FILES_OWN: u64 = 64;
/// Containers on one network: a /24 without its own, its gateway's and the broadcast address.
const NODES_PER_NETWORK: u64 = 253;
const DISK_BASE: u64 = 64 << 20;

/// Compares a plan with this machine.
pub fn preflight(plan: &LaunchPlan, machine: &Machine) -> Report {
    let nodes = plan.nodes.len() as u64;
    let ranks = u64::from(plan.world_size);
    // A rank's main thread and one that speaks to its peers come on top of those that compute.
    let processes =
        nodes * (1 + AGENT_THREADS) + ranks * (2 + READERS_PER_RANK + u64::from(plan.threads_per_rank));
    let fewer = |most: u64| format!("ask for fewer nodes: --nodes {}", most.max(1));
    let share =
        |free: u64, needed: u64| (u128::from(free) * u128::from(nodes) / u128::from(needed.max(1))) as u64;
    let limit = |name, found: u64, needed: u64, fix: String, bytes: bool| {
        let text = |number: u64| match (number, bytes) {
            (u64::MAX, _) => "no limit".to_owned(),
            (_, true) => ByteSize(number).to_string(),
            (_, false) => number.to_string(),
        };
        let passed = found >= needed;
        Check {
            name,
            passed,
            found: text(found),
            needed: text(needed),
            fix: if passed { String::new() } else { fix },
        }
    };
    let files = nodes * FILES_PER_NODE + FILES_OWN;
    let mut checks = vec![
        limit(
            "memory",
            machine.memory_available,
            plan.memory_bytes,
            fewer(share(machine.memory_available, plan.memory_bytes)),
            true,
        ),
        limit(
            "processes",
            machine.processes_free,
            processes,
            fewer(share(machine.processes_free, processes)),
            false,
        ),
        limit(
            "open files",
            machine.open_files,
            files,
            fewer(machine.open_files.saturating_sub(FILES_OWN) / FILES_PER_NODE),
            false,
        ),
    ];
    if plan.engine.kind() == EngineKind::Podman {
        checks.push(limit("addresses", NODES_PER_NETWORK, nodes, fewer(NODES_PER_NETWORK), false));
    }
    let run_dir = Path::new(&plan.run_dir);
    checks.push(writable(run_dir));
    checks.push(disk(plan, run_dir));
    checks.push(data(plan));
    Report { checks }
}

/// The nearest folder that exists, at or above `path`.
fn existing(path: &Path) -> PathBuf {
    path.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("/")).to_owned()
}

/// Whether a run directory can be made and written.
pub fn writable(run_dir: &Path) -> Check {
    let folder = existing(run_dir);
    let tried = tempfile::tempfile_in(&folder);
    Check {
        name: "run directory",
        passed: tried.is_ok(),
        found: match &tried {
            Ok(_) => format!("{} can be written", folder.display()),
            Err(error) => format!("{}: {}", folder.display(), error.kind()),
        },
        needed: "a folder that can be written".to_owned(),
        fix: if tried.is_ok() {
            String::new()
        } else {
            "name a folder that you own with --run-dir or TRAINYARD_HOME".to_owned()
        },
    }
}

fn disk(plan: &LaunchPlan, run_dir: &Path) -> Check {
    let folder = existing(run_dir);
    // Weights and both moments of AdamW in f32, for every checkpoint kept and the one that is being written.
    let model = &plan.trainer.model;
    let parameters = u64::from(model.channels)
        .saturating_mul(model.channels.into())
        .saturating_mul(u64::from(model.layers) * 12);
    let kept = u64::from(plan.trainer.train.keep_last) + 1;
    let needed = DISK_BASE.saturating_add(parameters.saturating_mul(12).saturating_mul(kept));
    let free = rustix::fs::statvfs(&folder).map(|disk| disk.f_bavail.saturating_mul(disk.f_frsize));
    let passed = free.is_ok_and(|free| free >= needed);
    Check {
        name: "disk",
        passed,
        found: match free {
            Ok(free) => format!("{} free at {}", ByteSize(free), folder.display()),
            Err(error) => format!("{}: {error}", folder.display()),
        },
        needed: format!("{} for checkpoints and logs", ByteSize(needed)),
        fix: if passed {
            String::new()
        } else {
            "free some space, or name a folder on another disk with --run-dir or TRAINYARD_HOME".to_owned()
        },
    }
}

fn data(plan: &LaunchPlan) -> Check {
    // What lies in the run directory is written by the launcher itself.
    let given = plan.mounts.iter().find(|mount| !Path::new(&mount.host).starts_with(&plan.run_dir));
    let folder = given.map_or(Path::new(&plan.run_dir), |mount| Path::new(&mount.host));
    // A container's user is another one than the owner of the files.
    let foreign = matches!(plan.engine, EnginePlan::Podman { user: NodeUser::Host { .. }, .. });
    let unreadable = first_unreadable(folder, foreign);
    Check {
        name: "data",
        passed: unreadable.is_none(),
        found: unreadable.as_ref().map_or_else(|| format!("{} can be read", folder.display()), Clone::clone),
        needed: if foreign { "files that every user may read" } else { "files that can be read" }.to_owned(),
        fix: if unreadable.is_none() { String::new() } else { format!("chmod -R a+rX {}", folder.display()) },
    }
}

fn first_unreadable(folder: &Path, foreign: bool) -> Option<String> {
    let tell = |path: &Path, error: io::Error| Some(format!("{}: {}", path.display(), error.kind()));
    let shut = |path: &Path, needed: u32| {
        let mode = fs::metadata(path).map(|data| data.permissions().mode()).unwrap_or(0);
        (foreign && mode & needed != needed)
            .then(|| format!("{} has mode {:o}", path.display(), mode & 0o777))
    };
    if let Some(found) = shut(folder, 0o005) {
        return Some(found);
    }
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) => return tell(folder, error),
    };
    entries.flatten().map(|entry| entry.path()).filter(|path| path.is_file()).find_map(
        |path| match File::open(&path) {
            Ok(_) => shut(&path, 0o004),
            Err(error) => tell(&path, error),
        },
    )
}
