//! The operations a model is written in, and the memory they work on.
//!
//! Responsible for: the [`Ops`] interface, and the handles ([`Buffer`], [`Span`], [`Matrix`]) that name memory without
//! pointing at it. [`cpu`] is the reference implementation.
//!
//! Deliberately left out: which operation follows which (that is [`crate::model`]), automatic differentiation, shape
//! inference and broadcasting. Every operation has its backward counterpart written out.
//!
//! Legend for names: B sequences of a batch, T tokens of a sequence, C channels, H heads, D channels of a head (C / H),
//! F width of the feed-forward layer, V vocabulary. `x_btc` is a row-major array with T*C elements to a step in B.
//!
//! Invariants:
//! - An implementation owns its memory. Callers hold handles, so outputs and inputs may lie in the same buffer, and a
//!   handle means the same for a `Vec` and for a device pointer.
//! - An operation's outputs overlap none of its inputs and none of each other, unless its documentation says "in place".
//! - Operations are enqueued and run in order. Only [`Ops::download`], [`Ops::sum_of_squares`] and
//!   [`Ops::synchronise`] wait.
//! - No operation allocates. Memory comes from [`Ops::allocate`] alone, before the first step.

pub mod cpu;

use std::ops::Range;

/// A block of memory that an [`Ops`] owns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffer(pub(crate) u32);

impl Buffer {
    /// Of a span that is planned but has no memory yet.
    pub(crate) const UNPLACED: Self = Self(u32::MAX);
}

/// Consecutive elements of a [`Buffer`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The buffer.
    pub buffer: Buffer,
    /// Index of the first element.
    pub start: usize,
    /// Number of elements.
    pub len: usize,
}

impl Span {
    /// The part of this span at `range`, counted from the span's own start.
    ///
    /// # Panics
    /// When `range` ends beyond the span.
    pub fn slice(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of a span of {}", self.len);
        Self { buffer: self.buffer, start: self.start + range.start, len: range.len() }
    }

    /// The first `len` elements.
    pub fn first(self, len: usize) -> Self {
        self.slice(0..len)
    }

    /// Indices of the elements within the buffer.
    pub fn range(self) -> Range<usize> {
        self.start..self.start + self.len
    }

    /// The span as a row-major matrix that fills its beginning.
    pub fn matrix(self, rows: usize, columns: usize) -> Matrix {
        Matrix { span: self.first(rows * columns), rows, columns, transposed: false }
    }
}

/// A dense row-major matrix in a span, or its transpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matrix {
    /// Where the elements are.
    pub span: Span,
    /// Rows, after transposition if any.
    pub rows: usize,
    /// Columns, after transposition if any.
    pub columns: usize,
    /// True when element (row, column) is stored at `column * rows + row`.
    pub transposed: bool,
}

impl Matrix {
    /// The same elements with rows and columns exchanged.
    pub fn transpose(self) -> Self {
        Self { rows: self.columns, columns: self.rows, transposed: !self.transposed, ..self }
    }
}

/// What a matrix product is added to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Nothing.
    Zero,
    /// What the output holds already.
    Accumulate,
    /// A row that is the same for all rows.
    Bias(Span),
    /// A row that is the same for all rows, and a matrix of the output's shape.
    BiasAndResidual(Span, Span),
}

/// What happens to a finished matrix product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// Nothing.
    Keep,
    /// The product stays as it is, and GELU of it is written to this span as well.
    Gelu(Span),
    /// The product is multiplied, element by element, by this span.
    Multiply(Span),
}

/// `out = finish(start + left * right)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Product {
    /// Output; never transposed.
    pub out: Matrix,
    /// Left factor.
    pub left: Matrix,
    /// Right factor.
    pub right: Matrix,
    /// What the product is added to.
    pub start: Start,
    /// What happens to the sum.
    pub finish: Finish,
}

/// Sizes of a batch of sequences under attention. With heads split among ranks, `heads` is the rank's own number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// Sequences, B.
    pub sequences: usize,
    /// Tokens of a sequence, T.
    pub tokens: usize,
    /// Heads, H.
    pub heads: usize,
    /// Channels of a head, D.
    pub head_channels: usize,
}

/// Numbers of one AdamW update, the same for all its elements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWStep {
    /// Learning rate.
    pub learning_rate: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay; 0 for parameters that are not decayed.
    pub weight_decay: f64,
    /// `1 - beta1^step`.
    pub bias_correction1: f64,
    /// `1 - beta2^step`.
    pub bias_correction2: f64,
    /// What gradients are multiplied by first (clipping, mean over ranks).
    pub gradient_scale: f64,
}

/// Memory that could not be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "no memory for {purpose}: needed {needed} bytes; use a smaller batch, context or model, or fewer ranks on this machine"
)]
pub struct AllocateError {
    /// What it was for.
    pub purpose: &'static str,
    /// Bytes asked for.
    pub needed: u64,
}

/// A floating-point type on the host's side of an [`Ops`].
pub trait Real: Copy + Default + Send + Sync + 'static {
    /// Bytes of one element.
    const BYTES: u64 = size_of::<Self>() as u64;
    /// The nearest value to `value`.
    fn from_f64(value: f64) -> Self;
    /// The value, exactly.
    fn to_f64(self) -> f64;
}

