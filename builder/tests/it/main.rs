//! Tests of the builder against real servers, archives, compilers and image tools.

#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test fails by panicking, and says what it skips"
)]

mod archives;
mod bases;
mod collecting;
mod contracts;
mod cuda_inputs;
mod debian;
mod drivers;
mod elf;
mod elf_files;
mod exporting;
mod faults;
mod images;
mod index;
mod layers;
mod locks;
mod pruning;
mod registry;
mod room;
mod server;
mod signed;
mod supply;
mod unpacking;
mod userland;
mod vendoring;
mod wheels;
