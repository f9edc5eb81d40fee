//! What a run will take, before anything is allocated: parameters, memory by purpose, arithmetic, messages.

use std::fmt;

use serde::Serialize;
use trainyard_spec::ByteSize;
use trainyard_spec::trainer::TrainerConfig;

use crate::dist::buckets::{BUCKET_BYTES, BucketPlan};
use crate::model::{Model, ModelShape, ParameterLayout};
use crate::ops::cpu::Cpu;

/// A run's needs.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Plan {
    /// Trainable parameters.
    pub parameters: u64,
    /// Memory of one rank by purpose.
    pub memory: Vec<Memory>,
    /// Memory of one rank in all.
    pub memory_bytes: u64,
    /// Floating-point operations of one token, forward and backward: 6 for each weight of a matrix, and 6 C T for each
    /// layer's causal attention (Kaplan et al., "Scaling Laws for Neural Language Models", 2020, section 2.1, with
    /// attention halved by its mask).
    pub flops_per_token: u64,
    /// Tokens of one step, in all ranks together.
    pub tokens_per_step: u64,
    /// Floating-point operations of the whole run, in all ranks together.
    pub flops: f64,
    /// Bytes of each bucket of gradients, in the order in which they are reduced. None when a rank is alone.
    pub bucket_bytes: Vec<u64>,
    /// Bytes that each rank sends in one step to sum gradients: 2 (N - 1) / N of them.
    pub sent_bytes_per_step: u64,
}

/// One purpose's share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Memory {
    /// What it is for.
    pub purpose: &'static str,
    /// Bytes.
    pub bytes: u64,
}

impl Plan {
    /// The plan of a run with a tokenizer of `vocabulary` tokens, on `world_size` ranks.
    pub fn new(config: &TrainerConfig, vocabulary: u32, world_size: u32) -> Self {
        const WIDTH: u64 = size_of::<f32>() as u64;
        let shape = ModelShape::new(&config.model, vocabulary as usize);
        let train = &config.train;
        let parameters = ParameterLayout::new(&shape).elements();
        let bytes = parameters as u64 * WIDTH;
        let mut memory = Model::<Cpu<f32>>::memory_plan_of(&shape, train.batch as usize);
        memory.add("first moments", bytes);
        memory.add("second moments", bytes);
        let mut bucket_bytes = Vec::new();
        if world_size > 1 {
            memory.add("buckets on their way", bytes);
            let buckets = BucketPlan::new(parameters, BUCKET_BYTES);
            bucket_bytes.extend(buckets.ranges().iter().map(|range| range.len() as u64 * WIDTH));
        }
        let tokens_per_step = u64::from(train.batch)
            * u64::from(train.grad_accumulation)
            * u64::from(world_size)
            * u64::from(config.model.context);
        let flops_per_token = shape.flops_per_token(shape.context);
        Self {
            parameters: parameters as u64,
            memory_bytes: memory.total(),
            memory: memory
                .uses
                .iter()
                .map(|entry| Memory { purpose: entry.purpose, bytes: entry.bytes })
                .collect(),
            flops_per_token,
            tokens_per_step,
            flops: flops_per_token as f64 * tokens_per_step as f64 * train.steps as f64,
            bucket_bytes,
            sent_bytes_per_step: 2 * bytes * u64::from(world_size - 1) / u64::from(world_size),
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "parameters             {}", self.parameters)?;
        writeln!(f, "tokens per step        {}", self.tokens_per_step)?;
        writeln!(
            f,
            "operations per token   {} (6 per matrix weight, 6 C T per layer)",
            self.flops_per_token
        )?;
        writeln!(f, "operations of the run  {:.3e}", self.flops)?;
        writeln!(f, "memory per rank        {}", ByteSize(self.memory_bytes))?;
        for memory in &self.memory {
            writeln!(f, "  {:24} {}", memory.purpose, ByteSize(memory.bytes))?;
        }
        match self.bucket_bytes.first() {
            None => write!(f, "buckets                none: the rank is alone"),
            Some(&first) => {
                writeln!(f, "buckets                {} of {}", self.bucket_bytes.len(), ByteSize(first))?;
                write!(f, "sent per rank and step {}", ByteSize(self.sent_bytes_per_step))
            }
        }
    }
}
