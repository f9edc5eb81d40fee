//! Runs a job: fresh attempts until one finishes, is told to stop, or there is no sense in another.
//!
//! An attempt's nodes are followed through the files in which their agents' words are kept. The first failure starts a
//! short settling time, in which failures that explain it may still arrive; then all nodes are stopped, everything of
//! the attempt is removed, and the most telling failure decides whether another attempt makes sense.
//!
//! Deliberately left out: what nodes are made of (engines), what an attempt's state is (attempt), showing anything.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};
use trainyard_spec::Exit;
use trainyard_spec::event::{Failure, FailureClass, JobEvent, JobRecord};
use trainyard_spec::plan::{LEASE_FILE, LaunchPlan, NodePlan};
use trainyard_spec::protocol::NodeEvent;

use crate::attempt::Attempt;
use crate::engine::{self, Engine, EngineError, NODE_PLAN_FILE, NodeExit, Signal, Started};
use crate::journal::Journal;
use crate::machine::out_of_memory_kills;
use crate::plan;
use crate::run_dir::{RunDir, RunDirError, folder, json, write_whole};
use crate::tail::Tail;

/// Whether a job shall go on. Later values overrule earlier ones.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stop {
    /// It goes on.
    #[default]
    No,
    /// Ranks get time for a last checkpoint.
    Gracefully,
    /// Everything is killed.
    Now,
}

/// How a job ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Its exit code.
    pub exit: Exit,
    /// The failure of every attempt that failed, in order; the first is what went wrong first.
    pub failures: Vec<Failure>,
    /// What could not be removed, one line each.
    pub left_over: Vec<String>,
}

/// Why a job could not be run at all.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The run directory.
    #[error(transparent)]
    RunDir(#[from] RunDirError),
    /// The engine cannot be reached, or does not take the image.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// Time after the first failure in which others may still explain it.
const SETTLE: Duration = Duration::from_millis(500);
/// Time that agents get beyond their ranks' grace.
const AGENT_GRACE: Duration = Duration::from_secs(3);
/// Time that killed agents get to be gone.
const KILL_GRACE: Duration = Duration::from_secs(5);
/// Attempts in a row without a new checkpoint after which another makes no sense.
const STALE_ATTEMPTS: u32 = 3;
/// How often a node's words are looked for: at first, and at most this seldom when it is silent.
const POLL: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(80));
/// Most that the time between two looks counts as an agent's silence.
const MOST_QUIET: Duration = Duration::from_millis(500);

/// Runs the job of a run directory to its end. When this returns, nothing of it is left but files; what could not be
/// removed is in the outcome. `events` gets everything that happens, whether or not somebody listens.
///
/// # Errors
/// When it cannot be started at all. Everything later is an outcome.
pub async fn run(
    dir: RunDir,
    mut stop: watch::Receiver<Stop>,
    events: mpsc::UnboundedSender<JobRecord>,
) -> Result<Outcome, RunError> {
    let plan = dir.plan();
    let mut journal = Journal::open(dir.path(), events)?;
    journal.record(JobEvent::Created {
        id: plan.job.clone(),
        image: plan.image.digest,
        nodes: u32::try_from(plan.nodes.len()).unwrap_or(u32::MAX),
        world_size: plan.world_size,
        engine: plan.engine.kind(),
    });
    journal.flush();
    let first = dir.next_attempt()?;
    if first > 0 {
        // An earlier controller may have been killed; what it started must not write beside a fresh attempt.
        for error in engine::cleanup(plan).await {
            journal.note(format!("before attempt {first}: {error}"));
        }
    }
    let opened = tokio::select! {
        opened = Engine::open(plan) => Some(opened),
        _ = asked_beyond(&mut stop, Stop::No) => None,
    };
    let mut failures = Vec::new();
    let mut left_over = Vec::new();
    let exit = match opened {
        None => Exit::Interrupted,
        Some(Err(error)) => {
            let failure = host_failure(&error);
            journal.record(JobEvent::Ended { exit: Exit::Infrastructure, failure: Some(failure) });
            journal.flush();
            return Err(error.into());
        }
        Some(Ok(mut engine)) => {
            let mut history = History { restarts_left: plan.max_restarts, stale: 0, checkpoint: None };
            let mut number = first;
            loop {
                let mut supervisor = Supervisor {
                    plan,
                    run_dir: dir.path(),
                    engine: &mut engine,
                    journal: &mut journal,
                    stop: &mut stop,
                };
                let (end, errors) = supervisor.attempt(number).await;
                left_over.extend(errors);
                let (failure, checkpoint) = match end {
                    End::Finished => break Exit::Done,
                    End::Stopped => break Exit::Interrupted,
                    End::Failed { failure, checkpoint } => (failure, checkpoint),
                };
                journal.record(JobEvent::AttemptFailed { attempt: number, failure: failure.clone() });
                journal.flush();
                let next = history.decide(failure.class, checkpoint);
                failures.push(failure);
                match next {
                    Next::Retry => number += 1,
                    Next::End(exit) => break exit,
                }
            }
        }
    };
    let failure = if exit == Exit::Done { None } else { failures.last().cloned() };
    journal.record(JobEvent::Ended { exit, failure });
    journal.flush();
    Ok(Outcome { exit, failures, left_over })
}

