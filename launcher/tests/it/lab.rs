//! An image made of the real agent and a shell, and launches of it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use tokio::sync::{mpsc, watch};
use trainyard_launcher::engine::{self, EngineChoice, EngineSettings};
use trainyard_launcher::machine::Machine;
use trainyard_launcher::plan::{Image, Launch, plan};
use trainyard_launcher::run_dir::RunDir;
use trainyard_launcher::supervise::{Outcome, RunError, Stop, run};
use trainyard_spec::Digest;
use trainyard_spec::event::{JobEvent, JobRecord};
use trainyard_spec::job::JobManifest;
use trainyard_spec::plan::{EnginePlan, LaunchPlan};
use trainyard_spec::protocol::NodeEvent;

/// A small job.
pub(crate) fn manifest() -> JobManifest {
    serde_json::from_str(include_str!("../job.json")).unwrap()
}

/// A folder for jobs, and an image.
pub(crate) struct Lab {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) engine: EnginePlan,
    pub(crate) runtime: Runtime,
}

impl Lab {
    pub(crate) fn process() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        fs::create_dir(dir.path().join("data")).unwrap();
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        Self { dir, engine: EnginePlan::Process, runtime }
    }

    /// The same with real containers; none where this machine cannot run any, which CI does not accept.
    pub(crate) fn podman() -> Option<Self> {
        static CHOSEN: OnceLock<Result<EnginePlan, String>> = OnceLock::new();
        let mut lab = Self::process();
        let chosen = CHOSEN.get_or_init(|| {
            let settings = EngineSettings { path: std::env::var_os("PATH"), ..EngineSettings::default() };
            let chosen =
                lab.runtime.block_on(engine::choose(EngineChoice::Podman, &settings, &image(), never()));
            chosen.map(|chosen| chosen.engine).map_err(|error| error.to_string())
        });
        match chosen {
            Ok(engine) => {
                lab.engine = engine.clone();
                Some(lab)
            }
            Err(error) => {
                assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "CI must have Podman: {error}");
                eprintln!("SKIPPED, no container can be run here: {error}");
                None
            }
        }
    }

    /// Plans a job whose ranks run a shell script, and say at its end that they are done.
    pub(crate) fn plan(&self, id: &str, nodes: u32, max_restarts: u32, script: &str) -> LaunchPlan {
        let launch = Launch {
            id: id.parse().unwrap(),
            job: manifest(),
            image: image(),
            data_dir: self.dir.path().join("data"),
            nodes,
            max_restarts,
            run_dir: self.dir.path().join(id),
            engine: self.engine.clone(),
        };
        let mut plan = plan(&launch, &Machine::read().unwrap()).unwrap();
        let shell = match self.engine {
            EnginePlan::Process => format!("{}/bin/busybox", plan.image.rootfs),
            EnginePlan::Podman { .. } => "/bin/busybox".to_owned(),
        };
        let done = report(r#"{"event":"finished","step":1}"#);
        let script = format!("{script}\ncode=$?; [ $code != 0 ] || {{ {done} }}; exit $code");
        for node in &mut plan.nodes {
            node.command = [shell.as_str(), "sh", "-c", &script].map(str::to_owned).to_vec();
            node.lease_ms = 3000;
            node.grace_ms = 2000;
        }
        plan
    }

    /// Runs a job, and hands every record to `look`, which may ask it to stop.
    pub(crate) fn run(
        &self,
        plan: &LaunchPlan,
        mut look: impl FnMut(&JobRecord, &watch::Sender<Stop>),
    ) -> Ran {
        let dir = RunDir::create(plan).unwrap();
        let (ask, stop) = watch::channel(Stop::No);
        let (tell, mut told) = mpsc::unbounded_channel();
        let started = Instant::now();
        let mut records = Vec::new();
        let result = self.runtime.block_on(async {
            let job = tokio::spawn(run(dir, stop, tell));
            while let Some(record) = told.recv().await {
                look(&record, &ask);
                records.push((started.elapsed(), record));
            }
            job.await.unwrap()
        });
        self.assert_nothing_left(plan);
        Ran { result, records }
    }

    /// Nothing of the job runs, and no container or network of it is there.
    pub(crate) fn assert_nothing_left(&self, plan: &LaunchPlan) {
        let left = processes_with(&plan.run_dir);
        assert!(left.is_empty(), "left running: {left:?}");
        if matches!(self.engine, EnginePlan::Podman { .. }) {
            for list in [["ps", "-aq"], ["network", "ls"]] {
                let mut command = Command::new("podman");
                let output = command.args(list).arg(format!("--filter=label=trainyard.job={}", plan.job));
                let output = output.args(["--format", "{{.ID}}"]).output().unwrap();
                assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "", "left by {}", plan.job);
            }
        }
    }
}

/// Nobody who asks to stop.
pub(crate) fn never() -> watch::Receiver<Stop> {
    watch::channel(Stop::No).1
}

/// How a job went.
pub(crate) struct Ran {
    pub(crate) result: Result<Outcome, RunError>,
    pub(crate) records: Vec<(Duration, JobRecord)>,
}

