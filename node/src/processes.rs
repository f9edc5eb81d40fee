//! The processes below this agent: waiting for them, and leaving none behind.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, set_child_subreaper, setsid, wait};
use trainyard_spec::protocol::RankStatus;

/// Makes this process the one that orphans below it come to, and the leader of a session that all of them are in.
pub(crate) fn lead() {
    // PID 1 is that already; old kernels that refuse are no worse off.
    let _ = set_child_subreaper(Some(rustix::process::getpid()));
    // Refused to a leader of a process group, which then leads its session or was made one on purpose.
    let _ = setsid();
}

/// The next process that has ended, and how; none when there is none now.
pub(crate) fn reap() -> Option<(Pid, RankStatus)> {
    loop {
        // An error means that there are no children at all.
        let (pid, status) = wait(WaitOptions::NOHANG).ok().flatten()?;
        if let Some(signal) = status.terminating_signal() {
            return Some((pid, RankStatus::Signal(signal)));
        }
        if let Some(code) = status.exit_status() {
            return Some((pid, RankStatus::Code(code)));
        }
    }
}

/// Kills all that is left below this process. Orphans come here one generation at a time, so it looks until none is left.
pub(crate) fn kill_all(patience: Duration) {
    let started = Instant::now();
    let own = rustix::process::getpid();
    while started.elapsed() < patience {
        while reap().is_some() {}
        let children = children(own);
        if children.is_empty() {
            return;
        }
        for child in children {
            // It may have ended just now.
            let _ = kill_process(child, Signal::KILL);
        }
        thread::sleep(Duration::from_millis(2));
    }
}

fn children(parent: Pid) -> Vec<Pid> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| {
            // The program's name stands in parentheses and may hold some itself.
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
            fields.split_ascii_whitespace().nth(1).and_then(|text| text.parse().ok())
                == Some(parent.as_raw_nonzero().get())
        })
        .filter_map(Pid::from_raw)
        .collect()
}
