//! `trainyard data prepare`.

use trainyard_spec::Exit;
use trainyard_trainer::data::prepare::{Request, prepare as make};

use crate::cli::Prepare;
use crate::failure::Failure;
use crate::view::screen::Screen;
use crate::view::training::grouped;

pub(crate) fn prepare(arguments: &Prepare) -> Result<Exit, Failure> {
    let tokenizer = arguments.tokenizer.parse().map_err(Failure::usage)?;
    let mut screen = Screen::new();
    let texts = [arguments.text.clone()];
    let request = Request {
        texts: &texts,
        tokenizer,
        validation_fraction: arguments.validation_fraction,
        out: &arguments.output,
    };
    let made = make(&request, |done, total| screen.show("Tokens", "writing shards", done, total))?;
    let (train, validation) = (grouped(made.train.tokens), grouped(made.validation.tokens));
    screen.say("Prepared", &format!("{train} tokens to train on, {validation} held out for validation"));
    super::print(&format!("{}\n", arguments.output.display()))
}
