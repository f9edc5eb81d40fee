//! A GPT-2 style decoder with its forward and backward pass written out.
//!
//! Learned token and position embeddings; L blocks of layer norm, causal attention, residual, layer norm, MLP with
//! tanh-GELU, residual; a final layer norm; a head that shares the token embedding; cross-entropy.
//!
//! Responsible for the order of operations, for where parameters lie ([`layout`]), and for what every byte is used for
//! ([`memory`]). Deliberately left out: how an operation computes ([`crate::ops`]), the optimizer ([`crate::optim`]),
//! anything about other ranks: callers reduce gradients, told by a callback when a range of them is final.
//!
//! Names follow the legend in [`crate::ops`].

mod activations;
mod block;
mod embedding;
mod head;
pub mod init;
mod layer_norm;
pub mod layout;
mod linear;
pub mod memory;
pub mod shape;

use activations::Activations;
use block::Block;
use embedding::Embedding;
use head::Head;
pub use layout::{Parameter, ParameterLayout};
pub use memory::MemoryPlan;
pub use shape::ModelShape;

use crate::ops::cpu::{Cpu, Element};
use crate::ops::{AllocateError, AttentionShape, Ops, Real as _, Span};

/// Why a model cannot be made or cannot take a batch.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    /// A size of the model that must be positive is 0.
    #[error("{field} of the model is 0; needed is at least 1")]
    Zero {
        /// The size's name.
        field: &'static str,
    },
    /// Heads do not divide the channels.
    #[error("channels is {channels}; needed is a multiple of heads ({heads})")]
    Heads {
        /// Channels found.
        channels: usize,
        /// Heads found.
        heads: usize,
    },
    /// Memory ran out.
    #[error(transparent)]
    Allocate(#[from] AllocateError),
    /// The batch does not have the shape planned for.
    #[error(
        "a batch of {tokens} tokens and {targets} targets in {sequences} sequences; needed are as many targets as tokens, \
         in equal sequences of at most {context} tokens, and at most {planned} tokens in all"
    )]
    Batch {
        /// Tokens found.
        tokens: usize,
        /// Targets found.
        targets: usize,
        /// Sequences found.
        sequences: usize,
        /// Longest sequence.
        context: usize,
        /// Most tokens that memory was planned for.
        planned: usize,
    },
    /// A token is outside the vocabulary.
    #[error(
        "token {found} at position {position} of the batch; needed is below the vocabulary's size, {vocabulary}"
    )]
    Token {
        /// Index in the batch.
        position: usize,
        /// The token.
        found: u32,
        /// Size of the vocabulary.
        vocabulary: usize,
    },
}

/// Input of a forward pass: `sequences` sequences of equal length, one after the other.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// Tokens, (B, T).
    pub tokens: &'a [u32],
    /// The token to be predicted at each place, (B, T).
    pub targets: &'a [u32],
    /// B.
    pub sequences: usize,
}

/// What a backward pass does with its gradients.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Backward {
    /// Gradients are those of the mean loss times this: 1 / micro-batches of the step, and a loss scale if any.
    pub scale: f64,
    /// Whether gradients are added to what is there (every micro-batch of a step but the first) or replace it.
    pub accumulate: bool,
}

/// Told, in order, which part of the flat gradient buffer has become final. The spans of one backward pass follow each
/// other from element 0 to the last. Work enqueued on them runs after the operations that made them.
pub type OnReady<'a, O> = &'a mut dyn FnMut(&mut O, Span);

/// A model and the memory for batches up to a planned size.
pub struct Model<O: Ops> {
    /// Where its memory is and its operations run.
    pub ops: O,
    shape: ModelShape,
    pub(crate) layout: ParameterLayout,
    plan: MemoryPlan,
    planned_tokens: usize,
    parameters: Span,
    gradients: Span,
    embedding: Embedding,
    blocks: Vec<Block>,
    head: Head,
    activations: Activations,
    losses: Vec<O::Element>,
}

