//! The trainer's command line.
fn main() {}
