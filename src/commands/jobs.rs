//! `trainyard status`, `logs` and `stop`: the jobs of this machine.

use std::fmt::Write as _;
use std::path::PathBuf;

use trainyard_launcher::jobs::{self, Phase, Status as Job, Stopped};
use trainyard_launcher::logs::Logs as Lines;
use trainyard_spec::Exit;

use super::{launch, print, print_json, runtime};
use crate::cli::{Format, Logs, Status, Stop};
use crate::failure::Failure;
use crate::settings::Settings;
use crate::view::screen::Screen;

pub(crate) fn status(arguments: &Status) -> Result<Exit, Failure> {
    let settings = Settings::from_environment()?;
    if let Some(id) = &arguments.job {
        let job = jobs::status(&jobs::find(&settings.jobs, id)?)?;
        return match arguments.format {
            Format::Text => print(&describe(&job)),
            Format::Json => print_json(&job),
        };
    }
    let jobs = jobs::list(&settings.jobs)?;
    match arguments.format {
        Format::Text if jobs.is_empty() => {
            Screen::new().say("Jobs", "none yet; start one with: trainyard launch");
            Ok(Exit::Done)
        }
        Format::Text => print(&table(&jobs)),
        Format::Json => print_json(&jobs),
    }
}

pub(crate) fn logs(arguments: &Logs) -> Result<Exit, Failure> {
    let settings = Settings::from_environment()?;
    let run_dir = match &arguments.job {
        Some(id) => jobs::find(&settings.jobs, id)?,
        None => newest(&settings)?,
    };
    let world_size = jobs::status(&run_dir)?.world_size;
    if let Some(rank) = arguments.rank.filter(|rank| *rank >= world_size) {
        return Err(Failure::usage(format!(
            "--rank is {rank}; the job has ranks 0 to {}",
            world_size.saturating_sub(1)
        )));
    }
    let mut lines = Lines::open(&run_dir, arguments.rank, arguments.follow)?;
    runtime()?.block_on(async {
        while let Some(lines) = lines.next().await? {
            print(&(lines.join("\n") + "\n"))?;
        }
        Ok(Exit::Done)
    })
}

pub(crate) fn stop(arguments: &Stop) -> Result<Exit, Failure> {
    let settings = Settings::from_environment()?;
    let run_dir = jobs::find(&settings.jobs, &arguments.job)?;
    let stopped = runtime()?.block_on(jobs::stop(&run_dir))?;
    Screen::new().say(
        "Stopped",
        match stopped {
            Stopped::ByController => "nothing of the job is left running",
            Stopped::Remains => "its controller was gone; what was left of the job was removed",
            Stopped::Before => "the job had ended before",
        },
    );
    Ok(Exit::Done)
}

fn newest(settings: &Settings) -> Result<PathBuf, Failure> {
    let newest = jobs::list(&settings.jobs)?.into_iter().max_by(|a, b| a.last_event.cmp(&b.last_event));
    newest
        .map(|job| job.run_dir)
        .ok_or_else(|| Failure::usage("there is no job yet; start one with: trainyard launch"))
}

fn phase(job: &Job) -> String {
    match (job.phase, job.exit) {
        (Phase::Running, _) => "running".to_owned(),
        (Phase::Abandoned, _) => "abandoned".to_owned(),
        (Phase::Ended, Some(Exit::Done)) => "done".to_owned(),
        (Phase::Ended, Some(Exit::Interrupted)) => "stopped".to_owned(),
        (Phase::Ended, Some(exit)) => format!("failed ({})", exit.code()),
        (Phase::Ended, None) => "ended".to_owned(),
    }
}

fn number(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.3}"))
}

fn table(jobs: &[Job]) -> String {
    let mut text = format!(
        "{:<24} {:<12} {:<8} {:>5} {:>5} {:>13} {:>7} {:>10}\n",
        "JOB", "STATE", "ENGINE", "NODES", "RANKS", "STEP", "LOSS", "VALIDATION"
    );
    for job in jobs {
        let _ = writeln!(
            text,
            "{:<24} {:<12} {:<8} {:>5} {:>5} {:>13} {:>7} {:>10}",
            job.id.as_str(),
            phase(job),
            job.engine.as_str(),
            job.nodes,
            job.world_size,
            format!("{}/{}", job.step, job.steps),
            number(job.loss),
            number(job.validation_loss),
        );
    }
    text
}

fn describe(job: &Job) -> String {
    let mut text = String::new();
    let mut row = |name: &str, value: &str| {
        let _ = writeln!(text, "{name:<12} {value}");
    };
    row("job", job.id.as_str());
    row("state", &phase(job));
    row("engine", job.engine.as_str());
    row("nodes", &format!("{} ({} ranks)", job.nodes, job.world_size));
    row("attempts", &job.attempts.to_string());
    row("step", &format!("{} of {}", job.step, job.steps));
    row("loss", &format!("{} (validation {})", number(job.loss), number(job.validation_loss)));
    row("checkpoint", &job.checkpoint.map_or_else(|| "none yet".to_owned(), |step| format!("step {step}")));
    row("last event", job.last_event.as_deref().unwrap_or("none"));
    row("run dir", &job.run_dir.display().to_string());
    for (attempt, cause) in job.failures.iter().enumerate() {
        row("failure", &format!("attempt {attempt}: {}", launch::failure(cause)));
    }
    text
}
