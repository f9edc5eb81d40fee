//! `trainyard lock`, `build`, `inspect` and `verify`.

use std::cell::RefCell;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::json;
use trainyard_builder::contract::{self, Verdict};
use trainyard_builder::image::{self, Image};
use trainyard_builder::inspect::Report;
use trainyard_builder::progress::{Event, Progress};
use trainyard_builder::settings::Settings as BuildSettings;
use trainyard_builder::{inspect, lock, oci, unpack, verify};
use trainyard_spec::{ByteSize, Exit};

use super::{print, print_json};
use crate::cli::{Build, Format, Inspect, Lock, Sources, Verify};
use crate::failure::Failure;
use crate::host;
use crate::interrupt::Interrupt;
use crate::settings::Settings;
use crate::view::screen::Screen;
use crate::view::visible;

pub(crate) fn lock(arguments: &Lock) -> Result<Exit, Failure> {
    let _interrupt = Interrupt::watch()?;
    let settings = settings(&Settings::from_environment()?, false)?;
    let mut screen = Screen::new();
    let lock = showing(&mut screen, |progress| lock::lock(&arguments.manifest, &settings, progress))?;
    let path = lock::path(&arguments.manifest);
    screen.say("Locked", &format!("{} inputs in {}", lock.input.len(), path.display()));
    Ok(Exit::Done)
}

pub(crate) fn build(arguments: &Build) -> Result<Exit, Failure> {
    let _interrupt = Interrupt::watch()?;
    let settings = settings_from(&Settings::from_environment()?, &arguments.sources)?;
    let mut screen = Screen::new();
    let image = showing(&mut screen, |progress| image::build(&arguments.manifest, &settings, progress))?;
    say(&mut screen, &image);
    if let Some(folder) = &arguments.output {
        new_folder(folder, |target| copy(&image.layout, target))?;
    }
    if let Some(folder) = &arguments.rootfs {
        let layout = oci::Layout::open(&image.layout)?;
        new_folder(folder, |target| Ok(unpack::unpack_into(&layout, target)?))?;
    }
    match arguments.format {
        Format::Text => print(&format!("{}\n", image.digest)),
        Format::Json => print_json(&image),
    }
}

pub(crate) fn inspect(arguments: &Inspect) -> Result<Exit, Failure> {
    let report = inspect::inspect(&oci::Layout::open(&layout(&arguments.image)?)?)?;
    let verdict = if arguments.host { Some(report.contract.terms.check(&host::read()?)) } else { None };
    match arguments.format {
        Format::Text => print(&describe(&report, verdict.as_ref()))?,
        Format::Json => {
            let runs = match &verdict {
                None => json!({}),
                Some(verdict) => json!({ "host": on_host(verdict) }),
            };
            print_json(&Both { report: &report, runs })?
        }
    };
    let Some(Verdict::Refused(refusals)) = verdict else { return Ok(Exit::Done) };
    let said: Vec<_> = refusals.iter().map(ToString::to_string).collect();
    let error = anyhow::anyhow!("this machine cannot run the image: {}", said.join("; "));
    Err(Failure::new(Exit::Preflight, error).with_hint(refusals.first().map(contract::Refusal::hint)))
}

/// A report, with more beside it.
#[derive(Serialize)]
struct Both<'a> {
    #[serde(flatten)]
    report: &'a Report,
    #[serde(flatten)]
    runs: serde_json::Value,
}

/// A verdict for programs.
fn on_host(verdict: &Verdict) -> serde_json::Value {
    match verdict {
        Verdict::NeedsNoGpu => json!({"runs": true, "rule": "needs no GPU"}),
        Verdict::Runs(rule) => json!({"runs": true, "rule": rule.to_string()}),
        Verdict::Refused(refusals) => {
            let of = |refusal: &contract::Refusal| json!({"why": refusal.to_string(), "fix": refusal.hint()});
            json!({"runs": false, "refusals": refusals.iter().map(of).collect::<Vec<_>>()})
        }
    }
}

