//! `trainyard gc`.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

use trainyard_builder::gc::{self, Collected, Request};
use trainyard_launcher::jobs;
use trainyard_spec::Exit;

use super::build::showing;
use super::{print, print_json};
use crate::cli::{Format, Gc};
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::settings::Settings;
use crate::view::screen::Screen;

pub(crate) fn gc(arguments: &Gc) -> Result<Exit, Failure> {
    let _interrupt = Interrupt::watch()?;
    let settings = Settings::from_environment()?;
    let age = Duration::from_secs(u64::from(arguments.keep_days) * 24 * 60 * 60);
    let since = SystemTime::now().checked_sub(age).unwrap_or(SystemTime::UNIX_EPOCH);
    let mut screen = Screen::new();
    let collected = showing(&mut screen, |progress| {
        // Asked when nothing else uses the cache: a launch has made its job by then.
        gc::collect(&settings.cache, progress, || {
            Ok::<_, Failure>(Request {
                since,
                needed: jobs::needed(&settings.jobs, since)?,
                dry_run: arguments.dry_run,
            })
        })
    })?;
    match arguments.format {
        Format::Text => print(&describe(&collected)),
        Format::Json => print_json(&collected),
    }
}

fn describe(collected: &Collected) -> String {
    let mut text = format!("{:<26} {:>8} {:>8}\n", "", "REMOVED", "KEPT");
    for kind in &collected.kinds {
        let _ = writeln!(text, "{:<26} {:>8} {:>8}", kind.kind, kind.removed, kind.kept);
    }
    let free = if collected.dry_run { "would be free" } else { "are free" };
    let _ = writeln!(text, "{} {free}", collected.freed);
    text
}
