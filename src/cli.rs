//! The command line as users type it. Plain data: what it means is worked out in `settings` and `commands`.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Reproducible OCI images for LLM training, and multi-node launches of them on bare metal
#[derive(Debug, Parser)]
#[command(name = "trainyard", version, disable_help_subcommand = true, propagate_version = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train: build the image if needed, start the nodes, watch them until the job is over
    Launch(Launch),
    /// List this machine's jobs, or show one
    Status(Status),
    /// Print what a job's ranks wrote
    Logs(Logs),
    /// Stop a job and everything it started
    Stop(Stop),
    /// Pin every input of an image or corpus manifest by sha256, in a .lock file beside it
    Lock(Lock),
    /// Build an image from its manifest and lock, as an OCI layout
    Build(Build),
    /// Write every locked input of a manifest to a folder, from which images are built without a server
    Vendor(Vendor),
    /// Show what an image holds
    Inspect(Inspect),
    /// Rebuild an image from its lock and compare every digest
    Verify(Verify),
    /// Push an image to a registry
    Push(Push),
    /// Pull an image from a registry, as an OCI layout
    Pull(Pull),
    /// Write an image to one file that other tools load
    Export(Export),
    /// Put images for several platforms under one name
    Index(Index),
    /// Sign an image in a registry with a key of one's own
    Sign(Sign),
    /// See that an image in a registry was signed with a key
    VerifySignature(VerifySignature),
    /// Print the bill of materials of an image that has been built
    Sbom(Sbom),
    /// Print how an image was built, as a statement with SLSA provenance
    Provenance(Provenance),
    /// Remove from the cache what nothing has needed for a while
    Gc(Gc),
    /// Work with training text
    #[command(subcommand)]
    Data(Data),
    /// Run the job of a run directory; what `launch --detach` leaves behind
    #[command(hide = true)]
    Controller(Controller),
    /// Print a shell's completion script
    Completions(Completions),
    /// Write man pages
    Man(Man),
}

/// How a table or report is printed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people
    #[default]
    Text,
    /// For programs
    Json,
}

/// What runs the nodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Engine {
    /// Podman where it works, processes elsewhere
    #[default]
    Auto,
    /// A process group per node
    Process,
    /// A container per node
    Podman,
}

