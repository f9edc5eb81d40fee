//! Jobs of real processes on this machine, for the tests beside it.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use trainyard_spec::event::{FailureClass, TrainerEvent};
use trainyard_trainer::checkpoint::read::Checkpoint;
use trainyard_trainer::data::prepare::{Request, prepare};
use trainyard_trainer::tokenizer::Tokenizer;

/// Longest time that anything here may take before a test counts as hanging.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A data set and a folder for what jobs leave.
pub(crate) struct Lab {
    folder: tempfile::TempDir,
}

/// A job to start.
#[derive(Clone)]
pub(crate) struct Job {
    pub(crate) world_size: u32,
    /// Keys of `train` and `model` that differ from [`Lab::config`]'s.
    pub(crate) config: BTreeMap<&'static str, f64>,
    /// Name of the checkpoint folder.
    pub(crate) checkpoints: &'static str,
    pub(crate) resume: String,
    pub(crate) timeout: u32,
}

pub(crate) fn job(world_size: u32, checkpoints: &'static str) -> Job {
    Job { world_size, config: BTreeMap::new(), checkpoints, resume: "auto".to_owned(), timeout: 30 }
}

impl Job {
    pub(crate) fn with(mut self, key: &'static str, value: f64) -> Self {
        self.config.insert(key, value);
        self
    }
}

pub(crate) struct Rank {
    child: Child,
    events: PathBuf,
}

/// How a rank ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) events: Vec<TrainerEvent>,
}

/// An address of this machine that no other test uses, so that ports do not meet.
pub(crate) fn address() -> Ipv4Addr {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, high, low, NEXT.fetch_add(1, Ordering::Relaxed) as u8)
}

pub(crate) const PORT: u16 = 29_500;

impl Lab {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let text = folder.path().join("text");
        let words = ["king", "queen", "crown", "sword", "and", "the", "of", "to"];
        let sentence = |i: usize| format!("{} {}\n", words[i * i % 8], words[(i / 3 + i * 5) % 8]);
        std::fs::write(&text, (0..3000).map(sentence).collect::<String>()).unwrap();
        let out = folder.path().join("data");
        let request =
            Request { texts: &[text], tokenizer: Tokenizer::Byte, validation_fraction: 0.1, out: &out };
        prepare(&request, |_, _| {}).unwrap();
        Self { folder }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes the configuration and returns its path.
    pub(crate) fn config(&self, job: &Job) -> PathBuf {
        let mut model = serde_json::json!({ "layers": 2, "heads": 2, "channels": 16, "context": 16 });
        let mut train = serde_json::json!({
            "steps": 20, "batch": 2, "learning-rate": 0.01, "min-learning-rate": 0.001, "warmup-steps": 3,
            "weight-decay": 0.1, "clip-norm": 1.0, "seed": 7, "eval-every": 10, "eval-sequences": 10,
            "checkpoint-every": 5, "keep-last": 2,
        });
        for (key, value) in &job.config {
            let table = if model.get(key).is_some() { &mut model } else { &mut train };
            table[key] = if value.fract() == 0.0 { (*value as u64).into() } else { serde_json::json!(value) };
        }
        let text = serde_json::json!({ "version": 1, "model": model, "train": train }).to_string();
        let path = self.path(&format!("{}.json", trainyard_spec::Digest::of(text.as_bytes()).short()));
        // Ranks that have been started may be reading it.
        if !path.exists() {
            std::fs::write(&path, text).unwrap();
        }
        path
    }

    /// The command of one rank.
    pub(crate) fn command(
        &self,
        job: &Job,
        rank: u32,
        address: Ipv4Addr,
        run_id: &str,
    ) -> (Command, PathBuf) {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let events = self.path(&format!("events-{}", NEXT.fetch_add(1, Ordering::Relaxed)));
        let mut command = Command::new(env!("CARGO_BIN_EXE_trainyard-trainer"));
        command
            .arg("train")
            .args([Path::new("--config"), &self.config(job)])
            .args([Path::new("--data"), &self.path("data")])
            .args([Path::new("--checkpoints"), &self.path(job.checkpoints)])
            .args(["--resume", &job.resume, "--threads", "1", "--timeout", &job.timeout.to_string()])
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", job.world_size.to_string())
            .env("MASTER_ADDR", address.to_string())
            .env("MASTER_PORT", PORT.to_string())
            .env("TORCHELASTIC_RUN_ID", run_id)
            .env("TRAINYARD_EVENTS", &events)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        (command, events)
    }

