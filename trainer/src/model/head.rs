//! The final norm, the projection to the vocabulary with the token embedding's weights, and the loss.
//!
//! Logits are made for as many rows at a time as their span holds, and become their own gradients in place.

use std::ops::Range;

use super::Backward;
use super::activations::Activations;
use super::layer_norm::{Flow, LayerNorm};
use super::layout::{Finder, Tensor};
use super::shape::ModelShape;
use crate::ops::{Finish, Matrix, Ops, Product, Span, Start};

pub(super) struct Head {
    norm: LayerNorm,
    wte_vc: Tensor,
    channels: usize,
    vocabulary: usize,
}

impl Head {
    pub(super) fn new(find: &Finder<'_>, shape: &ModelShape) -> Self {
        Self {
            norm: LayerNorm::new(find, "ln_f"),
            wte_vc: find.tensor("wte.weight"),
            channels: shape.channels,
            vocabulary: shape.vocabulary,
        }
    }

    /// The final norm of all rows.
    pub(super) fn norm(&self, ops: &mut impl Ops, activations: &Activations, rows: usize) {
        let btc = |span: Span| span.first(rows * self.channels);
        self.norm.forward(
            ops,
            btc(activations.normed_btc),
            activations.last_stats_bt2.first(rows * 2),
            btc(activations.last_btc),
        );
    }

    /// Logits of `rows`, which the span for logits must hold.
    pub(super) fn logits(&self, ops: &mut impl Ops, activations: &Activations, rows: Range<usize>) -> Span {
        let logits = activations.logits.first(rows.len() * self.vocabulary);
        ops.product(Product {
            out: logits.matrix(rows.len(), self.vocabulary),
            left: self.rows_of(activations.normed_btc, &rows),
            right: self.wte_vc.value.matrix(self.vocabulary, self.channels).transpose(),
            start: Start::Zero,
            finish: Finish::Keep,
        });
        logits
    }

    /// Losses of all rows.
    pub(super) fn loss(&self, ops: &mut impl Ops, activations: &Activations, targets_bt: &[u32]) {
        for rows in chunks(targets_bt.len(), activations.logits_rows) {
            let logits = self.logits(ops, activations, rows.clone());
            let losses = activations.losses.slice(rows.clone());
            ops.cross_entropy(losses, logits, &targets_bt[rows], None);
        }
    }

    /// Losses of all rows, gradients of the norm and of the token embedding, and the beginning of the residual
    /// stream's gradient.
    pub(super) fn backward(
        &self,
        ops: &mut impl Ops,
        activations: &Activations,
        targets_bt: &[u32],
        backward: Backward,
    ) {
        let count = targets_bt.len();
        let scale = backward.scale / count as f64;
        for rows in chunks(count, activations.logits_rows) {
            let logits = self.logits(ops, activations, rows.clone());
            let losses = activations.losses.slice(rows.clone());
            ops.cross_entropy(losses, logits, &targets_bt[rows.clone()], Some(scale));
            let dlogits = logits.matrix(rows.len(), self.vocabulary);
            let first = rows.start == 0 && !backward.accumulate;
            ops.product(Product {
                out: self.wte_vc.gradient.matrix(self.vocabulary, self.channels),
                left: dlogits.transpose(),
                right: self.rows_of(activations.normed_btc, &rows),
                start: if first { Start::Zero } else { Start::Accumulate },
                finish: Finish::Keep,
            });
            ops.product(Product {
                out: self.rows_of(activations.dbranch_btc, &rows),
                left: dlogits,
                right: self.wte_vc.value.matrix(self.vocabulary, self.channels),
                start: Start::Zero,
                finish: Finish::Keep,
            });
        }
        let btc = |span: Span| span.first(count * self.channels);
        let flow = Flow {
            dx_nc: btc(activations.dresidual_btc),
            accumulate_dx: false,
            dout_nc: btc(activations.dbranch_btc),
            x_nc: btc(activations.last_btc),
            stats_n2: activations.last_stats_bt2.first(count * 2),
        };
        self.norm.backward(ops, flow, backward.accumulate);
    }

    /// End of the gradients that are final after [`Head::backward`]: the norm's. The token embedding's still grow.
    pub(super) fn end(&self) -> usize {
        self.norm.end()
    }

    fn rows_of(&self, span: Span, rows: &Range<usize>) -> Matrix {
        span.slice(rows.start * self.channels..rows.end * self.channels).matrix(rows.len(), self.channels)
    }
}

fn chunks(count: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..count).step_by(size).map(move |start| start..count.min(start + size))
}
