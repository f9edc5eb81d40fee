//! The shape of a model, and the sizes that follow from it.

use trainyard_spec::trainer::ModelConfig;

/// Shape of a GPT-2 style decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelShape {
    /// Blocks, L.
    pub layers: usize,
    /// Attention heads of a block, H.
    pub heads: usize,
    /// Width of the residual stream, C; a multiple of `heads`.
    pub channels: usize,
    /// Longest sequence in tokens.
    pub context: usize,
    /// Number of different tokens, V.
    pub vocabulary: usize,
}

impl ModelShape {
    /// The shape that `config` asks for, with a tokenizer of `vocabulary` tokens.
    pub fn new(config: &ModelConfig, vocabulary: usize) -> Self {
        Self {
            layers: config.layers as usize,
            heads: config.heads as usize,
            channels: config.channels as usize,
            context: config.context as usize,
            vocabulary,
        }
    }

    /// Width of the feed-forward layer, F.
    pub fn feed_forward(&self) -> usize {
        4 * self.channels
    }

    /// Floating-point operations of one token's forward and backward pass in a sequence of `tokens`: 6 for each
    /// weight of a matrix (2 forward, 4 backward) and, for causal attention, 6 C T for each layer (the two products of
    /// 2 C operations with T/2 keys on average, forward once and backward twice).
    pub fn flops_per_token(&self, tokens: usize) -> u64 {
        let (layers, channels) = (self.layers as u64, self.channels as u64);
        let matrices = layers * 12 * channels * channels + self.vocabulary as u64 * channels;
        6 * matrices + 6 * layers * channels * tokens as u64
    }
}
