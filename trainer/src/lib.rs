//! Trains GPT-2 style decoders on CPUs, over as many processes as the launcher starts.

pub mod data;
pub mod dist;
pub mod model;
pub mod ops;
pub mod optim;
pub mod tokenizer;
