//! The life of a job: watched in this terminal, or by a process of its own.

use std::fs::File;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use trainyard_launcher::run_dir::{RunDir, holder};
use trainyard_launcher::supervise::{self, Outcome, Stop};
use trainyard_spec::Exit;
use trainyard_spec::event::{JobEvent, JobRecord};
use trainyard_spec::protocol::NodeEvent;

use super::result;
use crate::cli::Controller;
use crate::commands::runtime;
use crate::failure::Failure;
use crate::view::screen::Screen;
use crate::view::training::Training;

/// Where a controller of its own says what it has to say.
const LOG: &str = "controller.log";
/// Time in which a new controller has taken over its run directory.
const HAND_OVER: Duration = Duration::from_secs(10);

/// Runs the job and shows it until it is over.
pub(super) fn watch(run_dir: RunDir, session: &Session, screen: &mut Screen) -> Result<Exit, Failure> {
    let folder = run_dir.path().to_owned();
    let job = run_dir.plan().job.clone();
    screen.say("Launching", &result::shape(run_dir.plan()));
    screen.say("In", &run_dir.plan().run_dir);
    let image = run_dir.plan().image.clone();
    let mut training = Training::default();
    let outcome = session.run(run_dir, |record| show(record, &mut training, screen))?;
    screen.clear();
    result::tell(&folder, &job, &image, &training, &outcome, screen)
}

/// `trainyard controller`: the process that `--detach` leaves behind.
pub(crate) fn controller(arguments: &Controller) -> Result<Exit, Failure> {
    // The terminal that started it may go away; its signals are then no longer meant for this process. It fails only
    // where this process leads a session already, which is as good.
    let _ = rustix::process::setsid();
    let run_dir = RunDir::open(&arguments.run_dir)?;
    let outcome = Session::start()?.run(run_dir, |_| {})?;
    for line in &outcome.left_over {
        Screen::new().warn(line);
    }
    Ok(outcome.exit)
}

/// Starts a controller for the job and returns when it has taken over.
pub(super) fn detach(run_dir: RunDir, screen: &mut Screen) -> Result<Exit, Failure> {
    let folder = run_dir.path().to_owned();
    let job = run_dir.plan().job.clone();
    let shape = result::shape(run_dir.plan());
    // Its lock goes to the controller.
    drop(run_dir);
    let log = folder.join(LOG);
    let failed = |what: &str, error: std::io::Error| {
        Failure::new(Exit::Infrastructure, anyhow::anyhow!("cannot {what} {}: {error}", log.display()))
    };
    let program = std::env::current_exe().map_err(|error| failed("find this program for", error))?;
    let file =
        File::options().create(true).append(true).open(&log).map_err(|error| failed("write", error))?;
    let errors = file.try_clone().map_err(|error| failed("write", error))?;
    let mut child = Command::new(program)
        .arg("controller")
        .arg(&folder)
        .stdin(Stdio::null())
        .stdout(file)
        .stderr(errors)
        .spawn()
        .map_err(|error| failed("start the controller that writes", error))?;
    let started = Instant::now();
    while holder(&folder)?.is_none_or(|holder| holder.pid != child.id()) {
        let ended = child.try_wait().map_err(|error| failed("watch the controller that writes", error))?;
        if ended.is_some() || started.elapsed() > HAND_OVER {
            let said = std::fs::read_to_string(&log).unwrap_or_default();
            let message = anyhow::anyhow!("the job's controller did not start: {}", said.trim());
            return Err(Failure::new(Exit::Infrastructure, message));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    screen.say("Launched", &shape);
    screen.say("In", &folder.display().to_string());
    super::print(&format!("{job}\n"))?;
    screen.say("Next", &format!("trainyard status {job}; trainyard logs -f {job}; trainyard stop {job}"));
    Ok(Exit::Done)
}

/// The event loop of a launch, and what its signals ask for: one Ctrl-C or SIGTERM a clean end, a second an end at once.
pub(super) struct Session {
    pub(super) runtime: Runtime,
    pub(super) stopped: watch::Receiver<Stop>,
}

impl Session {
    /// From here on signals are heard instead of ending this process.
    pub(super) fn start() -> Result<Self, Failure> {
        let failed =
            |error| Failure::new(Exit::Infrastructure, anyhow::anyhow!("cannot listen for signals: {error}"));
        let runtime = runtime()?;
        let (stop, stopped) = watch::channel(Stop::No);
        for kind in [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()] {
            let mut heard = runtime.block_on(async { signal(kind) }).map_err(failed)?;
            let stop = stop.clone();
            runtime.spawn(async move {
                while heard.recv().await.is_some() {
                    ask(&stop);
                }
            });
        }
        Ok(Self { runtime, stopped })
    }

    fn run(&self, run_dir: RunDir, mut learn: impl FnMut(&JobRecord)) -> Result<Outcome, Failure> {
        let (sender, mut records) = mpsc::unbounded_channel();
        self.runtime.block_on(async {
            let job = supervise::run(run_dir, self.stopped.clone(), sender);
            tokio::pin!(job);
            let outcome = loop {
                tokio::select! {
                    biased;
                    Some(record) = records.recv() => learn(&record),
                    outcome = &mut job => break outcome,
                }
            };
            while let Ok(record) = records.try_recv() {
                learn(&record);
            }
            Ok(outcome?)
        })
    }
}

fn ask(stop: &watch::Sender<Stop>) {
    stop.send_modify(|stop| {
        *stop = if *stop == Stop::No { Stop::Gracefully } else { Stop::Now };
    });
}

fn show(record: &JobRecord, training: &mut Training, screen: &mut Screen) {
    let warnings = training.warnings.len();
    training.learn(&record.event);
    match &record.event {
        JobEvent::Note { message } => screen.say("Note", message),
        JobEvent::AttemptFailed { attempt, failure } => {
            screen.warn(&format!("attempt {attempt} failed: {}", result::failure(failure)));
        }
        JobEvent::AttemptStarted { attempt, .. } if *attempt > 0 => {
            screen.say("Restarting", &format!("attempt {attempt}, from the newest checkpoint"));
        }
        JobEvent::Node { said: NodeEvent::Trainer { .. }, .. } if training.steps > 0 => {
            if let Some(warning) = training.warnings.get(warnings) {
                screen.warn(warning);
            }
            screen.show("Training", &training.line(), training.step, training.steps);
        }
        JobEvent::Node { .. } if training.steps == 0 => screen.show("Starting", "nodes and ranks", 0, 0),
        JobEvent::Node { .. }
        | JobEvent::AttemptStarted { .. }
        | JobEvent::Created { .. }
        | JobEvent::Ended { .. } => {}
    }
}