/// Waits until more is asked than `known`.
pub(crate) async fn asked_beyond(stop: &mut watch::Receiver<Stop>, known: Stop) -> Stop {
    let asked = stop.wait_for(|stop| *stop > known).await.map(|stop| *stop);
    match asked {
        Ok(stop) => stop,
        // Without anybody left to ask, the job goes on.
        Err(_) => std::future::pending().await,
    }
}

fn host_failure(error: &dyn std::error::Error) -> Failure {
    Failure { node: None, rank: None, class: FailureClass::Host, message: error.to_string() }
}

/// What earlier attempts say about the sense of another.
struct History {
    restarts_left: u32,
    stale: u32,
    checkpoint: Option<u64>,
}

#[derive(Debug, PartialEq, Eq)]
enum Next {
    Retry,
    End(Exit),
}

impl History {
    fn decide(&mut self, class: FailureClass, checkpoint: Option<u64>) -> Next {
        if class == FailureClass::User {
            return Next::End(Exit::Program);
        }
        self.stale = if checkpoint > self.checkpoint { 0 } else { self.stale + 1 };
        self.checkpoint = self.checkpoint.max(checkpoint);
        if self.stale >= STALE_ATTEMPTS {
            return Next::End(Exit::NoProgress);
        }
        match self.restarts_left.checked_sub(1) {
            Some(left) => {
                self.restarts_left = left;
                Next::Retry
            }
            None => Next::End(Exit::Infrastructure),
        }
    }
}

/// How an attempt ended.
enum End {
    Finished,
    Stopped,
    Failed { failure: Failure, checkpoint: Option<u64> },
}

/// What a follower of a node tells.
enum Told {
    Said(Vec<NodeEvent>),
    /// Something that no agent says, or that its words cannot be read.
    Garbled(String),
    /// It has said nothing for this long.
    Silent(Duration),
    Gone(NodeExit),
}

struct Supervisor<'a> {
    plan: &'a LaunchPlan,
    run_dir: &'a Path,
    engine: &'a mut Engine,
    journal: &'a mut Journal,
    stop: &'a mut watch::Receiver<Stop>,
}

