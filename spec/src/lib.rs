//! Every type that crosses a crate, a disk or a wire.
//!
//! Responsible for the shape and the validation of manifests, locks, jobs, plans, events and the node protocol, and
//! for the two tables users program against: environment variables ([`mod@env`]) and exit codes ([`exit`]).
//!
//! Deliberately left out: I/O, clocks, randomness and async. Functions here take text and return values.
//!
//! TOML files are read with [`toml::read`], which reports all faults of a file at once; JSON on disk and on the wire
//! is plain serde. Both refuse unknown keys, and each persisted format starts with a [`FormatVersion`].

pub mod corpus;
pub mod digest;
pub mod env;
pub mod event;
pub mod exit;
pub mod faults;
pub mod image;
pub mod input;
pub mod job;
pub mod lock;
pub mod name;
pub mod plan;
pub mod protocol;
#[cfg(feature = "schema")]
pub mod schema;
pub mod size;
pub mod toml;
pub mod trainer;
pub mod vendored;
pub mod version;

pub use digest::Digest;
pub use exit::Exit;
pub use faults::{Fault, Faults};
pub use name::Name;
pub use size::ByteSize;
pub use version::FormatVersion;
