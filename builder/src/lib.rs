//! Builds reproducible OCI images from a manifest and its lock, and verifies them; makes the corpora that a job trains
//! on, in the same way.
//!
//! Manifest, lock, inputs, tree, layers, layout: each module is one stage and has one error type, whose `hint` is the
//! way out. Nothing below [`settings`] reads the environment, the clock or a random source, and nothing prints: a
//! caller gives a [`progress::Progress`].

pub mod closure;
mod content;
mod contents;
pub mod contract;
pub mod corpus;
mod decompress;
pub mod driver;
pub mod elf;
pub mod export;
pub mod gc;
pub mod gpus;
pub mod http;
pub mod image;
pub mod index;
pub mod input;
pub mod inspect;
pub mod layer;
mod loader;
pub mod lock;
pub mod manifest;
pub mod oci;
pub mod platforms;
pub mod progress;
pub mod prune;
pub mod registry;
pub mod settings;
pub mod signature;
mod solve;
pub mod store;
pub mod supply;
pub mod tree;
mod unchanged;
pub mod unpack;
mod unpacked;
pub mod userland;
pub mod vendor;
pub mod verify;
