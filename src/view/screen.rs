//! Standard error as a place to show work: a verb and a line per stage, as cargo does, and one moving line below them
//! on a terminal. Elsewhere the moving line becomes a plain line now and then.

use std::collections::BTreeSet;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Time between two plain progress lines.
const PLAIN_EVERY: Duration = Duration::from_secs(5);

/// Columns from which on a bar takes no room from what it stands beside.
const ROOM_FOR_A_BAR: u16 = 110;

/// The screen.
#[derive(Debug)]
pub(crate) struct Screen {
    bar: Option<ProgressBar>,
    terminal: bool,
    last_plain: Option<Instant>,
    warned: BTreeSet<String>,
}

impl Screen {
    pub(crate) fn new() -> Self {
        Self {
            bar: None,
            terminal: std::io::stderr().is_terminal(),
            last_plain: None,
            warned: BTreeSet::new(),
        }
    }

    /// A finished stage, or a fact worth a line of its own.
    pub(crate) fn say(&mut self, verb: &str, text: &str) {
        self.clear();
        self.line(verb, text, anstyle::AnsiColor::Green);
    }

    /// Something that a person should know and that ends nothing. Said once.
    pub(crate) fn warn(&mut self, text: &str) {
        if !self.warned.insert(text.to_owned()) {
            return;
        }
        self.clear();
        self.line("Warning", text, anstyle::AnsiColor::Yellow);
    }

    /// The moving line of work that goes on: `done` of `total`, or unknown when `total` is 0.
    pub(crate) fn show(&mut self, verb: &str, text: &str, done: u64, total: u64) {
        if !self.terminal {
            let due = self.last_plain.is_none_or(|last| last.elapsed() >= PLAIN_EVERY);
            if due {
                self.last_plain = Some(Instant::now());
                self.line(verb, text, anstyle::AnsiColor::Cyan);
            }
            return;
        }
        let bar = self.bar.get_or_insert_with(|| {
            let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(10));
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        bar.set_style(style(total > 0, columns()));
        bar.set_length(total);
        bar.set_position(done);
        bar.set_prefix(verb.to_owned());
        bar.set_message(text.to_owned());
    }

    /// Takes the moving line away.
    pub(crate) fn clear(&mut self) {
        self.last_plain = None;
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    fn line(&self, verb: &str, text: &str, colour: anstyle::AnsiColor) {
        let style = colour.on_default().bold();
        // Nobody is helped by a failure to write to a closed standard error.
        let _ = writeln!(anstream::stderr(), "{style}{verb:>12}{style:#} {text}");
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Columns of the terminal behind standard error.
fn columns() -> u16 {
    rustix::termios::tcgetwinsize(std::io::stderr()).map_or(80, |size| size.ws_col)
}

fn style(known_total: bool, columns: u16) -> ProgressStyle {
    let template = match (known_total, columns) {
        (true, ROOM_FOR_A_BAR..) => "{prefix:>12.cyan.bold} [{bar:20}] {wide_msg}",
        (true, _) => "{prefix:>12.cyan.bold} {wide_msg}",
        (false, _) => "{prefix:>12.cyan.bold} {spinner} {wide_msg}",
    };
    ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("=> ")
}
