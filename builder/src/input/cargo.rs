//! Statically linked binaries of a cargo workspace, the same bytes wherever they are compiled.
//!
//! What would make them differ is fixed here: the compiler (the lock names its commit), the linker (the one that comes
//! with the compiler), everything linked in ([`super::link`]), the flags (ours alone), the environment (an allow-list),
//! and paths (rewritten to the same ones everywhere). Which crates are compiled is left to the workspace's `Cargo.lock`.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;
use trainyard_spec::Digest;
use trainyard_spec::lock::LockedInput;

use super::crates::{self, CrateFolder};
use super::link::Linked;
use crate::progress::{Event, Progress};
use crate::settings::Settings;
use crate::store::{self, Store};

/// The one target there is: the standard library for others would have to be installed by hand.
const TARGET: &str = "x86_64-unknown-linux-gnu";
/// The profile of the workspace that binaries of images are compiled with.
const PROFILE: &str = "image";
/// The linker that binaries of images are linked with.
const LINKER: &str = "trainyard-ld";
/// What build scripts find in the place of a C compiler.
const C_COMPILER: &str = "trainyard-cc";
const NO_C: &str = r#"#!/bin/sh
echo "programs of an image must not hold C code: every host's C compiler makes other bytes of it" >&2
exit 1
"#;
/// Option by which cargo asks no server.
const OFFLINE: &str = "--offline";
/// Lines of cargo's own output kept for an error.
const LINES_KEPT: usize = 40;

/// Why binaries could not be compiled.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A tool could not be started.
    #[error("cannot run {program} in {folder}: {source}", folder = .folder.display())]
    Start {
        /// The tool.
        program: &'static str,
        /// Where.
        folder: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A tool failed.
    #[error("{program} in {folder} failed:\n{output}", folder = .folder.display())]
    Failed {
        /// The tool, with what it was asked.
        program: &'static str,
        /// Where.
        folder: PathBuf,
        /// The end of what it said.
        output: String,
    },
    /// A tool's answer makes no sense.
    #[error("{program} does not name its {missing}")]
    Answer {
        /// The tool.
        program: &'static str,
        /// What was looked for.
        missing: &'static str,
    },
    /// Another compiler than the locked one.
    #[error("rustc is {found_release} ({found_commit}); locked is {release} ({commit})")]
    Toolchain {
        /// Release found.
        found_release: String,
        /// Commit found.
        found_commit: String,
        /// Release locked.
        release: String,
        /// Commit locked.
        commit: String,
    },
    /// Another kind of machine.
    #[error("rustc is for {found}; images are compiled for and on {TARGET}")]
    Host {
        /// Kind of machine found.
        found: String,
    },
    /// The compiler's own linker is not where it should be.
    #[error("the toolchain has no linker at {path}", path = .path.display())]
    Linker {
        /// Where it should be.
        path: PathBuf,
    },
    /// Vendored crates cannot be used.
    #[error(transparent)]
    Crates(#[from] Box<crates::Error>),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] store::Error),
}

impl Error {
    /// The way out.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Start { .. } => {
                Some("install Rust with rustup; rust-toolchain.toml names the toolchain".to_owned())
            }
            Self::Toolchain { release, .. } => Some(format!("rustup toolchain install {release}")),
            Self::Linker { .. } => {
                Some("install the toolchain with rustup, whose toolchains have it".to_owned())
            }
            Self::Crates(error) => error.hint(),
            Self::Store(error) => error.hint().map(str::to_owned),
            Self::Failed { .. } | Self::Answer { .. } | Self::Host { .. } => None,
        }
    }
}

/// What a cargo input is compiled with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Toolchain {
    release: String,
    commit: String,
    sysroot: PathBuf,
}

/// A compiled binary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Binary {
    /// Its name.
    pub(crate) name: String,
    /// Where it is.
    pub(crate) path: PathBuf,
}

/// What to compile, and with what.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Compilation<'a> {
    /// The workspace's folder.
    pub(crate) workspace: &'a Path,
    /// Packages whose binaries are wanted.
    pub(crate) packages: &'a [String],
    /// The toolchain, which has been checked.
    pub(crate) toolchain: &'a Toolchain,
    /// What is linked in.
    pub(crate) linked: &'a Linked,
    /// cargo's target folder: a new one compiles everything, a used one what has changed.
    pub(crate) target: &'a Path,
    /// What crates are read from in the place of its registry; none: cargo fetches them.
    pub(crate) crates: Option<&'a CrateFolder>,
}

type Tools = BTreeMap<OsString, OsString>;

