//! Token and position embedding.

use super::activations::Activations;
use super::layout::{Finder, Tensor};
use crate::ops::{Ops, Span};

pub(super) struct Embedding {
    wte_vc: Tensor,
    wpe_tc: Tensor,
}

impl Embedding {
    pub(super) fn new(find: &Finder<'_>) -> Self {
        Self { wte_vc: find.tensor("wte.weight"), wpe_tc: find.tensor("wpe.weight") }
    }

    pub(super) fn forward(
        &self,
        ops: &mut impl Ops,
        out_btc: Span,
        tokens_bt: &[u32],
        tokens: usize,
        channels: usize,
    ) {
        let out_btc = out_btc.first(tokens_bt.len() * channels);
        ops.embed(out_btc, self.wte_vc.value, self.wpe_tc.value, tokens_bt, tokens);
    }

    /// Adds to the gradient that the head left of the token embedding, which the two share.
    pub(super) fn backward(
        &self,
        ops: &mut impl Ops,
        activations: &Activations,
        tokens_bt: &[u32],
        tokens: usize,
        channels: usize,
        accumulate: bool,
    ) {
        ops.embed_backward(
            self.wte_vc.gradient,
            self.wpe_tc.gradient,
            activations.dresidual_btc.first(tokens_bt.len() * channels),
            tokens_bt,
            tokens,
            accumulate,
        );
    }
}
