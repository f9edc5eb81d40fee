//! Where activations lie in their arena, planned once for the largest batch.
//!
//! What a block saves for its backward pass is what costs more to recompute than to keep: its two inputs, the
//! statistics of its norms, queries/keys/values, attention's output and the MLP before its GELU. Outputs of norms and of
//! GELU are made again. Everything else is scratch shared by all blocks.
//!
//! Invariant: spans are disjoint, but for `wide`, which holds one thing at a time.

use super::shape::ModelShape;
use crate::ops::{Buffer, Span};

/// Most elements of the logits that are in memory at once; fewer rows than the batch's are taken beyond that.
const MOST_LOGITS: usize = 16 << 20;

/// Starts of spans are multiples of this many elements, a cache line of f32.
const ALIGNMENT: usize = 16;

/// Activations that one block saves.
#[derive(Debug, Clone, Copy)]
pub(super) struct Saved {
    pub(super) input_btc: Span,
    pub(super) stats1_bt2: Span,
    pub(super) qkv_bt3c: Span,
    pub(super) softmax_bht2: Span,
    pub(super) attention_btc: Span,
    pub(super) middle_btc: Span,
    pub(super) stats2_bt2: Span,
    /// Before GELU; its derivative once the backward pass has been here.
    pub(super) hidden_btf: Span,
}

/// Spans of all activations.
#[derive(Debug, Clone)]
pub(super) struct Activations {
    pub(super) layers: Vec<Saved>,
    pub(super) last_btc: Span,
    pub(super) last_stats_bt2: Span,
    pub(super) normed_btc: Span,
    /// GELU's output, gradients of the hidden layer, or gradients of queries, keys and values.
    pub(super) wide: Span,
    /// Gradient of the residual stream.
    pub(super) dresidual_btc: Span,
    /// Gradient within a branch.
    pub(super) dbranch_btc: Span,
    pub(super) logits: Span,
    pub(super) logits_rows: usize,
    pub(super) losses: Span,
    uses: Vec<(&'static str, usize)>,
}

struct Planner {
    end: usize,
    uses: Vec<(&'static str, usize)>,
}

impl Planner {
    fn take(&mut self, purpose: &'static str, len: usize) -> Span {
        let start = self.end;
        self.end = (start + len).next_multiple_of(ALIGNMENT);
        match self.uses.iter_mut().find(|entry| entry.0 == purpose) {
            Some(entry) => entry.1 += self.end - start,
            None => self.uses.push((purpose, self.end - start)),
        }
        Span { buffer: Buffer::UNPLACED, start, len }
    }
}

impl Activations {
    /// The plan for `sequences` sequences of the whole context, and the number of elements that it needs.
    pub(super) fn plan(shape: &ModelShape, sequences: usize) -> (Self, usize) {
        let bt = sequences * shape.context;
        let (c, f, v) = (shape.channels, shape.feed_forward(), shape.vocabulary);
        let mut planner = Planner { end: 0, uses: Vec::new() };
        let mut take = |purpose, len| planner.take(purpose, len);
        let layers = (0..shape.layers)
            .map(|_| Saved {
                input_btc: take("residual stream", bt * c),
                stats1_bt2: take("norm statistics", bt * 2),
                qkv_bt3c: take("queries, keys, values", bt * 3 * c),
                softmax_bht2: take("softmax statistics", bt * shape.heads * 2),
                attention_btc: take("attention outputs", bt * c),
                middle_btc: take("residual stream", bt * c),
                stats2_bt2: take("norm statistics", bt * 2),
                hidden_btf: take("hidden layers", bt * f),
            })
            .collect();
        let logits_rows = (MOST_LOGITS / v).clamp(1, bt);
        let activations = Self {
            layers,
            last_btc: take("residual stream", bt * c),
            last_stats_bt2: take("norm statistics", bt * 2),
            normed_btc: take("scratch", bt * c),
            wide: take("scratch", bt * f.max(3 * c)),
            dresidual_btc: take("scratch", bt * c),
            dbranch_btc: take("scratch", bt * c),
            logits: take("logits", logits_rows * v),
            logits_rows,
            losses: take("losses", bt),
            uses: Vec::new(),
        };
        let Planner { end, uses } = planner;
        (Self { uses, ..activations }, end)
    }

    /// Elements by purpose, paddings included.
    pub(super) fn uses(&self) -> impl Iterator<Item = (&'static str, usize)> {
        self.uses.iter().copied()
    }

    /// The plan placed in `arena`.
    pub(super) fn within(mut self, arena: Span) -> Self {
        for span in self.spans_mut() {
            *span = arena.slice(span.range());
        }
        self
    }

    /// What the block `layer` reads, or the final norm for the number after the last.
    pub(super) fn residual(&self, layer: usize) -> Span {
        self.layers.get(layer).map_or(self.last_btc, |saved| saved.input_btc)
    }

    fn spans_mut(&mut self) -> impl Iterator<Item = &mut Span> {
        let saved = self.layers.iter_mut().flat_map(|saved| {
            [
                &mut saved.input_btc,
                &mut saved.stats1_bt2,
                &mut saved.qkv_bt3c,
                &mut saved.softmax_bht2,
                &mut saved.attention_btc,
                &mut saved.middle_btc,
                &mut saved.stats2_bt2,
                &mut saved.hidden_btf,
            ]
        });
        saved.chain([
            &mut self.last_btc,
            &mut self.last_stats_bt2,
            &mut self.normed_btc,
            &mut self.wide,
            &mut self.dresidual_btc,
            &mut self.dbranch_btc,
            &mut self.logits,
            &mut self.losses,
        ])
    }
}
