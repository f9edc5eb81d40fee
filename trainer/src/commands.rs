//! From parsed arguments to the library and back: reads what files and the environment say, prints results, reports
//! failures, and decides the exit code.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use trainyard_spec::event::{FailureClass, TrainerEvent};
use trainyard_spec::trainer::TrainerConfig;

use crate::checkpoint::CheckpointError;
use crate::checkpoint::read::{Checkpoint, Resume};
use crate::cli::{self, Cli, Command, Format};
use crate::plan::Plan;
use crate::report::{ReportError, Reporter, complain};
use crate::sample::{Request, SampleError, sample};
use crate::settings::{Settings, SettingsError, events_file};
use crate::train::{self, Options, Outcome, TrainError};

/// Exit code of a rank that was asked to stop and has written a checkpoint: that of a process which SIGTERM ends.
const STOPPED: u8 = 143;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
enum CommandError {
    #[error("cannot read {}: {source}", .path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{}: {source}", .path.display())]
    Config { path: PathBuf, source: serde_json::Error },
    #[error("{}: {}", .path.display(), .rules.join("; "))]
    Rules { path: PathBuf, rules: Vec<String> },
    #[error(transparent)]
    Settings(#[from] SettingsError),
    #[error(transparent)]
    Report(#[from] ReportError),
    #[error(transparent)]
    Train(#[from] TrainError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Sample(#[from] SampleError),
    #[error("cannot write to standard output: {0}")]
    Output(#[source] io::Error),
}

impl CommandError {
    fn class(&self) -> FailureClass {
        match self {
            Self::Train(error) => error.class(),
            Self::Checkpoint(error) => error.class(),
            _ => FailureClass::User,
        }
    }
}

/// Does what the command line asks for.
pub fn run(cli: &Cli) -> ExitCode {
    let result = match &cli.command {
        Command::Train(arguments) => return train(arguments),
        Command::Sample(arguments) => print_sample(arguments),
        Command::Plan(arguments) => print_plan(arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&format!("error: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, Into::into)
}

fn train(arguments: &cli::Train) -> ExitCode {
    let mut reporter = match Reporter::open(events_file(variable).as_deref()) {
        Ok(reporter) => reporter,
        Err(error) => {
            complain(&format!("error: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let trained = (|| {
        let settings = Settings::resolve(arguments.threads, processors(), variable)?;
        reporter.set_rank(settings.rank);
        let options = Options {
            config: read_config(&arguments.config)?,
            data: arguments.data.clone(),
            checkpoints: arguments.checkpoints.clone(),
            resume: Resume::from(arguments.resume.as_str()),
            patience: Duration::from_secs(arguments.timeout),
        };
        train::run(&options, &settings, &mut reporter).map_err(CommandError::from)
    })();
    match trained {
        Ok(Outcome::Finished) => ExitCode::SUCCESS,
        Ok(Outcome::Stopped { asked }) => {
            if !asked {
                let message = "another rank was asked to stop, and this one stopped with it".to_owned();
                reporter.own(&TrainerEvent::Failed { class: FailureClass::Network, message });
            }
            STOPPED.into()
        }
        Err(error) => {
            reporter.own(&TrainerEvent::Failed { class: error.class(), message: error.to_string() });
            complain(&format!("error: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn read_config(path: &Path) -> Result<TrainerConfig, CommandError> {
    let bytes = std::fs::read(path).map_err(|source| CommandError::Read { path: path.to_owned(), source })?;
    let config: TrainerConfig = serde_json::from_slice(&bytes)
        .map_err(|source| CommandError::Config { path: path.to_owned(), source })?;
    match config.broken_rules() {
        rules if rules.is_empty() => Ok(config),
        rules => Err(CommandError::Rules { path: path.to_owned(), rules }),
    }
}

fn print_sample(arguments: &cli::Sample) -> Result<(), CommandError> {
    let checkpoint = Checkpoint::open_newest(&arguments.checkpoint)?;
    for error in &checkpoint.passed_over {
        complain(&format!("warning: {error}; {} is used", checkpoint.path.display()));
    }
    let text = sample(
        &checkpoint,
        &Request {
            prompt: &arguments.prompt,
            tokens: arguments.tokens,
            temperature: arguments.temperature,
            seed: arguments.seed,
            threads: arguments.threads.map_or_else(processors, Into::into),
        },
    )?;
    print(&text)
}

fn print_plan(arguments: &cli::Plan) -> Result<(), CommandError> {
    let plan = Plan::new(&read_config(&arguments.config)?, arguments.vocab, arguments.world_size);
    match arguments.format {
        Format::Text => print(&plan.to_string()),
        Format::Json => print(
            &serde_json::to_string_pretty(&plan).map_err(io::Error::from).map_err(CommandError::Output)?,
        ),
    }
}

fn print(text: &str) -> Result<(), CommandError> {
    writeln!(io::stdout().lock(), "{text}").map_err(CommandError::Output)
}
