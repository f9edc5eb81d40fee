//! What came of a job: the loss curve, a sample of text, where everything is; or what failed first, and how to go on.

use std::fmt::Write as _;
use std::path::Path;

use trainyard_launcher::run_dir::RunDir;
use trainyard_launcher::supervise::Outcome;
use trainyard_spec::event::Failure as Cause;
use trainyard_spec::job::Sample;
use trainyard_spec::plan::{EngineKind, ImagePlan, LaunchPlan};
use trainyard_spec::{Exit, Name};
use trainyard_trainer::checkpoint::MANIFEST;
use trainyard_trainer::checkpoint::read::Checkpoint;
use trainyard_trainer::sample::{self, Request};

use crate::failure::Failure;
use crate::view::chart;
use crate::view::screen::Screen;
use crate::view::training::{Training, grouped};
use crate::view::visible;

/// File of the run directory with what the model shall be asked to write.
const SAMPLE: &str = "job/sample.json";

/// Keeps the job's wish for a sample beside its plan.
pub(super) fn remember_sample(run_dir: &RunDir, sample: Option<&Sample>) -> Result<(), Failure> {
    let path = run_dir.path().join(SAMPLE);
    let failed = |error: anyhow::Error| Failure::new(Exit::Infrastructure, error);
    let json = serde_json::to_vec_pretty(&sample).map_err(|error| failed(error.into()))?;
    std::fs::write(&path, json)
        .map_err(|error| failed(anyhow::anyhow!("cannot write {}: {error}", path.display())))
}

/// How many nodes and ranks, and what they are.
pub(super) fn shape(plan: &LaunchPlan) -> String {
    let kind = match plan.engine.kind() {
        EngineKind::Process => "as processes of this machine",
        EngineKind::Podman => "as Podman containers on a private network",
    };
    let nodes = plan.nodes.len();
    let plural = if nodes == 1 { "" } else { "s" };
    format!("{}: {nodes} node{plural}, {} ranks, {kind}", plan.job, plan.world_size)
}

/// One line: who failed, and how.
pub(in crate::commands) fn failure(cause: &Cause) -> String {
    let place = match (cause.node, cause.rank) {
        (Some(node), Some(rank)) => format!("node {node} rank {rank}: "),
        (Some(node), None) => format!("node {node}: "),
        (None, _) => String::new(),
    };
    format!("{place}{}", visible(&cause.message))
}

/// Tells how the job ended: results to standard output, everything else to standard error.
pub(super) fn tell(
    run_dir: &Path,
    job: &Name,
    image: &ImagePlan,
    training: &Training,
    outcome: &Outcome,
    screen: &mut Screen,
) -> Result<Exit, Failure> {
    for line in &outcome.left_over {
        screen.warn(line);
    }
    let mut text = results(run_dir, training);
    let _ = write!(
        text,
        "\n  job          {job}\n  image        {}\n               {}\n  checkpoints  {}\n  logs         {}\n  metrics      {}\n",
        image.digest,
        image.layout,
        run_dir.join("checkpoints").display(),
        run_dir.join("logs").display(),
        run_dir.join("events.jsonl").display(),
    );
    super::print(&text)?;
    match outcome.exit {
        Exit::Done => {}
        Exit::Interrupted => {
            let next =
                if has_checkpoint(run_dir) { "go on" } else { "there is no checkpoint yet; start again" };
            screen.say(
                "Stopped",
                &format!("nothing is left running; {next} with: trainyard launch --resume {job}"),
            );
        }
        exit => {
            let first = outcome.failures.last().map_or_else(|| "no reason is known".to_owned(), failure);
            let mut hint = format!("trainyard logs {job} shows what the ranks wrote");
            // What a program does wrong it does wrong again.
            if exit != Exit::Program && has_checkpoint(run_dir) {
                let _ =
                    write!(hint, "; go on from the newest checkpoint with: trainyard launch --resume {job}");
            }
            return Err(Failure::new(exit, anyhow::anyhow!("{}: {first}", kind(exit))).with_hint(Some(hint)));
        }
    }
    Ok(outcome.exit)
}

/// Whether there is a checkpoint to go on from. A folder has its manifest once it is whole.
fn has_checkpoint(run_dir: &Path) -> bool {
    let entries = std::fs::read_dir(run_dir.join("checkpoints"));
    entries.into_iter().flatten().flatten().any(|entry| entry.path().join(MANIFEST).is_file())
}

fn kind(exit: Exit) -> &'static str {
    match exit {
        Exit::Program => "the training program failed",
        Exit::NoProgress => "attempts made no progress beyond the last checkpoint",
        _ => "the job failed and restarts are spent",
    }
}

fn results(run_dir: &Path, training: &Training) -> String {
    let mut text = String::new();
    let unigram = training.unigram.unwrap_or_default();
    // Output that goes elsewhere than to a terminal has no width.
    let columns = rustix::termios::tcgetwinsize(std::io::stdout()).ok().map(|size| size.ws_col);
    let plot = chart::loss(&training.losses, &training.validations, unigram, columns.filter(|n| *n > 0));
    if !plot.is_empty() {
        let _ = write!(text, "\n  loss in nats per token by step; dotted: a unigram model\n\n{plot}");
    }
    if let (Some((step, loss)), Some((_, trained))) = (training.validations.last(), training.losses.last()) {
        let _ = write!(
            text,
            "\n  {} parameters, step {step} of {}\n  training loss {trained:.3}, validation loss {loss:.3}; a unigram model has {unigram:.3}\n",
            grouped(training.parameters),
            training.steps,
        );
    }
    match written(run_dir) {
        Ok(Some(sample)) => {
            let _ = write!(text, "\n  the trained model writes:\n\n");
            for line in sample.lines() {
                let _ = writeln!(text, "    {line}");
            }
        }
        Ok(None) => {}
        Err(reason) => {
            let _ = write!(text, "\n  no sample: {reason}\n");
        }
    }
    text
}

/// What the newest checkpoint's model writes, if the job asks for that and there is one.
fn written(run_dir: &Path) -> anyhow::Result<Option<String>> {
    let wish = std::fs::read(run_dir.join(SAMPLE))?;
    let Some(Sample { prompt, tokens, temperature }) = serde_json::from_slice(&wish)? else {
        return Ok(None);
    };
    let checkpoints = run_dir.join("checkpoints");
    if std::fs::read_dir(&checkpoints)?.next().is_none() {
        return Ok(None);
    }
    let checkpoint = Checkpoint::open_newest(&checkpoints)?;
    let request = Request { prompt: &prompt, tokens, temperature, seed: 1, threads: 1 };
    Ok(Some(sample::sample(&checkpoint, &request)?))
}