/// Pins the toolchain that compiles the workspace.
///
/// # Errors
/// When there is none, or it is for another kind of machine.
pub(crate) fn resolve(workspace: &Path, tools: &Tools) -> Result<LockedInput, Error> {
    let Toolchain { release, commit, .. } = Toolchain::of(workspace, tools)?;
    Ok(LockedInput::Cargo { rustc: release, commit })
}

impl Toolchain {
    /// The toolchain that compiles the workspace on this machine.
    pub(crate) fn of(workspace: &Path, tools: &Tools) -> Result<Self, Error> {
        let version = ask("rustc", &["-vV"], workspace, tools)?;
        let field = |key: &str, missing| {
            let line = version.lines().find_map(|line| line.strip_prefix(key));
            line.map(|value| value.trim().to_owned()).ok_or(Error::Answer { program: "rustc -vV", missing })
        };
        let host = field("host:", "host")?;
        if host != TARGET {
            return Err(Error::Host { found: host });
        }
        let sysroot = ask("rustc", &["--print", "sysroot"], workspace, tools)?;
        Ok(Self {
            release: field("release:", "release")?,
            commit: field("commit-hash:", "commit-hash")?,
            sysroot: PathBuf::from(sysroot.trim()),
        })
    }

    /// Refuses any other toolchain than the locked one.
    pub(crate) fn check(&self, release: &str, commit: &str) -> Result<(), Error> {
        if self.release == release && self.commit == commit {
            return Ok(());
        }
        Err(Error::Toolchain {
            found_release: self.release.clone(),
            found_commit: self.commit.clone(),
            release: release.to_owned(),
            commit: commit.to_owned(),
        })
    }

    fn linker(&self) -> Result<PathBuf, Error> {
        let path = self.sysroot.join("lib/rustlib").join(TARGET).join("bin/rust-lld");
        if path.is_file() { Ok(path) } else { Err(Error::Linker { path }) }
    }
}

/// The compiler itself, over what a configuration file of cargo's says.
const OVER_CONFIGURATION: [(&str, &str); 3] =
    [("RUSTC", "rustc"), ("RUSTC_WRAPPER", ""), ("RUSTC_WORKSPACE_WRAPPER", "")];

