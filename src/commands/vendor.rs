//! `trainyard vendor`.

use trainyard_builder::vendor;
use trainyard_spec::{ByteSize, Exit};

use super::build::{settings_from, showing};
use super::{print, print_json};
use crate::cli::{Format, Vendor};
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::settings::Settings;
use crate::view::screen::Screen;

pub(crate) fn vendor(arguments: &Vendor) -> Result<Exit, Failure> {
    let _interrupt = Interrupt::watch()?;
    let settings = settings_from(&Settings::from_environment()?, &arguments.sources)?;
    let mut screen = Screen::new();
    let vendored = showing(&mut screen, |progress| {
        vendor::vendor(&arguments.manifest, &arguments.output, &settings, progress)
    })?;
    let (files, crates) = (vendored.files, vendored.crates);
    screen.say("Vendored", &format!("{files} files and {crates} crates, {}", ByteSize(vendored.size)));
    match arguments.format {
        Format::Text => print(&format!("{}\n", vendored.folder.display())),
        Format::Json => print_json(&vendored),
    }
}
