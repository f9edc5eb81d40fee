//! Where each parameter lies in the flat buffer of all parameters.
//!
//! Invariants:
//! - Gradients, and an optimizer's moments, have the same layout as the parameters.
//! - Tensors follow each other without gaps, in the order in which the backward pass finishes their gradients: final
//!   norm, blocks from the last to the first (each: MLP, its norm, attention, its norm), position embedding, token
//!   embedding. So at any moment of the backward pass the finished gradients are one range that starts at 0.
//! - Names and shapes are those of GPT-2 in the Hugging Face format: weights of linear layers are (inputs, outputs).

use std::ops::Range;

use super::shape::ModelShape;
use crate::ops::Span;

/// How a parameter starts out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Initial {
    /// All the same value.
    Constant(f64),
    /// Normal with mean 0 and this deviation.
    Normal(f64),
}

/// One tensor of the model.
#[derive(Debug, Clone, PartialEq)]
pub struct Parameter {
    /// Global name, the same at any number of ranks.
    pub name: String,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// Elements in the flat buffer.
    pub range: Range<usize>,
    /// Whether weight decay applies: to matrices other than the position embedding.
    pub decayed: bool,
    /// How it starts out.
    pub initial: Initial,
}

/// All parameters in the order of their ranges.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterLayout {
    parameters: Vec<Parameter>,
}

const DEVIATION: f64 = 0.02;

impl ParameterLayout {
    /// The layout for `shape`.
    pub fn new(shape: &ModelShape) -> Self {
        let mut layout = Self { parameters: Vec::with_capacity(4 + 12 * shape.layers) };
        let (c, f) = (shape.channels, shape.feed_forward());
        // Each block adds twice to the residual stream; GPT-2 scales those projections so that the sum's variance
        // does not grow with depth.
        let projection = Initial::Normal(DEVIATION / (2.0 * shape.layers as f64).sqrt());
        layout.norm("ln_f", c);
        for i in (0..shape.layers).rev() {
            layout.linear(&format!("h.{i}.mlp.c_proj"), f, c, projection);
            layout.linear(&format!("h.{i}.mlp.c_fc"), c, f, Initial::Normal(DEVIATION));
            layout.norm(&format!("h.{i}.ln_2"), c);
            layout.linear(&format!("h.{i}.attn.c_proj"), c, c, projection);
            layout.linear(&format!("h.{i}.attn.c_attn"), c, 3 * c, Initial::Normal(DEVIATION));
            layout.norm(&format!("h.{i}.ln_1"), c);
        }
        let embedding = Initial::Normal(DEVIATION);
        layout.push("wpe.weight".to_owned(), vec![shape.context, c], false, embedding);
        layout.push("wte.weight".to_owned(), vec![shape.vocabulary, c], true, embedding);
        layout
    }

    fn norm(&mut self, name: &str, channels: usize) {
        self.push(format!("{name}.weight"), vec![channels], false, Initial::Constant(1.0));
        self.push(format!("{name}.bias"), vec![channels], false, Initial::Constant(0.0));
    }

    fn linear(&mut self, name: &str, inputs: usize, outputs: usize, initial: Initial) {
        self.push(format!("{name}.weight"), vec![inputs, outputs], true, initial);
        self.push(format!("{name}.bias"), vec![outputs], false, Initial::Constant(0.0));
    }

    fn push(&mut self, name: String, shape: Vec<usize>, decayed: bool, initial: Initial) {
        let start = self.elements();
        let range = start..start + shape.iter().product::<usize>();
        self.parameters.push(Parameter { name, shape, range, decayed, initial });
    }

    /// Elements of all parameters together.
    pub fn elements(&self) -> usize {
        self.parameters.last().map_or(0, |last| last.range.end)
    }

    /// The parameters, in the order of their ranges.
    pub fn iter(&self) -> impl Iterator<Item = &Parameter> {
        self.parameters.iter()
    }

    /// The parameter of that name.
    pub fn find(&self, name: &str) -> Option<&Parameter> {
        self.parameters.iter().find(|parameter| parameter.name == name)
    }

    /// The parts of `range` that lie in one parameter each, in order.
    pub fn within(&self, range: Range<usize>) -> impl Iterator<Item = (&Parameter, Range<usize>)> {
        let first = self.parameters.partition_point(|parameter| parameter.range.end <= range.start);
        self.parameters[first..].iter().take_while(move |parameter| parameter.range.start < range.end).map(
            move |parameter| {
                let start = parameter.range.start.max(range.start);
                (parameter, start..parameter.range.end.min(range.end))
            },
        )
    }
}

/// A parameter's place in the buffers of values and of gradients.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tensor {
    pub(super) value: Span,
    pub(super) gradient: Span,
}

/// Finds parameters in the buffers that hold them.
pub(super) struct Finder<'a> {
    pub(super) layout: &'a ParameterLayout,
    pub(super) parameters: Span,
    pub(super) gradients: Span,
}

impl Finder<'_> {
    /// # Panics
    /// When the layout has no such name: layers and layout are written to agree.
    pub(super) fn tensor(&self, name: &str) -> Tensor {
        let Some(parameter) = self.layout.find(name) else {
            panic!("the layout has no {name}");
        };
        Tensor {
            value: self.parameters.slice(parameter.range.clone()),
            gradient: self.gradients.slice(parameter.range.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> ModelShape {
        ModelShape { layers: 2, heads: 2, channels: 4, context: 3, vocabulary: 5 }
    }

    #[test]
    fn is_contiguous_and_counts_every_parameter() {
        let layout = ParameterLayout::new(&shape());
        let mut end = 0;
        for parameter in layout.iter() {
            assert_eq!(parameter.range.start, end, "{}", parameter.name);
            end = parameter.range.end;
        }
        let (c, block) = (4, 12 * 16 + 13 * 4);
        assert_eq!(layout.elements(), 2 * block + 2 * c + 3 * c + 5 * c);
        assert_eq!(layout.iter().count(), 4 + 2 * 12);
    }

    #[test]
    fn only_matrices_that_multiply_are_decayed() {
        for parameter in ParameterLayout::new(&shape()).iter() {
            let expect = parameter.shape.len() == 2 && parameter.name != "wpe.weight";
            assert_eq!(parameter.decayed, expect, "{}", parameter.name);
        }
    }

    #[test]
    fn parts_cover_a_range() {
        let layout = ParameterLayout::new(&shape());
        for range in [0..0, 0..1, 3..9, 7..200, 0..layout.elements()] {
            let mut end = range.start;
            for (parameter, part) in layout.within(range.clone()) {
                assert_eq!(part.start, end);
                assert!(parameter.range.start <= part.start && part.end <= parameter.range.end);
                end = part.end;
            }
            assert_eq!(end, range.end);
        }
    }
}