fn ask(program: &'static str, arguments: &[&str], folder: &Path, tools: &Tools) -> Result<String, Error> {
    let output = Command::new(program)
        .args(arguments)
        .current_dir(folder)
        .env_clear()
        .envs(tools)
        .envs(OVER_CONFIGURATION)
        .output()
        .map_err(|source| Error::Start { program, folder: folder.to_owned(), source })?;
    if !output.status.success() {
        let output = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(Error::Failed { program, folder: folder.to_owned(), output });
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Compiles the binaries of `packages`, in order of name.
///
/// # Errors
/// When cargo cannot be run or fails.
pub(crate) fn compile(
    job: &Compilation<'_>,
    store: &Store,
    settings: &Settings,
    progress: Progress<'_>,
) -> Result<Vec<Binary>, Error> {
    let Compilation { workspace, packages, toolchain, linked, target, crates } = *job;
    let tools = &settings.tools;
    let _only_one = store.lock(&format!("cargo-{}", name_of(target)))?;
    fs_err::create_dir_all(target).map_err(store::io_error("create", target))?;
    store::used(target);
    let path = path_with(&write_linker(target, toolchain, linked)?, tools);
    let sources = match crates {
        Some(crates) => vec![crates.folder.clone()],
        None => registry_sources(workspace, settings)?,
    };
    progress(Event::Compiling { packages: packages.to_vec() });
    let mut command = Command::new("cargo");
    command
        .args(["build", "--locked", "--profile", PROFILE, "--target", TARGET])
        .args(["--message-format", "json-render-diagnostics"])
        .arg("--target-dir")
        .arg(target);
    for package in packages {
        command.args(["--package", package]);
    }
    if settings.offline {
        command.arg(OFFLINE);
    }
    command.args(crates.map(CrateFolder::options).unwrap_or_default());
    command
        .current_dir(workspace)
        .env_clear()
        .envs(tools)
        .env("CARGO_TERM_COLOR", "never")
        .env("CARGO_TERM_PROGRESS_WHEN", "never")
        // Set whole, so that neither RUSTFLAGS nor a configuration file adds any.
        .env("CARGO_ENCODED_RUSTFLAGS", flags(workspace, toolchain, &sources))
        .env("PATH", path)
        .envs(OVER_CONFIGURATION)
        .env("CC", C_COMPILER)
        .env("CXX", C_COMPILER)
        .env("LC_ALL", "C")
        .env("TZ", "UTC")
        .env("SOURCE_DATE_EPOCH", "0");
    run(command, workspace, packages, progress)
}

/// The crates that are linked into the binaries of `packages`, one a line after its depth: `2name v1.0.0 (SOURCE)`, a tab,
/// and the licence that it declares. Features are those of the compilation, and everything has been fetched for it.
///
/// # Errors
/// When cargo cannot be run or fails.
pub(crate) fn tree(
    workspace: &Path,
    packages: &[String],
    crates: Option<&CrateFolder>,
    tools: &Tools,
) -> Result<String, Error> {
    let fixed = "tree --locked --offline --edges normal,no-proc-macro --prefix depth --color never --target";
    let mut arguments: Vec<&str> = fixed.split(' ').collect();
    arguments.extend([TARGET, "--format", "{p}\t{l}"]);
    for package in packages {
        arguments.extend(["--package", package]);
    }
    let options = crates.map(CrateFolder::options).unwrap_or_default();
    arguments.extend(options.iter().map(String::as_str));
    ask("cargo", &arguments, workspace, tools)
}

/// The tools' PATH with the folder of the linker before it.
fn path_with(folder: &Path, tools: &Tools) -> OsString {
    let mut path = OsString::from(folder);
    if let Some(rest) = tools.get(&OsString::from("PATH")) {
        path.push(":");
        path.push(rest);
    }
    path
}

/// A name for a lock that is the same for the same folder.
fn name_of(folder: &Path) -> String {
    Digest::of(folder.as_os_str().as_encoded_bytes()).short()
}

fn flags(workspace: &Path, toolchain: &Toolchain, sources: &[PathBuf]) -> OsString {
    let mut flags: Vec<OsString> = vec![
        "-Ctarget-feature=+crt-static".into(),
        "-Clinker-flavor=ld.lld".into(),
        // By name alone, found through PATH: build scripts are linked by the host's own linker, and paths do not get
        // into what decides symbol names.
        format!("-Clinker={LINKER}").into(),
    ];
    let mut rewrite = |from: &Path, to: &str| {
        let mut flag = OsString::from("--remap-path-prefix=");
        flag.push(from);
        flag.push("=");
        flag.push(to);
        flags.push(flag);
    };
    rewrite(workspace, "/trainyard");
    for source in sources {
        rewrite(source, "/crates");
    }
    let library = toolchain.sysroot.join("lib/rustlib/src/rust");
    rewrite(&library, &format!("/rustc/{}", toolchain.commit));
    flags.join("\u{1f}".as_ref())
}

/// cargo's own folder.
pub(super) fn home(tools: &Tools) -> PathBuf {
    let folder = |name: &str| tools.get(&OsString::from(name)).map(PathBuf::from);
    let home = folder("CARGO_HOME").or_else(|| folder("HOME").map(|home| home.join(".cargo")));
    home.unwrap_or_default()
}

/// Has cargo fetch every crate of a workspace.
pub(super) fn fetch(workspace: &Path, settings: &Settings) -> Result<(), Error> {
    let arguments: Vec<_> =
        ["fetch", "--locked"].into_iter().chain(settings.offline.then_some(OFFLINE)).collect();
    ask("cargo", &arguments, workspace, &settings.tools).map(drop)
}

/// Folders in which cargo keeps the crates' sources, one for each registry that it knows.
fn registry_sources(workspace: &Path, settings: &Settings) -> Result<Vec<PathBuf>, Error> {
    let root = home(&settings.tools).join("registry/src");
    let list = || -> io::Result<Vec<PathBuf>> {
        let mut folders = Vec::new();
        for entry in std::fs::read_dir(&root)? {
            folders.push(entry?.path());
        }
        folders.sort();
        Ok(folders)
    };
    match list() {
        Ok(folders) if !folders.is_empty() => Ok(folders),
        // Nothing was ever compiled here: the folders have to be there before the flags can name them.
        _ => {
            let offline = settings.offline.then_some(OFFLINE);
            let arguments: Vec<_> =
                ["fetch", "--locked", "--target", TARGET].into_iter().chain(offline).collect();
            ask("cargo", &arguments, workspace, &settings.tools)?;
            // A vendored workspace has no such folder and needs none.
            Ok(list().unwrap_or_default())
        }
    }
}

/// Writes the linker that rustc calls, and gives its folder: the toolchain's own linker, with the start files and the
/// C library that were chosen for it. They lie in one folder, so that the linker finds these and nothing else.
fn write_linker(target: &Path, toolchain: &Toolchain, linked: &Linked) -> Result<PathBuf, Error> {
    let folder = target.join("link");
    fs_err::create_dir_all(&folder).map_err(store::io_error("create", &folder))?;
    for (name, path) in linked.files() {
        let link = folder.join(name);
        if std::fs::read_link(&link).is_ok_and(|found| found == path) {
            continue;
        }
        match fs_err::remove_file(&link) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(store::io_error("replace", &link)(error).into());
            }
            _ => {}
        }
        std::os::unix::fs::symlink(path, &link).map_err(store::io_error("create", &link))?;
    }
    let quoted = |path: &Path| format!("'{}'", path.display().to_string().replace('\'', r"'\''"));
    let script = format!(
        r#"#!/bin/sh
# rustc gives "-flavor gnu" first.
shift 2
link={folder}
exec {linker} -flavor gnu "-L$link" "$link/rcrt1.o" "$link/crti.o" "$link/crtbeginS.o" "$@" \
  --start-group "$link/libgcc.a" "$link/libgcc_eh.a" "$link/libc.a" --end-group "$link/crtendS.o" "$link/crtn.o"
"#,
        folder = quoted(&folder),
        linker = quoted(&toolchain.linker()?),
    );
    let tools = target.join("tools");
    write_script(&tools.join(LINKER), &script)?;
    write_script(&tools.join(C_COMPILER), NO_C)?;
    Ok(tools)
}

