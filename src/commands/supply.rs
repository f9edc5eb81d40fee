//! `trainyard sbom`.

use trainyard_builder::oci;
use trainyard_builder::supply::{Facts, cyclonedx, spdx};
use trainyard_spec::Exit;

use super::build::layout;
use super::print;
use crate::cli::{Sbom, SbomFormat};
use crate::failure::Failure;
use crate::settings::Settings;

pub(crate) fn sbom(arguments: &Sbom) -> Result<Exit, Failure> {
    let image = oci::Layout::open(&layout(&arguments.image)?)?;
    let facts = Facts::read(&image.digest, &Settings::from_environment()?.cache)?;
    let document = match arguments.format {
        SbomFormat::Spdx => spdx::write(&facts)?,
        SbomFormat::Cyclonedx => cyclonedx::write(&facts)?,
    };
    print(&format!("{}\n", String::from_utf8_lossy(&document)))
}
