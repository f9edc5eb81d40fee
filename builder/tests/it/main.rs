//! Tests of the builder against real servers, archives and image tools.
