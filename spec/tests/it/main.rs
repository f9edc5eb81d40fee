//! Reading and writing of every file format, as users meet it.

#![allow(clippy::unwrap_used, reason = "a test that panics is a test that fails")]

mod manifests;
mod schema;
