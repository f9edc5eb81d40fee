//! What a person sees: stages, a progress line, the loss curve. Everything here goes to standard error, except what a
//! command returns as its result.

pub(crate) mod chart;
pub(crate) mod screen;
pub(crate) mod training;
