//! One file per subcommand.

mod build;
mod completions;
mod data;
mod gc;
mod jobs;
mod launch;
mod registry;
mod supply;
mod vendor;

use std::io::Write;

use serde::Serialize;
use trainyard_spec::Exit;

use crate::cli::{Cli, Command, Data};
use crate::failure::Failure;

/// Runs the command line.
pub(crate) fn run(cli: Cli) -> Result<Exit, Failure> {
    match cli.command {
        Command::Launch(arguments) => launch::launch(&arguments),
        Command::Controller(arguments) => launch::controller(&arguments),
        Command::Status(arguments) => jobs::status(&arguments),
        Command::Logs(arguments) => jobs::logs(&arguments),
        Command::Stop(arguments) => jobs::stop(&arguments),
        Command::Lock(arguments) => build::lock(&arguments),
        Command::Build(arguments) => build::build(&arguments),
        Command::Vendor(arguments) => vendor::vendor(&arguments),
        Command::Inspect(arguments) => build::inspect(&arguments),
        Command::Verify(arguments) => build::verify(&arguments),
        Command::Push(arguments) => registry::push(&arguments),
        Command::Pull(arguments) => registry::pull(&arguments),
        Command::Export(arguments) => registry::export(&arguments),
        Command::Index(arguments) => registry::index(&arguments),
        Command::Sign(arguments) => supply::sign(&arguments),
        Command::VerifySignature(arguments) => supply::verify_signature(&arguments),
        Command::Sbom(arguments) => supply::sbom(&arguments),
        Command::Provenance(arguments) => supply::provenance(&arguments),
        Command::Gc(arguments) => gc::gc(&arguments),
        Command::Data(Data::Prepare(arguments)) => data::prepare(&arguments),
        Command::Completions(arguments) => completions::completions(&arguments),
        Command::Man(arguments) => completions::man(&arguments),
    }
}

/// Writes a result to standard output. A reader that has gone away, as `head` does, is no failure.
fn print(text: &str) -> Result<Exit, Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(Failure::new(
            Exit::Infrastructure,
            anyhow::anyhow!("cannot write to standard output: {error}"),
        )),
        _ => Ok(Exit::Done),
    }
}

fn print_json(value: &impl Serialize) -> Result<Exit, Failure> {
    let text =
        serde_json::to_string_pretty(value).map_err(|error| Failure::new(Exit::Infrastructure, error))?;
    print(&(text + "\n"))
}

/// The runtime of the asynchronous commands. One thread is enough: the work is waiting.
fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    let failed =
        |error| Failure::new(Exit::Infrastructure, anyhow::anyhow!("cannot start the event loop: {error}"));
    tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)
}