impl Real for f32 {
    fn from_f64(value: f64) -> Self {
        value as Self
    }

    fn to_f64(self) -> f64 {
        self.into()
    }
}

impl Real for f64 {
    fn from_f64(value: f64) -> Self {
        value
    }

    fn to_f64(self) -> f64 {
        self
    }
}

/// The operations of a GPT-2 style decoder, forward and backward, and of its optimizer.
pub trait Ops {
    /// Type of elements on the host's side, and of parameters and gradients.
    type Element: Real;

    /// Memory for `len` elements, all 0.
    ///
    /// # Errors
    /// When there is not that much.
    fn allocate(&mut self, purpose: &'static str, len: usize) -> Result<Span, AllocateError>;

    /// Copies from the host.
    fn upload(&mut self, to: Span, from: &[Self::Element]);

    /// Copies to the host, after all operations enqueued before it.
    fn download(&mut self, to: &mut [Self::Element], from: Span);

    /// Waits until every operation enqueued has run.
    fn synchronise(&mut self);

    /// `out_btc[b, t] = wte_vc[tokens_bt[b, t]] + wpe_tc[t]`, with T tokens to a sequence. Tokens are the host's; an
    /// implementation with memory of its own stages them.
    fn embed(&mut self, out_btc: Span, wte_vc: Span, wpe_tc: Span, tokens_bt: &[u32], tokens: usize);

    /// Adds the gradient of [`Ops::embed`] to `dwte_vc`, and writes or adds it to `dwpe_tc`, whose rows from T on
    /// are 0.
    fn embed_backward(
        &mut self,
        dwte_vc: Span,
        dwpe_tc: Span,
        dout_btc: Span,
        tokens_bt: &[u32],
        tokens: usize,
        accumulate: bool,
    );

    /// Layer norm of each row of `x_nc`: `(x - mean) / sqrt(variance + 1e-5) * gain + bias`. `stats_n2` takes each row's
    /// mean and reciprocal deviation.
    fn layer_norm(&mut self, out_nc: Span, stats_n2: Span, x_nc: Span, gain_c: Span, bias_c: Span);

    /// [`Ops::layer_norm`] again, from the statistics it left.
    fn layer_norm_again(&mut self, out_nc: Span, stats_n2: Span, x_nc: Span, gain_c: Span, bias_c: Span);

    /// Gradient of [`Ops::layer_norm`].
    fn layer_norm_backward(&mut self, backward: LayerNormBackward);

    /// A matrix product.
    fn product(&mut self, product: Product);

    /// `out_c (+)= sum of the rows of x_nc`: the gradient of a bias.
    fn sum_rows(&mut self, out_c: Span, x_nc: Span, accumulate: bool);

    /// Writes GELU of `x` to `gelu` and replaces `x`, in place, by GELU's derivative at it.
    fn gelu_with_derivative(&mut self, gelu: Span, x: Span);

    /// Causal attention. `qkv_bt3c` holds queries, keys and values, each (H, D), for every token; `out_btc` is
    /// softmax(Q K^T / sqrt(D)) V by head; `stats_bht2` takes each query's largest product with a key, and the
    /// reciprocal of its softmax's denominator.
    fn attention(&mut self, out_btc: Span, stats_bht2: Span, qkv_bt3c: Span, shape: AttentionShape);

    /// Gradient of [`Ops::attention`].
    fn attention_backward(
        &mut self,
        dqkv_bt3c: Span,
        dout_btc: Span,
        out_btc: Span,
        stats_bht2: Span,
        qkv_bt3c: Span,
        shape: AttentionShape,
    );

    /// Cross-entropy in nats of each row of `logits_nv` against its target, to `losses_n`. With `gradient_scale`, the
    /// logits are replaced, in place, by their gradient times it.
    fn cross_entropy(
        &mut self,
        losses_n: Span,
        logits_nv: Span,
        targets_n: &[u32],
        gradient_scale: Option<f64>,
    );

    /// Sum of the squares, in a fixed order. Waits.
    fn sum_of_squares(&mut self, x: Span) -> f64;

    /// One AdamW update of `parameters` and of the moments, all in place.
    fn adamw(&mut self, parameters: Span, first: Span, second: Span, gradients: Span, step: &AdamWStep);
}

/// Operands of [`Ops::layer_norm_backward`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerNormBackward {
    /// Gradient of the input.
    pub dx_nc: Span,
    /// Whether `dx_nc` is added to (the residual stream) or written.
    pub accumulate_dx: bool,
    /// Gradient of the gain.
    pub dgain_c: Span,
    /// Gradient of the bias.
    pub dbias_c: Span,
    /// Whether the gradients of gain and bias are added to or written.
    pub accumulate: bool,
    /// Gradient of the output.
    pub dout_nc: Span,
    /// The input.
    pub x_nc: Span,
    /// Statistics left by the forward operation.
    pub stats_n2: Span,
    /// The gain.
    pub gain_c: Span,
}
