//! `trainyard-node`: PID 1 of every node.
//!
//! Reads the [`NodePlan`] named by `TRAINYARD_NODE_PLAN`, starts its ranks, says everything that happens to them on
//! standard output as [`NodeEvent`] lines, and ends when they have. As PID 1, or as a subreaper elsewhere, it reaps
//! all that its ranks leave behind, and leaves nothing running.
//!
//! Exit codes: 0 all ranks ended well; 1 a rank failed; 2 the plan cannot be read or a rank not be started; 3 the
//! controller's lease ran out; 143 it was told to stop.
//!
//! Deliberately left out: networks, images, retries and any judgement about failures; the controller has those.

mod agent;
mod lines;
mod processes;
mod rank;
mod report;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use std::{env, fs};

use trainyard_spec::plan::NodePlan;
use trainyard_spec::protocol::NodeEvent;

use agent::Agent;
use report::Reporter;

/// Why an agent cannot do its work.
#[derive(Debug, thiserror::Error)]
enum Broken {
    #[error("{} is not set; it names the node's plan", trainyard_spec::env::NODE_PLAN)]
    NoPlan,
    #[error("{}: cannot read the node's plan: {source}", path.display())]
    ReadPlan { path: PathBuf, source: std::io::Error },
    #[error("{}: not a node plan that this agent reads: {source}", path.display())]
    ParsePlan { path: PathBuf, source: serde_json::Error },
    #[error("cannot handle signals: {0}")]
    Signals(std::io::Error),
    #[error("rank {rank}: cannot make {}: {source}", path.display())]
    Events { rank: u32, path: PathBuf, source: std::io::Error },
    #[error("rank {rank}: the command is empty")]
    EmptyCommand { rank: u32 },
    #[error("rank {rank}: cannot start {program}: {source}")]
    Start { rank: u32, program: String, source: std::io::Error },
}

/// Time that the last lines get to be read by whoever keeps them.
const LAST_LINES: Duration = Duration::from_secs(5);

fn main() -> ExitCode {
    if env::args().nth(1).as_deref() == Some("--version") {
        #[expect(clippy::print_stdout, reason = "the answer to --version")]
        {
            println!("trainyard-node {}", env!("CARGO_PKG_VERSION"));
        }
        return ExitCode::SUCCESS;
    }
    // Beyond a limit of file size (`ulimit -f`) a write then fails with an error, instead of ending the process.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, std::sync::Arc::default());
    let reporter = Reporter::start();
    let code = read_plan().and_then(|plan| Agent::new(plan, reporter.clone())).and_then(Agent::run);
    let code = code.unwrap_or_else(|broken| {
        reporter.say(NodeEvent::Broken { message: broken.to_string() });
        2
    });
    reporter.finish(LAST_LINES);
    code.into()
}

fn read_plan() -> Result<NodePlan, Broken> {
    let path = PathBuf::from(env::var_os(trainyard_spec::env::NODE_PLAN).ok_or(Broken::NoPlan)?);
    let bytes = fs::read(&path).map_err(|source| Broken::ReadPlan { path: path.clone(), source })?;
    serde_json::from_slice(&bytes).map_err(|source| Broken::ParsePlan { path, source })
}
