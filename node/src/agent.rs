//! Supervision of the local ranks: one thread, one queue, no waiting for anything but that queue.

use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};
use std::{fs, thread};

use rustix::process::Signal;
use signal_hook::consts::{SIGCHLD, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use trainyard_spec::plan::{LEASE_FILE, NodePlan};
use trainyard_spec::protocol::{NodeEvent, RankStatus, StopReason};

use crate::Broken;
use crate::processes;
use crate::rank::Rank;
use crate::report::Reporter;

/// How often the lease and the deadlines are looked at.
const TICK: Duration = Duration::from_millis(100);
/// Time between a rank's failure and the stop of the others, in which they can say what happened to them.
const SETTLE: Duration = Duration::from_millis(300);
/// Times that an agent says in the length of a lease that it is at work.
const WORDS_PER_LEASE: u32 = 5;
/// Time that whatever ranks leave behind gets to die of SIGKILL.
const LEFT_OVER: Duration = Duration::from_secs(2);

#[derive(Debug)]
enum Told {
    ChildEnded,
    Stop,
}

/// The agent of a node.
#[derive(Debug)]
pub(crate) struct Agent {
    plan: NodePlan,
    reporter: Reporter,
    told: Receiver<Told>,
    ranks: Vec<Rank>,
    lease: Lease,
    /// When the others are stopped because one failed.
    stop_at: Option<Instant>,
    stopping: Option<StopReason>,
    kill_at: Option<Instant>,
    /// When the controller was last told that this agent is at work.
    alive: Instant,
}

#[derive(Debug)]
struct Lease {
    path: PathBuf,
    length: Duration,
    content: Vec<u8>,
    changed: Instant,
}

impl Lease {
    fn has_expired(&mut self, now: Instant) -> bool {
        // What cannot be read has not changed.
        if let Ok(content) = fs::read(&self.path)
            && content != self.content
        {
            self.content = content;
            self.changed = now;
        }
        now.duration_since(self.changed) > self.length
    }
}

impl Agent {
    pub(crate) fn new(plan: NodePlan, reporter: Reporter) -> Result<Self, Broken> {
        processes::lead();
        // Before any rank runs, so that no signal and no end of a child is missed.
        let mut signals = Signals::new([SIGCHLD, SIGINT, SIGTERM]).map_err(Broken::Signals)?;
        let (tell, told) = mpsc::channel();
        thread::spawn(move || {
            for signal in signals.forever() {
                let message = if signal == SIGCHLD { Told::ChildEnded } else { Told::Stop };
                if tell.send(message).is_err() {
                    break;
                }
            }
        });
        let lease = Lease {
            path: PathBuf::from(&plan.run_dir).join(LEASE_FILE),
            length: Duration::from_millis(plan.lease_ms),
            content: Vec::new(),
            changed: Instant::now(),
        };
        reporter.say(NodeEvent::Ready);
        let ranks = Vec::with_capacity(plan.ranks.len());
        let alive = Instant::now();
        Ok(Self { plan, reporter, told, ranks, lease, stop_at: None, stopping: None, kill_at: None, alive })
    }

    /// Starts the ranks and sees them to their end. Returns the agent's exit code.
    pub(crate) fn run(mut self) -> Result<u8, Broken> {
        for rank in &self.plan.ranks {
            match Rank::start(&self.plan, rank, &self.reporter) {
                Ok(rank) => self.ranks.push(rank),
                Err(broken) => {
                    processes::kill_all(LEFT_OVER);
                    return Err(broken);
                }
            }
        }
        while self.ranks.iter().any(|rank| rank.status.is_none()) {
            match self.told.recv_timeout(TICK) {
                Ok(Told::Stop) if self.stopping == Some(StopReason::Asked) => self.kill(),
                Ok(Told::Stop) => self.stop(StopReason::Asked),
                Ok(Told::ChildEnded) | Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
            self.reap();
            self.look_at_the_clock();
        }
        processes::kill_all(LEFT_OVER);
        self.reporter.say(NodeEvent::Done);
        Ok(match self.stopping {
            Some(StopReason::Asked) => 143,
            Some(StopReason::LeaseExpired) => 3,
            _ if self.ranks.iter().any(|rank| rank.status != Some(RankStatus::Code(0))) => 1,
            _ => 0,
        })
    }

    fn reap(&mut self) {
        while let Some((pid, status)) = processes::reap() {
            // Others are orphans that came to this process to be reaped.
            let Some(rank) = self.ranks.iter_mut().find(|rank| rank.pid == pid) else { continue };
            rank.ended(status, &self.reporter);
            if status != RankStatus::Code(0) && self.stop_at.is_none() {
                self.stop_at = Some(Instant::now() + SETTLE);
            }
        }
    }

    fn look_at_the_clock(&mut self) {
        let now = Instant::now();
        // From this loop and not from a thread of its own: it tells that ranks are watched.
        if now.duration_since(self.alive) > self.lease.length / WORDS_PER_LEASE {
            self.alive = now;
            self.reporter.say(NodeEvent::Alive);
        }
        if self.stopping.is_none() {
            if self.lease.has_expired(now) {
                self.stop(StopReason::LeaseExpired);
            } else if self.stop_at.is_some_and(|at| now >= at)
                && self.ranks.iter().any(|rank| rank.status.is_none())
            {
                self.stop(StopReason::RankFailed);
            }
        }
        if self.kill_at.is_some_and(|at| now >= at) {
            self.kill();
        }
    }

    fn stop(&mut self, reason: StopReason) {
        if self.stopping.is_none() {
            self.kill_at = Some(Instant::now() + Duration::from_millis(self.plan.grace_ms));
        }
        self.stopping = Some(reason);
        self.reporter.say(NodeEvent::Stopping { reason });
        self.signal(Signal::TERM);
    }

    fn kill(&mut self) {
        self.kill_at = None;
        self.signal(Signal::KILL);
    }

    fn signal(&self, signal: Signal) {
        for rank in self.ranks.iter().filter(|rank| rank.status.is_none()) {
            rank.signal(signal);
        }
    }
}