/// Where a command may take inputs from.
#[derive(Debug, Args)]
pub(crate) struct Sources {
    /// Look for inputs in this folder, which `trainyard vendor` wrote, before any server is asked [default:
    /// TRAINYARD_VENDORED]
    #[arg(long, value_name = "DIR")]
    pub(crate) vendored: Option<PathBuf>,
    /// Fail where the network would be needed
    #[arg(long)]
    pub(crate) offline: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Launch {
    /// Job manifest [default: manifests/jobs/gpt-small.toml, here or in a folder above]
    pub(crate) job: Option<PathBuf>,
    /// Number of nodes [default: the manifest's]
    #[arg(long, value_name = "N")]
    pub(crate) nodes: Option<u32>,
    /// What runs the nodes
    #[arg(long, value_enum, default_value_t)]
    pub(crate) engine: Engine,
    /// Train on this UTF-8 text instead of the manifest's corpus
    #[arg(long, value_name = "FILE")]
    pub(crate) data: Option<PathBuf>,
    /// Folder for the job's checkpoints, logs and metrics [default: a new one under the state folder]
    #[arg(long, value_name = "DIR")]
    pub(crate) run_dir: Option<PathBuf>,
    /// Go on with a job that ended early, as it was planned, from its newest checkpoint
    #[arg(long, value_name = "JOB", conflicts_with_all = ["job", "nodes", "engine", "data", "run_dir", "max_restarts", "dry_run"])]
    pub(crate) resume: Option<String>,
    /// Fresh attempts after a failure [default: the manifest's]
    #[arg(long, value_name = "N")]
    pub(crate) max_restarts: Option<u32>,
    /// Return as soon as the job runs; follow it with `trainyard logs -f`
    #[arg(long, conflicts_with = "dry_run")]
    pub(crate) detach: bool,
    /// Prepare image and data, print the plan of the launch, and start nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// How --dry-run prints the plan
    #[arg(long, value_enum, default_value_t, requires = "dry_run")]
    pub(crate) format: Format,
    #[command(flatten)]
    pub(crate) sources: Sources,
}

#[derive(Debug, Args)]
pub(crate) struct Controller {
    /// The job's run directory
    pub(crate) run_dir: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct Status {
    /// Job to show, by id or run directory [default: all]
    pub(crate) job: Option<String>,
    /// How to print
    #[arg(long, value_enum, default_value_t)]
    pub(crate) format: Format,
}

#[derive(Debug, Args)]
pub(crate) struct Logs {
    /// Job, by id or run directory [default: the newest]
    pub(crate) job: Option<String>,
    /// Go on printing until the job is over
    #[arg(short, long)]
    pub(crate) follow: bool,
    /// This rank alone [default: all]
    #[arg(long, value_name = "N")]
    pub(crate) rank: Option<u32>,
}

#[derive(Debug, Args)]
pub(crate) struct Stop {
    /// Job to stop, by id or run directory
    pub(crate) job: String,
}

#[derive(Debug, Args)]
pub(crate) struct Lock {
    /// Image or corpus manifest
    pub(crate) manifest: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct Build {
    /// Image manifest
    pub(crate) manifest: PathBuf,
    /// Also write the OCI layout to this new folder
    #[arg(long, value_name = "DIR")]
    pub(crate) output: Option<PathBuf>,
    /// Also unpack the image's files to this new folder
    #[arg(long, value_name = "DIR")]
    pub(crate) rootfs: Option<PathBuf>,
    /// How to print the result
    #[arg(long, value_enum, default_value_t)]
    pub(crate) format: Format,
    #[command(flatten)]
    pub(crate) sources: Sources,
}

#[derive(Debug, Args)]
pub(crate) struct Vendor {
    /// Image or corpus manifest
    pub(crate) manifest: PathBuf,
    /// Folder to write to; what this command wrote there before stays
    #[arg(long, value_name = "DIR")]
    pub(crate) output: PathBuf,
    /// How to print the result
    #[arg(long, value_enum, default_value_t)]
    pub(crate) format: Format,
    #[command(flatten)]
    pub(crate) sources: Sources,
}

#[derive(Debug, Args)]
pub(crate) struct Inspect {
    /// Folder of an OCI layout, or the manifest of an image that has been built
    pub(crate) image: PathBuf,
    /// Also tell whether this machine's driver and GPUs can run it, and by which rule; exit code 5 where they cannot
    #[arg(long)]
    pub(crate) host: bool,
    /// How to print
    #[arg(long, value_enum, default_value_t)]
    pub(crate) format: Format,
}

#[derive(Debug, Args)]
pub(crate) struct Verify {
    /// Image manifest
    pub(crate) manifest: PathBuf,
    /// OCI layout to compare with [default: the one in the cache]
    #[arg(long, value_name = "DIR")]
    pub(crate) image: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) sources: Sources,
}

#[derive(Debug, Args)]
pub(crate) struct Push {
    /// Folder of an OCI layout, or the manifest of an image that has been built
    pub(crate) image: PathBuf,
    /// Where to: HOST:PORT/NAME:TAG; port and tag may be left out
    pub(crate) reference: String,
    /// Sign the image, and what is attached to it, with this private key, of cosign or in PKCS#8 (PEM)
    #[arg(long, value_name = "KEY")]
    pub(crate) sign: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) password: Password,
    /// Speak plain HTTP with the registry; this machine's own registries need no such word
    #[arg(long)]
    pub(crate) plain_http: bool,
    /// How to print the result
    #[arg(long, value_enum, default_value_t)]
    pub(crate) format: Format,
}

#[derive(Debug, Args)]
pub(crate) struct Pull {
    /// What: HOST:PORT/NAME:TAG@DIGEST; all but host and name may be left out
    pub(crate) reference: String,
    /// Write the OCI layout to this new folder
    #[arg(long, value_name = "DIR")]
    pub(crate) output: PathBuf,
    /// Speak plain HTTP with the registry; this machine's own registries need no such word
    #[arg(long)]
    pub(crate) plain_http: bool,
    /// How to print the result
    #[arg(long, value_enum, default_value_t)]
    pub(crate) format: Format,
}

/// A form of an image in one file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ArchiveFormat {
    /// A tar of the OCI layout; every digest stays
    OciArchive,
    /// What `docker load` reads
    DockerArchive,
}