impl<O: Ops> Model<O> {
    /// A model of `shape` with all parameters 0, and memory for batches of up to `sequences` sequences of
    /// `shape.context` tokens.
    ///
    /// # Errors
    /// When the shape is not a model's, or memory runs out.
    pub fn new(mut ops: O, shape: ModelShape, sequences: usize) -> Result<Self, ModelError> {
        check_shape(&shape, sequences)?;
        let layout = ParameterLayout::new(&shape);
        let elements = layout.elements();
        let parameters = ops.allocate("parameters", elements)?;
        let gradients = ops.allocate("gradients", elements)?;
        let planned_tokens = sequences * shape.context;
        let (activations, arena) = Activations::plan(&shape, sequences);
        let activations = activations.within(ops.allocate("activations", arena)?);
        let plan = Self::memory_plan_of(&shape, sequences);
        let find = layout::Finder { layout: &layout, parameters, gradients };
        Ok(Self {
            embedding: Embedding::new(&find),
            blocks: (0..shape.layers).map(|layer| Block::new(&find, &shape, layer)).collect(),
            head: Head::new(&find, &shape),
            losses: vec![O::Element::default(); planned_tokens],
            ops,
            shape,
            layout,
            plan,
            planned_tokens,
            parameters,
            gradients,
            activations,
        })
    }

    /// The memory that [`Model::new`] allocates through its operations, without allocating it.
    pub fn memory_plan_of(shape: &ModelShape, sequences: usize) -> MemoryPlan {
        let elements = ParameterLayout::new(shape).elements() as u64;
        let mut plan = MemoryPlan::default();
        plan.add("parameters", elements * O::Element::BYTES);
        plan.add("gradients", elements * O::Element::BYTES);
        for (purpose, elements) in Activations::plan(shape, sequences).0.uses() {
            plan.add(purpose, elements as u64 * O::Element::BYTES);
        }
        plan
    }

    /// The model's shape.
    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// Where each parameter lies in [`Model::parameters`], and its gradient in [`Model::gradients`].
    pub fn layout(&self) -> &ParameterLayout {
        &self.layout
    }

    /// The memory in use, by purpose.
    pub fn memory_plan(&self) -> &MemoryPlan {
        &self.plan
    }

    /// The flat buffer of all parameters.
    pub fn parameters(&self) -> Span {
        self.parameters
    }

    /// The flat buffer of all gradients.
    pub fn gradients(&self) -> Span {
        self.gradients
    }

    /// Draws the initial parameters from `seed`.
    pub fn init(&mut self, seed: u64) {
        let mut chunk = Vec::with_capacity(init::CHUNK);
        for parameter in self.layout.iter() {
            let generator = init::Generator::new(seed, parameter);
            let mut start = 0;
            while start < parameter.range.len() {
                let len = init::CHUNK.min(parameter.range.len() - start);
                chunk.clear();
                chunk.extend(
                    (start..start + len).map(|index| O::Element::from_f64(generator.value(index as u64))),
                );
                let at = parameter.range.start + start;
                self.ops.upload(self.parameters.slice(at..at + len), &chunk);
                start += len;
            }
        }
    }

    /// Mean loss of `batch` in nats, and the gradients of it. With `on_ready`, which only the last micro-batch of a step
    /// passes, announces each part of the gradients as soon as it is final.
    ///
    /// # Errors
    /// When the batch has the wrong shape or a token outside the vocabulary; nothing has changed then.
    pub fn forward_backward(
        &mut self,
        batch: Batch<'_>,
        backward: Backward,
        on_ready: Option<OnReady<'_, O>>,
    ) -> Result<f64, ModelError> {
        let shape = self.check(batch)?;
        self.forward(batch.tokens, shape);
        self.backward(batch, shape, backward, on_ready);
        Ok(self.mean_loss(batch.tokens.len()))
    }

    /// Mean loss of `batch` in nats.
    ///
    /// # Errors
    /// When the batch has the wrong shape or a token outside the vocabulary.
    pub fn loss(&mut self, batch: Batch<'_>) -> Result<f64, ModelError> {
        let shape = self.check(batch)?;
        self.forward(batch.tokens, shape);
        self.head.loss(&mut self.ops, &self.activations, batch.targets);
        Ok(self.mean_loss(batch.tokens.len()))
    }

    /// Logits, (V), of the token that follows `tokens`, which are one sequence of at most the model's context.
    ///
    /// # Errors
    /// When there are no or too many tokens, or one is outside the vocabulary.
    pub fn logits_last(&mut self, tokens: &[u32], logits_v: &mut [O::Element]) -> Result<(), ModelError> {
        let shape = self.check(Batch { tokens, targets: tokens, sequences: 1 })?;
        self.forward(tokens, shape);
        let last = tokens.len() - 1;
        let logits = self.head.logits(&mut self.ops, &self.activations, last..last + 1);
        self.ops.download(logits_v, logits);
        Ok(())
    }

