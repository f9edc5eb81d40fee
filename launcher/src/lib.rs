//! Launches a planned job on this machine and sees it through.
//!
//! The way of a launch: [`engine::choose`] finds out what can run nodes here; [`plan::plan`] turns the job into a
//! [`trainyard_spec::plan::LaunchPlan`], a value that can be printed; [`preflight::preflight`] compares it with the
//! [`machine::Machine`]; [`run_dir::RunDir::create`] writes it down; [`supervise::run`] runs it, from that folder alone, so
//! that another process can be handed the work. [`jobs`] looks at the same folders from outside.
//!
//! Deliberately left out: reading the environment (the caller's settings), building images (the builder), and showing
//! anything: all that happens is sent as [`trainyard_spec::event::JobRecord`]s.
//!
//! What holds at any time: one controller per run directory (a file lock); nothing of an attempt outlives `run`; a job whose
//! controller is gone ends by its nodes' leases.

mod attempt;
pub mod engine;
pub mod jobs;
mod journal;
pub mod logs;
pub mod machine;
pub mod plan;
pub mod preflight;
pub mod run_dir;
pub mod supervise;
mod tail;