impl Ran {
    pub(crate) fn outcome(&self) -> &Outcome {
        let outcome = self.result.as_ref().unwrap();
        assert_eq!(outcome.left_over, Vec::<String>::new());
        outcome
    }

    /// When something first happened.
    pub(crate) fn when(&self, what: impl Fn(&JobEvent) -> bool) -> Duration {
        let found = self.records.iter().find(|(_, record)| what(&record.event));
        found.unwrap_or_else(|| panic!("it never happened: {:#?}", self.records)).0
    }

    /// All that ranks wrote.
    pub(crate) fn output(&self) -> Vec<String> {
        let line = |(_, record): &(Duration, JobRecord)| match &record.event {
            JobEvent::Node { said: NodeEvent::Output { line, .. }, .. } => Some(line.clone()),
            _ => None,
        };
        self.records.iter().filter_map(line).collect()
    }
}

/// Processes whose environment or command holds a text.
pub(crate) fn processes_with(text: &str) -> Vec<(u32, String)> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let read = |name: &str| {
            String::from_utf8_lossy(&fs::read(entry.path().join(name)).unwrap_or_default()).into_owned()
        };
        // The service of a killed controller ends by itself, when nobody has asked it anything for a minute.
        if read("cmdline").starts_with("podman\0system\0service\0") {
            continue;
        }
        if pid != std::process::id() && (read("environ").contains(text) || read("cmdline").contains(text)) {
            found.push((pid, read("cmdline").replace('\0', " ")));
        }
    }
    found
}

/// Processes named by a rank's environment variable, as `RANK=1`, of a job with this run directory.
pub(crate) fn rank_process(run_id: &str, rank: u32) -> Option<i32> {
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
        let variables: Vec<_> = environment.split(|byte| *byte == 0).collect();
        let has = |variable: String| variables.contains(&variable.as_bytes());
        if has(format!("TORCHELASTIC_RUN_ID={run_id}")) && has(format!("RANK={rank}")) {
            return Some(pid);
        }
    }
    None
}

/// The image: the agent, linked statically, and a shell.
pub(crate) fn image() -> Image {
    static IMAGE: OnceLock<Image> = OnceLock::new();
    IMAGE.get_or_init(build_image).clone()
}

fn build_image() -> Image {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    // Each test may be a process of its own.
    let only_one = fs::File::create(folder.join("image.lock")).unwrap();
    only_one.lock().unwrap();
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml");
    let target = folder.join("agent");
    let triple = "x86_64-unknown-linux-gnu";
    let built = Command::new(env!("CARGO"))
        .args([
            "build",
            "--quiet",
            "--package",
            "trainyard-node",
            "--target",
            triple,
            "--manifest-path",
            manifest,
        ])
        .arg("--target-dir")
        .arg(&target)
        .env("RUSTFLAGS", "-C target-feature=+crt-static")
        .status()
        .unwrap();
    assert!(built.success());
    let rootfs = folder.join("rootfs");
    let busybox =
        ["/bin/busybox", "/usr/bin/busybox"].map(PathBuf::from).into_iter().find(|path| path.exists());
    let busybox = busybox.expect("install busybox-static: these tests run its shell in containers");
    let files = [
        (target.join(triple).join("debug/trainyard-node"), "usr/bin/trainyard-node"),
        (busybox, "bin/busybox"),
    ];
    let mut tar = tar::Builder::new(Vec::new());
    for (source, path) in files {
        let to = rootfs.join(path);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        // A rename, since an agent of an earlier test run may still be in use.
        let new = to.with_extension("new");
        fs::copy(source, &new).unwrap();
        fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(&new, &to).unwrap();
        let mut header = tar::Header::new_gnu();
        let bytes = fs::read(&to).unwrap();
        header.set_mode(0o755);
        header.set_size(bytes.len() as u64);
        tar.append_data(&mut header, path, bytes.as_slice()).unwrap();
    }
    let layer = tar.into_inner().unwrap();
    let layout = folder.join("layout");
    let blobs = layout.join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    let write = |bytes: &[u8]| {
        let digest = Digest::of(bytes);
        fs::write(blobs.join(digest.hex()), bytes).unwrap();
        digest
    };
    let layer_digest = write(&layer);
    let config = serde_json::json!({
        "architecture": "amd64", "os": "linux",
        "config": { "Entrypoint": ["/none"], "User": "65532:65532" },
        "rootfs": { "type": "layers", "diff_ids": [layer_digest] },
        "history": [{ "created_by": "test" }],
    });
    let config = config.to_string();
    let image_manifest = serde_json::json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": { "mediaType": "application/vnd.oci.image.config.v1+json", "size": config.len(), "digest": write(config.as_bytes()) },
        "layers": [{ "mediaType": "application/vnd.oci.image.layer.v1.tar", "size": layer.len(), "digest": layer_digest }],
    });
    let digest = write(image_manifest.to_string().as_bytes());
    Image { digest, layout, rootfs }
}

/// Shell text that reports an event.
pub(crate) fn report(event: &str) -> String {
    format!("echo '{event}' >$TRAINYARD_EVENTS; ")
}