#[derive(Debug, Args)]
pub(crate) struct Index {
    /// Folders of OCI layouts, or manifests of images that have been built, each for another platform
    #[arg(required = true)]
    pub(crate) images: Vec<PathBuf>,
    /// Write the OCI layout with the index to this new folder
    #[arg(long, value_name = "DIR")]
    pub(crate) output: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct Export {
    /// Folder of an OCI layout, or the manifest of an image that has been built
    pub(crate) image: PathBuf,
    /// Form of the file
    #[arg(long, value_enum)]
    pub(crate) format: ArchiveFormat,
    /// Write to this new file
    #[arg(long, value_name = "FILE")]
    pub(crate) output: PathBuf,
}

/// A key that signs.
#[derive(Debug, Args)]
pub(crate) struct Password {
    /// File with the key's password, if it has one [default: what COSIGN_PASSWORD says]
    #[arg(long, value_name = "FILE")]
    pub(crate) password_file: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct Sign {
    /// What: HOST:PORT/NAME:TAG@DIGEST; all but host and name may be left out
    pub(crate) reference: String,
    /// Private key, of cosign or in PKCS#8 (PEM)
    #[arg(long, value_name = "FILE")]
    pub(crate) key: PathBuf,
    #[command(flatten)]
    pub(crate) password: Password,
    /// Speak plain HTTP with the registry; this machine's own registries need no such word
    #[arg(long)]
    pub(crate) plain_http: bool,
}

#[derive(Debug, Args)]
pub(crate) struct VerifySignature {
    /// What: HOST:PORT/NAME:TAG@DIGEST; all but host and name may be left out
    pub(crate) reference: String,
    /// Public key (PEM)
    #[arg(long, value_name = "FILE")]
    pub(crate) key: PathBuf,
    /// Speak plain HTTP with the registry; this machine's own registries need no such word
    #[arg(long)]
    pub(crate) plain_http: bool,
    /// How to print the result
    #[arg(long, value_enum, default_value_t)]
    pub(crate) format: Format,
}

/// A form of a bill of materials.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SbomFormat {
    /// SPDX 2.3 in JSON
    Spdx,
    /// CycloneDX 1.6 in JSON
    Cyclonedx,
}

#[derive(Debug, Args)]
pub(crate) struct Sbom {
    /// Manifest of an image that has been built, or folder of its OCI layout
    pub(crate) image: PathBuf,
    /// Form of the document
    #[arg(long, value_enum)]
    pub(crate) format: SbomFormat,
}

#[derive(Debug, Args)]
pub(crate) struct Provenance {
    /// Manifest of an image that has been built, or folder of its OCI layout
    pub(crate) image: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct Gc {
    /// Keep what a build or launch of the last N days has needed
    #[arg(long, value_name = "N", default_value_t = 30)]
    pub(crate) keep_days: u32,
    /// Remove nothing, and tell what would be
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// How to print the result
    #[arg(long, value_enum, default_value_t)]
    pub(crate) format: Format,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Data {
    /// Turn text into token shards that the trainer reads
    Prepare(Prepare),
}

#[derive(Debug, Args)]
pub(crate) struct Prepare {
    /// UTF-8 text
    pub(crate) text: PathBuf,
    /// Folder for the shards
    #[arg(long, value_name = "DIR")]
    pub(crate) output: PathBuf,
    /// What turns text into tokens: "byte", a token for each byte
    #[arg(long, default_value = "byte")]
    pub(crate) tokenizer: String,
    /// Part of the text, at its end, held out for validation
    #[arg(long, value_name = "PART", default_value_t = 0.1)]
    pub(crate) validation_fraction: f64,
}

#[derive(Debug, Args)]
pub(crate) struct Completions {
    /// Shell
    pub(crate) shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
pub(crate) struct Man {
    /// Folder to write to
    pub(crate) folder: PathBuf,
}
