//! How a command fails: what a person reads, and the exit code that a script reads.

use std::fmt::Display;
use std::io::Write;

use trainyard_spec::Exit;

/// A command's failure.
#[derive(Debug)]
pub(crate) struct Failure {
    exit: Exit,
    error: anyhow::Error,
    hint: Option<String>,
}

impl Failure {
    /// A failure with its exit code.
    pub(crate) fn new(exit: Exit, error: impl Into<anyhow::Error>) -> Self {
        Self { exit, error: error.into(), hint: None }
    }

    /// The command line is wrong, or names what is not there.
    pub(crate) fn usage(message: impl Display) -> Self {
        Self::new(Exit::Usage, anyhow::anyhow!("{message}"))
    }

    /// Adds the way out, where there is one.
    pub(crate) fn with_hint(mut self, hint: Option<impl Into<String>>) -> Self {
        self.hint = hint.map(Into::into).or(self.hint);
        self
    }

    /// Prints the failure to standard error and gives its exit code.
    pub(crate) fn report(self) -> Exit {
        let red = anstyle::AnsiColor::Red.on_default().bold();
        let mut screen = anstream::stderr();
        // Nobody is helped by a failure to write to a closed standard error.
        let _ = writeln!(screen, "{red}error{red:#}: {}", self.error);
        let mut told = self.error.to_string();
        for cause in self.error.chain().skip(1).map(ToString::to_string) {
            // Many errors print their cause themselves.
            if !told.contains(&cause) {
                let _ = writeln!(screen, "  because: {cause}");
                told += &cause;
            }
        }
        if let Some(hint) = self.hint {
            let _ = writeln!(screen, "  hint: {hint}");
        }
        self.exit
    }
}

/// Gives each stage's errors their exit code and hint.
macro_rules! failures {
    ($($error:ty => $exit:expr, $hint:expr;)*) => {$(
        impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                let hint: fn(&$error) -> Option<String> = $hint;
                let exit: fn(&$error) -> Exit = $exit;
                let (exit, hint) = (exit(&error), hint(&error));
                Self::new(exit, error).with_hint(hint)
            }
        }
    )*};
}

fn manifest_exit(error: &trainyard_builder::manifest::Error) -> Exit {
    use trainyard_builder::manifest::Error;
    match error {
        Error::Read { .. } | Error::NotAFile { .. } => Exit::Usage,
        Error::TooLarge { .. } | Error::NotText { .. } | Error::Faults(_) => Exit::Invalid,
    }
}

fn prepare_exit(error: &trainyard_trainer::data::prepare::PrepareError) -> Exit {
    use trainyard_trainer::data::prepare::PrepareError;
    match error {
        PrepareError::Text { .. }
        | PrepareError::NotAFile { .. }
        | PrepareError::Exists { .. }
        | PrepareError::Fraction { .. } => Exit::Usage,
        _ => Exit::Input,
    }
}

fn build_exit(error: &trainyard_builder::image::Error) -> Exit {
    use trainyard_builder::image::Error;
    match error {
        Error::Manifest(error) => manifest_exit(error),
        Error::Kind { .. } | Error::Conflict(_) | Error::Budget { .. } => Exit::Invalid,
        Error::Lock(error) => lock_exit(error),
        Error::Read { .. } => Exit::Usage,
        _ => Exit::Input,
    }
}

fn lock_exit(error: &trainyard_builder::lock::Error) -> Exit {
    use trainyard_builder::lock::Error;
    match error {
        Error::Manifest(error) => manifest_exit(error),
        Error::Missing { .. } | Error::Stale { .. } => Exit::Invalid,
        Error::Input { .. } | Error::Toolchain { .. } | Error::Write(_) => Exit::Input,
    }
}

fn corpus_exit(error: &trainyard_builder::corpus::Error) -> Exit {
    use trainyard_builder::corpus::Error;
    match error {
        Error::Read { .. } => Exit::Usage,
        Error::Manifest(error) => manifest_exit(error),
        Error::Kind { .. } | Error::Pattern { .. } | Error::Empty { .. } => Exit::Invalid,
        Error::Lock(error) => lock_exit(error),
        Error::Input(_) | Error::NotText { .. } | Error::Store(_) => Exit::Input,
    }
}

