//! `trainyard sign`, `verify-signature`, `sbom` and `provenance`.

use std::path::Path;

use trainyard_builder::oci;
use trainyard_builder::registry::{Options, Reference, Repository, Signed};
use trainyard_builder::supply::key::{PrivateKey, PublicKey};
use trainyard_builder::supply::{Facts, cyclonedx, provenance, spdx};
use trainyard_spec::Exit;

use super::build::{layout, settings, showing};
use super::{print, print_json};
use crate::cli::{Format, Password, Provenance, Sbom, SbomFormat, Sign, VerifySignature};
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::settings::{Settings, key_password};
use crate::view::screen::Screen;

pub(crate) fn sign(arguments: &Sign) -> Result<Exit, Failure> {
    let reference: Reference = arguments.reference.parse()?;
    let key = private_key(&arguments.key, &arguments.password)?;
    let _interrupt = Interrupt::watch()?;
    let settings = settings(&Settings::from_environment()?, false)?;
    let options = Options { plain_http: arguments.plain_http, ..Options::default() };
    let mut screen = Screen::new();
    let signed = showing(&mut screen, |progress| {
        let repository = Repository::connect(&reference, &settings, options, progress)?;
        repository.sign(&repository.resolve(progress)?, &key, &[], progress)
    })?;
    say_signed(&mut screen, &signed);
    print(&format!("{}\n", reference.at(signed.digest)))
}

pub(crate) fn verify_signature(arguments: &VerifySignature) -> Result<Exit, Failure> {
    let reference: Reference = arguments.reference.parse()?;
    let key = PublicKey::read(&arguments.key)?;
    let _interrupt = Interrupt::watch()?;
    let settings = settings(&Settings::from_environment()?, false)?;
    let options = Options { plain_http: arguments.plain_http, ..Options::default() };
    let mut screen = Screen::new();
    let verified = showing(&mut screen, |progress| {
        let repository = Repository::connect(&reference, &settings, options, progress)?;
        repository.verify(&repository.resolve(progress)?, &key, progress)
    })?;
    let about = match verified.statements.len() {
        0 => "the image is signed with the key".to_owned(),
        count => format!("the image is signed with the key, and {count} statements about it"),
    };
    screen.say("Verified", &about);
    match arguments.format {
        Format::Text => print(&format!("{}\n", reference.at(verified.digest))),
        Format::Json => print_json(&verified),
    }
}

/// Reads a private key, and its password where there is one.
pub(super) fn private_key(path: &Path, password: &Password) -> Result<PrivateKey, Failure> {
    let password = match &password.password_file {
        Some(file) => {
            let mut text = std::fs::read(file)
                .map_err(|error| Failure::usage(format!("cannot read {}: {error}", file.display())))?;
            // Editors end a file with a line break.
            if text.ends_with(b"\n") {
                text.pop();
            }
            Some(text)
        }
        None => key_password(),
    };
    Ok(PrivateKey::read(path, password.as_deref())?)
}

pub(super) fn say_signed(screen: &mut Screen, signed: &Signed) {
    let Signed { added, present, .. } = signed;
    screen.say("Signed", &format!("signatures and statements: {added} added, {present} were there"));
}

pub(crate) fn sbom(arguments: &Sbom) -> Result<Exit, Failure> {
    let facts = facts(&arguments.image)?;
    print_document(match arguments.format {
        SbomFormat::Spdx => spdx::write(&facts)?,
        SbomFormat::Cyclonedx => cyclonedx::write(&facts)?,
    })
}

pub(crate) fn provenance(arguments: &Provenance) -> Result<Exit, Failure> {
    print_document(provenance::write(&facts(&arguments.image)?)?)
}

fn facts(image: &Path) -> Result<Facts, Failure> {
    let image = oci::Layout::open(&layout(image)?)?;
    Ok(Facts::read(&image.digest, &Settings::from_environment()?.cache)?)
}

fn print_document(document: Vec<u8>) -> Result<Exit, Failure> {
    let text = String::from_utf8(document).map_err(|error| Failure::new(Exit::Infrastructure, error))?;
    print(&format!("{text}\n"))
}
