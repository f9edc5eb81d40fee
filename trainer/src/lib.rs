//! Trains GPT-2 style decoders on CPUs, over as many processes as the launcher starts.
//!
//! Responsible for everything between token shards and a checkpoint: [`model`] over [`ops`], [`optim`], ranks that
//! work together ([`dist`]), the loop that ties them ([`train`]), and what comes before and after it ([`data`],
//! [`checkpoint`], [`sample`], [`plan`]). The library is also what `trainyard data prepare` calls.
//!
//! Deliberately left out: starting and watching processes, and any decision about retries; a rank that cannot go on says
//! why ([`report`]) and leaves.

pub mod checkpoint;
pub mod cli;
pub mod commands;
pub mod data;
pub mod dist;
pub mod model;
pub mod ops;
pub mod optim;
pub mod plan;
pub mod report;
pub mod sample;
pub mod settings;
pub mod tokenizer;
pub mod train;
