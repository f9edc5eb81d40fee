//! What a launch needs before it can be planned: text, tokens, image.

use std::io;
use std::path::{Path, PathBuf};

use trainyard_builder::corpus::{self, Source};
use trainyard_builder::settings::{LinkFrom, Settings as BuildSettings};
use trainyard_builder::store::{digest_of, used};
use trainyard_builder::{image, oci, unpack};
use trainyard_launcher::plan::Image;
use trainyard_spec::job::JobManifest;
use trainyard_spec::{ByteSize, Digest, Exit};
use trainyard_trainer::data::Dataset;
use trainyard_trainer::data::prepare::{self, PrepareError};
use trainyard_trainer::tokenizer::Tokenizer;

use crate::cli::Launch;
use crate::commands::build;
use crate::failure::Failure;
use crate::settings::Settings;
use crate::view::screen::Screen;
use crate::view::training::grouped;

/// Image and data, both in the cache.
pub(super) struct Inputs {
    pub(super) image: Image,
    pub(super) data: PathBuf,
}

pub(super) fn prepare(
    arguments: &Launch,
    job_path: &Path,
    job: &JobManifest,
    settings: &Settings,
    screen: &mut Screen,
) -> Result<Inputs, Failure> {
    let folder = job_path.parent().unwrap_or(Path::new("."));
    let mut building = build::settings_from(settings, &arguments.sources)?;
    // A job has to run everywhere; an image that others rebuild is `trainyard build`'s.
    building.link = LinkFrom::HostAllowed;
    let text = match &arguments.data {
        Some(file) => own_text(file)?,
        None => corpus(&folder.join(&job.data.corpus), &building, screen)?,
    };
    let data = tokens(&text, job, settings, screen)?;
    let image = image(&folder.join(&job.image), &building, screen)?;
    Ok(Inputs { image, data })
}

/// A text and the digest of its bytes.
struct Text {
    path: PathBuf,
    digest: Digest,
}

fn own_text(path: &Path) -> Result<Text, Failure> {
    let (text, _) = prepare::open_text(path)?;
    let failed = |error: io::Error| Failure::usage(format!("cannot read --data {}: {error}", path.display()));
    let (digest, _) = digest_of(text).map_err(failed)?;
    Ok(Text { path: path.to_owned(), digest })
}

fn corpus(manifest: &Path, settings: &BuildSettings, screen: &mut Screen) -> Result<Text, Failure> {
    let made = build::showing(screen, |progress| corpus::corpus(manifest, settings, progress))?;
    match &made.source {
        Source::Locked => {
            screen
                .say("Text", &format!("{}, {}, verified against its lock", made.name, ByteSize(made.bytes)));
        }
        Source::Fallback { reason } => {
            screen.warn(&format!("the corpus {} is out of reach: {reason}", made.name));
            screen.say(
                "Text",
                &format!("training on the project's own text instead, {}", ByteSize(made.bytes)),
            );
        }
    }
    Ok(Text { path: made.text, digest: made.digest })
}

/// Token shards of the text, made once for each text and way to cut it.
fn tokens(
    text: &Text,
    job: &JobManifest,
    settings: &Settings,
    screen: &mut Screen,
) -> Result<PathBuf, Failure> {
    let tokenizer: Tokenizer =
        job.data.tokenizer.parse().map_err(|error| Failure::new(Exit::Invalid, error))?;
    let fraction = job.data.validation_fraction;
    let key = Digest::of(format!("{} {} {fraction}", text.digest, job.data.tokenizer).as_bytes());
    let out = settings.cache.join("data").join(key.hex());
    if Dataset::open(&out).is_err() {
        remove_damaged(&out)?;
        let request = prepare::Request {
            texts: std::slice::from_ref(&text.path),
            tokenizer,
            validation_fraction: fraction,
            out: &out,
        };
        match prepare::prepare(&request, |done, total| screen.show("Tokens", "writing shards", done, total)) {
            // Another launch was faster; equal texts make equal shards.
            Ok(_) | Err(PrepareError::Exists { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    used(&out);
    let data = Dataset::open(&out)?;
    // Found here and not by every rank of a job that has been made.
    data.require_context(&out, job.model.context)?;
    let (train, validation) = (grouped(data.train.len()), grouped(data.validation.len()));
    screen.say("Tokens", &format!("{train} to train on, {validation} held out for validation"));
    Ok(out)
}

/// Shards in the cache that cannot be opened can be made again.
fn remove_damaged(out: &Path) -> Result<(), Failure> {
    match std::fs::remove_dir_all(out) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Failure::new(
            Exit::Input,
            anyhow::anyhow!("cannot remove damaged shards {}: {error}", out.display()),
        )),
        _ => Ok(()),
    }
}

fn image(manifest: &Path, settings: &BuildSettings, screen: &mut Screen) -> Result<Image, Failure> {
    let built = build::showing(screen, |progress| image::build(manifest, settings, progress))?;
    build::say(screen, &built);
    let layout = oci::Layout::open(&built.layout)?;
    let rootfs = unpack::unpack(&layout, &settings.cache)?;
    Ok(Image { digest: built.digest, layout: built.layout, rootfs })
}