pub(crate) fn verify(arguments: &Verify) -> Result<Exit, Failure> {
    let _interrupt = Interrupt::watch()?;
    let settings = settings_from(&Settings::from_environment()?, &arguments.sources)?;
    let image = match &arguments.image {
        Some(folder) => folder.clone(),
        None => layout(&arguments.manifest)?,
    };
    let mut screen = Screen::new();
    let verdict =
        showing(&mut screen, |progress| verify::verify(&arguments.manifest, &image, &settings, progress))?;
    if verdict.differences.is_empty() {
        screen.say("Verified", "built again from the lock, with the same digest");
        return print(&format!("{}\n", verdict.rebuilt));
    }
    let message = anyhow::anyhow!(
        "the image is {}; built again from the lock it is {}\n  {}",
        verdict.image,
        verdict.rebuilt,
        verdict.differences.join("\n  ")
    );
    Err(Failure::new(Exit::Input, message))
}

/// The builder's settings: the environment's, with this machine's cache.
pub(super) fn settings(settings: &Settings, offline: bool) -> Result<BuildSettings, Failure> {
    let building = BuildSettings::from_environment(settings.cache.clone());
    let building = building.map_err(|error| Failure::new(Exit::Invalid, error))?;
    Ok(BuildSettings { offline, ..building })
}

/// The builder's settings, with inputs from where the command line says.
pub(super) fn settings_from(own: &Settings, sources: &Sources) -> Result<BuildSettings, Failure> {
    let mut building = settings(own, sources.offline)?;
    if let Some(folder) = &sources.vendored {
        building.index.vendored = vec![folder.clone()];
    }
    match building.index.vendored.iter().find(|folder| !folder.is_dir()) {
        Some(missing) => {
            Err(Failure::usage(format!("{}, with vendored inputs, is no folder", missing.display()))
                .with_hint(Some("trainyard vendor MANIFEST --output DIR writes one")))
        }
        None => Ok(building),
    }
}