fn write_script(path: &Path, script: &str) -> Result<(), Error> {
    if !std::fs::read_to_string(path).is_ok_and(|found| found == script) {
        store::write_whole(path, script.as_bytes())?;
    }
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    Ok(fs_err::set_permissions(path, executable).map_err(store::io_error("make executable", path))?)
}

/// One line of cargo's messages, as far as it matters here.
#[derive(Deserialize)]
#[serde(tag = "reason", rename_all = "kebab-case")]
enum Message {
    CompilerArtifact {
        package_id: String,
        target: Target,
        fresh: bool,
        executable: Option<PathBuf>,
    },
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

fn run(
    mut command: Command,
    workspace: &Path,
    packages: &[String],
    progress: Progress<'_>,
) -> Result<Vec<Binary>, Error> {
    let program = "cargo build";
    let folder = || workspace.to_owned();
    let start = |source| Error::Start { program, folder: folder(), source };
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(start)?;
    // Both pipes are read at once, for cargo waits when either is full.
    let errors = child.stderr.take().map(|pipe| std::thread::spawn(move || last_lines(pipe)));
    let mut binaries = BTreeMap::new();
    let mut done = 0;
    if let Some(pipe) = child.stdout.take() {
        for line in BufReader::new(pipe).lines() {
            let line = line.map_err(start)?;
            let Ok(Message::CompilerArtifact { package_id, target, fresh, executable }) =
                serde_json::from_str(&line)
            else {
                continue;
            };
            // A crate's build script is a program on the way to it.
            if !fresh && !target.kind.iter().any(|kind| kind == "custom-build") {
                done += 1;
                progress(Event::Compiled { name: target.name.clone(), done });
            }
            // Build scripts are executables too, of other packages.
            if let Some(path) = executable
                && packages.iter().any(|package| is_of(&package_id, package))
            {
                binaries.insert(target.name.clone(), Binary { name: target.name, path });
            }
        }
    }
    let status = child.wait().map_err(start)?;
    let errors = errors.and_then(|thread| thread.join().ok()).unwrap_or_default();
    if !status.success() {
        return Err(Error::Failed { program, folder: folder(), output: errors });
    }
    Ok(binaries.into_values().collect())
}

/// Whether a package id (`path+file:///folder#name@1.0.0`, or `...folder/name#1.0.0`) is of the package.
fn is_of(package_id: &str, package: &str) -> bool {
    let (source, version) = package_id.rsplit_once('#').unwrap_or((package_id, ""));
    match version.split_once('@') {
        Some((name, _)) => name == package,
        None => source.rsplit('/').next() == Some(package),
    }
}

fn last_lines(pipe: impl Read) -> String {
    let mut lines = VecDeque::with_capacity(LINES_KEPT + 1);
    for line in BufReader::new(pipe).split(b'\n').map_while(Result::ok) {
        lines.push_back(String::from_utf8_lossy(&line).into_owned());
        if lines.len() > LINES_KEPT {
            lines.pop_front();
        }
    }
    lines.make_contiguous().join("\n")
}

#[cfg(test)]
mod tests {
    use super::is_of;

    #[test]
    fn package_ids_of_both_forms() {
        assert!(is_of("path+file:///x/node#trainyard-node@0.1.0", "trainyard-node"));
        assert!(is_of("path+file:///x/trainyard-node#0.1.0", "trainyard-node"));
        assert!(!is_of("registry+https://index.test/#serde@1.0.0", "trainyard-node"));
        assert!(!is_of("path+file:///x/spec#trainyard-spec@0.1.0", "trainyard-node"));
    }
}
