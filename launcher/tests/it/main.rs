//! Launches with real processes and a real Podman.

#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test fails by a panic, and says aloud what it skips"
)]

mod controllers;
mod faults;
mod jobs;
mod lab;
mod plans;
mod podman;
mod preflight;