    pub(crate) fn start(&self, job: &Job) -> Vec<Rank> {
        let address = address();
        (0..job.world_size).map(|rank| self.start_rank(job, rank, address, "run")).collect()
    }

    pub(crate) fn start_rank(&self, job: &Job, rank: u32, address: Ipv4Addr, run_id: &str) -> Rank {
        let (mut command, events) = self.command(job, rank, address, run_id);
        Rank { child: command.spawn().unwrap(), events }
    }

    pub(crate) fn run(&self, job: &Job) -> Vec<Ended> {
        self.start(job).into_iter().map(Rank::wait).collect()
    }

    /// Runs a job that must finish; what rank 0 said.
    pub(crate) fn finish(&self, job: &Job) -> Vec<TrainerEvent> {
        let mut ended = self.run(job);
        for rank in &ended {
            assert!(rank.status.success(), "{rank:?}");
        }
        ended.swap_remove(0).events
    }

    /// The newest checkpoint, and the bytes of its files.
    pub(crate) fn newest(&self, checkpoints: &str) -> (Checkpoint, Vec<Vec<u8>>) {
        let checkpoint = Checkpoint::open_newest(&self.path(checkpoints)).unwrap();
        assert!(checkpoint.passed_over.is_empty(), "{:?}", checkpoint.passed_over);
        let read = |file: &String| std::fs::read(checkpoint.path.join(file)).unwrap();
        let files = checkpoint.manifest.files.iter().map(|entry| read(&entry.file)).collect();
        (checkpoint, files)
    }
}

impl Rank {
    pub(crate) fn of(mut command: Command, events: PathBuf) -> Self {
        command.stdout(Stdio::null()).stderr(Stdio::null());
        Self { child: command.spawn().unwrap(), events }
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    pub(crate) fn events(&self) -> Vec<TrainerEvent> {
        let text = std::fs::read_to_string(&self.events).unwrap_or_default();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Waits until the rank has said something that fits.
    pub(crate) fn wait_for(&self, fits: impl Fn(&TrainerEvent) -> bool) {
        let start = Instant::now();
        while !self.events().iter().any(&fits) {
            assert!(start.elapsed() < PATIENCE, "waited in vain: {:?}", self.events());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    pub(crate) fn wait(mut self) -> Ended {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return Ended { status, events: self.events() };
            }
            if start.elapsed() > PATIENCE {
                self.child.kill().unwrap();
                self.child.wait().unwrap();
                panic!("a rank hangs; it said {:?}", self.events());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Ended {
    /// The failure that a rank reported before it exited with 1.
    pub(crate) fn failure(&self) -> (FailureClass, &str) {
        assert_eq!(self.status.code(), Some(1), "{self:?}");
        match self.events.last() {
            Some(TrainerEvent::Failed { class, message }) => (*class, message),
            _ => panic!("no failure was reported: {self:?}"),
        }
    }

    pub(crate) fn fails(&self, expect_class: FailureClass, expect: &str) {
        let (class, message) = self.failure();
        assert!(class == expect_class && message.contains(expect), "{class:?}: {message}");
    }
}

/// Step and loss of each step and validation, exactly.
pub(crate) fn losses(events: &[TrainerEvent]) -> BTreeMap<(u64, bool), u64> {
    let facts = events.iter().filter_map(|event| match event {
        TrainerEvent::Step { step, loss, .. } => Some(((*step, false), loss.to_bits())),
        TrainerEvent::Validation { step, loss } => Some(((*step, true), loss.to_bits())),
        _ => None,
    });
    facts.collect()
}
