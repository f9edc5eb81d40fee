//! Launches with real processes and a real Podman.

mod faults;
mod jobs;
mod lab;
mod plans;
mod podman;
mod preflight;
