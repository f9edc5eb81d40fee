//! A linear layer: `out = x W + b`, W stored as (inputs, outputs).
//!
//! Split among ranks, a layer keeps either a range of its outputs (then its input's gradient is a partial sum) or of its
//! inputs (then its output is): the sums are its caller's.

use super::layout::{Finder, Tensor};
use crate::ops::{Finish, Ops, Product, Span, Start};

pub(super) struct Linear {
    weight_io: Tensor,
    bias_o: Tensor,
    inputs: usize,
    outputs: usize,
}

impl Linear {
    pub(super) fn new(find: &Finder<'_>, name: &str, inputs: usize, outputs: usize) -> Self {
        Self {
            weight_io: find.tensor(&format!("{name}.weight")),
            bias_o: find.tensor(&format!("{name}.bias")),
            inputs,
            outputs,
        }
    }

    pub(super) fn forward(
        &self,
        ops: &mut impl Ops,
        out_no: Span,
        x_ni: Span,
        rows: usize,
        residual_no: Option<Span>,
        finish: Finish,
    ) {
        let bias = self.bias_o.value;
        ops.product(Product {
            out: out_no.matrix(rows, self.outputs),
            left: x_ni.matrix(rows, self.inputs),
            right: self.weight_io.value.matrix(self.inputs, self.outputs),
            start: residual_no.map_or(Start::Bias(bias), |residual| Start::BiasAndResidual(bias, residual)),
            finish,
        });
    }

    /// Gradients of weight and bias.
    pub(super) fn backward_parameters(
        &self,
        ops: &mut impl Ops,
        dout_no: Span,
        x_ni: Span,
        rows: usize,
        accumulate: bool,
    ) {
        ops.product(Product {
            out: self.weight_io.gradient.matrix(self.inputs, self.outputs),
            left: x_ni.matrix(rows, self.inputs).transpose(),
            right: dout_no.matrix(rows, self.outputs),
            start: if accumulate { Start::Accumulate } else { Start::Zero },
            finish: Finish::Keep,
        });
        ops.sum_rows(self.bias_o.gradient, dout_no.first(rows * self.outputs), accumulate);
    }

    /// Gradient of the input.
    pub(super) fn backward_input(
        &self,
        ops: &mut impl Ops,
        dx_ni: Span,
        dout_no: Span,
        rows: usize,
        finish: Finish,
    ) {
        ops.product(Product {
            out: dx_ni.matrix(rows, self.inputs),
            left: dout_no.matrix(rows, self.outputs),
            right: self.weight_io.value.matrix(self.inputs, self.outputs).transpose(),
            start: Start::Zero,
            finish,
        });
    }
}
