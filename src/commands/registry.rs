//! `trainyard push`, `pull`, `export` and `index`.

use trainyard_builder::export::{self, Format as FileFormat};
use trainyard_builder::platforms;
use trainyard_builder::progress::Progress;
use trainyard_builder::registry::{Options, Reference, Repository, Signed};
use trainyard_builder::store::Store;
use trainyard_builder::supply::{self, Facts, provenance, redistribution};
use trainyard_spec::image::Platform;
use trainyard_spec::{ByteSize, Digest, Exit};

use super::build::{copy, layout, new_folder, settings, showing};
use super::supply::{private_key, say_signed};
use super::{print, print_json};
use crate::cli::{ArchiveFormat, Export, Format, Index, Pull, Push};
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::settings::Settings;
use crate::view::screen::Screen;

pub(crate) fn push(arguments: &Push) -> Result<Exit, Failure> {
    let reference: Reference = arguments.reference.parse()?;
    let _interrupt = Interrupt::watch()?;
    let settings = settings(&Settings::from_environment()?, false)?;
    let _in_use = Store::new(&settings.cache).in_use()?;
    let image = layout(&arguments.image)?;
    let key = arguments.sign.as_ref().map(|path| private_key(path, &arguments.password)).transpose()?;
    let options = Options { plain_http: arguments.plain_http, ..Options::default() };
    let mut screen = Screen::new();
    // Before anything is sent.
    let facts = |digest: &Digest| Facts::read(digest, &settings.cache).ok();
    redistribution::check(&image, &Store::new(&settings.cache), facts)?;
    let repository =
        showing(&mut screen, |progress| Repository::connect(&reference, &settings, options, progress))?;
    let pushed = showing(&mut screen, |progress| repository.push(&image, progress))?;
    let had = pushed.present + pushed.mounted;
    let sent = ByteSize(pushed.sent);
    screen
        .say("Pushed", &format!("{reference} ({sent} in {} blobs sent, {had} were there)", pushed.uploaded));
    let images = platforms::images(&image)?;
    let known: Vec<_> = images.iter().filter_map(|image| Some((image, facts(image)?))).collect();
    if known.len() < images.len() {
        screen.warn("what an image is made of is known only where it was built: nothing is attached to those of elsewhere");
    }
    let attach = |progress: Progress<'_>| -> Result<(), Failure> {
        for (image, facts) in &known {
            for document in supply::documents(facts)? {
                repository.attach(image, &document, progress)?;
            }
        }
        Ok(())
    };
    showing(&mut screen, attach)?;
    if !known.is_empty() {
        screen.say("Attached", "bills of materials (SPDX, CycloneDX) and provenance");
    }
    if let Some(key) = &key {
        // Whoever asks for the whole, and whoever asks for one of its images, finds a signature.
        let whole = (!images.contains(&pushed.digest)).then_some(&pushed.digest);
        let mut total = Signed { digest: pushed.digest, added: 0, present: 0 };
        let sign = |progress: Progress<'_>| -> Result<(), Failure> {
            for image in images.iter().chain(whole) {
                let facts = known.iter().find(|(known, _)| *known == image).map(|(_, facts)| facts);
                let statements = facts.map(provenance::statements).transpose()?.unwrap_or_default();
                let Signed { added, present, .. } = repository.sign(image, key, &statements, progress)?;
                total.added += added;
                total.present += present;
            }
            Ok(())
        };
        showing(&mut screen, sign)?;
        say_signed(&mut screen, &total);
    }
    match arguments.format {
        Format::Text => print(&format!("{}\n", pushed.named(&reference))),
        Format::Json => print_json(&pushed),
    }
}

pub(crate) fn pull(arguments: &Pull) -> Result<Exit, Failure> {
    let reference: Reference = arguments.reference.parse()?;
    let _interrupt = Interrupt::watch()?;
    let settings = settings(&Settings::from_environment()?, false)?;
    let _in_use = Store::new(&settings.cache).in_use()?;
    let options = Options { plain_http: arguments.plain_http, ..Options::default() };
    let mut screen = Screen::new();
    let mut pulled = None;
    // The folder is looked at first: nothing is fetched in vain.
    new_folder(&arguments.output, |target| {
        let image = showing(&mut screen, |progress| {
            Repository::connect(&reference, &settings, options, progress)?.pull(platform(), progress)
        })?;
        copy(&image.layout, target)?;
        pulled = Some(image);
        Ok(())
    })?;
    let Some(pulled) = pulled else { return Ok(Exit::Done) };
    let (size, fetched) = (ByteSize(pulled.size), ByteSize(pulled.fetched));
    screen.say("Pulled", &format!("{reference} ({size}, {fetched} of it fetched)"));
    match arguments.format {
        Format::Text => print(&format!("{}\n", pulled.digest)),
        Format::Json => print_json(&pulled),
    }
}

pub(crate) fn export(arguments: &Export) -> Result<Exit, Failure> {
    let _interrupt = Interrupt::watch()?;
    let _in_use = Store::new(&Settings::from_environment()?.cache).in_use()?;
    let image = layout(&arguments.image)?;
    let format = match arguments.format {
        ArchiveFormat::OciArchive => FileFormat::OciArchive,
        ArchiveFormat::DockerArchive => FileFormat::DockerArchive,
    };
    let mut screen = Screen::new();
    let written =
        showing(&mut screen, |progress| export::export(&image, format, &arguments.output, progress))?;
    screen.say("Exported", &format!("{} ({})", written.file.display(), ByteSize(written.size)));
    print(&format!("{}\n", written.digest))
}

pub(crate) fn index(arguments: &Index) -> Result<Exit, Failure> {
    let _interrupt = Interrupt::watch()?;
    let images = arguments.images.iter().map(|image| layout(image)).collect::<Result<Vec<_>, _>>()?;
    let mut digest = None;
    new_folder(&arguments.output, |target| {
        digest = Some(platforms::join(&images, target)?);
        Ok(())
    })?;
    let Some(digest) = digest else { return Ok(Exit::Done) };
    let text = format!("{} images in {}", images.len(), arguments.output.display());
    Screen::new().say("Joined", &text);
    print(&format!("{digest}\n"))
}

/// What images of this machine run on.
const fn platform() -> Platform {
    if cfg!(target_arch = "aarch64") { Platform::Arm64 } else { Platform::Amd64 }
}
