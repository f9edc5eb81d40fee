//! The operations on this machine's processor: the reference implementation.
#![expect(clippy::todo, unused_variables, dead_code, reason = "kernels follow in the next commit")]

use super::{AdamWStep, AllocateError, AttentionShape, Buffer, LayerNormBackward, Ops, Product, Real, Span};

/// A floating-point type that the processor computes with.
pub trait Element: Real {}

impl Element for f32 {}
impl Element for f64 {}

/// Operations on this machine's processor.
pub struct Cpu<E> {
    threads: usize,
    buffers: Vec<Vec<E>>,
}

impl<E: Element> Cpu<E> {
    /// Operations by `threads` threads, the caller's among them. Results do not depend on their number.
    ///
    /// # Panics
    /// When `threads` is 0.
    pub fn new(threads: usize) -> Self {
        assert!(threads > 0, "an operation needs a thread");
        Self { threads, buffers: Vec::new() }
    }

    /// The elements of `span`, to read.
    pub fn host(&self, span: Span) -> &[E] {
        &self.buffers[span.buffer.0 as usize][span.range()]
    }

    /// The elements of `span`, to change.
    pub fn host_mut(&mut self, span: Span) -> &mut [E] {
        &mut self.buffers[span.buffer.0 as usize][span.range()]
    }
}

impl<E: Element> Ops for Cpu<E> {
    type Element = E;

    fn allocate(&mut self, purpose: &'static str, len: usize) -> Result<Span, AllocateError> {
        let buffer = Buffer(self.buffers.len() as u32);
        self.buffers.push(vec![E::default(); len]);
        Ok(Span { buffer, start: 0, len })
    }

    fn upload(&mut self, to: Span, from: &[E]) {
        self.host_mut(to).copy_from_slice(from);
    }

    fn download(&mut self, to: &mut [E], from: Span) {
        to.copy_from_slice(self.host(from));
    }

    fn synchronise(&mut self) {}

    fn embed(&mut self, out_btc: Span, wte_vc: Span, wpe_tc: Span, tokens_bt: &[u32], tokens: usize) {
        todo!()
    }

    fn embed_backward(
        &mut self,
        dwte_vc: Span,
        dwpe_tc: Span,
        dout_btc: Span,
        tokens_bt: &[u32],
        tokens: usize,
        accumulate: bool,
    ) {
        todo!()
    }

    fn layer_norm(&mut self, out_nc: Span, stats_n2: Span, x_nc: Span, gain_c: Span, bias_c: Span) {
        todo!()
    }

    fn layer_norm_again(&mut self, out_nc: Span, stats_n2: Span, x_nc: Span, gain_c: Span, bias_c: Span) {
        todo!()
    }

    fn layer_norm_backward(&mut self, backward: LayerNormBackward) {
        todo!()
    }

    fn product(&mut self, product: Product) {
        todo!()
    }

    fn sum_rows(&mut self, out_c: Span, x_nc: Span, accumulate: bool) {
        todo!()
    }

    fn gelu_with_derivative(&mut self, gelu: Span, x: Span) {
        todo!()
    }

    fn attention(&mut self, out_btc: Span, lse_bht: Span, qkv_bt3c: Span, shape: AttentionShape) {
        todo!()
    }

    fn attention_backward(
        &mut self,
        dqkv_bt3c: Span,
        dout_btc: Span,
        out_btc: Span,
        lse_bht: Span,
        qkv_bt3c: Span,
        shape: AttentionShape,
    ) {
        todo!()
    }

    fn cross_entropy(
        &mut self,
        losses_n: Span,
        logits_nv: Span,
        targets_n: &[u32],
        gradient_scale: Option<f64>,
    ) {
        todo!()
    }

    fn sum_of_squares(&mut self, x: Span) -> f64 {
        todo!()
    }

    fn adamw(&mut self, parameters: Span, first: Span, second: Span, gradients: Span, step: &AdamWStep) {
        todo!()
    }
}