impl Supervisor<'_> {
    /// Makes one attempt, and removes everything of it whatever happens. Returns what could not be removed, too.
    async fn attempt(&mut self, number: u32) -> (End, Vec<String>) {
        self.journal.record(JobEvent::AttemptStarted {
            attempt: number,
            run_id: plan::run_id(&self.plan.job, number),
        });
        self.journal.flush();
        let kills = out_of_memory_kills();
        let mut end = match self.start(number).await {
            Ok(None) => End::Stopped,
            Ok(Some((nodes, started))) => self.watch(&nodes, started).await,
            Err(error) => End::Failed { failure: host_failure(&error), checkpoint: None },
        };
        if let End::Failed { failure, .. } = &mut end
            && failure.message.starts_with("was killed by signal 9")
            && kills < out_of_memory_kills()
        {
            failure.class = FailureClass::OutOfMemory;
            failure.message.push_str("; the kernel has killed a process of this machine for memory");
        }
        let errors: Vec<_> = self.engine.teardown().await.iter().map(ToString::to_string).collect();
        for error in &errors {
            self.journal.note(format!("after attempt {number}: {error}"));
        }
        self.journal.flush();
        (end, errors)
    }

    /// Starts all nodes; none when it was told to stop before.
    async fn start(&mut self, number: u32) -> Result<Option<(Vec<NodePlan>, Vec<Started>)>, EngineError> {
        let rendezvous = self.engine.prepare(self.plan, number).await?;
        if *self.stop.borrow() > Stop::No {
            return Ok(None);
        }
        let mut nodes = Vec::new();
        for node in plan::attempt(self.plan, number, &rendezvous) {
            let path = self.run_dir.join(plan::node_folder(number, node.node));
            folder(&path, 0o755)?;
            write_whole(&path.join(NODE_PLAN_FILE), &json(&node))?;
            nodes.push((node, path));
        }
        let started = self.engine.start(&nodes).await?;
        Ok(Some((nodes.into_iter().map(|(node, _)| node).collect(), started)))
    }

    async fn watch(&mut self, nodes: &[NodePlan], started: Vec<Started>) -> End {
        // Both end when dropped, with this function.
        let mut tasks = JoinSet::new();
        let (tell, mut told) = mpsc::channel(1024);
        let mut signals = Vec::new();
        let mut leases = Vec::new();
        for (node, started) in nodes.iter().zip(started) {
            signals.push(started.signals.clone());
            leases.push(started.folder.join(LEASE_FILE));
            let patience = Duration::from_millis(node.lease_ms);
            tasks.spawn(follow(node.node, started, patience, tell.clone()));
        }
        let period = nodes.iter().map(|node| node.lease_ms).min().unwrap_or(1000) / 5;
        tasks.spawn(renew(leases, Duration::from_millis(period)));
        let send = |signal| {
            for node in &signals {
                // Nobody takes signals for an agent that has ended.
                let _ = node.send(signal);
            }
        };
        let grace =
            Duration::from_millis(nodes.iter().map(|node| node.grace_ms).max().unwrap_or(0)) + AGENT_GRACE;

        let mut attempt = Attempt::new(nodes);
        let mut batch = Vec::new();
        // What is waited for apart from words: the end of settling, then of grace, then of killing.
        let mut settled: Option<Instant> = None;
        let mut kill_at: Option<Instant> = None;
        let mut give_up_at: Option<Instant> = None;
        let mut asked = Stop::No;
        while !attempt.all_gone() {
            let far = Instant::now() + Duration::from_secs(3600);
            tokio::select! {
                _ = told.recv_many(&mut batch, 256) => {
                    for (node, told) in batch.drain(..) {
                        if let (Told::Silent(_), Some(node)) = (&told, signals.get(node as usize)) {
                            // An agent that hangs stops nothing in an orderly way.
                            let _ = node.send(Signal::Kill);
                        }
                        self.take(&mut attempt, node, told);
                    }
                    self.journal.flush();
                    if attempt.failed() && settled.is_none() {
                        settled = Some(Instant::now() + SETTLE);
                    }
                }
                stop = asked_beyond(self.stop, asked) => {
                    asked = stop;
                    settled = Some(Instant::now());
                    if asked == Stop::Now {
                        kill_at = Some(Instant::now());
                    }
                }
                () = sleep_until(settled.unwrap_or(far)), if settled.is_some() && kill_at.is_none() => {
                    attempt.stop();
                    send(Signal::Terminate);
                    kill_at = Some(Instant::now() + grace);
                }
                () = sleep_until(kill_at.unwrap_or(far)), if kill_at.is_some() && give_up_at.is_none() => {
                    attempt.stop();
                    send(Signal::Kill);
                    give_up_at = Some(Instant::now() + KILL_GRACE);
                }
                () = sleep_until(give_up_at.unwrap_or(far)), if give_up_at.is_some() => break,
            }
        }
        if attempt.finished() {
            return End::Finished;
        }
        if asked > Stop::No {
            return End::Stopped;
        }
        let failure = attempt.first_cause().unwrap_or_else(|| {
            let (class, message) = if attempt.ended_well() {
                (FailureClass::User, "all ranks ended with code 0, but none said that the last step is done")
            } else {
                (FailureClass::Unknown, "all nodes ended, but not all ranks did")
            };
            Failure { node: None, rank: None, class, message: message.to_owned() }
        });
        End::Failed { failure, checkpoint: attempt.checkpoint() }
    }

    fn take(&mut self, attempt: &mut Attempt, node: u32, told: Told) {
        match told {
            Told::Said(events) => {
                for said in events {
                    attempt.said(node, &said);
                    if said != NodeEvent::Alive {
                        self.journal.record(JobEvent::Node { node, said });
                    }
                }
            }
            Told::Garbled(line) => self.journal.note(format!("{} said: {line}", plan::hostname(node))),
            Told::Silent(time) => attempt.silent(node, time),
            Told::Gone(exit) => attempt.gone(node, &exit),
        }
    }
}

