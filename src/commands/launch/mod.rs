//! `trainyard launch`: image and data, then the job, then what came of it.

mod controller;
mod inputs;
mod result;

use std::path::{Path, PathBuf};

use trainyard_builder::store::Store;
use trainyard_launcher::engine::{EngineChoice, EngineError, EngineSettings};
use trainyard_launcher::machine::Machine;
use trainyard_launcher::plan::{self, Launch as Request, PlanError};
use trainyard_launcher::preflight::{self, Report};
use trainyard_launcher::run_dir::{self, RunDir};
use trainyard_launcher::{engine, jobs};
use trainyard_spec::job::{JobManifest, MAX_NODES};
use trainyard_spec::{Exit, env};

use controller::Session;
pub(super) use controller::controller;
pub(super) use result::failure;

use super::print;
use crate::cli::{Engine, Format, Launch};
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::settings::Settings;
use crate::view::screen::Screen;

/// The job of the quickstart, looked for from the working directory upwards.
const DEFAULT_JOB: &str = "manifests/jobs/gpt-small.toml";

pub(crate) fn launch(arguments: &Launch) -> Result<Exit, Failure> {
    let settings = Settings::from_environment()?;
    let mut screen = Screen::new();
    if let Some(id) = &arguments.resume {
        let run_dir = RunDir::open(&jobs::find(&settings.jobs, id)?)?;
        return start(arguments, run_dir, &Session::start()?, &mut screen);
    }
    let (path, job) = job(arguments.job.as_deref())?;
    let nodes = arguments.nodes.unwrap_or(job.nodes);
    if !(1..=MAX_NODES).contains(&nodes) {
        return Err(Failure::usage(format!("--nodes is {nodes}; needed is 1 to {MAX_NODES}")));
    }
    // Before anything that takes long.
    let named_run_dir = arguments.run_dir.as_deref().map(new_run_dir).transpose()?;
    let interrupt = Interrupt::watch()?;
    // Until the job is made, which says itself what it needs of the cache.
    let in_use = Store::new(&settings.cache).in_use()?;
    let inputs = inputs::prepare(arguments, &path, &job, &settings, &mut screen)?;
    let machine = Machine::read().map_err(|error| Failure::new(Exit::Preflight, error))?;
    let session = Session::start()?;
    drop(interrupt);
    let choice = match arguments.engine {
        Engine::Auto => EngineChoice::Auto,
        Engine::Process => EngineChoice::Process,
        Engine::Podman => EngineChoice::Podman,
    };
    let chosen = session.runtime.block_on(engine::choose(
        choice,
        &engine_settings(),
        &inputs.image,
        session.stopped.clone(),
    ));
    let chosen = match chosen {
        Err(EngineError::Interrupted) => return Ok(Exit::Interrupted),
        chosen => chosen.map_err(|error| Failure::new(Exit::Preflight, error))?,
    };
    for note in &chosen.notes {
        screen.say("Engine", note);
    }
    let run_dir = loop {
        let id = jobs::next_id(&settings.jobs, &job.name)?;
        let request = Request {
            run_dir: named_run_dir.clone().unwrap_or_else(|| settings.jobs.join(id.as_str())),
            id,
            job: job.clone(),
            image: inputs.image.clone(),
            data_dir: inputs.data.clone(),
            nodes,
            max_restarts: arguments.max_restarts.unwrap_or(job.max_restarts),
            engine: chosen.engine.clone(),
        };
        let plan = plan::plan(&request, &machine).map_err(|error| match error {
            PlanError::TooMany { .. } => Failure::new(Exit::Preflight, error),
            error => Failure::usage(error),
        })?;
        let report = preflight::preflight(&plan, &machine);
        if arguments.dry_run {
            if !report.passed() {
                screen.warn(&format!("preflight would refuse this launch:\n{}", table(&report)));
            }
            return match arguments.format {
                Format::Text => print(&plan::describe(&plan)),
                Format::Json => super::print_json(&plan),
            };
        }
        check(&report)?;
        // Another launch may have taken the id meanwhile.
        if let Some(run_dir) = jobs::create(&settings.jobs, &plan)? {
            break run_dir;
        }
    };
    drop(in_use);
    result::remember_sample(&run_dir, job.sample.as_ref())?;
    start(arguments, run_dir, &session, &mut screen)
}

/// The run directory that was named for a new job, as an absolute path.
fn new_run_dir(folder: &Path) -> Result<PathBuf, Failure> {
    let path = std::path::absolute(folder)
        .map_err(|error| Failure::usage(format!("--run-dir {}: {error}", folder.display())))?;
    run_dir::check_free(&path)?;
    check(&Report { checks: vec![preflight::writable(&path)] })?;
    Ok(path)
}

/// Runs the job here, or leaves it to a controller of its own.
fn start(
    arguments: &Launch,
    run_dir: RunDir,
    session: &Session,
    screen: &mut Screen,
) -> Result<Exit, Failure> {
    if arguments.detach {
        controller::detach(run_dir, screen)
    } else {
        controller::watch(run_dir, session, screen)
    }
}

/// The job manifest asked for, or the quickstart's, and its path.
fn job(named: Option<&Path>) -> Result<(PathBuf, JobManifest), Failure> {
    let path = match named {
        Some(path) => path.to_owned(),
        None => {
            let here = std::env::current_dir()
                .map_err(|error| Failure::usage(format!("no working directory: {error}")))?;
            let found = here.ancestors().map(|folder| folder.join(DEFAULT_JOB)).find(|path| path.is_file());
            found.ok_or_else(|| {
                Failure::usage(format!(
                    "no job manifest is named, and there is no {DEFAULT_JOB} in {} or above",
                    here.display()
                ))
                .with_hint(Some(
                    "name one: trainyard launch JOB.toml, or run this in a checkout of Trainyard",
                ))
            })?
        }
    };
    let job = trainyard_builder::manifest::read(&path)?;
    Ok((path, job))
}

fn engine_settings() -> EngineSettings {
    EngineSettings {
        container_host: std::env::var(env::CONTAINER_HOST).ok().filter(|host| !host.is_empty()),
        runtime_dir: std::env::var_os(env::XDG_RUNTIME_DIR).map(PathBuf::from),
        path: std::env::var_os("PATH"),
    }
}

/// Refuses a launch that this machine cannot bear, with every check that failed.
fn check(report: &Report) -> Result<(), Failure> {
    if report.passed() {
        return Ok(());
    }
    Err(Failure::new(Exit::Preflight, anyhow::anyhow!("preflight refused the launch:\n{}", table(report))))
}

fn table(report: &Report) -> String {
    let rows: Vec<String> = report
        .checks
        .iter()
        .filter(|check| !check.passed)
        .map(|check| {
            format!(
                "  {}: found {}; needed {}\n    fix: {}",
                check.name, check.found, check.needed, check.fix
            )
        })
        .collect();
    rows.join("\n")
}
