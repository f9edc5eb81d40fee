//! The program as a person uses it: real images, real jobs, real containers.
#![allow(clippy::unwrap_used, reason = "a test that panics is a test that fails")]
#![allow(clippy::print_stderr, reason = "a skipped test says why")]

mod cache;
mod command_line;
mod cuda;
mod image;
mod job;
mod registry;
mod yard;
