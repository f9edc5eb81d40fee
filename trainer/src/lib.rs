//! Trains GPT-2 style decoders on CPUs, over as many processes as the launcher starts.
