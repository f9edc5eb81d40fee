//! One rank: its process, and the threads that read what it writes.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, Mode, OFlags, mkfifoat, open};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, getppid, kill_process_group, set_parent_process_death_signal};
use trainyard_spec::env;
use trainyard_spec::plan::{NodePlan, RankPlan};
use trainyard_spec::protocol::{NodeEvent, RankStatus, Stream};

use crate::Broken;
use crate::lines;
use crate::report::Reporter;

/// Time that readers get to finish when something the rank started still holds its pipes.
const READERS: Duration = Duration::from_millis(300);

/// A rank that was started.
#[derive(Debug)]
pub(crate) struct Rank {
    pub(crate) number: u32,
    pub(crate) pid: Pid,
    pub(crate) status: Option<RankStatus>,
    readers: Vec<JoinHandle<()>>,
    /// Keeps the events' pipe open until the rank has ended, whether or not it has opened it.
    events: Option<File>,
}

impl Rank {
    pub(crate) fn start(plan: &NodePlan, rank: &RankPlan, reporter: &Reporter) -> Result<Self, Broken> {
        let number = rank.rank;
        let (program, arguments) = plan.command.split_first().ok_or(Broken::EmptyCommand { rank: number })?;
        let path = rank.env.get(env::EVENTS).map(PathBuf::from);
        let pipe = path
            .map(|path| events_pipe(&path).map_err(|source| Broken::Events { rank: number, path, source }));
        let pipe = pipe.transpose()?;
        let mut command = Command::new(program);
        command
            .args(arguments)
            .env_remove(env::NODE_PLAN)
            .envs(&plan.env)
            .envs(&rank.env)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        let agent = rustix::process::getpid();
        // SAFETY: between fork and exec only system calls are made, which take and allocate no memory.
        unsafe {
            command.pre_exec(move || {
                // The signal comes when the agent's main thread, which starts all ranks, ends: with the agent.
                set_parent_process_death_signal(Some(Signal::KILL))?;
                if getppid() == Some(agent) || agent.is_init() {
                    Ok(())
                } else {
                    Err(io::ErrorKind::BrokenPipe.into())
                }
            });
        }
        let started = |source| Broken::Start { rank: number, program: program.clone(), source };
        runnable(Path::new(program)).map_err(started)?;
        let mut child = command.spawn().map_err(started)?;
        let mut readers = Vec::new();
        let output = |stream| {
            let reporter = reporter.clone();
            move |line: &str| reporter.say(NodeEvent::Output { rank: number, stream, line: line.to_owned() })
        };
        readers.extend(child.stdout.take().map(|pipe| read(pipe, output(Stream::Stdout))));
        readers.extend(child.stderr.take().map(|pipe| read(pipe, output(Stream::Stderr))));
        let mut keep_open = None;
        if let Some((reader, writer)) = pipe {
            let reporter = reporter.clone();
            readers.push(read(reader, move |line| reporter.say(event(number, line))));
            keep_open = Some(writer);
        }
        let pid = Pid::from_child(&child);
        reporter.say(NodeEvent::RankStarted { rank: number, pid: child.id() });
        Ok(Self { number, pid, status: None, readers, events: keep_open })
    }

    /// Sends a signal to the rank and to all in its process group.
    pub(crate) fn signal(&self, signal: Signal) {
        // An empty group is what is wanted.
        let _ = kill_process_group(self.pid, signal);
    }

    /// The rank's process has ended: kills what is left of its group, and says all that it wrote, then how it ended.
    pub(crate) fn ended(&mut self, status: RankStatus, reporter: &Reporter) {
        self.status = Some(status);
        self.signal(Signal::KILL);
        self.events = None;
        let started = Instant::now();
        while self.readers.iter().any(|reader| !reader.is_finished()) && started.elapsed() < READERS {
            thread::sleep(Duration::from_millis(1));
        }
        reporter.say(NodeEvent::RankExited { rank: self.number, status });
    }
}

/// Refuses what the kernel does not run: the C library would hand such a file to a shell, which runs anything.
fn runnable(program: &Path) -> io::Result<()> {
    // A name without a slash is looked for on PATH, where what is damaged is not ours.
    if program.components().count() < 2 {
        return Ok(());
    }
    let mut start = Vec::new();
    File::open(program)?.take(4).read_to_end(&mut start)?;
    if start == b"\x7fELF" || start.starts_with(b"#!") { Ok(()) } else { Err(Errno::NOEXEC.into()) }
}

/// A pipe in the file system, with its reading end and a writing end that keeps it open.
fn events_pipe(path: &Path) -> io::Result<(File, File)> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    mkfifoat(CWD, path, Mode::RUSR | Mode::WUSR)?;
    // Opening the reading end waits for a writer, except like this.
    let reader = open(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())?;
    let writer = open(path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::fs::fcntl_setfl(&reader, OFlags::empty())?;
    Ok((reader.into(), writer.into()))
}

fn read(stream: impl Read + Send + 'static, take: impl FnMut(&str) + Send + 'static) -> JoinHandle<()> {
    thread::spawn(move || {
        // A pipe that cannot be read has nothing more to say.
        let _ = lines::each(stream, take);
    })
}

/// What a rank reported; a line that is no report is passed on as output.
fn event(rank: u32, line: &str) -> NodeEvent {
    match serde_json::from_str(line) {
        Ok(said) => NodeEvent::Trainer { rank, said },
        Err(_) => NodeEvent::Output { rank, stream: Stream::Stderr, line: format!("not an event: {line}") },
    }
}