    fn check(&self, batch: Batch<'_>) -> Result<AttentionShape, ModelError> {
        let (count, sequences) = (batch.tokens.len(), batch.sequences);
        let fits = sequences > 0
            && count > 0
            && batch.targets.len() == count
            && count.is_multiple_of(sequences)
            && count / sequences <= self.shape.context
            && count <= self.planned_tokens;
        if !fits {
            return Err(ModelError::Batch {
                tokens: count,
                targets: batch.targets.len(),
                sequences,
                context: self.shape.context,
                planned: self.planned_tokens,
            });
        }
        for tokens in [batch.tokens, batch.targets] {
            if let Some(position) = tokens.iter().position(|&token| token as usize >= self.shape.vocabulary) {
                return Err(ModelError::Token {
                    position,
                    found: tokens[position],
                    vocabulary: self.shape.vocabulary,
                });
            }
        }
        Ok(AttentionShape {
            sequences,
            tokens: count / sequences,
            heads: self.shape.heads,
            head_channels: self.shape.channels / self.shape.heads,
        })
    }

    fn forward(&mut self, tokens_bt: &[u32], shape: AttentionShape) {
        let (ops, activations) = (&mut self.ops, &self.activations);
        let rows = tokens_bt.len();
        let first = activations.residual(0);
        self.embedding.forward(ops, first, tokens_bt, shape.tokens, self.shape.channels);
        for (layer, block) in self.blocks.iter().enumerate() {
            block.forward(ops, activations, layer, shape);
        }
        self.head.norm(ops, activations, rows);
    }

    fn backward(
        &mut self,
        batch: Batch<'_>,
        shape: AttentionShape,
        backward: Backward,
        mut on_ready: Option<OnReady<'_, O>>,
    ) {
        let (ops, activations) = (&mut self.ops, &self.activations);
        let mut done = 0;
        let gradients = self.gradients;
        let mut announce = |ops: &mut O, end: usize| {
            if let Some(on_ready) = &mut on_ready {
                on_ready(ops, gradients.slice(done..end));
            }
            done = end;
        };
        self.head.backward(ops, activations, batch.targets, backward);
        announce(ops, self.head.end());
        for (layer, block) in self.blocks.iter().enumerate().rev() {
            block.backward_mlp(ops, activations, layer, shape, backward.accumulate);
            announce(ops, block.mlp_end());
            block.backward_attention(ops, activations, layer, shape, backward.accumulate);
            announce(ops, block.attention_end());
        }
        self.embedding.backward(
            ops,
            activations,
            batch.tokens,
            shape.tokens,
            self.shape.channels,
            backward.accumulate,
        );
        announce(ops, self.layout.elements());
    }

    fn mean_loss(&mut self, rows: usize) -> f64 {
        let losses = &mut self.losses[..rows];
        self.ops.download(losses, self.activations.losses.first(rows));
        losses.iter().map(|loss| loss.to_f64()).sum::<f64>() / rows as f64
    }
}

impl<E: Element> Model<Cpu<E>> {
    /// The parameters, to read.
    pub fn host_parameters(&self) -> &[E] {
        self.ops.host(self.parameters)
    }

    /// The parameters, to change.
    pub fn host_parameters_mut(&mut self) -> &mut [E] {
        self.ops.host_mut(self.parameters)
    }

    /// The gradients, to read.
    pub fn host_gradients(&self) -> &[E] {
        self.ops.host(self.gradients)
    }

    /// The gradients, to change: where a reduction over ranks writes its result.
    pub fn host_gradients_mut(&mut self) -> &mut [E] {
        self.ops.host_mut(self.gradients)
    }
}

fn check_shape(shape: &ModelShape, sequences: usize) -> Result<(), ModelError> {
    for (field, size) in [
        ("layers", shape.layers),
        ("heads", shape.heads),
        ("channels", shape.channels),
        ("context", shape.context),
        ("vocabulary", shape.vocabulary),
        ("batch", sequences),
    ] {
        if size == 0 {
            return Err(ModelError::Zero { field });
        }
    }
    if !shape.channels.is_multiple_of(shape.heads) {
        return Err(ModelError::Heads { channels: shape.channels, heads: shape.heads });
    }
    Ok(())
}