/// Does builder's work while its progress is shown.
pub(super) fn showing<T, E>(
    screen: &mut Screen,
    work: impl FnOnce(Progress<'_>) -> Result<T, E>,
) -> Result<T, Failure>
where
    Failure: From<E>,
{
    let screen = RefCell::new(screen);
    let result = work(&|event| show(&mut screen.borrow_mut(), &event));
    screen.into_inner().clear();
    Ok(result?)
}

fn show(screen: &mut Screen, event: &Event) {
    match event {
        Event::Resolving { input } => screen.show("Resolving", input.as_str(), 0, 0),
        Event::Downloading { file, received, size } => {
            let (done, all) = (ByteSize(*received), size.map(|size| format!(" of {}", ByteSize(size))));
            let text = format!("{file} ({done}{})", all.unwrap_or_default());
            screen.show("Fetching", &text, *received, size.unwrap_or(0));
        }
        Event::Uploading { to, sent, size } => {
            let text = format!("{to} ({} of {})", ByteSize(*sent), ByteSize(*size));
            screen.show("Pushing", &text, *sent, *size);
        }
        Event::Archiving { file, written } => {
            screen.show("Writing", &format!("{file} ({})", ByteSize(*written)), 0, 0);
        }
        Event::Retrying { file, reason } => screen.warn(&format!("{file}: trying again: {reason}")),
        Event::Waiting { what } => screen.show("Waiting", &format!("until {what}"), 0, 0),
        Event::Unpacking { file } => screen.show("Unpacking", file, 0, 0),
        Event::Pruning { file } => screen.show("Pruning", file, 0, 0),
        Event::Compiling { packages } => screen.show("Compiling", &packages.join(", "), 0, 0),
        Event::Compiled { name, done } => {
            screen.show("Compiling", &format!("the image's programs: {done} crates done, now {name}"), 0, 0)
        }
        Event::NotReproducible { reason } => {
            screen.warn(&format!(
                "linked with this host's C library, so another host builds another digest: {reason}"
            ));
        }
        Event::Layer { .. } | Event::Image { .. } => {}
    }
}

/// One line about a built image.
pub(super) fn say(screen: &mut Screen, image: &Image) {
    let state = if image.reused { "unchanged" } else { "built" };
    let size = ByteSize(image.size());
    let digest = image.digest.short();
    screen.say("Image", &format!("{} {digest} ({size} compressed, {state})", image.name));
    if !image.left_out.is_empty() {
        let size = ByteSize(image.left_out.iter().map(|file| file.size).sum());
        let largest: Vec<_> = image.left_out.iter().take(3).map(|file| visible(&file.path)).collect();
        let text = format!("{} files, {size}: {}, ...", image.left_out.len(), largest.join(", "));
        screen.say("Left out", &text);
    }
}

/// The layout that a path names: itself, or the one last built from a manifest.
pub(super) fn layout(path: &Path) -> Result<PathBuf, Failure> {
    if path.is_dir() {
        return Ok(path.to_owned());
    }
    if !path.is_file() {
        return Err(Failure::usage(format!("{} is neither a folder nor a manifest", path.display())));
    }
    image::last_built(path, &Settings::from_environment()?.cache).ok_or_else(|| {
        Failure::usage(format!("no image has been built from {}", path.display()))
            .with_hint(Some(format!("trainyard build {}", path.display())))
    })
}

/// Fills a folder that must not exist, so that it is there whole or not at all.
pub(super) fn new_folder(
    folder: &Path,
    fill: impl FnOnce(&Path) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let failed =
        |error: std::io::Error| Failure::usage(format!("cannot write {}: {error}", folder.display()));
    if folder.exists() {
        return Err(Failure::usage(format!("{} exists; name a folder that does not", folder.display())));
    }
    let parent = match folder.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let staging = tempfile::Builder::new().prefix(".trainyard-").tempdir_in(parent).map_err(failed)?;
    let inside = staging.path().join("new");
    std::fs::create_dir(&inside).map_err(failed)?;
    fill(&inside)?;
    std::fs::rename(&inside, folder).map_err(failed)
}

pub(super) fn copy(from: &Path, to: &Path) -> Result<(), Failure> {
    for entry in walkdir::WalkDir::new(from) {
        let failed =
            |error: std::io::Error| Failure::usage(format!("cannot copy {}: {error}", from.display()));
        let entry = entry.map_err(|error| failed(error.into()))?;
        let target = to.join(entry.path().strip_prefix(from).unwrap_or(entry.path()));
        if entry.file_type().is_dir() {
            std::fs::create_dir_all(target).map_err(failed)?;
        } else {
            std::fs::copy(entry.path(), target).map_err(failed)?;
        }
    }
    Ok(())
}

fn describe(report: &Report, verdict: Option<&Verdict>) -> String {
    let mut text = String::new();
    let mut row = |name: &str, value: &str| {
        let _ = writeln!(text, "{name:<12} {}", visible(value));
    };
    row("digest", &report.digest.to_string());
    row("platform", &report.platform);
    row("size", &format!("{} compressed", ByteSize(report.size)));
    row("user", &report.user);
    row("entrypoint", &report.entrypoint.join(" "));
    row("working dir", &report.working_dir);
    for variable in &report.env {
        row("env", variable);
    }
    for (key, value) in &report.labels {
        row("label", &format!("{key}={value}"));
    }
    let contract = report.contract.summary();
    for (path, component) in &contract.components {
        row("library", &format!("{component}  {path}"));
    }
    for (label, value) in &contract.labels {
        row("asks", &format!("{}={value}", label.trim_start_matches("trainyard.")));
    }
    if !contract.floors.is_empty() {
        row("needs", &contract.floors.join(", "));
    }
    let from_driver: Vec<_> = contract.from_driver.iter().map(String::as_str).collect();
    if !from_driver.is_empty() {
        row("from driver", &from_driver.join(", "));
    }
    for (path, why) in &report.privileged {
        row("privileged", &format!("{path} ({why})"));
    }
    for remark in report.remarks.iter().chain(&contract.missing) {
        row("remark", remark);
    }
    match verdict {
        Some(Verdict::NeedsNoGpu) => row("this machine", "runs it: it needs no GPU"),
        Some(Verdict::Runs(rule)) => row("this machine", &format!("runs it: {rule}")),
        Some(Verdict::Refused(_)) => row("this machine", "cannot run it"),
        None => {}
    }
    for layer in &report.layers {
        let made = visible(layer.made_by.as_deref().unwrap_or("made by an unnamed tool"));
        let sizes =
            format!("{} compressed, {} unpacked", ByteSize(layer.size), ByteSize(layer.unpacked_size));
        let _ = writeln!(text, "\nlayer {}\n  {made}\n  {sizes}", layer.digest);
        for (path, file) in &layer.files {
            let size = ByteSize(file.size).to_string();
            let _ = writeln!(text, "  {:04o} {size:>9}  {}", file.mode, visible(path));
        }
        for remark in &layer.remarks {
            let _ = writeln!(text, "  not unpacked: {}", visible(remark));
        }
    }
    text
}
