//! Ctrl-C while inputs are fetched and programs compiled: everything started for that ends with this process.
//!
//! A terminal tells all of its processes, but `kill`, a service manager or a closed connection tell this one alone.
//! What a build was writing is temporary until it is whole, so there is nothing else to tidy up.

use std::collections::BTreeMap;
use std::fs;
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Pid, Signal, kill_process, set_child_subreaper};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};
use trainyard_spec::Exit;

use crate::failure::Failure;

/// Whether this process is being ended: what fails from then on fails because of that.
static ENDING: AtomicBool = AtomicBool::new(false);

/// Ends this process and all that it started when it is told to, until dropped.
pub(crate) struct Interrupt {
    handle: Handle,
}

impl Interrupt {
    pub(crate) fn watch() -> Result<Self, Failure> {
        let failed =
            |error| Failure::new(Exit::Infrastructure, anyhow::anyhow!("cannot listen for signals: {error}"));
        // A compiler whose cargo was killed becomes a child of this process and is found again. Where this is refused,
        // such a compiler ends by itself soon.
        let _ = set_child_subreaper(Pid::from_raw(1));
        let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM]).map_err(failed)?;
        let handle = signals.handle();
        std::thread::spawn(move || {
            if signals.forever().next().is_some() {
                ENDING.store(true, Ordering::SeqCst);
                kill_descendants();
                process::exit(Exit::Interrupted.code().into());
            }
        });
        Ok(Self { handle })
    }
}

/// Waits for the end where it has begun.
pub(crate) fn end_if_ending() {
    while ENDING.load(Ordering::SeqCst) {
        std::thread::park();
    }
}

impl Drop for Interrupt {
    fn drop(&mut self) {
        let _ = set_child_subreaper(None);
        self.handle.close();
    }
}

fn kill_descendants() {
    // Each round ends all that were there when it began; what they had just started is there in the next.
    for _ in 0..10 {
        let found = descendants(process::id(), &parents());
        if found.is_empty() {
            return;
        }
        for id in found {
            if let Some(id) = i32::try_from(id).ok().and_then(Pid::from_raw) {
                // It may have ended by itself.
                let _ = kill_process(id, Signal::KILL);
            }
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

fn descendants(of: u32, parents: &BTreeMap<u32, u32>) -> Vec<u32> {
    let mut found: Vec<u32> =
        parents.iter().filter(|(_, parent)| **parent == of).map(|(id, _)| *id).collect();
    for id in found.clone() {
        found.extend(descendants(id, parents));
    }
    found
}

/// The parent of every process that is not a zombie.
fn parents() -> BTreeMap<u32, u32> {
    let mut parents = BTreeMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // Its name stands in parentheses and may hold anything (proc_pid_stat(5)).
        let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        let mut fields = stat.rsplit(") ").next().unwrap_or_default().split(' ');
        let (state, parent) = (fields.next(), fields.next().and_then(|parent| parent.parse().ok()));
        if let Some(parent) = parent
            && state != Some("Z")
        {
            parents.insert(id, parent);
        }
    }
    parents
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grandchildren_are_found_and_killed() {
        let mut child = process::Command::new("sh").args(["-c", "sleep 1000 & wait"]).spawn().unwrap();
        let own = || descendants(child.id(), &parents());
        while own().is_empty() {
            std::thread::yield_now();
        }
        let grandchild = own()[0];
        kill_descendants();
        child.wait().unwrap();
        assert!(!parents().contains_key(&grandchild));
    }
}
