//! `trainyard sbom` and `provenance`.

use std::path::Path;

use trainyard_builder::oci;
use trainyard_builder::supply::{Facts, cyclonedx, provenance, spdx};
use trainyard_spec::Exit;

use super::build::layout;
use super::print;
use crate::cli::{Provenance, Sbom, SbomFormat};
use crate::failure::Failure;
use crate::settings::Settings;

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
