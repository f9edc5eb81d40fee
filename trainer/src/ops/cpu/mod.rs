//! The operations on this machine's processor: the reference implementation, and a fast one.
//!
//! f32 to train; f64 runs the same code, so that gradients can be checked against finite differences.
//!
//! Invariants:
//! - Results do not depend on the number of threads: the cut into pieces and the order of every sum are fixed.
//! - They depend on the instruction set only through fused multiply-add in matrix products, so any two x86-64 processors
//!   with AVX2 and FMA or better give the same f32.
//! - After an operation has run once with its largest sizes, it allocates nothing.

mod attention;
mod cross_entropy;
mod element;
mod embedding;
mod gelu;
mod gemm;
mod isa;
mod kernel;
mod layer_norm;
mod memory;
mod optimizer;
mod pool;

use std::sync::Mutex;

pub use element::Element;
use gemm::{Begin, End, Output, Scratch, Size, View, Workspace};
use isa::Available;
pub use isa::Isa;
use memory::Memory;
use pool::Pool;

use super::{
    AdamWStep, AllocateError, AttentionShape, Finish, LayerNormBackward, Matrix, Ops, Product, Span, Start,
};

/// Operations on this machine's processor.
pub struct Cpu<E> {
    memory: Memory<E>,
    pool: Pool,
    available: Available,
    workspaces: Vec<Mutex<Workspace>>,
    packed_right: Scratch,
    partials: Vec<f64>,
}

impl<E: Element> Cpu<E> {
    /// Operations by `threads` threads, the caller's among them, with the best instructions that the processor has.
    ///
    /// # Panics
    /// When `threads` is 0.
    pub fn new(threads: usize) -> Self {
        Self::with_isa(threads, Isa::best())
    }

    /// Operations with the instructions of `isa`.
    ///
    /// # Panics
    /// When `threads` is 0, or the processor does not have the instructions.
    pub fn with_isa(threads: usize, isa: Isa) -> Self {
        assert!(threads > 0, "operations need a thread");
        Self {
            memory: Memory::new(),
            pool: Pool::new(threads),
            available: Available::new(isa),
            workspaces: (0..threads).map(|_| Mutex::default()).collect(),
            packed_right: Scratch::default(),
            partials: Vec::new(),
        }
    }

    /// The elements of `span`, to read.
    pub fn host(&self, span: Span) -> &[E] {
        self.memory.read(span)
    }

    /// The elements of `span`, to change.
    pub fn host_mut(&mut self, span: Span) -> &mut [E] {
        self.memory.write(span)
    }
}

impl<E: Element> Ops for Cpu<E> {
    type Element = E;

    fn allocate(&mut self, purpose: &'static str, len: usize) -> Result<Span, AllocateError> {
        self.memory.allocate(purpose, len)
    }

    fn upload(&mut self, to: Span, from: &[E]) {
        self.host_mut(to).copy_from_slice(from);
    }

    fn download(&mut self, to: &mut [E], from: Span) {
        to.copy_from_slice(self.host(from));
    }

    /// Operations have run when they return.
    fn synchronise(&mut self) {}

    fn embed(&mut self, out_btc: Span, wte_vc: Span, wpe_tc: Span, tokens_bt: &[u32], tokens: usize) {
        let ([out], weights) = self.memory.split([out_btc], [wte_vc, wpe_tc]);
        embedding::forward(&self.pool, out, weights, tokens_bt, tokens);
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
        let ([dwte, dwpe], [dout]) = self.memory.split([dwte_vc, dwpe_tc], [dout_btc]);
        let channels = dout.len() / tokens_bt.len();
        embedding::backward_tokens(&self.pool, dwte, dout, tokens_bt);
        embedding::backward_positions(&self.pool, dwpe, dout, channels, tokens, accumulate);
    }

    fn layer_norm(&mut self, out_nc: Span, stats_n2: Span, x_nc: Span, gain_c: Span, bias_c: Span) {
        let (write, read) = self.memory.split([out_nc, stats_n2], [x_nc, gain_c, bias_c]);
        layer_norm::forward(self.available, &self.pool, write, read);
    }

    fn layer_norm_again(&mut self, out_nc: Span, stats_n2: Span, x_nc: Span, gain_c: Span, bias_c: Span) {
        let ([out], read) = self.memory.split([out_nc], [stats_n2, x_nc, gain_c, bias_c]);
        layer_norm::again(self.available, &self.pool, out, read);
    }

    fn layer_norm_backward(&mut self, backward: LayerNormBackward) {
        let LayerNormBackward {
            dx_nc,
            accumulate_dx,
            dgain_c,
            dbias_c,
            accumulate,
            dout_nc,
            x_nc,
            stats_n2,
            gain_c,
        } = backward;
        let ([dx, dgain, dbias], [dout, x, stats, gain]) =
            self.memory.split([dx_nc, dgain_c, dbias_c], [dout_nc, x_nc, stats_n2, gain_c]);
        if !accumulate {
            dgain.fill(E::ZERO);
            dbias.fill(E::ZERO);
        }
        layer_norm::backward_parameters(self.available, &self.pool, [dgain, dbias], [dout, x, stats]);
        let read = [dout, x, stats, gain];
        layer_norm::backward_input(self.available, &self.pool, dx, accumulate_dx, read);
    }