/// Tells what an agent says until it has ended and all its words are told, and once when it says nothing for longer than
/// `patience`.
async fn follow(node: u32, started: Started, patience: Duration, tell: mpsc::Sender<(u32, Told)>) {
    let mut tail = Tail::new(&started.said, started.format);
    let mut exit = started.exit;
    let mut ended = None;
    let mut pause = POLL.0;
    let (mut looked_at, mut quiet) = (Instant::now(), Duration::ZERO);
    loop {
        let lines = tail.lines();
        let mut events = Vec::new();
        let mut over = false;
        let told = match lines {
            Ok(lines) => {
                for line in lines {
                    match serde_json::from_str(&line) {
                        Ok(event) => {
                            over |= matches!(event, NodeEvent::Done | NodeEvent::Broken { .. });
                            events.push(event);
                        }
                        // Nobody listens when the attempt is given up; the task is then dropped.
                        Err(_) => drop(tell.send((node, Told::Garbled(line))).await),
                    }
                }
                Told::Said(events)
            }
            Err(error) => Told::Garbled(format!("cannot read {}: {error}", started.said.display())),
        };
        let silent = matches!(&told, Told::Said(events) if events.is_empty());
        // Time in which this process did not run is not the agent's silence.
        let passed = looked_at.elapsed().min(MOST_QUIET);
        looked_at = Instant::now();
        if silent {
            let before = quiet;
            quiet += passed;
            if before <= patience && quiet > patience {
                drop(tell.send((node, Told::Silent(quiet))).await);
            }
        } else {
            quiet = Duration::ZERO;
            drop(tell.send((node, told)).await);
        }
        match ended.take() {
            // An engine may learn of the end before the last words are in the file: they get one more look.
            Some((exit, looked)) if over || looked => {
                drop(tell.send((node, Told::Gone(exit))).await);
                return;
            }
            Some((exit, _)) => {
                sleep(POLL.1).await;
                ended = Some((exit, true));
            }
            None => {
                pause = if silent { (pause * 2).min(POLL.1) } else { POLL.0 };
                tokio::select! {
                    exit = &mut exit => {
                        let lost = |_| NodeExit { how: "was lost by its engine".to_owned(), out_of_memory: false };
                        ended = Some((exit.unwrap_or_else(lost), false));
                    }
                    () = sleep(pause) => {}
                }
            }
        }
    }
}

/// Renews leases as long as the controller lives.
async fn renew(leases: Vec<PathBuf>, period: Duration) {
    for count in 0_u64.. {
        for lease in &leases {
            // A lease that cannot be written runs out, and its node then says so.
            drop(tokio::fs::write(lease, count.to_string()).await);
        }
        sleep(period).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_decide_about_another_attempt() {
        use FailureClass::{Host, Unknown, User};
        let (retry, end) = (Next::Retry, Next::End);
        for (restarts, attempts, last) in [
            (3, vec![(User, Some(5))], end(Exit::Program)),
            (0, vec![(Host, None)], end(Exit::Infrastructure)),
            (1, vec![(Unknown, None)], Next::Retry),
            (1, vec![(Unknown, None), (Unknown, Some(1))], end(Exit::Infrastructure)),
            (9, vec![(Host, None), (Host, None), (Host, None)], end(Exit::NoProgress)),
            (9, vec![(Host, Some(1)), (Host, Some(1)), (Host, Some(1)), (Host, None)], end(Exit::NoProgress)),
            (9, vec![(Host, None), (Host, None), (Host, Some(1)), (Host, None), (Host, None)], retry),
        ] {
            let mut history = History { restarts_left: restarts, stale: 0, checkpoint: None };
            let next = attempts.iter().map(|(class, step)| history.decide(*class, *step)).last();
            assert_eq!(next, Some(last), "{attempts:?}");
        }
    }
}
