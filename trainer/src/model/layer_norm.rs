//! A layer norm with gain and bias.

use super::layout::{Finder, Tensor};
use crate::ops::{LayerNormBackward, Ops, Span};

pub(super) struct LayerNorm {
    gain_c: Tensor,
    bias_c: Tensor,
}

impl LayerNorm {
    pub(super) fn new(find: &Finder<'_>, name: &str) -> Self {
        Self { gain_c: find.tensor(&format!("{name}.weight")), bias_c: find.tensor(&format!("{name}.bias")) }
    }

    pub(super) fn forward(&self, ops: &mut impl Ops, out_nc: Span, stats_n2: Span, x_nc: Span) {
        ops.layer_norm(out_nc, stats_n2, x_nc, self.gain_c.value, self.bias_c.value);
    }

    pub(super) fn forward_again(&self, ops: &mut impl Ops, out_nc: Span, stats_n2: Span, x_nc: Span) {
        ops.layer_norm_again(out_nc, stats_n2, x_nc, self.gain_c.value, self.bias_c.value);
    }

    /// Gradients of gain and bias; the input's gradient is added to the residual stream's, or begins it.
    pub(super) fn backward(&self, ops: &mut impl Ops, flow: Flow, accumulate: bool) {
        ops.layer_norm_backward(LayerNormBackward {
            dx_nc: flow.dx_nc,
            accumulate_dx: flow.accumulate_dx,
            dgain_c: self.gain_c.gradient,
            dbias_c: self.bias_c.gradient,
            accumulate,
            dout_nc: flow.dout_nc,
            x_nc: flow.x_nc,
            stats_n2: flow.stats_n2,
            gain_c: self.gain_c.value,
        });
    }

    /// End of the norm's gradients, which lie behind those of the branch that it feeds.
    pub(super) fn end(&self) -> usize {
        self.bias_c.gradient.range().end
    }
}

/// The activations that a norm's backward pass reads and writes.
#[derive(Clone, Copy)]
pub(super) struct Flow {
    pub(super) dx_nc: Span,
    pub(super) accumulate_dx: bool,
    pub(super) dout_nc: Span,
    pub(super) x_nc: Span,
    pub(super) stats_n2: Span,
}