    fn product(&mut self, product: Product) {
        let Product { out, left, right, start, finish } = product;
        assert!(
            !out.transposed
                && (out.rows, out.columns) == (left.rows, right.columns)
                && left.columns == right.rows,
            "sizes of {product:?}"
        );
        // Spans that a product does not have are empty parts of its output, which overlap nothing.
        let none = out.span.first(0);
        let (bias, residual) = match start {
            Start::Zero | Start::Accumulate => (none, none),
            Start::Bias(bias) => (bias, none),
            Start::BiasAndResidual(bias, residual) => (bias, residual),
        };
        let (gelu, factor) = match finish {
            Finish::Keep => (none, none),
            Finish::Gelu(into) => (into, none),
            Finish::Multiply(by) => (none, by),
        };
        let ([out_slice, gelu], [left_slice, right_slice, bias, residual, factor]) =
            self.memory.split([out.span, gelu], [left.span, right.span, bias, residual, factor]);
        let elements = out.rows * out.columns;
        let begin = match start {
            Start::Zero => Begin::Zero,
            Start::Accumulate => Begin::Accumulate,
            Start::Bias(_) => Begin::Bias(&bias[..out.columns]),
            Start::BiasAndResidual(..) => Begin::BiasAndResidual(&bias[..out.columns], &residual[..elements]),
        };
        let whole_rows =
            |slice: &mut [E]| Output { start: slice[..elements].as_mut_ptr(), stride: out.columns };
        let end = match finish {
            Finish::Keep => End::Keep,
            Finish::Gelu(_) => End::Gelu(whole_rows(gelu)),
            Finish::Multiply(_) => End::Multiply(&factor[..elements]),
        };
        // SAFETY: spans have the sizes of their matrices, which agree as asserted, and outputs overlap nothing.
        unsafe {
            gemm::product(
                self.available,
                &self.pool,
                &self.workspaces,
                &mut self.packed_right,
                gemm::Multiplication {
                    size: Size { rows: out.rows, columns: out.columns, depth: left.columns },
                    left: view(left_slice, left),
                    right: view(right_slice, right),
                    out: whole_rows(out_slice),
                    accumulate: start == Start::Accumulate,
                },
                begin,
                end,
            );
        }
    }

    fn sum_rows(&mut self, out_c: Span, x_nc: Span, accumulate: bool) {
        let ([out], [x]) = self.memory.split([out_c], [x_nc]);
        if !accumulate {
            out.fill(E::ZERO);
        }
        layer_norm::sum_rows(self.available, &self.pool, out, x);
    }

    fn gelu_with_derivative(&mut self, gelu: Span, x: Span) {
        let ([gelu, x], []) = self.memory.split([gelu, x], []);
        gelu::with_derivative(self.available, &self.pool, gelu, x);
    }

    fn attention(&mut self, out_btc: Span, stats_bht2: Span, qkv_bt3c: Span, shape: AttentionShape) {
        check_attention(shape, [out_btc, stats_bht2, qkv_bt3c]);
        let (write, [qkv]) = self.memory.split([out_btc, stats_bht2], [qkv_bt3c]);
        attention::forward(self.available, &self.pool, &self.workspaces, write, qkv, shape);
    }

    fn attention_backward(
        &mut self,
        dqkv_bt3c: Span,
        dout_btc: Span,
        out_btc: Span,
        stats_bht2: Span,
        qkv_bt3c: Span,
        shape: AttentionShape,
    ) {
        check_attention(shape, [out_btc, stats_bht2, qkv_bt3c]);
        check_attention(shape, [dout_btc, stats_bht2, dqkv_bt3c]);
        let ([dqkv], read) = self.memory.split([dqkv_bt3c], [dout_btc, out_btc, stats_bht2, qkv_bt3c]);
        attention::backward(self.available, &self.pool, &self.workspaces, dqkv, read, shape);
    }

    fn cross_entropy(
        &mut self,
        losses_n: Span,
        logits_nv: Span,
        targets_n: &[u32],
        gradient_scale: Option<f64>,
    ) {
        let (write, []) = self.memory.split([losses_n, logits_nv], []);
        let scale = gradient_scale.map(E::from_f64);
        cross_entropy::cross_entropy(self.available, &self.pool, write, targets_n, scale);
    }

    fn sum_of_squares(&mut self, x: Span) -> f64 {
        let x = self.memory.read(x);
        optimizer::sum_of_squares(self.available, &self.pool, x, &mut self.partials)
    }

    fn adamw(&mut self, parameters: Span, first: Span, second: Span, gradients: Span, step: &AdamWStep) {
        let (write, [gradients]) = self.memory.split([parameters, first, second], [gradients]);
        optimizer::update(self.available, &self.pool, write, gradients, step);
    }
}

fn view<E>(slice: &[E], matrix: Matrix) -> View<E> {
    assert_eq!(slice.len(), matrix.rows * matrix.columns, "elements of {matrix:?}");
    let (row, column) = if matrix.transposed { (1, matrix.rows) } else { (matrix.columns, 1) };
    View { start: slice.as_ptr(), row, column }
}

/// # Panics
/// When output, statistics, or queries, keys and values do not have the shape's sizes.
fn check_attention(shape: AttentionShape, spans: [Span; 3]) {
    let rows = shape.sequences * shape.tokens * shape.heads;
    let d = shape.head_channels;
    assert_eq!(spans.map(|span| span.len), [rows * d, rows * 2, rows * 3 * d], "{shape:?}");
}