fn vendor_exit(error: &trainyard_builder::vendor::Error) -> Exit {
    use trainyard_builder::vendor::Error;
    match error {
        Error::Lock(error) => lock_exit(error),
        Error::Taken { .. } => Exit::Usage,
        _ => Exit::Input,
    }
}

fn registry_exit(error: &trainyard_builder::registry::Error) -> Exit {
    use trainyard_builder::registry::Error;
    match error {
        Error::Offline { .. } | Error::OtherImage { .. } | Error::NoPlatform { .. } => Exit::Usage,
        Error::Key(_) => Exit::Usage,
        _ => Exit::Input,
    }
}

failures! {
    trainyard_builder::registry::ReferenceError => |_| Exit::Usage, |error| Some(error.hint());
    trainyard_builder::registry::Error => registry_exit, trainyard_builder::registry::Error::hint;
    trainyard_builder::export::Error => |error| match error {
        trainyard_builder::export::Error::Exists { .. } | trainyard_builder::export::Error::Write { .. } => Exit::Usage,
        _ => Exit::Input,
    }, |error| error.hint().map(str::to_owned);
    trainyard_builder::supply::Error => |error| match error {
        trainyard_builder::supply::Error::Unknown { .. } => Exit::Usage,
        _ => Exit::Input,
    }, |error| error.hint().map(str::to_owned);
    trainyard_builder::supply::key::Error => |_| Exit::Usage, |error| error.hint().map(str::to_owned);
    trainyard_builder::supply::redistribution::Error => |error| match error {
        trainyard_builder::supply::redistribution::Error::LocalOnly { .. }
        | trainyard_builder::supply::redistribution::Error::Files { .. } => Exit::Invalid,
        _ => Exit::Input,
    }, |error| error.hint().map(str::to_owned);
    trainyard_builder::manifest::Error => manifest_exit, |_| None;
    trainyard_trainer::data::prepare::PrepareError => prepare_exit, |error| match error {
        trainyard_trainer::data::prepare::PrepareError::NotAFile { .. } => Some("write what the pipe holds to a file first".to_owned()),
        _ => None,
    };
    trainyard_trainer::data::DataError => |_| Exit::Input, |_| None;
    crate::settings::NoHome => |_| Exit::Usage, |_| Some("set HOME, or TRAINYARD_HOME to a folder that you own".to_owned());
    trainyard_builder::image::Error => build_exit, trainyard_builder::image::Error::hint;
    trainyard_builder::lock::Error => lock_exit, trainyard_builder::lock::Error::hint;
    trainyard_builder::corpus::Error => corpus_exit, trainyard_builder::corpus::Error::hint;
    trainyard_builder::store::Error => |_| Exit::Input, |error| error.hint().map(str::to_owned);
    trainyard_builder::vendor::Error => vendor_exit, trainyard_builder::vendor::Error::hint;
    trainyard_builder::inspect::Error => |_| Exit::Input, |_| None;
    trainyard_builder::oci::Error => |_| Exit::Input, |_| None;
    trainyard_builder::platforms::Error => |error| match error {
        trainyard_builder::platforms::Error::Twice { .. } => Exit::Usage,
        _ => Exit::Input,
    }, |_| None;
    trainyard_builder::unpack::Error => |_| Exit::Input, |_| None;
    trainyard_builder::verify::Error => |error| match error {
        trainyard_builder::verify::Error::Build(error) => build_exit(error),
        trainyard_builder::verify::Error::Inspect(_) => Exit::Input,
    }, |error| match error {
        trainyard_builder::verify::Error::Build(error) => error.hint(),
        trainyard_builder::verify::Error::Inspect(_) => None,
    };
    trainyard_launcher::run_dir::RunDirError => |error| match error {
        trainyard_launcher::run_dir::RunDirError::Used { .. } => Exit::Usage,
        trainyard_launcher::run_dir::RunDirError::Plan { .. } => Exit::Invalid,
        _ => Exit::Preflight,
    }, |_| None;
    trainyard_launcher::jobs::JobsError => |error| match error {
        trainyard_launcher::jobs::JobsError::RunDir(trainyard_launcher::run_dir::RunDirError::Plan { .. }) => Exit::Invalid,
        _ => Exit::Usage,
    }, |_| None;
    trainyard_launcher::logs::LogsError => |_| Exit::Infrastructure, |_| None;
    trainyard_launcher::supervise::RunError => |_| Exit::Infrastructure, |_| None;
}
