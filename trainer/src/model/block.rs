//! One block: `middle = input + attention(norm(input))`, `output = middle + mlp(norm(middle))`.
//!
//! Split among ranks, `heads` and `feed_forward` are the rank's own shares; its partial sums are reduced after each
//! branch's last layer going forward, and after each branch's first layer going backward. Nothing else changes.

use super::activations::Activations;
use super::layer_norm::{Flow, LayerNorm};
use super::layout::Finder;
use super::linear::Linear;
use super::shape::ModelShape;
use crate::ops::{AttentionShape, Finish, Ops, Span};

pub(super) struct Block {
    norm1: LayerNorm,
    /// Queries, keys and values.
    attention_in: Linear,
    attention_out: Linear,
    norm2: LayerNorm,
    mlp_in: Linear,
    mlp_out: Linear,
    channels: usize,
    feed_forward: usize,
}

impl Block {
    pub(super) fn new(find: &Finder<'_>, shape: &ModelShape, layer: usize) -> Self {
        let (c, f) = (shape.channels, shape.feed_forward());
        let name = |part: &str| format!("h.{layer}.{part}");
        Self {
            norm1: LayerNorm::new(find, &name("ln_1")),
            attention_in: Linear::new(find, &name("attn.c_attn"), c, 3 * c),
            attention_out: Linear::new(find, &name("attn.c_proj"), c, c),
            norm2: LayerNorm::new(find, &name("ln_2")),
            mlp_in: Linear::new(find, &name("mlp.c_fc"), c, f),
            mlp_out: Linear::new(find, &name("mlp.c_proj"), f, c),
            channels: c,
            feed_forward: f,
        }
    }

    pub(super) fn forward(
        &self,
        ops: &mut impl Ops,
        activations: &Activations,
        layer: usize,
        shape: AttentionShape,
    ) {
        let saved = &activations.layers[layer];
        let rows = shape.sequences * shape.tokens;
        let btc = |span: Span| span.first(rows * self.channels);
        let stats = |span: Span| span.first(rows * 2);
        let (normed, input, middle) =
            (btc(activations.normed_btc), btc(saved.input_btc), btc(saved.middle_btc));
        let qkv = saved.qkv_bt3c.first(rows * 3 * self.channels);
        let hidden = saved.hidden_btf.first(rows * self.feed_forward);
        let wide = activations.wide.first(rows * self.feed_forward);

        self.norm1.forward(ops, normed, stats(saved.stats1_bt2), input);
        self.attention_in.forward(ops, qkv, normed, rows, None, Finish::Keep);
        let attention = btc(saved.attention_btc);
        ops.attention(attention, saved.softmax_bht2.first(rows * shape.heads * 2), qkv, shape);
        self.attention_out.forward(ops, middle, attention, rows, Some(input), Finish::Keep);

        self.norm2.forward(ops, normed, stats(saved.stats2_bt2), middle);
        self.mlp_in.forward(ops, hidden, normed, rows, None, Finish::Gelu(wide));
        let output = btc(activations.residual(layer + 1));
        self.mlp_out.forward(ops, output, wide, rows, Some(middle), Finish::Keep);
    }

    /// From the gradient of the output in `dresidual_btc` to that of the middle.
    pub(super) fn backward_mlp(
        &self,
        ops: &mut impl Ops,
        activations: &Activations,
        layer: usize,
        shape: AttentionShape,
        accumulate: bool,
    ) {
        let saved = &activations.layers[layer];
        let rows = shape.sequences * shape.tokens;
        let btc = |span: Span| span.first(rows * self.channels);
        let (dresidual, dbranch) = (btc(activations.dresidual_btc), btc(activations.dbranch_btc));
        let (normed, middle) = (btc(activations.normed_btc), btc(saved.middle_btc));
        let stats = saved.stats2_bt2.first(rows * 2);
        let hidden = saved.hidden_btf.first(rows * self.feed_forward);
        let wide = activations.wide.first(rows * self.feed_forward);

        ops.gelu_with_derivative(wide, hidden);
        self.mlp_out.backward_parameters(ops, dresidual, wide, rows, accumulate);
        self.mlp_out.backward_input(ops, wide, dresidual, rows, Finish::Multiply(hidden));
        self.norm2.forward_again(ops, normed, stats, middle);
        self.mlp_in.backward_parameters(ops, wide, normed, rows, accumulate);
        self.mlp_in.backward_input(ops, dbranch, wide, rows, Finish::Keep);
        let flow =
            Flow { dx_nc: dresidual, accumulate_dx: true, dout_nc: dbranch, x_nc: middle, stats_n2: stats };
        self.norm2.backward(ops, flow, accumulate);
    }

    /// From the gradient of the middle in `dresidual_btc` to that of the input.
    pub(super) fn backward_attention(
        &self,
        ops: &mut impl Ops,
        activations: &Activations,
        layer: usize,
        shape: AttentionShape,
        accumulate: bool,
    ) {
        let saved = &activations.layers[layer];
        let rows = shape.sequences * shape.tokens;
        let btc = |span: Span| span.first(rows * self.channels);
        let (dresidual, dbranch) = (btc(activations.dresidual_btc), btc(activations.dbranch_btc));
        let (normed, input) = (btc(activations.normed_btc), btc(saved.input_btc));
        let (attention, stats) = (btc(saved.attention_btc), saved.stats1_bt2.first(rows * 2));
        let softmax = saved.softmax_bht2.first(rows * shape.heads * 2);
        let qkv = saved.qkv_bt3c.first(rows * 3 * self.channels);
        let dqkv = activations.wide.first(rows * 3 * self.channels);

        self.attention_out.backward_parameters(ops, dresidual, attention, rows, accumulate);
        self.attention_out.backward_input(ops, dbranch, dresidual, rows, Finish::Keep);
        ops.attention_backward(dqkv, dbranch, attention, softmax, qkv, shape);
        self.norm1.forward_again(ops, normed, stats, input);
        self.attention_in.backward_parameters(ops, dqkv, normed, rows, accumulate);
        self.attention_in.backward_input(ops, dbranch, dqkv, rows, Finish::Keep);
        let flow =
            Flow { dx_nc: dresidual, accumulate_dx: true, dout_nc: dbranch, x_nc: input, stats_n2: stats };
        self.norm1.backward(ops, flow, accumulate);
    }

    /// End of the gradients that [`Block::backward_mlp`] finishes.
    pub(super) fn mlp_end(&self) -> usize {
        self.norm2.end()
    }

    /// End of the gradients that [`Block::backward_attention`] finishes.
    pub(super) fn attention_end(&self) -> usize {
        self.norm1.end()
    }
}
